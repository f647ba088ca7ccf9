/*
 * What every kind of transport promises: each test runs over every fabric, including the tests' toy fabric, with each
 * setting that chooses another code path, and for memory that the library allocated, memory that the caller brought,
 * and both together (transport_variants). Each fabric has a test of its own for what only it can do or meet.
 */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "sanitized.h"
#include "transport/transport.h"
#include "transport_pair.h"
#include "transport_ways.h"

#define RUNS_MAX 4096

typedef struct test_pair {
    test_side here, there;
    kvf_peer *peer;
    const pair_kind *kind;
    kvf_run runs[RUNS_MAX];
} test_pair;

static test_pair *pair_open(const pair_kind *kind) {
    test_pair *made = calloc(1, sizeof *made);
    assert_non_null(made);
    made->kind = kind;
    side_open(&made->here, kind, 1);
    side_open(&made->there, kind, 2);
    made->peer = side_connect(&made->here, &made->there);
    assert_string_equal(kvf_peer_kind(made->peer), kind->expected);
    return made;
}

static void pair_close(test_pair *pair) {
    side_close(&pair->here);
    if (pair->there.transport)
        side_close(&pair->there);
    free(pair);
}

/* The error text must name the kind of transport, and contain `part`. */
static void check_detail(const char *detail, const test_pair *pair, const char *part) {
    char kind[32];
    (void)snprintf(kind, sizeof kind, "%s: ", pair->kind->expected);
    if (!strstr(detail, kind) || !strstr(detail, part))
        fail_msg("\"%s\" has no \"%s\" or no \"%s\"", detail, kind, part);
}

/* Copies the same runs into a copy of the destination's old content, and compares all of it. */
static void check_moved(const test_side *local, const test_side *remote, kvf_direction direction,
                        const kvf_run *runs, size_t count, uint32_t seed) {
    const test_side *to = direction == KVF_READ ? local : remote;
    const test_side *from = direction == KVF_READ ? remote : local;
    for (uint32_t region = 0; region < SIDE_REGIONS; region++) {
        uint64_t bytes = to->regions[region].bytes;
        unsigned char *expected = malloc(bytes);
        assert_non_null(expected);
        side_fill(expected, seed, region, bytes);
        for (size_t i = 0; i < count; i++) {
            bool read = direction == KVF_READ;
            if ((read ? runs[i].local_region : runs[i].remote_region) != region)
                continue;
            memcpy(expected + (read ? runs[i].local_offset : runs[i].remote_offset),
                   side_memory(from, read ? runs[i].remote_region : runs[i].local_region) +
                       (read ? runs[i].remote_offset : runs[i].local_offset),
                   runs[i].bytes);
        }
        assert_memory_equal(side_memory(to, region), expected, bytes);
        free(expected);
    }
}

/* Whether the kind does not move bytes in this direction; then it must say so and move none. */
static bool is_refused(const pair_kind *kind, kvf_direction direction) {
    if (pair_can(kind, direction))
        return false;
    test_pair *pair = pair_open(kind);
    const kvf_run run = {.bytes = 100};
    test_outcome outcome = {0};
    assert_int_equal(kvf_transport_submit(pair->peer, direction, &run, 1, note_outcome, &outcome, NULL),
                     KVF_E_UNSUPPORTED);
    assert_non_null(strstr(kvf_error_detail(), direction == KVF_WRITE ? "does not write" : "does not read"));
    drive_idle(&pair->here, &pair->there);
    assert_int_equal(outcome.calls, 0);
    check_moved(&pair->here, &pair->there, KVF_READ, NULL, 0, 1);
    check_moved(&pair->here, &pair->there, KVF_WRITE, NULL, 0, 2);
    pair_close(pair);
    return true;
}

static void check_direction(const pair_kind *kind, kvf_direction direction) {
    if (is_refused(kind, direction))
        return;
    for (uint64_t seed = 1; seed <= (SANITIZED ? 2 : 6); seed++) {
        test_pair *pair = pair_open(kind);
        uint64_t state = seed * 7919;
        uint64_t longest = seed % 2 ? 3000 : 400000;
        size_t count = draw_runs(&state, &pair->here, &pair->there, direction, longest, pair->runs, RUNS_MAX);
        assert_int_equal(move_runs(&pair->here, &pair->there, pair->peer, direction, pair->runs, count),
                         KVF_OK);
        check_moved(&pair->here, &pair->there, direction, pair->runs, count, direction == KVF_READ ? 1 : 2);
        pair_close(pair);
    }
}

static void a_read_moves_exactly_the_bytes_of_its_runs(void **state) {
    check_direction(*state, KVF_READ);
}

static void a_write_moves_exactly_the_bytes_of_its_runs(void **state) {
    check_direction(*state, KVF_WRITE);
}

