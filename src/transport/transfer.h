/*
 * Transfers whose pace the caller sets: agents, which have a clock and know which transfer is more urgent.
 */
#ifndef KVF_TRANSFER_H
#define KVF_TRANSFER_H

#include <kvferry/transport.h>

/** How a transfer begins. */
typedef struct kvf_transfer_start_options {
    bool held; /**< nothing moves before the caller allows it */
    bool
        by_layer; /**< the runs of each source go layer by layer, and whole layers are counted; needs a request that
                      stays unchanged until the transfer is freed */
} kvf_transfer_start_options;

/** As kvf_transfer_start(). */
kvf_status kvf_transfer_start_held(const kvf_request *request, kvf_direction direction,
                                   kvf_peer *const *peers, kvf_transfer_start_options options,
                                   kvf_transfer **out);
/** As kvf_transfer_push(); with `held`, nothing moves before the caller allows it. */
kvf_status kvf_transfer_push_held(const kvf_request *request, uint32_t source, kvf_peer *peer, bool held,
                                  kvf_transfer **out);

/** Starts reading from one source of a plan; the other sources move in another way. */
kvf_status kvf_transfer_read_source(const kvf_request *request, uint32_t source, kvf_peer *peer,
                                    kvf_transfer_start_options options, kvf_transfer **out);

/** How many of the first model layers are whole; the model's if all is there; 0 without `by_layer`. */
uint32_t kvf_transfer_layers(const kvf_transfer *transfer);

/** Holds a transfer: it submits nothing more by itself; what is under way goes on. With `held` false, releases it. */
void kvf_transfer_hold(kvf_transfer *transfer, bool held);

/**
 * Lets a held transfer submit that many bytes, from its sources in turn; the run in which they end is cut.
 *
 * @return how many it has submitted: fewer if all its batches are under way, or nothing is left. A failure to
 *         submit becomes the transfer's status
 */
uint64_t kvf_transfer_advance(kvf_transfer *transfer, uint64_t bytes);

/**
 * Whether the transfer's connection was lost, or closed, while batches of it were under way. Then only the other side
 * knows whether the last writes of a push have arrived, or still will.
 */
bool kvf_transfer_was_cut(const kvf_transfer *transfer);

#endif
