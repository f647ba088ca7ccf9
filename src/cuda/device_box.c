#include "cuda/device_box.h"

#include "kernel/convert.h"

#define NUMBERS (1u << 31) /* divisors divide numbers below this */
#define VECTOR_BYTES 16u
#define NEIGHBOURS 64u /* bytes */

/*
 * With 2^bits >= by > 2^(bits - 1), factor = floor(2^(31 + bits) / by) + 1 exceeds the true ratio by at most by / by.
 * The product of this excess and a number below 2^31 stays below 2^(31 + bits) / by, so the floor is right (Granlund
 * and Montgomery, 1994, theorem 4.2).
 */
kvf_divisor kvf_divisor_of(uint32_t by) {
    const uint32_t divisor = by > 0 ? by : 1; /* nothing is divided by 0 */
    uint32_t bits = 0;
    KVF_ASSERT(by < NUMBERS);
    while ((1ull << bits) < divisor)
        bits++;
    /* NOLINTNEXTLINE(clang-analyzer-core.DivideZero): the analyser loses the line above */
    const uint64_t factor = (1ull << (31 + bits)) / divisor + 1;
    return (kvf_divisor){.by = divisor, .factor = (uint32_t)factor, .shift = 31 + bits};
}

/* The largest power of two that divides all of the numbers whose bits are in `ored`; 16 at the most. */
static uint32_t alignment(uint64_t ored) {
    uint32_t bytes = VECTOR_BYTES;
    while (ored % bytes)
        bytes /= 2;
    return bytes;
}

/* All numbers of one side that a vector's bytes must divide, ored. */
static uint64_t steps_of(const kvf_device_side *side, uint64_t cell_bytes) {
    const kvf_box *box = side->pages;
    if (!box)
        return side->packed | cell_bytes;
    const uint64_t pieces = box->pieces > 1 ? box->piece_bytes | box->piece_stride : 0;
    return (uint64_t)(uintptr_t)box->memory | box->block_stride | box->row_stride | box->unit_stride |
           pieces | cell_bytes;
}

static kvf_cuda_side side_of(const kvf_device_side *side, uint64_t first_row, uint64_t units,
                             uint64_t cell_bytes) {
    const kvf_box *box = side->pages;
    if (!box)
        return (kvf_cuda_side){.memory = side->packed + first_row * units * cell_bytes,
                               .row_stride = units * cell_bytes,
                               .unit_stride = cell_bytes,
                               .block_rows = kvf_divisor_of(1),
                               .kernel_blocks = kvf_divisor_of(1),
                               .piece_bytes = kvf_divisor_of((uint32_t)cell_bytes)};
    const uint64_t logical_rows = box->block_rows * box->kernel_blocks, row = box->first_row + first_row;
    const uint64_t entry = (uint64_t)(box->blocks - side->table_on_host) + row / logical_rows;
    return (kvf_cuda_side){.memory = (uint64_t)(uintptr_t)box->memory,
                           .blocks = side->table + entry * sizeof *box->blocks,
                           .block_stride = box->block_stride,
                           .row_stride = box->row_stride,
                           .unit_stride = box->unit_stride,
                           .piece_stride = box->piece_stride,
                           .block_rows = kvf_divisor_of((uint32_t)box->block_rows),
                           .kernel_blocks = kvf_divisor_of(box->kernel_blocks),
                           .piece_bytes =
                               kvf_divisor_of((uint32_t)(box->pieces > 1 ? box->piece_bytes : cell_bytes)),
                           .first_row = (uint32_t)(row % logical_rows)};
}

static uint16_t device_type(kvf_dtype type) {
    switch ((int)type) {
    case KVF_DTYPE_F32:
        return KVF_CUDA_F32;
    case KVF_DTYPE_F16:
        return KVF_CUDA_F16;
    case KVF_DTYPE_BF16:
        return KVF_CUDA_BF16;
    case KVF_DTYPE_F8_E4M3:
        return KVF_CUDA_F8_E4M3;
    default:
        KVF_ASSERT(type == KVF_DTYPE_F8_E5M2);
        return KVF_CUDA_F8_E5M2;
    }
}

/* The rows of a logical block: the first row of a device's box is below this. */
static uint64_t rows_before(const kvf_device_side *side) {
    return side->pages ? side->pages->block_rows * side->pages->kernel_blocks : 0;
}

/* The bytes by which an element is counted. */
static uint64_t element_bytes(kvf_dtype type, kvf_dtype other) {
    return type == other ? 1 : kvf_dtype_bits(type) / 8;
}

