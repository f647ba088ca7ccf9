/*
 * Two processes that share one device, or have one each: a producer with its cache in the device's memory, and a
 * consumer that pulls from it, by every transport between processes: packed, and directly by "cuda". Every cell is
 * compared; cells that the producer has changed meanwhile must be found wrong. So also where "auto" would take "cuda"
 * and the driver does not let the consumer map the producer's memory: then the pull goes packed, and the consumer
 * says so.
 *
 * And a push: the consumer may be refused what the producer writes from, though the producer could connect. Both also
 * with caches in segments (cuda/segments.h), on either side, which the test allocates, or the agents.
 *
 * Both are this program, started as `agent_device_processes_test ROLE TRANSPORT HEARS SAYS`, with the descriptors of
 * two pipes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/agent.h>

#include "cuda/device_image.h"
#include "devices.h"
#include "shapes.h"

/* The way by which peers are shown the memory and do not reach it. */
#define REFUSED "refused"
#define PUSHED "pushed"                 /* directly */
#define PUSHED_REFUSED "pushed refused" /* the consumer may not map the producer's memory */
#define SEGMENTS "segments"             /* directly, from caches in segments */
#define PUSHED_SEGMENTS "pushed segments"
#define EXPORTABLE_SEGMENTS "exportable segments" /* which the agents allocate */
#define REFUSED_SEGMENTS                                                                                     \
    "refused segments" /* which the consumer's driver does not take, as it finds when it reads */

static bool is_in_segments(const char *transport) {
    return strstr(transport, SEGMENTS) != NULL;
}

static bool is_by_agent(const char *transport) {
    return strcmp(transport, EXPORTABLE_SEGMENTS) == 0;
}

static bool is_shown(const char *transport) {
    return strcmp(transport, REFUSED) == 0 || is_in_segments(transport) ||
           strncmp(transport, PUSHED, strlen(PUSHED)) == 0;
}

static bool is_refused(const char *transport) {
    return strcmp(transport, REFUSED) == 0 || strcmp(transport, PUSHED_REFUSED) == 0;
}

enum { LAYERS = 3, HEADS = 4, ELEMENTS = 64, TOKENS = 150, BLOCKS = 24, PATIENCE_S = 60, SECOND_FIRST = 12 };
#define SECOND 1000000000ull

typedef struct side {
    kvf_model *model;
    kvf_engine *engine;
    kvf_agent *agent;
    void *seen[LAYERS]; /* where this process reads and writes the device's memory */
    kvf_memory regions[LAYERS];
    bool in_segments, by_agent;
    uint32_t table[BLOCKS];
    uint32_t
        first; /* of the table, for the request that is looked at: 0, or SECOND_FIRST for the second one */
} side;

/* The line of the log about what serves a peer; written by the agent's thread, and read when that has ended. */
static char served[1024];

static void keep_log(void *context, const kvf_log_line *line) {
    (void)context;
    if (strstr(line->text, " reads from P rank 0 over ") || strstr(line->text, " writes to D rank 0 over "))
        (void)snprintf(served, sizeof served, "%s", line->text);
}

/* A region in segments begins so many bytes before the end of the first one, whatever its size: the region's first
 * block, which both sides use, lies in two. */
#define IN_FIRST_SEGMENT 12288u

static uint64_t before_region(void) {
    return devices_segment() - IN_FIRST_SEGMENT;
}

