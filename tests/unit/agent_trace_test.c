/* The times of a request on both sides, as a trace; and log lines for files. */
#include <json.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "agent/session.h"
#include "agent/trace.h"
#include "agent_letters.h"
#include "push_scene.h"

#define FEW 2u
#define MANY 70u

/* ---- reading a trace ------------------------------------------------------------------------- */

typedef struct trace {
    struct json_object *all;
    int64_t origin_ns;
} trace;

static struct json_object *member(struct json_object *object, const char *name, json_type type) {
    struct json_object *value = NULL;
    if (!json_object_object_get_ex(object, name, &value) || !json_object_is_type(value, type))
        fail_msg("no %s \"%s\" in %s", json_type_to_name(type), name, json_object_to_json_string(object));
    return value;
}

static const char *text_of(struct json_object *object, const char *name) {
    return json_object_get_string(member(object, name, json_type_string));
}

static bool is(struct json_object *object, const char *name, const char *text) {
    struct json_object *value = NULL;
    return json_object_object_get_ex(object, name, &value) &&
           strcmp(json_object_get_string(value), text) == 0;
}

static trace trace_of(kvf_agent *agent) {
    size_t length, again;
    assert_ok(kvf_agent_trace(agent, NULL, 0, &length));
    char *text = malloc(length + 1024); /* events of running requests may become longer */
    assert_ok(kvf_agent_trace(agent, text, length + 1024, &again));
    assert_int_equal(again, strlen(text));
    trace t = {.all = json_tokener_parse(text)};
    assert_non_null(t.all);
    t.origin_ns = json_object_get_int64(
        member(member(t.all, "otherData", json_type_object), "origin_ns", json_type_int));
    free(text);
    return t;
}

static size_t event_count(const trace *t) {
    return json_object_array_length(member(t->all, "traceEvents", json_type_array));
}

static struct json_object *event_at(const trace *t, size_t i) {
    return json_object_array_get_idx(member(t->all, "traceEvents", json_type_array), i);
}

/* The first event of a category and name whose thread is the ticket; NULL: there is none. */
static struct json_object *find(const trace *t, uint64_t ticket, const char *category, const char *name) {
    for (size_t i = 0; i < event_count(t); i++) {
        struct json_object *event = event_at(t, i);
        if (is(event, "cat", category) && is(event, "name", name) &&
            json_object_get_uint64(member(event, "tid", json_type_int)) == ticket)
            return event;
    }
    return NULL;
}

/* Nanoseconds of the machine's clock, which both sides share. */
static int64_t time_of(const trace *t, struct json_object *event) {
    assert_non_null(event);
    double us = json_object_get_double(member(event, "ts", json_type_double));
    return t->origin_ns + (int64_t)(us * 1000 + 0.5);
}

static int64_t end_of(const trace *t, struct json_object *event) {
    double us = json_object_get_double(member(event, "dur", json_type_double));
    return time_of(t, event) + (int64_t)(us * 1000 + 0.5);
}

/* The time of a moment of the request with rank 0 of the peer. */
static int64_t moment(const trace *t, uint64_t ticket, const char *name) {
    for (size_t i = 0; i < event_count(t); i++) {
        struct json_object *event = event_at(t, i);
        if (is(event, "cat", "peer") && is(event, "name", name) &&
            is(member(event, "args", json_type_object), "rank", "0") &&
            json_object_get_uint64(member(event, "tid", json_type_int)) == ticket)
            return time_of(t, event);
    }
    fail_msg("ticket %llu has no \"%s\" in %s", (unsigned long long)ticket, name,
             json_object_to_json_string(t->all));
    return 0;
}

/* Phases must follow each other without a gap, in this order, from the begin of the request to its end. */
static void check_phases(const trace *t, uint64_t ticket, const char *kind, const char *const *phases) {
    struct json_object *request = find(t, ticket, "request", kind);
    int64_t at = time_of(t, request);
    for (; *phases; phases++) {
        struct json_object *phase = find(t, ticket, "phase", *phases);
        if (!phase)
            fail_msg("no phase \"%s\"", *phases);
        if (time_of(t, phase) != at)
            fail_msg("phase \"%s\" begins at %lld, and the one before ended at %lld: %s", *phases,
                     (long long)time_of(t, phase), (long long)at, json_object_to_json_string(t->all));
        at = end_of(t, phase);
        assert_true(at >= time_of(t, phase));
    }
    assert_int_equal(at, end_of(t, request));
}

