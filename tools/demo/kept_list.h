/*
 * What an agent keeps for other engines, as the reply to KVF_COMMAND_LIST.
 */
#ifndef KVFERRY_DEMO_KEPT_LIST_H
#define KVFERRY_DEMO_KEPT_LIST_H

#include <kvferry/agent.h>

/**
 * Makes the record of the reply.
 *
 * @param names  only requests whose ids begin with it are listed and counted; size 0: all
 * @param out    its data is owned by the caller, see kept_list_free()
 * @return KVF_OK, KVF_E_NOMEM, or as kvf_agent_kept_requests()
 */
kvf_status kept_list_make(kvf_agent *agent, kvf_request_id names, kvf_record *out);

/** Frees the data of a record that kept_list_make() has made, or tried to make. */
void kept_list_free(kvf_record *record);

#endif
