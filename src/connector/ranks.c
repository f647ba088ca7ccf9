/* Quantities that follow from the sizes of the two sides: ratios, head ranges, overlapping ranks. */
#include "connector/connector.h"

static uint32_t range_size(kvf_range range) {
    return range.end - range.begin;
}

/* The ranks of `other_ranks` whose share of the whole overlaps that of rank `rank` of `ranks`.
 * Rank r of n holds [r/n, (r+1)/n) of the whole, rank s of m holds [s/m, (s+1)/m): they overlap when
 * s*n < (r+1)*m and r*m < (s+1)*n.
 */
static kvf_range axis_overlap(uint32_t ranks, uint32_t rank, uint32_t other_ranks) {
    uint64_t first = (uint64_t)rank * other_ranks / ranks;
    uint64_t end = (((uint64_t)rank + 1) * other_ranks + ranks - 1) / ranks;
    return (kvf_range){(uint32_t)first, (uint32_t)end};
}

/* What both hold; empty ranges have begin == end. */
static kvf_range range_common(kvf_range a, kvf_range b) {
    uint32_t begin = a.begin > b.begin ? a.begin : b.begin;
    uint32_t end = a.end < b.end ? a.end : b.end;
    return (kvf_range){begin, end > begin ? end : begin};
}

kvf_status kvf_exact_share(uint64_t bytes, uint64_t part, uint64_t whole, const char *what, uint64_t *out) {
    uint64_t product;
    if (!kvf_mul(bytes, part, &product))
        return kvf_plain_fail(KVF_E_OVERFLOW, "%s is %llu; %llu times it does not fit in 64 bits", what,
                              (unsigned long long)bytes, (unsigned long long)part);
    if (product % whole)
        return kvf_refuse(KVF_REFUSAL_LENGTH_NOT_DIVISIBLE, KVF_E_NOT_EXPRESSIBLE,
                          "%s is %llu; %llu/%llu of it is not a whole number", what,
                          (unsigned long long)bytes, (unsigned long long)part, (unsigned long long)whole);
    *out = product / whole;
    return KVF_OK;
}

/* Compares bytes / units / tokens of the two sides without dividing. */
kvf_status kvf_check_block_lengths(const kvf_block_length *local, const kvf_block_length *remote) {
    uint64_t local_scale = (uint64_t)local->units * local->tokens;
    uint64_t remote_scale = (uint64_t)remote->units * remote->tokens;
    uint64_t common = kvf_gcd(local_scale, remote_scale), left, right;
    if (!kvf_mul(local->bytes, remote_scale / common, &left) ||
        !kvf_mul(remote->bytes, local_scale / common, &right))
        return kvf_plain_fail(KVF_E_OVERFLOW, "block lengths %llu and %llu are too large",
                              (unsigned long long)local->bytes, (unsigned long long)remote->bytes);
    if (left != right)
        return kvf_refuse(KVF_REFUSAL_BLOCK_LEN_MISMATCH, KVF_E_MISMATCH,
                          "a local block has %llu bytes for %u heads and %u tokens, a remote one %llu for %u "
                          "and %u",
                          (unsigned long long)local->bytes, local->units, local->tokens,
                          (unsigned long long)remote->bytes, remote->units, remote->tokens);
    return KVF_OK;
}

kvf_status kvf_tp_ratio(const kvf_topology *topology, const kvf_engine_transfer_info *remote, int64_t *out) {
    kvf_engine_transfer_info other;
    kvf_status status = kvf_take_remote(remote, &other);
    if (status)
        return status;
    uint32_t here = topology->local.tp_size, there = other.tp_size;
    uint32_t larger = here > there ? here : there, smaller = here > there ? there : here;
    if (larger % smaller)
        return kvf_refuse(KVF_REFUSAL_TP_NOT_DIVISIBLE, KVF_E_NOT_EXPRESSIBLE,
                          "local tp_size %u and remote tp_size %u: neither divides the other", here, there);
    int64_t ratio = larger / smaller;
    *out = here >= there ? ratio : -ratio;
    return KVF_OK;
}

kvf_status kvf_block_size_ratio(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                uint32_t *out) {
    kvf_engine_transfer_info other;
    kvf_status status = kvf_take_remote(remote, &other);
    if (status)
        return status;
    if (topology->local.block_size % other.block_size)
        return kvf_refuse(KVF_REFUSAL_BLOCK_SIZE_NOT_DIVISIBLE, KVF_E_NOT_EXPRESSIBLE,
                          "local block_size %u is not a multiple of remote block_size %u",
                          topology->local.block_size, other.block_size);
    *out = topology->local.block_size / other.block_size;
    return KVF_OK;
}

/* A latent is one unit; the model's number of heads does not matter. */
static uint32_t attention_units(const kvf_topology *topology) {
    return topology->local.is_mla ? 1 : topology->local.total_kv_heads;
}

