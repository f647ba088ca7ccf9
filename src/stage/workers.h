/*
 * Threads that gather and scatter while the thread of the stage progresses the transport.
 *
 * A job is one slot: bytes of a stream, to be copied between the shard's memory and the slot. It lies in what its owner
 * has for the slot, so nothing is allocated for it, and there are never more than slots. The owner puts it, may withdraw
 * it, and takes it back when it is done:
 *
 *     owner's thread   put .................................... take      or  put .. withdraw
 *     worker                 copies, with no lock held, wakes
 *
 * All functions are for the thread of the stage. What a job names (stream, addresses of regions, slot) must stay in place
 * from put to take or withdraw. A child of fork() has no workers: there nothing is copied, and closing does nothing.
 */
#ifndef KVF_STAGE_WORKERS_H
#define KVF_STAGE_WORKERS_H

#include "cuda/copier.h"
#include "stage/stream.h"

#define KVF_WORKERS_MAX 16u

/** One copy. */
typedef struct kvf_job {
    const kvf_stream *stream;
    unsigned char *const *bases; /**< where the shard's regions begin */
    kvf_byte_range bytes;
    unsigned char *slot;
    bool gathers; /**< into the slot; else it scatters out of it */

    /* Of whoever does it: workers.c, or device.c, which has what follows to itself. */
    kvf_device_table table; /**< of the stream, on the device */
    struct kvf_copy_job *part;
    uint64_t copied;   /**< up to this byte of the stream, with the part that is under way */
    kvf_status failed; /**< of a job that is done; workers do not fail */
    char why[128];
    enum { KVF_JOB_APART = 0, KVF_JOB_QUEUED, KVF_JOB_UNDER_WAY, KVF_JOB_DONE } state;
    struct kvf_job *previous, *following;
} kvf_job;

/** Does a job in the calling thread. */
void kvf_job_do(const kvf_job *job);

typedef struct kvf_workers kvf_workers;

/**
 * Starts threads, which take no signals.
 *
 * @param count  1 to KVF_WORKERS_MAX
 * @return KVF_OK, KVF_E_IO (no thread, or no descriptor), KVF_E_NOMEM
 */
kvf_status kvf_workers_open(uint32_t count, kvf_workers **out);

/** Ends them. No job is left with them. NULL is accepted. */
void kvf_workers_close(kvf_workers *workers);

/** A descriptor that is readable while a job is done and not taken. */
int kvf_workers_fd(const kvf_workers *workers);

/** Gives them a job. */
void kvf_workers_put(kvf_workers *workers, kvf_job *job);

/** A job that is done, those that ended first before others; NULL: there is none. */
kvf_job *kvf_workers_take(kvf_workers *workers);

/** Takes a job back wherever it stands. One that a worker is at is waited for: the copy of one slot. */
void kvf_workers_withdraw(kvf_workers *workers, kvf_job *job);

/** Returns when no job is queued or under way; helps meanwhile. */
void kvf_workers_settle(kvf_workers *workers);

#endif
