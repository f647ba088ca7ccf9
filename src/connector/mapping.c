/*
 * Which remote ranks each group is read from, and which piece each of them has.
 *
 *   local heads            | 0 | 1 | 2 | 3 |
 *   rank 0, 1 of 8 hold      0   .   .   .       sources 0, 2, 4, 6: the first holder of each head
 *   rank 2, 3 of 8 hold      .   1   .   .       slots   0  0  1  1  2 ...: by rank, which source has its piece
 */
#include "connector/connector.h"

/* The attention side of a mapping. */
typedef struct attention_view {
    kvf_ids targets; /* ranks of the handshake */
    kvf_ids sources; /* the targets that attention is read from */
    uint64_t *slot;  /* parallel to targets */
    uint64_t rank_offset_factor;
} attention_view;

static void free_view(attention_view *view) {
    kvf_ids_free(&view->targets);
    kvf_ids_free(&view->sources);
    kvf_free(view->slot);
}

/* Every token share is a source of its own. For a latent any slot would do: each target gets the last one. */
static void map_latent(const kvf_engine_transfer_info *remote, attention_view *view) {
    size_t sources = remote->dcp_size > 1 ? view->targets.count : 1;
    for (size_t i = 0; i < sources; i++)
        kvf_ids_add(&view->sources, view->targets.at[i]);
    for (size_t i = 0; i < view->targets.count; i++)
        view->slot[i] = sources - 1;
}

static kvf_status map_heads(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                            attention_view *view) {
    uint32_t covered = 0, local_units = 0;
    for (size_t i = 0; i < view->targets.count; i++) {
        kvf_shared_units shared;
        kvf_status status = kvf_shared_attention(topology, remote, (uint32_t)view->targets.at[i], &shared);
        if (status)
            return status;
        local_units = shared.local_units;
        view->slot[i] = KVF_NO_SLOT;
        if (!shared.units)
            continue;
        /* Target ranks ascend, and so do their heads: a rank has new heads if its last one is not covered yet. */
        if (shared.local_begin + shared.units > covered) {
            if (!view->sources.count && shared.remote_begin % shared.units)
                return kvf_refuse(KVF_REFUSAL_LENGTH_NOT_DIVISIBLE, KVF_E_NOT_EXPRESSIBLE,
                                  "the local heads begin at head %u of remote rank %u, which is not a "
                                  "multiple of the %u local heads",
                                  shared.remote_begin, (unsigned)view->targets.at[i], shared.units);
            if (!view->sources.count)
                view->rank_offset_factor = shared.remote_begin / shared.units;
            covered = shared.local_begin + shared.units;
            kvf_ids_add(&view->sources, view->targets.at[i]);
        }
        view->slot[i] = view->sources.count - 1;
    }
    if (covered != local_units)
        return kvf_refuse(KVF_REFUSAL_HEADS_NOT_DIVISIBLE, KVF_E_NOT_EXPRESSIBLE,
                          "the target ranks hold %u of the %u local heads", covered, local_units);
    return KVF_OK;
}

static kvf_status view_attention(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                 attention_view *out) {
    attention_view view = {0};
    kvf_status status = kvf_handshake_target_ranks(topology, remote, &view.targets);
    if (!status)
        status = kvf_ids_make(&view.sources, view.targets.count);
    if (!status && !(view.slot = kvf_alloc(view.targets.count, sizeof *view.slot)))
        status = kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu slots", view.targets.count);
    if (!status && topology->local.is_mla)
        map_latent(remote, &view);
    else if (!status)
        status = map_heads(topology, remote, &view);
    if (status) {
        free_view(&view);
        return status;
    }
    *out = view;
    return KVF_OK;
}

/* The targets that some group reads from, ascending, with their slots. */
static kvf_status join_sources(const attention_view *view, bool has_state, bool has_attention,
                               kvf_tp_mapping *mapping) {
    kvf_status status = kvf_ids_make(&mapping->all_source_ranks, view->targets.count);
    if (status)
        return status;
    mapping->attention_slot = kvf_alloc(view->targets.count, sizeof *mapping->attention_slot);
    if (!mapping->attention_slot)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu slots", view->targets.count);
    for (size_t i = 0; i < view->targets.count; i++) {
        uint64_t rank = view->targets.at[i];
        if (!has_state && !(has_attention && kvf_ids_have(&view->sources, rank)))
            continue;
        mapping->attention_slot[mapping->all_source_ranks.count] = view->slot[i];
        kvf_ids_add(&mapping->all_source_ranks, rank);
    }
    return KVF_OK;
}

