/* Compares each copying loop with a byte-by-byte copy, over sizes, alignments and tails. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "kernel/kernel.h"

#define SPACE 4096

typedef void (*copy_runs)(kvf_copy_way way, kvf_copy_bases bases, const kvf_run *runs, size_t count);

static unsigned char source[2][SPACE] __attribute__((aligned(64)));
static unsigned char moved[2][SPACE] __attribute__((aligned(64)));
static unsigned char expected[2][SPACE];
static unsigned char *const from[2] = {source[0], source[1]};
static unsigned char *const to[2] = {moved[0], moved[1]};

static void start(void) {
    for (size_t region = 0; region < 2; region++)
        for (size_t i = 0; i < SPACE; i++) {
            source[region][i] = (unsigned char)(i * 31 + region * 7 + 1);
            moved[region][i] = expected[region][i] = 0xee;
        }
}

static void check(copy_runs run_them, kvf_copy_way way, const kvf_run *runs, size_t count) {
    for (size_t i = 0; i < count; i++) {
        bool local = way == KVF_COPY_TO_LOCAL;
        uint32_t into = local ? runs[i].local_region : runs[i].remote_region;
        uint32_t of = local ? runs[i].remote_region : runs[i].local_region;
        uint64_t at = local ? runs[i].local_offset : runs[i].remote_offset;
        uint64_t begin = local ? runs[i].remote_offset : runs[i].local_offset;
        for (uint64_t byte = 0; byte < runs[i].bytes; byte++)
            expected[into][at + byte] = source[of][begin + byte];
    }
    run_them(way, (kvf_copy_bases){to, from}, runs, count);
    assert_memory_equal(moved, expected, sizeof moved);
}

static void for_each_loop(void (*test)(copy_runs)) {
    const kvf_copy_loop *loop;
    for (uint32_t i = 0; (loop = kvf_kernel_copy_loop(i)) != NULL; i++) {
        print_message("loop: %s\n", loop->name);
        test(loop->runs);
    }
}

static void test_sizes(copy_runs run_them) {
    for (uint64_t bytes = 0; bytes <= 1025; bytes++) {
        start();
        kvf_run run = {64, 128, bytes, 0, 1};
        check(run_them, KVF_COPY_TO_LOCAL, &run, 1);
    }
}

static void every_size_to_1025_is_copied_and_no_byte_beside_it(void **state) {
    (void)state;
    for_each_loop(test_sizes);
}

static void test_alignments(copy_runs run_them) {
    static const uint64_t sizes[] = {1, 63, 64, 65, 255, 256, 257, 320, 511, 1024, 1087};
    for (size_t size = 0; size < sizeof sizes / sizeof *sizes; size++)
        for (uint64_t local = 0; local < 65; local += 1 + local / 8)
            for (uint64_t remote = 0; remote < 65; remote += 1 + remote / 8) {
                start();
                kvf_run run = {1024 + local, 512 + remote, sizes[size], 1, 0};
                check(run_them, size % 2 ? KVF_COPY_TO_LOCAL : KVF_COPY_TO_REMOTE, &run, 1);
            }
}

static void every_alignment_of_both_sides_is_copied(void **state) {
    (void)state;
    for_each_loop(test_alignments);
}

static void test_lists(copy_runs run_them) {
    uint64_t state = 12345;
    for (int round = 0; round < 200; round++) {
        kvf_run runs[32];
        size_t count = 0;
        uint64_t next[2] = {0, 0};
        while (count < 32) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            uint32_t into = (uint32_t)(state >> 60) & 1;
            uint64_t bytes = (state >> 33) % (round % 2 ? 40 : 400);
            uint64_t begin = next[into] + (state >> 50) % 9;
            if (begin + bytes > SPACE)
                break;
            uint64_t of = (state >> 20) % (SPACE - bytes);
            bool local = round % 3 != 0;
            runs[count++] =
                local ? (kvf_run){begin, of, bytes, into, 1} : (kvf_run){of, begin, bytes, 0, into};
            next[into] = begin + bytes;
        }
        start();
        check(run_them, round % 3 ? KVF_COPY_TO_LOCAL : KVF_COPY_TO_REMOTE, runs, count);
    }
}

static void lists_of_runs_are_copied_both_ways(void **state) {
    (void)state;
    for_each_loop(test_lists);
}

static void the_chosen_loop_copies_few_and_many_bytes(void **state) {
    (void)state;
    const size_t bytes = 3u << 20;
    unsigned char *one = malloc(bytes), *other = calloc(bytes, 1);
    assert_non_null(one);
    assert_non_null(other);
    for (size_t i = 0; i < bytes; i++)
        one[i] = (unsigned char)(i >> 3);
    unsigned char *one_base[1] = {one}, *other_base[1] = {other};
    kvf_run runs[2] = {{100, 100, 1000, 0, 0}, {2000, 2000, bytes - 2000, 0, 0}};
    kvf_kernel_copy_runs(KVF_COPY_TO_LOCAL, (kvf_copy_bases){other_base, one_base}, runs, 1, 1000);
    assert_memory_equal(other + 100, one + 100, 1000);
    assert_int_equal(other[99] + other[1100], 0);
    kvf_kernel_copy_runs(KVF_COPY_TO_LOCAL, (kvf_copy_bases){other_base, one_base}, runs, 2, bytes - 1000);
    assert_memory_equal(other + 2000, one + 2000, bytes - 2000);
    free(one);
    free(other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_size_to_1025_is_copied_and_no_byte_beside_it),
        cmocka_unit_test(every_alignment_of_both_sides_is_copied),
        cmocka_unit_test(lists_of_runs_are_copied_both_ways),
        cmocka_unit_test(the_chosen_loop_copies_few_and_many_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
