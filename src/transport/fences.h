/*
 * The endpoints that were connected to one of ours, and those that must not connect again: what fabrics that can shut
 * a peer out have in common. An endpoint is known by the random bytes that its card names it by.
 */
#ifndef KVF_TRANSPORT_FENCES_H
#define KVF_TRANSPORT_FENCES_H

#include "base/base.h"

#define KVF_FENCE_NAME_BYTES 16u
#define KVF_FENCES_SEEN 1024u

/** Who was here, and who must not come. Zeroed: nobody. */
typedef struct kvf_fences {
    unsigned char (*fenced)[KVF_FENCE_NAME_BYTES];
    uint32_t fenced_count;
    unsigned char last[KVF_FENCES_SEEN][KVF_FENCE_NAME_BYTES]; /**< a ring of those that were let in */
    uint64_t seen;
} kvf_fences;

/** Whether one must not come. */
bool kvf_fences_has(const kvf_fences *fences, const unsigned char *name);

/** Whether one was here, among the last ones. */
bool kvf_fences_seen(const kvf_fences *fences, const unsigned char *name);

/** Notes that one was let in. */
void kvf_fences_see(kvf_fences *fences, const unsigned char *name);

/** Shuts one out. KVF_OK or KVF_E_NOMEM. */
kvf_status kvf_fences_add(kvf_fences *fences, const unsigned char *name);

/** Lets one come again. */
void kvf_fences_remove(kvf_fences *fences, const unsigned char *name);

void kvf_fences_free(kvf_fences *fences);

#endif
