#include "agent/brought.h"

#include "agent/expect.h"
#include "agent/stage.h"
#include "stage/stream.h"
#include "stage/ways.h"

/* Adds what one source of the plan gives, by layer: its stream in our memory, as its flows have it in parts. */
static kvf_status add_source(const kvf_asker *expect, uint32_t source, uint64_t *by_layer) {
    const kvf_agent *agent = expect->base.agent;
    kvf_selection *selection = NULL;
    kvf_stream_map *map = NULL;
    kvf_stream *stream = NULL;
    kvf_status status = kvf_selection_of_plan(expect->remote->plan, source, &selection);
    if (!status)
        status = kvf_stream_map_create(agent->shard, selection, &map);
    if (!status)
        status = kvf_stream_create(map, expect->base.groups, expect->base.group_count, &stream);
    if (!status)
        kvf_stream_add_layers(stream, (kvf_byte_range){0, kvf_stream_bytes(stream)}, by_layer);
    kvf_stream_free(stream);
    kvf_stream_map_free(map);
    kvf_selection_free(selection);
    return status;
}

/* The counts by layer of one source of the plan, in `come` or `awaited`. */
static uint64_t *of_source(const kvf_arrival *arrival, uint64_t *counts, uint32_t source) {
    return counts + (size_t)source * arrival->all;
}

static kvf_status count_writers(const kvf_asker *expect) {
    kvf_arrival *arrival = expect->arrival;
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < expect->source_count && !status; i++) {
        const kvf_source *source = &expect->sources[i];
        char name[KVF_ENDPOINT_NAME_BYTES];
        if (source->target->source == UINT32_MAX || !source->session)
            continue;
        kvf_endpoint_name(name, source->session->engine, source->session->rank, source->session->incarnation);
        status = kvf_stage_count(expect->base.agent->stage, name, kvf_expect_generation(expect),
                                 of_source(arrival, arrival->come, source->target->source));
    }
    return status;
}

static kvf_status start_counting(kvf_asker *expect) {
    kvf_arrival *arrival = expect->arrival;
    const uint32_t sources = kvf_plan_source_count(expect->remote->plan);
    arrival->come = kvf_alloc0(sources, arrival->all * sizeof *arrival->come);
    arrival->awaited = kvf_alloc0(sources, arrival->all * sizeof *arrival->awaited);
    kvf_status status = arrival->come && arrival->awaited ? KVF_OK : kvf_nomem("a count of layers");
    for (uint32_t i = 0; i < sources && !status; i++)
        status = add_source(expect, i, of_source(arrival, arrival->awaited, i));
    if (!status)
        status = count_writers(expect);
    if (status)
        kvf_stage_count_no_more(expect->base.agent->stage, kvf_expect_generation(expect));
    return status;
}

void kvf_brought_begin(kvf_asker *expect) {
    kvf_arrival *arrival = expect->arrival;
    KVF_ASSERT(kvf_work_is_ours(expect->base.agent));
    if (!arrival || arrival->come || expect->base.agent->options.verify)
        return;
    arrival->counts = !start_counting(expect);
    if (arrival->counts)
        return;
    kvf_free(arrival->awaited);
    arrival->awaited = NULL;
}

static bool has_layer(const kvf_asker *expect, uint32_t layer) {
    const kvf_arrival *arrival = expect->arrival;
    const uint32_t sources = kvf_plan_source_count(expect->remote->plan);
    for (uint32_t i = 0; i < sources; i++)
        if (of_source(arrival, arrival->come, i)[layer] < of_source(arrival, arrival->awaited, i)[layer])
            return false;
    return true;
}

uint32_t kvf_brought_layers(const kvf_ticket *ticket) {
    const kvf_asker *expect = (const kvf_asker *)ticket;
    const kvf_arrival *arrival = expect->arrival;
    uint32_t layers = arrival->layers;
    while (arrival->counts && layers < arrival->all && has_layer(expect, layers))
        layers++;
    return layers;
}

void kvf_brought_end(kvf_asker *expect) {
    if (!expect->arrival || !expect->arrival->counts)
        return;
    KVF_ASSERT(kvf_work_is_ours(expect->base.agent));
    kvf_stage_count_no_more(expect->base.agent->stage, kvf_expect_generation(expect));
    expect->arrival->counts = false;
}
