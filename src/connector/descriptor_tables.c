/*
 * Descriptor tables: for each block of each region, the bytes that are ours.
 *
 *   a block of a remote rank, HND:  | head 4 | head 5 | head 6 | head 7 |
 *   local rank 1 of 4 (heads 4, 5):  `--- descriptor ---'
 */
#include "connector/connector.h"

void kvf_descriptor_table_free(kvf_descriptor_table *table) {
    if (!table)
        return;
    kvf_free(table->at);
    *table = (kvf_descriptor_table){0};
}

static kvf_status take_memory(const kvf_cache_memory *given, const char *side, kvf_cache_memory *out) {
    if (!given)
        return kvf_plain_fail(KVF_E_INVALID, "%s memory is NULL", side);
    kvf_status status = kvf_take_struct(out, sizeof *out, given, "kvf_cache_memory");
    if (status)
        return status;
    if (!out->physical_per_logical)
        out->physical_per_logical = 1;
    if (!out->region_count)
        return kvf_refuse(KVF_REFUSAL_NO_LAYERS, KVF_E_INVALID,
                          "%s memory: region_count is 0; an engine has at least one layer", side);
    if (!out->region_base || !out->region_block_bytes)
        return kvf_plain_fail(KVF_E_INVALID, "%s memory has %u regions without base or block_bytes", side,
                              out->region_count);
    return KVF_OK;
}

/* Checks that every address of a region fits in 64 bits, so that the loops below may use plain arithmetic. */
static kvf_status check_region(const kvf_cache_memory *memory, uint32_t region) {
    uint64_t end;
    if (!kvf_mul_add(memory->num_blocks, memory->region_block_bytes[region], memory->region_base[region],
                     &end))
        return kvf_plain_fail(
            KVF_E_OVERFLOW, "region %u: base %llu and %llu blocks of %llu bytes do not fit in 64 bits",
            region, (unsigned long long)memory->region_base[region], (unsigned long long)memory->num_blocks,
            (unsigned long long)memory->region_block_bytes[region]);
    return KVF_OK;
}

static kvf_status make_table(uint64_t rows, uint64_t columns, kvf_descriptor_table *table) {
    uint64_t count;
    *table = (kvf_descriptor_table){0};
    if (!kvf_mul(rows, columns, &count) || count > SIZE_MAX)
        return kvf_plain_fail(KVF_E_OVERFLOW, "%llu times %llu descriptors do not fit in 64 bits",
                              (unsigned long long)rows, (unsigned long long)columns);
    table->at = kvf_alloc((size_t)count, sizeof *table->at);
    return table->at
               ? KVF_OK
               : kvf_plain_fail(KVF_E_NOMEM, "no memory for %llu descriptors", (unsigned long long)count);
}

static void add_descriptor(kvf_descriptor_table *table, uint64_t address, uint64_t bytes, uint32_t device) {
    table->at[table->count++] = (kvf_descriptor){address, bytes, device};
}

/* ---- state: per region, each projection over all logical blocks, then the carried state */

/* Where the pieces of a state lie inside one page. */
typedef struct state_pieces {
    kvf_byte_run at[KVF_MAX_PROJECTIONS + 1];
    uint32_t count;
    uint64_t bytes; /* of the whole state */
} state_pieces;

static kvf_status add_state(const kvf_cache_memory *memory, const state_pieces *pieces, uint64_t states,
                            kvf_descriptor_table *table) {
    for (uint32_t r = 0; r < memory->region_count; r++) {
        uint64_t page_bytes;
        kvf_status status = check_region(memory, r);
        if (status)
            return status;
        if (!kvf_mul(memory->region_block_bytes[r], memory->physical_per_logical, &page_bytes))
            return kvf_plain_fail(KVF_E_OVERFLOW, "region %u: a logical block does not fit in 64 bits", r);
        if (pieces->bytes > page_bytes)
            return kvf_plain_fail(KVF_E_RANGE, "region %u: a state of %llu bytes; allowed: 0 to %llu", r,
                                  (unsigned long long)pieces->bytes, (unsigned long long)page_bytes);
        for (uint32_t p = 0; p < pieces->count; p++)
            for (uint64_t b = 0; b < states; b++)
                add_descriptor(table, memory->region_base[r] + b * page_bytes + pieces->at[p].offset,
                               pieces->at[p].bytes, memory->device);
    }
    return KVF_OK;
}

