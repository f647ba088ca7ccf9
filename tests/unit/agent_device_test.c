/*
 * Agents whose caches are in device memory: pulls and pushes go packed, over any transport, or directly over "cuda", and
 * are compared cell by cell.
 */
#include "agent_on_devices.h"
#include "model/match.h"
#include "model/model.h"

static void pull_everything(world *w, const kvf_agent_options *options) {
    world_open_model(w, attention(4, 8, 8), TP2, TP4, options);
    world_pull_everything(w, "a request", 100, 1);
    const kvf_agent_stats stats = world_stats(w->d.agents[0]);
    assert_true(stats.bytes_packed > 0 && stats.bytes_packed == stats.bytes_read);
}

static void a_pull_goes_from_device_to_device(void **state) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = *state};
    world w;
    pull_everything(&w, &options);
    close_on_devices(&w);
}

static void a_pull_goes_from_device_to_host(void **state) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = *state};
    world w;
    placing.d_on_host = true;
    pull_everything(&w, &options);
    close_on_devices(&w);
}

static void a_pull_goes_from_host_to_device(void **state) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = *state};
    world w;
    placing.p_on_host = true;
    pull_everything(&w, &options);
    close_on_devices(&w);
}

static void push_everything(world *w, const kvf_agent_options *options) {
    world_request held, wanted;
    uint64_t pushes[WORLD_MAX_RANKS], expected[WORLD_MAX_RANKS];
    world_open_model(w, attention(4, 8, 8), TP2, TP4, options);
    world_request_make(w, &w->p, "a push", 50, 0, 1, &held);
    world_request_make(w, &w->d, "a push", 50, 0, 1, &wanted);
    world_fill(w, &w->p, &held, 1);
    assert_true(world_wrong_cells(w, &w->d, &wanted, 1) > 0);
    world_expect(&w->d, &wanted, &w->p, expected);
    world_push(&w->p, &held, pushes);
    world_ready(&w->p, pushes);
    world_all_done(w, &w->d, expected);
    world_all_done(w, &w->p, pushes);
    assert_int_equal(world_wrong_cells(w, &w->d, &wanted, 1), 0);
}

static void a_push_goes_from_device_to_device(void **state) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = *state};
    world w;
    push_everything(&w, &options);
    close_on_devices(&w);
}

static void a_pull_reads_the_producers_device_directly(void **state) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = *state};
    world w;
    placing.shown = true;
    world_open_model(&w, attention(4, 8, 8), TP2, TP4, &options);
    world_pull_everything(&w, "a request", 100, 1);
    const kvf_agent_stats stats = world_stats(w.d.agents[0]);
    assert_true(stats.bytes_read > 0);
    assert_int_equal(stats.bytes_packed, 0);
    close_on_devices(&w);
}

static void a_push_is_read_by_the_consumers_device(void **state) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = *state};
    world w;
    placing.shown = true;
    push_everything(&w, &options);
    assert_int_equal(world_stats(w.p.agents[0]).bytes_packed, 0);
    assert_true(world_stats(w.p.agents[0]).bytes_written > 0);
    close_on_devices(&w);
}

static void assert_all_packed(const world_engine *engine, const char *fabric) {
    kvf_agent_peer peers[2 * WORLD_MAX_RANKS] = {{.struct_size = sizeof *peers}};
    uint32_t count;
    for (uint32_t r = 0; r < engine->rank_count; r++) {
        const kvf_agent_stats stats = world_stats(engine->agents[r]);
        assert_true(stats.bytes_packed > 0 && stats.bytes_packed == stats.bytes_read + stats.bytes_written);
        assert_ok(kvf_agent_peers(engine->agents[r], peers, 2 * WORLD_MAX_RANKS, &count));
        for (uint32_t i = 0; i < count; i++)
            assert_string_equal(peers[i].fabric, fabric);
    }
}

