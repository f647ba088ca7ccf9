#include "agent_world.h"
#include "elements.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "agent/agent.h"
#include "agent/session.h"
#include "agent_letters.h"
#include "agent_net.h"
#include "faulty_fabric.h"
#include "link/link.h"

static const kvf_surroundings real;
static const kvf_surroundings *around = &real;
static const struct kvf_fabric *given_fabric;

int world_is_simulated(void **state) {
    (void)state;
    around = &net_surroundings;
    return 0;
}

#define STEP_WITH_DEVICES_NS 100000u

static uint64_t longest_step = UINT64_MAX; /* of virtual time */

int world_is_simulated_with_devices(void **state) {
    longest_step = STEP_WITH_DEVICES_NS;
    return world_is_simulated(state);
}

void world_time_jumps(void) {
    longest_step = UINT64_MAX;
}

int world_is_real(void **state) {
    (void)state;
    world_time_jumps();
    around = &real;
    return 0;
}

void world_fabric(const struct kvf_fabric *fabric) {
    given_fabric = fabric;
}

static bool is_simulated(void) {
    return around == &net_surroundings;
}

uint64_t world_now(void) {
    struct timespec t;
    if (is_simulated())
        return net_now();
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

/* ---- opening --------------------------------------------------------------------------------- */

/* With KVF_TEST_WAY=packed, agents for which a test names no way go packed, with slots that are soon full; with
 * KVF_TEST_WORKERS=N that many threads copy. */
static kvf_agent_options with_way(const kvf_agent_options *options) {
    const char *way = getenv("KVF_TEST_WAY");
    kvf_agent_options out = options ? *options : (kvf_agent_options){.struct_size = sizeof out};
    if (!way || strcmp(way, "packed") != 0 || out.way)
        return out;
    out.way = KVF_WAY_PACKED;
    out.slot_bytes = 4096;
    out.arena_bytes = 128 * 4096;
    const char *workers = getenv("KVF_TEST_WORKERS");
    out.workers = workers ? (uint32_t)strtoul(workers, NULL, 10) : 0;
    return out;
}

static void open_in_world(world_engine *e, uint32_t r, const kvf_agent_options *given) {
    const kvf_agent_options own = with_way(given), *options = given || own.way ? &own : NULL;
    kvf_surroundings in = *around;
    in.link = letters_link(around->link);
    in.fabric = given_fabric ? given_fabric : faulty_fabric(options ? options->transport : NULL);
    assert_ok(kvf_agent_open_in(&in, e->engine, r, options, &e->agents[r]));
}

static world_place given_place;

void world_place_memory(world_place place) {
    given_place = place;
}

void world_register(world_engine *e, uint32_t r) {
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(e->engine, r));
    kvf_memory regions[WORLD_MAX_REGIONS];
    assert_true(shard->region_count <= WORLD_MAX_REGIONS);
    for (uint32_t i = 0; i < shard->region_count; i++) {
        if (given_place) {
            regions[i] = given_place(kvf_engine_name(e->engine), shard->region_bytes[i], &e->memory[r][i]);
            continue;
        }
        assert_ok(
            kvf_agent_allocate(e->agents[r], KVF_MEMORY_HOST, 0, shard->region_bytes[i], &e->memory[r][i]));
        regions[i] = (kvf_memory){
            .struct_size = sizeof(kvf_memory), .address = e->memory[r][i], .bytes = shard->region_bytes[i]};
    }
    assert_ok(kvf_agent_register(e->agents[r], regions, shard->region_count));
}

void world_open_agent(world_engine *e, uint32_t r, const kvf_agent_options *options) {
    open_in_world(e, r, options);
    world_register(e, r);
}

void world_open_directory(world_engine *e) {
    e->rank_count = 1;
    open_in_world(e, 0, NULL);
}

void world_introduce(world_engine *e, kvf_agent *to) {
    for (uint32_t r = 0; r < e->rank_count; r++) {
        const void *bytes;
        size_t size;
        if (!e->agents[r] || e->agents[r] == to)
            continue;
        assert_ok(kvf_agent_introduction(e->agents[r], &bytes, &size));
        assert_ok(kvf_agent_introduce(to, bytes, size));
    }
}

