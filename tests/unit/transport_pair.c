#include "transport_pair.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "devices.h"
#include "toy_fabric.h"

#define LEAD_BYTES 768u /* bytes of an allocation before the memory that is brought */

#define PERIOD 65521u /* a prime, so that bytes copied from the wrong place differ */

pair_kind transport_variants[] = {
    {"inproc", {true, true}, "inproc", {0}},
    {"inproc", {false, false}, "inproc", {0}},
    {"auto", {true, false}, "inproc", {0}},
    {"shm", {true, true}, "shm", {0}},
    {"shm", {false, false}, "shm", {0}},
    {"shm", {false, false}, "shm", {"shm.direct", "off"}},
    {"shm", {false, false}, "shm", {"shm.direct", "on"}},
    {"shm", {true, false}, "shm", {0}},
    {"shm", {true, false}, "shm", {"shm.direct", "off"}},
    {"toy", {false, false}, "toy", {0}},
    {"cuda", {true, true}, "cuda", {0}},
    {"cuda", {false, false}, "cuda", {0}},
    {"cuda", {true, true}, "cuda", {"cuda.allocation", "exportable"}},
    {"messages", {false, false}, "messages", {"messages.listen", "tcp://127.0.0.1:*"}},
    {"messages", {true, false}, "messages", {"messages.secret_key", TEST_SECRET_KEY}},
    {"libfabric", {false, false}, "libfabric", {0}},
    {"libfabric", {false, false}, "libfabric", {"libfabric.poll_us", "50"}},
    {"ucx", {false, false}, "ucx", {"ucx.tls", "tcp,self"}},
    {"ucx", {true, true}, "ucx", {"ucx.tls", "posix,self"}},
    {"ucx", {true, true}, "ucx", {"ucx.tls", "sysv,self"}},
    {"ucx", {false, false}, "ucx", {"ucx.tls", "posix,cma,self"}},
    {"ucx", {true, false}, "ucx", {"ucx.tls", "posix,sysv,cma,tcp,self"}},
};

static bool is_of_devices(const pair_kind *kind) {
    return strcmp(kind->kind, "cuda") == 0;
}

static bool is_here(const char *kind) {
    if (strcmp(kind, "cuda") == 0 && !devices_present())
        return false;
    for (uint32_t i = 0; kvf_transport_kind_name(i); i++)
        if (strcmp(kvf_transport_kind_name(i), kind) == 0)
            return true;
    return strcmp(kind, "auto") == 0 || strcmp(kind, "toy") == 0;
}

uint32_t transport_variant_count(void) {
    uint32_t count = 0;
    static const char *const interfaces[] = {"UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_NET_IFACE"};
    for (size_t i = 0; i < sizeof interfaces / sizeof *interfaces; i++)
        (void)setenv(interfaces[i], "lo", 1); /* so that tests stay on this machine */
    for (size_t i = 0; i < sizeof transport_variants / sizeof *transport_variants; i++)
        if (is_here(transport_variants[i].kind))
            transport_variants[count++] = transport_variants[i];
    return count;
}

void transport_variant_name(const pair_kind *kind, char *out, size_t size) {
    const kvf_setting *setting = &kind->setting;
    (void)snprintf(
        out, size, "%s, memory %s%s%s%s%s%s", kind->kind, kind->allocated[0] ? "allocated" : "brought",
        kind->allocated[0] == kind->allocated[1] ? "" : " and brought", setting->key ? ", " : "",
        setting->key ? setting->key : "", setting->key ? "=" : "", setting->key ? setting->value : "");
}

uint32_t pair_settings(const kvf_setting *own, const char *library, kvf_setting out[2]) {
    uint32_t count = 0;
    library = library ? library : getenv("KVF_UCX_LIBRARY");
    if (own->key)
        out[count++] = *own;
    if (library)
        out[count++] = (kvf_setting){"ucx.library", library};
    return count;
}

static const uint64_t region_bytes[SIDE_REGIONS] = {(5u << 20) + 13, 70001, (1u << 20) + 4099};

unsigned char side_byte(uint32_t seed, uint32_t region, uint64_t offset) {
    uint64_t mixed =
        (offset % PERIOD + 1) * 0x9e3779b97f4a7c15u + seed * 0x632be59bd9b4e019u + region * (uint64_t)77;
    return (unsigned char)(mixed >> 40);
}