/* P reads D's arenas over the connections that it made to write to D. In segments, P must fetch them first. */
static void a_consumer_that_was_written_to_packed_is_then_read(void **state) {
    const kvf_setting exportable = {"cuda.allocation", "exportable"};
    const bool in_segments = strcmp(*state, "segments") == 0;
    const char *kind = in_segments ? "cuda" : *state;
    const kvf_agent_options options = {.struct_size = sizeof options,
                                       .transport = kind,
                                       .settings = &exportable,
                                       .setting_count = in_segments};
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    push_everything(&w, &options);
    world_request_make(&w, &w.d, "back", 50, 10, 1, &held);
    world_request_make(&w, &w.p, "back", 50, 20, 1, &wanted);
    world_fill(&w, &w.d, &held, 2);
    world_hold(&w.d, &held, holds);
    world_pull(&w.p, &wanted, &w.d, pulls);
    world_all_done(&w, &w.p, pulls);
    world_all_done(&w, &w.d, holds);
    assert_int_equal(world_wrong_cells(&w, &w.p, &wanted, 2), 0);
    assert_all_packed(&w.p, kind);
    close_on_devices(&w);
}

/* ---- elements of other types ---------------------------------------------------------------------- */

static kvf_model *attention_of(kvf_dtype type) {
    kvf_model *plain = attention(4, 8, 8), *out = NULL;
    const kvf_dtype types[] = {type, type};
    assert_int_equal(kvf_model_part_count(plain), 2);
    assert_ok(kvf_model_retype(plain, types, &out));
    kvf_model_free(plain);
    return out;
}

/* The engines keep their caches in these types. Peers are shown the memory. */
static void open_unlike(world *w, kvf_dtype p_type, const kvf_engine_spec *d, kvf_dtype d_type,
                        const kvf_agent_options *options) {
    placing.shown = true;
    world_open_model(w, attention_of(p_type), TP2, d, options);
    world_close_agents(&w->d);
    kvf_engine_free(w->d.engine);
    kvf_model *other = attention_of(d_type);
    w->d.engine = engine_of(other, d);
    kvf_model_free(other);
    world_open_agents(&w->d, options);
}

/* The memory is shown, so "cuda" connects the peers: the elements go through arenas on the devices. */
static void convert_between_devices(const char *transport, kvf_dtype p_type, kvf_dtype d_type) {
    const kvf_agent_options options = {
        .struct_size = sizeof options, .transport = transport, .convert = KVF_CONVERTED_DTYPES};
    const size_t left = devices_left();
    world w;
    world_request held, wanted;
    uint64_t pushes[WORLD_MAX_RANKS], expected[WORLD_MAX_RANKS];
    open_unlike(&w, p_type, TP4, d_type, &options);
    world_filled_as(kvf_engine_model(w.p.engine));
    world_pull_everything(&w, "a pull", 100, 1);
    assert_all_packed(&w.d, "cuda");
    world_request_make(&w, &w.p, "a push", 50, 10, 1, &held);
    world_request_make(&w, &w.d, "a push", 50, 20, 1, &wanted);
    world_fill(&w, &w.p, &held, 2);
    assert_true(world_wrong_cells(&w, &w.d, &wanted, 2) > 0);
    world_expect(&w.d, &wanted, &w.p, expected);
    world_push(&w.p, &held, pushes);
    world_ready(&w.p, pushes);
    world_all_done(&w, &w.d, expected);
    world_all_done(&w, &w.p, pushes);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 2), 0);
    assert_all_packed(&w.p, "cuda");
    world_filled_as(NULL);
    close_on_devices(&w);
    assert_int_equal(devices_left(), left);
}

static void elements_are_converted_between_devices(void **state) {
    convert_between_devices(*state, KVF_DTYPE_BF16, KVF_DTYPE_F32);
    convert_between_devices(*state, KVF_DTYPE_BF16, KVF_DTYPE_F8_E4M3);
    convert_between_devices(*state, KVF_DTYPE_F8_E5M2, KVF_DTYPE_F16);
}

