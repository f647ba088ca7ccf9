/* mamba.json: shapes of states, projections of conv states, and descriptors of both sides. */
#include "vectors.h"

static json_object *numbers(const uint64_t *values, size_t count) {
    json_object *array = json_object_new_array();
    for (size_t i = 0; i < count; i++)
        json_object_array_add(array, json_u64(values[i]));
    return array;
}

static json_object *runs_of(const kvf_byte_run *runs, size_t count) {
    json_object *array = json_object_new_array();
    for (size_t i = 0; i < count; i++)
        json_object_array_add(array, numbers((uint64_t[]){runs[i].offset, runs[i].bytes}, 2));
    return array;
}

static answer state_shape(vector_case *c) {
    kvf_state_model model = read_state_model(c, read_state_type(c, c->in), c->in);
    kvf_state_shape shape;
    if (kvf_state_shape_of(&model, read_u32(c, c->in, "tp_size"), &shape))
        return answer_refused();
    json_object *out = with(json_object_new_object(), "conv_shape", numbers(shape.conv, 2));
    return answer_with(with(out, "temporal_shape", numbers(shape.temporal, shape.temporal_dimensions)));
}

static kvf_state_shape read_shape(vector_case *c, const char *conv, const char *temporal) {
    kvf_state_shape shape = {0};
    kvf_ids sizes = read_ids(c, read_field(c, c->in, conv));
    for (size_t d = 0; d < sizes.count && d < 2; d++)
        shape.conv[d] = sizes.at[d];
    sizes = read_ids(c, read_field(c, c->in, temporal));
    for (size_t d = 0; d < sizes.count && d < 3; d++)
        shape.temporal[d] = sizes.at[d];
    shape.temporal_dimensions = (uint32_t)sizes.count;
    return shape;
}

static kvf_status read_layout(vector_case *c, const char *conv, const char *temporal,
                              kvf_state_layout *layout) {
    kvf_state_shape shape = read_shape(c, conv, temporal);
    return kvf_conv_split(read_state_type(c, c->in), &shape, read_u32(c, c->in, "conv_elem_bytes"),
                          read_u32(c, c->in, "ssm_elem_bytes"), layout);
}

/*
 * Whether B and C have half a channel on each rank: the recording counts channels over all ranks, and then drops the
 * odd one.
 */
static bool loses_a_channel(vector_case *c, const kvf_state_shape *shape) {
    uint64_t carried = shape->temporal[0] * shape->temporal[1];
    return read_state_type(c, c->in) != KVF_STATE_MAMBA1 && read_u32(c, c->in, "tp_size") % 2 == 0 &&
           shape->conv[0] > carried && (shape->conv[0] - carried) % 2 == 1;
}

static answer conv_split(vector_case *c) {
    if (c->is_seed && read_state_type(c, c->in) != KVF_STATE_MAMBA2)
        return answer_not_covered("only mamba2 is known to the pull request; 0.32 splits all three types");
    kvf_state_shape shape = read_shape(c, "conv_shape", "temporal_shape");
    if (loses_a_channel(c, &shape))
        return answer_not_covered("half a channel a rank: the recording drops it, the library refuses");
    kvf_state_layout layout;
    if (read_layout(c, "conv_shape", "temporal_shape", &layout))
        return answer_refused();
    kvf_byte_run runs[KVF_MAX_PROJECTIONS];
    kvf_local_projection_runs(&layout, runs);
    uint64_t channels = 0;
    for (uint32_t p = 0; p < layout.projection_count; p++)
        channels += layout.projection_dims[p];
    json_object *out = with(json_object_new_object(), "conv_rows", json_u64(layout.conv_steps));
    with(out, "proj_dims", numbers(layout.projection_dims, layout.projection_count));
    with(out, "proj_bytes", numbers(layout.projection_bytes, layout.projection_count));
    with(out, "local_offsets", runs_of(runs, layout.projection_count));
    with(out, "conv_dim", json_u64(channels));
    with(out, "conv_state_bytes", json_u64(layout.conv_bytes));
    return answer_with(with(out, "ssm_state_bytes", json_u64(layout.ssm_bytes)));
}

