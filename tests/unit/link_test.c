/* Links: messages in both directions, connections that break and come back, what is refused, waiting. */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <zmq.h>

#include "link/link_post.h"
#include "link_ends.h"

/* A clock that stands still until it is set, so a link that hears nothing for long does not dial a second time, however
 * slow the machine is. */
static uint64_t set_now(void *now_ns) {
    return *(const uint64_t *)now_ns;
}

/* ---- messages -------------------------------------------------------------------------------- */

static void a_message_arrives_and_its_route_is_good_for_an_answer(void **state) {
    (void)state;
    end server, client;
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = ""});
    kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));

    send_text(&client, route, "question");
    work_until(server.message_count == 1, &server, &client);
    send_text(&server, server.messages[0].route, "answer");
    work_until(client.message_count == 1, &server, &client);

    assert_string_equal(server.messages[0].text, "question");
    assert_string_equal(client.messages[0].text, "answer");
    assert_int_equal(client.messages[0].route, route);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

#ifndef TCP_RTO_MAX_MS /* since Linux 6.15 */
#define TCP_RTO_MAX_MS 44
#endif

static int of_tcp(int fd, int option) {
    int value = -1;
    socklen_t bytes = sizeof value;
    return getsockopt(fd, IPPROTO_TCP, option, &value, &bytes) ? -1 : value;
}

/* Counts the connections of this process that send again each second, for `for_ms` in all. */
static uint32_t trying_often(int for_ms) {
    uint32_t count = 0;
    for (int fd = 0; fd < 256; fd++)
        count += of_tcp(fd, TCP_RTO_MAX_MS) == 1000 && of_tcp(fd, TCP_USER_TIMEOUT) == for_ms;
    return count;
}

static void bytes_under_way_when_a_link_goes_down_are_sent_again_each_second(void **state) {
    (void)state;
    end server, client;
    open_end(&server, (kvf_link_options){.listen = NULL});
    const int one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool can = of_tcp(one, TCP_RTO_MAX_MS) > 0;
    (void)close(one);
    open_end(&client, (kvf_link_options){.listen = ""});
    kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
    send_text(&client, route, "question");
    work_until(server.message_count == 1 && (!can || (trying_often(900000) > 0 && trying_often(60000) > 0)),
               &server, &client);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void both_sides_of_a_pair_may_call_and_routes_in_and_out_never_clash(void **state) {
    (void)state;
    end a, b;
    open_end(&a, (kvf_link_options){.listen = NULL});
    open_end(&b, (kvf_link_options){.listen = NULL});
    kvf_route a_to_b = connect_end(&a, kvf_link_endpoint(b.link));
    kvf_route b_to_a = connect_end(&b, kvf_link_endpoint(a.link));

    send_text(&a, a_to_b, "from a");
    send_text(&b, b_to_a, "from b");
    work_until(a.message_count == 1 && b.message_count == 1, &a, &b);

    assert_string_equal(b.messages[0].text, "from a");
    assert_string_equal(a.messages[0].text, "from b");
    assert_true(a.messages[0].route >> 63);
    assert_false(a_to_b >> 63);
    kvf_link_close(a.link);
    kvf_link_close(b.link);
}

static void messages_keep_their_order_and_empty_ones_arrive(void **state) {
    (void)state;
    end server, client;
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = ""});
    kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
    char text[16];

    send_text(&client, route, "");
    for (int i = 1; i < 50; i++) {
        (void)snprintf(text, sizeof text, "%d", i);
        send_text(&client, route, text);
    }
    work_until(server.message_count == 50, &server, &client);

    assert_int_equal(server.messages[0].bytes, 0);
    for (int i = 1; i < 50; i++) {
        (void)snprintf(text, sizeof text, "%d", i);
        assert_string_equal(server.messages[i].text, text);
    }
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static bool knows_everybody(void *context, kvf_route route) {
    (void)context;
    (void)route;
    return true;
}

