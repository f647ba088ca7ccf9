/*
 * Checksums by coordinates, compared with an oracle that visits the cells one by one. `checksum_test devices` computes
 * each sum a second time, of a copy of the memory on two devices and the host.
 */
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "agent/summing.h"
#include "base/clock.h"
#include "cells.h"
#include "channel_wise.h"
#include "cuda/device_image.h"
#include "cuda/hasher.h"
#include "devices.h"

#include <kvferry/checksum.h>

#define TOKENS 29u
#define MS 1000000ull
#define SEED 5u

/* ---- time ------------------------------------------------------------------------------------ */

static time_t ahead_s; /* of the machine's clock */

/* Found before the C library's. */
/* NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): the C library's begin with __ */
int clock_gettime(clockid_t clock, struct timespec *out) {
    const int failed = (int)syscall(SYS_clock_gettime, clock, out);
    out->tv_sec += failed ? 0 : ahead_s;
    return failed;
}

/* ---- engines with memory --------------------------------------------------------------------- */

#define RANKS_MAX 8u

typedef struct world {
    kvf_engine *engine;
    cell_sequence sequence;
    cell_rank ranks[RANKS_MAX];
    uint32_t count;
} world;

/* The world owns the engine from now on. */
static void world_take(world *w, kvf_engine *engine, uint32_t seed) {
    w->engine = engine;
    w->count = kvf_engine_rank_count(w->engine);
    assert_true(w->count <= RANKS_MAX);
    sequence_open(&w->sequence, kvf_engine_shard(w->engine, 0), TOKENS, seed);
    for (uint32_t i = 0; i < w->count; i++) {
        rank_open(&w->ranks[i], kvf_engine_shard(w->engine, i), &w->sequence, NULL, NULL);
        rank_fill(&w->ranks[i], all_layers(w->ranks[i].shard), SEED);
    }
}

static void world_open(world *w, const kvf_model *model, const kvf_engine_spec *spec) {
    world_take(w, engine_of(model, spec), spec->tp_size);
}

static void world_close(world *w) {
    for (uint32_t i = 0; i < w->count; i++)
        rank_close(&w->ranks[i]);
    sequence_close(&w->sequence);
    kvf_engine_free(w->engine);
}

static bool keeps(const cell_rank *rank, uint32_t group, uint64_t step) {
    kvf_token_share share = kvf_shard_get(rank->shard)->groups[group].tokens;
    return step / share.width % share.count == share.index;
}

static kvf_range common(kvf_range a, kvf_range b) {
    kvf_range both = {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
    return both.begin < both.end ? both : range(0, 0);
}

static kvf_range units_of(const cell_rank *rank, uint32_t group, uint32_t part) {
    return kvf_shard_get(rank->shard)->groups[group].parts[part].units;
}

static bool on_devices;

/* Copies the regions of a rank to the first device, the second and the host in turn. */
static void copy_to_devices(const cell_rank *rank, kvf_memory *out) {
    for (uint32_t r = 0; r < rank->region_count; r++) {
        void *seen;
        out[r] = rank->regions[r];
        if (r % 3 == 2)
            continue;
        out[r] = device_memory(r % 3, rank->regions[r].bytes, &seen);
        memcpy(seen, rank->regions[r].address, rank->regions[r].bytes);
        devices_put(seen);
    }
}

#define REGIONS_MAX 64u
#define SUMS_MAX 4096u

static void steps_on_devices(const cell_rank *rank, uint32_t group, uint32_t part, kvf_range layers,
                             kvf_range units, const kvf_block_table *table, uint64_t begin, uint64_t end,
                             const uint64_t *expected) {
    kvf_memory regions[REGIONS_MAX];
    uint64_t sums[TOKENS];
    if (!on_devices)
        return;
    assert_true(rank->region_count <= REGIONS_MAX && end - begin <= TOKENS);
    copy_to_devices(rank, regions);
    assert_ok(kvf_checksum_steps(rank->shard, regions, group, part, layers, units, table, begin, end, sums));
    assert_memory_equal(sums, expected, (end - begin) * sizeof *sums);
    devices_free();
}

static void cells_on_devices(const cell_rank *rank, uint32_t group, uint32_t part, kvf_range layers,
                             kvf_range units, const kvf_block_table *table, uint64_t step,
                             const uint64_t *expected) {
    const uint64_t count = (uint64_t)(layers.end - layers.begin) * (units.end - units.begin);
    kvf_memory regions[REGIONS_MAX];
    uint64_t sums[SUMS_MAX];
    if (!on_devices)
        return;
    assert_true(rank->region_count <= REGIONS_MAX && count <= SUMS_MAX);
    copy_to_devices(rank, regions);
    assert_ok(kvf_checksum_cells(rank->shard, regions, group, part, layers, units, table, step, sums));
    assert_memory_equal(sums, expected, count * sizeof *sums);
    devices_free();
}

/* The sums of all steps of the sequence. */
static void sum_steps(const cell_rank *rank, uint32_t group, uint32_t part, kvf_range layers, kvf_range units,
                      uint64_t sums[TOKENS]) {
    const kvf_block_table *table = &rank->sequence->tables[group];
    const uint64_t end = rank->sequence->steps[group];
    assert_ok(
        kvf_checksum_steps(rank->shard, rank->regions, group, part, layers, units, table, 0, end, sums));
    steps_on_devices(rank, group, part, layers, units, table, 0, end, sums);
}

/* ---- models ---------------------------------------------------------------------------------- */

static kvf_model *four_heads(void) {
    return attention(3, 4, 8);
}

static kvf_model *two_heads(void) {
    return attention(2, 2, 3);
}

static kvf_model *latents(void) {
    return latent(3);
}

static kvf_model *states(void) {
    return state_model(2);
}

static kvf_model *hybrids(void) {
    return hybrid(4);
}

#define SPEC(...)                                                                                            \
    { .struct_size = sizeof(kvf_engine_spec), __VA_ARGS__ }
#define CACHE(...)                                                                                           \
    { .block_count = 40, __VA_ARGS__ }

/* Any two engines of a row hold the same content. */
static const struct {
    kvf_model *(*model)(void);
    kvf_engine_spec engines[4];
} rows[] = {
    {four_heads,
     {SPEC(.tp_size = 4, .all = CACHE(.tokens_per_block = 16)),
      SPEC(.tp_size = 2, .all = CACHE(.tokens_per_block = 6, .order = "BLNHP")),
      SPEC(.tp_size = 3, .pp_size = 2, .all = CACHE(.tokens_per_block = 4, .order = "LP|BNH")),
      SPEC(.tp_size = 8, .dcp_size = 2, .all = CACHE(.tokens_per_block = 8, .kernel_blocks_per_block = 2))}},
    {two_heads,
     {SPEC(.tp_size = 4, .dcp_size = 2, .dcp_width = 3, .all = CACHE(.tokens_per_block = 2)),
      SPEC(.tp_size = 2, .all = CACHE(.tokens_per_block = 6)),
      SPEC(.tp_size = 8, .dcp_size = 4, .all = CACHE(.tokens_per_block = 1, .order = "LBPHN")),
      SPEC(.all = CACHE(.tokens_per_block = 5, .order = "L|BHNP"))}},
    {latents,
     {SPEC(.tp_size = 2, .all = CACHE(.tokens_per_block = 16)),
      SPEC(.tp_size = 4, .dcp_size = 4, .all = CACHE(.tokens_per_block = 2)),
      SPEC(.pp_size = 3, .all = CACHE(.tokens_per_block = 3)),
      SPEC(.tp_size = 2, .dcp_size = 2, .dcp_width = 4, .all = CACHE(.tokens_per_block = 4))}},
    {states,
     {SPEC(.tp_size = 2, .all = CACHE(.tokens_per_block = 16)),
      SPEC(.all = CACHE(.tokens_per_block = 4), .state = {.order = "L|BTNPH"}),
      SPEC(.tp_size = 2, .pp_size = 2, .all = CACHE(.tokens_per_block = 4), .state = {.order = "LBPHN"}),
      SPEC(.all = CACHE(.tokens_per_block = 4), .state = {.page_bytes = 500})}},
    {hybrids,
     {SPEC(.tp_size = 2, .all = CACHE(.tokens_per_block = 16)),
      SPEC(.tp_size = 1, .pp_size = 2, .all = CACHE(.tokens_per_block = 8)),
      SPEC(.tp_size = 2, .all = CACHE(.tokens_per_block = 7, .order = "L|BPNH")),
      SPEC(.pp_size = 4, .all = CACHE(.tokens_per_block = 4))}},
};

/* ---- across shapes --------------------------------------------------------------------------- */

/* The cells that two ranks both hold must have the same sums; returns how many sums were compared. */
static uint32_t compare_ranks(const cell_rank *a, const cell_rank *b) {
    const kvf_model *model = kvf_shard_model(a->shard);
    uint32_t compared = 0;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        kvf_range layers = common(kvf_shard_group_layers(a->shard, g), kvf_shard_group_layers(b->shard, g));
        for (uint32_t part = 0; part < kvf_model_group(model, g)->part_count; part++) {
            kvf_range units = common(units_of(a, g, part), units_of(b, g, part));
            if (layers.begin == layers.end || units.begin == units.end)
                continue;
            uint64_t of_a[TOKENS], of_b[TOKENS];
            sum_steps(a, g, part, layers, units, of_a);
            sum_steps(b, g, part, layers, units, of_b);
            for (uint64_t step = 0; step < a->sequence->steps[g]; step++) {
                assert_true(keeps(a, g, step) == (of_a[step] != 0));
                assert_true(keeps(b, g, step) == (of_b[step] != 0));
                if (keeps(a, g, step) && keeps(b, g, step)) {
                    assert_int_equal(of_a[step], of_b[step]);
                    compared++;
                }
            }
        }
    }
    return compared;
}