/* Numbers of regions are the front's: a fabric that is not shown the last ones must count them all the same. */
static void a_region_behind_the_others_that_is_withheld_hinders_nobody(void **state) {
    static unsigned char hidden[64];
    const kvf_memory withheld = {
        .struct_size = sizeof withheld, .address = hidden, .bytes = sizeof hidden, .withheld = true};
    const kvf_run run = {.bytes = 1000};
    test_pair *pair = calloc(1, sizeof *pair);
    assert_non_null(pair);
    side_open(&pair->here, *state, 1);
    side_open(&pair->there, *state, 2);
    assert_int_equal(kvf_transport_register_region(pair->there.transport, SIDE_REGIONS, &withheld), KVF_OK);
    pair->peer = side_connect(&pair->here, &pair->there);
    assert_int_equal(move_runs(&pair->here, &pair->there, pair->peer, KVF_READ, &run, 1), KVF_OK);
    assert_memory_equal(side_memory(&pair->here, 0), side_memory(&pair->there, 0), run.bytes);
    pair_close(pair);
}

static void a_run_longer_than_any_slice_moves_whole(void **state) {
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        if (is_refused(*state, (kvf_direction)direction))
            continue;
        test_pair *pair = pair_open(*state);
        kvf_run run = {.bytes = pair->there.regions[0].bytes};
        assert_true(run.bytes > 4u << 20);
        assert_int_equal(move_runs(&pair->here, &pair->there, pair->peer, (kvf_direction)direction, &run, 1),
                         KVF_OK);
        assert_memory_equal(side_memory(&pair->here, 0), side_memory(&pair->there, 0), run.bytes);
        pair_close(pair);
    }
}

static void an_empty_batch_and_runs_of_no_bytes_end_well(void **state) {
    test_pair *pair = pair_open(*state);
    kvf_run runs[4] = {
        {.local_offset = pair->here.regions[0].bytes}, {.remote_region = 1}, {.bytes = 0}, {.bytes = 5}};
    assert_int_equal(move_runs(&pair->here, &pair->there, pair->peer, KVF_READ, NULL, 0), KVF_OK);
    assert_int_equal(move_runs(&pair->here, &pair->there, pair->peer, KVF_READ, runs, 3), KVF_OK);
    check_moved(&pair->here, &pair->there, KVF_READ, NULL, 0, 1);
    /* Nothing of them comes later; and peers with UCX 1.13 may part only once they are connected. */
    assert_int_equal(move_runs(&pair->here, &pair->there, pair->peer, KVF_READ, runs, 4), KVF_OK);
    check_moved(&pair->here, &pair->there, KVF_READ, runs, 4, 1);
    pair_close(pair);
}