static void a_message_as_large_as_allowed_arrives_and_a_larger_one_is_an_error(void **state) {
    (void)state;
    end server, client;
    open_end(&server, (kvf_link_options){.listen = NULL, .is_known = knows_everybody});
    open_end(&client, (kvf_link_options){.listen = ""});
    kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
    char *large = calloc(1, KVF_WIRE_MAX_BYTES + 1);
    assert_non_null(large);
    send_text(&client, route,
              "hello"); /* a sender of whom nothing was heard yet is cut off far below the limit */
    work_until(server.message_count == 1, &server, &client);

    assert_fails(kvf_link_send(client.link, route, large, KVF_WIRE_MAX_BYTES + 1), KVF_E_RANGE, "1048577",
                 "1048576");
    assert_ok(kvf_link_send(client.link, route, large, KVF_WIRE_MAX_BYTES));
    work_until(server.message_count == 2, &server, &client);

    assert_int_equal(server.messages[1].bytes, KVF_WIRE_MAX_BYTES);
    free(large);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void what_was_sent_before_a_link_is_closed_arrives(void **state) {
    (void)state;
    char *large = calloc(1, KVF_WIRE_MAX_BYTES); /* so that most of it has not left when the link is closed */
    assert_non_null(large);
    for (int disconnects = 0; disconnects < 2; disconnects++) {
        end server, client;
        open_end(&server, (kvf_link_options){.listen = NULL, .is_known = knows_everybody});
        open_end(&client, (kvf_link_options){.listen = ""});
        kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
        send_text(&client, route, "hello");
        work_until(server.message_count == 1, &server, &client);
        for (int i = 0; i < 3; i++)
            assert_ok(kvf_link_send(client.link, route, large, KVF_WIRE_MAX_BYTES));
        if (disconnects)
            kvf_link_disconnect(client.link, route);
        kvf_link_close(client.link);
        work_until(server.message_count == 4, &server);
        kvf_link_close(server.link);
    }
    free(large);
}

static void a_route_that_does_not_exist_is_an_error(void **state) {
    (void)state;
    end server;
    open_end(&server, (kvf_link_options){.listen = NULL});

    assert_fails(kvf_link_send(server.link, 7, "x", 1), KVF_E_NOT_FOUND, "7");
    assert_fails(kvf_link_send(server.link, 0, "x", 1), KVF_E_NOT_FOUND, "0");
    assert_fails(kvf_link_send(server.link, UINT64_C(1) << 63 | 12345, "x", 1), KVF_E_NOT_FOUND, "ended");
    kvf_link_disconnect(server.link, 7);
    kvf_link_close(server.link);
}

static void a_peer_that_reads_nothing_makes_messages_be_dropped_not_kept_for_ever(void **state) {
    (void)state;
    end client;
    open_end(&client, (kvf_link_options){.listen = ""});
    kvf_route route = connect_end(&client, "tcp://127.0.0.1:1");

    for (int i = 0; i < 20000; i++)
        send_text(&client, route, "nobody listens there");

    kvf_link_close(client.link); /* closing does not wait for the messages */
}

/* Sends a message of the largest size so often; the other end may be hung up on meanwhile. */
static void send_large(end *self, kvf_route route, uint32_t times) {
    char *large = calloc(1, KVF_WIRE_MAX_BYTES);
    assert_non_null(large);
    for (uint32_t i = 0; i < times; i++)
        (void)kvf_link_send(self->link, route, large, KVF_WIRE_MAX_BYTES);
    free(large);
}

/* A client connects and says a word, after which it reads nothing until the test lets it. */
static kvf_route open_silent(end *client, end *server, const kvf_clock *clock, const char *word) {
    open_end(client, (kvf_link_options){.listen = "", .clock = clock});
    send_text(client, connect_end(client, kvf_link_endpoint(server->link)), word);
    work_until(has_message(server, word), server, client);
    return server->messages[server->message_count - 1].route;
}

static void
what_is_sent_to_peers_that_read_nothing_takes_bounded_memory_and_others_are_answered(void **state) {
    (void)state;
    enum { MANY = 400, READ = 64 /* by ZeroMQ, at the other end */, UNDER_WAY = 16 };
    uint64_t now_ns = kvf_now(&kvf_monotonic);
    const kvf_clock clock = {set_now, &now_ns};
    end server, reads_nothing, other;
    open_end(&server, (kvf_link_options){.listen = NULL});
    kvf_route route = open_silent(&reads_nothing, &server, &clock, "reads nothing");
    send_large(&server, route, MANY);
    assert_true(kvf_link_count(server.link).dropped > 0);

    (void)open_silent(&other, &server, &clock, "other");
    ask_until_answered(&other, &server, 1, "question");
    work_until(has_message(&other, "question"), &other, &server);

    /* What was kept comes, and then there is room again. */
    server.answers = false;
    for (time_t begun = time(NULL); reads_nothing.heard_count == 0 && time(NULL) - begun < PATIENCE_S;) {
        reads_nothing.listened_for = "more";
        send_text(&server, route, "more");
        progress_all((end *[]){&server, &reads_nothing}, 2);
    }
    assert_true(reads_nothing.heard_count > 0);
    assert_in_range(reads_nothing.message_count - reads_nothing.heard_count,
                    KVF_POST_BYTES / KVF_WIRE_MAX_BYTES / 2 - 1,
                    KVF_POST_BYTES / KVF_WIRE_MAX_BYTES + READ + UNDER_WAY);
    kvf_link_close(other.link);
    kvf_link_close(reads_nothing.link);
    kvf_link_close(server.link);
}

/* Or reads `some` now and then. */
static void is_hung_up_on_if_it_leaves_no_room(bool some) {
    uint64_t now_ns = kvf_now(&kvf_monotonic), before_ns = now_ns;
    const kvf_clock clock = {set_now, &now_ns}, stopped = {set_now, &before_ns};
    end server, reads_nothing;
    bool more;
    open_end(&server, (kvf_link_options){.listen = NULL, .clock = &clock, .is_known = knows_everybody});
    kvf_route route = open_silent(&reads_nothing, &server, &stopped, "reads nothing");
    for (uint32_t i = 0; i < 200 && kvf_link_count(server.link).closed == 0; i++) {
        send_large(&server, route, 40);
        (void)usleep(10000);
        now_ns += KVF_POST_STUCK_NS / 4;
        if (some)
            kvf_link_progress(reads_nothing.link, &more);
    }
    assert_int_equal(kvf_link_count(server.link).closed, 1);
    work_until(reads_nothing.broken_count > 0, &reads_nothing, &server);
    kvf_link_close(reads_nothing.link);
    kvf_link_close(server.link);
}

static void a_peer_that_reads_nothing_is_hung_up_on_if_it_leaves_no_room(void **state) {
    (void)state;
    is_hung_up_on_if_it_leaves_no_room(false);
}

static void a_peer_that_reads_too_little_is_hung_up_on_if_it_leaves_no_room(void **state) {
    (void)state;
    is_hung_up_on_if_it_leaves_no_room(true);
}

/* ---- other programs on the link's port ---------------------------------------------------------------------- */

static void messages_of_several_frames_and_clients_with_names_are_ignored(void **state) {
    (void)state;
    uint64_t now_ns = kvf_now(&kvf_monotonic);
    const kvf_clock clock = {set_now, &now_ns};
    end server, client;
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = "", .clock = &clock});
    void *zmq = zmq_ctx_new();
    void *named = zmq_socket(zmq, ZMQ_DEALER);
    void *wordy = zmq_socket(zmq, ZMQ_DEALER);
    assert_int_equal(zmq_setsockopt(named, ZMQ_ROUTING_ID, "name!", 5), 0);
    assert_int_equal(zmq_connect(named, kvf_link_endpoint(server.link)), 0);
    assert_int_equal(zmq_connect(wordy, kvf_link_endpoint(server.link)), 0);

    /* The last message of `wordy` shows that those before it have come. */
    assert_int_equal(zmq_send(named, "named", 5, 0), 5);
    assert_int_equal(zmq_send(wordy, "two", 3, ZMQ_SNDMORE), 3);
    assert_int_equal(zmq_send(wordy, "frames", 6, 0), 6);
    assert_int_equal(zmq_send(wordy, "one frame", 9, 0), 9);
    work_until(has_message(&server, "one frame"), &server);
    kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
    for (int i = 0; i < 20; i++) {
        uint32_t before = server.message_count;
        assert_int_equal(zmq_send(named, "named", 5, 0), 5);
        send_text(&client, route, "ours");
        work_until(server.message_count > before, &server, &client);
    }

    assert_int_equal(server.message_count, 21);
    assert_false(has_message(&server, "named"));
    assert_false(has_message(&server, "two"));
    assert_false(has_message(&server, "frames"));
    const int linger = 0;
    (void)zmq_setsockopt(named, ZMQ_LINGER, &linger, sizeof linger);
    (void)zmq_close(named);
    (void)zmq_close(wordy);
    (void)zmq_ctx_term(zmq);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void a_port_that_speaks_something_else_is_told_and_tried_again(void **state) {
    (void)state;
    end client;
    char endpoint[64];
    struct sockaddr_storage address = {0};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(listen(listener, 8), 0); /* on a port of the kernel's choice */
    assert_int_equal(getsockname(listener, (struct sockaddr *)&address, &size), 0);
    uint16_t port;
    memcpy(&port, (char *)&address + 2, sizeof port);
    (void)snprintf(endpoint, sizeof endpoint, "tcp://127.0.0.1:%u",
                   (unsigned)(uint16_t)(port << 8 | port >> 8));
    open_end(&client, (kvf_link_options){.listen = ""});
    kvf_route route = connect_end(&client, endpoint);

    for (int i = 0; i < 3; i++) {
        int connection = accept(listener, NULL, NULL);
        assert_true(connection >= 0);
        const char greeting[] =
            "HTTP/1.0 400 this is not what you are looking for, it is something else here\r\n\r\n";
        assert_int_equal(write(connection, greeting, sizeof greeting), sizeof greeting);
        uint32_t before = client.broken_count;
        work_until(client.broken_count > before, &client);
        assert_int_equal(close(connection), 0);
        assert_int_equal(client.broken_route, route);
        assert_int_equal(client.broken_status, KVF_E_PARSE);
        assert_non_null(strstr(client.broken_detail, "does not speak ZeroMQ's protocol"));
        bool again = false;
        while (!again) { /* the client dials again: its connection waits in the kernel */
            struct pollfd waiting = {.fd = listener, .events = POLLIN};
            progress_all((end *[]){&client}, 1);
            again = poll(&waiting, 1, 0) == 1;
        }
    }

    kvf_link_close(client.link);
    assert_int_equal(close(listener), 0);
}

