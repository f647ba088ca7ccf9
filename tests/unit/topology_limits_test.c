/* The connector's functions at the limits of their arguments: each limit itself, one beyond it, and missing
 * arguments. */
#include <string.h>

#include "topology_shapes.h"

#include <kvferry/connector/state.h>
#include <kvferry/connector/step_requests.h>

#define LISTS(...)                                                                                           \
    (kvf_block_lists) {                                                                                      \
        .groups = (kvf_ids[]){__VA_ARGS__}, .count = sizeof((kvf_ids[]){__VA_ARGS__}) / sizeof(kvf_ids)      \
    }
#define NONE ((kvf_ids){0})

static void refused(kvf_status status, kvf_status expected, const char *words) {
    assert_int_equal(status, expected);
    if (!strstr(kvf_error_detail(), words))
        fail_msg("\"%s\" is not in \"%s\"", words, kvf_error_detail());
}

static const kvf_cache_kind full[] = {KVF_CACHE_FULL}, both[] = {KVF_CACHE_FULL, KVF_CACHE_SSM};

/* ---- engines --------------------------------------------------------------------------------- */

static kvf_status create(kvf_topology_desc desc) {
    kvf_topology *topology = NULL;
    kvf_status status = kvf_topology_create(&desc, &topology);
    assert_true((status == KVF_OK) == (topology != NULL));
    kvf_topology_free(topology);
    return status;
}

static void a_local_engine_has_sizes_that_fit_each_other(void **state) {
    (void)state;
    kvf_topology_desc desc = local_desc(65536, 65535, 8);
    assert_int_equal(create(desc), KVF_OK);
    desc.tp_size = 65537;
    refused(create(desc), KVF_E_RANGE, "local tp_size is 65537; allowed: 1 to 65536");
    desc.tp_size = 0;
    refused(create(desc), KVF_E_RANGE, "tp_size is 0");
    desc = local_desc(4, 4, 8);
    refused(create(desc), KVF_E_RANGE, "tp_rank is 4; allowed: 0 to 3");
    desc = local_desc(4, 0, 8);
    desc.dcp_size = 4;
    assert_int_equal(create(desc), KVF_OK);
    desc.dcp_size = 3;
    refused(create(desc), KVF_E_INVALID, "dcp_size is 3; it must divide tp_size 4");
    desc = local_desc(4, 0, 8);
    desc.block_size = 0;
    refused(create(desc), KVF_E_INVALID, "block_size is 0");
    desc = local_desc(4, 0, 0);
    refused(create(desc), KVF_E_INVALID, "total_kv_heads is 0");
    desc.is_mla = true;
    assert_int_equal(create(desc), KVF_OK);
    desc.dialect = KVF_DIALECT_PR_40731;
    assert_int_equal(create(desc), KVF_OK);
    desc.dialect = (kvf_dialect)2;
    refused(create(desc), KVF_E_RANGE, "dialect is 2");
    desc.engine_id = NULL;
    refused(create(desc), KVF_E_INVALID, "engine_id is NULL");
    refused(kvf_topology_create(NULL, NULL), KVF_E_INVALID, "desc is NULL");
    refused(kvf_topology_create(&desc, NULL), KVF_E_INVALID, "out is NULL");
    kvf_topology_free(NULL);
}

static void a_remote_engine_has_sizes_that_fit_ours(void **state) {
    (void)state;
    kvf_topology *topology = local_rank(4, 0, 8);
    kvf_engine_transfer_info remote = remote_engine(0), known;
    int64_t ratio;
    uint32_t blocks;
    refused(kvf_tp_ratio(topology, &remote, &ratio), KVF_E_RANGE, "remote tp_size is 0");
    refused(kvf_tp_ratio(topology, NULL, &ratio), KVF_E_INVALID, "remote engine is NULL");
    remote.tp_size = 6;
    refused(kvf_tp_ratio(topology, &remote, &ratio), KVF_E_NOT_EXPRESSIBLE,
            "local tp_size 4 and remote tp_size 6: neither divides the other");
    remote.tp_size = 4;
    assert_int_equal(kvf_tp_ratio(topology, &remote, &ratio), KVF_OK);
    assert_int_equal(ratio, 1);
    remote.tp_size = 8;
    assert_int_equal(kvf_tp_ratio(topology, &remote, &ratio), KVF_OK);
    assert_int_equal(ratio, -2);
    remote.tp_size = 2;
    assert_int_equal(kvf_tp_ratio(topology, &remote, &ratio), KVF_OK);
    assert_int_equal(ratio, 2);
    remote.block_size = 8;
    assert_int_equal(kvf_block_size_ratio(topology, &remote, &blocks), KVF_OK);
    assert_int_equal(blocks, 2);
    remote.block_size = 32;
    refused(kvf_block_size_ratio(topology, &remote, &blocks), KVF_E_NOT_EXPRESSIBLE,
            "local block_size 16 is not a multiple of remote block_size 32");
    remote.block_size = 0;
    refused(kvf_block_size_ratio(topology, &remote, &blocks), KVF_E_INVALID, "remote block_size is 0");
    refused(kvf_topology_check(NULL, &remote), KVF_E_INVALID, "topology is NULL");
    refused(kvf_topology_register(topology, NULL, &remote, NULL), KVF_E_INVALID, "engine_id is NULL");
    refused(kvf_topology_register(NULL, "p", &remote, NULL), KVF_E_INVALID, "topology is NULL");
    refused(kvf_topology_get(topology, NULL, &known), KVF_E_INVALID, "must be given");
    refused(kvf_topology_get(topology, "p", &known), KVF_E_NOT_FOUND, "\"p\" is not registered");
    kvf_topology_unregister(topology, "p");
    kvf_topology_unregister(topology, NULL);
    kvf_topology_unregister(NULL, "p");
    kvf_topology_free(topology);
}

