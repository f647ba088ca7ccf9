/*
 * Arenas in memory of devices: over "cuda", which moves only such memory, and over a fabric that moves both kinds, as a
 * UCX with CUDA does. Over the stand-in for the CUDA driver, or a real one (scripts/check-cuda).
 */
#include <stdio.h>

#include "cuda/device_image.h"
#include "devices.h"
#include "faulty_fabric.h"
#include "stage_world.h"

#define SLOT 4096u

static const kvf_stage_options small_arenas = {
    .arena_bytes = 16 * SLOT, .device_arena_bytes = 8 * SLOT, .slot_bytes = SLOT, .window = 4};
static const kvf_engine_spec d_spec = {.struct_size = sizeof(kvf_engine_spec),
                                       .tp_size = 1,
                                       .all = {.tokens_per_block = 8, .block_count = 100, .order = "L|BPNH"}};
static const kvf_engine_spec p_spec = {.struct_size = sizeof(kvf_engine_spec),
                                       .tp_size = 1,
                                       .all = {.tokens_per_block = 48, .block_count = 40, .order = "L|BPHN"}};

/* ---- memory of devices -------------------------------------------------------------------------- */

static bool is_full; /* the devices have no memory left for arenas */

static kvf_memory allocate(uint32_t device, uint64_t bytes) {
    kvf_memory made = {0};
    void *seen;
    if (!is_full)
        made = device_memory(device, bytes, &seen);
    return made;
}

static void *look_in_vain(uint64_t address) {
    (void)address;
    return NULL;
}

static const faulty_devices seen_devices = {devices_look, allocate}, without_memory = {devices_look, NULL},
                            refusing = {look_in_vain, NULL};

/* ---- a pair ------------------------------------------------------------------------------------- */

static stage_pair heads(const kvf_stage_options *options) {
    return (stage_pair){
        .model = attention(3, 6, 32), .d = &d_spec, .p = &p_spec, .tokens = 150, .options = *options};
}

static stage_world *open_over(const faulty_devices *devices, const kvf_stage_options *options, stage_place d,
                              stage_place p) {
    const faulty_options both_kinds = {.devices = devices};
    const stage_pair shape = heads(options);
    faulty_install(&both_kinds);
    return stage_world_open_at("inproc", &shape, d, p);
}

static stage_world *open_both(const kvf_stage_options *options, stage_place d, stage_place p) {
    return open_over(&seen_devices, options, d, p);
}

static void close_both(stage_world *w) {
    stage_world_settle(w);
    assert_stage_idle(w->d[0].stage);
    assert_stage_idle(w->p[0].stage);
    stage_world_close(w);
    faulty_remove();
    devices_free();
}

/* How many flows have had slots in memory of a device, at D and at P. */
static void assert_device_flows(const stage_world *w, uint64_t d, uint64_t p) {
    assert_int_equal(stage_info_of(w->d[0].stage).device_flows, d);
    assert_int_equal(stage_info_of(w->p[0].stage).device_flows, p);
}

static void move_both_ways(stage_world *w) {
    stage_world_pull_all(w, KVF_WAY_AUTO, 5);
    stage_world_refill(w, 6);
    stage_world_push_all(w, KVF_WAY_PACKED, 6);
}

/* ---- which arenas are used ---------------------------------------------------------------------- */

static void over_a_transport_of_devices_slots_are_on_the_devices(void **state) {
    (void)state;
    const stage_pair shape = heads(&small_arenas);
    const size_t before = devices_left();
    stage_world *w = stage_world_open_at("cuda", &shape, device_memory_second, device_memory_first);
    const kvf_stage_info info = stage_info_of(w->d[0].stage);
    assert_int_equal(info.device_slots, 8);
    assert_int_equal(info.slots, 8); /* "cuda" does not move memory of the host */
    assert_null(kvf_stage_without_device(w->d[0].stage));
    move_both_ways(w);
    assert_device_flows(w, 2, 2);
    close_both(w);
    assert_int_equal(devices_left(), before);
}

