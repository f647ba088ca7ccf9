/*
 * Terms: an engine of another model, and speaking as it does.
 */
#ifndef KVF_AGENT_TERMS_H
#define KVF_AGENT_TERMS_H

#include "agent/remote.h"

/** Compares the facts of an engine that answers with ours. KVF_E_MISMATCH where nothing can be moved. */
kvf_status kvf_terms_meet(kvf_remote *remote, const uint8_t *digest, const char *facts);

/** Our model, with the engine's types where they are converted. */
const kvf_model *kvf_terms_model(const kvf_remote *remote);

/** A shard of the engine, as bytes in its terms, as a shard of kvf_terms_model(). */
kvf_status kvf_terms_shard(const kvf_remote *remote, kvf_bytes bytes, kvf_shard **out);

/** The plan that fills a shard of our engine out of the remote one, whose shards are of kvf_terms_model(), of all groups
 * that can be filled; or of a plan who is read only. */
kvf_status kvf_terms_plan(const kvf_remote *remote, const kvf_engine *engine, const kvf_shard *shard,
                          kvf_plan **out);
kvf_status kvf_terms_cover(const kvf_remote *remote, const kvf_engine *engine, const kvf_shard *shard,
                           kvf_plan **out);

/** Whether the engine can fill all groups that are not empty; the detail names the first that it cannot. `groups`
 * may be NULL. */
kvf_status kvf_terms_check(const kvf_remote *remote, const kvf_group_steps *groups);

/** How many groups its messages speak of. */
uint32_t kvf_terms_group_count(const kvf_remote *remote);

/**
 * Groups of ours as we say them (of theirs as we hear them). The tables stay where they are.
 *
 * @param own  receives what the caller frees with kvf_free(), or NULL
 */
kvf_status kvf_terms_say(const kvf_remote *remote, const kvf_group_steps *ours, kvf_group_steps **own,
                         const kvf_group_steps **out);
kvf_status kvf_terms_hear(const kvf_remote *remote, const kvf_group_steps *theirs, kvf_group_steps **own,
                          const kvf_group_steps **out);

/** Group, part and layers of a call about cells, from ours to theirs. */
void kvf_terms_cells(const kvf_remote *remote, kvf_call_body *call);

#endif