void world_open_agents(world_engine *e, const kvf_agent_options *options) {
    e->rank_count = kvf_engine_rank_count(e->engine);
    assert_true(e->rank_count <= WORLD_MAX_RANKS);
    for (uint32_t r = 0; r < e->rank_count; r++)
        world_open_agent(e, r, options);
    world_introduce(e, e->agents[0]);
    e->contact.engine = kvf_engine_name(e->engine);
    e->contact.endpoint = kvf_agent_endpoint(e->agents[0]);
    e->contact.public_key = options ? options->public_key : NULL;
}

void world_close_agents(world_engine *e) {
    for (uint32_t r = 0; r < e->rank_count; r++) {
        kvf_agent_close(e->agents[r]);
        e->agents[r] = NULL;
    }
}

void world_open_model(world *w, kvf_model *model, const kvf_engine_spec *p, const kvf_engine_spec *d,
                      const kvf_agent_options *options) {
    memset(w, 0, sizeof *w);
    w->outcomes = calloc(WORLD_MAX_OUTCOMES, sizeof *w->outcomes);
    assert_non_null(w->outcomes);
    w->model = model;
    w->p.engine = engine_of(w->model, p);
    w->d.engine = engine_of(w->model, d);
    world_open_agents(&w->p, options);
    world_open_agents(&w->d, options);
}

void world_open(world *w, const char *name, const kvf_engine_spec *p, const kvf_engine_spec *d,
                const kvf_agent_options *options) {
    kvf_model *model = NULL;
    assert_ok(kvf_model_load(name, NULL, &model));
    world_open_model(w, model, p, d, options);
}

void world_add(world *w, const kvf_engine_spec *spec, const kvf_agent_options *options) {
    w->e.engine = engine_of(w->model, spec);
    world_open_agents(&w->e, options);
}

static kvf_record *copy_records(const kvf_record *records, uint32_t count) {
    kvf_record *copies = calloc(count + 1, sizeof *copies);
    assert_non_null(copies);
    for (uint32_t i = 0; i < count; i++) {
        void *data = malloc(records[i].size + 1);
        assert_non_null(data);
        if (records[i].size > 0)
            memcpy(data, records[i].data, records[i].size);
        copies[i] = records[i];
        copies[i].name = strdup(records[i].name);
        copies[i].data = data;
    }
    return copies;
}

static void free_records(world_outcome *outcome) {
    for (uint32_t i = 0; i < outcome->record_count; i++) {
        free((void *)outcome->records[i].name);
        free((void *)outcome->records[i].data);
    }
    free(outcome->records);
}

kvf_session *world_session(const kvf_agent *agent, bool incoming) {
    kvf_session *session = agent->all_sessions;
    while (session && session->incoming != incoming)
        session = session->next;
    assert_non_null(session);
    return session;
}

void world_lose(kvf_agent *agent, kvf_session *session) {
    assert_ok(kvf_agent_lock(agent));
    kvf_work_take(agent);
    kvf_session_lose(session, KVF_E_PEER_LOST, "the test says so");
    kvf_work_give(agent);
    kvf_agent_unlock(agent);
}

void world_forget(world *w) {
    for (uint32_t i = 0; i < w->outcome_count; i++)
        free_records(&w->outcomes[i]);
    w->outcome_count = 0;
}

void world_close(world *w) {
    world_engine *engines[] = {&w->e, &w->d, &w->p};
    for (int i = 0; i < 3; i++) {
        world_close_agents(engines[i]);
        kvf_engine_free(engines[i]->engine);
    }
    kvf_model_free(w->model);
    world_forget(w);
    free(w->outcomes);
}

/* ---- requests -------------------------------------------------------------------------------- */

