#include "element.h"

#include <math.h>

/* The numbers of bits of a type's exponent and fraction; one more bit is the sign. */
typedef struct form {
    int exponent, fraction;
} form;

static form form_of(kvf_dtype dtype) {
    return dtype == KVF_DTYPE_F16 ? (form){5, 10} : dtype == KVF_DTYPE_BF16 ? (form){8, 7} : (form){8, 23};
}

static uint32_t low_bits(uint32_t bits, int count) {
    return bits & ((UINT32_C(1) << count) - 1);
}

/* Converts an infinity, or a NaN, which becomes quiet and keeps the first bits of its payload. */
static uint32_t without_value(form to, uint32_t payload, form from) {
    const uint32_t top = low_bits(UINT32_MAX, to.exponent) << to.fraction;
    if (payload == 0)
        return top;
    const int wider = to.fraction - from.fraction;
    return top | UINT32_C(1) << (to.fraction - 1) | (wider > 0 ? payload << wider : payload >> -wider);
}

uint32_t element_as(kvf_dtype from_type, uint32_t bits, kvf_dtype to_type) {
    const form from = form_of(from_type), to = form_of(to_type);
    const uint32_t sign = bits >> (from.exponent + from.fraction) << (to.exponent + to.fraction);
    const uint32_t exponent = low_bits(bits >> from.fraction, from.exponent),
                   fraction = low_bits(bits, from.fraction);
    if (exponent == low_bits(UINT32_MAX, from.exponent))
        return sign | without_value(to, fraction, from);
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
    const uint32_t infinity = low_bits(UINT32_MAX, to.exponent) << to.fraction;
    return sign | (power > to_bias || out > infinity ? infinity : out);
}