static void over_a_transport_of_both_slots_are_on_the_devices(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    stage_world *w = open_both(&small_arenas, device_memory_second, device_memory_first);
    const kvf_stage_info info = stage_info_of(w->p[0].stage);
    assert_int_equal(info.device_slots, 8);
    assert_int_equal(info.slots, 24);
    move_both_ways(w);
    assert_device_flows(w, 2, 2);
    close_both(w);
}

/* As UCX and libfabric with CUDA. */
static void over_a_transport_that_gives_no_memory_of_devices_slots_are_in_plain_memory(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    const size_t before = devices_left();
    stage_world *w = open_over(&without_memory, &small_arenas, device_memory_second, device_memory_first);
    assert_null(kvf_stage_without_device(w->d[0].stage));
    assert_int_equal(stage_info_of(w->p[0].stage).device_slots, 8);
    move_both_ways(w);
    assert_device_flows(w, 2, 2);
    close_both(w);
    assert_int_equal(devices_left(), before);
}

static void plain_memory_that_a_transport_refuses_is_freed(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    kvf_stage_options options = small_arenas;
    options.device_arena_bytes = KVF_NO_DEVICE_ARENA;
    stage_world *w = open_over(&refusing, &options, device_memory_second, device_memory_first);
    const size_t left = devices_left();
    close_both(w);
    w = open_over(&refusing, &small_arenas, device_memory_second, device_memory_first);
    assert_non_null(strstr(kvf_stage_without_device(w->d[0].stage), "register: faulty: "));
    assert_int_equal(devices_left(), left);
    move_both_ways(w);
    assert_device_flows(w, 0, 0);
    close_both(w);
}

static void one_side_on_a_device_uses_its_arena_and_the_other_the_hosts(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    for (int device_at_d = 0; device_at_d < 2; device_at_d++) {
        stage_world *w = open_both(&small_arenas, device_at_d ? device_memory_first : NULL,
                                   device_at_d ? NULL : device_memory_first);
        assert_int_equal(stage_info_of(w->d[0].stage).device_slots, device_at_d ? 8 : 0);
        stage_world_pull_all(w, KVF_WAY_PACKED, 5);
        stage_world_refill(w, 6);
        stage_world_push_all(w, KVF_WAY_PACKED, 6);
        assert_device_flows(w, device_at_d ? 2 : 0, device_at_d ? 0 : 2);
        close_both(w);
    }
}

static void a_transport_of_the_hosts_memory_uses_the_hosts(void **state) {
    (void)state;
    const stage_pair shape = heads(&small_arenas);
    stage_world *w = stage_world_open_at("inproc", &shape, device_memory_second, device_memory_first);
    assert_non_null(strstr(kvf_stage_without_device(w->d[0].stage), "no transport here moves CUDA memory"));
    move_both_ways(w);
    assert_device_flows(w, 0, 0);
    close_both(w);
}

/* ---- by cost, and for want of room ---------------------------------------------------------------- */

/* An end expects that packed bytes cost a nanosecond each through arenas of this kind, and 1000 through the other. */
static void expect_of(const stage_end *end, kvf_direction direction, kvf_memory_kind kind) {
    kvf_assumed_cost assumed = {.packed = {{.ns_per_byte = 1000}, {.ns_per_byte = 1000}}};
    assumed.packed[kind].ns_per_byte = 1;
    kvf_peer_cost_begin(&kvf_stage_find_peer(end->stage, end->peers[0])->known->by_direction[direction],
                        &assumed);
}

static void prefer(const stage_world *w, kvf_memory_kind kind) {
    expect_of(&w->d[0], KVF_READ, kind);
}

static void faster_arenas_are_used(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    stage_world *w = open_both(&small_arenas, device_memory_second, device_memory_first);
    const kvf_peer_cost *cost =
        &kvf_stage_find_peer(w->d[0].stage, w->d[0].peers[0])->known->by_direction[KVF_READ];
    prefer(w, KVF_MEMORY_HOST);
    stage_world_pull_all(w, KVF_WAY_PACKED, 5);
    assert_device_flows(w, 0, 0);
    assert_int_equal(cost->packed[KVF_MEMORY_HOST].transfers, 1); /* which is what it learned from */
    assert_int_equal(cost->packed[KVF_MEMORY_CUDA].transfers, 0);
    assert_int_equal(cost->packed[KVF_MEMORY_CUDA].passed, 1);
    stage_world_refill(w, 6);
    prefer(w, KVF_MEMORY_CUDA);
    stage_world_pull_all(w, KVF_WAY_PACKED, 6);
    assert_device_flows(w, 1, 1);
    assert_int_equal(cost->packed[KVF_MEMORY_HOST].transfers, 0);
    assert_int_equal(cost->packed[KVF_MEMORY_CUDA].transfers, 1);
    close_both(w);
}

