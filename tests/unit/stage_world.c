#include "stage_world.h"

#include <poll.h>
#include <stdio.h>

#include "faulty_fabric.h"

#define IDLE_MS 60000

/* ---- callbacks ------------------------------------------------------------------------------- */

static uint64_t now_of(void *context) {
    return ((const stage_world *)context)->now_ns;
}

static void on_notify(void *context, kvf_transport *transport, const char *sender, const void *data,
                      size_t bytes) {
    stage_end *end = context;
    (void)transport;
    if (end->is_deaf)
        return;
    if (!end->stage || !kvf_stage_notice(end->stage, sender, data, bytes))
        end->other_notices++;
}

static void on_peer_lost(void *context, kvf_transport *transport, kvf_peer *peer, const char *detail) {
    stage_end *end = context;
    (void)transport;
    (void)detail;
    if (end->stage)
        kvf_stage_leave(end->stage, peer);
    for (uint32_t i = 0; i < end->peer_count; i++)
        if (end->peers[i] == peer)
            end->peers[i] = NULL;
    kvf_peer_close(peer);
}

static void on_event(void *context, const char *peer, kvf_status status, const char *text) {
    stage_end *end = context;
    (void)peer;
    end->events++;
    end->event = status;
    (void)snprintf(end->event_text, sizeof end->event_text, "%s", text);
}

static bool permit(void *context, const char *peer, const kvf_flow_request *request) {
    (void)peer;
    (void)request;
    return !((const stage_end *)context)->refuses;
}

/* ---- opening --------------------------------------------------------------------------------- */

typedef struct placing {
    stage_end *end;
    stage_place place;
    kvf_memory regions[WORLD_REGIONS]; /* the regions as they are registered */
    uint32_t count;
} placing;

/* Memory that was not allocated by the transport; the world frees it. */
static kvf_memory bring(uint64_t bytes, void **seen) {
    *seen = malloc(bytes);
    assert_non_null(*seen);
    return (kvf_memory){.struct_size = sizeof(kvf_memory), .address = *seen, .bytes = bytes};
}

static void *allocate(void *context, uint64_t bytes) {
    placing *at = context;
    void *seen = NULL;
    assert_true(at->count < WORLD_REGIONS);
    kvf_memory *made = &at->regions[at->count++];
    if (at->place) {
        *made = at->place(bytes, &seen);
        if (at->place == bring)
            at->end->brought[at->end->brought_count++] = seen;
        return seen;
    }
    assert_ok(kvf_transport_allocate(at->end->transport, KVF_MEMORY_HOST, 0, bytes, &seen));
    *made = (kvf_memory){.struct_size = sizeof *made, .address = seen, .bytes = bytes};
    return seen;
}

static void open_end(stage_world *w, stage_end *end, const char *kind, const kvf_shard *shard,
                     const cell_sequence *sequence, kvf_stage_options stage, stage_place place) {
    const kvf_transport_options options = {.struct_size = sizeof options,
                                           .name = end->name,
                                           .on_notify = on_notify,
                                           .on_peer_lost = on_peer_lost,
                                           .context = end};
    assert_ok(kvf_transport_open_over(faulty_fabric(kind), kind, &options, &end->transport));
    placing placed = {.end = end, .place = place};
    rank_open(&end->cells, shard, sequence, allocate, &placed);
    assert_ok(kvf_transport_register(end->transport, placed.regions, placed.count));
    stage.struct_size = sizeof stage;
    const char *workers = getenv("KVF_TEST_WORKERS");
    if (workers)
        stage.workers = (uint32_t)strtoul(workers, NULL, 10);
    stage.permit = permit;
    stage.on_event = on_event;
    stage.context = end;
    stage.assumed_costs = true; /* so that the chosen way does not depend on the machine */
    assert_ok(kvf_stage_open_at(end->transport, shard, &stage, &w->clock, &end->stage));
}

static void connect_end(stage_end *from, const stage_end *to) {
    const void *card;
    size_t bytes;
    kvf_peer **peer = &from->peers[from->peer_count++];
    assert_ok(kvf_transport_export(to->transport, &card, &bytes));
    assert_ok(kvf_transport_connect(from->transport, card, bytes, peer));
    assert_ok(kvf_stage_join(from->stage, *peer));
}

stage_world *stage_world_open(const char *kind, const stage_pair *shape) {
    return stage_world_open_at(kind, shape, NULL, NULL);
}

