#include "build.h"

#include <stdarg.h>
#include <string.h>

#include "forms.h"

static char wrong_text[1024];

bool wrong(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(wrong_text, sizeof wrong_text, format, arguments);
    va_end(arguments);
    return false;
}

const char *what_went_wrong(void) {
    return wrong_text;
}

static bool check_model(const world *w, uint32_t side, const kvf_model *model, const kvf_model_desc *desc) {
    const model_world *wanted = &w->models[side];
    if (kvf_model_group_count(model) != wanted->group_count ||
        kvf_model_layer_count(model) != wanted->layer_count)
        return wrong("the model has other groups or layers than its description");
    for (uint32_t i = 0; i < wanted->group_count; i++) {
        const kvf_group_desc *group = kvf_model_group(model, i);
        const group_recipe *cells = &wanted->groups[wanted->group_order[i]];
        uint64_t bytes = 0;
        for (uint32_t p = 0; p < cells->part_count; p++)
            bytes += (uint64_t)cells->parts[p].units * cells->parts[p].rows * cell_bytes_of(&cells->parts[p]);
        if (group->layer_count != desc->groups[i].layer_count ||
            group->part_count != desc->groups[i].part_count || kvf_group_step_bytes(group) != bytes)
            return wrong("group %u of the model is not as described", wanted->group_order[i]);
    }
    return true;
}

/* ---- a shard against the world --------------------------------------------------------------- */

/* A group and a part, by the world's numbers and by those of the shard's model. */
typedef struct shard_part {
    uint32_t group, part;
    uint32_t their_group, their_part;
} shard_part;

static bool check_layer(const kvf_shard *shard, const world *w, uint32_t side, const rank_world *rank,
                        const shard_part *at, uint32_t layer) {
    const engine_world *e = &w->engines[side];
    uint32_t group = at->group, p = at->part;
    const part_recipe *part = &w->models[side].groups[group].parts[p];
    const rank_group *held = &rank->groups[group];
    const rank_part *own = &held->parts[p];
    uint32_t index = held->layers_begin + layer, bytes = cell_bytes_of(part);
    uint32_t kernel = e->kernel_blocks[group], rows = kernel_tokens_of(e, group) * part->rows;
    uint32_t blocks = held->block_count * kernel;
    const kvf_placement *s = kvf_shard_placement(shard, at->their_group, index, at->their_part);
    if (!s)
        return wrong("group %u, layer %u, part %u: no placement", group, index, p);
    const place *cell = own->cells + (size_t)layer * blocks * rows * units_of(own) * own->pieces;
    for (uint32_t block = 0; block < blocks; block++) {
        for (uint32_t row = 0; row < rows; row++) {
            for (uint32_t i = 0; i < units_of(own) * own->pieces; i++, cell++) {
                uint32_t unit = i / own->pieces, piece = i % own->pieces;
                uint64_t offset = s->offset + block * s->block_stride + row * s->row_stride +
                                  unit * s->unit_stride + piece * s->piece_stride;
                kvf_cell_location found = {.struct_size = sizeof found};
                kvf_status status =
                    kvf_shard_locate(shard, at->their_group, index, at->their_part, block / kernel,
                                     block % kernel * rows + row, own->units_begin + unit, &found);
                if (s->region != cell->region || offset != cell->offset)
                    return wrong("group %u, layer %u, part %u, kernel block %u, row %u, unit %u: placed in "
                                 "region %u at %llu; counting gives region %u at %u",
                                 group, index, p, block, row, own->units_begin + unit, s->region,
                                 (unsigned long long)offset, cell->region, cell->offset);
                if (status || found.region != cell->region || found.pieces != own->pieces ||
                    found.offset + piece * found.piece_stride != cell->offset || found.bytes != bytes)
                    return wrong("group %u, layer %u, part %u, kernel block %u, row %u, unit %u: "
                                 "kvf_shard_locate() gives %s, region %u at %llu, %llu bytes",
                                 group, index, p, block, row, own->units_begin + unit,
                                 kvf_status_name(status), found.region, (unsigned long long)found.offset,
                                 (unsigned long long)found.bytes);
            }
        }
    }
    kvf_cell_location found = {.struct_size = sizeof found};
    if (!kvf_shard_locate(shard, at->their_group, index, at->their_part, held->block_count, 0,
                          own->units_begin, &found) ||
        !kvf_shard_locate(shard, at->their_group, index, at->their_part, 0, rows * kernel, own->units_begin,
                          &found) ||
        !kvf_shard_locate(shard, at->their_group, index, at->their_part, 0, 0, own->units_end, &found))
        return wrong("group %u, layer %u, part %u: kvf_shard_locate() finds a cell that is not there", group,
                     index, p);
    return true;
}

