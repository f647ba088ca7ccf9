/* gemma.json: the per-group plan, its reads and its tables. */
#include <kvferry/connector/page_groups.h>

#include "vectors.h"

static kvf_page_plan_desc read_desc(vector_case *c) {
    json_object *heads_field = read_field(c, c->in, "group_kv_heads");
    size_t count = read_length(c, heads_field);
    uint32_t *heads = read_u32s(c, heads_field, count, 0);
    uint32_t *local = read_u32s(c, read_field(c, c->in, "local_tokens_per_block"), count, 0);
    uint32_t *remote = read_u32s(c, read_field(c, c->in, "remote_tokens_per_block"), count, 0);
    kvf_page_group *groups = case_memory(c, count, sizeof *groups);
    for (size_t g = 0; g < count; g++)
        groups[g] = (kvf_page_group){heads[g], local[g], remote[g]};
    return (kvf_page_plan_desc){.struct_size = sizeof(kvf_page_plan_desc),
                                .tp_size = read_u32(c, c->in, "tp_size"),
                                .tp_rank = read_u32(c, c->in, "tp_rank"),
                                .remote_tp_size = read_u32(c, c->in, "remote_tp_size"),
                                .groups = groups,
                                .group_count = count,
                                .local_page_bytes = read_u64(c, c->in, "local_page_bytes"),
                                .remote_page_bytes = read_u64(c, c->in, "remote_page_bytes"),
                                .blocks_first = read_bool(c, c->in, "blocks_first"),
                                .layer_count = read_u32(c, c->in, "num_layers"),
                                .remote_num_blocks = read_u64(c, c->in, "remote_num_blocks")};
}

static json_object *pair_of(uint64_t a, uint64_t b) {
    json_object *pair = json_object_new_array();
    json_object_array_add(pair, json_u64(a));
    json_object_array_add(pair, json_u64(b));
    return pair;
}

static json_object *region_of(const kvf_region_plan *region) {
    json_object *out = with(json_object_new_object(), "layer", json_u64(region->layer));
    with(out, "desc_bytes", json_u64(region->desc_bytes));
    with(out, "offset_in_page", json_u64(region->offset_in_page));
    with(out, "page_stride", json_u64(region->page_stride));
    with(out, "num_blocks", json_u64(region->num_blocks));
    with(out, "descs_per_block", json_u64(region->descs_per_block));
    return with(out, "desc_stride", json_u64(region->desc_stride));
}

static json_object *plan_of(const kvf_page_plan *plan) {
    json_object *local_blocks = json_object_new_array(), *remote_blocks = json_object_new_array();
    json_object *offsets = json_object_new_array(), *sources = json_object_new_array();
    json_object *slots = json_object_new_array(), *regions = json_object_new_array();
    for (size_t g = 0; g < plan->group_count; g++) {
        const kvf_group_plan *group = &plan->groups[g];
        json_object_array_add(local_blocks, json_u64(group->local_blocks_per_remote_block));
        json_object_array_add(remote_blocks, json_u64(group->remote_blocks_per_local_block));
        json_object_array_add(offsets, json_u64(group->remote_desc_offset));
        json_object_array_add(sources, json_ids(&group->source_ranks));
        json_object *ranks = json_object_new_array();
        for (size_t slot = 0; slot < group->source_ranks.count; slot++)
            json_object_array_add(ranks, pair_of(group->source_ranks.at[slot], slot));
        json_object_array_add(slots, ranks);
    }
    for (size_t r = 0; r < plan->region_count; r++)
        json_object_array_add(regions, region_of(&plan->regions[r]));
    json_object *out = json_object_new_object();
    with(out, "remote_to_local_page_ratio", json_u64(plan->remote_to_local_page_ratio));
    with(out, "local_to_remote_page_ratio", json_u64(plan->local_to_remote_page_ratio));
    with(out, "local_blocks_per_remote_block", local_blocks);
    with(out, "remote_blocks_per_local_block", remote_blocks);
    with(out, "remote_desc_offset", offsets);
    with(out, "source_ranks_per_group", sources);
    with(out, "all_source_ranks", json_ids(&plan->all_source_ranks));
    with(out, "rank_to_slot_per_group", slots);
    return with(out, "regions", regions);
}