static kvf_status local_pieces(const kvf_state_layout *state, state_pieces *out) {
    kvf_local_projection_runs(state, out->at);
    out->count = state->projection_count + 1;
    out->at[state->projection_count] = (kvf_byte_run){state->conv_bytes, state->ssm_bytes};
    if (!kvf_add(state->conv_bytes, state->ssm_bytes, &out->bytes))
        return kvf_plain_fail(KVF_E_OVERFLOW, "the bytes of a state do not fit in 64 bits");
    return KVF_OK;
}

/* Refuses a remote state that is not ours scaled, as happens when ranks hold copies of the same groups. */
static kvf_status remote_pieces(const kvf_state_layout *local, const kvf_state_layout *remote,
                                const kvf_shared_units *shared, state_pieces *out) {
    kvf_state_runs_out runs;
    if (local->projection_count != remote->projection_count)
        return kvf_plain_fail(KVF_E_MISMATCH, "the local conv state has %u projections, the remote one %u",
                              local->projection_count, remote->projection_count);
    kvf_status status = kvf_state_runs(local, shared, &runs);
    if (status)
        return status;
    if (runs.remote_conv_bytes != remote->conv_bytes || runs.remote_ssm_bytes != remote->ssm_bytes)
        return kvf_refuse(
            KVF_REFUSAL_LENGTH_NOT_DIVISIBLE, KVF_E_NOT_EXPRESSIBLE,
            "the remote state has %llu + %llu bytes, but the local state scaled to it has %llu + %llu",
            (unsigned long long)remote->conv_bytes, (unsigned long long)remote->ssm_bytes,
            (unsigned long long)runs.remote_conv_bytes, (unsigned long long)runs.remote_ssm_bytes);
    memcpy(out->at, runs.projection, local->projection_count * sizeof *out->at);
    out->at[local->projection_count] = runs.ssm;
    out->count = local->projection_count + 1;
    if (!kvf_add(runs.remote_conv_bytes, runs.remote_ssm_bytes, &out->bytes))
        return kvf_plain_fail(KVF_E_OVERFLOW, "the bytes of a remote state do not fit in 64 bits");
    return KVF_OK;
}

static kvf_status state_table(const kvf_cache_memory *memory, const state_pieces *pieces,
                              kvf_descriptor_table *out) {
    uint64_t states;
    kvf_descriptor_table table = {0};
    kvf_status status = kvf_state_blocks(memory->num_blocks, memory->physical_per_logical, &states);
    if (!status)
        status = make_table((uint64_t)memory->region_count * pieces->count, states, &table);
    if (!status)
        status = add_state(memory, pieces, states, &table);
    if (status) {
        kvf_descriptor_table_free(&table);
        return status;
    }
    *out = table;
    return KVF_OK;
}

kvf_status kvf_local_state_descriptors(const kvf_cache_memory *given, kvf_descriptor_table *out) {
    kvf_cache_memory memory;
    state_pieces pieces;
    kvf_status status = take_memory(given, "local", &memory);
    if (status)
        return status;
    if (!memory.state || !out)
        return kvf_plain_fail(KVF_E_INVALID, "%s is NULL", out ? "memory.state" : "out");
    status = local_pieces(memory.state, &pieces);
    return status ? status : state_table(&memory, &pieces, out);
}

