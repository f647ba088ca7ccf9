/*
 * A demo: each rank of a prefill and of a decode engine is a process with an agent. They move requests as engines do,
 * and verify every byte.
 */
#ifndef KVFERRY_DEMO_DEMO_H
#define KVFERRY_DEMO_DEMO_H

#include <kvferry/agent.h>

#include "channel.h"
#include "corrupt.h"
#include "engines.h"
#include "workload.h"

/** The facts that all ranks know; made before they start, and not changed afterwards. */
typedef struct demo_job {
    const options *asked;
    engines all;
    workload work;
    corruption corrupt;
    uint32_t rounds;
    uint32_t prefill_ranks, decode_ranks; /* the ranks that are started here */
    kvf_agent_options agents;             /* of all ranks; transport and settings are as asked for */
    uint16_t first_port;                  /* of rank 0, and so on; 0: any */
    kvf_contact producer;                 /* decode ranks learn its endpoint once it is known */
    bool standing;                        /* every request is held again after it was fetched */
    uint64_t patience_ns;                 /* how long ranks wait for each other */
    uint32_t silence_s;                   /* how long a rank may send nothing */
    uint32_t steps;                       /* the total number of calls of crew_await() */
    uint32_t fault_rank;                  /* counted over prefill, then decode ranks; UINT32_MAX: none */
    uint32_t victim;                      /* the prefill rank that --kill kills */
    uint32_t spares;                      /* processes that stand by to take the victim's place */
    uint8_t **copy_source; /* by prefill rank: memory as large as its regions together, to measure copying */
    uint64_t *copy_bytes;
} demo_job;

typedef enum demo_side {
    SIDE_PREFILL,
    SIDE_DECODE,
} demo_side;

/** A rank's place in the job. */
typedef struct rank_seat {
    const demo_job *job;
    demo_side side;
    uint32_t rank;
    channel coordinator;
} rank_seat;

/** Runs a rank until the coordinator tells it to quit. Returns its exit code; the rank has sent what went wrong. */
int run_prefill_rank(rank_seat *seat);
int run_decode_rank(rank_seat *seat);

/** A producer that was killed, see killing.h. Times are of CLOCK_MONOTONIC. */
typedef struct killing {
    uint64_t bytes;  /* of the request that had moved */
    uint32_t layers; /* push: model layers that were ready */
    uint64_t killed_ns;
    uint64_t replaced_ns; /* how long it took to start the rank again */
    told_figures *told;   /* by prefill, then decode rank; zero for the victim */
} killing;

typedef struct demo_result {
    char transport[24];       /* the kinds that served */
    uint64_t bytes, runs;     /* of one round, over all ranks */
    uint64_t bytes_packed;    /* those of `bytes` that went packed */
    double *seconds;          /* [round]: from the first rank's start to the last one's end */
    double *copy_seconds;     /* [round]: the slowest rank's copying */
    const char *copy_method;  /* see copy_limit_method() */
    uint64_t verified_bytes;  /* cells checked, in all rounds */
    uint64_t untouched_bytes; /* other memory checked, in all rounds */
    double wall_seconds;
    killing killed; /* with --kill */
} demo_result;

/** Prepares a job by the options. Free with demo_free() in either case. */
int demo_prepare(const options *asked, uint32_t default_rounds, demo_job *out);

/** Starts the ranks, moves, verifies, measures, and ends them; prints what is wrong. Free with demo_result_free(). */
int demo_run(const demo_job *job, demo_result *out);

void demo_result_free(demo_result *result);
void demo_free(demo_job *job);

/** Bytes of a round divided by its seconds, in GB/s, and the same of the copies. */
double demo_rate(const demo_result *result, uint32_t round);
double demo_copy_rate(const demo_result *result, uint32_t round);

/** Writes the transport and the kind of memory: "shm, partly packed, brought memory". */
void demo_describe_transport(const demo_job *job, const demo_result *result, char *out, size_t bytes);

#endif
