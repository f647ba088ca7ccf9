/* Block tables that are larger than a message, and come in parts. */
#include <stdio.h>

#include "agent/parts.h"
#include "agent/push.h"
#include "agent_letters.h"
#include "agent_net.h"
#include "agent_speaker.h"
#include "sanitized.h"

/* One block each, and no two blocks are neighbours. Sanitizers need a minute for a million; fewer make two parts, too. */
#define TOKENS OFTEN(1u << 20)
#define ENGINE_OF(engine_name, tp, count)                                                                    \
    ENGINE(.name = (engine_name), .tp_size = (tp), .all = {.block_count = (count), .tokens_per_block = 1})
#define LEASE (10 * SECOND)
#define OPTIONS(...)                                                                                         \
    (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), .lease_ns = LEASE, __VA_ARGS__})

/* ---- cutting and joining --------------------------------------------------------------------- */

/* Three groups, whose ids show their place. */
static void fill(kvf_wire_group groups[3], uint32_t *ids, const uint32_t counts[3]) {
    for (uint32_t g = 0; g < 3; g++) {
        groups[g] = (kvf_wire_group){{ids, counts[g], 10 * g}, 5, 6 + g};
        for (uint32_t i = 0; i < counts[g]; i++)
            *ids++ = g << 24 | i;
    }
}

static void parts_together_are_the_whole(void **state) {
    (void)state;
    const uint32_t cases[][3] = {{0, 0, 0},
                                 {1, 0, 2},
                                 {KVF_WIRE_MAX_BLOCKS, 0, 1},
                                 {KVF_WIRE_MAX_BLOCKS - 1, KVF_WIRE_MAX_BLOCKS + 1, 0},
                                 {300000, 500000, 100}};
    uint32_t *ids = calloc(1000000, sizeof *ids);
    assert_non_null(ids);
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        kvf_wire_group groups[3], part[3];
        kvf_parts parts = {0};
        uint32_t told = 0, messages = 0, all = cases[c][0] + cases[c][1] + cases[c][2];
        fill(groups, ids, cases[c]);
        for (bool more = true; more; messages++) {
            uint32_t some = 0;
            more = kvf_wire_part(groups, 3, told, part);
            assert_ok(kvf_parts_add(&parts, part, 3, told, more));
            for (uint32_t g = 0; g < 3; g++)
                some += part[g].table.count;
            assert_true(some <= KVF_WIRE_MAX_BLOCKS && (some > 0 || !more));
            told += some;
        }
        assert_int_equal(told, all);
        assert_int_equal(messages, all == 0 ? 1 : (all + KVF_WIRE_MAX_BLOCKS - 1) / KVF_WIRE_MAX_BLOCKS);
        kvf_group_steps *joined = kvf_parts_join(&parts);
        assert_non_null(joined);
        for (uint32_t g = 0; g < 3; g++) {
            assert_int_equal(joined[g].begin, 5);
            assert_int_equal(joined[g].end, 6 + g);
            assert_int_equal(joined[g].table.first_block, 10 * g);
            assert_int_equal(joined[g].table.count, cases[c][g]);
            for (uint32_t i = 0; i < cases[c][g]; i++)
                assert_int_equal(joined[g].table.ids[i], g << 24 | i);
        }
        kvf_free(joined);
        kvf_parts_free(&parts);
    }
    free(ids);
}

static void a_part_that_does_not_go_on_is_refused(void **state) {
    (void)state;
    static const uint32_t ids[4] = {1, 2, 3, 4};
    kvf_parts parts = {0};
    kvf_wire_group group = {{ids, 2, 7}, 0, 9};
    assert_ok(kvf_parts_add(&parts, &group, 1, 0, true));
    assert_fails(kvf_parts_add(&parts, &group, 1, 3, true), KVF_E_RANGE, "first_id is 3; 2 ids are known");
    assert_fails(kvf_parts_add(&parts, &group, 1, 2, true), KVF_E_RANGE, "first_block is 7", "end with 9");
    group.table.first_block = 9;
    group.end = 10;
    assert_fails(kvf_parts_add(&parts, &group, 1, 2, true), KVF_E_MISMATCH, "group 0: steps are [0, 10)");
    group.end = 9;
    assert_fails(kvf_parts_add(&parts, (kvf_wire_group[2]){group, group}, 2, 2, true), KVF_E_MISMATCH,
                 "2 groups");
    group.table.count = 0;
    assert_fails(kvf_parts_add(&parts, &group, 1, 2, true), KVF_E_RANGE, "without ids");
    assert_ok(kvf_parts_add(&parts, &group, 1, 2, false));
    kvf_parts_free(&parts);
}

