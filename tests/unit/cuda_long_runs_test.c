/*
 * Long runs between a device and pinned memory of the host, which the driver copies, and what is left to the kernel,
 * over the stand-in for the driver or a real one: bytes are compared with a copy made cell by cell.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cuda/copier.h"
#include "cuda/long_runs.h"
#include "devices.h"

#define HOUR_NS 3600000000000ull

enum { ROOM = 65536 };

typedef struct test_scene {
    const kvf_cuda *cuda;
    kvf_copier *copier;
    CUdeviceptr cells;
    unsigned char *seen, *slot;
    uint64_t slot_at; /* the device's address */
    uint32_t ids[8];
    kvf_device_table table;
    uint32_t launches, copies; /* before the job */
} test_scene;

static void fill(unsigned char *bytes, uint32_t seed) {
    for (uint32_t i = 0; i < ROOM; i++)
        bytes[i] = (unsigned char)((i + seed) * 2654435761u >> 13);
}

static test_scene open_scene(uint64_t long_run_bytes, const uint32_t ids[8]) {
    test_scene made = {.cells = device_room(0, ROOM)};
    const kvf_copier_options options = {.long_run_bytes = long_run_bytes};
    memcpy(made.ids, ids, sizeof made.ids);
    assert_int_equal(kvf_cuda_enter(0, &made.cuda), KVF_OK);
    assert_int_equal(kvf_copier_open(0, &options, &made.copier), KVF_OK);
    made.slot = aligned_alloc(4096, ROOM);
    assert_non_null(made.slot);
    assert_int_equal(kvf_copier_pin(made.copier, made.slot, ROOM, &made.slot_at), KVF_OK);
    made.seen = devices_look(made.cells);
    return made;
}

static void close_scene(test_scene *scene) {
    kvf_copier_drop_table(scene->copier, &scene->table);
    kvf_copier_unpin(scene->copier, scene->slot);
    free(scene->slot);
    device_room_free(scene->cells);
    assert_int_equal(kvf_copier_close(scene->copier), KVF_OK);
    kvf_cuda_leave(scene->cuda);
}

static kvf_copy_job *begin(test_scene *scene) {
    kvf_copy_job *job;
    if (!scene->table.address)
        assert_int_equal(kvf_copier_put_table(scene->copier, scene->ids, 8, &scene->table), KVF_OK);
    scene->launches = devices_launches();
    scene->copies = devices_copies();
    assert_int_equal(kvf_copier_begin(scene->copier, &job), KVF_OK);
    return job;
}

/* Pages from here on are in another region. */
static const unsigned char *second_region;

static kvf_status add(const test_scene *scene, kvf_copy_job *job, bool gathers, const kvf_box *box,
                      uint64_t at) {
    const kvf_device_side pages = {.pages = box,
                                   .table = scene->table.address,
                                   .table_on_host = scene->ids,
                                   .region = second_region && box->memory >= second_region};
    const kvf_device_side packed = {.packed = scene->slot_at + at, .on_host = true};
    return kvf_copy_job_add(job, gathers ? &pages : &packed, gathers ? &packed : &pages, box->rows,
                            box->units, box->pieces * box->piece_bytes);
}

static void finish(kvf_copy_job *job) {
    kvf_status status;
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    while ((status = kvf_copy_job_poll(job)) == KVF_IN_PROGRESS)
        ;
    assert_int_equal(status, KVF_OK);
}

/* The reference: moves every piece of a box between two memories of the host. */
static void move_pieces(const test_scene *scene, const kvf_box *box, bool gathers, unsigned char *cells,
                        unsigned char *slot) {
    kvf_box here = *box;
    here.memory = cells + ((uint64_t)(uintptr_t)box->memory - scene->cells);
    for (uint64_t row = 0; row < box->rows; row++)
        for (uint64_t unit = 0; unit < box->units; unit++)
            for (uint64_t piece = 0; piece < box->pieces; piece++, slot += box->piece_bytes) {
                unsigned char *at =
                    kvf_box_row(&here, row) + unit * box->unit_stride + piece * box->piece_stride;
                memcpy(gathers ? slot : at, gathers ? at : slot, box->piece_bytes);
            }
}

