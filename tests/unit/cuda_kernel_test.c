/*
 * The kernels of devices, run on the host: every thread of every block in turn, over host memory, compared with a copy
 * element by element that finds every place by itself. As `cuda_kernel_test device` the test does the same moves and
 * hashes as jobs of a device's copy engine and hasher instead, over pinned memory, which has the same address on host and
 * device.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#define XXH_INLINE_ALL /* builds without agents do not link the library */
#include <xxhash.h>

#include "cuda/copier.h"
#include "cuda/device_image.h"
#include "cuda/hasher.h"
#include "kernel/convert.h"

#include "device_kernels.h"

#define BOXES 64u

/* ---- where the kernels run ------------------------------------------------------------------------------- */

static kvf_copier *copier; /* NULL: the kernels run on the host */
static kvf_hasher *hasher; /* there is one if there is a copier */

static void *room(size_t bytes) {
    const kvf_cuda *cuda;
    void *made = NULL;
    if (!copier)
        return malloc(bytes);
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    assert_int_equal(cuda->cuMemHostAlloc(&made, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
                     0);
    kvf_cuda_leave(cuda);
    return made;
}

static void free_room(void *made) {
    const kvf_cuda *cuda;
    if (!copier) {
        free(made);
    } else if (made) {
        assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
        assert_int_equal(cuda->cuMemFreeHost(made), 0);
        kvf_cuda_leave(cuda);
    }
}

/* ---- random numbers ----------------------------------------------------------------------------- */

static uint64_t state;

static uint32_t below(uint32_t limit) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) % limit);
}

static uint32_t between(uint32_t low, uint32_t high) {
    return low + below(high - low + 1);
}

/* Types that are converted into each other. */
static const kvf_dtype types[] = {KVF_DTYPE_F32, KVF_DTYPE_F16, KVF_DTYPE_BF16, KVF_DTYPE_F8_E4M3,
                                  KVF_DTYPE_F8_E5M2};
#define TYPES ((uint32_t)(sizeof types / sizeof *types))

/* ---- one side ----------------------------------------------------------------------------------- */

/* Cells as one rank keeps them: some order of row, unit and piece within a kernel block, with gaps. */
typedef struct test_side {
    unsigned char *memory;
    size_t bytes;
    uint32_t *table;
    uint32_t table_count;
    uint32_t element_bytes;
    kvf_box box;
    bool packed;
    uint64_t packed_at;
} test_side;

typedef struct test_shape {
    uint32_t rows, units, cell_elements;
} test_shape;

static void fill(unsigned char *memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        memory[i] = (unsigned char)below(256);
}

/* Chooses strides of row, unit and piece in a random order, with a gap after some of them. */
static uint64_t choose_strides(kvf_box *box, uint32_t gap) {
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    const int *order = orders[below(6)];
    const uint64_t counts[3] = {box->pieces, box->units, box->block_rows};
    uint64_t *strides[3] = {&box->piece_stride, &box->unit_stride, &box->row_stride};
    uint64_t span = box->piece_bytes;
    for (int i = 0; i < 3; i++) {
        *strides[order[i]] = span + (below(3) == 0 ? gap : 0);
        span = *strides[order[i]] * counts[order[i]];
    }
    return span;
}

static uint32_t divisor_of(uint32_t number) {
    for (;;) {
        const uint32_t by = between(1, number);
        if (number % by == 0)
            return by;
    }
}

