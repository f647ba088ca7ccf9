/*
 * Endpoints of one process, each driven by a thread of its own: they read and write each other's memory, and one closes
 * while others copy from it. Runs under the thread sanitizer too.
 */
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "transport_pair.h"

#define READERS 3
#define ROUNDS 30
#define BYTES (1u << 20)
#define WRITTEN 5000u
#define PLACE_BYTES ((size_t)8192)

static const pair_kind kinds[] = {{"inproc", {true, false}, "inproc", {0}},
                                  {"shm", {true, false}, "shm", {0}}};

/* What one thread did. The main thread checks it after the thread has ended, since only the main thread may use the
 * test library's checks. */
typedef struct test_worker {
    pthread_t thread;
    uint32_t number;
    const char *kind;
    const void *card;
    size_t card_bytes;
    kvf_transport *transport;
    kvf_peer *peer;
    unsigned char *memory;
    uint32_t ended, lost, wrong;
} test_worker;

static void count_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    (void)detail;
    test_worker *worker = context;
    worker->ended++;
    worker->wrong += status != KVF_OK && status != KVF_E_PEER_LOST;
}

static void count_lost(void *context, kvf_transport *transport, kvf_peer *peer, const char *detail) {
    (void)transport;
    (void)peer;
    (void)detail;
    ((test_worker *)context)->lost++;
}

static bool worker_open(test_worker *worker) {
    kvf_transport_options options = {
        .struct_size = sizeof options, .on_peer_lost = count_lost, .context = worker};
    worker->memory = malloc(BYTES);
    kvf_memory region = {.struct_size = sizeof(kvf_memory), .address = worker->memory, .bytes = BYTES};
    return worker->memory && kvf_transport_open(worker->kind, &options, &worker->transport) == KVF_OK &&
           kvf_transport_register(worker->transport, &region, 1) == KVF_OK &&
           kvf_transport_connect(worker->transport, worker->card, worker->card_bytes, &worker->peer) ==
               KVF_OK;
}

static void worker_close(test_worker *worker) {
    kvf_transport_close(worker->transport);
    free(worker->memory);
}

/* Moves one run; false if the peer was lost. */
static bool worker_move(test_worker *worker, kvf_direction direction, kvf_run run) {
    uint32_t wanted = worker->ended + 1;
    if (kvf_transport_submit(worker->peer, direction, &run, 1, count_done, worker, NULL) != KVF_OK)
        return false;
    while (worker->ended < wanted) {
        struct pollfd fd = {kvf_transport_event_fd(worker->transport), POLLIN, 0};
        (void)poll(&fd, 1, 60000);
        (void)kvf_transport_progress(worker->transport, NULL);
    }
    return worker->lost == 0;
}

/* Reads region 0 and checks it; writes to a place of its own in region 2, and notifies the owner which. */
static void *read_and_write(void *context) {
    test_worker *worker = context;
    if (!worker_open(worker)) {
        worker->wrong = 1;
        return NULL;
    }
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint64_t offset = round * (uint64_t)4096;
        if (!worker_move(worker, KVF_READ, (kvf_run){0, offset, BYTES, 0, 0}))
            worker->wrong++;
        for (uint64_t at = 0; at < BYTES; at += 61)
            worker->wrong += worker->memory[at] != side_byte(2, 0, offset + at);
        uint32_t place = worker->number * ROUNDS + round;
        memset(worker->memory, (int)place, WRITTEN);
        if (!worker_move(worker, KVF_WRITE, (kvf_run){0, place * PLACE_BYTES, WRITTEN, 0, 2}) ||
            kvf_transport_notify(worker->peer, &place, sizeof place) != KVF_OK)
            worker->wrong++;
    }
    worker_close(worker);
    return NULL;
}

static void *read_until_lost(void *context) {
    test_worker *worker = context;
    if (!worker_open(worker)) {
        worker->wrong = worker->peer == NULL; /* the owner may have closed before that */
        worker_close(worker);
        return NULL;
    }
    (void)kvf_transport_notify(worker->peer, &worker->number, sizeof worker->number);
    while (worker_move(worker, KVF_READ, (kvf_run){0, 0, BYTES, 0, 0})) {
    }
    worker_close(worker);
    return NULL;
}

static void start_workers(test_worker *workers, const test_side *owner, const pair_kind *kind,
                          void *(*work)(void *)) {
    memset(workers, 0, READERS * sizeof *workers);
    for (uint32_t i = 0; i < READERS; i++) {
        workers[i].number = i;
        workers[i].kind = kind->kind;
        assert_int_equal(kvf_transport_export(owner->transport, &workers[i].card, &workers[i].card_bytes),
                         KVF_OK);
    }
    for (uint32_t i = 0; i < READERS; i++)
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
}

/* A thread's bytes must be there when its notification arrives. */
static void check_written(test_side *owner) {
    uint32_t place = owner->notice_values[owner->notices - 1];
    const unsigned char *written = side_memory(owner, 2) + place * PLACE_BYTES;
    for (uint32_t at = 0; at < WRITTEN; at += 7)
        if (written[at] != (unsigned char)place)
            fail_msg("byte %u of place %u", at, place);
}

static void threads_read_and_write_the_memory_of_another(void **state) {
    const pair_kind *kind = *state;
    test_side owner;
    test_worker workers[READERS];
    side_open(&owner, kind, 2);
    /* The thread sanitizer sees neither order nor races between two mappings of the same memory. */
    owner.on_notice = check_written;
    start_workers(workers, &owner, kind, read_and_write);
    drive(&owner, NULL, &owner.notices, READERS * ROUNDS);
    for (uint32_t i = 0; i < READERS; i++) {
        assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
        assert_int_equal(workers[i].wrong, 0);
        assert_int_equal(workers[i].ended, 2 * ROUNDS);
    }
    side_close(&owner);
}

static void an_endpoint_closes_while_threads_copy_from_it(void **state) {
    for (int round = 0; round < 10; round++) {
        test_side owner;
        test_worker workers[READERS];
        side_open(&owner, *state, 2);
        start_workers(workers, &owner, *state, read_until_lost);
        drive(&owner, NULL, &owner.notices, READERS);
        if (round % 2)
            drive_idle(&owner, NULL);
        side_close(&owner); /* this frees its memory too */
        for (uint32_t i = 0; i < READERS; i++) {
            assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
            assert_int_equal(workers[i].wrong, 0);
            assert_int_equal(workers[i].lost, 1);
        }
    }
}

int main(void) {
#define BOTH(test)                                                                                           \
    {#test " (inproc)", test, NULL, NULL, (void *)&kinds[0]}, {                                              \
#test " (shm)", test, NULL, NULL, (void *)&kinds[1]                                                  \
    }
    const struct CMUnitTest tests[] = {
        BOTH(threads_read_and_write_the_memory_of_another),
        {"an_endpoint_closes_while_threads_copy_from_it (inproc)",
         an_endpoint_closes_while_threads_copy_from_it, NULL, NULL, (void *)&kinds[0]},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
