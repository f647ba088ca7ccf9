/*
 * Transfers over a faulty fabric in front of the real ones: whatever happens, they end, either well with the right
 * bytes or with an error, and once they have ended nothing more is written.
 */
#include <kvferry/transport.h>

#include "cell_ends.h"
#include "faulty_fabric.h"
#include "sanitized.h"
#include "transport_ways.h"

#define TOKENS 400u
#define SOURCES 2u

/* One rank of D, and all ranks of P. */
typedef struct world {
    pair engines;
    cell_sequence d_sequence, p_sequence;
    cell_end d, p[SOURCES];
    kvf_plan *plan;
    kvf_request *request;
    cell_rank before, wanted; /* D's memory before the transfer, and as it must become */
    bool by_messages;
    bool has_no_fence; /* of a network: bytes that were sent arrive when they arrive */
} world;

static world *world_open(const char *kind) {
    world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->by_messages = strcmp(kind, "messages") == 0;
    w->has_no_fence = strcmp(kind, "libfabric") == 0;
    w->engines = pair_of(attention(2, 4, 32),
                         ENGINE(.all = {.block_count = 60, .tokens_per_block = 12, .order = "LP|BNH"}),
                         ENGINE(.tp_size = SOURCES, .all = {.block_count = 60, .tokens_per_block = 16}));
    sequence_open(&w->d_sequence, kvf_engine_shard(w->engines.local, 0), TOKENS, 1);
    sequence_open(&w->p_sequence, kvf_engine_shard(w->engines.remote, 0), TOKENS, 2);
    end_open(&w->d, faulty_fabric(kind), kind, kvf_engine_shard(w->engines.local, 0), &w->d_sequence);
    for (uint32_t i = 0; i < SOURCES; i++) {
        end_open(&w->p[i], faulty_fabric(kind), kind, kvf_engine_shard(w->engines.remote, i), &w->p_sequence);
        rank_fill(&w->p[i].cells, all_layers(w->p[i].cells.shard), 5);
    }
    rank_copy(&w->before, &w->d.cells);
    rank_copy(&w->wanted, &w->d.cells);
    rank_fill(&w->wanted, all_layers(w->wanted.shard), 5);
    w->plan = plan_of(&w->engines, 0);
    assert_int_equal(kvf_plan_source_count(w->plan), SOURCES);
    w->request = request_of(w->plan);
    set_sequences(w->request, &w->d_sequence, &w->p_sequence);
    return w;
}

static void world_close(world *w) {
    for (uint32_t i = 0; i < SOURCES; i++)
        end_close(&w->p[i]);
    end_close(&w->d);
    rank_close(&w->before);
    rank_close(&w->wanted);
    kvf_request_free(w->request);
    kvf_plan_free(w->plan);
    sequence_close(&w->d_sequence);
    sequence_close(&w->p_sequence);
    free_pair(&w->engines);
    free(w);
}

static bool step(const world *w, int timeout_ms) {
    const cell_end *ends[] = {&w->d, &w->p[0], &w->p[1]};
    return ends_work(ends, COUNT_OF(ends), timeout_ms);
}

/* ---- one try --------------------------------------------------------------------------------- */

/* One attempt: D reads from its sources, or each source writes to D. */
typedef struct attempt {
    kvf_peer *peers[SOURCES];
    kvf_transfer *transfers[SOURCES];
    uint32_t count;
    kvf_status status;
} attempt;

static void attempt_start(attempt *a, const world *w, bool push) {
    *a = (attempt){0};
    for (uint32_t i = 0; i < SOURCES && !a->status; i++) {
        const cell_end *p = &w->p[kvf_plan_source_rank(w->plan, i)];
        a->status = end_connect(push ? p : &w->d, push ? &w->d : p, &a->peers[i]);
        if (!a->status && push)
            a->status = kvf_transfer_push(w->request, i, a->peers[i], &a->transfers[i]);
    }
    if (!a->status && !push)
        a->status = kvf_transfer_start(w->request, KVF_READ, a->peers, &a->transfers[0]);
    for (uint32_t i = 0; i < SOURCES; i++)
        a->count += a->transfers[i] != NULL;
}

static bool attempt_moves(const attempt *a) {
    for (uint32_t i = 0; i < SOURCES; i++)
        if (a->transfers[i] && kvf_transfer_status(a->transfers[i]) == KVF_IN_PROGRESS)
            return true;
    return false;
}

static void attempt_cancel(const attempt *a) {
    for (uint32_t i = 0; i < SOURCES; i++)
        kvf_transfer_cancel(a->transfers[i]);
}

