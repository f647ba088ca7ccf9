/* The options of an agent: each limit itself is allowed, and nothing beyond it. */
#include "agent_net.h"
#include "shapes.h"
#include "toy_fabric.h"

#define MS 1000000ull
#define SECOND (1000 * MS)
#define DAY (86400 * SECOND)
#define YEAR (365 * DAY)
#define OPTIONS(...) (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), __VA_ARGS__})

typedef struct scene {
    kvf_model *model;
    kvf_engine *engine;
} scene;

static scene set_up(void) {
    scene s = {.model = hybrid(2)};
    s.engine = engine_of(s.model, ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 8}));
    return s;
}

static void tear_down(scene *s) {
    kvf_engine_free(s->engine);
    kvf_model_free(s->model);
}

/* The settings that an agent must give to its transport. A value of NULL: it must leave the setting out; a key of NULL
 * ends the list. */
static const kvf_setting *told;

static kvf_status look_at_settings(kvf_transport *transport, const kvf_transport_options *options,
                                   void **endpoint) {
    (void)transport, (void)endpoint;
    for (const kvf_setting *one = told; one->key; one++) {
        const char *value = kvf_setting_of(options, one->key);
        if (!value != !one->value || (value && strcmp(value, one->value) != 0))
            fail_msg("%s is %s, not %s", one->key, value ? value : "left out", one->value ? one->value : "");
    }
    return kvf_fail(KVF_E_IO, "seen");
}

/* Opens an agent as users do, up to its transport. */
static void tells(const scene *s, const kvf_agent_options *options, const kvf_setting *settings) {
    kvf_fabric fabric = toy_fabric;
    const kvf_surroundings around = {.fabric = &fabric};
    kvf_agent *agent = NULL;
    fabric.open = look_at_settings;
    told = settings;
    assert_fails(kvf_agent_open_in(&around, s->engine, 0, options, &agent), KVF_E_IO, "seen");
}

/* Opens rank `rank` and closes it again. */
static kvf_status try_rank(const scene *s, uint32_t rank, const kvf_agent_options *options) {
    kvf_agent *agent = NULL;
    kvf_status status = kvf_agent_open_in(&net_surroundings, s->engine, rank, options, &agent);
    assert_true((status == KVF_OK) == (agent != NULL));
    kvf_agent_close(agent);
    return status;
}

static kvf_status try(const scene *s, const kvf_agent_options *options) {
    return try_rank(s, 1, options);
}

static void ranks_are_those_of_the_engine(void **state) {
    (void)state;
    scene s = set_up();
    assert_ok(try_rank(&s, 0, NULL));
    assert_ok(try_rank(&s, 1, NULL));
    assert_fails(try_rank(&s, 2, NULL), KVF_E_RANGE, "rank is 2; engine P has 2 ranks");
    assert_fails(kvf_agent_open(s.engine, 0, NULL, NULL), KVF_E_INVALID, "out is NULL");
    tear_down(&s);
}

