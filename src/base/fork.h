/*
 * Whether this process is a child of fork(): its memory then contains objects that its parent opened, which it must not
 * use.
 */
#ifndef KVF_BASE_FORK_H
#define KVF_BASE_FORK_H

#include <stdint.h>

/**
 * How many forks lie between the first call of this function, here or in an ancestor, and this process. Costs no system
 * call. An object that keeps the number of its opener was inherited if the number differs now.
 */
uint32_t kvf_fork_count(void);

#endif
