/* Pulls: a consumer reads what a producer holds, between agents of one process. */
#include "agent/session.h"
#include "agent_world.h"
#include "transport/front.h"

#define TP2 ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64})
#define TP4                                                                                                  \
    ENGINE(.name = "D", .tp_size = 4, .all = {.tokens_per_block = 8, .block_count = 128, .order = "BLHNP"})
#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})

static void a_pull_brings_every_cell_and_frees_the_producer(void **state) {
    (void)state;
    world w;
    world_open(&w, "llama-3.1-8b", TP2, TP4, NULL);
    world_pull_everything(&w, "a request", 100, 1);
    kvf_agent_stats producer = world_stats(w.p.agents[0]), consumer = world_stats(w.d.agents[0]);
    assert_int_equal(producer.done[KVF_REQUEST_HOLD], 1);
    assert_int_equal(consumer.done[KVF_REQUEST_PULL], 1);
    assert_true(consumer.bytes_read > 0 && consumer.runs > 0);
    assert_int_equal(consumer.total.count, 1);
    assert_int_equal(consumer.transfer.count, 1);
    assert_int_equal(consumer.queue.count, 1);
    world_quiet(&w);
    world_close(&w);
}

static void a_pull_is_there_before_its_hold(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    world_open_model(&w, attention(4, 8, 8), TP2, TP4, NULL);
    world_request_make(&w, &w.p, "early", 50, 0, 1, &held);
    world_request_make(&w, &w.d, "early", 50, 0, 1, &wanted);
    world_fill(&w, &w.p, &held, 1);

    world_pull(&w.d, &wanted, &w.p, pulls);
    world_run_for(&w, 50 * MS);
    assert_int_equal(world_count(&w, w.d.agents[0], KVF_EVENT_DONE), 0);
    assert_int_equal(world_block(w.d.agents[0], 0, 0), KVF_BLOCK_FILLING);
    world_hold(&w.p, &held, holds);

    world_all_done(&w, &w.d, pulls);
    world_all_done(&w, &w.p, holds);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
    world_quiet(&w);
    world_close(&w);
}

/* One request of an engine is kept for its next pull. The others are freed, and a pull that made none leaves it kept. */
static void pulls_that_overlap_leave_no_memory_behind(void **state) {
    (void)state;
    memory_count memory;
    world w;
    uint64_t holds[2], pulls[3];
    count_memory(&memory);
    world_open_model(&w, attention(4, 8, 8), ONE("P"), ONE("D"), NULL);
    for (uint32_t i = 0; i < 3; i++) {
        static const char *const ids[] = {"a", "b", "never held"};
        world_request held, wanted;
        world_request_make(&w, &w.p, ids[i], 50, 10 * i, 1, &held);
        world_request_make(&w, &w.d, ids[i], 50, 10 * i, 1, &wanted);
        if (i < 2)
            world_hold(&w.p, &held, &holds[i]);
        world_pull(&w.d, &wanted, &w.p, &pulls[i]);
    }
    for (uint32_t i = 0; i < 2; i++)
        (void)world_done(&w, w.d.agents[0], pulls[i]);
    assert_ok(kvf_agent_cancel(w.d.agents[0], pulls[2]));
    (void)world_failed(&w, w.d.agents[0], pulls[2], KVF_E_CANCELLED);
    world_quiet(&w);
    world_close(&w);
    assert_int_equal(memory.live, 0);
}

