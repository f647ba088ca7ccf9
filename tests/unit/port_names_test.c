/* Host names: they are looked up beside everything else, and again for each connection. */
#include "link_ends.h"
#include "slow_names.h"

/* An endpoint of the server's port at another host. */
static const char *at(const end *server, const char *host, char out[128]) {
    (void)snprintf(out, 128, "tcp://%s%s", host, strrchr(kvf_link_endpoint(server->link), ':'));
    return out;
}

static void a_name_that_takes_long_to_look_up_keeps_nobody_waiting(void **state) {
    (void)state;
    end server, client;
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = ""});
    const kvf_route route = connect_end(&client, kvf_link_endpoint(server.link));
    ask_until_answered(&client, &server, route, "before");
    const kvf_route slow = connect_end(&client, "tcp://slow.test:5555");
    const uint64_t begun = kvf_now(&kvf_monotonic);
    for (uint32_t i = 0; i < 20; i++) {
        (void)usleep(10000);
        ask_until_answered(&client, &server, route, "meanwhile");
    }
    assert_true(kvf_now(&kvf_monotonic) - begun < 5000000000u); /* the name takes ten seconds */
    assert_int_equal(client.broken_count, 0);
    lets_go = true;
    work_until(client.broken_count > 0, &server, &client);
    assert_int_equal(client.broken_route, slow);
    assert_int_equal(client.broken_status, KVF_E_IO);
    assert_non_null(
        strstr(client.broken_detail, "tcp://slow.test:5555: no connection: the host name could not"));
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

/* The thread that looks it up is not waited for. */
static void a_link_closes_while_a_name_is_looked_up(void **state) {
    (void)state;
    end client;
    lets_go = false;
    open_end(&client, (kvf_link_options){.listen = ""});
    const kvf_route slow = connect_end(&client, "tcp://slow.test:5555"),
                    other = connect_end(&client, "tcp://slow.test:5556");
    send_text(&client, slow, "is dropped");
    kvf_link_disconnect(client.link, other);
    const uint64_t begun = kvf_now(&kvf_monotonic);
    kvf_link_close(client.link);
    assert_true(kvf_now(&kvf_monotonic) - begun < 5000000000u);
    lets_go = true;
}

static void a_peer_is_reached_by_its_name(void **state) {
    (void)state;
    end server, client;
    char place[128];
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = ""});
    ask_until_answered(&client, &server, connect_end(&client, at(&server, "here.test", place)), "question");
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void a_name_is_looked_up_again_for_each_try(void **state) {
    (void)state;
    end server, client;
    char place[128];
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, (kvf_link_options){.listen = ""});
    ask_until_answered(&client, &server, connect_end(&client, at(&server, "moves.test", place)), "question");
    assert_int_equal(asked, 3);
    assert_true(client.broken_count >= 2);
    assert_non_null(strstr(client.broken_detail, place));
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_name_that_takes_long_to_look_up_keeps_nobody_waiting),
        cmocka_unit_test(a_link_closes_while_a_name_is_looked_up),
        cmocka_unit_test(a_peer_is_reached_by_its_name),
        cmocka_unit_test(a_name_is_looked_up_again_for_each_try),
    };
    return cmocka_run_group_tests_name("names of hosts", tests, NULL, NULL);
}
