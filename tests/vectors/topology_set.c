/* topology.json: ratios, flags, ranks, layouts, and registration. */
#include <string.h>

#include "vectors.h"

/* Asks a question of every local rank; the first refusal is the answer. */
typedef kvf_status (*rank_question)(vector_case *c, const kvf_topology *topology,
                                    const kvf_engine_transfer_info *remote, json_object *out);

static kvf_status ask_rank(vector_case *c, const kvf_topology_desc *desc,
                           const kvf_engine_transfer_info *remote, rank_question ask, json_object *ranks) {
    kvf_topology *topology;
    kvf_status status = kvf_topology_create(desc, &topology);
    if (status)
        return status;
    json_object *out = json_object_new_object();
    status = ask(c, topology, remote, out);
    json_object_array_add(ranks, out);
    kvf_topology_free(topology);
    return status;
}

static kvf_status ask_every_rank(vector_case *c, kvf_topology_desc desc,
                                 const kvf_engine_transfer_info *remote, rank_question ask,
                                 json_object *out) {
    json_object *ranks = json_object_new_array();
    with(out, "per_rank", ranks);
    kvf_status status = KVF_OK;
    for (desc.tp_rank = 0; !status && desc.tp_rank < desc.tp_size; desc.tp_rank++)
        status = ask_rank(c, &desc, remote, ask, ranks);
    return status;
}

/* The answer, or a refusal without one. */
static answer finish(kvf_status status, json_object *out) {
    if (!status)
        return answer_with(out);
    json_object_put(out);
    return answer_refused();
}

/* ---- pairs of engines */

static kvf_status pair_rank(vector_case *c, const kvf_topology *topology,
                            const kvf_engine_transfer_info *remote, json_object *out) {
    (void)c;
    kvf_ids handshake = {0}, targets = {0};
    kvf_status status = kvf_handshake_target_ranks(topology, remote, &handshake);
    if (!status)
        status = kvf_target_remote_ranks(topology, remote, &targets);
    with(out, "handshake_target_ranks", take_ids(&handshake));
    with(out, "target_remote_ranks", take_ids(&targets));
    return status;
}

static answer tp_pair(vector_case *c) {
    kvf_topology_desc desc = read_topology(c, 0);
    kvf_engine_transfer_info remote = read_remote(c);
    kvf_topology *topology;
    if (kvf_topology_create(&desc, &topology))
        return answer_refused();
    json_object *out = json_object_new_object();
    int64_t ratio = 0;
    kvf_status status = kvf_tp_ratio(topology, &remote, &ratio);
    with(out, "tp_ratio", json_object_new_int64(ratio));
    with(out, "is_kv_replicated", json_object_new_boolean(kvf_is_kv_replicated(topology, &remote)));
    with(out, "replicates_kv_cache", json_object_new_boolean(kvf_replicates_kv_cache(topology, &remote)));
    with(out, "local_replicates_kv_cache", json_object_new_boolean(kvf_local_replicates_kv_cache(topology)));
    with(out, "local_physical_heads", json_u64(kvf_physical_heads(desc.total_kv_heads, desc.tp_size)));
    kvf_topology_free(topology);
    if (!status)
        status = ask_every_rank(c, desc, &remote, pair_rank, out);
    return finish(status, out);
}

static answer block_size_ratio(vector_case *c) {
    kvf_topology_desc desc = {.struct_size = sizeof desc,
                              .engine_id = "local",
                              .tp_size = 1,
                              .total_kv_heads = 1,
                              .block_size = read_u32(c, c->in, "block_size")};
    kvf_engine_transfer_info remote = {
        .struct_size = sizeof remote, .tp_size = 1, .block_size = read_u32(c, c->in, "remote_block_size")};
    kvf_topology *topology;
    if (kvf_topology_create(&desc, &topology))
        return answer_refused();
    uint32_t ratio = 0;
    kvf_status status = kvf_block_size_ratio(topology, &remote, &ratio);
    kvf_topology_free(topology);
    return finish(status, with(json_object_new_object(), "block_size_ratio", json_u64(ratio)));
}

static answer head_range(vector_case *c) {
    uint32_t tp_size = read_u32(c, c->in, "tp_size"), heads = read_u32(c, c->in, "total_kv_heads");
    json_object *ranges = json_object_new_array();
    kvf_status status = KVF_OK;
    if (tp_size > 65536) /* an answer of that length would fill the memory */
        tp_size = 0;
    for (uint32_t rank = 0; !status && rank < tp_size; rank++) {
        kvf_range range = {0};
        status = kvf_physical_head_range(tp_size, heads, rank, &range);
        json_object *pair = json_object_new_array();
        json_object_array_add(pair, json_u64(range.begin));
        json_object_array_add(pair, json_u64(range.end));
        json_object_array_add(ranges, pair);
    }
    return finish(status, with(json_object_new_object(), "ranges", ranges));
}

