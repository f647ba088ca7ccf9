/*
 * Answering a HELLO.
 */
#ifndef KVF_AGENT_GREET_H
#define KVF_AGENT_GREET_H

#include "agent/session.h"

/** Answers a HELLO, whose body is not read yet, with WELCOME or REFUSED. */
void kvf_greeted(kvf_agent *agent, const kvf_letter *letter, kvf_message *message);

#endif