static test_side make_pages(test_shape shape, uint32_t element_bytes) {
    test_side made = {.element_bytes = element_bytes};
    const uint32_t pieces = below(3) == 0 ? divisor_of(shape.cell_elements) : 1;
    const uint32_t gap = element_bytes << below(4);
    made.box = (kvf_box){.kernel_blocks = between(1, 3),
                         .block_rows = between(1, 9),
                         .rows = shape.rows,
                         .units = shape.units,
                         .pieces = pieces,
                         .piece_bytes = (uint64_t)shape.cell_elements / pieces * element_bytes};
    made.box.block_stride = choose_strides(&made.box, gap) + (below(2) ? gap : 0);
    const uint64_t logical_rows = made.box.block_rows * made.box.kernel_blocks;
    made.box.first_row = below((uint32_t)logical_rows + 3);
    const uint32_t entries =
        (uint32_t)((made.box.first_row + shape.rows + logical_rows - 1) / logical_rows) + 1;
    const uint32_t held = entries + between(0, 3);
    made.table_count = entries + 1;
    made.table = room(made.table_count * sizeof *made.table);
    made.table[0] = UINT32_MAX;            /* belongs to another request */
    for (uint32_t i = 0; i < entries; i++) /* no block twice */
        made.table[1 + i] = (i + held / 2) % held;
    made.bytes = held * made.box.kernel_blocks * made.box.block_stride + 2 * gap;
    made.memory = room(made.bytes);
    fill(made.memory, made.bytes);
    made.box.memory = made.memory + (below(2) ? gap : 0);
    made.box.blocks = made.table + 1;
    return made;
}

static test_side make_packed(test_shape shape, uint32_t element_bytes) {
    test_side made = {.element_bytes = element_bytes, .packed = true};
    const uint32_t before = element_bytes * below(5);
    made.bytes = before + (uint64_t)shape.rows * shape.units * shape.cell_elements * element_bytes + 16;
    made.memory = room(made.bytes);
    fill(made.memory, made.bytes);
    made.packed_at = (uint64_t)(uintptr_t)made.memory + before;
    return made;
}

static void free_side(test_side *side) {
    free_room(side->memory);
    free_room(side->table);
}

static kvf_device_side device_side(const test_side *side, kvf_dtype type) {
    return (kvf_device_side){.pages = side->packed ? NULL : &side->box,
                             .packed = side->packed_at,
                             .table = (uint64_t)(uintptr_t)side->table,
                             .table_on_host = side->table,
                             .type = type};
}

/* Where one element lies, as the oracle computes it. */
static unsigned char *element(const test_side *side, test_shape shape, uint64_t row, uint64_t unit,
                              uint64_t i) {
    if (side->packed)
        return (unsigned char *)(uintptr_t)side->packed_at +
               ((row * shape.units + unit) * shape.cell_elements + i) * side->element_bytes;
    const kvf_box *box = &side->box;
    const uint64_t in_piece = box->piece_bytes / side->element_bytes, at = box->first_row + row;
    const uint64_t logical_rows = box->block_rows * box->kernel_blocks, in_logical = at % logical_rows;
    const uint64_t block =
        (uint64_t)box->blocks[at / logical_rows] * box->kernel_blocks + in_logical / box->block_rows;
    return box->memory + block * box->block_stride + in_logical % box->block_rows * box->row_stride +
           unit * box->unit_stride + i / in_piece * box->piece_stride + i % in_piece * side->element_bytes;
}

/* ---- on a device --------------------------------------------------------------------------------- */

static kvf_copy_job *begin_job(void) {
    kvf_copy_job *job = NULL;
    if (copier)
        assert_int_equal(kvf_copier_begin(copier, &job), KVF_OK);
    return job;
}

static void run_job(kvf_copy_job *job) {
    kvf_status status;
    assert_int_equal(kvf_copy_job_start(job, NULL), KVF_OK);
    while ((status = kvf_copy_job_poll(job)) == KVF_IN_PROGRESS)
        ;
    assert_int_equal(status, KVF_OK);
}

/* ---- moves ----------------------------------------------------------------------------------------------- */

