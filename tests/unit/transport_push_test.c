/*
 * Producers that write: each rank of P pushes its part of the plan of a rank of D, with its own endpoint, and an oracle
 * that knows no plans computes what D's memory must be.
 */
#include <kvferry/transport.h>

#include "cell_ends.h"
#include "transport_ways.h"

#define TOKENS 700u
#define RANKS_MAX 4u

typedef struct world {
    pair engines; /* local: D; remote: P */
    cell_sequence d_sequence, p_sequence;
    cell_end d[RANKS_MAX], p[RANKS_MAX];
    uint32_t d_count, p_count;
} world;

static world *world_open(const char *kind, uint32_t heads, const kvf_engine_spec *d,
                         const kvf_engine_spec *p) {
    world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->engines = pair_of(attention(3, heads, 32), d, p);
    w->d_count = kvf_engine_rank_count(w->engines.local);
    w->p_count = kvf_engine_rank_count(w->engines.remote);
    assert_true(w->d_count <= RANKS_MAX && w->p_count <= RANKS_MAX);
    sequence_open(&w->d_sequence, kvf_engine_shard(w->engines.local, 0), TOKENS, 1);
    sequence_open(&w->p_sequence, kvf_engine_shard(w->engines.remote, 0), TOKENS, 2);
    for (uint32_t i = 0; i < w->d_count; i++)
        end_open(&w->d[i], NULL, kind, kvf_engine_shard(w->engines.local, i), &w->d_sequence);
    for (uint32_t i = 0; i < w->p_count; i++) {
        end_open(&w->p[i], NULL, kind, kvf_engine_shard(w->engines.remote, i), &w->p_sequence);
        rank_fill(&w->p[i].cells, all_layers(w->p[i].cells.shard), 5);
    }
    return w;
}

static void world_close(world *w) {
    for (uint32_t i = 0; i < w->p_count; i++)
        end_close(&w->p[i]);
    for (uint32_t i = 0; i < w->d_count; i++)
        end_close(&w->d[i]);
    sequence_close(&w->d_sequence);
    sequence_close(&w->p_sequence);
    free_pair(&w->engines);
    free(w);
}

static kvf_peer *connect_to(const cell_end *from, const cell_end *to) {
    kvf_peer *peer = NULL;
    assert_ok(end_connect(from, to, &peer));
    return peer;
}

static bool step(const world *w, int timeout_ms) {
    const cell_end *ends[2 * RANKS_MAX];
    size_t count = 0;
    for (uint32_t i = 0; i < w->d_count; i++)
        ends[count++] = &w->d[i];
    for (uint32_t i = 0; i < w->p_count; i++)
        ends[count++] = &w->p[i];
    return ends_work(ends, count, timeout_ms);
}

static kvf_status finish(const world *w, const kvf_transfer *transfer) {
    kvf_status status;
    while ((status = kvf_transfer_status(transfer)) == KVF_IN_PROGRESS)
        assert_true(step(w, 60000));
    return status;
}

/* The plan and request that fill one rank of D. */
typedef struct filling {
    kvf_plan *plan;
    kvf_request *request;
} filling;

static filling filling_of(const world *w, uint32_t d_rank, kvf_range layers) {
    kvf_plan_options options = {.struct_size = sizeof options, .layers = layers};
    filling f = {plan_with(&w->engines, d_rank, &options), NULL};
    f.request = request_of(f.plan);
    set_sequences(f.request, &w->d_sequence, &w->p_sequence);
    return f;
}

static void filling_free(const filling *f) {
    kvf_request_free(f->request);
    kvf_plan_free(f->plan);
}

static kvf_transfer *push(const filling *f, uint32_t source, kvf_peer *peer) {
    kvf_transfer *transfer = NULL;
    assert_ok(kvf_transfer_push(f->request, source, peer, &transfer));
    return transfer;
}