static void engines_need_a_name_that_peers_can_read(void **state) {
    (void)state;
    static const struct {
        size_t bytes;
        char last;
        kvf_status status;
        const char *text;
    } cases[] = {{0, 'P', KVF_E_RANGE, "the engine's name has 0 bytes; allowed: 1 to 255"},
                 {1, 'P', KVF_OK, ""},
                 {255, 'P', KVF_OK, ""},
                 {256, 'P', KVF_E_RANGE, "the engine's name has 256 bytes; allowed: 1 to 255"},
                 {9, '\n', KVF_E_RANGE, "the engine's name has the control character 0x0a at byte 8"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[257] = "";
        memset(name, 'P', cases[i].bytes);
        if (cases[i].bytes > 0)
            name[cases[i].bytes - 1] = cases[i].last;
        scene s = {.model = hybrid(2)};
        s.engine = engine_of(s.model, ENGINE(.name = name, .tp_size = 2, .all = {.block_count = 8}));
        assert_int_equal(try_rank(&s, 0, NULL), cases[i].status);
        assert_true(cases[i].status == KVF_OK || strstr(kvf_error_detail(), cases[i].text));
        tear_down(&s);
    }
}

static void durations_have_their_limits(void **state) {
    (void)state;
    scene s = set_up();
    assert_ok(try(&s, OPTIONS(.lease_ns = DAY)));
    assert_fails(try(&s, OPTIONS(.lease_ns = DAY + 1)), KVF_E_RANGE, "lease_ns is 86400000000001");
    assert_ok(try(&s, OPTIONS(.idle_ns = YEAR)));
    assert_fails(try(&s, OPTIONS(.idle_ns = YEAR + 1)), KVF_E_RANGE, "idle_ns is 31536000000000001");
    assert_ok(try(&s, OPTIONS(.peer_timeout_ns = DAY)));
    assert_fails(try(&s, OPTIONS(.peer_timeout_ns = DAY + 1)), KVF_E_RANGE,
                 "peer_timeout_ns is 86400000000001");
    assert_ok(try(&s, OPTIONS(.remember_ns = DAY)));
    assert_fails(try(&s, OPTIONS(.remember_ns = DAY + 1)), KVF_E_RANGE, "remember_ns is 86400000000001");
    assert_ok(try(&s, OPTIONS(.longest_ns = YEAR)));
    assert_fails(try(&s, OPTIONS(.longest_ns = YEAR + 1)), KVF_E_RANGE, "longest_ns is 31536000000000001");
    assert_ok(try(&s, OPTIONS(.lease_ns = SECOND, .longest_ns = 2 * SECOND)));
    assert_fails(try(&s, OPTIONS(.lease_ns = SECOND, .longest_ns = 2 * SECOND - 1)), KVF_E_RANGE,
                 "longest_ns is 1999999999", "from two leases to a year (2000000000 to 31536000000000000)");
    assert_ok(try(&s, OPTIONS(.lease_ns = SECOND, .heartbeat_ns = SECOND / 2)));
    assert_fails(try(&s, OPTIONS(.lease_ns = SECOND, .heartbeat_ns = SECOND / 2 + 1)), KVF_E_RANGE,
                 "heartbeat_ns is 500000001", "500000000");
    assert_ok(try(&s, OPTIONS(.lease_ns = 12 * MS)));
    assert_fails(try(&s, OPTIONS(.lease_ns = 12 * MS - 1)), KVF_E_RANGE, "lease_ns is 11999999", "12 ms");
    tear_down(&s);
}

static void what_is_left_out_is_as_the_header_says(void **state) {
    (void)state;
    scene s = set_up();
    kvf_agent *agent = NULL;
    assert_ok(kvf_agent_open_in(&net_surroundings, s.engine, 0, NULL, &agent));
    const kvf_agent_options *o = &agent->options;
    assert_int_equal(o->lease_ns, 30 * SECOND);
    assert_int_equal(o->heartbeat_ns, 5 * SECOND + 1); /* at least 1, whatever the lease */
    assert_int_equal(o->peer_timeout_ns, 2 * SECOND);
    assert_int_equal(o->idle_ns, 600 * SECOND);
    assert_int_equal(o->longest_ns, 3600 * SECOND);
    assert_int_equal(o->max_peers, 65536);
    assert_int_equal(o->max_requests_per_peer, 16384);
    assert_int_equal(o->max_peers_per_key, 8192);
    assert_int_equal(o->max_connections, 16384);
    assert_int_equal(o->max_bytes_for_peers, 256u << 20);
    assert_int_equal(o->max_bytes_per_key, 128u << 20);
    kvf_agent_close(agent);
    tear_down(&s);
}

static void texts_may_be_overwritten_once_the_agent_is_open(void **state) {
    (void)state;
    scene s = set_up();
    kvf_agent *agent = NULL;
    char advertise[] = "tcp://10.0.0.1:5555";
    assert_ok(kvf_agent_open_in(&net_surroundings, s.engine, 0, OPTIONS(.advertise = advertise), &agent));
    memset(advertise, 'x', sizeof advertise - 1);
    assert_string_equal(kvf_agent_endpoint(agent), "tcp://10.0.0.1:5555");
    kvf_agent_close(agent);
    tear_down(&s);
}

static void words_are_those_that_there_are(void **state) {
    (void)state;
    scene s = set_up();
    assert_ok(try(&s, OPTIONS(.way = KVF_WAY_DIRECT)));
    assert_ok(try(&s, OPTIONS(.way = KVF_WAY_PACKED)));
    assert_fails(try(&s, OPTIONS(.way = (kvf_way)3)), KVF_E_INVALID, "way is 3");
    assert_ok(try(&s, OPTIONS(.policy = KVF_FAILURE_FAIL)));
    assert_fails(try(&s, OPTIONS(.policy = (kvf_failure_policy)2)), KVF_E_INVALID, "policy is 2");
    assert_fails(try(&s, OPTIONS(.setting_count = 1)), KVF_E_INVALID, "settings is NULL",
                 "setting_count is 1");
    assert_fails(try(&s, OPTIONS(.grant_count = 1)), KVF_E_INVALID, "grants is NULL, grant_count 1");
    assert_fails(try(&s, OPTIONS(.grant_count = 1, .grants = &(kvf_key_grant){0})), KVF_E_INVALID,
                 "grants is without struct_size");
    assert_fails(try(&s, OPTIONS(.allowed_key_count = 1)), KVF_E_INVALID, "allowed_keys is NULL");
    assert_fails(try(&s, OPTIONS(.transport = "pigeons")), KVF_E_NOT_FOUND, "pigeons");
    assert_ok(try(&s, OPTIONS(.advertise = "")));
    assert_fails(try(&s, OPTIONS(.advertise = "x")), KVF_E_INVALID, "advertise: endpoint \"x\"");
    assert_ok(try(&s, OPTIONS(.trace_requests = 65536)));
    assert_fails(try(&s, OPTIONS(.trace_requests = 65537)), KVF_E_RANGE, "trace_requests is 65537");
    static const char key[] = "0123456789012345678901234567890123456789";
    assert_fails(try(&s, OPTIONS(.local_commands = true, .public_key = key)), KVF_E_INVALID,
                 "local_commands is set together with keys");
    assert_fails(try(&s, OPTIONS(.local_commands = true, .secret_key = key)), KVF_E_INVALID,
                 "local_commands is set together with keys");
    tear_down(&s);
}

/* They are the stage's, which is opened when the memory is registered: too late to correct an option. */
static void options_of_the_stage_are_refused_when_the_agent_opens(void **state) {
    (void)state;
    scene s = set_up();
    assert_ok(try(&s, OPTIONS(.slot_bytes = 4096, .arena_bytes = 16384, .workers = 16)));
    assert_fails(try(&s, OPTIONS(.slot_bytes = 5000)), KVF_E_INVALID, "slot_bytes is 5000",
                 "powers of two, 4096 to 1048576");
    assert_fails(try(&s, OPTIONS(.arena_bytes = 16384)), KVF_E_INVALID, "arena_bytes is 16384",
                 "4 slots of 1048576");
    assert_fails(try(&s, OPTIONS(.device_arena_bytes = 1)), KVF_E_INVALID, "device_arena_bytes is 1;");
    assert_fails(try(&s, OPTIONS(.workers = 17)), KVF_E_INVALID, "workers is 17");
    assert_ok(try(&s, OPTIONS(.way = KVF_WAY_DIRECT, .arena_bytes = 16384))); /* it has no stage */
    tear_down(&s);
}

static void conversion_is_of_types_and_groups_that_there_are(void **state) {
    (void)state;
    const uint32_t known = KVF_DTYPE_BIT(KVF_DTYPE_F32) | KVF_DTYPE_BIT(KVF_DTYPE_BF16);
    const char *const groups[] = {"ssm", "full"}, *const other[] = {"full", "mla"}, *const none[] = {NULL};
    scene s = set_up();
    assert_ok(try(&s, OPTIONS(.convert = known)));
    assert_ok(try(&s, OPTIONS(.convert = known, .convert_groups = groups, .convert_group_count = 2)));
    assert_fails(try(&s, OPTIONS(.convert = known, .convert_groups = other, .convert_group_count = 2)),
                 KVF_E_NOT_FOUND, "no group \"mla\"");
    assert_fails(try(&s, OPTIONS(.convert = known, .convert_groups = none, .convert_group_count = 1)),
                 KVF_E_NOT_FOUND, "no group \"NULL\"");
    assert_fails(try(&s, OPTIONS(.convert = known, .convert_group_count = 1)), KVF_E_INVALID,
                 "convert_groups is NULL", "convert_group_count 1");
    assert_fails(try(&s, OPTIONS(.convert = known, .way = KVF_WAY_DIRECT)), KVF_E_INVALID, "way is direct");
    assert_fails(try(&s, OPTIONS(.convert = known | KVF_DTYPE_BIT(KVF_DTYPE_I8))), KVF_E_INVALID,
                 "convert is 0x");
    kvf_agent *agent = NULL;
    assert_ok(kvf_agent_open_in(&net_surroundings, s.engine, 0,
                                OPTIONS(.convert = known, .convert_groups = groups, .convert_group_count = 1),
                                &agent));
    assert_int_equal(agent->own_facts.convert[1], known); /* "ssm" */
    assert_int_equal(agent->own_facts.convert[0], 0);     /* "full" */
    kvf_agent_close(agent);
    tear_down(&s);
}

static void a_grant_is_a_range_of_ranks_of_a_named_engine(void **state) {
    (void)state;
    scene s = set_up();
    char open[41], secret[41], key[41], unused[41];
    assert_ok(kvf_agent_make_keys(open, secret));
    assert_ok(kvf_agent_make_keys(key, unused));
    static const struct {
        kvf_key_grant grant;
        const char *words; /* of the refusal; NULL: it is allowed */
    } cases[] = {
        {{.engine = NULL}, NULL},
        {{.engine = "X"}, NULL},
        {{.engine = "X", .rank_begin = 3, .rank_end = 4}, NULL},
        {{.engine = "X", .rank_begin = 3, .rank_end = 3}, NULL},
        {{.engine = "X", .rank_begin = 4, .rank_end = 3}, "ranks are [4, 3) of engine X"},
        {{.engine = NULL, .rank_end = 1}, "ranks are [0, 1) of engine NULL"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        kvf_key_grant grant = cases[i].grant;
        grant.struct_size = sizeof grant;
        grant.public_key = key;
        const kvf_agent_options *options =
            OPTIONS(.public_key = open, .secret_key = secret, .grants = &grant, .grant_count = 1);
        if (cases[i].words)
            assert_fails(try(&s, options), KVF_E_RANGE, "grants[0]: ", cases[i].words);
        else
            assert_ok(try(&s, options));
    }
    assert_fails(kvf_agent_make_keys(NULL, unused), KVF_E_INVALID, "public_key is NULL");
    assert_fails(kvf_agent_make_keys(unused, NULL), KVF_E_INVALID, "secret_key is NULL");
    tear_down(&s);
}

/* ---- what the transport is told --------------------------------------------------------------- */

static void the_cache_is_met_where_the_sessions_are(void **state) {
    (void)state;
    scene s = set_up();
    char open[41], secret[41];
    assert_ok(kvf_agent_make_keys(open, secret));
    static const struct {
        const char *listen, *advertise;
        bool insecure, keyed;
        const char *listens, *advertised;
    } cases[] = {
        {NULL, NULL, false, false, "tcp://127.0.0.1:*", NULL},
        {"tcp://127.0.0.2:*", NULL, false, false, "tcp://127.0.0.2:*", NULL},
        {"tcp://127.0.0.2:*", NULL, true, true, "tcp://127.0.0.2:*", NULL},
        {"tcp://0.0.0.0:*", "tcp://h:5555", true, false, "tcp://*:*", "h"},
        {"tcp://0.0.0.0:*", "tcp://host.test:5555", false, true, "tcp://*:*", "host.test"},
        {"", NULL, false, false, "tcp://127.0.0.1:*", NULL}, /* it listens nowhere */
        {"", NULL, true, false, "tcp://*:*", NULL},
        {"", "", false, true, "tcp://*:*", NULL},
        {"", "tcp://[::1]:5555", true, false, "tcp://*:*", "::1"},
        {"", "tcp://[fe80::1%eth0]:5555", true, false, "tcp://*:*", NULL},
        {"", "ipc:///run/p", true, false, "tcp://*:*", NULL},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const kvf_setting settings[] = {{"messages.listen", cases[i].listens},
                                        {"messages.advertise", cases[i].advertised},
                                        {"messages.secret_key", cases[i].keyed ? secret : NULL},
                                        {NULL, NULL}};
        tells(&s,
              OPTIONS(.listen = cases[i].listen, .advertise = cases[i].advertise,
                      .insecure = cases[i].insecure, .public_key = cases[i].keyed ? open : NULL,
                      .secret_key = cases[i].keyed ? secret : NULL),
              settings);
    }
    tear_down(&s);
}

static void the_same_over_ipv6(void **state) {
    (void)state;
    scene s = set_up();
    kvf_agent *agent = NULL;
    const bool has_ipv6 = kvf_agent_open(s.engine, 0, OPTIONS(.listen = "tcp://[::1]:*"), &agent) == KVF_OK;
    kvf_agent_close(agent);
    if (has_ipv6) {
        tells(&s, OPTIONS(.listen = "tcp://[::1]:*"),
              (const kvf_setting[]){{"messages.listen", "tcp://[::1]:*"}, {NULL, NULL}});
        tells(&s, OPTIONS(.listen = "tcp://[::]:*", .advertise = "tcp://h:5555", .insecure = true),
              (const kvf_setting[]){{"messages.listen", "tcp://*:*"}, {NULL, NULL}});
    }
    tear_down(&s);
    if (!has_ipv6)
        skip();
}

static void the_cache_has_the_limits_of_the_sessions(void **state) {
    (void)state;
    scene s = set_up();
    const kvf_setting own[] = {{"messages.max_connections", "9"}, {"messages.patience_ms", "10"}};
    tells(&s, NULL,
          (const kvf_setting[]){{"messages.patience_ms", "3600000"},
                                {"messages.max_connections_per_address", NULL},
                                {"messages.max_connections_per_second", NULL},
                                {NULL, NULL}});
    tells(&s,
          OPTIONS(.longest_ns = YEAR, .max_connections = 5, .max_connections_per_address = 4,
                  .max_connections_per_second = 3),
          (const kvf_setting[]){{"messages.patience_ms", "4294967295"}, /* the most that there is */
                                {"messages.max_connections", "5"},
                                {"messages.max_connections_per_address", "4"},
                                {"messages.max_connections_per_second", "3"},
                                {NULL, NULL}});
    tells(&s, OPTIONS(.lease_ns = 12 * MS, .longest_ns = 24 * MS),
          (const kvf_setting[]){{"messages.patience_ms", "24"}, {NULL, NULL}});
    tells(&s, OPTIONS(.max_connections = 5, .settings = own, .setting_count = 2), /* the caller's count */
          (const kvf_setting[]){{own[0].key, own[0].value}, {own[1].key, own[1].value}, {NULL, NULL}});
    tear_down(&s);
}

/* ---- memory ----------------------------------------------------------------------------------- */

/* Each allocation fails in turn. An agent may open all the same without facts that it looks up about its machine. */
static void an_agent_opens_whole_or_not_at_all(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    scene s = set_up();
    const size_t live = memory.live;
    memory.calls = 0;
    assert_ok(try(&s, NULL));
    const size_t calls = memory.calls;
    for (size_t n = 1; n <= calls; n++) {
        kvf_agent *agent = NULL;
        memory.calls = 0;
        memory.fail_at = n;
        const kvf_status status = kvf_agent_open_in(&net_surroundings, s.engine, 0, NULL, &agent);
        memory.fail_at = 0;
        assert_true(status == (agent ? KVF_OK : KVF_E_NOMEM));
        if (agent)
            assert_true(agent->name && agent->introductions && agent->facts && agent->transport);
        kvf_agent_close(agent);
        assert_int_equal(memory.live, live);
    }
    tear_down(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_are_those_of_the_engine),
        cmocka_unit_test(engines_need_a_name_that_peers_can_read),
        cmocka_unit_test(durations_have_their_limits),
        cmocka_unit_test(what_is_left_out_is_as_the_header_says),
        cmocka_unit_test(texts_may_be_overwritten_once_the_agent_is_open),
        cmocka_unit_test(words_are_those_that_there_are),
        cmocka_unit_test(options_of_the_stage_are_refused_when_the_agent_opens),
        cmocka_unit_test(conversion_is_of_types_and_groups_that_there_are),
        cmocka_unit_test(a_grant_is_a_range_of_ranks_of_a_named_engine),
        cmocka_unit_test(the_cache_is_met_where_the_sessions_are),
        cmocka_unit_test(the_same_over_ipv6),
        cmocka_unit_test(the_cache_has_the_limits_of_the_sessions),
        cmocka_unit_test_teardown(an_agent_opens_whole_or_not_at_all, stop_counting_memory),
    };
    return cmocka_run_group_tests_name("agent_options", tests, NULL, NULL);
}
