/*
 * The engines of a simulation: the hosts of their ranks, and their blocks. Which request has a block is known here too,
 * so that each run that moves can be checked.
 */
#ifndef KVF_SIMULATE_FLEET_H
#define KVF_SIMULATE_FLEET_H

#include <kvferry/simulate.h>

#include "shard/shard.h"
#include "simulate/world.h"

typedef struct kvf_fleet_engine kvf_fleet_engine;
typedef struct kvf_job kvf_job; /* a request; simulate.c has it */

/** Blocks that are given to requests. Groups that share pages have one pool. */
typedef struct kvf_block_pool {
    uint32_t all, free_count;
    uint32_t *free_ids;
    uint32_t *owners; /* [block]: the number of a request; 0: nobody */
} kvf_block_pool;

/** Where a region's blocks lie: at offset `o` is the kernel block `o / stride % count` of a pool. */
typedef struct kvf_region_blocks {
    uint32_t pool;
    uint64_t stride, count;
    uint32_t per_block; /* kernel blocks of a block */
} kvf_region_blocks;

/** The engines of one role. */
typedef struct kvf_fleet {
    kvf_world *world;
    const char *role;
    const kvf_engine *shape;
    uint32_t rank_count, group_count, pool_count;
    kvf_region_blocks **regions; /* [rank][region] */
    kvf_memory *memory;          /* [region]: addresses that nothing may use */
    uint32_t region_most;
    kvf_fleet_engine *engines;
    uint32_t engine_count;
    uint32_t there; /* engines that are alive, and not cut off */
    double token_ns;
    kvf_agent_options agent;
    void (*event)(kvf_host *host, const kvf_event *event);
} kvf_fleet;

struct kvf_fleet_engine {
    kvf_fleet *fleet;
    char name[32];
    kvf_engine view; /* the shape, under this name */
    kvf_host *hosts; /* [rank] */
    bool alive, cut_off;
    kvf_contact contact;
    kvf_block_pool *pools;

    /* simulate.c */
    uint64_t load;  /* tokens of requests that have not ended here */
    kvf_job *queue; /* waiting for the engine, or for its blocks */
    kvf_job *computing;
    kvf_happening happening; /* when the prompt is computed, or a killed engine is there again */
    kvf_happening returning; /* when one that is cut off is reached again */
    uint64_t back_at;
};

/**
 * Opens the engines of a role.
 *
 * @param agent  what its agents are opened with; the transport and the log are ours
 */
kvf_status kvf_fleet_open(kvf_fleet *fleet, kvf_world *world, const char *role,
                          const kvf_simulated_role *spec, const kvf_agent_options *agent);
void kvf_fleet_close(kvf_fleet *fleet); /**< a zeroed one is accepted */

/** Starts an engine's processes, with all blocks free. */
kvf_status kvf_engine_start(kvf_fleet_engine *engine);
/** Ends its processes without a word. It must be there. */
void kvf_engine_kill(kvf_fleet_engine *engine);

/** Whether requests may be sent to it: it is alive, and not cut off. */
bool kvf_engine_is_there(const kvf_fleet_engine *engine);
/** Cuts its hosts off from those of all other engines, though not from each other. It must be there. */
void kvf_engine_cut_off(kvf_fleet_engine *engine);
/** It is reached again. */
void kvf_engine_join(kvf_fleet_engine *engine);
/** It is cut off for so long that connections break. */
void kvf_engine_break(kvf_fleet_engine *engine);

/** How many blocks a request of so many tokens has in a group. */
uint32_t kvf_fleet_blocks(const kvf_fleet *fleet, uint32_t group, uint64_t tokens);

/**
 * Gives blocks to a request, or none if they do not suffice.
 *
 * @param steps  [group]: receives the tables, whose ids are in `ids`
 * @param ids    has room for all blocks of the request
 */
bool kvf_engine_take_blocks(kvf_fleet_engine *engine, uint32_t owner, uint64_t tokens, kvf_group_steps *steps,
                            uint32_t *ids);
void kvf_engine_give_blocks(kvf_fleet_engine *engine, const kvf_group_steps *steps);

/** Whose blocks some runs move from and to. */
typedef struct kvf_run_owners {
    uint32_t request; /* the number of the one that has the mover's blocks of the first run; 0: none has */
    uint64_t astray;  /* runs where the blocks of the mover are nobody's */
    uint64_t unlike;  /* runs where those of the other host are not the same request's */
} kvf_run_owners;

kvf_run_owners kvf_run_owners_of(const kvf_host *mover, const kvf_host *owner, const kvf_run *runs,
                                 size_t count);

/** How many requests, leases and blocks the agents of an engine have. */
uint64_t kvf_engine_left(const kvf_fleet_engine *engine);

#endif
