/*
 * A producer that lets nobody in for now, because too many connect at once: the consumer waits as long as its request
 * may, and says why. Over ZeroMQ, in real time.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent/agent.h"
#include "agent_world.h"
#include "link/link_inside.h"
#include "transport/front.h"
#include "transport/messages/messages.h"

#define TOKENS 40
#define LINES 64u

typedef struct scene {
    world w;
    world_request held, wanted;
    char lines[LINES][256]; /* of D's log */
    uint32_t line_count;
} scene;

static void write_down(void *context, const kvf_log_line *line) {
    scene *s = context;
    if (s->line_count < LINES)
        (void)snprintf(s->lines[s->line_count++], sizeof s->lines[0], "%s", line->text);
}

static uint32_t count_lines(const scene *s, const char *words) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->line_count; i++)
        count += strstr(s->lines[i], words) != NULL;
    return count;
}

static void set_up(scene *s) {
    memset(s, 0, sizeof *s);
    const kvf_agent_options options = {.struct_size = sizeof options,
                                       .transport = "messages",
                                       .max_connections_per_second = 5,
                                       .log = write_down,
                                       .log_context = s};
    world_open_model(&s->w, attention(2, 4, 8), ENGINE(.name = "P", .all = {.block_count = 64}),
                     ENGINE(.name = "D", .all = {.block_count = 64, .order = "BLHNP"}), &options);
    world_request_make(&s->w, &s->w.p, "r", TOKENS, 3, 1, &s->held);
    world_request_make(&s->w, &s->w.d, "r", TOKENS, 7, 1, &s->wanted);
    s->wanted.request.contact = s->w.p.contact;
    world_fill(&s->w, &s->w.p, &s->held, 1);
}

static uint64_t pull(scene *s, uint64_t deadline_ns) {
    uint64_t ticket;
    s->wanted.request.deadline_ns = deadline_ns;
    assert_ok(kvf_agent_pull(s->w.d.agents[0], &s->wanted.request, &ticket));
    return ticket;
}

static kvf_gate *gate_of_link(const kvf_agent *agent) {
    return &kvf_zmq_link_of(agent->link)->door.gate;
}

static kvf_gate *gate_of_transport(const kvf_agent *agent) {
    return &((kvf_messages_endpoint *)agent->transport->fabrics[0].endpoint)->door.gate;
}

/* As if so many had connected that they are not paid for yet. */
static void shut(scene *s, kvf_gate *gate) {
    world_until(&s->w, gate->listener_fd >= 0); /* ZeroMQ tells where it listens */
    gate->all.paid_ns = kvf_now(&kvf_monotonic) + 60 * SECOND;
    kvf_gate_count(gate, kvf_now(&kvf_monotonic));
    assert_true(gate->all.is_shut);
}

static void reopen(kvf_gate *gate) {
    gate->all.paid_ns = 0;
    kvf_gate_tick(gate, kvf_now(&kvf_monotonic));
    assert_false(gate->all.is_shut);
}

static void an_agents_number_of_connections_a_second_holds_for_its_link_and_its_transport(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    assert_int_equal(gate_of_link(s.w.p.agents[0])->rate, 5);
    assert_int_equal(gate_of_transport(s.w.p.agents[0])->rate, 5);
    world_close(&s.w);
}

static void a_contact_that_lets_nobody_in_is_waited_for_and_the_log_says_why(void **state) {
    (void)state;
    scene s;
    uint64_t hold;
    set_up(&s);
    kvf_gate *gate = gate_of_link(s.w.p.agents[0]);
    shut(&s, gate);
    const world_outcome *failed = world_failed(&s.w, s.w.d.agents[0], pull(&s, 3 * SECOND), KVF_E_TIMEOUT);
    assert_non_null(strstr(failed->detail, "the deadline has passed: P: tcp://"));
    assert_non_null(strstr(failed->detail, "no connection: the host did not answer"));
    assert_int_equal(count_lines(&s, "P: tcp://"), 2); /* of the connection, and of the request */
    assert_int_equal(count_lines(&s, ": no connection: the host did not answer; trying again"), 1);
    world_hold(&s.w.p, &s.held, &hold);
    const uint64_t ticket = pull(&s, WORLD_PATIENCE_S * SECOND);
    world_run_for(&s.w, 4 * SECOND);
    reopen(gate);
    (void)world_done(&s.w, s.w.d.agents[0], ticket);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    world_close(&s.w);
}

/* The sessions are open before. */
static void a_transport_that_lets_nobody_in_is_waited_for_and_its_peer_is_not_lost(void **state) {
    (void)state;
    scene s;
    uint64_t hold, connect;
    set_up(&s);
    kvf_agent *d = s.w.d.agents[0];
    assert_ok(kvf_agent_connect(d, &s.w.p.contact, 0, &connect));
    (void)world_done(&s.w, d, connect);
    world_hold(&s.w.p, &s.held, &hold);
    kvf_gate *gate = gate_of_transport(s.w.p.agents[0]);
    shut(&s, gate);
    const world_outcome *failed = world_failed(&s.w, d, pull(&s, 4 * SECOND), KVF_E_TIMEOUT);
    assert_non_null(strstr(failed->detail, "no connection: the host did not answer"));
    assert_int_equal(count_lines(&s, "P rank 0: messages: tcp://127.0.0.1:"), 1);
    assert_int_equal(count_lines(&s, ": no connection: the host did not answer; trying again"), 1);
    assert_int_equal(world_next(&s.w, d, failed->ticket)->kind, KVF_EVENT_BLOCKS_FREE);
    (void)world_next(&s.w, s.w.p.agents[0], hold); /* its reader has failed */
    world_hold(&s.w.p, &s.held, &hold);
    const uint64_t ticket = pull(&s, WORLD_PATIENCE_S * SECOND);
    world_run_for(&s.w, 4 * SECOND); /* longer than the transport once waited for a connection */
    reopen(gate);
    (void)world_done(&s.w, d, ticket);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    assert_int_equal(world_stats(d).peers_lost, 0);
    assert_int_equal(count_lines(&s, "trying again"), 1);
    world_close(&s.w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_agents_number_of_connections_a_second_holds_for_its_link_and_its_transport),
        cmocka_unit_test(a_contact_that_lets_nobody_in_is_waited_for_and_the_log_says_why),
        cmocka_unit_test(a_transport_that_lets_nobody_in_is_waited_for_and_its_peer_is_not_lost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