static void request_ids_are_any_bytes(void **state) {
    (void)state;
    static const struct {
        const char *id;
        size_t bytes;
    } ids[] = {{"a,b", 3}, {"a:b", 3}, {"HB", 2}, {"a\0b", 3}, {"a\0", 2}, {"a", 1}, {"\xff\xfe\n\"", 4}};
    world w;
    world_request held, wanted;
    uint64_t holds[COUNT_OF(ids)], pulls[COUNT_OF(ids)];
    world_open_model(&w, attention(2, 2, 8), ONE("P"), ONE("D"), NULL);
    world_request_make(&w, &w.p, "", 16, 0, 1, &held);
    held.request.contact = w.p.contact;
    for (uint32_t i = 0; i < COUNT_OF(ids); i++) {
        wanted = held;
        wanted.groups[0].table.ids = wanted.ids[0];
        held.ids[0][0] = wanted.ids[0][0] = i;
        held.request.groups = held.groups;
        wanted.request.groups = wanted.groups;
        held.groups[0].table.ids = held.ids[0];
        held.request.id = wanted.request.id = (kvf_request_id){ids[i].id, ids[i].bytes};
        world_fill(&w, &w.p, &held, i);
        world_hold(&w.p, &held, &holds[i]);
        world_pull(&w.d, &wanted, &w.p, &pulls[i]);
    }
    for (uint32_t i = 0; i < COUNT_OF(ids); i++) {
        const world_outcome *got = world_done(&w, w.d.agents[0], pulls[i]);
        assert_int_equal(got->id_bytes, ids[i].bytes);
        assert_memory_equal(got->id, ids[i].id, ids[i].bytes);
        (void)world_done(&w, w.p.agents[0], holds[i]);
        held.ids[0][0] = i;
        assert_int_equal(world_wrong_cells(&w, &w.d, &held, i), 0);
    }
    world_quiet(&w);
    world_close(&w);
}

/* ---- prefix hits ----------------------------------------------------------------------------- */

static void a_full_prefix_hit_reads_nothing_and_frees_every_producer_rank(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    world_open_model(&w, attention(4, 8, 8), TP4, ENGINE(.name = "E", .all = {.block_count = 64}), NULL);
    world_request_make(&w, &w.p, "hit", 50, 0, 1, &held);
    world_request_make(&w, &w.d, "hit", 50, 0, 1, &wanted);
    world_request_empty(&wanted);

    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &wanted, &w.p, pulls);

    world_all_done(&w, &w.d, pulls);
    world_all_done(&w, &w.p, holds);
    assert_int_equal(world_stats(w.d.agents[0]).bytes_read, 0);
    world_quiet(&w);
    world_close(&w);
}

static void a_full_prefix_hit_that_comes_first_frees_the_hold_at_once(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    world_open_model(&w, attention(4, 8, 8), TP2, TP4, NULL);
    world_request_make(&w, &w.p, "hit", 50, 0, 1, &held);
    world_request_make(&w, &w.d, "hit", 50, 0, 1, &wanted);
    world_request_empty(&wanted);

    world_pull(&w.d, &wanted, &w.p, pulls);
    world_all_done(&w, &w.d, pulls);
    world_run_for(&w, 50 * MS);
    world_hold(&w.p, &held, holds);

    world_all_done(&w, &w.p, holds);
    world_quiet(&w);
    world_close(&w);
}

static void a_partial_prefix_hit_reads_the_rest_of_each_group(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    world_open(&w, "gemma-3-27b", ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 16}),
               ENGINE(.name = "D", .all = {.tokens_per_block = 8, .block_count = 32}), NULL);
    world_request_make(&w, &w.p, "part", 60, 1, 2, &held);
    world_request_make(&w, &w.d, "part", 60, 0, 3, &wanted);
    world_fill(&w, &w.p, &held, 1);
    world_fill(&w, &w.d, &wanted, 2);
    wanted.groups[0].begin = 40;                   /* some tokens are cached */
    wanted.groups[1].begin = wanted.groups[1].end; /* all of them are cached */

    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &wanted, &w.p, pulls);

    world_all_done(&w, &w.d, pulls);
    world_all_done(&w, &w.p, holds);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
    wanted.groups[0].begin = 0;
    wanted.groups[0].end = 40;
    wanted.groups[1].begin = 0;
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 2), 0);
    world_quiet(&w);
    world_close(&w);
}

/* ---- shapes ---------------------------------------------------------------------------------- */

static void latents_come_from_one_replica_and_all_are_freed(void **state) {
    (void)state;
    const kvf_engine_spec *four = ENGINE(.name = "P", .tp_size = 4, .all = {.block_count = 16});
    const kvf_engine_spec *two =
        ENGINE(.name = "D", .tp_size = 2, .all = {.tokens_per_block = 32, .block_count = 16});
    for (int turn = 0; turn < 2; turn++) {
        world w;
        world_open(&w, "deepseek-v3", turn ? two : four, turn ? four : two, NULL);
        world_pull_everything(&w, "latent", 20, 4);
        world_quiet(&w);
        world_close(&w);
    }
}

