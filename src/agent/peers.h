/*
 * What users see of peers: a list, and log lines when a peer comes, comes back, or is reached in another way.
 */
#ifndef KVF_AGENT_PEERS_H
#define KVF_AGENT_PEERS_H

#include "agent/session.h"

/** A session has become open, perhaps again. */
void kvf_peer_met(kvf_session *session);
/** A peer was heard; called before broken_since is reset. */
void kvf_peer_heard(kvf_session *session);
/** The transport is connected to a peer, or has moved bytes: logs the way, if it has changed. NULL, and sessions
 * without a connection, are accepted. */
void kvf_peer_served(kvf_session *session);
/** The level of a line about a rank that no connection can be made to: one of an engine is news. */
kvf_log_level kvf_peer_level_unreached(const kvf_session *session);
/** Logs to which peers the transport cannot connect yet, and why: each once for each connection. */
void kvf_peers_waiting(kvf_agent *agent);
/** Why the transport is not connected to a session's peer yet; NULL: it is, or need not be. */
const char *kvf_peer_waits_for(const kvf_session *session);
/** Whether the engine is told that a session is lost. Of those that others make, which may do so again and again, only a
 * number in a minute; counts it as told. */
bool kvf_peer_loss_is_news(const kvf_session *session);
/** A session is lost: remembers why. */
void kvf_peer_left(kvf_session *session, const char *detail);
/** Records a failure that involved a rank of an engine; KVF_NO_RANK: any of its ranks. */
void kvf_peers_failed(kvf_agent *agent, const char *engine, uint32_t rank, const char *detail);
/** Forgets the peers that were lost. */
void kvf_peers_forget(kvf_agent *agent);

#endif
