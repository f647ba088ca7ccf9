/* The named quantities of public connectors: block lists, and cell-by-cell proofs that the named reads move the right
 * cells. */
#include <kvferry/connector/descriptors.h>

#include "topology_shapes.h"

static const kvf_ids no_ids;

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

/* A cache of one region with a byte per cell: [block][head][token]. */
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

static cell cell_at(const dense_cache *cache, kvf_range heads, uint64_t address) {
    uint64_t offset = (address - cache->base) % cache->block_bytes;
    return (cell){(address - cache->base) / cache->block_bytes, heads.begin + offset / CELLS_PER_HEAD,
                  offset % CELLS_PER_HEAD};
}

/* Counts how often a read fills each byte; every cell must come from the cell of the same head and token. */
static void check_copies(const kvf_read_spec *spec, const dense_cache *local, kvf_range local_heads,
                         const dense_cache *remote, kvf_range remote_heads, unsigned char *filled) {
    for (size_t i = 0; i < spec->local_ids.count; i++)
        for (uint64_t k = 0; k < spec->copies[i].bytes; k++) {
            cell to = cell_at(local, local_heads, spec->copies[i].local_address + k);
            cell from = cell_at(remote, remote_heads, spec->copies[i].remote_address + k);
            assert_int_equal(to.head, from.head);
            assert_int_equal(to.token, from.token);
            /* the request pairs local block b with remote block b + 1 */
            assert_int_equal(to.block + 1, from.block);
            filled[spec->copies[i].local_address + k - local->base]++;
        }
}

static void check_pair_of_engines(uint32_t tp, uint32_t rank, uint32_t remote_tp, uint32_t heads,
                                  unsigned *answered) {
    dense_cache local, remote[8];
    kvf_cache_memory memory[8];
    kvf_range local_heads = heads_of_rank(tp, heads, rank);
    make_dense(&local, 1 << 20, local_heads);
    for (uint32_t r = 0; r < remote_tp; r++) {
        make_dense(&remote[r], (uint64_t)(r + 2) << 24, heads_of_rank(remote_tp, heads, r));
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
        check_copies(&reads.specs[i], &local, local_heads, &remote[source],
                     heads_of_rank(remote_tp, heads, source), filled);
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

/* A plan of one decode rank that reads from one prefill rank, with a cache of 8 blocks on each side. */
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

/* ---- memory */

/* An allocator that fails from the n-th call on, and counts live allocations. */
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

/* A hybrid model's plan and one read of it; every step has memory to free. */
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
        cmocka_unit_test(every_step_that_finds_no_memory_says_so_and_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
