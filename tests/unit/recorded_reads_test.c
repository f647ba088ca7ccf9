/*
 * Whole requests of the public connector (tests/vectors/reads.json), replayed through the planner: the same bytes must
 * arrive at the same places, however they are cut into copies.
 *
 * The recorded engines are rebuilt from their numbers alone: tensor-parallel sizes, block sizes, bytes of a block, one
 * page for attention and state. Cases marked as suspect and refusals are left out: in those the record is wrong, or the
 * planner does what the connector could not.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <json-c/json.h>

#include <kvferry/request.h>

#define MAX_GROUPS 4
#define MAX_LAYERS 16
#define MAX_BLOCKS 256

/* One recorded request, and both rebuilt engines. */
typedef struct replay {
    json_object *in, *out;
    uint32_t heads, layers, groups;
    bool is_state[MAX_GROUPS];
    kvf_model *model;
    kvf_engine *local, *remote;
    kvf_plan *plan;
} replay;

/* One byte that moves. */
typedef struct moved {
    uint64_t local, remote;
    uint32_t rank;
} moved;

typedef struct moves {
    moved *bytes;
    size_t count, capacity;
} moves;

static json_object *field(json_object *object, const char *key) {
    json_object *value = NULL;
    return json_object_object_get_ex(object, key, &value) ? value : NULL;
}

static uint64_t number(json_object *object, const char *key) {
    return json_object_get_uint64(field(object, key));
}
static uint32_t small(json_object *object, const char *key) {
    return (uint32_t)number(object, key);
}
static const char *text(json_object *object, const char *key) {
    return json_object_get_string(field(object, key));
}
static uint64_t item(json_object *array, size_t i) {
    return json_object_get_uint64(json_object_array_get_idx(array, i));
}

static void add_move(moves *m, uint64_t local, uint64_t remote, uint64_t bytes, uint32_t rank) {
    if (m->count + bytes > m->capacity) {
        m->capacity = 2 * (m->count + bytes);
        m->bytes = realloc(m->bytes, m->capacity * sizeof *m->bytes);
        assert_non_null(m->bytes);
    }
    for (uint64_t i = 0; i < bytes; i++)
        m->bytes[m->count++] = (moved){local + i, remote + i, rank};
}

static int by_local(const void *a, const void *b) {
    const moved *x = a, *y = b;
    return x->local < y->local ? -1 : x->local > y->local;
}

/* ---- rebuilding the engines ------------------------------------------------------------------ */

static uint32_t units_of_rank0(uint32_t heads, uint32_t tp) {
    return tp <= heads ? heads / tp : 1;
}

/* Makes K and V, or one latent, of the size that follows from the recorded bytes of a block; 0 if that is no whole
 * number. */
static uint32_t attention_parts(const replay *r, kvf_part_desc *parts) {
    json_object *local = field(r->in, "local");
    const char *layout = text(r->in, "layout");
    bool latent = json_object_get_boolean(field(r->in, "is_mla"));
    uint32_t parts_in_region = latent || strcmp(layout, "kv_outer") == 0 ? 1 : 2;
    uint64_t cells = (uint64_t)small(local, "block_size") * parts_in_region *
                     (latent ? 1 : units_of_rank0(r->heads, small(local, "tp_size")));
    uint64_t bytes = item(field(local, "block_lens"), 0);
    if (bytes % cells)
        return 0;
    kvf_part_desc part = {.name = latent ? "latent" : "k",
                          .dtype = KVF_DTYPE_U8,
                          .units = latent ? 1 : r->heads,
                          .cell_elements = (uint32_t)(bytes / cells),
                          .tp_rule = latent ? KVF_TP_REPLICATE : KVF_TP_SPLIT};
    parts[0] = part;
    parts[1] = part;
    parts[1].name = "v";
    return latent ? 1 : 2;
}

