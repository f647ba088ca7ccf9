/*
 * What moving is assumed to cost, by kind of transport.
 */
#include "plan/plan.h"

typedef struct assumed_cost {
    const char *kind;
    kvf_cost_model cost;
} assumed_cost;

/*
 * Orders of magnitude of one core of a current server: a copied run costs a call and the misses of two
 * scattered places, a one-sided operation of a fabric most of a microsecond to post and complete.
 */
static const assumed_cost costs[] = {
    {"shm", {.ns_per_run = 60, .ns_per_byte = 0.125, .ns_per_source = 5e3}},
    {"inproc", {.ns_per_run = 60, .ns_per_byte = 0.125, .ns_per_source = 1e3}},
    {"ucx", {.ns_per_run = 600, .ns_per_byte = 0.1, .ns_per_source = 20e3}},
};

const char *kvf_cost_assumed(const char *kind, kvf_cost_model *out) {
    size_t chosen = 0;
    for (size_t i = 0; kind && i < sizeof costs / sizeof *costs; i++)
        if (strcmp(costs[i].kind, kind) == 0)
            chosen = i;
    *out = costs[chosen].cost;
    return costs[chosen].kind;
}
