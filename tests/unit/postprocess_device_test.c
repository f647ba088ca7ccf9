/*
 * Received blocks in the memory of devices, permuted, zeroed and copied as in host memory, compared cell by cell. Runs
 * over the stand-in of tests/fakes/fake_cuda.c, or over a real driver (scripts/check-cuda).
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "connector/copy_queue.h"
#include "connector/postprocess_device.h"
#include "cuda/device_image.h"
#include "devices.h"
#include "postprocess_world.h"
#include "sanitized.h"

/* ---- worlds on a device ------------------------------------------------------------------------ */

/* Copies the bytes to a device, and gives the same region there. */
static kvf_block_region to_device(const kvf_block_region *region, uint32_t device, const void *memory,
                                  size_t bytes, CUdeviceptr *room) {
    *room = device_room(device, bytes);
    unsigned char *seen = devices_look(*room);
    memcpy(seen, memory, bytes);
    devices_put(seen);
    kvf_block_region there = *region;
    there.base = (void *)(uintptr_t)(*room + (uint64_t)((unsigned char *)region->base -
                                                        (const unsigned char *)memory)); // NOLINT
    there.kind = KVF_MEMORY_CUDA;
    there.device = devices_number(device);
    return there;
}

static void from_device(CUdeviceptr room, void *memory, size_t bytes) {
    unsigned char *seen = devices_look(room);
    devices_get(seen);
    memcpy(memory, seen, bytes);
    device_room_free(room);
}

static kvf_block_region move(const world *w, uint32_t device, CUdeviceptr *room) {
    return to_device(&w->region, device, w->memory, w->bytes, room);
}

/* Compares what is on the device now with what was expected. */
static void check_there(world *w, CUdeviceptr room) {
    from_device(room, w->memory, w->bytes);
    check(w);
}

/* A call as kvf_finish_received() makes it, with other limits. */
static kvf_status finish_with(const world *w, const kvf_block_region *region, uint64_t covered,
                              kvf_device_limits limits) {
    const kvf_received_request request = {w->ids, w->id_count, covered};
    kvf_gather gather;
    assert_int_equal(kvf_gather_of(&w->shape, &gather), KVF_OK);
    const kvf_received received = {.shape = w->shape,
                                   .permutes = true,
                                   .page_blocks = gather.block_count,
                                   .block_bytes = gather.block_bytes,
                                   .regions = region,
                                   .region_count = 1,
                                   .requests = &request,
                                   .request_count = 1};
    return kvf_finish_on_devices(&received, limits);
}

/* Some blocks that change their order, in a region with gaps at an odd address. */
static world small_world(void) {
    world w = world_of(shape_of(3, 6, KVF_PAGE_HND, 2, KVF_PAGE_NHD, 4), 9, 2, 1);
    list_blocks(&w, 6);
    return w;
}

/* ---- permuting --------------------------------------------------------------------------------- */

static void any_form_becomes_any_other_cell_by_cell(void **state) {
    (void)state;
    for (int round = 0; round < OFTEN(400); round++) {
        kvf_received_shape shape = any_shape();
        uint64_t pages = draw(4), step = blocks_of_page(&shape);
        world w = world_of(shape, pages * step + 1 + draw(4), 1 + draw(2), draw(4) ? draw(70) : 0);
        CUdeviceptr room;
        list_blocks(&w, pages * step);
        expect(&w, UINT64_MAX);
        kvf_block_region there = move(&w, (uint32_t)draw(2), &room);
        assert_int_equal(kvf_permute_received(&w.shape, &there, 1, w.ids, w.id_count, NULL), KVF_OK);
        check_there(&w, room);
        end(&w);
    }
}

static void the_result_is_that_of_the_host(void **state) {
    (void)state;
    for (int round = 0; round < OFTEN(100); round++) {
        kvf_received_shape shape = any_shape();
        uint64_t step = blocks_of_page(&shape);
        world w = world_of(shape, 2 * step, 2, draw(9));
        CUdeviceptr room;
        list_blocks(&w, 2 * step);
        kvf_block_region there = move(&w, 0, &room);
        kvf_received_request request = {w.ids, w.id_count, draw(w.id_count * shape.wanted.tokens + 1)};
        assert_int_equal(kvf_finish_received(&w.shape, &w.region, 1, &request, 1, NULL), KVF_OK);
        assert_int_equal(kvf_finish_received(&w.shape, &there, 1, &request, 1, NULL), KVF_OK);
        memcpy(w.expected, w.memory, w.bytes);
        check_there(&w, room);
        end(&w);
    }
}

