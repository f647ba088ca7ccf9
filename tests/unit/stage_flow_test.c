/*
 * Packed requests between ranks with different layouts, over every fabric: the result is compared with a copy made cell
 * by cell, which knows nothing of streams; and what happens if a flow does not come to its end.
 */
#include "stage_scene.h"

#include "transport/front.h"
#include "transport_ways.h"

#define SLOT 4096u

static const kvf_stage_options small_arena = {.arena_bytes = 16 * SLOT, .slot_bytes = SLOT, .window = 4};

/* D: two ranks, blocks of 8, NHD. P: three ranks, so that 6 heads are cut differently; blocks of 48, HND. */
static const kvf_engine_spec d_spec = {.struct_size = sizeof(kvf_engine_spec),
                                       .tp_size = 2,
                                       .all = {.tokens_per_block = 8, .block_count = 100, .order = "L|BPNH"}};
static const kvf_engine_spec p_spec = {.struct_size = sizeof(kvf_engine_spec),
                                       .tp_size = 3,
                                       .all = {.tokens_per_block = 48, .block_count = 40, .order = "L|BPHN"}};

static stage_pair heads(uint64_t tokens) {
    return (stage_pair){attention(3, 6, 32), &d_spec, &p_spec, tokens, small_arena};
}

/* ---- whole requests -------------------------------------------------------------------------- */

static void assert_all_idle(const stage_world *w) {
    stage_world_settle(w);
    for (uint32_t i = 0; i < w->d_count; i++) {
        assert_stage_idle(w->d[i].stage);
        assert_int_equal(w->d[i].events, 0);
    }
    for (uint32_t i = 0; i < w->p_count; i++) {
        assert_stage_idle(w->p[i].stage);
        assert_int_equal(w->p[i].events, 0);
    }
}

static void move_all(stage_world *w) {
    stage_world_pull_all(w, KVF_WAY_PACKED, 5);
    stage_world_refill(w, 6);
    stage_world_push_all(w, KVF_WAY_PACKED, 6);
    stage_world_refill(w, 7);
    stage_world_pull_all(w, KVF_WAY_DIRECT, 7);
    stage_world_refill(w, 8);
    stage_world_push_all(w, KVF_WAY_AUTO, 8);
    assert_all_idle(w);
    stage_world_close(w);
}

static void heads_cut_unlike_arrive(void **state) {
    const stage_pair shape = heads(700); /* 3 layers x 2 parts x 700 tokens x 6 heads x 64 B: 25 arenas */
    move_all(stage_world_open(*state, &shape));
}

static void one_latent_for_all_ranks_arrives(void **state) {
    const stage_pair shape = {latent(4), &d_spec, &p_spec, 700, small_arena};
    move_all(stage_world_open(*state, &shape));
}

static void states_arrive(void **state) {
    static const kvf_engine_spec d = {.struct_size = sizeof d, .tp_size = 2, .all = {.block_count = 40}},
                                 p = {.struct_size = sizeof p, .tp_size = 1, .all = {.block_count = 40}};
    const stage_pair shape = {state_model(3), &d, &p, 1, small_arena};
    move_all(stage_world_open(*state, &shape));
}

static void layers_of_both_kinds_arrive(void **state) {
    static const kvf_engine_spec d = {.struct_size = sizeof d,
                                      .tp_size = 1,
                                      .pp_size = 2,
                                      .all = {.tokens_per_block = 4, .block_count = 200, .order = "LP|BNH"}},
                                 p = {.struct_size = sizeof p,
                                      .tp_size = 2,
                                      .all = {.tokens_per_block = 16, .block_count = 100, .order = "L|BHNP"}};
    const stage_pair shape = {hybrid(4), &d, &p, 333, small_arena};
    move_all(stage_world_open(*state, &shape));
}

static void tokens_shared_by_ranks_arrive(void **state) {
    static const kvf_engine_spec d = {.struct_size = sizeof d,
                                      .tp_size = 4,
                                      .dcp_size = 2,
                                      .dcp_width = 4,
                                      .all = {.tokens_per_block = 8, .block_count = 100, .order = "L|BPNH"}},
                                 p = {.struct_size = sizeof p,
                                      .tp_size = 2,
                                      .all = {.tokens_per_block = 16, .block_count = 100}};
    const stage_pair shape = {attention(2, 2, 16), &d, &p, 333, small_arena};
    move_all(stage_world_open(*state, &shape));
}

