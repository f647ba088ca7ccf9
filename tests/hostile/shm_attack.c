#include "shm_attack.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "transport/card.h"
#include "transport/shm/shm_wire.h"

#define SECOND 1000000000ull
#define PASSED_MAX 253u /* descriptors that one message can carry */

static uint64_t now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

static size_t from_hex(const char *text, unsigned char *out, size_t room) {
    size_t bytes = strlen(text) / 2;
    for (size_t i = 0; i < bytes && i < room; i++) {
        char two[3] = {text[2 * i], text[2 * i + 1], '\0'};
        out[i] = (unsigned char)strtoul(two, NULL, 16);
    }
    return bytes <= room ? bytes : 0;
}

static bool read_card(attack *a, const unsigned char *data, size_t bytes) {
    kvf_card card;
    if (kvf_card_read(data, bytes, &card))
        return false;
    a->generation = card.generation;
    a->region_count = card.region_count < 8 ? card.region_count : 8;
    memcpy(a->region_bytes, card.region_bytes, a->region_count * sizeof(uint64_t));
    for (uint32_t i = 0; i < card.part_count; i++)
        if (strcmp(card.parts[i].kind, "shm") == 0 && card.parts[i].bytes == sizeof a->card) {
            memcpy(&a->card, card.parts[i].data, sizeof a->card);
            a->has_card = true;
        }
    kvf_card_free(&card);
    return a->has_card;
}

void attack_begin(attack *a, int argc, char **argv) {
    unsigned char data[4096];
    *a = (attack){.random = (uint64_t)getpid()};
    bool known = false;
    if (argc == 3 && strncmp(argv[1], "name:", 5) == 0)
        known = from_hex(argv[1] + 5, a->card.name, SHM_ID_BYTES) == SHM_ID_BYTES;
    else if (argc == 3 && strncmp(argv[1], "card:", 5) == 0)
        known = read_card(a, data, from_hex(argv[1] + 5, data, sizeof data));
    if (!known) {
        (void)fprintf(stderr, "%s: wants name:HEX or card:HEX, and seconds\n", argv[0]);
        exit(2);
    }
    a->end_ns = now() + (uint64_t)(strtod(argv[2], NULL) * 1e9);
}

bool attack_goes_on(const attack *a) {
    return now() < a->end_ns;
}

int attack_end(const attack *a, const char *harm) {
    (void)printf("{\"done\": %llu, \"harm\": \"%s\"}\n", (unsigned long long)a->done, harm ? harm : "");
    return 0;
}

void attack_sleep_ms(unsigned ms) {
    const struct timespec pause = {ms / 1000, (long)(ms % 1000) * 1000000};
    (void)nanosleep(&pause, NULL);
}

uint64_t attack_draw(attack *a, uint64_t below) {
    a->random = a->random * 6364136223846793005u + 1442695040888963407u;
    return (a->random >> 33) % below;
}

int attack_connect(const attack *a) {
    struct sockaddr_un address;
    socklen_t length = kvf_shm_socket_address(a->card.name, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (const struct sockaddr *)&address, length) != 0) {
        (void)close(fd);
        return -1;
    }
    return fd;
}

bool attack_send(int socket, const void *message, size_t bytes, int passed, unsigned times) {
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(PASSED_MAX * sizeof(int))];
    } control = {.bytes = {0}};
    struct iovec part = {(void *)message, bytes};
    struct msghdr sent = {.msg_iov = &part, .msg_iovlen = 1};
    if (times > 0) {
        sent.msg_control = control.bytes;
        sent.msg_controllen = CMSG_SPACE(times * sizeof(int));
        struct cmsghdr *item = CMSG_FIRSTHDR(&sent);
        item->cmsg_level = SOL_SOCKET;
        item->cmsg_type = SCM_RIGHTS;
        item->cmsg_len = CMSG_LEN(times * sizeof(int));
        for (unsigned i = 0; i < times; i++)
            memcpy(CMSG_DATA(item) + i * sizeof(int), &passed, sizeof passed);
    }
    return sendmsg(socket, &sent, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes;
}

kvf_shm_hello attack_hello(attack *a) {
    kvf_shm_hello hello = {.header = {SHM_HELLO, 0},
                           .version = SHM_VERSION,
                           .region_count = a->region_count,
                           .generation = a->generation,
                           .name = "attacker"};
    memcpy(hello.key, a->card.key, SHM_ID_BYTES);
    for (int i = 0; i < SHM_ID_BYTES; i++)
        hello.from[i] = (unsigned char)attack_draw(a, 256);
    return hello;
}

bool attack_receive(int socket, kvf_shm_packet *packet, int ms) {
    struct pollfd wait = {socket, POLLIN, 0};
    if (poll(&wait, 1, ms) <= 0 || kvf_shm_receive(socket, packet))
        return false;
    if (packet->fd >= 0)
        (void)close(packet->fd);
    return true;
}

int attack_client(attack *a, kvf_shm_gate **gate) {
    static kvf_shm_packet packet;
    const kvf_shm_hello hello = attack_hello(a);
    int fd = attack_connect(a);
    while (fd < 0 && attack_goes_on(a)) { /* other attackers may be flooding it */
        attack_sleep_ms(1);
        fd = attack_connect(a);
    }
    if (fd < 0 || !attack_send(fd, &hello, sizeof hello, -1, 0))
        goto no;
    for (;;) {
        struct pollfd wait = {fd, POLLIN, 0};
        if (poll(&wait, 1, 1000) <= 0 || kvf_shm_receive(fd, &packet))
            goto no;
        if (packet.as.header.kind == SHM_GATE && gate)
            (void)kvf_shm_gate_map(packet.fd, gate);
        if (packet.fd >= 0)
            (void)close(packet.fd);
        if (packet.as.header.kind == SHM_READY)
            return fd;
    }
no:
    if (fd >= 0)
        (void)close(fd);
    return -1;
}

bool attack_give_buffer(int socket, int memory, uint64_t slot_bytes, uint32_t slots) {
    const kvf_shm_buffer_message message = {{SHM_BUFFER, 0}, slot_bytes, slots, 0};
    return attack_send(socket, &message, sizeof message, memory, 1);
}

bool attack_lay_buffer(int socket, int memory, uint64_t *slot_bytes, uint32_t *slots) {
    static kvf_shm_packet packet;
    if (!attack_give_buffer(socket, memory, *slot_bytes, *slots) || !attack_receive(socket, &packet, 2000) ||
        packet.as.header.kind != SHM_BUFFER)
        return false;
    *slot_bytes = packet.as.buffer.slot_bytes;
    *slots = packet.as.buffer.slots;
    return true;
}

size_t attack_move(attack *a, kvf_shm_move_message *move, uint32_t slot, uint32_t count, uint64_t bytes) {
    uint32_t region = 0;
    for (uint32_t i = 1; i < a->region_count; i++)
        if (a->region_bytes[i] > a->region_bytes[region])
            region = i;
    move->header = (kvf_shm_header){SHM_MOVE, count};
    move->slot = slot;
    move->direction = KVF_READ;
    for (uint32_t i = 0; i < count; i++)
        move->pieces[i] =
            (kvf_shm_piece){attack_draw(a, a->region_bytes[region] - bytes + 1), bytes, region, 0};
    return offsetof(kvf_shm_move_message, pieces) + count * sizeof(kvf_shm_piece);
}
