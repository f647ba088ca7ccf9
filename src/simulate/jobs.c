#include "simulate/jobs.h"

#include <math.h>
#include <stdio.h>

#include "agent/agent.h"

typedef enum job_stage {
    JOB_WAITS,    /* for its prefill engine */
    JOB_COMPUTES, /* there */
    JOB_SEEKS,    /* waits for blocks of its decode engine */
    JOB_MOVES,
    JOB_DECODES,
    JOB_ENDED, /* at the decode side */
} job_stage;

/* What moved to a decode rank. */
typedef struct job_share {
    uint64_t bytes, runs, spoiled;
} job_share;

typedef enum job_end { END_DONE, END_FAILED, END_LOST } job_end;

struct kvf_job {
    UT_hash_handle hh;
    uint32_t number;
    job_stage stage;
    kvf_deployment *deployment;
    kvf_fleet_engine *prefill, *decode;
    uint64_t arrived, computed, placed; /* times; 0: not yet */
    uint32_t prompt_tokens, output_tokens;
    uint32_t ready;                /* tokens that are computed, with those of the chunk under way */
    uint32_t holding;              /* prefill ranks whose hold or push has not let go of its blocks */
    uint32_t filling;              /* likewise decode ranks, by pulls or expectations */
    uint32_t moving;               /* decode ranks whose pull or expectation has not ended */
    bool in_doubt;                 /* one has failed */
    uint64_t *tickets;             /* of pulls [decode rank], or of pushes [prefill rank] */
    job_share *shares;             /* [decode rank] */
    kvf_group_steps *there, *here; /* [group], with their ids: in the prefill engine, in the decode engine */
    kvf_happening decoded;
    kvf_job *prev, *next; /* in the queue of an engine */
};

static kvf_deployment *deployment_of(const kvf_fleet_engine *engine) {
    return (kvf_deployment *)engine->fleet->world;
}

static uint64_t now_of(const kvf_deployment *d) {
    return d->world.line.now;
}

/* Prefill engines write, instead of being read. */
static bool pushes(const kvf_deployment *d) {
    return d->options->push_tokens > 0;
}

/* ---- chance (SplitMix64, by Steele, Lea and Flood, 2014) ------------------------------------- */

uint64_t kvf_draw(kvf_deployment *d, uint64_t below) {
    uint64_t z = d->random += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint64_t)(((unsigned __int128)(z ^ (z >> 31)) * below) >> 64);
}

/* One of the engines that are there; NULL: none is. */
kvf_fleet_engine *kvf_draw_engine(kvf_deployment *d, const kvf_fleet *fleet) {
    uint64_t place = fleet->there ? kvf_draw(d, fleet->engine_count) : 0;
    for (uint32_t i = 0; fleet->there && i < fleet->engine_count; i++, place++)
        if (kvf_engine_is_there(&fleet->engines[place % fleet->engine_count]))
            return &fleet->engines[place % fleet->engine_count];
    return NULL;
}

/* The less loaded of two. */
static kvf_fleet_engine *choose_engine(kvf_deployment *d, const kvf_fleet *fleet) {
    kvf_fleet_engine *one = kvf_draw_engine(d, fleet), *other = one;
    for (uint32_t tries = 0; other == one && fleet->there > 1 && tries < 8; tries++)
        other = kvf_draw_engine(d, fleet);
    return one && other->load < one->load ? other : one;
}

/* ---- a job's ends ---------------------------------------------------------------------------- */

static void free_job(kvf_job *job) {
    kvf_happening_drop(&job->deployment->world.line, &job->decoded);
    HASH_DEL(job->deployment->jobs, job);
    kvf_free(job->tickets);
    kvf_free(job->shares);
    kvf_free(job->there);
    kvf_free(job->here);
    kvf_free(job);
}

/* Both sides have let go of it. */
static void free_if_over(kvf_job *job) {
    if (job->stage == JOB_ENDED && !job->there && job->filling == 0)
        free_job(job);
}

