/* Reads the fields of a case. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

struct memory_node {
    memory_node *next;
    max_align_t bytes[];
};

void *case_memory(vector_case *c, size_t count, size_t element_bytes) {
    memory_node *node = calloc(1, sizeof *node + count * element_bytes + 1);
    if (!node) {
        fputs("no memory\n", stderr);
        exit(2);
    }
    node->next = c->memory;
    c->memory = node;
    return node->bytes;
}

void case_release(vector_case *c) {
    while (c->memory) {
        memory_node *next = c->memory->next;
        free(c->memory);
        c->memory = next;
    }
}

static void malformed(vector_case *c, const char *key, const char *expected) {
    if (!c->malformed[0])
        snprintf(c->malformed, sizeof c->malformed, "field %s is not %s", key, expected);
}

bool has_field(json_object *object, const char *key) {
    json_object *value;
    return json_object_object_get_ex(object, key, &value) && value;
}

json_object *read_field(vector_case *c, json_object *object, const char *key) {
    json_object *value = NULL;
    if (!json_object_is_type(object, json_type_object) || !json_object_object_get_ex(object, key, &value))
        malformed(c, key, "there");
    return value;
}

static uint64_t number_of(vector_case *c, json_object *value, const char *key) {
    if (!json_object_is_type(value, json_type_int) || json_object_get_int64(value) < 0) {
        malformed(c, key, "a number from 0");
        return 0;
    }
    return json_object_get_uint64(value);
}

uint64_t read_u64(vector_case *c, json_object *object, const char *key) {
    return number_of(c, read_field(c, object, key), key);
}

static uint32_t narrow(vector_case *c, uint64_t number, const char *key) {
    if (number > UINT32_MAX)
        malformed(c, key, "a number below 2^32");
    return (uint32_t)number;
}

uint32_t read_u32(vector_case *c, json_object *object, const char *key) {
    return narrow(c, read_u64(c, object, key), key);
}

uint32_t read_u32_or(vector_case *c, json_object *object, const char *key, uint32_t otherwise) {
    return has_field(object, key) ? read_u32(c, object, key) : otherwise;
}

int64_t read_i64(vector_case *c, json_object *object, const char *key) {
    json_object *value = read_field(c, object, key);
    if (!json_object_is_type(value, json_type_int))
        malformed(c, key, "a whole number");
    return json_object_get_int64(value);
}

bool read_bool(vector_case *c, json_object *object, const char *key) {
    json_object *value = read_field(c, object, key);
    if (!json_object_is_type(value, json_type_boolean))
        malformed(c, key, "true or false");
    return json_object_get_boolean(value);
}

const char *read_text(vector_case *c, json_object *object, const char *key) {
    json_object *value = read_field(c, object, key);
    if (!json_object_is_type(value, json_type_string)) {
        malformed(c, key, "a text");
        return "";
    }
    return json_object_get_string(value);
}

size_t read_length(vector_case *c, json_object *array) {
    if (!json_object_is_type(array, json_type_array)) {
        malformed(c, "of a list", "a list");
        return 0;
    }
    return json_object_array_length(array);
}

kvf_ids read_ids(vector_case *c, json_object *array) {
    kvf_ids list = {.count = read_length(c, array)};
    list.at = case_memory(c, list.count, sizeof *list.at);
    for (size_t i = 0; i < list.count; i++)
        list.at[i] = number_of(c, json_object_array_get_idx(array, i), "in a list");
    return list;
}

kvf_block_lists read_lists(vector_case *c, json_object *array) {
    kvf_block_lists lists = {.count = read_length(c, array)};
    lists.groups = case_memory(c, lists.count, sizeof *lists.groups);
    for (size_t g = 0; g < lists.count; g++)
        lists.groups[g] = read_ids(c, json_object_array_get_idx(array, g));
    return lists;
}

/* Memory for a list of `count` entries; the case is malformed if the array has another length. */
static void *beside(vector_case *c, json_object *array, size_t *count, size_t element_bytes) {
    size_t given = read_length(c, array);
    void *list = case_memory(c, *count, element_bytes);
    if (given != *count)
        malformed(c, "of a list", "as long as the list beside it");
    if (given < *count)
        *count = given;
    return list;
}

uint32_t *read_u32s(vector_case *c, json_object *array, size_t count, uint32_t null_means) {
    uint32_t *list = beside(c, array, &count, sizeof *list);
    for (size_t i = 0; i < count; i++) {
        json_object *value = json_object_array_get_idx(array, i);
        list[i] = value ? narrow(c, number_of(c, value, "in a list"), "in a list") : null_means;
    }
    return list;
}

int32_t *read_i32s(vector_case *c, json_object *array, size_t count) {
    int32_t *list = beside(c, array, &count, sizeof *list);
    for (size_t i = 0; i < count; i++) {
        json_object *value = json_object_array_get_idx(array, i);
        if (!json_object_is_type(value, json_type_int))
            malformed(c, "in a list", "a whole number");
        list[i] = json_object_get_int(value);
    }
    return list;
}