static void runs_outside_of_memory_are_refused_and_nothing_moves(void **state) {
    test_pair *pair = pair_open(*state);
    uint64_t local = pair->here.regions[1].bytes, remote = pair->there.regions[1].bytes;
    struct {
        kvf_run run;
        kvf_status status;
    } cases[] = {
        {{local, 0, 1, 1, 1}, KVF_E_RANGE},
        {{0, remote, 1, 1, 1}, KVF_E_RANGE},
        {{0, 0, local + 1, 1, 0}, KVF_E_RANGE},
        {{0, 0, remote + 1, 0, 1}, KVF_E_RANGE},
        {{1, 0, UINT64_MAX, 1, 1}, KVF_E_RANGE},
        {{UINT64_MAX, 0, 1, 1, 1}, KVF_E_RANGE},
        {{UINT64_MAX, 0, 0, 1, 1}, KVF_E_RANGE},
        {{0, UINT64_MAX, 2, 1, 1}, KVF_E_RANGE},
        {{0, 0, 1, SIDE_REGIONS, 0}, KVF_E_NOT_REGISTERED},
        {{0, 0, 1, 0, SIDE_REGIONS}, KVF_E_NOT_REGISTERED},
        {{0, 0, 0, 0, UINT32_MAX}, KVF_E_NOT_REGISTERED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_run runs[2] = {{0, 0, 100, 0, 0}, cases[i].run};
        test_outcome outcome = {0};
        kvf_operation operation = 77;
        assert_int_equal(
            kvf_transport_submit(pair->peer, KVF_READ, runs, 2, note_outcome, &outcome, &operation),
            cases[i].status);
        assert_non_null(strstr(kvf_error_detail(), "run 1:"));
        assert_int_equal(operation, 77);
        drive_idle(&pair->here, &pair->there);
        assert_int_equal(outcome.calls, 0);
    }
    check_moved(&pair->here, &pair->there, KVF_READ, NULL, 0, 1);
    pair_close(pair);
}

static void many_batches_each_end_once_under_their_own_number(void **state) {
    enum { BATCHES = 300 };
    test_pair *pair = pair_open(*state);
    uint64_t seed = 5;
    size_t count = draw_runs(&seed, &pair->here, &pair->there, KVF_READ, 2000, pair->runs, RUNS_MAX);
    size_t each = count / BATCHES + 1;
    static test_outcome outcomes[BATCHES];
    memset(outcomes, 0, sizeof outcomes);
    kvf_operation operations[BATCHES];
    for (size_t i = 0; i < BATCHES; i++) {
        size_t first = i * each < count ? i * each : count;
        size_t here = first + each < count ? each : count - first;
        assert_int_equal(kvf_transport_submit(pair->peer, KVF_READ, pair->runs + first, here, note_outcome,
                                              &outcomes[i], &operations[i]),
                         KVF_OK);
        for (size_t j = 0; j < i; j++)
            assert_true(operations[i] != operations[j] && operations[i] != 0);
    }
    for (size_t i = 0; i < BATCHES; i++)
        drive(&pair->here, &pair->there, &outcomes[i].calls, 1);
    drive_idle(&pair->here, &pair->there);
    for (size_t i = 0; i < BATCHES; i++) {
        assert_int_equal(outcomes[i].calls, 1);
        assert_int_equal(outcomes[i].status, KVF_OK);
        assert_int_equal(outcomes[i].operation, operations[i]);
    }
    check_moved(&pair->here, &pair->there, KVF_READ, pair->runs, count, 1);
    pair_close(pair);
}

static void one_endpoint_reads_from_several_peers_at_once(void **state) {
    test_pair *pair = pair_open(*state);
    test_side *third = calloc(1, sizeof *third);
    assert_non_null(third);
    side_open(third, *state, 3);
    kvf_peer *other = side_connect(&pair->here, third);
    kvf_run first = {0, 0, 3u << 20, 0, 0}, second = {0, 0, 1u << 20, 2, 2};
    test_outcome outcomes[2] = {{0}};
    assert_int_equal(kvf_transport_submit(pair->peer, KVF_READ, &first, 1, note_outcome, &outcomes[0], NULL),
                     KVF_OK);
    assert_int_equal(kvf_transport_submit(other, KVF_READ, &second, 1, note_outcome, &outcomes[1], NULL),
                     KVF_OK);
    /* All work in turn: while an owner that serves stands still, its peers may always have something to do. */
    while (!outcomes[0].calls || !outcomes[1].calls) {
        assert_int_equal(kvf_transport_progress(pair->here.transport, NULL), KVF_OK);
        assert_int_equal(kvf_transport_progress(pair->there.transport, NULL), KVF_OK);
        assert_int_equal(kvf_transport_progress(third->transport, NULL), KVF_OK);
    }
    assert_int_equal(outcomes[0].status, KVF_OK);
    assert_int_equal(outcomes[1].status, KVF_OK);
    assert_memory_equal(side_memory(&pair->here, 0), side_memory(&pair->there, 0), first.bytes);
    assert_memory_equal(side_memory(&pair->here, 2), side_memory(third, 2), second.bytes);
    side_close(&pair->here);
    side_close(third);
    free(third);
    side_close(&pair->there);
    free(pair);
}

/* ---- notifications --------------------------------------------------------------------------- */

static void check_written(test_side *there) {
    assert_int_equal(side_memory(there, 0)[there->notice_values[there->notices - 1]], 0xa5);
}

static void a_notification_comes_after_what_was_written_before_it(void **state) {
    if (is_refused(*state, KVF_WRITE))
        return;
    test_pair *pair = pair_open(*state);
    pair->there.on_notice = check_written;
    for (uint32_t i = 0; i < 50; i++) {
        uint32_t value = i * 70000;
        kvf_run run = {value, value, 1, 0, 0};
        side_memory(&pair->here, 0)[value] = 0xa5;
        side_memory(&pair->there, 0)[value] = 0;
        assert_int_equal(move_runs(&pair->here, &pair->there, pair->peer, KVF_WRITE, &run, 1), KVF_OK);
        assert_int_equal(kvf_transport_notify(pair->peer, &value, sizeof value), KVF_OK);
    }
    drive(&pair->here, &pair->there, &pair->there.notices, 50);
    for (uint32_t i = 0; i < 50; i++)
        assert_int_equal(pair->there.notice_values[i], i * 70000);
    pair_close(pair);
}

static void notifications_wait_for_a_receiver_that_does_not_drain(void **state) {
    test_pair *pair = pair_open(*state);
    unsigned char message[4096] = {0};
    uint32_t sent = 0, refused = 0;
    while (sent < 2000) {
        memcpy(message, &sent, sizeof sent);
        kvf_status status = kvf_transport_notify(pair->peer, message, sizeof message);
        if (status == KVF_OK) {
            sent++;
            continue;
        }
        assert_int_equal(status, KVF_E_AGAIN);
        refused++;
        drive_idle(&pair->here, &pair->there);
    }
    assert_true(refused > 0);
    drive(&pair->here, &pair->there, &pair->there.notices, sent);
    for (uint32_t i = 0; i < sent; i++)
        assert_int_equal(pair->there.notice_values[i], i);
    pair_close(pair);
}

static void a_notification_has_1_to_4096_bytes(void **state) {
    test_pair *pair = pair_open(*state);
    unsigned char message[4097] = {7};
    assert_int_equal(kvf_transport_notify(pair->peer, message, 0), KVF_E_RANGE);
    assert_int_equal(kvf_transport_notify(pair->peer, message, 4097), KVF_E_RANGE);
    assert_int_equal(kvf_transport_notify(pair->peer, NULL, 8), KVF_E_INVALID);
    assert_int_equal(kvf_transport_notify(NULL, message, 8), KVF_E_INVALID);
    pair_close(pair);
}

static void a_notification_arrives_though_its_sender_closes_at_once(void **state) {
    test_pair *pair = pair_open(*state);
    uint32_t value = 9;
    kvf_run run = {.bytes = 10};
    assert_int_equal(move_runs(&pair->here, &pair->there, pair->peer, KVF_READ, &run, 1), KVF_OK);
    assert_int_equal(kvf_transport_notify(pair->peer, &value, sizeof value), KVF_OK);
    side_close(&pair->here);
    drive(NULL, &pair->there, &pair->there.notices, 1);
    assert_int_equal(pair->there.notice_values[0], 9);
    assert_string_equal(pair->there.sender, "side 1");
    side_close(&pair->there);
    free(pair);
}

static bool no_memory;
static uint32_t refusals;

static void *allocate_perhaps(void *context, size_t bytes) {
    (void)context;
    refusals += no_memory;
    return no_memory ? NULL : malloc(bytes);
}

static void *resize_perhaps(void *context, void *memory, size_t bytes) {
    (void)context;
    refusals += no_memory;
    return no_memory ? NULL : realloc(memory, bytes);
}

static void release(void *context, void *memory) {
    (void)context;
    free(memory);
}

static void notifications_wait_while_there_is_no_memory_for_them(void **state) {
    const kvf_allocator allocator = {allocate_perhaps, resize_perhaps, release, NULL};
    assert_int_equal(kvf_set_allocator(&allocator), KVF_OK);
    test_pair *pair = pair_open(*state);
    drive_idle(&pair->here, &pair->there);
    unsigned char message[4000] = {0};
    uint32_t sent = 0;
    for (; sent < 300; sent++) {
        memcpy(message, &sent, sizeof sent);
        if (kvf_transport_notify(pair->peer, message, sizeof message) != KVF_OK)
            break;
    }
    assert_true(sent > 5);
    no_memory = true;
    refusals = 0;
    while (refusals == 0 && pair->there.notices < sent) {
        assert_int_equal(kvf_transport_progress(pair->here.transport, NULL), KVF_OK);
        assert_int_equal(kvf_transport_progress(pair->there.transport, NULL), KVF_OK);
    }
    no_memory = false;
    /* There may be no refusal only if memory for all of them had been allocated before. */
    drive(&pair->here, &pair->there, &pair->there.notices, sent);
    for (uint32_t i = 0; i < sent; i++)
        assert_int_equal(pair->there.notice_values[i], i);
    pair_close(pair);
    assert_int_equal(kvf_set_allocator(NULL), KVF_OK);
}

/* ---- ending ---------------------------------------------------------------------------------- */

static void a_cancelled_batch_ends_once_and_others_go_on(void **state) {
    test_pair *pair = pair_open(*state);
    kvf_run big = {0, 0, 5u << 20, 0, 0}, small = {0, 0, 5000, 1, 1};
    test_outcome outcomes[3] = {{0}};
    kvf_operation operations[3];
    const kvf_run *runs[3] = {&big, &big, &small};
    for (int i = 0; i < 3; i++)
        assert_int_equal(kvf_transport_submit(pair->peer, KVF_READ, runs[i], 1, note_outcome, &outcomes[i],
                                              &operations[i]),
                         KVF_OK);
    assert_int_equal(kvf_transport_cancel(pair->here.transport, operations[1]), KVF_OK);
    assert_int_equal(kvf_transport_cancel(pair->here.transport, operations[1]), KVF_OK);
    assert_int_equal(outcomes[1].calls, 0);
    for (int i = 0; i < 3; i++)
        drive(&pair->here, &pair->there, &outcomes[i].calls, 1);
    assert_int_equal(outcomes[0].status, KVF_OK);
    assert_int_equal(outcomes[1].status, KVF_E_CANCELLED);
    assert_int_equal(outcomes[2].status, KVF_OK);
    assert_string_equal(outcomes[0].detail, "");
    check_detail(outcomes[1].detail, pair, "reading from side 2: cancelled by its owner");
    assert_memory_equal(side_memory(&pair->here, 1), side_memory(&pair->there, 1), small.bytes);
    assert_int_equal(kvf_transport_cancel(pair->here.transport, operations[1]), KVF_E_NOT_FOUND);
    assert_int_equal(kvf_transport_cancel(pair->here.transport, 0), KVF_E_NOT_FOUND);
    assert_int_equal(kvf_transport_cancel(pair->here.transport, 123456789), KVF_E_NOT_FOUND);
    pair_close(pair);
}

static void a_batch_can_be_cancelled_at_any_moment(void **state) {
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++)
        for (uint32_t turns = 0; turns < 12 && pair_can(*state, (kvf_direction)direction);
             turns += SANITIZED ? 3 : 1) {
            test_pair *pair = pair_open(*state);
            kvf_run big = {0, 0, 5u << 20, 0, 0}, small = {0, 0, 5000, 1, 1};
            test_outcome outcomes[2] = {{0}};
            kvf_operation operation;
            assert_int_equal(kvf_transport_submit(pair->peer, (kvf_direction)direction, &big, 1, note_outcome,
                                                  &outcomes[0], &operation),
                             KVF_OK);
            assert_int_equal(
                kvf_transport_submit(pair->peer, KVF_READ, &small, 1, note_outcome, &outcomes[1], NULL),
                KVF_OK);
            for (uint32_t i = 0; i < turns; i++)
                assert_int_equal(
                    kvf_transport_progress(i % 2 ? pair->there.transport : pair->here.transport, NULL),
                    KVF_OK);
            kvf_status status = kvf_transport_cancel(pair->here.transport, operation);
            assert_int_equal(status, outcomes[0].calls ? KVF_E_NOT_FOUND : KVF_OK);
            drive(&pair->here, &pair->there, &outcomes[0].calls, 1);
            drive(&pair->here, &pair->there, &outcomes[1].calls, 1);
            assert_int_equal(outcomes[0].calls, 1);
            assert_true(outcomes[0].status == KVF_OK || outcomes[0].status == KVF_E_CANCELLED);
            assert_int_equal(outcomes[1].status, KVF_OK);
            pair_close(pair);
        }
}

