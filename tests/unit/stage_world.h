/*
 * Two engines whose ranks have stages: each rank has an endpoint, knows all ranks of the other engine, and works when
 * the test tells it to. Time stands still until a test moves it.
 */
#ifndef STAGE_WORLD_H
#define STAGE_WORLD_H

#include <kvferry/stage.h>

#include "base/clock.h"
#include "cells.h"
#include "stage/flow.h"

#define WORLD_RANKS 5u
#define WORLD_REGIONS 16u

typedef struct stage_end {
    char name[16];
    kvf_transport *transport; /**< NULL: closed */
    kvf_stage *stage;
    cell_rank cells;
    void *brought[WORLD_REGIONS]; /**< memory that the transport did not allocate */
    uint32_t brought_count;
    kvf_peer *peers[WORLD_RANKS]; /**< the other engine's ranks; NULL: lost or closed */
    uint32_t peer_count;
    uint32_t events;
    kvf_status event; /**< the last event */
    char event_text[512];
    uint32_t other_notices; /**< notifications that were not for the stage */
    bool refuses;           /**< it permits no flow */
    bool stands_still;      /**< it does not work */
    bool is_deaf;           /**< it drops the stage's messages */
} stage_end;

typedef struct stage_world {
    pair engines; /**< local: D, which reads; remote: P */
    cell_sequence d_sequence, p_sequence;
    stage_end d[WORLD_RANKS], p[WORLD_RANKS];
    uint32_t d_count, p_count;
    uint64_t now_ns;
    kvf_clock clock;
} stage_world;

/** Gives memory from another source, ready to be registered; the test reads and writes it at `seen`. It still belongs
 * to the source. */
typedef kvf_memory (*stage_place)(uint64_t bytes, void **seen);

/** The host cannot look at the memory that sources give, only at copies: `get` and `put` bring all memory that is seen
 * at a place from where it is to its copy, and back. */
typedef void (*stage_carry)(const void *seen);
void stage_world_copies_memory(stage_carry get, stage_carry put);

/** The shapes of both engines, and the length of the one sequence in their caches. */
typedef struct stage_pair {
    kvf_model *model; /**< the world will own it */
    const kvf_engine_spec *d, *p;
    uint64_t tokens;
    kvf_stage_options options; /**< for all stages; struct_size and callbacks are filled in */
} stage_pair;

/** Opens a world, over the faulty fabric if that is installed. */
stage_world *stage_world_open(const char *kind, const stage_pair *shape);

/** The same, with the regions of each engine from such a source; NULL: memory of the transport. */
stage_world *stage_world_open_at(const char *kind, const stage_pair *shape, stage_place d, stage_place p);

/** The same, with memory that the transports do not allocate. */
stage_world *stage_world_open_brought(const char *kind, const stage_pair *shape);
void stage_world_close(stage_world *w);

/** Closes one rank, as if its process ended. */
void stage_end_close(stage_end *end);

/** Lets every end work once. Returns whether one has more to do at once. */
bool stage_world_work(const stage_world *w);

/** Lets every end work until `done(context)`. Fails the test if nothing happens for a minute. */
void stage_world_work_until(const stage_world *w, bool (*done)(void *context), void *context);

/** Lets every end work until none has had anything to do for a while. */
void stage_world_work_idle(const stage_world *w);

/** Lets every end work until no stage has a flow or a slot in use: messages on the way may take long to arrive. */
void stage_world_settle(const stage_world *w);

/** Lets every end work until the move is over, and returns its status. */
kvf_status stage_world_finish(const stage_world *w, kvf_move *move);

/** D's ranks pull everything, or P's push everything; then every byte of D's memory must be right. */
void stage_world_pull_all(stage_world *w, kvf_way way, uint32_t seed);
void stage_world_push_all(stage_world *w, kvf_way way, uint32_t seed);

/** Fills P's cells with new bytes, and D's memory with others. */
void stage_world_refill(stage_world *w, uint32_t seed);

/** Counts the bytes of a rank of D that differ from a copy made cell by cell into the memory `before`. */
uint64_t stage_world_wrong_bytes(const stage_end *d, const cell_rank *before, uint32_t seed);

/** The peers of D's rank for the sources of a plan. */
void stage_world_sources(const stage_world *w, const stage_end *d, const kvf_plan *plan, kvf_peer **peers);

/** No slot of a stage is lent, in doubt or in use, and there is no flow. */
void assert_stage_idle(const kvf_stage *stage);

kvf_stage_info stage_info_of(const kvf_stage *stage);

#endif
