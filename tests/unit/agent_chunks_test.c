/* Pushes that get their blocks with their chunks, as engines allocate them. */
#include "push_scene.h"

#define BLOCK 16u /* tokens in a block of the producer */

/* Opens a push, which has no blocks yet. */
static void open_scene(push_scene *s, kvf_model *model, const kvf_engine_spec *p, const kvf_engine_spec *d,
                       const kvf_agent_options *options) {
    push_scene_open(s, model, p, d, options);
    world_request empty = s->given;
    for (uint32_t g = 0; g < s->given.group_count; g++) {
        s->opened[g] = s->given.groups[g];
        s->opened[g].table = (kvf_block_table){NULL, 0, 0};
    }
    empty.request.groups = s->opened;
    world_push(&s->w.p, &empty, s->pushes);
}

/* Entries [begin, end) of the table of a group, with `first_block` set. */
static kvf_block_table part_of(const push_scene *s, uint32_t group, uint32_t begin, uint32_t end) {
    return (kvf_block_table){s->given.ids[group] + begin, end - begin, begin};
}

/* Marks a chunk as ready, with these blocks, on every rank of the producer. */
static void ready(push_scene *s, uint64_t begin, uint64_t end, uint32_t layers,
                  const kvf_block_table *tables) {
    kvf_push_chunk chunk = *CHUNK(begin, end, layers);
    chunk.tables = tables;
    chunk.table_count = tables ? s->given.group_count : 0;
    for (uint32_t r = 0; r < s->w.p.rank_count; r++)
        assert_ok(kvf_agent_push_ready(s->w.p.agents[r], s->pushes[r], &chunk));
}

static kvf_status say(push_scene *s, uint64_t end, const kvf_block_table *table) {
    kvf_push_chunk chunk = *CHUNK(0, end, LAYERS);
    chunk.tables = table;
    chunk.table_count = 1;
    return kvf_agent_push_ready(s->w.p.agents[0], s->pushes[0], &chunk);
}

static uint64_t held(push_scene *s) {
    return world_stats(s->w.p.agents[0]).blocks_held_now;
}

static void blocks_come_with_their_chunks_and_states_with_the_last(void **state) {
    (void)state;
    push_scene s;
    open_scene(&s, hybrid(4),
               ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 32}, .state = {.order = "L|BTNPH"}),
               ENGINE(.name = "D", .all = {.block_count = 64}, .state = {.order = "L|BTNPH"}), NULL);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.expects);
    assert_int_equal(held(&s), 0);
    ready(&s, 0, 40, 4, (kvf_block_table[]){part_of(&s, 0, 0, 3), {NULL, 0, 0}});
    assert_int_equal(held(&s), 3);
    world_run_for(&s.w, 50 * MS);
    assert_true(world_stats(s.w.p.agents[0]).bytes_written > 0);
    kvf_push_chunk last = *CHUNK(40, TOKENS, 2);
    last.tables = (kvf_block_table[]){part_of(&s, 0, 3, 7), {NULL, 0, 0}};
    last.table_count = 2;
    assert_fails(kvf_agent_push_ready(s.w.p.agents[0], s.pushes[0], &last), KVF_E_RANGE, "group ssm");
    assert_int_equal(held(&s), 3);
    ready(&s, 40, TOKENS, 2, (kvf_block_table[]){part_of(&s, 0, 3, 7), part_of(&s, 1, 0, 1)});
    assert_int_equal(held(&s), 8);
    world_run_for(&s.w, 50 * MS);
    assert_int_equal(world_count(&s.w, s.w.d.agents[0], KVF_EVENT_DONE), 0);
    ready(&s, 40, TOKENS, 4, NULL);
    push_scene_finish(&s);
}

static void each_rank_of_an_unlike_consumer_gets_what_the_chunks_brought(void **state) {
    (void)state;
    const kvf_agent_options options = {.struct_size = sizeof options, .verify = true};
    push_scene s;
    open_scene(&s, attention(LAYERS, 8, 8), TP2, TP4, &options);
    for (uint32_t b = 0; b < 7; b++) {
        kvf_block_table table = part_of(&s, 0, b, b + 1);
        ready(&s, b * BLOCK, (b + 1) * BLOCK, b % 2 ? LAYERS : 3, &table);
        if (b == 2)
            world_expect(&s.w.d, &s.wanted, &s.w.p, s.expects);
        if (b >= 2)
            world_run_for(&s.w, 10 * MS);
        if (b % 2 == 0)
            ready(&s, b * BLOCK, (b + 1) * BLOCK, LAYERS, NULL);
    }
    push_scene_finish(&s);
}

