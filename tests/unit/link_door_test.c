/* Connections to a link by ZeroMQ: how many there may be, and what happens to connections over which nothing is
 * sent. */
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "link_ends.h"

#include "endless.h"
#include "http_askers.h"
#include "port/gate.h"

#define MOST 6u
#define SECOND UINT64_C(1000000000)
#define CROWD 20u

static uint64_t passed_ns; /* added to the machine's time */

static uint64_t clock_now(void *context) {
    (void)context;
    return kvf_now(&kvf_monotonic) + passed_ns;
}

static const kvf_clock clock_ahead = {clock_now, NULL};

/* A clock that stands still until the test lets time pass, so a link that hears nothing for long does not dial a second
 * time. */
static uint64_t stopped_now(void *context) {
    (void)context;
    return SECOND + passed_ns;
}

static const kvf_clock clock_stopped = {stopped_now, NULL};

static uint64_t known_route, met_route;
static uint32_t told;

static bool is_known(void *context, kvf_route route) {
    (void)context;
    return route == known_route || route == met_route;
}

static void on_crowded(void *context, const char *detail) {
    (void)context;
    assert_non_null(strstr(detail, "over budget"));
    told++;
}

static void open_door(end *server, const char *listen) {
    passed_ns = known_route = met_route = told = 0;
    open_end(server, (kvf_link_options){.listen = listen,
                                        .clock = &clock_ahead,
                                        .max_connections = MOST,
                                        .max_connections_per_address = MOST,
                                        .is_known = is_known,
                                        .on_crowded = on_crowded});
}

/* Connects from an address of this machine. `flags`: SOCK_NONBLOCK: the connection is perhaps not there yet. */
static int knock_from(const end *server, const char *address, int flags) {
    const char *endpoint = kvf_link_endpoint(server->link);
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)strtoul(strrchr(endpoint, ':') + 1, NULL, 10))},
                       from = {.sin_family = AF_INET};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
    assert_int_equal(inet_pton(AF_INET, "127.0.0.1", &to.sin_addr), 1);
    assert_int_equal(inet_pton(AF_INET, address, &from.sin_addr), 1);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&from, sizeof from), 0);
    if (connect(fd, (const struct sockaddr *)&to, sizeof to))
        assert_true(flags && errno == EINPROGRESS);
    return fd;
}

/* A connection over which nothing is sent. */
static int knock(const end *server) {
    return knock_from(server, "127.0.0.1", 0);
}

static uint32_t count_over(const int *fds, uint32_t count) {
    uint32_t over = 0;
    for (uint32_t i = 0; i < count; i++)
        over += is_over(fds[i]);
    return over;
}

