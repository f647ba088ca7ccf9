/*
 * How a deployment of many engines behaves, before there is one: its ranks in one thread, on a clock that jumps from
 * one event to the next.
 *
 * Shards, plans, runs, sessions, leases and messages are the library's own: each rank of each engine is an agent, as
 * kvf_agent_open() opens it in a process. Modelled are the rest:
 *
 *   time       passes when no agent has anything to do
 *   messages   arrive after `latency_ns`, in order
 *   bytes      flow through the links of the two ranks, one link for each rank, the same in both directions. What flows
 *              through a link at a time shares it equally, and a flow is as fast as the slower of its two shares. A run
 *              takes `run_ns` of a link more than its bytes do
 *   engines    a prefill engine computes prompts one after the other, a decode engine makes the tokens of all its
 *              sequences at an even pace. A request goes to the less loaded of two engines drawn at random
 *
 * Requests go one of two ways, see `push_tokens`: the decode engine reads, by kvf_agent_pull(), or the prefill engine
 * writes, by kvf_agent_push(), while it still computes:
 *
 *   arrived -> waits for a prefill engine -> computed -> waits for blocks of a decode engine -> handed over -> decoded
 *   arrived -> waits for blocks of a decode engine -> waits for a prefill engine -> computed and handed over -> decoded
 *
 * Nothing is read or written but block tables: a simulation needs no memory for caches.
 */
#ifndef KVFERRY_SIMULATE_H
#define KVFERRY_SIMULATE_H

#include <kvferry/shard.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A request of a workload. This struct stays as it is. */
typedef struct kvf_simulated_request {
    uint64_t at_ns;         /**< when it arrives, from the beginning of the simulation */
    uint32_t prompt_tokens; /**< at least 1 */
    uint32_t
        output_tokens; /**< for as many its blocks are kept in the decode engine; 0: they are freed at once */
} kvf_simulated_request;

/** The engines of one role. All have the same ranks, under names of their own. */
typedef struct kvf_simulated_role {
    uint32_t engine_count;    /**< at least 1 */
    const kvf_engine *shape;  /**< ranks must not share tokens (dcp_size 1) */
    bool share_pages;         /**< all groups have their blocks from one pool, see kvf_engine_spec */
    double tokens_per_second; /**< prefill: of an engine; decode: of each sequence; 0: no time passes */
    uint64_t reserved[2];     /**< 0 */
} kvf_simulated_role;

/** Durations are in nanoseconds; 0 means the default in brackets. */
typedef struct kvf_simulation_options {
    size_t struct_size; /**< sizeof(kvf_simulation_options) */
    kvf_simulated_role prefill, decode;
    const kvf_simulated_request *requests; /**< by rising times; read during the call */
    uint64_t request_count;
    double link_bytes_per_second; /**< of each rank, in each direction [50e9] */
    uint64_t latency_ns;          /**< of a message, one way [10 us] */
    uint64_t run_ns;              /**< of a link, for each run [none] */
    uint64_t lease_ns;            /**< of all agents, see kvf_agent_options [30 s] */
    uint64_t idle_ns;             /**< likewise [10 min] */
    /** Engines whose processes end without a word, at times drawn between the first request and the last */
    uint32_t killed;
    uint64_t
        restart_ns; /**< from then until it is there again, under its old name, with nothing in it [30 s] */
    uint64_t seed;  /**< of what is drawn */
    /** Called about ten times in a second of real time; false ends the simulation. NULL: not called */
    bool (*progress)(void *context, uint64_t now_ns, uint64_t ended);
    void *context;
    /** 0: decode engines read. Otherwise prefill engines compute prompts in chunks of so many tokens, and write each when it
     * is computed; states are written with the last one */
    uint32_t push_tokens;
    /** Engines that are cut off from all others, at times drawn likewise, while their processes go on: what they do comes
     * late. New requests are not sent to them meanwhile */
    uint32_t cut_off;
    uint64_t cut_off_ns; /**< for how long [45 s] */
} kvf_simulation_options;

/** Durations of requests, accurate to 2%. This struct stays as it is. */
typedef struct kvf_simulated_times {
    uint64_t count;
    double mean_ns;
    uint64_t p50_ns, p90_ns, p99_ns, worst_ns;
} kvf_simulated_times;

/** What a simulation found. */
typedef struct kvf_simulation {
    size_t struct_size;    /**< sizeof(kvf_simulation), set by the caller */
    uint64_t simulated_ns; /**< until everything had ended */
    double real_seconds;   /**< that it took */
    uint32_t agents;

    /* Each request has one of these ends. */
    uint64_t done;
    uint64_t failed;   /**< its decode engine was told so, and would compute the prompt */
    uint64_t lost;     /**< it was in an engine that was killed, or no engine of a role was there for it */
    char failure[256]; /**< why the first one failed */

    kvf_simulated_times prefill_wait; /**< for an engine to begin with the prompt */
    kvf_simulated_times blocks_wait;  /**< for blocks of a decode engine */
    /** From the prompt's end, and when there were blocks, until all ranks had all bytes */
    kvf_simulated_times hand_over;
    /** Of the same hand-overs: what the slowest rank's bytes and runs would take on links of their own; where they are
     * written, more than `hand_over` if most of them moved before the prompt's end */
    kvf_simulated_times alone;
    kvf_simulated_times until_decode; /**< from arriving until decoding began */

    uint64_t bytes, runs;
    double link_use;   /**< of the busiest rank's link: the share of the time that it moved bytes */
    uint64_t messages; /**< between agents */
    uint64_t message_bytes;
    uint64_t plans;              /**< that were built */
    uint64_t sessions_most;      /**< of one agent at a time, as seen at some 16 moments */
    uint64_t session_bytes_most; /**< likewise: memory that an agent kept for its peers */
    uint64_t process_bytes;      /**< of memory, at most, that this process had */
    uint32_t killed;

    /* What must not happen, and is counted. */
    /** Runs that moved to blocks which were not then the request's; or from such blocks, and what they brought was used */
    uint64_t foreign_runs;
    uint64_t left; /**< requests, leases and blocks of agents that were left at the end */

    uint32_t cut_off;
} kvf_simulation;

/**
 * Simulates a deployment until all its requests have ended.
 *
 * @param options  a request for which the engines of a role have too few blocks is an error
 * @param out      struct_size is set by the caller; the rest is filled in
 * @return KVF_OK; KVF_E_INVALID, KVF_E_RANGE, KVF_E_UNSUPPORTED (the detail names the field); KVF_E_MISMATCH (the two
 *         shapes are of unlike models); KVF_E_CANCELLED (`progress` returned false); KVF_E_IO, KVF_E_NOMEM
 *
 * Thread safety: any thread; one simulation at a time in a thread. O(requests x (blocks + runs)).
 */
KVF_API kvf_status kvf_simulate(const kvf_simulation_options *options, kvf_simulation *out);

#ifdef __cplusplus
}
#endif

#endif
