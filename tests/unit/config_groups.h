/*
 * For tests of configurations: the groups of a model are compared with those that it should have.
 */
#ifndef KVF_TESTS_CONFIG_GROUPS_H
#define KVF_TESTS_CONFIG_GROUPS_H

#include "config_reading.h"
#include "model/config.h"

/* A group that a model should have; its parts as text, each "name:dtype:units:rows x elements of a cell". */
typedef struct expected_group {
    const char *name;
    uint32_t layers, first_layer;
    uint32_t window_tokens, tokens_per_step;
    const char *parts;
} expected_group;

static void assert_groups(kvf_model *model, const expected_group *expected, uint32_t count) {
    assert_int_equal(kvf_model_group_count(model), count);
    for (uint32_t g = 0; g < count; g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        char parts[512] = "";
        size_t length = 0;
        for (uint32_t p = 0; p < group->part_count; p++) {
            const kvf_part_desc *part = &group->parts[p];
            length += (size_t)snprintf(parts + length, sizeof parts - length, "%s%s:%s:%u:%ux%u",
                                       p ? " " : "", part->name, kvf_dtype_name(part->dtype), part->units,
                                       part->rows_per_step, part->cell_elements);
            assert_true(length < sizeof parts);
        }
        assert_string_equal(group->name, expected[g].name);
        assert_string_equal(parts, expected[g].parts);
        assert_int_equal(group->layer_count, expected[g].layers);
        assert_int_equal(group->layers[0], expected[g].first_layer);
        assert_int_equal(group->window_tokens, expected[g].window_tokens);
        if (group->kind == KVF_GROUP_TOKENS)
            assert_int_equal(group->tokens_per_step, expected[g].tokens_per_step);
    }
    kvf_model_free(model);
}

#define ASSERT_GROUPS(model, expected) assert_groups(model, expected, sizeof(expected) / sizeof *(expected))

#endif
