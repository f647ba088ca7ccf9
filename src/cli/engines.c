#include "engines.h"

#include <stdio.h>

#include "folding.h"
#include "json.h"
#include "regions.h"
#include "shape_types.h"
#include "shared_pages.h"
#include "text.h"

int engines_read(const options *asked, engines *out) {
    *out = (engines){0};
    int result = options_load_model(asked, &out->model);
    if (!result && asked->prefill)
        result = shape_parse("prefill", asked->prefill, out->model, &out->prefill_shape);
    if (!result && asked->decode)
        result = shape_parse("decode", asked->decode, out->model, &out->decode_shape);
    out->convert = out->prefill_shape.retyped || out->decode_shape.retyped ? SHAPE_CONVERTED : 0;
    return result;
}

int engines_build(engines *all) {
    kvf_engine_free(all->prefill);
    kvf_engine_free(all->decode);
    all->prefill = all->decode = NULL;
    int result = EXIT_DONE;
    if (all->prefill_shape.groups)
        result = shape_build(&all->prefill_shape, all->model, &all->prefill);
    if (!result && all->decode_shape.groups)
        result = shape_build(&all->decode_shape, all->model, &all->decode);
    return result;
}

void engines_free(engines *all) {
    kvf_engine_free(all->decode);
    kvf_engine_free(all->prefill);
    shape_free(&all->decode_shape);
    shape_free(&all->prefill_shape);
    kvf_model_free(all->model);
    *all = (engines){0};
}

uint64_t engine_bytes(const kvf_engine *engine) {
    uint64_t bytes = 0;
    for (uint32_t rank = 0; engine && rank < kvf_engine_rank_count(engine); rank++) {
        const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(engine, rank));
        for (uint32_t region = 0; region < shard->region_count; region++)
            bytes += shard->region_bytes[region];
    }
    return bytes;
}

/* "; full 32 x (k 8 x 128 bf16, v 8 x 128 bf16)" of each group. */
static void describe_model(const kvf_model *model, char *out, size_t bytes) {
    size_t length =
        (size_t)snprintf(out, bytes, "%s, %u layers", kvf_model_name(model), kvf_model_layer_count(model));
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        for (uint32_t p = 0; p < group->part_count && length < bytes; p++) {
            const kvf_part_desc *part = &group->parts[p];
            char begin[160];
            (void)snprintf(begin, sizeof begin, "; %s %u x (", group->name, group->layer_count);
            length += (size_t)snprintf(out + length, bytes - length, "%s%s %u x %u %s%s", p ? ", " : begin,
                                       part->name, part->units, part->cell_elements,
                                       kvf_dtype_name(part->dtype), p + 1 == group->part_count ? ")" : "");
        }
        if (group->window_tokens && length < bytes)
            length += (size_t)snprintf(out + length, bytes - length, " window %u", group->window_tokens);
        if (group->chunk_tokens && length < bytes)
            length += (size_t)snprintf(out + length, bytes - length, " chunks of %u", group->chunk_tokens);
        if (group->tokens_per_step > 1 && length < bytes)
            length += (size_t)snprintf(out + length, bytes - length, " with an entry for %u tokens",
                                       group->tokens_per_step);
    }
}

static void print_model(const kvf_model *model) {
    char words[1024];
    describe_model(model, words, sizeof words);
    print_labelled("model", "%s", words);
}

static void print_engine(const engine_shape *shape, const kvf_engine *engine) {
    const kvf_model *model = kvf_engine_model(engine);
    uint32_t ranks = kvf_engine_rank_count(engine);
    char groups[256], stages[256], pages[64] = "", pp[320] = "", dcp[64] = "", words[1024];
    shape_describe_groups(shape, model, groups, sizeof groups);
    shape_describe_stages(shape, engine, stages, sizeof stages);
    if (shape->pp > 1)
        (void)snprintf(pp, sizeof pp, ", pp %u%s%s%s", shape->pp, stages[0] ? " (" : "", stages,
                       stages[0] ? " layers)" : "");
    if (shape->dcp > 1)
        (void)snprintf(dcp, sizeof dcp, ", dcp %u", shape->dcp);
    if (shape->dcp > 1 && shape->dcp_width > 1)
        (void)snprintf(dcp, sizeof dcp, ", dcp %u by %u tokens", shape->dcp, shape->dcp_width);
    if (shape->share_pages)
        (void)snprintf(pages, sizeof pages, ", shared pages of %llu bytes",
                       (unsigned long long)shared_page_bytes(shape));
    (void)snprintf(words, sizeof words, "%u rank%s: tp %u%s%s%s; tokens a block and order: %s", ranks,
                   ranks == 1 ? "" : "s", shape->tp, pp, dcp, pages, groups);
    print_labelled(shape->side, "%s", words);
}

void engines_print(const engines *all) {
    print_model(all->model);
    if (all->prefill)
        print_engine(&all->prefill_shape, all->prefill);
    if (all->decode)
        print_engine(&all->decode_shape, all->decode);
}

bool engines_print_regions(const kvf_engine *prefill, const kvf_engine *decode) {
    table list;
    printf("\nMemory of the first rank of each side, as registered; strides with --json\n\n");
    regions_start(&list);
    if (prefill)
        regions_add(&list, "prefill", kvf_engine_shard(prefill, 0));
    if (decode)
        regions_add(&list, "decode", kvf_engine_shard(decode, 0));
    return table_print(&list, 0);
}

static struct json_object *json_ranks(const kvf_engine *engine) {
    struct json_object *out = json_object_new_array();
    for (uint32_t rank = 0; rank < kvf_engine_rank_count(engine); rank++)
        json_object_array_add(out, regions_json(kvf_engine_shard(engine, rank)));
    return out;
}

static void add_engine_json(struct json_object *out, const engine_shape *shape, const kvf_engine *engine) {
    struct json_object *one = json_shape(shape, engine);
    json_object_object_add(one, "regions_by_rank", json_ranks(engine));
    json_object_object_add(out, shape->side, one);
}

void engines_add_json(const engines *all, struct json_object *out) {
    json_text(out, "model", kvf_model_name(all->model));
    json_count(out, "layers", kvf_model_layer_count(all->model));
    json_notes(out, "notes", all->model);
    if (all->prefill)
        add_engine_json(out, &all->prefill_shape, all->prefill);
    if (all->decode)
        add_engine_json(out, &all->decode_shape, all->decode);
}

int engines_plan(const kvf_engine *decode, uint32_t rank, const kvf_engine *prefill, const options *asked,
                 kvf_plan **out) {
    kvf_plan_options how = {.struct_size = sizeof how,
                            .replicas = asked->first_replica ? KVF_REPLICA_FIRST : KVF_REPLICA_SPREAD,
                            .convert = SHAPE_CONVERTED};
    kvf_status status = kvf_plan_build(kvf_engine_shard(decode, rank), prefill, &how, out);
    return status ? library_failure(status, "plan of decode rank %u", rank) : EXIT_DONE;
}

int engines_verify(const kvf_plan *plan, uint32_t rank) {
    kvf_status status = kvf_plan_converts(plan) ? KVF_OK : kvf_plan_verify(plan);
    return status ? library_failure(status, "plan of decode rank %u is wrong", rank) : EXIT_DONE;
}
