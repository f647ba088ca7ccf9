/*
 * Engines whose models differ: groups that both have are moved, and only requests that name a missing group are
 * refused. All bytes are compared by coordinates, and checksums by names.
 */
#include <stdio.h>

#include "agent/terms.h"
#include "agent_letters.h"
#include "agent_world.h"
#include "channel_wise.h"

#define ONE(engine_name)                                                                                     \
    ENGINE(.name = (engine_name), .all = {.block_count = 64}, .state = {.block_count = 64})
#define TWO(engine_name)                                                                                     \
    ENGINE(.name = (engine_name), .tp_size = 2, .all = {.block_count = 64}, .state = {.block_count = 64})
#define OPTIONS(...) (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), __VA_ARGS__})

/* Both models have "full" and "ssm". One also has the group "draft", and the parts of "full" in the other order. */
static kvf_model *plain(void) {
    return hybrid(2);
}

static kvf_model *with_draft(kvf_dtype full_dtype) {
    static const uint32_t even[] = {0, 2}, odd[] = {1, 3}, last[] = {4};
    kvf_part_desc vk[] = {{.name = "v", .dtype = full_dtype, .units = 2, .cell_elements = 4},
                          {.name = "k", .dtype = full_dtype, .units = 2, .cell_elements = 4}};
    kvf_part_desc draft = PART(.name = "k", .units = 2, .cell_elements = 8);
    kvf_part_desc state[4];
    fill_state_parts(state);
    kvf_group_desc groups[] = {
        {.name = "draft", .layers = last, .layer_count = 1, .parts = &draft, .part_count = 1},
        {.name = "full", .layers = even, .layer_count = 2, .parts = vk, .part_count = 2},
        {.name = "ssm",
         .kind = KVF_GROUP_STATE,
         .layers = odd,
         .layer_count = 2,
         .parts = state,
         .part_count = 4}};
    return model_of(5, groups, 3);
}

/* The numbers of groups in the two models. */
enum { PLAIN_FULL = 0, DRAFT = 0, DRAFT_FULL = 1 };

/* Opens the two engines with different models. */
static void open_unlike(world *w, kvf_model *p, const kvf_engine_spec *p_spec, kvf_model *d,
                        const kvf_engine_spec *d_spec, const kvf_agent_options *options) {
    world_open_model(w, p, p_spec, p_spec, options);
    world_close_agents(&w->d);
    kvf_engine_free(w->d.engine);
    w->d.engine = engine_of(d, d_spec);
    kvf_model_free(d);
    world_open_agents(&w->d, options);
}

static void leave_out(world_request *request, uint32_t group) {
    request->groups[group] = (kvf_group_steps){0};
}

/* Moves a request; `skip` (or UINT32_MAX) is a group of D that the request does not name. */
static void moves_well(world *w, const char *id, uint32_t skip, bool push, uint32_t seed) {
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    world_request_make(w, &w->p, id, 40, 10, 1, &held);
    world_request_make(w, &w->d, id, 40, 20, 1, &wanted);
    if (skip != UINT32_MAX)
        leave_out(&wanted, skip);
    world_fill(w, &w->p, &held, seed);
    assert_true(world_wrong_cells(w, &w->d, &wanted, seed) > 0);
    if (push) {
        world_push(&w->p, &held, theirs);
        world_expect(&w->d, &wanted, &w->p, ours);
        world_ready(&w->p, theirs);
    } else {
        world_hold(&w->p, &held, theirs);
        world_pull(&w->d, &wanted, &w->p, ours);
    }
    world_all_done(w, &w->d, ours);
    world_all_done(w, &w->p, theirs);
    assert_int_equal(world_wrong_cells(w, &w->d, &wanted, seed), 0);
}

/* ---- a draft model on one side --------------------------------------------------------------- */

static void a_consumer_with_a_draft_model_gets_what_both_have(void **state) {
    (void)state;
    world w;
    open_unlike(&w, plain(), TWO("P"), with_draft(KVF_DTYPE_BF16), ONE("D"), OPTIONS(.verify = true));
    moves_well(&w, "pulled", DRAFT, false, 3);
    moves_well(&w, "pushed", DRAFT, true, 4);
    world_quiet(&w);
    world_close(&w);
}

/* The last of five stages has only the draft model's layer. */
static void a_rank_that_reads_nothing_meets_the_producer_too(void **state) {
    (void)state;
    world w;
    open_unlike(&w, plain(), ONE("P"), with_draft(KVF_DTYPE_BF16),
                ENGINE(.name = "D", .pp_size = 5, .all = {.block_count = 64}, .state = {.block_count = 64}),
                NULL);
    uint64_t ticket;
    assert_ok(kvf_agent_connect(w.d.agents[4], &w.p.contact, 0, &ticket));
    (void)world_done(&w, w.d.agents[4], ticket);
    moves_well(&w, "pulled", DRAFT, false, 3);
    world_quiet(&w);
    world_close(&w);
}

