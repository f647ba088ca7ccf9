/*
 * Permuting the cells of a page in place: the one operation behind every change of block size and layout.
 *
 * A page is the unit of a permutation: usually one block, or several if a received page was longer than a
 * block. Its new order is a dense nest of three axes; a cell's source is linear in the three indices:
 *
 *     block b of the page, cell (i, j, k)  <-  byte  b*block_from + i*from[0] + j*from[1] + k*from[2]
 *
 * There are two ways to do it in place:
 *
 *   rotate   follow the cycles of the permutation: every cell is read once and written once, to its final
 *            place; the list of places is computed once for all pages of a call
 *   gather   copy the page aside and gather the cells from there: for cells so small that looking up a place
 *            costs more than moving them
 *
 * These functions do not check memory: callers must have checked every block.
 */
#ifndef KVF_KERNEL_PERMUTE_H
#define KVF_KERNEL_PERMUTE_H

#include "base/base.h"

/** A cell may be read this far beyond its end: the copy aside has room behind it. */
#define KVF_PERMUTE_SLACK 64u

/** The new order of one block: the last axis is innermost; unneeded axes come first, with a count of 1. */
typedef struct kvf_gather {
    uint64_t count[3];
    uint64_t from[3]; /**< bytes */
    uint64_t cell_bytes;
    uint64_t block_bytes; /**< the product of the counts and the cell */
    uint64_t block_from;  /**< bytes from the source of one block of the page to that of the next */
    uint32_t block_count; /**< of a page */
} kvf_gather;

/** A place in a page: the block's number above bit 40, the byte in the block below. */
typedef uint64_t kvf_place;
#define KVF_PLACE_BYTES ((uint64_t)1 << 40)
#define KVF_PLACE_BLOCKS ((uint64_t)1 << 20)

static inline unsigned char *kvf_at_place(unsigned char *const *blocks, kvf_place place) {
    return blocks[place >> 40] + (place & (KVF_PLACE_BYTES - 1));
}

/** The cycles of a permutation, one after another: each place takes the cell of the place after it, and the
 * last of a cycle that of its first. Cells that stay in place are in no cycle. */
typedef struct kvf_rotation {
    const kvf_place *places;
    const uint32_t *lengths; /**< of the cycles; at least 2 each */
    size_t place_count;
    size_t cycle_count;
    uint64_t cell_bytes;
    uint64_t block_bytes;
    uint32_t block_count; /**< of a page; if it is 1, a place is the byte in that block */
    unsigned char *hold;  /**< KVF_HOLD_BYTES, for the first cell of a cycle */
} kvf_rotation;

/** Longer cells are rotated piece by piece. */
#define KVF_HOLD_BYTES 4096u

/** One set of loops. */
typedef struct kvf_permute_kernels {
    const char *name; /**< "plain", "avx2", "avx512" */

    /** Copies a block aside. `next` is the next page's block, to prefetch, or any memory as large. */
    void (*copy_aside)(unsigned char *aside, const unsigned char *block, size_t bytes,
                       const unsigned char *next);

    /** Writes one block in its new order. `from` has KVF_PERMUTE_SLACK readable bytes behind the cells. */
    void (*gather)(const kvf_gather *gather, unsigned char *to, const unsigned char *from);

    /**
     * A gather in two halves instead, for pages of one block: the copy aside is half way to the new order.
     * False: this permutation needs copy_aside() and gather(). NULL: all do.
     */
    bool (*put_aside)(const kvf_gather *gather, unsigned char *aside, const unsigned char *block,
                      const unsigned char *next);
    void (*bring_back)(const kvf_gather *gather, unsigned char *block, const unsigned char *aside);

    /** Whether this set gathers faster than those of narrower vectors; NULL: always. */
    bool (*suits_gather)(const kvf_gather *gather);

    /** Rotates the cells of one page. `next` has the blocks of the page to be rotated after it, or is NULL. */
    void (*rotate)(const kvf_rotation *rotation, unsigned char *const *blocks, unsigned char *const *next);
} kvf_permute_kernels;

/** The sets that this machine can run, from plain to the widest vectors; NULL after the last. Any thread. */
const kvf_permute_kernels *kvf_kernel_permute_set(uint32_t i);

extern const kvf_permute_kernels kvf_permute_plain;
#if defined(__x86_64__)
extern const kvf_permute_kernels kvf_permute_avx2;
extern const kvf_permute_kernels kvf_permute_avx512;
#endif

typedef enum kvf_permute_way {
    KVF_PERMUTE_NOTHING = 0, /**< the order is already right */
    KVF_PERMUTE_ROTATE = 1,
    KVF_PERMUTE_GATHER = 2,
} kvf_permute_way;

/** A permutation that is ready to run. It uses the memory it was prepared with and owns nothing. */
typedef struct kvf_permutation {
    kvf_gather gather;
    kvf_rotation rotation;
    const kvf_permute_kernels *kernels;
    unsigned char *aside; /**< a page and KVF_PERMUTE_SLACK */
    kvf_permute_way way;
} kvf_permutation;

/** The faster way for this permutation. */
kvf_permute_way kvf_permute_best_way(const kvf_gather *gather);

/** The fastest set for this permutation and way, of those that this machine can run. */
const kvf_permute_kernels *kvf_permute_best_kernels(const kvf_gather *gather, kvf_permute_way way);

/** Bytes that kvf_permute_prepare() needs; false if they exceed 64 bits or the way cannot do the permutation. */
bool kvf_permute_memory_bytes(const kvf_gather *gather, kvf_permute_way way, uint64_t *out);

/** Prepares a permutation in memory of at least kvf_permute_memory_bytes(), aligned for uint64_t. */
void kvf_permute_prepare(const kvf_gather *gather, kvf_permute_way way, const kvf_permute_kernels *kernels,
                         void *memory, kvf_permutation *out);

/** Permutes one page, given its blocks, gather.block_count of them. `next` as in the kernels' rotate. */
void kvf_permute_page(const kvf_permutation *permutation, unsigned char *const *blocks,
                      unsigned char *const *next);

#endif
