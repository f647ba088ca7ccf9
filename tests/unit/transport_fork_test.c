/*
 * A child of fork() has its parent's transports in its memory: its calls are refused, never hang, and break nothing of
 * the parent's. Runs over every fabric and variant.
 */
#include "transport_pair.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static const kvf_run run = {.bytes = 50000};

static int is_allowed(kvf_status status) {
    return status != KVF_E_INVALID || strstr(kvf_error_detail(), "forked") == NULL;
}

/* Makes every call in the child; returns how many were not refused. */
static int use_and_close(test_side *side, kvf_peer *peer, const void *card, size_t bytes) {
    kvf_operation operation;
    kvf_peer *another;
    void *memory;
    test_outcome outcome = {0};
    kvf_transport_finding finding = {.struct_size = sizeof finding};
    kvf_transport_info counts = {.struct_size = sizeof counts};
    kvf_peer_info info = {.struct_size = sizeof info};
    int allowed = is_allowed(kvf_transport_progress(side->transport, NULL));
    allowed += is_allowed(kvf_transport_submit(peer, KVF_READ, &run, 1, note_outcome, &outcome, &operation));
    allowed += is_allowed(kvf_transport_notify(peer, "word", 4));
    allowed += is_allowed(kvf_transport_cancel(side->transport, 1));
    allowed += is_allowed(kvf_transport_connect(side->transport, card, bytes, &another));
    allowed += is_allowed(kvf_transport_export(side->transport, &card, &bytes));
    allowed += is_allowed(kvf_transport_fence(side->transport, card, bytes));
    allowed += is_allowed(kvf_transport_admit(side->transport, card, bytes));
    allowed += is_allowed(kvf_transport_allocate(side->transport, KVF_MEMORY_HOST, 0, 4096, &memory));
    allowed += is_allowed(kvf_transport_register_region(side->transport, SIDE_REGIONS, &side->regions[0]));
    allowed += is_allowed(kvf_transport_unregister_region(side->transport, 0));
    allowed += is_allowed(kvf_transport_find(side->transport, 0, &finding));
    allowed += is_allowed(kvf_transport_get_info(side->transport, &counts));
    allowed += is_allowed(kvf_peer_get_info(peer, &info));
    kvf_peer_close(peer);
    kvf_transport_close(side->transport);
    return allowed;
}

static void moves(test_side *a, test_side *b, kvf_peer *peer) {
    memset(side_memory(a, 0), 0, run.bytes);
    assert_int_equal(move_runs(a, b, peer, KVF_READ, &run, 1), KVF_OK);
    assert_memory_equal(side_memory(a, 0), side_memory(b, 0), run.bytes);
}

static void a_child_of_fork_can_neither_use_nor_close_a_transport(void **state) {
    test_side a, b;
    side_open(&a, *state, 1);
    side_open(&b, *state, 2);
    kvf_peer *peer = side_connect(&a, &b);
    moves(&a, &b, peer);
    const void *card;
    size_t bytes;
    assert_int_equal(kvf_transport_export(b.transport, &card, &bytes), KVF_OK);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        (void)alarm(20); /* a call that hangs fails the test */
        _exit(use_and_close(&a, peer, card, bytes));
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    moves(&a, &b, peer);
    side_close(&a);
    side_close(&b);
}

/* Neither UCX nor libfabric survives a fork. */
static bool survives_fork(const pair_kind *kind) {
    return strcmp(kind->kind, "ucx") != 0 && strcmp(kind->kind, "libfabric") != 0;
}

/* In a child: opens endpoints of its own, moves, and ends the process; `kind` survives a fork. */
static void open_own(const pair_kind *kind) {
    test_side own, other;
    (void)alarm(60); /* a call that hangs fails the test */
    side_open(&own, kind, 3);
    side_open(&other, kind, 4);
    moves(&own, &other, side_connect(&own, &other));
    side_close(&own);
    side_close(&other);
    _exit(0);
}