static void end_job(kvf_job *job, job_end end) {
    kvf_deployment *d = job->deployment;
    job->stage = JOB_ENDED;
    d->ended++;
    d->found->done += end == END_DONE;
    d->found->failed += end == END_FAILED;
    d->found->lost += end == END_LOST;
}

static void compute_next(kvf_fleet_engine *engine);
static void place_next(kvf_fleet_engine *engine);

static void give_back(kvf_fleet_engine *engine, kvf_group_steps **steps, uint64_t tokens) {
    kvf_engine_give_blocks(engine, *steps);
    engine->load -= tokens;
    kvf_free(*steps);
    *steps = NULL;
}

/* The decode engine has its blocks back. */
static void leave_decode(kvf_job *job) {
    kvf_fleet_engine *engine = job->decode;
    if (job->here)
        give_back(engine, &job->here, 0);
    engine->load -= job->prompt_tokens;
    free_if_over(job);
    place_next(engine);
}

/* The prefill engine has its blocks back, unless it still computes. */
static void leave_prefill(kvf_job *job) {
    kvf_fleet_engine *engine = job->prefill;
    if (job->holding > 0 || engine->computing == job)
        return;
    give_back(engine, &job->there, job->prompt_tokens);
    free_if_over(job);
    compute_next(engine);
}

/* It waits for its prefill engine no longer. */
static void leave_queue(kvf_job *job) {
    DL_DELETE(job->prefill->queue, job);
    job->prefill->load -= job->prompt_tokens;
}

/* ---- blocks and requests ---------------------------------------------------------------------- */

/* Room for the tables of a job in an engine; NULL: no memory. */
static kvf_group_steps *make_tables(const kvf_fleet *fleet, uint64_t tokens, uint32_t **ids) {
    const uint32_t groups = fleet->group_count;
    size_t blocks = 0;
    for (uint32_t g = 0; g < groups; g++)
        blocks += kvf_fleet_blocks(fleet, g, tokens);
    kvf_group_steps *made = kvf_alloc(1, groups * sizeof *made + blocks * sizeof **ids);
    *ids = made ? (uint32_t *)(void *)(made + groups) : NULL;
    return made;
}

/* Takes blocks for a job, and the tables for them; false: there are not enough. */
static bool take_blocks(kvf_job *job, kvf_fleet_engine *engine, kvf_group_steps **steps) {
    uint32_t *ids;
    kvf_group_steps *made = make_tables(engine->fleet, job->prompt_tokens, &ids);
    if (!made)
        kvf_world_fail(&job->deployment->world, kvf_nomem("a simulation"));
    if (made && kvf_engine_take_blocks(engine, job->number, job->prompt_tokens, made, ids)) {
        *steps = made;
        return true;
    }
    kvf_free(made);
    return false;
}

/* Nothing should have to wait for a deadline: what is lost is noticed by sessions and leases. */
static kvf_agent_request request_of(const kvf_job *job, const kvf_group_steps *steps) {
    return (kvf_agent_request){.struct_size = sizeof(kvf_agent_request),
                               .id = {&job->number, sizeof job->number},
                               .groups = steps,
                               .group_count = steps ? job->prefill->fleet->group_count : 0};
}

typedef kvf_status (*asking)(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket);

/* Asks the agents of all ranks of an engine. */
static void ask_all(const kvf_job *job, const kvf_fleet_engine *engine, asking ask,
                    const kvf_agent_request *request, uint64_t *tickets) {
    for (uint32_t r = 0; r < engine->fleet->rank_count; r++) {
        uint64_t ticket = 0;
        const kvf_status status = ask(engine->hosts[r].agent, request, &ticket);
        if (status)
            kvf_world_fail(&job->deployment->world, status);
        if (tickets)
            tickets[r] = ticket;
        kvf_host_wake(&engine->hosts[r]);
    }
}

