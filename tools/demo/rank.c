#include "rank.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    PROGRESS_NS = 50 * 1000 * 1000,
    FILL_BYTES = 16 << 20,
};

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
        kvf_status status = kvf_agent_allocate(of->agent, KVF_MEMORY_HOST, 0, bytes, &memory);
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
    kvf_memory *memory = calloc((size_t)shard->region_count + 1, sizeof *memory);
    if (!memory)
        return rank_fail(of, "not enough memory");
    for (uint32_t i = 0; i < shard->region_count; i++)
        memory[i] = (kvf_memory){
            .struct_size = sizeof(kvf_memory), .address = of->regions[i], .bytes = shard->region_bytes[i]};
    kvf_status status = kvf_agent_register(of->agent, memory, shard->region_count);
    free(memory);
    return status ? rank_fail_status(of, status, "registering the caches") : true;
}

void rank_note_kinds(live_rank *of, kvf_peer_role role) {
    uint32_t count = 0, room = 0;
    (void)kvf_agent_peers(of->agent, NULL, 0, &room);
    kvf_agent_peer *peers = calloc((size_t)room + 1, sizeof *peers);
    if (!peers)
        return; /* only a name is missing in the table */
    peers->struct_size = sizeof *peers;
    (void)kvf_agent_peers(of->agent, peers, room + 1, &count);
    for (uint32_t i = 0; i < count && i <= room; i++) {
        size_t length = strlen(of->kind);
        if (peers[i].role == role && peers[i].way[0])
            memcpy(of->way, peers[i].way, sizeof of->way);
        if (peers[i].role == role && !strstr(of->kind, peers[i].fabric))
            (void)snprintf(of->kind + length, sizeof of->kind - length, "%s%s", length ? "+" : "",
                           peers[i].fabric);
    }
    free(peers);
}

/* The endpoint to listen at: "tcp://10.0.0.1:" and the rank's port; without a given port, as the user wrote it. */
static const char *place_to_listen(const demo_job *job, uint32_t rank, char out[300]) {
    const char *listen = job->agents.listen, *colon = listen ? strrchr(listen, ':') : NULL;
    if (job->first_port && colon)
        (void)snprintf(out, 300, "%.*s:%u", (int)(colon - listen), listen, job->first_port + rank);
    return job->first_port && colon ? out : listen;
}

static kvf_status open_agent(live_rank *out) {
    const demo_job *job = out->job;
    const kvf_engine *engine = out->seat->side == SIDE_PREFILL ? job->all.prefill : job->all.decode;
    kvf_setting settings[OPTIONS_MAX_SETTINGS + 1];
    char listen[300];
    kvf_agent_options how = job->agents;
    how.listen = place_to_listen(job, out->seat->rank, listen);
    how.transport = job->asked->transport;
    how.settings = settings;
    how.setting_count = options_settings(job->asked, settings);
    how.way = job->asked->way;
    if (job->asked->no_direct_read)
        settings[how.setting_count++] = (kvf_setting){"shm.direct", "off"};
    return kvf_agent_open(engine, out->seat->rank, &how, &out->agent);
}

bool rank_open(live_rank *out, rank_seat *seat, uint8_t unused) {
    const demo_job *job = seat->job;
    bool is_prefill = seat->side == SIDE_PREFILL;
    *out =
        (live_rank){.seat = seat,
                    .job = job,
                    .shard = kvf_engine_shard(is_prefill ? job->all.prefill : job->all.decode, seat->rank)};
    out->regions = calloc((size_t)kvf_shard_get(out->shard)->region_count + 1, sizeof *out->regions);
    out->aside = malloc(cells_room(out->shard) + 1);
    if (!out->regions || !out->aside)
        return rank_fail(out, "not enough memory");
    kvf_status status = open_agent(out);
    if (status)
        return rank_fail_status(out, status, "opening the agent");
    return make_regions(out, unused) && register_regions(out);
}

void rank_close(live_rank *closed) {
    kvf_agent_close(closed->agent);
    closed->agent = NULL;
    for (uint32_t i = 0; i < closed->mapped; i++)
        (void)munmap(closed->regions[i], kvf_shard_get(closed->shard)->region_bytes[i]);
    closed->mapped = 0;
    free(closed->regions);
    free(closed->aside);
    closed->regions = NULL;
    closed->aside = NULL;
}

/* ---- serving --------------------------------------------------------------------------------- */

bool rank_wait(const live_rank *of, int timeout_ms, bool *message_waits) {
    struct pollfd sources[2] = {{.fd = of->seat->coordinator.fd, .events = POLLIN},
                                {.fd = of->agent ? kvf_agent_event_fd(of->agent) : -1, .events = POLLIN}};
    int ready = poll(sources, 2, timeout_ms);
    *message_waits = ready > 0 && sources[0].revents != 0;
    kvf_status status = of->agent ? kvf_agent_progress(of->agent, NULL) : KVF_OK;
    return status ? rank_fail_status(of, status, "serving") : true;
}

bool rank_take_events(void *rank, rank_heed heed) {
    const live_rank *of = rank;
    kvf_event event = {.struct_size = sizeof event};
    while (of->agent && kvf_agent_next_event(of->agent, &event) == KVF_OK)
        if (!heed(rank, &event))
            return false;
    return true;
}

void rank_serve(void *rank, rank_obey obey, rank_heed heed, rank_look look) {
    const live_rank *of = rank;
    bool message_waits;
    int timeout_ms = -1;
    while (rank_wait(of, timeout_ms, &message_waits) && rank_take_events(rank, heed)) {
        message order;
        if (message_waits && (!channel_receive(&of->seat->coordinator, &order) || !obey(rank, &order)))
            return;
        timeout_ms = look ? look(rank) : -1;
    }
}

void rank_request_id(const demo_job *job, uint32_t round, uint32_t request, char out[24]) {
    (void)snprintf(out, 24, "%u.%u", job->standing ? round % STANDING_ROUNDS : round, request);
}

bool rank_read_request_id(const kvf_request_id *id, uint32_t *round, uint32_t *request) {
    char text[24] = "", *end;
    if (id->size >= sizeof text)
        return false;
    memcpy(text, id->data, id->size);
    *round = (uint32_t)strtoul(text, &end, 10);
    if (*end != '.')
        return false;
    *request = (uint32_t)strtoul(end + 1, &end, 10);
    return *end == '\0';
}

/* ---- cells and faults ------------------------------------------------------------------------ */

cell_memory rank_memory(const live_rank *of) {
    const kvf_engine *prefill = of->job->all.prefill;
    return (cell_memory){.shard = of->shard,
                         .regions = of->regions,
                         .seed = of->job->asked->seed,
                         .sent = prefill ? kvf_engine_model(prefill) : NULL,
                         .aside = of->aside};
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