void world_request_make(const world *w, const world_engine *engine, const char *id, uint64_t tokens,
                        uint32_t first, uint32_t stride, world_request *out) {
    memset(out, 0, sizeof *out);
    const kvf_shard *shard = kvf_engine_shard(engine->engine, 0);
    const kvf_model *model = kvf_engine_model(engine->engine); /* a test may have given it another model */
    (void)w;
    out->group_count = kvf_model_group_count(model);
    assert_true(out->group_count <= WORLD_MAX_GROUPS);
    for (uint32_t g = 0; g < out->group_count; g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        uint64_t steps = group->kind == KVF_GROUP_STATE ? (tokens > 0) : tokens / group->tokens_per_step;
        uint32_t per_block = steps_per_block(shard, g);
        uint32_t blocks = (uint32_t)((steps + per_block - 1) / per_block);
        assert_true(blocks <= COUNT_OF(out->ids[g]));
        for (uint32_t b = 0; b < blocks; b++)
            out->ids[g][b] = first + b * stride;
        out->groups[g] = (kvf_group_steps){{out->ids[g], blocks, 0}, 0, steps};
    }
    out->request = (kvf_agent_request){.struct_size = sizeof out->request,
                                       .id = {id, strlen(id)},
                                       .groups = out->groups,
                                       .group_count = out->group_count,
                                       .deadline_ns = WORLD_PATIENCE_S * SECOND};
}

void world_request_empty(world_request *request) {
    for (uint32_t g = 0; g < request->group_count; g++)
        request->groups[g].begin = request->groups[g].end;
}

void world_hold(world_engine *e, const world_request *request, uint64_t *tickets) {
    kvf_agent_request own = request->request;
    if (own.deadline_ns == WORLD_PATIENCE_S * SECOND)
        own.deadline_ns = 0;
    for (uint32_t r = 0; r < e->rank_count; r++)
        assert_ok(kvf_agent_hold(e->agents[r], &own, &tickets[r]));
}

void world_pull(world_engine *e, world_request *request, const world_engine *from, uint64_t *tickets) {
    request->request.contact = from->contact;
    for (uint32_t r = 0; r < e->rank_count; r++)
        assert_ok(kvf_agent_pull(e->agents[r], &request->request, &tickets[r]));
}

void world_push(world_engine *e, const world_request *request, uint64_t *tickets) {
    for (uint32_t r = 0; r < e->rank_count; r++)
        assert_ok(kvf_agent_push(e->agents[r], &request->request, &tickets[r]));
}

void world_expect(world_engine *e, world_request *request, const world_engine *from, uint64_t *tickets) {
    request->request.contact = from->contact;
    for (uint32_t r = 0; r < e->rank_count; r++)
        assert_ok(kvf_agent_expect(e->agents[r], &request->request, &tickets[r]));
}

void world_ready(world_engine *e, const uint64_t *tickets) {
    for (uint32_t r = 0; r < e->rank_count; r++)
        assert_ok(kvf_agent_push_ready(e->agents[r], tickets[r], NULL));
}

/* ---- cells ----------------------------------------------------------------------------------- */

static uint8_t expected_byte(uint32_t seed, const uint64_t at[6], uint64_t byte) {
    uint64_t h = seed * 0x9E3779B97F4A7C15u + byte;
    for (int i = 0; i < 6; i++)
        h = (h ^ at[i]) * 0xD6E8FEB86659FD93u, h ^= h >> 29;
    return (uint8_t)(h >> 16);
}

/* A number for a name of a group or part: engines of two models may number them differently. */
static uint64_t of_name(const char *name) {
    uint64_t h = 0;
    for (; *name; name++)
        h = h * 257 + (uint8_t)*name;
    return h;
}

static const kvf_model *filled_as;

void world_filled_as(const kvf_model *model) {
    filled_as = model;
}

static kvf_dtype filled_type(const kvf_group_desc *group, const kvf_part_desc *part) {
    for (uint32_t g = 0; filled_as && g < kvf_model_group_count(filled_as); g++) {
        const kvf_group_desc *other = kvf_model_group(filled_as, g);
        for (uint32_t p = 0; strcmp(other->name, group->name) == 0 && p < other->part_count; p++)
            if (strcmp(other->parts[p].name, part->name) == 0)
                return other->parts[p].dtype;
    }
    return part->dtype;
}

