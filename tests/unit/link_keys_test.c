/* Links with keys: which clients get in, which are told why not, and texts that are no keys. */
#include <zmq.h>

#include "link_ends.h"

typedef struct keys {
    char open[KVF_KEY_CHARACTERS + 1];
    char secret[KVF_KEY_CHARACTERS + 1];
} keys;

static keys make_keys(void) {
    keys made = {.open = ""};
    assert_ok(kvf_link_make_keys(made.open, made.secret));
    return made;
}

static kvf_link_options with_keys(const keys *own, const char *listen) {
    return (kvf_link_options){.listen = listen, .public_key = own->open, .secret_key = own->secret};
}

static kvf_route connect_to(end *self, const char *endpoint, const char *key) {
    kvf_route route = 0;
    assert_ok(kvf_link_connect(self->link, endpoint, key, &route));
    return route;
}

/* ---- who gets in ----------------------------------------------------------------------------- */

static void with_keys_messages_go_there_and_back(void **state) {
    (void)state;
    end server, client;
    keys of_server = make_keys(), of_client = make_keys();
    open_end(&server, with_keys(&of_server, NULL));
    open_end(&client, with_keys(&of_client, ""));
    server.answers = true;
    kvf_route route = connect_to(&client, kvf_link_endpoint(server.link), of_server.open);

    send_text(&client, route, "question");
    work_until(client.message_count == 1, &server, &client);

    assert_string_equal(client.messages[0].text, "question");
    /* Each end knows the other's key, even if everyone may connect. */
    uint8_t key[KVF_KEY_BYTES];
    assert_ok(kvf_link_read_key("key", of_client.open, key));
    assert_memory_equal(server.messages[0].key, key, sizeof key);
    assert_ok(kvf_link_read_key("key", of_server.open, key));
    assert_memory_equal(client.messages[0].key, key, sizeof key);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void keys_allow_to_listen_beyond_loopback(void **state) {
    (void)state;
    end server;
    keys of_server = make_keys();
    open_end(&server, with_keys(&of_server, "tcp://*:*"));
    kvf_link_close(server.link);
}

static void a_key_in_the_allow_list_gets_in_and_another_is_told_why_not(void **state) {
    (void)state;
    end server, friend, stranger;
    keys of_server = make_keys(), of_friend = make_keys(), of_stranger = make_keys(), of_other = make_keys();
    const char *allowed[] = {of_other.open, of_friend.open};
    kvf_link_options options = with_keys(&of_server, NULL);
    options.allowed_keys = allowed;
    options.allowed_key_count = 2;
    open_end(&server, options);
    open_end(&friend, with_keys(&of_friend, ""));
    open_end(&stranger, with_keys(&of_stranger, ""));
    kvf_route refused = connect_to(&stranger, kvf_link_endpoint(server.link), of_server.open);
    send_text(&stranger, refused, "let me in");
    send_text(&friend, connect_to(&friend, kvf_link_endpoint(server.link), of_server.open), "it is me");

    /* The stranger is refused again and again: it goes on trying. */
    work_until(stranger.broken_count >= 3 && server.message_count == 1, &server, &friend, &stranger);

    assert_string_equal(server.messages[0].text, "it is me");
    assert_int_equal(stranger.broken_route, refused);
    assert_int_equal(stranger.broken_status, KVF_E_PERMISSION);
    assert_non_null(strstr(stranger.broken_detail, "does not allow this end's key"));
    kvf_link_close(stranger.link);
    kvf_link_close(friend.link);
    kvf_link_close(server.link);
}

/* Sends a message that the server must drop, and then enough of another end's for it to come first if it came. */
static void assert_unheard(end *server, end *withdrawn, kvf_route route, end *other, kvf_route others) {
    const uint32_t heard = server->message_count;
    server->listened_for = "nobody hears this"; /* counted even behind more messages than are kept */
    send_text(withdrawn, route, "nobody hears this");
    for (uint32_t i = 1; i <= 20; i++) {
        send_text(other, others, "third");
        work_until(server->message_count >= heard + i, server, withdrawn, other);
    }
    assert_int_equal(server->heard_count, 0);
}

static void a_key_that_is_allowed_later_gets_in_and_one_that_is_withdrawn_is_not_heard(void **state) {
    (void)state;
    end server, early, late;
    keys of_server = make_keys(), of_early = make_keys(), of_late = make_keys();
    const char *allowed[] = {of_early.open};
    kvf_link_options options = with_keys(&of_server, NULL);
    options.allowed_keys = allowed;
    options.allowed_key_count = 1;
    open_end(&server, options);
    open_end(&early, with_keys(&of_early, ""));
    open_end(&late, with_keys(&of_late, ""));
    server.answers = true;
    kvf_route of = connect_to(&early, kvf_link_endpoint(server.link), of_server.open);
    kvf_route lates = connect_to(&late, kvf_link_endpoint(server.link), of_server.open);
    send_text(&early, of, "first");
    work_until(early.message_count == 1 && late.broken_count > 0, &server, &early, &late);

    assert_ok(kvf_link_allow(server.link, of_late.open, true));
    for (uint32_t round = 0; late.message_count == 0;
         round++) { /* messages between two attempts are dropped */
        assert_true(round < 100000);
        if (round % 100 == 0)
            send_text(&late, lates, "second");
        progress_all((end *[]){&server, &early, &late}, 3);
    }

    assert_ok(kvf_link_allow(server.link, of_early.open, false));
    assert_unheard(&server, &early, of, &late, lates);
    server.listened_for = "heard again";
    assert_ok(kvf_link_allow(server.link, of_early.open, true));
    for (uint32_t round = 0; server.heard_count == 0; round++) {
        assert_true(round < 100000); /* if the connection broke on a busy machine, another serves */
        if (round % 100 == 0)
            send_text(&early, of, "heard again");
        progress_all((end *[]){&server, &early, &late}, 3);
    }
    /* What `early` sent while it was not allowed has been dropped, unless it arrived only after `early` was allowed
     * again. */

    assert_ok(kvf_link_allow(server.link, of_early.open, true));
    assert_fails(kvf_link_allow(server.link, of_server.open, false), KVF_E_NOT_FOUND, of_server.open);
    assert_fails(kvf_link_allow(server.link, "short", true), KVF_E_INVALID, "public_key");
    assert_fails(kvf_link_allow(late.link, of_early.open, true), KVF_E_INVALID, "everyone");
    kvf_link_close(late.link);
    kvf_link_close(early.link);
    kvf_link_close(server.link);
}

/* As where two engines are granted to one key. */
static void a_key_that_is_listed_twice_is_withdrawn_as_one(void **state) {
    (void)state;
    end server, twice, other;
    keys of_server = make_keys(), of_twice = make_keys(), of_other = make_keys();
    const char *allowed[] = {of_twice.open, of_other.open, of_twice.open};
    kvf_link_options options = with_keys(&of_server, NULL);
    options.allowed_keys = allowed;
    options.allowed_key_count = 3;
    open_end(&server, options);
    open_end(&twice, with_keys(&of_twice, ""));
    open_end(&other, with_keys(&of_other, ""));
    kvf_route of = connect_to(&twice, kvf_link_endpoint(server.link), of_server.open);
    kvf_route others = connect_to(&other, kvf_link_endpoint(server.link), of_server.open);
    send_text(&twice, of, "first");
    work_until(server.message_count == 1, &server, &twice, &other);

    assert_ok(kvf_link_allow(server.link, of_twice.open, false));
    assert_unheard(&server, &twice, of, &other, others);
    assert_fails(kvf_link_allow(server.link, of_twice.open, false), KVF_E_NOT_FOUND, of_twice.open);
    kvf_link_close(other.link);
    kvf_link_close(twice.link);
    kvf_link_close(server.link);
}

static void the_wrong_key_of_the_other_end_is_told_and_the_right_one_works_beside_it(void **state) {
    (void)state;
    end server, client;
    keys of_server = make_keys(), of_client = make_keys(), of_another = make_keys();
    open_end(&server, with_keys(&of_server, NULL));
    open_end(&client, with_keys(&of_client, ""));
    const char *endpoint = kvf_link_endpoint(server.link);
    kvf_route wrong = connect_to(&client, endpoint, of_another.open);
    kvf_route right = connect_to(&client, endpoint, of_server.open);
    assert_int_not_equal(wrong, right);

    send_text(&client, wrong, "wrong");
    work_until(client.broken_count >= 3, &server, &client);
    assert_int_equal(client.broken_route, wrong);
    assert_non_null(strstr(client.broken_detail, endpoint));
    send_text(&client, right, "right");
    work_until(server.message_count == 1, &server, &client);

    assert_string_equal(server.messages[0].text, "right");
    assert_int_equal(client.broken_route, wrong);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void a_peer_without_keys_does_not_get_in_and_is_told(void **state) {
    (void)state;
    end server, client;
    keys of_server = make_keys();
    open_end(&server, with_keys(&of_server, NULL));
    open_end(&client, (kvf_link_options){.listen = ""});
    send_text(&client, connect_end(&client, kvf_link_endpoint(server.link)), "in the clear");

    work_until(client.broken_count >= 3, &server, &client);

    assert_int_equal(server.message_count, 0);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void a_peer_that_does_not_encrypt_hears_nothing_from_us(void **state) {
    (void)state;
    end server, client;
    keys of_server = make_keys(), of_client = make_keys();
    open_end(&server, (kvf_link_options){.listen = NULL});
    open_end(&client, with_keys(&of_client, ""));
    send_text(&client, connect_to(&client, kvf_link_endpoint(server.link), of_server.open), "secret");

    work_until(client.broken_count >= 3, &server, &client);

    assert_int_equal(server.message_count, 0);
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

static void a_peer_that_comes_back_with_its_key_is_reached_by_the_same_route(void **state) {
    (void)state;
    end server, client;
    keys of_server = make_keys(), of_client = make_keys();
    const char *allowed[] = {of_client.open};
    char endpoint[128], text[32], place[OWN_PLACE_BYTES];
    kvf_link_options options = with_keys(&of_server, own_place(place));
    options.allowed_keys = allowed;
    options.allowed_key_count = 1;
    open_end(&server, options);
    (void)snprintf(endpoint, sizeof endpoint, "%s", kvf_link_endpoint(server.link));
    options.listen = endpoint;
    open_end(&client, with_keys(&of_client, ""));
    kvf_route route = connect_to(&client, endpoint, of_server.open);

    for (int life = 0; life < 3; life++) {
        (void)snprintf(text, sizeof text, "life %d", life);
        ask_until_answered(&client, &server, route, text);
        uint32_t before = client.broken_count;
        kvf_link_close(server.link);
        work_until(client.broken_count > before, &client);
        open_end(&server, options);
    }
    kvf_link_close(client.link);
    kvf_link_close(server.link);
}

/* ---- texts that are no keys ---------------------------------------------------------------------- */

static void two_pairs_of_keys_differ(void **state) {
    (void)state;
    keys first = make_keys(), second = make_keys();
    assert_int_equal(strlen(first.open), KVF_KEY_CHARACTERS);
    assert_int_equal(strlen(first.secret), KVF_KEY_CHARACTERS);
    assert_string_not_equal(first.open, second.open);
    assert_string_not_equal(first.secret, second.secret);
    assert_string_not_equal(first.open, first.secret);
}

static void one_key_without_the_other_is_an_error(void **state) {
    (void)state;
    end self;
    keys own = make_keys();
    assert_fails(try_open_end(&self, (kvf_link_options){.public_key = own.open}), KVF_E_INVALID,
                 "secret_key");
    assert_fails(try_open_end(&self, (kvf_link_options){.secret_key = own.secret}), KVF_E_INVALID,
                 "public_key");
}

static void keys_that_do_not_belong_together_are_an_error(void **state) {
    (void)state;
    end self;
    keys own = make_keys(), other = make_keys();
    assert_fails(try_open_end(&self, (kvf_link_options){.public_key = own.open, .secret_key = other.secret}),
                 KVF_E_INVALID, "belong");
}

static void a_text_that_is_no_key_is_an_error_and_not_shown(void **state) {
    (void)state;
    end self;
    keys own = make_keys();
    const char *allowed[] = {own.open, "short"};
    kvf_link_options options = with_keys(&own, NULL);
    kvf_route route;

    options.secret_key = "hunter2";
    assert_fails(try_open_end(&self, options), KVF_E_INVALID, "secret_key", "7", "40");
    assert_null(strstr(kvf_error_detail(), "hunter2"));
    options.secret_key = "\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\";
    assert_fails(try_open_end(&self, options), KVF_E_INVALID, "secret_key", "Z85");
    options.secret_key = own.secret;
    options.public_key = "";
    assert_fails(try_open_end(&self, options), KVF_E_INVALID, "public_key");
    options.public_key = own.open;
    options.allowed_keys = allowed;
    options.allowed_key_count = 2;
    assert_fails(try_open_end(&self, options), KVF_E_INVALID, "allowed_keys[1]", "5", "40");
    options.allowed_keys = NULL;
    assert_fails(try_open_end(&self, options), KVF_E_INVALID, "allowed_keys");
    options.allowed_key_count = 0;
    open_end(&self, options);
    assert_fails(kvf_link_connect(self.link, "tcp://127.0.0.1:9", "not a key", &route), KVF_E_INVALID,
                 "the peer's public_key has 9 characters");
    kvf_link_close(self.link);
}

static void an_allow_list_without_keys_is_an_error(void **state) {
    (void)state;
    end self;
    keys own = make_keys();
    const char *allowed[] = {own.open};
    assert_fails(try_open_end(&self, (kvf_link_options){.allowed_keys = allowed, .allowed_key_count = 1}),
                 KVF_E_INVALID, "public_key");
}

static void encrypted_and_plain_do_not_connect(void **state) {
    (void)state;
    end plain, encrypted;
    keys own = make_keys(), other = make_keys();
    kvf_route route;
    open_end(&plain, (kvf_link_options){.listen = ""});
    open_end(&encrypted, with_keys(&own, ""));

    assert_fails(kvf_link_connect(plain.link, "tcp://127.0.0.1:9", other.open, &route), KVF_E_PERMISSION,
                 "tcp://127.0.0.1:9: a public key is given for it, but this side has no keys");
    assert_fails(kvf_link_connect(encrypted.link, "tcp://127.0.0.1:9", NULL, &route), KVF_E_PERMISSION,
                 "tcp://127.0.0.1:9: no public key is given for it");
    assert_fails(kvf_link_connect(encrypted.link, "tcp://127.0.0.1:9", "", &route), KVF_E_PERMISSION,
                 "tcp://127.0.0.1:9: no public key is given for it");
    kvf_link_close(plain.link);
    kvf_link_close(encrypted.link);
}

int main(void) {
    if (!zmq_has("curve")) {
        print_message("this ZeroMQ has no CURVE\n");
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(with_keys_messages_go_there_and_back),
        cmocka_unit_test(keys_allow_to_listen_beyond_loopback),
        cmocka_unit_test(a_key_in_the_allow_list_gets_in_and_another_is_told_why_not),
        cmocka_unit_test(a_key_that_is_allowed_later_gets_in_and_one_that_is_withdrawn_is_not_heard),
        cmocka_unit_test(a_key_that_is_listed_twice_is_withdrawn_as_one),
        cmocka_unit_test(the_wrong_key_of_the_other_end_is_told_and_the_right_one_works_beside_it),
        cmocka_unit_test(a_peer_without_keys_does_not_get_in_and_is_told),
        cmocka_unit_test(a_peer_that_does_not_encrypt_hears_nothing_from_us),
        cmocka_unit_test(a_peer_that_comes_back_with_its_key_is_reached_by_the_same_route),
        cmocka_unit_test(two_pairs_of_keys_differ),
        cmocka_unit_test(one_key_without_the_other_is_an_error),
        cmocka_unit_test(keys_that_do_not_belong_together_are_an_error),
        cmocka_unit_test(a_text_that_is_no_key_is_an_error_and_not_shown),
        cmocka_unit_test(an_allow_list_without_keys_is_an_error),
        cmocka_unit_test(encrypted_and_plain_do_not_connect),
    };
    return cmocka_run_group_tests_name("keys of links", tests, NULL, NULL);
}
