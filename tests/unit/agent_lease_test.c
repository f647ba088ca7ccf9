/* Blocks that are read: whose they are, and until when. */
#include <sodium.h>

#include "agent/hear.h"
#include "agent/hold.h"
#include "agent_lease_scene.h"
#include "agent_net.h"
#include "faulty_fabric.h"
#include "transport/transport.h"

static void blocks_nobody_asks_for_are_free_after_the_lease(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(200 * MS));
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_HELD);
    const world_outcome *end = world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    assert_true(end->blocks_free);
    assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_FREE);
    assert_int_equal(world_stats(s.p).leases_expired, 1);
    lease_others_go_on(&s, "b");
    lease_close(&s);
}

static void heartbeats_extend_leases_while_a_consumer_waits(void **state) {
    (void)state;
    scene s;
    lease_open(&s, TP2, ONE("D"), LEASE(400 * MS));
    world_hold(&s.w.p, &s.held, s.theirs);
    const kvf_group_steps *groups = s.wanted.request.groups;
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 1600 * MS);
    assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_LEASED);
    assert_int_equal(world_stats(s.p).leases_now, 1);
    assert_int_equal(world_stats(s.p).leases_expired, 0);
    assert_ok(kvf_agent_pull_into(s.d, s.ours[0], groups, s.wanted.group_count));
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    lease_close(&s);
}

static void heartbeats_extend_every_lease_of_a_consumer(void **state) {
    (void)state;
    scene s;
    world_request held, wanted;
    uint64_t theirs, ours;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(400 * MS));
    world_request_make(&s.w, &s.w.p, "b", 50, 30, 1, &held);
    world_request_make(&s.w, &s.w.d, "b", 50, 40, 1, &wanted);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_hold(&s.w.p, &held, &theirs);
    s.wanted.request.groups = wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_pull(&s.w.d, &wanted, &s.w.p, &ours);
    world_run_for(&s.w, 1600 * MS);
    assert_int_equal(world_stats(s.p).leases_now, 2);
    assert_int_equal(world_stats(s.p).leases_expired, 0);
    assert_ok(kvf_agent_pull_into(s.d, s.ours[0], s.wanted.groups, s.wanted.group_count));
    assert_ok(kvf_agent_pull_into(s.d, ours, wanted.groups, wanted.group_count));
    world_all_done(&s.w, &s.w.d, s.ours);
    (void)world_done(&s.w, s.d, ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    (void)world_done(&s.w, s.p, theirs);
    lease_close(&s);
}

static void a_reader_that_dies_loses_its_lease(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(300 * MS));
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_block(s.p, 0, 0) == KVF_BLOCK_LEASED);
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, 0); /* D's calls are lost from now on */
    world_close_agents(&s.w.d);
    const world_outcome *end = world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    assert_true(end->blocks_free);
    assert_true(world_stats(s.p).leases_expired >= 1);
    lease_close(&s);
}

static void a_consumer_whose_heartbeats_are_lost_gives_up_before_the_producer_frees(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(300 * MS));
    s.held.request.deadline_ns = 300 * MS;
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, KVF_CALL_BEAT);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    (void)world_next(&s.w, s.p, s.theirs[0]); /* released with a failure, or expired */
    letters_no_rules();
    lease_others_go_on(&s, "b");
    lease_close(&s);
}

/* The consumer's patience covers the wait for the lease, not the time after it. */
static void patience_ends_before_the_blocks_are_lent_but_not_after(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    s.wanted.request.patience_ns = 200 * MS;
    uint64_t begun = world_now();
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    const world_outcome *failed = world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    assert_true(world_now() - begun >= 200 * MS);
    assert_non_null(strstr(failed->detail, "the patience of the request has run out: no lease"));
    const kvf_contact nobody = {.engine = "P", .endpoint = "tcp://127.0.0.1:1"};
    s.wanted.request.contact = nobody;
    assert_ok(kvf_agent_pull(s.d, &s.wanted.request, &s.ours[0]));
    failed = world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    assert_non_null(strstr(failed->detail, "the patience of the request has run out"));
    assert_non_null(strstr(failed->detail, "127.0.0.1:1"));

    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    s.wanted.request.patience_ns = 2 * SECOND;
    begun = world_now();
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_block(s.p, 0, 0) == KVF_BLOCK_LEASED);
    world_run_for(&s.w, 2100 * MS);
    assert_true(world_now() - begun > 2 * SECOND);
    assert_ok(kvf_agent_pull_into(s.d, s.ours[0], s.wanted.groups, s.wanted.group_count));
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    lease_close(&s);
}

