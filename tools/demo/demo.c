#include "demo.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <kvferry/agent.h>

#include "copy_limit.h"
#include "killing.h"
#include "moving.h"
#include "numbers.h"
#include "rank.h"
#include "text.h"

/* ---- the job --------------------------------------------------------------------------------- */

/* Reads the rank that has the fault, such as "prefill:1". */
static int parse_fault(const options *asked, demo_job *job) {
    job->fault_rank = UINT32_MAX;
    if (asked->fault == FAULT_NONE)
        return EXIT_DONE;
    const char *colon = strchr(asked->fault_rank, ':');
    uint64_t rank = 0;
    bool valid = colon && parse_number(colon + 1, &rank);
    if (valid && strncmp(asked->fault_rank, "prefill:", 8) == 0 && rank < job->prefill_ranks)
        job->fault_rank = (uint32_t)rank;
    else if (valid && strncmp(asked->fault_rank, "decode:", 7) == 0 && rank < job->decode_ranks)
        job->fault_rank = job->prefill_ranks + (uint32_t)rank;
    else
        return usage_error("\"%s\" is not a rank; allowed: names such as prefill:0 and decode:1",
                           asked->fault_rank);
    return EXIT_DONE;
}

/* Reserves address space only; its pages are allocated after the prefill ranks have freed theirs. */
static int reserve_copy_source(demo_job *job) {
    job->copy_source = calloc(job->prefill_ranks, sizeof *job->copy_source);
    job->copy_bytes = calloc(job->prefill_ranks, sizeof *job->copy_bytes);
    if (!job->copy_source || !job->copy_bytes)
        return failure("not enough memory");
    for (uint32_t rank = 0; rank < job->prefill_ranks; rank++) {
        const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(job->all.prefill, rank));
        uint64_t bytes = 0;
        for (uint32_t region = 0; region < shard->region_count; region++)
            bytes += shard->region_bytes[region];
        if (bytes == 0)
            continue;
        void *memory =
            mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
            return failure("mmap of %llu bytes: %s", (unsigned long long)bytes, strerror(errno));
        (void)madvise(memory, bytes, MADV_HUGEPAGE); /* as transports do with memory that they allocate */
        job->copy_source[rank] = memory;
        job->copy_bytes[rank] = bytes;
    }
    return EXIT_DONE;
}

int demo_prepare(const options *asked, uint32_t default_rounds, demo_job *out) {
    *out = (demo_job){.asked = asked, .rounds = asked->rounds ? asked->rounds : default_rounds};
    /* Ranks wait longer than the coordinator, so that the coordinator names a silent rank. Leases outlast the slowest
     * round, because no rank here frees blocks early. A peer that closed is forgotten soon. */
    out->patience_ns = (asked->timeout_s + UINT64_C(60)) * 1000000000u;
    out->silence_s = asked->timeout_s;
    /* Filling, connecting, parting of each side, filling the memory to copy from; in each round moving, verifying and
     * copying. With --kill, instead of copying: moving what breaks, noticing, giving up, filling again. */
    out->steps = asked->kill ? 8 + 2 * out->rounds : 5 + 3 * out->rounds;
    out->agents = (kvf_agent_options){.struct_size = sizeof out->agents,
                                      .lease_ns = out->patience_ns,
                                      .peer_timeout_ns = UINT64_C(100) * 1000 * 1000};
    int result = engines_read(asked, &out->all);
    out->agents.convert = out->all.convert;
    if (!result)
        result = workload_make(asked, &out->all, &out->work);
    if (result)
        return result;
    out->prefill_ranks = kvf_engine_rank_count(out->all.prefill);
    out->decode_ranks = kvf_engine_rank_count(out->all.decode);
    out->producer = (kvf_contact){.engine = out->all.prefill_shape.side};
    result = parse_fault(asked, out);
    if (!result && asked->kill)
        result = killing_prepare(out);
    if (!result && asked->corrupt)
        result = corruption_parse(asked->corrupt, &out->all, &out->work, &out->corrupt);
    return result ? result : reserve_copy_source(out);
}

void demo_free(demo_job *job) {
    for (uint32_t rank = 0; job->copy_source && job->copy_bytes && rank < job->prefill_ranks; rank++)
        if (job->copy_source[rank])
            (void)munmap(job->copy_source[rank], job->copy_bytes[rank]);
    free(job->copy_source);
    free(job->copy_bytes);
    workload_free(&job->work);
    engines_free(&job->all);
}

/* ---- what ranks report ----------------------------------------------------------------------- */

typedef struct run {
    const demo_job *job;
    crew all;
    demo_result *result;
    kvf_agent *directory; /* decode ranks meet the prefill engine at it */
    moved sum;
    uint64_t copy_ns;
} run;

static bool take_ready(void *context, demo_side side, uint32_t index, const message *from) {
    (void)index;
    return side == SIDE_DECODE ||
           kvf_agent_introduce(((run *)context)->directory, from->data, from->bytes) == KVF_OK;
}

