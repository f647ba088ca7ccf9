/*
 * One rank's shard: copied, completed and checked once, then only read.
 */
#include "shard/shard.h"

#include "base/base.h"

static uint32_t or_one(uint32_t value) {
    return value ? value : 1;
}

/* The list of layers is ascending, so the held ones are a range of it. */
kvf_range kvf_held_layers(const kvf_group_desc *group, kvf_range layers) {
    kvf_range held = {0, 0};
    while (held.begin < group->layer_count && group->layers[held.begin] < layers.begin)
        held.begin++;
    held.end = held.begin;
    while (held.end < group->layer_count && group->layers[held.end] < layers.end)
        held.end++;
    return held;
}

static kvf_status check_tokens(const kvf_group_desc *group, const kvf_group_shard_desc *desc) {
    if (desc->tokens_per_block == 0)
        return kvf_fail(KVF_E_INVALID, "tokens_per_block is 0; allowed: 1 to %u", UINT32_MAX);
    if (group->kind == KVF_GROUP_STATE && desc->tokens_per_block != 1)
        return kvf_fail(KVF_E_INVALID, "tokens_per_block is %u; a block of a state group holds 1 state",
                        desc->tokens_per_block);
    if (desc->tokens_per_block % group->tokens_per_step != 0)
        return kvf_fail(KVF_E_INVALID, "tokens_per_block is %u; allowed: multiples of tokens_per_step, %u",
                        desc->tokens_per_block, group->tokens_per_step);
    const uint32_t steps = desc->tokens_per_block / group->tokens_per_step;
    if (steps % desc->kernel_blocks_per_block == 0)
        return KVF_OK;
    if (group->tokens_per_step > 1)
        return kvf_fail(KVF_E_INVALID,
                        "kernel_blocks_per_block is %u, which does not divide the entries of a block, %u",
                        desc->kernel_blocks_per_block, steps);
    return kvf_fail(KVF_E_INVALID, "kernel_blocks_per_block is %u, which does not divide tokens_per_block %u",
                    desc->kernel_blocks_per_block, steps);
}

static kvf_status check_token_share(const kvf_group_desc *group, const kvf_token_share *tokens) {
    if (tokens->index >= tokens->count)
        return kvf_fail(KVF_E_RANGE, "tokens.index is %u; allowed: 0 to %u", tokens->index,
                        tokens->count - 1);
    if (group->kind == KVF_GROUP_STATE && tokens->count != 1)
        return kvf_fail(KVF_E_INVALID, "tokens.count is %u; a state cannot be shared by token",
                        tokens->count);
    if (tokens->count > 1 && tokens->width % group->tokens_per_step != 0)
        return kvf_fail(KVF_E_INVALID, "tokens.width is %u; allowed: multiples of tokens_per_step, %u",
                        tokens->width, group->tokens_per_step);
    return KVF_OK;
}

kvf_status kvf_count_steps(const kvf_group_desc *group, const kvf_group_shard_desc *desc,
                           kvf_held_group *out) {
    kvf_status status = check_tokens(group, desc);
    if (!status)
        status = check_token_share(group, &desc->tokens);
    if (status)
        return status;
    uint64_t kernel_blocks;
    if (desc->block_count == 0 ||
        !kvf_mul(desc->block_count, desc->kernel_blocks_per_block, &kernel_blocks) ||
        kernel_blocks >= UINT32_MAX)
        return kvf_fail(KVF_E_RANGE,
                        "block_count is %llu with %u kernel blocks each; allowed: 1 to %u in all",
                        (unsigned long long)desc->block_count, desc->kernel_blocks_per_block, UINT32_MAX - 1);
    const uint32_t steps = desc->tokens_per_block / group->tokens_per_step;
    *out = (kvf_held_group){.steps_per_block = steps,
                            .kernel_steps = steps / desc->kernel_blocks_per_block,
                            .kernel_blocks_per_block = desc->kernel_blocks_per_block,
                            .block_count = desc->block_count,
                            .share = desc->tokens};
    if (out->share.count > 1)
        out->share.width /= group->tokens_per_step;
    return KVF_OK;
}

static kvf_status check_share(const kvf_part_desc *part, const kvf_part_share *share) {
    if (share->units.begin > share->units.end || share->units.end > part->units)
        return kvf_fail(KVF_E_RANGE, "part %s: units are [%u, %u); allowed: a range within [0, %u)",
                        part->name, share->units.begin, share->units.end, part->units);
    if (share->replica >= share->replica_count)
        return kvf_fail(KVF_E_RANGE, "part %s: replica is %u; allowed: 0 to %u", part->name, share->replica,
                        share->replica_count - 1);
    return KVF_OK;
}