/* Checks the fields of events that Perfetto and others need. */
static void check_form(const trace *t) {
    for (size_t i = 0; i < event_count(t); i++) {
        struct json_object *event = event_at(t, i);
        const char *ph = text_of(event, "ph");
        (void)text_of(event, "name");
        (void)member(event, "pid", json_type_int);
        (void)member(event, "tid", json_type_int);
        (void)member(event, "args", json_type_object);
        if (strcmp(ph, "M") == 0)
            continue;
        assert_true(json_object_get_double(member(event, "ts", json_type_double)) >= 0);
        if (strcmp(ph, "X") == 0)
            assert_true(json_object_get_double(member(event, "dur", json_type_double)) >= 0);
        else
            assert_string_equal(text_of(event, "s"), "t");
    }
}

/* ---- tests ----------------------------------------------------------------------------------- */

static const kvf_agent_options traced = {.struct_size = sizeof traced, .trace_requests = 64};

/* Requires that all bytes arrive and are right; leaves the agents open. */
static void finish(push_scene *v) {
    world_all_done(&v->w, &v->w.d, v->expects);
    world_all_done(&v->w, &v->w.p, v->pushes);
    assert_int_equal(world_wrong_cells(&v->w, &v->w.d, &v->wanted, 2), 0);
    world_quiet(&v->w);
}

static void a_pull_is_told_on_both_sides_and_in_order(void **state) {
    (void)state;
    static const char *const pull[] = {"meeting", "asking",  "waiting",  "planning", "posting",
                                       "moving",  "arrived", "noticing", NULL};
    static const char *const hold[] = {"preparing", "held", "noticing", NULL};
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, &traced);
    world_hold(&v.w.p, &v.given, v.pushes);
    world_pull(&v.w.d, &v.wanted, &v.w.p, v.expects);
    finish(&v);
    trace p = trace_of(v.w.p.agents[0]), d = trace_of(v.w.d.agents[0]);
    check_form(&p);
    check_form(&d);
    check_phases(&d, v.expects[0], "pull", pull);
    check_phases(&p, v.pushes[0], "hold", hold);
    int64_t lent = moment(&p, v.pushes[0], "granted"), back = moment(&p, v.pushes[0], "released");
    int64_t moving = time_of(&d, find(&d, v.expects[0], "phase", "moving"));
    int64_t moved = end_of(&d, find(&d, v.expects[0], "phase", "moving"));
    assert_true(lent <= moment(&d, v.expects[0], "granted"));
    assert_true(moment(&d, v.expects[0], "granted") <= moving && moving <= moved);
    assert_true(moved <= moment(&d, v.expects[0], "released"));
    assert_true(moment(&d, v.expects[0], "released") <= back);
    struct json_object *args = member(find(&d, v.expects[0], "request", "pull"), "args", json_type_object);
    assert_string_equal(text_of(args, "request"), "push");
    assert_string_equal(text_of(args, "engine"), "P");
    assert_string_equal(text_of(args, "status"), "KVF_OK");
    assert_true(json_object_get_uint64(member(args, "bytes", json_type_int)) > 0);
    json_object_put(p.all);
    json_object_put(d.all);
    world_close(&v.w);
}

