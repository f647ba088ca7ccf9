#include "cells.h"

/* ---- sequences ------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 32);
}

static bool keeps(kvf_token_share share, uint64_t token) {
    return token / share.width % share.count == share.index;
}

/* The blocks that the fullest rank needs. */
static uint32_t blocks_of(const kvf_shard *shard, uint32_t group, uint64_t steps) {
    const kvf_token_share share = step_share(shard, group);
    const uint32_t per_block = steps_per_block(shard, group);
    uint64_t most = 0;
    for (uint32_t i = 0; i < share.count; i++) {
        uint64_t kept = 0;
        for (uint64_t t = 0; t < steps; t++)
            kept += keeps((kvf_token_share){i, share.count, share.width}, t);
        most = kept > most ? kept : most;
    }
    return (uint32_t)((most + per_block - 1) / per_block);
}

void sequence_open(cell_sequence *sequence, const kvf_shard *shard, uint64_t tokens, uint32_t seed) {
    const kvf_model *model = kvf_shard_model(shard);
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    *sequence = (cell_sequence){.group_count = kvf_model_group_count(model)};
    assert_true(sequence->group_count <= CELLS_GROUPS_MAX);
    uint64_t cache = UINT32_MAX;
    for (uint32_t g = 0; g < sequence->group_count; g++)
        if (desc->groups[g].block_count < cache)
            cache = desc->groups[g].block_count;
    sequence->ids = malloc(cache * sizeof *sequence->ids);
    assert_non_null(sequence->ids);
    for (uint32_t i = 0; i < cache; i++) {
        uint32_t other = (uint32_t)(mix(seed + (uint64_t)i * 977) % (i + 1));
        sequence->ids[i] = sequence->ids[other];
        sequence->ids[other] = i;
    }
    uint32_t used = 0;
    for (uint32_t g = 0; g < sequence->group_count; g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        sequence->steps[g] = group->kind == KVF_GROUP_STATE ? 1 : tokens / group->tokens_per_step;
        uint32_t count = blocks_of(shard, g, sequence->steps[g]);
        sequence->tables[g] = (kvf_block_table){sequence->ids + used, count, 0};
        used += count;
    }
    assert_true(used <= cache);
}

void sequence_close(cell_sequence *sequence) {
    free(sequence->ids);
    sequence->ids = NULL;
}

void set_sequences(kvf_request *request, const cell_sequence *local, const cell_sequence *remote) {
    kvf_group_request groups[CELLS_GROUPS_MAX];
    for (uint32_t g = 0; g < local->group_count; g++)
        groups[g] = (kvf_group_request){local->tables[g], remote->tables[g], 0, local->steps[g]};
    assert_ok(kvf_request_set(request, groups, local->group_count));
}

/* ---- ranks ----------------------------------------------------------------------------------- */

void rank_open(cell_rank *rank, const kvf_shard *shard, const cell_sequence *sequence, cell_allocate allocate,
               void *context) {
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    *rank = (cell_rank){.shard = shard,
                        .sequence = sequence,
                        .region_count = desc->region_count,
                        .regions = calloc(desc->region_count + 1, sizeof *rank->regions),
                        .owned = !allocate};
    assert_non_null(rank->regions);
    for (uint32_t i = 0; i < desc->region_count; i++) {
        rank->regions[i].struct_size = sizeof rank->regions[i];
        rank->regions[i].bytes = desc->region_bytes[i];
        rank->regions[i].address =
            allocate ? allocate(context, desc->region_bytes[i]) : malloc(desc->region_bytes[i]);
        assert_non_null(rank->regions[i].address);
    }
    rank_scribble(rank, 0);
}

void rank_close(cell_rank *rank) {
    for (uint32_t i = 0; i < rank->region_count && rank->owned; i++)
        free(rank->regions[i].address);
    free(rank->regions);
    *rank = (cell_rank){0};
}

void rank_copy(cell_rank *copy, const cell_rank *rank) {
    rank_open(copy, rank->shard, rank->sequence, NULL, NULL);
    for (uint32_t i = 0; i < rank->region_count; i++)
        memcpy(copy->regions[i].address, rank->regions[i].address, rank->regions[i].bytes);
}

