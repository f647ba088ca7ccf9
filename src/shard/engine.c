/*
 * An engine: the shards of all ranks, made from parallel sizes and layouts, or from existing shards.
 */
#include "base/share.h"
#include "shard/shard.h"

kvf_part_share kvf_tp_share(const kvf_part_desc *part, uint32_t tp_rank, uint32_t tp_size) {
    if (part->tp_rule == KVF_TP_REPLICATE)
        return (kvf_part_share){{0, part->units}, tp_rank, tp_size};
    uint32_t granules = part->units / part->granule_units;
    kvf_range held = kvf_axis_share(granules, tp_size, tp_rank);
    kvf_part_share share = {.units = {held.begin * part->granule_units, held.end * part->granule_units},
                            .replica_count = 1};
    if (tp_size > granules) {
        /* The ranks that hold granule g are those with floor(rank*G/n) == g: from ceil(g*n/G) on. */
        uint64_t first = ((uint64_t)held.begin * tp_size + granules - 1) / granules;
        uint64_t next = ((uint64_t)held.end * tp_size + granules - 1) / granules;
        share.replica = (uint32_t)(tp_rank - first);
        share.replica_count = (uint32_t)(next - first);
    }
    return share;
}

typedef struct engine_builder {
    const kvf_model *model;
    kvf_engine_spec spec; /* sizes of 0 replaced by 1 */
    uint32_t tp_rank, pp_rank;
    /* Scratch for one rank; arrays in `groups` are owned. */
    kvf_group_shard_desc *groups;
    uint64_t *region_bytes;
    uint32_t region_count;
} engine_builder;

static kvf_group_spec group_spec(const engine_builder *b, uint32_t group) {
    if (b->spec.groups)
        return b->spec.groups[group];
    if (kvf_model_group(b->model, group)->kind != KVF_GROUP_STATE)
        return b->spec.all;
    kvf_group_spec spec = b->spec.state;
    if (spec.block_count == 0)
        spec.block_count = b->spec.all.block_count;
    return spec;
}

static kvf_range stage_layers(const engine_builder *b) {
    uint64_t layers = kvf_model_layer_count(b->model), pp = b->spec.pp_size;
    if (!b->spec.pp_layers)
        return (kvf_range){(uint32_t)(b->pp_rank * layers / pp), (uint32_t)((b->pp_rank + 1) * layers / pp)};
    kvf_range range = {0, 0};
    for (uint32_t stage = 0; stage <= b->pp_rank; stage++)
        range = (kvf_range){range.end, range.end + b->spec.pp_layers[stage]};
    return range;
}

/* Rank r has token share r % dcp_size, so the ranks that hold a granule must be whole sets of shares. */
static kvf_status share_tokens(const engine_builder *b, const kvf_part_desc *part, kvf_part_share *share) {
    uint32_t dcp = b->spec.dcp_size;
    uint32_t first = b->tp_rank - share->replica;
    if (share->replica_count % dcp != 0 || first % dcp != 0)
        return kvf_fail(KVF_E_INVALID,
                        "dcp_size is %u, so the TP ranks that hold the same units must be whole sets of %u; "
                        "units [%u, %u) of part %s are held by %u TP ranks from %u on",
                        dcp, dcp, share->units.begin, share->units.end, part->name, share->replica_count,
                        first);
    share->replica /= dcp;
    share->replica_count /= dcp;
    return KVF_OK;
}

/* Adds the group's regions to the rank's: after those of other groups, or shared with them. */
static kvf_status add_regions(engine_builder *b, const uint64_t *bytes, uint32_t count, uint32_t *first) {
    *first = b->spec.share_pages ? 0 : b->region_count;
    uint32_t total = *first + count;
    if (total > b->region_count) {
        uint64_t *grown = kvf_resize(b->region_bytes, total, sizeof *grown);
        if (!grown)
            return kvf_nomem("an engine");
        memset(grown + b->region_count, 0, (total - b->region_count) * sizeof *grown);
        b->region_bytes = grown;
        b->region_count = total;
    }
    for (uint32_t i = 0; i < count; i++)
        b->region_bytes[*first + i] = kvf_max_u64(b->region_bytes[*first + i], bytes[i]);
    return KVF_OK;
}