/* The control: without an arena on its device, a rank that "cuda" connects cannot convert, and says so. */
static void without_an_arena_on_a_device_a_conversion_over_it_is_refused(void **state) {
    (void)state;
    const kvf_agent_options options = {.struct_size = sizeof options,
                                       .transport = "cuda",
                                       .convert = KVF_CONVERTED_DTYPES,
                                       .device_arena_bytes = KVF_NO_DEVICE_ARENA};
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    open_unlike(&w, KVF_DTYPE_BF16, TP2_D, KVF_DTYPE_F32, &options);
    world_request_make(&w, &w.p, "a", 50, 0, 1, &held);
    world_request_make(&w, &w.d, "a", 50, 0, 1, &wanted);
    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &wanted, &w.p, pulls);
    for (uint32_t r = 0; r < w.d.rank_count; r++)
        assert_non_null(
            strstr(world_failed(&w, w.d.agents[r], pulls[r], KVF_E_UNSUPPORTED)->detail, "has no stage"));
    for (uint32_t r = 0; r < w.p.rank_count; r++)
        assert_ok(kvf_agent_cancel(w.p.agents[r], holds[r]));
    close_on_devices(&w);
}

/* ---- peers that "cuda" does not reach ------------------------------------------------------------- */

/* How many peers an agent reads from, or writes to, over a fabric; each that is not "cuda" says why. */
static uint32_t peers_over(kvf_agent *agent, kvf_peer_role role, bool cuda) {
    kvf_agent_peer peers[2 * WORLD_MAX_RANKS] = {{.struct_size = sizeof *peers}};
    uint32_t count, found = 0;
    assert_ok(kvf_agent_peers(agent, peers, 2 * WORLD_MAX_RANKS, &count));
    for (uint32_t i = 0; i < count; i++) {
        const kvf_agent_peer *peer = &peers[i];
        if (peer->role != role || !peer->fabric[0])
            continue;
        const bool is_cuda = strcmp(peer->fabric, "cuda") == 0;
        found += is_cuda == cuda;
        if (is_cuda)
            assert_int_equal(peer->bytes_packed, 0);
        else
            assert_non_null(strstr(peer->passed_over, "asking what a device reaches"));
        if (!is_cuda)
            assert_true(peer->bytes_packed > 0);
    }
    return found;
}

/* The devices do not reach each other: what would be read directly goes through arenas, and is said to. */
static void a_pull_goes_packed_where_the_devices_do_not_reach_each_other(void **state) {
    (void)state;
    world w;
    DEVICES_ARE_SEVERAL();
    placing.shown = true;
    devices_fail("cuDeviceCanAccessPeer", CUDA_ERROR_NOT_SUPPORTED, UINT32_MAX);
    pull_everything(&w, NULL);
    for (uint32_t r = 0; r < w.d.rank_count; r++) {
        assert_true(peers_over(w.d.agents[r], KVF_PEER_PRODUCER, false) > 0);
        assert_int_equal(peers_over(w.d.agents[r], KVF_PEER_PRODUCER, true), 0);
    }
    devices_fail("", 0, 0);
    close_on_devices(&w);
}

static void a_push_goes_packed_where_the_devices_do_not_reach_each_other(void **state) {
    (void)state;
    world w;
    DEVICES_ARE_SEVERAL();
    placing.shown = true;
    devices_fail("cuDeviceCanAccessPeer", CUDA_ERROR_NOT_SUPPORTED, UINT32_MAX);
    push_everything(&w, NULL);
    for (uint32_t r = 0; r < w.p.rank_count; r++) {
        const kvf_agent_stats stats = world_stats(w.p.agents[r]);
        assert_true(stats.bytes_packed > 0 && stats.bytes_packed == stats.bytes_written);
        assert_true(peers_over(w.p.agents[r], KVF_PEER_CONSUMER, false) > 0);
        assert_int_equal(peers_over(w.p.agents[r], KVF_PEER_CONSUMER, true), 0);
    }
    devices_fail("", 0, 0);
    close_on_devices(&w);
}

