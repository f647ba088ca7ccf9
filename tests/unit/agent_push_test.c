/* Pushes: a producer writes to consumers that expect it, between agents of one process. */
#include <stdio.h>

#include "agent/push.h"
#include "push_scene.h"
#include "transport/front.h"

static void ready(push_scene *v, uint64_t begin, uint64_t end, uint32_t layers) {
    for (uint32_t r = 0; r < v->w.p.rank_count; r++)
        assert_ok(kvf_agent_push_ready(v->w.p.agents[r], v->pushes[r], CHUNK(begin, end, layers)));
}

static void everything_is_pushed_at_once(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, NULL);
    world_push(&v.w.p, &v.given, v.pushes);
    world_ready(&v.w.p, v.pushes);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    push_scene_finish(&v);
}

/* A connection that is to be passed over ends when nothing uses it. The thread that pushes must not end it: the agent's
 * may be using it. */
static void a_push_does_not_end_connections(void **state) {
    (void)state;
    push_scene v;
    const kvf_agent_options packed = {.struct_size = sizeof packed, .way = KVF_WAY_PACKED};
    push_scene_open(&v, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), &packed);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    while (!v.w.p.agents[0]->flows)
        world_work(&v.w);
    kvf_session *session = world_session(v.w.p.agents[0], true);
    world_until(&v.w, session->peer);
    session->past = kvf_peer_kind(session->peer);
    world_push(&v.w.p, &v.given, v.pushes);
    assert_non_null(session->peer);
    world_work(&v.w);
    assert_null(session->peer);
    session->past = NULL;
    world_ready(&v.w.p, v.pushes);
    push_scene_finish(&v);
}

static void a_push_goes_by_chunks_and_layers(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, NULL);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    for (uint32_t c = 0; c < 3; c++)
        for (uint32_t l = 0; l <= LAYERS; l += 2) {
            ready(&v, TOKENS * c / 3, TOKENS * (c + 1) / 3, l);
            world_run_for(&v.w, 10 * MS);
            if (c < 2 || l < LAYERS)
                assert_int_equal(world_count(&v.w, v.w.p.agents[0], KVF_EVENT_DONE), 0);
        }
    push_scene_finish(&v);
}

/* Plans are kept by range of layers: a range with the same begin or end is another one. */
static void each_range_of_layers_is_written_by_its_own_plan(void **state) {
    (void)state;
    static const uint32_t ready_first[] = {1, LAYERS, 3, LAYERS, 1, 5};
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, NULL);
    for (uint32_t i = 0; i < sizeof ready_first / sizeof *ready_first; i++) {
        char id[16];
        (void)snprintf(id, sizeof id, "push %u", i);
        world_request_make(&v.w, &v.w.p, id, TOKENS, 3, 2, &v.given);
        world_request_make(&v.w, &v.w.d, id, TOKENS, 7, 3, &v.wanted);
        world_fill(&v.w, &v.w.p, &v.given, 20 + i); /* so that old bytes would be wrong */
        world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
        world_push(&v.w.p, &v.given, v.pushes);
        ready(&v, 0, TOKENS, ready_first[i]);
        world_run_for(&v.w, 10 * MS);
        if (ready_first[i] < LAYERS)
            ready(&v, 0, TOKENS, LAYERS);
        world_all_done(&v.w, &v.w.d, v.expects);
        world_all_done(&v.w, &v.w.p, v.pushes);
        assert_int_equal(world_wrong_cells(&v.w, &v.w.d, &v.wanted, 20 + i), 0);
    }
    world_quiet(&v.w);
    world_close(&v.w);
}

static void a_late_expectation_gets_what_was_ready_and_the_rest(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, NULL);
    world_push(&v.w.p, &v.given, v.pushes);
    ready(&v, 0, 40, LAYERS);
    ready(&v, 40, 70, 3);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_run_for(&v.w, 100 * MS);
    ready(&v, 40, 70, LAYERS);
    ready(&v, 70, UINT64_MAX, UINT32_MAX);
    push_scene_finish(&v);
}

static void cells_computed_after_they_were_expected_are_those_that_arrive(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, ONE("D"), NULL);
    world_fill(&v.w, &v.w.p, &v.given, 9); /* not computed yet */
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    world_run_for(&v.w, 100 * MS);
    world_fill(&v.w, &v.w.p, &v.given, 2);
    world_ready(&v.w.p, v.pushes);
    for (uint32_t r = 0; r < 2; r++)
        assert_int_equal(kvf_agent_timeout(v.w.p.agents[r]), 0); /* a round is due */
    push_scene_finish(&v);
}

