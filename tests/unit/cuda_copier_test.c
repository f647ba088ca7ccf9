/*
 * The driver and the copy engine of devices, over the stand-in of tests/fakes/fake_cuda.c, which the loader finds
 * first, or over a real driver (scripts/check-cuda). To find another driver, or none, the test starts its own program
 * again as `cuda_copier_test find`.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include <kvferry/device.h>

#include "cuda/allocation.h"
#include "cuda/copier.h"
#include "cuda/device_image.h"
#include "cuda/hasher.h"
#include "cuda/moment.h"
#include "cuda/over.h"
#include "devices.h"

#define MS 1000000ull

/* ---- the driver --------------------------------------------------------------------------------- */

/* Runs this program as `find` with changes to its environment and gives what it prints. */
static void found_with(const char *environment, char *out, size_t bytes) {
    char command[4096], self[2048];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(length > 0);
    self[length] = '\0';
    (void)snprintf(command, sizeof command, "env %s '%s' find", environment, self);
    FILE *child = popen(command, "r"); // NOLINT(cert-env33-c): the test's own program
    assert_non_null(child);
    out[fread(out, 1, bytes - 1, child)] = '\0';
    assert_int_equal(pclose(child), 0);
}

static int print_found(void) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_find(&cuda);
    if (status)
        return printf("%s: %s", kvf_status_name(status), kvf_error_detail()) < 0;
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (cuda->cuThreadExchangeStreamCaptureMode(&mode))
        return 1;
    return printf("%u devices, %s, %u.%u; capture mode %d", cuda->device_count, cuda->devices[0].name,
                  cuda->devices[0].major, cuda->devices[0].minor, mode) < 0;
}

/* The thread that starts the driver may capture graphs later, and keeps the mode in which all threads begin. */
static void a_driver_is_found_with_its_devices(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    char text[1024];
    found_with("FAKE_CUDA_DEVICES=3", text, sizeof text);
    assert_string_equal(text, "3 devices, stand-in 0, 9.0; capture mode 0");
}

static void the_reason_for_no_driver_is_named(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    char text[1024];
    found_with("-u LD_LIBRARY_PATH", text, sizeof text);
    /* A machine may have a driver of its own. */
    if (!strstr(text, " devices, "))
        assert_non_null(strstr(text, "KVF_E_UNSUPPORTED: there is no CUDA here: libcuda.so.1"));
    found_with("FAKE_CUDA_DEVICES=0", text, sizeof text);
    assert_string_equal(text, "KVF_E_UNSUPPORTED: there is no CUDA here: the driver knows no device");
    found_with("FAKE_CUDA_VERSION=11080", text, sizeof text);
    assert_string_equal(
        text, "KVF_E_UNSUPPORTED: there is no CUDA here: the driver is for CUDA 11.8; allowed: 12.0 "
              "and later");
}

static void a_device_that_is_not_there_is_refused(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    const kvf_cuda *cuda;
    assert_int_equal(kvf_cuda_enter(2, &cuda), KVF_E_RANGE);
    assert_string_equal(kvf_error_detail(), "CUDA device 2; this process sees 2, numbered from 0");
}

static void a_child_of_fork_is_told_that_it_is_one(void **unused) {
    (void)unused;
    const kvf_cuda *cuda;
    assert_int_equal(kvf_cuda_find(&cuda), KVF_OK);
    const pid_t child = fork();
    if (child == 0) {
        const bool refused =
            kvf_cuda_find(&cuda) == KVF_E_UNSUPPORTED &&
            strcmp(kvf_error_detail(), "this process was forked from one that uses CUDA") == 0;
        _exit(refused ? 0 : 1);
    }
    int how = -1;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_int_equal(how, 0);
}

/* ---- pages of two caches --------------------------------------------------------------- */

enum { HEADS = 4, CELL = 96, ROWS = 16, BLOCKS = 9, TOKENS = 70, PAGE = ROWS * HEADS * CELL };
static const uint32_t ids[] = {7, 2, 8, 0, 5};

/* A cache with pages in one of two orders: heads first, or tokens first. */
typedef struct test_cache {
    CUdeviceptr memory;
    bool heads_first;
} test_cache;

typedef struct test_scene {
    const kvf_cuda *cuda;
    kvf_copier *copier;
    test_cache one, other; /* `one` is filled at random, `other` is empty */
    CUdeviceptr arena;
    unsigned char *pinned;
    uint64_t pinned_at; /* the device's address */
    kvf_device_table table;
    size_t left;
} test_scene;

static test_scene open_scene(const kvf_copier_options *options) {
    test_scene made = {.left = devices_left()};
    assert_int_equal(kvf_cuda_enter(devices_number(1), &made.cuda), KVF_OK);
    assert_int_equal(kvf_copier_open(devices_number(1), options, &made.copier), KVF_OK);
    made.one = (test_cache){device_room(1, BLOCKS * PAGE), true};
    made.other = (test_cache){device_room(1, BLOCKS * PAGE), false};
    made.arena = device_room(1, TOKENS * HEADS * CELL);
    made.pinned = aligned_alloc(4096, 65536);
    assert_non_null(made.pinned);
    memset(made.pinned, 0, 65536);
    assert_int_equal(kvf_copier_pin(made.copier, made.pinned, 65536, &made.pinned_at), KVF_OK);
    unsigned char *bytes = devices_look(made.one.memory);
    for (size_t i = 0; i < (size_t)BLOCKS * PAGE; i++)
        bytes[i] = (unsigned char)(i * 2654435761u >> 13);
    devices_put(bytes);
    assert_int_equal(kvf_copier_put_table(made.copier, ids, 5, &made.table), KVF_OK);
    return made;
}

static void close_scene(test_scene *scene) {
    kvf_copier_drop_table(scene->copier, &scene->table);
    kvf_copier_unpin(scene->copier, scene->pinned);
    free(scene->pinned);
    device_room_free(scene->one.memory);
    device_room_free(scene->other.memory);
    device_room_free(scene->arena);
    assert_int_equal(kvf_copier_close(scene->copier), KVF_OK);
    assert_int_equal(devices_left(), scene->left);
    kvf_cuda_leave(scene->cuda);
}

static kvf_box pages_of(test_cache cache) {
    return (kvf_box){.memory = (unsigned char *)(uintptr_t)cache.memory,
                     .block_stride = PAGE,
                     .row_stride = cache.heads_first ? CELL : HEADS * CELL,
                     .unit_stride = cache.heads_first ? ROWS * CELL : CELL,
                     .blocks = ids,
                     .kernel_blocks = 1,
                     .block_rows = ROWS,
                     .first_row = 3,
                     .rows = TOKENS,
                     .units = HEADS,
                     .pieces = 1,
                     .piece_bytes = CELL};
}

static const unsigned char *cell_of(test_cache cache, uint32_t token, uint32_t head) {
    const uint32_t at = token + 3, block = ids[at / ROWS], row = at % ROWS;
    const unsigned char *bytes = devices_look(cache.memory);
    return bytes + (size_t)block * PAGE +
           (size_t)(cache.heads_first ? head * ROWS + row : row * HEADS + head) * CELL;
}

