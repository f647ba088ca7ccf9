/*
 * Agents whose caches are in device memory, of the stand-in for the CUDA driver or of a real one (scripts/check-cuda):
 * pulls and pushes go packed, over any transport, or directly over "cuda", and are compared cell by cell.
 */
#include <poll.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "agent/agent.h"
#include "agent/session.h"
#include "agent_letters.h"
#include "agent_world.h"
#include "cuda/device_image.h"
#include "devices.h"

#define TP2 ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64})
#define TP4                                                                                                  \
    ENGINE(.name = "D", .tp_size = 4, .all = {.tokens_per_block = 8, .block_count = 128, .order = "BLHNP"})

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define TP2_D ENGINE(.name = "D", .tp_size = 2, .all = {.block_count = 64, .order = "L|BPHN"})

/* P on the first device and D on the second, unless they are to be on the host. */
static bool p_on_host, d_on_host;
/* Device memory is not withheld. */
static bool shown;
/* D's regions are on the second device and the first in turn. */
static bool d_on_both;
static uint32_t d_placed;

static kvf_memory place(const char *engine, uint64_t bytes, void **seen) {
    const bool is_p = engine[0] == 'P';
    if (is_p ? p_on_host : d_on_host) {
        *seen = calloc(1, bytes);
        assert_non_null(*seen);
        return (kvf_memory){.struct_size = sizeof(kvf_memory), .address = *seen, .bytes = bytes};
    }
    const uint32_t d_device = d_on_both && d_placed++ % 2 ? 0 : 1;
    kvf_memory memory = device_memory(is_p ? 0 : d_device, bytes, seen);
    memory.withheld = !shown;
    return memory;
}

static void free_host(world_engine *engine) {
    for (uint32_t r = 0; r < WORLD_MAX_RANKS; r++)
        for (uint32_t i = 0; i < WORLD_MAX_REGIONS; i++) {
            free(engine->memory[r][i]);
            engine->memory[r][i] = NULL;
        }
}

static void close_all(world *w) {
    devices_hasten(); /* a real driver frees memory only when no work is left */
    world_quiet(w);
    world_engine p = w->p, d = w->d;
    world_close(w);
    if (p_on_host)
        free_host(&p);
    if (d_on_host)
        free_host(&d);
    devices_free();
    p_on_host = d_on_host = shown = d_on_both = false;
}

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
    close_all(&w);
}

static void a_pull_goes_from_device_to_host(void **state) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = *state};
    world w;
    d_on_host = true;
    pull_everything(&w, &options);
    close_all(&w);
}

static void a_pull_goes_from_host_to_device(void **state) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = *state};
    world w;
    p_on_host = true;
    pull_everything(&w, &options);
    close_all(&w);
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
    close_all(&w);
}

static void a_pull_reads_the_producers_device_directly(void **state) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = *state};
    world w;
    shown = true;
    world_open_model(&w, attention(4, 8, 8), TP2, TP4, &options);
    world_pull_everything(&w, "a request", 100, 1);
    const kvf_agent_stats stats = world_stats(w.d.agents[0]);
    assert_true(stats.bytes_read > 0);
    assert_int_equal(stats.bytes_packed, 0);
    close_all(&w);
}

static void a_push_is_read_by_the_consumers_device(void **state) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = *state};
    world w;
    shown = true;
    push_everything(&w, &options);
    assert_int_equal(world_stats(w.p.agents[0]).bytes_packed, 0);
    assert_true(world_stats(w.p.agents[0]).bytes_written > 0);
    close_all(&w);
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
    close_all(&w);
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

/* P keeps its cache in bf16, D in f32. Peers are shown the memory. */
static void open_unlike(world *w, const kvf_engine_spec *d, const kvf_agent_options *options) {
    shown = true;
    world_open_model(w, attention_of(KVF_DTYPE_BF16), TP2, d, options);
    world_close_agents(&w->d);
    kvf_engine_free(w->d.engine);
    kvf_model *wide = attention_of(KVF_DTYPE_F32);
    w->d.engine = engine_of(wide, d);
    kvf_model_free(wide);
    world_open_agents(&w->d, options);
}

/* The memory is shown, so "cuda" connects the peers: the elements go through arenas on the devices. */
static void elements_are_converted_between_devices(void **state) {
    const kvf_agent_options options = {
        .struct_size = sizeof options, .transport = *state, .convert = KVF_CONVERTED_DTYPES};
    const size_t left = devices_left();
    world w;
    world_request held, wanted;
    uint64_t pushes[WORLD_MAX_RANKS], expected[WORLD_MAX_RANKS];
    open_unlike(&w, TP4, &options);
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
    close_all(&w);
    assert_int_equal(devices_left(), left);
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
    open_unlike(&w, TP2_D, &options);
    world_request_make(&w, &w.p, "a", 50, 0, 1, &held);
    world_request_make(&w, &w.d, "a", 50, 0, 1, &wanted);
    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &wanted, &w.p, pulls);
    for (uint32_t r = 0; r < w.d.rank_count; r++)
        assert_non_null(
            strstr(world_failed(&w, w.d.agents[r], pulls[r], KVF_E_UNSUPPORTED)->detail, "has no stage"));
    for (uint32_t r = 0; r < w.p.rank_count; r++)
        assert_ok(kvf_agent_cancel(w.p.agents[r], holds[r]));
    close_all(&w);
}

