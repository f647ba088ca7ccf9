/*
 * Copying runs with AVX2.
 *
 * The runs of a request are scattered, so each begins with cache misses that the processor cannot foresee, but
 * the list of runs can. And this core does not soon read a KV cache that a transfer fills: ordinary stores would
 * read every line before they overwrite it, and evict useful lines.
 *
 *   - the first lines of a run's source are prefetched some runs ahead
 *   - whole lines of the destination are written past the caches, the rest at both ends ordinarily
 */
#include <immintrin.h>

#include "kernel/kernel.h"

#define LINE ((size_t)64)
#define AHEAD 2u                /* runs */
#define AHEAD_BYTES 1024u       /* of each run: after them the processor's own prefetcher has caught up */
#define STREAM_LEAST (4 * LINE) /* shorter runs have few whole lines */

static void ask_for(const unsigned char *memory, uint64_t bytes) {
    for (uint64_t at = 0; at < kvf_min_u64(bytes, AHEAD_BYTES); at += LINE)
        _mm_prefetch((const char *)memory + at, _MM_HINT_T0);
}

/* Copies whole lines; `to` is at the beginning of a line. */
static void stream_lines(unsigned char *to, const unsigned char *from, size_t lines) {
    for (; lines > 0; lines--, to += LINE, from += LINE) {
        __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)from);
        __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(from + 32));
        _mm256_stream_si256((__m256i *)(void *)to, low);
        _mm256_stream_si256((__m256i *)(void *)(to + 32), high);
    }
}

static void stream_one(unsigned char *to, const unsigned char *from, size_t bytes) {
    if (bytes < STREAM_LEAST) {
        memcpy(to, from, bytes);
        return;
    }
    size_t head = (size_t)(-(uintptr_t)to % LINE);
    memcpy(to, from, head);
    size_t lines = (bytes - head) / LINE;
    stream_lines(to + head, from + head, lines);
    head += lines * LINE;
    memcpy(to + head, from + head, bytes - head);
}

static const unsigned char *source(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *run) {
    return way == KVF_COPY_TO_LOCAL ? bases.from[run->remote_region] + run->remote_offset
                                    : bases.from[run->local_region] + run->local_offset;
}

static unsigned char *destination(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *run) {
    return way == KVF_COPY_TO_LOCAL ? bases.to[run->local_region] + run->local_offset
                                    : bases.to[run->remote_region] + run->remote_offset;
}

static void stream_runs(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *runs, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            ask_for(source(way, bases, &runs[i + AHEAD]), runs[i + AHEAD].bytes);
        stream_one(destination(way, bases, &runs[i]), source(way, bases, &runs[i]), runs[i].bytes);
    }
    _mm_sfence(); /* streamed stores are unordered: order them before anything reports that the bytes are there */
}

const kvf_copy_loop kvf_copy_avx2 = {"avx2", stream_runs};
