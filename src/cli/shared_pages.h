/*
 * Groups that keep their blocks in the same memory, as engines of hybrid models do: attention and state take
 * whole pages from one pool.
 *
 *   buffer i:  | page 0      | page 1      | page 2      | page 3      |
 *   full:      | K V K V ... |             |             | K V K V ... |   kernel blocks fill a page
 *   ssm:       |             | x B C state.|             |             |   padded to the page
 *
 * Different numbers then mean different bytes, whatever the group, because the pages of all groups are
 * equally large and equally many.
 */
#ifndef KVFERRY_CLI_SHARED_PAGES_H
#define KVFERRY_CLI_SHARED_PAGES_H

#include "shape.h"

/**
 * Gives the groups of a shape pages of one size: what the largest needs on any rank, or what was asked for;
 * and one number of blocks, if any group has one. Says what is wrong and returns EXIT_USAGE where they
 * contradict.
 */
int shared_pages_fit(engine_shape *shape, const kvf_model *model);

/** Bytes of a page of such a shape: of a logical block in one buffer. */
uint64_t shared_page_bytes(const engine_shape *shape);

#endif