static kvf_status attempt_end(attempt *a, const world *w) {
    if (a->status)
        attempt_cancel(a);
    while (attempt_moves(a))
        assert_true(step(w, 60000)); /* something always happens in time */
    for (uint32_t i = 0; i < SOURCES; i++) {
        if (a->transfers[i] && !a->status)
            a->status = kvf_transfer_status(a->transfers[i]);
        kvf_transfer_free(a->transfers[i]);
    }
    return a->status;
}

static void attempt_close(const attempt *a) {
    for (uint32_t i = 0; i < SOURCES; i++)
        kvf_peer_close(a->peers[i]);
}

/* Every byte is as it was before or as it must become. */
static void assert_nothing_wrong(const world *w) {
    for (uint32_t r = 0; r < w->d.cells.region_count; r++) {
        const unsigned char *now = w->d.cells.regions[r].address;
        const unsigned char *before = w->before.regions[r].address, *wanted = w->wanted.regions[r].address;
        for (uint64_t at = 0; at < w->d.cells.regions[r].bytes; at++)
            if (now[at] != before[at] && now[at] != wanted[at])
                fail_msg("region %u, offset %llu", r, (unsigned long long)at);
    }
}

static void check_memory(const world *w, kvf_status status) {
    if (status == KVF_OK) {
        assert_same_memory(&w->d.cells, &w->wanted);
        return;
    }
    if (status != KVF_E_IO && status != KVF_E_PEER_LOST && status != KVF_E_CANCELLED)
        fail_msg("%s: %s", kvf_status_name(status), kvf_error_detail());
    assert_nothing_wrong(w);
}

/* Bytes that were sent over a network before the connection ended may still arrive, until the owner of the memory shuts
 * the senders out; after that it lets them in again. */
static void shut_out(const world *w) {
    for (uint32_t i = 0; i < SOURCES; i++) {
        const void *card;
        size_t bytes;
        assert_ok(kvf_transport_export(w->p[i].transport, &card, &bytes));
        kvf_status status = kvf_transport_fence(w->d.transport, card, bytes);
        assert_true(status == KVF_OK || status == KVF_E_NOT_FOUND);
        assert_ok(kvf_transport_admit(w->d.transport, card, bytes));
    }
}

static void work_until_idle(const world *w) {
    while (step(w, 1)) {
    }
}

/* After the end the sources' blocks may get any content: D must not receive it. */
static void assert_quiet(const world *w) {
    cell_rank seen;
    if (w->by_messages)
        shut_out(w);
    if (w->has_no_fence)
        work_until_idle(w);
    rank_copy(&seen, &w->d.cells);
    for (uint32_t i = 0; i < SOURCES; i++)
        rank_scribble(&w->p[i].cells, 77);
    work_until_idle(w);
    assert_same_memory(&w->d.cells, &seen);
    for (uint32_t i = 0; i < SOURCES; i++)
        rank_fill(&w->p[i].cells, all_layers(w->p[i].cells.shard), 5);
    rank_close(&seen);
}

