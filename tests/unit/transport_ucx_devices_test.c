/*
 * A UCX that takes memory of CUDA devices, which is a fake one (tests/fakes/fake_ucx_devices.c), over the stand-in for
 * the CUDA driver: which CUDA context is current while UCX is called, and what becomes of memory that UCX refuses.
 */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include <kvferry/transport.h>

#include "devices.h"
#include "fake_ucx_devices.h"
#include "shapes.h"
#include "transport/front.h"
#include "transport/ucx/ucx.h"

#define BYTES 65536u

static char library[1024]; /* the fake UCX that the build made */
static fake_ucx_calls (*calls_of)(const char *function);
static void (*forget)(void);
static void (*refuse)(int result);
static void (*refuse_workers)(int result);
static void (*hang)(int hanging);
static void (*give_card)(int has_card);
static void (*configure)(const char *value);
static const char *(*tls)(void);
static CUresult (*get_current)(CUcontext *context);

static void find(const char *file, const char *name, void *out) {
    void *handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(handle);
    void *address = dlsym(handle, name);
    assert_non_null(address);
    memcpy(out, &address, sizeof address);
}

static int prepare(void **unused) {
    (void)unused;
    char self[800];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(length > 0);
    self[length] = '\0';
    *strstr(self, "/tests/unit/") = '\0';
    (void)snprintf(library, sizeof library, "%s/tests/fakes/libfake_ucx_devices.so", self);
    find(library, "fake_ucx_calls_of", &calls_of);
    find(library, "fake_ucx_forget", &forget);
    find(library, "fake_ucx_refuse", &refuse);
    find(library, "fake_ucx_refuse_workers", &refuse_workers);
    find(library, "fake_ucx_hang", &hang);
    find(library, "fake_ucx_give_card", &give_card);
    find(library, "fake_ucx_configure", &configure);
    find(library, "fake_ucx_tls", &tls);
    find("libcuda.so.1", "cuCtxGetCurrent", &get_current);
    return 0;
}

/* The fake has no RDMA, until give_card(1). */
static kvf_transport *open_kind(const char *kind, const char *emulated) {
    const kvf_setting settings[] = {{"ucx.library", library}, {"ucx.emulated", emulated}};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = settings, .setting_count = 2};
    kvf_transport *made;
    assert_int_equal(kvf_transport_open(kind, &options, &made), KVF_OK);
    return made;
}

static kvf_transport *open_fake(void) {
    return open_kind("ucx", "off");
}

/* Another endpoint, with memory of the host, and its card. */
typedef struct other_end {
    kvf_transport *transport;
    const void *card;
    size_t bytes;
} other_end;

static kvf_memory host_memory(void) {
    static unsigned char bytes[BYTES];
    return (kvf_memory){.struct_size = sizeof(kvf_memory), .address = bytes, .bytes = BYTES};
}

static other_end open_other(void) {
    const kvf_memory memory = host_memory();
    other_end made = {.transport = open_fake()};
    assert_int_equal(kvf_transport_register(made.transport, &memory, 1), KVF_OK);
    assert_int_equal(kvf_transport_export(made.transport, &made.card, &made.bytes), KVF_OK);
    return made;
}

/* Makes progress until UCX is armed. */
static void rest(kvf_transport *transport) {
    bool busy = true;
    for (int i = 0; busy; i++) {
        assert_true(i < 10000);
        assert_int_equal(kvf_transport_progress(transport, &busy), KVF_OK);
    }
}

static void count_end(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation, (void)detail;
    *(unsigned *)context += status == KVF_OK;
}

/* Everything that an endpoint does: it registers, connects to another, moves, notifies, rests, and closes. */
static void use(kvf_transport *transport, const kvf_memory *memory, const other_end *other) {
    const kvf_run run = {.bytes = 100};
    const void *card;
    size_t bytes;
    kvf_peer *peer;
    unsigned ends = 0;
    assert_int_equal(kvf_transport_register(transport, memory, 1), KVF_OK);
    assert_int_equal(kvf_transport_export(transport, &card, &bytes), KVF_OK);
    assert_int_equal(kvf_transport_connect(transport, other->card, other->bytes, &peer), KVF_OK);
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++)
        assert_int_equal(
            kvf_transport_submit(peer, (kvf_direction)direction, &run, 1, count_end, &ends, NULL), KVF_OK);
    assert_int_equal(kvf_transport_notify(peer, "hello", 5), KVF_OK);
    rest(transport);
    assert_int_equal(ends, 2);
    kvf_peer_close(peer);
    rest(transport);
    assert_int_equal(kvf_transport_unregister_region(transport, 0), KVF_OK);
    kvf_transport_close(transport);
}

