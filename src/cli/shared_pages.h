/*
 * Groups that keep their blocks in the same memory, as in engines of hybrid models: attention and state take
 * whole pages from one pool.
 *
 *   buffer i:  | page 0      | page 1      | page 2      | page 3      |
 *   full:      | K V K V ... |             |             | K V K V ... |   kernel blocks fill a page
 *   ssm:       |             | x B C state.|             |             |   padded to the page
 *
 * The pages of all groups are equally large and equally many, so that two different block numbers never share bytes,
 * even in different groups.
 */
#ifndef KVFERRY_CLI_SHARED_PAGES_H
#define KVFERRY_CLI_SHARED_PAGES_H

#include "shape.h"

/**
 * Gives the groups of a shape one page size: the largest that any group needs on any rank, or the one that the user
 * gave. If any group has a number of blocks, all get it. If given numbers contradict, prints what is wrong and returns
 * EXIT_USAGE.
 */
int shared_pages_fit(engine_shape *shape, const kvf_model *model);

/** Bytes of a page of such a shape: a logical block in one buffer. */
uint64_t shared_page_bytes(const engine_shape *shape);

#endif
