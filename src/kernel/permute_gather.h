/*
 * Gathering cells, with vectors of any width. A file includes this one after permute_vectors.h, and gets
 * gather_cells(), copy_aside(), put_aside() and bring_back().
 */
/* ---- gathering small cells ------------------------------------------------------------------- */

/*
 * Cells of n = 1, 2, 4 or 8 bytes are transposed in registers, `side` = 16/n of them in each 16 bytes.
 *
 * Number the cells of 2^r registers by (register, cell in 16 bytes), in bits. Interleaving register i with
 * register i + half, cell by cell, into registers 2i and 2i + 1 rotates the bits of that number left by one. So
 * after as many rounds as the cell has bits, register and cell have changed places: whatever the shape,
 * transposing is rotating.
 */
ALWAYS VECTOR low_halves(size_t n, VECTOR a, VECTOR b) {
    return n == 1 ? low1(a, b) : n == 2 ? low2(a, b) : n == 4 ? low4(a, b) : low8(a, b);
}

ALWAYS VECTOR high_halves(size_t n, VECTOR a, VECTOR b) {
    return n == 1 ? high1(a, b) : n == 2 ? high2(a, b) : n == 4 ? high4(a, b) : high8(a, b);
}

/* Rotates the numbers of the cells in `count` registers by log2(`turns`) bits. */
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

/* One matrix: `deep` rows of `wide` cells become `wide` rows of `deep` cells. */
typedef struct matrix {
    unsigned char *to, *end; /* nothing is written from `end` on */
    const unsigned char *from;
    size_t wide, deep, from_stride;
} matrix;

/* Writes a column of `bytes` bytes. It may write 16, because later columns overwrite the excess; not past the end. */
ALWAYS void store_column(const matrix *m, unsigned char *to, __m128i column, size_t bytes) {
    if (bytes == 16 || m->end - to >= 16) {
        _mm_storeu_si128((__m128i *)(void *)to, column);
        return;
    }
    unsigned char exact[16];
    _mm_storeu_si128((__m128i *)(void *)exact, column);
    copy_tiny(to, exact, bytes);
}

#define STORE_TILE(l)                                                                                        \
    if ((l) < VECTOR_BYTES / 16)                                                                             \
        for (size_t i = 0; i < side && column < columns; i++, column++)                                      \
            store_column(m, m->to + ((first_column + column) * m->deep + first_row) * n, lane(rows[i], l),   \
                         height * n);

/*
 * The tiles at one place, `height` <= 16/n rows high. Less than 16/n only if the matrix is no deeper: the next
 * column then overwrites a store's excess, because columns are stored in order.
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

/* The last tiles of a row or column overlap those before them, so that they are whole if possible. */
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

/* A matrix of 2, 4 or 8 long rows, fewer than `side`: interleaves them. */
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