static kvf_part_desc conv_part(const char *name, uint32_t channels, uint32_t granule, uint32_t rows,
                               uint32_t bytes) {
    return (kvf_part_desc){.name = name,
                           .dtype = KVF_DTYPE_U8,
                           .units = channels,
                           .granule_units = granule,
                           .cell_elements = bytes,
                           .rows_per_step = rows};
}

static kvf_part_desc recurrent_part(uint32_t heads, uint32_t bytes) {
    return (kvf_part_desc){
        .name = "ssm", .dtype = KVF_DTYPE_U8, .units = heads, .cell_elements = bytes, .tensor = 1};
}

/* Makes the conv state's projections, then the recurrent state. */
static uint32_t state_parts(const replay *r, kvf_part_desc *parts) {
    json_object *state = field(r->in, "state"), *p = field(state, "params");
    const char *type = text(state, "state_type");
    uint32_t rows = small(p, field(p, "conv_kernel") ? "conv_kernel" : "conv_kernel_size") - 1;
    uint32_t conv = small(state, "conv_elem_bytes"), ssm = small(state, "ssm_elem_bytes");
    if (strcmp(type, "mamba1") == 0) {
        uint32_t channels = small(p, "intermediate_size");
        parts[0] = conv_part("x", channels, 1, rows, conv);
        parts[1] = recurrent_part(channels, small(p, "state_size") * ssm);
        return 2;
    }
    if (strcmp(type, "mamba2") == 0) {
        uint32_t size = small(p, "state_size"), groups = small(p, "n_groups") * size,
                 head = small(p, "head_dim");
        parts[0] = conv_part("x", small(p, "intermediate_size"), head, rows, conv);
        parts[1] = conv_part("B", groups, size, rows, conv);
        parts[2] = conv_part("C", groups, size, rows, conv);
        parts[3] = recurrent_part(small(p, "num_heads"), head * size * ssm);
        return 4;
    }
    uint32_t key = small(p, "head_k_dim"), value = small(p, "head_v_dim");
    parts[0] = conv_part("Q", small(p, "num_k_heads") * key, key, rows, conv);
    parts[1] = conv_part("K", small(p, "num_k_heads") * key, key, rows, conv);
    parts[2] = conv_part("V", small(p, "num_v_heads") * value, value, rows, conv);
    parts[3] = recurrent_part(small(p, "num_v_heads"), key * value * ssm);
    return 4;
}

static bool make_model(replay *r) {
    static const char *const names[MAX_GROUPS] = {"g0", "g1", "g2", "g3"};
    uint32_t layers[MAX_LAYERS];
    kvf_part_desc attention[2], state[4];
    uint32_t attention_count = attention_parts(r, attention);
    uint32_t state_count = field(r->in, "state") ? state_parts(r, state) : 0;
    kvf_group_desc groups[MAX_GROUPS] = {0};
    for (uint32_t i = 0; i < r->layers; i++)
        layers[i] = i;
    for (uint32_t g = 0; g < r->groups; g++) {
        groups[g] = (kvf_group_desc){.name = names[g],
                                     .kind = r->is_state[g] ? KVF_GROUP_STATE : KVF_GROUP_TOKENS,
                                     .layers = layers,
                                     .layer_count = r->layers,
                                     .parts = r->is_state[g] ? state : attention,
                                     .part_count = r->is_state[g] ? state_count : attention_count};
        if (groups[g].part_count == 0)
            return false;
    }
    kvf_model_desc desc = {sizeof desc, "recorded", r->layers, groups, r->groups};
    assert_int_equal(kvf_model_create(&desc, &r->model), KVF_OK);
    return true;
}