kvf_status kvf_remote_state_descriptors(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                        const kvf_state_layout *local, const kvf_cache_memory *remote_memory,
                                        uint32_t remote_rank, kvf_descriptor_table *out) {
    kvf_cache_memory memory;
    state_pieces pieces;
    kvf_shared_units shared;
    kvf_status status = take_memory(remote_memory, "remote", &memory);
    if (status)
        return status;
    if (!topology || !local || !memory.state || !out)
        return kvf_plain_fail(KVF_E_INVALID, "topology, both states and out must be given");
    status = kvf_shared_state(topology, remote, remote_rank, &shared);
    if (!status && !shared.units)
        status = kvf_plain_fail(KVF_E_RANGE, "remote rank %u holds no state of the local rank", remote_rank);
    if (!status)
        status = remote_pieces(local, memory.state, &shared, &pieces);
    return status ? status : state_table(&memory, &pieces, out);
}

/* ---- attention */

/* How one region is cut: each half of a block into `count` pieces of `bytes`, the first one at `offset`. */
typedef struct block_cut {
    uint64_t half_bytes, offset, bytes;
    uint32_t count;
} block_cut;

static uint32_t halves_of(kvf_region_layout layout) {
    return layout == KVF_LAYOUT_BLOCKS_FIRST ? 2 : 1;
}

static void add_attention(const kvf_cache_memory *memory, uint32_t region, uint32_t halves,
                          const block_cut *cut, kvf_descriptor_table *table) {
    for (uint32_t h = 0; h < halves; h++)
        for (uint64_t b = 0; b < memory->num_blocks; b++)
            for (uint32_t k = 0; k < cut->count; k++)
                add_descriptor(table,
                               memory->region_base[region] + b * memory->region_block_bytes[region] +
                                   h * cut->half_bytes + cut->offset + k * cut->bytes,
                               cut->bytes, memory->device);
}

/* Puts state after attention. */
static kvf_status append_state(kvf_descriptor_table *table, kvf_descriptor_table *state) {
    table->attention_count = table->count;
    if (!state->count)
        return KVF_OK;
    kvf_descriptor *grown = kvf_resize(table->at, table->count + state->count, sizeof *grown);
    if (!grown)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu more descriptors", state->count);
    memcpy(grown + table->count, state->at, state->count * sizeof *grown);
    table->at = grown;
    table->count += state->count;
    return KVF_OK;
}

kvf_status kvf_local_descriptors(const kvf_cache_memory *given, kvf_region_layout layout,
                                 uint32_t block_size_ratio, kvf_descriptor_table *out) {
    kvf_cache_memory memory;
    kvf_status status = take_memory(given, "local", &memory);
    if (status)
        return status;
    if (!block_size_ratio || !out)
        return kvf_plain_fail(KVF_E_INVALID, "%s", out ? "block_size_ratio is 0" : "out is NULL");
    uint32_t halves = halves_of(layout);
    kvf_descriptor_table table = {0}, state = {0};
    uint64_t pieces;
    if (!kvf_mul(memory.num_blocks, (uint64_t)halves * block_size_ratio, &pieces))
        return kvf_plain_fail(KVF_E_OVERFLOW, "num_blocks is %llu; too large",
                              (unsigned long long)memory.num_blocks);
    status = make_table(memory.region_count, pieces, &table);
    for (uint32_t r = 0; !status && r < memory.region_count; r++) {
        block_cut cut = {.count = block_size_ratio};
        status = check_region(&memory, r);
        if (!status)
            status = kvf_exact_share(memory.region_block_bytes[r], 1, halves, "a block", &cut.half_bytes);
        if (!status)
            status = kvf_exact_share(cut.half_bytes, 1, block_size_ratio, "a block", &cut.bytes);
        if (!status)
            add_attention(&memory, r, halves, &cut, &table);
    }
    if (!status && memory.state)
        status = kvf_local_state_descriptors(&memory, &state);
    if (!status)
        status = append_state(&table, &state);
    kvf_descriptor_table_free(&state);
    if (status) {
        kvf_descriptor_table_free(&table);
        return status;
    }
    *out = table;
    return KVF_OK;
}