static void pages_that_do_not_fit_into_the_room_go_one_after_another(void **state) {
    (void)state;
    for (int round = 0; round < OFTEN(100); round++) {
        kvf_received_shape shape = any_shape();
        uint64_t pages = 1 + draw(5), step = blocks_of_page(&shape);
        world w = world_of(shape, pages * step, 2, draw(3));
        CUdeviceptr room;
        list_blocks(&w, pages * step);
        expect(&w, UINT64_MAX);
        kvf_block_region there = move(&w, 0, &room);
        /* Given room for one page, or a little more than one or two */
        kvf_device_limits limits = KVF_DEVICE_LIMITS;
        limits.room_bytes = draw(3) * w.region.part_bytes * step + draw(40);
        assert_int_equal(finish_with(&w, &there, w.id_count * shape.wanted.tokens, limits), KVF_OK);
        check_there(&w, room);
        end(&w);
    }
}

/* Once the room had up to 64 MiB, more than stays. So each call had to get the rest anew, and drivers may wait for all
 * work of the device then. */
static void a_later_call_does_not_wait_for_the_engine(void **state) {
    enum { CELL_BYTES = 65536, BLOCKS = 40, LATE_S = 30 };
    (void)state;
    DEVICES_ARE_STAND_INS();
    const kvf_cuda *cuda;
    CUstream engine;
    CUevent over;
    CUdeviceptr room;
    world w = world_of(shape_of(8, CELL_BYTES, KVF_PAGE_HND, 2, KVF_PAGE_NHD, 2), BLOCKS, 1, 0);
    list_blocks(&w, BLOCKS);
    kvf_block_region there = move(&w, 0, &room);
    assert_int_equal(kvf_permute_received(&w.shape, &there, 1, w.ids, w.id_count, NULL), KVF_OK);
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    assert_int_equal(cuda->cuStreamCreateWithPriority(&engine, CU_STREAM_NON_BLOCKING, 0), 0);
    assert_int_equal(cuda->cuEventCreate(&over, CU_EVENT_DISABLE_TIMING), 0);
    assert_int_equal(cuda->cuStreamSynchronize(engine), 0);
    devices_strict(true);
    devices_delay(LATE_S * KVF_SECOND);
    assert_int_equal(cuda->cuEventRecord(over, engine), 0);
    devices_delay(0);
    assert_int_equal(kvf_permute_received(&w.shape, &there, 1, w.ids, w.id_count, NULL), KVF_OK);
    assert_int_equal(cuda->cuEventQuery(over), CUDA_ERROR_NOT_READY);
    devices_strict(false);
    devices_hasten();
    assert_int_equal(cuda->cuEventDestroy_v2(over), 0);
    assert_int_equal(cuda->cuStreamDestroy_v2(engine), 0);
    kvf_cuda_leave(cuda);
    device_room_free(room);
    end(&w);
}

static void more_regions_than_a_job_has_boxes_are_all_permuted(void **state) {
    (void)state;
    enum { REGIONS = KVF_COPY_QUEUE_BOXES + 3 };
    static world w[REGIONS];
    static kvf_block_region regions[REGIONS];
    static CUdeviceptr rooms[REGIONS];
    const kvf_received_shape shape = shape_of(2, 3, KVF_PAGE_HND, 3, KVF_PAGE_NHD, 3);
    /* On two devices, and every third one on the host. */
    for (uint32_t i = 0; i < REGIONS; i++) {
        w[i] = world_of(shape, 4, 2, i % 5);
        list_blocks(&w[i], 3);
        memcpy(w[i].ids, w[0].ids, sizeof w[i].ids);
        expect(&w[i], 7);
        regions[i] = i % 3 == 2 ? w[i].region : move(&w[i], i % 3, &rooms[i]);
    }
    const kvf_received_request requests[] = {{w[0].ids, 2, 6}, {w[0].ids + 2, 1, 1}};
    assert_int_equal(kvf_finish_received(&shape, regions, REGIONS, requests, 2, NULL), KVF_OK);
    for (uint32_t i = 0; i < REGIONS; i++) {
        if (rooms[i])
            check_there(&w[i], rooms[i]);
        else
            check(&w[i]);
        end(&w[i]);
    }
}