/* ---- connections that break and come back ---------------------------------------------------- */

static void a_peer_that_is_not_there_yet_is_told_and_gets_the_message_once_it_is(void **state) {
    (void)state;
    end server, client;
    char endpoint[128], place[OWN_PLACE_BYTES];
    open_end(&server, (kvf_link_options){.listen = own_place(place)}); /* finds a free port */
    (void)snprintf(endpoint, sizeof endpoint, "%s", kvf_link_endpoint(server.link));
    kvf_link_close(server.link);
    open_end(&client, (kvf_link_options){.listen = ""});
    kvf_route route = connect_end(&client, endpoint);
    send_text(&client, route, "early");

    /* A client that looks late at a refused attempt reports that it was not answered; the next attempt gives the
     * reason. */
    work_until(client.broken_count >= 2 && client.broken_status == KVF_E_IO, &client);
    assert_int_equal(client.broken_route, route);
    assert_non_null(strstr(client.broken_detail, endpoint));
    assert_non_null(strstr(client.broken_detail, "refused because nobody listens there"));

    open_end(&server, (kvf_link_options){.listen = endpoint});
    work_until(server.message_count == 1, &server, &client);
    assert_string_equal(server.messages[0].text, "early");
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void end_first_wrong(end *self) {
    const bool refused =
        self->broken_status == KVF_E_IO && strstr(self->broken_detail, "nobody listens there");
    if (!refused)
        self->on_broken = NULL; /* what was said stays, and is not counted again */
}

/* The end of a try may be read only when the next try has ended, too. The clock stands still, so the second one ends
 * before it could have begun. */
static void tries_that_are_refused_at_once_were_answered_however_late_that_is_read(void **state) {
    (void)state;
    uint64_t now_ns = 1000000000;
    const kvf_clock clock = {set_now, &now_ns};
    end client;
    open_end(&client, (kvf_link_options){.listen = "", .clock = &clock});
    (void)connect_end(&client, "tcp://127.0.0.1:1");
    client.on_broken = end_first_wrong;
    work_until(client.broken_count >= 4 || !client.on_broken, &client);
    assert_int_equal(client.broken_status, KVF_E_IO);
    assert_non_null(strstr(client.broken_detail, "refused because nobody listens there"));
    kvf_link_close(client.link);
}

/* No host name has a label of more than 63 letters, so no name server need be asked to know that there is no such
 * host. */
static void a_host_name_that_is_not_known_is_told(void **state) {
    (void)state;
    end client;
    char endpoint[128];
    (void)snprintf(endpoint, sizeof endpoint, "tcp://%064d.test:5555", 0);
    open_end(&client, (kvf_link_options){.listen = ""});
    (void)connect_end(&client, endpoint);
    work_until(client.broken_count >= 3, &client); /* also at later attempts */
    assert_int_equal(client.broken_status, KVF_E_IO);
    assert_non_null(strstr(client.broken_detail, endpoint));
    assert_non_null(strstr(client.broken_detail, "the host name could not be looked up"));
    kvf_link_close(client.link);
}

/* The peer is there: it must not be taken for one that has ended. */
static void without_a_descriptor_for_a_connection_the_peer_may_still_exist(void **state) {
    (void)state;
    end server, client;
    struct rlimit before;
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = ""});
    const int next = dup(STDIN_FILENO); /* all lower numbers are open */
    (void)close(next);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &(struct rlimit){(rlim_t)next, before.rlim_max}), 0);
    kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
    work_until(client.broken_count >= 2, &client);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(client.broken_status, KVF_E_TIMEOUT);
    assert_non_null(strstr(client.broken_detail, "no socket could be made"));
    send_text(&client, route, "late");
    work_until(server.message_count == 1, &server, &client);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void a_path_where_nobody_listens_is_told(void **state) {
    (void)state;
    end client;
    open_end(&client, (kvf_link_options){.listen = ""});
    (void)connect_end(&client, "ipc:///tmp/kvf_link_nobody");
    work_until(client.broken_count >= 3, &client);
    assert_int_equal(client.broken_status, KVF_E_IO);
    assert_non_null(strstr(client.broken_detail, "refused because nobody listens there"));
    kvf_link_close(client.link);
}