/* More engines than their list has room for at first, removed from its middle, its front and its end. */
static void many_engines_are_known_and_forgotten_one_by_one(void **state) {
    (void)state;
    enum { ENGINES = 9 };
    kvf_topology *topology = local_rank(4, 0, 8);
    kvf_engine_transfer_info facts;
    char id[] = "p0";
    for (uint32_t i = 0; i < ENGINES; i++) {
        kvf_engine_transfer_info remote = remote_engine(4);
        remote.block_bytes = 100 + i;
        id[1] = (char)('0' + i);
        assert_int_equal(kvf_topology_register(topology, id, &remote, NULL), KVF_OK);
    }
    static const uint32_t order[] = {4, 0, 8, 7, 1, 2, 3, 5, 6};
    bool there[ENGINES] = {true, true, true, true, true, true, true, true, true};
    for (uint32_t n = 0; n < ENGINES; n++) {
        id[1] = (char)('0' + order[n]);
        kvf_topology_unregister(topology, id);
        there[order[n]] = false;
        for (uint32_t i = 0; i < ENGINES; i++) {
            id[1] = (char)('0' + i);
            kvf_status status = kvf_topology_get(topology, id, &facts);
            assert_int_equal(status, there[i] ? KVF_OK : KVF_E_NOT_FOUND);
            if (there[i])
                assert_int_equal(facts.block_bytes, 100 + i);
        }
    }
    kvf_topology_free(topology);
}

static void heads_are_of_ranks_that_there_are(void **state) {
    (void)state;
    kvf_range heads;
    assert_int_equal(kvf_physical_heads(8, 0), 1);
    assert_int_equal(kvf_physical_heads(8, 8), 1);
    assert_int_equal(kvf_physical_heads(8, 7), 1);
    assert_int_equal(kvf_physical_heads(8, 4), 2);
    refused(kvf_physical_head_range(0, 8, 0, &heads), KVF_E_INVALID, "tp_size is 0");
    refused(kvf_physical_head_range(4, 0, 0, &heads), KVF_E_INVALID, "total_kv_heads is 0");
    refused(kvf_physical_head_range(4, 8, 4, &heads), KVF_E_RANGE, "rank is 4; allowed: 0 to 3");
    refused(kvf_physical_head_range(3, 8, 0, &heads), KVF_E_NOT_EXPRESSIBLE,
            "8 do not divide over tp_size 3");
    assert_int_equal(kvf_physical_head_range(4, 8, 3, &heads), KVF_OK);
    assert_int_equal(heads.begin, 6);
    assert_int_equal(heads.end, 8);
    assert_int_equal(kvf_physical_head_range(8, 8, 7, &heads), KVF_OK);
    assert_int_equal(heads.begin, 7);
    assert_int_equal(heads.end, 8);
    assert_int_equal(kvf_physical_head_range(12, 8, 11, &heads), KVF_OK); /* ranks that share a head */
    assert_int_equal(heads.end, 8);
}

static void a_mapping_is_of_kinds_that_there_are(void **state) {
    (void)state;
    const kvf_cache_kind none[] = {(kvf_cache_kind)(KVF_CACHE_SSM + 1)};
    kvf_topology *topology = local_rank(4, 0, 8), *hybrid = hybrid_rank(2, 0, 8, 0);
    kvf_engine_transfer_info remote = remote_engine(4);
    kvf_tp_mapping mapping;
    kvf_block_lists lists = LISTS(IDS(1)), a, b;
    uint64_t bytes;
    char *text;
    refused(kvf_tp_mapping_build(topology, &remote, none, 1, &mapping), KVF_E_RANGE, "kind of group 0 is");
    refused(kvf_tp_mapping_build(topology, &remote, full, 0, &mapping), KVF_E_INVALID, "at least one group");
    refused(kvf_tp_mapping_build(NULL, &remote, full, 1, &mapping), KVF_E_INVALID, "must be given");
    refused(kvf_tp_mapping_build(topology, &remote, NULL, 1, &mapping), KVF_E_INVALID, "must be given");
    refused(kvf_tp_mapping_build(topology, &remote, full, 1, NULL), KVF_E_INVALID, "must be given");
    uint64_t slot;
    refused(kvf_tp_mapping_slot(NULL, 0, &slot), KVF_E_INVALID, "mapping is NULL");
    refused(kvf_tp_mapping_slot(&mapping, 0, NULL), KVF_E_INVALID, "out is NULL");
    refused(kvf_filter_block_ids_for_rank(hybrid, &remote, NULL, 0, &lists, &lists, &a, &b), KVF_E_INVALID,
            "no argument may be NULL");
    refused(kvf_fa_descriptor_bytes(hybrid, &remote, &bytes), KVF_E_INVALID, "remote block_bytes is 0");
    remote.block_bytes = 64;
    refused(kvf_fa_descriptor_bytes(hybrid, &remote, &bytes), KVF_E_INVALID, "local block_bytes is 0");
    refused(kvf_fa_descriptor_bytes(topology, &remote, &bytes), KVF_E_INVALID, "is_mamba is false");
    refused(kvf_fa_descriptor_bytes(NULL, &remote, &bytes), KVF_E_INVALID, "topology is NULL");
    refused(kvf_fa_rank_offset(topology, &remote, 1, &bytes), KVF_E_INVALID, "is_mamba is false");
    refused(kvf_topology_describe(NULL, &remote, &text), KVF_E_INVALID, "topology is NULL");
    refused(kvf_topology_describe(topology, &remote, NULL), KVF_E_INVALID, "text is NULL");
    refused(kvf_completion_notice(topology, &remote, NULL, &text), KVF_E_INVALID, "must be given");
    kvf_tp_mapping_free(NULL);
    kvf_topology_free(topology);
    kvf_topology_free(hybrid);
}