static void a_pull_without_a_destination_says_so_at_its_deadline(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(1 * SECOND));
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    s.wanted.request.deadline_ns = 2 * SECOND;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    assert_string_equal(world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT)->detail,
                        "the deadline has passed: no destination was named");
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    lease_close(&s);
}

static void a_pull_says_at_its_deadline_which_connection_it_waits_for(void **state) {
    (void)state;
    for (uint32_t rank = 0; rank < 2; rank++) {
        scene s;
        lease_open(&s, TP2, ONE("D"), LEASE(10 * SECOND));
        lease_others_go_on(&s, "b"); /* which connects D to both */
        world_hold(&s.w.p, &s.held, s.theirs);
        s.wanted.request.groups = NULL;
        s.wanted.request.deadline_ns = 2 * SECOND;
        world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        for (uint32_t r = 0; r < 2; r++)
            world_until(&s.w, world_block(s.w.p.agents[r], 0, 0) == KVF_BLOCK_LEASED);
        kvf_peer_waits(kvf_asker_of(s.d->tickets)->sources[rank].session->peer, "no route to the host");
        assert_string_equal(world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT)->detail,
                            "the deadline has passed: no route to the host");
        for (uint32_t r = 0; r < 2; r++)
            (void)world_failed(&s.w, s.w.p.agents[r], s.theirs[r], KVF_E_TIMEOUT);
        lease_close(&s);
    }
}

static void a_pull_says_at_its_deadline_that_it_waits_for_a_stage(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(10 * SECOND));
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, KVF_CALL_JOIN);
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.way = KVF_WAY_PACKED;
    s.wanted.request.deadline_ns = 2 * SECOND;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    assert_string_equal(world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT)->detail,
                        "the deadline has passed: not every rank has answered whether its stage accepts this "
                        "rank");
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    lease_close(&s);
}

/* Also of a consumer that cannot withdraw its call, which it may have repeated meanwhile. */
static void a_producer_keeps_a_call_for_the_patience_of_its_caller(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    world_run_for(&s.w, 10 * SECOND);
    s.wanted.request.patience_ns = SECOND;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, SECOND - MS);
    assert_non_null(s.p->early);
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, KVF_CALL_RELEASE);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    world_run_for(&s.w, SECOND);
    assert_null(s.p->early);
    lease_close(&s);
}

static void the_lease_of_a_consumer_that_was_replaced_outlives_the_release_of_the_new_one(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(1 * SECOND));
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_block(s.p, 0, 0) == KVF_BLOCK_LEASED);
    world_close_agents(&s.w.d);
    world_forget(&s.w); /* the next agent may have the same address */
    world_open_agents(&s.w.d, LEASE(1 * SECOND));

    s.wanted.request.groups = s.wanted.groups;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs); /* once no peer may read any more */
    assert_int_equal(world_stats(s.p).leases_now, 0);
    assert_int_equal(world_stats(s.p).leases_expired, 1);
    lease_close(&s);
}

static void a_hold_outlives_the_lease_of_a_reader_that_was_stopped(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(1 * SECOND));
    world_request other;
    uint64_t shorter;
    world_request_make(&s.w, &s.w.p, "b", 50, 30, 1, &other);
    other.request.deadline_ns = 5 * SECOND;
    world_hold(&s.w.p, &other, &shorter);
    s.held.request.deadline_ns = 10 * SECOND;
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_block(s.p, 0, 0) == KVF_BLOCK_LEASED);
    kvf_agent *stopped = lease_stop(&s.w.d.agents[0]);
    (void)world_failed(&s.w, s.p, shorter, KVF_E_TIMEOUT);
    assert_int_equal(world_stats(s.p).leases_expired, 2); /* the reader's, and of the other hold */
    assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_HELD);
    s.w.d.agents[0] = stopped;
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    s.wanted.request.groups = s.wanted.groups;
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    lease_close(&s);
}

static void a_reader_that_was_stopped_does_not_believe_what_it_reads(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(300 * MS));
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_block(s.p, 0, 0) == KVF_BLOCK_LEASED);
    kvf_agent *stopped = lease_stop(&s.w.d.agents[0]);
    assert_true(world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT)->blocks_free);
    world_fill(&s.w, &s.w.p, &s.held, 9); /* as another request would */

    s.w.d.agents[0] = stopped;
    (void)kvf_agent_pull_into(s.d, s.ours[0], s.wanted.groups, s.wanted.group_count);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    lease_others_go_on(&s, "b");
    lease_close(&s);
}

/* The transport has lost D for P, as when D shuts P out. D lives, and reads by a connection of its own: it reads to the
 * end under its lease, greets anew, and releases what it was lent before. */