/* Checks that all pieces have equally many elements and fill whole bytes. */
static kvf_status check_pieces(const kvf_part_desc *part, const kvf_placement *placement) {
    uint32_t pieces = placement->pieces, elements = part->cell_elements / pieces;
    if (part->cell_elements % pieces != 0)
        return kvf_fail(KVF_E_INVALID, "pieces is %u, which does not divide the %u elements of a cell",
                        pieces, part->cell_elements);
    if ((uint64_t)elements * kvf_dtype_bits(part->dtype) % 8)
        return kvf_fail(KVF_E_INVALID, "pieces is %u: %u elements of %s do not fill whole bytes", pieces,
                        elements, kvf_dtype_name(part->dtype));
    return KVF_OK;
}

/* Checks that the last byte of the last cell lies in the region. All arithmetic is checked here, once. */
static kvf_status check_placement(const kvf_shard *shard, uint32_t group, uint32_t part,
                                  const kvf_placement *placement) {
    const kvf_part_desc *desc = &kvf_model_group(shard->model, group)->parts[part];
    const kvf_held_group *held = &shard->groups[group];
    kvf_range units = held->parts[part].units;
    if (units.begin == units.end)
        return KVF_OK;
    if (placement->region >= shard->desc.region_count)
        return kvf_fail(KVF_E_RANGE, "region is %u, but the shard has %u", placement->region,
                        shard->desc.region_count);
    kvf_status status = check_pieces(desc, placement);
    if (status)
        return status;
    uint64_t end = placement->offset;
    uint64_t blocks = held->block_count * held->kernel_blocks_per_block; /* fits: check_blocks() */
    if (!kvf_mul_add(blocks - 1, placement->block_stride, end, &end) ||
        !kvf_mul_add(kvf_kernel_rows(held, desc) - 1, placement->row_stride, end, &end) ||
        !kvf_mul_add(units.end - units.begin - 1, placement->unit_stride, end, &end) ||
        !kvf_mul_add(placement->pieces - 1, placement->piece_stride, end, &end) ||
        !kvf_add(end, kvf_piece_bytes(desc, placement), &end))
        return kvf_fail(
            KVF_E_OVERFLOW,
            "offset %llu with strides %llu (block), %llu (row), %llu (unit), %llu (piece) ends past 2^64",
            (unsigned long long)placement->offset, (unsigned long long)placement->block_stride,
            (unsigned long long)placement->row_stride, (unsigned long long)placement->unit_stride,
            (unsigned long long)placement->piece_stride);
    if (end > shard->desc.region_bytes[placement->region])
        return kvf_fail(KVF_E_RANGE, "the last cell ends at byte %llu of region %u, which has %llu",
                        (unsigned long long)end, placement->region,
                        (unsigned long long)shard->desc.region_bytes[placement->region]);
    return KVF_OK;
}

static kvf_status check_placements(const kvf_shard *shard, uint32_t group) {
    const kvf_group_desc *desc = kvf_model_group(shard->model, group);
    kvf_range layers = shard->group_layers[group];
    kvf_held_group *held = &shard->groups[group];
    const kvf_placement *placement = held->placements;
    held->regions_ascend = true;
    for (uint32_t layer = layers.begin; layer < layers.end; layer++) {
        for (uint32_t part = 0; part < desc->part_count; part++, placement++) {
            kvf_status status = check_placement(shard, group, part, placement);
            if (status)
                return kvf_fail_in(status, "layer %u, part %s: ", desc->layers[layer],
                                   desc->parts[part].name);
            if (layer > layers.begin && kvf_holds_units(&held->parts[part]) &&
                placement->region < (placement - desc->part_count)->region)
                held->regions_ascend = false;
        }
    }
    return KVF_OK;
}

