/* Peers that come and go, are too many, or send nonsense. */
#include <arpa/inet.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent/agent.h"
#include "agent/session.h"
#include "agent_letters.h"
#include "agent_net.h"
#include "agent_world.h"
#include "link/link.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define TWO(engine_name) ENGINE(.name = (engine_name), .tp_size = 2, .all = {.block_count = 64})
#define OPTIONS(...) (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), __VA_ARGS__})

static void open_small(world *w, const kvf_engine_spec *p, const kvf_engine_spec *d,
                       const kvf_agent_options *options) {
    world_open_model(w, attention(2, 4, 8), p, d, options);
}

static void pull_goes_well(world *w, const char *id) {
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    world_request_make(w, &w->p, id, 40, 10, 1, &held);
    world_request_make(w, &w->d, id, 40, 20, 1, &wanted);
    world_fill(w, &w->p, &held, 3);
    world_hold(&w->p, &held, theirs);
    world_pull(&w->d, &wanted, &w->p, ours);
    world_all_done(w, &w->d, ours);
    world_all_done(w, &w->p, theirs);
    assert_int_equal(world_wrong_cells(w, &w->d, &wanted, 3), 0);
}

/* ---- messages -------------------------------------------------------------------------------- */

static void what_one_side_sends_the_other_receives(void **state) {
    (void)state;
    world w;
    open_small(&w, ONE("P"), ONE("D"), OPTIONS(.way = KVF_WAY_DIRECT));
    pull_goes_well(&w, "a");
    world_run_for(&w, MS); /* until all have arrived */
    const kvf_agent_stats p = world_stats(w.p.agents[0]), d = world_stats(w.d.agents[0]);
    assert_int_equal(d.messages_sent, 4); /* HELLO to the engine and to its rank, ACQUIRE, RELEASE */
    assert_int_equal(p.messages_received, d.messages_sent);
    assert_int_equal(d.messages_received, p.messages_sent);
    assert_int_equal(p.messages_sent, 4); /* the answers */
    world_close(&w);
}

/* ---- restarts -------------------------------------------------------------------------------- */

static void a_producer_restarted_under_its_name_is_another(void **state) {
    (void)state;
    world w;
    open_small(&w, TWO("P"), ONE("D"), OPTIONS(.peer_timeout_ns = 100 * MS));
    pull_goes_well(&w, "a");
    world_close_agents(&w.p);
    world_forget(&w); /* the next agent may have the same address */
    world_open_agents(&w.p, NULL);
    pull_goes_well(&w, "a"); /* at the new endpoint */
    world_until(&w, world_count(&w, w.d.agents[0], KVF_EVENT_PEER_LOST) >= 2);
    pull_goes_well(&w, "b");
    world_quiet(&w);
    world_close(&w);
}

static void a_producer_restarted_at_its_address_is_noticed(void **state) {
    (void)state;
    world w;
    world_request wanted;
    uint64_t pulls[WORLD_MAX_RANKS];
    open_small(&w, ONE("P"), ONE("D"), NULL);
    pull_goes_well(&w, "a");
    char endpoint[64];
    (void)snprintf(endpoint, sizeof endpoint, "%s", w.p.contact.endpoint);
    world_request_make(&w, &w.d, "in the middle", 40, 5, 1, &wanted);
    world_pull(&w.d, &wanted, &w.p, pulls);
    world_run_for(&w, 20 * MS);
    world_close_agents(&w.p);
    world_forget(&w); /* the next agent may have the same address */
    world_open_agents(&w.p, OPTIONS(.listen = endpoint));

    const world_outcome *failed = world_failed(&w, w.d.agents[0], pulls[0], KVF_E_PEER_LOST);
    assert_string_equal(failed->engine, "P");
    assert_int_equal(failed->rank, 0);
    assert_int_equal(failed->invalid_count[0], 3);
    assert_int_equal(failed->invalid[0][0], 5);
    assert_true(failed->blocks_free);
    world_until(&w, world_count(&w, w.d.agents[0], KVF_EVENT_PEER_LOST) >= 1);
    pull_goes_well(&w, "b");
    world_quiet(&w);
    world_close(&w);
}

