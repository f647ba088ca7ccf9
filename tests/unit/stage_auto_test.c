/*
 * The choice between the two ways over a fabric that is like a network: an operation costs microseconds, and the fabric
 * has no lists of runs. The fabric and its times are simulated; the bytes are really moved and compared.
 */
#include "stage/cost.h"
#include "stage/ways.h"
#include "stage_world.h"

#include "faulty_fabric.h"

#define TOKENS 256u

/* What each thing really costs on the simulated network. */
typedef struct network {
    double ns_per_run, ns_per_byte; /* direct */
    double packed_ns_per_byte;
    double ns_per_source;
} network;

static const network usual = {
    .ns_per_run = 2000, .ns_per_byte = 0.1, .packed_ns_per_byte = 0.5, .ns_per_source = 20000};

static const kvf_engine_spec nhd = {.struct_size = sizeof nhd,
                                    .tp_size = 1,
                                    .all = {.tokens_per_block = 16, .block_count = 40, .order = "L|BPNH"}},
                             hnd = {.struct_size = sizeof hnd,
                                    .tp_size = 1,
                                    .all = {.tokens_per_block = 16, .block_count = 40, .order = "L|BPHN"}};

/* One rank each, over the simulated fabric. `d` decides the length of runs: NHD to HND has a run for each head of each
 * token, HND to HND has whole pages. */
typedef struct scene {
    stage_world *w;
    kvf_plan *plan;
    kvf_request *request;
    cell_rank before;
} scene;

static scene scene_open(const kvf_engine_spec *d) {
    const faulty_options no_faults = {.turns = 1};
    const stage_pair shape = {
        attention(2, 4, 32), d, &hnd, TOKENS, {.arena_bytes = 32 * 4096, .slot_bytes = 4096}};
    faulty_install(&no_faults);
    scene s = {.w = stage_world_open("inproc", &shape)};
    s.plan = plan_of(&s.w->engines, 0);
    s.request = request_of(s.plan);
    set_sequences(s.request, &s.w->d_sequence, &s.w->p_sequence);
    rank_copy(&s.before, &s.w->d[0].cells);
    return s;
}

static void scene_close(scene *s) {
    rank_close(&s->before);
    kvf_request_free(s->request);
    kvf_plan_free(s->plan);
    stage_world_close(s->w);
    faulty_remove();
}

/* Tells the stage which costs to expect of the network. */
static void assume(const scene *s, const network *n) {
    kvf_stage_peer *peer = kvf_stage_find_peer(s->w->d[0].stage, s->w->d[0].peers[0]);
    assert_false(peer->has_lists);
    const kvf_assumed_cost assumed = {
        .direct = {.ns_per_run = n->ns_per_run,
                   .ns_per_byte = n->ns_per_byte,
                   .ns_per_source = n->ns_per_source},
        .packed = {{.ns_per_byte = n->packed_ns_per_byte, .ns_per_source = n->ns_per_source}}};
    kvf_peer_cost_begin(&peer->known->by_direction[KVF_READ], &assumed);
}

/* Pulls the request by the way that the stage chooses, and lets as much time pass as the network would take. Returns
 * whether it went packed. */
static bool pull(const scene *s, const network *truth) {
    stage_world *w = s->w;
    kvf_move *move;
    kvf_move_info info = {.struct_size = sizeof info};
    assert_ok(kvf_stage_pull(w->d[0].stage, s->request, w->d[0].peers, NULL, &move));
    assert_ok(kvf_move_get_info(move, &info));
    const double runs = (double)kvf_request_run_count(s->request, 0);
    const double bytes = (double)kvf_request_bytes(s->request, 0);
    const double ns =
        truth->ns_per_source + (info.packed ? bytes * truth->packed_ns_per_byte
                                            : runs * truth->ns_per_run + bytes * truth->ns_per_byte);
    for (int i = 0; i < 3; i++) /* if it goes packed, time counts from the opening of the flow */
        (void)stage_world_work(w);
    w->now_ns += (uint64_t)ns;
    assert_ok(stage_world_finish(w, move));
    kvf_move_free(move);
    assert_int_equal(stage_world_wrong_bytes(&w->d[0], &s->before, 5), 0);
    return info.packed == 1;
}

static void short_runs_go_packed_and_long_ones_direct(void **state) {
    (void)state;
    for (int same = 0; same < 2; same++) {
        scene s = scene_open(same ? &hnd : &nhd);
        assume(&s, &usual);
        /* 2 layers x 2 parts x 256 tokens x 4 heads, some of which are adjacent; or at most 64 pages */
        const uint64_t runs = kvf_request_run_count(s.request, 0);
        assert_true(same ? runs <= 64 : runs > 4000 && runs <= 4096);
        for (int i = 0; i < 5; i++)
            assert_int_equal(pull(&s, &usual), !same);
        scene_close(&s);
    }
}