static void a_lease_outlives_the_loss_of_the_session_in_which_it_was_granted(void **state) {
    (void)state;
    for (uint32_t cancelled = 0; cancelled < 2; cancelled++) {
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(12 * SECOND));
        s.held.request.deadline_ns = SECOND; /* then only D's lease keeps the blocks */
        s.wanted.request.bytes_per_second = 5000;
        s.wanted.request.way = KVF_WAY_DIRECT;
        world_hold(&s.w.p, &s.held, s.theirs);
        world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_run_for(&s.w, 500 * MS);
        assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_LEASED);
        world_lose(s.p, world_session(s.p, true));
        world_run_for(&s.w, SECOND);
        assert_int_equal(world_stats(s.p).peers_lost, 1);
        assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_LEASED);
        if (cancelled) {
            assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
            world_run_for(&s.w, 100 * MS);
            assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_FAILED), 0); /* D may still read */
            (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT); /* its next heartbeat has told it */
            (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
        } else {
            world_all_done(&s.w, &s.w.d, s.ours);
            world_all_done(&s.w, &s.w.p, s.theirs);
            assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
        }
        world_run_for(&s.w, MS);
        assert_int_equal(world_stats(s.p).leases_now, 0);
        lease_close(&s);
    }
}

/* P keeps nothing for a peer beyond that: when the blocks may have gone to others, D must not count on them. */
static void a_consumer_does_not_count_on_its_lease_for_longer_than_anything_is_kept(void **state) {
    (void)state;
    scene s;
    kvf_agent_options options = *LEASE(12 * SECOND); /* heartbeats: every 2 s */
    options.longest_ns = 24 * SECOND;
    lease_open(&s, ONE("P"), ONE("D"), &options);
    s.held.request.deadline_ns = SECOND;      /* then only D's lease keeps the blocks */
    s.wanted.request.bytes_per_second = 2090; /* 51,200 bytes in 24.5 s */
    s.wanted.request.way = KVF_WAY_DIRECT;
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_LEASED);
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    lease_close(&s);
}

/* By default anything is kept for two leases at least: one that could not be renewed would end with the first heartbeat. */
static void a_lease_that_is_longer_than_an_hour_is_renewed(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(7200 * SECOND)); /* heartbeats: every 20 min */
    s.wanted.request.deadline_ns = 7200 * SECOND;
    s.wanted.request.bytes_per_second = 32; /* 51,200 bytes in 1600 s */
    s.wanted.request.way = KVF_WAY_DIRECT;
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 1590 * SECOND);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    lease_close(&s);
}

static void a_pull_ends_when_the_lease_of_any_rank_runs_out(void **state) {
    (void)state;
    for (uint32_t silent = 0; silent < 2; silent++) {
        scene s;
        lease_open(&s, TP2, ONE("D"), LEASE(1 * SECOND));
        world_hold(&s.w.p, &s.held, s.theirs);
        s.wanted.request.groups = NULL;
        letters_rule(LETTERS_LOSE, s.w.p.agents[1], KVF_MESSAGE_CALL, KVF_CALL_ACQUIRE);
        letters_rule(LETTERS_LOSE, s.w.p.agents[1], KVF_MESSAGE_ANSWER, KVF_CALL_ACQUIRE);
        world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_run_for(&s.w, 50 * MS); /* so that its lease begins later than the other's */
        letters_no_rules();
        for (uint32_t rank = 0; rank < 2; rank++)
            world_until(&s.w, world_block(s.w.p.agents[rank], 0, 0) == KVF_BLOCK_LEASED);
        world_run_for(&s.w, 150 * MS);
        letters_rule(LETTERS_LOSE, s.w.p.agents[silent], KVF_MESSAGE_ANSWER, KVF_CALL_BEAT);
        const uint64_t silenced = world_now();
        const world_outcome *failed = world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
        assert_non_null(strstr(failed->detail, "the lease ran out"));
        assert_int_equal(failed->rank, silent);
        assert_true(world_now() - silenced <= SECOND);
        letters_no_rules();
        for (uint32_t rank = 0; rank < 2; rank++)
            (void)world_next(&s.w, s.w.p.agents[rank], s.theirs[rank]);
        lease_close(&s);
    }
}

