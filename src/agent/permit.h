/*
 * Whether a peer may open a flow.
 */
#ifndef KVF_AGENT_PERMIT_H
#define KVF_AGENT_PERMIT_H

#include "agent/agent.h"

/**
 * Whether what a peer asks for is what one of its leases, or one of our expectations, permits now.
 *
 * @param peer  the name of its endpoint
 * @return KVF_OK, KVF_E_PERMISSION and what else kvf_check_groups() says
 */
kvf_status kvf_permit_flow(kvf_agent *agent, const char *peer, const kvf_flow_request *request);

#endif