/* ---- one flow in detail -------------------------------------------------------------- */

typedef stage_scene scene;

/* One rank each; the request is 600 tokens of 4 layers, in slots of 4 KiB. */
static scene scene_open(const char *kind, kvf_stage_options options) {
    return stage_scene_open(kind, attention(4, 4, 32), 600, options);
}

static kvf_move *begin(const scene *s, kvf_direction direction, uint32_t priority) {
    return stage_scene_begin(s, direction, priority);
}

static uint64_t bytes_of(const kvf_move *move) {
    kvf_move_info info = {.struct_size = sizeof info};
    assert_ok(kvf_move_get_info(move, &info));
    return info.bytes;
}

static bool is_moving(void *move) {
    return bytes_of(move) > 3 * SLOT;
}

static void finish_well(const scene *s, kvf_move *move) {
    assert_ok(stage_world_finish(s->w, move));
    assert_int_equal(bytes_of(move), kvf_request_bytes(s->request, 0));
    kvf_move_free(move);
}

/* The comparison can fail: one byte that changes while it lies in a slot is one wrong byte. */
static void a_byte_that_changes_on_the_way_is_noticed(void **state) {
    scene s = scene_open(*state, small_arena);
    kvf_move *move = begin(&s, KVF_READ, 0);
    bool changed = false;
    while (kvf_move_status(move) == KVF_IN_PROGRESS) {
        assert_ok(kvf_transport_progress(s.d->transport, NULL));
        assert_ok(kvf_stage_progress(s.d->stage, NULL));
        assert_ok(kvf_transport_progress(s.p->transport, NULL));
        assert_ok(kvf_stage_progress(s.p->stage, NULL));
        for (const kvf_stage_flow *flow = s.p->stage->first; flow && !changed; flow = flow->following)
            for (uint32_t i = 0; i < KVF_WINDOW_MAX && !changed; i++)
                if (flow->credits[i].state == KVF_CREDIT_LENT) {
                    flow->credits[i].own->memory[17] ^= 1;
                    changed = true;
                }
    }
    assert_true(changed);
    assert_ok(kvf_move_status(move));
    assert_int_equal(stage_world_wrong_bytes(s.d, &s.before, 5), 1);
    kvf_move_free(move);
    stage_scene_close(&s);
}

static void many_flows_go_at_once_both_ways(void **state) {
    scene s = scene_open(*state, small_arena);
    kvf_move *moves[80]; /* more than a peer may have open: the others wait */
    for (uint32_t i = 0; i < COUNT_OF(moves); i++)
        moves[i] = begin(&s, i % 4 == 3 ? KVF_WRITE : KVF_READ, i % 3);
    for (uint32_t i = 0; i < COUNT_OF(moves); i++)
        finish_well(&s, moves[i]);
    assert_int_equal(stage_world_wrong_bytes(s.d, &s.before, 5), 0);
    assert_all_idle(s.w);
    stage_scene_close(&s);
}

/* Each side is told how many flows the other takes and holds the rest back: no flow is refused. */
static void of_two_numbers_of_flows_the_smaller_counts(void **state) {
    for (int fewer_here = 0; fewer_here < 2; fewer_here++) {
        scene s = scene_open(*state, small_arena);
        kvf_move *moves[12];
        (fewer_here ? s.d : &s.w->p[0])->stage->options.flows = 2;
        for (uint32_t i = 0; i < COUNT_OF(moves); i++)
            moves[i] = begin(&s, i % 2 ? KVF_WRITE : KVF_READ, 0);
        for (uint32_t i = 0; i < COUNT_OF(moves); i++)
            finish_well(&s, moves[i]);
        assert_int_equal(s.d->events + s.w->p[0].events, 0);
        assert_int_equal(stage_info_of(s.d->stage).refused + stage_info_of(s.w->p[0].stage).refused, 0);
        assert_int_equal(stage_world_wrong_bytes(s.d, &s.before, 5), 0);
        assert_all_idle(s.w);
        stage_scene_close(&s);
    }
}

