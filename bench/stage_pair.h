/*
 * Two ranks in two processes, each with a stage, whose orders differ (NHD and HND), so that a run is one head of one
 * token. Moves cells between them, measures the time, and checks that every cell has arrived.
 *
 *     bench_pair_start(&pair, &route, &cells);          before anything opens UCX, which does not outlive a fork
 *     bench_pair_open(&pair);
 *     bench_pair_verify(&pair, KVF_WAY_PACKED);
 *     bench_pair_ask_for(&pair, 0, 1, tokens);
 *     double ns = bench_pair_move(&pair, KVF_WAY_AUTO, &info);
 *     bench_pair_close(&pair);
 *
 * A failure in any of these functions ends the program.
 */
#ifndef BENCH_STAGE_PAIR_H
#define BENCH_STAGE_PAIR_H

#include <sys/types.h>

#include <kvferry/stage.h>

#include "report.h"

#define BENCH_HEADS 2u
#define BENCH_BLOCK_TOKENS 16u
#define BENCH_PAIR_GROUPS 8u
#define BENCH_PAIR_REGIONS 8u

/** How the two ends reach each other. */
typedef struct bench_route {
    const char *title, *kind, *tls; /**< `tls`: of UCX; NULL: it chooses */
    bool brought;                   /**< memory that the library did not allocate */
    bool push;                      /**< this process holds the cells and writes; else it reads */
    unsigned spins;                 /**< rounds without work before an end sleeps */
    bool channels;                  /**< the holder of the cells stores keys channel by channel */
    uint32_t workers;               /**< of both stages */
} bench_route;

/** The cached cells: groups of K and V, all with the same number of layers, each layer a region. */
typedef struct bench_cells {
    uint32_t groups, layers;
    uint64_t run_bytes[BENCH_PAIR_GROUPS]; /**< of one head of a token */
    uint64_t tokens[BENCH_PAIR_GROUPS];    /**< of the longest sequence */
} bench_cells;

/** One group whose runs have so many bytes, and a longest sequence of so many bytes in all. */
bench_cells bench_cells_of(uint32_t layers, uint64_t run, uint64_t bytes);

/** One of the two ends. */
typedef struct bench_end {
    kvf_engine *engine;
    kvf_transport *transport;
    kvf_stage *stage;
    kvf_peer *peer;
    unsigned char *memory[BENCH_PAIR_REGIONS];
    unsigned spins;
} bench_end;

typedef struct bench_pair {
    const bench_route *route; /**< NULL: not started */
    bench_cells cells;
    bench_end end; /**< this process's end */
    pid_t other;
    int line;
    int plain;        /**< a plain connection to it */
    const void *card; /**< the other end's */
    size_t card_bytes;
    kvf_engine *theirs;
    kvf_plan *plan;
    kvf_request *request;
    uint32_t *ids[BENCH_PAIR_GROUPS];
} bench_pair;

/** What a kind of transport can do; its name is NULL if this build does not have it. */
kvf_transport_kind bench_kind(const char *name);

/** Bytes of one token of a group, of all its layers. */
uint64_t bench_token_bytes(const bench_cells *cells, uint32_t group);

/** Starts the other process, on the other host if there are two (hosts.h); it opens the fabric only with this one, and
 * ends with it at the latest. */
void bench_pair_start(bench_pair *pair, const bench_route *route, const bench_cells *cells);

/** Opens both ends, which then know each other. The request is still empty. */
void bench_pair_open(bench_pair *pair);
void bench_pair_close(bench_pair *pair);

/** Requests the first tokens (0: all) of these groups, with their blocks in descending order. Returns its bytes. */
uint64_t bench_pair_ask_for(bench_pair *pair, uint32_t first, uint32_t behind, uint64_t tokens);

/** Moves the request; `info` may be NULL. Returns nanoseconds. */
double bench_pair_move(const bench_pair *pair, kvf_way way, kvf_move_info *info);

/** Processor time of both processes. */
uint64_t bench_pair_processor_ns(const bench_pair *pair);

/** Runs until all flows have exchanged their ENDs. */
void bench_pair_settle(const bench_pair *pair);

/** Spoils the receiver's memory and requires that the check then fails; requires that every cell is right. */
void bench_pair_spoil(const bench_pair *pair);
void bench_pair_check(const bench_pair *pair);

/** Spoils the receiver's memory, moves everything, and checks every cell. */
void bench_pair_verify(bench_pair *pair, kvf_way way);

/** Gigabytes per second of all the other end's memory through a plain socket, into this process's. */
double bench_pair_plain(const bench_pair *pair);

#endif
