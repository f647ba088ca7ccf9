/*
 * Streams that wait for the layers of a consumer's request, over the stand-in for the CUDA driver or a real one
 * (scripts/check-cuda). Behind each wait, a stream copies the whole cache: what it finds there is what a kernel of the
 * engine would have seen.
 *
 * One thread drives all agents here. So while a stream waits, it must not wait for a device: nothing is allocated or
 * freed meanwhile, and streams copy from memory of a device, or pinned memory of the host, to memory of a device.
 */
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#include "agent/pull.h"
#include "agent/session.h"
#include "agent_world.h"
#include "cuda/device_image.h"
#include "cuda/word.h"
#include "devices.h"

#define LAYERS 6u
#define TOKENS 100u
#define SLOWLY 400000u
#define TP2 ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64, .order = "L|BPNH"})
#define TP4                                                                                                  \
    ENGINE(.name = "D", .tp_size = 4, .all = {.tokens_per_block = 8, .block_count = 128, .order = "L|BPHN"})
#define D_DEVICE devices_number(1) /* the first, too, where there is one */

/* ---- memory ------------------------------------------------------------------------------------ */

static bool on_host, shown, verifies;

/* Where the world sees memory, and where devices do. */
typedef struct placed_memory {
    void *seen;
    kvf_memory memory;
} placed_memory;
static placed_memory placed[256];
static uint32_t placed_count;
static bool p_on_host; /* its memory, but not that of D */

/* Pinned, as an engine's memory is that its streams use. */
static kvf_memory take_host_memory(uint64_t bytes, void **seen) {
    const uint64_t pages = (bytes + 4095) / 4096 * 4096;
    const kvf_cuda *cuda;
    *seen = aligned_alloc(4096, pages);
    assert_non_null(*seen);
    memset(*seen, 0, pages);
    assert_ok(kvf_cuda_enter(D_DEVICE, &cuda));
    assert_int_equal(
        cuda->cuMemHostRegister_v2(*seen, pages, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
        0);
    kvf_cuda_leave(cuda);
    return (kvf_memory){.struct_size = sizeof(kvf_memory), .address = *seen, .bytes = bytes};
}

static void free_host_memory(const kvf_memory *memory) {
    const kvf_cuda *cuda;
    assert_ok(kvf_cuda_enter(D_DEVICE, &cuda));
    assert_int_equal(cuda->cuMemHostUnregister(memory->address), 0);
    kvf_cuda_leave(cuda);
    free(memory->address);
}

static kvf_memory place(const char *engine, uint64_t bytes, void **seen) {
    const bool is_p = engine[0] == 'P';
    placed_memory *made = &placed[placed_count++];
    assert_true(placed_count <= COUNT_OF(placed));
    if (on_host || (is_p && p_on_host)) {
        made->memory = take_host_memory(bytes, seen);
    } else {
        made->memory = device_memory(is_p ? 0 : D_DEVICE, bytes, seen);
        made->memory.withheld = !shown;
    }
    made->seen = *seen;
    return made->memory;
}

static void free_placed(void) {
    devices_free();
    for (uint32_t i = 0; i < placed_count; i++)
        if (placed[i].memory.kind == KVF_MEMORY_HOST)
            free_host_memory(&placed[i].memory);
}

static const kvf_memory *memory_seen_at(const void *seen) {
    for (uint32_t i = 0; i < placed_count; i++)
        if (placed[i].seen == seen)
            return &placed[i].memory;
    fail_msg("unknown memory");
    return NULL;
}

/* ---- streams that read behind a wait -------------------------------------------------------------- */

/* A stream, and copies of the cache of one rank: the i-th as the stream found it behind its i-th wait. A copy has all
 * regions, one behind the other. */
typedef struct reader {
    const kvf_cuda *cuda;
    CUstream stream;
    CUevent passed[LAYERS + 1];
    CUdeviceptr copies[LAYERS + 1]; /* 0: there is no room for one */
    uint32_t count;
} reader;

static void reader_open(reader *out) {
    memset(out, 0, sizeof *out);
    assert_ok(kvf_cuda_enter(D_DEVICE, &out->cuda));
    assert_int_equal(out->cuda->cuStreamCreateWithPriority(&out->stream, CU_STREAM_NON_BLOCKING, -1), 0);
    kvf_cuda_leave(out->cuda);
}

static uint32_t region_count(const world_engine *engine, uint32_t rank) {
    return kvf_shard_get(kvf_engine_shard(engine->engine, rank))->region_count;
}

/* Makes room for copies of a rank's cache. */
static void reader_make_room(reader *at, const world_engine *engine, uint32_t rank) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < region_count(engine, rank); i++)
        bytes += memory_seen_at(engine->memory[rank][i])->bytes;
    for (uint32_t i = 0; i < COUNT_OF(at->copies); i++)
        at->copies[i] = device_room(D_DEVICE, bytes);
}

/* Copies all regions of a rank, behind what the stream has. */
static void reader_copy(reader *at, const world_engine *engine, uint32_t rank) {
    CUdeviceptr copy = at->copies[at->count];
    assert_ok(kvf_cuda_enter(D_DEVICE, &at->cuda));
    for (uint32_t i = 0; i < region_count(engine, rank); i++) {
        const kvf_memory *memory = memory_seen_at(engine->memory[rank][i]);
        assert_int_equal(
            at->cuda->cuMemcpyAsync(copy, (CUdeviceptr)(uintptr_t)memory->address, memory->bytes, at->stream),
            0);
        copy += memory->bytes;
    }
    assert_int_equal(at->cuda->cuEventCreate(&at->passed[at->count], CU_EVENT_DISABLE_TIMING), 0);
    assert_int_equal(at->cuda->cuEventRecord(at->passed[at->count], at->stream), 0);
    kvf_cuda_leave(at->cuda);
    at->count++;
}

