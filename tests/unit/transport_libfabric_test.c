/*
 * What only the libfabric fabric can do or meet, over TCP on loopback, between real processes; see process_pair.h.
 */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "process_pair.h"
#include "transport/card.h"
#include "transport/front.h"
#include "transport/libfabric/libfabric.h"

static const pair_kind way = {"libfabric", {false, false}, "libfabric", {0}};

static void idle_target(process *side) {
    (void)side;
}

static kvf_libfabric_link *link_of(const process *side) {
    return side->peer->link;
}

/* ---- cards and keys -------------------------------------------------------------------------- */

/* Waits until the other process is gone. */
static void hear_end(const process *side) {
    char word;
    CHECK(recv(side->line, &word, 1, 0) <= 0);
}

/* Connects by the target's card as `change` leaves it. */
static void connect_by_changed_card(process *side, void (*change)(kvf_libfabric_card *card)) {
    static unsigned char bytes_of_card[65536];
    const size_t bytes = receive_card(side, bytes_of_card, sizeof bytes_of_card);
    kvf_card outer;
    kvf_libfabric_card card;
    kvf_buffer part = {0}, changed = {0};
    CHECK(kvf_card_read(bytes_of_card, bytes, &outer) == KVF_OK && outer.part_count == 1);
    CHECK(kvf_libfabric_card_read(outer.parts[0].data, outer.parts[0].bytes, &card) == KVF_OK);
    change(&card);
    CHECK(kvf_libfabric_card_write(&card, &part) == KVF_OK);
    outer.parts[0].data = part.data;
    outer.parts[0].bytes = (uint32_t)part.length;
    CHECK(kvf_card_write(&outer, &changed) == KVF_OK);
    CHECK(kvf_transport_connect(side->transport, changed.data, changed.length, &side->peer) == KVF_OK);
    kvf_free(card.regions);
    kvf_card_free(&outer);
    kvf_buffer_free(&part);
    kvf_buffer_free(&changed);
}

/* As the card looks to a peer on another machine, which cannot see the beacon. */
static void hide_beacon(kvf_libfabric_card *card) {
    memset(card->beacon, 0, sizeof card->beacon);
}

static void change_keys(kvf_libfabric_card *card) {
    hide_beacon(card);
    for (uint32_t r = 0; r < card->region_count; r++)
        card->regions[r].key ^= 1;
}

static void move_bases(kvf_libfabric_card *card) {
    hide_beacon(card);
    for (uint32_t r = 0; r < card->region_count; r++)
        card->regions[r].base += REGION_BYTES;
}

/* Reads and writes once, which must fail and change nothing here; then the target must still serve. */
static void be_refused(process *side, void (*change)(kvf_libfabric_card *card)) {
    static kvf_run runs[1] = {{.bytes = 1000}};
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        side->ends = 0;
        connect_by_changed_card(side, change);
        submit(side, (kvf_direction)direction, runs, 1, NULL);
        await_end(side, 1);
        CHECK(side->ended != KVF_OK);
        CHECK(strstr(side->detail, "libfabric"));
        kvf_peer_close(side->peer);
    }
    CHECK(is_exact(side, NULL, 0, true, 0, 2));
}

/* Offers its card until told to end, serving meanwhile, and finds its memory as it was. */
static void offering_target(process *side) {
    open_side(side, 0, 1);
    for (int card = 0; card < 3; card++)
        send_card(side);
    serve_until_told(side);
    CHECK(is_exact(side, NULL, 0, true, 0, 1));
    close_side(side);
}

static void finish_well(process *side) {
    const kvf_run run = {.bytes = REGION_BYTES};
    side->lost = side->ends = 0;
    connect_side(side);
    submit(side, KVF_READ, &run, 1, NULL);
    await_end(side, 1);
    CHECK(side->ended == KVF_OK);
    CHECK(is_exact(side, &run, 1, true, 1, 2));
    say(side, 'x');
    close_side(side);
}

static void wrong_key_actor(process *side) {
    open_side(side, 0, 2);
    be_refused(side, change_keys);
    finish_well(side);
}

static void a_peer_with_a_wrong_key_reaches_nothing_and_others_are_served(void **state) {
    (void)state;
    run_both(&way, offering_target, wrong_key_actor, false);
}

static void wrong_bounds_actor(process *side) {
    open_side(side, 0, 2);
    be_refused(side, move_bases);
    finish_well(side);
}

static void a_peer_that_asks_beyond_the_memory_reaches_nothing_and_others_are_served(void **state) {
    (void)state;
    run_both(&way, offering_target, wrong_bounds_actor, false);
}

static void unregistering_target(process *side) {
    open_side(side, 0, 1);
    send_card(side);
    serve_until_told(side);
    CHECK(kvf_transport_unregister_region(side->transport, 0) == KVF_OK);
    fill(side, 3);
    say(side, 'u');
    serve_until_told(side);
    close_side(side);
}

