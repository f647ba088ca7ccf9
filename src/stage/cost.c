#include "stage/cost.h"

#include <math.h>

#include "base/list.h"
#include "model/model.h"
#include "plan/plan.h"
#include "stage/message.h"
#include "stage/stream.h"

#define NOTICES_PER_SLOT 2.0   /* lent and returned */
#define NOTICES_PER_FLOW 4.0   /* opened, accepted, ended by both */
#define NOTICE_RUNS 2.0        /* the cost of a notification, in operations of the fabric */
#define NS_PER_NEAR_NOTICE 5e3 /* on one host */
/* Costs of a device that gathers and scatters, with the four blocks of threads that a stage gives it: measured on one
 * NVIDIA H100 (80 GB HBM3, PCIe 5, driver 580.159, 27 November 2026; docs/performance.md). Runs below 64 B, other
 * devices, and several slots at once were not measured. */
#define NS_PER_BYTE_TO_HOST (1 / 51.0) /* 0.93 of the driver's copy of 55 GB/s, both ways, from 1 KiB on */
#define NS_PER_PIECE_TO_HOST 0.3       /* runs of 256 B and 64 B: gather 0 and 0.2, scatter 0.3 and 0.8 */
#define NS_PER_BYTE_IN_DEVICE (1 / 136.0)
#define NS_PER_PIECE_IN_DEVICE 0.8  /* runs of 256 B and 64 B: 0.7 and 1.0 */
#define NS_PER_DRIVER_CALL 3200.0   /* a fifth of the 16 us that submitting 32 layers takes, by five calls */
#define DRIVER_CALLS_PER_SLOT 4.0   /* boxes copied, kernel launched, event recorded and polled */
#define DRIVER_CALLS_PER_SOURCE 2.0 /* table allocated and copied */
#define TRANSPOSED_BYTES 16u        /* read and written by one step of transposing */
#define WEIGHT 0.25                 /* of one transfer in the average */
#define FACTOR_MAX 16.0             /* a larger factor means that something else disturbed the transfer */
#define SURPRISE_MAX 4.0            /* likewise, for a class with measurements */
/* After how many transfers a way is forgotten that takes at most so many times as long, or longer: a trial of it then
 * costs at most one in 20. Primes, so that classes that take turns are all forgotten. */
#define LONGER 10.0
#define PASSES 199u
#define PASSES_IF_LONGER 1999u
#define SHORTEST_BYTES 256u /* shorter runs are in the first class of lengths */
#define SMALLEST_BYTES (64u << 10)

/* ---- what is assumed ------------------------------------------------------------------------- */

/* Whether a kind names another sort of memory or machine, after a slash. */
static bool is_apart(const char *kind) {
    return strchr(kind, '/') != NULL;
}

static kvf_transport_kind fabric_of(const char *kind) {
    kvf_transport_kind found = {.struct_size = sizeof found};
    const size_t bytes = strcspn(kind, "/");
    for (uint32_t i = 0; kvf_transport_describe(i, &found) == KVF_OK; i++)
        if (strlen(found.name) == bytes && strncmp(found.name, kind, bytes) == 0)
            return found;
    return (kvf_transport_kind){.reach = KVF_REACH_NETWORK};
}

/* Whether the kind is memory of this host that cannot be mapped. */
static bool is_brought(const char *kind) {
    return is_apart(kind) && fabric_of(kind).reach == KVF_REACH_HOST;
}

bool kvf_cost_has_lists(const char *kind) {
    return fabric_of(kind).lists && !is_brought(kind);
}

/* Packed, where the copies of the two sides cost this. */
static kvf_cost_model assume_packed(const char *kind, const kvf_cost_model *fabric, uint32_t slot_bytes,
                                    kvf_copy_price one, kvf_copy_price other) {
    kvf_cost_model packed = *fabric;
    if (is_brought(kind)) {
        /* No operation moves slots, and both sides copy at the same time: the slower one counts. */
        packed.ns_per_run = fmax(one.ns_per_piece, other.ns_per_piece);
        packed.ns_per_byte =
            fmax(one.ns_per_byte, other.ns_per_byte) + NOTICES_PER_SLOT * NS_PER_NEAR_NOTICE / slot_bytes;
        packed.ns_per_source += NOTICES_PER_FLOW * NS_PER_NEAR_NOTICE;
        return packed;
    }
    const double operation = fabric->ns_per_run;
    packed.ns_per_run = one.ns_per_piece + other.ns_per_piece;
    packed.ns_per_byte +=
        one.ns_per_byte + other.ns_per_byte + operation * (1 + NOTICES_PER_SLOT * NOTICE_RUNS) / slot_bytes;
    packed.ns_per_source += NOTICES_PER_FLOW * NOTICE_RUNS * operation;
    return packed;
}