static void states_move_whole(void **state) {
    (void)state;
    world w;
    world_open_model(
        &w, hybrid(4),
        ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 32}, .state = {.order = "L|BTNPH"}),
        ENGINE(.name = "D", .all = {.tokens_per_block = 8, .block_count = 64}, .state = {.order = "L|BTNPH"}),
        NULL);
    world_pull_everything(&w, "hybrid", 50, 5);
    world_quiet(&w);
    world_close(&w);
}

/* A producer has one state, that after its last token. Tokens alone may be fewer. */
static void a_state_after_other_tokens_is_refused(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    world_open_model(&w, hybrid(4), ENGINE(.name = "P", .all = {.block_count = 32}),
                     ENGINE(.name = "D", .all = {.block_count = 32}), NULL);
    world_request_make(&w, &w.p, "long", 64, 0, 1, &held);
    world_request_make(&w, &w.d, "long", 48, 8, 1, &wanted);
    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &wanted, &w.p, pulls);
    const world_outcome *failed = world_failed(&w, w.d.agents[0], pulls[0], KVF_E_RANGE);
    assert_non_null(strstr(failed->detail,
                           "group ssm: the state is wanted after step 48 of group full, but the "
                           "producer has that after step 64; allowed: the same end"));
    wanted.groups[1].end = 0;
    world_pull(&w.d, &wanted, &w.p, pulls);
    (void)world_done(&w, w.d.agents[0], pulls[0]);
    world_quiet(&w);
    world_close(&w);
}

/* ---- several consumers, both directions ------------------------------------------------------ */

static void two_engines_read_one_hold(void **state) {
    (void)state;
    world w;
    world_request held, first, second;
    uint64_t holds[WORLD_MAX_RANKS], ones[WORLD_MAX_RANKS], others[WORLD_MAX_RANKS];
    world_open_model(&w, attention(4, 8, 8), TP2, TP4, NULL);
    world_add(&w, ONE("E"), NULL);
    world_request_make(&w, &w.p, "both", 50, 0, 1, &held);
    world_request_make(&w, &w.d, "both", 50, 2, 2, &first);
    world_request_make(&w, &w.e, "both", 50, 1, 1, &second);
    held.request.consumers = 2;
    world_fill(&w, &w.p, &held, 6);

    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &first, &w.p, ones);
    world_all_done(&w, &w.d, ones);
    world_run_for(&w, 50 * MS);
    assert_int_equal(world_count(&w, w.p.agents[0], KVF_EVENT_DONE), 0);
    assert_int_equal(world_block(w.p.agents[0], 0, 0), KVF_BLOCK_HELD);
    world_pull(&w.e, &second, &w.p, others);

    world_all_done(&w, &w.e, others);
    world_all_done(&w, &w.p, holds);
    assert_int_equal(world_wrong_cells(&w, &w.d, &first, 6), 0);
    assert_int_equal(world_wrong_cells(&w, &w.e, &second, 6), 0);
    world_quiet(&w);
    world_close(&w);
}

static void blocks_of_the_consumer_are_read_back_by_the_producer(void **state) {
    (void)state;
    world w;
    world_request there, back;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    world_open_model(&w, attention(4, 8, 8), TP2, TP4, NULL);
    world_pull_everything(&w, "turn 1", 50, 7);
    world_request_make(&w, &w.d, "turn 1", 80, 7, 3, &there);
    world_request_make(&w, &w.p, "turn 1", 80, 20, 2, &back);
    world_fill(&w, &w.d, &there, 8);
    back.groups[0].begin = 50; /* the first turn's tokens are still cached */

    world_hold(&w.d, &there, holds);
    world_pull(&w.p, &back, &w.d, pulls);

    world_all_done(&w, &w.p, pulls);
    world_all_done(&w, &w.d, holds);
    assert_int_equal(world_wrong_cells(&w, &w.p, &back, 8), 0);
    world_quiet(&w);
    world_close(&w);
}

