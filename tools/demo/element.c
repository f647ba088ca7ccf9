#include "element.h"

#include <math.h>

/* The numbers of bits of a type's exponent and fraction; one more bit is the sign. */
typedef struct form {
    int exponent, fraction;
    bool clips;      /* what is too large becomes the greatest number */
    bool only_a_nan; /* no infinity, and one NaN, whose bits are all set */
} form;

static form form_of(kvf_dtype dtype) {
    switch ((int)dtype) {
    case KVF_DTYPE_F16:
        return (form){.exponent = 5, .fraction = 10};
    case KVF_DTYPE_BF16:
        return (form){.exponent = 8, .fraction = 7};
    case KVF_DTYPE_F8_E4M3:
        return (form){.exponent = 4, .fraction = 3, .clips = true, .only_a_nan = true};
    case KVF_DTYPE_F8_E5M2:
        return (form){.exponent = 5, .fraction = 2, .clips = true};
    default:
        return (form){.exponent = 8, .fraction = 23};
    }
}

static uint32_t low_bits(uint32_t bits, int count) {
    return bits & ((UINT32_C(1) << count) - 1);
}

/* The first bits of a magnitude that are no number. */
static uint32_t end_of_numbers(form type) {
    return type.only_a_nan ? low_bits(UINT32_MAX, type.exponent + type.fraction)
                           : low_bits(UINT32_MAX, type.exponent) << type.fraction;
}

/* A number above the greatest of the type, or an infinity, becomes this. */
static uint32_t beyond(form to) {
    return end_of_numbers(to) - (to.clips ? 1 : 0);
}

/* Converts an infinity, or a NaN, which becomes quiet and keeps the first bits of its payload. */
static uint32_t without_value(form to, uint32_t magnitude, form from) {
    const uint32_t payload = low_bits(magnitude, from.fraction);
    if (payload == 0)
        return beyond(to);
    if (from.only_a_nan || to.only_a_nan)
        return end_of_numbers(to) | (to.only_a_nan ? 0 : UINT32_C(1) << (to.fraction - 1));
    const int wider = to.fraction - from.fraction;
    return end_of_numbers(to) | UINT32_C(1) << (to.fraction - 1) |
           (wider > 0 ? payload << wider : payload >> -wider);
}

uint32_t element_as(kvf_dtype from_type, uint32_t bits, kvf_dtype to_type) {
    const form from = form_of(from_type), to = form_of(to_type);
    const uint32_t sign = bits >> (from.exponent + from.fraction) << (to.exponent + to.fraction);
    const uint32_t magnitude = low_bits(bits, from.exponent + from.fraction),
                   exponent = magnitude >> from.fraction, fraction = low_bits(magnitude, from.fraction);
    if (magnitude >= end_of_numbers(from))
        return sign | without_value(to, magnitude, from);
    const int bias = (1 << (from.exponent - 1)) - 1, to_bias = (1 << (to.exponent - 1)) - 1;
    const double whole = exponent ? fraction + ldexp(1, from.fraction) : fraction;
    const double value = ldexp(whole, (exponent ? (int)exponent : 1) - bias - from.fraction);
    if (value == 0)
        return sign;
    /* The number in steps of the new type at that size. Of two equally near steps rint() takes the even one. */
    int power = ilogb(value);
    if (power < 1 - to_bias)
        power = 1 - to_bias;
    const double steps = rint(ldexp(value, to.fraction - power));
    /* Neighbouring numbers, up to infinity, have neighbouring bits: rounding up to a power of two is just a carry. */
    const uint32_t out = ((uint32_t)(power + to_bias - 1) << to.fraction) + (uint32_t)steps;
    const bool is_beyond = power > to_bias + (to.only_a_nan ? 1 : 0) || out >= end_of_numbers(to);
    return sign | (is_beyond ? beyond(to) : out);
}
