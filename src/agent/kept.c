/*
 * Listing what an agent keeps for other engines: its holds and pushes.
 */
#include "agent/hold.h"
#include "agent/push.h"
#include "model/model.h"

static uint64_t time_left(uint64_t until, uint64_t now) {
    if (until == UINT64_MAX)
        return UINT64_MAX;
    return until > now ? until - now : 0;
}

static void describe_hold(const kvf_hold *hold, uint64_t now, kvf_kept_request *out) {
    uint64_t until = hold->lease_until;
    const kvf_reader *reader;
    DL_FOREACH(hold->readers, reader) {
        until = kvf_max_u64(until, reader->until);
    }
    out->moves = hold->readers != NULL;
    out->consumers = hold->tally.wanted;
    out->served = hold->tally.done;
    out->left_ns = time_left(until, now);
}

static void describe_push(const kvf_push *push, uint64_t now, kvf_kept_request *out) {
    out->moves = push->flows != NULL;
    out->consumers = push->tally.wanted;
    out->served = push->tally.done;
    out->left_ns = time_left(push->base.deadline, now);
}

/* Whether it is kept, and has not begun to end. */
static bool is_kept(const kvf_ticket *ticket) {
    if (ticket->kind == KVF_REQUEST_HOLD)
        return ticket->state == KVF_TICKET_HELD || ticket->state == KVF_TICKET_WAITING;
    return ticket->kind == KVF_REQUEST_PUSH && ticket->state == KVF_TICKET_MOVING;
}

static kvf_kept_request describe(const kvf_ticket *ticket, uint64_t now) {
    kvf_kept_request out = {.ticket = ticket->number,
                            .request_kind = ticket->kind,
                            .age_ns = now - ticket->created,
                            .id_bytes = (uint32_t)ticket->id_bytes};
    const kvf_model *model = kvf_engine_model(ticket->agent->engine);
    for (uint32_t g = 0; g < ticket->group_count; g++)
        out.tokens =
            kvf_max_u64(out.tokens, kvf_group_token_count(kvf_model_group(model, g), ticket->groups[g].end));
    memcpy(out.id, ticket->id, ticket->id_bytes);
    if (ticket->kind == KVF_REQUEST_HOLD)
        describe_hold((const kvf_hold *)ticket, now, &out);
    else
        describe_push((const kvf_push *)ticket, now, &out);
    return out;
}

kvf_status kvf_agent_kept_requests(kvf_agent *agent, uint64_t after, kvf_kept_request *kept,
                                   uint32_t capacity, uint32_t *count) {
    kvf_status status = count ? KVF_OK : kvf_fail(KVF_E_INVALID, "count is NULL");
    if (!status && capacity > 0)
        status = kvf_check_out(kept, "kvf_kept_request");
    if (!status)
        status = kvf_agent_lock(agent);
    if (status)
        return status;
    const uint64_t now = kvf_agent_now(agent);
    uint32_t found = 0;
    const kvf_ticket *ticket, *next;
    HASH_ITER(hh, agent->tickets, ticket, next) { /* in the order in which they were made */
        if (!is_kept(ticket) || ticket->number <= after)
            continue;
        if (found < capacity) {
            const kvf_kept_request one = describe(ticket, now);
            kvf_fill_element(kept, found, &one, sizeof one);
        }
        found++;
    }
    kvf_agent_unlock(agent);
    *count = found;
    return KVF_OK;
}