/* Lets what is put on the stream from now on wait for devices_hasten(). */
static void reader_hold_up(reader *at) {
    assert_ok(kvf_cuda_enter(D_DEVICE, &at->cuda));
    devices_hold_up(at->cuda, at->stream);
    kvf_cuda_leave(at->cuda);
}

/* Whether the stream has passed its i-th wait now. */
static bool reader_is_past(const reader *at, uint32_t i) {
    const kvf_cuda *cuda;
    assert_ok(kvf_cuda_enter(D_DEVICE, &cuda));
    const CUresult result = cuda->cuEventQuery(at->passed[i]);
    kvf_cuda_leave(cuda);
    assert_true(result == 0 || result == CUDA_ERROR_NOT_READY);
    return result == 0;
}

/* Whether it has, or soon does without the help of an agent. A real device takes a moment until it sees a number, so
 * this looks as long for one that must not pass; the stand-in has passed at the first look. */
static bool reader_passed(const reader *at, uint32_t i) {
    const uint64_t end = world_now() + (devices_are_real() ? 200 * MS : 0);
    for (;;) {
        const bool last = world_now() >= end; /* before it looks: this thread may have had to wait */
        if (reader_is_past(at, i))
            return true;
        if (last)
            return false;
        (void)usleep(100);
    }
}

/* Waits until it has, which the caller is sure of. */
static void reader_await(const reader *at, uint32_t i) {
    while (!reader_is_past(at, i))
        (void)usleep(1000);
}

/* Wrong cells of the first layers in the i-th copy. */
static uint64_t reader_wrong(const reader *at, uint32_t i, world_engine *engine, uint32_t rank,
                             const world_request *wanted, uint32_t layers) {
    unsigned char *copy = devices_look(at->copies[i]);
    void *memory[WORLD_MAX_REGIONS];
    memcpy(memory, engine->memory[rank], sizeof memory);
    for (uint32_t r = 0; r < region_count(engine, rank); r++) {
        engine->memory[rank][r] = copy;
        copy += memory_seen_at(memory[r])->bytes;
    }
    const uint64_t wrong = world_wrong_cells_below(engine, rank, wanted, 1, layers);
    memcpy(engine->memory[rank], memory, sizeof memory);
    return wrong;
}

/* No stream may wait any more. */
static void reader_close(reader *at) {
    assert_ok(kvf_cuda_enter(D_DEVICE, &at->cuda));
    for (uint32_t i = 0; i < at->count; i++)
        assert_int_equal(at->cuda->cuEventDestroy_v2(at->passed[i]), 0);
    assert_int_equal(at->cuda->cuStreamDestroy_v2(at->stream), 0);
    kvf_cuda_leave(at->cuda);
    for (uint32_t i = 0; i < COUNT_OF(at->copies); i++)
        if (at->copies[i])
            device_room_free(at->copies[i]);
}

/* ---- scenes ------------------------------------------------------------------------------------ */

typedef struct route {
    const char *transport;
    kvf_way way;
    bool shown, on_host, p_on_host;
} route;

typedef struct scene {
    world w;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    reader readers[WORLD_MAX_RANKS];
} scene;

static void open_scene(scene *s, const route *by) {
    const kvf_agent_options options = {.struct_size = sizeof options,
                                       .transport = by->transport,
                                       .way = by->way,
                                       .slot_bytes = 4096,
                                       .verify = verifies};
    memset(s, 0, sizeof *s);
    on_host = by->on_host;
    shown = by->shown;
    p_on_host = by->p_on_host;
    placed_count = 0;
    world_open_model(&s->w, attention(LAYERS, 8, 8), TP2, TP4, &options);
    world_request_make(&s->w, &s->w.p, "a", TOKENS, 3, 2, &s->held);
    world_request_make(&s->w, &s->w.d, "a", TOKENS, 7, 3, &s->wanted);
    s->wanted.request.by_layer = true;
    world_fill(&s->w, &s->w.p, &s->held, 1);
    for (uint32_t r = 0; r < s->w.d.rank_count; r++) {
        reader_open(&s->readers[r]);
        reader_make_room(&s->readers[r], &s->w.d, r);
    }
}

/* Ends it with what is under way. */
static void leave_scene(scene *s) {
    for (uint32_t r = 0; r < s->w.d.rank_count; r++)
        reader_close(&s->readers[r]);
    world_close(&s->w);
    free_placed();
}

static void close_scene(scene *s) {
    world_quiet(&s->w);
    leave_scene(s);
}

static void let_wait(scene *s, uint32_t rank, uint32_t layers) {
    assert_ok(
        kvf_agent_let_wait(s->w.d.agents[rank], s->ours[rank], layers, D_DEVICE, s->readers[rank].stream));
    reader_copy(&s->readers[rank], &s->w.d, rank);
}

/* As an engine would: all its layers are put on its stream before the first has arrived. */
static void let_wait_for_each_layer(scene *s) {
    for (uint32_t r = 0; r < s->w.d.rank_count; r++)
        for (uint32_t layer = 1; layer <= LAYERS; layer++)
            let_wait(s, r, layer);
}

/* Whether the stream of each rank has passed all its waits now. */
static bool all_idle(const scene *s) {
    for (uint32_t r = 0; r < s->w.d.rank_count; r++)
        if (s->readers[r].count > 0 && !reader_is_past(&s->readers[r], s->readers[r].count - 1))
            return false;
    return true;
}