static void more_pages_than_are_counted_at_once_are_all_permuted(void **state) {
    (void)state;
    /* Given 140000 pages of one token and two heads of one byte, which come as pages of two tokens */
    enum { COUNT = 140000 };
    unsigned char *memory = malloc((size_t)COUNT * 2);
    uint32_t *ids = malloc(COUNT * sizeof *ids);
    assert_non_null(memory);
    assert_non_null(ids);
    for (uint32_t i = 0; i < COUNT; i++) {
        ids[i] = COUNT - 1 - i;
        memory[(size_t)ids[i] * 2] = (unsigned char)(i * 7);
        memory[(size_t)ids[i] * 2 + 1] = (unsigned char)(i * 13 + 1);
    }
    const kvf_block_region region = {.base = memory,
                                     .bytes = (uint64_t)COUNT * 2,
                                     .block_count = COUNT,
                                     .block_stride_bytes = 2,
                                     .part_bytes = 2};
    CUdeviceptr room;
    const kvf_block_region there = to_device(&region, 0, memory, (size_t)COUNT * 2, &room);
    const kvf_received_shape shape = shape_of(2, 1, KVF_PAGE_HND, 2, KVF_PAGE_NHD, 1);
    assert_int_equal(kvf_permute_received(&shape, &there, 1, ids, COUNT, NULL), KVF_OK);
    from_device(room, memory, (size_t)COUNT * 2);
    /* Then of a page h0t0 h0t1 | h1t0 h1t1 the blocks are h0t0 h1t0 | h0t1 h1t1 */
    for (uint32_t i = 0; i < COUNT; i += 2) {
        const unsigned char *first = memory + (size_t)ids[i] * 2, *second = memory + (size_t)ids[i + 1] * 2;
        if (first[0] != (unsigned char)(i * 7) || first[1] != (unsigned char)((i + 1) * 7) ||
            second[0] != (unsigned char)(i * 13 + 1) || second[1] != (unsigned char)((i + 1) * 13 + 1))
            fail_msg("page %u is wrong", i / 2);
    }
    free(memory);
    free(ids);
}

static void tokens_past_the_covered_ones_become_zero(void **state) {
    (void)state;
    for (int round = 0; round < OFTEN(300); round++) {
        kvf_received_shape shape = any_shape();
        if (draw(3) == 0) /* then there is nothing to permute */
            shape.received = shape.wanted;
        uint64_t pages = draw(4), step = blocks_of_page(&shape);
        world w = world_of(shape, pages * step + 1, 1 + draw(2), draw(5));
        CUdeviceptr room;
        list_blocks(&w, pages * step);
        uint64_t covered = draw(w.id_count * shape.wanted.tokens + 1);
        expect(&w, covered);
        kvf_received_request request = {w.ids, w.id_count, covered};
        kvf_block_region there = move(&w, 1, &room);
        assert_int_equal(kvf_finish_received(&w.shape, &there, 1, &request, 1, NULL), KVF_OK);
        check_there(&w, room);
        end(&w);
    }
}

static void more_requests_than_a_job_has_boxes_are_all_zeroed(void **state) {
    (void)state;
    enum { COUNT = 3 * KVF_COPY_QUEUE_BOXES + 1 };
    unsigned char memory[COUNT][6];
    uint32_t ids[COUNT];
    kvf_received_request requests[COUNT];
    memset(memory, 0xee, sizeof memory);
    for (uint32_t i = 0; i < COUNT; i++) {
        ids[i] = (i + 5) % COUNT;
        requests[i] = (kvf_received_request){&ids[i], 1, i % 4};
    }
    const kvf_block_region region = {.base = memory,
                                     .bytes = sizeof memory,
                                     .block_count = COUNT,
                                     .block_stride_bytes = 6,
                                     .part_bytes = 6};
    CUdeviceptr room;
    const kvf_block_region there = to_device(&region, 0, memory, sizeof memory, &room);
    const kvf_received_shape shape = shape_of(2, 1, KVF_PAGE_NHD, 3, KVF_PAGE_NHD, 3);
    assert_int_equal(kvf_finish_received(&shape, &there, 1, requests, COUNT, NULL), KVF_OK);
    from_device(room, memory, sizeof memory);
    for (uint32_t i = 0; i < COUNT; i++)
        for (uint32_t byte = 0; byte < 6; byte++)
            assert_int_equal(memory[ids[i]][byte], byte < i % 4 * 2 ? 0xee : 0);
}

