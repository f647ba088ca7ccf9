/*
 * This fabric's part of a card: where its owner listens, its secret, and its key.
 */
#ifndef KVF_TRANSPORT_MESSAGES_CARD_H
#define KVF_TRANSPORT_MESSAGES_CARD_H

#include "transport/card.h"
#include "transport/messages/messages_wire.h"

#define MESSAGES_HOSTS_MAX 16u
#define MESSAGES_HOST_BYTES 64u /* of a host as text, with its NUL */
#define MESSAGES_KEY_BYTES 32u
#define MESSAGES_KEY_TEXT 41u /* of a Z85 key, with its NUL */

typedef struct kvf_messages_card {
    unsigned char secret[MESSAGES_SECRET_BYTES]; /**< lets its holder read and write */
    unsigned char id[MESSAGES_ID_BYTES];         /**< of the endpoint */
    unsigned char place[KVF_PLACE_BYTES];        /**< see kvf_host_place() */
    bool encrypted;
    unsigned char key[MESSAGES_KEY_BYTES]; /**< CurveZMQ public key */
    uint16_t port;
    uint32_t host_count;
    char hosts[MESSAGES_HOSTS_MAX][MESSAGES_HOST_BYTES]; /**< IPv4, IPv6, or a name; best first */
} kvf_messages_card;

kvf_status kvf_messages_card_write(const kvf_messages_card *card, kvf_buffer *out);

/** Reads a card, trusting nothing in it. KVF_OK, KVF_E_PARSE, KVF_E_UNSUPPORTED (of another version). */
kvf_status kvf_messages_card_read(const void *data, size_t bytes, kvf_messages_card *out);

/**
 * Whether a text is a host that may be connected to: a name, an IPv4 address, or an IPv6 address without brackets; not
 * the address of all interfaces.
 */
bool kvf_messages_is_host(const char *text);

/** Whether only this machine can reach the host. */
bool kvf_messages_is_loopback(const char *host);

/** Whether a host is a numeric address, and not a name. */
bool kvf_messages_is_address(const char *host);

/** Adds a host, unless it is there already or there is no room. */
void kvf_messages_add_host(kvf_messages_card *card, const char *host);

/** Adds the addresses of this machine's interfaces, loopback last. */
void kvf_messages_add_interfaces(kvf_messages_card *card);

/** Writes "tcp://host:port". */
void kvf_messages_address(const char *host, uint16_t port, char *out, size_t size);

#endif
