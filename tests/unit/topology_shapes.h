/*
 * What the tests of the connector's functions share: engines described as public connectors describe them, and
 * assertions for refusals.
 */
#ifndef KVF_TEST_TOPOLOGY_SHAPES_H
#define KVF_TEST_TOPOLOGY_SHAPES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <kvferry/connector/descriptors.h>

#include "base/base.h"

static inline kvf_topology *topology_of(const kvf_topology_desc *desc) {
    kvf_topology *topology = NULL;
    assert_int_equal(kvf_topology_create(desc, &topology), KVF_OK);
    return topology;
}

static inline kvf_topology_desc local_desc(uint32_t tp_size, uint32_t tp_rank, uint32_t heads) {
    return (kvf_topology_desc){.struct_size = sizeof(kvf_topology_desc),
                               .engine_id = "decode",
                               .tp_size = tp_size,
                               .tp_rank = tp_rank,
                               .block_size = 16,
                               .total_kv_heads = heads};
}

static inline kvf_topology *local_rank(uint32_t tp_size, uint32_t tp_rank, uint32_t heads) {
    kvf_topology_desc desc = local_desc(tp_size, tp_rank, heads);
    return topology_of(&desc);
}

static inline kvf_topology *hybrid_rank(uint32_t tp_size, uint32_t tp_rank, uint32_t heads,
                                        uint64_t block_bytes) {
    kvf_topology_desc desc = local_desc(tp_size, tp_rank, heads);
    desc.is_mamba = true;
    desc.block_bytes = block_bytes;
    return topology_of(&desc);
}

static inline kvf_engine_transfer_info remote_engine(uint32_t tp_size) {
    return (kvf_engine_transfer_info){
        .struct_size = sizeof(kvf_engine_transfer_info), .tp_size = tp_size, .block_size = 16};
}

static inline void assert_ids(const kvf_ids *list, size_t count, const uint64_t *expected) {
    assert_int_equal(list->count, count);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(list->at[i], expected[i]);
}

#define IDS(...)                                                                                             \
    (kvf_ids) {                                                                                              \
        .at = (uint64_t[]){__VA_ARGS__}, .count = sizeof((uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t)       \
    }

static inline void assert_refused(kvf_status status, kvf_status expected, kvf_refusal refusal) {
    assert_int_equal(status, expected);
    assert_int_equal(kvf_topology_refusal(), refusal);
    assert_string_not_equal(kvf_error_detail(), "");
}

/** The heads that a rank holds. */
static inline kvf_range heads_of_rank(uint32_t tp_size, uint32_t heads, uint32_t rank) {
    kvf_range range;
    assert_int_equal(kvf_physical_head_range(tp_size, heads, rank, &range), KVF_OK);
    return range;
}

/** Block, head of the model, and token of a cell. */
typedef struct cell {
    uint64_t block, head, token;
} cell;

#endif