/* ---- copying ----------------------------------------------------------------------------------- */

/* Random pairs of blocks of two regions with gaps, to a device or from it. */
static void copy_any(bool to_there, uint64_t part_bytes, uint64_t blocks) {
    /* Only the gaps and sizes of a world are used here. */
    const kvf_received_shape shape = shape_of(1, part_bytes, KVF_PAGE_HND, 1, KVF_PAGE_HND, 1);
    world host = world_of(shape, blocks, 2, draw(9)), device = world_of(shape, blocks + 2, 2, draw(9));
    world *from = to_there ? &host : &device, *to = to_there ? &device : &host;
    uint32_t from_ids[40], to_ids[40];
    const size_t count = 1 + draw(40);
    for (size_t i = 0; i < count; i++) { /* some more than once: the later copy stays */
        from_ids[i] = (uint32_t)draw(from->region.block_count);
        to_ids[i] = (uint32_t)draw(to->region.block_count);
        for (uint64_t part = 0; part < 2; part++) {
            const unsigned char *source =
                (unsigned char *)from->region.base + kvf_part_offset(&from->region, from_ids[i], part);
            unsigned char *target = to->expected + ((unsigned char *)to->region.base - to->memory) +
                                    kvf_part_offset(&to->region, to_ids[i], part);
            memcpy(target, source, part_bytes);
        }
    }
    CUdeviceptr room;
    kvf_block_region there = move(&device, 1, &room), here = host.region;
    size_t copied = 0;
    there.layer = here.layer = "l0";
    assert_int_equal(kvf_copy_blocks(to_there ? &here : &there, 1, to_there ? &there : &here, 1, from_ids,
                                     count, to_ids, count, to_there ? KVF_COPY_H2D : KVF_COPY_D2H, &copied),
                     KVF_OK);
    assert_int_equal(copied, count);
    check_there(&device, room);
    check(&host);
    end(&host);
    end(&device);
}

static void blocks_are_copied_to_a_device_and_back(void **state) {
    (void)state;
    static const uint64_t sizes[] = {1, 2, 3, 7, 16, 48, 129, 4096};
    for (int round = 0; round < OFTEN(200); round++)
        copy_any(draw(2), sizes[draw(sizeof sizes / sizeof *sizes)], 1 + draw(20));
}

static void parts_that_are_longer_than_the_slot_are_copied_piece_by_piece(void **state) {
    (void)state;
    copy_any(true, KVF_COPY_QUEUE_SLOT_BYTES + 17, 2);
    copy_any(false, KVF_COPY_QUEUE_SLOT_BYTES / 2 + 16, 3); /* one part in the slot, not two */
}

/* ---- what can go wrong -------------------------------------------------------------------------- */

static kvf_status permute_there(const world *w, const kvf_block_region *region) {
    return kvf_permute_received(&w->shape, region, 1, w->ids, w->id_count, NULL);
}

static void memory_that_is_not_the_devices_is_refused_and_nothing_changes(void **state) {
    (void)state;
    world w = small_world();
    CUdeviceptr room;
    kvf_block_region there = move(&w, 0, &room), bad = w.region;
    bad.kind = KVF_MEMORY_CUDA;
    assert_refused(permute_there(&w, &bad), KVF_E_INVALID, "region 0, in memory of CUDA device 0: ");
    bad = there;
    bad.device = 9999;
    assert_refused(permute_there(&w, &bad), KVF_E_RANGE, "CUDA device 9999");
    if (!devices_are_real()) { /* a real driver may have more memory behind it */
        bad = there;
        bad.bytes += 1u << 20;
        assert_refused(permute_there(&w, &bad), KVF_E_INVALID, "region 0, in memory of CUDA device 0: ");
    }
    const kvf_received_shape huge = shape_of(1u << 10, 1u << 10, KVF_PAGE_HND, 1024, KVF_PAGE_NHD, 1024);
    const kvf_received_request none = {NULL, 0, 0};
    const kvf_received received = {.shape = huge,
                                   .permutes = true,
                                   .page_blocks = 1,
                                   .block_bytes = 1u << 30,
                                   .regions = &there,
                                   .region_count = 1,
                                   .requests = &none,
                                   .request_count = 1};
    assert_refused(kvf_finish_on_devices(&received, KVF_DEVICE_LIMITS), KVF_E_LIMIT,
                   "on devices allowed: below 1073741824");
    check_there(&w, room);
    end(&w);
}

