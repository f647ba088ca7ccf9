/*
 * Agents whose caches are in device memory, and events of streams: what waits for them, devices that hang, and captures of
 * graphs.
 */
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include "agent/agent.h"
#include "agent/session.h"
#include "agent/ticket.h"
#include "agent_on_devices.h"

/* ---- events of streams ---------------------------------------------------------------------------- */

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
    placing.shown = strcmp(options->transport, "cuda") == 0;
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
    close_on_devices(&w);
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
    close_on_devices(&w);
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
    devices_stick(CUDA_ERROR_ILLEGAL_ADDRESS);
    for (uint32_t r = 0; r < w.p.rank_count; r++)
        assert_non_null(strstr(world_failed(&w, w.p.agents[r], holds[r], KVF_E_IO)->detail,
                               "this process cannot use the device any more"));
    devices_stick(0);
    devices_hasten();
    event_drop(&work);
    work_end(&work);
    close_on_devices(&w);
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
    close_on_devices(&w);
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
    close_on_devices(&w);
}

static uint32_t count_in(const kvf_agent *agent, kvf_ticket_state state) {
    uint32_t count = 0;
    for (const kvf_ticket *ticket = agent->tickets; ticket; ticket = ticket->hh.next)
        count += ticket->state == state;
    return count;
}

static void more_requests_may_wait_for_a_stream_than_a_process_may_have_descriptors(void **state) {
    (void)state;
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = "shm"};
    enum { MANY = 20 };
    struct rlimit before;
    world w;
    world_request held, wanted;
    work_on_stream work;
    uint64_t holds[MANY][WORLD_MAX_RANKS];
    open_behind_work(&w, &options, &work, &held, &wanted);
    kvf_agent *agent = w.p.agents[0];
    for (uint32_t i = 0; i < MANY; i++) {
        const char id = (char)('a' + i);
        held.request.id = (kvf_request_id){&id, 1};
        world_hold(&w.p, &held, holds[i]);
    }
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    const struct rlimit fewer = {MANY - 1, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &fewer), 0);
    world_run_for(&w, MS);
    assert_int_equal(count_in(agent, KVF_TICKET_WAITING), MANY);
    devices_hasten();
    world_until(&w, count_in(agent, KVF_TICKET_HELD) == MANY);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    for (uint32_t r = 0; r < w.p.rank_count; r++) {
        for (uint32_t i = 0; i < MANY; i++)
            assert_ok(kvf_agent_cancel(w.p.agents[r], holds[i][r]));
    }
    event_drop(&work);
    work_end(&work);
    close_on_devices(&w);
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
    close_on_devices(&w);
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
    placing.d_on_host = true;
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
    close_on_devices(&w);
}

/* The same of blocks that a peer has written to: its slots wait for our device. */
static void expected_blocks_stay_in_doubt_while_a_device_that_hangs_may_write_them(void **state) {
    (void)state;
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = "shm"};
    world w;
    world_request pushed, expected;
    uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
    DEVICES_ARE_STAND_INS();
    placing.d_on_host = true;
    world_open_model(&w, attention(4, 8, 8), ONE("P"), ONE("D"), &options);
    world_request_make(&w, &w.d, "b", 50, 4, 3, &pushed);
    world_request_make(&w, &w.p, "b", 50, 4, 3, &expected);
    world_fill(&w, &w.d, &pushed, NEW);
    kvf_agent *reader = w.p.agents[0];
    devices_delay(HOUR_NS);
    world_expect(&w.p, &expected, &w.d, expects);
    world_push(&w.d, &pushed, pushes);
    world_ready(&w.d, pushes);
    world_run_for(&w, SECOND);
    devices_delay(0);
    assert_ok(kvf_agent_cancel(reader, expects[0]));
    assert_false(world_failed(&w, reader, expects[0], KVF_E_CANCELLED)->blocks_free);
    world_run_for(&w, SECOND);
    assert_true(world_stats(reader).blocks_in_doubt_now > 0);
    (void)world_next(&w, w.d.agents[0], pushes[0]);
    devices_hasten();
    assert_int_equal(world_next(&w, reader, expects[0])->kind, KVF_EVENT_BLOCKS_FREE);
    world_expect(&w.p, &expected, &w.d, expects);
    world_push(&w.d, &pushed, pushes);
    world_ready(&w.d, pushes);
    world_all_done(&w, &w.p, expects);
    world_all_done(&w, &w.d, pushes);
    assert_int_equal(world_wrong_cells(&w, &w.p, &expected, NEW), 0);
    close_on_devices(&w);
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
    placing.shown = true;
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
    close_on_devices(&w);
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
    placing.shown = true;
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
    close_on_devices(&w);
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
    close_on_devices(&w);
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
    close_on_devices(&w);
    devices_hasten();
}

int main(void) {
    static char shm[] = "shm", cuda[] = "cuda";
    const struct CMUnitTest tests[] = {
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
        cmocka_unit_test_teardown(more_requests_may_wait_for_a_stream_than_a_process_may_have_descriptors,
                                  leave_nothing_held_up),
        {"a_hold_behind_a_stream_that_never_ends_ends_with_its_lease",
         a_hold_behind_a_stream_that_never_ends_ends_with_its_lease, SIMULATED, NULL},
        {"the_end_of_a_session_does_not_wait_for_a_device_that_hangs",
         the_end_of_a_session_does_not_wait_for_a_device_that_hangs, SIMULATED, NULL},
        {"slots_stay_in_doubt_while_a_device_fills_them_for_a_peer_that_died",
         slots_stay_in_doubt_while_a_device_fills_them_for_a_peer_that_died, SIMULATED, NULL},
        {"blocks_stay_in_doubt_while_a_device_that_hangs_may_write_them",
         blocks_stay_in_doubt_while_a_device_that_hangs_may_write_them, SIMULATED, NULL},
        {"expected_blocks_stay_in_doubt_while_a_device_that_hangs_may_write_them",
         expected_blocks_stay_in_doubt_while_a_device_that_hangs_may_write_them, SIMULATED, NULL},
        {"agents_at_work_leave_a_capture_of_a_graph_alone (shm)",
         agents_at_work_leave_a_capture_of_a_graph_alone, SIMULATED, shm},
        {"agents_at_work_leave_a_capture_of_a_graph_alone (cuda)",
         agents_at_work_leave_a_capture_of_a_graph_alone, SIMULATED, cuda},
        {"an_event_that_is_a_part_of_a_graph_is_refused", an_event_that_is_a_part_of_a_graph_is_refused,
         SIMULATED, NULL},
    };
    if (!devices_are_there_for_agents())
        return 77;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