static void equal_content_has_equal_sums_whatever_the_shape(void **state) {
    (void)state;
    for (size_t r = 0; r < COUNT_OF(rows); r++) {
        kvf_model *model = rows[r].model();
        world worlds[4];
        uint32_t compared = 0;
        for (size_t i = 0; i < 4; i++)
            world_open(&worlds[i], model, &rows[r].engines[i]);
        for (size_t i = 0; i < 4; i++)
            for (size_t j = 0; j < 4; j++)
                for (uint32_t a = 0; a < worlds[i].count; a++)
                    for (uint32_t b = 0; b < worlds[j].count; b++)
                        compared += compare_ranks(&worlds[i].ranks[a], &worlds[j].ranks[b]);
        assert_true(compared > 100);
        for (size_t i = 0; i < 4; i++)
            world_close(&worlds[i]);
        kvf_model_free(model);
    }
}

/* Keys that lie whole, in two pieces, and channel by channel. */
static void cells_have_the_same_sums_however_they_are_cut(void **state) {
    (void)state;
    static const uint32_t pieces[] = {1, 2, CHANNELS};
    kvf_model *model = attention(LAYERS, HEADS, CHANNELS);
    uint64_t sums[COUNT_OF(pieces)][TOKENS];
    for (uint32_t i = 0; i < COUNT_OF(pieces); i++) {
        world w;
        world_take(&w, channel_wise(model, 1, 8, pieces[i], "channel-wise"), i);
        sum_steps(&w.ranks[0], 0, 0, range(0, LAYERS), range(0, HEADS), sums[i]);
        world_close(&w);
    }
    assert_memory_equal(sums[0], sums[1], sizeof sums[0]);
    assert_memory_equal(sums[0], sums[2], sizeof sums[0]);
    assert_int_not_equal(sums[0][0], sums[0][1]);
    kvf_model_free(model);
}

/* The first layer's keys lie whole, and those of the other two channel by channel. */
static void each_layer_may_be_cut_in_a_way_of_its_own(void **state) {
    (void)state;
    kvf_model *model = attention(LAYERS, HEADS, CHANNELS);
    kvf_engine *whole = channel_wise(model, 1, 8, 1, "whole"), *mixed;
    kvf_shard *cut = channel_wise_shard(model, 0, 1, 8, CHANNELS), *shard;
    kvf_shard_desc desc = *kvf_shard_get(cut);
    kvf_group_shard_desc group = desc.groups[0];
    kvf_placement places[LAYERS][2];
    memcpy(places, group.placements, sizeof places);
    places[0][0] = *kvf_shard_placement(kvf_engine_shard(whole, 0), 0, 0, 0);
    group.placements = places[0];
    desc.groups = &group;
    assert_ok(kvf_shard_create(model, &desc, &shard));
    assert_ok(kvf_engine_from_shards(model, "mixed", &shard, 1, &mixed));
    uint64_t sums[2][2][TOKENS];
    for (uint32_t i = 0; i < 2; i++) {
        world w;
        world_take(&w, i ? mixed : whole, i);
        sum_steps(&w.ranks[0], 0, 0, range(0, LAYERS), range(0, HEADS), sums[i][0]);
        sum_steps(&w.ranks[0], 0, 0, range(1, LAYERS), range(0, HEADS), sums[i][1]);
        world_close(&w);
    }
    assert_memory_equal(sums[0], sums[1], sizeof sums[0]);
    kvf_shard_free(cut);
    kvf_model_free(model);
}

