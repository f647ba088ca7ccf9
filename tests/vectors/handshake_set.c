/*
 * handshake.json: rules of a hand-over. The recorded messages are of another protocol, and are not compared; the
 * questions that kvferry can answer are.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <kvferry/connector/topology.h>
#include <kvferry/plan.h>
#include <kvferry/schedule.h>

#include "vectors.h"

static answer another_protocol(vector_case *c) {
    (void)c;
    return answer_not_covered("bytes of another protocol; kvferry's own is tested by itself");
}

static answer counted_elsewhere(vector_case *c) {
    (void)c;
    return answer_not_covered(
        "texts of another protocol; agents count releases by rank, and know leases by number");
}

static double read_double(vector_case *c, json_object *object, const char *key) {
    return json_object_get_double(read_field(c, object, key));
}

static int64_t nanoseconds(double seconds) {
    return llround(seconds * 1e9);
}

/* ---- rules ----------------------------------------------------------------------------------- */

static answer base_request_id(vector_case *c) {
    json_object *id = read_field(c, c->in, "request_id");
    const char *text = json_object_get_string(id);
    size_t length = kvf_base_request_bytes((kvf_request_id){text, (size_t)json_object_get_string_len(id)});
    return answer_with(with(json_object_new_object(), "base", json_object_new_string_len(text, (int)length)));
}

static answer prefill_token_count(vector_case *c) {
    uint64_t tokens = kvf_prefill_token_count(read_u64(c, c->in, "num_prompt_tokens"),
                                              read_bool(c, c->in, "has_state_layers"),
                                              read_u32_or(c, c->in, "lookahead_tokens", 0));
    return answer_with(with(json_object_new_object(), "tokens", json_u64(tokens)));
}

/* A request without local blocks to fill only notifies, and it is never too late for that. */
static answer turn2_expired(vector_case *c) {
    const uint64_t margin = UINT64_C(5000000000);
    uint64_t expiry =
        has_field(c->in, "blocks_expiry") ? (uint64_t)nanoseconds(read_double(c, c->in, "blocks_expiry")) : 0;
    bool expired = read_bool(c, c->in, "has_local_blocks") &&
                   kvf_lease_expired((uint64_t)nanoseconds(read_double(c, c->in, "now")), expiry,
                                     nanoseconds(read_double(c, c->in, "clock_offset")), margin);
    return answer_with(with(json_object_new_object(), "expired", json_object_new_boolean(expired)));
}

static answer lease_sweep(vector_case *c) {
    uint64_t now = (uint64_t)nanoseconds(read_double(c, c->in, "now"));
    json_object *released = json_object_new_array(), *left = json_object_new_array();
    json_object_object_foreach(read_field(c, c->in, "deadlines"), id, deadline) {
        uint64_t expiry = (uint64_t)nanoseconds(json_object_get_double(deadline));
        bool over = kvf_lease_expired(now, expiry, 0, 0);
        json_object_array_add(over ? released : left, json_object_new_string(id));
    }
    uint64_t count = json_object_array_length(released);
    json_object *out = with(json_object_new_object(), "released", released);
    return answer_with(with(with(out, "left", left), "expired_count", json_u64(count)));
}

/* ---- dialogue: which ranks are asked, and their clocks; the queries are another protocol ------- */

