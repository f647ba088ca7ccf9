/*
 * Packed requests of ranks whose memory is on a device, over every fabric and the stand-in for the CUDA driver, or a
 * real one (scripts/check-cuda): only the device touches that memory, and the result is compared with a copy made cell
 * by cell.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "cuda/device_image.h"
#include "devices.h"
#include "stage/flow.h"
#include "stage_world.h"
#include "transport_ways.h"

#define SLOT 4096u
#define MS 1000000ull

static const kvf_stage_options small_arena = {.arena_bytes = 16 * SLOT, .slot_bytes = SLOT, .window = 4};
static const kvf_engine_spec d_spec = {.struct_size = sizeof(kvf_engine_spec),
                                       .tp_size = 2,
                                       .all = {.tokens_per_block = 8, .block_count = 100, .order = "L|BPNH"}};
static const kvf_engine_spec p_spec = {.struct_size = sizeof(kvf_engine_spec),
                                       .tp_size = 3,
                                       .all = {.tokens_per_block = 48, .block_count = 40, .order = "L|BPHN"}};

/* ---- memory of devices -------------------------------------------------------------------------- */

/* Closes a world; everything that it had on devices must be freed. */
static void close_world(stage_world *w, size_t before) {
    stage_world_close(w);
    devices_free();
    devices_hasten(); /* what is freed in the order of a stream */
    assert_int_equal(devices_left(), before);
}

static void assert_all_idle(const stage_world *w) {
    stage_world_settle(w);
    for (uint32_t i = 0; i < w->d_count; i++)
        assert_stage_idle(w->d[i].stage);
    for (uint32_t i = 0; i < w->p_count; i++)
        assert_stage_idle(w->p[i].stage);
}

/* ---- whole requests ----------------------------------------------------------------------------- */

static void move_all(const char *kind, stage_pair shape, stage_place d, stage_place p) {
    const size_t before = devices_left();
    stage_world *w = stage_world_open_at(kind, &shape, d, p);
    stage_world_pull_all(w, KVF_WAY_PACKED, 5);
    stage_world_refill(w, 6);
    stage_world_push_all(w, KVF_WAY_AUTO, 6);
    stage_world_refill(w, 7);
    stage_world_pull_all(w, KVF_WAY_AUTO, 7);
    assert_all_idle(w);
    close_world(w, before);
}

static stage_pair heads(uint64_t tokens) {
    return (stage_pair){
        .model = attention(3, 6, 32), .d = &d_spec, .p = &p_spec, .tokens = tokens, .options = small_arena};
}

static void heads_go_from_device_to_device(void **state) {
    move_all(*state, heads(150), device_memory_second, device_memory_first);
}

static void heads_go_from_device_to_host(void **state) {
    move_all(*state, heads(150), NULL, device_memory_first);
}

static void heads_go_from_host_to_device(void **state) {
    move_all(*state, heads(150), device_memory_first, NULL);
}

static void one_latent_for_all_ranks_arrives(void **state) {
    const stage_pair shape = {
        .model = latent(4), .d = &d_spec, .p = &p_spec, .tokens = 150, .options = small_arena};
    move_all(*state, shape, device_memory_first, device_memory_second);
}

static void states_arrive(void **state) {
    static const kvf_engine_spec d = {.struct_size = sizeof d, .tp_size = 2, .all = {.block_count = 40}},
                                 p = {.struct_size = sizeof p, .tp_size = 1, .all = {.block_count = 40}};
    const stage_pair shape = {.model = state_model(3), .d = &d, .p = &p, .tokens = 1, .options = small_arena};
    move_all(*state, shape, device_memory_first, device_memory_second);
}

/* The slots of "cuda" are in memory of devices, where kernels copy everything. */
static void long_runs_are_copied_by_the_driver(void **state) {
    const uint32_t before = devices_copies();
    stage_pair shape = heads(150);
    shape.options.device_copy_bytes = 96;
    move_all(*state, shape, device_memory_second, device_memory_first);
    const uint32_t copies = devices_copies();
    assert_int_equal(copies > before, strcmp(*state, "cuda") != 0);
    shape = heads(150);
    shape.options.device_copy_bytes = KVF_NO_DEVICE_COPIES;
    move_all(*state, shape, device_memory_second, device_memory_first);
    assert_int_equal(devices_copies(), copies);
}