/* The control: the bytes are those of the given blocks, at the given places. */
static void blocks_given_in_the_wrong_place_arrive_wrong(void **state) {
    (void)state;
    push_scene s;
    open_scene(&s, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), NULL);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.expects);
    uint32_t ids[7];
    memcpy(ids, s.given.ids[0], sizeof ids);
    ids[1] = s.given.ids[0][2];
    ids[2] = s.given.ids[0][1];
    kvf_block_table table = {ids, 7, 0};
    ready(&s, 0, TOKENS, LAYERS, &table);
    world_all_done(&s.w, &s.w.d, s.expects);
    world_all_done(&s.w, &s.w.p, s.pushes);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 2), 2 * BLOCK * 2 * 8 * LAYERS);
    world_quiet(&s.w);
    world_close(&s.w);
}

static void known_blocks_may_be_repeated_but_not_changed(void **state) {
    (void)state;
    push_scene s;
    open_scene(&s, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), NULL);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.expects);
    kvf_block_table table = part_of(&s, 0, 0, 3);
    ready(&s, 0, 40, LAYERS, &table);
    uint32_t other[] = {s.given.ids[0][2] + 1, s.given.ids[0][3]};
    kvf_block_table changed = {other, 2, 2};
    assert_fails(say(&s, TOKENS, &changed), KVF_E_INVALID, "block 2 of the sequence", "now as 8");
    assert_int_equal(held(&s), 3);
    table = part_of(&s, 0, 0, 7);
    ready(&s, 40, TOKENS, LAYERS, &table);
    assert_int_equal(held(&s), 7);
    push_scene_finish(&s);
}

static void tables_that_do_not_reach_over_the_chunk_are_refused(void **state) {
    (void)state;
    push_scene s;
    open_scene(&s, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), NULL);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.expects);
    kvf_block_table table = part_of(&s, 0, 0, 2);
    assert_fails(say(&s, 40, &table), KVF_E_RANGE, "group full", "[0, 40)", "[0, 3)", "[0, 2)");
    assert_fails(kvf_agent_push_ready(s.w.p.agents[0], s.pushes[0], NULL), KVF_E_RANGE, "group full",
                 "[0, 7)");
    table = part_of(&s, 0, 1, 3);
    assert_fails(say(&s, 40, &table), KVF_E_RANGE, "[0, 3)", "[1, 3)");
    uint32_t gap[] = {s.given.ids[0][0], KVF_NO_BLOCK, s.given.ids[0][2]};
    table = (kvf_block_table){gap, 3, 0};
    assert_fails(say(&s, 40, &table), KVF_E_RANGE, "block 1 of the sequence");
    table = (kvf_block_table){gap, 1, 8};
    assert_fails(say(&s, 40, &table), KVF_E_RANGE, "group full", "[0, 3)", "[8, 8)");
    table = (kvf_block_table){NULL, 1, 0};
    assert_fails(say(&s, 16, &table), KVF_E_INVALID, "group full", "table.ids is NULL");
    gap[0] = 64;
    table = (kvf_block_table){gap, 1, 0};
    assert_fails(say(&s, 8, &table), KVF_E_RANGE, "group full", "block 64");
    kvf_push_chunk two = *CHUNK(0, 40, LAYERS);
    two.tables = &table;
    two.table_count = 2;
    assert_fails(kvf_agent_push_ready(s.w.p.agents[0], s.pushes[0], &two), KVF_E_INVALID, "table_count is 2");
    assert_int_equal(held(&s), 0);
    world_run_for(&s.w, 50 * MS);
    assert_int_equal(world_stats(s.w.p.agents[0]).bytes_written, 0);
    table = part_of(&s, 0, 0, 3);
    ready(&s, 0, 40, LAYERS, &table);
    table = part_of(&s, 0, 3, 6);
    assert_fails(say(&s, TOKENS, &table), KVF_E_RANGE, "steps [40, 100)", "[2, 7)", "[0, 6)");
    table = part_of(&s, 0, 3, 7);
    ready(&s, 40, TOKENS, LAYERS, &table);
    push_scene_finish(&s);
}