static void move_and_compare(uint64_t seed, bool convert) {
    state = seed;
    kvf_cuda_box boxes[BOXES];
    uint32_t count = 0, tiles = 0;
    const uint32_t moves = between(1, 4), first_type = below(TYPES);
    const kvf_dtype from_type = types[first_type];
    const kvf_dtype to_type = types[(first_type + (convert ? between(1, TYPES - 1) : 0)) % TYPES];
    test_side from[4], to[4];
    test_shape shapes[4];
    unsigned char *expected[4];
    kvf_copy_job *job = begin_job();
    for (uint32_t m = 0; m < moves; m++) {
        shapes[m] = (test_shape){between(1, 40), between(1, 5), between(1, 8) << below(9)};
        const uint32_t from_bytes = kvf_dtype_bits(from_type) / 8, to_bytes = kvf_dtype_bits(to_type) / 8;
        const uint32_t way = below(3);
        from[m] = way == 0 ? make_packed(shapes[m], from_bytes) : make_pages(shapes[m], from_bytes);
        to[m] = way == 1 ? make_packed(shapes[m], to_bytes) : make_pages(shapes[m], to_bytes);
        /* Moves without conversion are counted in bytes. */
        const kvf_device_side from_side = device_side(&from[m], from_type);
        const kvf_device_side to_side = device_side(&to[m], to_type);
        uint32_t made = 0;
        assert_int_equal(kvf_device_boxes(&from_side, &to_side, shapes[m].rows, shapes[m].units,
                                          shapes[m].cell_elements * (convert ? 1 : from_bytes), boxes + count,
                                          BOXES - count, &made, &tiles),
                         KVF_OK);
        count += made;
        if (job)
            assert_int_equal(kvf_copy_job_add(job, &from_side, &to_side, shapes[m].rows, shapes[m].units,
                                              shapes[m].cell_elements * (convert ? 1 : from_bytes)),
                             KVF_OK);
        /* The oracle writes into the destination; then its result is kept and the destination restored. */
        unsigned char *before = malloc(to[m].bytes);
        memcpy(before, to[m].memory, to[m].bytes);
        for (uint64_t row = 0; row < shapes[m].rows; row++)
            for (uint64_t unit = 0; unit < shapes[m].units; unit++)
                for (uint64_t i = 0; i < shapes[m].cell_elements; i++) {
                    const unsigned char *source = element(&from[m], shapes[m], row, unit, i);
                    unsigned char *target = element(&to[m], shapes[m], row, unit, i);
                    if (convert)
                        kvf_convert_plain.convert(from_type, to_type, source, target, 1, false);
                    else
                        memcpy(target, source, from_bytes);
                }
        expected[m] = malloc(to[m].bytes);
        memcpy(expected[m], to[m].memory, to[m].bytes);
        memcpy(to[m].memory, before, to[m].bytes);
        free(before);
    }
    if (job)
        run_job(job);
    else
        run_move_kernel(boxes, count, tiles, convert, between(1, 7));
    for (uint32_t m = 0; m < moves; m++) {
        if (memcmp(to[m].memory, expected[m], to[m].bytes) != 0)
            fail_msg("seed %llu, move %u of %u", (unsigned long long)seed, m, moves);
        free_side(&from[m]);
        free_side(&to[m]);
        free(expected[m]);
    }
}

static void cells_of_any_shape_are_copied(void **unused) {
    (void)unused;
    for (uint64_t seed = 1; seed <= 800; seed++)
        move_and_compare(seed, false);
}

static void cells_of_any_shape_are_converted(void **unused) {
    (void)unused;
    for (uint64_t seed = 1; seed <= 400; seed++)
        move_and_compare(seed, true);
}

/* ---- hashes ------------------------------------------------------------------------------------- */

#define STEPS_MOST 64u
#define UNITS_MOST 5u

static const uint64_t step_seed = 0x9e3779b97f4a7c15u, row_seed = 0xd1b54a32d192ed03u,
                      unit_seed = 0x8cb92ba72f3d8dd7u;

/* Where cells of some steps are hashed to: sums by step, or by step and unit. */
typedef struct test_sums {
    kvf_device_sums sums;
    uint64_t begin; /* the step of found[0] */
    uint64_t found[STEPS_MOST * UNITS_MOST], expected[STEPS_MOST * UNITS_MOST];
} test_sums;

static uint64_t step_at(const kvf_device_sums *sums, uint64_t position) {
    const kvf_token_share *share = &sums->share;
    return (position / share->width * share->count + share->index) * share->width + position % share->width;
}