stage_world *stage_world_open_at(const char *kind, const stage_pair *shape, stage_place d, stage_place p) {
    stage_world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->clock = (kvf_clock){now_of, w};
    w->now_ns = 1000000000;
    w->engines = pair_of(shape->model, shape->d, shape->p);
    w->d_count = kvf_engine_rank_count(w->engines.local);
    w->p_count = kvf_engine_rank_count(w->engines.remote);
    assert_true(w->d_count <= WORLD_RANKS && w->p_count <= WORLD_RANKS);
    sequence_open(&w->d_sequence, kvf_engine_shard(w->engines.local, 0), shape->tokens, 1);
    sequence_open(&w->p_sequence, kvf_engine_shard(w->engines.remote, 0), shape->tokens, 2);
    for (uint32_t i = 0; i < w->d_count; i++) {
        (void)snprintf(w->d[i].name, sizeof w->d[i].name, "d%u", i);
        open_end(w, &w->d[i], kind, kvf_engine_shard(w->engines.local, i), &w->d_sequence, shape->options, d);
    }
    for (uint32_t i = 0; i < w->p_count; i++) {
        (void)snprintf(w->p[i].name, sizeof w->p[i].name, "p%u", i);
        open_end(w, &w->p[i], kind, kvf_engine_shard(w->engines.remote, i), &w->p_sequence, shape->options,
                 p);
    }
    for (uint32_t i = 0; i < w->d_count; i++)
        for (uint32_t j = 0; j < w->p_count; j++) {
            connect_end(&w->d[i], &w->p[j]);
            connect_end(&w->p[j], &w->d[i]);
        }
    stage_world_refill(w, 5);
    return w;
}

stage_world *stage_world_open_brought(const char *kind, const stage_pair *shape) {
    return stage_world_open_at(kind, shape, bring, bring);
}

void stage_end_close(stage_end *end) {
    kvf_stage_close(end->stage);
    end->stage = NULL;
    rank_close(&end->cells);
    kvf_transport_close(end->transport);
    end->transport = NULL;
    while (end->brought_count > 0)
        free(end->brought[--end->brought_count]);
}

void stage_world_close(stage_world *w) {
    for (uint32_t i = 0; i < w->d_count; i++)
        stage_end_close(&w->d[i]);
    for (uint32_t i = 0; i < w->p_count; i++)
        stage_end_close(&w->p[i]);
    sequence_close(&w->d_sequence);
    sequence_close(&w->p_sequence);
    free_pair(&w->engines);
    free(w);
}

static stage_carry memory_get, memory_put;

void stage_world_copies_memory(stage_carry get, stage_carry put) {
    memory_get = get;
    memory_put = put;
}

static void carry(stage_carry how, const stage_end *end) {
    for (uint32_t i = 0; how && i < end->cells.region_count; i++)
        how(end->cells.regions[i].address);
}

void stage_world_refill(stage_world *w, uint32_t seed) {
    for (uint32_t i = 0; i < w->p_count; i++) {
        rank_scribble(&w->p[i].cells, 100 + seed);
        rank_fill(&w->p[i].cells, all_layers(w->p[i].cells.shard), seed);
        carry(memory_put, &w->p[i]);
    }
    for (uint32_t i = 0; i < w->d_count; i++) {
        rank_scribble(&w->d[i].cells, 200 + seed);
        carry(memory_put, &w->d[i]);
    }
}

/* ---- working --------------------------------------------------------------------------------- */

static bool work(const stage_end *end) {
    bool moving = false, staging = false;
    if (!end->transport || end->stands_still)
        return false;
    assert_ok(kvf_transport_progress(end->transport, &moving));
    if (end->stage)
        assert_ok(kvf_stage_progress(end->stage, &staging));
    return moving || staging;
}

bool stage_world_work(const stage_world *w) {
    bool busy = false;
    for (uint32_t i = 0; i < w->d_count; i++)
        busy = work(&w->d[i]) || busy;
    for (uint32_t i = 0; i < w->p_count; i++)
        busy = work(&w->p[i]) || busy;
    return busy;
}

/* Waits until some end has something to do; false if none had within the time. */
static bool wait_for_work(const stage_world *w, int timeout_ms) {
    struct pollfd fds[2 * WORLD_RANKS];
    nfds_t count = 0;
    for (uint32_t i = 0; i < w->d_count + w->p_count; i++) {
        const stage_end *end = i < w->d_count ? &w->d[i] : &w->p[i - w->d_count];
        if (end->transport && !end->stands_still)
            fds[count++] = (struct pollfd){kvf_transport_event_fd(end->transport), POLLIN, 0};
    }
    return poll(fds, count, timeout_ms) > 0;
}

void stage_world_work_until(const stage_world *w, bool (*done)(void *context), void *context) {
    while (!done(context))
        if (!stage_world_work(w) && !done(context))
            assert_true(wait_for_work(w, IDLE_MS));
}

void stage_world_work_idle(const stage_world *w) {
    for (int idle = 0; idle < 4;)
        idle = stage_world_work(w) || wait_for_work(w, idle == 3 ? 10 : 0) ? 0 : idle + 1;
}

static bool is_settled(const stage_end *end) {
    if (!end->stage)
        return true;
    const kvf_stage_info info = stage_info_of(end->stage);
    return info.flows == 0 && info.slots_free == info.slots;
}

static bool are_settled(const stage_world *w) {
    bool settled = true;
    for (uint32_t i = 0; i < w->d_count; i++)
        settled = settled && is_settled(&w->d[i]);
    for (uint32_t i = 0; i < w->p_count; i++)
        settled = settled && is_settled(&w->p[i]);
    return settled;
}