static bool take_copied(void *context, demo_side side, uint32_t index, const message *from) {
    (void)side, (void)index;
    run *self = context;
    const copy_figures *figures = from->data;
    if (figures->ns > self->copy_ns)
        self->copy_ns = figures->ns;
    return from->bytes == sizeof *figures;
}

/* ---- the phases ------------------------------------------------------------------------------ */

/* One engine finds another by a contact that knows all its ranks; here the contact is the coordinator's directory. */
static int connect_ranks(run *self) {
    const kvf_agent_options how = {.struct_size = sizeof how, .own_thread = true};
    kvf_status status = kvf_agent_open(NULL, 0, &how, &self->directory);
    if (status)
        return library_failure(status, "the directory of the prefill engine");
    int result = crew_await(&self->all, CREW_ALL, MESSAGE_READY, "filling caches", take_ready, self);
    if (result)
        return result;
    return crew_connect(&self->all, kvf_agent_endpoint(self->directory));
}

static void note_moved(run *self) {
    demo_result *result = self->result;
    memcpy(result->transport, self->sum.transport, sizeof result->transport);
    result->bytes = self->sum.bytes;
    result->bytes_packed = self->sum.bytes_packed;
    result->runs = self->sum.runs;
    result->verified_bytes = self->sum.verified_bytes;
    result->untouched_bytes = self->sum.untouched_bytes;
}

/* Lets prefill ranks free their memory, and decode ranks end their use of it. */
static int part_ranks(run *self) {
    int result = EXIT_DONE;
    for (crew_part side = CREW_PREFILL; side <= CREW_DECODE && !result; side++) {
        crew_send(&self->all, side, MESSAGE_PART, NULL, 0);
        result = crew_await(&self->all, side, MESSAGE_PARTED, "parting", NULL, NULL);
    }
    return result;
}

static int measure_copying(run *self) {
    self->result->copy_method = copy_limit_method(self->job->asked, self->result->transport);
    crew_send(&self->all, CREW_DECODE, MESSAGE_PREPARE, NULL, 0);
    int result = crew_await(&self->all, CREW_DECODE, MESSAGE_PREPARED, "measuring the limit", NULL, NULL);
    for (uint32_t round = 0; round < self->job->rounds && !result; round++) {
        self->copy_ns = 0;
        crew_send(&self->all, CREW_DECODE, MESSAGE_COPY, self->result->copy_method,
                  strlen(self->result->copy_method) + 1);
        result =
            crew_await(&self->all, CREW_DECODE, MESSAGE_COPIED, "measuring the limit", take_copied, self);
        self->result->copy_seconds[round] = (double)self->copy_ns / 1e9;
    }
    return result;
}

static int run_phases(run *self) {
    int result = connect_ranks(self);
    if (!result && self->job->asked->kill)
        result = kill_producer(&self->all, self->directory, &self->result->killed);
    for (uint32_t round = 0; round < self->job->rounds && !result; round++) {
        result = move_round(&self->all, &self->sum);
        self->result->seconds[round] = self->sum.seconds;
    }
    note_moved(self);
    if (!result)
        result = part_ranks(self);
    return result || self->job->asked->kill ? result : measure_copying(self);
}

int demo_run(const demo_job *job, demo_result *out) {
    uint64_t begin = now_ns();
    *out = (demo_result){.copy_method = "memcpy"};
    run self = {.job = job, .result = out};
    out->seconds = calloc(job->rounds, sizeof *out->seconds);
    out->copy_seconds = calloc(job->rounds, sizeof *out->copy_seconds);
    int result =
        out->seconds && out->copy_seconds ? crew_start(&self.all, job) : failure("not enough memory");
    if (!result) {
        result = run_phases(&self);
        if (result)
            crew_kill(&self.all);
        else
            result = crew_end(&self.all);
    }
    kvf_agent_close(self.directory);
    out->wall_seconds = (double)(now_ns() - begin) / 1e9;
    return result;
}

void demo_result_free(demo_result *result) {
    free(result->seconds);
    free(result->copy_seconds);
    killing_free(&result->killed);
    *result = (demo_result){0};
}

double demo_rate(const demo_result *result, uint32_t round) {
    return (double)result->bytes / result->seconds[round] / 1e9;
}

double demo_copy_rate(const demo_result *result, uint32_t round) {
    return (double)result->bytes / result->copy_seconds[round] / 1e9;
}

void demo_describe_transport(const demo_job *job, const demo_result *result, char *out, size_t bytes) {
    (void)snprintf(out, bytes, "%s%s%s%s", result->transport,
                   result->bytes_packed == 0               ? ""
                   : result->bytes_packed == result->bytes ? ", packed"
                                                           : ", partly packed",
                   job->asked->brought_memory ? ", brought memory" : "",
                   job->asked->no_direct_read ? ", no direct read" : "");
}
