/*
 * The fabric for device memory, between two processes, over the stand-in for the driver or a real one
 * (scripts/check-cuda): cells arrive in the reader's order, and everything that can go wrong gives one error with a
 * sentence. transport_conformance_test tests what it shares with other fabrics.
 */
#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "cuda/device_image.h"
#include "cuda_scene.h"
#include "transport/card.h"
#include "transport/cuda/cuda_wire.h"

#define OPERATING_SYSTEM 304 /* the driver's answer for a handle if containers share no name space */
#define HOUR_NS 3600000000000ull

/* ---- moving ------------------------------------------------------------------------------------- */

static void cells_of_another_process_arrive_in_our_order(void **state) {
    char detail[512];
    const size_t left = devices_left();
    test_scene *scene = scene_open(*state);
    assert_ok(scene_connect(scene));
    kvf_peer_info info = {.struct_size = sizeof info};
    assert_ok(kvf_peer_get_info(scene->peer, &info));
    assert_string_equal(info.kind, "cuda");
    assert_string_equal(info.way, "kernels, memory mapped by CUDA IPC");
    assert_true(cache_wrong_cells(&scene->here, 1) > 1000);
    assert_ok(scene_pull(scene, detail));
    assert_int_equal(cache_wrong_cells(&scene->here, 1), 0);
    /* A byte that changes in the owner's memory shows in its cell and nowhere else. */
    (void)owner_tell(&scene->owner, 's');
    assert_ok(scene_pull(scene, detail));
    assert_int_equal(cache_wrong_cells(&scene->here, 1), 1);
    scene_close(scene, false);
    assert_int_equal(devices_left(), left);
}

static void an_owner_reads_written_bytes(void **state) {
    char detail[512];
    const size_t left = devices_left();
    test_scene *scene = scene_open(*state);
    assert_ok(scene_connect(scene));
    assert_true(owner_tell(&scene->owner, 'c') > 500);
    assert_ok(scene_push(scene, detail));
    assert_int_equal(owner_tell(&scene->owner, 'c'), 0);
    (void)owner_tell(&scene->owner, 's'); /* the control: a spoiled byte is counted */
    assert_int_equal(owner_tell(&scene->owner, 'c'), 1);
    assert_ok(scene_push(scene, detail));
    assert_int_equal(owner_tell(&scene->owner, 'c'), 0);
    assert_ok(scene_pull(scene, detail));
    assert_int_equal(cache_wrong_cells(&scene->here, 2), 0);
    scene_close(scene, false);
    assert_int_equal(devices_left(), left);
}

/* The driver gives one address to all who open a handle, and unmaps it when all have closed it. */
static void a_connection_reads_on_when_another_to_the_same_owner_is_closed(void **state) {
    (void)state;
    char detail[512];
    const size_t left = devices_left();
    test_scene *scene = scene_open("cuda");
    assert_ok(scene_connect(scene));
    assert_ok(scene_pull(scene, detail));
    kvf_peer *first = scene->peer;
    assert_ok(scene_connect(scene));
    assert_ok(scene_pull(scene, detail));
    kvf_peer_close(first);
    cache_scribble(&scene->here, 3);
    assert_true(cache_wrong_cells(&scene->here, 1) > 1000);
    assert_ok(scene_pull(scene, detail));
    assert_int_equal(cache_wrong_cells(&scene->here, 1), 0);
    scene_close(scene, false);
    assert_int_equal(devices_left(), left);
}

static void unregister(const test_scene *scene, uint32_t region) {
    kvf_status status;
    while ((status = kvf_transport_unregister_region(scene->here.transport, region)) == KVF_E_AGAIN)
        scene_step(scene);
    assert_ok(status);
}

/* The owner has mapped the memory that was written from: it unmaps that, and is told of the new memory. */
static void memory_that_was_written_from_can_be_taken_back(void **state) {
    (void)state;
    char detail[512];
    void *seen;
    test_scene *scene = scene_open("cuda");
    const size_t left = devices_left();
    assert_ok(scene_connect(scene));
    assert_ok(scene_push(scene, detail));
    const kvf_memory more = device_memory(1, 4096, &seen);
    const uint32_t number = kvf_shard_get(scene->here.cells.shard)->region_count;
    kvf_memory shown = more;
    shown.withheld = false;
    for (uint32_t round = 0; round < 3; round++) {
        assert_ok(kvf_transport_register_region(scene->here.transport, number, &shown));
        assert_ok(scene_push(scene, detail));
        assert_int_equal(owner_tell(&scene->owner, 'c'), 0);
        unregister(scene, number);
        (void)owner_tell(&scene->owner, 's');
        assert_ok(scene_push(scene, detail));
        assert_int_equal(owner_tell(&scene->owner, 'c'), 0);
    }
    kvf_peer_close(scene->peer);
    devices_free();
    assert_int_equal(devices_left(), left);
    scene_close(scene, false);
}

