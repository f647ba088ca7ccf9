/*
 * What only the "messages" fabric can meet: cards that lead elsewhere, and peers at the other end of a socket that
 * violate the protocol or never knew the secret. Lists of runs: transport_lists_test.c.
 */
#include "transport/messages/messages.h"

#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "endless.h"
#include "http_askers.h"
#include "sanitized.h"
#include "transport/front.h"
#include "transport_pair.h"

#define LOOPBACK "tcp://127.0.0.1:*"
static const pair_kind plain = {"messages", {false, false}, "messages", {"messages.listen", LOOPBACK}};
static const pair_kind keyed = {
    "messages", {false, false}, "messages", {"messages.secret_key", TEST_SECRET_KEY}};

/* ---- cards and settings ---------------------------------------------------------------------- */

/* This fabric's part of an endpoint's card. */
static kvf_messages_card part_of(const test_side *side) {
    const void *data;
    size_t bytes;
    kvf_card card;
    kvf_messages_card part = {0};
    assert_int_equal(kvf_transport_export(side->transport, &data, &bytes), KVF_OK);
    assert_int_equal(kvf_card_read(data, bytes, &card), KVF_OK);
    assert_string_equal(card.parts[0].kind, "messages");
    assert_int_equal(kvf_messages_card_read(card.parts[0].data, card.parts[0].bytes, &part), KVF_OK);
    kvf_card_free(&card);
    return part;
}

/* Connects by a card that names the regions of `like`, and this part. */
static kvf_status connect_by(const test_side *from, const test_side *like, const kvf_messages_card *part,
                             kvf_peer **out) {
    uint64_t sizes[SIDE_REGIONS];
    kvf_buffer bytes = {0}, own = {0};
    for (int i = 0; i < SIDE_REGIONS; i++)
        sizes[i] = like->regions[i].bytes;
    assert_int_equal(kvf_messages_card_write(part, &own), KVF_OK);
    kvf_card_part parts[] = {{"messages", own.data, own.length}};
    kvf_card card = {.name = "somebody",
                     .generation = 1,
                     .region_bytes = sizes,
                     .region_count = SIDE_REGIONS,
                     .parts = parts,
                     .part_count = 1};
    assert_int_equal(kvf_card_write(&card, &bytes), KVF_OK);
    kvf_status status = kvf_transport_connect(from->transport, bytes.data, bytes.length, out);
    kvf_buffer_free(&bytes);
    kvf_buffer_free(&own);
    return status;
}

static void a_card_is_read_as_it_was_written_and_refused_when_cut_off(void **state) {
    (void)state;
    kvf_messages_card card = {
        .secret = "fifteen letters", .id = "another fifteen", .port = 4711, .encrypted = true};
    kvf_messages_card read;
    kvf_buffer bytes = {0};
    kvf_messages_add_host(&card, "10.0.0.7");
    kvf_messages_add_host(&card, "fd00::7");
    kvf_messages_add_host(&card, "node-7.example");
    kvf_messages_add_host(&card, "10.0.0.7");
    kvf_messages_add_host(&card, "0.0.0.0");
    kvf_messages_add_host(&card, "::");
    kvf_messages_add_host(&card, "no host");
    assert_int_equal(card.host_count, 3);
    assert_int_equal(kvf_messages_card_write(&card, &bytes), KVF_OK);
    assert_int_equal(kvf_messages_card_read(bytes.data, bytes.length, &read), KVF_OK);
    assert_memory_equal(&read, &card, sizeof card);
    for (size_t length = 0; length < bytes.length; length++)
        assert_int_equal(kvf_messages_card_read(bytes.data, length, &read), KVF_E_PARSE);
    bytes.data[0]++;
    assert_int_equal(kvf_messages_card_read(bytes.data, bytes.length, &read), KVF_E_UNSUPPORTED);
    kvf_buffer_free(&bytes);
}

static void settings_that_mean_nothing_are_refused(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"messages.listen", "ipc:///tmp/x"},
        {"messages.listen", "tcp://"},
        {"messages.listen", "tcp://127.0.0.1"},
        {"messages.listen", "tcp://203.0.113.1:*"},
        {"messages.listen", "tcp://127.0.0.1:65536"},
        {"messages.listen", "tcp://127.0.0.1:80x"},
        {"messages.listen", "tcp://127.0.0.1:-1"},
        {"messages.listen", "tcp://127.0.0.1:"},
        {"messages.secret_key", "short"},
        {"messages.secret_key", ""},
        {"messages.advertise", "two words"},
        {"messages.advertise", "0.0.0.0"},
        {"messages.max_connections", "many"},
        {"messages.max_connections_per_address", "0"},
        {"messages.max_strangers", "-1"},
        {"messages.max_strangers", "4294967296"},
        {"messages.patience_ms", "0"},
        {"messages.max_connections_per_second", "0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const kvf_setting setting = {cases[i][0], cases[i][1]};
        const kvf_transport_options options = {
            .struct_size = sizeof options, .settings = &setting, .setting_count = 1};
        kvf_transport *transport = NULL;
        assert_int_equal(kvf_transport_open("messages", &options, &transport), KVF_E_INVALID);
        assert_non_null(strstr(kvf_error_detail(), "messages"));
    }
}

static void loopback_and_keys_of_others_are_refused_before_anything_is_sent(void **state) {
    (void)state;
    test_side here, there;
    kvf_peer *peer;
    side_open(&here, &plain, 1);
    side_open(&there, &plain, 2);
    kvf_messages_card far = part_of(&there), secured = far;
    far.place[0] ^= 1;
    assert_int_equal(connect_by(&here, &there, &far, &peer), KVF_E_UNSUPPORTED);
    assert_non_null(strstr(kvf_error_detail(), "loopback of another machine"));
    secured.encrypted = true;
    assert_int_equal(connect_by(&here, &there, &secured, &peer), KVF_E_PERMISSION);
    side_close(&here);
    side_close(&there);
}

static void an_owner_with_another_key_than_its_card_says_is_not_talked_to(void **state) {
    (void)state;
    test_side here, there;
    kvf_peer *peer;
    side_open(&here, &keyed, 1);
    side_open(&there, &keyed, 2);
    kvf_messages_card part = part_of(&there);
    assert_true(part.encrypted);
    part.key[5] ^= 1;
    kvf_status status = connect_by(&here, &there, &part, &peer);
    if (!status) {
        drive(&here, &there, &here.lost, 1);
        assert_non_null(strstr(here.lost_detail, "another key"));
    } else {
        assert_int_equal(status, KVF_E_PEER_LOST);
        assert_non_null(strstr(kvf_error_detail(), "another key"));
    }
    side_close(&here);
    side_close(&there);
}

/* A name with an empty label is none: nobody need be asked to know that. Connecting may notice it, or what comes next. */
static void a_host_name_that_is_not_known_is_told(void **state) {
    (void)state;
    test_side here, there;
    kvf_peer *peer;
    kvf_run run = {.bytes = 10};
    test_outcome outcome = {0};
    side_open(&here, &plain, 1);
    side_open(&there, &plain, 2);
    kvf_messages_card part = part_of(&there);
    part.host_count = 1;
    (void)snprintf(part.hosts[0], sizeof part.hosts[0], "no..such.host");
    kvf_status status = connect_by(&here, &there, &part, &peer);
    const char *detail = kvf_error_detail();
    if (!status)
        status = kvf_transport_submit(peer, KVF_READ, &run, 1, note_outcome, &outcome, NULL);
    if (!status) {
        drive(&here, &there, &here.lost, 1);
        status = outcome.status;
        detail = outcome.detail;
    }
    assert_int_equal(status, KVF_E_PEER_LOST);
    assert_non_null(strstr(detail, "messages: "));
    assert_non_null(strstr(detail, "no..such.host"));
    assert_non_null(strstr(detail, "the host name could not be looked up"));
    side_close(&here);
    side_close(&there);
}

static void another_endpoint_at_the_address_of_the_card_is_found_out(void **state) {
    (void)state;
    test_side here, there;
    kvf_peer *peer;
    side_open(&here, &plain, 1);
    side_open(&there, &plain, 2);
    kvf_messages_card part = part_of(&there);
    part.secret[3] ^= 1; /* as if the card's endpoint had gone and another had got its port */
    assert_int_equal(connect_by(&here, &there, &part, &peer), KVF_OK);
    kvf_run run = {0, 0, 1000, 0, 0};
    test_outcome outcome = {0};
    assert_int_equal(kvf_transport_submit(peer, KVF_READ, &run, 1, note_outcome, &outcome, NULL), KVF_OK);
    drive(&here, &there, &here.lost, 1);
    assert_int_equal(outcome.status, KVF_E_PEER_LOST);
    assert_non_null(strstr(here.lost_detail, "another endpoint than that of the card listens"));
    assert_int_equal(side_memory(&here, 0)[10], side_byte(1, 0, 10));
    side_close(&here);
    side_close(&there);
}