static answer plan_answer(vector_case *c) {
    kvf_page_plan_desc desc = read_desc(c);
    kvf_page_plan plan;
    if (kvf_page_plan_build(&desc, &plan))
        return answer_refused();
    json_object *out = plan_of(&plan);
    kvf_page_plan_free(&plan);
    return answer_with(out);
}

static kvf_status add_flat(json_object *spec, const char *name, const kvf_block_lists *lists,
                           uint32_t regions, uint64_t per_region) {
    kvf_ids flat;
    kvf_status status = kvf_flat_desc_ids(lists, regions, per_region, &flat);
    if (!status)
        with(spec, name, take_ids(&flat));
    return status;
}

static kvf_status add_spec(vector_case *c, const kvf_page_plan *plan, uint64_t rank,
                           const kvf_block_lists *local, const kvf_block_lists *remote, json_object *specs) {
    kvf_block_lists ours, theirs;
    kvf_status status = kvf_page_plan_read(plan, 0, local, remote, rank, &ours, &theirs);
    if (status)
        return status;
    json_object *spec = with(json_object_new_object(), "remote_rank", json_u64(rank));
    if (has_field(c->in, "num_regions")) {
        uint32_t regions = read_u32(c, c->in, "num_regions");
        status = add_flat(spec, "flat_local", &ours, regions, read_u64(c, c->in, "local_descs_per_region"));
        if (!status)
            status = add_flat(spec, "flat_remote", &theirs, regions,
                              read_u64(c, c->in, "remote_descs_per_region"));
    }
    with(spec, "local_desc_ids", take_lists(&ours));
    with(spec, "remote_desc_ids", take_lists(&theirs));
    json_object_array_add(specs, spec);
    return status;
}

static answer read_specs(vector_case *c) {
    kvf_page_plan_desc desc = read_desc(c);
    kvf_block_lists local = read_lists(c, read_field(c, c->in, "local_block_ids"));
    kvf_block_lists remote = read_lists(c, read_field(c, c->in, "remote_block_ids"));
    kvf_page_plan plan;
    if (kvf_page_plan_build(&desc, &plan))
        return answer_refused();
    json_object *specs = json_object_new_array();
    kvf_status status = KVF_OK;
    for (size_t i = 0; !status && i < plan.all_source_ranks.count; i++)
        status = add_spec(c, &plan, plan.all_source_ranks.at[i], &local, &remote, specs);
    kvf_page_plan_free(&plan);
    json_object *out = with(json_object_new_object(), "specs", specs);
    if (!status)
        return answer_with(out);
    json_object_put(out);
    return answer_refused();
}

static answer desc_tables(vector_case *c) {
    kvf_page_plan_desc desc = read_desc(c);
    kvf_ids remote_base = read_ids(c, read_field(c, c->in, "remote_base"));
    kvf_ids local_base = read_ids(c, read_field(c, c->in, "local_base"));
    if (remote_base.count < desc.layer_count || local_base.count < desc.layer_count)
        return answer_not_covered("one base a layer is needed");
    kvf_page_plan plan;
    if (kvf_page_plan_build(&desc, &plan))
        return answer_refused();
    kvf_descriptor_table table;
    json_object *out = json_object_new_object();
    kvf_status status =
        kvf_page_plan_remote_table(&plan, remote_base.at, read_u32(c, c->in, "remote_device"), &table);
    if (!status)
        with(out, "remote", take_table(&table));
    if (!status && plan.local_to_remote_page_ratio > 1) {
        status = kvf_page_plan_local_table(&plan, local_base.at, read_u64(c, c->in, "local_num_blocks"),
                                           read_u32(c, c->in, "local_device"), &table);
        if (!status)
            with(out, "local", take_table(&table));
    }
    kvf_page_plan_free(&plan);
    if (!status)
        return answer_with(out);
    json_object_put(out);
    return answer_refused();
}

const vector_op gemma_ops[] = {
    /* Some suspects have a right plan, and only the reads made from it are wrong. */
    {"plan", plan_answer, true},
    {"read_specs", read_specs, false},
    {"desc_tables", desc_tables, false},
    {NULL, NULL, false},
};
