/*
 * The times of requests as a trace in Chrome's format, which Perfetto opens: one object of JSON, in which a process is
 * the agent and a thread one request.
 */
#include <json.h>
#include <stdio.h>

#include "agent/trace.h"

typedef struct word {
    const char *name;  /* of the moment */
    const char *phase; /* the phase that it begins; NULL: none */
} word;

static const word words[KVF_MOMENTS] = {
    [KVF_MOMENT_ASKED] = {"asked", "meeting"},     [KVF_MOMENT_READY] = {"ready", "writing"},
    [KVF_MOMENT_MET] = {"met", "asking"},          [KVF_MOMENT_GRANTED] = {"granted", "waiting"},
    [KVF_MOMENT_EXPECTED] = {"expected", NULL},    [KVF_MOMENT_BEGUN] = {"begun", "planning"},
    [KVF_MOMENT_PLANNED] = {"planned", "posting"}, [KVF_MOMENT_POSTED] = {"posted", "moving"},
    [KVF_MOMENT_MOVED] = {"moved", "arrived"},     [KVF_MOMENT_CHECKING] = {"checking", "verifying"},
    [KVF_MOMENT_CHECKED] = {"checked", "ending"},  [KVF_MOMENT_WRITTEN] = {"written", NULL},
    [KVF_MOMENT_RELEASED] = {"released", NULL},    [KVF_MOMENT_EXPIRED] = {"expired", NULL},
    [KVF_MOMENT_TOLD] = {"told", "noticing"},      [KVF_MOMENT_FREED] = {"freed", NULL},
    [KVF_MOMENT_NOTICED] = {"noticed", NULL},
};

/* The trace that is being written, and its agent. */
typedef struct writer {
    const kvf_agent *agent;
    struct json_object *events;
    uint64_t now;
    bool failed;
} writer;

static void add(writer *w, struct json_object *to, const char *name, struct json_object *value) {
    if (to && value && json_object_object_add(to, name, value) == 0)
        return;
    json_object_put(value);
    w->failed = true;
}

static void add_text(writer *w, struct json_object *to, const char *name, const char *text) {
    add(w, to, name, kvf_visible_text(text));
}

static void add_number(writer *w, struct json_object *to, const char *name, uint64_t number) {
    add(w, to, name, json_object_new_uint64(number));
}

/* Microseconds with all nanoseconds: as text, because a double has too few digits. */
static void add_time(writer *w, struct json_object *to, const char *name, uint64_t ns) {
    char digits[40];
    (void)snprintf(digits, sizeof digits, "%llu.%03llu", (unsigned long long)(ns / 1000),
                   (unsigned long long)(ns % 1000));
    add(w, to, name, json_object_new_double_s((double)ns / 1000, digits));
}

/* An event of the trace; returns its "args", which belong to it. */
static struct json_object *add_event(writer *w, const char *phase, const char *name, uint64_t thread) {
    struct json_object *event = json_object_new_object(), *args = json_object_new_object();
    add_text(w, event, "ph", phase);
    add_text(w, event, "name", name);
    add_number(w, event, "pid", (uint64_t)w->agent->process);
    add_number(w, event, "tid", thread);
    if (!event || !args || json_object_object_add(event, "args", args) != 0 ||
        json_object_array_add(w->events, event) != 0) {
        json_object_put(event);
        w->failed = true;
        return NULL;
    }
    return args;
}

static struct json_object *last_event(const writer *w) {
    return json_object_array_get_idx(w->events, json_object_array_length(w->events) - 1);
}

static struct json_object *add_span(writer *w, const char *category, const char *name, const kvf_trace *trace,
                                    uint64_t begin, uint64_t end) {
    struct json_object *args = add_event(w, "X", name, trace->ticket);
    if (!args)
        return NULL;
    add_text(w, last_event(w), "cat", category);
    add_time(w, last_event(w), "ts", begin - w->agent->opened);
    add_time(w, last_event(w), "dur", end - begin);
    return args;
}