static void chunks_and_layers_out_of_order_are_refused(void **state) {
    (void)state;
    push_scene v;
    const kvf_agent_options packed = {.struct_size = sizeof packed, .way = KVF_WAY_PACKED};
    push_scene_open(&v, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), &packed);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    kvf_agent *p = v.w.p.agents[0];

    ready(&v, 0, 40, 3);
    assert_fails(kvf_agent_push_ready(p, v.pushes[0], CHUNK(0, 40, 2)), KVF_E_RANGE, "layers is 2", "3");
    assert_fails(kvf_agent_push_ready(p, v.pushes[0], CHUNK(0, 50, 4)), KVF_E_RANGE, "[0, 50)");
    assert_fails(kvf_agent_push_ready(p, v.pushes[0], CHUNK(40, 80, 1)), KVF_E_RANGE, "[40, 80)", "3 of 6");
    ready(&v, 0, 40, LAYERS);
    assert_fails(kvf_agent_push_ready(p, v.pushes[0], CHUNK(30, 60, 1)), KVF_E_RANGE, "40 tokens");
    assert_fails(kvf_agent_push_ready(p, v.pushes[0], CHUNK(60, 60, 1)), KVF_E_RANGE, "[60, 60)");
    assert_fails(kvf_agent_push_ready(p, v.expects[0] + 77, CHUNK(40, 60, 1)), KVF_E_NOT_FOUND, "ticket");
    ready(&v, 50, 60, 1); /* and with it everything before 50 */
    assert_fails(kvf_agent_push_ready(p, v.pushes[0], CHUNK(40, 60, 1)), KVF_E_RANGE, "50 tokens");
    assert_fails(kvf_agent_push_ready(p, v.pushes[0], CHUNK(60, 80, 1)), KVF_E_RANGE, "[50, 60) has 1 of 6");
    assert_fails(kvf_agent_push_ready(p, v.pushes[0], CHUNK(50, 61, 2)), KVF_E_RANGE, "[50, 60) has 1 of 6");
    assert_fails(kvf_agent_push_ready(p, v.pushes[0], CHUNK(51, 60, 2)), KVF_E_RANGE, "[50, 60) has 1 of 6");
    ready(&v, 50, 60, LAYERS);
    ready(&v, 60, TOKENS, LAYERS);
    push_scene_finish(&v);
}

static void states_are_written_with_the_last_chunk(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(
        &v, hybrid(4),
        ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 32}, .state = {.order = "L|BTNPH"}),
        ENGINE(.name = "D", .all = {.block_count = 64}, .state = {.order = "L|BTNPH"}), NULL);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    ready(&v, 0, 60, 4);
    world_run_for(&v.w, 50 * MS);
    ready(&v, 60, TOKENS, 2);
    ready(&v, 60, TOKENS, 4);
    push_scene_finish(&v);
}

static void a_state_after_other_tokens_is_not_written(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, hybrid(4), ENGINE(.name = "P", .all = {.block_count = 64}),
                    ENGINE(.name = "D", .all = {.block_count = 64}), NULL);
    v.wanted.groups[0].end = TOKENS - 20;
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    ready(&v, 0, TOKENS, 4);
    const world_outcome *failed = world_failed(&v.w, v.w.d.agents[0], v.expects[0], KVF_E_RANGE);
    assert_non_null(strstr(failed->detail,
                           "group ssm: the state is wanted after step 80 of group full, but the "
                           "producer has that after step 100"));
    (void)world_failed(&v.w, v.w.p.agents[0], v.pushes[0], KVF_E_RANGE);
    world_quiet(&v.w);
    world_close(&v.w);
}

