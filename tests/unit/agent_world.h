/*
 * Engines whose ranks are agents of this process, for tests: memory filled by coordinates, requests on all sides, their
 * results, and a check of every cell that should have arrived.
 *
 * Everything here fails the test if something does not happen within WORLD_PATIENCE_S. After world_is_simulated() that
 * is virtual time: it stands still while any agent has something to do, and then jumps to when one has.
 */
#ifndef KVF_TEST_AGENT_WORLD_H
#define KVF_TEST_AGENT_WORLD_H

#include <kvferry/agent.h>

#include "shapes.h"

struct kvf_fabric;

#define WORLD_MAX_RANKS 80u
#define WORLD_MAX_GROUPS 8u
#define WORLD_MAX_REGIONS 64u
#define WORLD_MAX_OUTCOMES 512u
#define WORLD_MAX_CELL_BYTES 65536u
#define WORLD_PATIENCE_S 30
#define MS 1000000ull
#define SECOND 1000000000ull

typedef struct world_engine {
    kvf_engine *engine;
    uint32_t rank_count;
    kvf_agent *agents[WORLD_MAX_RANKS];
    void *memory[WORLD_MAX_RANKS][WORLD_MAX_REGIONS];
    kvf_contact contact;
} world_engine;

/** A copy of an event. */
typedef struct world_outcome {
    const kvf_agent *agent;
    bool taken;
    kvf_event_kind kind;
    kvf_request_kind request_kind;
    uint64_t ticket;
    kvf_status status;
    char id[64], detail[512], engine[64];
    size_t id_bytes;
    uint32_t rank;
    bool blocks_free, recompute;
    uint32_t invalid[WORLD_MAX_GROUPS][512];
    uint32_t invalid_count[WORLD_MAX_GROUPS];
    uint32_t group_count;
    uint64_t bytes, runs, bytes_packed;
    kvf_record *records; /* with everything that they point to */
    uint32_t record_count;
} world_outcome;

typedef struct world {
    kvf_model *model;
    world_engine p, d, e; /* producer, consumer; a third one, made by world_add() */
    world_outcome *outcomes;
    uint32_t outcome_count;
} world;

/** Set-up of a test group: agents talk over a simulated network (agent_net.h), in virtual time. */
int world_is_simulated(void **state);
/** The default again: ZeroMQ, in real time. */
int world_is_real(void **state);
/** Set-up of a test: virtual time that passes in steps of 0.1 ms, because devices are polled in real time meanwhile;
 * until world_time_jumps(). */
int world_is_simulated_with_devices(void **state);
/** Lets virtual time jump again to when an agent has something to do: no device has, or does what the test waits for. */
void world_time_jumps(void);
/** Agents that are opened from now on move by this fabric; NULL: by the library's. */
void world_fabric(const struct kvf_fabric *fabric);

/** Opens both engines. `options` (may be NULL) are those of every agent. */
void world_open(world *w, const char *name, const kvf_engine_spec *p, const kvf_engine_spec *d,
                const kvf_agent_options *options);
/** The same with the test's own model, which the world then owns. */
void world_open_model(world *w, kvf_model *model, const kvf_engine_spec *p, const kvf_engine_spec *d,
                      const kvf_agent_options *options);
/** Opens the third engine. */
void world_add(world *w, const kvf_engine_spec *spec, const kvf_agent_options *options);
void world_close(world *w);

/** The first session that a peer has begun with an agent, or that the agent has begun itself; there must be one. */
struct kvf_session *world_session(const kvf_agent *agent, bool incoming);
/** Ends a session of the agent, as if the peer were lost. */
void world_lose(kvf_agent *agent, struct kvf_session *session);

/** Forgets the kept events: the next agent may have the same address as a closed one. */
void world_forget(world *w);

/** Opens the agents of one engine, which may have been closed, with these options. */
void world_open_agents(world_engine *engine, const kvf_agent_options *options);
/** Opens one agent and registers its memory; its siblings do not know it. */
void world_open_agent(world_engine *engine, uint32_t rank, const kvf_agent_options *options);
/** Provides memory to register; `seen` receives where the world reads and writes it. */
typedef kvf_memory (*world_place)(const char *engine, uint64_t bytes, void **seen);
/** Sets where memory that is registered from now on comes from; NULL: from the agents. */
void world_place_memory(world_place place);
/** The host cannot look at the memory that is provided, only at copies: `get` and `put` bring all memory that is seen at
 * a place from where it is to its copy, and back. The world then calls them wherever it reads and writes cells. */
typedef void (*world_carry)(const void *seen);
void world_copies_memory(world_carry get, world_carry put);
/** Registers the memory of an agent that the test has opened itself. */
void world_register(world_engine *engine, uint32_t rank);
/** Opens a directory as the engine's only agent. */
void world_open_directory(world_engine *engine);
/** Gives the introductions of all open ranks to `to`. */
void world_introduce(world_engine *engine, kvf_agent *to);
void world_close_agents(world_engine *engine);

