/*
 * Devices are used in one way after another, and each time another call of the driver fails, until none is left that has
 * not: either nobody notices, or there is one error, which names the device and the driver's reason. Nothing is left
 * behind, and the next use succeeds. Over the stand-in of tests/fakes/fake_cuda.c only.
 */
#include <stdio.h>
#include <string.h>

#include <kvferry/device.h>

#include "base/watch.h"
#include "cuda/allocation.h"
#include "cuda/copier.h"
#include "cuda/device_image.h"
#include "cuda/hasher.h"
#include "cuda/moment.h"
#include "cuda/segments.h"
#include "cuda/word.h"
#include "devices.h"
#include "shapes.h"

enum { BYTES = 8192 };
static CUdeviceptr memory, segment;
static uint64_t segment_bytes;

/* ---- ways to use a device --------------------------------------------------------------------------- */

static kvf_status copy(kvf_copier *copier) {
    kvf_copy_job *job;
    kvf_status status = kvf_copier_begin(copier, &job);
    if (status)
        return status;
    const kvf_device_side from = {.packed = memory}, to = {.packed = memory + BYTES / 2};
    status = kvf_copy_job_add(job, &from, &to, 1, 1, BYTES / 2);
    if (!status)
        status = kvf_copy_job_start(job, NULL);
    else
        kvf_copy_job_drop(job);
    if (status)
        return status;
    while ((status = kvf_copy_job_poll(job)) == KVF_IN_PROGRESS)
        ;
    return status;
}

static kvf_status use_copier(void) {
    static const uint32_t ids[] = {1, 2, 3};
    static _Alignas(4096) unsigned char host[4096];
    kvf_copier *copier = NULL;
    kvf_device_table table = {0};
    uint64_t room = 0, address;
    kvf_status status = kvf_copier_open(1, NULL, &copier);
    if (status)
        return status;
    status = kvf_copier_pin(copier, host, sizeof host, &address);
    const bool pinned = !status;
    if (!status)
        status = kvf_copier_put_table(copier, ids, 3, &table);
    if (!status)
        status = kvf_copier_room(copier, UINT64_C(40) << 20, &room);
    if (!status)
        status = copy(copier);
    kvf_copier_drop_room(copier, room);
    kvf_copier_drop_table(copier, &table);
    if (pinned)
        kvf_copier_unpin(copier, host);
    const kvf_status closed = kvf_copier_close(copier);
    return status ? status : closed;
}

static kvf_status use_hasher(void) {
    static const uint32_t id = 0;
    const uint64_t *sums;
    kvf_hasher *hasher = NULL;
    kvf_status status = kvf_hasher_open(1, &hasher);
    if (status)
        return status;
    kvf_hasher_begin(hasher, &id, 1, 1);
    status = kvf_hasher_start(hasher);
    while (!status && (status = kvf_hasher_poll(hasher, &sums)) == KVF_IN_PROGRESS)
        status = KVF_OK;
    const kvf_status closed = kvf_hasher_close(hasher);
    return status ? status : closed;
}

static kvf_status allocate_and_free(void) {
    CUdeviceptr address;
    kvf_cuda_place place;
    kvf_status status = kvf_cuda_allocate(1, BYTES, &address);
    if (status)
        return status;
    status = kvf_cuda_place_of(1, address, BYTES, &place);
    kvf_cuda_free(1, address);
    return status;
}

static kvf_status allocate_and_free_a_segment(void) {
    CUdeviceptr address;
    uint64_t all;
    kvf_status status = kvf_segment_allocate(1, BYTES, &address, &all);
    if (!status)
        kvf_segment_free(1, address, all);
    return status;
}

static kvf_status share_a_segment(void) {
    static const uint32_t devices[] = {1};
    kvf_segment_handle handle = {.fd = -1};
    kvf_mapping *mapping = NULL;
    kvf_cuda_place place;
    uint64_t bytes = 0;
    kvf_status status = kvf_cuda_place_of(0, segment, segment_bytes, &place);
    if (!status)
        status = kvf_segments_check(0, &place);
    if (!status)
        status = kvf_segment_export(0, segment, segment_bytes, &bytes, &handle);
    if (!status)
        status = kvf_mapping_open(0, bytes, 1, &mapping);
    if (!status)
        status = kvf_mapping_add(mapping, &handle, bytes);
    if (!status)
        status = kvf_mapping_allow(mapping, devices, 1);
    kvf_mapping_close(mapping);
    kvf_fd_close(&handle.fd);
    return status;
}

