/*
 * The same-host transport against sides that do not keep to its protocol: raw sockets that play a consumer,
 * or an owner, badly.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "transport/card.h"
#include "transport/shm/shm_process.h"
#include "transport/shm/shm_wire.h"
#include "transport_pair.h"

static const pair_kind brought = {"shm", {true, false}, "shm", {"shm.direct", "off"}};

/* What the card of an endpoint says about its socket. */
static kvf_shm_card socket_card(const test_side *side) {
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

static int raw_connect(const kvf_shm_card *card) {
    struct sockaddr_un address;
    socklen_t length = kvf_shm_socket_address(card->name, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&address, length), 0);
    return fd;
}

static void raw_send(int fd, const void *message, size_t bytes, int passed) {
    assert_int_equal(kvf_shm_send(fd, message, bytes, passed), KVF_OK);
}

/* A raw client that has shown the key, and read what it is told at first. */
static int raw_client(test_side *owner) {
    static kvf_shm_packet packet;
    kvf_shm_card card = socket_card(owner);
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

static bool hung_up(test_side *owner, int fd) {
    drive_idle(owner, NULL);
    struct pollfd look = {fd, POLLIN, 0};
    return poll(&look, 1, 0) > 0 && (look.revents & POLLHUP);
}

/* Somebody who behaves is still served. */
static void check_served(test_side *owner) {
    test_side here;
    side_open(&here, &brought, 1);
    kvf_peer *peer = side_connect(&here, owner);
    kvf_run run = {0, 0, 60000, 1, 1};
    assert_int_equal(move_runs(&here, owner, peer, KVF_READ, &run, 1), KVF_OK);
    assert_memory_equal(side_memory(&here, 1), side_memory(owner, 1), 60000);
    side_close(&here);
}

static int make_memory(uint64_t bytes, unsigned seals) {
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

/* ---- bad consumers --------------------------------------------------------------------------- */

static void strangers_that_say_nothing_keep_nobody_out(void **state) {
    (void)state;
    test_side owner;
    int fds[300];
    side_open(&owner, &brought, 2);
    kvf_shm_card card = socket_card(&owner);
    for (int i = 0; i < 300; i++) {
        fds[i] = raw_connect(&card);
        if (i % 10 == 0)
            drive_idle(&owner, NULL);
    }
    check_served(&owner);
    uint32_t kept = 0;
    for (int i = 0; i < 300; i++)
        kept += !hung_up(&owner, fds[i]);
    assert_true(kept <= 64);
    for (int i = 0; i < 300; i++)
        (void)close(fds[i]);
    drive_idle(&owner, NULL);
    side_close(&owner);
}

static void strangers_without_the_key_are_hung_up_on(void **state) {
    (void)state;
    test_side owner;
    side_open(&owner, &brought, 2);
    kvf_shm_card card = socket_card(&owner);
    kvf_shm_hello good = {.header = {SHM_HELLO, 0}, .version = SHM_VERSION};
    memcpy(good.key, card.key, sizeof good.key);
    for (int i = 0; i < 7; i++) {
        kvf_shm_hello hello = good;
        size_t bytes = sizeof hello;
        if (i == 0)
            hello.key[SHM_ID_BYTES - 1] ^= 1;
        else if (i == 1)
            hello.header.kind = SHM_NOTICE;
        else if (i == 2)
            hello.version++;
        else if (i == 3)
            bytes--;
        else if (i == 4)
            bytes = 3;
        else if (i == 5)
            hello.header.kind = 99;
        int fd = raw_connect(&card);
        raw_send(fd, &hello, bytes, -1);
        if (i == 6) /* the good one, and then the same again */
            raw_send(fd, &hello, bytes, -1);
        assert_true(hung_up(&owner, fd));
        (void)close(fd);
    }
    check_served(&owner);
    side_close(&owner);
}

static int count_descriptors(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    assert_non_null(folder);
    while (readdir(folder))
        count++;
    (void)closedir(folder);
    return count;
}

#define PASSED_MAX 253u /* with one message */

/* Several descriptors with one message: once the second of two stayed open in the owner, for each message. */
static void raw_send_many(int socket, const void *message, size_t bytes, int passed, uint32_t times) {
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(PASSED_MAX * sizeof(int))];
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

static void descriptors_that_nobody_asked_for_are_closed(void **state) {
    (void)state;
    test_side owner;
    side_open(&owner, &brought, 2);
    kvf_shm_card card = socket_card(&owner);
    int memory = make_memory(4096, F_SEAL_SHRINK);
    drive_idle(&owner, NULL);
    const int before = count_descriptors();
    for (int i = 0; i < 100; i++) { /* strangers, who know no key, and clients */
        static const kvf_shm_header nonsense = {SHM_MOVED, 0};
        static const uint32_t counts[] = {1, 2, 3, PASSED_MAX};
        int fd = i < 50 ? raw_connect(&card) : raw_client(&owner);
        raw_send_many(fd, &nonsense, sizeof nonsense, memory, counts[i % 4]);
        assert_true(hung_up(&owner, fd));
        (void)close(fd);
    }
    drive_idle(&owner, NULL);
    assert_int_equal(count_descriptors(), before);
    for (int i = 0; i < 100; i++) { /* where one is welcome, further ones are not */
        kvf_shm_buffer_message buffer = {{SHM_BUFFER, 0}, 4096, 1, 0};
        int fd = raw_client(&owner);
        raw_send_many(fd, &buffer, sizeof buffer, memory, 2);
        assert_true(hung_up(&owner, fd));
        (void)close(fd);
    }
    drive_idle(&owner, NULL);
    assert_int_equal(count_descriptors(), before);
    (void)close(memory);
    check_served(&owner);
    side_close(&owner);
}

static void garbage_is_hung_up_on(void **state) {
    (void)state;
    test_side owner;
    uint64_t seed = 4711;
    side_open(&owner, &brought, 2);
    static unsigned char garbage[40000];
    for (int round = 0; round < 200; round++) {
        int fd = raw_client(&owner);
        size_t bytes = 1 + draw(&seed, round % 4 ? 200 : sizeof garbage - 1);
        for (size_t i = 0; i < bytes; i++)
            garbage[i] = (unsigned char)draw(&seed, 256);
        if (round % 2 && bytes >= 8) {
            uint32_t kind = (uint32_t)draw(&seed, 10);
            if (kind == SHM_NOTICE)
                kind = 0;
            memcpy(garbage, &kind, sizeof kind);
        }
        raw_send(fd, garbage, bytes, -1);
        assert_true(hung_up(&owner, fd));
        (void)close(fd);
    }
    assert_int_equal(owner.notices, 0);
    check_served(&owner);
    side_close(&owner);
}

static void buffers_that_could_make_the_owner_fault_are_hung_up_on(void **state) {
    (void)state;
    test_side owner;
    side_open(&owner, &brought, 2);
    const uint64_t size = 1u << 20;
    struct {
        int fd;
        uint32_t slots;
        uint64_t slot_bytes;
    } cases[] = {
        {make_memory(size, 0), 1, size},                    /* may shrink */
        {make_memory(size, F_SEAL_SHRINK), 1, size + 4096}, /* smaller than it says */
        {make_memory(size, F_SEAL_SHRINK), 3, size / 2},
        {make_memory(size, F_SEAL_SHRINK), 4, UINT64_MAX / 2},
        {make_memory(size, F_SEAL_SHRINK), 0, size},
        {make_memory(size, F_SEAL_SHRINK), 1, 0},
        {make_memory(size, F_SEAL_SHRINK), 1000, 4096},
        {make_memory(0, F_SEAL_SHRINK), 1, size},
        {make_memory(size, F_SEAL_SHRINK | F_SEAL_WRITE), 1, size}, /* cannot be written */
        {open("/dev/zero", O_RDWR | O_CLOEXEC), 1, size},
        {-1, 1, size},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int fd = raw_client(&owner);
        kvf_shm_buffer_message message = {{SHM_BUFFER, 0}, cases[i].slot_bytes, cases[i].slots, 0};
        raw_send(fd, &message, sizeof message, cases[i].fd);
        assert_true(hung_up(&owner, fd));
        (void)close(fd);
        if (cases[i].fd >= 0)
            (void)close(cases[i].fd);
    }
    check_served(&owner);
    side_close(&owner);
}

/* Offers memory as a buffer; what the owner takes of it. */
static kvf_shm_buffer_message offer_buffer(test_side *owner, int fd, int memory, uint64_t slot_bytes,
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

/* A client with a good buffer of two slots of 64 KiB. */
static int raw_client_with_buffer(test_side *owner, unsigned char **buffer) {
    int fd = raw_client(owner), memory = make_memory(131072, F_SEAL_SHRINK);
    *buffer = mmap(NULL, 131072, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    assert_true(*buffer != MAP_FAILED);
    kvf_shm_buffer_message taken = offer_buffer(owner, fd, memory, 65536, 2);
    assert_int_equal(taken.slot_bytes, 65536);
    assert_int_equal(taken.slots, 2);
    return fd;
}

static kvf_status ask_to_move(test_side *owner, int fd, kvf_direction direction, const kvf_shm_piece *pieces,
                              uint32_t count) {
    static kvf_shm_packet packet;
    kvf_shm_move_message *move = &packet.as.move;
    move->header = (kvf_shm_header){SHM_MOVE, count};
    move->slot = 1;
    move->direction = direction;
    memcpy(move->pieces, pieces, count * sizeof *pieces);
    raw_send(fd, move, offsetof(kvf_shm_move_message, pieces) + count * sizeof *pieces, -1);
    drive_idle(owner, NULL);
    assert_int_equal(kvf_shm_receive(fd, &packet), KVF_OK);
    assert_int_equal(packet.as.header.kind, SHM_MOVED);
    assert_int_equal(packet.as.moved.slot, 1);
    return (kvf_status)packet.as.moved.status;
}

static void pieces_outside_of_registered_memory_are_refused(void **state) {
    (void)state;
    test_side owner;
    unsigned char *buffer;
    side_open(&owner, &brought, 2);
    int fd = raw_client_with_buffer(&owner, &buffer);
    memset(buffer, 0x77, 131072);
    uint64_t end = owner.regions[1].bytes;
    struct {
        kvf_shm_piece piece;
        kvf_status status;
    } cases[] = {
        {{end, 1, 1, 0}, KVF_E_RANGE},
        {{end - 10, 11, 1, 0}, KVF_E_RANGE},
        {{UINT64_MAX, 2, 1, 0}, KVF_E_RANGE},
        {{2, UINT64_MAX - 1, 1, 0}, KVF_E_RANGE},
        {{0, 65537, 1, 0}, KVF_E_RANGE}, /* more than the slot */
        {{0, 1, SIDE_REGIONS, 0}, KVF_E_NOT_REGISTERED},
        {{0, 1, UINT32_MAX, 0}, KVF_E_NOT_REGISTERED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
            kvf_shm_piece pieces[2] = {{0, 100, 1, 0}, cases[i].piece};
            assert_int_equal(ask_to_move(&owner, fd, (kvf_direction)direction, pieces, 2), cases[i].status);
        }
    for (uint64_t at = 0; at < end; at++)
        assert_int_equal(side_memory(&owner, 1)[at], side_byte(2, 1, at));
    for (uint64_t at = 0; at < 131072; at++)
        assert_int_equal(buffer[at], 0x77);
    kvf_shm_piece good = {end - 10, 10, 1, 0};
    assert_int_equal(ask_to_move(&owner, fd, KVF_READ, &good, 1), KVF_OK);
    assert_memory_equal(buffer + 65536, side_memory(&owner, 1) + end - 10, 10);
    (void)munmap(buffer, 131072);
    (void)close(fd);
    side_close(&owner);
}

static void a_move_that_makes_no_sense_is_hung_up_on(void **state) {
    (void)state;
    test_side owner;
    side_open(&owner, &brought, 2);
    for (int i = 0; i < 6; i++) {
        unsigned char *buffer;
        int fd = i == 5 ? raw_client(&owner) : raw_client_with_buffer(&owner, &buffer);
        kvf_shm_move_message move = {.header = {SHM_MOVE, 1}, .slot = 0, .direction = KVF_READ};
        move.pieces[0] = (kvf_shm_piece){0, 10, 1, 0};
        size_t bytes = offsetof(kvf_shm_move_message, pieces) + sizeof(kvf_shm_piece);
        if (i == 0)
            move.slot = 2;
        else if (i == 1)
            move.direction = 2;
        else if (i == 2)
            move.header.count = 2;
        else if (i == 3)
            move.header.count = 0;
        else if (i == 4)
            bytes -= 4;
        raw_send(fd, &move, bytes, -1);
        assert_true(hung_up(&owner, fd));
        if (i != 5)
            (void)munmap(buffer, 131072);
        (void)close(fd);
    }
    check_served(&owner);
    side_close(&owner);
}

static void notices_of_a_wrong_length_are_hung_up_on(void **state) {
    (void)state;
    test_side owner;
    side_open(&owner, &brought, 2);
    static const struct {
        uint32_t count;
        size_t bytes;
    } cases[] = {{0, 0}, {4097, 4097}, {10, 11}, {11, 10}, {UINT32_MAX, 10}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static unsigned char message[5000];
        int fd = raw_client(&owner);
        kvf_shm_header header = {SHM_NOTICE, cases[i].count};
        memcpy(message, &header, sizeof header);
        raw_send(fd, message, sizeof header + cases[i].bytes, -1);
        assert_true(hung_up(&owner, fd));
        (void)close(fd);
    }
    assert_int_equal(owner.notices, 0);
    side_close(&owner);
}

static void what_was_to_be_written_by_a_client_that_left_is_not(void **state) {
    (void)state;
    test_side owner;
    unsigned char *buffer;
    side_open(&owner, &brought, 2);
    int fd = raw_client_with_buffer(&owner, &buffer);
    drive_idle(&owner, NULL);
    memset(buffer, 0x77, 131072);
    kvf_shm_move_message move = {.header = {SHM_MOVE, 1}, .direction = KVF_WRITE};
    move.pieces[0] = (kvf_shm_piece){0, 1000, 1, 0};
    struct {
        kvf_shm_header header;
        uint32_t value;
    } notice = {{SHM_NOTICE, 4}, 4};
    raw_send(fd, &move, offsetof(kvf_shm_move_message, pieces) + sizeof(kvf_shm_piece), -1);
    raw_send(fd, &notice, sizeof notice, -1);
    (void)close(fd);
    drive_idle(&owner, NULL);
    for (uint64_t at = 0; at < 1000; at++)
        assert_int_equal(side_memory(&owner, 1)[at], side_byte(2, 1, at));
    assert_int_equal(owner.notices, 1); /* while what it said still counts */
    (void)munmap(buffer, 131072);
    side_close(&owner);
}

static void a_client_that_reads_no_answers_stops_nobody_else(void **state) {
    (void)state;
    test_side owner;
    unsigned char *buffer;
    side_open(&owner, &brought, 2);
    int fd = raw_client_with_buffer(&owner, &buffer);
    kvf_shm_move_message move = {.header = {SHM_MOVE, 1}, .direction = KVF_READ};
    move.pieces[0] = (kvf_shm_piece){0, 10, 1, 0};
    size_t bytes = offsetof(kvf_shm_move_message, pieces) + sizeof(kvf_shm_piece);
    kvf_status status = KVF_OK;
    for (int i = 0; i < 100000 && !status; i++) {
        status = kvf_shm_send(fd, &move, bytes, -1);
        if (i % 50 == 0)
            drive_idle(&owner, NULL);
    }
    assert_int_equal(status, KVF_E_AGAIN);
    check_served(&owner);
    (void)munmap(buffer, 131072);
    (void)close(fd);
    side_close(&owner);
}

/* ---- too many ---------------------------------------------------------------------------------- */

/* Nobody is accepted meanwhile. */
static void a_full_queue_of_connections_only_delays_a_newcomer(void **state) {
    (void)state;
    test_side owner, here;
    int fds[1000], count = 0;
    side_open(&owner, &brought, 2);
    side_open(&here, &brought, 1);
    kvf_shm_card card = socket_card(&owner);
    struct sockaddr_un address;
    socklen_t length = kvf_shm_socket_address(card.name, &address);
    for (bool full = false; !full; count++) {
        assert_true(count < 1000);
        fds[count] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        assert_true(fds[count] >= 0);
        full = connect(fds[count], (const struct sockaddr *)&address, length) != 0;
    }
    kvf_peer *peer = side_connect(&here, &owner);
    assert_int_equal(kvf_transport_notify(peer, "x", 1), KVF_E_AGAIN);
    kvf_run run = {0, 0, 60000, 1, 1};
    test_outcome cancelled = {0};
    kvf_operation operation;
    assert_int_equal(kvf_transport_submit(peer, KVF_READ, &run, 1, note_outcome, &cancelled, &operation),
                     KVF_OK);
    drive_idle(&here, NULL);
    assert_int_equal(kvf_transport_cancel(here.transport, operation), KVF_OK);
    drive(&here, NULL, &cancelled.calls, 1);
    assert_int_equal(cancelled.status, KVF_E_CANCELLED);
    assert_int_equal(move_runs(&here, &owner, peer, KVF_READ, &run, 1), KVF_OK);
    assert_memory_equal(side_memory(&here, 1), side_memory(&owner, 1), 60000);
    while (count > 0)
        (void)close(fds[--count]);
    side_close(&here);
    side_close(&owner);
}

static void a_process_with_as_many_connections_as_one_may_have_is_refused_by_name(void **state) {
    (void)state;
    test_side owner, here;
    int fds[64];
    side_open(&owner, &brought, 2);
    side_open(&here, &brought, 1);
    for (int i = 0; i < 64; i++)
        fds[i] = raw_client(&owner);
    for (uint32_t refused = 1; refused <= 2; refused++) {
        (void)side_connect(&here, &owner);
        drive(&here, &owner, &here.lost, refused);
        assert_non_null(strstr(here.lost_detail, "this process has 64 connections"));
    }
    kvf_transport_info info = {.struct_size = sizeof info};
    assert_int_equal(kvf_transport_get_info(owner.transport, &info), KVF_OK);
    assert_int_equal(info.clients, 64);
    assert_int_equal(info.processes, 1);
    assert_int_equal(info.refused, 2);
    assert_true(info.clients_max >= 64);
    (void)close(fds[0]);
    drive_idle(&owner, NULL);
    check_served(&owner);
    for (int i = 1; i < 64; i++)
        (void)close(fds[i]);
    side_close(&here);
    side_close(&owner);
}

static void beyond_the_budget_of_buffers_a_process_is_served_through_a_small_one(void **state) {
    (void)state;
    test_side owner, here;
    int fds[2];
    side_open(&owner, &brought, 2);
    for (int i = 0; i < 2; i++) {
        fds[i] = raw_client(&owner);
        kvf_shm_buffer_message taken =
            offer_buffer(&owner, fds[i], make_memory(8u << 20, F_SEAL_SHRINK), 1u << 20, 8);
        assert_int_equal(taken.slots, 8);
    }
    side_open(&here, &brought, 1);
    kvf_peer *peer = side_connect(&here, &owner);
    uint64_t bytes = kvf_min_u64(here.regions[1].bytes, owner.regions[1].bytes);
    kvf_run run = {0, 0, bytes, 1, 1};
    assert_true(bytes > 65536); /* more than one slot, and they are not where they were offered */
    assert_int_equal(move_runs(&here, &owner, peer, KVF_READ, &run, 1), KVF_OK);
    assert_memory_equal(side_memory(&here, 1), side_memory(&owner, 1), bytes);
    side_fill(side_memory(&here, 1), 77, 1, bytes);
    assert_int_equal(move_runs(&here, &owner, peer, KVF_WRITE, &run, 1), KVF_OK);
    assert_memory_equal(side_memory(&owner, 1), side_memory(&here, 1), bytes);
    kvf_transport_info info = {.struct_size = sizeof info};
    assert_int_equal(kvf_transport_get_info(owner.transport, &info), KVF_OK);
    assert_int_equal(info.buffer_bytes, (16u << 20) + 65536);
    assert_int_equal(info.cut_buffers, 1);
    (void)close(fds[0]);
    (void)close(fds[1]);
    drive_idle(&owner, NULL);
    assert_int_equal(kvf_transport_get_info(owner.transport, &info), KVF_OK);
    assert_int_equal(info.buffer_bytes, 65536);
    side_close(&here);
    side_close(&owner);
}

/* ---- bad owners ------------------------------------------------------------------------------ */

/* A socket that plays an owner with one region of 4096 bytes, connected to by `here`. */
typedef struct fake_side {
    int listening, fd;
    kvf_peer *peer;
} fake_side;

static fake_side fake_owner(test_side *here) {
    fake_side made = {.listening = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
    kvf_shm_card part = socket_card(here); /* of this host and process */
    uint64_t region = 4096;
    kvf_card card = {.name = "fake", .region_bytes = &region, .region_count = 1, .part_count = 1};
    kvf_buffer bytes = {0};
    struct sockaddr_un address;
    part.name[0] ^= 0x55;
    socklen_t length = kvf_shm_socket_address(part.name, &address);
    assert_int_equal(bind(made.listening, (const struct sockaddr *)&address, length), 0);
    assert_int_equal(listen(made.listening, 4), 0);
    card.parts = &(kvf_card_part){"shm", &part, sizeof part};
    assert_int_equal(kvf_card_write(&card, &bytes), KVF_OK);
    assert_int_equal(kvf_transport_connect(here->transport, bytes.data, bytes.length, &made.peer), KVF_OK);
    kvf_buffer_free(&bytes);
    made.fd = accept4(made.listening, NULL, NULL, SOCK_CLOEXEC);
    assert_true(made.fd >= 0);
    return made;
}

static void fake_end(fake_side *fake) {
    kvf_peer_close(fake->peer);
    if (fake->fd >= 0)
        (void)close(fake->fd);
    (void)close(fake->listening);
}

static void tell_arena(const fake_side *fake, uint32_t index, uint64_t bytes, int memory) {
    kvf_shm_arena_message message = {{SHM_ARENA, index}, bytes};
    raw_send(fake->fd, &message, sizeof message, memory);
    if (memory >= 0)
        (void)close(memory);
}

static void tell_region(const fake_side *fake, uint32_t first, kvf_shm_region region, uint32_t count) {
    kvf_shm_regions_message message = {.header = {SHM_REGIONS, count}, .first = first};
    message.regions[0] = region;
    message.regions[1] = region;
    raw_send(fake->fd, &message, offsetof(kvf_shm_regions_message, regions) + count * sizeof region, -1);
}

static void tell_ready(const fake_side *fake) {
    kvf_shm_header ready = {SHM_READY, 0};
    raw_send(fake->fd, &ready, sizeof ready, -1);
}

static void say_nonsense(const fake_side *fake, int which) {
    kvf_shm_region brought_region = {1 << 20, 4096, 0, SHM_NO_ARENA, 0};
    kvf_shm_region in_arena = {1 << 20, 4096, 0, 0, 0};
    kvf_shm_moved_message moved = {{SHM_MOVED, 0}, 0, KVF_OK};
    switch (which) {
    case 0: /* memory that may shrink */
        tell_arena(fake, 0, 8192, make_memory(8192, 0));
        break;
    case 1: /* smaller than it says */
        tell_arena(fake, 0, 16384, make_memory(8192, F_SEAL_SHRINK));
        break;
    case 2: /* no memory with it */
        tell_arena(fake, 0, 8192, -1);
        break;
    case 3: /* not the next index */
        tell_arena(fake, 1, 8192, make_memory(8192, F_SEAL_SHRINK));
        break;
    case 4: /* a region outside of its arena */
        tell_arena(fake, 0, 8192, make_memory(8192, F_SEAL_SHRINK));
        in_arena.arena_offset = 4097;
        tell_region(fake, 0, in_arena, 1);
        break;
    case 5: /* an arena that was not told */
        tell_region(fake, 0, in_arena, 1);
        break;
    case 6: /* another size than the card's */
        brought_region.bytes = 4095;
        tell_region(fake, 0, brought_region, 1);
        break;
    case 7: /* more regions than the card's */
        tell_region(fake, 0, brought_region, 2);
        break;
    case 8: /* not the next region */
        tell_region(fake, 1, brought_region, 1);
        break;
    case 9: /* ready too early */
        tell_ready(fake);
        break;
    case 10: /* an address that does not fit */
        brought_region.address = UINT64_MAX - 10;
        tell_region(fake, 0, brought_region, 1);
        break;
    case 11: /* an answer that nobody waits for */
        raw_send(fake->fd, &moved, sizeof moved, -1);
        break;
    case 12: /* an answer for a slot that does not exist */
        tell_region(fake, 0, brought_region, 1);
        tell_ready(fake);
        moved.slot = 1000;
        raw_send(fake->fd, &moved, sizeof moved, -1);
        break;
    case 13: /* ready twice */
        tell_region(fake, 0, brought_region, 1);
        tell_ready(fake);
        tell_ready(fake);
        break;
    case 14: /* a region after all is told */
        tell_region(fake, 0, brought_region, 1);
        tell_ready(fake);
        tell_region(fake, 1, brought_region, 1);
        break;
    case 16: /* more of a buffer than nothing, which is what was offered */
        raw_send(fake->fd, &(kvf_shm_buffer_message){{SHM_BUFFER, 0}, 4096, 1, 0},
                 sizeof(kvf_shm_buffer_message), -1);
        break;
    case 17: /* two descriptors */
        raw_send_many(fake->fd, &(kvf_shm_header){SHM_READY, 0}, sizeof(kvf_shm_header), STDIN_FILENO, 2);
        break;
    default: /* three bytes */
        raw_send(fake->fd, "abc", 3, -1);
        break;
    }
}

static void an_owner_that_talks_nonsense_is_lost(void **state) {
    (void)state;
    test_side here;
    side_open(&here, &brought, 1);
    for (int which = 0; which <= 17; which++) {
        fake_side fake = fake_owner(&here);
        int before = count_descriptors();
        kvf_run run = {0, 0, 100, 0, 0};
        test_outcome outcome = {0};
        assert_int_equal(kvf_transport_submit(fake.peer, KVF_READ, &run, 1, note_outcome, &outcome, NULL),
                         KVF_OK);
        say_nonsense(&fake, which);
        drive(&here, NULL, &here.lost, (uint32_t)which + 1);
        assert_int_equal(outcome.calls, 1);
        assert_int_equal(outcome.status, KVF_E_PEER_LOST);
        assert_true(count_descriptors() <= before);
        fake_end(&fake);
    }
    side_close(&here);
}

/* Says that all there is is one region of memory that its caller brought. */
static void tell_all(const fake_side *fake) {
    kvf_shm_region region = {1 << 20, 4096, 0, SHM_NO_ARENA, 0};
    tell_region(fake, 0, region, 1);
    tell_ready(fake);
}

/* The slot of the next MOVE; maps the buffer when it comes, if `buffer` is not NULL. */
static uint32_t next_move(test_side *here, const fake_side *fake, unsigned char **buffer) {
    static kvf_shm_packet packet;
    drive_idle(here, NULL);
    for (;;) {
        assert_int_equal(kvf_shm_receive(fake->fd, &packet), KVF_OK);
        if (packet.as.header.kind == SHM_BUFFER && buffer)
            *buffer = mmap(NULL, packet.as.buffer.slot_bytes * packet.as.buffer.slots, PROT_READ | PROT_WRITE,
                           MAP_SHARED, packet.fd, 0);
        if (packet.fd >= 0)
            (void)close(packet.fd);
        if (packet.as.header.kind == SHM_BUFFER) { /* all of it is taken */
            raw_send(fake->fd, &packet, sizeof packet.as.buffer, -1);
            drive_idle(here, NULL);
        }
        if (packet.as.header.kind == SHM_MOVE)
            return packet.as.move.slot;
    }
}

static void answer(const fake_side *fake, uint32_t slot, kvf_status status) {
    kvf_shm_moved_message moved = {{SHM_MOVED, 0}, slot, (uint32_t)status};
    raw_send(fake->fd, &moved, sizeof moved, -1);
}

static void an_owner_that_refuses_fails_the_batch_alone(void **state) {
    (void)state;
    test_side here;
    side_open(&here, &brought, 1);
    fake_side fake = fake_owner(&here);
    kvf_run run = {0, 0, 100, 0, 0};
    test_outcome outcome = {0};
    tell_all(&fake);
    assert_int_equal(kvf_transport_submit(fake.peer, KVF_READ, &run, 1, note_outcome, &outcome, NULL),
                     KVF_OK);
    answer(&fake, next_move(&here, &fake, NULL), KVF_E_RANGE);
    drive(&here, NULL, &outcome.calls, 1);
    assert_int_equal(outcome.status, KVF_E_RANGE);
    assert_int_equal(here.lost, 0);
    assert_int_equal(side_memory(&here, 0)[0], side_byte(1, 0, 0));
    fake_end(&fake);
    side_close(&here);
}

static void a_late_answer_to_a_cancelled_batch_is_nobodys(void **state) {
    (void)state;
    test_side here;
    unsigned char *buffer = NULL;
    side_open(&here, &brought, 1);
    fake_side fake = fake_owner(&here);
    kvf_run run = {0, 0, 100, 0, 0};
    test_outcome outcomes[2] = {{0}};
    kvf_operation operation;
    tell_all(&fake);
    assert_int_equal(
        kvf_transport_submit(fake.peer, KVF_READ, &run, 1, note_outcome, &outcomes[0], &operation), KVF_OK);
    uint32_t cancelled = next_move(&here, &fake, &buffer);
    assert_non_null(buffer);
    assert_int_equal(kvf_transport_cancel(here.transport, operation), KVF_OK);
    drive(&here, NULL, &outcomes[0].calls, 1);
    assert_int_equal(outcomes[0].status, KVF_E_CANCELLED);
    assert_int_equal(kvf_transport_submit(fake.peer, KVF_READ, &run, 1, note_outcome, &outcomes[1], NULL),
                     KVF_OK);
    uint32_t wanted = next_move(&here, &fake, NULL);
    assert_int_not_equal(wanted, cancelled);
    memset(buffer + (size_t)cancelled * 1048576, 0x11, 100);
    memset(buffer + (size_t)wanted * 1048576, 0x22, 100);
    answer(&fake, cancelled, KVF_OK);
    drive_idle(&here, NULL);
    assert_int_equal(outcomes[1].calls, 0);
    assert_int_equal(side_memory(&here, 0)[0], side_byte(1, 0, 0));
    answer(&fake, wanted, KVF_OK);
    drive(&here, NULL, &outcomes[1].calls, 1);
    assert_int_equal(outcomes[1].status, KVF_OK);
    assert_int_equal(side_memory(&here, 0)[99], 0x22);
    (void)munmap(buffer, 4u << 20);
    fake_end(&fake);
    side_close(&here);
}

/* The destination faults when it is first touched; the owner goes in that moment. */
static struct {
    void *memory;
    size_t bytes;
    int owner;
} trap;

static void spring_trap(int number) {
    (void)number;
    (void)close(trap.owner);
    (void)mprotect(trap.memory, trap.bytes, PROT_READ | PROT_WRITE);
}

static void an_owner_that_goes_while_its_memory_is_copied_is_lost(void **state) {
    (void)state;
    test_side here;
    side_open(&here, &brought, 1);
    fake_side fake = fake_owner(&here);
    kvf_run run = {0, 0, 4096, 0, 0}; /* region 0 was allocated: it begins a page */
    test_outcome outcome = {0};
    tell_arena(&fake, 0, 4096, make_memory(4096, F_SEAL_SHRINK));
    tell_region(&fake, 0, (kvf_shm_region){1 << 20, 4096, 0, 0, 0}, 1);
    tell_ready(&fake);
    drive_idle(&here, NULL);
    struct sigaction action = {.sa_handler = spring_trap}, before;
    trap.memory = side_memory(&here, 0);
    trap.bytes = 4096;
    trap.owner = fake.fd;
    assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);
    assert_int_equal(mprotect(trap.memory, trap.bytes, PROT_NONE), 0);
    assert_int_equal(kvf_transport_submit(fake.peer, KVF_READ, &run, 1, note_outcome, &outcome, NULL),
                     KVF_OK);
    drive(&here, NULL, &outcome.calls, 1);
    assert_int_equal(sigaction(SIGSEGV, &before, NULL), 0);
    assert_int_equal(side_memory(&here, 0)[0], 0); /* it was copied */
    assert_int_equal(outcome.status, KVF_E_PEER_LOST);
    fake.fd = -1;
    fake_end(&fake);
    side_close(&here);
}

static void a_silent_owner_keeps_nobody_from_cancelling(void **state) {
    (void)state;
    test_side here;
    side_open(&here, &brought, 1);
    fake_side fake = fake_owner(&here);
    kvf_run run = {0, 0, 100, 0, 0};
    test_outcome outcomes[2] = {{0}};
    kvf_operation operations[2];
    assert_int_equal(
        kvf_transport_submit(fake.peer, KVF_READ, &run, 1, note_outcome, &outcomes[0], &operations[0]),
        KVF_OK);
    drive_idle(&here, NULL);
    assert_int_equal(kvf_transport_cancel(here.transport, operations[0]), KVF_OK);
    drive(&here, NULL, &outcomes[0].calls, 1);
    assert_int_equal(outcomes[0].status, KVF_E_CANCELLED);
    tell_all(&fake);
    assert_int_equal(
        kvf_transport_submit(fake.peer, KVF_READ, &run, 1, note_outcome, &outcomes[1], &operations[1]),
        KVF_OK);
    drive_idle(&here, NULL); /* now it has been asked for */
    assert_int_equal(kvf_transport_cancel(here.transport, operations[1]), KVF_OK);
    drive(&here, NULL, &outcomes[1].calls, 1);
    assert_int_equal(outcomes[1].status, KVF_E_CANCELLED);
    fake_end(&fake);
    side_close(&here);
}

/* ---- memory that is not there ---------------------------------------------------------------- */

/* The kernel says so where it copies. An owner that serves touches its memory itself, and has to keep it. */
static void memory_that_its_owner_unmapped_fails_the_batch_alone(void **state) {
    (void)state;
    static unsigned char local[16 * 4096];
    const uint64_t page = 4096;
    kvf_transport *here = NULL, *there = NULL;
    unsigned char *memory = mmap(NULL, 16 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    memset(memory, 5, 16 * page);
    kvf_memory remote = {.struct_size = sizeof(kvf_memory), .address = memory, .bytes = 16 * page},
               ours = {.struct_size = sizeof(kvf_memory), .address = local, .bytes = sizeof local};
    const kvf_setting direct = {"shm.direct", "on"};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &direct, .setting_count = 1};
    assert_int_equal(kvf_transport_open("shm", &options, &here), KVF_OK);
    assert_int_equal(kvf_transport_open("shm", NULL, &there), KVF_OK);
    assert_int_equal(kvf_transport_register(here, &ours, 1), KVF_OK);
    assert_int_equal(kvf_transport_register(there, &remote, 1), KVF_OK);
    test_side a = {.transport = here}, b = {.transport = there};
    kvf_peer *peer = side_connect(&a, &b);
    /* They have mapped what they need: nothing of theirs will fill the hole. */
    assert_int_equal(move_runs(&a, &b, peer, KVF_READ, &(kvf_run){0, 0, page, 0, 0}, 1), KVF_OK);
    (void)munmap(memory + 8 * page, page);
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        kvf_run across = {0, 0, 16 * page, 0, 0};
        kvf_run list[3] = {{0, 0, page, 0, 0}, {page, 8 * page, 10, 0, 0}, {2 * page, 9 * page, page, 0, 0}};
        kvf_run around = {0, 9 * page, 7 * page, 0, 0};
        assert_int_equal(move_runs(&a, &b, peer, (kvf_direction)direction, &across, 1), KVF_E_IO);
        assert_int_equal(move_runs(&a, &b, peer, (kvf_direction)direction, list, 3), KVF_E_IO);
        assert_int_equal(move_runs(&a, &b, peer, (kvf_direction)direction, &around, 1), KVF_OK);
        assert_memory_equal(local, memory + 9 * page, 7 * page);
    }
    kvf_transport_close(here);
    kvf_transport_close(there);
    (void)munmap(memory, 8 * page);
    (void)munmap(memory + 9 * page, 7 * page);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strangers_that_say_nothing_keep_nobody_out),
        cmocka_unit_test(strangers_without_the_key_are_hung_up_on),
        cmocka_unit_test(descriptors_that_nobody_asked_for_are_closed),
        cmocka_unit_test(garbage_is_hung_up_on),
        cmocka_unit_test(buffers_that_could_make_the_owner_fault_are_hung_up_on),
        cmocka_unit_test(pieces_outside_of_registered_memory_are_refused),
        cmocka_unit_test(a_move_that_makes_no_sense_is_hung_up_on),
        cmocka_unit_test(notices_of_a_wrong_length_are_hung_up_on),
        cmocka_unit_test(what_was_to_be_written_by_a_client_that_left_is_not),
        cmocka_unit_test(a_client_that_reads_no_answers_stops_nobody_else),
        cmocka_unit_test(a_full_queue_of_connections_only_delays_a_newcomer),
        cmocka_unit_test(a_process_with_as_many_connections_as_one_may_have_is_refused_by_name),
        cmocka_unit_test(beyond_the_budget_of_buffers_a_process_is_served_through_a_small_one),
        cmocka_unit_test(an_owner_that_talks_nonsense_is_lost),
        cmocka_unit_test(an_owner_that_refuses_fails_the_batch_alone),
        cmocka_unit_test(a_late_answer_to_a_cancelled_batch_is_nobodys),
        cmocka_unit_test(an_owner_that_goes_while_its_memory_is_copied_is_lost),
        cmocka_unit_test(a_silent_owner_keeps_nobody_from_cancelling),
        cmocka_unit_test(memory_that_its_owner_unmapped_fails_the_batch_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
