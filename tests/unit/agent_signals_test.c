/* Agents that their engine drives, on a thread that takes signals. */
#include "agent_world.h"
#include "signals.h"

static void a_pull_goes_well_though_signals_end_calls(void **state) {
    (void)state;
    static const char *const transports[] = {"messages", "shm"};
    for (unsigned i = 0; i < COUNT_OF(transports) * SIGNALS_PHASES; i++) {
        world w;
        signals_begin(i % SIGNALS_PHASES);
        world_open_model(&w, attention(2, 4, 8), ENGINE(.name = "P", .all = {.block_count = 16}),
                         ENGINE(.name = "D", .all = {.block_count = 16}),
                         &(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options),
                                                    .transport = transports[i / SIGNALS_PHASES]});
        world_pull_everything(&w, "a", 40, 1);
        world_quiet(&w);
        world_close(&w);
        signals_end();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pull_goes_well_though_signals_end_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
