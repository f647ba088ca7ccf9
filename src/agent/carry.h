/*
 * Moving the bytes of a pull, or of one part of a push: directly by a transfer, or by a move of the agent's stage, in
 * which each source goes directly or packed.
 */
#ifndef KVF_AGENT_CARRY_H
#define KVF_AGENT_CARRY_H

#include "agent/ticket.h"

/** At most one of them is set; neither before the start. */
typedef struct kvf_carry {
    kvf_transfer *transfer;
    kvf_move *move;
} kvf_carry;

/** How much has moved. */
typedef struct kvf_carried {
    uint64_t bytes;
    uint64_t packed; /* of these bytes */
    uint64_t runs;   /* operations */
} kvf_carried;

static inline bool kvf_carry_is_there(const kvf_carry *carry) {
    return carry->transfer || carry->move;
}

/** The way that a ticket's bytes take: the ticket's, or else the agent's. */
kvf_way kvf_way_of(const kvf_ticket *ticket);

/** The same under a plan, which may be NULL: a plan that converts goes packed, whatever was requested. */
kvf_way kvf_way_by(const kvf_ticket *ticket, const kvf_plan *plan);

/** KVF_E_UNSUPPORTED: the request is for packed, but the engine numbers its groups, layers or parts otherwise. */
kvf_status kvf_way_unlike(const char *engine);

/** Whether a plan's bytes between us and the peer of a session may go packed, if this way is requested: we have a
 * stage; and if the way is ours to choose, the network to the peer takes only single runs, or the peer has memory that
 * is withheld or cannot be mapped, or it divides cells otherwise than we do. May make the session's connection. */
bool kvf_way_uses_stage(kvf_session *session, kvf_way way, const kvf_plan *plan);

/** Whether a peer that is to write to us must know our stage: it may use its own, or be able to do nothing else. */
bool kvf_way_joins_stage(kvf_session *session, kvf_way way, const kvf_plan *plan);

/**
 * Starts reading.
 *
 * @param sessions     of each source, by source index
 * @param permissions  the leases, by source index
 * @param held         only bytes that kvf_carry_advance() allows are moved, see kvf_pace_start()
 * @param alike        groups, layers and parts have the same numbers on both sides
 * @return KVF_OK; KVF_E_UNSUPPORTED (packed, and a side has no stage; direct, and the plan converts); errors of
 *         kvf_session_peer(), kvf_transfer_start() and kvf_stage_pull()
 */
kvf_status kvf_carry_pull(kvf_carry *carry, kvf_ticket *ticket, const kvf_request *request,
                          kvf_session *const *sessions, const uint64_t *permissions, bool alike, bool held);

/** Starts writing the cells of one source of a plan: ours. Errors as of kvf_carry_pull(). */
kvf_status kvf_carry_push(kvf_carry *carry, kvf_ticket *ticket, kvf_way way, const kvf_request *request,
                          uint32_t source, kvf_session *session, uint64_t permission, bool held);

/** As kvf_transfer_status(); the thread's error detail says why it failed. */
kvf_status kvf_carry_status(const kvf_carry *carry);
kvf_carried kvf_carry_counts(const kvf_carry *carry);
/** The bytes of one source that have moved packed. */
uint64_t kvf_carry_packed(const kvf_carry *carry, uint32_t source);
/** Whether its connection ended under it: then what it wrote last may still arrive. */
bool kvf_carry_was_cut(const kvf_carry *carry);
/** How many of the first model layers of a pull are here; 0 unless its ticket counts them. */
uint32_t kvf_carry_layers(const kvf_carry *carry);
void kvf_carry_cancel(const kvf_carry *carry);
void kvf_carry_free(kvf_carry *carry);

/** As kvf_transfer_hold() and kvf_transfer_advance(). */
void kvf_carry_hold(const kvf_carry *carry, bool held);
uint64_t kvf_carry_advance(const kvf_carry *carry, uint64_t bytes);

#endif