static void check_restarts(const char *listen) {
    end server, client;
    char endpoint[128], text[32];
    open_end(&server, (kvf_link_options){.listen = listen});
    (void)snprintf(endpoint, sizeof endpoint, "%s", kvf_link_endpoint(server.link));
    open_end(&client, (kvf_link_options){.listen = ""});
    kvf_route route = connect_end(&client, endpoint);

    for (int life = 0; life < 4; life++) {
        (void)snprintf(text, sizeof text, "life %d", life);
        ask_until_answered(&client, &server, route, text);
        for (uint32_t i = 0; i < client.message_count && i < KEPT_MESSAGES; i++)
            assert_int_equal(client.messages[i].route, route);
        uint32_t before = client.broken_count;
        kvf_link_close(server.link);
        work_until(client.broken_count > before, &client);
        assert_int_equal(client.broken_route, route);
        open_end(&server, (kvf_link_options){.listen = endpoint});
    }
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void a_peer_that_comes_back_on_its_endpoint_is_reached_by_the_same_route(void **state) {
    (void)state;
    char place[OWN_PLACE_BYTES];
    check_restarts(own_place(place));
}

static void the_same_over_ipc(void **state) {
    (void)state;
    char folder[] = "/tmp/kvf_link_XXXXXX", endpoint[64];
    assert_non_null(mkdtemp(folder));
    (void)snprintf(endpoint, sizeof endpoint, "ipc://%s/socket", folder);
    check_restarts(endpoint);
    assert_int_equal(rmdir(folder), 0);
}

static void the_same_over_ipv6(void **state) {
    (void)state;
    end probe;
    if (try_open_end(&probe, (kvf_link_options){.listen = "tcp://[::1]:*"}))
        skip();
    kvf_link_close(probe.link);
    check_restarts("tcp://[::1]:*");
}

static void the_last_messages_of_a_peer_are_heard_before_the_break_is_told(void **state) {
    (void)state;
    end client;
    enum { LAST_WORDS = 200 }; /* more than a connection buffers, or one call reads */
    char endpoint[128], id[16];
    size_t bytes = sizeof endpoint;
    void *zmq = zmq_ctx_new();
    void *server = zmq_socket(zmq, ZMQ_ROUTER);
    assert_int_equal(zmq_bind(server, "tcp://127.0.0.1:*"), 0);
    assert_int_equal(zmq_getsockopt(server, ZMQ_LAST_ENDPOINT, endpoint, &bytes), 0);
    open_end(&client, (kvf_link_options){.listen = ""});
    send_text(&client, connect_end(&client, endpoint), "hello");
    int id_bytes = zmq_recv(server, id, sizeof id, 0);
    assert_int_equal(zmq_recv(server, endpoint, sizeof endpoint, 0), 5);

    for (int i = 0; i < LAST_WORDS; i++) {
        assert_int_equal(zmq_send(server, id, (size_t)id_bytes, ZMQ_SNDMORE), id_bytes);
        assert_int_equal(zmq_send(server, "last words", 10, 0), 10);
    }
    (void)zmq_close(server);
    (void)zmq_ctx_term(zmq); /* returns when the messages have left */
    work_until(client.broken_count > 0, &client);

    assert_int_equal(client.messages_at_break, LAST_WORDS);
    kvf_link_close(client.link);
}

static void hang_up_from_inside(end *self) {
    kvf_link_disconnect(self->link, self->broken_route);
}

static void a_route_may_be_disconnected_while_its_break_is_told(void **state) {
    (void)state;
    end server, client;
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = ""});
    client.on_broken = hang_up_from_inside;
    kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
    send_text(&client, route, "hello");
    work_until(server.message_count == 1, &server, &client);

    kvf_link_close(server.link);
    work_until(client.broken_count == 1, &client);

    assert_fails(kvf_link_send(client.link, route, "x", 1), KVF_E_NOT_FOUND, "route");
    kvf_link_close(client.link);
}