/* More batches than any fabric has under way at once, so the last has not begun for a while. */
#define MANY 60

static void closing_a_peer_ends_its_batches_as_cancelled(void **state) {
    test_pair *pair = pair_open(*state);
    kvf_run big = {0, 0, 5u << 20, 0, 0};
    static test_outcome outcomes[MANY];
    memset(outcomes, 0, sizeof outcomes);
    for (int i = 0; i < MANY; i++)
        assert_int_equal(
            kvf_transport_submit(pair->peer, KVF_READ, &big, 1, note_outcome, &outcomes[i], NULL), KVF_OK);
    for (int i = 0; i < 4 && !outcomes[0].calls; i++) {
        assert_int_equal(kvf_transport_progress(pair->here.transport, NULL), KVF_OK);
        assert_int_equal(kvf_transport_progress(pair->there.transport, NULL), KVF_OK);
    }
    kvf_peer_close(pair->peer);
    for (int i = 0; i < MANY; i++)
        assert_int_equal(outcomes[i].calls, 1);
    assert_int_equal(outcomes[MANY - 1].status, KVF_E_CANCELLED);
    check_detail(outcomes[MANY - 1].detail, pair, "reading from side 2: the connection was closed");
    drive_idle(&pair->here, &pair->there);
    assert_int_equal(pair->here.lost, 0);
    pair_close(pair);
}