/* Those in which UCX uses the current context: it registers, copies, asks events, and frees. */
static const char *const sensitive[] = {
    "ucp_mem_map",         "ucp_mem_unmap",    "ucp_rkey_pack",    "ucp_ep_create",      "ucp_ep_rkey_unpack",
    "ucp_get_nbx",         "ucp_put_nbx",      "ucp_ep_flush_nbx", "ucp_am_send_nbx",    "ucp_worker_arm",
    "ucp_worker_progress", "ucp_ep_close_nbx", "ucp_rkey_destroy", "ucp_worker_destroy", "ucp_cleanup"};

static void assert_no_context(void) {
    CUcontext current = NULL;
    assert_int_equal(get_current(&current), 0);
    assert_null(current);
}

static void with_memory_of_a_device_every_call_of_ucx_has_a_context(void **unused) {
    (void)unused;
    void *seen;
    kvf_memory memory = device_memory(1, BYTES, &seen);
    memory.withheld = false;
    const other_end other = open_other();
    kvf_transport *transport = open_fake();
    forget();
    use(transport, &memory, &other);
    for (size_t i = 0; i < sizeof sensitive / sizeof *sensitive; i++) {
        const fake_ucx_calls calls = calls_of(sensitive[i]);
        if (calls.with_context == 0 || calls.without > 0)
            fail_msg("%s: %u calls with a context, %u without", sensitive[i], calls.with_context,
                     calls.without);
    }
    assert_int_equal(calls_of(NULL).without, 0);
    assert_no_context();
    kvf_transport_close(other.transport);
    devices_free();
}

/* Entering costs time, and would start the driver. */
static void without_memory_of_a_device_no_context_is_entered(void **unused) {
    (void)unused;
    const kvf_memory memory = host_memory();
    forget();
    const other_end other = open_other();
    use(open_fake(), &memory, &other);
    kvf_transport_close(other.transport);
    assert_true(calls_of("ucp_worker_arm").without > 0);
    assert_int_equal(calls_of(NULL).with_context, 0);
}

/* ---- memory that UCX refuses -------------------------------------------------------------------- */

static kvf_memory in_segments(CUdeviceptr segments, uint64_t bytes) {
    return (kvf_memory){.struct_size = sizeof(kvf_memory),
                        .address = (void *)(uintptr_t)segments,
                        .bytes = bytes,
                        .kind = KVF_MEMORY_CUDA};
}

