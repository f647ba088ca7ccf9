/*
 * Models made by hand: what is accepted, what is refused with which words, what is read back.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "model/model.h"

/* ---- a model to start from ------------------------------------------------------------------- */

/* Four layers: 0 and 2 with full attention, 1 and 3 with a state. Tests change one field and try again. */
typedef struct sample {
    uint32_t full_layers[2];
    uint32_t state_layers[2];
    kvf_part_desc kv[2];
    kvf_part_desc state[2];
    kvf_group_desc groups[2];
    kvf_model_desc desc;
} sample;

static void fill(sample *s) {
    *s = (sample){.full_layers = {0, 2}, .state_layers = {1, 3}};
    s->kv[0] = (kvf_part_desc){.name = "k", .dtype = KVF_DTYPE_BF16, .units = 8, .cell_elements = 128};
    s->kv[1] = (kvf_part_desc){.name = "v", .dtype = KVF_DTYPE_BF16, .units = 8, .cell_elements = 128};
    s->state[0] = (kvf_part_desc){.name = "conv.x",
                                  .dtype = KVF_DTYPE_BF16,
                                  .units = 64,
                                  .granule_units = 16,
                                  .cell_elements = 1,
                                  .rows_per_step = 3};
    s->state[1] = (kvf_part_desc){
        .name = "ssm", .dtype = KVF_DTYPE_F32, .units = 4, .cell_elements = 16 * 8, .tensor = 1};
    s->groups[0] = (kvf_group_desc){
        .name = "full", .layers = s->full_layers, .layer_count = 2, .parts = s->kv, .part_count = 2};
    s->groups[1] = (kvf_group_desc){.name = "ssm",
                                    .kind = KVF_GROUP_STATE,
                                    .layers = s->state_layers,
                                    .layer_count = 2,
                                    .parts = s->state,
                                    .part_count = 2};
    s->desc = (kvf_model_desc){.struct_size = sizeof s->desc,
                               .name = "sample",
                               .layer_count = 4,
                               .groups = s->groups,
                               .group_count = 2};
}

static kvf_model *made(const sample *s) {
    kvf_model *model = NULL;
    if (kvf_model_create(&s->desc, &model) != KVF_OK)
        fail_msg("%s", kvf_error_detail());
    return model;
}

static void assert_refused(const sample *s, kvf_status status, const char *words) {
    kvf_model *model = NULL;
    kvf_status got = kvf_model_create(&s->desc, &model);
    assert_null(model);
    if (got != status || !strstr(kvf_error_detail(), words))
        fail_msg("wanted %s with \"%s\", got %s: %s", kvf_status_name(status), words, kvf_status_name(got),
                 kvf_error_detail());
}

/* ---- what is accepted ------------------------------------------------------------------------ */

static void a_model_is_a_copy_of_its_description_with_the_defaults_filled_in(void **state) {
    (void)state;
    sample *s = malloc(sizeof *s);
    fill(s);
    char name[] = "k";
    s->kv[0].name = name;
    kvf_model *model = made(s);
    name[0] = '?';
    free(s);

    assert_string_equal(kvf_model_name(model), "sample");
    assert_int_equal(kvf_model_layer_count(model), 4);
    assert_int_equal(kvf_model_group_count(model), 2);
    const kvf_group_desc *full = kvf_model_group(model, 0);
    assert_string_equal(full->name, "full");
    assert_int_equal(full->layers[1], 2);
    assert_string_equal(full->parts[0].name, "k");
    assert_int_equal(full->parts[0].granule_units, 1);
    assert_int_equal(full->parts[0].rows_per_step, 1);
    const kvf_group_desc *ssm = kvf_model_group(model, 1);
    assert_int_equal(ssm->kind, KVF_GROUP_STATE);
    assert_int_equal(ssm->layers[0], 1);
    assert_int_equal(ssm->parts[0].granule_units, 16);
    assert_int_equal(ssm->parts[0].rows_per_step, 3);
    assert_string_equal(ssm->parts[1].name, "ssm");
    assert_null(kvf_model_group(model, 2));
    kvf_model_free(model);
}

