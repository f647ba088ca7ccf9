/* Lists of runs in the messages of the "messages" fabric: what they name, how long they are, and those that lie. */
#include "transport/messages/messages_wire.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "transport_pair.h"

static const kvf_memory memory_of_two[] = {{.bytes = 100000}, {.bytes = 0}, {.bytes = UINT64_MAX - 5}};

static void assert_list(const unsigned char *list, size_t bytes, uint64_t total, kvf_status status,
                        const char *word) {
    assert_int_equal(kvf_messages_list_check(list, bytes, total, memory_of_two, 3), status);
    if (status && !strstr(kvf_error_detail(), word))
        fail_msg("\"%s\" has no \"%s\"", kvf_error_detail(), word);
}

/* Finds where byte `at` of the data lies. */
static void find_byte(const kvf_run *runs, size_t count, uint64_t at, uint32_t *region, uint64_t *offset) {
    size_t i = 0;
    while (i < count && at >= runs[i].bytes)
        at -= runs[i++].bytes;
    assert_true(i < count);
    *region = runs[i].remote_region;
    *offset = runs[i].remote_offset + at;
}

static void a_list_names_the_bytes_it_was_made_of(void **state) {
    (void)state;
    static kvf_run runs[400], again[400];
    static unsigned char list[400 * MESSAGES_RUN_BYTES_MAX];
    for (uint64_t seed = 1; seed < 200; seed++) {
        uint64_t chance = seed * 7919, total = 0;
        size_t count = 1 + draw(&chance, 399), taken = 0, here;
        for (size_t i = 0; i < count; i++) {
            runs[i] = (kvf_run){.remote_offset = draw(&chance, 90000), .bytes = draw(&chance, 40)};
            runs[i].remote_region = draw(&chance, 3) ? 0 : 2;
            /* repeats the last step: also backwards, and for runs that touch */
            if (i > 1 && draw(&chance, 3)) {
                runs[i] = runs[i - 1];
                runs[i].remote_offset += runs[i - 1].remote_offset - runs[i - 2].remote_offset;
                if (runs[i].remote_offset > 90000)
                    runs[i].remote_offset = runs[i - 1].remote_offset;
            }
            total += runs[i].bytes;
        }
        size_t bytes = kvf_messages_list_write(runs, count, list);
        assert_list(list, bytes, total, KVF_OK, "");
        assert_list(list, bytes, total + 1, KVF_E_PARSE, "fewer bytes than the request");
        if (total > 0)
            assert_list(list, bytes, total - 1, KVF_E_PARSE, "more than the");
        kvf_messages_walk walk = {.from = {list, bytes, false}};
        while ((here = kvf_messages_walk_runs(&walk, again + taken, 7)) > 0)
            taken += here;
        assert_int_equal(walk.at, total);
        for (uint64_t at = 0; at < total; at += 1 + draw(&chance, 9)) {
            uint32_t regions[2];
            uint64_t offsets[2];
            find_byte(runs, count, at, &regions[0], &offsets[0]);
            find_byte(again, taken, at, &regions[1], &offsets[1]);
            assert_int_equal(regions[0], regions[1]);
            assert_int_equal(offsets[0], offsets[1]);
        }
    }
}

/* A head of 256 bytes in each of 4096 tokens of 2 KiB is a dozen bytes; any 4096 runs take at most 7 bytes each. */
static void a_regular_list_is_a_dozen_bytes_and_any_other_short(void **state) {
    (void)state;
    static kvf_run runs[4096];
    static unsigned char list[MESSAGES_LIST_BYTES];
    uint64_t chance = 5;
    for (size_t i = 0; i < 4096; i++)
        runs[i] = (kvf_run){.remote_offset = 512 + i * 2048, .bytes = 256};
    assert_true(kvf_messages_list_write(runs, 4096, list) <= 12);
    for (size_t i = 0; i < 4096; i++)
        runs[i].remote_offset = draw(&chance, 1u << 30);
    assert_true(kvf_messages_list_write(runs, 4096, list) <= 4096 * 7);
    for (size_t i = 0; i < 4096; i++)
        runs[i].remote_offset = i * 256; /* they touch */
    assert_true(kvf_messages_list_write(runs, 4096, list) <= 6);
}

#define ALL_BITS 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01
#define BIT_63 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01

static void lists_that_lie_are_refused_with_their_run(void **state) {
    (void)state;
    static const struct {
        unsigned char list[48];
        size_t bytes;
        uint64_t total;
        kvf_status status;
        const char *word;
    } cases[] = {
        {{2, 10, 0}, 3, 10, KVF_OK, ""},
        {{2, 10}, 2, 10, KVF_E_PARSE, "malformed"},               /* no offset */
        {{8, 10, 0}, 3, 10, KVF_E_PARSE, "malformed"},            /* an unknown flag */
        {{0, 0}, 2, 0, KVF_E_PARSE, "malformed"},                 /* runs of no bytes */
        {{2, 10, 1}, 3, 10, KVF_E_RANGE, "run 0"},                /* begins at -1 */
        {{2, 10, ALL_BITS}, 12, 10, KVF_E_RANGE, "run 0"},        /* far below 0 */
        {{3, 1, 10, 0}, 4, 10, KVF_E_NOT_REGISTERED, "region 1"}, /* the region was unregistered */
        {{3, 3, 10, 0}, 4, 10, KVF_E_NOT_REGISTERED, "region 3"},
        {{3, 0xff, 0xff, 0xff, 0xff, 0x1f, 10, 0}, 8, 10, KVF_E_PARSE, "malformed"}, /* 33 bits */
        {{6, 10, 0, 3, 20}, 5, 30, KVF_OK, ""},
        {{6, 10, 0, 3, 19}, 5, 30, KVF_E_RANGE, "run 0"},           /* descends from 0 */
        {{6, 10, 40, 3, 19}, 5, 30, KVF_OK, ""},                    /* descends to 0 */
        {{6, 10, 38, 3, 19}, 5, 30, KVF_E_RANGE, "run 0"},          /* descends to -1 */
        {{6, 10, 0, 0, 20}, 5, 0, KVF_E_PARSE, "malformed"},        /* no runs */
        {{6, 10, 0, BIT_63, 20}, 14, 30, KVF_E_PARSE, "more than"}, /* 2^63 runs */
        {{6, 10, 0, ALL_BITS, 20}, 14, 30, KVF_E_PARSE, "more than"},
        {{6, 1, 0, 0x81, 0x40, 0}, 6, 8193, KVF_E_PARSE, "more than 8192 runs"},
        {{6, 10, 0, 3, ALL_BITS}, 14, 30, KVF_E_RANGE, "run 0"}, /* 2^63 apart, downwards */
        {{2, ALL_BITS, 0}, 12, 10, KVF_E_PARSE, "more than the 10 bytes"},
        {{3, 2, ALL_BITS, 0}, 13, UINT64_MAX, KVF_E_RANGE, "run 0"}, /* longer than its region */
        /* relative to the end of the first run */
        {{2, 10, 0, 0, ALL_BITS}, 14, 20, KVF_E_RANGE, "run 1"},
        {{2, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0},
         13,
         10,
         KVF_E_PARSE,
         "malformed"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_list(cases[i].list, cases[i].bytes, cases[i].total, cases[i].status, cases[i].word);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_list_names_the_bytes_it_was_made_of),
        cmocka_unit_test(a_regular_list_is_a_dozen_bytes_and_any_other_short),
        cmocka_unit_test(lists_that_lie_are_refused_with_their_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