/* Every source of a rank of D pushes its part of the request. */
static void push_all(const world *w, uint32_t d_rank, kvf_range layers) {
    filling f = filling_of(w, d_rank, layers);
    kvf_transfer *transfers[RANKS_MAX];
    kvf_peer *peers[RANKS_MAX];
    uint32_t sources = kvf_plan_source_count(f.plan);
    for (uint32_t s = 0; s < sources; s++) {
        peers[s] = connect_to(&w->p[kvf_plan_source_rank(f.plan, s)], &w->d[d_rank]);
        transfers[s] = push(&f, s, peers[s]);
    }
    for (uint32_t s = 0; s < sources; s++) {
        uint64_t bytes, runs;
        assert_int_equal(finish(w, transfers[s]), KVF_OK);
        kvf_transfer_counts(transfers[s], &bytes, &runs);
        assert_int_equal(bytes, kvf_request_bytes(f.request, s));
        assert_true(bytes > 0);
        kvf_transfer_free(transfers[s]);
    }
    /* Close no peer before all are done: a producer that closes is lost to the ranks that it is still writing to. */
    for (uint32_t s = 0; s < sources; s++)
        kvf_peer_close(peers[s]);
    filling_free(&f);
}

/* ---- shapes ---------------------------------------------------------------------------------- */

#define SPEC(...)                                                                                            \
    { .struct_size = sizeof(kvf_engine_spec), __VA_ARGS__ }
#define CACHE(...)                                                                                           \
    { .block_count = 200, __VA_ARGS__ }

static const kvf_engine_spec prefill =
    SPEC(.tp_size = 2, .all = CACHE(.tokens_per_block = 16, .order = "L|BPHN"));

static const kvf_engine_spec decodes[] = {
    SPEC(.tp_size = 4, .all = CACHE(.tokens_per_block = 16, .order = "L|BPHN")),
    SPEC(.tp_size = 4, .all = CACHE(.tokens_per_block = 24, .order = "BLNHP")),
    SPEC(.tp_size = 1, .all = CACHE(.tokens_per_block = 4, .order = "LP|BNH")),
};

/* Ranks that share the tokens of a head. */
static const kvf_engine_spec shared_tokens =
    SPEC(.tp_size = 4, .dcp_size = 2, .all = CACHE(.tokens_per_block = 8, .order = "LBPHN"));

/* ---- tests ----------------------------------------------------------------------------------- */

static void check_every_rank(const world *w) {
    for (uint32_t rank = 0; rank < w->d_count; rank++) {
        cell_rank wanted;
        rank_copy(&wanted, &w->d[rank].cells);
        rank_fill(&wanted, all_layers(wanted.shard), 5);
        push_all(w, rank, range(0, 0));
        assert_same_memory(&w->d[rank].cells, &wanted);
        rank_close(&wanted);
    }
}

static void producers_fill_every_cell_and_no_other_byte(void **state) {
    for (size_t i = 0; i < COUNT_OF(decodes); i++) {
        world *w = world_open(*state, 8, &decodes[i], &prefill);
        check_every_rank(w);
        world_close(w);
    }
}

static void producers_push_the_tokens_each_rank_keeps(void **state) {
    world *w = world_open(*state, 2, &shared_tokens, &prefill);
    check_every_rank(w);
    world_close(w);
    w = world_open(*state, 2, &prefill, &shared_tokens);
    check_every_rank(w);
    world_close(w);
}

static void producers_push_layer_by_layer(void **state) {
    world *w = world_open(*state, 8, &decodes[1], &prefill);
    cell_rank wanted;
    rank_copy(&wanted, &w->d[2].cells);
    for (uint32_t layer = 0; layer < 3; layer++) {
        push_all(w, 2, range(layer, layer + 1));
        rank_fill(&wanted, range(layer, layer + 1), 5);
        assert_same_memory(&w->d[2].cells, &wanted);
    }
    rank_close(&wanted);
    world_close(w);
}

static void a_push_leaves_the_producer_as_it_was(void **state) {
    world *w = world_open(*state, 8, &decodes[2], &prefill);
    cell_rank before[2];
    for (uint32_t i = 0; i < 2; i++)
        rank_copy(&before[i], &w->p[i].cells);
    push_all(w, 0, range(0, 0));
    for (uint32_t i = 0; i < 2; i++) {
        assert_same_memory(&w->p[i].cells, &before[i]);
        rank_close(&before[i]);
    }
    world_close(w);
}

