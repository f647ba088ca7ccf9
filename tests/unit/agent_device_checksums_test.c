/*
 * Agents whose caches are in device memory, which devices hash: cells are verified, and what fails is named.
 */
#include <unistd.h>

#include "agent/agent.h"
#include "agent_letters.h"
#include "agent_on_devices.h"

/* ---- checksums ------------------------------------------------------------------------------------ */

/* Which memory a test uses: "shm" and "cuda" are those transports. */
static void choose_memory(const char *name, kvf_agent_options *options) {
    const bool both = strcmp(name, "D on both devices") == 0;
    if (both)
        DEVICES_ARE_SEVERAL();
    placing.d_on_both = both;
    placing.shown = strcmp(name, "shm") != 0;
    placing.p_on_host = strcmp(name, "P on the host") == 0;
    *options = (kvf_agent_options){.struct_size = sizeof *options, .verify = true};
    options->transport = strcmp(name, "shm") == 0 ? "shm" : strcmp(name, "cuda") == 0 ? "cuda" : "auto";
}

typedef struct checked {
    world w;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
} checked;

/* A request whose bytes have arrived, and whose first questions for checksums are kept. */
static void stop_before_checking(checked *c, const char *memory, bool push) {
    kvf_agent_options options;
    choose_memory(memory, &options);
    world_open_model(&c->w, attention(4, 8, 8), TP2, TP2_D, &options);
    world_request_make(&c->w, &c->w.p, "a", 50, 0, 1, &c->held);
    world_request_make(&c->w, &c->w.d, "a", 50, 3, 1, &c->wanted);
    world_fill(&c->w, &c->w.p, &c->held, 1);
    letters_begin();
    letters_rule(LETTERS_KEEP, NULL, KVF_MESSAGE_CALL, KVF_CALL_CHECKSUM);
    if (push) {
        world_push(&c->w.p, &c->held, c->theirs);
        world_ready(&c->w.p, c->theirs);
        world_expect(&c->w.d, &c->wanted, &c->w.p, c->ours);
    } else {
        world_hold(&c->w.p, &c->held, c->theirs);
        world_pull(&c->w.d, &c->wanted, &c->w.p, c->ours);
    }
    world_until(&c->w, letters_met() >= c->w.d.rank_count);
    letters_no_rules();
}

static void end_check(checked *c) {
    letters_end();
    close_on_devices(&c->w);
}

static void cells_of_devices_are_verified(void **state) {
    for (int push = 0; push < 2; push++) {
        checked c;
        const size_t left = devices_left();
        stop_before_checking(&c, *state, push);
        letters_deliver();
        world_all_done(&c.w, &c.w.d, c.ours);
        world_all_done(&c.w, &c.w.p, c.theirs);
        assert_int_equal(world_wrong_cells(&c.w, &c.w.d, &c.wanted, 1), 0);
        end_check(&c);
        assert_int_equal(devices_left(), left);
    }
}

/* The process has closed its standard input, whose number the first timer that is opened gets. */
static void an_agent_opens_one_timer_for_all_checksums_also_as_descriptor_0(void **state) {
    checked c;
    stop_before_checking(&c, *state, false);
    const int kept = dup(STDIN_FILENO);
    (void)close(STDIN_FILENO);
    letters_deliver();
    world_all_done(&c.w, &c.w.d, c.ours);
    world_all_done(&c.w, &c.w.p, c.theirs);
    uint32_t found = 0, set = 0;
    for (uint32_t i = 0; i < 4; i++) {
        const kvf_looks *looks = &(i % 2 ? &c.w.d : &c.w.p)->agents[i / 2]->hashing_looks;
        found += looks->fd == 0;
        set += looks->fd == 0 && looks->pause_ns > 0;
    }
    end_check(&c);
    if (kept >= 0) {
        assert_int_equal(dup2(kept, STDIN_FILENO), STDIN_FILENO);
        (void)close(kept);
    }
    assert_int_equal(found, 1);
    assert_int_equal(set, 1); /* without it, nothing would wake the agent when the device has finished */
}