static void the_hosts_arena_is_used_while_all_slots_on_the_device_are_in_use(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    stage_world *w = open_both(&small_arenas, device_memory_second, device_memory_first);
    kvf_arena *arena = &w->d[0].stage->arenas[KVF_MEMORY_CUDA];
    kvf_slot *taken[8];
    kvf_slot_share others[8] = {{0}};
    for (int i = 0; i < 8; i++)
        taken[i] = kvf_arena_take(arena, &others[i]);
    prefer(w, KVF_MEMORY_CUDA);
    stage_world_pull_all(w, KVF_WAY_PACKED, 5);
    assert_device_flows(w, 0, 0);
    kvf_arena_give(arena, taken[0]);
    stage_world_refill(w, 6);
    prefer(w, KVF_MEMORY_CUDA);
    stage_world_pull_all(w, KVF_WAY_PACKED, 6);
    assert_device_flows(w, 1, 1);
    for (int i = 1; i < 8; i++)
        kvf_arena_give(arena, taken[i]);
    close_both(w);
}

static void a_stage_without_memory_on_the_device_uses_the_hosts(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    is_full = true;
    stage_world *w = open_both(&small_arenas, device_memory_second, device_memory_first);
    is_full = false;
    assert_string_equal(kvf_stage_without_device(w->d[0].stage), "the device has no memory left");
    move_both_ways(w);
    assert_device_flows(w, 0, 0);
    close_both(w);
}

/* It once kept an arena of the host that its kernels could not reach, and lent it. Results as drivers give them: not
 * supported, not permitted, an invalid value, and a failed call of the system. */
static void a_stage_whose_device_does_not_reach_the_hosts_memory_has_no_arena_there(void **state) {
    static const int refusals[] = {801, 800, 1, 304};
    (void)state;
    DEVICES_ARE_STAND_INS();
    for (size_t i = 0; i < COUNT_OF(refusals); i++) {
        devices_fail("cuMemHostRegister_v2", refusals[i], UINT32_MAX);
        stage_world *w = open_both(&small_arenas, device_memory_second, device_memory_first);
        devices_fail("", 0, 0);
        assert_int_equal(stage_info_of(w->p[0].stage).slots, 8);
        assert_int_equal(stage_info_of(w->p[0].stage).device_slots, 8);
        assert_non_null(kvf_stage_without_host(w->p[0].stage));
        assert_non_null(strstr(kvf_stage_without_host(w->p[0].stage), "pinning memory of the host"));
        assert_null(kvf_stage_without_device(w->p[0].stage));
        assert_int_equal(kvf_peer_arenas(w->d[0].peers[0]).ours, 1u << KVF_MEMORY_CUDA);
        move_both_ways(w);
        assert_device_flows(w, 2, 2);
        close_both(w);
    }
}

/* Of 16 slots on the host 8 remain, and there are 8 on the device. */
static void a_stage_pins_as_much_of_the_hosts_arena_as_it_can(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    devices_fail("cuMemHostRegister_v2", CUDA_ERROR_OUT_OF_MEMORY, 1);
    stage_world *w = open_both(&small_arenas, device_memory_second, device_memory_first);
    const kvf_stage *short_of_it = w->d[0].stage, *other = w->p[0].stage;
    assert_int_equal(stage_info_of(short_of_it).slots, 8 + 8);
    assert_null(kvf_stage_without_host(short_of_it));
    assert_non_null(strstr(kvf_stage_short_of_host(short_of_it), "pinning memory of the host"));
    assert_int_equal(stage_info_of(other).slots, 16 + 8);
    assert_null(kvf_stage_short_of_host(other));
    prefer(w, KVF_MEMORY_HOST);
    stage_world_pull_all(w, KVF_WAY_PACKED, 5);
    assert_device_flows(w, 0, 0);
    close_both(w);
}