/* The bytes of a cell after conversion from the type that it was filled in. */
static void expected_cell(uint32_t seed, const uint64_t at[6], kvf_dtype from, const kvf_part_desc *part,
                          uint8_t *out) {
    const uint64_t bytes = kvf_part_cell_bytes(part);
    if (from == part->dtype) {
        for (uint64_t i = 0; i < bytes; i++)
            out[i] = expected_byte(seed, at, i);
        return;
    }
    for (uint32_t e = 0, item = kvf_dtype_bits(from) / 8; e < part->cell_elements; e++) {
        uint8_t in[4] = {0};
        for (uint32_t i = 0; i < item; i++)
            in[i] = expected_byte(seed, at, (uint64_t)e * item + i);
        out += element_move(from, in, part->dtype, out);
    }
}

#define ALL_LAYERS UINT32_MAX

/* Visits every cell of a request on one rank, in the first layers: fills it, or counts it if it is wrong, and prints the
 * first one if that is of all layers. */
static uint64_t visit_rank(world_engine *e, uint32_t rank, const world_request *request, uint32_t seed,
                           bool fill, uint32_t below) {
    const kvf_shard *shard = kvf_engine_shard(e->engine, rank);
    uint64_t wrong = 0;
    for (uint32_t g = 0; g < request->group_count; g++) {
        const kvf_group_desc *group = kvf_model_group(kvf_engine_model(e->engine), g);
        const kvf_group_shard_desc *held = &kvf_shard_get(shard)->groups[g];
        const kvf_group_steps *steps = &request->groups[g];
        kvf_range layers = kvf_shard_group_layers(shard, g);
        uint64_t first = kvf_group_first_needed(group, steps->end);
        first = first > steps->begin && !fill ? first : steps->begin;
        const kvf_token_share share = step_share(shard, g);
        uint64_t width = share.width ? share.width : 1, shares = share.count ? share.count : 1;
        for (uint64_t s = first; s < steps->end; s++) {
            if (s / width % shares != share.index)
                continue;
            uint64_t position = s / width / shares * width + s % width;

            for (uint32_t l = layers.begin; l < layers.end; l++)
                for (uint32_t p = 0; p < group->part_count; p++)
                    for (uint32_t r = 0; r < group->parts[p].rows_per_step; r++)
                        for (uint32_t u = held->parts[p].units.begin; u < held->parts[p].units.end; u++) {
                            if (group->layers[l] >= below)
                                continue;
                            uint64_t at[6] = {of_name(group->name),
                                              group->layers[l],
                                              of_name(group->parts[p].name),
                                              s,
                                              r,
                                              u};
                            uint32_t row = (uint32_t)(position % steps_per_block(shard, g)) *
                                               group->parts[p].rows_per_step +
                                           r;
                            uint32_t block =
                                steps->table
                                    .ids[position / steps_per_block(shard, g) - steps->table.first_block];
                            kvf_cell_location cell = {.struct_size = sizeof cell};
                            assert_ok(kvf_shard_locate(shard, g, l, p, block, row, u, &cell));
                            uint8_t *bytes = (uint8_t *)e->memory[rank][cell.region] + cell.offset;
                            uint64_t bad = 0;
                            const uint64_t piece = cell.bytes / cell.pieces;
                            uint8_t content[WORLD_MAX_CELL_BYTES];
                            const kvf_part_desc *part = &group->parts[p];
                            assert_true(cell.bytes <= sizeof content);
                            expected_cell(seed, at, fill ? part->dtype : filled_type(group, part), part,
                                          content);
                            for (uint64_t i = 0; i < cell.bytes; i++) {
                                uint8_t want = content[i];
                                uint8_t *byte = &bytes[i / piece * cell.piece_stride + i % piece];
                                if (fill)
                                    *byte = want;
                                else
                                    bad += *byte != want;
                            }
                            if (bad && !wrong && below == ALL_LAYERS)
                                printf("rank %u: group %s, layer %u, part %s, step %llu, row %u, unit %u is "
                                       "wrong\n",
                                       rank, group->name, group->layers[l], group->parts[p].name,
                                       (unsigned long long)s, r, u);
                            wrong += bad != 0;
                        }
        }
    }
    return wrong;
}

static world_carry memory_get, memory_put;

