#include "agent/arrival.h"

#include "agent/expect.h"
#include "agent/pull.h"
#include "cuda/word.h"
#include "model/model.h"
#include "stage/stream.h"
#include "stage/ways.h"

/* ---- life -------------------------------------------------------------------------------------- */

kvf_status kvf_arrival_begin(kvf_asker *asker, const kvf_agent_request *request) {
    kvf_agent *agent = asker->base.agent;
    if (!request->by_layer)
        return KVF_OK;
    kvf_arrival *arrival = kvf_alloc0(1, sizeof *arrival);
    if (!arrival)
        return kvf_nomem("a request");
    arrival->all = kvf_model_layer_count(kvf_engine_model(agent->engine));
    arrival->asker = asker;
    asker->arrival = arrival;
    DL_APPEND(agent->arrivals, arrival);
    return KVF_OK;
}

static void stop_counting(kvf_asker *asker) {
    if (!asker->arrival->counts)
        return;
    KVF_ASSERT(kvf_work_is_ours(asker->base.agent));
    (void)kvf_stage_count(asker->base.agent->stage, kvf_expect_generation(asker), NULL);
    asker->arrival->counts = false;
}

void kvf_arrival_end(kvf_asker *asker) {
    if (!asker->arrival)
        return;
    asker->arrival->over = true;
    kvf_cuda_word_give(asker->arrival->word);
    asker->arrival->word = NULL;
}

void kvf_arrivals_end(kvf_agent *agent) {
    kvf_arrival *arrival;
    DL_FOREACH(agent->arrivals, arrival) {
        kvf_arrival_end(arrival->asker);
    }
}

void kvf_arrival_free(kvf_asker *asker) {
    kvf_arrival *arrival = asker->arrival;
    if (!arrival)
        return;
    kvf_arrival_end(asker);
    stop_counting(asker);
    DL_DELETE(asker->base.agent->arrivals, arrival);
    kvf_free(arrival->come);
    kvf_free(arrival->awaited);
    kvf_free(arrival);
    asker->arrival = NULL;
}

/* ---- what packed writers bring -------------------------------------------------------------------- */

/* Adds what one source of the plan gives: its stream in our memory, as its flows have it in parts. */
static kvf_status add_source(const kvf_asker *expect, uint32_t source, uint64_t *by_layer) {
    const kvf_agent *agent = expect->base.agent;
    kvf_selection *selection = NULL;
    kvf_stream_map *map = NULL;
    kvf_stream *stream = NULL;
    kvf_status status = kvf_selection_of_plan(expect->remote->plan, source, &selection);
    if (!status)
        status = kvf_stream_map_create(agent->shard, selection, &map);
    if (!status)
        status = kvf_stream_create(map, expect->base.groups, expect->base.group_count, &stream);
    if (!status)
        kvf_stream_add_layers(stream, (kvf_byte_range){0, kvf_stream_bytes(stream)}, by_layer);
    kvf_stream_free(stream);
    kvf_stream_map_free(map);
    kvf_selection_free(selection);
    return status;
}

static kvf_status start_counting(kvf_asker *expect) {
    kvf_arrival *arrival = expect->arrival;
    arrival->come = kvf_alloc0(arrival->all, sizeof *arrival->come);
    arrival->awaited = kvf_alloc0(arrival->all, sizeof *arrival->awaited);
    kvf_status status = arrival->come && arrival->awaited ? KVF_OK : kvf_nomem("a count of layers");
    for (uint32_t i = 0; i < kvf_plan_source_count(expect->remote->plan) && !status; i++)
        status = add_source(expect, i, arrival->awaited);
    if (!status)
        status = kvf_stage_count(expect->base.agent->stage, kvf_expect_generation(expect), arrival->come);
    return status;
}

/* If it cannot be counted, the engine waits for the end. */
void kvf_arrival_flows(kvf_asker *expect) {
    kvf_arrival *arrival = expect->arrival;
    KVF_ASSERT(kvf_work_is_ours(expect->base.agent));
    if (!arrival || arrival->come || expect->base.agent->options.verify)
        return;
    arrival->counts = !start_counting(expect);
    if (arrival->counts)
        return;
    kvf_free(arrival->awaited);
    arrival->awaited = NULL;
}

/* ---- counting ------------------------------------------------------------------------------------- */