static kvf_memory memory_in_segments(uint32_t device, uint64_t bytes, void **seen) {
    const CUdeviceptr made =
        device_segments(device, before_region() + bytes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    *seen = devices_look(made + before_region());
    return (kvf_memory){.struct_size = sizeof(kvf_memory),
                        .address = (void *)(uintptr_t)(made + before_region()),
                        .bytes = bytes,
                        .kind = KVF_MEMORY_CUDA,
                        .device = devices_number(device)};
}

static void free_segments(const kvf_memory *region) {
    device_segments_free((CUdeviceptr)(uintptr_t)region->address - before_region(),
                         before_region() + region->bytes);
}

static kvf_memory memory_of_agent(kvf_agent *agent, uint32_t device, uint64_t bytes, void **seen) {
    kvf_memory made = {.struct_size = sizeof made,
                       .bytes = bytes,
                       .kind = KVF_MEMORY_CUDA,
                       .device = devices_number(device)};
    kvf_cuda_place place;
    assert_ok(kvf_agent_allocate(agent, KVF_MEMORY_CUDA, made.device, bytes, &made.address));
    const CUdeviceptr address = (CUdeviceptr)(uintptr_t)made.address;
    assert_ok(kvf_cuda_place_of(made.device, address, bytes, &place));
    assert_int_equal(place.segments, 1);
    assert_int_equal(place.bytes % devices_segment(), 0);
    device_show(made.device, address, bytes);
    *seen = devices_look(address);
    devices_get(*seen);
    for (uint64_t i = 0; i < bytes; i++)
        assert_int_equal(((unsigned char *)*seen)[i], 0);
    return made;
}

/* The agent is closed, and has freed it. */
static void check_freed(const kvf_memory *region) {
    const CUdeviceptr address = (CUdeviceptr)(uintptr_t)region->address;
    kvf_cuda_place place;
    device_hide(address);
    assert_fails(kvf_cuda_place_of(region->device, address, 1, &place), KVF_E_INVALID, "or it was freed");
}

static kvf_memory region_of(side *s, uint32_t device, uint64_t bytes, void **seen) {
    if (s->by_agent)
        return memory_of_agent(s->agent, device, bytes, seen);
    return (s->in_segments ? memory_in_segments : device_memory)(device, bytes, seen);
}

static void open_side(side *s, const char *name, const char *transport, uint32_t device,
                      uint32_t block_tokens, const char *order, uint32_t first_block) {
    const kvf_engine_spec spec = {
        .struct_size = sizeof spec,
        .name = name,
        .tp_size = 1,
        .all = {.tokens_per_block = block_tokens, .block_count = BLOCKS, .order = order}};
    const kvf_setting exportable = {"cuda.allocation", "exportable"};
    const kvf_agent_options options = {.struct_size = sizeof options,
                                       .transport = is_shown(transport) ? "auto" : transport,
                                       .settings = &exportable,
                                       .setting_count = is_by_agent(transport),
                                       .own_thread = true,
                                       .log = keep_log};
    kvf_memory *regions = s->regions;
    s->in_segments = is_in_segments(transport);
    s->by_agent = is_by_agent(transport);
    s->first = 0;
    s->model = attention(LAYERS, HEADS, ELEMENTS);
    assert_ok(kvf_engine_build(s->model, &spec, &s->engine));
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(s->engine, 0));
    assert_int_equal(shard->region_count, LAYERS);
    assert_ok(kvf_agent_open(s->engine, 0, &options, &s->agent));
    for (uint32_t i = 0; i < LAYERS; i++)
        regions[i] = region_of(s, device, shard->region_bytes[i], &s->seen[i]);
    for (uint32_t i = 0; i < LAYERS; i++)
        regions[i].withheld = !is_shown(transport) && strcmp(transport, "cuda") != 0;
    for (uint32_t i = 0; i < BLOCKS; i++)
        s->table[i] = (first_block + 7 * i) % BLOCKS;
    assert_ok(kvf_agent_register(s->agent, regions, LAYERS));
}

static void close_side(side *s) {
    kvf_agent_close(s->agent);
    kvf_engine_free(s->engine);
    kvf_model_free(s->model);
    for (uint32_t i = 0; i < LAYERS && s->in_segments; i++)
        (s->by_agent ? check_freed : free_segments)(&s->regions[i]);
    devices_free();
}

static kvf_agent_request request_for(const side *s, kvf_group_steps *steps) {
    const uint32_t block_tokens = kvf_shard_get(kvf_engine_shard(s->engine, 0))->groups[0].tokens_per_block;
    *steps = (kvf_group_steps){.table = {s->table + s->first, (TOKENS + block_tokens - 1) / block_tokens, 0},
                               .end = TOKENS};
    return (kvf_agent_request){.struct_size = sizeof(kvf_agent_request),
                               .id = {s->first ? "s" : "r", 1},
                               .groups = steps,
                               .group_count = 1,
                               .deadline_ns = PATIENCE_S * SECOND};
}

static kvf_event event_of(kvf_agent *agent, uint64_t ticket) {
    kvf_event event = {.struct_size = sizeof event};
    do {
        assert_ok(kvf_agent_wait(agent, PATIENCE_S * SECOND));
        assert_ok(kvf_agent_next_event(agent, &event));
    } while (event.ticket != ticket);
    return event;
}

/* Requires DONE for a ticket. */
static void await(kvf_agent *agent, uint64_t ticket) {
    const kvf_event event = event_of(agent, ticket);
    if (event.kind != KVF_EVENT_DONE)
        fail_msg("%s", event.detail);
}