static void a_source_that_the_plan_does_not_have_is_refused(void **state) {
    world *w = world_open(*state, 8, &decodes[0], &prefill);
    filling f = filling_of(w, 0, range(0, 0));
    kvf_peer *peer = connect_to(&w->p[0], &w->d[0]);
    kvf_transfer *transfer = NULL;
    assert_int_equal(kvf_plan_source_count(f.plan), 1);
    assert_fails(kvf_transfer_push(f.request, 1, peer, &transfer), KVF_E_RANGE, "source is 1", "has 1");
    assert_fails(kvf_transfer_push(f.request, UINT32_MAX, peer, &transfer), KVF_E_RANGE, "source is");
    assert_fails(kvf_transfer_push(NULL, 0, peer, &transfer), KVF_E_INVALID, "request");
    assert_fails(kvf_transfer_push(f.request, 0, NULL, &transfer), KVF_E_INVALID, "peer");
    assert_fails(kvf_transfer_push(f.request, 0, peer, NULL), KVF_E_INVALID, "out");
    assert_null(transfer);
    filling_free(&f);
    world_close(w);
}

static void a_peer_of_another_shape_than_the_plan_is_refused(void **state) {
    world *w = world_open(*state, 8, &decodes[2], &prefill);
    filling f = filling_of(w, 0, range(0, 0)); /* the rank of D has all heads */
    static unsigned char small[64];
    kvf_memory region = {.struct_size = sizeof(kvf_memory), .address = small, .bytes = sizeof small};
    cell_end liar = {0};
    assert_ok(kvf_transport_open(*state, NULL, &liar.transport));
    assert_ok(kvf_transport_register(liar.transport, &region, 1));
    kvf_transfer *transfer = NULL;
    kvf_status status = kvf_transfer_push(f.request, 0, connect_to(&w->p[0], &liar), &transfer);
    assert_true(status == KVF_E_RANGE || status == KVF_E_NOT_REGISTERED);
    assert_null(transfer);
    filling_free(&f);
    kvf_transport_close(liar.transport);
    world_close(w);
}

static void nothing_to_push_is_complete_at_once(void **state) {
    world *w = world_open(*state, 8, &decodes[0], &prefill);
    filling f = filling_of(w, 0, range(0, 0));
    kvf_group_request nothing = {w->d_sequence.tables[0], w->p_sequence.tables[0], TOKENS, TOKENS};
    assert_ok(kvf_request_set(f.request, &nothing, 1));
    kvf_transfer *transfer = push(&f, 0, connect_to(&w->p[0], &w->d[0]));
    assert_int_equal(kvf_transfer_status(transfer), KVF_OK);
    kvf_transfer_free(transfer);
    filling_free(&f);
    world_close(w);
}

/* The layer has no cache: neither a pull nor a push has a source. */
static void a_transfer_without_sources_is_complete_at_once(void **state) {
    (void)state;
    static const uint32_t first[] = {0};
    kvf_part_desc part = PART(.name = "latent", .units = 1, .cell_elements = 4);
    kvf_group_desc group = {
        .name = "full", .layers = first, .layer_count = 1, .parts = &part, .part_count = 1};
    pair p =
        pair_of(model_of(2, &group, 1), ENGINE(.all = {.block_count = 4}), ENGINE(.all = {.block_count = 4}));
    kvf_plan_options options = {.struct_size = sizeof options, .layers = {1, 2}};
    kvf_plan *plan = plan_with(&p, 0, &options);
    kvf_request *request = request_of(plan);
    kvf_transfer *transfer = NULL;
    assert_ok(kvf_transfer_start(request, KVF_READ, NULL, &transfer));
    assert_int_equal(kvf_transfer_status(transfer), KVF_OK);
    kvf_transfer_cancel(transfer);
    assert_int_equal(kvf_transfer_status(transfer), KVF_OK);
    uint64_t bytes = 1, runs = 1;
    kvf_transfer_counts(transfer, &bytes, &runs);
    assert_int_equal(bytes + runs, 0);
    kvf_transfer_free(transfer);
    kvf_request_free(request);
    kvf_plan_free(plan);
    free_pair(&p);
}

/* Once the status is there, no byte of D changes, whatever the sides still do and whatever the producer writes into its
 * blocks. */
