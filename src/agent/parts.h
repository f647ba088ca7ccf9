/*
 * Block tables that come in as many messages as they need.
 */
#ifndef KVF_AGENT_PARTS_H
#define KVF_AGENT_PARTS_H

#include "agent/agent.h"

typedef struct kvf_part kvf_part;

/** What came so far; zeroed at first. */
typedef struct kvf_parts {
    kvf_part *parts;
    uint32_t group_count;
    uint32_t ids; /* came so far: the next part begins with this one */
} kvf_parts;

/**
 * Takes the next part, copied.
 *
 * @param more  others follow it
 * @return KVF_OK; KVF_E_RANGE (it does not go on where the one before it ended, has no ids though others follow, or there
 *         are more than KVF_WIRE_MAX_TABLE_IDS); KVF_E_MISMATCH (of other groups or steps); KVF_E_NOMEM
 */
kvf_status kvf_parts_add(kvf_parts *parts, const kvf_group_steps *groups, uint32_t count, uint32_t first_id,
                         bool more);

/** All of them as one, for kvf_free(); the parts are gone then. NULL: no memory. */
kvf_group_steps *kvf_parts_join(kvf_parts *parts);

void kvf_parts_free(kvf_parts *parts);

#endif