/* A user may look at a finished move later; the moves that wait for their turn go on meanwhile. */
static void moves_that_are_over_hold_nobody_up(void **state) {
    scene s = scene_open(*state, small_arena);
    kvf_move *moves[80];
    for (uint32_t i = 0; i < COUNT_OF(moves); i++)
        moves[i] = begin(&s, KVF_READ, 0);
    for (uint32_t i = 0; i < COUNT_OF(moves); i++)
        assert_ok(stage_world_finish(s.w, moves[i]));
    for (uint32_t i = 0; i < COUNT_OF(moves); i++)
        kvf_move_free(moves[i]);
    assert_all_idle(s.w);
    stage_scene_close(&s);
}

static void a_higher_priority_goes_first(void **state) {
    scene s = scene_open(*state, small_arena);
    kvf_move *slow = begin(&s, KVF_READ, 0), *fast = begin(&s, KVF_READ, 1);
    assert_ok(stage_world_finish(s.w, fast));
    assert_true(bytes_of(slow) < kvf_request_bytes(s.request, 0) / 2);
    kvf_move_free(fast);
    finish_well(&s, slow);
    assert_int_equal(stage_world_wrong_bytes(s.d, &s.before, 5), 0);
    stage_scene_close(&s);
}

/* How many slots a lender has begun to fill for the flows of a priority. */
static uint64_t slots_begun(const stage_end *lender, uint32_t priority) {
    uint64_t bytes = 0;
    for (const kvf_stage_flow *flow = lender->stage->first; flow; flow = flow->following)
        bytes += flow->priority == priority ? flow->next : 0;
    return bytes / lender->stage->options.slot_bytes;
}

/* Peers choose priorities, and others waited for as long as one went on. The stage copies one slot of 1 MiB in a turn. A
 * worker may be held up for longer than the whole fast move takes, so with workers the turn counts, and not its bytes. */
static void the_highest_priority_leaves_some_turns_to_others(void **state) {
    scene s = stage_scene_open(*state, attention(8, 16, 128), 600, (kvf_stage_options){0});
    kvf_move *slow = begin(&s, KVF_READ, 0), *fast = begin(&s, KVF_READ, 255);
    assert_ok(stage_world_finish(s.w, fast));
    assert_true(bytes_of(slow) > 0 || (getenv("KVF_TEST_WORKERS") && slots_begun(s.p, 0) > 0));
    kvf_move_free(fast);
    finish_well(&s, slow);
    assert_int_equal(stage_world_wrong_bytes(s.d, &s.before, 5), 0);
    stage_scene_close(&s);
}

/* The mover, a reader or a writer, cancels: the other flows go on, and all slots come back. */
static void cancel(const char *kind, kvf_direction direction) {
    scene s = scene_open(kind, small_arena);
    kvf_move *move = begin(&s, direction, 0), *other = begin(&s, KVF_READ, 0);
    stage_world_work_until(s.w, is_moving, move);
    kvf_move_cancel(move);
    assert_fails(stage_world_finish(s.w, move), KVF_E_CANCELLED, "cancelled by its owner");
    kvf_move_free(move);
    finish_well(&s, other);
    assert_int_equal(stage_world_wrong_bytes(s.d, &s.before, 5), 0);
    assert_all_idle(s.w);
    stage_scene_close(&s);
}

static void a_pull_is_cancelled_in_the_middle(void **state) {
    cancel(*state, KVF_READ);
}

static void a_push_is_cancelled_in_the_middle(void **state) {
    cancel(*state, KVF_WRITE);
}

static void a_move_that_is_over_is_not_cancelled(void **state) {
    scene s = scene_open(*state, small_arena);
    kvf_move *move = begin(&s, KVF_READ, 0);
    assert_ok(stage_world_finish(s.w, move));
    kvf_move_cancel(move);
    assert_ok(kvf_move_status(move));
    kvf_move_free(move);
    assert_int_equal(stage_world_wrong_bytes(s.d, &s.before, 5), 0);
    stage_scene_close(&s);
}