static kvf_status dcp_rank(vector_case *c, const kvf_topology *topology,
                           const kvf_engine_transfer_info *remote, json_object *out) {
    (void)c;
    kvf_ids handshake = {0}, sources = {0};
    kvf_status status = kvf_handshake_target_ranks(topology, remote, &handshake);
    if (!status)
        status = kvf_dcp_source_ranks(topology, remote, &sources);
    with(out, "dcp_rank", json_u64(kvf_dcp_rank(topology)));
    with(out, "handshake_target_ranks", take_ids(&handshake));
    if (remote->dcp_size > 1)
        with(out, "dcp_source_ranks", json_ids(&sources));
    kvf_ids_free(&sources);
    return status;
}

static answer dcp(vector_case *c) {
    kvf_topology_desc desc = read_topology(c, 0);
    kvf_engine_transfer_info remote = read_remote(c);
    desc.is_mla = true; /* only latents have token shares */
    kvf_topology *topology;
    if (kvf_topology_create(&desc, &topology))
        return answer_refused();
    uint32_t consumers = 0;
    kvf_status status = kvf_consumers_per_source(topology, &remote, &consumers);
    kvf_topology_free(topology);
    json_object *out = with(json_object_new_object(), "consumers_per_source", json_u64(consumers));
    if (!status)
        status = ask_every_rank(c, desc, &remote, dcp_rank, out);
    return finish(status, out);
}

/* ---- models with state */

static kvf_status source_flags(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                               const kvf_ids *sources, json_object *out) {
    json_object *skips = json_object_new_array(), *slots = json_object_new_array();
    with(with(out, "skip_fa", skips), "fa_head_slot", slots);
    for (size_t i = 0; i < sources->count; i++) {
        bool skip;
        uint64_t slot = 0;
        kvf_status status = kvf_should_skip_fa(topology, remote, (uint32_t)sources->at[i], &skip);
        if (status)
            return status;
        status = kvf_fa_head_slot(topology, remote, (uint32_t)sources->at[i], &slot);
        if (status && status != KVF_E_NOT_FOUND)
            return status;
        json_object_array_add(skips, json_object_new_boolean(skip));
        json_object_array_add(slots, status ? NULL : json_u64(slot));
    }
    return KVF_OK;
}

static kvf_status hybrid_rank(vector_case *c, const kvf_topology *topology,
                              const kvf_engine_transfer_info *remote, json_object *out) {
    kvf_ids attention = {0}, state = {0}, all = {0};
    uint64_t offset = 0;
    bool split = false;
    kvf_status status = kvf_fa_source_ranks(topology, remote, &attention);
    if (!status)
        status = kvf_state_source_ranks(topology, remote, &state);
    if (!status)
        status = kvf_all_source_ranks(topology, remote, &all);
    if (!status)
        status = kvf_fa_rank_offset(topology, remote, read_u64(c, c->in, "local_block_len") / 2, &offset);
    if (!status)
        status = kvf_needs_split_handles(topology, remote, &split);
    if (!status)
        status = source_flags(topology, remote, &all, out);
    with(out, "num_fa_reads", json_u64(attention.count));
    with(out, "num_mamba_reads", json_u64(state.count));
    with(out, "fa_source_ranks", take_ids(&attention));
    with(out, "all_source_ranks", take_ids(&all));
    with(out, "fa_rank_offset", json_u64(offset));
    with(out, "needs_split_handles", json_object_new_boolean(split));
    kvf_ids_free(&state);
    return status;
}