static void a_model_without_a_name_is_called_model(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.desc.name = NULL;
    kvf_model *model = made(&s);
    assert_string_equal(kvf_model_name(model), "model");
    kvf_model_free(model);
}

static void bytes_of_cells_and_steps_follow_from_units_rows_and_elements(void **state) {
    (void)state;
    sample s;
    fill(&s);
    kvf_model *model = made(&s);
    const kvf_group_desc *full = kvf_model_group(model, 0);
    assert_int_equal(kvf_part_cell_bytes(&full->parts[0]), 256);
    assert_int_equal(kvf_group_step_bytes(full), 2 * 8 * 256);
    const kvf_group_desc *ssm = kvf_model_group(model, 1);
    assert_int_equal(kvf_group_step_bytes(ssm), 3 * 64 * 2 + 4 * 128 * 4);
    kvf_model_free(model);
}

static void two_elements_of_four_bits_share_a_byte(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.kv[0].dtype = KVF_DTYPE_F4_E2M1;
    kvf_model *model = made(&s);
    assert_int_equal(kvf_part_cell_bytes(&kvf_model_group(model, 0)->parts[0]), 64);
    kvf_model_free(model);
}

static void a_layer_may_be_in_two_groups(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.state_layers[0] = 0;
    kvf_model *model = made(&s);
    assert_int_equal(kvf_model_group(model, 0)->layers[0], kvf_model_group(model, 1)->layers[0]);
    kvf_model_free(model);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void missing_pointers_are_refused(void **state) {
    (void)state;
    sample s;
    fill(&s);
    kvf_model *model = NULL;
    assert_int_equal(kvf_model_create(NULL, &model), KVF_E_INVALID);
    assert_int_equal(kvf_model_create(&s.desc, NULL), KVF_E_INVALID);
    s.groups[1].parts = NULL;
    assert_refused(&s, KVF_E_INVALID, "group 1 (ssm): parts is NULL, but part_count is 2");
    fill(&s);
    s.groups[0].layers = NULL;
    assert_refused(&s, KVF_E_INVALID, "group 0 (full): layers is NULL");
    s.desc.groups = NULL;
    assert_refused(&s, KVF_E_INVALID, "model: groups is NULL, but group_count is 2");
    fill(&s);
    s.desc.struct_size = 0;
    assert_refused(&s, KVF_E_INVALID, "struct_size is 0");
}

static void counts_must_be_at_least_one_and_not_absurd(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.desc.layer_count = 0;
    assert_refused(&s, KVF_E_RANGE, "model: layer_count is 0; allowed: 1 to 65536");
    s.desc.layer_count = 65537;
    assert_refused(&s, KVF_E_RANGE, "model: layer_count is 65537; allowed: 1 to 65536");
    fill(&s);
    s.desc.group_count = 0;
    assert_refused(&s, KVF_E_RANGE, "model: group_count is 0");
    s.desc.group_count = UINT32_MAX;
    assert_refused(&s, KVF_E_RANGE, "model: group_count is 4294967295");
    fill(&s);
    s.groups[0].part_count = 0;
    assert_refused(&s, KVF_E_RANGE, "group 0 (full): part_count is 0; allowed: 1 to 64");
    fill(&s);
    s.groups[0].layer_count = 0;
    assert_refused(&s, KVF_E_RANGE, "group 0 (full): layer_count is 0; allowed: 1 to 4");
    s.groups[0].layer_count = 5;
    assert_refused(&s, KVF_E_RANGE, "group 0 (full): layer_count is 5; allowed: 1 to 4");
}

static void names_must_be_there_short_printable_and_unique(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.desc.name = "";
    assert_refused(&s, KVF_E_INVALID, "model: name is \"\"");
    fill(&s);
    s.groups[1].name = NULL;
    assert_refused(&s, KVF_E_INVALID, "group 1: name is NULL");
    s.groups[1].name = "full";
    assert_refused(&s, KVF_E_INVALID, "group 1: name is \"full\", which is also the name of group 0");
    fill(&s);
    s.kv[1].name = "k";
    assert_refused(&s, KVF_E_INVALID,
                   "group 0 (full): part 1: name is \"k\", which is also the name of part 0");
    s.kv[1].name = "v\n";
    assert_refused(&s, KVF_E_INVALID,
                   "group 0 (full): part 1: name has the control character 0x0a at byte 1");
    char longest[129];
    memset(longest, 'x', 128);
    longest[128] = '\0';
    s.kv[1].name = longest;
    assert_refused(&s, KVF_E_RANGE, "group 0 (full): part 1: name is longer than 127 bytes");
    longest[127] = '\0';
    kvf_model_free(made(&s));
}

static void layers_must_ascend_and_be_of_the_model(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.full_layers[1] = 4;
    assert_refused(&s, KVF_E_RANGE, "group 0 (full): layers[1] is 4; allowed: 0 to 3");
    s.full_layers[1] = 0;
    assert_refused(&s, KVF_E_INVALID, "group 0 (full): layers[1] is 0, after 0; layers must ascend");
}

static void kinds_rules_and_dtypes_that_do_not_exist_are_refused(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.groups[0].kind = (kvf_group_kind)7;
    assert_refused(&s, KVF_E_INVALID, "group 0 (full): kind is 7");
    fill(&s);
    s.kv[1].tp_rule = (kvf_tp_rule)9;
    assert_refused(&s, KVF_E_INVALID, "group 0 (full): part 1 (v): tp_rule is 9");
    fill(&s);
    s.kv[1].dtype = KVF_DTYPE_INVALID;
    assert_refused(&s, KVF_E_INVALID, "part 1 (v): dtype is 0");
    s.kv[1].dtype = (kvf_dtype)99;
    assert_refused(&s, KVF_E_INVALID, "part 1 (v): dtype is 99");
}

static void units_granules_and_elements_must_fit_each_other(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.kv[0].units = 0;
    assert_refused(&s, KVF_E_RANGE, "part 0 (k): units is 0; allowed: 1 and more");
    fill(&s);
    s.kv[0].cell_elements = 0;
    assert_refused(&s, KVF_E_RANGE, "part 0 (k): cell_elements is 0; allowed: 1 and more");
    fill(&s);
    s.state[0].granule_units = 65;
    assert_refused(&s, KVF_E_RANGE, "part 0 (conv.x): granule_units is 65; allowed: 1 to units, which is 64");
    s.state[0].granule_units = 24;
    assert_refused(&s, KVF_E_INVALID,
                   "part 0 (conv.x): granule_units is 24, which does not divide units, 64");
    fill(&s);
    s.kv[0].dtype = KVF_DTYPE_I4;
    s.kv[0].cell_elements = 3;
    assert_refused(&s, KVF_E_INVALID, "cell_elements is 3, which in i4 does not fill whole bytes");
}

static void tensors_are_numbered_in_order_without_gaps(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.state[0].tensor = 1;
    assert_refused(&s, KVF_E_RANGE, "group 1 (ssm): part 0 (conv.x): tensor is 1; allowed: 0 to 0");
    fill(&s);
    s.state[1].tensor = 2;
    assert_refused(&s, KVF_E_RANGE, "group 1 (ssm): part 1 (ssm): tensor is 2; allowed: 0 to 1");
}

static void windows_and_chunks_are_for_token_groups_and_not_both(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.groups[1].window_tokens = 8;
    assert_refused(&s, KVF_E_INVALID, "group 1 (ssm): window_tokens is 8; a state group has no window");
    fill(&s);
    s.groups[1].chunk_tokens = 8;
    assert_refused(&s, KVF_E_INVALID, "group 1 (ssm): chunk_tokens is 8; a state group has no chunks");
    fill(&s);
    s.groups[0].window_tokens = 8;
    s.groups[0].chunk_tokens = 4;
    assert_refused(&s, KVF_E_INVALID, "group 0 (full): window_tokens is 8 and chunk_tokens is 4");
}

static void only_tokens_without_windows_or_chunks_share_entries(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.groups[1].tokens_per_step = 2;
    assert_refused(&s, KVF_E_INVALID, "group 1 (ssm): tokens_per_step is 2; allowed: 1 in a group of states");
    fill(&s);
    s.groups[0].tokens_per_step = 4;
    s.groups[0].window_tokens = 8;
    assert_refused(&s, KVF_E_INVALID,
                   "group 0 (full): tokens_per_step is 4; allowed: 1 in a group with a window");
    fill(&s);
    s.groups[0].tokens_per_step = UINT32_MAX;
    s.groups[0].chunk_tokens = 8;
    assert_refused(&s, KVF_E_INVALID,
                   "group 0 (full): tokens_per_step is 4294967295; allowed: 1 in a group with chunks");
    fill(&s);
    s.groups[1].tokens_per_step = 1;
    s.groups[0].tokens_per_step = UINT32_MAX;
    kvf_model *model = NULL;
    assert_int_equal(kvf_model_create(&s.desc, &model), KVF_OK);
    assert_int_equal(kvf_model_group(model, 0)->tokens_per_step, UINT32_MAX);
    kvf_model_free(model);
}

static void sizes_beyond_64_bits_are_refused(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.kv[0].dtype = KVF_DTYPE_F64;
    s.kv[0].units = s.kv[0].cell_elements = s.kv[0].rows_per_step = UINT32_MAX;
    assert_refused(&s, KVF_E_OVERFLOW, "group 0 (full): part 0 (k): 4294967295 rows_per_step");
    s.kv[0].rows_per_step = 0; /* means 1 */
    assert_refused(&s, KVF_E_OVERFLOW, "group 0 (full): part 0 (k): 1 rows_per_step");

    /* One step of one layer just fits; two layers do not. */
    fill(&s);
    s.groups[0].part_count = 1;
    s.kv[0].dtype = KVF_DTYPE_U8;
    s.kv[0].units = 1u << 31;
    s.kv[0].cell_elements = 1u << 31;
    s.kv[0].rows_per_step = 2;
    assert_refused(&s, KVF_E_OVERFLOW, "group 0 (full): the bytes of one step of 2 layers");
    s.groups[0].layer_count = 1;
    kvf_model *model = made(&s);
    assert_true(kvf_group_step_bytes(kvf_model_group(model, 0)) == UINT64_C(1) << 63);
    kvf_model_free(model);
}

/* ---- owners ---------------------------------------------------------------------------------- */

static void *retain_and_free_many_times(void *argument) {
    for (uint32_t i = 0; i < 20000; i++)
        kvf_model_free(kvf_model_retain(argument));
    return NULL;
}

static void a_model_lives_until_its_last_owner_gives_it_up(void **state) {
    (void)state;
    sample s;
    fill(&s);
    kvf_model *model = made(&s);
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, retain_and_free_many_times, model), 0);
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    kvf_model *again = kvf_model_retain(model);
    assert_ptr_equal(again, model);
    kvf_model_free(model);
    assert_string_equal(kvf_model_name(again), "sample");
    kvf_model_free(again);
    kvf_model_free(NULL);
    assert_null(kvf_model_retain(NULL));
}