/* ---- peers that "cuda" does not reach ------------------------------------------------------------- */

#define NOT_SUPPORTED 801

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
            assert_non_null(strstr(peer->passed_over, "cuda: asking what a device reaches"));
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
    shown = true;
    devices_fail("cuDeviceCanAccessPeer", NOT_SUPPORTED, UINT32_MAX);
    pull_everything(&w, NULL);
    for (uint32_t r = 0; r < w.d.rank_count; r++) {
        assert_true(peers_over(w.d.agents[r], KVF_PEER_PRODUCER, false) > 0);
        assert_int_equal(peers_over(w.d.agents[r], KVF_PEER_PRODUCER, true), 0);
    }
    devices_fail("", 0, 0);
    close_all(&w);
}

static void a_push_goes_packed_where_the_devices_do_not_reach_each_other(void **state) {
    (void)state;
    world w;
    DEVICES_ARE_SEVERAL();
    shown = true;
    devices_fail("cuDeviceCanAccessPeer", NOT_SUPPORTED, UINT32_MAX);
    push_everything(&w, NULL);
    for (uint32_t r = 0; r < w.p.rank_count; r++) {
        const kvf_agent_stats stats = world_stats(w.p.agents[r]);
        assert_true(stats.bytes_packed > 0 && stats.bytes_packed == stats.bytes_written);
        assert_true(peers_over(w.p.agents[r], KVF_PEER_CONSUMER, false) > 0);
        assert_int_equal(peers_over(w.p.agents[r], KVF_PEER_CONSUMER, true), 0);
    }
    devices_fail("", 0, 0);
    close_all(&w);
}

/* Each rank of D reads from two of P, and one of these four connections is refused. */
static void one_peer_that_is_not_reached_goes_packed_and_others_go_directly(void **state) {
    (void)state;
    world w;
    uint32_t direct = 0, packed = 0;
    DEVICES_ARE_SEVERAL();
    shown = true;
    devices_fail("cuDeviceCanAccessPeer", NOT_SUPPORTED, 1);
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
    close_all(&w);
}

static void a_pull_goes_packed_from_a_shown_device_to_the_host(void **state) {
    (void)state;
    world w;
    shown = d_on_host = true;
    pull_everything(&w, NULL);
    close_all(&w);
}

static void a_push_goes_packed_between_the_host_and_a_shown_device(void **state) {
    world w;
    shown = true;
    *(strcmp(*state, "p") == 0 ? &p_on_host : &d_on_host) = true;
    push_everything(&w, NULL);
    const kvf_agent_stats stats = world_stats(w.p.agents[0]);
    assert_true(stats.bytes_packed > 0 && stats.bytes_packed == stats.bytes_written);
    close_all(&w);
}

/* "cuda" would reach the peers. Where one side alone wants it packed, the other is shown nothing and follows. */
static void an_agent_whose_way_is_packed_shows_no_memory_of_devices(void **state) {
    const kvf_agent_options packed = {.struct_size = sizeof packed, .way = KVF_WAY_PACKED};
    world w;
    shown = true;
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
    close_all(&w);
}

/* Such a shard has no stage: it cannot go packed, and goes directly as before. */
static void a_shard_on_two_devices_is_read_into_directly(void **state) {
    (void)state;
    world w;
    DEVICES_ARE_SEVERAL();
    shown = d_on_both = true;
    world_open_model(&w, attention(4, 8, 8), TP2, TP2_D, NULL);
    world_pull_everything(&w, "a request", 100, 1);
    const kvf_agent_stats stats = world_stats(w.d.agents[0]);
    assert_true(stats.bytes_read > 0);
    assert_int_equal(stats.bytes_packed, 0);
    close_all(&w);
}

/* ---- events of streams ---------------------------------------------------------------------------- */

#define HOUR_NS 3600000000000ull
#define OUT_OF_MEMORY 2
#define ILLEGAL_ADDRESS 700
#define OLD 9u
#define NEW 2u

/* The priority of streams that are held up. Kvferry's have another, so that they do not wait in the same queue. */
#define HIGH (-1)

/* Work on a stream, after which the blocks are written. */
typedef struct work_on_stream {
    const kvf_cuda *cuda;
    CUstream stream;
    CUevent event;
    kvf_ready_event ready;
} work_on_stream;

static void work_begin(work_on_stream *work) {
    assert_int_equal(kvf_cuda_enter(0, &work->cuda), KVF_OK);
    assert_int_equal(work->cuda->cuStreamCreateWithPriority(&work->stream, CU_STREAM_NON_BLOCKING, HIGH), 0);
    assert_int_equal(work->cuda->cuEventCreate(&work->event, CU_EVENT_DISABLE_TIMING), 0);
    devices_hold_up(work->cuda, work->stream);
    assert_int_equal(work->cuda->cuEventRecord(work->event, work->stream), 0);
    devices_delay(0);
    kvf_cuda_leave(work->cuda);
    work->ready = (kvf_ready_event){
        .struct_size = sizeof work->ready, .kind = KVF_READY_CUDA_EVENT, .device_event = work->event};
}