static bool check_group(const kvf_shard *shard, const world *w, uint32_t side, const rank_world *rank,
                        uint32_t i) {
    const engine_world *e = &w->engines[side];
    uint32_t group = w->models[side].group_order[i];
    const kvf_group_shard_desc *got = &kvf_shard_get(shard)->groups[i];
    const rank_group *held = &rank->groups[group];
    kvf_range layers = kvf_shard_group_layers(shard, i);
    if (layers.end - layers.begin != layers_of(held) ||
        (layers_of(held) && layers.begin != held->layers_begin))
        return wrong("group %u: layers [%u, %u); expected [%u, %u)", group, layers.begin, layers.end,
                     held->layers_begin, held->layers_end);
    const uint32_t each = step_tokens_of(&w->models[side].groups[group]);
    if (got->tokens_per_block != e->tokens[group] * each ||
        got->kernel_blocks_per_block != e->kernel_blocks[group] || got->block_count != held->block_count)
        return wrong("group %u: %u tokens and %u kernel blocks in each of %llu blocks", group,
                     got->tokens_per_block, got->kernel_blocks_per_block,
                     (unsigned long long)got->block_count);
    if (got->tokens.index != held->share_index || got->tokens.count != held->share_count ||
        (held->share_count > 1 && got->tokens.width != held->share_width * each))
        return wrong("group %u: token share %u of %u, width %u; expected %u of %u, width %u", group,
                     got->tokens.index, got->tokens.count, got->tokens.width, held->share_index,
                     held->share_count, held->share_width);
    for (uint32_t k = 0; k < w->models[side].groups[group].part_count; k++) {
        uint32_t p = w->models[side].part_order[group][k];
        const kvf_part_share *share = &got->parts[k];
        const rank_part *own = &held->parts[p];
        if (share->units.begin != own->units_begin || share->units.end != own->units_end ||
            share->replica != own->replica || share->replica_count != own->replica_count)
            return wrong("group %u, part %u: units [%u, %u), replica %u of %u; expected [%u, %u), %u of %u",
                         group, p, share->units.begin, share->units.end, share->replica, share->replica_count,
                         own->units_begin, own->units_end, own->replica, own->replica_count);
        for (uint32_t layer = 0; layer < layers_of(held) && units_of(own); layer++)
            if (!check_layer(shard, w, side, rank, &(shard_part){group, p, i, k}, layer))
                return false;
    }
    return true;
}

static bool check_shard(const world *w, uint32_t side, uint32_t rank, const kvf_shard *shard) {
    const engine_world *e = &w->engines[side];
    const rank_world *own = &e->ranks[rank];
    const kvf_shard_desc *got = kvf_shard_get(shard);
    bool good = true;
    if (got->rank != rank || got->layers.begin != own->layers_begin || got->layers.end != own->layers_end)
        good = wrong("rank %u, layers [%u, %u); expected rank %u, layers [%u, %u)", got->rank,
                     got->layers.begin, got->layers.end, rank, own->layers_begin, own->layers_end);
    if (good && got->region_count != own->region_count)
        good = wrong("%u regions; counting gives %u", got->region_count, own->region_count);
    for (uint32_t i = 0; i < own->region_count && good; i++)
        if (got->region_bytes[i] != own->region_bytes[i])
            good = wrong("region %u has %llu bytes; counting gives %u", i,
                         (unsigned long long)got->region_bytes[i], own->region_bytes[i]);
    for (uint32_t i = 0; i < w->models[side].group_count && good; i++) {
        uint32_t g = w->models[side].group_order[i];
        good = check_group(shard, w, side, own, i);
        const char *overlap = good ? find_overlap(w, side, own, g) : NULL;
        if (overlap)
            good = wrong("group %u: %s", g, overlap);
    }
    if (good)
        return true;
    char text[sizeof wrong_text];
    memcpy(text, wrong_text, sizeof text);
    return wrong("%s rank %u: %.900s", side == LOCAL ? "local" : "remote", rank, text);
}

/* ---- making them ----------------------------------------------------------------------------- */