static void a_stage_that_can_pin_nothing_uses_the_arena_on_its_device(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    devices_fail("cuMemHostRegister_v2", CUDA_ERROR_OUT_OF_MEMORY, UINT32_MAX);
    stage_world *w = open_both(&small_arenas, device_memory_second, device_memory_first);
    devices_fail("", 0, 0);
    assert_int_equal(stage_info_of(w->p[0].stage).slots, 8);
    assert_non_null(kvf_stage_without_host(w->p[0].stage));
    assert_null(kvf_stage_short_of_host(w->p[0].stage));
    move_both_ways(w);
    assert_device_flows(w, 2, 2);
    close_both(w);
}

/* P has both arenas, and would rather use the host's; it once asked D for slots there, and was refused. */
static void a_peer_without_an_arena_on_the_host_is_asked_for_slots_on_its_device(void **state) {
    enum { NOT_SUPPORTED = 801 };
    (void)state;
    DEVICES_ARE_STAND_INS();
    devices_fail("cuMemHostRegister_v2", NOT_SUPPORTED, 1);
    stage_world *w = open_both(&small_arenas, device_memory_second, device_memory_first);
    assert_non_null(kvf_stage_without_host(w->d[0].stage));
    assert_null(kvf_stage_without_host(w->p[0].stage));
    assert_int_equal(kvf_peer_arenas(w->p[0].peers[0]).theirs, 1u << KVF_MEMORY_CUDA);
    assert_int_equal(kvf_peer_arenas(w->d[0].peers[0]).theirs, 1u << KVF_MEMORY_CUDA | 1u << KVF_MEMORY_HOST);
    expect_of(&w->p[0], KVF_WRITE, KVF_MEMORY_HOST);
    stage_world_push_all(w, KVF_WAY_PACKED, 5);
    assert_device_flows(w, 1, 1);
    close_both(w);
}

static void a_stage_that_wants_no_memory_on_the_device_has_none(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    kvf_stage_options options = small_arenas;
    options.device_arena_bytes = KVF_NO_DEVICE_ARENA;
    stage_world *w = open_both(&options, device_memory_second, device_memory_first);
    assert_int_equal(stage_info_of(w->d[0].stage).device_slots, 0);
    move_both_ways(w);
    assert_device_flows(w, 0, 0);
    close_both(w);
}

/* ---- slots that a device still writes -------------------------------------------------------------- */

#define MS 1000000ull
#define HOUR (3600000 * MS)
#define DOUBT (10000 * MS)

static uint32_t in_doubt(const stage_end *end) {
    return stage_info_of(end->stage).slots_doubt;
}

static bool is_writing(void *context) {
    const kvf_stage_flow *flow = ((const stage_end *)context)->stage->first;
    return flow && flow->moving > 0;
}

static bool has_lent_two(void *context) {
    return stage_info_of(((const stage_end *)context)->stage).slots_lent == 2;
}

static void pass(stage_world *w, uint64_t ns) {
    w->now_ns += ns;
    for (int i = 0; i < 50; i++)
        (void)stage_world_work(w);
}

static void begin_push(stage_world *w, const kvf_request *request, uint32_t source, kvf_move **out) {
    const kvf_move_options options = {.struct_size = sizeof options, .way = KVF_WAY_PACKED};
    stage_end *p = &w->p[source];
    assert_ok(kvf_stage_push(p->stage, request, source, p->peers[0], &options, out));
}

/* The first rank of P pushes, for which a kernel of D is to write into a slot of D, and is late. */
static kvf_move *begin_late_push(stage_world *w, const kvf_request *request) {
    kvf_move *move;
    begin_push(w, request, 0, &move);
    stage_world_work_until(w, is_writing, &w->p[0]); /* D has not heard of the write yet */
    devices_delay(HOUR);
    pass(w, 0);
    return move;
}