/* The next process listens before it has memory, as while it loads a model, and knows nothing of the session. */
static void a_producer_that_is_restarted_and_not_ready_is_noticed(void **state) {
    (void)state;
    world w;
    world_request wanted;
    uint64_t pulls[WORLD_MAX_RANKS];
    open_small(&w, ONE("P"), ONE("D"), OPTIONS(.peer_timeout_ns = 3 * SECOND));
    char endpoint[64];
    (void)snprintf(endpoint, sizeof endpoint, "%s", w.p.contact.endpoint);
    world_request_make(&w, &w.d, "in the middle", 40, 5, 1, &wanted);
    world_pull(&w.d, &wanted, &w.p, pulls);
    world_run_for(&w, SECOND);
    world_close_agents(&w.p);
    world_forget(&w); /* the next agent may have the same address */
    const uint64_t ended = world_now();
    assert_ok(
        kvf_agent_open_in(&net_surroundings, w.p.engine, 0, OPTIONS(.listen = endpoint), &w.p.agents[0]));
    const world_outcome *failed = world_failed(&w, w.d.agents[0], pulls[0], KVF_E_PEER_LOST);
    assert_true(failed->blocks_free);
    assert_true(world_now() - ended < 4 * SECOND);
    world_register(&w.p, 0);
    w.p.contact.endpoint = endpoint; /* it was the closed agent's */
    pull_goes_well(&w, "b");
    world_quiet(&w);
    world_close(&w);
}

/* It has forgotten D, which greets it anew, and ends before it has answered. */
static void a_producer_that_ends_while_it_is_greeted_anew_is_noticed(void **state) {
    (void)state;
    world w;
    world_request wanted;
    uint64_t pulls[WORLD_MAX_RANKS];
    open_small(&w, ONE("P"), ONE("D"), OPTIONS(.peer_timeout_ns = 100 * MS));
    letters_begin();
    world_request_make(&w, &w.d, "in the middle", 40, 5, 1, &wanted);
    world_pull(&w.d, &wanted, &w.p, pulls);
    world_run_for(&w, SECOND);
    letters_rule(LETTERS_LOSE, w.p.agents[0], KVF_MESSAGE_WELCOME, 0);
    world_lose(w.p.agents[0], world_session(w.p.agents[0], true));
    world_until(&w, world_session(w.d.agents[0], false)->state == KVF_SESSION_GREETING);
    world_close_agents(&w.p);
    letters_end();
    const uint64_t ended = world_now();
    (void)world_failed(&w, w.d.agents[0], pulls[0], KVF_E_PEER_LOST);
    assert_true(world_now() - ended < SECOND);
    world_close(&w);
}

static void a_lost_producer_fails_its_requests_and_no_others(void **state) {
    (void)state;
    world w;
    world_request mine, other, held;
    uint64_t lost[WORLD_MAX_RANKS], fine[WORLD_MAX_RANKS], holds[WORLD_MAX_RANKS];
    open_small(&w, TWO("P"), ONE("D"),
               OPTIONS(.peer_timeout_ns = 100 * MS, .policy = KVF_FAILURE_FAIL, .lease_ns = 20 * SECOND));
    world_add(&w, ONE("E"), NULL);
    world_request_make(&w, &w.d, "lost", 40, 5, 2, &mine);
    world_request_make(&w, &w.d, "fine", 40, 20, 1, &other);
    mine.groups[0].begin = 16; /* the first block is good */
    world_pull(&w.d, &mine, &w.p, lost);
    world_pull(&w.d, &other, &w.e, fine);
    world_run_for(&w, 100 * MS);
    kvf_agent_close(w.p.agents[1]);
    w.p.agents[1] = NULL;

    const uint64_t closed = world_now();
    const world_outcome *failed = world_failed(&w, w.d.agents[0], lost[0], KVF_E_PEER_LOST);
    assert_true(world_now() - closed < 2 * SECOND); /* it is not silence, which takes a lease to notice */
    assert_false(failed->recompute);
    assert_int_equal(failed->rank, 1);
    assert_int_equal(failed->invalid_count[0], 2);
    assert_int_equal(failed->invalid[0][0], 7);
    assert_int_equal(failed->invalid[0][1], 9);
    world_request_make(&w, &w.e, "fine", 40, 0, 1, &held);
    world_hold(&w.e, &held, holds);
    world_all_done(&w, &w.d, fine);
    world_all_done(&w, &w.e, holds);
    world_quiet(&w);
    world_close(&w);
}

