/*
 * Verifying every byte of a decode rank's memory.
 */
#ifndef KVFERRY_DEMO_VERIFY_H
#define KVFERRY_DEMO_VERIFY_H

#include "rank.h"

/**
 * Checks that each cell of each request holds the pattern of its coordinates, and that no other byte has changed.
 * Puts the cells back to their old content, so that the requests can be moved again. Stops at the first wrong
 * byte.
 */
void verify_memory(live_rank *of, verdict *out);

#endif
