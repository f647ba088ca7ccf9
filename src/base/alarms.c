#include "base/alarms.h"

#define FIRST_ROOM 16u

kvf_status kvf_alarms_join(kvf_alarms *all, kvf_alarm *alarm) {
    if (all->joined + 2 > all->room) {
        const size_t room = all->room ? 2 * all->room : FIRST_ROOM;
        kvf_alarm **heap = kvf_resize(all->heap, room, sizeof(kvf_alarm *));
        if (!heap)
            return kvf_nomem("a time");
        all->heap = heap;
        all->room = room;
    }
    all->joined++;
    *alarm = (kvf_alarm){.joined = true};
    return KVF_OK;
}

static bool is_before(const kvf_alarm *a, const kvf_alarm *b) {
    return a->at < b->at || (a->at == b->at && a->turn < b->turn);
}

static void put(kvf_alarms *all, kvf_alarm *alarm, size_t place) {
    all->heap[place] = alarm;
    alarm->place = place;
}

/* Moves a alarm from a place, which is free, to where it belongs. */
static void sift(kvf_alarms *all, kvf_alarm *alarm, size_t place) {
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
    kvf_alarm *last = all->heap[all->count--];
    alarm->place = 0;
    if (last != alarm)
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
    sift(all, alarm, place);
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
