#include "agent/geometry.h"

#include "agent/terms.h"
#include "plan/plan.h"

/* Limits of one round: shards that are read, ranks that are looked at. A few milliseconds each. */
#define READ_AT_ONCE 512u
#define PIECES_AT_ONCE (1u << 14) /* of cells that are compared to read them; one shard may have more */
#define LOOKED_AT_ONCE (1u << 18)

static void unmake(kvf_geometry *geometry) {
    while (geometry->spare_count > 0)
        kvf_request_free(geometry->spares[--geometry->spare_count]);
    kvf_plan_free(geometry->plan);
    kvf_engine_free(geometry->engine);
    kvf_free(geometry->readers);
    geometry->plan = NULL;
    geometry->engine = NULL;
    geometry->readers = NULL;
    geometry->own_ranks_asked = 0;
    geometry->maker = NULL;
}

kvf_status kvf_geometry_use(kvf_remote *remote) {
    kvf_agent *agent = remote->agent;
    const uint8_t *sum = remote->siblings.sum;
    kvf_geometry *geometry = NULL;
    HASH_FIND(hh, agent->geometries, sum, KVF_WIRE_DIGEST_BYTES, geometry);
    if (!geometry) {
        geometry = kvf_alloc0(1, sizeof *geometry);
        if (!geometry)
            return kvf_nomem("a remote engine");
        memcpy(geometry->sum, sum, sizeof geometry->sum);
        HASH_ADD(hh, agent->geometries, sum, sizeof geometry->sum, geometry);
        if (!geometry->hh.tbl) {
            kvf_free(geometry);
            return kvf_nomem("a remote engine");
        }
    }
    geometry->users++;
    remote->geometry = geometry;
    return KVF_OK;
}

void kvf_geometry_leave(kvf_remote *remote) {
    kvf_geometry *geometry = remote->geometry;
    remote->geometry = NULL;
    if (!geometry)
        return;
    if (geometry->maker == remote)
        unmake(geometry);
    if (--geometry->users > 0)
        return;
    HASH_DEL(remote->agent->geometries, geometry);
    unmake(geometry);
    kvf_free(geometry);
}

/* ---- making ---------------------------------------------------------------------------------- */

static kvf_status read_shard(const void *remote, kvf_bytes bytes, uint64_t *pieces, kvf_shard **out) {
    return kvf_terms_shard(remote, bytes, pieces, out);
}

static kvf_status read_some(kvf_remote *remote) {
    kvf_geometry *geometry = remote->geometry;
    kvf_siblings *siblings = &remote->siblings;
    const uint64_t most = siblings->pieces + PIECES_AT_ONCE;
    kvf_status status = KVF_OK;
    for (uint32_t i = 0;
         i < READ_AT_ONCE && siblings->read < remote->rank_count && siblings->pieces < most && !status; i++)
        status = kvf_siblings_read(siblings, read_shard, remote);
    if (status || remote->siblings.read < remote->rank_count)
        return status;
    geometry->readers = kvf_alloc0(remote->rank_count, sizeof *geometry->readers);
    if (!geometry->readers)
        return kvf_nomem("a remote engine");
    return kvf_siblings_engine(&remote->siblings, remote->name, kvf_terms_model(remote), &geometry->engine);
}

static kvf_status plan(kvf_remote *remote) {
    kvf_agent *agent = remote->agent;
    kvf_geometry *geometry = remote->geometry;
    kvf_status status = kvf_terms_plan(remote, geometry->engine, agent->shard, &geometry->plan);
    agent->stats.plans_built += !status;
    return status;
}

/*
 * Every producer rank is told when it may free: by those of our ranks that read from it, or, if none does, by one of
 * our ranks. Our siblings compute the same, so each can say how many ranks there are.
 */
static kvf_status ask_some(kvf_remote *remote) {
    const kvf_agent *agent = remote->agent;
    kvf_geometry *geometry = remote->geometry;
    kvf_status status = KVF_OK;
    for (uint64_t steps = 0;
         steps < LOOKED_AT_ONCE && geometry->own_ranks_asked < agent->rank_count && !status;) {
        uint32_t d = geometry->own_ranks_asked++;
        kvf_plan *cover = geometry->plan;
        if (d != agent->rank)
            status = kvf_terms_cover(remote, geometry->engine, kvf_engine_shard(agent->engine, d), &cover);
        for (uint32_t s = 0; !status && s < kvf_plan_source_count(cover); s++)
            geometry->readers[kvf_plan_source_rank(cover, s)]++;
        steps += status ? 0 : cover->steps + remote->rank_count;
        if (!status && d != agent->rank)
            kvf_plan_free(cover);
    }
    return status;
}

kvf_status kvf_geometry_make(kvf_remote *remote) {
    kvf_geometry *geometry = remote->geometry;
    kvf_status status = KVF_OK;
    if (!geometry->maker)
        geometry->maker = remote;
    if (geometry->ready || geometry->maker != remote)
        return KVF_OK;
    if (!geometry->engine)
        status = read_some(remote);
    else if (!geometry->plan)
        status = plan(remote);
    else if (geometry->own_ranks_asked < remote->agent->rank_count)
        status = ask_some(remote);
    else
        geometry->ready = true;
    if (geometry->ready)
        geometry->maker = NULL;
    return status;
}

/* ---- requests -------------------------------------------------------------------------------- */

kvf_status kvf_geometry_request(kvf_geometry *geometry, kvf_request **out) {
    if (geometry->spare_count == 0)
        return kvf_request_create(geometry->plan, out);
    *out = geometry->spares[--geometry->spare_count];
    return KVF_OK;
}

void kvf_geometry_put_back(kvf_geometry *geometry, kvf_request *request) {
    if (request && geometry->spare_count < KVF_SPARE_REQUESTS)
        geometry->spares[geometry->spare_count++] = request;
    else
        kvf_request_free(request);
}
