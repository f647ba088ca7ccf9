/*
 * The cover: which rank reads what from which rank, cut by cut. Cuts are written {source, group, part, layers, units,
 * tokens}, and sources are shown with their ranks.
 */
#include "shapes.h"

/* ---- comparing ------------------------------------------------------------------------------- */

/* One piece of a cover, with the rank instead of the source's index. */
typedef struct piece {
    uint32_t rank, group, part;
    kvf_range layers, units;
    kvf_token_share tokens;
} piece;

static piece seen(const kvf_plan *plan, uint32_t i) {
    const kvf_plan_cut *cut = kvf_plan_get_cut(plan, i);
    return (piece){
        kvf_plan_source_rank(plan, cut->source), cut->group, cut->part, cut->layers, cut->units, cut->tokens};
}

static bool same_piece(const piece *a, const piece *b) {
    return memcmp(a, b, sizeof *a) == 0; /* all fields are uint32_t */
}

static void print_piece(const char *whose, const piece *p) {
    print_error("  %s: rank %u, group %u, part %u, layers [%u, %u), units [%u, %u), tokens %u of %u by %u\n",
                whose, p->rank, p->group, p->part, p->layers.begin, p->layers.end, p->units.begin,
                p->units.end, p->tokens.index, p->tokens.count, p->tokens.width);
}

static void check_cuts(const kvf_plan *plan, const piece *wanted, uint32_t count, const char *file,
                       int line) {
    bool same = kvf_plan_cut_count(plan) == count;
    for (uint32_t i = 0; i < kvf_plan_cut_count(plan); i++) {
        piece got = seen(plan, i);
        same = same && same_piece(&got, &wanted[i]);
    }
    if (same && kvf_plan_verify(plan) == KVF_OK)
        return;
    for (uint32_t i = 0; i < count; i++)
        print_piece("wanted", &wanted[i]);
    for (uint32_t i = 0; i < kvf_plan_cut_count(plan); i++) {
        piece got = seen(plan, i);
        print_piece("got", &got);
    }
    print_error("proof: %s\n", kvf_plan_verify(plan) ? kvf_error_detail() : "holds");
    _fail(file, line);
}

/* Compares all cuts in order, and verifies the plan. */
#define assert_cuts(plan, ...)                                                                               \
    check_cuts((plan), (const piece[]){__VA_ARGS__}, COUNT_OF(((const piece[]){__VA_ARGS__})), __FILE__,     \
               __LINE__)

static void check_sources(const kvf_plan *plan, const uint32_t *ranks, uint32_t count, const char *file,
                          int line) {
    bool same = kvf_plan_source_count(plan) == count;
    for (uint32_t i = 0; i < count && same; i++)
        same = kvf_plan_source_rank(plan, i) == ranks[i];
    if (same)
        return;
    for (uint32_t i = 0; i < kvf_plan_source_count(plan); i++)
        print_error("source %u is rank %u\n", i, kvf_plan_source_rank(plan, i));
    _fail(file, line);
}

#define assert_sources(plan, ...)                                                                            \
    check_sources((plan), (const uint32_t[]){__VA_ARGS__}, COUNT_OF(((const uint32_t[]){__VA_ARGS__})),      \
                  __FILE__, __LINE__)

#define ALL_TOKENS                                                                                           \
    { 0, 1, 1 }

/* ---- heads ----------------------------------------------------------------------------------- */

/* One layer of K and V of 8 heads between engines of these TP sizes. */
static pair tp_pair(uint32_t heads, uint32_t local_tp, uint32_t remote_tp) {
    return pair_of(attention(1, heads, 4), ENGINE(.tp_size = local_tp, .all = {.block_count = 1}),
                   ENGINE(.tp_size = remote_tp, .all = {.block_count = 1}));
}

