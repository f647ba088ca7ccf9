/*
 * Flows over a fabric whose operations fail, are late or ignore their cancellation, which refuses notifications and
 * loses peers: whatever happens, a move either succeeds with every byte right or fails with a sentence, and no slot is
 * left in use.
 */
#include "stage_world.h"

#include "chance.h"
#include "faulty_fabric.h"
#include "seeds.h"

#define SLOT 4096u
#define SEEDS 150u
#define MOVES 6u

static const kvf_engine_spec d_spec = {.struct_size = sizeof d_spec,
                                       .tp_size = 2,
                                       .all = {.tokens_per_block = 8, .block_count = 60, .order = "L|BPNH"}},
                             p_spec = {.struct_size = sizeof p_spec,
                                       .tp_size = 1,
                                       .all = {.tokens_per_block = 16, .block_count = 60, .order = "L|BPHN"}};

typedef struct tally {
    uint32_t well, badly;
} tally;

/* One rank of D with its moves under way: all move the same cells, so bytes that arrive twice are the same. */
typedef struct asker {
    kvf_plan *plan;
    kvf_request *request;
    kvf_move *moves[MOVES];
    cell_rank before;
} asker;

/* Every slot that the mover's operations touch must be lent to the mover, in its current generation. */
static void check_operations(const stage_end *mover, const stage_end *lender) {
    for (const kvf_stage_flow *flow = mover->stage->first; flow; flow = flow->following)
        for (uint32_t i = 0; i < KVF_WINDOW_MAX && strcmp(flow->peer->name, lender->name) == 0; i++) {
            const kvf_credit *credit = &flow->credits[i];
            if (credit->state != KVF_CREDIT_MOVING)
                continue;
            const kvf_slot *slot = &lender->stage->arenas[KVF_MEMORY_HOST].slots[credit->note.slot];
            assert_int_equal(slot->generation, credit->note.generation);
            assert_true(slot->state == KVF_SLOT_LENT || slot->state == KVF_SLOT_DOUBT);
        }
}

static bool work(const stage_world *w) {
    bool busy = stage_world_work(w);
    for (uint32_t rank = 0; rank < 2 && faulty_count(FAULTY_PEER_LOST) == 0; rank++) {
        check_operations(&w->d[rank], &w->p[0]);
        check_operations(&w->p[0], &w->d[rank]);
    }
    return busy;
}

static void begin_move(stage_world *w, asker *by, uint32_t rank, uint32_t i, chance *c) {
    const kvf_move_options options = {.struct_size = sizeof options,
                                      .way = chance_per_mille(c, 800) ? KVF_WAY_PACKED : KVF_WAY_DIRECT,
                                      .priority = chance_between(c, 0, 2)};
    stage_end *d = &w->d[rank], *p = &w->p[0];
    kvf_peer *peer = chance_per_mille(c, 500) ? d->peers[0] : NULL;
    kvf_status status = KVF_E_PEER_LOST;
    if (peer)
        status = kvf_stage_pull(d->stage, by->request, &peer, &options, &by->moves[i]);
    else if (p->peers[rank])
        status = kvf_stage_push(p->stage, by->request, 0, p->peers[rank], &options, &by->moves[i]);
    if (status)
        by->moves[i] = NULL; /* the peer is lost, or the first operation was refused */
}

static void end_move(stage_world *w, asker *by, uint32_t rank, uint32_t i, tally *count) {
    kvf_status status = KVF_IN_PROGRESS;
    if (!by->moves[i])
        return;
    for (uint32_t turn = 0; turn < 3000 && status == KVF_IN_PROGRESS; turn++) {
        (void)work(w);
        status = kvf_move_status(by->moves[i]);
    }
    /* A move that no side ends times out: its END could not be sent, since the connection was lost. */
    while (status == KVF_IN_PROGRESS) {
        w->now_ns += UINT64_C(31000000000);
        (void)work(w);
        status = kvf_move_status(by->moves[i]);
    }
    if (status) {
        assert_true(kvf_error_detail()[0] != '\0');
        count->badly++;
    } else {
        assert_int_equal(stage_world_wrong_bytes(&w->d[rank], &by->before, 5), 0);
        count->well++;
    }
    kvf_move_free(by->moves[i]);
}