/* Cells of middling size are fetched before they are hashed, 64 of 64 bytes, and down to 4 of 1024. */
static void each_cell_is_summed_once_whatever_its_size(void **state) {
    (void)state;
    static const uint32_t elements[] = {31, 32, 48, 512, 513};
    for (size_t i = 0; i < COUNT_OF(elements); i++) {
        kvf_model *model = attention(3, 1, elements[i]);
        world w;
        uint64_t sums[TOKENS], cell;
        world_open(&w, model, ENGINE(.all = {.block_count = 40, .tokens_per_block = 1}));
        const cell_rank *rank = &w.ranks[0];
        sum_steps(rank, 0, 0, range(0, 3), range(0, 1), sums);
        for (uint64_t step = 0; step < TOKENS; step++) {
            for (uint32_t layer = 0; layer < 3; layer++) {
                assert_ok(kvf_checksum_steps(rank->shard, rank->regions, 0, 0, range(layer, layer + 1),
                                             range(0, 1), &w.sequence.tables[0], step, step + 1, &cell));
                assert_int_not_equal(cell, 0);
                sums[step] -= cell;
            }
            assert_int_equal(sums[step], 0);
        }
        world_close(&w);
        kvf_model_free(model);
    }
}

static void sums_of_areas_apart_add_up(void **state) {
    (void)state;
    kvf_model *model = four_heads();
    world w;
    world_open(&w, model, &rows[0].engines[1]);
    const cell_rank *rank = &w.ranks[1]; /* heads 2 and 3 */
    uint64_t whole[TOKENS], part[TOKENS], sums[TOKENS] = {0};
    sum_steps(rank, 0, 1, range(0, 3), range(2, 4), whole);
    for (uint32_t layer = 0; layer < 3; layer++) {
        for (uint32_t unit = 2; unit < 4; unit++) {
            sum_steps(rank, 0, 1, range(layer, layer + 1), range(unit, unit + 1), part);
            for (uint32_t step = 0; step < TOKENS; step++)
                sums[step] += part[step];
        }
    }
    assert_memory_equal(sums, whole, sizeof whole);
    world_close(&w);
    kvf_model_free(model);
}

static void the_sums_of_token_shares_add_up_to_those_of_a_rank_with_all_tokens(void **state) {
    (void)state;
    kvf_model *model = two_heads();
    world shared, plain;
    world_open(&shared, model, &rows[1].engines[0]);
    world_open(&plain, model, &rows[1].engines[1]);
    uint64_t a[TOKENS], b[TOKENS], all[TOKENS];
    sum_steps(&shared.ranks[0], 0, 0, range(0, 2), range(0, 1), a);
    sum_steps(&shared.ranks[1], 0, 0, range(0, 2), range(0, 1), b);
    sum_steps(&plain.ranks[0], 0, 0, range(0, 2), range(0, 1), all);
    for (uint32_t step = 0; step < TOKENS; step++)
        assert_int_equal(a[step] + b[step], all[step]);
    world_close(&shared);
    world_close(&plain);
    kvf_model_free(model);
}

/* The sums of unit 0 of a part in the first layer of a model, whose memory is full of one byte. */
static void sums_of_equal_bytes(kvf_model *model, uint32_t part, uint64_t sums[TOKENS]) {
    world w;
    world_open(&w, model, ENGINE(.all = {.block_count = 40}));
    for (uint32_t r = 0; r < w.ranks[0].region_count; r++)
        memset(w.ranks[0].regions[r].address, 0x5a, w.ranks[0].regions[r].bytes);
    sum_steps(&w.ranks[0], 0, part, range(0, 1), range(0, 1), sums);
    world_close(&w);
    kvf_model_free(model);
}

/* Peers of another version compare their sums with these. */
static void sums_are_the_same_in_every_version(void **state) {
    (void)state;
    uint64_t sums[TOKENS];
    sums_of_equal_bytes(attention(1, 1, 4), 1, sums);
    assert_int_equal(sums[0], 0x4fbf45ef4cc2fac0u);
    assert_int_equal(sums[28], 0x0a616343ecd9b119u);
    kvf_model *convolved = states();
    assert_int_equal(kvf_model_group(convolved, 0)->parts[0].rows_per_step, 3);
    sums_of_equal_bytes(convolved, 0, sums);
    assert_int_equal(sums[0], 0x8294f70abd7b9e96u); /* three rows */
}

/* ---- finding the wrong cell ------------------------------------------------------------------- */

/* Notes to which cell each byte of memory belongs, by region and offset. */
static void note_owner(void *context, const cell_rank *rank, cell_place at, kvf_cell_location where) {
    cell_place *const *owners = context;
    (void)rank;
    for (uint64_t i = 0; i < where.bytes; i++)
        owners[where.region][where.offset + i] = at;
}

#define PARTS_MAX 4u

/* The sums of everything that a rank holds. */
typedef struct all_sums {
    uint64_t sums[2][PARTS_MAX][TOKENS];
} all_sums;

static void sum_all(const cell_rank *rank, all_sums *out) {
    const kvf_model *model = kvf_shard_model(rank->shard);
    memset(out, 0, sizeof *out);
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++)
        for (uint32_t p = 0; p < kvf_model_group(model, g)->part_count; p++)
            sum_steps(rank, g, p, kvf_shard_group_layers(rank->shard, g), units_of(rank, g, p),
                      out->sums[g][p]);
}

/* Compares the sums of a step's cells between two memories and returns the one cell that differs; the cells' sums must
 * add up to the step's. */
