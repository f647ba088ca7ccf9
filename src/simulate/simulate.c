/*
 * Setting a simulation up, running it, and what it found.
 */
#include <kvferry/simulate.h>

#include <math.h>
#include <stdio.h>
#include <sys/resource.h>

#include "simulate/fabric.h"
#include "simulate/jobs.h"
#include "simulate/network.h"

#define LOOKS 16u                /* at what agents keep for their peers, but not more than one in a second */
#define STEPS_BETWEEN_CALLS 256u /* before the real clock is read again */
#define CALL_PAUSE (100 * KVF_MILLISECOND)

#define CUT_OFF_NS (45 * KVF_SECOND)
#define RESTART_NS (30 * KVF_SECOND)

/* ---- what happens to engines ----------------------------------------------------------------- */

static void count_plans(const kvf_fleet_engine *engine, uint64_t *plans) {
    for (uint32_t r = 0; r < engine->fleet->rank_count && engine->alive; r++) {
        kvf_agent_stats stats = {.struct_size = sizeof stats};
        (void)kvf_agent_get_stats(engine->hosts[r].agent, &stats);
        *plans += stats.plans_built;
    }
}

static void kill_engine(kvf_deployment *d, kvf_fleet_engine *engine) {
    count_plans(engine, &d->closed_plans);
    kvf_engine_kill(engine);
    kvf_jobs_lose(d, engine,
                  d->world.line.now + (d->options->restart_ns ? d->options->restart_ns : RESTART_NS));
    d->found->killed++;
}

/* An engine that is cut off has been so for as long as connections last, or is reached again. */
static void at_return(kvf_happening *happening) {
    kvf_fleet_engine *engine =
        (kvf_fleet_engine *)((char *)happening - offsetof(kvf_fleet_engine, returning));
    kvf_timeline *line = &engine->fleet->world->line;
    if (line->now < engine->back_at) {
        kvf_engine_break(engine);
        kvf_happening_set(line, happening, engine->back_at);
    } else {
        kvf_engine_join(engine);
    }
}

static void cut_engine_off(kvf_deployment *d, kvf_fleet_engine *engine) {
    const uint64_t now = d->world.line.now;
    kvf_engine_cut_off(engine);
    engine->back_at = now + (d->options->cut_off_ns ? d->options->cut_off_ns : CUT_OFF_NS);
    kvf_happening_set(&d->world.line, &engine->returning,
                      kvf_min_u64(engine->back_at, now + KVF_NETWORK_KEEPS_NS));
    d->found->cut_off++;
}

static void at_blow(kvf_happening *happening) {
    kvf_deployment *d = (kvf_deployment *)((char *)happening - offsetof(kvf_deployment, blow));
    const kvf_blow *blow = &d->blows[d->struck++];
    const uint64_t one = kvf_draw(d, (uint64_t)d->prefill.engine_count + d->decode.engine_count);
    kvf_fleet_engine *engine = kvf_draw_engine(d, one < d->prefill.engine_count ? &d->prefill : &d->decode);
    if (engine && blow->kills)
        kill_engine(d, engine);
    else if (engine)
        cut_engine_off(d, engine);
    if (d->struck < d->blow_count)
        kvf_happening_set(&d->world.line, &d->blow, d->blows[d->struck].at);
}

static int compare_blows(const void *a, const void *b) {
    const kvf_blow *x = a, *y = b;
    return x->at != y->at ? (x->at > y->at) - (x->at < y->at) : x->kills - y->kills;
}

static kvf_status make_returns(kvf_deployment *d, const kvf_fleet *fleet) {
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < fleet->engine_count && !status; i++)
        status = kvf_happening_make(&d->world.line, &fleet->engines[i].returning, at_return);
    return status;
}

static kvf_status prepare_blows(kvf_deployment *d) {
    const kvf_simulation_options *o = d->options;
    const uint64_t count = (uint64_t)o->killed + o->cut_off;
    if (count > UINT32_MAX)
        return kvf_fail(KVF_E_RANGE, "killed is %u and cut_off %u; allowed: up to 2^32 - 1 together",
                        o->killed, o->cut_off);
    d->blow_count = (uint32_t)count;
    d->blows = kvf_alloc(count, sizeof *d->blows);
    if (!d->blows)
        return kvf_nomem("a simulation");
    for (uint32_t i = 0; i < count; i++)
        d->blows[i] = (kvf_blow){kvf_draw(d, d->last_ns + 1), i < o->killed};
    qsort(d->blows, count, sizeof *d->blows, compare_blows);
    kvf_status status = o->cut_off > 0 ? make_returns(d, &d->prefill) : KVF_OK;
    if (!status && o->cut_off > 0)
        status = make_returns(d, &d->decode);
    if (!status && count > 0)
        kvf_happening_set(&d->world.line, &d->blow, d->blows[0].at);
    return status;
}

/* ---- looking --------------------------------------------------------------------------------- */

