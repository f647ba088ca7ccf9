/*
 * What users see of peers: a list of them, and lines of the log on who came, by which way they are reached, and who
 * came back.
 */
#ifndef KVF_AGENT_PEERS_H
#define KVF_AGENT_PEERS_H

#include "agent/session.h"

/** A session has become open, perhaps again. */
void kvf_peer_met(kvf_session *session);
/** Something was heard of a peer; called before broken_since is taken back. */
void kvf_peer_heard(kvf_session *session);
/** The transport is connected to a peer, or has moved something: logs by which way, where that is news. NULL, and
 * sessions without a connection, are accepted. */
void kvf_peer_served(kvf_session *session);
/** A session is lost: what it failed of is remembered. */
void kvf_peer_left(kvf_session *session, const char *detail);
/** Something has failed that a rank of an engine, or with KVF_NO_RANK any of them, had to do with. */
void kvf_peers_failed(kvf_agent *agent, const char *engine, uint32_t rank, const char *detail);
/** Forgets those that were lost. */
void kvf_peers_forget(kvf_agent *agent);

#endif