static void assert_quiet(const world *w, uint32_t d_rank, const cell_rank *source) {
    cell_rank seen;
    rank_copy(&seen, &w->d[d_rank].cells);
    rank_scribble(source, 99);
    while (step(w, 20))
        assert_same_memory(&w->d[d_rank].cells, &seen);
    assert_same_memory(&w->d[d_rank].cells, &seen);
    rank_close(&seen);
}

static void after_a_cancelled_push_nothing_is_written(void **state) {
    uint32_t in_the_middle = 0;
    for (int steps = 0; steps < 6; steps++) {
        world *w = world_open(*state, 8, &decodes[2], &prefill);
        filling f = filling_of(w, 0, range(0, 0));
        kvf_transfer *transfer = push(&f, 0, connect_to(&w->p[0], &w->d[0]));
        for (int i = 0; i < steps && kvf_transfer_status(transfer) == KVF_IN_PROGRESS; i++)
            assert_true(step(w, 60000));
        kvf_transfer_cancel(transfer);
        kvf_status status = finish(w, transfer);
        assert_true(status == KVF_E_CANCELLED || status == KVF_OK);
        in_the_middle += status == KVF_E_CANCELLED;
        assert_quiet(w, 0, &w->p[0].cells);
        kvf_transfer_free(transfer);
        filling_free(&f);
        world_close(w);
    }
    assert_true(in_the_middle > 0);
}

static void a_push_to_a_peer_that_closes_fails(void **state) {
    for (int steps = 0; steps < 2; steps++) {
        world *w = world_open(*state, 8, &decodes[2], &prefill);
        filling f = filling_of(w, 0, range(0, 0));
        kvf_peer *peer = connect_to(&w->p[0], &w->d[0]);
        kvf_transfer *transfer = push(&f, 0, peer);
        for (int i = 0; i < steps; i++)
            assert_true(step(w, 60000));
        bool moving = kvf_transfer_status(transfer) == KVF_IN_PROGRESS;
        assert_true(moving || steps > 0);
        end_close(&w->d[0]);
        if (moving) {
            kvf_transfer *again = NULL;
            assert_int_equal(finish(w, transfer), KVF_E_PEER_LOST);
            assert_int_equal(kvf_transfer_push(f.request, 0, peer, &again), KVF_E_PEER_LOST);
            assert_null(again);
        }
        kvf_transfer_free(transfer);
        filling_free(&f);
        world_close(w);
    }
}

static void one_producer_lost_does_not_stop_another(void **state) {
    world *w = world_open(*state, 8, &decodes[2], &prefill);
    filling f = filling_of(w, 0, range(0, 0));
    kvf_transfer *lost = push(&f, 0, connect_to(&w->p[0], &w->d[0]));
    kvf_transfer *kept = push(&f, 1, connect_to(&w->p[1], &w->d[0]));
    end_close(&w->p[0]); /* this ends what the producer was doing */
    assert_int_equal(kvf_transfer_status(lost), KVF_E_CANCELLED);
    assert_int_equal(finish(w, kept), KVF_OK);
    kvf_transfer_free(lost);
    kvf_transfer_free(kept);
    filling_free(&f);
    world_close(w);
}

int main(void) {
    static const way_test tests[] = {
        NAMED(producers_fill_every_cell_and_no_other_byte),
        NAMED(producers_push_the_tokens_each_rank_keeps),
        NAMED(producers_push_layer_by_layer),
        NAMED(a_push_leaves_the_producer_as_it_was),
        NAMED(a_source_that_the_plan_does_not_have_is_refused),
        NAMED(a_peer_of_another_shape_than_the_plan_is_refused),
        NAMED(nothing_to_push_is_complete_at_once),
        NAMED(a_transfer_without_sources_is_complete_at_once),
        NAMED(after_a_cancelled_push_nothing_is_written),
        NAMED(a_push_to_a_peer_that_closes_fails),
        NAMED(one_producer_lost_does_not_stop_another),
    };
    test_way ways[MAX_WAYS];
    return run_every_way("transport_push", tests, COUNT_OF(tests), ways, ways_of_kinds(ways), NULL, 0);
}
