/* Checksums that peers ask for: a peer that asks for many does not delay others, and all of it is counted. */
#include "agent/hashing.h"
#include "agent/session.h"
#include "agent_net.h"
#include "agent_speaker.h"

#include <kvferry/checksum.h>

#define ONE(engine_name, blocks)                                                                             \
    ENGINE(.name = (engine_name), .all = {.block_count = (blocks), .tokens_per_block = PER_BLOCK})
#define BLOCKS 512u
#define PER_BLOCK 16u
#define STEPS (BLOCKS * PER_BLOCK) /* as many as one call may ask for: 1 MiB, in four slices */
#define MANY 200u
#define OPTIONS(...) (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), __VA_ARGS__})

typedef struct scene {
    world w;
    kvf_agent *p;
    speaker greedy, modest;
    uint64_t greedy_lease, modest_lease;
    kvf_session *of_greedy, *of_modest;
} scene;

static uint64_t acquire(scene *s, speaker *by) {
    const kvf_call_body call = {.kind = KVF_CALL_ACQUIRE, .request = {"a", 1}, .rank_count = 1};
    assert_true(speaker_call(&s->w, by, by->session, call));
    assert_int_equal(by->status, KVF_OK);
    return by->generation;
}

static kvf_session *session_of(const scene *s, const char *engine) {
    kvf_session *session;
    DL_FOREACH(s->p->all_sessions, session) {
        if (strcmp(session->engine, engine) == 0)
            return session;
    }
    return NULL;
}

static void open_scene_of(scene *s, kvf_model *model, uint32_t blocks, const kvf_agent_options *options) {
    world_request held;
    uint64_t ticket;
    world_open_model(&s->w, model, ONE("P", blocks), ONE("D", blocks), options);
    s->p = s->w.p.agents[0];
    world_request_make(&s->w, &s->w.p, "a", (uint64_t)blocks * PER_BLOCK, 0, 1, &held);
    world_hold(&s->w.p, &held, &ticket);
    speaker_open(&s->greedy, s->p, "X", false, 1);
    speaker_open(&s->modest, s->p, "Y", false, 2);
    speaker_greet(&s->w, &s->greedy);
    speaker_greet(&s->w, &s->modest);
    s->greedy_lease = acquire(s, &s->greedy);
    s->modest_lease = acquire(s, &s->modest);
    s->of_greedy = session_of(s, "X");
    s->of_modest = session_of(s, "Y");
    assert_true(s->of_greedy && s->of_modest);
}

static void open_scene(scene *s, const kvf_agent_options *options) {
    open_scene_of(s, attention(2, 4, 8), BLOCKS, options);
}

static void close_scene(scene *s) {
    speaker_close(&s->greedy);
    speaker_close(&s->modest);
    world_close(&s->w);
}

static void ask_for(speaker *by, uint64_t lease, uint32_t layers, uint32_t units, uint64_t steps) {
    kvf_call_body call = {.kind = KVF_CALL_CHECKSUM,
                          .number = ++by->number,
                          .generation = lease,
                          .layers = {0, layers},
                          .units = {0, units},
                          .end = steps};
    memcpy(call.session, by->session, sizeof call.session);
    speaker_send(by, &(kvf_message){.kind = KVF_MESSAGE_CALL, .call = call});
}

static void ask(speaker *by, uint64_t lease, uint64_t steps) {
    ask_for(by, lease, 2, 4, steps);
}

static void one_round(const scene *s) {
    bool busy;
    assert_ok(kvf_agent_progress(s->p, &busy));
}

static void a_peer_that_asks_for_little_is_answered_beside_one_that_asks_for_much(void **state) {
    (void)state;
    scene s;
    open_scene(&s, NULL);
    for (uint32_t i = 0; i < MANY; i++)
        ask(&s.greedy, s.greedy_lease, STEPS);
    ask(&s.modest, s.modest_lease, PER_BLOCK);
    net_advance(NET_LATENCY_NS);
    one_round(&s);
    assert_int_equal(s.of_greedy->hashing.count, MANY);
    uint32_t rounds = 1;
    for (; s.of_modest->hashing.count > 0; rounds++)
        one_round(&s);
    assert_true(rounds <= 4);
    assert_true(s.of_greedy->hashing.count >= MANY - 1);
    speaker_run_for(&s.w, &s.modest, MS);
    assert_int_equal(s.modest.call, KVF_CALL_CHECKSUM);
    assert_int_equal(s.modest.sums, PER_BLOCK);
    close_scene(&s);
}

/* The first takes four rounds. */
static void no_more_than_1024_questions_of_a_peer_are_under_way(void **state) {
    (void)state;
    scene s;
    open_scene(&s, NULL);
    ask(&s.greedy, s.greedy_lease, STEPS);
    for (uint32_t i = 0; i < 1024; i++)
        ask(&s.greedy, s.greedy_lease, PER_BLOCK);
    net_advance(NET_LATENCY_NS);
    one_round(&s);
    assert_int_equal(s.of_greedy->hashing.count, 1024);
    close_scene(&s);
}

