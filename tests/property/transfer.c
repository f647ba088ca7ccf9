/*
 * For one local rank after the other: plan, set a request, pull its runs, copy, compare.
 */
#include "transfer.h"

#include <string.h>

#include "coverage.h"
#include "flows.h"
#include "forms.h"
#include "model/match.h"
#include "nests.h"
#include "packed.h"
#include "random.h"
#include "request/request.h"
#include "requests.h"
#include "sums.h"

enum { MOST_RUNS_AT_ONCE = 64 };

/* ---- memory ---------------------------------------------------------------------------------- */

static void take_memory(const rank_world *rank, memory *out) {
    for (uint32_t i = 0; i < rank->region_count; i++)
        out->regions[i] = arena_take(rank->region_bytes[i] + 8u, 1);
}

static void fill_with_garbage(const rank_world *rank, const memory *m, uint64_t seed) {
    uint64_t state = mix64(seed) | 1;
    for (uint32_t i = 0; i < rank->region_count; i++) {
        for (uint32_t at = 0; at < rank->region_bytes[i]; at += 8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            memcpy(m->regions[i] + at, &state, 8); /* the memory has 8 bytes more than the region */
        }
    }
}

static bool write_content(const cell_visit *cell, void *context) {
    const memory *m = context;
    cell_content(cell, m->regions[cell->at.region] + cell->at.offset);
    return true;
}

static void fill_remote(const recipe *r, const world *w, memory *remote) {
    const engine_world *e = &w->engines[REMOTE];
    for (uint32_t i = 0; i < e->rank_count; i++) {
        take_memory(&e->ranks[i], &remote[i]);
        fill_with_garbage(&e->ranks[i], &remote[i], r->ids_seed + 100 + i);
        for (uint32_t g = 0; g < r->group_count; g++)
            (void)visit_cells(w, REMOTE, i, g, 0, w->tables[g].end, write_content, &remote[i]);
    }
}

/* ---- one local rank -------------------------------------------------------------------------- */

typedef struct transfer {
    const recipe *r;
    const world *w;
    uint32_t rank;
    bool in_flows; /* also move it between stages */
    const rank_world *own;
    const kvf_plan *plan;
    asked ask;
    layer_span wanted[MAX_GROUPS]; /* among this rank's layers */
    const choices *choices;
    const memory *remote; /* by remote rank */
    memory local, expected, written;
    memory layers;                    /* the layer of each wanted byte, plus 1 */
    uint64_t wanted_bytes[MAX_RANKS]; /* by remote rank */
} transfer;

static bool expect_cell(const cell_visit *cell, void *context) {
    transfer *t = context;
    if (cell->layer < t->wanted[cell->group].begin || cell->layer >= t->wanted[cell->group].end)
        return true;
    cell_content(cell, t->expected.regions[cell->at.region] + cell->at.offset);
    memset(t->layers.regions[cell->at.region] + cell->at.offset, (int)cell->model_layer + 1, cell->bytes);
    const rank_group *remote = remote_shares(t->w, cell->group);
    uint32_t share = cell->step / remote->share_width % remote->share_count;
    uint32_t rank = t->choices->rank[cell->group][cell->layer][cell->part][cell->unit][share];
    if (rank == NOBODY)
        return wrong("group %u, layer %u, part %u, unit %u, step %u is in no cut", cell->group, cell->layer,
                     cell->part, cell->unit, cell->step);
    t->wanted_bytes[rank] += cell->bytes;
    return true;
}

static bool expect_memory(transfer *t) {
    take_memory(t->own, &t->local);
    take_memory(t->own, &t->expected);
    take_memory(t->own, &t->written);
    take_memory(t->own, &t->layers);
    fill_with_garbage(t->own, &t->local, t->r->ids_seed + 50 + t->rank);
    for (uint32_t i = 0; i < t->own->region_count; i++) {
        uint32_t bytes = t->own->region_bytes[i];
        memcpy(t->expected.regions[i], t->local.regions[i], bytes);
        memset(t->written.regions[i], 0, bytes);
        memset(t->layers.regions[i], 0, bytes);
    }
    for (uint32_t g = 0; g < t->r->group_count; g++)
        if (!visit_cells(t->w, LOCAL, t->rank, g, t->w->tables[g].first, t->w->tables[g].end, expect_cell, t))
            return false;
    return true;
}