static kvf_device_side side_of_pages(const test_scene *scene, const kvf_box *box) {
    return (kvf_device_side){.pages = box, .table = scene->table.address, .table_on_host = ids};
}

static kvf_copy_job *begin(const test_scene *scene, const kvf_device_side *from, const kvf_device_side *to) {
    kvf_copy_job *job;
    assert_int_equal(kvf_copier_begin(scene->copier, &job), KVF_OK);
    assert_int_equal(kvf_copy_job_add(job, from, to, TOKENS, HEADS, CELL), KVF_OK);
    return job;
}

static void finish(kvf_copy_job *job) {
    kvf_status status;
    while ((status = kvf_copy_job_poll(job)) == KVF_IN_PROGRESS)
        (void)usleep(100);
    assert_int_equal(status, KVF_OK);
}

static void assert_same_cells(const test_scene *scene) {
    devices_get(devices_look(scene->one.memory));
    devices_get(devices_look(scene->other.memory));
    for (uint32_t token = 0; token < TOKENS; token++)
        for (uint32_t head = 0; head < HEADS; head++)
            assert_memory_equal(cell_of(scene->other, token, head), cell_of(scene->one, token, head), CELL);
}

/* ---- copying ------------------------------------------------------------------------------------ */

static void move_through(const test_scene *scene, uint64_t arena) {
    const kvf_box one = pages_of(scene->one), other = pages_of(scene->other);
    const kvf_device_side holder = side_of_pages(scene, &one), reader = side_of_pages(scene, &other);
    const kvf_device_side packed = {.packed = arena};
    kvf_copy_job *gather = begin(scene, &holder, &packed), *scatter = begin(scene, &packed, &reader);
    assert_int_equal(kvf_copy_job_start(gather, NULL), KVF_OK);
    assert_int_equal(kvf_copy_job_start(scatter, NULL),
                     KVF_OK); /* runs behind the first job; the host does not wait between them */
    finish(scatter);
    finish(gather);
    assert_same_cells(scene);
}

static void cells_go_through_an_arena_of_the_device(void **unused) {
    (void)unused;
    test_scene scene = open_scene(NULL);
    move_through(&scene, scene.arena);
    close_scene(&scene);
}

static void cells_go_through_pinned_memory_of_the_host(void **unused) {
    (void)unused;
    test_scene scene = open_scene(NULL);
    move_through(&scene, scene.pinned_at);
    for (uint32_t token = 0; token < TOKENS; token++)
        for (uint32_t head = 0; head < HEADS; head++)
            assert_memory_equal(scene.pinned + (token * HEADS + head) * CELL, cell_of(scene.one, token, head),
                                CELL);
    close_scene(&scene);
}

static void pages_are_copied_into_another_order_at_once(void **unused) {
    (void)unused;
    test_scene scene = open_scene(NULL);
    const kvf_box one = pages_of(scene.one), other = pages_of(scene.other);
    const kvf_device_side from = side_of_pages(&scene, &one), to = side_of_pages(&scene, &other);
    kvf_copy_job *job = begin(&scene, &from, &to);
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    finish(job);
    assert_same_cells(&scene);
    close_scene(&scene);
}

static void a_job_that_is_late_is_in_progress_and_its_boxes_stay(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    test_scene scene = open_scene(&(kvf_copier_options){.jobs = 2});
    const kvf_box one = pages_of(scene.one), other = pages_of(scene.other);
    const kvf_device_side from = side_of_pages(&scene, &one), to = side_of_pages(&scene, &other);
    const kvf_device_side packed = {.packed = scene.arena};
    kvf_copy_job *jobs[3];
    devices_delay(20 * MS);
    jobs[0] = begin(&scene, &from, &to);
    assert_int_equal(kvf_copy_job_start(jobs[0], NULL), KVF_OK);
    assert_int_equal(kvf_copy_job_poll(jobs[0]), KVF_IN_PROGRESS);
    jobs[1] = begin(&scene, &to, &packed);
    assert_int_equal(kvf_copy_job_start(jobs[1], NULL), KVF_OK);
    assert_int_equal(kvf_copier_begin(scene.copier, &jobs[2]), KVF_E_AGAIN);
    assert_int_equal(kvf_copier_close(scene.copier), KVF_E_AGAIN);
    finish(jobs[0]);
    devices_delay(0);
    /* There is room for a job again, and filling it harms no job that is still to run. */
    jobs[2] = begin(&scene, &packed, &from);
    kvf_copy_job_drop(jobs[2]);
    finish(jobs[1]);
    assert_same_cells(&scene);
    close_scene(&scene);
}

/* A driver may wait for the stream before it copies from memory of the host that is not pinned, as the caller's is. */
static void bringing_a_table_does_not_wait_for_the_jobs_before(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    test_scene scene = open_scene(NULL);
    const kvf_box one = pages_of(scene.one), other = pages_of(scene.other);
    const kvf_device_side from = side_of_pages(&scene, &one), to = side_of_pages(&scene, &other);
    kvf_device_table table;
    devices_strict(true);
    devices_delay(300 * MS);
    kvf_copy_job *job = begin(&scene, &from, &to);
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    assert_int_equal(kvf_copier_put_table(scene.copier, ids, 5, &table), KVF_OK);
    assert_int_equal(kvf_copy_job_poll(job), KVF_IN_PROGRESS);
    devices_delay(0);
    devices_strict(false);
    kvf_copier_drop_table(scene.copier, &table);
    finish(job);
    assert_same_cells(&scene);
    close_scene(&scene);
}

/* Nor for the work of the engine. */
static void the_first_table_does_not_wait_for_the_engine(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    test_scene scene = open_scene(NULL);
    const kvf_cuda *cuda;
    kvf_device_table table;
    uint64_t address;
    CUstream engine;
    CUevent over;
    kvf_copier_drop_table(scene.copier, &scene.table);
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    assert_int_equal(cuda->cuStreamCreateWithPriority(&engine, CU_STREAM_NON_BLOCKING, 0), 0);
    assert_int_equal(cuda->cuEventCreate(&over, 0), 0);
    assert_int_equal(cuda->cuStreamSynchronize(engine), 0);
    devices_strict(true);
    devices_delay(300 * MS);
    assert_int_equal(cuda->cuEventRecord(over, engine), 0);
    devices_delay(0);
    kvf_cuda_leave(cuda);
    assert_int_equal(kvf_copier_put_table(scene.copier, ids, 5, &table), KVF_OK);
    assert_int_equal(kvf_copier_room(scene.copier, KVF_COPIER_ROOM_BYTES, &address), KVF_OK);
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    assert_int_equal(cuda->cuEventQuery(over), CUDA_ERROR_NOT_READY);
    devices_strict(false);
    devices_hasten();
    kvf_copier_drop_table(scene.copier, &table);
    kvf_copier_drop_room(scene.copier, address);
    assert_int_equal(cuda->cuEventDestroy_v2(over), 0);
    assert_int_equal(cuda->cuStreamDestroy_v2(engine), 0);
    kvf_cuda_leave(cuda);
    close_scene(&scene);
}

