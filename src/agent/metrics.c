/*
 * The statistics of an agent as text for Prometheus: its exposition format, version 0.0.4.
 */
#include <stddef.h>
#include <stdio.h>

#include "agent/agent.h"

/* Prometheus wants few buckets: from a microsecond to 18 minutes, each four times as long as the one before. */
#define FIRST_BUCKET 10u
#define LAST_BUCKET 40u
#define BUCKET_STEP 2u

typedef struct number {
    const char *name, *type, *help;
    size_t at; /* of a uint64_t in the statistics */
} number;

#define COUNTER(name, field, help)                                                                           \
    { name "_total", "counter", help, offsetof(kvf_agent_stats, field) }
#define GAUGE(name, field, help)                                                                             \
    { name, "gauge", help, offsetof(kvf_agent_stats, field) }

static const number numbers[] = {
    COUNTER("kvferry_read_bytes", bytes_read, "Bytes that this rank read from others."),
    COUNTER("kvferry_written_bytes", bytes_written, "Bytes that this rank wrote to others."),
    COUNTER("kvferry_packed_bytes", bytes_packed, "Bytes read and written that went packed."),
    COUNTER("kvferry_runs", runs, "Runs that were moved."),
    COUNTER("kvferry_leases_expired", leases_expired, "Leases of readers that ran out."),
    COUNTER("kvferry_messages_sent", messages_sent, "Messages sent to peers."),
    COUNTER("kvferry_messages_received", messages_received, "Messages received from peers."),
    COUNTER("kvferry_messages_repeated", messages_repeated, "Messages that were sent again."),
    COUNTER("kvferry_messages_stale", messages_stale,
            "Messages dropped because they came from an older session or process."),
    COUNTER("kvferry_messages_malformed", messages_malformed,
            "Messages dropped because they were malformed."),
    COUNTER("kvferry_messages_foreign", messages_foreign,
            "Messages dropped because they did not come from the session's peer."),
    COUNTER("kvferry_peers_refused", peers_refused, "Peers that were refused."),
    COUNTER("kvferry_peers_evicted", peers_evicted,
            "Peers dropped with nothing under way: they were idle, or only read from here and have ended."),
    COUNTER("kvferry_peers_lost", peers_lost,
            "Peers that this rank reads from or writes to, and that died or were cut off."),
    COUNTER("kvferry_peers_replaced", peers_replaced, "Peers that came back as another process."),
    COUNTER("kvferry_checksums_wrong", checksums_wrong, "Cells whose checksum was not the producer's."),
    COUNTER("kvferry_over_budget", over_budget, "Requests that peers made beyond their budgets."),
    COUNTER("kvferry_connections_closed", connections_closed, "Connections that this agent closed."),
    COUNTER("kvferry_flows_refused", flows_refused, "Packed flows that peers opened and this agent refused."),
    COUNTER("kvferry_plans_built", plans_built, "Plans made: for reading and for writing."),
    GAUGE("kvferry_plans", plans_now, "Plans kept: for reading and for writing."),
    GAUGE("kvferry_peers", peers_now, "Sessions, in both directions."),
    GAUGE("kvferry_leases", leases_now, "Leases granted to readers."),
    GAUGE("kvferry_connections", connections_now, "Connections that others made to this agent."),
    GAUGE("kvferry_peer_memory_bytes", memory_now_bytes, "Memory kept for peers."),
    GAUGE("kvferry_blocks_held", blocks_held_now, "Blocks promised to readers."),
    GAUGE("kvferry_blocks_filling", blocks_filling_now, "Blocks being written by peers, or read into."),
    GAUGE("kvferry_blocks_in_doubt", blocks_in_doubt_now,
          "Blocks that a peer may still write after its request has ended."),
};

/* Arrays by kind of request. */
static const number by_kind[] = {
    COUNTER("kvferry_requests_done", done, "Requests that ended well."),
    COUNTER("kvferry_requests_failed", failed, "Requests that failed."),
    GAUGE("kvferry_requests", requests_now, "Requests under way."),
};

#define HISTOGRAM(name, field, help)                                                                         \
    { name "_seconds", "histogram", help, offsetof(kvf_agent_stats, field) }

static const number histograms[] = {
    HISTOGRAM("kvferry_request", total, "From the request to its end: pulls and expectations."),
    HISTOGRAM("kvferry_queue", queue, "From the request to its first run."),
    HISTOGRAM("kvferry_post", post, "Posting the runs of a request."),
    HISTOGRAM("kvferry_transfer", transfer, "From the first run to the last byte."),
};