/* Search for the cell of a byte that differs. */
typedef struct byte_search {
    place at;
    cell_visit found;
    bool is_cell;
} byte_search;

static bool is_not_it(const cell_visit *cell, void *context) {
    byte_search *search = context;
    if (cell->at.region != search->at.region || search->at.offset < cell->at.offset ||
        search->at.offset >= cell->at.offset + cell->bytes)
        return true;
    search->found = *cell;
    search->is_cell = true;
    return false;
}

static bool compare_memory(const transfer *t) {
    byte_search search = {.at = {0, 0}};
    for (uint32_t i = 0; i < t->own->region_count; i++) {
        uint32_t bytes = t->own->region_bytes[i];
        if (memcmp(t->local.regions[i], t->expected.regions[i], bytes) == 0)
            continue;
        search.at.region = i;
        while (t->local.regions[i][search.at.offset] == t->expected.regions[i][search.at.offset])
            search.at.offset++;
        for (uint32_t g = 0; g < t->r->group_count && !search.is_cell; g++)
            (void)visit_cells(t->w, LOCAL, t->rank, g, t->w->tables[g].first, t->w->tables[g].end, is_not_it,
                              &search);
        const cell_visit *cell = &search.found;
        if (!search.is_cell)
            return wrong("region %u, byte %u belongs to no wanted cell, but was written", i,
                         search.at.offset);
        return wrong("group %u, layer %u, part %u, step %u, row %u, unit %u, byte %u has a wrong value "
                     "(region %u, byte %u; %s)",
                     cell->group, cell->layer, cell->part, cell->step, cell->row, cell->unit,
                     cell->first + search.at.offset - cell->at.offset, i, search.at.offset,
                     t->written.regions[i][search.at.offset] ? "written" : "never written");
    }
    return true;
}

/* ---- runs ------------------------------------------------------------------------------------ */

typedef struct source_runs {
    uint32_t source, rank;
    uint64_t count, bytes;
    kvf_run last;
} source_runs;

/* Whether runs may touch: the last row or unit lacks the gap that follows the others, so the next one may be contiguous
 * with it by chance. No engine lays memory out like that, and the library does not join such runs. */
static bool may_touch(const recipe *r, uint32_t side, uint32_t rank) {
    const hand_rank *hand = &r->engines[side].hands[rank];
    return r->engines[side].by_hand && (hand->damage || (hand->tight && hand->pad));
}

static bool copy_run(transfer *t, source_runs *s, const kvf_run *run) {
    const rank_world *remote = &t->w->engines[REMOTE].ranks[s->rank];
    if (run->bytes == 0)
        return wrong("source %u, run %llu has no bytes", s->source, (unsigned long long)s->count);
    if (run->local_region >= t->own->region_count || run->remote_region >= remote->region_count ||
        run->local_offset + run->bytes > t->own->region_bytes[run->local_region] ||
        run->remote_offset + run->bytes > remote->region_bytes[run->remote_region])
        return wrong("source %u, run %llu leaves a region: local %u at %llu, remote %u at %llu, %llu bytes",
                     s->source, (unsigned long long)s->count, run->local_region,
                     (unsigned long long)run->local_offset, run->remote_region,
                     (unsigned long long)run->remote_offset, (unsigned long long)run->bytes);
    const kvf_run *last = &s->last;
    if (s->count && last->local_region == run->local_region && last->remote_region == run->remote_region &&
        last->local_offset + last->bytes == run->local_offset &&
        last->remote_offset + last->bytes == run->remote_offset && !may_touch(t->r, LOCAL, t->rank) &&
        !may_touch(t->r, REMOTE, s->rank))
        return wrong("source %u, run %llu touches the one before it", s->source,
                     (unsigned long long)s->count);
    unsigned char *to = t->local.regions[run->local_region] + run->local_offset;
    unsigned char *written = t->written.regions[run->local_region] + run->local_offset;
    if (memchr(written, 1, run->bytes))
        return wrong("source %u, run %llu writes what was written before", s->source,
                     (unsigned long long)s->count);
    memset(written, 1, run->bytes);
    memcpy(to, t->remote[s->rank].regions[run->remote_region] + run->remote_offset, run->bytes);
    s->last = *run;
    s->count++;
    s->bytes += run->bytes;
    return true;
}