/* The writer's memory is freed while it is registered, so the owner cannot map it. All that was asked for is answered
 * then: once the second of two writes waited until something else happened. */
static void memory_that_the_owner_cannot_read_is_not_written(void **state) {
    (void)state;
    char detail[512];
    DEVICES_ARE_STAND_INS(); /* a driver may have given the memory to somebody else */
    test_scene *scene = scene_open("cuda");
    assert_ok(scene_connect(scene));
    cache_free(&scene->here);
    const uint64_t begun = kvf_now(&kvf_monotonic);
    assert_int_equal(scene_move(scene, KVF_WRITE, detail), KVF_E_UNSUPPORTED);
    assert_true(kvf_now(&kvf_monotonic) - begun < 10 * KVF_SECOND);
    assert_non_null(strstr(detail, "cuda: writing to "));
    assert_non_null(strstr(detail, "the owner could not read the data: region 0 is freed"));
    assert_true(owner_tell(&scene->owner, 'c') > 500);
    scene_close(scene, false);
}

/* ---- ways that are closed ----------------------------------------------------------------------- */

/* It is tried again with the next batch, for the reason may have passed. */
static void a_handle_that_is_refused_is_named(void **state) {
    char detail[512];
    test_scene *scene = scene_open(*state);
    const size_t left = devices_left();
    devices_fail("cuIpcOpenMemHandle_v2", OPERATING_SYSTEM, UINT32_MAX);
    assert_ok(scene_connect(scene));
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(scene_pull(scene, detail), KVF_E_UNSUPPORTED);
        assert_non_null(strstr(detail, "region 0 is freed, or this process may not map it: CUDA device "));
    }
    assert_int_equal(devices_left(), left);
    devices_fail("", 0, 0);
    assert_ok(scene_pull(scene, detail));
    assert_int_equal(cache_wrong_cells(&scene->here, 1), 0);
    scene_close(scene, false);
}

/* An owner that takes memory back waits for those that it knows. */
static void nothing_is_mapped_before_the_owner_knows_of_the_reader(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS(); /* which count what is mapped */
    char detail[512];
    test_scene *scene = scene_open("cuda");
    const size_t left = devices_left();
    assert_int_equal(kill(scene->owner.process, SIGSTOP), 0);
    assert_ok(scene_connect(scene));
    for (uint32_t i = 0; i < 3; i++)
        assert_ok(kvf_transport_progress(scene->here.transport, NULL));
    const size_t unknown = devices_left();
    assert_int_equal(kill(scene->owner.process, SIGCONT), 0);
    assert_ok(scene_pull(scene, detail));
    assert_int_equal(cache_wrong_cells(&scene->here, 1), 0);
    assert_int_equal(unknown, left);
    assert_true(devices_left() > left);
    scene_close(scene, false);
}

static void memory_that_its_owner_has_freed_is_not_mapped(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS(); /* a driver may have given the memory to somebody else */
    char detail[512];
    test_scene *scene = scene_open("cuda");
    const size_t left = devices_left();
    (void)owner_tell(&scene->owner, 'f');
    assert_ok(scene_connect(scene));
    assert_int_equal(scene_pull(scene, detail), KVF_E_UNSUPPORTED);
    assert_non_null(strstr(detail, "region 0 is freed"));
    assert_int_equal(devices_left(), left);
    scene_close(scene, false);
}

static void a_device_that_ours_does_not_reach_is_named(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    test_scene *scene = scene_open("cuda");
    assert_int_equal(setenv("FAKE_CUDA_APART", "1", 1), 0);
    assert_fails(scene_connect(scene), KVF_E_UNSUPPORTED,
                 "CUDA device 1 cannot reach the memory of device 0");
    assert_int_equal(unsetenv("FAKE_CUDA_APART"), 0);
    scene_close(scene, false);
}

