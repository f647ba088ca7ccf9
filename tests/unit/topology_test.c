/* The field's named quantities: the traps that reviewers of the public connector found, and cell-by-cell
 * proofs that what is named moves the right cells. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <kvferry/connector/descriptors.h>

#include "base/base.h"

/* ---- small builders */

static kvf_topology *topology_of(const kvf_topology_desc *desc) {
    kvf_topology *topology = NULL;
    assert_int_equal(kvf_topology_create(desc, &topology), KVF_OK);
    return topology;
}

static kvf_topology_desc local_desc(uint32_t tp_size, uint32_t tp_rank, uint32_t heads) {
    return (kvf_topology_desc){.struct_size = sizeof(kvf_topology_desc),
                               .engine_id = "decode",
                               .tp_size = tp_size,
                               .tp_rank = tp_rank,
                               .block_size = 16,
                               .total_kv_heads = heads};
}

static kvf_topology *local_rank(uint32_t tp_size, uint32_t tp_rank, uint32_t heads) {
    kvf_topology_desc desc = local_desc(tp_size, tp_rank, heads);
    return topology_of(&desc);
}

static kvf_topology *hybrid_rank(uint32_t tp_size, uint32_t tp_rank, uint32_t heads, uint64_t block_bytes) {
    kvf_topology_desc desc = local_desc(tp_size, tp_rank, heads);
    desc.is_mamba = true;
    desc.block_bytes = block_bytes;
    return topology_of(&desc);
}

static kvf_engine_transfer_info remote_engine(uint32_t tp_size) {
    return (kvf_engine_transfer_info){
        .struct_size = sizeof(kvf_engine_transfer_info), .tp_size = tp_size, .block_size = 16};
}

static void assert_ids(const kvf_ids *list, size_t count, const uint64_t *expected) {
    assert_int_equal(list->count, count);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(list->at[i], expected[i]);
}

