/*
 * Comparing what was received with checksums of who sent it.
 */
#ifndef KVF_AGENT_VERIFY_H
#define KVF_AGENT_VERIFY_H

#include "agent/ticket.h"

/** Checks what a pull or expect received; its verified() follows, or its failure. */
void kvf_verify_start(kvf_asker *ticket);
void kvf_verify_stop(kvf_asker *ticket);
/** Answers a peer that asks for checksums of ours, once they are taken. */
void kvf_verify_answer(kvf_session *session, const kvf_call_body *call);
/** A session ends: what it asked for is of no interest any more. */
void kvf_verify_forget(kvf_session *session);

#endif
