/*
 * Ranks with endpoints: a rank's memory is filled cell by cell and registered with a transport, which the test drives
 * by the transport's descriptor.
 */
#ifndef KVF_TEST_CELL_ENDS_H
#define KVF_TEST_CELL_ENDS_H

#include "cells.h"
#include "transport/transport.h"

typedef struct cell_end {
    cell_rank cells;
    kvf_transport *transport; /* NULL: closed */
} cell_end;

/** Opens an endpoint over the fabric `over`, or over the build's fabrics if it is NULL; allocates memory and registers
 * it. */
void end_open(cell_end *end, const kvf_fabric *over, const char *kind, const kvf_shard *shard,
              const cell_sequence *sequence);
void end_close(cell_end *end);

kvf_status end_connect(const cell_end *from, const cell_end *to, kvf_peer **out);

/** Lets every open end work that has something to do; false if no end had anything to do within `timeout_ms`. */
bool ends_work(const cell_end *const *ends, size_t count, int timeout_ms);

#endif