/* Requires DONE for two tickets. */
static void await_both(kvf_agent *agent, const uint64_t tickets[2]) {
    for (int over = 0; over < 2;) {
        kvf_event event = {.struct_size = sizeof event};
        assert_ok(kvf_agent_wait(agent, PATIENCE_S * SECOND));
        assert_ok(kvf_agent_next_event(agent, &event));
        if (event.ticket != tickets[0] && event.ticket != tickets[1])
            continue;
        if (event.kind != KVF_EVENT_DONE)
            fail_msg("%s", event.detail);
        over++;
    }
}

/* ---- cells -------------------------------------------------------------------------------------- */

static unsigned char content(uint32_t layer, uint32_t part, uint32_t token, uint32_t head, uint64_t byte) {
    const uint64_t cell = (((uint64_t)layer * 2 + part) * TOKENS + token) * HEADS + head + 1;
    return (unsigned char)((cell * 1000003u + byte * 10007u) >> 5);
}

/* Writes all cells, or counts wrong ones; `change` is added to each byte. */
static uint32_t go_over(const side *s, bool write, unsigned char change) {
    const kvf_shard *shard = kvf_engine_shard(s->engine, 0);
    const uint32_t block_tokens = kvf_shard_get(shard)->groups[0].tokens_per_block;
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < LAYERS; i++)
        devices_get(s->seen[i]);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t part = 0; part < 2; part++)
            for (uint32_t token = 0; token < TOKENS; token++)
                for (uint32_t head = 0; head < HEADS; head++) {
                    kvf_cell_location at = {.struct_size = sizeof at};
                    assert_ok(kvf_shard_locate(shard, 0, layer, part,
                                               s->table[s->first + token / block_tokens],
                                               token % block_tokens, head, &at));
                    unsigned char *cell = (unsigned char *)s->seen[at.region] + at.offset;
                    bool same = true;
                    for (uint64_t i = 0; i < at.bytes; i++) {
                        const unsigned char wanted =
                            (unsigned char)(content(layer, part, token, head, i) + change);
                        if (write)
                            cell[i] = wanted;
                        same = same && cell[i] == wanted;
                    }
                    wrong += !same;
                }
    for (uint32_t i = 0; write && i < LAYERS; i++)
        devices_put(s->seen[i]);
    return wrong;
}

/* ---- the producer ------------------------------------------------------------------------------- */

static uint64_t hold(side *p, uint32_t first, unsigned char change) {
    kvf_group_steps steps;
    uint64_t ticket;
    p->first = first;
    const kvf_agent_request held = request_for(p, &steps);
    (void)go_over(p, true, change);
    assert_ok(kvf_agent_hold(p->agent, &held, &ticket));
    return ticket;
}

/* Holds a request with the original bytes, and after each byte from the pipe one with changed bytes. Writes its
 * endpoint when it holds, and again when the request is over. */
static void produce(const char *transport, int hears, int says) {
    side p;
    char endpoint[256] = "", word;
    open_side(&p, "P", transport, 0, 16, "L|BPNH", 3);
    (void)snprintf(endpoint, sizeof endpoint, "%s", kvf_agent_endpoint(p.agent));
    for (unsigned char change = 0;; change++) {
        const bool two = strcmp(transport, REFUSED_SEGMENTS) == 0;
        const uint64_t tickets[] = {hold(&p, 0, change), two ? hold(&p, SECOND_FIRST, change) : 0};
        assert_int_equal(write(says, endpoint, sizeof endpoint), sizeof endpoint);
        if (two)
            await_both(p.agent, tickets);
        else
            await(p.agent, tickets[0]);
        assert_int_equal(write(says, endpoint, sizeof endpoint), sizeof endpoint);
        if (read(hears, &word, 1) != 1)
            break;
    }
    close_side(&p);
}

/* ---- the consumer ------------------------------------------------------------------------------- */

static uint64_t start_pull(const side *d, const char *endpoint, uint64_t deadline_ns) {
    kvf_group_steps steps;
    kvf_agent_request wanted = request_for(d, &steps);
    uint64_t ticket;
    wanted.contact = (kvf_contact){.engine = "P", .endpoint = endpoint};
    wanted.deadline_ns = deadline_ns;
    assert_ok(kvf_agent_pull(d->agent, &wanted, &ticket));
    return ticket;
}