/* Chunks end inside entries of 4 and of 32 tokens: an entry goes with its last token. */
static void entries_are_written_with_their_last_token(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, compressed(), ENGINE(.name = "P", .all = {.tokens_per_block = 32, .block_count = 64}),
                    ENGINE(.name = "D", .tp_size = 2,
                           .all = {.tokens_per_block = 64, .block_count = 64, .order = "BLPHN"}),
                    NULL);
    assert_int_equal(v.wanted.groups[1].end, TOKENS / 4);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    ready(&v, 0, 30, 1);
    world_run_for(&v.w, 20 * MS);
    ready(&v, 0, 30, 3);
    ready(&v, 30, 31, 3); /* completes no entry */
    world_run_for(&v.w, 20 * MS);
    ready(&v, 31, 67, 2);
    ready(&v, 31, 67, 3);
    world_run_for(&v.w, 20 * MS);
    ready(&v, 67, TOKENS, 3);
    push_scene_finish(&v);
}

static void an_entry_is_not_written_before_its_last_token(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, entries_of(4), ONE("P"), ONE("D"), NULL);
    world_fill(&v.w, &v.w.d, &v.wanted, 9); /* what was there before */
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    ready(&v, 0, 43, 1);
    world_run_for(&v.w, 50 * MS);
    assert_int_equal(world_wrong_cells(&v.w, &v.w.d, &v.wanted, 9), 10); /* 10 entries have come, */
    assert_int_equal(world_wrong_cells(&v.w, &v.w.d, &v.wanted, 2), 15); /* and the others have not */
    ready(&v, 43, TOKENS, 1);
    push_scene_finish(&v);
}

/* 100 tokens are 25 entries of 4. Whoever counts tokens everywhere is told at once. */
static void more_entries_than_tokens_are_refused(void **state) {
    (void)state;
    push_scene v;
    uint64_t ticket;
    push_scene_open(&v, compressed(), ENGINE(.name = "P", .all = {.tokens_per_block = 32, .block_count = 64}),
                    ENGINE(.name = "D", .all = {.tokens_per_block = 32, .block_count = 64}), NULL);
    v.given.groups[1].end = TOKENS;
    assert_fails(
        kvf_agent_push(v.w.p.agents[0], &v.given.request, &ticket), KVF_E_RANGE,
        "end is 100, in entries of 4 tokens, but the longest group ends at token 100; allowed: up to 25");
    v.given.groups[1].end = TOKENS / 4;
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    ready(&v, 0, TOKENS, 3);
    push_scene_finish(&v);
}

/* A block has 4 entries of 4 tokens: a chunk brings the blocks of the entries that it completes. */
static void chunks_bring_the_blocks_of_their_entries(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, entries_of(4), ONE("P"), ONE("D"), NULL);
    const kvf_block_table whole = v.given.groups[0].table;
    const kvf_block_table few = {whole.ids, 2, 0}, first = {whole.ids, 3, 0}, rest = {whole.ids + 3, 4, 3};
    kvf_push_chunk chunk = *CHUNK(0, 43, 1);
    v.given.groups[0].table = (kvf_block_table){0};
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    chunk.table_count = 1;
    chunk.tables = &few;
    assert_fails(kvf_agent_push_ready(v.w.p.agents[0], v.pushes[0], &chunk), KVF_E_RANGE, "[0, 10)",
                 "[0, 3)");
    chunk.tables = &first;
    assert_ok(kvf_agent_push_ready(v.w.p.agents[0], v.pushes[0], &chunk));
    assert_fails(kvf_agent_push_ready(v.w.p.agents[0], v.pushes[0], CHUNK(43, TOKENS, 1)), KVF_E_RANGE,
                 "[10, 25)", "[2, 7)");
    chunk = *CHUNK(43, TOKENS, 1);
    chunk.tables = &rest;
    chunk.table_count = 1;
    assert_ok(kvf_agent_push_ready(v.w.p.agents[0], v.pushes[0], &chunk));
    push_scene_finish(&v);
}

/* Of 103 tokens the last three complete no entry, so the push is 100 tokens long. */
static void a_chunk_that_completes_no_entry_is_taken_also_at_the_end(void **state) {
    (void)state;
    static const kvf_record record = {.name = "next token", .begin = 103, .end = 104};
    push_scene v;
    push_scene_open(&v, entries_of(4), ONE("P"), ONE("D"), NULL);
    kvf_push_chunk last = *CHUNK(101, 103, 1);
    world_push(&v.w.p, &v.given, v.pushes);
    ready(&v, 0, 43, 1);
    assert_fails(kvf_agent_push_ready(v.w.p.agents[0], v.pushes[0], &last), KVF_E_RANGE, "[101, 100)",
                 "43 tokens are ready");
    ready(&v, 43, 101, 1);
    last.records = &record;
    last.record_count = 1;
    assert_fails(kvf_agent_push_ready(v.w.p.agents[0], v.pushes[0], &last), KVF_E_RANGE, "[101, 100)",
                 "100 tokens are ready");
    ready(&v, 101, 103, 1);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    push_scene_finish(&v);
}

