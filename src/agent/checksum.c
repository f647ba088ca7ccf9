/* Checksums as engines ask for them: the caller waits until all are there. */
#include <kvferry/checksum.h>

#include "agent/summing.h"

/* Sums an area up; the count of sums is read only if the area is right. */
static kvf_status sum_up(kvf_area *area, uint64_t count, kvf_sum_places places) {
    if (!places.sums)
        return kvf_fail(KVF_E_INVALID, "checksum: sums is NULL");
    kvf_status status = kvf_area_check(area);
    if (status)
        return status;
    memset(places.sums, 0, (size_t)count * sizeof *places.sums);
    return kvf_summing_wait(area, &places);
}

kvf_status kvf_checksum_steps(const kvf_shard *shard, const kvf_memory *regions, uint32_t group,
                              uint32_t part, kvf_range layers, kvf_range units, const kvf_block_table *table,
                              uint64_t begin, uint64_t end, uint64_t *sums) {
    kvf_area a = {.shard = shard,
                  .regions = regions,
                  .group = group,
                  .part = part,
                  .layers = layers,
                  .units = units,
                  .table = table,
                  .begin = begin,
                  .end = end};
    return sum_up(&a, end - begin, (kvf_sum_places){.sums = sums, .step = 1});
}

kvf_status kvf_checksum_cells(const kvf_shard *shard, const kvf_memory *regions, uint32_t group,
                              uint32_t part, kvf_range layers, kvf_range units, const kvf_block_table *table,
                              uint64_t step, uint64_t *sums) {
    kvf_area a = {.shard = shard,
                  .regions = regions,
                  .group = group,
                  .part = part,
                  .layers = layers,
                  .units = units,
                  .table = table,
                  .begin = step,
                  .end = step + 1}; /* 0 if there is no such step, and refused */
    const uint64_t units_asked = units.end - units.begin;
    return sum_up(&a, (layers.end - layers.begin) * units_asked,
                  (kvf_sum_places){.sums = sums, .layer = units_asked, .unit = 1});
}