/* Our share of a region that every rank holds whole. */
static const kvf_shared_units all_shared = {.units = 1, .local_units = 1, .remote_units = 1};

static kvf_status check_block_bytes(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                    uint64_t local_bytes, uint64_t remote_bytes, uint32_t region,
                                    const kvf_shared_units *shared) {
    kvf_block_length ours = {local_bytes, shared->local_units, topology->local.block_size};
    kvf_block_length theirs = {remote_bytes, shared->remote_units, remote->block_size};
    kvf_status status = kvf_check_block_lengths(&ours, &theirs);
    return status ? kvf_fail_in(status, "region %u: ", region) : KVF_OK;
}

static kvf_status cut_remote_region(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                    const kvf_cache_memory *local, const kvf_cache_memory *memory,
                                    uint32_t region, uint32_t halves, const kvf_shared_units *shared,
                                    block_cut *out) {
    uint64_t bytes = memory->region_block_bytes[region];
    kvf_status status = check_region(memory, region);
    if (!status)
        status =
            check_block_bytes(topology, remote, local->region_block_bytes[region], bytes, region, shared);
    if (!status)
        status = kvf_exact_share(bytes, 1, halves, "a remote block", &out->half_bytes);
    if (!status)
        status = kvf_exact_share(out->half_bytes, shared->units, shared->remote_units, "a remote block",
                                 &out->bytes);
    if (!status)
        status = kvf_exact_share(out->half_bytes, shared->remote_begin, shared->remote_units,
                                 "a remote block", &out->offset);
    out->count = 1;
    return status;
}

static kvf_status remote_attention(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                   const kvf_remote_view *view, const kvf_cache_memory *local,
                                   const kvf_cache_memory *memory, kvf_descriptor_table *table) {
    kvf_shared_units attention;
    uint32_t halves = halves_of(view->layout);
    uint64_t blocks;
    kvf_status status = kvf_shared_attention(topology, remote, view->remote_rank, &attention);
    if (!status && !attention.units)
        status =
            kvf_plain_fail(KVF_E_RANGE, "remote rank %u holds no head of the local rank", view->remote_rank);
    if (!status && !kvf_mul(memory->num_blocks, halves, &blocks))
        status = kvf_plain_fail(KVF_E_OVERFLOW, "remote num_blocks is %llu; too large",
                                (unsigned long long)memory->num_blocks);
    if (!status)
        status = make_table(memory->region_count, blocks, table);
    for (uint32_t r = 0; !status && r < memory->region_count; r++) {
        bool whole = view->region_replicated && view->region_replicated[r];
        block_cut cut;
        status = cut_remote_region(topology, remote, local, memory, r, halves,
                                   whole ? &all_shared : &attention, &cut);
        if (!status)
            add_attention(memory, r, halves, &cut, table);
    }
    return status;
}

kvf_status kvf_remote_descriptors(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                  const kvf_remote_view *given, kvf_descriptor_table *out) {
    kvf_remote_view view;
    kvf_engine_transfer_info other;
    kvf_cache_memory local, memory;
    if (!topology || !given || !out)
        return kvf_plain_fail(KVF_E_INVALID, "topology, view and out must be given");
    kvf_status status = kvf_take_struct(&view, sizeof view, given, "kvf_remote_view");
    if (!status)
        status = kvf_take_remote(remote, &other);
    if (!status)
        status = take_memory(view.local, "local", &local);
    if (!status)
        status = take_memory(view.remote, "remote", &memory);
    if (!status && local.region_count != memory.region_count)
        status = kvf_plain_fail(KVF_E_INVALID, "%u local regions and %u remote ones", local.region_count,
                                memory.region_count);
    if (!status && !local.state != !memory.state)
        status = kvf_plain_fail(KVF_E_INVALID, "only one of the two sides keeps state");
    if (status)
        return status;
    kvf_descriptor_table table = {0}, state = {0};
    status = remote_attention(topology, &other, &view, &local, &memory, &table);
    if (!status && memory.state)
        status =
            kvf_remote_state_descriptors(topology, &other, local.state, &memory, view.remote_rank, &state);
    if (!status)
        status = append_state(&table, &state);
    kvf_descriptor_table_free(&state);
    if (status) {
        kvf_descriptor_table_free(&table);
        return status;
    }
    *out = table;
    return KVF_OK;
}