static void without_memory_nothing_changes_and_the_next_call_succeeds(void **state) {
    (void)state;
    world w = small_world();
    CUdeviceptr room;
    kvf_block_region there = move(&w, 0, &room);
    void *seen = devices_look(room);
    kvf_block_region regions[] = {w.region, there};
    world host = w; /* the host's region comes first in the call, and stays as it is */
    host.expected = malloc(w.bytes);
    assert_non_null(host.expected);
    memcpy(host.expected, w.memory, w.bytes);
    /* Given a device that has no memory for the table */
    devices_fail("cuMemcpyHtoDAsync_v2", CUDA_ERROR_OUT_OF_MEMORY, 1);
    assert_refused(kvf_permute_received(&w.shape, regions, 2, w.ids, w.id_count, NULL), KVF_E_NOMEM,
                   "bringing a block table to a device");
    check(&host);
    devices_get(seen);
    assert_memory_equal(seen, w.memory, w.bytes);
    /* A kernel that is refused is another failure: then the device's blocks have undefined contents */
    devices_fail("cuLaunchKernel", CUDA_ERROR_OUT_OF_MEMORY, 1);
    assert_refused(kvf_permute_received(&w.shape, regions, 2, w.ids, w.id_count, NULL), KVF_E_IO,
                   "CUDA device 0: starting a copy");
    check(&host);
    memcpy(seen, w.memory, w.bytes);
    devices_put(seen);
    /* Then it works once there is memory */
    expect(&w, UINT64_MAX);
    assert_int_equal(permute_there(&w, &there), KVF_OK);
    check_there(&w, room);
    free(host.expected);
    end(&w);
}

static void a_page_that_is_longer_than_the_room_that_stays_gets_its_own(void **state) {
    (void)state;
    world w = world_of(shape_of(640, 32u << 10, KVF_PAGE_HND, 2, KVF_PAGE_NHD, 2), 1, 1, 0); /* 40 MiB */
    CUdeviceptr room;
    kvf_block_region there = move(&w, 0, &room);
    list_blocks(&w, 1);
    devices_fail("cuMemAlloc_v2", CUDA_ERROR_OUT_OF_MEMORY, 1);
    assert_refused(permute_there(&w, &there), KVF_E_NOMEM, "making room on a device");
    const size_t left = devices_left();
    expect(&w, UINT64_MAX);
    assert_int_equal(permute_there(&w, &there), KVF_OK);
    assert_int_equal(devices_left(), left);
    check_there(&w, room);
    end(&w);
}

static void calls_leave_nothing_on_the_device(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    world w = small_world();
    CUdeviceptr room;
    kvf_block_region there = move(&w, 0, &room);
    assert_int_equal(permute_there(&w, &there), KVF_OK); /* opens what later calls use */
    const size_t left = devices_left();
    for (int i = 0; i < 20; i++)
        assert_int_equal(permute_there(&w, &there), KVF_OK);
    assert_int_equal(devices_left(), left);
    /* A copy that fails closes what it used, so fewer things are left. */
    devices_fail("cuLaunchKernel", CUDA_ERROR_INVALID_VALUE, 1);
    assert_refused(permute_there(&w, &there), KVF_E_IO, "starting a copy");
    assert_true(devices_left() < left);
    assert_int_equal(permute_there(&w, &there), KVF_OK);
    assert_int_equal(devices_left(), left);
    device_room_free(room);
    end(&w);
}

