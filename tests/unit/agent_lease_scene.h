/*
 * Shared by the tests of leases, of doubt and of messages that go astray: the usual scene, with rules for messages
 * (agent_letters.h), and engines that can be stopped.
 */
#ifndef KVF_TEST_AGENT_LEASE_SCENE_H
#define KVF_TEST_AGENT_LEASE_SCENE_H

#include "agent_letters.h"
#include "agent_scene.h"

#define TP2 ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64})
#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define LEASE(ns)                                                                                            \
    (&(const kvf_agent_options){                                                                             \
        .struct_size = sizeof(kvf_agent_options), .lease_ns = (ns), .peer_timeout_ns = 100 * MS})

/** Opens the usual scene, of 4 layers and 8 heads, with rules for messages. */
static inline void lease_open(scene *s, const kvf_engine_spec *p, const kvf_engine_spec *d,
                              const kvf_agent_options *options) {
    scene_open(s, attention(4, 8, 8), p, d, options);
    letters_begin();
}

static inline void lease_close(scene *s) {
    letters_end();
    scene_close(s);
}

/* Lets a push and its expectation find each other; nothing is ready yet. */
static inline void lease_meet(scene *s) {
    letters_rule(LETTERS_PASS, s->p, KVF_MESSAGE_ANSWER, KVF_CALL_EXPECT);
    world_push(&s->w.p, &s->held, s->theirs);
    world_expect(&s->w.d, &s->wanted, &s->w.p, s->ours);
    world_until(&s->w, letters_met() >= 1);
}

/* Requires that another request goes well. */
static inline void lease_others_go_on(scene *s, const char *id) {
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    world_request_make(&s->w, &s->w.p, id, 50, 30, 1, &held);
    world_request_make(&s->w, &s->w.d, id, 50, 40, 1, &wanted);
    world_fill(&s->w, &s->w.p, &held, 5);
    held.request.deadline_ns = 20 * SECOND;
    world_hold(&s->w.p, &held, theirs);
    world_pull(&s->w.d, &wanted, &s->w.p, ours);
    world_all_done(&s->w, &s->w.d, ours);
    world_all_done(&s->w, &s->w.p, theirs);
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &wanted, 5), 0);
}

/* Stops the agent in `place`: it makes no progress until it is put back. */
static inline kvf_agent *lease_stop(kvf_agent **place) {
    kvf_agent *agent = *place;
    *place = NULL;
    return agent;
}

#endif
