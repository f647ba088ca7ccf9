/* The TCP options that the library sets on connections, and which connections it takes for its own. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/tcp.h"
#include "port/door.h"
#include "shapes.h"

#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

/* Makes a connection over loopback; `port` receives the port it leads to. */
static int connection(int *listener, uint16_t *port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    *listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(*listener >= 0);
    assert_return_code(bind(*listener, (struct sockaddr *)&address, bytes), 0);
    assert_return_code(listen(*listener, 1), 0);
    assert_return_code(getsockname(*listener, (struct sockaddr *)&address, &bytes), 0);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_return_code(connect(fd, (struct sockaddr *)&address, bytes), 0);
    *port = ntohs(address.sin_port);
    return fd;
}

/* The longest time between two attempts; -1: this kernel does not know the option. */
static int longest_wait(int fd) {
    int ms = -1;
    socklen_t bytes = sizeof ms;
    return getsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &ms, &bytes) ? -1 : ms;
}

static void open_calls(kvf_door *door) {
    *door = (kvf_door){.empty_fd = -1, .spare_fd = -1, .brought_fd = -1};
    assert_ok(kvf_door_open_calls(door, &(kvf_guests){.longest = 1000}));
}

static void a_connection_tries_each_second_and_no_other_does(void **state) {
    (void)state;
    uint16_t port;
    int listener, fd = connection(&listener, &port);
    const int before = longest_wait(fd);
    if (before < 0)
        skip(); /* before Linux 6.15 */
    assert_true(before > 1000);
    kvf_door door;
    open_calls(&door);
    /* another port: the descriptor seems to have another owner by now */
    assert_int_equal(kvf_door_called(&door, fd, (uint16_t)(port + 1), 0), 0);
    assert_int_equal(longest_wait(fd), before);
    assert_int_not_equal(kvf_door_called(&door, fd, port, 0), 0);
    assert_int_equal(longest_wait(fd), 1000);
    kvf_door_close(&door);
    (void)close(fd);
    (void)close(listener);
}

static void a_descriptor_that_is_no_connection_is_left_alone(void **state) {
    (void)state;
    int ends[2];
    assert_return_code(pipe(ends), 0);
    kvf_door door;
    open_calls(&door);
    assert_int_equal(kvf_door_called(&door, ends[0], 80, 0), 0);
    kvf_tcp_try_often(ends[0]);
    (void)close(ends[0]);
    (void)close(ends[1]);
    assert_int_equal(kvf_door_called(&door, ends[0], 80, 0), 0); /* closed */
    assert_int_equal(kvf_door_called(&door, -1, 80, 0), 0);
    kvf_door_close(&door);
}

/* The end of a connection may be told after the beginning of the next one, which has the number of its descriptor. */
static void a_connection_is_not_taken_for_one_that_had_its_descriptor(void **state) {
    (void)state;
    uint16_t port;
    int listener, fd = connection(&listener, &port);
    kvf_door door;
    open_calls(&door);
    uint64_t former = kvf_door_called(&door, fd, port, 0), next = kvf_door_called(&door, fd, port, 0);
    assert_int_not_equal(former, next);
    assert_true(kvf_guests_has(&door.guests, former) && kvf_guests_has(&door.guests, next));
    kvf_door_hung_up(&door, &former);
    assert_int_equal(former, 0);
    assert_false(kvf_door_has_cut_off(&door, former));
    assert_false(kvf_door_has_cut_off(&door, next));
    kvf_guests_dismiss(&door.guests, next);
    assert_true(kvf_door_has_cut_off(&door, next));
    kvf_door_close(&door);
    (void)close(fd);
    (void)close(listener);
}

/* The door once took a connection that it could not list for one that it had closed because of a message. */
static void a_connection_without_memory_to_list_it_is_not_cut_off(void **state) {
    (void)state;
    memory_count memory;
    uint16_t port;
    int listener, fd = connection(&listener, &port);
    bool listed = false;
    count_memory(&memory);
    for (size_t at = 1; !listed; at++) {
        kvf_door door;
        open_calls(&door);
        memory.calls = 0;
        memory.fail_at = at;
        uint64_t call = kvf_door_called(&door, fd, port, 0);
        listed = memory.calls < at;
        memory.fail_at = 0;
        assert_true(call || !listed);
        assert_false(kvf_door_has_cut_off(&door, call));
        kvf_door_hung_up(&door, &call);
        assert_null(door.guests.by_id);
        kvf_door_close(&door);
        assert_int_equal(memory.live, 0);
    }
    (void)close(fd);
    (void)close(listener);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_connection_tries_each_second_and_no_other_does),
        cmocka_unit_test(a_descriptor_that_is_no_connection_is_left_alone),
        cmocka_unit_test(a_connection_is_not_taken_for_one_that_had_its_descriptor),
        cmocka_unit_test_teardown(a_connection_without_memory_to_list_it_is_not_cut_off,
                                  stop_counting_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
