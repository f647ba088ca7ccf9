/*
 * What the two ways cost: assumed from the fabric at first, then moved towards what was seen.
 *
 * Prediction is ns_per_source + runs x ns_per_run + bytes x ns_per_byte. A transfer that was seen says only what all of
 * it took, so each of the two prices is moved by its share of the prediction: that of short runs by transfers of short
 * runs, that of bytes by long ones.
 */
#ifndef KVF_STAGE_COST_H
#define KVF_STAGE_COST_H

#include <kvferry/stage.h>

/** The bytes of a slot of a stage that is not told otherwise: with half as many, emulated reads over TCP lose a
 * fifth. */
#define KVF_SLOT_BYTES (1u << 20)

/** Fills in what is assumed of a peer that a kind of transport reaches. */
void kvf_cost_assume(kvf_stage_cost *cost, const char *kind, uint32_t slot_bytes);

/** The same of a peer on this host whose memory nobody can map: no operation is needed between the two arenas, and both
 * sides copy at the same time. `fabric`: what its memory costs directly. */
void kvf_cost_assume_near(kvf_stage_cost *cost, const kvf_cost_model *fabric);

/** Whether a kind of transport moves many runs in one operation: then there is nothing left for us to pack. */
bool kvf_cost_has_lists(const char *kind);

/** The prediction, in nanoseconds. */
double kvf_cost_predict(const kvf_cost_model *cost, uint64_t runs, uint64_t bytes);

/** Takes one transfer into account: an exponential average, in which it counts a quarter. */
void kvf_cost_learn(kvf_cost_model *cost, uint64_t runs, uint64_t bytes, double ns);

#endif
