/*
 * Checksums of cached cells that do not depend on the shape of the engine that holds them.
 *
 * The checksum of a *step* (a token, an entry of several, a state) is the sum modulo 2^64 of one 64-bit hash for each
 * of its cells, and a cell's hash depends on its bytes and on its coordinates in the model: the names of its group and
 * part, layer, row, unit and step. It does not depend on block sizes, orders, the ranks that hold a cell, or the pieces
 * it is kept in, so a rank of P at TP 4 and a rank of D at TP 2 can compare what they have in common:
 *
 *    P rank 0: heads 0..1  --- sum a ---.
 *                                        +-- a + b  ==  sum of heads 0..3 on D rank 0
 *    P rank 1: heads 2..3  --- sum b ---'
 *
 * Sums of areas that share no cell can be added. They detect corruption and mistakes; they do not protect against an
 * attacker.
 *
 * These functions only read memory, of the host or of a device, which then computes the sums itself: the caller waits,
 * and each call loads the device's code. Any thread may call them.
 */
#ifndef KVFERRY_CHECKSUM_H
#define KVFERRY_CHECKSUM_H

#include <kvferry/memory.h>
#include <kvferry/request.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Sums the cells of each step of [begin, end) in an area of one part. The arguments may come from a peer: they are
 * checked before any memory is read.
 *
 * @param shard    this rank's
 * @param regions  the memory of each region of the shard, as given to kvf_transport_register()
 * @param layers   indices into kvf_group_desc.layers; all must be held here
 * @param units    of the whole model's units; all must be held here
 * @param table    where the steps are on this rank; needs blocks only for the steps that this rank keeps
 * @param sums     [end - begin] receives the sum of each step; 0 for steps that this rank does not keep, see
 *                 kvf_token_share
 * @return KVF_OK; KVF_E_RANGE (no such group, part, layer, unit or block, a table that does not reach, a
 *         region smaller than the shard's: the detail names field, value and what is allowed);
 *         KVF_E_INVALID; KVF_E_NOMEM (only where cells are kept in pieces, or in memory of a device);
 *         for such memory also KVF_E_UNSUPPORTED (no driver, or no code for the device), KVF_E_LIMIT (more
 *         cells than a device numbers) and KVF_E_IO (of the driver; or the device has not finished for 30 s).
 *         After an error the sums are undefined
 */
KVF_API kvf_status kvf_checksum_steps(const kvf_shard *shard, const kvf_memory *regions, uint32_t group,
                                      uint32_t part, kvf_range layers, kvf_range units,
                                      const kvf_block_table *table, uint64_t begin, uint64_t end,
                                      uint64_t *sums);

/**
 * Splits the sum of one step by layer and unit, so that two sides whose sums differ can find out where.
 *
 * @param sums  [layer - layers.begin][unit - units.begin] receives a sum over the rows of the step; they add
 *              up to the step's sum, and are 0 when this rank does not keep the step
 * @return as kvf_checksum_steps()
 */
KVF_API kvf_status kvf_checksum_cells(const kvf_shard *shard, const kvf_memory *regions, uint32_t group,
                                      uint32_t part, kvf_range layers, kvf_range units,
                                      const kvf_block_table *table, uint64_t step, uint64_t *sums);

#ifdef __cplusplus
}
#endif

#endif