void kvf_cost_assume(kvf_assumed_cost *cost, const char *kind, uint32_t slot_bytes, uint32_t devices) {
    kvf_cost_model fabric;
    kind = kvf_cost_assumed(kind, &fabric);
    const kvf_copy_price core = kvf_cost_copying();
    const double calls = DRIVER_CALLS_PER_SLOT * NS_PER_DRIVER_CALL / slot_bytes;
    /* Assumed: a fabric that emulates brings memory of devices to the host itself. */
    const double in_device = is_apart(kind) ? 2 * NS_PER_BYTE_TO_HOST : NS_PER_BYTE_IN_DEVICE;
    const kvf_copy_price device[KVF_ARENAS] = {
        [KVF_MEMORY_HOST] = {NS_PER_PIECE_TO_HOST, NS_PER_BYTE_TO_HOST + calls},
        [KVF_MEMORY_CUDA] = {NS_PER_PIECE_IN_DEVICE, in_device + calls}};
    cost->direct = fabric;
    for (int arena = 0; arena < KVF_ARENAS; arena++) {
        cost->packed[arena] = assume_packed(kind, &fabric, slot_bytes, devices > 0 ? device[arena] : core,
                                            devices > 1 ? device[arena] : core);
        cost->packed[arena].ns_per_source += devices * DRIVER_CALLS_PER_SOURCE * NS_PER_DRIVER_CALL;
    }
}

uint64_t kvf_cost_copies(const kvf_plan *plan, uint64_t pieces, uint64_t bytes) {
    return plan->cuts_cells ? kvf_min_u64(pieces, bytes / TRANSPOSED_BYTES) : pieces;
}

bool kvf_cost_may_pack(const kvf_plan *plan, bool has_lists) {
    return !has_lists || plan->cuts_cells;
}

static kvf_prices prices_of(const kvf_cost_model *cost) {
    return (kvf_prices){cost->ns_per_source, cost->ns_per_run, cost->ns_per_byte};
}

/* ---- prices ---------------------------------------------------------------------------------- */

double kvf_cost_predict(const kvf_prices *prices, uint64_t runs, uint64_t bytes) {
    return prices->per_source + prices->per_run * (double)runs + prices->per_byte * (double)bytes;
}

static void move(double *price, double share, double factor) {
    *price *= pow(factor, WEIGHT * share);
}

static double within(double factor, double most) {
    return fmin(fmax(factor, 1 / most), most);
}

void kvf_cost_learn(kvf_prices *prices, uint64_t runs, uint64_t bytes, double ns) {
    const double predicted = kvf_cost_predict(prices, runs, bytes);
    if (!(predicted > 0) || !(ns > 0))
        return;
    const double factor = within(ns / predicted, FACTOR_MAX);
    const double by_source = prices->per_source / predicted;
    const double by_runs = prices->per_run * (double)runs / predicted;
    const double by_bytes = prices->per_byte * (double)bytes / predicted;
    move(&prices->per_source, by_source, factor);
    move(&prices->per_run, by_runs, factor);
    move(&prices->per_byte, by_bytes, factor);
}

/* ---- classes --------------------------------------------------------------------------------- */

/* 0 below `least`, 1 below four times that, and so on. */
static uint32_t step_of(uint64_t value, uint64_t least, uint32_t steps) {
    uint32_t step = 0;
    for (; step + 1 < steps && value >= least; value /= 4)
        step++;
    return step;
}

typedef struct class_place {
    uint32_t length, size;
} class_place;

static class_place place_of(uint64_t runs, uint64_t bytes) {
    const uint32_t length = step_of(bytes / (runs > 0 ? runs : 1), SHORTEST_BYTES, KVF_COST_LENGTHS);
    return (class_place){length, step_of(bytes, SMALLEST_BYTES, KVF_COST_SIZES)};
}

static kvf_way_cost begin(const kvf_cost_model *assumed) {
    const kvf_prices prices = prices_of(assumed);
    return (kvf_way_cost){.assumed = prices, .learned = prices};
}

