/*
 * The loops that touch bytes. Each has a plain version that is obviously right and, where it was measured to
 * be faster, versions for one instruction set; a table chosen once at run time says which is used.
 *
 * Nothing here checks anything: callers have checked every offset before.
 */
#ifndef KVF_KERNEL_H
#define KVF_KERNEL_H

#include <kvferry/request.h>

#include "base/base.h"

/** Where the regions of both sides begin in this process, by region number. */
typedef struct kvf_copy_bases {
    unsigned char *const *to;
    unsigned char *const *from;
} kvf_copy_bases;

/** Which side of a run is `to`. */
typedef enum kvf_copy_way {
    KVF_COPY_TO_LOCAL = 0,
    KVF_COPY_TO_REMOTE = 1,
} kvf_copy_way;

/** One set of loops. */
typedef struct kvf_copy_kernels {
    const char *name; /**< "plain", "avx2" */

    /** Copies runs that do not overlap. Other threads see the bytes in order with later stores. */
    void (*runs)(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *runs, size_t count);

    /** The same for more bytes than the caches should be filled with: written past the caches. */
    void (*stream)(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *runs, size_t count);
} kvf_copy_kernels;

/** Copies runs by the fastest loops of this machine. `bytes` is their sum. Any thread. */
void kvf_kernel_copy_runs(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *runs, size_t count,
                          uint64_t bytes);

/** The sets this machine can run, plain first; NULL past the last. Any thread. */
const kvf_copy_kernels *kvf_kernel_copy_set(uint32_t i);

extern const kvf_copy_kernels kvf_copy_plain;
#if defined(__x86_64__)
extern const kvf_copy_kernels kvf_copy_avx2;
#endif

#endif
