/* The same-host transport as an owner, against clients that violate its protocol. */
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "transport/shm/shm_tenants.h"
#include "transport_raw.h"

/* They were once hung up on without a word, as if the owner's process had ended. They hear how many may be strangers, and
 * nothing of what the owner has or does. */
static void assert_refused_as_full(int fd) {
    static kvf_shm_packet packet;
    assert_int_equal(kvf_shm_receive(fd, &packet), KVF_OK);
    assert_int_equal(packet.as.header.kind, SHM_REFUSED);
    assert_int_equal(packet.as.header.count, SHM_REFUSED_FULL);
    assert_int_equal(packet.bytes, sizeof packet.as.refused);
    assert_in_range(packet.as.refused.number, 1, SHM_STRANGERS_MAX);
    assert_int_equal(kvf_shm_receive(fd, &packet), KVF_E_PEER_LOST);
}

static void strangers_that_say_nothing_keep_nobody_out(void **state) {
    (void)state;
    test_side owner;
    int fds[300];
    side_open(&owner, &raw_brought, 2);
    kvf_shm_card card = raw_card(&owner);
    for (int i = 0; i < 300; i++) {
        fds[i] = raw_connect(&card);
        if (i % 10 == 0)
            drive_idle(&owner, NULL);
    }
    raw_check_served(&owner);
    uint32_t kept = 0;
    for (int i = 0; i < 300; i++) {
        const bool refused = raw_hung_up(&owner, fds[i]);
        kept += !refused;
        if (refused)
            assert_refused_as_full(fds[i]);
    }
    assert_true(kept <= 64);
    kvf_transport_info info = {.struct_size = sizeof info};
    assert_int_equal(kvf_transport_get_info(owner.transport, &info), KVF_OK);
    assert_int_equal(info.refused, 300 - kept);
    for (int i = 0; i < 300; i++)
        (void)close(fds[i]);
    drive_idle(&owner, NULL);
    side_close(&owner);
}

/* What another user's process hears: 0 if it is refused by name, and then hung up on. */
static int be_another_user(const kvf_shm_card *card) {
    static kvf_shm_packet packet;
    if (setuid(65534))
        return 1;
    const int fd = raw_connect(card);
    struct pollfd readable = {fd, POLLIN, 0};
    if (poll(&readable, 1, 5000) <= 0 || kvf_shm_receive(fd, &packet))
        return 2;
    if (packet.as.header.kind != SHM_REFUSED || packet.as.header.count != SHM_REFUSED_USER)
        return 3;
    return poll(&readable, 1, 5000) <= 0 || kvf_shm_receive(fd, &packet) != KVF_E_PEER_LOST ? 4 : 0;
}

static void a_process_of_another_user_is_refused_and_hung_up_on(void **state) {
    (void)state;
    test_side owner;
    int how = 0;
    if (geteuid() != 0)
        skip();
    side_open(&owner, &raw_brought, 2);
    const kvf_shm_card card = raw_card(&owner);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        _exit(be_another_user(&card));
    while (waitpid(child, &how, WNOHANG) == 0)
        drive_idle(&owner, NULL);
    assert_true(WIFEXITED(how));
    assert_int_equal(WEXITSTATUS(how), 0);
    raw_check_served(&owner);
    side_close(&owner);
}

static void strangers_without_the_key_are_hung_up_on(void **state) {
    (void)state;
    test_side owner;
    side_open(&owner, &raw_brought, 2);
    kvf_shm_card card = raw_card(&owner);
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
        if (i == 6) /* the valid HELLO, and then the same again */
            raw_send(fd, &hello, bytes, -1);
        assert_true(raw_hung_up(&owner, fd));
        (void)close(fd);
    }
    raw_check_served(&owner);
    side_close(&owner);
}

/* Whatever it claims to know. */
static void a_client_is_hung_up_on_when_memory_is_taken_back(void **state) {
    (void)state;
    static const uint64_t claims[] = {0, 1000, UINT64_MAX};
    for (size_t i = 0; i < sizeof claims / sizeof *claims; i++) {
        test_side owner;
        side_open(&owner, &raw_brought, 2);
        const kvf_shm_card card = raw_card(&owner);
        kvf_shm_hello hello = {.header = {SHM_HELLO, 0}, .version = SHM_VERSION, .generation = claims[i]};
        memcpy(hello.key, card.key, sizeof hello.key);
        const int fd = raw_connect(&card);
        raw_send(fd, &hello, sizeof hello, -1);
        assert_false(raw_hung_up(&owner, fd));
        assert_int_equal(kvf_transport_unregister_region(owner.transport, 0), KVF_OK);
        assert_true(raw_hung_up(&owner, fd));
        (void)close(fd);
        side_close(&owner);
    }
}

