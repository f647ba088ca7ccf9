/* Which peers may connect: keys, the allow-list, and listening beyond loopback. */
#include <stdio.h>

#include "agent/agent.h"
#include "agent/session.h"
#include "agent_speaker.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 16})
#define OPTIONS(...) (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), __VA_ARGS__})

typedef struct keys {
    char open[41], secret[41];
} keys;

static keys make_keys(void) {
    keys made = {.open = ""};
    assert_ok(kvf_agent_make_keys(made.open, made.secret));
    assert_int_equal(strlen(made.open), 40);
    return made;
}

static kvf_agent_options with_keys(const keys *own) {
    return *OPTIONS(.public_key = own->open, .secret_key = own->secret);
}

/* Opens P and D, each with its own options. */
static void open_engines(world *w, const kvf_engine_spec *spec_of_p, const kvf_agent_options *p,
                         const kvf_agent_options *d) {
    world_open_model(w, attention(2, 4, 8), spec_of_p, ONE("D"), NULL);
    world_close_agents(&w->p);
    world_close_agents(&w->d);
    world_open_agents(&w->p, p);
    world_open_agents(&w->d, d);
}

static void open_with(world *w, const kvf_agent_options *p, const kvf_agent_options *d) {
    open_engines(w, ONE("P"), p, d);
}

static kvf_status start_pull(world *w, uint64_t deadline_ns, uint64_t *ticket) {
    world_request wanted;
    world_request_make(w, &w->d, "a", 40, 0, 1, &wanted);
    wanted.request.contact = w->p.contact;
    wanted.request.deadline_ns = deadline_ns;
    return kvf_agent_pull(w->d.agents[0], &wanted.request, ticket);
}

static void pull_well(world *w) {
    world_request held;
    uint64_t pull, hold;
    world_request_make(w, &w->p, "a", 40, 5, 1, &held);
    world_fill(w, &w->p, &held, 1);
    world_hold(&w->p, &held, &hold);
    assert_ok(start_pull(w, WORLD_PATIENCE_S * SECOND, &pull));
    (void)world_done(w, w->d.agents[0], pull);
    (void)world_done(w, w->p.agents[0], hold);
    world_request_make(w, &w->d, "a", 40, 0, 1, &held);
    assert_int_equal(world_wrong_cells(w, &w->d, &held, 1), 0);
}

static void with_keys_on_the_list_a_pull_goes_well(void **state) {
    (void)state;
    world w;
    keys of_p = make_keys(), of_d = make_keys(), of_other = make_keys();
    kvf_agent_options p = with_keys(&of_p), d = with_keys(&of_d);
    const char *allowed[] = {of_other.open, of_d.open};
    p.allowed_keys = allowed;
    p.allowed_key_count = 2;
    open_with(&w, &p, &d);
    pull_well(&w);
    world_quiet(&w);
    world_close(&w);
}

/* It would get the card, and with it the memory. */
static void a_producer_that_is_not_on_the_consumers_list_has_no_session_with_it(void **state) {
    (void)state;
    world w;
    keys of_p = make_keys(), of_d = make_keys(), of_other = make_keys();
    kvf_agent_options p = with_keys(&of_p), d = with_keys(&of_d);
    const char *allowed[] = {of_other.open};
    d.allowed_keys = allowed;
    d.allowed_key_count = 1;
    open_with(&w, &p, &d);
    pull_well(&w);
    kvf_agent *producer = w.p.agents[0], *consumer = w.d.agents[0];
    const uint8_t secret[KVF_WIRE_SECRET_BYTES] = {7};
    const kvf_message hello = speaker_hello("P", secret, consumer->digest);
    kvf_wire_buffer bytes;
    assert_ok(kvf_wire_encode(&hello, &bytes));
    assert_true(producer->all_sessions->incoming); /* by the connection that D has made */
    assert_ok(kvf_link_send(producer->link, producer->all_sessions->route, bytes.data, bytes.size));
    kvf_wire_buffer_free(&bytes);
    world_until(&w, world_stats(consumer).messages_foreign == 1);
    assert_int_equal(HASH_CNT(hh_client, consumer->clients), 0);
    world_quiet(&w);
    world_close(&w);
}

