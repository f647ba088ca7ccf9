#include "base/fork.h"

#include <pthread.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static uint32_t forks; /* changed only in a child of fork(), which has one thread */

static void count_child(void) {
    forks++;
}

/* If there is no memory for the handler, nothing is counted and a child is not detected. */
static void watch_forks(void) {
    (void)pthread_atfork(NULL, NULL, count_child);
}

void kvf_fork_renew(void (*renew)(void)) {
    (void)pthread_once(&once, watch_forks); /* so that a renewed lock finds the child counted */
    (void)pthread_atfork(NULL, NULL, renew);
}

uint32_t kvf_fork_count(void) {
    (void)pthread_once(&once, watch_forks);
    return forks;
}
