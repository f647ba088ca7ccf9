/*
 * Work on blocks in the memory of CUDA devices: what postprocess.c and postprocess_copy.c do on the host. Devices do it
 * by their copy engine (cuda/copier.h), and the caller waits. Builds without devices have postprocess_no_device.c,
 * which refuses every region of a device.
 *
 * Callers have checked everything but the memory itself: kvf_check_device_memory() does that.
 */
#ifndef KVF_CONNECTOR_POSTPROCESS_DEVICE_H
#define KVF_CONNECTOR_POSTPROCESS_DEVICE_H

#include "connector/postprocess.h"

#include "base/clock.h"
#include "cuda/copier.h"

/** Limits of a call, which tests lower. */
typedef struct kvf_device_limits {
    uint64_t
        patience_ns; /**< how long to wait for one copy on a device: milliseconds, unless something hangs */
    uint64_t
        room_bytes; /**< of device memory that the call uses beside the regions, unless one page is longer */
} kvf_device_limits;

/** No more room than stays for the next call, which would wait for the device otherwise. */
#define KVF_DEVICE_LIMITS ((kvf_device_limits){30 * KVF_SECOND, KVF_COPIER_ROOM_BYTES})

/** The longest page, in bytes, that devices permute: they number bytes of a page by 30 bits. */
#define KVF_DEVICE_PAGE_BYTES ((uint64_t)1 << 30)

/**
 * Checks that the bytes of a region lie in memory of its device, as kvf_cuda_place_of() does.
 *
 * @return KVF_OK; KVF_E_INVALID (they do not); KVF_E_RANGE (no such device); KVF_E_UNSUPPORTED (no driver, or a build
 *         without devices); KVF_E_NOMEM, KVF_E_IO
 */
kvf_status kvf_check_device_memory(const kvf_block_region *region);

/** Received requests, all of whose arguments have been checked. */
typedef struct kvf_received {
    kvf_received_shape shape;
    bool permutes;        /**< false: the forms are the same to memory */
    uint32_t page_blocks; /**< blocks of a page */
    uint64_t block_bytes;
    const kvf_block_region *regions;
    size_t region_count;
    const kvf_received_request *requests;
    size_t request_count;
} kvf_received;

/** The longer one of a received page and a wanted page, in tokens. */
static inline uint64_t kvf_page_tokens(const kvf_received *received) {
    return kvf_max_u64(received->shape.received.tokens, received->shape.wanted.tokens);
}

/** The number of pages of a request with a covered token; the others need no permuting. */
static inline uint64_t kvf_covered_pages(const kvf_received *received, const kvf_received_request *request) {
    const uint64_t tokens = kvf_page_tokens(received);
    return request->covered_tokens / tokens + (request->covered_tokens % tokens != 0);
}

/**
 * Permutes and zeroes the requests' blocks in those regions that lie on devices.
 *
 * @return KVF_OK; KVF_E_LIMIT (too long pages), KVF_E_UNSUPPORTED, KVF_E_NOMEM: nothing is changed on this device,
 *         but on devices of earlier regions; KVF_E_IO: blocks on devices have undefined contents
 */
kvf_status kvf_finish_on_devices(const kvf_received *received, kvf_device_limits limits);

/**
 * Copies one layer between a device and the host: one of the two regions lies on a device.
 *
 * @param from_ids, to_ids  `count` pairs of blocks
 * @return KVF_OK; KVF_E_NOMEM, KVF_E_LIMIT, KVF_E_UNSUPPORTED, KVF_E_IO: some blocks may be copied. A device that hangs
 *         may still change its own memory, not the host's
 */
kvf_status kvf_copy_layer_on_device(const kvf_block_region *from, const kvf_block_region *to,
                                    const uint32_t *from_ids, const uint32_t *to_ids, size_t count,
                                    kvf_device_limits limits);

#endif