void world_copies_memory(world_carry get, world_carry put) {
    memory_get = get;
    memory_put = put;
}

static void carry(world_carry how, const world_engine *e, uint32_t rank) {
    const uint32_t count = kvf_shard_get(kvf_engine_shard(e->engine, rank))->region_count;
    for (uint32_t i = 0; how && i < count; i++)
        how(e->memory[rank][i]);
}

void world_fill(const world *w, world_engine *engine, const world_request *request, uint32_t seed) {
    (void)w;
    for (uint32_t r = 0; r < engine->rank_count; r++) {
        carry(memory_get, engine, r);
        (void)visit_rank(engine, r, request, seed, true, ALL_LAYERS);
        carry(memory_put, engine, r);
    }
}

void world_flip(world_engine *e, const world_request *request, world_cell at) {
    const kvf_shard *shard = kvf_engine_shard(e->engine, at.rank);
    const uint32_t per_block = steps_per_block(shard, at.group);
    const uint32_t rows = kvf_model_group(kvf_shard_model(shard), at.group)->parts[at.part].rows_per_step;
    kvf_cell_location cell = {.struct_size = sizeof cell};
    assert_ok(kvf_shard_locate(shard, at.group, at.layer, at.part,
                               request->ids[at.group][at.step / per_block],
                               (uint32_t)(at.step % per_block) * rows + at.row, at.unit, &cell));
    carry(memory_get, e, at.rank);
    ((uint8_t *)e->memory[at.rank][cell.region])[cell.offset + cell.bytes - 1] ^= 0x10;
    carry(memory_put, e, at.rank);
}

uint64_t world_wrong_cells(const world *w, world_engine *engine, const world_request *request,
                           uint32_t seed) {
    uint64_t wrong = 0;
    (void)w;
    for (uint32_t r = 0; r < engine->rank_count; r++) {
        carry(memory_get, engine, r);
        wrong += visit_rank(engine, r, request, seed, false, ALL_LAYERS);
    }
    return wrong;
}

uint64_t world_wrong_cells_below(world_engine *engine, uint32_t rank, const world_request *request,
                                 uint32_t seed, uint32_t layers) {
    carry(memory_get, engine, rank);
    return visit_rank(engine, rank, request, seed, false, layers);
}

/* ---- running --------------------------------------------------------------------------------- */

static void keep(world *w, const kvf_agent *agent, const kvf_event *event) {
    assert_true(w->outcome_count < WORLD_MAX_OUTCOMES);
    world_outcome *o = &w->outcomes[w->outcome_count++];
    *o = (world_outcome){.agent = agent,
                         .kind = event->kind,
                         .request_kind = event->request_kind,
                         .ticket = event->ticket,
                         .status = event->status,
                         .id_bytes = event->id.size,
                         .rank = event->rank,
                         .blocks_free = event->blocks_free,
                         .recompute = event->recompute,
                         .group_count = event->group_count,
                         .bytes = event->bytes,
                         .runs = event->runs,
                         .bytes_packed = event->bytes_packed,
                         .records = copy_records(event->records, event->record_count),
                         .record_count = event->record_count};
    memcpy(o->id, event->id.data ? event->id.data : "",
           event->id.size < sizeof o->id ? event->id.size : sizeof o->id);
    (void)snprintf(o->detail, sizeof o->detail, "%s", event->detail);
    (void)snprintf(o->engine, sizeof o->engine, "%s", event->engine);
    for (uint32_t g = 0; g < event->group_count; g++) {
        o->invalid_count[g] = event->invalid[g].count;
        if (event->invalid[g].count)
            memcpy(o->invalid[g], event->invalid[g].ids, event->invalid[g].count * sizeof(uint32_t));
    }
}

static kvf_agent *agent_of(world *w, uint32_t i) {
    world_engine *engines[] = {&w->p, &w->d, &w->e};
    return engines[i / WORLD_MAX_RANKS]->agents[i % WORLD_MAX_RANKS];
}

static uint64_t most_passes = UINT64_MAX; /* time does not jump beyond this */
static const kvf_link *beside;            /* the test's own, which world_work_beside() serves */