static void assert_ended_well(pid_t child) {
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* Whether an endpoint that has nothing to do no longer wants to be called. */
static bool comes_to_rest(const test_side *side) {
    struct pollfd event = {kvf_transport_event_fd(side->transport), POLLIN, 0};
    for (int i = 0; i < 10000 && poll(&event, 1, 0) > 0; i++)
        assert_int_equal(kvf_transport_progress(side->transport, NULL), KVF_OK);
    return poll(&event, 1, 0) == 0;
}

/* The child once woke its parent's endpoint of "inproc" by the descriptor that they share: the parent found nothing to
 * do, and was called again without end. */
static void a_child_of_fork_may_open_its_own(void **state) {
    test_side a;
    side_open(&a, *state, 1);
    assert_true(comes_to_rest(&a));
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0 && !survives_fork(*state)) {
        kvf_transport *none;
        _exit(kvf_transport_open(((const pair_kind *)*state)->kind, NULL, &none) != KVF_E_UNSUPPORTED ||
              strstr(kvf_error_detail(), "forked") == NULL);
    }
    if (child == 0)
        open_own(*state);
    assert_ended_well(child);
    assert_true(comes_to_rest(&a));
    side_close(&a);
}

/* ---- forks in the middle of a call ----------------------------------------------------------- */

/* Each call of the allocator forks, and the child opens a transport of this kind; NULL: no call forks. */
static const pair_kind *forks_for;
static uint32_t forked;

static void fork_here(void) {
    const pair_kind *kind = forks_for;
    if (!kind)
        return;
    forks_for = NULL;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        open_own(kind);
    assert_ended_well(child);
    forked++;
    forks_for = kind;
}

static void *allocate(void *context, size_t bytes) {
    (void)context;
    fork_here();
    return malloc(bytes);
}

static void *resize(void *context, void *memory, size_t bytes) {
    (void)context;
    fork_here();
    return realloc(memory, bytes);
}

static void release(void *context, void *memory) {
    (void)context;
    free(memory);
}

/* As if another thread were in the middle of the call: that one holds its locks, and is not there in the child. */
static void a_child_forked_in_the_middle_of_a_call_may_open_its_own(void **state) {
    test_side a;
    side_open(&a, *state, 1);
    unsigned char *seen;
    const kvf_memory memory = pair_memory(*state, 0, 4096, &seen);
    forks_for = *state;
    assert_int_equal(kvf_transport_register_region(a.transport, SIDE_REGIONS, &memory), KVF_OK);
    forks_for = NULL;
    assert_true(forked > 0);
    side_close(&a);
    pair_memory_free(&memory);
}

int main(void) {
    static const struct {
        const char *name;
        CMUnitTestFunction test;
        bool for_survivors; /* only for fabrics that survive a fork */
    } tests[] = {{"its parent's", a_child_of_fork_can_neither_use_nor_close_a_transport, false},
                 {"its own", a_child_of_fork_may_open_its_own, false},
                 {"in the middle of a call", a_child_forked_in_the_middle_of_a_call_may_open_its_own, true}};
    const uint32_t each = sizeof tests / sizeof *tests;
    const kvf_allocator allocator = {allocate, resize, release, NULL};
    if (kvf_set_allocator(&allocator))
        return 1;
    const uint32_t most = each * transport_variant_count();
    struct CMUnitTest *all = calloc(most, sizeof *all);
    char(*names)[200] = calloc(most, sizeof *names);
    if (!all || !names)
        return 1;
    uint32_t count = 0;
    for (uint32_t i = 0; i < most; i++) {
        pair_kind *kind = &transport_variants[i / each];
        char variant[96];
        if (tests[i % each].for_survivors && !survives_fork(kind))
            continue;
        transport_variant_name(kind, variant, sizeof variant);
        (void)snprintf(names[count], sizeof names[count], "%s (%s)", tests[i % each].name, variant);
        all[count] = (struct CMUnitTest){names[count], tests[i % each].test, NULL, NULL, kind};
        count++;
    }
    int failed = _cmocka_run_group_tests("transport_fork", all, count, NULL, NULL);
    free(names);
    free(all);
    return failed;
}