typedef struct test_closer {
    kvf_peer *peer;
    kvf_transport *transport;
    kvf_operation cancelled;
    test_outcome outcome;
    kvf_status submitted, progressed;
} test_closer;

static void close_in_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    test_closer *closer = context;
    note_outcome(&closer->outcome, operation, status, detail);
    if (!closer->peer)
        return;
    kvf_peer *peer = closer->peer;
    closer->peer = NULL;
    kvf_peer_close(peer);
    closer->progressed = kvf_transport_progress(closer->transport, NULL);
}

static void a_peer_can_be_closed_by_the_callback_of_its_own_batch(void **state) {
    test_pair *pair = pair_open(*state);
    kvf_run small = {0, 0, 5000, 1, 1}, big = {0, 0, 5u << 20, 0, 0};
    test_closer closer = {.peer = pair->peer, .transport = pair->here.transport};
    test_outcome others[2] = {{0}};
    assert_int_equal(kvf_transport_submit(pair->peer, KVF_READ, &small, 1, close_in_done, &closer, NULL),
                     KVF_OK);
    assert_int_equal(kvf_transport_submit(pair->peer, KVF_READ, &small, 1, note_outcome, &others[0], NULL),
                     KVF_OK);
    assert_int_equal(kvf_transport_submit(pair->peer, KVF_READ, &big, 1, note_outcome, &others[1], NULL),
                     KVF_OK);
    drive(&pair->here, &pair->there, &closer.outcome.calls, 1);
    assert_int_equal(closer.outcome.status, KVF_OK);
    assert_int_equal(closer.progressed, KVF_E_INVALID);
    assert_int_equal(others[0].calls, 1);
    assert_int_equal(others[1].calls, 1);
    assert_true(others[1].status == KVF_E_CANCELLED || others[1].status == KVF_OK);
    drive_idle(&pair->here, &pair->there);
    pair_close(pair);
}

static void cancel_in_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    test_closer *closer = context;
    note_outcome(&closer->outcome, operation, status, detail);
    closer->submitted = kvf_transport_cancel(closer->transport, closer->cancelled);
}

static void a_batch_can_be_cancelled_by_a_callback(void **state) {
    test_pair *pair = pair_open(*state);
    kvf_run small = {0, 0, 5000, 1, 1}, big = {0, 0, 5u << 20, 0, 0};
    test_closer closer = {.transport = pair->here.transport};
    static test_outcome others[MANY];
    memset(others, 0, sizeof others);
    assert_int_equal(kvf_transport_submit(pair->peer, KVF_READ, &small, 1, cancel_in_done, &closer, NULL),
                     KVF_OK);
    for (int i = 0; i < MANY; i++)
        assert_int_equal(
            kvf_transport_submit(pair->peer, KVF_READ, &big, 1, note_outcome, &others[i], &closer.cancelled),
            KVF_OK);
    drive(&pair->here, &pair->there, &closer.outcome.calls, 1);
    assert_int_equal(closer.submitted, KVF_OK);
    for (int i = 0; i < MANY; i++)
        drive(&pair->here, &pair->there, &others[i].calls, 1);
    for (int i = 0; i < MANY - 1; i++)
        assert_int_equal(others[i].status, KVF_OK);
    assert_int_equal(others[MANY - 1].status, KVF_E_CANCELLED);
    pair_close(pair);
}

static void close_in_notice(test_side *there) {
    kvf_peer_close(there->user);
}