void kvf_peer_cost_begin(kvf_peer_cost *cost, const kvf_assumed_cost *assumed) {
    cost->direct = begin(&assumed->direct);
    for (int kind = 0; kind < KVF_ARENAS; kind++)
        cost->packed[kind] = begin(&assumed->packed[kind]);
}

double kvf_way_cost_predict(const kvf_way_cost *cost, uint64_t runs, uint64_t bytes) {
    const class_place at = place_of(runs, bytes);
    return cost->seen[at.length][at.size] > 0
               ? (double)cost->factors[at.length][at.size] * kvf_cost_predict(&cost->assumed, runs, bytes)
               : kvf_cost_predict(&cost->learned, runs, bytes);
}

/* The first transfer of a class sets its factor; later ones weigh less, down to a quarter. */
void kvf_way_cost_learn(kvf_way_cost *cost, uint64_t runs, uint64_t bytes, double ns) {
    const double expected = kvf_way_cost_predict(cost, runs, bytes);
    const double assumed = kvf_cost_predict(&cost->assumed, runs, bytes);
    if (!(expected > 0) || !(assumed > 0))
        return;
    ns = fmax(ns, 1); /* a duration of 0 is below the clock's resolution */
    const class_place at = place_of(runs, bytes);
    uint8_t *seen = &cost->seen[at.length][at.size];
    const double weight = fmax(WEIGHT, 1.0 / (*seen + 1));
    const double off = within(ns / expected, *seen * WEIGHT >= 1 ? SURPRISE_MAX : FACTOR_MAX);
    cost->factors[at.length][at.size] = (float)(expected / assumed * pow(off, weight));
    if (*seen < UINT8_MAX)
        ++*seen;
    cost->transfers++;
    kvf_cost_learn(&cost->learned, runs, bytes, ns);
}

void kvf_way_cost_pass(kvf_way_cost *cost, uint64_t runs, uint64_t bytes, double ns) {
    const class_place at = place_of(runs, bytes);
    const bool longer = kvf_way_cost_predict(cost, runs, bytes) > LONGER * ns;
    kvf_prices *learned = &cost->learned;
    if (++cost->passed % (longer ? PASSES_IF_LONGER : PASSES) > 0)
        return;
    cost->seen[at.length][at.size] = 0;
    learned->per_source = sqrt(learned->per_source * cost->assumed.per_source);
    learned->per_run = sqrt(learned->per_run * cost->assumed.per_run);
    learned->per_byte = sqrt(learned->per_byte * cost->assumed.per_byte);
}

/* ---- shared records -------------------------------------------------------------------------- */

static bool is_same(const kvf_known_cost *a, const kvf_known_cost *b) {
    return a->placed && b->placed && strcmp(a->kind, b->kind) == 0 &&
           memcmp(a->place, b->place, sizeof a->place) == 0;
}

kvf_known_cost *kvf_known_cost_use(kvf_known_cost **list, const kvf_peer *peer, uint32_t slot_bytes,
                                   bool on_device) {
    kvf_cost_model fabric;
    const bool theirs = kvf_peer_arenas(peer).theirs & 1u << KVF_MEMORY_CUDA;
    kvf_known_cost wanted = {.kind = kvf_peer_costs(peer, &fabric)};
    wanted.placed = kvf_peer_place(peer, wanted.place);
    kvf_known_cost *known = *list;
    while (known && !is_same(known, &wanted))
        known = known->following;
    if (!known) {
        kvf_assumed_cost assumed;
        known = kvf_copy(&wanted, 1, sizeof wanted);
        if (!known)
            return NULL;
        kvf_cost_assume(&assumed, wanted.kind, slot_bytes, (uint32_t)on_device + (uint32_t)theirs);
        for (int direction = KVF_READ; direction <= KVF_WRITE; direction++)
            kvf_peer_cost_begin(&known->by_direction[direction], &assumed);
        KVF_LIST_ADD(*list, known);
    }
    known->users++;
    return known;
}

void kvf_known_cost_leave(kvf_known_cost **list, kvf_known_cost *known) {
    if (!known || --known->users > 0)
        return;
    KVF_LIST_REMOVE(*list, known);
    kvf_free(known);
}

/* ---- before there is a stage ------------------------------------------------------------------- */