static kvf_status fill_mapping(const attention_view *view, const kvf_cache_kind *kinds, size_t group_count,
                               kvf_tp_mapping *mapping) {
    bool has_state = false, has_attention = false;
    mapping->source_ranks = kvf_alloc0(group_count, sizeof *mapping->source_ranks);
    if (!mapping->source_ranks)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu groups", group_count);
    mapping->group_count = group_count;
    for (size_t g = 0; g < group_count; g++) {
        bool state = kinds[g] == KVF_CACHE_SSM;
        has_state |= state;
        has_attention |= !state;
        kvf_status status = kvf_ids_copy(&mapping->source_ranks[g], state ? &view->targets : &view->sources);
        if (status)
            return status;
    }
    mapping->rank_offset_factor = view->rank_offset_factor;
    return join_sources(view, has_state, has_attention, mapping);
}

kvf_status kvf_tp_mapping_build(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                const kvf_cache_kind *kinds, size_t group_count, kvf_tp_mapping *out) {
    if (!topology || !kinds || !group_count || !out)
        return kvf_plain_fail(KVF_E_INVALID, "topology, kinds, at least one group and out must be given");
    for (size_t g = 0; g < group_count; g++)
        if ((unsigned)kinds[g] > KVF_CACHE_SSM)
            return kvf_plain_fail(KVF_E_RANGE, "kind of group %zu is %d; allowed: 0 to %d", g, (int)kinds[g],
                                  KVF_CACHE_SSM);
    kvf_engine_transfer_info other;
    attention_view view;
    kvf_status status = kvf_take_remote(remote, &other);
    if (!status)
        status = view_attention(topology, &other, &view);
    if (status)
        return status;
    kvf_tp_mapping mapping = {0};
    status = fill_mapping(&view, kinds, group_count, &mapping);
    if (!status)
        status = kvf_consumers_per_source(topology, &other, &mapping.local_consumers);
    free_view(&view);
    if (status) {
        kvf_tp_mapping_free(&mapping);
        return status;
    }
    *out = mapping;
    return KVF_OK;
}

void kvf_tp_mapping_free(kvf_tp_mapping *mapping) {
    if (!mapping)
        return;
    for (size_t g = 0; g < mapping->group_count; g++)
        kvf_ids_free(&mapping->source_ranks[g]);
    kvf_free(mapping->source_ranks);
    kvf_ids_free(&mapping->all_source_ranks);
    kvf_free(mapping->attention_slot);
    *mapping = (kvf_tp_mapping){0};
}

kvf_status kvf_tp_mapping_slot(const kvf_tp_mapping *mapping, uint64_t rank, uint64_t *out) {
    if (!mapping || !out)
        return kvf_plain_fail(KVF_E_INVALID, "%s is NULL", !mapping ? "mapping" : "out");
    for (size_t i = 0; i < mapping->all_source_ranks.count; i++)
        if (mapping->all_source_ranks.at[i] == rank && mapping->attention_slot[i] != KVF_NO_SLOT) {
            *out = mapping->attention_slot[i];
            return KVF_OK;
        }
    return kvf_plain_fail(KVF_E_NOT_FOUND, "remote rank %llu holds no head of the local rank",
                          (unsigned long long)rank);
}

bool kvf_needs_split(bool is_mla, int64_t tp_ratio, size_t source_rank_count) {
    return tp_ratio < 0 && (!is_mla || source_rank_count > 1);
}

/* ---- single quantities of a mapping */

static const kvf_cache_kind attention_and_state[] = {KVF_CACHE_FULL, KVF_CACHE_SSM};

/* Checks that the topology is a hybrid's: PR 39529 has some quantities for no other. */
static kvf_status check_hybrid(const kvf_topology *topology) {
    if (!topology)
        return kvf_plain_fail(KVF_E_INVALID, "topology is NULL");
    if (!topology->local.is_mamba)
        return kvf_refuse(KVF_REFUSAL_NOT_HYBRID, KVF_E_INVALID,
                          "is_mamba is false: a model without state has no such quantity");
    return KVF_OK;
}

static kvf_status build_hybrid(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                               kvf_tp_mapping *mapping) {
    kvf_status status = check_hybrid(topology);
    return status ? status : kvf_tp_mapping_build(topology, remote, attention_and_state, 2, mapping);
}

/* Moves one list out of a mapping that is no longer needed. */
static kvf_status keep_list(kvf_tp_mapping *mapping, kvf_ids *list, kvf_ids *out) {
    *out = *list;
    *list = (kvf_ids){0};
    kvf_tp_mapping_free(mapping);
    return KVF_OK;
}

kvf_status kvf_attention_sources(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                 kvf_ids *out) {
    kvf_tp_mapping mapping;
    kvf_status status = kvf_tp_mapping_build(topology, remote, attention_and_state, 1, &mapping);
    return status ? status : keep_list(&mapping, &mapping.source_ranks[0], out);
}