void stage_world_settle(const stage_world *w) {
    /* An end may have something to do that no descriptor shows, because the clock was set. */
    for (int ms = 0; ms < IDLE_MS && !are_settled(w); ms += 10)
        while (stage_world_work(w) || wait_for_work(w, 10))
            if (are_settled(w))
                break;
    stage_world_work_idle(w);
}

static bool is_move_over(void *context) {
    return kvf_move_status(context) != KVF_IN_PROGRESS;
}

kvf_status stage_world_finish(const stage_world *w, kvf_move *move) {
    stage_world_work_until(w, is_move_over, move);
    return kvf_move_status(move);
}

/* ---- whole requests -------------------------------------------------------------------------- */

uint64_t stage_world_wrong_bytes(const stage_end *d, const cell_rank *before, uint32_t seed) {
    cell_rank wanted;
    uint64_t wrong = 0;
    rank_copy(&wanted, before);
    rank_fill(&wanted, all_layers(wanted.shard), seed);
    carry(memory_get, d);
    for (uint32_t i = 0; i < wanted.region_count; i++) {
        const unsigned char *a = d->cells.regions[i].address, *b = wanted.regions[i].address;
        for (uint64_t at = 0; at < wanted.regions[i].bytes; at++)
            wrong += a[at] != b[at];
    }
    rank_close(&wanted);
    return wrong;
}

void stage_world_sources(const stage_world *w, const stage_end *d, const kvf_plan *plan, kvf_peer **peers) {
    assert_true(kvf_plan_source_count(plan) <= w->p_count);
    for (uint32_t s = 0; s < kvf_plan_source_count(plan); s++)
        peers[s] = d->peers[kvf_plan_source_rank(plan, s)];
}

void stage_world_pull_all(stage_world *w, kvf_way way, uint32_t seed) {
    const kvf_move_options options = {.struct_size = sizeof options, .way = way};
    kvf_plan *plans[WORLD_RANKS];
    kvf_request *requests[WORLD_RANKS];
    kvf_move *moves[WORLD_RANKS];
    cell_rank before[WORLD_RANKS];
    for (uint32_t i = 0; i < w->d_count; i++) {
        kvf_peer *peers[WORLD_RANKS];
        plans[i] = plan_of(&w->engines, i);
        requests[i] = request_of(plans[i]);
        carry(memory_get, &w->d[i]);
        rank_copy(&before[i], &w->d[i].cells);
        set_sequences(requests[i], &w->d_sequence, &w->p_sequence);
        stage_world_sources(w, &w->d[i], plans[i], peers);
        assert_ok(kvf_stage_pull(w->d[i].stage, requests[i], peers, &options, &moves[i]));
    }
    for (uint32_t i = 0; i < w->d_count; i++) {
        assert_ok(stage_world_finish(w, moves[i]));
        assert_int_equal(stage_world_wrong_bytes(&w->d[i], &before[i], seed), 0);
        kvf_move_free(moves[i]);
        kvf_request_free(requests[i]);
        kvf_plan_free(plans[i]);
        rank_close(&before[i]);
    }
}

void stage_world_push_all(stage_world *w, kvf_way way, uint32_t seed) {
    const kvf_move_options options = {.struct_size = sizeof options, .way = way};
    kvf_move *moves[WORLD_RANKS * WORLD_RANKS];
    uint32_t count = 0;
    kvf_plan *plans[WORLD_RANKS];
    kvf_request *requests[WORLD_RANKS];
    cell_rank before[WORLD_RANKS];
    for (uint32_t i = 0; i < w->d_count; i++) {
        plans[i] = plan_of(&w->engines, i);
        requests[i] = request_of(plans[i]);
        carry(memory_get, &w->d[i]);
        rank_copy(&before[i], &w->d[i].cells);
        set_sequences(requests[i], &w->d_sequence, &w->p_sequence);
        for (uint32_t s = 0; s < kvf_plan_source_count(plans[i]); s++) {
            stage_end *p = &w->p[kvf_plan_source_rank(plans[i], s)];
            assert_ok(kvf_stage_push(p->stage, requests[i], s, p->peers[i], &options, &moves[count++]));
        }
    }
    for (uint32_t m = 0; m < count; m++) {
        assert_ok(stage_world_finish(w, moves[m]));
        kvf_move_free(moves[m]);
    }
    for (uint32_t i = 0; i < w->d_count; i++) {
        assert_int_equal(stage_world_wrong_bytes(&w->d[i], &before[i], seed), 0);
        kvf_request_free(requests[i]);
        kvf_plan_free(plans[i]);
        rank_close(&before[i]);
    }
}

/* ---- looking --------------------------------------------------------------------------------- */

kvf_stage_info stage_info_of(const kvf_stage *stage) {
    kvf_stage_info info = {.struct_size = sizeof info};
    assert_ok(kvf_stage_get_info(stage, &info));
    return info;
}

void assert_stage_idle(const kvf_stage *stage) {
    kvf_stage_info info = stage_info_of(stage);
    assert_int_equal(info.slots_lent, 0);
    assert_int_equal(info.slots_doubt, 0);
    assert_int_equal(info.slots_free, info.slots);
    assert_int_equal(info.flows, 0);
}