/* Each rank of D reads from two of P, and one of these four connections is refused. */
static void one_peer_that_is_not_reached_goes_packed_and_others_go_directly(void **state) {
    (void)state;
    world w;
    uint32_t direct = 0, packed = 0;
    DEVICES_ARE_SEVERAL();
    placing.shown = true;
    devices_fail("cuDeviceCanAccessPeer", CUDA_ERROR_NOT_SUPPORTED, 1);
    world_open_model(&w, attention(4, 8, 8), ENGINE(.name = "P", .tp_size = 4, .all = {.block_count = 64}),
                     ENGINE(.name = "D", .tp_size = 2, .all = {.block_count = 64, .order = "BLHNP"}), NULL);
    world_pull_everything(&w, "a request", 100, 1);
    for (uint32_t r = 0; r < w.d.rank_count; r++) {
        const kvf_agent_stats stats = world_stats(w.d.agents[r]);
        const uint32_t here = peers_over(w.d.agents[r], KVF_PEER_PRODUCER, false);
        assert_int_equal(stats.bytes_packed, here * stats.bytes_read / 2);
        packed += here;
        direct += peers_over(w.d.agents[r], KVF_PEER_PRODUCER, true);
    }
    assert_int_equal(packed, 1);
    assert_int_equal(direct, 3);
    devices_fail("", 0, 0);
    close_on_devices(&w);
}

static void a_pull_goes_packed_from_a_shown_device_to_the_host(void **state) {
    (void)state;
    world w;
    placing.shown = placing.d_on_host = true;
    pull_everything(&w, NULL);
    close_on_devices(&w);
}

static void a_push_goes_packed_between_the_host_and_a_shown_device(void **state) {
    world w;
    placing.shown = true;
    *(strcmp(*state, "p") == 0 ? &placing.p_on_host : &placing.d_on_host) = true;
    push_everything(&w, NULL);
    const kvf_agent_stats stats = world_stats(w.p.agents[0]);
    assert_true(stats.bytes_packed > 0 && stats.bytes_packed == stats.bytes_written);
    close_on_devices(&w);
}

/* "cuda" would reach the peers. Where one side alone wants it packed, the other is shown nothing and follows. */
static void an_agent_whose_way_is_packed_shows_no_memory_of_devices(void **state) {
    const kvf_agent_options packed = {.struct_size = sizeof packed, .way = KVF_WAY_PACKED};
    world w;
    placing.shown = true;
    world_open_model(&w, attention(4, 8, 8), TP2, TP4, NULL);
    for (const char *side = *state; *side; side++) {
        world_engine *engine = *side == 'P' ? &w.p : &w.d;
        world_close_agents(engine);
        world_forget(&w);
        world_open_agents(engine, &packed);
    }
    world_pull_everything(&w, "a request", 100, 1);
    const kvf_agent_stats stats = world_stats(w.d.agents[0]);
    if (strlen(*state) > 0)
        assert_true(stats.bytes_packed > 0 && stats.bytes_packed == stats.bytes_read);
    else /* the control */
        assert_true(stats.bytes_packed == 0 && stats.bytes_read > 0);
    close_on_devices(&w);
}

/* Such a shard has no stage: it cannot go packed, and goes directly as before. */
static void a_shard_on_two_devices_is_read_into_directly(void **state) {
    (void)state;
    world w;
    DEVICES_ARE_SEVERAL();
    placing.shown = placing.d_on_both = true;
    world_open_model(&w, attention(4, 8, 8), TP2, TP2_D, NULL);
    world_pull_everything(&w, "a request", 100, 1);
    const kvf_agent_stats stats = world_stats(w.d.agents[0]);
    assert_true(stats.bytes_read > 0);
    assert_int_equal(stats.bytes_packed, 0);
    close_on_devices(&w);
}

