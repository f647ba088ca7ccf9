/* Which attempts to connect the kernel drops. The kernel's own time is real: a dropped attempt is repeated after a
 * second. The gate's is the test's. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "port/gate.h"
#include "shapes.h"

#define SECOND UINT64_C(1000000000)
#define SOON_MS 50 /* loopback drops or answers at once */
#define LATER_MS 30000
#define EACH_NS (KVF_GATE_AT_ONCE_NS / KVF_GATE_RATE)
#define CUT_OFFS_TO_SHUT (KVF_GATE_AT_ONCE_NS / KVF_GATE_CUT_OFF_NS + 1)

typedef struct scene {
    kvf_gate gate;
    int listener;
    uint16_t port;
    int made[64];
    uint32_t count;
} scene;

static void open_gate(scene *s, bool six) {
    struct sockaddr_in6 own6 = {.sin6_family = AF_INET6};
    struct sockaddr_in own4 = {.sin_family = AF_INET};
    struct sockaddr *own = six ? (struct sockaddr *)&own6 : (struct sockaddr *)&own4;
    socklen_t bytes = six ? sizeof own6 : sizeof own4;
    const int none = 0;
    *s = (scene){.gate = {.listener_fd = -1, .rate = KVF_GATE_RATE}};
    s->listener = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (s->listener < 0 && six)
        skip(); /* this machine has no IPv6 */
    assert_true(s->listener >= 0);
    if (six)
        assert_return_code(setsockopt(s->listener, IPPROTO_IPV6, IPV6_V6ONLY, &none, sizeof none), 0);
    assert_return_code(bind(s->listener, own, bytes), 0);
    assert_return_code(listen(s->listener, COUNT_OF(s->made)), 0);
    assert_return_code(getsockname(s->listener, own, &bytes), 0);
    s->port = ntohs(six ? own6.sin6_port : own4.sin_port);
    kvf_gate_open(&s->gate, s->listener);
}

static void close_gate(scene *s) {
    for (uint32_t i = 0; i < s->count; i++)
        (void)close(s->made[i]);
    (void)close(s->listener);
}

/* Begins to connect from an address of this machine. */
static int start_from(scene *s, const char *address) {
    const bool six = strchr(address, ':') != NULL;
    struct sockaddr_in6 to6 = {.sin6_family = AF_INET6, .sin6_port = htons(s->port)}, from6 = to6;
    struct sockaddr_in to4 = {.sin_family = AF_INET, .sin_port = htons(s->port)}, from4 = to4;
    from6.sin6_port = from4.sin_port = 0;
    to6.sin6_addr = in6addr_loopback;
    to4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_true(fd >= 0 && s->count < COUNT_OF(s->made));
    s->made[s->count++] = fd;
    assert_int_equal(inet_pton(six ? AF_INET6 : AF_INET, address,
                               six ? (void *)&from6.sin6_addr : (void *)&from4.sin_addr),
                     1);
    assert_return_code(bind(fd, six ? (struct sockaddr *)&from6 : (struct sockaddr *)&from4,
                            six ? sizeof from6 : sizeof from4),
                       0);
    if (connect(fd, six ? (struct sockaddr *)&to6 : (struct sockaddr *)&to4, six ? sizeof to6 : sizeof to4))
        assert_int_equal(errno, EINPROGRESS);
    return fd;
}

static bool gets_in(int fd, int ms) {
    struct pollfd waits = {.fd = fd, .events = POLLOUT};
    int error = 0;
    socklen_t bytes = sizeof error;
    if (poll(&waits, 1, ms) == 0)
        return false;
    assert_return_code(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes), 0);
    assert_int_equal(error, 0);
    return true;
}

static bool gets_in_from(scene *s, const char *address) {
    return gets_in(start_from(s, address), SOON_MS);
}

static void charge(scene *s, const char *address, uint64_t times, uint64_t now) {
    for (uint64_t i = 0; i < times; i++)
        kvf_gate_charge(&s->gate, address, now);
}

