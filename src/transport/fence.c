/*
 * Shutting an endpoint out. It may be connected by any fabric that both sides have; only a fabric that has seen it
 * knows that it was used. One that then could not serve it says that it has not seen it, see kvf_fences_send_on().
 */
#include <stdio.h>

#include "transport/card.h"
#include "transport/front.h"

/* What the fabrics report about an endpoint. */
typedef struct verdict {
    bool inside;                /* it may be writing, ... */
    char why[KVF_DETAIL_BYTES]; /* ... as the fabric says */
    bool outside;               /* it was here, and writes no more */
    bool unable;                /* it may be here without being seen */
    uint64_t late_ns;           /* for how long what it has sent may then arrive */
} verdict;

static kvf_status ask(const kvf_front_fabric *front, const kvf_card_part *part, verdict *out) {
    if (!front->fabric->fence) {
        out->unable = true;
        return KVF_OK;
    }
    kvf_status status = front->fabric->fence(front->endpoint, part->data, part->bytes);
    if (status == KVF_E_AGAIN && !out->inside) {
        out->inside = true;
        (void)snprintf(out->why, sizeof out->why, "%s: %s", front->fabric->kind.name, kvf_error_detail());
    }
    out->outside = out->outside || status == KVF_OK;
    bool answered = status == KVF_E_AGAIN || status == KVF_E_NOT_FOUND;
    return answered ? KVF_OK : status;
}

static kvf_status lift(const kvf_front_fabric *front, const kvf_card_part *part, verdict *out) {
    (void)out;
    return front->fabric->admit ? front->fabric->admit(front->endpoint, part->data, part->bytes) : KVF_OK;
}

/* Calls `act` for every fabric that both sides have, or that the peer may have from before. */
static kvf_status
each_in_common(kvf_transport *transport, const void *data, size_t bytes, const char *what,
               kvf_status (*act)(const kvf_front_fabric *, const kvf_card_part *, verdict *), verdict *out) {
    if (!transport || !data)
        return kvf_fail(KVF_E_INVALID, "%s: %s is NULL", what, !transport ? "transport" : "card");
    kvf_card card = {0};
    kvf_status status = kvf_front_check_process(transport, what);
    if (!status)
        status = kvf_card_read(data, bytes, &card);
    for (uint32_t i = 0; i < transport->fabric_count && !status; i++) {
        const kvf_front_fabric *front = &transport->fabrics[i];
        const kvf_card_part *part = kvf_card_part_of(&card, front->fabric->kind.name);
        if (part && (!front->disabled || front->was_offered))
            status = act(front, part, out);
    }
    kvf_card_free(&card);
    return status ? kvf_fail_in(status, "%s: ", what) : KVF_OK;
}

kvf_status kvf_transport_fence(kvf_transport *transport, const void *card, size_t bytes) {
    verdict found = {0};
    kvf_status status = each_in_common(transport, card, bytes, "fence", ask, &found);
    if (status)
        return status;
    if (found.inside)
        return kvf_fail(KVF_E_AGAIN, "fence: %s", found.why);
    if (found.unable && !found.outside)
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "fence: the endpoint may be connected in a way that cannot be shut");
    return KVF_OK;
}

kvf_status kvf_transport_admit(kvf_transport *transport, const void *card, size_t bytes) {
    return each_in_common(transport, card, bytes, "admit", lift, &(verdict){0});
}

static kvf_status ask_late(const kvf_front_fabric *front, const kvf_card_part *part, verdict *out) {
    (void)part;
    if (front->fabric->late_ns)
        out->late_ns = kvf_max_u64(out->late_ns, front->fabric->late_ns(front->endpoint));
    return KVF_OK;
}

uint64_t kvf_transport_late_ns(kvf_transport *transport, const void *card, size_t bytes) {
    verdict found = {0};
    (void)each_in_common(transport, card, bytes, "late", ask_late, &found);
    return found.late_ns;
}

kvf_status kvf_transport_stop_endpoint(kvf_transport *transport, const void *card, size_t bytes,
                                       bool until_it_has) {
    kvf_status status = kvf_transport_fence(transport, card, bytes);
    if (status == KVF_E_NOMEM)
        status = KVF_E_AGAIN;
    if (status != KVF_E_AGAIN || !until_it_has)
        (void)kvf_transport_admit(transport, card, bytes);
    return status;
}
