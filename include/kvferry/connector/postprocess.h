/*
 * Work on blocks after their bytes have arrived: converting them to this engine's block size and layout, zeroing cells
 * that were not transferred, and copying blocks between two buffers.
 *
 * A plan (plan.h) puts every cell in its place while it moves, and needs none of this. These functions are for caches
 * that were received as whole blocks in the sender's form:
 *
 *     received as 2 pages of 2 tokens, HND        wanted: 1 block of 4 tokens, HND
 *     | h0: t0 t1 | h1: t0 t1 |                   | h0: t0 t1 t2 t3 | h1: t0 t1 t2 t3 |
 *     | h0: t2 t3 | h1: t2 t3 |
 *
 * One function here, kvf_permute_received(), does what several functions of vLLM's connector do; the wanted
 * pages have T tokens, `ratio` is T over the tokens of a received page:
 *
 *     kv_postprocess_blksize_on_receive              received {HND, T/ratio}   wanted {HND, T}
 *     kv_postprocess_layout_on_receive               received {HND, T}         wanted {NHD, T}
 *     kv_postprocess_blksize_and_layout_on_receive   received {HND, T/ratio}   wanted {NHD, T}
 *
 * It also does the reverse: NHD to HND, and received pages that are longer than a block. The receive step of
 * release 0.32 is kvf_finish_received(), copy_kv_blocks is kvf_copy_blocks().
 *
 * Regions may lie in host memory, where the processor does the work, and in the memory of CUDA devices, which do it
 * themselves (docs/devices.md). A call may have regions of several devices and of the host.
 *
 * Every argument is checked before the first byte is changed: on an error nothing is changed, except that a device may
 * fail while it works (below). No byte outside the regions is read or written. Threads may call at the same time for
 * different blocks; a block may be in only one call at a time, and no other code may read or write it during the call.
 *
 * Memory of devices. A call returns when the device has finished, and then every stream sees what it wrote. It works
 * on a stream of kvferry's own, which waits for no other stream: before the call, the caller waits for what its own
 * streams do with these blocks (cuStreamSynchronize(), or cuEventSynchronize()). Blocks that an agent or a transport
 * has reported as received need no such wait. Beyond the results of each function, devices give
 *
 *     KVF_E_INVALID       a region's bytes do not all lie in memory of its device: nothing is changed
 *     KVF_E_RANGE         there is no such device: nothing is changed
 *     KVF_E_UNSUPPORTED   no driver, no code for the device, or a build without devices: nothing is changed
 *     KVF_E_LIMIT         a received or wanted page of 1 GiB or more: nothing is changed
 *     KVF_E_NOMEM         the device or the host has no memory for the work: nothing is changed on this device,
 *                         but on those of earlier regions
 *     KVF_E_IO            the device has failed, or has not finished a copy within 30 s: blocks on devices have
 *                         undefined contents. A device that hangs may still write them while the process lives
 *
 * If a call also has regions of the host, these are changed only after the devices have succeeded, in
 * kvf_finish_received() and kvf_permute_received(); kvf_copy_blocks() copies layer by layer.
 */
#ifndef KVFERRY_CONNECTOR_POSTPROCESS_H
#define KVFERRY_CONNECTOR_POSTPROCESS_H

#include <stddef.h>
#include <stdint.h>

#include <kvferry/memory.h>
#include <kvferry/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- memory ---------------------------------------------------------------------------------- */

/**
 * Blocks of equal size in one piece of memory: a layer, or one of several tensors of a layer.
 *
 *     byte x of part p of block b = base + b*block_stride_bytes + p*part_stride_bytes + x
 *
 * A layer with one buffer for K and one for V is two regions. Where K and V lie in one buffer, they are two
 * parts of one region: block_stride_bytes is the larger stride where each block holds K and then V, and
 * part_stride_bytes where all of K comes before all of V. Bytes between parts and blocks are left alone.
 */
typedef struct kvf_block_region {
    const char *layer; /**< the layer's name; only kvf_copy_blocks() needs it */
    void *base;
    uint64_t bytes;       /**< from base; bytes beyond are never touched */
    uint64_t block_count; /**< at most 2^32 - 1 */
    uint64_t block_stride_bytes;
    uint64_t part_count; /**< 0 means 1 */
    uint64_t part_stride_bytes;
    uint64_t part_bytes;
    kvf_memory_kind kind; /**< 0: host memory */
    uint32_t device;      /**< number of the device, to which `base` belongs; not used for host memory */
} kvf_block_region;

/** Working memory of the caller's, in host memory, aligned for uint64_t; only one call at a time may use it. What a
 * device needs is allocated besides, by the call: on the device up to 24 MiB, or one page if that is longer. */
typedef struct kvf_scratch {
    void *memory;
    uint64_t bytes;
} kvf_scratch;

/* ---- bringing received blocks into another form ---------------------------------------------- */

/** The order of axes in a page, outermost first. */
typedef enum kvf_page_order {
    KVF_PAGE_HND = 0, /**< head, token, element */
    KVF_PAGE_NHD = 1, /**< token, head, element */
} kvf_page_order;

typedef struct kvf_page_form {
    kvf_page_order order;
    uint64_t tokens;
} kvf_page_form;

/**
 * How blocks were received and how they are wanted. One number of tokens must divide the other.
 *
 * A block holds one wanted page in each part. Shorter received pages lie one after another in the block. A
 * received page that is `n` times as long lies in `n` blocks, one n-th in each, in order.
 */