/* Pulls `count` times and returns how many pulls went packed. */
static uint32_t packed_of(const scene *s, const network *truth, uint32_t count) {
    uint32_t packed = 0;
    for (uint32_t i = 0; i < count; i++)
        packed += pull(s, truth);
    return packed;
}

static void runs_that_are_dearer_than_was_thought_go_packed_in_the_end(void **state) {
    (void)state;
    network thought = usual;
    thought.ns_per_run = 20; /* as in a machine's own memory */
    scene s = scene_open(&nhd);
    assume(&s, &thought);
    assert_false(pull(&s, &usual));
    (void)packed_of(&s, &usual, 20);
    assert_int_equal(packed_of(&s, &usual, 10), 10);
    scene_close(&s);
}

static void packing_that_is_dearer_than_was_thought_is_left_in_the_end(void **state) {
    (void)state;
    network thought = usual, truth = usual;
    thought.packed_ns_per_byte = 0.01;
    truth.packed_ns_per_byte = 500;
    scene s = scene_open(&nhd);
    assume(&s, &thought);
    assert_true(pull(&s, &truth));
    (void)packed_of(&s, &truth, 40);
    assert_int_equal(packed_of(&s, &truth, 10), 0);
    scene_close(&s);
}

/* The other way was taken for good if the host was busy during the first transfer. */
static void a_way_whose_first_transfer_was_slow_is_tried_again(void **state) {
    (void)state;
    network truth = usual;
    truth.ns_per_run = 20; /* direct takes 0.85 of the time that packed takes */
    network busy = truth;
    busy.ns_per_run = 200;
    scene s = scene_open(&nhd);
    assume(&s, &truth);
    assert_false(pull(&s, &busy));
    assert_int_equal(packed_of(&s, &truth, 100), 100);
    (void)packed_of(&s, &truth, 900);
    assert_int_equal(packed_of(&s, &truth, 10), 0);
    scene_close(&s);
}

/* Direct takes 53 times as long, as one transfer shows; trials of it are rare. */
static void a_way_that_is_slow_is_tried_seldom(void **state) {
    (void)state;
    network thought = usual;
    thought.ns_per_run = 20;
    scene s = scene_open(&nhd);
    assume(&s, &thought);
    (void)packed_of(&s, &usual, 10);
    const uint32_t packed = packed_of(&s, &usual, 1000);
    assert_in_range(packed, 999, 1000);
    scene_close(&s);
}

/* Its duration says nothing, and so a trial would follow the other. */
static void a_held_move_makes_nothing_be_forgotten(void **state) {
    (void)state;
    scene s = scene_open(&nhd);
    assume(&s, &usual);
    stage_end *d = &s.w->d[0];
    const kvf_way_cost *direct =
        &kvf_stage_find_peer(d->stage, d->peers[0])->known->by_direction[KVF_READ].direct;
    kvf_move *move;
    assert_ok(kvf_stage_pull_held(d->stage, s.request, d->peers, NULL,
                                  (kvf_transfer_start_options){.held = true}, &move));
    kvf_move_hold(move, false);
    assert_ok(stage_world_finish(s.w, move));
    kvf_move_free(move);
    assert_int_equal(direct->passed, 0);
    assert_true(pull(&s, &usual));
    assert_int_equal(direct->passed, 1);
    scene_close(&s);
}

static uint64_t bytes_of(const kvf_move *move) {
    kvf_move_info info = {.struct_size = sizeof info};
    assert_ok(kvf_move_get_info(move, &info));
    return info.bytes;
}