/* Requires that it has, or soon does without the help of an agent. */
static void assert_all_passed(const scene *s) {
    for (uint32_t r = 0; r < s->w.d.rank_count; r++)
        assert_true(s->readers[r].count == 0 || reader_passed(&s->readers[r], s->readers[r].count - 1));
}

/* The i-th copy of each rank has the first i + 1 layers. Returns in how many copies later layers were missing. */
static uint32_t check_copies(scene *s) {
    uint32_t missing = 0;
    for (uint32_t r = 0; r < s->w.d.rank_count; r++)
        for (uint32_t i = 0; i < LAYERS; i++) {
            assert_int_equal(reader_wrong(&s->readers[r], i, &s->w.d, r, &s->wanted, i + 1), 0);
            missing += reader_wrong(&s->readers[r], i, &s->w.d, r, &s->wanted, LAYERS) > 0;
        }
    return missing;
}

static void start_pull(scene *s, uint64_t cap) {
    s->wanted.request.bytes_per_second = cap;
    world_pull(&s->w.d, &s->wanted, &s->w.p, s->ours);
}

static void start_push(scene *s) {
    world_expect(&s->w.d, &s->wanted, &s->w.p, s->ours);
    world_push(&s->w.p, &s->held, s->theirs);
}

static void ready(scene *s, uint32_t layers) {
    for (uint32_t r = 0; r < s->w.p.rank_count; r++)
        assert_ok(kvf_agent_push_ready(s->w.p.agents[r], s->theirs[r], CHUNK(0, UINT64_MAX, layers)));
}

static void await_layers(scene *s, uint32_t layers) {
    for (uint32_t r = 0; r < s->w.d.rank_count; r++) {
        uint32_t there = 0;
        world_until(&s->w,
                    (assert_ok(kvf_agent_arrived(s->w.d.agents[r], s->ours[r], &there)), there >= layers));
    }
}

/* ---- layers as they arrive ----------------------------------------------------------------------- */

static void streams_pass_as_the_layers_of_a_pull_arrive(void **state) {
    scene s;
    open_scene(&s, *state);
    start_pull(&s, SLOWLY);
    let_wait_for_each_layer(&s);
    assert_false(reader_passed(&s.readers[0], 0));
    world_hold(&s.w.p, &s.held, s.theirs);
    world_until(&s.w, all_idle(&s)); /* the stand-in's streams go on while somebody looks */
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    /* Streams did not wait for the end, and one that passes too early would be seen. */
    assert_true(check_copies(&s) >= s.w.d.rank_count);
    close_scene(&s);
}

/* The control: a stream that waits for the first layer only finds that others are missing. */
static void a_stream_that_does_not_wait_finds_that_layers_are_missing(void **state) {
    scene s;
    open_scene(&s, *state);
    start_pull(&s, SLOWLY);
    for (uint32_t r = 0; r < s.w.d.rank_count; r++)
        let_wait(&s, r, 1);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_until(&s.w, all_idle(&s));
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    for (uint32_t r = 0; r < s.w.d.rank_count; r++) {
        assert_int_equal(reader_wrong(&s.readers[r], 0, &s.w.d, r, &s.wanted, 1), 0);
        assert_true(reader_wrong(&s.readers[r], 0, &s.w.d, r, &s.wanted, LAYERS) > 0);
    }
    close_scene(&s);
}

static void streams_pass_as_layers_are_pushed(void **state) {
    scene s;
    open_scene(&s, *state);
    start_push(&s);
    let_wait_for_each_layer(&s);
    for (uint32_t layer = 1; layer <= LAYERS; layer++) {
        assert_false(reader_passed(&s.readers[0], layer - 1));
        ready(&s, layer);
        for (uint32_t r = 0; r < s.w.d.rank_count; r++)
            world_until(&s.w, reader_is_past(&s.readers[r], layer - 1));
    }
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(check_copies(&s), s.w.d.rank_count * (LAYERS - 1));
    close_scene(&s);
}

/* Before the end nobody on this side knows what a direct push has written. */
static void streams_pass_with_the_end_of_a_direct_push(void **state) {
    scene s;
    open_scene(&s, *state);
    start_push(&s);
    for (uint32_t r = 0; r < s.w.d.rank_count; r++)
        let_wait(&s, r, 1);
    ready(&s, LAYERS - 1);
    world_run_for(&s.w, 100 * MS);
    assert_false(reader_passed(&s.readers[0], 0));
    ready(&s, LAYERS);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    world_until(&s.w, all_idle(&s));
    for (uint32_t r = 0; r < s.w.d.rank_count; r++)
        assert_int_equal(reader_wrong(&s.readers[r], 0, &s.w.d, r, &s.wanted, LAYERS), 0);
    close_scene(&s);
}

