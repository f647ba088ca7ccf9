#include "kernel/yardstick.h"

#include <sys/mman.h>
#include <time.h>

#include "base/clock.h"
#include "kernel/box.h"
#include "kernel/kernel.h"

#define BYTES                                                                                                \
    ((size_t)2 << 20) /* of each side: together larger than second-level caches, and still quick to touch */
#define SHORT_PIECE 128u  /* a short piece in practice: one head of a token */
#define LONG_PIECE 16384u /* a long piece: longer ones save nothing */
#define ROWS 16u          /* in a block, each of UNITS pieces */
#define UNITS 2u
#define BLOCK_PIECES ((uint64_t)ROWS * UNITS)
#define RUNS_AT_ONCE 1024u
#define TRIES 2           /* the shorter counts: the other may have been disturbed */
#define ENOUGH_NS 2000000 /* a measurement that takes this long is not repeated */

static bool is_over(const kvf_yardstick *yardstick) {
    return kvf_now(&kvf_monotonic) >= yardstick->deadline_ns;
}

/* One kind of copy to measure. */
typedef struct measured {
    const kvf_yardstick *yardstick;
    kvf_yardstick_copy copy; /* of runs; NULL: boxes */
    /* Copies all bytes in pieces of `piece_bytes`. False: not allowed, or no time left. */
    bool (*all)(const struct measured *m, uint64_t piece_bytes);
} measured;

/* Processor time of this thread: time taken by others does not count. */
static double processor_ns(void) {
    struct timespec time = {0};
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

/* The shortest of the tries, in nanoseconds; 0: not measured. */
static double time_of(const measured *m, uint64_t piece_bytes) {
    double shortest = 0;
    for (int i = 0; i < TRIES && shortest < ENOUGH_NS; i++) {
        const double begin = processor_ns();
        if (!m->all(m, piece_bytes))
            return 0;
        const double ns = processor_ns() - begin;
        shortest = shortest == 0 || ns < shortest ? ns : shortest;
    }
    return shortest;
}

/* Solves two equations: time = pieces x ns_per_piece + bytes x ns_per_byte. Both prices stay above 0. */
static bool measure(const measured *m, kvf_copy_price *out) {
    const double bytes = (double)m->yardstick->bytes;
    const double many = bytes / SHORT_PIECE, few = bytes / LONG_PIECE;
    const double in_short = time_of(m, SHORT_PIECE);
    const double in_long = in_short > 0 ? time_of(m, LONG_PIECE) : 0;
    if (!(in_short > 0) || !(in_long > 0))
        return false;
    const double piece = (in_short - in_long) / (many - few);
    out->ns_per_piece = piece > 0.1 ? piece : 0.1;
    const double byte = (in_long - few * out->ns_per_piece) / bytes;
    out->ns_per_byte = byte > 1e-3 ? byte : 1e-3;
    return true;
}

/* ---- runs ------------------------------------------------------------------------------------ */

/* The number on the other side of piece i of one side: the other side has blocks in descending order, and units outside
 * rows. */
static uint64_t other_place(uint64_t i, uint64_t pieces) {
    const uint64_t blocks = pieces / BLOCK_PIECES, at = i % BLOCK_PIECES;
    return (blocks - 1 - i / BLOCK_PIECES) * BLOCK_PIECES + at % ROWS * UNITS + at / ROWS;
}

static bool copy_all(const measured *m, uint64_t piece_bytes) {
    const uint64_t pieces = m->yardstick->bytes / piece_bytes;
    kvf_run runs[RUNS_AT_ONCE];
    for (uint64_t first = 0; first < pieces;) {
        size_t count = 0;
        for (; count < RUNS_AT_ONCE && first < pieces; first++)
            runs[count++] = (kvf_run){.local_offset = other_place(first, pieces) * piece_bytes,
                                      .remote_offset = first * piece_bytes,
                                      .bytes = piece_bytes};
        if (is_over(m->yardstick) || !m->copy(m->yardstick, runs, count))
            return false;
    }
    return true;
}

bool kvf_yardstick_runs(const kvf_yardstick *yardstick, kvf_yardstick_copy copy, kvf_copy_price *out) {
    const measured m = {yardstick, copy, copy_all};
    return measure(&m, out);
}

/* ---- boxes ----------------------------------------------------------------------------------- */

/* Some blocks at a time, as slots are filled, once each way. */
static bool move_boxes(const measured *m, uint64_t piece_bytes) {
    const kvf_yardstick *yardstick = m->yardstick;
    const uint64_t block_bytes = BLOCK_PIECES * piece_bytes;
    const uint32_t blocks = (uint32_t)(yardstick->bytes / block_bytes);
    const uint32_t together = blocks < 32 ? 1 : 32;
    for (uint32_t first = 0; first < blocks; first += together) {
        uint32_t ids[32];
        for (uint32_t i = 0; i < together; i++)
            ids[i] = blocks - 1 - first - i;
        const kvf_box box = {.memory = yardstick->from,
                             .block_stride = block_bytes,
                             .row_stride = piece_bytes,
                             .unit_stride = ROWS * piece_bytes,
                             .piece_stride = piece_bytes,
                             .blocks = ids,
                             .kernel_blocks = 1,
                             .block_rows = ROWS,
                             .rows = (uint64_t)together * ROWS,
                             .units = UNITS,
                             .pieces = 1,
                             .piece_bytes = piece_bytes};
        unsigned char *packed = yardstick->to + first * block_bytes;
        if (is_over(yardstick))
            return false;
        kvf_kernel_gather(&box, packed, true);
        kvf_kernel_scatter(&box, packed, true);
    }
    return true;
}

bool kvf_yardstick_boxes(const kvf_yardstick *yardstick, kvf_copy_price *out) {
    const measured m = {yardstick, NULL, move_boxes};
    if (!measure(&m, out))
        return false;
    out->ns_per_piece /= 2;
    out->ns_per_byte /= 2;
    return true;
}

/* ---- opening --------------------------------------------------------------------------------- */

static bool copy_mapped(const kvf_yardstick *yardstick, const kvf_run *runs, size_t count) {
    unsigned char *const to = yardstick->to, *const from = yardstick->from;
    const kvf_copy_bases bases = {&to, &from};
    kvf_kernel_copy_runs(KVF_COPY_TO_LOCAL, bases, runs, count, yardstick->bytes);
    return true;
}

kvf_status kvf_yardstick_open(kvf_yardstick *yardstick, uint64_t budget_ns) {
    *yardstick = (kvf_yardstick){.bytes = BYTES, .deadline_ns = kvf_now(&kvf_monotonic) + budget_ns};
    /* Not from the caller's allocator: close() returns it to the system at once. */
    void *memory = mmap(NULL, 2 * BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return kvf_nomem("measuring");
    yardstick->from = memory;
    yardstick->to = yardstick->from + BYTES;
    for (uint64_t page = 0; page < 2 * BYTES; page += 4096)
        yardstick->from[page] = 1;
    (void)kvf_yardstick_runs(yardstick, copy_mapped, &yardstick->mapped);
    return KVF_OK;
}

void kvf_yardstick_close(kvf_yardstick *yardstick) {
    if (yardstick->from)
        (void)munmap(yardstick->from, 2 * BYTES);
    yardstick->from = yardstick->to = NULL;
}