bool kvf_is_kv_replicated(const kvf_topology *topology, const kvf_engine_transfer_info *remote) {
    return remote->tp_size > topology->local.total_kv_heads;
}

bool kvf_replicates_kv_cache(const kvf_topology *topology, const kvf_engine_transfer_info *remote) {
    return remote->tp_size > attention_units(topology) || topology->local.is_mla;
}

bool kvf_local_replicates_kv_cache(const kvf_topology *topology) {
    return topology->local.tp_size > attention_units(topology) || topology->local.is_mla;
}

uint32_t kvf_physical_heads(uint32_t total_kv_heads, uint32_t tp_size) {
    return tp_size && total_kv_heads > tp_size ? total_kv_heads / tp_size : 1;
}

kvf_status kvf_physical_head_range(uint32_t tp_size, uint32_t total_kv_heads, uint32_t rank, kvf_range *out) {
    if (!tp_size || !total_kv_heads)
        return kvf_plain_fail(KVF_E_INVALID, "%s is 0; allowed: 1 and more",
                              tp_size ? "total_kv_heads" : "tp_size");
    if (rank >= tp_size)
        return kvf_plain_fail(KVF_E_RANGE, "rank is %u; allowed: 0 to %u", rank, tp_size - 1);
    if (tp_size <= total_kv_heads && total_kv_heads % tp_size)
        return kvf_refuse(KVF_REFUSAL_HEADS_NOT_DIVISIBLE, KVF_E_NOT_EXPRESSIBLE,
                          "total_kv_heads %u do not divide over tp_size %u", total_kv_heads, tp_size);
    *out = kvf_axis_share(total_kv_heads, tp_size, rank);
    return KVF_OK;
}

/* The attention units (heads, or the one latent) of a local or remote rank; refuses heads that do not
 * divide. */
static kvf_status attention_share(const kvf_topology *topology, uint32_t ranks, uint32_t rank,
                                  kvf_range *out) {
    if (topology->local.is_mla) {
        *out = (kvf_range){0, 1};
        return KVF_OK;
    }
    return kvf_physical_head_range(ranks, topology->local.total_kv_heads, rank, out);
}

static void share_units(kvf_range local, kvf_range remote, kvf_shared_units *out) {
    kvf_range common = range_common(local, remote);
    uint32_t units = range_size(common);
    *out = (kvf_shared_units){.local_begin = units ? common.begin - local.begin : 0,
                              .remote_begin = units ? common.begin - remote.begin : 0,
                              .units = units,
                              .local_units = range_size(local),
                              .remote_units = range_size(remote)};
}

static kvf_status check_remote_rank(const kvf_engine_transfer_info *remote, uint32_t rank) {
    if (rank >= remote->tp_size)
        return kvf_plain_fail(KVF_E_RANGE, "remote rank is %u; allowed: 0 to %u", rank, remote->tp_size - 1);
    return KVF_OK;
}

kvf_status kvf_shared_attention(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                uint32_t remote_rank, kvf_shared_units *out) {
    kvf_range local = {0, 0}, other = {0, 0};
    kvf_status status = check_remote_rank(remote, remote_rank);
    if (!status)
        status = attention_share(topology, topology->local.tp_size, topology->local.tp_rank, &local);
    if (!status)
        status = attention_share(topology, remote->tp_size, remote_rank, &other);
    if (!status)
        share_units(local, other, out);
    return status;
}

kvf_status kvf_shared_state(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                            uint32_t remote_rank, kvf_shared_units *out) {
    int64_t ratio;
    kvf_status status = kvf_tp_ratio(topology, remote, &ratio);
    if (!status)
        status = check_remote_rank(remote, remote_rank);
    if (status)
        return status;
    uint32_t here = topology->local.tp_size, there = remote->tp_size;
    uint32_t units = here > there ? here : there; /* the smallest axis that divides over both sides */
    share_units(kvf_axis_share(units, here, topology->local.tp_rank),
                kvf_axis_share(units, there, remote_rank), out);
    return KVF_OK;
}

uint32_t kvf_dcp_rank(const kvf_topology *topology) {
    return topology->local.tp_rank % topology->local.dcp_size;
}

/* Share a of n and share b of m have tokens in common if a and b are equal modulo gcd(n, m). */
static bool shares_tokens(uint32_t a, uint32_t n, uint32_t b, uint32_t m) {
    uint32_t common = (uint32_t)kvf_gcd(n, m);
    return a % common == b % common;
}

/* The replica that a local rank reads. A replica is dcp_size remote ranks that keep all tokens together; consecutive
 * local ranks are spread evenly over the replicas. */
static uint32_t replica_of(const kvf_engine_transfer_info *remote, uint32_t local_tp_size,
                           uint32_t local_rank) {
    uint32_t replicas = remote->tp_size / remote->dcp_size;
    return (uint32_t)((uint64_t)local_rank * replicas / local_tp_size);
}

