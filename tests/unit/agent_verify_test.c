/* Integrity: comparing with the producer's checksums finds the first wrong cell, whatever the shapes of both sides. */
#include <stdio.h>

#include "agent/session.h"
#include "agent_letters.h"
#include "agent_world.h"

#define OPTIONS (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), .verify = true})
#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define TOKENS 50u

typedef struct scene {
    world w;
    world_request given, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
} scene;

static void make_requests(scene *s, uint64_t tokens) {
    world_request_make(&s->w, &s->w.p, "a", tokens, 3, 2, &s->given);
    world_request_make(&s->w, &s->w.d, "a", tokens, 1, 3, &s->wanted);
    world_fill(&s->w, &s->w.p, &s->given, 1);
}

static void set_up_for(scene *s, kvf_model *model, const kvf_engine_spec *p, const kvf_engine_spec *d,
                       uint64_t tokens) {
    world_open_model(&s->w, model, p, d, OPTIONS);
    make_requests(s, tokens);
}

static void set_up(scene *s, kvf_model *model, const kvf_engine_spec *p, const kvf_engine_spec *d) {
    set_up_for(s, model, p, d, TOKENS);
}

static void start(scene *s, bool push) {
    if (push) {
        world_push(&s->w.p, &s->given, s->theirs);
        world_ready(&s->w.p, s->theirs);
        world_expect(&s->w.d, &s->wanted, &s->w.p, s->ours);
    } else {
        world_hold(&s->w.p, &s->given, s->theirs);
        world_pull(&s->w.d, &s->wanted, &s->w.p, s->ours);
    }
}

static void goes_well(kvf_model *model, const kvf_engine_spec *p, const kvf_engine_spec *d) {
    for (int push = 0; push < 2; push++) {
        scene s;
        set_up(&s, kvf_model_retain(model), p, d);
        start(&s, push);
        world_all_done(&s.w, &s.w.d, s.ours);
        world_all_done(&s.w, &s.w.p, s.theirs);
        /* What was written is answered once, when it is verified; ranks that wrote nothing get no answer. */
        for (uint32_t r = 0; r < s.w.d.rank_count; r++)
            assert_int_equal(world_stats(s.w.d.agents[r]).messages_stale, 0);
        for (uint32_t r = 0; r < s.w.p.rank_count; r++)
            assert_int_equal(world_stats(s.w.p.agents[r]).messages_stale, 0);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
        world_quiet(&s.w);
        world_close(&s.w);
    }
    kvf_model_free(model);
}

static void checksums_do_not_depend_on_the_shape(void **state) {
    (void)state;
    goes_well(attention(4, 8, 8), ENGINE(.name = "P", .tp_size = 4, .all = {.block_count = 64}),
              ENGINE(.name = "D", .tp_size = 2,
                     .all = {.tokens_per_block = 8, .block_count = 64, .order = "BLHNP"}));
    goes_well(hybrid(4),
              ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64}, .state = {.order = "L|BTNPH"}),
              ENGINE(.name = "D", .all = {.tokens_per_block = 8, .block_count = 64},
                     .state = {.order = "L|BTNPH"}));
    /* The consumer reads one of two ranks that keep the same. */
    goes_well(latent(3), ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64}),
              ENGINE(.name = "D", .all = {.block_count = 64}));
    goes_well(latent(3), ENGINE(.name = "P", .tp_size = 2, .dcp_size = 2, .all = {.block_count = 64}),
              ENGINE(.name = "D", .all = {.tokens_per_block = 32, .block_count = 64}));
    goes_well(latent(3),
              ENGINE(.name = "P", .tp_size = 2, .dcp_size = 2, .dcp_width = 3, .all = {.block_count = 64}),
              ENGINE(.name = "D", .tp_size = 2, .dcp_size = 2, .dcp_width = 2, .all = {.block_count = 64}));
    goes_well(latent_of(3, (kvf_group_desc){.name = "swa", .window_tokens = 20}),
              ENGINE(.name = "P", .all = {.block_count = 64}),
              ENGINE(.name = "D", .pp_size = 3, .all = {.block_count = 64}));
    goes_well(compressed(),
              ENGINE(.name = "P", .tp_size = 2, .dcp_size = 2, .dcp_width = 32,
                     .all = {.tokens_per_block = 96, .block_count = 64}),
              ENGINE(.name = "D",
                     .all = {.tokens_per_block = 64, .kernel_blocks_per_block = 2, .block_count = 64}));
}