/* ---- too many -------------------------------------------------------------------------------- */

static void idle_peers_are_forgotten_and_may_come_back(void **state) {
    (void)state;
    world w;
    open_small(&w, TWO("P"), TWO("D"), OPTIONS(.idle_ns = 300 * MS));
    pull_goes_well(&w, "a");
    world_until(&w, world_stats(w.p.agents[0]).peers_now == 0 && world_stats(w.d.agents[0]).peers_now == 0);
    assert_true(world_stats(w.p.agents[0]).peers_evicted > 0);
    assert_true(world_stats(w.d.agents[0]).peers_evicted > 0);
    assert_int_equal(world_stats(w.p.agents[0]).memory_now_bytes, 0);
    assert_int_equal(world_stats(w.p.agents[0]).connections_now, 0);
    const uint64_t last = w.d.agents[0]->last_number;
    assert_true(last > 0);
    pull_goes_well(&w, "b");
    assert_true(w.d.agents[0]->all_sessions->next_number > last); /* P may remember the earlier numbers */
    assert_int_equal(world_count(&w, w.d.agents[0], KVF_EVENT_PEER_LOST), 0);
    world_quiet(&w);
    world_close(&w);
}

/* The session with one rank is in use for longer, because an answer does not come. */
static void an_engine_is_not_met_again_while_one_of_its_ranks_is_in_use(void **state) {
    (void)state;
    for (uint32_t rank = 0; rank < 2; rank++) {
        world w;
        open_small(&w, TWO("P"), ONE("D"), OPTIONS(.idle_ns = SECOND));
        kvf_agent *d = w.d.agents[0];
        letters_begin();
        letters_rule(LETTERS_LOSE, w.p.agents[rank], KVF_MESSAGE_ANSWER, KVF_CALL_RELEASE);
        pull_goes_well(&w, "a");
        world_run_for(&w, 1500 * MS);
        assert_int_equal(world_stats(d).peers_evicted, 1);
        assert_int_equal(world_stats(d).peers_now, 1);
        assert_int_equal(world_stats(d).plans_now, 1);
        letters_end();
        pull_goes_well(&w, "b");
        assert_int_equal(world_stats(d).plans_built, 1);
        assert_int_equal(world_stats(d).peers_now, 2);
        world_quiet(&w);
        world_close(&w);
    }
}

static void more_peers_than_allowed_wait_until_there_is_room(void **state) {
    (void)state;
    world w;
    world_request wanted;
    uint64_t pulls[WORLD_MAX_RANKS];
    open_small(&w, ONE("P"), TWO("D"), OPTIONS(.max_peers = 1, .idle_ns = 500 * MS));
    world_request_make(&w, &w.d, "a", 40, 5, 1, &wanted);
    wanted.request.contact = w.p.contact;
    wanted.request.deadline_ns = 300 * MS;
    for (uint32_t r = 0; r < 2; r++) {
        assert_ok(kvf_agent_pull(w.d.agents[r], &wanted.request, &pulls[r]));
        world_run_for(&w, 100 * MS);
    }
    (void)world_failed(&w, w.d.agents[0], pulls[0], KVF_E_TIMEOUT); /* no producer holds it */
    const world_outcome *failed = world_failed(&w, w.d.agents[1], pulls[1], KVF_E_TIMEOUT);
    if (!strstr(failed->detail, "has 1 peers"))
        fail_msg("%s", failed->detail);
    assert_int_equal(world_stats(w.p.agents[0]).peers_now, 1);
    world_until(&w, world_stats(w.p.agents[0]).peers_now == 0);
    assert_ok(kvf_agent_connect(w.d.agents[1], &w.p.contact, WORLD_PATIENCE_S * SECOND, &pulls[1]));
    (void)world_done(&w, w.d.agents[1], pulls[1]);
    world_quiet(&w);
    world_close(&w);
}

