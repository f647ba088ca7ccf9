/*
 * aggregator.json: adding up outputs of workers, reducing statistics, the requests of a step.
 *
 * The recording counts reports without regard to the worker that sent them, and drops a step in which the selected
 * worker has no output. The library is told to do the same, except that for suspects it handles such a step in its own
 * way.
 */
#include <string.h>

#include <kvferry/connector/step_requests.h>
#include <kvferry/connector/transfer_summary.h>
#include <kvferry/schedule.h>

#include "vectors.h"

/* ---- aggregate ------------------------------------------------------------------------------- */

static const char *const stats_fields[] = {
    "transfer_duration",     "post_duration",        "bytes_transferred",
    "num_descriptors",       "num_failed_transfers", "num_failed_notifications",
    "num_failed_handshakes", "num_kv_expired_reqs",  "num_notifications_after_expiry"};

static const kvf_request_key *read_keys(vector_case *c, json_object *output, const char *key, size_t *count) {
    if (!has_field(output, key))
        return NULL;
    json_object *list = read_field(c, output, key);
    *count = read_length(c, list);
    kvf_request_key *keys = case_memory(c, *count, sizeof *keys);
    for (size_t i = 0; i < *count; i++) {
        json_object *id = json_object_array_get_idx(list, i);
        keys[i] = (kvf_request_key){{json_object_get_string(id), (size_t)json_object_get_string_len(id)}, 0};
    }
    return keys;
}

static const kvf_group_block *read_invalid(vector_case *c, json_object *output, size_t *count) {
    if (!has_field(output, "invalid"))
        return NULL;
    kvf_ids ids = read_ids(c, read_field(c, output, "invalid"));
    kvf_group_block *blocks = case_memory(c, ids.count, sizeof *blocks);
    for (size_t i = 0; i < ids.count; i++)
        blocks[i].block = (uint32_t)ids.at[i];
    *count = ids.count;
    return blocks;
}

/* NULL: the worker has no output. Without the connector's part an output is empty. */
static const kvf_worker_output *read_output(vector_case *c, json_object *json) {
    if (!json)
        return NULL;
    kvf_worker_output *output = case_memory(c, 1, sizeof *output);
    output->struct_size = sizeof *output;
    output->sent = read_keys(c, json, "sending", &output->sent_count);
    output->received = read_keys(c, json, "recving", &output->received_count);
    output->failed = read_keys(c, json, "failed", &output->failed_count);
    output->invalid = read_invalid(c, json, &output->invalid_count);
    output->expected = read_u32_or(c, json, "expected", 0);
    output->riders = (has_field(json, "stats") ? KVF_RIDER_STATS : 0) |
                     (has_field(json, "meta") ? KVF_RIDER_META : 0) |
                     (has_field(json, "events") ? KVF_RIDER_EVENTS : 0);
    return output;
}

static json_object *names(const kvf_request_key *keys, size_t count) {
    json_object *list = json_object_new_array();
    for (size_t i = 0; i < count; i++)
        json_object_array_add(list, json_object_new_string_len(keys[i].id.data, (int)keys[i].id.size));
    return list;
}

static json_object *names_or_null(const kvf_request_key *keys, size_t count) {
    return count ? names(keys, count) : NULL;
}

static json_object *blocks(const kvf_group_block *list, size_t count) {
    json_object *array = json_object_new_array();
    for (size_t i = 0; i < count; i++)
        json_object_array_add(array, json_u64(list[i].block));
    return array;
}

/* Appends a worker's values under `key` to a list. */
static void append_rider(json_object *list, json_object *outputs, uint32_t worker, const char *rider,
                         const char *key) {
    json_object *from = json_object_object_get(json_object_array_get_idx(outputs, worker), rider);
    if (key)
        from = json_object_object_get(from, key);
    for (size_t i = 0; from && i < json_object_array_length(from); i++)
        json_object_array_add(list, json_object_get(json_object_array_get_idx(from, i)));
}

static json_object *merged(json_object *outputs, const uint32_t *workers, uint32_t count, const char *rider,
                           const char *key) {
    json_object *list = json_object_new_array();
    for (uint32_t i = 0; i < count; i++)
        append_rider(list, outputs, workers[i], rider, key);
    return list;
}

static json_object *merged_stats(json_object *outputs, const kvf_aggregate *sum) {
    json_object *stats = json_object_new_object();
    for (size_t i = 0; i < sizeof stats_fields / sizeof *stats_fields; i++)
        with(stats, stats_fields[i],
             merged(outputs, sum->with_stats, sum->with_stats_count, "stats", stats_fields[i]));
    return stats;
}

static json_object *merged_events(json_object *outputs, const kvf_aggregate *sum) {
    json_object *events = json_object_new_object();
    with(events, "items", merged(outputs, sum->with_events, sum->with_events_count, "events", NULL));
    return with(events, "workers", json_u64(sum->with_events_count));
}