/* Records the event anew, behind work that never ends, and destroys it. */
static void event_drop(work_on_stream *work) {
    CUstream other = NULL;
    assert_int_equal(kvf_cuda_enter(0, &work->cuda), KVF_OK);
    assert_int_equal(work->cuda->cuStreamCreateWithPriority(&other, CU_STREAM_NON_BLOCKING, HIGH), 0);
    devices_hold_up(work->cuda, other);
    assert_int_equal(work->cuda->cuEventRecord(work->event, other), 0);
    devices_delay(0);
    assert_int_equal(work->cuda->cuEventDestroy_v2(work->event), 0);
    assert_int_equal(work->cuda->cuStreamDestroy_v2(other), 0);
    kvf_cuda_leave(work->cuda);
}

static void work_end(work_on_stream *work) {
    assert_int_equal(kvf_cuda_enter(0, &work->cuda), KVF_OK);
    assert_int_equal(work->cuda->cuStreamDestroy_v2(work->stream), 0);
    kvf_cuda_leave(work->cuda);
}

/* Opens a request whose blocks have old content until the work of a stream is done. */
static void open_behind_work(world *w, const kvf_agent_options *options, work_on_stream *work,
                             world_request *held, world_request *wanted) {
    shown = strcmp(options->transport, "cuda") == 0;
    world_open_model(w, attention(4, 8, 8), TP2, TP4, options);
    world_request_make(w, &w->p, "a", 50, 0, 1, held);
    world_request_make(w, &w->d, "a", 50, 0, 1, wanted);
    world_fill(w, &w->p, held, OLD);
    work_begin(work);
    held->request.after = &work->ready;
}

static void a_hold_is_not_read_before_an_event_of_a_stream(void **state) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = *state};
    const size_t left = devices_left();
    world w;
    world_request held, wanted;
    work_on_stream work;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    open_behind_work(&w, &options, &work, &held, &wanted);
    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &wanted, &w.p, pulls);
    world_run_for(&w, SECOND);
    assert_int_equal(world_stats(w.d.agents[0]).bytes_read, 0);
    world_fill(&w, &w.p, &held, NEW);
    devices_hasten();
    event_drop(&work); /* the event counts as it was recorded before the call */
    world_all_done(&w, &w.d, pulls);
    world_all_done(&w, &w.p, holds);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, NEW), 0);
    work_end(&work);
    close_all(&w);
    devices_hasten();
    assert_int_equal(devices_left(), left);
}

static void a_push_does_not_begin_before_an_event_of_a_stream(void **state) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = *state};
    world w;
    world_request held, wanted;
    work_on_stream work;
    uint64_t pushes[WORLD_MAX_RANKS], expected[WORLD_MAX_RANKS];
    open_behind_work(&w, &options, &work, &held, &wanted);
    world_expect(&w.d, &wanted, &w.p, expected);
    world_push(&w.p, &held, pushes);
    world_ready(&w.p, pushes);
    world_run_for(&w, SECOND);
    assert_int_equal(world_stats(w.p.agents[0]).bytes_written, 0);
    world_fill(&w, &w.p, &held, NEW);
    devices_hasten();
    world_all_done(&w, &w.d, expected);
    world_all_done(&w, &w.p, pushes);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, NEW), 0);
    event_drop(&work);
    work_end(&work);
    close_all(&w);
}

static void an_error_of_the_device_ends_what_waits_for_its_event(void **state) {
    (void)state;
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = "shm"};
    world w;
    world_request held;
    work_on_stream work;
    uint64_t holds[WORLD_MAX_RANKS];
    DEVICES_ARE_STAND_INS();
    world_open_model(&w, attention(4, 8, 8), TP2, TP4, &options);
    world_request_make(&w, &w.p, "a", 50, 0, 1, &held);
    work_begin(&work);
    held.request.after = &work.ready;
    world_hold(&w.p, &held, holds);
    devices_stick(ILLEGAL_ADDRESS);
    for (uint32_t r = 0; r < w.p.rank_count; r++)
        assert_non_null(strstr(world_failed(&w, w.p.agents[r], holds[r], KVF_E_IO)->detail,
                               "this process cannot use the device any more"));
    devices_stick(0);
    devices_hasten();
    event_drop(&work);
    work_end(&work);
    close_all(&w);
}

/* Makes progress while the descriptor of an agent is readable, also after some milliseconds. */
static void assert_falls_silent(kvf_agent *agent) {
    struct pollfd fd = {kvf_agent_event_fd(agent), POLLIN, 0};
    kvf_event event = {.struct_size = sizeof event};
    for (uint32_t rounds = 0; poll(&fd, 1, 10) > 0; rounds++) {
        assert_true(rounds < 10000);
        assert_ok(kvf_agent_progress(agent, NULL));
        while (kvf_agent_next_event(agent, &event) == KVF_OK) {
        }
    }
}