static void far_actor(process *side) {
    static kvf_run runs[1] = {{.bytes = 1000}};
    open_side(side, 0, 2);
    connect_by_changed_card(side, hide_beacon);
    submit(side, KVF_READ, runs, 1, NULL);
    await_end(side, 1);
    CHECK(side->ended == KVF_OK);
    say(side, 'x');
    hear(side, 'u');
    submit(side, KVF_READ, runs, 1, NULL);
    await_end(side, 2);
    CHECK(side->ended != KVF_OK);
    CHECK(is_exact(side, runs, 1, true, 1, 2)); /* of the first read; nothing that came there later */
    say(side, 'x');
    close_side(side);
}

static void memory_that_is_unregistered_is_out_of_reach_of_peers_that_do_not_see_the_beacon(void **state) {
    (void)state;
    run_both(&way, unregistering_target, far_actor, false);
}

/* Serves until a write has begun to arrive, and takes the memory back in the middle of it. */
static void taking_back_target(process *side) {
    open_side(side, 0, 1);
    send_card(side);
    const unsigned char first = side_byte(1, 0, 0);
    while (side->memory[0][0] == first)
        progress(side);
    CHECK(kvf_transport_unregister_region(side->transport, 0) == KVF_OK);
    fill(side, 3);
    serve_until_told(side);
    CHECK(is_exact(side, NULL, 0, true, 0, 3));
    close_side(side);
}

static void overwriting_actor(process *side) {
    static kvf_run runs[64];
    for (uint32_t i = 0; i < 64; i++)
        runs[i] = (kvf_run){.bytes = REGION_BYTES};
    open_side(side, 0, 2);
    CHECK(side_byte(2, 0, 0) != side_byte(1, 0, 0));
    connect_by_changed_card(side, hide_beacon);
    submit(side, KVF_WRITE, runs, 64, NULL);
    await_end(side, 1);
    CHECK(side->ended != KVF_OK);
    say(side, 'x');
    close_side(side);
}

static void memory_that_is_unregistered_in_the_middle_of_a_write_is_written_no_more(void **state) {
    (void)state;
    for (int i = 0; i < 20; i++)
        run_both(&way, taking_back_target, overwriting_actor, false);
}

static void twice_actor(process *side) {
    static unsigned char card[65536];
    const kvf_run run = {.bytes = REGION_BYTES};
    kvf_peer *first = NULL;
    open_side(side, 0, 2);
    const size_t bytes = receive_card(side, card, sizeof card);
    CHECK(kvf_transport_connect(side->transport, card, bytes, &first) == KVF_OK);
    CHECK(kvf_transport_connect(side->transport, card, bytes, &side->peer) == KVF_OK);
    submit(side, KVF_READ, &run, 1, NULL);
    await_end(side, 1);
    kvf_peer_close(first);
    submit(side, KVF_READ, &run, 1, NULL);
    await_end(side, 2);
    CHECK(side->ended == KVF_OK);
    CHECK(is_exact(side, &run, 1, true, 1, 2));
    say(side, 'x');
    close_side(side);
}

static void a_connection_outlives_another_one_to_the_same_peer(void **state) {
    (void)state;
    run_both(&way, serving_target, twice_actor, false);
}

static struct {
    int (*close)(struct fid *fid);
    int answer; /* of the first call */
    bool closes;
    uint32_t calls;
} closing;

static int close_badly(struct fid *fid) {
    const bool first = closing.calls++ == 0;
    const int failed = !first || closing.closes ? closing.close(fid) : 0;
    return first ? closing.answer : failed;
}

/* Unregisters a region that libfabric has kept. Peers that have connected since go on: their beacon is still there. */
static void take_back_again(const process *side, uint32_t region, const kvf_libfabric_endpoint *endpoint) {
    unsigned char mark[KVF_BEACON_BYTES];
    const void *card;
    size_t bytes;
    kvf_card read;
    kvf_libfabric_card part;
    memcpy(mark, endpoint->beacon.mark, sizeof mark);
    CHECK(kvf_transport_export(side->transport, &card, &bytes) == KVF_OK);
    CHECK(kvf_card_read(card, bytes, &read) == KVF_OK && read.region_bytes[region] == 0);
    CHECK(kvf_libfabric_card_read(read.parts[0].data, read.parts[0].bytes, &part) == KVF_OK);
    CHECK(part.regions[region].bytes == 0);
    kvf_free(part.regions);
    kvf_card_free(&read);
    CHECK(kvf_transport_unregister_region(side->transport, region) == KVF_OK);
    CHECK(memcmp(mark, endpoint->beacon.mark, sizeof mark) == 0);
}

/* Unregisters a region while libfabric answers so to the first attempt to close it; returns how often it was tried. */
static uint32_t unregister_badly(process *side, uint32_t region, int answer, bool closes,
                                 kvf_status expected) {
    static struct fi_ops ops[REGIONS];
    kvf_libfabric_endpoint *endpoint = side->transport->fabrics[0].endpoint;
    struct fid *fid = &endpoint->regions[region].mr->fid;
    closing.close = fid->ops->close;
    closing.answer = answer;
    closing.closes = closes;
    closing.calls = 0;
    ops[region] = *fid->ops;
    ops[region].close = close_badly;
    fid->ops = &ops[region];
    CHECK(kvf_transport_unregister_region(side->transport, region) == expected);
    if (expected)
        take_back_again(side, region, endpoint);
    return closing.calls;
}