/* The next table lies at the same place, and is brought there in the order of the stream. */
static void a_table_that_is_dropped_stays_until_the_jobs_before_have_read_it(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    const uint32_t others[] = {1, 1, 1, 1, 1};
    test_scene scene = open_scene(NULL);
    const kvf_box one = pages_of(scene.one), other = pages_of(scene.other);
    const kvf_device_side from = side_of_pages(&scene, &one), to = side_of_pages(&scene, &other);
    kvf_device_table next;
    devices_delay(20 * MS);
    kvf_copy_job *job = begin(&scene, &from, &to);
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    devices_strict(true); /* a call that waits for the device would see the job end */
    kvf_copier_drop_table(scene.copier, &scene.table);
    assert_int_equal(kvf_copier_put_table(scene.copier, others, 5, &next), KVF_OK);
    assert_int_equal(next.address, from.table);
    assert_int_equal(kvf_copy_job_poll(job), KVF_IN_PROGRESS);
    devices_strict(false);
    devices_delay(0);
    finish(job);
    assert_same_cells(&scene);
    kvf_copier_drop_table(scene.copier, &next);
    close_scene(&scene);
}

enum { MOST_ROOMS = 200 };

/* Takes rooms of 256 KiB until the copier has to get one from the driver; returns how many there are. */
static uint32_t take_all_room(const test_scene *scene, uint64_t rooms[MOST_ROOMS]) {
    const size_t left = devices_left();
    uint32_t count = 0;
    while (devices_left() == left) {
        assert_true(count < MOST_ROOMS);
        assert_int_equal(kvf_copier_room(scene->copier, 256u << 10, &rooms[count++]), KVF_OK);
    }
    return count;
}

static void give_all_room(const test_scene *scene, const uint64_t *rooms, uint32_t count) {
    while (count > 0)
        kvf_copier_drop_room(scene->copier, rooms[--count]);
}

static void what_the_room_does_not_hold_comes_from_the_driver_and_goes_back(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    uint64_t rooms[MOST_ROOMS];
    test_scene scene = open_scene(NULL);
    const size_t left = devices_left();
    for (int i = 0; i < 2; i++) {
        const uint32_t count = take_all_room(&scene, rooms);
        assert_int_equal(count, 128); /* of which the scene's table takes some bytes */
        move_through(&scene, rooms[count - 1]);
        give_all_room(&scene, rooms, count);
        assert_int_equal(devices_left(), left);
    }
    close_scene(&scene);
}

enum { LARGE_TABLES = 6, LARGE_IDS = 40000 }; /* up to 160 kB each */

/* Puts tables while nothing that was put on the stream is done, and compares them when all of it is. */
static void bring_large_tables(const test_scene *scene, uint32_t given[LARGE_TABLES][LARGE_IDS]) {
    kvf_device_table tables[LARGE_TABLES];
    devices_delay(1000000 * MS);
    for (uint32_t i = 0; i < LARGE_TABLES; i++) {
        for (uint32_t at = 0; at < LARGE_IDS; at++)
            given[i][at] = (i + 1) * 1000000 + at;
        assert_int_equal(kvf_copier_put_table(scene->copier, given[i], LARGE_IDS / (i % 3 + 1), &tables[i]),
                         KVF_OK);
    }
    devices_delay(0);
    devices_hasten();
    for (uint32_t i = 0; i < LARGE_TABLES; i++) {
        assert_memory_equal(devices_look(tables[i].address), given[i],
                            LARGE_IDS / (i % 3 + 1) * sizeof **given);
        kvf_copier_drop_table(scene->copier, &tables[i]);
    }
    devices_hasten();
}

static void tables_that_are_brought_at_once_do_not_mix_and_leave_their_room_to_later_ones(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    static uint32_t given[LARGE_TABLES][LARGE_IDS];
    test_scene scene = open_scene(NULL);
    bring_large_tables(&scene, given);
    const size_t left = devices_left();
    for (int i = 0; i < 3; i++)
        bring_large_tables(&scene, given);
    assert_int_equal(devices_left(), left);
    close_scene(&scene);
}

static void a_table_for_which_there_is_no_memory_is_not_brought(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    static const char *const functions[] = {"cuMemAlloc_v2", "cuEventCreate", "cuMemHostAlloc",
                                            "cuMemcpyHtoDAsync_v2", "cuEventRecord"};
    static uint32_t given[3 * LARGE_IDS]; /* more than there is pinned memory for */
    test_scene scene = open_scene(NULL);
    uint64_t rooms[MOST_ROOMS];
    const uint32_t room_count = take_all_room(&scene, rooms);
    kvf_device_table table;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        devices_fail(functions[i], CUDA_ERROR_OUT_OF_MEMORY, 1);
        assert_int_equal(kvf_copier_put_table(scene.copier, given, 3 * LARGE_IDS, &table), KVF_E_NOMEM);
    }
    assert_int_equal(kvf_copier_put_table(scene.copier, given, 3 * LARGE_IDS, &table), KVF_OK);
    kvf_copier_drop_table(scene.copier, &table);
    give_all_room(&scene, rooms, room_count);
    close_scene(&scene);
}

/* On a thread, because under compute-sanitizer starting a job may last until its kernel has run. */
static void *hasten_later(void *unused) {
    (void)unused;
    (void)usleep(20000);
    devices_hasten();
    return NULL;
}

static void a_job_waits_for_an_event_of_the_engines(void **unused) {
    (void)unused;
    test_scene scene = open_scene(NULL);
    const kvf_box one = pages_of(scene.one), other = pages_of(scene.other);
    const kvf_device_side from = side_of_pages(&scene, &one), to = side_of_pages(&scene, &other);
    CUstream engine;
    CUevent ready;
    assert_int_equal(scene.cuda->cuStreamCreateWithPriority(&engine, CU_STREAM_NON_BLOCKING, 0), 0);
    assert_int_equal(scene.cuda->cuEventCreate(&ready, CU_EVENT_DISABLE_TIMING), 0);
    /* A driver that sets memory for the first time may load a kernel, and wait for a stream that is held up. */
    assert_int_equal(scene.cuda->cuMemsetD8Async(scene.other.memory, 0, BLOCKS * PAGE, engine), 0);
    assert_int_equal(scene.cuda->cuStreamSynchronize(engine), 0);
    /* The engine writes its pages after the job is started: a job that did not wait would copy old bytes. */
    devices_hold_up(scene.cuda, engine);
    assert_int_equal(scene.cuda->cuMemsetD8Async(scene.one.memory, 0x5a, BLOCKS * PAGE, engine), 0);
    assert_int_equal(scene.cuda->cuEventRecord(ready, engine), 0);
    devices_delay(0);
    pthread_t later;
    assert_int_equal(pthread_create(&later, NULL, hasten_later, NULL), 0);
    kvf_copy_job *job = begin(&scene, &from, &to);
    assert_int_equal(kvf_copy_job_start(job, ready), KVF_OK);
    finish(job);
    assert_int_equal(pthread_join(later, NULL), 0);
    assert_same_cells(&scene);
    assert_int_equal(*cell_of(scene.other, 5, 1), 0x5a);
    assert_int_equal(scene.cuda->cuEventDestroy_v2(ready), 0);
    assert_int_equal(scene.cuda->cuStreamDestroy_v2(engine), 0);
    close_scene(&scene);
}

