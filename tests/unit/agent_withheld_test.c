/*
 * Host memory that an engine withholds from its peers: only its stage reaches it, and each side finds that out before
 * the first byte, whichever side meets the other and from whichever thread.
 */
#include <stdlib.h>

#include "agent/session.h"
#include "agent_world.h"
#include "transport/front.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})

static const char *withholder; /* the name of the engine */

static kvf_memory place(const char *engine, uint64_t bytes, void **seen) {
    *seen = calloc(1, bytes);
    assert_non_null(*seen);
    return (kvf_memory){.struct_size = sizeof(kvf_memory),
                        .address = *seen,
                        .bytes = bytes,
                        .withheld = strcmp(engine, withholder) == 0};
}

typedef struct scene {
    world w;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
} scene;

static void set_up(scene *s, const char *kind, const char *who) {
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = kind};
    withholder = who;
    world_place_memory(place);
    memset(s, 0, sizeof *s);
    world_open_model(&s->w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    world_request_make(&s->w, &s->w.p, "a", 50, 0, 1, &s->held);
    world_request_make(&s->w, &s->w.d, "a", 50, 8, 1, &s->wanted);
    world_fill(&s->w, &s->w.p, &s->held, 1);
    s->wanted.request.contact = s->w.p.contact;
}

static void free_memory(const world_engine *engine) {
    for (uint32_t r = 0; r < WORLD_MAX_RANKS; r++)
        for (uint32_t i = 0; i < WORLD_MAX_REGIONS; i++)
            free(engine->memory[r][i]);
}

static void tear_down(scene *s) {
    world_quiet(&s->w);
    world_engine p = s->w.p, d = s->w.d;
    world_close(&s->w);
    world_place_memory(NULL);
    free_memory(&p);
    free_memory(&d);
}

/* All bytes that the mover has moved must have gone packed. */
static void require_packed(scene *s, uint64_t moved, uint64_t packed) {
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &s->wanted, 1), 0);
    assert_true(world_wrong_cells(&s->w, &s->w.d, &s->wanted, 2) > 0);
    assert_true(moved > 0);
    assert_int_equal(packed, moved);
}

/* Meets the engine first: the agent then decides in the request's call, not in a round, before there is a connection to
 * the memory. */
static void meet(scene *s) {
    uint64_t ticket;
    assert_ok(kvf_agent_connect(s->w.d.agents[0], &s->w.p.contact, 0, &ticket));
    assert_int_equal(world_next(&s->w, s->w.d.agents[0], ticket)->kind, KVF_EVENT_PEER_READY);
}

static void pull_in(scene *s) {
    world_hold(&s->w.p, &s->held, s->theirs);
    world_pull(&s->w.d, &s->wanted, &s->w.p, s->ours);
    world_all_done(&s->w, &s->w.d, s->ours);
    world_all_done(&s->w, &s->w.p, s->theirs);
    const kvf_agent_stats stats = world_stats(s->w.d.agents[0]);
    require_packed(s, stats.bytes_read, stats.bytes_packed);
}

static void pull(const char *kind, const char *who, bool met) {
    scene s;
    set_up(&s, kind, who);
    if (met)
        meet(&s);
    pull_in(&s);
    tear_down(&s);
}

static void push_in(scene *s) {
    world_expect(&s->w.d, &s->wanted, &s->w.p, s->ours);
    world_push(&s->w.p, &s->held, s->theirs);
    world_ready(&s->w.p, s->theirs);
    world_all_done(&s->w, &s->w.d, s->ours);
    world_all_done(&s->w, &s->w.p, s->theirs);
    const kvf_agent_stats stats = world_stats(s->w.p.agents[0]);
    require_packed(s, stats.bytes_written, stats.bytes_packed);
}

static void push(const char *kind, const char *who, bool met) {
    scene s;
    set_up(&s, kind, who);
    if (met)
        meet(&s);
    push_in(&s);
    tear_down(&s);
}

static void withheld_memory_of_a_producer_is_pulled_packed(void **state) {
    pull(*state, "P", false);
    pull(*state, "P", true);
}

