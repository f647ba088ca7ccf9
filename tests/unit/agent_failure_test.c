/* The events of requests whose bytes could not be moved name the transport's own reason, and the peer. */
#include "agent_world.h"

#include "faulty_fabric.h"

#define P ENGINE(.name = "P", .all = {.block_count = 64})
#define D ENGINE(.name = "D", .all = {.block_count = 64})

static void check_sentence(const world_outcome *failed, const char *begin, const char *peer) {
    if (strncmp(failed->detail, begin, strlen(begin)) != 0 || !strstr(failed->detail, peer) ||
        !strstr(failed->detail, "faulty: ") || !strstr(failed->detail, "the schedule says so"))
        fail_msg("%s", failed->detail);
}

/* Opens a world in which every transport operation ends with KVF_E_IO. */
static void world_open_faulty(world *w) {
    faulty_options options = {.seed = 1, .per_mille = {[FAULTY_NOTHING_MOVED] = 1000}, .turns = 1};
    faulty_install(&options);
    world_open_model(w, attention(2, 2, 8), P, D, NULL);
}

static void a_pull_that_cannot_read_says_why(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    world_open_faulty(&w);
    world_request_make(&w, &w.p, "one", 64, 0, 1, &held);
    world_request_make(&w, &w.d, "one", 64, 0, 1, &wanted);
    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &wanted, &w.p, pulls);
    const world_outcome *failed = world_failed(&w, w.d.agents[0], pulls[0], KVF_E_IO);
    check_sentence(failed, "reading from P failed with KVF_E_IO after 0 bytes: ", "reading from P#0@");
    world_close(&w);
    faulty_remove();
}

static void a_push_that_cannot_write_says_why_on_both_sides(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
    world_open_faulty(&w);
    world_request_make(&w, &w.p, "one", 64, 0, 1, &held);
    world_request_make(&w, &w.d, "one", 64, 0, 1, &wanted);
    world_push(&w.p, &held, pushes);
    world_expect(&w.d, &wanted, &w.p, expects);
    world_ready(&w.p, pushes);
    check_sentence(
        world_failed(&w, w.d.agents[0], expects[0], KVF_E_IO),
        "P rank 0: writing to rank 0 of D failed with KVF_E_IO after 0 bytes: ", "writing to D#0@");
    check_sentence(world_failed(&w, w.p.agents[0], pushes[0], KVF_E_IO),
                   "writing to rank 0 of D failed with KVF_E_IO after 0 bytes: ", "writing to D#0@");
    world_close(&w);
    faulty_remove();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pull_that_cannot_read_says_why),
        cmocka_unit_test(a_push_that_cannot_write_says_why_on_both_sides),
    };
    return cmocka_run_group_tests_name("agent_failure", tests, world_is_simulated, NULL);
}
