/* The ranks of an engine, from their introductions: each once, of one engine, with the same cells and its own shard. */
#include "agent/siblings.h"
#include "shapes.h"

enum { RANKS = 2 };

typedef struct scene {
    kvf_model *model;
    kvf_engine *engine;
    kvf_wire_buffer shards[RANKS];
    kvf_introduction said[RANKS];
    uint8_t digest[KVF_WIRE_DIGEST_BYTES];
} scene;

static void set_up(scene *s) {
    *s = (scene){.model = attention(2, 4, 8)};
    s->engine = engine_of(s->model, ENGINE(.name = "P", .tp_size = RANKS, .all = {.block_count = 8}));
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_ok(kvf_wire_encode_shard(kvf_engine_shard(s->engine, r), NULL, &s->shards[r]));
        s->said[r] = (kvf_introduction){.engine = "P",
                                        .incarnation = 7 + r,
                                        .rank = r,
                                        .rank_count = RANKS,
                                        .endpoint = r ? "tcp://10.0.0.1:2" : "tcp://10.0.0.1:1",
                                        .public_key = "",
                                        .shard = {s->shards[r].data, s->shards[r].size},
                                        .facts = ""};
    }
}

static void tear_down(scene *s) {
    for (uint32_t r = 0; r < RANKS; r++)
        kvf_wire_buffer_free(&s->shards[r]);
    kvf_engine_free(s->engine);
    kvf_model_free(s->model);
}

static kvf_status read_shard(const void *model, kvf_bytes bytes, uint64_t *pieces, kvf_shard **out) {
    return kvf_wire_decode_shard(model, NULL, bytes, pieces, out);
}

/* Takes the introductions; `look` (may be NULL) checks the result. */
static kvf_status take_and(const scene *s,
                           void (*look)(const kvf_remote_rank *ranks, const kvf_engine *engine)) {
    kvf_wire_buffer encoded[RANKS] = {{0}};
    kvf_bytes introductions[RANKS];
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_ok(kvf_wire_encode_introduction(&s->said[r], &encoded[r]));
        introductions[r] = (kvf_bytes){encoded[r].data, encoded[r].size};
    }
    const kvf_welcome welcome = {.engine = "P",
                                 .rank_count = RANKS,
                                 .introductions = introductions,
                                 .introduction_count = RANKS,
                                 .facts = ""};
    kvf_remote_rank *ranks = NULL;
    kvf_engine *engine = NULL;
    kvf_status status =
        kvf_siblings_take(&welcome, s->digest, s->model, read_shard, s->model, &ranks, &engine);
    assert_true((status == KVF_OK) == (engine != NULL) && (status == KVF_OK) == (ranks != NULL));
    if (!status && look)
        look(ranks, engine);
    kvf_siblings_free(ranks, RANKS);
    kvf_engine_free(engine);
    for (uint32_t r = 0; r < RANKS; r++)
        kvf_wire_buffer_free(&encoded[r]);
    return status;
}

static void look_at_all(const kvf_remote_rank *ranks, const kvf_engine *engine) {
    assert_string_equal(kvf_engine_name(engine), "P");
    assert_int_equal(kvf_engine_rank_count(engine), RANKS);
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_string_equal(ranks[r].endpoint, r ? "tcp://10.0.0.1:2" : "tcp://10.0.0.1:1");
        assert_int_equal(ranks[r].incarnation, 7 + r);
        assert_null(ranks[r].session);
        assert_int_equal(kvf_shard_get(kvf_engine_shard(engine, r))->rank, r);
    }
}

static void ranks_are_taken_in_any_order(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    assert_ok(take_and(&s, look_at_all));
    const kvf_introduction first = s.said[0];
    s.said[0] = s.said[1];
    s.said[1] = first;
    assert_ok(take_and(&s, look_at_all));
    tear_down(&s);
}

static void introductions_that_contradict_each_other_are_refused(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    const kvf_introduction right = s.said[1];
    s.said[1].engine = "Q";
    assert_fails(take_and(&s, NULL), KVF_E_MISMATCH, "an introduction is of engine Q, not P");
    s.said[1] = right;
    s.said[1].digest[31] = 1;
    assert_fails(take_and(&s, NULL), KVF_E_MISMATCH, "rank 1 caches other cells than its siblings");
    s.said[1] = right;
    s.said[1].rank_count = 3;
    assert_fails(take_and(&s, NULL), KVF_E_MISMATCH, "is of rank 1 of 3, but the engine has 2 ranks");
    s.said[1].rank = 2;
    assert_fails(take_and(&s, NULL), KVF_E_MISMATCH, "is of rank 2 of 3, but the engine has 2 ranks");
    s.said[1] = s.said[0];
    assert_fails(take_and(&s, NULL), KVF_E_MISMATCH, "rank 0 is introduced twice");
    s.said[1] = right;
    s.said[1].shard = s.said[0].shard;
    assert_fails(take_and(&s, NULL), KVF_E_MISMATCH, "the shard of rank 1 says it is of rank 0");
    s.said[1].shard = (kvf_bytes){"\x80", 1};
    assert_fails(take_and(&s, NULL), KVF_E_PARSE, "shard: rank is missing");
    s.said[1] = right;
    assert_ok(take_and(&s, look_at_all));
    tear_down(&s);
}

static kvf_status take(void *subject) {
    return take_and(subject, look_at_all);
}

static void nothing_leaks_where_memory_ends(void **state) {
    (void)state;
    memory_count memory;
    scene s;
    count_memory(&memory);
    set_up(&s);
    kvf_wire_buffer encoded[RANKS] = {{0}};
    kvf_siblings siblings;
    kvf_siblings_free(NULL, 0);
    for (uint32_t r = 0; r < RANKS; r++)
        assert_ok(kvf_wire_encode_introduction(&s.said[r], &encoded[r]));
    size_t live = memory.live;
    for (size_t n = 1; n <= 200; n++) { /* more allocations than it makes */
        memory.calls = 0;
        memory.fail_at = n;
        kvf_status status = kvf_siblings_begin(&siblings, RANKS, s.digest);
        for (uint32_t r = 0; r < RANKS && !status; r++)
            status =
                kvf_siblings_add(&siblings, (kvf_bytes){encoded[r].data, encoded[r].size}, "P", s.digest);
        for (uint32_t r = 0; r < RANKS && !status; r++)
            status = kvf_siblings_read(&siblings, read_shard, s.model);
        memory.fail_at = 0;
        assert_true(status == KVF_OK || status == KVF_E_NOMEM);
        assert_int_equal(siblings.read == RANKS, status == KVF_OK);
        kvf_siblings_drop(&siblings);
        assert_int_equal(memory.live, live);
    }
    assert_ok(take(&s));
    for (uint32_t r = 0; r < RANKS; r++)
        kvf_wire_buffer_free(&encoded[r]);
    tear_down(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_are_taken_in_any_order),
        cmocka_unit_test(introductions_that_contradict_each_other_are_refused),
        cmocka_unit_test_teardown(nothing_leaks_where_memory_ends, stop_counting_memory),
    };
    return cmocka_run_group_tests_name("agent_siblings", tests, NULL, NULL);
}
