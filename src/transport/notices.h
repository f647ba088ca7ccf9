/*
 * Notifications on their way: one behind the other in a buffer, each with its sender's name.
 */
#ifndef KVF_TRANSPORT_NOTICES_H
#define KVF_TRANSPORT_NOTICES_H

#include "transport/transport.h"

/** One of a buffer; pointers are into it. */
typedef struct kvf_notice {
    const char *sender;
    const void *data;
    uint32_t bytes;
} kvf_notice;

/** Adds one, whole or not at all; the sender's name is cut to KVF_SENDER_MAX. KVF_OK or KVF_E_NOMEM. */
kvf_status kvf_notices_add(kvf_buffer *to, const char *sender, const void *data, size_t bytes);

/** Takes the one at *at, from 0 on, and moves on; false when there are no more. */
bool kvf_notices_next(const kvf_buffer *from, size_t *at, kvf_notice *out);

#endif