static void connecting_to_an_endpoint_twice_is_one_route_that_is_disconnected_twice(void **state) {
    (void)state;
    end server, client;
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = ""});
    const char *endpoint = kvf_link_endpoint(server.link);

    kvf_route first = connect_end(&client, endpoint);
    kvf_route second = connect_end(&client, endpoint);
    assert_int_equal(first, second);
    kvf_link_disconnect(client.link, first);
    send_text(&client, first, "still here");
    work_until(server.message_count == 1, &server, &client);
    kvf_link_disconnect(client.link, first);
    assert_fails(kvf_link_send(client.link, first, "x", 1), KVF_E_NOT_FOUND, "route");

    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

/* Lets the time pass in which a link looks whether more comes over a connection. Whether it looks no more: then what is
 * due is something else. */
static bool is_calm(const end *self, uint64_t *now_ns) {
    const uint64_t due = kvf_link_due(self->link);
    if (due > *now_ns + UINT64_C(10000000))
        return true;
    *now_ns = kvf_max_u64(*now_ns, due);
    return false;
}

static bool has_nothing_due(const end *self, uint64_t *now_ns) {
    return is_calm(self, now_ns) && kvf_link_due(self->link) == UINT64_MAX;
}

/* Makes a client that has sent something, has heard nothing for so long that it dialled a second connection, and then
 * sends something more over both. Gives the routes by which the server knows the connections, the first one first. */
static kvf_route fall_silent(end *server, end *client, uint64_t *now_ns, kvf_route incoming[2]) {
    kvf_route route = connect_end(client, kvf_link_endpoint(server->link));
    send_text(client, route, "first");
    work_until(server->message_count == 1 && is_calm(client, now_ns) &&
                   kvf_link_due(client->link) != UINT64_MAX,
               server, client);
    *now_ns += UINT64_C(2500000000);
    work_until(has_nothing_due(client, now_ns), server, client);
    send_text(client, route, "second");
    work_until(server->message_count == 3, server, client);
    incoming[0] = server->messages[0].route;
    incoming[1] = server->messages[server->messages[1].route == incoming[0] ? 2 : 1].route;
    assert_int_not_equal(incoming[0], incoming[1]);
    return route;
}

/* When an answer comes over one of two connections, that one stays: all later messages go over it alone. */
static void answer_over(uint32_t which) {
    uint64_t now_ns = kvf_now(&kvf_monotonic);
    const kvf_clock clock = {set_now, &now_ns};
    end server, client;
    kvf_route incoming[2];
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = "", .clock = &clock});
    kvf_route route = fall_silent(&server, &client, &now_ns, incoming);

    send_text(&server, incoming[which], "answer");
    work_until(client.message_count == 1 && kvf_link_count(server.link).now == 1, &server, &client);
    assert_int_equal(client.messages[0].route, route);
    send_text(&client, route, "third");
    send_text(&client, route, "fourth");
    work_until(server.message_count == 5, &server, &client);

    assert_int_equal(server.messages[3].route, incoming[which]);
    assert_string_equal(server.messages[4].text, "fourth");
    assert_true(kvf_link_has_ended(server.link, incoming[!which]));
    assert_int_equal(client.broken_count, 0);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void a_peer_that_was_only_busy_keeps_the_connection_that_it_knows_us_by(void **state) {
    (void)state;
    answer_over(0);
}

static void a_second_connection_takes_the_place_of_one_that_hangs_and_nobody_is_told(void **state) {
    (void)state;
    answer_over(1);
}

