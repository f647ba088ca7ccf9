/*
 * The stage of an agent: opened beside its memory, joined and used by the peers of its sessions.
 */
#ifndef KVF_AGENT_STAGE_H
#define KVF_AGENT_STAGE_H

#include "agent/session.h"

/** The name of an endpoint: engine, rank and incarnation, so that a notification names the process that sent it. */
#define KVF_ENDPOINT_NAME_BYTES 256u
void kvf_endpoint_name(char out[KVF_ENDPOINT_NAME_BYTES], const char *engine, uint32_t rank,
                       uint64_t incarnation);

/** Whether the options for a stage are those of one, if one is wanted: KVF_OK or KVF_E_INVALID. */
kvf_status kvf_agent_check_stage(kvf_agent *agent);

/** Opens the stage if one is wanted, all regions are registered, and the host can copy them. */
kvf_status kvf_agent_open_stage(kvf_agent *agent);

/** Takes a notification of a peer; called outside of the lock. */
void kvf_agent_notified(void *context, kvf_transport *transport, const char *sender, const void *data,
                        size_t bytes);

#endif
