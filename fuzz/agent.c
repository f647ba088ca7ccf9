/*
 * Two whole agents and three simulated peers, over a simulated network and clock. The input says, step by step, what
 * the engines ask of the agents, what the peers send, and when time passes (agent_steps.h). After each step the agents'
 * events and statistics must agree with a model of them (agent_model.h); in the end, when the peers are gone and time
 * has passed, nothing may be left.
 */
#include "agent_model.h"

#include <sodium.h>

#include "agent_net.h"
#include "agent_peer.h"
#include "agent_steps.h"

#define ROUNDS 64u /* of work at one time: the limit if agents talk without end */
/* Steps of the clock in one input, and as many again in its end; after that it leaps, as for a process that was
 * stopped. */
#define JUMPS 2000u

/* ---- random numbers, the same in every run ----------------------------------------------------- */

static uint64_t chance;

static uint32_t next_random(void) {
    chance = chance * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(chance >> 32);
}

static void fill_random(void *const out, const size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        ((uint8_t *)out)[i] = (uint8_t)next_random();
}

static const char *name_of_random(void) {
    return "fuzz";
}

static struct randombytes_implementation same_chance = {
    .implementation_name = name_of_random, .random = next_random, .buf = fill_random};

/* ---- time ------------------------------------------------------------------------------------ */

static bool work_once(void) {
    bool any = false, busy = false;
    for (uint32_t i = 0; i < AGENTS; i++) {
        FUZZ_MUST(!kvf_agent_progress(fuzz_agents[i].agent, &busy));
        any |= busy;
    }
    for (uint32_t i = 0; i < PEERS; i++)
        if (fuzz_peers[i].link) {
            kvf_link_progress(fuzz_peers[i].link, &busy);
            any |= busy;
        }
    return any;
}

static void work(void) {
    for (uint32_t i = 0; i < ROUNDS && work_once(); i++) {
    }
    for (uint32_t i = 0; i < AGENTS; i++)
        fuzz_agent_check(&fuzz_agents[i]);
}

/* Nanoseconds until an agent or a peer has something to do, at most `left`. */
static uint64_t until_due(uint64_t left) {
    for (uint32_t i = 0; i < AGENTS; i++)
        left = kvf_min_u64(left, kvf_agent_timeout(fuzz_agents[i].agent));
    for (uint32_t i = 0; i < PEERS; i++) {
        uint64_t due = fuzz_peers[i].link ? kvf_link_due(fuzz_peers[i].link) : UINT64_MAX;
        left = kvf_min_u64(left, due > net_now() ? due - net_now() : 0);
    }
    return left ? left : NET_LATENCY_NS;
}

static uint32_t jumps_left;

static void let_pass(uint64_t ns) {
    const uint64_t end = net_now() + ns;
    work();
    for (; jumps_left > 0 && net_now() < end; jumps_left--) {
        net_advance(until_due(end - net_now()));
        work();
    }
    if (net_now() < end) {
        net_advance(end - net_now());
        work();
    }
}

/* ---- the engines' calls ----------------------------------------------------------------------- */

typedef struct wish {
    uint32_t ids[4], state[1];
    kvf_group_steps groups[GROUPS];
    char id[2];
    kvf_agent_request request;
    uint32_t blocks[GROUPS]; /* sets of blocks: those of the tables that a reader or writer claims */
} wish;

static void make_wish(wish *w, const uint8_t *s, bool writes) {
    uint32_t first = s[3] % (BLOCKS + 1), count = s[4] % 5, skip = s[6] & 1 && count > 1;
    uint64_t end = count ? (uint64_t)count * BLOCK_TOKENS - (s[6] >> 1 & 7) : 0;
    *w = (wish){.id = {"abcd"[s[2] % 4]}};
    for (uint32_t i = 0; i < count; i++) {
        w->ids[i] = first + i;
        if (first + i < BLOCKS && !(writes && i < skip))
            w->blocks[0] |= 1u << (first + i);
    }
    w->state[0] = first;
    w->blocks[1] = count && first < BLOCKS ? 1u << first : 0;
    w->groups[0] = (kvf_group_steps){{w->ids, count, 0}, (uint64_t)skip * BLOCK_TOKENS, end};
    w->groups[1] = (kvf_group_steps){{w->state, count > 0, 0}, 0, count > 0};
    w->request = (kvf_agent_request){.struct_size = sizeof w->request,
                                     .id = {w->id, 1},
                                     .groups = w->groups,
                                     .group_count = GROUPS,
                                     .deadline_ns = (1 + s[7] % 16) * FUZZ_SECOND,
                                     .consumers = 1 + (s[6] >> 6 & 1),
                                     .priority = s[6] >> 7,
                                     .bytes_per_second = s[6] & 0x20 ? 1000 : 0};
}

