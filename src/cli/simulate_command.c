/*
 * kvferry simulate: how a deployment of many engines would behave.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engines.h"
#include "folding.h"
#include "json.h"
#include "progress.h"
#include "table.h"
#include "text.h"
#include "trace_file.h"

enum {
    REQUESTS = 1000,       /* without a trace */
    LONGEST_PROMPT = 4096, /* likewise */
    LONGEST_OUTPUT = 512,  /* likewise */
    PROMPTS_IN_CACHE = 16, /* of the longest: blocks of an engine for which none are given */
};

typedef struct job {
    const options *asked;
    engines all;
    request_list requests;
    kvf_simulation_options options;
    kvf_simulation found;
    progress shown;
} job;

/* ---- the workload ---------------------------------------------------------------------------- */

/* SplitMix64 (Steele, Lea and Flood, 2014): a number in [0, 1). */
static double draw(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static uint64_t draw_below(uint64_t *state, uint64_t below) {
    return (uint64_t)(draw(state) * (double)below);
}

/* Requests come at random, `rate` a second on average; prompts have from half to all of the longest one's tokens. */
static int draw_requests(job *j) {
    const options *o = j->asked;
    const double rate = o->rate ? (double)o->rate : 1;
    const uint64_t longest = o->tokens ? o->tokens : LONGEST_PROMPT;
    uint64_t random = o->seed;
    double at = 0;
    for (uint64_t i = 0; i < (o->requests ? o->requests : REQUESTS); i++) {
        const uint64_t less = draw_below(&random, longest / 2 + 1);
        const kvf_simulated_request one = {.at_ns = (uint64_t)at,
                                           .prompt_tokens = (uint32_t)(longest - less),
                                           .output_tokens =
                                               1 + (uint32_t)draw_below(&random, LONGEST_OUTPUT)};
        if (!requests_add(&j->requests, one))
            return failure("not enough memory");
        at += -log(1 - draw(&random)) * 1e9 / rate;
    }
    return EXIT_DONE;
}

/* A trace at another pace, and again until there are as many requests as are wanted. */
static int repeat_trace(job *j) {
    const options *o = j->asked;
    request_list *list = &j->requests;
    const uint64_t count = list->count, wanted = o->requests ? o->requests : count;
    const uint64_t pause =
        list->all[count - 1].at_ns / count; /* between its last request and its first again */
    const double length = (double)(list->all[count - 1].at_ns + pause);
    const double pace = o->rate && length > 0 ? (double)count * 1e9 / (double)o->rate / length : 1;
    list->count = wanted < count ? wanted : count;
    for (uint64_t i = count; i < wanted; i++) {
        kvf_simulated_request one = list->all[i % count];
        one.at_ns += i / count * (uint64_t)length;
        if (!requests_add(list, one))
            return failure("not enough memory");
    }
    for (uint64_t i = 0; i < list->count; i++)
        list->all[i].at_ns = (uint64_t)((double)list->all[i].at_ns * pace);
    return EXIT_DONE;
}

static int make_requests(job *j) {
    if (!j->asked->trace)
        return draw_requests(j);
    const int result = trace_read(j->asked->trace, &j->requests);
    return result ? result : repeat_trace(j);
}

/* ---- the deployment -------------------------------------------------------------------------- */

/* Engines for which no blocks were given have room for some of the longest prompts. */
static void fill_blocks(engine_shape *shape, const kvf_model *model, uint64_t tokens) {
    uint64_t all = 0;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        const uint64_t per_block = group->kind == KVF_GROUP_STATE ? 1 : shape->groups[g].tokens_per_block;
        const uint64_t steps = group->kind == KVF_GROUP_STATE ? 1 : tokens;
        const uint64_t blocks = PROMPTS_IN_CACHE * (steps / per_block + 2);
        all += blocks;
        if (!shape->fixed_blocks[g])
            shape->groups[g].block_count = blocks;
    }
    for (uint32_t g = 0; shape->share_pages && g < kvf_model_group_count(model); g++)
        if (!shape->fixed_blocks[g])
            shape->groups[g].block_count = all;
}