static void descriptors_that_nobody_asked_for_are_closed(void **state) {
    (void)state;
    test_side owner;
    side_open(&owner, &raw_brought, 2);
    kvf_shm_card card = raw_card(&owner);
    int memory = raw_memory(4096, F_SEAL_SHRINK);
    drive_idle(&owner, NULL);
    const int before = raw_count_descriptors();
    for (int i = 0; i < 100; i++) { /* first strangers, which know no key, then clients */
        static const kvf_shm_header nonsense = {SHM_MOVED, 0};
        static const uint32_t counts[] = {1, 2, 3, RAW_PASSED_MAX};
        int fd = i < 50 ? raw_connect(&card) : raw_client(&owner);
        const size_t bytes = i / 4 % 2 ? sizeof nonsense : 0;
        raw_send_many(fd, &nonsense, bytes, memory, counts[i % 4]);
        assert_true(raw_hung_up(&owner, fd));
        (void)close(fd);
    }
    drive_idle(&owner, NULL);
    assert_int_equal(raw_count_descriptors(), before);
    for (int i = 0; i < 100; i++) { /* one descriptor is welcome with this message, a second is not */
        kvf_shm_buffer_message buffer = {{SHM_BUFFER, 0}, 4096, 1, 0};
        int fd = raw_client(&owner);
        raw_send_many(fd, &buffer, sizeof buffer, memory, 2);
        assert_true(raw_hung_up(&owner, fd));
        (void)close(fd);
    }
    drive_idle(&owner, NULL);
    assert_int_equal(raw_count_descriptors(), before);
    (void)close(memory);
    raw_check_served(&owner);
    side_close(&owner);
}

static void garbage_is_hung_up_on(void **state) {
    (void)state;
    test_side owner;
    uint64_t seed = 4711;
    side_open(&owner, &raw_brought, 2);
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
        assert_true(raw_hung_up(&owner, fd));
        (void)close(fd);
    }
    assert_int_equal(owner.notices, 0);
    raw_check_served(&owner);
    side_close(&owner);
}

static void buffers_that_could_make_the_owner_fault_are_hung_up_on(void **state) {
    (void)state;
    test_side owner;
    side_open(&owner, &raw_brought, 2);
    const uint64_t size = 1u << 20;
    struct {
        int fd;
        uint32_t slots;
        uint64_t slot_bytes;
    } cases[] = {
        {raw_memory(size, 0), 1, size},                    /* may shrink */
        {raw_memory(size, F_SEAL_SHRINK), 1, size + 4096}, /* smaller than it says */
        {raw_memory(size, F_SEAL_SHRINK), 3, size / 2},
        {raw_memory(size, F_SEAL_SHRINK), 4, UINT64_MAX / 2},
        {raw_memory(size, F_SEAL_SHRINK), 0, size},
        {raw_memory(size, F_SEAL_SHRINK), 1, 0},
        {raw_memory(size, F_SEAL_SHRINK), 1000, 4096},
        {raw_memory(0, F_SEAL_SHRINK), 1, size},
        {raw_memory(size, F_SEAL_SHRINK | F_SEAL_WRITE), 1, size}, /* cannot be written */
        {open("/dev/zero", O_RDWR | O_CLOEXEC), 1, size},
        {-1, 1, size},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int fd = raw_client(&owner);
        kvf_shm_buffer_message message = {{SHM_BUFFER, 0}, cases[i].slot_bytes, cases[i].slots, 0};
        raw_send(fd, &message, sizeof message, cases[i].fd);
        assert_true(raw_hung_up(&owner, fd));
        (void)close(fd);
        if (cases[i].fd >= 0)
            (void)close(cases[i].fd);
    }
    raw_check_served(&owner);
    side_close(&owner);
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
    side_open(&owner, &raw_brought, 2);
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
        {{0, 65537, 1, 0}, KVF_E_RANGE}, /* more bytes than the slot has */
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
    side_open(&owner, &raw_brought, 2);
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
        assert_true(raw_hung_up(&owner, fd));
        if (i != 5)
            (void)munmap(buffer, 131072);
        (void)close(fd);
    }
    raw_check_served(&owner);
    side_close(&owner);
}

static void notices_of_a_wrong_length_are_hung_up_on(void **state) {
    (void)state;
    test_side owner;
    side_open(&owner, &raw_brought, 2);
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
        assert_true(raw_hung_up(&owner, fd));
        (void)close(fd);
    }
    assert_int_equal(owner.notices, 0);
    side_close(&owner);
}

static void writes_of_a_client_that_left_are_not_made(void **state) {
    (void)state;
    test_side owner;
    unsigned char *buffer;
    side_open(&owner, &raw_brought, 2);
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
    assert_int_equal(owner.notices, 1); /* but its notification still counts */
    (void)munmap(buffer, 131072);
    side_close(&owner);
}

static void a_client_that_reads_no_answers_stops_nobody_else(void **state) {
    (void)state;
    test_side owner;
    unsigned char *buffer;
    side_open(&owner, &raw_brought, 2);
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
    raw_check_served(&owner);
    (void)munmap(buffer, 131072);
    (void)close(fd);
    side_close(&owner);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strangers_that_say_nothing_keep_nobody_out),
        cmocka_unit_test(a_process_of_another_user_is_refused_and_hung_up_on),
        cmocka_unit_test(strangers_without_the_key_are_hung_up_on),
        cmocka_unit_test(a_client_is_hung_up_on_when_memory_is_taken_back),
        cmocka_unit_test(descriptors_that_nobody_asked_for_are_closed),
        cmocka_unit_test(garbage_is_hung_up_on),
        cmocka_unit_test(buffers_that_could_make_the_owner_fault_are_hung_up_on),
        cmocka_unit_test(pieces_outside_of_registered_memory_are_refused),
        cmocka_unit_test(a_move_that_makes_no_sense_is_hung_up_on),
        cmocka_unit_test(notices_of_a_wrong_length_are_hung_up_on),
        cmocka_unit_test(writes_of_a_client_that_left_are_not_made),
        cmocka_unit_test(a_client_that_reads_no_answers_stops_nobody_else),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
