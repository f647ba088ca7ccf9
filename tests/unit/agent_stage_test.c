/* Requests between agents that go packed, in virtual time. */
#include <string.h>

#include "agent_net.h"
#include "agent_world.h"

#define TP2 ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64})
#define TP4                                                                                                  \
    ENGINE(.name = "D", .tp_size = 4, .all = {.tokens_per_block = 8, .block_count = 128, .order = "BLHNP"})

static kvf_agent_options options_of(kvf_way way) {
    return (kvf_agent_options){.struct_size = sizeof(kvf_agent_options),
                               .transport = "inproc",
                               .way = way,
                               .slot_bytes = 4096,
                               .arena_bytes = 64 * 4096};
}

static uint64_t all_packed(const world_engine *e) {
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < e->rank_count; r++)
        bytes += world_stats(e->agents[r]).bytes_packed;
    return bytes;
}

static uint64_t all_read(const world_engine *e) {
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < e->rank_count; r++)
        bytes += world_stats(e->agents[r]).bytes_read;
    return bytes;
}

static void pull_everything(world *w, const char *id, uint64_t tokens, uint32_t seed) {
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    world_request_make(w, &w->p, id, tokens, 3, 2, &held);
    world_request_make(w, &w->d, id, tokens, 7, 3, &wanted);
    world_fill(w, &w->p, &held, seed);
    world_hold(&w->p, &held, holds);
    world_pull(&w->d, &wanted, &w->p, pulls);
    world_all_done(w, &w->d, pulls);
    world_all_done(w, &w->p, holds);
    assert_int_equal(world_wrong_cells(w, &w->d, &wanted, seed), 0);
}

static void a_pull_goes_packed_where_that_is_wanted(void **state) {
    (void)state;
    static const kvf_way ways[] = {KVF_WAY_PACKED, KVF_WAY_DIRECT, KVF_WAY_AUTO};
    for (size_t i = 0; i < COUNT_OF(ways); i++) {
        world w;
        const kvf_agent_options options = options_of(ways[i]);
        world_open_model(&w, attention(4, 8, 8), TP2, TP4, &options);
        pull_everything(&w, "a", 100, 1);
        pull_everything(&w, "b", 37, 2);
        uint64_t read = all_read(&w.d);
        assert_true(read > 0);
        assert_int_equal(all_packed(&w.d), ways[i] == KVF_WAY_PACKED ? read : 0);
        world_quiet(&w);
        world_close(&w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pull_goes_packed_where_that_is_wanted),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, world_is_real);
}
