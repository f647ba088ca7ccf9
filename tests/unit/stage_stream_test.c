/*
 * Compares the packed stream with one that is made cell by cell: gathering at one end, scattering at the other.
 */
#include "channel_wise.h"
#include "packed.h"
#include "stage/shape.h"

#define STEPS 37u

typedef struct ends {
    kvf_selection *selection;
    kvf_stream_map *maps[2]; /* of the holder, of the reader */
    kvf_stream *streams[2];
    packed_rank ranks[2];
    kvf_group_steps groups[2][2];
} ends;

static void open_end(ends *e, int end, const kvf_shard *shard, const kvf_group_steps *groups,
                     uint32_t count) {
    for (uint32_t g = 0; g < count; g++)
        e->groups[end][g] = groups[g];
    assert_ok(kvf_stream_map_create(shard, e->selection, &e->maps[end]));
    assert_ok(kvf_stream_create(e->maps[end], groups, count, &e->streams[end]));
    e->ranks[end] = packed_open(shard, 7 + (uint32_t)end);
}

static void close_ends(const ends *e) {
    for (int end = 0; end < 2; end++) {
        kvf_stream_free(e->streams[end]);
        kvf_stream_map_free(e->maps[end]);
        packed_close(&e->ranks[end]);
    }
    kvf_selection_free(e->selection);
}

static packed_walk walk_of(const ends *e, int end, unsigned char *bytes) {
    return (packed_walk){.rank = &e->ranks[end],
                         .items = e->selection->items,
                         .count = e->selection->item_count,
                         .groups = e->groups[end],
                         .bytes = bytes};
}

/* Gathers the stream in pieces of many sizes, up to the whole. */
static void check_gather(const ends *e, int end, const unsigned char *wanted, uint64_t bytes) {
    unsigned char *got = calloc(bytes + 1, 1);
    for (uint64_t most = 2; most < 2 * bytes; most += 1 + most / 2) {
        memset(got, 0xee, bytes + 1);
        for (uint64_t at = 0; at < bytes;) {
            const uint64_t n = kvf_stream_cut(e->streams[end], at, most);
            assert_true(n > 0 && n <= most && n + 1 >= (most < bytes - at ? most : bytes - at));
            kvf_stream_gather(e->streams[end], e->ranks[end].regions, (kvf_byte_range){at, at + n}, got + at);
            at += n;
        }
        assert_memory_equal(got, wanted, bytes);
        assert_int_equal(got[bytes], 0xee);
    }
    free(got);
}

static void check_scatter(const ends *e, int end, unsigned char *bytes, uint64_t count) {
    for (uint64_t most = 2; most < 2 * count; most = 3 * most + 2) {
        packed_rank wanted = packed_copy(&e->ranks[end]);
        packed_walk walk = walk_of(e, end, bytes);
        walk.rank = &wanted;
        walk.write = true;
        packed_walk_all(&walk);
        for (uint64_t at = 0; at < count;) {
            const uint64_t n = kvf_stream_cut(e->streams[end], at, most);
            kvf_stream_scatter(e->streams[end], e->ranks[end].regions, (kvf_byte_range){at, at + n},
                               bytes + at);
            at += n;
        }
        assert_same_memory(&e->ranks[end], &wanted);
        packed_close(&wanted);
    }
}

/* Both ends of a selection make the same stream from their own memory, each with its own blocks. */
static void check_ends(ends *e) {
    packed_walk count = walk_of(e, 0, NULL);
    packed_walk_all(&count);
    const uint64_t bytes = count.at;
    assert_true(bytes > 0);
    for (int end = 0; end < 2; end++)
        assert_int_equal(kvf_stream_bytes(e->streams[end]), bytes);
    unsigned char *stream = malloc(bytes + 1);
    packed_walk walk = walk_of(e, 0, stream);
    packed_walk_all(&walk);
    check_gather(e, 0, stream, bytes);
    check_scatter(e, 1, stream, bytes);
    walk = walk_of(e, 1, stream);
    packed_walk_all(&walk);
    check_gather(e, 1, stream, bytes);
    free(stream);
}

