#include "content.h"

#include <stdio.h>
#include <string.h>

#include "chance.h"

/* ---- models and engines ---------------------------------------------------------------------- */

#define PART(...) ((kvf_part_desc){.dtype = KVF_DTYPE_BF16, __VA_ARGS__})

static kvf_model *hybrid(void) {
    static const uint32_t full_layers[] = {0, 3}, window_layers[] = {1}, state_layers[] = {2};
    const kvf_part_desc heads[] = {PART(.name = "k", .units = 4, .cell_elements = 16),
                                   PART(.name = "v", .units = 4, .cell_elements = 16)};
    const kvf_part_desc state[] = {PART(.name = "conv", .units = 64, .cell_elements = 1, .rows_per_step = 3),
                                   PART(.name = "ssm", .units = 4, .cell_elements = 512, .tensor = 1)};
    const kvf_group_desc groups[] = {
        {.name = "full", .layers = full_layers, .layer_count = 2, .parts = heads, .part_count = 2},
        {.name = "window",
         .window_tokens = 40,
         .layers = window_layers,
         .layer_count = 1,
         .parts = heads,
         .part_count = 2},
        {.name = "state",
         .kind = KVF_GROUP_STATE,
         .layers = state_layers,
         .layer_count = 1,
         .parts = state,
         .part_count = 2}};
    const kvf_model_desc desc = {
        .struct_size = sizeof desc, .name = "hybrid", .layer_count = 4, .groups = groups, .group_count = 3};
    kvf_model *model = NULL;
    return kvf_model_create(&desc, &model) ? NULL : model;
}

static kvf_model *latents_for(uint32_t tokens) {
    static const uint32_t layers[] = {0, 1, 2};
    const kvf_part_desc part[] = {
        PART(.name = "latent", .units = 1, .cell_elements = 96, .tp_rule = KVF_TP_REPLICATE)};
    const kvf_group_desc group[] = {{.name = "mla",
                                     .tokens_per_step = tokens,
                                     .layers = layers,
                                     .layer_count = 3,
                                     .parts = part,
                                     .part_count = 1}};
    const kvf_model_desc desc = {
        .struct_size = sizeof desc, .name = "latent", .layer_count = 3, .groups = group, .group_count = 1};
    kvf_model *model = NULL;
    return kvf_model_create(&desc, &model) ? NULL : model;
}

static kvf_model *latent(void) {
    return latents_for(1);
}

static kvf_model *entries(void) {
    return latents_for(4);
}

static kvf_model *compressed(void) {
    static const uint32_t all[] = {0, 1, 2}, even[] = {0, 2}, odd[] = {1};
    const kvf_part_desc latents[] = {
        PART(.name = "latent", .units = 1, .cell_elements = 48, .tp_rule = KVF_TP_REPLICATE),
        PART(.name = "indexer", .units = 1, .cell_elements = 8, .tp_rule = KVF_TP_REPLICATE)};
    const kvf_part_desc heads[] = {PART(.name = "k", .units = 4, .cell_elements = 16)};
    const kvf_part_desc state[] = {PART(.name = "compressor", .units = 4, .cell_elements = 128)};
    const kvf_group_desc groups[] = {{.name = "window",
                                      .window_tokens = 40,
                                      .layers = all,
                                      .layer_count = 3,
                                      .parts = latents,
                                      .part_count = 1},
                                     {.name = "fours",
                                      .tokens_per_step = 4,
                                      .layers = even,
                                      .layer_count = 2,
                                      .parts = latents,
                                      .part_count = 2},
                                     {.name = "eights",
                                      .tokens_per_step = 8,
                                      .layers = odd,
                                      .layer_count = 1,
                                      .parts = heads,
                                      .part_count = 1},
                                     {.name = "state",
                                      .kind = KVF_GROUP_STATE,
                                      .layers = even,
                                      .layer_count = 2,
                                      .parts = state,
                                      .part_count = 1}};
    const kvf_model_desc desc = {.struct_size = sizeof desc,
                                 .name = "compressed",
                                 .layer_count = 3,
                                 .groups = groups,
                                 .group_count = 4};
    kvf_model *model = NULL;
    return kvf_model_create(&desc, &model) ? NULL : model;
}