void rank_scribble(const cell_rank *rank, uint32_t seed) {
    for (uint32_t i = 0; i < rank->region_count; i++) {
        unsigned char *bytes = rank->regions[i].address;
        for (uint64_t at = 0; at < rank->regions[i].bytes; at++)
            bytes[at] = (unsigned char)((at + seed * 7919u + i * 31u) * 0x9e3779b1u >> 13);
    }
}

void assert_same_memory(const cell_rank *got, const cell_rank *wanted) {
    assert_int_equal(got->region_count, wanted->region_count);
    for (uint32_t i = 0; i < got->region_count; i++) {
        const unsigned char *a = got->regions[i].address, *b = wanted->regions[i].address;
        assert_int_equal(got->regions[i].bytes, wanted->regions[i].bytes);
        for (uint64_t at = 0; at < got->regions[i].bytes; at++)
            if (a[at] != b[at])
                fail_msg("region %u, offset %llu: %u instead of %u", i, (unsigned long long)at, a[at], b[at]);
    }
}

/* ---- cells ----------------------------------------------------------------------------------- */

/* Visits all units and rows of one step in one layer. */
static void visit_step(const cell_rank *rank, cell_place at, uint64_t position, cell_visit visit,
                       void *context) {
    const kvf_group_desc *group = kvf_model_group(kvf_shard_model(rank->shard), at.group);
    const kvf_group_shard_desc *held = &kvf_shard_get(rank->shard)->groups[at.group];
    uint64_t block = position / steps_per_block(rank->shard, at.group);
    uint32_t step = (uint32_t)(position % steps_per_block(rank->shard, at.group));
    const kvf_block_table *table = &rank->sequence->tables[at.group];
    assert_true(block < table->count);
    for (at.part = 0; at.part < group->part_count; at.part++) {
        uint32_t rows = group->parts[at.part].rows_per_step;
        for (at.row = 0; at.row < rows; at.row++)
            for (at.unit = held->parts[at.part].units.begin; at.unit < held->parts[at.part].units.end;
                 at.unit++) {
                kvf_cell_location cell = {.struct_size = sizeof cell};
                assert_ok(kvf_shard_locate(rank->shard, at.group, at.layer, at.part, table->ids[block],
                                           step * rows + at.row, at.unit, &cell));
                visit(context, rank, at, cell);
            }
    }
}

void each_cell(const cell_rank *rank, kvf_range layers, cell_visit visit, void *context) {
    const kvf_model *model = kvf_shard_model(rank->shard);
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        kvf_range own = kvf_shard_get(rank->shard)->layers;
        for (uint32_t layer = 0; layer < group->layer_count; layer++) {
            uint32_t number = group->layers[layer];
            if (number < layers.begin || number >= layers.end || number < own.begin || number >= own.end)
                continue;
            uint64_t position = 0;
            for (uint64_t step = 0; step < rank->sequence->steps[g]; step++)
                if (keeps(step_share(rank->shard, g), step))
                    visit_step(rank, (cell_place){.group = g, .layer = layer, .step = step}, position++,
                               visit, context);
        }
    }
}

unsigned char cell_byte(uint32_t seed, cell_place at, uint64_t i) {
    uint64_t mixed = mix(mix(mix(seed * 64 + at.group) * 64 + at.layer) * 64 + at.part);
    mixed = mix(mix(mixed * 64 + at.row) * 512 + at.unit) + at.step;
    return (unsigned char)(mix(mixed * 4096 + i) >> 8);
}

static void fill_cell(void *context, const cell_rank *rank, cell_place at, kvf_cell_location where) {
    unsigned char *bytes = (unsigned char *)rank->regions[where.region].address + where.offset;
    const uint64_t piece = where.bytes / where.pieces;
    for (uint64_t i = 0; i < where.bytes; i++)
        bytes[i / piece * where.piece_stride + i % piece] = cell_byte(*(const uint32_t *)context, at, i);
}

void rank_fill(const cell_rank *rank, kvf_range layers, uint32_t seed) {
    each_cell(rank, layers, fill_cell, &seed);
}