static void an_agent_looks_at_a_stream_that_a_hold_waits_for_and_then_falls_silent(void **state) {
    (void)state;
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = "shm"};
    world w;
    world_request held, wanted;
    work_on_stream work;
    uint64_t holds[WORLD_MAX_RANKS];
    open_behind_work(&w, &options, &work, &held, &wanted);
    assert_falls_silent(w.p.agents[0]);
    world_hold(&w.p, &held, holds);
    struct pollfd fd = {kvf_agent_event_fd(w.p.agents[0]), POLLIN, 0};
    for (uint32_t i = 0; i < 20; i++) { /* meanwhile it looks again and again */
        assert_int_equal(poll(&fd, 1, 10000), 1);
        assert_ok(kvf_agent_progress(w.p.agents[0], NULL));
    }
    assert_int_equal(w.p.agents[0]->looks.pause_ns, MS); /* its pauses have grown as far as they may */
    for (uint32_t r = 0; r < w.p.rank_count; r++)
        assert_ok(kvf_agent_cancel(w.p.agents[r], holds[r]));
    for (uint32_t r = 0; r < w.p.rank_count; r++)
        assert_falls_silent(w.p.agents[r]);
    devices_hasten();
    event_drop(&work);
    work_end(&work);
    close_all(&w);
}

/* The first request of each rank waits for the stream, the second one for a descriptor. */
static void an_agent_does_not_look_for_what_a_descriptor_tells_it(void **state) {
    (void)state;
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = "shm"};
    const int fd = eventfd(0, EFD_CLOEXEC);
    const kvf_ready_event told = {.struct_size = sizeof told, .kind = KVF_READY_FD, .fd = fd};
    world w;
    world_request held, wanted;
    work_on_stream work;
    uint64_t first[WORLD_MAX_RANKS], second[WORLD_MAX_RANKS];
    open_behind_work(&w, &options, &work, &held, &wanted);
    world_hold(&w.p, &held, first);
    held.request.after = &told;
    held.request.id = (kvf_request_id){"b", 1};
    world_hold(&w.p, &held, second);
    devices_hasten();
    for (uint32_t r = 0; r < w.p.rank_count; r++)
        assert_falls_silent(w.p.agents[r]);
    for (uint32_t r = 0; r < w.p.rank_count; r++) {
        assert_ok(kvf_agent_cancel(w.p.agents[r], first[r]));
        assert_ok(kvf_agent_cancel(w.p.agents[r], second[r]));
    }
    (void)close(fd);
    event_drop(&work);
    work_end(&work);
    close_all(&w);
}

/* The hold ends with its lease, and says why; other requests go on meanwhile. */
static void a_hold_behind_a_stream_that_never_ends_ends_with_its_lease(void **state) {
    (void)state;
    const kvf_agent_options options = {
        .struct_size = sizeof options, .transport = "shm", .lease_ns = 5 * SECOND};
    const size_t left = devices_left();
    world w;
    world_request held, wanted;
    work_on_stream work;
    uint64_t holds[WORLD_MAX_RANKS];
    open_behind_work(&w, &options, &work, &held, &wanted);
    held.groups[0].table.ids = (const uint32_t[]){16, 17, 18, 19}; /* not the blocks of the other request */
    world_hold(&w.p, &held, holds);
    world_pull_everything(&w, "another", 40, 5);
    world_time_jumps();
    for (uint32_t r = 0; r < w.p.rank_count; r++)
        assert_non_null(strstr(world_failed(&w, w.p.agents[r], holds[r], KVF_E_TIMEOUT)->detail, "event"));
    devices_hasten();
    event_drop(&work);
    work_end(&work);
    close_all(&w);
    devices_hasten();
    assert_int_equal(devices_left(), left);
}

/* The agent goes on meanwhile. */
static void blocks_stay_in_doubt_while_a_device_that_hangs_may_write_them(void **state) {
    (void)state;
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = "shm"};
    world w;
    world_request held, wanted, other_held, other;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS], lent[WORLD_MAX_RANKS], read[WORLD_MAX_RANKS];
    DEVICES_ARE_STAND_INS();
    d_on_host = true;
    world_open_model(&w, attention(4, 8, 8), TP2, TP4, &options);
    world_request_make(&w, &w.p, "a", 50, 0, 1, &held);
    world_request_make(&w, &w.d, "a", 50, 0, 1, &wanted);
    world_request_make(&w, &w.d, "b", 50, 4, 3, &other_held);
    world_request_make(&w, &w.p, "b", 50, 4, 3, &other);
    world_hold(&w.p, &held, holds);
    world_hold(&w.d, &other_held, lent);
    devices_delay(HOUR_NS);
    world_pull(&w.p, &other, &w.d, read); /* scattered by the devices of P, which hang */
    world_run_for(&w, SECOND);
    devices_delay(0);
    for (uint32_t r = 0; r < w.p.rank_count; r++)
        assert_ok(kvf_agent_cancel(w.p.agents[r], read[r]));
    for (uint32_t r = 0; r < w.p.rank_count; r++) {
        assert_false(world_failed(&w, w.p.agents[r], read[r], KVF_E_CANCELLED)->blocks_free);
        assert_true(world_stats(w.p.agents[r]).blocks_in_doubt_now > 0);
    }
    for (uint32_t r = 0; r < w.d.rank_count; r++)
        assert_ok(kvf_agent_cancel(w.d.agents[r], lent[r]));
    for (uint32_t r = 0; r < w.d.rank_count; r++)
        (void)world_next(&w, w.d.agents[r], lent[r]);
    devices_hasten();
    for (uint32_t r = 0; r < w.p.rank_count; r++)
        assert_int_equal(world_next(&w, w.p.agents[r], read[r])->kind, KVF_EVENT_BLOCKS_FREE);
    world_pull(&w.d, &wanted, &w.p, pulls);
    world_all_done(&w, &w.d, pulls);
    for (uint32_t r = 0; r < w.p.rank_count; r++)
        (void)world_next(&w, w.p.agents[r], holds[r]);
    close_all(&w);
}