/* Three tokens of 400 lanes are less than a slot, but more boxes than the device takes at once. */
static void more_boxes_than_a_job_has_room_for_go_in_parts(void **state) {
    static const kvf_engine_spec d = {.struct_size = sizeof d,
                                      .tp_size = 2,
                                      .all = {.tokens_per_block = 8, .block_count = 20, .order = "BLPNH"}};
    static const kvf_engine_spec p = {.struct_size = sizeof p,
                                      .tp_size = 3,
                                      .all = {.tokens_per_block = 16, .block_count = 20, .order = "BLPHN"}};
    const stage_pair shape = {
        .model = attention(200, 6, 32), .d = &d, .p = &p, .tokens = 3, .options = {.arena_bytes = 8u << 20}};
    move_all(*state, shape, device_memory_first, device_memory_second);
}

/* As with WSL 2: kernels that use the host's address end the device's context. */
static void a_device_that_has_other_addresses_for_the_hosts_memory_uses_those(void **state) {
    DEVICES_ARE_STAND_INS();
    assert_int_equal(setenv("FAKE_CUDA_ALIASED", "1", 1), 0);
    move_all(*state, heads(150), device_memory_second, device_memory_first);
    stage_pair shape = heads(150);
    shape.options.device_copy_bytes = 96;
    move_all(*state, shape, device_memory_second, device_memory_first);
    assert_int_equal(unsetenv("FAKE_CUDA_ALIASED"), 0);
}

static void a_device_that_is_slow_is_waited_for(void **state) {
    DEVICES_ARE_STAND_INS(); /* a real device cannot be made slow */
    devices_delay(MS / 2);
    move_all(*state, heads(100), device_memory_second, device_memory_first);
    devices_delay(0);
}

/* ---- what is refused, and what ends early -------------------------------------------------------- */

typedef struct one_move {
    kvf_plan *plan;
    kvf_request *request;
    kvf_peer *peers[WORLD_RANKS];
    kvf_move *move;
} one_move;

static kvf_status begin(stage_world *w, kvf_way way, one_move *out) {
    const kvf_move_options options = {.struct_size = sizeof options, .way = way};
    *out = (one_move){.plan = plan_of(&w->engines, 0)};
    out->request = request_of(out->plan);
    set_sequences(out->request, &w->d_sequence, &w->p_sequence);
    stage_world_sources(w, &w->d[0], out->plan, out->peers);
    return kvf_stage_pull(w->d[0].stage, out->request, out->peers, &options, &out->move);
}

static void end(one_move *move) {
    kvf_move_free(move->move);
    kvf_request_free(move->request);
    kvf_plan_free(move->plan);
}

static stage_world *open_pair(const char *kind) {
    const stage_pair shape = heads(150);
    return stage_world_open_at(kind, &shape, device_memory_second, device_memory_first);
}

static void memory_that_is_kept_does_not_go_direct(void **state) {
    const size_t before = devices_left();
    stage_world *w = open_pair(*state);
    one_move move;
    assert_fails(begin(w, KVF_WAY_DIRECT, &move), KVF_E_NOT_REGISTERED, "is withheld");
    end(&move);
    const kvf_run run = {.bytes = 64};
    assert_fails(kvf_transport_submit(w->d[0].peers[0], KVF_READ, &run, 1, (kvf_done)abort, NULL, NULL),
                 KVF_E_NOT_REGISTERED, "local region 0 is withheld");
    close_world(w, before);
}

static void a_move_is_cancelled_while_the_device_copies(void **state) {
    DEVICES_ARE_STAND_INS(); /* a real device would finish these copies at once */
    const size_t before = devices_left();
    stage_world *w = open_pair(*state);
    one_move move;
    devices_delay(3 * MS);
    assert_ok(begin(w, KVF_WAY_PACKED, &move));
    for (int i = 0; i < 20; i++)
        (void)stage_world_work(w);
    kvf_move_cancel(move.move);
    assert_fails(stage_world_finish(w, move.move), KVF_E_CANCELLED, "cancelled by its owner");
    end(&move);
    devices_delay(0);
    assert_all_idle(w);
    stage_world_pull_all(w, KVF_WAY_PACKED, 5);
    close_world(w, before);
}

/* ---- a device that hangs ------------------------------------------------------------------------- */

#define HOUR (3600000 * MS)