static void where_one_of_two_connections_ends_the_other_goes_on(void **state) {
    (void)state;
    uint64_t now_ns = kvf_now(&kvf_monotonic);
    const kvf_clock clock = {set_now, &now_ns};
    end server, client;
    kvf_route incoming[2];
    open_end(&server, (kvf_link_options){.listen = NULL, .max_connections = 2});
    open_end(&client, (kvf_link_options){.listen = "", .clock = &clock});
    kvf_route route = fall_silent(&server, &client, &now_ns, incoming);

    send_text(&client, route, "over both");
    work_until(server.message_count == 5, &server, &client);
    /* A third connection: of the two strangers before it, the one that has been silent for longest is closed. */
    end other;
    open_end(&other, (kvf_link_options){.listen = ""});
    kvf_route third = connect_end(&other, kvf_link_endpoint(server.link));
    send_text(&other, third, "other");
    work_until(kvf_link_count(server.link).closed == 1, &server, &client, &other);
    send_text(&client, route, "still here");
    work_until(has_message(&server, "still here"), &server, &client, &other);
    assert_true(client.broken_count <= 1);
    kvf_link_close(other.link);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

/* The descriptor of the only connection of this process to a port of 127.0.0.1. */
static int connection_to(const char *endpoint) {
    const uint16_t port = htons((uint16_t)strtoul(strrchr(endpoint, ':') + 1, NULL, 10));
    int found = -1;
    for (int fd = 0; fd < 1024; fd++) {
        struct sockaddr_in peer = {0};
        socklen_t bytes = sizeof peer;
        if (getpeername(fd, (struct sockaddr *)&peer, &bytes) || peer.sin_family != AF_INET ||
            peer.sin_port != port)
            continue;
        assert_int_equal(found, -1);
        found = fd;
    }
    assert_true(found >= 0);
    return found;
}

/* Nothing has come over either. The end is told, as messages may be lost with it. */
static void where_the_first_of_two_connections_ends_the_second_takes_its_place(void **state) {
    (void)state;
    uint64_t now_ns = kvf_now(&kvf_monotonic);
    const kvf_clock clock = {set_now, &now_ns};
    end server, client;
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = "", .clock = &clock});
    kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
    send_text(&client, route, "first");
    work_until(server.message_count == 1 && is_calm(&client, &now_ns), &server, &client);
    const int first = connection_to(kvf_link_endpoint(server.link));
    now_ns += UINT64_C(2500000000);
    work_until(has_nothing_due(&client, &now_ns) && kvf_link_count(server.link).now == 2, &server, &client);
    assert_int_equal(shutdown(first, SHUT_RDWR), 0);
    work_until(client.broken_count == 1 && kvf_link_count(server.link).now == 1, &server, &client);
    assert_int_equal(client.broken_route, route);
    send_text(&client, route, "over the second");
    work_until(server.message_count == 2, &server, &client);
    assert_int_not_equal(server.messages[1].route, server.messages[0].route);
    send_text(&server, server.messages[1].route, "answer");
    work_until(client.message_count == 1, &server, &client);
    assert_int_equal(client.messages[0].route, route);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

/* Half of them. */
static void there_are_as_many_outgoing_connections_as_descriptors_allow(void **state) {
    (void)state;
    end client;
    struct rlimit before, few;
    kvf_route route;
    char endpoint[64];
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    open_end(&client, (kvf_link_options){.listen = ""});
    few = before;
    few.rlim_cur = 128;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    for (uint32_t i = 1; i <= 65; i++) {
        (void)snprintf(endpoint, sizeof endpoint, "tcp://127.0.0.1:%u", i);
        const kvf_status status = kvf_link_connect(client.link, endpoint, NULL, &route);
        if (i < 65)
            assert_ok(status);
        else
            assert_fails(status, KVF_E_LIMIT,
                         "there are 64 connections, as many as the process's descriptors allow");
    }
    kvf_link_disconnect(client.link, route); /* the last that was made */
    assert_ok(kvf_link_connect(client.link, endpoint, NULL, &route));
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    kvf_link_close(client.link);
}

static void a_connection_over_which_an_answer_came_stays_however_long_nothing_is_said(void **state) {
    (void)state;
    uint64_t now_ns = kvf_now(&kvf_monotonic);
    const kvf_clock clock = {set_now, &now_ns};
    end server, client;
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = "", .clock = &clock});
    server.answers = true;
    kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));

    send_text(&client, route, "first");
    work_until(client.message_count == 1, &server, &client);
    now_ns += UINT64_C(60000000000);
    work_until(has_nothing_due(&client, &now_ns), &server, &client);
    send_text(&client, route, "second");
    work_until(client.message_count == 2, &server, &client);

    assert_int_equal(server.messages[0].route, server.messages[1].route);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void a_new_connection_is_not_blamed_for_the_end_of_the_one_before(void **state) {
    (void)state;
    end server, client;
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = ""});
    server.answers = true;
    kvf_route previous = 0;
    for (uint32_t i = 0; i < 40; i++) {
        kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
        assert_int_not_equal(route, previous);
        uint32_t before = client.message_count;
        send_text(&client, route, "hello");
        work_until(client.message_count == before + 1, &server, &client);
        assert_int_equal(client.messages[i].route, route);
        kvf_link_disconnect(client.link, route);
        previous = route;
    }
    assert_int_equal(client.broken_count, 0);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

/* ---- where a link may listen ----------------------------------------------------------------- */

static void it_listens_on_loopback_unless_told_otherwise(void **state) {
    (void)state;
    end self;
    open_end(&self, (kvf_link_options){.listen = NULL});
    assert_memory_equal(kvf_link_endpoint(self.link), "tcp://127.0.0.1:", 16);
    kvf_link_close(self.link);
}

static void it_can_listen_nowhere(void **state) {
    (void)state;
    end self;
    open_end(&self, (kvf_link_options){.listen = ""});
    assert_string_equal(kvf_link_endpoint(self.link), "");
    kvf_link_close(self.link);
}

static void localhost_is_loopback(void **state) {
    (void)state;
    end self;
    open_end(&self, (kvf_link_options){.listen = "tcp://localhost:*"});
    assert_memory_equal(kvf_link_endpoint(self.link), "tcp://127.0.0.1:", 16);
    kvf_link_close(self.link);
}

static void beyond_loopback_it_listens_only_when_that_is_asked_for_by_name(void **state) {
    (void)state;
    end self;
    assert_fails(try_open_end(&self, (kvf_link_options){.listen = "tcp://*:*"}), KVF_E_PERMISSION,
                 "tcp://*:*", "public_key", "secret_key", "insecure");
    assert_fails(try_open_end(&self, (kvf_link_options){.listen = "tcp://0.0.0.0:*"}), KVF_E_PERMISSION,
                 "0.0.0.0");
    assert_fails(try_open_end(&self, (kvf_link_options){.listen = "tcp://lo:*"}), KVF_E_PERMISSION, "lo");
    assert_fails(try_open_end(&self, (kvf_link_options){.listen = "tcp://10.1.2.3:80"}), KVF_E_PERMISSION,
                 "10.1.2.3");
    open_end(&self, (kvf_link_options){.listen = "tcp://*:*", .insecure = true});
    assert_memory_equal(kvf_link_endpoint(self.link), "tcp://0.0.0.0:", 14);
    kvf_link_close(self.link);
}

