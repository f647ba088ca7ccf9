/*
 * Memory in segments: allocations of cuMemCreate(), mapped one behind the other at reserved addresses. PyTorch's
 * expandable segments and vLLM's sleep mode have such memory. The driver gives no IPC handle for it, but for each
 * segment a file descriptor, or a fabric handle, if the segment was created so; whoever receives one maps the segment at
 * an address of its own.
 *
 * An owner exports its segments one by one. A reader opens a mapping for all of them:
 *
 *     kvf_mapping_open(device, bytes, reader, &mapping);
 *     kvf_mapping_add(mapping, &handle, segment_bytes);    for each segment, in order
 *     kvf_mapping_allow(mapping, devices, count);          now kernels of these devices may read it
 *     kvf_mapping_close(mapping);                          once no kernel reads it
 *
 * kvf_segment_allocate() makes such memory, in one segment.
 *
 * Different mappings may be used by different threads.
 */
#ifndef KVF_CUDA_SEGMENTS_H
#define KVF_CUDA_SEGMENTS_H

#include "cuda/driver.h"

#define KVF_SEGMENTS_MAX 65536u /* of a region: 128 GiB in the smallest segments of current devices */
#define KVF_MAPPINGS_BYTES (UINT64_C(1) << 44) /* of all mappings of this process */
#define KVF_UNSEEN_BYTES (UINT64_C(1) << 40)   /* of a region on a device that this process does not see */

/** Another process maps a segment by a descriptor; or, if the memory was created without descriptors, by a fabric handle,
 * which it needs a right to use (an IMEX channel). */
typedef struct kvf_segment_handle {
    int fd; /**< -1: it is the fabric handle */
    CUmemFabricHandle fabric;
} kvf_segment_handle;

/* ---- the owner ---------------------------------------------------------------------------------- */

/**
 * For kvf_cuda_place_of(): if `place` is a segment, extends it by the segments behind it on the same device, until it
 * has `bytes` behind the address, or there are no more; and counts them. Otherwise changes nothing.
 */
void kvf_segments_find(const kvf_cuda *cuda, uint32_t device, CUdeviceptr address, uint64_t bytes,
                       kvf_cuda_place *place);

/**
 * Checks that all segments can be exported.
 *
 * @return KVF_OK, KVF_E_UNSUPPORTED (one was not created so), KVF_E_LIMIT (more than KVF_SEGMENTS_MAX), KVF_E_IO
 */
kvf_status kvf_segments_check(uint32_t device, const kvf_cuda_place *place);

/**
 * Exports the segment that begins at an address: by a descriptor if it was created so, and otherwise by a fabric handle.
 *
 * @param most   how large it may be
 * @param bytes  receives its size
 * @param out    the caller closes the descriptor; -1 after a failure
 * @return KVF_OK, KVF_E_INVALID (no segment of that size begins there any more), KVF_E_UNSUPPORTED, KVF_E_IO
 */
kvf_status kvf_segment_export(uint32_t device, CUdeviceptr at, uint64_t most, uint64_t *bytes,
                              kvf_segment_handle *out);

/**
 * Allocates memory of a device in one segment that can be exported. What is in it is not known, and the device alone
 * has access to it.
 *
 * @param bytes     above 0
 * @param out       receives its address
 * @param all_bytes receives the size of the segment: `bytes`, rounded up to what the driver allows
 * @return KVF_OK, KVF_E_UNSUPPORTED and KVF_E_PERMISSION (the device or the system has no such memory), KVF_E_NOMEM,
 *         KVF_E_IO, and the results of kvf_cuda_enter(); after an error nothing is allocated
 */
kvf_status kvf_segment_allocate(uint32_t device, uint64_t bytes, CUdeviceptr *out, uint64_t *all_bytes);

/** Frees it, once all that this process has put on the device has ended. Readers keep what they have mapped. */
void kvf_segment_free(uint32_t device, CUdeviceptr address, uint64_t all_bytes);

/* ---- the reader --------------------------------------------------------------------------------- */

typedef struct kvf_mapping kvf_mapping;

/**
 * Reserves addresses.
 *
 * @param device  whose memory the segments are, by its number in this process; KVF_CUDA_DEVICES_MAX: of a device that
 *                this process does not see
 * @param bytes   of all segments together; no more than the device has
 * @param reader  a device that will read them: its context is current for all calls of the driver, for they need none of
 *                `device`, and making one would take half a GiB of it
 * @return KVF_OK, KVF_E_PARSE (devices have less memory), KVF_E_LIMIT (more than KVF_MAPPINGS_BYTES in all),
 *         KVF_E_NOMEM, KVF_E_IO
 */
kvf_status kvf_mapping_open(uint32_t device, uint64_t bytes, uint32_t reader, kvf_mapping **out);

/**
 * Maps the next segment.
 *
 * @param handle  of the segment; its descriptor stays the caller's, who can close it afterwards
 * @return KVF_OK, KVF_E_PARSE (0 bytes, or more than are left), KVF_E_UNSUPPORTED (the driver does not take it)
 */
kvf_status kvf_mapping_add(kvf_mapping *mapping, const kvf_segment_handle *handle, uint64_t bytes);

/** The bytes for which segments were not added yet. */
uint64_t kvf_mapping_left(const kvf_mapping *mapping);

/** Lets kernels of devices read a mapping that is complete. @return KVF_OK, KVF_E_UNSUPPORTED */
kvf_status kvf_mapping_allow(const kvf_mapping *mapping, const uint32_t *devices, uint32_t count);

/** Where the first segment lies in this process. */
CUdeviceptr kvf_mapping_base(const kvf_mapping *mapping);

/** Unmaps all segments; no kernel may read them any more. NULL is accepted. */
void kvf_mapping_close(kvf_mapping *mapping);

#endif