static uint32_t rounds_until_answered(const scene *s) {
    uint32_t rounds = 0;
    net_advance(NET_LATENCY_NS);
    do {
        one_round(s);
        rounds++;
    } while (s->of_greedy->hashing.count > 0);
    return rounds;
}

static void a_round_hashes_one_slice(void **state) {
    (void)state;
    scene s;
    open_scene(&s, NULL);
    ask(&s.greedy, s.greedy_lease, STEPS);
    assert_int_equal(rounds_until_answered(&s), 4); /* slices of 256 KiB */
    close_scene(&s);
}

/* A slice is several steps, or several layers of one step, or several units of one layer. */
static void a_slice_is_no_more_where_a_step_is_large(void **state) {
    (void)state;
    static const struct {
        uint32_t layers, units, elements, rounds;
    } cases[] = {
        {8, 4, 8192, 2},   /* 64 KiB a layer: four layers at a time */
        {2, 64, 4096, 4},  /* 512 KiB a layer: half a layer at a time */
        {2, 2, 131072, 4}, /* 256 KiB a unit */
        {1, 2, 262144, 2}  /* a unit is more than a slice */
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        scene s;
        open_scene_of(&s, attention(cases[i].layers, cases[i].units, cases[i].elements), 1, NULL);
        ask_for(&s.greedy, s.greedy_lease, cases[i].layers, cases[i].units, 1);
        assert_int_equal(rounds_until_answered(&s), cases[i].rounds);
        close_scene(&s);
    }
}

/* Questions are kept for the peer; those beyond its budget are answered later. */
static void questions_are_within_the_budget(void **state) {
    (void)state;
    enum { BUDGET = 1 << 20 };
    scene s;
    open_scene(&s, OPTIONS(.max_bytes_per_key = BUDGET));
    uint64_t before = world_stats(s.p).memory_now_bytes;
    for (uint32_t i = 0; i < MANY; i++)
        ask(&s.greedy, s.greedy_lease, STEPS);
    net_advance(NET_LATENCY_NS);
    one_round(&s);
    uint32_t taken = s.of_greedy->hashing.count;
    assert_in_range(taken, 8, BUDGET / (STEPS * sizeof(uint64_t)));
    assert_true(world_stats(s.p).memory_now_bytes <= before + BUDGET);
    assert_int_equal(world_stats(s.p).over_budget, MANY - taken);
    ask(&s.modest, s.modest_lease, PER_BLOCK);
    speaker_run_for(&s.w, &s.modest, 10 * MS);
    assert_int_equal(s.modest.sums, PER_BLOCK);
    speaker_run_for(&s.w, &s.greedy, 10 * MS);
    assert_int_equal(s.of_greedy->hashing.count, 0);
    assert_int_equal(s.greedy.letters, 2 + taken); /* no question was refused */
    assert_int_equal(world_stats(s.p).memory_now_bytes, before);
    close_scene(&s);
}

static void a_question_that_is_repeated_is_answered_once(void **state) {
    (void)state;
    scene s;
    open_scene(&s, NULL);
    ask(&s.greedy, s.greedy_lease, STEPS);
    ask(&s.greedy, s.greedy_lease, STEPS);
    s.greedy.number--;
    ask(&s.greedy, s.greedy_lease, STEPS);
    net_advance(NET_LATENCY_NS);
    one_round(&s);
    assert_int_equal(s.of_greedy->hashing.count, 2);
    speaker_run_for(&s.w, &s.greedy, 10 * MS);
    assert_int_equal(s.greedy.letters, 2 + 2); /* to its HELLO and its ACQUIRE before */
    close_scene(&s);
}

static void questions_about_no_steps_too_many_or_far_away_are_refused(void **state) {
    (void)state;
    static const uint64_t steps[][2] = {{0, 0}, {9, 9}, {0, STEPS + 1}, {1ull << 40, (1ull << 40) + 1}};
    scene s;
    open_scene(&s, NULL);
    for (size_t i = 0; i < COUNT_OF(steps); i++) {
        const kvf_call_body call = {.kind = KVF_CALL_CHECKSUM,
                                    .generation = s.greedy_lease,
                                    .layers = {0, 2},
                                    .units = {0, 4},
                                    .begin = steps[i][0],
                                    .end = steps[i][1]};
        assert_true(speaker_call(&s.w, &s.greedy, s.greedy.session, call));
        assert_int_equal(s.greedy.status, KVF_E_RANGE);
        assert_int_equal(s.greedy.sums, 0);
    }
    close_scene(&s);
}