/* A driver has a few queues for the streams of one priority: eight of these would hold up everything that is put on the
 * copier's stream. */
static void many_events_of_the_engine_that_are_late_hold_up_no_copy(void **unused) {
    enum { QUEUES = 8, LOOKS = 1000 };
    (void)unused;
    DEVICES_ARE_STAND_INS();
    assert_int_equal(setenv("FAKE_CUDA_QUEUES", "8", 1), 0);
    test_scene scene = open_scene(NULL);
    const kvf_box one = pages_of(scene.one);
    const kvf_device_side from = side_of_pages(&scene, &one), to = {.packed = scene.arena};
    kvf_cuda_moment *moments[QUEUES];
    CUstream engine;
    CUevent late;
    assert_int_equal(scene.cuda->cuStreamCreateWithPriority(&engine, CU_STREAM_NON_BLOCKING, -1), 0);
    assert_int_equal(scene.cuda->cuEventCreate(&late, CU_EVENT_DISABLE_TIMING), 0);
    devices_delay(1000000 * MS);
    assert_int_equal(scene.cuda->cuEventRecord(late, engine), 0);
    devices_delay(0);
    for (int i = 0; i < QUEUES; i++)
        assert_int_equal(kvf_cuda_moment_take(devices_number(1), late, &moments[i]), KVF_OK);
    kvf_copy_job *job = begin(&scene, &from, &to);
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    kvf_status status = KVF_IN_PROGRESS;
    for (int i = 0; i < LOOKS && (status = kvf_copy_job_poll(job)) == KVF_IN_PROGRESS; i++)
        (void)usleep(100);
    assert_int_equal(status, KVF_OK);
    for (int i = 0; i < QUEUES; i++)
        assert_int_equal(kvf_cuda_moment_status(moments[i]), KVF_IN_PROGRESS);
    devices_hasten();
    for (int i = 0; i < QUEUES; i++) {
        assert_int_equal(kvf_cuda_moment_status(moments[i]), KVF_OK);
        kvf_cuda_moment_drop(moments[i]);
    }
    assert_int_equal(scene.cuda->cuEventDestroy_v2(late), 0);
    assert_int_equal(scene.cuda->cuStreamDestroy_v2(engine), 0);
    close_scene(&scene);
    assert_int_equal(unsetenv("FAKE_CUDA_QUEUES"), 0);
}

static void more_boxes_than_a_job_has_room_for_are_refused(void **unused) {
    (void)unused;
    test_scene scene = open_scene(&(kvf_copier_options){.boxes = 1});
    const kvf_box one = pages_of(scene.one), other = pages_of(scene.other);
    const kvf_device_side from = side_of_pages(&scene, &one), to = side_of_pages(&scene, &other);
    kvf_copy_job *job = begin(&scene, &from, &to);
    assert_int_equal(kvf_copy_job_add(job, &from, &to, TOKENS, HEADS, CELL), KVF_E_LIMIT);
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    finish(job);
    assert_same_cells(&scene);
    close_scene(&scene);
}

/* A side of pages, whose table is the job's own. */
static kvf_device_side side_with_own_table(kvf_copy_job *job, kvf_box *box) {
    uint64_t address;
    uint32_t *table = kvf_copy_job_table(job, 5, &address);
    assert_non_null(table);
    memcpy(table, ids, sizeof ids);
    box->blocks = table;
    return (kvf_device_side){.pages = box, .table = address, .table_on_host = table};
}

static void add_by_own_tables(const test_scene *scene, kvf_copy_job *job) {
    kvf_box one = pages_of(scene->one), other = pages_of(scene->other);
    uint64_t address;
    *kvf_copy_job_table(job, 1, &address) = 0; /* the pages' tables are not the first in the job */
    const kvf_device_side from = side_with_own_table(job, &one), to = side_with_own_table(job, &other);
    assert_int_equal(kvf_copy_job_add(job, &from, &to, TOKENS, HEADS, CELL), KVF_OK);
}

static void pages_are_found_by_tables_of_the_job(void **unused) {
    (void)unused;
    test_scene scene = open_scene(&(kvf_copier_options){.jobs = 2, .ids = 11});
    unsigned char *cells = devices_look(scene.other.memory);
    for (int i = 0; i < 3; i++) { /* a job that is over has left its room */
        kvf_copy_job *job, *other;
        uint64_t address;
        memset(cells, 0, BLOCKS * PAGE);
        devices_put(cells);
        assert_int_equal(kvf_copier_begin(scene.copier, &job), KVF_OK);
        assert_int_equal(kvf_copier_begin(scene.copier, &other), KVF_OK);
        add_by_own_tables(&scene, job);
        uint32_t *unlike = kvf_copy_job_table(other, 11, &address);
        assert_non_null(unlike);
        memset(unlike, 0xff, 11 * sizeof *unlike);
        assert_int_equal(kvf_copy_job_start(other, NULL), KVF_OK);
        assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
        finish(other);
        finish(job);
        assert_same_cells(&scene);
    }
    close_scene(&scene);
}

/* Boxes of 256 bytes: a GiB, of which the stand-in gives a little less at once, with room for conversions. */
static void a_plain_copier_copies_by_tables_of_its_jobs_and_keeps_no_other_room(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    kvf_copier_options options = {.jobs = 2, .boxes = 1u << 20, .ids = 11};
    kvf_copier *copier = NULL;
    kvf_copy_job *job;
    uint64_t address;
    assert_int_equal(kvf_copier_open(0, &options, &copier), KVF_E_NOMEM);
    options.plain = true;
    test_scene scene = open_scene(&options);
    assert_int_equal(kvf_copier_begin(scene.copier, &job), KVF_OK);
    add_by_own_tables(&scene, job);
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    finish(job);
    assert_same_cells(&scene);
    const size_t left = devices_left();
    assert_int_equal(kvf_copier_room(scene.copier, 1, &address), KVF_OK);
    assert_int_equal(devices_left(), left + 1);
    kvf_copier_drop_room(scene.copier, address);
    close_scene(&scene);
}

