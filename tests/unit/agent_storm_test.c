/*
 * Everything at once, by a seed: pulls and pushes, cancelled or never met; messages lost, repeated and late; agents
 * that stop for longer than a lease, and agents that are replaced; priorities and caps; blocks that come with chunks;
 * and memory that is written after the call, before an event. Each request must have one result and free its blocks
 * once, a request that is done must have its bytes, and in the end nothing may be left.
 */
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "agent_letters.h"
#include "agent_world.h"

#define SLOTS 8u /* requests at once */
#define TURNS 600u
#define TOKENS 50u

typedef struct side {
    bool wanted; /* not started yet */
    uint64_t ticket[WORLD_MAX_RANKS];
    uint32_t open; /* bits of ranks whose blocks are not free */
    uint32_t told; /* bits of ranks that have a result */
} side;

typedef struct slot {
    char id[16];
    bool push, in_chunks;
    bool written; /* the producer's memory is written */
    int fd;       /* readable once it is written */
    kvf_ready_event event;
    uint32_t seed;
    world_request held, wanted;
    side p, d;
} slot;

typedef struct storm {
    world w;
    slot slots[SLOTS];
    kvf_agent *stopped[2];
    uint64_t wakes[2];
    uint64_t random;
    uint32_t made, done, failed;
} storm;

static const kvf_agent_options hasty = {
    .struct_size = sizeof hasty, .lease_ns = 400 * MS, .peer_timeout_ns = 100 * MS};

static uint32_t draw(storm *s, uint32_t below) {
    s->random ^= s->random << 13;
    s->random ^= s->random >> 7;
    s->random ^= s->random << 17;
    return (uint32_t)(s->random >> 20) % below;
}

static void make_slot(storm *s, uint32_t i) {
    slot *o = &s->slots[i];
    (void)snprintf(o->id, sizeof o->id, "%u", draw(s, 4) ? s->made : i); /* ids are sometimes reused */
    s->made++;
    o->push = draw(s, 2);
    o->seed = s->made;
    world_request_make(&s->w, &s->w.p, o->id, TOKENS, 4 * i, 1, &o->held);
    world_request_make(&s->w, &s->w.d, o->id, TOKENS, 4 * i, 1, &o->wanted);
    o->held.request.deadline_ns = o->push ? 1500 * MS : 0;
    o->wanted.request.deadline_ns = 1500 * MS;
    o->wanted.request.contact = s->w.p.contact;
    o->held.request.priority = o->wanted.request.priority = (int32_t)draw(s, 3) - 1;
    o->held.request.bytes_per_second = o->wanted.request.bytes_per_second = draw(s, 3) ? 0 : 40000;
    o->in_chunks = draw(s, 2);
    o->written = draw(s, 2);
    o->event = (kvf_ready_event){.struct_size = sizeof o->event, .kind = KVF_READY_FD, .fd = o->fd};
    o->held.request.after = o->written ? NULL : &o->event;
    world_fill(&s->w, &s->w.p, &o->held, o->written ? o->seed : ~o->seed);
    uint64_t count; /* of the former request */
    while (read(o->fd, &count, sizeof count) > 0) {
    }
    o->p = (side){.wanted = draw(s, 16) != 0};
    o->d = (side){.wanted = draw(s, 16) != 0};
}

static void write_memory(storm *s, slot *o) {
    const uint64_t one = 1;
    world_fill(&s->w, &s->w.p, &o->held, o->seed);
    assert_int_equal(write(o->fd, &one, sizeof one), sizeof one);
    o->written = true;
}