/* More layers than there are: the end. What has arrived needs no wait. */
static void a_stream_waits_for_the_end_or_not_at_all(void **state) {
    scene s;
    open_scene(&s, *state);
    start_push(&s);
    for (uint32_t r = 0; r < s.w.d.rank_count; r++)
        let_wait(&s, r, UINT32_MAX);
    ready(&s, LAYERS - 1);
    await_layers(&s, LAYERS - 1);
    devices_fail("cuStreamWaitValue32_v2", 1, UINT32_MAX); /* so that a call of it would fail */
    for (uint32_t r = 0; r < s.w.d.rank_count; r++)
        let_wait(&s, r, LAYERS - 1);
    assert_fails(kvf_agent_let_wait(s.w.d.agents[0], s.ours[0], LAYERS, D_DEVICE, s.readers[0].stream),
                 KVF_E_IO, "let_wait", "letting a stream wait");
    devices_fail("", 0, 0);
    assert_false(reader_passed(&s.readers[0], 0));
    ready(&s, LAYERS);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    world_until(&s.w, all_idle(&s));
    for (uint32_t r = 0; r < s.w.d.rank_count; r++) {
        assert_int_equal(reader_wrong(&s.readers[r], 0, &s.w.d, r, &s.wanted, LAYERS), 0);
        devices_fail("cuStreamWaitValue32_v2", 1, UINT32_MAX);
        assert_ok(kvf_agent_let_wait(s.w.d.agents[r], s.ours[r], LAYERS, D_DEVICE, s.readers[r].stream));
        devices_fail("", 0, 0);
    }
    close_scene(&s);
}

/* No thread starts that would let the stream go. */
static void a_stream_that_nobody_would_let_go_does_not_wait(void **state) {
    scene s;
    pthread_attr_t before, too_large;
    open_scene(&s, *state);
    start_push(&s);
    assert_int_equal(pthread_getattr_default_np(&before), 0);
    assert_int_equal(pthread_getattr_default_np(&too_large), 0);
    assert_int_equal(pthread_attr_setstacksize(&too_large, (size_t)1 << 47), 0);
    assert_int_equal(pthread_setattr_default_np(&too_large), 0);
    for (int i = 0; i < 2; i++)
        assert_fails(kvf_agent_let_wait(s.w.d.agents[0], s.ours[0], 1, D_DEVICE, s.readers[0].stream),
                     KVF_E_IO, "let_wait", "the thread that lets late streams go");
    assert_int_equal(pthread_setattr_default_np(&before), 0);
    let_wait(&s, 0, 1);
    assert_false(reader_passed(&s.readers[0], 0));
    ready(&s, LAYERS);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    world_until(&s.w, all_idle(&s));
    assert_int_equal(reader_wrong(&s.readers[0], 0, &s.w.d, 0, &s.wanted, 1), 0);
    close_scene(&s);
}

/* ---- ends without all layers ---------------------------------------------------------------------- */

/* Two layers have arrived, and streams of the first ranks wait for the third. */
static void open_half_way(scene *s, const route *by, uint32_t ranks) {
    open_scene(s, by);
    s->wanted.request.deadline_ns = 2 * SECOND;
    start_push(s);
    for (uint32_t r = 0; r < ranks && r < s->w.d.rank_count; r++)
        let_wait(s, r, 3);
    ready(s, 2);
    await_layers(s, 2);
    world_run_for(&s->w, (devices_are_real() ? 200 : 20) * MS);
    for (uint32_t r = 0; r < ranks && r < s->w.d.rank_count; r++)
        assert_false(reader_is_past(&s->readers[r], 0));
}

static void cancelling_lets_streams_pass(void **state) {
    scene s;
    open_half_way(&s, *state, WORLD_MAX_RANKS);
    for (uint32_t r = 0; r < s.w.d.rank_count; r++) {
        assert_false(reader_is_past(&s.readers[r], 0));
        assert_ok(kvf_agent_cancel(s.w.d.agents[r], s.ours[r]));
        assert_true(reader_passed(&s.readers[r], 0));
        (void)world_failed(&s.w, s.w.d.agents[r], s.ours[r], KVF_E_CANCELLED);
    }
    for (uint32_t r = 0; r < s.w.p.rank_count; r++)
        (void)kvf_agent_cancel(s.w.p.agents[r], s.theirs[r]);
    close_scene(&s);
}

/* A writer that is closed frees what it has on its device, for which a driver may wait until streams have passed: in
 * another process that is harmless. */
static void a_writer_that_goes_lets_streams_pass(void **state) {
    scene s;
    if (!((const route *)*state)->p_on_host)
        DEVICES_ARE_STAND_INS();
    open_half_way(&s, *state, WORLD_MAX_RANKS);
    world_close_agents(&s.w.p);
    world_until(&s.w, all_idle(&s));
    for (uint32_t r = 0; r < s.w.d.rank_count; r++)
        (void)world_failed(&s.w, s.w.d.agents[r], s.ours[r], KVF_E_PEER_LOST);
    close_scene(&s);
}

static void a_writer_that_is_late_lets_streams_pass_at_the_deadline(void **state) {
    scene s;
    open_half_way(&s, *state, WORLD_MAX_RANKS);
    for (uint32_t r = 0; r < s.w.d.rank_count; r++)
        (void)world_failed(&s.w, s.w.d.agents[r], s.ours[r], KVF_E_TIMEOUT);
    assert_all_passed(&s);
    for (uint32_t r = 0; r < s.w.p.rank_count; r++)
        (void)kvf_agent_cancel(s.w.p.agents[r], s.theirs[r]);
    close_scene(&s);
}

/* An agent frees what it has on its device as well, behind its own streams only. */
static void closing_the_agent_lets_streams_pass(void **state) {
    scene s;
    open_half_way(&s, *state, devices_are_real() ? 1 : WORLD_MAX_RANKS);
    world_close_agents(&s.w.d);
    assert_all_passed(&s);
    world_forget(&s.w);
    for (uint32_t r = 0; r < s.w.p.rank_count; r++)
        (void)kvf_agent_cancel(s.w.p.agents[r], s.theirs[r]);
    close_scene(&s);
}

/* ---- where the driver waits for streams ----------------------------------------------------------- */