static void closing_actor(process *side) {
    open_side(side, 0, 1);
    CHECK(unregister_badly(side, 0, -FI_EBUSY, false, KVF_E_AGAIN) == 2);
    CHECK(unregister_badly(side, 1, -FI_EIO, true, KVF_OK) == 1);
    close_side(side);
    CHECK(closing.calls == 1);
}

static void a_registration_is_closed_again_only_if_it_was_busy(void **state) {
    (void)state;
    run_both(&way, idle_target, closing_actor, false);
}

/* ---- peers far away that are gone ------------------------------------------------------------ */

static void far_dying_actor(process *side) {
    static kvf_run runs[64];
    for (uint32_t i = 0; i < 64; i++)
        runs[i] = (kvf_run){.bytes = REGION_BYTES};
    open_side(side, 0, 2);
    connect_by_changed_card(side, hide_beacon);
    submit(side, KVF_READ, runs, 1, NULL);
    await_end(side, 1);
    CHECK(kill(side->other, SIGSTOP) == 0);
    submit(side, KVF_READ, runs, 64, NULL);
    while (link_of(side)->queue.in_flight == 0)
        (void)kvf_transport_progress(side->transport, NULL);
    CHECK(kill(side->other, SIGKILL) == 0);
    progress_until_lost(side);
    CHECK(side->ends == 2 && side->ended == KVF_E_PEER_LOST);
    CHECK(strstr(side->detail, "libfabric connection: "));
    close_side(side);
}

static void a_peer_far_away_that_dies_while_it_is_read_is_lost(void **state) {
    (void)state;
    run_both(&way, serving_target, far_dying_actor, true);
}

/* Over TCP libfabric then refuses everything, and says each time that it is for now. */
static void idle_far_actor(process *side) {
    const kvf_run run = {.bytes = 1000};
    open_side(side, 0, 2);
    connect_by_changed_card(side, hide_beacon);
    submit(side, KVF_READ, &run, 1, NULL);
    await_end(side, 1);
    CHECK(kill(side->other, SIGKILL) == 0);
    hear_end(side);
    submit(side, KVF_READ, &run, 1, NULL);
    while (side->lost == 0 && !kvf_peer_waiting(side->peer))
        (void)kvf_transport_progress(side->transport, NULL);
    if (side->lost == 0) {
        CHECK(side->ends == 1);
        CHECK(strstr(kvf_peer_waiting(side->peer), "nothing reaches it any more"));
        link_of(side)->silent_ns -= KVF_LIBFABRIC_GIVE_UP_NS; /* as if that time had passed */
        progress_until_lost(side);
    }
    CHECK(side->ends == 2 && side->ended == KVF_E_PEER_LOST);
    close_side(side);
}

static void a_peer_far_away_that_dies_while_nothing_is_under_way_is_lost(void **state) {
    (void)state;
    run_both(&way, serving_target, idle_far_actor, true);
}

static ssize_t refuse(struct fid_ep *ep, const struct fi_msg_rma *message, uint64_t flags) {
    (void)ep, (void)message, (void)flags;
    return -FI_ENOTCONN;
}

/* Its libfabric refuses a read at once, as providers do once they know that a peer is gone. */
static void refused_actor(process *side) {
    static struct fi_ops_rma refusing;
    const kvf_run run = {.bytes = REGION_BYTES};
    open_side(side, 0, 2);
    connect_by_changed_card(side, hide_beacon);
    refusing = *link_of(side)->port.ep->rma;
    refusing.readmsg = refuse;
    link_of(side)->port.ep->rma = &refusing;
    submit(side, KVF_READ, &run, 1, NULL);
    progress_until_lost(side);
    CHECK(side->ends == 1 && side->ended == KVF_E_PEER_LOST);
    say(side, 'x');
    close_side(side);
}

static void a_peer_far_away_is_lost_if_an_operation_is_refused_at_once(void **state) {
    (void)state;
    run_both(&way, serving_target, refused_actor, false);
}

static ssize_t refuse_for_now(struct fid_ep *ep, const struct fi_msg_rma *message, uint64_t flags) {
    (void)ep, (void)message, (void)flags;
    return -FI_EAGAIN;
}

static void await_waiting(process *side) {
    while (!kvf_peer_waiting(side->peer))
        progress(side);
}

/* The times are not waited for: the link takes them for over. */
static void patient_actor(process *side) {
    static struct fi_ops_rma refusing;
    const kvf_run run = {.bytes = 1000};
    open_side(side, 0, 2);
    connect_by_changed_card(side, hide_beacon);
    kvf_libfabric_link *link = link_of(side);
    struct fi_ops_rma *whole = link->port.ep->rma;
    refusing = *whole;
    refusing.readmsg = refuse_for_now;
    link->port.ep->rma = &refusing;
    submit(side, KVF_READ, &run, 1, NULL);
    await_waiting(side);
    CHECK(strstr(kvf_peer_waiting(side->peer), "nothing has reached it by "));
    CHECK(strstr(kvf_peer_waiting(side->peer), "; the setting libfabric.domain says which interface to use"));
    link->silent_ns -= KVF_LIBFABRIC_GIVE_UP_NS;
    for (int i = 0; i < 100; i++)
        progress(side);
    CHECK(side->lost == 0 && side->ends == 0); /* one that nothing has reached yet may still come */

    link->port.ep->rma = whole;
    await_end(side, 1);
    CHECK(side->ended == KVF_OK && !kvf_peer_waiting(side->peer));
    link->port.ep->rma = &refusing;
    submit(side, KVF_READ, &run, 1, NULL);
    await_waiting(side);
    CHECK(strstr(kvf_peer_waiting(side->peer), "nothing reaches it any more by "));
    CHECK(!strstr(kvf_peer_waiting(side->peer), "libfabric.domain"));
    CHECK(side->lost == 0);
    link->silent_ns -= KVF_LIBFABRIC_GIVE_UP_NS;
    progress_until_lost(side);
    CHECK(side->ends == 2 && side->ended == KVF_E_PEER_LOST);
    CHECK(strstr(side->detail, "has made none for 20 seconds"));
    say(side, 'x');
    close_side(side);
}