/* Checks a selection between two shards of one model. */
static void check_between(const kvf_selection *selection, const kvf_shard *holder,
                          const kvf_group_steps *held, const kvf_shard *reader, const kvf_group_steps *wanted,
                          uint32_t groups) {
    ends e = {.selection = NULL};
    assert_ok(
        kvf_selection_check(kvf_shard_model(holder), selection->items, selection->item_count, &e.selection));
    open_end(&e, 0, holder, held, groups);
    open_end(&e, 1, reader, wanted, groups);
    check_ends(&e);
    close_ends(&e);
}

static void check_plan(const pair *p, uint32_t local_rank, const kvf_group_steps *held,
                       const kvf_group_steps *wanted, uint32_t groups) {
    kvf_plan *plan = plan_of(p, local_rank);
    assert_true(kvf_plan_source_count(plan) > 0);
    for (uint32_t source = 0; source < kvf_plan_source_count(plan); source++) {
        kvf_selection *selection = NULL;
        assert_ok(kvf_selection_of_plan(plan, source, &selection));
        check_between(selection, kvf_engine_shard(p->remote, kvf_plan_source_rank(plan, source)), held,
                      kvf_engine_shard(p->local, local_rank), wanted, groups);
        kvf_selection_free(selection);
    }
    kvf_plan_free(plan);
}

/* ---- shapes ----------------------------------------------------------------------------------- */

static void heads_and_tokens_in_other_orders_and_blocks_meet_in_one_stream(void **state) {
    (void)state;
    const pair p =
        pair_of(attention(3, 4, 8), ENGINE(.all = {.block_count = 9, .order = "L|BPNH"}),
                ENGINE(.tp_size = 2, .all = {.tokens_per_block = 4, .block_count = 30, .order = "L|BPHN"}));
    check_plan(&p, 0, &(kvf_group_steps){TABLE_FROM(1, 20, 3, 7, 9, 11, 2, 4, 1, 28), 5, STEPS},
               &(kvf_group_steps){TABLE(3, 8, 1), 5, STEPS}, 1);
    free_pair(&p);
}

static void kernel_blocks_are_found_in_their_logical_block(void **state) {
    (void)state;
    const pair p = pair_of(
        attention(2, 2, 4),
        ENGINE(.all = {.tokens_per_block = 24,
                       .kernel_blocks_per_block = 3,
                       .block_count = 4,
                       .order = "LBPHN"}),
        ENGINE(.all = {
                   .tokens_per_block = 6, .kernel_blocks_per_block = 2, .block_count = 9, .order = "BLHNP"}));
    check_plan(&p, 0, &(kvf_group_steps){TABLE(8, 3, 2, 1, 7, 0, 4), 0, STEPS},
               &(kvf_group_steps){TABLE(3, 1), 0, STEPS}, 1);
    free_pair(&p);
}

static void states_are_moved_whole_beside_tokens(void **state) {
    (void)state;
    const pair p = pair_of(hybrid(4),
                           ENGINE(.tp_size = 2, .all = {.tokens_per_block = 8, .block_count = 9},
                                  .state = {.order = "L|BTNPH", .block_count = 3}),
                           ENGINE(.all = {.tokens_per_block = 16, .block_count = 9},
                                  .state = {.order = "L|BTPHN", .block_count = 4}));
    for (uint32_t rank = 0; rank < 2; rank++)
        check_plan(&p, rank, (const kvf_group_steps[]){{TABLE(4, 1, 7), 3, STEPS}, {TABLE(2), 0, 1}},
                   (const kvf_group_steps[]){{TABLE(4, 1, 7, 3, 6), 3, STEPS}, {TABLE(1), 0, 1}}, 2);
    free_pair(&p);
}

