#include "flows.h"

#include <poll.h>
#include <string.h>

#include <kvferry/stage.h>

#include "coverage.h"
#include "forms.h"
#include "plan/plan.h"
#include "random.h"
#include "stage/flow.h"

enum {
    ARENA_BYTES = 4 * 4096, /* the minimum */
    SLOTS = 4,              /* the fewest that are allowed: a peer is lent one at a time */
    SLOT_BYTES_MOST = 1024, /* smaller than allowed, because random cases move little */
    CHUNKS_MAX = 4,         /* two ranges of layers, two of steps */
    FLOWS_MOST = 4,         /* of one peer at once; the others wait */
    SHM_PERCENT = 4,        /* of the cases between processes' transports; the others within one */
    CONTROL_PERCENT = 20,   /* of the cases in which a byte is spoiled first */
    DIRECT_PERCENT = 15,    /* of the moves; */
    CHOSEN_PERCENT = 15,    /* of those left, by the way that the stage chooses; the others packed */
    IDLE_MS = 10 * 1000     /* nobody had anything to do for so long: it is given up */
};

/* ---- ends ------------------------------------------------------------------------------------- */

/* A rank: its transport, its stage and its peers. */
typedef struct flow_end {
    kvf_transport *transport;
    kvf_stage *stage;
    kvf_peer *peers[MAX_RANKS]; /* at the local rank, by remote rank; at a remote rank, only [0] */
    uint32_t events;
    char event[256];
} flow_end;

typedef struct flow_world {
    const packed_transfer *t;
    rng random;
    uint32_t flows;       /* that each end may have open with one peer */
    bool used[MAX_RANKS]; /* remote ranks that are read */
    flow_end local, remote[MAX_RANKS];
    memory memory; /* of the local rank */
    bool spoil;    /* the next full slot that is lent will be spoiled */
    bool spoiled;  /* a slot was spoiled */
} flow_world;

static void on_notify(void *context, kvf_transport *transport, const char *sender, const void *data,
                      size_t bytes) {
    const flow_end *end = context;
    (void)transport;
    if (end->stage)
        (void)kvf_stage_notice(end->stage, sender, data, bytes);
}

static void on_event(void *context, const char *peer, kvf_status status, const char *text) {
    flow_end *end = context;
    (void)status;
    (void)snprintf(end->event, sizeof end->event, "%s: %s", peer, text);
    end->events++;
}

/* Cuts slots smaller than users can have. */
static kvf_status cut_small(kvf_stage *stage, rng *random) {
    static const uint32_t bytes[] = {16, 24, 64, 200, SLOT_BYTES_MOST};
    kvf_arena *arena = &stage->arenas[KVF_MEMORY_HOST];
    unsigned char *begin = arena->slots[0].memory;
    for (uint32_t i = 0; i < arena->slot_count; i++)
        if (arena->slots[i].memory < begin)
            begin = arena->slots[i].memory;
    const uint32_t region = arena->region;
    kvf_arena_close(arena);
    stage->options.slot_bytes = bytes[rng_below(random, sizeof bytes / sizeof *bytes)];
    return kvf_arena_open(arena, region, begin, SLOTS + rng_below(random, 5), stage->options.slot_bytes);
}

static kvf_status open_end(flow_world *w, flow_end *end, const char *fabric, const char *name,
                           const kvf_shard *shard, const memory *m) {
    const kvf_transport_options options = {
        .struct_size = sizeof options, .name = name, .on_notify = on_notify, .context = end};
    const kvf_stage_options stage = {.struct_size = sizeof stage,
                                     .arena_bytes = ARENA_BYTES,
                                     .slot_bytes = ARENA_BYTES / SLOTS,
                                     .window = rng_between(&w->random, 1, 4),
                                     .flows = w->flows,
                                     .on_event = on_event,
                                     .context = end};
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    kvf_memory regions[MAX_REGIONS];
    for (uint32_t i = 0; i < desc->region_count; i++) {
        const uint64_t bytes = desc->region_bytes[i] ? desc->region_bytes[i] : 1;
        regions[i] = (kvf_memory){.struct_size = sizeof *regions, .address = m->regions[i], .bytes = bytes};
    }
    kvf_status status = kvf_transport_open(fabric, &options, &end->transport);
    if (!status && desc->region_count > 0)
        status = kvf_transport_register(end->transport, regions, desc->region_count);
    if (!status)
        status = kvf_stage_open(end->transport, shard, &stage, &end->stage);
    return status ? status : cut_small(end->stage, &w->random);
}