static void *no_memory(void *context, size_t bytes) {
    (void)context, (void)bytes;
    return NULL;
}
static void *no_resize(void *context, void *memory, size_t bytes) {
    (void)context, (void)memory, (void)bytes;
    return NULL;
}
static void no_release(void *context, void *memory) {
    (void)context, (void)memory;
}

static void without_memory_nothing_is_made(void **state) {
    (void)state;
    sample s;
    fill(&s);
    const kvf_allocator none = {no_memory, no_resize, no_release, NULL};
    kvf_model *model = NULL;
    assert_int_equal(kvf_set_allocator(&none), KVF_OK);
    kvf_status status = kvf_model_create(&s.desc, &model);
    assert_int_equal(kvf_set_allocator(NULL), KVF_OK);
    assert_int_equal(status, KVF_E_NOMEM);
    assert_null(model);
}

/* ---- what later queries need ----------------------------------------------------------------- */

static void full_attention_needs_every_token(void **state) {
    (void)state;
    const kvf_group_desc full = {.kind = KVF_GROUP_TOKENS};
    assert_int_equal(kvf_group_first_needed(&full, 0), 0);
    assert_int_equal(kvf_group_first_needed(&full, 1u << 20), 0);
}

static void a_window_needs_as_many_tokens_as_it_is_wide(void **state) {
    (void)state;
    const kvf_group_desc window = {.window_tokens = 128};
    assert_int_equal(kvf_group_first_needed(&window, 0), 0);
    assert_int_equal(kvf_group_first_needed(&window, 127), 0);
    assert_int_equal(kvf_group_first_needed(&window, 128), 0);
    assert_int_equal(kvf_group_first_needed(&window, 129), 1);
    assert_true(kvf_group_first_needed(&window, UINT64_MAX) == UINT64_MAX - 128);
}