/* The runs that a source's nests stand for, compared with those of a cursor. */
typedef struct nest_runs {
    kvf_run_cursor cursor; /* gives the runs one by one */
    kvf_run merged;        /* not compared yet; empty at the beginning */
} nest_runs;

static bool is_next_run(nest_runs *n) {
    kvf_run run;
    return n->merged.bytes == 0 ||
           (kvf_run_cursor_next(&n->cursor, &run, 1) == 1 && memcmp(&run, &n->merged, sizeof run) == 0);
}

/* Only the first run of a nest can continue the run before it, as in src/request/runs.c. */
static bool expand_nest(nest_runs *n, const kvf_run *nest, const kvf_run_shape *shape) {
    for (uint64_t i = 0; i < shape->outer_count * shape->inner_count; i++) {
        const uint64_t outer = i / shape->inner_count, inner = i % shape->inner_count;
        const kvf_run run = {nest->local_offset + outer * shape->outer_local + inner * shape->inner_local,
                             nest->remote_offset + outer * shape->outer_remote + inner * shape->inner_remote,
                             shape->bytes, nest->local_region, nest->remote_region};
        kvf_run *last = &n->merged;
        if (i == 0 && last->local_region == run.local_region && last->remote_region == run.remote_region &&
            last->local_offset + last->bytes == run.local_offset &&
            last->remote_offset + last->bytes == run.remote_offset) {
            last->bytes += run.bytes;
            continue;
        }
        if (!is_next_run(n))
            return false;
        *last = run;
    }
    return true;
}

/* Nests that were given together must be the next runs, and have the size that their shape has. */
static bool expand_nests(nest_runs *n, const kvf_run *nests, size_t count, const kvf_run_shape *shape) {
    kvf_nest_size size;
    if (!kvf_nest_measure(shape, &size))
        return false;
    for (size_t i = 0; i < count; i++)
        if (nests[i].bytes != size.bytes || !expand_nest(n, &nests[i], shape) ||
            n->merged.local_offset + n->merged.bytes != nests[i].local_offset + size.local ||
            n->merged.remote_offset + n->merged.bytes != nests[i].remote_offset + size.remote)
            return false;
    return true;
}

/* The nests of a source must be its runs, and those of one shape come together. */
static bool check_nests(const kvf_request *request, const source_runs *s, rng *random) {
    kvf_run nests[MOST_RUNS_AT_ONCE];
    kvf_run_cursor cursor;
    kvf_run_shape shape, last = {0};
    nest_runs n = {.merged = {0}};
    kvf_run_cursor_start(&cursor, request, s->source);
    kvf_run_cursor_start(&n.cursor, request, s->source);
    for (bool last_was_full = false;;) {
        const uint32_t capacity = rng_between(random, 1, rng_chance(random, 50) ? 6 : MOST_RUNS_AT_ONCE);
        const size_t count = kvf_run_cursor_next_nests(&cursor, nests, capacity, &shape);
        if (count == 0)
            break;
        if (count > capacity || !expand_nests(&n, nests, count, &shape))
            return wrong("source %u: nests stand for other runs", s->source);
        if (!last_was_full && memcmp(&shape, &last, sizeof shape) == 0)
            return wrong("source %u: nests of one shape do not come together", s->source);
        last = shape;
        last_was_full = count == capacity;
    }
    if (!is_next_run(&n) || kvf_run_cursor_next(&n.cursor, &n.merged, 1) != 0)
        return wrong("source %u: nests end before its runs", s->source);
    return true;
}