/* Its decode engine pulls, or expects. What is held and was not lent for a lease is held no more. */
static void want(kvf_job *job, asking ask, uint64_t *tickets) {
    kvf_agent_request request = request_of(job, job->here);
    request.contact = job->prefill->contact;
    request.deadline_ns = 24ull * 3600 * KVF_SECOND;
    request.patience_ns = job->decode->hosts[0].agent->options.lease_ns;
    job->moving = job->filling = job->decode->fleet->rank_count;
    ask_all(job, job->decode, ask, &request, tickets);
}

/* Its prefill engine holds, or pushes. What nobody expects any more is pushed for some time. */
static void offer(kvf_job *job, asking ask, uint64_t *tickets) {
    kvf_agent_request request = request_of(job, job->there);
    if (tickets)
        request.deadline_ns =
            (uint64_t)(job->prefill->fleet->token_ns * job->prompt_tokens) + 120 * KVF_SECOND;
    job->holding = job->prefill->fleet->rank_count;
    ask_all(job, job->prefill, ask, &request, tickets);
}

/* A pull that has begun without blocks gets them, unless it has failed. */
static void pull_into(const kvf_job *job) {
    for (uint32_t r = 0; r < job->decode->fleet->rank_count; r++) {
        kvf_host *host = &job->decode->hosts[r];
        (void)kvf_agent_pull_into(host->agent, job->tickets[r], job->here, job->decode->fleet->group_count);
        kvf_host_wake(host);
    }
}

static void wait_for_prefill(kvf_job *job, kvf_fleet_engine *engine) {
    job->prefill = engine;
    job->stage = JOB_WAITS;
    engine->load += job->prompt_tokens;
    DL_APPEND(engine->queue, job);
}

/* A job that has blocks to be written to gets a prefill engine. */
static void expect(kvf_job *job) {
    kvf_deployment *d = job->deployment;
    kvf_fleet_engine *engine = choose_engine(d, &d->prefill);
    if (!engine) {
        end_job(job, END_LOST);
        give_back(job->decode, &job->here, job->prompt_tokens);
        free_if_over(job);
        return;
    }
    wait_for_prefill(job, engine);
    want(job, kvf_agent_expect, NULL);
    compute_next(engine);
}

static void note_placed(kvf_job *job) {
    kvf_deployment *d = job->deployment;
    job->stage = JOB_MOVES;
    job->placed = now_of(d);
    kvf_quantiles_add(&d->blocks_wait, job->placed - kvf_max_u64(job->arrived, job->computed));
}

/* Gives blocks to the jobs that wait for them, in their order. */
static void place_next(kvf_fleet_engine *engine) {
    kvf_job *job;
    while ((job = engine->queue) && take_blocks(job, engine, &job->here)) {
        DL_DELETE(engine->queue, job);
        note_placed(job);
        if (pushes(job->deployment))
            expect(job);
        else
            pull_into(job);
    }
}

/* A decode engine is found for it, and blocks there as soon as there are. A pull can begin without. */
static void seek(kvf_job *job, kvf_fleet_engine *engine) {
    kvf_deployment *d = job->deployment;
    const uint32_t ranks = engine->fleet->rank_count;
    job->decode = engine;
    job->stage = JOB_SEEKS;
    job->tickets = kvf_alloc0(pushes(d) ? d->prefill.rank_count : ranks, sizeof *job->tickets);
    job->shares = kvf_alloc0(ranks, sizeof *job->shares);
    if (!job->tickets || !job->shares) {
        kvf_world_fail(&d->world, kvf_nomem("a simulation"));
        return;
    }
    engine->load += job->prompt_tokens;
    const bool placed = !engine->queue && take_blocks(job, engine, &job->here);
    if (placed)
        note_placed(job);
    else
        DL_APPEND(engine->queue, job);
    if (!pushes(d))
        want(job, kvf_agent_pull, job->tickets);
    else if (placed)
        expect(job);
}

/* ---- computing ------------------------------------------------------------------------------- */