#define MANY_WAITS 64u /* more than the stand-in has room for on a stream */

typedef struct waits {
    kvf_agent *agent;
    uint64_t ticket;
    CUstream stream;
    kvf_status status;
} waits;

static void *let_wait_often(void *context) {
    waits *w = context;
    for (uint32_t i = 0; i < MANY_WAITS && !w->status; i++)
        w->status = kvf_agent_let_wait(w->agent, w->ticket, i % LAYERS + 1, D_DEVICE, w->stream);
    return NULL;
}

/* The thread waits in the driver for room on its stream. With the agent's lock, it would wait for ever. */
static void who_waits_for_room_on_a_stream_holds_up_nobody(void **state) {
    scene s;
    pthread_t thread;
    open_scene(&s, *state);
    start_pull(&s, SLOWLY);
    waits w = {s.w.d.agents[0], s.ours[0], s.readers[0].stream, KVF_OK};
    devices_strict(true);
    assert_int_equal(pthread_create(&thread, NULL, let_wait_often, &w), 0);
    world_run_for(&s.w, 100 * MS);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(w.status, KVF_OK);
    devices_strict(false);
    close_scene(&s);
}

static kvf_session *first_connected(kvf_agent *agent) {
    kvf_session *session = agent->all_sessions;
    while (session && (session->incoming || !session->peer))
        session = session->next;
    assert_non_null(session);
    return session;
}

/* The driver unmaps the peer's memory only when the stream has gone on. */
static void losing_a_peer_lets_streams_pass_before_its_memory_is_let_go(void **state) {
    scene s;
    open_scene(&s, *state);
    start_pull(&s, SLOWLY);
    kvf_agent *d = s.w.d.agents[0];
    let_wait(&s, 0, UINT32_MAX);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_until(&s.w, d->moving_pulls);
    assert_false(reader_passed(&s.readers[0], 0));
    devices_strict(true);
    world_lose(d, first_connected(d));
    assert_true(reader_passed(&s.readers[0], 0));
    (void)world_failed(&s.w, d, s.ours[0], KVF_E_PEER_LOST);
    devices_strict(false);
    leave_scene(&s);
}

static void closing_lets_streams_pass_before_the_driver_waits_for_them(void **state) {
    scene s;
    open_scene(&s, *state);
    start_push(&s);
    let_wait(&s, 0, LAYERS); /* of one rank only, for this thread closes one after the other */
    devices_strict(true);
    world_close_agents(&s.w.d);
    assert_true(reader_passed(&s.readers[0], 0));
    devices_strict(false);
    leave_scene(&s);
}

/* The agent opened its hasher with the memory: if it did so now, the driver would wait for the stream. */
static void what_is_verified_arrives_though_a_stream_waits(void **state) {
    scene s;
    verifies = true;
    open_scene(&s, *state);
    verifies = false;
    start_pull(&s, 0);
    devices_strict(true);
    for (uint32_t r = 0; r < s.w.d.rank_count; r++)
        let_wait(&s, r, LAYERS);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_all_passed(&s);
    devices_strict(false);
    close_scene(&s);
}

/* ---- where a call of the engine keeps the driver's lock --------------------------------------------- */

typedef struct two_calls {
    CUdeviceptr memory;
    CUevent event;
    _Atomic bool asked;
} two_calls;

static void *free_memory(void *context) {
    device_room_free(((two_calls *)context)->memory);
    return NULL;
}

/* Frees memory in another thread, which waits for a stream. From now on each call of the driver waits for that thread. */
static pthread_t begin_to_free(two_calls *calls) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, free_memory, calls), 0);
    while (devices_waiting() == 0)
        (void)usleep(100);
    return thread;
}

static kvf_ticket *ticket_of(const scene *s, uint32_t rank) {
    kvf_ticket *ticket = NULL;
    HASH_FIND(hh, s->w.d.agents[rank]->tickets, &s->ours[rank], sizeof s->ours[rank], ticket);
    assert_non_null(ticket);
    return ticket;
}

/* A pull; a stream that waits for its first rank, which has a second; and a thread that waits for the stream with the
 * driver's lock. With `forgets` the agent does not look at the deadline again. */
static pthread_t open_held_up(scene *s, const route *by, two_calls *calls, bool forgets) {
    open_scene(s, by);
    calls->memory = device_room(D_DEVICE, 4096);
    start_pull(s, 0);
    kvf_pull *pull = kvf_pull_of(ticket_of(s, 0));
    pull->base.deadline = pull->patience = pull->base.created + SECOND;
    devices_strict(true);
    let_wait(s, 0, LAYERS);
    if (forgets)
        pull->base.deadline = pull->patience = UINT64_MAX;
    const pthread_t freeing = begin_to_free(calls);
    world_hold(&s->w.p, &s->held, s->theirs);
    return freeing;
}

/* The stream, and so the thread, goes on at last; the other ranks get what they pull. */
static void close_held_up(scene *s, pthread_t freeing) {
    assert_int_equal(pthread_join(freeing, NULL), 0);
    assert_true(reader_passed(&s->readers[0], 0));
    devices_strict(false);
    for (uint32_t r = 1; r < s->w.d.rank_count; r++)
        world_done(&s->w, s->w.d.agents[r], s->ours[r]);
    for (uint32_t r = 0; r < s->w.p.rank_count; r++)
        (void)kvf_agent_cancel(s->w.p.agents[r], s->theirs[r]);
    close_scene(s);
}

