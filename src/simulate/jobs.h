/*
 * The way of the requests of a simulation through its engines.
 */
#ifndef KVF_SIMULATE_JOBS_H
#define KVF_SIMULATE_JOBS_H

#include "simulate/fleet.h"
#include "simulate/quantiles.h"

typedef struct kvf_deployment kvf_deployment;

/** What is to happen to an engine. */
typedef struct kvf_blow {
    uint64_t at;
    bool kills; /* otherwise cuts it off */
} kvf_blow;

/** What a simulation has. */
struct kvf_deployment {
    kvf_world world; /* first, so that the two can be cast */
    const kvf_simulation_options *options;
    kvf_simulation *found;
    kvf_fleet prefill, decode;
    kvf_job *jobs; /* by number */
    uint64_t arrived, ended;
    kvf_happening arrival, look, blow;
    uint64_t random;
    uint64_t looked_ns; /* between two looks */
    uint64_t last_ns;   /* when the last request arrives */
    kvf_blow *blows;    /* by rising times */
    uint32_t blow_count, struck;
    kvf_quantiles prefill_wait, blocks_wait, hand_over, alone, until_decode;
    uint64_t closed_plans; /* of agents that were killed */
    uint64_t begun_real, called_real;
};

/** Lets the requests of the options arrive. Fleets are open. KVF_E_NOMEM. */
kvf_status kvf_jobs_begin(kvf_deployment *d);
void kvf_jobs_free(kvf_deployment *d);
/** How many requests are under way, or have blocks. */
uint32_t kvf_jobs_count(const kvf_deployment *d);

/** The processes of an engine have ended: its requests are lost, or go on without it. It starts again at `back_at`. */
void kvf_jobs_lose(kvf_deployment *d, kvf_fleet_engine *engine, uint64_t back_at);

/** What an agent of a prefill engine says, and one of a decode engine. */
void kvf_jobs_at_prefill(kvf_host *host, const kvf_event *event);
void kvf_jobs_at_decode(kvf_host *host, const kvf_event *event);

/** Bytes of a request have moved to a decode rank. `spoiled` runs were read from blocks of others: that is right if what
 * was read is not used. */
void kvf_jobs_at_run(kvf_deployment *d, const kvf_host *decode, uint32_t number, uint64_t bytes,
                     uint64_t runs, uint64_t spoiled);

/** A number below `below`, by the seed. */
uint64_t kvf_draw(kvf_deployment *d, uint64_t below);

/** One of the engines that are there; NULL: none is. */
kvf_fleet_engine *kvf_draw_engine(kvf_deployment *d, const kvf_fleet *fleet);

#endif
