/*
 * The usual scene for tests of agents: a world with one request that the producer has and the consumer wants.
 */
#ifndef KVF_TEST_AGENT_SCENE_H
#define KVF_TEST_AGENT_SCENE_H

#include "agent_world.h"

typedef struct scene {
    world w;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    kvf_agent *p, *d; /* rank 0 of either engine */
} scene;

/** Opens both engines; the world takes ownership of the model. The request has 50 tokens, in blocks 0 to 3 of the
 * producer, which are filled, and blocks 8 to 11 of the consumer. */
static inline void scene_open(scene *s, kvf_model *model, const kvf_engine_spec *p, const kvf_engine_spec *d,
                              const kvf_agent_options *options) {
    memset(s, 0, sizeof *s);
    world_open_model(&s->w, model, p, d, options);
    world_request_make(&s->w, &s->w.p, "a", 50, 0, 1, &s->held);
    world_request_make(&s->w, &s->w.d, "a", 50, 8, 1, &s->wanted);
    world_fill(&s->w, &s->w.p, &s->held, 1);
    s->wanted.request.contact = s->w.p.contact;
    s->p = s->w.p.agents[0];
    s->d = s->w.d.agents[0];
}

static inline void scene_close(scene *s) {
    world_quiet(&s->w);
    world_close(&s->w);
}

/** Lets the consumer pull the request from a producer that holds it. */
static inline void scene_pull(scene *s) {
    world_pull(&s->w.d, &s->wanted, &s->w.p, s->ours);
    world_all_done(&s->w, &s->w.d, s->ours);
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &s->wanted, 1), 0);
}

#endif