/* The tokens of a block where the specification does not say: 16, or the next number that is whole entries. */
static uint32_t default_tokens(const kvf_group_desc *group) {
    const uint32_t step = group->tokens_per_step;
    if (group->kind == KVF_GROUP_STATE)
        return 1;
    return step >= 16 ? step : (16 + step - 1) / step * step;
}

static kvf_status lay_out_group(engine_builder *b, uint32_t g, kvf_range layers) {
    const kvf_group_desc *group = kvf_model_group(b->model, g);
    const kvf_group_spec spec = group_spec(b, g);
    kvf_group_shard_desc *out = &b->groups[g];
    bool is_state = group->kind == KVF_GROUP_STATE;
    *out = (kvf_group_shard_desc){.tokens = {0, 1, 1}};
    out->tokens_per_block = spec.tokens_per_block ? spec.tokens_per_block : default_tokens(group);
    out->kernel_blocks_per_block = spec.kernel_blocks_per_block ? spec.kernel_blocks_per_block : 1;
    out->block_count = spec.block_count;
    if (!is_state)
        out->tokens = (kvf_token_share){b->tp_rank % b->spec.dcp_size, b->spec.dcp_size, b->spec.dcp_width};
    kvf_held_group counted;
    kvf_status status = spec.block_count
                            ? kvf_count_steps(group, out, &counted)
                            : kvf_fail(KVF_E_INVALID, "block_count is 0; allowed: 1 to %u", UINT32_MAX - 1);
    if (status)
        return status;

    kvf_range held_layers = kvf_held_layers(group, layers);
    uint32_t held = held_layers.end - held_layers.begin;
    kvf_part_share *shares = kvf_alloc(group->part_count, sizeof *shares);
    kvf_placement *placements = kvf_alloc((size_t)held * group->part_count, sizeof *placements);
    out->parts = shares;
    out->placements = placements;
    if (!shares || !placements)
        return kvf_nomem("an engine");
    for (uint32_t p = 0; p < group->part_count; p++) {
        shares[p] = kvf_tp_share(&group->parts[p], b->tp_rank, b->spec.tp_size);
        if (!is_state && (status = share_tokens(b, &group->parts[p], &shares[p])))
            return status;
    }
    kvf_layout_request request = {
        group, &spec, held, counted.kernel_steps, out->block_count * out->kernel_blocks_per_block, shares};
    uint64_t *bytes;
    uint32_t regions, first = 0;
    status = kvf_layout_place(&request, placements, &bytes, &regions);
    if (!status)
        status = add_regions(b, bytes, regions, &first);
    for (size_t i = 0; i < (size_t)held * group->part_count && !status; i++)
        placements[i].region += first;
    kvf_free(bytes);
    return status;
}

static void free_rank(engine_builder *b) {
    for (uint32_t g = 0; g < kvf_model_group_count(b->model); g++) {
        kvf_free((void *)b->groups[g].parts);
        kvf_free((void *)b->groups[g].placements);
        b->groups[g] = (kvf_group_shard_desc){0};
    }
    kvf_free(b->region_bytes);
    b->region_bytes = NULL;
    b->region_count = 0;
}

static kvf_status build_rank(engine_builder *b, kvf_shard **out) {
    kvf_range layers = stage_layers(b);
    kvf_status status = KVF_OK;
    for (uint32_t g = 0; g < kvf_model_group_count(b->model) && !status; g++) {
        status = lay_out_group(b, g, layers);
        if (status)
            status = kvf_fail_in(status, "group %s: ", kvf_model_group(b->model, g)->name);
    }
    kvf_shard_desc desc = {.struct_size = sizeof desc,
                           .rank = b->pp_rank * b->spec.tp_size + b->tp_rank,
                           .layers = layers,
                           .region_bytes = b->region_bytes,
                           .region_count = b->region_count,
                           .groups = b->groups,
                           .tp_rank = b->tp_rank,
                           .tp_size = b->spec.tp_size,
                           .pp_rank = b->pp_rank,
                           .pp_size = b->spec.pp_size};
    if (!status)
        status = kvf_shard_make(b->model, &desc, NULL, NULL, out);
    free_rank(b);
    return status;
}

