/* A contact that tells of thousands of ranks, as it is met: in bounded steps, one round after the other. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "agent/agent.h"
#include "agent/remote.h"
#include "agent_net.h"
#include "agent_world.h"

#define RANKS 20000u

typedef struct scene {
    kvf_model *model;
    kvf_engine *ours, *theirs;
    kvf_agent *contact, *agent;
    void *memory[4];
} scene;

static double processor_ms(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void introduce_all(const scene *s) {
    for (uint32_t rank = 0; rank < kvf_engine_rank_count(s->theirs); rank++) {
        kvf_wire_buffer shard, bytes;
        assert_ok(kvf_wire_encode_shard(kvf_engine_shard(s->theirs, rank), &shard));
        kvf_introduction intro = {.engine = "P",
                                  .incarnation = rank + 1,
                                  .rank = rank,
                                  .rank_count = kvf_engine_rank_count(s->theirs),
                                  .endpoint = "tcp://10.1.2.3:4567",
                                  .public_key = "",
                                  .shard = {shard.data, shard.size},
                                  .facts = s->agent->facts};
        memcpy(intro.digest, s->agent->digest, sizeof intro.digest);
        assert_ok(kvf_wire_encode_introduction(&intro, &bytes));
        assert_ok(kvf_agent_introduce(s->contact, bytes.data, bytes.size));
        kvf_wire_buffer_free(&shard);
        kvf_wire_buffer_free(&bytes);
    }
}

static void open_scene(scene *s, uint32_t our_ranks, uint32_t ranks, uint32_t shares) {
    net_reset();
    *s = (scene){.model = attention(2, 2, 4)};
    assert_ok(kvf_engine_build(s->model, ENGINE(.name = "D", .tp_size = our_ranks, .all = {.block_count = 4}), &s->ours));
    assert_ok(kvf_engine_build(
        s->model, ENGINE(.name = "P", .tp_size = ranks, .dcp_size = shares, .all = {.block_count = 4}), &s->theirs));
    assert_ok(kvf_agent_open_in(&net_surroundings, s->ours, 0, NULL, &s->agent));
    assert_ok(kvf_agent_open_in(&net_surroundings, NULL, 0, NULL, &s->contact));
    introduce_all(s);
}

static void close_scene(scene *s) {
    kvf_agent_close(s->agent);
    kvf_agent_close(s->contact);
    kvf_engine_free(s->ours);
    kvf_engine_free(s->theirs);
    kvf_model_free(s->model);
}

static void run(scene *s, uint64_t *steps, double *longest) {
    kvf_contact contact = {.engine = "P", .endpoint = kvf_agent_endpoint(s->contact)};
    kvf_remote *remote;
    bool busy;
    assert_ok(kvf_remote_take(s->agent, &contact, &remote));
    *steps = 0;
    *longest = 0;
    for (uint32_t i = 0; i < 100000 && !remote->ready && !remote->stale; i++) {
        assert_ok(kvf_agent_progress(s->contact, &busy));
        double begun = processor_ms();
        assert_ok(kvf_agent_progress(s->agent, &busy));
        double spent = processor_ms() - begun;
        *longest = spent > *longest ? spent : *longest;
        net_advance(1000);
    }
    assert_true(remote->ready);
    kvf_remote_drop(remote);
}

static void measure(void **state) {
    (void)state;
    for (uint32_t ours = 1; ours <= 8; ours *= 8)
        for (uint32_t shares = 1; shares <= RANKS / 2; shares *= RANKS / 2) {
            scene s;
            uint64_t steps;
            double longest;
            open_scene(&s, ours, RANKS, shares);
            double begun = processor_ms();
            run(&s, &steps, &longest);
            fprintf(stderr, "%u ours, %u shares: %.1f ms in all, longest round %.1f ms\n", ours, shares, processor_ms() - begun, longest);
            close_scene(&s);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(measure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