static kvf_status meet(flow_end *from, flow_end *to, kvf_peer **peer) {
    const void *card;
    size_t bytes;
    kvf_status status = kvf_transport_export(to->transport, &card, &bytes);
    if (!status)
        status = kvf_transport_connect(from->transport, card, bytes, peer);
    return status ? status : kvf_stage_join(from->stage, *peer);
}

static bool open_world(flow_world *w) {
    const packed_transfer *t = w->t;
    const char *fabric = rng_chance(&w->random, SHM_PERCENT) ? "shm" : "inproc";
    kvf_status status = open_end(w, &w->local, fabric, "local", t->shard, &w->memory);
    note_if(KIND_FLOW_SHM, fabric[0] == 's');
    for (uint32_t s = 0; s < kvf_plan_source_count(t->plan) && !status; s++) {
        const uint32_t rank = kvf_plan_source_rank(t->plan, s);
        char name[16];
        (void)snprintf(name, sizeof name, "remote%u", rank);
        w->used[rank] = true;
        status = open_end(w, &w->remote[rank], fabric, name, t->plan->remote->shards[rank], &t->remote[rank]);
        if (!status)
            status = meet(&w->local, &w->remote[rank], &w->local.peers[rank]);
        if (!status)
            status = meet(&w->remote[rank], &w->local, &w->remote[rank].peers[0]);
    }
    return status ? wrong("flows cannot begin, %s: %s", kvf_status_name(status), kvf_error_detail()) : true;
}

static void close_end(flow_end *end) {
    kvf_stage_close(end->stage);
    kvf_transport_close(end->transport);
}

static void close_world(flow_world *w) {
    close_end(&w->local);
    for (uint32_t i = 0; i < MAX_RANKS; i++)
        close_end(&w->remote[i]);
}

/* ---- working ---------------------------------------------------------------------------------- */

static bool work(const flow_end *end) {
    bool moving = false, staging = false;
    if (!end->stage)
        return false;
    (void)kvf_transport_progress(end->transport, &moving);
    (void)kvf_stage_progress(end->stage, &staging);
    return moving || staging;
}

/* Changes the first byte of a slot that is full and lent, and that the peer has not read yet. */
static void spoil_a_slot(flow_world *w, const flow_end *end) {
    for (const kvf_stage_flow *flow = end->stage->first; flow && w->spoil; flow = flow->following)
        for (uint32_t i = 0; i < KVF_WINDOW_MAX && w->spoil; i++)
            if (!flow->mover && flow->direction == KVF_READ && flow->credits[i].state == KVF_CREDIT_LENT) {
                flow->credits[i].own->memory[0] ^= 1;
                w->spoil = false;
                w->spoiled = true;
            }
}

static bool work_once(flow_world *w) {
    bool busy = work(&w->local);
    for (uint32_t i = 0; i < MAX_RANKS; i++)
        if (w->used[i]) {
            busy = work(&w->remote[i]) || busy;
            spoil_a_slot(w, &w->remote[i]);
        }
    return busy;
}

/* Waits until a transport has something to do; false: nothing happened for too long. */
static bool wait_for_work(const flow_world *w) {
    struct pollfd fds[MAX_RANKS + 1] = {{kvf_transport_event_fd(w->local.transport), POLLIN, 0}};
    nfds_t count = 1;
    for (uint32_t i = 0; i < MAX_RANKS; i++)
        if (w->used[i])
            fds[count++] = (struct pollfd){kvf_transport_event_fd(w->remote[i].transport), POLLIN, 0};
    return poll(fds, count, IDLE_MS) > 0;
}