static void an_owner_that_sends_a_message_without_an_end_is_cut_off(void **state) {
    (void)state;
    test_side here, there;
    kvf_peer *peer;
    uint16_t number;
    uint64_t sent = 0;
    side_open(&here, &plain, 1);
    side_open(&there, &plain, 2);
    const int port = open_port(&number);
    kvf_messages_card part = part_of(&there);
    part.port = number;
    assert_int_equal(connect_by(&here, &there, &part, &peer), KVF_OK);
    int owner;
    while ((owner = accept4(port, NULL, NULL, SOCK_CLOEXEC)) < 0)
        (void)poll(NULL, 0, 1);
    shake_hands(owner);
    assert_int_equal(send(owner, (char[]){0, 1, MESSAGES_ALIVE}, 3, MSG_NOSIGNAL), 3);
    while (here.lost == 0) {
        say_more(owner, &sent);
        assert_int_equal(kvf_transport_progress(here.transport, NULL), KVF_OK);
        (void)poll(NULL, 0, 1);
    }
    assert_non_null(strstr(here.lost_detail, "the peer sent a message without an end"));
    assert_true(kvf_peer_lives(peer));
    assert_true(is_over(owner));
    kvf_transport_info info = {.struct_size = sizeof info};
    assert_int_equal(kvf_transport_get_info(here.transport, &info), KVF_OK);
    assert_int_equal(info.refused, 1);
    (void)close(owner);
    (void)close(port);
    side_close(&here);
    side_close(&there);
}

/* ---- owners that do not let us in yet -------------------------------------------------------- */

/* A port whose queue of connections is full, so that the kernel drops further attempts. */
typedef struct full_port {
    int listener, count;
    int fds[16];
    uint16_t port;
} full_port;

static int accept_from(int listener) {
    struct pollfd waits = {listener, POLLIN, 0};
    assert_int_equal(poll(&waits, 1, 60000), 1);
    const int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    assert_true(fd >= 0);
    return fd;
}

static full_port fill_port(void) {
    full_port made = {.listener = -1};
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    made.listener = open_port(&made.port);
    to.sin_port = htons(made.port);
    assert_int_equal(listen(made.listener, 0), 0);
    for (bool full = false; !full; made.count++) {
        assert_true(made.count < (int)(sizeof made.fds / sizeof *made.fds));
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        assert_true(fd >= 0);
        (void)connect(fd, (struct sockaddr *)&to, sizeof to);
        struct pollfd made_it = {fd, POLLOUT, 0};
        full = poll(&made_it, 1, 50) == 0;
        made.fds[made.count] = fd;
    }
    return made;
}

/* Closes the connections that fill it. */
static void empty_port(full_port *port) {
    for (int i = 0; i < port->count; i++)
        (void)close(port->fds[i]);
    for (int i = 0; i + 1 < port->count; i++) /* the last one was not let in */
        (void)close(accept_from(port->listener));
    port->count = 0;
}

static void work_once(const test_side *side) {
    assert_int_equal(side->lost, 0);
    assert_int_equal(kvf_transport_progress(side->transport, NULL), KVF_OK);
    (void)poll(NULL, 0, 1);
}

/* Works until attempts to connect have failed so often; returns why the last one did. */
static const char *await_waiting(const test_side *side, const kvf_peer *peer, uint64_t times) {
    while (kvf_transport_waits(side->transport) < times)
        work_once(side);
    assert_int_equal(kvf_transport_waits(side->transport), times);
    return kvf_peer_waiting(peer);
}

/* Works until there is a connection, and lets it in. Returns the owner's end. */
static int await_let_in(const test_side *side, const kvf_peer *peer, int listener) {
    for (struct pollfd comes = {listener, POLLIN, 0}; poll(&comes, 1, 0) == 0;)
        work_once(side);
    const int owner = accept_from(listener);
    shake_hands(owner);
    assert_non_null(kvf_peer_waiting(peer));
    assert_int_equal(send(owner, (char[]){0, 1, MESSAGES_ALIVE}, 3, MSG_NOSIGNAL), 3);
    while (kvf_peer_waiting(peer))
        work_once(side);
    return owner;
}

static kvf_peer *connect_to_port(const test_side *here, uint16_t port) {
    kvf_peer *peer = NULL;
    kvf_messages_card part = part_of(here);
    part.port = port;
    part.host_count = 1;
    (void)snprintf(part.hosts[0], sizeof part.hosts[0], "127.0.0.1");
    assert_int_equal(connect_by(here, here, &part, &peer), KVF_OK);
    return peer;
}

static void a_host_that_does_not_answer_is_tried_until_it_does(void **state) {
    (void)state;
    test_side here;
    char expected[128];
    side_open(&here, &plain, 1);
    full_port port = fill_port();
    kvf_peer *peer = connect_to_port(&here, port.port);
    (void)snprintf(expected, sizeof expected, "tcp://127.0.0.1:%u: no connection: the host did not answer",
                   port.port);
    assert_string_equal(await_waiting(&here, peer, 1), expected);
    assert_string_equal(await_waiting(&here, peer, 2), expected);
    empty_port(&port);
    (void)close(await_let_in(&here, peer, port.listener));
    (void)close(port.listener);
    side_close(&here);
}

static void a_host_that_does_not_answer_is_given_up_when_patience_ends(void **state) {
    (void)state;
    static const pair_kind impatient = {
        "messages", {false, false}, "messages", {"messages.patience_ms", "1"}};
    test_side here;
    side_open(&here, &impatient, 1);
    full_port port = fill_port();
    const kvf_peer *peer = connect_to_port(&here, port.port);
    drive(&here, NULL, &here.lost, 1);
    assert_non_null(strstr(here.lost_detail, "the host did not answer"));
    assert_true(kvf_peer_lives(peer));
    assert_null(kvf_peer_waiting(peer));
    empty_port(&port);
    (void)close(port.listener);
    side_close(&here);
}

/* As an owner does that has no room for more strangers. */
static void a_connection_that_ends_before_we_are_let_in_is_made_again(void **state) {
    (void)state;
    test_side here;
    uint16_t number;
    side_open(&here, &plain, 1);
    const int port = open_port(&number);
    kvf_peer *peer = connect_to_port(&here, number);
    for (uint64_t times = 1; times <= 3; times++) {
        for (struct pollfd comes = {port, POLLIN, 0}; poll(&comes, 1, 0) == 0;)
            work_once(&here);
        const int owner = accept_from(port);
        shake_hands(owner);
        (void)close(owner);
        const char *why = await_waiting(&here, peer, times);
        assert_non_null(strstr(why, "the connection broke before the peer had let us in"));
    }
    (void)close(await_let_in(&here, peer, port)); /* after that it is lost */
    drive(&here, NULL, &here.lost, 1);
    assert_non_null(strstr(here.lost_detail, "the peer's process has ended"));
    (void)close(port);
    side_close(&here);
}

/* The kernel takes connections for a process that is stopped, and after 15 s there is no handshake. */
static void an_owner_that_does_not_shake_hands_lives(void **state) {
    (void)state;
    test_side here;
    uint16_t number;
    side_open(&here, &plain, 1);
    const int port = open_port(&number);
    const kvf_peer *peer = connect_to_port(&here, number);
    (void)close(accept_from(port));
    drive(&here, NULL, &here.lost, 1);
    assert_non_null(strstr(here.lost_detail, "no handshake"));
    assert_true(kvf_peer_lives(peer));
    (void)close(port);
    side_close(&here);
}

/* ---- consumers that do not keep to the protocol ---------------------------------------------- */

static kvf_messages_endpoint *inside_to_change(const test_side *side) {
    return side->transport->fabrics[0].endpoint;
}

static const kvf_messages_endpoint *inside(const test_side *side) {
    return inside_to_change(side);
}

/* A socket that sends any bytes to an endpoint. */
typedef struct raw_end {
    void *zmq, *socket;
} raw_end;

