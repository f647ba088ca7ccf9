/*
 * Geometries: what all engines of one shape have in common for us. Their shards in terms of our model, our plan, and who
 * of our ranks reads whom are worked out once, and kept for as long as we know an engine of that shape.
 *
 * Engines have one geometry where the digest of their facts is the same, and what each rank says of its shard. The first
 * of them that is met makes it, a few milliseconds of work in each round, and the others wait. Where the maker fails or
 * is given up, another begins anew with what it was told itself: so nobody fails for what is wrong with somebody else.
 */
#ifndef KVF_AGENT_GEOMETRY_H
#define KVF_AGENT_GEOMETRY_H

#include "agent/agent.h"
#include "wire/wire.h"

struct kvf_geometry {
    uint8_t sum[KVF_WIRE_DIGEST_BYTES]; /* of the facts, and of the shards of all ranks as they say them */
    uint32_t users;                     /* engines */
    const kvf_remote *maker;            /* NULL: it is ready, or nobody has begun */
    bool ready;                         /* all below is there, and stays as it is */
    kvf_engine *engine;
    kvf_plan *plan;
    uint32_t *readers;        /* by rank: so many of ours read it */
    uint32_t own_ranks_asked; /* of ours that were asked whom they read */
    UT_hash_handle hh;        /* agent->geometries, by sum */
};

/** Finds or begins the geometry of an engine all of whose introductions were taken: remote->geometry. */
kvf_status kvf_geometry_use(kvf_remote *remote);

/** Goes on making it, where that is this engine's turn. After an error the engine is given up. */
kvf_status kvf_geometry_make(kvf_remote *remote);

/** An engine is done with it, or gives up making it. remote->geometry may be NULL, and becomes it. */
void kvf_geometry_leave(kvf_remote *remote);

#endif
