/*
 * Which requests use which blocks of this rank's caches.
 *
 *               take_writer                    doubt
 *      FREE ──────────────────► FILLING ───────────────────► IN_DOUBT
 *      │  ▲ ◄──────────────────────┘ drop_writer                │
 *      │  └─────────────────────────────────────────────────────┘ drop_writer
 *      │ take_readers
 *      └──────────────────────► HELD, by n readers ── drop_readers ──► n - 1; FREE when none is left
 *
 * A block is read by any number of requests (prefixes are shared), or written by exactly one, named by its
 * ticket; never both. A block in doubt still belongs to that ticket, whose writer may not have stopped.
 *
 * Blocks are given as tables, one for each group of the model, of which only the ids matter; KVF_NO_BLOCK is
 * skipped. Taking is all or nothing. Dropping cannot fail: it skips blocks in another state.
 *
 * The ledger knows no leases, and never reports KVF_BLOCK_LEASED. It takes eight bytes a block, for groups in use. Only
 * one thread may use it at a time.
 */
#ifndef KVF_AGENT_LEDGER_H
#define KVF_AGENT_LEDGER_H

#include <kvferry/agent.h>

#include "base/base.h"

#define KVF_LEDGER_MAX_TICKET ((UINT64_C(1) << 62) - 1)

typedef struct kvf_ledger kvf_ledger;

/** Blocks of all groups by state; all others are free. */
typedef struct kvf_ledger_counts {
    uint64_t held, filling, in_doubt;
} kvf_ledger_counts;

/** Makes a ledger in which all blocks of a shard are free. The shard is read only during the call. */
kvf_status kvf_ledger_create(const kvf_shard *shard, kvf_ledger **out);

/** Frees a ledger, even if blocks are still taken; NULL is accepted. */
void kvf_ledger_free(kvf_ledger *ledger);

/**
 * Adds a reader to each block, for each time that the block is in the tables.
 *
 * @param tables       one for each group
 * @param group_count  must be the model's
 * @return KVF_OK; KVF_E_EXISTS (a block is being filled or in doubt; the detail names group, block, state and
 *         ticket); KVF_E_RANGE (a block beyond the cache); KVF_E_INVALID (group_count); KVF_E_NOMEM
 */
kvf_status kvf_ledger_take_readers(kvf_ledger *ledger, const kvf_block_table *tables, uint32_t group_count);

/** Removes a reader from each block that has one. */
void kvf_ledger_drop_readers(kvf_ledger *ledger, const kvf_block_table *tables, uint32_t group_count);

/**
 * Makes a ticket the only user of the blocks.
 *
 * @param ticket  up to KVF_LEDGER_MAX_TICKET
 * @return as kvf_ledger_take_readers(), and: KVF_E_EXISTS also for blocks that are held; KVF_E_OVERLAP (a
 *         block is twice in the table of a group); KVF_E_RANGE also for the ticket
 */
kvf_status kvf_ledger_take_writer(kvf_ledger *ledger, const kvf_block_table *tables, uint32_t group_count,
                                  uint64_t ticket);

/** Puts the blocks that the ticket is filling in doubt. */
void kvf_ledger_doubt(kvf_ledger *ledger, const kvf_block_table *tables, uint32_t group_count,
                      uint64_t ticket);

/** Frees the blocks that the ticket is filling or that are in doubt because of it. */
void kvf_ledger_drop_writer(kvf_ledger *ledger, const kvf_block_table *tables, uint32_t group_count,
                            uint64_t ticket);

/** The state of one block. */
typedef struct kvf_ledger_entry {
    kvf_block_state state;
    uint64_t readers; /* of a held block */
    uint64_t ticket;  /* of one being filled or in doubt */
} kvf_ledger_entry;

/** @return KVF_OK, or KVF_E_RANGE when there is no such group or block */
kvf_status kvf_ledger_look(const kvf_ledger *ledger, uint32_t group, uint32_t block, kvf_ledger_entry *out);

kvf_ledger_counts kvf_ledger_count(const kvf_ledger *ledger);

#endif