/* ---- all ------------------------------------------------------------------------------------- */

static void connections_that_come_too_fast_shut_it_until_there_is_room_for_a_batch(void **state) {
    (void)state;
    scene s;
    open_gate(&s, false);
    for (uint64_t i = 0; i < KVF_GATE_RATE; i++)
        kvf_gate_count(&s.gate, SECOND);
    assert_true(gets_in_from(&s, "127.0.0.1"));
    assert_true(kvf_gate_due(&s.gate) == UINT64_MAX);
    kvf_gate_count(&s.gate, SECOND);
    const int waits = start_from(&s, "127.0.0.1");
    assert_false(gets_in(waits, SOON_MS));
    const uint64_t due = kvf_gate_due(&s.gate);
    assert_true(due > SECOND && due <= SECOND + KVF_GATE_AT_ONCE_NS / 8);
    kvf_gate_tick(&s.gate, due - 1);
    assert_false(gets_in_from(&s, "127.0.0.1"));
    kvf_gate_tick(&s.gate, due);
    assert_true(gets_in_from(&s, "127.0.0.1"));
    assert_true(gets_in(waits, LATER_MS));
    close_gate(&s);
}

static void connections_that_come_one_after_the_other_never_shut_it(void **state) {
    (void)state;
    scene s;
    open_gate(&s, false);
    for (uint64_t i = 0; i < 5000; i++)
        kvf_gate_count(&s.gate, SECOND + i * EACH_NS);
    assert_true(kvf_gate_due(&s.gate) == UINT64_MAX);
    assert_true(gets_in_from(&s, "127.0.0.1"));
    close_gate(&s);
}

static void as_many_may_come_at_once_as_in_a_second(void **state) {
    (void)state;
    static const uint32_t rates[] = {KVF_GATE_DEAR_RATE, 1, 40000};
    for (uint32_t r = 0; r < COUNT_OF(rates); r++) {
        scene s;
        open_gate(&s, false);
        s.gate.rate = rates[r];
        for (uint64_t i = 0; i < rates[r]; i++)
            kvf_gate_count(&s.gate, SECOND);
        assert_true(gets_in_from(&s, "127.0.0.1"));
        kvf_gate_count(&s.gate, SECOND);
        assert_false(gets_in_from(&s, "127.0.0.1"));
        close_gate(&s);
    }
}

/* ---- addresses ------------------------------------------------------------------------------- */

static void an_address_whose_connections_are_cut_off_is_shut_out_and_no_other(void **state) {
    (void)state;
    for (int six = 0; six < 2;
         six++) { /* by IPv4 to a socket of IPv6, too: its address is then written as below */
        scene s;
        open_gate(&s, six);
        const char *name = six ? "::ffff:127.0.0.2" : "127.0.0.2";
        charge(&s, name, CUT_OFFS_TO_SHUT - 1, SECOND);
        assert_true(gets_in_from(&s, "127.0.0.2"));
        charge(&s, name, 1, SECOND);
        const int waits = start_from(&s, "127.0.0.2");
        assert_false(gets_in(waits, SOON_MS));
        assert_true(gets_in_from(&s, "127.0.0.1"));
        assert_true(gets_in_from(&s, "127.0.0.3"));
        kvf_gate_tick(&s.gate, kvf_gate_due(&s.gate));
        assert_true(kvf_gate_due(&s.gate) == UINT64_MAX);
        assert_true(gets_in_from(&s, "127.0.0.2"));
        assert_true(gets_in(waits, LATER_MS));
        close_gate(&s);
    }
}

