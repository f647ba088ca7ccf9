/*
 * What fabrics between machines promise, between real processes; see process_pair.h. The conformance suite runs within
 * one process; its tests are not repeated here.
 */
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "process_pair.h"
#include "transport/front.h"
#include "transport/poster.h"
#include "transport_ways.h"

/* What the fabric has of the actor's batches. */
static const kvf_post_queue *queue_of(const process *side) {
    return side->peer->link; /* which begins with it */
}

/* ---- reads and writes ------------------------------------------------------------------------ */

static void reading_actor(process *side) {
    static kvf_run runs[4096];
    open_side(side, 0, 2);
    connect_side(side);
    size_t count = make_runs(runs, 400, 5000, 88172645463325252u);
    submit(side, KVF_READ, runs, count, NULL);
    CHECK(side->ends == 0); /* `done` is never called from inside submit */
    await_end(side, 1);
    CHECK(side->ended == KVF_OK);
    CHECK(is_exact(side, runs, count, true, 1, 2));
    say(side, 'x');
    close_side(side);
}

static void a_read_brings_every_byte_of_its_runs_and_touches_no_other(void **state) {
    run_both(*state, serving_target, reading_actor, false);
}

static void many_runs_actor(process *side) {
    static kvf_run runs[8192];
    open_side(side, 4, 2);
    connect_side(side);
    size_t count = make_runs(runs, 6000, 100, 362436069u);
    CHECK(count > 5000);
    submit(side, KVF_READ, runs, count, NULL);
    const kvf_post_queue *queue = queue_of(side);
    CHECK(queue->poster->max_in_flight == 4);
    while (side->ends == 0) {
        CHECK(queue->in_flight <= 4);
        progress(side);
    }
    CHECK(side->ended == KVF_OK);
    CHECK(is_exact(side, runs, count, true, 1, 2));
    say(side, 'x');
    close_side(side);
}

static void thousands_of_runs_go_with_only_as_many_in_flight_as_allowed(void **state) {
    run_both(*state, serving_target, many_runs_actor, false);
}

/* The runs of write `number`; both processes make the same runs. */
static size_t write_runs(kvf_run *runs, uint32_t number) {
    return make_runs(runs, 200, 4000, 521288629u + number);
}

static void checking_target(process *side) {
    static kvf_run runs[256];
    open_side(side, 0, 1);
    send_card(side);
    for (uint32_t i = 0; i < 5; i++) {
        while (side->notes < i + 1)
            progress(side);
        CHECK(side->notes_in_order);
        CHECK(is_exact(side, runs, write_runs(runs, i), false, 2, 1));
        fill(side, 1);
        say(side, 'n');
    }
    serve_until_told(side);
    close_side(side);
}

static void writing_actor(process *side) {
    static kvf_run runs[256];
    open_side(side, 0, 2);
    connect_side(side);
    for (uint32_t i = 0; i < 5; i++) {
        size_t count = write_runs(runs, i);
        submit(side, KVF_WRITE, runs, count, NULL);
        await_end(side, i + 1);
        CHECK(side->ended == KVF_OK);
        notify(side, i, 100);
        char word = 0;
        while (recv(side->line, &word, 1, MSG_DONTWAIT) < 0)
            progress(side);
        CHECK(word == 'n');
    }
    say(side, 'x');
    close_side(side);
}

static void a_notification_after_a_write_finds_every_byte_written(void **state) {
    run_both(*state, checking_target, writing_actor, false);
}

/* ---- peers that go away ---------------------------------------------------------------------- */

static void dying_actor(process *side) {
    static kvf_run runs[8192];
    open_side(side, 2, 2);
    connect_side(side);
    size_t count = make_runs(runs, 6000, 100, 11u);
    submit(side, KVF_READ, runs, 10, NULL);
    await_end(side, 1);
    CHECK(side->ended == KVF_OK);
    submit(side, KVF_READ, runs, count, NULL);
    submit(side, KVF_WRITE, runs, count, NULL);
    CHECK(kill(side->other, SIGKILL) == 0);
    struct pollfd dead = {.fd = side->line, .events = POLLIN};
    CHECK(poll(&dead, 1, -1) == 1);
    progress_until_lost(side);
    CHECK(side->ends == 3);
    CHECK(side->ended == KVF_E_PEER_LOST);
    CHECK(strstr(side->detail, side->way->kind) && strstr(side->detail, ": writing to "));
    CHECK(strstr(side->detail, "UCX") || strstr(side->detail, "libfabric connection") ||
          strstr(side->detail, "process has ended"));
    CHECK(side->lost == 1);
    CHECK(kvf_transport_submit(side->peer, KVF_READ, runs, 1, on_done, side, NULL) == KVF_E_PEER_LOST);
    CHECK(kvf_transport_notify(side->peer, "gone", 4) == KVF_E_PEER_LOST);
    kvf_peer_close(side->peer);
    close_side(side);
}

static void quiet_death_actor(process *side) {
    silent(side, dying_actor);
}

