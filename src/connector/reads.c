/* The plan of one remote engine as the connector makes it, and the reads of a request. */
#include "connector/connector.h"

/* The tables of one target rank. */
typedef struct source_tables {
    uint64_t rank;
    kvf_descriptor_table remote;
    kvf_descriptor_table split; /* local blocks cut for this rank; empty if blocks are not split */
} source_tables;

struct kvf_engine_transfer_plan {
    kvf_topology *topology; /* a copy of the local rank's facts, without engines */
    kvf_engine_transfer_info remote;
    kvf_cache_kind *kinds;
    size_t group_count;
    bool has_state, is_split;
    uint32_t block_size_ratio, local_ppl, remote_ppl;
    kvf_id_space local_space, remote_space;
    kvf_ids targets;
    kvf_tp_mapping mapping;
    kvf_descriptor_table local, local_cut; /* in our blocks; in blocks of the remote size */
    source_tables *sources;                /* parallel to targets */
};

void kvf_engine_transfer_plan_free(kvf_engine_transfer_plan *plan) {
    if (!plan)
        return;
    for (size_t i = 0; plan->sources && i < plan->targets.count; i++) {
        kvf_descriptor_table_free(&plan->sources[i].remote);
        kvf_descriptor_table_free(&plan->sources[i].split);
    }
    kvf_free(plan->sources);
    kvf_descriptor_table_free(&plan->local);
    kvf_descriptor_table_free(&plan->local_cut);
    kvf_tp_mapping_free(&plan->mapping);
    kvf_ids_free(&plan->targets);
    kvf_free(plan->kinds);
    kvf_topology_free(plan->topology);
    kvf_free(plan);
}

/* ---- what the connector refuses */

/*
 * If prefill has more ranks than decode and replicates heads, heads would be read several times. A block that is cut by
 * heads cannot be cut by tokens too. Neither applies to a latent.
 */
static kvf_status refuse_shape(const kvf_engine_transfer_plan *plan, int64_t tp_ratio) {
    const kvf_topology_desc *local = &plan->topology->local;
    bool old = local->dialect == KVF_DIALECT_PR_40731;
    uint32_t heads = local->total_kv_heads, remote_tp = plan->remote.tp_size;
    if (local->dcp_size > 1 || plan->remote.dcp_size > 1)
        return kvf_plain_fail(
            KVF_E_UNSUPPORTED,
            "dcp_size is %u locally and %u remotely; pair the blocks with kvf_dcp_prefix_trim()",
            local->dcp_size, plan->remote.dcp_size);
    if (old && plan->has_state && plan->block_size_ratio != 1)
        return kvf_refuse(KVF_REFUSAL_BLOCK_SIZE_WITH_HYBRID, KVF_E_NOT_EXPRESSIBLE,
                          "block sizes %u and %u differ in a model with state", local->block_size,
                          plan->remote.block_size);
    if (local->is_mla)
        return KVF_OK;
    if (tp_ratio < 0 && !plan->has_state && remote_tp > heads)
        return kvf_refuse(KVF_REFUSAL_REPLICATED_HEADS_WITH_MORE_PREFILL_RANKS, KVF_E_NOT_EXPRESSIBLE,
                          "remote tp_size %u exceeds the %u heads and the local tp_size %u", remote_tp, heads,
                          local->tp_size);
    if (tp_ratio < 0 && plan->block_size_ratio != 1)
        return kvf_refuse(KVF_REFUSAL_BLOCK_SIZE_WITH_SPLIT_READS, KVF_E_NOT_EXPRESSIBLE,
                          "block sizes %u and %u differ, and remote tp_size %u exceeds the local %u",
                          local->block_size, plan->remote.block_size, remote_tp, local->tp_size);
    if (old && !plan->has_state && tp_ratio > 1 && local->tp_size > heads && remote_tp <= heads)
        return kvf_refuse(KVF_REFUSAL_BLOCK_LEN_MISMATCH, KVF_E_MISMATCH,
                          "tp_size %u exceeds the %u heads, and remote tp_size %u does not", local->tp_size,
                          heads, remote_tp);
    return KVF_OK;
}

/* ---- making a plan */

