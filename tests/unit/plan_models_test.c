/*
 * Plans between engines of two models: the requested groups and layers must be the same in both, wherever they stand.
 * An oracle that knows no plans compares bytes by the names and numbers of their cells.
 */
#include "shapes.h"

#define TOKENS 29u

/* "full" in layers 0 to 3, K before V; then a group that the other model lacks. */
static kvf_model *ours(void) {
    static const uint32_t four[] = {0, 1, 2, 3}, last[] = {4};
    kvf_part_desc kv[] = {PART(.name = "k", .units = 4, .cell_elements = 4),
                          PART(.name = "v", .units = 4, .cell_elements = 8)};
    kvf_part_desc draft = PART(.name = "k", .units = 2, .cell_elements = 4);
    kvf_group_desc groups[] = {
        {.name = "full", .layers = four, .layer_count = 4, .parts = kv, .part_count = 2},
        {.name = "draft", .layers = last, .layer_count = 1, .parts = &draft, .part_count = 1}};
    return model_of(5, groups, 2);
}

/* A group that ours() lacks; then "full", V before K, with one layer more. */
static kvf_model *theirs(void) {
    static const uint32_t five[] = {0, 1, 2, 3, 5}, other[] = {4};
    kvf_part_desc vk[] = {PART(.name = "v", .units = 4, .cell_elements = 8),
                          PART(.name = "k", .units = 4, .cell_elements = 4)};
    kvf_part_desc extra = PART(.name = "latent", .units = 1, .cell_elements = 4);
    kvf_group_desc groups[] = {
        {.name = "mla", .layers = other, .layer_count = 1, .parts = &extra, .part_count = 1},
        {.name = "full", .layers = five, .layer_count = 5, .parts = vk, .part_count = 2}};
    return model_of(6, groups, 2);
}

/* One rank's memory. */
typedef struct memory {
    const kvf_shard *shard;
    unsigned char *regions[16];
} memory;

static memory open_memory(const kvf_shard *shard) {
    memory m = {.shard = shard};
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    assert_true(desc->region_count <= COUNT_OF(m.regions));
    for (uint32_t i = 0; i < desc->region_count; i++) {
        m.regions[i] = calloc(desc->region_bytes[i], 1);
        assert_non_null(m.regions[i]);
    }
    return m;
}

static void close_memory(memory *m) {
    for (size_t i = 0; i < COUNT_OF(m->regions); i++)
        free(m->regions[i]);
}

static unsigned char content(const char *group, const char *part, uint32_t layer, uint32_t token,
                             uint32_t unit, uint64_t byte) {
    uint64_t h = (uint64_t)group[0] << 8 | (unsigned char)part[0];
    const uint64_t at[] = {layer, token, unit, byte};
    for (size_t i = 0; i < COUNT_OF(at); i++) {
        h = (h ^ at[i]) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return (unsigned char)(h >> 13 | 1); /* never zero, which memory begins with */
}

/* Writes the cells of a group, or counts the bytes that differ from what was written. Blocks are numbered 1, 2, 3 .. */
static uint32_t visit(const memory *m, const char *name, kvf_range model_layers, bool write) {
    const kvf_model *model = kvf_shard_model(m->shard);
    uint32_t wrong = 0;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        if (strcmp(group->name, name) != 0)
            continue;
        const kvf_group_shard_desc *held = &kvf_shard_get(m->shard)->groups[g];
        kvf_range layers = kvf_shard_group_layers(m->shard, g);
        for (uint32_t layer = layers.begin; layer < layers.end; layer++) {
            if (group->layers[layer] < model_layers.begin || group->layers[layer] >= model_layers.end)
                continue;
            for (uint32_t p = 0; p < group->part_count; p++)
                for (uint32_t token = 0; token < TOKENS; token++)
                    for (uint32_t unit = held->parts[p].units.begin; unit < held->parts[p].units.end;
                         unit++) {
                        kvf_cell_location cell = {.struct_size = sizeof cell};
                        assert_ok(kvf_shard_locate(m->shard, g, layer, p, 1 + token / held->tokens_per_block,
                                                   token % held->tokens_per_block, unit, &cell));
                        for (uint64_t i = 0; i < cell.bytes; i++) {
                            unsigned char want = content(group->name, group->parts[p].name,
                                                         group->layers[layer], token, unit, i);
                            unsigned char *byte = &m->regions[cell.region][cell.offset + i];
                            if (write)
                                *byte = want;
                            else
                                wrong += *byte != want;
                        }
                    }
        }
    }
    return wrong;
}