static json_object *json_aggregate(json_object *outputs, const kvf_aggregate *sum, bool tells_failed) {
    json_object *out = json_object_new_object();
    with(out, "from_rank", sum->output == KVF_NO_WORKER ? NULL : json_u64(sum->output));
    with(out, "sending", names_or_null(sum->sent, sum->sent_count));
    with(out, "recving", names_or_null(sum->received, sum->received_count));
    with(out, "invalid", blocks(sum->invalid, sum->invalid_count));
    with(out, "expected", json_u64(sum->expected));
    if (tells_failed)
        with(out, "failed", names(sum->failed, sum->failed_count));
    with(out, "stats", sum->with_stats_count ? merged_stats(outputs, sum) : NULL);
    with(out, "meta",
         sum->with_meta_count ? merged(outputs, sum->with_meta, sum->with_meta_count, "meta", NULL) : NULL);
    return with(out, "events", sum->with_events_count ? merged_events(outputs, sum) : NULL);
}

/* Whether the case records failed receptions, which are new in 0.32: cases of both versions do not have them. */
static bool records_failed(vector_case *c) {
    json_object *steps = c->out ? json_object_object_get(c->out, "steps") : NULL, *failed;
    for (size_t i = 0; steps && i < json_object_array_length(steps); i++)
        if (json_object_object_get_ex(json_object_array_get_idx(steps, i), "failed", &failed))
            return true;
    return false;
}

static uint32_t expected_at_first(vector_case *c) {
    if (has_field(c->in, "initial_expected"))
        return read_u32(c, c->in, "initial_expected");
    uint32_t connectors = read_u32_or(c, c->in, "connector_finished_count", 0);
    return connectors ? connectors : read_u32(c, c->in, "world_size");
}

static bool add_step(vector_case *c, kvf_aggregator *aggregator, json_object *step, json_object *results) {
    json_object *list = read_field(c, step, "outputs");
    size_t count = read_length(c, list);
    const kvf_worker_output **outputs = case_memory(c, count, sizeof *outputs);
    for (size_t w = 0; w < count; w++)
        outputs[w] = read_output(c, json_object_array_get_idx(list, w));
    kvf_aggregate sum = {.struct_size = sizeof sum};
    if (kvf_aggregator_step(aggregator, outputs, (uint32_t)count, read_u32_or(c, step, "output_rank", 0),
                            &sum)) {
        json_object_array_add(results, with(json_object_new_object(), "error",
                                            json_object_new_string("missing_worker_output")));
        return false;
    }
    bool dropped = sum.output == KVF_NO_WORKER && !c->suspect;
    json_object_array_add(results, dropped ? NULL : json_aggregate(list, &sum, records_failed(c)));
    return true;
}

static answer aggregate(vector_case *c) {
    json_object *steps = read_field(c, c->in, "steps");
    size_t count = read_length(c, steps);
    size_t workers =
        count ? read_length(c, read_field(c, json_object_array_get_idx(steps, 0), "outputs")) : 1;
    kvf_aggregator_options options = {.struct_size = sizeof options,
                                      .worker_count = (uint32_t)workers,
                                      .expected = expected_at_first(c),
                                      .rule = KVF_COUNT_REPORTS,
                                      .drops_steps = c->suspect == NULL};
    kvf_aggregator *aggregator;
    if (kvf_aggregator_create(&options, &aggregator))
        return answer_refused();
    json_object *results = json_object_new_array();
    for (size_t i = 0; i < count; i++)
        if (!add_step(c, aggregator, json_object_array_get_idx(steps, i), results))
            break;
    kvf_aggregator_free(aggregator);
    return answer_with(with(json_object_new_object(), "steps", results));
}

/* ---- stats_reduce ---------------------------------------------------------------------------- */

typedef struct samples {
    const double *at;
    size_t count;
} samples;

static samples read_samples(vector_case *c, json_object *data, const char *key) {
    json_object *list = has_field(data, key) ? read_field(c, data, key) : NULL;
    size_t count = list ? read_length(c, list) : 0;
    double *at = case_memory(c, count, sizeof *at);
    for (size_t i = 0; i < count; i++)
        at[i] = json_object_get_double(json_object_array_get_idx(list, i));
    return (samples){at, count};
}

/* Counters are lists of ones. */
static uint64_t read_counter(vector_case *c, json_object *data, const char *key) {
    samples list = read_samples(c, data, key);
    double sum = 0;
    for (size_t i = 0; i < list.count; i++)
        sum += list.at[i];
    return (uint64_t)sum;
}

/* Without transfers the averages are integer zeros. */
static json_object *figure(const kvf_transfer_summary *s, double value) {
    return s->transfers ? json_object_new_double(value) : json_object_new_int(0);
}