static uint64_t until(uint64_t due) {
    if (due == UINT64_MAX)
        return due;
    return due > net_now() ? due - net_now() : 0;
}

/* Lets time pass until the first agent, or the link beside them, has something to do. */
static void let_time_pass(world *w) {
    uint64_t left = UINT64_MAX;
    for (uint32_t i = 0; i < 3 * WORLD_MAX_RANKS; i++) {
        kvf_agent *agent = agent_of(w, i);
        if (!agent)
            continue;
        struct pollfd fd = {kvf_agent_event_fd(agent), POLLIN, 0};
        if (poll(&fd, 1, 0) > 0)
            return; /* its transport has something to do */
        left = kvf_min_u64(left, kvf_agent_timeout(agent));
    }
    if (beside)
        left = kvf_min_u64(left, until(kvf_link_due(beside)));
    left = kvf_min_u64(left, until(most_passes));
    net_advance(kvf_min_u64(left == UINT64_MAX ? MS : left, longest_step));
}

void world_work(world *w) {
    bool any = false;
    for (uint32_t i = 0; i < 3 * WORLD_MAX_RANKS; i++) {
        kvf_agent *agent = agent_of(w, i);
        bool busy = false;
        kvf_event event = {.struct_size = sizeof event};
        if (!agent)
            continue;
        assert_ok(kvf_agent_progress(agent, &busy));
        any |= busy;
        while (kvf_agent_next_event(agent, &event) == KVF_OK)
            keep(w, agent, &event);
    }
    if (!any && is_simulated())
        let_time_pass(w);
    else if (!any)
        nanosleep(&(struct timespec){0, 100000}, NULL);
}

void world_run_for(world *w, uint64_t ns) {
    most_passes = world_now() + ns;
    while (world_now() < most_passes)
        world_work(w);
    most_passes = UINT64_MAX;
}

void world_work_beside(world *w, kvf_link *link, uint64_t ns) {
    bool more;
    most_passes = world_now() + ns;
    beside = link;
    world_work(w);
    beside = NULL;
    most_passes = UINT64_MAX;
    kvf_link_progress(link, &more);
}

static world_outcome *find(world *w, const kvf_agent *agent, uint64_t ticket) {
    for (uint32_t i = 0; i < w->outcome_count; i++) {
        world_outcome *o = &w->outcomes[i];
        if (!o->taken && o->agent == agent && o->ticket == ticket)
            return o;
    }
    return NULL;
}

const world_outcome *world_next(world *w, kvf_agent *agent, uint64_t ticket) {
    world_outcome *found;
    uint64_t end = world_now() + WORLD_PATIENCE_S * SECOND;
    while (!(found = find(w, agent, ticket))) {
        if (world_now() > end) {
            for (uint32_t i = 0; i < w->outcome_count; i++)
                print_error("there was event %d of ticket %llu: %s\n", w->outcomes[i].kind,
                            (unsigned long long)w->outcomes[i].ticket, w->outcomes[i].detail);
            fail_msg("no event of ticket %llu came", (unsigned long long)ticket);
        }
        world_work(w);
    }
    found->taken = true;
    return found;
}

kvf_event world_wait_event(kvf_agent *agent) {
    kvf_event event = {.struct_size = sizeof event};
    assert_ok(kvf_agent_wait(agent, WORLD_PATIENCE_S * SECOND));
    assert_ok(kvf_agent_next_event(agent, &event));
    return event;
}

const world_outcome *world_done(world *w, kvf_agent *agent, uint64_t ticket) {
    const world_outcome *o = world_next(w, agent, ticket);
    if (o->kind != KVF_EVENT_DONE && o->kind != KVF_EVENT_PEER_READY)
        fail_msg("event %d: %s: %s", o->kind, kvf_status_name(o->status), o->detail);
    assert_true(o->blocks_free);
    return o;
}

const world_outcome *world_failed(world *w, kvf_agent *agent, uint64_t ticket, kvf_status status) {
    const world_outcome *o = world_next(w, agent, ticket);
    if (o->kind != KVF_EVENT_FAILED || o->status != status)
        fail_msg("event %d: %s: %s", o->kind, kvf_status_name(o->status), o->detail);
    assert_int_not_equal(o->detail[0], 0);
    return o;
}