static void blocks_are_reserved_before_there_is_a_destination(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    kvf_agent_options options = {.struct_size = sizeof options, .lease_ns = 400 * MS};
    world_open_model(&w, attention(4, 8, 8), TP2, ONE("D"), &options);
    world_request_make(&w, &w.p, "later", 50, 0, 1, &held);
    world_request_make(&w, &w.d, "later", 50, 5, 1, &wanted);
    world_fill(&w, &w.p, &held, 1);
    world_hold(&w.p, &held, holds);

    wanted.request.groups = NULL;
    wanted.request.group_count = 0;
    world_pull(&w.d, &wanted, &w.p, pulls);
    world_run_for(&w, 1500 * MS); /* longer than a lease without heartbeats */
    assert_int_equal(world_count(&w, w.d.agents[0], KVF_EVENT_DONE), 0);
    assert_int_equal(world_block(w.p.agents[0], 0, 0), KVF_BLOCK_LEASED);
    assert_int_equal(world_block(w.d.agents[0], 0, 5), KVF_BLOCK_FREE);
    assert_ok(kvf_agent_pull_into(w.d.agents[0], pulls[0], wanted.groups, wanted.group_count));
    assert_fails(kvf_agent_pull_into(w.d.agents[0], pulls[0], wanted.groups, wanted.group_count),
                 KVF_E_EXISTS, "destination");

    world_all_done(&w, &w.d, pulls);
    world_all_done(&w, &w.p, holds);
    assert_fails(kvf_agent_pull_into(w.d.agents[0], pulls[0], wanted.groups, wanted.group_count),
                 KVF_E_NOT_FOUND, "ticket");
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
    world_quiet(&w);
    world_close(&w);
}

static void a_pull_without_a_destination_says_at_its_deadline_that_none_was_named(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t hold, pull;
    world_open_model(&w, attention(4, 8, 8), ONE("P"), ONE("D"), NULL);
    world_request_make(&w, &w.p, "later", 50, 0, 1, &held);
    world_request_make(&w, &w.d, "later", 50, 5, 1, &wanted);
    wanted.request.groups = NULL;
    wanted.request.group_count = 0;
    wanted.request.deadline_ns = SECOND;
    world_hold(&w.p, &held, &hold);
    world_pull(&w.d, &wanted, &w.p, &pull);
    const world_outcome *failed = world_failed(&w, w.d.agents[0], pull, KVF_E_TIMEOUT);
    assert_non_null(strstr(failed->detail, "the deadline has passed: no destination was named"));
    assert_ok(kvf_agent_cancel(w.p.agents[0], hold));
    world_quiet(&w);
    world_close(&w);
}