static void a_held_move_that_goes_direct_moves_as_much_as_it_may_layer_by_layer(void **state) {
    (void)state;
    scene s = scene_open(&hnd);
    assume(&s, &usual);
    stage_end *d = &s.w->d[0];
    const uint64_t layer = kvf_request_bytes(s.request, 0) / 2;
    const struct {
        uint64_t allowed, moved;
        uint32_t layers;
    } steps[] = {
        {0, 0, 0}, {100, 100, 0}, {layer - 101, layer - 1, 0}, {1, layer, 1}, {layer - 1, 2 * layer - 1, 1}};
    kvf_move *move;
    assert_ok(kvf_stage_pull_held(d->stage, s.request, d->peers, NULL,
                                  (kvf_transfer_start_options){.held = true, .by_layer = true}, &move));
    assert_int_equal(stage_info_of(d->stage).moves[KVF_WAY_DIRECT], 1);
    for (size_t i = 0; i < COUNT_OF(steps); i++) {
        assert_int_equal(kvf_move_advance(move, steps[i].allowed), steps[i].allowed);
        stage_world_work_idle(s.w);
        assert_int_equal(bytes_of(move), steps[i].moved);
        assert_int_equal(kvf_move_layers(move), steps[i].layers);
    }
    kvf_move_hold(move, false);
    assert_ok(stage_world_finish(s.w, move));
    assert_int_equal(kvf_move_layers(move), 2);
    kvf_move_free(move);
    assert_int_equal(stage_world_wrong_bytes(d, &s.before, 5), 0);
    scene_close(&s);
}

/* All slots have come, so the flow once seemed to wait for the peer, which has nothing to say. */
static void a_held_move_does_not_stall_while_a_slot_takes_longer_than_a_silent_peer_may(void **state) {
    (void)state;
    scene s = scene_open(&nhd);
    stage_end *d = &s.w->d[0];
    const uint64_t bytes = kvf_request_bytes(s.request, 0);
    kvf_move *move;
    assert_ok(kvf_stage_pull_held(d->stage, s.request, d->peers,
                                  &(kvf_move_options){sizeof(kvf_move_options), KVF_WAY_PACKED, 0, NULL},
                                  (kvf_transfer_start_options){.held = true}, &move));
    for (uint64_t left = bytes - 4096; left > 0; stage_world_work_idle(s.w))
        left -= kvf_move_advance(move, left);
    assert_int_equal(bytes_of(move), bytes - 4096);
    d->stage->options.stall_ns = 1000000000;
    for (int i = 0; i < 10; i++) {
        s.w->now_ns += 900000000;
        assert_int_equal(kvf_move_advance(move, 1), 1);
        stage_world_work_idle(s.w);
        assert_int_equal(kvf_move_status(move), KVF_IN_PROGRESS);
    }
    kvf_move_hold(move, false);
    assert_ok(stage_world_finish(s.w, move));
    kvf_move_free(move);
    assert_int_equal(stage_world_wrong_bytes(d, &s.before, 5), 0);
    scene_close(&s);
}

/* Sets the scene's request with a table of the producer that has so many entries, most of them unused. */
static void lengthen_table(const scene *s, uint32_t count) {
    const kvf_block_table *real = &s->w->p_sequence.tables[0];
    uint32_t *ids = malloc(count * sizeof *ids);
    assert_non_null(ids);
    for (uint32_t i = 0; i < count; i++)
        ids[i] = i < real->count ? real->ids[i] : KVF_NO_BLOCK;
    const kvf_group_request group = {
        s->w->d_sequence.tables[0], {ids, count, real->first_block}, 0, s->w->d_sequence.steps[0]};
    assert_ok(kvf_request_set(s->request, &group, 1));
    free(ids);
}

static void tables_that_no_opening_of_a_flow_holds_go_direct(void **state) {
    (void)state;
    const kvf_move_options packed = {.struct_size = sizeof packed, .way = KVF_WAY_PACKED};
    const uint32_t most = KVF_STAGE_OPENING_MAX / 4;
    scene s = scene_open(&nhd);
    assume(&s, &usual);
    kvf_move *move = NULL;
    assert_true(pull(&s, &usual));
    lengthen_table(&s, most);
    assert_false(pull(&s, &usual));
    assert_fails(kvf_stage_pull(s.w->d[0].stage, s.request, s.w->d[0].peers, &packed, &move), KVF_E_LIMIT,
                 "the opening of a flow would have");
    scene_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(short_runs_go_packed_and_long_ones_direct),
        cmocka_unit_test(runs_that_are_dearer_than_was_thought_go_packed_in_the_end),
        cmocka_unit_test(packing_that_is_dearer_than_was_thought_is_left_in_the_end),
        cmocka_unit_test(a_way_whose_first_transfer_was_slow_is_tried_again),
        cmocka_unit_test(a_way_that_is_slow_is_tried_seldom),
        cmocka_unit_test(a_held_move_makes_nothing_be_forgotten),
        cmocka_unit_test(a_held_move_that_goes_direct_moves_as_much_as_it_may_layer_by_layer),
        cmocka_unit_test(a_held_move_does_not_stall_while_a_slot_takes_longer_than_a_silent_peer_may),
        cmocka_unit_test(tables_that_no_opening_of_a_flow_holds_go_direct),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