static bool copy_source(transfer *t, const kvf_request *request, source_runs *s, rng *random) {
    kvf_run runs[MOST_RUNS_AT_ONCE], again[MOST_RUNS_AT_ONCE];
    kvf_run_cursor cursor;
    kvf_run_cursor_start(&cursor, request, s->source);
    for (;;) {
        uint32_t capacity = rng_between(random, 1, rng_chance(random, 50) ? 6 : MOST_RUNS_AT_ONCE);
        kvf_run_cursor before = cursor;
        size_t n = kvf_run_cursor_next(&cursor, runs, capacity);
        if (n > capacity)
            return wrong("source %u: %zu runs, but there was room for %u", s->source, n, capacity);
        if (rng_chance(random, 10) && (kvf_run_cursor_next(&before, again, capacity) != n ||
                                       memcmp(runs, again, n * sizeof *runs) != 0))
            return wrong("source %u: a copied cursor gives other runs", s->source);
        for (size_t i = 0; i < n; i++)
            if (!copy_run(t, s, &runs[i]))
                return false;
        if (n == 0)
            break;
    }
    uint64_t count = kvf_request_run_count(request, s->source);
    uint64_t bytes = kvf_request_bytes(request, s->source);
    if (count != s->count)
        return wrong("source %u: kvf_request_run_count() is %llu, but there are %llu runs", s->source,
                     (unsigned long long)count, (unsigned long long)s->count);
    if (bytes != s->bytes || bytes != t->wanted_bytes[s->rank])
        return wrong("source %u: kvf_request_bytes() is %llu, the runs have %llu, %llu are wanted", s->source,
                     (unsigned long long)bytes, (unsigned long long)s->bytes,
                     (unsigned long long)t->wanted_bytes[s->rank]);
    return check_nests(request, s, random);
}

/* How many tokens the request has: those of its groups of single tokens, or of entries; NO_ID: it has no tokens. */
static uint32_t tokens_asked(const transfer *t) {
    uint32_t tokens = NO_ID, each_of_them = UINT32_MAX;
    for (uint32_t g = 0; g < t->r->group_count; g++) {
        const uint32_t each = step_tokens_of(&t->w->models[LOCAL].groups[g]);
        if (!t->ask.groups[g] || t->r->groups[g].is_state || each >= each_of_them)
            continue;
        tokens = t->w->tables[g].end * each;
        each_of_them = each;
    }
    return tokens;
}

/* Whether blocks are scattered, all groups begin at the first step, and there is one state. */
static bool is_predictable(const transfer *t, uint32_t *tokens) {
    *tokens = tokens_asked(t);
    for (uint32_t g = 0; g < t->r->group_count; g++) {
        const uint32_t end = t->w->tables[g].end, each = step_tokens_of(&t->w->models[LOCAL].groups[g]);
        if (t->ask.groups[g] && end != (t->r->groups[g].is_state ? 1 : *tokens / each))
            return false;
    }
    return t->w->scattered;
}