/* Everything is in one process, so nothing takes longer than a few turns. */
static void settle(const stage_world *w) {
    for (int turn = 0; turn < 60; turn++)
        (void)stage_world_work(w);
}

static void run_seed(uint64_t seed, void *count) {
    const faulty_options faults = {.seed = seed,
                                   .per_mille = {[FAULTY_REFUSED] = 3,
                                                 [FAULTY_NOTHING_MOVED] = 4,
                                                 [FAULTY_HALF_MOVED] = 4,
                                                 [FAULTY_ALL_MOVED] = 4,
                                                 [FAULTY_LATE_START] = 200,
                                                 [FAULTY_LATE_END] = 200,
                                                 [FAULTY_DEAF] = 100,
                                                 [FAULTY_PEER_LOST] = seed % 4 == 0 ? 3 : 0,
                                                 [FAULTY_NOT_NOTIFIED] = 200},
                                   .turns = 5};
    const stage_pair shape = {attention(2, 2, 32),
                              &d_spec,
                              &p_spec,
                              300,
                              {.arena_bytes = 16 * SLOT, .slot_bytes = SLOT, .window = 4}};
    chance c = {chance_mix(seed)};
    asker by[2] = {{0}};
    faulty_install(&faults);
    stage_world *w = stage_world_open("inproc", &shape);
    for (uint32_t rank = 0; rank < 2; rank++) {
        by[rank].plan = plan_of(&w->engines, rank);
        by[rank].request = request_of(by[rank].plan);
        set_sequences(by[rank].request, &w->d_sequence, &w->p_sequence);
        rank_copy(&by[rank].before, &w->d[rank].cells);
        for (uint32_t i = 0; i < MOVES; i++)
            begin_move(w, &by[rank], rank, i, &c);
    }
    for (uint32_t turn = chance_between(&c, 0, 40); turn > 0; turn--)
        (void)work(w);
    kvf_move_cancel(by[0].moves[chance_between(&c, 0, MOVES - 1)]);
    for (uint32_t rank = 0; rank < 2; rank++)
        for (uint32_t i = 0; i < MOVES; i++)
            end_move(w, &by[rank], rank, i, count);
    const bool lost = faulty_count(FAULTY_PEER_LOST) > 0;
    faulty_remove(); /* open transports have no more faults */
    for (uint32_t i = 0; i < 3; i++) {
        settle(w);
        w->now_ns += UINT64_C(31000000000);
    }
    /* If a mover has lost its connection, its lender keeps the mover's slots until the lender notices the loss too. */
    for (uint32_t rank = 0; rank < 2 && lost; rank++) {
        kvf_stage_leave(w->d[rank].stage, w->d[rank].peers[0]);
        kvf_stage_leave(w->p[0].stage, w->p[0].peers[rank]);
    }
    w->now_ns += UINT64_C(31000000000);
    settle(w);
    assert_stage_idle(w->d[0].stage);
    assert_stage_idle(w->d[1].stage);
    assert_stage_idle(w->p[0].stage);
    for (uint32_t rank = 0; rank < 2; rank++) {
        rank_close(&by[rank].before);
        kvf_request_free(by[rank].request);
        kvf_plan_free(by[rank].plan);
    }
    stage_world_close(w);
}

static void moves_end_well_or_with_a_sentence(void **state) {
    (void)state;
    tally count = {0};
    if (!seeds_run(SEEDS, run_seed, &count))
        return;
    print_message("%u moves ended well, %u badly\n", count.well, count.badly);
    assert_true(count.well > SEEDS && count.badly > SEEDS);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(moves_end_well_or_with_a_sentence, seeds_say)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
