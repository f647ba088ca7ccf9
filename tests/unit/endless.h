/*
 * The other end of a connection, spoken by the test itself over a TCP socket: ZMTP 3.0's handshake, and a message that
 * never ends.
 */
#ifndef KVF_TEST_ENDLESS_H
#define KVF_TEST_ENDLESS_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>

#define FRAMES_BYTES 65536u
#define SENT_MOST (4u << 20) /* and then we wait for it to be cut off */

/** Listens on a free port of 127.0.0.1; accepting does not wait. */
static inline int open_port(uint16_t *port) {
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof own;
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_true(listener >= 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&own, sizeof own), 0);
    assert_int_equal(listen(listener, 8), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&own, &bytes), 0);
    *port = ntohs(own.sin_port);
    return listener;
}

/** As a DEALER without keys: our greeting and READY, and then the other end's. */
static inline void shake_hands(int fd) {
    static const char ready[] = "\4\51\5READY\13Socket-Type\0\0\0\6DEALER\10Identity\0\0\0"; /* and its NUL */
    char greeting[64] = {'\xff', 0, 0, 0, 0, 0, 0, 0, 0, '\x7f', 3, 0, 'N', 'U', 'L', 'L'};
    assert_int_equal(send(fd, greeting, sizeof greeting, MSG_NOSIGNAL), sizeof greeting);
    assert_int_equal(send(fd, ready, sizeof ready, MSG_NOSIGNAL), sizeof ready);
    char theirs[sizeof greeting + sizeof ready]; /* "ROUTER" is as long */
    assert_int_equal(recv(fd, theirs, sizeof theirs, MSG_WAITALL), sizeof theirs);
}

/** Sends empty frames, each of which says that more follow. */
static inline void say_more(int fd, uint64_t *sent) {
    static char frames[FRAMES_BYTES];
    for (uint32_t i = 0; i < FRAMES_BYTES; i += 2)
        frames[i] = 1;
    /* An odd number of bytes may be taken; the next ones are sent from where that ended. */
    const ssize_t taken =
        *sent < SENT_MOST ? send(fd, frames + *sent % 2, FRAMES_BYTES - 2, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;
    *sent += taken > 0 ? (uint64_t)taken : 0;
}

/** Whether the other end has hung up; drops what it has sent. */
static inline bool is_over(int fd) {
    char bytes[256];
    ssize_t read;
    do
        read = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
    while (read > 0);
    return read == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
}

#endif