/* A matrix of many contiguous rows of 2, 4, 8 or 16 cells: separates the columns. */
ALWAYS void transpose_ribbon(size_t n, const matrix *m, size_t wide) {
    const size_t side = 16 / n, down = VECTOR_BYTES / n;
    VECTOR columns[16];
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
    bool ribbon = m->deep * n >= VECTOR_BYTES && m->from_stride == m->wide * n;
    if (strip && m->deep == 2 && n <= 4)
        transpose_strip(n, m, 2);
    else if (strip && m->deep == 4 && n <= 2)
        transpose_strip(n, m, 4);
    else if (strip && m->deep == 8 && n == 1)
        transpose_strip(n, m, 8);
    else if (ribbon && m->wide == 2)
        transpose_ribbon(n, m, 2);
    else if (ribbon && m->wide == 4)
        transpose_ribbon(n, m, 4);
    else if (ribbon && m->wide == 8)
        transpose_ribbon(n, m, 8);
    else if (ribbon && m->wide == 16)
        transpose_ribbon(n, m, 16);
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

/* A row of cells of n bytes, `apart` bytes apart. Copies `most` bytes for each; the next cell overwrites the
 * excess. `most` is a constant; 0: copies exactly n bytes. */
ALWAYS void gather_cells_of(unsigned char *to, const unsigned char *from, size_t count, size_t apart,
                            size_t n, size_t most) {
    for (size_t k = 0; k < count; k++, to += n, from += apart) {
        if (most)
            memcpy(to, from, most);
        else if (n >= VECTOR_BYTES)
            copy_long(to, from, n);
        else
            copy_short(to, from, n);
    }
}

/* Cells of `most`/2 to `most` bytes, a constant, or of any size if it is 0. */
ALWAYS void gather_each(const kvf_gather *g, unsigned char *to, const unsigned char *from, size_t most) {
    const size_t n = g->cell_bytes, count = g->count[2], apart = g->from[2], rows = g->count[1];
    for (uint64_t i = 0; i < g->count[0]; i++)
        for (uint64_t j = 0; j < rows; j++, to += count * n) {
            const unsigned char *row = from + i * g->from[0] + j * g->from[1];
            if (i + 1 < g->count[0] || j + 1 < rows || n == most)
                gather_cells_of(to, row, count, apart, n, most);
            else /* nothing behind the block may be overwritten */
                gather_cells_of(to, row, count, apart, n, 0);
        }
}

/* A row of cells of 16 bytes that are `apart` bytes apart. The last vector overlaps the one before it. */
ALWAYS void gather_row(unsigned char *to, const unsigned char *from, size_t count, size_t apart) {
    const size_t lanes = VECTOR_BYTES / 16;
    unsigned char *last = to + (count - lanes) * 16;
    for (; to < last; to += VECTOR_BYTES, from += lanes * apart)
        store(to, load_lanes(from, apart));
    store(last, load_lanes(from - (size_t)(to - last) / 16 * apart, apart));
}

static void gather_lanes(const kvf_gather *g, unsigned char *to, const unsigned char *from) {
    const size_t count = g->count[2], apart = g->from[2];
    for (uint64_t i = 0; i < g->count[0]; i++) {
        const unsigned char *row = from + i * g->from[0];
        for (uint64_t j = 0; j < g->count[1]; j++, row += g->from[1], to += count * 16) {
            if (count == 8)
                gather_row(to, row, 8, apart);
            else
                gather_row(to, row, count, apart);
        }
    }
}

static void gather_cells(const kvf_gather *g, unsigned char *to, const unsigned char *from) {
    size_t n = g->cell_bytes;
    if (n <= 8 && (n & (n - 1)) == 0 && g->from[1] == n)
        gather_tiles(g, to, from);
    else if (n == 16 && g->count[2] >= VECTOR_BYTES / 16)
        gather_lanes(g, to, from);
    else if (n > 64)
        gather_each(g, to, from, 0);
    else if (n > 32)
        gather_each(g, to, from, 64);
    else if (n > 16)
        gather_each(g, to, from, 32);
    else if (n > 8)
        gather_each(g, to, from, 16);
    else if (n > 4)
        gather_each(g, to, from, 8);
    else if (n > 2)
        gather_each(g, to, from, 4);
    else
        gather_each(g, to, from, 2);
}

/* ---- the copy aside -------------------------------------------------------------------------- */

/* Copies a block aside, and prefetches the next one meanwhile, because there is time for it. */
static void copy_aside(unsigned char *aside, const unsigned char *block, size_t bytes,
                       const unsigned char *next) {
    size_t at = 0;
    for (; at + 64 <= bytes; at += 64) {
        for (size_t part = 0; part < 64; part += VECTOR_BYTES)
            store(aside + at + part, load(block + at + part));
        ask_for(next, at);
    }
    memcpy(aside + at, block + at, bytes - at);
}

/* ---- gathering in two halves ----------------------------------------------------------------- */

/*
 * `deep` rows (2, 4, 8 or 16) that are far apart are interleaved on their way aside, and the result is put in
 * order on its way back: each half shuffles only as much as it can while it waits for memory.
 *
 * After log2(deep) rounds on `deep` vectors, the l-th 16 bytes of vector i hold columns whose cells are
 * complete: they are piece l*deep + i of the output.
 */
#define MOST_DEEP 16u

static bool fits_halves(const kvf_gather *g) {
    uint64_t n = g->cell_bytes, deep = g->count[2];
    return g->block_count == 1 && n <= 8 && (n & (n - 1)) == 0 && g->from[1] == n && deep <= MOST_DEEP &&
           (deep & (deep - 1)) == 0 && deep >= VECTOR_BYTES / 16 && g->count[1] * n % VECTOR_BYTES == 0;
}

ALWAYS void interleave_rows(size_t n, size_t deep, const kvf_gather *g, unsigned char *aside,
                            const unsigned char *block, const unsigned char *next) {
    VECTOR rows[MOST_DEEP];
    size_t asked = 0;
    for (uint64_t i = 0; i < g->count[0]; i++)
        for (uint64_t column = 0; column < g->count[1];
             column += VECTOR_BYTES / n, aside += deep * VECTOR_BYTES) {
            const unsigned char *from = block + i * g->from[0] + column * n;
            for (size_t row = 0; row < deep; row++)
                rows[row] = load(from + row * g->from[2]);
            turn_registers(n, rows, deep, deep);
            for (size_t row = 0; row < deep; row++)
                store(aside + row * VECTOR_BYTES, rows[row]);
            for (size_t line = 0; line < deep * VECTOR_BYTES; line += 64, asked += 64)
                ask_for(next, asked);
        }
}

ALWAYS void interleave_cells(size_t n, const kvf_gather *g, unsigned char *aside, const unsigned char *block,
                             const unsigned char *next) {
    switch (g->count[2]) {
    case 2:
        interleave_rows(n, 2, g, aside, block, next);
        break;
    case 4:
        interleave_rows(n, 4, g, aside, block, next);
        break;
    case 8:
        interleave_rows(n, 8, g, aside, block, next);
        break;
    default:
        interleave_rows(n, 16, g, aside, block, next);
    }
}

static bool put_aside(const kvf_gather *g, unsigned char *aside, const unsigned char *block,
                      const unsigned char *next) {
    if (!fits_halves(g))
        return false;
    switch (g->cell_bytes) {
    case 1:
        interleave_cells(1, g, aside, block, next);
        break;
    case 2:
        interleave_cells(2, g, aside, block, next);
        break;
    case 4:
        interleave_cells(4, g, aside, block, next);
        break;
    default:
        interleave_cells(8, g, aside, block, next);
    }
    return true;
}

ALWAYS void order_pieces(size_t deep, const kvf_gather *g, unsigned char *block, const unsigned char *aside) {
    const size_t lanes = VECTOR_BYTES / 16, together = deep * VECTOR_BYTES;
    for (uint64_t at = 0; at < g->block_bytes; at += together) {
        for (size_t piece = 0; piece < deep * lanes; piece += lanes) /* lanes divides deep */
            store(block + at + piece * 16,
                  load_lanes(aside + at + piece % deep * VECTOR_BYTES + piece / deep * 16, VECTOR_BYTES));
    }
}

static void bring_back(const kvf_gather *g, unsigned char *block, const unsigned char *aside) {
    switch (g->count[2]) {
    case 2:
        order_pieces(2, g, block, aside);
        break;
    case 4:
        order_pieces(4, g, block, aside);
        break;
    case 8:
        order_pieces(8, g, block, aside);
        break;
    default:
        order_pieces(16, g, block, aside);
    }
}