static void who_keeps_the_drivers_lock_holds_up_requests_until_the_deadline(void **state) {
    DEVICES_ARE_STAND_INS(); /* a driver without such a lock holds up nobody */
    scene s;
    two_calls calls = {0};
    const pthread_t freeing = open_held_up(&s, *state, &calls, false);
    (void)world_failed(&s.w, s.w.d.agents[0], s.ours[0], KVF_E_TIMEOUT);
    close_held_up(&s, freeing);
}

/* All bytes come, and the agent does not see that it is late: without the guard's word it would say DONE. */
static void a_request_whose_streams_went_on_too_early_is_never_done(void **state) {
    DEVICES_ARE_STAND_INS();
    scene s;
    two_calls calls = {0};
    const pthread_t freeing = open_held_up(&s, *state, &calls, true);
    assert_non_null(
        strstr(world_failed(&s.w, s.w.d.agents[0], s.ours[0], KVF_E_TIMEOUT)->detail, "streams went on"));
    close_held_up(&s, freeing);
}

/* ---- the stand-in --------------------------------------------------------------------------------- */

static void *ask_event(void *context) {
    two_calls *calls = context;
    const kvf_cuda *cuda;
    assert_ok(kvf_cuda_enter(D_DEVICE, &cuda));
    assert_int_equal(cuda->cuEventQuery(calls->event), 0);
    calls->asked = true;
    kvf_cuda_leave(cuda);
    return NULL;
}

/* ---- words ------------------------------------------------------------------------------------- */

#define HOUR_NS 3600000000000ull

static kvf_cuda_word *take_word_for(uint32_t most, uint64_t wait_ns) {
    kvf_cuda_word *word = NULL;
    kvf_status status;
    while ((status = kvf_cuda_word_take(most, wait_ns, &word)) == KVF_E_AGAIN)
        assert_ok(kvf_cuda_words_add(D_DEVICE));
    assert_ok(status);
    return word;
}

static kvf_cuda_word *take_word(uint32_t most) {
    return take_word_for(most, UINT64_MAX);
}

static void await_word(reader *at, kvf_cuda_word *word, uint32_t number) {
    const kvf_cuda_mark mark = kvf_cuda_word_mark(word, number);
    assert_ok(kvf_cuda_mark_await(&mark, D_DEVICE, at->stream));
    assert_ok(kvf_cuda_enter(D_DEVICE, &at->cuda));
    assert_int_equal(at->cuda->cuEventCreate(&at->passed[at->count], CU_EVENT_DISABLE_TIMING), 0);
    assert_int_equal(at->cuda->cuEventRecord(at->passed[at->count++], at->stream), 0);
    kvf_cuda_leave(at->cuda);
}

static void a_stream_waits_until_a_word_has_the_number(void **state) {
    (void)state;
    reader at;
    kvf_cuda_word *word;
    reader_open(&at);
    word = take_word(10);
    await_word(&at, word, 3);
    await_word(&at, word, 10);
    kvf_cuda_word_set(word, 2);
    assert_false(reader_passed(&at, 0));
    kvf_cuda_word_set(word, 5);
    assert_true(reader_passed(&at, 0));
    assert_false(reader_passed(&at, 1));
    (void)kvf_cuda_word_give(word);
    assert_true(reader_passed(&at, 1));
    reader_close(&at);
}

/* Its handle is NULL, as torch has it. */
static void the_default_stream_waits_too(void **state) {
    (void)state;
    reader at = {0};
    kvf_cuda_word *word = take_word(10);
    await_word(&at, word, 3);
    kvf_cuda_word_set(word, 2);
    assert_false(reader_passed(&at, 0));
    kvf_cuda_word_set(word, 3);
    assert_true(reader_passed(&at, 0));
    (void)kvf_cuda_word_give(word);
    assert_ok(kvf_cuda_enter(D_DEVICE, &at.cuda));
    assert_int_equal(at.cuda->cuEventDestroy_v2(at.passed[0]), 0);
    kvf_cuda_leave(at.cuda);
}

/* A stream comes to its wait after the word was given back and taken by another. */
static void a_late_stream_does_not_wait_for_the_words_next_owner(void **state) {
    (void)state;
    reader late, next;
    kvf_cuda_word *word, *again;
    reader_open(&late);
    reader_open(&next);
    for (uint32_t i = 0; i < 3; i++) { /* so that it does not begin at 0 */
        word = take_word(KVF_CUDA_WORD_MOST);
        (void)kvf_cuda_word_give(word);
    }
    word = take_word(10);
    devices_delay(HOUR_NS);
    reader_hold_up(&late);
    await_word(&late, word, 10);
    devices_delay(0);
    (void)kvf_cuda_word_give(word);
    again = take_word(10);
    assert_ptr_equal(again, word);
    await_word(&next, again, 1);
    assert_false(reader_passed(&late, 0));
    devices_hasten();
    assert_true(reader_passed(&late, 0));
    assert_false(reader_passed(&next, 0));
    (void)kvf_cuda_word_give(again);
    assert_true(reader_passed(&next, 0));
    reader_close(&late);
    reader_close(&next);
}

