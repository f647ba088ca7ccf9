/*
 * Gathering and scattering of cells in a device's memory, by the device itself.
 *
 * Slots are in an arena in the device's memory, or in one of the host that is pinned so that the device can reach it.
 * Copies are jobs, as in workers.h, but no thread makes them: a job is started on the device and polled from time to
 * time (cuda/looks.h).
 *
 *     put ............................. take      or  put .. withdraw, or withdraw .. take
 *         started, polled by take
 *
 * A job with more boxes than the device takes at once runs in parts, one after the other. Nothing here waits for the
 * device for long: it may hang, or be busy with other work. Only the thread of the stage may call these functions.
 */
#ifndef KVF_STAGE_DEVICE_H
#define KVF_STAGE_DEVICE_H

#include "cuda/copier.h"
#include "stage/stream.h"
#include "stage/workers.h"
#include "transport/transport.h"

typedef struct kvf_stage_device kvf_stage_device;

/** The cells of a box of a stream, as kvf_device_boxes() takes them. */
typedef struct kvf_stage_cells {
    kvf_device_side pages, packed;
    uint64_t elements; /**< of a unit's cell; bytes if they are not converted */
} kvf_stage_cells;

/**
 * Describes cells that a device is to gather or scatter.
 *
 * @param box    must outlive the result
 * @param table  the stream's
 * @param begin  the byte of the stream that is, packed, at the device's address `slot`; not after the box
 */
kvf_stage_cells kvf_stage_cells_of(const kvf_stream_box *box, const kvf_device_table *table, uint64_t slot,
                                   uint64_t begin);

/**
 * Opens the copy engine of a device.
 *
 * @param transport   knows where the shard's regions begin; must outlive the device
 * @param copy_bytes  kvf_stage_options.device_copy_bytes
 * @return as kvf_copier_open()
 */
kvf_status kvf_stage_device_open(uint32_t number, const kvf_transport *transport, uint64_t copy_bytes,
                                 kvf_stage_device **out);

/** Takes the host's arena, memory that must stay until kvf_stage_device_close(), and pins it unless a fabric has.
 * @return as kvf_copier_pin(), but not KVF_E_EXISTS; KVF_E_UNSUPPORTED: the device cannot reach it */
kvf_status kvf_stage_device_pin(kvf_stage_device *device, void *arena, uint64_t bytes);

/**
 * Closes the device. If it does not finish its last copies within `patience_ns`, it stays open until the process ends; its
 * jobs are forgotten, but their memory may still be accessed. NULL is accepted.
 *
 * @return false: it stays open
 */
bool kvf_stage_device_close(kvf_stage_device *device, uint64_t patience_ns);

/** Copies the table of a stream to the device; once for each stream. */
kvf_status kvf_stage_device_bring(kvf_stage_device *device, const kvf_stream *stream, kvf_device_table *out);

/** Frees that copy behind the copies under way; no further one of the stream may begin. A zeroed table is accepted. */
void kvf_stage_device_drop(kvf_stage_device *device, kvf_device_table *table);

/** Gives the device a job, and sets the job's `table` to the one of its stream. */
void kvf_stage_device_put(kvf_stage_device *device, const kvf_device_table *table, kvf_job *job);

/** Takes a job that is over; its `failed` is its result. NULL: there is none. */
kvf_job *kvf_stage_device_take(kvf_stage_device *device);

/** Takes a job back. False: the device is copying it, and will give it back by take() after that copy. */
bool kvf_stage_device_withdraw(kvf_stage_device *device, kvf_job *job);

/** Waits, shortly, until the device has no job to copy. @return whether it has none */
bool kvf_stage_device_settle(kvf_stage_device *device);

/** A descriptor that is readable when jobs are to be polled again: only polling shows when they are over. */
int kvf_stage_device_fd(const kvf_stage_device *device);

#endif
