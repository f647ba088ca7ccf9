/*
 * The costs of the two ways: first assumed from the fabric, then adjusted towards measurements.
 *
 * Prices: ns_per_source + runs x ns_per_run + bytes x ns_per_byte. A transfer gives only its total duration, so each of
 * the three prices is adjusted by its share of the prediction: transfers of short runs adjust mostly the price of runs,
 * transfers of long runs that of bytes.
 *
 * One straight line does not fit all lengths and sizes that a cache has: fabrics change their protocol with the length
 * of a run, small transfers wait for round trips, large ones overlap. So a transfer also belongs to a *class*, by the
 * length of its runs and by its bytes, each within a factor of four. A class learns a factor, measured duration over
 * assumed, which predicts its next transfer. Learned prices are used for classes without a measurement.
 *
 * A way is measured only when it is taken. So that a measurement of a busy time does not keep it from being taken for
 * good, a class is forgotten now and then while its transfers go other ways.
 */
#ifndef KVF_STAGE_COST_H
#define KVF_STAGE_COST_H

#include <kvferry/stage.h>

#include "stage/arena.h"
#include "transport/transport.h"

/** The default bytes of a slot: with half as many, emulated reads over TCP are a fifth slower. */
#define KVF_SLOT_BYTES (1u << 20)

#define KVF_COST_LENGTHS 8u /**< classes: run lengths below 256 B, 1 KiB, .. 1 MiB, and above */
#define KVF_COST_SIZES 8u   /**< classes: bytes below 64 KiB, 256 KiB, .. 256 MiB, and above */

/** Prices, in nanoseconds. */
typedef struct kvf_prices {
    double per_source, per_run, per_byte;
} kvf_prices;

/** The expected cost of one way, in one direction. */
typedef struct kvf_way_cost {
    kvf_prices assumed; /**< never changes */
    kvf_prices learned;
    float factors[KVF_COST_LENGTHS][KVF_COST_SIZES]; /**< measured duration over assumed, by class */
    uint8_t seen[KVF_COST_LENGTHS]
                [KVF_COST_SIZES]; /**< number of transfers measured, at most 255; 0: no factor */
    uint64_t transfers;           /**< of all classes */
    uint64_t passed;              /**< transfers that went another way */
} kvf_way_cost;

/** The ways: packed through arenas of the host, or of devices. `runs` of a packed one are copies: kvf_cost_copies(). */
typedef struct kvf_peer_cost {
    kvf_way_cost direct, packed[KVF_ARENAS];
} kvf_peer_cost;

/**
 * The costs of all peers on one machine that are reached by one kind of transport. They share one record, so that
 * measurements with one peer serve the next, and a thousand peers do not need a thousand records.
 */
typedef struct kvf_known_cost {
    kvf_peer_cost by_direction[2];
    const char *kind; /**< as in kvf_cost_assumed() */
    bool placed;      /**< the machine is known; else there is one peer */
    unsigned char place[KVF_PLACE_BYTES];
    uint32_t users;
    struct kvf_known_cost *previous, *following;
} kvf_known_cost;

/**
 * Finds the known costs of a peer, or makes a record with the assumed ones.
 *
 * @param list        all records of a stage
 * @param slot_bytes  of the stage
 * @param on_device   whether the stage's cells are in memory of a device
 * @return NULL: no memory
 */
kvf_known_cost *kvf_known_cost_use(kvf_known_cost **list, const kvf_peer *peer, uint32_t slot_bytes,
                                   bool on_device);

/** Removes one user; the last frees the record. NULL is accepted. */
void kvf_known_cost_leave(kvf_known_cost **list, kvf_known_cost *known);

/** The assumed costs of the ways to a peer. `packed[].ns_per_run` is that of a piece that is contiguous in this rank's
 * memory and in the stream. */
typedef struct kvf_assumed_cost {
    kvf_cost_model direct, packed[KVF_ARENAS];
} kvf_assumed_cost;

/** Begins with assumed costs, without any measurement. */
void kvf_peer_cost_begin(kvf_peer_cost *cost, const kvf_assumed_cost *assumed);

/** The prediction, in nanoseconds. */
double kvf_way_cost_predict(const kvf_way_cost *cost, uint64_t runs, uint64_t bytes);

/** Learns from one transfer. */
void kvf_way_cost_learn(kvf_way_cost *cost, uint64_t runs, uint64_t bytes, double ns);

/**
 * Notes that a transfer goes another way. Once in many, what was measured of its class is forgotten, and the learned
 * prices are moved half of the way back to the assumed ones.
 *
 * @param ns  predicted for the other way
 */
void kvf_way_cost_pass(kvf_way_cost *cost, uint64_t runs, uint64_t bytes, double ns);

/**
 * Fills in the assumed cost of a peer that is reached by a kind of transport, as in kvf_cost_assumed().
 *
 * @param devices  how many of the two ranks have their cells in memory of a device, 0 to 2
 */
void kvf_cost_assume(kvf_assumed_cost *cost, const char *kind, uint32_t slot_bytes, uint32_t devices);

/** Whether a kind of transport moves many runs in one operation: then packing saves nothing. False for memory of this
 * host that cannot be mapped: its runs cost more than copies. */
bool kvf_cost_has_lists(const char *kind);

/** How many copies each side makes for the pieces of a packed source: if the two sides cut cells differently, pieces
 * are transposed, many at a time (kernel/box_fast.h). */
uint64_t kvf_cost_copies(const kvf_plan *plan, uint64_t pieces, uint64_t bytes);

/** Whether packing can save time. Over a fabric that takes lists of runs, only if the two sides cut cells differently:
 * then runs have a few bytes each; otherwise they are as long as the pieces of the packed stream. */
bool kvf_cost_may_pack(const kvf_plan *plan, bool has_lists);

/** The prediction from prices, in nanoseconds. */
double kvf_cost_predict(const kvf_prices *prices, uint64_t runs, uint64_t bytes);

/** Adjusts prices towards one transfer: an exponential average, in which it has a weight of one quarter. */
void kvf_cost_learn(kvf_prices *prices, uint64_t runs, uint64_t bytes, double ns);

#endif