#define ANY_LAUNCHES 2u

/* Moves boxes one behind the other, in both directions, each as one job. Returns the copies of one by the driver. */
static uint32_t check(test_scene *scene, const kvf_box *boxes, uint32_t count, uint32_t launches) {
    static unsigned char cells[ROOM], slot[ROOM];
    uint32_t copies = 0;
    for (int gathers = 0; gathers < 2; gathers++) {
        fill(scene->seen, 1);
        devices_put(scene->seen);
        fill(scene->slot, 100);
        memcpy(cells, scene->seen, ROOM);
        memcpy(slot, scene->slot, ROOM);
        kvf_copy_job *job = begin(scene);
        uint64_t at = 64;
        for (uint32_t i = 0; i < count; at += kvf_box_bytes(&boxes[i++])) {
            assert_int_equal(add(scene, job, gathers, &boxes[i], at), KVF_OK);
            move_pieces(scene, &boxes[i], gathers, cells, slot + at);
        }
        finish(job);
        devices_get(scene->seen);
        assert_memory_equal(scene->seen, cells, ROOM);
        assert_memory_equal(scene->slot, slot, ROOM);
        copies = devices_copies() - scene->copies;
        if (launches != ANY_LAUNCHES)
            assert_int_equal(devices_launches() - scene->launches, launches);
    }
    return copies;
}

static const uint32_t scattered[8] = {7, 2, 5, 0, 3, 6, 1, 4}, in_order[8] = {0, 1, 2, 3, 4, 5, 6, 7};

/* Blocks of 8 rows of 4 units of 128 B, 4 KiB each. */
static kvf_box pages_of(const test_scene *scene, bool units_first) {
    return (kvf_box){.memory = (unsigned char *)(uintptr_t)scene->cells,
                     .block_stride = 4096,
                     .row_stride = units_first ? 128 : 512,
                     .unit_stride = units_first ? 1024 : 128,
                     .blocks = scene->ids,
                     .kernel_blocks = 1,
                     .block_rows = 8,
                     .first_row = 0,
                     .rows = 40,
                     .units = 4,
                     .pieces = 1,
                     .piece_bytes = 128};
}

/* ---- what is a run ------------------------------------------------------------------------------ */

/* A slot begins and ends in the middle of cells: three boxes, each of another shape, are one run. */
static void neighbouring_boxes_are_one_run(void **unused) {
    (void)unused;
    test_scene scene = open_scene(8192, in_order);
    kvf_box cells = pages_of(&scene, false);
    cells.block_stride = 32768; /* a state of 64 cells of 512 B, in one row */
    cells.row_stride = 32768;
    cells.unit_stride = cells.piece_bytes = 512;
    cells.block_rows = cells.rows = 1;
    cells.units = 20;
    cells.memory += 512;
    kvf_box before = cells, after = cells;
    before.units = after.units = 1;
    before.piece_bytes = 100;
    before.memory -= 100;
    after.piece_bytes = 36;
    after.memory += 20 * 512;
    assert_int_equal(check(&scene, (kvf_box[]){before, cells, after}, 3, 0), 1);
    /* The control: a byte between two of them ends the run, and short ones are the kernel's. */
    after.memory++;
    assert_int_equal(check(&scene, (kvf_box[]){before, cells, after}, 3, 1), 1);
    cells.memory++;
    assert_int_equal(check(&scene, (kvf_box[]){before, cells, after}, 3, 1), 1);
    close_scene(&scene);
    scene = open_scene(20 * 512 + 137, in_order);
    after.memory--;
    cells.memory = before.memory + 100;
    assert_int_equal(check(&scene, (kvf_box[]){before, cells, after}, 3, 1), 0);
    close_scene(&scene);
}