/* Lets a pull begin to move, and goes on for at most so many rounds while it moves. Returns how many there were. */
static uint32_t move_for(scene *s, uint32_t most) {
    uint32_t rounds = 0;
    s->wanted.request.way = KVF_WAY_DIRECT;
    world_hold(&s->w.p, &s->held, s->theirs);
    world_pull(&s->w.d, &s->wanted, &s->w.p, s->ours);
    world_until(&s->w, s->d->moving_pulls != NULL);
    for (; rounds < most && s->d->moving_pulls; rounds++)
        assert_ok(kvf_agent_progress(s->d, NULL));
    return rounds;
}

/* As after a stop of the process: what came last may have been read from blocks that the producer had given to others. */
static void bytes_that_come_after_the_lease_are_not_taken(void **state) {
    (void)state;
    uint32_t rounds = UINT32_MAX;
    for (int late = 0; late < 2; late++) {
        scene s;
        faulty_install(&(faulty_options){.per_mille = {[FAULTY_LATE_START] = 1000}, .turns = 3});
        lease_open(&s, ONE("P"), ONE("D"), LEASE(1 * SECOND));
        rounds = move_for(&s, rounds - (uint32_t)late);
        if (late) {
            net_advance(SECOND);
            assert_ok(kvf_agent_progress(s.d, NULL));
            const world_outcome *failed = world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
            assert_string_equal(failed->detail, "the lease ran out before the last byte had arrived");
            (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
        } else {
            world_all_done(&s.w, &s.w.d, s.ours);
            world_all_done(&s.w, &s.w.p, s.theirs);
        }
        lease_close(&s);
        faulty_remove();
    }
}

static void refuse_with_a_timeout(kvf_session *session, const kvf_call_body *call, bool fresh) {
    (void)fresh;
    kvf_answer_status(session, call, KVF_E_TIMEOUT, "no time for this");
}

/* Unlike a timeout of the pull's own, which says what it waited for. */
static void a_producer_may_refuse_with_a_timeout(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(1 * SECOND));
    kvf_hooks hooks = *s.p->hooks;
    hooks.serve[KVF_CALL_ACQUIRE] = refuse_with_a_timeout;
    s.p->hooks = &hooks;
    const uint64_t begun = world_now();
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    assert_non_null(strstr(world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT)->detail, "no time for this"));
    assert_true(world_now() - begun < SECOND);
    lease_close(&s);
}

/* How many leases there were when a lease got its number: the four rounds of hold.c backwards. If they can be undone, no
 * number comes twice. */
static uint64_t count_of(const kvf_agent *agent, uint64_t number) {
    for (uint32_t round = 4; round-- > 0;) {
        const uint32_t in[2] = {round, (uint32_t)(number >> 32)};
        uint8_t mixed[crypto_shorthash_BYTES];
        uint32_t out;
        (void)crypto_shorthash(mixed, (const uint8_t *)in, sizeof in, agent->lease_key);
        memcpy(&out, mixed, sizeof out);
        number = (uint64_t)((uint32_t)number ^ out) << 32 | number >> 32;
    }
    return number;
}

/* So that no peer guesses those of others. The highest bit stands for expectations. */
static void the_numbers_of_leases_are_all_different_and_each_bit_but_one_varies(void **state) {
    (void)state;
    scene s;
    uint64_t holds[64], pulls[64], ones = 0, zeros = 0, last = 0;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(1 * SECOND));
    for (uint32_t i = 0; i < COUNT_OF(holds); i++) {
        const char id = (char)('0' + i);
        s.held.request.id = s.wanted.request.id = (kvf_request_id){&id, 1};
        s.wanted.request.groups = NULL;
        world_hold(&s.w.p, &s.held, &holds[i]);
        world_pull(&s.w.d, &s.wanted, &s.w.p, &pulls[i]);
    }
    world_until(&s.w, world_stats(s.p).leases_now == COUNT_OF(holds));
    const kvf_reader *reader, *next;
    HASH_ITER(hh, s.p->leases, reader, next) {
        ones |= reader->generation;
        zeros |= ~reader->generation;
        const uint64_t count = count_of(s.p, reader->generation);
        assert_true(count > last && count <= s.p->next_lease);
        last = count;
    }
    assert_true(ones == ~KVF_EXPECTATION && zeros == UINT64_MAX);
    for (uint32_t i = 0; i < COUNT_OF(holds); i++) {
        assert_ok(kvf_agent_cancel(s.d, pulls[i]));
        (void)world_failed(&s.w, s.p, holds[i], KVF_E_CANCELLED);
    }
    lease_close(&s);
}