#define IDS(...)                                                                                             \
    (kvf_ids) {                                                                                              \
        .at = (uint64_t[]){__VA_ARGS__}, .count = sizeof((uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t)       \
    }

static const kvf_ids no_ids;

static void assert_refused(kvf_status status, kvf_status expected, kvf_refusal refusal) {
    assert_int_equal(status, expected);
    assert_int_equal(kvf_topology_refusal(), refusal);
    assert_string_not_equal(kvf_error_detail(), "");
}

/* ---- engines */

static void the_local_engine_is_never_registered_as_a_remote_one(void **state) {
    (void)state;
    kvf_topology *topology = local_rank(2, 0, 8);
    kvf_engine_transfer_info remote = remote_engine(4), out;
    assert_refused(kvf_topology_register(topology, "decode", &remote, NULL), KVF_E_EXISTS,
                   KVF_REFUSAL_REGISTER_SELF);
    assert_refused(kvf_topology_get(topology, "decode", &out), KVF_E_NOT_FOUND, KVF_REFUSAL_UNKNOWN_ENGINE);
    kvf_topology_free(topology);
}

static void a_second_registration_returns_the_facts_of_the_first(void **state) {
    (void)state;
    kvf_topology *topology = local_rank(2, 0, 8);
    kvf_engine_transfer_info first = remote_engine(4), second = remote_engine(8), stored;
    assert_int_equal(kvf_topology_register(topology, "prefill", &first, NULL), KVF_OK);
    assert_int_equal(kvf_topology_register(topology, "prefill", &second, &stored), KVF_OK);
    assert_int_equal(stored.tp_size, 4);
    kvf_topology_unregister(topology, "prefill");
    assert_int_equal(kvf_topology_register(topology, "prefill", &second, &stored), KVF_OK);
    assert_int_equal(stored.tp_size, 8);
    kvf_topology_free(topology);
}

static void facts_without_meaning_are_refused_and_not_stored(void **state) {
    (void)state;
    kvf_topology *topology = local_rank(2, 0, 8);
    kvf_engine_transfer_info no_ranks = remote_engine(0), no_tokens = remote_engine(2),
                             odd_shares = remote_engine(4);
    no_tokens.block_size = 0;
    odd_shares.dcp_size = 3;
    assert_int_equal(kvf_topology_register(topology, "a", &no_ranks, NULL), KVF_E_RANGE);
    assert_int_equal(kvf_topology_register(topology, "b", &no_tokens, NULL), KVF_E_INVALID);
    assert_int_equal(kvf_topology_register(topology, "c", &odd_shares, NULL), KVF_E_INVALID);
    assert_int_equal(kvf_topology_register(topology, "d", NULL, NULL), KVF_E_INVALID);
    assert_int_equal(kvf_topology_get(topology, "a", &no_ranks), KVF_E_NOT_FOUND);
    kvf_topology_free(topology);
    kvf_topology_desc desc = {.struct_size = sizeof desc, .engine_id = "x", .tp_size = 2, .tp_rank = 2};
    assert_int_equal(kvf_topology_create(&desc, &topology), KVF_E_RANGE);
}

/* ---- shapes that do not divide */

static void sizes_that_do_not_divide_are_not_expressible_and_never_floored(void **state) {
    (void)state;
    kvf_topology *topology = local_rank(4, 1, 8);
    kvf_engine_transfer_info six = remote_engine(6);
    int64_t ratio = 77;
    uint32_t blocks = 77;
    kvf_range heads = {7, 7};
    kvf_ids ranks = {NULL, 77};
    assert_refused(kvf_tp_ratio(topology, &six, &ratio), KVF_E_NOT_EXPRESSIBLE, KVF_REFUSAL_TP_NOT_DIVISIBLE);
    assert_refused(kvf_handshake_target_ranks(topology, &six, &ranks), KVF_E_NOT_EXPRESSIBLE,
                   KVF_REFUSAL_TP_NOT_DIVISIBLE);
    kvf_engine_transfer_info wide = remote_engine(2);
    wide.block_size = 24;
    assert_refused(kvf_block_size_ratio(topology, &wide, &blocks), KVF_E_NOT_EXPRESSIBLE,
                   KVF_REFUSAL_BLOCK_SIZE_NOT_DIVISIBLE);
    assert_refused(kvf_physical_head_range(4, 6, 0, &heads), KVF_E_NOT_EXPRESSIBLE,
                   KVF_REFUSAL_HEADS_NOT_DIVISIBLE);
    uint64_t states = 77;
    assert_refused(kvf_state_blocks(9, 2, &states), KVF_E_NOT_EXPRESSIBLE, KVF_REFUSAL_LENGTH_NOT_DIVISIBLE);
    /* Nothing was written. */
    assert_int_equal(ratio, 77);
    assert_int_equal(blocks, 77);
    assert_int_equal(heads.begin, 7);
    assert_int_equal(ranks.count, 77);
    assert_int_equal(states, 77);
    kvf_topology_free(topology);
}

static void pieces_that_lose_bytes_are_refused(void **state) {
    (void)state;
    kvf_topology *topology = local_rank(1, 0, 2);
    kvf_engine_transfer_info remote = remote_engine(2);
    kvf_descriptor odd = {4096, 5001, 0};
    kvf_descriptor_table table = {&odd, 1, 1}, split;
    assert_refused(kvf_split_descriptors(topology, &remote, &table, 0, NULL, &split), KVF_E_NOT_EXPRESSIBLE,
                   KVF_REFUSAL_LENGTH_NOT_DIVISIBLE);
    kvf_topology_free(topology);
}

static void heads_that_ranks_share_across_a_boundary_are_read_once(void **state) {
    (void)state;
    /* Six heads on 8 and 16 ranks: local rank 1 has head 0, remote rank 2 too, remote rank 3 has head 1. */
    kvf_topology *topology = hybrid_rank(8, 1, 6, 0);
    kvf_engine_transfer_info remote = remote_engine(16);
    kvf_ids sources;
    assert_int_equal(kvf_fa_source_ranks(topology, &remote, &sources), KVF_OK);
    assert_ids(&sources, 1, (uint64_t[]){2});
    kvf_ids_free(&sources);
    kvf_topology_free(topology);
}

static void a_hybrid_registers_only_engines_it_can_pair_with(void **state) {
    (void)state;
    /* 16 tokens of 4 of 8 heads, 16 bytes each and K and V: 2048; 4 ranks keep half as much. */
    kvf_topology *topology = hybrid_rank(2, 0, 8, 2048);
    kvf_engine_transfer_info good = remote_engine(4), out;
    good.block_bytes = 1024;
    kvf_engine_transfer_info three = good, long_blocks = good, odd_blocks = good, sharded = good;
    three.tp_size = 3;
    long_blocks.block_size = 32;
    odd_blocks.block_bytes = 1000;
    sharded.dcp_size = 2;
    assert_refused(kvf_topology_register(topology, "a", &three, NULL), KVF_E_NOT_EXPRESSIBLE,
                   KVF_REFUSAL_TP_NOT_DIVISIBLE);
    assert_refused(kvf_topology_register(topology, "a", &long_blocks, NULL), KVF_E_NOT_EXPRESSIBLE,
                   KVF_REFUSAL_BLOCK_SIZE_NOT_DIVISIBLE);
    assert_refused(kvf_topology_register(topology, "a", &odd_blocks, NULL), KVF_E_MISMATCH,
                   KVF_REFUSAL_BLOCK_LEN_MISMATCH);
    assert_refused(kvf_topology_register(topology, "a", &sharded, NULL), KVF_E_NOT_EXPRESSIBLE,
                   KVF_REFUSAL_DCP_NOT_LATENT);
    assert_int_equal(kvf_topology_get(topology, "a", &out), KVF_E_NOT_FOUND);
    assert_int_equal(kvf_topology_register(topology, "a", &good, NULL), KVF_OK);
    good.block_bytes = 0; /* not known: nothing to compare */
    assert_int_equal(kvf_topology_register(topology, "b", &good, NULL), KVF_OK);
    kvf_topology_free(topology);
}

static void a_dense_rank_registers_an_engine_that_a_check_refuses(void **state) {
    (void)state;
    kvf_topology *topology = local_rank(2, 0, 9);
    kvf_engine_transfer_info three = remote_engine(3), four = remote_engine(4);
    assert_int_equal(kvf_topology_register(topology, "a", &three, NULL), KVF_OK);
    assert_refused(kvf_topology_check(topology, &three), KVF_E_NOT_EXPRESSIBLE, KVF_REFUSAL_TP_NOT_DIVISIBLE);
    assert_refused(kvf_topology_check(topology, &four), KVF_E_NOT_EXPRESSIBLE,
                   KVF_REFUSAL_HEADS_NOT_DIVISIBLE);
    kvf_topology_free(topology);
}

static void an_engine_without_layers_is_refused_as_such(void **state) {
    (void)state;
    kvf_cache_memory none = {.struct_size = sizeof none, .num_blocks = 4};
    kvf_descriptor_table table;
    assert_refused(kvf_local_descriptors(&none, KVF_LAYOUT_PACKED, 1, &table), KVF_E_INVALID,
                   KVF_REFUSAL_NO_LAYERS);
    kvf_topology *topology = local_rank(2, 0, 8);
    kvf_engine_transfer_info remote = remote_engine(2);
    uint64_t base[] = {4096}, bytes[] = {64};
    kvf_cache_memory one = {.struct_size = sizeof one,
                            .region_base = base,
                            .region_block_bytes = bytes,
                            .region_count = 1,
                            .num_blocks = 4};
    kvf_remote_view view = {
        .struct_size = sizeof view, .layout = KVF_LAYOUT_PACKED, .local = &one, .remote = &none};
    assert_refused(kvf_remote_descriptors(topology, &remote, &view, &table), KVF_E_INVALID,
                   KVF_REFUSAL_NO_LAYERS);
    assert_non_null(strstr(kvf_error_detail(), "remote memory: region_count is 0"));
    kvf_topology_free(topology);
}

/* ---- attention and state */

static void attention_may_be_replicated_while_state_is_sharded(void **state) {
    (void)state;
    kvf_topology *topology = hybrid_rank(1, 0, 2, 0);
    kvf_engine_transfer_info remote = remote_engine(4);
    kvf_ids attention, sharded;
    bool skip = true;
    uint64_t slot = 77;
    assert_int_equal(kvf_fa_source_ranks(topology, &remote, &attention), KVF_OK);
    assert_int_equal(kvf_state_source_ranks(topology, &remote, &sharded), KVF_OK);
    assert_ids(&attention, 2, (uint64_t[]){0, 2});
    assert_ids(&sharded, 4, (uint64_t[]){0, 1, 2, 3});
    assert_int_equal(kvf_should_skip_fa(topology, &remote, 2, &skip), KVF_OK);
    assert_false(skip);
    assert_int_equal(kvf_should_skip_fa(topology, &remote, 3, &skip), KVF_OK);
    assert_true(skip);
    assert_int_equal(kvf_fa_head_slot(topology, &remote, 3, &slot), KVF_OK);
    assert_int_equal(slot, 1);
    kvf_ids_free(&attention);
    kvf_ids_free(&sharded);
    kvf_topology_free(topology);
}

static void a_dense_model_is_asked_nothing_about_state(void **state) {
    (void)state;
    kvf_topology *topology = local_rank(1, 0, 2);
    kvf_engine_transfer_info remote = remote_engine(4);
    kvf_ids ranks = {0};
    kvf_descriptor whole = {4096, 64, 0};
    kvf_descriptor_table table = {&whole, 1, 1}, split;
    kvf_ids ours[] = {IDS(1)};
    kvf_block_lists lists = {ours, 1}, a = {0}, b = {0};
    uint64_t number;
    bool flag;
    assert_refused(kvf_fa_source_ranks(topology, &remote, &ranks), KVF_E_INVALID, KVF_REFUSAL_NOT_HYBRID);
    assert_refused(kvf_state_source_ranks(topology, &remote, &ranks), KVF_E_INVALID, KVF_REFUSAL_NOT_HYBRID);
    assert_refused(kvf_all_source_ranks(topology, &remote, &ranks), KVF_E_INVALID, KVF_REFUSAL_NOT_HYBRID);
    assert_refused(kvf_fa_head_slot(topology, &remote, 0, &number), KVF_E_INVALID, KVF_REFUSAL_NOT_HYBRID);
    assert_refused(kvf_should_skip_fa(topology, &remote, 0, &flag), KVF_E_INVALID, KVF_REFUSAL_NOT_HYBRID);
    assert_refused(kvf_fa_rank_offset(topology, &remote, 64, &number), KVF_E_INVALID, KVF_REFUSAL_NOT_HYBRID);
    assert_refused(kvf_needs_split_handles(topology, &remote, &flag), KVF_E_INVALID, KVF_REFUSAL_NOT_HYBRID);
    assert_refused(kvf_fa_descriptor_bytes(topology, &remote, &number), KVF_E_INVALID,
                   KVF_REFUSAL_NOT_HYBRID);
    assert_refused(kvf_compute_split_handle_data(topology, &remote, &table, 0, &split), KVF_E_INVALID,
                   KVF_REFUSAL_NOT_HYBRID);
    assert_refused(kvf_filter_block_ids_for_rank(topology, &remote, (kvf_cache_kind[]){KVF_CACHE_FULL}, 0,
                                                 &lists, &lists, &a, &b),
                   KVF_E_INVALID, KVF_REFUSAL_NOT_HYBRID);
    assert_string_equal(kvf_refusal_name(KVF_REFUSAL_NOT_HYBRID), "not_hybrid");
    kvf_topology_free(topology);
}

static void assert_description(uint64_t local_bytes, uint64_t remote_bytes, const char *expected) {
    kvf_topology *topology = hybrid_rank(1, 0, 2, local_bytes);
    kvf_engine_transfer_info remote = remote_engine(4);
    remote.block_bytes = remote_bytes;
    char *text = NULL;
    assert_int_equal(kvf_topology_describe(topology, &remote, &text), KVF_OK);
    assert_non_null(strstr(text, expected));
    kvf_topology_free_text(text);
    kvf_topology_free(topology);
}

static void a_hybrid_is_described_where_block_lengths_are_not_known(void **state) {
    (void)state;
    assert_description(0, 0, "remote_block_len=0, fa_reads=2, mamba_reads=4");
    assert_description(0, 0, "fa_desc_bytes=0)");
    assert_description(8192, 0, "fa_desc_bytes=0)");
    assert_description(0, 4096, "remote_block_len=4096, fa_reads=2");
    assert_description(0, 4096, "fa_desc_bytes=0)");
    assert_description(8192, 4096, "fa_desc_bytes=2048)");
}

static void the_order_of_groups_does_not_change_what_each_is_read_from(void **state) {
    (void)state;
    static const kvf_cache_kind orders[2][3] = {{KVF_CACHE_SSM, KVF_CACHE_FULL, KVF_CACHE_SWA},
                                                {KVF_CACHE_FULL, KVF_CACHE_SWA, KVF_CACHE_SSM}};
    kvf_topology *topology = local_rank(2, 1, 2);
    kvf_engine_transfer_info remote = remote_engine(8);
    for (int order = 0; order < 2; order++) {
        kvf_tp_mapping mapping;
        assert_int_equal(kvf_tp_mapping_build(topology, &remote, orders[order], 3, &mapping), KVF_OK);
        for (int g = 0; g < 3; g++) {
            if (orders[order][g] == KVF_CACHE_SSM)
                assert_ids(&mapping.source_ranks[g], 4, (uint64_t[]){4, 5, 6, 7});
            else
                assert_ids(&mapping.source_ranks[g], 1, (uint64_t[]){4});
        }
        assert_ids(&mapping.all_source_ranks, 4, (uint64_t[]){4, 5, 6, 7});
        kvf_tp_mapping_free(&mapping);
    }
    kvf_topology_free(topology);
}

static void state_with_repeated_groups_is_refused(void **state) {
    (void)state;
    /* One B and C group repeated on two ranks: the remote projections are not ours scaled. */
    kvf_state_model model = {.struct_size = sizeof model,
                             .type = KVF_STATE_MAMBA2,
                             .intermediate_size = 64,
                             .groups = 1,
                             .heads = 8,
                             .head_size = 8,
                             .state_size = 4,
                             .conv_kernel = 4};
    kvf_state_shape shape;
    kvf_state_layout here, there;
    assert_int_equal(kvf_state_shape_of(&model, 1, &shape), KVF_OK);
    assert_int_equal(kvf_conv_split(KVF_STATE_MAMBA2, &shape, 2, 4, &here), KVF_OK);
    assert_int_equal(kvf_state_shape_of(&model, 2, &shape), KVF_OK);
    assert_int_equal(kvf_conv_split(KVF_STATE_MAMBA2, &shape, 2, 4, &there), KVF_OK);
    kvf_cache_memory memory = {.struct_size = sizeof memory,
                               .region_base = (uint64_t[]){1 << 20},
                               .region_block_bytes = (uint64_t[]){65536},
                               .region_count = 1,
                               .num_blocks = 2,
                               .state = &there};
    kvf_topology *topology = local_rank(1, 0, 2);
    kvf_engine_transfer_info remote = remote_engine(2);
    kvf_descriptor_table table;
    assert_refused(kvf_remote_state_descriptors(topology, &remote, &here, &memory, 0, &table),
                   KVF_E_NOT_EXPRESSIBLE, KVF_REFUSAL_LENGTH_NOT_DIVISIBLE);
    kvf_topology_free(topology);
}

/* ---- block lists */

static const kvf_cache_kind two_attention[] = {KVF_CACHE_FULL, KVF_CACHE_SWA};
static const kvf_cache_kind attention_and_state[] = {KVF_CACHE_FULL, KVF_CACHE_SSM};

static void a_cached_group_beside_a_partly_cached_one_reads_nothing(void **state) {
    (void)state;
    kvf_ids ours[] = {IDS(7), no_ids}, theirs[] = {IDS(1, 2), IDS(3, 4)};
    kvf_block_lists decode = {ours, 2}, prefill = {theirs, 2}, a, b;
    assert_int_equal(kvf_prefix_trim(two_attention, &decode, &prefill, 1, 1, &a, &b), KVF_OK);
    assert_ids(&a.groups[0], 1, (uint64_t[]){7});
    assert_ids(&b.groups[0], 1, (uint64_t[]){2});
    assert_int_equal(a.groups[1].count, 0);
    assert_int_equal(b.groups[1].count, 0);
    kvf_block_lists_free(&a);
    kvf_block_lists_free(&b);
}

static void more_decode_than_prefill_blocks_fail_that_call_and_change_nothing(void **state) {
    (void)state;
    kvf_ids ours[] = {IDS(7, 8)}, theirs[] = {IDS(1)};
    kvf_block_lists decode = {ours, 1}, prefill = {theirs, 1}, a = {0}, b = {0};
    assert_refused(kvf_prefix_trim(two_attention, &decode, &prefill, 1, 1, &a, &b), KVF_E_RANGE,
                   KVF_REFUSAL_DECODE_LONGER_THAN_PREFILL);
    assert_null(a.groups);
    assert_null(b.groups);
    assert_int_equal(decode.groups[0].count, 2);
}

static void a_state_is_paired_whole_and_from_the_end(void **state) {
    (void)state;
    kvf_ids ours[] = {IDS(7), IDS(9)}, theirs[] = {IDS(1, 2, 3), IDS(4, 5)};
    kvf_block_lists decode = {ours, 2}, prefill = {theirs, 2}, a, b;
    assert_int_equal(kvf_prefix_trim(attention_and_state, &decode, &prefill, 2, 2, &a, &b), KVF_OK);
    assert_ids(&b.groups[0], 1, (uint64_t[]){3});
    assert_ids(&b.groups[1], 1, (uint64_t[]){5});
    kvf_block_lists_free(&a);
    kvf_block_lists_free(&b);
}

static void the_slot_that_decode_has_beyond_those_of_prefill_stays(void **state) {
    (void)state;
    kvf_ids ours[] = {IDS(7), IDS(9, 10, 11)}, theirs[] = {IDS(1), IDS(4, 5)};
    kvf_block_lists decode = {ours, 2}, prefill = {theirs, 2}, a, b;
    assert_int_equal(kvf_prefix_trim(attention_and_state, &decode, &prefill, 2, 2, &a, &b), KVF_OK);
    assert_ids(&a.groups[1], 2, (uint64_t[]){9, 10});
    assert_ids(&b.groups[1], 2, (uint64_t[]){4, 5});
    kvf_block_lists_free(&a);
    kvf_block_lists_free(&b);
    ours[1] = IDS(9);
    theirs[1] = no_ids;
    assert_int_equal(kvf_prefix_trim(attention_and_state, &decode, &prefill, 2, 2, &a, &b), KVF_OK);
    assert_ids(&a.groups[1], 0, NULL);
    assert_ids(&b.groups[1], 0, NULL);
    kvf_block_lists_free(&a);
    kvf_block_lists_free(&b);
}

static void slots_beyond_those_of_prefill_stay(void **state) {
    (void)state;
    kvf_ids ours[] = {IDS(7), IDS(9, 10, 11, 12)}, theirs[] = {IDS(1), IDS(4, 5)};
    kvf_block_lists decode = {ours, 2}, prefill = {theirs, 2}, a, b;
    assert_int_equal(kvf_prefix_trim(attention_and_state, &decode, &prefill, 2, 2, &a, &b), KVF_OK);
    assert_ids(&a.groups[1], 2, (uint64_t[]){9, 10});
    assert_ids(&b.groups[1], 2, (uint64_t[]){4, 5});
    kvf_block_lists_free(&a);
    kvf_block_lists_free(&b);
}

static void states_that_prefill_has_not_have_no_partner(void **state) {
    (void)state;
    kvf_ids ours[] = {IDS(7), IDS(9, 10)}, theirs[] = {IDS(1), {NULL, 0}};
    kvf_block_lists decode = {ours, 2}, prefill = {theirs, 2}, a, b;
    assert_refused(kvf_prefix_trim(attention_and_state, &decode, &prefill, 2, 2, &a, &b), KVF_E_RANGE,
                   KVF_REFUSAL_UNPAIRABLE_STATE_SLOTS);
}

static void expansion_strides_by_the_remote_ratio_whatever_the_count(void **state) {
    (void)state;
    kvf_ids groups[] = {IDS(3, 5), IDS(6)};
    kvf_block_lists lists = {groups, 2}, out;
    assert_int_equal(kvf_logical_to_kernel(attention_and_state, &lists, 4, 2, &out), KVF_OK);
    assert_ids(&out.groups[0], 4, (uint64_t[]){12, 13, 20, 21});
    assert_ids(&out.groups[1], 1, (uint64_t[]){6});
    kvf_block_lists_free(&out);
    assert_int_equal(kvf_logical_to_kernel(attention_and_state, &lists, 2, 4, &out), KVF_E_RANGE);
    groups[0] = IDS(UINT64_MAX / 2);
    assert_int_equal(kvf_logical_to_kernel(attention_and_state, &lists, 4, 4, &out), KVF_E_OVERFLOW);
}

static void token_shares_pair_by_place_in_the_sequence(void **state) {
    (void)state;
    /* Rank 1 of 2 keeps blocks 1, 3, 5 ...; two are cached, so the list begins with block 5. */
    kvf_dcp_pair pair = {.struct_size = sizeof pair,
                         .local_dcp_size = 2,
                         .local_dcp_rank = 1,
                         .remote_dcp_size = 4,
                         .remote_rank = 1,
                         .num_computed = 2};
    kvf_ids local = IDS(50, 70, 90), remote = IDS(101, 105, 109), a, b;
    assert_int_equal(kvf_dcp_prefix_trim(&pair, &local, &remote, &a, &b), KVF_OK);
    assert_ids(&a, 2, (uint64_t[]){50, 90});
    assert_ids(&b, 2, (uint64_t[]){105, 109});
    kvf_ids_free(&a);
    kvf_ids_free(&b);
    remote.count = 2;
    assert_refused(kvf_dcp_prefix_trim(&pair, &local, &remote, &a, &b), KVF_E_RANGE,
                   KVF_REFUSAL_REMOTE_DOES_NOT_COVER);
}

/* ---- whole reads, cell by cell */

enum { CELLS_PER_HEAD = 16, BLOCKS = 8 };

/* A cache of one region, a byte a cell: [block][head][token]. */
typedef struct dense_cache {
    uint64_t base, block_bytes;
    kvf_cache_memory memory;
} dense_cache;

static void make_dense(dense_cache *cache, uint64_t base, kvf_range heads) {
    cache->base = base;
    cache->block_bytes = (uint64_t)(heads.end - heads.begin) * CELLS_PER_HEAD;
    cache->memory = (kvf_cache_memory){.struct_size = sizeof cache->memory,
                                       .region_base = &cache->base,
                                       .region_block_bytes = &cache->block_bytes,
                                       .region_count = 1,
                                       .num_blocks = BLOCKS};
}

static kvf_range share(uint32_t tp_size, uint32_t heads, uint32_t rank) {
    kvf_range range;
    assert_int_equal(kvf_physical_head_range(tp_size, heads, rank, &range), KVF_OK);
    return range;
}

/* Block, head of the model, and token of the cell at an address. */
typedef struct cell {
    uint64_t block, head, token;
} cell;

static cell cell_at(const dense_cache *cache, kvf_range heads, uint64_t address) {
    uint64_t offset = (address - cache->base) % cache->block_bytes;
    return (cell){(address - cache->base) / cache->block_bytes, heads.begin + offset / CELLS_PER_HEAD,
                  offset % CELLS_PER_HEAD};
}

/* Marks what a read fills; every cell has to come from the cell of the same head and token. */
static void check_copies(const kvf_read_spec *spec, const dense_cache *local, kvf_range local_heads,
                         const dense_cache *remote, kvf_range remote_heads, unsigned char *filled) {
    for (size_t i = 0; i < spec->local_ids.count; i++)
        for (uint64_t k = 0; k < spec->copies[i].bytes; k++) {
            cell to = cell_at(local, local_heads, spec->copies[i].local_address + k);
            cell from = cell_at(remote, remote_heads, spec->copies[i].remote_address + k);
            assert_int_equal(to.head, from.head);
            assert_int_equal(to.token, from.token);
            assert_int_equal(to.block + 1, from.block); /* the request below pairs block b with b + 1 */
            filled[spec->copies[i].local_address + k - local->base]++;
        }
}

static void check_pair_of_engines(uint32_t tp, uint32_t rank, uint32_t remote_tp, uint32_t heads,
                                  unsigned *answered) {
    dense_cache local, remote[8];
    kvf_cache_memory memory[8];
    kvf_range local_heads = share(tp, heads, rank);
    make_dense(&local, 1 << 20, local_heads);
    for (uint32_t r = 0; r < remote_tp; r++) {
        make_dense(&remote[r], (uint64_t)(r + 2) << 24, share(remote_tp, heads, r));
        memory[r] = remote[r].memory;
    }
    kvf_engine_transfer_plan_desc desc = {.struct_size = sizeof desc,
                                          .layout = KVF_LAYOUT_PACKED,
                                          .kinds = two_attention,
                                          .group_count = 1,
                                          .local = &local.memory,
                                          .remote_ranks = memory};
    kvf_topology *topology = local_rank(tp, rank, heads);
    kvf_engine_transfer_info engine = remote_engine(remote_tp);
    kvf_engine_transfer_plan *plan;
    kvf_status status = kvf_engine_transfer_plan_build(topology, &engine, &desc, &plan);
    kvf_topology_free(topology);
    if (status) {
        assert_int_equal(status, KVF_E_NOT_EXPRESSIBLE);
        return;
    }
    kvf_ids ours[] = {IDS(4, 0)}, theirs[] = {IDS(7, 5, 1)};
    kvf_block_lists decode = {ours, 1}, prefill = {theirs, 1};
    kvf_reads reads;
    unsigned char *filled = calloc(BLOCKS, local.block_bytes);
    assert_int_equal(kvf_engine_transfer_plan_read(plan, &decode, &prefill, "r", &reads), KVF_OK);
    for (size_t i = 0; i < reads.count; i++) {
        uint32_t source = (uint32_t)reads.specs[i].remote_rank;
        check_copies(&reads.specs[i], &local, local_heads, &remote[source], share(remote_tp, heads, source),
                     filled);
    }
    for (uint64_t at = 0; at < BLOCKS * local.block_bytes; at++) {
        uint64_t block = at / local.block_bytes;
        assert_int_equal(filled[at], block == 4 || block == 0);
    }
    free(filled);
    kvf_reads_free(&reads);
    kvf_engine_transfer_plan_free(plan);
    ++*answered;
}

static void every_wanted_cell_arrives_once_from_its_own_head_and_token(void **state) {
    (void)state;
    unsigned answered = 0;
    for (uint32_t tp = 1; tp <= 8; tp *= 2)
        for (uint32_t remote_tp = 1; remote_tp <= 8; remote_tp *= 2)
            for (uint32_t heads = 1; heads <= 16; heads *= 2)
                for (uint32_t rank = 0; rank < tp; rank++)
                    check_pair_of_engines(tp, rank, remote_tp, heads, &answered);
    assert_in_range(answered, 200, 400);
}

/* ---- plans of requests */

/* One decode rank that reads from one prefill rank, with a cache of 8 blocks a side. */
static kvf_engine_transfer_plan *simple_plan(dense_cache *local, dense_cache *remote,
                                             const kvf_cache_kind *kinds, size_t groups) {
    make_dense(local, 1 << 20, (kvf_range){0, 4});
    make_dense(remote, 1 << 24, (kvf_range){0, 4});
    kvf_engine_transfer_plan_desc desc = {.struct_size = sizeof desc,
                                          .layout = KVF_LAYOUT_PACKED,
                                          .kinds = kinds,
                                          .group_count = groups,
                                          .local = &local->memory,
                                          .remote_ranks = &remote->memory};
    kvf_topology *topology = local_rank(1, 0, 4);
    kvf_engine_transfer_info engine = remote_engine(1);
    kvf_engine_transfer_plan *plan = NULL;
    assert_int_equal(kvf_engine_transfer_plan_build(topology, &engine, &desc, &plan), KVF_OK);
    kvf_topology_free(topology);
    return plan;
}

static void a_bad_request_fails_alone_and_the_next_one_is_planned(void **state) {
    (void)state;
    dense_cache local, remote;
    kvf_engine_transfer_plan *plan = simple_plan(&local, &remote, two_attention, 1);
    kvf_ids ours[] = {IDS(1, 2)}, short_list[] = {IDS(1)}, beyond[] = {IDS(0, BLOCKS)}, good[] = {IDS(3, 4)};
    kvf_block_lists decode = {ours, 1}, prefill = {short_list, 1};
    kvf_reads reads = {0};
    assert_refused(kvf_engine_transfer_plan_read(plan, &decode, &prefill, "r", &reads), KVF_E_RANGE,
                   KVF_REFUSAL_DECODE_LONGER_THAN_PREFILL);
    prefill.groups = beyond;
    assert_int_equal(kvf_engine_transfer_plan_read(plan, &decode, &prefill, "r", &reads), KVF_E_RANGE);
    assert_null(reads.specs);
    prefill.groups = good;
    assert_int_equal(kvf_engine_transfer_plan_read(plan, &decode, &prefill, "r", &reads), KVF_OK);
    assert_int_equal(reads.count, 1);
    kvf_reads_free(&reads);
    kvf_engine_transfer_plan_free(plan);
}

static void a_request_with_nothing_to_fill_only_notifies(void **state) {
    (void)state;
    dense_cache local, remote;
    kvf_engine_transfer_plan *plan = simple_plan(&local, &remote, two_attention, 2);
    kvf_ids nothing[] = {no_ids, no_ids}, theirs[] = {IDS(1), IDS(2)};
    kvf_block_lists prefill = {theirs, 2};
    for (size_t groups = 0; groups <= 2; groups += 2) {
        kvf_block_lists decode = {nothing, groups};
        kvf_reads reads;
        assert_int_equal(kvf_engine_transfer_plan_read(plan, &decode, &prefill, "p-1", &reads), KVF_OK);
        assert_int_equal(reads.count, 0);
        assert_ids(&reads.notify_only, 1, (uint64_t[]){0});
        assert_string_equal(reads.notice, "p-1:1");
        kvf_reads_free(&reads);
    }
    kvf_engine_transfer_plan_free(plan);
}

static void block_lengths_that_no_whole_head_explains_are_a_mismatch(void **state) {
    (void)state;
    dense_cache local, remote;
    make_dense(&local, 1 << 20, (kvf_range){0, 4});
    make_dense(&remote, 1 << 24, (kvf_range){0, 4});
    remote.block_bytes += 16;
    kvf_engine_transfer_plan_desc desc = {.struct_size = sizeof desc,
                                          .layout = KVF_LAYOUT_PACKED,
                                          .kinds = two_attention,
                                          .group_count = 1,
                                          .local = &local.memory,
                                          .remote_ranks = &remote.memory};
    kvf_topology *topology = local_rank(1, 0, 4);
    kvf_engine_transfer_info engine = remote_engine(1);
    kvf_engine_transfer_plan *plan;
    assert_refused(kvf_engine_transfer_plan_build(topology, &engine, &desc, &plan), KVF_E_MISMATCH,
                   KVF_REFUSAL_BLOCK_LEN_MISMATCH);
    kvf_topology_free(topology);
}

static void a_latent_is_read_from_one_rank_and_every_rank_is_notified(void **state) {
    (void)state;
    kvf_topology_desc desc = {.struct_size = sizeof desc,
                              .engine_id = "decode",
                              .tp_size = 2,
                              .tp_rank = 1,
                              .block_size = 16,
                              .is_mla = true};
    static const kvf_cache_kind latent[] = {KVF_CACHE_MLA};
    dense_cache local, remote[4];
    kvf_cache_memory memory[4];
    make_dense(&local, 1 << 20, (kvf_range){0, 1});
    for (uint32_t r = 0; r < 4; r++) {
        make_dense(&remote[r], (uint64_t)(r + 2) << 24, (kvf_range){0, 1});
        memory[r] = remote[r].memory;
    }
    kvf_engine_transfer_plan_desc plan_desc = {.struct_size = sizeof plan_desc,
                                               .layout = KVF_LAYOUT_LATENT,
                                               .kinds = latent,
                                               .group_count = 1,
                                               .local = &local.memory,
                                               .remote_ranks = memory};
    kvf_topology *topology;
    kvf_engine_transfer_plan *plan;
    kvf_engine_transfer_info engine = remote_engine(4);
    assert_int_equal(kvf_topology_create(&desc, &topology), KVF_OK);
    assert_int_equal(kvf_engine_transfer_plan_build(topology, &engine, &plan_desc, &plan), KVF_OK);
    kvf_ids ours[] = {IDS(1)}, theirs[] = {IDS(2)};
    kvf_block_lists decode = {ours, 1}, prefill = {theirs, 1};
    kvf_reads reads;
    assert_int_equal(kvf_engine_transfer_plan_read(plan, &decode, &prefill, "r", &reads), KVF_OK);
    assert_int_equal(reads.count, 1);
    assert_int_equal(reads.specs[0].remote_rank, 2);
    assert_ids(&reads.notify_only, 1, (uint64_t[]){3});
    kvf_reads_free(&reads);
    kvf_engine_transfer_plan_free(plan);
    kvf_topology_free(topology);
}

/* ---- texts and memory */

static void the_dialect_decides_what_a_completion_notice_counts(void **state) {
    (void)state;
    kvf_topology_desc desc = {
        .struct_size = sizeof desc, .engine_id = "d", .tp_size = 4, .block_size = 16, .total_kv_heads = 8};
    kvf_engine_transfer_info remote = remote_engine(2);
    static const char *const expected[] = {"req:a:2", "req:a:4"};
    for (int dialect = 0; dialect < 2; dialect++) {
        kvf_topology *topology;
        char *text;
        desc.dialect = (kvf_dialect)dialect;
        assert_int_equal(kvf_topology_create(&desc, &topology), KVF_OK);
        assert_int_equal(kvf_completion_notice(topology, &remote, "req:a", &text), KVF_OK);
        assert_string_equal(text, expected[dialect]);
        kvf_topology_free_text(text);
        kvf_topology_free(topology);
    }
}

/* An allocator that fails from the n-th call on, and counts what is held. */
typedef struct scarce {
    long left, held;
} scarce;

static void *scarce_allocate(void *context, size_t bytes) {
    scarce *s = context;
    if (s->left-- <= 0)
        return NULL;
    s->held++;
    return malloc(bytes);
}

static void *scarce_resize(void *context, void *memory, size_t bytes) {
    scarce *s = context;
    if (s->left-- <= 0)
        return NULL;
    s->held += memory == NULL;
    return realloc(memory, bytes);
}

static void scarce_release(void *context, void *memory) {
    ((scarce *)context)->held -= memory != NULL;
    free(memory);
}

/* A hybrid's plan and one read of it; every step has memory to give back. */
static kvf_status plan_and_read(void) {
    kvf_state_layout state = {
        .projection_count = 1, .conv_bytes = 16, .ssm_bytes = 16, .projection_bytes = {16}};
    kvf_state_layout half = {.projection_count = 1, .conv_bytes = 8, .ssm_bytes = 8, .projection_bytes = {8}};
    uint64_t base[] = {1 << 20, 1 << 21}, here[] = {64, 64}, there[] = {32, 32};
    kvf_cache_memory local = {.struct_size = sizeof local,
                              .region_base = base,
                              .region_block_bytes = here,
                              .region_count = 2,
                              .num_blocks = 4,
                              .state = &state};
    kvf_cache_memory remote[2] = {local, local};
    for (int r = 0; r < 2; r++) {
        remote[r].region_block_bytes = there;
        remote[r].state = &half;
    }
    kvf_engine_transfer_plan_desc desc = {.struct_size = sizeof desc,
                                          .layout = KVF_LAYOUT_BLOCKS_FIRST,
                                          .kinds = attention_and_state,
                                          .group_count = 2,
                                          .local = &local,
                                          .remote_ranks = remote};
    kvf_topology_desc facts = {
        .struct_size = sizeof facts, .engine_id = "d", .tp_size = 1, .block_size = 16, .total_kv_heads = 2};
    kvf_engine_transfer_info engine = remote_engine(2);
    kvf_topology *topology = NULL;
    kvf_engine_transfer_plan *plan = NULL;
    kvf_reads reads = {0};
    kvf_ids ours[] = {IDS(1, 2), IDS(3)}, theirs[] = {IDS(0, 1, 2), IDS(3)};
    kvf_block_lists decode = {ours, 2}, prefill = {theirs, 2};
    kvf_status status = kvf_topology_create(&facts, &topology);
    if (!status)
        status = kvf_topology_register(topology, "p", &engine, NULL);
    if (!status)
        status = kvf_engine_transfer_plan_build(topology, &engine, &desc, &plan);
    if (!status)
        status = kvf_engine_transfer_plan_read(plan, &decode, &prefill, "r", &reads);
    kvf_reads_free(&reads);
    kvf_engine_transfer_plan_free(plan);
    kvf_topology_free(topology);
    return status;
}

static void every_step_that_finds_no_memory_says_so_and_leaks_nothing(void **state) {
    (void)state;
    scarce s = {0};
    kvf_allocator allocator = {scarce_allocate, scarce_resize, scarce_release, &s};
    kvf_status status = KVF_E_NOMEM;
    assert_int_equal(kvf_set_allocator(&allocator), KVF_OK);
    long calls = 0;
    for (; status && calls < 1000; calls++) {
        s.left = calls;
        status = plan_and_read();
        if (s.held || (status && status != KVF_E_NOMEM))
            break;
    }
    kvf_set_allocator(NULL);
    assert_int_equal(s.held, 0);
    assert_int_equal(status, KVF_OK);
    assert_in_range(calls, 20, 999);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_local_engine_is_never_registered_as_a_remote_one),
        cmocka_unit_test(a_hybrid_registers_only_engines_it_can_pair_with),
        cmocka_unit_test(a_dense_rank_registers_an_engine_that_a_check_refuses),
        cmocka_unit_test(an_engine_without_layers_is_refused_as_such),
        cmocka_unit_test(a_second_registration_returns_the_facts_of_the_first),
        cmocka_unit_test(facts_without_meaning_are_refused_and_not_stored),
        cmocka_unit_test(sizes_that_do_not_divide_are_not_expressible_and_never_floored),
        cmocka_unit_test(pieces_that_lose_bytes_are_refused),
        cmocka_unit_test(heads_that_ranks_share_across_a_boundary_are_read_once),
        cmocka_unit_test(attention_may_be_replicated_while_state_is_sharded),
        cmocka_unit_test(a_dense_model_is_asked_nothing_about_state),
        cmocka_unit_test(a_hybrid_is_described_where_block_lengths_are_not_known),
        cmocka_unit_test(the_order_of_groups_does_not_change_what_each_is_read_from),
        cmocka_unit_test(state_with_repeated_groups_is_refused),
        cmocka_unit_test(a_cached_group_beside_a_partly_cached_one_reads_nothing),
        cmocka_unit_test(more_decode_than_prefill_blocks_fail_that_call_and_change_nothing),
        cmocka_unit_test(a_state_is_paired_whole_and_from_the_end),
        cmocka_unit_test(the_slot_that_decode_has_beyond_those_of_prefill_stays),
        cmocka_unit_test(slots_beyond_those_of_prefill_stay),
        cmocka_unit_test(states_that_prefill_has_not_have_no_partner),
        cmocka_unit_test(expansion_strides_by_the_remote_ratio_whatever_the_count),
        cmocka_unit_test(token_shares_pair_by_place_in_the_sequence),
        cmocka_unit_test(every_wanted_cell_arrives_once_from_its_own_head_and_token),
        cmocka_unit_test(a_bad_request_fails_alone_and_the_next_one_is_planned),
        cmocka_unit_test(a_request_with_nothing_to_fill_only_notifies),
        cmocka_unit_test(block_lengths_that_no_whole_head_explains_are_a_mismatch),
        cmocka_unit_test(a_latent_is_read_from_one_rank_and_every_rank_is_notified),
        cmocka_unit_test(the_dialect_decides_what_a_completion_notice_counts),
        cmocka_unit_test(every_step_that_finds_no_memory_says_so_and_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