/* Flips one bit of one cell of the producer. */
static void flip(scene *s, uint32_t rank, uint32_t group, uint32_t layer, uint32_t part, uint64_t step,
                 uint32_t row, uint32_t unit) {
    world_flip(&s->w.p, &s->given, (world_cell){rank, group, layer, part, step, row, unit});
}

/* Runs until the bytes have arrived and the first CHECKSUM of each rank is on its way. */
static void stop_before_checking(scene *s, bool push) {
    letters_begin();
    letters_rule(LETTERS_KEEP, NULL, KVF_MESSAGE_CALL, KVF_CALL_CHECKSUM);
    start(s, push);
    world_until(&s->w, letters_met() >= s->w.d.rank_count);
    letters_no_rules();
}

/* The consumer has found that a cell is wrong: what is left ends. */
static void end_after_failure(scene *s, bool push) {
    for (uint32_t r = 0; r < s->w.p.rank_count; r++) {
        if (!push) /* the hold remains for another pull */
            assert_ok(kvf_agent_cancel(s->w.p.agents[r], s->theirs[r]));
        (void)world_failed(&s->w, s->w.p.agents[r], s->theirs[r], KVF_E_CANCELLED);
    }
    letters_end();
    world_quiet(&s->w);
    world_close(&s->w);
}

static void the_first_wrong_cell_is_named(void **state) {
    (void)state;
    static const uint32_t cells[][2] = {{2, 5}, {3, 6}, {1, 7}, {0, 4}}; /* layer and unit */
    for (uint32_t i = 0; i < 2 * COUNT_OF(cells); i++) {
        const uint32_t layer = cells[i / 2][0], unit = cells[i / 2][1];
        const bool push = i % 2;
        scene s;
        char words[64];
        set_up(&s, attention(4, 8, 8), ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64}),
               ENGINE(.name = "D", .all = {.tokens_per_block = 8, .block_count = 64, .order = "BLHNP"}));
        stop_before_checking(&s, push);
        flip(&s, 1, 0, layer, 1, 37, 0, unit);
        flip(&s, 1, 0, 3 - layer, 1, 38, 0, 11 - unit); /* and later cells */
        flip(&s, 1, 0, 3, 1, 41, 0, 7);
        letters_deliver();

        const world_outcome *failed = world_failed(&s.w, s.w.d.agents[0], s.ours[0], KVF_E_MISMATCH);
        (void)snprintf(words, sizeof words, "group full, layer %u, part v, token 37, unit %u ", layer, unit);
        if (!strstr(failed->detail, words) || !strstr(failed->detail, "rank 1"))
            fail_msg("%s", failed->detail);
        assert_true(failed->blocks_free);
        assert_int_equal(failed->invalid_count[0], 7);
        assert_int_equal(world_stats(s.w.d.agents[0]).checksums_wrong, 1);
        end_after_failure(&s, push);
    }
}

/* A question is about 8192 steps. */
static void a_wrong_cell_far_on_is_named(void **state) {
    (void)state;
    for (int push = 0; push < 2; push++) {
        scene s;
        set_up_for(&s, attention(2, 1, 1),
                   ENGINE(.name = "P", .all = {.tokens_per_block = 1024, .block_count = 64}),
                   ENGINE(.name = "D", .all = {.tokens_per_block = 1024, .block_count = 64}), 8200);
        stop_before_checking(&s, push);
        flip(&s, 0, 0, 1, 0, 8195, 0, 0);
        letters_deliver();
        const world_outcome *failed = world_failed(&s.w, s.w.d.agents[0], s.ours[0], KVF_E_MISMATCH);
        if (!strstr(failed->detail, "group full, layer 1, part k, token 8195, unit 0 "))
            fail_msg("%s", failed->detail);
        end_after_failure(&s, push);
    }
}

/* Two tokens in turn are kept by each rank. */
static void a_wrong_cell_is_found_at_the_rank_that_keeps_its_token(void **state) {
    (void)state;
    for (uint32_t rank = 0; rank < 2; rank++) {
        scene s;
        set_up(&s, latent(3),
               ENGINE(.name = "P", .tp_size = 2, .dcp_size = 2, .dcp_width = 2, .all = {.block_count = 64}),
               ENGINE(.name = "D", .all = {.block_count = 64}));
        stop_before_checking(&s, false);
        flip(&s, rank, 0, 1, 0, 5, 0, 0); /* the sixth that the rank keeps */
        letters_deliver();
        const world_outcome *failed = world_failed(&s.w, s.w.d.agents[0], s.ours[0], KVF_E_MISMATCH);
        if (!strstr(failed->detail, rank == 0 ? ", token 9, " : ", token 11, ") ||
            !strstr(failed->detail, rank == 0 ? "of rank 0" : "of rank 1"))
            fail_msg("%s", failed->detail);
        end_after_failure(&s, false);
    }
}