static kvf_engine *make_engine(const replay *r, json_object *side) {
    const char *layout = text(r->in, "layout");
    const char *order = strcmp(layout, "kv_outer") == 0       ? "LP|BHN"
                        : strcmp(layout, "blocks_first") == 0 ? "L|BPHN"
                                                              : "L|BHNP";
    uint32_t ratio = small(side, "ppl");
    uint64_t block_bytes = item(field(side, "block_lens"), 0), blocks = number(side, "num_blocks") / ratio;
    kvf_group_spec groups[MAX_GROUPS];
    for (uint32_t g = 0; g < r->groups; g++)
        groups[g] = r->is_state[g]
                        ? (kvf_group_spec){.block_count = blocks, .page_bytes = block_bytes * ratio}
                        : (kvf_group_spec){.tokens_per_block = small(side, "block_size") * ratio,
                                           .kernel_blocks_per_block = ratio,
                                           .block_count = blocks,
                                           .order = order,
                                           .page_bytes = block_bytes};
    kvf_engine_spec spec = {
        .struct_size = sizeof spec, .tp_size = small(side, "tp_size"), .groups = groups, .share_pages = true};
    kvf_engine *engine = NULL;
    if (kvf_engine_build(r->model, &spec, &engine))
        print_message("  %s\n", kvf_error_detail());
    return engine;
}

/* ---- the two answers ------------------------------------------------------------------------- */

/*
 * Where a received byte ends up. Blocks of another size are received one after another as they are,
 * [head][token], and then put into the order of the larger block: (sub-block, head, token) becomes (head,
 * sub-block, token).
 */
static uint64_t after_conversion(const replay *r, uint64_t local) {
    json_object *side = field(r->in, "local"), *bases = field(side, "base");
    uint64_t ratio = small(side, "block_size") / small(field(r->in, "remote"), "block_size");
    uint64_t block_bytes = item(field(side, "block_lens"), 0);
    if (ratio <= 1 || json_object_get_boolean(field(r->in, "is_mla")))
        return local;
    size_t region = json_object_array_length(bases) - 1;
    while (item(bases, region) > local)
        region--;
    uint64_t offset = local - item(bases, region), in_block = offset % block_bytes;
    uint64_t sub_bytes = block_bytes / ratio,
             head_bytes = sub_bytes / units_of_rank0(r->heads, small(side, "tp_size"));
    uint64_t sub = in_block / sub_bytes, head = in_block % sub_bytes / head_bytes,
             rest = in_block % head_bytes;
    return local - in_block + (head * ratio + sub) * head_bytes + rest;
}

static moves recorded(const replay *r) {
    moves m = {0};
    json_object *reads = field(r->out, "reads");
    for (size_t i = 0; i < json_object_array_length(reads); i++) {
        json_object *read = json_object_array_get_idx(reads, i), *copies = field(read, "copies");
        for (size_t k = 0; k < json_object_array_length(copies); k++) {
            json_object *copy = json_object_array_get_idx(copies, k);
            for (uint64_t byte = 0; byte < item(copy, 2); byte++)
                add_move(&m, after_conversion(r, item(copy, 1) + byte), item(copy, 0) + byte, 1,
                         small(read, "remote_rank"));
        }
    }
    return m;
}

static uint32_t read_ids(json_object *lists, uint32_t group, uint32_t *ids) {
    json_object *list = json_object_array_get_idx(lists, group);
    uint32_t count = list ? (uint32_t)json_object_array_length(list) : 0;
    assert_in_range(count, 0, MAX_BLOCKS);
    for (uint32_t i = 0; i < count; i++)
        ids[i] = (uint32_t)item(list, i);
    return count;
}

/*
 * If both sides have as many kernel blocks per logical block, their lists end with the same token, and the decode side
 * lists only blocks that are still to fetch. Otherwise, and for states, the lists begin with the same token.
 */
