/*
 * Noticing that a peer on this machine is gone, for fabrics whose libraries notice late or never.
 *
 * Each endpoint has a beacon: a socket with a random name in this machine's abstract namespace, which exists exactly
 * as long as the endpoint. Its peers learn the name from the card, connect, and never send anything: the connection
 * ends with the endpoint, however it ends, and that wakes the peer. If a forked child of the owner still holds the
 * sockets, an owner that closes ends them all the same, and peers also watch the owner's process. A beacon cannot be
 * seen from another machine or network namespace.
 *
 * An endpoint that takes memory back puts another beacon in place of its own. It sends a byte to those who watch the old
 * one: it is gone, but the endpoint lives, and may answer what it was asked. The connection ends with the endpoint.
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
    int set;                              /**< that watches it */
    unsigned char mark[KVF_BEACON_BYTES]; /**< for the card; all zeros: none */
    int *watchers;                        /**< accepted connections */
    size_t watcher_count, watcher_capacity;
} kvf_beacon;

/** Why the peer is lost whose beacon is gone. */
#define KVF_BEACON_GONE                                                                                      \
    "the peer's endpoint has closed, its process has ended, or its memory is of another generation than "    \
    "the card"

/**
 * Opens a beacon, in place of the one there was: cards with an earlier mark become invalid, and to peers that watch it it
 * is gone. Best effort: if it fails there is none, and only the fabric's own detection.
 *
 * @param set  a set of watched descriptors (base/watch.h) that gives the beacon's address once for new watchers: not
 *             again and again while there are too few descriptors to accept them
 */
void kvf_beacon_open(kvf_beacon *beacon, int set);

/** Accepts new watchers and drops those that are gone. To be called whenever the endpoint looks for events. A watcher
 * that is not accepted yet notices the beacon's end, too. */
void kvf_beacon_tend(kvf_beacon *beacon);

void kvf_beacon_close(kvf_beacon *beacon);

/** A peer's watch of a beacon. Both descriptors are -1 while there is none. */
typedef struct kvf_beacon_watch {
    int socket;  /**< connected to the beacon */
    int process; /**< of the owner, see kvf_neighbour_watch_process() */
} kvf_beacon_watch;

/**
 * Watches the beacon with this mark.
 *
 * @param set   a set of watched descriptors that gives `what` once the beacon is gone
 * @param out   receives the watch; none if the beacon cannot be seen from here, or is another user's. To be closed in
 *              any case
 * @return KVF_OK, KVF_E_PEER_LOST (the beacon's place is here but it is gone), KVF_E_IO
 */
kvf_status kvf_beacon_watch_open(const unsigned char mark[KVF_BEACON_BYTES], int set, void *what,
                                 kvf_beacon_watch *out);
void kvf_beacon_watch_close(int set, kvf_beacon_watch *watch);

/** Whether the beacon is gone; false if there is no watch. */
bool kvf_beacon_is_gone(const kvf_beacon_watch *watch);

/** Whether its endpoint is gone, too; false also if that is not known. To be asked only once the beacon is gone:
 * kvf_beacon_is_gone() may say otherwise afterwards. */
bool kvf_beacon_has_ended(const kvf_beacon_watch *watch);

/** The machine and network namespace in a mark, in the form of kvf_host_place(). */
static inline const unsigned char *kvf_beacon_place(const unsigned char mark[KVF_BEACON_BYTES]) {
    return mark + KVF_BEACON_KEY_BYTES;
}

#endif