/* ---- local blocks cut over several sources */

static kvf_status split_one(const kvf_descriptor *whole, const kvf_shared_units *shared, const char *what,
                            kvf_descriptor *out) {
    uint64_t offset;
    *out = *whole;
    kvf_status status = kvf_exact_share(whole->bytes, shared->units, shared->local_units, what, &out->bytes);
    if (!status)
        status = kvf_exact_share(whole->bytes, shared->local_begin, shared->local_units, what, &offset);
    if (!status && !kvf_add(whole->address, offset, &out->address))
        status =
            kvf_plain_fail(KVF_E_OVERFLOW, "address %llu is too large", (unsigned long long)whole->address);
    return status;
}

static bool is_replicated(const kvf_replicated_regions *replicated, size_t descriptor) {
    if (!replicated || !replicated->region_replicated || !replicated->descriptors_per_region)
        return false;
    uint64_t region = descriptor / replicated->descriptors_per_region;
    return region < replicated->region_count && replicated->region_replicated[region];
}

/* The split table of a source rank. The rank whose attention it names may be another one. */
static kvf_status split_table(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                              const kvf_descriptor_table *local, uint32_t attention_rank, uint32_t state_rank,
                              const kvf_replicated_regions *replicated, kvf_descriptor_table *out) {
    kvf_shared_units attention, state;
    kvf_descriptor_table table = {0};
    kvf_status status = kvf_shared_attention(topology, remote, attention_rank, &attention);
    if (!status)
        status = kvf_shared_state(topology, remote, state_rank, &state);
    if (!status && (!attention.units || !state.units))
        status = kvf_plain_fail(KVF_E_RANGE, "remote rank %u holds nothing of the local rank", state_rank);
    if (!status)
        status = make_table(local->count, 1, &table);
    for (size_t i = 0; !status && i < local->count; i++) {
        if (is_replicated(replicated, i))
            table.at[i] = local->at[i];
        else if (i < local->attention_count)
            status = split_one(&local->at[i], &attention, "an attention descriptor", &table.at[i]);
        else
            status = split_one(&local->at[i], &state, "a state descriptor", &table.at[i]);
    }
    if (status) {
        kvf_descriptor_table_free(&table);
        return status;
    }
    table.count = local->count;
    table.attention_count = local->attention_count;
    *out = table;
    return KVF_OK;
}

kvf_status kvf_split_descriptors(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                 const kvf_descriptor_table *local, uint32_t source_rank,
                                 const kvf_replicated_regions *replicated, kvf_descriptor_table *out) {
    if (!topology || !local || !out)
        return kvf_plain_fail(KVF_E_INVALID, "topology, local and out must be given");
    kvf_engine_transfer_info other;
    kvf_status status = kvf_take_remote(remote, &other);
    return status ? status : split_table(topology, &other, local, source_rank, source_rank, replicated, out);
}

kvf_status kvf_compute_split_handle_data(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                         const kvf_descriptor_table *local, uint32_t source_rank,
                                         kvf_descriptor_table *out) {
    if (!topology || !local || !out)
        return kvf_plain_fail(KVF_E_INVALID, "topology, local and out must be given");
    kvf_engine_transfer_info other;
    kvf_ids sources;
    kvf_status status = kvf_take_remote(remote, &other);
    if (!status)
        status = kvf_fa_source_ranks(topology, &other, &sources);
    if (status)
        return status;
    uint32_t attention_rank = kvf_ids_have(&sources, source_rank) ? source_rank : (uint32_t)sources.at[0];
    kvf_ids_free(&sources);
    return split_table(topology, &other, local, attention_rank, source_rank, NULL, out);
}