void side_fill(unsigned char *memory, uint32_t seed, uint32_t region, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes && at < PERIOD; at++)
        memory[at] = side_byte(seed, region, at);
    for (uint64_t at = PERIOD; at < bytes; at += PERIOD)
        memcpy(memory + at, memory, bytes - at < PERIOD ? bytes - at : PERIOD);
}

unsigned char *side_memory(const test_side *side, uint32_t region) {
    return side->seen[region];
}

bool pair_can(const pair_kind *kind, kvf_direction direction) {
    kvf_transport_kind known = {.struct_size = sizeof known};
    for (uint32_t i = 0; kvf_transport_describe(i, &known) == KVF_OK; i++)
        if (strcmp(known.name, kind->expected) == 0)
            return known.directions & 1u << direction;
    return true; /* one of the tests' own fabrics */
}

kvf_memory pair_memory(const pair_kind *kind, uint32_t device, uint64_t bytes, unsigned char **seen) {
    kvf_memory memory = {.struct_size = sizeof memory, .bytes = bytes};
    if (!is_of_devices(kind)) {
        memory.address = *seen = malloc(bytes);
        assert_non_null(*seen);
        return memory;
    }
    const kvf_cuda *cuda;
    CUdeviceptr base = 0;
    assert_int_equal(kvf_cuda_enter(device, &cuda), KVF_OK);
    assert_int_equal(cuda->cuMemAlloc_v2(&base, LEAD_BYTES + bytes), 0);
    kvf_cuda_leave(cuda);
    memory.kind = KVF_MEMORY_CUDA;
    memory.device = device;
    memory.address = (void *)(uintptr_t)(base + LEAD_BYTES);
    *seen = devices_look(base + LEAD_BYTES);
    return memory;
}

void pair_memory_free(const kvf_memory *memory) {
    const kvf_cuda *cuda;
    if (memory->kind == KVF_MEMORY_HOST) {
        free(memory->address);
        return;
    }
    assert_int_equal(kvf_cuda_enter(memory->device, &cuda), KVF_OK);
    assert_int_equal(cuda->cuMemFree_v2((CUdeviceptr)(uintptr_t)memory->address - LEAD_BYTES), 0);
    kvf_cuda_leave(cuda);
}

static kvf_memory allocate(const test_side *side, const pair_kind *kind, uint32_t device, uint64_t bytes,
                           unsigned char **seen) {
    kvf_memory memory = {.struct_size = sizeof memory, .bytes = bytes};
    if (is_of_devices(kind)) {
        memory.kind = KVF_MEMORY_CUDA;
        memory.device = device;
    }
    assert_int_equal(
        kvf_transport_allocate(side->transport, memory.kind, memory.device, bytes, &memory.address), KVF_OK);
    *seen = is_of_devices(kind) ? devices_look((uint64_t)(uintptr_t)memory.address) : memory.address;
    assert_non_null(*seen);
    return memory;
}

static void on_notify(void *context, kvf_transport *transport, const char *sender, const void *data,
                      size_t bytes) {
    test_side *at = context;
    (void)snprintf(at->sender, sizeof at->sender, "%s", sender);
    assert_ptr_equal(at->transport, transport);
    assert_true(bytes >= sizeof(uint32_t));
    if (at->notices < SIDE_NOTICES)
        memcpy(&at->notice_values[at->notices], data, sizeof(uint32_t));
    at->notices++;
    if (at->on_notice)
        at->on_notice(at);
}

static void on_peer_lost(void *context, kvf_transport *transport, kvf_peer *peer, const char *detail) {
    test_side *at = context;
    (void)snprintf(at->lost_detail, sizeof at->lost_detail, "%s", detail);
    assert_ptr_equal(at->transport, transport);
    at->lost++;
    at->lost_peer = peer;
}

void side_open(test_side *side, const pair_kind *kind, uint32_t seed) {
    kvf_setting settings[2];
    kvf_transport_options options = {.struct_size = sizeof options,
                                     .settings = settings,
                                     .setting_count = pair_settings(&kind->setting, NULL, settings),
                                     .on_notify = on_notify,
                                     .on_peer_lost = on_peer_lost,
                                     .context = side};
    memset(side, 0, sizeof *side);
    (void)snprintf(side->name, sizeof side->name, "side %u", seed);
    options.name = side->name;
    const kvf_fabric *over = strcmp(kind->kind, "toy") == 0 ? &toy_fabric : NULL;
    assert_int_equal(kvf_transport_open_over(over, kind->kind, &options, &side->transport), KVF_OK);
    for (uint32_t i = 0; i < SIDE_REGIONS; i++) {
        const uint32_t device = seed % 2;
        side->brought[i] = !kind->allocated[i % 2];
        side->regions[i] = side->brought[i] ? pair_memory(kind, device, region_bytes[i], &side->seen[i])
                                            : allocate(side, kind, device, region_bytes[i], &side->seen[i]);
        side_fill(side->seen[i], seed, i, region_bytes[i]);
    }
    assert_int_equal(kvf_transport_register(side->transport, side->regions, SIDE_REGIONS), KVF_OK);
}

