/*
 * Hashes cells in a device's memory, by the device itself, on a stream of the lowest priority: only the sums leave the
 * device. One job at a time:
 *
 *     kvf_hasher_open(device, &hasher);
 *     kvf_hasher_begin(hasher, ids, id_count, sum_count);
 *     kvf_hasher_add(hasher, &pages, from, to, &sums, rows, units, cell_elements);         for each layer
 *     kvf_hasher_start(hasher);
 *     while (kvf_hasher_poll(hasher, &found) == KVF_IN_PROGRESS) ...     nothing here waits for the device
 *
 * A hasher is used by one thread at a time.
 */
#ifndef KVF_CUDA_HASHER_H
#define KVF_CUDA_HASHER_H

#include "cuda/device_box.h"
#include "cuda/driver.h"

#define KVF_HASHER_BOXES 128u /* of a job */
#define KVF_HASHER_SUMS 8192u
#define KVF_HASHER_IDS 8200u

typedef struct kvf_hasher kvf_hasher;

/** @return KVF_OK, and as kvf_copier_open() */
kvf_status kvf_hasher_open(uint32_t device, kvf_hasher **out);

/** Closes it. NULL is accepted. @return KVF_OK; KVF_E_AGAIN (a job runs, and nothing is closed) */
kvf_status kvf_hasher_close(kvf_hasher *hasher);

/**
 * Begins a job; none may be running. A job that was begun and not started is forgotten.
 *
 * @param ids    the block table that boxes point into, up to KVF_HASHER_IDS; copied, and then known by this address
 * @param count  of ids
 * @param sums   how many, up to KVF_HASHER_SUMS; they begin as 0
 */
void kvf_hasher_begin(kvf_hasher *hasher, const uint32_t *ids, uint32_t count, uint32_t sums);

/**
 * Adds cells to the job.
 *
 * @param sums  its address counts from the job's first sum, modulo 2^64
 * @return as kvf_device_hash_boxes()
 */
kvf_status kvf_hasher_add(kvf_hasher *hasher, const kvf_box *pages, kvf_dtype from, kvf_dtype to,
                          const kvf_device_sums *sums, uint64_t rows, uint64_t units, uint64_t cell_elements);

/** Starts the job. @return KVF_OK; KVF_E_IO, KVF_E_NOMEM: it touches no memory */
kvf_status kvf_hasher_start(kvf_hasher *hasher);

/**
 * Polls a started job. After any result but KVF_IN_PROGRESS it is over, and touches no memory; see kvf_cuda_over().
 *
 * @param sums  receives the sums, which stay until the next job begins
 * @return KVF_OK, KVF_IN_PROGRESS, KVF_E_IO
 */
kvf_status kvf_hasher_poll(kvf_hasher *hasher, const uint64_t **sums);

#endif