static void make_sums(test_shape shape, uint32_t rows_per_step, test_sums *out) {
    const uint32_t count = between(1, 3), unit_sums = below(2) ? shape.units : 1;
    memset(out, 0, sizeof *out);
    out->sums = (kvf_device_sums){.step_bytes = unit_sums * sizeof(uint64_t),
                                  .unit_bytes = unit_sums > 1 ? sizeof(uint64_t) : 0,
                                  .seed = state,
                                  .step_seed = step_seed,
                                  .row_seed = row_seed,
                                  .unit_seed = unit_seed,
                                  .rows = rows_per_step,
                                  .share = {.count = count, .index = below(count), .width = between(1, 4)},
                                  .position = below(100)};
    out->begin = step_at(&out->sums, out->sums.position);
    out->sums.address = (uint64_t)(uintptr_t)out->found - out->begin * out->sums.step_bytes;
}

/* The host's library hashes each cell, which is put together element by element. */
static void expect_sums(const test_side *side, test_shape shape, kvf_dtype from, kvf_dtype to,
                        test_sums *sums) {
    const uint32_t bytes = from == to ? 1 : kvf_dtype_bits(to) / 8;
    unsigned char *cell = malloc((size_t)shape.cell_elements * bytes);
    for (uint32_t row = 0; row < shape.rows; row++)
        for (uint32_t unit = 0; unit < shape.units; unit++) {
            const uint64_t step = step_at(&sums->sums, sums->sums.position + row / sums->sums.rows);
            for (uint32_t i = 0; i < shape.cell_elements; i++)
                if (from == to)
                    cell[i] = *element(side, shape, row, unit, i);
                else
                    kvf_convert_plain.convert(from, to, element(side, shape, row, unit, i), cell + i * bytes,
                                              1, false);
            const uint64_t seed =
                sums->sums.seed + step * step_seed + row % sums->sums.rows * row_seed + unit * unit_seed;
            sums->expected[((step - sums->begin) * sums->sums.step_bytes + unit * sums->sums.unit_bytes) /
                           8] += XXH3_64bits_withSeed(cell, (size_t)shape.cell_elements * bytes, seed);
        }
    free(cell);
}

static uint32_t sums_differ(const test_sums *sums) {
    uint32_t differ = 0;
    for (uint32_t i = 0; i < STEPS_MOST * UNITS_MOST; i++)
        differ += sums->found[i] != sums->expected[i];
    return differ;
}

static void hash_on_device(const test_side *from, kvf_dtype from_type, kvf_dtype to, test_shape shape,
                           test_sums *sums) {
    kvf_device_sums there = sums->sums;
    const uint64_t *found;
    kvf_status status;
    there.address = 0 - sums->begin * there.step_bytes;
    kvf_hasher_begin(hasher, from->table, from->table_count, STEPS_MOST * UNITS_MOST);
    assert_int_equal(kvf_hasher_add(hasher, &from->box, from_type, to, &there, shape.rows, shape.units,
                                    shape.cell_elements),
                     KVF_OK);
    assert_int_equal(kvf_hasher_start(hasher), KVF_OK);
    while ((status = kvf_hasher_poll(hasher, &found)) == KVF_IN_PROGRESS)
        ;
    assert_int_equal(status, KVF_OK);
    memcpy(sums->found, found, sizeof sums->found);
}

static void hash_on_host(const kvf_device_side *from, kvf_dtype to, test_shape shape, test_sums *sums,
                         uint32_t blocks) {
    kvf_cuda_box box;
    uint32_t count = 0, tiles = 0;
    assert_int_equal(kvf_device_hash_boxes(from, to, &sums->sums, shape.rows, shape.units,
                                           shape.cell_elements, &box, 1, &count, &tiles),
                     KVF_OK);
    assert_int_equal(count, 1);
    memset(sums->found, 0, sizeof sums->found);
    run_hash_kernel(&box, count, tiles, from->type != to, blocks);
}