static void reset(const world *w) {
    for (uint32_t r = 0; r < w->d.cells.region_count; r++)
        memcpy(w->d.cells.regions[r].address, w->before.regions[r].address, w->d.cells.regions[r].bytes);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void every_transfer_ends_well_or_with_an_error(void **state) {
    uint32_t well = 0, badly = 0, cancelled = 0;
    uint32_t seeds = strcmp(*state, "ucx") == 0 || SANITIZED ? 12 : 40; /* opening UCX takes long */
    uint64_t faults[FAULTY_FAULTS] = {0};
    for (uint32_t seed = 0; seed < seeds; seed++) {
        faulty_install(&(faulty_options){.seed = seed, .turns = 5});
        world *w = world_open(*state);
        faulty_install(&(faulty_options){.seed = seed,
                                         .per_mille = {[FAULTY_REFUSED] = 30,
                                                       [FAULTY_NOTHING_MOVED] = 30,
                                                       [FAULTY_HALF_MOVED] = 30,
                                                       [FAULTY_ALL_MOVED] = 30,
                                                       [FAULTY_LATE_START] = 200,
                                                       [FAULTY_LATE_END] = 200,
                                                       [FAULTY_DEAF] = 100,
                                                       [FAULTY_PEER_LOST] = 30,
                                                       [FAULTY_NOT_CONNECTED] = 20},
                                         .turns = 5});
        for (uint32_t round = 0; round < 6; round++) {
            attempt a;
            attempt_start(&a, w, round % 2);
            for (uint32_t i = 0; i < round && round % 3 == 2 && attempt_moves(&a); i++)
                assert_true(step(w, 60000));
            if (round % 3 == 2)
                attempt_cancel(&a);
            kvf_status status = attempt_end(&a, w);
            check_memory(w, status);
            assert_quiet(w);
            attempt_close(&a);
            reset(w);
            well += status == KVF_OK;
            cancelled += status == KVF_E_CANCELLED;
            badly += status == KVF_E_IO || status == KVF_E_PEER_LOST;
        }
        for (int i = 0; i < FAULTY_FAULTS; i++)
            faults[i] += faulty_count((faulty_fault)i);
        world_close(w);
        faulty_remove();
    }
    assert_true(well > 5);
    assert_true(badly > 5);
    assert_true(cancelled > 5);
    for (int i = 0; i < FAULTY_NOT_NOTIFIED; i++)
        assert_true(faults[i] > 0);
}

/* The same fault on every operation, and how a transfer ends then. */
static void each_fault_has_its_own_end(void **state) {
    static const struct {
        faulty_fault fault;
        kvf_status ends;
    } cases[] = {
        {FAULTY_REFUSED, KVF_E_IO},    {FAULTY_NOTHING_MOVED, KVF_E_IO},    {FAULTY_HALF_MOVED, KVF_E_IO},
        {FAULTY_ALL_MOVED, KVF_E_IO},  {FAULTY_LATE_START, KVF_OK},         {FAULTY_LATE_END, KVF_OK},
        {FAULTY_DEAF, KVF_OK},         {FAULTY_PEER_LOST, KVF_E_PEER_LOST}, {FAULTY_NOT_CONNECTED, KVF_E_IO},
        {FAULTY_NOT_NOTIFIED, KVF_OK},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        faulty_options options = {.seed = 1, .turns = 3};
        options.per_mille[cases[i].fault] = 1000;
        faulty_install(&options);
        world *w = world_open(*state);
        for (int push = 0; push < 2; push++) {
            attempt a;
            attempt_start(&a, w, push);
            kvf_status status = attempt_end(&a, w);
            assert_int_equal(status, cases[i].ends);
            check_memory(w, status);
            assert_quiet(w);
            attempt_close(&a);
            reset(w);
        }
        world_close(w);
        faulty_remove();
    }
}

static void a_cancel_that_comes_too_late_finds_everything_there(void **state) {
    faulty_options options = {.seed = 3, .per_mille = {[FAULTY_DEAF] = 1000}};
    faulty_install(&options);
    world *w = world_open(*state);
    /* Few enough runs for all batches to be under way before the cancel. */
    kvf_group_request few = {w->d_sequence.tables[0], w->p_sequence.tables[0], 0, 40};
    assert_ok(kvf_request_set(w->request, &few, 1));
    attempt a;
    attempt_start(&a, w, false);
    attempt_cancel(&a);
    while (attempt_moves(&a))
        assert_true(step(w, 60000));
    uint64_t bytes = 0;
    kvf_transfer_counts(a.transfers[0], &bytes, NULL);
    assert_int_equal(bytes, kvf_request_bytes(w->request, 0) + kvf_request_bytes(w->request, 1));
    (void)attempt_end(&a, w);
    attempt_close(&a);
    world_close(w);
    faulty_remove();
}

static void notifications_come_through_when_tried_again(void **state) {
    faulty_options options = {.seed = 9, .per_mille = {[FAULTY_NOT_NOTIFIED] = 500}};
    faulty_install(&options);
    world *w = world_open(*state);
    kvf_peer *peer = NULL;
    assert_ok(end_connect(&w->d, &w->p[0], &peer));
    for (int i = 0; i < 20; i++) {
        kvf_status status;
        while ((status = kvf_transport_notify(peer, "done", 5)) == KVF_E_AGAIN)
            assert_true(step(w, 60000));
        assert_ok(status);
    }
    assert_true(faulty_count(FAULTY_NOT_NOTIFIED) > 0);
    kvf_peer_close(peer);
    world_close(w);
    faulty_remove();
}

static void nothing_is_faulty_once_it_is_removed(void **state) {
    faulty_options options = {.seed = 1, .per_mille = {[FAULTY_REFUSED] = 1000}};
    faulty_install(&options);
    faulty_remove();
    world *w = world_open(*state);
    attempt a;
    attempt_start(&a, w, true);
    assert_string_equal(kvf_peer_kind(a.peers[0]), *state);
    assert_int_equal(attempt_end(&a, w), KVF_OK);
    assert_same_memory(&w->d.cells, &w->wanted);
    attempt_close(&a);
    world_close(w);
}

int main(void) {
    static const way_test tests[] = {
        NAMED(every_transfer_ends_well_or_with_an_error),
        NAMED(each_fault_has_its_own_end),
        NAMED(a_cancel_that_comes_too_late_finds_everything_there),
        NAMED(notifications_come_through_when_tried_again),
        NAMED(nothing_is_faulty_once_it_is_removed),
    };
    test_way ways[MAX_WAYS];
    return run_every_way("transport_faults", tests, COUNT_OF(tests), ways, ways_of_kinds(ways), NULL, 0);
}
