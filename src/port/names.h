/*
 * Looking up host names, each in a thread of its own: a server of names that does not answer takes many seconds, and in
 * ZeroMQ's thread all connections would stand still meanwhile. Peers say where their ranks listen, and may use names.
 */
#ifndef KVF_PORT_NAMES_H
#define KVF_PORT_NAMES_H

#include <netinet/in.h>

#include "base/base.h"
#include "base/clock.h"

#define KVF_LOOKUPS 64u                        /* at once, in this process; more have to wait */
#define KVF_LOOKUP_PAUSE (5 * KVF_MILLISECOND) /* before the caller asks again, as nothing wakes it */

typedef struct kvf_lookup kvf_lookup;

/**
 * Looks a name up, as IPv4: begins to if `*lookup` is NULL, and ends with an answer, after which that is NULL again.
 *
 * @param host  `bytes` long, the same in each call until there is an answer; copied
 * @return KVF_OK: `address` has it; KVF_IN_PROGRESS: not yet, and the caller asks again; KVF_E_IO: there is none;
 *         KVF_E_NOMEM
 */
kvf_status kvf_look_up(const char *host, size_t bytes, kvf_lookup **lookup, char address[INET_ADDRSTRLEN]);

/** The caller does not want to know any more: sets it to NULL, which is accepted. */
void kvf_lookup_drop(kvf_lookup **lookup);

#endif