static void ranks_that_share_tokens_unlike_move_what_both_keep(void **state) {
    (void)state;
    static const struct {
        uint32_t local, local_width, remote, remote_width;
    } shares[] = {{1, 1, 2, 4}, {2, 1, 1, 1}, {2, 3, 2, 3}, {2, 3, 4, 1}, {4, 2, 2, 3}, {2, 5, 4, 3}};
    uint32_t ids[STEPS];
    for (uint32_t i = 0; i < STEPS; i++)
        ids[i] = (i * 7 + 3) % STEPS;
    const kvf_group_steps steps = {{ids, STEPS, 0}, 2, STEPS - 1};
    for (size_t i = 0; i < COUNT_OF(shares); i++) {
        const pair p = pair_of(latent(2),
                               ENGINE(.tp_size = shares[i].local, .dcp_size = shares[i].local,
                                      .dcp_width = shares[i].local_width,
                                      .all = {.tokens_per_block = 4, .block_count = STEPS}),
                               ENGINE(.tp_size = shares[i].remote, .dcp_size = shares[i].remote,
                                      .dcp_width = shares[i].remote_width,
                                      .all = {.tokens_per_block = 3, .block_count = STEPS}));
        for (uint32_t rank = 0; rank < shares[i].local; rank++)
            check_plan(&p, rank, &steps, &steps, 1);
        free_pair(&p);
    }
}