static void look_at(kvf_deployment *d, const kvf_fleet *fleet) {
    for (uint32_t e = 0; e < fleet->engine_count; e++)
        for (uint32_t r = 0; r < fleet->rank_count && fleet->engines[e].alive; r++) {
            kvf_agent_stats stats = {.struct_size = sizeof stats};
            (void)kvf_agent_get_stats(fleet->engines[e].hosts[r].agent, &stats);
            d->found->sessions_most = kvf_max_u64(d->found->sessions_most, stats.peers_now);
            d->found->session_bytes_most = kvf_max_u64(d->found->session_bytes_most, stats.memory_now_bytes);
        }
}

static void at_look(kvf_happening *happening) {
    kvf_deployment *d = (kvf_deployment *)((char *)happening - offsetof(kvf_deployment, look));
    look_at(d, &d->prefill);
    look_at(d, &d->decode);
    if (d->ended < d->options->request_count)
        kvf_happening_set(&d->world.line, &d->look, d->world.line.now + d->looked_ns);
}

static void at_run(kvf_host *mover, kvf_host *owner, const kvf_run *runs, size_t count, uint64_t bytes) {
    kvf_deployment *d = (kvf_deployment *)mover->world;
    const bool reads = ((const kvf_fleet_engine *)mover->owner)->fleet == &d->decode;
    const kvf_run_owners owners = kvf_run_owners_of(mover, owner, runs, count);
    d->found->foreign_runs += owners.astray + (reads ? 0 : owners.unlike);
    kvf_jobs_at_run(d, reads ? mover : owner, owners.request, bytes, count, reads ? owners.unlike : 0);
}

/* ---- the whole ------------------------------------------------------------------------------- */

static uint64_t clock_now(void *context) {
    return ((const kvf_world *)context)->line.now;
}

static kvf_status check_fits(const kvf_deployment *d, const kvf_fleet *fleet, uint64_t i) {
    const uint32_t tokens = d->options->requests[i].prompt_tokens;
    const kvf_block_pool *pools = fleet->engines[0].pools;
    uint64_t all = 0;
    for (uint32_t g = 0; g < fleet->group_count; g++) {
        const uint64_t wanted = kvf_fleet_blocks(fleet, g, tokens);
        all = fleet->pool_count > 1 ? wanted : all + wanted;
        if (all > pools[fleet->pool_count > 1 ? g : 0].all)
            return kvf_fail(KVF_E_RANGE,
                            "request %llu has %u tokens, %llu blocks of group %s in a %s engine; it has %u",
                            (unsigned long long)i, tokens, (unsigned long long)all,
                            kvf_model_group(kvf_engine_model(fleet->shape), g)->name, fleet->role,
                            pools[fleet->pool_count > 1 ? g : 0].all);
    }
    return KVF_OK;
}

static kvf_status check_requests(const kvf_deployment *d) {
    const kvf_simulation_options *o = d->options;
    kvf_status status = KVF_OK;
    if (!o->requests || o->request_count == 0 || o->request_count >= UINT32_MAX)
        return kvf_fail(KVF_E_RANGE, "requests is %s, and request_count %llu; allowed: 1 to 2^32 - 2",
                        o->requests ? "set" : "NULL", (unsigned long long)o->request_count);
    for (uint64_t i = 0; i < o->request_count && !status; i++) {
        if (o->requests[i].prompt_tokens == 0)
            return kvf_fail(KVF_E_RANGE, "request %llu has no prompt; allowed: 1 token and more",
                            (unsigned long long)i);
        if (i > 0 && o->requests[i].at_ns < o->requests[i - 1].at_ns)
            return kvf_fail(KVF_E_INVALID, "request %llu arrives before the one in front of it",
                            (unsigned long long)i);
        status = check_fits(d, &d->prefill, i);
        if (!status)
            status = check_fits(d, &d->decode, i);
    }
    return status;
}

static kvf_status prepare(kvf_deployment *d) {
    const kvf_simulation_options *o = d->options;
    kvf_world *world = &d->world;
    const kvf_agent_options agent = {.struct_size = sizeof agent,
                                     .transport = "modelled",
                                     .way = KVF_WAY_DIRECT,
                                     .lease_ns = o->lease_ns,
                                     .idle_ns = o->idle_ns};
    if (!(o->link_bytes_per_second >= 0))
        return kvf_fail(KVF_E_RANGE, "link_bytes_per_second is %g; allowed: 0 and more",
                        o->link_bytes_per_second);
    world->clock = (kvf_clock){clock_now, world};
    world->latency_ns = o->latency_ns ? o->latency_ns : 10000;
    world->byte_ns = 1e9 / (o->link_bytes_per_second > 0 ? o->link_bytes_per_second : 50e9);
    world->run_ns = (double)o->run_ns;
    world->moved = at_run;
    d->random = o->seed;
    d->prefill.event = kvf_jobs_at_prefill;
    d->decode.event = kvf_jobs_at_decode;
    kvf_status status = kvf_fleet_open(&d->prefill, world, "prefill", &o->prefill, &agent);
    if (!status)
        status = kvf_fleet_open(&d->decode, world, "decode", &o->decode, &agent);
    if (!status)
        status = kvf_model_compare(kvf_engine_model(d->prefill.shape), kvf_engine_model(d->decode.shape));
    if (!status)
        status = check_requests(d);
    if (!status)
        status = kvf_happening_make(&world->line, &d->look, at_look);
    if (!status)
        status = kvf_happening_make(&world->line, &d->blow, at_blow);
    if (!status)
        status = kvf_jobs_begin(d);
    if (status)
        return status;
    d->last_ns = o->requests[o->request_count - 1].at_ns;
    d->looked_ns = kvf_max_u64(d->last_ns / LOOKS, KVF_SECOND);
    kvf_happening_set(&world->line, &d->look, d->looked_ns);
    return prepare_blows(d);
}

