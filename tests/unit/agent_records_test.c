/* Records, which travel with a cache: they come from every rank that was read or has written, whole and once. */
#include <stdio.h>

#include "agent/records.h"
#include "agent_lease_scene.h"
#include "agent_rights.h"

#define P_OF(tp) ENGINE(.name = "P", .tp_size = (tp), .all = {.block_count = 64})
#define D_OF(tp) ENGINE(.name = "D", .tp_size = (tp), .all = {.block_count = 64})
#define KINDS 4u

/* ---- the records of each rank, which follow from its number and a seed ---------------------------- */

/* For 50 tokens: the next token with log-probabilities, two hidden states, and the experts of each token. */
static const struct {
    const char *name;
    uint64_t begin, end;
    size_t bytes_each;
} kinds[KINDS] = {{"token", 50, 51, 24}, {"hidden", 48, 50, 4096}, {"routed", 0, 50, 12}, {"mark", 0, 0, 0}};

static size_t size_of(uint32_t kind) {
    return kinds[kind].bytes_each * (kinds[kind].end - kinds[kind].begin);
}

static uint8_t byte_of(uint32_t seed, uint32_t rank, uint32_t kind, size_t i) {
    return (uint8_t)(seed * 31 + rank * 101 + kind * 17 + i * (i >> 8 | 7));
}

typedef struct given {
    kvf_record records[KINDS];
    uint8_t data[KINDS][2 * 4096];
} given;

static const kvf_record *give(given *out, uint32_t seed, uint32_t rank) {
    for (uint32_t k = 0; k < KINDS; k++) {
        for (size_t i = 0; i < size_of(k); i++)
            out->data[k][i] = byte_of(seed, rank, k, i);
        out->records[k] = (kvf_record){.name = kinds[k].name,
                                       .begin = kinds[k].begin,
                                       .end = kinds[k].end,
                                       .data = size_of(k) > 0 ? out->data[k] : NULL,
                                       .size = size_of(k),
                                       .rank = 4711};
    }
    return out->records;
}

static bool is_right(const kvf_record *record, uint32_t seed, uint32_t rank, uint32_t kind) {
    const uint8_t *data = record->data;
    bool right = strcmp(record->name, kinds[kind].name) == 0 && record->begin == kinds[kind].begin &&
                 record->end == kinds[kind].end && record->size == size_of(kind) && record->rank == rank;
    for (size_t i = 0; right && i < record->size; i++)
        right = data[i] == byte_of(seed, rank, kind, i);
    return right;
}

/* How many records of an event differ from those that the ranks `from` (bits) gave, each once and in order; missing and
 * extra ones count. */
static uint32_t wrong_records(const world_outcome *o, uint32_t seed, uint32_t from) {
    uint32_t wrong = 0, seen = 0;
    for (uint32_t rank = 0; rank < 32; rank++) {
        uint32_t kind = 0;
        for (uint32_t i = 0; i < o->record_count; i++)
            if (o->records[i].rank == rank) {
                wrong += kind >= KINDS || !is_right(&o->records[i], seed, rank, kind);
                kind++;
            }
        seen += kind;
        if (from >> rank & 1)
            wrong += kind < KINDS ? KINDS - kind : 0;
        else
            wrong += kind;
    }
    return wrong + (o->record_count - seen);
}

/* ---- giving --------------------------------------------------------------------------------------- */

typedef kvf_status (*start)(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket);

/* Holds or pushes the request on every rank, each with its own records. */
static void lend(scene *s, start call, uint32_t seed, uint32_t consumers) {
    for (uint32_t r = 0; r < s->w.p.rank_count; r++) {
        given records;
        kvf_agent_request request = s->held.request;
        request.consumers = consumers;
        request.records = give(&records, seed, r);
        request.record_count = KINDS;
        assert_ok(call(s->w.p.agents[r], &request, &s->theirs[r]));
        memset(&records, 0xee, sizeof records); /* copied by the call */
    }
}

/* All ranks of the consumer must be done; rank r must have the records of the ranks `from[r]`. */
static void assert_records(scene *s, uint32_t seed, const uint32_t *from) {
    for (uint32_t r = 0; r < s->w.d.rank_count; r++) {
        const world_outcome *o = world_done(&s->w, s->w.d.agents[r], s->ours[r]);
        assert_int_equal(wrong_records(o, seed, from[r]), 0);
        assert_true(wrong_records(o, seed + 1, from[r]) > 0); /* the control: others would be noticed */
    }
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &s->wanted, 1), 0);
}

