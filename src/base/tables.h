/*
 * Hash tables and lists: uthash and utlist with kvferry's allocator, and an insertion that can fail instead of ending
 * the process.
 */
#ifndef KVF_TABLES_H
#define KVF_TABLES_H

#include "base/base.h"

#define HASH_NONFATAL_OOM 1
#define uthash_malloc(bytes) kvf_alloc(1, bytes)
#define uthash_free(memory, bytes) kvf_free(memory)
#define uthash_nonfatal_oom(element) ((void)(element))
#include <uthash.h>
#include <utlist.h>

#endif