static bool has_copies(const kvf_stage *stage) {
    for (const kvf_stage_flow *flow = stage->first; flow; flow = flow->following)
        if (kvf_stage_flow_is_copied(flow))
            return true;
    return false;
}

static bool is_copied(const stage_world *w) {
    bool copied = has_copies(w->d[0].stage);
    for (uint32_t i = 0; i < w->p_count; i++)
        copied = copied || has_copies(w->p[i].stage);
    return copied;
}

/* Begins a pull by the first rank of D, and lets the devices hang once they have copies to make. */
static stage_world *open_hung(const char *kind, stage_place d, stage_place p, one_move *out) {
    const stage_pair shape = heads(150);
    stage_world *w = stage_world_open_at(kind, &shape, d, p);
    devices_delay(HOUR);
    assert_ok(begin(w, KVF_WAY_PACKED, out));
    while (!is_copied(w))
        (void)stage_world_work(w);
    return w;
}

static void go_on(stage_world *w) {
    devices_hasten();
    devices_delay(0);
    assert_all_idle(w);
    stage_world_pull_all(w, KVF_WAY_PACKED, 5);
}

static void a_move_ends_when_a_device_that_hangs_no_longer_writes(void **state) {
    DEVICES_ARE_STAND_INS();
    const size_t before = devices_left();
    one_move move;
    stage_world *w = open_hung(*state, device_memory_first, NULL, &move);
    kvf_move_cancel(move.move);
    for (int i = 0; i < 50; i++)
        (void)stage_world_work(w);
    assert_int_equal(kvf_move_status(move.move), KVF_IN_PROGRESS);
    assert_fails(kvf_transport_unregister_region(w->d[0].transport, 0), KVF_E_AGAIN, "has not finished");
    devices_hasten();
    assert_fails(stage_world_finish(w, move.move), KVF_E_CANCELLED, "cancelled by its owner");
    end(&move);
    go_on(w);
    close_world(w, before);
}

static void a_permission_is_revoked_once_the_device_no_longer_reads(void **state) {
    DEVICES_ARE_STAND_INS();
    const size_t before = devices_left();
    one_move move;
    stage_world *w = open_hung(*state, NULL, device_memory_first, &move);
    bool quiet = true;
    for (uint32_t i = 0; i < w->p_count; i++)
        quiet = kvf_stage_revoke(w->p[i].stage, 0) && quiet;
    assert_false(quiet);
    assert_fails(stage_world_finish(w, move.move), KVF_E_CANCELLED, "its permission was revoked");
    end(&move);
    go_on(w);
    for (uint32_t i = 0; i < w->p_count; i++)
        assert_true(kvf_stage_revoke(w->p[i].stage, 0));
    close_world(w, before);
}

static void a_peer_learns_that_a_device_hangs(void **state) {
    DEVICES_ARE_STAND_INS();
    const size_t before = devices_left();
    one_move move;
    stage_world *w = open_hung(*state, NULL, device_memory_first, &move);
    w->now_ns += 16000 * MS;
    assert_fails(stage_world_finish(w, move.move), KVF_E_TIMEOUT, "the device has finished no copy for");
    end(&move);
    go_on(w);
    close_world(w, before);
}

static void a_stage_that_is_closed_waits_for_its_device(void **state) {
    DEVICES_ARE_STAND_INS();
    const size_t before = devices_left();
    stage_world *w = open_pair(*state);
    one_move move;
    devices_delay(20 * MS);
    assert_ok(begin(w, KVF_WAY_PACKED, &move));
    for (int i = 0; i < 20; i++)
        (void)stage_world_work(w);
    end(&move);
    close_world(w, before);
    devices_delay(0);
}

/* Nothing is freed that the device may still write, and the driver is not asked to free anything, for which it would
 * wait. "inproc" has no memory of its own: the arena is the transport's. */
static void a_stage_that_is_closed_leaves_what_a_device_that_hangs_uses(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    static kvf_stage_device *open; /* until the process ends */
    one_move move;
    stage_world *w = open_hung("inproc", device_memory_first, NULL, &move);
    kvf_stage *stage = w->d[0].stage;
    void *arena = stage->arenas[KVF_MEMORY_HOST].slots[0].memory;
    open = stage->device;
    stage->device_patience_ns = 50 * MS;
    end(&move);
    stage_world_close(w);
    assert_non_null(open);
    assert_int_equal(msync(arena, SLOT, MS_ASYNC), 0); /* it is mapped */
    devices_hasten();
    devices_delay(0);
    devices_free();
}