static void silent_connections_make_room(void **state) {
    (void)state;
    end server, client;
    int fds[CROWD];
    open_door(&server, NULL);
    for (uint32_t i = 0; i < CROWD; i++)
        fds[i] = knock(&server);
    work_until(count_over(fds, CROWD) == CROWD - MOST, &server);
    assert_true(told >= CROWD - MOST);
    assert_int_equal(kvf_link_count(server.link).now, MOST);
    assert_int_equal(kvf_link_count(server.link).refused, CROWD - MOST);
    /* A client that sends something gets in, and stays when others come once the server knows it. */
    open_end(&client, (kvf_link_options){.listen = "", .clock = &clock_stopped});
    kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
    send_text(&client, route, "here I am");
    work_until(has_message(&server, "here I am"), &server, &client);
    known_route = server.messages[0].route;
    for (uint32_t i = 0; i < CROWD; i++) {
        (void)close(fds[i]);
        fds[i] = knock(&server);
    }
    work_until(count_over(fds, CROWD) == CROWD - MOST + 1, &server, &client);
    send_text(&client, route, "still here");
    work_until(has_message(&server, "still here"), &server, &client);
    assert_int_equal(server.messages[1].route, known_route);
    assert_int_equal(client.broken_count, 0);
    for (uint32_t i = 0; i < CROWD; i++)
        (void)close(fds[i]);
    work_until(kvf_link_count(server.link).now == 1, &server, &client);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void a_silent_client_is_hung_up_on(void **state) {
    (void)state;
    char endpoints[3][64] = {"tcp://127.0.0.1:*"};
    (void)snprintf(endpoints[1], sizeof endpoints[1], "ipc:///tmp/kvferry_door_%d", (int)getpid());
    (void)snprintf(endpoints[2], sizeof endpoints[2], "ipc://@kvferry_door_%d", (int)getpid());
    for (size_t i = 0; i < COUNT_OF(endpoints); i++) {
        end server, client, silent;
        open_door(&server, endpoints[i]);
        open_end(&client, (kvf_link_options){.listen = ""});
        open_end(&silent, (kvf_link_options){.listen = ""});
        (void)connect_end(&silent, kvf_link_endpoint(server.link));
        send_text(&client, connect_end(&client, kvf_link_endpoint(server.link)), "hello");
        work_until(has_message(&server, "hello") && kvf_link_count(server.link).now == 2, &server, &client,
                   &silent);
        known_route = server.messages[0].route;
        assert_true(kvf_link_due(server.link) != UINT64_MAX);
        passed_ns = 16 * UINT64_C(1000000000);
        work_until(silent.broken_count > 0, &server, &client, &silent);
        assert_int_equal(client.broken_count, 0);
        assert_int_equal(kvf_link_count(server.link).closed, 1);
        assert_int_equal(kvf_link_count(server.link).refused, 0);
        assert_int_equal(told, 0);
        kvf_link_close(silent.link);
        kvf_link_close(client.link);
        kvf_link_close(server.link);
    }
}

/* ZeroMQ closes a connection before it tells the link that there was one, and then other code has got its descriptor
 * number. */
static void a_descriptor_that_is_somebody_elses_is_left_alone(void **state) {
    (void)state;
    end server;
    int fds[CROWD], pairs[CROWD][2];
    char byte = 1;
    open_door(&server, NULL);
    for (uint32_t i = 0; i < CROWD; i++)
        fds[i] = knock(&server);
    (void)usleep(50000);
    for (uint32_t i = 0; i < CROWD; i++)
        (void)close(fds[i]);
    (void)usleep(
        50000); /* the descriptors of both ends are free now; the link must not hang up on their next owner */
    for (uint32_t i = 0; i < CROWD; i++)
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pairs[i]), 0);
    work_until(!kvf_link_pending(server.link), &server);
    for (uint32_t i = 0; i < CROWD; i++) {
        assert_int_equal(send(pairs[i][0], &byte, 1, MSG_NOSIGNAL), 1);
        assert_int_equal(recv(pairs[i][1], &byte, 1, MSG_DONTWAIT), 1);
        (void)close(pairs[i][0]);
        (void)close(pairs[i][1]);
    }
    work_until(kvf_link_count(server.link).now == 0, &server); /* where ZeroMQ was slow, it tells late */
    kvf_link_close(server.link);
}

/* ---- a message without an end ---------------------------------------------------------------- */

/* A stranger that was closed because the test was slow comes back. */
static int stay_a_stranger(const end *server, int fd, uint64_t *sent) {
    if (fd >= 0 && !is_over(fd))
        return fd;
    if (fd >= 0)
        (void)close(fd);
    fd = knock(server);
    shake_hands(fd);
    *sent = 0;
    return fd;
}

