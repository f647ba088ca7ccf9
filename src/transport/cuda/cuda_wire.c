#include "transport/cuda/cuda_wire.h"

#include <errno.h>
#include <unistd.h>

#include "transport/neighbour.h"

#define BACKLOG 64

static socklen_t address_of(const unsigned char name[CUDA_ID_BYTES], struct sockaddr_un *out) {
    return kvf_neighbour_address("kvferry-cuda-", name, out);
}

static kvf_status open_socket(int *out) {
    *out = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    return *out < 0 ? kvf_fail(KVF_E_IO, "socket: %s", strerror(errno)) : KVF_OK;
}

kvf_status kvf_cuda_wire_listen(const unsigned char name[CUDA_ID_BYTES], int *out) {
    struct sockaddr_un address;
    const socklen_t length = address_of(name, &address);
    kvf_status status = open_socket(out);
    if (!status && (bind(*out, (const struct sockaddr *)&address, length) != 0 || listen(*out, BACKLOG) != 0))
        status = kvf_fail(KVF_E_IO, "bind and listen: %s", strerror(errno));
    return status;
}

static kvf_status try_connect(int fd, const unsigned char name[CUDA_ID_BYTES]) {
    struct sockaddr_un address;
    const socklen_t length = address_of(name, &address);
    if (connect(fd, (const struct sockaddr *)&address, length) == 0)
        return KVF_OK;
    if (errno == ECONNREFUSED)
        return kvf_fail(KVF_E_PEER_LOST, "the endpoint that exported the card is gone");
    if (errno == EAGAIN)
        return kvf_fail(KVF_E_AGAIN, "the peer does not accept connections: its queue is full");
    return kvf_fail(errno == EACCES || errno == EPERM ? KVF_E_PERMISSION : KVF_E_IO, "connect: %s",
                    strerror(errno));
}

kvf_status kvf_cuda_wire_connect(const unsigned char name[CUDA_ID_BYTES], int *out) {
    pid_t process;
    kvf_status status = open_socket(out);
    if (!status)
        status = try_connect(*out, name);
    if (!status)
        status = kvf_neighbour_process(*out, &process);
    if (status && *out >= 0) {
        (void)close(*out);
        *out = -1;
    }
    return status;
}

kvf_status kvf_cuda_wire_send(int socket, const void *message, size_t bytes) {
    ssize_t sent;
    do
        sent = send(socket, message, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent >= 0)
        return KVF_OK;
    if (errno == EAGAIN || errno == ENOBUFS)
        return kvf_fail(KVF_E_AGAIN, "the peer does not read its messages");
    if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN)
        return kvf_fail(KVF_E_PEER_LOST, "the peer has closed the connection");
    return kvf_fail(KVF_E_IO, "send: %s", strerror(errno));
}

kvf_status kvf_cuda_wire_receive(int socket, kvf_cuda_packet *out) {
    ssize_t got;
    int resets = 0;
    do /* if the other end closed with messages of ours unread, its own messages come after that error */
        got = recv(socket, &out->as, sizeof out->as, MSG_DONTWAIT | MSG_TRUNC);
    while (got < 0 && (errno == EINTR || (errno == ECONNRESET && resets++ == 0)));
    if (got < 0 && errno == EAGAIN)
        return KVF_E_AGAIN;
    if (got <= 0)
        return kvf_fail(KVF_E_PEER_LOST, "the peer has closed the connection");
    out->bytes = (size_t)got;
    if (out->bytes < sizeof out->as.header || out->bytes > sizeof out->as)
        return kvf_fail(KVF_E_PARSE, "a message of %zu bytes; allowed: %zu to %zu", out->bytes,
                        sizeof out->as.header, sizeof out->as);
    return KVF_OK;
}
