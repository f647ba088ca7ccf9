#include "port/sockets.h"

#include <errno.h>

kvf_status kvf_zmq_fail(const char *what) {
    int error = zmq_errno();
    if (error == ENOMEM)
        return kvf_nomem(what);
    return kvf_fail(KVF_E_IO, "%s: %s", what, zmq_strerror(error));
}

/* There is no option for that, but a domain of the ZeroMQ Authentication Protocol does it, for old peers say nothing that
 * could be asked about. Others are asked about only where somebody answers that protocol. (ZeroMQ 4.2 to 4.3.5) */
bool kvf_zmq_refuse_old(void *router) {
    static const char domain[] = "kvferry";
    return zmq_setsockopt(router, ZMQ_ZAP_DOMAIN, domain, sizeof domain - 1) == 0;
}

static bool was_interrupted(int result) {
    return result < 0 && zmq_errno() == EINTR;
}

/* Makes a call, again if a signal has ended it. */
#define REPEAT(result, call)                                                                                 \
    do                                                                                                       \
        (result) = (call);                                                                                   \
    while (was_interrupted(result))

int kvf_zmq_bind(void *socket, const char *address) {
    int result;
    REPEAT(result, zmq_bind(socket, address));
    return result;
}

int kvf_zmq_connect(void *socket, const char *address) {
    int result;
    REPEAT(result, zmq_connect(socket, address));
    return result;
}

int kvf_zmq_disconnect(void *socket, const char *address) {
    int result;
    REPEAT(result, zmq_disconnect(socket, address));
    return result;
}

int kvf_zmq_send(void *socket, const void *data, size_t bytes, int flags) {
    int result;
    REPEAT(result, zmq_send(socket, data, bytes, ZMQ_DONTWAIT | flags));
    return result < 0 ? zmq_errno() : 0;
}

int kvf_zmq_send_last(void *socket, zmq_msg_t *frame) {
    int result;
    REPEAT(result, zmq_msg_send(frame, socket, ZMQ_DONTWAIT));
    const int error = result < 0 ? zmq_errno() : 0;
    if (error)
        (void)zmq_msg_close(frame);
    return error;
}

bool kvf_zmq_readable(void *socket) {
    int events = 0, result;
    size_t bytes = sizeof events;
    REPEAT(result, zmq_getsockopt(socket, ZMQ_EVENTS, &events, &bytes));
    return result == 0 && (events & ZMQ_POLLIN);
}

bool kvf_zmq_receive_frame(void *socket, zmq_msg_t *frame) {
    int result;
    REPEAT(result, zmq_msg_recv(frame, socket, ZMQ_DONTWAIT));
    return result >= 0;
}

uint32_t kvf_zmq_receive(void *socket, zmq_msg_t *frames, uint32_t capacity) {
    uint32_t count = 0;
    bool more = true;
    zmq_msg_t surplus;
    (void)zmq_msg_init(&surplus);
    while (more) {
        zmq_msg_t *frame = count < capacity ? &frames[count] : &surplus;
        if (!kvf_zmq_receive_frame(socket, frame))
            break;
        count++;
        more = zmq_msg_more(frame) != 0;
    }
    (void)zmq_msg_close(&surplus);
    return count;
}

static int watch(void *socket, const char *address, int events) {
    int result;
    REPEAT(result, zmq_socket_monitor(socket, address, events));
    return result;
}

void kvf_zmq_close(void *socket) {
    if (!socket)
        return;
    (void)watch(socket, NULL, 0);
    (void)zmq_close(socket);
}

kvf_status kvf_zmq_monitor(void *zmq, void *socket, const char *address, int events, void **out) {
    const int none = 0;
    *out = zmq_socket(zmq, ZMQ_PAIR);
    /* Events must never wait for us to read them: ZeroMQ's own thread would wait too. */
    if (!*out || zmq_setsockopt(*out, ZMQ_LINGER, &none, sizeof none) ||
        zmq_setsockopt(*out, ZMQ_RCVHWM, &none, sizeof none) || watch(socket, address, events) ||
        kvf_zmq_connect(*out, address))
        return kvf_zmq_fail("watching connections");
    return KVF_OK;
}

bool kvf_zmq_take_event(void *monitor, uint16_t *event, uint32_t *value, zmq_msg_t *text) {
    zmq_msg_t frames[2]; /* event and value; endpoint text */
    uint32_t count;
    do { /* anything else would be ZeroMQ's mistake */
        (void)zmq_msg_init(&frames[0]);
        (void)zmq_msg_init(&frames[1]);
        count = kvf_zmq_receive(monitor, frames, 2);
        bool good = count == 2 && zmq_msg_size(&frames[0]) == sizeof *event + sizeof *value;
        if (good) {
            memcpy(event, zmq_msg_data(&frames[0]), sizeof *event);
            memcpy(value, (const char *)zmq_msg_data(&frames[0]) + sizeof *event, sizeof *value);
        }
        if (good && text)
            (void)zmq_msg_move(text, &frames[1]);
        (void)zmq_msg_close(&frames[0]);
        (void)zmq_msg_close(&frames[1]);
        if (good)
            return true;
    } while (count > 0);
    return false;
}
