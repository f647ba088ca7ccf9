/*
 * Checksums of our cells as they are after conversion to a peer's types.
 */
#ifndef KVF_AGENT_CHECKSUM_H
#define KVF_AGENT_CHECKSUM_H

#include <kvferry/checksum.h>

/**
 * kvf_checksum_steps() of the cells after their conversion, as a packed stream converts them.
 *
 * @param dtype  KVF_DTYPE_INVALID: no conversion
 * @return as kvf_checksum_steps(); KVF_E_UNSUPPORTED (the cells cannot be converted to this type)
 */
kvf_status kvf_checksum_converted(const kvf_shard *shard, const kvf_memory *regions, uint32_t group,
                                  uint32_t part, kvf_range layers, kvf_range units,
                                  const kvf_block_table *table, uint64_t begin, uint64_t end, kvf_dtype dtype,
                                  uint64_t *sums);

#endif
