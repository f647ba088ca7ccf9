#include "agent_model.h"

#include "agent/agent.h"
#include "agent_net.h"
#include "shapes.h"

fuzz_agent fuzz_agents[AGENTS] = {{.name = "A", .endpoint = "tcp://127.0.0.1:20001"},
                                  {.name = "B", .endpoint = "tcp://127.0.0.1:20002"}};

static const kvf_engine *engine_named(uint32_t which) {
    static kvf_model *model;
    static kvf_engine *engines[AGENTS];
    if (!model)
        model = hybrid(2);
    if (!engines[which])
        engines[which] =
            engine_of(model, ENGINE(.name = fuzz_agents[which].name,
                                    .all = {.tokens_per_block = BLOCK_TOKENS, .block_count = BLOCKS}));
    return engines[which];
}

void fuzz_agent_open(uint32_t which) {
    fuzz_agent *a = &fuzz_agents[which];
    const kvf_agent_options options = {.struct_size = sizeof options,
                                       .listen = a->endpoint,
                                       .transport = "inproc",
                                       .lease_ns = 2 * FUZZ_SECOND,
                                       .peer_timeout_ns = FUZZ_SECOND / 2,
                                       .idle_ns = 10 * FUZZ_SECOND,
                                       .longest_ns = 20 * FUZZ_SECOND,
                                       .max_peers = 6,
                                       .max_requests_per_peer = 8,
                                       .max_bytes_for_peers = FUZZ_BUDGET,
                                       .verify = which == 1,
                                       .local_commands = which == 0};
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(engine_named(which), 0));
    kvf_memory regions[8];
    FUZZ_MUST(shard->region_count <= 8);
    FUZZ_MUST(!kvf_agent_open_in(&net_surroundings, engine_named(which), 0, &options, &a->agent));
    for (uint32_t i = 0; i < shard->region_count; i++) {
        a->bytes[i] = shard->region_bytes[i];
        FUZZ_MUST(!kvf_agent_allocate(a->agent, KVF_MEMORY_HOST, 0, a->bytes[i], &a->memory[i]));
        regions[i] =
            (kvf_memory){.struct_size = sizeof(kvf_memory), .address = a->memory[i], .bytes = a->bytes[i]};
    }
    FUZZ_MUST(!kvf_agent_register(a->agent, regions, shard->region_count));
    a->region_count = shard->region_count;
    a->ticket_count = 0;
}

void fuzz_agent_shut(uint32_t which) {
    fuzz_agent *a = &fuzz_agents[which];
    kvf_agent_close(a->agent);
    a->agent = NULL;
    a->ticket_count = 0;
}

/* ---- tickets --------------------------------------------------------------------------------- */

/* Removes tickets that are over. */
static void sweep(fuzz_agent *a) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < a->ticket_count; i++)
        if (!a->tickets[i].freed)
            a->tickets[kept++] = a->tickets[i];
    a->ticket_count = kept;
}

fuzz_ticket *fuzz_book(fuzz_agent *a, uint64_t number, kvf_request_kind kind, const char *id) {
    if (a->ticket_count == TICKETS_MAX)
        sweep(a);
    FUZZ_MUST(a->ticket_count < TICKETS_MAX); /* callers check has_room() */
    fuzz_ticket *ticket = &a->tickets[a->ticket_count++];
    *ticket = (fuzz_ticket){.number = number, .kind = kind};
    (void)snprintf(ticket->id, sizeof ticket->id, "%s", id);
    return ticket;
}

static fuzz_ticket *find(fuzz_agent *a, uint64_t number) {
    for (uint32_t i = 0; i < a->ticket_count; i++)
        if (a->tickets[i].number == number)
            return &a->tickets[i];
    return NULL;
}

fuzz_ticket *fuzz_nth_ticket(fuzz_agent *a, kvf_request_kind kind, uint32_t n) {
    fuzz_ticket *matching[TICKETS_MAX];
    uint32_t count = 0;
    for (uint32_t i = 0; i < a->ticket_count; i++)
        if (!a->tickets[i].freed && (!kind || a->tickets[i].kind == kind))
            matching[count++] = &a->tickets[i];
    return count ? matching[n % count] : NULL;
}

bool fuzz_agent_has_tickets(const fuzz_agent *a) {
    for (uint32_t i = 0; i < a->ticket_count; i++)
        if (!a->tickets[i].freed)
            return true;
    return false;
}

static bool writes(const fuzz_ticket *ticket) {
    return ticket->kind == KVF_REQUEST_PULL || ticket->kind == KVF_REQUEST_EXPECT;
}

/* An event may name only blocks of its own ticket as invalid. */
static void check_invalid(const fuzz_ticket *ticket, const kvf_event *event) {
    for (uint32_t g = 0; g < event->group_count; g++)
        for (uint32_t i = 0; i < event->invalid[g].count; i++) {
            FUZZ_MUST(event->invalid[g].ids[i] < BLOCKS);
            FUZZ_MUST(ticket->blocks[g] & 1u << event->invalid[g].ids[i]);
        }
}