static void operations_on_a_peer_that_is_killed_end_with_peer_lost_and_print_nothing(void **state) {
    run_both(*state, serving_target, quiet_death_actor, true);
}

/* The target takes nothing any more, and dies while its answers to many large reads are still to come. */
static void stuck_actor(process *side) {
    static kvf_run runs[64];
    for (uint32_t i = 0; i < 64; i++)
        runs[i] = (kvf_run){.bytes = REGION_BYTES};
    open_side(side, 64, 2);
    connect_side(side);
    submit(side, KVF_READ, runs, 1, NULL);
    await_end(side, 1);
    CHECK(kill(side->other, SIGSTOP) == 0);
    submit(side, KVF_READ, runs, 64, NULL);
    const kvf_post_queue *queue = queue_of(side);
    do
        (void)kvf_transport_progress(side->transport, NULL);
    while (queue->posting);
    CHECK(kill(side->other, SIGKILL) == 0);
    progress_until_lost(side);
    CHECK(side->ends == 2);
    CHECK(side->ended == KVF_E_PEER_LOST || side->way->allocated[0]); /* that, its reader maps */
    fill(side, 7);                                                    /* nothing comes any more */
    for (int i = 0; i < 1000; i++)
        (void)kvf_transport_progress(side->transport, NULL);
    CHECK(is_exact(side, runs, 0, true, 1, 7));
    kvf_peer_close(side->peer);
    close_side(side);
}

static void a_peer_that_dies_before_it_answers_does_not_hold_its_reader_up(void **state) {
    run_both(*state, serving_target, stuck_actor, true);
}

static void idle_dying_actor(process *side) {
    kvf_run run = {.bytes = 10};
    open_side(side, 0, 2);
    connect_side(side);
    submit(side, KVF_READ, &run, 1, NULL);
    await_end(side, 1);
    CHECK(kill(side->other, SIGKILL) == 0);
    progress_until_lost(side);
    close_side(side);
}

static void the_death_of_a_peer_is_noticed_while_nothing_is_under_way(void **state) {
    run_both(*state, serving_target, idle_dying_actor, true);
}

static void closing_target(process *side) {
    open_side(side, 0, 1);
    send_card(side);
    serve_until_told(side);
    close_side(side);
    /* The process lives on until the other side has noticed. */
    char word;
    CHECK(recv(side->line, &word, 1, 0) == 1);
}

static void left_actor(process *side) {
    static kvf_run runs[256];
    open_side(side, 2, 2);
    connect_side(side);
    size_t count = make_runs(runs, 200, 1000, 13u);
    submit(side, KVF_READ, runs, count, NULL);
    await_end(side, 1);
    CHECK(side->ended == KVF_OK);
    say(side, 'x');
    progress_until_lost(side);
    say(side, 'y');
    close_side(side);
}

static void a_peer_that_closes_while_its_process_lives_on_is_lost(void **state) {
    run_both(*state, closing_target, left_actor, false);
}

/* ---- peers that do not progress -------------------------------------------------------------- */

static void impatient_actor(process *side) {
    static kvf_run runs[256];
    open_side(side, 2, 2);
    connect_side(side);
    size_t count = make_runs(runs, 200, 3000, 19u);
    submit(side, KVF_READ, runs, 1, NULL);
    await_end(side, 1);
    say(side, 'x');
    hear(side, 's');
    submit(side, KVF_READ, runs, count, NULL);
    for (int i = 0; i < 1000; i++)
        CHECK(kvf_transport_progress(side->transport, NULL) == KVF_OK);
    CHECK(side->ends == 1);
    kvf_peer_close(side->peer);
    CHECK(side->ends == 2);
    CHECK(side->ended == KVF_E_CANCELLED);
    fill(side, 3);
    say(side, 'w');
    for (int i = 0; i < 1000; i++)
        CHECK(kvf_transport_progress(side->transport, NULL) == KVF_OK);
    CHECK(is_exact(side, NULL, 0, true, 0, 3));
    close_side(side);
}

static void
closing_a_peer_that_does_not_progress_ends_its_operations_and_leaves_the_memory_alone(void **state) {
    run_both(*state, sleeping_target, impatient_actor, false);
}

/* ---- cards ----------------------------------------------------------------------------------- */

static void damaging_actor(process *side) {
    static unsigned char card[65536];
    open_side(side, 2, 2);
    size_t bytes = receive_card(side, card, sizeof card);
    for (size_t at = 0; at < bytes; at++) {
        card[at] ^= 0x55;
        CHECK(kvf_transport_connect(side->transport, card, bytes, &side->peer) != KVF_OK);
        card[at] ^= 0x55;
        CHECK(kvf_transport_connect(side->transport, card, at, &side->peer) != KVF_OK);
    }
    kvf_run run = {.bytes = 10};
    CHECK(kvf_transport_connect(side->transport, card, bytes, &side->peer) == KVF_OK);
    submit(side, KVF_READ, &run, 1, NULL);
    await_end(side, 1);
    CHECK(side->ended == KVF_OK);
    say(side, 'x');
    close_side(side);
}

