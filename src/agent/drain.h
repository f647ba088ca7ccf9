/*
 * Draining: an agent that takes nothing new, until all that it has under way has ended.
 *
 * Peers are refused elsewhere: what they ask for, and is neither held nor pushed, will not come (past.c), and what they
 * have waited for so far is answered by the sweeps (early.c, flow.c).
 */
#ifndef KVF_AGENT_DRAIN_H
#define KVF_AGENT_DRAIN_H

#include "agent/ticket.h"

/** Once a round, when tickets that are over have been freed: cancels what is late, and says when nothing is left. */
void kvf_drain_look(kvf_agent *agent, uint64_t now);

#endif
