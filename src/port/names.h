/*
 * Looking up host names, each in a thread of its own: a server of names that does not answer takes many seconds, and in
 * ZeroMQ's thread all connections would stand still meanwhile. Peers say where their ranks listen, and may use names.
 */
#ifndef KVF_PORT_NAMES_H
#define KVF_PORT_NAMES_H

#include <netinet/in.h>

#include "base/base.h"

#define KVF_LOOKUPS 64u /* at once, in this process; more have to wait */

typedef struct kvf_lookup kvf_lookup;

/** Begins to look a name up, as IPv4. KVF_OK; KVF_E_AGAIN: not now, there are too many, or no thread; KVF_E_NOMEM. */
kvf_status kvf_lookup_start(const char *host, size_t bytes, kvf_lookup **out);

/** KVF_OK: it has the address. KVF_IN_PROGRESS; KVF_E_IO: there is none. */
kvf_status kvf_lookup_poll(kvf_lookup *lookup, char address[INET_ADDRSTRLEN]);

/** Whoever has asked does not want to know any more; NULL is accepted. */
void kvf_lookup_drop(kvf_lookup *lookup);

#endif