/* The other ranks are refused, as the groups of P have other numbers. */
static void a_rank_that_reads_nothing_may_be_asked_to_read_packed(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    open_unlike(&w, plain(), ONE("P"), with_draft(KVF_DTYPE_BF16),
                ENGINE(.name = "D", .pp_size = 5, .all = {.block_count = 64}, .state = {.block_count = 64}),
                NULL);
    world_request_make(&w, &w.p, "a", 40, 10, 1, &held);
    world_request_make(&w, &w.d, "a", 40, 20, 1, &wanted);
    leave_out(&wanted, DRAFT);
    wanted.request.way = KVF_WAY_PACKED;
    world_hold(&w.p, &held, theirs);
    world_pull(&w.d, &wanted, &w.p, ours);
    for (uint32_t r = 0; r < 4; r++)
        (void)world_failed(&w, w.d.agents[r], ours[r], KVF_E_UNSUPPORTED);
    (void)world_done(&w, w.d.agents[4], ours[4]);
    assert_ok(kvf_agent_cancel(w.p.agents[0], theirs[0]));
    (void)world_failed(&w, w.p.agents[0], theirs[0], KVF_E_CANCELLED);
    world_quiet(&w);
    world_close(&w);
}

static void a_wrong_cell_is_named_by_the_consumers_numbers(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    open_unlike(&w, plain(), ONE("P"), with_draft(KVF_DTYPE_BF16), ONE("D"), OPTIONS(.verify = true));
    world_request_make(&w, &w.p, "a", 40, 10, 1, &held);
    world_request_make(&w, &w.d, "a", 40, 20, 1, &wanted);
    leave_out(&wanted, DRAFT);
    world_fill(&w, &w.p, &held, 3);
    letters_begin();
    letters_rule(LETTERS_KEEP, NULL, KVF_MESSAGE_CALL, KVF_CALL_CHECKSUM);
    world_hold(&w.p, &held, theirs);
    world_pull(&w.d, &wanted, &w.p, ours);
    world_until(&w, letters_met() >= 1); /* the bytes have arrived */
    letters_no_rules();
    world_flip(&w.p, &held, (world_cell){.group = PLAIN_FULL, .layer = 1, .part = 1, .step = 33, .unit = 1});
    letters_deliver();
    const world_outcome *failed = world_failed(&w, w.d.agents[0], ours[0], KVF_E_MISMATCH);
    if (!strstr(failed->detail, "group full, layer 2, part v, token 33, unit 1 "))
        fail_msg("%s", failed->detail);
    assert_ok(kvf_agent_cancel(w.p.agents[0], theirs[0]));
    (void)world_next(&w, w.p.agents[0], theirs[0]);
    letters_end();
    world_quiet(&w);
    world_close(&w);
}

static void a_producer_with_a_draft_model_gives_what_both_have(void **state) {
    (void)state;
    world w;
    open_unlike(&w, with_draft(KVF_DTYPE_BF16), ONE("P"), plain(), TWO("D"), OPTIONS(.verify = true));
    moves_well(&w, "pulled", UINT32_MAX, false, 3);
    moves_well(&w, "pushed", UINT32_MAX, true, 4);
    world_quiet(&w);
    world_close(&w);
}

/* Like plain(), with these layers in the group "full". */
static kvf_model *with_layers(const uint32_t *full, uint32_t count) {
    static const uint32_t odd[] = {1, 3};
    kvf_part_desc kv[] = {PART(.name = "k", .units = 2, .cell_elements = 4),
                          PART(.name = "v", .units = 2, .cell_elements = 4)};
    kvf_part_desc state[4];
    fill_state_parts(state);
    kvf_group_desc groups[] = {
        {.name = "full", .layers = full, .layer_count = count, .parts = kv, .part_count = 2},
        {.name = "ssm",
         .kind = KVF_GROUP_STATE,
         .layers = odd,
         .layer_count = 2,
         .parts = state,
         .part_count = 4}};
    return model_of(5, groups, 2);
}

/* With the draft model's layer in the same group as the others, as in engines that do not separate it. */
static kvf_model *with_draft_inside(void) {
    return with_layers((const uint32_t[]){0, 2, 4}, 3);
}