static void shares_that_hardly_ever_repeat_are_refused(void **state) {
    (void)state;
    const kvf_shard_desc *desc;
    kvf_model *model = latent(1);
    kvf_engine *engine =
        engine_of(model, ENGINE(.tp_size = 3, .dcp_size = 3, .dcp_width = 1009, .all = {.block_count = 9}));
    const kvf_shard *shard = kvf_engine_shard(engine, 0);
    desc = kvf_shard_get(shard);
    kvf_stream_item item = {.layers = {0, 1},
                            .units = {0, 1},
                            .tokens = {desc->groups[0].tokens, {.index = 1, .count = 8192, .width = 1}},
                            .dtype = KVF_DTYPE_BF16};
    kvf_selection *selection = NULL;
    kvf_stream_map *map = NULL;
    assert_ok(kvf_selection_check(model, &item, 1, &selection));
    assert_fails(kvf_stream_map_create(shard, selection, &map), KVF_E_LIMIT, "by 3 in turns of 1009 locally",
                 "by 8192 in turns of 1 remotely", "up to 4096");
    kvf_selection_free(selection);
    item.tokens[0].index = 2;
    assert_ok(kvf_selection_check(model, &item, 1, &selection));
    assert_fails(kvf_stream_map_create(shard, selection, &map), KVF_E_MISMATCH, "share 0 of 3",
                 "between 2 of 3");
    kvf_selection_free(selection);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* A selection's shares count entries of 4 tokens. */
static void shares_of_entries_are_told_in_tokens(void **state) {
    (void)state;
    kvf_model *model = entries_of(4);
    kvf_engine *engine =
        engine_of(model, ENGINE(.tp_size = 3, .dcp_size = 3, .dcp_width = 4036, .all = {.block_count = 9}));
    const kvf_shard *shard = kvf_engine_shard(engine, 0);
    kvf_stream_item item = {.layers = {0, 1},
                            .units = {0, 1},
                            .tokens = {step_share(shard, 0), {.index = 1, .count = 8192, .width = 1}},
                            .dtype = KVF_DTYPE_BF16};
    kvf_selection *selection = NULL;
    kvf_stream_map *map = NULL;
    assert_ok(kvf_selection_check(model, &item, 1, &selection));
    assert_fails(kvf_stream_map_create(shard, selection, &map), KVF_E_LIMIT, "by 3 in turns of 4036 locally",
                 "by 8192 in turns of 4 remotely");
    kvf_selection_free(selection);
    item.tokens[0].index = 2;
    assert_ok(kvf_selection_check(model, &item, 1, &selection));
    assert_fails(
        kvf_stream_map_create(shard, selection, &map), KVF_E_MISMATCH, "share 0 of 3",
        "in turns of 4036; the selection is between 2 of 3, in turns of 4036, and 1 of 8192, in turns of 4");
    kvf_selection_free(selection);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void steps_before_a_window_are_left_out_and_need_no_block(void **state) {
    (void)state;
    const pair p = pair_of(latent_of(2, (kvf_group_desc){.name = "swa", .window_tokens = 9}),
                           ENGINE(.all = {.tokens_per_block = 8, .block_count = 9}),
                           ENGINE(.all = {.tokens_per_block = 16, .block_count = 9}));
    check_plan(&p, 0, &(kvf_group_steps){TABLE(KVF_NO_BLOCK, 6, 1), 0, STEPS},
               &(kvf_group_steps){TABLE_FROM(3, 2, 5), 0, STEPS}, 1);
    free_pair(&p);
}

/* ---- cells in pieces -------------------------------------------------------------------------- */

static void cells_that_are_cut_unlike_meet_as_elements(void **state) {
    (void)state;
    kvf_model *model = attention(LAYERS, HEADS, CHANNELS);
    for (uint32_t pieces = 1; pieces <= CHANNELS; pieces *= 2) {
        kvf_engine *holder = channel_wise(model, 2, 8, pieces, "holder");
        kvf_engine *reader = channel_wise(model, 1, 16, CHANNELS / pieces, "reader");
        kvf_plan *plan = NULL;
        kvf_selection *selection = NULL;
        assert_ok(kvf_plan_build(kvf_engine_shard(reader, 0), holder, NULL, &plan));
        assert_ok(kvf_selection_of_plan(plan, 1, &selection));
        check_between(selection, kvf_engine_shard(holder, 1),
                      &(kvf_group_steps){TABLE(9, 3, 4, 39, 1), 1, STEPS}, kvf_engine_shard(reader, 0),
                      &(kvf_group_steps){TABLE(0, 2, 1), 1, STEPS}, 1);
        kvf_selection_free(selection);
        kvf_plan_free(plan);
        kvf_engine_free(holder);
        kvf_engine_free(reader);
    }
    kvf_model_free(model);
}

/* ---- other types ------------------------------------------------------------------------------ */

/* Group "full" of two layers: K and V of two heads of 4 elements. */
static kvf_model *model_with(kvf_dtype dtype) {
    kvf_part_desc parts[] = {{.name = "k", .dtype = dtype, .units = 2, .cell_elements = 4},
                             {.name = "v", .dtype = dtype, .units = 2, .cell_elements = 4}};
    return one_group(2, (kvf_group_desc){.name = "full", .parts = parts, .part_count = 2});
}

/* Small whole numbers have the same value in every type: bf16 0x4080 is 4. */
static void elements_become_those_of_the_reader_on_the_way(void **state) {
    (void)state;
    kvf_model *narrow = model_with(KVF_DTYPE_BF16), *wide = model_with(KVF_DTYPE_F32);
    kvf_engine *holder =
        engine_of(narrow, ENGINE(.all = {.tokens_per_block = 4, .block_count = 3, .order = "L|BPHN"}));
    kvf_engine *reader =
        engine_of(wide, ENGINE(.all = {.tokens_per_block = 8, .block_count = 2, .order = "L|BPNH"}));
    const kvf_stream_item items[] = {{.part = 0, .layers = {0, 2}, .units = {0, 2}, .dtype = KVF_DTYPE_F32},
                                     {.part = 1, .layers = {0, 2}, .units = {0, 2}, .dtype = KVF_DTYPE_F32}};
    const kvf_group_steps steps[] = {{TABLE(2, 0), 0, 7}, {TABLE(1), 0, 7}};
    const kvf_shard *shards[] = {kvf_engine_shard(holder, 0), kvf_engine_shard(reader, 0)};
    const uint64_t elements = 2 * 2 * 7 * 2 * 4;
    ends e = {.selection = NULL};
    for (int end = 0; end < 2; end++) {
        assert_ok(kvf_selection_check(kvf_shard_model(shards[end]), items, 2, &e.selection));
        open_end(&e, end, shards[end], &steps[end], 1);
        kvf_selection_free(e.selection);
        e.selection = NULL;
        assert_int_equal(kvf_stream_bytes(e.streams[end]), elements * sizeof(float));
    }
    for (uint32_t region = 0; region < 2; region++) /* fills the cache with ascending numbers */
        for (uint32_t i = 0; i < 3 * 4 * 2 * 2 * 4; i++) {
            const uint16_t number = (uint16_t)(0x4000 + 32 * region + i);
            memcpy(e.ranks[0].regions[region] + 2 * i, &number, 2);
        }
    assert_int_equal(kvf_stream_element(e.streams[0]), 4);
    assert_int_equal(kvf_stream_cut(e.streams[0], 4, 7), 4);
    assert_int_equal(kvf_stream_cut(e.streams[0], 4, 3), 0);
    float *stream = calloc(elements, sizeof *stream);
    for (uint64_t at = 0, n; (n = kvf_stream_cut(e.streams[0], at, 21)) > 0; at += n) {
        const kvf_byte_range bytes = {at, at + n};
        kvf_stream_gather(e.streams[0], e.ranks[0].regions, bytes, (unsigned char *)stream + at);
        kvf_stream_scatter(e.streams[1], e.ranks[1].regions, bytes, (unsigned char *)stream + at);
    }
    for (uint32_t layer = 0; layer < 2; layer++)
        for (uint32_t part = 0; part < 2; part++)
            for (uint32_t step = 0; step < 7; step++)
                for (uint32_t unit = 0; unit < 2; unit++) {
                    kvf_cell_location from = {.struct_size = sizeof from}, to = from;
                    assert_ok(
                        kvf_shard_locate(shards[0], 0, layer, part, step < 4 ? 2 : 0, step % 4, unit, &from));
                    assert_ok(kvf_shard_locate(shards[1], 0, layer, part, 1, step, unit, &to));
                    for (uint32_t i = 0; i < 4; i++) {
                        uint16_t half;
                        uint32_t whole;
                        memcpy(&half, e.ranks[0].regions[from.region] + from.offset + 2 * i, 2);
                        memcpy(&whole, e.ranks[1].regions[to.region] + to.offset + 4 * i, 4);
                        assert_int_equal(whole, (uint32_t)half << 16);
                    }
                }
    free(stream);
    close_ends(&e);
    kvf_engine_free(holder);
    kvf_engine_free(reader);
    kvf_model_free(narrow);
    kvf_model_free(wide);
}

/* ---- layers and sizes ------------------------------------------------------------------------- */

static void a_range_of_layers_is_a_range_of_bytes(void **state) {
    (void)state;
    const pair p = pair_of(hybrid(4), ENGINE(.all = {.tokens_per_block = 8, .block_count = 9}),
                           ENGINE(.all = {.tokens_per_block = 8, .block_count = 9}));
    kvf_plan *plan = plan_of(&p, 0);
    ends e = {.selection = NULL};
    assert_ok(kvf_selection_of_plan(plan, 0, &e.selection));
    const kvf_group_steps steps[] = {{TABLE(4, 1), 0, 10}, {TABLE(2), 0, 1}};
    open_end(&e, 0, kvf_engine_shard(p.local, 0), steps, 2);
    open_end(&e, 1, kvf_engine_shard(p.remote, 0), steps, 2);
    /* K and V of 4 heads of 8 bytes; 8 channels of 3 rows of 2 bytes, 2 heads of 32. */
    const uint64_t tokens = 10 * 2 * 4 * 8, one_state = 8 * 3 * 2 + 2 * 32;
    const struct {
        kvf_range layers;
        uint64_t begin, end;
    } ranges[] = {{{0, 4}, 0, 2 * (tokens + one_state)},
                  {{0, 1}, 0, tokens},
                  {{1, 2}, tokens, tokens + one_state},
                  {{1, 3}, tokens, 2 * tokens + one_state},
                  {{2, 2}, tokens + one_state, tokens + one_state},
                  {{3, 9}, 2 * tokens + one_state, 2 * (tokens + one_state)}};
    for (size_t i = 0; i < COUNT_OF(ranges); i++) {
        const kvf_byte_range bytes = kvf_stream_layers(e.streams[0], ranges[i].layers);
        assert_int_equal(bytes.begin, ranges[i].begin);
        assert_int_equal(bytes.end, ranges[i].end);
    }
    close_ends(&e);
    kvf_plan_free(plan);
    free_pair(&p);
}

/* ---- refusals --------------------------------------------------------------------------------- */

static void selections_that_are_none_are_refused_by_item_and_field(void **state) {
    (void)state;
    kvf_model *model = hybrid(4);
    kvf_selection *selection = NULL;
    const kvf_stream_item good = {.layers = {0, 2}, .units = {1, 3}, .dtype = KVF_DTYPE_BF16};
    kvf_stream_item items[2] = {good, good};
#define REFUSED(change, status, ...)                                                                         \
    do {                                                                                                     \
        items[0] = items[1] = good;                                                                          \
        items[1].part = 1;                                                                                   \
        change;                                                                                              \
        assert_fails(kvf_selection_check(model, items, 2, &selection), status, __VA_ARGS__);                 \
    } while (0)
    REFUSED(items[1].group = 2, KVF_E_RANGE, "item 1", "group is 2", "has 2");
    REFUSED(items[0].part = 2, KVF_E_RANGE, "item 0", "part is 2", "has 2");
    REFUSED(items[0].layers.end = 3, KVF_E_RANGE, "item 0", "layers are [0, 3)", "[0, 2)");
    REFUSED(items[0].layers.begin = 2, KVF_E_RANGE, "item 0", "layers are [2, 2)", "not empty");
    REFUSED(items[1].units.end = 5, KVF_E_RANGE, "item 1", "units are [1, 5)", "[0, 4)");
    REFUSED(items[1].tokens[1].index = 1, KVF_E_RANGE, "item 1", "tokens.index of the reader is 1", "0 to 0");
    REFUSED((items[1].group = 1, items[1].units.end = 2, items[1].tokens[0].count = 2), KVF_E_RANGE, "item 1",
            "of the holder is 2", "a state");
    REFUSED(items[1].dtype = KVF_DTYPE_I8, KVF_E_INVALID, "item 1", "dtype is i8", "bf16 of part v");
    REFUSED(items[1].dtype = (kvf_dtype)99, KVF_E_INVALID, "item 1", "dtype is invalid");
    REFUSED(items[1].tokens[0].count = 2, KVF_E_INVALID, "item 1", "shared differently");
    REFUSED(items[0].part = 1, KVF_E_OVERLAP, "items 0 and 1", "layer 0 of group 0, part 1, unit 1");
    REFUSED((items[0].part = 1, items[1].units.begin = 2, items[1].units.end = 4), KVF_E_OVERLAP, "unit 2");
    REFUSED((items[0].part = 1, items[1].units.begin = 0), KVF_E_INVALID, "item 1", "ascending order");
    REFUSED((items[0].part = 1, items[1].part = 0), KVF_E_INVALID, "item 1", "ascending order");
    items[0] = items[1] = good; /* items side by side, then one layer after the other */
    items[1].units = range(3, 4);
    assert_ok(kvf_selection_check(model, items, 2, &selection));
    kvf_selection_free(selection);
    items[1].units = good.units;
    items[0].layers.end = items[1].layers.begin = 1;
    assert_ok(kvf_selection_check(model, items, 2, &selection));
    assert_int_equal(selection->items[1].tokens[0].width, 1);
    kvf_selection_free(selection);
    assert_ok(kvf_selection_check(model, NULL, 0, &selection)); /* nothing flows */
    kvf_selection_free(selection);
    kvf_model_free(model);
}

static void cells_that_the_shard_lacks_are_named(void **state) {
    (void)state;
    kvf_model *model = attention(4, 4, 4);
    kvf_engine *engine = engine_of(model, ENGINE(.tp_size = 2, .pp_size = 2, .all = {.block_count = 9}));
    kvf_selection *selection = NULL;
    kvf_stream_map *map = NULL;
    kvf_stream_item item = {.layers = {1, 3}, .units = {0, 2}, .dtype = KVF_DTYPE_BF16};
    assert_ok(kvf_selection_check(model, &item, 1, &selection));
    assert_fails(kvf_stream_map_create(kvf_engine_shard(engine, 0), selection, &map), KVF_E_UNCOVERED,
                 "rank 0", "group full, part k, layer 2, units [0, 2)");
    kvf_selection_free(selection);
    item.layers = range(0, 1);
    item.units = range(1, 3);
    assert_ok(kvf_selection_check(model, &item, 1, &selection));
    assert_fails(kvf_stream_map_create(kvf_engine_shard(engine, 0), selection, &map), KVF_E_UNCOVERED,
                 "units [1, 3)", "has units [0, 2)");
    kvf_selection_free(selection);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void tables_that_do_not_reach_are_refused_by_step_and_block(void **state) {
    (void)state;
    const pair p = pair_of(attention(1, 2, 4), ENGINE(.all = {.tokens_per_block = 4, .block_count = 9}),
                           ENGINE(.all = {.tokens_per_block = 4, .block_count = 9}));
    kvf_plan *plan = plan_of(&p, 0);
    kvf_selection *selection = NULL;
    kvf_stream_map *map = NULL;
    kvf_stream *stream = NULL;
    assert_ok(kvf_selection_of_plan(plan, 0, &selection));
    assert_ok(kvf_stream_map_create(kvf_engine_shard(p.local, 0), selection, &map));
#define REFUSED_STEPS(status, steps, ...)                                                                    \
    assert_fails(kvf_stream_create(map, &(const kvf_group_steps)steps, 1, &stream), status, __VA_ARGS__)
#define STEPS_OF(...) {__VA_ARGS__}
    REFUSED_STEPS(KVF_E_RANGE, STEPS_OF(TABLE(4, 1), 0, 9), "group full", "step 8 is in block 2", "[0, 2)");
    REFUSED_STEPS(KVF_E_RANGE, STEPS_OF(TABLE_FROM(1, 4, 1), 3, 9), "step 3 is in block 0", "[1, 3)");
    REFUSED_STEPS(KVF_E_RANGE, STEPS_OF(TABLE(4, KVF_NO_BLOCK, 2), 0, 9), "step 4 is requested", "no block");
    REFUSED_STEPS(KVF_E_RANGE, STEPS_OF(TABLE(4, 9, 2), 0, 9), "block 9, but the cache has 9");
    REFUSED_STEPS(KVF_E_INVALID, STEPS_OF(TABLE(4, 9, 2), 9, 8), "begin is 9 and end 8");
    REFUSED_STEPS(KVF_E_RANGE, STEPS_OF(TABLE(4, 9, 2), 0, UINT64_MAX), "end is 18446744073709551615");
    REFUSED_STEPS(KVF_E_RANGE, STEPS_OF(TABLE(4, 1), 0, UINT64_MAX / 4), "the table has blocks [0, 2)");
    assert_fails(kvf_stream_create(map, NULL, 2, &stream), KVF_E_INVALID, "count is 2", "1 groups");
    /* The ids of blocks that hold no moved token are not checked. */
    assert_ok(kvf_stream_create(map, &(const kvf_group_steps){TABLE(99, 1, 2, 77), 4, 12}, 1, &stream));
    assert_int_equal(kvf_stream_bytes(stream), 8 * 2 * 2 * 8);
    kvf_stream_free(stream);
    kvf_stream_map_free(map);
    kvf_selection_free(selection);
    kvf_plan_free(plan);
    free_pair(&p);
}

static kvf_status make_all(void *subject) {
    const pair *p = subject;
    kvf_plan *plan = NULL;
    kvf_selection *selection = NULL;
    kvf_stream_map *map = NULL;
    kvf_stream *stream = NULL;
    kvf_status status = kvf_plan_build(kvf_engine_shard(p->local, 0), p->remote, NULL, &plan);
    if (!status)
        status = kvf_selection_of_plan(plan, 0, &selection);
    if (!status)
        status = kvf_stream_map_create(kvf_engine_shard(p->local, 0), selection, &map);
    if (!status)
        status = kvf_stream_create(map, &(const kvf_group_steps){TABLE(4, 1), 0, 8}, 1, &stream);
    kvf_stream_free(stream);
    kvf_stream_map_free(map);
    kvf_selection_free(selection);
    kvf_plan_free(plan);
    return status;
}

/* ---- shapes that are kept ----------------------------------------------------------------------- */

/* Shapes by number: of one head in one layer. */
static bool is_shape(const kvf_stage_shape *shape, uint32_t number) {
    const kvf_stream_item *item = shape->selection->items;
    return item->layers.begin == number / 2 && item->units.begin == number % 2;
}

static kvf_stage_shape *use_shape(kvf_shapes *shapes, uint32_t number) {
    const kvf_stream_item item = {.layers = {number / 2, number / 2 + 1},
                                  .units = {number % 2, number % 2 + 1},
                                  .tokens = {{0, 1, 1}, {0, 1, 1}},
                                  .dtype = KVF_DTYPE_BF16};
    kvf_selection *selection = NULL;
    kvf_stage_shape *shape = NULL;
    assert_ok(kvf_selection_check(kvf_shard_model(shapes->shard), &item, 1, &selection));
    assert_ok(kvf_shapes_use(shapes, selection, &shape));
    assert_true(is_shape(shape, number));
    return shape;
}

static bool is_kept(const kvf_shapes *shapes, uint32_t number) {
    const kvf_stage_shape *shape = shapes->first;
    while (shape && !is_shape(shape, number))
        shape = shape->following;
    return shape != NULL;
}

static void of_shapes_without_users_the_latest_256_are_kept(void **state) {
    (void)state;
    enum { KEPT = 256 };
    const pair p =
        pair_of(attention(KEPT / 2 + 1, 2, 4), ENGINE(.all = {.tokens_per_block = 4, .block_count = 9}),
                ENGINE(.all = {.tokens_per_block = 4, .block_count = 9}));
    kvf_shapes shapes = {.shard = kvf_engine_shard(p.local, 0)};
    kvf_stage_shape *const used = use_shape(&shapes, 0);
    for (uint32_t number = 1; number < KEPT; number++)
        kvf_shapes_leave(use_shape(&shapes, number));
    assert_int_equal(shapes.count, KEPT);
    kvf_shapes_leave(use_shape(&shapes, 1)); /* now 2 was used longest ago, but for 0, which is in use */
    for (uint32_t number = KEPT; number < KEPT + 2; number++) {
        kvf_shapes_leave(use_shape(&shapes, number));
        assert_int_equal(shapes.count, KEPT);
        assert_int_equal(shapes.lanes, KEPT);
        assert_false(is_kept(&shapes, number - KEPT + 2));
        assert_true(is_kept(&shapes, number - KEPT + 4));
    }
    assert_true(is_kept(&shapes, 1));
    assert_ptr_equal(use_shape(&shapes, 0), used);
    kvf_shapes_leave(used);
    kvf_shapes_leave(used);
    kvf_shapes_free(&shapes);
    free_pair(&p);
}

static void without_memory_nothing_is_made_and_nothing_kept(void **state) {
    (void)state;
    memory_count m;
    count_memory(&m);
    const pair p = pair_of(attention(1, 2, 4), ENGINE(.all = {.tokens_per_block = 4, .block_count = 9}),
                           ENGINE(.all = {.tokens_per_block = 4, .block_count = 9}));
    survive_every_refusal(&m, make_all, (void *)&p);
    free_pair(&p);
    assert_int_equal(m.live, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_and_tokens_in_other_orders_and_blocks_meet_in_one_stream),
        cmocka_unit_test(kernel_blocks_are_found_in_their_logical_block),
        cmocka_unit_test(states_are_moved_whole_beside_tokens),
        cmocka_unit_test(ranks_that_share_tokens_unlike_move_what_both_keep),
        cmocka_unit_test(shares_that_hardly_ever_repeat_are_refused),
        cmocka_unit_test(shares_of_entries_are_told_in_tokens),
        cmocka_unit_test(steps_before_a_window_are_left_out_and_need_no_block),
        cmocka_unit_test(cells_that_are_cut_unlike_meet_as_elements),
        cmocka_unit_test(elements_become_those_of_the_reader_on_the_way),
        cmocka_unit_test(a_range_of_layers_is_a_range_of_bytes),
        cmocka_unit_test(selections_that_are_none_are_refused_by_item_and_field),
        cmocka_unit_test(cells_that_the_shard_lacks_are_named),
        cmocka_unit_test(tables_that_do_not_reach_are_refused_by_step_and_block),
        cmocka_unit_test(of_shapes_without_users_the_latest_256_are_kept),
        cmocka_unit_test_teardown(without_memory_nothing_is_made_and_nothing_kept, stop_counting_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
