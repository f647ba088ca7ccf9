/*
 * The copy engine of one device: kernels gather, scatter, reorder and convert cells, on a stream of the engine's own
 * that yields to the device's other work.
 *
 *     kvf_copier_open(device, NULL, &copier);
 *     kvf_copier_put_table(copier, ids, count, &table);         once a request and group
 *     kvf_copier_begin(copier, &job);                           for each slot of an arena
 *     kvf_copy_job_add(job, &pages, &packed, rows, units, cell_bytes);
 *     kvf_copy_job_start(job, after);
 *     while (kvf_copy_job_poll(job) == KVF_IN_PROGRESS) ...     nothing here waits for the device
 *
 * The device computes addresses from boxes and tables, so the host's work for a job grows with its boxes, not with
 * bytes or runs. Memory on either side is a device's, or the host's if the driver knows it (kvf_copier_pin()). After
 * opening, only tables and rooms are allocated, and pinned memory if more than 256 KiB of tables are on their way.
 *
 * A copier is used by one thread at a time.
 */
#ifndef KVF_CUDA_COPIER_H
#define KVF_CUDA_COPIER_H

#include "cuda/device_box.h"
#include "cuda/driver.h"

/** So much room a copier keeps, beside 8 MiB of tables. */
#define KVF_COPIER_ROOM_BYTES (UINT64_C(24) << 20)

typedef struct kvf_copier kvf_copier;
typedef struct kvf_copy_job kvf_copy_job;

/** Zeroed fields mean their defaults. */
typedef struct kvf_copier_options {
    /** Blocks of threads of a kernel, as kvf_grid_of() takes them (grid.h): with nothing in front of it, 16; and the
     * most, 32, which it gets while jobs wait behind each other. Never more than the device has multiprocessors */
    uint32_t least_blocks, most_blocks;
    uint32_t jobs;  /**< jobs under way at once; 0: 32 */
    uint32_t boxes; /**< boxes of a job; 0: 256 */
    uint32_t ids;   /**< block ids in tables of a job's own */
    /** Runs of so many bytes and more go to and from the host's memory by the driver's copies, not by a kernel; 0: none
     * do (long_runs.h) */
    uint64_t long_run_bytes;
    /** Jobs convert nothing, and tables are the jobs' own: no room is kept for conversions, other tables, and rooms */
    bool plain;
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
 * Closes a copier. NULL is accepted.
 *
 * @return KVF_OK; KVF_E_AGAIN (nothing is closed, because a started job has not been polled to its end);
 *         and the results of kvf_cuda_enter()
 */
kvf_status kvf_copier_close(kvf_copier *copier);

/**
 * Lets devices read and write host memory, until kvf_copier_unpin(); it cannot be paged out meanwhile.
 *
 * @param address  receives where devices find the memory: with most drivers at the host's address, but not with WSL 2
 * @return KVF_OK, KVF_E_NOMEM, KVF_E_EXISTS (known to the driver already; `address` is set), KVF_E_UNSUPPORTED (the
 *         driver refuses it, or the device does not reach it), KVF_E_IO (the device is unusable)
 */
kvf_status kvf_copier_pin(kvf_copier *copier, void *memory, uint64_t bytes, uint64_t *address);

/** Undoes kvf_copier_pin(); nothing under way may use the memory. */
void kvf_copier_unpin(kvf_copier *copier, void *memory);

/** A block table in the device's memory. */
typedef struct kvf_device_table {
    uint64_t address;
    const uint32_t *on_host; /**< as it was given; locates the blocks that boxes point to */
} kvf_device_table;

/**
 * Copies a table to the device; jobs that are started afterwards can use it.
 *
 * @param ids  must stay, unchanged, until kvf_copier_drop_table(): boxes point into it
 * @return KVF_OK, KVF_E_NOMEM, KVF_E_IO
 */
kvf_status kvf_copier_put_table(kvf_copier *copier, const uint32_t *ids, uint64_t count,
                                kvf_device_table *out);

/** Frees a table; no job under way may use it. A zeroed table is accepted. */
void kvf_copier_drop_table(kvf_copier *copier, kvf_device_table *table);

/**
 * Gives memory of the device to jobs that are started afterwards; its contents are undefined. It is a piece of what the
 * copier keeps, so neither giving nor dropping it waits for the device, unless more than KVF_COPIER_ROOM_BYTES are given
 * at once: what is beyond that the driver allocates and frees, for which it may wait for all work of the device.
 *
 * @param bytes    at least 1
 * @param address  receives the device's address, which kvf_copier_drop_room() takes
 * @return KVF_OK, KVF_E_NOMEM, KVF_E_IO
 */
kvf_status kvf_copier_room(kvf_copier *copier, uint64_t bytes, uint64_t *address);

/** Frees such memory; no job under way may use it. 0 is accepted. */
void kvf_copier_drop_room(kvf_copier *copier, uint64_t address);

/**
 * Begins a job.
 *
 * @return KVF_OK, KVF_E_AGAIN (the most jobs are under way: poll one)
 */
kvf_status kvf_copier_begin(kvf_copier *copier, kvf_copy_job **out);

/**
 * Makes room for a table of the job's own, which goes to the device with the job. The caller writes it before the job
 * starts.
 *
 * @param address  receives the device's address of the table
 * @return the table; NULL: the job has no room for so many ids
 */
uint32_t *kvf_copy_job_table(kvf_copy_job *job, uint64_t count, uint64_t *address);

/**
 * Adds cells to a job, as in kvf_device_boxes().
 *
 * @return KVF_OK, KVF_E_LIMIT (more boxes than the job has room for: start it, and put the rest into another),
 *         KVF_E_UNSUPPORTED; after a failure the job is unchanged
 */
kvf_status kvf_copy_job_add(kvf_copy_job *job, const kvf_device_side *from, const kvf_device_side *to,
                            uint64_t rows, uint64_t units, uint64_t cell_elements);

/**
 * Starts a job, behind all that the copier started before.
 *
 * @param after  an event of this process that the device waits for first; NULL: none
 * @return KVF_OK; KVF_E_IO, KVF_E_NOMEM: the job is gone, and touches no memory. If the driver has taken only a part of
 *         it, the result is KVF_OK, and kvf_copy_job_poll() reports the failure when the part is over
 */
kvf_status kvf_copy_job_start(kvf_copy_job *job, CUevent after);

/**
 * Polls a started job. After any result but KVF_IN_PROGRESS the job is gone, and touches no memory; see
 * kvf_cuda_over().
 *
 * @return KVF_OK (devices and the host see what it wrote), KVF_IN_PROGRESS, KVF_E_IO, KVF_E_NOMEM
 */
kvf_status kvf_copy_job_poll(kvf_copy_job *job);

/** Drops a job that was not started. */
void kvf_copy_job_drop(kvf_copy_job *job);

#endif