static void more_requests_of_a_peer_than_allowed_are_refused(void **state) {
    (void)state;
    world w;
    world_request wanted[3];
    uint64_t pulls[3];
    static const char *const ids[] = {"1", "2", "3"};
    open_small(&w, ONE("P"), ONE("D"), OPTIONS(.max_requests_per_peer = 2));
    for (uint32_t i = 0; i < 3; i++) {
        world_request_make(&w, &w.d, ids[i], 16, i, 1, &wanted[i]);
        world_pull(&w.d, &wanted[i], &w.p, &pulls[i]);
    }
    const world_outcome *failed = world_failed(&w, w.d.agents[0], pulls[2], KVF_E_LIMIT);
    assert_non_null(strstr(failed->detail, "2 calls"));
    for (uint32_t i = 0; i < 2; i++) {
        assert_ok(kvf_agent_cancel(w.d.agents[0], pulls[i]));
        (void)world_failed(&w, w.d.agents[0], pulls[i], KVF_E_CANCELLED);
    }
    world_run_for(&w, 20 * MS);
    pull_goes_well(&w, "4");
    world_quiet(&w);
    world_close(&w);
}

/* The answer to an EXPECT refuses it at once, and says that nothing will be written. */
static void more_expectations_of_a_peer_than_allowed_are_refused(void **state) {
    (void)state;
    world w;
    world_request wanted[3];
    uint64_t tickets[3];
    static const char *const ids[] = {"1", "2", "3"};
    open_small(&w, ONE("P"), ONE("D"), OPTIONS(.max_requests_per_peer = 2));
    for (uint32_t i = 0; i < 3; i++) {
        world_request_make(&w, &w.d, ids[i], 16, i, 1, &wanted[i]);
        world_expect(&w.d, &wanted[i], &w.p, &tickets[i]);
        if (i == 1)
            world_run_for(&w, 50 * MS);
    }
    const world_outcome *failed = world_failed(&w, w.d.agents[0], tickets[2], KVF_E_LIMIT);
    assert_non_null(strstr(failed->detail, "expects 2 requests"));
    assert_true(failed->blocks_free);
    for (uint32_t i = 0; i < 2; i++) {
        assert_ok(kvf_agent_cancel(w.d.agents[0], tickets[i]));
        (void)world_failed(&w, w.d.agents[0], tickets[i], KVF_E_CANCELLED);
    }
    world_run_for(&w, 20 * MS);
    pull_goes_well(&w, "4");
    world_quiet(&w);
    world_close(&w);
}

/* ---- nonsense -------------------------------------------------------------------------------- */

typedef struct stranger {
    kvf_link *link;
    kvf_route route;
    uint32_t answers;
    uint32_t version;
    kvf_message_kind kind;
    kvf_status status;
    char detail[256];
} stranger;

static void on_message(void *context, const kvf_letter *letter) {
    stranger *s = context;
    kvf_message message = {0};
    s->answers++;
    assert_ok(kvf_wire_open((kvf_bytes){letter->data, letter->bytes}, &message));
    s->version = message.version;
    s->kind = message.kind;
    assert_ok(kvf_wire_read(&message));
    if (message.kind == KVF_MESSAGE_REFUSED) {
        s->status = message.refused.status;
        (void)snprintf(s->detail, sizeof s->detail, "%s", message.refused.detail);
    } else if (message.kind == KVF_MESSAGE_ANSWER) {
        s->status = message.answer.status;
        (void)snprintf(s->detail, sizeof s->detail, "%s", message.answer.detail);
    }
    kvf_message_free(&message);
}

static void on_broken(void *context, kvf_route route, kvf_status status, const char *detail) {
    (void)context, (void)route, (void)status, (void)detail;
}

static void open_stranger(stranger *s, const world *w) {
    *s = (stranger){0};
    const kvf_link_options options = {.table = net_surroundings.link,
                                      .listen = "",
                                      .on_message = on_message,
                                      .on_broken = on_broken,
                                      .context = s};
    assert_ok(kvf_link_open(&options, &s->link));
    assert_ok(kvf_link_connect(s->link, kvf_agent_endpoint(w->p.agents[0]), NULL, &s->route));
}