static kvf_status take_desc(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                            const kvf_engine_transfer_plan_desc *given, kvf_engine_transfer_plan_desc *desc,
                            kvf_engine_transfer_plan *plan) {
    kvf_status status = kvf_take_struct(desc, sizeof *desc, given, "kvf_engine_transfer_plan_desc");
    if (status)
        return status;
    if (!desc->kinds || !desc->group_count || !desc->local || !desc->remote_ranks)
        return kvf_plain_fail(KVF_E_INVALID,
                              "kinds, at least one group, local and remote_ranks must be given");
    status = kvf_take_remote(remote, &plan->remote);
    if (!status)
        status = kvf_topology_create(&topology->local, &plan->topology);
    if (status)
        return status;
    plan->kinds = kvf_copy(desc->kinds, desc->group_count, sizeof *plan->kinds);
    if (!plan->kinds)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu groups", desc->group_count);
    plan->group_count = desc->group_count;
    for (size_t g = 0; g < plan->group_count; g++)
        plan->has_state |= plan->kinds[g] == KVF_CACHE_SSM;
    plan->local_ppl = desc->local->physical_per_logical ? desc->local->physical_per_logical : 1;
    plan->remote_ppl = plan->remote.physical_blocks_per_logical;
    return KVF_OK;
}

/* How the ids of one side number its tables. */
static kvf_status make_space(const kvf_cache_memory *memory, uint32_t ppl, kvf_region_layout layout,
                             uint32_t ratio, kvf_id_space *out) {
    uint64_t states = 0;
    uint32_t halves = layout == KVF_LAYOUT_BLOCKS_FIRST ? 2 : 1;
    kvf_status status = memory->state ? kvf_state_blocks(memory->num_blocks, ppl, &states) : KVF_OK;
    if (status)
        return status;
    *out = (kvf_id_space){
        .struct_size = sizeof *out,
        .attention_regions = memory->region_count * halves,
        .state_regions = memory->state ? memory->region_count * (memory->state->projection_count + 1) : 0,
        .state_blocks = states};
    if (!kvf_mul(memory->num_blocks, ratio, &out->attention_blocks))
        return kvf_plain_fail(KVF_E_OVERFLOW, "num_blocks is %llu; too large",
                              (unsigned long long)memory->num_blocks);
    return KVF_OK;
}

/* All ranks of the remote engine share one numbering, so that their caches must have one shape. */
static kvf_status check_rank_memory(const kvf_engine_transfer_plan *plan, const kvf_cache_memory *first,
                                    const kvf_cache_memory *memory, uint32_t rank) {
    uint32_t ppl = memory->physical_per_logical ? memory->physical_per_logical : 1;
    if (memory->num_blocks != first->num_blocks)
        return kvf_plain_fail(KVF_E_MISMATCH, "remote rank %u has %llu blocks; another rank has %llu", rank,
                              (unsigned long long)memory->num_blocks, (unsigned long long)first->num_blocks);
    if (ppl != plan->remote_ppl)
        return kvf_plain_fail(KVF_E_MISMATCH,
                              "remote rank %u has %u kernel blocks a logical block; its engine has %u", rank,
                              ppl, plan->remote_ppl);
    return KVF_OK;
}

static kvf_status make_source(const kvf_engine_transfer_plan *plan, const kvf_engine_transfer_plan_desc *desc,
                              source_tables *source) {
    uint32_t rank = (uint32_t)source->rank;
    kvf_remote_view view = {.struct_size = sizeof view,
                            .layout = desc->layout,
                            .local = desc->local,
                            .remote = &desc->remote_ranks[rank],
                            .remote_rank = rank,
                            .region_replicated = desc->region_replicated};
    kvf_status status = kvf_remote_descriptors(plan->topology, &plan->remote, &view, &source->remote);
    if (status || !plan->is_split)
        return status;
    uint64_t halves = desc->layout == KVF_LAYOUT_BLOCKS_FIRST ? 2 : 1;
    kvf_replicated_regions replicated = {.region_replicated = desc->region_replicated,
                                         .region_count = desc->local->region_count,
                                         .descriptors_per_region = desc->local->num_blocks * halves};
    return kvf_split_descriptors(plan->topology, &plan->remote, &plan->local, rank, &replicated,
                                 &source->split);
}

