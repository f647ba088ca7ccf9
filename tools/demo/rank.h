/*
 * What a prefill and a decode rank have in common: memory, an agent, and a way to report.
 */
#ifndef KVFERRY_DEMO_RANK_H
#define KVFERRY_DEMO_RANK_H

#include <kvferry/agent.h>

#include "cells.h"
#include "demo.h"

/** A rank that runs. */
typedef struct live_rank {
    rank_seat *seat;
    const demo_job *job;
    const kvf_shard *shard;
    kvf_agent *agent;
    char kind[24];     /* of the transports by which it reads or writes, once it has begun to */
    char way[128];     /* of one of them */
    uint8_t **regions; /* where each begins */
    uint8_t *aside;    /* room for a cell */
    uint32_t mapped;   /* regions that are ours to unmap: brought memory */
    uint64_t total_bytes;
    uint64_t reported_ns; /* when progress was last sent */
} live_rank;

uint64_t now_ns(void);

/** Opens the agent, makes the regions, fills them with `unused`, registers them. Reports its own failure. */
bool rank_open(live_rank *out, rank_seat *seat, uint8_t unused);

/** Closes the agent, unless it is closed, and gives the memory back. */
void rank_close(live_rank *closed);

/** Notes by which kinds of transport bytes have gone so far, from producers or to consumers. */
void rank_note_kinds(live_rank *of, kvf_peer_role peers);

/** Sends why this rank ends, and returns false. */
bool rank_fail(const live_rank *failed, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** The same with the library's detail. */
bool rank_fail_status(const live_rank *failed, kvf_status status, const char *what);

/** Tells how far the rank is, not too often. */
void rank_progress(live_rank *of, uint64_t done, uint64_t total);

bool rank_send(const live_rank *from, message_type type, const void *data, size_t bytes);

/** Sleeps until the agent or the coordinator has something, or `timeout_ms` have passed, and lets the agent work. */
bool rank_wait(const live_rank *of, int timeout_ms, bool *message_waits);

/** Takes an order of the coordinator. Returns false when the rank is to end. */
typedef bool (*rank_obey)(void *rank, const message *order);

/** Takes an event of the agent. Returns false when the rank is to end. */
typedef bool (*rank_heed)(void *rank, const kvf_event *event);

/** Takes orders and events until one says that the rank is to end. `rank` begins with its live_rank. */
void rank_serve(void *rank, rank_obey obey, rank_heed heed);

/** Gives all events that there are to `heed`. */
bool rank_take_events(void *rank, rank_heed heed);

/** Where requests are held again and again, there are so many rounds: the next one does not wait for the last rank to
 * be done with this one. */
enum { STANDING_ROUNDS = 2 };

/** "0.17": how both sides name a request of a round. */
void rank_request_id(const demo_job *job, uint32_t round, uint32_t request, char out[24]);

/** The round and request of such a name; false: it is none. */
bool rank_read_request_id(const kvf_request_id *id, uint32_t *round, uint32_t *request);

/** Where this rank's cells are. */
cell_memory rank_memory(const live_rank *of);

/** Does to this rank what --die or --hang ask for, if they mean it. */
void rank_suffer_fault(const live_rank *of);

#endif
