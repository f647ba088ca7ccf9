/*
 * A network within this process and a clock that a test moves: links by which agents talk without sockets, with time
 * that passes only when no agent has anything to do. For one thread.
 */
#ifndef KVF_TEST_AGENT_NET_H
#define KVF_TEST_AGENT_NET_H

#include "agent/agent.h"

/** The latency of a message. */
#define NET_LATENCY_NS 20000u

extern const kvf_surroundings net_surroundings;

uint64_t net_now(void);
void net_advance(uint64_t ns);
/** The address that connections come from, from now on. The text must stay valid. */
void net_dial_from(const char *address);
/** Resets everything. No link may be open. */
void net_reset(void);

#endif
