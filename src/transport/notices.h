/*
 * A queue of notifications, one after the other in a buffer, each with its sender's name.
 */
#ifndef KVF_TRANSPORT_NOTICES_H
#define KVF_TRANSPORT_NOTICES_H

#include "transport/transport.h"

/** A notification in a buffer; its pointers point into the buffer. */
typedef struct kvf_notice {
    const char *sender;
    const void *data;
    uint32_t bytes;
} kvf_notice;

/** Adds a notification, whole or not at all; the sender's name is cut to KVF_SENDER_MAX. KVF_OK or KVF_E_NOMEM. */
kvf_status kvf_notices_add(kvf_buffer *to, const char *sender, const void *data, size_t bytes);

/** Reads the notification at *at, which starts at 0, and advances *at; false when there are no more. */
bool kvf_notices_next(const kvf_buffer *from, size_t *at, kvf_notice *out);

#endif