static cell_place find_wrong(const cell_rank *rank, const cell_rank *right, uint32_t group, uint32_t part,
                             uint64_t step, uint64_t sum) {
    uint64_t got[64], wanted[64], total = 0;
    kvf_range layers = kvf_shard_group_layers(rank->shard, group), units = units_of(rank, group, part);
    uint32_t width = units.end - units.begin, count = (layers.end - layers.begin) * width, differing = 0;
    assert_true(count <= COUNT_OF(got));
    const kvf_block_table *table = &rank->sequence->tables[group];
    assert_ok(kvf_checksum_cells(rank->shard, rank->regions, group, part, layers, units, table, step, got));
    cells_on_devices(rank, group, part, layers, units, table, step, got);
    assert_ok(
        kvf_checksum_cells(right->shard, right->regions, group, part, layers, units, table, step, wanted));
    cell_place at = {.group = group, .part = part, .step = step};
    for (uint32_t i = 0; i < count; i++) {
        total += got[i];
        if (got[i] != wanted[i]) {
            differing++;
            at.layer = layers.begin + i / width;
            at.unit = units.begin + i % width;
        }
    }
    assert_int_equal(total, sum);
    assert_int_equal(differing, 1);
    return at;
}

/* Compares with the sums from before a byte of `owner` was changed: only the sum of its step may differ. */
static void check_flip(const cell_rank *rank, const cell_rank *right, const all_sums *before,
                       const cell_place *owner) {
    all_sums after;
    sum_all(rank, &after);
    for (uint32_t g = 0; g < 2; g++)
        for (uint32_t p = 0; p < PARTS_MAX; p++)
            for (uint64_t step = 0; step < TOKENS; step++) {
                bool own = owner->group == g && owner->part == p && owner->step == step;
                if (own != (after.sums[g][p][step] != before->sums[g][p][step]))
                    fail_msg("group %u, part %u, step %llu", g, p, (unsigned long long)step);
                if (!own)
                    continue;
                cell_place found = find_wrong(rank, right, g, p, step, after.sums[g][p][step]);
                assert_int_equal(found.layer, owner->layer);
                assert_int_equal(found.unit, owner->unit);
            }
}

static void flip_every_byte(const cell_rank *rank) {
    /* group UINT32_MAX: the byte belongs to no cell */
    cell_place **owners = calloc(rank->region_count, sizeof *owners);
    cell_rank right;
    all_sums before;
    rank_copy(&right, rank);
    sum_all(rank, &before);
    assert_non_null(owners);
    for (uint32_t r = 0; r < rank->region_count; r++) {
        owners[r] = malloc(rank->regions[r].bytes * sizeof **owners);
        assert_non_null(owners[r]);
        memset(owners[r], 0xff, rank->regions[r].bytes * sizeof **owners);
    }
    each_cell(rank, all_layers(rank->shard), note_owner, owners);
    uint32_t owned = 0;
    for (uint32_t r = 0; r < rank->region_count; r++) {
        unsigned char *bytes = rank->regions[r].address;
        for (uint64_t at = 0; at < rank->regions[r].bytes; at++) {
            /* Of the memory outside of the sequence only a sample is tried. */
            owned += owners[r][at].group != UINT32_MAX;
            if (owners[r][at].group == UINT32_MAX && at % 61 != 0)
                continue;
            unsigned char flip = (unsigned char)(1u << at % 8);
            bytes[at] ^= flip;
            check_flip(rank, &right, &before, &owners[r][at]);
            bytes[at] ^= flip;
        }
        free(owners[r]);
    }
    assert_true(owned > 100);
    free(owners);
    rank_close(&right);
}

static void a_flipped_byte_changes_its_steps_sum_alone_and_is_found(void **state) {
    (void)state;
    for (size_t r = 0; r < COUNT_OF(rows); r++) {
        kvf_model *model = rows[r].model();
        for (size_t i = 0; i < 2; i++) {
            world w;
            world_open(&w, model, &rows[r].engines[i]);
            flip_every_byte(&w.ranks[w.count - 1]);
            world_close(&w);
        }
        kvf_model_free(model);
    }
}

/* Two cells have each other's content: no byte is lost, but both are in the wrong place. */
static void cells_that_changed_places_are_noticed(void **state) {
    (void)state;
    kvf_model *model = attention(2, 2, 4); /* cells of 8 bytes */
    world w;
    world_open(&w, model, ENGINE(.all = {.block_count = 40, .tokens_per_block = 4}));
    const cell_rank *rank = &w.ranks[0];
    static const cell_place pairs[][2] = {
        {{.layer = 0, .unit = 0, .step = 3}, {.layer = 0, .unit = 1, .step = 3}},
        {{.layer = 0, .unit = 0, .step = 3}, {.layer = 1, .unit = 0, .step = 3}},
        {{.layer = 0, .unit = 0, .step = 3}, {.layer = 0, .unit = 0, .step = 4}},
    };
    for (size_t i = 0; i < COUNT_OF(pairs); i++) {
        unsigned char *cells[2], kept[8];
        for (int k = 0; k < 2; k++) {
            const cell_place *at = &pairs[i][k];
            kvf_cell_location place = {.struct_size = sizeof place};
            assert_ok(kvf_shard_locate(rank->shard, 0, at->layer, 0, w.sequence.tables[0].ids[at->step / 4],
                                       (uint32_t)(at->step % 4), at->unit, &place));
            assert_int_equal(place.bytes, sizeof kept);
            cells[k] = (unsigned char *)rank->regions[place.region].address + place.offset;
        }
        all_sums before, after;
        sum_all(rank, &before);
        memcpy(kept, cells[0], sizeof kept);
        memcpy(cells[0], cells[1], sizeof kept);
        memcpy(cells[1], kept, sizeof kept);
        sum_all(rank, &after);
        for (int k = 0; k < 2; k++)
            assert_int_not_equal(after.sums[0][0][pairs[i][k].step], before.sums[0][0][pairs[i][k].step]);
    }
    world_close(&w);
    kvf_model_free(model);
}

/* ---- tables and refusals --------------------------------------------------------------------- */