/* Pushes, with all blocks at once or with blocks in the chunks. */
static kvf_status push(const slot *o, kvf_agent *agent, uint64_t *ticket) {
    kvf_agent_request request = o->held.request;
    kvf_group_steps without = o->held.groups[0];
    without.table.count = 0;
    request.groups = o->in_chunks ? &without : request.groups;
    kvf_status status = kvf_agent_push(agent, &request, ticket);
    if (status || !o->in_chunks)
        return status ? status : kvf_agent_push_ready(agent, *ticket, NULL);
    kvf_block_table first = {o->held.ids[0], 2, 0}, rest = {o->held.ids[0] + 2, 2, 2};
    kvf_push_chunk chunk = *CHUNK(0, 20, 2);
    chunk.tables = &first;
    chunk.table_count = 1;
    assert_ok(kvf_agent_push_ready(agent, *ticket, &chunk));
    chunk = *CHUNK(0, 20, UINT32_MAX);
    assert_ok(kvf_agent_push_ready(agent, *ticket, &chunk));
    chunk = *CHUNK(20, TOKENS, UINT32_MAX);
    chunk.tables = &rest;
    chunk.table_count = 1;
    return kvf_agent_push_ready(agent, *ticket, &chunk);
}

/* Starts the request on all ranks of a side. If another request still has the id or a block, a later turn tries
 * again. */
static void ask(storm *s, slot *o, bool producer) {
    world_engine *e = producer ? &s->w.p : &s->w.d;
    side *at = producer ? &o->p : &o->d;
    for (uint32_t r = 0; r < e->rank_count; r++) {
        kvf_agent *agent = e->agents[r] ? e->agents[r] : s->stopped[producer ? r : 1];
        const kvf_agent_request *request = producer ? &o->held.request : &o->wanted.request;
        kvf_status status =
            producer
                ? (o->push ? push(o, agent, &at->ticket[r]) : kvf_agent_hold(agent, request, &at->ticket[r]))
                : (o->push ? kvf_agent_expect : kvf_agent_pull)(agent, request, &at->ticket[r]);
        if (status == KVF_E_EXISTS)
            continue;
        assert_ok(status);
        at->open |= 1u << r;
    }
    at->wanted = false;
}

static bool takes(storm *s, slot *o, const world_outcome *event) {
    for (int producer = 0; producer < 2; producer++) {
        world_engine *e = producer ? &s->w.p : &s->w.d;
        side *at = producer ? &o->p : &o->d;
        for (uint32_t r = 0; r < e->rank_count; r++) {
            const kvf_agent *agent = e->agents[r] ? e->agents[r] : s->stopped[producer ? r : 1];
            uint32_t bit = 1u << r;
            if (agent != event->agent || !(at->open & bit) || at->ticket[r] != event->ticket)
                continue;
            assert_int_equal((at->told & bit) != 0, event->kind == KVF_EVENT_BLOCKS_FREE);
            at->told |= bit;
            if (event->blocks_free)
                at->open &= ~bit;
            if (!producer && event->kind == KVF_EVENT_DONE)
                assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &o->wanted, o->seed), 0);
            s->done += event->kind == KVF_EVENT_DONE;
            s->failed += event->kind == KVF_EVENT_FAILED;
            return true;
        }
    }
    return false;
}

static void take_events(storm *s) {
    for (uint32_t n = 0; n < s->w.outcome_count; n++) {
        const world_outcome *event = &s->w.outcomes[n];
        bool taken = event->ticket == 0;
        for (uint32_t i = 0; i < SLOTS && !taken; i++)
            taken = takes(s, &s->slots[i], event);
        if (!taken)
            fail_msg("event %d of ticket %llu, which has ended: %s", event->kind,
                     (unsigned long long)event->ticket, event->detail);
    }
    world_forget(&s->w);
}

static void cancel_some(storm *s, slot *o) {
    bool producer = draw(s, 2);
    world_engine *e = producer ? &s->w.p : &s->w.d;
    side *at = producer ? &o->p : &o->d;
    for (uint32_t r = 0; r < e->rank_count; r++)
        if (e->agents[r] && at->open >> r & 1)
            (void)kvf_agent_cancel(e->agents[r], at->ticket[r]);
}