static void a_move_that_waits_for_its_turn_can_be_freed(void **state) {
    scene s = scene_open(*state, small_arena);
    kvf_move *move = begin(&s, KVF_READ, 0);
    kvf_move_free(move);
    move = begin(&s, KVF_READ, 0);
    stage_world_work_until(s.w, is_moving, move);
    kvf_move_free(move);
    assert_all_idle(s.w);
    stage_scene_close(&s);
}

static void a_move_may_outlive_its_stage(void **state) {
    for (int way = KVF_WAY_DIRECT; way <= KVF_WAY_PACKED; way++) {
        scene s = scene_open(*state, small_arena);
        const kvf_move_options options = {.struct_size = sizeof options, .way = (kvf_way)way};
        kvf_move *move = NULL;
        assert_ok(kvf_stage_pull(s.d->stage, s.request, s.d->peers, &options, &move));
        for (int i = 0; i < 8; i++)
            (void)stage_world_work(s.w);
        kvf_stage_close(s.d->stage);
        s.d->stage = NULL;
        kvf_status status = stage_world_finish(s.w, move);
        assert_true(status == KVF_OK || (way == KVF_WAY_PACKED && status == KVF_E_CANCELLED));
        kvf_move_free(move);
        stage_scene_close(&s);
    }
}

/* The lender stops the flows: the mover is told why, and after its END all slots are free. */
static void stop(const char *kind, kvf_direction direction) {
    scene s = scene_open(kind, small_arena);
    kvf_move *move = begin(&s, direction, 0);
    stage_end *lender = direction == KVF_READ ? s.p : s.d, *mover = direction == KVF_READ ? s.d : s.p;
    stage_world_work_until(s.w, is_moving, move);
    kvf_stage_stop(lender->stage, lender->peers[0]);
    assert_fails(stage_world_finish(s.w, move), KVF_E_CANCELLED, lender->name, "the lender stopped the flow");
    kvf_move_free(move);
    stage_world_settle(s.w);
    assert_stage_idle(lender->stage);
    assert_stage_idle(mover->stage);
    stage_scene_close(&s);
}

static void a_pull_is_stopped_by_its_holder(void **state) {
    stop(*state, KVF_READ);
}

static void a_push_is_stopped_by_its_reader(void **state) {
    stop(*state, KVF_WRITE);
}

static void a_peer_that_may_not_begin_a_flow_is_told_so(void **state) {
    scene s = scene_open(*state, small_arena);
    s.p->refuses = true;
    kvf_move *move = begin(&s, KVF_READ, 0);
    assert_fails(stage_world_finish(s.w, move), KVF_E_PERMISSION, "p0: ", "the mover may not read");
    kvf_move_free(move);
    stage_world_settle(s.w);
    assert_int_equal(s.p->events, 1);
    assert_stage_idle(s.p->stage);
    stage_scene_close(&s);
}

/* As another engine's would be: its group has the same cells, and another name. */
static kvf_model *other_attention(void) {
    const kvf_part_desc parts[] = {PART(.name = "k", .units = 4, .cell_elements = 32),
                                   PART(.name = "v", .units = 4, .cell_elements = 32)};
    return one_group(4, (kvf_group_desc){.name = "other", .parts = parts, .part_count = 2});
}

/* The two sides of a flow count the same groups; runs count bytes. */
static void a_request_of_other_groups_than_the_stages_goes_direct_only(void **state) {
    scene s = scene_open(*state, small_arena);
    const asked_request other = asked_between(other_attention(), &scene_d, &scene_p, 0);
    set_sequences(other.request, &s.w->d_sequence, &s.w->p_sequence);
    kvf_move_options options = {.struct_size = sizeof options, .way = KVF_WAY_PACKED};
    kvf_move *move = NULL;
    assert_fails(kvf_stage_pull(s.d->stage, other.request, s.d->peers, &options, &move), KVF_E_UNSUPPORTED,
                 "source 0: packed flows need the same groups, layers and parts on both sides");
    options.way = KVF_WAY_AUTO;
    assert_ok(kvf_stage_pull(s.d->stage, other.request, s.d->peers, &options, &move));
    assert_ok(stage_world_finish(s.w, move));
    kvf_move_info info = {.struct_size = sizeof info};
    assert_ok(kvf_move_get_info(move, &info));
    assert_int_equal(info.packed, 0);
    kvf_move_free(move);
    assert_int_equal(stage_world_wrong_bytes(s.d, &s.before, 5), 0);
    free_asked(&other);
    stage_scene_close(&s);
}