static bool check_prediction(const transfer *t, const source_runs *s, uint32_t tokens) {
    kvf_cost_model cost = {.ns_per_run = 3, .ns_per_byte = 0.5, .ns_per_source = 1000};
    kvf_prediction p = {.struct_size = sizeof p};
    kvf_status status = kvf_plan_predict(t->plan, s->source, tokens, &cost, &p);
    if (status)
        return wrong("source %u: kvf_plan_predict() gives %s", s->source, kvf_status_name(status));
    if (p.bytes != s->bytes || p.runs != s->count)
        return wrong("source %u: predicted are %llu bytes in %llu runs; there are %llu in %llu", s->source,
                     (unsigned long long)p.bytes, (unsigned long long)p.runs, (unsigned long long)s->bytes,
                     (unsigned long long)s->count);
    double ns = 1000 + 3 * (double)p.runs + 0.5 * (double)p.bytes;
    if (p.ns < ns - 1e-3 || p.ns > ns + 1e-3)
        return wrong("source %u: predicted are %f ns; expected %f", s->source, p.ns, ns);
    note(KIND_PREDICTED);
    return true;
}

/* If blocks are scattered, kvf_plan_count() must be exact for any range of steps of each group. */
static bool check_count(const transfer *t, const kvf_request *request, const source_runs *s) {
    const kvf_group_request *groups = kvf_request_groups(request);
    kvf_step_span spans[MAX_GROUPS];
    uint64_t bytes = 0, runs = 0;
    for (uint32_t g = 0; g < kvf_model_group_count(kvf_shard_model(kvf_plan_local(t->plan))); g++)
        spans[g] = (kvf_step_span){groups[g].begin, groups[g].end};
    kvf_plan_count(t->plan, s->source, spans, &bytes, &runs);
    if (bytes != s->bytes || runs != s->count)
        return wrong("source %u: kvf_plan_count() is %llu bytes in %llu runs; there are %llu in %llu",
                     s->source, (unsigned long long)bytes, (unsigned long long)runs,
                     (unsigned long long)s->bytes, (unsigned long long)s->count);
    note(KIND_COUNTED);
    return true;
}

/* ---- requests -------------------------------------------------------------------------------- */

/* kvf_block_table_tail() must make the same table from the ids, if the table ends with the sequence. */
static bool check_tails(const transfer *t, const kvf_group_request *groups) {
    for (uint32_t i = 0; i < t->w->models[LOCAL].group_count; i++) {
        uint32_t g = t->w->models[LOCAL].group_order[i];
        for (uint32_t side = 0; side < SIDES; side++) {
            const engine_world *e = &t->w->engines[side];
            const kvf_block_table *table = side == LOCAL ? &groups[i].local : &groups[i].remote;
            const table_recipe *wanted = &t->r->requests[g].tables[side];
            if (table->count == 0 || wanted->trail || e->ranks[0].groups[g].share_count > 1)
                continue;
            kvf_block_table tail;
            kvf_status status =
                kvf_block_table_tail(table->ids, table->count, t->w->tables[g].end, e->tokens[g], &tail);
            if (status || tail.ids != table->ids || tail.count != table->count ||
                tail.first_block != table->first_block)
                return wrong("group %u: kvf_block_table_tail() gives %s, first_block %u; expected %u", g,
                             kvf_status_name(status), status ? 0 : tail.first_block, table->first_block);
        }
    }
    return true;
}

static bool set_request(const transfer *t, kvf_request *request, const kvf_group_request *groups) {
    const model_world *model = &t->w->models[LOCAL];
    kvf_status status = kvf_request_set(request, groups, model->group_count);
    if (status)
        return wrong("kvf_request_set() gives %s: %s", kvf_status_name(status), kvf_error_detail());
    for (uint32_t i = 0; i < model->group_count; i++) {
        uint32_t g = model->group_order[i];
        uint32_t first = t->ask.groups[g] ? t->w->tables[g].first : t->w->tables[g].end;
        uint64_t begin, end;
        kvf_request_steps(request, i, &begin, &end);
        if (begin != first || end != t->w->tables[g].end)
            return wrong("group %u: steps [%llu, %llu); expected [%u, %u)", g, (unsigned long long)begin,
                         (unsigned long long)end, first, t->w->tables[g].end);
    }
    return true;
}