static void take_event(fuzz_agent *a, const kvf_event *event) {
    if (event->kind == KVF_EVENT_DRAINED)
        FUZZ_MUST(!fuzz_agent_has_tickets(a));
    if (!event->ticket)
        return;
    fuzz_ticket *ticket = find(a, event->ticket);
    FUZZ_MUST(ticket && !ticket->freed && ticket->kind == event->request_kind);
    FUZZ_MUST(event->id.size == strlen(ticket->id) &&
              memcmp(event->id.data, ticket->id, event->id.size) == 0);
    if (event->kind == KVF_EVENT_BLOCKS_FREE) {
        FUZZ_MUST(ticket->failed && event->blocks_free);
    } else {
        bool connect = ticket->kind == KVF_REQUEST_CONNECT;
        FUZZ_MUST(!ticket->told);
        ticket->told = true;
        ticket->failed = event->kind == KVF_EVENT_FAILED;
        FUZZ_MUST(ticket->failed || event->kind == (connect ? KVF_EVENT_PEER_READY : KVF_EVENT_DONE));
        FUZZ_MUST(event->detail); /* "" if a peer gave no reason */
        FUZZ_MUST(ticket->failed ? event->status != KVF_OK : event->blocks_free && !event->status);
        check_invalid(ticket, event);
    }
    ticket->freed = event->blocks_free;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

typedef struct counts {
    uint64_t held, filling, in_doubt;
} counts;

static void check_block(const fuzz_agent *a, uint32_t group, uint32_t block, counts *sum) {
    const fuzz_ticket *writer = NULL;
    uint32_t users = 0, found;
    kvf_block_state state;
    for (uint32_t i = 0; i < a->ticket_count; i++) {
        const fuzz_ticket *ticket = &a->tickets[i];
        if (ticket->freed || !(ticket->blocks[group] & 1u << block))
            continue;
        users++;
        writer = writes(ticket) ? ticket : writer;
    }
    FUZZ_MUST(!writer ||
              users == 1); /* a block is never filled for two tickets, nor read while it is filled */
    FUZZ_MUST(!kvf_agent_block(a->agent, group, block, &state, &found));
    FUZZ_MUST(found == users);
    if (writer)
        FUZZ_MUST(state == (writer->told ? KVF_BLOCK_IN_DOUBT : KVF_BLOCK_FILLING));
    else if (users > 0)
        FUZZ_MUST(state == KVF_BLOCK_HELD || state == KVF_BLOCK_LEASED);
    else
        FUZZ_MUST(state == KVF_BLOCK_FREE);
    sum->held += !writer && users > 0;
    sum->filling += writer && !writer->told;
    sum->in_doubt += writer && writer->told;
}

static kvf_agent_stats stats_of(const fuzz_agent *a) {
    kvf_agent_stats stats = {.struct_size = sizeof stats};
    FUZZ_MUST(!kvf_agent_get_stats(a->agent, &stats));
    return stats;
}

/* An agent counts a ticket that is over until its next round of work. */
static void check_counts(const fuzz_agent *a, const counts *sum) {
    kvf_agent_stats stats = stats_of(a);
    uint64_t open[KVF_REQUEST_KINDS] = {0};
    for (uint32_t i = 0; i < a->ticket_count; i++)
        open[a->tickets[i].kind] += !a->tickets[i].freed;
    for (uint32_t k = 0; k < KVF_REQUEST_KINDS; k++)
        FUZZ_MUST(stats.requests_now[k] >= open[k]);
    FUZZ_MUST(stats.blocks_held_now == sum->held && stats.blocks_filling_now == sum->filling);
    FUZZ_MUST(stats.blocks_in_doubt_now == sum->in_doubt);
    FUZZ_MUST(a->agent->kept_bytes <= FUZZ_BUDGET && a->agent->kept_bytes <= stats.memory_now_bytes);
}

void fuzz_agent_check(fuzz_agent *a) {
    kvf_event event = {.struct_size = sizeof event};
    counts sum = {0};
    if (!a->agent)
        return;
    while (kvf_agent_next_event(a->agent, &event) == KVF_OK)
        take_event(a, &event);
    for (uint32_t g = 0; g < GROUPS; g++)
        for (uint32_t b = 0; b < BLOCKS; b++)
            check_block(a, g, b, &sum);
    check_counts(a, &sum);
}

void fuzz_agent_is_free(const fuzz_agent *a) {
    kvf_agent_stats stats = stats_of(a);
    FUZZ_MUST(!fuzz_agent_has_tickets(a));
    for (uint32_t k = 0; k < KVF_REQUEST_KINDS; k++)
        FUZZ_MUST(stats.requests_now[k] == 0);
    FUZZ_MUST(stats.leases_now == 0 && stats.peers_now == 0);
    FUZZ_MUST(stats.blocks_held_now + stats.blocks_filling_now + stats.blocks_in_doubt_now == 0);
    FUZZ_MUST(a->agent->kept_bytes == 0);
}
