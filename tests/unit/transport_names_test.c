/* Owners that name their hosts in their cards: the names are looked up while everything else goes on. */
#include "transport/messages/messages.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include <cmocka.h>

#include "slow_names.h"
#include "transport/front.h"
#include "transport_pair.h"

static const pair_kind plain = {
    "messages", {false, false}, "messages", {"messages.listen", "tcp://127.0.0.1:*"}};

/* Connects by a card of `there` that names this host. */
static kvf_status connect_to(const test_side *here, const test_side *there, const char *host,
                             kvf_peer **out) {
    const void *data;
    size_t bytes;
    kvf_card card;
    kvf_messages_card part = {0};
    uint64_t sizes[SIDE_REGIONS];
    kvf_buffer written = {0}, own = {0};
    assert_int_equal(kvf_transport_export(there->transport, &data, &bytes), KVF_OK);
    assert_int_equal(kvf_card_read(data, bytes, &card), KVF_OK);
    assert_int_equal(kvf_messages_card_read(card.parts[0].data, card.parts[0].bytes, &part), KVF_OK);
    kvf_card_free(&card);
    part.host_count = 1;
    (void)snprintf(part.hosts[0], sizeof part.hosts[0], "%s", host);
    for (int i = 0; i < SIDE_REGIONS; i++)
        sizes[i] = there->regions[i].bytes;
    assert_int_equal(kvf_messages_card_write(&part, &own), KVF_OK);
    kvf_card_part parts[] = {{"messages", own.data, own.length}};
    const kvf_card named = {.name = "somebody",
                            .generation = 1,
                            .region_bytes = sizes,
                            .region_count = SIDE_REGIONS,
                            .parts = parts,
                            .part_count = 1};
    assert_int_equal(kvf_card_write(&named, &written), KVF_OK);
    const kvf_status status = kvf_transport_connect(here->transport, written.data, written.length, out);
    kvf_buffer_free(&written);
    kvf_buffer_free(&own);
    return status;
}

/* One of here's regions is read from the peer, by a connection with a name or with an address. */
static void read_from(test_side *here, test_side *there, kvf_peer *peer) {
    const kvf_run run = {0, 0, 1000, 0, 0};
    assert_int_equal(move_runs(here, there, peer, KVF_READ, &run, 1), KVF_OK);
    assert_int_equal(side_memory(here, 0)[10], side_byte(2, 0, 10));
}

static void a_name_that_takes_long_to_look_up_keeps_no_other_peer_waiting(void **state) {
    (void)state;
    test_side here, there;
    kvf_peer *late, *peer;
    side_open(&here, &plain, 1);
    side_open(&there, &plain, 2);
    assert_int_equal(connect_to(&here, &there, "late.test", &late), KVF_OK);
    const uint64_t begun = kvf_now(&kvf_monotonic);
    assert_int_equal(connect_to(&here, &there, "127.0.0.1", &peer), KVF_OK);
    read_from(&here, &there, peer);
    (void)usleep(100000);
    read_from(&here, &there, peer);
    assert_true(kvf_now(&kvf_monotonic) - begun < 5000000000u); /* the name takes ten seconds */
    assert_int_equal(here.lost, 0);
    const kvf_run run = {0, 0, 1000, 0, 0};
    test_outcome outcome = {0};
    assert_int_equal(kvf_transport_submit(late, KVF_READ, &run, 1, note_outcome, &outcome, NULL), KVF_OK);
    lets_go = true;
    drive(&here, &there, &outcome.calls, 1);
    assert_int_equal(outcome.status, KVF_OK); /* in the end it has an address */
    side_close(&here);
    side_close(&there);
}

static void an_owner_is_reached_by_its_name(void **state) {
    (void)state;
    test_side here, there;
    kvf_peer *peer;
    side_open(&here, &plain, 1);
    side_open(&there, &plain, 2);
    assert_int_equal(connect_to(&here, &there, "here.test", &peer), KVF_OK);
    read_from(&here, &there, peer);
    side_close(&here);
    side_close(&there);
}

static void an_endpoint_closes_while_a_name_is_looked_up(void **state) {
    (void)state;
    test_side here, there;
    kvf_peer *late;
    lets_go = false;
    side_open(&here, &plain, 1);
    side_open(&there, &plain, 2);
    const uint64_t begun = kvf_now(&kvf_monotonic);
    assert_int_equal(connect_to(&here, &there, "late.test", &late), KVF_OK);
    drive_idle(&here, &there);
    side_close(&here);
    side_close(&there);
    assert_true(kvf_now(&kvf_monotonic) - begun < 5000000000u);
    lets_go = true;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_name_that_takes_long_to_look_up_keeps_no_other_peer_waiting),
        cmocka_unit_test(an_owner_is_reached_by_its_name),
        cmocka_unit_test(an_endpoint_closes_while_a_name_is_looked_up),
    };
    return cmocka_run_group_tests_name("names of owners", tests, NULL, NULL);
}