static kvf_status let_reach(void) {
    return kvf_cuda_let_reach(0, 1);
}

static kvf_status ask(void) {
    kvf_device_info info = {.struct_size = sizeof info};
    uint32_t device;
    kvf_status status = kvf_device_get_info(KVF_MEMORY_CUDA, 1, &info);
    return status ? status : kvf_device_of(KVF_MEMORY_CUDA, (const void *)(uintptr_t)memory, &device);
}

/* Between two endpoints of this process, on two devices, until the end of a read. */
typedef struct endpoints {
    kvf_transport *owner, *reader;
    kvf_peer *peer;
    bool over;
    kvf_status status;
    char detail[512];
} endpoints;

static void note_end(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    endpoints *p = context;
    (void)operation;
    p->over = true;
    p->status = status;
    (void)snprintf(p->detail, sizeof p->detail, "%s", detail);
}

static kvf_status open_end(uint32_t device, CUdeviceptr address, kvf_transport **out) {
    const kvf_memory region = {.struct_size = sizeof region,
                               .address = (void *)(uintptr_t)address,
                               .bytes = BYTES,
                               .kind = KVF_MEMORY_CUDA,
                               .device = device};
    assert_ok(kvf_transport_open("cuda", NULL, out));
    return kvf_transport_register(*out, &region, 1);
}

static kvf_status read_between(endpoints *p) {
    static kvf_run run = {.bytes = BYTES};
    const void *card;
    size_t bytes;
    kvf_operation operation;
    kvf_status status = open_end(0, segment, &p->owner);
    if (!status)
        status = open_end(1, memory, &p->reader);
    if (!status)
        status = kvf_transport_export(p->owner, &card, &bytes);
    if (!status)
        status = kvf_transport_connect(p->reader, card, bytes, &p->peer);
    if (!status)
        status = kvf_transport_submit(p->peer, KVF_READ, &run, 1, note_end, p, &operation);
    while (!status && !p->over) {
        assert_ok(kvf_transport_progress(p->owner, NULL));
        assert_ok(kvf_transport_progress(p->reader, NULL));
    }
    return status ? status : p->status ? kvf_fail(p->status, "%s", p->detail) : KVF_OK;
}

static kvf_status read_from_an_endpoint(void) {
    endpoints p = {.owner = NULL};
    kvf_status status = read_between(&p);
    char detail[KVF_DETAIL_BYTES];
    (void)snprintf(detail, sizeof detail, "%s", status ? kvf_error_detail() : "");
    kvf_transport_close(p.reader);
    kvf_transport_close(p.owner);
    return status ? kvf_fail(status, "%s", detail) : KVF_OK;
}

static kvf_status use_words(void) {
    static kvf_cuda_word *word;
    const kvf_cuda *cuda;
    CUstream stream = NULL;
    kvf_status status = word ? KVF_OK : kvf_cuda_words_add(1); /* pages stay until the process ends */
    if (!status && !word)
        status = kvf_cuda_word_take(1, UINT64_MAX, &word);
    if (status || (status = kvf_cuda_enter(1, &cuda)))
        return status;
    status = kvf_cuda_status(1, cuda->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), "-");
    const kvf_cuda_mark mark = kvf_cuda_word_mark(word, 1);
    kvf_cuda_word_set(word, 1);
    if (!status)
        status = kvf_cuda_mark_await(&mark, 1, stream);
    if (stream)
        (void)cuda->cuStreamDestroy_v2(stream);
    kvf_cuda_leave(cuda);
    return status;
}

static kvf_status wait_for_event(void) {
    const kvf_cuda *cuda;
    CUstream stream = NULL;
    CUevent event = NULL;
    kvf_cuda_moment *moment = NULL;
    kvf_status status = kvf_cuda_enter(1, &cuda);
    if (status)
        return status;
    if (!cuda->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0) &&
        !cuda->cuEventCreate(&event, 0))
        (void)cuda->cuEventRecord(event, stream);
    status = event ? kvf_cuda_moment_take(1, event, &moment) : KVF_OK;
    while (moment && (status = kvf_cuda_moment_status(moment)) == KVF_IN_PROGRESS)
        ;
    kvf_cuda_moment_drop(moment);
    if (event)
        (void)cuda->cuEventDestroy_v2(event);
    if (stream)
        (void)cuda->cuStreamDestroy_v2(stream);
    kvf_cuda_leave(cuda);
    return status;
}