static void a_device_that_hangs_does_not_keep_the_caller(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    kvf_device_limits limits = KVF_DEVICE_LIMITS;
    limits.patience_ns = 50 * KVF_MILLISECOND;
    world w = small_world();
    CUdeviceptr room;
    kvf_block_region there = move(&w, 0, &room), here = w.region;
    /* Given a device that does nothing for a minute */
    devices_delay(60 * KVF_SECOND);
    uint64_t begun = kvf_now(&kvf_monotonic);
    assert_refused(finish_with(&w, &there, 24, limits), KVF_E_IO,
                   "CUDA device 0 has not finished a copy of blocks for 50 ms: something on it hangs");
    assert_true(kvf_now(&kvf_monotonic) - begun < 5 * KVF_SECOND);
    begun = kvf_now(&kvf_monotonic);
    assert_refused(kvf_copy_layer_on_device(&there, &here, w.ids, w.ids, 2, limits), KVF_E_IO, "hangs");
    assert_true(kvf_now(&kvf_monotonic) - begun < 5 * KVF_SECOND);
    memcpy(w.expected, w.memory, w.bytes);
    check(&w); /* the host's blocks did not change */
    /* When it goes on, it finds all memory that it was given, and other calls are served */
    devices_delay(0);
    devices_hasten();
    world other = small_world();
    CUdeviceptr other_room;
    kvf_block_region other_there = move(&other, 0, &other_room);
    expect(&other, 24);
    assert_int_equal(finish_with(&other, &other_there, 24, limits), KVF_OK); /* within the same patience */
    check_there(&other, other_room);
    end(&other);
    device_room_free(room);
    end(&w);
}

static void calls_return_when_a_late_device_has_finished(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    world w = small_world();
    CUdeviceptr room;
    kvf_block_region there = move(&w, 0, &room);
    expect(&w, UINT64_MAX);
    devices_delay(30 * KVF_MILLISECOND);
    assert_int_equal(permute_there(&w, &there), KVF_OK);
    check_there(&w, room);
    copy_any(true, 100, 5);
    copy_any(false, 100, 5);
    devices_delay(0);
    end(&w);
}

/* ---- threads ------------------------------------------------------------------------------------ */

typedef struct caller {
    pthread_t thread;
    world w;
    kvf_block_region there;
    CUdeviceptr room;
    bool failed;
} caller;

static void *permute_often(void *argument) {
    caller *c = argument;
    kvf_received_shape back = c->w.shape;
    back.received = c->w.shape.wanted;
    back.wanted = c->w.shape.received;
    for (int i = 0; i < 21 && !c->failed; i++)
        c->failed = kvf_permute_received(i % 2 ? &back : &c->w.shape, &c->there, 1, c->w.ids, c->w.id_count,
                                         NULL) != KVF_OK;
    return NULL;
}

static void threads_permute_different_blocks_at_the_same_time(void **state) {
    (void)state;
    enum { THREADS = 4 };
    caller callers[THREADS] = {0};
    for (int i = 0; i < THREADS; i++) {
        callers[i].w = world_of(shape_of(3, 6, KVF_PAGE_HND, 4, KVF_PAGE_NHD, 4), 9, 2, 1);
        list_blocks(&callers[i].w, 6);
        expect(&callers[i].w, UINT64_MAX);
        callers[i].there = move(&callers[i].w, (uint32_t)i % 2, &callers[i].room);
    }
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&callers[i].thread, NULL, permute_often, &callers[i]), 0);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(callers[i].thread, NULL), 0);
    for (int i = 0; i < THREADS; i++) {
        assert_false(callers[i].failed);
        check_there(&callers[i].w, callers[i].room);
        end(&callers[i].w);
    }
}

int main(void) {
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_form_becomes_any_other_cell_by_cell),
        cmocka_unit_test(the_result_is_that_of_the_host),
        cmocka_unit_test(pages_that_do_not_fit_into_the_room_go_one_after_another),
        cmocka_unit_test(a_later_call_does_not_wait_for_the_engine),
        cmocka_unit_test(more_regions_than_a_job_has_boxes_are_all_permuted),
        cmocka_unit_test(more_pages_than_are_counted_at_once_are_all_permuted),
        cmocka_unit_test(tokens_past_the_covered_ones_become_zero),
        cmocka_unit_test(more_requests_than_a_job_has_boxes_are_all_zeroed),
        cmocka_unit_test(blocks_are_copied_to_a_device_and_back),
        cmocka_unit_test(parts_that_are_longer_than_the_slot_are_copied_piece_by_piece),
        cmocka_unit_test(memory_that_is_not_the_devices_is_refused_and_nothing_changes),
        cmocka_unit_test(without_memory_nothing_changes_and_the_next_call_succeeds),
        cmocka_unit_test(a_page_that_is_longer_than_the_room_that_stays_gets_its_own),
        cmocka_unit_test(calls_leave_nothing_on_the_device),
        cmocka_unit_test(a_device_that_hangs_does_not_keep_the_caller),
        cmocka_unit_test(calls_return_when_a_late_device_has_finished),
        cmocka_unit_test(threads_permute_different_blocks_at_the_same_time),
    };
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