static void a_peer_that_nothing_reaches_is_named_as_waiting_and_lost_if_something_had(void **state) {
    (void)state;
    run_both(&way, serving_target, patient_actor, false);
}

/* ---- messages from anybody ------------------------------------------------------------------- */

static void hearing_target(process *side) {
    open_side(side, 0, 1);
    send_card(side);
    while (side->notes < 2)
        progress(side);
    CHECK(side->notes_in_order);
    close_side(side);
}

/* Takes the completion of an operation that was begun past the fabric. */
static void await_raw(process *side, const void *context) {
    struct fi_cq_msg_entry entry;
    while (fi_cq_read(link_of(side)->port.cq, &entry, 1) != 1)
        (void)kvf_transport_progress(side->transport, NULL);
    CHECK(entry.op_context == context);
}

/* Sends bytes that are no notification, past the fabric. */
static void send_raw(process *side, const void *data, size_t bytes) {
    static kvf_libfabric_message message; /* libfabric has it until it is sent */
    kvf_libfabric_link *link = link_of(side);
    ssize_t failed;
    memcpy(message.data, data, bytes);
    while ((failed = fi_send(link->port.ep, message.data, bytes, NULL, link->address, &message.operation)) ==
           -FI_EAGAIN)
        progress(side);
    CHECK(failed == 0);
    await_raw(side, &message.operation);
}

static void babbling_actor(process *side) {
    static unsigned char bytes[KVF_LIBFABRIC_HEADER_MAX + KVF_NOTICE_MAX];
    open_side(side, 0, 2);
    connect_side(side);
    notify(side, 0, 100);
    while (kvf_libfabric_is_notifying(link_of(side)))
        progress(side);
    send_raw(side, "\0", 1);             /* no name, and no bytes */
    send_raw(side, "\377ab", 3);         /* a name that is not there */
    send_raw(side, "\2ab", 3);           /* a name, and no bytes */
    send_raw(side, bytes, sizeof bytes); /* too many bytes */
    notify(side, 1, 100);
    while (kvf_libfabric_is_notifying(link_of(side)))
        progress(side);
    close_side(side);
}

static void a_message_that_is_no_notification_is_dropped(void **state) {
    (void)state;
    run_both(&way, hearing_target, babbling_actor, false);
}

/* A write that also puts a number into the completion queue of its target, which has no operation for it. */
/* Replaces the target's fi_recv(). */
static struct {
    ssize_t (*receive)(struct fid_ep *, void *, size_t, void *, fi_addr_t, void *);
    bool refuses;
    unsigned refused;
} receiving;

static ssize_t receive_badly(struct fid_ep *ep, void *data, size_t bytes, void *desc, fi_addr_t from,
                             void *context) {
    receiving.refused += receiving.refuses;
    return receiving.refuses ? -FI_EAGAIN : receiving.receive(ep, data, bytes, desc, from, context);
}

/* Refuses all receives, so that none is left once as many notifications have come, until another one waits. */
static void full_target(process *side) {
    static struct fi_ops_msg ops;
    open_side(side, 0, 1);
    const kvf_libfabric_endpoint *endpoint = side->transport->fabrics[0].endpoint;
    struct pollfd wake = {.fd = kvf_transport_event_fd(side->transport), .events = POLLIN};
    receiving.receive = endpoint->port.ep->msg->recv;
    receiving.refuses = true;
    ops = *endpoint->port.ep->msg;
    ops.recv = receive_badly;
    endpoint->port.ep->msg = &ops;
    send_card(side);
    serve_until_told(side);
    while (poll(&wake, 1, 0) > 0)
        CHECK(kvf_transport_progress(side->transport, NULL) == KVF_OK);
    CHECK(side->notes == KVF_LIBFABRIC_MESSAGES_IN && receiving.refused > 0);
    receiving.refuses = false;
    while (side->notes <= KVF_LIBFABRIC_MESSAGES_IN) {
        CHECK(poll(&wake, 1, -1) > 0 || errno == EINTR);
        CHECK(kvf_transport_progress(side->transport, NULL) == KVF_OK);
    }
    CHECK(side->notes_in_order);
    close_side(side);
}

