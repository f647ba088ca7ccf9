#include "killing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "broken.h"
#include "folding.h"
#include "json.h"
#include "table.h"
#include "text.h"

enum { KILL_LEASE_S = 10 };

/* ---- choosing the victim --------------------------------------------------------------------- */

/* A prompt may complete no entry of several tokens. */
static bool moves_nothing(const kvf_group_request *groups, uint32_t count) {
    for (uint32_t g = 0; g < count; g++)
        if (groups[g].begin < groups[g].end)
            return false;
    return true;
}

int killing_prepare(demo_job *job) {
    const kvf_plan_options how = {.struct_size = sizeof how, .convert = job->all.convert};
    kvf_plan *plan = NULL;
    if (strcmp(job->asked->transport, "inproc") == 0)
        return usage_error("--kill ends a process, and with --transport inproc all ranks are one process");
    if (moves_nothing(workload_request(&job->work, 0), job->work.group_count))
        return usage_error(
            "--kill: nothing moves in the first request, because its tokens complete no entry; "
            "allowed: more --tokens");
    kvf_status status = kvf_plan_build(kvf_engine_shard(job->all.decode, 0), job->all.prefill, &how, &plan);
    if (status)
        return library_failure(status, "planning");
    job->victim = kvf_plan_source_count(plan) > 0 ? kvf_plan_source_rank(plan, 0) : 0;
    kvf_plan_free(plan);
    if (job->asked->push && broken_layers(kvf_engine_shard(job->all.prefill, job->victim)) == 0)
        return usage_error("--push and --kill: prefill rank %u keeps tokens of fewer than two layers, so no "
                           "part of a request can be written before the rest",
                           job->victim);
    job->spares = 1;
    /* If a rank cannot see that a writer has ended, the writer's blocks stay in doubt for the length of a lease. */
    job->agents.lease_ns = KILL_LEASE_S * UINT64_C(1000000000);
    job->agents.peer_timeout_ns = 0; /* the agent's default */
    return EXIT_DONE;
}

/* ---- killing and replacing ------------------------------------------------------------------- */

typedef struct scene {
    killing *out;
    const demo_job *job;
    kvf_agent *directory;
} scene;

static bool take_halfway(void *context, demo_side side, uint32_t index, const message *from) {
    (void)side, (void)index;
    killing *out = ((scene *)context)->out;
    const halfway_figures *figures = from->data;
    out->bytes = figures->bytes;
    out->layers = figures->layers;
    return from->bytes == sizeof *figures;
}

static bool take_told(void *context, demo_side side, uint32_t index, const message *from) {
    const scene *self = context;
    const uint32_t member = index + (side == SIDE_DECODE ? self->job->prefill_ranks : 0);
    if (from->bytes != sizeof(told_figures))
        return false;
    memcpy(&self->out->told[member], from->data, from->bytes);
    return true;
}

static bool take_introduction(void *context, demo_side side, uint32_t index, const message *from) {
    (void)side, (void)index;
    return kvf_agent_introduce(((scene *)context)->directory, from->data, from->bytes) == KVF_OK;
}

int kill_producer(crew *all, kvf_agent *directory, killing *out) {
    scene self = {out, all->job, directory};
    out->told = calloc(all->count, sizeof *out->told);
    if (!out->told)
        return failure("not enough memory");
    const crew_part witness = all->job->asked->push ? CREW_VICTIM : CREW_WITNESS;
    crew_send(all, CREW_ALL, MESSAGE_BREAK, NULL, 0);
    int result =
        crew_await(all, witness, MESSAGE_HALFWAY, "moving the request that will break", take_halfway, &self);
    if (result)
        return result;
    out->killed_ns = now_ns();
    crew_strike(all, all->job->victim);
    crew_send(all, CREW_DECODE, MESSAGE_TELL, NULL, 0);
    result =
        crew_await(all, CREW_DECODE, MESSAGE_TOLD, "noticing the death of the producer", take_told, &self);
    if (result)
        return result;
    crew_send(all, CREW_PREFILL, MESSAGE_GIVE_UP, NULL, 0);
    result = crew_await(all, CREW_PREFILL, MESSAGE_TOLD, "giving the request up", take_told, &self);
    if (result)
        return result;
    const uint64_t begin = now_ns();
    crew_replace(all, all->job->victim);
    result = crew_await(all, CREW_VICTIM, MESSAGE_READY, "filling caches again", take_introduction, &self);
    out->replaced_ns = now_ns() - begin;
    return result;
}

