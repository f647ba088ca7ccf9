/*
 * Noticing that a peer on this machine is gone, for fabrics whose libraries notice late or never.
 *
 * Each endpoint has a beacon: a socket with a random name in this machine's abstract namespace, which exists exactly
 * as long as the endpoint. Its peers learn the name from the card, connect, and never send anything: the kernel ends
 * the connection with the endpoint, however it ends, and that wakes the peer. A beacon cannot be seen from another
 * machine or network namespace.
 */
#ifndef KVF_TRANSPORT_BEACON_H
#define KVF_TRANSPORT_BEACON_H

#include "transport/transport.h"

/** The beacon on a card: a random key, then the place (machine and network namespace) where its name is valid. */
#define KVF_BEACON_KEY_BYTES 16
#define KVF_BEACON_BYTES (KVF_BEACON_KEY_BYTES + KVF_PLACE_BYTES)

/** One endpoint's. `listener` is -1 while there is none: initialise with {-1}. */
typedef struct kvf_beacon {
    int listener;
    unsigned char mark[KVF_BEACON_BYTES]; /**< for the card; all zeros: none */
    int *watchers;                        /**< accepted connections */
    size_t watcher_count, watcher_capacity;
} kvf_beacon;

/** Why the peer is lost whose beacon is gone. */
#define KVF_BEACON_GONE                                                                                      \
    "the peer's endpoint has closed, its process has ended, or its memory is of another generation than "    \
    "the card"

/**
 * Opens a beacon, closing the one there was: cards with an earlier mark become invalid, and peers that watch it lose
 * the endpoint. Best effort: if it fails there is none, and only the fabric's own detection.
 *
 * @param set  a set of watched descriptors (base/watch.h) that gives the beacon's address when kvf_beacon_tend() is due
 */
void kvf_beacon_open(kvf_beacon *beacon, int set);

/** Accepts new watchers and drops those that are gone. */
void kvf_beacon_tend(kvf_beacon *beacon);

void kvf_beacon_close(kvf_beacon *beacon);

/**
 * Watches the beacon with this mark.
 *
 * @param out  receives a descriptor that polls as hung up once the beacon is gone, or -1 if the beacon cannot be
 *             seen from here
 * @return KVF_OK, or KVF_E_PEER_LOST if the beacon's place is here but it is gone
 */
kvf_status kvf_beacon_watch(const unsigned char mark[KVF_BEACON_BYTES], int *out);

bool kvf_beacon_is_gone(int watch);

/** The machine and network namespace in a mark, in the form of kvf_host_place(). */
static inline const unsigned char *kvf_beacon_place(const unsigned char mark[KVF_BEACON_BYTES]) {
    return mark + KVF_BEACON_KEY_BYTES;
}

#endif
