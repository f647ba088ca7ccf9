/*
 * Which of what moves goes first, and how fast: priorities and caps of pulls and pushes.
 */
#ifndef KVF_AGENT_PACE_H
#define KVF_AGENT_PACE_H

#include "agent/ticket.h"

/** A transfer of this ticket is about to start: whether it is to be held, for kvf_pace_round() to let it go. */
bool kvf_pace_start(kvf_ticket *ticket);
/** Lets everything move as far as it may by now. Once a round. */
void kvf_pace_round(kvf_agent *agent, uint64_t now);

#endif
