/*
 * Whether this process is a child of fork(): what its parent opened is in its memory, too, but not its own.
 */
#ifndef KVF_BASE_FORK_H
#define KVF_BASE_FORK_H

#include <stdint.h>

/**
 * How many times fork() has made a child on the way to this process, since the first call anywhere on it. Costs no
 * system call: who keeps the number sees by another one later that it was inherited.
 */
uint32_t kvf_fork_count(void);

#endif
