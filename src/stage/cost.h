/*
 * What the two ways cost: assumed from the fabric at first, then moved towards what was seen.
 *
 * Prices: ns_per_source + runs x ns_per_run + bytes x ns_per_byte. A transfer that was seen says only what all of it took,
 * so each of the three is moved by its share of the prediction: that of short runs by transfers of short runs, that of
 * bytes by long ones.
 *
 * Prices of lengths and sizes as unlike as a cache has are no straight line: fabrics change their protocol with the length
 * of a run, small transfers wait for round trips, large ones overlap. So a transfer also belongs to a *class*, by the length
 * of its runs and by its bytes, each within a factor of four; and what transfers of a class took, in terms of what was
 * assumed at first, is what the next of this class is predicted to take. Prices are for classes that were never seen.
 */
#ifndef KVF_STAGE_COST_H
#define KVF_STAGE_COST_H

#include <kvferry/stage.h>

#include "transport/transport.h"

/** The bytes of a slot of a stage that is not told otherwise: with half as many, emulated reads over TCP lose a
 * fifth. */
#define KVF_SLOT_BYTES (1u << 20)

#define KVF_COST_LENGTHS 8u /**< classes: runs of less than 256 B, 1 KiB, .. 1 MiB, and more */
#define KVF_COST_SIZES 8u   /**< of less than 64 KiB, 256 KiB, .. 256 MiB, and more */

/** Prices, in nanoseconds. */
typedef struct kvf_prices {
    double per_source, per_run, per_byte;
} kvf_prices;

/** What one way is expected to take, in one direction. */
typedef struct kvf_way_cost {
    kvf_prices assumed; /**< stays */
    kvf_prices learned;
    float factors[KVF_COST_LENGTHS]
                 [KVF_COST_SIZES]; /**< what transfers of a class took, of what was assumed */
    uint8_t seen[KVF_COST_LENGTHS]
                [KVF_COST_SIZES]; /**< those transfers, or 255; 0: the factor says nothing */
    uint64_t transfers;           /**< of all classes */
} kvf_way_cost;

/** The two ways. `runs` of the packed one are copies: kvf_cost_copies(). */
typedef struct kvf_peer_cost {
    kvf_way_cost direct, packed;
} kvf_peer_cost;

/**
 * What is known of all peers on one machine that are reached by one kind of transport: they share it, so that what was
 * seen with one is known of the next, and a thousand of them do not keep it a thousand times.
 */
typedef struct kvf_known_cost {
    kvf_peer_cost by_direction[2];
    const char *kind; /**< as in kvf_cost_assumed() */
    bool placed;      /**< it is known where they are; else there is one peer */
    unsigned char place[KVF_PLACE_BYTES];
    uint32_t users;
    struct kvf_known_cost *previous, *following;
} kvf_known_cost;

/**
 * Finds what is known of a peer, or begins with what is assumed.
 *
 * @param list        all of a stage
 * @param slot_bytes  of the stage
 * @return NULL: no memory
 */
kvf_known_cost *kvf_known_cost_use(kvf_known_cost **list, const kvf_peer *peer, uint32_t slot_bytes);

/** One peer less; with the last it is forgotten. NULL is accepted. */
void kvf_known_cost_leave(kvf_known_cost **list, kvf_known_cost *known);

/** Begins with what is assumed: nothing was seen. */
void kvf_peer_cost_begin(kvf_peer_cost *cost, const kvf_stage_cost *assumed);

/** The prediction, in nanoseconds. */
double kvf_way_cost_predict(const kvf_way_cost *cost, uint64_t runs, uint64_t bytes);

/** Takes one transfer into account. */
void kvf_way_cost_learn(kvf_way_cost *cost, uint64_t runs, uint64_t bytes, double ns);

/** Fills in what is assumed of a peer that a kind of transport reaches, as in kvf_cost_assumed(). */
void kvf_cost_assume(kvf_stage_cost *cost, const char *kind, uint32_t slot_bytes);

/** Whether a kind of transport moves many runs in one operation: then there is nothing left for us to pack. Not where
 * memory of this host cannot be mapped: its runs cost more than copies. */
bool kvf_cost_has_lists(const char *kind);

/** How many copies the pieces of a packed source are on each side: those of cells that are cut unlike are transposed,
 * many at a time (kernel/box_fast.h). */
uint64_t kvf_cost_copies(const kvf_plan *plan, uint64_t pieces, uint64_t bytes);

/** Whether packing may be chosen for what it saves: over a fabric that takes lists of runs only where cells are cut unlike,
 * for there runs have some bytes each, and else as many as the pieces of the packed stream. */
bool kvf_cost_may_pack(const kvf_plan *plan, bool has_lists);

/** Prices as users are told them. */
static inline kvf_cost_model kvf_cost_model_of(const kvf_prices *prices) {
    return (kvf_cost_model){
        .ns_per_source = prices->per_source, .ns_per_run = prices->per_run, .ns_per_byte = prices->per_byte};
}

/** What prices say, in nanoseconds. */
double kvf_cost_predict(const kvf_prices *prices, uint64_t runs, uint64_t bytes);

/** Moves prices towards one transfer: an exponential average, in which it counts a quarter. */
void kvf_cost_learn(kvf_prices *prices, uint64_t runs, uint64_t bytes, double ns);

#endif
