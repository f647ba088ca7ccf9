/*
 * The endpoints that were connected to one of ours, and those that must not connect again: for all fabrics that can
 * shut a peer out. The name of an endpoint is the random bytes in its card.
 */
#ifndef KVF_TRANSPORT_FENCES_H
#define KVF_TRANSPORT_FENCES_H

#include "base/base.h"

#define KVF_FENCE_NAME_BYTES 16u
#define KVF_FENCES_SEEN 1024u

/** An endpoint that was let in. */
typedef struct kvf_fence_visitor {
    unsigned char name[KVF_FENCE_NAME_BYTES];
    bool was_sent_on;
} kvf_fence_visitor;

/** Endpoints that were connected, and those that must not connect. Zeroed: none. */
typedef struct kvf_fences {
    unsigned char (*fenced)[KVF_FENCE_NAME_BYTES];
    uint32_t fenced_count;
    kvf_fence_visitor last[KVF_FENCES_SEEN]; /**< a ring */
    uint64_t seen;
} kvf_fences;

/** Whether an endpoint must not connect. */
bool kvf_fences_has(const kvf_fences *fences, const unsigned char *name);

/** Whether an endpoint is among the last ones that were let in, and was not sent on. */
bool kvf_fences_seen(const kvf_fences *fences, const unsigned char *name);

/** Notes that an endpoint was let in. */
void kvf_fences_see(kvf_fences *fences, const unsigned char *name);

/** Notes that an endpoint was told that this fabric does not serve it: that it was let in no longer says where it is. */
void kvf_fences_send_on(kvf_fences *fences, const unsigned char *name);

/** Shuts an endpoint out. KVF_OK or KVF_E_NOMEM. */
kvf_status kvf_fences_add(kvf_fences *fences, const unsigned char *name);

/** Lets an endpoint connect again. */
void kvf_fences_remove(kvf_fences *fences, const unsigned char *name);

void kvf_fences_free(kvf_fences *fences);

#endif