/* A push of a group with a window needs only the window's blocks. */
static void blocks_before_a_window_are_not_needed(void **state) {
    (void)state;
    push_scene s;
    open_scene(&s, latent_of(LAYERS, (kvf_group_desc){.name = "window", .window_tokens = 20}), ONE("P"),
               ONE("D"), NULL);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.expects);
    ready(&s, 0, 48, LAYERS, NULL);
    kvf_block_table table = part_of(&s, 0, 5, 7);
    ready(&s, 48, TOKENS, LAYERS, &table);
    assert_int_equal(held(&s), 2);
    push_scene_finish(&s);
}

/* If the table does not begin with the sequence, a block given twice is still one block. */
static void blocks_of_a_window_may_be_repeated(void **state) {
    (void)state;
    push_scene s;
    open_scene(&s, latent_of(LAYERS, (kvf_group_desc){.name = "window", .window_tokens = 20}), ONE("P"),
               ONE("D"), NULL);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.expects);
    kvf_block_table table = part_of(&s, 0, 5, 6);
    ready(&s, 0, 6 * BLOCK, LAYERS, &table);
    assert_int_equal(held(&s), 1);
    table = part_of(&s, 0, 5, 7);
    ready(&s, 6 * BLOCK, TOKENS, LAYERS, &table);
    assert_int_equal(held(&s), 2);
    world_all_done(&s.w, &s.w.d, s.expects);
    world_all_done(&s.w, &s.w.p, s.pushes);
    assert_int_equal(held(&s), 0);
    assert_int_equal(world_block(s.w.p.agents[0], 0, s.given.ids[0][5]), KVF_BLOCK_FREE);
    world_quiet(&s.w);
    world_close(&s.w);
}

/* As of an engine that allocates for tokens to come, too: 100 tokens end in block 6. */
static void blocks_behind_the_end_of_the_push_are_left_alone(void **state) {
    (void)state;
    push_scene s;
    open_scene(&s, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), NULL);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.expects);
    uint32_t ahead[9] = {0}; /* the last two are of no token of the push */
    memcpy(ahead, s.given.ids[0], 7 * sizeof *ahead);
    ahead[7] = 40;
    ahead[8] = 41;
    kvf_block_table table = {ahead, 9, 0};
    ready(&s, 0, 96, LAYERS, &table);
    assert_int_equal(held(&s), 7);
    table = (kvf_block_table){(uint32_t[]){50}, 1, 9};
    ready(&s, 96, TOKENS, LAYERS, &table);
    assert_int_equal(held(&s), 7);
    push_scene_finish(&s);
}

/* Of 64 tokens each rank keeps 32 in a row: 64 of the push's tokens are in four blocks of the first rank, the other 36 in
 * three of the second. An engine gives all ranks the same table. */
static void a_rank_that_keeps_no_token_of_a_chunk_takes_its_blocks(void **state) {
    (void)state;
    push_scene s;
    open_scene(&s, latent(LAYERS),
               ENGINE(.name = "P", .tp_size = 2, .dcp_size = 2, .dcp_width = 32, .all = {.block_count = 64}),
               ONE("D"), NULL);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.expects);
    const struct {
        uint64_t begin, end;
        uint32_t first, last;
    } chunks[] = {{0, 64, 0, 2}, {64, 80, 2, 3}, {80, 96, 3, 4}};
    for (uint32_t i = 0; i < COUNT_OF(chunks); i++) {
        kvf_block_table table = part_of(&s, 0, chunks[i].first, chunks[i].last);
        ready(&s, chunks[i].begin, chunks[i].end, LAYERS, &table);
    }
    ready(&s, 96, TOKENS, LAYERS, NULL);
    push_scene_finish(&s);
}

static void a_chunk_takes_memory_for_its_own_blocks_alone(void **state) {
    (void)state;
    push_scene s;
    memory_count memory;
    count_memory(&memory);
    open_scene(&s, latent_of(LAYERS, (kvf_group_desc){.name = "window", .window_tokens = 20}), ONE("P"),
               ONE("D"), NULL);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.expects);
    uint32_t ids[] = {KVF_NO_BLOCK, KVF_NO_BLOCK,      KVF_NO_BLOCK,     KVF_NO_BLOCK,
                      KVF_NO_BLOCK, s.given.ids[0][5], s.given.ids[0][6]};
    kvf_block_table table = {ids, COUNT_OF(ids), 0};
    memory.largest = 0;
    ready(&s, 0, TOKENS, LAYERS, &table);
    assert_int_equal(held(&s), 2);
    assert_true(memory.largest >= sizeof ids);
    assert_true(memory.largest < 4096);
    push_scene_finish(&s);
}