/* Over "messages", which needs only what the sessions need. */
static void the_cache_goes_encrypted_where_the_sessions_do(void **state) {
    (void)state;
    for (int secured = 0; secured < 2; secured++) {
        world w;
        keys of_p = make_keys(), of_d = make_keys();
        kvf_agent_options p = secured ? with_keys(&of_p) : *OPTIONS(), d = secured ? with_keys(&of_d) : p;
        p.transport = d.transport = "messages";
        open_with(&w, &p, &d);
        pull_well(&w);
        kvf_agent_peer peer = {.struct_size = sizeof peer};
        uint32_t count = 0;
        assert_ok(kvf_agent_peers(w.d.agents[0], &peer, 1, &count));
        assert_int_equal(count, 1);
        assert_string_equal(peer.fabric, "messages");
        assert_non_null(strstr(peer.way, "messages to tcp://127.0.0.1:"));
        assert_int_equal(strstr(peer.way, ", encrypted") != NULL, secured);
        world_quiet(&w);
        world_close(&w);
    }
}

/* Opens the agent as users do: the world's agents talk over links of the tests, which have no interface. */
static void the_cache_goes_by_the_interface_that_the_sessions_use(void **state) {
    (void)state;
    world w;
    const kvf_agent_options *by_messages = OPTIONS(.transport = "messages");
    open_with(&w, by_messages, by_messages);
    world_close_agents(&w.p);
    assert_ok(kvf_agent_open(w.p.engine, 0, OPTIONS(.listen = "tcp://127.0.0.2:*", .transport = "messages"),
                             &w.p.agents[0]));
    world_register(&w.p, 0);
    w.p.contact.endpoint = kvf_agent_endpoint(w.p.agents[0]);
    pull_well(&w);
    kvf_agent_peer peer = {.struct_size = sizeof peer};
    uint32_t count = 0;
    assert_ok(kvf_agent_peers(w.d.agents[0], &peer, 1, &count));
    assert_non_null(strstr(peer.way, "messages to tcp://127.0.0.2:"));
    world_quiet(&w);
    world_close(&w);
}

/* Opens P as users do, for all interfaces, and pulls over `host`; `listen` is without its port. */
static void pull_over(const char *listen, const char *host) {
    world w;
    char port[8], listens[32], advertised[32], way[48];
    const kvf_agent_options *by_messages = OPTIONS(.transport = "messages");
    open_with(&w, by_messages, by_messages);
    world_close_agents(&w.p);
    kvf_agent **p = &w.p.agents[0];
    kvf_status status = KVF_E_EXISTS;
    for (int i = 0; i < 20 && status == KVF_E_EXISTS; i++) { /* tests beside this one may be faster */
        assert_ok(kvf_agent_open(w.p.engine, 0, NULL, p));   /* finds a free port */
        (void)snprintf(port, sizeof port, "%s", strrchr(kvf_agent_endpoint(*p), ':'));
        kvf_agent_close(*p);
        (void)snprintf(listens, sizeof listens, "%s%s", listen, port);
        (void)snprintf(advertised, sizeof advertised, "tcp://%s%s", host, port);
        status = kvf_agent_open(
            w.p.engine, 0,
            OPTIONS(.listen = listens, .advertise = advertised, .insecure = true, .transport = "messages"),
            p);
    }
    assert_ok(status);
    world_register(&w.p, 0);
    w.p.contact.endpoint = kvf_agent_endpoint(*p);
    pull_well(&w);
    kvf_agent_peer peer = {.struct_size = sizeof peer};
    uint32_t count = 0;
    assert_ok(kvf_agent_peers(w.d.agents[0], &peer, 1, &count));
    (void)snprintf(way, sizeof way, "messages to tcp://%s:", host);
    assert_non_null(strstr(peer.way, way));
    world_quiet(&w);
    world_close(&w);
}

static void the_cache_goes_to_the_host_that_is_advertised(void **state) {
    (void)state;
    pull_over("tcp://0.0.0.0", "127.0.0.1");
    pull_over("tcp://0.0.0.0", "127.0.0.3");
}

static void the_same_over_ipv6(void **state) {
    (void)state;
    kvf_model *model = attention(2, 4, 8);
    kvf_engine *engine = engine_of(model, ONE("P"));
    kvf_agent *agent = NULL;
    const bool has_ipv6 = kvf_agent_open(engine, 0, OPTIONS(.listen = "tcp://[::1]:*"), &agent) == KVF_OK;
    kvf_agent_close(agent);
    kvf_engine_free(engine);
    kvf_model_free(model);
    if (!has_ipv6)
        skip();
    pull_over("tcp://[::]", "[::1]");
}

