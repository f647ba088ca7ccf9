/*
 * The values of f32, f16 and bf16 elements, and what they become in another of these types: computed from the fields of
 * a number, and by searching for the nearest of all elements of a type. This shares no code with the library's kernels.
 */
#ifndef KVF_TEST_ELEMENTS_H
#define KVF_TEST_ELEMENTS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <kvferry/model.h>

static inline unsigned fraction_bits(kvf_dtype type) {
    return type == KVF_DTYPE_F16 ? 10 : type == KVF_DTYPE_BF16 ? 7 : 23;
}
static inline unsigned exponent_bits(kvf_dtype type) {
    return type == KVF_DTYPE_F16 ? 5 : 8;
}
static inline unsigned width(kvf_dtype type) {
    return 1 + exponent_bits(type) + fraction_bits(type);
}

/* The value of an element; NAN for a NaN. */
static inline double value_of(kvf_dtype type, uint32_t bits) {
    const unsigned f = fraction_bits(type), e = exponent_bits(type);
    const int bias = (1 << (e - 1)) - 1, top = (1 << e) - 1;
    const int exponent = (int)(bits >> f) & top;
    const double fraction = ldexp((double)(bits & ((1u << f) - 1)), -(int)f);
    const double sign = bits >> (e + f) & 1 ? -1 : 1;
    if (exponent == top)
        return fraction != 0 ? (double)NAN : sign * (double)INFINITY;
    return sign * (exponent ? ldexp(1 + fraction, exponent - bias) : ldexp(fraction, 1 - bias));
}

/* What a NaN becomes: a quiet NaN with the same sign and the first bits of its payload. */
static inline uint32_t nan_of(kvf_dtype from, uint32_t bits, kvf_dtype to) {
    const unsigned f = fraction_bits(from), g = fraction_bits(to);
    const uint32_t sign = bits >> (width(from) - 1), payload = bits & ((1u << f) - 1);
    const uint32_t kept = g >= f ? payload << (g - f) : payload >> (f - g);
    const uint32_t top = ((1u << exponent_bits(to)) - 1) << g;
    return sign << (width(to) - 1) | top | 1u << (g - 1) | kept;
}

/* The nearest element of a 16-bit type, by bisection among the magnitudes, which ascend with their bits. */
static inline uint32_t nearest(kvf_dtype type, double value) {
    const double magnitude = fabs(value);
    const uint32_t infinite = ((1u << exponent_bits(type)) - 1) << fraction_bits(type);
    const uint32_t sign = signbit(value) ? 1u << (width(type) - 1) : 0;
    uint32_t low = 0, high = infinite; /* value_of(low) <= magnitude */
    if (isinf(value))
        return sign | infinite;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (value_of(type, middle) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    /* The value above the greatest element is taken to be as far away as the element below it. */
    const double below = value_of(type, low);
    const double above = high == infinite ? 2 * below - value_of(type, low - 1) : value_of(type, high);
    const double to_below = magnitude - below, to_above = above - magnitude;
    if (to_below != to_above)
        return sign | (to_below < to_above ? low : high);
    return sign | (low % 2 == 0 ? low : high);
}

/** The bits of an element in another type. */
static inline uint32_t element_as(kvf_dtype from, uint32_t bits, kvf_dtype to) {
    const double value = value_of(from, bits);
    if (from == to)
        return bits;
    if (isnan(value))
        return nan_of(from, bits, to);
    if (to != KVF_DTYPE_F32)
        return nearest(to, value);
    const float exact = (float)value; /* f32 has every value of the shorter types */
    uint32_t out;
    memcpy(&out, &exact, sizeof out);
    return out;
}

/** The same in memory, in little endian; returns the size of the new element in bytes. */
static inline uint32_t element_move(kvf_dtype from, const uint8_t *in, kvf_dtype to, uint8_t *out) {
    uint32_t bits = 0, made;
    memcpy(&bits, in, kvf_dtype_bits(from) / 8);
    made = element_as(from, bits, to);
    memcpy(out, &made, kvf_dtype_bits(to) / 8);
    return kvf_dtype_bits(to) / 8;
}

#endif