/* The session of a peer ends while the device that reads from it hangs. The agent's thread once waited for the device,
 * and then took its blocks for free. */
static void the_end_of_a_session_does_not_wait_for_a_device_that_hangs(void **state) {
    (void)state;
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = "cuda"};
    world w;
    world_request held, wanted, other_held, other;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS], lent[WORLD_MAX_RANKS], read[WORLD_MAX_RANKS];
    DEVICES_ARE_STAND_INS();
    shown = true;
    world_open_model(&w, attention(4, 8, 8), ONE("P"), ONE("D"), &options);
    world_request_make(&w, &w.p, "a", 50, 0, 1, &held);
    world_request_make(&w, &w.d, "a", 50, 0, 1, &wanted);
    world_request_make(&w, &w.d, "b", 50, 8, 3, &other_held);
    world_request_make(&w, &w.p, "b", 50, 8, 3, &other);
    world_hold(&w.p, &held, holds);
    world_hold(&w.d, &other_held, lent);
    devices_delay(HOUR_NS);
    world_pull(&w.d, &wanted, &w.p, pulls); /* read by D's device, which hangs */
    world_run_for(&w, SECOND);
    devices_delay(0);
    kvf_agent *d = w.d.agents[0];
    kvf_session *session = world_session(d, false);
    const uint64_t begun = kvf_now(&kvf_monotonic);
    world_lose(d, session);
    assert_false(world_failed(&w, d, pulls[0], KVF_E_PEER_LOST)->blocks_free);
    world_pull(&w.p, &other, &w.d, read); /* by P's device */
    world_all_done(&w, &w.p, read);
    world_all_done(&w, &w.d, lent);
    assert_true(kvf_now(&kvf_monotonic) - begun < 10 * SECOND);
    assert_true(world_stats(d).blocks_in_doubt_now > 0);
    devices_hasten();
    assert_int_equal(world_next(&w, d, pulls[0])->kind, KVF_EVENT_BLOCKS_FREE);
    (void)world_next(&w, w.p.agents[0], holds[0]);
    close_all(&w);
}

static kvf_stage_info stage_info_of(const kvf_agent *agent) {
    kvf_stage_info info = {.struct_size = sizeof info};
    assert_ok(kvf_stage_get_info(agent->stage, &info));
    return info;
}

/* P dies while D's device is busy, which reads from P, and fills, from P's memory, slots that D has lent to P. The
 * agents' link notices first: the transport does not report P as lost while it reads. The slots once were free at once,
 * and then filled under another peer's flow. */
static void slots_stay_in_doubt_while_a_device_fills_them_for_a_peer_that_died(void **state) {
    (void)state;
    const kvf_agent_options options = {
        .struct_size = sizeof options, .transport = "cuda", .lease_ns = 20 * SECOND};
    world w;
    world_request held, wanted, pushed, expected;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS], pushes[WORLD_MAX_RANKS],
        expects[WORLD_MAX_RANKS];
    DEVICES_ARE_STAND_INS();
    shown = true;
    world_open_model(&w, attention(4, 8, 8), ONE("P"), ONE("D"), &options);
    world_request_make(&w, &w.p, "a", 50, 0, 1, &held);
    world_request_make(&w, &w.d, "a", 50, 0, 1, &wanted);
    world_request_make(&w, &w.p, "b", 50, 8, 3, &pushed);
    world_request_make(&w, &w.d, "b", 50, 8, 3, &expected);
    pushed.request.way = expected.request.way = KVF_WAY_PACKED;
    kvf_agent *d = w.d.agents[0], *p = w.p.agents[0];
    world_hold(&w.p, &held, holds);
    world_expect(&w.d, &expected, &w.p, expects);
    world_push(&w.p, &pushed, pushes);
    world_ready(&w.p, pushes);
    world_until(&w, stage_info_of(d).slots_lent > 0);
    w.d.agents[0] = NULL; /* makes no progress until P has gathered, and asked for the copy */
    world_run_for(&w, 100 * MS);
    w.d.agents[0] = d;
    devices_delay(HOUR_NS);
    world_pull(&w.d, &wanted, &w.p, pulls);
    world_run_for(&w, SECOND);
    assert_true(stage_info_of(d).slots_lent > 0);
    kvf_session *session = world_session(d, false);
    w.p.agents[0] = NULL;
    assert_false(session->peer_lost);
    session->gone = true;
    world_lose(d, session);
    world_run_for(&w, SECOND);
    assert_true(stage_info_of(d).slots_doubt > 0);
    assert_false(world_failed(&w, d, pulls[0], KVF_E_PEER_LOST)->blocks_free);
    devices_delay(0);
    devices_hasten();
    assert_int_equal(world_next(&w, d, pulls[0])->kind, KVF_EVENT_BLOCKS_FREE);
    world_until(&w, stage_info_of(d).slots_doubt == 0);
    (void)world_failed(&w, d, expects[0], KVF_E_PEER_LOST);
    w.p.agents[0] = p;
    (void)world_next(&w, p, pushes[0]);
    (void)world_next(&w, p, holds[0]);
    close_all(&w);
}

