/*
 * Compares each converting loop with numbers: the value of every element of 16 and of 8 bits is computed from its
 * fields, and the nearest element of another type is searched among all of its values.
 */
#include <fenv.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cmocka.h>

#include "elements.h"
#include "kernel/convert.h"

#define ALL 65536u

typedef void (*convert)(kvf_dtype from, kvf_dtype to, const void *in, void *out, size_t count, bool past);

static void for_each_loop(void (*test)(convert)) {
    const kvf_convert_loop *loop;
    for (uint32_t i = 0; (loop = kvf_kernel_convert_loop(i)) != NULL; i++) {
        print_message("loop: %s\n", loop->name);
        test(loop->convert);
    }
}

static const kvf_dtype types[] = {KVF_DTYPE_F32, KVF_DTYPE_F16, KVF_DTYPE_BF16, KVF_DTYPE_F8_E4M3,
                                  KVF_DTYPE_F8_E5M2};
#define NARROW 1u /* the first of them that is not f32 */
#define TYPES (sizeof types / sizeof *types)

static uint32_t bits_at(kvf_dtype type, const void *elements, size_t i) {
    const uint32_t bytes = kvf_dtype_bits(type) / 8;
    uint32_t bits = 0;
    memcpy(&bits, (const unsigned char *)elements + i * bytes, bytes);
    return bits;
}

/* ---- from 16 and 8 bits: all elements ---------------------------------------------------------- */

static void expect(kvf_dtype from, uint32_t bits, kvf_dtype to, uint32_t got) {
    const uint32_t wanted = element_as(from, bits, to);
    if (got != wanted) {
        print_error("%s %#x becomes %s %#x; wanted is %#x\n", kvf_dtype_name(from), bits, kvf_dtype_name(to),
                    got, wanted);
        fail();
    }
}

static uint32_t all_of(kvf_dtype type, void *out) {
    const uint32_t bytes = kvf_dtype_bits(type) / 8, count = bytes == 2 ? ALL : 256;
    for (uint32_t i = 0; i < count; i++)
        memcpy((unsigned char *)out + i * bytes, &i, bytes);
    return count;
}

static void test_all_narrow(convert run) {
    static uint32_t in[ALL], out[ALL];
    for (size_t f = NARROW; f < TYPES; f++) {
        const uint32_t count = all_of(types[f], in);
        for (size_t t = 0; t < TYPES; t++) {
            if (t == f)
                continue;
            run(types[f], types[t], in, out, count, t % 2 != 0);
            for (uint32_t i = 0; i < count; i++)
                expect(types[f], i, types[t], bits_at(types[t], out, i));
        }
    }
}

static void every_element_of_16_and_8_bits_becomes_the_nearest_of_the_other_types(void **state) {
    (void)state;
    for_each_loop(test_all_narrow);
}

/* ---- from f32 --------------------------------------------------------------------------------- */

/* The numbers around every element of the narrow type, and around the middle to the next, at which the rounding
 * changes. */
static size_t edges_of(kvf_dtype type, uint32_t *out) {
    size_t n = 0;
    for (uint32_t i = 0; i < 1u << width(type); i++) {
        uint32_t bits;
        const double value = value_of(type, i);
        const float exact = (float)value;
        memcpy(&bits, &exact, sizeof bits);
        if (isnan(value))
            bits =
                /* not a quiet NaN, if a bit of its payload is left */
                nan_of(type, i, KVF_DTYPE_F32) & ~0x400000u;
        const uint32_t half = 1u << (22 - fraction_bits(type));
        const uint32_t near[] = {bits, bits + 1, bits - 1, bits + half, bits + half + 1, bits + half - 1};
        for (size_t k = 0; k < sizeof near / sizeof *near; k++)
            out[n++] = near[k];
    }
    return n;
}

static void test_f32(convert run) {
    static uint32_t in[ALL * 6 + 4096];
    static uint16_t got[ALL * 6 + 4096];
    for (size_t t = NARROW; t < TYPES; t++) {
        size_t n = edges_of(types[t], in);
        for (uint32_t i = 0; i < 4096; i++) /* every exponent, both signs, eight fractions */
            in[n++] = i << 20 | i * 2654435761u >> 12;
        run(KVF_DTYPE_F32, types[t], in, got, n, t % 2 != 0);
        for (size_t i = 0; i < n; i++)
            expect(KVF_DTYPE_F32, in[i], types[t], bits_at(types[t], got, i));
    }
}

static void f32_is_rounded_to_the_nearest_and_to_the_even_one_half_way(void **state) {
    (void)state;
    for_each_loop(test_f32);
}

