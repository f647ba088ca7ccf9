/*
 * More clients that connect to one owner by messages than it lets in at once. As when 4096 ranks of an engine connect
 * to one busy rank, which lets in 250 a second, the last ones wait for many seconds; here there are fewer, and fewer
 * are let in. TCP would try ever more rarely, and the last ones would come too late.
 */
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "base/clock.h"
#include "shapes.h"
#include "transport/front.h"
#include "transport/messages/messages.h"
#include "transport_pair.h"

#define CLIENTS 1000u
#define DESCRIPTORS_OF_A_CLIENT 12u /* at both ends, while it tries again */
#define LAST_COMES_AFTER_S 9u
#define BYTES 100u
#define SECOND UINT64_C(1000000000)

/* The owner, whose progress is made by a thread: connect() waits for it. */
typedef struct busy_owner {
    test_side side;
    pthread_t thread;
    atomic_bool ends;
} busy_owner;

static void *serve(void *context) {
    busy_owner *owner = context;
    while (!atomic_load(&owner->ends)) {
        struct pollfd fd = {kvf_transport_event_fd(owner->side.transport), POLLIN, 0};
        (void)poll(&fd, 1, 10);
        assert_ok(kvf_transport_progress(owner->side.transport, NULL));
    }
    return NULL;
}

/* How many clients this process has descriptors for. */
static uint32_t count_clients(void) {
    struct rlimit limit;
    assert_return_code(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    assert_return_code(setrlimit(RLIMIT_NOFILE, &limit), 0);
    const uint64_t most = limit.rlim_cur / DESCRIPTORS_OF_A_CLIENT;
    return most < CLIENTS ? (uint32_t)most : CLIENTS;
}

static void whoever_is_not_let_in_at_once_is_let_in_later(void **state) {
    (void)state;
    static busy_owner owner;
    test_side here;
    const uint32_t clients = count_clients(), at_once = clients / (LAST_COMES_AFTER_S + 1);
    /* With one address only: each would be tried. */
    const pair_kind kind = {"messages", {false, false}, "messages", {"messages.listen", "tcp://127.0.0.1:*"}};
    kvf_peer **peers = calloc(clients, sizeof(*peers));
    test_outcome *outcomes = calloc(clients, sizeof *outcomes);
    assert_non_null(peers);
    assert_non_null(outcomes);
    side_open(&owner.side, &kind, 2);
    side_open(&here, &kind, 1);
    ((kvf_messages_endpoint *)owner.side.transport->fabrics[0].endpoint)->rate = at_once;
    assert_int_equal(pthread_create(&owner.thread, NULL, serve, &owner), 0);
    const uint64_t begun = kvf_now(&kvf_monotonic);
    const kvf_run run = {.bytes = BYTES};
    for (uint32_t i = 0; i < clients; i++) {
        peers[i] = side_connect(&here, &owner.side);
        assert_ok(kvf_transport_submit(peers[i], KVF_READ, &run, 1, note_outcome, &outcomes[i], NULL));
        (void)poll(NULL, 0, 1); /* as from many hosts: not all in one moment, which the gate would miss */
    }
    /* Only the first of those who are kept out holds its caller up, for a second. */
    const uint64_t came = kvf_now(&kvf_monotonic) - begun;
    assert_true(came < clients / 10 * SECOND);
    for (uint32_t i = 0; i < clients; i++)
        drive(&here, NULL, &outcomes[i].calls, 1);
    const uint64_t took = kvf_now(&kvf_monotonic) - begun;
    uint32_t failed = 0;
    for (uint32_t i = 0; i < clients; i++) {
        if (outcomes[i].status && failed++ == 0)
            print_error("client %u: %s\n", i, outcomes[i].detail);
        assert_int_equal(outcomes[i].calls, 1);
    }
    assert_int_equal(failed, 0);
    assert_int_equal(here.lost, 0);
    assert_memory_equal(side_memory(&here, 0), side_memory(&owner.side, 0), BYTES);
    assert_true(took > LAST_COMES_AFTER_S * SECOND * 2 / 3); /* it did keep them out */
    /* Let in without waiting: who came while there was room, which on a busy machine are many, and in the 2 s after. */
    const uint64_t at_first = at_once * (came / SECOND + 4);
    assert_true(kvf_transport_waits(here.transport) >= clients - kvf_min_u64(at_first, clients));
    for (uint32_t i = 0; i < clients; i++) {
        assert_null(kvf_peer_waiting(peers[i]));
        kvf_peer_close(peers[i]);
    }
    atomic_store(&owner.ends, true);
    assert_int_equal(pthread_join(owner.thread, NULL), 0);
    side_close(&here);
    side_close(&owner.side);
    free(outcomes);
    free((void *)peers);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(whoever_is_not_let_in_at_once_is_let_in_later)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
