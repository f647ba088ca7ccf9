/*
 * Measures the cost of copying on this machine: with one thread, on memory of its own that is larger than the inner
 * caches, in bounded time.
 *
 * A copy takes a time for each piece and a time for each byte. Both follow from copying the same bytes in short pieces
 * and in long ones, placed like the cells of two ranks with different orders of heads and tokens.
 */
#ifndef KVF_KERNEL_YARDSTICK_H
#define KVF_KERNEL_YARDSTICK_H

#include <kvferry/request.h>

#include "base/base.h"

typedef struct kvf_copy_price {
    double ns_per_piece, ns_per_byte;
} kvf_copy_price;

typedef struct kvf_yardstick {
    unsigned char *from, *to; /**< `bytes` bytes each, backed by physical memory */
    uint64_t bytes;
    uint64_t deadline_ns; /**< on the monotonic clock: nothing new is begun after it */
    /** The cost of copying runs when both sides are mapped, as the fabrics do it; 0 per byte: there was no time to
     * measure it. */
    kvf_copy_price mapped;
} kvf_yardstick;

/** Allocates the memory, and measures `mapped`. @return KVF_OK, KVF_E_NOMEM */
kvf_status kvf_yardstick_open(kvf_yardstick *yardstick, uint64_t budget_ns);
void kvf_yardstick_close(kvf_yardstick *yardstick);

/** Copies runs from `from` to `to`. @return false: this machine does not allow it */
typedef bool (*kvf_yardstick_copy)(const kvf_yardstick *yardstick, const kvf_run *runs, size_t count);

/** Measures a copy of runs. @return whether `out` was filled in: the copy is allowed, and there was time */
bool kvf_yardstick_runs(const kvf_yardstick *yardstick, kvf_yardstick_copy copy, kvf_copy_price *out);

/** Measures gathering and scattering, and fills in their average. @return as kvf_yardstick_runs() */
bool kvf_yardstick_boxes(const kvf_yardstick *yardstick, kvf_copy_price *out);

#endif
