#include "kernel/kernel.h"

/*
 * Copies of this many bytes and more go past the caches. The destination of a shorter copy may stay in the second-level
 * cache (1 MiB and more on the intended machines) until it is read.
 */
#define STREAM_BYTES (256u << 10)

static void copy_plain(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *runs, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const kvf_run *run = &runs[i];
        if (way == KVF_COPY_TO_LOCAL)
            memcpy(bases.to[run->local_region] + run->local_offset,
                   bases.from[run->remote_region] + run->remote_offset, run->bytes);
        else
            memcpy(bases.to[run->remote_region] + run->remote_offset,
                   bases.from[run->local_region] + run->local_offset, run->bytes);
    }
}

const kvf_copy_loop kvf_copy_plain = {"plain", copy_plain};

const kvf_copy_loop *kvf_kernel_copy_loop(uint32_t i) {
    if (i == 0)
        return &kvf_copy_plain;
#if defined(__x86_64__)
    if (i == 1 && __builtin_cpu_supports("avx2"))
        return &kvf_copy_avx2;
#endif
    return NULL;
}

void kvf_kernel_copy_runs(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *runs, size_t count,
                          uint64_t bytes) {
    const kvf_copy_loop *fast = bytes >= STREAM_BYTES ? kvf_kernel_copy_loop(1) : NULL;
    (fast ? fast : &kvf_copy_plain)->runs(way, bases, runs, count);
}

/* As in copy_avx2.c: the processor cannot foresee the next runs, but the list names them, so prefetch them. */
#define AHEAD 4u /* runs */
#define LINE ((size_t)64)
#define AHEAD_BYTES 512u /* of each run: after them the processor's own prefetcher has caught up */

static const unsigned char *source_of(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *run) {
    return way == KVF_COPY_TO_LOCAL ? bases.from[run->remote_region] + run->remote_offset
                                    : bases.from[run->local_region] + run->local_offset;
}

void kvf_kernel_pack_runs(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *runs, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            const unsigned char *next = source_of(way, bases, &runs[i + AHEAD]);
            for (uint64_t at = 0; at < kvf_min_u64(runs[i + AHEAD].bytes, AHEAD_BYTES); at += LINE)
                __builtin_prefetch(next + at);
        }
        copy_plain(way, bases, &runs[i], 1);
    }
}