/* ---- ends that are lost ---------------------------------------------------------------------- */

static void the_mover_ends_in_the_middle(void **state) {
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        scene s = scene_open(*state, small_arena);
        kvf_move *move = begin(&s, (kvf_direction)direction, 0);
        stage_end *lender = direction == KVF_READ ? s.p : s.d, *mover = direction == KVF_READ ? s.d : s.p;
        stage_world_work_until(s.w, is_moving, move);
        kvf_peer *gone = lender->peers[0];
        kvf_move_free(move);
        kvf_stage_leave(lender->stage, gone); /* as if the lender had noticed the loss */
        kvf_stage_info info = stage_info_of(lender->stage);
        /* The lender keeps the slots that the mover may still touch, and no others. */
        assert_int_equal(info.slots_lent, 0);
        assert_int_equal(info.slots_free, info.slots - info.slots_doubt);
        assert_true(info.slots_doubt <= small_arena.window);
        stage_end_close(mover);
        if (direction == KVF_READ) {
            kvf_stage_quiet(lender->stage, mover->name);
        } else {
            const bool is_shut_out = kvf_fabric_named(*state)->kind.fences;
            s.w->now_ns += UINT64_C(31000000000);
            stage_world_settle(s.w);
            assert_int_equal(stage_info_of(lender->stage).slots_doubt, is_shut_out ? 0 : info.slots_doubt);
            s.w->now_ns += UINT64_C(60000000000); /* what it has sent may be so late */
        }
        stage_world_settle(s.w);
        assert_stage_idle(lender->stage);
        stage_scene_close(&s);
    }
}

static bool has_lost(void *context) {
    return !((const stage_end *)context)->peers[0];
}

static void the_lender_ends_in_the_middle(void **state) {
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        scene s = scene_open(*state, small_arena);
        kvf_move *move = begin(&s, (kvf_direction)direction, 0);
        stage_end *lender = direction == KVF_READ ? s.p : s.d, *mover = direction == KVF_READ ? s.d : s.p;
        stage_world_work_until(s.w, is_moving, move);
        stage_end_close(lender);
        stage_world_work_until(s.w, has_lost, mover);
        assert_fails(stage_world_finish(s.w, move), KVF_E_PEER_LOST, "");
        kvf_move_free(move);
        stage_world_settle(s.w);
        assert_stage_idle(mover->stage);
        stage_scene_close(&s);
    }
}

/* A mover that falls silent keeps its slots, but its flow is ended in time. */
static void a_mover_that_falls_silent_is_ended(void **state) {
    scene s = scene_open(*state, small_arena);
    kvf_move *move = begin(&s, KVF_READ, 0);
    stage_world_work_until(s.w, is_moving, move);
    s.d->stands_still = true;
    stage_world_work_idle(s.w);
    assert_int_equal(s.p->events, 0);
    while (s.p->events == 0) { /* what the mover sent before may still arrive */
        s.w->now_ns += UINT64_C(31000000000);
        stage_world_work_idle(s.w);
    }
    assert_int_equal(s.p->events, 1);
    assert_int_equal(s.p->event, KVF_E_TIMEOUT);
    kvf_stage_info info = stage_info_of(s.p->stage);
    assert_int_equal(info.slots_lent, 0);
    assert_true(info.slots_doubt > 0 && info.slots_doubt <= small_arena.window);
    /* the mover goes on, is told that the flow is over, and gives the slots back */
    s.d->stands_still = false;
    assert_fails(stage_world_finish(s.w, move), KVF_E_TIMEOUT, "p0: ", "000 ms");
    kvf_move_free(move);
    stage_world_settle(s.w);
    assert_stage_idle(s.p->stage);
    stage_scene_close(&s);
}