static void a_push_is_told_on_both_sides_and_in_order(void **state) {
    (void)state;
    static const char *const expect[] = {"meeting",   "asking", "moving",   "arrived",
                                         "verifying", "ending", "noticing", NULL};
    static const char *const push[] = {"preparing", "writing", "noticing", NULL};
    kvf_agent_options verified = traced;
    verified.verify = true;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, &verified);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    world_ready(&v.w.p, v.pushes);
    finish(&v);
    trace p = trace_of(v.w.p.agents[0]), d = trace_of(v.w.d.agents[0]);
    check_form(&p);
    check_form(&d);
    check_phases(&p, v.pushes[0], "push", push);
    check_phases(&d, v.expects[0], "expect", expect);
    assert_true(moment(&d, v.expects[0], "expected") <= moment(&p, v.pushes[0], "expected"));
    assert_true(moment(&p, v.pushes[0], "expected") <= moment(&p, v.pushes[0], "posted"));
    assert_true(moment(&p, v.pushes[0], "posted") <= moment(&p, v.pushes[0], "written"));
    assert_true(moment(&p, v.pushes[0], "written") <= moment(&d, v.expects[0], "written"));
    json_object_put(p.all);
    json_object_put(d.all);
    world_close(&v.w);
}

/* Rank 0 of P writes in two parts to each of two ranks of D. */
static void a_push_in_several_parts_is_posted_once_to_each_rank(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, &traced);
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    for (uint32_t r = 0; r < v.w.p.rank_count; r++)
        assert_ok(kvf_agent_push_ready(v.w.p.agents[r], v.pushes[r], CHUNK(0, 50, LAYERS)));
    world_run_for(&v.w, 50 * MS);
    world_ready(&v.w.p, v.pushes);
    finish(&v);
    trace p = trace_of(v.w.p.agents[0]);
    uint32_t posted = 0;
    for (size_t i = 0; i < event_count(&p); i++)
        posted += is(event_at(&p, i), "cat", "peer") && is(event_at(&p, i), "name", "posted");
    assert_int_equal(posted, 2);
    json_object_put(p.all);
    world_close(&v.w);
}

/* Two agents of one process have the same clock: the offset that each knows must be within its error. */
static void a_moment_says_how_far_the_peers_clock_is_off(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, &traced);
    world_hold(&v.w.p, &v.given, v.pushes);
    world_pull(&v.w.d, &v.wanted, &v.w.p, v.expects);
    finish(&v);
    trace d = trace_of(v.w.d.agents[0]);
    struct json_object *args = member(find(&d, v.expects[0], "peer", "granted"), "args", json_type_object);
    assert_string_equal(text_of(args, "engine"), "P");
    int64_t off = json_object_get_int64(member(args, "clock_offset_ns", json_type_int));
    int64_t error = json_object_get_int64(member(args, "clock_error_ns", json_type_int));
    assert_true(error > 0 && llabs(off) <= error);
    json_object_put(d.all);
    world_close(&v.w);
}

static void a_request_that_does_not_move_says_what_it_waits_for(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, &traced);
    world_pull(&v.w.d, &v.wanted, &v.w.p, v.expects);
    trace d = trace_of(v.w.d.agents[0]);
    struct json_object *args = member(find(&d, v.expects[0], "request", "pull"), "args", json_type_object);
    assert_string_equal(text_of(args, "status"), "KVF_IN_PROGRESS");
    json_object_put(d.all);
    for (uint32_t r = 0; r < v.w.d.rank_count; r++) {
        assert_ok(kvf_agent_cancel(v.w.d.agents[r], v.expects[r]));
        (void)world_failed(&v.w, v.w.d.agents[r], v.expects[r], KVF_E_CANCELLED);
    }
    d = trace_of(v.w.d.agents[0]);
    args = member(find(&d, v.expects[0], "request", "pull"), "args", json_type_object);
    assert_string_equal(text_of(args, "status"), "KVF_E_CANCELLED");
    assert_string_equal(text_of(args, "detail"), "cancelled by its engine");
    assert_null(find(&d, v.expects[0], "phase", "moving"));
    assert_non_null(find(&d, v.expects[0], "phase", "noticing"));
    json_object_put(d.all);
    world_close(&v.w);
}