static void hash(const test_side *from, kvf_dtype from_type, kvf_dtype to, test_shape shape, test_sums *sums,
                 uint32_t blocks) {
    const kvf_device_side side = device_side(from, from_type);
    if (hasher)
        hash_on_device(from, from_type, to, shape, sums);
    else
        hash_on_host(&side, to, shape, sums, blocks);
}

/* Hashes cells of random shape; of `cell_elements`, or any number of them if that is 0. */
static void hash_and_compare(uint64_t seed, uint32_t cell_elements, bool convert) {
    static test_sums sums;
    state = seed;
    const uint32_t rows_per_step = between(1, 3), first_type = below(TYPES);
    const test_shape shape = {rows_per_step * between(1, 16), between(1, UNITS_MOST),
                              cell_elements ? cell_elements : between(1, 9) << below(8)};
    const kvf_dtype from = types[first_type],
                    to = convert ? types[(first_type + between(1, TYPES - 1)) % TYPES] : from;
    test_side side = make_pages(shape, convert ? kvf_dtype_bits(from) / 8 : 1);
    make_sums(shape, rows_per_step, &sums);
    expect_sums(&side, shape, from, to, &sums);
    hash(&side, from, to, shape, &sums, between(1, 3));
    if (sums_differ(&sums) > 0)
        fail_msg("seed %llu: cells of %u elements have other sums", (unsigned long long)seed,
                 shape.cell_elements);
    /* The control: the sign of one element changes one sum. */
    element(&side, shape, below(shape.rows), below(shape.units),
            below(shape.cell_elements))[side.element_bytes - 1] ^= 0x80;
    hash(&side, from, to, shape, &sums, 2);
    assert_int_equal(sums_differ(&sums), 1);
    free_side(&side);
}

static void cells_of_any_length_are_hashed_as_by_the_host(void **unused) {
    (void)unused;
    for (uint32_t bytes = 1; bytes <= 600; bytes++)
        hash_and_compare(bytes, bytes, false);
    for (uint32_t bytes = 1000; bytes <= 1060; bytes++) /* a block is 1024 bytes */
        hash_and_compare(bytes, bytes, false);
}

static void cells_of_any_shape_are_hashed(void **unused) {
    (void)unused;
    for (uint64_t seed = 1; seed <= 300; seed++)
        hash_and_compare(seed, 0, false);
}

static void converted_cells_are_hashed(void **unused) {
    (void)unused;
    for (uint64_t seed = 1; seed <= 300; seed++)
        hash_and_compare(seed, 0, true);
}

/* ---- arithmetic --------------------------------------------------------------------------------- */

static void divisors_divide_every_number(void **unused) {
    (void)unused;
    static const uint32_t edges[] = {1,          2,          3,          5,          7,
                                     255,        256,        257,        65535,      65537,
                                     0x3fffffff, 0x40000000, 0x40000001, 0x7ffffffe, 0x7fffffff};
    state = 1;
    for (uint32_t i = 0; i < 20000; i++) {
        const uint32_t by = i < 15 ? edges[i] : below(0x7fffffff) >> below(31);
        const kvf_divisor divisor = kvf_divisor_of(by ? by : 1);
        for (uint32_t j = 0; j < 15 + 8; j++) {
            uint32_t number = j < 15 ? edges[j] : below(0x7fffffff);
            assert_int_equal(run_quotient(number, divisor), number / divisor.by);
            number -= number % divisor.by; /* a multiple: a wrong reciprocal shows here first */
            assert_int_equal(run_quotient(number, divisor), number / divisor.by);
            if (number)
                assert_int_equal(run_quotient(number - 1, divisor), (number - 1) / divisor.by);
        }
    }
}

