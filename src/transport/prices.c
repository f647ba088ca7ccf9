/*
 * The costs of kinds of transport: as their tables assume, until they are measured on this machine.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "transport/front.h"

#define BUDGET_NS 30000000u /* measuring takes some 5 ms if nothing else uses the processor */
#define MOST_KINDS 8u

/* For the whole process; indexed like kvf_fabric_at(). */
static struct {
    pthread_once_t once;
    _Atomic bool there; /* all fields below are final */
    kvf_cost_model cost[MOST_KINDS], apart[MOST_KINDS];
    kvf_copy_price copying;
    uint64_t took_ns;
} measured = {.once = PTHREAD_ONCE_INIT};

/* ---- measuring ------------------------------------------------------------------------------- */

void kvf_cost_price(kvf_cost_model *cost, const kvf_copy_price *price) {
    if (!(price->ns_per_byte > 0))
        return;
    cost->ns_per_run = price->ns_per_piece;
    cost->ns_per_byte = price->ns_per_byte;
}

static kvf_copy_price copying_assumed(void) {
    return (kvf_copy_price){.ns_per_piece = 6,
                            .ns_per_byte = 0.15}; /* orders of magnitude, beyond the caches */
}

static void measure_all(void) {
    kvf_yardstick yardstick;
    const kvf_fabric *fabric;
    const uint64_t begin = kvf_now(&kvf_monotonic);
    const bool open = kvf_yardstick_open(&yardstick, BUDGET_NS) == KVF_OK;
    measured.copying = copying_assumed();
    if (open)
        (void)kvf_yardstick_boxes(&yardstick, &measured.copying);
    for (uint32_t i = 0; i < MOST_KINDS && (fabric = kvf_fabric_at(i)) != NULL; i++) {
        measured.cost[i] = fabric->kind.cost;
        measured.apart[i] = fabric->apart.cost;
        if (open && fabric->measure)
            fabric->measure(&yardstick, &measured.cost[i], &measured.apart[i]);
    }
    kvf_yardstick_close(&yardstick);
    measured.took_ns = kvf_now(&kvf_monotonic) - begin;
    atomic_store_explicit(&measured.there, true, memory_order_release);
}

uint64_t kvf_cost_calibrate(void) {
    (void)pthread_once(&measured.once, measure_all);
    return measured.took_ns;
}

static bool is_measured(void) {
    return atomic_load_explicit(&measured.there, memory_order_acquire);
}

/* ---- looking up ------------------------------------------------------------------------------ */

kvf_copy_price kvf_cost_copying(void) {
    return is_measured() ? measured.copying : copying_assumed();
}

static bool reaches_host_memory(const kvf_transport_kind *kind) {
    return kind->reach == KVF_REACH_HOST && kind->memory_kinds & 1u << KVF_MEMORY_HOST;
}

/* The fabric whose name, or whose `apart` name, is `kind`; otherwise the best one for memory of this host. */
static const kvf_fabric *find(const char *kind, bool *apart, uint32_t *place) {
    const kvf_fabric *chosen = NULL, *fabric;
    *apart = false;
    *place = 0;
    for (uint32_t i = 0; (fabric = kvf_fabric_at(i)) != NULL; i++) {
        *apart = kind && fabric->apart.name && strcmp(kind, fabric->apart.name) == 0;
        if (*apart || (kind && strcmp(kind, fabric->kind.name) == 0)) {
            *place = i;
            return fabric;
        }
        if (!chosen && reaches_host_memory(&fabric->kind)) {
            chosen = fabric;
            *place = i;
        }
    }
    return chosen;
}

const char *kvf_cost_assumed(const char *kind, kvf_cost_model *out) {
    bool apart;
    uint32_t place;
    const kvf_fabric *fabric = find(kind, &apart, &place);
    if (is_measured() && place < MOST_KINDS)
        *out = apart ? measured.apart[place] : measured.cost[place];
    else
        *out = apart ? fabric->apart.cost : fabric->kind.cost;
    return apart ? fabric->apart.name : fabric->kind.name;
}
