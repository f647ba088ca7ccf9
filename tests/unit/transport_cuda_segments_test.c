/*
 * Device memory in segments (cuda/segments.h), between two processes, over the stand-in for the driver or a real one
 * (scripts/check-cuda): cells arrive in the reader's order, nothing stays mapped or open, and cards, guests and owners
 * that lie get nothing mapped that is not theirs.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "cuda/device_image.h"
#include "cuda/segments.h"
#include "cuda/word.h"
#include "cuda_scene.h"
#include "transport/card.h"
#include "transport/cuda/cuda_wire.h"

#define OPERATING_SYSTEM 304
#define HOUR_NS 3600000000000ull
#define SHARED CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
#define WINDOWS 2 /* a handle type that does not exist here */

static void connect_and_pull(test_scene *scene) {
    char detail[512];
    assert_ok(scene_connect(scene));
    rank_scribble(&scene->here.cells, 3);
    assert_true(cache_wrong_cells(&scene->here, 1) > 1000);
    if (scene_pull(scene, detail))
        fail_msg("%s", detail);
    assert_int_equal(cache_wrong_cells(&scene->here, 1), 0);
}

/* ---- moving ------------------------------------------------------------------------------------- */

/* Must be the first test, for a context of a device stays. */
static void a_reader_makes_no_context_on_the_device_of_the_owner(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS(); /* with one device there is one context */
    const kvf_cuda *cuda;
    test_scene *scene = scene_open_with("cuda", NULL, THEIRS_IN_SEGMENTS);
    connect_and_pull(scene);
    assert_ok(kvf_cuda_find(&cuda));
    assert_non_null(cuda->contexts[1]);
    scene_close(scene, false);
    assert_null(cuda->contexts[0]);
}

static void cells_arrive_from_memory_in_segments(void **state) {
    enum { SOCKET_AND_PROCESS = 2 };
    char detail[512];
    const size_t left = devices_left();
    test_scene *scene = scene_open_with(*state, NULL, THEIRS_IN_SEGMENTS);
    const uint64_t ours = open_descriptors(), theirs = owner_tell(&scene->owner, 'd');
    connect_and_pull(scene);
    kvf_peer_info info = {.struct_size = sizeof info};
    assert_ok(kvf_peer_get_info(scene->peer, &info));
    assert_string_equal(info.kind, "cuda");
    assert_string_equal(info.way, "kernels, memory mapped segment by segment");
    (void)owner_tell(&scene->owner, 's'); /* the control: a spoiled byte shows in its cell and nowhere else */
    assert_ok(scene_pull(scene, detail));
    assert_int_equal(cache_wrong_cells(&scene->here, 1), 1);
    /* The stand-in keeps a file for each segment that is mapped here; the owner keeps only the connection. What drivers
     * keep is their own matter. */
    const bool counts = !devices_are_real();
    assert_true(!counts || open_descriptors() > ours + SOCKET_AND_PROCESS);
    assert_true(!counts || owner_tell(&scene->owner, 'd') == theirs + 1);
    kvf_peer_close(scene->peer);
    assert_true(!counts || open_descriptors() == ours);
    scene_close(scene, false);
    assert_int_equal(devices_left(), left);
}

/* Torch's expandable segments and vLLM's allocator ask for fabric handles alone where the driver has them. */
static void segments_with_fabric_handles_are_read(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS(); /* few systems have such handles */
    char detail[512];
    const size_t left = devices_left();
    test_scene *scene = scene_open_with("cuda", NULL, THEIRS_IN_SEGMENTS | BY_FABRIC);
    const uint64_t theirs = owner_tell(&scene->owner, 'd');
    connect_and_pull(scene);
    (void)owner_tell(&scene->owner, 's'); /* the control */
    assert_ok(scene_pull(scene, detail));
    assert_int_equal(cache_wrong_cells(&scene->here, 1), 1);
    assert_int_equal(owner_tell(&scene->owner, 'd'), theirs + 1); /* the connection */
    kvf_peer_close(scene->peer);
    assert_int_equal(setenv("FAKE_CUDA_NO_CHANNEL", "1", 1), 0);
    assert_ok(scene_connect(scene));
    assert_int_equal(scene_pull(scene, detail), KVF_E_UNSUPPORTED);
    if (!strstr(detail, "region 0: this process may not map it: CUDA device "))
        fail_msg("%s", detail);
    assert_int_equal(unsetenv("FAKE_CUDA_NO_CHANNEL"), 0);
    scene_close(scene, false);
    assert_int_equal(devices_left(), left);
}

static void what_is_written_from_memory_in_segments_is_read_by_its_owner(void **state) {
    static const unsigned in_segments[] = {OURS_IN_SEGMENTS, THEIRS_IN_SEGMENTS,
                                           OURS_IN_SEGMENTS | THEIRS_IN_SEGMENTS,
                                           OURS_IN_SEGMENTS | THEIRS_IN_SEGMENTS | BY_FABRIC};
    char detail[512];
    const size_t left = devices_left();
    for (size_t i = 0; i < sizeof in_segments / sizeof *in_segments; i++) {
        if (in_segments[i] & BY_FABRIC && devices_are_real())
            continue; /* few systems have such handles */
        test_scene *scene = scene_open_with(*state, NULL, in_segments[i]);
        assert_ok(scene_connect(scene));
        assert_true(owner_tell(&scene->owner, 'c') > 500);
        assert_ok(scene_push(scene, detail));
        assert_int_equal(owner_tell(&scene->owner, 'c'), 0);
        (void)owner_tell(&scene->owner, 's');
        assert_int_equal(owner_tell(&scene->owner, 'c'), 1);
        assert_ok(scene_push(scene, detail));
        assert_int_equal(owner_tell(&scene->owner, 'c'), 0);
        scene_close(scene, false);
        assert_int_equal(devices_left(), left);
    }
}

static void note_status(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation, (void)detail;
    *(kvf_status *)context = status;
}

/* Two endpoints of one process. The segments are accessible to their own device only. Two regions lie in them, which
 * are mapped once. */