static void tokens_make_whole_steps(void **state) {
    (void)state;
    const kvf_group_desc plain = {.kind = KVF_GROUP_TOKENS}, fours = {.tokens_per_step = 4},
                         states = {.kind = KVF_GROUP_STATE};
    assert_int_equal(kvf_group_step_count(&plain, 0), 0);
    assert_true(kvf_group_step_count(&plain, UINT64_MAX) == UINT64_MAX);
    assert_int_equal(kvf_group_step_count(&fours, 3), 0);
    assert_int_equal(kvf_group_step_count(&fours, 4), 1);
    assert_int_equal(kvf_group_step_count(&fours, 1003), 250);
    assert_int_equal(kvf_group_step_count(&states, 0), 1);
    assert_int_equal(kvf_group_step_count(&states, 1003), 1);
}

static void chunks_need_the_chunk_of_the_last_token(void **state) {
    (void)state;
    const kvf_group_desc chunked = {.chunk_tokens = 100};
    assert_int_equal(kvf_group_first_needed(&chunked, 0), 0);
    assert_int_equal(kvf_group_first_needed(&chunked, 100), 0);
    assert_int_equal(kvf_group_first_needed(&chunked, 101), 100);
    assert_int_equal(kvf_group_first_needed(&chunked, 200), 100);
    assert_int_equal(kvf_group_first_needed(&chunked, 201), 200);
}