/* Servers on one host are often started with a device each, by CUDA_VISIBLE_DEVICES. */
static void devices_that_this_process_does_not_see_are_reached(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    static const unsigned where[] = {0, OURS_IN_SEGMENTS, THEIRS_IN_SEGMENTS,
                                     OURS_IN_SEGMENTS | THEIRS_IN_SEGMENTS};
    char detail[512];
    const size_t left = devices_left();
    for (size_t i = 0; i < sizeof where / sizeof *where; i++) {
        test_scene *scene = scene_open_with("cuda", NULL, where[i] | THEIRS_UNSEEN);
        assert_ok(scene_connect(scene));
        cache_scribble(&scene->here, 3);
        assert_true(cache_wrong_cells(&scene->here, 1) > 1000);
        assert_ok(scene_pull(scene, detail));
        assert_int_equal(cache_wrong_cells(&scene->here, 1), 0);
        assert_true(owner_tell(&scene->owner, 'c') > 500);
        assert_ok(scene_push(scene, detail));
        assert_int_equal(owner_tell(&scene->owner, 'c'), 0);
        (void)owner_tell(&scene->owner, 's'); /* the control */
        assert_int_equal(owner_tell(&scene->owner, 'c'), 1);
        scene_close(scene, false);
        assert_int_equal(devices_left(), left);
    }
}

static void a_device_that_is_neither_seen_nor_reached_is_read_by_nobody(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    static const struct {
        unsigned where;
        const char *why;
    } cases[] = {{0, "region 0 is freed, or this process may not map it: CUDA device "},
                 {THEIRS_IN_SEGMENTS, "region 0: the devices may not read it: CUDA device "}};
    char detail[512];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_scene *scene = scene_open_with("cuda", NULL, cases[i].where | THEIRS_UNSEEN);
        const size_t left = devices_left();
        assert_int_equal(setenv("FAKE_CUDA_APART", "1", 1), 0);
        assert_ok(scene_connect(scene));
        assert_int_equal(scene_pull(scene, detail), KVF_E_UNSUPPORTED);
        if (!strstr(detail, cases[i].why))
            fail_msg("%s", detail);
        assert_non_null(kvf_peer_refusal(scene->peer));
        assert_int_equal(devices_left(), left);
        assert_int_equal(unsetenv("FAKE_CUDA_APART"), 0);
        scene_close(scene, false);
    }
}

static void an_endpoint_without_memory_of_devices_is_not_reached_so(void **state) {
    (void)state;
    test_scene *scene = scene_open("auto");
    kvf_transport *other = NULL;
    kvf_peer *peer = NULL;
    unsigned char bytes[64];
    const void *card;
    size_t card_bytes;
    const kvf_memory memory = {.struct_size = sizeof memory, .address = bytes, .bytes = sizeof bytes};
    assert_ok(kvf_transport_open("auto", NULL, &other));
    assert_ok(kvf_transport_register(other, &memory, 1));
    assert_fails(kvf_transport_connect(other, scene->owner.card, scene->owner.card_bytes, &peer),
                 KVF_E_UNSUPPORTED, "no way from ", " (inproc shm ");
    assert_ok(kvf_transport_export(other, &card, &card_bytes));
    assert_fails(kvf_transport_connect(scene->here.transport, card, card_bytes, &peer), KVF_E_UNSUPPORTED,
                 "no way from ", " (cuda");
    kvf_transport_close(other);
    scene_close(scene, false);
}

/* ---- memory that is refused --------------------------------------------------------------------- */

static kvf_transport *open_cuda(void) {
    kvf_transport *transport = NULL;
    assert_ok(kvf_transport_open("cuda", NULL, &transport));
    return transport;
}

static void memory_is_a_devices_and_there(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS(); /* of which there are two */
    void *seen, *allocated = NULL;
    kvf_transport *transport = open_cuda();
    const kvf_memory all = device_memory(1, 4096, &seen);
    kvf_memory wrong = {.struct_size = sizeof wrong,
                        .address = (unsigned char *)all.address + 100,
                        .bytes = 3996,
                        .kind = KVF_MEMORY_CUDA,
                        .device = 1};
    wrong.bytes++;
    assert_fails(kvf_transport_register(transport, &wrong, 1), KVF_E_INVALID,
                 "its allocation ends after 3996");
    wrong.bytes--;
    wrong.device = 0;
    assert_fails(kvf_transport_register(transport, &wrong, 1), KVF_E_INVALID,
                 "is memory of CUDA device 1; allowed: memory of device 0");
    wrong.device = 2;
    assert_fails(kvf_transport_register(transport, &wrong, 1), KVF_E_RANGE, "this process sees 2");
    wrong.device = 1;
    wrong.address = &wrong;
    assert_fails(kvf_transport_register(transport, &wrong, 1), KVF_E_INVALID,
                 "is not memory of CUDA device 1");
    wrong.address = (unsigned char *)all.address + 100;
    devices_fail("cuMemGetAddressRange_v2", CUDA_ERROR_OUT_OF_MEMORY, 1); /* not the address's fault */
    assert_fails(kvf_transport_register(transport, &wrong, 1), KVF_E_NOMEM,
                 "asking whose memory an address is: CUDA_ERROR_OUT_OF_MEMORY");
    /* the region is in the middle of its allocation */
    assert_ok(kvf_transport_register(transport, &wrong, 1));
    assert_ok(kvf_transport_allocate(transport, KVF_MEMORY_CUDA, 0, 100, &allocated));
    assert_int_equal(((unsigned char *)devices_look((uint64_t)(uintptr_t)allocated))[99], 0);
    kvf_transport_close(transport);
    devices_free();
    transport = open_cuda();
    assert_fails(kvf_transport_register(transport, &wrong, 1), KVF_E_INVALID, "or it was freed");
    kvf_transport_close(transport);
}