static void another_device_of_this_process_maps_segments_for_itself(void **state) {
    enum { BYTES = 3 * SEGMENT };
    (void)state;
    DEVICES_ARE_STAND_INS();
    const size_t left = devices_left();
    const CUdeviceptr segments = device_segments(0, BYTES, SHARED);
    unsigned char *theirs = devices_look(segments);
    for (uint32_t i = 0; i < BYTES; i++)
        theirs[i] = (unsigned char)(i * 2654435761u >> 13);
    kvf_memory owned[2] = {{.struct_size = sizeof *owned,
                            .address = (void *)(uintptr_t)segments,
                            .bytes = BYTES,
                            .kind = KVF_MEMORY_CUDA}};
    owned[1] = owned[0];
    owned[1].address = (void *)(uintptr_t)(segments + 64);
    owned[1].bytes = BYTES - 64;
    for (uint32_t device = 0; device < 2; device++) {
        kvf_transport *owner = NULL, *reader = NULL;
        kvf_peer *peer = NULL;
        void *seen;
        const void *card;
        size_t card_bytes;
        kvf_memory own = device_memory(device, BYTES, &seen);
        own.withheld = false;
        assert_ok(kvf_transport_open("cuda", NULL, &owner));
        assert_ok(kvf_transport_open("cuda", NULL, &reader));
        assert_ok(kvf_transport_register(owner, owned, 2));
        assert_ok(kvf_transport_register(reader, &own, 1));
        assert_ok(kvf_transport_export(owner, &card, &card_bytes));
        assert_ok(kvf_transport_connect(reader, card, card_bytes, &peer));
        kvf_peer_info info = {.struct_size = sizeof info};
        assert_ok(kvf_peer_get_info(peer, &info));
        assert_string_equal(info.way, device == 0 ? "kernels, memory of this process"
                                                  : "kernels, memory mapped segment by segment");
        const kvf_run run = {.remote_offset = 36, .bytes = BYTES - 100, .remote_region = 1};
        kvf_operation operation;
        kvf_status status = KVF_IN_PROGRESS;
        assert_memory_not_equal(seen, theirs + 100, BYTES - 100);
        assert_ok(kvf_transport_submit(peer, KVF_READ, &run, 1, note_status, &status, &operation));
        while (status == KVF_IN_PROGRESS) {
            assert_ok(kvf_transport_progress(owner, NULL));
            assert_ok(kvf_transport_progress(reader, NULL));
        }
        assert_ok(status);
        assert_memory_equal(seen, theirs + 100, BYTES - 100);
        kvf_transport_close(reader);
        kvf_transport_close(owner);
        devices_free();
    }
    device_segments_free(segments, BYTES);
    assert_int_equal(devices_left(), left);
}

/* ---- memory ------------------------------------------------------------------------------------- */

static void a_place_reaches_over_segments_as_far_as_they_are_mapped(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    kvf_cuda_place place;
    const CUdeviceptr segments = device_segments(1, 3 * SEGMENT, SHARED); /* of 1 and 2 */
    assert_ok(kvf_cuda_place_of(1, segments + 100, SEGMENT - 100, &place));
    assert_int_equal(place.segments, 1);
    assert_int_equal(place.bytes, SEGMENT);
    assert_ok(kvf_cuda_place_of(1, segments + 100, SEGMENT - 99, &place));
    assert_int_equal(place.segments, 2);
    assert_int_equal(place.base, segments);
    assert_int_equal(place.offset, 100);
    assert_int_equal(place.bytes, 3 * SEGMENT);
    assert_ok(kvf_cuda_place_of(1, segments + SEGMENT, SEGMENT, &place));
    assert_int_equal(place.base, segments + SEGMENT);
    assert_fails(kvf_cuda_place_of(1, segments, 3 * SEGMENT + 1, &place), KVF_E_INVALID,
                 "its allocation ends after 196608");
    assert_fails(kvf_cuda_place_of(0, segments, SEGMENT, &place), KVF_E_INVALID,
                 "allowed: memory of device 0");
    device_segments_free(segments, 3 * SEGMENT);
    assert_fails(kvf_cuda_place_of(1, segments, SEGMENT, &place), KVF_E_INVALID, "or it was freed");
}

static void memory_that_was_not_created_to_be_shared_is_refused_and_can_be_kept(void **state) {
    static const int types[] = {0, WINDOWS};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (types[i] == WINDOWS && devices_are_real())
            continue; /* the driver creates no such memory */
        kvf_transport *transport = NULL;
        const CUdeviceptr segments = device_segments(0, 2 * SEGMENT, types[i]);
        kvf_memory memory = {.struct_size = sizeof memory,
                             .address = (void *)(uintptr_t)segments,
                             .bytes = 2 * SEGMENT,
                             .kind = KVF_MEMORY_CUDA};
        char word[64];
        (void)snprintf(word, sizeof word, "was created with handle types %d and cannot be shared", types[i]);
        assert_ok(kvf_transport_open(*state, NULL, &transport));
        assert_fails(
            kvf_transport_register(transport, &memory, 1), KVF_E_UNSUPPORTED, word,
            "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR (1) or CU_MEM_HANDLE_TYPE_FABRIC (8), or register "
            "it as withheld");
        memory.withheld = true;
        assert_ok(kvf_transport_register(transport, &memory, 1));
        kvf_transport_close(transport);
        device_segments_free(segments, 2 * SEGMENT);
    }
}

/* ---- memory that the transport allocates ------------------------------------------------------- */

static kvf_status open_allocating(const char *kind, const char *how, kvf_transport **out) {
    const kvf_setting setting = {"cuda.allocation", how};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &setting, .setting_count = 1};
    return kvf_transport_open(kind, &options, out);
}

static uint64_t round_up(uint64_t bytes, uint64_t to) {
    return (bytes + to - 1) / to * to;
}

