/*
 * The copy engine of one device: cells are gathered, scattered, copied into another order and converted by kernels, on a
 * stream of its own that gives way to the device's other work.
 *
 *     kvf_copier_open(device, NULL, &copier);
 *     kvf_copier_put_table(copier, ids, count, &table);         once a request and group
 *     kvf_copier_begin(copier, &job);                           for each slot of an arena
 *     kvf_copy_job_add(job, &pages, &packed, rows, units, cell_bytes);
 *     kvf_copy_job_start(job, after);
 *     while (kvf_copy_job_poll(job) == KVF_IN_PROGRESS) ...     nothing here waits for the device
 *
 * The device computes addresses from boxes and tables; what the host does for a job grows with its boxes, not with bytes
 * or runs. Memory on either side is a device's, or the host's if the driver knows it (kvf_copier_pin()). Nothing is
 * allocated after opening but tables.
 *
 * A copier is used by one thread at a time.
 */
#ifndef KVF_CUDA_COPIER_H
#define KVF_CUDA_COPIER_H

#include "cuda/device_box.h"
#include "cuda/driver.h"

typedef struct kvf_copier kvf_copier;
typedef struct kvf_copy_job kvf_copy_job;

/** Zeroed fields mean what their comment says. */
typedef struct kvf_copier_options {
    uint32_t
        blocks;     /**< of threads that run at once; 0: 16. Never more than the device has multiprocessors */
    uint32_t jobs;  /**< under way at once; 0: 32 */
    uint32_t boxes; /**< of a job; 0: 256 */
} kvf_copier_options;

/**
 * Opens the copy engine of a device.
 *
 * @param options  NULL: the defaults
 * @return KVF_OK, KVF_E_RANGE (no such device), KVF_E_UNSUPPORTED (no driver, or this build has no code for the
 *         device), KVF_E_NOMEM (of device or host), KVF_E_IO
 */
kvf_status kvf_copier_open(uint32_t device, const kvf_copier_options *options, kvf_copier **out);

/**
 * Closes it. NULL is accepted.
 *
 * @return KVF_OK; KVF_E_AGAIN, and nothing is closed: a job is under way, for what it waits for has not happened
 */
kvf_status kvf_copier_close(kvf_copier *copier);

/**
 * Lets devices read and write memory of the host, until kvf_copier_unpin(): it cannot be paged out meanwhile. Its address
 * is the same for them.
 *
 * @return KVF_OK, KVF_E_NOMEM, KVF_E_EXISTS (known to the driver already), KVF_E_IO
 */
kvf_status kvf_copier_pin(kvf_copier *copier, void *memory, uint64_t bytes);

/** Nothing under way uses it. */
void kvf_copier_unpin(kvf_copier *copier, void *memory);

/** A block table in the device's memory. */
typedef struct kvf_device_table {
    uint64_t address;
    const uint32_t *on_host; /**< as it was given: boxes that name blocks of it are understood by that */
} kvf_device_table;

/**
 * Brings a table to the device; what is started afterwards finds it there.
 *
 * @param ids  must stay, unchanged, until kvf_copier_drop_table(): boxes point into it
 * @return KVF_OK, KVF_E_NOMEM, KVF_E_IO
 */
kvf_status kvf_copier_put_table(kvf_copier *copier, const uint32_t *ids, uint64_t count,
                                kvf_device_table *out);

/** No job that uses it is under way. One that was never put is accepted. */
void kvf_copier_drop_table(kvf_copier *copier, kvf_device_table *table);

/**
 * Begins a job.
 *
 * @return KVF_OK, KVF_E_AGAIN (as many are under way as may be: poll one)
 */
kvf_status kvf_copier_begin(kvf_copier *copier, kvf_copy_job **out);

/**
 * Adds cells to a job: as kvf_device_boxes().
 *
 * @return KVF_OK, KVF_E_LIMIT (more boxes than a job has room for: start this one, and put the rest into another),
 *         KVF_E_UNSUPPORTED; the job is then as it was
 */
kvf_status kvf_copy_job_add(kvf_copy_job *job, const kvf_device_side *from, const kvf_device_side *to,
                            uint64_t rows, uint64_t units, uint64_t cell_elements);

/**
 * Starts a job, behind all that the copier started before.
 *
 * @param after  an event of the same process that is waited for first, by the device; NULL: none
 * @return KVF_OK; KVF_E_IO, KVF_E_NOMEM: the job is over and gone, and touches nothing. Where the driver has taken only a part
 *         of it, that is KVF_OK, and kvf_copy_job_poll() says so when the part is over
 */
kvf_status kvf_copy_job_start(kvf_copy_job *job, CUevent after);

/**
 * Looks whether a job that was started is over. With any other answer than KVF_IN_PROGRESS it is gone.
 *
 * @return KVF_OK (what it wrote is there, for devices and the host), KVF_IN_PROGRESS, KVF_E_IO, KVF_E_NOMEM
 */
kvf_status kvf_copy_job_poll(kvf_copy_job *job);

/** Gives back a job that was not started. */
void kvf_copy_job_drop(kvf_copy_job *job);

#endif
