/*
 * Introductions in several messages: how many fit in one, and how they are put together again.
 */
#include "shapes.h"

#include "wire/gather.h"

#define MOST_IN_ONE (512u << 10) /* bytes of introductions */

/* ---- parts ----------------------------------------------------------------------------------- */

static void a_part_ends_before_the_first_that_does_not_fit(void **state) {
    (void)state;
    static const struct {
        size_t sizes[3];
        uint32_t first, count, end;
    } cases[] = {
        {{1, 1, 1}, 0, 0, 0},
        {{1, 1, 1}, 0, 3, 3},
        {{1, 1, 1}, 2, 3, 3},
        {{MOST_IN_ONE - 2, 1, 1}, 0, 3, 3},
        {{MOST_IN_ONE - 1, 1, 1}, 0, 3, 2},
        {{MOST_IN_ONE, 1, 1}, 0, 3, 1},
        {{MOST_IN_ONE + 1, 1, 1}, 0, 3, 1},           /* a part has at least one */
        {{MOST_IN_ONE, MOST_IN_ONE + 1, 1}, 1, 3, 2}, /* also if the part begins later */
        {{MOST_IN_ONE, MOST_IN_ONE - 1, 1}, 1, 3, 3},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        kvf_wire_buffer introductions[3] = {{0}};
        for (int n = 0; n < 3; n++)
            introductions[n].size = cases[i].sizes[n];
        assert_int_equal(kvf_gather_end(introductions, cases[i].first, cases[i].count), cases[i].end);
    }
}

/* ---- gathering ------------------------------------------------------------------------------- */

static const uint8_t one_digest[KVF_WIRE_DIGEST_BYTES] = {1}, other_digest[KVF_WIRE_DIGEST_BYTES] = {2};
static const kvf_bytes five[] = {{"a", 1}, {"bb", 2}, {"ccc", 3}, {"dddd", 4}, {"e", 1}};

static kvf_welcome ranks(uint32_t first, uint32_t count) {
    return (kvf_welcome){.incarnation = 7,
                         .rank_count = 4,
                         .first_rank = first,
                         .introductions = five + first,
                         .introduction_count = count,
                         .facts = "f"};
}

/* Takes a part, and returns whether all parts are there. */
static bool takes(kvf_gathering *gathering, const uint8_t *digest, kvf_welcome welcome) {
    bool complete = true;
    assert_ok(kvf_gather(gathering, digest, &welcome, &complete));
    return complete;
}

static void parts_are_put_together_in_order(void **state) {
    (void)state;
    kvf_gathering gathering = {0};
    assert_false(takes(&gathering, one_digest, ranks(2, 2))); /* the first ranks are missing */
    assert_null(gathering.introductions);
    assert_false(takes(&gathering, one_digest, ranks(0, 2)));
    assert_false(takes(&gathering, one_digest, ranks(0, 2))); /* the same part once more */
    assert_false(takes(&gathering, one_digest, ranks(3, 1))); /* too early */
    assert_int_equal(gathering.count, 2);
    assert_int_equal(gathering.bytes, 3);
    assert_true(takes(&gathering, one_digest, ranks(2, 2)));
    kvf_welcome last = ranks(2, 2), all = kvf_gathered(&gathering, &last);
    assert_int_equal(all.first_rank, 0);
    assert_int_equal(all.introduction_count, 4);
    assert_string_equal(all.facts, "f");
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(all.introductions[i].size, five[i].size);
        assert_memory_equal(all.introductions[i].data, five[i].data, five[i].size);
    }
    kvf_gather_free(&gathering);
    assert_null(gathering.introductions);
    assert_int_equal(gathering.count, 0);
}

/* The second part of another WELCOME is not put behind the first part of this one. */
static void introductions_of_another_welcome_begin_anew(void **state) {
    (void)state;
    kvf_welcome incarnation = ranks(2, 2), rank_count = ranks(2, 2);
    incarnation.incarnation++;
    rank_count.rank_count++;
    const struct {
        const uint8_t *digest;
        kvf_welcome welcome;
    } others[] = {{other_digest, ranks(2, 2)}, {one_digest, incarnation}, {one_digest, rank_count}};
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        kvf_gathering gathering = {0};
        assert_false(takes(&gathering, one_digest, ranks(0, 2)));
        assert_false(takes(&gathering, others[i].digest, others[i].welcome));
        assert_null(gathering.introductions);
        assert_false(takes(&gathering, one_digest, ranks(0, 2)));
        kvf_welcome from_the_first = others[i].welcome;
        from_the_first.first_rank = 0;
        from_the_first.introductions = five;
        from_the_first.introduction_count = 1;
        assert_false(takes(&gathering, others[i].digest, from_the_first));
        assert_int_equal(gathering.count, 1);
        kvf_gather_free(&gathering);
    }
}

static void more_ranks_than_there_are_are_refused(void **state) {
    (void)state;
    kvf_gathering gathering = {0};
    kvf_welcome welcome = ranks(0, 5);
    bool complete = true;
    assert_fails(kvf_gather(&gathering, one_digest, &welcome, &complete), KVF_E_PARSE,
                 "more than its 4 ranks");
    assert_false(complete);
    kvf_gather_free(&gathering);
}

static void introductions_have_a_most_of_bytes_in_all(void **state) {
    (void)state;
    uint8_t *most = calloc(KVF_GATHER_MAX_BYTES, 1);
    assert_non_null(most);
    const kvf_bytes full[] = {{most, KVF_GATHER_MAX_BYTES - 1}, {most, 1}, {most, 1}};
    kvf_gathering gathering = {0};
    kvf_welcome welcome = ranks(0, 2);
    welcome.introductions = full;
    assert_false(takes(&gathering, one_digest, welcome));
    assert_int_equal(gathering.bytes, KVF_GATHER_MAX_BYTES);
    welcome.first_rank = 2;
    welcome.introductions = full + 2;
    welcome.introduction_count = 1;
    bool complete = true;
    assert_fails(kvf_gather(&gathering, one_digest, &welcome, &complete), KVF_E_RANGE,
                 "first 2 ranks have more than 67108864 bytes");
    assert_false(complete);
    kvf_gather_free(&gathering);
    free(most);
}

static kvf_status gather_all(void *subject) {
    (void)subject;
    kvf_gathering gathering = {0};
    kvf_welcome welcome = ranks(0, 4);
    bool complete = true;
    kvf_status status = kvf_gather(&gathering, one_digest, &welcome, &complete);
    assert_int_equal(complete, status == KVF_OK);
    kvf_gather_free(&gathering);
    return status;
}

static void nothing_leaks_where_memory_ends(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    survive_every_refusal(&memory, gather_all, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_part_ends_before_the_first_that_does_not_fit),
        cmocka_unit_test(parts_are_put_together_in_order),
        cmocka_unit_test(introductions_of_another_welcome_begin_anew),
        cmocka_unit_test(more_ranks_than_there_are_are_refused),
        cmocka_unit_test(introductions_have_a_most_of_bytes_in_all),
        cmocka_unit_test_teardown(nothing_leaks_where_memory_ends, stop_counting_memory),
    };
    return cmocka_run_group_tests_name("wire_gather", tests, NULL, NULL);
}
