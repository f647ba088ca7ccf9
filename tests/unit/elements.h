/*
 * The values of f32, f16, bf16, f8_e4m3 and f8_e5m2 elements, and what they become in another of these types: computed
 * from the fields of a number, and by searching for the nearest of all elements of a type. This shares no code with the
 * library's kernels.
 */
#ifndef KVF_TEST_ELEMENTS_H
#define KVF_TEST_ELEMENTS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <kvferry/model.h>

/* The fields of a type. Sign, exponent and fraction make its width. */
typedef struct fields {
    unsigned exponent, fraction;
    bool finite; /* no infinity; of the numbers with the highest exponent only the last is a NaN */
    bool clips;  /* numbers that are too large become the greatest */
} fields;

static inline fields fields_of(kvf_dtype type) {
    switch ((int)type) {
    case KVF_DTYPE_F16:
        return (fields){5, 10, false, false};
    case KVF_DTYPE_BF16:
        return (fields){8, 7, false, false};
    case KVF_DTYPE_F8_E4M3:
        return (fields){4, 3, true, true};
    case KVF_DTYPE_F8_E5M2:
        return (fields){5, 2, false, true};
    default:
        return (fields){8, 23, false, false};
    }
}

static inline unsigned fraction_bits(kvf_dtype type) {
    return fields_of(type).fraction;
}
static inline unsigned width(kvf_dtype type) {
    return 1 + fields_of(type).exponent + fields_of(type).fraction;
}

/* The magnitude's bits from which on it is no finite number. */
static inline uint32_t end_of_numbers(kvf_dtype type) {
    const fields f = fields_of(type);
    return f.finite ? (1u << (f.exponent + f.fraction)) - 1 : ((1u << f.exponent) - 1) << f.fraction;
}

/* The value of an element; NAN for a NaN. */
static inline double value_of(kvf_dtype type, uint32_t bits) {
    const fields f = fields_of(type);
    const uint32_t magnitude = bits & ((1u << (f.exponent + f.fraction)) - 1), end = end_of_numbers(type);
    const int bias = (1 << (f.exponent - 1)) - 1, exponent = (int)(magnitude >> f.fraction);
    const double fraction = ldexp((double)(magnitude & ((1u << f.fraction) - 1)), -(int)f.fraction);
    const double sign = bits >> (f.exponent + f.fraction) & 1 ? -1 : 1;
    if (magnitude >= end)
        return f.finite || magnitude > end ? (double)NAN : sign * (double)INFINITY;
    return sign * (exponent ? ldexp(1 + fraction, exponent - bias) : ldexp(fraction, 1 - bias));
}

/* What a NaN becomes: a quiet NaN with the same sign and the first bits of its payload, if both types have any. */
static inline uint32_t nan_of(kvf_dtype from, uint32_t bits, kvf_dtype to) {
    const fields f = fields_of(from), g = fields_of(to);
    const uint32_t sign = bits >> (width(from) - 1) << (width(to) - 1);
    const uint32_t payload = f.finite ? 0 : bits & ((1u << f.fraction) - 1);
    const uint32_t kept = g.fraction >= f.fraction ? payload << (g.fraction - f.fraction)
                                                   : payload >> (f.fraction - g.fraction);
    return sign | end_of_numbers(to) | (g.finite ? 0 : 1u << (g.fraction - 1) | kept);
}

/* The nearest element of a type of 16 or 8 bits, by bisection among the magnitudes, which ascend with their bits. */
static inline uint32_t nearest(kvf_dtype type, double value) {
    const double magnitude = fabs(value);
    const uint32_t end = end_of_numbers(type), most = fields_of(type).clips ? end - 1 : end;
    const uint32_t sign = signbit(value) ? 1u << (width(type) - 1) : 0;
    uint32_t low = 0, high = end; /* value_of(low) <= magnitude */
    if (isinf(value))
        return sign | most;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (value_of(type, middle) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    if (high > most)
        return sign | most;
    /* The value above the greatest element is taken to be as far away as the element below it. */
    const double below = value_of(type, low);
    const double above = high == end ? 2 * below - value_of(type, low - 1) : value_of(type, high);
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