/* The driver refuses a copy over two allocations, even where one begins at the other's end. */
static void a_run_ends_with_its_region(void **unused) {
    (void)unused;
    test_scene scene = open_scene(8192, in_order);
    kvf_box first = pages_of(&scene, false), second = first;
    first.rows = second.rows = 16;
    second.memory += 8192;
    assert_int_equal(check(&scene, (kvf_box[]){first, second}, 2, 0), 1);
    second_region = second.memory;
    assert_int_equal(check(&scene, (kvf_box[]){first, second}, 2, 0), 2);
    second_region = NULL;
    close_scene(&scene);
}

static void blocks_that_are_long_go_one_by_one_and_neighbours_together(void **unused) {
    (void)unused;
    test_scene scene = open_scene(4096, scattered);
    kvf_box pages = pages_of(&scene, false);
    assert_int_equal(check(&scene, &pages, 1, 0), 5);
    pages.first_row =
        3; /* begins and ends in the middle of a block: four whole ones, and two ends for the kernel */
    assert_int_equal(check(&scene, &pages, 1, 1), 4);
    close_scene(&scene);
    scene = open_scene(4096, in_order);
    pages = pages_of(&scene, false);
    assert_int_equal(check(&scene, &pages, 1, 0), 1);
    pages.first_row = 3;
    assert_int_equal(check(&scene, &pages, 1, 0), 1);
    close_scene(&scene);
}

static void short_runs_go_by_the_kernel(void **unused) {
    (void)unused;
    static const uint64_t least[] = {4097, 0}; /* 0: none may go otherwise */
    for (int i = 0; i < 2; i++) {
        test_scene scene = open_scene(least[i], scattered);
        const kvf_box pages = pages_of(&scene, false);
        assert_int_equal(check(&scene, &pages, 1, 1), 0);
        close_scene(&scene);
    }
    test_scene scene = open_scene(512, scattered); /* a row is long enough, but its units lie apart */
    const kvf_box pages = pages_of(&scene, true);
    assert_int_equal(check(&scene, &pages, 1, 1), 0);
    close_scene(&scene);
}

static void what_stays_on_the_device_goes_by_the_kernel(void **unused) {
    (void)unused;
    test_scene scene = open_scene(1, in_order);
    kvf_box pages = pages_of(&scene, false);
    pages.rows = 16;
    kvf_copy_job *job = begin(&scene);
    const kvf_device_side from = {.pages = &pages, .table = scene.table.address, .table_on_host = scene.ids};
    const kvf_device_side to = {.packed = scene.cells + 32768};
    fill(scene.seen, 5);
    devices_put(scene.seen);
    assert_int_equal(kvf_copy_job_add(job, &from, &to, pages.rows, pages.units, 128), KVF_OK);
    finish(job);
    devices_get(scene.seen);
    assert_memory_equal(scene.seen + 32768, scene.seen, 8192);
    assert_int_equal(devices_copies() - scene.copies, 0);
    assert_int_equal(devices_launches() - scene.launches, 1);
    close_scene(&scene);
}

/* ---- limits and failures ------------------------------------------------------------------------ */

/* 40 runs of a row each: 16 go by the driver, and the others by the kernel. */
static void more_runs_than_a_job_has_room_for_go_by_the_kernel(void **unused) {
    (void)unused;
    test_scene scene = open_scene(512, in_order);
    kvf_box rows[40];
    for (uint32_t i = 0; i < 40; i++) {
        rows[i] = pages_of(&scene, false);
        rows[i].first_row = 2 * i % 64;
        rows[i].rows = 1;
        if (i >= 32)
            rows[i].memory += 32768;
    }
    assert_int_equal(check(&scene, rows, 40, 1), KVF_LONG_RUNS);
    close_scene(&scene);
}

static void a_copy_that_the_driver_refuses_fails_its_job(void **unused) {
    (void)unused;
    test_scene scene = open_scene(4096, scattered);
    const kvf_box pages = pages_of(&scene, false);
    kvf_copy_job *job = begin(&scene);
    assert_int_equal(add(&scene, job, true, &pages, 0), KVF_OK);
    devices_fail("cuMemcpyAsync", 304, 1);
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_E_IO);
    assert_int_equal(check(&scene, &pages, 1, 0), 5);
    close_scene(&scene);
}