static void a_table_may_begin_within_the_sequence(void **state) {
    (void)state;
    kvf_model *model = four_heads();
    world w;
    world_open(&w, model, &rows[0].engines[1]); /* blocks of 6 tokens */
    const cell_rank *rank = &w.ranks[0];
    uint64_t all[TOKENS], tail[7];
    sum_steps(rank, 0, 0, range(0, 3), range(0, 2), all);
    kvf_block_table table = w.sequence.tables[0];
    table.ids += 3;
    table.count -= 3;
    table.first_block = 3;
    assert_ok(
        kvf_checksum_steps(rank->shard, rank->regions, 0, 0, range(0, 3), range(0, 2), &table, 20, 27, tail));
    assert_memory_equal(tail, all + 20, sizeof tail);
    steps_on_devices(rank, 0, 0, range(0, 3), range(0, 2), &table, 20, 27, tail);
    table.first_block = 1000003; /* further on than the steps, and the blocks, that a device sums at once */
    assert_ok(kvf_checksum_steps(rank->shard, rank->regions, 0, 0, range(0, 3), range(0, 2), &table, 6000020,
                                 6000027, tail));
    steps_on_devices(rank, 0, 0, range(0, 3), range(0, 2), &table, 6000020, 6000027, tail);
    table.first_block = 3;
    assert_fails(
        kvf_checksum_steps(rank->shard, rank->regions, 0, 0, range(0, 3), range(0, 2), &table, 17, 18, tail),
        KVF_E_RANGE, "step 17", "block 2", "[3, 5)");
    assert_fails(
        kvf_checksum_steps(rank->shard, rank->regions, 0, 0, range(0, 3), range(0, 2), &table, 29, 31, tail),
        KVF_E_RANGE, "step 30", "block 5", "[3, 5)");
    world_close(&w);
    kvf_model_free(model);
}

/* A rank that holds keys and no values: their placements, which are not checked, may name any region. */
static void no_units_of_a_part_that_is_not_held_have_no_sums(void **state) {
    (void)state;
    kvf_model *model = attention(1, 1, 4);
    const kvf_part_share shares[] = {{{0, 1}, 0, 1}, {{0, 0}, 0, 1}};
    const kvf_placement placements[] = {PLACED(0, 0, 128, 8, 8), PLACED(UINT32_MAX, 0, 0, 0, 0)};
    unsigned char memory[512] = {1};
    const uint64_t bytes = sizeof memory;
    const kvf_memory region = {.struct_size = sizeof region, .address = memory, .bytes = bytes};
    const kvf_group_shard_desc group = {
        .tokens_per_block = 16, .block_count = 4, .parts = shares, .placements = placements};
    const kvf_shard_desc desc = {.struct_size = sizeof desc,
                                 .layers = {0, 1},
                                 .region_bytes = &bytes,
                                 .region_count = 1,
                                 .groups = &group};
    const kvf_block_table table = TABLE(0, 1);
    kvf_shard *shard = NULL;
    uint64_t sums[2] = {7, 7};
    assert_ok(kvf_shard_create(model, &desc, &shard));
    assert_ok(kvf_checksum_steps(shard, &region, 0, 1, range(0, 1), range(0, 0), &table, 3, 5, sums));
    assert_int_equal(sums[0], 0);
    assert_int_equal(sums[1], 0);
    sums[0] = 7;
    assert_ok(kvf_checksum_cells(shard, &region, 0, 1, range(0, 1), range(0, 0), &table, 3, sums));
    assert_int_equal(sums[0], 7);
    kvf_shard_free(shard);
    kvf_model_free(model);
}

static void sums_of_single_cells_add_up_to_those_of_steps(void **state) {
    (void)state;
    kvf_model *model = four_heads();
    world w;
    world_open(&w, model, &rows[0].engines[1]);
    const cell_rank *rank = &w.ranks[0];
    const kvf_block_table *table = &w.sequence.tables[0];
    uint64_t steps[TOKENS];
    sum_steps(rank, 0, 1, range(0, 3), range(0, 2), steps);
    for (uint64_t step = 0; step < TOKENS; step++) {
        uint64_t cells[6], total = 0;
        assert_ok(kvf_checksum_cells(rank->shard, rank->regions, 0, 1, range(0, 3), range(0, 2), table, step,
                                     cells));
        cells_on_devices(rank, 0, 1, range(0, 3), range(0, 2), table, step, cells);
        for (uint32_t i = 0; i < COUNT_OF(cells); i++)
            total += cells[i];
        assert_true(total == steps[step]);
    }
    world_close(&w);
    kvf_model_free(model);
}

/* The sums overwrite whatever the caller had there, and nothing behind them. */
static void each_cell_has_a_sum_of_its_own(void **state) {
    (void)state;
    kvf_model *model = four_heads();
    world w;
    world_open(&w, model, &rows[0].engines[1]);
    const cell_rank *rank = &w.ranks[1]; /* heads 2 and 3 */
    const kvf_block_table *table = &w.sequence.tables[0];
    uint64_t cells[5] = {7, 7, 7, 7, 7}, steps[TOKENS];
    assert_ok(
        kvf_checksum_cells(rank->shard, rank->regions, 0, 1, range(1, 3), range(2, 4), table, 5, cells));
    cells_on_devices(rank, 0, 1, range(1, 3), range(2, 4), table, 5, cells);
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t layer = 1 + i / 2, unit = 2 + i % 2;
        sum_steps(rank, 0, 1, range(layer, layer + 1), range(unit, unit + 1), steps);
        assert_int_equal(cells[i], steps[5]);
    }
    assert_int_equal(cells[4], 7);
    world_close(&w);
    kvf_model_free(model);
}

/* A device sums up to 8192 cells at once; the last two of four layers have 4000. */
static void layers_before_the_wanted_ones_take_no_sums(void **state) {
    (void)state;
    kvf_model *model = attention(4, 2000, 1);
    world w;
    world_open(&w, model, ENGINE(.all = {.block_count = 40, .tokens_per_block = 1}));
    const cell_rank *rank = &w.ranks[0];
    const kvf_block_table *table = &w.sequence.tables[0];
    static uint64_t cells[4000];
    assert_ok(
        kvf_checksum_cells(rank->shard, rank->regions, 0, 0, range(2, 4), range(0, 2000), table, 5, cells));
    assert_int_not_equal(cells[0], cells[2000]);
    cells_on_devices(rank, 0, 0, range(2, 4), range(0, 2000), table, 5, cells);
    world_close(&w);
    kvf_model_free(model);
}