static int build_engines(job *j) {
    uint64_t longest = 1;
    for (uint64_t i = 0; i < j->requests.count; i++)
        longest = j->requests.all[i].prompt_tokens > longest ? j->requests.all[i].prompt_tokens : longest;
    fill_blocks(&j->all.prefill_shape, j->all.model, longest);
    fill_blocks(&j->all.decode_shape, j->all.model, longest);
    return engines_build(&j->all);
}

static bool on_progress(void *context, uint64_t now_ns, uint64_t ended) {
    job *j = context;
    progress_show(&j->shown, (double)ended / (double)j->requests.count, "simulating, %s passed",
                  text_time((double)now_ns).text);
    return true;
}

static int simulate(job *j) {
    const options *o = j->asked;
    j->options = (kvf_simulation_options){
        .struct_size = sizeof j->options,
        .prefill = {.engine_count = o->prefill_engines,
                    .shape = j->all.prefill,
                    .share_pages = j->all.prefill_shape.share_pages,
                    .tokens_per_second = o->prefill_speed},
        .decode = {.engine_count = o->decode_engines,
                   .shape = j->all.decode,
                   .share_pages = j->all.decode_shape.share_pages,
                   .tokens_per_second = o->decode_speed},
        .requests = j->requests.all,
        .request_count = j->requests.count,
        .link_bytes_per_second = (double)o->link_gbit * 1e9 / 8,
        .latency_ns = (uint64_t)o->latency_us * 1000,
        .run_ns = o->run_ns,
        .lease_ns = (uint64_t)o->lease_s * 1000000000u,
        .killed = o->killed,
        .seed = o->seed,
        .progress = on_progress,
        .context = j,
        .push_tokens = o->push_tokens,
        .cut_off = o->cut_off,
    };
    j->found.struct_size = sizeof j->found;
    j->shown = progress_begin();
    const kvf_status status = kvf_simulate(&j->options, &j->found);
    progress_clear();
    return status ? library_error(status, "simulate") : EXIT_DONE;
}

/* ---- printing -------------------------------------------------------------------------------- */

static void add_times(table *to, const char *what, const kvf_simulated_times *times) {
    table_cell(to, what);
    table_cell(to, text_time((double)times->p50_ns).text);
    table_cell(to, text_time((double)times->p90_ns).text);
    table_cell(to, text_time((double)times->p99_ns).text);
    table_cell(to, text_time((double)times->worst_ns).text);
    table_cell(to, text_time(times->mean_ns).text);
}

static bool print_times(const kvf_simulation *f, bool pushes) {
    table times;
    table_start(&times, "|>half within|>90%|>99%|>worst|>mean");
    add_times(&times, "waiting for a prefill engine", &f->prefill_wait);
    add_times(&times, "waiting for blocks to decode in", &f->blocks_wait);
    add_times(&times, "handing over", &f->hand_over);
    add_times(&times, pushes ? "bytes on links of their own" : "of that, bytes on links of their own",
              &f->alone);
    add_times(&times, "from arriving until decoding", &f->until_decode);
    printf("\n");
    return table_print(&times, 0);
}