static bool finish(flow_world *w, kvf_move *const *moves, uint32_t count, uint64_t bytes) {
    uint64_t moved = 0;
    for (uint32_t i = 0; i < count;) {
        kvf_status status = kvf_move_status(moves[i]);
        if (status == KVF_OK) {
            kvf_move_info info = {.struct_size = sizeof info};
            (void)kvf_move_get_info(moves[i], &info);
            moved += info.bytes;
            i++;
        } else if (status != KVF_IN_PROGRESS) {
            return wrong("move %u of %u ends with %s: %s", i, count, kvf_status_name(status),
                         kvf_error_detail());
        } else if (!work_once(w) && kvf_move_status(moves[i]) == KVF_IN_PROGRESS && !wait_for_work(w)) {
            return wrong("move %u of %u stands still", i, count);
        }
    }
    return moved == bytes ? true
                          : wrong("moves say that they moved %llu bytes; the requests have %llu",
                                  (unsigned long long)moved, (unsigned long long)bytes);
}

/* Whether all slots are free and all flows are forgotten. */
static bool is_idle(const flow_end *end) {
    kvf_stage_info info = {.struct_size = sizeof info};
    if (!end->stage)
        return true;
    (void)kvf_stage_get_info(end->stage, &info);
    return info.flows == 0 && info.slots_free == info.slots;
}

static bool all_are_idle(const flow_world *w) {
    bool idle = is_idle(&w->local);
    for (uint32_t i = 0; i < MAX_RANKS; i++)
        idle = idle && is_idle(&w->remote[i]);
    return idle;
}

static bool settle(flow_world *w) {
    while (!all_are_idle(w))
        if (!work_once(w) && !all_are_idle(w) && !wait_for_work(w))
            return wrong("a stage keeps flows or slots when all has moved");
    return true;
}

static bool nobody_is_blamed(const flow_world *w) {
    for (uint32_t i = 0; i < MAX_RANKS; i++)
        if (w->remote[i].events)
            return wrong("at rank %u, %s", i, w->remote[i].event);
    return w->local.events ? wrong("at the local rank, %s", w->local.event) : true;
}

/* ---- chunks ----------------------------------------------------------------------------------- */

/* A part of a request: some layers, and some steps of each group. */
typedef struct chunk {
    kvf_plan *plan;
    kvf_request *request;
} chunk;

static bool build_plan(const packed_transfer *t, kvf_range layers, kvf_plan **out) {
    const model_world *local = &t->w->models[LOCAL];
    uint32_t groups[MAX_GROUPS], count = 0;
    for (uint32_t i = 0; i < local->group_count; i++)
        if (t->ask->groups[local->group_order[i]])
            groups[count++] = i;
    const bool all = count == local->group_count;
    const kvf_plan_options options = {.struct_size = sizeof options,
                                      .replicas = t->w->recipe->first_replica ? KVF_REPLICA_FIRST
                                                                              : KVF_REPLICA_SPREAD,
                                      .layers = layers,
                                      .groups = all ? NULL : groups,
                                      .group_count = all ? 0 : count,
                                      .convert = t->ask->converts ? KVF_CONVERTED_DTYPES : 0};
    kvf_status status = kvf_plan_build(t->shard, t->plan->remote, &options, out);
    return status ? wrong("kvf_plan_build() of layers [%u, %u) gives %s: %s", layers.begin, layers.end,
                          kvf_status_name(status), kvf_error_detail())
                  : true;
}

/* Keeps the steps before or after a cut in each group. A group that a window clips is not cut, since its needed steps
 * depend on the last one. */
static void cut_steps(const packed_transfer *t, const uint32_t *cuts, bool before,
                      kvf_group_request *groups) {
    for (uint32_t i = 0; i < t->w->models[LOCAL].group_count; i++) {
        const uint32_t g = t->w->models[LOCAL].group_order[i];
        const group_tables *tables = &t->w->tables[g];
        const uint64_t cut = tables->first == tables->begin ? groups[i].begin + cuts[i] : groups[i].begin;
        if (!t->ask->groups[g] || cut > groups[i].end)
            continue;
        if (before)
            groups[i].end = cut;
        else
            groups[i].begin = cut;
    }
}

static bool make_chunk(const packed_transfer *t, kvf_range layers, const uint32_t *cuts, bool before,
                       chunk *out) {
    kvf_group_request groups[MAX_GROUPS];
    fill_request_form(t->w, t->ask, groups);
    if (cuts)
        cut_steps(t, cuts, before, groups);
    if (!build_plan(t, layers, &out->plan))
        return false;
    kvf_status status = kvf_request_create(out->plan, &out->request);
    if (!status)
        status = kvf_request_set(out->request, groups, t->w->models[LOCAL].group_count);
    return status ? wrong("a chunk gives %s: %s", kvf_status_name(status), kvf_error_detail()) : true;
}