/* The control: a bit of the producer's memory, and one of the consumer's. */
static void a_wrong_cell_of_a_device_is_named(void **state) {
    for (int push = 0; push < 2; push++)
        for (int ours = 0; ours < 2; ours++) {
            checked c;
            stop_before_checking(&c, *state, push);
            const world_cell at = {.rank = 1, .layer = 2, .part = 1, .step = 37, .unit = 5};
            world_flip(ours ? &c.w.d : &c.w.p, ours ? &c.wanted : &c.held, at);
            letters_deliver();
            const world_outcome *failed = world_failed(&c.w, c.w.d.agents[1], c.ours[1], KVF_E_MISMATCH);
            if (!strstr(failed->detail, "group full, layer 2, part v, token 37, unit 5 "))
                fail_msg("%s", failed->detail);
            (void)world_done(&c.w, c.w.d.agents[0], c.ours[0]);
            if (!push) /* the hold remains for another pull */
                assert_ok(kvf_agent_cancel(c.w.p.agents[1], c.theirs[1]));
            for (uint32_t r = 0; r < 2; r++)
                (void)world_next(&c.w, c.w.p.agents[r], c.theirs[r]);
            end_check(&c);
        }
}

/* The consumer's request ends with its deadline; the device is awaited before its memory is given back, and nobody is
 * busy meanwhile. */
static void checksums_that_a_device_does_not_finish_end_with_the_request(void **state) {
    checked c;
    DEVICES_ARE_STAND_INS();
    stop_before_checking(&c, *state, false);
    devices_delay(HOUR_NS);
    letters_deliver();
    world_run_for(&c.w, SECOND / 10);
    world_time_jumps();
    for (uint32_t r = 0; r < c.w.d.rank_count; r++)
        (void)world_failed(&c.w, c.w.d.agents[r], c.ours[r], KVF_E_TIMEOUT);
    for (uint32_t r = 0; r < c.w.p.rank_count; r++) {
        kvf_agent *agent = c.w.p.agents[r];
        (void)world_next(&c.w, agent, c.theirs[r]);
        assert_falls_silent(agent);
        assert_fails(kvf_agent_unregister_region(agent, 0), KVF_E_AGAIN, "computes checksums");
    }
    devices_delay(0);
    devices_hasten();
    end_check(&c);
}

static void a_refusal_of_the_driver_fails_the_request(void **state) {
    checked c;
    stop_before_checking(&c, *state, false);
    devices_fail("cuLaunchKernel", CUDA_ERROR_OUT_OF_MEMORY, UINT32_MAX);
    letters_deliver();
    for (uint32_t r = 0; r < c.w.d.rank_count; r++) {
        const world_outcome *failed = world_next(&c.w, c.w.d.agents[r], c.ours[r]);
        assert_int_equal(failed->kind, KVF_EVENT_FAILED);
        assert_non_null(strstr(failed->detail, "starting checksums: CUDA_ERROR_OUT_OF_MEMORY"));
    }
    devices_fail("", 0, 0);
    for (uint32_t r = 0; r < c.w.p.rank_count; r++) {
        assert_ok(kvf_agent_cancel(c.w.p.agents[r], c.theirs[r]));
        (void)world_next(&c.w, c.w.p.agents[r], c.theirs[r]);
    }
    end_check(&c);
}

int main(void) {
    static char shm[] = "shm", cuda[] = "cuda", p_host[] = "P on the host", d_both[] = "D on both devices";
    const struct CMUnitTest tests[] = {
        {"cells_of_devices_are_verified (shm)", cells_of_devices_are_verified, SIMULATED, shm},
        {"cells_of_devices_are_verified (cuda)", cells_of_devices_are_verified, SIMULATED, cuda},
        {"cells_of_devices_are_verified (P on the host)", cells_of_devices_are_verified, SIMULATED, p_host},
        {"cells_of_devices_are_verified (D on both devices)", cells_of_devices_are_verified, SIMULATED,
         d_both},
        {"an_agent_opens_one_timer_for_all_checksums_also_as_descriptor_0",
         an_agent_opens_one_timer_for_all_checksums_also_as_descriptor_0, SIMULATED, shm},
        {"a_wrong_cell_of_a_device_is_named (shm)", a_wrong_cell_of_a_device_is_named, SIMULATED, shm},
        {"a_wrong_cell_of_a_device_is_named (cuda)", a_wrong_cell_of_a_device_is_named, SIMULATED, cuda},
        {"a_wrong_cell_of_a_device_is_named (P on the host)", a_wrong_cell_of_a_device_is_named, SIMULATED,
         p_host},
        {"a_wrong_cell_of_a_device_is_named (D on both devices)", a_wrong_cell_of_a_device_is_named,
         SIMULATED, d_both},
        {"checksums_that_a_device_does_not_finish_end_with_the_request",
         checksums_that_a_device_does_not_finish_end_with_the_request, SIMULATED, cuda},
        {"a_refusal_of_the_driver_fails_the_request", a_refusal_of_the_driver_fails_the_request, SIMULATED,
         cuda},
    };
    if (!devices_are_there_for_agents())
        return 77;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