static void a_state_is_needed_whole(void **state) {
    (void)state;
    const kvf_group_desc ssm = {.kind = KVF_GROUP_STATE};
    assert_int_equal(kvf_group_first_needed(&ssm, 1000), 0);
}

/* ---- comparing ------------------------------------------------------------------------------- */

static void assert_differs(const sample *changed, const char *words) {
    sample s;
    fill(&s);
    kvf_model *a = made(&s);
    kvf_model *b = made(changed);
    kvf_status status = kvf_model_compare(a, b);
    if (status != KVF_E_MISMATCH || !strstr(kvf_error_detail(), words))
        fail_msg("wanted \"%s\", got %s: %s", words, kvf_status_name(status), kvf_error_detail());
    kvf_model_free(a);
    kvf_model_free(b);
}

static void models_that_differ_only_in_what_engines_choose_are_the_same(void **state) {
    (void)state;
    sample s;
    fill(&s);
    kvf_model *a = made(&s);
    s.desc.name = "another";
    s.state[0].granule_units = 0;
    s.state[1].tensor = 0;
    s.kv[0].rows_per_step = 1; /* what 0 means */
    s.kv[1].tp_rule = KVF_TP_REPLICATE;
    kvf_model *b = made(&s);
    assert_int_equal(kvf_model_compare(a, b), KVF_OK);
    assert_int_equal(kvf_model_compare(a, a), KVF_OK);
    assert_int_equal(kvf_model_compare(a, NULL), KVF_E_INVALID);
    kvf_model_free(a);
    kvf_model_free(b);
}