static kvf_status check_spec(const kvf_model *model, kvf_engine_spec *spec) {
    uint32_t *sizes[] = {&spec->tp_size, &spec->pp_size, &spec->dcp_size, &spec->dcp_width};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (*sizes[i] == 0)
            *sizes[i] = 1;
    kvf_status status = kvf_check_reserved(spec->all.reserved, 4, "kvf_engine_spec.all");
    if (!status)
        status = kvf_check_reserved(spec->state.reserved, 4, "kvf_engine_spec.state");
    for (uint32_t g = 0; spec->groups && g < kvf_model_group_count(model) && !status; g++)
        status = kvf_check_reserved(spec->groups[g].reserved, 4, "kvf_engine_spec.groups");
    if (status)
        return status;
    uint32_t layers = kvf_model_layer_count(model);
    if ((uint64_t)spec->tp_size * spec->pp_size > 65536)
        return kvf_fail(KVF_E_RANGE, "tp_size is %u and pp_size %u; allowed: up to 65536 ranks in all",
                        spec->tp_size, spec->pp_size);
    if (spec->pp_size > layers)
        return kvf_fail(KVF_E_RANGE, "pp_size is %u; allowed: 1 to %u, the model's layers", spec->pp_size,
                        layers);
    if (spec->tp_size % spec->dcp_size != 0)
        return kvf_fail(KVF_E_INVALID, "dcp_size is %u, which does not divide tp_size %u", spec->dcp_size,
                        spec->tp_size);
    uint64_t sum = 0;
    for (uint32_t stage = 0; spec->pp_layers && stage < spec->pp_size; stage++) {
        if (spec->pp_layers[stage] == 0)
            return kvf_fail(KVF_E_INVALID, "pp_layers[%u] is 0; each stage needs at least 1 layer", stage);
        sum += spec->pp_layers[stage];
    }
    if (spec->pp_layers && sum != layers)
        return kvf_fail(KVF_E_INVALID, "pp_layers sums to %llu; the model has %u layers",
                        (unsigned long long)sum, layers);
    return KVF_OK;
}

kvf_status kvf_engine_build(const kvf_model *model, const kvf_engine_spec *spec, kvf_engine **out) {
    if (!model || !spec || !out)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !model ? "model" : !spec ? "spec" : "out");
    engine_builder b = {.model = model};
    kvf_status status = kvf_take_options(&b.spec, sizeof b.spec, spec, "kvf_engine_spec");
    if (status || (status = check_spec(model, &b.spec)))
        return status;
    uint32_t ranks = b.spec.tp_size * b.spec.pp_size;
    kvf_shard **shards = kvf_alloc0(ranks, sizeof(kvf_shard *));
    b.groups = kvf_alloc0(kvf_model_group_count(model), sizeof *b.groups);
    if (!shards || !b.groups)
        status = kvf_nomem("an engine");
    for (uint32_t rank = 0; rank < ranks && !status; rank++) {
        b.pp_rank = rank / b.spec.tp_size;
        b.tp_rank = rank % b.spec.tp_size;
        status = build_rank(&b, &shards[rank]);
    }
    if (!status)
        status = kvf_engine_from_shards(model, b.spec.name, shards, ranks, out);
    for (uint32_t rank = 0; shards && status && rank < ranks; rank++)
        kvf_shard_free(shards[rank]);
    kvf_free(shards);
    kvf_free(b.groups);
    return status;
}