static void filling_actor(process *side) {
    open_side(side, 0, 2);
    connect_side(side);
    for (uint32_t i = 0; i < KVF_LIBFABRIC_MESSAGES_IN; i++)
        notify(side, i, 100);
    while (kvf_libfabric_is_notifying(link_of(side)))
        progress(side);
    notify(side, KVF_LIBFABRIC_MESSAGES_IN, 100);
    while (link_of(side)->outbox.under_way == 0)
        progress(side);
    say(side, 'x');
    while (kvf_libfabric_is_notifying(link_of(side)))
        progress(side);
    close_side(side);
}

static void an_endpoint_that_could_post_no_receive_tries_again(void **state) {
    (void)state;
    run_both(&way, full_target, filling_actor, false);
}

static void write_with_data(process *side) {
    static kvf_libfabric_operation operation;
    static unsigned char byte;
    kvf_libfabric_link *link = link_of(side);
    const kvf_libfabric_target *to = &link->targets[0];
    ssize_t failed;
    byte = side_byte(1, 0, 0);
    while ((failed = fi_writedata(link->port.ep, &byte, 1, NULL, 1234, link->address, to->base, to->key,
                                  &operation)) == -FI_EAGAIN)
        progress(side);
    CHECK(failed == 0);
    await_raw(side, &operation);
}

static void numbering_actor(process *side) {
    open_side(side, 0, 2);
    connect_side(side);
    notify(side, 0, 100);
    while (kvf_libfabric_is_notifying(link_of(side)))
        progress(side);
    write_with_data(side);
    notify(side, 1, 100);
    while (kvf_libfabric_is_notifying(link_of(side)))
        progress(side);
    close_side(side);
}

static void a_write_that_brings_a_number_for_the_completion_queue_does_no_harm(void **state) {
    (void)state;
    run_both(&way, hearing_target, numbering_actor, false);
}

/* ---- what this machine or build cannot do ---------------------------------------------------- */

/* Opens with one setting, which must fail. */
static void open_in_vain(const char *key, const char *value, kvf_status expected, const char *words) {
    const kvf_setting setting = {key, value};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &setting, .setting_count = 1};
    kvf_transport *transport = NULL;
    CHECK(kvf_transport_open("libfabric", &options, &transport) == expected);
    CHECK(strstr(kvf_error_detail(), words));
}

static void try_wrong_settings(process *side) {
    (void)side;
    open_in_vain("libfabric.library", "/no/such/libfabric.so", KVF_E_UNSUPPORTED,
                 "no libfabric was loaded: /no/such/libfabric.so: ");
    open_in_vain("libfabric.library", "libc.so.6", KVF_E_UNSUPPORTED, "it has no fi_version()");
    open_in_vain("libfabric.library", "", KVF_E_INVALID, "libfabric.library is \"\"");
    open_in_vain("libfabric.provider", "nothing", KVF_E_UNSUPPORTED, "has no provider \"nothing\"");
    open_in_vain("libfabric.provider", "tcp;ofi_rxm", KVF_E_INVALID,
                 "allowed: one provider of up to 31 characters");
    open_in_vain("libfabric.domain", "nowhere0", KVF_E_UNSUPPORTED, "for the interface nowhere0");
    open_in_vain("libfabric.poll_us", "1000001", KVF_E_INVALID, "allowed: up to 1000000");
    open_in_vain("libfabric.late_ms", "0", KVF_E_INVALID, "allowed: 1 to 3600000");
}

static void wrong_actor(process *side) {
    silent(side, try_wrong_settings);
}

static void wrong_settings_are_refused_by_name_and_nothing_is_printed(void **state) {
    (void)state;
    run_both(&way, idle_target, wrong_actor, false);
}

/* What the transport says of libfabric. */
static kvf_transport_finding find(kvf_transport *transport) {
    kvf_transport_finding found = {.struct_size = sizeof found};
    for (uint32_t i = 0; kvf_transport_find(transport, i, &found) == KVF_OK; i++)
        if (strcmp(found.kind, "libfabric") == 0)
            return found;
    wrong(__FILE__, __LINE__, "libfabric is a kind of this build");
}

static void automatic_actor(process *side) {
    kvf_transport_options options = {.struct_size = sizeof options};
    if (kvf_libfabric_has_cards(KVF_LIBFABRIC_DEVICES))
        return; /* "auto" uses them */
    CHECK(kvf_transport_open("auto", &options, &side->transport) == KVF_OK);
    CHECK(!find(side->transport).works);
    CHECK(strstr(find(side->transport).why_not, "no network card of EFA or Slingshot"));
    kvf_transport_close(side->transport);
    const kvf_setting setting = {"libfabric.domain", "lo"}, provider = {"libfabric.provider", "none"};
    options.settings = &setting;
    options.setting_count = 1;
    CHECK(kvf_transport_open("libfabric", &options, &side->transport) == KVF_OK);
    CHECK(find(side->transport).works);
    CHECK(strstr(find(side->transport).library, "libfabric.so"));
    CHECK(strstr(find(side->transport).ways, "/lo"));
    kvf_transport_close(side->transport);
    options.settings = &provider;
    CHECK(kvf_transport_open("auto", &options, &side->transport) == KVF_OK);
    CHECK(strstr(find(side->transport).why_not, "has no provider \"none\""));
    kvf_transport_close(side->transport);
}

