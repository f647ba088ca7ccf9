/*
 * Priorities and caps of pulls and pushes: which moves first, and how fast.
 */
#ifndef KVF_AGENT_PACE_H
#define KVF_AGENT_PACE_H

#include "agent/ticket.h"

/** Whether a transfer of this ticket must start held, so that kvf_pace_round() lets it move. */
bool kvf_pace_start(kvf_ticket *ticket);
/** Lets each transfer move as many bytes as it may by now. Called once a round. */
void kvf_pace_round(kvf_agent *agent, uint64_t now);

#endif
