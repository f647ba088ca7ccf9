/*
 * Commands of operators' programs, which need no session. The agent carries none out: it hands each to its engine,
 * once, and keeps the engine's reply for repetitions.
 *
 *   COMMAND id, "drain"  ->
 *                        <-  REPLY id, KVF_E_AGAIN     the engine has it
 *   COMMAND id, "drain"  ->                            repeated: nothing is done a second time
 *                        <-  REPLY id, KVF_OK          when the engine has replied, and to each repetition after that
 */
#ifndef KVF_AGENT_COMMAND_H
#define KVF_AGENT_COMMAND_H

#include "agent/agent.h"

/** Takes a COMMAND, or a repetition of one, and answers it. */
void kvf_command_take(kvf_agent *agent, const kvf_letter *letter, const kvf_command_body *body);

/** Replies to commands whose time is over, and forgets old ones. */
void kvf_commands_tick(kvf_agent *agent, uint64_t now);

void kvf_commands_free(kvf_agent *agent);

#endif
