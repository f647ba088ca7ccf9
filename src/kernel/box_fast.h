/*
 * Moving boxes fast, written once for all instruction sets. A file that includes this one first defines
 *
 *     stream_lines(to, from, lines)   writes whole cache lines past the caches, if possible; `to` is at a line's begin
 *     end_streaming()                 makes them visible before later stores
 *
 * and gets gather_fast() and scatter_fast(). How a box is copied depends on how its cells lie in memory:
 *
 *   - pieces, units and rows that touch become longer runs, up to all rows of a block
 *   - loops are ordered to read upwards, which processors foresee; they do not foresee the next block, so its lines are
 *     prefetched one by one while this one is copied
 *   - where rows lie closer than pieces, as in keys stored channel by channel, a block of a unit is a matrix to be
 *     transposed: in registers, in squares of 16 bytes a side, and through a buffer in the first-level cache if the
 *     result goes past the caches
 */
#include "kernel/box.h"

#define ALWAYS static inline __attribute__((always_inline))
#define LINE ((size_t)64)
#define ASIDE_BYTES 16384u         /* half of a first-level cache */
#define ASK_MOST_BYTES (64u << 10) /* of a block: the processor foresees most of a longer one */
#define STREAM_LEAST (4 * LINE)    /* shorter runs that begin inside a line contain few whole lines */

/* ---- runs ------------------------------------------------------------------------------------- */

/* Three loops, the outermost first, over runs of bytes. */
typedef struct nest {
    uint64_t count[3], to[3], from[3];
    uint64_t bytes;
} nest;

/* Into the second level: on their way to the first, lines take buffers that stores past the caches need, too. */
ALWAYS void ask_for(const unsigned char *memory, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += LINE)
        __builtin_prefetch(memory + at, 0, 2);
}

/* The whole lines of a run go past the caches. */
static void stream_run(unsigned char *to, const unsigned char *from, size_t bytes) {
    const size_t head = (size_t)kvf_min_u64(bytes, -(uintptr_t)to % LINE);
    memcpy(to, from, head);
    const size_t lines = (bytes - head) / LINE;
    stream_lines(to + head, from + head, lines);
    const size_t done = head + lines * LINE;
    memcpy(to + done, from + done, bytes - done);
}

typedef enum run_way { RUN_COPY, RUN_LINES, RUN_STREAM } run_way;

/* `bytes`, `way` and `asks` are constants; `next` is the source of the copy after this one. */
ALWAYS void copy_nest(const nest *n, unsigned char *to, const unsigned char *from, const unsigned char *next,
                      size_t bytes, run_way way, bool asks) {
    const uint64_t count = n->count[2], to_step = n->to[2], from_step = n->from[2];
    for (uint64_t i = 0; i < n->count[0]; i++)
        for (uint64_t j = 0; j < n->count[1]; j++) {
            const uint64_t at = i * n->from[0] + j * n->from[1];
            unsigned char *out = to + i * n->to[0] + j * n->to[1];
            /* cppcheck-suppress nullPointerArithmetic ; where nothing is asked for, it is not added to */
            const unsigned char *in = from + at, *ask = asks ? next + at : from;
            for (uint64_t k = 0; k < count; k++, out += to_step, in += from_step, ask += from_step) {
                if (asks)
                    ask_for(ask, bytes);
                if (way == RUN_LINES)
                    stream_lines(out, in, bytes / LINE);
                else if (way == RUN_STREAM)
                    stream_run(out, in, bytes);
                else
                    memcpy(out, in, bytes);
            }
        }
}

#define NEST(size, way)                                                                                      \
    do {                                                                                                     \
        if (next)                                                                                            \
            copy_nest(n, to, from, next, size, way, true);                                                   \
        else                                                                                                 \
            copy_nest(n, to, from, from, size, way, false);                                                  \
    } while (0)

#define FIXED(size)                                                                                          \
    case size:                                                                                               \
        copy_nest(n, to, from, NULL, size, RUN_COPY, false);                                                 \
        return