/* Sets a request that must be refused, before or after a good one; the good one must stay set. */
static bool try_faulty(const transfer *t, kvf_request *request, bool *refused) {
    faulty_request faulty;
    *refused = false;
    if (!make_faulty(t->w, &t->ask, t->rank, &faulty))
        return true;
    kvf_status status = kvf_request_set(request, faulty.groups, faulty.group_count);
    if (status != faulty.expected)
        return wrong("a request with fault %u gives %s (%s); expected is %s", t->r->fault,
                     kvf_status_name(status), status ? kvf_error_detail() : "",
                     kvf_status_name(faulty.expected));
    if (status && !strstr(kvf_error_detail(), faulty.named))
        return wrong("a request with fault %u does not say \"%s\", but: %s", t->r->fault, faulty.named,
                     kvf_error_detail());
    *refused = status != KVF_OK;
    note(*refused ? KIND_REQUEST_REFUSED : KIND_FAULT_ELSEWHERE);
    return true;
}

static bool is_empty(const transfer *t, const kvf_request *request) {
    for (uint32_t s = 0; s < kvf_plan_source_count(t->plan); s++)
        if (kvf_request_bytes(request, s) || kvf_request_run_count(request, s))
            return wrong("source %u has runs, but the only request was refused", s);
    return true;
}

static bool set_and_refuse(const transfer *t, kvf_request *request) {
    kvf_group_request groups[MAX_GROUPS];
    fill_request_form(t->w, &t->ask, groups);
    bool refused, first = t->r->fault_at / 2 % 2;
    if (first && (!try_faulty(t, request, &refused) || (refused && !is_empty(t, request))))
        return false;
    if (!check_tails(t, groups) || !set_request(t, request, groups))
        return false;
    if (first)
        return true;
    if (!try_faulty(t, request, &refused))
        return false;
    return refused || set_request(t, request, groups);
}

/* Whether memory is as the oracle wants it. */
static bool is_expected(const transfer *t, const memory *m) {
    for (uint32_t i = 0; i < t->own->region_count; i++)
        if (memcmp(m->regions[i], t->expected.regions[i], t->own->region_bytes[i]) != 0)
            return false;
    return true;
}

/* Moves the nests of all sources by kernels into memory that was as ours before. With `spoil`, the control, one of the
 * kernels may have a wrong stride, and then the memory must be wrong. */
static bool move_nests(const transfer *t, const kvf_request *request, rng *random, bool spoil) {
    memory m;
    bool spoiled = false;
    take_memory(t->own, &m);
    fill_with_garbage(t->own, &m, t->r->ids_seed + 50 + t->rank);
    for (uint32_t s = 0; s < kvf_plan_source_count(t->plan); s++) {
        const memory *from = &t->remote[kvf_plan_source_rank(t->plan, s)];
        if (!emulate_nests(request, s, from, &m, random, spoil && !spoiled ? &spoiled : NULL))
            return false;
    }
    note_if(KIND_NEST_SPOILED, spoiled);
    if (is_expected(t, &m) != spoiled)
        return true;
    return spoiled ? wrong("a kernel that takes one run of a nest for all moves the same")
                   : wrong("nests that kernels move leave wrong memory");
}

static bool move_request(transfer *t, kvf_request *request) {
    if (!set_and_refuse(t, request) || !expect_memory(t))
        return false;
    rng random = {mix64(t->r->ids_seed + t->rank)};
    uint32_t tokens;
    bool predictable = is_predictable(t, &tokens);
    for (uint32_t s = 0; s < kvf_plan_source_count(t->plan); s++) {
        source_runs runs = {.source = s, .rank = kvf_plan_source_rank(t->plan, s)};
        if (!copy_source(t, request, &runs, &random) ||
            (t->w->scattered && !check_count(t, request, &runs)) ||
            (predictable && !check_prediction(t, &runs, tokens == NO_ID ? 7 : tokens)))
            return false;
        t->wanted_bytes[runs.rank] = 0;
    }
    for (uint32_t i = 0; i < MAX_RANKS; i++)
        if (t->wanted_bytes[i])
            return wrong("rank %u is read, but is not a source", i);
    return compare_memory(t) && move_nests(t, request, &random, false) &&
           (!rng_chance(&random, 20) || move_nests(t, request, &random, true));
}

