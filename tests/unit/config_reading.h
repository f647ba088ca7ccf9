/*
 * For tests of configurations: a model is read, or refused with these words.
 */
#ifndef KVF_TESTS_CONFIG_READING_H
#define KVF_TESTS_CONFIG_READING_H

#include <string.h>

#include <kvferry/model.h>

/* Reads a model whose configuration may have fields that are not known. */
static inline kvf_model *read_noted(const char *json, const kvf_config_options *options) {
    kvf_model *model = NULL;
    if (kvf_model_from_config(json, strlen(json), options, &model) != KVF_OK)
        fail_msg("%s: %s", json, kvf_error_detail());
    return model;
}

/* Reads a model, all of whose fields are known. */
static inline kvf_model *read_with(const char *json, const kvf_config_options *options) {
    kvf_model *model = read_noted(json, options);
    for (uint32_t n = 0; kvf_model_note(model, n); n++)
        fail_msg("a needless note: %s", kvf_model_note(model, n));
    return model;
}

static inline void assert_failure(kvf_status got, kvf_status wanted, const char *words) {
    if (got != wanted || !strstr(kvf_error_detail(), words))
        fail_msg("wanted %s with \"%s\", got %s: %s", kvf_status_name(wanted), words, kvf_status_name(got),
                 kvf_error_detail());
}

static inline void assert_refused_with(const char *json, const kvf_config_options *options, kvf_status wanted,
                                       const char *words) {
    kvf_model *model = NULL;
    assert_failure(kvf_model_from_config(json, strlen(json), options, &model), wanted, words);
    assert_null(model);
}

static inline void assert_refused(const char *json, kvf_status wanted, const char *words) {
    assert_refused_with(json, NULL, wanted, words);
}

/* Checks a group of layers that keep K and V: its first layer, how many there are, and their heads. */
static inline void assert_kv_group(const kvf_model *model, uint32_t g, const char *name, uint32_t first_layer,
                                   uint32_t layer_count, uint32_t kv_heads, uint32_t head_dim) {
    const kvf_group_desc *group = kvf_model_group(model, g);
    assert_non_null(group);
    assert_string_equal(group->name, name);
    assert_int_equal(group->layers[0], first_layer);
    assert_int_equal(group->layer_count, layer_count);
    for (uint32_t p = 0; p < 2; p++) {
        assert_int_equal(group->parts[p].units, kv_heads);
        assert_int_equal(group->parts[p].cell_elements, head_dim);
    }
}

#endif
