/*
 * Counts the kinds of cases of a run, so that a kind that the generator never makes is noticed.
 */
#ifndef KVF_PROPERTY_COVERAGE_H
#define KVF_PROPERTY_COVERAGE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "world.h"

typedef enum kind {
    /* cases */
    KIND_STATE,
    KIND_MIXED,
    KIND_MIXED_DTYPES,
    KIND_SEVERAL_STATES,
    KIND_CONV,
    KIND_REPLICATED_BESIDE_SPLIT,
    KIND_SHARED_BESIDE_SPLIT,
    KIND_GRANULES,
    KIND_SHARED_LAYERS,
    KIND_WINDOW,
    KIND_CHUNK,
    KIND_UNEVEN_TP,
    KIND_TP_ABOVE_UNITS,
    KIND_REPLICATED,
    KIND_PP,
    KIND_UNEVEN_PP,
    KIND_DCP_LOCAL,
    KIND_DCP_REMOTE,
    KIND_DCP_SAME,
    KIND_DCP_DIFFERENT,
    KIND_UNEVEN_BLOCKS,
    KIND_KERNEL_BLOCKS,
    KIND_KERNEL_BESIDE_STATE,
    KIND_KERNEL_RATIOS,
    KIND_GROUP_RATIOS,
    KIND_OTHER_ORDER,
    KIND_PAGE_BYTES,
    KIND_PAGE_ALIGN,
    KIND_SHARED_PAGES,
    KIND_SHARED_PAGES_STATE,
    KIND_SHARED_PAGES_EVEN,
    KIND_HAND_LOCAL,
    KIND_HAND_REMOTE,
    KIND_CUT_ONE,
    KIND_CUT_BOTH,
    KIND_CHANNEL_WISE,
    KIND_UNLIKE_GROUP_ORDER,
    KIND_UNLIKE_PART_ORDER,
    KIND_UNLIKE_GROUPS,
    KIND_UNLIKE_DRAFT_LOCAL,
    KIND_UNLIKE_DRAFT_REMOTE,
    KIND_UNLIKE_LAYERS,
    KIND_UNLIKE_CELLS,
    KIND_ASKED_LAYERS,
    KIND_ENGINE_REFUSED,
    KIND_SHARD_REFUSED,
    KIND_FIRST_REPLICA,
    /* local ranks */
    KIND_RANK,
    KIND_RANK_EMPTY,
    KIND_UNCOVERED,
    KIND_UNLIKE_REFUSED,
    KIND_ASKED_LESS,
    KIND_MOVED,
    KIND_PREFIX_UNALIGNED,
    KIND_CACHED_BESIDE,
    KIND_TABLE_LATER,
    KIND_TABLE_HOLES,
    KIND_REQUEST_REFUSED,
    KIND_FAULT_ELSEWHERE,
    KIND_PREDICTED,
    KIND_COUNTED,
    KIND_PACKED,
    KIND_PACKED_SIZED,
    KIND_CONVERTED,
    KIND_PACKED_CONVERTED,
    KIND_PACKED_MUTANT,
    KIND_DEVICE_GATHERED,
    KIND_DEVICE_SCATTERED,
    KIND_DEVICE_CONVERTED,
    KIND_DEVICE_PARTS,
    KIND_DEVICE_MISALIGNED,
    KIND_DEVICE_SPOILED,
    KIND_FLOW_PULL,
    KIND_FLOW_PUSH,
    KIND_FLOW_LAYERS,
    KIND_FLOW_STEPS,
    KIND_FLOW_DIRECT,
    KIND_FLOW_CHOSEN,
    KIND_FLOW_BEYOND_ARENA,
    KIND_FLOW_SHM,
    KIND_FLOW_SPOILED,
    KIND_COUNT,
} kind;

/** Counts one more case of a kind. */
void note(kind k);
void note_if(kind k, bool is_so);

/** Counts the kinds that the recipe shows. */
void note_recipe(const recipe *r);

/** Counts the kinds that only the world shows. */
void note_world(const world *w);

/** Prints all counts, and returns the number of kinds without a case. */
uint32_t print_coverage(FILE *to);

#endif
