/*
 * Workers of a stage: they wake a sleeping caller, touch nothing once a move is cancelled or a region is gone, and a
 * child of fork() leaves them to its parent. stage_flow_test, which runs with workers too, checks that all bytes
 * arrive.
 */
#include <sys/wait.h>
#include <unistd.h>

#include "stage_scene.h"

#define SLOT 65536u

typedef stage_scene scene;

/* One rank each; the request is 700 tokens of 4 layers, 2 parts and 4 heads of 64 B: 22 slots. */
static scene scene_open(uint32_t workers) {
    return stage_scene_open(
        "inproc", attention(4, 4, 32), 700,
        (kvf_stage_options){.arena_bytes = 32 * SLOT, .slot_bytes = SLOT, .workers = workers});
}

static kvf_move *begin(const scene *s, kvf_direction direction) {
    return stage_scene_begin(s, direction, 0);
}

/* Whether the stage has a slot that a worker is copying. */
static bool is_copying(void *context) {
    const kvf_stage *stage = context;
    for (const kvf_stage_flow *flow = stage->first; flow; flow = flow->following)
        for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++)
            if (flow->credits[i].state == KVF_CREDIT_COPYING)
                return true;
    return false;
}

/* stage_world_finish() sleeps on the transports' descriptors: a worker that woke nobody would let it fail. */
static void every_slot_is_copied_by_workers_of_both_ends(void **state) {
    (void)state;
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        scene s = scene_open(2);
        kvf_move *move = begin(&s, (kvf_direction)direction);
        assert_ok(stage_world_finish(s.w, move));
        kvf_move_free(move);
        assert_int_equal(stage_world_wrong_bytes(s.d, &s.before, 5), 0);
        const uint64_t slots = (kvf_request_bytes(s.request, 0) + SLOT - 1) / SLOT;
        /* The last slot is not full and too small for a worker. */
        assert_int_equal(stage_info_of(s.d->stage).worker_copies, slots - 1);
        assert_int_equal(stage_info_of(s.p->stage).worker_copies, slots - 1);
        stage_scene_close(&s);
    }
}

static void without_workers_progress_copies(void **state) {
    (void)state;
    scene s = scene_open(0);
    kvf_move *move = begin(&s, KVF_READ);
    assert_ok(stage_world_finish(s.w, move));
    kvf_move_free(move);
    assert_int_equal(stage_world_wrong_bytes(s.d, &s.before, 5), 0);
    assert_int_equal(stage_info_of(s.d->stage).worker_copies, 0);
    stage_scene_close(&s);
}

/* The owner may write to the memory at once: ThreadSanitizer reports a worker that still writes. */
static void scribble(const scene *s) {
    for (uint32_t i = 0; i < s->d->cells.region_count; i++)
        memset(s->d->cells.regions[i].address, 0x5a, s->d->cells.regions[i].bytes);
}

static void assert_untouched(const scene *s) {
    for (uint32_t i = 0; i < s->d->cells.region_count; i++) {
        const unsigned char *memory = s->d->cells.regions[i].address;
        assert_int_equal(memory[0], 0x5a);
        /* all bytes equal the first */
        assert_memory_equal(memory, memory + 1, s->d->cells.regions[i].bytes - 1);
    }
}

static void a_move_that_was_cancelled_touches_nothing(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 6; round++) {
        scene s = scene_open(1 + round % 4);
        kvf_move *move = begin(&s, KVF_READ);
        stage_world_work_until(s.w, is_copying, s.d->stage);
        kvf_move_cancel(move);
        scribble(&s);
        assert_fails(stage_world_finish(s.w, move), KVF_E_CANCELLED, "cancelled by its owner");
        kvf_move_free(move);
        stage_world_settle(s.w);
        assert_untouched(&s);
        assert_stage_idle(s.d->stage);
        assert_stage_idle(s.p->stage);
        stage_scene_close(&s);
    }
}

static void a_region_that_is_taken_back_is_left_first(void **state) {
    (void)state;
    scene s = scene_open(2);
    kvf_move *move = begin(&s, KVF_READ);
    kvf_status status = KVF_E_AGAIN;
    while (status == KVF_E_AGAIN) {
        stage_world_work_until(s.w, is_copying, s.d->stage);
        status = kvf_transport_unregister_region(s.d->transport, 0);
    }
    assert_ok(status);
    scribble(&s);
    stage_world_work_idle(s.w);
    assert_untouched(&s);
    while (kvf_move_status(move) == KVF_IN_PROGRESS) { /* what the peer sent before may still arrive */
        s.w->now_ns += UINT64_C(31000000000);
        stage_world_work_idle(s.w);
    }
    assert_true(kvf_move_status(move) != KVF_OK);
    kvf_move_free(move);
    stage_scene_close(&s);
}

static void a_stage_closes_while_workers_copy(void **state) {
    (void)state;
    scene s = scene_open(2);
    kvf_move *move = begin(&s, KVF_READ);
    stage_world_work_until(s.w, is_copying, s.d->stage);
    kvf_stage_close(s.d->stage);
    s.d->stage = NULL;
    scribble(&s);
    stage_world_work_idle(s.w);
    assert_untouched(&s);
    assert_int_equal(kvf_move_status(move), KVF_E_CANCELLED);
    kvf_move_free(move);
    stage_scene_close(&s);
}

/* The child has none of the threads, but may have inherited a lock that one of them held. */
static void a_child_of_fork_closes_what_it_inherits(void **state) {
    (void)state;
    scene s = scene_open(2);
    kvf_move *move = begin(&s, KVF_READ);
    stage_world_work_until(s.w, is_copying, s.d->stage);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        (void)alarm(20);
        kvf_stage_close(s.d->stage);
        kvf_stage_close(s.p->stage);
        _exit(0);
    }
    int ended = -1;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    assert_ok(stage_world_finish(s.w, move));
    kvf_move_free(move);
    assert_int_equal(stage_world_wrong_bytes(s.d, &s.before, 5), 0);
    stage_scene_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_slot_is_copied_by_workers_of_both_ends),
        cmocka_unit_test(without_workers_progress_copies),
        cmocka_unit_test(a_move_that_was_cancelled_touches_nothing),
        cmocka_unit_test(a_region_that_is_taken_back_is_left_first),
        cmocka_unit_test(a_stage_closes_while_workers_copy),
        cmocka_unit_test(a_child_of_fork_closes_what_it_inherits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
