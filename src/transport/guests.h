/*
 * The endpoints that were connected to one of ours, and those that must not connect again: what fabrics that can shut
 * a peer out have in common. An endpoint is known by the random bytes that its card names it by.
 */
#ifndef KVF_TRANSPORT_GUESTS_H
#define KVF_TRANSPORT_GUESTS_H

#include "base/base.h"

#define KVF_GUEST_BYTES 16u
#define KVF_GUESTS_KEPT 1024u

/** Who was here, and who must not come. Zeroed: nobody. */
typedef struct kvf_guests {
    unsigned char (*fenced)[KVF_GUEST_BYTES];
    uint32_t fenced_count;
    unsigned char last[KVF_GUESTS_KEPT][KVF_GUEST_BYTES]; /**< a ring of those that were let in */
    uint64_t seen;
} kvf_guests;

/** Whether one must not come. */
bool kvf_guests_fenced(const kvf_guests *guests, const unsigned char *name);

/** Whether one was here, among the last ones. */
bool kvf_guests_seen(const kvf_guests *guests, const unsigned char *name);

/** Notes that one was let in. */
void kvf_guests_see(kvf_guests *guests, const unsigned char *name);

/** Shuts one out. KVF_OK or KVF_E_NOMEM. */
kvf_status kvf_guests_fence(kvf_guests *guests, const unsigned char *name);

/** Lets one come again. */
void kvf_guests_admit(kvf_guests *guests, const unsigned char *name);

void kvf_guests_free(kvf_guests *guests);

#endif
