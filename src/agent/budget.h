/*
 * Budgets: limits on what this agent keeps for peers, and for how long.
 *
 * Bytes kept for a session count for the *party* that opened it: all holders of one key; without keys, one connection.
 * Each party has a share, so that one party cannot use up the memory of the others.
 */
#ifndef KVF_AGENT_BUDGET_H
#define KVF_AGENT_BUDGET_H

#include "agent/session.h"

/** Finds or makes the party of a sender, and counts one session more. KVF_E_AGAIN: the party has as many as it may;
 * KVF_E_NOMEM. */
kvf_status kvf_party_join(kvf_session *session, const kvf_letter *letter);
void kvf_party_leave(kvf_session *session);

/**
 * Counts bytes that are to be kept for an incoming session.
 *
 * @return KVF_OK; KVF_E_AGAIN if its party, or all parties together, have as much as they may: the detail says whose
 *         budget
 */
kvf_status kvf_budget_take(kvf_session *session, uint64_t bytes);
/** Whether all parties together have less than they may: what outlives a session, such as which ranks are done with a
 * request, counts for all. KVF_E_LIMIT if not. */
kvf_status kvf_budget_look(const kvf_session *session);
void kvf_budget_give(kvf_session *session, uint64_t bytes);

/** The latest end of a request that a peer makes now. */
uint64_t kvf_budget_latest(const kvf_agent *agent, uint64_t now);

/** When a peer that sends nothing more counts as gone, and its requests are given up. */
uint64_t kvf_budget_silent_at(const kvf_session *session);

/** Takes note that a connection was closed because there were too many; `context` is the agent. */
void kvf_budget_crowded(void *context, const char *detail);

/** If there are as many sessions as allowed, removes one that has nothing under way. */
void kvf_budget_make_room(kvf_agent *agent);

#endif