static kvf_event pull_from(const side *d, const char *endpoint, uint64_t deadline_ns) {
    return event_of(d->agent, start_pull(d, endpoint, deadline_ns));
}

/* As where containers share no name space. */
static void refuse_handles(void) {
    enum { OPERATING_SYSTEM = 304 };
    devices_fail("cuIpcOpenMemHandle_v2", OPERATING_SYSTEM, UINT32_MAX);
}

/* As with a driver that does not take the descriptors. */
static void refuse_segments(void) {
    enum { NOT_SUPPORTED = 801 };
    devices_fail("cuMemImportFromShareableHandle", NOT_SUPPORTED, UINT32_MAX);
}

/* The pull fails with the reason, and later ones are not harmed. */
static void be_refused(const side *d, const char *endpoint) {
    refuse_handles();
    const kvf_event event = pull_from(d, endpoint, 2 * SECOND);
    assert_int_equal(event.kind, KVF_EVENT_FAILED);
    if (!strstr(event.detail, "this process may not map it"))
        fail_msg("%s", event.detail);
    devices_fail("", 0, 0);
}

/* Pulls, and waits until the producer knows of the end: otherwise it would have to wait for its lease. */
static void pull(const side *d, int hears, bool refused) {
    char endpoint[256];
    assert_int_equal(read(hears, endpoint, sizeof endpoint), sizeof endpoint);
    if (refused)
        be_refused(d, endpoint);
    const kvf_event event = pull_from(d, endpoint, PATIENCE_S * SECOND);
    if (event.kind != KVF_EVENT_DONE)
        fail_msg("%s", event.detail);
    assert_int_equal(read(hears, endpoint, sizeof endpoint), sizeof endpoint);
}

/* Pushes twice, and maps nothing of the consumer's memory. Where the consumer is refused, the producer could connect,
 * and learns that it is not read. */
static void push(int hears, int says, const char *transport) {
    const bool refused = is_refused(transport);
    side p;
    char endpoint[256] = "", word;
    refuse_handles();
    open_side(&p, "P", transport, 0, 16, "L|BPNH", 3);
    (void)snprintf(endpoint, sizeof endpoint, "%s", kvf_agent_endpoint(p.agent));
    for (unsigned char change = 0; change < 2; change++) {
        kvf_group_steps steps;
        const kvf_agent_request held = request_for(&p, &steps);
        uint64_t ticket;
        (void)go_over(&p, true, change);
        assert_ok(kvf_agent_push(p.agent, &held, &ticket));
        assert_int_equal(write(says, endpoint, sizeof endpoint), sizeof endpoint);
        assert_ok(kvf_agent_push_ready(
            p.agent, ticket,
            &(kvf_push_chunk){.struct_size = sizeof(kvf_push_chunk), .end = TOKENS, .layers = LAYERS}));
        await(p.agent, ticket);
        assert_int_equal(read(hears, &word, 1), 1);
    }
    kvf_agent_peer peer = {.struct_size = sizeof peer};
    kvf_agent_stats stats = {.struct_size = sizeof stats};
    uint32_t count;
    assert_ok(kvf_agent_peers(p.agent, &peer, 1, &count));
    assert_ok(kvf_agent_get_stats(p.agent, &stats));
    assert_true(stats.bytes_written > 0);
    assert_int_equal(stats.bytes_packed, refused ? stats.bytes_written : 0);
    assert_string_equal(peer.fabric, refused ? "shm" : "cuda");
    if (refused != (strstr(peer.passed_over, "this process may not map it") != NULL))
        fail_msg("passed over: \"%s\"", peer.passed_over);
    assert_int_equal(write(says, endpoint, sizeof endpoint), sizeof endpoint); /* the consumer may go */
    close_side(&p);
    if (!strstr(served, refused ? ", packed, because cuda: " : " writes to D rank 0 over cuda"))
        fail_msg("the log says \"%s\"", served);
}

static void be_written(const side *d, int hears) {
    char endpoint[256];
    kvf_group_steps steps;
    kvf_agent_request wanted = request_for(d, &steps);
    uint64_t ticket;
    assert_int_equal(read(hears, endpoint, sizeof endpoint), sizeof endpoint);
    wanted.contact = (kvf_contact){.engine = "P", .endpoint = endpoint};
    assert_ok(kvf_agent_expect(d->agent, &wanted, &ticket));
    await(d->agent, ticket);
}