/* Local ranks 2 and 3 of 4 read from remote rank 1 of 2; rank 3 begins in the middle of its block. */
static void an_offset_that_does_not_fit_is_refused(void **state) {
    (void)state;
    kvf_topology *topology = hybrid_rank(4, 3, 8, 0);
    kvf_engine_transfer_info remote = remote_engine(2);
    uint64_t offset;
    assert_int_equal(kvf_fa_rank_offset(topology, &remote, 100, &offset), KVF_OK);
    assert_int_equal(offset, 100);
    assert_int_equal(kvf_fa_rank_offset(topology, &remote, UINT64_MAX, &offset), KVF_OK);
    remote.tp_size = 1;
    assert_int_equal(kvf_fa_rank_offset(topology, &remote, 100, &offset), KVF_OK);
    assert_int_equal(offset, 300);
    refused(kvf_fa_rank_offset(topology, &remote, UINT64_MAX / 3 + 1, &offset), KVF_E_OVERFLOW,
            "3 times it does not fit in 64 bits");
    kvf_topology_free(topology);
}

/* ---- block lists ----------------------------------------------------------------------------- */

static void one_list(kvf_status status, kvf_ids *list, size_t count, const uint64_t *expected) {
    assert_int_equal(status, KVF_OK);
    assert_ids(list, count, expected);
    kvf_ids_free(list);
}

static void a_block_becomes_as_many_as_its_ratio(void **state) {
    (void)state;
    kvf_ids out, blocks = IDS(3, 5), last = IDS(UINT64_MAX / 2);
    one_list(kvf_mapped_blocks(&blocks, 2, &out), &out, 4, (const uint64_t[]){6, 7, 10, 11});
    one_list(kvf_mapped_blocks(&blocks, 1, &out), &out, 2, (const uint64_t[]){3, 5});
    one_list(kvf_mapped_blocks(&NONE, 7, &out), &out, 0, NULL);
    refused(kvf_mapped_blocks(&blocks, 0, &out), KVF_E_INVALID, "ratio is 0");
    refused(kvf_mapped_blocks(NULL, 1, &out), KVF_E_INVALID, "must be given");
    refused(kvf_mapped_blocks(&blocks, 1, NULL), KVF_E_INVALID, "must be given");
    refused(kvf_mapped_blocks(&last, 2, &out), KVF_E_OVERFLOW, "does not fit in 64 bits");
    last.at[0]--;
    one_list(kvf_mapped_blocks(&last, 2, &out), &out, 2, (const uint64_t[]){UINT64_MAX - 3, UINT64_MAX - 2});
}

static void lists_are_given_for_as_many_groups_on_both_sides(void **state) {
    (void)state;
    kvf_block_lists one = LISTS(IDS(1)), two = LISTS(IDS(1), IDS(2)), none = {0}, out;
    refused(kvf_map_block_size(both, &one, &two, 2, &out), KVF_E_INVALID, "1 local groups and 2 remote ones");
    refused(kvf_map_block_size(both, &one, &one, 0, &out), KVF_E_INVALID, "ratio is 0");
    refused(kvf_map_block_size(NULL, &one, &one, 2, &out), KVF_E_INVALID, "no argument may be NULL");
    assert_int_equal(kvf_map_block_size(both, &none, &two, 2, &out), KVF_OK);
    assert_int_equal(out.count, 0);
    /* no more ids than the lists have */
    assert_int_equal(kvf_map_block_size(full, &one, &one, 2, &out), KVF_OK);
    assert_int_equal(out.count, 1);
    assert_ids(&out.groups[0], 1, (const uint64_t[]){2});
    kvf_block_lists_free(&out);
    refused(kvf_logical_to_kernel(full, &one, 2, 0, &out), KVF_E_RANGE, "count is 0");
    refused(kvf_logical_to_kernel(full, &one, 2, 3, &out), KVF_E_RANGE,
            "count is 3; allowed: 1 to the stride 2");
    assert_int_equal(kvf_logical_to_kernel(full, &one, 2, 2, &out), KVF_OK);
    assert_ids(&out.groups[0], 2, (const uint64_t[]){2, 3});
    kvf_block_lists_free(&out);
    refused(kvf_logical_to_kernel(full, NULL, 2, 2, &out), KVF_E_INVALID, "must be given");
    kvf_exchange_group group = {.kind = KVF_CACHE_FULL};
    refused(kvf_exchange_clip(&group, 1, 16, true, &two, &out), KVF_E_INVALID, "2 block lists for 1 groups");
    refused(kvf_exchange_clip(&group, 1, 0, true, &one, &out), KVF_E_INVALID, "block_size is 0");
    refused(kvf_exchange_clip(NULL, 1, 16, true, &one, &out), KVF_E_INVALID, "no argument may be NULL");
    refused(kvf_prefix_trim(both, &one, &two, 1, 1, &out, &out), KVF_E_INVALID,
            "1 decode lists and 2 prefill lists");
    refused(kvf_prefix_trim(both, &one, &one, 0, 1, &out, &out), KVF_E_INVALID, "decode_ppl is 0");
    refused(kvf_prefix_trim(both, &one, &one, 1, 0, &out, &out), KVF_E_INVALID, "prefill_ppl is 0");
    refused(kvf_prefix_trim(NULL, &one, &one, 1, 1, &out, &out), KVF_E_INVALID, "no argument may be NULL");
    refused(kvf_prefix_trim_by_region(&one, NULL, &out, &out), KVF_E_INVALID, "no argument may be NULL");
    kvf_block_lists_free(NULL);
    kvf_ids_free(NULL);
}