static answer remote_offsets(vector_case *c) {
    kvf_ids bytes = read_ids(c, read_field(c, c->in, "proj_bytes"));
    kvf_state_layout layout = {0};
    for (size_t p = 0; p < bytes.count && p < KVF_MAX_PROJECTIONS; p++)
        layout.projection_bytes[layout.projection_count++] = bytes.at[p];
    kvf_byte_run runs[KVF_MAX_PROJECTIONS];
    if (kvf_remote_projection_runs(&layout, read_i64(c, c->in, "tp_ratio"),
                                   read_u64(c, c->in, "local_rank_offset"), runs))
        return answer_refused();
    return answer_with(with(json_object_new_object(), "offsets", runs_of(runs, layout.projection_count)));
}

static answer physical_blocks_per_logical(vector_case *c) {
    uint64_t ratio;
    if (kvf_physical_blocks_per_logical(read_u64(c, c->in, "conv_state_bytes"),
                                        read_u64(c, c->in, "ssm_state_bytes"),
                                        read_u64(c, c->in, "block_len"), &ratio))
        return answer_refused();
    return answer_with(with(json_object_new_object(), "ratio", json_u64(ratio)));
}

/* The memory of one side. Of a remote state, only the bytes of its two tensors are recorded. */
static kvf_cache_memory read_side(vector_case *c, const char *base, const char *lens, const char *ppl,
                                  const char *device, const kvf_state_layout *state) {
    kvf_ids bases = read_ids(c, read_field(c, c->in, base));
    kvf_ids bytes = read_ids(c, read_field(c, c->in, lens));
    return (kvf_cache_memory){.struct_size = sizeof(kvf_cache_memory),
                              .region_base = bases.at,
                              .region_block_bytes = bytes.at,
                              .region_count =
                                  (uint32_t)(bases.count < bytes.count ? bases.count : bytes.count),
                              .device = read_u32(c, c->in, device),
                              .physical_per_logical = read_u32(c, c->in, ppl),
                              .state = state};
}

/* Uses the first remote rank that has our state: recorded addresses do not depend on the rank. */
static kvf_status remote_states(vector_case *c, const kvf_state_layout *local, const kvf_cache_memory *memory,
                                kvf_descriptor_table *out) {
    kvf_topology_desc desc = read_topology(c, read_u32(c, c->in, "tp_rank"));
    kvf_engine_transfer_info remote = read_remote(c);
    kvf_topology *topology;
    kvf_ids sources = {0};
    kvf_status status = kvf_topology_create(&desc, &topology);
    if (status)
        return status;
    status = kvf_target_remote_ranks(topology, &remote, &sources);
    if (!status)
        status = kvf_remote_state_descriptors(topology, &remote, local, memory, (uint32_t)sources.at[0], out);
    kvf_ids_free(&sources);
    kvf_topology_free(topology);
    return status;
}

static answer state_descs(vector_case *c) {
    kvf_state_layout local, remote;
    if (read_layout(c, "local_conv_shape", "local_temporal_shape", &local))
        return answer_refused();
    kvf_ids remote_bytes = read_ids(c, read_field(c, c->in, "remote_state_bytes"));
    if (remote_bytes.count != 2)
        return answer_not_covered("the bytes of two state tensors are needed");
    remote = (kvf_state_layout){.projection_count = local.projection_count,
                                .conv_bytes = remote_bytes.at[0],
                                .ssm_bytes = remote_bytes.at[1]};
    kvf_cache_memory ours =
        read_side(c, "local_base", "local_block_lens", "local_ppl", "local_device", &local);
    kvf_cache_memory theirs =
        read_side(c, "remote_base", "remote_block_lens", "remote_ppl", "remote_device", &remote);
    ours.num_blocks = read_u64(c, c->in, "local_logical_blocks") * ours.physical_per_logical;
    theirs.num_blocks = read_u64(c, c->in, "remote_num_blocks");
    kvf_descriptor_table local_table, remote_table;
    if (remote_states(c, &local, &theirs, &remote_table))
        return answer_refused();
    if (kvf_local_state_descriptors(&ours, &local_table)) {
        kvf_descriptor_table_free(&remote_table);
        return answer_refused();
    }
    json_object *out = with(json_object_new_object(), "local", take_table(&local_table));
    return answer_with(with(out, "remote", take_table(&remote_table)));
}

const vector_op mamba_ops[] = {
    {"state_shape", state_shape, false},
    {"conv_split", conv_split, false},
    {"remote_offsets", remote_offsets, false},
    {"physical_blocks_per_logical", physical_blocks_per_logical, false},
    {"state_descs", state_descs, false},
    {NULL, NULL, false},
};