static void a_producer_with_a_draft_layer_in_the_same_group_gives_what_both_have(void **state) {
    (void)state;
    world w;
    open_unlike(&w, with_draft_inside(), ONE("P"), plain(), TWO("D"), OPTIONS(.verify = true));
    moves_well(&w, "pulled", UINT32_MAX, false, 3);
    moves_well(&w, "pushed", UINT32_MAX, true, 4);
    world_quiet(&w);
    world_close(&w);
}

/* A group is filled as a whole: the consumer would think that the draft's layer is filled, too. */
static void a_consumer_with_a_draft_layer_in_the_same_group_is_told_which_layer_is_missing(void **state) {
    (void)state;
    world w;
    open_unlike(&w, plain(), ONE("P"), with_draft_inside(), ONE("D"), NULL);
    world_request wanted;
    uint64_t ours[WORLD_MAX_RANKS];
    for (uint32_t push = 0; push < 2; push++) {
        world_request_make(&w, &w.d, push ? "pushed" : "pulled", 40, 20, 1, &wanted);
        if (push)
            world_expect(&w.d, &wanted, &w.p, ours);
        else
            world_pull(&w.d, &wanted, &w.p, ours);
        const world_outcome *failed = world_failed(&w, w.d.agents[0], ours[0], KVF_E_MISMATCH);
        assert_non_null(strstr(failed->detail, "full.layers 4 are missing remotely"));
        assert_true(failed->blocks_free);
    }
    moves_well(&w, "state", PLAIN_FULL, false, 5);
    world_quiet(&w);
    world_close(&w);
}

static void a_producer_without_the_first_layer_is_refused_by_its_number(void **state) {
    (void)state;
    world w;
    world_request wanted;
    uint64_t ours[WORLD_MAX_RANKS];
    open_unlike(&w, with_layers((const uint32_t[]){2, 4}, 2), ONE("P"), with_draft_inside(), ONE("D"), NULL);
    world_request_make(&w, &w.d, "a", 40, 20, 1, &wanted);
    world_pull(&w.d, &wanted, &w.p, ours);
    const world_outcome *failed = world_failed(&w, w.d.agents[0], ours[0], KVF_E_MISMATCH);
    assert_non_null(strstr(failed->detail, "full.layers 0 are missing remotely"));
    moves_well(&w, "state", PLAIN_FULL, false, 5);
    world_quiet(&w);
    world_close(&w);
}

/* The failed request frees its blocks, and the producer's, so that later requests go well. */
static void a_request_that_names_what_is_missing_is_refused_by_name(void **state) {
    (void)state;
    world w;
    open_unlike(&w, plain(), ONE("P"), with_draft(KVF_DTYPE_BF16), ONE("D"), NULL);
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    for (uint32_t push = 0; push < 2; push++) {
        const char *id = push ? "pushed" : "pulled";
        world_request_make(&w, &w.d, id, 40, 20, 1, &wanted);
        if (push)
            world_expect(&w.d, &wanted, &w.p, ours);
        else
            world_pull(&w.d, &wanted, &w.p, ours);
        const world_outcome *failed = world_failed(&w, w.d.agents[0], ours[0], KVF_E_MISMATCH);
        assert_non_null(strstr(failed->detail, "group draft is missing remotely"));
        assert_true(failed->blocks_free);
    }
    world_request_make(&w, &w.p, "a", 40, 10, 1, &held);
    world_hold(&w.p, &held, theirs);
    assert_ok(kvf_agent_cancel(w.p.agents[0], theirs[0]));
    (void)world_failed(&w, w.p.agents[0], theirs[0], KVF_E_CANCELLED);
    moves_well(&w, "b", DRAFT, false, 5);
    world_quiet(&w);
    world_close(&w);
}

static void an_engine_that_does_not_say_what_it_caches_is_refused(void **state) {
    (void)state;
    static const uint8_t digest[KVF_WIRE_DIGEST_BYTES] = {1};
    static char name[] = "X";
    world w;
    world_open_model(&w, plain(), ONE("P"), ONE("D"), NULL);
    kvf_remote remote = {.agent = w.d.agents[0], .name = name};
    assert_fails(kvf_terms_meet(&remote, digest, "\0x"), KVF_E_MISMATCH,
                 "engine \"X\" caches other cells, but did not say which");
    assert_fails(kvf_terms_meet(&remote, digest, "x"), KVF_E_MISMATCH,
                 "the digest of engine \"X\" does not match its facts");
    world_close(&w);
}

/* ---- other types ----------------------------------------------------------------------------- */

