/*
 * Verifying a decode rank's memory, every byte of it.
 */
#ifndef KVFERRY_DEMO_VERIFY_H
#define KVFERRY_DEMO_VERIFY_H

#include "rank.h"

/**
 * Checks that each cell of each request holds what its coordinates say, and every other byte what it held
 * before. Puts the cells back to what they were before, so that the requests can be moved again; when
 * something is wrong it stops there.
 */
void verify_memory(live_rank *of, verdict *out);

#endif
