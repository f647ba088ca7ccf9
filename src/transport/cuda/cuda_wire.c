#include "transport/cuda/cuda_wire.h"

#include "base/watch.h"

#define PREFIX "kvferry-cuda-"
#define BACKLOG 64

kvf_status kvf_cuda_wire_listen(const unsigned char name[CUDA_ID_BYTES], int *out) {
    return kvf_neighbour_listen(PREFIX, name, BACKLOG, out);
}

kvf_status kvf_cuda_wire_connect(const unsigned char name[CUDA_ID_BYTES], int *out) {
    *out = -1;
    kvf_status status = kvf_neighbour_connect(PREFIX, name, out);
    if (status)
        kvf_fd_close(out);
    return status;
}

kvf_status kvf_cuda_wire_send_with(int socket, const void *message, size_t bytes, int fd) {
    const struct iovec part = {(void *)message, bytes};
    return kvf_neighbour_send(socket, &part, 1, fd);
}

kvf_status kvf_cuda_wire_send(int socket, const void *message, size_t bytes) {
    return kvf_cuda_wire_send_with(socket, message, bytes, -1);
}

kvf_status kvf_cuda_wire_receive_with(int socket, kvf_cuda_packet *out, int *fd) {
    return kvf_neighbour_receive(socket, &out->as, sizeof out->as.header, sizeof out->as, &out->bytes, fd);
}

/* The kernel closes descriptors for which there is no room. */
kvf_status kvf_cuda_wire_receive(int socket, kvf_cuda_packet *out) {
    return kvf_cuda_wire_receive_with(socket, out, NULL);
}