/* Moves the tokens of `group` of the local model by a plan. */
static void move(const kvf_plan *plan, const memory *here, memory *there, uint32_t group) {
    static const uint32_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    kvf_group_request wanted[2] = {{.end = 0}, {.end = 0}};
    wanted[group] = (kvf_group_request){.local = {ids, 10, 0}, .remote = {ids, 10, 0}, .end = TOKENS};
    kvf_request *request = request_of(plan);
    assert_ok(kvf_request_set(request, wanted, 2));
    for (uint32_t s = 0; s < kvf_plan_source_count(plan); s++) {
        kvf_run_cursor cursor;
        kvf_run run;
        for (kvf_run_cursor_start(&cursor, request, s); kvf_run_cursor_next(&cursor, &run, 1);)
            memcpy(here->regions[run.local_region] + run.local_offset,
                   there[kvf_plan_source_rank(plan, s)].regions[run.remote_region] + run.remote_offset,
                   run.bytes);
    }
    kvf_request_free(request);
}

typedef struct sides {
    kvf_model *local_model, *remote_model;
    kvf_engine *local, *remote;
    memory here, there[4];
} sides;

static sides open_sides(kvf_model *local, kvf_model *remote) {
    sides s = {.local_model = local, .remote_model = remote};
    s.local = engine_of(local, ENGINE(.all = {.tokens_per_block = 6, .block_count = 12}));
    s.remote =
        engine_of(remote, ENGINE(.name = "other", .tp_size = 2, .pp_size = 2,
                                 .all = {.tokens_per_block = 4, .block_count = 12, .order = "L|BPNH"}));
    s.here = open_memory(kvf_engine_shard(s.local, 0));
    for (uint32_t i = 0; i < 4; i++) {
        s.there[i] = open_memory(kvf_engine_shard(s.remote, i));
        (void)visit(&s.there[i], "full", range(0, 6), true);
    }
    return s;
}

static void close_sides(sides *s) {
    close_memory(&s->here);
    for (uint32_t i = 0; i < 4; i++)
        close_memory(&s->there[i]);
    kvf_engine_free(s->local);
    kvf_engine_free(s->remote);
    kvf_model_free(s->local_model);
    kvf_model_free(s->remote_model);
}

static kvf_status try_with(const sides *s, kvf_plan_options options, kvf_plan **plan) {
    options.struct_size = sizeof options;
    return kvf_plan_build(kvf_engine_shard(s->local, 0), s->remote, &options, plan);
}

static void a_group_of_both_is_filled_wherever_it_stands_in_either_model(void **state) {
    (void)state;
    sides s = open_sides(ours(), theirs());
    const uint32_t full[] = {0};
    kvf_plan *plan = NULL;
    assert_ok(try_with(&s, (kvf_plan_options){.groups = full, .group_count = 1}, &plan));
    assert_ok(kvf_plan_verify(plan));
    assert_true(visit(&s.here, "full", range(0, 4), false) > 0);
    move(plan, &s.here, s.there, 0);
    assert_int_equal(visit(&s.here, "full", range(0, 4), false), 0);
    assert_ptr_equal(kvf_plan_remote(plan), s.remote);
    kvf_plan_free(plan);
    close_sides(&s);
}