/* A round answers so many whose lease has ended, and no others. */
static void at_most_64_questions_end_in_a_round(void **state) {
    (void)state;
    scene s;
    open_scene(&s, NULL);
    for (uint32_t i = 0; i < MANY; i++)
        ask(&s.greedy, s.greedy_lease, STEPS);
    net_advance(NET_LATENCY_NS);
    one_round(&s);
    assert_int_equal(s.of_greedy->hashing.count, MANY);
    kvf_call_body release = {.kind = KVF_CALL_RELEASE,
                             .number = ++s.greedy.number,
                             .request = {"a", 1},
                             .generation = s.greedy_lease,
                             .rank_count = 1};
    memcpy(release.session, s.greedy.session, sizeof release.session);
    speaker_send(&s.greedy, &(kvf_message){.kind = KVF_MESSAGE_CALL, .call = release});
    net_advance(NET_LATENCY_NS);
    for (uint32_t left = MANY; left > 0;) {
        one_round(&s);
        left = left > 64 ? left - 64 : 0;
        assert_int_equal(s.of_greedy->hashing.count, left);
    }
    close_scene(&s);
}

/* Hashing of our own. */
typedef struct stray {
    kvf_hashing hashing;
    kvf_block_table table;
    uint32_t ended;
    kvf_status status;
    uint64_t sums[STEPS];
} stray;

static const kvf_block_table *table_of(kvf_hashing *hashing) {
    return &((stray *)hashing)->table;
}

static void note_end(kvf_hashing *hashing, kvf_status status) {
    stray *s = (stray *)hashing;
    s->ended++;
    s->status = status;
    if (!status)
        memcpy(s->sums, hashing->sums, (hashing->end - hashing->begin) * sizeof *s->sums);
}

static void hash_it(const scene *s, stray *h) {
    assert_ok(kvf_hashing_start(&h->hashing));
    assert_int_equal(kvf_agent_timeout(s->p), 0); /* a round is due */
    for (uint32_t rounds = 0; h->ended == 0; rounds++) {
        assert_true(rounds < 20);
        one_round(s);
    }
}

static void sums_do_not_depend_on_the_slices(void **state) {
    (void)state;
    static const struct {
        uint32_t layers, units, elements, blocks;
        uint64_t begin, end;
    } cases[] = {
        {2, 4, 8, BLOCKS, PER_BLOCK, STEPS}, /* four slices of many steps */
        {8, 4, 8192, 1, 1, 3},               /* four layers at a time */
        {2, 64, 4096, 1, 1, 2},              /* half a layer at a time */
    };
    static uint32_t ids[BLOCKS];
    static uint64_t expected[STEPS];
    for (uint32_t i = 0; i < BLOCKS; i++)
        ids[i] = i;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const kvf_range layers = {0, cases[i].layers}, units = {0, cases[i].units};
        static stray h;
        scene s;
        open_scene_of(&s, attention(cases[i].layers, cases[i].units, cases[i].elements), cases[i].blocks,
                      NULL);
        for (uint32_t r = 0; r < s.p->region_count; r++)
            for (uint64_t at = 0; at < s.p->regions[r].bytes; at += sizeof(uint32_t))
                memcpy((unsigned char *)s.p->regions[r].address + at,
                       &(uint32_t){(uint32_t)(at * 0x9e3779b1u + r)}, sizeof(uint32_t));
        h = (stray){.hashing = {.agent = s.p,
                                .layers = layers,
                                .units = units,
                                .begin = cases[i].begin,
                                .end = cases[i].end,
                                .table = table_of,
                                .done = note_end},
                    .table = {.ids = ids, .count = cases[i].blocks}};
        hash_it(&s, &h);
        assert_ok(h.status);
        assert_ok(kvf_checksum_steps(s.p->shard, s.p->regions, 0, 0, layers, units, &h.table, cases[i].begin,
                                     cases[i].end, expected));
        assert_int_not_equal(expected[0], 0);
        assert_memory_equal(h.sums, expected, (cases[i].end - cases[i].begin) * sizeof *expected);
        close_scene(&s);
    }
}

static void blocks_beyond_the_cache_are_not_read(void **state) {
    (void)state;
    scene s;
    const uint32_t beyond = BLOCKS;
    open_scene(&s, NULL);
    static stray h;
    h = (stray){.hashing = {.agent = s.p,
                            .layers = {0, 2},
                            .units = {0, 4},
                            .end = PER_BLOCK,
                            .table = table_of,
                            .done = note_end},
                .table = {.ids = &beyond, .count = 1}};
    hash_it(&s, &h);
    assert_int_equal(h.status, KVF_E_RANGE);
    close_scene(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_peer_that_asks_for_little_is_answered_beside_one_that_asks_for_much),
        cmocka_unit_test(no_more_than_1024_questions_of_a_peer_are_under_way),
        cmocka_unit_test(a_round_hashes_one_slice),
        cmocka_unit_test(a_slice_is_no_more_where_a_step_is_large),
        cmocka_unit_test(questions_are_within_the_budget),
        cmocka_unit_test(a_question_that_is_repeated_is_answered_once),
        cmocka_unit_test(questions_about_no_steps_too_many_or_far_away_are_refused),
        cmocka_unit_test(at_most_64_questions_end_in_a_round),
        cmocka_unit_test(sums_do_not_depend_on_the_slices),
        cmocka_unit_test(blocks_beyond_the_cache_are_not_read),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
