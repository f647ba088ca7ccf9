/*
 * Two engines of agents whose caches are in device memory, of the stand-in for the CUDA driver or of a real one
 * (scripts/check-cuda). The engine P is on the first device and D on the second, unless a test says otherwise before it
 * opens them.
 */
#ifndef AGENT_ON_DEVICES_H
#define AGENT_ON_DEVICES_H

#include "agent_world.h"
#include "devices.h"

#define TP2 ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64})
#define TP4                                                                                                  \
    ENGINE(.name = "D", .tp_size = 4, .all = {.tokens_per_block = 8, .block_count = 128, .order = "BLHNP"})

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define TP2_D ENGINE(.name = "D", .tp_size = 2, .all = {.block_count = 64, .order = "L|BPHN"})

#define HOUR_NS 3600000000000ull

/** Says where the next world places its caches; close_on_devices() clears it. */
extern struct placing {
    bool p_on_host, d_on_host;
    bool shown;     /**< device memory is not withheld */
    bool d_on_both; /**< D's regions are on the second device and the first in turn */
} placing;

/** Has worlds place their memory on devices. False, with a message: this build has no device code. */
bool devices_are_there_for_agents(void);

/** Closes a world, and frees its memory. */
void close_on_devices(world *w);

/** Makes progress while the descriptor of an agent is readable, and requires that it falls silent. */
void assert_falls_silent(kvf_agent *agent);

/** Of cmocka: a test that fails leaves no work on a device, for later ones would wait for it. */
int leave_nothing_held_up(void **state);

/** Setup and teardown of tests in simulated time. */
#define SIMULATED world_is_simulated_with_devices, leave_nothing_held_up

#endif
