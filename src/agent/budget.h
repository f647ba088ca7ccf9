/*
 * Budgets: how much peers can make this agent keep, and for how long.
 *
 * What is kept for a session is counted for the *party* that opened it: all who hold one key; without keys, one
 * connection. A party has its share, so that what one takes is left to others.
 */
#ifndef KVF_AGENT_BUDGET_H
#define KVF_AGENT_BUDGET_H

#include "agent/session.h"

/** Finds or makes the party of a sender, and counts a session more. KVF_E_AGAIN: it has all it may, or KVF_E_NOMEM. */
kvf_status kvf_party_join(kvf_session *session, const kvf_letter *letter);
void kvf_party_leave(kvf_session *session);

/**
 * Counts bytes that are to be kept for an incoming session.
 *
 * @return KVF_OK; KVF_E_AGAIN where its party, or all together, have as much as they may: the detail says whose budget
 */
kvf_status kvf_budget_take(kvf_session *session, uint64_t bytes);
/** Whether all together have less than they may: what is kept of a peer beyond its session, as who is done with a
 * request, counts for all. KVF_E_LIMIT. */
kvf_status kvf_budget_look(const kvf_session *session);
void kvf_budget_give(kvf_session *session, uint64_t bytes);

/** When what a peer asked for ends at the latest, if it asks for it now. */
uint64_t kvf_budget_latest(const kvf_agent *agent, uint64_t now);

/** When a peer that says nothing more counts as gone: what it waits for is given up then. */
uint64_t kvf_budget_silent_at(const kvf_session *session);

/** Takes note that a connection was closed, for there were too many; `context` is the agent. */
void kvf_budget_crowded(void *context, const char *detail);

/** Makes room where there are as many sessions as may be: one that has nothing under way goes. */
void kvf_budget_make_room(kvf_agent *agent);

#endif
