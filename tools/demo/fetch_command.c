/*
 * kvferry fetch: a decode engine that fetches the requests that `kvferry serve` holds, verifies them, and compares
 * their speed with a plain stream over the same link.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "folding.h"
#include "json.h"
#include "moving.h"
#include "pattern_facts.h"
#include "rank.h"
#include "stream.h"
#include "table.h"
#include "text.h"
#include "visiting.h"

enum {
    ROUNDS = 3,
    GREETINGS = 5,
    VISIT_S = 10, /* less than a request may take: here, no answer means that no engine is there */
};

typedef struct fetch {
    options asked;
    demo_job job;
    meeting_place place;
    key_pair keys;
    kvf_visited *visited;
    pattern_facts pattern;
    char name[48]; /* of our engine: a unique one */
    crew all;
    moved sum;
    double *seconds, *stream_seconds; /* [round] */
} fetch;

/* ---- meeting --------------------------------------------------------------------------------- */

static int visit(fetch *self) {
    if (self->asked.operand_count == 0)
        return usage_error("fetch needs the endpoint that \"kvferry serve\" prints, such as "
                           "tcp://10.0.0.1:5555");
    uint32_t patience_s = self->asked.timeout_s < VISIT_S ? self->asked.timeout_s : VISIT_S;
    int result = place_read(self->asked.operands[0], &self->place);
    if (!result)
        result = keys_read(self->asked.key_file, &self->keys);
    if (!result)
        result = place_visit(&self->asked, "fetch", &self->place, patience_s, GREETINGS, &self->visited);
    if (!result && !pattern_facts_read(kvf_visited_facts(self->visited), &self->pattern))
        result = failure("fetch: %s holds no pattern: it was not started by \"kvferry serve\"",
                         kvf_engine_name(kvf_visited_engine(self->visited)));
    return result;
}

/* The facts for our agents: the visited engine's own, because engines meet only if their facts agree. */
static const char *facts_of(const kvf_visited *visited) {
    const char *own = strstr(kvf_visited_facts(visited), "\nown:\n");
    return own ? own + strlen("\nown:\n") : NULL;
}

static void describe_agents(fetch *self) {
    bool keyed = self->keys.public_key[0] != '\0';
    self->job.agents = (kvf_agent_options){.struct_size = sizeof self->job.agents,
                                           .listen = self->asked.listen,
                                           .insecure = self->asked.insecure,
                                           .public_key = keyed ? self->keys.public_key : NULL,
                                           .secret_key = keyed ? self->keys.secret_key : NULL,
                                           .facts = facts_of(self->visited)};
    self->job.producer = (kvf_contact){.engine = kvf_engine_name(kvf_visited_engine(self->visited)),
                                       .public_key = self->place.key};
}

/* Plans as the engines will, so that an error in planning is reported before any rank starts. */
static int prove(const fetch *self) {
    const kvf_engine *prefill = kvf_visited_engine(self->visited), *decode = self->job.all.decode;
    int result = EXIT_DONE;
    for (uint32_t rank = 0; rank < kvf_engine_rank_count(decode) && !result; rank++) {
        kvf_plan *plan = NULL;
        result = engines_plan(decode, rank, prefill, &self->asked, &plan);
        if (!result)
            result = engines_verify(plan, rank);
        kvf_plan_free(plan);
    }
    return result;
}