static kvf_status make_sources(kvf_engine_transfer_plan *plan, const kvf_engine_transfer_plan_desc *desc) {
    plan->sources = kvf_alloc0(plan->targets.count, sizeof *plan->sources);
    if (!plan->sources)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu sources", plan->targets.count);
    kvf_status status = KVF_OK;
    for (size_t i = 0; !status && i < plan->targets.count; i++) {
        uint64_t rank = plan->targets.at[i];
        plan->sources[i].rank = rank;
        status = check_rank_memory(plan, &desc->remote_ranks[plan->targets.at[0]], &desc->remote_ranks[rank],
                                   (uint32_t)rank);
        if (!status)
            status = make_source(plan, desc, &plan->sources[i]);
    }
    if (!status)
        status = make_space(desc->local, plan->local_ppl, desc->layout, plan->block_size_ratio,
                            &plan->local_space);
    if (!status)
        status = make_space(&desc->remote_ranks[plan->targets.at[0]], plan->remote_ppl, desc->layout, 1,
                            &plan->remote_space);
    return status;
}

static kvf_status make_tables(kvf_engine_transfer_plan *plan, const kvf_engine_transfer_plan_desc *desc,
                              int64_t tp_ratio) {
    plan->is_split =
        plan->mapping.all_source_ranks.count > 1 &&
        kvf_needs_split(plan->topology->local.is_mla, tp_ratio, plan->mapping.all_source_ranks.count);
    kvf_status status = kvf_local_descriptors(desc->local, desc->layout, 1, &plan->local);
    if (!status && plan->block_size_ratio != 1)
        status = kvf_local_descriptors(desc->local, desc->layout, plan->block_size_ratio, &plan->local_cut);
    return status ? status : make_sources(plan, desc);
}

kvf_status kvf_engine_transfer_plan_build(const kvf_topology *topology,
                                          const kvf_engine_transfer_info *remote,
                                          const kvf_engine_transfer_plan_desc *given,
                                          kvf_engine_transfer_plan **out) {
    if (!topology || !given || !out)
        return kvf_plain_fail(KVF_E_INVALID, "topology, desc and out must be given");
    kvf_engine_transfer_plan *plan = kvf_alloc0(1, sizeof *plan);
    if (!plan)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for a transfer plan");
    kvf_engine_transfer_plan_desc desc;
    int64_t ratio = 0;
    kvf_status status = take_desc(topology, remote, given, &desc, plan);
    if (!status)
        status = kvf_tp_ratio(topology, &plan->remote, &ratio);
    if (!status)
        status = kvf_block_size_ratio(topology, &plan->remote, &plan->block_size_ratio);
    if (!status)
        status = refuse_shape(plan, ratio);
    if (!status)
        status = kvf_handshake_target_ranks(topology, &plan->remote, &plan->targets);
    if (!status)
        status =
            kvf_tp_mapping_build(topology, &plan->remote, plan->kinds, plan->group_count, &plan->mapping);
    if (!status)
        status = make_tables(plan, &desc, ratio);
    if (status) {
        kvf_engine_transfer_plan_free(plan);
        return status;
    }
    *out = plan;
    return KVF_OK;
}

const kvf_tp_mapping *kvf_engine_transfer_plan_mapping(const kvf_engine_transfer_plan *plan) {
    return &plan->mapping;
}

const kvf_descriptor_table *kvf_engine_transfer_plan_local(const kvf_engine_transfer_plan *plan,
                                                           uint32_t block_size) {
    if (block_size == plan->topology->local.block_size)
        return &plan->local;
    return block_size == plan->remote.block_size ? &plan->local_cut : NULL;
}

static const source_tables *find_source(const kvf_engine_transfer_plan *plan, uint64_t rank) {
    for (size_t i = 0; i < plan->targets.count; i++)
        if (plan->sources[i].rank == rank)
            return &plan->sources[i];
    return NULL;
}

const kvf_descriptor_table *kvf_engine_transfer_plan_split(const kvf_engine_transfer_plan *plan,
                                                           uint64_t source_rank) {
    const source_tables *source = find_source(plan, source_rank);
    return source && plan->is_split ? &source->split : NULL;
}

