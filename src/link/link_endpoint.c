/* Reads endpoints, and finds whether only this machine can reach them. */
#include "link/link_endpoint.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define PRINTED_BYTES 128

/* The printable form of a text that may be anything. */
static const char *printable(const char *text, char out[PRINTED_BYTES]) {
    size_t length = 0;
    for (; length < PRINTED_BYTES - 1 && text[length]; length++)
        out[length] = (char)(text[length] > ' ' && text[length] <= '~' ? text[length] : '?');
    out[length] = '\0';
    return out;
}

static kvf_status refuse(const char *text, const char *why) {
    char shown[PRINTED_BYTES];
    return kvf_fail(KVF_E_INVALID, "endpoint \"%s\" %s", printable(text, shown), why);
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

static bool is_word(char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool is_name(const char *text) {
    if (!is_word(*text))
        return false;
    while (is_word(*text) || *text == '.' || *text == '-' || *text == '_')
        text++;
    return *text == '\0';
}

/* Leading zeros are refused here, because link_dial.c adds zeros to tell its connections apart. */
static kvf_status read_port(const char *text, const char *port, bool listens) {
    size_t digits = 0;
    uint32_t number = 0;
    if (listens && (strcmp(port, "*") == 0 || strcmp(port, "0") == 0))
        return KVF_OK;
    for (; digits < 6 && is_digit(port[digits]); digits++)
        number = number * 10 + (uint32_t)(port[digits] - '0');
    if (digits == 0 || port[digits] != '\0' || (port[0] == '0' && digits > 1))
        return refuse(text, listens ? "must end in a port: a number or *" : "must end in a port number");
    if (number == 0 || number > UINT16_MAX) {
        char shown[PRINTED_BYTES];
        return kvf_fail(KVF_E_RANGE, "endpoint \"%s\": port is %u; allowed: 1 to 65535",
                        printable(text, shown), number);
    }
    return KVF_OK;
}

static bool is_loopback4(const uint8_t address[4]) {
    return address[0] == 127;
}

/* `host` is "[address]" or "[address%interface]". */
static kvf_status read_host6(const char *text, char *host, bool listens, kvf_endpoint *out) {
    static const uint8_t mapped[12] = {[10] = 0xFF, [11] = 0xFF};
    struct in6_addr address;
    size_t length = strlen(host);
    if (length < 2 || host[length - 1] != ']')
        return refuse(text, "has a [ without its ]");
    host[length - 1] = '\0';
    char *zone = strchr(host, '%');
    if (zone) {
        *zone = '\0';
        if (!is_name(zone + 1))
            return refuse(text, "names no interface after the %");
    }
    if (inet_pton(AF_INET6, host + 1, &address) != 1)
        return refuse(text, "has no IPv6 address between [ and ]");
    bool is_mapped = memcmp(address.s6_addr, mapped, sizeof mapped) == 0;
    bool is_any =
        IN6_IS_ADDR_UNSPECIFIED(&address) || (is_mapped && memcmp(address.s6_addr + 12, "\0\0\0", 4) == 0);
    if (is_any && !listens)
        return refuse(text, "has the address of all interfaces; connecting needs the address of one");
    out->ipv6 = true;
    out->loopback = IN6_IS_ADDR_LOOPBACK(&address) || (is_mapped && is_loopback4(address.s6_addr + 12));
    return KVF_OK;
}

static kvf_status read_host(const char *text, const char *host, bool listens, kvf_endpoint *out) {
    struct in_addr address;
    if (strcmp(host, "*") == 0)
        return listens ? KVF_OK : refuse(text, "has * as its host; connecting needs a name or an address");
    if (!is_name(host))
        return refuse(text, "has no host: a name, an IPv4 address, or an IPv6 address in [ ]");
    if (inet_pton(AF_INET, host, &address) == 1) {
        out->loopback = is_loopback4((const uint8_t *)&address.s_addr);
        if (address.s_addr == 0 && !listens)
            return refuse(text, "has the address of all interfaces; connecting needs the address of one");
    }
    return KVF_OK;
}

/* `address` is what follows "tcp://" in `text`. */
static kvf_status read_tcp(const char *text, const char *address, bool listens, kvf_endpoint *out) {
    char host[KVF_WIRE_MAX_NAME + 1];
    const char *colon = strrchr(address, ':');
    if (!colon)
        return refuse(text, "must end in :port");
    memcpy(host, address, (size_t)(colon - address));
    host[colon - address] = '\0';
    bool is_localhost = strcmp(host, "localhost") == 0;
    out->loopback = is_localhost;
    kvf_status status =
        host[0] == '[' ? read_host6(text, host, listens, out) : read_host(text, host, listens, out);
    if (!status)
        status = read_port(text, colon + 1, listens);
    if (status)
        return status;
    /* ZeroMQ listens on addresses and interfaces, not on names. */
    int prefix = is_localhost ? snprintf(out->text, sizeof out->text, "tcp://127.0.0.1:")
                              : snprintf(out->text, sizeof out->text, "%.*s", (int)(colon + 1 - text), text);
    out->port_at = (size_t)prefix;
    (void)snprintf(out->text + prefix, sizeof out->text - (size_t)prefix, "%s", colon + 1);
    return KVF_OK;
}

static kvf_status read_ipc(const char *text, const char *path, kvf_endpoint *out) {
    const size_t longest = sizeof((struct sockaddr_un *)0)->sun_path - 1;
    if (path[0] == '\0' || strcmp(path, "@") == 0)
        return refuse(text, "has no path");
    if (path[0] ==
        '*') /* ZeroMQ would choose a path relative to the current folder, which is useless to a peer */
        return refuse(text, "has * in place of a path");
    if (strlen(path) > longest)
        return kvf_fail(KVF_E_RANGE, "an ipc endpoint's path has %zu bytes; allowed: 1 to %zu", strlen(path),
                        longest);
    out->loopback = true;
    (void)snprintf(out->text, sizeof out->text, "%s", text);
    return KVF_OK;
}

static kvf_status read_endpoint(const char *text, bool listens, kvf_endpoint *out) {
    if (!text)
        return kvf_fail(KVF_E_INVALID, "endpoint is NULL");
    size_t length = strnlen(text, KVF_WIRE_MAX_NAME + 1);
    if (length == 0 || length > KVF_WIRE_MAX_NAME)
        return kvf_fail(KVF_E_RANGE, "an endpoint has %s bytes; allowed: 1 to %u", length ? "more" : "no",
                        KVF_WIRE_MAX_NAME);
    for (size_t i = 0; i < length; i++) {
        if (text[i] <= ' ' || text[i] > '~')
            return refuse(text, "has a character that is not printable ASCII");
    }
    kvf_endpoint read = {0};
    kvf_status status;
    if (strncmp(text, "tcp://", 6) == 0)
        status = read_tcp(text, text + 6, listens, &read);
    else if (strncmp(text, "ipc://", 6) == 0)
        status = read_ipc(text, text + 6, &read);
    else
        status = refuse(text, "must begin with tcp:// or ipc://");
    if (!status)
        *out = read;
    return status;
}

kvf_status kvf_endpoint_to_listen(const char *text, kvf_endpoint *out) {
    return read_endpoint(text, true, out);
}

kvf_status kvf_endpoint_to_connect(const char *text, kvf_endpoint *out) {
    return read_endpoint(text, false, out);
}

/* ---- whose address it is --------------------------------------------------------------------- */

/* Packets to an address of our own are sent from that address. None is sent here. */
static bool is_own(const struct addrinfo *there) {
    struct sockaddr_storage from;
    socklen_t bytes = sizeof from;
    char ours[KVF_ENDPOINT_BYTES], theirs[KVF_ENDPOINT_BYTES];
    int fd = socket(there->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    const bool own =
        fd >= 0 && connect(fd, there->ai_addr, there->ai_addrlen) == 0 &&
        getsockname(fd, (struct sockaddr *)&from, &bytes) == 0 &&
        getnameinfo((const struct sockaddr *)&from, bytes, ours, sizeof ours, NULL, 0, NI_NUMERICHOST) == 0 &&
        getnameinfo(there->ai_addr, there->ai_addrlen, theirs, sizeof theirs, NULL, 0, NI_NUMERICHOST) == 0 &&
        strcmp(ours, theirs) == 0;
    if (fd >= 0)
        (void)close(fd);
    return own;
}

bool kvf_endpoint_is_here(const kvf_endpoint *endpoint) {
    const struct addrinfo numeric = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_DGRAM};
    struct addrinfo *there;
    char host[KVF_ENDPOINT_BYTES];
    if (endpoint->loopback)
        return true;
    const size_t begin = strlen("tcp://") + endpoint->ipv6; /* [v6]:port */
    (void)snprintf(host, sizeof host, "%.*s", (int)(endpoint->port_at - begin - endpoint->ipv6 - 1),
                   endpoint->text + begin);
    if (getaddrinfo(host, endpoint->text + endpoint->port_at, &numeric, &there) != 0)
        return false;
    const bool own = is_own(there);
    freeaddrinfo(there);
    return own;
}