static void connect_anew(stage_end *from, const stage_end *to) {
    const void *card;
    size_t bytes;
    kvf_stage_leave(from->stage, from->peers[0]);
    kvf_peer_close(from->peers[0]);
    assert_ok(kvf_transport_export(to->transport, &card, &bytes));
    assert_ok(kvf_transport_connect(from->transport, card, bytes, &from->peers[0]));
    assert_ok(kvf_stage_join(from->stage, from->peers[0]));
}

/* A slot was given to another flow once its time in doubt was over, and the late kernel wrote into it then. */
static void slots_that_our_own_kernels_may_write_stay_in_doubt(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    stage_pair shape = heads(&small_arenas);
    shape.options.doubt_ns = DOUBT;
    stage_world *w = stage_world_open_at("cuda", &shape, device_memory_second, device_memory_first);
    stage_end *d = &w->d[0];
    kvf_plan *plan = plan_of(&w->engines, 0);
    kvf_request *request = request_of(plan);
    set_sequences(request, &w->d_sequence, &w->p_sequence);
    kvf_move *move = begin_late_push(w, request);
    kvf_stage_leave(d->stage, d->peers[0]);
    const uint32_t lent = in_doubt(d);
    assert_true(lent > 0);
    pass(w, DOUBT);
    assert_int_equal(in_doubt(d), lent);
    kvf_stage_quiet(d->stage, "p0");
    pass(w, 0);
    assert_int_equal(in_doubt(d), lent);
    devices_delay(0);
    devices_hasten();
    assert_fails(stage_world_finish(w, move), KVF_E_PEER_LOST, "shut this endpoint out");
    kvf_move_free(move);
    stage_world_settle(w);
    assert_stage_idle(d->stage);
    assert_ok(kvf_stage_join(d->stage, d->peers[0]));
    connect_anew(&w->p[0], d);
    move_both_ways(w);
    kvf_request_free(request);
    kvf_plan_free(plan);
    close_both(w);
}

/* Three ranks of P push, and D may lend two slots. Nobody has left: the third waits for too long. */
static void slots_that_peers_keep_stay_in_doubt_while_our_own_kernels_may_write(void **state) {
    static const kvf_engine_spec three = {
        .struct_size = sizeof three,
        .tp_size = 3,
        .all = {.tokens_per_block = 48, .block_count = 40, .order = "L|BPHN"}};
    (void)state;
    DEVICES_ARE_STAND_INS();
    stage_pair shape = heads(&small_arenas);
    shape.p = &three;
    shape.options.doubt_ns = DOUBT;
    shape.options.stall_ns = 100 * DOUBT;
    shape.options.device_arena_bytes = 4 * SLOT;
    stage_world *w = stage_world_open_at("cuda", &shape, device_memory_second, device_memory_first);
    kvf_plan *plan = plan_of(&w->engines, 0);
    kvf_request *request = request_of(plan);
    kvf_move *moves[3];
    set_sequences(request, &w->d_sequence, &w->p_sequence);
    begin_push(w, request, 0, &moves[0]);
    begin_push(w, request, 1, &moves[1]);
    stage_world_work_until(w, has_lent_two, &w->d[0]);
    w->d[0].stands_still = true;
    stage_world_work_until(w, is_writing, &w->p[0]);
    stage_world_work_until(w, is_writing, &w->p[1]);
    devices_delay(HOUR);
    w->d[0].stands_still = false;
    begin_push(w, request, 2, &moves[2]);
    pass(w, 0);
    pass(w, DOUBT + 1);
    assert_int_equal(w->d[0].event, KVF_E_TIMEOUT);
    assert_int_equal(in_doubt(&w->d[0]), 2);
    pass(w, DOUBT + 1);
    assert_int_equal(in_doubt(&w->d[0]), 2);
    devices_delay(0);
    devices_hasten();
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(stage_world_finish(w, moves[i]), i < 2 ? KVF_E_TIMEOUT : KVF_OK);
        kvf_move_free(moves[i]);
    }
    kvf_request_free(request);
    kvf_plan_free(plan);
    close_both(w);
}

/* ---- what is refused ---------------------------------------------------------------------------- */