/* The shapes of two engines, and the ranks of P (bits) that each rank of D has its heads from. */
static const struct {
    uint32_t p, d;
    uint32_t from[4];
} shapes[] = {{1, 1, {1}}, {2, 4, {1, 1, 2, 2}}, {4, 1, {15}}, {4, 2, {3, 12}}};

static void readers_have_the_records_of_all_that_they_read_from(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        scene s;
        scene_open(&s, attention(2, 8, 8), P_OF(shapes[i].p), D_OF(shapes[i].d), NULL);
        lend(&s, kvf_agent_hold, 3, 1);
        world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        assert_records(&s, 3, shapes[i].from);
        world_all_done(&s.w, &s.w.p, s.theirs);
        scene_close(&s);
    }
}

static void records_that_a_reader_gives_itself_are_not_among_them(void **state) {
    (void)state;
    scene s;
    given own;
    scene_open(&s, attention(2, 8, 8), P_OF(1), D_OF(1), NULL);
    s.wanted.request.records = give(&own, 5, 0);
    s.wanted.request.record_count = KINDS;
    lend(&s, kvf_agent_hold, 3, 1);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    assert_records(&s, 3, (const uint32_t[]){1});
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

static void consumers_that_are_written_to_have_the_records_of_all_writers(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        const kvf_agent_options options = {.struct_size = sizeof options, .verify = i % 2};
        scene s;
        scene_open(&s, attention(2, 8, 8), P_OF(shapes[i].p), D_OF(shapes[i].d), &options);
        lend(&s, kvf_agent_push, 4, 1);
        world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_ready(&s.w.p, s.theirs);
        assert_records(&s, 4, shapes[i].from);
        world_all_done(&s.w, &s.w.p, s.theirs);
        scene_close(&s);
    }
}

/* One record from each of two ranks, of one byte, the least that is copied. */
static void the_records_of_two_ranks_are_joined_however_few_they_are(void **state) {
    (void)state;
    const kvf_record first = {.name = "a", .end = 1, .data = "x", .size = 1},
                     second = {.name = "b", .end = 2, .data = "y", .size = 1};
    kvf_records all = {0}, more = {0};
    assert_ok(kvf_records_add(&all, &first, 1, 3));
    assert_ok(kvf_records_add(&more, &second, 1, 7));
    assert_ok(kvf_records_take(&all, &more));
    assert_null(more.all);
    assert_int_equal(all.count, 2);
    assert_string_equal(all.all[0].name, "a");
    assert_string_equal(all.all[1].name, "b");
    assert_memory_equal(all.all[0].data, "x", 1);
    assert_memory_equal(all.all[1].data, "y", 1);
    assert_int_equal(all.all[0].rank, 3);
    assert_int_equal(all.all[1].rank, 7);
    kvf_records_free(&all);
    assert_null(all.all);
}

static void a_push_gathers_the_records_of_its_chunks(void **state) {
    (void)state;
    scene s;
    given records;
    lease_open(&s, P_OF(1), D_OF(1), NULL);
    lease_meet(&s); /* opened without any */
    (void)give(&records, 5, 0);
    for (uint32_t k = 0; k < KINDS; k++) {
        kvf_push_chunk chunk = *CHUNK(16 * k, k + 1 < KINDS ? 16 * (k + 1) : 50, 4);
        chunk.records = &records.records[k];
        chunk.record_count = 1;
        assert_ok(kvf_agent_push_ready(s.p, s.theirs[0], &chunk));
        memset(records.data[k], 0xee, sizeof records.data[k]);
        world_run_for(&s.w, 5 * MS);
    }
    assert_records(&s, 5, (uint32_t[]){1});
    world_all_done(&s.w, &s.w.p, s.theirs);
    lease_close(&s);
}

static void each_of_several_consumers_has_them(void **state) {
    (void)state;
    scene s;
    scene_open(&s, attention(2, 8, 8), P_OF(2), D_OF(2), NULL);
    world_add(&s.w, ENGINE(.name = "E", .all = {.block_count = 64}), NULL);
    lend(&s, kvf_agent_hold, 6, 2);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    assert_records(&s, 6, (uint32_t[]){1, 2});
    world_request wanted;
    world_request_make(&s.w, &s.w.e, "a", 50, 8, 1, &wanted);
    world_pull(&s.w.e, &wanted, &s.w.p, s.ours);
    assert_int_equal(wrong_records(world_done(&s.w, s.w.e.agents[0], s.ours[0]), 6, 3), 0);
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

/* ---- what goes wrong ------------------------------------------------------------------------------ */

static void lost_repeated_and_late_messages_change_no_record(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        scene s;
        lease_open(&s, P_OF(4), D_OF(2), LEASE(20 * SECOND));
        letters_scramble(seed, 20, 15, 25);
        lend(&s, seed % 2 ? kvf_agent_push : kvf_agent_hold, (uint32_t)seed, 1);
        if (seed % 2) {
            world_ready(&s.w.p, s.theirs);
            world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
        } else {
            world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        }
        assert_records(&s, (uint32_t)seed, (uint32_t[]){3, 12});
        world_all_done(&s.w, &s.w.p, s.theirs);
        lease_close(&s);
    }
}

