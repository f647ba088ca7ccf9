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

/** Checks groups against the model and the cache of a shard: numbers of groups, block ids, and, but for those that
 * grow, tables that reach. */
kvf_status kvf_check_groups(const kvf_shard *shard, const kvf_group_steps *groups, uint32_t count, bool grow);

/** Whether the table of a group reaches over those of its steps that lie in a part; the detail names the group. */
kvf_status kvf_check_reach(const kvf_shard *shard, uint32_t group, const kvf_group_steps *steps,
                           uint64_t begin, uint64_t end);

/**
 * The groups with more blocks, in one allocation, for kvf_free(); those that are known may be given again.
 *
 * @param tables  one for each group, checked by itself by kvf_check_tables()
 * @return KVF_OK, KVF_E_INVALID (an entry is another block now), KVF_E_RANGE (too many), KVF_E_NOMEM
 */
kvf_status kvf_steps_merge(const kvf_group_steps *groups, const kvf_block_table *tables, uint32_t count,
                           kvf_group_steps **out);

/** Checks tables that bring more blocks to groups, one for each: ids, and that they lie within the steps. */
kvf_status kvf_check_tables(const kvf_shard *shard, const kvf_group_steps *groups,
                            const kvf_block_table *tables, uint32_t count);

#endif