static int prepare(fetch *self) {
    demo_job *job = &self->job;
    self->asked.tokens = self->pattern.tokens;
    self->asked.requests = self->pattern.requests;
    self->asked.seed = self->pattern.seed;
    *job = (demo_job){.asked = &self->asked,
                      .standing = true,
                      .rounds = self->asked.rounds ? self->asked.rounds : ROUNDS,
                      .steps = 2 + 2 * (self->asked.rounds ? self->asked.rounds : ROUNDS),
                      .patience_ns = (uint64_t)self->asked.timeout_s * 1000000000u,
                      .silence_s = self->asked.timeout_s + 60, /* ranks give up first, with a better reason */
                      .fault_rank = UINT32_MAX};
    (void)snprintf(self->name, sizeof self->name, "decode-%ld-%llx", (long)getpid(),
                   (unsigned long long)now_ns());
    int result = visited_model(&self->asked, "decode", kvf_visited_engine(self->visited), &job->all.model);
    if (!result)
        result = shape_parse("decode", self->asked.decode, job->all.model, &job->all.decode_shape);
    job->all.decode_shape.name = self->name;
    if (!result)
        result = workload_make(&self->asked, &job->all, &job->work);
    if (!result)
        result = prove(self);
    if (result)
        return result;
    job->decode_ranks = kvf_engine_rank_count(job->all.decode);
    self->seconds = calloc(job->rounds, sizeof *self->seconds);
    self->stream_seconds = calloc(job->rounds, sizeof *self->stream_seconds);
    describe_agents(self);
    return self->seconds && self->stream_seconds ? EXIT_DONE : failure("not enough memory");
}

/* ---- fetching -------------------------------------------------------------------------------- */

static int run_rounds(fetch *self) {
    int result = crew_await(&self->all, CREW_DECODE, MESSAGE_READY, "making caches", NULL, NULL);
    if (!result)
        result = crew_connect(&self->all, self->place.endpoint);
    for (uint32_t round = 0; round < self->job.rounds && !result; round++) {
        result = move_round(&self->all, &self->sum);
        self->seconds[round] = self->sum.seconds;
        /* Fetching and the stream take turns, so that both use the link in the same state. */
        if (!result)
            result = stream_measure(self->place.endpoint, (uint16_t)self->pattern.stream_port,
                                    self->sum.bytes, self->asked.timeout_s, &self->stream_seconds[round]);
    }
    return result;
}

static int run(fetch *self) {
    int result = crew_start(&self->all, &self->job);
    if (!result)
        result = run_rounds(self);
    if (result)
        crew_kill(&self->all);
    else
        result = crew_end(&self->all);
    return result;
}

/* ---- results --------------------------------------------------------------------------------- */