static void a_job_has_room_for_as_many_ids_as_were_asked_for(void **unused) {
    (void)unused;
    uint64_t address;
    kvf_copy_job *job;
    test_scene scene = open_scene(&(kvf_copier_options){.ids = 10});
    assert_int_equal(kvf_copier_begin(scene.copier, &job), KVF_OK);
    assert_null(kvf_copy_job_table(job, 11, &address));
    assert_null(kvf_copy_job_table(job, UINT64_MAX, &address));
    assert_non_null(kvf_copy_job_table(job, 4, &address));
    assert_null(kvf_copy_job_table(job, 7, &address));
    assert_non_null(kvf_copy_job_table(job, 6, &address));
    assert_null(kvf_copy_job_table(job, 1, &address));
    kvf_copy_job_drop(job);
    close_scene(&scene);
    scene = open_scene(NULL); /* none */
    assert_int_equal(kvf_copier_begin(scene.copier, &job), KVF_OK);
    assert_null(kvf_copy_job_table(job, 1, &address));
    kvf_copy_job_drop(job);
    close_scene(&scene);
}

/* ---- failures ----------------------------------------------------------------------------------- */

static void an_engine_that_cannot_be_made_leaves_nothing(void **unused) {
    (void)unused;
    static const char *const functions[] = {
        "cuModuleLoadData", "cuModuleGetFunction", "cuStreamCreateWithPriority",
        "cuMemHostAlloc",   "cuMemAlloc_v2",       "cuEventCreate"};
    const kvf_cuda *cuda;
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    const size_t before = devices_left();
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        kvf_copier *copier = NULL;
        devices_fail(functions[i], CUDA_ERROR_OUT_OF_MEMORY, 1);
        assert_int_equal(kvf_copier_open(0, NULL, &copier), KVF_E_NOMEM);
        assert_null(copier);
        assert_non_null(strstr(kvf_error_detail(), "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"));
        assert_int_equal(devices_left(), before);
    }
    kvf_cuda_leave(cuda);
}

static void device_code_that_the_driver_does_not_take_is_unsupported(void **unused) {
    (void)unused;
    static const int refusals[] = {CUDA_ERROR_INVALID_IMAGE,
                                   CUDA_ERROR_NO_BINARY_FOR_GPU,
                                   CUDA_ERROR_INVALID_PTX,
                                   CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
                                   CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
                                   CUDA_ERROR_JIT_COMPILATION_DISABLED};
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        kvf_copier *copier = NULL;
        devices_fail("cuModuleLoadData", refusals[i], 1);
        assert_int_equal(kvf_copier_open(0, NULL, &copier), KVF_E_UNSUPPORTED);
        assert_null(copier);
        assert_non_null(strstr(kvf_error_detail(), "loading device code: "));
    }
}

static void a_place_that_is_nowhere_ends_the_job_with_a_sentence(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    test_scene scene = open_scene(NULL);
    const kvf_box one = pages_of(scene.one);
    const kvf_device_side from = side_of_pages(&scene, &one), nowhere = {.packed = 4096};
    kvf_copy_job *job = begin(&scene, &from, &nowhere);
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    kvf_status status;
    while ((status = kvf_copy_job_poll(job)) == KVF_IN_PROGRESS)
        (void)usleep(100);
    assert_int_equal(status, KVF_E_IO);
    assert_string_equal(kvf_error_detail(), "CUDA device 1: copying: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal "
                                            "memory access was encountered); this process "
                                            "cannot use the device any more");
    devices_stick(0);
    close_scene(&scene);
}

/* The control for all tests over the stand-in: as a device does, it refuses kernels what is not aligned, and all that
 * lies behind an allocation. */
static void a_table_that_kernels_may_not_read_ends_the_job(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    static const struct {
        uint64_t beside;
        const char *why;
    } cases[] = {{2, "CUDA device 1: copying: CUDA_ERROR_MISALIGNED_ADDRESS (misaligned address); "},
                 {4, "CUDA device 1: copying: CUDA_ERROR_ILLEGAL_ADDRESS ("}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_scene scene = open_scene(NULL);
        const kvf_box one = pages_of(scene.one);
        kvf_device_side from = side_of_pages(&scene, &one);
        const kvf_device_side to = {.packed = scene.arena};
        const CUdeviceptr table = device_room(1, sizeof ids);
        from.table = table + cases[i].beside;
        kvf_copy_job *job = begin(&scene, &from, &to);
        assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
        kvf_status status;
        while ((status = kvf_copy_job_poll(job)) == KVF_IN_PROGRESS)
            (void)usleep(100);
        assert_int_equal(status, KVF_E_IO);
        if (strncmp(kvf_error_detail(), cases[i].why, strlen(cases[i].why)) != 0)
            fail_msg("%s", kvf_error_detail());
        devices_stick(0);
        device_room_free(table);
        close_scene(&scene);
    }
}

/* The work that the driver has accepted uses memory and the boxes until it has ended. */
static void a_job_that_is_taken_in_part_fails_when_that_part_is_over(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    test_scene scene = open_scene(&(kvf_copier_options){.jobs = 1});
    const kvf_box one = pages_of(scene.one);
    const kvf_device_side from = side_of_pages(&scene, &one), to = {.packed = scene.arena};
    kvf_copy_job *job = begin(&scene, &from, &to), *other = NULL;
    devices_fail("cuMemcpyHtoDAsync_v2", CUDA_ERROR_OUT_OF_MEMORY, 1); /* the driver accepts nothing */
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_E_NOMEM);
    job = begin(&scene, &from, &to);
    devices_delay(1000000 * MS);
    devices_fail("cuLaunchKernel", CUDA_ERROR_OUT_OF_MEMORY,
                 1); /* the copy of its boxes is already under way */
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    devices_delay(0);
    assert_int_equal(kvf_copy_job_poll(job), KVF_IN_PROGRESS);
    assert_int_equal(kvf_copier_begin(scene.copier, &other), KVF_E_AGAIN);
    devices_hasten();
    assert_int_equal(kvf_copy_job_poll(job), KVF_E_NOMEM);
    assert_string_equal(kvf_error_detail(),
                        "CUDA device 1: starting a copy: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
    job = begin(&scene, &from, &to);
    devices_fail("cuEventRecord", CUDA_ERROR_OUT_OF_MEMORY, 1); /* the library waits for the work */
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_E_NOMEM);
    job = begin(&scene, &from, &to);
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    finish(job);
    close_scene(&scene);
}

/* As while a graph is captured, or if the host has no memory: what the driver says then is not about the job. */
static const struct refusal {
    const char *function;
    int result;
    unsigned times;
} refusals[] = {{"cuEventQuery", 900, 3},
                {"cuEventQuery", 906, 3},
                {"cuEventQuery", CUDA_ERROR_OUT_OF_MEMORY, 3},
                {"cuEventQuery", CUDA_ERROR_UNKNOWN, 1}, /* twice may be the end */
                {"cuCtxPushCurrent_v2", CUDA_ERROR_INVALID_CONTEXT, 3},
                {"cuCtxPushCurrent_v2", 900, 3}};

