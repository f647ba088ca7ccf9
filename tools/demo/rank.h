/*
 * The part that prefill and decode ranks have in common: memory, an agent, and reports to the coordinator.
 */
#ifndef KVFERRY_DEMO_RANK_H
#define KVFERRY_DEMO_RANK_H

#include <kvferry/agent.h>

#include "cells.h"
#include "clock.h"
#include "demo.h"

/** A rank that runs. */
typedef struct live_rank {
    rank_seat *seat;
    const demo_job *job;
    const kvf_shard *shard;
    kvf_agent *agent;
    char kind[24];     /* of the transports by which it has read or written; "" before */
    char way[128];     /* of one of these transports */
    uint8_t **regions; /* where each begins */
    uint8_t *aside;    /* room for a cell */
    uint32_t mapped;   /* regions that are ours to unmap: brought memory */
    uint64_t total_bytes;
    uint64_t reported_ns; /* when progress was last sent */
} live_rank;

/** Opens the agent, makes the regions, fills them with `unused`, registers them. Tells the coordinator of a failure. */
bool rank_open(live_rank *out, rank_seat *seat, uint8_t unused);

/** Closes the agent, unless it is closed, and frees the memory. */
void rank_close(live_rank *closed);

/** Notes the kinds of transport that have moved bytes so far, from producers or to consumers: the peers in `role`. */
void rank_note_kinds(live_rank *of, kvf_peer_role role);

/** Sends why this rank ends, and returns false. */
bool rank_fail(const live_rank *failed, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** The same with the library's detail. */
bool rank_fail_status(const live_rank *failed, kvf_status status, const char *what);

/** Reports the rank's progress, not too often. */
void rank_progress(live_rank *of, uint64_t done, uint64_t total);

bool rank_send(const live_rank *from, message_type type, const void *data, size_t bytes);

/** Sleeps until the agent or the coordinator has something, or `timeout_ms` have passed, and lets the agent work. */
bool rank_wait(const live_rank *of, int timeout_ms, bool *message_waits);

/** Takes an order of the coordinator. Returns false if the rank must end. */
typedef bool (*rank_obey)(void *rank, const message *order);

/** Takes an event of the agent. Returns false if the rank must end. */
typedef bool (*rank_heed)(void *rank, const kvf_event *event);

/** Does what follows from time alone. Returns in how many milliseconds to look again, at the latest; -1: after the next
 * order or event. */
typedef int (*rank_look)(void *rank);

/** Takes orders and events until one of them ends the rank. `rank` begins with its live_rank; `look` may be NULL. */
void rank_serve(void *rank, rank_obey obey, rank_heed heed, rank_look look);

/** Gives all events that have arrived to `heed`. */
bool rank_take_events(void *rank, rank_heed heed);

/** Standing requests are held for this many rounds at once, so that the next round need not wait until the last rank
 * has finished this one. */
enum { STANDING_ROUNDS = 2 };

/** Writes the name of a request of a round, such as "0.17", which both sides use. */
void rank_request_id(const demo_job *job, uint32_t round, uint32_t request, char out[24]);

/** Reads the round and the request from such a name; false: it is no such name. */
bool rank_read_request_id(const kvf_request_id *id, uint32_t *round, uint32_t *request);

/** This rank's memory, to walk its cells. */
cell_memory rank_memory(const live_rank *of);

/** Lets this rank die or hang if --die or --hang names it. */
void rank_suffer_fault(const live_rank *of);

#endif