/* A region lies in it at an odd place. The control: by default there is no segment, and there is a handle. */
static void exportable_memory_of_any_size_is_one_segment_of_zeros(void **state) {
    const uint64_t segment = devices_segment(),
                   sizes[] = {1, segment - 1, segment, segment + 1, 3 * segment + 12345};
    const uint32_t device = devices_number(1);
    const size_t left = devices_left();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int exportable = 0; exportable < 2; exportable++) {
            kvf_transport *transport = NULL;
            kvf_cuda_place place;
            void *made = NULL;
            assert_ok(open_allocating(*state, exportable ? "exportable" : "plain", &transport));
            assert_ok(kvf_transport_allocate(transport, KVF_MEMORY_CUDA, device, sizes[i], &made));
            const CUdeviceptr address = (CUdeviceptr)(uintptr_t)made;
            assert_ok(kvf_cuda_place_of(device, address, sizes[i], &place));
            assert_int_equal(place.base, address);
            assert_int_equal(place.segments, exportable);
            assert_int_equal(place.bytes, round_up(sizes[i], exportable ? segment : 2 << 20));
            device_show(device, address, place.bytes);
            const unsigned char *seen = devices_look(address);
            devices_get(seen);
            for (uint64_t at = 0; at < place.bytes; at++)
                assert_int_equal(seen[at], 0);
            (void)device_hide(address);
            const kvf_memory memory = {.struct_size = sizeof memory,
                                       .address = (char *)made + (sizes[i] > 1),
                                       .bytes = sizes[i] - (sizes[i] > 1),
                                       .kind = KVF_MEMORY_CUDA,
                                       .device = device};
            assert_ok(kvf_transport_register(transport, &memory, 1));
            kvf_transport_close(transport);
            assert_int_equal(devices_left(), left);
            assert_fails(kvf_cuda_place_of(device, address, 1, &place), KVF_E_INVALID, "or it was freed");
        }
}

static bool is_for_network_cards(CUdeviceptr address) {
    const kvf_cuda *cuda;
    CUmemAllocationProp found = {0};
    CUmemGenericAllocationHandle handle = 0;
    assert_ok(kvf_cuda_enter(0, &cuda));
    assert_int_equal(cuda->cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)address), 0);
    assert_int_equal(cuda->cuMemGetAllocationPropertiesFromHandle(&found, handle), 0);
    assert_int_equal(cuda->cuMemRelease(handle), 0);
    kvf_cuda_leave(cuda);
    return found.allocFlags.gpuDirectRDMACapable;
}

static void exportable_memory_is_for_network_cards_if_the_driver_gives_such(void **state) {
    enum { NOT_SUPPORTED = 801 };
    static const struct {
        const char *of_device; /* FAKE_CUDA_RDMA */
        unsigned refusals;
        bool expected;
    } cases[] = {{"1", 0, true}, {"0", 0, false}, {"1", 1, false}};
    DEVICES_ARE_STAND_INS();
    kvf_transport *transport = NULL;
    assert_ok(open_allocating(*state, "exportable", &transport));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        void *made = NULL;
        assert_int_equal(setenv("FAKE_CUDA_RDMA", cases[i].of_device, 1), 0);
        devices_fail("cuMemCreate", NOT_SUPPORTED, cases[i].refusals);
        assert_ok(kvf_transport_allocate(transport, KVF_MEMORY_CUDA, 0, 100, &made));
        assert_int_equal(is_for_network_cards((CUdeviceptr)(uintptr_t)made), cases[i].expected);
    }
    assert_int_equal(unsetenv("FAKE_CUDA_RDMA"), 0);
    kvf_transport_close(transport);
}

/* The user's copy is late when the transport is closed: the memory must wait for it. */
static void exportable_memory_is_freed_after_the_last_use(void **state) {
    enum { LATE_NS = 20000000 };
    (void)state;
    const size_t left = devices_left();
    kvf_transport *transport = NULL;
    const kvf_cuda *cuda;
    CUstream stream = NULL;
    void *made = NULL;
    assert_ok(open_allocating("cuda", "exportable", &transport));
    assert_ok(kvf_transport_allocate(transport, KVF_MEMORY_CUDA, 0, SEGMENT, &made));
    assert_ok(kvf_cuda_enter(0, &cuda));
    assert_int_equal(cuda->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), 0);
    devices_delay(LATE_NS);
    assert_int_equal(cuda->cuMemsetD8Async((CUdeviceptr)(uintptr_t)made, 1, SEGMENT, stream), 0);
    devices_delay(0);
    kvf_transport_close(transport);
    assert_int_equal(cuda->cuStreamSynchronize(stream), 0);
    assert_int_equal(cuda->cuStreamDestroy_v2(stream), 0);
    kvf_cuda_leave(cuda);
    assert_int_equal(devices_left(), left);
}

static void exportable_memory_that_the_driver_refuses_is_named_and_nothing_stays(void **state) {
    enum { OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801 };
    static const struct {
        const char *function;
        int result;
        kvf_status status;
        const char *word;
    } refusals[] = {
        {"cuMemGetAllocationGranularity", OPERATING_SYSTEM, KVF_E_IO, "asking which sizes memory"},
        {"cuMemAddressReserve", OPERATING_SYSTEM, KVF_E_IO, "reserving addresses for memory of a device"},
        {"cuMemCreate", OUT_OF_MEMORY, KVF_E_NOMEM,
         "creating memory of a device that can be exported: CUDA_"},
        {"cuMemCreate", NOT_SUPPORTED, KVF_E_UNSUPPORTED, "creating memory of a device that can be exported"},
        {"cuMemMap", OPERATING_SYSTEM, KVF_E_IO, "mapping memory of a device that can be exported"},
        {"cuMemSetAccess", OPERATING_SYSTEM, KVF_E_IO, "giving a device access to memory"},
        {"cuMemSetAccess", CUDA_ERROR_NOT_READY, KVF_E_IO,
         "giving a device access to memory that can be exported: CUDA_"},
        {"cuMemsetD8Async", OPERATING_SYSTEM, KVF_E_IO, "zeroing memory of a device"},
    };
    (void)state;
    kvf_transport *transport = NULL;
    void *made = NULL;
    assert_ok(open_allocating("cuda", "exportable", &transport));
    const size_t left = devices_left();
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const bool tried_twice =
            strcmp(refusals[i].function, "cuMemCreate") == 0; /* for network cards first */
        devices_fail(refusals[i].function, refusals[i].result, tried_twice ? 2 : 1);
        assert_fails(kvf_transport_allocate(transport, KVF_MEMORY_CUDA, 0, 100, &made), refusals[i].status,
                     refusals[i].word);
        devices_fail("", 0, 0);
        assert_int_equal(devices_left(), left);
    }
    assert_fails(kvf_transport_allocate(transport, KVF_MEMORY_CUDA, 0, UINT64_MAX, &made), KVF_E_NOMEM,
                 "18446744073709551615 bytes of a device are more than there can be");
    if (!devices_are_real()) /* which has more than the stand-in */
        assert_fails(kvf_transport_allocate(transport, KVF_MEMORY_CUDA, 0, UINT64_C(1) << 31, &made),
                     KVF_E_NOMEM, "CUDA_ERROR_OUT_OF_MEMORY");
    assert_fails(kvf_transport_allocate(transport, KVF_MEMORY_CUDA, 99, 100, &made), KVF_E_RANGE,
                 "CUDA device 99; this process sees ");
    assert_int_equal(devices_left(), left);
    assert_ok(kvf_transport_allocate(transport, KVF_MEMORY_CUDA, 0, 100, &made));
    kvf_transport_close(transport);
}