static void a_window_reaches_so_many_blocks(void **state) {
    (void)state;
    assert_int_equal(kvf_blocks_per_window(0, 16), 0);
    assert_int_equal(kvf_blocks_per_window(16, 0), 0);
    assert_int_equal(kvf_blocks_per_window(1, 16), 2);
    assert_int_equal(kvf_blocks_per_window(16, 16), 2);
    assert_int_equal(kvf_blocks_per_window(17, 16), 3);
    assert_int_equal(kvf_blocks_per_window(UINT32_MAX, 1), (uint64_t)UINT32_MAX + 1);
    const kvf_exchange_group window = {.kind = KVF_CACHE_SWA, .window_tokens = 16};
    kvf_block_lists lists = LISTS(IDS(1, 2, 3)), two = LISTS(IDS(1, 2)), out;
    assert_int_equal(kvf_exchange_clip(&window, 1, 16, true, &lists, &out), KVF_OK);
    assert_ids(&out.groups[0], 2, (const uint64_t[]){2, 3});
    kvf_block_lists_free(&out);
    assert_int_equal(kvf_exchange_clip(&window, 1, 16, true, &two, &out), KVF_OK);
    assert_ids(&out.groups[0], 2, (const uint64_t[]){1, 2});
    kvf_block_lists_free(&out);
}

static void one_block_bears_the_state(void **state) {
    (void)state;
    kvf_ids out, slots = IDS(4, 5, 6);
    one_list(kvf_ssm_state_clip(&slots, 0, &out), &out, 1, (const uint64_t[]){6});
    one_list(kvf_ssm_state_clip(&slots, 1, &out), &out, 1, (const uint64_t[]){5});
    one_list(kvf_ssm_state_clip(&slots, 2, &out), &out, 1, (const uint64_t[]){4});
    one_list(kvf_ssm_state_clip(&slots, 3, &out), &out, 1, (const uint64_t[]){4});
    one_list(kvf_ssm_state_clip(&NONE, 0, &out), &out, 0, NULL);
    refused(kvf_ssm_state_clip(NULL, 0, &out), KVF_E_INVALID, "must be given");
}

static void fronts_may_differ_by_what_padding_explains(void **state) {
    (void)state;
    kvf_block_lists decode = LISTS(IDS(1, 2, 3, 4, 5, 6), IDS(9)), near = LISTS(IDS(7), IDS(8)), ours, theirs;
    /* padding of up to 5 blocks explains 5 */
    assert_int_equal(kvf_prefix_trim(both, &decode, &near, 2, 3, &ours, &theirs), KVF_OK);
    assert_ids(&ours.groups[0], 1, (const uint64_t[]){1});
    assert_ids(&theirs.groups[0], 1, (const uint64_t[]){7});
    kvf_block_lists_free(&ours);
    kvf_block_lists_free(&theirs);
    refused(kvf_prefix_trim(both, &decode, &near, 1, 3, &ours, &theirs), KVF_E_RANGE,
            "group 0: 6 decode and 1 prefill blocks differ by more than 4");
    refused(kvf_prefix_trim(both, &decode, &near, 2, 2, &ours, &theirs), KVF_E_RANGE,
            "group 0: decode lists 6 blocks, but prefill has 1");
    kvf_block_lists slots = LISTS(IDS(1), IDS(8, 9)), empty = LISTS(IDS(1), NONE);
    refused(kvf_prefix_trim(both, &slots, &empty, 1, 1, &ours, &theirs), KVF_E_RANGE,
            "group 1: decode has 2 state slots, but prefill has none");
    slots.groups[1].count = 1;
    assert_int_equal(kvf_prefix_trim(both, &slots, &empty, 1, 1, &ours, &theirs), KVF_OK);
    assert_int_equal(ours.groups[1].count, 0);
    kvf_block_lists_free(&ours);
    kvf_block_lists_free(&theirs);
}

