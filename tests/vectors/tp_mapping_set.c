/* tp_mapping.json: the remote ranks that each group is read from, and local blocks cut for them. */
#include "vectors.h"

static json_object *slots_of(const kvf_tp_mapping *mapping) {
    json_object *slots = json_object_new_array();
    for (size_t i = 0; i < mapping->all_source_ranks.count; i++) {
        json_object *pair = json_object_new_array();
        json_object_array_add(pair, json_u64(mapping->all_source_ranks.at[i]));
        json_object_array_add(pair, json_u64(mapping->attention_slot[i]));
        json_object_array_add(slots, pair);
    }
    return slots;
}

static kvf_status map_rank(const kvf_topology_desc *desc, const kvf_engine_transfer_info *remote,
                           const kvf_cache_kind *kinds, size_t groups, json_object *ranks,
                           uint32_t *consumers) {
    kvf_topology *topology;
    kvf_tp_mapping mapping = {0};
    kvf_status status = kvf_topology_create(desc, &topology);
    if (status)
        return status;
    status = kvf_tp_mapping_build(topology, remote, kinds, groups, &mapping);
    kvf_topology_free(topology);
    if (status)
        return status;
    kvf_block_lists per_group = {mapping.source_ranks, mapping.group_count};
    json_object *out = with(json_object_new_object(), "source_ranks_per_group", json_lists(&per_group));
    with(out, "all_source_ranks", json_ids(&mapping.all_source_ranks));
    with(out, "rank_to_attention_slot", slots_of(&mapping));
    with(out, "rank_offset_factor", json_u64(mapping.rank_offset_factor));
    json_object_array_add(ranks, out);
    *consumers = mapping.local_consumers;
    kvf_tp_mapping_free(&mapping);
    return KVF_OK;
}

static answer tp_mapping(vector_case *c) {
    kvf_topology_desc desc = read_topology(c, 0);
    kvf_engine_transfer_info remote = read_remote(c);
    json_object *groups = read_field(c, c->in, "groups"), *ranks = json_object_new_array();
    size_t count = read_length(c, groups);
    kvf_cache_kind *kinds = read_kinds(c, groups, count);
    uint32_t consumers = 0;
    kvf_status status = KVF_OK;
    for (desc.tp_rank = 0; !status && desc.tp_rank < desc.tp_size; desc.tp_rank++)
        status = map_rank(&desc, &remote, kinds, count, ranks, &consumers);
    json_object *out = with(json_object_new_object(), "per_rank", ranks);
    if (!c->is_seed)
        with(out, "local_consumers", json_u64(consumers));
    if (!status)
        return answer_with(out);
    json_object_put(out);
    return answer_refused();
}

static kvf_status split_sources(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                const kvf_tp_mapping *mapping, const kvf_descriptor_table *table,
                                const kvf_replicated_regions *replicated, json_object *handles) {
    for (size_t i = 0; i < mapping->all_source_ranks.count; i++) {
        kvf_descriptor_table split;
        kvf_status status = kvf_split_descriptors(
            topology, remote, table, (uint32_t)mapping->all_source_ranks.at[i], replicated, &split);
        if (status)
            return status;
        json_object_array_add(handles, take_table(&split));
    }
    return KVF_OK;
}

static answer local_splits(vector_case *c) {
    kvf_topology_desc desc = read_topology(c, read_u32(c, c->in, "tp_rank"));
    kvf_engine_transfer_info remote = read_remote(c);
    json_object *groups = read_field(c, c->in, "groups");
    size_t count = read_length(c, groups);
    kvf_cache_kind *kinds = read_kinds(c, groups, count);
    kvf_descriptor_table table =
        read_table(c, read_field(c, c->in, "descs"), read_u64(c, c->in, "num_fa_descs"));
    kvf_replicated_regions replicated = {0};
    if (has_field(c->in, "region_replicated")) {
        json_object *flags = read_field(c, c->in, "region_replicated");
        size_t regions = read_length(c, flags);
        replicated = (kvf_replicated_regions){read_bools(c, flags, regions), regions,
                                              read_u64(c, c->in, "blocks_per_region")};
    }
    kvf_topology *topology;
    kvf_tp_mapping mapping = {0};
    if (kvf_topology_create(&desc, &topology))
        return answer_refused();
    json_object *handles = json_object_new_array();
    kvf_status status = kvf_tp_mapping_build(topology, &remote, kinds, count, &mapping);
    if (!status)
        status = split_sources(topology, &remote, &mapping, &table, &replicated, handles);
    json_object *out = with(json_object_new_object(), "source_ranks", json_ids(&mapping.all_source_ranks));
    with(out, "handles", handles);
    kvf_tp_mapping_free(&mapping);
    kvf_topology_free(topology);
    if (!status)
        return answer_with(out);
    json_object_put(out);
    return answer_refused();
}

static answer needs_split(vector_case *c) {
    bool split = kvf_needs_split(read_bool(c, c->in, "is_mla"), read_i64(c, c->in, "tp_ratio"),
                                 read_u64(c, c->in, "num_source_ranks"));
    return answer_with(with(json_object_new_object(), "needs_split", json_object_new_boolean(split)));
}

const vector_op tp_mapping_ops[] = {
    {"tp_mapping", tp_mapping, false},
    {"tp_mapping_dcp", tp_mapping, false},
    {"local_splits", local_splits, false},
    {"needs_split", needs_split, false},
    {NULL, NULL, false},
};