/* Whether no end is busy and no descriptor is readable. */
static bool is_quiet(const stage_world *w) {
    struct pollfd fds[2 * WORLD_RANKS];
    nfds_t count = 0;
    for (uint32_t i = 0; i < w->d_count + w->p_count; i++) {
        const stage_end *end = i < w->d_count ? &w->d[i] : &w->p[i - w->d_count];
        fds[count++] = (struct pollfd){kvf_transport_event_fd(end->transport), POLLIN, 0};
    }
    return !stage_world_work(w) && poll(fds, count, 0) == 0;
}

/* On a slow machine each copy may be over when the test looks; then it begins another move. */
static void nobody_is_busy_while_only_the_device_works(void **state) {
    DEVICES_ARE_STAND_INS(); /* a real device may finish every copy before the test looks */
    const size_t before = devices_left();
    stage_world *w = open_pair(*state);
    one_move move;
    devices_delay(5 * MS);
    for (bool quiet = false; !quiet;) {
        assert_ok(begin(w, KVF_WAY_PACKED, &move));
        while (!quiet && kvf_move_status(move.move) == KVF_IN_PROGRESS)
            quiet = is_quiet(w);
        assert_ok(stage_world_finish(w, move.move)); /* woken by its descriptors */
        end(&move);
    }
    devices_delay(0);
    assert_all_idle(w);
    close_world(w, before);
}

static void a_device_that_fails_ends_its_moves_with_its_words(void **state) {
    enum { ILLEGAL_ADDRESS = 700 };
    DEVICES_ARE_STAND_INS();
    const size_t before = devices_left();
    stage_world *w = open_pair(*state);
    one_move move;
    assert_ok(begin(w, KVF_WAY_PACKED, &move));
    devices_stick(ILLEGAL_ADDRESS);
    assert_fails(stage_world_finish(w, move.move), KVF_E_IO, "CUDA_ERROR_ILLEGAL_ADDRESS");
    devices_stick(0);
    end(&move);
    assert_all_idle(w);
    close_world(w, before);
}

static bool have_tables(void *context) {
    const kvf_stage *stage = ((const stage_world *)context)->d[0].stage;
    bool all = stage->first != NULL;
    for (const kvf_stage_flow *flow = stage->first; flow; flow = flow->following)
        all = all && flow->table.address;
    return all;
}

static void a_copy_that_the_device_refuses_ends_its_move_and_no_later_one(void **state) {
    enum { UNKNOWN = 999 };
    static const char *const functions[] = {"cuMemcpyHtoDAsync_v2", "cuLaunchKernel"};
    DEVICES_ARE_STAND_INS();
    const size_t before = devices_left();
    for (size_t i = 0; i < COUNT_OF(functions); i++) {
        one_move move;
        stage_world *w = open_hung(*state, device_memory_first, NULL, &move);
        stage_world_work_until(w, have_tables, w);
        devices_fail(functions[i], UNKNOWN, 1);
        devices_hasten();
        devices_delay(0);
        assert_fails(stage_world_finish(w, move.move), KVF_E_IO, "starting a copy: ");
        end(&move);
        go_on(w);
        close_world(w, before);
    }
}

static uint32_t copies_of(const kvf_stage *stage) {
    uint32_t copies = 0;
    for (const kvf_stage_flow *flow = stage->first; flow; flow = flow->following)
        for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++)
            copies += flow->credits[i].state == KVF_CREDIT_COPYING;
    return copies;
}

/* The device's copy engine has 32 jobs. */
static bool has_more_than_it_takes(void *context) {
    return copies_of(((const stage_world *)context)->d[0].stage) > 32;
}

static void more_copies_than_the_device_takes_at_once_wait(void **state) {
    DEVICES_ARE_STAND_INS();
    enum { MOVES = 8 };
    const size_t before = devices_left();
    stage_pair shape = heads(150);
    shape.options = (kvf_stage_options){.arena_bytes = 512 * SLOT, .slot_bytes = SLOT, .window = 8};
    stage_world *w = stage_world_open_at(*state, &shape, device_memory_first, NULL);
    one_move moves[MOVES];
    cell_rank was;
    rank_copy(&was, &w->d[0].cells);
    devices_delay(HOUR);
    for (int i = 0; i < MOVES; i++)
        assert_ok(begin(w, KVF_WAY_PACKED, &moves[i]));
    stage_world_work_until(w, has_more_than_it_takes, w);
    devices_hasten();
    devices_delay(0);
    for (int i = 0; i < MOVES; i++) {
        assert_ok(stage_world_finish(w, moves[i].move));
        end(&moves[i]);
    }
    assert_int_equal(stage_world_wrong_bytes(&w->d[0], &was, 5), 0);
    rank_close(&was);
    assert_all_idle(w);
    close_world(w, before);
}

