#include "simulate/timeline.h"

kvf_status kvf_happening_make(kvf_timeline *line, kvf_happening *happening, void (*happen)(kvf_happening *)) {
    happening->happen = happen;
    return kvf_alarms_join(&line->alarms, &happening->alarm);
}

void kvf_happening_drop(kvf_timeline *line, kvf_happening *happening) {
    kvf_alarms_leave(&line->alarms, &happening->alarm);
}

void kvf_happening_set(kvf_timeline *line, kvf_happening *happening, uint64_t at) {
    kvf_alarm_set(&line->alarms, &happening->alarm, kvf_max_u64(at, line->now));
}

void kvf_happening_by(kvf_timeline *line, kvf_happening *happening, uint64_t at) {
    kvf_alarm_by(&line->alarms, &happening->alarm, kvf_max_u64(at, line->now));
}

bool kvf_timeline_step(kvf_timeline *line) {
    kvf_happening *first = (kvf_happening *)kvf_alarms_first(&line->alarms);
    if (!first)
        return false;
    KVF_ASSERT(first->alarm.at >= line->now);
    line->now = first->alarm.at;
    kvf_alarm_set(&line->alarms, &first->alarm, UINT64_MAX);
    first->happen(first);
    return true;
}

void kvf_timeline_free(kvf_timeline *line) {
    kvf_alarms_free(&line->alarms);
    *line = (kvf_timeline){0};
}
