#include "traffic.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry/agent.h>

#define MS 1000000ull
#define MOST_STEPS 12u
#define CALM_DEADLINE (6000 * MS)

/* One engine's part in a request. */
struct traffic_part {
    uint32_t engine, handle;
    order start;
    bool started, calm;
    uint64_t start_at, deadline_ns, started_at;
    uint64_t stopped_ns[CREW_RANKS]; /* of its processes, before the part began */
    uint64_t cancel_at[CREW_RANKS];  /* 0: never */
    order steps[MOST_STEPS];         /* ORDER_READY */
    uint64_t step_at[MOST_STEPS];
    uint32_t step_count, step;
    struct {
        bool told, free, checked, failed;
        uint64_t told_at;
        bool overdue; /* has been reported */
    } ranks[CREW_RANKS];
    bool kept; /* all ranks are done: its bytes must not change until `keep_until` */
    uint64_t keep_until;
    bool checking;
    traffic_part *next;
};

static const kvf_shard *shape_of(const traffic *t, uint32_t engine) {
    return kvf_engine_shard(t->shapes[engine], 0);
}

static uint32_t ranks_of(const traffic *t, uint32_t engine) {
    return t->crew->engines[engine].rank_count;
}

static bool is_destination(const traffic_part *p) {
    return p->start.start.kind == KVF_REQUEST_PULL || p->start.start.kind == KVF_REQUEST_EXPECT;
}

static const char *const kinds[] = {"none", "hold", "pull", "push", "expect", "connect"};