static void holds_that_the_producer_gave_up_fail_at_the_next_heartbeat(void **state) {
    (void)state;
    scene s;
    world_request third;
    uint64_t more;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(1 * SECOND));
    world_request_make(&s.w, &s.w.d, "b", 50, 30, 1, &third);
    world_push(&s.w.p, &s.held, s.theirs);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    third.request.contact = s.w.p.contact;
    assert_ok(kvf_agent_expect(s.d, &third.request, &more)); /* no producer has pushed this one yet */
    letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_CALL, KVF_CALL_WRITTEN);
    letters_rule(LETTERS_PASS, s.p, KVF_MESSAGE_ANSWER, KVF_CALL_EXPECT);
    world_until(&s.w, letters_met() >= 2);
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    (void)world_next(&s.w, s.p, s.theirs[0]);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    letters_end();
    assert_ok(kvf_agent_cancel(s.d, more));
    assert_int_equal(world_next(&s.w, s.d, more)->status, KVF_E_CANCELLED);
    lease_close(&s);
}

static void a_reader_of_a_hold_that_was_given_up_is_told_by_its_next_heartbeat(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    letters_rule(LETTERS_PASS, s.p, KVF_MESSAGE_ANSWER, KVF_CALL_ACQUIRE);
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, letters_met() >= 1);
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    const world_outcome *failed = world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    assert_non_null(strstr(failed->detail, "given the request up")); /* not that its lease ran out */
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    lease_close(&s);
}

/* One answer names them all. */
static void readers_of_several_holds_that_were_given_up_are_told_at_once(void **state) {
    (void)state;
    enum { COUNT = 7 };
    static const char *const ids[COUNT] = {"1", "2", "3", "4", "5", "6", "7"};
    scene s;
    uint64_t theirs[COUNT][WORLD_MAX_RANKS], ours[COUNT][WORLD_MAX_RANKS], told = 0;
    world_request held, wanted;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    letters_rule(LETTERS_PASS, s.p, KVF_MESSAGE_ANSWER, KVF_CALL_ACQUIRE);
    for (uint32_t i = 0; i < COUNT; i++) {
        world_request_make(&s.w, &s.w.p, ids[i], 16, i, 1, &held);
        world_request_make(&s.w, &s.w.d, ids[i], 16, i, 1, &wanted);
        wanted.request.groups = NULL;
        world_hold(&s.w.p, &held, theirs[i]);
        world_pull(&s.w.d, &wanted, &s.w.p, ours[i]);
    }
    world_until(&s.w, letters_met() >= COUNT);
    for (uint32_t i = 0; i < COUNT; i++)
        assert_ok(kvf_agent_cancel(s.p, theirs[i][0]));
    for (uint32_t i = 0; i < COUNT; i++) {
        const world_outcome *failed = world_failed(&s.w, s.d, ours[i][0], KVF_E_TIMEOUT);
        assert_non_null(strstr(failed->detail, "given the request up"));
        told = i == 0 ? world_now() : told;
    }
    assert_in_range(world_now() - told, 0, 100 * MS);
    lease_close(&s);
}

/* D's beat is under way while one of two ranks ends writing: that rank knows the expectation no more when the beat
 * arrives, and the other still writes. */
static void a_rank_that_has_written_has_not_given_the_request_up(void **state) {
    (void)state;
    scene s;
    lease_open(&s, TP2, ONE("D"), LEASE(2 * SECOND));
    letters_rule(LETTERS_KEEP, s.d, KVF_MESSAGE_CALL, KVF_CALL_BEAT);
    world_push(&s.w.p, &s.held, s.theirs);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, letters_kept() >= 2);
    assert_ok(kvf_agent_push_ready(s.p, s.theirs[0], CHUNK(0, 50, 4)));
    (void)world_done(&s.w, s.p, s.theirs[0]);
    letters_no_rules();
    letters_deliver();
    world_run_for(&s.w, 20 * MS);
    assert_ok(kvf_agent_push_ready(s.w.p.agents[1], s.theirs[1], CHUNK(0, 50, 4)));
    world_all_done(&s.w, &s.w.d, s.ours);
    (void)world_done(&s.w, s.w.p.agents[1], s.theirs[1]);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    lease_close(&s);
}

/* The hold's own lease is longer than the agent's: a rank that has read does not shorten it for the others. */
static void a_rank_may_come_long_after_another_has_read(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ENGINE(.name = "D", .tp_size = 2, .all = {.block_count = 64}), LEASE(500 * MS));
    s.held.request.deadline_ns = 10 * SECOND;
    s.wanted.request.contact = s.w.p.contact;
    world_hold(&s.w.p, &s.held, s.theirs);
    for (uint32_t r = 0; r < 2; r++) {
        world_run_for(&s.w, 4 * SECOND);
        assert_ok(kvf_agent_pull(s.w.d.agents[r], &s.wanted.request, &s.ours[r]));
        (void)world_done(&s.w, s.w.d.agents[r], s.ours[r]);
    }
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    lease_close(&s);
}

