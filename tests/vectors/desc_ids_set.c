/* desc_ids.json: expanding, pairing and clipping block lists, and the numbers of descriptors. */
#include <string.h>

#include "vectors.h"

static answer ids_answer(kvf_status status, kvf_ids *ids) {
    return status ? answer_refused() : answer_with(with(json_object_new_object(), "ids", take_ids(ids)));
}

/* An answer of two sets of lists, with the op's names for them. */
static answer pair_answer(kvf_status status, const char *first, kvf_block_lists *a, const char *second,
                          kvf_block_lists *b) {
    if (status)
        return answer_refused();
    json_object *out = with(json_object_new_object(), first, take_lists(a));
    return answer_with(with(out, second, take_lists(b)));
}

static answer desc_ids(vector_case *c) {
    kvf_block_lists lists = read_lists(c, read_field(c, c->in, "block_ids"));
    kvf_cache_kind *kinds = read_kinds(c, read_field(c, c->in, "groups"), lists.count);
    uint64_t kernel_blocks = read_u64(c, c->in, "num_blocks");
    uint32_t ratio = read_u32_or(c, c->in, "block_size_ratio", 1);
    kvf_id_space space = {.struct_size = sizeof space,
                          .attention_regions = read_u32(c, c->in, "num_attn_regions"),
                          .state_regions = read_u32(c, c->in, "num_ssm_regions"),
                          .attention_blocks = kernel_blocks * ratio};
    /* The recorded pull request numbers states as if their blocks, too, were cut to the other block size. */
    if (kvf_state_blocks(c->is_seed ? kernel_blocks * ratio : kernel_blocks,
                         read_u32(c, c->in, "physical_per_logical"), &space.state_blocks))
        return answer_refused();
    kvf_ids ids;
    kvf_status status = kvf_desc_ids(&space, kinds, &lists, &ids);
    return ids_answer(status, &ids);
}

static answer desc_ids_by_region(vector_case *c) {
    kvf_block_lists lists = read_lists(c, read_field(c, c->in, "block_ids"));
    json_object *groups = read_field(c, c->in, "region_group_ids");
    kvf_ids blocks = read_ids(c, read_field(c, c->in, "region_num_blocks"));
    uint32_t ratio = read_u32_or(c, c->in, "block_size_ratio", 1);
    for (size_t r = 0; r < blocks.count; r++)
        blocks.at[r] *= ratio;
    kvf_ids ids;
    kvf_status status =
        kvf_desc_ids_by_region(&lists, read_i32s(c, groups, blocks.count), blocks.at, blocks.count, &ids);
    return ids_answer(status, &ids);
}

static answer desc_ids_by_layer(vector_case *c) {
    kvf_block_lists lists = read_lists(c, read_field(c, c->in, "block_ids"));
    json_object *groups = read_field(c, c->in, "layer_group_ids");
    kvf_ids blocks = read_ids(c, read_field(c, c->in, "layer_num_blocks"));
    kvf_ids ids;
    kvf_status status =
        kvf_desc_ids_by_layer(&lists, read_i32s(c, groups, blocks.count), blocks.at, blocks.count, &ids);
    return ids_answer(status, &ids);
}

static answer logical_to_kernel(vector_case *c) {
    kvf_block_lists lists = read_lists(c, read_field(c, c->in, "block_ids"));
    kvf_cache_kind *kinds = read_kinds(c, read_field(c, c->in, "groups"), lists.count);
    uint32_t local_ppl = read_u32(c, c->in, "local_ppl"), remote_ppl = read_u32(c, c->in, "remote_ppl");
    kvf_block_lists local = {0}, remote = {0};
    kvf_status status = kvf_logical_to_kernel(kinds, &lists, local_ppl, local_ppl, &local);
    if (!status)
        status =
            kvf_logical_to_kernel(kinds, &lists, remote_ppl, c->is_seed ? local_ppl : remote_ppl, &remote);
    if (status)
        kvf_block_lists_free(&local);
    return pair_answer(status, "local", &local, "remote", &remote);
}

static answer mapped_blocks(vector_case *c) {
    kvf_ids blocks = read_ids(c, read_field(c, c->in, "block_ids")), ids;
    kvf_status status = kvf_mapped_blocks(&blocks, read_u32(c, c->in, "block_size_ratio"), &ids);
    return ids_answer(status, &ids);
}

static answer map_block_size(vector_case *c) {
    kvf_block_lists local = read_lists(c, read_field(c, c->in, "local_block_ids"));
    kvf_block_lists remote = read_lists(c, read_field(c, c->in, "remote_block_ids")), mapped;
    kvf_cache_kind *kinds = read_kinds(c, read_field(c, c->in, "groups"), remote.count);
    if (kvf_map_block_size(kinds, &local, &remote, read_u32(c, c->in, "block_size_ratio"), &mapped))
        return answer_refused();
    json_object *out = with(json_object_new_object(), "local", take_lists(&mapped));
    return answer_with(with(out, "remote", json_lists(&remote)));
}

static answer prefix_trim(vector_case *c) {
    kvf_block_lists decode = read_lists(c, read_field(c, c->in, "decode_block_ids"));
    kvf_block_lists prefill = read_lists(c, read_field(c, c->in, "prefill_block_ids")), ours, theirs;
    kvf_cache_kind *kinds = read_kinds(c, read_field(c, c->in, "groups"), decode.count);
    kvf_status status = kvf_prefix_trim(kinds, &decode, &prefill, read_u32(c, c->in, "decode_ppl"),
                                        read_u32(c, c->in, "prefill_ppl"), &ours, &theirs);
    return pair_answer(status, "decode", &ours, "prefill", &theirs);
}