/* The typical fault of an engine with several ranks: one of them does not hold what the others do. */
static void a_pull_names_the_first_rank_that_grants_no_lease(void **state) {
    (void)state;
    static const struct {
        uint32_t first, end, late; /* the ranks that hold; the one that is named */
        const char *words;
    } cases[] = {{0, 0, UINT32_MAX, "no lease on the request was granted"},
                 {0, 1, 1, "1 of 2 producer ranks have granted a lease"},
                 {1, 2, 0, "1 of 2 producer ranks have granted a lease"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        world w;
        world_request held, wanted;
        uint64_t pulls[WORLD_MAX_RANKS];
        world_open_model(&w, attention(4, 8, 8), TP2, ONE("D"), NULL);
        world_request_make(&w, &w.p, "a", 48, 0, 1, &held);
        world_request_make(&w, &w.d, "a", 48, 4, 1, &wanted);
        wanted.request.deadline_ns = 300 * MS;
        for (uint32_t r = cases[i].first; r < cases[i].end; r++)
            assert_ok(kvf_agent_hold(w.p.agents[r], &held.request, NULL));
        world_pull(&w.d, &wanted, &w.p, pulls);
        const world_outcome *failed = world_failed(&w, w.d.agents[0], pulls[0], KVF_E_TIMEOUT);
        assert_non_null(strstr(failed->detail, cases[i].words));
        assert_int_equal(failed->rank, cases[i].late);
        world_close(&w);
    }
}

/* A hold claims all blocks that it names, a destination only those that will be written. */
static void only_what_will_be_written_is_claimed(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    world_open_model(&w, attention(4, 8, 8), ONE("P"), ONE("D"), NULL);
    world_request_make(&w, &w.p, "a", 64, 10, 1, &held);
    world_request_make(&w, &w.d, "a", 64, 20, 1, &wanted);
    held.groups[0].begin = wanted.groups[0].begin = 33; /* token 33 is in the third of four blocks */
    world_pull(&w.d, &wanted, &w.p, pulls);
    for (uint32_t block = 19; block <= 24; block++)
        assert_int_equal(world_block(w.d.agents[0], 0, block),
                         block == 22 || block == 23 ? KVF_BLOCK_FILLING : KVF_BLOCK_FREE);
    assert_int_equal(world_stats(w.d.agents[0]).blocks_filling_now, 2);
    world_fill(&w, &w.p, &held, 1);
    world_hold(&w.p, &held, holds);
    for (uint32_t block = 9; block <= 14; block++)
        assert_int_equal(world_block(w.p.agents[0], 0, block),
                         block >= 10 && block <= 13 ? KVF_BLOCK_HELD : KVF_BLOCK_FREE);
    world_all_done(&w, &w.d, pulls);
    world_all_done(&w, &w.p, holds);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
    world_quiet(&w);
    world_close(&w);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void more_than_the_producer_holds_fails_this_request_only(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    world_open_model(&w, attention(4, 8, 8), TP2, ONE("D"), NULL);
    world_request_make(&w, &w.p, "short", 48, 0, 1, &held);
    world_request_make(&w, &w.d, "short", 64, 4, 1, &wanted);
    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &wanted, &w.p, pulls);

    const world_outcome *failed = world_failed(&w, w.d.agents[0], pulls[0], KVF_E_RANGE);
    assert_non_null(strstr(failed->detail, "[0, 64)"));
    assert_non_null(strstr(failed->detail, "[0, 48)"));
    assert_true(failed->blocks_free && failed->recompute);
    assert_int_equal(failed->invalid_count[0], 4);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(failed->invalid[0][i], 4 + i);
    assert_int_equal(world_count(&w, w.d.agents[0], KVF_EVENT_PEER_LOST), 0);
    for (uint32_t r = 0; r < w.p.rank_count; r++) { /* still held for another attempt */
        assert_ok(kvf_agent_cancel(w.p.agents[r], holds[r]));
        (void)world_failed(&w, w.p.agents[r], holds[r], KVF_E_CANCELLED);
    }
    world_pull_everything(&w, "next", 48, 9);
    world_quiet(&w);
    world_close(&w);
}

/* What ranks 0 and 1 hold: the first two cases are alike, and in each of the others they differ in one way. */
static void ranks_of_a_producer_hold_the_same_blocks(void **state) {
    (void)state;
    static const uint32_t ids[] = {0, 1, 2, 3, 4}, others[] = {0, 1, 5, 3};
    const kvf_group_steps held[][2] = {
        {{{ids, 4, 0}, 0, 64}, {{ids, 4, 0}, 0, 64}},    {{{ids, 5, 0}, 16, 64}, {{ids, 5, 0}, 16, 64}},
        {{{ids, 4, 0}, 0, 64}, {{others, 4, 0}, 0, 64}}, {{{ids, 4, 0}, 0, 64}, {{ids, 5, 0}, 0, 64}},
        {{{ids, 4, 0}, 0, 64}, {{ids, 4, 0}, 16, 64}},   {{{ids, 5, 0}, 16, 64}, {{ids, 5, 1}, 16, 64}},
        {{{ids, 4, 0}, 0, 64}, {{ids, 4, 0}, 0, 63}}};
    for (size_t i = 0; i < COUNT_OF(held); i++) {
        world w;
        world_request wanted, request;
        uint64_t pull, holds[2];
        world_open_model(&w, attention(4, 8, 8), TP2, ONE("D"), NULL);
        world_request_make(&w, &w.d, "a", 64, 20, 1, &wanted);
        wanted.groups[0].begin = 20;
        wanted.groups[0].end = 40;
        for (uint32_t r = 0; r < 2; r++) {
            world_request_make(&w, &w.p, "a", 64, 0, 1, &request);
            request.groups[0] = held[i][r];
            assert_ok(kvf_agent_hold(w.p.agents[r], &request.request, &holds[r]));
        }
        world_pull(&w.d, &wanted, &w.p, &pull);
        if (i < 2) {
            (void)world_done(&w, w.d.agents[0], pull);
        } else {
            const world_outcome *failed = world_failed(&w, w.d.agents[0], pull, KVF_E_MISMATCH);
            assert_non_null(
                strstr(failed->detail, "the producer's rank holds other blocks than its siblings"));
        }
        for (uint32_t r = 0; r < 2; r++)
            (void)kvf_agent_cancel(w.p.agents[r], holds[r]);
        world_quiet(&w);
        world_close(&w);
    }
}

static void ranks_of_a_producer_hold_the_same_blocks_of_every_group(void **state) {
    (void)state;
    static const uint32_t another = 9; /* the state's block at rank 1 */
    world w;
    world_request wanted, request;
    uint64_t pull, holds[2];
    world_open_model(&w, hybrid(4), TP2, ONE("D"), NULL);
    world_request_make(&w, &w.d, "a", 50, 20, 1, &wanted);
    for (uint32_t r = 0; r < 2; r++) {
        world_request_make(&w, &w.p, "a", 50, 0, 1, &request);
        assert_int_equal(request.groups[1].table.count, 1);
        if (r == 1)
            request.groups[1].table.ids = &another;
        assert_ok(kvf_agent_hold(w.p.agents[r], &request.request, &holds[r]));
    }
    world_pull(&w.d, &wanted, &w.p, &pull);
    const world_outcome *failed = world_failed(&w, w.d.agents[0], pull, KVF_E_MISMATCH);
    assert_non_null(strstr(failed->detail, "the producer's rank holds other blocks than its siblings"));
    for (uint32_t r = 0; r < 2; r++)
        (void)kvf_agent_cancel(w.p.agents[r], holds[r]);
    world_quiet(&w);
    world_close(&w);
}

static void a_failure_lists_the_wanted_blocks_of_every_group(void **state) {
    (void)state;
    world w;
    world_request wanted;
    uint64_t pulls[WORLD_MAX_RANKS];
    world_open_model(&w, hybrid(4), ONE("P"), ONE("D"), NULL);
    world_request_make(&w, &w.d, "gone", 50, 4, 2, &wanted);
    wanted.groups[0].begin = 17;
    world_pull(&w.d, &wanted, &w.p, pulls);
    assert_ok(kvf_agent_cancel(w.d.agents[0], pulls[0]));
    const world_outcome *failed = world_failed(&w, w.d.agents[0], pulls[0], KVF_E_CANCELLED);
    assert_int_equal(failed->group_count, 2);
    assert_int_equal(failed->invalid_count[0], 3); /* the first block was cached */
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(failed->invalid[0][i], 6 + 2 * i);
    assert_int_equal(failed->invalid_count[1], 1);
    assert_int_equal(failed->invalid[1][0], 4);
    world_close(&w);

    world_open_model(&w, latent_of(2, (kvf_group_desc){.name = "swa", .window_tokens = 20}), ONE("P"),
                     ENGINE(.name = "D", .all = {.tokens_per_block = 8, .block_count = 64}), NULL);
    world_request_make(&w, &w.d, "gone", 50, 4, 2, &wanted);
    world_pull(&w.d, &wanted, &w.p, pulls);
    assert_ok(kvf_agent_cancel(w.d.agents[0], pulls[0]));
    failed = world_failed(&w, w.d.agents[0], pulls[0], KVF_E_CANCELLED);
    assert_int_equal(failed->invalid_count[0], 4); /* tokens 30 to 50 */
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(failed->invalid[0][i], 4 + 2 * (3 + i));
    world_close(&w);
}

static void blocks_beyond_the_cache_are_refused_at_once(void **state) {
    (void)state;
    world w;
    world_request one;
    uint64_t ticket;
    world_open_model(&w, attention(2, 2, 8), ONE("P"), ONE("D"), NULL);
    world_request_make(&w, &w.d, "far", 32, 63, 1, &one);
    one.request.contact = w.p.contact;
    assert_fails(kvf_agent_pull(w.d.agents[0], &one.request, &ticket), KVF_E_RANGE, "64", "full");
    assert_fails(kvf_agent_expect(w.d.agents[0], &one.request, &ticket), KVF_E_RANGE, "64");
    assert_fails(kvf_agent_hold(w.p.agents[0], &one.request, &ticket), KVF_E_RANGE, "64");
    assert_fails(kvf_agent_push(w.p.agents[0], &one.request, &ticket), KVF_E_RANGE, "64");
    world_quiet(&w);
    world_close(&w);
}

static void a_block_has_one_use_at_a_time(void **state) {
    (void)state;
    world w;
    world_request one, other;
    uint64_t first, second;
    kvf_agent *d;
    world_open_model(&w, attention(2, 2, 8), ONE("P"), ONE("D"), NULL);
    d = w.d.agents[0];
    world_request_make(&w, &w.d, "one", 32, 4, 1, &one);
    world_request_make(&w, &w.d, "other", 32, 5, 1, &other);
    one.request.contact = other.request.contact = w.p.contact;

    assert_ok(kvf_agent_pull(d, &one.request, &first));
    assert_fails(kvf_agent_pull(d, &other.request, &second), KVF_E_EXISTS, "block 5");
    assert_fails(kvf_agent_hold(d, &other.request, &second), KVF_E_EXISTS, "block 5");
    uint32_t requests = 0;
    kvf_block_state state_now;
    assert_ok(kvf_agent_block(d, 0, 5, &state_now, &requests));
    assert_int_equal(state_now, KVF_BLOCK_FILLING);
    assert_int_equal(requests, 1);
    assert_ok(kvf_agent_cancel(d, first));
    (void)world_failed(&w, d, first, KVF_E_CANCELLED);

    assert_ok(kvf_agent_hold(d, &other.request, &second));
    assert_fails(kvf_agent_hold(d, &other.request, &first), KVF_E_EXISTS, "held already");
    assert_fails(kvf_agent_pull(d, &one.request, &first), KVF_E_EXISTS, "block 5");
    assert_ok(kvf_agent_cancel(d, second));
    (void)world_failed(&w, d, second, KVF_E_CANCELLED);
    world_quiet(&w);
    world_close(&w);
}

static bool always(const void *link) {
    (void)link;
    return true;
}

/* The peer by which D reads from its only producer, as a fabric that says that it is behind. */
static kvf_peer *let_it_be_behind(const world *w, kvf_fabric *behind) {
    kvf_peer *peer = w->d.agents[0]->all_sessions->peer;
    assert_non_null(peer);
    *behind = *peer->fabric;
    behind->is_behind = always;
    peer->fabric = behind;
    return peer;
}

/* The first pull is slow, and goes on while the second one begins. */
static void pull_at_a_pace(world *w, uint32_t i, uint64_t *hold, uint64_t *pull) {
    static const char *const ids[] = {"slow", "quick"};
    world_request given, wanted;
    world_request_make(w, &w->p, ids[i], 48, 10 * i, 1, &given);
    world_request_make(w, &w->d, ids[i], 48, 10 * i, 1, &wanted);
    wanted.request.bytes_per_second = i == 0 ? 1 << 10 : 0;
    world_hold(&w->p, &given, hold);
    world_pull(&w->d, &wanted, &w->p, pull);
    world_run_for(w, 10 * MS);
}

static void a_pull_leaves_a_connection_that_is_behind_unless_another_pull_uses_it(void **state) {
    (void)state;
    world w;
    uint64_t holds[2], pulls[2];
    kvf_fabric behind;
    world_open_model(&w, attention(4, 8, 8), ONE("P"), ONE("D"), NULL);
    world_pull_everything(&w, "first", 48, 1);
    (void)let_it_be_behind(&w, &behind);
    world_pull_everything(&w, "second", 48, 2);
    const kvf_session *session = w.d.agents[0]->all_sessions;
    assert_ptr_not_equal(session->peer->fabric, &behind);
    kvf_peer *used = NULL;
    for (uint32_t i = 0; i < 2; i++) {
        pull_at_a_pace(&w, i, &holds[i], &pulls[i]);
        used = used ? used : let_it_be_behind(&w, &behind);
    }
    (void)world_done(&w, w.d.agents[0], pulls[1]);
    assert_ptr_equal(session->peer, used);
    assert_ptr_equal(used->fabric, &behind);
    assert_ok(kvf_agent_cancel(w.d.agents[0], pulls[0]));
    (void)world_failed(&w, w.d.agents[0], pulls[0], KVF_E_CANCELLED);
    (void)world_failed(&w, w.p.agents[0], holds[0], KVF_E_CANCELLED);
    world_pull_everything(&w, "last", 48, 3);
    assert_ptr_not_equal(session->peer->fabric, &behind);
    world_quiet(&w);
    world_close(&w);
}

static const char *refuse(const void *link) {
    (void)link;
    return "it cannot read this memory";
}

static void a_pull_waits_for_another_that_uses_a_connection_that_is_to_be_left(void **state) {
    (void)state;
    world w;
    uint64_t holds[2], pulls[2];
    kvf_fabric refusing;
    world_open_model(&w, attention(4, 8, 8), ONE("P"), ONE("D"), NULL);
    for (uint32_t i = 0; i < 2; i++) {
        pull_at_a_pace(&w, i, &holds[i], &pulls[i]);
        if (i == 0) {
            w.d.agents[0]->all_sessions->past = kvf_peer_kind(let_it_be_behind(&w, &refusing));
            refusing.refusal = refuse;
        }
    }
    assert_int_equal(world_count(&w, w.d.agents[0], KVF_EVENT_DONE), 0);
    w.d.agents[0]->all_sessions->past = NULL; /* it is good enough, after all */
    (void)world_done(&w, w.d.agents[0], pulls[1]);
    (void)world_done(&w, w.p.agents[0], holds[1]);
    assert_ok(kvf_agent_cancel(w.d.agents[0], pulls[0]));
    (void)world_failed(&w, w.d.agents[0], pulls[0], KVF_E_CANCELLED);
    (void)world_failed(&w, w.p.agents[0], holds[0], KVF_E_CANCELLED);
    world_quiet(&w);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pull_brings_every_cell_and_frees_the_producer),
        cmocka_unit_test(a_pull_is_there_before_its_hold),
        cmocka_unit_test_teardown(pulls_that_overlap_leave_no_memory_behind, stop_counting_memory),
        cmocka_unit_test(request_ids_are_any_bytes),
        cmocka_unit_test(a_full_prefix_hit_reads_nothing_and_frees_every_producer_rank),
        cmocka_unit_test(a_full_prefix_hit_that_comes_first_frees_the_hold_at_once),
        cmocka_unit_test(a_partial_prefix_hit_reads_the_rest_of_each_group),
        cmocka_unit_test(latents_come_from_one_replica_and_all_are_freed),
        cmocka_unit_test(states_move_whole),
        cmocka_unit_test(a_state_after_other_tokens_is_refused),
        cmocka_unit_test(two_engines_read_one_hold),
        cmocka_unit_test(blocks_of_the_consumer_are_read_back_by_the_producer),
        cmocka_unit_test(blocks_are_reserved_before_there_is_a_destination),
        cmocka_unit_test(a_pull_without_a_destination_says_at_its_deadline_that_none_was_named),
        cmocka_unit_test(a_pull_names_the_first_rank_that_grants_no_lease),
        cmocka_unit_test(only_what_will_be_written_is_claimed),
        cmocka_unit_test(more_than_the_producer_holds_fails_this_request_only),
        cmocka_unit_test(ranks_of_a_producer_hold_the_same_blocks),
        cmocka_unit_test(ranks_of_a_producer_hold_the_same_blocks_of_every_group),
        cmocka_unit_test(a_failure_lists_the_wanted_blocks_of_every_group),
        cmocka_unit_test(blocks_beyond_the_cache_are_refused_at_once),
        cmocka_unit_test(a_block_has_one_use_at_a_time),
        cmocka_unit_test(a_pull_leaves_a_connection_that_is_behind_unless_another_pull_uses_it),
        cmocka_unit_test(a_pull_waits_for_another_that_uses_a_connection_that_is_to_be_left),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
