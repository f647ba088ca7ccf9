/*
 * The plans by which we fill the shards of consumers' ranks. Ranks that describe their shards alike share plans, even
 * ranks of different engines: the plans are built once.
 */
#ifndef KVF_AGENT_PUSH_SHAPE_H
#define KVF_AGENT_PUSH_SHAPE_H

#include "agent/session.h"
#include "wire/wire.h"

/** For some layers: the plan, and our index among its sources. */
typedef struct kvf_push_plan {
    kvf_range layers;
    kvf_plan *plan;
    uint32_t source; /* UINT32_MAX: nothing comes from us */
    struct kvf_push_plan *next;
} kvf_push_plan;

struct kvf_push_shape {
    kvf_agent *agent;
    uint8_t sum[KVF_WIRE_DIGEST_BYTES]; /* of the facts, the rank, and its description of its shard */
    uint32_t users;                     /* sessions */
    kvf_shard *shard;                   /* with the types that the rank keeps */
    kvf_push_plan *plans;               /* the newest first */
    uint64_t plan_bytes;                /* of all of them */
    UT_hash_handle hh;                  /* agent->push_shapes, by sum */
};

/**
 * The shape of a rank that introduces itself with the digest of our facts.
 *
 * @param out  receives a shape with one user more, see kvf_push_shape_leave()
 * @return KVF_OK, KVF_E_NOMEM, and errors of its shard
 */
kvf_status kvf_push_shape_use(kvf_agent *agent, const kvf_introduction *intro, kvf_push_shape **out);

/** One user less; NULL is accepted. */
void kvf_push_shape_leave(kvf_push_shape *shape);

/** The plan for some layers, which the shape owns; built at the first request. All plans of a shape count in the budget of
 * each session that writes by one of them. */
kvf_status kvf_push_plan_for(kvf_session *session, kvf_range layers, const kvf_push_plan **out);

#endif
