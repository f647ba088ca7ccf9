/* reads.json: the tables of a pair of engines, and whole requests with all addresses. */
#include <stdio.h>
#include <string.h>

#include "vectors.h"

/* Both engines of a case, ready for kvf_engine_transfer_plan_build(). */
typedef struct engines {
    kvf_topology_desc local;
    kvf_engine_transfer_info remote;
    kvf_engine_transfer_plan_desc desc;
} engines;

static kvf_region_layout read_region_layout(vector_case *c) {
    static const char *const words[] = {"kv_outer", "blocks_first", "packed", "latent"};
    const char *word = read_text(c, c->in, "layout");
    for (unsigned i = 0; i < 4; i++)
        if (strcmp(word, words[i]) == 0)
            return (kvf_region_layout)i;
    snprintf(c->malformed, sizeof c->malformed, "layout %s is not known", word);
    return KVF_LAYOUT_PACKED;
}

static kvf_status read_state_layout(vector_case *c, uint32_t tp_size, kvf_state_layout **out) {
    json_object *state = read_field(c, c->in, "state");
    kvf_state_type type = read_state_type(c, state);
    kvf_state_model model = read_state_model(c, type, read_field(c, state, "params"));
    kvf_state_shape shape;
    *out = case_memory(c, 1, sizeof **out);
    kvf_status status = kvf_state_shape_of(&model, tp_size, &shape);
    return status ? status
                  : kvf_conv_split(type, &shape, read_u32(c, state, "conv_elem_bytes"),
                                   read_u32(c, state, "ssm_elem_bytes"), *out);
}

static kvf_cache_memory read_memory(vector_case *c, json_object *engine, json_object *bases,
                                    const kvf_state_layout *state) {
    kvf_ids base = read_ids(c, bases), bytes = read_ids(c, read_field(c, engine, "block_lens"));
    return (kvf_cache_memory){.struct_size = sizeof(kvf_cache_memory),
                              .region_base = base.at,
                              .region_block_bytes = bytes.at,
                              .region_count = (uint32_t)(base.count < bytes.count ? base.count : bytes.count),
                              .num_blocks = read_u64(c, engine, "num_blocks"),
                              .physical_per_logical = read_u32(c, engine, "ppl"),
                              .state = state};
}

static kvf_status read_engines(vector_case *c, engines *e) {
    json_object *local = read_field(c, c->in, "local"), *remote = read_field(c, c->in, "remote");
    json_object *groups = read_field(c, c->in, "groups"), *bases = read_field(c, remote, "base_per_rank");
    kvf_state_layout *local_state = NULL, *remote_state = NULL;
    e->local = (kvf_topology_desc){.struct_size = sizeof e->local,
                                   .engine_id = "decode",
                                   .tp_size = read_u32(c, local, "tp_size"),
                                   .tp_rank = read_u32(c, local, "tp_rank"),
                                   .block_size = read_u32(c, local, "block_size"),
                                   .total_kv_heads = read_u32(c, c->in, "total_kv_heads"),
                                   .is_mla = read_bool(c, c->in, "is_mla"),
                                   .dialect = c->is_seed ? KVF_DIALECT_PR_40731 : KVF_DIALECT_V0_32};
    e->remote = (kvf_engine_transfer_info){.struct_size = sizeof e->remote,
                                           .tp_size = read_u32(c, remote, "tp_size"),
                                           .block_size = read_u32(c, remote, "block_size"),
                                           .physical_blocks_per_logical = read_u32(c, remote, "ppl")};
    if (has_field(c->in, "state")) {
        kvf_status status = read_state_layout(c, e->local.tp_size, &local_state);
        if (!status)
            status = read_state_layout(c, e->remote.tp_size, &remote_state);
        if (status)
            return status;
    }
    size_t ranks = read_length(c, bases);
    if (ranks != e->remote.tp_size)
        snprintf(c->malformed, sizeof c->malformed, "base_per_rank has not one entry a rank");
    kvf_cache_memory *memory = case_memory(c, ranks + 1, sizeof *memory);
    for (size_t r = 0; r < ranks; r++)
        memory[r] = read_memory(c, remote, json_object_array_get_idx(bases, r), remote_state);
    memory[ranks] = read_memory(c, local, read_field(c, local, "base"), local_state);
    e->desc = (kvf_engine_transfer_plan_desc){.struct_size = sizeof e->desc,
                                              .layout = read_region_layout(c),
                                              .kinds = read_kinds(c, groups, read_length(c, groups)),
                                              .group_count = read_length(c, groups),
                                              .local = &memory[ranks],
                                              .remote_ranks = memory};
    if (has_field(c->in, "region_replicated"))
        e->desc.region_replicated =
            read_bools(c, read_field(c, c->in, "region_replicated"), e->desc.local->region_count);
    return KVF_OK;
}