static void auto_uses_libfabric_only_with_its_network_cards_or_if_a_provider_is_named(void **state) {
    (void)state;
    run_both(&way, idle_target, automatic_actor, false);
}

/* Devices appear one after the other, and each time it is checked whether a card of EFA or Slingshot is among them. */
static const struct listed {
    const char *path, *link; /* NULL: a folder */
    bool found;
} listed[] = {
    {"efa", NULL, false},
    {"mlx5_core", NULL, false},
    {"infiniband", NULL, false},
    {"infiniband/bare", NULL, false}, /* without a driver */
    {"infiniband/mlx5_0", NULL, false},
    {"infiniband/mlx5_0/device", NULL, false},
    {"infiniband/mlx5_0/device/driver", "../../../mlx5_core", false},
    {"infiniband/rdmap0", NULL, false},
    {"infiniband/rdmap0/device", NULL, false},
    {"infiniband/rdmap0/device/driver", "../../../efa", true},
};

static void cards_are_found_by_the_drivers_that_the_kernel_names(void **state) {
    (void)state;
    char root[] = "/tmp/kvferry-devices-XXXXXX", path[256];
    const size_t count = sizeof listed / sizeof *listed;
    assert_non_null(mkdtemp(root));
    assert_false(kvf_libfabric_has_cards("/no/such/folder"));
    for (size_t i = 0; i < count; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", root, listed[i].path);
        assert_int_equal(listed[i].link ? symlink(listed[i].link, path) : mkdir(path, 0700), 0);
        assert_int_equal(kvf_libfabric_has_cards(root), listed[i].found);
    }
    for (size_t i = count; i-- > 0;) {
        (void)snprintf(path, sizeof path, "%s/%s", root, listed[i].path);
        assert_int_equal(remove(path), 0);
    }
    (void)snprintf(path, sizeof path, "%s/cxi", root);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_true(kvf_libfabric_has_cards(root));
    assert_int_equal(remove(path), 0);
    assert_int_equal(remove(root), 0);
}

static struct {
    int failed; /* of an endpoint that does not know the question */
    bool reads, writes;
} emulates;

static int tell_emulation(struct fid *fid, int level, int option, void *value, size_t *bytes) {
    (void)fid;
    const int first = -(0xefa << 16); /* of the options of EFA */
    CHECK(level == FI_OPT_ENDPOINT && *bytes == sizeof(bool) && (option == first + 1 || option == first + 2));
    if (emulates.failed)
        return emulates.failed;
    *(bool *)value = option == first + 1 ? emulates.reads : emulates.writes;
    *bytes = sizeof(bool);
    return 0;
}

static bool emulates_with(const char *provider, int failed, bool reads, bool writes) {
    struct fi_ops_ep ops = {.size = sizeof ops, .getopt = tell_emulation};
    struct fid_ep ep = {.ops = &ops};
    char name[16];
    (void)snprintf(name, sizeof name, "%s", provider);
    struct fi_fabric_attr attributes = {.prov_name = name};
    const struct fi_info info = {.fabric_attr = &attributes};
    emulates.failed = failed;
    emulates.reads = reads;
    emulates.writes = writes;
    return kvf_libfabric_emulates(&info, &ep);
}

static void efa_counts_as_emulating_unless_it_says_that_it_reads_and_writes_by_itself(void **state) {
    (void)state;
    assert_false(emulates_with("efa", 0, false, false));
    assert_true(emulates_with("efa", 0, false, true)); /* as cards that have RDMA reads only */
    assert_true(emulates_with("efa", 0, true, false));
    assert_true(emulates_with("efa", -FI_ENOPROTOOPT, false, false)); /* a libfabric that does not know */
    assert_false(emulates_with("cxi", -FI_ENOPROTOOPT, true, true));
    assert_true(emulates_with("tcp", -FI_ENOPROTOOPT, false, false));
}

static int refuse_fabric(struct fi_fabric_attr *attributes, struct fid_fabric **out, void *context) {
    (void)attributes, (void)out, (void)context;
    return -FI_EIO;
}

static int refuse_memory(struct fid *fid, const struct fi_mr_attr *attributes, uint64_t flags,
                         struct fid_mr **out) {
    (void)fid, (void)attributes, (void)flags, (void)out;
    return -FI_ENOMEM;
}

static int refuse_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_ep **out,
                           void *context) {
    (void)domain, (void)info, (void)out, (void)context;
    return -FI_ENOMEM;
}

static int refuse_address(struct fid_av *table, const void *address, size_t count, fi_addr_t *out,
                          uint64_t flags, void *context) {
    (void)table, (void)address, (void)count, (void)flags, (void)context;
    *out = FI_ADDR_NOTAVAIL;
    return -FI_EHOSTUNREACH;
}

static int (*open_table)(struct fid_domain *domain, struct fi_av_attr *attributes, struct fid_av **out,
                         void *context);

/* Opens a table that takes no address. */
static int open_refusing_table(struct fid_domain *domain, struct fi_av_attr *attributes, struct fid_av **out,
                               void *context) {
    static struct fi_ops_av refusing;
    const int failed = open_table(domain, attributes, out, context);
    CHECK(!failed);
    refusing = *(*out)->ops;
    refusing.insert = refuse_address;
    (*out)->ops = &refusing;
    return 0;
}

