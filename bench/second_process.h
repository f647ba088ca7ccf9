/*
 * A second process besides the benchmark's own: an engine that offers requests, or an echo that uses ZeroMQ alone. The
 * two processes share a page, on which the benchmark gives orders and the second process confirms them.
 */
#ifndef BENCH_SECOND_PROCESS_H
#define BENCH_SECOND_PROCESS_H

#include <stdatomic.h>
#include <sys/types.h>

#include "agent/session.h"
#include "report.h"

#define BENCH_BLOCKS 128u /* of either engine: the most requests under way */

typedef enum bench_order {
    BENCH_IDLE = 0,
    BENCH_HOLD,
    BENCH_PUSH,
    BENCH_COUNT_MEMORY,
    BENCH_END
} bench_order;

typedef struct bench_board {
    atomic_int order;
    uint32_t first, count; /* requests to offer */
    char endpoint[64];     /* of the other process */
    atomic_ullong live_bytes, resident_bytes;
    uint32_t echo_bytes; /* bytes of an answer from the echo */
    pid_t pid;
} bench_board;

/** One rank. `layers` of `units` heads with `elements` of two bytes, K and V. */
kvf_engine *bench_engine(const char *name, uint32_t layers, uint32_t units, uint32_t elements,
                         uint32_t blocks);
/** Allocates memory of an agent of its rank 0, and registers it. */
void bench_register(kvf_agent *agent, const kvf_engine *engine);
/** Its agent with registered memory; leases and heartbeats take hours. */
kvf_agent *bench_agent(const kvf_engine *engine);
/** The same, over another link than ZeroMQ if one is given, with own_thread, verify and transport from `more`. */
kvf_agent *bench_agent_in(const kvf_link_table *link, const kvf_engine *engine,
                          const kvf_agent_options *more);

/** One request of one block; the request's id is the 4 bytes of its number. */
typedef struct bench_ask {
    kvf_group_steps group;
    uint32_t block, id;
    kvf_agent_request request;
} bench_ask;
const kvf_agent_request *bench_ask_of(bench_ask *ask, uint32_t number, uint32_t block, const char *endpoint);

/** Starts engine P with `layers` layers of 64 KiB a block; or, with 0 layers, an echo. */
bench_board *bench_second_start(uint32_t layers);
/** Gives an order and waits until it is carried out. */
void bench_second_order(bench_board *board, bench_order order, uint32_t first, uint32_t count);
void bench_second_end(bench_board *board);

#endif