/** Blocks and groups of a request of `tokens` tokens: block i of the sequence is block first + i * stride. */
typedef struct world_request {
    kvf_group_steps groups[WORLD_MAX_GROUPS];
    uint32_t ids[WORLD_MAX_GROUPS][512];
    uint32_t group_count;
    kvf_agent_request request;
} world_request;

void world_request_make(const world *w, const world_engine *engine, const char *id, uint64_t tokens,
                        uint32_t first, uint32_t stride, world_request *out);
/** Makes the request want nothing: a full prefix hit. */
void world_request_empty(world_request *request);

/** Starts the request on every rank of an engine; `tickets` has room for WORLD_MAX_RANKS. A hold lasts as long as the
 * agent's lease unless the request's deadline was changed. */
void world_hold(world_engine *engine, const world_request *request, uint64_t *tickets);
void world_pull(world_engine *engine, world_request *request, const world_engine *from, uint64_t *tickets);
void world_push(world_engine *engine, const world_request *request, uint64_t *tickets);
void world_expect(world_engine *engine, world_request *request, const world_engine *from, uint64_t *tickets);
void world_ready(world_engine *engine, const uint64_t *tickets); /**< marks everything of a push as ready */
/** A chunk of a push that brings no blocks with it. */
#define CHUNK(begin_, end_, layers_)                                                                         \
    (&(kvf_push_chunk){                                                                                      \
        .struct_size = sizeof(kvf_push_chunk), .begin = (begin_), .end = (end_), .layers = (layers_)})

/** Fills the cells of a request on every rank with bytes that follow from the coordinates and `seed`. */
void world_fill(const world *w, world_engine *engine, const world_request *request, uint32_t seed);

/** Flips a bit of one cell of a request in the memory of a rank. */
typedef struct world_cell {
    uint32_t rank, group, layer, part;
    uint64_t step;
    uint32_t row, unit;
} world_cell;
void world_flip(world_engine *engine, const world_request *request, world_cell at);

/** Elements were filled in the types of this model, which has the same groups and parts, and are expected converted to
 * the engine's types; NULL: they were filled in the engine's own types. */
void world_filled_as(const kvf_model *model);

/** How many cells of a request do not have the bytes of world_fill(); prints the first one. */
uint64_t world_wrong_cells(const world *w, world_engine *engine, const world_request *request, uint32_t seed);

/** The same of one rank, in the model layers [0, layers). Prints nothing. */
uint64_t world_wrong_cells_below(world_engine *engine, uint32_t rank, const world_request *request,
                                 uint32_t seed, uint32_t layers);

/** Lets all agents work until the condition holds. */
#define world_until(w, condition)                                                                            \
    do {                                                                                                     \
        uint64_t end_ = world_now() + WORLD_PATIENCE_S * SECOND;                                             \
        while (!(condition)) {                                                                               \
            if (world_now() > end_)                                                                          \
                fail_msg("never: %s", #condition);                                                           \
            world_work(w);                                                                                   \
        }                                                                                                    \
    } while (0)

uint64_t world_now(void);
void world_work(world *w); /**< one round of all agents; if they had nothing to do, time passes */
struct kvf_link;
/** The same with a link of the test's own: time passes to what the agents or the link have to do, by at most `ns`. */
void world_work_beside(world *w, struct kvf_link *link, uint64_t ns);
void world_run_for(world *w, uint64_t ns);

/** The next event of a ticket that was not taken yet; all agents work meanwhile. The result stays valid. */
const world_outcome *world_next(world *w, kvf_agent *agent, uint64_t ticket);
/** Requires that the next event of a ticket is this; otherwise prints the event. */
const world_outcome *world_done(world *w, kvf_agent *agent, uint64_t ticket);
const world_outcome *world_failed(world *w, kvf_agent *agent, uint64_t ticket, kvf_status status);
void world_all_done(world *w, world_engine *engine, const uint64_t *tickets);

/** Waits in kvf_agent_wait() for an event, and takes it: for agents with threads, or one that is driven alone. */
kvf_event world_wait_event(kvf_agent *agent);

/** How many events of a kind an agent has had, including those not taken. */
uint32_t world_count(const world *w, const kvf_agent *agent, kvf_event_kind kind);

kvf_agent_stats world_stats(kvf_agent *agent);
kvf_block_state world_block(kvf_agent *agent, uint32_t group, uint32_t block);

/** Waits until no agent has a request, a lease or a claimed block; then requires that every ticket with an event had
 * exactly one with `blocks_free`. */
void world_quiet(world *w);

/** Lets P hold and D pull a request of `tokens` tokens, and checks every cell. */
void world_pull_everything(world *w, const char *id, uint64_t tokens, uint32_t seed);

#endif