/* An engine may know that a request failed long before the blocks are its own again. */
static void a_request_lasts_until_its_blocks_are_free(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), &traced);
    kvf_agent *d = v.w.d.agents[0];
    letters_begin();
    world_expect(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_push(&v.w.p, &v.given, v.pushes);
    world_run_for(&v.w, 50 * MS); /* P may write from now on */
    letters_rule(LETTERS_KEEP, d, KVF_MESSAGE_CALL, KVF_CALL_WITHDRAW);
    assert_ok(kvf_agent_cancel(d, v.expects[0]));
    assert_false(world_failed(&v.w, d, v.expects[0], KVF_E_CANCELLED)->blocks_free);
    world_run_for(&v.w, SECOND);
    trace t = trace_of(d);
    assert_int_equal(end_of(&t, find(&t, v.expects[0], "request", "expect")), world_now());
    json_object_put(t.all);
    letters_no_rules();
    const uint64_t not_before = world_now();
    letters_deliver();
    assert_int_equal(world_next(&v.w, d, v.expects[0])->kind, KVF_EVENT_BLOCKS_FREE);
    t = trace_of(d);
    assert_in_range(end_of(&t, find(&t, v.expects[0], "request", "expect")), not_before, world_now());
    json_object_put(t.all);
    (void)kvf_agent_cancel(v.w.p.agents[0], v.pushes[0]);
    letters_end();
    world_quiet(&v.w);
    world_close(&v.w);
}

static int64_t unix_ns(void) {
    struct timespec now;
    assert_int_equal(clock_gettime(CLOCK_REALTIME, &now), 0);
    return (int64_t)now.tv_sec * (int64_t)SECOND + now.tv_nsec;
}

static void a_trace_says_at_which_time_of_the_day_it_begins(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, &traced);
    world_run_for(&v.w, 100 * SECOND); /* virtual ones: the day goes on without them */
    int64_t before = unix_ns();
    trace d = trace_of(v.w.d.agents[0]);
    int64_t after = unix_ns(), age = (int64_t)world_now() - d.origin_ns;
    assert_true(age >= (int64_t)(100 * SECOND));
    int64_t origin = json_object_get_int64(
        member(member(d.all, "otherData", json_type_object), "origin_unix_ns", json_type_int));
    assert_true(before - age <= origin && origin <= after - age);
    json_object_put(d.all);
    world_close(&v.w);
}

static void only_the_latest_requests_are_kept(void **state) {
    (void)state;
    const kvf_agent_options few = {.struct_size = sizeof few, .trace_requests = FEW};
    world w;
    world_open_model(&w, attention(2, 4, 8), ENGINE(.name = "P", .all = {.block_count = 64}),
                     ENGINE(.name = "D", .all = {.block_count = 64}), &few);
    world_pull_everything(&w, "one", 40, 1);
    world_pull_everything(&w, "two", 40, 2);
    world_pull_everything(&w, "\x01\\", 40, 3);
    trace d = trace_of(w.d.agents[0]);
    uint32_t requests = 0;
    for (size_t i = 0; i < event_count(&d); i++) {
        if (!is(event_at(&d, i), "cat", "request"))
            continue;
        struct json_object *args = member(event_at(&d, i), "args", json_type_object);
        assert_string_equal(text_of(args, "request"), requests == 0 ? "two" : "\\x01\\x5c");
        requests++;
    }
    assert_int_equal(requests, FEW);
    json_object_put(d.all);
    world_close(&w);
}

/* A trace is written some requests at a time. */
static void many_requests_are_all_told_once(void **state) {
    (void)state;
    const kvf_agent_options lots = {.struct_size = sizeof lots, .trace_requests = 2 * MANY};
    world w;
    world_open_model(&w, attention(2, 4, 8), ENGINE(.name = "P", .all = {.block_count = 64}),
                     ENGINE(.name = "D", .all = {.block_count = 64}), &lots);
    for (uint32_t i = 0; i < MANY; i++)
        world_pull_everything(&w, "again", 10, i);
    trace d = trace_of(w.d.agents[0]);
    check_form(&d);
    uint64_t last = 0, count = 0;
    for (size_t i = 0; i < event_count(&d); i++) {
        if (!is(event_at(&d, i), "cat", "request"))
            continue;
        uint64_t ticket = json_object_get_uint64(member(event_at(&d, i), "tid", json_type_int));
        assert_true(ticket > last);
        last = ticket;
        count++;
    }
    assert_int_equal(count, MANY);
    json_object_put(d.all);
    world_close(&w);
}