/* How many jobs devices need for the sums of an area, whose sums are compared; they work only when they are told to. */
static uint32_t jobs_for(kvf_area *area, const kvf_sum_places *places, const uint64_t *expected,
                         uint64_t count) {
    kvf_summing *summing = NULL;
    uint32_t jobs = 0;
    memset(places->sums, 0, count * sizeof *expected);
    assert_ok(kvf_area_check(area));
    assert_ok(kvf_summing_make(&summing));
    devices_delay(3600ull * 1000000000);
    kvf_status status = kvf_summing_start(summing, area, places);
    for (; status == KVF_IN_PROGRESS && jobs < 9; jobs++) {
        devices_hasten();
        status = kvf_summing_poll(summing);
    }
    devices_delay(0);
    devices_hasten();
    kvf_summing_free(summing);
    devices_free();
    assert_ok(status);
    assert_memory_equal(places->sums, expected, count * sizeof *expected);
    return jobs;
}

/* A job has up to 8192 sums, up to 128 layers, and one device. */
static void neighbouring_layers_are_one_job_of_a_device_if_they_fit(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    static const struct {
        uint32_t layers, units;
        kvf_range asked;
        bool apart; /* each layer has a region, on the first device, the second and the host in turn */
        uint32_t jobs;
    } cases[] = {{2, 4096, {0, 2}, false, 1},
                 {3, 4096, {0, 3}, false, 2},
                 {130, 1, {0, 130}, false, 2},
                 {130, 1, {100, 130}, false, 1},
                 {4, 1, {0, 4}, true, 3}};
    static uint64_t sums[3 * 4096], expected[3 * 4096];
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        kvf_model *model = attention(cases[i].layers, cases[i].units, 1);
        world w;
        kvf_memory regions[REGIONS_MAX];
        const kvf_range units = {0, cases[i].units};
        world_open(&w, model,
                   ENGINE(.all = {.block_count = 40,
                                  .tokens_per_block = 1,
                                  .order = cases[i].apart ? "L|BPHN" : "BLPHN"}));
        const cell_rank *rank = &w.ranks[0];
        const kvf_block_table *table = &w.sequence.tables[0];
        assert_ok(
            kvf_checksum_cells(rank->shard, rank->regions, 0, 0, cases[i].asked, units, table, 5, expected));
        const size_t left = devices_left();
        copy_to_devices(rank, regions);
        kvf_area area = {.shard = rank->shard,
                         .regions = regions,
                         .layers = cases[i].asked,
                         .units = units,
                         .table = table,
                         .begin = 5,
                         .end = 6};
        const uint64_t count = (uint64_t)(area.layers.end - area.layers.begin) * units.end;
        assert_int_equal(
            jobs_for(&area, &(kvf_sum_places){sums, .layer = units.end, .unit = 1}, expected, count),
            cases[i].jobs);
        assert_int_equal(devices_left(), left);
        world_close(&w);
        kvf_model_free(model);
    }
}

/* A sum that the first device computes, `delay_ns` late. */
typedef struct late_sum {
    kvf_model *model;
    world w;
    kvf_memory regions[REGIONS_MAX];
    kvf_summing *summing;
    uint64_t sum;
    size_t left; /* of devices, before */
} late_sum;

static void late_sum_start(late_sum *late, uint64_t delay_ns) {
    *late = (late_sum){.model = attention(1, 1, 4), .left = devices_left()};
    world_open(&late->w, late->model, ENGINE(.all = {.block_count = 40, .tokens_per_block = 1}));
    const cell_rank *rank = &late->w.ranks[0];
    copy_to_devices(rank, late->regions);
    kvf_area area = {.shard = rank->shard,
                     .regions = late->regions,
                     .layers = range(0, 1),
                     .units = range(0, 1),
                     .table = &late->w.sequence.tables[0],
                     .begin = 5,
                     .end = 6};
    assert_ok(kvf_area_check(&area));
    assert_ok(kvf_summing_make(&late->summing));
    assert_false(kvf_summing_is_busy(late->summing));
    devices_delay(delay_ns);
    assert_int_equal(kvf_summing_start(late->summing, &area, &(kvf_sum_places){&late->sum, .unit = 1}),
                     KVF_IN_PROGRESS);
    assert_true(kvf_summing_is_busy(late->summing));
    devices_delay(0);
}

/* How long freeing the sums takes. */
static uint64_t late_sum_free(late_sum *late) {
    const uint64_t begun = kvf_now(&kvf_monotonic);
    kvf_summing_free(late->summing);
    return kvf_now(&kvf_monotonic) - begun;
}

static void late_sum_end(late_sum *late) {
    devices_free();
    assert_int_equal(devices_left(), late->left);
    world_close(&late->w);
    kvf_model_free(late->model);
}

/* The device reads the memory until it has finished, and what it works with is freed only then. */
static void sums_that_nobody_wants_any_more_are_waited_for(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    late_sum late;
    late_sum_start(&late, 50 * MS);
    assert_in_range(late_sum_free(&late), 1, 20000 * MS); /* less than for a device that hangs */
    late_sum_end(&late);
}

/* The 30 s of a job count from its start. What the device works with stays, and only the test knows of it. */
static void a_device_that_hangs_is_not_waited_for_once_its_time_is_over(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    const uint64_t *found;
    late_sum late;
    late_sum_start(&late, 3600000 * MS);
    kvf_hasher *stays = *(kvf_hasher *const *)(const void *)late.summing; /* that of the first device */
    ahead_s = 30;
    assert_in_range(late_sum_free(&late), 0, 10000 * MS);
    ahead_s = 0;
    assert_int_equal(kvf_hasher_poll(stays, &found), KVF_IN_PROGRESS);
    devices_hasten();
    assert_ok(kvf_hasher_poll(stays, &found));
    assert_ok(kvf_hasher_close(stays));
    late_sum_end(&late);
}

static void a_layer_of_more_cells_than_a_device_sums_at_once_is_refused(void **state) {
    (void)state;
    kvf_model *model = attention(1, 8193, 1);
    world w;
    kvf_memory regions[REGIONS_MAX];
    static uint64_t cells[8193];
    world_open(&w, model, ENGINE(.all = {.block_count = 40, .tokens_per_block = 1}));
    const cell_rank *rank = &w.ranks[0];
    const kvf_block_table *table = &w.sequence.tables[0];
    copy_to_devices(rank, regions);
    assert_fails(kvf_checksum_cells(rank->shard, regions, 0, 0, range(0, 1), range(0, 8193), table, 5, cells),
                 KVF_E_LIMIT, "8193 units of a layer", "up to 8192");
    devices_free();
    world_close(&w);
    kvf_model_free(model);
}