static raw_end raw_open_that_holds(const test_side *to, int messages, int bytes) {
    kvf_messages_card part = part_of(to);
    raw_end made = {.zmq = zmq_ctx_new()};
    char address[MESSAGES_ADDRESS_BYTES];
    int none = 0;
    made.socket = zmq_socket(made.zmq, ZMQ_DEALER);
    assert_non_null(made.socket);
    assert_int_equal(zmq_setsockopt(made.socket, ZMQ_LINGER, &none, sizeof none), 0);
    assert_int_equal(zmq_setsockopt(made.socket, ZMQ_RCVHWM, &messages, sizeof messages), 0);
    assert_int_equal(zmq_setsockopt(made.socket, ZMQ_RCVBUF, &bytes, sizeof bytes), 0);
    kvf_messages_address("127.0.0.1", part.port, address, sizeof address);
    assert_int_equal(zmq_connect(made.socket, address), 0);
    return made;
}

static raw_end raw_open(const test_side *to) {
    return raw_open_that_holds(to, 1000, -1);
}

static void raw_close(raw_end *end) {
    (void)zmq_close(end->socket);
    (void)zmq_ctx_term(end->zmq);
}

static void raw_send(const raw_end *end, const void *data, size_t bytes) {
    assert_int_equal(zmq_send(end->socket, data, bytes, 0), (int)bytes);
}

static void raw_greet(const raw_end *end, const test_side *to, unsigned char wrong) {
    kvf_messages_card part = part_of(to);
    kvf_messages_hello hello = {.generation = 1000, .region_count = SIDE_REGIONS, .name = "raw", .id = "raw"};
    unsigned char bytes[MESSAGES_HELLO_BYTES_MAX];
    memcpy(hello.secret, part.secret, sizeof hello.secret);
    hello.secret[15] ^= wrong;
    raw_send(end, bytes, kvf_messages_hello_write(&hello, bytes));
}

/* Receives the endpoint's next message, except those that accept a HELLO or check whether we are there, and lets the
 * endpoint work meanwhile. */
static size_t raw_hear(const raw_end *end, const test_side *from, unsigned char *out, size_t size) {
    for (;;) {
        int got = zmq_recv(end->socket, out, size, ZMQ_DONTWAIT);
        if (got >= 0 && out[0] == MESSAGES_ALIVE)
            continue;
        if (got >= 0)
            return (size_t)got;
        assert_int_equal(kvf_transport_progress(from->transport, NULL), KVF_OK);
        (void)poll(NULL, 0, 1);
    }
}

static void assert_refused(const raw_end *end, const test_side *by, kvf_messages_refusal why) {
    unsigned char heard[64];
    assert_true(raw_hear(end, by, heard, sizeof heard) >= 8);
    assert_int_equal(heard[0], MESSAGES_REFUSED);
    assert_int_equal(heard[4], why);
}

/* Makes a request of one run. */
static size_t make_request(kvf_messages_kind kind, uint32_t number, kvf_run run, unsigned char *out) {
    size_t list = kvf_messages_list_write(&run, 1, out + MESSAGES_REQUEST_BYTES);
    kvf_messages_request_write(kind, number, (uint32_t)list, (uint32_t)run.bytes, out);
    size_t bytes = MESSAGES_REQUEST_BYTES + list;
    if (kind == MESSAGES_WRITE) {
        memset(out + bytes, 0xee, run.bytes);
        bytes += run.bytes;
    }
    return bytes;
}

/* Works until so many connections were hung up on. */
static void await_closed(const test_side *side, uint64_t count) {
    while (inside(side)->door.guests.closed < count) {
        assert_int_equal(kvf_transport_progress(side->transport, NULL), KVF_OK);
        (void)poll(NULL, 0, 1);
    }
    assert_int_equal(inside(side)->door.guests.closed, count);
}

/* Also hung up on: a connection that sends several frames at once, the first of which would be a greeting. */
static void a_client_that_says_anything_but_the_secret_is_hung_up_on(void **state) {
    (void)state;
    test_side there;
    unsigned char request[4096], heard[64];
    side_open(&there, &plain, 2);
    size_t bytes = make_request(MESSAGES_WRITE, 1, (kvf_run){.bytes = 500}, request);
    const struct {
        const void *data;
        size_t bytes;
    } sayings[] = {{request, bytes}, {"", 0}, {"\1KVFM", 5}, {"\4hello", 6}};
    for (uint32_t i = 0; i < sizeof sayings / sizeof *sayings; i++) {
        raw_end end = raw_open(&there);
        raw_send(&end, sayings[i].data, sayings[i].bytes);
        await_closed(&there, i + 1);
        raw_close(&end);
    }
    raw_end end = raw_open(&there);
    raw_greet(&end, &there, 1);
    assert_refused(&end, &there, MESSAGES_REFUSED_STRANGER);
    raw_send(&end, request, bytes); /* messages on their way are dropped */
    await_closed(&there, 5);
    assert_int_equal(zmq_recv(end.socket, heard, sizeof heard, ZMQ_DONTWAIT), -1);
    raw_close(&end);
    end = raw_open(&there);
    assert_int_equal(zmq_send(end.socket, "\1", 1, ZMQ_SNDMORE), 1);
    raw_greet(&end, &there, 0);
    await_closed(&there, 6);
    raw_close(&end);
    assert_int_equal(there.notices, 0);
    assert_int_equal(HASH_COUNT(inside(&there)->clients), 0);
    for (uint64_t at = 0; at < 600; at++)
        assert_int_equal(side_memory(&there, 0)[at], side_byte(2, 0, at));
    side_close(&there);
}

static uint32_t count_muted(const test_side *side) {
    uint32_t count = 0;
    for (const kvf_guest *guest = inside(side)->door.guests.by_id; guest; guest = guest->by_id.next)
        count += guest->muted;
    return count;
}

/* A connection over which nothing is sent, which is perhaps not there yet. */
static int start_to_knock(const test_side *at) {
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                  .sin_port = htons(part_of(at).port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_true(fd >= 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address))
        assert_int_equal(errno, EINPROGRESS);
    return fd;
}

static int knock(const test_side *at) {
    const int fd = start_to_knock(at);
    struct pollfd waits = {.fd = fd, .events = POLLOUT};
    assert_int_equal(poll(&waits, 1, 30000), 1);
    return fd;
}

/* A connection by TCP that has shaken hands. */
static int raw_shaken(const test_side *to) {
    const struct sockaddr_in address = {.sin_family = AF_INET,
                                        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                        .sin_port = htons(part_of(to).port)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    assert_true(fd >= 0);
    assert_int_equal(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one), 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&address, sizeof address), 0);
    shake_hands(fd);
    return fd;
}

/* Bytes that the other end's kernel has not received yet. */
static int unreceived(int fd) {
    int bytes = -1;
    assert_int_equal(ioctl(fd, SIOCOUTQ, &bytes), 0);
    return bytes;
}

static void assert_served(const test_side *by, const raw_end *end) {
    unsigned char request[4096], heard[4096];
    const kvf_run run = {.remote_offset = 1, .bytes = 500, .remote_region = 1};
    for (uint32_t i = 0; i < 20; i++) {
        raw_send(end, request, make_request(MESSAGES_READ, i, run, request));
        assert_int_equal(raw_hear(end, by, heard, sizeof heard), 508);
    }
}

/* If the stranger were hung up on at once, it would come back with the next large message, which ZeroMQ receives
 * completely before the fabric sees it. Its message comes in short segments, for of long ones most is not received. */
static void a_stranger_that_says_too_much_is_not_heard_any_more(void **state) {
    (void)state;
    static const unsigned char part[512];
    const unsigned char head[9] = {2, 0, 0, 0, 0, 0, 1, 2, 0}; /* 66048 bytes in one frame */
    test_side there;
    side_open(&there, &plain, 2);
    const int strange = raw_shaken(&there);
    raw_end end = raw_open(&there);
    assert_int_equal(send(strange, head, sizeof head, MSG_NOSIGNAL), sizeof head);
    for (uint32_t sent = 0; sent < 129 * sizeof part; sent += sizeof part) {
        assert_int_equal(send(strange, part, sizeof part, MSG_NOSIGNAL), sizeof part);
        while (unreceived(strange) > 0)
            (void)poll(NULL, 0, 1);
    }
    while (count_muted(&there) < 1) {
        assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
        (void)poll(NULL, 0, 1);
    }
    raw_greet(&end, &there, 0); /* others are still served */
    assert_served(&there, &end);
    assert_int_equal(HASH_COUNT(inside(&there)->clients), 1);
    assert_int_equal(count_muted(&there), 1);
    assert_int_equal(inside(&there)->door.guests.closed, 0);
    (void)close(strange);
    raw_close(&end);
    side_close(&there);
}