#define until_with(w, s, condition)                                                                          \
    do {                                                                                                     \
        uint64_t end_ = world_now() + WORLD_PATIENCE_S * SECOND;                                             \
        while (!(condition)) {                                                                               \
            if (world_now() > end_)                                                                          \
                fail_msg("never: %s", #condition);                                                           \
            world_work_beside((w), (s)->link, MS / 4);                                                       \
        }                                                                                                    \
    } while (0)

static void another_version_of_the_protocol_is_refused_with_both_numbers(void **state) {
    (void)state;
    world w;
    stranger s;
    open_small(&w, ONE("P"), ONE("D"), NULL);
    open_stranger(&s, &w);
    kvf_message hello = {.kind = KVF_MESSAGE_HELLO,
                         .hello = {.engine = "X", .incarnation = 1, .rank_count = 1, .wants_card = true}};
    kvf_wire_buffer bytes;
    assert_ok(kvf_wire_encode(&hello, &bytes));
    assert_int_equal(bytes.data[5], KVF_WIRE_VERSION);
    bytes.data[5] = 77;
    assert_ok(kvf_link_send(s.link, s.route, bytes.data, bytes.size));
    until_with(&w, &s, s.answers == 1);
    assert_int_equal(s.kind, KVF_MESSAGE_REFUSED);
    assert_int_equal(s.status, KVF_E_UNSUPPORTED);
    assert_non_null(strstr(s.detail, "version 2"));
    assert_non_null(strstr(s.detail, "77"));
    assert_int_equal(world_stats(w.p.agents[0]).peers_now, 0);
    kvf_wire_buffer_free(&bytes);
    kvf_link_close(s.link);
    world_close(&w);
}

/* Such a refusal may answer a repeated greeting late: a peer that is already met ignores it. */
static void a_refusal_of_a_greeting_does_not_end_a_session_that_is_open(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    open_small(&w, TWO("P"), ONE("D"), NULL);
    world_request_make(&w, &w.p, "a", 40, 10, 1, &held);
    world_request_make(&w, &w.d, "a", 40, 20, 1, &wanted);
    world_fill(&w, &w.p, &held, 3);
    world_pull(&w.d, &wanted, &w.p, ours);
    world_run_for(&w, 100 * MS); /* it waits for the hold */
    kvf_message refusal = {.kind = KVF_MESSAGE_REFUSED,
                           .refused = {.status = KVF_E_MISMATCH, .detail = "does not know you"}};
    kvf_wire_buffer bytes;
    assert_ok(kvf_wire_encode(&refusal, &bytes));
    for (uint32_t r = 0; r < 2; r++) {
        assert_non_null(w.p.agents[r]->all_sessions);
        assert_ok(
            kvf_link_send(w.p.agents[r]->link, w.p.agents[r]->all_sessions->route, bytes.data, bytes.size));
    }
    kvf_wire_buffer_free(&bytes);
    world_run_for(&w, 100 * MS);
    assert_int_equal(world_count(&w, w.d.agents[0], KVF_EVENT_PEER_LOST), 0);
    world_hold(&w.p, &held, theirs);
    world_all_done(&w, &w.d, ours);
    world_all_done(&w, &w.p, theirs);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 3), 0);
    world_quiet(&w);
    world_close(&w);
}

