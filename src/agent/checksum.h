/*
 * Checksums of our cells as somebody has them who keeps other types.
 */
#ifndef KVF_AGENT_CHECKSUM_H
#define KVF_AGENT_CHECKSUM_H

#include <kvferry/checksum.h>

/**
 * kvf_checksum_steps() of the cells after their conversion, as of a packed stream.
 *
 * @param dtype  KVF_DTYPE_INVALID: they are not converted
 * @return as kvf_checksum_steps(); KVF_E_UNSUPPORTED (a type into which they cannot be converted)
 */
kvf_status kvf_checksum_converted(const kvf_shard *shard, const kvf_memory *regions, uint32_t group,
                                  uint32_t part, kvf_range layers, kvf_range units,
                                  const kvf_block_table *table, uint64_t begin, uint64_t end, kvf_dtype dtype,
                                  uint64_t *sums);

#endif