/* kvferry uses no pools, so its table of the driver does not have them. */
static struct {
    int (*create)(void **pool, const int *properties);
    int (*destroy)(void *pool);
    int (*allocate)(CUdeviceptr *address, size_t bytes, void *pool, CUstream stream);
    int (*release)(CUdeviceptr address, CUstream stream);
} pools;

static void find_pool_function(void *out, const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *address = NULL;
    assert_non_null(library);
    assert_non_null(address = dlsym(library, name));
    memcpy(out, &address, sizeof address);
}

/* Makes a pool of device 0. NULL: it has none, as many virtual devices. */
static void *pool_make(void) {
    enum { PROPERTIES_WORDS = 22, DEVICE_TYPE = 2 };
    const int properties[PROPERTIES_WORDS] = {CU_MEM_ALLOCATION_TYPE_PINNED, [DEVICE_TYPE] =
                                                                                 CU_MEM_LOCATION_TYPE_DEVICE};
    void *pool = NULL;
    find_pool_function(&pools.create, "cuMemPoolCreate");
    find_pool_function(&pools.destroy, "cuMemPoolDestroy");
    find_pool_function(&pools.allocate, "cuMemAllocFromPoolAsync");
    find_pool_function(&pools.release, "cuMemFreeAsync");
    const int result = pools.create(&pool, properties);
    assert_true(result == 0 || result == CUDA_ERROR_NOT_SUPPORTED);
    return result ? NULL : pool;
}

static void memory_of_a_pool_is_refused_and_can_be_kept(void **state) {
    kvf_transport *transport = NULL;
    const kvf_cuda *cuda;
    CUstream stream;
    CUdeviceptr address;
    assert_ok(kvf_cuda_enter(0, &cuda));
    void *pool = pool_make();
    if (!pool) {
        kvf_cuda_leave(cuda);
        skip();
    }
    assert_int_equal(cuda->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), 0);
    assert_int_equal(pools.allocate(&address, 4096, pool, stream), 0);
    assert_int_equal(cuda->cuStreamSynchronize(stream), 0);
    kvf_memory memory = {.struct_size = sizeof memory,
                         .kind = KVF_MEMORY_CUDA,
                         .address = (void *)(uintptr_t)address,
                         .bytes = 4096};
    assert_ok(kvf_transport_open(*state, NULL, &transport));
    assert_fails(kvf_transport_register(transport, &memory, 1), KVF_E_UNSUPPORTED,
                 devices_are_real() ? "register it as withheld" : "as that of a memory pool");
    memory.withheld = true;
    assert_ok(kvf_transport_register(transport, &memory, 1));
    kvf_transport_close(transport);
    assert_int_equal(pools.release(address, stream), 0);
    assert_int_equal(cuda->cuStreamSynchronize(stream), 0);
    assert_int_equal(cuda->cuStreamDestroy_v2(stream), 0);
    assert_int_equal(pools.destroy(pool), 0);
    kvf_cuda_leave(cuda);
}