static void a_group_that_is_missing_there_is_refused_unless_it_is_left_out(void **state) {
    (void)state;
    sides s = open_sides(ours(), theirs());
    const uint32_t full[] = {0}, draft[] = {1}, none[] = {2};
    kvf_plan *plan = NULL;
    assert_fails(try_with(&s, (kvf_plan_options){0}, &plan), KVF_E_MISMATCH, "other",
                 "group draft is missing remotely");
    assert_fails(try_with(&s, (kvf_plan_options){.groups = draft, .group_count = 1}, &plan), KVF_E_MISMATCH,
                 "group draft is missing remotely");
    assert_fails(try_with(&s, (kvf_plan_options){.groups = none, .group_count = 1}, &plan), KVF_E_RANGE,
                 "groups[0] is 2; the model has 2");
    assert_fails(try_with(&s, (kvf_plan_options){.group_count = 1}, &plan), KVF_E_INVALID, "groups is NULL",
                 "group_count 1");
    /* The draft model's layer is not requested. */
    assert_ok(try_with(&s, (kvf_plan_options){.layers = {0, 4}}, &plan));
    kvf_plan_free(plan);
    assert_ok(try_with(&s, (kvf_plan_options){.groups = full, .group_count = 1}, &plan));
    kvf_request *request = request_of(plan);
    kvf_group_request wanted[2] = {{.end = 0}, {.end = 1}};
    assert_fails(kvf_request_set(request, wanted, 2), KVF_E_INVALID, "group draft", "leaves this group out");
    kvf_request_free(request);
    kvf_plan_free(plan);
    close_sides(&s);
}

/* The local side wants layer 5 of "full", which the remote model does not have. */
static void layers_that_are_missing_there_are_refused_where_they_are_asked_for(void **state) {
    (void)state;
    sides s = open_sides(theirs(), ours());
    const uint32_t full[] = {1};
    kvf_plan *plan = NULL;
    assert_fails(try_with(&s, (kvf_plan_options){.groups = full, .group_count = 1}, &plan), KVF_E_MISMATCH,
                 "full.layers 5 are missing remotely");
    assert_ok(try_with(&s, (kvf_plan_options){.groups = full, .group_count = 1, .layers = {0, 4}}, &plan));
    assert_ok(kvf_plan_verify(plan));
    move(plan, &s.here, s.there, 1);
    assert_int_equal(visit(&s.here, "full", range(0, 4), false), 0);
    assert_true(visit(&s.here, "full", range(5, 6), false) > 0);
    kvf_plan_free(plan);
    close_sides(&s);
}

static void other_types_are_refused_with_both(void **state) {
    (void)state;
    kvf_part_desc part = PART(.name = "k", .units = 4, .cell_elements = 4);
    const kvf_group_desc group = {.name = "full", .parts = &part, .part_count = 1};
    kvf_model *bf16 = one_group(4, group);
    part.dtype = KVF_DTYPE_F16;
    kvf_model *f16 = one_group(4, group);
    part.dtype = KVF_DTYPE_I8;
    kvf_model *i8 = one_group(4, group);
    kvf_plan *plan = NULL;
    sides s = open_sides(bf16, f16);
    assert_fails(try_with(&s, (kvf_plan_options){0}, &plan), KVF_E_UNSUPPORTED,
                 "full.k.dtype is \"bf16\" locally and \"f16\" remotely",
                 "types are converted only where both sides allow the conversion");
    (void)kvf_model_retain(bf16);
    close_sides(&s);
    s = open_sides(bf16, i8);
    assert_fails(try_with(&s, (kvf_plan_options){0}, &plan), KVF_E_MISMATCH,
                 "full.k.dtype is \"bf16\" locally and \"i8\" remotely");
    close_sides(&s);
}

/* K of the given type and V of bf16, with two heads each. */
static kvf_model *keys_of(kvf_dtype dtype) {
    static const uint32_t first[] = {0};
    const kvf_part_desc parts[] = {{.name = "k", .dtype = dtype, .units = 2, .cell_elements = 4},
                                   PART(.name = "v", .units = 2, .cell_elements = 4)};
    const kvf_group_desc group = {
        .name = "full", .layers = first, .layer_count = 1, .parts = parts, .part_count = 2};
    return model_of(1, &group, 1);
}