static void a_refusal_says_whether_the_memory_was_created_for_network_cards(void **unused) {
    (void)unused;
    static const char *const cause = "cuMemCreate() without allocFlags.gpuDirectRDMACapable";
    const CUdeviceptr segments = device_segments(0, SEGMENT, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    kvf_memory memory = in_segments(segments, SEGMENT);
    void *seen;
    kvf_transport *transport = open_fake();
    refuse(UCS_ERR_IO_ERROR);
    assert_fails(kvf_transport_register(transport, &memory, 1), KVF_E_UNSUPPORTED, cause,
                 "create it with that, or register it as withheld: UCX registration: ");
    memory.withheld = true;
    assert_ok(kvf_transport_register(transport, &memory, 1));
    kvf_transport_close(transport);
    device_segments_free(segments, SEGMENT);

    memory = device_memory(0, BYTES, &seen);
    memory.withheld = false;
    transport = open_fake();
    assert_fails(kvf_transport_register(transport, &memory, 1), KVF_E_UNSUPPORTED,
                 "memory of CUDA device 0 is refused; to move it packed, register it as withheld: UCX ");
    assert_null(strstr(kvf_error_detail(), cause));
    refuse(UCS_OK);
    assert_ok(kvf_transport_register(transport, &memory, 1));
    kvf_transport_close(transport);
    devices_free();
}

static const kvf_front_fabric *ucx_of(const kvf_transport *transport) {
    for (uint32_t i = 0; i < transport->fabric_count; i++)
        if (strcmp(transport->fabrics[i].fabric->kind.name, "ucx") == 0)
            return &transport->fabrics[i];
    return NULL;
}

/* "cuda" takes the memory; UCX stays for what goes packed, because it takes plain memory, as arenas are. */
static void with_auto_memory_that_ucx_refuses_goes_packed_over_it(void **unused) {
    (void)unused;
    const CUdeviceptr segments = device_segments(0, SEGMENT, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    kvf_memory memory = in_segments(segments, SEGMENT);
    void *seen;
    kvf_transport *transport = open_kind("auto", "on");
    refuse(UCS_ERR_IO_ERROR);
    assert_ok(kvf_transport_register(transport, &memory, 1));
    refuse(UCS_OK);
    kvf_memory arena = device_memory(0, BYTES, &seen);
    arena.withheld = false;
    assert_ok(kvf_transport_register_arena(transport, 1, &arena));
    const kvf_front_fabric *ucx = ucx_of(transport);
    assert_non_null(ucx);
    assert_false(ucx->runs);
    assert_false(ucx->disabled);
    assert_int_equal(ucx->arena_kinds, 1u << KVF_MEMORY_CUDA);
    kvf_transport_close(transport);
    device_segments_free(segments, SEGMENT);
    devices_free();
}

/* ---- memory that is reached by emulation -------------------------------------------------------- */

/* Messages take what an agent packs, and the setting changes that. Also if the memory is withheld from all. */
static void auto_leaves_a_devices_memory_that_goes_packed_to_others(void **unused) {
    (void)unused;
    void *seen;
    for (int i = 0; i < 8; i++) {
        const bool on = i & 1, packs = i & 2;
        kvf_memory memory = device_memory(0, BYTES, &seen), arena = device_memory(0, BYTES, &seen);
        memory.withheld = i & 4;
        arena.withheld = false;
        kvf_transport *transport = open_kind("auto", on ? "on" : "off");
        const kvf_front_fabric *ucx = ucx_of(transport);
        assert_non_null(ucx);
        kvf_transport_withhold_emulated(transport, packs);
        assert_ok(kvf_transport_register(transport, &memory, 1));
        kvf_transport_withhold_emulated(transport, false);
        assert_ok(kvf_transport_register_arena(transport, 1, &arena));
        assert_int_equal(ucx->runs, (on || !packs) && !memory.withheld);
        assert_int_equal(ucx->arena_kinds != 0, on || !packs);
        assert_int_equal(ucx->disabled, !on && packs);
        kvf_transport_close(transport);
        devices_free();
    }
}

/* Of the host and of devices: a write that is on its way when its writer is given up must hit an arena. */
static void without_rdma_no_key_is_given_to_memory_that_is_withheld(void **unused) {
    (void)unused;
    void *seen;
    kvf_memory memories[2] = {host_memory(), device_memory(0, BYTES, &seen)};
    memories[1].withheld = false;
    for (int i = 0; i < 4; i++) {
        const bool on = i >= 2;
        kvf_transport *owner = open_kind("ucx", on ? "on" : "off");
        const other_end reader = open_other();
        const kvf_run run = {.bytes = 100};
        const void *card;
        size_t bytes;
        kvf_peer *peer;
        unsigned ends = 0;
        kvf_transport_withhold_emulated(owner, true);
        assert_ok(kvf_transport_register(owner, &memories[i % 2], 1));
        assert_ok(kvf_transport_export(owner, &card, &bytes));
        assert_ok(kvf_transport_connect(reader.transport, card, bytes, &peer));
        assert_int_equal(kvf_peer_withholds(peer), !on);
        assert_int_equal(kvf_transport_submit(peer, KVF_READ, &run, 1, count_end, &ends, NULL),
                         on ? KVF_OK : KVF_E_PERMISSION);
        kvf_transport_close(reader.transport);
        kvf_transport_close(owner);
    }
    devices_free();
}

/* ---- a machine on which UCX does not start ------------------------------------------------------- */

/* As where /dev/shm is read-only or too small. What lists the kinds that work opens "auto", too. */
static void auto_goes_on_where_ucx_cannot_start_and_says_why(void **unused) {
    (void)unused;
    static const ucs_status_t refusals[] = {UCS_ERR_SHMEM_SEGMENT, UCS_ERR_NO_MEMORY, UCS_ERR_NO_RESOURCE};
    const kvf_setting setting = {"ucx.library", library};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &setting, .setting_count = 1};
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        refuse_workers(refusals[i]);
        kvf_transport *transport = open_kind("auto", "on"), *none = NULL;
        kvf_transport_finding found = {.struct_size = sizeof found};
        uint32_t kind = 0;
        while (kvf_transport_find(transport, kind, &found) == KVF_OK && strcmp(found.kind, "ucx") != 0)
            kind++;
        assert_string_equal(found.kind, "ucx");
        assert_false(found.works);
        assert_non_null(strstr(found.why_not, "UCX cannot start here: UCX worker: "));
        kvf_transport_close(transport);
        assert_fails(kvf_transport_open("ucx", &options, &none), KVF_E_UNSUPPORTED,
                     "ucx: UCX cannot start here: UCX worker: ");
    }
    refuse_workers(UCS_OK);
}