/* ---- captures of graphs --------------------------------------------------------------------------- */

/* The engine begins to capture a graph from a stream of its own. */
static CUstream capture_begin(void) {
    const kvf_cuda *cuda;
    CUstream stream = NULL;
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    assert_int_equal(cuda->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, HIGH), 0);
    devices_capture(stream);
    kvf_cuda_leave(cuda);
    return stream;
}

/* Returns whether the graph is whole. */
static bool capture_end(CUstream stream) {
    const kvf_cuda *cuda;
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    const bool whole = devices_capture_end(stream) == 0;
    assert_int_equal(cuda->cuStreamDestroy_v2(stream), 0);
    kvf_cuda_leave(cuda);
    return whole;
}

/* Opening, waiting for an event, moving and hashing: agents allocate, and look at events again and again. */
static void agents_at_work_leave_a_capture_of_a_graph_alone(void **state) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = *state, .verify = true};
    world w;
    world_request held, wanted;
    work_on_stream work;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    CUstream engine = capture_begin();
    open_behind_work(&w, &options, &work, &held, &wanted);
    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &wanted, &w.p, pulls);
    world_run_for(&w, SECOND);
    devices_hasten();
    world_all_done(&w, &w.d, pulls);
    world_all_done(&w, &w.p, holds);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, OLD), 0);
    assert_true(capture_end(engine));
    event_drop(&work);
    work_end(&work);
    close_all(&w);
    devices_hasten();
}

static void an_event_that_is_a_part_of_a_graph_is_refused(void **state) {
    (void)state;
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = "shm"};
    world w;
    world_request held;
    work_on_stream work;
    uint64_t hold;
    world_open_model(&w, attention(4, 8, 8), TP2, TP4, &options);
    world_request_make(&w, &w.p, "a", 50, 0, 1, &held);
    work_begin(&work);
    devices_hasten();
    CUstream engine = capture_begin();
    assert_int_equal(kvf_cuda_enter(0, &work.cuda), KVF_OK);
    assert_int_equal(work.cuda->cuEventRecord(work.event, engine), 0);
    kvf_cuda_leave(work.cuda);
    held.request.after = &work.ready;
    held.request.deadline_ns = 0;
    assert_int_equal(kvf_agent_hold(w.p.agents[0], &held.request, &hold), KVF_E_INVALID);
    assert_non_null(strstr(kvf_error_detail(), "after: the event was recorded in a stream while a CUDA graph "
                                               "was captured from it"));
    (void)capture_end(engine); /* the driver may count the question for the event as a fault of the capture */
    event_drop(&work);
    work_end(&work);
    close_all(&w);
    devices_hasten();
}

/* ---- checksums ------------------------------------------------------------------------------------ */

/* Which memory a test uses: "shm" and "cuda" are those transports. */
static void choose_memory(const char *name, kvf_agent_options *options) {
    const bool both = strcmp(name, "D on both devices") == 0;
    if (both)
        DEVICES_ARE_SEVERAL();
    d_on_both = both;
    shown = strcmp(name, "shm") != 0;
    p_on_host = strcmp(name, "P on the host") == 0;
    *options = (kvf_agent_options){.struct_size = sizeof *options, .verify = true};
    options->transport = strcmp(name, "shm") == 0 ? "shm" : strcmp(name, "cuda") == 0 ? "cuda" : "auto";
}

typedef struct checked {
    world w;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
} checked;

/* A request whose bytes have arrived, and whose first questions for checksums are kept. */
static void stop_before_checking(checked *c, const char *memory, bool push) {
    kvf_agent_options options;
    choose_memory(memory, &options);
    world_open_model(&c->w, attention(4, 8, 8), TP2, TP2_D, &options);
    world_request_make(&c->w, &c->w.p, "a", 50, 0, 1, &c->held);
    world_request_make(&c->w, &c->w.d, "a", 50, 3, 1, &c->wanted);
    world_fill(&c->w, &c->w.p, &c->held, 1);
    letters_begin();
    letters_rule(LETTERS_KEEP, NULL, KVF_MESSAGE_CALL, KVF_CALL_CHECKSUM);
    if (push) {
        world_push(&c->w.p, &c->held, c->theirs);
        world_ready(&c->w.p, c->theirs);
        world_expect(&c->w.d, &c->wanted, &c->w.p, c->ours);
    } else {
        world_hold(&c->w.p, &c->held, c->theirs);
        world_pull(&c->w.d, &c->wanted, &c->w.p, c->ours);
    }
    world_until(&c->w, letters_met() >= c->w.d.rank_count);
    letters_no_rules();
}