static void nonsense_is_counted_and_changes_nothing(void **state) {
    (void)state;
    world w;
    stranger s;
    open_small(&w, ONE("P"), ONE("D"), NULL);
    open_stranger(&s, &w);
    kvf_message hello = {.kind = KVF_MESSAGE_HELLO,
                         .hello = {.engine = "X", .incarnation = 1, .rank_count = 1, .wants_card = true}};
    kvf_wire_buffer bytes;
    assert_ok(kvf_wire_encode(&hello, &bytes));
    uint32_t sent = 0;
    for (size_t cut = 0; cut < bytes.size; cut += 5, sent++) /* cut short: not a message */
        assert_ok(kvf_link_send(s.link, s.route, bytes.data, cut));
    uint64_t x = 88172645463325252u;
    for (uint32_t i = 0; i < 200; i++, sent++) {
        uint8_t noise[64];
        for (size_t b = 0; b < sizeof noise; b++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            noise[b] = (uint8_t)x;
        }
        assert_ok(kvf_link_send(s.link, s.route, noise, sizeof noise));
    }
    until_with(&w, &s, world_stats(w.p.agents[0]).messages_malformed == sent);

    /* Calls of an unknown session, and with another digest than ours. */
    kvf_message call = {
        .kind = KVF_MESSAGE_CALL,
        .call = {.number = 1, .kind = KVF_CALL_RELEASE, .request = {"a", 1}, .rank_count = 1}};
    kvf_wire_buffer_free(&bytes);
    assert_ok(kvf_wire_encode(&call, &bytes));
    assert_ok(kvf_link_send(s.link, s.route, bytes.data, bytes.size));
    until_with(&w, &s, s.answers == 1);
    assert_int_equal(s.status, KVF_E_PEER_LOST);
    kvf_wire_buffer_free(&bytes);
    assert_ok(kvf_wire_encode(&hello, &bytes));
    assert_ok(kvf_link_send(s.link, s.route, bytes.data, bytes.size));
    until_with(&w, &s, s.answers == 2);
    assert_int_equal(s.status, KVF_E_MISMATCH);
    assert_int_equal(world_stats(w.p.agents[0]).peers_now, 0);
    kvf_wire_buffer_free(&bytes);
    kvf_link_close(s.link);
    pull_goes_well(&w, "after it");
    world_close(&w);
}

static void bytes_that_are_no_protocol_at_all_change_nothing(void **state) {
    (void)state;
    world w;
    open_small(&w, ONE("P"), ONE("D"), NULL);
    const char *colon = strrchr(kvf_agent_endpoint(w.p.agents[0]), ':');
    assert_non_null(colon);
    unsigned long port = strtoul(colon + 1, NULL, 10);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int sockets[3];
    static const char *const texts[] = {"GET / HTTP/1.1\r\n\r\n", "\xff", ""};
    for (size_t i = 0; i < COUNT_OF(sockets); i++) {
        sockets[i] = socket(AF_INET, SOCK_STREAM, 0);
        assert_int_equal(connect(sockets[i], (struct sockaddr *)&address, sizeof address), 0);
        assert_true(send(sockets[i], texts[i], strlen(texts[i]), MSG_NOSIGNAL) >= 0);
    }
    pull_goes_well(&w, "a"); /* while half a handshake waits */
    for (size_t i = 0; i < COUNT_OF(sockets); i++)
        (void)close(sockets[i]);
    pull_goes_well(&w, "b");
    world_quiet(&w);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_one_side_sends_the_other_receives),
        cmocka_unit_test(a_producer_restarted_under_its_name_is_another),
        cmocka_unit_test(a_producer_restarted_at_its_address_is_noticed),
        cmocka_unit_test(a_producer_that_is_restarted_and_not_ready_is_noticed),
        cmocka_unit_test(a_producer_that_ends_while_it_is_greeted_anew_is_noticed),
        cmocka_unit_test(a_lost_producer_fails_its_requests_and_no_others),
        cmocka_unit_test(idle_peers_are_forgotten_and_may_come_back),
        cmocka_unit_test(an_engine_is_not_met_again_while_one_of_its_ranks_is_in_use),
        cmocka_unit_test(more_peers_than_allowed_wait_until_there_is_room),
        cmocka_unit_test(more_requests_of_a_peer_than_allowed_are_refused),
        cmocka_unit_test(more_expectations_of_a_peer_than_allowed_are_refused),
        cmocka_unit_test(another_version_of_the_protocol_is_refused_with_both_numbers),
        cmocka_unit_test(a_refusal_of_a_greeting_does_not_end_a_session_that_is_open),
        cmocka_unit_test(nonsense_is_counted_and_changes_nothing),
    };
    const struct CMUnitTest with_sockets[] = {
        cmocka_unit_test(bytes_that_are_no_protocol_at_all_change_nothing),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL) +
           cmocka_run_group_tests(with_sockets, world_is_real, NULL);
}