/* Where a module of the kernel lets cards reach it, the driver need not. */
static bool has_module(void) {
    return access("/sys/module/nvidia_peermem/version", F_OK) == 0 ||
           access("/sys/module/nv_peer_mem/version", F_OK) == 0 ||
           access("/sys/kernel/mm/memory_peers/nv_mem/version", F_OK) == 0;
}

static void memory_of_a_device_that_network_cards_do_not_reach_is_refused(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    void *seen;
    kvf_memory memory = device_memory(0, BYTES, &seen);
    const kvf_memory of_host = host_memory();
    memory.withheld = false;
    if (has_module())
        skip();
    give_card(1);
    for (int reached = 0; reached < 2; reached++) {
        assert_int_equal(setenv("FAKE_CUDA_DMA_BUF", reached ? "1" : "0", 1), 0);
        kvf_transport *transport = open_fake();
        if (reached)
            assert_ok(kvf_transport_register(transport, &memory, 1));
        else
            assert_fails(kvf_transport_register(transport, &memory, 1), KVF_E_UNSUPPORTED,
                         "region 0 is memory of CUDA device 0, which network cards do not reach here",
                         "load the module nvidia_peermem");
        assert_ok(kvf_transport_register_region(transport, reached, &of_host));
        kvf_transport_close(transport);
        transport = open_kind("ucx", "on");
        assert_ok(kvf_transport_register(transport, &memory, 1));
        kvf_transport_close(transport);
    }
    give_card(0);
    assert_int_equal(unsetenv("FAKE_CUDA_DMA_BUF"), 0);
    devices_free();
}

/* An arena that is not there by this fabric: peers use the one on the host. */
static void a_peer_is_reached_though_its_arena_on_a_device_is_not(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    void *seen;
    kvf_memory memory = device_memory(0, BYTES, &seen), arena = device_memory(0, BYTES, &seen);
    const kvf_memory arena_on_host = host_memory();
    memory.withheld = arena.withheld = false;
    give_card(1);
    kvf_transport *owner = open_kind("auto", "off"), *reader = open_fake();
    const void *card;
    size_t bytes;
    kvf_peer *peer;
    assert_ok(kvf_transport_register_arena(reader, 0, &arena_on_host));
    refuse(UCS_ERR_NO_MEMORY);
    assert_ok(kvf_transport_register(owner, &memory, 1));
    assert_ok(kvf_transport_register_arena(owner, 1, &arena));
    assert_ok(kvf_transport_register_arena(owner, 2, &arena_on_host));
    refuse(UCS_OK);
    assert_ok(kvf_transport_export(owner, &card, &bytes));
    assert_ok(kvf_transport_connect(reader, card, bytes, &peer));
    assert_int_equal(kvf_peer_arenas(peer).ours, 1u << KVF_MEMORY_HOST);
    assert_int_equal(kvf_peer_arenas(peer).theirs, 1u << KVF_MEMORY_HOST);
    give_card(0);
    kvf_transport_close(reader);
    kvf_transport_close(owner);
    devices_free();
}

/* ---- memory in segments ------------------------------------------------------------------------- */

/* As torch's expandable segments are. UCX would register the first one. */
static void all_segments_of_a_region_are_registered(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    const uint64_t bytes = 3 * (uint64_t)SEGMENT;
    const CUdeviceptr segments = device_segments(0, bytes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    const kvf_memory memory = in_segments(segments, bytes);
    const other_end other = open_other();
    kvf_transport *transport = open_fake();
    kvf_peer *peer;
    const kvf_run runs[] = {{.bytes = 100},
                            {.local_offset = SEGMENT - 50, .bytes = 100},
                            {.local_offset = bytes - 100, .bytes = 100}};
    unsigned ends = 0;
    assert_ok(kvf_transport_register(transport, &memory, 1));
    assert_ok(kvf_transport_connect(transport, other.card, other.bytes, &peer));
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++)
        assert_ok(kvf_transport_submit(peer, KVF_READ, &runs[i], 1, count_end, &ends, NULL));
    rest(transport);
    assert_int_equal(ends, 3);
    kvf_transport_close(transport);
    kvf_transport_close(other.transport);
    device_segments_free(segments, bytes);
}

