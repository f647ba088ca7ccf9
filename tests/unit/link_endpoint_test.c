/* Endpoints: which texts are endpoints, which are loopback, and which are refused before ZeroMQ sees them. */
#include "link/link_endpoint.h"

#include <stdio.h>

#include "interfaces.h"
#include "shapes.h"

static kvf_endpoint listening(const char *text) {
    kvf_endpoint read;
    assert_ok(kvf_endpoint_to_listen(text, &read));
    return read;
}

static kvf_endpoint connecting(const char *text) {
    kvf_endpoint read;
    assert_ok(kvf_endpoint_to_connect(text, &read));
    return read;
}

static void addresses_of_this_machine_are_loopback(void **state) {
    (void)state;
    static const char *const loopback[] = {
        "tcp://127.0.0.1:*",          "tcp://127.1.2.3:5555",        "tcp://localhost:*", "tcp://[::1]:*",
        "tcp://[0:0:0:0:0:0:0:1]:80", "tcp://[::ffff:127.0.0.1]:80", "ipc:///tmp/socket", "ipc://@abstract"};
    for (size_t i = 0; i < COUNT_OF(loopback); i++) {
        if (!listening(loopback[i]).loopback)
            fail_msg("%s is loopback", loopback[i]);
    }
}

static void all_else_is_beyond_it(void **state) {
    (void)state;
    static const char *const beyond[] = {"tcp://*:*",
                                         "tcp://0.0.0.0:*",
                                         "tcp://[::]:*",
                                         "tcp://lo:*",
                                         "tcp://eth0:5555",
                                         "tcp://10.0.0.1:5555",
                                         "tcp://128.0.0.1:5555",
                                         "tcp://127.1:5555",
                                         "tcp://127.0.0.1.example.org:80",
                                         "tcp://localhost.example.org:80",
                                         "tcp://[::2]:80",
                                         "tcp://[fe80::1%eth0]:80",
                                         "tcp://[::ffff:10.0.0.1]:80",
                                         "tcp://[1::ffff:127.0.0.1]:80"};
    for (size_t i = 0; i < COUNT_OF(beyond); i++) {
        if (listening(beyond[i]).loopback)
            fail_msg("%s is not loopback", beyond[i]);
    }
}

static void zeromq_gets_an_address_for_localhost_and_knows_where_the_port_is(void **state) {
    (void)state;
    kvf_endpoint read = connecting("tcp://localhost:5555");
    assert_string_equal(read.text, "tcp://127.0.0.1:5555");
    assert_string_equal(read.text + read.port_at, "5555");
    assert_false(read.ipv6);

    read = connecting("tcp://[fe80::1%eth0]:80");
    assert_string_equal(read.text, "tcp://[fe80::1%eth0]:80");
    assert_string_equal(read.text + read.port_at, "80");
    assert_true(read.ipv6);

    read = connecting("ipc:///tmp/socket");
    assert_string_equal(read.text, "ipc:///tmp/socket");
    assert_int_equal(read.port_at, 0);
}

static void a_text_that_is_no_endpoint_is_refused_for_both_uses(void **state) {
    (void)state;
    static const char *const wrong[] = {"inproc://zeromq.zap.01",
                                        "udp://127.0.0.1:1",
                                        "pgm://eth0;239.192.1.1:5555",
                                        "TCP://127.0.0.1:1",
                                        "127.0.0.1:1",
                                        "tcp:127.0.0.1:1",
                                        "tcp://",
                                        "tcp://:1",
                                        "tcp://127.0.0.1",
                                        "tcp://127.0.0.1:",
                                        "tcp://127.0.0.1:http",
                                        "tcp://127.0.0.1:-1",
                                        "tcp://127.0.0.1:+1",
                                        "tcp://127.0.0.1:0x50",
                                        "tcp://127.0.0.1:0080",
                                        "tcp://127.0.0.1:80 ",
                                        "tcp://127.0.0.1:80/path",
                                        "tcp://127.0.0.1:8000000",
                                        "tcp://10.0.0.1:0;127.0.0.1:80",
                                        "tcp://-host:80",
                                        "tcp://.host:80",
                                        "tcp://user@host:80",
                                        "tcp://::1:80",
                                        "tcp://[::1:80",
                                        "tcp://[]:80",
                                        "tcp://[:80",
                                        "tcp://[::1]80",
                                        "tcp://[::1]x:80",
                                        "tcp://[127.0.0.1]:80",
                                        "tcp://[fe80::1%]:80",
                                        "tcp://[fe80::1%a;b]:80",
                                        "tcp://[::1%lo%lo]:80",
                                        "tcp://ho\nst:80",
                                        "tcp://h\xC3\xB6st:80",
                                        "ipc://",
                                        "ipc://@",
                                        "ipc://*",
                                        "ipc://* "};
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        kvf_endpoint read = {.port_at = 77};
        if (kvf_endpoint_to_listen(wrong[i], &read) != KVF_E_INVALID)
            fail_msg("listening on \"%s\"", wrong[i]);
        if (kvf_endpoint_to_connect(wrong[i], &read) != KVF_E_INVALID)
            fail_msg("connecting to \"%s\"", wrong[i]);
        assert_int_equal(read.port_at, 77);
    }
}

