/*
 * The hosts of a simulation, one for each rank of each engine, and what they have in common.
 */
#ifndef KVF_SIMULATE_WORLD_H
#define KVF_SIMULATE_WORLD_H

#include <kvferry/agent.h>

#include "base/tables.h"
#include "simulate/timeline.h"

typedef struct kvf_world kvf_world;
typedef struct kvf_host kvf_host;
typedef struct kvf_modelled_link kvf_modelled_link;
typedef struct kvf_modelled_endpoint kvf_modelled_endpoint;
typedef struct kvf_connection kvf_connection;

/** A rank's process. */
struct kvf_host {
    kvf_world *world;
    kvf_agent *agent;                /* NULL while the process is dead */
    kvf_modelled_link *link;         /* the agent's, while it is open */
    kvf_modelled_endpoint *endpoint; /* likewise, of its transport */
    kvf_happening turn;              /* when the agent has something to do */
    void *owner;                     /* the fleet's */
    bool cut_off;                    /* only hosts of the same owner are reached */
    uint32_t rank;
};

struct kvf_world {
    kvf_timeline line;
    kvf_clock clock; /* of the agents; its context is the world */
    uint64_t latency_ns;
    double run_ns, byte_ns; /* of a rank's link */

    kvf_host *opening; /* whose agent is being opened */
    bool quiet;        /* processes end without a word: what agents send now is dropped */

    kvf_modelled_link *links;     /* by the endpoint they listen on */
    kvf_connection **connections; /* [number]; NULL: it has ended */
    size_t connection_count, connection_room;
    kvf_modelled_endpoint *endpoints; /* by number */
    uint64_t last_link, last_route, last_endpoint;

    uint64_t messages, message_bytes, bytes, runs;
    /** Looks at the runs of a batch that has moved. */
    void (*moved)(kvf_host *mover, kvf_host *owner, const kvf_run *runs, size_t count, uint64_t bytes);
    kvf_status status; /* of what failed where nobody could be told; its sentence is `detail` */
    char detail[256];
};

/** Lets a host's agent have its turn now. */
static inline void kvf_host_wake(kvf_host *host) {
    kvf_happening_by(&host->world->line, &host->turn, host->world->line.now);
}

/** Whether anything gets from one host to the other, and back. */
static inline bool kvf_hosts_reach(const kvf_host *one, const kvf_host *other) {
    return one->owner == other->owner || (!one->cut_off && !other->cut_off);
}

/** The simulation cannot go on: its first reason stays. */
void kvf_world_fail(kvf_world *world, kvf_status status);

#endif