static void every_group_of_a_part_must_go_on(void **state) {
    (void)state;
    static const uint32_t ids[] = {1, 2};
    kvf_parts parts = {0};
    kvf_wire_group groups[] = {{{ids, 2, 0}, 0, 9}, {{ids, 2, 7}, 0, 9}, {{ids, 0, 0}, 0, 1}};
    assert_ok(kvf_parts_add(&parts, groups, 3, 0, true));
    groups[0].table.first_block = 2;
    assert_fails(kvf_parts_add(&parts, groups, 3, 4, true), KVF_E_RANGE, "group 1: ", "first_block is 7",
                 "end with 9");
    groups[1].table.first_block = 9;
    groups[2].end = 2;
    assert_fails(kvf_parts_add(&parts, groups, 3, 4, true), KVF_E_MISMATCH, "group 2: steps are [0, 2)");
    groups[2].end = 1;
    assert_ok(kvf_parts_add(&parts, groups, 3, 4, false));
    kvf_parts_free(&parts);
}

static void a_part_may_have_one_id_and_all_parts_no_more_than_a_table(void **state) {
    (void)state;
    static const uint32_t ids[] = {1, 2, 3};
    const uint32_t before = KVF_WIRE_MAX_TABLE_IDS - 3;
    kvf_parts parts = {.ids = before}; /* as after so many ids */
    kvf_wire_group group = {{ids, 1, 0}, 0, 9};
    assert_ok(kvf_parts_add(&parts, &group, 1, before, true));
    group.table = (kvf_block_table){ids, 3, 1};
    assert_fails(kvf_parts_add(&parts, &group, 1, before + 1, true), KVF_E_RANGE, "have more than");
    group.table.count = 2;
    assert_ok(kvf_parts_add(&parts, &group, 1, before + 1, false));
    kvf_parts_free(&parts);
}

static kvf_status add_parts(void *subject) {
    const kvf_wire_group *group = subject;
    kvf_parts parts = {0};
    const kvf_status status = kvf_parts_add(&parts, group, 1, 0, true);
    if (status)
        assert_null(parts.parts);
    kvf_parts_free(&parts);
    return status;
}

static void a_part_without_memory_is_not_taken(void **state) {
    (void)state;
    static const uint32_t ids[] = {1, 2};
    kvf_wire_group group = {{ids, 2, 0}, 0, 9};
    memory_count memory;
    count_memory(&memory);
    survive_every_refusal(&memory, add_parts, &group);
}

/* ---- requests -------------------------------------------------------------------------------- */

typedef struct scene {
    world w;
    world_request given, wanted;
    uint32_t *ids;
    uint64_t out[WORLD_MAX_RANKS], in[WORLD_MAX_RANKS];
} scene;

/* All blocks are of the last group; a group before it has only the last step. */
static void request(const kvf_model *model, uint32_t *ids, uint32_t count, uint32_t stride,
                    world_request *out) {
    *out = (world_request){.group_count = kvf_model_group_count(model)};
    for (uint32_t i = 0; i < count; i++)
        ids[i] = (i * stride + stride / 2) % count; /* `stride` is odd, so each id comes once */
    for (uint32_t g = 0; g < out->group_count; g++) {
        const uint32_t begin = g + 1 < out->group_count ? count - 1 : 0;
        out->groups[g] = (kvf_group_steps){{ids + begin, count - begin, begin}, begin, count};
    }
    out->request = (kvf_agent_request){.struct_size = sizeof out->request,
                                       .id = {"large", 5},
                                       .groups = out->groups,
                                       .group_count = out->group_count,
                                       .deadline_ns = WORLD_PATIENCE_S * SECOND};
}

static void open_scene_of(scene *s, kvf_model *model, uint32_t count) {
    world_open_model(&s->w, model, ENGINE_OF("P", 2, count), ENGINE_OF("D", 1, count), OPTIONS(.idle_ns = 0));
    s->ids = calloc(2 * (size_t)count, sizeof *s->ids);
    assert_non_null(s->ids);
    request(model, s->ids, count, 5, &s->given);
    request(model, s->ids + count, count, 3, &s->wanted);
    s->given.request.groups = s->given.groups;
    s->wanted.request.groups = s->wanted.groups;
    world_fill(&s->w, &s->w.p, &s->given, 7);
}

static void open_scene(scene *s) {
    open_scene_of(s, attention(1, 2, 4), TOKENS);
}

static void wait_for_both(scene *s) {
    world_all_done(&s->w, &s->w.d, s->in);
    world_all_done(&s->w, &s->w.p, s->out);
}

static void check_and_close(scene *s) {
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &s->wanted, 7), 0);
    assert_true(world_wrong_cells(&s->w, &s->w.d, &s->wanted, 8) > 0);
    world_quiet(&s->w);
    free(s->ids);
    world_close(&s->w);
}