static void a_trace_is_named_after_its_agent(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, &traced);
    trace d = trace_of(v.w.d.agents[3]);
    struct json_object *event = event_at(&d, 0);
    assert_string_equal(text_of(event, "ph"), "M");
    assert_string_equal(text_of(event, "name"), "process_name");
    assert_int_equal(json_object_get_uint64(member(event, "tid", json_type_int)), 0);
    assert_string_equal(text_of(member(event, "args", json_type_object), "name"), "D rank 3");
    json_object_put(d.all);
    world_close(&v.w);
}

static uint32_t count_moments(const trace *t) {
    uint32_t count = 0;
    for (size_t i = 0; i < event_count(t); i++)
        count += is(event_at(t, i), "cat", "peer");
    return count;
}

static void moments_with_peers_beyond_the_most_are_counted(void **state) {
    (void)state;
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), &traced);
    kvf_agent *d = v.w.d.agents[0];
    world_pull(&v.w.d, &v.wanted, &v.w.p, v.expects);
    world_run_for(&v.w, 50 * MS);
    trace t = trace_of(d);
    assert_non_null(d->tickets);
    assert_non_null(d->all_sessions);
    for (uint32_t n = count_moments(&t); n < KVF_TRACE_PEERS + 3; n++)
        kvf_trace_reach_peer(d->tickets, KVF_MOMENT_POSTED, d->all_sessions);
    json_object_put(t.all);
    t = trace_of(d);
    assert_int_equal(count_moments(&t), KVF_TRACE_PEERS);
    struct json_object *args = member(find(&t, v.expects[0], "request", "pull"), "args", json_type_object);
    assert_int_equal(json_object_get_uint64(member(args, "moments_left_out", json_type_int)), 3);
    json_object_put(t.all);
    assert_ok(kvf_agent_cancel(d, v.expects[0]));
    (void)world_failed(&v.w, d, v.expects[0], KVF_E_CANCELLED);
    world_close(&v.w);
}

static kvf_status write_trace(void *agent) {
    static char text[65536];
    text[0] = '\0';
    kvf_status status = kvf_agent_trace(agent, text, sizeof text, NULL);
    assert_int_equal(text[0], status ? '\0' : '{');
    uint32_t named = 0;
    for (const char *at = text; (at = strstr(at, "\"request\":")) != NULL; at++)
        named++;
    assert_int_equal(named, status ? 0 : 3); /* the span of the request, and two moments with its peer */
    return status;
}

static void a_trace_without_memory_fails(void **state) {
    (void)state;
    memory_count memory;
    push_scene v;
    count_memory(&memory);
    push_scene_open(&v, attention(LAYERS, 8, 8), ONE("P"), ONE("D"), &traced);
    world_hold(&v.w.p, &v.given, v.pushes);
    world_pull(&v.w.d, &v.wanted, &v.w.p, v.expects);
    finish(&v);
    survive_every_refusal(&memory, write_trace, v.w.d.agents[0]);
    world_close(&v.w);
}

static void an_agent_that_keeps_no_times_says_so(void **state) {
    (void)state;
    const kvf_agent_options many = {.struct_size = sizeof many, .listen = "", .trace_requests = 65537};
    char text[16];
    push_scene v;
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, NULL);
    assert_fails(kvf_agent_trace(v.w.d.agents[0], text, sizeof text, NULL), KVF_E_INVALID, "trace_requests");
    assert_fails(kvf_agent_trace(NULL, text, sizeof text, NULL), KVF_E_INVALID, "agent");
    assert_fails(kvf_agent_trace(v.w.d.agents[0], NULL, 1, NULL), KVF_E_INVALID, "text");
    kvf_agent *none;
    assert_fails(kvf_agent_open(NULL, 0, &many, &none), KVF_E_RANGE, "trace_requests is 65537");
    world_close(&v.w);
}

/* ---- the log --------------------------------------------------------------------------------- */

static const kvf_log_line met = {sizeof met, KVF_LOG_INFO, 1795377901123456789ull, "met \"P\" at tcp://h:1"};
static const kvf_log_line failed = {sizeof failed, KVF_LOG_WARNING, 1795377901000000999ull,
                                    "{\"failure\":\"request\",\"rank\":3}"};