/* Cuts the request by layers, by steps, by both, or not at all. */
static bool make_chunks(flow_world *w, chunk *out, uint32_t *count) {
    const packed_transfer *t = w->t;
    const model_world *local = &t->w->models[LOCAL];
    const bool some = t->ask->layers_begin < t->ask->layers_end;
    const kvf_range all = {some ? t->ask->layers_begin : 0, some ? t->ask->layers_end : local->layer_count};
    kvf_range layers[2] = {all};
    uint32_t cuts[MAX_GROUPS], ranges = 1;
    if (all.end - all.begin > 1 && rng_chance(&w->random, 50)) {
        layers[0].end = layers[1].begin = rng_between(&w->random, all.begin + 1, all.end - 1);
        layers[1].end = all.end;
        ranges = 2;
    }
    const bool by_steps = rng_chance(&w->random, 50);
    for (uint32_t i = 0; i < local->group_count; i++) {
        const group_tables *tables = &t->w->tables[local->group_order[i]];
        cuts[i] = rng_between(&w->random, 0, tables->end - tables->begin);
    }
    note_if(KIND_FLOW_LAYERS, ranges > 1);
    note_if(KIND_FLOW_STEPS, by_steps);
    for (uint32_t i = 0; i < ranges; i++)
        for (uint32_t part = 0; part < (by_steps ? 2u : 1u); part++)
            if (!make_chunk(t, layers[i], by_steps ? cuts : NULL, part == 0, &out[(*count)++]))
                return false;
    return true;
}

static void free_chunks(const chunk *chunks, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        kvf_request_free(chunks[i].request);
        kvf_plan_free(chunks[i].plan);
    }
}

/* ---- moving ----------------------------------------------------------------------------------- */

typedef struct flow_moves {
    kvf_move *moves[CHUNKS_MAX * MAX_RANKS];
    uint32_t count;
    uint64_t bytes;
} flow_moves;

static kvf_status pull(flow_world *w, const chunk *c, const kvf_move_options *options, flow_moves *out) {
    kvf_peer *peers[MAX_RANKS];
    for (uint32_t s = 0; s < kvf_plan_source_count(c->plan); s++)
        peers[s] = w->local.peers[kvf_plan_source_rank(c->plan, s)];
    return kvf_stage_pull(w->local.stage, c->request, peers, options, &out->moves[out->count++]);
}

static kvf_status push(flow_world *w, const chunk *c, const kvf_move_options *options, flow_moves *out) {
    kvf_status status = KVF_OK;
    for (uint32_t s = 0; s < kvf_plan_source_count(c->plan) && !status; s++) {
        flow_end *source = &w->remote[kvf_plan_source_rank(c->plan, s)];
        status =
            kvf_stage_push(source->stage, c->request, s, source->peers[0], options, &out->moves[out->count]);
        out->count += status == KVF_OK;
    }
    return status;
}

/* Conversions go packed, and so does a case that spoils a byte in a slot. */
static kvf_way draw_way(flow_world *w, const chunk *c) {
    if (w->spoil || kvf_plan_converts(c->plan))
        return KVF_WAY_PACKED;
    return rng_chance(&w->random, DIRECT_PERCENT)   ? KVF_WAY_DIRECT
           : rng_chance(&w->random, CHOSEN_PERCENT) ? KVF_WAY_AUTO
                                                    : KVF_WAY_PACKED;
}

static bool start(flow_world *w, const chunk *c, bool pushed, flow_moves *out) {
    const kvf_way way = draw_way(w, c);
    const kvf_move_options options = {
        .struct_size = sizeof options, .way = way, .priority = rng_below(&w->random, 3)};
    note_if(KIND_FLOW_DIRECT, options.way == KVF_WAY_DIRECT);
    note_if(KIND_FLOW_CHOSEN, options.way == KVF_WAY_AUTO);
    out->moves[out->count] = NULL;
    const kvf_arena *arena = &w->local.stage->arenas[KVF_MEMORY_HOST];
    for (uint32_t s = 0; s < kvf_plan_source_count(c->plan); s++) {
        const uint64_t bytes = kvf_request_bytes(c->request, s);
        out->bytes += bytes;
        note_if(KIND_FLOW_PULL, !pushed && bytes > 0);
        note_if(KIND_FLOW_PUSH, pushed && bytes > 0);
        note_if(KIND_FLOW_BEYOND_ARENA,
                options.way == KVF_WAY_PACKED && bytes > (uint64_t)arena->slot_count * arena->slot_bytes);
    }
    kvf_status status = pushed ? push(w, c, &options, out) : pull(w, c, &options, out);
    return status ? wrong("a move gives %s: %s", kvf_status_name(status), kvf_error_detail()) : true;
}

