/*
 * Receives the messages of peers from the link.
 */
#ifndef KVF_AGENT_HEAR_H
#define KVF_AGENT_HEAR_H

#include "agent/session.h"

/** Whether a session's messages take a route; `context` is the agent. */
bool kvf_session_has_route(void *context, kvf_route route);

/** Takes a message of the link; `context` is the agent. */
void kvf_on_message(void *context, const kvf_letter *letter);

/** Takes note that a connection broke, or could not be made; `context` is the agent. */
void kvf_on_broken(void *context, kvf_route route, kvf_status status, const char *detail);

#endif
