/*
 * What a prefill and a decode rank have in common: memory, an endpoint, and a way to report.
 */
#ifndef KVFERRY_CLI_RANK_H
#define KVFERRY_CLI_RANK_H

#include <kvferry/transport.h>

#include "cells.h"
#include "demo.h"

/** A rank that runs. */
typedef struct live_rank {
    rank_seat *seat;
    const demo_job *job;
    const kvf_shard *shard;
    kvf_transport *transport; /* NULL when the rank holds no layer that is cached */
    uint8_t **regions;        /* where each begins */
    uint32_t mapped;          /* regions that are ours to unmap: brought memory */
    uint64_t total_bytes;
    uint64_t reported_ns; /* when progress was last sent */
} live_rank;

uint64_t now_ns(void);

/** Opens the endpoint, makes the regions, fills them with `unused`, registers them. Reports its own failure.
 */
bool rank_open(live_rank *out, rank_seat *seat, const kvf_transport_options *callbacks, uint8_t unused);

/** Closes the endpoint, unless it is closed, and gives the memory back. */
void rank_close(live_rank *closed);

/** Closes the endpoint alone: brought memory stays; memory of the transport goes. */
void rank_close_transport(live_rank *closed);

/** Sends why this rank ends, and returns false. */
bool rank_fail(const live_rank *failed, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** The same with the library's detail. */
bool rank_fail_status(const live_rank *failed, kvf_status status, const char *what);

/** Tells how far the rank is, not too often. */
void rank_progress(live_rank *of, uint64_t done, uint64_t total);

bool rank_send(const live_rank *from, message_type type, const void *data, size_t bytes);

/** Sleeps until the transport or the coordinator has something, or `timeout_ms` have passed. */
void rank_wait(const live_rank *of, int timeout_ms, bool *message_waits);

/** Where this rank's cells are. */
cell_memory rank_memory(const live_rank *of);

/** Does to this rank what --die or --hang ask for, if they mean it. */
void rank_suffer_fault(const live_rank *of);

#endif