const kvf_descriptor_table *kvf_engine_transfer_plan_remote(const kvf_engine_transfer_plan *plan,
                                                            uint64_t remote_rank) {
    const source_tables *source = find_source(plan, remote_rank);
    return source ? &source->remote : NULL;
}

/* ---- planning a request */

/* The blocks of a request. Each step of planning replaces the lists by its result. */
typedef struct request_blocks {
    kvf_block_lists local, remote;
} request_blocks;

static void free_blocks(request_blocks *blocks) {
    kvf_block_lists_free(&blocks->local);
    kvf_block_lists_free(&blocks->remote);
}

static void replace(kvf_block_lists *lists, const kvf_block_lists *with) {
    kvf_block_lists_free(lists);
    *lists = *with;
}

static kvf_status expand_blocks(const kvf_engine_transfer_plan *plan, const kvf_block_lists *local,
                                const kvf_block_lists *remote, request_blocks *out) {
    bool old = plan->topology->local.dialect == KVF_DIALECT_PR_40731;
    request_blocks blocks = {0};
    kvf_status status =
        kvf_logical_to_kernel(plan->kinds, local, plan->local_ppl, plan->local_ppl, &blocks.local);
    if (!status)
        status = kvf_logical_to_kernel(plan->kinds, remote, plan->remote_ppl,
                                       old ? plan->local_ppl : plan->remote_ppl, &blocks.remote);
    if (status) {
        free_blocks(&blocks);
        return status;
    }
    *out = blocks;
    return KVF_OK;
}

/* Empties, on both sides, the groups that are not read from this rank. */
static void keep_groups_of(const kvf_engine_transfer_plan *plan, uint64_t rank, request_blocks *blocks) {
    for (size_t g = 0; g < plan->group_count; g++)
        if (!kvf_ids_have(&plan->mapping.source_ranks[g], rank)) {
            blocks->local.groups[g].count = 0;
            blocks->remote.groups[g].count = 0;
        }
}

/* PR 40731 keeps the tail of every attention group, even if the two sides' logical blocks differ in kernel blocks. */
static kvf_status pair_blocks(const kvf_engine_transfer_plan *plan, request_blocks *blocks) {
    bool old = plan->topology->local.dialect == KVF_DIALECT_PR_40731;
    kvf_block_lists local, remote;
    kvf_status status = KVF_OK;
    if (plan->block_size_ratio != 1) {
        status =
            kvf_map_block_size(plan->kinds, &blocks->local, &blocks->remote, plan->block_size_ratio, &local);
        if (status)
            return status;
        replace(&blocks->local, &local);
        if (!local.count)
            return KVF_OK;
    }
    status = kvf_prefix_trim(plan->kinds, &blocks->local, &blocks->remote, old ? 1 : plan->local_ppl,
                             old ? 1 : plan->remote_ppl, &local, &remote);
    if (status)
        return status;
    replace(&blocks->local, &local);
    replace(&blocks->remote, &remote);
    return KVF_OK;
}

static void free_spec(kvf_read_spec *spec) {
    kvf_ids_free(&spec->local_ids);
    kvf_ids_free(&spec->remote_ids);
    kvf_free(spec->copies);
}

static kvf_status make_copies(const kvf_engine_transfer_plan *plan, const source_tables *source,
                              kvf_read_spec *spec) {
    const kvf_descriptor_table *local = plan->is_split                ? &source->split
                                        : plan->block_size_ratio != 1 ? &plan->local_cut
                                                                      : &plan->local;
    const kvf_descriptor_table *remote = &source->remote;
    if (spec->local_ids.count != spec->remote_ids.count)
        return kvf_plain_fail(KVF_E_RANGE, "remote rank %llu: %zu local and %zu remote descriptors",
                              (unsigned long long)spec->remote_rank, spec->local_ids.count,
                              spec->remote_ids.count);
    spec->copies = kvf_alloc(spec->local_ids.count, sizeof *spec->copies);
    if (!spec->copies)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu copies", spec->local_ids.count);
    for (size_t i = 0; i < spec->local_ids.count; i++) {
        /* kvf_desc_ids() checked the ids against the spaces, which describe these tables. */
        const kvf_descriptor *to = &local->at[spec->local_ids.at[i]];
        const kvf_descriptor *from = &remote->at[spec->remote_ids.at[i]];
        if (to->bytes != from->bytes)
            return kvf_refuse(KVF_REFUSAL_BLOCK_LEN_MISMATCH, KVF_E_MISMATCH,
                              "remote rank %llu: descriptors %llu of %llu bytes and %llu of %llu",
                              (unsigned long long)spec->remote_rank,
                              (unsigned long long)spec->local_ids.at[i], (unsigned long long)to->bytes,
                              (unsigned long long)spec->remote_ids.at[i], (unsigned long long)from->bytes);
        spec->copies[i] = (kvf_read_copy){from->address, to->address, to->bytes};
    }
    return KVF_OK;
}

