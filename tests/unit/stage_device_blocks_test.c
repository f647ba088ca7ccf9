/*
 * How many blocks of threads, and so multiprocessors, a stage's device takes to fill the slots of an arena, as the
 * stand-in for the CUDA driver sees it: 4 with nothing in front, and up to 8 while slots wait for each other.
 */
#include <stdio.h>
#include <stdlib.h>

#include "cuda/device_image.h"
#include "devices.h"
#include "stage_world.h"

#define MULTIPROCESSORS "40" /* of each stand-in here */
#define HOUR_NS 3600000000000ull
#define WINDOW 8u

/* One rank each. P's rank is on a device, and D's on the host, so that only P's device copies; slots of 1 MiB are work
 * for 16 blocks, and 300 tokens fill 14 of them. */
static const kvf_stage_options options = {.window = WINDOW};
static const kvf_engine_spec d_spec = {.struct_size = sizeof(kvf_engine_spec),
                                       .tp_size = 1,
                                       .all = {.tokens_per_block = 8, .block_count = 50, .order = "L|BPNH"}};
static const kvf_engine_spec p_spec = {.struct_size = sizeof(kvf_engine_spec),
                                       .tp_size = 1,
                                       .all = {.tokens_per_block = 16, .block_count = 30, .order = "L|BPHN"}};

/* Works until the device is asked for one copy more, and gives its blocks of threads. */
static uint32_t next_grid(const stage_world *w, uint32_t *launches) {
    while (devices_launches() == *launches)
        (void)stage_world_work(w);
    assert_int_equal(devices_launches(), *launches + 1);
    *launches = devices_launches();
    return devices_grid();
}

static void slots_that_wait_for_each_other_get_more_blocks_and_the_next_alone_few(void **unused) {
    (void)unused;
    const stage_pair shape = {
        .model = attention(12, 8, 128), .d = &d_spec, .p = &p_spec, .tokens = 300, .options = options};
    stage_world *w = stage_world_open_at("inproc", &shape, NULL, device_memory_first);
    for (int turn = 0; turn < 2; turn++) {
        const kvf_move_options packed = {.struct_size = sizeof packed, .way = KVF_WAY_PACKED};
        kvf_plan *plan = plan_of(&w->engines, 0);
        kvf_request *request = request_of(plan);
        kvf_peer *peers[WORLD_RANKS];
        kvf_move *move;
        uint32_t launches = devices_launches();
        set_sequences(request, &w->d_sequence, &w->p_sequence);
        stage_world_sources(w, &w->d[0], plan, peers);
        devices_delay(HOUR_NS);
        assert_ok(kvf_stage_pull(w->d[0].stage, request, peers, &packed, &move));
        for (uint32_t slot = 0; slot < WINDOW; slot++)
            assert_int_equal(next_grid(w, &launches), slot < 4 ? 4 + slot : 8);
        devices_hasten();
        devices_delay(0);
        assert_ok(stage_world_finish(w, move));
        kvf_move_free(move);
        kvf_request_free(request);
        kvf_plan_free(plan);
        stage_world_settle(w);
    }
    stage_world_close(w);
    devices_free();
}

int main(void) {
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_that_wait_for_each_other_get_more_blocks_and_the_next_alone_few),
    };
    (void)setenv("FAKE_CUDA_MULTIPROCESSORS", MULTIPROCESSORS, 1);
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
