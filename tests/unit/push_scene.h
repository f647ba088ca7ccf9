/*
 * A producer, a consumer of another shape, and one request between them, for tests of pushes.
 */
#ifndef PUSH_SCENE_H
#define PUSH_SCENE_H

#include "agent_world.h"

#define TP2 ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64})
#define TP4                                                                                                  \
    ENGINE(.name = "D", .tp_size = 4, .all = {.tokens_per_block = 8, .block_count = 128, .order = "BLHNP"})
#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define LAYERS 6u
#define TOKENS 100u

typedef struct push_scene {
    world w;
    world_request given, wanted;
    kvf_group_steps opened[WORLD_MAX_GROUPS]; /* the groups of `given`, without blocks */
    uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
} push_scene;

/** Opens both engines and makes the request on both sides; no rank has begun it yet. */
static inline void push_scene_open(push_scene *s, kvf_model *model, const kvf_engine_spec *p,
                                   const kvf_engine_spec *d, const kvf_agent_options *options) {
    world_open_model(&s->w, model, p, d, options);
    world_request_make(&s->w, &s->w.p, "push", TOKENS, 3, 2, &s->given);
    world_request_make(&s->w, &s->w.d, "push", TOKENS, 7, 3, &s->wanted);
    world_fill(&s->w, &s->w.p, &s->given, 2);
}

/** Waits until every rank is done, checks every cell, and closes. */
static inline void push_scene_finish(push_scene *s) {
    world_all_done(&s->w, &s->w.d, s->expects);
    world_all_done(&s->w, &s->w.p, s->pushes);
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &s->wanted, 2), 0);
    world_quiet(&s->w);
    world_close(&s->w);
}

#endif
