#include "agent_on_devices.h"

#include <poll.h>
#include <stdio.h>

#include "cuda/device_image.h"

struct placing placing;
static uint32_t d_placed;

static kvf_memory place(const char *engine, uint64_t bytes, void **seen) {
    const bool is_p = engine[0] == 'P';
    if (is_p ? placing.p_on_host : placing.d_on_host) {
        *seen = calloc(1, bytes);
        assert_non_null(*seen);
        return (kvf_memory){.struct_size = sizeof(kvf_memory), .address = *seen, .bytes = bytes};
    }
    const uint32_t d_device = placing.d_on_both && d_placed++ % 2 ? 0 : 1;
    kvf_memory memory = device_memory(is_p ? 0 : d_device, bytes, seen);
    memory.withheld = !placing.shown;
    return memory;
}

static void free_host(world_engine *engine) {
    for (uint32_t r = 0; r < WORLD_MAX_RANKS; r++)
        for (uint32_t i = 0; i < WORLD_MAX_REGIONS; i++) {
            free(engine->memory[r][i]);
            engine->memory[r][i] = NULL;
        }
}

void close_on_devices(world *w) {
    devices_hasten(); /* a real driver frees memory only when no work is left */
    world_quiet(w);
    world_engine p = w->p, d = w->d;
    world_close(w);
    if (placing.p_on_host)
        free_host(&p);
    if (placing.d_on_host)
        free_host(&d);
    devices_free();
    placing = (struct placing){0};
}

bool devices_are_there_for_agents(void) {
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return false;
    }
    devices_open();
    world_place_memory(place);
    world_copies_memory(devices_get, devices_put);
    return true;
}

/* Makes progress while the descriptor of an agent is readable, also after some milliseconds. */
void assert_falls_silent(kvf_agent *agent) {
    struct pollfd fd = {kvf_agent_event_fd(agent), POLLIN, 0};
    kvf_event event = {.struct_size = sizeof event};
    for (uint32_t rounds = 0; poll(&fd, 1, 10) > 0; rounds++) {
        assert_true(rounds < 10000);
        assert_ok(kvf_agent_progress(agent, NULL));
        while (kvf_agent_next_event(agent, &event) == KVF_OK) {
        }
    }
}

int leave_nothing_held_up(void **state) {
    devices_hasten();
    return world_is_real(state);
}