static void a_million_blocks_are_pulled(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    world_hold(&s.w.p, &s.given, s.out);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.in);
    wait_for_both(&s);
    check_and_close(&s);
}

static void push_all(scene *s) {
    world_push(&s->w.p, &s->given, s->out);
    world_expect(&s->w.d, &s->wanted, &s->w.p, s->in);
    world_ready(&s->w.p, s->out);
}

static void a_million_blocks_are_pushed(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    push_all(&s);
    wait_for_both(&s);
    check_and_close(&s);
}

static void tables_that_peers_would_not_take_are_refused_at_once(void **state) {
    (void)state;
    const uint32_t most = KVF_WIRE_MAX_TABLE_IDS;
    scene s;
    uint64_t ticket;
    open_scene_of(&s, attention(1, 2, 4), 64);
    uint32_t *ids = malloc(((size_t)most + 1) * sizeof *ids);
    assert_non_null(ids);
    for (uint32_t i = 0; i <= most; i++)
        ids[i] = i < 64 ? i : KVF_NO_BLOCK;
    s.given.groups[0].table = s.wanted.groups[0].table = (kvf_block_table){ids, most + 1, 0};
    s.wanted.request.contact = s.w.p.contact;
    assert_fails(kvf_agent_hold(s.w.p.agents[0], &s.given.request, &ticket), KVF_E_RANGE,
                 "the tables have 4194305 entries; peers take up to 4194304");
    assert_fails(kvf_agent_expect(s.w.d.agents[0], &s.wanted.request, &ticket), KVF_E_RANGE,
                 "the tables have 4194305 entries; peers take up to 4194304");
    s.given.groups[0].table.count = most;
    world_fill(&s.w, &s.w.p, &s.given, 7);
    world_hold(&s.w.p, &s.given, s.out);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.in); /* its own table is told to nobody */
    wait_for_both(&s);
    check_and_close(&s);
    free(ids);
}

static kvf_model *two_groups(void) {
    static const uint32_t layers[] = {0, 1};
    const kvf_part_desc keys = PART(.name = "k", .units = 2, .cell_elements = 4);
    const kvf_group_desc groups[] = {
        {.name = "first", .layers = &layers[0], .layer_count = 1, .parts = &keys, .part_count = 1},
        {.name = "last", .layers = &layers[1], .layer_count = 1, .parts = &keys, .part_count = 1}};
    return model_of(2, groups, 2);
}

/* The first part has an id of the first group, and some of the last. */
static void each_part_goes_on_after_the_ids_of_all_groups_before(void **state) {
    (void)state;
    scene s;
    open_scene_of(&s, two_groups(), 1u << 18);
    s.wanted.request.deadline_ns = 100 * MS;
    push_all(&s);
    wait_for_both(&s);
    check_and_close(&s);
}

/* Calls and answers are lost, repeated and late: the parts still come in order. */
static void parts_arrive_over_a_bad_link(void **state) {
    (void)state;
    for (uint32_t push = 0; push < 2; push++) {
        scene s;
        open_scene(&s);
        letters_begin();
        letters_scramble(11 + push, 20, 20, 20);
        if (push) {
            push_all(&s);
        } else {
            world_hold(&s.w.p, &s.given, s.out);
            world_pull(&s.w.d, &s.wanted, &s.w.p, s.in);
        }
        wait_for_both(&s);
        letters_end();
        check_and_close(&s);
    }
}

/* ---- peers that stop in the middle ----------------------------------------------------------- */

#define SOME 1000u

typedef struct attack {
    world w;
    kvf_agent *p;
    speaker s;
    uint32_t ids[SOME];
    kvf_group_steps group;
} attack;

static void open_attack(attack *a, const kvf_agent_options *options) {
    world_open_model(&a->w, attention(1, 2, 4), ENGINE(.name = "P", .all = {.block_count = 64}),
                     ENGINE(.name = "D", .all = {.block_count = 64}), options);
    a->p = a->w.p.agents[0];
    speaker_open(&a->s, a->p, "X", false, 1);
    speaker_greet(&a->w, &a->s);
}

static void close_attack(attack *a) {
    speaker_close(&a->s);
    world_close(&a->w);
}

/* Sends a part of an expectation without a time limit. */
static kvf_status say_part(attack *a, uint64_t generation, uint32_t first_id, uint32_t count, bool more) {
    a->group = (kvf_group_steps){.table = {a->ids, count, first_id}, .begin = 0, .end = 1u << 20};
    kvf_call_body call = {.kind = KVF_CALL_EXPECT,
                          .request = {"never", 5},
                          .generation = generation | KVF_EXPECTATION,
                          .time_ns = UINT64_MAX,
                          .rank_count = 1,
                          .groups = &a->group,
                          .group_count = 1,
                          .first_id = first_id,
                          .more = more};
    assert_true(speaker_call(&a->w, &a->s, a->s.session, call));
    return a->s.status;
}