static void copy_runs(const nest *n, unsigned char *to, const unsigned char *from, const unsigned char *next,
                      bool past) {
    const uint64_t line_bits = (uintptr_t)to | n->bytes | n->to[0] | n->to[1] | n->to[2];
    if (past && line_bits % LINE == 0) {
        if (n->bytes == LINE)
            NEST(LINE, RUN_LINES);
        else if (n->bytes == 2 * LINE)
            NEST(2 * LINE, RUN_LINES);
        else if (n->bytes == 4 * LINE)
            NEST(4 * LINE, RUN_LINES);
        else
            NEST(n->bytes, RUN_LINES);
        return;
    }
    if (past && n->bytes >= STREAM_LEAST) {
        NEST(n->bytes, RUN_STREAM);
        return;
    }
    switch (n->bytes) {
        FIXED(1);
        FIXED(2);
        FIXED(4);
        FIXED(8);
        FIXED(16);
        FIXED(32);
        FIXED(64);
        FIXED(128);
        FIXED(256);
    default:
        NEST(n->bytes, RUN_COPY);
    }
}

/* ---- transposing ------------------------------------------------------------------------------ */

/* `rows` rows of `columns` contiguous elements become columns. */
typedef struct matrix {
    unsigned char *to;
    const unsigned char *from;
    uint64_t to_stride, from_stride; /* between columns, which become rows; between rows */
    uint64_t rows, columns;
} matrix;

ALWAYS void transpose_edge(size_t bytes, const matrix *m, uint64_t row, uint64_t rows, uint64_t column,
                           uint64_t columns) {
    for (uint64_t r = row; r < rows; r++)
        for (uint64_t c = column; c < columns; c++)
            memcpy(m->to + c * m->to_stride + r * bytes, m->from + r * m->from_stride + c * bytes, bytes);
}

/*
 * A square of 16 bytes a side. Number its elements by (register, place): interleaving the registers of the first half
 * with those of the second rotates the bits of that number left by one, so after as many rounds as the place has bits,
 * the two have changed places. Rows at large powers of two map to the same few sets of the first-level cache, so on the
 * side whose rows lie farther apart, lines are finished before others are begun.
 */
#define TRANSPOSE(name, type, side, LOW, HIGH)                                                               \
    typedef type name##_vector __attribute__((vector_size(16)));                                             \
    ALWAYS void name##_square(unsigned char *to, uint64_t to_stride, const unsigned char *from,              \
                              uint64_t from_stride) {                                                        \
        name##_vector rows[side], turned[side];                                                              \
        for (size_t i = 0; i < (side); i++)                                                                  \
            memcpy(&rows[i], from + i * from_stride, 16);                                                    \
        for (size_t round = 1; round < (side); round *= 2) {                                                 \
            for (size_t i = 0; i < (side) / 2; i++) {                                                        \
                turned[2 * i] = LOW(rows[i], rows[i + (side) / 2]);                                          \
                turned[2 * i + 1] = HIGH(rows[i], rows[i + (side) / 2]);                                     \
            }                                                                                                \
            for (size_t i = 0; i < (side); i++)                                                              \
                rows[i] = turned[i];                                                                         \
        }                                                                                                    \
        for (size_t i = 0; i < (side); i++)                                                                  \
            memcpy(to + i * to_stride, &rows[i], 16);                                                        \
    }                                                                                                        \
    static void name(const matrix *m) {                                                                      \
        const uint64_t rows = m->rows / (side) * (side), columns = m->columns / (side) * (side);             \
        const uint64_t across = m->from_stride > m->to_stride ? LINE / sizeof(type) : (side);                \
        for (uint64_t line = 0; line < columns; line += across) {                                            \
            const uint64_t end = kvf_min_u64(columns, line + across);                                        \
            for (uint64_t r = 0; r < rows; r += (side))                                                      \
                for (uint64_t c = line; c < end; c += (side))                                                \
                    name##_square(m->to + c * m->to_stride + r * sizeof(type), m->to_stride,                 \
                                  m->from + r * m->from_stride + c * sizeof(type), m->from_stride);          \
        }                                                                                                    \
        transpose_edge(sizeof(type), m, 0, rows, columns, m->columns);                                       \
        transpose_edge(sizeof(type), m, rows, m->rows, 0, m->columns);                                       \
    }

