/* Links of threads that take signals. */
#include "link_ends.h"
#include "port/sockets.h"
#include "signals.h"

/* A handshake that the allow-list left half answered once kept everybody out from then on. */
static void keys_are_checked_though_signals_end_calls(void **state) {
    (void)state;
    for (unsigned phase = 0; phase < SIGNALS_PHASES; phase++) {
        end server, clients[3];
        char open[2][KVF_KEY_CHARACTERS + 1], secret[2][KVF_KEY_CHARACTERS + 1];
        for (int i = 0; i < 2; i++)
            assert_ok(kvf_link_make_keys(open[i], secret[i]));
        const char *allowed[] = {open[1]};
        signals_begin(phase);
        open_end(&server, (kvf_link_options){.public_key = open[0],
                                             .secret_key = secret[0],
                                             .allowed_keys = allowed,
                                             .allowed_key_count = 1});
        server.answers = true;
        for (size_t i = 0; i < COUNT_OF(clients); i++) {
            kvf_route route = 0;
            open_end(&clients[i],
                     (kvf_link_options){.listen = "", .public_key = open[1], .secret_key = secret[1]});
            assert_ok(kvf_link_connect(clients[i].link, kvf_link_endpoint(server.link), open[0], &route));
            send_text(&clients[i], route, "hello");
            work_until(clients[i].message_count == 1, &server, &clients[i]);
        }
        for (size_t i = 0; i < COUNT_OF(clients); i++)
            kvf_link_close(clients[i].link);
        kvf_link_close(server.link);
    }
}

static void a_line_is_hung_up_though_signals_end_calls(void **state) {
    (void)state;
    for (unsigned phase = 0; phase < SIGNALS_PHASES; phase++) {
        end server, client;
        open_end(&server, (kvf_link_options){0});
        open_end(&client, (kvf_link_options){.listen = ""});
        kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
        send_text(&client, route, "hello");
        work_until(server.message_count == 1, &server, &client);
        assert_int_equal(kvf_link_count(server.link).now, 1);
        signals_begin(phase);
        kvf_link_disconnect(client.link, route);
        signals_end();
        work_until(kvf_link_count(server.link).now == 0, &server, &client);
        assert_int_equal(kvf_link_count(server.link).closed, 0); /* as it closes those that stay silent */
        kvf_link_close(client.link);
        kvf_link_close(server.link);
    }
}

/* Receiving the first message takes the signal for both from the socket's descriptor, so that only the socket tells of the
 * second. */
static void a_message_is_seen_though_a_signal_ends_the_look(void **state) {
    (void)state;
    void *zmq = zmq_ctx_new(), *ends[2];
    zmq_msg_t frame;
    for (int i = 0; i < 2; i++)
        assert_non_null(ends[i] = zmq_socket(zmq, ZMQ_PAIR));
    assert_int_equal(kvf_zmq_bind(ends[0], "inproc://ends"), 0);
    assert_int_equal(kvf_zmq_connect(ends[1], "inproc://ends"), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(kvf_zmq_send(ends[1], "word", 4, 0), 0);
    (void)zmq_msg_init(&frame);
    assert_true(kvf_zmq_receive_frame(ends[0], &frame));
    (void)zmq_msg_close(&frame);
    for (unsigned phase = 0; phase < SIGNALS_PHASES; phase++) {
        signals_begin(phase);
        assert_true(kvf_zmq_readable(ends[0]));
    }
    signals_end();
    for (int i = 0; i < 2; i++)
        (void)zmq_close(ends[i]);
    (void)zmq_ctx_term(zmq);
}

/* Also of a test that has failed. */
static int no_more_signals(void **state) {
    (void)state;
    signals_end();
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(keys_are_checked_though_signals_end_calls, no_more_signals),
        cmocka_unit_test_teardown(a_message_is_seen_though_a_signal_ends_the_look, no_more_signals),
        cmocka_unit_test_teardown(a_line_is_hung_up_though_signals_end_calls, no_more_signals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
