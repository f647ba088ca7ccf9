/*
 * What carries the bytes of a pull, or of one part of a push: a transfer, directly, or a move of the agent's stage, of
 * which each source goes directly or packed.
 */
#ifndef KVF_AGENT_CARRY_H
#define KVF_AGENT_CARRY_H

#include "agent/ticket.h"

/** At most one of them is there; neither before the start. */
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

/** The way that a ticket's bytes shall go: its own, or the agent's. */
kvf_way kvf_way_of(const kvf_ticket *ticket);

/** The same for what a plan says, which may be NULL: what it converts goes packed, whatever was asked for. */
kvf_way kvf_way_by(const kvf_ticket *ticket, const kvf_plan *plan);

/** KVF_E_UNSUPPORTED: packed is wanted of an engine whose groups, layers or parts have other numbers than ours. */
kvf_status kvf_way_unlike(const char *engine);

/** Whether what a plan moves between us and the peer of a session may go packed, where this way is wanted: a stage is
 * here, and where the way is chosen the peer is on another machine, or has memory that cannot be mapped, or cuts cells
 * otherwise than we do. The session's connection is made. */
bool kvf_way_uses_stage(kvf_session *session, kvf_way way, const kvf_plan *plan);

/**
 * Starts reading.
 *
 * @param sessions     of each source, by source index
 * @param permissions  likewise: the leases
 * @param held         it moves only what kvf_carry_advance() lets go, see kvf_pace_start()
 * @param alike        the numbers of groups, layers and parts are the same on both sides
 * @return KVF_OK; KVF_E_UNSUPPORTED (packed, and a side has no stage; direct, and the plan converts); what
 *         kvf_session_peer(), kvf_transfer_start() and kvf_stage_pull() say
 */
kvf_status kvf_carry_pull(kvf_carry *carry, kvf_ticket *ticket, const kvf_request *request,
                          kvf_session *const *sessions, const uint64_t *permissions, bool alike, bool held);

/** Starts writing what one source of a plan gives: us. Errors as of kvf_carry_pull(). */
kvf_status kvf_carry_push(kvf_carry *carry, kvf_ticket *ticket, kvf_way way, const kvf_request *request,
                          uint32_t source, kvf_session *session, uint64_t permission, bool held);

/** As kvf_transfer_status(); the detail of the thread is the sentence of a failure. */
kvf_status kvf_carry_status(const kvf_carry *carry);
kvf_carried kvf_carry_counts(const kvf_carry *carry);
/** What one source of it has moved packed. */
uint64_t kvf_carry_packed(const kvf_carry *carry, uint32_t source);
void kvf_carry_cancel(const kvf_carry *carry);
void kvf_carry_free(kvf_carry *carry);

/** As kvf_transfer_hold() and kvf_transfer_advance(). */
void kvf_carry_hold(const kvf_carry *carry, bool held);
uint64_t kvf_carry_advance(const kvf_carry *carry, uint64_t bytes);

#endif