/* Both are tried with addresses of the other kind shut out, too. */
static void of_ipv6_the_network_is_shut_out(void **state) {
    (void)state;
    scene s;
    open_gate(&s, true);
    charge(&s, "2001:db8::1", CUT_OFFS_TO_SHUT, SECOND);
    charge(&s, "0:0:0:1::1", CUT_OFFS_TO_SHUT, SECOND);
    charge(&s, "127.0.0.2", CUT_OFFS_TO_SHUT, SECOND);
    assert_true(gets_in_from(&s, "::1"));
    assert_true(gets_in_from(&s, "127.0.0.1"));
    assert_false(gets_in_from(&s, "127.0.0.2"));
    charge(&s, "::2", CUT_OFFS_TO_SHUT / 2, SECOND);
    charge(&s, "::3", CUT_OFFS_TO_SHUT - CUT_OFFS_TO_SHUT / 2, SECOND);
    assert_false(gets_in_from(&s, "::1"));
    assert_true(gets_in_from(&s, "127.0.0.1"));
    close_gate(&s);
}

static void connections_that_are_there_go_on_while_their_address_is_shut_out(void **state) {
    (void)state;
    scene s;
    char byte = 0;
    open_gate(&s, false);
    const int there = start_from(&s, "127.0.0.2");
    assert_true(gets_in(there, SOON_MS));
    const int here = accept4(s.listener, NULL, NULL, SOCK_CLOEXEC);
    assert_true(here >= 0);
    charge(&s, "127.0.0.2", CUT_OFFS_TO_SHUT, SECOND);
    assert_false(gets_in_from(&s, "127.0.0.2"));
    assert_int_equal(send(there, "x", 1, MSG_NOSIGNAL), 1);
    assert_int_equal(recv(here, &byte, 1, 0), 1);
    assert_int_equal(byte, 'x');
    (void)close(here);
    close_gate(&s);
}

static void an_address_is_shut_out_for_a_minute_at_most(void **state) {
    (void)state;
    scene s;
    open_gate(&s, false);
    charge(&s, "127.0.0.2", 100000, SECOND);
    assert_true(kvf_gate_due(&s.gate) <= SECOND + KVF_GATE_LONGEST_NS);
    kvf_gate_tick(&s.gate, SECOND + KVF_GATE_LONGEST_NS);
    assert_true(gets_in_from(&s, "127.0.0.2"));
    close_gate(&s);
}

static void more_addresses_than_have_an_account_are_charged_to_all(void **state) {
    (void)state;
    scene s;
    char name[32];
    open_gate(&s, false);
    for (uint32_t i = 0; i < KVF_GATE_ADDRESSES; i++) {
        (void)snprintf(name, sizeof name, "127.0.1.%u", i);
        charge(&s, name, CUT_OFFS_TO_SHUT, SECOND);
    }
    assert_true(gets_in_from(&s, "127.0.0.1"));
    assert_false(gets_in_from(&s, "127.0.1.0"));
    assert_false(gets_in_from(&s, name));
    charge(&s, "127.0.2.1", CUT_OFFS_TO_SHUT, SECOND);
    assert_false(gets_in_from(&s, "127.0.0.1"));
    /* An account that is paid for is free again. */
    kvf_gate_tick(&s.gate, 10 * SECOND);
    assert_true(gets_in_from(&s, "127.0.1.0"));
    charge(&s, "127.0.2.1", CUT_OFFS_TO_SHUT, 10 * SECOND);
    assert_true(gets_in_from(&s, "127.0.0.1"));
    assert_false(gets_in_from(&s, "127.0.2.1"));
    close_gate(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(connections_that_come_too_fast_shut_it_until_there_is_room_for_a_batch),
        cmocka_unit_test(connections_that_come_one_after_the_other_never_shut_it),
        cmocka_unit_test(as_many_may_come_at_once_as_in_a_second),
        cmocka_unit_test(an_address_whose_connections_are_cut_off_is_shut_out_and_no_other),
        cmocka_unit_test(of_ipv6_the_network_is_shut_out),
        cmocka_unit_test(connections_that_are_there_go_on_while_their_address_is_shut_out),
        cmocka_unit_test(an_address_is_shut_out_for_a_minute_at_most),
        cmocka_unit_test(more_addresses_than_have_an_account_are_charged_to_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