/* A request of states alone is one token long. */
static void states_alone_are_one_chunk(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(
        &v, hybrid(4),
        ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 32}, .state = {.order = "L|BTNPH"}),
        ENGINE(.name = "D", .all = {.block_count = 64}, .state = {.order = "L|BTNPH"}), NULL);
    v.given.groups[0] = v.wanted.groups[0] = (kvf_group_steps){.end = 0};
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    ready(&v, 0, 1, 4);
    push_scene_finish(&v);
}

static void latents_are_written_by_one_replica(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, latent(LAYERS), ENGINE(.name = "P", .tp_size = 4, .all = {.block_count = 64}),
                    ENGINE(.name = "D", .tp_size = 2, .all = {.block_count = 64}), NULL);
    world_push(&v.w.p, &v.given, v.pushes);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_ready(&v.w.p, v.pushes);
    uint64_t written = 0;
    world_all_done(&v.w, &v.w.d, v.expects);
    for (uint32_t r = 0; r < 4; r++)
        written += world_stats(v.w.p.agents[r]).bytes_written;
    assert_int_equal(written, 2u * TOKENS * LAYERS * 8);
    world_all_done(&v.w, &v.w.p, v.pushes);
    assert_int_equal(world_wrong_cells(&v.w, &v.w.d, &v.wanted, 2), 0);
    world_quiet(&v.w);
    world_close(&v.w);
}

/* A range without steps may lie anywhere, even behind all that the producer has. */
static void of_a_group_that_is_not_wanted_the_producer_need_not_have_anything(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, hybrid(4), ENGINE(.name = "P", .all = {.block_count = 64}), ONE("D"), NULL);
    v.given.groups[1] = v.wanted.groups[1] = (kvf_group_steps){.begin = 0};
    v.wanted.groups[1].begin = v.wanted.groups[1].end = TOKENS + 1;
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    world_ready(&v.w.p, v.pushes);
    push_scene_finish(&v);
}

/* Of 6 layers, keys and values, 8 heads of 8 elements of 2 bytes and 100 tokens, each rank of two has half. */
static void both_sides_tell_how_many_bytes_were_written(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, ONE("D"), NULL);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    world_ready(&v.w.p, v.pushes);
    assert_int_equal(world_done(&v.w, v.w.d.agents[0], v.expects[0])->bytes, 153600);
    for (uint32_t r = 0; r < 2; r++) {
        const world_outcome *done = world_done(&v.w, v.w.p.agents[r], v.pushes[r]);
        assert_int_equal(done->bytes, 76800);
        assert_in_range(done->runs, 1, 76800);
        assert_true(done->runs > 0);
        assert_int_equal(done->runs, world_stats(v.w.p.agents[r]).runs);
    }
    world_quiet(&v.w);
    world_close(&v.w);
}

/* ---- which blocks go -------------------------------------------------------------------------- */

static void a_consumer_that_has_everything_frees_the_producer(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP4, ONE("E"), NULL);
    world_request_empty(&v.wanted);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes); /* nothing of it ever becomes ready */
    world_all_done(&v.w, &v.w.d, v.expects);
    world_all_done(&v.w, &v.w.p, v.pushes);
    assert_int_equal(world_stats(v.w.p.agents[0]).bytes_written, 0);
    world_quiet(&v.w);
    world_close(&v.w);
}

static void a_consumer_that_has_a_part_gets_the_rest(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, NULL);
    world_fill(&v.w, &v.w.d, &v.wanted, 3);
    v.wanted.groups[0].begin = 37;
    world_push(&v.w.p, &v.given, v.pushes);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    ready(&v, 0, 20, LAYERS);
    ready(&v, 20, 50, LAYERS);
    ready(&v, 50, TOKENS, LAYERS);
    world_all_done(&v.w, &v.w.d, v.expects);
    assert_int_equal(world_wrong_cells(&v.w, &v.w.d, &v.wanted, 2), 0);
    v.wanted.groups[0].begin = 0;
    v.wanted.groups[0].end = 37;
    assert_int_equal(world_wrong_cells(&v.w, &v.w.d, &v.wanted, 3), 0);
    world_all_done(&v.w, &v.w.p, v.pushes);
    world_quiet(&v.w);
    world_close(&v.w);
}

