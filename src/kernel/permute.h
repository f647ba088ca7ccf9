/*
 * Permuting the cells of a page in place: the one operation behind every change of block size and layout.
 *
 * A page is what one permutation works on: usually one block, or several where a received page was longer
 * than a block. Its new order is a dense nest of three axes; where a cell of it comes from is linear in the
 * three indices:
 *
 *     block b of the page, cell (i, j, k)  <-  byte  b*block_from + i*from[0] + j*from[1] + k*from[2]
 *
 * Two ways to do it in place:
 *
 *   rotate   follow the cycles of the permutation: every cell is read once and written once, to where it
 *            belongs; the list of places is worked out once for all pages of a call
 *   gather   copy the page aside and gather the cells from there: for cells so small that a place for each
 *            would cost more than moving it
 *
 * Nothing here checks memory: callers have checked every block before.
 */
#ifndef KVF_KERNEL_PERMUTE_H
#define KVF_KERNEL_PERMUTE_H

#include "base/base.h"

/** A cell that is read beyond its end by this much harms nobody: what is put aside has room behind it. */
#define KVF_PERMUTE_SLACK 64u

/** The new order of one block: the last axis is innermost; axes that are not needed come first, with one
 * entry. */
typedef struct kvf_gather {
    uint64_t count[3];
    uint64_t from[3]; /**< bytes */
    uint64_t cell_bytes;
    uint64_t block_bytes; /**< the product of the counts and the cell */
    uint64_t block_from;  /**< bytes from what one block of the page takes to what the next one takes */
    uint32_t block_count; /**< of a page */
} kvf_gather;

/** A place in a page: the block's number above bit 40, the byte in the block below. */
typedef uint64_t kvf_place;
#define KVF_PLACE_BYTES ((uint64_t)1 << 40)
#define KVF_PLACE_BLOCKS ((uint64_t)1 << 20)

static inline unsigned char *kvf_at_place(unsigned char *const *blocks, kvf_place place) {
    return blocks[place >> 40] + (place & (KVF_PLACE_BYTES - 1));
}

/** The cycles of a permutation, one after another: each place takes the cell of the place behind it, and the
 * last of a cycle that of its first. Cells that stay where they are, are in no cycle. */
typedef struct kvf_rotation {
    const kvf_place *places;
    const uint32_t *lengths; /**< of the cycles; at least 2 each */
    size_t place_count;
    size_t cycle_count;
    uint64_t cell_bytes;
    uint64_t block_bytes;
    uint32_t block_count; /**< of a page; where it is 1, a place is the byte in that block */
    unsigned char *hold;  /**< KVF_HOLD_BYTES, for the cell that waits */
} kvf_rotation;

/** Longer cells are rotated piece by piece. */
#define KVF_HOLD_BYTES 4096u

/** One set of loops. */
typedef struct kvf_permute_kernels {
    const char *name; /**< "plain", "avx2", "avx512" */

    /** Copies a block aside. `next` is the block of the next page, to ask for, or any memory as large. */
    void (*copy_aside)(unsigned char *aside, const unsigned char *block, size_t bytes,
                       const unsigned char *next);

    /** Writes one block in its new order. `from` has KVF_PERMUTE_SLACK readable bytes behind what is taken.
     */
    void (*gather)(const kvf_gather *gather, unsigned char *to, const unsigned char *from);

    /**
     * A gather in two halves instead, for pages of one block: what is put aside is half way to its new order.
     * False: this permutation it gathers at once. NULL: all.
     */
    bool (*put_aside)(const kvf_gather *gather, unsigned char *aside, const unsigned char *block,
                      const unsigned char *next);
    void (*bring_back)(const kvf_gather *gather, unsigned char *block, const unsigned char *aside);

    /** Whether these two, or gather, are faster than those of narrower vectors; NULL: always. */
    bool (*suits_gather)(const kvf_gather *gather);

    /** Rotates the cells of one page. `next` are the blocks of the page that will be rotated after it, or
     * NULL. */
    void (*rotate)(const kvf_rotation *rotation, unsigned char *const *blocks, unsigned char *const *next);
} kvf_permute_kernels;

/** The sets this machine can run, from plain to the widest vectors; NULL past the last. Any thread. */
const kvf_permute_kernels *kvf_kernel_permute_set(uint32_t i);

extern const kvf_permute_kernels kvf_permute_plain;
#if defined(__x86_64__)
extern const kvf_permute_kernels kvf_permute_avx2;
extern const kvf_permute_kernels kvf_permute_avx512;
#endif

typedef enum kvf_permute_way {
    KVF_PERMUTE_NOTHING = 0, /**< the order is the wanted one */
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

/** The way that is faster for this permutation. */
kvf_permute_way kvf_permute_best_way(const kvf_gather *gather);

/** The set that is faster for it, of those this machine can run. */
const kvf_permute_kernels *kvf_permute_best_kernels(const kvf_gather *gather, kvf_permute_way way);

/** Bytes that kvf_permute_prepare() needs; false where they do not fit in 64 bits or the way cannot do it. */
bool kvf_permute_memory_bytes(const kvf_gather *gather, kvf_permute_way way, uint64_t *out);

/** Prepares a permutation in memory of at least that size, aligned for uint64_t. */
void kvf_permute_prepare(const kvf_gather *gather, kvf_permute_way way, const kvf_permute_kernels *kernels,
                         void *memory, kvf_permutation *out);

/** Permutes one page, given its blocks, gather.block_count of them. `next` as in the kernels' rotate. */
void kvf_permute_page(const kvf_permutation *permutation, unsigned char *const *blocks,
                      unsigned char *const *next);

#endif