/* The pull was reserved: leases have come, and the records with them. */
static void an_attempt_that_ends_early_has_none_and_the_next_one_all(void **state) {
    (void)state;
    scene s;
    memory_count memory;
    count_memory(&memory);
    scene_open(&s, attention(2, 8, 8), P_OF(2), D_OF(1), NULL);
    world_add(&s.w, ENGINE(.name = "E", .all = {.block_count = 64}), NULL);
    lend(&s, kvf_agent_hold, 7, 2);
    const kvf_group_steps *groups = s.wanted.request.groups;
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_stats(s.p).leases_now == 1 && world_stats(s.w.p.agents[1]).leases_now == 1);
    world_run_for(&s.w, MS); /* the answers are there */
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    assert_int_equal(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->record_count, 0);

    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_stats(s.p).leases_now == 1 && world_stats(s.w.p.agents[1]).leases_now == 1);
    assert_ok(kvf_agent_pull_into(s.d, s.ours[0], groups, s.wanted.group_count));
    assert_records(&s, 7, (uint32_t[]){3});
    world_request wanted;
    world_request_make(&s.w, &s.w.e, "a", 50, 8, 1, &wanted);
    world_pull(&s.w.e, &wanted, &s.w.p, s.ours);
    assert_int_equal(wrong_records(world_done(&s.w, s.w.e.agents[0], s.ours[0]), 7, 3), 0);
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
    assert_int_equal(memory.live, 0);
}

/* Rank 0 has written and said so, with its records; rank 1 dies before. */
static void of_a_producer_that_dies_half_way_nothing_is_told(void **state) {
    (void)state;
    scene s;
    lease_open(&s, P_OF(2), D_OF(1), LEASE(2 * SECOND));
    lend(&s, kvf_agent_push, 8, 1);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    letters_rule(LETTERS_PASS, s.p, KVF_MESSAGE_CALL, KVF_CALL_WRITTEN);
    assert_ok(kvf_agent_push_ready(s.p, s.theirs[0], NULL));
    world_until(&s.w, letters_met() >= 1);
    kvf_agent_close(lease_stop(&s.w.p.agents[1]));
    const world_outcome *failed = world_next(&s.w, s.d, s.ours[0]);
    assert_int_equal(failed->kind, KVF_EVENT_FAILED);
    assert_int_equal(failed->record_count, 0);
    (void)kvf_agent_cancel(s.p, s.theirs[0]);
    (void)world_next(&s.w, s.p, s.theirs[0]);
    lease_close(&s);
}

static void where_nothing_is_read_there_are_none(void **state) {
    (void)state;
    scene s;
    scene_open(&s, attention(2, 8, 8), P_OF(2), D_OF(1), NULL);
    lend(&s, kvf_agent_hold, 9, 1);
    world_request_empty(&s.wanted);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    assert_int_equal(world_done(&s.w, s.d, s.ours[0])->record_count, 0);
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

/* ---- limits --------------------------------------------------------------------------------------- */

static void records_beyond_the_limits_are_refused_by_the_call(void **state) {
    (void)state;
    scene s;
    static uint8_t data[KVF_MAX_RECORDS_BYTES + 1];
    kvf_record many[KVF_MAX_RECORDS + 1];
    for (uint32_t i = 0; i < COUNT_OF(many); i++)
        many[i] = (kvf_record){.name = "x", .data = data};
    static const start calls[] = {kvf_agent_hold, kvf_agent_push};
    scene_open(&s, attention(2, 8, 8), P_OF(1), D_OF(1), NULL);
    for (size_t c = 0; c < COUNT_OF(calls); c++) {
        kvf_agent_request request = s.held.request;
        uint64_t ticket;
        request.records = many;
        request.record_count = COUNT_OF(many);
        assert_fails(calls[c](s.p, &request, &ticket), KVF_E_RANGE, "records has 65", "0 to 64");
        request.record_count = 2;
        many[0].size = KVF_MAX_RECORDS_BYTES;
        many[1].size = 1;
        assert_fails(calls[c](s.p, &request, &ticket), KVF_E_RANGE, "records[1]", "131072");
        many[0].size = many[1].size = 0;
        many[1].name = "";
        assert_fails(calls[c](s.p, &request, &ticket), KVF_E_RANGE, "records[1]", "name has 0 bytes",
                     "1 to 64");
        many[1].name = "a\nb";
        assert_fails(calls[c](s.p, &request, &ticket), KVF_E_RANGE, "records[1]", "0x0a");
        many[1].name = "x";
        many[1].begin = 1;
        assert_fails(calls[c](s.p, &request, &ticket), KVF_E_RANGE, "records[1]", "[1, 0)");
        many[1].begin = 0;
        many[1].name = NULL;
        assert_fails(calls[c](s.p, &request, &ticket), KVF_E_INVALID, "records[1]", "name is NULL");
        many[1] = many[0];
        request.records = NULL;
        assert_fails(calls[c](s.p, &request, &ticket), KVF_E_INVALID, "records is NULL", "count of 2");
        assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_FREE);
    }
    scene_close(&s);
}