/* A device sums up to 8192 steps at once. The blocks of the table are used again and again. */
static void steps_are_summed_in_as_many_parts_as_a_device_needs(void **state) {
    (void)state;
    enum { BLOCK = 16, BEGIN = 5, END = 8192 + 8192 + 40 };
    kvf_model *model = attention(1, 1, 4);
    world w;
    kvf_memory regions[REGIONS_MAX];
    static uint32_t ids[END / BLOCK + 1];
    static uint64_t sums[END - BEGIN], expected[END - BEGIN];
    world_open(&w, model, ENGINE(.all = {.block_count = 40, .tokens_per_block = BLOCK}));
    const cell_rank *rank = &w.ranks[0];
    for (uint32_t i = 0; i < COUNT_OF(ids); i++)
        ids[i] = i % 37;
    const kvf_block_table table = {ids, COUNT_OF(ids), 0};
    assert_ok(kvf_checksum_steps(rank->shard, rank->regions, 0, 0, range(0, 1), range(0, 1), &table, BEGIN,
                                 END, expected));
    copy_to_devices(rank, regions);
    assert_ok(
        kvf_checksum_steps(rank->shard, regions, 0, 0, range(0, 1), range(0, 1), &table, BEGIN, END, sums));
    assert_memory_equal(sums, expected, sizeof sums);
    devices_free();
    world_close(&w);
    kvf_model_free(model);
}

/* Calls in which one argument after the other is wrong. */
typedef struct call {
    uint32_t group, part;
    kvf_range layers, units;
    uint64_t begin, end;
    kvf_status status;
    const char *words[2];
} call;

static void cells_that_this_rank_does_not_hold_are_refused(void **state) {
    (void)state;
    static const call calls[] = {
        {1, 0, {0, 2}, {2, 4}, 0, 9, KVF_E_RANGE, {"group is 1", "has 1"}},
        {UINT32_MAX, 0, {0, 2}, {2, 4}, 0, 9, KVF_E_RANGE, {"group is", "has 1"}},
        {0, 2, {0, 2}, {2, 4}, 0, 9, KVF_E_RANGE, {"part is 2", "has 2"}},
        {0, 0, {0, 3}, {2, 4}, 0, 9, KVF_E_RANGE, {"layers is [0, 3)", "[0, 2)"}},
        {0, 0, {2, 3}, {2, 4}, 0, 9, KVF_E_RANGE, {"layers is [2, 3)", "[0, 2)"}},
        {0, 0, {1, 0}, {2, 4}, 0, 9, KVF_E_RANGE, {"layers is [1, 0)", "[0, 2)"}},
        {0, 0, {0, 2}, {0, 4}, 0, 9, KVF_E_RANGE, {"units is [0, 4)", "[2, 4)"}},
        {0, 0, {0, 2}, {3, 5}, 0, 9, KVF_E_RANGE, {"units is [3, 5)", "[2, 4)"}},
        {0, 0, {0, 2}, {4, 2}, 0, 9, KVF_E_RANGE, {"units is [4, 2)", "[2, 4)"}},
        {0, 0, {0, 2}, {2, UINT32_MAX}, 0, 9, KVF_E_RANGE, {"units is [2, ", "[2, 4)"}},
        {0, 0, {0, 2}, {2, 4}, 9, 8, KVF_E_RANGE, {"steps are [9, 8)", "inside"}},
        {0, 0, {0, 2}, {2, 4}, 9, UINT64_MAX, KVF_E_RANGE, {"steps are [9, ", "inside"}},
        /* 2^62 - 1 is the last end. */
        {0, 0, {0, 2}, {2, 4}, 9, 1ull << 62, KVF_E_RANGE, {"steps are [9, ", "[0, 4611686018427387903)"}},
        {0, 0, {0, 2}, {2, 4}, 9, (1ull << 62) - 1, KVF_E_RANGE, {"block", "blocks [0, 8)"}},
        {0, 0, {0, 2}, {2, 4}, 30, 33, KVF_E_RANGE, {"step 32", "blocks [0, 8)"}},
        {0, 0, {0, 2}, {2, 4}, 1ull << 40, (1ull << 40) + 1, KVF_E_RANGE, {"block", "blocks [0, 8)"}},
    };
    kvf_model *model = attention(4, 4, 4);
    world w;
    world_open(&w, model,
               ENGINE(.tp_size = 2, .pp_size = 2, .all = {.block_count = 40, .tokens_per_block = 4}));
    const cell_rank *rank = &w.ranks[1]; /* layers 0 and 1, heads 2 and 3 */
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        const call *c = &calls[i];
        uint64_t sums[64];
        assert_fails(kvf_checksum_steps(rank->shard, rank->regions, c->group, c->part, c->layers, c->units,
                                        &w.sequence.tables[0], c->begin, c->end, sums),
                     c->status, c->words[0], c->words[1]);
        if (c->begin < c->end && c->begin == 0)
            assert_fails(kvf_checksum_cells(rank->shard, rank->regions, c->group, c->part, c->layers,
                                            c->units, &w.sequence.tables[0], c->begin, sums),
                         c->status, c->words[0], c->words[1]);
    }
    uint64_t sum = 7;
    assert_fails(kvf_checksum_cells(rank->shard, rank->regions, 0, 0, range(0, 2), range(2, 4),
                                    &w.sequence.tables[0], UINT64_MAX, &sum),
                 KVF_E_RANGE, "steps are");
    world_close(&w);
    kvf_model_free(model);
}

static void blocks_and_memory_that_are_not_there_are_refused(void **state) {
    (void)state;
    kvf_model *model = attention(1, 2, 4);
    world w;
    world_open(&w, model, ENGINE(.all = {.block_count = 40, .tokens_per_block = 16}));
    const cell_rank *rank = &w.ranks[0];
    kvf_block_table beyond = TABLE(3, 40), none = TABLE(3, KVF_NO_BLOCK), no_ids = {NULL, 2, 0};
    kvf_memory device = rank->regions[0], small = rank->regions[0];
    device.kind = KVF_MEMORY_CUDA;
    small.bytes--;
    uint64_t sums[TOKENS];
#define STEPS(regions, table)                                                                                \
    kvf_checksum_steps(rank->shard, regions, 0, 0, range(0, 1), range(0, 2), table, 0, TOKENS, sums)
    assert_fails(STEPS(rank->regions, &beyond), KVF_E_RANGE, "step 16", "block 40, but the cache has 40");
    assert_fails(STEPS(rank->regions, &none), KVF_E_RANGE, "step 16", "no block");
    assert_fails(STEPS(rank->regions, &no_ids), KVF_E_INVALID, "ids");
    assert_fails(STEPS(rank->regions, NULL), KVF_E_INVALID, "table");
    assert_fails(STEPS(NULL, &w.sequence.tables[0]), KVF_E_INVALID, "regions");
    assert_true(STEPS(&device, &w.sequence.tables[0]) !=
                KVF_OK); /* there is no device, or it has no such memory */
    assert_non_null(strstr(kvf_error_detail(), "checksum: region 0: "));
    assert_fails(STEPS(&small, &w.sequence.tables[0]), KVF_E_RANGE, "region 0");
    assert_ok(STEPS(rank->regions, &w.sequence.tables[0]));
    world_close(&w);
    kvf_model_free(model);
}