static void check_line(const kvf_log_line *line, kvf_log_form form, const char *wanted) {
    char text[256];
    size_t length;
    assert_ok(kvf_log_write(line, form, text, sizeof text, &length));
    assert_string_equal(text, wanted);
    assert_int_equal(length, strlen(wanted));
}

static void a_line_of_the_log_is_written_as_text_or_json(void **state) {
    (void)state;
    check_line(&met, KVF_LOG_TEXT, "2026-11-22T20:05:01.123456Z INFO met \"P\" at tcp://h:1");
    check_line(&met, KVF_LOG_JSON,
               "{\"time\":\"2026-11-22T20:05:01.123456Z\",\"level\":\"INFO\",\"text\":\"met \\\"P\\\" at "
               "tcp://h:1\"}");
    check_line(&failed, KVF_LOG_TEXT,
               "2026-11-22T20:05:01.000000Z WARNING {\"failure\":\"request\",\"rank\":3}");
    check_line(&failed, KVF_LOG_JSON,
               "{\"time\":\"2026-11-22T20:05:01.000000Z\",\"level\":\"WARNING\",\"failure\":\"request\","
               "\"rank\":3}");
    const kvf_log_line broken = {sizeof broken, KVF_LOG_DEBUG, 0, "{ no object"};
    check_line(&broken, KVF_LOG_JSON,
               "{\"time\":\"1970-01-01T00:00:00.000000Z\",\"level\":\"DEBUG\",\"text\":\"{ no object\"}");
    char few[8];
    assert_ok(kvf_log_write(&met, KVF_LOG_TEXT, few, sizeof few, NULL));
    assert_string_equal(few, "2026-11");
    assert_fails(kvf_log_write(&met, (kvf_log_form)2, few, sizeof few, NULL), KVF_E_INVALID, "form is 2");
    assert_fails(kvf_log_write(NULL, KVF_LOG_TEXT, few, sizeof few, NULL), KVF_E_INVALID, "line is NULL");
    const kvf_log_line without = {sizeof without, KVF_LOG_INFO, 0, NULL};
    assert_fails(kvf_log_write(&without, KVF_LOG_TEXT, few, sizeof few, NULL), KVF_E_INVALID,
                 "line->text is NULL");
    assert_fails(kvf_log_write(&met, KVF_LOG_TEXT, NULL, sizeof few, NULL), KVF_E_INVALID, "out is NULL");
}

/* JSON is UTF-8, and a peer may say anything: characters of one to four bytes stay, also the last of each length. */
static void what_is_no_character_is_a_question_mark_in_json(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"\x7f \u00fc \u07ff \u20ac \uffff \U0001f600 \U0010ffff", NULL},
        {"a\xff\xfe", "a??"},
        {"\xc3", "?"},                       /* cut off */
        {"\xe2\x82 ", "?? "},                /* the third byte is missing */
        {"\x80\xbf", "??"},                  /* only what follows */
        {"\xc1\xbf \xe0\x9f\xbf", "?? ???"}, /* longer than they need be */
        {"\xf0\x8f\xbf\xbf", "????"},
        {"\xed\xa0\x80 \xed\xbf\xbf", "??? ???"},           /* halves of UTF-16 */
        {"\xf4\x90\x80\x80 \xf8\x88\x80\x80", "???? ????"}, /* beyond U+10FFFF */
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct json_object *value = kvf_visible_text(cases[i][0]);
        assert_string_equal(json_object_get_string(value), cases[i][1] ? cases[i][1] : cases[i][0]);
        json_object_put(value);
    }
    const kvf_log_line strange = {sizeof strange, KVF_LOG_INFO, 0, "met \"\xff\""};
    check_line(&strange, KVF_LOG_JSON,
               "{\"time\":\"1970-01-01T00:00:00.000000Z\",\"level\":\"INFO\",\"text\":\"met \\\"?\\\"\"}");
}

static struct {
    char text[512];
    uint32_t count;
} refused_line;

static void note_line(void *context, const kvf_log_line *line) {
    (void)context;
    if (line->level < KVF_LOG_WARNING)
        return;
    refused_line.count++;
    (void)snprintf(refused_line.text, sizeof refused_line.text, "%s", line->text);
}

