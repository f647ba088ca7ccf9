/*
 * Whether a peer may open a flow.
 */
#ifndef KVF_AGENT_PERMIT_H
#define KVF_AGENT_PERMIT_H

#include "agent/agent.h"

/**
 * Whether one of a peer's leases, or one of our expectations, now permits a flow that the peer asks for.
 *
 * @param peer  the name of its endpoint
 * @return KVF_OK, KVF_E_CANCELLED (the expectation has ended: the writer has not heard of it yet), KVF_E_PERMISSION and
 *         other errors of kvf_check_groups()
 */
kvf_status kvf_permit_flow(kvf_agent *agent, const char *peer, const kvf_flow_request *request);

#endif