static void comparing_names_the_first_field_that_differs_and_both_values(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.desc.layer_count = 5;
    assert_differs(&s, "model: layer_count is 4 on one side and 5 on the other");
    fill(&s);
    s.desc.group_count = 1;
    assert_differs(&s, "model: group_count is 2 on one side and 1 on the other");
    fill(&s);
    s.groups[0].name = "swa";
    assert_differs(&s, "group 0 (full): name is \"full\" on one side and \"swa\" on the other");
    fill(&s);
    s.groups[1].kind = KVF_GROUP_TOKENS;
    assert_differs(&s, "group 1 (ssm): kind is \"state\" on one side and \"tokens\" on the other");
    fill(&s);
    s.groups[0].window_tokens = 64;
    assert_differs(&s, "group 0 (full): window_tokens is 0 on one side and 64 on the other");
    fill(&s);
    s.groups[0].chunk_tokens = 64;
    assert_differs(&s, "group 0 (full): chunk_tokens is 0 on one side and 64 on the other");
    fill(&s);
    s.groups[0].tokens_per_step = 4;
    assert_differs(&s, "group 0 (full): tokens_per_step is 1 on one side and 4 on the other");
    fill(&s);
    s.groups[0].layer_count = 1;
    assert_differs(&s, "group 0 (full): layer_count is 2 on one side and 1 on the other");
    fill(&s);
    s.full_layers[1] = 3;
    assert_differs(&s, "group 0 (full): layers[1] is 2 on one side and 3 on the other");
    fill(&s);
    s.groups[0].part_count = 1;
    assert_differs(&s, "group 0 (full): part_count is 2 on one side and 1 on the other");
}

static void comparing_looks_into_every_part(void **state) {
    (void)state;
    sample s;
    fill(&s);
    s.kv[1].name = "values";
    assert_differs(&s, "part 1 (v): name is \"v\" on one side and \"values\" on the other");
    fill(&s);
    s.kv[1].dtype = KVF_DTYPE_F16;
    assert_differs(&s, "part 1 (v): dtype is \"bf16\" on one side and \"f16\" on the other");
    fill(&s);
    s.kv[1].units = 4;
    assert_differs(&s, "part 1 (v): units is 8 on one side and 4 on the other");
    fill(&s);
    s.kv[1].cell_elements = 64;
    assert_differs(&s, "part 1 (v): cell_elements is 128 on one side and 64 on the other");
    fill(&s);
    s.state[0].rows_per_step = 4;
    assert_differs(&s, "part 0 (conv.x): rows_per_step is 3 on one side and 4 on the other");
}

/* ---- dtypes ---------------------------------------------------------------------------------- */

static void every_dtype_has_a_size_and_is_found_by_its_name(void **state) {
    (void)state;
    static const struct {
        kvf_dtype dtype;
        uint32_t bits;
    } sizes[] = {{KVF_DTYPE_F64, 64},    {KVF_DTYPE_F32, 32},    {KVF_DTYPE_F16, 16}, {KVF_DTYPE_BF16, 16},
                 {KVF_DTYPE_F8_E4M3, 8}, {KVF_DTYPE_F8_E5M2, 8}, {KVF_DTYPE_I8, 8},   {KVF_DTYPE_U8, 8},
                 {KVF_DTYPE_F4_E2M1, 4}, {KVF_DTYPE_I4, 4}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        kvf_dtype found = KVF_DTYPE_INVALID;
        assert_int_equal(kvf_dtype_bits(sizes[i].dtype), sizes[i].bits);
        assert_int_equal(kvf_dtype_by_name(kvf_dtype_name(sizes[i].dtype), &found), KVF_OK);
        assert_int_equal(found, sizes[i].dtype);
    }
    assert_int_equal(kvf_dtype_bits(KVF_DTYPE_INVALID), 0);
    assert_int_equal(kvf_dtype_bits((kvf_dtype)77), 0);
    assert_string_equal(kvf_dtype_name((kvf_dtype)77), "invalid");
}