kvf_model *content_model(uint32_t number) {
    static kvf_model *(*const models[CONTENT_MODELS])(void) = {hybrid, latent, compressed, entries};
    return models[number]();
}

const char *content_engine_name(uint32_t number) {
    static const char *const names[CONTENT_ENGINES] = {"P", "D", "E"};
    return names[number];
}

kvf_engine *content_engine(const kvf_model *model, uint32_t number) {
    const kvf_engine_spec specs[CONTENT_ENGINES] = {
        {.tp_size = 2, .all = {.tokens_per_block = 16, .block_count = 128, .order = "L|BPHN"}},
        {.tp_size = 1, .all = {.tokens_per_block = 8, .block_count = 224, .order = "BLHNP"}},
        {.pp_size = 2, .all = {.tokens_per_block = 32, .block_count = 80, .order = "L|BPNH"}}};
    kvf_engine_spec spec = specs[number];
    spec.struct_size = sizeof spec;
    spec.name = content_engine_name(number);
    spec.state.block_count = 24;
    kvf_engine *engine = NULL;
    return kvf_engine_build(model, &spec, &engine) ? NULL : engine;
}

uint32_t content_block_steps(const kvf_shard *shard, uint32_t group) {
    return kvf_shard_get(shard)->groups[group].tokens_per_block /
           kvf_model_group(kvf_shard_model(shard), group)->tokens_per_step;
}

/* ---- cells ----------------------------------------------------------------------------------- */

static const kvf_group_desc *group_of(const content_rank *rank, uint32_t group) {
    return kvf_model_group(kvf_shard_model(rank->shard), group);
}

content_part content_all(const content_rank *rank, uint32_t group, const content_table *table) {
    uint32_t per_block = content_block_steps(rank->shard, group);
    return (content_part){
        table->first_block * per_block, (table->first_block + table->count) * per_block, {0, UINT32_MAX}};
}

content_part content_wanted(const content_rank *rank, uint32_t group, const content_table *table) {
    uint64_t first = kvf_group_first_needed(group_of(rank, group), table->end);
    if (table->begin >= table->end)
        return (content_part){0};
    return (content_part){first > table->begin ? (uint32_t)first : table->begin, table->end, {0, UINT32_MAX}};
}

/* A walk over the cells of a part, with the function to call for each. */
typedef struct cell_walk {
    const content_rank *rank;
    const content_table *table;
    uint32_t group;
    void (*visit)(struct cell_walk *walk, const kvf_cell_location *cell, unsigned char *bytes);
    uint64_t seed, before;
    content_part wanted;
    uint32_t layer, part, step, row, unit, block; /* the current cell; layer: of the model */
    uint32_t wrong;
    content_cell *first;
} cell_walk;

static void walk_row(cell_walk *walk, uint32_t layer_index, kvf_range units, uint32_t rows) {
    const content_rank *rank = walk->rank;
    uint32_t per_block = content_block_steps(rank->shard, walk->group);
    uint32_t block = walk->table->ids[walk->step / per_block - walk->table->first_block];
    uint32_t row = walk->step % per_block * rows + walk->row;
    if (block == KVF_NO_BLOCK)
        return;
    walk->block = block;
    for (walk->unit = units.begin; walk->unit < units.end; walk->unit++) {
        kvf_cell_location cell = {.struct_size = sizeof cell};
        if (kvf_shard_locate(rank->shard, walk->group, layer_index, walk->part, block, row, walk->unit,
                             &cell))
            continue;
        unsigned char *region =
            rank->seen[cell.region] ? rank->seen[cell.region] : rank->regions[cell.region].address;
        walk->visit(walk, &cell, region + cell.offset);
    }
}

static void walk_cells(cell_walk *walk, content_part part) {
    const kvf_group_desc *group = group_of(walk->rank, walk->group);
    const kvf_group_shard_desc *held = &kvf_shard_get(walk->rank->shard)->groups[walk->group];
    kvf_range layers = kvf_shard_group_layers(walk->rank->shard, walk->group);
    for (uint32_t l = layers.begin; l < layers.end; l++) {
        walk->layer = group->layers[l];
        if (walk->layer < part.layers.begin || walk->layer >= part.layers.end)
            continue;
        for (walk->part = 0; walk->part < group->part_count; walk->part++) {
            uint32_t rows = group->parts[walk->part].rows_per_step;
            for (walk->step = part.begin; walk->step < part.end; walk->step++)
                for (walk->row = 0; walk->row < rows; walk->row++)
                    walk_row(walk, l, held->parts[walk->part].units, rows);
        }
    }
}