static void shards_in_two_places_are_refused(void **state) {
    DEVICES_ARE_SEVERAL();
    kvf_transport *transport;
    kvf_stage *stage = NULL;
    pair engines = pair_of(attention(2, 1, 8), &d_spec, &p_spec); /* a region for each layer */
    const kvf_shard *shard = kvf_engine_shard(engines.local, 0);
    const uint64_t *bytes = kvf_shard_get(shard)->region_bytes;
    const kvf_transport_options options = {.struct_size = sizeof options};
    const kvf_stage_options stage_options = {.struct_size = sizeof stage_options};
    void *seen;
    const kvf_memory regions[] = {device_memory_first(bytes[0], &seen),
                                  device_memory_second(bytes[1], &seen)};
    assert_int_equal(kvf_shard_get(shard)->region_count, 2);
    assert_ok(kvf_transport_open(*state, &options, &transport));
    assert_ok(kvf_transport_register(transport, regions, 2));
    assert_fails(kvf_stage_open(transport, shard, &stage_options, &stage), KVF_E_UNSUPPORTED,
                 "all regions of a stage's shard must be of one kind and device");
    kvf_transport_close(transport);
    free_pair(&engines);
    devices_free();
}

static bool opens(const char *kind) {
    const kvf_transport_options options = {.struct_size = sizeof options};
    kvf_transport *transport = NULL;
    const kvf_status status = kvf_transport_open(kind, &options, &transport);
    if (!status)
        kvf_transport_close(transport);
    return status != KVF_E_UNSUPPORTED;
}

/* A machine with a real device may have neither UCX nor libfabric: what is tested over them is left out there, by name. */
static size_t ways_here(test_way *ways) {
    const size_t count = ways_of_kinds(ways);
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        if (!devices_are_real() || opens(ways[i].state))
            ways[kept++] = ways[i];
        else
            (void)printf("[  SKIPPED ] all over %s: %s\n", ways[i].name, kvf_error_detail());
    }
    return kept;
}

int main(void) {
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    devices_open();
    stage_world_copies_memory(devices_get, devices_put);
    static const way_test tests[] = {
        NAMED(heads_go_from_device_to_device),
        NAMED(heads_go_from_device_to_host),
        NAMED(heads_go_from_host_to_device),
        NAMED(one_latent_for_all_ranks_arrives),
        NAMED(states_arrive),
        NAMED(long_runs_are_copied_by_the_driver),
        NAMED(more_boxes_than_a_job_has_room_for_go_in_parts),
        NAMED(a_device_that_has_other_addresses_for_the_hosts_memory_uses_those),
        NAMED(a_device_that_is_slow_is_waited_for),
        NAMED(memory_that_is_kept_does_not_go_direct),
        NAMED(a_move_is_cancelled_while_the_device_copies),
        NAMED(a_move_ends_when_a_device_that_hangs_no_longer_writes),
        NAMED(a_permission_is_revoked_once_the_device_no_longer_reads),
        NAMED(a_peer_learns_that_a_device_hangs),
        NAMED(a_stage_that_is_closed_waits_for_its_device),
        NAMED(nobody_is_busy_while_only_the_device_works),
        NAMED(a_device_that_fails_ends_its_moves_with_its_words),
        NAMED(a_copy_that_the_device_refuses_ends_its_move_and_no_later_one),
        NAMED(more_copies_than_the_device_takes_at_once_wait),
        NAMED(shards_in_two_places_are_refused),
    };
    static const struct CMUnitTest more[] = {
        cmocka_unit_test(a_stage_that_is_closed_leaves_what_a_device_that_hangs_uses),
    };
    static test_way ways[MAX_WAYS];
    return run_every_way("stage_device", tests, COUNT_OF(tests), ways, ways_here(ways), more, COUNT_OF(more));
}