static kvf_contact contact_of(uint32_t who, uint32_t n) {
    n %= PEERS + 1;
    if (n == 0)
        return (kvf_contact){.engine = fuzz_agents[!who].name, .endpoint = fuzz_agents[!who].endpoint};
    return (kvf_contact){.engine = fuzz_peers[n - 1].name, .endpoint = fuzz_peer_endpoint(n - 1)};
}

static bool has_room(const fuzz_agent *a) {
    uint32_t open = 0;
    for (uint32_t i = 0; i < a->ticket_count; i++)
        open += !a->tickets[i].freed;
    return open < TICKETS_MAX;
}

static void ask(uint32_t who, kvf_request_kind kind, const uint8_t *s) {
    fuzz_agent *a = &fuzz_agents[who];
    wish w;
    uint64_t number = 0;
    kvf_status status;
    make_wish(&w, s, kind == KVF_REQUEST_PULL || kind == KVF_REQUEST_EXPECT);
    w.request.contact = contact_of(who, s[5]);
    bool later = kind == KVF_REQUEST_PULL && s[6] & 0x10;
    if (later)
        w.request.groups = NULL, w.request.group_count = 0;
    const kvf_record records[] = {{.name = "routed", .end = s[5], .data = s, .size = s[6] & 7},
                                  {.name = "token", .begin = s[5], .end = s[5] + 1u, .data = s, .size = 4}};
    w.request.records = records;
    w.request.record_count = s[6] >> 5 & 3; /* three are too many: the last is invalid */
    if (w.request.record_count == 3)
        w.request.records = NULL;
    if (kind == KVF_REQUEST_HOLD)
        status = kvf_agent_hold(a->agent, &w.request, &number);
    else if (kind == KVF_REQUEST_PULL)
        status = kvf_agent_pull(a->agent, &w.request, &number);
    else if (kind == KVF_REQUEST_PUSH)
        status = kvf_agent_push(a->agent, &w.request, &number);
    else
        status = kvf_agent_expect(a->agent, &w.request, &number);
    if (status) {
        fuzz_check_refusal(status);
        return;
    }
    fuzz_ticket *ticket = fuzz_book(a, number, kind, w.id);
    if (!later)
        memcpy(ticket->blocks, w.blocks, sizeof w.blocks);
}

static void pull_into(fuzz_agent *a, const uint8_t *s) {
    fuzz_ticket *ticket = fuzz_nth_ticket(a, KVF_REQUEST_PULL, s[2]);
    wish w;
    make_wish(&w, s, true);
    if (!ticket)
        return;
    kvf_status status = kvf_agent_pull_into(a->agent, ticket->number, w.groups, GROUPS);
    if (status)
        fuzz_check_refusal(status);
    else
        memcpy(ticket->blocks, w.blocks, sizeof w.blocks);
}

static void push_ready(fuzz_agent *a, const uint8_t *s) {
    const fuzz_ticket *ticket = fuzz_nth_ticket(a, KVF_REQUEST_PUSH, s[2]);
    const kvf_push_chunk chunk = {
        .struct_size = sizeof chunk, .begin = s[3], .end = s[4], .layers = s[5] % 6};
    if (!ticket)
        return;
    kvf_status status = kvf_agent_push_ready(a->agent, ticket->number, s[6] & 1 ? &chunk : NULL);
    if (status)
        fuzz_check_refusal(status);
}

static void reply(fuzz_agent *a, const uint8_t *s) {
    const kvf_record records[] = {{.name = "where", .data = s, .size = s[5] & 7}};
    kvf_status status =
        kvf_agent_reply(a->agent, s[4], (kvf_status)s[7], "the engine says so", records, s[5] & 1);
    if (status)
        fuzz_check_refusal(status);
}