static int print_found(const job *j) {
    const kvf_simulation *f = &j->found;
    const options *o = j->asked;
    const double count = (double)j->requests.count;
    engines_print(&j->all);
    print_labelled("fleet", "%u prefill and %u decode engines, %u ranks; a link of %u Gbit/s for each rank",
                   o->prefill_engines, o->decode_engines, f->agents, o->link_gbit);
    print_labelled("work", "%s requests in %s, %s and %s runs moved", text_count(j->requests.count).text,
                   text_time((double)f->simulated_ns).text, text_bytes(f->bytes).text,
                   text_count(f->runs).text);
    if (!print_times(f, o->push_tokens > 0))
        return failure("not enough memory");
    printf("\n");
    print_labelled("ends", "%s done, %s failed, %s lost; %u engines were killed, %u cut off%s%s",
                   text_count(f->done).text, text_count(f->failed).text, text_count(f->lost).text, f->killed,
                   f->cut_off, f->failure[0] ? "; the first failure: " : "", f->failure);
    print_labelled("links", "the busiest moved bytes for %.1f%% of the time", 100 * f->link_use);
    print_labelled("talk", "%.1f messages of %.0f bytes for each request; %s plans were built",
                   (double)f->messages / count,
                   (double)f->message_bytes / (double)(f->messages ? f->messages : 1),
                   text_count(f->plans).text);
    print_labelled("peers", "at most %s of an agent, which keeps %s for them",
                   text_count(f->sessions_most).text, text_bytes(f->session_bytes_most).text);
    print_labelled("checks",
                   "%s runs to or from blocks of another request; %s requests, leases and blocks left",
                   text_count(f->foreign_runs).text, text_count(f->left).text);
    print_labelled("here", "%s, %s of memory", text_time(f->real_seconds * 1e9).text,
                   text_bytes(f->process_bytes).text);
    return EXIT_DONE;
}

static void add_json_times(struct json_object *out, const char *key, const kvf_simulated_times *times) {
    struct json_object *one = json_object_new_object();
    json_count(one, "count", times->count);
    json_real(one, "mean_ns", times->mean_ns);
    json_count(one, "p50_ns", times->p50_ns);
    json_count(one, "p90_ns", times->p90_ns);
    json_count(one, "p99_ns", times->p99_ns);
    json_count(one, "worst_ns", times->worst_ns);
    json_object_object_add(out, key, one);
}

static int write_json(const job *j) {
    const kvf_simulation *f = &j->found;
    struct json_object *out = json_object_new_object();
    engines_add_json(&j->all, out);
    json_count(out, "prefill_engines", j->asked->prefill_engines);
    json_count(out, "decode_engines", j->asked->decode_engines);
    json_count(out, "agents", f->agents);
    json_count(out, "push_tokens", j->asked->push_tokens);
    json_count(out, "requests", j->requests.count);
    json_count(out, "done", f->done);
    json_count(out, "failed", f->failed);
    json_count(out, "lost", f->lost);
    json_text(out, "failure", f->failure);
    json_count(out, "killed", f->killed);
    json_count(out, "cut_off", f->cut_off);
    json_count(out, "simulated_ns", f->simulated_ns);
    add_json_times(out, "prefill_wait", &f->prefill_wait);
    add_json_times(out, "blocks_wait", &f->blocks_wait);
    add_json_times(out, "hand_over", &f->hand_over);
    add_json_times(out, "alone", &f->alone);
    add_json_times(out, "until_decode", &f->until_decode);
    json_count(out, "bytes", f->bytes);
    json_count(out, "runs", f->runs);
    json_real(out, "link_use", f->link_use);
    json_count(out, "messages", f->messages);
    json_count(out, "message_bytes", f->message_bytes);
    json_count(out, "plans", f->plans);
    json_count(out, "sessions_most", f->sessions_most);
    json_count(out, "session_bytes_most", f->session_bytes_most);
    json_count(out, "foreign_runs", f->foreign_runs);
    json_count(out, "left", f->left);
    json_real(out, "real_seconds", f->real_seconds);
    json_count(out, "process_bytes", f->process_bytes);
    return json_write(out, j->asked->json);
}

int run_simulate(int argc, char **argv) {
    options asked;
    job j = {.asked = &asked};
    int result = options_parse(argc, argv, COMMAND_SIMULATE, &asked);
    if (result)
        return result;
    result = engines_read(&asked, &j.all);
    if (!result)
        result = make_requests(&j);
    if (!result)
        result = build_engines(&j);
    if (!result)
        result = simulate(&j);
    if (!result && options_want_text(&asked))
        result = print_found(&j);
    if (!result && asked.json)
        result = write_json(&j);
    if (!result && (j.found.foreign_runs > 0 || j.found.left > 0))
        result = failure("simulate: a promise was broken, see the checks: please report this");
    requests_free(&j.requests);
    engines_free(&j.all);
    return result;
}
