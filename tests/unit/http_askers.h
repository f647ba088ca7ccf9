/*
 * Programs that take a port for one that speaks HTTP, as a monitoring system or a scanner may. ZeroMQ takes what they say
 * for the first message of a peer that speaks the first version of its own protocol.
 */
#ifndef KVF_TEST_HTTP_ASKERS_H
#define KVF_TEST_HTTP_ASKERS_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

#define HTTP_ASKERS 4

static const char http_request[] =
    "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: curl/7.88.1\r\nAccept: */*\r\n\r\n";

typedef struct http_askers {
    pthread_t threads[HTTP_ASKERS];
    atomic_int port; /* of 127.0.0.1; 0: they wait */
    atomic_bool over;
} http_askers;

static inline void *http_ask(void *context) {
    http_askers *askers = context;
    while (!askers->over) {
        struct sockaddr_in to = {.sin_family = AF_INET,
                                 .sin_port = htons((uint16_t)askers->port),
                                 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (to.sin_port && connect(fd, (struct sockaddr *)&to, sizeof to) == 0)
            (void)send(fd, http_request, sizeof http_request - 1, MSG_NOSIGNAL);
        (void)close(fd);
    }
    return NULL;
}

/** Starts them: they ask again and again. */
static inline void http_askers_start(http_askers *askers) {
    askers->port = 0;
    askers->over = false;
    for (int i = 0; i < HTTP_ASKERS; i++)
        assert_int_equal(pthread_create(&askers->threads[i], NULL, http_ask, askers), 0);
}

static inline void http_askers_stop(http_askers *askers) {
    askers->over = true;
    for (int i = 0; i < HTTP_ASKERS; i++)
        assert_int_equal(pthread_join(askers->threads[i], NULL), 0);
}

#endif