static void two_engines_get_one_push(void **state) {
    (void)state;
    push_scene v;
    world_request other;
    uint64_t others[WORLD_MAX_RANKS];
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, NULL);
    world_add(&v.w, ONE("E"), NULL);
    world_request_make(&v.w, &v.w.e, "push", TOKENS, 0, 1, &other);
    v.given.request.consumers = 2;

    world_push(&v.w.p, &v.given, v.pushes);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_ready(&v.w.p, v.pushes);
    world_all_done(&v.w, &v.w.d, v.expects);
    world_run_for(&v.w, 50 * MS);
    assert_int_equal(world_count(&v.w, v.w.p.agents[0], KVF_EVENT_DONE), 0);
    world_expect(&v.w.e, &other, &v.w.p, others);
    world_all_done(&v.w, &v.w.e, others);
    assert_int_equal(world_wrong_cells(&v.w, &v.w.e, &other, 2), 0);
    world_all_done(&v.w, &v.w.p, v.pushes);
    assert_int_equal(world_wrong_cells(&v.w, &v.w.d, &v.wanted, 2), 0);
    world_quiet(&v.w);
    world_close(&v.w);
}

/* E gives up what it expects. It then expects it `anew`, or not. */
static void one_of_two_gives_up(bool anew) {
    push_scene v;
    world_request other;
    uint64_t others[WORLD_MAX_RANKS];
    push_scene_open(&v, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), NULL);
    world_add(&v.w, ONE("E"), NULL);
    world_request_make(&v.w, &v.w.e, "push", TOKENS, 0, 1, &other);
    v.given.request.consumers = 2;
    world_push(&v.w.p, &v.given, v.pushes);
    world_expect(&v.w.e, &other, &v.w.p, others);
    world_run_for(&v.w, 50 * MS);
    assert_ok(kvf_agent_cancel(v.w.e.agents[0], others[0]));
    (void)world_failed(&v.w, v.w.e.agents[0], others[0], KVF_E_CANCELLED);
    world_run_for(&v.w, 50 * MS);
    if (anew)
        world_expect(&v.w.e, &other, &v.w.p, others);
    world_run_for(&v.w, 50 * MS);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_ready(&v.w.p, v.pushes);
    world_all_done(&v.w, &v.w.d, v.expects);
    assert_int_equal(world_wrong_cells(&v.w, &v.w.d, &v.wanted, 2), 0);
    if (anew) {
        world_all_done(&v.w, &v.w.e, others);
        assert_int_equal(world_wrong_cells(&v.w, &v.w.e, &other, 2), 0);
        world_all_done(&v.w, &v.w.p, v.pushes);
    } else {
        const world_outcome *failed = world_failed(&v.w, v.w.p.agents[0], v.pushes[0], KVF_E_CANCELLED);
        assert_string_equal(failed->detail, "E rank 0 gave the request up");
    }
    world_quiet(&v.w);
    world_close(&v.w);
}

static void a_push_goes_on_if_one_consumer_gives_up_and_then_names_it(void **state) {
    (void)state;
    one_of_two_gives_up(false);
}

static void a_consumer_that_gave_up_a_push_may_expect_it_anew_until_it_ends(void **state) {
    (void)state;
    one_of_two_gives_up(true);
}

static void more_than_is_pushed_fails_both_and_names_the_steps(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), NULL);
    v.given.groups[0].end = 80;
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    world_ready(&v.w.p, v.pushes);
    const world_outcome *failed = world_failed(&v.w, v.w.d.agents[0], v.expects[0], KVF_E_RANGE);
    assert_non_null(strstr(failed->detail, "[0, 100)"));
    assert_non_null(strstr(failed->detail, "[0, 80)"));
    assert_int_equal(failed->invalid_count[0], 7);
    (void)world_failed(&v.w, v.w.p.agents[0], v.pushes[0], KVF_E_RANGE);
    world_quiet(&v.w);
    world_close(&v.w);
}