/* Checks that all ranks that hold layers of a group read its block tables in the same way. */
static kvf_status agree(kvf_engine *engine, uint32_t g) {
    const kvf_group_desc *group = kvf_model_group(engine->model, g);
    kvf_engine_group *agreed = &engine->groups[g];
    uint32_t from = UINT32_MAX;
    for (uint32_t rank = 0; rank < engine->shard_count; rank++) {
        const kvf_shard *shard = engine->shards[rank];
        const kvf_held_group *held = &shard->groups[g];
        if (shard->group_layers[g].begin == shard->group_layers[g].end)
            continue;
        kvf_engine_group own = {held->steps_per_block, held->kernel_steps, held->kernel_blocks_per_block,
                                held->block_count,     held->share.count,  held->share.width};
        if (from == UINT32_MAX) {
            from = rank;
            *agreed = own;
            continue;
        }
        if (own.steps_per_block != agreed->steps_per_block ||
            own.kernel_blocks_per_block != agreed->kernel_blocks_per_block)
            return kvf_fail(
                KVF_E_MISMATCH,
                "group %s: rank %u has %u tokens and %u kernel blocks a block, rank %u has %u and %u",
                group->name, from, agreed->steps_per_block * group->tokens_per_step,
                agreed->kernel_blocks_per_block, rank, own.steps_per_block * group->tokens_per_step,
                own.kernel_blocks_per_block);
        if (own.share_count != agreed->share_count || own.share_width != agreed->share_width)
            return kvf_fail(
                KVF_E_MISMATCH,
                "group %s: rank %u shares tokens by %u with width %u, rank %u by %u with width %u",
                group->name, from, agreed->share_count, agreed->share_width * group->tokens_per_step, rank,
                own.share_count, own.share_width * group->tokens_per_step);
        agreed->block_count = kvf_min_u64(agreed->block_count, own.block_count);
    }
    if (from == UINT32_MAX)
        *agreed = (kvf_engine_group){1, 1, 1, 1, 1, 1}; /* no rank holds this group */
    return KVF_OK;
}

static kvf_status check_shards(const kvf_model *model, kvf_shard *const *shards, uint32_t count) {
    if (!shards || count == 0)
        return kvf_fail(KVF_E_INVALID, "%s; an engine needs at least 1 shard",
                        shards ? "shard_count is 0" : "shards is NULL");
    for (uint32_t i = 0; i < count; i++) {
        if (!shards[i] || shards[i]->desc.rank != i)
            return kvf_fail(KVF_E_INVALID, "shards[%u] %s; shards must be in order of rank", i,
                            shards[i] ? "has another rank" : "is NULL");
        if (shards[i]->model != model) {
            kvf_status status = kvf_model_compare(model, shards[i]->model);
            if (status)
                return kvf_fail_in(status, "rank %u: ", i);
        }
    }
    return KVF_OK;
}

kvf_status kvf_engine_from_shards(const kvf_model *model, const char *name, kvf_shard *const *shards,
                                  uint32_t shard_count, kvf_engine **out) {
    if (!model || !out)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !model ? "model" : "out");
    kvf_status status = check_shards(model, shards, shard_count);
    if (status)
        return status;
    kvf_engine *engine = kvf_alloc0(1, sizeof *engine);
    if (!engine)
        return kvf_nomem("an engine");
    uint32_t groups = kvf_model_group_count(model);
    engine->model = kvf_model_retain(model);
    engine->name = kvf_strdup(name ? name : "engine");
    engine->groups = kvf_alloc0(groups, sizeof *engine->groups);
    engine->shards = kvf_copy(shards, shard_count, sizeof(kvf_shard *));
    engine->shard_count = shard_count;
    if (!engine->name || !engine->groups || !engine->shards)
        status = kvf_nomem("an engine");
    for (uint32_t g = 0; g < groups && !status; g++)
        status = agree(engine, g);
    if (status) {
        engine->shard_count = 0; /* the shards stay the caller's */
        kvf_engine_free(engine);
        return status;
    }
    *out = engine;
    return KVF_OK;
}

void kvf_engine_free(kvf_engine *engine) {
    if (!engine)
        return;
    for (uint32_t i = 0; i < engine->shard_count; i++)
        kvf_shard_free(engine->shards[i]);
    kvf_free(engine->shards);
    kvf_free(engine->groups);
    kvf_free(engine->name);
    kvf_model_free(engine->model);
    kvf_free(engine);
}

uint64_t kvf_engine_memory_bytes(const kvf_engine *engine) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < engine->shard_count; i++)
        bytes += kvf_shard_memory_bytes(engine->shards[i]);
    return bytes;
}

const char *kvf_engine_name(const kvf_engine *engine) {
    return engine->name;
}
const kvf_model *kvf_engine_model(const kvf_engine *engine) {
    return engine->model;
}
uint32_t kvf_engine_rank_count(const kvf_engine *engine) {
    return engine->shard_count;
}

const kvf_shard *kvf_engine_shard(const kvf_engine *engine, uint32_t rank) {
    return rank < engine->shard_count ? engine->shards[rank] : NULL;
}
