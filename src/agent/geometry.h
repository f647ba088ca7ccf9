/*
 * Geometries: what all engines of one shape have in common for us. Their shards in terms of our model, our plan, and
 * which of our ranks read which of theirs are computed once, and kept while we know an engine of that shape.
 *
 * Engines share a geometry if their facts have the same digest, and their ranks describe their shards alike. The first
 * of them that is met makes the geometry, a few milliseconds of work in each round, and the others wait. If the maker
 * fails or is given up, another engine starts over with its own introductions, so none fails for another's fault.
 */
#ifndef KVF_AGENT_GEOMETRY_H
#define KVF_AGENT_GEOMETRY_H

#include "agent/agent.h"
#include "request/request.h"
#include "wire/wire.h"

/** A request object is as large as the longest request that it was set to, and may be set to one of any engine of the
 * shape: a few are kept for all of them. */
#define KVF_SPARE_REQUESTS 8u

struct kvf_geometry {
    uint8_t sum[KVF_WIRE_DIGEST_BYTES]; /* of the facts, and of all ranks' descriptions of their shards */
    uint32_t users;                     /* engines */
    const kvf_remote *maker;            /* NULL: it is ready, or no engine has begun */
    bool ready;                         /* all fields below are set, and do not change */
    kvf_engine *engine;
    kvf_plan *plan;
    uint32_t *readers;                       /* by their rank: the number of our ranks that read it */
    uint32_t own_ranks_asked;                /* our ranks whose sources were counted so far */
    kvf_request *spares[KVF_SPARE_REQUESTS]; /* over `plan`, for the next pulls */
    uint32_t spare_count;
    UT_hash_handle hh; /* agent->geometries, by sum */
};

/** Sets remote->geometry, found or begun; all introductions of the engine must have been taken. */
kvf_status kvf_geometry_use(kvf_remote *remote);

/** Goes on making the geometry, if this engine is its maker or may become it. After an error the engine is given up. */
kvf_status kvf_geometry_make(kvf_remote *remote);

/** An engine no longer uses its geometry, or gives up making it. remote->geometry may be NULL; it is set to NULL. */
void kvf_geometry_leave(kvf_remote *remote);

/** A request over the plan of a geometry that is ready. KVF_E_NOMEM; it is given back by kvf_geometry_put_back(). */
kvf_status kvf_geometry_request(kvf_geometry *geometry, kvf_request **out);

/** Keeps a request for another pull, or frees it; NULL is accepted. */
void kvf_geometry_put_back(kvf_geometry *geometry, kvf_request *request);

#endif