/* Each allocation of the call that makes everything ready fails once; some are those of the part that is written. */
static void a_part_for_which_there_is_no_memory_fails_both_sides(void **state) {
    (void)state;
    memory_count memory;
    uint32_t failed = 0;
    count_memory(&memory);
    for (size_t n = 1, calls = 0; calls >= n - 1; n++) {
        push_scene v;
        push_scene_open(&v, attention(2, 2, 4), ONE("P"), ONE("D"), NULL);
        kvf_agent *p = v.w.p.agents[0], *d = v.w.d.agents[0];
        world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
        world_push(&v.w.p, &v.given, v.pushes);
        world_run_for(&v.w, 10 * MS);
        memory.calls = 0;
        memory.fail_at = n;
        const kvf_status status = kvf_agent_push_ready(p, v.pushes[0], NULL);
        calls = memory.calls;
        memory.fail_at = 0;
        if (status) { /* nothing has changed */
            assert_int_equal(status, KVF_E_NOMEM);
            assert_ok(kvf_agent_push_ready(p, v.pushes[0], NULL));
        }
        const world_outcome *written = world_next(&v.w, p, v.pushes[0]),
                            *received = world_next(&v.w, d, v.expects[0]);
        assert_int_equal(written->kind, received->kind);
        assert_int_equal(written->status, received->status);
        assert_true(written->status == KVF_OK || written->status == KVF_E_NOMEM);
        failed += written->status == KVF_E_NOMEM;
        if (!written->status)
            assert_int_equal(world_wrong_cells(&v.w, &v.w.d, &v.wanted, 2), 0);
        world_quiet(&v.w);
        world_close(&v.w);
    }
    assert_true(failed >= 2);
}

static void a_request_that_is_being_pushed_is_pushed_anew_only_when_that_has_ended(void **state) {
    (void)state;
    push_scene v;
    uint64_t other;
    push_scene_open(&v, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), NULL);
    kvf_agent *p = v.w.p.agents[0];
    world_push(&v.w.p, &v.given, v.pushes);
    assert_fails(kvf_agent_push(p, &v.given.request, &other), KVF_E_EXISTS, "is being pushed already");
    assert_ok(kvf_agent_cancel(p, v.pushes[0]));
    (void)world_failed(&v.w, p, v.pushes[0], KVF_E_CANCELLED);
    world_push(&v.w.p, &v.given, v.pushes);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_ready(&v.w.p, v.pushes);
    push_scene_finish(&v);
}

static void a_push_that_nobody_expects_ends_at_its_deadline(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), NULL);
    v.given.request.deadline_ns = 200 * MS;
    world_push(&v.w.p, &v.given, v.pushes);
    world_ready(&v.w.p, v.pushes);
    const world_outcome *failed = world_failed(&v.w, v.w.p.agents[0], v.pushes[0], KVF_E_TIMEOUT);
    assert_non_null(strstr(failed->detail, "0 of 1 consumers"));
    assert_true(failed->blocks_free);
    world_quiet(&v.w);
    world_close(&v.w);
}

/* Of several connections, the last one says that it waits. */
static void a_push_that_ends_at_its_deadline_says_what_a_connection_waits_for(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), ONE("P"), TP4, NULL);
    v.given.request.deadline_ns = 200 * MS;
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    ready(&v, 0, 40, LAYERS);
    world_run_for(&v.w, 50 * MS);
    kvf_agent *p = v.w.p.agents[0];
    const kvf_flow *flow = ((const kvf_push *)p->pushes)->flows;
    assert_non_null(flow->next);
    while (flow->next)
        flow = flow->next;
    char *waits = flow->session->peer->waits;
    (void)snprintf(waits, KVF_REASON_BYTES, "nobody listens yet");
    const world_outcome *failed = world_failed(&v.w, p, v.pushes[0], KVF_E_TIMEOUT);
    waits[0] = '\0';
    assert_non_null(strstr(failed->detail, "40 of 100 tokens were ready; nobody listens yet"));
    for (uint32_t r = 0; r < v.w.d.rank_count; r++)
        (void)world_failed(&v.w, v.w.d.agents[r], v.expects[r], KVF_E_TIMEOUT);
    world_quiet(&v.w);
    world_close(&v.w);
}