/* Two parties of the process use the guard, and the first leaves. */
static void the_guard_lets_streams_go_when_the_time_is_over(void **state) {
    (void)state;
    reader late, patient;
    reader_open(&late);
    reader_open(&patient);
    assert_ok(kvf_cuda_guard_start());
    assert_ok(kvf_cuda_guard_start());
    kvf_cuda_word *hour = take_word_for(10, HOUR_NS);
    await_word(&patient, hour, 1);
    kvf_cuda_guard_stop();
    kvf_cuda_word *moment = take_word_for(10, 20 * MS); /* before the guard was to look again */
    await_word(&late, moment, 5);
    reader_await(&late, 0);
    kvf_cuda_word_set(moment, 7); /* its owner does not know yet */
    await_word(&late, moment, 10);
    assert_true(reader_passed(&late, 1));
    assert_false(kvf_cuda_word_give(moment));
    assert_true(kvf_cuda_words_awaited());
    assert_false(reader_passed(&patient, 0));
    assert_true(kvf_cuda_word_give(hour));
    assert_false(kvf_cuda_words_awaited());
    kvf_cuda_guard_stop();
    assert_true(reader_passed(&patient, 0));
    reader_close(&late);
    reader_close(&patient);
}

/* Its thread ends with the last party, and the next one begins it again. */
static void the_guard_may_come_and_go(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        kvf_cuda_word *word = take_word_for(1, MS); /* before there is a guard */
        reader at;
        reader_open(&at);
        await_word(&at, word, 1);
        assert_ok(kvf_cuda_guard_start());
        reader_await(&at, 0);
        kvf_cuda_guard_stop();
        assert_false(kvf_cuda_word_give(word));
        reader_close(&at);
    }
}

/* What streams compare passes 2^32: 5000 owners of 2^20 numbers each. */
static void numbers_go_round(void **state) {
    (void)state;
    reader at;
    kvf_cuda_word *word;
    reader_open(&at);
    for (uint32_t i = 0; i < 5000; i++) {
        word = take_word(KVF_CUDA_WORD_MOST);
        if (i % 1000 == 0 || (i >= 2046 && i <= 2049) || (i >= 4094 && i <= 4097)) {
            at.count = 0;
            await_word(&at, word, 7);
            kvf_cuda_word_set(word, 6);
            assert_false(reader_passed(&at, 0));
            kvf_cuda_word_set(word, 7);
            assert_true(reader_passed(&at, 0));
            assert_ok(kvf_cuda_enter(D_DEVICE, &at.cuda));
            assert_int_equal(at.cuda->cuEventDestroy_v2(at.passed[0]), 0);
            kvf_cuda_leave(at.cuda);
            at.count = 0;
        }
        (void)kvf_cuda_word_give(word);
    }
    reader_close(&at);
}

/* A page has 16384 words; what is taken once is taken again. */
static void many_requests_share_pages(void **state) {
    (void)state;
    static kvf_cuda_word *words[40000];
    for (uint32_t i = 0; i < COUNT_OF(words); i++)
        words[i] = take_word(1);
    const size_t left = devices_left();
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < COUNT_OF(words); i++)
            (void)kvf_cuda_word_give(words[i]);
        for (uint32_t i = 0; i < COUNT_OF(words); i++)
            words[i] = take_word(1);
    }
    for (uint32_t i = 0; i < COUNT_OF(words); i++)
        (void)kvf_cuda_word_give(words[i]);
    assert_int_equal(devices_left(), left);
}

static void a_stream_whose_graph_is_captured_is_refused(void **state) {
    (void)state;
    reader at;
    kvf_cuda_word *word;
    reader_open(&at);
    word = take_word(10);
    assert_ok(kvf_cuda_enter(D_DEVICE, &at.cuda));
    devices_capture(at.stream);
    const kvf_cuda_mark mark = kvf_cuda_word_mark(word, 1);
    assert_fails(kvf_cuda_mark_await(&mark, D_DEVICE, at.stream), KVF_E_INVALID, "captured");
    assert_int_equal(devices_capture_end(at.stream), 0); /* and the capture is good */
    kvf_cuda_leave(at.cuda);
    await_word(&at, word, 1);
    (void)kvf_cuda_word_give(word);
    assert_true(reader_passed(&at, 0));
    reader_close(&at);
}

/* The stream of the graph and the default stream wait for each other. */
static void the_default_stream_is_refused_while_it_would_join_a_graph(void **state) {
    (void)state;
    const kvf_cuda *cuda;
    CUstream stream;
    kvf_cuda_word *word = take_word(10);
    const kvf_cuda_mark mark = kvf_cuda_word_mark(word, 1);
    assert_ok(kvf_cuda_enter(D_DEVICE, &cuda));
    assert_int_equal(cuda->cuStreamCreateWithPriority(&stream, 0, -1), 0);
    devices_capture(stream);
    assert_fails(kvf_cuda_mark_await(&mark, D_DEVICE, NULL), KVF_E_INVALID, "captured");
    assert_int_equal(devices_capture_end(stream), 0); /* and the capture is good */
    assert_int_equal(cuda->cuStreamDestroy_v2(stream), 0);
    kvf_cuda_leave(cuda);
    (void)kvf_cuda_word_give(word);
}

/* The control for the tests of strict devices: as with a driver, who frees memory keeps a lock that all others need. */
static void freeing_memory_while_a_stream_waits_holds_up_other_threads(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS(); /* nothing would be left to do where a driver has no such lock */
    reader at, idle;
    two_calls calls = {0};
    pthread_t asking;
    reader_open(&at);
    reader_open(&idle);
    kvf_cuda_word *word = take_word(1), *other = take_word(1);
    await_word(&idle, other, 0);
    calls.event = idle.passed[0];
    calls.memory = device_room(D_DEVICE, 4096);
    devices_strict(true);
    await_word(&at, word, 1);
    const pthread_t freeing = begin_to_free(&calls);
    assert_int_equal(pthread_create(&asking, NULL, ask_event, &calls), 0);
    (void)usleep(20000);
    assert_false(calls.asked);
    (void)kvf_cuda_word_give(word);
    assert_int_equal(pthread_join(freeing, NULL), 0);
    assert_int_equal(pthread_join(asking, NULL), 0);
    assert_true(calls.asked);
    devices_strict(false);
    (void)kvf_cuda_word_give(other);
    reader_close(&at);
    reader_close(&idle);
}

