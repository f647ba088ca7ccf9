/*
 * How we write to consumers: the plans that fill a rank's shard. Ranks that say the same of their shard share them,
 * however many engines they are of: their plans are built once.
 */
#ifndef KVF_AGENT_PUSH_SHAPE_H
#define KVF_AGENT_PUSH_SHAPE_H

#include "agent/agent.h"
#include "wire/wire.h"

/** For some layers: the plan, and which source of it we are. */
typedef struct kvf_push_plan {
    kvf_range layers;
    kvf_plan *plan;
    uint32_t source; /* UINT32_MAX: nothing comes from us */
    struct kvf_push_plan *next;
} kvf_push_plan;

struct kvf_push_shape {
    kvf_agent *agent;
    uint8_t sum[KVF_WIRE_DIGEST_BYTES]; /* of the facts, its rank, and the shard as it says it */
    uint32_t users;                     /* sessions */
    kvf_shard *shard;                   /* with the types that it keeps */
    kvf_push_plan *plans;
    UT_hash_handle hh; /* agent->push_shapes, by sum */
};

/**
 * The shape of a rank that introduces itself with the digest of our facts.
 *
 * @param out  receives a shape that counts one user more, see kvf_push_shape_leave()
 * @return KVF_OK, KVF_E_NOMEM, and what is wrong with its shard
 */
kvf_status kvf_push_shape_use(kvf_agent *agent, const kvf_introduction *intro, kvf_push_shape **out);

/** One user less; NULL is accepted. */
void kvf_push_shape_leave(kvf_push_shape *shape);

/** The plan for some layers, which the shape owns; built when it is first asked for. */
kvf_status kvf_push_plan_for(kvf_push_shape *shape, kvf_range layers, const kvf_push_plan **out);

#endif