/* Counts only while all leases are good: until now the blocks were the request's, so what was read is. */
static uint32_t pulled(const kvf_arrival *arrival) {
    const kvf_pull *pull = kvf_pull_of(&arrival->asker->base);
    if (!kvf_carry_is_there(&pull->carry) || kvf_pull_expired(pull, kvf_agent_now(pull->base.agent)))
        return 0;
    return kvf_carry_layers(&pull->carry);
}

static uint32_t written(const kvf_arrival *arrival) {
    uint32_t layers = 0;
    if (!arrival->counts)
        return 0;
    while (layers < arrival->all && arrival->come[layers] >= arrival->awaited[layers])
        layers++;
    return layers;
}

static uint32_t count(const kvf_arrival *arrival) {
    const kvf_ticket *ticket = &arrival->asker->base;
    if (ticket->state != KVF_TICKET_MOVING || ticket->agent->options.verify || ticket->silent)
        return 0;
    return ticket->kind == KVF_REQUEST_PULL ? pulled(arrival) : written(arrival);
}

void kvf_arrivals_look(kvf_agent *agent) {
    kvf_arrival *arrival;
    DL_FOREACH(agent->arrivals, arrival) {
        uint32_t layers = count(arrival);
        layers = layers < arrival->all ? layers : arrival->all;
        if (layers <= arrival->layers)
            continue;
        arrival->layers = layers;
        if (arrival->word)
            kvf_cuda_word_set(arrival->word, layers);
    }
}

/* ---- what the engine calls ------------------------------------------------------------------------ */

/* The arrival of a request that has not ended. KVF_E_INVALID; KVF_E_NOT_FOUND: it has, or never was. */
static kvf_status find(const kvf_agent *agent, uint64_t number, kvf_arrival **out) {
    kvf_ticket *ticket = NULL;
    HASH_FIND(hh, agent->tickets, &number, sizeof number, ticket);
    if (!ticket)
        return kvf_fail(KVF_E_NOT_FOUND, "no request has ticket %llu", (unsigned long long)number);
    if (!ticket->ops->asks || !kvf_asker_of(ticket)->arrival)
        return kvf_fail(KVF_E_INVALID, "ticket %llu is no pull or expect with by_layer",
                        (unsigned long long)number);
    *out = kvf_asker_of(ticket)->arrival;
    if ((*out)->over)
        return kvf_fail(KVF_E_NOT_FOUND, "the request of ticket %llu has ended", (unsigned long long)number);
    return KVF_OK;
}

kvf_status kvf_agent_arrived(kvf_agent *agent, uint64_t ticket, uint32_t *layers) {
    kvf_arrival *arrival;
    if (!layers)
        return kvf_fail(KVF_E_INVALID, "layers is NULL");
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    status = find(agent, ticket, &arrival);
    if (!status)
        *layers = arrival->layers;
    kvf_agent_unlock(agent);
    return status;
}

/* The first stream that waits for a request takes a word for it. Its highest number is the request's end. */
static kvf_status take_word(kvf_arrival *arrival, uint32_t device) {
    if (arrival->word)
        return KVF_OK;
    kvf_status status = kvf_cuda_word_take(device, arrival->all + 1, &arrival->word);
    if (!status)
        kvf_cuda_word_set(arrival->word, arrival->layers);
    return status;
}

static kvf_status let_wait(kvf_arrival *arrival, uint32_t layers, uint32_t device, CUstream stream) {
    if (layers <= arrival->layers)
        return KVF_OK;
    kvf_status status = take_word(arrival, device);
    if (!status)
        status = kvf_cuda_word_await(arrival->word, device, stream,
                                     layers <= arrival->all ? layers : arrival->all + 1);
    return status ? kvf_fail_in(status, "let_wait: ") : KVF_OK;
}

kvf_status kvf_agent_let_wait(kvf_agent *agent, uint64_t ticket, uint32_t layers, uint32_t device,
                              void *stream) {
    kvf_arrival *arrival;
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    status = find(agent, ticket, &arrival);
    if (!status)
        status = let_wait(arrival, layers, device, stream);
    else if (status == KVF_E_NOT_FOUND && ticket > 0 && ticket <= agent->next_ticket)
        status = KVF_OK; /* it has ended */
    kvf_agent_unlock(agent);
    return status;
}
