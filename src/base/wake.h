/*
 * A descriptor for poll and epoll that is readable exactly while its owner wants to be called.
 */
#ifndef KVF_WAKE_H
#define KVF_WAKE_H

#include "base/base.h"

/** `fd` is -1 while it is not open: initialise with {-1, false}. One thread at a time. */
typedef struct kvf_wake {
    int fd;
    bool on;
} kvf_wake;

/** @return KVF_OK; KVF_E_IO when the process has too many descriptors */
kvf_status kvf_wake_open(kvf_wake *wake);

/** Makes it readable or not readable; does nothing if it is so already, or is not open. */
void kvf_wake_set(kvf_wake *wake, bool on);

/** Closes it; one that is not open is accepted. */
void kvf_wake_close(kvf_wake *wake);

#endif