kvf_status kvf_fa_source_ranks(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                               kvf_ids *out) {
    kvf_status status = check_hybrid(topology);
    return status ? status : kvf_attention_sources(topology, remote, out);
}

kvf_status kvf_state_source_ranks(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                  kvf_ids *out) {
    kvf_tp_mapping mapping;
    kvf_status status = build_hybrid(topology, remote, &mapping);
    return status ? status : keep_list(&mapping, &mapping.source_ranks[1], out);
}

kvf_status kvf_all_source_ranks(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                kvf_ids *out) {
    kvf_tp_mapping mapping;
    kvf_status status = build_hybrid(topology, remote, &mapping);
    return status ? status : keep_list(&mapping, &mapping.all_source_ranks, out);
}

kvf_status kvf_fa_head_slot(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                            uint32_t remote_rank, uint64_t *out) {
    kvf_tp_mapping mapping;
    kvf_status status = build_hybrid(topology, remote, &mapping);
    if (status)
        return status;
    status = kvf_tp_mapping_slot(&mapping, remote_rank, out);
    kvf_tp_mapping_free(&mapping);
    return status;
}

kvf_status kvf_should_skip_fa(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                              uint32_t remote_rank, bool *out) {
    kvf_ids sources;
    kvf_status status = kvf_fa_source_ranks(topology, remote, &sources);
    if (status)
        return status;
    *out = !kvf_ids_have(&sources, remote_rank);
    kvf_ids_free(&sources);
    return KVF_OK;
}

kvf_status kvf_fa_rank_offset(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                              uint64_t kv_block_bytes, uint64_t *out) {
    kvf_tp_mapping mapping;
    kvf_status status = build_hybrid(topology, remote, &mapping);
    if (status)
        return status;
    uint64_t factor = mapping.rank_offset_factor;
    kvf_tp_mapping_free(&mapping);
    if (!kvf_mul(factor, kv_block_bytes, out))
        return kvf_plain_fail(KVF_E_OVERFLOW, "kv_block_bytes is %llu; %llu times it does not fit in 64 bits",
                              (unsigned long long)kv_block_bytes, (unsigned long long)factor);
    return KVF_OK;
}

kvf_status kvf_needs_split_handles(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                   bool *out) {
    kvf_ids sources;
    int64_t ratio;
    kvf_status status = check_hybrid(topology);
    if (!status)
        status = kvf_tp_ratio(topology, remote, &ratio);
    if (!status)
        status = kvf_all_source_ranks(topology, remote, &sources);
    if (status)
        return status;
    *out = kvf_needs_split(topology->local.is_mla, ratio, sources.count);
    kvf_ids_free(&sources);
    return KVF_OK;
}

kvf_status kvf_fa_descriptor_bytes(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                   uint64_t *out) {
    kvf_engine_transfer_info other;
    kvf_status status = check_hybrid(topology);
    if (!status)
        status = kvf_take_remote(remote, &other);
    if (status)
        return status;
    if (!topology->local.block_bytes || !other.block_bytes)
        return kvf_plain_fail(KVF_E_INVALID, "%s block_bytes is 0; allowed: 1 and more",
                              other.block_bytes ? "local" : "remote");
    return kvf_exact_share(kvf_min_u64(topology->local.block_bytes, other.block_bytes), 1, 2,
                           "the shorter block", out);
}

static kvf_status empty_attention(const kvf_cache_kind *kinds, const kvf_block_lists *from,
                                  kvf_block_lists *out) {
    kvf_status status = kvf_block_lists_copy(out, from);
    for (size_t g = 0; !status && g < out->count; g++)
        if (kinds[g] != KVF_CACHE_SSM)
            out->groups[g].count = 0;
    return status;
}

kvf_status kvf_filter_block_ids_for_rank(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                         const kvf_cache_kind *kinds, uint32_t remote_rank,
                                         const kvf_block_lists *local, const kvf_block_lists *remote_lists,
                                         kvf_block_lists *local_out, kvf_block_lists *remote_out) {
    if (!topology || !kinds || !local || !remote_lists || !local_out || !remote_out)
        return kvf_plain_fail(KVF_E_INVALID, "no argument may be NULL");
    bool skip;
    kvf_status status = kvf_should_skip_fa(topology, remote, remote_rank, &skip);
    if (status)
        return status;
    kvf_block_lists ours, theirs;
    status = skip ? empty_attention(kinds, local, &ours) : kvf_block_lists_copy(&ours, local);
    if (status)
        return status;
    status =
        skip ? empty_attention(kinds, remote_lists, &theirs) : kvf_block_lists_copy(&theirs, remote_lists);
    if (status) {
        kvf_block_lists_free(&ours);
        return status;
    }
    *local_out = ours;
    *remote_out = theirs;
    return KVF_OK;
}