static void expect(int hears, int says, const char *transport) {
    const uint32_t all = LAYERS * 2 * TOKENS * HEADS;
    char endpoint[256];
    side d;
    if (is_refused(transport))
        refuse_handles();
    open_side(&d, "D", transport, 1, 24, "L|BPHN", 0);
    assert_int_equal(go_over(&d, false, 0), all);
    be_written(&d, hears);
    assert_int_equal(go_over(&d, false, 0), 0);
    /* The control: changed bytes are wrong, and are the changed ones. */
    assert_int_equal(write(says, "c", 1), 1);
    be_written(&d, hears);
    assert_int_equal(go_over(&d, false, 0), all);
    assert_int_equal(go_over(&d, false, 1), 0);
    assert_int_equal(write(says, "c", 1), 1);
    assert_int_equal(read(hears, endpoint, sizeof endpoint), sizeof endpoint);
    close_side(&d);
}

/* Pulls two requests at once, over one connection. */
static void pull_both(side *d, int hears) {
    char endpoint[256];
    uint64_t tickets[2];
    assert_int_equal(read(hears, endpoint, sizeof endpoint), sizeof endpoint);
    for (int i = 0; i < 2; i++) {
        d->first = i ? SECOND_FIRST : 0;
        tickets[i] = start_pull(d, endpoint, PATIENCE_S * SECOND);
    }
    await_both(d->agent, tickets);
    assert_int_equal(read(hears, endpoint, sizeof endpoint), sizeof endpoint);
}

/* Counts the wrong cells of all requests. */
static uint32_t check(side *d, bool two, unsigned char change) {
    uint32_t wrong = 0;
    for (int i = 0; i < (two ? 2 : 1); i++) {
        d->first = i ? SECOND_FIRST : 0;
        wrong += go_over(d, false, change);
    }
    return wrong;
}

/* All went packed, by another transport, and it is said why. */
static void check_packed(const side *d, const char *why) {
    kvf_agent_peer peer = {.struct_size = sizeof peer};
    kvf_agent_stats stats = {.struct_size = sizeof stats};
    uint32_t count;
    assert_ok(kvf_agent_peers(d->agent, &peer, 1, &count));
    assert_ok(kvf_agent_get_stats(d->agent, &stats));
    assert_int_equal(count, 1);
    assert_string_equal(peer.fabric, "shm");
    if (!strstr(peer.passed_over, why))
        fail_msg("%s", peer.passed_over);
    assert_true(stats.bytes_packed > 0 && stats.bytes_packed == stats.bytes_read);
    assert_int_equal(peer.bytes_packed, stats.bytes_packed);
}

/* All went directly, though no region has a handle. */
static void check_direct(const side *d) {
    kvf_agent_peer peer = {.struct_size = sizeof peer};
    kvf_agent_stats stats = {.struct_size = sizeof stats};
    uint32_t count;
    assert_ok(kvf_agent_peers(d->agent, &peer, 1, &count));
    assert_ok(kvf_agent_get_stats(d->agent, &stats));
    assert_string_equal(peer.fabric, "cuda");
    assert_string_equal(peer.way, "kernels, memory mapped segment by segment");
    assert_true(stats.bytes_read > 0);
    assert_int_equal(stats.bytes_packed, 0);
}

static void consume(const char *transport, int hears, int says) {
    const bool late = strcmp(transport, REFUSED_SEGMENTS) == 0, refused = is_refused(transport) || late;
    const char *why = late ? "cuda: region 0: this process may not map it"
                           : "cuda: region 0 is freed, or this process may not map it";
    char line[128];
    side d;
    if (late)
        refuse_segments();
    else if (refused)
        refuse_handles();
    open_side(&d, "D", transport, 1, 24, "L|BPHN", 0);
    const uint32_t all = LAYERS * 2 * TOKENS * HEADS * (late ? 2 : 1);
    assert_int_equal(check(&d, late, 0), all);
    if (late)
        pull_both(&d, hears);
    else
        pull(&d, hears, strcmp(transport, "cuda") == 0 && !devices_are_real());
    assert_int_equal(check(&d, late, 0), 0);
    /* The control: the next bytes differ, and are the changed ones. */
    assert_int_equal(write(says, "c", 1), 1);
    if (late)
        pull_both(&d, hears);
    else
        pull(&d, hears, false);
    assert_int_equal(check(&d, late, 0), all);
    assert_int_equal(check(&d, late, 1), 0);
    if (refused)
        check_packed(&d, why);
    else if (d.in_segments)
        check_direct(&d);
    close_side(&d);
    (void)snprintf(line, sizeof line, ", packed, because %s", why);
    if (refused && !strstr(served, line))
        fail_msg("the log says \"%s\"", served);
}

