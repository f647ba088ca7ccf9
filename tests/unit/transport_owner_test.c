/* The same-host transport as a client, against owners that violate its protocol. */
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "transport/card.h"
#include "transport/transport.h"
#include "transport_raw.h"

/* A socket that plays an owner with one region of 4096 bytes, to which `here` is connected. */
typedef struct fake_side {
    int listening, fd;
    kvf_peer *peer;
} fake_side;

static fake_side fake_owner(test_side *here) {
    fake_side made = {.listening = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
    kvf_shm_card part = raw_card(here); /* it names this host and process */
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
        tell_arena(fake, 0, 8192, raw_memory(8192, 0));
        break;
    case 1: /* memory that is smaller than the message says */
        tell_arena(fake, 0, 16384, raw_memory(8192, F_SEAL_SHRINK));
        break;
    case 2: /* no memory comes with the message */
        tell_arena(fake, 0, 8192, -1);
        break;
    case 3: /* not the next index */
        tell_arena(fake, 1, 8192, raw_memory(8192, F_SEAL_SHRINK));
        break;
    case 4: /* a region outside of its arena */
        tell_arena(fake, 0, 8192, raw_memory(8192, F_SEAL_SHRINK));
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
    case 10: /* an address whose end does not fit in 64 bits */
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
    case 14: /* a region after READY */
        tell_region(fake, 0, brought_region, 1);
        tell_ready(fake);
        tell_region(fake, 1, brought_region, 1);
        break;
    case 16: /* takes a buffer though none was offered */
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
    side_open(&here, &raw_brought, 1);
    for (int which = 0; which <= 17; which++) {
        fake_side fake = fake_owner(&here);
        int before = raw_count_descriptors();
        kvf_run run = {0, 0, 100, 0, 0};
        test_outcome outcome = {0};
        assert_int_equal(kvf_transport_submit(fake.peer, KVF_READ, &run, 1, note_outcome, &outcome, NULL),
                         KVF_OK);
        say_nonsense(&fake, which);
        drive(&here, NULL, &here.lost, (uint32_t)which + 1);
        assert_int_equal(outcome.calls, 1);
        assert_int_equal(outcome.status, KVF_E_PEER_LOST);
        assert_true(kvf_peer_lives(fake.peer));
        assert_true(raw_count_descriptors() <= before);
        fake_end(&fake);
    }
    side_close(&here);
}

/* Tells that the owner has one region of memory, which its caller brought, and no more. */
static void tell_all(const fake_side *fake) {
    kvf_shm_region region = {1 << 20, 4096, 0, SHM_NO_ARENA, 0};
    tell_region(fake, 0, region, 1);
    tell_ready(fake);
}

/* Returns the slot of the next MOVE; maps the buffer when it arrives, if `buffer` is not NULL. */
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
        if (packet.as.header.kind == SHM_BUFFER) { /* takes the whole buffer */
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
    side_open(&here, &raw_brought, 1);
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
    side_open(&here, &raw_brought, 1);
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

/* The destination faults when it is first touched, and the owner closes at that moment. */
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
    side_open(&here, &raw_brought, 1);
    fake_side fake = fake_owner(&here);
    kvf_run run = {0, 0, 4096, 0, 0}; /* region 0 begins at a page boundary */
    test_outcome outcome = {0};
    tell_arena(&fake, 0, 4096, raw_memory(4096, F_SEAL_SHRINK));
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
    assert_int_equal(side_memory(&here, 0)[0], 0); /* the bytes were copied */
    assert_int_equal(outcome.status, KVF_E_PEER_LOST);
    fake.fd = -1;
    fake_end(&fake);
    side_close(&here);
}

static void a_silent_owner_keeps_nobody_from_cancelling(void **state) {
    (void)state;
    test_side here;
    side_open(&here, &raw_brought, 1);
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
    drive_idle(&here, NULL); /* the owner has been asked for it now */
    assert_int_equal(kvf_transport_cancel(here.transport, operations[1]), KVF_OK);
    drive(&here, NULL, &outcomes[1].calls, 1);
    assert_int_equal(outcomes[1].status, KVF_E_CANCELLED);
    fake_end(&fake);
    side_close(&here);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_owner_that_talks_nonsense_is_lost),
        cmocka_unit_test(an_owner_that_refuses_fails_the_batch_alone),
        cmocka_unit_test(a_late_answer_to_a_cancelled_batch_is_nobodys),
        cmocka_unit_test(an_owner_that_goes_while_its_memory_is_copied_is_lost),
        cmocka_unit_test(a_silent_owner_keeps_nobody_from_cancelling),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
