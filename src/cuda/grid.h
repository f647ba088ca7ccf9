/*
 * How many blocks of threads a copy gets. Each occupies one multiprocessor while the copy runs, so there are few while
 * nothing waits, and more while copies wait behind each other. Only arithmetic: no driver, no device.
 *
 *     blocks
 *       most |            .---------
 *            |         .-'
 *      least |--------'                 one more for each KVF_GRID_STEP_TILES in front
 *            +---------------------- tiles in front
 *
 * A kernel keeps its blocks until it ends, so a queue that grows changes only the copies that join it. Kernels of one
 * copier run one after the other: the blocks of two never add up.
 *
 * The numbers come from one H100 (docs/performance.md), where copies had fixed numbers of blocks; the policy itself was
 * not measured.
 */
#ifndef KVF_CUDA_GRID_H
#define KVF_CUDA_GRID_H

#include "cuda/device_box.h"

/** Of a copy with nothing in front of it: moves 0.36 of what the driver's own copy moves, 500 GB/s, within a device. */
#define KVF_GRID_LEAST 16u

/** While copies wait: 0.66 of it. Up to so many slow a product of matrices by 1.5% at most, all 132 by 3.4 to 3.9%. */
#define KVF_GRID_MOST 32u

/** 1 MiB in runs from 256 B on, 256 KiB in runs of 64 B: that takes one block 25 to 44 us, and a read of 4 KiB from
 * start to end takes 25. For less, another block is not worth its multiprocessor. */
#define KVF_GRID_STEP_TILES 64u

typedef struct kvf_grid {
    uint32_t least; /**< with nothing in front */
    uint32_t most;  /**< however much is in front; at least `least` */
} kvf_grid;

/**
 * Makes a grid of what an opener asks for.
 *
 * @param least  0: KVF_GRID_LEAST. Never more than `most`
 * @param most   0: KVF_GRID_MOST, or `least` if that is more
 * @param multiprocessors  of the device, which limit both; 0: unknown, no limit
 */
static inline kvf_grid kvf_grid_of(uint32_t least, uint32_t most, uint32_t multiprocessors) {
    kvf_grid made = {.least = least ? least : KVF_GRID_LEAST};
    made.most = most ? most : made.least > KVF_GRID_MOST ? made.least : KVF_GRID_MOST;
    if (multiprocessors && made.most > multiprocessors)
        made.most = multiprocessors;
    if (made.least > made.most)
        made.least = made.most;
    return made;
}

/**
 * How many blocks to launch.
 *
 * @param tiles  of the copy; no more blocks than have one
 * @param tiles_in_front  of the copies that were started before and are not over
 */
static inline uint32_t kvf_grid_blocks(const kvf_grid *grid, uint32_t tiles, uint64_t tiles_in_front) {
    const uint64_t more = tiles_in_front / KVF_GRID_STEP_TILES;
    const uint32_t useful = more < grid->most - grid->least ? grid->least + (uint32_t)more : grid->most;
    return kvf_blocks_for(tiles, useful);
}

#endif