/* The mover's card of the lender is of a time when that had an arena on its device. */
static void a_lender_without_an_arena_on_its_device_refuses_by_name(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    stage_world *w = open_both(&small_arenas, device_memory_second, device_memory_first);
    kvf_arena *arena = &w->p[0].stage->arenas[KVF_MEMORY_CUDA];
    const kvf_arena kept = *arena;
    kvf_plan *plan = plan_of(&w->engines, 0);
    kvf_request *request = request_of(plan);
    kvf_peer *peers[WORLD_RANKS];
    const kvf_move_options options = {.struct_size = sizeof options, .way = KVF_WAY_PACKED};
    kvf_move *move;
    set_sequences(request, &w->d_sequence, &w->p_sequence);
    stage_world_sources(w, &w->d[0], plan, peers);
    arena->slots = NULL;
    assert_ok(kvf_stage_pull(w->d[0].stage, request, peers, &options, &move));
    assert_fails(stage_world_finish(w, move), KVF_E_UNSUPPORTED,
                 "the mover asks for slots in memory of a device; this rank has none there");
    kvf_move_free(move);
    stage_world_settle(w);
    *arena = kept;
    kvf_request_free(request);
    kvf_plan_free(plan);
    close_both(w);
}

static void an_arena_of_less_than_four_slots_is_refused(void **state) {
    (void)state;
    const size_t before = devices_left();
    const kvf_transport_options transport_options = {.struct_size = sizeof transport_options};
    kvf_stage_options options = {
        .struct_size = sizeof options, .slot_bytes = SLOT, .device_arena_bytes = 4 * SLOT - 1};
    kvf_transport *transport;
    kvf_stage *stage;
    pair engines = pair_of(attention(3, 6, 32), &d_spec, &p_spec);
    assert_ok(kvf_transport_open("inproc", &transport_options, &transport));
    assert_fails(kvf_stage_open(transport, kvf_engine_shard(engines.local, 0), &options, &stage),
                 KVF_E_INVALID, "device_arena_bytes is 16383; allowed: 4 slots of 4096 and more");
    kvf_transport_close(transport);
    free_pair(&engines);
    assert_int_equal(devices_left(), before);
}

int main(void) {
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    devices_open();
    stage_world_copies_memory(devices_get, devices_put);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(over_a_transport_of_devices_slots_are_on_the_devices),
        cmocka_unit_test(over_a_transport_of_both_slots_are_on_the_devices),
        cmocka_unit_test(over_a_transport_that_gives_no_memory_of_devices_slots_are_in_plain_memory),
        cmocka_unit_test(plain_memory_that_a_transport_refuses_is_freed),
        cmocka_unit_test(one_side_on_a_device_uses_its_arena_and_the_other_the_hosts),
        cmocka_unit_test(a_transport_of_the_hosts_memory_uses_the_hosts),
        cmocka_unit_test(faster_arenas_are_used),
        cmocka_unit_test(the_hosts_arena_is_used_while_all_slots_on_the_device_are_in_use),
        cmocka_unit_test(a_stage_without_memory_on_the_device_uses_the_hosts),
        cmocka_unit_test(a_stage_whose_device_does_not_reach_the_hosts_memory_has_no_arena_there),
        cmocka_unit_test(a_stage_pins_as_much_of_the_hosts_arena_as_it_can),
        cmocka_unit_test(a_stage_that_can_pin_nothing_uses_the_arena_on_its_device),
        cmocka_unit_test(a_peer_without_an_arena_on_the_host_is_asked_for_slots_on_its_device),
        cmocka_unit_test(a_stage_that_wants_no_memory_on_the_device_has_none),
        cmocka_unit_test(slots_that_our_own_kernels_may_write_stay_in_doubt),
        cmocka_unit_test(slots_that_peers_keep_stay_in_doubt_while_our_own_kernels_may_write),
        cmocka_unit_test(a_lender_without_an_arena_on_its_device_refuses_by_name),
        cmocka_unit_test(an_arena_of_less_than_four_slots_is_refused),
    };
    return cmocka_run_group_tests_name("stage_arenas", tests, NULL, NULL);
}