static void two_ranks_fill_one_where_there_are_twice_as_many(void **state) {
    (void)state;
    pair p = tp_pair(8, 2, 4);
    kvf_plan *plan = plan_of(&p, 1);

    assert_sources(plan, 2, 3);
    assert_cuts(plan, {2, 0, 0, {0, 1}, {4, 6}, ALL_TOKENS}, {3, 0, 0, {0, 1}, {6, 8}, ALL_TOKENS},
                {2, 0, 1, {0, 1}, {4, 6}, ALL_TOKENS}, {3, 0, 1, {0, 1}, {6, 8}, ALL_TOKENS});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void one_rank_fills_two_where_there_are_half_as_many(void **state) {
    (void)state;
    pair p = tp_pair(8, 4, 2);
    kvf_plan *plan = plan_of(&p, 1);

    assert_sources(plan, 0);
    assert_cuts(plan, {0, 0, 0, {0, 1}, {2, 4}, ALL_TOKENS}, {0, 0, 1, {0, 1}, {2, 4}, ALL_TOKENS});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void three_ranks_fill_two(void **state) {
    (void)state;
    /* Remote heads 0 1 | 2 3 4 | 5 6 7. */
    pair p = tp_pair(8, 2, 3);
    kvf_plan *first = plan_of(&p, 0), *second = plan_of(&p, 1);

    assert_cuts(first, {0, 0, 0, {0, 1}, {0, 2}, ALL_TOKENS}, {1, 0, 0, {0, 1}, {2, 4}, ALL_TOKENS},
                {0, 0, 1, {0, 1}, {0, 2}, ALL_TOKENS}, {1, 0, 1, {0, 1}, {2, 4}, ALL_TOKENS});
    assert_cuts(second, {1, 0, 0, {0, 1}, {4, 5}, ALL_TOKENS}, {2, 0, 0, {0, 1}, {5, 8}, ALL_TOKENS},
                {1, 0, 1, {0, 1}, {4, 5}, ALL_TOKENS}, {2, 0, 1, {0, 1}, {5, 8}, ALL_TOKENS});
    kvf_plan_free(first);
    kvf_plan_free(second);
    free_pair(&p);
}

static void two_ranks_fill_three(void **state) {
    (void)state;
    pair p = tp_pair(8, 3, 2);
    kvf_plan *plan = plan_of(&p, 1); /* heads 2 3 4 */

    assert_cuts(plan, {0, 0, 0, {0, 1}, {2, 4}, ALL_TOKENS}, {1, 0, 0, {0, 1}, {4, 5}, ALL_TOKENS},
                {0, 0, 1, {0, 1}, {2, 4}, ALL_TOKENS}, {1, 0, 1, {0, 1}, {4, 5}, ALL_TOKENS});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void parts_may_be_split_differently(void **state) {
    (void)state;
    /* K has 4 heads and one scale for all of them: remote rank 1 has heads 2 3 and a copy of the scale. */
    kvf_part_desc parts[] = {PART(.name = "k", .units = 4, .cell_elements = 4),
                             PART(.name = "scale", .units = 1, .cell_elements = 1)};
    kvf_model *model = one_group(1, (kvf_group_desc){.name = "full", .parts = parts, .part_count = 2});
    pair p =
        pair_of(model, ENGINE(.all = {.block_count = 1}), ENGINE(.tp_size = 2, .all = {.block_count = 1}));
    kvf_plan *plan = plan_of(&p, 0);

    assert_cuts(plan, {0, 0, 0, {0, 1}, {0, 2}, ALL_TOKENS}, {1, 0, 0, {0, 1}, {2, 4}, ALL_TOKENS},
                {0, 0, 1, {0, 1}, {0, 1}, ALL_TOKENS});
    kvf_plan_free(plan);
    free_pair(&p);
}

/* ---- replicas -------------------------------------------------------------------------------- */

/* Checks from which single remote rank each local rank reads all of its cells. */
static void check_holders(const pair *p, kvf_replica_choice choice, const uint32_t *wanted, uint32_t count,
                          const char *file, int line) {
    kvf_plan_options options = {.struct_size = sizeof options, .replicas = choice};
    for (uint32_t rank = 0; rank < count; rank++) {
        kvf_plan *plan = plan_with(p, rank, &options);
        uint32_t sources = kvf_plan_source_count(plan), from = kvf_plan_source_rank(plan, 0);
        kvf_plan_free(plan);
        if (sources != 1 || from != wanted[rank]) {
            print_error("local rank %u has %u sources, the first is rank %u\n", rank, sources, from);
            _fail(file, line);
        }
    }
}

#define assert_holders(pair, choice, ...)                                                                    \
    check_holders((pair), (choice), (const uint32_t[]){__VA_ARGS__},                                         \
                  COUNT_OF(((const uint32_t[]){__VA_ARGS__})), __FILE__, __LINE__)

static void ranks_that_want_the_same_head_take_different_holders(void **state) {
    (void)state;
    /* Remote: head 0 on ranks 0 to 3, head 1 on 4 to 7. Local: head 0 on ranks 0 and 1, head 1 on 2 and 3. */
    pair p = tp_pair(2, 4, 8);
    assert_holders(&p, KVF_REPLICA_SPREAD, 0, 2, 4, 6);
    free_pair(&p);
}

static void the_first_holder_can_be_asked_for(void **state) {
    (void)state;
    pair p = tp_pair(2, 4, 8);
    assert_holders(&p, KVF_REPLICA_FIRST, 0, 0, 4, 4);
    free_pair(&p);
}

static void more_readers_than_holders_take_them_in_equal_shares(void **state) {
    (void)state;
    pair p = tp_pair(1, 8, 2);
    assert_holders(&p, KVF_REPLICA_SPREAD, 0, 0, 0, 0, 1, 1, 1, 1);
    free_pair(&p);
}

static void every_consumer_of_a_latent_reads_a_producer_of_its_own(void **state) {
    (void)state;
    pair p = pair_of(latent(1), ENGINE(.tp_size = 4, .all = {.block_count = 1}),
                     ENGINE(.tp_size = 4, .all = {.block_count = 1}));
    assert_holders(&p, KVF_REPLICA_SPREAD, 0, 1, 2, 3);
    assert_holders(&p, KVF_REPLICA_FIRST, 0, 0, 0, 0);
    free_pair(&p);
}

static void the_consumers_of_a_latent_spread_over_more_producers(void **state) {
    (void)state;
    pair p = pair_of(latent(1), ENGINE(.tp_size = 3, .all = {.block_count = 1}),
                     ENGINE(.tp_size = 8, .all = {.block_count = 1}));
    assert_holders(&p, KVF_REPLICA_SPREAD, 0, 2, 5);
    free_pair(&p);
}

static void a_single_rank_reads_each_replicated_head_once(void **state) {
    (void)state;
    pair p = tp_pair(2, 1, 8);
    kvf_plan *plan = plan_of(&p, 0);

    assert_sources(plan, 0, 4);
    assert_cuts(plan, {0, 0, 0, {0, 1}, {0, 1}, ALL_TOKENS}, {4, 0, 0, {0, 1}, {1, 2}, ALL_TOKENS},
                {0, 0, 1, {0, 1}, {0, 1}, ALL_TOKENS}, {4, 0, 1, {0, 1}, {1, 2}, ALL_TOKENS});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void attention_may_come_from_other_ranks_than_state(void **state) {
    (void)state;
    /* The KV head is on both remote ranks and is read from one of them; each rank has half of the state. */
    pair p = pair_of(hybrid(1), ENGINE(.tp_size = 1, .all = {.block_count = 1}),
                     ENGINE(.tp_size = 2, .all = {.block_count = 1}));
    kvf_plan *plan = plan_of(&p, 0);

    assert_sources(plan, 0, 1);
    assert_cuts(plan, {0, 0, 0, {0, 2}, {0, 1}, ALL_TOKENS}, {0, 0, 1, {0, 2}, {0, 1}, ALL_TOKENS},
                {0, 1, 0, {0, 2}, {0, 2}, ALL_TOKENS}, {1, 1, 0, {0, 2}, {2, 4}, ALL_TOKENS},
                {0, 1, 1, {0, 2}, {0, 1}, ALL_TOKENS}, {1, 1, 1, {0, 2}, {1, 2}, ALL_TOKENS},
                {0, 1, 2, {0, 2}, {0, 1}, ALL_TOKENS}, {1, 1, 2, {0, 2}, {1, 2}, ALL_TOKENS},
                {0, 1, 3, {0, 2}, {0, 1}, ALL_TOKENS}, {1, 1, 3, {0, 2}, {1, 2}, ALL_TOKENS});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void replicated_attention_and_sharded_state_choose_their_sources_apart(void **state) {
    (void)state;
    /* Local rank 1 of 2 reads its attention from rank 2, the first of the second half of the 4 holders, and its state
     * from ranks 2 and 3. */
    pair p = pair_of(hybrid(1), ENGINE(.tp_size = 2, .all = {.block_count = 1}),
                     ENGINE(.tp_size = 4, .all = {.block_count = 1}));
    kvf_plan *plan = plan_of(&p, 1);

    assert_sources(plan, 2, 3);
    assert_cuts(plan, {2, 0, 0, {0, 2}, {0, 1}, ALL_TOKENS}, {2, 0, 1, {0, 2}, {0, 1}, ALL_TOKENS},
                {2, 1, 0, {0, 2}, {2, 3}, ALL_TOKENS}, {3, 1, 0, {0, 2}, {3, 4}, ALL_TOKENS},
                {2, 1, 1, {0, 2}, {1, 2}, ALL_TOKENS}, {2, 1, 2, {0, 2}, {1, 2}, ALL_TOKENS},
                {2, 1, 3, {0, 2}, {1, 2}, ALL_TOKENS});
    kvf_plan_free(plan);
    free_pair(&p);
}

/* ---- layers ---------------------------------------------------------------------------------- */

static void layers_are_cut_where_remote_stages_begin(void **state) {
    (void)state;
    /* Remote stages 0..2 and 3..5; the local stage has layers 2 and 3. */
    pair p = pair_of(latent(6), ENGINE(.pp_size = 3, .all = {.block_count = 1}),
                     ENGINE(.pp_size = 2, .all = {.block_count = 1}));
    kvf_plan *plan = plan_of(&p, 1);

    assert_sources(plan, 0, 1);
    assert_cuts(plan, {0, 0, 0, {2, 3}, {0, 1}, ALL_TOKENS}, {1, 0, 0, {3, 4}, {0, 1}, ALL_TOKENS});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void uneven_stages_meet_stages_of_other_sizes(void **state) {
    (void)state;
    /* Remote 0 | 1..4 | 5; local 0..3 | 4..5. */
    const uint32_t local[] = {4, 2}, remote[] = {1, 4, 1};
    pair p = pair_of(latent(6), ENGINE(.pp_size = 2, .pp_layers = local, .all = {.block_count = 1}),
                     ENGINE(.pp_size = 3, .pp_layers = remote, .all = {.block_count = 1}));
    kvf_plan *first = plan_of(&p, 0), *second = plan_of(&p, 1);

    assert_cuts(first, {0, 0, 0, {0, 1}, {0, 1}, ALL_TOKENS}, {1, 0, 0, {1, 4}, {0, 1}, ALL_TOKENS});
    assert_cuts(second, {1, 0, 0, {4, 5}, {0, 1}, ALL_TOKENS}, {2, 0, 0, {5, 6}, {0, 1}, ALL_TOKENS});
    kvf_plan_free(first);
    kvf_plan_free(second);
    free_pair(&p);
}

static void cuts_count_layers_of_the_group_not_of_the_model(void **state) {
    (void)state;
    /* "full" has model layers 0 and 2, "ssm" 1 and 3. Remote stages: layers 0 1 2 | 3. */
    const uint32_t remote[] = {3, 1};
    pair p = pair_of(hybrid(1), ENGINE(.all = {.block_count = 1}),
                     ENGINE(.pp_size = 2, .pp_layers = remote, .all = {.block_count = 1}));
    kvf_plan *plan = plan_of(&p, 0);

    assert_cuts(plan, {0, 0, 0, {0, 2}, {0, 1}, ALL_TOKENS}, {0, 0, 1, {0, 2}, {0, 1}, ALL_TOKENS},
                {0, 1, 0, {0, 1}, {0, 4}, ALL_TOKENS}, {0, 1, 1, {0, 1}, {0, 2}, ALL_TOKENS},
                {0, 1, 2, {0, 1}, {0, 2}, ALL_TOKENS}, {0, 1, 3, {0, 1}, {0, 2}, ALL_TOKENS},
                {1, 1, 0, {1, 2}, {0, 4}, ALL_TOKENS}, {1, 1, 1, {1, 2}, {0, 2}, ALL_TOKENS},
                {1, 1, 2, {1, 2}, {0, 2}, ALL_TOKENS}, {1, 1, 3, {1, 2}, {0, 2}, ALL_TOKENS});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void stages_and_heads_are_cut_together(void **state) {
    (void)state;
    /* Remote: 2 stages of 2 layers, TP 2. Local: one stage, TP 1. */
    pair p = pair_of(attention(4, 2, 4), ENGINE(.all = {.block_count = 1}),
                     ENGINE(.tp_size = 2, .pp_size = 2, .all = {.block_count = 1}));
    kvf_plan *plan = plan_of(&p, 0);

    assert_sources(plan, 0, 1, 2, 3);
    assert_cuts(plan, {0, 0, 0, {0, 2}, {0, 1}, ALL_TOKENS}, {1, 0, 0, {0, 2}, {1, 2}, ALL_TOKENS},
                {0, 0, 1, {0, 2}, {0, 1}, ALL_TOKENS}, {1, 0, 1, {0, 2}, {1, 2}, ALL_TOKENS},
                {2, 0, 0, {2, 4}, {0, 1}, ALL_TOKENS}, {3, 0, 0, {2, 4}, {1, 2}, ALL_TOKENS},
                {2, 0, 1, {2, 4}, {0, 1}, ALL_TOKENS}, {3, 0, 1, {2, 4}, {1, 2}, ALL_TOKENS});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_rank_without_layers_of_any_group_reads_nothing(void **state) {
    (void)state;
    /* Only layer 0 is cached; the second stage has layer 1. */
    kvf_part_desc part = PART(.name = "latent", .units = 1, .cell_elements = 4);
    const uint32_t first_layer = 0;
    kvf_group_desc group = {
        .name = "mla", .layers = &first_layer, .layer_count = 1, .parts = &part, .part_count = 1};
    pair p = pair_of(model_of(2, &group, 1), ENGINE(.pp_size = 2, .all = {.block_count = 1}),
                     ENGINE(.all = {.block_count = 1}));
    kvf_plan *plan = plan_of(&p, 1);

    assert_int_equal(kvf_plan_source_count(plan), 0);
    assert_int_equal(kvf_plan_cut_count(plan), 0);
    assert_int_equal(kvf_plan_rule_count(plan), 0);
    assert_ok(kvf_plan_verify(plan));
    kvf_plan_free(plan);
    free_pair(&p);
}

/* ---- tokens ---------------------------------------------------------------------------------- */

static pair dcp_pair(uint32_t local_count, uint32_t local_width, uint32_t remote_count,
                     uint32_t remote_width) {
    return pair_of(latent(1),
                   ENGINE(.tp_size = local_count, .dcp_size = local_count, .dcp_width = local_width,
                          .all = {.block_count = 1}),
                   ENGINE(.tp_size = remote_count, .dcp_size = remote_count, .dcp_width = remote_width,
                          .all = {.block_count = 1}));
}

static void every_remote_share_is_read_by_a_rank_with_all_tokens(void **state) {
    (void)state;
    pair p = dcp_pair(1, 1, 2, 1);
    kvf_plan *plan = plan_of(&p, 0);

    assert_cuts(plan, {0, 0, 0, {0, 1}, {0, 1}, {0, 2, 1}}, {1, 0, 0, {0, 1}, {0, 1}, {1, 2, 1}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_rank_with_all_tokens_fills_every_local_share(void **state) {
    (void)state;
    pair p = dcp_pair(2, 1, 1, 1);
    kvf_plan *plan = plan_of(&p, 1);

    assert_cuts(plan, {0, 0, 0, {0, 1}, {0, 1}, ALL_TOKENS});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void only_shares_with_tokens_in_common_are_read(void **state) {
    (void)state;
    /* Local share 1 of 4 keeps 1, 5, 9: all odd. */
    pair p = dcp_pair(4, 1, 2, 1);
    kvf_plan *plan = plan_of(&p, 1);

    assert_cuts(plan, {1, 0, 0, {0, 1}, {0, 1}, {1, 2, 1}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void shares_of_different_widths_are_matched_by_token(void **state) {
    (void)state;
    /* Local share 1 of 4 keeps 1, 5, 9. Remote share 0 has 0..3 and 8..11, share 1 has 4..7. */
    pair mixed = dcp_pair(4, 1, 2, 4);
    kvf_plan *both = plan_of(&mixed, 1);
    assert_cuts(both, {0, 0, 0, {0, 1}, {0, 1}, {0, 2, 4}}, {1, 0, 0, {0, 1}, {0, 1}, {1, 2, 4}});
    /* Local share 2 of 4 by 2 keeps 4 5, 12 13. Remote share 1 of 2 by 4 has 4..7 and 12..15. */
    pair nested = dcp_pair(4, 2, 2, 4);
    kvf_plan *one = plan_of(&nested, 2);
    assert_cuts(one, {1, 0, 0, {0, 1}, {0, 1}, {1, 2, 4}});
    kvf_plan_free(both);
    kvf_plan_free(one);
    free_pair(&mixed);
    free_pair(&nested);
}

static void each_share_of_each_head_is_read_from_its_own_rank(void **state) {
    (void)state;
    /* 2 heads over 4 ranks in 2 token shares: rank = 2 * head + share. */
    pair p = pair_of(attention(1, 2, 4), ENGINE(.all = {.block_count = 1}),
                     ENGINE(.tp_size = 4, .dcp_size = 2, .all = {.block_count = 1}));
    kvf_plan *plan = plan_of(&p, 0);

    assert_cuts(plan, {0, 0, 0, {0, 1}, {0, 1}, {0, 2, 1}}, {1, 0, 0, {0, 1}, {0, 1}, {1, 2, 1}},
                {2, 0, 0, {0, 1}, {1, 2}, {0, 2, 1}}, {3, 0, 0, {0, 1}, {1, 2}, {1, 2, 1}},
                {0, 0, 1, {0, 1}, {0, 1}, {0, 2, 1}}, {1, 0, 1, {0, 1}, {0, 1}, {1, 2, 1}},
                {2, 0, 1, {0, 1}, {1, 2}, {0, 2, 1}}, {3, 0, 1, {0, 1}, {1, 2}, {1, 2, 1}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void replicas_of_a_share_are_spread_as_well(void **state) {
    (void)state;
    /* Remote: ranks 0 and 2 have the even tokens, 1 and 3 the odd ones. Local: two ranks with all tokens. */
    pair p = pair_of(latent(1), ENGINE(.tp_size = 2, .all = {.block_count = 1}),
                     ENGINE(.tp_size = 4, .dcp_size = 2, .all = {.block_count = 1}));
    kvf_plan *first = plan_of(&p, 0), *second = plan_of(&p, 1);

    assert_sources(first, 0, 1);
    assert_sources(second, 2, 3);
    kvf_plan_free(first);
    kvf_plan_free(second);
    free_pair(&p);
}

/* ---- engines from given shards -------------------------------------------- */

/* One rank of a model with 2 layers of K and V of 4 heads: the layers, heads and tokens that the rank has. */
typedef struct held {
    kvf_range layers, units;
    kvf_token_share tokens;
} held;

static kvf_engine *engine_of_ranks(const kvf_model *model, const held *ranks, uint32_t count) {
    kvf_shard *shards[4];
    for (uint32_t i = 0; i < count; i++) {
        const kvf_part_share parts[] = {{ranks[i].units, 0, 1}, {ranks[i].units, 0, 1}};
        const kvf_placement places[] = {PLACED(0, 0, 128, 8, 16), PLACED(0, 64, 128, 8, 16),
                                        PLACED(1, 0, 128, 8, 16), PLACED(1, 64, 128, 8, 16)};
        const uint64_t bytes[] = {1024, 1024};
        kvf_group_shard_desc group = {.tokens_per_block = 2,
                                      .block_count = 4,
                                      .tokens = ranks[i].tokens,
                                      .parts = parts,
                                      .placements = places};
        kvf_shard_desc desc = {.struct_size = sizeof desc,
                               .rank = i,
                               .layers = ranks[i].layers,
                               .region_bytes = bytes,
                               .region_count = 2,
                               .groups = &group};
        assert_ok(kvf_shard_create(model, &desc, &shards[i]));
    }
    kvf_engine *engine = NULL;
    assert_ok(kvf_engine_from_shards(model, "P", shards, count, &engine));
    return engine;
}

#define RANKS(...) ((const held[]){__VA_ARGS__}), COUNT_OF(((const held[]){__VA_ARGS__}))

/* A local engine that has everything, and these remote ranks. */
static pair pair_with_ranks(const held *ranks, uint32_t count) {
    kvf_model *model = attention(2, 4, 4);
    return (pair){model, engine_of(model, ENGINE(.all = {.block_count = 4})),
                  engine_of_ranks(model, ranks, count)};
}

static void a_holder_that_goes_on_past_a_boundary_gives_one_cut(void **state) {
    (void)state;
    /* Rank 1 repeats heads 1 and 2 of rank 0; rank 0 has all heads, so nothing is cut. */
    pair p = pair_with_ranks(RANKS({{0, 2}, {0, 4}, {0}}, {{0, 2}, {1, 3}, {0}}));
    kvf_plan *plan = plan_of(&p, 0);

    assert_cuts(plan, {0, 0, 0, {0, 2}, {0, 4}, ALL_TOKENS}, {0, 0, 1, {0, 2}, {0, 4}, ALL_TOKENS});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void ranks_whose_heads_overlap_cover_each_head_once(void **state) {
    (void)state;
    pair p = pair_with_ranks(RANKS({{0, 2}, {0, 3}, {0}}, {{0, 2}, {1, 4}, {0}}));
    kvf_plan *plan = plan_of(&p, 0);

    assert_cuts(plan, {0, 0, 0, {0, 2}, {0, 3}, ALL_TOKENS}, {1, 0, 0, {0, 2}, {3, 4}, ALL_TOKENS},
                {0, 0, 1, {0, 2}, {0, 3}, ALL_TOKENS}, {1, 0, 1, {0, 2}, {3, 4}, ALL_TOKENS});
    kvf_plan_free(plan);
    free_pair(&p);
}

static kvf_status try_plan(const pair *p) {
    kvf_plan *plan = NULL;
    kvf_status status = kvf_plan_build(kvf_engine_shard(p->local, 0), p->remote, NULL, &plan);
    if (status)
        assert_null(plan);
    kvf_plan_free(plan);
    return status;
}

static void heads_that_nobody_holds_are_named(void **state) {
    (void)state;
    pair p = pair_with_ranks(RANKS({{0, 2}, {0, 1}, {0}}, {{0, 2}, {3, 4}, {0}}));
    assert_fails(try_plan(&p), KVF_E_UNCOVERED, "P: no rank holds group full", "layers 0 to 1", "part k",
                 "units [1, 3)");
    free_pair(&p);
}

static void layers_that_nobody_holds_are_named(void **state) {
    (void)state;
    pair p = pair_with_ranks(RANKS({{0, 1}, {0, 4}, {0}}));
    assert_fails(try_plan(&p), KVF_E_UNCOVERED, "layers 1 to 1", "part k", "units [0, 4)");
    free_pair(&p);
}

/* The error message once named the last part of the preceding group, which has more parts. */
static void tokens_that_nobody_holds_are_named_with_a_part_of_their_group(void **state) {
    (void)state;
    const kvf_part_desc parts[] = {
        {.name = "k", .dtype = KVF_DTYPE_BF16, .units = 4, .cell_elements = 4},
        {.name = "v", .dtype = KVF_DTYPE_BF16, .units = 4, .cell_elements = 4},
        {.name = "latent", .dtype = KVF_DTYPE_BF16, .units = 1, .cell_elements = 4}};
    const kvf_group_desc groups[] = {
        {.name = "a", .layers = (const uint32_t[]){0}, .layer_count = 1, .parts = parts, .part_count = 2},
        {.name = "b",
         .layers = (const uint32_t[]){1},
         .layer_count = 1,
         .parts = parts + 2,
         .part_count = 1}};
    const kvf_model_desc desc = {
        .struct_size = sizeof desc, .layer_count = 2, .groups = groups, .group_count = 2};
    pair p = {.model = NULL};
    assert_ok(kvf_model_create(&desc, &p.model));
    p.local = engine_of(p.model, ENGINE(.all = {.block_count = 4}));
    kvf_shard_desc shard = *kvf_shard_get(kvf_engine_shard(p.local, 0));
    kvf_group_shard_desc kept[] = {shard.groups[0], shard.groups[1]};
    kept[1].tokens = (kvf_token_share){0, 2, 1};
    shard.groups = kept;
    kvf_shard *remote = NULL;
    assert_ok(kvf_shard_create(p.model, &shard, &remote));
    assert_ok(kvf_engine_from_shards(p.model, "P", &remote, 1, &p.remote));
    assert_fails(try_plan(&p), KVF_E_UNCOVERED, "group b", "part latent", "tokens of share 1 of 2");
    free_pair(&p);
}

static void tokens_that_nobody_holds_are_named(void **state) {
    (void)state;
    pair p = pair_with_ranks(RANKS({{0, 2}, {0, 4}, {0, 2, 1}}));
    assert_fails(try_plan(&p), KVF_E_UNCOVERED, "units [0, 4)", "tokens of share 1 of 2");
    free_pair(&p);
}

static void holders_of_half_a_head_range_each_do_not_hold_the_other_layers_half(void **state) {
    (void)state;
    /* Layer 0: heads 0..3. Layer 1: heads 0 and 1 only. */
    pair p = pair_with_ranks(RANKS({{0, 1}, {0, 4}, {0}}, {{1, 2}, {0, 2}, {0}}));
    assert_fails(try_plan(&p), KVF_E_UNCOVERED, "layers 1 to 1", "units [2, 4)");
    free_pair(&p);
}

static void missing_cells_that_are_not_wanted_do_not_matter(void **state) {
    (void)state;
    kvf_model *model = attention(2, 4, 4);
    pair p = {model, engine_of(model, ENGINE(.tp_size = 2, .all = {.block_count = 4})),
              engine_of_ranks(model, RANKS({{0, 2}, {0, 2}, {0}}))};
    kvf_plan *plan = plan_of(&p, 0);

    assert_sources(plan, 0);
    kvf_plan_free(plan);
    free_pair(&p);
}

/* ---- what a plan refuses --------------------------------------------------------------------- */

/* The remote engine has two token shares but only the rank of share 1. Local share 1 of 4 keeps odd tokens only, and
 * share 0 even tokens. */
static void shares_that_are_missing_and_not_wanted_do_not_matter(void **state) {
    (void)state;
    kvf_model *model = attention(2, 4, 4);
    pair p = {model, engine_of_ranks(model, RANKS({{0, 2}, {0, 4}, {1, 4, 1}})),
              engine_of_ranks(model, RANKS({{0, 2}, {0, 4}, {1, 2, 1}}))};
    kvf_plan *plan = plan_of(&p, 0);
    assert_cuts(plan, {0, 0, 0, {0, 2}, {0, 4}, {1, 2, 1}}, {0, 0, 1, {0, 2}, {0, 4}, {1, 2, 1}});
    kvf_plan_free(plan);
    kvf_engine_free(p.local);

    p.local = engine_of_ranks(model, RANKS({{0, 2}, {0, 4}, {0, 4, 1}}));
    assert_fails(try_plan(&p), KVF_E_UNCOVERED, "part k", "units [0, 4)", "tokens of share 0 of 2");
    kvf_engine_free(p.local);

    p.local = engine_of_ranks(model, RANKS({{0, 2}, {0, 0}, {0, 4, 1}})); /* a rank that keeps no head */
    plan = plan_of(&p, 0);
    assert_int_equal(kvf_plan_source_count(plan), 0);
    kvf_plan_free(plan);
    free_pair(&p);
}

static void models_that_differ_are_refused_with_both_values(void **state) {
    (void)state;
    kvf_model *ours = attention(1, 4, 4), *theirs = attention(1, 8, 4);
    pair p = {NULL, engine_of(ours, ENGINE(.all = {.block_count = 1})),
              engine_of(theirs, ENGINE(.name = "prefill", .all = {.block_count = 1}))};
    assert_fails(try_plan(&p), KVF_E_MISMATCH, "prefill", "full.k.units is \"4\" locally and \"8\" remotely");
    free_pair(&p);
    kvf_model_free(ours);
    kvf_model_free(theirs);
}

static void models_that_are_equal_need_not_be_the_same_object(void **state) {
    (void)state;
    kvf_model *ours = attention(1, 4, 4), *theirs = attention(1, 4, 4);
    pair p = {NULL, engine_of(ours, ENGINE(.all = {.block_count = 1})),
              engine_of(theirs, ENGINE(.all = {.block_count = 1}))};
    assert_ok(try_plan(&p));
    free_pair(&p);
    kvf_model_free(ours);
    kvf_model_free(theirs);
}

static void missing_arguments_are_named(void **state) {
    (void)state;
    pair p = tp_pair(1, 1, 1);
    const kvf_shard *local = kvf_engine_shard(p.local, 0);
    kvf_plan *plan = NULL;
    assert_fails(kvf_plan_build(NULL, p.remote, NULL, &plan), KVF_E_INVALID, "local is NULL");
    assert_fails(kvf_plan_build(local, NULL, NULL, &plan), KVF_E_INVALID, "remote is NULL");
    assert_fails(kvf_plan_build(local, p.remote, NULL, NULL), KVF_E_INVALID, "out is NULL");
    assert_null(plan);
    free_pair(&p);
}

static void options_are_checked(void **state) {
    (void)state;
    pair p = tp_pair(1, 1, 1);
    const kvf_shard *local = kvf_engine_shard(p.local, 0);
    kvf_plan *plan = NULL;
    kvf_plan_options options = {.struct_size = sizeof options, .replicas = (kvf_replica_choice)2};
    assert_fails(kvf_plan_build(local, p.remote, &options, &plan), KVF_E_INVALID, "replicas is 2");
    options = (kvf_plan_options){0};
    assert_fails(kvf_plan_build(local, p.remote, &options, &plan), KVF_E_INVALID, "kvf_plan_options",
                 "struct_size");
    assert_null(plan);
    free_pair(&p);
}

static void past_the_last_source_and_cut_there_is_none(void **state) {
    (void)state;
    pair p = tp_pair(8, 2, 4);
    kvf_plan *plan = plan_of(&p, 0);

    assert_int_equal(kvf_plan_source_rank(plan, 2), UINT32_MAX);
    assert_null(kvf_plan_get_cut(plan, 4));
    assert_ptr_equal(kvf_plan_local(plan), kvf_engine_shard(p.local, 0));
    assert_ptr_equal(kvf_plan_remote(plan), p.remote);
    kvf_plan_free(plan);
    kvf_plan_free(NULL);
    free_pair(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_ranks_fill_one_where_there_are_twice_as_many),
        cmocka_unit_test(one_rank_fills_two_where_there_are_half_as_many),
        cmocka_unit_test(three_ranks_fill_two),
        cmocka_unit_test(two_ranks_fill_three),
        cmocka_unit_test(parts_may_be_split_differently),
        cmocka_unit_test(ranks_that_want_the_same_head_take_different_holders),
        cmocka_unit_test(the_first_holder_can_be_asked_for),
        cmocka_unit_test(more_readers_than_holders_take_them_in_equal_shares),
        cmocka_unit_test(every_consumer_of_a_latent_reads_a_producer_of_its_own),
        cmocka_unit_test(the_consumers_of_a_latent_spread_over_more_producers),
        cmocka_unit_test(a_single_rank_reads_each_replicated_head_once),
        cmocka_unit_test(attention_may_come_from_other_ranks_than_state),
        cmocka_unit_test(replicated_attention_and_sharded_state_choose_their_sources_apart),
        cmocka_unit_test(layers_are_cut_where_remote_stages_begin),
        cmocka_unit_test(uneven_stages_meet_stages_of_other_sizes),
        cmocka_unit_test(cuts_count_layers_of_the_group_not_of_the_model),
        cmocka_unit_test(stages_and_heads_are_cut_together),
        cmocka_unit_test(a_rank_without_layers_of_any_group_reads_nothing),
        cmocka_unit_test(every_remote_share_is_read_by_a_rank_with_all_tokens),
        cmocka_unit_test(a_rank_with_all_tokens_fills_every_local_share),
        cmocka_unit_test(only_shares_with_tokens_in_common_are_read),
        cmocka_unit_test(shares_of_different_widths_are_matched_by_token),
        cmocka_unit_test(each_share_of_each_head_is_read_from_its_own_rank),
        cmocka_unit_test(replicas_of_a_share_are_spread_as_well),
        cmocka_unit_test(a_holder_that_goes_on_past_a_boundary_gives_one_cut),
        cmocka_unit_test(ranks_whose_heads_overlap_cover_each_head_once),
        cmocka_unit_test(heads_that_nobody_holds_are_named),
        cmocka_unit_test(layers_that_nobody_holds_are_named),
        cmocka_unit_test(tokens_that_nobody_holds_are_named),
        cmocka_unit_test(tokens_that_nobody_holds_are_named_with_a_part_of_their_group),
        cmocka_unit_test(holders_of_half_a_head_range_each_do_not_hold_the_other_layers_half),
        cmocka_unit_test(missing_cells_that_are_not_wanted_do_not_matter),
        cmocka_unit_test(shares_that_are_missing_and_not_wanted_do_not_matter),
        cmocka_unit_test(models_that_differ_are_refused_with_both_values),
        cmocka_unit_test(models_that_are_equal_need_not_be_the_same_object),
        cmocka_unit_test(missing_arguments_are_named),
        cmocka_unit_test(options_are_checked),
        cmocka_unit_test(past_the_last_source_and_cut_there_is_none),
    };
    return cmocka_run_group_tests_name("cover", tests, NULL, NULL);
}