static void end_check(checked *c) {
    letters_end();
    close_all(&c->w);
}

static void cells_of_devices_are_verified(void **state) {
    for (int push = 0; push < 2; push++) {
        checked c;
        const size_t left = devices_left();
        stop_before_checking(&c, *state, push);
        letters_deliver();
        world_all_done(&c.w, &c.w.d, c.ours);
        world_all_done(&c.w, &c.w.p, c.theirs);
        assert_int_equal(world_wrong_cells(&c.w, &c.w.d, &c.wanted, 1), 0);
        end_check(&c);
        assert_int_equal(devices_left(), left);
    }
}

/* The process has closed its standard input, whose number the first timer that is opened gets. */
static void an_agent_opens_one_timer_for_all_checksums_also_as_descriptor_0(void **state) {
    checked c;
    stop_before_checking(&c, *state, false);
    const int kept = dup(STDIN_FILENO);
    (void)close(STDIN_FILENO);
    letters_deliver();
    world_all_done(&c.w, &c.w.d, c.ours);
    world_all_done(&c.w, &c.w.p, c.theirs);
    uint32_t found = 0, set = 0;
    for (uint32_t i = 0; i < 4; i++) {
        const kvf_looks *looks = &(i % 2 ? &c.w.d : &c.w.p)->agents[i / 2]->hashing_looks;
        found += looks->fd == 0;
        set += looks->fd == 0 && looks->pause_ns > 0;
    }
    end_check(&c);
    if (kept >= 0) {
        assert_int_equal(dup2(kept, STDIN_FILENO), STDIN_FILENO);
        (void)close(kept);
    }
    assert_int_equal(found, 1);
    assert_int_equal(set, 1); /* without it, nothing would wake the agent when the device has finished */
}

/* The control: a bit of the producer's memory, and one of the consumer's. */
static void a_wrong_cell_of_a_device_is_named(void **state) {
    for (int push = 0; push < 2; push++)
        for (int ours = 0; ours < 2; ours++) {
            checked c;
            stop_before_checking(&c, *state, push);
            const world_cell at = {.rank = 1, .layer = 2, .part = 1, .step = 37, .unit = 5};
            world_flip(ours ? &c.w.d : &c.w.p, ours ? &c.wanted : &c.held, at);
            letters_deliver();
            const world_outcome *failed = world_failed(&c.w, c.w.d.agents[1], c.ours[1], KVF_E_MISMATCH);
            if (!strstr(failed->detail, "group full, layer 2, part v, token 37, unit 5 "))
                fail_msg("%s", failed->detail);
            (void)world_done(&c.w, c.w.d.agents[0], c.ours[0]);
            if (!push) /* the hold remains for another pull */
                assert_ok(kvf_agent_cancel(c.w.p.agents[1], c.theirs[1]));
            for (uint32_t r = 0; r < 2; r++)
                (void)world_next(&c.w, c.w.p.agents[r], c.theirs[r]);
            end_check(&c);
        }
}

/* The consumer's request ends with its deadline; the device is awaited before its memory is given back, and nobody is
 * busy meanwhile. */
static void checksums_that_a_device_does_not_finish_end_with_the_request(void **state) {
    checked c;
    DEVICES_ARE_STAND_INS();
    stop_before_checking(&c, *state, false);
    devices_delay(HOUR_NS);
    letters_deliver();
    world_run_for(&c.w, SECOND / 10);
    world_time_jumps();
    for (uint32_t r = 0; r < c.w.d.rank_count; r++)
        (void)world_failed(&c.w, c.w.d.agents[r], c.ours[r], KVF_E_TIMEOUT);
    for (uint32_t r = 0; r < c.w.p.rank_count; r++) {
        kvf_agent *agent = c.w.p.agents[r];
        (void)world_next(&c.w, agent, c.theirs[r]);
        assert_falls_silent(agent);
        assert_fails(kvf_agent_unregister_region(agent, 0), KVF_E_AGAIN, "computes checksums");
    }
    devices_delay(0);
    devices_hasten();
    end_check(&c);
}

static void a_refusal_of_the_driver_fails_the_request(void **state) {
    checked c;
    stop_before_checking(&c, *state, false);
    devices_fail("cuLaunchKernel", OUT_OF_MEMORY, UINT32_MAX);
    letters_deliver();
    for (uint32_t r = 0; r < c.w.d.rank_count; r++) {
        const world_outcome *failed = world_next(&c.w, c.w.d.agents[r], c.ours[r]);
        assert_int_equal(failed->kind, KVF_EVENT_FAILED);
        assert_non_null(strstr(failed->detail, "starting checksums: CUDA_ERROR_OUT_OF_MEMORY"));
    }
    devices_fail("", 0, 0);
    for (uint32_t r = 0; r < c.w.p.rank_count; r++) {
        assert_ok(kvf_agent_cancel(c.w.p.agents[r], c.theirs[r]));
        (void)world_next(&c.w, c.w.p.agents[r], c.theirs[r]);
    }
    end_check(&c);
}

