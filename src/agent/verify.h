/*
 * Comparing received cells with their senders' checksums.
 */
#ifndef KVF_AGENT_VERIFY_H
#define KVF_AGENT_VERIFY_H

#include "agent/ticket.h"

/** Checks the cells that a pull or expect received; its verified() follows, or its failure. */
void kvf_verify_start(kvf_asker *ticket);
void kvf_verify_stop(kvf_asker *ticket);
/** Answers a peer that asks for checksums of our cells, once they are computed. */
void kvf_verify_answer(kvf_session *session, const kvf_call_body *call);
/** A session ends: drops the checksums that it asked for. */
void kvf_verify_forget(kvf_session *session);

#endif