/* Moves all chunks at once, each pulled or pushed; with `spoil` all are pulled. */
static bool move_chunks(flow_world *w, const chunk *chunks, uint32_t count, bool spoil) {
    flow_moves all = {.count = 0};
    bool good = true;
    w->spoil = spoil;
    for (uint32_t i = 0; i < count && good; i++)
        good = start(w, &chunks[i], !spoil && rng_chance(&w->random, 50), &all);
    good = good && finish(w, all.moves, all.count, all.bytes);
    for (uint32_t i = 0; i < all.count; i++)
        kvf_move_free(all.moves[i]);
    return good && settle(w) && nobody_is_blamed(w);
}

/* Makes every byte that will move wrong, and every other byte as it must stay. */
static void reset_memory(const flow_world *w, const memory *expected, const memory *written) {
    const kvf_shard_desc *desc = kvf_shard_get(w->t->shard);
    for (uint32_t i = 0; i < desc->region_count; i++)
        for (uint64_t at = 0; at < desc->region_bytes[i]; at++)
            w->memory.regions[i][at] =
                (unsigned char)(expected->regions[i][at] ^ (written->regions[i][at] ? 0xff : 0));
}

static uint64_t wrong_bytes(const flow_world *w, const memory *expected, uint32_t *region, uint64_t *first) {
    const kvf_shard_desc *desc = kvf_shard_get(w->t->shard);
    uint64_t found = 0;
    for (uint32_t i = desc->region_count; i-- > 0;)
        for (uint64_t at = desc->region_bytes[i]; at-- > 0;)
            if (w->memory.regions[i][at] != expected->regions[i][at]) {
                found++;
                *region = i;
                *first = at;
            }
    return found;
}

static bool move_and_compare(flow_world *w, const chunk *chunks, uint32_t count, const memory *expected,
                             const memory *written) {
    uint32_t region = 0;
    uint64_t first = 0, found;
    if (rng_chance(&w->random, CONTROL_PERCENT)) {
        reset_memory(w, expected, written);
        if (!move_chunks(w, chunks, count, true))
            return false;
        found = wrong_bytes(w, expected, &region, &first);
        note_if(KIND_FLOW_SPOILED, w->spoiled);
        if (found != w->spoiled)
            return wrong("%llu bytes are wrong after %u was spoiled", (unsigned long long)found, w->spoiled);
    }
    reset_memory(w, expected, written);
    if (!move_chunks(w, chunks, count, false))
        return false;
    found = wrong_bytes(w, expected, &region, &first);
    return found ? wrong("%llu bytes are wrong after flows, the first at %llu of region %u",
                         (unsigned long long)found, (unsigned long long)first, region)
                 : true;
}

bool move_in_flows(const packed_transfer *t, const memory *expected, const memory *written) {
    flow_world *w = arena_take(1, sizeof *w);
    chunk chunks[CHUNKS_MAX] = {{NULL, NULL}};
    uint32_t count = 0;
    memset(w, 0, sizeof *w);
    w->t = t;
    w->random.state = mix64(t->w->recipe->ids_seed + 2000 + t->rank);
    w->flows = rng_between(&w->random, 1, FLOWS_MOST);
    const kvf_shard_desc *desc = kvf_shard_get(t->shard);
    for (uint32_t i = 0; i < desc->region_count; i++)
        w->memory.regions[i] = arena_take(desc->region_bytes[i] + 8, 1);
    bool good = open_world(w) && make_chunks(w, chunks, &count) &&
                move_and_compare(w, chunks, count, expected, written);
    close_world(w);
    free_chunks(chunks, count);
    return good;
}