/* Else ZeroMQ's thread would spend its time on them, and be late for all others: it makes a message of each frame of 2
 * bytes. The same for a client that was refused, until it is hung up on. */
static void of_long_segments_of_strangers_only_the_beginning_is_received(void **state) {
    (void)state;
    static const char endless[1 << 16];
    static unsigned char hello[2 + MESSAGES_HELLO_BYTES_MAX];
    for (uint32_t refused = 0; refused < 2; refused++) {
        test_side there;
        side_open(&there, &plain, 2);
        const int strange = raw_shaken(&there);
        if (refused) {
            kvf_messages_hello greeting = {.generation = 1000, .region_count = SIDE_REGIONS, .name = "raw"};
            const kvf_messages_card card = part_of(&there);
            memcpy(greeting.secret, card.secret, sizeof greeting.secret);
            hello[1] = (unsigned char)kvf_messages_hello_write(&greeting, hello + 2);
            assert_int_equal(send(strange, hello, 2u + hello[1], MSG_NOSIGNAL), 2 + hello[1]);
            while (HASH_COUNT(inside(&there)->clients) == 0)
                assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
            assert_int_equal(send(strange, "\0\1x", 3, MSG_NOSIGNAL), 3);
            while (HASH_COUNT(inside(&there)->clients) > 0)
                assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
        }
        assert_int_equal(send(strange, "\2\0\0\0\0\0\x0f\0\0", 9, MSG_NOSIGNAL), 9);
        const ssize_t sent = send(strange, endless, sizeof endless, MSG_NOSIGNAL | MSG_DONTWAIT);
        assert_int_equal(sent, sizeof endless);
        (void)poll(NULL, 0, 50);
        assert_true(unreceived(strange) > (int)sizeof endless - 4096);
        (void)close(strange);
        side_close(&there);
    }
}

/* A client's long segments are received whole, also those that came with its HELLO, soon after. */
static void a_client_is_received_from_whole(void **state) {
    (void)state;
    static unsigned char write[MESSAGES_BYTES_MAX];
    test_side there;
    unsigned char heard[4096];
    side_open(&there, &plain, 2);
    raw_end end = raw_open(&there);
    raw_greet(&end, &there, 0);
    const kvf_run run = {.bytes = MESSAGES_CHUNK_BYTES};
    const uint64_t begun = kvf_now(&kvf_monotonic);
    for (uint32_t i = 0; i < 10; i++) {
        raw_send(&end, write, make_request(MESSAGES_WRITE, i, run, write));
        assert_int_equal(raw_hear(&end, &there, heard, sizeof heard), MESSAGES_ANSWER_BYTES);
        assert_int_equal(heard[0], MESSAGES_DONE);
    }
    assert_true(kvf_now(&kvf_monotonic) - begun < 30 * KVF_SECOND); /* a KiB in 200 ms would take an hour */
    raw_close(&end);
    side_close(&there);
}

/* A peer that connects again and again, asks for much and takes nothing would otherwise keep ZeroMQ's thread busy. */
static void newcomers_get_no_more_than_their_share_beside_others(void **state) {
    (void)state;
    unsigned char request[4096];
    test_side there;
    side_open(&there, &plain, 2);
    kvf_messages_endpoint *endpoint = inside_to_change(&there);
    raw_end end = raw_open(&there);
    raw_greet(&end, &there, 0);
    const size_t bytes = make_request(MESSAGES_READ, 1, (kvf_run){.bytes = MESSAGES_CHUNK_BYTES}, request);
    for (uint32_t i = 0; i < MESSAGES_WINDOW_MAX; i++)
        raw_send(&end, request, bytes);
    const uint64_t begun = kvf_now(&kvf_monotonic);
    uint64_t now = begun;
    for (uint64_t enough = UINT64_MAX; now < enough; now = kvf_now(&kvf_monotonic)) {
        endpoint->others_ns = now; /* as if another client were served all the time */
        assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
        if (endpoint->clients && enough == UINT64_MAX)
            enough = now + 40 * MESSAGES_NEWCOMERS_NS;
    }
    const uint64_t shares = (now - begun) / MESSAGES_NEWCOMERS_NS + 2;
    const uint64_t served = endpoint->clients->first;
    assert_true(served >= 1);
    assert_true((served - 1) * MESSAGES_CHUNK_BYTES <= shares * MESSAGES_NEWCOMERS_WORK);
    while (endpoint->clients->first < MESSAGES_WINDOW_MAX) /* alone it is served at once */
        assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
    raw_close(&end);
    side_close(&there);
}

/* Those who are connected are served all the time; who is not let in tries again after a second. */
static void connections_that_come_too_fast_are_let_in_later(void **state) {
    (void)state;
    test_side there;
    side_open(&there, &plain, 2);
    kvf_gate_account *all = &inside_to_change(&there)->door.gate.all;
    raw_end end = raw_open(&there);
    raw_greet(&end, &there, 0);
    assert_served(&there, &end);
    all->paid_ns = kvf_now(&kvf_monotonic) + 2 * KVF_GATE_AT_ONCE_NS; /* as after twice as many */
    int fds[2] = {knock(&there), -1};
    while (!all->is_shut)
        assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
    fds[1] = start_to_knock(&there);
    assert_served(&there, &end);
    struct pollfd waits = {.fd = fds[1], .events = POLLOUT};
    assert_int_equal(poll(&waits, 1, 0), 0);
    while (poll(&waits, 1, 10) == 0)
        assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
    assert_false(all->is_shut);
    assert_int_equal(waits.revents & (POLLERR | POLLHUP), 0);
    (void)close(fds[0]);
    (void)close(fds[1]);
    raw_close(&end);
    side_close(&there);
}

/* What the next connection costs: it is noticed in the last progress(). */
static uint64_t cost_of_a_connection(const test_side *side, bool others_are_served, int *fd) {
    const kvf_door *door = &inside(side)->door;
    const uint32_t before = door->guests.count;
    while (door->gate.all.paid_ns > kvf_now(&kvf_monotonic))
        (void)poll(NULL, 0, 1);
    *fd = knock(side);
    while (door->guests.count == before) {
        inside_to_change(side)->others_ns = others_are_served ? kvf_now(&kvf_monotonic) : 0;
        assert_int_equal(kvf_transport_progress(side->transport, NULL), KVF_OK);
    }
    return door->gate.all.paid_ns - inside(side)->now;
}

/* Each takes ZeroMQ's thread some time, in which others are not served. */
static void connections_are_dear_with_keys_and_while_others_are_served(void **state) {
    (void)state;
    test_side there;
    int fds[3];
    side_open(&there, &plain, 2);
    assert_int_equal(cost_of_a_connection(&there, false, &fds[0]), KVF_GATE_AT_ONCE_NS / KVF_GATE_RATE);
    assert_int_equal(cost_of_a_connection(&there, true, &fds[1]), KVF_GATE_AT_ONCE_NS / KVF_GATE_DEAR_RATE);
    side_close(&there);
    side_open(&there, &keyed, 2);
    assert_int_equal(cost_of_a_connection(&there, false, &fds[2]), KVF_GATE_AT_ONCE_NS / KVF_GATE_DEAR_RATE);
    side_close(&there);
    for (int i = 0; i < 3; i++)
        (void)close(fds[i]);
}

static void a_number_of_connections_a_second_that_was_given_holds_always(void **state) {
    (void)state;
    static const pair_kind kind = {
        "messages", {false, false}, "messages", {"messages.max_connections_per_second", "20"}};
    test_side there;
    int fds[2];
    side_open(&there, &kind, 2);
    for (int others = 0; others < 2; others++)
        assert_int_equal(cost_of_a_connection(&there, others, &fds[others]), KVF_GATE_AT_ONCE_NS / 20);
    side_close(&there);
    (void)close(fds[0]);
    (void)close(fds[1]);
}