static bool pair_tables(const replay *r, uint32_t group, uint32_t *local_ids, uint32_t *remote_ids,
                        kvf_group_request *out) {
    uint32_t ours = read_ids(field(r->in, "local_block_ids"), group, local_ids);
    uint32_t theirs = read_ids(field(r->in, "remote_block_ids"), group, remote_ids);
    json_object *local = field(r->in, "local"), *remote = field(r->in, "remote");
    uint64_t our_block = r->is_state[group] ? 1 : (uint64_t)small(local, "block_size") * small(local, "ppl");
    uint64_t their_block =
        r->is_state[group] ? 1 : (uint64_t)small(remote, "block_size") * small(remote, "ppl");
    const uint64_t our_tokens = ours * our_block, their_tokens = theirs * their_block;
    *out = (kvf_group_request){{local_ids, ours, 0}, {remote_ids, theirs, 0}, 0, 0};
    if (ours == 0)
        return true;
    if (r->is_state[group] || small(local, "ppl") != small(remote, "ppl")) {
        out->end = our_tokens < their_tokens ? our_tokens : their_tokens;
        return true;
    }
    uint64_t blocks = (their_tokens + our_block - 1) / our_block; /* local blocks of the whole sequence */
    if (ours > blocks)
        return false;
    out->local.first_block = (uint32_t)(blocks - ours);
    out->begin = out->local.first_block * our_block;
    out->end = their_tokens;
    return true;
}

static moves planned(const replay *r, const kvf_request *request) {
    moves m = {0};
    json_object *local_base = field(field(r->in, "local"), "base");
    json_object *remote_base = field(field(r->in, "remote"), "base_per_rank");
    for (uint32_t s = 0; s < kvf_plan_source_count(r->plan); s++) {
        uint32_t rank = kvf_plan_source_rank(r->plan, s);
        kvf_run_cursor cursor;
        kvf_run run;
        kvf_run_cursor_start(&cursor, request, s);
        while (kvf_run_cursor_next(&cursor, &run, 1))
            add_move(&m, item(local_base, run.local_region) + run.local_offset,
                     item(json_object_array_get_idx(remote_base, rank), run.remote_region) +
                         run.remote_offset,
                     run.bytes, rank);
    }
    return m;
}

/* Whether both moves read the same byte of the same rank, or the same place in ranks that hold the same heads. */
static bool same_source(const replay *r, const moved *a, const moved *b) {
    if (a->rank == b->rank)
        return a->remote == b->remote;
    json_object *bases = field(field(r->in, "remote"), "base_per_rank");
    const kvf_shard_desc *x = kvf_shard_get(kvf_engine_shard(r->remote, a->rank));
    const kvf_shard_desc *y = kvf_shard_get(kvf_engine_shard(r->remote, b->rank));
    for (uint32_t g = 0; g < r->groups; g++)
        if (!r->is_state[g] && x->groups[g].parts[0].units.begin != y->groups[g].parts[0].units.begin)
            return false;
    for (size_t i = 0; i < json_object_array_length(json_object_array_get_idx(bases, a->rank)); i++)
        if (a->remote - item(json_object_array_get_idx(bases, a->rank), i) ==
            b->remote - item(json_object_array_get_idx(bases, b->rank), i))
            return true;
    return false;
}

static bool same_moves(const replay *r, moves *a, moves *b, const char *id) {
    if (a->count)
        qsort(a->bytes, a->count, sizeof *a->bytes, by_local);
    if (b->count)
        qsort(b->bytes, b->count, sizeof *b->bytes, by_local);
    if (a->count != b->count) {
        print_message("  %s: the record moves %zu bytes, the plan %zu\n", id, a->count, b->count);
        return false;
    }
    for (size_t i = 0; i < a->count; i++) {
        if (a->bytes[i].local != b->bytes[i].local || !same_source(r, &a->bytes[i], &b->bytes[i])) {
            print_message(
                "  %s: byte %zu: the record moves rank %u %llx to %llx, the plan rank %u %llx to %llx\n", id,
                i, a->bytes[i].rank, (unsigned long long)a->bytes[i].remote,
                (unsigned long long)a->bytes[i].local, b->bytes[i].rank,
                (unsigned long long)b->bytes[i].remote, (unsigned long long)b->bytes[i].local);
            return false;
        }
    }
    return true;
}