static uint64_t kept(const attack *a) {
    return world_stats(a->p).memory_now_bytes;
}

static void beat_for(attack *a, uint64_t generation, uint64_t ns) {
    const uint64_t allowed[2] = {generation | KVF_EXPECTATION, UINT64_MAX};
    for (uint64_t end = world_now() + ns; world_now() < end;) {
        const kvf_call_body call = {.kind = KVF_CALL_BEAT, .expectations = allowed, .expectation_count = 1};
        assert_true(speaker_call(&a->w, &a->s, a->s.session, call));
        speaker_run_for(&a->w, &a->s, SECOND);
    }
}

static void parts_that_stop_coming_are_forgotten_though_their_sender_beats(void **state) {
    (void)state;
    attack a;
    open_attack(&a, OPTIONS(.idle_ns = 0));
    uint64_t before = kept(&a);
    assert_int_equal(say_part(&a, 1, 0, SOME, true), KVF_OK);
    assert_int_equal(say_part(&a, 1, SOME, SOME, true), KVF_OK);
    assert_true(kept(&a) - before >= 2 * SOME * sizeof(uint32_t));
    assert_int_equal(a.p->all_sessions->flow_count, 1);
    beat_for(&a, 1, LEASE - 3 * SECOND);
    assert_int_equal(a.p->all_sessions->flow_count, 1);
    beat_for(&a, 1, 6 * SECOND);
    assert_int_equal(a.p->all_sessions->flow_count, 0);
    assert_int_equal(kept(&a), before);
    assert_int_equal(say_part(&a, 1, 2 * SOME, SOME, false), KVF_E_NOT_FOUND);
    assert_non_null(strstr(a.s.detail, "the ids before 2000 are no longer known here"));
    close_attack(&a);
}

static void parts_are_within_the_budget(void **state) {
    (void)state;
    enum { BUDGET = 64 << 10 };
    attack a;
    open_attack(&a, OPTIONS(.max_bytes_per_key = BUDGET));
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < 100 && !status; i++)
        status = say_part(&a, 1, i * SOME, SOME, true);
    assert_int_equal(status, KVF_E_LIMIT);
    assert_true(kept(&a) <= BUDGET);
    assert_int_equal(world_stats(a.p).over_budget, 1);
    close_attack(&a);
}

static void a_part_told_again_changes_nothing(void **state) {
    (void)state;
    attack a;
    open_attack(&a, OPTIONS(.idle_ns = 0));
    assert_int_equal(say_part(&a, 1, 0, SOME, true), KVF_OK);
    uint64_t before = kept(&a);
    assert_int_equal(say_part(&a, 1, 0, SOME, true), KVF_OK);
    assert_int_equal(say_part(&a, 1, SOME + 1, SOME, true), KVF_E_RANGE);
    assert_int_equal(kept(&a), before);
    assert_int_equal(say_part(&a, 1, SOME, 1, false), KVF_OK);
    assert_int_equal(say_part(&a, 2, 1, SOME, false), KVF_E_NOT_FOUND); /* another, without its first id */
    kvf_flow *flow = kvf_flow_of(a.p->all_sessions, 1 | KVF_EXPECTATION);
    assert_non_null(flow);
    assert_false(flow->more);
    assert_int_equal(flow->groups[0].table.count, SOME + 1);
    close_attack(&a);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_together_are_the_whole),
        cmocka_unit_test(a_part_that_does_not_go_on_is_refused),
        cmocka_unit_test(every_group_of_a_part_must_go_on),
        cmocka_unit_test(a_part_may_have_one_id_and_all_parts_no_more_than_a_table),
        cmocka_unit_test_teardown(a_part_without_memory_is_not_taken, stop_counting_memory),
        cmocka_unit_test(a_million_blocks_are_pulled),
        cmocka_unit_test(a_million_blocks_are_pushed),
        cmocka_unit_test(tables_that_peers_would_not_take_are_refused_at_once),
        cmocka_unit_test(each_part_goes_on_after_the_ids_of_all_groups_before),
        cmocka_unit_test(parts_arrive_over_a_bad_link),
        cmocka_unit_test(parts_that_stop_coming_are_forgotten_though_their_sender_beats),
        cmocka_unit_test(parts_are_within_the_budget),
        cmocka_unit_test(a_part_told_again_changes_nothing),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