void killing_free(killing *freed) {
    free(freed->told);
    *freed = (killing){0};
}

/* ---- printing -------------------------------------------------------------------------------- */

static bool is_shown(const demo_job *job, uint32_t member) {
    return member != job->victim;
}

static text rank_name(const demo_job *job, uint32_t member) {
    const bool prefill = member < job->prefill_ranks;
    return text_format("%s rank %u", prefill ? "prefill" : "decode",
                       prefill ? member : member - job->prefill_ranks);
}

static text since_kill(const killing *of, uint64_t ns) {
    return ns > of->killed_ns ? text_time((double)(ns - of->killed_ns)) : text_format("before");
}

static void print_rank(table *list, const demo_job *job, const killing *of, uint32_t member) {
    const told_figures *told = &of->told[member];
    const bool prefill = member < job->prefill_ranks;
    table_cell(list, rank_name(job, member).text);
    table_cell(list, told->status ? kvf_status_name((kvf_status)told->status) : "done");
    table_cell(list, since_kill(of, told->told_ns).text);
    table_cell(list, since_kill(of, told->free_ns).text);
    table_cell(list, prefill ? ""
                             : text_format("%llu of %llu", (unsigned long long)told->invalid_blocks,
                                           (unsigned long long)told->of_blocks)
                                   .text);
}

/* Prints each different sentence once, with the first rank whose agent reported it. */
static void print_sentences(const demo_job *job, const killing *of, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        bool said = !is_shown(job, i) || !of->told[i].detail[0];
        for (uint32_t j = 0; j < i && !said; j++)
            said = is_shown(job, j) && strcmp(of->told[j].detail, of->told[i].detail) == 0;
        if (!said)
            print_paragraph("%s was told: %s.", rank_name(job, i).text, of->told[i].detail);
    }
}

int killing_print(const demo_job *job, const killing *of) {
    const uint32_t count = job->prefill_ranks + job->decode_ranks;
    table list;
    if (job->asked->push)
        print_paragraph(
            "Prefill rank %u was killed when it had written %s of the first request and %u layers "
            "of it were ready.",
            job->victim, text_bytes(of->bytes).text, of->layers);
    else
        print_paragraph(
            "Prefill rank %u was killed when decode rank 0 had read %s of the first request from it.",
            job->victim, text_bytes(of->bytes).text);
    printf("\n");
    table_start(&list, "rank|the request|>told after|>blocks free after|>to recompute");
    for (uint32_t i = 0; i < count; i++)
        if (is_shown(job, i))
            print_rank(&list, job, of, i);
    if (!table_print(&list, 0))
        return failure("not enough memory");
    printf("\n");
    print_sentences(job, of, count);
    print_paragraph(
        "A new process took its place and filled its caches within %s. Then all requests moved, the "
        "first one among them, into the same blocks:",
        text_time((double)of->replaced_ns).text);
    printf("\n");
    return EXIT_DONE;
}

struct json_object *killing_json(const demo_job *job, const killing *of) {
    struct json_object *out = json_object_new_object(), *ranks = json_object_new_array();
    json_count(out, "rank", job->victim);
    json_count(out, "bytes", of->bytes);
    if (job->asked->push)
        json_count(out, "layers_ready", of->layers);
    for (uint32_t i = 0; i < job->prefill_ranks + job->decode_ranks; i++) {
        const told_figures *told = &of->told[i];
        struct json_object *one = json_object_new_object();
        if (!is_shown(job, i)) {
            json_object_put(one);
            continue;
        }
        json_text(one, "rank", rank_name(job, i).text);
        json_text(one, "status", kvf_status_name((kvf_status)told->status));
        json_text(one, "detail", told->detail);
        json_real(one, "told_s", ((double)told->told_ns - (double)of->killed_ns) / 1e9);
        json_real(one, "free_s", ((double)told->free_ns - (double)of->killed_ns) / 1e9);
        json_count(one, "blocks", told->of_blocks);
        json_count(one, "invalid_blocks", told->invalid_blocks);
        json_object_array_add(ranks, one);
    }
    json_object_object_add(out, "told", ranks);
    json_real(out, "replaced_s", (double)of->replaced_ns / 1e9);
    return out;
}