static void token_shares_are_of_ranks_that_there_are(void **state) {
    (void)state;
    kvf_ids local = IDS(1, 2), remote = IDS(5, 6), ours, theirs;
    kvf_dcp_pair pair = {
        .struct_size = sizeof pair, .local_dcp_size = 2, .local_dcp_rank = 1, .remote_dcp_size = 2};
    pair.remote_rank = 3; /* rank 3 has share 1 of 2 */
    assert_int_equal(kvf_dcp_prefix_trim(&pair, &local, &remote, &ours, &theirs), KVF_OK);
    assert_ids(&ours, 2, (const uint64_t[]){1, 2});
    assert_ids(&theirs, 2, (const uint64_t[]){5, 6});
    kvf_ids_free(&ours);
    kvf_ids_free(&theirs);
    pair.has_num_remote_blocks = true; /* blocks 1 and 3 of the sequence; the last does not exist */
    pair.num_remote_blocks = 3;
    assert_int_equal(kvf_dcp_prefix_trim(&pair, &local, &remote, &ours, &theirs), KVF_OK);
    assert_ids(&ours, 1, (const uint64_t[]){1});
    kvf_ids_free(&ours);
    kvf_ids_free(&theirs);
    pair.num_remote_blocks = 4;
    remote.count = 1;
    refused(kvf_dcp_prefix_trim(&pair, &local, &remote, &ours, &theirs), KVF_E_RANGE,
            "block 3 of the sequence is entry 1 of remote rank 1, which lists 1");
    pair.num_computed = UINT64_MAX / 2;
    refused(kvf_dcp_prefix_trim(&pair, &local, &remote, &ours, &theirs), KVF_E_OVERFLOW, "num_computed is");
    pair.local_dcp_rank = 2;
    refused(kvf_dcp_prefix_trim(&pair, &local, &remote, &ours, &theirs), KVF_E_RANGE, "local_dcp_rank is 2");
    pair.local_dcp_size = 0;
    refused(kvf_dcp_prefix_trim(&pair, &local, &remote, &ours, &theirs), KVF_E_INVALID,
            "local_dcp_size is 0");
    pair.local_dcp_size = 1;
    pair.remote_dcp_size = 0;
    refused(kvf_dcp_prefix_trim(&pair, &local, &remote, &ours, &theirs), KVF_E_INVALID,
            "remote_dcp_size is 0");
    refused(kvf_dcp_prefix_trim(NULL, &local, &remote, &ours, &theirs), KVF_E_INVALID,
            "no argument may be NULL");
}

/* ---- descriptor ids -------------------------------------------------------------------------- */

static void descriptor_ids_are_of_blocks_and_regions_that_there_are(void **state) {
    (void)state;
    kvf_id_space space = {.struct_size = sizeof space,
                          .attention_regions = 2,
                          .state_regions = 1,
                          .attention_blocks = 10,
                          .state_blocks = 4};
    kvf_block_lists lists = LISTS(IDS(9), IDS(3)), beyond = LISTS(IDS(10), NONE),
                    states = LISTS(NONE, IDS(4));
    kvf_ids out;
    uint64_t blocks;
    one_list(kvf_desc_ids(&space, both, &lists, &out), &out, 3, (const uint64_t[]){9, 19, 23});
    refused(kvf_desc_ids(&space, both, &beyond, &out), KVF_E_RANGE,
            "block id 10 in region 0; allowed: below 10");
    refused(kvf_desc_ids(&space, both, &states, &out), KVF_E_RANGE,
            "block id 4 in region 0; allowed: below 4");
    space.attention_blocks = UINT64_MAX / 2 + 1;
    refused(kvf_desc_ids(&space, both, &lists, &out), KVF_E_OVERFLOW, "do not fit in 64 bits");
    refused(kvf_desc_ids(NULL, both, &lists, &out), KVF_E_INVALID, "no argument may be NULL");
    assert_int_equal(kvf_state_blocks(8, 2, &blocks), KVF_OK);
    assert_int_equal(blocks, 4);
    refused(kvf_state_blocks(8, 0, &blocks), KVF_E_INVALID, "physical_per_logical is 0");
    refused(kvf_state_blocks(8, 2, NULL), KVF_E_INVALID, "out is NULL");
}

static void regions_are_of_groups_that_there_are(void **state) {
    (void)state;
    kvf_block_lists lists = LISTS(IDS(1), IDS(2)), out;
    const uint64_t blocks[] = {10, 5};
    const int32_t groups[] = {0, 1}, all[] = {KVF_ALL_GROUPS, KVF_ALL_GROUPS}, first[] = {0, 0},
                  low[] = {-2, 0}, high[] = {0, 2};
    kvf_ids ids;
    one_list(kvf_desc_ids_by_region(&lists, groups, blocks, 2, &ids), &ids, 2, (const uint64_t[]){1, 12});
    one_list(kvf_desc_ids_by_region(&lists, all, blocks, 2, &ids), &ids, 4, (const uint64_t[]){1, 11, 2, 12});
    one_list(kvf_desc_ids_by_region(&lists, first, blocks, 2, &ids), &ids, 4,
             (const uint64_t[]){1, 2, 11, 12});
    one_list(kvf_desc_ids_by_layer(&lists, groups, blocks, 2, &ids), &ids, 2, (const uint64_t[]){1, 12});
    refused(kvf_desc_ids_by_region(&lists, low, blocks, 2, &ids), KVF_E_RANGE, "group of region 0 is -2");
    refused(kvf_desc_ids_by_region(&lists, high, blocks, 2, &ids), KVF_E_RANGE, "group of region 1 is 2");
    refused(kvf_desc_ids_by_layer(&lists, all, blocks, 2, &ids), KVF_E_RANGE, "group of region 0 is -1");
    refused(kvf_desc_ids_by_region(&lists, (const int32_t[]){1}, blocks, 1, &ids), KVF_E_RANGE,
            "group 0 has 1 blocks, but no region belongs to it");
    refused(kvf_desc_ids_by_region(&lists, groups, (const uint64_t[]){UINT64_MAX, 1}, 2, &ids),
            KVF_E_OVERFLOW, "do not fit in 64 bits");
    refused(kvf_desc_ids_by_region(NULL, groups, blocks, 2, &ids), KVF_E_INVALID, "no argument may be NULL");
    assert_int_equal(kvf_block_ids_by_region(&lists, (const int32_t[]){1, KVF_ALL_GROUPS}, 2, &out), KVF_OK);
    assert_ids(&out.groups[0], 1, (const uint64_t[]){2});
    assert_ids(&out.groups[1], 2, (const uint64_t[]){1, 2});
    kvf_block_lists_free(&out);
    refused(kvf_block_ids_by_region(&lists, low, 2, &out), KVF_E_RANGE, "group of region 0 is -2");
    refused(kvf_block_ids_by_region(&lists, high, 2, &out), KVF_E_RANGE,
            "group of region 1 is 2; allowed: -1 and more, below 2");
    refused(kvf_block_ids_by_region(&lists, NULL, 2, &out), KVF_E_INVALID, "must be given");
}