static void runs_outside_of_memory_are_refused_by_their_owner(void **state) {
    (void)state;
    static const kvf_messages_kind kinds[] = {MESSAGES_READ, MESSAGES_WRITE};
    test_side there;
    unsigned char request[4096], heard[4096];
    side_open(&there, &plain, 2);
    raw_end end = raw_open(&there);
    raw_greet(&end, &there, 0);
    for (uint32_t i = 0; i < 2; i++) {
        kvf_run outside = {.remote_offset = there.regions[1].bytes - 499, .bytes = 500, .remote_region = 1};
        raw_send(&end, request, make_request(kinds[i], 7 + i, outside, request));
        size_t bytes = raw_hear(&end, &there, heard, sizeof heard - 1);
        heard[bytes] = '\0';
        assert_int_equal(heard[0], MESSAGES_FAILED);
        assert_int_equal(heard[4], 7 + i);
        assert_non_null(strstr((char *)heard + 8, "run 0: 1 of 500 bytes from offset 69502 of region 1"));
    }
    for (uint64_t at = 69502; at < 70001; at++)
        assert_int_equal(side_memory(&there, 1)[at], side_byte(2, 1, at));
    /* The connection goes on. */
    kvf_run inside = {.remote_offset = 1, .bytes = 500, .remote_region = 1};
    raw_send(&end, request, make_request(MESSAGES_READ, 9, inside, request));
    assert_int_equal(raw_hear(&end, &there, heard, sizeof heard), 508);
    assert_int_equal(heard[0], MESSAGES_DATA);
    for (uint64_t at = 0; at < 500; at++)
        assert_int_equal(heard[8 + at], side_byte(2, 1, 1 + at));
    raw_close(&end);
    side_close(&there);
}

static void a_client_that_asks_too_often_for_missing_memory_is_cut_off(void **state) {
    (void)state;
    test_side there;
    unsigned char request[4096], heard[4096];
    side_open(&there, &plain, 2);
    raw_end end = raw_open(&there);
    raw_greet(&end, &there, 0);
    const kvf_run outside = {.remote_offset = there.regions[1].bytes - 499, .bytes = 500, .remote_region = 1};
    for (uint32_t i = 0; i < MESSAGES_FAILED_MAX; i++) {
        raw_send(&end, request,
                 make_request(i % 2 ? MESSAGES_READ : MESSAGES_WRITE, 1 + i, outside, request));
        (void)raw_hear(&end, &there, heard, sizeof heard);
        assert_int_equal(heard[0], MESSAGES_FAILED);
        assert_int_equal(heard[4], 1 + i);
    }
    raw_send(&end, request, make_request(MESSAGES_READ, 99, outside, request));
    assert_refused(&end, &there, MESSAGES_REFUSED_PROTOCOL);
    assert_int_equal(HASH_COUNT(inside(&there)->clients), 0);
    raw_close(&end);
    side_close(&there);
}

/* Each violation comes after a valid greeting. */
static void a_client_that_breaks_the_protocol_is_cut_off(void **state) {
    (void)state;
    static const unsigned char endless[KVF_NOTICE_MAX + 2] = {MESSAGES_NOTICE};
    test_side there;
    unsigned char request[4096];
    side_open(&there, &plain, 2);
    size_t bytes = make_request(MESSAGES_READ, 1, (kvf_run){.bytes = 500}, request);
    for (int wrong = 0; wrong < 6; wrong++) {
        raw_end end = raw_open(&there);
        raw_greet(&end, &there, 0);
        if (wrong == 0)
            raw_greet(&end, &there, 0);
        else if (wrong == 1)
            raw_send(&end, request, bytes - 1);
        else if (wrong == 2)
            raw_send(&end, request, 3);
        else if (wrong == 3)
            raw_send(&end, "\4", 1); /* an empty notification */
        else if (wrong == 4)
            raw_send(&end, "\x63", 1);
        else
            raw_send(&end, endless, sizeof endless); /* a notification that is too long */
        assert_refused(&end, &there, MESSAGES_REFUSED_PROTOCOL);
        raw_send(&end, request, bytes); /* this request is dropped */
        raw_greet(&end, &there, 1);     /* after a second refusal the connection ends */
        await_closed(&there, (uint32_t)wrong + 1);
        raw_close(&end);
    }
    assert_int_equal(there.notices, 0);
    side_close(&there);
}

/* Its kind has four bytes, of which the first alone tells a WRITE from other messages. */
static void a_write_without_its_data_is_cut_off_and_writes_nothing(void **state) {
    (void)state;
    unsigned char request[4096];
    const kvf_run run = {.bytes = 2000, .remote_region = 1};
    for (uint32_t at = 1; at < 4; at++) {
        test_side there;
        side_open(&there, &plain, 2);
        raw_end end = raw_open(&there);
        raw_greet(&end, &there, 0);
        const size_t bytes = make_request(MESSAGES_WRITE, 1, run, request) - run.bytes;
        request[at] = 1;
        raw_send(&end, request, bytes);
        assert_refused(&end, &there, MESSAGES_REFUSED_PROTOCOL);
        for (uint64_t i = 0; i < run.bytes; i++)
            assert_int_equal(side_memory(&there, 1)[i], side_byte(2, 1, i));
        raw_close(&end);
        side_close(&there);
    }
}

/* A client can ask for no more than its window; answers that it does not read occupy no more slots than it may have. */
static void a_client_that_asks_without_end_is_cut_off_and_others_are_served(void **state) {
    (void)state;
    static unsigned char request[4096];
    test_side here, there;
    side_open(&here, &plain, 1);
    side_open(&there, &plain, 2);
    kvf_peer *peer = side_connect(&here, &there);
    raw_end end = raw_open(&there);
    raw_greet(&end, &there, 0);
    size_t bytes = make_request(MESSAGES_READ, 1, (kvf_run){.bytes = MESSAGES_CHUNK_BYTES}, request);
    for (int i = 0; i < 200; i++) {
        if (zmq_send(end.socket, request, bytes, ZMQ_DONTWAIT) < 0)
            break;
        assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
    }
    kvf_run run = {0, 0, 3u << 20, 0, 0};
    assert_int_equal(move_runs(&here, &there, peer, KVF_READ, &run, 1), KVF_OK);
    assert_memory_equal(side_memory(&here, 0), side_memory(&there, 0), run.bytes);
    assert_true(inside(&there)->pool.made <= 2 * MESSAGES_PEER_SLOTS);
    raw_close(&end);
    side_close(&here);
    side_close(&there);
}

#define STUCK 70 /* each of them gets up to two of the 128 slots */

/* After a second these clients have all slots and keep them: the honest client gets some when they are gone. */
static void a_client_that_takes_no_answers_gives_its_slots_back_to_others(void **state) {
    (void)state;
    static unsigned char request[4096];
    test_side here, there;
    raw_end ends[STUCK];
    side_open(&here, &plain, 1);
    side_open(&there, &plain, 2);
    kvf_peer *peer = side_connect(&here, &there);
    size_t bytes = make_request(MESSAGES_READ, 1, (kvf_run){.bytes = MESSAGES_CHUNK_BYTES}, request);
    for (int i = 0; i < STUCK; i++) {
        ends[i] = raw_open_that_holds(&there, 1, 4096);
        raw_greet(&ends[i], &there, 0);
        for (uint32_t k = 0; k < MESSAGES_WINDOW_MAX; k++)
            raw_send(&ends[i], request, bytes);
    }
    while (inside(&there)->pool.taken < MESSAGES_SLOTS_MAX) {
        assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
        assert_int_equal(kvf_transport_progress(here.transport, NULL), KVF_OK); /* it says that it is alive */
    }
    /* Some slots may still come back while answers fill the buffers of connections: then nobody need go yet. */
    kvf_run run = {0, 0, 3u << 20, 0, 0};
    do {
        assert_int_equal(move_runs(&here, &there, peer, KVF_READ, &run, 1), KVF_OK);
        assert_memory_equal(side_memory(&here, 0), side_memory(&there, 0), run.bytes);
    } while (inside(&there)->door.guests.closed == 0);
    for (int i = 0; i < STUCK; i++)
        raw_close(&ends[i]);
    side_close(&here);
    side_close(&there);
}

/* ---- without memory for slots ---------------------------------------------------------------- */

static bool is_short;
static uint32_t refused;

static void *allocate_small(void *context, size_t bytes) {
    (void)context;
    const bool given = !is_short || bytes < MESSAGES_BYTES_MAX;
    refused += !given;
    return given ? malloc(bytes) : NULL;
}

static void *resize(void *context, void *memory, size_t bytes) {
    (void)context;
    return realloc(memory, bytes);
}

static void release(void *context, void *memory) {
    (void)context;
    free(memory);
}

#define REFUSED 20 /* more than by chance, as other reasons to make progress would bring */

