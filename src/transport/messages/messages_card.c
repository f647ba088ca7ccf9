#include "transport/messages/messages_card.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>

#define CARD_VERSION 1u

/* ---- hosts ----------------------------------------------------------------------------------- */

bool kvf_messages_is_loopback(const char *host) {
    struct in6_addr address;
    return strncmp(host, "127.", 4) == 0 || strcmp(host, "localhost") == 0 ||
           (inet_pton(AF_INET6, host, &address) == 1 && IN6_IS_ADDR_LOOPBACK(&address));
}

bool kvf_messages_is_address(const char *host) {
    struct in6_addr address;
    return inet_pton(AF_INET, host, &address) == 1 || inet_pton(AF_INET6, host, &address) == 1;
}

bool kvf_messages_is_host(const char *text) {
    static const char word[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
    struct in_addr four;
    struct in6_addr six;
    size_t length = strnlen(text, MESSAGES_HOST_BYTES);
    if (length == 0 || length == MESSAGES_HOST_BYTES)
        return false;
    if (inet_pton(AF_INET6, text, &six) == 1)
        return !IN6_IS_ADDR_UNSPECIFIED(&six);
    if (inet_pton(AF_INET, text, &four) == 1)
        return four.s_addr != 0;
    return text[0] != '-' && text[0] != '.' && strspn(text, word) == length;
}

void kvf_messages_add_host(kvf_messages_card *card, const char *host) {
    for (uint32_t i = 0; i < card->host_count; i++)
        if (strcmp(card->hosts[i], host) == 0)
            return;
    if (card->host_count < MESSAGES_HOSTS_MAX && kvf_messages_is_host(host))
        (void)snprintf(card->hosts[card->host_count++], MESSAGES_HOST_BYTES, "%s", host);
}

/* The text of an interface's address; "" for one that works only with the interface's name. */
static void describe(const struct sockaddr *address, char out[MESSAGES_HOST_BYTES]) {
    out[0] = '\0';
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *four = (const struct sockaddr_in *)(const void *)address;
        (void)inet_ntop(AF_INET, &four->sin_addr, out, MESSAGES_HOST_BYTES);
    } else if (address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)(const void *)address;
        if (!IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr))
            (void)inet_ntop(AF_INET6, &six->sin6_addr, out, MESSAGES_HOST_BYTES);
    }
}

void kvf_messages_add_interfaces(kvf_messages_card *card) {
    struct ifaddrs *first;
    char host[MESSAGES_HOST_BYTES];
    if (getifaddrs(&first) == 0) {
        for (const struct ifaddrs *at = first; at; at = at->ifa_next) {
            if (!at->ifa_addr || !(at->ifa_flags & IFF_UP) || (at->ifa_flags & IFF_LOOPBACK))
                continue;
            describe(at->ifa_addr, host);
            if (card->host_count + 1 < MESSAGES_HOSTS_MAX)
                kvf_messages_add_host(card, host);
        }
        freeifaddrs(first);
    }
    kvf_messages_add_host(card, "127.0.0.1");
}

void kvf_messages_address(const char *host, uint16_t port, char *out, size_t size) {
    bool six = strchr(host, ':') != NULL;
    (void)snprintf(out, size, "tcp://%s%s%s:%u", six ? "[" : "", host, six ? "]" : "", port);
}

/* ---- the card -------------------------------------------------------------------------------- */

kvf_status kvf_messages_card_write(const kvf_messages_card *card, kvf_buffer *out) {
    unsigned char head[2 + 1 + 2 + 1];
    size_t room = sizeof head + MESSAGES_SECRET_BYTES + MESSAGES_ID_BYTES + KVF_PLACE_BYTES +
                  MESSAGES_KEY_BYTES + card->host_count * (size_t)MESSAGES_HOST_BYTES;
    kvf_status status = kvf_buffer_room(out, room); /* so that nothing below fails */
    if (status)
        return status;
    kvf_put_number(head, CARD_VERSION, 2);
    head[2] = card->encrypted;
    kvf_put_number(head + 3, card->port, 2);
    head[5] = (unsigned char)card->host_count;
    (void)kvf_buffer_add(out, head, sizeof head);
    (void)kvf_buffer_add(out, card->secret, MESSAGES_SECRET_BYTES);
    (void)kvf_buffer_add(out, card->id, MESSAGES_ID_BYTES);
    (void)kvf_buffer_add(out, card->place, KVF_PLACE_BYTES);
    if (card->encrypted)
        (void)kvf_buffer_add(out, card->key, MESSAGES_KEY_BYTES);
    for (uint32_t i = 0; i < card->host_count; i++) {
        unsigned char length = (unsigned char)strlen(card->hosts[i]);
        (void)kvf_buffer_add(out, &length, 1);
        (void)kvf_buffer_add(out, card->hosts[i], length);
    }
    return KVF_OK;
}

static bool read_hosts(kvf_byte_reader *from, uint32_t count, kvf_messages_card *out) {
    char host[MESSAGES_HOST_BYTES];
    for (uint32_t i = 0; i < count; i++) {
        size_t length = (size_t)kvf_take_number(from, 1);
        const void *text = length < sizeof host ? kvf_take_bytes(from, length) : NULL;
        if (!text)
            return false;
        memcpy(host, text, length);
        host[length] = '\0';
        if (strlen(host) != length || !kvf_messages_is_host(host))
            return false;
        kvf_messages_add_host(out, host);
    }
    return true;
}

static bool take_into(kvf_byte_reader *from, unsigned char *out, size_t bytes) {
    const void *taken = kvf_take_bytes(from, bytes);
    if (taken)
        memcpy(out, taken, bytes);
    return taken != NULL;
}

kvf_status kvf_messages_card_read(const void *data, size_t bytes, kvf_messages_card *out) {
    kvf_byte_reader from = {data, bytes, false};
    *out = (kvf_messages_card){0};
    uint32_t version = (uint32_t)kvf_take_number(&from, 2);
    if (!from.cut_off && version != CARD_VERSION)
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "its part of the card has version %u; this library knows version %u", version,
                        CARD_VERSION);
    uint32_t encrypted = (uint32_t)kvf_take_number(&from, 1);
    out->encrypted = encrypted == 1;
    out->port = (uint16_t)kvf_take_number(&from, 2);
    uint32_t hosts = (uint32_t)kvf_take_number(&from, 1);
    bool good =
        take_into(&from, out->secret, MESSAGES_SECRET_BYTES) &&
        take_into(&from, out->id, MESSAGES_ID_BYTES) && take_into(&from, out->place, KVF_PLACE_BYTES) &&
        (!out->encrypted || take_into(&from, out->key, MESSAGES_KEY_BYTES)) && read_hosts(&from, hosts, out);
    if (!good || encrypted > 1 || from.left > 0 || out->port == 0 || hosts > MESSAGES_HOSTS_MAX || hosts == 0)
        return kvf_fail(KVF_E_PARSE, "its part of the card is cut off or damaged");
    return KVF_OK;
}
