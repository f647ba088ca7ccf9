/*
 * kvferry bench: times of planning, making runs and moving, with medians and spread, beside the machine's limit.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "demo.h"
#include "folding.h"
#include "json.h"
#include "rank.h"
#include "table.h"
#include "text.h"

enum {
    ROUNDS = 5,
    REPEATS = 21,
};

/* Several measurements of one thing. */
typedef struct samples {
    double values[REPEATS];
    size_t count;
} samples;

static int compare_values(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct spread {
    double least, median, most;
} spread;

static spread spread_of(const double *values, size_t count) {
    double sorted[1000]; /* as many as --rounds allows */
    memcpy(sorted, values, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, compare_values);
    return (spread){sorted[0], sorted[count / 2], sorted[count - 1]};
}

/* ---- planning -------------------------------------------------------------------------------- */

typedef struct plan_costs {
    spread build_ns;  /* of the decode rank whose median is the longest */
    spread verify_ns; /* of the same rank */
    uint64_t memory_bytes, sources, rules;
} plan_costs;

static int measure_plan(const demo_job *job, uint32_t decode_rank, plan_costs *out) {
    samples build = {.count = REPEATS}, verify = {.count = REPEATS};
    plan_costs costs = {.sources = 0};
    for (size_t i = 0; i < REPEATS; i++) {
        kvf_plan *plan = NULL;
        uint64_t begin = now_ns();
        int result = engines_plan(job->all.decode, decode_rank, job->all.prefill, job->asked, &plan);
        uint64_t built = now_ns();
        if (!result)
            result = engines_verify(plan, decode_rank);
        build.values[i] = (double)(built - begin);
        verify.values[i] = (double)(now_ns() - built);
        if (!result) {
            costs.memory_bytes = kvf_plan_memory_bytes(plan);
            costs.sources = kvf_plan_source_count(plan);
            costs.rules = kvf_plan_rule_count(plan);
        }
        kvf_plan_free(plan);
        if (result)
            return result;
    }
    costs.build_ns = spread_of(build.values, build.count);
    costs.verify_ns = spread_of(verify.values, verify.count);
    if (out->sources == 0 || costs.build_ns.median > out->build_ns.median)
        *out = costs;
    return EXIT_DONE;
}

/* ---- runs ------------------------------------------------------------------------------------ */

typedef struct run_costs {
    spread set_ns; /* setting a request's tables */
    spread ns_per_run;
    uint64_t runs; /* of the request */
} run_costs;

static uint64_t emit_all(const kvf_request *request, uint32_t sources) {
    kvf_run runs[512];
    uint64_t total = 0;
    for (uint32_t source = 0; source < sources; source++) {
        kvf_run_cursor cursor;
        kvf_run_cursor_start(&cursor, request, source);
        for (size_t count; (count = kvf_run_cursor_next(&cursor, runs, 512)) > 0;)
            total += count;
    }
    return total;
}

static int measure_request(const demo_job *job, const kvf_plan *plan, kvf_request *request, run_costs *out) {
    samples set = {.count = REPEATS}, emit = {.count = REPEATS};
    for (size_t i = 0; i < REPEATS; i++) {
        uint64_t begin = now_ns();
        kvf_status status = kvf_request_set(request, workload_request(&job->work, 0), job->work.group_count);
        uint64_t was_set = now_ns();
        if (status)
            return library_failure(status, "request 0");
        out->runs = emit_all(request, kvf_plan_source_count(plan));
        set.values[i] = (double)(was_set - begin);
        emit.values[i] = (double)(now_ns() - was_set) / (double)(out->runs ? out->runs : 1);
    }
    out->set_ns = spread_of(set.values, set.count);
    out->ns_per_run = spread_of(emit.values, emit.count);
    return EXIT_DONE;
}

/* Measures the first request, which is the longest, at decode rank 0. */
static int measure_runs(const demo_job *job, run_costs *out) {
    kvf_plan *plan = NULL;
    kvf_request *request = NULL;
    int result = engines_plan(job->all.decode, 0, job->all.prefill, job->asked, &plan);
    kvf_status status = result ? KVF_OK : kvf_request_create(plan, &request);
    if (status)
        result = library_failure(status, "a request");
    if (!result)
        result = measure_request(job, plan, request, out);
    kvf_request_free(request);
    kvf_plan_free(plan);
    return result;
}

/* ---- printing -------------------------------------------------------------------------------- */

typedef struct figures {
    plan_costs plan;
    run_costs runs;
    demo_result moved;
} figures;

static void add_row(table *list, const char *what, text median, text least, text most, const char *note) {
    table_cell(list, what);
    table_cell(list, median.text);
    table_cell(list, least.text);
    table_cell(list, most.text);
    table_cell(list, note);
}

static text rate_text(double rate) {
    return text_format("%.2f GB/s", rate);
}

static void rates(const demo_job *job, const demo_result *moved, spread *transfer, spread *copy,
                  spread *ratio) {
    double values[3][1000]; /* as many as --rounds allows */
    for (uint32_t i = 0; i < job->rounds; i++) {
        values[0][i] = demo_rate(moved, i);
        values[1][i] = demo_copy_rate(moved, i);
        values[2][i] = values[0][i] / values[1][i];
    }
    *transfer = spread_of(values[0], job->rounds);
    *copy = spread_of(values[1], job->rounds);
    *ratio = spread_of(values[2], job->rounds);
}

/* A plan that converts has no runs: nothing is proved, made or copied. Nor have prompts that complete no entry. */
static bool has_runs(const demo_job *job, const figures *f) {
    return !job->all.convert && f->moved.runs > 0;
}

static int print_table(const demo_job *job, const figures *f) {
    table list;
    spread transfer, copy, ratio;
    rates(job, &f->moved, &transfer, &copy, &ratio);
    char transport[64];
    demo_describe_transport(job, &f->moved, transport, sizeof transport);
    engines_print(&job->all);
    print_labelled("work", "%u requests of up to %llu tokens, %s in %s runs; %s", job->work.request_count,
                   (unsigned long long)job->work.longest_tokens, text_bytes(f->moved.bytes).text,
                   text_count(f->moved.runs).text, transport);
    printf("\n");
    table_start(&list, "|>median|>least|>most|");
    const spread *s = &f->plan.build_ns;
    uint64_t per_source = f->plan.memory_bytes / (f->plan.sources ? f->plan.sources : 1);
    add_row(&list, "build a plan", text_time(s->median), text_time(s->least), text_time(s->most),
            text_format("%llu sources, %llu rules, %s a source", (unsigned long long)f->plan.sources,
                        (unsigned long long)f->plan.rules, text_bytes(per_source).text)
                .text);
    s = &f->plan.verify_ns;
    if (has_runs(job, f))
        add_row(&list, "verify it", text_time(s->median), text_time(s->least), text_time(s->most), "");
    s = &f->runs.set_ns;
    add_row(&list, "set a request", text_time(s->median), text_time(s->least), text_time(s->most),
            text_format("%llu tokens", (unsigned long long)job->work.longest_tokens).text);
    s = &f->runs.ns_per_run;
    if (has_runs(job, f))
        add_row(&list, "make a run", text_format("%.2f ns", s->median), text_format("%.2f ns", s->least),
                text_format("%.2f ns", s->most),
                text_format("%s runs of a request", text_count(f->runs.runs).text).text);
    add_row(&list, "move", rate_text(transfer.median), rate_text(transfer.least), rate_text(transfer.most),
            text_format("%u rounds, all verified", job->rounds).text);
    if (!has_runs(job, f))
        return table_print(&list, 0) ? EXIT_DONE : failure("not enough memory");
    add_row(&list, f->moved.copy_method, rate_text(copy.median), rate_text(copy.least), rate_text(copy.most),
            "the same runs without a transport");
    add_row(&list, "of the limit", text_format("%.0f%%", 100 * ratio.median),
            text_format("%.0f%%", 100 * ratio.least), text_format("%.0f%%", 100 * ratio.most), "");
    return table_print(&list, 0) ? EXIT_DONE : failure("not enough memory");
}

static void json_spread(struct json_object *out, const char *key, const spread *values) {
    struct json_object *one = json_object_new_object();
    json_real(one, "median", values->median);
    json_real(one, "least", values->least);
    json_real(one, "most", values->most);
    json_object_object_add(out, key, one);
}

static int write_json(const demo_job *job, const figures *f) {
    struct json_object *out = json_object_new_object();
    spread transfer, copy, ratio;
    rates(job, &f->moved, &transfer, &copy, &ratio);
    engines_add_json(&job->all, out);
    json_text(out, "transport", f->moved.transport);
    json_object_object_add(out, "brought_memory", json_object_new_boolean(job->asked->brought_memory));
    json_count(out, "requests", job->work.request_count);
    json_count(out, "longest_tokens", job->work.longest_tokens);
    json_spread(out, "plan_build_ns", &f->plan.build_ns);
    if (has_runs(job, f))
        json_spread(out, "plan_verify_ns", &f->plan.verify_ns);
    json_count(out, "plan_memory_bytes", f->plan.memory_bytes);
    json_count(out, "plan_sources", f->plan.sources);
    json_count(out, "plan_rules", f->plan.rules);
    json_spread(out, "request_set_ns", &f->runs.set_ns);
    if (has_runs(job, f))
        json_spread(out, "ns_per_run", &f->runs.ns_per_run);
    json_count(out, "runs_of_request", f->runs.runs);
    json_count(out, "bytes", f->moved.bytes);
    json_count(out, "runs", f->moved.runs);
    json_spread(out, "gb_per_s", &transfer);
    if (has_runs(job, f)) {
        json_text(out, "copy_method", f->moved.copy_method);
        json_spread(out, "copy_gb_per_s", &copy);
        json_spread(out, "of_copy", &ratio);
    }
    return json_write(out, job->asked->json);
}

int run_bench(int argc, char **argv) {
    options asked;
    demo_job job = {0};
    figures measured = {0};
    int result = options_parse(argc, argv, COMMAND_BENCH, &asked);
    if (!result)
        result = demo_prepare(&asked, ROUNDS, &job);
    for (uint32_t i = 0; i < job.decode_ranks && !result; i++)
        result = measure_plan(&job, i, &measured.plan);
    if (!result)
        result = measure_runs(&job, &measured.runs);
    if (!result)
        result = demo_run(&job, &measured.moved);
    if (!result && options_want_text(&asked))
        result = print_table(&job, &measured);
    if (!result && asked.json)
        result = write_json(&job, &measured);
    demo_result_free(&measured.moved);
    demo_free(&job);
    return result;
}