static kvf_status make_spec(const kvf_engine_transfer_plan *plan, const source_tables *source,
                            const kvf_block_lists *local, const kvf_block_lists *remote, kvf_read_spec *out) {
    request_blocks blocks;
    kvf_read_spec spec = {.remote_rank = source->rank};
    kvf_status status = expand_blocks(plan, local, remote, &blocks);
    if (status)
        return status;
    keep_groups_of(plan, source->rank, &blocks);
    status = pair_blocks(plan, &blocks);
    if (!status && !kvf_block_lists_all_empty(&blocks.local)) {
        status = kvf_desc_ids(&plan->local_space, plan->kinds, &blocks.local, &spec.local_ids);
        if (!status)
            status = kvf_desc_ids(&plan->remote_space, plan->kinds, &blocks.remote, &spec.remote_ids);
        if (!status)
            status = make_copies(plan, source, &spec);
    }
    free_blocks(&blocks);
    if (status) {
        free_spec(&spec);
        return status;
    }
    *out = spec;
    return KVF_OK;
}

void kvf_reads_free(kvf_reads *reads) {
    if (!reads)
        return;
    for (size_t i = 0; i < reads->count; i++)
        free_spec(&reads->specs[i]);
    kvf_free(reads->specs);
    kvf_ids_free(&reads->notify_only);
    kvf_free(reads->notice);
    *reads = (kvf_reads){0};
}

static kvf_status fill_reads(const kvf_engine_transfer_plan *plan, const kvf_block_lists *local,
                             const kvf_block_lists *remote, kvf_reads *reads) {
    reads->specs = kvf_alloc0(plan->targets.count, sizeof *reads->specs);
    if (!reads->specs)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu reads", plan->targets.count);
    kvf_status status = kvf_ids_make(&reads->notify_only, plan->targets.count);
    for (size_t i = 0; !status && i < plan->targets.count; i++) {
        const source_tables *source = &plan->sources[i];
        kvf_read_spec *spec = &reads->specs[reads->count];
        if (local->count && kvf_ids_have(&plan->mapping.all_source_ranks, source->rank))
            status = make_spec(plan, source, local, remote, spec);
        if (!status && spec->local_ids.count) {
            reads->count++;
        } else if (!status) {
            free_spec(spec);
            *spec = (kvf_read_spec){0};
            kvf_ids_add(&reads->notify_only, source->rank);
        }
    }
    return status;
}

kvf_status kvf_engine_transfer_plan_read(const kvf_engine_transfer_plan *plan, const kvf_block_lists *local,
                                         const kvf_block_lists *remote, const char *remote_request_id,
                                         kvf_reads *out) {
    if (!plan || !local || !remote || !out)
        return kvf_plain_fail(KVF_E_INVALID, "no argument may be NULL");
    if (local->count && (local->count != plan->group_count || remote->count != plan->group_count))
        return kvf_plain_fail(KVF_E_INVALID, "%zu local and %zu remote block lists; allowed: %zu each",
                              local->count, remote->count, plan->group_count);
    kvf_reads reads = {0};
    kvf_status status =
        kvf_completion_notice(plan->topology, &plan->remote, remote_request_id, &reads.notice);
    if (!status)
        status = fill_reads(plan, local, remote, &reads);
    if (status) {
        kvf_reads_free(&reads);
        return status;
    }
    *out = reads;
    return KVF_OK;
}