/* ---- plans ----------------------------------------------------------------------------------- */

static void note_request(const transfer *t) {
    bool unaligned = false, cached = false, moved = false, later = false, holes = false;
    for (uint32_t g = 0; g < t->r->group_count; g++) {
        const group_tables *tables = &t->w->tables[g];
        if (!t->ask.groups[g])
            continue;
        cached |= tables->begin == tables->end;
        moved |= tables->begin < tables->end;
        for (uint32_t side = 0; side < SIDES && tables->first < tables->end; side++) {
            const table_world *table = &tables->side[side];
            unaligned |= tables->begin % t->w->engines[side].tokens[g] != 0;
            later |= table->first_block > 0;
            holes |= table->needed_begin > table->first_block && t->r->requests[g].tables[side].lead_empty;
        }
    }
    note_if(KIND_PREFIX_UNALIGNED, unaligned);
    note_if(KIND_CACHED_BESIDE, cached && moved);
    note_if(KIND_TABLE_LATER, later);
    note_if(KIND_TABLE_HOLES, holes);
    note(KIND_MOVED);
}

/* A plan that converts has no runs, and every function for runs must say so. */
static bool has_no_runs(const transfer *t, kvf_request *request) {
    kvf_run_cursor cursor;
    kvf_run run;
    for (uint32_t s = 0; s < kvf_plan_source_count(t->plan); s++)
        if (kvf_run_cursor_start(&cursor, request, s) != KVF_E_UNSUPPORTED ||
            kvf_run_cursor_next(&cursor, &run, 1) || kvf_request_run_count(request, s))
            return wrong("source %u of a plan that converts has runs", s);
    note_if(KIND_CONVERTED, kvf_plan_source_count(t->plan) > 0);
    return kvf_plan_rule_count(t->plan) == 0 || wrong("a plan that converts has rules");
}

static bool use_plan(transfer *t, choices *out) {
    const bool converts = kvf_plan_converts(t->plan) && kvf_plan_cut_count(t->plan) > 0;
    kvf_status status = kvf_plan_verify(t->plan);
    if (status != (converts ? KVF_E_UNSUPPORTED : KVF_OK))
        return wrong("kvf_plan_verify() gives %s: %s", kvf_status_name(status), kvf_error_detail());
    if (!check_cuts(t->w, &t->ask, t->plan, t->rank, out))
        return false;
    kvf_request *request;
    status = kvf_request_create(t->plan, &request);
    if (status)
        return wrong("kvf_request_create() gives %s", kvf_status_name(status));
    t->choices = out;
    const packed_transfer packed = {t->w, t->rank, kvf_plan_local(t->plan), t->plan, &t->ask, out, t->remote};
    bool good = converts ? set_and_refuse(t, request) && has_no_runs(t, request) : move_request(t, request);
    good = good && move_packed(&packed);
    if (good && t->in_flows && !converts)
        good = move_in_flows(&packed, &t->expected, &t->written);
    kvf_request_free(request);
    note_request(t);
    note_if(KIND_RANK_EMPTY, kvf_plan_source_count(t->plan) == 0);
    return good;
}

static bool must_be_uncovered(kvf_status status, kvf_plan *plan) {
    note(KIND_UNCOVERED);
    if (status == KVF_E_UNCOVERED)
        return true;
    kvf_plan_free(plan);
    return wrong("kvf_plan_build() gives %s, but some cells are held by nobody", kvf_status_name(status));
}

/* Builds the plan that is asked for, or for less while the library rightly refuses. `out` is NULL if it rightly refuses
 * everything; false, after wrong(), if the library is wrong. */