static void a_chunk_that_is_refused_leaves_the_records_as_they_were(void **state) {
    (void)state;
    scene s;
    static uint8_t data[KVF_MAX_RECORDS_BYTES];
    kvf_record more[KVF_MAX_RECORDS] = {{0}};
    for (uint32_t i = 0; i < COUNT_OF(more); i++)
        more[i] = (kvf_record){.name = "x", .data = data, .size = i == 0 ? sizeof data - 40000 : 0};
    scene_open(&s, attention(2, 8, 8), P_OF(1), D_OF(1), NULL);
    lend(&s, kvf_agent_push, 2, 1);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    kvf_push_chunk chunk = *CHUNK(0, 50, 2);
    chunk.records = more;
    chunk.record_count = KVF_MAX_RECORDS - KINDS + 1;
    assert_fails(kvf_agent_push_ready(s.p, s.theirs[0], &chunk), KVF_E_RANGE, "records has 65");
    chunk.record_count = 2;
    chunk.begin = 60;
    assert_fails(kvf_agent_push_ready(s.p, s.theirs[0], &chunk), KVF_E_RANGE, "[60, 50)");
    chunk.begin = 0;
    chunk.after = &(kvf_ready_event){.struct_size = sizeof(kvf_ready_event), .kind = (kvf_ready_kind)77};
    assert_true(kvf_agent_push_ready(s.p, s.theirs[0], &chunk) != KVF_OK); /* not for its records */
    assert_ok(kvf_agent_push_ready(s.p, s.theirs[0], NULL));
    assert_records(&s, 2, (uint32_t[]){1});
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

static void a_push_that_fails_sends_no_records(void **state) {
    (void)state;
    rights s;
    world_request wanted, pushed;
    uint64_t push;
    rights_open(&s);
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    world_request_make(&s.w, &s.w.p, "a", 40, 0, 1, &pushed);
    pushed.request.records = &(const kvf_record){.name = "mark"};
    pushed.request.record_count = 1;
    assert_int_equal(rights_say(&s, &s.rightful, rights_expect("a", 1, &wanted)), KVF_OK);
    world_push(&s.w.p, &pushed, &push);
    assert_ok(kvf_agent_cancel(s.p, push));
    speaker_run_for(&s.w, &s.rightful, 10 * MS);
    assert_int_equal(s.rightful.call, KVF_CALL_WRITTEN);
    assert_int_equal(s.rightful.status, KVF_E_CANCELLED);
    assert_int_equal(s.rightful.records, 0);
    rights_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(readers_have_the_records_of_all_that_they_read_from),
        cmocka_unit_test(records_that_a_reader_gives_itself_are_not_among_them),
        cmocka_unit_test(consumers_that_are_written_to_have_the_records_of_all_writers),
        cmocka_unit_test(the_records_of_two_ranks_are_joined_however_few_they_are),
        cmocka_unit_test(a_push_gathers_the_records_of_its_chunks),
        cmocka_unit_test(each_of_several_consumers_has_them),
        cmocka_unit_test(lost_repeated_and_late_messages_change_no_record),
        cmocka_unit_test_teardown(an_attempt_that_ends_early_has_none_and_the_next_one_all,
                                  stop_counting_memory),
        cmocka_unit_test(of_a_producer_that_dies_half_way_nothing_is_told),
        cmocka_unit_test(where_nothing_is_read_there_are_none),
        cmocka_unit_test(records_beyond_the_limits_are_refused_by_the_call),
        cmocka_unit_test(a_push_that_fails_sends_no_records),
        cmocka_unit_test(a_chunk_that_is_refused_leaves_the_records_as_they_were),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
