/*
 * Groups of a request: copying them, checking them, and finding which of their blocks are needed.
 */
#ifndef KVF_AGENT_STEPS_H
#define KVF_AGENT_STEPS_H

#include "agent/agent.h"

/** A copy of groups and their block ids in one allocation, for kvf_free(). */
kvf_group_steps *kvf_steps_copy(const kvf_group_steps *groups, uint32_t count);

/** Whether all groups are empty. */
bool kvf_steps_empty(const kvf_group_steps *groups, uint32_t count);

/** The entries of a table that are needed: those of the steps that remain after clipping to the window. */
kvf_range kvf_wanted_entries(const kvf_shard *shard, uint32_t group, const kvf_group_steps *steps);

/** Checks groups against the model and the cache of a shard: the number of groups, block ids, that no group has more
 * entries than there are tokens, and, unless they grow, that tables cover their steps. */
kvf_status kvf_check_groups(const kvf_shard *shard, const kvf_group_steps *groups, uint32_t count, bool grow);

/**
 * Whether the states that are wanted of a request are those after the tokens that are wanted beside them: a producer has
 * one state, that after its last token.
 *
 * @return KVF_OK, KVF_E_RANGE: the tokens end elsewhere; the detail names groups and ends
 */
kvf_status kvf_check_states(const kvf_model *model, const kvf_group_steps *wanted,
                            const kvf_group_steps *held, uint32_t count);

/** Whether the table of a group covers its steps within [begin, end); the detail names the group. */
kvf_status kvf_check_reach(const kvf_shard *shard, uint32_t group, const kvf_group_steps *steps,
                           uint64_t begin, uint64_t end);

/**
 * Makes groups with more blocks, in one allocation, for kvf_free(); `tables` may repeat blocks that are known.
 *
 * @param tables  one for each group, of kvf_take_tables()
 * @return KVF_OK, KVF_E_INVALID (an entry is another block now), KVF_E_RANGE (too many, or too far apart), KVF_E_NOMEM
 */
kvf_status kvf_steps_merge(const kvf_group_steps *groups, const kvf_block_table *tables, uint32_t count,
                           kvf_group_steps **out);

/** Checks the ids of tables with more blocks, one for each group; `out` receives the tables without the blocks behind
 * the groups' ends, with ids that are still the caller's. */
kvf_status kvf_take_tables(const kvf_shard *shard, const kvf_group_steps *groups,
                           const kvf_block_table *tables, uint32_t count, kvf_block_table *out);

#endif
