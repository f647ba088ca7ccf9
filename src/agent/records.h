/*
 * Records that travel with a cache: copies, each set in one piece of memory.
 */
#ifndef KVF_AGENT_RECORDS_H
#define KVF_AGENT_RECORDS_H

#include "agent/agent.h"

/** Zeroed means none. */
typedef struct kvf_records {
    kvf_record *all;
    uint32_t count;
} kvf_records;

/**
 * Adds copies of other records, as given by `rank`. On failure nothing changes.
 *
 * @return KVF_OK, KVF_E_RANGE and KVF_E_INVALID as of kvf_wire_check_records() for all together, KVF_E_NOMEM
 */
kvf_status kvf_records_add(kvf_records *records, const kvf_record *more, uint32_t count, uint32_t rank);

/** Moves all records of `from` here, however many they are. KVF_E_NOMEM: nothing has changed. */
kvf_status kvf_records_take(kvf_records *records, kvf_records *from);

/** The memory that they take. */
size_t kvf_records_bytes(const kvf_records *records);

void kvf_records_free(kvf_records *records);

#endif
