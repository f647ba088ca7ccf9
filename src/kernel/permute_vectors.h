/*
 * The permuting loops, written once for every width of vector. A file that includes this one defines
 *
 *     VECTOR, VECTOR_BYTES           the type and its size, a multiple of 16
 *     load(from), store(to, vector)  at any address
 *     load_lanes(from, distance)     each 16 bytes from `distance` bytes after those before
 *     lane(vector, i)                the i-th 16 bytes; i is a constant
 *     low1 .. low8, high1 .. high8   interleaving the lower or upper halves of each 16 bytes of two vectors
 *
 * and finds gather_cells() and rotate_cells() in it.
 */
#include <immintrin.h>

#include "kernel/permute.h"

#define ALWAYS static inline __attribute__((always_inline))

/* ---- one cell ------------------------------------------------------------------------------------------ */

/* Copies `half` to 2*half bytes; `half` is a constant up to 32. The two copies may overlap. */
ALWAYS void copy_halves(unsigned char *to, const unsigned char *from, size_t bytes, size_t half) {
    memcpy(to, from, half);
    if (bytes > half)
        memcpy(to + bytes - half, from + bytes - half, half);
}

ALWAYS void copy_short(unsigned char *to, const unsigned char *from, size_t bytes) {
    if (bytes >= 32)
        copy_halves(to, from, bytes, 32);
    else if (bytes >= 16)
        copy_halves(to, from, bytes, 16);
    else if (bytes >= 8)
        copy_halves(to, from, bytes, 8);
    else if (bytes >= 4)
        copy_halves(to, from, bytes, 4);
    else if (bytes >= 2)
        copy_halves(to, from, bytes, 2);
    else if (bytes)
        *to = *from;
}

/* At least one vector. */
ALWAYS void copy_long(unsigned char *to, const unsigned char *from, size_t bytes) {
    size_t at = 0;
    for (; at + 4 * VECTOR_BYTES <= bytes; at += 4 * VECTOR_BYTES) {
        VECTOR a = load(from + at), b = load(from + at + VECTOR_BYTES);
        VECTOR c = load(from + at + 2 * VECTOR_BYTES), d = load(from + at + 3 * VECTOR_BYTES);
        store(to + at, a);
        store(to + at + VECTOR_BYTES, b);
        store(to + at + 2 * VECTOR_BYTES, c);
        store(to + at + 3 * VECTOR_BYTES, d);
    }
    for (; at + VECTOR_BYTES <= bytes; at += VECTOR_BYTES)
        store(to + at, load(from + at));
    if (at < bytes)
        store(to + bytes - VECTOR_BYTES, load(from + bytes - VECTOR_BYTES));
}

ALWAYS void copy_cell(unsigned char *to, const unsigned char *from, size_t bytes) {
    if (bytes >= VECTOR_BYTES)
        copy_long(to, from, bytes);
    else
        copy_short(to, from, bytes);
}

/* ---- rotating ------------------------------------------------------------------------------------------ */

/* A page in the loops below; `single` is a constant: whether it is one block. */
ALWAYS unsigned char *find(bool single, unsigned char *const *blocks, kvf_place place, uint64_t at) {
    return (single ? blocks[0] + place : kvf_at_place(blocks, place)) + at;
}

/*
 * While a page is rotated, the next one is brought into the second level cache, line by line in order of
 * address: memory is fastest that way, and the rotation then finds it near, in whatever order.
 */
typedef struct look_ahead {
    unsigned char *const *block; /* of the next page, or NULL */
    const unsigned char *line, *end;
    uint64_t block_bytes;
    uint32_t blocks_left;
} look_ahead;

static bool enter_next_block(look_ahead *ahead) {
    if (!ahead->block || ahead->blocks_left-- == 0)
        return false;
    ahead->line = *ahead->block++;
    ahead->end = ahead->line + ahead->block_bytes;
    return true;
}

ALWAYS void ask_ahead(look_ahead *ahead, size_t bytes) {
    if (ahead->line == ahead->end && !enter_next_block(ahead))
        return;
    const unsigned char *line = ahead->line;
    size_t rest = (size_t)(ahead->end - line);
    ahead->line += bytes < rest ? bytes : rest;
    for (size_t at = 0; at < bytes; at += 64) /* beyond the end it does no harm */
        _mm_prefetch((const char *)((uintptr_t)line + at), _MM_HINT_T1);
}