static int compare_reals(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median; sorts the values. */
static double median_of(double *values, uint32_t count) {
    qsort(values, count, sizeof *values, compare_reals);
    return (values[(count - 1) / 2] + values[count / 2]) / 2;
}

/* Medians over the rounds: both rates in GB/s, and fetched / stream. */
typedef struct rates {
    double fetched, stream, ratio;
} rates;

static int rates_of(const fetch *self, rates *out) {
    uint32_t rounds = self->job.rounds;
    double *values = calloc((size_t)rounds * 3, sizeof *values);
    if (!values)
        return failure("not enough memory");
    for (uint32_t i = 0; i < rounds; i++) {
        values[i] = (double)self->sum.bytes / self->seconds[i] / 1e9;
        values[rounds + i] = (double)self->sum.bytes / self->stream_seconds[i] / 1e9;
        values[2 * rounds + i] = self->stream_seconds[i] / self->seconds[i];
    }
    *out = (rates){median_of(values, rounds), median_of(values + rounds, rounds),
                   median_of(values + (size_t)2 * rounds, rounds)};
    free(values);
    return EXIT_DONE;
}

static double round_trip_of(const fetch *self) {
    uint32_t count;
    const uint64_t *trips = kvf_visited_round_trips(self->visited, &count);
    uint64_t least = 0;
    for (uint32_t i = 0; i < count; i++)
        if (i == 0 || trips[i] < least)
            least = trips[i];
    return (double)least;
}

static uint64_t per_round(const fetch *self, uint64_t bytes) {
    return self->job.rounds ? bytes / self->job.rounds : 0;
}

static int print_text(const fetch *self, const rates *of) {
    table list;
    print_labelled("from", "%s at %s, round trip %s%s", self->job.producer.engine, self->place.endpoint,
                   text_time(round_trip_of(self)).text, self->place.key ? ", sessions encrypted" : "");
    engines_print(&self->job.all);
    print_labelled("way", "%s%s%s", self->sum.transport, self->sum.way[0] ? ": " : "", self->sum.way);
    printf("\n");
    table_start(&list, "round|>bytes|>runs|>a run|>time|>GB/s|>plain stream GB/s|>of it");
    for (uint32_t i = 0; i < self->job.rounds; i++) {
        double bytes = (double)self->sum.bytes;
        table_cell(&list, i == 0 ? "first" : text_format("%u", i + 1).text);
        table_cell(&list, text_bytes(self->sum.bytes).text);
        table_cell(&list, text_count(self->sum.runs).text);
        table_cell(&list, text_bytes(self->sum.runs ? self->sum.bytes / self->sum.runs : 0).text);
        table_cell(&list, text_time(self->seconds[i] * 1e9).text);
        table_cell(&list, text_format("%.3f", bytes / self->seconds[i] / 1e9).text);
        table_cell(&list, text_format("%.3f", bytes / self->stream_seconds[i] / 1e9).text);
        table_cell(&list, text_format("%.0f%%", 100 * self->stream_seconds[i] / self->seconds[i]).text);
    }
    if (!table_print(&list, 0))
        return failure("not enough memory");
    printf("\nMedians: %.3f GB/s, plain stream %.3f GB/s, %.0f%% of it.\n", of->fetched, of->stream,
           100 * of->ratio);
    print_paragraph(
        "Verified after each round: all %s that were to arrive, by their coordinates, and that the other %s "
        "did not change.",
        text_bytes(per_round(self, self->sum.verified_bytes)).text,
        text_bytes(per_round(self, self->sum.untouched_bytes)).text);
    return EXIT_DONE;
}

static int write_json(const fetch *self, const rates *of) {
    struct json_object *out = json_object_new_object(), *rounds = json_object_new_array();
    json_text(out, "endpoint", self->place.endpoint);
    json_text(out, "producer", self->job.producer.engine);
    json_real(out, "round_trip_ns", round_trip_of(self));
    json_object_object_add(out, "encrypted", json_object_new_boolean(self->place.key != NULL));
    engines_add_json(&self->job.all, out);
    json_text(out, "transport", self->sum.transport);
    json_text(out, "way", self->sum.way);
    json_count(out, "requests", self->job.work.request_count);
    json_count(out, "bytes", self->sum.bytes);
    json_count(out, "runs", self->sum.runs);
    for (uint32_t i = 0; i < self->job.rounds; i++) {
        struct json_object *one = json_object_new_object();
        json_real(one, "seconds", self->seconds[i]);
        json_real(one, "stream_seconds", self->stream_seconds[i]);
        json_object_array_add(rounds, one);
    }
    json_object_object_add(out, "rounds", rounds);
    json_real(out, "gb_per_s", of->fetched);
    json_real(out, "stream_gb_per_s", of->stream);
    json_real(out, "of_stream", of->ratio);
    json_count(out, "verified_bytes", self->sum.verified_bytes);
    json_count(out, "untouched_bytes", self->sum.untouched_bytes);
    return json_write(out, self->asked.json);
}

static int report(const fetch *self) {
    rates of = {0};
    int result = rates_of(self, &of);
    if (!result && options_want_text(&self->asked))
        result = print_text(self, &of);
    if (!result && self->asked.json)
        result = write_json(self, &of);
    return result;
}

int run_fetch(int argc, char **argv) {
    fetch self = {.name = ""};
    int result = options_parse(argc, argv, COMMAND_FETCH, &self.asked);
    if (!result)
        result = visit(&self);
    if (!result)
        result = prepare(&self);
    if (!result)
        result = run(&self);
    if (!result)
        result = report(&self);
    free(self.seconds);
    free(self.stream_seconds);
    memset(&self.keys, 0, sizeof self.keys);
    workload_free(&self.job.work);
    engines_free(&self.job.all);
    kvf_visited_free(self.visited);
    place_free(&self.place);
    return result;
}
