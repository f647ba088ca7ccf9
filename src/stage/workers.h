/*
 * Threads that gather and scatter while the thread of the stage progresses the transport.
 *
 * A job copies the bytes of one slot between the shard's memory and the slot. It is embedded in its owner's record of
 * the slot, so jobs need no allocation, and there are never more jobs than slots. The owner puts a job, may withdraw
 * it, and takes it back when it is done:
 *
 *     owner's thread   put .................................... take      or  put .. withdraw
 *     worker                 copies, with no lock held, wakes
 *
 * Only the thread of the stage may call these functions. The stream, the regions and the slot of a job must stay in
 * place from put to take or withdraw. A child of fork() has no workers: there nothing is copied, and closing does
 * nothing.
 */
#ifndef KVF_STAGE_WORKERS_H
#define KVF_STAGE_WORKERS_H

#include "cuda/copier.h"
#include "stage/stream.h"

#define KVF_WORKERS_MAX 16u

/** One copy. */
typedef struct kvf_job {
    const kvf_stream *stream;
    unsigned char *const *bases; /**< where the shard's regions begin; a device asks the transport */
    kvf_byte_range bytes;
    unsigned char *slot;
    bool gathers; /**< into the slot; else it scatters out of it */

    /* Private to workers.c or device.c; only device.c uses the fields before `state`. */
    kvf_device_table table; /**< of the stream, on the device */
    struct kvf_copy_job *part;
    uint64_t copied;   /**< up to this byte of the stream, including the part under way */
    bool withdrawn;    /**< over with the part under way */
    kvf_status failed; /**< the result of a job that is done; workers never fail */
    char why[128];
    enum { KVF_JOB_APART = 0, KVF_JOB_QUEUED, KVF_JOB_UNDER_WAY, KVF_JOB_DONE } state;
    struct kvf_job *previous, *following;
} kvf_job;

/** Does a job in the calling thread. */
void kvf_job_do(const kvf_job *job);

typedef struct kvf_workers kvf_workers;

/**
 * Starts threads, with all signals blocked.
 *
 * @param count  1 to KVF_WORKERS_MAX
 * @return KVF_OK, KVF_E_IO (no thread, or no descriptor), KVF_E_NOMEM
 */
kvf_status kvf_workers_open(uint32_t count, kvf_workers **out);

/** Ends the threads; no job may be left. NULL is accepted. */
void kvf_workers_close(kvf_workers *workers);

/** A descriptor that is readable while there are jobs to take. */
int kvf_workers_fd(const kvf_workers *workers);

/** Gives the workers a job. */
void kvf_workers_put(kvf_workers *workers, kvf_job *job);

/** Takes the job that was done first; NULL: none is done. */
kvf_job *kvf_workers_take(kvf_workers *workers);

/** Takes a job back in any state. If a worker is copying it, waits for the copy of that slot. */
void kvf_workers_withdraw(kvf_workers *workers, kvf_job *job);

/** Returns when no job is queued or under way; does queued jobs itself meanwhile. */
void kvf_workers_settle(kvf_workers *workers);

#endif