#define LOW1(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH1(a, b)                                                                                          \
    __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LOW2(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH2(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LOW4(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define HIGH4(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#define LOW8(a, b) __builtin_shufflevector(a, b, 0, 2)
#define HIGH8(a, b) __builtin_shufflevector(a, b, 1, 3)

TRANSPOSE(transpose1, uint8_t, 16, LOW1, HIGH1)
TRANSPOSE(transpose2, uint16_t, 8, LOW2, HIGH2)
TRANSPOSE(transpose4, uint32_t, 4, LOW4, HIGH4)
TRANSPOSE(transpose8, uint64_t, 2, LOW8, HIGH8)

static void transpose(const matrix *m, uint64_t bytes) {
    if (bytes == 1)
        transpose1(m);
    else if (bytes == 2)
        transpose2(m);
    else if (bytes == 4)
        transpose4(m);
    else
        transpose8(m);
}

/* The same past the caches: makes as many new rows as fit in a buffer, then streams them. */
static void transpose_past(const matrix *m, uint64_t bytes) {
    unsigned char room[ASIDE_BYTES + LINE], *aside = room + -(uintptr_t)room % LINE;
    const uint64_t row = m->rows * bytes, at_once = ASIDE_BYTES / row;
    for (uint64_t c = 0; c < m->columns; c += at_once) {
        const uint64_t columns = kvf_min_u64(at_once, m->columns - c);
        const matrix part = {.to = aside,
                             .from = m->from + c * bytes,
                             .to_stride = row,
                             .from_stride = m->from_stride,
                             .rows = m->rows,
                             .columns = columns};
        transpose(&part, bytes);
        unsigned char *to = m->to + c * m->to_stride;
        if (m->to_stride == row) {
            stream_run(to, aside, columns * row);
            continue;
        }
        for (uint64_t i = 0; i < columns; i++)
            stream_run(to + i * m->to_stride, aside + i * row, row);
    }
}

/* Whether new rows are long enough, and not too long, for the buffer. */
static bool goes_past(const matrix *m, uint64_t bytes) {
    const uint64_t row = m->rows * bytes;
    return row <= ASIDE_BYTES &&
           (row >= STREAM_LEAST || (m->to_stride == row && row * m->columns >= STREAM_LEAST));
}

/* ---- boxes ------------------------------------------------------------------------------------ */

/* The rows of a box that lie in one block. */
typedef struct page {
    unsigned char *memory, *next; /* the first row, and the first row of the block after */
    uint64_t rows;
} page;

static page page_at(const kvf_box *box, uint64_t row) {
    const uint64_t rows =
        kvf_min_u64(box->rows - row, box->block_rows - (box->first_row + row) % box->block_rows);
    page p = {kvf_box_row(box, row), NULL, rows};
    const uint64_t bytes = rows * box->units * box->pieces * box->piece_bytes;
    if (row + rows < box->rows && bytes <= ASK_MOST_BYTES)
        p.next = kvf_box_row(box, row + rows);
    return p;
}

/* The same box with touching pieces of a cell, and touching cells of a row, joined. */
static kvf_box widened(const kvf_box *box) {
    kvf_box b = *box;
    if (b.pieces > 1 && b.piece_stride == b.piece_bytes) {
        b.piece_bytes *= b.pieces;
        b.pieces = 1;
    }
    if (b.pieces == 1 && b.units > 1 && b.unit_stride == b.piece_bytes) {
        b.piece_bytes *= b.units;
        b.units = 1;
    }
    return b;
}

static bool is_matrix(const kvf_box *box, const page *p) {
    const uint64_t bytes = box->piece_bytes;
    return box->pieces > 1 && p->rows > 1 && box->row_stride == bytes &&
           (bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8);
}

/* Loops over the rows, units and pieces of a page; strides are packed on one side. */
static nest nest_of(const kvf_box *box, const page *p, bool gathers) {
    const uint64_t cell = box->pieces * box->piece_bytes, row = box->units * cell;
    if (box->units == 1 && box->pieces == 1 && box->row_stride == box->piece_bytes)
        return (nest){.count = {1, 1, 1}, .bytes = p->rows * row};
    nest n = {.count = {p->rows, box->units, box->pieces}, .bytes = box->piece_bytes};
    uint64_t *packed = gathers ? n.to : n.from, *memory = gathers ? n.from : n.to;
    packed[0] = row;
    packed[1] = cell;
    packed[2] = box->piece_bytes;
    memory[0] = box->row_stride;
    memory[1] = box->unit_stride;
    memory[2] = box->piece_stride;
    for (size_t i = 0; i < 3; i++) /* a loop of one step has no stride that could count for alignment */
        if (n.count[i] == 1)
            n.to[i] = n.from[i] = 0;
    return n;
}

static void swap_loops(nest *n, size_t a, size_t b) {
    const nest old = *n;
    n->count[a] = old.count[b], n->to[a] = old.to[b], n->from[a] = old.from[b];
    n->count[b] = old.count[a], n->to[b] = old.to[a], n->from[b] = old.from[a];
}

/* Orders the loops so that reads go upwards; loops of one step come first. */
static void read_upwards(nest *n) {
    for (size_t pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < 2; i++)
            if (n->count[i] > 1 && (n->count[i + 1] == 1 || n->from[i] < n->from[i + 1]))
                swap_loops(n, i, i + 1);
}

/* A unit of a page as a matrix: pieces by rows in memory, rows by pieces in packed form. */
static matrix matrix_of(const kvf_box *box, const page *p, uint64_t unit, unsigned char *out,
                        const unsigned char *in) {
    const uint64_t cell = box->pieces * box->piece_bytes, row = box->units * cell;
    unsigned char *memory = p->memory + unit * box->unit_stride;
    matrix m = {.to_stride = row, .from_stride = box->piece_stride, .rows = box->pieces, .columns = p->rows};
    m.from = memory;
    if (out) {
        m.to = out + unit * cell;
        return m;
    }
    m = (matrix){.to_stride = box->piece_stride, .from_stride = row, .rows = p->rows, .columns = box->pieces};
    m.to = memory;
    m.from = in + unit * cell;
    return m;
}

/* Prefetches the rows of the next matrix, at `from`, which has the same shape. */
static void ask_for_rows(const matrix *like, const unsigned char *from, uint64_t bytes) {
    for (uint64_t r = 0; r < like->rows; r++)
        ask_for(from + r * like->from_stride, like->columns * bytes);
}

static void move_matrices(const kvf_box *box, const page *p, unsigned char *out, const unsigned char *in,
                          bool past) {
    const uint64_t bytes = box->piece_bytes, row = box->units * box->pieces * bytes;
    for (uint64_t u = 0; u < box->units; u++) {
        const matrix m = matrix_of(box, p, u, out, in);
        if (u + 1 < box->units)
            ask_for_rows(&m, matrix_of(box, p, u + 1, out, in).from, bytes);
        else if (p->next)
            ask_for_rows(&m, out ? p->next : in + p->rows * row, bytes);
        if (past && goes_past(&m, bytes))
            transpose_past(&m, bytes);
        else
            transpose(&m, bytes);
    }
}

static void move_fast(const kvf_box *given, unsigned char *out, const unsigned char *in, bool past) {
    const kvf_box box = widened(given);
    const uint64_t row_bytes = box.units * box.pieces * box.piece_bytes;
    for (uint64_t row = 0; row < box.rows;) {
        const page p = page_at(&box, row);
        if (is_matrix(&box, &p)) {
            move_matrices(&box, &p, out, in, past);
        } else {
            nest n = nest_of(&box, &p, out != NULL);
            read_upwards(&n);
            if (out)
                copy_runs(&n, out, p.memory, p.next, past);
            else
                copy_runs(&n, p.memory, in, NULL, past);
        }
        out = out ? out + p.rows * row_bytes : NULL;
        in = in ? in + p.rows * row_bytes : NULL;
        row += p.rows;
    }
    if (past)
        end_streaming();
}

static void gather_fast(const kvf_box *box, void *to, bool past) {
    move_fast(box, to, NULL, past);
}

static void scatter_fast(const kvf_box *box, const void *from, bool past) {
    move_fast(box, NULL, from, past);
}
