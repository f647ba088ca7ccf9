/*
 * Comparing what was received with checksums of who sent it.
 */
#ifndef KVF_AGENT_VERIFY_H
#define KVF_AGENT_VERIFY_H

#include "agent/ticket.h"

/** Checks what a pull or expect received; its verified() follows, or its failure. */
void kvf_verify_start(kvf_asker *ticket);
void kvf_verify_stop(kvf_asker *ticket);
void kvf_verify_answer(kvf_session *session, const kvf_call_body *call);

#endif