/* The first box of a move from pages of bf16 to a packed stream. */
static kvf_cuda_box box_of(uint64_t memory, uint64_t row_stride, uint64_t unit_stride, uint64_t cell_bytes,
                           uint64_t packed, kvf_dtype to_type) {
    const uint32_t table[] = {0};
    const kvf_box pages = {.memory = (unsigned char *)(uintptr_t)memory,
                           .block_stride = 1 << 20,
                           .row_stride = row_stride,
                           .unit_stride = unit_stride,
                           .blocks = table,
                           .kernel_blocks = 1,
                           .block_rows = 16,
                           .rows = 1,
                           .units = 2,
                           .pieces = 1,
                           .piece_bytes = cell_bytes};
    const kvf_device_side from = {
        .pages = &pages, .table = 4096, .table_on_host = table, .type = KVF_DTYPE_BF16};
    const kvf_device_side to = {.packed = packed, .type = to_type};
    const uint64_t cell_elements = to_type == KVF_DTYPE_BF16 ? cell_bytes : cell_bytes / 2;
    kvf_cuda_box box;
    uint32_t count = 0, tile = 0;
    assert_int_equal(kvf_device_boxes(&from, &to, 1, 2, cell_elements, &box, 1, &count, &tile), KVF_OK);
    return box;
}

static uint32_t vector_of(uint64_t memory, uint64_t row_stride, uint64_t unit_stride, uint64_t cell_bytes) {
    return box_of(memory, row_stride, unit_stride, cell_bytes, 65536, KVF_DTYPE_BF16).from_bytes;
}

static void vectors_are_as_long_as_addresses_allow(void **unused) {
    (void)unused;
    assert_int_equal(vector_of(4096, 512, 256, 256), 16);
    assert_int_equal(vector_of(4096 + 8, 512, 256, 256), 8);
    assert_int_equal(vector_of(4096, 516, 256, 256), 4);
    assert_int_equal(vector_of(4096, 512, 258, 256), 2);
    assert_int_equal(vector_of(4096, 512, 256, 33), 1);
}

/* The wider side has up to 16 bytes of elements, as far as both sides are aligned. */
static void vectors_that_are_converted_have_several_elements(void **unused) {
    static const struct {
        uint64_t memory, cell_bytes, packed;
        kvf_dtype to_type;
        uint16_t from_bytes, to_bytes;
    } cases[] = {
        {4096, 256, 65536, KVF_DTYPE_F32, 8, 16},        {4096, 256, 65536, KVF_DTYPE_F16, 16, 16},
        {4096, 256, 65536, KVF_DTYPE_F8_E4M3, 16, 8},    {4096 + 4, 256, 65536, KVF_DTYPE_F8_E5M2, 4, 2},
        {4096 + 2, 256, 65536, KVF_DTYPE_F32, 2, 4},     {4096, 256, 65536 + 8, KVF_DTYPE_F32, 4, 8},
        {4096, 256, 65536 + 1, KVF_DTYPE_F8_E4M3, 2, 1}, {4096, 24, 65536, KVF_DTYPE_F32, 8, 16},
        {4096, 24, 65536, KVF_DTYPE_F8_E4M3, 8, 4},      {4096, 6, 65536, KVF_DTYPE_F16, 2, 2}};
    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const kvf_cuda_box box =
            box_of(cases[i].memory, 512, 256, cases[i].cell_bytes, cases[i].packed, cases[i].to_type);
        assert_int_equal(box.from_bytes, cases[i].from_bytes);
        assert_int_equal(box.to_bytes, cases[i].to_bytes);
    }
}

static void moves_that_devices_cannot_make_are_refused(void **unused) {
    (void)unused;
    const kvf_device_side bf16 = {.packed = 4096, .type = KVF_DTYPE_BF16};
    const kvf_device_side odd = {.packed = 4097, .type = KVF_DTYPE_BF16};
    const kvf_device_side f32 = {.packed = 8192, .type = KVF_DTYPE_F32};
    const kvf_device_side i8 = {.packed = 8192, .type = KVF_DTYPE_I8};
    kvf_cuda_box box;
    uint32_t count = 0, tile = 0;
    assert_int_equal(kvf_device_boxes(&bf16, &i8, 1, 1, 4, &box, 1, &count, &tile), KVF_E_UNSUPPORTED);
    assert_int_equal(kvf_device_boxes(&odd, &f32, 1, 1, 4, &box, 1, &count, &tile), KVF_E_UNSUPPORTED);
    assert_int_equal(kvf_device_boxes(&bf16, &bf16, 1, 1, 1u << 31, &box, 1, &count, &tile), KVF_E_LIMIT);
    /* 2^32 lanes are more than fit in one box. */
    assert_int_equal(kvf_device_boxes(&bf16, &bf16, 1u << 26, 16, 256, &box, 1, &count, &tile), KVF_E_LIMIT);
}