/* The bytes of a cell in either type. */
static kvf_status measure(kvf_dtype from, kvf_dtype to, uint64_t units, uint64_t cell_elements,
                          uint64_t *from_cell, uint64_t *to_cell) {
    if (from != to && !kvf_kernel_converts(from, to))
        return kvf_fail(KVF_E_UNSUPPORTED, "elements of type %d cannot become elements of type %d", (int)from,
                        (int)to);
    if (!kvf_mul(cell_elements, element_bytes(from, to), from_cell) ||
        !kvf_mul(cell_elements, element_bytes(to, from), to_cell) ||
        kvf_max_u64(*from_cell, *to_cell) >= NUMBERS || units >= NUMBERS)
        return kvf_fail(KVF_E_LIMIT, "%llu units of %llu elements; devices move cells below 2 GiB",
                        (unsigned long long)units, (unsigned long long)cell_elements);
    return KVF_OK;
}

static kvf_status check_alignment(uint64_t from_steps, uint64_t from_element, uint64_t to_steps,
                                  uint64_t to_element) {
    if (from_steps % from_element || to_steps % to_element)
        return kvf_fail(KVF_E_UNSUPPORTED, "elements of %u and %u bytes that do not lie at multiples of that",
                        (unsigned)from_element, (unsigned)to_element);
    return KVF_OK;
}

/* The elements of a vector: as many as are aligned on both sides, up to VECTOR_BYTES of the wider. */
static uint64_t vector_elements(uint64_t from_steps, uint64_t from_element, uint64_t to_steps,
                                uint64_t to_element) {
    return kvf_min_u64(alignment(from_steps) / from_element, alignment(to_steps) / to_element);
}

/* How the vectors of a cell are given to threads: see kernel_move.h. */
typedef struct division {
    uint64_t segment_vectors, segments, strips, lanes;
} division;

/* The vectors of a cell that are contiguous on one side. */
static uint64_t piece_vectors(const kvf_device_side *side, uint64_t cell_vectors, uint64_t vector_bytes) {
    return side->pages && side->pages->pieces > 1 ? side->pages->piece_bytes / vector_bytes : cell_vectors;
}

static uint64_t rounds(uint64_t count, uint64_t each) {
    return (count + each - 1) / each;
}

/* As few strips as possible, of about the same length. Neighbouring threads get NEIGHBOURS bytes in a row where there
 * are so many, because shorter ones make packets of their own on the way to the host. */
static division division_of(uint64_t cell_vectors, uint64_t from_piece, uint64_t to_piece,
                            uint64_t vector_bytes) {
    division made = {.segment_vectors = kvf_gcd(from_piece, to_piece)};
    const uint64_t least = kvf_min_u64(NEIGHBOURS / vector_bytes, KVF_STRIP_LANES);
    made.segments = cell_vectors / made.segment_vectors;
    made.strips = rounds(made.segment_vectors, (uint64_t)KVF_STRIP_LANES * KVF_STRIP_VECTORS);
    made.lanes = kvf_max_u64(rounds(made.segment_vectors, made.strips * KVF_STRIP_VECTORS),
                             kvf_min_u64(least, made.segment_vectors));
    return made;
}

kvf_status kvf_device_boxes(const kvf_device_side *from, const kvf_device_side *to, uint64_t rows,
                            uint64_t units, uint64_t cell_elements, kvf_cuda_box *out, uint32_t room,
                            uint32_t *count, uint32_t *tile) {
    const bool convert = from->type != to->type;
    uint64_t from_cell, to_cell;
    *count = 0;
    if (rows == 0 || units == 0 || cell_elements == 0)
        return KVF_OK;
    kvf_status status = measure(from->type, to->type, units, cell_elements, &from_cell, &to_cell);
    if (status)
        return status;
    const uint64_t from_element = element_bytes(from->type, to->type),
                   to_element = element_bytes(to->type, from->type);
    const uint64_t from_steps = steps_of(from, from_cell), to_steps = steps_of(to, to_cell);
    if ((status = check_alignment(from_steps, from_element, to_steps, to_element)))
        return status;
    const uint64_t elements = vector_elements(from_steps, from_element, to_steps, to_element),
                   from_bytes = elements * from_element, to_bytes = elements * to_element,
                   cell_vectors = cell_elements / elements;
    const division by =
        division_of(cell_vectors, piece_vectors(from, cell_vectors, from_bytes),
                    piece_vectors(to, cell_vectors, to_bytes), kvf_min_u64(from_bytes, to_bytes));
    const uint64_t row_items = units * by.segments * by.strips * by.lanes;
    const uint64_t first = kvf_max_u64(rows_before(from), rows_before(to));
    if (first >= NUMBERS / 2 || row_items >= NUMBERS / 2)
        return kvf_fail(KVF_E_LIMIT, "%llu rows of a block, %llu lanes of a row; devices number up to 2^30",
                        (unsigned long long)first, (unsigned long long)row_items);
    const uint64_t most = NUMBERS / 2 / row_items;
    for (uint64_t row = 0; row < rows; row += most) {
        const uint64_t now = kvf_min_u64(most, rows - row);
        if (*count == room)
            return kvf_fail(KVF_E_LIMIT, "there is room for %u boxes of a device", room);
        out[(*count)++] = (kvf_cuda_box){.from = side_of(from, row, units, from_cell),
                                         .to = side_of(to, row, units, to_cell),
                                         .units = kvf_divisor_of((uint32_t)units),
                                         .segments = kvf_divisor_of((uint32_t)by.segments),
                                         .strips = kvf_divisor_of((uint32_t)by.strips),
                                         .lanes = kvf_divisor_of((uint32_t)by.lanes),
                                         .segment_vectors = (uint32_t)by.segment_vectors,
                                         .items = (uint32_t)(now * row_items),
                                         .first_tile = *tile,
                                         .from_bytes = (uint16_t)from_bytes,
                                         .to_bytes = (uint16_t)to_bytes,
                                         .from_type = convert ? device_type(from->type) : KVF_CUDA_BYTES,
                                         .to_type = convert ? device_type(to->type) : KVF_CUDA_BYTES};
        *tile += (uint32_t)rounds(now * row_items, KVF_TILE_THREADS);
    }
    return KVF_OK;
}