#define NOT_SUPPORTED 801

static void refusals_of_the_driver_are_told(void **state) {
    (void)state;
    reader at;
    kvf_cuda_word *word;
    reader_open(&at);
    word = take_word(10);
    devices_fail("cuStreamWaitValue32_v2", NOT_SUPPORTED, 1);
    const kvf_cuda_mark mark = kvf_cuda_word_mark(word, 1);
    assert_fails(kvf_cuda_mark_await(&mark, D_DEVICE, at.stream), KVF_E_UNSUPPORTED, "letting a stream wait");
    assert_fails(kvf_cuda_mark_await(&mark, 7, at.stream), KVF_E_RANGE, "7");
    assert_fails(kvf_cuda_words_add(7), KVF_E_RANGE, "7");
    (void)kvf_cuda_word_give(word);
    reader_close(&at);
}

int main(void) {
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    devices_open();
    world_place_memory(place);
    world_copies_memory(devices_get, devices_put);
    static const route shm = {.transport = "shm", .way = KVF_WAY_PACKED};
    static const route messages = {.transport = "messages", .way = KVF_WAY_PACKED};
    static const route cuda_packed = {.transport = "cuda", .way = KVF_WAY_PACKED};
    static const route cuda = {.transport = "cuda", .way = KVF_WAY_DIRECT, .shown = true};
    static const route from_host = {.transport = "shm", .way = KVF_WAY_PACKED, .p_on_host = true};
    static const route host = {.transport = "shm", .way = KVF_WAY_DIRECT, .on_host = true};
    static const route host_packed = {.transport = "shm", .way = KVF_WAY_PACKED, .on_host = true};
#define OVER(test, by)                                                                                       \
    { #test " over " #by, test, NULL, NULL, (void *)(uintptr_t) & (by) }
    const struct CMUnitTest tests[] = {
        OVER(streams_pass_as_the_layers_of_a_pull_arrive, shm),
        OVER(streams_pass_as_the_layers_of_a_pull_arrive, messages),
        OVER(streams_pass_as_the_layers_of_a_pull_arrive, cuda),
        OVER(streams_pass_as_the_layers_of_a_pull_arrive, cuda_packed),
        OVER(streams_pass_as_the_layers_of_a_pull_arrive, from_host),
        OVER(streams_pass_as_the_layers_of_a_pull_arrive, host),
        OVER(streams_pass_as_the_layers_of_a_pull_arrive, host_packed),
        OVER(a_stream_that_does_not_wait_finds_that_layers_are_missing, shm),
        OVER(a_stream_that_does_not_wait_finds_that_layers_are_missing, cuda),
        OVER(streams_pass_as_layers_are_pushed, shm),
        OVER(streams_pass_as_layers_are_pushed, messages),
        OVER(streams_pass_as_layers_are_pushed, cuda_packed),
        OVER(streams_pass_as_layers_are_pushed, host_packed),
        OVER(streams_pass_with_the_end_of_a_direct_push, cuda),
        OVER(streams_pass_with_the_end_of_a_direct_push, host),
        OVER(a_stream_waits_for_the_end_or_not_at_all, shm),
        OVER(a_stream_that_nobody_would_let_go_does_not_wait, shm),
        OVER(cancelling_lets_streams_pass, shm),
        OVER(cancelling_lets_streams_pass, host_packed),
        OVER(a_writer_that_goes_lets_streams_pass, shm),
        OVER(a_writer_that_goes_lets_streams_pass, from_host),
        OVER(a_writer_that_is_late_lets_streams_pass_at_the_deadline, shm),
        OVER(closing_the_agent_lets_streams_pass, shm),
        OVER(who_waits_for_room_on_a_stream_holds_up_nobody, shm),
        OVER(who_waits_for_room_on_a_stream_holds_up_nobody, cuda),
        OVER(losing_a_peer_lets_streams_pass_before_its_memory_is_let_go, cuda),
        OVER(closing_lets_streams_pass_before_the_driver_waits_for_them, shm),
        OVER(what_is_verified_arrives_though_a_stream_waits, shm),
        OVER(who_keeps_the_drivers_lock_holds_up_requests_until_the_deadline, shm),
        OVER(who_keeps_the_drivers_lock_holds_up_requests_until_the_deadline, cuda),
        OVER(a_request_whose_streams_went_on_too_early_is_never_done, shm),
        OVER(a_request_whose_streams_went_on_too_early_is_never_done, cuda),
        cmocka_unit_test(a_stream_waits_until_a_word_has_the_number),
        cmocka_unit_test(the_default_stream_waits_too),
        cmocka_unit_test(a_late_stream_does_not_wait_for_the_words_next_owner),
        cmocka_unit_test(the_guard_lets_streams_go_when_the_time_is_over),
        cmocka_unit_test(the_guard_may_come_and_go),
        cmocka_unit_test(numbers_go_round),
        cmocka_unit_test(many_requests_share_pages),
        cmocka_unit_test(a_stream_whose_graph_is_captured_is_refused),
        cmocka_unit_test(the_default_stream_is_refused_while_it_would_join_a_graph),
        cmocka_unit_test(freeing_memory_while_a_stream_waits_holds_up_other_threads),
        cmocka_unit_test(refusals_of_the_driver_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