static void a_move_of_nothing_is_no_box(void **unused) {
    (void)unused;
    const kvf_device_side side = {.packed = 4096, .type = KVF_DTYPE_BF16};
    kvf_cuda_box box;
    uint32_t count = 7, tile = 3;
    assert_int_equal(kvf_device_boxes(&side, &side, 0, 1, 2, &box, 1, &count, &tile), KVF_OK);
    assert_int_equal(count, 0);
    assert_int_equal(kvf_device_boxes(&side, &side, 1, 1, 0, &box, 1, &count, &tile), KVF_OK);
    assert_int_equal(tile, 3);
}

static void a_long_move_is_several_boxes(void **unused) {
    (void)unused;
    const kvf_device_side from = {.packed = 1ull << 40, .type = KVF_DTYPE_BF16};
    const kvf_device_side to = {.packed = 1ull << 50, .type = KVF_DTYPE_BF16};
    kvf_cuda_box boxes[8];
    uint32_t count = 0, tile = 5;
    /* 2^26 rows of 16 units of 16 vectors, which are 4 lanes: 2^32 lanes, four boxes of 2^30. */
    assert_int_equal(kvf_device_boxes(&from, &to, 1u << 26, 16, 256, boxes, 8, &count, &tile), KVF_OK);
    assert_int_equal(count, 4);
    assert_int_equal(tile, 5 + (1u << 24));
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(boxes[i].items, 1u << 30);
        assert_int_equal(boxes[i].first_tile, 5 + (i << 22));
        assert_true(boxes[i].from.memory == (1ull << 40) + ((uint64_t)i << 36));
        assert_true(boxes[i].to.memory == (1ull << 50) + ((uint64_t)i << 36));
    }
}

static int run_on_device(void) {
    const struct CMUnitTest tests[] = {
        {"cells_of_any_shape_are_copied (device)", cells_of_any_shape_are_copied, NULL, NULL, NULL},
        {"cells_of_any_shape_are_converted (device)", cells_of_any_shape_are_converted, NULL, NULL, NULL},
        {"cells_of_any_length_are_hashed_as_by_the_host (device)",
         cells_of_any_length_are_hashed_as_by_the_host, NULL, NULL, NULL},
        {"cells_of_any_shape_are_hashed (device)", cells_of_any_shape_are_hashed, NULL, NULL, NULL},
        {"converted_cells_are_hashed (device)", converted_cells_are_hashed, NULL, NULL, NULL},
    };
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    if (kvf_copier_open(0, NULL, &copier) || kvf_hasher_open(0, &hasher)) {
        (void)fprintf(stderr, "%s\n", kvf_error_detail());
        return 1;
    }
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return kvf_hasher_close(hasher) || kvf_copier_close(copier) || failed ? 1 : 0;
}

int main(int argument_count, char **arguments) {
    if (argument_count == 2 && strcmp(arguments[1], "device") == 0)
        return run_on_device();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cells_of_any_shape_are_copied),
        cmocka_unit_test(cells_of_any_shape_are_converted),
        cmocka_unit_test(cells_of_any_length_are_hashed_as_by_the_host),
        cmocka_unit_test(cells_of_any_shape_are_hashed),
        cmocka_unit_test(converted_cells_are_hashed),
        cmocka_unit_test(divisors_divide_every_number),
        cmocka_unit_test(vectors_are_as_long_as_addresses_allow),
        cmocka_unit_test(vectors_that_are_converted_have_several_elements),
        cmocka_unit_test(moves_that_devices_cannot_make_are_refused),
        cmocka_unit_test(a_move_of_nothing_is_no_box),
        cmocka_unit_test(a_long_move_is_several_boxes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
