/*
 * Whether this process is a child of fork(): its memory then contains objects that its parent opened, which it must not
 * use; and locks that threads held which it does not have.
 */
#ifndef KVF_BASE_FORK_H
#define KVF_BASE_FORK_H

#include <stdint.h>

/**
 * How many forks lie between the first call of this function, here or in an ancestor, and this process. Costs no system
 * call. An object that keeps the number of its opener was inherited if the number differs now.
 */
uint32_t kvf_fork_count(void);

/**
 * Has a function called in each child of fork() from now on, before fork() returns there. It makes a lock of the whole
 * process anew, for another thread may have held it, and forgets what that thread may have left unfinished. A lock is
 * not held over fork() instead, because what is called under it may fork, as the CUDA driver does when it starts.
 *
 * Call it once for each function, before the lock is taken for the first time. If there is no memory for it, the
 * function is not called.
 */
void kvf_fork_renew(void (*renew)(void));

#endif
