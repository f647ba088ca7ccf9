/*
 * Two processes with caches on devices of the stand-in, or real ones: this process reads, and the other, for which this
 * program is started once more, owns the cache that is read. Both know the same engines; cells are compared by their
 * coordinates.
 */
#ifndef CUDA_OWNER_H
#define CUDA_OWNER_H

#include "cells.h"
#include "devices.h"

#define CACHE_REGIONS_MAX 8u

/** A rank's cache in one allocation of a device, as engines' allocators make it. */
typedef struct device_cache {
    kvf_transport *transport;
    CUdeviceptr base;
    uint64_t bytes;      /**< of the allocation */
    int types;           /**< handle types of its segments, of which regions cut some; 0: none */
    unsigned char *seen; /**< where the test finds the allocation, see devices_look() */
    uint64_t used;       /**< bytes of the allocation that are taken */
    cell_rank cells;     /**< the regions at the addresses that the test uses */
    kvf_memory regions[CACHE_REGIONS_MAX]; /**< the regions at the device's addresses */
} device_cache;

/** What both processes know. */
typedef struct device_engines {
    /** the reader's engine of 2 ranks, of which rank 0 reads, and the owner's of one rank, with another order and other
     * blocks */
    pair engines;
    cell_sequence here, there;
} device_engines;

void engines_open(device_engines *known);
void engines_close(device_engines *known);

/** Takes memory for a shard on a device, or another if there are fewer, opens an endpoint and registers the memory.
 * @param types  the memory is in segments that are shared so; 0: it is one allocation */
void cache_open(device_cache *cache, const char *kind, const kvf_transport_options *options,
                const kvf_shard *shard, const cell_sequence *sequence, uint32_t device, int types);
void cache_close(device_cache *cache);
/** Frees the memory, even if it is registered. */
void cache_free(device_cache *cache);

/** Writes the cells of the sequence, as rank_fill() does, or all bytes, as rank_scribble() does. */
void cache_fill(const device_cache *cache, uint32_t seed);
void cache_scribble(const device_cache *cache, uint32_t seed);

/** Counts the cells of the sequence that differ from what rank_fill() with this seed writes. */
uint64_t cache_wrong_cells(const device_cache *cache, uint32_t seed);

/** The other process. */
typedef struct owner_process {
    pid_t process;
    int control, answers;
    unsigned char card[16384];
    size_t card_bytes;
} owner_process;

/** Starts the other process; its cache is on its device 0 and filled with seed 1.
 * @param types   as of cache_open()
 * @param unseen  over the stand-in: it sees one device, which this process does not see */
void owner_start(owner_process *owner, const char *kind, int types, bool unseen);

/** Gives the other process an order and waits until it is done: 's' spoils a byte of one cell that rank 0 of 2 reads,
 * 'u' unregisters region 0, 'd' counts its descriptors, 'f' frees the memory though it is registered, 'k' forks a child
 * that has its descriptors until owner_end(), 'c' counts the cells that differ from what a push of rank 0 of 2 with seed
 * 2 leaves. Returns the count, or the status. */
uint64_t owner_tell(const owner_process *owner, char what);

/** Ends the other process: lets it exit by itself, or kills it with SIGKILL. */
void owner_end(owner_process *owner, bool killed);

/** The number of this process's descriptors, and a few more. */
uint64_t open_descriptors(void);

/** What main() runs in the other process. */
int owner_main(char **arguments);

#endif
