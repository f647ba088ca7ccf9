/*
 * Cells in a device's memory, gathered into slots and scattered from them by the device itself.
 *
 * The arena stays memory of the host, which every fabric takes, pinned so that the device reaches it. Copies are jobs, as
 * of workers (workers.h), but nobody copies in a thread: a job is started on the device and looked at from time to time
 * (cuda/looks.h).
 *
 *     put ............................. take      or  put .. withdraw
 *         started, looked at by take
 *
 * A job that has more boxes than the device takes at once goes in parts, one after the other. All functions are for the
 * thread of the stage.
 */
#ifndef KVF_STAGE_DEVICE_H
#define KVF_STAGE_DEVICE_H

#include "cuda/copier.h"
#include "stage/stream.h"
#include "stage/workers.h"

typedef struct kvf_stage_device kvf_stage_device;

/** Opens the copy engine of a device. @return as kvf_copier_open() */
kvf_status kvf_stage_device_open(uint32_t number, kvf_stage_device **out);

/** Pins the arena, memory of the host that stays until kvf_stage_device_close(). @return as kvf_copier_pin() */
kvf_status kvf_stage_device_pin(kvf_stage_device *device, void *arena, uint64_t bytes);

/** Closes it; no job is left. NULL is accepted. */
void kvf_stage_device_close(kvf_stage_device *device);

/** Brings the table of a stream to the device, once. */
kvf_status kvf_stage_device_bring(kvf_stage_device *device, const kvf_stream *stream, kvf_device_table *out);

/** Takes that back; no job of the stream is left. A table that was never brought is accepted. */
void kvf_stage_device_drop(kvf_stage_device *device, kvf_device_table *table);

/** Gives it a job, whose stream has this table; the job's `table` is set by it. */
void kvf_stage_device_put(kvf_stage_device *device, const kvf_device_table *table, kvf_job *job);

/** A job that is over; its `failed` says how. NULL: there is none. */
kvf_job *kvf_stage_device_take(kvf_stage_device *device);

/** Takes a job back wherever it stands; what the device is at is waited for: the copy of one slot. */
void kvf_stage_device_withdraw(kvf_stage_device *device, kvf_job *job);

/** Returns when the device copies nothing. */
void kvf_stage_device_settle(kvf_stage_device *device);

/** A descriptor that is readable when jobs are to be looked at again: nothing but looking tells when they are over. */
int kvf_stage_device_fd(const kvf_stage_device *device);

#endif
