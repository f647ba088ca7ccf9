/* Shared by the tests of agents whose requests go packed. */
#ifndef KVF_TEST_AGENT_PACKED_SCENE_H
#define KVF_TEST_AGENT_PACKED_SCENE_H

#include "agent_world.h"

#define TP2 ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64})
#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})

/* A small stage, and a way. */
static inline kvf_agent_options options_of(kvf_way way) {
    return (kvf_agent_options){.struct_size = sizeof(kvf_agent_options),
                               .transport = "inproc",
                               .way = way,
                               .slot_bytes = 4096,
                               .arena_bytes = 64 * 4096};
}

/* Bytes that the ranks of an engine have moved packed, */
static inline uint64_t all_packed(const world_engine *e) {
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < e->rank_count; r++)
        bytes += world_stats(e->agents[r]).bytes_packed;
    return bytes;
}

/* and that they have read. */
static inline uint64_t all_read(const world_engine *e) {
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < e->rank_count; r++)
        bytes += world_stats(e->agents[r]).bytes_read;
    return bytes;
}

/* P holds the request `id`, and `e`, of one rank, pulls it. */
static inline void pull_one(world *w, world_engine *e, const char *id, uint64_t *holds, uint64_t *pulls) {
    world_request held, wanted;
    world_request_make(w, &w->p, id, 20, 0, 1, &held);
    world_request_make(w, e, id, 20, 0, 1, &wanted);
    world_hold(&w->p, &held, holds);
    world_pull(e, &wanted, &w->p, pulls);
}

#endif