/* A moment on a request's thread; returns its "args". */
static struct json_object *add_instant(writer *w, const char *category, const char *name,
                                       const kvf_trace *trace, uint64_t when) {
    struct json_object *args = add_event(w, "i", name, trace->ticket);
    if (!args)
        return NULL;
    add_text(w, last_event(w), "cat", category);
    add_text(w, last_event(w), "s", "t"); /* on its thread only */
    add_time(w, last_event(w), "ts", when - w->agent->opened);
    return args;
}

/* ---- one request ----------------------------------------------------------------------------- */

/* When a request was over; now, if it is not. */
static uint64_t end_of(const writer *w, const kvf_trace *trace) {
    bool over = trace->at[KVF_MOMENT_NOTICED] && trace->at[KVF_MOMENT_FREED];
    return over ? kvf_max_u64(trace->at[KVF_MOMENT_NOTICED], trace->at[KVF_MOMENT_FREED]) : w->now;
}

static const char *phase_after(const kvf_trace *trace, kvf_moment moment) {
    bool lends = trace->kind == KVF_REQUEST_HOLD || trace->kind == KVF_REQUEST_PUSH;
    if (moment == KVF_MOMENT_ASKED && lends)
        return "preparing";
    if (moment == KVF_MOMENT_READY && trace->kind == KVF_REQUEST_HOLD)
        return "held";
    return words[moment].phase;
}

/* Writes the phases: from each moment that begins one to the next such moment, or to the engine's notice. */
static void say_phases(writer *w, const kvf_trace *trace, uint64_t end) {
    for (uint32_t m = 0; m < KVF_MOMENT_NOTICED; m++) {
        if (!trace->at[m] || !words[m].phase)
            continue;
        uint32_t next = m + 1;
        while (next < KVF_MOMENT_NOTICED && !(trace->at[next] && words[next].phase))
            next++;
        uint64_t until = trace->at[next] ? trace->at[next] : end;
        (void)add_span(w, "phase", phase_after(trace, (kvf_moment)m), trace, trace->at[m], until);
    }
}

static void say_peer(writer *w, const kvf_trace *trace, const kvf_trace_peer *peer) {
    struct json_object *args = add_instant(w, "peer", words[peer->moment].name, trace, peer->time);
    if (!args)
        return;
    add(w, args, "request", kvf_visible_id(trace->id, trace->id_bytes));
    add_text(w, args, "engine", peer->engine ? peer->engine : "");
    add_number(w, args, "rank", peer->rank);
    if (peer->clock_error == UINT64_MAX)
        return;
    add(w, args, "clock_offset_ns", json_object_new_int64(peer->clock_offset));
    add_number(w, args, "clock_error_ns", peer->clock_error);
}

static void say_result(writer *w, struct json_object *args, const kvf_trace *trace) {
    add_text(w, args, "kind", kvf_request_kind_name(trace->kind));
    add(w, args, "request", kvf_visible_id(trace->id, trace->id_bytes));
    add_number(w, args, "ticket", trace->ticket);
    add_text(w, args, "status",
             trace->at[KVF_MOMENT_TOLD] ? kvf_status_name(trace->status) : kvf_status_name(KVF_IN_PROGRESS));
    if (trace->detail)
        add_text(w, args, "detail", trace->detail);
    if (trace->engine)
        add_text(w, args, "engine", trace->engine);
    add_number(w, args, "bytes", trace->bytes);
    add_number(w, args, "bytes_packed", trace->packed);
    add_number(w, args, "runs", trace->runs);
    if (trace->peers_left_out)
        add_number(w, args, "moments_left_out", trace->peers_left_out);
}