/* A rank with both heads of V and the given heads of K. */
static kvf_shard *rank_with_keys(const kvf_model *model, kvf_range keys) {
    const kvf_part_share parts[] = {{keys, 0, 1}, {{0, 2}, 0, 1}};
    const kvf_placement places[] = {PLACED(0, 0, 128, 16, 8), PLACED(0, 64, 128, 16, 8)};
    const uint64_t bytes = 1024;
    const kvf_group_shard_desc group = {
        .tokens_per_block = 4, .block_count = 8, .parts = parts, .placements = places};
    const kvf_shard_desc desc = {.struct_size = sizeof desc,
                                 .layers = {0, 1},
                                 .region_bytes = &bytes,
                                 .region_count = 1,
                                 .groups = &group};
    kvf_shard *shard = NULL;
    assert_ok(kvf_shard_create(model, &desc, &shard));
    return shard;
}

/* K has different types on the two sides: a rank with heads of K must convert them, and a rank without any need not. */
static void a_rank_without_cells_of_another_type_has_rules(void **state) {
    (void)state;
    kvf_model *ours = keys_of(KVF_DTYPE_BF16), *theirs = keys_of(KVF_DTYPE_F32);
    kvf_engine *remote = engine_of(theirs, ENGINE(.all = {.block_count = 8}));
    const kvf_plan_options options = {.struct_size = sizeof options,
                                      .convert =
                                          KVF_DTYPE_BIT(KVF_DTYPE_BF16) | KVF_DTYPE_BIT(KVF_DTYPE_F32)};
    for (uint32_t keys = 0; keys <= 2; keys++) {
        kvf_shard *local = rank_with_keys(ours, (kvf_range){0, keys});
        kvf_plan *plan = NULL;
        assert_ok(kvf_plan_build(local, remote, &options, &plan));
        assert_int_equal(kvf_plan_converts(plan), keys > 0);
        assert_int_equal(kvf_plan_rule_count(plan) > 0, keys == 0);
        if (keys == 0)
            assert_ok(kvf_plan_verify(plan));
        else
            assert_fails(kvf_plan_verify(plan), KVF_E_UNSUPPORTED, "full.k", "bf16", "f32");
        kvf_plan_free(plan);
        kvf_shard_free(local);
    }
    kvf_engine_free(remote);
    kvf_model_free(ours);
    kvf_model_free(theirs);
}

/* A plan between two models keeps the remote ranks in terms of its own model: twice as many ranks take twice that. */
static void the_layout_that_a_plan_keeps_counts_as_its_memory(void **state) {
    (void)state;
    kvf_model *local_model = ours(), *remote_model = theirs();
    kvf_engine *local = engine_of(local_model, ENGINE(.all = {.block_count = 8}));
    const uint32_t full = 0;
    const kvf_plan_options options = {.struct_size = sizeof options, .groups = &full, .group_count = 1};
    size_t bytes[3];
    for (uint32_t i = 0; i < COUNT_OF(bytes); i++) {
        kvf_engine *remote = engine_of(remote_model, ENGINE(.tp_size = 4u << i, .all = {.block_count = 8}));
        kvf_plan *plan = NULL;
        assert_ok(kvf_plan_build(kvf_engine_shard(local, 0), remote, &options, &plan));
        assert_int_equal(kvf_plan_source_count(plan), 4); /* there are four heads */
        bytes[i] = kvf_plan_memory_bytes(plan);
        kvf_plan_free(plan);
        kvf_engine_free(remote);
    }
    assert_in_range(bytes[1] - bytes[0], 4 * 1024, 4 * 4096);
    assert_in_range(bytes[2] - bytes[1], 2 * (bytes[1] - bytes[0]), 2 * (bytes[1] - bytes[0]));
    kvf_engine_free(local);
    kvf_model_free(local_model);
    kvf_model_free(remote_model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_without_cells_of_another_type_has_rules),
        cmocka_unit_test(a_group_of_both_is_filled_wherever_it_stands_in_either_model),
        cmocka_unit_test(a_group_that_is_missing_there_is_refused_unless_it_is_left_out),
        cmocka_unit_test(layers_that_are_missing_there_are_refused_where_they_are_asked_for),
        cmocka_unit_test(other_types_are_refused_with_both),
        cmocka_unit_test(the_layout_that_a_plan_keeps_counts_as_its_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
