/*
 * The files of this room check and compare keys of requests and blocks by these functions.
 */
#ifndef KVF_SCHEDULE_KEYS_H
#define KVF_SCHEDULE_KEYS_H

#include <kvferry/schedule.h>

#include "base/tables.h"
#include "request/request.h"

/** KVF_E_RANGE or KVF_E_INVALID if these bytes cannot be an id; `what` and `index` are for the message. */
kvf_status kvf_check_request_id(kvf_request_id id, const char *what, size_t index);

/** Compares by the bytes of the id, then by generation, as memcmp() does. */
int kvf_compare_request_keys(const void *a, const void *b);

/** Compares by group, then by block. */
int kvf_compare_group_blocks(const void *a, const void *b);

/** Sorts and removes duplicates; returns how many are left. */
size_t kvf_sort_group_blocks(kvf_group_block *blocks, size_t count);

#endif
