/*
 * Random numbers that a seed determines: the same on every machine.
 */
#ifndef KVF_PROPERTY_RANDOM_H
#define KVF_PROPERTY_RANDOM_H

#include <stdbool.h>
#include <stdint.h>

/** A bijection of 64 bits that spreads every input bit over the output (splitmix64). */
static inline uint64_t mix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

typedef struct rng {
    uint64_t state;
} rng;

static inline uint64_t rng_next(rng *r) {
    r->state += 0x9e3779b97f4a7c15u;
    return mix64(r->state);
}

/** 0 .. bound - 1; 0 if bound is 0. */
static inline uint32_t rng_below(rng *r, uint32_t bound) {
    return bound ? (uint32_t)((rng_next(r) >> 32) * bound >> 32) : 0;
}

/** low .. high, both included. */
static inline uint32_t rng_between(rng *r, uint32_t low, uint32_t high) {
    return low + rng_below(r, high - low + 1);
}

static inline bool rng_chance(rng *r, uint32_t percent) {
    return rng_below(r, 100) < percent;
}

#endif
