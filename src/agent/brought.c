#include "agent/brought.h"

#include "agent/expect.h"
#include "stage/stream.h"
#include "stage/ways.h"

/* Adds what one source of the plan gives: its stream in our memory, as its flows have it in parts. */
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

static kvf_status start_counting(kvf_asker *expect) {
    kvf_arrival *arrival = expect->arrival;
    arrival->come = kvf_alloc0(arrival->all, sizeof *arrival->come);
    arrival->awaited = kvf_alloc0(arrival->all, sizeof *arrival->awaited);
    kvf_status status = arrival->come && arrival->awaited ? KVF_OK : kvf_nomem("a count of layers");
    for (uint32_t i = 0; i < kvf_plan_source_count(expect->remote->plan) && !status; i++)
        status = add_source(expect, i, arrival->awaited);
    if (!status)
        status = kvf_stage_count(expect->base.agent->stage, kvf_expect_generation(expect), arrival->come);
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

uint32_t kvf_brought_layers(const kvf_ticket *expect) {
    const kvf_arrival *arrival = ((const kvf_asker *)expect)->arrival;
    uint32_t layers = 0;
    if (!arrival->counts)
        return 0;
    while (layers < arrival->all && arrival->come[layers] >= arrival->awaited[layers])
        layers++;
    return layers;
}

void kvf_brought_end(kvf_asker *expect) {
    if (!expect->arrival || !expect->arrival->counts)
        return;
    KVF_ASSERT(kvf_work_is_ours(expect->base.agent));
    (void)kvf_stage_count(expect->base.agent->stage, kvf_expect_generation(expect), NULL);
    expect->arrival->counts = false;
}