/* ---- layouts --------------------------------------------------------------------------------- */

static void names_are_ordered_by_their_numbers(void **state) {
    (void)state;
    const char *names[] = {"layer.10.attn",
                           "layer.9.attn",
                           "layer.09.attn",
                           "10",
                           "9x",
                           "layer",
                           "",
                           "layer.2.mlp",
                           "layer.2.attn",
                           "2",
                           "a",
                           "99999999999999999999999",
                           "9"};
    static const char *const wanted[] = {"",
                                         "2",
                                         "9",
                                         "9x",
                                         "10",
                                         "99999999999999999999999",
                                         "a",
                                         "layer",
                                         "layer.2.attn",
                                         "layer.2.mlp",
                                         "layer.9.attn",
                                         "layer.09.attn",
                                         "layer.10.attn"};
    assert_int_equal(kvf_region_order(names, 13), KVF_OK);
    for (int i = 0; i < 13; i++)
        assert_string_equal(names[i], wanted[i]);
    assert_int_equal(kvf_region_order(names, 0), KVF_OK);
    refused(kvf_region_order(NULL, 1), KVF_E_INVALID, "names is NULL");
    const char *with_null[] = {"b", NULL, "a"};
    refused(kvf_region_order(with_null, 3), KVF_E_INVALID, "names[1] is NULL");
    assert_string_equal(with_null[0], "b");
}