static void a_job_of_which_the_driver_says_nothing_is_in_progress(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    test_scene scene = open_scene(&(kvf_copier_options){.jobs = 1});
    const kvf_box one = pages_of(scene.one);
    const kvf_device_side from = side_of_pages(&scene, &one), to = {.packed = scene.arena};
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        kvf_copy_job *job = begin(&scene, &from, &to), *other = NULL;
        devices_delay(1000000 * MS);
        assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
        devices_delay(0);
        devices_fail(refusals[i].function, refusals[i].result, refusals[i].times);
        for (int poll = 0; poll < 3; poll++)
            assert_int_equal(kvf_copy_job_poll(job), KVF_IN_PROGRESS);
        assert_int_equal(kvf_copier_begin(scene.copier, &other), KVF_E_AGAIN);
        assert_int_equal(kvf_copier_close(scene.copier), KVF_E_AGAIN);
        devices_hasten();
        finish(job);
    }
    close_scene(&scene);
}

static void a_moment_of_which_the_driver_says_nothing_is_still_to_come(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    test_scene scene = open_scene(NULL);
    kvf_cuda_moment *moment;
    CUevent event;
    assert_int_equal(scene.cuda->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), 0);
    assert_int_equal(kvf_cuda_moment_take(devices_number(1), event, &moment), KVF_OK);
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        devices_fail(refusals[i].function, refusals[i].result, 1);
        const kvf_status status = kvf_cuda_moment_status(moment);
        /* If only entering the context failed, kvf_cuda_over() asks the driver all the same. */
        assert_int_equal(status,
                         strcmp(refusals[i].function, "cuEventQuery") == 0 ? KVF_IN_PROGRESS : KVF_OK);
        assert_int_equal(kvf_cuda_moment_status(moment), KVF_OK);
    }
    kvf_cuda_moment_drop(moment);
    assert_int_equal(scene.cuda->cuEventDestroy_v2(event), 0);
    close_scene(&scene);
}

/* After some failures of the device or the driver nothing of this process runs there any more. */
static void a_job_ends_with_its_device(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    static const int ends[] = {CUDA_ERROR_DEINITIALIZED,         CUDA_ERROR_ECC_UNCORRECTABLE,
                               CUDA_ERROR_NVLINK_UNCORRECTABLE,  CUDA_ERROR_CONTAINED,
                               CUDA_ERROR_LAUNCH_TIMEOUT,        CUDA_ERROR_TENSOR_MEMORY_LEAK,
                               CUDA_ERROR_MPS_CLIENT_TERMINATED, CUDA_ERROR_EXTERNAL_DEVICE};
    test_scene scene = open_scene(&(kvf_copier_options){.jobs = 1});
    const kvf_box one = pages_of(scene.one);
    const kvf_device_side from = side_of_pages(&scene, &one), to = {.packed = scene.arena};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        kvf_copy_job *job = begin(&scene, &from, &to);
        assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
        devices_fail("cuEventQuery", ends[i], 1);
        assert_int_equal(kvf_copy_job_poll(job), KVF_E_IO);
    }
    kvf_copy_job *lost = begin(&scene, &from, &to);
    assert_int_equal(kvf_copy_job_start(lost, NULL), KVF_OK);
    assert_false(kvf_cuda_is_lost(devices_number(1)));
    devices_stick(CUDA_ERROR_UNKNOWN); /* the device is not on its bus any more */
    assert_int_equal(kvf_copy_job_poll(lost), KVF_E_IO);
    assert_true(kvf_cuda_is_lost(devices_number(1)));
    devices_stick(0);
    kvf_copy_job *next = begin(&scene, &from, &to);
    assert_int_equal(kvf_copy_job_start(next, NULL), KVF_OK);
    finish(next);
    close_scene(&scene);
}

/* Nothing that they need is loaded, or made room for, when the first are computed. Must be their first test. */
static void the_first_checksums_do_not_wait_for_the_engine(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    const uint32_t id = 0;
    const uint64_t *sums;
    const kvf_cuda *cuda;
    CUstream engine;
    CUevent over;
    kvf_hasher *hasher = NULL;
    kvf_status status;
    assert_int_equal(kvf_hasher_open(0, &hasher), KVF_OK);
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    assert_int_equal(cuda->cuStreamCreateWithPriority(&engine, CU_STREAM_NON_BLOCKING, 0), 0);
    assert_int_equal(cuda->cuEventCreate(&over, CU_EVENT_DISABLE_TIMING), 0);
    devices_strict(true);
    devices_delay(300 * MS);
    assert_int_equal(cuda->cuEventRecord(over, engine), 0);
    devices_delay(0);
    kvf_hasher_begin(hasher, &id, 1, 1);
    assert_int_equal(kvf_hasher_start(hasher), KVF_OK);
    while ((status = kvf_hasher_poll(hasher, &sums)) == KVF_IN_PROGRESS)
        (void)usleep(100);
    assert_int_equal(status, KVF_OK);
    assert_int_equal(sums[0], 0);
    assert_int_equal(cuda->cuEventQuery(over), CUDA_ERROR_NOT_READY);
    devices_strict(false);
    devices_hasten();
    assert_int_equal(cuda->cuEventDestroy_v2(over), 0);
    assert_int_equal(cuda->cuStreamDestroy_v2(engine), 0);
    kvf_cuda_leave(cuda);
    assert_int_equal(kvf_hasher_close(hasher), KVF_OK);
}

static void checksums_of_which_the_driver_says_nothing_are_in_progress(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    const uint64_t *sums;
    const uint32_t id = 0;
    const size_t left = devices_left();
    kvf_hasher *hasher = NULL;
    assert_int_equal(kvf_hasher_open(0, &hasher), KVF_OK);
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        kvf_hasher_begin(hasher, &id, 1, 1);
        devices_delay(1000000 * MS);
        assert_int_equal(kvf_hasher_start(hasher), KVF_OK);
        devices_delay(0);
        devices_fail(refusals[i].function, refusals[i].result, 1);
        assert_int_equal(kvf_hasher_poll(hasher, &sums), KVF_IN_PROGRESS);
        assert_int_equal(kvf_hasher_close(hasher), KVF_E_AGAIN);
        devices_hasten();
        assert_int_equal(kvf_hasher_poll(hasher, &sums), KVF_OK);
    }
    assert_int_equal(kvf_hasher_close(hasher), KVF_OK);
    assert_int_equal(devices_left(), left);
}

/* The device's context has ended, and the job with it. */
static void a_job_of_a_context_that_cannot_be_entered_any_more_is_over(void **unused) {
    enum { ILLEGAL_ADDRESS = 700 };
    (void)unused;
    DEVICES_ARE_STAND_INS();
    test_scene scene = open_scene(&(kvf_copier_options){.jobs = 1});
    const kvf_box one = pages_of(scene.one);
    const kvf_device_side from = side_of_pages(&scene, &one), to = {.packed = scene.arena};
    kvf_copy_job *job = begin(&scene, &from, &to);
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    devices_fail("cuCtxPushCurrent_v2", ILLEGAL_ADDRESS, 1);
    devices_stick(ILLEGAL_ADDRESS);
    assert_int_equal(kvf_copy_job_poll(job), KVF_E_IO);
    devices_stick(0);
    job = begin(&scene, &from, &to);
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    finish(job);
    close_scene(&scene);
}