/* ---- handles of memory --------------------------------------------------------------------------- */

static void assert_tls(const char *setting, const char *wanted) {
    const kvf_setting settings[] = {{"ucx.library", library}, {"ucx.tls", setting}};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = settings, .setting_count = setting ? 2 : 1};
    kvf_transport *made;
    assert_ok(kvf_transport_open("ucx", &options, &made));
    assert_string_equal(tls(), wanted);
    kvf_transport_close(made);
}

/* UCX keeps what it has opened by such handles open as long as the process, so that an owner could never free it. */
static void memory_of_peers_is_not_opened_by_handles_unless_the_user_chooses_transports(void **unused) {
    (void)unused;
    assert_tls(NULL, "^cuda_ipc");
    assert_tls("rc,cuda", "rc,cuda");
    assert_tls("all", "all");
    assert_int_equal(setenv("UCX_TLS", "tcp,cuda", 1), 0);
    assert_tls(NULL, "tcp,cuda");
    assert_tls("rc,cuda", "rc,cuda");
    assert_int_equal(setenv("UCX_TLS", "all", 1), 0);
    assert_tls(NULL, "all");
    assert_int_equal(unsetenv("UCX_TLS"), 0);
    configure("tcp,self"); /* in ucx.conf */
    assert_tls(NULL, "tcp,self");
    configure("all");
}

/* ---- devices that are lost ---------------------------------------------------------------------- */

static void note_end(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation, (void)detail;
    *(kvf_status *)context = status;
}

/* UCX never calls back for a copy of its own that such a device was to make. */
static void a_device_that_an_error_has_ended_keeps_no_connection_open(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    void *seen;
    kvf_memory memory = device_memory(0, BYTES, &seen);
    memory.withheld = false;
    const other_end other = open_other();
    kvf_transport *transport = open_fake();
    kvf_peer *peer;
    const kvf_run run = {.bytes = 100};
    kvf_status end = KVF_IN_PROGRESS;
    assert_ok(kvf_transport_register(transport, &memory, 1));
    assert_ok(kvf_transport_connect(transport, other.card, other.bytes, &peer));
    hang(1);
    assert_ok(kvf_transport_submit(peer, KVF_READ, &run, 1, note_end, &end, NULL));
    assert_ok(kvf_transport_progress(transport, NULL));
    devices_stick(CUDA_ERROR_ILLEGAL_ADDRESS);
    kvf_peer_close(peer);
    assert_int_equal(end, KVF_E_CANCELLED);
    kvf_transport_close(transport);
    devices_stick(0);
    hang(0);
    kvf_transport_close(other.transport);
    devices_free();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(with_memory_of_a_device_every_call_of_ucx_has_a_context),
        cmocka_unit_test(without_memory_of_a_device_no_context_is_entered),
        cmocka_unit_test(a_refusal_says_whether_the_memory_was_created_for_network_cards),
        cmocka_unit_test(with_auto_memory_that_ucx_refuses_goes_packed_over_it),
        cmocka_unit_test(auto_leaves_a_devices_memory_that_goes_packed_to_others),
        cmocka_unit_test(without_rdma_no_key_is_given_to_memory_that_is_withheld),
        cmocka_unit_test(auto_goes_on_where_ucx_cannot_start_and_says_why),
        cmocka_unit_test(memory_of_a_device_that_network_cards_do_not_reach_is_refused),
        cmocka_unit_test(a_peer_is_reached_though_its_arena_on_a_device_is_not),
        cmocka_unit_test(all_segments_of_a_region_are_registered),
        cmocka_unit_test(memory_of_peers_is_not_opened_by_handles_unless_the_user_chooses_transports),
        cmocka_unit_test(a_device_that_an_error_has_ended_keeps_no_connection_open),
    };
    devices_open();
    return cmocka_run_group_tests(tests, prepare, NULL);
}