static void a_region_that_is_taken_back_ends_what_needs_it(void **state) {
    scene s = scene_open(*state, small_arena);
    kvf_move *move = begin(&s, KVF_READ, 0);
    stage_world_work_until(s.w, is_moving, move);
    kvf_status status;
    while ((status = kvf_transport_unregister_region(s.d->transport, 1)) == KVF_E_AGAIN)
        (void)stage_world_work(s.w);
    assert_ok(status);
    stage_world_work_idle(s.w);
    /* If the holder lost its connection to the reader first, the reader hears no more from it. */
    while (kvf_move_status(move) == KVF_IN_PROGRESS) {
        s.w->now_ns += UINT64_C(31000000000);
        stage_world_work_idle(s.w);
    }
    if (kvf_move_status(move) == KVF_E_TIMEOUT)
        assert_fails(kvf_move_status(move), KVF_E_TIMEOUT, "p0: nothing was heard from the peer for ",
                     "000 ms");
    else
        assert_fails(kvf_move_status(move), KVF_E_NOT_REGISTERED, "region 1 has 0 bytes");
    kvf_move_free(move);
    stage_scene_close(&s);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static uint64_t live;

static void *count_allocate(void *context, size_t bytes) {
    (void)context;
    live++;
    return malloc(bytes);
}

static void *count_resize(void *context, void *memory, size_t bytes) {
    (void)context;
    live += memory == NULL;
    return realloc(memory, bytes);
}

static void count_release(void *context, void *memory) {
    (void)context;
    live -= memory != NULL;
    free(memory);
}

static void a_thousand_requests_leave_nothing_behind(void **state) {
    scene s = scene_open(*state, small_arena);
    uint64_t after_ten = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        kvf_group_request group = {s.w->d_sequence.tables[0], s.w->p_sequence.tables[0], 0, 1 + i % 40};
        assert_ok(kvf_request_set(s.request, &group, 1));
        kvf_move *move = begin(&s, i % 2 ? KVF_WRITE : KVF_READ, 0);
        assert_ok(stage_world_finish(s.w, move));
        kvf_move_free(move);
        if (i == 99 || i == 999) {
            stage_world_settle(s.w);
            after_ten = i == 99 ? live : after_ten;
            assert_int_equal(live, after_ten);
        }
    }
    assert_all_idle(s.w);
    stage_scene_close(&s);
}

int main(void) {
    const kvf_allocator counting = {count_allocate, count_resize, count_release, NULL};
    if (kvf_set_allocator(&counting) != KVF_OK)
        return 1;
    const way_test tests[] = {
        NAMED(heads_cut_unlike_arrive),
        NAMED(one_latent_for_all_ranks_arrives),
        NAMED(states_arrive),
        NAMED(layers_of_both_kinds_arrive),
        NAMED(tokens_shared_by_ranks_arrive),
        NAMED(a_byte_that_changes_on_the_way_is_noticed),
        NAMED(many_flows_go_at_once_both_ways),
        NAMED(of_two_numbers_of_flows_the_smaller_counts),
        NAMED(moves_that_are_over_hold_nobody_up),
        NAMED(a_higher_priority_goes_first),
        NAMED(the_highest_priority_leaves_some_turns_to_others),
        NAMED(a_pull_is_cancelled_in_the_middle),
        NAMED(a_push_is_cancelled_in_the_middle),
        NAMED(a_move_that_is_over_is_not_cancelled),
        NAMED(a_move_that_waits_for_its_turn_can_be_freed),
        NAMED(a_move_may_outlive_its_stage),
        NAMED(a_pull_is_stopped_by_its_holder),
        NAMED(a_push_is_stopped_by_its_reader),
        NAMED(a_peer_that_may_not_begin_a_flow_is_told_so),
        NAMED(a_request_of_other_groups_than_the_stages_goes_direct_only),
        NAMED(the_mover_ends_in_the_middle),
        NAMED(the_lender_ends_in_the_middle),
        NAMED(a_mover_that_falls_silent_is_ended),
        NAMED(a_region_that_is_taken_back_ends_what_needs_it),
        NAMED(a_thousand_requests_leave_nothing_behind),
    };
    static test_way ways[MAX_WAYS];
    return run_every_way("stage_flow", tests, COUNT_OF(tests), ways, ways_of_kinds(ways), NULL, 0);
}
