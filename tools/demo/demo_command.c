/*
 * kvferry demo: moves caches between real processes, and prints the result as a table or as JSON.
 */
#include <stdio.h>

#include "demo.h"
#include "folding.h"
#include "json.h"
#include "killing.h"
#include "table.h"
#include "text.h"

enum { ROUNDS = 2 }; /* the first one also maps memory and faults it in */

static void print_work(const demo_job *job) {
    const workload *work = &job->work;
    engines_print(&job->all);
    print_labelled(
        "work", "%u request%s of up to %llu tokens (%llu in all), %u with a prefix hit, scattered blocks",
        work->request_count, work->request_count == 1 ? "" : "s", (unsigned long long)work->longest_tokens,
        (unsigned long long)work->tokens, work->hit_count);
    print_labelled("memory", "%s of caches, limit %s", text_bytes(work->cache_bytes).text,
                   text_bytes(job->asked->memory_limit).text);
    printf("\n");
    (void)fflush(stdout);
}

/* A plan that converts has no runs that could be copied. */
static bool compares_copying(const demo_job *job) {
    return !job->all.convert && !job->asked->kill;
}

static int print_rounds(const demo_job *job, const demo_result *result) {
    table list;
    char titles[160], transport[64];
    demo_describe_transport(job, result, transport, sizeof transport);
    (void)snprintf(titles, sizeof titles, "round|transport|>bytes|>runs|>a run|>time|>GB/s%s%s%s",
                   job->asked->kill ? "" : "|>", job->asked->kill ? "" : result->copy_method,
                   job->asked->kill ? "" : " GB/s|>of it");
    table_start(&list, titles);
    for (uint32_t round = 0; round < job->rounds; round++) {
        double rate = demo_rate(result, round), limit = demo_copy_rate(result, round);
        table_cell(&list, round == 0 ? "first" : text_format("%u", round + 1).text);
        table_cell(&list, transport);
        table_cell(&list, text_bytes(result->bytes).text);
        table_cell(&list, text_count(result->runs).text);
        table_cell(&list, text_bytes(result->runs ? result->bytes / result->runs : 0).text);
        table_cell(&list, text_time(result->seconds[round] * 1e9).text);
        table_cell(&list, text_format("%.2f", rate).text);
        if (job->asked->kill)
            continue;
        /* Prompts that complete no entry of several tokens have no runs. */
        const bool has_runs = compares_copying(job) && result->runs > 0;
        table_cell(&list, has_runs ? text_format("%.2f", limit).text : "");
        table_cell(&list, has_runs ? text_format("%.0f%%", 100 * rate / limit).text : "");
    }
    return table_print(&list, 0) ? EXIT_DONE : failure("not enough memory");
}

static int print_text(const demo_job *job, const demo_result *result) {
    int printed = job->asked->kill ? killing_print(job, &result->killed) : EXIT_DONE;
    if (!printed)
        printed = print_rounds(job, result);
    if (printed)
        return printed;
    printf("\n");
    print_paragraph(
        "Verified after each round: all %s that were to arrive, by their coordinates, and that the other %s "
        "did not change.",
        text_bytes(result->verified_bytes / job->rounds).text,
        text_bytes(result->untouched_bytes / job->rounds).text);
    if (job->asked->kill)
        return EXIT_DONE;
    print_paragraph(
        "%s GB/s is the same runs copied by the same number of processes without a transport. All took %.1f "
        "s.",
        result->copy_method, result->wall_seconds);
    return EXIT_DONE;
}

static int write_json(const demo_job *job, const demo_result *result) {
    struct json_object *out = json_object_new_object(), *rounds = json_object_new_array();
    engines_add_json(&job->all, out);
    json_text(out, "transport", result->transport);
    json_object_object_add(out, "brought_memory", json_object_new_boolean(job->asked->brought_memory));
    json_count(out, "seed", job->asked->seed);
    json_count(out, "requests", job->work.request_count);
    json_count(out, "tokens", job->work.tokens);
    json_count(out, "longest_tokens", job->work.longest_tokens);
    json_count(out, "prefix_hits", job->work.hit_count);
    json_count(out, "cache_bytes", job->work.cache_bytes);
    json_count(out, "bytes", result->bytes);
    json_count(out, "runs", result->runs);
    json_count(out, "bytes_packed", result->bytes_packed);
    if (!job->asked->kill)
        json_text(out, "copy_method", result->copy_method);
    for (uint32_t round = 0; round < job->rounds; round++) {
        struct json_object *one = json_object_new_object();
        json_real(one, "seconds", result->seconds[round]);
        json_real(one, "gb_per_s", demo_rate(result, round));
        if (compares_copying(job))
            json_real(one, "copy_gb_per_s", demo_copy_rate(result, round));
        if (compares_copying(job))
            json_real(one, "of_copy", demo_rate(result, round) / demo_copy_rate(result, round));
        json_object_array_add(rounds, one);
    }
    json_object_object_add(out, "rounds", rounds);
    if (job->asked->kill)
        json_object_object_add(out, "killed", killing_json(job, &result->killed));
    json_count(out, "verified_bytes", result->verified_bytes);
    json_count(out, "untouched_bytes", result->untouched_bytes);
    json_real(out, "wall_seconds", result->wall_seconds);
    return json_write(out, job->asked->json);
}

int run_demo(int argc, char **argv) {
    options asked;
    demo_job job = {0};
    demo_result result_of = {0};
    int result = options_parse(argc, argv, COMMAND_DEMO, &asked);
    if (!result)
        result = demo_prepare(&asked, asked.kill ? 1 : ROUNDS, &job);
    if (!result && options_want_text(&asked))
        print_work(&job);
    if (!result)
        result = demo_run(&job, &result_of);
    if (!result && options_want_text(&asked))
        result = print_text(&job, &result_of);
    if (!result && asked.json)
        result = write_json(&job, &result_of);
    demo_result_free(&result_of);
    demo_free(&job);
    return result;
}
