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

/** The bytes of a slot of a stage that is not told otherwise: with half as many, emulated reads over TCP lose a
 * fifth. */
#define KVF_SLOT_BYTES (1u << 20)

#define KVF_COST_LENGTHS 8u /**< classes: runs of less than 256 B, 1 KiB, .. 1 MiB, and more */
#define KVF_COST_SIZES 8u   /**< of less than 64 KiB, 256 KiB, .. 256 MiB, and more */

/** What transfers of one class took. */
typedef struct kvf_cost_class {
    double factor; /**< of what was assumed */
    uint32_t seen; /**< transfers; 0: `factor` says nothing */
} kvf_cost_class;

/** What one way is expected to take, to one peer in one direction. */
typedef struct kvf_way_cost {
    kvf_cost_model assumed; /**< stays */
    kvf_cost_model learned;
    kvf_cost_class classes[KVF_COST_LENGTHS][KVF_COST_SIZES];
    uint64_t seen; /**< transfers */
} kvf_way_cost;

/** The two ways. `runs` of the packed one are pieces. */
typedef struct kvf_peer_cost {
    kvf_way_cost direct, packed;
} kvf_peer_cost;

/** Begins with what is assumed: nothing was seen. */
void kvf_peer_cost_begin(kvf_peer_cost *cost, const kvf_stage_cost *assumed);

/** The prediction, in nanoseconds. */
double kvf_way_cost_predict(const kvf_way_cost *cost, uint64_t runs, uint64_t bytes);

/** Takes one transfer into account. */
void kvf_way_cost_learn(kvf_way_cost *cost, uint64_t runs, uint64_t bytes, double ns);

/** Fills in what is assumed of a peer that a kind of transport reaches. */
void kvf_cost_assume(kvf_stage_cost *cost, const char *kind, uint32_t slot_bytes);

/** The same of a peer on this host whose memory nobody can map: no operation is needed between the two arenas, and both
 * sides copy at the same time. `fabric`: what its memory costs directly. */
void kvf_cost_assume_near(kvf_stage_cost *cost, const kvf_cost_model *fabric);

/** Whether a kind of transport moves many runs in one operation: then there is nothing left for us to pack. */
bool kvf_cost_has_lists(const char *kind);

/** What prices say, in nanoseconds. */
double kvf_cost_predict(const kvf_cost_model *cost, uint64_t runs, uint64_t bytes);

/** Moves prices towards one transfer: an exponential average, in which it counts a quarter. */
void kvf_cost_learn(kvf_cost_model *cost, uint64_t runs, uint64_t bytes, double ns);

#endif