/* ---- the test -------------------------------------------------------------------------------- */

typedef enum outcome { REPLAYED, LEFT_OUT, FAILED } outcome;

static void read_shape(replay *r) {
    json_object *groups = field(r->in, "groups");
    r->groups = (uint32_t)json_object_array_length(groups);
    assert_in_range(r->groups, 1, MAX_GROUPS);
    for (uint32_t g = 0; g < r->groups; g++)
        r->is_state[g] = strcmp(json_object_get_string(json_object_array_get_idx(groups, g)), "ssm") == 0;
    uint32_t regions = (uint32_t)json_object_array_length(field(field(r->in, "local"), "block_lens"));
    r->layers = strcmp(text(r->in, "layout"), "kv_outer") == 0 ? regions / 2 : regions;
    assert_in_range(r->layers, 1, MAX_LAYERS);
    r->heads = small(r->in, "total_kv_heads");
}

static outcome run(replay *r, const char *id) {
    read_shape(r);
    if (!make_model(r))
        return LEFT_OUT;
    r->local = make_engine(r, field(r->in, "local"));
    r->remote = make_engine(r, field(r->in, "remote"));
    if (!r->local || !r->remote)
        return LEFT_OUT;
    const kvf_shard *ours = kvf_engine_shard(r->local, small(field(r->in, "local"), "tp_rank"));
    assert_int_equal(kvf_plan_build(ours, r->remote, NULL, &r->plan), KVF_OK);
    assert_int_equal(kvf_plan_verify(r->plan), KVF_OK);

    uint32_t ids[MAX_GROUPS][2][MAX_BLOCKS];
    kvf_group_request wanted[MAX_GROUPS];
    for (uint32_t g = 0; g < r->groups; g++)
        if (!pair_tables(r, g, ids[g][0], ids[g][1], &wanted[g]))
            return LEFT_OUT;
    kvf_request *request;
    assert_int_equal(kvf_request_create(r->plan, &request), KVF_OK);
    outcome result = FAILED;
    if (kvf_request_set(request, wanted, r->groups)) {
        print_message("  %s: %s\n", id, kvf_error_detail());
    } else {
        moves a = recorded(r), b = planned(r, request);
        result = same_moves(r, &a, &b, id) ? REPLAYED : FAILED;
        free(a.bytes);
        free(b.bytes);
    }
    kvf_request_free(request);
    return result;
}

static void recorded_reads_move_the_bytes_the_planner_moves(void **state) {
    (void)state;
    json_object *file = json_object_from_file(KVF_SOURCE_DIR "/tests/vectors/reads.json");
    assert_non_null(file);
    json_object *cases = field(file, "cases");
    unsigned counts[3] = {0};
    for (size_t i = 0; i < json_object_array_length(cases); i++) {
        json_object *c = json_object_array_get_idx(cases, i);
        replay r = {.in = field(c, "in"), .out = field(c, "out")};
        if (strcmp(text(c, "op"), "read") != 0 || field(c, "suspect") || !r.out)
            continue;
        /* Regions of different kinds in one group would be two groups here, which the record does not name. */
        outcome o = field(r.in, "region_replicated") ? LEFT_OUT : run(&r, text(c, "id"));
        counts[o]++;
        if (o == LEFT_OUT)
            print_message("  %s left out\n", text(c, "id"));
        kvf_plan_free(r.plan);
        kvf_engine_free(r.local);
        kvf_engine_free(r.remote);
        kvf_model_free(r.model);
    }
    json_object_put(file);
    print_message("%u recorded reads replayed, %u left out, %u differ\n", counts[REPLAYED], counts[LEFT_OUT],
                  counts[FAILED]);
    assert_int_equal(counts[FAILED], 0);
    assert_in_range(counts[REPLAYED], 146, 1000);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(recorded_reads_move_the_bytes_the_planner_moves)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