static void cancel(fuzz_agent *a, const uint8_t *s) {
    const fuzz_ticket *ticket = fuzz_nth_ticket(a, KVF_REQUEST_NONE, s[2]);
    if (s[3] == UINT8_MAX) {
        FUZZ_MUST(!kvf_agent_drain(a->agent, FUZZ_SECOND * s[7]));
        return;
    }
    if (s[3] == UINT8_MAX - 2) {
        FUZZ_MUST(!kvf_agent_resume(a->agent));
        return;
    }
    if (s[3] == UINT8_MAX - 1) {
        reply(a, s);
        return;
    }
    if (!ticket)
        return;
    kvf_status status = kvf_agent_cancel(a->agent, ticket->number);
    if (status)
        fuzz_check_refusal(status);
}

static void connect_to(uint32_t who, const uint8_t *s) {
    const kvf_contact contact = contact_of(who, s[5]);
    uint64_t number;
    kvf_status status =
        kvf_agent_connect(fuzz_agents[who].agent, &contact, FUZZ_SECOND * (1 + s[7] % 8), &number);
    if (status)
        fuzz_check_refusal(status);
    else
        (void)fuzz_book(&fuzz_agents[who], number, KVF_REQUEST_CONNECT, "");
}

/* Takes a region back, or registers it. A region that is taken back must not be in use; requests are then refused until
 * it is registered again. */
static void change_region(fuzz_agent *a, const uint8_t *s) {
    uint32_t region = s[3] % a->region_count;
    const kvf_memory memory = {
        .struct_size = sizeof memory, .address = a->memory[region], .bytes = a->bytes[region]};
    kvf_status status = s[2] & 1 ? kvf_agent_register_region(a->agent, region, &memory)
                                 : kvf_agent_unregister_region(a->agent, region);
    if (status)
        fuzz_check_refusal(status);
}

static void restart(uint32_t who) {
    fuzz_agent_shut(who);
    fuzz_agent_open(who);
}

static void take_step(const uint8_t *s) {
    const fuzz_step step = (fuzz_step)(s[0] % STEPS);
    const uint32_t who = s[1] % AGENTS;
    fuzz_agent *a = &fuzz_agents[who];
    if (step == STEP_WAIT)
        let_pass(1000ull << s[2] % 25);
    else if (step <= STEP_EXPECT && has_room(a))
        ask(who, (kvf_request_kind)step, s);
    else if (step == STEP_INTO)
        pull_into(a, s);
    else if (step == STEP_READY)
        push_ready(a, s);
    else if (step == STEP_CANCEL)
        cancel(a, s);
    else if (step == STEP_CONNECT && has_room(a))
        connect_to(who, s);
    else if (step == STEP_REGION)
        change_region(a, s);
    else if (step == STEP_RESTART)
        restart(who);
    else if (step >= STEP_GREET)
        fuzz_peer_step(s[1] % PEERS, s);
    for (uint32_t i = 0; i < AGENTS; i++)
        fuzz_agent_check(&fuzz_agents[i]);
}

/* Checks that every request ends, whatever the peers have sent. */
static void end(void) {
    jumps_left = JUMPS;
    for (uint32_t i = 0; i < PEERS; i++)
        fuzz_peer_hang_up(i);
    for (uint32_t i = 0;
         i < 32 && (fuzz_agent_has_tickets(&fuzz_agents[0]) || fuzz_agent_has_tickets(&fuzz_agents[1])); i++)
        let_pass(2 * FUZZ_SECOND);
    let_pass(40 * FUZZ_SECOND); /* longer than idle sessions, or anything that peers may ask for, is kept */
    for (uint32_t i = 0; i < AGENTS; i++)
        fuzz_agent_is_free(&fuzz_agents[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static bool chosen;
    if (!chosen)
        (void)randombytes_set_implementation(&same_chance);
    chosen = true;
    chance = 1;
    jumps_left = JUMPS;
    net_reset();
    for (uint32_t i = 0; i < AGENTS; i++)
        fuzz_agent_open(i);
    for (uint32_t i = 0; i < PEERS; i++)
        fuzz_peer_open(i);
    for (uint32_t i = 0; i < STEPS_MAX && size >= STEP_BYTES; i++) {
        take_step(data);
        data += STEP_BYTES;
        size -= STEP_BYTES;
    }
    end();
    for (uint32_t i = 0; i < PEERS; i++)
        fuzz_peer_close(i);
    for (uint32_t i = 0; i < AGENTS; i++)
        fuzz_agent_shut(i);
    return 0;
}
