#include "base/thread.h"

#include <signal.h>

int kvf_thread_start(pthread_t *thread, void *(*run)(void *), void *context) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigset_t others, before;
    (void)sigfillset(&others);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        (void)sigdelset(&others, faults[i]);
    (void)pthread_sigmask(SIG_SETMASK, &others, &before); /* a new thread has its creator's mask */
    const int error = pthread_create(thread, NULL, run, context);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}
