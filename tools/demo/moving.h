/*
 * One round as the coordinator sees it: moving all requests, and verifying all memory.
 */
#ifndef KVFERRY_DEMO_MOVING_H
#define KVFERRY_DEMO_MOVING_H

#include "crew.h"

/** The bytes that rounds have moved, and the way they went. Zero it before the first round. */
typedef struct moved {
    char transport[24];                 /* the kinds that served */
    char way[128];                      /* how the last of them reached the memory; "": not known */
    uint64_t bytes, bytes_packed, runs; /* of the last round, over all ranks */
    double seconds;           /* of the last round: from the first rank's start to the last one's end */
    uint64_t verified_bytes;  /* cells checked, in all rounds */
    uint64_t untouched_bytes; /* other memory checked, in all rounds */
} moved;

/** Moves a round and verifies it; prints what failed, or which coordinate is wrong. */
int move_round(crew *all, moved *sum);

#endif