static kvf_status sum_layers(const cell_rank *rank, const kvf_memory *regions, kvf_range layers) {
    uint64_t sums[TOKENS];
    return kvf_checksum_steps(rank->shard, regions, 0, 0, layers, range(0, 2), &rank->sequence->tables[0], 0,
                              TOKENS, sums);
}

/* Each layer has a region. */
static void the_memory_of_all_wanted_layers_is_checked_and_of_no_others(void **state) {
    (void)state;
    kvf_model *model = attention(3, 2, 4);
    world w;
    world_open(&w, model, ENGINE(.all = {.block_count = 40, .tokens_per_block = 16}));
    const cell_rank *rank = &w.ranks[0];
    assert_int_equal(rank->region_count, 3);
    kvf_memory regions[] = {rank->regions[0], rank->regions[1], rank->regions[2]};
    regions[1].bytes--;
    assert_fails(sum_layers(rank, regions, range(0, 3)), KVF_E_RANGE, "region 1");
    assert_fails(sum_layers(rank, regions, range(0, 2)), KVF_E_RANGE, "region 1");
    assert_fails(sum_layers(rank, regions, range(1, 3)), KVF_E_RANGE, "region 1");
    assert_ok(sum_layers(rank, regions, range(0, 1)));
    assert_ok(sum_layers(rank, regions, range(2, 3)));
    world_close(&w);
    kvf_model_free(model);
}

static void nothing_asked_for_sums_to_nothing(void **state) {
    (void)state;
    kvf_model *model = attention(4, 4, 4);
    world w;
    world_open(&w, model, ENGINE(.pp_size = 2, .all = {.block_count = 40}));
    const cell_rank *rank = &w.ranks[0];
    uint64_t sums[3] = {7, 7, 7};
    const kvf_block_table *table = &w.sequence.tables[0];
    assert_ok(
        kvf_checksum_steps(rank->shard, rank->regions, 0, 0, range(0, 2), range(0, 4), table, 2, 2, sums));
    assert_int_equal(sums[0], 7);
    assert_ok(
        kvf_checksum_steps(rank->shard, rank->regions, 0, 0, range(1, 1), range(0, 4), table, 2, 4, sums));
    assert_int_equal(sums[0] | sums[1], 0);
    assert_int_equal(sums[2], 7);
    world_close(&w);
    kvf_model_free(model);
}

static int run_on_devices(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_content_has_equal_sums_whatever_the_shape),
        cmocka_unit_test(cells_have_the_same_sums_however_they_are_cut),
        cmocka_unit_test(each_layer_may_be_cut_in_a_way_of_its_own),
        cmocka_unit_test(each_cell_is_summed_once_whatever_its_size),
        cmocka_unit_test(sums_of_areas_apart_add_up),
        cmocka_unit_test(the_sums_of_token_shares_add_up_to_those_of_a_rank_with_all_tokens),
        cmocka_unit_test(sums_are_the_same_in_every_version),
        cmocka_unit_test(cells_that_changed_places_are_noticed),
        cmocka_unit_test(a_table_may_begin_within_the_sequence),
        cmocka_unit_test(sums_of_single_cells_add_up_to_those_of_steps),
        cmocka_unit_test(each_cell_has_a_sum_of_its_own),
        cmocka_unit_test(layers_before_the_wanted_ones_take_no_sums),
        cmocka_unit_test(neighbouring_layers_are_one_job_of_a_device_if_they_fit),
        cmocka_unit_test(sums_that_nobody_wants_any_more_are_waited_for),
        cmocka_unit_test(a_device_that_hangs_is_not_waited_for_once_its_time_is_over),
        cmocka_unit_test(a_layer_of_more_cells_than_a_device_sums_at_once_is_refused),
        cmocka_unit_test(steps_are_summed_in_as_many_parts_as_a_device_needs),
    };
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    devices_open();
    on_devices = true;
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argument_count, char **arguments) {
    if (argument_count == 2 && strcmp(arguments[1], "devices") == 0)
        return run_on_devices();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_content_has_equal_sums_whatever_the_shape),
        cmocka_unit_test(cells_have_the_same_sums_however_they_are_cut),
        cmocka_unit_test(each_layer_may_be_cut_in_a_way_of_its_own),
        cmocka_unit_test(each_cell_is_summed_once_whatever_its_size),
        cmocka_unit_test(sums_of_areas_apart_add_up),
        cmocka_unit_test(the_sums_of_token_shares_add_up_to_those_of_a_rank_with_all_tokens),
        cmocka_unit_test(sums_are_the_same_in_every_version),
        cmocka_unit_test(a_flipped_byte_changes_its_steps_sum_alone_and_is_found),
        cmocka_unit_test(cells_that_changed_places_are_noticed),
        cmocka_unit_test(a_table_may_begin_within_the_sequence),
        cmocka_unit_test(no_units_of_a_part_that_is_not_held_have_no_sums),
        cmocka_unit_test(sums_of_single_cells_add_up_to_those_of_steps),
        cmocka_unit_test(each_cell_has_a_sum_of_its_own),
        cmocka_unit_test(layers_before_the_wanted_ones_take_no_sums),
        cmocka_unit_test(cells_that_this_rank_does_not_hold_are_refused),
        cmocka_unit_test(blocks_and_memory_that_are_not_there_are_refused),
        cmocka_unit_test(the_memory_of_all_wanted_layers_is_checked_and_of_no_others),
        cmocka_unit_test(nothing_asked_for_sums_to_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
