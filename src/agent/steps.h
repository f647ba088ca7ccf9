/*
 * Groups of a request: copied, checked, and which of their blocks are needed.
 */
#ifndef KVF_AGENT_STEPS_H
#define KVF_AGENT_STEPS_H

#include "agent/agent.h"

/** A copy of groups and their block ids in one allocation, for kvf_free(). */
kvf_group_steps *kvf_steps_copy(const kvf_group_steps *groups, uint32_t count);

/** Whether nothing is in any of them. */
bool kvf_steps_empty(const kvf_group_steps *groups, uint32_t count);

/** Which entries of a table are wanted: those of the steps that remain after clipping to the window. */
kvf_range kvf_wanted_entries(const kvf_shard *shard, uint32_t group, const kvf_group_steps *steps);

/** Checks groups against the model and the cache of a shard: numbers of groups, block ids, tables that reach.
 */
kvf_status kvf_check_groups(const kvf_shard *shard, const kvf_group_steps *groups, uint32_t count);

#endif