static void open_without_fabric(process *side) {
    const kvf_libfabric_library *library;
    CHECK(kvf_libfabric_load(NULL, &library) == KVF_OK);
    kvf_libfabric_library *broken = (kvf_libfabric_library *)(uintptr_t)library;
    const __typeof__(broken->fi_fabric) whole = broken->fi_fabric;
    broken->fi_fabric = refuse_fabric;
    CHECK(kvf_transport_open("libfabric",
                             &(kvf_transport_options){.struct_size = sizeof(kvf_transport_options)},
                             &side->transport) == KVF_E_UNSUPPORTED);
    CHECK(strstr(kvf_error_detail(), "libfabric fabric: "));
    broken->fi_fabric = whole;
}

/* The first notification registers the memory of messages, if the provider asks for that. */
static void unsent_actor(process *side) {
    static struct fi_ops_mr no_memory;
    open_side(side, 0, 2);
    connect_side(side);
    kvf_libfabric_endpoint *endpoint = side->transport->fabrics[0].endpoint;
    struct fi_ops_mr *memories = endpoint->domain->mr;
    endpoint->info->domain_attr->mr_mode |= FI_MR_LOCAL;
    no_memory = *memories;
    no_memory.regattr = refuse_memory;
    endpoint->domain->mr = &no_memory;
    CHECK(kvf_transport_notify(side->peer, "word", 4) ==
          KVF_E_UNSUPPORTED); /* KVF_E_NOMEM would be tried again */
    CHECK(strstr(kvf_error_detail(), "notification: libfabric registration: "));
    endpoint->domain->mr = memories;
    CHECK(kvf_transport_notify(side->peer, "word", 4) == KVF_OK);
    say(side, 'x');
    close_side(side);
}

static void a_notification_that_the_card_refuses_says_so_and_is_not_short_of_memory(void **state) {
    (void)state;
    run_both(&way, serving_target, unsent_actor, false);
}

/* Connects to a peer, which must be refused by libfabric as unable, whatever its error. */
static void connect_in_vain(process *side, const char *words) {
    static unsigned char card[65536];
    const size_t bytes = receive_card(side, card, sizeof card);
    CHECK(kvf_transport_connect(side->transport, card, bytes, &side->peer) == KVF_E_UNSUPPORTED);
    CHECK(strstr(kvf_error_detail(), words));
}

static void full_actor(process *side) {
    static struct fi_ops_mr no_memory;
    static struct fi_ops_domain no_endpoint, no_address;
    unsigned char bytes[64];
    const kvf_memory memory = {.struct_size = sizeof memory, .address = bytes, .bytes = sizeof bytes};
    open_without_fabric(side);
    open_side(side, 0, 2);
    struct fid_domain *domain = ((kvf_libfabric_endpoint *)side->transport->fabrics[0].endpoint)->domain;
    struct fi_ops_mr *memories = domain->mr;
    struct fi_ops_domain *ops = domain->ops;
    no_memory = *domain->mr;
    no_memory.regattr = refuse_memory;
    domain->mr = &no_memory;
    CHECK(kvf_transport_register_region(side->transport, REGIONS, &memory) == KVF_E_UNSUPPORTED);
    CHECK(strstr(kvf_error_detail(), "libfabric registration: "));
    domain->mr = memories;
    no_endpoint = *ops;
    no_endpoint.endpoint = refuse_endpoint;
    domain->ops = &no_endpoint;
    connect_in_vain(side, "libfabric endpoint: ");
    open_table = ops->av_open;
    no_address = *ops;
    no_address.av_open = open_refusing_table;
    domain->ops = &no_address;
    connect_in_vain(side, "libfabric address: ");
    domain->ops = ops;
    finish_well(side);
}

static void a_card_that_fails_or_is_full_is_unsupported_so_that_auto_goes_on(void **state) {
    (void)state;
    run_both(&way, offering_target, full_actor, false);
}

static struct {
    uint32_t count;
    bool provider_keys[8], devices[8];
} looks;

/* Has nothing, and notes what was asked for. */
static int note_look(uint32_t version, const char *node, const char *service, uint64_t flags,
                     const struct fi_info *hints, struct fi_info **out) {
    (void)version, (void)node, (void)service, (void)flags, (void)out;
    CHECK(looks.count < 8);
    looks.provider_keys[looks.count] = hints->domain_attr->mr_mode & FI_MR_PROV_KEY;
    looks.devices[looks.count++] = hints->caps & FI_HMEM;
    return -FI_ENODATA;
}

static void looking_actor(process *side) {
    (void)side;
    const kvf_libfabric_library *library;
    struct fi_info *info;
    CHECK(kvf_libfabric_load(NULL, &library) == KVF_OK);
    kvf_libfabric_library noting = *library;
    noting.fi_getinfo = note_look;
    CHECK(kvf_libfabric_choose(&noting, "cxi", false, NULL, &info) == KVF_E_UNSUPPORTED);
    CHECK(looks.count == 4);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(looks.devices[i] == (i < 2) && looks.provider_keys[i] == (i % 2 == 1));
}