/* Rotates `bytes` bytes of each cell, from `at` on, one cycle after another. What waits is in `hold`. */
ALWAYS void rotate_piece(bool single, const kvf_rotation *rotation, unsigned char *const *blocks,
                         look_ahead *ahead, uint64_t at, size_t bytes, unsigned char *hold) {
    const kvf_place *place = rotation->places;
    for (size_t cycle = 0; cycle < rotation->cycle_count; cycle++) {
        const kvf_place *last = place + rotation->lengths[cycle] - 1;
        unsigned char *to = find(single, blocks, *place, at);
        copy_cell(hold, to, bytes);
        while (place < last) {
            ask_ahead(ahead, bytes);
            unsigned char *from = find(single, blocks, *++place, at);
            copy_cell(to, from, bytes);
            to = from;
        }
        ask_ahead(ahead, bytes);
        place++;
        copy_cell(to, hold, bytes);
    }
}

/* Cells of a few vectors wait in registers: cycles may be as short as two cells. */
ALWAYS void rotate_vectors(bool single, const kvf_rotation *rotation, unsigned char *const *blocks,
                           look_ahead *ahead, size_t count) {
    const kvf_place *place = rotation->places;
    VECTOR held[8];
    for (size_t cycle = 0; cycle < rotation->cycle_count; cycle++) {
        const kvf_place *last = place + rotation->lengths[cycle] - 1;
        unsigned char *to = find(single, blocks, *place, 0);
        for (size_t i = 0; i < count; i++)
            held[i] = load(to + i * VECTOR_BYTES);
        while (place < last) {
            ask_ahead(ahead, count * VECTOR_BYTES);
            unsigned char *from = find(single, blocks, *++place, 0);
            copy_long(to, from, count * VECTOR_BYTES);
            to = from;
        }
        ask_ahead(ahead, count * VECTOR_BYTES);
        place++;
        for (size_t i = 0; i < count; i++)
            store(to + i * VECTOR_BYTES, held[i]);
    }
}

ALWAYS void rotate_page(bool single, const kvf_rotation *rotation, unsigned char *const *blocks,
                        unsigned char *const *next) {
    look_ahead ahead = {
        .block = next, .block_bytes = rotation->block_bytes, .blocks_left = rotation->block_count};
    switch (rotation->cell_bytes) {
    case 64:
        rotate_vectors(single, rotation, blocks, &ahead, 64 / VECTOR_BYTES);
        return;
    case 128:
        rotate_vectors(single, rotation, blocks, &ahead, 128 / VECTOR_BYTES);
        return;
    case 256:
        rotate_vectors(single, rotation, blocks, &ahead, 256 / VECTOR_BYTES);
        return;
    default:
        for (uint64_t at = 0; at < rotation->cell_bytes; at += KVF_HOLD_BYTES)
            rotate_piece(single, rotation, blocks, &ahead, at,
                         kvf_min_u64(rotation->cell_bytes - at, KVF_HOLD_BYTES), rotation->hold);
    }
}

static void rotate_cells(const kvf_rotation *rotation, unsigned char *const *blocks,
                         unsigned char *const *next) {
    if (rotation->block_count == 1)
        rotate_page(true, rotation, blocks, next);
    else
        rotate_page(false, rotation, blocks, next);
}

/* ---- gathering small cells ----------------------------------------------------------------------------- */

/*
 * Cells of n = 1, 2, 4 or 8 bytes are transposed in registers, `side` = 16/n of them in each 16 bytes.
 *
 * Number the cells of 2^r registers by (register, cell in 16 bytes), in bits. Interleaving register i with
 * register i + half, cell by cell, into registers 2i and 2i + 1 turns the bits of that number left by one. So
 * after as many rounds as there are bits in the second half, both have changed places: whatever the shape,
 * transposing is turning.
 */
ALWAYS VECTOR low_halves(size_t n, VECTOR a, VECTOR b) {
    return n == 1 ? low1(a, b) : n == 2 ? low2(a, b) : n == 4 ? low4(a, b) : low8(a, b);
}