static void a_real_card_damaged_or_cut_off_anywhere_connects_to_nobody(void **state) {
    run_both(*state, serving_target, damaging_actor, false);
}

/* The front hands the fabric a peer with other sizes than the fabric's part of the card has. */
static void disagreeing_actor(process *side) {
    static unsigned char bytes_of_card[65536];
    open_side(side, 2, 2);
    size_t bytes = receive_card(side, bytes_of_card, sizeof bytes_of_card);
    CHECK(bytes > 0);
    const kvf_fabric *fabric = kvf_fabric_named(side->way->kind);
    const void *data = NULL;
    kvf_buffer part = {0};
    CHECK(fabric->card(side->transport->fabrics[0].endpoint, &part) == KVF_OK);
    uint64_t sizes[REGIONS] = {REGION_BYTES, REGION_BYTES, REGION_BYTES + 1};
    kvf_peer peer = {.transport = side->transport, .region_bytes = sizes, .region_count = REGIONS};
    data = part.data;
    CHECK(fabric->connect(side->transport->fabrics[0].endpoint, data, part.length, &peer, &peer.link) ==
          KVF_E_PARSE);
    peer.region_count = REGIONS - 1;
    CHECK(fabric->connect(side->transport->fabrics[0].endpoint, data, part.length, &peer, &peer.link) ==
          KVF_E_PARSE);
    kvf_buffer_free(&part);
    say(side, 'x');
    close_side(side);
}

static void a_card_whose_sizes_are_not_those_of_the_outer_card_is_refused(void **state) {
    run_both(*state, serving_target, disagreeing_actor, false);
}

/* Connects again and again, a step further each time, and leaves. */
static void leaving_actor(process *side) {
    static unsigned char card[65536];
    const size_t bytes = receive_card(side, card, sizeof card);
    kvf_setting settings[2];
    const kvf_transport_options options = {.struct_size = sizeof options,
                                           .settings = settings,
                                           .setting_count =
                                               pair_settings(&side->way->setting, side->library, settings)};
    for (int attempt = 0; attempt < 40; attempt++) {
        CHECK(kvf_transport_open(side->way->kind, &options, &side->transport) == KVF_OK);
        CHECK(kvf_transport_connect(side->transport, card, bytes, &side->peer) == KVF_OK);
        for (int steps = attempt % 8; steps > 0; steps--) {
            CHECK(kvf_transport_progress(side->transport, NULL) == KVF_OK);
            (void)usleep(300); /* in which the target comes a step further */
        }
        kvf_transport_close(side->transport);
    }
    say(side, 'x');
}

static void a_peer_that_leaves_while_it_connects_does_no_harm(void **state) {
    run_both(*state, serving_target, leaving_actor, false);
}

/* ---- all of them ----------------------------------------------------------------------------- */

int main(void) {
    static const way_test tests[] = {
        NAMED(a_read_brings_every_byte_of_its_runs_and_touches_no_other),
        NAMED(thousands_of_runs_go_with_only_as_many_in_flight_as_allowed),
        NAMED(a_notification_after_a_write_finds_every_byte_written),
        NAMED(operations_on_a_peer_that_is_killed_end_with_peer_lost_and_print_nothing),
        NAMED(the_death_of_a_peer_is_noticed_while_nothing_is_under_way),
        NAMED(a_peer_that_dies_before_it_answers_does_not_hold_its_reader_up),
        NAMED(a_peer_that_closes_while_its_process_lives_on_is_lost),
        NAMED(a_real_card_damaged_or_cut_off_anywhere_connects_to_nobody),
        NAMED(a_card_whose_sizes_are_not_those_of_the_outer_card_is_refused),
        NAMED(a_peer_that_leaves_while_it_connects_does_no_harm),
    };
    const uint32_t variants =
        transport_variant_count(); /* also sets the environment, so that tests stay on this machine */
    test_way ways[MAX_WAYS];
    struct CMUnitTest more[MAX_WAYS];
    size_t count = 0, more_count = 0;
    for (uint32_t i = 0; i < variants; i++) {
        const pair_kind *way = &transport_variants[i];
        if (strcmp(way->kind, "ucx") != 0 && strcmp(way->kind, "libfabric") != 0)
            continue;
        count += ways_of_pairs(way, 1, &ways[count]);
        if (!way->allocated[0]) /* such memory is mapped by its readers, who need no help */
            more[more_count++] = (struct CMUnitTest){
                "closing_a_peer_that_does_not_progress_ends_its_operations_and_leaves_the_memory_alone",
                closing_a_peer_that_does_not_progress_ends_its_operations_and_leaves_the_memory_alone, NULL,
                NULL, ways[count - 1].state};
    }
    return run_every_way("transport_between", tests, sizeof tests / sizeof *tests, ways, count, more,
                         more_count);
}