static void a_message_without_an_end_is_cut_off(void **state) {
    (void)state;
    end server, client;
    open_door(&server, NULL);
    open_end(&client, (kvf_link_options){.listen = "", .clock = &clock_stopped});
    const kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
    send_text(&client, route, "here I am");
    work_until(has_message(&server, "here I am"), &server, &client);
    known_route = server.messages[0].route;
    uint64_t sent = 0;
    int stranger = -1;
    work_until((stranger = stay_a_stranger(&server, stranger, &sent), say_more(stranger, &sent),
                kvf_link_count(server.link).refused == 1),
               &server, &client);
    assert_true(told > 0);
    /* One that is met, and has said something before. */
    const int known = knock(&server);
    shake_hands(known);
    assert_int_equal(send(known, "\0\5hello", 7, MSG_NOSIGNAL), 7);
    work_until(has_message(&server, "hello"), &server, &client);
    met_route = server.messages[1].route;
    sent = 0;
    work_until((say_more(known, &sent), is_over(known)), &server, &client);
    assert_int_equal(kvf_link_count(server.link).refused, 2);
    send_text(&client, route, "still here");
    work_until(has_message(&server, "still here"), &server, &client);
    assert_int_equal(client.broken_count, 0);
    (void)close(stranger);
    (void)close(known);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static bool gets_in(int fd) {
    struct pollfd waits = {.fd = fd, .events = POLLOUT};
    return poll(&waits, 1, 50) == 1 && !(waits.revents & (POLLERR | POLLHUP));
}

/* A stranger whose whole part of a message without an end has come before the link makes progress. */
static int bring_too_much(const end *server, const char *address) {
    uint64_t sent = 0;
    int unreceived = 0;
    const int fd = knock_from(server, address, 0);
    shake_hands(fd);
    while (sent < 2 * FRAMES_BYTES)
        say_more(fd, &sent);
    while (assert_int_equal(ioctl(fd, SIOCOUTQ, &unreceived), 0), unreceived > 0)
        (void)poll(NULL, 0, 1);
    (void)poll(NULL, 0, 10); /* ZeroMQ reads it */
    return fd;
}

static void open_stopped_door(end *server) {
    passed_ns = known_route = met_route = told = 0;
    open_end(server,
             (kvf_link_options){.clock = &clock_stopped, .is_known = is_known, .on_crowded = on_crowded});
}

/* Nothing more comes, so that nothing says that this connection must be weighed. */
static void what_came_before_a_connection_was_known_counts_too(void **state) {
    (void)state;
    end server;
    open_stopped_door(&server);
    const int strange = bring_too_much(&server, "127.0.0.1");
    work_until((passed_ns += SECOND / 100, kvf_link_count(server.link).refused == 1), &server);
    (void)close(strange);
    kvf_link_close(server.link);
}

/* Whoever else has the address is kept out, too, and nobody with another one. */
static void an_address_that_sends_messages_without_an_end_is_kept_out_for_a_while(void **state) {
    (void)state;
    enum { COUNT = KVF_GATE_AT_ONCE_NS / KVF_GATE_CUT_OFF_NS + 1 };
    end server;
    int strange[COUNT];
    open_stopped_door(&server);
    for (uint32_t i = 0; i < COUNT; i++)
        strange[i] = bring_too_much(&server, "127.0.0.2");
    work_until((passed_ns += SECOND / 100, kvf_link_count(server.link).refused == COUNT), &server);
    const int again = knock_from(&server, "127.0.0.2", SOCK_NONBLOCK);
    assert_false(gets_in(again));
    const int other = knock_from(&server, "127.0.0.3", SOCK_NONBLOCK);
    assert_true(gets_in(other));
    passed_ns += 2 * SECOND;
    work_until(gets_in(again), &server);
    for (uint32_t i = 0; i < COUNT; i++)
        (void)close(strange[i]);
    (void)close(again);
    (void)close(other);
    kvf_link_close(server.link);
}

/* Whole messages are none, however many, and however large. */
static void many_large_messages_are_not_without_an_end(void **state) {
    (void)state;
    enum { COUNT = 40 };
    static char data[KVF_WIRE_MAX_BYTES];
    end server, client;
    open_door(&server, NULL);
    open_end(&client, (kvf_link_options){.listen = "", .clock = &clock_stopped});
    const kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
    send_text(&client, route, "hello");
    work_until(has_message(&server, "hello"), &server, &client);
    known_route = server.messages[0].route;
    for (uint32_t i = 1; i <= COUNT; i++) {
        assert_ok(kvf_link_send(client.link, route, data, sizeof data));
        passed_ns += SECOND / 50; /* it is weighed */
        work_until(server.message_count > i, &server, &client);
        assert_ok(kvf_link_send(server.link, known_route, data, sizeof data));
        work_until(client.message_count >= i, &server, &client);
    }
    assert_int_equal(kvf_link_count(server.link).refused, 0);
    assert_int_equal(kvf_link_count(client.link).refused, 0);
    assert_int_equal(client.broken_count, 0);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

/* Lets the client in, which is told `text`. */
static int let_in(end *client, int port, const char *text) {
    int owner = -1;
    char frame[64] = {0, (char)strlen(text)};
    (void)snprintf(frame + 2, sizeof frame - 2, "%s", text);
    work_until((owner = accept4(port, NULL, NULL, SOCK_CLOEXEC)) >= 0, client);
    shake_hands(owner);
    assert_int_equal(send(owner, frame, 2 + strlen(text), MSG_NOSIGNAL), 2 + strlen(text));
    work_until(has_message(client, text), client);
    return owner;
}

static void an_owner_that_sends_a_message_without_an_end_is_cut_off(void **state) {
    (void)state;
    end client;
    char endpoint[64];
    uint64_t sent = 0;
    uint16_t number;
    const int port = open_port(&number);
    (void)snprintf(endpoint, sizeof endpoint, "tcp://127.0.0.1:%u", number);
    passed_ns = known_route = met_route = told = 0;
    open_end(&client, (kvf_link_options){.listen = "", .clock = &clock_ahead, .on_crowded = on_crowded});
    (void)connect_end(&client, endpoint);
    const int owner = let_in(&client, port, "hello");
    work_until((say_more(owner, &sent), is_over(owner)), &client);
    assert_int_equal(kvf_link_count(client.link).refused, 1);
    assert_int_equal(told, 1);
    work_until(client.broken_count > 0, &client);
    assert_int_equal(client.broken_status, KVF_E_PEER_LOST);
    assert_non_null(strstr(client.broken_detail, "sent a message without an end"));
    const int again = let_in(&client, port, "it was a mistake"); /* the client has called again */
    assert_int_equal(kvf_link_count(client.link).refused, 1);
    (void)close(again);
    (void)close(owner);
    (void)close(port);
    kvf_link_close(client.link);
}

/* ---- other protocols ------------------------------------------------------------------------- */

static void who_speaks_another_protocol_or_an_old_version_is_hung_up_on_at_once(void **state) {
    (void)state;
    /* ZMTP 1.0, and 2.0: a routing id and, of 2.0, the socket's type before it. */
    static const char first[] = "\7\0router", second[] = "\xff\0\0\0\0\0\0\0\1\x7f\1\5\0\0";
    const struct {
        const char *bytes;
        size_t count;
    } said[] = {
        {http_request, sizeof http_request - 1}, {first, sizeof first - 1}, {second, sizeof second - 1}};
    end server, client;
    open_stopped_door(&server);
    for (size_t i = 0; i < COUNT_OF(said); i++) {
        const int fd = knock(&server);
        assert_int_equal(send(fd, said[i].bytes, said[i].count, MSG_NOSIGNAL), said[i].count);
        const uint64_t begun = kvf_now(&kvf_monotonic);
        work_until(is_over(fd), &server);
        assert_true(kvf_now(&kvf_monotonic) - begun < 5 * SECOND); /* ZeroMQ's own patience is longer */
        (void)close(fd);
    }
    open_end(&client, (kvf_link_options){.listen = "", .clock = &clock_stopped});
    send_text(&client, connect_end(&client, kvf_link_endpoint(server.link)), "hello");
    work_until(has_message(&server, "hello"), &server, &client);
    assert_int_equal(server.message_count, 1);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void a_link_may_close_while_others_speak_another_protocol_to_it(void **state) {
    (void)state;
    http_askers askers;
    http_askers_start(&askers);
    for (int i = 0; i < 200; i++) {
        end server;
        open_stopped_door(&server);
        askers.port = (int)strtoul(strrchr(kvf_link_endpoint(server.link), ':') + 1, NULL, 10);
        const uint64_t until = kvf_now(&kvf_monotonic) + SECOND / 1000;
        while (kvf_now(&kvf_monotonic) < until)
            progress_all((end *[]){&server}, 1);
        kvf_link_close(server.link);
    }
    http_askers_stop(&askers);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(silent_connections_make_room),
        cmocka_unit_test(a_silent_client_is_hung_up_on),
        cmocka_unit_test(a_descriptor_that_is_somebody_elses_is_left_alone),
        cmocka_unit_test(a_message_without_an_end_is_cut_off),
        cmocka_unit_test(what_came_before_a_connection_was_known_counts_too),
        cmocka_unit_test(an_address_that_sends_messages_without_an_end_is_kept_out_for_a_while),
        cmocka_unit_test(many_large_messages_are_not_without_an_end),
        cmocka_unit_test(an_owner_that_sends_a_message_without_an_end_is_cut_off),
        cmocka_unit_test(who_speaks_another_protocol_or_an_old_version_is_hung_up_on_at_once),
        cmocka_unit_test(a_link_may_close_while_others_speak_another_protocol_to_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