static void start_again(kvf_fleet_engine *engine) {
    const kvf_status status = kvf_engine_start(engine);
    if (status)
        kvf_world_fail(engine->fleet->world, status);
}

static void compute_chunk(kvf_fleet_engine *engine) {
    kvf_job *job = engine->computing;
    kvf_deployment *d = job->deployment;
    const uint32_t left = job->prompt_tokens - job->ready;
    const uint32_t chunk = pushes(d) && d->options->push_tokens < left ? d->options->push_tokens : left;
    job->ready += chunk;
    kvf_happening_set(&d->world.line, &engine->happening,
                      now_of(d) + (uint64_t)(engine->fleet->token_ns * chunk));
}

/* A push that has ended, as all its consumers gave up, takes no more. */
static void push_ready(const kvf_job *job) {
    const uint64_t most = job->deployment->options->push_tokens;
    const kvf_push_chunk chunk = {.struct_size = sizeof chunk,
                                  .begin = (job->ready - 1) / most * most,
                                  .end = job->ready,
                                  .layers = UINT32_MAX};
    for (uint32_t r = 0; r < job->prefill->fleet->rank_count; r++) {
        kvf_host *host = &job->prefill->hosts[r];
        const kvf_status status = kvf_agent_push_ready(host->agent, job->tickets[r],
                                                       job->ready < job->prompt_tokens ? &chunk : NULL);
        if (status && status != KVF_E_NOT_FOUND)
            kvf_world_fail(&job->deployment->world, status);
        kvf_host_wake(host);
    }
}

static void computed(kvf_job *job) {
    kvf_deployment *d = job->deployment;
    job->computed = now_of(d);
    if (pushes(d)) {
        if (job->stage == JOB_COMPUTES)
            job->stage = JOB_MOVES;
        leave_prefill(job); /* if its pushes have failed */
        return;
    }
    offer(job, kvf_agent_hold, NULL);
    kvf_fleet_engine *engine = choose_engine(d, &d->decode);
    if (engine)
        seek(job, engine);
    else
        end_job(job, END_LOST); /* the lease of what is held runs out */
}

/* An engine has computed a prompt, or a chunk of it; or it was killed, and is there again. */
static void at_engine(kvf_happening *happening) {
    kvf_fleet_engine *engine =
        (kvf_fleet_engine *)((char *)happening - offsetof(kvf_fleet_engine, happening));
    kvf_job *job = engine->computing;
    if (!job) {
        start_again(engine);
        return;
    }
    if (pushes(job->deployment))
        push_ready(job);
    if (job->ready < job->prompt_tokens) {
        compute_chunk(engine);
        return;
    }
    engine->computing = NULL;
    computed(job);
    compute_next(engine);
}

static void compute_next(kvf_fleet_engine *engine) {
    kvf_deployment *d = deployment_of(engine);
    kvf_job *job = engine->queue;
    if (engine->computing || !job || !take_blocks(job, engine, &job->there))
        return;
    DL_DELETE(engine->queue, job);
    engine->computing = job;
    job->stage = JOB_COMPUTES;
    kvf_quantiles_add(&d->prefill_wait, now_of(d) - kvf_max_u64(job->arrived, job->placed));
    if (pushes(d))
        offer(job, kvf_agent_push, job->tickets);
    compute_chunk(engine);
}

/* ---- decoding -------------------------------------------------------------------------------- */

static void at_decoded(kvf_happening *happening) {
    kvf_job *job = (kvf_job *)((char *)happening - offsetof(kvf_job, decoded));
    end_job(job, END_DONE);
    leave_decode(job);
}

/* What a job's bytes take of the busiest link: that of a decode rank, or of the prefill ranks, which share them. */
static double alone_ns(const kvf_job *job) {
    const kvf_world *world = &job->deployment->world;
    double all = 0, most = 0;
    for (uint32_t r = 0; r < job->decode->fleet->rank_count; r++) {
        const double one =
            (double)job->shares[r].bytes * world->byte_ns + (double)job->shares[r].runs * world->run_ns;
        all += one;
        most = fmax(most, one);
    }
    return fmax(most, all / job->prefill->fleet->rank_count);
}