static void a_key_that_is_not_on_the_list_is_refused_at_once(void **state) {
    (void)state;
    world w;
    uint64_t pull;
    keys of_p = make_keys(), of_d = make_keys(), of_other = make_keys();
    kvf_agent_options p = with_keys(&of_p), d = with_keys(&of_d);
    const char *allowed[] = {of_other.open};
    p.allowed_keys = allowed;
    p.allowed_key_count = 1;
    open_with(&w, &p, &d);
    assert_ok(start_pull(&w, WORLD_PATIENCE_S * SECOND, &pull));
    const world_outcome *failed = world_failed(&w, w.d.agents[0], pull, KVF_E_PERMISSION);
    assert_non_null(strstr(failed->detail, "key"));
    assert_int_equal(world_stats(w.p.agents[0]).messages_received, 0);
    world_quiet(&w);
    world_close(&w);
}

/* D has met P at rank 0, which lets it in. */
static void a_rank_that_does_not_allow_the_key_fails_a_pull_at_once(void **state) {
    (void)state;
    world w;
    world_request wanted;
    uint64_t pull;
    keys of_p = make_keys(), of_d = make_keys(), of_other = make_keys();
    const char *allowed[] = {of_other.open, of_d.open};
    kvf_agent_options p = with_keys(&of_p), d = with_keys(&of_d);
    p.allowed_keys = allowed;
    p.allowed_key_count = 2;
    open_engines(&w, ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 16}), &p, &d);
    assert_ok(kvf_agent_withdraw_key(w.p.agents[1], of_d.open));
    world_request_make(&w, &w.d, "a", 40, 0, 1, &wanted);
    world_pull(&w.d, &wanted, &w.p, &pull);
    const world_outcome *failed = world_failed(&w, w.d.agents[0], pull, KVF_E_PERMISSION);
    assert_non_null(strstr(failed->detail, "key"));
    assert_string_equal(failed->engine, "P");
    assert_int_equal(failed->rank, 1);
    assert_int_equal(world_stats(w.p.agents[1]).messages_received, 0);
    world_quiet(&w);
    world_close(&w);
}

static void a_wrong_key_of_the_server_meets_nobody(void **state) {
    (void)state;
    world w;
    uint64_t pull;
    keys of_p = make_keys(), of_d = make_keys(), of_other = make_keys();
    kvf_agent_options p = with_keys(&of_p), d = with_keys(&of_d);
    open_with(&w, &p, &d);
    w.p.contact.public_key = of_other.open;
    assert_ok(start_pull(&w, 500 * MS, &pull));
    const world_outcome *failed = world_next(&w, w.d.agents[0], pull);
    assert_int_equal(failed->kind, KVF_EVENT_FAILED);
    assert_int_not_equal(failed->detail[0], 0);
    assert_int_equal(world_stats(w.p.agents[0]).messages_received, 0);
    world_quiet(&w);
    world_close(&w);
}

static void encryption_on_one_side_only_is_an_error(void **state) {
    (void)state;
    world w;
    uint64_t pull;
    keys of_p = make_keys();
    kvf_agent_options p = with_keys(&of_p);
    open_with(&w, &p, NULL);
    assert_fails(start_pull(&w, 0, &pull), KVF_E_PERMISSION, "key"); /* D has no keys */
    w.p.contact.public_key = NULL;
    assert_ok(start_pull(&w, WORLD_PATIENCE_S * SECOND / 5, &pull)); /* and does not know that P has keys */
    /* An end that encrypts may hang up before it says so: then the reason is a guess. */
    const world_outcome *failed = world_next(&w, w.d.agents[0], pull);
    assert_int_equal(failed->kind, KVF_EVENT_FAILED);
    assert_true(failed->status == KVF_E_PERMISSION || failed->status == KVF_E_TIMEOUT);
    assert_non_null(strstr(failed->detail, "the other end encrypts"));
    assert_int_equal(world_stats(w.p.agents[0]).messages_received, 0);
    world_quiet(&w);
    world_close(&w);
}

