/*
 * Holds and pushes that ended a while ago: a peer that asks for one is answered at once, and does not wait for a
 * request that will not come.
 */
#ifndef KVF_AGENT_PAST_H
#define KVF_AGENT_PAST_H

#include "agent/agent.h"

/** Why a request will not come where it is neither held nor pushed. */
#define KVF_PAST_DRAINS "the engine drains: it takes no new requests"

/** Remembers that a request has ended, and its status. If there are many, the oldest is forgotten. */
void kvf_past_note(kvf_agent *agent, kvf_bytes id, kvf_status status);

/**
 * Whether a request may still come, as far as this agent knows.
 *
 * @return KVF_OK; KVF_E_EXISTS (all its consumers have it); KVF_E_NOT_FOUND (it ended otherwise, or the agent drains).
 *         The detail says how long ago
 */
kvf_status kvf_past_look(kvf_agent *agent, kvf_bytes id);

/**
 * Why a repeated call is refused of which no trace is left: it was refused, or what it asked for is over. Its caller did
 * not get the answer, and must not wait for another.
 *
 * @return KVF_E_EXISTS or KVF_E_NOT_FOUND
 */
kvf_status kvf_past_repeated(kvf_agent *agent, kvf_bytes id);

/** The id is used again. */
void kvf_past_forget(kvf_agent *agent, kvf_bytes id);
void kvf_past_free(kvf_agent *agent);

#endif