void world_all_done(world *w, world_engine *e, const uint64_t *tickets) {
    for (uint32_t r = 0; r < e->rank_count; r++)
        (void)world_done(w, e->agents[r], tickets[r]);
}

uint32_t world_count(const world *w, const kvf_agent *agent, kvf_event_kind kind) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < w->outcome_count; i++)
        count += w->outcomes[i].agent == agent && w->outcomes[i].kind == kind;
    return count;
}

/* ---- looking up ------------------------------------------------------------------------------ */

kvf_agent_stats world_stats(kvf_agent *agent) {
    kvf_agent_stats stats = {.struct_size = sizeof stats};
    assert_ok(kvf_agent_get_stats(agent, &stats));
    return stats;
}

kvf_block_state world_block(kvf_agent *agent, uint32_t group, uint32_t block) {
    kvf_block_state state = KVF_BLOCK_IN_DOUBT;
    assert_ok(kvf_agent_block(agent, group, block, &state, NULL));
    return state;
}

static bool is_quiet(world *w) {
    for (uint32_t i = 0; i < 3 * WORLD_MAX_RANKS; i++) {
        if (!agent_of(w, i))
            continue;
        kvf_agent_stats s = world_stats(agent_of(w, i));
        uint64_t left = s.leases_now + s.blocks_held_now + s.blocks_filling_now + s.blocks_in_doubt_now;
        for (size_t k = 0; k < COUNT_OF(s.requests_now); k++)
            left += s.requests_now[k];
        if (left)
            return false;
    }
    return true;
}

static void print_what_is_left(world *w) {
    for (uint32_t i = 0; i < 3 * WORLD_MAX_RANKS; i++) {
        if (!agent_of(w, i))
            continue;
        kvf_agent_stats s = world_stats(agent_of(w, i));
        print_error(
            "%c %u: %llu holds, %llu pulls, %llu pushes, %llu expects, %llu leases, blocks: %llu held, "
            "%llu filling, %llu in doubt\n",
            "PDE"[i / WORLD_MAX_RANKS], i % WORLD_MAX_RANKS,
            (unsigned long long)s.requests_now[KVF_REQUEST_HOLD],
            (unsigned long long)s.requests_now[KVF_REQUEST_PULL],
            (unsigned long long)s.requests_now[KVF_REQUEST_PUSH],
            (unsigned long long)s.requests_now[KVF_REQUEST_EXPECT], (unsigned long long)s.leases_now,
            (unsigned long long)s.blocks_held_now, (unsigned long long)s.blocks_filling_now,
            (unsigned long long)s.blocks_in_doubt_now);
    }
}

void world_quiet(world *w) {
    uint64_t end = world_now() + WORLD_PATIENCE_S * SECOND;
    while (!is_quiet(w)) {
        if (world_now() > end) {
            print_what_is_left(w);
            fail_msg("something is left");
        }
        world_work(w);
    }
    for (uint32_t i = 0; i < w->outcome_count; i++) {
        const world_outcome *o = &w->outcomes[i];
        uint32_t freed = 0;
        for (uint32_t j = 0; j < w->outcome_count; j++)
            freed += w->outcomes[j].agent == o->agent && w->outcomes[j].ticket == o->ticket &&
                     w->outcomes[j].blocks_free;
        if (o->ticket && freed != 1)
            fail_msg("ticket %llu was freed %u times", (unsigned long long)o->ticket, freed);
    }
}

void world_pull_everything(world *w, const char *id, uint64_t tokens, uint32_t seed) {
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    world_request_make(w, &w->p, id, tokens, 3, 2, &held);
    world_request_make(w, &w->d, id, tokens, 7, 3, &wanted);
    world_fill(w, &w->p, &held, seed);

    world_hold(&w->p, &held, holds);
    world_pull(&w->d, &wanted, &w->p, pulls);

    world_all_done(w, &w->d, pulls);
    world_all_done(w, &w->p, holds);
    assert_int_equal(world_wrong_cells(w, &w->d, &wanted, seed), 0);
}