static void beyond_loopback_needs_keys_or_a_word(void **state) {
    (void)state;
    kvf_model *model = attention(2, 4, 8);
    kvf_engine *engine = engine_of(model, ONE("P"));
    kvf_agent *agent = NULL;
    keys own = make_keys();
    const char *everywhere = "tcp://0.0.0.0:*";
    assert_fails(kvf_agent_open(engine, 0, OPTIONS(.listen = everywhere), &agent), KVF_E_PERMISSION,
                 "insecure");
    assert_null(agent);
    assert_ok(kvf_agent_open(
        engine, 0, OPTIONS(.listen = everywhere, .advertise = "tcp://10.0.0.1:5555", .insecure = true),
        &agent));
    assert_string_equal(kvf_agent_endpoint(agent), "tcp://10.0.0.1:5555");
    kvf_agent_close(agent);
    kvf_agent_options keyed = with_keys(&own);
    keyed.listen = everywhere;
    keyed.advertise = "tcp://10.0.0.1:5555";
    assert_ok(kvf_agent_open(engine, 0, &keyed, &agent));
    kvf_agent_close(agent);
    assert_ok(kvf_agent_open(engine, 0, NULL, &agent));
    assert_memory_equal(kvf_agent_endpoint(agent), "tcp://127.0.0.1:", 16);
    kvf_agent *second = NULL;
    assert_fails(kvf_agent_open(engine, 0, OPTIONS(.listen = kvf_agent_endpoint(agent)), &second),
                 KVF_E_EXISTS, "");
    kvf_agent_close(agent);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void options_that_contradict_each_other_are_refused(void **state) {
    (void)state;
    kvf_model *model = attention(2, 4, 8);
    kvf_engine *engine = engine_of(model, ONE("P"));
    kvf_agent *agent = NULL;
    keys own = make_keys();
    const char *allowed[] = {own.open};
    assert_int_not_equal(kvf_agent_open(engine, 0, OPTIONS(.public_key = own.open), &agent), KVF_OK);
    assert_int_not_equal(
        kvf_agent_open(engine, 0, OPTIONS(.public_key = "short", .secret_key = own.secret), &agent), KVF_OK);
    assert_int_not_equal(
        kvf_agent_open(engine, 0, OPTIONS(.allowed_keys = allowed, .allowed_key_count = 1), &agent), KVF_OK);
    assert_fails(kvf_agent_open(engine, 1, NULL, &agent), KVF_E_RANGE, "rank is 1");
    assert_fails(kvf_agent_open(engine, 0, OPTIONS(.lease_ns = SECOND, .heartbeat_ns = SECOND), &agent),
                 KVF_E_RANGE, "heartbeat_ns");
    assert_fails(kvf_agent_open(engine, 0, OPTIONS(.policy = (kvf_failure_policy)7), &agent), KVF_E_INVALID,
                 "policy");
    assert_null(agent);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static kvf_status allow(kvf_agent *agent, const char *public_key) {
    return kvf_agent_grant_key(
        agent, &(const kvf_key_grant){.struct_size = sizeof(kvf_key_grant), .public_key = public_key});
}

static void keys_are_allowed_and_withdrawn_while_an_agent_runs(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t theirs, ours;
    keys of_p = make_keys(), of_d = make_keys(), of_other = make_keys();
    kvf_agent_options p = with_keys(&of_p), d = with_keys(&of_d);
    const char *allowed[] = {of_other.open};
    p.allowed_keys = allowed;
    p.allowed_key_count = 1;
    open_with(&w, &p, &d);
    world_request_make(&w, &w.p, "a", 32, 0, 1, &held);
    world_request_make(&w, &w.d, "a", 32, 4, 1, &wanted);
    world_hold(&w.p, &held, &theirs);
    world_pull(&w.d, &wanted, &w.p, &ours);
    (void)world_failed(&w, w.d.agents[0], ours, KVF_E_PERMISSION);

    assert_ok(allow(w.p.agents[0], of_d.open));
    assert_int_equal(w.p.agents[0]->grant_count, 2);
    assert_ok(allow(w.p.agents[0], of_d.open));
    assert_int_equal(w.p.agents[0]->grant_count, 2); /* the same grant is kept once */
    world_pull(&w.d, &wanted, &w.p, &ours);
    (void)world_done(&w, w.d.agents[0], ours);
    (void)world_done(&w, w.p.agents[0], theirs);

    assert_ok(kvf_agent_withdraw_key(w.p.agents[0], of_d.open));
    world_close_agents(&w.d); /* D comes back */
    world_open_agents(&w.d, &d);
    world_pull(&w.d, &wanted, &w.p, &ours);
    (void)world_failed(&w, w.d.agents[0], ours, KVF_E_PERMISSION);
    assert_fails(kvf_agent_withdraw_key(w.p.agents[0], of_d.open), KVF_E_NOT_FOUND, of_d.open);
    assert_fails(allow(w.d.agents[0], of_p.open), KVF_E_INVALID, "everyone");
    assert_int_equal(w.d.agents[0]->grant_count, 0);
    assert_fails(allow(w.p.agents[0], NULL), KVF_E_INVALID, "public_key");
    world_close(&w);
}

/* A withdrawn key may be allowed again for less: its former rights do not return. */
static void a_key_that_is_withdrawn_has_nothing_left_of_what_it_was_allowed(void **state) {
    (void)state;
    world w;
    uint64_t pull;
    keys of_p = make_keys(), of_d = make_keys(), of_other = make_keys();
    kvf_agent_options p = with_keys(&of_p), d = with_keys(&of_d);
    const char *allowed[] = {of_other.open, of_d.open};
    p.allowed_keys = allowed;
    p.allowed_key_count = 2;
    open_with(&w, &p, &d);
    kvf_agent *agent = w.p.agents[0];
    kvf_key_grant grant = {.struct_size = sizeof grant, .public_key = of_d.open, .engine = "Q"};
    assert_ok(kvf_agent_withdraw_key(agent, of_d.open));
    assert_int_equal(agent->grant_count, 1);
    assert_ok(kvf_agent_grant_key(agent, &grant));
    assert_ok(start_pull(&w, WORLD_PATIENCE_S * SECOND, &pull));
    const world_outcome *failed = world_failed(&w, w.d.agents[0], pull, KVF_E_PERMISSION);
    assert_non_null(strstr(failed->detail, "does not allow this key to speak for rank 0 of D"));
    grant.engine = "D";
    assert_ok(kvf_agent_grant_key(agent, &grant));
    pull_well(&w);
    world_quiet(&w);
    world_close(&w);
}

static void a_key_that_is_withdrawn_takes_no_right_from_another(void **state) {
    (void)state;
    world w;
    keys of_p = make_keys(), of_d = make_keys(), of_other = make_keys();
    kvf_agent_options p = with_keys(&of_p), d = with_keys(&of_d);
    const char *allowed[] = {of_other.open, of_d.open};
    p.allowed_keys = allowed;
    p.allowed_key_count = 2;
    open_with(&w, &p, &d);
    /* D's key has a grant for a name of its own, beside that for any name. */
    const kvf_key_grant grant = {.struct_size = sizeof grant, .public_key = of_d.open, .engine = "Q"};
    assert_ok(kvf_agent_grant_key(w.p.agents[0], &grant));
    assert_ok(kvf_agent_withdraw_key(w.p.agents[0], of_other.open));
    assert_int_equal(w.p.agents[0]->grant_count, 2);
    pull_well(&w);
    world_quiet(&w);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(with_keys_on_the_list_a_pull_goes_well),
        cmocka_unit_test(a_producer_that_is_not_on_the_consumers_list_has_no_session_with_it),
        cmocka_unit_test(the_cache_goes_encrypted_where_the_sessions_do),
        cmocka_unit_test(the_cache_goes_by_the_interface_that_the_sessions_use),
        cmocka_unit_test(the_cache_goes_to_the_host_that_is_advertised),
        cmocka_unit_test(the_same_over_ipv6),
        cmocka_unit_test(a_key_that_is_not_on_the_list_is_refused_at_once),
        cmocka_unit_test(a_rank_that_does_not_allow_the_key_fails_a_pull_at_once),
        cmocka_unit_test(a_wrong_key_of_the_server_meets_nobody),
        cmocka_unit_test(keys_are_allowed_and_withdrawn_while_an_agent_runs),
        cmocka_unit_test(a_key_that_is_withdrawn_has_nothing_left_of_what_it_was_allowed),
        cmocka_unit_test(a_key_that_is_withdrawn_takes_no_right_from_another),
        cmocka_unit_test(encryption_on_one_side_only_is_an_error),
        cmocka_unit_test(beyond_loopback_needs_keys_or_a_word),
        cmocka_unit_test(options_that_contradict_each_other_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
