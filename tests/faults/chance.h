/*
 * Random numbers that a seed determines.
 */
#ifndef KVF_FAULTS_CHANCE_H
#define KVF_FAULTS_CHANCE_H

#include <stdbool.h>
#include <stdint.h>

/** A bijection of 64 bits that spreads every input bit over the output (splitmix64). */
static inline uint64_t chance_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

typedef struct chance {
    uint64_t state;
} chance;

static inline uint64_t chance_draw(chance *c) {
    return chance_mix(c->state++);
}

/** low .. high, both included. */
static inline uint32_t chance_between(chance *c, uint32_t low, uint32_t high) {
    return low + (uint32_t)(chance_draw(c) % (high - low + 1u));
}

static inline bool chance_per_mille(chance *c, uint32_t often) {
    return chance_draw(c) % 1000 < often;
}

#endif