int main(void) {
    static char shm[] = "shm", messages[] = "messages", cuda[] = "cuda", automatic[] = "auto", p[] = "p",
                d[] = "d", none[] = "", segments[] = "segments", only_p[] = "P", only_d[] = "D",
                both[] = "PD";
    const struct CMUnitTest tests[] = {
        {"a_pull_goes_from_device_to_device (shm)", a_pull_goes_from_device_to_device, NULL, NULL, shm},
        {"a_pull_goes_from_device_to_device (messages)", a_pull_goes_from_device_to_device, NULL, NULL,
         messages},
        {"a_pull_goes_from_device_to_host (shm)", a_pull_goes_from_device_to_host, NULL, NULL, shm},
        {"a_pull_goes_from_device_to_host (messages)", a_pull_goes_from_device_to_host, NULL, NULL, messages},
        {"a_pull_goes_from_host_to_device (shm)", a_pull_goes_from_host_to_device, NULL, NULL, shm},
        {"a_pull_goes_from_host_to_device (messages)", a_pull_goes_from_host_to_device, NULL, NULL, messages},
        {"a_push_goes_from_device_to_device (shm)", a_push_goes_from_device_to_device, NULL, NULL, shm},
        {"a_push_goes_from_device_to_device (messages)", a_push_goes_from_device_to_device, NULL, NULL,
         messages},
        {"a_pull_reads_the_producers_device_directly (cuda)", a_pull_reads_the_producers_device_directly,
         NULL, NULL, cuda},
        {"a_pull_reads_the_producers_device_directly (auto)", a_pull_reads_the_producers_device_directly,
         NULL, NULL, automatic},
        {"a_push_is_read_by_the_consumers_device (cuda)", a_push_is_read_by_the_consumers_device, NULL, NULL,
         cuda},
        {"a_push_is_read_by_the_consumers_device (auto)", a_push_is_read_by_the_consumers_device, NULL, NULL,
         automatic},
        {"a_consumer_that_was_written_to_packed_is_then_read (cuda)",
         a_consumer_that_was_written_to_packed_is_then_read, NULL, NULL, cuda},
        {"a_consumer_that_was_written_to_packed_is_then_read (segments)",
         a_consumer_that_was_written_to_packed_is_then_read, NULL, NULL, segments},
        {"a_consumer_that_was_written_to_packed_is_then_read (shm)",
         a_consumer_that_was_written_to_packed_is_then_read, NULL, NULL, shm},
        {"elements_are_converted_between_devices (cuda)", elements_are_converted_between_devices, NULL, NULL,
         cuda},
        {"elements_are_converted_between_devices (auto)", elements_are_converted_between_devices, NULL, NULL,
         automatic},
        cmocka_unit_test(without_an_arena_on_a_device_a_conversion_over_it_is_refused),
        cmocka_unit_test(a_pull_goes_packed_where_the_devices_do_not_reach_each_other),
        cmocka_unit_test(a_push_goes_packed_where_the_devices_do_not_reach_each_other),
        cmocka_unit_test(one_peer_that_is_not_reached_goes_packed_and_others_go_directly),
        cmocka_unit_test(a_pull_goes_packed_from_a_shown_device_to_the_host),
        {"an_agent_whose_way_is_packed_shows_no_memory_of_devices (none)",
         an_agent_whose_way_is_packed_shows_no_memory_of_devices, NULL, NULL, none},
        {"an_agent_whose_way_is_packed_shows_no_memory_of_devices (P)",
         an_agent_whose_way_is_packed_shows_no_memory_of_devices, NULL, NULL, only_p},
        {"an_agent_whose_way_is_packed_shows_no_memory_of_devices (D)",
         an_agent_whose_way_is_packed_shows_no_memory_of_devices, NULL, NULL, only_d},
        {"an_agent_whose_way_is_packed_shows_no_memory_of_devices (both)",
         an_agent_whose_way_is_packed_shows_no_memory_of_devices, NULL, NULL, both},
        cmocka_unit_test(a_shard_on_two_devices_is_read_into_directly),
        {"a_push_goes_packed_between_the_host_and_a_shown_device (P on the host)",
         a_push_goes_packed_between_the_host_and_a_shown_device, NULL, NULL, p},
        {"a_push_goes_packed_between_the_host_and_a_shown_device (D on the host)",
         a_push_goes_packed_between_the_host_and_a_shown_device, NULL, NULL, d},
    };
    if (!devices_are_there_for_agents())
        return 77;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