static void an_unknown_kind_of_allocation_is_refused_with_the_known_ones(void **state) {
    static const char *const wrong[] = {"", "Plain", "exportable "};
    kvf_transport *transport = NULL;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char word[128];
        (void)snprintf(word, sizeof word, "cuda.allocation is \"%s\"; allowed: plain, exportable", wrong[i]);
        assert_fails(open_allocating(*state, wrong[i], &transport), KVF_E_INVALID, word);
        assert_null(transport);
    }
}

/* ---- ends --------------------------------------------------------------------------------------- */

static void segments_stay_mapped_until_kernels_are_over_and_then_go_back(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    test_scene *scene = scene_open_with("cuda", NULL, THEIRS_IN_SEGMENTS);
    const size_t unconnected = devices_left();
    connect_and_pull(scene);
    const size_t mapped = devices_left();
    assert_true(mapped > unconnected);
    devices_delay(HOUR_NS);
    kvf_transfer *transfer = scene_begin(scene, KVF_READ);
    assert_ok(kvf_transport_progress(scene->here.transport, NULL));
    assert_int_equal(owner_tell(&scene->owner, 'u'), KVF_E_AGAIN);
    for (int i = 0; i < 5; i++)
        scene_step(scene);
    assert_int_equal(scene->lost, 0); /* the copy is under way */
    assert_true(devices_left() >= mapped);
    assert_int_equal(owner_tell(&scene->owner, 'u'), KVF_E_AGAIN);
    devices_delay(0);
    devices_hasten();
    while (scene->lost == 0)
        scene_step(scene);
    assert_non_null(strstr(scene->lost_detail, "a new card is needed"));
    kvf_transfer_free(transfer);
    scene_step(scene); /* lets the memory go */
    assert_int_equal(devices_left(), unconnected);
    uint64_t status;
    while ((status = owner_tell(&scene->owner, 'u')) == KVF_E_AGAIN)
        ;
    assert_int_equal(status, KVF_OK);
    scene_close(scene, false);
}

static void segments_of_an_owner_that_dies_are_unmapped(void **state) {
    (void)state;
    const size_t left = devices_left();
    test_scene *scene = scene_open_with("cuda", NULL, THEIRS_IN_SEGMENTS);
    const size_t unconnected = devices_left();
    connect_and_pull(scene);
    owner_end(&scene->owner, true);
    while (scene->lost == 0)
        scene_step(scene);
    scene_step(scene); /* lets the memory go */
    assert_int_equal(devices_left(), unconnected);
    scene_close(scene, true);
    assert_int_equal(devices_left(), left);
}

/* The driver might wait for the stream; and whom the stream waits for might wait for us. */
static void memory_stays_mapped_while_a_stream_waits_for_a_request(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    kvf_cuda_word *word;
    assert_ok(kvf_cuda_words_add(0));
    assert_ok(kvf_cuda_word_take(3, UINT64_MAX, &word));
    test_scene *scene = scene_open_with("cuda", NULL, THEIRS_IN_SEGMENTS);
    const size_t unconnected = devices_left();
    connect_and_pull(scene);
    const size_t mapped = devices_left();
    (void)kvf_cuda_word_mark(word, 2);
    kvf_cuda_word_set(word, 1);
    assert_true(kvf_cuda_words_awaited());
    owner_end(&scene->owner, true);
    while (scene->lost == 0)
        scene_step(scene);
    for (int i = 0; i < 5; i++)
        scene_step(scene);
    assert_int_equal(devices_left(), mapped);
    kvf_cuda_word_set(word, 2);
    assert_false(kvf_cuda_words_awaited());
    const uint64_t begun = kvf_now(&kvf_monotonic);
    while (devices_left() != unconnected && kvf_now(&kvf_monotonic) - begun < 10 * KVF_SECOND)
        scene_step(scene);
    assert_int_equal(devices_left(), unconnected);
    (void)kvf_cuda_word_give(word);
    scene_close(scene, true);
}

/* Nobody has the connection any more, and closing the endpoint ends what was put off. */
static void memory_that_stays_mapped_goes_with_the_endpoint(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    kvf_cuda_word *word;
    assert_ok(kvf_cuda_words_add(0));
    assert_ok(kvf_cuda_word_take(3, UINT64_MAX, &word));
    const size_t left = devices_left();
    test_scene *scene = scene_open_with("cuda", NULL, THEIRS_IN_SEGMENTS);
    connect_and_pull(scene);
    const size_t mapped = devices_left();
    (void)kvf_cuda_word_mark(word, 2);
    kvf_peer_close(scene->peer);
    scene->peer = NULL;
    assert_int_equal(devices_left(), mapped);
    scene_close(scene, false);
    assert_int_equal(devices_left(), left);
    (void)kvf_cuda_word_give(word);
}

