#include "rank.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    PROGRESS_NS = 50 * 1000 * 1000,
    FILL_BYTES = 16 << 20,
};

uint64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

bool rank_send(const live_rank *from, message_type type, const void *data, size_t bytes) {
    return channel_send(&from->seat->coordinator, type, data, bytes);
}

bool rank_fail(const live_rank *failed, const char *format, ...) {
    char text[600];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    (void)rank_send(failed, MESSAGE_FAILED, text, strlen(text) + 1);
    return false;
}

bool rank_fail_status(const live_rank *failed, kvf_status status, const char *what) {
    const char *detail = kvf_error_detail();
    return rank_fail(failed, "%s: %s%s%s", what, kvf_status_name(status), detail[0] ? ": " : "", detail);
}

void rank_progress(live_rank *of, uint64_t done, uint64_t total) {
    uint64_t now = now_ns();
    if (now - of->reported_ns < PROGRESS_NS)
        return;
    of->reported_ns = now;
    progress_figures figures = {done, total};
    (void)rank_send(of, MESSAGE_PROGRESS, &figures, sizeof figures);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void *bring_memory(const live_rank *of, uint64_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        (void)rank_fail(of, "mmap of %llu bytes: %s", (unsigned long long)bytes, strerror(errno));
        return NULL;
    }
    return memory;
}

static bool make_region(live_rank *of, uint32_t region, uint64_t bytes) {
    void *memory = NULL;
    if (of->job->asked->brought_memory) {
        memory = bring_memory(of, bytes);
        if (!memory)
            return false;
        of->mapped = region + 1;
    } else {
        kvf_status status = kvf_transport_allocate(of->transport, KVF_MEMORY_HOST, 0, bytes, &memory);
        if (status)
            return rank_fail_status(of, status, "allocating a cache");
    }
    of->regions[region] = memory;
    return true;
}

static bool make_regions(live_rank *of, uint8_t unused) {
    const kvf_shard_desc *shard = kvf_shard_get(of->shard);
    for (uint32_t i = 0; i < shard->region_count; i++)
        of->total_bytes += shard->region_bytes[i];
    uint64_t filled = 0;
    for (uint32_t i = 0; i < shard->region_count; i++) {
        uint64_t bytes = shard->region_bytes[i];
        if (!make_region(of, i, bytes))
            return false;
        for (uint64_t at = 0; at < bytes; at += FILL_BYTES) {
            uint64_t length = bytes - at < FILL_BYTES ? bytes - at : FILL_BYTES;
            memset(of->regions[i] + at, unused, length);
            filled += length;
            rank_progress(of, filled / 2, of->total_bytes);
        }
    }
    return true;
}

static bool register_regions(const live_rank *of) {
    const kvf_shard_desc *shard = kvf_shard_get(of->shard);
    kvf_memory *memory = calloc(shard->region_count, sizeof *memory);
    if (!memory)
        return rank_fail(of, "not enough memory");
    for (uint32_t i = 0; i < shard->region_count; i++)
        memory[i] =
            (kvf_memory){sizeof(kvf_memory), of->regions[i], shard->region_bytes[i], KVF_MEMORY_HOST, 0};
    kvf_status status = kvf_transport_register(of->transport, memory, shard->region_count);
    free(memory);
    return status ? rank_fail_status(of, status, "registering the caches") : true;
}

bool rank_open(live_rank *out, rank_seat *seat, const kvf_transport_options *callbacks, uint8_t unused) {
    const demo_job *job = seat->job;
    bool is_prefill = seat->side == SIDE_PREFILL;
    *out =
        (live_rank){.seat = seat,
                    .job = job,
                    .shard = kvf_engine_shard(is_prefill ? job->all.prefill : job->all.decode, seat->rank)};
    uint32_t regions = kvf_shard_get(out->shard)->region_count;
    if (regions == 0)
        return true;
    char name[64];
    (void)snprintf(name, sizeof name, "%s rank %u", is_prefill ? "prefill" : "decode", seat->rank);
    kvf_transport_options how = *callbacks;
    how.struct_size = sizeof how;
    how.name = name;
    kvf_setting settings[2];
    how.settings = settings;
    if (job->asked->no_direct_read)
        settings[how.setting_count++] = (kvf_setting){"shm.direct", "off"};
    if (job->asked->ucx_tls)
        settings[how.setting_count++] = (kvf_setting){"ucx.tls", job->asked->ucx_tls};
    kvf_status status = kvf_transport_open(job->asked->transport, &how, &out->transport);
    if (status)
        return rank_fail_status(out, status, "opening the transport");
    out->regions = calloc(regions, sizeof *out->regions);
    if (!out->regions)
        return rank_fail(out, "not enough memory");
    return make_regions(out, unused) && register_regions(out);
}

void rank_close_transport(live_rank *closed) {
    kvf_transport_close(closed->transport);
    closed->transport = NULL;
}

void rank_close(live_rank *closed) {
    rank_close_transport(closed);
    for (uint32_t i = 0; i < closed->mapped; i++)
        (void)munmap(closed->regions[i], kvf_shard_get(closed->shard)->region_bytes[i]);
    closed->mapped = 0;
    free(closed->regions);
    closed->regions = NULL;
}

/* ---- the rest -------------------------------------------------------------------------------- */

void rank_wait(const live_rank *of, int timeout_ms, bool *message_waits) {
    struct pollfd sources[2] = {{.fd = of->seat->coordinator.fd, .events = POLLIN},
                                {.fd = -1, .events = POLLIN}};
    if (of->transport)
        sources[1].fd = kvf_transport_event_fd(of->transport);
    int ready = poll(sources, 2, timeout_ms);
    *message_waits = ready > 0 && sources[0].revents != 0;
}

cell_memory rank_memory(const live_rank *of) {
    return (cell_memory){of->shard, of->regions, of->job->asked->seed};
}

void rank_suffer_fault(const live_rank *of) {
    uint32_t number = of->seat->rank + (of->seat->side == SIDE_DECODE ? of->job->prefill_ranks : 0);
    if (number != of->job->fault_rank)
        return;
    if (of->job->asked->fault == FAULT_DIE)
        (void)raise(SIGKILL);
    while (of->job->asked->fault == FAULT_HANG)
        (void)pause();
}