/* ---- both --------------------------------------------------------------------------------------- */

static int play(const char *role, const char *transport, const char *hears, const char *says) {
    const int in = (int)strtol(hears, NULL, 10), out = (int)strtol(says, NULL, 10);
    devices_open();
    const bool pushed = strncmp(transport, PUSHED, strlen(PUSHED)) == 0;
    if (strcmp(role, "produce") == 0 && pushed)
        push(in, out, transport);
    else if (pushed)
        expect(in, out, transport);
    else if (strcmp(role, "produce") == 0)
        produce(transport, in, out);
    else
        consume(transport, in, out);
    return 0;
}

/* Starts a process that reads from one pipe and writes to the other. */
static pid_t start(const char *role, const char *transport, const int hears[2], const int says[2]) {
    char in[16], out[16];
    (void)snprintf(in, sizeof in, "%d", hears[0]);
    (void)snprintf(out, sizeof out, "%d", says[1]);
    const pid_t child = fork();
    if (child != 0)
        return child;
    (void)close(hears[1]);
    (void)close(says[0]);
    (void)execl("/proc/self/exe", "agent_device_processes_test", role, transport, in, out, (char *)NULL);
    _exit(1);
}

static void run_both(void **state) {
    int to_producer[2], to_consumer[2], how[2] = {-1, -1};
    assert_int_equal(pipe(to_producer), 0);
    assert_int_equal(pipe(to_consumer), 0);
    const pid_t producer = start("produce", *state, to_producer, to_consumer);
    const pid_t consumer = start("consume", *state, to_consumer, to_producer);
    for (int i = 0; i < 2; i++) {
        (void)close(to_producer[i]);
        (void)close(to_consumer[i]);
    }
    assert_int_equal(waitpid(consumer, &how[0], 0), consumer);
    assert_int_equal(waitpid(producer, &how[1], 0), producer);
    assert_int_equal(how[0], 0);
    assert_int_equal(how[1], 0);
}

static void a_pull_goes_from_process_to_process(void **state) {
    run_both(state);
}

static void a_push_goes_from_process_to_process(void **state) {
    run_both(state);
}

int main(int argument_count, char **arguments) {
    if (argument_count == 5)
        return play(arguments[1], arguments[2], arguments[3], arguments[4]);
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    devices_open();
    static char automatic[] = "auto", shm[] = "shm", messages[] = "messages", cuda[] = "cuda";
    static char refused[] = REFUSED, pushed[] = PUSHED, pushed_refused[] = PUSHED_REFUSED;
    static char segments[] = SEGMENTS, pushed_segments[] = PUSHED_SEGMENTS;
    static char exportable_segments[] = EXPORTABLE_SEGMENTS, refused_segments[] = REFUSED_SEGMENTS;
    const struct CMUnitTest tests[] = {
        {"a_pull_goes_from_process_to_process (auto)", a_pull_goes_from_process_to_process, NULL, NULL,
         automatic},
        {"a_pull_goes_from_process_to_process (shm)", a_pull_goes_from_process_to_process, NULL, NULL, shm},
        {"a_pull_goes_from_process_to_process (messages)", a_pull_goes_from_process_to_process, NULL, NULL,
         messages},
        {"a_pull_goes_from_process_to_process (cuda)", a_pull_goes_from_process_to_process, NULL, NULL, cuda},
        {"a_pull_goes_from_process_to_process (refused)", a_pull_goes_from_process_to_process, NULL, NULL,
         refused},
        {"a_pull_goes_from_process_to_process (segments)", a_pull_goes_from_process_to_process, NULL, NULL,
         segments},
        {"a_pull_goes_from_process_to_process (exportable segments)", a_pull_goes_from_process_to_process,
         NULL, NULL, exportable_segments},
        {"a_pull_goes_from_process_to_process (refused segments)", a_pull_goes_from_process_to_process, NULL,
         NULL, refused_segments},
        {"a_push_goes_from_process_to_process (segments)", a_push_goes_from_process_to_process, NULL, NULL,
         pushed_segments},
        {"a_push_goes_from_process_to_process (cuda)", a_push_goes_from_process_to_process, NULL, NULL,
         pushed},
        {"a_push_goes_from_process_to_process (refused)", a_push_goes_from_process_to_process, NULL, NULL,
         pushed_refused},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