typedef struct kvf_received_shape {
    size_t struct_size; /**< sizeof(kvf_received_shape) */
    uint64_t heads;
    /** One head of one token: head size times element size, whatever the elements are. */
    uint64_t cell_bytes;
    kvf_page_form received;
    kvf_page_form wanted;
} kvf_received_shape;

/**
 * Permutes blocks in place from the received into the wanted form, with the same block ids in every region.
 *
 * @param shape         both forms; part_bytes of every region must be heads * wanted.tokens * cell_bytes
 * @param regions       those that share the block list: the layers of a group
 * @param block_ids     blocks in the order of the sequence, each once; a received page that is n blocks long
 *                      takes n of them. Without blocks or without regions the call does nothing.
 * @param scratch       at least kvf_received_scratch_bytes(); NULL: allocated for the call
 * @return KVF_OK; KVF_E_INVALID (NULL, zero, an unknown order, a region whose part_bytes differ, a scratch
 *         that is too small or not aligned, blocks that do not make whole received pages);
 *         KVF_E_NOT_EXPRESSIBLE (neither number of tokens
 *         divides the other); KVF_E_RANGE (a block id the region does not have, a region that is longer than
 *         its bytes); KVF_E_OVERLAP (a block listed twice, parts or blocks that share bytes); KVF_E_OVERFLOW;
 *         KVF_E_NOMEM; for regions on devices also the results listed at the top
 *
 * Cost: each byte of the blocks is read once and written once; with cells under 64 bytes, or on a device, twice.
 */
KVF_API kvf_status kvf_permute_received(const kvf_received_shape *shape, const kvf_block_region *regions,
                                        size_t region_count, const uint32_t *block_ids, size_t block_id_count,
                                        const kvf_scratch *scratch);

/**
 * Bytes of scratch for calls with this shape and up to `block_id_count` block ids in all: for cells under 64
 * bytes about one received page or block, whichever is longer, for others 16 bytes for each of its cells (a
 * sixteenth of it for heads of 128 elements of bf16), and 8 to 16 bytes for each block id.
 *
 * @return KVF_OK; KVF_E_INVALID, KVF_E_NOT_EXPRESSIBLE, KVF_E_OVERFLOW as in kvf_permute_received()
 */
KVF_API kvf_status kvf_received_scratch_bytes(const kvf_received_shape *shape, size_t block_id_count,
                                              uint64_t *out);

/** What one request received in the blocks of one group. */
typedef struct kvf_received_request {
    const uint32_t *block_ids; /**< in the order of the sequence */
    size_t block_id_count;
    uint64_t covered_tokens; /**< tokens that were transferred, from the first block on */
} kvf_received_request;

/**
 * Finishes requests: permutes their blocks as kvf_permute_received() does, and zeroes the cells of every
 * token after the covered ones, so that the engine never reads the remains of other requests.
 *
 * For blocks that arrived in the wanted form, set both forms of `shape` alike: the call then only zeroes.
 *
 * @param requests  of one group; no two share a block. A request without blocks is allowed.
 * @return as kvf_permute_received(); KVF_E_RANGE also for more covered tokens than the blocks hold
 */
KVF_API kvf_status kvf_finish_received(const kvf_received_shape *shape, const kvf_block_region *regions,
                                       size_t region_count, const kvf_received_request *requests,
                                       size_t request_count, const kvf_scratch *scratch);

/* ---- copying blocks between two buffers ------------------------------------------------------ */

/** Which side of a copy may lie on a device, in the words of copy_kv_blocks. */
typedef enum kvf_copy_direction {
    KVF_COPY_H2D = 0, /**< "h2d": the source is host memory */
    KVF_COPY_D2H = 1, /**< "d2h": the destination is host memory */
} kvf_copy_direction;

/**
 * Copies blocks, in every layer of the source, to the destination's layer of the same name.
 *
 * The source is read in either direction: "h2d" from a staging buffer into the cache, and "d2h" back. With both sides
 * in host memory, both directions do the same. Host memory need not be pinned: copies to and from a device go through
 * 4 MiB of pinned memory of the library's. Pairs are copied in the order of the lists; a destination block that is
 * listed twice keeps the later copy.
 *
 * As vLLM's function does, this one copies nothing and returns KVF_OK if there are no source layers, no destination
 * layers or no block ids on one side, or if the lists differ in length; `copied` is then 0.
 *
 * @param source       layers with their names; every one is copied
 * @param destination  layers with their names; one that is copied to has the same parts as its source
 * @param source_ids, destination_ids  pairs of blocks
 * @param direction    says which side must be host memory
 * @param copied       receives the pairs copied in each layer; may be NULL
 * @return KVF_OK; KVF_E_NOT_FOUND (the destination has no layer of that name); KVF_E_RANGE (a block id that
 *         one side does not have, a region that is longer than its bytes); KVF_E_MISMATCH (number or size of
 *         the parts differ); KVF_E_OVERLAP (source and destination share memory, or parts or blocks share
 *         bytes); KVF_E_INVALID (NULL, zero, a layer without a name, an unknown direction, memory of a device
 *         on the host's side of the direction); KVF_E_OVERFLOW; with a device on the other side also the results listed
 *         at the top: then some layers may have been copied, and the detail names the one that was not. After
 *         KVF_E_IO nothing more is written to host memory
 */
KVF_API kvf_status kvf_copy_blocks(const kvf_block_region *source, size_t source_count,
                                   const kvf_block_region *destination, size_t destination_count,
                                   const uint32_t *source_ids, size_t source_id_count,
                                   const uint32_t *destination_ids, size_t destination_id_count,
                                   kvf_copy_direction direction, size_t *copied);

#ifdef __cplusplus
}
#endif

#endif