ALWAYS VECTOR high_halves(size_t n, VECTOR a, VECTOR b) {
    return n == 1 ? high1(a, b) : n == 2 ? high2(a, b) : n == 4 ? high4(a, b) : high8(a, b);
}

/* Turns the numbers of the cells in `count` registers as often as 2 goes into `turns`. */
ALWAYS void turn_registers(size_t n, VECTOR *registers, size_t count, size_t turns) {
    VECTOR turned[16];
    for (size_t round = 1; round < turns; round *= 2) {
        for (size_t i = 0; i < count / 2; i++) {
            turned[2 * i] = low_halves(n, registers[i], registers[i + count / 2]);
            turned[2 * i + 1] = high_halves(n, registers[i], registers[i + count / 2]);
        }
        for (size_t i = 0; i < count; i++)
            registers[i] = turned[i];
    }
}

/* One matrix: `wide` cells side by side in memory become rows of `deep` cells. */
typedef struct matrix {
    unsigned char *to, *end; /* nothing is written from `end` on */
    const unsigned char *from;
    size_t wide, deep, from_stride;
} matrix;

/* Writes the 16 bytes of a column: `deep` cells of them count, and others may be written over. */
ALWAYS void store_column(const matrix *m, unsigned char *to, __m128i column, size_t bytes) {
    if (bytes == 16 || m->end - to >= 16) {
        _mm_storeu_si128((__m128i *)(void *)to, column);
        return;
    }
    unsigned char exact[16];
    _mm_storeu_si128((__m128i *)(void *)exact, column);
    copy_short(to, exact, bytes);
}

#define STORE_TILE(l)                                                                                        \
    if ((l) < VECTOR_BYTES / 16)                                                                             \
        for (size_t i = 0; i < side && column < columns; i++, column++)                                      \
            store_column(m, m->to + ((first_column + column) * m->deep + first_row) * n, lane(rows[i], l),   \
                         height * n);

/*
 * The tiles at one place, `height` <= 16/n rows high. Less than 16/n only where the matrix is no deeper: what
 * a store writes too much is then written over by the next column, for columns are stored in order.
 */
ALWAYS void move_tiles(size_t n, const matrix *m, size_t first_row, size_t height, size_t first_column,
                       size_t columns) {
    size_t side = 16 / n, column = 0;
    VECTOR rows[16];
    for (size_t i = 0; i < side; i++)
        rows[i] = load(m->from + (first_row + (i < height ? i : 0)) * m->from_stride + first_column * n);
    turn_registers(n, rows, side, side);
    STORE_TILE(0)
    STORE_TILE(1)
    STORE_TILE(2)
    STORE_TILE(3)
}

/* The last tiles of a row or column lie over those before them, so that they are whole where they can be. */
ALWAYS void transpose_matrix(size_t n, const matrix *m) {
    const size_t side = 16 / n, across = VECTOR_BYTES / n;
    for (size_t row = 0; row < m->deep; row += side) {
        size_t first_row = row + side <= m->deep ? row : m->deep < side ? 0 : m->deep - side;
        for (size_t column = 0; column < m->wide; column += across) {
            size_t first = column + across <= m->wide ? column : m->wide < across ? 0 : m->wide - across;
            size_t columns = m->wide < across ? m->wide : across;
            if (m->deep >= side && columns == across)
                move_tiles(n, m, first_row, side, first, across);
            else
                move_tiles(n, m, first_row, m->deep < side ? m->deep : side, first, columns);
        }
    }
}

#define STORE_STRIP(l)                                                                                       \
    if ((l) < VECTOR_BYTES / 16)                                                                             \
        for (size_t i = 0; i < deep; i++)                                                                    \
            _mm_storeu_si128((__m128i *)(void *)(to + ((l)*deep + i) * 16), lane(rows[i], l));

