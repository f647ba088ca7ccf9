/*
 * Block tables that arrive in several messages.
 */
#ifndef KVF_AGENT_PARTS_H
#define KVF_AGENT_PARTS_H

#include "agent/agent.h"

typedef struct kvf_part kvf_part;

/** The parts that have arrived; zeroed at first. */
typedef struct kvf_parts {
    kvf_part *parts;
    uint32_t group_count;
    uint32_t ids; /* arrived so far: the next part begins with this one */
} kvf_parts;

/**
 * Adds a copy of the next part.
 *
 * @param more  other parts follow
 * @return KVF_OK; KVF_E_RANGE (the part does not begin where the last one ended, has no ids though others follow, or
 *         exceeds KVF_WIRE_MAX_TABLE_IDS in total); KVF_E_MISMATCH (other groups or steps); KVF_E_NOMEM
 */
kvf_status kvf_parts_add(kvf_parts *parts, const kvf_group_steps *groups, uint32_t count, uint32_t first_id,
                         bool more);

/** Joins all parts into one, for kvf_free(), and frees them. NULL: no memory. */
kvf_group_steps *kvf_parts_join(kvf_parts *parts);

void kvf_parts_free(kvf_parts *parts);

#endif
