/*
 * Holds and pushes that have ended: their ids, when they ended and how.
 *
 * The table is in the order in which they ended, so the oldest is at its front.
 */
#include "agent/past.h"

/* Peers cannot add entries: only our own engine holds and pushes. */
#define MOST 16384u

struct kvf_past {
    uint64_t ended;
    kvf_status status;
    UT_hash_handle hh; /* agent->past, by id */
    size_t id_bytes;
    unsigned char id[];
};

static void drop(kvf_agent *agent, kvf_past *past) {
    HASH_DEL(agent->past, past);
    kvf_free(past);
}

static kvf_past *find(const kvf_agent *agent, kvf_bytes id) {
    kvf_past *past = NULL;
    HASH_FIND(hh, agent->past, id.data, id.size, past);
    return past;
}

static void drop_old(kvf_agent *agent) {
    uint64_t now = kvf_agent_now(agent);
    while (agent->past &&
           (now - agent->past->ended >= agent->options.remember_ns || HASH_COUNT(agent->past) > MOST))
        drop(agent, agent->past);
}

void kvf_past_note(kvf_agent *agent, kvf_bytes id, kvf_status status) {
    kvf_past_forget(agent, id);
    kvf_past *past = kvf_alloc0(1, sizeof *past + id.size);
    if (!past)
        return; /* peers that ask for it will wait */
    past->ended = kvf_agent_now(agent);
    past->status = status;
    past->id_bytes = id.size;
    memcpy(past->id, id.data, id.size);
    HASH_ADD_KEYPTR(hh, agent->past, past->id, past->id_bytes, past);
    if (!past->hh.tbl)
        kvf_free(past);
    drop_old(agent);
}

kvf_status kvf_past_look(kvf_agent *agent, kvf_bytes id) {
    drop_old(agent);
    const kvf_past *past = find(agent, id);
    if (!past)
        return agent->drains ? kvf_fail(KVF_E_NOT_FOUND, KVF_PAST_DRAINS) : KVF_OK;
    double seconds = (double)(kvf_agent_now(agent) - past->ended) / 1e9;
    if (past->status)
        return kvf_fail(KVF_E_NOT_FOUND, "the request is not kept any more: it ended %.1f s ago with %s",
                        seconds, kvf_status_name(past->status));
    return kvf_fail(KVF_E_EXISTS, "the request was handed over %.1f s ago, and is not kept any more",
                    seconds);
}

kvf_status kvf_past_repeated(kvf_agent *agent, kvf_bytes id) {
    kvf_status status = kvf_past_look(agent, id);
    return status ? status : kvf_fail(KVF_E_NOT_FOUND, "this call was refused before, or is over");
}

void kvf_past_forget(kvf_agent *agent, kvf_bytes id) {
    kvf_past *past = find(agent, id);
    if (past)
        drop(agent, past);
}

void kvf_past_free(kvf_agent *agent) {
    while (agent->past)
        drop(agent, agent->past);
}