static void say_request(writer *w, const kvf_trace *trace) {
    uint64_t end = end_of(w, trace);
    struct json_object *args = add_event(w, "M", "thread_name", trace->ticket);
    struct json_object *id = kvf_visible_id(trace->id, trace->id_bytes);
    kvf_text name = {0};
    kvf_text_add(&name, "%s %s", kvf_request_kind_name(trace->kind), id ? json_object_get_string(id) : "");
    add_text(w, args, "name", name.data ? name.data : "");
    kvf_text_free(&name);
    json_object_put(id);
    say_result(w, add_span(w, "request", kvf_request_kind_name(trace->kind), trace, trace->at[0], end),
               trace);
    say_phases(w, trace, end);
    for (uint32_t i = 0; i < trace->peer_count; i++)
        say_peer(w, trace, &trace->peers[i]);
    if (trace->at[KVF_MOMENT_FREED])
        (void)add_instant(w, "blocks", words[KVF_MOMENT_FREED].name, trace, trace->at[KVF_MOMENT_FREED]);
}

/* ---- all of them ----------------------------------------------------------------------------- */

static struct json_object *who(writer *w) {
    const kvf_agent *agent = w->agent;
    struct json_object *data = json_object_new_object();
    add_text(w, data, "kvferry", kvf_version());
    add_text(w, data, "engine", agent->name ? agent->name : "");
    add_number(w, data, "rank", agent->rank);
    add_number(w, data, "process", (uint64_t)agent->process);
    add_number(w, data, "origin_ns", agent->opened);
    add_number(w, data, "origin_unix_ns", kvf_wall_clock() - (w->now - agent->opened));
    return data;
}

/* How many are written at once: meanwhile nothing moves. */
#define AT_ONCE 64u

/* Writes what all requests share. The caller has the lock. */
static void say_head(writer *w, struct json_object *all) {
    w->events = json_object_new_array();
    add(w, all, "traceEvents", w->events);
    add(w, all, "otherData", who(w));
    add_text(w, all, "displayTimeUnit", "ns");
    if (w->failed)
        return;
    char name[300];
    (void)snprintf(name, sizeof name, "%.255s rank %u", w->agent->name ? w->agent->name : "", w->agent->rank);
    add_text(w, add_event(w, "M", "process_name", 0), "name", name);
}

/* Writes the next requests after ticket `last`, which it advances; true: there are more. The caller has the lock. */
static bool say_some(writer *w, uint64_t *last) {
    uint32_t count = 0;
    const kvf_trace *trace = NULL;
    HASH_FIND(hh, w->agent->traces, last, sizeof *last, trace); /* NULL: none yet, or since forgotten */
    for (trace = trace ? trace : w->agent->traces; trace && !w->failed; trace = trace->hh.next) {
        if (trace->ticket <= *last)
            continue;
        if (count++ == AT_ONCE)
            return true;
        say_request(w, trace);
        *last = trace->ticket;
    }
    return false;
}

static kvf_status say_all(kvf_agent *agent, struct json_object *all) {
    writer w = {.agent = agent};
    uint64_t last = 0;
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    w.now = kvf_agent_now(agent);
    say_head(&w, all);
    while (say_some(&w, &last)) {
        kvf_turn_give(agent); /* threads that wait for the lock go first */
        w.now = kvf_agent_now(agent);
    }
    kvf_agent_unlock(agent);
    return w.failed ? kvf_nomem("a trace") : KVF_OK;
}

kvf_status kvf_agent_trace(kvf_agent *agent, char *text, size_t text_bytes, size_t *length) {
    if (!agent || (!text && text_bytes))
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !agent ? "agent" : "text");
    if (!agent->options.trace_requests)
        return kvf_fail(KVF_E_INVALID, "trace_requests of this agent is 0: it keeps no times");
    struct json_object *all = json_object_new_object();
    kvf_text out = {0};
    kvf_status status = all ? say_all(agent, all) : kvf_nomem("a trace");
    if (!status) {
        const char *words_of_all = json_object_to_json_string_ext(all, JSON_C_TO_STRING_PLAIN);
        if (words_of_all)
            kvf_text_add(&out, "%s\n", words_of_all);
        out.failed |= !words_of_all;
        status = kvf_text_give(&out, text, text_bytes, length);
    }
    json_object_put(all);
    return status;
}