static bool refused_rightly(built *b, const char *what, const char *why, kvf_status status) {
    if (status == KVF_OK)
        return wrong("%s was made, but must be refused: %s", what, why);
    if (status != KVF_E_INVALID && status != KVF_E_RANGE && status != KVF_E_OVERLAP &&
        status != KVF_E_MISMATCH && status != KVF_E_OVERFLOW)
        return wrong("%s was refused as %s (%s)", what, kvf_status_name(status), kvf_error_detail());
    if (!*kvf_error_detail())
        return wrong("%s was refused without a word", what);
    b->refused = true;
    return true;
}

static bool make_built(const recipe *r, const world *w, uint32_t side, built *b) {
    const engine_world *e = &w->engines[side];
    kvf_engine **engine = side == LOCAL ? &b->local_engine : &b->remote;
    engine_form form;
    fill_engine_form(r, w, side, &form);
    kvf_status status = kvf_engine_build(b->models[side], &form.spec, engine);
    if (e->illegal)
        return refused_rightly(b, side == LOCAL ? "the local engine" : "the remote engine", e->illegal,
                               status);
    if (status)
        return wrong("the %s engine is refused: %s: %s", side == LOCAL ? "local" : "remote",
                     kvf_status_name(status), kvf_error_detail());
    if (kvf_engine_rank_count(*engine) != e->rank_count)
        return wrong("%u ranks; expected %u", kvf_engine_rank_count(*engine), e->rank_count);
    for (uint32_t i = 0; i < e->rank_count; i++) {
        const kvf_shard *shard = kvf_engine_shard(*engine, i);
        if (!check_shard(w, side, i, shard))
            return false;
        if (side == LOCAL)
            b->local[i] = shard;
    }
    return true;
}

static bool make_hand_made(const world *w, uint32_t side, built *b) {
    const engine_world *e = &w->engines[side];
    shard_form *form = arena_take(1, sizeof *form);
    kvf_shard *shards[MAX_RANKS] = {NULL};
    bool good = true;
    for (uint32_t i = 0; i < e->rank_count && good && !b->refused; i++) {
        bool illegal = e->illegal && e->illegal_rank != UINT32_MAX;
        if (illegal && e->illegal_rank != i)
            continue;
        fill_shard_form(w, side, i, form);
        kvf_status status = kvf_shard_create(b->models[side], &form->desc, &shards[i]);
        if (illegal)
            good = refused_rightly(b, "a shard", e->illegal, status);
        else if (status && e->ranks[i].may_be_refused)
            good = refused_rightly(b, "a shard", "strange placements", status);
        else if (status)
            good = wrong("%s rank %u is refused: %s: %s", side == LOCAL ? "local" : "remote", i,
                         kvf_status_name(status), kvf_error_detail());
        else
            good = check_shard(w, side, i, shards[i]);
    }
    if (good && !b->refused && side == REMOTE) {
        kvf_status status =
            kvf_engine_from_shards(b->models[side], "remote", shards, e->rank_count, &b->remote);
        if (e->illegal)
            good = refused_rightly(b, "the remote engine", e->illegal, status);
        else if (status)
            good = wrong("the remote engine is refused: %s: %s", kvf_status_name(status), kvf_error_detail());
    }
    for (uint32_t i = 0; i < e->rank_count; i++) {
        if (side == LOCAL)
            b->local[i] = b->hand_made[i] = shards[i];
        else if (!b->remote)
            kvf_shard_free(shards[i]);
    }
    return good;
}

bool build_objects(const recipe *r, const world *w, built *out) {
    memset(out, 0, sizeof *out);
    bool good = true;
    for (uint32_t side = 0; side < SIDES && good; side++) {
        model_form model;
        fill_model_form(w, side, &model);
        kvf_status status = kvf_model_create(&model.desc, &out->models[side]);
        good = status ? wrong("the model is refused: %s: %s", kvf_status_name(status), kvf_error_detail())
                      : check_model(w, side, out->models[side], &model.desc);
    }
    for (uint32_t side = 0; side < SIDES && good && !out->refused; side++)
        good = r->engines[side].by_hand ? make_hand_made(w, side, out) : make_built(r, w, side, out);
    return good;
}

void free_objects(const recipe *r, built *b) {
    (void)r;
    kvf_engine_free(b->local_engine);
    kvf_engine_free(b->remote);
    for (uint32_t i = 0; i < MAX_RANKS; i++)
        kvf_shard_free(b->hand_made[i]);
    for (uint32_t side = 0; side < SIDES; side++)
        kvf_model_free(b->models[side]);
}
