#include "stream.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "cli.h"
#include "rank.h"

enum {
    BUFFER_BYTES = 64 << 20, /* more than the caches of the processor */
    PIECE_BYTES = 1 << 20,
    WARM_BYTES =
        16 << 20, /* enough for the connection to find its rate, as an engine's old connections have */
    SERVER_PATIENCE_S = 30, /* for a client that asks but does not read */
};

/* ---- addresses ------------------------------------------------------------------------------- */

/* The host of "tcp://10.0.0.1:5555" or "tcp://[fd00::1]:5555". */
static bool host_of(const char *endpoint, char host[256]) {
    static const char scheme[] = "tcp://";
    const char *begin = endpoint + sizeof scheme - 1, *colon = strrchr(endpoint, ':');
    if (strncmp(endpoint, scheme, sizeof scheme - 1) != 0 || !colon || colon < begin)
        return false;
    size_t length = (size_t)(colon - begin);
    if (length > 1 && begin[0] == '[' && begin[length - 1] == ']') {
        begin++;
        length -= 2;
    }
    if (length == 0 || length >= 256)
        return false;
    memcpy(host, begin, length);
    host[length] = '\0';
    return true;
}

/* Finds the address of an endpoint's host; free it with freeaddrinfo(). If it cannot, prints why and returns NULL. */
static struct addrinfo *find_address(const char *endpoint, uint16_t port, int flags) {
    char host[256], service[8];
    struct addrinfo *found = NULL;
    if (!host_of(endpoint, host)) {
        (void)failure("%s is not a tcp:// endpoint, and a plain stream needs one", endpoint);
        return NULL;
    }
    (void)snprintf(service, sizeof service, "%u", port);
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = flags | AI_NUMERICSERV};
    int error = getaddrinfo(host, service, &hints, &found);
    if (error)
        (void)failure("%s: %s", host, gai_strerror(error));
    return error ? NULL : found;
}

static void be_patient(int fd, uint32_t seconds) {
    const struct timeval patience = {.tv_sec = seconds};
    const int one = 1;
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

/* ---- serving --------------------------------------------------------------------------------- */

int stream_listen(stream_server *out, const char *endpoint, uint16_t port) {
    *out = (stream_server){.listener = -1};
    struct addrinfo *found = find_address(endpoint, port, AI_PASSIVE);
    if (!found)
        return EXIT_FAILED;
    const int one = 1;
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } bound = {.v6 = {.sin6_port = 0}};
    socklen_t bytes = sizeof bound;
    out->listener = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool listens = out->listener >= 0 &&
                   setsockopt(out->listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
                   bind(out->listener, found->ai_addr, found->ai_addrlen) == 0 &&
                   listen(out->listener, 16) == 0 && getsockname(out->listener, &bound.any, &bytes) == 0;
    freeaddrinfo(found);
    if (!listens) {
        (void)failure("listening for a plain stream at port %u: %s", port, strerror(errno));
        stream_close(out);
        return EXIT_FAILED;
    }
    out->port = ntohs(bound.any.sa_family == AF_INET6 ? bound.v6.sin6_port : bound.v4.sin_port);
    return EXIT_DONE;
}

static bool read_whole(int fd, void *data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t got = recv(fd, (char *)data + done, bytes - done, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        done += (size_t)got;
    }
    return true;
}

/* Answers a client, which may ask several times over one connection. */
static void answer(int fd, const uint8_t *buffer) {
    uint64_t wanted;
    while (read_whole(fd, &wanted, sizeof wanted))
        for (uint64_t sent = 0; sent < wanted;) {
            uint64_t at = sent % BUFFER_BYTES, left = wanted - sent;
            uint64_t piece = left < PIECE_BYTES ? left : PIECE_BYTES;
            if (piece > BUFFER_BYTES - at)
                piece = BUFFER_BYTES - at;
            ssize_t went = send(fd, buffer + at, piece, MSG_NOSIGNAL);
            if (went < 0 && errno == EINTR)
                continue;
            if (went <= 0)
                return;
            sent += (uint64_t)went;
        }
}

static void *run(void *context) {
    const stream_server *server = context;
    uint8_t *buffer = malloc(BUFFER_BYTES);
    if (buffer)
        memset(buffer, 0x3c, BUFFER_BYTES);
    for (;;) {
        int fd = accept4(server->listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
            continue;
        if (fd < 0)
            break; /* closed */
        be_patient(fd, SERVER_PATIENCE_S);
        if (buffer)
            answer(fd, buffer);
        (void)close(fd);
    }
    free(buffer);
    return NULL;
}

int stream_serve(stream_server *server) {
    int error = pthread_create(&server->thread, NULL, run, server);
    server->runs = error == 0;
    return error ? failure("a thread for the plain stream: %s", strerror(error)) : EXIT_DONE;
}

void stream_close(stream_server *server) {
    if (server->listener >= 0)
        (void)shutdown(server->listener, SHUT_RDWR);
    if (server->runs)
        (void)pthread_join(server->thread, NULL);
    if (server->listener >= 0)
        (void)close(server->listener);
    *server = (stream_server){.listener = -1};
}

/* ---- measuring ------------------------------------------------------------------------------- */

static bool take(int fd, uint8_t *buffer, uint64_t bytes) {
    if (send(fd, &bytes, sizeof bytes, MSG_NOSIGNAL) != (ssize_t)sizeof bytes)
        return false;
    for (uint64_t got = 0; got < bytes;) {
        uint64_t at = got % BUFFER_BYTES, left = bytes - got;
        uint64_t piece = left < PIECE_BYTES ? left : PIECE_BYTES;
        if (piece > BUFFER_BYTES - at)
            piece = BUFFER_BYTES - at;
        if (!read_whole(fd, buffer + at, piece))
            return false;
        got += piece;
    }
    return true;
}

int stream_measure(const char *endpoint, uint16_t port, uint64_t bytes, uint32_t timeout_s, double *seconds) {
    struct addrinfo *found = find_address(endpoint, port, 0);
    if (!found)
        return EXIT_FAILED;
    int result = EXIT_DONE;
    uint8_t *buffer = malloc(BUFFER_BYTES);
    int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0)
        be_patient(fd, timeout_s);
    bool good = buffer && fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) == 0;
    if (good) {
        memset(buffer, 0, BUFFER_BYTES); /* allocates its pages before the measurement */
        errno = 0;                       /* a stream that ends says nothing more */
    }
    uint64_t first = bytes / 4 < WARM_BYTES ? bytes / 4 : WARM_BYTES;
    good = good && take(fd, buffer, first);
    uint64_t begin = now_ns();
    good = good && take(fd, buffer, bytes);
    *seconds = (double)(now_ns() - begin) / 1e9;
    if (!good)
        result = failure("the plain stream from port %u: %s", port, errno ? strerror(errno) : "it ended");
    if (fd >= 0)
        (void)close(fd);
    freeaddrinfo(found);
    free(buffer);
    return result;
}