static answer mamba_engine(vector_case *c) {
    kvf_topology_desc desc = read_topology(c, 0);
    kvf_engine_transfer_info remote = read_remote(c);
    if (c->is_seed && desc.is_mla && remote.tp_size > 1 && remote.tp_size != desc.tp_size)
        return answer_not_covered(
            "a latent is read from rank 0, and its state is not split; 0.32 does neither");
    desc.is_mamba = true;
    desc.block_bytes = read_u64(c, c->in, "local_block_len");
    remote.block_bytes = read_u64(c, c->in, "remote_block_len");
    kvf_topology *topology;
    if (kvf_topology_create(&desc, &topology))
        return answer_refused();
    int64_t ratio = 0;
    uint64_t bytes = 0;
    kvf_layout_flags flags = {0};
    static const uint64_t probe[] = {1, 2, 16, 1, 1};
    json_object *out = json_object_new_object();
    kvf_status status = ask_every_rank(c, desc, &remote, hybrid_rank, out);
    if (!status)
        status = kvf_tp_ratio(topology, &remote, &ratio);
    if (!status)
        status = kvf_fa_descriptor_bytes(topology, &remote, &bytes);
    if (!status)
        status = kvf_detect_layout(probe, 5, desc.is_mla, true, 0, &flags);
    with(out, "tp_ratio", json_object_new_int64(ratio));
    with(out, "fa_descriptor_bytes", json_u64(bytes));
    with(out, "is_remote_replicated", json_object_new_boolean(kvf_is_kv_replicated(topology, &remote)));
    with(out, "remote_physical_heads", json_u64(kvf_physical_heads(desc.total_kv_heads, remote.tp_size)));
    with(out, "local_physical_heads", json_u64(kvf_physical_heads(desc.total_kv_heads, desc.tp_size)));
    with(out, "is_kv_layout_blocks_first", json_object_new_boolean(flags.is_kv_layout_blocks_first));
    with(out, "split_k_and_v", json_object_new_boolean(flags.split_k_and_v));
    kvf_topology_free(topology);
    return finish(status, out);
}

/* The handles of all sources, for ops about one rank. */
static kvf_status split_every_source(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                     const kvf_ids *sources, const kvf_descriptor_table *table,
                                     json_object *handles) {
    for (size_t i = 0; i < sources->count; i++) {
        kvf_descriptor_table split;
        kvf_status status =
            kvf_compute_split_handle_data(topology, remote, table, (uint32_t)sources->at[i], &split);
        if (status)
            return status;
        json_object_array_add(handles, take_table(&split));
    }
    return KVF_OK;
}

static answer split_handles(vector_case *c) {
    kvf_topology_desc desc = read_topology(c, read_u32(c, c->in, "tp_rank"));
    desc.is_mamba = true;
    kvf_engine_transfer_info remote = read_remote(c);
    kvf_descriptor_table table =
        read_table(c, read_field(c, c->in, "descs"), read_u64(c, c->in, "num_fa_descs"));
    kvf_topology *topology;
    if (kvf_topology_create(&desc, &topology))
        return answer_refused();
    kvf_ids sources = {0};
    json_object *handles = json_object_new_array();
    kvf_status status = kvf_all_source_ranks(topology, &remote, &sources);
    if (!status)
        status = split_every_source(topology, &remote, &sources, &table, handles);
    kvf_topology_free(topology);
    json_object *out = with(json_object_new_object(), "source_ranks", take_ids(&sources));
    return finish(status, with(out, "handles", handles));
}

static kvf_status filter_for(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                             const kvf_cache_kind *kinds, uint64_t rank, const kvf_block_lists *local,
                             const kvf_block_lists *other, json_object *list) {
    kvf_block_lists ours, theirs;
    kvf_status status =
        kvf_filter_block_ids_for_rank(topology, remote, kinds, (uint32_t)rank, local, other, &ours, &theirs);
    if (status)
        return status;
    json_object *entry = with(json_object_new_object(), "remote_rank", json_u64(rank));
    with(entry, "local", take_lists(&ours));
    with(entry, "remote", take_lists(&theirs));
    json_object_array_add(list, entry);
    return KVF_OK;
}

static answer filter_block_ids(vector_case *c) {
    kvf_topology_desc desc = read_topology(c, read_u32(c, c->in, "tp_rank"));
    desc.is_mamba = true;
    kvf_engine_transfer_info remote = read_remote(c);
    kvf_block_lists local = read_lists(c, read_field(c, c->in, "local_block_ids"));
    kvf_block_lists other = read_lists(c, read_field(c, c->in, "remote_block_ids"));
    json_object *flags = read_field(c, c->in, "ssm_group");
    size_t groups = local.count > other.count ? local.count : other.count;
    bool *is_state = read_bools(c, flags, groups);
    kvf_cache_kind *kinds = case_memory(c, groups, sizeof *kinds);
    for (size_t g = 0; g < groups; g++)
        kinds[g] = is_state[g] ? KVF_CACHE_SSM : KVF_CACHE_FULL;
    kvf_topology *topology;
    if (kvf_topology_create(&desc, &topology))
        return answer_refused();
    kvf_ids sources = {0};
    json_object *list = json_object_new_array();
    kvf_status status = kvf_all_source_ranks(topology, &remote, &sources);
    for (size_t i = 0; !status && i < sources.count; i++)
        status = filter_for(topology, &remote, kinds, sources.at[i], &local, &other, list);
    kvf_ids_free(&sources);
    kvf_topology_free(topology);
    return finish(status, with(json_object_new_object(), "per_source_rank", list));
}