/* Stops one rank of P, or D, for a while, or wakes it. */
static void stop_or_wake(storm *s) {
    kvf_agent **places[] = {&s->w.p.agents[0], &s->w.d.agents[0]};
    for (uint32_t i = 0; i < 2; i++) {
        if (s->stopped[i] && world_now() >= s->wakes[i]) {
            *places[i] = s->stopped[i];
            s->stopped[i] = NULL;
        } else if (!s->stopped[i] && draw(s, 60) == 0) {
            s->stopped[i] = *places[i];
            *places[i] = NULL;
            s->wakes[i] = world_now() + draw(s, 700) * MS;
        }
    }
}

/* Replaces the consumer, which dies, by another one. */
static void replace(storm *s, uint32_t loss) {
    if (s->stopped[0] || s->stopped[1])
        return;
    letters_begin(); /* messages on their way are lost */
    world_close_agents(&s->w.d);
    for (uint32_t i = 0; i < SLOTS; i++)
        s->slots[i].d = (side){0};
    world_open_agents(&s->w.d, &hasty);
    letters_scramble(draw(s, 1000) + 1, loss, loss, loss);
}

static void run(uint64_t seed, uint32_t loss) {
    static storm s;
    memset(&s, 0, sizeof s);
    s.random = seed * 0x9E3779B97F4A7C15u | 1;
    world_open_model(&s.w, attention(3, 4, 8), ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64}),
                     ENGINE(.name = "D", .all = {.block_count = 64, .order = "BLHNP"}), &hasty);
    for (uint32_t i = 0; i < SLOTS; i++)
        assert_true((s.slots[i].fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) >= 0);
    letters_begin();
    letters_scramble(seed, loss, loss, loss);
    for (uint32_t turn = 0; turn < TURNS; turn++) {
        for (uint32_t i = 0; i < SLOTS; i++) {
            slot *o = &s.slots[i];
            if (!o->p.wanted && !o->d.wanted && !o->p.open && !o->d.open)
                make_slot(&s, i);
            if (o->p.wanted && draw(&s, 3) == 0)
                ask(&s, o, true);
            if (o->d.wanted && draw(&s, 3) == 0)
                ask(&s, o, false);
            if (!o->written && draw(&s, 6) == 0)
                write_memory(&s, o);
            if (draw(&s, 50) == 0)
                cancel_some(&s, o);
        }
        stop_or_wake(&s);
        if (draw(&s, 100) == 0)
            replace(&s, loss);
        for (uint32_t n = draw(&s, 20); n > 0; n--)
            world_work(&s.w);
        take_events(&s);
    }
    if (s.stopped[0])
        s.w.p.agents[0] = s.stopped[0];
    if (s.stopped[1])
        s.w.d.agents[0] = s.stopped[1];
    s.stopped[0] = s.stopped[1] = NULL;
    uint64_t end = world_now() + WORLD_PATIENCE_S * SECOND;
    for (uint32_t open = 1; open && world_now() < end;) {
        open = 0;
        world_work(&s.w);
        take_events(&s);
        for (uint32_t i = 0; i < SLOTS; i++)
            open |= s.slots[i].p.open | s.slots[i].d.open;
    }
    letters_end();
    world_quiet(&s.w);
    print_message("seed %llu: %u requests, %u done, %u failed\n", (unsigned long long)seed, s.made, s.done,
                  s.failed);
    assert_true(s.done + s.failed > 0);
    world_close(&s.w);
    for (uint32_t i = 0; i < SLOTS; i++)
        (void)close(s.slots[i].fd);
}

static void nothing_is_left_after_a_storm(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 4; seed++)
        run(seed, seed % 2 ? 10 : 2);
}

/* More seeds: agent_storm_test FIRST COUNT */
int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(nothing_is_left_after_a_storm)};
    if (argc == 3) {
        uint64_t first = strtoull(argv[1], NULL, 10), count = strtoull(argv[2], NULL, 10);
        (void)world_is_simulated(NULL);
        for (uint64_t seed = first; seed < first + count; seed++)
            run(seed, seed % 2 ? 10 : 2);
        return 0;
    }
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