/* Whether the caller lets it go on. */
static bool call_progress(kvf_deployment *d) {
    const uint64_t real = kvf_now(&kvf_monotonic);
    if (!d->options->progress || real < d->called_real + CALL_PAUSE)
        return true;
    d->called_real = real;
    return d->options->progress(d->options->context, d->world.line.now, d->ended);
}

/* Until all requests have ended and nobody has any of their blocks, as leases of killed readers may have. */
static kvf_status run(kvf_deployment *d) {
    uint64_t steps = 0;
    while (d->ended < d->options->request_count || d->jobs) {
        if (!kvf_timeline_step(&d->world.line))
            return kvf_fail(KVF_E_IO, "the simulation stands still with %u requests under way",
                            kvf_jobs_count(d));
        if (d->world.status)
            return kvf_fail(d->world.status, "%s", d->world.detail);
        if (++steps % STEPS_BETWEEN_CALLS == 0 && !call_progress(d))
            return kvf_fail(KVF_E_CANCELLED, "the simulation was ended by its caller");
    }
    return KVF_OK;
}

static void report_fleet(kvf_deployment *d, const kvf_fleet *fleet) {
    kvf_simulation *found = d->found;
    for (uint32_t e = 0; e < fleet->engine_count; e++) {
        const kvf_fleet_engine *engine = &fleet->engines[e];
        count_plans(engine, &found->plans);
        found->left += kvf_engine_left(engine);
        for (uint32_t r = 0; r < fleet->rank_count; r++)
            found->link_use = fmax(found->link_use, (double)kvf_host_busy_ns(&engine->hosts[r]) /
                                                        (double)kvf_max_u64(1, d->world.line.now));
    }
    found->agents += fleet->engine_count * fleet->rank_count;
}

static void report(kvf_deployment *d) {
    kvf_simulation *found = d->found;
    struct rusage usage;
    found->simulated_ns = d->world.line.now;
    found->plans = d->closed_plans;
    report_fleet(d, &d->prefill);
    report_fleet(d, &d->decode);
    found->prefill_wait = kvf_quantiles_get(&d->prefill_wait);
    found->blocks_wait = kvf_quantiles_get(&d->blocks_wait);
    found->hand_over = kvf_quantiles_get(&d->hand_over);
    found->alone = kvf_quantiles_get(&d->alone);
    found->until_decode = kvf_quantiles_get(&d->until_decode);
    found->bytes = d->world.bytes;
    found->runs = d->world.runs;
    found->messages = d->world.messages;
    found->message_bytes = d->world.message_bytes;
    if (getrusage(RUSAGE_SELF, &usage) == 0)
        found->process_bytes = (uint64_t)usage.ru_maxrss * 1024;
    found->real_seconds = (double)(kvf_now(&kvf_monotonic) - d->begun_real) / 1e9;
}

static void close_simulation(kvf_deployment *d) {
    kvf_fleet_close(&d->prefill);
    kvf_fleet_close(&d->decode);
    kvf_jobs_free(d);
    kvf_happening_drop(&d->world.line, &d->look);
    kvf_happening_drop(&d->world.line, &d->blow);
    kvf_timeline_free(&d->world.line);
    kvf_free(d->world.connections);
    kvf_free(d->blows);
    kvf_free(d);
}

kvf_status kvf_simulate(const kvf_simulation_options *options, kvf_simulation *out) {
    kvf_simulation_options taken;
    kvf_simulation found = {.struct_size = sizeof found};
    if (!options)
        return kvf_fail(KVF_E_INVALID, "options is NULL");
    kvf_status status = kvf_check_out(out, "kvf_simulation");
    if (!status)
        status = kvf_take_options(&taken, sizeof taken, options, "kvf_simulation_options");
    if (status)
        return status;
    kvf_deployment *d = kvf_alloc0(1, sizeof *d);
    if (!d)
        return kvf_nomem("a simulation");
    d->options = &taken;
    d->found = &found;
    d->begun_real = kvf_now(&kvf_monotonic);
    status = prepare(d);
    if (!status)
        status = run(d);
    if (!status)
        report(d);
    char detail[KVF_DETAIL_BYTES];
    (void)snprintf(detail, sizeof detail, "%s", status ? kvf_error_detail() : "");
    close_simulation(d);
    if (status) {
        kvf_error_restore(detail);
        return status;
    }
    kvf_fill_out(out, &found, sizeof found);
    return KVF_OK;
}