/* No slot is out whose return could wake the endpoint: a write once waited for ever, and a read some seconds. */
static void a_transfer_goes_on_once_there_is_memory_again(void **state) {
    (void)state;
    static const kvf_allocator allocator = {allocate_small, resize, release, NULL};
    const kvf_run run = {0, 0, 3u << 20, 0, 0};
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        test_side here, there;
        test_outcome outcome = {0};
        assert_int_equal(kvf_set_allocator(&allocator), KVF_OK);
        side_open(&here, &plain, 1);
        side_open(&there, &plain, 2);
        kvf_peer *peer = side_connect(&here, &there);
        is_short = true;
        refused = 0;
        assert_int_equal(
            kvf_transport_submit(peer, (kvf_direction)direction, &run, 1, note_outcome, &outcome, NULL),
            KVF_OK);
        drive(&here, &there, &refused, REFUSED);
        assert_int_equal(outcome.calls, 0);
        is_short = false;
        drive(&here, &there, &outcome.calls, 1);
        assert_int_equal(outcome.status, KVF_OK);
        assert_memory_equal(side_memory(&here, 0), side_memory(&there, 0), run.bytes);
        side_close(&here);
        side_close(&there);
        assert_int_equal(kvf_set_allocator(NULL), KVF_OK);
    }
}

/* ---- connections and what they leave --------------------------------------------------------- */

static void connections_that_come_and_go_are_forgotten(void **state) {
    (void)state;
    test_side there;
    unsigned char heard[64], request[64];
    size_t bytes = make_request(MESSAGES_READ, 1, (kvf_run){.bytes = 20}, request);
    side_open(&there, &plain, 2);
    for (int i = 0; i < 300; i++) {
        raw_end end = raw_open(&there);
        raw_greet(&end, &there, 0);
        raw_send(&end, request, bytes);
        assert_int_equal(raw_hear(&end, &there, heard, sizeof heard), 28);
        raw_close(&end); /* closes without a message */
    }
    assert_true(HASH_COUNT(inside(&there)->clients) < 200);
    side_close(&there);
}

/* Connections that send nothing, garbage, or the beginning of a handshake, and stay open. */
static void half_open_connections_do_not_disturb_others(void **state) {
    (void)state;
    static const char *const sayings[] = {"", "GET / HTTP/1.1\r\n\r\n", "\xff\x01\x02", "\xff"};
    test_side here, there;
    int fds[100];
    side_open(&here, &plain, 1);
    side_open(&there, &plain, 2);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                  .sin_port = htons(part_of(&there).port)};
    for (int i = 0; i < 100; i++) {
        const char *saying = sayings[i % 4];
        fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        assert_int_equal(connect(fds[i], (struct sockaddr *)&address, sizeof address), 0);
        (void)send(fds[i], saying, strlen(saying), MSG_NOSIGNAL);
    }
    kvf_peer *peer = side_connect(&here, &there);
    kvf_run run = {0, 0, 3u << 20, 0, 0};
    assert_int_equal(move_runs(&here, &there, peer, KVF_READ, &run, 1), KVF_OK);
    assert_memory_equal(side_memory(&here, 0), side_memory(&there, 0), run.bytes);
    assert_int_equal(HASH_COUNT(inside(&there)->clients), 1);
    for (int i = 0; i < 100; i++)
        (void)close(fds[i]);
    side_close(&here);
    side_close(&there);
}

/* ---- how many may be connected ---------------------------------------------------------------- */

#define CROWD 40u

/* The honest client stays, whichever limit is reached. Unless a setting says otherwise, half of all connections may be
 * strangers. */
static void strangers_do_not_fill_the_port(void **state) {
    (void)state;
    static const pair_kind kinds[] = {
        {"messages", {false, false}, "messages", {"messages.max_connections", "6"}},
        {"messages", {false, false}, "messages", {"messages.max_connections_per_address", "6"}},
        {"messages", {false, false}, "messages", {"messages.max_strangers", "6"}},
    };
    static const uint32_t strangers[] = {3, 5, 6}; /* how many strangers stay */
    for (uint32_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        test_side here, there;
        int fds[CROWD];
        side_open(&here, &plain, 1);
        side_open(&there, &kinds[i], 2);
        kvf_peer *peer = side_connect(&here, &there);
        kvf_run run = {0, 0, 1u << 20, 0, 0};
        assert_int_equal(move_runs(&here, &there, peer, KVF_READ, &run, 1), KVF_OK);
        for (uint32_t k = 0; k < CROWD; k++)
            fds[k] = knock(&there);
        const uint32_t stay = strangers[i];
        await_closed(&there, CROWD - stay);
        kvf_transport_info info = {.struct_size = sizeof info};
        assert_int_equal(kvf_transport_get_info(there.transport, &info), KVF_OK);
        assert_int_equal(info.clients, stay + 1);
        assert_int_equal(info.refused, CROWD - stay);
        assert_true(i > 0 || info.clients_max == 6);
        assert_int_equal(move_runs(&here, &there, peer, KVF_READ, &run, 1), KVF_OK);
        /* A client that comes now and sends a greeting gets in, and takes the place of a stranger. */
        raw_end end = raw_open(&there);
        raw_greet(&end, &there, 0);
        while (HASH_COUNT(inside(&there)->clients) < 2)
            assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
        for (uint32_t k = 0; k < CROWD; k++)
            (void)close(fds[k]);
        raw_close(&end);
        side_close(&here);
        side_close(&there);
    }
}

/* ---- owners that do not keep to the protocol ------------------------------------------------- */

/* A socket that listens as an owner does. */
typedef struct raw_owner {
    void *zmq, *router;
    uint16_t port;
    unsigned char name[5], heard[600]; /* the last message, and the connection that it came over */
} raw_owner;

static void raw_owner_open(raw_owner *owner) {
    int none = 0;
    char bound[64];
    size_t length = sizeof bound;
    owner->zmq = zmq_ctx_new();
    owner->router = zmq_socket(owner->zmq, ZMQ_ROUTER);
    assert_int_equal(zmq_setsockopt(owner->router, ZMQ_LINGER, &none, sizeof none), 0);
    assert_int_equal(zmq_bind(owner->router, LOOPBACK), 0);
    assert_int_equal(zmq_getsockopt(owner->router, ZMQ_LAST_ENDPOINT, bound, &length), 0);
    owner->port = (uint16_t)strtoul(strrchr(bound, ':') + 1, NULL, 10);
}

static void raw_owner_close(const raw_owner *owner) {
    (void)zmq_close(owner->router);
    (void)zmq_ctx_term(owner->zmq);
}

/* `here` works until the owner has its next message, whose kind is returned. */
static int raw_owner_hear(raw_owner *owner, const test_side *here) {
    while (zmq_recv(owner->router, owner->name, sizeof owner->name, ZMQ_DONTWAIT) != sizeof owner->name) {
        assert_int_equal(kvf_transport_progress(here->transport, NULL), KVF_OK);
        (void)poll(NULL, 0, 1);
    }
    assert_true(zmq_recv(owner->router, owner->heard, sizeof owner->heard, 0) > 0);
    return owner->heard[0];
}

static void raw_owner_say(const raw_owner *owner, const void *data, size_t bytes) {
    assert_int_equal(zmq_send(owner->router, owner->name, sizeof owner->name, ZMQ_SNDMORE),
                     sizeof owner->name);
    assert_int_equal(zmq_send(owner->router, data, bytes, 0), (int)bytes);
}

static kvf_peer *raw_owner_connect(const raw_owner *owner, const test_side *here) {
    kvf_messages_card part = part_of(here);
    kvf_peer *peer;
    part.port = owner->port;
    assert_int_equal(connect_by(here, here, &part, &peer), KVF_OK);
    return peer;
}

#define SAYS_ALIVE "\x15\0\0\0\0\0\0", 8

/* A wrong answer of an owner to the first request. */
typedef struct wrong_answer {
    unsigned char data[40];
    size_t bytes;
} wrong_answer;

