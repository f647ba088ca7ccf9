#include "channel.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct envelope {
    uint64_t type;
    uint64_t bytes;
} envelope;

/*
 * Ranks that are threads of one process hand memory to each other through the coordinator, another process. The
 * C language alone does not promise that a rank that received a message sees what the other wrote before sending.
 */
static void order_memory(void) {
    static atomic_uint handed_over;
    (void)atomic_fetch_add_explicit(&handed_over, 1, memory_order_acq_rel);
}

static bool send_all(int fd, const void *data, size_t bytes) {
    const unsigned char *at = data;
    while (bytes > 0) {
        ssize_t sent = send(fd, at, bytes, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return false;
        at += sent;
        bytes -= (size_t)sent;
    }
    return true;
}

static bool receive_all(int fd, void *data, size_t bytes) {
    unsigned char *at = data;
    while (bytes > 0) {
        ssize_t got = recv(fd, at, bytes, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        at += got;
        bytes -= (size_t)got;
    }
    return true;
}

bool channel_send(const channel *to, message_type type, const void *data, size_t bytes) {
    envelope head = {(uint64_t)type, bytes};
    order_memory();
    return send_all(to->fd, &head, sizeof head) && send_all(to->fd, data, bytes);
}

bool channel_receive(channel *from, message *out) {
    envelope head;
    if (!receive_all(from->fd, &head, sizeof head))
        return false;
    if (head.bytes > from->capacity) {
        unsigned char *buffer = realloc(from->buffer, (size_t)head.bytes);
        if (!buffer)
            return false;
        from->buffer = buffer;
        from->capacity = (size_t)head.bytes;
    }
    if (!receive_all(from->fd, from->buffer, (size_t)head.bytes))
        return false;
    order_memory();
    *out = (message){(message_type)head.type, (size_t)head.bytes, from->buffer};
    return true;
}

void channel_close(channel *closed) {
    if (closed->fd >= 0)
        (void)close(closed->fd);
    free(closed->buffer);
    *closed = (channel){.fd = -1};
}
