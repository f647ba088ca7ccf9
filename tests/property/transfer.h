/*
 * Moves one case, and compares every byte with the world's cells.
 */
#ifndef KVF_PROPERTY_TRANSFER_H
#define KVF_PROPERTY_TRANSFER_H

#include "build.h"
#include "unlike.h"
#include "world.h"

typedef struct memory {
    unsigned char *regions[MAX_REGIONS];
} memory;

/* For each (group, layer, part, unit, remote token share): the remote rank that is read, or NOBODY. */
enum { MAX_UNITS = 24, MAX_SHARES = 9 };
#define NOBODY UINT32_MAX

typedef struct choices {
    uint32_t rank[MAX_GROUPS][MAX_LAYERS][MAX_PARTS][MAX_UNITS][MAX_SHARES];
} choices;

/** Plans, requests and moves for every local rank. False, after wrong(), if anything is wrong. */
bool transfer_case(const recipe *r, const world *w, const built *b, uint32_t *local_rank);

/* ---- plans ----------------------------------------------------------------------------------- */

/** The group on a remote rank that holds it, which tells how its tokens are shared; NULL if no rank does. */
const rank_group *remote_shares(const world *w, uint32_t group);

/** Whether some cell that the local rank wants is held by no remote rank. */
bool is_uncovered(const world *w, const asked *ask, uint32_t local_rank);

/** Checks the cuts of a plan, and lists the ranks that they read. */
bool check_cuts(const world *w, const asked *ask, const kvf_plan *plan, uint32_t local_rank, choices *out);

/** Checks that local ranks that want the same cells spread their reads evenly over the holders. */
bool check_spread(const recipe *r, const world *w, const choices *by_local_rank);

#endif