static void an_expectation_that_nobody_fulfils_ends_at_its_deadline(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, NULL);
    v.wanted.request.deadline_ns = 300 * MS;
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    for (uint32_t r = 0; r < v.w.d.rank_count; r++) {
        const world_outcome *failed = world_failed(&v.w, v.w.d.agents[r], v.expects[r], KVF_E_TIMEOUT);
        assert_non_null(strstr(failed->detail, "0 of 1 producer ranks have written everything"));
        assert_string_equal(failed->engine, "P");
        assert_int_equal(failed->rank, r / 2);
    }
    world_quiet(&v.w); /* the producer tells the consumer that it will not write */
    world_close(&v.w);
}

/* Of two writers none has written, or the first, or the second. */
static void an_expectation_names_the_first_writer_that_is_late(void **state) {
    (void)state;
    static const struct {
        uint32_t first, end, late; /* the ranks that write; the one that is named */
        const char *words;
    } cases[] = {{0, 0, 0, "0 of 2 producer ranks"},
                 {0, 1, 1, "1 of 2 producer ranks"},
                 {1, 2, 0, "1 of 2 producer ranks"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        push_scene v;
        push_scene_open(&v, attention(LAYERS, 8, 8), TP2, ONE("D"), NULL);
        v.wanted.request.deadline_ns = 300 * MS;
        world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
        for (uint32_t r = cases[i].first; r < cases[i].end; r++) {
            assert_ok(kvf_agent_push(v.w.p.agents[r], &v.given.request, &v.pushes[r]));
            assert_ok(kvf_agent_push_ready(v.w.p.agents[r], v.pushes[r], NULL));
        }
        const world_outcome *failed = world_failed(&v.w, v.w.d.agents[0], v.expects[0], KVF_E_TIMEOUT);
        assert_non_null(strstr(failed->detail, cases[i].words));
        assert_string_equal(failed->engine, "P");
        assert_int_equal(failed->rank, cases[i].late);
        world_quiet(&v.w);
        world_close(&v.w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(everything_is_pushed_at_once),
        cmocka_unit_test(a_push_does_not_end_connections),
        cmocka_unit_test(a_push_goes_by_chunks_and_layers),
        cmocka_unit_test(each_range_of_layers_is_written_by_its_own_plan),
        cmocka_unit_test(a_late_expectation_gets_what_was_ready_and_the_rest),
        cmocka_unit_test(cells_computed_after_they_were_expected_are_those_that_arrive),
        cmocka_unit_test(chunks_and_layers_out_of_order_are_refused),
        cmocka_unit_test(states_are_written_with_the_last_chunk),
        cmocka_unit_test(a_state_after_other_tokens_is_not_written),
        cmocka_unit_test(entries_are_written_with_their_last_token),
        cmocka_unit_test(an_entry_is_not_written_before_its_last_token),
        cmocka_unit_test(more_entries_than_tokens_are_refused),
        cmocka_unit_test(chunks_bring_the_blocks_of_their_entries),
        cmocka_unit_test(a_chunk_that_completes_no_entry_is_taken_also_at_the_end),
        cmocka_unit_test(states_alone_are_one_chunk),
        cmocka_unit_test(latents_are_written_by_one_replica),
        cmocka_unit_test(of_a_group_that_is_not_wanted_the_producer_need_not_have_anything),
        cmocka_unit_test(both_sides_tell_how_many_bytes_were_written),
        cmocka_unit_test(a_consumer_that_has_everything_frees_the_producer),
        cmocka_unit_test(a_consumer_that_has_a_part_gets_the_rest),
        cmocka_unit_test(two_engines_get_one_push),
        cmocka_unit_test(a_push_goes_on_if_one_consumer_gives_up_and_then_names_it),
        cmocka_unit_test(a_consumer_that_gave_up_a_push_may_expect_it_anew_until_it_ends),
        cmocka_unit_test(more_than_is_pushed_fails_both_and_names_the_steps),
        cmocka_unit_test_teardown(a_part_for_which_there_is_no_memory_fails_both_sides, stop_counting_memory),
        cmocka_unit_test(a_request_that_is_being_pushed_is_pushed_anew_only_when_that_has_ended),
        cmocka_unit_test(a_push_that_nobody_expects_ends_at_its_deadline),
        cmocka_unit_test(a_push_that_ends_at_its_deadline_says_what_a_connection_waits_for),
        cmocka_unit_test(an_expectation_that_nobody_fulfils_ends_at_its_deadline),
        cmocka_unit_test(an_expectation_names_the_first_writer_that_is_late),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