static answer dialogue(vector_case *c) {
    if (c->error_kind)
        return another_protocol(c);
    json_object_object_del(c->out, "queries_b64");
    kvf_topology_desc desc = read_topology(c, read_u32(c, c->in, "tp_rank"));
    kvf_engine_transfer_info remote = read_remote(c);
    kvf_topology *topology;
    kvf_ids ranks = {0};
    desc.total_kv_heads = 64; /* not recorded: enough for every rank */
    if (kvf_topology_create(&desc, &topology))
        return answer_refused();
    kvf_status status = kvf_handshake_target_ranks(topology, &remote, &ranks);
    kvf_topology_free(topology);
    if (status)
        return answer_refused();
    json_object *replies = read_field(c, c->in, "replies");
    size_t count = read_length(c, replies);
    kvf_clock_probe *probes = case_memory(c, count, sizeof *probes);
    for (size_t i = 0; i < count; i++) {
        json_object *reply = json_object_array_get_idx(replies, i);
        probes[i] = (kvf_clock_probe){nanoseconds(read_double(c, reply, "sent_at")),
                                      nanoseconds(read_double(c, reply, "received_at")),
                                      nanoseconds(read_double(c, reply, "remote_clock"))};
    }
    int64_t offset;
    json_object *out = with(json_object_new_object(), "ranks", take_ids(&ranks));
    if (kvf_clock_offset(probes, count, &offset, NULL)) {
        json_object_put(out);
        return answer_refused();
    }
    return answer_with(with(out, "clock_offset", json_object_new_double((double)offset / 1e9)));
}

/* ---- handshake_check: whether the planner lets two engines exchange caches ------------------- */

/* One side, as a model with a group for each layer and kind, since regions may hold cells of different sizes. */
typedef struct side {
    kvf_model *model;
    kvf_engine *engine;
} side;

static void free_side(side *s) {
    kvf_engine_free(s->engine);
    kvf_model_free(s->model);
}

static bool is_layout(vector_case *c, const char *word) {
    return strcmp(read_text(c, c->in, "layout"), word) == 0;
}

/* The bytes of a cell in one region, from the tokens, heads and parts of a block. */
static uint32_t cell_bytes(vector_case *c, json_object *engine, uint64_t block_bytes, uint64_t parts) {
    uint64_t heads = read_bool(c, c->in, "is_mla") ? 1
                                                   : kvf_physical_heads(read_u32(c, c->in, "total_kv_heads"),
                                                                        read_u32(c, engine, "tp_size"));
    uint64_t cells = heads * parts * read_u32(c, engine, "block_size");
    if (cells == 0 || block_bytes % cells) {
        snprintf(c->malformed, sizeof c->malformed, "a block length is not a number of cells");
        return 1;
    }
    return (uint32_t)(block_bytes / cells);
}

static kvf_status make_model(vector_case *c, json_object *engine, kvf_model **out) {
    kvf_ids lengths = read_ids(c, read_field(c, engine, "block_lens"));
    json_object *kinds = read_field(c, c->in, "groups");
    bool apart = is_layout(c, "kv_outer"), latent = read_bool(c, c->in, "is_mla");
    size_t layers = apart ? lengths.count / 2 : lengths.count, kind_count = read_length(c, kinds);
    size_t parts = latent ? 1 : 2, groups = layers * kind_count;
    kvf_group_desc *group = case_memory(c, groups, sizeof *group);
    kvf_part_desc *part = case_memory(c, groups * 2, sizeof *part);
    uint32_t *layer = case_memory(c, groups, sizeof *layer);
    for (size_t g = 0; g < groups; g++) {
        const char *kind = json_object_get_string(json_object_array_get_idx(kinds, g / layers));
        char *name = case_memory(c, 32, 1);
        snprintf(name, 32, "%s.%zu", kind, g % layers);
        layer[g] = (uint32_t)g;
        group[g] = (kvf_group_desc){.name = name,
                                    .window_tokens = strcmp(kind, "swa") == 0 ? 64 : 0,
                                    .layers = &layer[g],
                                    .layer_count = 1,
                                    .parts = &part[2 * g],
                                    .part_count = (uint32_t)parts};
        for (size_t p = 0; p < parts; p++)
            part[2 * g + p] = (kvf_part_desc){
                .name = p        ? "v"
                        : latent ? "latent"
                                 : "k",
                .dtype = KVF_DTYPE_U8,
                .units = latent ? 1 : read_u32(c, c->in, "total_kv_heads"),
                .cell_elements = cell_bytes(c, engine, lengths.at[apart ? 2 * (g % layers) + p : g % layers],
                                            apart ? 1 : parts),
                .tp_rule = latent ? KVF_TP_REPLICATE : KVF_TP_SPLIT};
    }
    kvf_model_desc desc = {.struct_size = sizeof desc,
                           .layer_count = (uint32_t)groups,
                           .groups = group,
                           .group_count = (uint32_t)groups};
    return kvf_model_create(&desc, out);
}