/* The connection can still write, and the next one reads. */
static void a_segment_that_the_driver_refuses_is_named_and_nothing_stays(void **state) {
    static const struct {
        const char *function, *word;
    } refusals[] = {
        {"cuMemAddressReserve", "reserving addresses"},
        {"cuMemImportFromShareableHandle", "region 0: this process may not map it: CUDA device "},
        {"cuMemMap", "mapping a segment"},
        {"cuMemSetAccess", "the devices may not read it"},
    };
    (void)state;
    char detail[512];
    test_scene *scene = scene_open_with("cuda", NULL, THEIRS_IN_SEGMENTS);
    const size_t left = devices_left();
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        devices_fail(refusals[i].function, OPERATING_SYSTEM, 1);
        assert_ok(scene_connect(scene));
        assert_int_equal(scene_pull(scene, detail), KVF_E_UNSUPPORTED);
        if (!strstr(detail, refusals[i].word))
            fail_msg("%s", detail);
        devices_fail("", 0, 0);
        assert_int_equal(devices_left(), left);
        assert_ok(scene_push(scene, detail));
        assert_int_equal(owner_tell(&scene->owner, 'c'), 0);
        kvf_peer_close(scene->peer);
    }
    assert_ok(scene_connect(scene));
    assert_ok(scene_pull(scene, detail));
    assert_int_equal(cache_wrong_cells(&scene->here, 2), 0);
    scene_close(scene, false);
}

static void memory_that_its_owner_has_unmapped_is_not_read(void **state) {
    (void)state;
    char detail[512];
    test_scene *scene = scene_open_with("cuda", NULL, THEIRS_IN_SEGMENTS);
    const size_t left = devices_left();
    (void)owner_tell(&scene->owner, 'f');
    assert_ok(scene_connect(scene));
    assert_int_equal(scene_pull(scene, detail), KVF_E_UNSUPPORTED);
    assert_non_null(strstr(detail, "region 0: the owner could not share it: the memory at 0x"));
    assert_non_null(strstr(detail, "is no longer what was registered"));
    assert_int_equal(devices_left(), left);
    scene_close(scene, false);
}

/* ---- cards that lie ------------------------------------------------------------------------------ */

/* The owner's card with another first region. */
static void forge(const test_scene *scene, const kvf_cuda_region *first, const unsigned char *name,
                  kvf_buffer *out) {
    kvf_card card;
    assert_ok(kvf_card_read(scene->owner.card, scene->owner.card_bytes, &card));
    assert_int_equal(card.part_count, 1);
    unsigned char *part = kvf_copy(card.parts[0].data, card.parts[0].bytes, 1);
    assert_non_null(part);
    memcpy(part + sizeof(kvf_cuda_card), first, sizeof *first);
    if (name)
        memcpy(part + offsetof(kvf_cuda_card, name), name, CUDA_ID_BYTES);
    card.parts[0].data = part;
    assert_ok(kvf_card_write(&card, out));
    kvf_card_free(&card);
    kvf_free(part);
}

static kvf_cuda_region first_region(const test_scene *scene) {
    kvf_card card;
    kvf_cuda_region first;
    assert_ok(kvf_card_read(scene->owner.card, scene->owner.card_bytes, &card));
    memcpy(&first, (const char *)card.parts[0].data + sizeof(kvf_cuda_card), sizeof first);
    kvf_card_free(&card);
    assert_true(first.segments > 1);
    return first;
}

static void connect_forged(test_scene *scene, const kvf_cuda_region *first, kvf_status status,
                           const char *word) {
    kvf_buffer card = {0};
    forge(scene, first, NULL, &card);
    const kvf_status got = kvf_transport_connect(scene->here.transport, card.data, card.length, &scene->peer);
    kvf_buffer_free(&card);
    if (status)
        assert_fails(got, status, word);
    else
        assert_ok(got);
}

/* The card is found wrong only when segments are asked for. */
static void read_forged(test_scene *scene, const kvf_cuda_region *first, kvf_status status,
                        const char *word) {
    char detail[512];
    const size_t left = devices_left();
    connect_forged(scene, first, KVF_OK, NULL);
    assert_int_equal(scene_pull(scene, detail), status);
    if (!strstr(detail, word))
        fail_msg("%s", detail);
    kvf_peer_close(scene->peer);
    assert_int_equal(devices_left(), left);
}

static void a_card_that_says_too_much_gets_nothing_mapped(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    test_scene *scene = scene_open_with("cuda", NULL, THEIRS_IN_SEGMENTS);
    const kvf_cuda_region good = first_region(scene);
    kvf_cuda_region bad = good;
    bad.segments = KVF_SEGMENTS_MAX + 1;
    connect_forged(scene, &bad, KVF_E_PARSE, "region 0: ");
    bad = good;
    bad.offset = bad.allocation_bytes - bad.bytes + 1;
    connect_forged(scene, &bad, KVF_E_PARSE, "region 0: ");
    bad = good;
    bad.allocation_bytes = UINT64_C(1) << 40;
    read_forged(scene, &bad, KVF_E_UNSUPPORTED,
                "memory of 1099511627776 bytes on a device; allowed: up to 1073741824");
    memset(&bad.device, 0x5a, sizeof bad.device); /* one that this process does not see */
    bad.allocation_bytes = KVF_UNSEEN_BYTES + SEGMENT;
    read_forged(scene, &bad, KVF_E_UNSUPPORTED,
                "memory of 1099511693312 bytes on a device; allowed: up to 1099511627776");
    bad = good;
    bad.allocation_bytes = good.allocation_bytes + SEGMENT; /* one segment more than comes */
    read_forged(scene, &bad, KVF_E_UNSUPPORTED, "65536 bytes less came than the card says");
    bad.allocation_bytes = good.allocation_bytes + 1; /* no multiple of what the driver reserves */
    read_forged(scene, &bad, KVF_E_UNSUPPORTED, "reserving addresses");
    bad.allocation_bytes = good.allocation_bytes - SEGMENT; /* a segment goes beyond the end */
    read_forged(scene, &bad, KVF_E_UNSUPPORTED, "a segment has ");
    bad = good;
    bad.segments--;
    read_forged(scene, &bad, KVF_E_UNSUPPORTED, "bytes less came than the card says");
    bad.segments = good.segments + 1;
    read_forged(scene, &bad, KVF_E_PEER_LOST, "a message of this endpoint made no sense");
    bad = good;
    bad.segments = 0; /* as if there were a handle */
    read_forged(scene, &bad, KVF_E_UNSUPPORTED, "may not map it");
    connect_and_pull(scene); /* the control */
    scene_close(scene, false);
}