static void memory_is_pinned_once(void **unused) {
    (void)unused;
    test_scene scene = open_scene(NULL);
    uint64_t again = 0;
    assert_int_equal(kvf_copier_pin(scene.copier, scene.pinned, 65536, &again), KVF_E_EXISTS);
    assert_int_equal(again, scene.pinned_at);
    close_scene(&scene);
}

static void pinned_memory_that_devices_find_nowhere_is_unsupported_and_not_pinned(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    test_scene scene = open_scene(NULL);
    unsigned char *more = aligned_alloc(4096, 4096);
    uint64_t address;
    assert_non_null(more);
    const size_t left = devices_left();
    assert_int_equal(setenv("FAKE_CUDA_ALIASED", "1", 1), 0);
    devices_fail("cuMemHostGetDevicePointer_v2", CUDA_ERROR_INVALID_VALUE, 1);
    assert_int_equal(kvf_copier_pin(scene.copier, more, 4096, &address), KVF_E_UNSUPPORTED);
    assert_non_null(strstr(kvf_error_detail(),
                           "pinned memory of the host: CUDA device 1: asking where a device finds it: "));
    assert_int_equal(devices_left(), left);
    assert_int_equal(kvf_copier_pin(scene.copier, more, 4096, &address), KVF_OK);
    assert_true(address != (uint64_t)(uintptr_t)more);
    assert_int_equal(unsetenv("FAKE_CUDA_ALIASED"), 0);
    kvf_copier_unpin(scene.copier, more);
    free(more);
    close_scene(&scene);
}

/* ---- blocks of threads ----------------------------------------------------------------------------- */

#define MULTIPROCESSORS "40" /* of each stand-in here */
#define LOAD_BYTES                                                                                           \
    ((uint64_t)3 << 20) /* of a job: 192 tiles, so more than MULTIPROCESSORS blocks have work */
enum { LOAD_JOBS = 12 };

/* Starts jobs one behind the other, none of which ends, and notes the blocks of threads that each gets. Then lets all
 * end, and notes what one more gets. */
static void note_grids(const kvf_copier_options *options, uint32_t grids[LOAD_JOBS + 1]) {
    test_scene scene = open_scene(options);
    const CUdeviceptr from = device_room(1, LOAD_BYTES), to = device_room(1, LOAD_BYTES);
    kvf_copy_job *jobs[LOAD_JOBS + 1];
    devices_delay(1000000 * MS);
    for (int i = 0; i <= LOAD_JOBS; i++) {
        assert_int_equal(kvf_copier_begin(scene.copier, &jobs[i]), KVF_OK);
        assert_int_equal(kvf_copy_job_add(jobs[i], &(kvf_device_side){.packed = from},
                                          &(kvf_device_side){.packed = to}, LOAD_BYTES / 4096, 1, 4096),
                         KVF_OK);
        if (i == LOAD_JOBS) {
            devices_hasten();
            devices_delay(0);
            for (int over = 0; over < LOAD_JOBS; over++)
                finish(jobs[over]);
        }
        assert_int_equal(kvf_copy_job_start(jobs[i], NULL), KVF_OK);
        grids[i] = devices_grid();
    }
    finish(jobs[LOAD_JOBS]);
    device_room_free(from);
    device_room_free(to);
    close_scene(&scene);
}

/* A MiB in front is 64 tiles, for each of which there is one block more: three for each job. */
static void copies_that_wait_behind_others_get_more_blocks_up_to_the_most(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    uint32_t grids[LOAD_JOBS + 1];
    static const uint32_t expected[] = {16, 19, 22, 25, 28, 31, 32, 32, 32, 32, 32, 32, 16};
    note_grids(NULL, grids);
    assert_memory_equal(grids, expected, sizeof expected);
}

static void copies_get_no_more_blocks_than_the_device_has_multiprocessors(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    uint32_t grids[LOAD_JOBS + 1];
    static const uint32_t expected[] = {16, 19, 22, 25, 28, 31, 34, 37, 40, 40, 40, 40, 16};
    note_grids(&(kvf_copier_options){.most_blocks = 1000}, grids);
    assert_memory_equal(grids, expected, sizeof expected);
}

static void blocks_are_as_few_as_the_opener_allows(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    uint32_t grids[LOAD_JOBS + 1];
    note_grids(&(kvf_copier_options){.most_blocks = 3}, grids);
    for (int i = 0; i <= LOAD_JOBS; i++)
        assert_int_equal(grids[i], 3);
}

/* A copy of 70 x 4 cells of 96 B has 7 tiles: work for two blocks, whatever waits. */
static void a_small_copy_gets_only_the_blocks_that_have_work(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    test_scene scene = open_scene(NULL);
    const kvf_box one = pages_of(scene.one);
    const kvf_device_side from = side_of_pages(&scene, &one), to = {.packed = scene.arena};
    kvf_copy_job *jobs[2];
    devices_delay(1000000 * MS);
    for (int i = 0; i < 2; i++) {
        jobs[i] = begin(&scene, &from, &to);
        assert_int_equal(kvf_copy_job_start(jobs[i], NULL), KVF_OK);
        assert_int_equal(devices_grid(), 2);
    }
    devices_hasten();
    devices_delay(0);
    finish(jobs[0]);
    finish(jobs[1]);
    close_scene(&scene);
}

/* ---- captures of graphs --------------------------------------------------------------------------- */

/* The engine captures in the same thread, which is the harder case. A real driver may wait for the device when memory
 * is freed, whatever the mode is, so this is tested over the stand-in only. */
static void opening_and_closing_a_copier_leave_a_capture_alone(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    const CUdeviceptr room = device_room(0, PAGE);
    void *pinned = aligned_alloc(4096, 65536);
    const kvf_cuda *cuda;
    CUstream engine;
    kvf_copier *copier;
    kvf_device_table table;
    uint64_t address;
    uint32_t device;
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    assert_int_equal(cuda->cuStreamCreateWithPriority(&engine, CU_STREAM_NON_BLOCKING, 0), 0);
    devices_capture(engine);
    kvf_cuda_leave(cuda);
    assert_int_equal(kvf_device_of(KVF_MEMORY_CUDA, (const void *)(uintptr_t)room, &device), KVF_OK);
    assert_int_equal(kvf_copier_open(0, NULL, &copier), KVF_OK);
    assert_int_equal(kvf_copier_pin(copier, pinned, 65536, &address), KVF_OK);
    assert_int_equal(kvf_copier_put_table(copier, ids, 5, &table), KVF_OK);
    kvf_copier_drop_table(copier, &table);
    kvf_copier_unpin(copier, pinned);
    assert_int_equal(kvf_copier_close(copier), KVF_OK);
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    assert_int_equal(devices_capture_end(engine), 0);
    assert_int_equal(cuda->cuStreamDestroy_v2(engine), 0);
    kvf_cuda_leave(cuda);
    device_room_free(room);
    free(pinned);
}

