/*
 * Who reads what from whom, for the log.
 */
#ifndef KVF_AGENT_EXPLAIN_H
#define KVF_AGENT_EXPLAIN_H

#include "agent/remote.h"

/** A remote engine was met: logs who reads what from whom. */
void kvf_explain_meeting(const kvf_remote *remote);

#endif
