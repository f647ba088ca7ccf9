/* Raw sockets that speak the same-host transport's protocol: see transport_raw.h. */
#include "transport_raw.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "transport/card.h"

const pair_kind raw_brought = {"shm", {true, false}, "shm", {"shm.direct", "off"}};

kvf_shm_card raw_card(const test_side *side) {
    const void *data;
    size_t bytes;
    kvf_card card;
    kvf_shm_card found = {0};
    assert_int_equal(kvf_transport_export(side->transport, &data, &bytes), KVF_OK);
    assert_int_equal(kvf_card_read(data, bytes, &card), KVF_OK);
    for (uint32_t i = 0; i < card.part_count; i++)
        if (strcmp(card.parts[i].kind, "shm") == 0)
            memcpy(&found, card.parts[i].data, sizeof found);
    kvf_card_free(&card);
    return found;
}

int raw_connect(const kvf_shm_card *card) {
    struct sockaddr_un address;
    socklen_t length = kvf_shm_socket_address(card->name, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&address, length), 0);
    return fd;
}

uint32_t raw_fill_queue(const test_side *owner, int fds[RAW_QUEUE_MAX]) {
    const kvf_shm_card card = raw_card(owner);
    struct sockaddr_un address;
    const socklen_t length = kvf_shm_socket_address(card.name, &address);
    uint32_t count = 0;
    for (bool full = false; !full; count++) {
        assert_true(count < RAW_QUEUE_MAX);
        fds[count] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        assert_true(fds[count] >= 0);
        full = connect(fds[count], (const struct sockaddr *)&address, length) != 0;
    }
    return count;
}

void raw_send(int fd, const void *message, size_t bytes, int passed) {
    assert_int_equal(kvf_shm_send(fd, message, bytes, passed), KVF_OK);
}

int raw_client(test_side *owner) {
    static kvf_shm_packet packet;
    kvf_shm_card card = raw_card(owner);
    kvf_shm_hello hello = {.header = {SHM_HELLO, 0}, .version = SHM_VERSION};
    int fd = raw_connect(&card);
    memcpy(hello.key, card.key, sizeof hello.key);
    raw_send(fd, &hello, sizeof hello, -1);
    for (;;) {
        drive_idle(owner, NULL);
        assert_int_equal(kvf_shm_receive(fd, &packet), KVF_OK);
        if (packet.fd >= 0)
            (void)close(packet.fd);
        if (packet.as.header.kind == SHM_READY)
            return fd;
    }
}

bool raw_hung_up(test_side *owner, int fd) {
    drive_idle(owner, NULL);
    struct pollfd look = {fd, POLLIN, 0};
    return poll(&look, 1, 0) > 0 && (look.revents & POLLHUP);
}

void raw_check_served(test_side *owner) {
    test_side here;
    side_open(&here, &raw_brought, 1);
    kvf_peer *peer = side_connect(&here, owner);
    kvf_run run = {0, 0, 60000, 1, 1};
    assert_int_equal(move_runs(&here, owner, peer, KVF_READ, &run, 1), KVF_OK);
    assert_memory_equal(side_memory(&here, 1), side_memory(owner, 1), 60000);
    side_close(&here);
}

int raw_memory(uint64_t bytes, unsigned seals) {
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

int raw_count_descriptors(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    assert_non_null(folder);
    while (readdir(folder))
        count++;
    (void)closedir(folder);
    return count;
}

/* Sends several descriptors with one message: in an old version the second descriptor of each message stayed open in
 * the owner. */
void raw_send_many(int socket, const void *message, size_t bytes, int passed, uint32_t times) {
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(RAW_PASSED_MAX * sizeof(int))];
    } control = {.bytes = {0}};
    struct iovec part = {(void *)message, bytes};
    struct msghdr sent = {.msg_iov = &part,
                          .msg_iovlen = 1,
                          .msg_control = control.bytes,
                          .msg_controllen = CMSG_SPACE(times * sizeof(int))};
    struct cmsghdr *item = CMSG_FIRSTHDR(&sent);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(times * sizeof(int));
    for (uint32_t i = 0; i < times; i++)
        memcpy(CMSG_DATA(item) + i * sizeof passed, &passed, sizeof passed);
    assert_int_equal(sendmsg(socket, &sent, MSG_NOSIGNAL), (ssize_t)bytes);
}

kvf_shm_buffer_message raw_offer_buffer(test_side *owner, int fd, int memory, uint64_t slot_bytes,
                                        uint32_t slots) {
    static kvf_shm_packet packet;
    kvf_shm_buffer_message message = {{SHM_BUFFER, 0}, slot_bytes, slots, 0};
    raw_send(fd, &message, sizeof message, memory);
    (void)close(memory);
    drive_idle(owner, NULL);
    assert_int_equal(kvf_shm_receive(fd, &packet), KVF_OK);
    assert_int_equal(packet.as.header.kind, SHM_BUFFER);
    assert_int_equal(packet.bytes, sizeof packet.as.buffer);
    return packet.as.buffer;
}

int raw_client_with_buffer(test_side *owner, unsigned char **buffer) {
    int fd = raw_client(owner), memory = raw_memory(131072, F_SEAL_SHRINK);
    *buffer = mmap(NULL, 131072, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    assert_true(*buffer != MAP_FAILED);
    kvf_shm_buffer_message taken = raw_offer_buffer(owner, fd, memory, 65536, 2);
    assert_int_equal(taken.slot_bytes, 65536);
    assert_int_equal(taken.slots, 2);
    return fd;
}