/* What this process has opened by a handle is another process's to share. */
static void memory_of_another_process_is_refused_and_can_be_kept(void **state) {
    (void)state;
    test_scene *scene = scene_open("cuda");
    const size_t left = devices_left();
    kvf_transport *transport = open_cuda();
    const kvf_cuda *cuda;
    kvf_card card;
    kvf_cuda_region theirs;
    CUdeviceptr opened = 0;
    assert_ok(kvf_card_read(scene->owner.card, scene->owner.card_bytes, &card));
    memcpy(&theirs, (const unsigned char *)card.parts[0].data + sizeof(kvf_cuda_card), sizeof theirs);
    kvf_card_free(&card);
    assert_ok(kvf_cuda_enter(0, &cuda));
    assert_int_equal(cuda->cuIpcOpenMemHandle_v2(&opened, theirs.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
                     0);
    kvf_memory memory = {.struct_size = sizeof memory,
                         .kind = KVF_MEMORY_CUDA,
                         .address = (void *)(uintptr_t)opened,
                         .bytes = 4096};
    assert_fails(kvf_transport_register(transport, &memory, 1), KVF_E_UNSUPPORTED,
                 "or of another process (cuIpcOpenMemHandle()); register it as withheld: ");
    memory.withheld = true;
    assert_ok(kvf_transport_register(transport, &memory, 1));
    kvf_transport_close(transport);
    assert_int_equal(cuda->cuIpcCloseMemHandle(opened), 0);
    kvf_cuda_leave(cuda);
    assert_int_equal(devices_left(), left);
    scene_close(scene, false);
}

/* ---- cards that lie ----------------------------------------------------------------------------- */

/* Makes the owner's card with another part for this fabric. */
static void forge(const test_scene *scene, const void *part, size_t bytes, kvf_buffer *out) {
    kvf_card card;
    assert_ok(kvf_card_read(scene->owner.card, scene->owner.card_bytes, &card));
    assert_int_equal(card.part_count, 1);
    card.parts[0].data = part;
    card.parts[0].bytes = bytes;
    assert_ok(kvf_card_write(&card, out));
    kvf_card_free(&card);
}

static void connect_forged(test_scene *scene, const void *part, size_t bytes, kvf_status status,
                           const char *word) {
    kvf_buffer forged = {0};
    forge(scene, part, bytes, &forged);
    assert_fails(kvf_transport_connect(scene->here.transport, forged.data, forged.length, &scene->peer),
                 status, word);
    kvf_buffer_free(&forged);
}

/* The card is found wrong only when the memory is mapped. */
static void read_forged(test_scene *scene, const void *part, size_t bytes, const char *word) {
    char detail[512];
    kvf_buffer forged = {0};
    const size_t left = devices_left();
    forge(scene, part, bytes, &forged);
    assert_ok(kvf_transport_connect(scene->here.transport, forged.data, forged.length, &scene->peer));
    assert_int_equal(scene_pull(scene, detail), KVF_E_UNSUPPORTED);
    if (!strstr(detail, word))
        fail_msg("%s", detail);
    kvf_peer_close(scene->peer);
    assert_int_equal(devices_left(), left);
    kvf_buffer_free(&forged);
}

/* An allocation is opened once. Its size is checked then, and a later region gave another one: a kernel would have read
 * whatever lies there in this process. */
static void a_later_region_of_an_allocation_lies_in_it_too(void **state) {
    (void)state;
    test_scene *scene = scene_open("cuda");
    const size_t left = devices_left();
    kvf_card card;
    assert_ok(kvf_card_read(scene->owner.card, scene->owner.card_bytes, &card));
    assert_true(card.region_count >= 2);
    const size_t bytes = card.parts[0].bytes, second = sizeof(kvf_cuda_card) + sizeof(kvf_cuda_region);
    unsigned char *part = malloc(bytes);
    assert_non_null(part);
    kvf_cuda_region wrong;
    memcpy(part, card.parts[0].data, bytes);
    memcpy(&wrong, part + second, sizeof wrong);
    wrong.allocation_bytes = UINT64_C(1) << 40;
    wrong.offset = UINT64_C(1) << 39;
    memcpy(part + second, &wrong, sizeof wrong);
    read_forged(scene, part, bytes, "region 1: its allocation has 1099511627776 bytes in the card");
    assert_int_equal(devices_left(), left);
    assert_ok(scene_connect(scene)); /* the control: by its own card it is reached */
    kvf_card_free(&card);
    free(part);
    scene_close(scene, false);
}

static void a_card_that_says_something_else_than_the_driver_is_refused(void **state) {
    (void)state;
    test_scene *scene = scene_open("cuda");
    const size_t left = devices_left();
    kvf_card card;
    assert_ok(kvf_card_read(scene->owner.card, scene->owner.card_bytes, &card));
    const size_t bytes = card.parts[0].bytes;
    unsigned char *part = malloc(bytes);
    assert_non_null(part);
    kvf_cuda_region first, wrong;
    memcpy(part, card.parts[0].data, bytes);
    memcpy(&first, part + sizeof(kvf_cuda_card), sizeof first);
    connect_forged(scene, part, bytes - 1, KVF_E_PARSE, "bytes");
    connect_forged(scene, part, bytes - sizeof first, KVF_E_PARSE, "regions");
    connect_forged(scene, part, sizeof(kvf_cuda_card) - 1, KVF_E_PARSE, "bytes");
    connect_forged(scene, part, 0, KVF_E_UNSUPPORTED, "the peer has registered no CUDA memory");
    wrong = first;
    wrong.allocation_bytes += UINT64_C(1) << 40; /* more than any block from which drivers cut allocations */
    memcpy(part + sizeof(kvf_cuda_card), &wrong, sizeof wrong);
    read_forged(scene, part, bytes, "its allocation has");
    if (!devices_are_real()) {
        wrong = first;
        wrong.allocation_bytes = 2 << 20; /* a block, in the middle of which the allocation begins */
        memcpy(part + sizeof(kvf_cuda_card), &wrong, sizeof wrong);
        read_forged(scene, part, bytes, "its allocation has 2097152 bytes in the card and 1048576 here");
    }
    wrong = first;
    wrong.offset = wrong.allocation_bytes - wrong.bytes + 1;
    memcpy(part + sizeof(kvf_cuda_card), &wrong, sizeof wrong);
    connect_forged(scene, part, bytes, KVF_E_PARSE, "region 0: ");
    wrong = first;
    memset(&wrong.handle, 0x5a, sizeof wrong.handle);
    memcpy(part + sizeof(kvf_cuda_card), &wrong, sizeof wrong);
    read_forged(scene, part, bytes, "may not map it");
    memcpy(part + sizeof(kvf_cuda_card), &first, sizeof first);
    part[offsetof(kvf_cuda_card, key)] ^= 1;
    kvf_buffer forged = {0};
    forge(scene, part, bytes, &forged);
    assert_ok(kvf_transport_connect(scene->here.transport, forged.data, forged.length, &scene->peer));
    while (scene->lost == 0)
        scene_step(scene);
    assert_non_null(strstr(scene->lost_detail, "the key of the card is not the peer's"));
    assert_int_equal(devices_left(), left);
    kvf_buffer_free(&forged);
    kvf_card_free(&card);
    free(part);
    scene_close(scene, false);
}

/* ---- ends --------------------------------------------------------------------------------------- */

static void a_peer_that_dies_is_lost_and_others_are_read(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS(); /* a real device would finish the copy before the peer dies */
    char detail[512];
    const size_t left = devices_left();
    test_scene *scene = scene_open("cuda");
    const size_t unconnected = devices_left();
    owner_process other;
    assert_ok(scene_connect(scene));
    assert_ok(scene_pull(scene, detail));
    devices_delay(1000000);
    kvf_transfer *transfer = scene_begin(scene, KVF_READ);
    owner_end(&scene->owner, true);
    while (kvf_transfer_status(transfer) == KVF_IN_PROGRESS)
        scene_step(scene);
    devices_delay(0);
    assert_int_equal(kvf_transfer_status(transfer), KVF_E_PEER_LOST);
    assert_non_null(strstr(kvf_transfer_detail(transfer), "cuda: reading from "));
    kvf_transfer_free(transfer);
    while (scene->lost == 0)
        scene_step(scene);
    assert_int_equal(scene->lost, 1);
    kvf_peer_close(scene->peer);
    assert_int_equal(devices_left(), unconnected); /* nothing of the dead process is mapped any more */
    owner_start(&other, "cuda", 0, false);
    assert_ok(kvf_transport_connect(scene->here.transport, other.card, other.card_bytes, &scene->peer));
    cache_scribble(&scene->here, 3);
    assert_ok(scene_pull(scene, detail));
    assert_int_equal(cache_wrong_cells(&scene->here, 1), 0);
    scene->owner = other;
    scene_close(scene, false);
    assert_int_equal(devices_left(), left);
}

/* Begins to write to an owner that is stopped, and kills it. */
static void write_to_an_owner_that_dies(bool with_child) {
    test_scene *scene = scene_open("cuda");
    assert_ok(scene_connect(scene));
    if (with_child)
        assert_int_equal(owner_tell(&scene->owner, 'k'), 0);
    assert_int_equal(kill(scene->owner.process, SIGSTOP), 0);
    kvf_transfer *transfer = scene_begin(scene, KVF_WRITE);
    for (uint32_t i = 0; i < 3; i++)
        assert_ok(kvf_transport_progress(scene->here.transport, NULL));
    assert_int_equal(kvf_transfer_status(transfer), KVF_IN_PROGRESS);
    assert_int_equal(kill(scene->owner.process, SIGKILL), 0);
    while (kvf_transfer_status(transfer) == KVF_IN_PROGRESS)
        scene_step(scene);
    assert_int_equal(kvf_transfer_status(transfer), KVF_E_PEER_LOST);
    assert_non_null(strstr(kvf_transfer_detail(transfer), "cuda: writing to "));
    kvf_transfer_free(transfer);
    owner_end(&scene->owner, true);
    scene_close(scene, true);
}

static void an_owner_that_dies_while_it_reads_is_lost(void **state) {
    (void)state;
    write_to_an_owner_that_dies(false);
}

static void an_owner_that_dies_is_lost_though_its_child_keeps_its_sockets(void **state) {
    (void)state;
    write_to_an_owner_that_dies(true);
}

static void an_error_that_stays_with_the_device_ends_batches_with_a_sentence(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    char detail[512];
    test_scene *scene = scene_open("cuda");
    assert_ok(scene_connect(scene));
    assert_ok(scene_pull(scene, detail));
    cache_scribble(&scene->here, 3);
    devices_stick(CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_int_equal(scene_pull(scene, detail), KVF_E_IO);
    assert_non_null(strstr(detail, "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered); "
                                   "this process cannot use the device any more"));
    devices_stick(0);
    assert_ok(scene_pull(scene, detail));
    assert_int_equal(cache_wrong_cells(&scene->here, 1), 0);
    scene_close(scene, false);
}

static void note_status(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    char *noted = context;
    (void)operation;
    (void)snprintf(noted, 512, "%s: %s", kvf_status_name(status), detail);
}

/* Must be the last test: it leaves a copy that never ends. */
static void a_device_that_does_not_come_to_an_end_is_not_waited_for(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    static char first[512], second[512];
    const kvf_setting impatient = {"cuda.patience_ms", "1"};
    const kvf_run run = {.bytes = 64};
    test_scene *scene = scene_open_with("cuda", &impatient, 0);
    assert_ok(scene_connect(scene));
    devices_delay(HOUR_NS);
    assert_ok(kvf_transport_submit(scene->peer, KVF_READ, &run, 1, note_status, first, NULL));
    for (uint32_t i = 0; i < 3; i++) /* connects, and starts the copy */
        scene_step(scene);
    assert_ok(kvf_transport_submit(scene->peer, KVF_READ, &run, 1, note_status, second, NULL));
    for (uint32_t i = 0; !*second && i < 3; i++)
        scene_step(scene);
    (void)usleep(2000);
    assert_ok(kvf_transport_submit(scene->peer, KVF_READ, &run, 1, note_status, second, NULL));
    while (!*second)
        scene_step(scene);
    assert_non_null(strstr(second, "KVF_E_IO: cuda: reading from "));
    assert_non_null(strstr(second, "the device has not finished a copy for 1 ms"));
    assert_string_equal(first, ""); /* its memory is not quiet */
    devices_delay(0);
    scene_close(scene, false);
    assert_non_null(strstr(first, "KVF_E_CANCELLED"));
}

/* ---- machines without CUDA --------------------------------------------------------------------------- */

static int print_opened(void) {
    kvf_transport *transport = NULL;
    kvf_transport_finding found = {.struct_size = sizeof found};
    kvf_status status;
    if (!getenv("KVF_TEST_ONLY_AUTO")) {
        status = kvf_transport_open("cuda", NULL, &transport);
        (void)printf("%s: %s\n", kvf_status_name(status), status ? kvf_error_detail() : "");
        kvf_transport_close(transport);
        transport = NULL;
    }
    status = kvf_transport_open("auto", NULL, &transport);
    for (uint32_t i = 0; !status && strcmp(found.kind, "cuda") != 0; i++)
        status = kvf_transport_find(transport, i, &found);
    (void)printf("%s: %s %s\n", kvf_status_name(status), found.works ? "works" : "does not", found.why_not);
    kvf_transport_close(transport);
    return 0;
}

static void opened_with(const char *environment, char *out, size_t bytes) {
    char self[256], command[1024];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(length > 0);
    self[length] = '\0';
    (void)snprintf(command, sizeof command, "env %s '%s' opened", environment, self);
    FILE *child = popen(command, "r"); // NOLINT(cert-env33-c): the test's own program
    assert_non_null(child);
    out[fread(out, 1, bytes - 1, child)] = '\0';
    assert_int_equal(pclose(child), 0);
}

static void a_machine_without_a_driver_says_so_and_has_the_others(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    char text[2048];
    opened_with("FAKE_CUDA_VERSION=11080", text, sizeof text);
    assert_string_equal(
        text, "KVF_E_UNSUPPORTED: cuda: there is no CUDA here: the driver is for CUDA 11.8; allowed: "
              "12.0 and later\n"
              "KVF_OK: does not there is no CUDA here: the driver is for CUDA 11.8; allowed: 12.0 and "
              "later\n");
    /* Asking which kinds work does not start the driver, so the library learns only later whether there are devices. */
    opened_with("FAKE_CUDA_DEVICES=0", text, sizeof text);
    assert_string_equal(text, "KVF_E_UNSUPPORTED: cuda: there is no CUDA here: the driver knows no device\n"
                              "KVF_OK: does not there is no CUDA here: the driver knows no device\n");
    opened_with("FAKE_CUDA_DEVICES=0 KVF_TEST_ONLY_AUTO=1", text, sizeof text);
    assert_string_equal(text, "KVF_OK: works \n");
    char lacking[512];
    (void)snprintf(lacking, sizeof lacking, "'LD_LIBRARY_PATH=%s_lacking'", getenv("LD_LIBRARY_PATH"));
    opened_with(lacking, text, sizeof text);
    assert_string_equal(
        text, "KVF_E_UNSUPPORTED: cuda: there is no CUDA here: libcuda.so.1 has no cuIpcOpenMemHandle_v2()\n"
              "KVF_OK: does not there is no CUDA here: libcuda.so.1 has no cuIpcOpenMemHandle_v2()\n");
    opened_with("-u LD_LIBRARY_PATH", text, sizeof text);
    if (strstr(text, "does not")) /* no driver was found; the machine may have one of its own */
        assert_non_null(strstr(text, "KVF_E_UNSUPPORTED: cuda: there is no CUDA here: libcuda.so.1: "));
}

int main(int argument_count, char **arguments) {
    static char cuda[] = "cuda", automatic[] = "auto";
    if (argument_count == 2 && strcmp(arguments[1], "opened") == 0)
        return print_opened();
    if (argument_count == 5)
        return owner_main(arguments);
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        {"cells_of_another_process_arrive_in_our_order (cuda)", cells_of_another_process_arrive_in_our_order,
         NULL, NULL, cuda},
        {"cells_of_another_process_arrive_in_our_order (auto)", cells_of_another_process_arrive_in_our_order,
         NULL, NULL, automatic},
        {"an_owner_reads_written_bytes (cuda)", an_owner_reads_written_bytes, NULL, NULL, cuda},
        {"an_owner_reads_written_bytes (auto)", an_owner_reads_written_bytes, NULL, NULL, automatic},
        cmocka_unit_test(memory_that_was_written_from_can_be_taken_back),
        cmocka_unit_test(a_connection_reads_on_when_another_to_the_same_owner_is_closed),
        cmocka_unit_test(memory_that_the_owner_cannot_read_is_not_written),
        cmocka_unit_test(an_owner_that_dies_while_it_reads_is_lost),
        cmocka_unit_test(an_owner_that_dies_is_lost_though_its_child_keeps_its_sockets),
        {"a_handle_that_is_refused_is_named (cuda)", a_handle_that_is_refused_is_named, NULL, NULL, cuda},
        {"a_handle_that_is_refused_is_named (auto)", a_handle_that_is_refused_is_named, NULL, NULL,
         automatic},
        cmocka_unit_test(nothing_is_mapped_before_the_owner_knows_of_the_reader),
        cmocka_unit_test(memory_that_its_owner_has_freed_is_not_mapped),
        cmocka_unit_test(a_device_that_ours_does_not_reach_is_named),
        cmocka_unit_test(devices_that_this_process_does_not_see_are_reached),
        cmocka_unit_test(a_device_that_is_neither_seen_nor_reached_is_read_by_nobody),
        cmocka_unit_test(an_endpoint_without_memory_of_devices_is_not_reached_so),
        cmocka_unit_test(memory_is_a_devices_and_there),
        cmocka_unit_test(memory_of_another_process_is_refused_and_can_be_kept),
        {"memory_of_a_pool_is_refused_and_can_be_kept (cuda)", memory_of_a_pool_is_refused_and_can_be_kept,
         NULL, NULL, cuda},
        {"memory_of_a_pool_is_refused_and_can_be_kept (auto)", memory_of_a_pool_is_refused_and_can_be_kept,
         NULL, NULL, automatic},
        cmocka_unit_test(a_card_that_says_something_else_than_the_driver_is_refused),
        cmocka_unit_test(a_later_region_of_an_allocation_lies_in_it_too),
        cmocka_unit_test(a_peer_that_dies_is_lost_and_others_are_read),
        cmocka_unit_test(an_error_that_stays_with_the_device_ends_batches_with_a_sentence),
        cmocka_unit_test(a_machine_without_a_driver_says_so_and_has_the_others),
        cmocka_unit_test(a_device_that_does_not_come_to_an_end_is_not_waited_for),
    };
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