static answer stats_reduce(vector_case *c) {
    json_object *data = read_field(c, c->in, "data");
    samples transfer = read_samples(c, data, "transfer_duration"),
            post = read_samples(c, data, "post_duration");
    samples bytes = read_samples(c, data, "bytes_transferred");
    samples descriptors = read_samples(c, data, "num_descriptors");
    if (post.count != transfer.count || bytes.count != transfer.count || descriptors.count != transfer.count)
        return answer_not_covered("samples of unequal numbers");
    kvf_transfer_samples given = {.transfer_seconds = transfer.at,
                                  .post_seconds = post.at,
                                  .bytes = bytes.at,
                                  .descriptors = descriptors.at,
                                  .count = transfer.count,
                                  .failed_transfers = read_counter(c, data, "num_failed_transfers"),
                                  .failed_handshakes = read_counter(c, data, "num_failed_handshakes"),
                                  .failed_notifications = read_counter(c, data, "num_failed_notifications"),
                                  .expired = read_counter(c, data, "num_kv_expired_reqs"),
                                  .late = read_counter(c, data, "num_notifications_after_expiry")};
    kvf_transfer_summary s;
    if (kvf_transfer_summarise(&given, &s))
        return answer_refused();
    json_object *out = with(json_object_new_object(), "Num successful transfers", json_u64(s.transfers));
    with(out, "Avg xfer time (ms)", figure(&s, s.average_transfer_ms));
    with(out, "P90 xfer time (ms)", figure(&s, s.p90_transfer_ms));
    with(out, "Avg post time (ms)", figure(&s, s.average_post_ms));
    with(out, "P90 post time (ms)", figure(&s, s.p90_post_ms));
    with(out, "Avg MB per transfer", figure(&s, s.average_mb));
    with(out, "Throughput (MB/s)", figure(&s, s.throughput_mb_per_s));
    with(out, "Avg number of descriptors", figure(&s, s.average_descriptors));
    with(out, "Num failed transfers", json_u64(s.failed));
    with(out, "Num KV expired reqs", json_u64(s.expired));
    with(out, "Num notifs after expiry", json_u64(s.late));
    json_object *whole = with(json_object_new_object(), "empty", json_object_new_boolean(s.empty));
    return answer_with(with(whole, "reduced", out));
}

/* ---- yield_req_data -------------------------------------------------------------------------- */

static kvf_step_request *read_requests(vector_case *c, const char *list_key, const char *blocks_key,
                                       size_t *count) {
    json_object *list = read_field(c, c->in, list_key);
    *count = read_length(c, list);
    kvf_step_request *requests = case_memory(c, *count, sizeof *requests);
    for (size_t i = 0; i < *count; i++) {
        json_object *json = json_object_array_get_idx(list, i);
        const char *id = read_text(c, json, "req_id");
        requests[i] = (kvf_step_request){.id = {id, strlen(id)}};
        if (!has_field(json, blocks_key))
            continue;
        kvf_block_lists lists = read_lists(c, read_field(c, json, blocks_key));
        kvf_block_table *tables = case_memory(c, lists.count, sizeof *tables);
        for (size_t g = 0; g < lists.count; g++) {
            uint32_t *ids = case_memory(c, lists.groups[g].count, sizeof *ids);
            for (size_t b = 0; b < lists.groups[g].count; b++)
                ids[b] = (uint32_t)lists.groups[g].at[b];
            tables[g] = (kvf_block_table){.ids = ids, .count = (uint32_t)lists.groups[g].count};
        }
        requests[i].groups = tables;
        requests[i].group_count = (uint32_t)lists.count;
    }
    return requests;
}

static json_object *json_groups(const kvf_step_request *request) {
    json_object *groups = json_object_new_array();
    for (uint32_t g = 0; g < request->group_count; g++) {
        json_object *ids = json_object_new_array();
        for (uint32_t b = 0; b < request->groups[g].count; b++)
            json_object_array_add(ids, json_u64(request->groups[g].ids[b]));
        json_object_array_add(groups, ids);
    }
    return groups;
}

static answer yield_req_data(vector_case *c) {
    kvf_step step = {0};
    step.fresh = read_requests(c, "new", "block_ids", &step.fresh_count);
    step.cached = read_requests(c, "cached", "new_block_ids", &step.cached_count);
    json_object *list = read_field(c, c->in, "resumed");
    step.resumed_count = read_length(c, list);
    kvf_request_id *resumed = case_memory(c, step.resumed_count, sizeof *resumed);
    for (size_t i = 0; i < step.resumed_count; i++) {
        const char *id = json_object_get_string(json_object_array_get_idx(list, i));
        resumed[i] = (kvf_request_id){id, id ? strlen(id) : 0};
    }
    step.resumed = resumed;
    size_t count = step.fresh_count + step.cached_count;
    kvf_step_request *items = case_memory(c, count, sizeof *items);
    if (kvf_step_requests(&step, items))
        return answer_refused();
    json_object *out = json_object_new_array();
    for (size_t i = 0; i < count; i++) {
        json_object *item = json_object_new_array();
        json_object_array_add(item, json_object_new_string_len(items[i].id.data, (int)items[i].id.size));
        json_object_array_add(item, items[i].groups ? json_groups(&items[i]) : NULL);
        json_object_array_add(item, json_object_new_boolean(items[i].resumed));
        json_object_array_add(out, item);
    }
    return answer_with(with(json_object_new_object(), "items", out));
}

const vector_op aggregator_ops[] = {
    {"aggregate", aggregate, false},
    {"stats_reduce", stats_reduce, false},
    {"yield_req_data", yield_req_data, false},
    {NULL, NULL, false},
};