/* A matrix of few long rows, 2, 4 or 8, fewer than side: interleaved. */
ALWAYS void transpose_strip(size_t n, const matrix *m, size_t deep) {
    const size_t across = VECTOR_BYTES / n;
    VECTOR rows[8];
    for (size_t column = 0; column < m->wide; column += across) {
        size_t first = column + across <= m->wide ? column : m->wide - across;
        unsigned char *to = m->to + first * deep * n;
        for (size_t i = 0; i < deep; i++)
            rows[i] = load(m->from + i * m->from_stride + first * n);
        turn_registers(n, rows, deep, deep);
        STORE_STRIP(0)
        STORE_STRIP(1)
        STORE_STRIP(2)
        STORE_STRIP(3)
    }
}

/* A matrix of many rows of 2, 4 or 8 cells, fewer than side, that lie side by side: taken apart. */
ALWAYS void transpose_ribbon(size_t n, const matrix *m, size_t wide) {
    const size_t side = 16 / n, down = VECTOR_BYTES / n;
    VECTOR columns[8];
    for (size_t row = 0; row < m->deep; row += down) {
        size_t first = row + down <= m->deep ? row : m->deep - down;
        const unsigned char *from = m->from + first * wide * n;
        for (size_t i = 0; i < wide; i++)
            columns[i] = load_lanes(from + i * 16, wide * 16);
        turn_registers(n, columns, wide, side);
        for (size_t i = 0; i < wide; i++)
            store(m->to + (i * m->deep + first) * n, columns[i]);
    }
}

ALWAYS void transpose_any(size_t n, const matrix *m) {
    bool strip = m->deep * n < 16 && m->wide * n >= VECTOR_BYTES;
    bool ribbon = m->wide * n < 16 && m->deep * n >= VECTOR_BYTES && m->from_stride == m->wide * n;
    size_t few = strip ? m->deep : ribbon ? m->wide : 0;
    if (few == 2 && n <= 4)
        strip ? transpose_strip(n, m, 2) : transpose_ribbon(n, m, 2);
    else if (few == 4 && n <= 2)
        strip ? transpose_strip(n, m, 4) : transpose_ribbon(n, m, 4);
    else if (few == 8 && n == 1)
        strip ? transpose_strip(n, m, 8) : transpose_ribbon(n, m, 8);
    else
        transpose_matrix(n, m);
}

static void gather_tiles(const kvf_gather *g, unsigned char *to, const unsigned char *from) {
    matrix m = {.wide = g->count[1], .deep = g->count[2], .from_stride = g->from[2]};
    for (uint64_t i = 0; i < g->count[0]; i++) {
        m.to = to + i * m.wide * m.deep * g->cell_bytes;
        m.end = to + g->block_bytes;
        m.from = from + i * g->from[0];
        switch (g->cell_bytes) {
        case 1:
            transpose_any(1, &m);
            break;
        case 2:
            transpose_any(2, &m);
            break;
        case 4:
            transpose_any(4, &m);
            break;
        default:
            transpose_any(8, &m);
        }
    }
}

/* Cells of `half` to 2*half bytes, a constant, or of any size where it is 0. */
ALWAYS void gather_each(const kvf_gather *g, unsigned char *to, const unsigned char *from, size_t half) {
    size_t n = g->cell_bytes;
    for (uint64_t i = 0; i < g->count[0]; i++)
        for (uint64_t j = 0; j < g->count[1]; j++) {
            const unsigned char *cell = from + i * g->from[0] + j * g->from[1];
            for (uint64_t k = 0; k < g->count[2]; k++, to += n, cell += g->from[2]) {
                if (half)
                    copy_halves(to, cell, n, half);
                else
                    copy_long(to, cell, n);
            }
        }
}

static void gather_cells(const kvf_gather *g, unsigned char *to, const unsigned char *from) {
    size_t n = g->cell_bytes;
    if (n <= 8 && (n & (n - 1)) == 0 && g->from[1] == n)
        gather_tiles(g, to, from);
    else if (n >= 64)
        gather_each(g, to, from, 0);
    else if (n >= 32)
        gather_each(g, to, from, 32);
    else if (n >= 16)
        gather_each(g, to, from, 16);
    else if (n >= 8)
        gather_each(g, to, from, 8);
    else if (n >= 4)
        gather_each(g, to, from, 4);
    else if (n >= 2)
        gather_each(g, to, from, 2);
    else
        gather_each(g, to, from, 1);
}