/* As if one kind of transport served the consumer's arena and another its regions, which otherwise takes a device. */
static void what_only_the_connection_shows_to_be_withheld_is_pulled_packed(void **state) {
    scene s;
    set_up(&s, *state, "P");
    s.w.d.agents[0]->transport->split = true;
    pull_in(&s);
    tear_down(&s);
}

/* The control: nobody withholds anything. */
static void what_the_connection_shows_to_be_within_reach_is_pulled_directly(void **state) {
    scene s;
    set_up(&s, *state, "");
    kvf_agent *d = s.w.d.agents[0];
    d->transport->split = true;
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    assert_int_equal(world_stats(d).bytes_packed, 0);
    assert_false(d->all_sessions->takes_flows); /* and P was not told of the stage */
    tear_down(&s);
}

/* Other memory of a peer then goes directly, as runs keep to a cap more exactly. */
static void withheld_memory_goes_packed_in_spite_of_a_cap(void **state) {
    for (int pushes = 0; pushes < 2; pushes++) {
        scene s;
        set_up(&s, *state, pushes ? "D" : "P");
        (pushes ? &s.held : &s.wanted)->request.bytes_per_second = 1u << 20;
        (pushes ? push_in : pull_in)(&s);
        tear_down(&s);
    }
}

static void into_what_a_consumer_withholds_is_pulled_packed(void **state) {
    pull(*state, "D", false);
    pull(*state, "D", true);
}

static void withheld_memory_of_a_producer_is_pushed_packed(void **state) {
    push(*state, "P", false);
    push(*state, "P", true); /* once failed: the consumer had not told the producer of its stage */
}

static void into_what_a_consumer_withholds_is_pushed_packed(void **state) {
    push(*state, "D", false);
    push(*state, "D", true);
}

/* It fails rather than go packed. */
static void what_a_consumer_wants_directly_is_not_pushed_packed(void **state) {
    scene s;
    set_up(&s, *state, "P");
    s.wanted.request.way = KVF_WAY_DIRECT;
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    const world_outcome *failed = world_failed(&s.w, s.w.d.agents[0], s.ours[0], KVF_E_UNSUPPORTED);
    if (!strstr(failed->detail, "D rank 0 accepts no flows"))
        fail_msg("%s", failed->detail);
    (void)world_failed(&s.w, s.w.p.agents[0], s.theirs[0], KVF_E_UNSUPPORTED);
    tear_down(&s);
}

int main(void) {
    static char shm[] = "shm", messages[] = "messages";
    const struct CMUnitTest tests[] = {
        {"withheld_memory_of_a_producer_is_pulled_packed (shm)",
         withheld_memory_of_a_producer_is_pulled_packed, NULL, NULL, shm},
        {"what_only_the_connection_shows_to_be_withheld_is_pulled_packed (shm)",
         what_only_the_connection_shows_to_be_withheld_is_pulled_packed, NULL, NULL, shm},
        {"what_the_connection_shows_to_be_within_reach_is_pulled_directly (shm)",
         what_the_connection_shows_to_be_within_reach_is_pulled_directly, NULL, NULL, shm},
        {"withheld_memory_goes_packed_in_spite_of_a_cap (shm)", withheld_memory_goes_packed_in_spite_of_a_cap,
         NULL, NULL, shm},
        {"into_what_a_consumer_withholds_is_pulled_packed (shm)",
         into_what_a_consumer_withholds_is_pulled_packed, NULL, NULL, shm},
        {"withheld_memory_of_a_producer_is_pushed_packed (shm)",
         withheld_memory_of_a_producer_is_pushed_packed, NULL, NULL, shm},
        {"into_what_a_consumer_withholds_is_pushed_packed (shm)",
         into_what_a_consumer_withholds_is_pushed_packed, NULL, NULL, shm},
        {"what_a_consumer_wants_directly_is_not_pushed_packed (shm)",
         what_a_consumer_wants_directly_is_not_pushed_packed, NULL, NULL, shm},
        {"withheld_memory_of_a_producer_is_pulled_packed (messages)",
         withheld_memory_of_a_producer_is_pulled_packed, NULL, NULL, messages},
        {"withheld_memory_of_a_producer_is_pushed_packed (messages)",
         withheld_memory_of_a_producer_is_pushed_packed, NULL, NULL, messages},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
