/*
 * Heartbeats.
 */
#ifndef KVF_AGENT_BEAT_H
#define KVF_AGENT_BEAT_H

#include "agent/session.h"

void kvf_beat_tick(kvf_session *session, uint64_t now);
void kvf_beat_answer(kvf_session *session, const kvf_call_body *call);

#endif
