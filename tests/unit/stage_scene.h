/*
 * The usual scene for tests of flows: a world of one rank each, D and P, and one request that D reads from P.
 */
#ifndef STAGE_SCENE_H
#define STAGE_SCENE_H

#include "stage_world.h"

/** D has blocks of 8 tokens, NHD; P has blocks of 16, HND: the layouts have nothing in common. */
static const kvf_engine_spec scene_d = {
    .struct_size = sizeof scene_d,
    .tp_size = 1,
    .all = {.tokens_per_block = 8, .block_count = 100, .order = "L|BPNH"}};
static const kvf_engine_spec scene_p = {
    .struct_size = sizeof scene_p,
    .tp_size = 1,
    .all = {.tokens_per_block = 16, .block_count = 100, .order = "L|BPHN"}};

typedef struct stage_scene {
    stage_world *w;
    kvf_plan *plan;
    kvf_request *request; /**< the whole sequence of the world */
    cell_rank before;     /**< a copy of D's memory before any move */
    stage_end *d, *p;
} stage_scene;

/** Opens the world, which then owns the model. */
static inline stage_scene stage_scene_open(const char *kind, kvf_model *model, uint64_t tokens,
                                           kvf_stage_options options) {
    const stage_pair shape = {model, &scene_d, &scene_p, tokens, options};
    stage_scene s = {.w = stage_world_open(kind, &shape)};
    s.plan = plan_of(&s.w->engines, 0);
    s.request = request_of(s.plan);
    set_sequences(s.request, &s.w->d_sequence, &s.w->p_sequence);
    s.d = &s.w->d[0];
    s.p = &s.w->p[0];
    rank_copy(&s.before, &s.d->cells);
    return s;
}

static inline void stage_scene_close(stage_scene *s) {
    rank_close(&s->before);
    kvf_request_free(s->request);
    kvf_plan_free(s->plan);
    stage_world_close(s->w);
}

/** D pulls the request, or P pushes it, packed. */
static inline kvf_move *stage_scene_begin(const stage_scene *s, kvf_direction direction, uint32_t priority) {
    const kvf_move_options options = {
        .struct_size = sizeof options, .way = KVF_WAY_PACKED, .priority = priority};
    kvf_move *move = NULL;
    if (direction == KVF_READ)
        assert_ok(kvf_stage_pull(s->d->stage, s->request, s->d->peers, &options, &move));
    else
        assert_ok(kvf_stage_push(s->p->stage, s->request, 0, s->p->peers[0], &options, &move));
    return move;
}

#endif
