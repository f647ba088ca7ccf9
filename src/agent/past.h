/*
 * What was held or pushed here and is no more, for a while: who asks for it is answered at once, and does not wait
 * for a request that will not come.
 */
#ifndef KVF_AGENT_PAST_H
#define KVF_AGENT_PAST_H

#include "agent/agent.h"

/** Remembers that a request has ended, with what it ended. The oldest is forgotten where there are many. */
void kvf_past_note(kvf_agent *agent, kvf_bytes id, kvf_status status);

/**
 * Whether a request is still to come, as far as anybody here knows.
 *
 * @return KVF_OK; KVF_E_EXISTS (all who were to have it have it); KVF_E_NOT_FOUND (it ended otherwise). The detail says
 *         how long ago
 */
kvf_status kvf_past_look(kvf_agent *agent, kvf_bytes id);

/** The id is used again. */
void kvf_past_forget(kvf_agent *agent, kvf_bytes id);
void kvf_past_free(kvf_agent *agent);

#endif