/* All pulls, or expectations, of a job have ended. */
static void moved(kvf_job *job) {
    kvf_deployment *d = job->deployment;
    const kvf_fleet_engine *engine = job->decode;
    if (job->in_doubt) {
        if (job->stage == JOB_SEEKS)
            DL_DELETE(job->decode->queue, job);
        if (job->stage == JOB_WAITS)
            leave_queue(job);
        end_job(job, END_FAILED);
        return;
    }
    job->stage = JOB_DECODES;
    kvf_quantiles_add(&d->hand_over, now_of(d) - kvf_max_u64(job->placed, job->computed));
    kvf_quantiles_add(&d->alone, (uint64_t)alone_ns(job));
    kvf_quantiles_add(&d->until_decode, now_of(d) - job->arrived);
    kvf_happening_set(&d->world.line, &job->decoded,
                      now_of(d) + (uint64_t)(engine->fleet->token_ns * job->output_tokens));
}

static kvf_job *find_job(const kvf_deployment *d, uint32_t number) {
    kvf_job *job = NULL;
    HASH_FIND(hh, d->jobs, &number, sizeof number, job);
    return job;
}

static kvf_job *job_of(const kvf_host *host, const kvf_event *event) {
    uint32_t number = 0;
    if (event->id.size == sizeof number)
        memcpy(&number, event->id.data, sizeof number);
    return find_job((const kvf_deployment *)host->world, number);
}

void kvf_jobs_at_run(kvf_deployment *d, const kvf_host *decode, uint32_t number, uint64_t bytes,
                     uint64_t runs, uint64_t spoiled) {
    const kvf_job *job = find_job(d, number);
    if (!job || job->decode != decode->owner)
        return;
    job->shares[decode->rank].bytes += bytes;
    job->shares[decode->rank].runs += runs;
    job->shares[decode->rank].spoiled += spoiled;
}

void kvf_jobs_at_prefill(kvf_host *host, const kvf_event *event) {
    kvf_job *job = job_of(host, event);
    if (!job || !event->blocks_free ||
        (event->request_kind != KVF_REQUEST_HOLD && event->request_kind != KVF_REQUEST_PUSH))
        return;
    job->holding--;
    leave_prefill(job);
}

void kvf_jobs_at_decode(kvf_host *host, const kvf_event *event) {
    kvf_job *job = job_of(host, event);
    if (!job || (event->request_kind != KVF_REQUEST_PULL && event->request_kind != KVF_REQUEST_EXPECT))
        return;
    kvf_deployment *d = job->deployment;
    job->filling -= event->blocks_free;
    if (event->kind == KVF_EVENT_FAILED || event->kind == KVF_EVENT_DONE) {
        job->moving--;
        job->in_doubt |= event->kind == KVF_EVENT_FAILED;
        if (event->kind == KVF_EVENT_DONE)
            d->found->foreign_runs += job->shares[host->rank].spoiled;
        if (event->kind == KVF_EVENT_FAILED && !d->found->failure[0])
            (void)snprintf(d->found->failure, sizeof d->found->failure, "%s", event->detail);
        if (job->moving == 0)
            moved(job);
    }
    if (job->filling == 0 && job->stage == JOB_ENDED)
        leave_decode(job);
}

/* ---- arriving -------------------------------------------------------------------------------- */