static void a_peer_can_be_closed_by_a_notification(void **state) {
    test_pair *pair = pair_open(*state);
    pair->there.user = side_connect(&pair->there, &pair->here);
    kvf_run big = {0, 0, 5u << 20, 0, 0};
    test_outcome outcome = {0};
    uint32_t value = 1;
    assert_int_equal(kvf_transport_submit(pair->there.user, KVF_READ, &big, 1, note_outcome, &outcome, NULL),
                     KVF_OK);
    pair->there.on_notice = close_in_notice;
    assert_int_equal(kvf_transport_notify(pair->peer, &value, sizeof value), KVF_OK);
    drive(&pair->here, &pair->there, &pair->there.notices, 1);
    assert_int_equal(outcome.calls, 1);
    drive_idle(&pair->here, &pair->there);
    pair_close(pair);
}

static void a_peer_that_closes_is_lost_once_and_other_peers_go_on(void **state) {
    test_pair *pair = pair_open(*state);
    test_side *third = calloc(1, sizeof *third);
    assert_non_null(third);
    side_open(third, *state, 3);
    kvf_peer *other = side_connect(&pair->here, third);
    kvf_run big = {0, 0, 5u << 20, 0, 0}, small = {0, 0, 5000, 1, 1};
    test_outcome outcomes[2] = {{0}};
    assert_int_equal(move_runs(&pair->here, &pair->there, pair->peer, KVF_READ, &small, 1), KVF_OK);
    for (int i = 0; i < 2; i++)
        assert_int_equal(
            kvf_transport_submit(pair->peer, KVF_READ, &big, 1, note_outcome, &outcomes[i], NULL), KVF_OK);
    side_close(&pair->there);
    drive(&pair->here, NULL, &pair->here.lost, 1);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(outcomes[i].calls, 1);
        assert_int_equal(outcomes[i].status, KVF_E_PEER_LOST);
        check_detail(outcomes[i].detail, pair, "reading from side 2: ");
    }
    assert_ptr_equal(pair->here.lost_peer, pair->peer);
    assert_true(strlen(pair->here.lost_detail) > 10);
    assert_false(kvf_peer_lives(pair->peer));
    uint32_t value = 1;
    assert_int_equal(kvf_transport_submit(pair->peer, KVF_READ, &small, 1, note_outcome, &outcomes[0], NULL),
                     KVF_E_PEER_LOST);
    check_detail(kvf_error_detail(), pair, "side 2 is gone: ");
    assert_int_equal(kvf_transport_notify(pair->peer, &value, sizeof value), KVF_E_PEER_LOST);
    check_detail(kvf_error_detail(), pair, "side 2 is gone: ");
    assert_int_equal(move_runs(&pair->here, third, other, KVF_READ, &big, 1), KVF_OK);
    assert_memory_equal(side_memory(&pair->here, 0), side_memory(third, 0), big.bytes);
    drive_idle(&pair->here, third); /* a lost peer leaves nothing to do */
    kvf_peer_close(pair->peer);
    assert_int_equal(pair->here.lost, 1);
    side_close(third);
    free(third);
    pair_close(pair);
}

static void nobody_is_behind_the_card_of_a_closed_endpoint(void **state) {
    test_pair *pair = pair_open(*state);
    const void *card;
    size_t bytes;
    kvf_peer *peer = NULL;
    assert_int_equal(kvf_transport_export(pair->there.transport, &card, &bytes), KVF_OK);
    void *copy = malloc(bytes);
    assert_non_null(copy);
    memcpy(copy, card, bytes);
    side_close(&pair->there);
    assert_int_equal(kvf_transport_connect(pair->here.transport, copy, bytes, &peer), KVF_E_PEER_LOST);
    free(copy);
    pair_close(pair);
}

static void an_endpoint_connects_to_itself(void **state) {
    test_pair *pair = pair_open(*state);
    kvf_peer *self = side_connect(&pair->here, &pair->here);
    kvf_run run = {0, 0, 1u << 20, 2, 0};
    assert_int_equal(move_runs(&pair->here, NULL, self, KVF_READ, &run, 1), KVF_OK);
    assert_memory_equal(side_memory(&pair->here, 2), side_memory(&pair->here, 0), run.bytes);
    pair_close(pair);
}

/* Both work off what comes; then nothing comes for 50 ms. What is still on the way, a greeting for example, comes late. */
static void both_become_quiet(test_pair *pair) {
    struct pollfd fds[2] = {{kvf_transport_event_fd(pair->here.transport), POLLIN, 0},
                            {kvf_transport_event_fd(pair->there.transport), POLLIN, 0}};
    for (int late = 0; late < 100; late++) {
        drive_idle(&pair->here, &pair->there);
        if (poll(fds, 2, 50) == 0)
            return;
    }
    fail_msg("event descriptors became readable 100 times though there was nothing to do");
}

/* An endpoint that looks for events again and again, because it was told to, is never quiet. */
static bool is_restless(const pair_kind *kind) {
    return kind->setting.key && strcmp(kind->setting.key, "libfabric.poll_us") == 0;
}