/* The reverse: each rank that has read renews the agent's lease for the next. */
static void a_rank_that_has_read_gives_the_others_a_lease_more(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ENGINE(.name = "D", .tp_size = 2, .all = {.block_count = 64}),
               LEASE(1 * SECOND));
    s.held.request.deadline_ns = 1 * SECOND;
    s.wanted.request.contact = s.w.p.contact;
    world_hold(&s.w.p, &s.held, s.theirs);
    for (uint32_t r = 0; r < 2; r++) {
        world_run_for(&s.w, 700 * MS); /* the second rank comes after 1.4 s */
        assert_ok(kvf_agent_pull(s.w.d.agents[r], &s.wanted.request, &s.ours[r]));
        (void)world_done(&s.w, s.w.d.agents[r], s.ours[r]);
    }
    world_all_done(&s.w, &s.w.p, s.theirs);
    lease_close(&s);
}

static void a_pull_that_waits_hears_within_seconds_whether_its_producer_lives(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(60 * SECOND));
    letters_rule(LETTERS_PASS, s.d, KVF_MESSAGE_CALL, KVF_CALL_BEAT);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 500 * MS);
    assert_int_equal(letters_met(), 0);
    world_run_for(&s.w, 1000 * MS); /* the next heartbeat is ten seconds away */
    assert_int_equal(letters_met(), 1);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    lease_close(&s);
}

/* The peer does not keep things for the consumer's own lease, which is ten times as long. */
static void heartbeats_come_six_times_in_a_lease_of_its_producer(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(6 * SECOND));
    world_close_agents(&s.w.d);
    world_open_agents(&s.w.d, LEASE(60 * SECOND));
    s.d = s.w.d.agents[0];
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, SECOND);
    letters_rule(LETTERS_PASS, s.d, KVF_MESSAGE_CALL, KVF_CALL_BEAT);
    assert_int_equal(s.d->all_sessions->heartbeat_ns, SECOND);
    world_run_for(&s.w, 20 * SECOND);
    assert_in_range(letters_met(), 19, 21);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    lease_close(&s);
}

/* Else a peer could have all of our time. */
static void heartbeats_pause_however_short_a_lease_its_producer_names(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(6 * SECOND));
    s.p->options.lease_ns = 1; /* no such agent can be opened */
    lease_meet(&s);
    letters_rule(LETTERS_PASS, s.d, KVF_MESSAGE_CALL, KVF_CALL_BEAT);
    assert_int_equal(s.d->all_sessions->heartbeat_ns, 2 * MS);
    world_run_for(&s.w, 100 * MS);
    assert_in_range(letters_met(), 10, 51);
    lease_close(&s);
}

/* Its answer may have been under way for long, and what it says of time is as old. */
static void a_lease_that_may_be_half_over_is_used_after_a_heartbeat(void **state) {
    (void)state;
    for (uint32_t late = 0; late < 2; late++) {
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(2 * SECOND));
        letters_rule(LETTERS_PASS, s.d, KVF_MESSAGE_CALL, KVF_CALL_ACQUIRE);
        world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_until(&s.w, letters_met() == 1);
        const uint64_t asked = kvf_asker_of(s.d->tickets)->sources[0].call->first_sent;
        world_run_for(&s.w,
                      asked + kvf_session_surely(2 * SECOND) - SECOND - NET_LATENCY_NS + late - world_now());
        letters_no_rules();
        letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, KVF_CALL_BEAT);
        world_hold(&s.w.p, &s.held, s.theirs);
        world_run_for(&s.w, 5 * MS);
        assert_int_equal(world_count(&s.w, s.d, KVF_EVENT_DONE), 1 - late);
        letters_no_rules();
        world_all_done(&s.w, &s.w.d, s.ours);
        world_all_done(&s.w, &s.w.p, s.theirs);
        lease_close(&s);
    }
}

static uint64_t slow_since;

/* Ten times as slow as a good crystal may be. */
static uint64_t slow_now(void *context) {
    (void)context;
    return net_now() - (net_now() - slow_since) / 10000;
}

/* The producer counts the lease by its own clock, and gives the blocks to another request when that says so. A consumer
 * that took the lease for good until its slower clock said so would take the other's bytes for the right ones. */
