/*
 * The batches of one link, moved in slices of runs: shared by the fabrics that copy with the processor. Slices
 * follow the front's list of the peer's batches, which is in order of submission.
 */
#ifndef KVF_TRANSPORT_SLICES_H
#define KVF_TRANSPORT_SLICES_H

#include "transport/transport.h"

/** Bytes one progress() may copy, and runs it may look at. */
#define KVF_SLICE_BYTES (4u << 20)
#define KVF_SLICE_RUNS 8192u
/** Bytes of one copy; progress() ends after it if another thread waits, see kvf_transport_hurry(). */
#define KVF_COPY_BYTES (1u << 20)

typedef struct kvf_slices {
    kvf_batch *current; /**< the first batch with runs not yet started */
    uint64_t offset;    /**< how much of its next run is started already */
    bool cancelled;     /**< some batch not yet started was cancelled */
} kvf_slices;

/** The runs at the front of the current batch that fit whole into `budget`; or a part of its next run. */
typedef struct kvf_slice {
    const kvf_run *runs;
    size_t count;   /**< whole runs; 0 when `part` is to be moved instead */
    kvf_run part;   /**< of a run that is longer than the budget, or that was begun before */
    uint64_t bytes; /**< of the whole slice */
} kvf_slice;

/** The runs of a slice, at least one: whole ones, or the part. */
static inline const kvf_run *kvf_slice_runs(const kvf_slice *slice, size_t *count) {
    *count = slice->count ? slice->count : 1;
    return slice->count ? slice->runs : &slice->part;
}

/**
 * Copies between the local side of a slice and memory in which its runs lie one after the other: pack() into that
 * memory, which will be read soon; unpack() out of it.
 *
 * @param bases  of local regions
 */
void kvf_slice_pack(const kvf_slice *slice, unsigned char *const *bases, unsigned char *data);
void kvf_slice_unpack(const kvf_slice *slice, unsigned char *const *bases, unsigned char *data);

/** Accepts a batch, from submit(). */
void kvf_slices_add(kvf_slices *slices, kvf_batch *batch);

/** Notes that a batch was cancelled, from cancel(). */
void kvf_slices_cancel(kvf_slices *slices);

/** Whether a batch, of which an operation has just ended, is over: nothing of it is in flight, and nothing more will be
 * started. If it is the current one and has failed, it is stopped. */
bool kvf_slices_is_over(kvf_slices *slices, const kvf_batch *batch);

/** Ends a batch that is over: as cancelled, if it was. */
void kvf_slices_end(kvf_batch *batch);

/** Stops waiting for one of the operations of a cancelled batch. */
void kvf_slices_forget(const kvf_slices *slices, kvf_batch *batch);

/** Ends cancelled batches of which nothing is in flight; other cancelled batches only stop. */
void kvf_slices_reap(kvf_slices *slices);

/** Finds the next slice: at most `runs` whole runs and `budget` bytes. Needs a current batch. A nest is never cut: one
 * that is longer is a slice. */
void kvf_slices_peek(const kvf_slices *slices, uint64_t budget, size_t runs, kvf_slice *out);

/**
 * The same for one copy of a progress() that has moved `moved` of its `budget` so far.
 *
 * @return false when there is nothing left for this progress(): no batch, no budget, another thread waits, or the next
 *         run exceeds the rest of the budget and is better begun next time
 */
bool kvf_slices_next(const kvf_slices *slices, const kvf_transport *transport, uint64_t moved,
                     uint64_t budget, kvf_slice *out);

/** Counts a slice as started; true if it was the last of its batch, which then is no longer the current one. */
bool kvf_slices_advance(kvf_slices *slices, const kvf_slice *slice);

/** Stops the current batch, and returns it: no more of its runs are started. */
kvf_batch *kvf_slices_drop_current(kvf_slices *slices);

#endif
