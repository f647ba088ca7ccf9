/*
 * Threads of the library's own. They take no signals, which are for the threads of the program, except those of their own
 * faults, so that the program's handler reports a crash.
 */
#ifndef KVF_BASE_THREAD_H
#define KVF_BASE_THREAD_H

#include <pthread.h>

/** Starts a thread. Returns 0 or an errno; the caller joins it. */
int kvf_thread_start(pthread_t *thread, void *(*run)(void *), void *context);

#endif