/* The third of five. The first two may still be copied, so the slot is not free before they are. */
static void a_job_of_which_the_driver_takes_some_copies_is_under_way_until_they_end(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    test_scene scene = open_scene(4096, scattered);
    const kvf_box pages = pages_of(&scene, false);
    kvf_copy_job *job = begin(&scene);
    fill(scene.seen, 1);
    fill(scene.slot, 100);
    assert_int_equal(add(&scene, job, true, &pages, 0), KVF_OK);
    devices_delay(HOUR_NS);
    devices_fail_copy(2, 304);
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    devices_delay(0);
    assert_int_equal(devices_copies() - scene.copies, 2);
    assert_int_equal(devices_launches() - scene.launches, 0);
    assert_int_equal(kvf_copy_job_poll(job), KVF_IN_PROGRESS);
    assert_int_equal(kvf_copier_close(scene.copier), KVF_E_AGAIN);
    assert_memory_not_equal(scene.slot, scene.seen + 7 * 4096, 4096);
    devices_hasten();
    assert_int_equal(kvf_copy_job_poll(job), KVF_E_IO);
    assert_memory_equal(scene.slot, scene.seen + 7 * 4096, 4096);
    assert_memory_equal(scene.slot + 4096, scene.seen + 2 * 4096, 4096);
    assert_int_equal(check(&scene, &pages, 1, 0), 5);
    close_scene(&scene);
}

/* ---- boxes of any shape ------------------------------------------------------------------------- */

static uint32_t draw(uint32_t *seed, uint32_t below) {
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) % below;
}

static kvf_box any_box(const test_scene *scene, uint32_t *seed) {
    static const uint32_t lengths[] = {1, 12, 64, 256};
    kvf_box box = {.memory = (unsigned char *)(uintptr_t)scene->cells + draw(seed, 64),
                   .blocks = scene->ids,
                   .kernel_blocks = 1,
                   .block_rows = 1 + draw(seed, 4),
                   .units = 1 + draw(seed, 3),
                   .pieces = 1 + draw(seed, 2),
                   .piece_bytes = lengths[draw(seed, 4)]};
    const uint64_t gap = draw(seed, 2) * 4;
    box.piece_stride = box.piece_bytes + draw(seed, 2) * 4;
    box.unit_stride = box.pieces * box.piece_stride + gap;
    box.row_stride = box.units * box.unit_stride + draw(seed, 2) * 8;
    box.block_stride = box.block_rows * box.row_stride + draw(seed, 2) * 16;
    box.first_row = draw(seed, (uint32_t)box.block_rows);
    box.rows = 1 + draw(seed, (uint32_t)(7 * box.block_rows));
    return box;
}

static void boxes_of_any_shape_arrive(void **unused) {
    (void)unused;
    static const uint64_t least[] = {1, 100, 1000, 5000};
    uint32_t seed = 20261128, copies = 0;
    for (uint32_t i = 0; i < 400; i++) {
        test_scene scene = open_scene(least[i % 4], i % 3 == 0 ? in_order : scattered);
        const kvf_box box = any_box(&scene, &seed);
        copies += check(&scene, &box, 1, ANY_LAUNCHES);
        close_scene(&scene);
    }
    assert_true(copies > 200);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(neighbouring_boxes_are_one_run),
        cmocka_unit_test(a_run_ends_with_its_region),
        cmocka_unit_test(blocks_that_are_long_go_one_by_one_and_neighbours_together),
        cmocka_unit_test(short_runs_go_by_the_kernel),
        cmocka_unit_test(what_stays_on_the_device_goes_by_the_kernel),
        cmocka_unit_test(more_runs_than_a_job_has_room_for_go_by_the_kernel),
        cmocka_unit_test(a_copy_that_the_driver_refuses_fails_its_job),
        cmocka_unit_test(a_job_of_which_the_driver_takes_some_copies_is_under_way_until_they_end),
        cmocka_unit_test(boxes_of_any_shape_arrive),
    };
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
