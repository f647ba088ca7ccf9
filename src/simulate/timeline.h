/*
 * Simulated time: happenings in their order, and a clock that stands at the one that happens.
 */
#ifndef KVF_SIMULATE_TIMELINE_H
#define KVF_SIMULATE_TIMELINE_H

#include "base/alarms.h"
#include "base/clock.h"

typedef struct kvf_happening kvf_happening;

/** Something that happens at a time, part of its owner's struct, which must not move in memory. */
struct kvf_happening {
    kvf_alarm alarm; /* first, so that the two can be cast */
    void (*happen)(kvf_happening *happening);
};

typedef struct kvf_timeline {
    uint64_t now;
    kvf_alarms alarms;
} kvf_timeline;

/** Makes a happening, which is not set. KVF_E_NOMEM; setting it never fails. */
kvf_status kvf_happening_make(kvf_timeline *line, kvf_happening *happening,
                              void (*happen)(kvf_happening *happening));

/** Ends its use; one that was never made (zeroed) is accepted. */
void kvf_happening_drop(kvf_timeline *line, kvf_happening *happening);

/** Sets when it happens, instead of when it was to happen; not before now. UINT64_MAX: never. */
void kvf_happening_set(kvf_timeline *line, kvf_happening *happening, uint64_t at);

/** The same, unless it happens earlier already. */
void kvf_happening_by(kvf_timeline *line, kvf_happening *happening, uint64_t at);

/** Lets the next thing happen. False: there is none. */
bool kvf_timeline_step(kvf_timeline *line);

void kvf_timeline_free(kvf_timeline *line);

#endif