static void an_owner_that_answers_what_was_not_asked_is_lost(void **state) {
    (void)state;
    static const wrong_answer answers[] = {
        {{MESSAGES_DATA, 0, 0, 0, 2}, 8 + 20}, /* another number */
        {{MESSAGES_DATA, 0, 0, 0, 1}, 8 + 19}, /* too short */
        {{MESSAGES_DATA, 0, 0, 0, 1}, 8 + 21}, /* too long */
        {{MESSAGES_DONE, 0, 0, 0, 1}, 8},      /* the answer to a write */
        {{MESSAGES_TAKEN, 0, 0, 0, 1}, 8},     /* no notification was sent */
        {{MESSAGES_DATA}, 1},
        {{99}, 1},
        {{0}, 0},
    };
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        test_side here;
        raw_owner owner;
        side_open(&here, &plain, 1);
        raw_owner_open(&owner);
        kvf_peer *peer = raw_owner_connect(&owner, &here);
        kvf_run run = {100, 0, 20, 0, 0};
        test_outcome outcome = {0};
        assert_int_equal(kvf_transport_submit(peer, KVF_READ, &run, 1, note_outcome, &outcome, NULL), KVF_OK);
        assert_int_equal(raw_owner_hear(&owner, &here), MESSAGES_HELLO);
        for (int k = 0; k < 20; k++) { /* before its answer nothing else is sent */
            assert_int_equal(kvf_transport_progress(here.transport, NULL), KVF_OK);
            (void)poll(NULL, 0, 1);
            assert_int_equal(zmq_recv(owner.router, owner.heard, sizeof owner.heard, ZMQ_DONTWAIT), -1);
        }
        raw_owner_say(&owner, SAYS_ALIVE);
        assert_int_equal(raw_owner_hear(&owner, &here), MESSAGES_READ);
        raw_owner_say(&owner, answers[i].data, answers[i].bytes);
        drive(&here, NULL, &here.lost, 1);
        assert_int_equal(outcome.status, KVF_E_PEER_LOST);
        assert_non_null(strstr(here.lost_detail, "protocol"));
        assert_true(kvf_peer_lives(peer));
        for (uint64_t at = 100; at < 120; at++)
            assert_int_equal(side_memory(&here, 0)[at], side_byte(1, 0, at));
        raw_owner_close(&owner);
        side_close(&here);
    }
}

static void a_request_that_the_owner_refuses_fails_with_its_words_and_the_next_goes_well(void **state) {
    (void)state;
    const unsigned char refusal[8 + 7] = {
        MESSAGES_FAILED, 0, 0, 0, 1, 0, 0, 0, 'n', 'o', 'n', 'e', '\n', ';', 0xff};
    unsigned char answer[8 + 20] = {MESSAGES_DATA, 0, 0, 0, 2};
    const kvf_run run = {100, 0, 20, 0, 0};
    test_outcome outcomes[2] = {{0}, {0}};
    test_side here;
    raw_owner owner;
    side_open(&here, &plain, 1);
    raw_owner_open(&owner);
    kvf_peer *peer = raw_owner_connect(&owner, &here);
    assert_int_equal(raw_owner_hear(&owner, &here), MESSAGES_HELLO);
    raw_owner_say(&owner, SAYS_ALIVE);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(kvf_transport_submit(peer, KVF_READ, &run, 1, note_outcome, &outcomes[i], NULL),
                         KVF_OK);
        assert_int_equal(raw_owner_hear(&owner, &here), MESSAGES_READ);
        raw_owner_say(&owner, i ? answer : refusal, i ? sizeof answer : sizeof refusal);
        drive(&here, NULL, &outcomes[i].calls, 1);
    }
    assert_int_equal(outcomes[0].status, KVF_E_IO);
    assert_non_null(strstr(outcomes[0].detail, "refused by the owner: none?;?"));
    assert_int_equal(outcomes[1].status, KVF_OK);
    assert_memory_equal(side_memory(&here, 0) + 100, answer + 8, 20);
    raw_owner_close(&owner);
    side_close(&here);
}

static void an_owner_that_lets_nobody_in_says_why(void **state) {
    (void)state;
    static const struct {
        unsigned char why, detail;
        const char *words;
        bool lives;
    } refusals[] = {{MESSAGES_REFUSED_VERSION, 9, "the peer speaks version 9 of the messages", true},
                    {MESSAGES_REFUSED_FULL, 0, "the peer has no room for another connection", true},
                    {MESSAGES_REFUSED_PROTOCOL, 0, "does not keep to the protocol (reason 6)", true},
                    {MESSAGES_REFUSED_CLOSED, 0, "the peer's endpoint has closed", false}};
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const unsigned char refusal[16] = {MESSAGES_REFUSED,  0, 0, 0, refusals[i].why, 0, 0, 0,
                                           refusals[i].detail};
        test_side here;
        raw_owner owner;
        side_open(&here, &plain, 1);
        raw_owner_open(&owner);
        kvf_peer *peer = raw_owner_connect(&owner, &here);
        assert_int_equal(raw_owner_hear(&owner, &here), MESSAGES_HELLO);
        raw_owner_say(&owner, refusal, sizeof refusal);
        drive(&here, NULL, &here.lost, 1);
        assert_non_null(strstr(here.lost_detail, refusals[i].words));
        assert_int_equal(kvf_peer_lives(peer), refusals[i].lives);
        raw_owner_close(&owner);
        side_close(&here);
    }
}

/* Begins to read, and gives up once the owner has heard it. */
static void read_and_give_up(raw_owner *owner, test_side *here, kvf_peer *peer) {
    const kvf_run run = {100, 0, 20, 0, 0};
    test_outcome outcome = {0};
    kvf_operation operation;
    assert_int_equal(kvf_transport_submit(peer, KVF_READ, &run, 1, note_outcome, &outcome, &operation),
                     KVF_OK);
    assert_int_equal(raw_owner_hear(owner, here), MESSAGES_READ);
    assert_int_equal(kvf_transport_cancel(here->transport, operation), KVF_OK);
    drive(here, NULL, &outcome.calls, 1);
    assert_int_equal(outcome.status, KVF_E_CANCELLED);
}

static void
a_connection_is_behind_while_bytes_of_reads_that_were_given_up_long_ago_are_to_come(void **state) {
    (void)state;
    unsigned char answer[8 + 20] = {MESSAGES_DATA, 0, 0, 0, 1};
    test_side here;
    raw_owner owner;
    side_open(&here, &plain, 1);
    raw_owner_open(&owner);
    kvf_peer *peer = raw_owner_connect(&owner, &here);
    assert_int_equal(raw_owner_hear(&owner, &here), MESSAGES_HELLO);
    raw_owner_say(&owner, SAYS_ALIVE);
    read_and_give_up(&owner, &here, peer);
    read_and_give_up(&owner, &here, peer);
    assert_false(kvf_peer_is_behind(peer));
    kvf_messages_link *link = inside_to_change(&here)->links;
    link->given_up_ns -= KVF_SECOND;
    assert_true(kvf_peer_is_behind(peer));
    raw_owner_say(&owner, answer, sizeof answer);
    while (link->count > 1)
        work_once(&here);
    assert_true(kvf_peer_is_behind(peer));
    answer[4] = 2;
    raw_owner_say(&owner, answer, sizeof answer);
    while (link->count > 0)
        work_once(&here);
    assert_false(kvf_peer_is_behind(peer));
    for (uint64_t at = 100; at < 120; at++)
        assert_int_equal(side_memory(&here, 0)[at], side_byte(1, 0, at));
    raw_owner_close(&owner);
    side_close(&here);
}

/* It hangs up without a word, as on a process that was stopped and took none of its answers; or it ends while we read,
 * or after we have rested with nothing to read. */
static void an_owner_that_hangs_up_after_we_were_away_lives(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        const bool reads = i < 2, away = i != 1;
        const kvf_run run = {.bytes = 10};
        test_outcome outcome = {0};
        test_side here;
        uint16_t number;
        int owner;
        side_open(&here, &plain, 1);
        int port = open_port(&number);
        kvf_messages_card part = part_of(&here);
        kvf_peer *peer;
        part.port = number;
        assert_int_equal(connect_by(&here, &here, &part, &peer), KVF_OK);
        while ((owner = accept4(port, NULL, NULL, SOCK_CLOEXEC)) < 0)
            (void)poll(NULL, 0, 1);
        shake_hands(owner);
        assert_int_equal(send(owner, (char[]){0, 1, MESSAGES_ALIVE}, 3, MSG_NOSIGNAL), 3);
        if (reads)
            assert_int_equal(kvf_transport_submit(peer, KVF_READ, &run, 1, note_outcome, &outcome, NULL),
                             KVF_OK);
        while (!inside(&here)->links->welcome || (reads && inside(&here)->links->count == 0))
            assert_int_equal(kvf_transport_progress(here.transport, NULL), KVF_OK);
        if (away)
            (void)poll(NULL, 0, (int)(MESSAGES_ABSENT_NS / 1000000) + 50);
        (void)close(owner);
        drive(&here, NULL, &here.lost, 1);
        assert_int_equal(kvf_peer_lives(peer), reads && away);
        assert_int_equal(outcome.status, reads ? KVF_E_PEER_LOST : KVF_OK);
        kvf_fd_close(&port);
        side_close(&here);
    }
}

