/*
 * Copy jobs on one device for a caller that waits for them, and the memory that these jobs use.
 *
 *     kvf_copy_queue_take(device, patience_ns, &queue);
 *     kvf_copy_queue_words(queue, count, &words);            fill them in
 *     kvf_copy_queue_upload(queue, &table);
 *     kvf_copy_queue_begin(queue, &job);
 *     kvf_copy_job_add(job, ...);
 *     kvf_copy_queue_start(queue, job);                      in order; more jobs ...
 *     status = kvf_copy_queue_give(queue, status);           waits for all of them
 *
 * Opening a copy engine loads code, and closing one waits for the device. So queues that are given back are kept for
 * later calls, as many per device as threads have used at once.
 *
 * A queue is used by one thread at a time; any thread may take one.
 */
#ifndef KVF_CONNECTOR_COPY_QUEUE_H
#define KVF_CONNECTOR_COPY_QUEUE_H

#include "cuda/copier.h"

#define KVF_COPY_QUEUE_BOXES 128u                     /**< of a job */
#define KVF_COPY_QUEUE_SLOT_BYTES ((uint64_t)4 << 20) /**< of the slot in host memory */

typedef struct kvf_copy_queue kvf_copy_queue;

/**
 * Takes a queue of a device, opening one if none is idle.
 *
 * @param patience_ns  how long to wait for one job, counted from when the job before it has ended
 * @return as kvf_copier_open()
 */
kvf_status kvf_copy_queue_take(uint32_t device, uint64_t patience_ns, kvf_copy_queue **out);

/**
 * Ends the use of a queue: waits for all jobs that were started, and frees what the functions below have given. If a
 * job does not end, the device may still use that memory, so the queue keeps it until the process ends.
 *
 * @param status  what the caller has come to
 * @return `status`; if that is KVF_OK, as kvf_copy_queue_wait()
 */
kvf_status kvf_copy_queue_give(kvf_copy_queue *queue, kvf_status status);

/** Gives memory of the device with undefined contents, once between take and give. @return as kvf_copier_room() */
kvf_status kvf_copy_queue_room(kvf_copy_queue *queue, uint64_t bytes, uint64_t *address);

/** Gives zeroed words in host memory, once between take and give. @return KVF_OK, KVF_E_NOMEM */
kvf_status kvf_copy_queue_words(kvf_copy_queue *queue, uint64_t count, uint32_t **out);

/** Copies the words to the device, once; they stay unchanged from now on. @return as kvf_copier_put_table() */
kvf_status kvf_copy_queue_upload(kvf_copy_queue *queue, uint64_t *address);

/** Gives KVF_COPY_QUEUE_SLOT_BYTES of host memory that the device reaches at the same address; the queue owns it.
 * @return KVF_OK, KVF_E_NOMEM, KVF_E_IO */
kvf_status kvf_copy_queue_slot(kvf_copy_queue *queue, unsigned char **out);

/** Begins a job; while the most jobs are under way, waits for the oldest. @return as kvf_copy_queue_wait() */
kvf_status kvf_copy_queue_begin(kvf_copy_queue *queue, kvf_copy_job **out);

/** Starts a job behind those that were started before; the job is gone if that fails. @return KVF_OK, KVF_E_IO,
 * KVF_E_NOMEM */
kvf_status kvf_copy_queue_start(kvf_copy_queue *queue, kvf_copy_job *job);

/** Waits for all jobs that were started. @return KVF_OK; KVF_E_NOMEM, KVF_E_IO (a job failed, or did not end in time;
 * the detail says which) */
kvf_status kvf_copy_queue_wait(kvf_copy_queue *queue);

#endif