/* ---- owners that lie ----------------------------------------------------------------------------- */

/* An owner for which this test speaks, to a reader that waits for the first segments of region 0. */
typedef struct voice {
    test_scene *scene;
    int listening, fd;
} voice;

static void voice_open(voice *v, test_scene *scene) {
    const kvf_cuda_header ready = {CUDA_READY, 0};
    const kvf_cuda_region good = first_region(scene);
    unsigned char name[CUDA_ID_BYTES];
    kvf_buffer card = {0};
    kvf_cuda_packet packet;
    *v = (voice){.scene = scene};
    assert_int_equal(getrandom(name, sizeof name, 0), sizeof name);
    assert_ok(kvf_cuda_wire_listen(name, &v->listening));
    forge(scene, &good, name, &card);
    assert_ok(kvf_transport_connect(scene->here.transport, card.data, card.length, &scene->peer));
    kvf_buffer_free(&card);
    v->fd = accept4(v->listening, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    assert_true(v->fd >= 0);
    assert_ok(kvf_cuda_wire_receive(v->fd, &packet));
    assert_int_equal(packet.as.header.kind, CUDA_HELLO);
    assert_ok(kvf_cuda_wire_send(v->fd, &ready, sizeof ready));
    scene_step(scene);
    assert_ok(kvf_cuda_wire_receive(v->fd, &packet));
    assert_int_equal(packet.as.header.kind, CUDA_FETCH);
    assert_int_equal(packet.as.fetch.region, 0);
    assert_int_equal(packet.as.fetch.first, 0);
    assert_int_equal(packet.as.header.count, kvf_min_u64(good.segments, CUDA_FETCH_SEGMENTS));
}

static void voice_close(voice *v) {
    kvf_peer_close(v->scene->peer);
    v->scene->lost = 0;
    (void)close(v->fd);
    (void)close(v->listening);
}

/* A descriptor of a new segment; the caller closes it. */
static int new_segment(uint64_t bytes) {
    const CUdeviceptr segments = device_segments(0, bytes, SHARED);
    uint64_t size;
    kvf_segment_handle handle;
    assert_ok(kvf_segment_export(0, segments, bytes, &size, &handle));
    device_segments_free(segments, bytes);
    return handle.fd;
}

/* The reader gets this message with this descriptor, and is lost; or is not, and cannot read. */
static void answer(test_scene *scene, const kvf_cuda_segment *segment, size_t bytes, int fd, const char *lost,
                   const char *refused) {
    voice v;
    char detail[512];
    const size_t left = devices_left();
    const uint64_t descriptors = open_descriptors();
    voice_open(&v, scene);
    assert_ok(kvf_cuda_wire_send_with(v.fd, segment, bytes, fd));
    if (refused) {
        assert_int_equal(scene_pull(scene, detail), KVF_E_UNSUPPORTED);
        if (!strstr(detail, refused))
            fail_msg("%s", detail);
    }
    while (lost && scene->lost == 0)
        scene_step(scene);
    if (lost && !strstr(scene->lost_detail, lost))
        fail_msg("%s", scene->lost_detail);
    voice_close(&v);
    assert_int_equal(devices_left(), left);
    assert_int_equal(open_descriptors(), descriptors);
}

static void an_owner_that_sends_other_segments_gets_nothing_mapped(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    const char *const senseless = "a message of the peer makes no sense";
    test_scene *scene = scene_open_with("cuda", NULL, THEIRS_IN_SEGMENTS);
    const int segment_fd = new_segment(SEGMENT), no_memory = memfd_create("no memory", MFD_CLOEXEC);
    const kvf_cuda_segment good = {.header = {CUDA_SEGMENT, KVF_OK}, .bytes = SEGMENT};
    kvf_cuda_segment bad = good;
    bad.region = 1;
    answer(scene, &bad, sizeof bad, segment_fd, senseless, NULL);
    bad = good;
    bad.number = 1;
    answer(scene, &bad, sizeof bad, segment_fd, senseless, NULL);
    answer(scene, &good, sizeof good - 1, segment_fd, senseless, NULL);
    answer(scene, &good, sizeof good.header, segment_fd, senseless, NULL);
    answer(scene, &good, sizeof good, -1, senseless, NULL); /* no descriptor */
    bad = good;
    bad.header.count = KVF_E_IO;
    answer(scene, &bad, sizeof bad, segment_fd, senseless, NULL); /* a failure with one */
    bad = good;
    bad.has_fabric = 1;
    answer(scene, &bad, sizeof bad, segment_fd, senseless, NULL); /* two ways at once */
    answer(scene, &bad, sizeof bad, -1, NULL, "this process may not map it: CUDA device ");
    bad = good;
    bad.header.count = KVF_E_IO;
    memset(bad.reason, 'x', sizeof bad.reason);
    answer(scene, &bad, sizeof bad, -1, NULL, "region 0: the owner could not share it: xxx");
    answer(scene, &good, sizeof good, no_memory, NULL, "this process may not map it");
    bad = good;
    bad.bytes = 0;
    answer(scene, &bad, sizeof bad, segment_fd, NULL, "a segment has 0 bytes");
    bad.bytes = UINT64_MAX;
    answer(scene, &bad, sizeof bad, segment_fd, NULL, "a segment has 18446744073709551615 bytes");
    bad.bytes = 2 * SEGMENT; /* than there is behind the descriptor */
    answer(scene, &bad, sizeof bad, segment_fd, NULL, "a segment of 131072 bytes: CUDA device ");
    bad.bytes = 100;
    answer(scene, &bad, sizeof bad, segment_fd, NULL, "a segment of 100 bytes: CUDA device ");
    /* Messages that bring no descriptor when all is well do not leave one open either. */
    const kvf_cuda_segment odd[] = {{.header = {CUDA_WRITTEN, KVF_OK}},
                                    {.header = {CUDA_REFUSED, CUDA_REFUSED_KEY}}};
    answer(scene, &odd[0], sizeof(kvf_cuda_written), segment_fd, senseless, NULL);
    answer(scene, &odd[1], sizeof(kvf_cuda_refused), segment_fd, "the key of the card is not the peer's",
           NULL);
    (void)close(segment_fd);
    (void)close(no_memory);
    connect_and_pull(scene);
    scene_close(scene, false);
}

/* ---- guests of an owner -------------------------------------------------------------------------- */

#define GUESTED (20u * SEGMENT) /* in 11 segments: three times of 1, 2 and 3, and of 1 and 2 */

/* An owner of this process: region 0 is in segments, region 1 is not, region 2 is withheld. */
static kvf_transport *guested;

static void guest_rounds(void) {
    for (int i = 0; i < 10; i++)
        assert_ok(kvf_transport_progress(guested, NULL));
}

static int open_guest(void) {
    const void *data;
    size_t bytes;
    kvf_card all;
    kvf_cuda_card card;
    kvf_cuda_packet packet;
    int fd;
    assert_ok(kvf_transport_export(guested, &data, &bytes));
    assert_ok(kvf_card_read(data, bytes, &all));
    memcpy(&card, all.parts[0].data, sizeof card);
    kvf_card_free(&all);
    kvf_cuda_hello hello = {.header = {CUDA_HELLO, 0},
                            .version = CUDA_WIRE_VERSION,
                            .generation = UINT64_MAX,
                            .from = "a guest of test",
                            .name = "a guest"};
    memcpy(hello.key, card.key, CUDA_ID_BYTES);
    assert_ok(kvf_cuda_wire_connect(card.name, &fd));
    assert_ok(kvf_cuda_wire_send(fd, &hello, sizeof hello));
    guest_rounds();
    assert_ok(kvf_cuda_wire_receive(fd, &packet));
    assert_int_equal(packet.as.header.kind, CUDA_READY);
    return fd;
}

/* Asks, and receives that many segments, which are what the owner has. False: the guest was refused. */
static bool fetch(int fd, uint32_t region, uint32_t first, uint32_t count) {
    const kvf_cuda_fetch message = {.header = {CUDA_FETCH, count}, .region = region, .first = first};
    assert_ok(kvf_cuda_wire_send(fd, &message, sizeof message));
    guest_rounds();
    for (uint32_t i = 0; i < count; i++) {
        kvf_cuda_packet packet;
        int descriptor;
        assert_ok(kvf_cuda_wire_receive_with(fd, &packet, &descriptor));
        if (packet.as.header.kind == CUDA_REFUSED) {
            assert_int_equal(packet.as.header.count, CUDA_REFUSED_PROTOCOL);
            assert_int_equal(descriptor, -1);
            return false;
        }
        assert_int_equal(packet.as.header.kind, CUDA_SEGMENT);
        assert_int_equal(packet.as.header.count, KVF_OK);
        assert_int_equal(packet.as.segment.region, region);
        assert_int_equal(packet.as.segment.number, first + i);
        assert_int_equal(packet.as.segment.bytes, ((first + i) % 3 + 1) * SEGMENT);
        assert_int_equal(lseek(descriptor, 0, SEEK_END), packet.as.segment.bytes);
        (void)close(descriptor);
    }
    return true;
}

static void leave(int fd) {
    (void)close(fd);
    guest_rounds();
}

/* A guest that has got the first 4 segments is refused. */
static void refused_then(uint32_t region, uint32_t first, uint32_t count) {
    const int fd = open_guest();
    assert_true(fetch(fd, 0, 0, 4));
    if (fetch(fd, region, first, count))
        fail_msg("segments %u to %u of region %u were sent", first, first + count, region);
    leave(fd);
}

static void a_guest_gets_each_segment_once_and_in_order(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    void *seen;
    const size_t left = devices_left();
    const uint64_t descriptors = open_descriptors();
    const CUdeviceptr segments = device_segments(0, GUESTED, SHARED);
    kvf_memory memory[3] = {{.struct_size = sizeof *memory,
                             .address = (void *)(uintptr_t)segments,
                             .bytes = GUESTED,
                             .kind = KVF_MEMORY_CUDA},
                            device_memory(0, 4096, &seen),
                            device_memory(0, 4096, &seen)};
    memory[1].withheld = false;
    assert_ok(kvf_transport_open("cuda", NULL, &guested));
    assert_ok(kvf_transport_register(guested, memory, 3));
    const uint64_t opened = open_descriptors();
    refused_then(0, 3, 1); /* again */
    refused_then(0, 0, 4);
    refused_then(0, 5, 1); /* one is left out */
    refused_then(0, 4, CUDA_FETCH_SEGMENTS + 1);
    refused_then(0, 4, 8); /* beyond the last */
    refused_then(0, UINT32_MAX, 1);
    refused_then(1, 0, 1); /* it has a handle */
    refused_then(2, 0, 1); /* withheld */
    refused_then(3, 0, 1);
    refused_then(UINT32_MAX, 0, 1);
    const int fd = open_guest();
    assert_true(fetch(fd, 0, 0, 4));
    assert_true(fetch(fd, 0, 4, 1));
    assert_true(fetch(fd, 0, 5, 6));
    leave(fd);
    assert_int_equal(open_descriptors(), opened);
    kvf_transport_close(guested);
    devices_free();
    device_segments_free(segments, GUESTED);
    assert_int_equal(open_descriptors(), descriptors);
    assert_int_equal(devices_left(), left);
}

static bool many_descriptors_fly; /* as many as the user may have in messages that were not received */

/* Found before the C library's. */
/* NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): the C library's begin with __ */
ssize_t sendmsg(int socket, const struct msghdr *message, int flags) {
    if (many_descriptors_fly && message->msg_controllen > 0) {
        errno = ETOOMANYREFS;
        return -1;
    }
    return syscall(SYS_sendmsg, socket, message, flags);
}

/* It once got no answer, and waited for ever. */
static void a_guest_to_which_no_segment_can_be_sent_is_refused(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    const kvf_cuda_fetch message = {.header = {CUDA_FETCH, 4}};
    const CUdeviceptr segments = device_segments(0, GUESTED, SHARED);
    const kvf_memory memory = {.struct_size = sizeof memory,
                               .address = (void *)(uintptr_t)segments,
                               .bytes = GUESTED,
                               .kind = KVF_MEMORY_CUDA};
    kvf_cuda_packet packet;
    assert_ok(kvf_transport_open("cuda", NULL, &guested));
    assert_ok(kvf_transport_register(guested, &memory, 1));
    const int fd = open_guest();
    many_descriptors_fly = true;
    assert_ok(kvf_cuda_wire_send(fd, &message, sizeof message));
    guest_rounds();
    many_descriptors_fly = false;
    assert_ok(kvf_cuda_wire_receive(fd, &packet));
    assert_int_equal(packet.as.header.kind, CUDA_REFUSED);
    assert_int_equal(packet.as.header.count, CUDA_REFUSED_SHORT);
    leave(fd);
    kvf_transport_close(guested);
    device_segments_free(segments, GUESTED);
}

/* A guest that asks and does not read what it asked for. */
static void a_guest_that_does_not_read_its_segments_is_refused(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    enum { REGIONS = 64 };
    static kvf_memory memory[REGIONS];
    const CUdeviceptr segments = device_segments(0, GUESTED, SHARED);
    for (uint32_t i = 0; i < REGIONS; i++)
        memory[i] = (kvf_memory){.struct_size = sizeof *memory,
                                 .address = (void *)(uintptr_t)segments,
                                 .bytes = GUESTED,
                                 .kind = KVF_MEMORY_CUDA};
    assert_ok(kvf_transport_open("cuda", NULL, &guested));
    assert_ok(kvf_transport_register(guested, memory, REGIONS));
    const uint64_t opened = open_descriptors();
    const int fd = open_guest();
    const int small = 1;
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small), 0);
    for (uint32_t i = 0; i < REGIONS; i++) {
        const kvf_cuda_fetch message = {.header = {CUDA_FETCH, 8}, .region = i};
        (void)kvf_cuda_wire_send(fd, &message, sizeof message);
        guest_rounds();
    }
    uint32_t came = 0;
    for (kvf_cuda_packet packet; kvf_cuda_wire_receive(fd, &packet) == KVF_OK; came++)
        ;
    assert_true(came > 0 && came < REGIONS * 8);
    leave(fd);
    assert_int_equal(open_descriptors(), opened);
    kvf_transport_close(guested);
    device_segments_free(segments, GUESTED);
}

