/* The options of an agent: each limit itself is allowed, and nothing beyond it. */
#include "agent_net.h"
#include "shapes.h"

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

static void durations_have_their_limits(void **state) {
    (void)state;
    scene s = set_up();
    assert_ok(try(&s, OPTIONS(.lease_ns = DAY)));
    assert_fails(try(&s, OPTIONS(.lease_ns = DAY + 1)), KVF_E_RANGE, "lease_ns is 86400000000001");
    assert_ok(try(&s, OPTIONS(.idle_ns = YEAR)));
    assert_fails(try(&s, OPTIONS(.idle_ns = YEAR + 1)), KVF_E_RANGE, "idle_ns 31536000000000001");
    assert_ok(try(&s, OPTIONS(.remember_ns = DAY)));
    assert_fails(try(&s, OPTIONS(.remember_ns = DAY + 1)), KVF_E_RANGE, "remember_ns is 86400000000001");
    assert_ok(try(&s, OPTIONS(.longest_ns = YEAR)));
    assert_fails(try(&s, OPTIONS(.longest_ns = YEAR + 1)), KVF_E_RANGE, "longest_ns is 31536000000000001");
    assert_ok(try(&s, OPTIONS(.lease_ns = SECOND, .longest_ns = SECOND)));
    assert_fails(try(&s, OPTIONS(.lease_ns = SECOND, .longest_ns = SECOND - 1)), KVF_E_RANGE,
                 "longest_ns is 999999999; allowed: from lease_ns, 1000000000");
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_are_those_of_the_engine),
        cmocka_unit_test(durations_have_their_limits),
        cmocka_unit_test(what_is_left_out_is_as_the_header_says),
        cmocka_unit_test(texts_may_be_overwritten_once_the_agent_is_open),
        cmocka_unit_test(words_are_those_that_there_are),
        cmocka_unit_test(conversion_is_of_types_and_groups_that_there_are),
        cmocka_unit_test(a_grant_is_a_range_of_ranks_of_a_named_engine),
    };
    return cmocka_run_group_tests_name("agent_options", tests, NULL, NULL);
}