/* ---- processes that die ---------------------------------------------------------------------- */

static void a_killed_owner_is_lost(void **state) {
    (void)state;
    int lines[2];
    unsigned char card[4096];
    kvf_peer *peer = NULL;
    assert_int_equal(pipe(lines), 0);
    (void)fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        test_side own;
        const void *data;
        size_t bytes;
        (void)alarm(100);
        side_open(&own, &plain, 2);
        (void)kvf_transport_export(own.transport, &data, &bytes);
        (void)!write(lines[1], data, bytes);
        for (;;)
            drive(&own, NULL, &(uint32_t){0}, 1);
    }
    test_side here;
    side_open(&here, &plain, 1);
    ssize_t bytes = read(lines[0], card, sizeof card);
    assert_true(bytes > 0);
    assert_int_equal(kvf_transport_connect(here.transport, card, (size_t)bytes, &peer), KVF_OK);
    kvf_run small = {0, 0, 5000, 1, 1}, big = {0, 0, 5u << 20, 0, 0};
    assert_int_equal(move_runs(&here, NULL, peer, KVF_READ, &small, 1), KVF_OK);
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    test_outcome outcome = {0};
    if (kvf_transport_submit(peer, KVF_READ, &big, 1, note_outcome, &outcome, NULL) == KVF_OK) {
        drive(&here, NULL, &here.lost, 1);
        assert_int_equal(outcome.status, KVF_E_PEER_LOST);
        assert_non_null(strstr(outcome.detail, "messages: reading from side 2: "));
    }
    assert_non_null(strstr(here.lost_detail, "the peer's process has ended"));
    assert_false(kvf_peer_lives(peer));
    assert_int_equal(kvf_transport_connect(here.transport, card, (size_t)bytes, &peer), KVF_E_PEER_LOST);
    assert_non_null(strstr(kvf_error_detail(), "nobody listens there"));
    side_close(&here);
    (void)close(lines[0]);
    (void)close(lines[1]);
}

static void a_peer_says_by_which_address_it_is_reached(void **state) {
    for (int secured = 0; secured < 2; secured++) {
        test_side here, there;
        char way[128];
        (void)state;
        side_open(&here, secured ? &keyed : &plain, 1);
        side_open(&there, secured ? &keyed : &plain, 2);
        kvf_peer *peer = side_connect(&here, &there);
        kvf_run run = {.bytes = 10};
        assert_int_equal(move_runs(&here, &there, peer, KVF_READ, &run, 1), KVF_OK);
        kvf_peer_info info = {.struct_size = sizeof info};
        assert_int_equal(kvf_peer_get_info(peer, &info), KVF_OK);
        (void)snprintf(way, sizeof way, "messages to tcp://127.0.0.1:%u%s", part_of(&there).port,
                       secured ? ", encrypted" : "");
        assert_string_equal(info.way, way);
        side_close(&here);
        side_close(&there);
    }
}

static void progress_for(const test_side *side, uint32_t ms) {
    const uint64_t end = kvf_now(&kvf_monotonic) + ms * UINT64_C(1000000);
    while (kvf_now(&kvf_monotonic) < end)
        assert_int_equal(kvf_transport_progress(side->transport, NULL), KVF_OK);
}

static long page_faults(void) {
    struct rusage usage;
    assert_int_equal(getrusage(RUSAGE_SELF, &usage), 0);
    return usage.ru_minflt;
}

/* Messages of a megabyte have 256 pages each, and the kernel would have to find and zero every page of every message.
 * The first test: others free blocks that make glibc keep as much. */
static void memory_of_messages_that_were_read_is_used_again(void **state) {
    (void)state;
    test_side here, there;
    side_open(&here, &plain, 1);
    side_open(&there, &plain, 2);
    kvf_peer *peer = side_connect(&here, &there);
    const kvf_run run = {.bytes = 5u << 20};
    long before = 0;
    for (int round = -5; round < 10; round++) {
        if (round == 0)
            before = page_faults();
        test_outcome outcome = {0};
        assert_int_equal(kvf_transport_submit(peer, KVF_READ, &run, 1, note_outcome, &outcome, NULL), KVF_OK);
        progress_for(&here, 10);  /* asks */
        progress_for(&there, 30); /* all answers come before the first is read */
        drive(&here, &there, &outcome.calls, 1);
        assert_int_equal(outcome.status, KVF_OK);
    }
    if (!SANITIZED)
        assert_true(page_faults() - before < 10 * 5 * 256 / 4);
    side_close(&here);
    side_close(&there);
}

/* ZeroMQ would end the process. */
static void an_owner_may_close_while_others_speak_another_protocol_to_it(void **state) {
    (void)state;
    http_askers askers;
    http_askers_start(&askers);
    for (int i = 0; i < 200; i++) {
        test_side there;
        side_open(&there, &plain, 2);
        askers.port = part_of(&there).port;
        progress_for(&there, 1);
        side_close(&there);
    }
    http_askers_stop(&askers);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_of_messages_that_were_read_is_used_again),
        cmocka_unit_test(a_card_is_read_as_it_was_written_and_refused_when_cut_off),
        cmocka_unit_test(settings_that_mean_nothing_are_refused),
        cmocka_unit_test(loopback_and_keys_of_others_are_refused_before_anything_is_sent),
        cmocka_unit_test(an_owner_with_another_key_than_its_card_says_is_not_talked_to),
        cmocka_unit_test(a_host_name_that_is_not_known_is_told),
        cmocka_unit_test(another_endpoint_at_the_address_of_the_card_is_found_out),
        cmocka_unit_test(an_owner_that_sends_a_message_without_an_end_is_cut_off),
        cmocka_unit_test(an_owner_that_hangs_up_after_we_were_away_lives),
        cmocka_unit_test(a_host_that_does_not_answer_is_tried_until_it_does),
        cmocka_unit_test(a_host_that_does_not_answer_is_given_up_when_patience_ends),
        cmocka_unit_test(a_connection_that_ends_before_we_are_let_in_is_made_again),
        cmocka_unit_test(an_owner_that_does_not_shake_hands_lives),
        cmocka_unit_test(a_client_that_says_anything_but_the_secret_is_hung_up_on),
        cmocka_unit_test(runs_outside_of_memory_are_refused_by_their_owner),
        cmocka_unit_test(a_stranger_that_says_too_much_is_not_heard_any_more),
        cmocka_unit_test(of_long_segments_of_strangers_only_the_beginning_is_received),
        cmocka_unit_test(a_client_is_received_from_whole),
        cmocka_unit_test(newcomers_get_no_more_than_their_share_beside_others),
        cmocka_unit_test(connections_that_come_too_fast_are_let_in_later),
        cmocka_unit_test(connections_are_dear_with_keys_and_while_others_are_served),
        cmocka_unit_test(a_number_of_connections_a_second_that_was_given_holds_always),
        cmocka_unit_test(a_client_that_asks_too_often_for_missing_memory_is_cut_off),
        cmocka_unit_test(a_client_that_breaks_the_protocol_is_cut_off),
        cmocka_unit_test(a_write_without_its_data_is_cut_off_and_writes_nothing),
        cmocka_unit_test(a_client_that_asks_without_end_is_cut_off_and_others_are_served),
        cmocka_unit_test(a_client_that_takes_no_answers_gives_its_slots_back_to_others),
        cmocka_unit_test(a_transfer_goes_on_once_there_is_memory_again),
        cmocka_unit_test(connections_that_come_and_go_are_forgotten),
        cmocka_unit_test(half_open_connections_do_not_disturb_others),
        cmocka_unit_test(strangers_do_not_fill_the_port),
        cmocka_unit_test(an_owner_may_close_while_others_speak_another_protocol_to_it),
        cmocka_unit_test(an_owner_that_answers_what_was_not_asked_is_lost),
        cmocka_unit_test(a_request_that_the_owner_refuses_fails_with_its_words_and_the_next_goes_well),
        cmocka_unit_test(an_owner_that_lets_nobody_in_says_why),
        cmocka_unit_test(a_connection_is_behind_while_bytes_of_reads_that_were_given_up_long_ago_are_to_come),
        cmocka_unit_test(a_killed_owner_is_lost),
        cmocka_unit_test(a_peer_says_by_which_address_it_is_reached),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