static void a_layout_is_seen_by_its_probe(void **state) {
    (void)state;
    const uint64_t blocks_first[] = {1, 2, 16, 8, 64}, kv_first[] = {2, 1, 16, 8, 64},
                   latent[] = {1, 16, 576};
    kvf_layout_flags flags;
    static const struct {
        int probe; /* an index into the three probes */
        bool mla, mamba;
        size_t registered;
        bool first, cross, split;
    } cases[] = {
        {0, false, false, 0, true, false, false}, {1, false, false, 0, false, false, true},
        {1, false, false, 6, false, true, false}, {1, false, false, 5, false, false, true},
        {2, true, false, 0, false, false, false}, {2, false, false, 0, false, false, true},
        {1, false, true, 0, true, false, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const uint64_t *shapes[] = {blocks_first, kv_first, latent};
        size_t dimensions = cases[i].probe == 2 ? 3 : 5;
        assert_int_equal(kvf_detect_layout(shapes[cases[i].probe], dimensions, cases[i].mla, cases[i].mamba,
                                           cases[i].registered, &flags),
                         KVF_OK);
        assert_int_equal(flags.is_kv_layout_blocks_first, cases[i].first);
        assert_int_equal(flags.cross_layers_blocks, cases[i].cross);
        assert_int_equal(flags.split_k_and_v, cases[i].split);
    }
    refused(kvf_detect_layout(NULL, 5, false, false, 0, &flags), KVF_E_INVALID, "must be given");
    refused(kvf_detect_layout(latent, 0, false, false, 0, &flags), KVF_E_INVALID, "must be given");
    refused(kvf_detect_layout(latent, 3, false, false, 0, NULL), KVF_E_INVALID, "must be given");
    refused(kvf_detect_layout(kv_first, 5, false, true, 6, &flags), KVF_E_NOT_EXPRESSIBLE, "6 dimensions");
}

/* ---- states and steps ------------------------------------------------------------------------ */

static void a_state_has_a_shape_of_a_type_that_there_is(void **state) {
    (void)state;
    kvf_state_model model = {.struct_size = sizeof model,
                             .type = KVF_STATE_MAMBA1,
                             .intermediate_size = 8,
                             .state_size = 4,
                             .conv_kernel = 2};
    kvf_state_shape shape;
    kvf_state_layout layout;
    assert_int_equal(kvf_state_shape_of(&model, 2, &shape), KVF_OK);
    assert_int_equal(shape.conv[0], 4);
    assert_int_equal(shape.conv[1], 1);
    assert_int_equal(shape.temporal_dimensions, 2);
    assert_int_equal(kvf_conv_split(KVF_STATE_MAMBA1, &shape, 2, 4, &layout), KVF_OK);
    refused(kvf_conv_split(KVF_STATE_MAMBA2, &shape, 2, 4, &layout), KVF_E_NOT_EXPRESSIBLE,
            "the state has 2 dimensions; allowed: 3");
    refused(kvf_conv_split((kvf_state_type)3, &shape, 2, 4, &layout), KVF_E_UNSUPPORTED, "type is 3");
    refused(kvf_conv_split(KVF_STATE_MAMBA1, NULL, 2, 4, &layout), KVF_E_INVALID, "shape is NULL");
    refused(kvf_conv_split(KVF_STATE_MAMBA1, &shape, 2, 4, NULL), KVF_E_INVALID, "out is NULL");
    shape.conv[0]++;
    refused(kvf_conv_split(KVF_STATE_MAMBA1, &shape, 2, 4, &layout), KVF_E_NOT_EXPRESSIBLE,
            "allowed: the same");
    refused(kvf_state_shape_of(&model, 0, &shape), KVF_E_INVALID, "tp_size is 0");
    model.conv_kernel = 1;
    refused(kvf_state_shape_of(&model, 1, &shape), KVF_E_INVALID,
            "conv_kernel 1; allowed: at least 1 and at least 2");
    model.conv_kernel = 4;
    model.spec_steps = 2;
    assert_int_equal(kvf_state_shape_of(&model, 1, &shape), KVF_OK);
    assert_int_equal(shape.conv[1], 5);
    model.type = (kvf_state_type)3;
    refused(kvf_state_shape_of(&model, 1, &shape), KVF_E_RANGE, "type is 3; allowed: 0 to 2");
    refused(kvf_state_shape_of(NULL, 1, &shape), KVF_E_INVALID, "model is NULL");
    refused(kvf_state_shape_of(&model, 1, NULL), KVF_E_INVALID, "out is NULL");
}

/* A positive `tp_ratio`: the local conv state is one of so many parts of the remote state; negative: it has so many
 * parts, of which the remote state is one. */
static void projections_are_of_parts_that_there_are(void **state) {
    (void)state;
    const kvf_state_layout local = {.projection_count = 1,
                                    .projection_dims = {4},
                                    .projection_bytes = {8},
                                    .conv_steps = 1,
                                    .conv_bytes = 8};
    kvf_byte_run run;
    assert_int_equal(kvf_remote_projection_runs(&local, 2, 1, &run), KVF_OK);
    assert_int_equal(run.offset, 8);
    assert_int_equal(run.bytes, 8);
    refused(kvf_remote_projection_runs(&local, 2, 2, &run), KVF_E_RANGE,
            "local_offset is 2; allowed: 0 to 1");
    refused(kvf_remote_projection_runs(&local, 1, 1, &run), KVF_E_RANGE,
            "local_offset is 1; allowed: 0 to 0");
    assert_int_equal(kvf_remote_projection_runs(&local, -2, 7, &run),
                     KVF_OK); /* the offset means nothing here */
    assert_int_equal(run.offset, 0);
    assert_int_equal(run.bytes, 4);
    refused(kvf_remote_projection_runs(&local, 0, 0, &run), KVF_E_RANGE, "tp_ratio is 0");
    refused(kvf_remote_projection_runs(&local, (int64_t)UINT32_MAX + 1, 0, &run), KVF_E_RANGE, "tp_ratio is");
    refused(kvf_remote_projection_runs(&local, -(int64_t)UINT32_MAX, 0, &run), KVF_E_NOT_EXPRESSIBLE,
            "is not a whole number");
    refused(kvf_remote_projection_runs(&local, -(int64_t)UINT32_MAX - 1, 0, &run), KVF_E_RANGE,
            "tp_ratio is");
    refused(kvf_remote_projection_runs(NULL, 1, 0, &run), KVF_E_INVALID, "local is NULL");
    refused(kvf_remote_projection_runs(&local, 1, 0, NULL), KVF_E_INVALID, "out is NULL");
    uint64_t blocks;
    assert_int_equal(kvf_physical_blocks_per_logical(10, 6, 16, &blocks), KVF_OK);
    assert_int_equal(blocks, 1);
    assert_int_equal(kvf_physical_blocks_per_logical(10, 7, 16, &blocks), KVF_OK);
    assert_int_equal(blocks, 2);
    refused(kvf_physical_blocks_per_logical(10, 6, 0, &blocks), KVF_E_INVALID, "block_bytes is 0");
    refused(kvf_physical_blocks_per_logical(10, 6, 16, NULL), KVF_E_INVALID, "out is NULL");
    refused(kvf_physical_blocks_per_logical(UINT64_MAX, 1, 16, &blocks), KVF_E_OVERFLOW, "do not fit");
}

static void tables_are_of_the_same_regions_on_both_sides(void **state) {
    (void)state;
    kvf_topology *topology = local_rank(1, 0, 2);
    const kvf_engine_transfer_info remote = remote_engine(1);
    const uint64_t base[] = {4096, 8192}, bytes[] = {64, 64};
    const kvf_state_layout layout = {.projection_count = 1, .projection_dims = {4}, .projection_bytes = {8}};
    kvf_cache_memory ours = {.struct_size = sizeof ours,
                             .region_base = base,
                             .region_block_bytes = bytes,
                             .region_count = 2,
                             .num_blocks = 4};
    kvf_cache_memory theirs = ours;
    kvf_remote_view view = {.struct_size = sizeof view, .local = &ours, .remote = &theirs};
    kvf_descriptor_table table;
    assert_int_equal(kvf_remote_descriptors(topology, &remote, &view, &table), KVF_OK);
    assert_int_equal(table.count, 8);
    kvf_descriptor_table_free(&table);
    theirs.region_count = 1;
    refused(kvf_remote_descriptors(topology, &remote, &view, &table), KVF_E_INVALID,
            "2 local regions and 1 remote ones");
    theirs.region_count = 2;
    theirs.state = &layout;
    refused(kvf_remote_descriptors(topology, &remote, &view, &table), KVF_E_INVALID,
            "only one of the two sides");
    theirs.state = NULL;
    ours.state = &layout;
    refused(kvf_remote_descriptors(topology, &remote, &view, &table), KVF_E_INVALID,
            "only one of the two sides");
    ours.state = NULL;
    theirs.region_base = NULL;
    refused(kvf_remote_descriptors(topology, &remote, &view, &table), KVF_E_INVALID,
            "remote memory has 2 regions without base or block_bytes");
    view.local = NULL;
    refused(kvf_remote_descriptors(topology, &remote, &view, &table), KVF_E_INVALID, "local memory is NULL");
    refused(kvf_remote_descriptors(topology, &remote, NULL, &table), KVF_E_INVALID, "must be given");
    kvf_descriptor_table_free(NULL);
    kvf_topology_free(topology);
}

static void a_block_that_has_no_half_is_not_described(void **state) {
    (void)state;
    kvf_topology *topology = hybrid_rank(2, 0, 8, 63);
    kvf_engine_transfer_info remote = remote_engine(2);
    remote.block_bytes = 63;
    char *text;
    assert_refused(kvf_topology_describe(topology, &remote, &text), KVF_E_NOT_EXPRESSIBLE,
                   KVF_REFUSAL_LENGTH_NOT_DIVISIBLE);
    kvf_topology_free(topology);
}

static void requests_of_a_step_are_all_there(void **state) {
    (void)state;
    const kvf_step_request request = {.id = {"a", 1}}, nameless = {.id = {NULL, 2}};
    kvf_request_id id = {"a", 1};
    kvf_step_request items[2];
    refused(kvf_step_requests(&(kvf_step){.fresh_count = 1}, items), KVF_E_INVALID,
            "is NULL and has a count of 1");
    refused(kvf_step_requests(&(kvf_step){.cached_count = 1}, items), KVF_E_INVALID,
            "is NULL and has a count of 1");
    refused(kvf_step_requests(&(kvf_step){.resumed_count = 2}, items), KVF_E_INVALID,
            "resumed is NULL and has a count of 2");
    refused(kvf_step_requests(&(kvf_step){.fresh = &nameless, .fresh_count = 1}, items), KVF_E_INVALID,
            "the id is NULL and has 2 bytes");
    const kvf_step step = {.fresh = &request,
                           .fresh_count = 1,
                           .cached = &request,
                           .cached_count = 1,
                           .resumed = &id,
                           .resumed_count = 1};
    refused(kvf_step_requests(&step, NULL), KVF_E_INVALID, "step or items is NULL");
    assert_int_equal(kvf_step_requests(&step, items), KVF_OK);
    assert_false(items[0].resumed);
    assert_true(items[1].resumed);
}

static void refusals_have_names(void **state) {
    (void)state;
    assert_string_equal(kvf_refusal_name(KVF_REFUSAL_NONE), "none");
    assert_string_equal(kvf_refusal_name(KVF_REFUSAL_NO_LAYERS), "no_layers");
    assert_string_equal(kvf_refusal_name((kvf_refusal)(KVF_REFUSAL_NO_LAYERS + 1)), "none");
    assert_string_equal(kvf_refusal_name((kvf_refusal)-1), "none");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_local_engine_has_sizes_that_fit_each_other),
        cmocka_unit_test(a_remote_engine_has_sizes_that_fit_ours),
        cmocka_unit_test(many_engines_are_known_and_forgotten_one_by_one),
        cmocka_unit_test(heads_are_of_ranks_that_there_are),
        cmocka_unit_test(a_mapping_is_of_kinds_that_there_are),
        cmocka_unit_test(an_offset_that_does_not_fit_is_refused),
        cmocka_unit_test(a_block_becomes_as_many_as_its_ratio),
        cmocka_unit_test(lists_are_given_for_as_many_groups_on_both_sides),
        cmocka_unit_test(a_window_reaches_so_many_blocks),
        cmocka_unit_test(one_block_bears_the_state),
        cmocka_unit_test(fronts_may_differ_by_what_padding_explains),
        cmocka_unit_test(token_shares_are_of_ranks_that_there_are),
        cmocka_unit_test(descriptor_ids_are_of_blocks_and_regions_that_there_are),
        cmocka_unit_test(regions_are_of_groups_that_there_are),
        cmocka_unit_test(names_are_ordered_by_their_numbers),
        cmocka_unit_test(a_layout_is_seen_by_its_probe),
        cmocka_unit_test(a_state_has_a_shape_of_a_type_that_there_is),
        cmocka_unit_test(projections_are_of_parts_that_there_are),
        cmocka_unit_test(tables_are_of_the_same_regions_on_both_sides),
        cmocka_unit_test(a_block_that_has_no_half_is_not_described),
        cmocka_unit_test(requests_of_a_step_are_all_there),
        cmocka_unit_test(refusals_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
