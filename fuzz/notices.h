/*
 * For targets that open a transport: reads the notifications that it delivers.
 */
#ifndef KVF_FUZZ_NOTICES_H
#define KVF_FUZZ_NOTICES_H

#include "fuzz.h"

#include "transport/transport.h"

/** An on_notify that reads the sender and every byte, which must be readable. */
static inline void fuzz_read_notice(void *context, kvf_transport *from, const char *sender, const void *data,
                                    size_t bytes) {
    const volatile uint8_t *read = data; /* or the compiler would leave it out */
    (void)context;
    (void)from;
    FUZZ_MUST(strlen(sender) <= KVF_SENDER_MAX);
    for (size_t i = 0; i < bytes; i++)
        (void)read[i];
}

#endif