/* Access by keys that cxi chooses does not end with the registration. */
static void keys_of_the_provider_are_offered_only_if_there_is_no_other_way(void **state) {
    (void)state;
    run_both(&way, idle_target, looking_actor, false);
}

static void choosing_actor(process *side) {
    (void)side;
    const kvf_libfabric_library *library;
    struct fi_info *info;
    CHECK(kvf_libfabric_load(NULL, &library) == KVF_OK);
    CHECK(kvf_libfabric_choose(library, NULL, false, "lo", &info) == KVF_OK);
    CHECK(strcmp(info->fabric_attr->prov_name, "tcp") == 0 ||
          strcmp(info->fabric_attr->prov_name, "net") == 0);
    library->fi_freeinfo(info);
    CHECK(kvf_libfabric_choose(library, NULL, true, "lo", &info) == KVF_E_UNSUPPORTED);
    CHECK(strstr(kvf_error_detail(), "among efa, cxi with"));
}

static void tcp_is_not_chosen_where_only_network_cards_are_wanted(void **state) {
    (void)state;
    run_both(&way, idle_target, choosing_actor, false);
}

static void bytes_that_wait_in_connections_by_tcp_are_sent_often(void **state) {
    (void)state;
    run_both(&way, serving_target, trying_actor, false);
}

static void cuda_actor(process *side) {
    const kvf_setting setting = {"libfabric.domain", "lo"};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &setting, .setting_count = 1};
    CHECK(kvf_transport_open("libfabric", &options, &side->transport) == KVF_OK);
    const kvf_libfabric_endpoint *endpoint = side->transport->fabrics[0].endpoint;
    if (endpoint->info->caps & FI_HMEM)
        exit(0); /* this provider can do it; testing that needs CUDA memory */
    unsigned char bytes[64] = {0};
    kvf_memory regions[2] = {
        {.struct_size = sizeof(kvf_memory), .address = bytes, .bytes = 32},
        {.struct_size = sizeof(kvf_memory), .address = bytes + 32, .bytes = 32, .kind = KVF_MEMORY_CUDA}};
    CHECK(kvf_transport_register(side->transport, regions, 2) == KVF_E_UNSUPPORTED);
    CHECK(strstr(kvf_error_detail(), "region 1 is CUDA memory"));
    regions[1].kind = KVF_MEMORY_HOST; /* no region stayed registered */
    CHECK(kvf_transport_register(side->transport, regions, 2) == KVF_OK);
    kvf_transport_close(side->transport);
}

static void cuda_memory_that_the_provider_does_not_take_is_unsupported(void **state) {
    (void)state;
    run_both(&way, idle_target, cuda_actor, false);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_peer_with_a_wrong_key_reaches_nothing_and_others_are_served),
        cmocka_unit_test(a_peer_that_asks_beyond_the_memory_reaches_nothing_and_others_are_served),
        cmocka_unit_test(memory_that_is_unregistered_is_out_of_reach_of_peers_that_do_not_see_the_beacon),
        cmocka_unit_test(memory_that_is_unregistered_in_the_middle_of_a_write_is_written_no_more),
        cmocka_unit_test(a_registration_is_closed_again_only_if_it_was_busy),
        cmocka_unit_test(a_connection_outlives_another_one_to_the_same_peer),
        cmocka_unit_test(a_peer_far_away_that_dies_while_it_is_read_is_lost),
        cmocka_unit_test(a_peer_far_away_that_dies_while_nothing_is_under_way_is_lost),
        cmocka_unit_test(a_peer_far_away_is_lost_if_an_operation_is_refused_at_once),
        cmocka_unit_test(a_peer_that_nothing_reaches_is_named_as_waiting_and_lost_if_something_had),
        cmocka_unit_test(a_message_that_is_no_notification_is_dropped),
        cmocka_unit_test(an_endpoint_that_could_post_no_receive_tries_again),
        cmocka_unit_test(a_write_that_brings_a_number_for_the_completion_queue_does_no_harm),
        cmocka_unit_test(wrong_settings_are_refused_by_name_and_nothing_is_printed),
        cmocka_unit_test(auto_uses_libfabric_only_with_its_network_cards_or_if_a_provider_is_named),
        cmocka_unit_test(cards_are_found_by_the_drivers_that_the_kernel_names),
        cmocka_unit_test(efa_counts_as_emulating_unless_it_says_that_it_reads_and_writes_by_itself),
        cmocka_unit_test(a_card_that_fails_or_is_full_is_unsupported_so_that_auto_goes_on),
        cmocka_unit_test(a_notification_that_the_card_refuses_says_so_and_is_not_short_of_memory),
        cmocka_unit_test(keys_of_the_provider_are_offered_only_if_there_is_no_other_way),
        cmocka_unit_test(tcp_is_not_chosen_where_only_network_cards_are_wanted),
        cmocka_unit_test(bytes_that_wait_in_connections_by_tcp_are_sent_often),
        cmocka_unit_test(cuda_memory_that_the_provider_does_not_take_is_unsupported),
    };
    (void)transport_variant_count(); /* sets the environment, so that tests stay on this machine */
    return cmocka_run_group_tests_name("transport_libfabric", tests, NULL, NULL);
}