static answer prefix_trim_by_region(vector_case *c) {
    kvf_block_lists decode = read_lists(c, read_field(c, c->in, "decode_by_region"));
    kvf_block_lists prefill = read_lists(c, read_field(c, c->in, "prefill_by_region")), ours, theirs;
    kvf_status status = kvf_prefix_trim_by_region(&decode, &prefill, &ours, &theirs);
    return pair_answer(status, "decode", &ours, "prefill", &theirs);
}

static answer dcp_prefix_trim(vector_case *c) {
    kvf_ids local = read_ids(c, read_field(c, c->in, "local_block_ids"));
    kvf_ids remote = read_ids(c, read_field(c, c->in, "remote_block_ids")), ours, theirs;
    kvf_dcp_pair pair = {.struct_size = sizeof pair,
                         .local_dcp_size = read_u32(c, c->in, "local_dcp_size"),
                         .local_dcp_rank = read_u32(c, c->in, "local_dcp_rank"),
                         .remote_dcp_size = read_u32(c, c->in, "remote_dcp_size"),
                         .remote_rank = read_u32(c, c->in, "remote_rank"),
                         .num_computed = read_u64(c, c->in, "num_computed"),
                         .has_num_remote_blocks = has_field(c->in, "num_remote_blocks")};
    if (pair.has_num_remote_blocks)
        pair.num_remote_blocks = read_u64(c, c->in, "num_remote_blocks");
    if (kvf_dcp_prefix_trim(&pair, &local, &remote, &ours, &theirs))
        return answer_refused();
    json_object *out = with(json_object_new_object(), "local", take_ids(&ours));
    return answer_with(with(out, "remote", take_ids(&theirs)));
}

static answer block_ids_by_region(vector_case *c) {
    kvf_block_lists lists = read_lists(c, read_field(c, c->in, "block_ids")), regions;
    json_object *groups = read_field(c, c->in, "region_group_ids");
    size_t count = read_length(c, groups);
    if (kvf_block_ids_by_region(&lists, read_i32s(c, groups, count), count, &regions))
        return answer_refused();
    return answer_with(with(json_object_new_object(), "by_region", take_lists(&regions)));
}

static answer exchange_clip(vector_case *c) {
    json_object *kinds_field = read_field(c, c->in, "groups");
    size_t count = read_length(c, kinds_field);
    kvf_cache_kind *kinds = read_kinds(c, kinds_field, count);
    uint32_t *windows = read_u32s(c, read_field(c, c->in, "sliding_window"), count, 0);
    uint32_t *spec_blocks = read_u32s(c, read_field(c, c->in, "num_spec_blocks"), count, 0);
    uint32_t block_size = read_u32(c, c->in, "block_size");
    kvf_block_lists lists = read_lists(c, read_field(c, c->in, "block_ids")), clipped;
    kvf_exchange_group *groups = case_memory(c, count, sizeof *groups);
    json_object *per_window = json_object_new_array();
    for (size_t g = 0; g < count; g++) {
        groups[g] = (kvf_exchange_group){kinds[g], windows[g], spec_blocks[g]};
        json_object_array_add(per_window, json_u64(kvf_blocks_per_window(windows[g], block_size)));
    }
    json_object *out = with(json_object_new_object(), "blocks_per_window", per_window);
    /* Without the hybrid manager all groups share one block table, and nothing is clipped. */
    if (!read_bool(c, c->in, "hybrid_manager"))
        return answer_with(with(out, "block_ids", json_lists(&lists)));
    bool clip_state = !c->is_seed && has_field(c->in, "clip_ssm") && read_bool(c, c->in, "clip_ssm");
    if (kvf_exchange_clip(groups, count, block_size, clip_state, &lists, &clipped)) {
        json_object_put(out);
        return answer_refused();
    }
    return answer_with(with(out, "block_ids", take_lists(&clipped)));
}

static answer ssm_state_clip(vector_case *c) {
    kvf_ids blocks = read_ids(c, read_field(c, c->in, "block_ids")), clipped;
    if (kvf_ssm_state_clip(&blocks, read_u32(c, c->in, "num_spec_blocks"), &clipped))
        return answer_refused();
    return answer_with(with(json_object_new_object(), "block_ids", take_ids(&clipped)));
}

static answer region_order(vector_case *c) {
    json_object *names = read_field(c, c->in, "layer_names"), *sorted = json_object_new_array();
    size_t count = read_length(c, names);
    const char **list = case_memory(c, count, sizeof *list);
    for (size_t i = 0; i < count; i++) {
        list[i] = json_object_get_string(json_object_array_get_idx(names, i));
        if (!list[i])
            list[i] = "";
    }
    if (kvf_region_order(list, count)) {
        json_object_put(sorted);
        return answer_refused();
    }
    for (size_t i = 0; i < count; i++)
        json_object_array_add(sorted, json_object_new_string(list[i]));
    return answer_with(with(json_object_new_object(), "sorted", sorted));
}

const vector_op desc_ids_ops[] = {
    {"desc_ids", desc_ids, false},
    {"desc_ids_by_region", desc_ids_by_region, false},
    {"desc_ids_by_layer", desc_ids_by_layer, false},
    {"logical_to_kernel", logical_to_kernel, false},
    {"mapped_blocks", mapped_blocks, false},
    {"map_block_size", map_block_size, false},
    {"prefix_trim", prefix_trim, false},
    {"prefix_trim_by_region", prefix_trim_by_region, false},
    {"dcp_prefix_trim", dcp_prefix_trim, false},
    {"block_ids_by_region", block_ids_by_region, false},
    {"exchange_clip", exchange_clip, false},
    {"ssm_state_clip", ssm_state_clip, false},
    {"region_order", region_order, false},
    {NULL, NULL, false},
};