static kvf_status build_plan(const engines *e, kvf_engine_transfer_plan **plan) {
    kvf_topology *topology;
    kvf_status status = kvf_topology_create(&e->local, &topology);
    if (status)
        return status;
    status = kvf_engine_transfer_plan_build(topology, &e->remote, &e->desc, plan);
    kvf_topology_free(topology);
    return status;
}

/* ---- reads */

static json_object *copies_of(const kvf_read_spec *spec) {
    json_object *copies = json_object_new_array();
    for (size_t i = 0; i < spec->local_ids.count; i++) {
        json_object *copy = json_object_new_array();
        json_object_array_add(copy, json_u64(spec->copies[i].remote_address));
        json_object_array_add(copy, json_u64(spec->copies[i].local_address));
        json_object_array_add(copy, json_u64(spec->copies[i].bytes));
        json_object_array_add(copies, copy);
    }
    return copies;
}

static json_object *notified(uint64_t rank, const char *notice) {
    json_object *entry = with(json_object_new_object(), "remote_rank", json_u64(rank));
    return with(entry, "notif", json_object_new_string(notice));
}

static json_object *reads_of(const kvf_reads *reads) {
    json_object *specs = json_object_new_array(), *only = json_object_new_array();
    for (size_t i = 0; i < reads->count; i++) {
        const kvf_read_spec *spec = &reads->specs[i];
        json_object *entry = notified(spec->remote_rank, reads->notice);
        with(entry, "local_ids", json_ids(&spec->local_ids));
        with(entry, "remote_ids", json_ids(&spec->remote_ids));
        json_object_array_add(specs, with(entry, "copies", copies_of(spec)));
    }
    for (size_t i = 0; i < reads->notify_only.count; i++)
        json_object_array_add(only, notified(reads->notify_only.at[i], reads->notice));
    return with(with(json_object_new_object(), "reads", specs), "notify_only", only);
}

static answer read_request(vector_case *c) {
    engines e;
    kvf_engine_transfer_plan *plan;
    kvf_reads reads;
    kvf_block_lists local = read_lists(c, read_field(c, c->in, "local_block_ids"));
    kvf_block_lists remote = read_lists(c, read_field(c, c->in, "remote_block_ids"));
    if (read_engines(c, &e) || c->malformed[0])
        return answer_refused();
    if (c->is_seed && e.remote.physical_blocks_per_logical == 1 && e.desc.local->physical_per_logical > 1)
        return answer_not_covered(
            "the pull request leaves remote ids as they are when the remote ratio is 1");
    if (build_plan(&e, &plan))
        return answer_refused();
    kvf_status status = kvf_engine_transfer_plan_read(plan, &local, &remote,
                                                      read_text(c, c->in, "remote_request_id"), &reads);
    kvf_engine_transfer_plan_free(plan);
    if (status)
        return answer_refused();
    json_object *out = reads_of(&reads);
    kvf_reads_free(&reads);
    return answer_with(out);
}

/* ---- tables */

static void add_table(json_object *object, uint64_t key, const kvf_descriptor_table *table) {
    char name[24];
    snprintf(name, sizeof name, "%llu", (unsigned long long)key);
    if (table)
        with(object, name, json_table(table));
}

static json_object *tables_of(const kvf_engine_transfer_plan *plan, const engines *e) {
    json_object *local = json_object_new_object(), *remote = json_object_new_object();
    json_object *split = json_object_new_object();
    add_table(local, e->local.block_size, kvf_engine_transfer_plan_local(plan, e->local.block_size));
    if (e->remote.block_size != e->local.block_size)
        add_table(local, e->remote.block_size, kvf_engine_transfer_plan_local(plan, e->remote.block_size));
    for (uint64_t rank = 0; rank < e->remote.tp_size; rank++) {
        add_table(remote, rank, kvf_engine_transfer_plan_remote(plan, rank));
        add_table(split, rank, kvf_engine_transfer_plan_split(plan, rank));
    }
    json_object *out = with(with(json_object_new_object(), "local", local), "remote", remote);
    if (json_object_object_length(split))
        return with(out, "local_split", split);
    json_object_put(split);
    return out;
}

static answer desc_tables(vector_case *c) {
    engines e;
    kvf_engine_transfer_plan *plan;
    if (read_engines(c, &e) || c->malformed[0] || build_plan(&e, &plan))
        return answer_refused();
    json_object *out = tables_of(plan, &e);
    kvf_engine_transfer_plan_free(plan);
    return answer_with(out);
}

const vector_op reads_ops[] = {
    {"read", read_request, false},
    {"desc_tables", desc_tables, false},
    {NULL, NULL, false},
};