/* ---- hashes ------------------------------------------------------------------------------------- */

/* The sums of a box whose first row is `row` of the cells. */
static kvf_cuda_sums sums_of(const kvf_device_sums *sums, uint64_t row, uint64_t cell_bytes) {
    const kvf_token_share *share = &sums->share;
    const uint64_t position = sums->position + row / sums->rows;
    const uint64_t step = (position / share->width * share->count + share->index) * share->width;
    return (kvf_cuda_sums){.address = sums->address + step * sums->step_bytes,
                           .step_bytes = sums->step_bytes,
                           .unit_bytes = sums->unit_bytes,
                           .seed = sums->seed + step * sums->step_seed,
                           .step_seed = sums->step_seed,
                           .row_seed = sums->row_seed,
                           .unit_seed = sums->unit_seed,
                           .rows = kvf_divisor_of(sums->rows),
                           .width = kvf_divisor_of(share->width),
                           .round_steps = share->width * share->count,
                           .first_row = (uint32_t)(position % share->width * sums->rows),
                           .cell_bytes = (uint32_t)cell_bytes};
}

kvf_status kvf_device_hash_boxes(const kvf_device_side *from, kvf_dtype to, const kvf_device_sums *sums,
                                 uint64_t rows, uint64_t units, uint64_t cell_elements, kvf_cuda_box *out,
                                 uint32_t room, uint32_t *count, uint32_t *tile) {
    const bool convert = from->type != to;
    uint64_t from_cell, to_cell;
    *count = 0;
    if (rows == 0 || units == 0)
        return KVF_OK;
    kvf_status status = measure(from->type, to, units, cell_elements, &from_cell, &to_cell);
    if (status)
        return status;
    const uint64_t steps = steps_of(from, from_cell), to_element = element_bytes(to, from->type);
    status = check_alignment(steps, element_bytes(from->type, to), 0, to_element);
    if (status)
        return status;
    const uint64_t stretch = (uint64_t)sums->share.width * kvf_max_u64(sums->rows, sums->share.count);
    if (rows_before(from) >= NUMBERS / 2 || stretch >= NUMBERS / 2 || units * sums->rows >= NUMBERS / 2)
        return kvf_fail(KVF_E_LIMIT, "%llu rows of a block, %llu cells of a step; devices number up to 2^30",
                        (unsigned long long)rows_before(from), (unsigned long long)units * sums->rows);
    const uint64_t most = NUMBERS / 2 / (units * sums->rows) * sums->rows;
    for (uint64_t row = 0; row < rows; row += most) {
        const uint64_t now = kvf_min_u64(most, rows - row);
        if (*count == room)
            return kvf_fail(KVF_E_LIMIT, "there is room for %u boxes of a device", room);
        const uint32_t granule = convert ? (uint32_t)to_element : alignment(steps);
        out[(*count)++] = (kvf_cuda_box){.from = side_of(from, row, units, from_cell),
                                         .sums = sums_of(sums, row, to_cell),
                                         .units = kvf_divisor_of((uint32_t)units),
                                         .items = (uint32_t)(now * units),
                                         .first_tile = *tile,
                                         .to_bytes = (uint16_t)granule,
                                         .from_type = convert ? device_type(from->type) : KVF_CUDA_BYTES,
                                         .to_type = convert ? device_type(to) : KVF_CUDA_BYTES};
        *tile += (uint32_t)rounds(now * units, KVF_TILE_THREADS);
    }
    return KVF_OK;
}
