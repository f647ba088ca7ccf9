/*
 * Two processes with caches on devices of the stand-in: this one reads, and another, which this program is started as once
 * more, owns. Both know the same engines; cells are compared by their coordinates.
 */
#ifndef CUDA_OWNER_H
#define CUDA_OWNER_H

#include "cells.h"
#include "devices.h"

#define CACHE_REGIONS_MAX 8u

/** A rank's cache in one allocation of a device, as allocators of engines make it. */
typedef struct device_cache {
    kvf_transport *transport;
    uint32_t device;
    CUdeviceptr base;
    unsigned char *seen;                   /**< where the test finds the allocation */
    uint64_t used;                         /**< of it */
    cell_rank cells;                       /**< as the test sees them */
    kvf_memory regions[CACHE_REGIONS_MAX]; /**< as the device does */
} device_cache;

/** What both processes know. */
typedef struct device_engines {
    pair engines; /**< the reader's rank 0 of 2, and the owner's only one, in another order of other blocks */
    cell_sequence here, there;
} device_engines;

void engines_open(device_engines *known);
void engines_close(device_engines *known);

/** Takes memory for a shard, opens an endpoint and registers. */
void cache_open(device_cache *cache, const char *kind, const kvf_transport_options *options,
                const kvf_shard *shard, const cell_sequence *sequence, uint32_t device);
void cache_close(device_cache *cache);

/** Cells of the sequence that are not as rank_fill() with this seed makes them. */
uint64_t cache_wrong_cells(const device_cache *cache, uint32_t seed);

/** The other process. */
typedef struct owner_process {
    pid_t process;
    int control, answers;
    unsigned char card[16384];
    size_t card_bytes;
} owner_process;

/** Its cache is on device 0, filled with seed 1. */
void owner_start(owner_process *owner, const char *kind);

/** Has it do something, and waits for it: 's' spoils a byte of one cell that rank 0 of 2 reads, 'f' frees the memory though
 * it is registered, 'c' counts the cells that are not as a push of rank 0 of 2 with seed 2 leaves them. Returns that count. */
uint64_t owner_tell(const owner_process *owner, char what);

/** Ends it: by itself, or by SIGKILL. */
void owner_end(owner_process *owner, bool killed);

/** What main() is when it is the other process. */
int owner_main(char **arguments);

#endif
