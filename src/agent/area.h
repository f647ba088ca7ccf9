/*
 * Checksums of an area of our cells, in memory of the host or of devices, also as the cells are after conversion to a
 * peer's types.
 */
#ifndef KVF_AGENT_AREA_H
#define KVF_AGENT_AREA_H

#include <kvferry/checksum.h>

#include "plan/walk.h"
#include "request/request.h"

/** The cells to sum, and where this rank has them. The caller fills in the first fields. */
typedef struct kvf_area {
    const kvf_shard *shard;
    const kvf_memory *regions;
    uint32_t group, part;
    kvf_range layers, units;
    const kvf_block_table *table;
    uint64_t begin, end; /* steps */
    kvf_dtype dtype;     /* elements are hashed in this type; KVF_DTYPE_INVALID: in their own */
    bool regions_stay;   /* they were checked before: a driver takes microseconds for each segment */

    /* filled in by kvf_area_check() */
    kvf_walk_side side;
    kvf_table_side blocks;
    kvf_part_desc cell;  /* the part, with the type in which its elements are hashed */
    uint64_t cell_bytes; /* in memory */
} kvf_area;

/** The sums of an area, and the distances between those of neighbouring steps, layers and units; 0: they share one. */
typedef struct kvf_sum_places {
    uint64_t *sums;
    uint64_t step, layer, unit;
} kvf_sum_places;

/**
 * Checks an area, whose fields may come from a peer.
 *
 * @return as kvf_checksum_steps(); KVF_E_UNSUPPORTED (the cells cannot be converted to this type)
 */
kvf_status kvf_area_check(kvf_area *area);

/** The memory of a layer. */
const kvf_memory *kvf_area_memory(const kvf_area *area, uint32_t layer);

/** Whether some of it is memory of devices. */
bool kvf_area_uses_devices(const kvf_area *area);

/** The address of a layer's cells at kernel block 0, row 0 and the first requested unit; the device's own address if
 * the memory is a device's. */
const unsigned char *kvf_area_first(const kvf_area *area, uint32_t layer);

/** The seed of a cell's hash, and what each step, row and unit adds to it. */
typedef struct kvf_cell_seeds {
    uint64_t first; /* of step 0, row 0 and the first requested unit */
    uint64_t step, row, unit;
} kvf_cell_seeds;

kvf_cell_seeds kvf_area_seeds(const kvf_area *area, uint32_t layer);

/** Adds the hashes of some layers, in memory of the host, of a checked area. @return KVF_OK, KVF_E_NOMEM */
kvf_status kvf_area_sum_on_host(const kvf_area *area, kvf_range layers, const kvf_sum_places *places);

#endif