static void an_address_in_use_is_named(void **state) {
    (void)state;
    end first, second;
    char endpoint[128];
    open_end(&first, (kvf_link_options){.listen = NULL});
    (void)snprintf(endpoint, sizeof endpoint, "%s", kvf_link_endpoint(first.link));

    assert_fails(try_open_end(&second, (kvf_link_options){.listen = endpoint}), KVF_E_EXISTS, endpoint);
    kvf_link_close(first.link);
}

static void an_ipc_path_in_use_or_of_a_file_is_left_alone(void **state) {
    (void)state;
    end first, second;
    char endpoint[128], folder[] = "/tmp/kvf_link_XXXXXX", path[64];
    struct stat found;
    assert_non_null(mkdtemp(folder));
    (void)snprintf(path, sizeof path, "%s/file", folder);
    (void)snprintf(endpoint, sizeof endpoint, "ipc://%s", path);
    open_end(&first, (kvf_link_options){.listen = endpoint});
    assert_string_equal(kvf_link_endpoint(first.link), endpoint);
    assert_fails(try_open_end(&second, (kvf_link_options){.listen = endpoint}), KVF_E_EXISTS, "in use");
    kvf_link_close(first.link);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    (void)fclose(file);
    assert_fails(try_open_end(&second, (kvf_link_options){.listen = endpoint}), KVF_E_EXISTS,
                 "is not a socket");
    assert_int_equal(stat(path, &found), 0);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(folder), 0);
}

/* Of a process that has stopped, whose queue of connections is full, connecting would wait. */
static void an_ipc_path_whose_owner_accepts_nothing_is_in_use(void **state) {
    (void)state;
    end self;
    char endpoint[128], folder[] = "/tmp/kvf_link_XXXXXX";
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    assert_non_null(mkdtemp(folder));
    (void)snprintf(address.sun_path, sizeof address.sun_path, "%s/socket", folder);
    (void)snprintf(endpoint, sizeof endpoint, "ipc://%s", address.sun_path);
    int owner = socket(AF_UNIX, SOCK_STREAM, 0), waits = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(owner, (const struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(owner, 0), 0);
    assert_int_equal(connect(waits, (const struct sockaddr *)&address, sizeof address), 0);

    assert_fails(try_open_end(&self, (kvf_link_options){.listen = endpoint}), KVF_E_EXISTS, "in use");

    assert_int_equal(close(owner), 0);
    open_end(&self, (kvf_link_options){.listen = endpoint}); /* nobody listens there any more */
    kvf_link_close(self.link);
    assert_int_equal(close(waits), 0);
    (void)unlink(address.sun_path);
    assert_int_equal(rmdir(folder), 0);
}

static void an_address_that_is_not_ours_is_an_error(void **state) {
    (void)state;
    end self;
    assert_fails(try_open_end(&self, (kvf_link_options){.listen = "tcp://192.0.2.1:80", .insecure = true}),
                 KVF_E_INVALID, "192.0.2.1");
}

/* ---- waiting --------------------------------------------------------------------------------- */

static void a_message_ends_the_wait_and_nothing_is_slept_over(void **state) {
    (void)state;
    end server, client;
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = ""});
    client.answers = server.answers = true;
    kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
    send_text(&client, route, "ball");

    /* The ends wait without a limit: a lost signal would hang the test. */
    for (uint32_t i = 0; i < 1000; i++) {
        end *turn = i % 2 ? &client : &server;
        uint32_t before = turn->message_count;
        while (turn->message_count == before) {
            bool more;
            kvf_link_progress(turn->link, &more);
            if (turn->message_count == before && !kvf_link_pending(turn->link))
                wait_for_link(turn->link, UINT64_MAX);
        }
    }
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void waiting_ends_when_it_is_time_to_dial_again(void **state) {
    (void)state;
    end server, client;
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = ""});
    kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
    send_text(&client, route, "hello");
    work_until(server.message_count == 1, &server, &client);
    kvf_link_close(server.link);
    work_until(client.broken_count > 0, &client);

    /* Nothing happens to the client except that its own pause ends. A client that looks late at a refused attempt
     * reports that it was not answered; the next attempt gives the reason. */
    while (client.broken_status != KVF_E_IO) {
        bool more;
        kvf_link_progress(client.link, &more);
        if (!more)
            wait_for_link(client.link, UINT64_MAX);
    }
    kvf_link_close(client.link);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static kvf_status open_and_connect(void *subject) {
    (void)subject;
    end self;
    kvf_route first, second;
    kvf_status status = try_open_end(&self, (kvf_link_options){.listen = ""});
    if (status)
        return status;
    status = kvf_link_connect(self.link, "tcp://127.0.0.1:9", NULL, &first);
    if (!status)
        status = kvf_link_connect(self.link, "tcp://127.0.0.1:10", NULL, &second);
    kvf_link_close(self.link);
    return status;
}

static void without_memory_opening_and_connecting_fail_and_leave_nothing(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    survive_every_refusal(&memory, open_and_connect, NULL);
}

/* ---- many ------------------------------------------------------------------------------------ */