/* A test that fails leaves no work on a device: later ones would wait for it. */
static int leave_nothing_held_up(void **state) {
    devices_hasten();
    return world_is_real(state);
}

#define SIMULATED world_is_simulated_with_devices, leave_nothing_held_up

int main(void) {
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    devices_open();
    world_place_memory(place);
    world_copies_memory(devices_get, devices_put);
    static char shm[] = "shm", messages[] = "messages", cuda[] = "cuda", automatic[] = "auto", p[] = "p",
                d[] = "d", p_host[] = "P on the host", d_both[] = "D on both devices", none[] = "",
                segments[] = "segments", only_p[] = "P", only_d[] = "D", both[] = "PD";
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
        {"a_hold_is_not_read_before_an_event_of_a_stream (shm)",
         a_hold_is_not_read_before_an_event_of_a_stream, SIMULATED, shm},
        {"a_hold_is_not_read_before_an_event_of_a_stream (cuda)",
         a_hold_is_not_read_before_an_event_of_a_stream, SIMULATED, cuda},
        {"a_push_does_not_begin_before_an_event_of_a_stream (shm)",
         a_push_does_not_begin_before_an_event_of_a_stream, SIMULATED, shm},
        {"a_push_does_not_begin_before_an_event_of_a_stream (cuda)",
         a_push_does_not_begin_before_an_event_of_a_stream, SIMULATED, cuda},
        cmocka_unit_test(an_error_of_the_device_ends_what_waits_for_its_event),
        cmocka_unit_test_teardown(an_agent_looks_at_a_stream_that_a_hold_waits_for_and_then_falls_silent,
                                  leave_nothing_held_up),
        cmocka_unit_test_teardown(an_agent_does_not_look_for_what_a_descriptor_tells_it,
                                  leave_nothing_held_up),
        {"a_hold_behind_a_stream_that_never_ends_ends_with_its_lease",
         a_hold_behind_a_stream_that_never_ends_ends_with_its_lease, SIMULATED, NULL},
        {"the_end_of_a_session_does_not_wait_for_a_device_that_hangs",
         the_end_of_a_session_does_not_wait_for_a_device_that_hangs, SIMULATED, NULL},
        {"slots_stay_in_doubt_while_a_device_fills_them_for_a_peer_that_died",
         slots_stay_in_doubt_while_a_device_fills_them_for_a_peer_that_died, SIMULATED, NULL},
        {"blocks_stay_in_doubt_while_a_device_that_hangs_may_write_them",
         blocks_stay_in_doubt_while_a_device_that_hangs_may_write_them, SIMULATED, NULL},
        {"agents_at_work_leave_a_capture_of_a_graph_alone (shm)",
         agents_at_work_leave_a_capture_of_a_graph_alone, SIMULATED, shm},
        {"agents_at_work_leave_a_capture_of_a_graph_alone (cuda)",
         agents_at_work_leave_a_capture_of_a_graph_alone, SIMULATED, cuda},
        {"an_event_that_is_a_part_of_a_graph_is_refused", an_event_that_is_a_part_of_a_graph_is_refused,
         SIMULATED, NULL},
        {"cells_of_devices_are_verified (shm)", cells_of_devices_are_verified, SIMULATED, shm},
        {"cells_of_devices_are_verified (cuda)", cells_of_devices_are_verified, SIMULATED, cuda},
        {"cells_of_devices_are_verified (P on the host)", cells_of_devices_are_verified, SIMULATED, p_host},
        {"cells_of_devices_are_verified (D on both devices)", cells_of_devices_are_verified, SIMULATED,
         d_both},
        {"an_agent_opens_one_timer_for_all_checksums_also_as_descriptor_0",
         an_agent_opens_one_timer_for_all_checksums_also_as_descriptor_0, SIMULATED, shm},
        {"a_wrong_cell_of_a_device_is_named (shm)", a_wrong_cell_of_a_device_is_named, SIMULATED, shm},
        {"a_wrong_cell_of_a_device_is_named (cuda)", a_wrong_cell_of_a_device_is_named, SIMULATED, cuda},
        {"a_wrong_cell_of_a_device_is_named (P on the host)", a_wrong_cell_of_a_device_is_named, SIMULATED,
         p_host},
        {"a_wrong_cell_of_a_device_is_named (D on both devices)", a_wrong_cell_of_a_device_is_named,
         SIMULATED, d_both},
        {"checksums_that_a_device_does_not_finish_end_with_the_request",
         checksums_that_a_device_does_not_finish_end_with_the_request, SIMULATED, cuda},
        {"a_refusal_of_the_driver_fails_the_request", a_refusal_of_the_driver_fails_the_request, SIMULATED,
         cuda},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