bool *read_bools(vector_case *c, json_object *array, size_t count) {
    bool *list = beside(c, array, &count, sizeof *list);
    for (size_t i = 0; i < count; i++) {
        json_object *value = json_object_array_get_idx(array, i);
        if (!json_object_is_type(value, json_type_boolean))
            malformed(c, "in a list", "true or false");
        list[i] = json_object_get_boolean(value);
    }
    return list;
}

/* The index of a word in a list; 0, and the case is malformed, if the list lacks it. */
static unsigned word_index(vector_case *c, const char *word, const char *const *words, unsigned count) {
    for (unsigned i = 0; i < count; i++)
        if (strcmp(word, words[i]) == 0)
            return i;
    malformed(c, word, "a known word");
    return 0;
}

kvf_cache_kind *read_kinds(vector_case *c, json_object *array, size_t count) {
    static const char *const words[] = {"full", "swa", "mla", "ssm"};
    kvf_cache_kind *kinds = beside(c, array, &count, sizeof *kinds);
    for (size_t g = 0; g < count; g++) {
        const char *word = json_object_get_string(json_object_array_get_idx(array, g));
        kinds[g] = (kvf_cache_kind)word_index(c, word ? word : "", words, 4);
    }
    return kinds;
}

kvf_state_type read_state_type(vector_case *c, json_object *object) {
    static const char *const words[] = {"mamba1", "mamba2", "gdn"};
    return (kvf_state_type)word_index(c, read_text(c, object, "state_type"), words, 3);
}

kvf_state_model read_state_model(vector_case *c, kvf_state_type type, json_object *object) {
    if (type == KVF_STATE_GDN)
        return (kvf_state_model){.struct_size = sizeof(kvf_state_model),
                                 .type = type,
                                 .heads = read_u32(c, object, "num_v_heads"),
                                 .head_size = read_u32(c, object, "head_v_dim"),
                                 .key_heads = read_u32(c, object, "num_k_heads"),
                                 .key_head_size = read_u32(c, object, "head_k_dim"),
                                 .conv_kernel = read_u32(c, object, "conv_kernel_size"),
                                 .spec_steps = read_u32_or(c, object, "num_spec", 0)};
    bool has_heads = type == KVF_STATE_MAMBA2;
    return (kvf_state_model){.struct_size = sizeof(kvf_state_model),
                             .type = type,
                             .intermediate_size = read_u32(c, object, "intermediate_size"),
                             .groups = has_heads ? read_u32(c, object, "n_groups") : 0,
                             .heads = has_heads ? read_u32(c, object, "num_heads") : 0,
                             .head_size = has_heads ? read_u32(c, object, "head_dim") : 0,
                             .state_size = read_u32(c, object, "state_size"),
                             .conv_kernel = read_u32(c, object, "conv_kernel"),
                             .spec_steps = read_u32_or(c, object, "num_spec", 0)};
}

kvf_descriptor_table read_table(vector_case *c, json_object *array, size_t attention_count) {
    kvf_descriptor_table table = {.count = read_length(c, array)};
    table.at = case_memory(c, table.count, sizeof *table.at);
    table.attention_count = attention_count < table.count ? attention_count : table.count;
    for (size_t i = 0; i < table.count; i++) {
        kvf_ids numbers = read_ids(c, json_object_array_get_idx(array, i));
        if (numbers.count != 3) {
            malformed(c, "of descriptors", "a list of three");
            break;
        }
        table.at[i] = (kvf_descriptor){numbers.at[0], numbers.at[1], (uint32_t)numbers.at[2]};
    }
    return table;
}

kvf_topology_desc read_topology(vector_case *c, uint32_t tp_rank) {
    return (kvf_topology_desc){.struct_size = sizeof(kvf_topology_desc),
                               .engine_id = "local",
                               .tp_size = read_u32(c, c->in, "tp_size"),
                               .tp_rank = tp_rank,
                               .dcp_size = read_u32_or(c, c->in, "dcp_size", 1),
                               .block_size = 16,
                               .total_kv_heads = read_u32_or(c, c->in, "total_kv_heads", 1),
                               .is_mla = has_field(c->in, "is_mla") && read_bool(c, c->in, "is_mla"),
                               .dialect = c->is_seed ? KVF_DIALECT_PR_40731 : KVF_DIALECT_V0_32};
}

kvf_engine_transfer_info read_remote(vector_case *c) {
    return (kvf_engine_transfer_info){.struct_size = sizeof(kvf_engine_transfer_info),
                                      .tp_size = read_u32(c, c->in, "remote_tp_size"),
                                      .dcp_size = read_u32_or(c, c->in, "remote_dcp_size", 1),
                                      .block_size = 16};
}