static void the_event_descriptor_is_quiet_when_there_is_nothing_to_do(void **state) {
    if (is_restless(*state))
        skip();
    test_pair *pair = pair_open(*state);
    struct pollfd fd = {kvf_transport_event_fd(pair->here.transport), POLLIN, 0};
    bool busy = true;
    both_become_quiet(pair);
    assert_int_equal(kvf_transport_progress(pair->here.transport, &busy), KVF_OK);
    assert_false(busy);
    kvf_run big = {0, 0, 5u << 20, 0, 0};
    test_outcome outcome = {0};
    assert_int_equal(kvf_transport_submit(pair->peer, KVF_READ, &big, 1, note_outcome, &outcome, NULL),
                     KVF_OK);
    assert_int_equal(poll(&fd, 1, 0), 1);
    drive(&pair->here, &pair->there, &outcome.calls, 1);
    both_become_quiet(pair);
    pair_close(pair);
}

static void the_sizes_of_the_peers_regions_are_known(void **state) {
    test_pair *pair = pair_open(*state);
    uint32_t count = 0;
    const uint64_t *bytes = kvf_peer_region_bytes(pair->peer, &count);
    assert_int_equal(count, SIDE_REGIONS);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(bytes[i], pair->there.regions[i].bytes);
    pair_close(pair);
}

/* ---- memory that comes and goes -------------------------------------------------------------- */

typedef struct saved_card {
    unsigned char data[65536];
    size_t bytes;
} saved_card;

static void save_card(const test_side *side, saved_card *out) {
    const void *card;
    assert_int_equal(kvf_transport_export(side->transport, &card, &out->bytes), KVF_OK);
    assert_true(out->bytes <= sizeof out->data);
    memcpy(out->data, card, out->bytes);
}

static void unregister(test_pair *pair, test_side *side, uint32_t region) {
    kvf_status status;
    while ((status = kvf_transport_unregister_region(side->transport, region)) == KVF_E_AGAIN) {
        assert_int_equal(kvf_transport_progress(pair->here.transport, NULL), KVF_OK);
        assert_int_equal(kvf_transport_progress(pair->there.transport, NULL), KVF_OK);
    }
    assert_int_equal(status, KVF_OK);
}

static void a_region_is_added_while_peers_are_connected(void **state) {
    test_pair *pair = pair_open(*state);
    kvf_run old = {0, 0, 5000, 1, 1}, fresh = {100, 0, 4096, 0, SIDE_REGIONS};
    unsigned char *added;
    const kvf_memory memory = pair_memory(*state, 0, 4096, &added);
    side_fill(added, 9, 3, 4096);
    assert_int_equal(move_runs(&pair->here, &pair->there, pair->peer, KVF_READ, &old, 1), KVF_OK);
    assert_int_equal(kvf_transport_register_region(pair->there.transport, SIDE_REGIONS + 1, &memory),
                     KVF_E_RANGE);
    assert_int_equal(kvf_transport_register_region(pair->there.transport, 0, &memory), KVF_E_EXISTS);
    assert_int_equal(kvf_transport_register_region(pair->there.transport, SIDE_REGIONS, &memory), KVF_OK);
    assert_int_equal(move_runs(&pair->here, &pair->there, pair->peer, KVF_READ, &old, 1), KVF_OK);
    assert_int_equal(
        kvf_transport_submit(pair->peer, KVF_READ, &fresh, 1, note_outcome, &(test_outcome){0}, NULL),
        KVF_E_NOT_REGISTERED);
    kvf_peer *anew = side_connect(&pair->here, &pair->there);
    uint32_t count = 0;
    assert_int_equal(kvf_peer_region_bytes(anew, &count)[SIDE_REGIONS], 4096);
    assert_int_equal(count, SIDE_REGIONS + 1);
    assert_int_equal(move_runs(&pair->here, &pair->there, anew, KVF_READ, &fresh, 1), KVF_OK);
    assert_memory_equal(side_memory(&pair->here, 0) + 100, added, 4096);
    assert_int_equal(pair->here.lost, 0);
    pair_close(pair);
    pair_memory_free(&memory);
}

/* Whether a refusal is reported as such; over UCX and the toy fabric it looks like the end of the peer. */
static bool says_that_it_refuses(const kvf_peer *peer) {
    const char *kind = kvf_peer_kind(peer);
    return strcmp(kind, "inproc") == 0 || strcmp(kind, "shm") == 0 || strcmp(kind, "cuda") == 0 ||
           strcmp(kind, "messages") == 0;
}

/* Connecting with an old card fails, or the connection is lost at once; either gives the reason. */
static void check_refused_as_old(test_pair *pair, const saved_card *card) {
    kvf_peer *peer = NULL;
    uint32_t before = pair->here.lost;
    kvf_status status = kvf_transport_connect(pair->here.transport, card->data, card->bytes, &peer);
    if (status == KVF_OK) {
        drive(&pair->here, &pair->there, &pair->here.lost, before + 1);
        assert_non_null(strstr(pair->here.lost_detail, "generation"));
        kvf_peer_close(peer);
    } else {
        assert_true(status == KVF_E_NOT_REGISTERED || status == KVF_E_PEER_LOST);
        assert_non_null(strstr(kvf_error_detail(), "generation"));
    }
}