static void a_group_of_another_type_is_refused_by_name_and_the_others_move(void **state) {
    (void)state;
    world w;
    open_unlike(&w, plain(), ONE("P"), with_draft(KVF_DTYPE_F16), ONE("D"), NULL);
    world_request wanted;
    uint64_t ours[WORLD_MAX_RANKS];
    world_request_make(&w, &w.d, "a", 40, 20, 1, &wanted);
    leave_out(&wanted, DRAFT);
    world_pull(&w.d, &wanted, &w.p, ours);
    const world_outcome *failed = world_failed(&w, w.d.agents[0], ours[0], KVF_E_UNSUPPORTED);
    assert_non_null(strstr(failed->detail, "full.v.dtype is \"f16\" locally and \"bf16\" remotely"));
    assert_non_null(strstr(failed->detail, "only where both sides allow the conversion"));

    world_request held;
    uint64_t theirs[WORLD_MAX_RANKS];
    world_request_make(&w, &w.p, "b", 40, 10, 1, &held);
    world_request_make(&w, &w.d, "b", 40, 20, 1, &wanted);
    leave_out(&wanted, DRAFT);
    leave_out(&wanted, DRAFT_FULL);
    world_fill(&w, &w.p, &held, 6);
    world_hold(&w.p, &held, theirs);
    world_pull(&w.d, &wanted, &w.p, ours);
    world_all_done(&w, &w.d, ours);
    world_all_done(&w, &w.p, theirs);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 6), 0);
    world_quiet(&w);
    world_close(&w);
}

/* ---- what is reported ------------------------------------------------------------------------ */

static kvf_group_match found(const world *w, const char *engine, uint32_t i) {
    kvf_group_match match = {.struct_size = sizeof match};
    assert_ok(kvf_agent_match(w->d.agents[0], engine, i, &match));
    return match;
}

static void the_result_of_a_meeting_can_be_read(void **state) {
    (void)state;
    world w;
    open_unlike(&w, plain(), ONE("P"), with_draft(KVF_DTYPE_F16), ONE("D"), NULL);
    kvf_group_match match = {.struct_size = sizeof match};
    kvf_agent *d = w.d.agents[0];
    assert_fails(kvf_agent_match(d, "P", 0, &match), KVF_E_NOT_FOUND, "\"P\" has not been met");
    uint64_t ticket;
    assert_ok(kvf_agent_connect(d, &w.p.contact, 0, &ticket));
    assert_int_equal(world_next(&w, d, ticket)->kind, KVF_EVENT_PEER_READY);

    match = found(&w, "P", DRAFT);
    assert_string_equal(match.name, "draft");
    assert_int_equal(match.agreement, KVF_AGREE_MISSING);
    assert_int_equal(match.theirs, UINT32_MAX);
    assert_int_equal(match.layers_ours, 1);
    assert_string_equal(match.detail, "group draft is missing remotely");
    match = found(&w, "P", DRAFT_FULL);
    assert_int_equal(match.agreement, KVF_AGREE_DIFFER);
    assert_int_equal(match.ours, DRAFT_FULL);
    assert_int_equal(match.theirs, PLAIN_FULL);
    assert_int_equal(match.layers_both, 2);
    match = found(&w, "P", 2);
    assert_string_equal(match.name, "ssm");
    assert_int_equal(match.agreement, KVF_AGREE_SAME);
    assert_string_equal(match.detail, "");
    assert_fails(kvf_agent_match(d, "P", 3, &match), KVF_E_NOT_FOUND, "3 groups");
    assert_fails(kvf_agent_match(d, "P", 0, &(kvf_group_match){0}), KVF_E_INVALID, "struct_size");
    world_close(&w);
}

/* ---- the same facts, different cuts ---------------------------------------------------------- */

/* vLLM 0.32 on CPUs and an engine that keeps heads whole, in both directions. */
static void channel_wise_keys_and_whole_heads_meet_and_move(void **state) {
    (void)state;
    for (uint32_t way = 0; way < 2; way++) {
        world w;
        kvf_model *model = attention(LAYERS, HEADS, CHANNELS);
        world_open_model(&w, model, TWO("P"), ONE("D"), OPTIONS(.verify = true));
        world_engine *cut = way ? &w.p : &w.d;
        world_close_agents(cut);
        kvf_engine_free(cut->engine);
        cut->engine = channel_wise(model, way ? 2 : 1, 8, CHANNELS, way ? "P" : "D");
        world_open_agents(cut, OPTIONS(.verify = true));
        moves_well(&w, "pulled", UINT32_MAX, false, 7);
        moves_well(&w, "pushed", UINT32_MAX, true, 8);
        kvf_group_match match = found(&w, "P", 0);
        assert_int_equal(match.agreement, KVF_AGREE_SAME);
        world_quiet(&w);
        world_close(&w);
    }
}