static void arrive(kvf_deployment *d, const kvf_simulated_request *request) {
    kvf_fleet_engine *engine = choose_engine(d, pushes(d) ? &d->decode : &d->prefill);
    kvf_job *job = engine ? kvf_alloc0(1, sizeof *job) : NULL;
    if (!job) {
        if (engine)
            kvf_world_fail(&d->world, kvf_nomem("a simulation"));
        d->found->lost++;
        d->ended++;
        return;
    }
    job->number = (uint32_t)d->arrived; /* from 1 on */
    job->deployment = d;
    job->arrived = now_of(d);
    job->prompt_tokens = request->prompt_tokens;
    job->output_tokens = request->output_tokens;
    const kvf_status status = kvf_happening_make(&d->world.line, &job->decoded, at_decoded);
    if (!status)
        HASH_ADD(hh, d->jobs, number, sizeof job->number, job);
    if (status || !job->hh.tbl) {
        kvf_world_fail(&d->world, status ? status : kvf_nomem("a simulation"));
        kvf_happening_drop(&d->world.line, &job->decoded);
        kvf_free(job);
        return;
    }
    if (pushes(d)) {
        seek(job, engine);
        return;
    }
    wait_for_prefill(job, engine);
    compute_next(engine);
}

static void at_arrival(kvf_happening *happening) {
    kvf_deployment *d = (kvf_deployment *)((char *)happening - offsetof(kvf_deployment, arrival));
    const kvf_simulated_request *requests = d->options->requests;
    arrive(d, &requests[d->arrived++]);
    if (d->arrived < d->options->request_count)
        kvf_happening_set(&d->world.line, &d->arrival, requests[d->arrived].at_ns);
}

/* ---- engines that are killed ------------------------------------------------------------------- */

static bool is_at_prefill(const kvf_job *job) {
    return job->stage == JOB_WAITS || job->stage == JOB_COMPUTES;
}

/* A job of an engine whose processes have ended. Pulls and expectations find out. */
static void lose_prefill(kvf_job *job) {
    job->holding = 0;
    kvf_free(job->there);
    job->there = NULL;
    if (is_at_prefill(job) && pushes(job->deployment))
        job->stage = JOB_MOVES;
    else if (is_at_prefill(job))
        end_job(job, END_LOST);
    free_if_over(job);
}

static void lose_decode(kvf_job *job) {
    if (job->stage == JOB_WAITS)
        leave_queue(job);
    if (job->stage != JOB_ENDED)
        end_job(job, END_LOST);
    kvf_happening_set(&job->deployment->world.line, &job->decoded, UINT64_MAX);
    job->filling = job->moving = 0;
    kvf_free(job->here);
    job->here = NULL;
    free_if_over(job);
}

void kvf_jobs_lose(kvf_deployment *d, kvf_fleet_engine *engine, uint64_t back_at) {
    kvf_job *job, *next;
    engine->queue = engine->computing = NULL;
    HASH_ITER(hh, d->jobs, job, next) {
        if (job->prefill == engine && (job->there || is_at_prefill(job)))
            lose_prefill(job);
        else if (job->decode == engine && (job->filling > 0 || job->here || job->stage == JOB_SEEKS))
            lose_decode(job);
    }
    engine->load = 0;
    kvf_happening_set(&d->world.line, &engine->happening, back_at);
}

/* ---- all jobs --------------------------------------------------------------------------------- */

static kvf_status make_happenings(kvf_deployment *d, const kvf_fleet *fleet) {
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < fleet->engine_count && !status; i++)
        status = kvf_happening_make(&d->world.line, &fleet->engines[i].happening, at_engine);
    return status;
}

kvf_status kvf_jobs_begin(kvf_deployment *d) {
    kvf_status status = kvf_happening_make(&d->world.line, &d->arrival, at_arrival);
    if (!status)
        status = make_happenings(d, &d->prefill);
    if (!status)
        status = make_happenings(d, &d->decode);
    if (!status)
        kvf_happening_set(&d->world.line, &d->arrival, d->options->requests[0].at_ns);
    return status;
}

uint32_t kvf_jobs_count(const kvf_deployment *d) {
    return HASH_COUNT(d->jobs);
}

void kvf_jobs_free(kvf_deployment *d) {
    kvf_job *job, *next;
    HASH_ITER(hh, d->jobs, job, next) {
        free_job(job);
    }
    kvf_happening_drop(&d->world.line, &d->arrival);
}
