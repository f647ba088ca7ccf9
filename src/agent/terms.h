/*
 * Terms: translating between our model and that of a remote engine, whose terms messages use.
 */
#ifndef KVF_AGENT_TERMS_H
#define KVF_AGENT_TERMS_H

#include "agent/remote.h"

/** Compares the facts of an engine that has answered with ours. KVF_E_MISMATCH: nothing can be moved. */
kvf_status kvf_terms_meet(kvf_remote *remote, const uint8_t *digest, const char *facts);

/** Our model, with the engine's types for parts that are converted. */
const kvf_model *kvf_terms_model(const kvf_remote *remote);

/** Reads a shard of the engine, given in its terms, as a shard of kvf_terms_model(). `pieces` receives how many pieces of
 * cells were compared. */
kvf_status kvf_terms_shard(const kvf_remote *remote, kvf_bytes bytes, uint64_t *pieces, kvf_shard **out);

/** Builds the plan that fills a shard of our engine from the remote one, whose shards are of kvf_terms_model(), for all
 * groups that can be filled. kvf_terms_cover() finds only which ranks are read. */
kvf_status kvf_terms_plan(const kvf_remote *remote, const kvf_engine *engine, const kvf_shard *shard,
                          kvf_plan **out);
kvf_status kvf_terms_cover(const kvf_remote *remote, const kvf_engine *engine, const kvf_shard *shard,
                           kvf_plan **out);

/** Whether the engine can fill all groups that are not empty; the detail names the first that it cannot fill. `groups`
 * may be NULL. */
kvf_status kvf_terms_check(const kvf_remote *remote, const kvf_group_steps *groups);

/** The number of groups in messages with it. */
uint32_t kvf_terms_group_count(const kvf_remote *remote);

/**
 * Translates our groups to their terms (hear: theirs to ours). The tables are not copied.
 *
 * @param own  receives memory that the caller frees with kvf_free(), or NULL
 */
kvf_status kvf_terms_say(const kvf_remote *remote, const kvf_group_steps *ours, kvf_group_steps **own,
                         const kvf_group_steps **out);
kvf_status kvf_terms_hear(const kvf_remote *remote, const kvf_group_steps *theirs, kvf_group_steps **own,
                          const kvf_group_steps **out);

/** Translates group, part and layers of a call about cells from our terms to theirs. */
void kvf_terms_cells(const kvf_remote *remote, kvf_call_body *call);

#endif