static kvf_status count_pieces(const kvf_plan *plan, uint32_t source, uint64_t tokens, uint64_t *pieces) {
    const kvf_model *model = kvf_shard_model(kvf_plan_local(plan));
    kvf_step_span spans[KVF_MODEL_MAX_GROUPS] = {{0, 0}};
    kvf_selection *selection = NULL;
    kvf_stream_map *map = NULL;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++)
        spans[g].end = kvf_group_step_count(kvf_model_group(model, g), tokens);
    kvf_status status = kvf_selection_of_plan(plan, source, &selection);
    if (!status)
        status = kvf_stream_map_create(kvf_plan_local(plan), selection, &map);
    if (!status)
        *pieces = kvf_stream_map_size(map, spans).pieces;
    kvf_stream_map_free(map);
    kvf_selection_free(selection);
    return status;
}

/* The cheaper of the arenas that a fabric moves. */
static double predict_packed(const kvf_assumed_cost *cost, uint32_t kinds, uint32_t devices, uint64_t copies,
                             uint64_t bytes) {
    const kvf_prices host = prices_of(&cost->packed[KVF_MEMORY_HOST]);
    const kvf_prices device = prices_of(&cost->packed[KVF_MEMORY_CUDA]);
    const double by_host = kvf_cost_predict(&host, copies, bytes);
    const double by_device = kvf_cost_predict(&device, copies, bytes);
    if (devices == 0 || !(kinds & 1u << KVF_MEMORY_CUDA))
        return by_host;
    return kinds & 1u << KVF_MEMORY_HOST ? fmin(by_host, by_device) : by_device;
}

static kvf_status check_kind(const char *side, kvf_memory_kind kind) {
    if (kind == KVF_MEMORY_HOST || kind == KVF_MEMORY_CUDA)
        return KVF_OK;
    return kvf_fail(KVF_E_INVALID, "prediction: %s memory kind is %d; allowed: %d to %d", side, (int)kind,
                    (int)KVF_MEMORY_HOST, (int)KVF_MEMORY_CUDA);
}

kvf_status kvf_way_predict(const kvf_plan *plan, uint32_t source, uint64_t tokens, const char *kind,
                           kvf_way_prediction *out) {
    return kvf_way_predict_in(plan, source, tokens, kind, KVF_MEMORY_HOST, KVF_MEMORY_HOST, out);
}

kvf_status kvf_way_predict_in(const kvf_plan *plan, uint32_t source, uint64_t tokens, const char *kind,
                              kvf_memory_kind local, kvf_memory_kind remote, kvf_way_prediction *out) {
    kvf_status status = kvf_check_out(out, "kvf_way_prediction");
    if (!status)
        status = check_kind("local", local);
    if (!status)
        status = check_kind("remote", remote);
    if (status || !plan)
        return status ? status : kvf_fail(KVF_E_INVALID, "prediction: plan is NULL");
    kvf_prediction runs = {.struct_size = sizeof runs};
    kvf_way_prediction found = {.way = KVF_WAY_DIRECT};
    kvf_assumed_cost cost;
    const uint32_t devices = (uint32_t)(local != KVF_MEMORY_HOST) + (uint32_t)(remote != KVF_MEMORY_HOST);
    kvf_cost_assume(&cost, kind, KVF_SLOT_BYTES, devices);
    status = kvf_plan_predict(plan, source, tokens, NULL, &runs);
    if (!status)
        status = count_pieces(plan, source, tokens, &found.pieces);
    if (status)
        return status;
    found.bytes = runs.bytes;
    found.runs = runs.runs;
    const char *assumed = kvf_cost_assumed(kind, &(kvf_cost_model){0});
    const kvf_prices direct = prices_of(&cost.direct);
    const uint32_t needed = 1u << local | 1u << remote, kinds = fabric_of(assumed).memory_kinds;
    const bool packed_only = kvf_plan_converts(plan) || (needed & ~kinds) != 0;
    found.direct_ns = packed_only ? 0 : kvf_cost_predict(&direct, found.runs, found.bytes);
    const bool gains = kvf_cost_may_pack(plan, kvf_cost_has_lists(assumed));
    const bool alike = kvf_stage_model_sum(kvf_shard_model(kvf_plan_local(plan))) ==
                       kvf_stage_model_sum(kvf_engine_model(kvf_plan_remote(plan)));
    const uint64_t copies = kvf_cost_copies(plan, found.pieces, found.bytes);
    found.packed_ns = alike ? predict_packed(&cost, kinds, devices, copies, found.bytes) : 0;
    if (packed_only || (alike && gains && found.bytes > 0 && found.packed_ns < found.direct_ns))
        found.way = KVF_WAY_PACKED;
    kvf_fill_out(out, &found, sizeof found);
    return KVF_OK;
}