static void a_consumer_with_a_slow_clock_does_not_outlast_its_lease(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(30 * SECOND));
    slow_since = net_now();
    s.d->clock.now = slow_now;
    s.held.request.deadline_ns = 30 * SECOND;
    s.wanted.request.groups = NULL;
    s.wanted.request.deadline_ns = 300 * SECOND;
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_block(s.p, 0, 0) == KVF_BLOCK_LEASED);
    world_run_for(&s.w, 15 * SECOND);
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, 0);
    letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_ANSWER, 0);
    while (world_block(s.p, 0, 0) != KVF_BLOCK_FREE)
        world_work(&s.w);
    world_fill(&s.w, &s.w.p, &s.held, 2); /* the blocks of another request */
    (void)kvf_agent_pull_into(s.d, s.ours[0], s.wanted.groups, s.wanted.group_count);
    assert_non_null(strstr(world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT)->detail, "lease"));
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    letters_no_rules();
    lease_close(&s);
}

static void a_producer_from_which_nothing_was_wanted_for_long_is_not_lost_when_something_is(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(1 * SECOND));
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    world_run_for(&s.w, 5 * SECOND);
    letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_ANSWER, 0);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 500 * MS);
    letters_no_rules();
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_stats(s.d).peers_lost, 0);
    lease_close(&s);
}

static void heartbeats_come_as_the_options_say_where_the_producer_names_no_lease(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(6 * SECOND));
    s.p->options.lease_ns = 0;
    lease_meet(&s);
    assert_int_equal(s.d->all_sessions->heartbeat_ns, s.d->options.heartbeat_ns);
    lease_close(&s);
}

static void tell_of_connection(const scene *s, kvf_status status, const char *detail) {
    kvf_work_take(s->d);
    kvf_on_broken(s->d, s->d->all_sessions->route, status, detail);
    kvf_work_give(s->d);
}

static void a_host_to_which_no_way_leads_is_waited_for_as_long_as_the_lease_lasts(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(10 * SECOND));
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 500 * MS);
    letters_rule(LETTERS_LOSE, NULL, KVF_MESSAGE_CALL, 0);
    tell_of_connection(&s, KVF_E_IO, "there is no route to the host");
    assert_int_equal(s.d->all_sessions->unreached, KVF_E_IO);
    world_run_for(&s.w, 7 * SECOND);
    letters_no_rules();
    world_hold(&s.w.p, &s.held, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_stats(s.d).peers_lost, 0);
    lease_close(&s);
}

static void break_connection(const scene *s) {
    tell_of_connection(s, KVF_E_PEER_LOST, "the connection broke");
}

/* A connection that is made and breaks again and again shows no life. */
static void a_producer_is_lost_a_while_after_its_connection_first_broke(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(10 * SECOND)); /* a peer is waited for for 100 ms */
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 500 * MS);
    letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_WELCOME, 0);
    letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_ANSWER, 0);
    const uint64_t first = world_now();
    break_connection(&s);
    world_run_for(&s.w, 60 * MS);
    break_connection(&s);
    assert_int_equal(s.d->all_sessions->broken_since, first);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_PEER_LOST);
    assert_int_equal(world_now(), first + 100 * MS);
    lease_close(&s);
}

/* As when thousands of ranks come back at once, and it lets in only so many a second. */
static void a_producer_that_answers_no_attempt_to_connect_has_the_length_of_a_lease(void **state) {
    (void)state;
    static const char unanswered[] = "no connection: the host did not answer";
    for (int returns = 0; returns < 2; returns++) {
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(10 * SECOND)); /* a peer is waited for for 100 ms */
        world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_run_for(&s.w, 500 * MS);
        letters_rule(LETTERS_LOSE, NULL, KVF_MESSAGE_HELLO, 0);
        letters_rule(LETTERS_LOSE, NULL, KVF_MESSAGE_CALL, 0);
        break_connection(&s);
        tell_of_connection(&s, KVF_E_TIMEOUT, unanswered);
        world_run_for(&s.w, 8 * SECOND);
        assert_int_equal(world_stats(s.d).peers_lost, 0);
        if (returns) {
            letters_no_rules();
            world_hold(&s.w.p, &s.held, s.theirs);
            world_all_done(&s.w, &s.w.d, s.ours);
            world_all_done(&s.w, &s.w.p, s.theirs);
            assert_int_equal(s.d->all_sessions->unreached, KVF_OK);
        } else {
            const world_outcome *failed = world_failed(&s.w, s.d, s.ours[0], KVF_E_PEER_LOST);
            assert_non_null(strstr(failed->detail, "P rank 0: "));
        }
        assert_int_equal(world_stats(s.d).peers_lost, !returns);
        lease_close(&s);
    }
}

