/* Heartbeats for waiting requests, so that their producers do not free the blocks. */
#include <stdlib.h>

#include "schedule/schedule.h"

static int compare_beats(const void *a, const void *b) {
    const kvf_heartbeat *left = a, *right = b;
    int difference = strcmp(left->engine, right->engine);
    if (!difference)
        difference = strcmp(left->endpoint, right->endpoint);
    if (!difference)
        difference = strcmp(left->public_key, right->public_key);
    return difference ? difference
                      : kvf_compare_request_keys(&(kvf_request_key){left->transfer_id, 0},
                                                 &(kvf_request_key){right->transfer_id, 0});
}

kvf_status kvf_schedule_heartbeats(kvf_schedule *s, uint64_t now_ns, const kvf_heartbeat **beats,
                                   size_t *count) {
    if (!s || !beats || !count)
        return kvf_fail(KVF_E_INVALID, "kvf_schedule_heartbeats: schedule, beats or count is NULL");
    kvf_schedule_release_results(s);
    kvf_heartbeat *list = kvf_resize(s->beats, s->record_count, sizeof *list);
    if (!list)
        return kvf_nomem("heartbeats");
    s->beats = list;
    size_t n = 0;
    for (record *r = s->records; r; r = r->next) {
        load_part *load = &r->load;
        if (!s->options.heartbeats || load->state != PART_WAITING || load->push ||
            load->next_beat_ns > now_ns)
            continue;
        list[n++] = (kvf_heartbeat){.engine = load->engine,
                                    .endpoint = load->endpoint,
                                    .public_key = load->public_key,
                                    .transfer_id = load->id};
        load->alive = true;
        load->next_beat_ns = kvf_add_or_most(now_ns, s->options.heartbeat_ns);
    }
    qsort(list, n, sizeof *list, compare_beats);
    *beats = list;
    *count = n;
    return KVF_OK;
}