static void complain(const traffic *t, const traffic_part *p, uint32_t rank, const char *what) {
    char words[ORDERS_WORDS + 200];
    (void)snprintf(words, sizeof words, "%s rank %u, %s %llu (handle %u, age %llu ms): %s",
                   content_engine_name(p->engine), rank, kinds[p->start.start.kind],
                   (unsigned long long)p->start.start.id, p->handle,
                   (unsigned long long)((crew_now() - p->started_at) / MS), what);
    t->on_wrong(t->context, words);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static void fill_stock(traffic *t, uint32_t engine) {
    traffic_stock *s = &t->stocks[engine];
    for (uint32_t g = 0; g < kvf_model_group_count(t->model); g++) {
        s->count[g] = (uint32_t)kvf_shard_get(shape_of(t, engine))->groups[g].block_count;
        for (uint32_t i = 0; i < s->count[g]; i++)
            s->free[g][i] = i;
        for (uint32_t i = s->count[g]; i > 1; i--) {
            uint32_t other = chance_between(&t->chance, 0, i - 1), kept = s->free[g][i - 1];
            s->free[g][i - 1] = s->free[g][other];
            s->free[g][other] = kept;
        }
    }
}

static void give_back(traffic *t, uint32_t engine, const content_table *tables) {
    traffic_stock *s = &t->stocks[engine];
    for (uint32_t g = 0; g < kvf_model_group_count(t->model); g++)
        for (uint32_t i = 0; i < tables[g].count; i++)
            if (tables[g].ids[i] != KVF_NO_BLOCK)
                s->free[g][s->count[g]++] = tables[g].ids[i];
}

/* Takes blocks for the tokens [begin, tokens) in every group; blocks before a window may be left out. */
static bool take_blocks(traffic *t, uint32_t engine, uint32_t begin, uint32_t tokens, content_table *tables) {
    traffic_stock *s = &t->stocks[engine];
    bool enough = t->crew->engines[engine].up;
    memset(tables, 0, CONTENT_GROUPS * sizeof *tables);
    for (uint32_t g = 0; g < kvf_model_group_count(t->model); g++) {
        const kvf_group_desc *group = kvf_model_group(t->model, g);
        uint32_t per_block = content_block_steps(shape_of(t, engine), g);
        content_table *table = &tables[g];
        bool state = group->kind == KVF_GROUP_STATE;
        *table =
            (content_table){.begin = state ? begin >= tokens : (uint32_t)kvf_group_step_count(group, begin),
                            .end = (uint32_t)kvf_group_step_count(group, tokens)};
        if (table->begin >= table->end)
            continue;
        uint32_t needed = (uint32_t)kvf_group_first_needed(group, table->end) / per_block;
        bool gaps = chance_per_mille(&t->chance, 500);
        table->first_block = table->begin / per_block;
        table->count = (table->end - 1) / per_block + 1 - table->first_block;
        for (uint32_t i = 0; i < table->count; i++) {
            table->ids[i] = KVF_NO_BLOCK;
            if (gaps && table->first_block + i < needed)
                continue;
            enough = enough && s->count[g] > 0;
            if (enough)
                table->ids[i] = s->free[g][--s->count[g]];
        }
    }
    if (!enough)
        give_back(t, engine, tables);
    return enough;
}

/* ---- launching ------------------------------------------------------------------------------- */

static uint64_t soon(traffic *t, uint32_t ms) {
    return crew_now() + chance_between(&t->chance, 0, ms * 1000) * 1000ull;
}

static void add_part(traffic *t, traffic_part *p) {
    p->handle = p->start.handle = ++t->next_handle;
    p->start.kind = ORDER_START;
    p->start.start.group_count = kvf_model_group_count(t->model);
    p->calm = t->calm;
    if (p->deadline_ns == 0)
        p->deadline_ns = p->start.start.deadline_ns;
    p->next = t->parts;
    t->parts = p;
    t->part_count++;
    t->counts.parts++;
}

static void plan_cancel(traffic *t, traffic_part *p, uint32_t often) {
    if (t->calm || !chance_per_mille(&t->chance, often))
        return;
    uint64_t at = p->start_at +
                  chance_between(&t->chance, 0, chance_per_mille(&t->chance, 500) ? 3000 : 60000) * 1000ull;
    bool all = chance_per_mille(&t->chance, 500);
    for (uint32_t r = 0; r < ranks_of(t, p->engine); r++)
        if (all || chance_per_mille(&t->chance, 500))
            p->cancel_at[r] = at + chance_between(&t->chance, 0, 2000) * 1000ull;
}

/* Splits a push into chunks of tokens, and those into steps of layers. */
static void plan_steps(traffic *t, traffic_part *p, uint32_t tokens) {
    uint32_t layers = kvf_model_layer_count(t->model), chunks = chance_between(&t->chance, 1, 3), begin = 0;
    uint64_t at = p->start_at;
    chunks = chunks > tokens ? 1 : chunks;
    for (uint32_t c = 0; c < chunks; c++) {
        uint32_t end = tokens * (c + 1) / chunks, done = 0;
        bool by_layer = chance_per_mille(&t->chance, 400);
        while (done < layers && p->step_count < MOST_STEPS) {
            uint32_t next = by_layer ? chance_between(&t->chance, done + 1, layers) : layers;
            order *o = &p->steps[p->step_count];
            at += chance_between(&t->chance, 0, 4000) * 1000ull;
            *o = (order){.kind = ORDER_READY};
            o->ready.begin = begin;
            o->ready.end = end;
            o->ready.layers_before = done;
            o->ready.layers = next == layers ? UINT32_MAX : next;
            o->ready.last = end == tokens;
            p->step_at[p->step_count++] = at;
            done = next;
        }
        begin = end;
    }
    if (!t->calm && chance_per_mille(&t->chance, 40))
        p->step_count = chance_between(&t->chance, 0, p->step_count); /* the rest never becomes ready */
}

typedef struct launch {
    uint32_t producer, tokens, consumers;
    bool push;
    uint64_t id, seed;
} launch;

static traffic_part *make_part(traffic *t, uint32_t engine, const launch *l, kvf_request_kind kind) {
    traffic_part *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->engine = engine;
    p->start_at = soon(t, 20);
    p->start.start.kind = kind;
    p->start.start.id = l->id;
    p->start.start.seed = l->seed;
    p->start.start.before = chance_draw(&t->chance);
    p->start.start.consumers = l->consumers;
    return p;
}

static void set_contact(const traffic *t, traffic_part *p, uint32_t producer) {
    const crew_engine *from = &t->crew->engines[producer];
    (void)snprintf(p->start.start.engine, sizeof p->start.start.engine, "%s", content_engine_name(producer));
    memcpy(p->start.start.endpoint, from->endpoint, sizeof from->endpoint);
    memcpy(p->start.start.public_key, from->public_key, sizeof from->public_key);
}

/* Lets two engines meet before their first request, or before the next. */
static void launch_connect(traffic *t, uint32_t engine, const launch *l) {
    traffic_part *p = t->crew->engines[engine].up ? make_part(t, engine, l, KVF_REQUEST_CONNECT) : NULL;
    if (!p)
        return;
    set_contact(t, p, l->producer);
    p->start.start.deadline_ns = t->calm ? CALM_DEADLINE : chance_between(&t->chance, 300, 2500) * MS;
    add_part(t, p);
}

static bool launch_producer(traffic *t, const launch *l) {
    traffic_part *p = make_part(t, l->producer, l, l->push ? KVF_REQUEST_PUSH : KVF_REQUEST_HOLD);
    if (!p || !take_blocks(t, l->producer, 0, l->tokens, p->start.start.groups)) {
        free(p);
        return false;
    }
    if (l->push) {
        p->start.start.deadline_ns = chance_between(&t->chance, 800, 2500) * MS;
        plan_steps(t, p, l->tokens);
    } else {
        p->start.start.deadline_ns = chance_per_mille(&t->chance, 700) ? 0 : 800 * MS;
        /* It lives as long as its readers do. */
        p->deadline_ns = 2600 * MS + 3 * t->lease_ns;
    }
    if (t->calm)
        p->start.start.deadline_ns = p->deadline_ns = CALM_DEADLINE;
    plan_cancel(t, p, 60);
    add_part(t, p);
    return true;
}

static bool launch_consumer(traffic *t, uint32_t engine, const launch *l) {
    traffic_part *p = make_part(t, engine, l, l->push ? KVF_REQUEST_EXPECT : KVF_REQUEST_PULL);
    uint32_t begin = 0;
    if (chance_per_mille(&t->chance, 300))
        begin = chance_per_mille(&t->chance, 200) ? l->tokens : chance_between(&t->chance, 1, l->tokens - 1);
    if (!p || !take_blocks(t, engine, begin, l->tokens, p->start.start.groups)) {
        free(p);
        return false;
    }
    set_contact(t, p, l->producer);
    p->start.start.deadline_ns = t->calm ? CALM_DEADLINE : chance_between(&t->chance, 800, 2500) * MS;
    if (!l->push && chance_per_mille(&t->chance, 150)) {
        p->start.start.later = true;
        p->steps[0] = (order){.kind = ORDER_READY};
        p->step_at[0] = p->start_at + chance_between(&t->chance, 0, 40) * MS;
        p->step_count = 1;
    }
    plan_cancel(t, p, 100);
    add_part(t, p);
    return true;
}

/* Whether all consumers have blocks for the request. */
static bool launch_consumers(traffic *t, const launch *l, uint32_t first, bool *any, bool alone) {
    bool one = !alone && launch_consumer(t, first, l);
    bool other = !alone && l->consumers == 2 && launch_consumer(t, CONTENT_ENGINES - l->producer - first, l);
    *any = *any || one || other;
    return one && (other || l->consumers == 1);
}

bool traffic_launch(traffic *t) {
    launch l = {.producer = chance_per_mille(&t->chance, 700) ? 0 : chance_between(&t->chance, 1, 2),
                .tokens =
                    chance_between(&t->chance, 2, chance_per_mille(&t->chance, 700) ? 60 : CONTENT_TOKENS),
                .consumers = chance_per_mille(&t->chance, 200) ? 2 : 1,
                .push = chance_per_mille(&t->chance, 450),
                .id = ++t->next_id,
                .seed = chance_draw(&t->chance)};
    uint32_t other = (l.producer + chance_between(&t->chance, 1, 2)) % CONTENT_ENGINES;
    bool alone = !t->calm && chance_per_mille(&t->chance, 30); /* there is no consumer */
    bool never = !t->calm && chance_per_mille(&t->chance, 30); /* the producer never has the request */
    if (!t->calm && !t->crew->engines[l.producer].up)
        never = chance_per_mille(&t->chance, 200);
    bool any = !never && launch_producer(t, &l);
    if (!any && (!never || t->calm))
        return false;
    traffic_part *producer = any ? t->parts : NULL;
    if (chance_per_mille(&t->chance, 60))
        launch_connect(t, other, &l);
    bool all = launch_consumers(t, &l, other, &any, alone);
    if (producer && !all)
        producer->calm = false; /* a consumer has no blocks, so the producer waits in vain */
    t->counts.requests += any;
    return any;
}

/* ---- ends ------------------------------------------------------------------------------------ */

static void end_part(traffic *t, traffic_part *gone, bool engine_lives) {
    traffic_part **at = &t->parts;
    while (*at != gone)
        at = &(*at)->next;
    *at = gone->next;
    t->part_count--;
    if (engine_lives) {
        if (gone->started) {
            const order forget = {.kind = ORDER_FORGET, .handle = gone->handle};
            crew_send_all(t->crew, gone->engine, &forget);
        }
        give_back(t, gone->engine, gone->start.start.groups);
    } else {
        t->counts.dropped++;
    }
    free(gone);
}

/* A second turn: the receiver holds its blocks for another engine, or for the one that sent them. */
static bool launch_second_turn(traffic *t, traffic_part *first) {
    const content_table *table = &first->start.start.groups[0];
    const uint32_t tokens = table->end * kvf_model_group(t->model, 0)->tokens_per_step;
    if (table->begin > 0 || tokens < 2 || !chance_per_mille(&t->chance, 150))
        return false;
    launch l = {.producer = first->engine,
                .tokens = tokens,
                .consumers = 1,
                .id = ++t->next_id,
                .seed = first->start.start.seed};
    traffic_part *p = make_part(t, l.producer, &l, KVF_REQUEST_HOLD);
    if (!p)
        return false;
    memcpy(p->start.start.groups, first->start.start.groups, sizeof p->start.start.groups);
    p->start.start.before = first->start.start.before;
    p->start.start.filled = true;
    p->deadline_ns = 2600 * MS + 3 * t->lease_ns;
    if (t->calm)
        p->start.start.deadline_ns = p->deadline_ns = CALM_DEADLINE;
    if (!launch_consumer(t, (l.producer + chance_between(&t->chance, 1, 2)) % CONTENT_ENGINES, &l)) {
        free(p);
        return false;
    }
    memset(first->start.start.groups, 0, sizeof first->start.start.groups); /* the hold has the blocks now */
    add_part(t, p);
    t->counts.requests++;
    t->counts.second_turns++;
    return true;
}

static void all_free(traffic *t, traffic_part *p) {
    bool failed = false;
    for (uint32_t r = 0; r < ranks_of(t, p->engine); r++)
        failed = failed || p->ranks[r].failed;
    if (!is_destination(p)) {
        end_part(t, p, true);
        return;
    }
    if (!failed && launch_second_turn(t, p)) {
        end_part(t, p, true);
        return;
    }
    if (failed && chance_per_mille(&t->chance, 500)) {
        end_part(t, p, true); /* its blocks go to the next request at once */
        return;
    }
    if (failed) {
        order refill = {.kind = ORDER_REFILL, .handle = p->handle, .seed = chance_draw(&t->chance)};
        crew_send_all(t->crew, p->engine, &refill);
        t->counts.refilled++;
    }
    p->kept = true;
    p->keep_until = soon(t, failed ? 500 : 120);
}

static void on_event(traffic *t, traffic_part *p, uint32_t rank, const report *r) {
    kvf_request_kind kind = p->start.start.kind;
    uint64_t now = crew_now();
    if (r->event.kind == KVF_EVENT_DONE || r->event.kind == KVF_EVENT_PEER_READY) {
        t->counts.done[kind]++;
        t->counts.bytes += is_destination(p) ? r->event.bytes : 0;
    } else if (r->event.kind == KVF_EVENT_FAILED) {
        t->counts.failed[kind]++;
        t->counts.in_doubt += !r->event.blocks_free;
        p->ranks[rank].failed = true;
        if ((unsigned)r->event.status < TRAFFIC_STATUSES)
            t->counts.failed_by_status[r->event.status]++;
        if (t->verbose)
            (void)printf("%s rank %u, %s %llu%s, after %llu ms: %s\n", content_engine_name(p->engine), rank,
                         kinds[kind], (unsigned long long)p->start.start.id, p->calm ? ", calm" : "",
                         (unsigned long long)((now - p->started_at) / MS), r->words);
        t->calm_failures += p->calm;
        if (p->calm && t->calm_failures == 1)
            (void)snprintf(t->calm_words, sizeof t->calm_words, "%s rank %u, of %s: %s",
                           content_engine_name(p->engine), rank, p->start.start.engine, r->words);
    }
    if (!p->ranks[rank].told) {
        p->ranks[rank].told = true;
        p->ranks[rank].told_at = now;
    }
    p->ranks[rank].free = p->ranks[rank].free || r->event.blocks_free;
    if (r->event.kind == KVF_EVENT_BLOCKS_FREE && now - p->ranks[rank].told_at > t->counts.latest_free_ns)
        t->counts.latest_free_ns = now - p->ranks[rank].told_at;
    for (uint32_t i = 0; i < ranks_of(t, p->engine); i++)
        if (!p->ranks[i].free)
            return;
    all_free(t, p);
}

void traffic_report(traffic *t, uint32_t engine, uint32_t rank, const report *r) {
    traffic_part *p = t->parts;
    while (p && p->handle != r->handle)
        p = p->next;
    if (r->kind == REPORT_WRONG) {
        char words[ORDERS_WORDS + 40];
        (void)snprintf(words, sizeof words, "%s rank %u: %s", content_engine_name(engine), rank, r->words);
        if (p)
            complain(t, p, rank, r->words);
        else
            t->on_wrong(t->context, words);
        return;
    }
    if (r->kind == REPORT_STORY) {
        (void)printf("  %s rank %u: %s\n", content_engine_name(engine), rank, r->words);
        return;
    }
    if (!p || p->engine != engine)
        return; /* the report is from an engine that is gone */
    if (r->kind == REPORT_EVENT) {
        on_event(t, p, rank, r);
        return;
    }
    p->ranks[rank].checked = true;
    for (uint32_t i = 0; i < ranks_of(t, engine); i++)
        if (!p->ranks[i].checked)
            return;
    end_part(t, p, true);
}

void traffic_engine(traffic *t, uint32_t engine, bool up) {
    if (up) {
        fill_stock(t, engine);
        return;
    }
    traffic_part *p, *next;
    for (p = t->parts; p; p = next) {
        next = p->next;
        if (p->engine == engine)
            end_part(t, p, false);
    }
    memset(t->stocks[engine].count, 0, sizeof t->stocks[engine].count);
}

/* ---- the clock ------------------------------------------------------------------------------- */

static void look_for_overdue(traffic *t, traffic_part *p, uint64_t now) {
    for (uint32_t r = 0; r < ranks_of(t, p->engine); r++) {
        uint64_t stopped = t->crew->engines[p->engine].members[r].stopped_ns - p->stopped_ns[r];
        uint64_t excuse = t->patience_ns, deadline = p->started_at + p->deadline_ns + stopped;
        if (!p->ranks[r].told && now > deadline && now - deadline > t->counts.latest_result_ns)
            t->counts.latest_result_ns = now - deadline;
        if (p->ranks[r].overdue)
            continue;
        if (!p->ranks[r].told && now > deadline + excuse)
            complain(t, p, r, "has had no result, long after its deadline");
        else if (p->ranks[r].told && !p->ranks[r].free &&
                 now > p->ranks[r].told_at + 4 * t->lease_ns + stopped + excuse)
            complain(t, p, r, "failed, and its blocks are not free long after");
        else
            continue;
        p->ranks[r].overdue = true;
    }
}

static void work_on(traffic *t, traffic_part *p, uint64_t now) {
    if (!p->started && now >= p->start_at) {
        p->started = true;
        p->started_at = now;
        for (uint32_t r = 0; r < ranks_of(t, p->engine); r++)
            p->stopped_ns[r] = t->crew->engines[p->engine].members[r].stopped_ns;
        crew_send_all(t->crew, p->engine, &p->start);
    }
    while (p->started && p->step < p->step_count && now >= p->step_at[p->step]) {
        p->steps[p->step].handle = p->handle;
        crew_send_all(t->crew, p->engine, &p->steps[p->step++]);
    }
    for (uint32_t r = 0; p->started && r < ranks_of(t, p->engine); r++) {
        const order cancel = {.kind = ORDER_CANCEL, .handle = p->handle};
        if (!p->cancel_at[r] || now < p->cancel_at[r])
            continue;
        p->cancel_at[r] = 0;
        t->counts.cancelled++;
        crew_send(t->crew, p->engine, r, &cancel);
    }
    if (p->kept && !p->checking && now >= p->keep_until) {
        const order check = {.kind = ORDER_CHECK, .handle = p->handle};
        p->checking = true;
        crew_send_all(t->crew, p->engine, &check);
    }
    if (p->started && !p->kept)
        look_for_overdue(t, p, now);
}

void traffic_work(traffic *t) {
    uint64_t now = crew_now();
    for (traffic_part *p = t->parts, *next; p; p = next) {
        next = p->next;
        work_on(t, p, now);
    }
}

bool traffic_open(traffic *t) {
    t->model = content_model(t->crew->setting.model);
    for (uint32_t i = 0; t->model && i < CONTENT_ENGINES; i++) {
        t->shapes[i] = content_engine(t->model, i);
        if (!t->shapes[i])
            return false;
    }
    return t->model != NULL;
}

void traffic_close(traffic *t) {
    for (uint32_t i = 0; i < CONTENT_ENGINES; i++)
        traffic_engine(t, i, false);
    for (uint32_t i = 0; i < CONTENT_ENGINES; i++)
        kvf_engine_free(t->shapes[i]);
    kvf_model_free(t->model);
}