static kvf_status check_dcp(const kvf_topology *topology, const kvf_engine_transfer_info *remote) {
    if ((topology->local.dcp_size > 1 || remote->dcp_size > 1) && !topology->local.is_mla)
        return kvf_refuse(
            KVF_REFUSAL_DCP_NOT_LATENT, KVF_E_NOT_EXPRESSIBLE,
            "dcp_size is %u locally and %u remotely, but the cache has KV heads; allowed: latents only",
            topology->local.dcp_size, remote->dcp_size);
    return KVF_OK;
}

static kvf_status dcp_sources(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                              kvf_ids *out) {
    kvf_ids list;
    kvf_status status = kvf_ids_make(&list, remote->dcp_size);
    if (status)
        return status;
    uint32_t first = replica_of(remote, topology->local.tp_size, topology->local.tp_rank) * remote->dcp_size;
    for (uint32_t share = 0; share < remote->dcp_size; share++)
        if (shares_tokens(kvf_dcp_rank(topology), topology->local.dcp_size, share, remote->dcp_size))
            kvf_ids_add(&list, first + share);
    *out = list;
    return KVF_OK;
}

/* Checks a remote engine's facts: one TP size must divide the other, and only a latent has token shares. */
static kvf_status take_related(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                               kvf_engine_transfer_info *other, int64_t *ratio) {
    kvf_status status = kvf_take_remote(remote, other);
    if (!status)
        status = kvf_tp_ratio(topology, other, ratio);
    return status ? status : check_dcp(topology, other);
}

/* Every rank of an engine stores equally many heads, so that checking its first rank is enough. */
static kvf_status check_lengths(const kvf_topology *topology, const kvf_engine_transfer_info *remote) {
    const kvf_topology_desc *local = &topology->local;
    kvf_range ours = {0, 0}, theirs = {0, 0};
    kvf_status status = attention_share(topology, local->tp_size, 0, &ours);
    if (!status)
        status = attention_share(topology, remote->tp_size, 0, &theirs);
    uint32_t ratio;
    if (!status)
        status = kvf_block_size_ratio(topology, remote, &ratio);
    if (status || !local->block_bytes || !remote->block_bytes)
        return status;
    return kvf_check_block_lengths(
        &(kvf_block_length){local->block_bytes, range_size(ours), local->block_size},
        &(kvf_block_length){remote->block_bytes, range_size(theirs), remote->block_size});
}

kvf_status kvf_topology_check(const kvf_topology *topology, const kvf_engine_transfer_info *remote) {
    if (!topology)
        return kvf_plain_fail(KVF_E_INVALID, "topology is NULL");
    kvf_engine_transfer_info other;
    int64_t ratio;
    kvf_status status = take_related(topology, remote, &other, &ratio);
    return status ? status : check_lengths(topology, &other);
}

kvf_status kvf_handshake_target_ranks(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                      kvf_ids *out) {
    kvf_engine_transfer_info other;
    int64_t ratio;
    kvf_status status = take_related(topology, remote, &other, &ratio);
    if (status)
        return status;
    if (other.dcp_size > 1)
        return dcp_sources(topology, &other, out);
    kvf_range overlap = axis_overlap(topology->local.tp_size, topology->local.tp_rank, other.tp_size);
    kvf_ids list;
    status = kvf_ids_make(&list, range_size(overlap));
    if (status)
        return status;
    for (uint32_t rank = overlap.begin; rank < overlap.end; rank++)
        kvf_ids_add(&list, rank);
    *out = list;
    return KVF_OK;
}

kvf_status kvf_target_remote_ranks(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                   kvf_ids *out) {
    return kvf_handshake_target_ranks(topology, remote, out);
}

kvf_status kvf_dcp_source_ranks(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                kvf_ids *out) {
    kvf_engine_transfer_info other;
    kvf_status status = kvf_take_remote(remote, &other);
    if (!status)
        status = check_dcp(topology, &other);
    if (status)
        return status;
    if (other.dcp_size <= 1)
        return kvf_ids_make(out, 0);
    return dcp_sources(topology, &other, out);
}

kvf_status kvf_consumers_per_source(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                    uint32_t *out) {
    kvf_engine_transfer_info other;
    int64_t ratio;
    kvf_status status = take_related(topology, remote, &other, &ratio);
    if (status)
        return status;
    if (other.dcp_size <= 1) {
        *out = ratio > 1 ? (uint32_t)ratio : 1;
        return KVF_OK;
    }
    /* Counts the local ranks that read the same ranks of the same replica as this one. */
    const kvf_topology_desc *local = &topology->local;
    uint32_t common = (uint32_t)kvf_gcd(local->dcp_size, other.dcp_size), count = 0;
    uint32_t replica = replica_of(&other, local->tp_size, local->tp_rank);
    for (uint32_t rank = 0; rank < local->tp_size; rank++)
        if (replica_of(&other, local->tp_size, rank) == replica &&
            (rank % local->dcp_size) % common == kvf_dcp_rank(topology) % common)
            count++;
    *out = count;
    return KVF_OK;
}