static kvf_status make_side(vector_case *c, const char *key, side *s) {
    json_object *engine = read_field(c, c->in, key);
    bool heads_first = strcmp(read_text(c, engine, "cache_layout"), "HND") == 0;
    bool apart = is_layout(c, "kv_outer");
    kvf_engine_spec spec = {
        .struct_size = sizeof spec,
        .name = key,
        .tp_size = read_u32(c, engine, "tp_size"),
        .all = {.tokens_per_block = read_u32(c, engine, "block_size") * read_u32(c, engine, "ppl"),
                .kernel_blocks_per_block = read_u32(c, engine, "ppl"),
                .block_count = read_u64(c, engine, "num_blocks"),
                .order = apart ? (heads_first ? "LP|BHN" : "LP|BNH") : (heads_first ? "L|BHNP" : "L|BNHP")}};
    kvf_status status = make_model(c, engine, &s->model);
    return status ? status : kvf_engine_build(s->model, &spec, &s->engine);
}

static bool has_layers(vector_case *c, const char *key) {
    return read_length(c, read_field(c, read_field(c, c->in, key), "block_lens")) > 0;
}

/* The planner compares cells; the recording compares lengths and numbers of regions. The planner refuses an engine
 * without layers. */
static answer refused_by_planner(vector_case *c, kvf_status status) {
    static const char *const cells_differ[] = {"block_len_mismatch", "region_count_mismatch",
                                               "remote_block_lens_differ"};
    answer a = answer_refused();
    bool differ = status == KVF_E_MISMATCH || !has_layers(c, "local") || !has_layers(c, "remote");
    for (size_t i = 0; i < sizeof cells_differ / sizeof *cells_differ; i++)
        if (differ && c->error_kind && strcmp(c->error_kind, cells_differ[i]) == 0)
            a.refusal = cells_differ[i];
    return a;
}

static answer handshake_check(vector_case *c) {
    if (has_field(read_field(c, c->in, "remote"), "num_blocks_second"))
        return answer_not_covered("every rank has a number of blocks of its own");
    side local = {0}, remote = {0};
    kvf_plan *plan = NULL;
    kvf_status status = make_side(c, "local", &local);
    if (!status)
        status = make_side(c, "remote", &remote);
    if (!status)
        status = kvf_plan_build(
            kvf_engine_shard(local.engine, read_u32(c, read_field(c, c->in, "local"), "tp_rank")),
            remote.engine, NULL, &plan);
    answer a = status ? refused_by_planner(c, status)
               : c->error_kind
                   ? answer_not_covered("the recording refuses the pair, the planner has a plan")
                   : answer_with(with(json_object_new_object(), "accepted", json_object_new_boolean(true)));
    kvf_plan_free(plan);
    free_side(&local);
    free_side(&remote);
    return a;
}

const vector_op handshake_ops[] = {
    {"payload", another_protocol, false},
    {"payload_decode", another_protocol, false},
    {"query", another_protocol, false},
    {"reply_clock", another_protocol, false},
    {"push_registration", another_protocol, false},
    {"heartbeat", another_protocol, false},
    {"compat_hash", another_protocol, false},
    {"constants", another_protocol, false},
    {"dialogue", dialogue, false},
    {"notify_count", counted_elsewhere, false},
    {"lease_sweep", lease_sweep, false},
    {"turn2_expired", turn2_expired, false},
    {"base_request_id", base_request_id, false},
    {"prefill_token_count", prefill_token_count, false},
    {"handshake_check", handshake_check, false},
    {NULL, NULL, false},
};