/* ---- failures --------------------------------------------------------------------------------------- */

static void fail_each_call(kvf_status (*use)(void), int result, const char *where) {
    assert_ok(use()); /* makes what stays */
    for (unsigned number = 1;; number++) {
        const size_t left = devices_left();
        devices_fail_nth(number, result);
        const kvf_status status = use();
        char failed[64];
        (void)snprintf(failed, sizeof failed, "%s", devices_failed());
        devices_fail_nth(0, 0);
        if (!failed[0]) {
            assert_ok(status);
            assert_true(number > 1);
            return;
        }
        const char *detail = status ? kvf_error_detail() : "";
        if (status && (!strstr(detail, where) || !strstr(detail, "CUDA_ERROR_")))
            fail_msg("call %u, %s: %s: %s", number, failed, kvf_status_name(status), detail);
        if (devices_left() != left)
            fail_msg("call %u, %s: %d are left", number, failed, (int)(devices_left() - left));
        assert_ok(use());
    }
}

typedef struct usage {
    const char *name;
    kvf_status (*use)(void);
    const char *where; /* in the error's detail */
} usage;

static void each_call_that_fails_is_one_error_and_leaves_nothing(void **state) {
    enum { SOMETHING_ELSE = 304 };
    const usage *given = *state;
    memory = device_room(1, BYTES);
    assert_ok(kvf_segment_allocate(0, BYTES, &segment, &segment_bytes));
    fail_each_call(given->use, CUDA_ERROR_OUT_OF_MEMORY, given->where);
    fail_each_call(given->use, SOMETHING_ELSE, given->where);
    kvf_segment_free(0, segment, segment_bytes);
    device_room_free(memory);
}

/* A request fails, and says why: it once said that the memory had been freed. */
static void memory_of_a_device_that_has_failed_is_not_said_to_be_freed(void **state) {
    static const int results[] = {CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_ECC_UNCORRECTABLE,
                                  CUDA_ERROR_UNKNOWN};
    (void)state;
    const CUdeviceptr room = device_room(1, BYTES);
    kvf_cuda_place place;
    for (size_t i = 0; i < COUNT_OF(results); i++) {
        devices_stick(results[i]);
        assert_fails(kvf_cuda_place_of(1, room, BYTES, &place), KVF_E_IO,
                     "CUDA device 1: asking whose memory an address is: CUDA_ERROR_");
        devices_stick(0);
        assert_ok(kvf_cuda_place_of(1, room, BYTES, &place));
    }
    device_room_free(room);
    assert_fails(kvf_cuda_place_of(1, room, BYTES, &place), KVF_E_INVALID, "or it was freed");
}

int main(void) {
    static usage usages[] = {
        {"a copier", use_copier, "CUDA device 1: "},
        {"checksums", use_hasher, "CUDA device 1: "},
        {"memory", allocate_and_free, "CUDA device 1: "},
        {"a segment", allocate_and_free_a_segment, "CUDA device 1: "},
        {"a segment of another device", share_a_segment, "CUDA device "},
        {"devices that reach each other", let_reach, "CUDA device "},
        {"questions", ask, ""},
        {"words", use_words, "CUDA device 1: "},
        {"an event", wait_for_event, "CUDA device 1: "},
        {"two endpoints", read_from_an_endpoint, "CUDA device "},
    };
    struct CMUnitTest tests[COUNT_OF(usages) + 1] = {
        cmocka_unit_test(memory_of_a_device_that_has_failed_is_not_said_to_be_freed)};
    for (size_t i = 0; i < COUNT_OF(usages); i++)
        tests[i + 1] = (struct CMUnitTest){
            usages[i].name, each_call_that_fails_is_one_error_and_leaves_nothing, NULL, NULL, &usages[i]};
    if (!devices_present()) {
        (void)printf("skipped: no stand-in for a driver, or this build has no device code\n");
        return 77;
    }
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