static void a_region_that_moves_is_met_by_a_new_card_and_old_cards_are_refused(void **state) {
    static saved_card before;
    test_pair *pair = pair_open(*state);
    kvf_run gone = {0, 0, 5000, 0, 0}, kept = {0, 7, 5000, 1, 1};
    uint64_t bytes = pair->there.regions[0].bytes;
    unsigned char *moved;
    const kvf_memory memory = pair_memory(*state, 0, bytes, &moved);
    side_fill(moved, 8, 0, bytes);
    save_card(&pair->there, &before);
    assert_int_equal(move_runs(&pair->here, &pair->there, pair->peer, KVF_READ, &gone, 1), KVF_OK);

    unregister(pair, &pair->there, 0);
    drive(&pair->here, &pair->there, &pair->here.lost, 1);
    assert_non_null(strstr(pair->here.lost_detail, "generation"));
    assert_int_equal(kvf_peer_lives(pair->peer), says_that_it_refuses(pair->peer));
    check_refused_as_old(pair, &before);
    assert_int_equal(kvf_transport_unregister_region(pair->there.transport, 0), KVF_E_NOT_REGISTERED);

    kvf_peer *anew = side_connect(&pair->here, &pair->there);
    assert_int_equal(kvf_peer_region_bytes(anew, NULL)[0], 0);
    assert_int_equal(kvf_transport_submit(anew, KVF_READ, &gone, 1, note_outcome, &(test_outcome){0}, NULL),
                     KVF_E_NOT_REGISTERED);
    assert_non_null(strstr(kvf_error_detail(), "remote region 0 was unregistered"));
    assert_int_equal(move_runs(&pair->here, &pair->there, anew, KVF_READ, &kept, 1), KVF_OK);

    assert_int_equal(kvf_transport_register_region(pair->there.transport, 0, &memory), KVF_OK);
    anew = side_connect(&pair->here, &pair->there);
    assert_int_equal(move_runs(&pair->here, &pair->there, anew, KVF_READ, &gone, 1), KVF_OK);
    assert_memory_equal(side_memory(&pair->here, 0), moved, 5000);
    check_refused_as_old(pair, &before);
    pair_close(pair);
    pair_memory_free(&memory);
}

static void a_region_is_not_taken_from_operations_that_use_it(void **state) {
    test_pair *pair = pair_open(*state);
    kvf_run big = {0, 0, 5u << 20, 0, 0};
    test_outcome outcome = {0};
    assert_int_equal(kvf_transport_submit(pair->peer, KVF_READ, &big, 1, note_outcome, &outcome, NULL),
                     KVF_OK);
    assert_int_equal(kvf_transport_unregister_region(pair->here.transport, 0), KVF_E_AGAIN);
    assert_int_equal(kvf_transport_unregister_region(pair->here.transport, 1), KVF_OK);
    drive(&pair->here, &pair->there, &outcome.calls, 1);
    assert_int_equal(outcome.status, KVF_OK);
    assert_memory_equal(side_memory(&pair->here, 0), side_memory(&pair->there, 0), big.bytes);
    assert_int_equal(kvf_transport_unregister_region(pair->here.transport, 0), KVF_OK);
    assert_int_equal(kvf_transport_submit(pair->peer, KVF_READ, &big, 1, note_outcome, &outcome, NULL),
                     KVF_E_NOT_REGISTERED);
    pair_close(pair);
}

int main(void) {
    static const way_test tests[] = {
        NAMED(a_read_moves_exactly_the_bytes_of_its_runs),
        NAMED(a_write_moves_exactly_the_bytes_of_its_runs),
        NAMED(a_run_longer_than_any_slice_moves_whole),
        NAMED(a_region_behind_the_others_that_is_withheld_hinders_nobody),
        NAMED(an_empty_batch_and_runs_of_no_bytes_end_well),
        NAMED(runs_outside_of_memory_are_refused_and_nothing_moves),
        NAMED(many_batches_each_end_once_under_their_own_number),
        NAMED(one_endpoint_reads_from_several_peers_at_once),
        NAMED(a_notification_comes_after_what_was_written_before_it),
        NAMED(notifications_wait_for_a_receiver_that_does_not_drain),
        NAMED(a_notification_has_1_to_4096_bytes),
        NAMED(notifications_wait_while_there_is_no_memory_for_them),
        NAMED(a_notification_arrives_though_its_sender_closes_at_once),
        NAMED(a_cancelled_batch_ends_once_and_others_go_on),
        NAMED(a_batch_can_be_cancelled_at_any_moment),
        NAMED(closing_a_peer_ends_its_batches_as_cancelled),
        NAMED(a_peer_can_be_closed_by_the_callback_of_its_own_batch),
        NAMED(a_batch_can_be_cancelled_by_a_callback),
        NAMED(a_peer_can_be_closed_by_a_notification),
        NAMED(a_peer_that_closes_is_lost_once_and_other_peers_go_on),
        NAMED(nobody_is_behind_the_card_of_a_closed_endpoint),
        NAMED(an_endpoint_connects_to_itself),
        NAMED(the_event_descriptor_is_quiet_when_there_is_nothing_to_do),
        NAMED(the_sizes_of_the_peers_regions_are_known),
        NAMED(a_region_is_added_while_peers_are_connected),
        NAMED(a_region_that_moves_is_met_by_a_new_card_and_old_cards_are_refused),
        NAMED(a_region_is_not_taken_from_operations_that_use_it),
    };
    test_way ways[MAX_WAYS];
    return run_every_way("transport_conformance", tests, sizeof tests / sizeof *tests, ways,
                         ways_of_pairs(transport_variants, transport_variant_count(), ways), NULL, 0);
}