static void a_block_in_use_is_refused_and_may_come_later(void **state) {
    (void)state;
    push_scene s;
    uint64_t filling;
    open_scene(&s, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), NULL);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.expects);
    kvf_block_table table = part_of(&s, 0, 0, 7);

    /* Another request of the producer fills the block that will be the sixth of the push. */
    world_request other;
    world_request_make(&s.w, &s.w.p, "other", BLOCK, s.given.ids[0][5], 1, &other);
    other.request.contact = s.w.d.contact;
    assert_ok(kvf_agent_expect(s.w.p.agents[0], &other.request, &filling));
    assert_fails(say(&s, TOKENS, &table), KVF_E_EXISTS, "block 13", "being filled");
    assert_int_equal(held(&s), 0);
    kvf_block_table first = part_of(&s, 0, 0, 5);
    ready(&s, 0, 5 * BLOCK, LAYERS, &first);
    assert_int_equal(held(&s), 5);
    assert_ok(kvf_agent_cancel(s.w.p.agents[0], filling));
    (void)world_failed(&s.w, s.w.p.agents[0], filling, KVF_E_CANCELLED);
    world_until(&s.w, world_block(s.w.p.agents[0], 0, 13) == KVF_BLOCK_FREE);
    ready(&s, 5 * BLOCK, TOKENS, LAYERS, &table);
    push_scene_finish(&s);
}

static void a_chunk_for_which_there_is_no_memory_may_come_again(void **state) {
    (void)state;
    push_scene s;
    memory_count memory;
    count_memory(&memory);
    open_scene(&s, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), NULL);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.expects);
    const kvf_block_table first = part_of(&s, 0, 0, 3);
    kvf_status status = KVF_E_NOMEM;
    size_t refused = 0;
    while (status) {
        memory.calls = 0;
        memory.fail_at = refused + 1;
        status = say(&s, 40, &first);
        memory.fail_at = 0;
        if (status) {
            assert_fails(status, KVF_E_NOMEM, "no memory for");
            refused++;
        }
    }
    assert_true(refused >= 4);
    assert_int_equal(held(&s), 3);
    const kvf_block_table rest = part_of(&s, 0, 3, 7);
    ready(&s, 40, TOKENS, LAYERS, &rest);
    push_scene_finish(&s);
    assert_ok(kvf_set_allocator(NULL));
}

static void cancelling_frees_what_chunks_have_brought(void **state) {
    (void)state;
    push_scene s;
    open_scene(&s, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), NULL);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.expects);
    for (uint32_t b = 0; b < 4; b++) {
        kvf_block_table table = part_of(&s, 0, b, b + 1);
        ready(&s, b * BLOCK, (b + 1) * BLOCK, LAYERS, &table);
    }
    assert_int_equal(held(&s), 4);
    world_run_for(&s.w, 50 * MS);
    assert_ok(kvf_agent_cancel(s.w.p.agents[0], s.pushes[0]));
    assert_true(world_failed(&s.w, s.w.p.agents[0], s.pushes[0], KVF_E_CANCELLED)->blocks_free);
    assert_int_equal(held(&s), 0);
    kvf_block_table table = part_of(&s, 0, 4, 7);
    assert_fails(say(&s, TOKENS, &table), KVF_E_NOT_FOUND, "ticket");
    (void)world_failed(&s.w, s.w.d.agents[0], s.expects[0], KVF_E_CANCELLED);
    world_quiet(&s.w);
    world_close(&s.w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_come_with_their_chunks_and_states_with_the_last),
        cmocka_unit_test(each_rank_of_an_unlike_consumer_gets_what_the_chunks_brought),
        cmocka_unit_test(blocks_given_in_the_wrong_place_arrive_wrong),
        cmocka_unit_test(known_blocks_may_be_repeated_but_not_changed),
        cmocka_unit_test(tables_that_do_not_reach_over_the_chunk_are_refused),
        cmocka_unit_test(blocks_before_a_window_are_not_needed),
        cmocka_unit_test(blocks_of_a_window_may_be_repeated),
        cmocka_unit_test(blocks_behind_the_end_of_the_push_are_left_alone),
        cmocka_unit_test(a_rank_that_keeps_no_token_of_a_chunk_takes_its_blocks),
        cmocka_unit_test_teardown(a_chunk_takes_memory_for_its_own_blocks_alone, stop_counting_memory),
        cmocka_unit_test(a_block_in_use_is_refused_and_may_come_later),
        cmocka_unit_test(a_chunk_for_which_there_is_no_memory_may_come_again),
        cmocka_unit_test(cancelling_frees_what_chunks_have_brought),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