/* Both sides share the tokens, by 32 and by 64: entries of 4 by 8 and by 16. */
static void a_wrong_entry_is_named(void **state) {
    (void)state;
    for (uint32_t rank = 0; rank < 2; rank++) {
        scene s;
        set_up_for(&s, compressed(),
                   ENGINE(.name = "P", .tp_size = 2, .dcp_size = 2, .dcp_width = 32,
                          .all = {.tokens_per_block = 32, .block_count = 64}),
                   ENGINE(.name = "D", .tp_size = 2, .dcp_size = 2, .dcp_width = 64,
                          .all = {.tokens_per_block = 64, .block_count = 64}),
                   160);
        stop_before_checking(&s, false);
        flip(&s, rank, 1, 1, 1, 12, 0, 0); /* the 13th entry that the rank keeps: 4 of its second 8 */
        letters_deliver();
        const uint32_t reader = 1; /* of entries 16 to 31 */
        const world_outcome *failed =
            world_failed(&s.w, s.w.d.agents[reader], s.ours[reader], KVF_E_MISMATCH);
        if (!strstr(failed->detail, rank == 0 ? "part indexer, entry 20, " : "part indexer, entry 28, ") ||
            !strstr(failed->detail, "group csa, layer 2"))
            fail_msg("%s", failed->detail);
        letters_end();
        world_close(&s.w);
    }
}

static void a_wrong_state_is_named(void **state) {
    (void)state;
    for (int push = 0; push < 2; push++) {
        scene s;
        set_up(&s, hybrid(4), ENGINE(.name = "P", .all = {.block_count = 64}, .state = {.order = "L|BTNPH"}),
               ENGINE(.name = "D", .all = {.block_count = 64}, .state = {.order = "L|BTNPH"}));
        stop_before_checking(&s, push);
        flip(&s, 0, 1, 1, 0, 0, 2, 3); /* group ssm, its second layer, conv.x, third row */
        letters_deliver();
        const world_outcome *failed = world_failed(&s.w, s.w.d.agents[0], s.ours[0], KVF_E_MISMATCH);
        if (!strstr(failed->detail, "group ssm, layer 3, part conv.x, state 0, unit 3 "))
            fail_msg("%s", failed->detail);
        assert_int_equal(failed->invalid_count[1], 1);
        end_after_failure(&s, push);
    }
}

static void cells_that_are_not_wanted_are_not_checked(void **state) {
    (void)state;
    scene s;
    set_up(&s, attention(4, 8, 8), ENGINE(.name = "P", .all = {.block_count = 64}),
           ENGINE(.name = "D", .all = {.block_count = 64}));
    s.wanted.groups[0].begin = 30;
    stop_before_checking(&s, false);
    flip(&s, 0, 0, 2, 1, 29, 0, 5);
    letters_deliver();
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    letters_end();
    world_quiet(&s.w);
    world_close(&s.w);
}

static void questions_that_get_lost_are_asked_again(void **state) {
    (void)state;
    scene s;
    set_up(&s, attention(4, 8, 8), ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64}),
           ENGINE(.name = "D", .all = {.block_count = 64}));
    letters_begin();
    letters_rule(LETTERS_LOSE, NULL, KVF_MESSAGE_CALL, KVF_CALL_CHECKSUM);
    start(&s, false);
    world_until(&s.w, letters_met() >= 2);
    letters_end();
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    world_quiet(&s.w);
    world_close(&s.w);
}

/* Heartbeats go on while a producer that has much to do computes checksums, here for two leases. */
static void checksums_may_take_longer_than_a_lease(void **state) {
    (void)state;
    const kvf_agent_options options = {
        .struct_size = sizeof options, .verify = true, .lease_ns = 300 * MS, .peer_timeout_ns = 2 * SECOND};
    for (int push = 0; push < 2; push++) {
        scene s;
        world_open_model(&s.w, attention(4, 8, 8), ONE("P"), ONE("D"), &options);
        make_requests(&s, TOKENS);
        letters_begin();
        letters_rule(LETTERS_KEEP, s.w.p.agents[0], KVF_MESSAGE_ANSWER, KVF_CALL_CHECKSUM);
        start(&s, push);
        world_run_for(&s.w, 600 * MS);
        assert_true(letters_met() > 0);
        letters_no_rules();
        letters_deliver();
        world_all_done(&s.w, &s.w.d, s.ours);
        world_all_done(&s.w, &s.w.p, s.theirs);
        assert_int_equal(world_stats(s.w.p.agents[0]).leases_expired, 0);
        letters_end();
        world_close(&s.w);
    }
}