static uint64_t cell_word(const cell_walk *walk, uint64_t seed, uint64_t at) {
    uint64_t place = (uint64_t)walk->group << 60 | (uint64_t)walk->layer << 54 | (uint64_t)walk->part << 52 |
                     (uint64_t)walk->row << 50 | (uint64_t)walk->unit << 40 | (uint64_t)walk->step << 20 | at;
    return chance_mix(chance_mix(seed) ^ place);
}

static void fill_cell(cell_walk *walk, const kvf_cell_location *cell, unsigned char *bytes) {
    const content_rank *rank = walk->rank;
    for (uint64_t at = 0; at < cell->bytes; at += 8) {
        uint64_t word = cell_word(walk, walk->seed, at);
        memcpy(bytes + at, &word, cell->bytes - at < 8 ? cell->bytes - at : 8);
    }
    if (rank->mirror)
        rank->mirror->put(&rank->regions[cell->region], cell->offset, bytes, cell->bytes);
}

static void check_cell(cell_walk *walk, const kvf_cell_location *cell, unsigned char *bytes) {
    const uint64_t count = cell->bytes;
    bool wanted = walk->step >= walk->wanted.begin && walk->step < walk->wanted.end;
    uint64_t seed = wanted ? walk->seed : walk->before;
    for (uint64_t at = 0; at < count; at += 8) {
        uint64_t word = cell_word(walk, seed, at);
        if (memcmp(bytes + at, &word, count - at < 8 ? count - at : 8) == 0)
            continue;
        if (walk->wrong++ == 0) {
            *walk->first = (content_cell){.group = walk->group,
                                          .layer = walk->layer,
                                          .part = walk->part,
                                          .step = walk->step,
                                          .row = walk->row,
                                          .unit = walk->unit,
                                          .block = walk->block,
                                          .byte = (uint32_t)at,
                                          .wanted = wanted,
                                          .bytes = (uint32_t)(count - at < 8 ? count - at : 8)};
            memcpy(&walk->first->word, bytes + at, walk->first->bytes);
        }
        return;
    }
}

void content_fill(const content_rank *rank, uint32_t group, const content_table *table, content_part part,
                  uint64_t seed) {
    cell_walk walk = {.rank = rank, .table = table, .group = group, .visit = fill_cell, .seed = seed};
    walk_cells(&walk, part);
    if (rank->mirror)
        rank->mirror->settle();
}

static void get_regions(const content_rank *rank) {
    for (uint32_t i = 0; i < kvf_shard_get(rank->shard)->region_count; i++)
        rank->mirror->get(&rank->regions[i], rank->seen[i]);
    rank->mirror->settle();
}

uint32_t content_wrong(const content_rank *rank, uint32_t group, const content_table *table, uint64_t seed,
                       uint64_t before, content_cell *first) {
    cell_walk walk = {.rank = rank,
                      .table = table,
                      .group = group,
                      .visit = check_cell,
                      .seed = seed,
                      .before = before,
                      .wanted = content_wanted(rank, group, table),
                      .first = first};
    if (rank->mirror)
        get_regions(rank);
    walk_cells(&walk, content_all(rank, group, table));
    return walk.wrong;
}

void content_describe(const content_cell *cell, char out[CONTENT_WORDS]) {
    (void)snprintf(out, CONTENT_WORDS, "group %u, layer %u, part %u, step %u, row %u, unit %u, byte %u: %s",
                   cell->group, cell->layer, cell->part, cell->step, cell->row, cell->unit, cell->byte,
                   cell->wanted ? "not what was sent" : "was not to be touched");
}

bool content_is_of(const content_cell *cell, uint64_t seed, uint32_t *step) {
    cell_walk walk = {
        .group = cell->group, .layer = cell->layer, .part = cell->part, .row = cell->row, .unit = cell->unit};
    for (; cell->bytes == 8 && walk.step <= CONTENT_TOKENS; walk.step++)
        if (cell_word(&walk, seed, cell->byte) == cell->word) {
            *step = walk.step;
            return true;
        }
    return false;
}