static void names_of_configuration_files_are_known(void **state) {
    (void)state;
    static const struct {
        const char *name;
        kvf_dtype dtype;
    } names[] = {{"bfloat16", KVF_DTYPE_BF16},     {"torch.bfloat16", KVF_DTYPE_BF16},
                 {"torch.float16", KVF_DTYPE_F16}, {"half", KVF_DTYPE_F16},
                 {"float32", KVF_DTYPE_F32},       {"fp8", KVF_DTYPE_F8_E4M3},
                 {"fp8_e4m3", KVF_DTYPE_F8_E4M3},  {"float8_e4m3fn", KVF_DTYPE_F8_E4M3},
                 {"fp8_e5m2", KVF_DTYPE_F8_E5M2},  {"torch.float8_e5m2", KVF_DTYPE_F8_E5M2},
                 {"int8", KVF_DTYPE_I8},           {"uint8", KVF_DTYPE_U8}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        kvf_dtype found = KVF_DTYPE_INVALID;
        assert_int_equal(kvf_dtype_by_name(names[i].name, &found), KVF_OK);
        assert_int_equal(found, names[i].dtype);
    }
}

static void a_name_that_is_no_dtype_is_not_found_and_changes_nothing(void **state) {
    (void)state;
    static const char *const wrong[] = {"", "invalid", "bf17", "torch.", "BFLOAT16", "float8_e4m3fnuz"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        kvf_dtype found = KVF_DTYPE_I4;
        assert_int_equal(kvf_dtype_by_name(wrong[i], &found), KVF_E_NOT_FOUND);
        assert_int_equal(found, KVF_DTYPE_I4);
    }
    kvf_dtype found;
    assert_int_equal(kvf_dtype_by_name(NULL, &found), KVF_E_INVALID);
    assert_int_equal(kvf_dtype_by_name("f32", NULL), KVF_E_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_model_is_a_copy_of_its_description_with_the_defaults_filled_in),
        cmocka_unit_test(a_model_without_a_name_is_called_model),
        cmocka_unit_test(bytes_of_cells_and_steps_follow_from_units_rows_and_elements),
        cmocka_unit_test(two_elements_of_four_bits_share_a_byte),
        cmocka_unit_test(a_layer_may_be_in_two_groups),
        cmocka_unit_test(missing_pointers_are_refused),
        cmocka_unit_test(counts_must_be_at_least_one_and_not_absurd),
        cmocka_unit_test(names_must_be_there_short_printable_and_unique),
        cmocka_unit_test(layers_must_ascend_and_be_of_the_model),
        cmocka_unit_test(kinds_rules_and_dtypes_that_do_not_exist_are_refused),
        cmocka_unit_test(units_granules_and_elements_must_fit_each_other),
        cmocka_unit_test(tensors_are_numbered_in_order_without_gaps),
        cmocka_unit_test(windows_and_chunks_are_for_token_groups_and_not_both),
        cmocka_unit_test(only_tokens_without_windows_or_chunks_share_entries),
        cmocka_unit_test(sizes_beyond_64_bits_are_refused),
        cmocka_unit_test(a_model_lives_until_its_last_owner_gives_it_up),
        cmocka_unit_test(without_memory_nothing_is_made),
        cmocka_unit_test(full_attention_needs_every_token),
        cmocka_unit_test(a_window_needs_as_many_tokens_as_it_is_wide),
        cmocka_unit_test(tokens_make_whole_steps),
        cmocka_unit_test(chunks_need_the_chunk_of_the_last_token),
        cmocka_unit_test(a_state_is_needed_whole),
        cmocka_unit_test(models_that_differ_only_in_what_engines_choose_are_the_same),
        cmocka_unit_test(comparing_names_the_first_field_that_differs_and_both_values),
        cmocka_unit_test(comparing_looks_into_every_part),
        cmocka_unit_test(every_dtype_has_a_size_and_is_found_by_its_name),
        cmocka_unit_test(names_of_configuration_files_are_known),
        cmocka_unit_test(a_name_that_is_no_dtype_is_not_found_and_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