int main(int argument_count, char **arguments) {
    static char cuda[] = "cuda", automatic[] = "auto";
    if (argument_count == 5)
        return owner_main(arguments);
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_reader_makes_no_context_on_the_device_of_the_owner),
        {"cells_arrive_from_memory_in_segments (cuda)", cells_arrive_from_memory_in_segments, NULL, NULL,
         cuda},
        {"cells_arrive_from_memory_in_segments (auto)", cells_arrive_from_memory_in_segments, NULL, NULL,
         automatic},
        cmocka_unit_test(segments_with_fabric_handles_are_read),
        {"what_is_written_from_memory_in_segments_is_read_by_its_owner (cuda)",
         what_is_written_from_memory_in_segments_is_read_by_its_owner, NULL, NULL, cuda},
        cmocka_unit_test(another_device_of_this_process_maps_segments_for_itself),
        cmocka_unit_test(a_place_reaches_over_segments_as_far_as_they_are_mapped),
        {"memory_that_was_not_created_to_be_shared_is_refused_and_can_be_kept (cuda)",
         memory_that_was_not_created_to_be_shared_is_refused_and_can_be_kept, NULL, NULL, cuda},
        {"memory_that_was_not_created_to_be_shared_is_refused_and_can_be_kept (auto)",
         memory_that_was_not_created_to_be_shared_is_refused_and_can_be_kept, NULL, NULL, automatic},
        {"exportable_memory_of_any_size_is_one_segment_of_zeros (cuda)",
         exportable_memory_of_any_size_is_one_segment_of_zeros, NULL, NULL, cuda},
        {"exportable_memory_is_for_network_cards_if_the_driver_gives_such",
         exportable_memory_is_for_network_cards_if_the_driver_gives_such, NULL, NULL, cuda},
        {"exportable_memory_of_any_size_is_one_segment_of_zeros (auto)",
         exportable_memory_of_any_size_is_one_segment_of_zeros, NULL, NULL, automatic},
        cmocka_unit_test(exportable_memory_is_freed_after_the_last_use),
        cmocka_unit_test(exportable_memory_that_the_driver_refuses_is_named_and_nothing_stays),
        {"an_unknown_kind_of_allocation_is_refused_with_the_known_ones (cuda)",
         an_unknown_kind_of_allocation_is_refused_with_the_known_ones, NULL, NULL, cuda},
        {"an_unknown_kind_of_allocation_is_refused_with_the_known_ones (auto)",
         an_unknown_kind_of_allocation_is_refused_with_the_known_ones, NULL, NULL, automatic},
        cmocka_unit_test(segments_stay_mapped_until_kernels_are_over_and_then_go_back),
        cmocka_unit_test(segments_of_an_owner_that_dies_are_unmapped),
        cmocka_unit_test(memory_stays_mapped_while_a_stream_waits_for_a_request),
        cmocka_unit_test(memory_that_stays_mapped_goes_with_the_endpoint),
        cmocka_unit_test(a_segment_that_the_driver_refuses_is_named_and_nothing_stays),
        cmocka_unit_test(memory_that_its_owner_has_unmapped_is_not_read),
        cmocka_unit_test(a_card_that_says_too_much_gets_nothing_mapped),
        cmocka_unit_test(an_owner_that_sends_other_segments_gets_nothing_mapped),
        cmocka_unit_test(a_guest_gets_each_segment_once_and_in_order),
        cmocka_unit_test(a_guest_that_does_not_read_its_segments_is_refused),
        cmocka_unit_test(a_guest_to_which_no_segment_can_be_sent_is_refused),
    };
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
