/*
 * A network within this process and a clock that a test moves: links by which agents talk without a socket,
 * in a time that passes only when nobody has anything to do. One thread.
 */
#ifndef KVF_TEST_AGENT_NET_H
#define KVF_TEST_AGENT_NET_H

#include "agent/agent.h"

/** How long a message is under way. */
#define NET_LATENCY_NS 20000u

extern const kvf_surroundings net_surroundings;

uint64_t net_now(void);
void net_advance(uint64_t ns);
/** The address that connections come from, from now on: a text that lasts. */
void net_dial_from(const char *address);
/** As at the beginning. No link may be open. */
void net_reset(void);

#endif
