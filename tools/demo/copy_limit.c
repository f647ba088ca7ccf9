#include "copy_limit.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    BATCH_RUNS = 1024, /* at most what one process_vm_readv takes, see IOV_MAX */
    CACHED_RUNS = 256, /* the descriptions of so many runs stay in the first-level cache */
    FILL_BYTES = 16 << 20,
    MOST_CALL_BYTES = 1 << 30, /* the kernel stops a call a little below 2 GiB */
};

const char *copy_limit_method(const options *asked, const char *transport) {
    bool by_kernel = asked->brought_memory && !asked->no_direct_read && strcmp(transport, "shm") == 0;
    return by_kernel ? "process_vm_readv" : "memcpy";
}

void copy_limit_prepare(live_rank *of) {
    const demo_job *job = of->job;
    for (uint32_t source = of->seat->rank; source < job->prefill_ranks; source += job->decode_ranks)
        for (uint64_t at = 0; at < job->copy_bytes[source]; at += FILL_BYTES) {
            uint64_t left = job->copy_bytes[source] - at;
            memset(job->copy_source[source] + at, 1, left < FILL_BYTES ? left : FILL_BYTES);
            rank_progress(of, at, job->copy_bytes[source]);
        }
}

/* The place of a prefill rank's region in the memory to copy from, where regions lie one after another. */
static uint8_t *region_of(const demo_job *job, uint32_t source_rank, uint32_t region) {
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(job->all.prefill, source_rank));
    uint64_t offset = 0;
    for (uint32_t i = 0; i < region; i++)
        offset += shard->region_bytes[i];
    return job->copy_source[source_rank] + offset;
}

typedef struct batch {
    struct iovec to[BATCH_RUNS], from[BATCH_RUNS];
    size_t count;
    uint64_t bytes;
} batch;

/* Fills a batch with runs, of which there must be at least one. */
static void fill_batch(const live_rank *of, uint32_t source_rank, const kvf_run *runs, size_t count,
                       batch *out) {
    uint32_t region = runs[0].remote_region;
    uint8_t *base = region_of(of->job, source_rank, region);
    out->bytes = 0;
    for (size_t i = 0; i < count; i++) {
        if (runs[i].remote_region != region) {
            region = runs[i].remote_region;
            base = region_of(of->job, source_rank, region);
        }
        out->to[i] =
            (struct iovec){of->regions[runs[i].local_region] + runs[i].local_offset, (size_t)runs[i].bytes};
        out->from[i] = (struct iovec){base + runs[i].remote_offset, (size_t)runs[i].bytes};
        out->bytes += runs[i].bytes;
    }
    out->count = count;
}

static bool copy_by_kernel(const live_rank *of, const batch *runs, size_t begin, size_t end, size_t bytes) {
    ssize_t copied =
        process_vm_readv(getpid(), runs->to + begin, end - begin, runs->from + begin, end - begin, 0);
    if (copied == (ssize_t)bytes)
        return true;
    return rank_fail(of, "process_vm_readv copied %zd of %zu bytes: %s", copied, bytes,
                     copied < 0 ? strerror(errno) : "cut short");
}

static bool copy_batch(const live_rank *of, const batch *runs, bool by_kernel) {
    size_t begin = 0, bytes = 0;
    for (size_t i = 0; i < runs->count; i++) {
        if (!by_kernel) {
            memcpy(runs->to[i].iov_base, runs->from[i].iov_base, runs->to[i].iov_len);
            continue;
        }
        bytes += runs->to[i].iov_len;
        if (i + 1 < runs->count && bytes + runs->to[i + 1].iov_len <= MOST_CALL_BYTES)
            continue;
        if (!copy_by_kernel(of, runs, begin, i + 1, bytes))
            return false;
        begin = i + 1;
        bytes = 0;
    }
    return true;
}

static bool copy_source(live_rank *of, const kvf_plan *plan, const kvf_request *request, uint32_t source,
                        bool by_kernel, copy_figures *out) {
    kvf_run runs[BATCH_RUNS];
    batch all;
    kvf_run_cursor cursor;
    kvf_run_cursor_start(&cursor, request, source);
    size_t most = by_kernel ? BATCH_RUNS : CACHED_RUNS;
    for (size_t count; (count = kvf_run_cursor_next(&cursor, runs, most)) > 0;) {
        fill_batch(of, kvf_plan_source_rank(plan, source), runs, count, &all);
        uint64_t begin = now_ns();
        if (!copy_batch(of, &all, by_kernel))
            return false;
        out->ns += now_ns() - begin;
        out->bytes += all.bytes;
    }
    return true;
}

bool copy_limit_measure(live_rank *of, const kvf_plan *plan, kvf_request *request, const char *method,
                        copy_figures *out) {
    const workload *work = &of->job->work;
    bool by_kernel = strcmp(method, "process_vm_readv") == 0;
    *out = (copy_figures){0};
    for (uint32_t r = 0; r < work->request_count; r++) {
        kvf_status status = kvf_request_set(request, workload_request(work, r), work->group_count);
        if (status)
            return rank_fail_status(of, status, "setting a request");
        for (uint32_t source = 0; source < kvf_plan_source_count(plan); source++)
            if (!copy_source(of, plan, request, source, by_kernel, out))
                return false;
        rank_progress(of, r, work->request_count);
    }
    return true;
}
