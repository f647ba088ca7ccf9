/*
 * Ranks with endpoints: memory that is filled cell by cell, registered with a transport, and driven by its
 * descriptor.
 */
#ifndef KVF_TEST_CELL_ENDS_H
#define KVF_TEST_CELL_ENDS_H

#include "cells.h"
#include "transport/transport.h"

typedef struct cell_end {
    cell_rank cells;
    kvf_transport *transport; /* NULL: closed */
} cell_end;

/** Opens over a fabric, or over those of the build, allocates and registers. */
void end_open(cell_end *end, const kvf_fabric *over, const char *kind, const kvf_shard *shard,
              const cell_sequence *sequence);
void end_close(cell_end *end);

kvf_status end_connect(const cell_end *from, const cell_end *to, kvf_peer **out);

/** Everybody works who is open and has something to do; false when nobody had within `timeout_ms`. */
bool ends_work(const cell_end *const *ends, size_t count, int timeout_ms);

#endif
