/*
 * Somebody who speaks ZMTP 3 by hand, without keys, and sends parts of a message that it never ends.
 */
#ifndef KVF_TEST_ENDLESS_H
#define KVF_TEST_ENDLESS_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define ENDLESS_PART (64u << 10)

typedef struct endless_talk {
    int fd;
    uint64_t sent;
    unsigned char part[9 + ENDLESS_PART];
    size_t at; /* of the part that is on its way */
} endless_talk;

/** Connects to a port of this machine and shakes hands, for which nobody there need make progress; false: it cannot. */
static inline bool endless_open(endless_talk *e, uint16_t port) {
    static const unsigned char ready[] = "\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06"
                                         "DEALER";
    unsigned char greeting[64] = {0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0, 'N', 'U', 'L', 'L'}, theirs[65];
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    *e = (endless_talk){.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    e->part[0] = 3; /* more come; its length has 8 bytes */
    for (int i = 0; i < 8; i++)
        e->part[1 + i] = (unsigned char)((uint64_t)ENDLESS_PART >> 8 * (7 - i));
    return e->fd >= 0 && connect(e->fd, (const struct sockaddr *)&to, sizeof to) == 0 &&
           send(e->fd, greeting, sizeof greeting, MSG_NOSIGNAL) == sizeof greeting &&
           send(e->fd, ready, sizeof ready - 1, MSG_NOSIGNAL) == sizeof ready - 1 &&
           /* A message of before it is ready, too, would end the connection. */
           recv(e->fd, theirs, sizeof theirs, MSG_WAITALL) == sizeof theirs;
}

/** Sends what is taken at once, up to one part; false: it was hung up on. */
static inline bool endless_go_on(endless_talk *e) {
    const ssize_t sent = send(e->fd, e->part + e->at, sizeof e->part - e->at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    e->at = (e->at + (size_t)sent) % sizeof e->part;
    e->sent += (uint64_t)sent;
    return true;
}

#endif
