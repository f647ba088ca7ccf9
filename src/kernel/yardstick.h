/*
 * What copying costs on this machine: measured by one thread, on memory of its own that is larger than the inner caches,
 * in bounded time.
 *
 * Copies take a time for each piece and one for each byte. Both follow from copying as many bytes in short pieces and in
 * long ones, that lie as cells of two ranks do whose heads and tokens are in other orders.
 */
#ifndef KVF_KERNEL_YARDSTICK_H
#define KVF_KERNEL_YARDSTICK_H

#include <kvferry/request.h>

#include "base/base.h"

typedef struct kvf_copy_price {
    double ns_per_piece, ns_per_byte;
} kvf_copy_price;

typedef struct kvf_yardstick {
    unsigned char *from, *to; /**< so many bytes each, which are there to be touched */
    uint64_t bytes;
    uint64_t deadline_ns; /**< of the machine's clock: nothing new is begun after it */
    /** What copying runs costs where both sides are mapped, as the fabrics do it; 0 a byte: there was no time to measure
     * it. */
    kvf_copy_price mapped;
} kvf_yardstick;

/** Allocates what is copied, and measures `mapped`. @return KVF_OK, KVF_E_NOMEM */
kvf_status kvf_yardstick_open(kvf_yardstick *yardstick, uint64_t budget_ns);
void kvf_yardstick_close(kvf_yardstick *yardstick);

/** Copies runs from `from` to `to`. @return false: this machine does not allow it */
typedef bool (*kvf_yardstick_copy)(const kvf_yardstick *yardstick, const kvf_run *runs, size_t count);

/** Measures it; `out` is filled in where there was time for it. @return whether it was */
bool kvf_yardstick_runs(const kvf_yardstick *yardstick, kvf_yardstick_copy copy, kvf_copy_price *out);

/** Measures gathering and scattering: what one of the two takes on the average. */
bool kvf_yardstick_boxes(const kvf_yardstick *yardstick, kvf_copy_price *out);

#endif