static answer describe(vector_case *c) {
    kvf_topology_desc desc = read_topology(c, read_u32(c, c->in, "tp_rank"));
    kvf_engine_transfer_info remote = read_remote(c);
    desc.is_mamba = read_bool(c, c->in, "is_mamba");
    desc.dcp_size = read_u32_or(c, c->in, "local_dcp_size", 1);
    if (has_field(c->in, "local_block_len"))
        desc.block_bytes = read_u64(c, c->in, "local_block_len");
    remote.block_bytes = read_u64(c, c->in, "remote_block_len");
    remote.pp_rank = read_u32_or(c, c->in, "remote_pp_rank", 0);
    kvf_topology *topology;
    if (kvf_topology_create(&desc, &topology))
        return answer_refused();
    char *text = NULL;
    kvf_status status = kvf_topology_describe(topology, &remote, &text);
    kvf_topology_free(topology);
    if (status)
        return answer_refused();
    json_object *out = with(json_object_new_object(), "text", json_object_new_string(text));
    kvf_topology_free_text(text);
    return answer_with(out);
}

static answer layout(vector_case *c) {
    kvf_ids shape = read_ids(c, read_field(c, c->in, "probe_shape"));
    kvf_layout_flags flags;
    if (kvf_detect_layout(shape.at, shape.count, read_bool(c, c->in, "is_mla"),
                          read_bool(c, c->in, "is_mamba"), read_u32_or(c, c->in, "registered_tensor_ndim", 0),
                          &flags))
        return answer_refused();
    json_object *out = json_object_new_object();
    with(out, "is_kv_layout_blocks_first", json_object_new_boolean(flags.is_kv_layout_blocks_first));
    with(out, "cross_layers_blocks", json_object_new_boolean(flags.cross_layers_blocks));
    return answer_with(with(out, "split_k_and_v", json_object_new_boolean(flags.split_k_and_v)));
}

/* ---- registration */

static json_object *facts_of(kvf_status status, const kvf_engine_transfer_info *facts) {
    json_object *out = json_object_new_object();
    if (status)
        return with(out, "error", json_object_new_string(kvf_refusal_name(kvf_topology_refusal())));
    with(out, "tp", json_u64(facts->tp_size));
    with(out, "block_size", json_u64(facts->block_size));
    with(out, "block_len", json_u64(facts->block_bytes));
    return with(out, "ppl", json_u64(facts->physical_blocks_per_logical));
}

static json_object *run_step(vector_case *c, kvf_topology *topology, json_object *step) {
    const char *what = read_text(c, step, "do"), *id = read_text(c, step, "engine_id");
    kvf_engine_transfer_info facts = {.struct_size = sizeof facts};
    if (strcmp(what, "unregister") == 0) {
        kvf_topology_unregister(topology, id);
        return with(json_object_new_object(), "ok", json_object_new_boolean(true));
    }
    if (strcmp(what, "get") == 0) {
        kvf_status status = kvf_topology_get(topology, id, &facts);
        return facts_of(status, &facts);
    }
    facts.tp_size = read_u32(c, step, "tp");
    facts.block_size = read_u32(c, step, "block_size");
    facts.block_bytes = read_u64(c, step, "block_len");
    facts.physical_blocks_per_logical = read_u32(c, step, "ppl");
    kvf_status status = kvf_topology_register(topology, id, &facts, &facts);
    return facts_of(status, &facts);
}

static answer registration(vector_case *c) {
    kvf_topology_desc desc = {.struct_size = sizeof desc,
                              .engine_id = read_text(c, c->in, "local_engine_id"),
                              .tp_size = 1,
                              .block_size = 16,
                              .total_kv_heads = 1};
    kvf_topology *topology;
    if (kvf_topology_create(&desc, &topology))
        return answer_refused();
    json_object *steps = read_field(c, c->in, "steps"), *results = json_object_new_array();
    size_t count = read_length(c, steps);
    for (size_t i = 0; i < count; i++)
        json_object_array_add(results, run_step(c, topology, json_object_array_get_idx(steps, i)));
    kvf_topology_free(topology);
    return answer_with(with(json_object_new_object(), "steps", results));
}

const vector_op topology_ops[] = {
    {"tp_pair", tp_pair, false},
    {"block_size_ratio", block_size_ratio, false},
    {"head_range", head_range, false},
    {"mamba_engine", mamba_engine, false},
    {"split_handles", split_handles, false},
    {"filter_block_ids", filter_block_ids, false},
    {"describe", describe, false},
    {"layout", layout, false},
    {"register", registration, false},
    {"dcp", dcp, false},
    {NULL, NULL, false},
};
