/*
 * Many clients of one agent, and the processor time that it takes where there are few of them, and where there are many.
 * For one thread.
 */
#ifndef KVF_TEST_AGENT_CROWD_H
#define KVF_TEST_AGENT_CROWD_H

#include "agent/agent.h"

/** The agent hears a message of a client of the crowd: all have one key, and come by one connection. */
void crowd_says(kvf_agent *agent, const kvf_message *message);
/** Opens a session of an engine of its own. */
void crowd_greets(kvf_agent *agent, uint32_t number);

/** The processor time of this thread. */
uint64_t crowd_time(void);

/** Requires that a time does not grow with the sessions: where there are `many`, it is at most `times` as long as where
 * there are `few`, and `ns` more. The shortest of three counts. */
void crowd_compare(uint64_t (*time_with)(uint32_t sessions), uint32_t few, uint32_t many, uint32_t times,
                   uint64_t ns);

#endif
