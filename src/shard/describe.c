/*
 * The shape of an engine in words. The order of axes is derived from the strides, not from the name of a layout.
 */
#include "shard/axes.h"

/* ---- the order ------------------------------------------------------------------------------- */

static void say_order(kvf_text *text, const kvf_shard *shard, uint32_t g) {
    kvf_axes all;
    kvf_range parts = {0, kvf_model_group(shard->model, g)->part_count};
    if (!kvf_axes_read(shard, g, kvf_shard_group_layers(shard, g), parts, &all)) {
        kvf_text_add(text, "irregular");
        return;
    }
    for (uint32_t i = 0; i < all.apart_count; i++)
        kvf_text_add(text, "%c", all.apart[i]);
    if (all.apart_count)
        kvf_text_add(text, "|");
    for (uint32_t i = 0; i < all.nested_count; i++)
        if (all.nested[i].letter != 'D')
            kvf_text_add(text, "%c", all.nested[i].letter);
}

/* ---- what the ranks hold --------------------------------------------------------------------- */

/* The fewest and the most that any rank holds. */
typedef struct extent {
    uint32_t fewest, most;
    bool known; /* there is a rank */
} extent;

static void widen(extent *e, uint32_t count) {
    e->fewest = !e->known || count < e->fewest ? count : e->fewest;
    e->most = count > e->most ? count : e->most;
    e->known = true;
}

/* Adds "2 a rank" if ranks hold less than all. */
static void say_share(kvf_text *text, extent e, uint32_t all) {
    if (e.fewest == all || e.most == 0)
        return;
    if (e.fewest == e.most)
        kvf_text_add(text, " (%u a rank)", e.most);
    else
        kvf_text_add(text, " (%u to %u a rank)", e.fewest, e.most);
}

static uint32_t range_size(kvf_range range) {
    return range.end - range.begin;
}

static void say_parts(kvf_text *text, const kvf_engine *engine, uint32_t g) {
    const kvf_group_desc *group = kvf_model_group(engine->model, g);
    for (uint32_t p = 0, next; p < group->part_count; p = next) {
        const kvf_part_desc *part = &group->parts[p];
        kvf_text_add(text, p ? ", " : "; ");
        for (next = p; next < group->part_count && kvf_same_cells(part, &group->parts[next]); next++)
            kvf_text_add(text, "%s ", group->parts[next].name);
        if (part->units > 1) {
            kvf_text_add(text, "%u ", part->units);
            kvf_say_units(text, group, part, part->units);
            kvf_text_add(text, " x ");
        }
        if (part->rows_per_step > 1)
            kvf_text_add(text, "%u rows x ", part->rows_per_step);
        kvf_text_add(text, "%u %s", part->cell_elements, kvf_dtype_name(part->dtype));
        extent units = {0};
        for (uint32_t r = 0; r < engine->shard_count; r++)
            if (range_size(kvf_shard_group_layers(engine->shards[r], g)) > 0)
                widen(&units, range_size(engine->shards[r]->groups[g].parts[p].units));
        say_share(text, units, part->units);
    }
}

static void say_blocks(kvf_text *text, const kvf_engine *engine, uint32_t g, const kvf_shard *holder) {
    const kvf_engine_group *agreed = &engine->groups[g];
    const kvf_group_desc *group = kvf_model_group(engine->model, g);
    const uint32_t tokens = agreed->steps_per_block * group->tokens_per_step;
    kvf_text_add(text, "; %llu block%s of ", (unsigned long long)agreed->block_count,
                 agreed->block_count == 1 ? "" : "s");
    if (group->kind == KVF_GROUP_STATE)
        kvf_text_add(text, "a state");
    else
        kvf_text_add(text, "%u token%s", tokens, tokens == 1 ? "" : "s");
    if (agreed->kernel_blocks_per_block > 1)
        kvf_text_add(text, " in %u kernel blocks", agreed->kernel_blocks_per_block);
    if (agreed->share_count > 1)
        kvf_text_add(text, ", tokens shared by %u ranks", agreed->share_count);
    if (agreed->share_count > 1 && agreed->share_width * group->tokens_per_step > 1)
        kvf_text_add(text, ", %u together", agreed->share_width * group->tokens_per_step);
    kvf_text_add(text, "; order ");
    say_order(text, holder, g);
}

static void say_group(kvf_text *text, const kvf_engine *engine, uint32_t g) {
    const kvf_group_desc *group = kvf_model_group(engine->model, g);
    const kvf_shard *holder = NULL;
    extent layers = {0};
    for (uint32_t r = 0; r < engine->shard_count; r++) {
        uint32_t held = range_size(kvf_shard_group_layers(engine->shards[r], g));
        if (held > 0 && !holder)
            holder = engine->shards[r];
        if (held > 0)
            widen(&layers, held);
    }
    kvf_text_add(text, "%s: layers ", group->name);
    kvf_say_layers(text, group, (kvf_range){0, group->layer_count});
    say_share(text, layers, group->layer_count);
    if (group->window_tokens)
        kvf_text_add(text, ", window of %u tokens", group->window_tokens);
    if (group->chunk_tokens)
        kvf_text_add(text, ", chunks of %u tokens", group->chunk_tokens);
    if (group->tokens_per_step > 1)
        kvf_text_add(text, ", an entry for %u tokens", group->tokens_per_step);
    say_parts(text, engine, g);
    if (holder)
        say_blocks(text, engine, g, holder);
    else
        kvf_text_add(text, "; no rank holds it");
    kvf_text_add(text, "\n");
}

void kvf_say_engine(kvf_text *text, const kvf_engine *engine, const char *indent) {
    const kvf_shard_desc *first = &engine->shards[0]->desc;
    kvf_text_add(text, "%s%s: %u rank%s", indent, engine->name, engine->shard_count,
                 engine->shard_count == 1 ? "" : "s");
    if (first->tp_size > 1)
        kvf_text_add(text, ", tp %u", first->tp_size);
    if (first->pp_size > 1)
        kvf_text_add(text, ", pp %u", first->pp_size);
    kvf_text_add(text, "\n");
    for (uint32_t g = 0; g < kvf_model_group_count(engine->model); g++) {
        kvf_text_add(text, "%s  ", indent);
        say_group(text, engine, g);
    }
}

kvf_status kvf_engine_describe(const kvf_engine *engine, char *text, size_t text_bytes, size_t *length) {
    if (!engine || (!text && text_bytes))
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !engine ? "engine" : "text");
    kvf_text words = {0};
    kvf_say_engine(&words, engine, "");
    return kvf_text_give(&words, text, text_bytes, length);
}