/* Some millions of f32 elements, and all 2^32 if KVF_CASES asks for at least as many cases as make check-long does. */
static void test_many_f32(convert run) {
    enum { AT_ONCE = 4096 };
    static uint32_t in[AT_ONCE];
    static uint16_t got[AT_ONCE], wanted[AT_ONCE];
    const char *cases = getenv("KVF_CASES");
    const uint64_t step = cases && strtoull(cases, NULL, 0) >= 100000 ? 1 : 997;
    for (size_t t = NARROW; t < TYPES; t++)
        for (uint64_t first = 0; first < 1ull << 32; first += AT_ONCE * step) {
            for (uint32_t i = 0; i < AT_ONCE; i++)
                in[i] = (uint32_t)(first + i * step);
            run(KVF_DTYPE_F32, types[t], in, got, AT_ONCE, false);
            kvf_convert_plain.convert(KVF_DTYPE_F32, types[t], in, wanted, AT_ONCE, false);
            assert_memory_equal(got, wanted, AT_ONCE * (kvf_dtype_bits(types[t]) / 8));
        }
}

static void every_loop_gives_the_same_bits_for_f32(void **state) {
    (void)state;
    for_each_loop(test_many_f32);
}

/* ---- modes of the thread ----------------------------------------------------------------------- */

/* Makes instructions take subnormal numbers for 0, and give 0 for them. */
static void flush_subnormals(bool flush) {
#if defined(__x86_64__)
    const unsigned int bits = 1u << 15 | 1u << 6; /* results; operands */
    _mm_setcsr(flush ? _mm_getcsr() | bits : _mm_getcsr() & ~bits);
#elif defined(__aarch64__)
    uint64_t modes;
    __asm__ volatile("mrs %0, fpcr" : "=r"(modes));
    modes = flush ? modes | 1u << 24 : modes & ~(1u << 24);
    __asm__ volatile("msr fpcr, %0" : : "r"(modes));
#else
    (void)flush;
#endif
}

/* The oracle computes with the thread's usual modes. */
static void convert_with_modes(convert run, int rounding, bool flush, kvf_dtype from, kvf_dtype to,
                               const void *in, size_t count) {
    static uint32_t got[ALL * 6];
    assert_int_equal(fesetround(rounding), 0);
    flush_subnormals(flush);
    run(from, to, in, got, count, false);
    flush_subnormals(false);
    assert_int_equal(fesetround(FE_TONEAREST), 0);
    for (size_t i = 0; i < count; i++)
        expect(from, bits_at(from, in, i), to, bits_at(to, got, i));
}

static void test_modes(convert run) {
    static const struct {
        int rounding;
        bool flush;
    } modes[] = {{FE_UPWARD, false}, {FE_DOWNWARD, false}, {FE_TOWARDZERO, false}, {FE_TONEAREST, true}};
    static uint32_t wide[ALL * 6], narrow[ALL];
    for (size_t t = NARROW; t < TYPES; t++) {
        const size_t edges = edges_of(types[t], wide), all = all_of(types[t], narrow);
        for (size_t m = 0; m < sizeof modes / sizeof *modes; m++) {
            convert_with_modes(run, modes[m].rounding, modes[m].flush, KVF_DTYPE_F32, types[t], wide, edges);
            for (size_t to = 0; to < TYPES; to++)
                if (to != t)
                    convert_with_modes(run, modes[m].rounding, modes[m].flush, types[t], types[to], narrow,
                                       all);
        }
    }
}

static void the_thread_s_modes_change_nothing(void **state) {
    (void)state;
    for_each_loop(test_modes);
}

/* ---- sizes and places ------------------------------------------------------------------------- */

static void check_tail(convert run, kvf_dtype from, kvf_dtype to, size_t count, bool past) {
    enum { BYTES = 4 * 600 };
    static unsigned char in[BYTES], got[BYTES] __attribute__((aligned(64))), wanted[BYTES];
    for (size_t i = 0; i < sizeof in; i++)
        in[i] = (unsigned char)(i * 37 + 11);
    const size_t at = count % 7, to_at = past ? count % 5 * (kvf_dtype_bits(to) == 8 ? 1 : 2) : count % 4;
    memset(got, 0xee, sizeof got);
    memset(wanted, 0xee, sizeof wanted);
    run(from, to, in + at, got + to_at, count, past);
    kvf_convert_plain.convert(from, to, in + at, wanted + to_at, count, past);
    assert_memory_equal(got, wanted, sizeof got);
}

static void test_tails(convert run) {
    for (size_t f = 0; f < TYPES; f++)
        for (size_t t = 0; t < TYPES; t++)
            for (size_t count = 0; count < 540 && f != t; count++)
                for (int past = 0; past < 2; past++)
                    check_tail(run, types[f], types[t], count, past);
}

static void any_number_at_any_address_is_converted_and_nothing_behind_it_written(void **state) {
    (void)state;
    for_each_loop(test_tails);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_element_of_16_and_8_bits_becomes_the_nearest_of_the_other_types),
        cmocka_unit_test(f32_is_rounded_to_the_nearest_and_to_the_even_one_half_way),
        cmocka_unit_test(every_loop_gives_the_same_bits_for_f32),
        cmocka_unit_test(the_thread_s_modes_change_nothing),
        cmocka_unit_test(any_number_at_any_address_is_converted_and_nothing_behind_it_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