/* Its host answers now that nothing listens there. */
static void a_producer_that_had_longer_is_lost_at_once_when_its_host_refuses(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(10 * SECOND)); /* a peer is waited for for 100 ms */
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 500 * MS);
    letters_rule(LETTERS_LOSE, NULL, KVF_MESSAGE_HELLO, 0);
    letters_rule(LETTERS_LOSE, NULL, KVF_MESSAGE_CALL, 0);
    break_connection(&s);
    assert_int_equal(s.d->all_sessions->unreached, KVF_OK);
    tell_of_connection(&s, KVF_E_TIMEOUT, "no connection: the host did not answer");
    world_run_for(&s.w, 3200 * MS); /* between two greetings */
    assert_int_equal(world_stats(s.d).peers_lost, 0);
    tell_of_connection(&s, KVF_E_IO, "no connection: refused");
    world_run_for(&s.w, MS);
    assert_int_equal(world_stats(s.d).peers_lost, 1);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_PEER_LOST);
    lease_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_producer_that_answers_no_attempt_to_connect_has_the_length_of_a_lease),
        cmocka_unit_test(a_producer_that_had_longer_is_lost_at_once_when_its_host_refuses),
        cmocka_unit_test(blocks_nobody_asks_for_are_free_after_the_lease),
        cmocka_unit_test(heartbeats_extend_leases_while_a_consumer_waits),
        cmocka_unit_test(heartbeats_extend_every_lease_of_a_consumer),
        cmocka_unit_test(a_reader_that_dies_loses_its_lease),
        cmocka_unit_test(a_consumer_whose_heartbeats_are_lost_gives_up_before_the_producer_frees),
        cmocka_unit_test(patience_ends_before_the_blocks_are_lent_but_not_after),
        cmocka_unit_test(a_pull_without_a_destination_says_so_at_its_deadline),
        cmocka_unit_test(a_pull_says_at_its_deadline_which_connection_it_waits_for),
        cmocka_unit_test(a_pull_says_at_its_deadline_that_it_waits_for_a_stage),
        cmocka_unit_test(a_producer_keeps_a_call_for_the_patience_of_its_caller),
        cmocka_unit_test(the_lease_of_a_consumer_that_was_replaced_outlives_the_release_of_the_new_one),
        cmocka_unit_test(a_hold_outlives_the_lease_of_a_reader_that_was_stopped),
        cmocka_unit_test(a_reader_that_was_stopped_does_not_believe_what_it_reads),
        cmocka_unit_test(a_lease_outlives_the_loss_of_the_session_in_which_it_was_granted),
        cmocka_unit_test(a_consumer_does_not_count_on_its_lease_for_longer_than_anything_is_kept),
        cmocka_unit_test(a_lease_that_is_longer_than_an_hour_is_renewed),
        cmocka_unit_test(a_pull_ends_when_the_lease_of_any_rank_runs_out),
        cmocka_unit_test(bytes_that_come_after_the_lease_are_not_taken),
        cmocka_unit_test(a_producer_may_refuse_with_a_timeout),
        cmocka_unit_test(the_numbers_of_leases_are_all_different_and_each_bit_but_one_varies),
        cmocka_unit_test(holds_that_the_producer_gave_up_fail_at_the_next_heartbeat),
        cmocka_unit_test(a_reader_of_a_hold_that_was_given_up_is_told_by_its_next_heartbeat),
        cmocka_unit_test(readers_of_several_holds_that_were_given_up_are_told_at_once),
        cmocka_unit_test(a_rank_that_has_written_has_not_given_the_request_up),
        cmocka_unit_test(a_rank_may_come_long_after_another_has_read),
        cmocka_unit_test(a_rank_that_has_read_gives_the_others_a_lease_more),
        cmocka_unit_test(a_pull_that_waits_hears_within_seconds_whether_its_producer_lives),
        cmocka_unit_test(heartbeats_come_six_times_in_a_lease_of_its_producer),
        cmocka_unit_test(heartbeats_pause_however_short_a_lease_its_producer_names),
        cmocka_unit_test(a_lease_that_may_be_half_over_is_used_after_a_heartbeat),
        cmocka_unit_test(a_consumer_with_a_slow_clock_does_not_outlast_its_lease),
        cmocka_unit_test(a_producer_from_which_nothing_was_wanted_for_long_is_not_lost_when_something_is),
        cmocka_unit_test(heartbeats_come_as_the_options_say_where_the_producer_names_no_lease),
        cmocka_unit_test(a_host_to_which_no_way_leads_is_waited_for_as_long_as_the_lease_lasts),
        cmocka_unit_test(a_producer_is_lost_a_while_after_its_connection_first_broke),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