static bool build_plan(const recipe *r, const world *w, const built *b, uint32_t rank, asked *ask,
                       kvf_plan **out) {
    const model_world *local = &w->models[LOCAL];
    for (bool less = false;; less = true) {
        uint32_t groups[MAX_GROUPS], count = 0;
        for (uint32_t i = 0; i < local->group_count; i++)
            if (ask->groups[local->group_order[i]])
                groups[count++] = i;
        kvf_plan_options options = {.struct_size = sizeof options,
                                    .replicas = r->first_replica ? KVF_REPLICA_FIRST : KVF_REPLICA_SPREAD,
                                    .layers = {ask->layers_begin, ask->layers_end},
                                    .groups = less ? groups : NULL,
                                    .group_count = less ? count : 0,
                                    .convert = ask->converts ? KVF_CONVERTED_DTYPES : 0};
        bool defaults =
            !r->first_replica && rank % 2 && !less && !ask->converts && ask->layers_begin == ask->layers_end;
        *out = NULL;
        kvf_status status = kvf_plan_build(b->local[rank], b->remote, defaults ? NULL : &options, out);
        refusal why;
        if (!must_refuse(w, ask, rank, &why)) {
            note_if(KIND_ASKED_LESS, less && count);
            return is_uncovered(w, ask, rank) ? must_be_uncovered(status, *out)
                   : status
                       ? wrong("kvf_plan_build() gives %s: %s", kvf_status_name(status), kvf_error_detail())
                       : true;
        }
        if (status != why.status || !strstr(kvf_error_detail(), why.named)) {
            kvf_plan_free(*out);
            return wrong("kvf_plan_build() gives %s (%s); expected is %s and \"%s\"", kvf_status_name(status),
                         status ? kvf_error_detail() : "", kvf_status_name(why.status), why.named);
        }
        note(KIND_UNLIKE_REFUSED);
        ask_less(w, &why, ask);
    }
}

static bool transfer_rank(const recipe *r, const world *w, const built *b, const memory *remote,
                          uint32_t rank, choices *out, bool *all_covered) {
    transfer *t = arena_take(1, sizeof *t);
    memset(t, 0, sizeof *t);
    t->r = r;
    t->w = w;
    t->rank = rank;
    t->in_flows = rank == r->ids_seed % w->engines[LOCAL].rank_count; /* for one rank of each case */
    t->own = &w->engines[LOCAL].ranks[rank];
    t->remote = remote;
    const asked all = t->ask = ask_all(r, w);
    kvf_plan *plan;
    note(KIND_RANK);
    if (!build_plan(r, w, b, rank, &t->ask, &plan))
        return false;
    if (!plan || memcmp(&all, &t->ask, sizeof all) != 0)
        *all_covered = false;
    if (!plan)
        return true;
    t->plan = plan;
    for (uint32_t g = 0; g < r->group_count; g++)
        t->wanted[g] = wanted_layers(w, &t->ask, rank, g);
    bool good = use_plan(t, out);
    kvf_plan_free(plan);
    return good;
}

bool transfer_case(const recipe *r, const world *w, const built *b, uint32_t *local_rank) {
    memory *remote = arena_take(MAX_RANKS, sizeof *remote);
    uint32_t ranks = w->engines[LOCAL].rank_count;
    choices *by_rank = arena_take(ranks, sizeof *by_rank);
    fill_remote(r, w, remote);
#ifdef KVF_HAVE_MESSAGES /* checksums are part of builds with agents */
    for (uint32_t i = 0; i < w->engines[REMOTE].rank_count; i++)
        if (!check_sums(w, i, kvf_engine_shard(b->remote, i), &remote[i]))
            return false;
#endif
    bool all_covered = true; /* in every layer and group */
    for (*local_rank = 0; *local_rank < ranks; (*local_rank)++)
        if (!transfer_rank(r, w, b, remote, *local_rank, &by_rank[*local_rank], &all_covered))
            return false;
    *local_rank = 0;
    return !all_covered || check_spread(r, w, by_rank);
}