static void a_failure_of_a_peer_whose_name_is_no_text_is_a_line_of_json(void **state) {
    (void)state;
    const kvf_agent_options options = {.struct_size = sizeof options, .log = note_line};
    push_scene v;
    memset(&refused_line, 0, sizeof refused_line);
    push_scene_open(&v, attention(LAYERS, 8, 8), TP2, TP4, &options);
    kvf_agent *p = v.w.p.agents[0];
    (void)kvf_agent_lock(p);
    kvf_event_peer(p, KVF_EVENT_PEER_REFUSED, "D\xe9j\xe0", 3, KVF_E_PERMISSION, "does not allow \xff");
    kvf_agent_unlock(p);
    assert_int_equal(refused_line.count, 1);
    assert_non_null(strstr(refused_line.text, "\"peer\":\"D?j?\""));
    assert_non_null(strstr(refused_line.text, "\"detail\":\"does not allow ?\""));
    world_close(&v.w);
}

/* A peer chose the name with which a line begins, and may have said the sentence with which it ends. */
static void only_a_failure_adds_members_to_a_line_of_json(void **state) {
    (void)state;
    const kvf_log_line back = {sizeof back, KVF_LOG_INFO, 0, "{\"time\":\" is back after \"}"};
    check_line(&back, KVF_LOG_JSON,
               "{\"time\":\"1970-01-01T00:00:00.000000Z\",\"level\":\"INFO\","
               "\"text\":\"{\\\"time\\\":\\\" is back after \\\"}\"}");
    const kvf_log_line stays = {sizeof stays, KVF_LOG_WARNING, 0, "{\"level\":\"INFO\"} may still write"};
    check_line(&stays, KVF_LOG_JSON,
               "{\"time\":\"1970-01-01T00:00:00.000000Z\",\"level\":\"WARNING\","
               "\"text\":\"{\\\"level\\\":\\\"INFO\\\"} may still write\"}");
}

static kvf_status write_line(void *form) {
    char text[256];
    return kvf_log_write(&met, *(const kvf_log_form *)form, text, sizeof text, NULL);
}

static void a_line_without_memory_is_not_written(void **state) {
    (void)state;
    kvf_log_form forms[] = {KVF_LOG_TEXT, KVF_LOG_JSON};
    memory_count memory;
    count_memory(&memory);
    for (size_t i = 0; i < COUNT_OF(forms); i++)
        survive_every_refusal(&memory, write_line, &forms[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pull_is_told_on_both_sides_and_in_order),
        cmocka_unit_test(a_push_is_told_on_both_sides_and_in_order),
        cmocka_unit_test(a_push_in_several_parts_is_posted_once_to_each_rank),
        cmocka_unit_test(a_moment_says_how_far_the_peers_clock_is_off),
        cmocka_unit_test(a_request_that_does_not_move_says_what_it_waits_for),
        cmocka_unit_test(a_request_lasts_until_its_blocks_are_free),
        cmocka_unit_test(a_trace_says_at_which_time_of_the_day_it_begins),
        cmocka_unit_test(only_the_latest_requests_are_kept),
        cmocka_unit_test(many_requests_are_all_told_once),
        cmocka_unit_test(a_trace_is_named_after_its_agent),
        cmocka_unit_test(moments_with_peers_beyond_the_most_are_counted),
        cmocka_unit_test_teardown(a_trace_without_memory_fails, stop_counting_memory),
        cmocka_unit_test(an_agent_that_keeps_no_times_says_so),
        cmocka_unit_test(a_line_of_the_log_is_written_as_text_or_json),
        cmocka_unit_test(what_is_no_character_is_a_question_mark_in_json),
        cmocka_unit_test(a_failure_of_a_peer_whose_name_is_no_text_is_a_line_of_json),
        cmocka_unit_test(only_a_failure_adds_members_to_a_line_of_json),
        cmocka_unit_test_teardown(a_line_without_memory_is_not_written, stop_counting_memory),
    };
    return cmocka_run_group_tests_name("agent_trace", tests, world_is_simulated, world_is_real);
}