/* Copies group `g` of the description into the shard, completes its defaults, and checks it. */
static kvf_status take_group(kvf_shard *shard, const kvf_group_shard_desc *given, uint32_t g) {
    const kvf_group_desc *group = kvf_model_group(shard->model, g);
    kvf_group_shard_desc *own = (kvf_group_shard_desc *)&shard->desc.groups[g];
    kvf_range layers = shard->group_layers[g];
    *own = *given;
    own->parts = NULL;
    own->placements = NULL;
    own->kernel_blocks_per_block = or_one(given->kernel_blocks_per_block);
    own->tokens.count = or_one(given->tokens.count);
    own->tokens.width = or_one(given->tokens.width);
    kvf_status status = kvf_check_reserved(given->reserved, 4, "kvf_group_shard_desc");
    if (!status)
        status = kvf_count_steps(group, own, &shard->groups[g]);
    if (status)
        return status;

    size_t placements = (size_t)(layers.end - layers.begin) * group->part_count;
    if (!given->parts || (placements && !given->placements))
        return kvf_fail(KVF_E_INVALID, "%s is NULL; it needs %u parts and %zu placements",
                        given->parts ? "placements" : "parts", group->part_count, placements);
    kvf_part_share *parts = kvf_copy(given->parts, group->part_count, sizeof *parts);
    own->parts = parts;
    kvf_placement *places = kvf_copy(given->placements, placements, sizeof *places);
    own->placements = places;
    if (!own->parts || !own->placements)
        return kvf_nomem("a shard");
    for (size_t i = 0; i < placements; i++) {
        places[i].pieces = or_one(places[i].pieces);
        if (places[i].pieces == 1)
            places[i].piece_stride = 0; /* meaningless, and set so that equal shards compare equal */
    }
    for (uint32_t p = 0; p < group->part_count; p++) {
        parts[p].replica_count = or_one(parts[p].replica_count);
        if ((status = check_share(&group->parts[p], &parts[p])))
            return status;
    }
    shard->groups[g].parts = own->parts;
    shard->groups[g].placements = own->placements;
    return check_placements(shard, g);
}

static kvf_status check_desc(const kvf_model *model, kvf_shard_desc *desc) {
    desc->tp_size = or_one(desc->tp_size);
    desc->pp_size = or_one(desc->pp_size);
    if (desc->tp_rank >= desc->tp_size || desc->pp_rank >= desc->pp_size)
        return kvf_fail(KVF_E_RANGE,
                        "tp_rank %u of tp_size %u, pp_rank %u of pp_size %u: a rank must be below its size",
                        desc->tp_rank, desc->tp_size, desc->pp_rank, desc->pp_size);
    uint32_t layer_count = kvf_model_layer_count(model);
    if (desc->layers.begin > desc->layers.end || desc->layers.end > layer_count)
        return kvf_fail(KVF_E_RANGE, "layers are [%u, %u); allowed: a range within [0, %u)",
                        desc->layers.begin, desc->layers.end, layer_count);
    if (!desc->groups || (desc->region_count && !desc->region_bytes))
        return kvf_fail(KVF_E_INVALID, "%s is NULL", desc->groups ? "region_bytes" : "groups");
    return KVF_OK;
}

/* Sets the held layers of a group: those in the rank's layers, or fewer. */
static kvf_status take_layers(kvf_shard *shard, uint32_t g, const kvf_range *less) {
    kvf_range held = kvf_held_layers(kvf_model_group(shard->model, g), shard->desc.layers);
    shard->group_layers[g] = less && less->begin == less->end ? (kvf_range){held.begin, held.begin} : held;
    if (!less || less->begin == less->end)
        return KVF_OK;
    if (less->begin > less->end || less->begin < held.begin || less->end > held.end)
        return kvf_fail(KVF_E_RANGE, "layers are [%u, %u); allowed: a range within [%u, %u)", less->begin,
                        less->end, held.begin, held.end);
    shard->group_layers[g] = *less;
    return KVF_OK;
}

kvf_status kvf_shard_make(const kvf_model *model, const kvf_shard_desc *desc, const kvf_range *group_layers,
                          uint64_t *overlap_intervals, kvf_shard **out) {
    kvf_shard_desc given;
    kvf_status status = kvf_take_options(&given, sizeof given, desc, "kvf_shard_desc");
    if (status || (status = check_desc(model, &given)))
        return status;
    kvf_shard *shard = kvf_alloc0(1, sizeof *shard);
    if (!shard)
        return kvf_nomem("a shard");
    uint32_t groups = kvf_model_group_count(model);
    shard->model = kvf_model_retain(model);
    shard->desc = given;
    shard->groups = kvf_alloc0(groups, sizeof *shard->groups);
    shard->desc.groups = kvf_alloc0(groups, sizeof *shard->desc.groups);
    shard->group_layers = kvf_alloc0(groups, sizeof *shard->group_layers);
    shard->desc.region_bytes = kvf_copy(given.region_bytes, given.region_count, sizeof *given.region_bytes);
    if (!shard->groups || !shard->desc.groups || !shard->group_layers || !shard->desc.region_bytes)
        status = kvf_nomem("a shard");
    for (uint32_t g = 0; g < groups && !status; g++) {
        status = take_layers(shard, g, group_layers ? &group_layers[g] : NULL);
        if (!status)
            status = take_group(shard, &given.groups[g], g);
        if (!status && overlap_intervals)
            status = kvf_shard_check_overlap(shard, g, overlap_intervals);
        if (status)
            status = kvf_fail_in(status, "rank %u, group %s: ", given.rank, kvf_model_group(model, g)->name);
    }
    if (status) {
        kvf_shard_free(shard);
        return status;
    }
    *out = shard;
    return KVF_OK;
}

