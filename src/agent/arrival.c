#include "agent/arrival.h"

#include "cuda/word.h"
#include "model/model.h"

#define LATE_NS KVF_SECOND /* after the deadline */

/* ---- life -------------------------------------------------------------------------------------- */

kvf_status kvf_arrival_begin(kvf_asker *asker, const kvf_agent_request *request) {
    kvf_agent *agent = asker->base.agent;
    if (!request->by_layer)
        return request->layer_events ? kvf_fail(KVF_E_INVALID, "layer_events is set, and by_layer is not")
                                     : KVF_OK;
    kvf_arrival *arrival = kvf_alloc0(1, sizeof *arrival);
    if (!arrival)
        return kvf_nomem("a request");
    arrival->all = kvf_model_layer_count(kvf_engine_model(agent->engine));
    arrival->over = agent->stopping;
    arrival->tells = request->layer_events;
    arrival->asker = asker;
    asker->arrival = arrival;
    DL_APPEND(agent->arrivals, arrival);
    return KVF_OK;
}

bool kvf_arrival_end(kvf_asker *asker) {
    kvf_arrival *arrival = asker->arrival;
    if (!arrival)
        return true;
    arrival->over = true;
    if (!kvf_cuda_word_give(arrival->word))
        arrival->late = true;
    arrival->word = NULL;
    return !arrival->late;
}

void kvf_arrivals_end(kvf_agent *agent) {
    kvf_arrival *arrival;
    DL_FOREACH(agent->arrivals, arrival) {
        (void)kvf_arrival_end(arrival->asker);
    }
}

void kvf_arrivals_close(kvf_agent *agent) {
    if (agent->guarded)
        kvf_cuda_guard_stop();
    agent->guarded = false;
}

void kvf_arrival_free(kvf_asker *asker) {
    kvf_arrival *arrival = asker->arrival;
    if (!arrival)
        return;
    KVF_ASSERT(!arrival->counts);
    (void)kvf_arrival_end(asker);
    DL_DELETE(asker->base.agent->arrivals, arrival);
    kvf_event_stay(arrival->event);
    kvf_free(arrival->come);
    kvf_free(arrival->awaited);
    kvf_free(arrival);
    asker->arrival = NULL;
}

/* ---- counting ------------------------------------------------------------------------------------- */

static uint32_t count(const kvf_arrival *arrival) {
    const kvf_ticket *ticket = &arrival->asker->base;
    if (ticket->state != KVF_TICKET_MOVING || ticket->agent->options.verify || ticket->silent)
        return 0;
    return ticket->ops->arrived ? ticket->ops->arrived(ticket) : 0;
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
        if (arrival->tells)
            kvf_event_layers(&arrival->asker->base, layers, &arrival->event);
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

static kvf_status start_guard(kvf_agent *agent) {
    kvf_status status = agent->guarded ? KVF_OK : kvf_cuda_guard_start();
    agent->guarded = !status;
    return status;
}

/* The first stream that waits for a request takes a word for it. Its highest number is the request's end. The agent
 * itself lets streams go at the deadline, if it can; no stream waits for a word that the guard does not look at. */
static kvf_status take_word(kvf_arrival *arrival) {
    if (arrival->word)
        return KVF_OK;
    kvf_cuda_word *word = NULL;
    const kvf_ticket *ticket = &arrival->asker->base;
    const uint64_t now = kvf_agent_now(ticket->agent);
    const uint64_t left = ticket->deadline > now ? ticket->deadline - now : 0;
    kvf_status status = kvf_cuda_word_take(arrival->all + 1, kvf_add_or_most(left, LATE_NS), &word);
    if (!status)
        status = start_guard(ticket->agent);
    if (status) {
        (void)kvf_cuda_word_give(word);
        return status;
    }
    kvf_cuda_word_set(word, arrival->layers);
    arrival->word = word;
    return KVF_OK;
}

static kvf_status mark_of_arrival(kvf_arrival *arrival, uint32_t layers, kvf_cuda_mark *out) {
    if (layers <= arrival->layers)
        return KVF_OK;
    kvf_status status = take_word(arrival);
    if (!status)
        *out = kvf_cuda_word_mark(arrival->word, layers <= arrival->all ? layers : arrival->all + 1);
    return status;
}

/* Gives the mark that a stream is to wait for; `shown` is NULL if these layers are there. KVF_E_AGAIN: no word is left. */
static kvf_status mark_of(kvf_agent *agent, uint64_t ticket, uint32_t layers, kvf_cuda_mark *out) {
    kvf_arrival *arrival;
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    *out = (kvf_cuda_mark){0};
    status = find(agent, ticket, &arrival);
    if (!status)
        status = mark_of_arrival(arrival, layers, out);
    else if (status == KVF_E_NOT_FOUND && ticket > 0 && ticket <= agent->next_ticket)
        status = KVF_OK; /* it has ended */
    kvf_agent_unlock(agent);
    return status;
}

/* The driver may make this thread wait for streams that wait for the agent, so it is called without the agent's lock. */
kvf_status kvf_agent_let_wait(kvf_agent *agent, uint64_t ticket, uint32_t layers, uint32_t device,
                              void *stream) {
    kvf_cuda_mark mark;
    kvf_status status = mark_of(agent, ticket, layers, &mark);
    while (status == KVF_E_AGAIN) {
        status = kvf_cuda_words_add(device);
        if (!status)
            status = mark_of(agent, ticket, layers, &mark);
    }
    if (!status && mark.shown)
        status = kvf_cuda_mark_await(&mark, device, stream);
    return status ? kvf_fail_in(status, "let_wait: ") : KVF_OK;
}
