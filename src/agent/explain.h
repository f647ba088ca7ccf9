/*
 * Which ranks read what from which ranks, for the log.
 */
#ifndef KVF_AGENT_EXPLAIN_H
#define KVF_AGENT_EXPLAIN_H

#include "agent/remote.h"

/** Logs which ranks read what from which ranks of a remote engine that was met. */
void kvf_explain_meeting(const kvf_remote *remote);

#endif