/* D has a session with P, which comes back at its endpoint as another process whose model has another group. */
static void an_engine_that_was_restarted_with_another_model_is_met_anew(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t met, theirs, ours;
    char endpoint[64];
    open_unlike(&w, plain(), ONE("P"), plain(), ONE("D"), NULL);
    kvf_agent *d = w.d.agents[0];
    assert_ok(kvf_agent_connect(d, &w.p.contact, 0, &met));
    (void)world_done(&w, d, met);
    (void)snprintf(endpoint, sizeof endpoint, "%s", w.p.contact.endpoint);
    world_close_agents(&w.p);
    kvf_engine_free(w.p.engine);
    kvf_model *model = with_draft(KVF_DTYPE_BF16);
    w.p.engine = engine_of(model, ONE("P"));
    kvf_model_free(model);
    world_open_agents(&w.p, OPTIONS(.listen = endpoint));

    world_request_make(&w, &w.p, "b", 40, 20, 1, &held);
    world_request_make(&w, &w.d, "b", 40, 20, 1, &wanted);
    world_hold(&w.p, &held, &theirs);
    world_pull(&w.d, &wanted, &w.p, &ours);
    const world_outcome *failed = world_failed(&w, d, ours, KVF_E_PEER_LOST);
    assert_string_equal(failed->detail, "P rank 0: the peer was restarted");
    assert_int_equal(world_stats(d).peers_replaced, 1);
    moves_well(&w, "c", UINT32_MAX, false, 4);
    world_close(&w);
}

/* attention(LAYERS, HEADS, CHANNELS) and a draft model of one layer. */
static kvf_model *attention_with_draft(void) {
    static const uint32_t full[] = {0, 1, 2}, last[] = {LAYERS};
    const kvf_part_desc kv[] = {PART(.name = "k", .units = HEADS, .cell_elements = CHANNELS),
                                PART(.name = "v", .units = HEADS, .cell_elements = CHANNELS)};
    const kvf_group_desc groups[] = {
        {.name = "draft", .layers = last, .layer_count = 1, .parts = kv, .part_count = 2},
        {.name = "full", .layers = full, .layer_count = LAYERS, .parts = kv, .part_count = 2}};
    return model_of(LAYERS + 1, groups, 2);
}

/* Keys that one side cuts go packed where nobody says how. Packed flows name groups by their numbers, which differ. */
static void keys_that_are_cut_move_directly_to_a_consumer_with_a_draft_model(void **state) {
    (void)state;
    world w;
    kvf_model *model = attention(LAYERS, HEADS, CHANNELS);
    open_unlike(&w, model, ONE("P"), attention_with_draft(), TWO("D"), NULL);
    world_close_agents(&w.p);
    kvf_engine_free(w.p.engine);
    w.p.engine = channel_wise(model, 1, 8, CHANNELS, "P");
    world_open_agents(&w.p, NULL);
    moves_well(&w, "pulled", DRAFT, false, 7);
    moves_well(&w, "pushed", DRAFT, true, 8);
    assert_int_equal(world_stats(w.p.agents[0]).bytes_packed, 0);
    world_quiet(&w);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(an_engine_that_was_restarted_with_another_model_is_met_anew,
                                        world_is_simulated, world_is_real),
        cmocka_unit_test(a_consumer_with_a_draft_model_gets_what_both_have),
        cmocka_unit_test(a_rank_that_reads_nothing_meets_the_producer_too),
        cmocka_unit_test(a_rank_that_reads_nothing_may_be_asked_to_read_packed),
        cmocka_unit_test(a_wrong_cell_is_named_by_the_consumers_numbers),
        cmocka_unit_test(a_producer_with_a_draft_model_gives_what_both_have),
        cmocka_unit_test(a_producer_with_a_draft_layer_in_the_same_group_gives_what_both_have),
        cmocka_unit_test(a_consumer_with_a_draft_layer_in_the_same_group_is_told_which_layer_is_missing),
        cmocka_unit_test(a_producer_without_the_first_layer_is_refused_by_its_number),
        cmocka_unit_test(a_request_that_names_what_is_missing_is_refused_by_name),
        cmocka_unit_test(an_engine_that_does_not_say_what_it_caches_is_refused),
        cmocka_unit_test(a_group_of_another_type_is_refused_by_name_and_the_others_move),
        cmocka_unit_test(the_result_of_a_meeting_can_be_read),
        cmocka_unit_test(channel_wise_keys_and_whole_heads_meet_and_move),
        cmocka_unit_test(keys_that_are_cut_move_directly_to_a_consumer_with_a_draft_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