kvf_status kvf_shard_create(const kvf_model *model, const kvf_shard_desc *desc, kvf_shard **out) {
    if (!model || !desc || !out)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !model ? "model" : !desc ? "desc" : "out");
    uint64_t intervals = KVF_OVERLAP_OWN;
    return kvf_shard_make(model, desc, NULL, &intervals, out);
}

void kvf_shard_free(kvf_shard *shard) {
    if (!shard)
        return;
    for (uint32_t g = 0; shard->desc.groups && g < kvf_model_group_count(shard->model); g++) {
        kvf_free((void *)shard->desc.groups[g].parts);
        kvf_free((void *)shard->desc.groups[g].placements);
    }
    kvf_free((void *)shard->desc.groups);
    kvf_free(shard->groups);
    kvf_free(shard->group_layers);
    kvf_free((void *)shard->desc.region_bytes);
    kvf_model_free(shard->model);
    kvf_free(shard);
}

uint64_t kvf_shard_memory_bytes(const kvf_shard *shard) {
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    uint64_t bytes = 1024 + desc->region_count * sizeof *desc->region_bytes;
    for (uint32_t g = 0; g < kvf_model_group_count(shard->model); g++) {
        kvf_range layers = shard->group_layers[g];
        uint32_t parts = kvf_model_group(shard->model, g)->part_count;
        bytes += sizeof desc->groups[g] + parts * sizeof *desc->groups[g].parts +
                 (uint64_t)parts * (layers.end - layers.begin) * sizeof *desc->groups[g].placements;
    }
    return bytes;
}

const kvf_model *kvf_shard_model(const kvf_shard *shard) {
    return shard->model;
}

const kvf_shard_desc *kvf_shard_get(const kvf_shard *shard) {
    return &shard->desc;
}

kvf_range kvf_shard_group_layers(const kvf_shard *shard, uint32_t group) {
    if (group >= kvf_model_group_count(shard->model))
        return (kvf_range){0, 0};
    return shard->group_layers[group];
}

const kvf_placement *kvf_shard_placement(const kvf_shard *shard, uint32_t group, uint32_t layer,
                                         uint32_t part) {
    kvf_range layers = kvf_shard_group_layers(shard, group);
    if (layer < layers.begin || layer >= layers.end)
        return NULL;
    uint32_t parts = kvf_model_group(shard->model, group)->part_count;
    if (part >= parts)
        return NULL;
    return &shard->groups[group].placements[(size_t)(layer - layers.begin) * parts + part];
}

kvf_status kvf_shard_locate(const kvf_shard *shard, uint32_t group, uint32_t layer, uint32_t part,
                            uint64_t block, uint32_t row, uint32_t unit, kvf_cell_location *out) {
    if (!shard)
        return kvf_fail(KVF_E_INVALID, "shard is NULL");
    kvf_status status = kvf_check_out(out, "kvf_cell_location");
    if (status)
        return status;
    const kvf_placement *placement = kvf_shard_placement(shard, group, layer, part);
    if (!placement)
        return kvf_fail(KVF_E_RANGE, "rank %u does not hold layer %u of group %u, part %u", shard->desc.rank,
                        layer, group, part);
    const kvf_held_group *held = &shard->groups[group];
    const kvf_part_desc *desc = &kvf_model_group(shard->model, group)->parts[part];
    kvf_range units = held->parts[part].units;
    uint64_t rows = kvf_kernel_rows(held, desc);
    if (block >= held->block_count || row >= rows * held->kernel_blocks_per_block)
        return kvf_fail(KVF_E_RANGE, "block %llu, row %u; the cache has %llu blocks of %llu rows",
                        (unsigned long long)block, row, (unsigned long long)held->block_count,
                        (unsigned long long)rows * held->kernel_blocks_per_block);
    if (unit < units.begin || unit >= units.end)
        return kvf_fail(KVF_E_RANGE, "unit is %u; rank %u holds [%u, %u)", unit, shard->desc.rank,
                        units.begin, units.end);
    uint64_t kernel_block = block * held->kernel_blocks_per_block + row / rows;
    /* Cannot overflow: check_placement() bounded the last cell. */
    const kvf_cell_location found = {
        .region = placement->region,
        .offset = placement->offset + kernel_block * placement->block_stride +
                  row % rows * placement->row_stride +
                  (uint64_t)(unit - units.begin) * placement->unit_stride,
        .bytes = kvf_part_cell_bytes(desc),
        .piece_stride = placement->piece_stride,
        .pieces = placement->pieces,
    };
    kvf_fill_out(out, &found, sizeof found);
    return KVF_OK;
}