static void a_link_serves_hundreds_of_outgoing_and_incoming_connections(void **state) {
    (void)state;
    enum { COUNT = 200 };
    end hub;
    end *ends[COUNT + 1] = {&hub};
    kvf_route routes[COUNT];
    open_end(&hub, (kvf_link_options){.listen = NULL});
    for (int i = 1; i <= COUNT; i++) {
        ends[i] = calloc(1, sizeof *ends[i]);
        assert_non_null(ends[i]);
        open_end(ends[i], (kvf_link_options){.listen = NULL});
        ends[i]->answers = true;
        routes[i - 1] = connect_end(&hub, kvf_link_endpoint(ends[i]->link));
        send_text(&hub, routes[i - 1], "out");
        send_text(ends[i], connect_end(ends[i], kvf_link_endpoint(hub.link)), "in");
    }
    time_t begun = time(NULL);
    while (hub.message_count < 2 * COUNT && time(NULL) - begun < PATIENCE_S) {
        bool more;
        for (int i = 0; i <= COUNT; i++)
            kvf_link_progress(ends[i]->link, &more);
    }
    assert_int_equal(hub.message_count, 2 * COUNT);
    assert_int_equal(hub.broken_count, 0);
    for (int i = 1; i <= COUNT; i++) {
        kvf_link_close(ends[i]->link);
        free(ends[i]);
    }
    kvf_link_close(hub.link);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_message_arrives_and_its_route_is_good_for_an_answer),
        cmocka_unit_test(bytes_under_way_when_a_link_goes_down_are_sent_again_each_second),
        cmocka_unit_test(both_sides_of_a_pair_may_call_and_routes_in_and_out_never_clash),
        cmocka_unit_test(messages_keep_their_order_and_empty_ones_arrive),
        cmocka_unit_test(a_message_as_large_as_allowed_arrives_and_a_larger_one_is_an_error),
        cmocka_unit_test(what_was_sent_before_a_link_is_closed_arrives),
        cmocka_unit_test(a_route_that_does_not_exist_is_an_error),
        cmocka_unit_test(a_peer_that_reads_nothing_makes_messages_be_dropped_not_kept_for_ever),
        cmocka_unit_test(
            what_is_sent_to_peers_that_read_nothing_takes_bounded_memory_and_others_are_answered),
        cmocka_unit_test(a_peer_that_reads_nothing_is_hung_up_on_if_it_leaves_no_room),
        cmocka_unit_test(a_peer_that_reads_too_little_is_hung_up_on_if_it_leaves_no_room),
        cmocka_unit_test(messages_of_several_frames_and_clients_with_names_are_ignored),
        cmocka_unit_test(a_port_that_speaks_something_else_is_told_and_tried_again),
        cmocka_unit_test(a_peer_that_is_not_there_yet_is_told_and_gets_the_message_once_it_is),
        cmocka_unit_test(tries_that_are_refused_at_once_were_answered_however_late_that_is_read),
        cmocka_unit_test(a_host_name_that_is_not_known_is_told),
        cmocka_unit_test(without_a_descriptor_for_a_connection_the_peer_may_still_exist),
        cmocka_unit_test(a_path_where_nobody_listens_is_told),
        cmocka_unit_test(a_peer_that_comes_back_on_its_endpoint_is_reached_by_the_same_route),
        cmocka_unit_test(the_same_over_ipc),
        cmocka_unit_test(the_same_over_ipv6),
        cmocka_unit_test(the_last_messages_of_a_peer_are_heard_before_the_break_is_told),
        cmocka_unit_test(a_route_may_be_disconnected_while_its_break_is_told),
        cmocka_unit_test(connecting_to_an_endpoint_twice_is_one_route_that_is_disconnected_twice),
        cmocka_unit_test(a_peer_that_was_only_busy_keeps_the_connection_that_it_knows_us_by),
        cmocka_unit_test(a_second_connection_takes_the_place_of_one_that_hangs_and_nobody_is_told),
        cmocka_unit_test(where_one_of_two_connections_ends_the_other_goes_on),
        cmocka_unit_test(where_the_first_of_two_connections_ends_the_second_takes_its_place),
        cmocka_unit_test(there_are_as_many_outgoing_connections_as_descriptors_allow),
        cmocka_unit_test(a_connection_over_which_an_answer_came_stays_however_long_nothing_is_said),
        cmocka_unit_test(a_new_connection_is_not_blamed_for_the_end_of_the_one_before),
        cmocka_unit_test(it_listens_on_loopback_unless_told_otherwise),
        cmocka_unit_test(it_can_listen_nowhere),
        cmocka_unit_test(localhost_is_loopback),
        cmocka_unit_test(beyond_loopback_it_listens_only_when_that_is_asked_for_by_name),
        cmocka_unit_test(an_address_in_use_is_named),
        cmocka_unit_test(an_ipc_path_in_use_or_of_a_file_is_left_alone),
        cmocka_unit_test(an_ipc_path_whose_owner_accepts_nothing_is_in_use),
        cmocka_unit_test(an_address_that_is_not_ours_is_an_error),
        cmocka_unit_test(a_message_ends_the_wait_and_nothing_is_slept_over),
        cmocka_unit_test(waiting_ends_when_it_is_time_to_dial_again),
        cmocka_unit_test_teardown(without_memory_opening_and_connecting_fail_and_leave_nothing,
                                  stop_counting_memory),
        cmocka_unit_test(a_link_serves_hundreds_of_outgoing_and_incoming_connections),
    };
    return cmocka_run_group_tests_name("links", tests, NULL, NULL);
}
