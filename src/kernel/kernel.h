/*
 * The loops that touch bytes. Each has a plain version that is obviously right and, where measurements showed a gain,
 * versions for instruction sets; the choice is made at run time.
 *
 * These functions check nothing: callers must have checked every offset.
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

/** Which side of a run is the destination. */
typedef enum kvf_copy_way {
    KVF_COPY_TO_LOCAL = 0,
    KVF_COPY_TO_REMOTE = 1,
} kvf_copy_way;

/** One implementation for runs that do not overlap. Later stores of this thread become visible after the bytes. */
typedef struct kvf_copy_loop {
    const char *name; /**< "plain", "avx2" */
    void (*runs)(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *runs, size_t count);
} kvf_copy_loop;

/** Copies runs with the fastest loop of this machine. `bytes` is the sum of the runs' bytes. Any thread. */
void kvf_kernel_copy_runs(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *runs, size_t count,
                          uint64_t bytes);

/** Copies runs likewise, into memory that is read at once: the result stays in the caches. Any thread. */
void kvf_kernel_pack_runs(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *runs, size_t count);

/** The loops that this machine can run, plain first, the fastest for many bytes last; NULL after it. Any thread. */
const kvf_copy_loop *kvf_kernel_copy_loop(uint32_t i);

/** memcpy, run by run. */
extern const kvf_copy_loop kvf_copy_plain;
#if defined(__x86_64__)
/** Writes past the caches. */
extern const kvf_copy_loop kvf_copy_avx2;
#endif

#endif