/* The producer answers with one checksum, where D asks about 50 steps. */
static void an_answer_with_another_number_of_checksums_is_no_answer(void **state) {
    (void)state;
    scene s;
    const uint64_t sum = 0;
    set_up(&s, attention(4, 8, 8), ONE("P"), ONE("D"));
    const kvf_agent *p = s.w.p.agents[0], *d = s.w.d.agents[0];
    letters_begin();
    letters_rule(LETTERS_LOSE, p, KVF_MESSAGE_ANSWER, KVF_CALL_CHECKSUM);
    start(&s, false);
    world_until(&s.w, letters_met() >= 1);
    const kvf_session *asking = d->all_sessions;
    kvf_message answer = {.kind = KVF_MESSAGE_ANSWER,
                          .answer = {.kind = KVF_CALL_CHECKSUM, .detail = "", .sums = &sum, .sum_count = 1}};
    for (const kvf_call *call = asking->calls; call; call = call->hh.next)
        if (call->kind == KVF_CALL_CHECKSUM)
            answer.answer.number = call->number;
    memcpy(answer.answer.session, asking->id, sizeof answer.answer.session);
    letters_end();
    kvf_wire_buffer bytes;
    assert_ok(kvf_wire_encode(&answer, &bytes));
    assert_ok(kvf_link_send(p->link, p->all_sessions->route, bytes.data, bytes.size));
    kvf_wire_buffer_free(&bytes);
    const world_outcome *failed = world_failed(&s.w, s.w.d.agents[0], s.ours[0], KVF_E_PARSE);
    assert_non_null(strstr(failed->detail, "1 checksums came for 50 steps"));
    assert_true(failed->blocks_free);
    end_after_failure(&s, false);
}

/* ---- without memory -------------------------------------------------------------------------- */

#define STEPS 53u /* no other allocation has the size of so many checksums */

static struct {
    uint32_t met, refused; /* allocations of that size: so far, and the one that is refused; 0: none */
} sums_memory;

static void *allocate(void *context, size_t bytes) {
    const bool refused = bytes == STEPS * sizeof(uint64_t) && ++sums_memory.met == sums_memory.refused;
    return refused ? NULL : counted_allocate(context, bytes);
}

/* Of the producer first, then of the consumer. */
static void a_side_without_memory_for_checksums_says_so(void **state) {
    (void)state;
    static const char *const details[] = {"P rank 0: no memory for checksums", "no memory for checksums"};
    memory_count memory = {0};
    const kvf_allocator allocator = {allocate, counted_resize, counted_release, &memory};
    assert_ok(kvf_set_allocator(&allocator));
    for (uint32_t i = 0; i < 2; i++) {
        scene s;
        set_up_for(&s, attention(4, 8, 8), ONE("P"), ONE("D"), STEPS);
        sums_memory.met = 0;
        sums_memory.refused = i + 1;
        start(&s, false);
        const world_outcome *failed = world_failed(&s.w, s.w.d.agents[0], s.ours[0], KVF_E_NOMEM);
        assert_string_equal(failed->detail, details[i]);
        end_after_failure(&s, false);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(checksums_do_not_depend_on_the_shape),
        cmocka_unit_test(the_first_wrong_cell_is_named),
        cmocka_unit_test(a_wrong_cell_far_on_is_named),
        cmocka_unit_test(a_wrong_cell_is_found_at_the_rank_that_keeps_its_token),
        cmocka_unit_test(a_wrong_entry_is_named),
        cmocka_unit_test(a_wrong_state_is_named),
        cmocka_unit_test(cells_that_are_not_wanted_are_not_checked),
        cmocka_unit_test(questions_that_get_lost_are_asked_again),
        cmocka_unit_test(checksums_may_take_longer_than_a_lease),
        cmocka_unit_test(an_answer_with_another_number_of_checksums_is_no_answer),
        cmocka_unit_test_teardown(a_side_without_memory_for_checksums_says_so, stop_counting_memory),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