void side_close(test_side *side) {
    kvf_transport_close(side->transport);
    for (uint32_t i = 0; i < SIDE_REGIONS; i++)
        if (side->brought[i])
            pair_memory_free(&side->regions[i]);
    side->transport = NULL;
    memset(side->brought, 0, sizeof side->brought);
}

kvf_peer *side_connect(test_side *from, const test_side *to) {
    const void *card;
    size_t bytes;
    kvf_peer *peer = NULL;
    assert_int_equal(kvf_transport_export(to->transport, &card, &bytes), KVF_OK);
    assert_int_equal(kvf_transport_connect(from->transport, card, bytes, &peer), KVF_OK);
    return peer;
}

void note_outcome(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    test_outcome *noted = context;
    noted->calls++;
    noted->status = status;
    (void)snprintf(noted->detail, sizeof noted->detail, "%s", detail);
    noted->operation = operation;
}

void drive(test_side *a, test_side *b, const uint32_t *counter, uint32_t wanted) {
    test_side *sides[2] = {a, b};
    while (*counter < wanted) {
        struct pollfd fds[2];
        for (int i = 0; i < 2; i++)
            fds[i] = (struct pollfd){sides[i] ? kvf_transport_event_fd(sides[i]->transport) : -1, POLLIN, 0};
        assert_true(poll(fds, 2, 60000) > 0);
        for (int i = 0; i < 2; i++)
            if (sides[i] && fds[i].revents)
                assert_int_equal(kvf_transport_progress(sides[i]->transport, NULL), KVF_OK);
    }
}

void drive_idle(test_side *a, test_side *b) {
    test_side *sides[2] = {a, b};
    for (bool busy = true; busy;) {
        busy = false;
        for (int i = 0; i < 2; i++) {
            if (!sides[i])
                continue;
            struct pollfd fd = {kvf_transport_event_fd(sides[i]->transport), POLLIN, 0};
            if (poll(&fd, 1, 0) > 0) {
                assert_int_equal(kvf_transport_progress(sides[i]->transport, NULL), KVF_OK);
                busy = true;
            }
        }
    }
}

kvf_status move_runs(test_side *a, test_side *b, kvf_peer *peer, kvf_direction direction, const kvf_run *runs,
                     size_t count) {
    test_outcome outcome = {0};
    kvf_operation operation = 0;
    assert_int_equal(kvf_transport_submit(peer, direction, runs, count, note_outcome, &outcome, &operation),
                     KVF_OK);
    assert_int_equal(outcome.calls, 0);
    drive(a, b, &outcome.calls, 1);
    assert_int_equal(outcome.calls, 1);
    assert_int_equal(outcome.operation, operation);
    return outcome.status;
}

uint64_t draw(uint64_t *state, uint64_t below) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return below ? *state % below : 0;
}

size_t draw_runs(uint64_t *state, const test_side *local, const test_side *remote, kvf_direction direction,
                 uint64_t longest, kvf_run *runs, size_t most) {
    const test_side *to = direction == KVF_READ ? local : remote;
    const test_side *from = direction == KVF_READ ? remote : local;
    uint64_t next[SIDE_REGIONS] = {0}; /* places in the destination ascend, so no two runs overlap */
    size_t count = 0;
    while (count < most) {
        uint32_t into = (uint32_t)draw(state, SIDE_REGIONS);
        uint32_t of = (uint32_t)draw(state, SIDE_REGIONS);
        uint64_t bytes = draw(state, draw(state, 4) ? longest / 64 + 1 : longest);
        uint64_t begin = next[into] + draw(state, 100);
        if (begin + bytes > to->regions[into].bytes || bytes > from->regions[of].bytes)
            break;
        uint64_t source = draw(state, from->regions[of].bytes - bytes + 1);
        next[into] = begin + bytes;
        bool read = direction == KVF_READ;
        runs[count++] = (kvf_run){.local_offset = read ? begin : source,
                                  .remote_offset = read ? source : begin,
                                  .bytes = bytes,
                                  .local_region = read ? into : of,
                                  .remote_region = read ? of : into};
    }
    return count;
}
