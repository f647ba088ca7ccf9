/*
 * A child of fork() has its parent's transports in its memory: its calls are refused, never hang, and break nothing of
 * the parent's. Runs over every fabric and variant.
 */
#include "transport_pair.h"

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
    int allowed = is_allowed(kvf_transport_progress(side->transport, NULL));
    allowed += is_allowed(kvf_transport_submit(peer, KVF_READ, &run, 1, note_outcome, &outcome, &operation));
    allowed += is_allowed(kvf_transport_notify(peer, "word", 4));
    allowed += is_allowed(kvf_transport_cancel(side->transport, 1));
    allowed += is_allowed(kvf_transport_connect(side->transport, card, bytes, &another));
    allowed += is_allowed(kvf_transport_export(side->transport, &card, &bytes));
    allowed += is_allowed(kvf_transport_fence(side->transport, card, bytes));
    allowed += is_allowed(kvf_transport_allocate(side->transport, KVF_MEMORY_HOST, 0, 4096, &memory));
    allowed += is_allowed(kvf_transport_register_region(side->transport, SIDE_REGIONS, &side->regions[0]));
    allowed += is_allowed(kvf_transport_unregister_region(side->transport, 0));
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

static void a_child_of_fork_may_open_its_own(void **state) {
    test_side a;
    side_open(&a, *state, 1);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        test_side own, other;
        (void)alarm(60);
        if (!survives_fork(*state)) {
            kvf_transport *none;
            _exit(kvf_transport_open(((const pair_kind *)*state)->kind, NULL, &none) != KVF_E_UNSUPPORTED ||
                  strstr(kvf_error_detail(), "forked") == NULL);
        }
        side_open(&own, *state, 3);
        side_open(&other, *state, 4);
        moves(&own, &other, side_connect(&own, &other));
        side_close(&own);
        side_close(&other);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    side_close(&a);
}

int main(void) {
    uint32_t variants = transport_variant_count();
    struct CMUnitTest *all = calloc(2 * (size_t)variants, sizeof *all);
    char(*names)[200] = calloc(2 * (size_t)variants, sizeof *names);
    if (!all || !names)
        return 1;
    for (uint32_t i = 0; i < 2 * variants; i++) {
        pair_kind *kind = &transport_variants[i / 2];
        char variant[96];
        transport_variant_name(kind, variant, sizeof variant);
        (void)snprintf(names[i], sizeof names[i], "%s (%s)", i % 2 ? "its own" : "its parent's", variant);
        all[i] = (struct CMUnitTest){names[i],
                                     i % 2 ? a_child_of_fork_may_open_its_own
                                           : a_child_of_fork_can_neither_use_nor_close_a_transport,
                                     NULL, NULL, kind};
    }
    int failed = _cmocka_run_group_tests("transport_fork", all, 2 * (size_t)variants, NULL, NULL);
    free(names);
    free(all);
    return failed;
}
