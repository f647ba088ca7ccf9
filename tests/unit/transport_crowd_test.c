/* The same-host transport as an owner, with more clients that want to connect, or want larger buffers, than it
 * serves. */
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/front.h"
#include "transport/shm/shm.h"
#include "transport_raw.h"

/* The owner accepts no connection meanwhile. */
static void a_full_queue_of_connections_only_delays_a_newcomer(void **state) {
    (void)state;
    test_side owner, here;
    int fds[RAW_QUEUE_MAX];
    side_open(&owner, &raw_brought, 2);
    side_open(&here, &raw_brought, 1);
    uint32_t count = raw_fill_queue(&owner, fds);
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

/* As after a thousand connections of strangers within milliseconds: a newcomer waits, with a notification. */
static kvf_shm_endpoint *open_at_shut_door(test_side *owner, test_side *here) {
    side_open(owner, &raw_brought, 2);
    side_open(here, &raw_brought, 1);
    kvf_shm_endpoint *endpoint = owner->transport->fabrics[0].endpoint;
    endpoint->tenants.door_work = UINT64_MAX / 2;
    kvf_peer *peer = side_connect(here, owner);
    assert_int_equal(kvf_transport_notify(peer, "note", 4), KVF_OK);
    drive_idle(here, NULL);
    while (!endpoint->door_until_ns)
        assert_int_equal(kvf_transport_progress(owner->transport, NULL), KVF_OK);
    return endpoint;
}

static void a_newcomer_comes_in_when_strangers_have_cost_no_more_than_their_share(void **state) {
    (void)state;
    test_side owner, here;
    kvf_shm_endpoint *endpoint = open_at_shut_door(&owner, &here);
    for (int i = 0; i < 10; i++)
        assert_int_equal(kvf_transport_progress(owner.transport, NULL), KVF_OK);
    assert_int_equal(owner.notices, 0);
    endpoint->tenants.door_work = 0;
    drive(&owner, &here, &owner.notices, 1); /* woken by its timer */
    assert_int_equal(endpoint->door_until_ns, 0);
    raw_check_served(&owner);
    side_close(&here);
    side_close(&owner);
}

/* The one timer of an endpoint is also that of its own reads. */
static void a_newcomer_comes_in_though_the_timer_has_expired_for_something_else(void **state) {
    (void)state;
    test_side owner, here;
    kvf_shm_endpoint *endpoint = open_at_shut_door(&owner, &here);
    endpoint->tenants.door_work = 0;
    endpoint->door_until_ns = kvf_now(&kvf_monotonic) + 100 * KVF_MILLISECOND;
    kvf_timer_set(&endpoint->timer, 1);
    assert_int_equal(kvf_transport_progress(owner.transport, NULL), KVF_OK);
    struct pollfd wakes = {kvf_transport_event_fd(owner.transport), POLLIN, 0};
    while (owner.notices == 0 && poll(&wakes, 1, 10000) == 1)
        assert_int_equal(kvf_transport_progress(owner.transport, NULL), KVF_OK);
    assert_int_equal(owner.notices, 1);
    side_close(&here);
    side_close(&owner);
}

static void a_process_with_as_many_connections_as_one_may_have_is_refused_by_name(void **state) {
    (void)state;
    test_side owner, here;
    int fds[64];
    side_open(&owner, &raw_brought, 2);
    side_open(&here, &raw_brought, 1);
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
    raw_check_served(&owner);
    for (int i = 1; i < 64; i++)
        (void)close(fds[i]);
    side_close(&here);
    side_close(&owner);
}

static void beyond_the_budget_of_buffers_a_process_is_served_through_a_small_one(void **state) {
    (void)state;
    test_side owner, here;
    int fds[2];
    side_open(&owner, &raw_brought, 2);
    for (int i = 0; i < 2; i++) {
        fds[i] = raw_client(&owner);
        kvf_shm_buffer_message taken =
            raw_offer_buffer(&owner, fds[i], raw_memory(8u << 20, F_SEAL_SHRINK), 1u << 20, 8);
        assert_int_equal(taken.slots, 8);
    }
    side_open(&here, &raw_brought, 1);
    kvf_peer *peer = side_connect(&here, &owner);
    uint64_t bytes = kvf_min_u64(here.regions[1].bytes, owner.regions[1].bytes);
    kvf_run run = {0, 0, bytes, 1, 1};
    assert_true(bytes > 65536); /* more than one slot; the slots are smaller than they were offered */
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_full_queue_of_connections_only_delays_a_newcomer),
        cmocka_unit_test(a_newcomer_comes_in_when_strangers_have_cost_no_more_than_their_share),
        cmocka_unit_test(a_newcomer_comes_in_though_the_timer_has_expired_for_something_else),
        cmocka_unit_test(a_process_with_as_many_connections_as_one_may_have_is_refused_by_name),
        cmocka_unit_test(beyond_the_budget_of_buffers_a_process_is_served_through_a_small_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
