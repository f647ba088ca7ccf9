/*
 * Things that are due at different times, and the one that is due first: a heap.
 */
#ifndef KVF_ALARMS_H
#define KVF_ALARMS_H

#include "base/base.h"

/** When something is due; part of its owner's struct, which must not move in memory. Zeroed: it is in no heap. */
typedef struct kvf_alarm {
    uint64_t at;
    uint64_t turn; /* of those due at the same time, the one that was set first is first */
    size_t place;  /* in the heap, from 1 on; 0: never due */
    bool joined;
} kvf_alarm;

/* Times stand in the heap, so that alarms, which are all over memory, are looked at where times are equal only. */
struct kvf_alarm_place {
    uint64_t at;
    kvf_alarm *alarm;
};

/** Zeroed: empty. */
typedef struct kvf_alarms {
    struct kvf_alarm_place *heap; /* [place]; place 0 is not used */
    size_t count, room, joined;
    uint64_t turns;
} kvf_alarms;

/** Makes room for an alarm, which is never due at first, so that setting it cannot fail. KVF_E_NOMEM. */
kvf_status kvf_alarms_join(kvf_alarms *all, kvf_alarm *alarm);

/** Takes an alarm out for good; one that has not joined is accepted. */
void kvf_alarms_leave(kvf_alarms *all, kvf_alarm *alarm);

/** Sets when it is due, instead of when it was; UINT64_MAX: never. */
void kvf_alarm_set(kvf_alarms *all, kvf_alarm *alarm, uint64_t at);

/** The same, unless it is due earlier already. */
static inline void kvf_alarm_by(kvf_alarms *all, kvf_alarm *alarm, uint64_t at) {
    if (alarm->place == 0 || at < alarm->at)
        kvf_alarm_set(all, alarm, at);
}

/** The alarm that is due first; NULL: none is due ever. */
static inline kvf_alarm *kvf_alarms_first(const kvf_alarms *all) {
    return all->count > 0 ? all->heap[1].alarm : NULL;
}

/** When that is; UINT64_MAX: never. */
static inline uint64_t kvf_alarms_next(const kvf_alarms *all) {
    return all->count > 0 ? all->heap[1].at : UINT64_MAX;
}

/** All alarms have left. */
void kvf_alarms_free(kvf_alarms *all);

#endif
