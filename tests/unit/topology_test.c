/* The named quantities of public connectors: engines, the shapes that they may have, and the traps that reviewers of
 * the public connector found. */
#include <kvferry/connector/descriptors.h>

#include "topology_shapes.h"

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
    /* Six heads on 8 and 16 ranks: local rank 1 and remote rank 2 have head 0, and remote rank 3 has head 1. */
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
    /* 16 tokens of 4 of 8 heads with 16 bytes each, K and V: 2048; with 4 ranks each keeps half as much. */
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
    good.block_bytes = 0; /* unknown: nothing to compare */
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
    /* One group of B and C is repeated on two ranks: the remote projections are not the local ones scaled. */
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

/* ---- texts */

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
        cmocka_unit_test(the_dialect_decides_what_a_completion_notice_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
