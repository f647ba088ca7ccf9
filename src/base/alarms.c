#include "base/alarms.h"

#define FIRST_ROOM 16u

kvf_status kvf_alarms_join(kvf_alarms *all, kvf_alarm *alarm) {
    if (all->joined + 2 > all->room) {
        const size_t room = all->room ? 2 * all->room : FIRST_ROOM;
        struct kvf_alarm_place *heap = kvf_resize(all->heap, room, sizeof *heap);
        if (!heap)
            return kvf_nomem("a time");
        all->heap = heap;
        all->room = room;
    }
    all->joined++;
    *alarm = (kvf_alarm){.joined = true};
    return KVF_OK;
}

static bool is_before(struct kvf_alarm_place a, struct kvf_alarm_place b) {
    return a.at < b.at || (a.at == b.at && a.alarm->turn < b.alarm->turn);
}

static void put(kvf_alarms *all, struct kvf_alarm_place alarm, size_t place) {
    all->heap[place] = alarm;
    alarm.alarm->place = place;
}

/* Moves an alarm from a place, which is free, to where it belongs. */
static void sift(kvf_alarms *all, struct kvf_alarm_place alarm, size_t place) {
    while (place > 1 && is_before(alarm, all->heap[place / 2])) {
        put(all, all->heap[place / 2], place);
        place /= 2;
    }
    for (size_t child; (child = 2 * place) <= all->count; place = child) {
        if (child < all->count && is_before(all->heap[child + 1], all->heap[child]))
            child++;
        if (!is_before(all->heap[child], alarm))
            break;
        put(all, all->heap[child], place);
    }
    put(all, alarm, place);
}

static void take_out(kvf_alarms *all, kvf_alarm *alarm) {
    const size_t place = alarm->place;
    const struct kvf_alarm_place last = all->heap[all->count--];
    alarm->place = 0;
    if (last.alarm != alarm)
        sift(all, last, place);
}

void kvf_alarm_set(kvf_alarms *all, kvf_alarm *alarm, uint64_t at) {
    KVF_ASSERT(alarm->joined);
    if (at == UINT64_MAX) {
        if (alarm->place)
            take_out(all, alarm);
        return;
    }
    const size_t place = alarm->place ? alarm->place : ++all->count;
    alarm->at = at;
    alarm->turn = ++all->turns;
    sift(all, (struct kvf_alarm_place){at, alarm}, place);
}

void kvf_alarms_leave(kvf_alarms *all, kvf_alarm *alarm) {
    if (!alarm->joined)
        return;
    kvf_alarm_set(all, alarm, UINT64_MAX);
    alarm->joined = false;
    all->joined--;
}

void kvf_alarms_free(kvf_alarms *all) {
    KVF_ASSERT(all->joined == 0);
    kvf_free(all->heap);
    *all = (kvf_alarms){0};
}