static void wildcards_are_for_listening_only(void **state) {
    (void)state;
    static const char *const wild[] = {
        "tcp://127.0.0.1:*",         "tcp://*:80",    "tcp://0.0.0.0:80", "tcp://[::]:80",
        "tcp://[::ffff:0.0.0.0]:80", "tcp://[::1]:*", "tcp://*:*"};
    for (size_t i = 0; i < COUNT_OF(wild); i++) {
        kvf_endpoint read;
        (void)listening(wild[i]);
        if (kvf_endpoint_to_connect(wild[i], &read) != KVF_E_INVALID)
            fail_msg("connecting to \"%s\"", wild[i]);
    }
}

static void ports_are_1_to_65535(void **state) {
    (void)state;
    kvf_endpoint read;
    (void)connecting("tcp://10.0.0.1:1");
    (void)connecting("tcp://10.0.0.1:65535");
    assert_fails(kvf_endpoint_to_connect("tcp://10.0.0.1:65536", &read), KVF_E_RANGE, "65536", "65535");
    assert_fails(kvf_endpoint_to_connect("tcp://10.0.0.1:0", &read), KVF_E_RANGE, "port is 0", "1 to 65535");
    (void)listening("tcp://10.0.0.1:0"); /* ZeroMQ's other name for * */
}

static void lengths_have_limits(void **state) {
    (void)state;
    kvf_endpoint read;
    char text[KVF_WIRE_MAX_NAME + 2];
    memset(text, 'a', sizeof text);
    memcpy(text, "tcp://", 6);
    memcpy(text + KVF_WIRE_MAX_NAME - 3, ":80", 4);
    assert_string_equal(connecting(text).text, text);
    memcpy(text + KVF_WIRE_MAX_NAME - 3, ":800", 5);
    assert_fails(kvf_endpoint_to_connect(text, &read), KVF_E_RANGE, "255");

    memset(text, 'a', sizeof text);
    memcpy(text, "ipc://", 6);
    text[6 + 107] = '\0';
    (void)connecting(text);
    text[6 + 107] = 'a';
    text[6 + 108] = '\0';
    assert_fails(kvf_endpoint_to_connect(text, &read), KVF_E_RANGE, "108", "107");
    assert_fails(kvf_endpoint_to_listen("", &read), KVF_E_RANGE, "no bytes");
    assert_fails(kvf_endpoint_to_listen(NULL, &read), KVF_E_INVALID, "NULL");
}

static void a_bad_endpoint_is_shown_in_printable_characters(void **state) {
    (void)state;
    kvf_endpoint read;
    assert_fails(kvf_endpoint_to_connect("tcp://\x1b[2J:80", &read), KVF_E_INVALID, "tcp://?[2J:80");
}

static void only_addresses_of_our_own_interfaces_are_here(void **state) {
    (void)state;
    static const char *const here[] = {"tcp://127.0.0.1:80", "tcp://localhost:80", "tcp://[::1]:80",
                                       "ipc://@abstract"};
    static const char *const elsewhere[] = {"tcp://255.255.255.255:80", "tcp://[100::1]:80",
                                            "tcp://host.invalid:80", "tcp://1.0.0.0.example.org:80"};
    char host[NI_MAXHOST], text[NI_MAXHOST + 16];
    kvf_endpoint read;
    for (size_t i = 0; i < COUNT_OF(here); i++) {
        read = connecting(here[i]);
        assert_true(kvf_endpoint_is_here(&read));
    }
    for (size_t i = 0; i < COUNT_OF(elsewhere); i++) {
        read = connecting(elsewhere[i]);
        assert_false(kvf_endpoint_is_here(&read));
    }
    for (int six = 0; six < 2; six++) {
        if (!find_interface(six ? AF_INET6 : AF_INET, host, sizeof host))
            continue; /* a machine, or a namespace, without a network */
        (void)snprintf(text, sizeof text, six ? "tcp://[%s]:80" : "tcp://%s:80", host);
        read = connecting(text);
        if (!kvf_endpoint_is_here(&read))
            fail_msg("%s is an address of this machine", text);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(addresses_of_this_machine_are_loopback),
        cmocka_unit_test(all_else_is_beyond_it),
        cmocka_unit_test(zeromq_gets_an_address_for_localhost_and_knows_where_the_port_is),
        cmocka_unit_test(a_text_that_is_no_endpoint_is_refused_for_both_uses),
        cmocka_unit_test(wildcards_are_for_listening_only),
        cmocka_unit_test(ports_are_1_to_65535),
        cmocka_unit_test(lengths_have_limits),
        cmocka_unit_test(only_addresses_of_our_own_interfaces_are_here),
        cmocka_unit_test(a_bad_endpoint_is_shown_in_printable_characters),
    };
    return cmocka_run_group_tests_name("endpoints", tests, NULL, NULL);
}