static int mode_of_thread(const kvf_cuda *cuda) {
    int mode = 0, ours = 0;
    assert_int_equal(cuda->cuThreadExchangeStreamCaptureMode(&mode), 0);
    ours = mode;
    assert_int_equal(cuda->cuThreadExchangeStreamCaptureMode(&mode), 0);
    return ours;
}

static void the_mode_of_the_engines_thread_is_as_it_was_after_the_last_pair(void **unused) {
    (void)unused;
    enum { LOCAL = 1, GLOBAL = 0 };
    const kvf_cuda *cuda;
    int mode = LOCAL;
    assert_int_equal(kvf_cuda_find(&cuda), KVF_OK);
    assert_int_equal(cuda->cuThreadExchangeStreamCaptureMode(&mode), 0);
    assert_int_equal(mode, GLOBAL);
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    assert_int_equal(kvf_cuda_enter(devices_number(1), &cuda), KVF_OK);
    kvf_cuda_leave(cuda);
    assert_int_equal(mode_of_thread(cuda), CU_STREAM_CAPTURE_MODE_RELAXED);
    kvf_cuda_leave(cuda);
    assert_int_equal(mode_of_thread(cuda), LOCAL);
    assert_int_equal(cuda->cuThreadExchangeStreamCaptureMode(&mode), 0);
}

/* ---- memory that peers open ------------------------------------------------------------------------- */

/* A driver cuts smaller allocations out of blocks of 2 MiB, and a peer would open the whole block. */
static void memory_for_peers_shares_its_block_with_no_other(void **unused) {
    (void)unused;
    CUdeviceptr address;
    kvf_cuda_place place;
    assert_int_equal(kvf_cuda_allocate(0, 100, &address), KVF_OK);
    assert_int_equal(kvf_cuda_place_of(0, address, 100, &place), KVF_OK);
    assert_int_equal(place.offset, 0);
    assert_int_equal(place.bytes, 2 << 20);
    kvf_cuda_free(0, address);
    assert_int_equal(kvf_cuda_allocate(0, UINT64_MAX, &address), KVF_E_NOMEM);
}

/* ---- devices that reach each other ---------------------------------------------------------------- */

/* Hardware may limit how many others a device reaches. Then whatever chose this way must find another. */
static void a_device_that_reaches_too_many_others_is_unsupported(void **unused) {
    (void)unused;
    DEVICES_ARE_SEVERAL();
    devices_fail("cuCtxEnablePeerAccess", CUDA_ERROR_TOO_MANY_PEERS, 1);
    assert_int_equal(kvf_cuda_let_reach(0, 1), KVF_E_UNSUPPORTED);
    assert_non_null(strstr(kvf_error_detail(), "letting a device reach another"));
    assert_int_equal(kvf_cuda_let_reach(0, 1), KVF_OK);
    assert_int_equal(kvf_cuda_let_reach(0, 1), KVF_OK);
}

int main(int argument_count, char **arguments) {
    if (argument_count == 2 && strcmp(arguments[1], "find") == 0)
        return print_found();
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_driver_is_found_with_its_devices),
        cmocka_unit_test(the_reason_for_no_driver_is_named),
        cmocka_unit_test(a_device_that_is_not_there_is_refused),
        cmocka_unit_test(a_child_of_fork_is_told_that_it_is_one),
        cmocka_unit_test(cells_go_through_an_arena_of_the_device),
        cmocka_unit_test(cells_go_through_pinned_memory_of_the_host),
        cmocka_unit_test(pages_are_copied_into_another_order_at_once),
        cmocka_unit_test(a_job_that_is_late_is_in_progress_and_its_boxes_stay),
        cmocka_unit_test(bringing_a_table_does_not_wait_for_the_jobs_before),
        cmocka_unit_test(the_first_table_does_not_wait_for_the_engine),
        cmocka_unit_test(a_table_that_is_dropped_stays_until_the_jobs_before_have_read_it),
        cmocka_unit_test(what_the_room_does_not_hold_comes_from_the_driver_and_goes_back),
        cmocka_unit_test(tables_that_are_brought_at_once_do_not_mix_and_leave_their_room_to_later_ones),
        cmocka_unit_test(a_table_for_which_there_is_no_memory_is_not_brought),
        cmocka_unit_test(a_job_waits_for_an_event_of_the_engines),
        cmocka_unit_test(many_events_of_the_engine_that_are_late_hold_up_no_copy),
        cmocka_unit_test(more_boxes_than_a_job_has_room_for_are_refused),
        cmocka_unit_test(pages_are_found_by_tables_of_the_job),
        cmocka_unit_test(a_plain_copier_copies_by_tables_of_its_jobs_and_keeps_no_other_room),
        cmocka_unit_test(a_job_has_room_for_as_many_ids_as_were_asked_for),
        cmocka_unit_test(an_engine_that_cannot_be_made_leaves_nothing),
        cmocka_unit_test(device_code_that_the_driver_does_not_take_is_unsupported),
        cmocka_unit_test(a_place_that_is_nowhere_ends_the_job_with_a_sentence),
        cmocka_unit_test(a_table_that_kernels_may_not_read_ends_the_job),
        cmocka_unit_test(a_job_that_is_taken_in_part_fails_when_that_part_is_over),
        cmocka_unit_test(a_job_of_which_the_driver_says_nothing_is_in_progress),
        cmocka_unit_test(a_moment_of_which_the_driver_says_nothing_is_still_to_come),
        cmocka_unit_test(a_job_ends_with_its_device),
        cmocka_unit_test(the_first_checksums_do_not_wait_for_the_engine),
        cmocka_unit_test(checksums_of_which_the_driver_says_nothing_are_in_progress),
        cmocka_unit_test(a_job_of_a_context_that_cannot_be_entered_any_more_is_over),
        cmocka_unit_test(memory_is_pinned_once),
        cmocka_unit_test(pinned_memory_that_devices_find_nowhere_is_unsupported_and_not_pinned),
        cmocka_unit_test(copies_that_wait_behind_others_get_more_blocks_up_to_the_most),
        cmocka_unit_test(copies_get_no_more_blocks_than_the_device_has_multiprocessors),
        cmocka_unit_test(blocks_are_as_few_as_the_opener_allows),
        cmocka_unit_test(a_small_copy_gets_only_the_blocks_that_have_work),
        cmocka_unit_test(opening_and_closing_a_copier_leave_a_capture_alone),
        cmocka_unit_test(the_mode_of_the_engines_thread_is_as_it_was_after_the_last_pair),
        cmocka_unit_test(memory_for_peers_shares_its_block_with_no_other),
        cmocka_unit_test(a_device_that_reaches_too_many_others_is_unsupported),
    };
    (void)setenv("FAKE_CUDA_MULTIPROCESSORS", MULTIPROCESSORS, 1);
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