/* The labels of all metrics: without braces, as others follow. */
static void say_labels(const kvf_agent *agent, kvf_text *labels) {
    char *name = kvf_copy_as_utf8(agent->name ? agent->name : "");
    kvf_text_add(labels, "engine=\"");
    for (const char *at = name; at && *at; at++) {
        if (*at == '\n')
            kvf_text_add(labels, "\\n");
        else
            kvf_text_add(labels, *at == '"' || *at == '\\' ? "\\%c" : "%c", *at);
    }
    kvf_text_add(labels, "\",rank=\"%u\"", agent->rank);
    labels->failed |= !name;
    kvf_free(name);
}

static void say_head(kvf_text *text, const number *n) {
    kvf_text_add(text, "# HELP %s %s\n# TYPE %s %s\n", n->name, n->help, n->name, n->type);
}

static const void *field_of(const kvf_agent_stats *stats, const number *n) {
    return (const char *)stats + n->at;
}

typedef struct seconds {
    char text[32];
} seconds;

/* With a point, whatever the program's locale writes in its place. */
static seconds seconds_of(uint64_t ns) {
    static const char plain[] = "0123456789e+-";
    seconds out;
    (void)snprintf(out.text, sizeof out.text, "%.9g", (double)ns / 1e9);
    char *point = out.text + strspn(out.text, plain);
    const char *rest = point + strcspn(point, plain);
    if (*point) {
        *point = '.';
        memmove(point + 1, rest, strlen(rest) + 1);
    }
    return out;
}

static void say_histogram(kvf_text *text, const number *n, const kvf_histogram *histogram,
                          const char *labels) {
    uint64_t below = 0;
    say_head(text, n);
    for (uint32_t i = 0; i < LAST_BUCKET; i++) {
        below += histogram->buckets[i];
        if (i + 1 >= FIRST_BUCKET && (i + 1 - FIRST_BUCKET) % BUCKET_STEP == 0)
            kvf_text_add(text, "%s_bucket{%s,le=\"%s\"} %llu\n", n->name, labels,
                         seconds_of(UINT64_C(1) << (i + 1)).text, (unsigned long long)below);
    }
    kvf_text_add(text, "%s_bucket{%s,le=\"+Inf\"} %llu\n", n->name, labels,
                 (unsigned long long)histogram->count);
    kvf_text_add(text, "%s_sum{%s} %s\n", n->name, labels, seconds_of(histogram->sum_ns).text);
    kvf_text_add(text, "%s_count{%s} %llu\n", n->name, labels, (unsigned long long)histogram->count);
}

static void say_by_kind(kvf_text *text, const number *n, const uint64_t *counts, const char *labels) {
    say_head(text, n);
    for (kvf_request_kind kind = KVF_REQUEST_HOLD; kind <= KVF_REQUEST_CONNECT; kind++)
        kvf_text_add(text, "%s{%s,kind=\"%s\"} %llu\n", n->name, labels, kvf_request_kind_name(kind),
                     (unsigned long long)counts[kind]);
}

/* Only failures that happened: most never do. */
static void say_failures(kvf_text *text, const kvf_agent_stats *stats, const char *labels) {
    const number n = COUNTER("kvferry_failures", failures_by_status, "Requests that failed, by status.");
    say_head(text, &n);
    for (uint32_t status = 0; status < KVF_STATUSES; status++)
        if (stats->failures_by_status[status])
            kvf_text_add(text, "%s{%s,status=\"%s\"} %llu\n", n.name, labels,
                         kvf_status_name((kvf_status)status),
                         (unsigned long long)stats->failures_by_status[status]);
}

static void say_all(kvf_text *text, const kvf_agent_stats *stats, const char *labels) {
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        say_head(text, &numbers[i]);
        kvf_text_add(text, "%s{%s} %llu\n", numbers[i].name, labels,
                     (unsigned long long)*(const uint64_t *)field_of(stats, &numbers[i]));
    }
    for (size_t i = 0; i < sizeof by_kind / sizeof *by_kind; i++)
        say_by_kind(text, &by_kind[i], field_of(stats, &by_kind[i]), labels);
    say_failures(text, stats, labels);
    for (size_t i = 0; i < sizeof histograms / sizeof *histograms; i++)
        say_histogram(text, &histograms[i], field_of(stats, &histograms[i]), labels);
}

kvf_status kvf_agent_metrics(kvf_agent *agent, char *text, size_t text_bytes, size_t *length) {
    if (!agent || (!text && text_bytes))
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !agent ? "agent" : "text");
    kvf_agent_stats stats = {.struct_size = sizeof stats};
    kvf_status status = kvf_agent_get_stats(agent, &stats);
    if (!status)
        status = kvf_agent_lock(agent);
    if (status)
        return status;
    kvf_text labels = {0};
    say_labels(agent, &labels); /* a directory gets its name with the first rank that it is told */
    kvf_agent_unlock(agent);
    kvf_text words = {.failed = labels.failed};
    say_all(&words, &stats, labels.data);
    kvf_text_free(&labels);
    return kvf_text_give(&words, text, text_bytes, length);
}
