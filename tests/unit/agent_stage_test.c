/* Packed requests between agents, in virtual time. */
#include <stdio.h>
#include <string.h>

#include "agent/hold.h"
#include "agent/permit.h"
#include "agent/stage.h"
#include "agent_crowd.h"
#include "agent_letters.h"
#include "agent_packed_scene.h"
#include "agent_speaker.h"
#include "channel_wise.h"
#include "stage/flow.h"
#include "transport/front.h"

#define TP4                                                                                                  \
    ENGINE(.name = "D", .tp_size = 4, .all = {.tokens_per_block = 8, .block_count = 128, .order = "BLHNP"})

/* Packed bytes, as counted for each peer. */
static uint64_t packed_by_peers(const world_engine *e) {
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < e->rank_count; r++) {
        kvf_agent_peer peers[WORLD_MAX_RANKS] = {{.struct_size = sizeof peers[0]}};
        uint32_t count = 0;
        assert_ok(kvf_agent_peers(e->agents[r], peers, WORLD_MAX_RANKS, &count));
        for (uint32_t i = 0; i < count; i++)
            bytes += peers[i].bytes_packed;
    }
    return bytes;
}

static void a_rank_without_layers_has_no_stage(void **state) {
    (void)state;
    world w;
    const kvf_agent_options options = options_of(KVF_WAY_DIRECT);
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    kvf_agent *agent = w.p.agents[0];
    const uint32_t regions = agent->region_count;
    agent->options.way = KVF_WAY_AUTO;
    agent->region_count = 0;
    assert_ok(kvf_agent_open_stage(agent));
    assert_null(agent->stage);
    agent->region_count = regions;
    assert_ok(kvf_agent_open_stage(agent));
    assert_non_null(agent->stage);
    world_close(&w);
}

static void stages_know_each_other_only_where_something_goes_packed(void **state) {
    (void)state;
    static const kvf_way ways[] = {KVF_WAY_DIRECT, KVF_WAY_AUTO, KVF_WAY_PACKED};
    for (size_t i = 0; i < COUNT_OF(ways); i++) {
        world w;
        const kvf_agent_options options = options_of(ways[i]);
        world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
        world_pull_everything(&w, "a", 40, 1); /* alike, and within a process: packing would not pay */
        assert_int_equal(w.d.agents[0]->all_sessions->joined, ways[i] == KVF_WAY_PACKED);
        world_close(&w);
    }
}

/* D has met P, but has no connection to its memory yet, when it expects a push of cells that are alike. Packing them
 * would pay over a network, but not in memory that both map; and where several transports share the work, only the
 * connection tells whether it maps. */
static void an_expectation_brings_its_stage_unless_memory_of_this_host_can_be_mapped(void **state) {
    (void)state;
    static const struct {
        const char *transport, *endpoint_of_p;
        bool split, brings;
    } cases[] = {{"shm", NULL, false, false},
                 {"shm", NULL, true, true},
                 {"messages", NULL, false, true},
                 {"shm", "tcp://192.0.2.1:5000", false, true}, /* an address of no host */
                 {"messages", "tcp://192.0.2.1:5000", false, true}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        world w;
        world_request wanted;
        uint64_t ticket, expects[WORLD_MAX_RANKS];
        kvf_agent_options options = options_of(KVF_WAY_AUTO);
        options.transport = cases[i].transport;
        world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
        world_close_agents(&w.p);
        options.listen = cases[i].endpoint_of_p;
        world_open_agents(&w.p, &options);
        kvf_agent *d = w.d.agents[0];
        d->transport->split = cases[i].split;
        assert_ok(kvf_agent_connect(d, &w.p.contact, 0, &ticket));
        assert_int_equal(world_next(&w, d, ticket)->kind, KVF_EVENT_PEER_READY);
        world_request_make(&w, &w.d, "a", 40, 0, 1, &wanted);
        world_expect(&w.d, &wanted, &w.p, expects);
        world_until(&w, d->all_sessions->joined);
        assert_int_equal(d->all_sessions->takes_flows, cases[i].brings);
        assert_ok(kvf_agent_cancel(d, expects[0]));
        (void)world_failed(&w, d, expects[0], KVF_E_CANCELLED);
        world_quiet(&w);
        world_close(&w);
    }
}

static void a_pull_goes_packed_where_that_is_wanted(void **state) {
    (void)state;
    static const kvf_way ways[] = {KVF_WAY_PACKED, KVF_WAY_DIRECT, KVF_WAY_AUTO};
    for (size_t i = 0; i < COUNT_OF(ways); i++) {
        world w;
        const kvf_agent_options options = options_of(ways[i]);
        world_open_model(&w, attention(4, 8, 8), TP2, TP4, &options);
        world_pull_everything(&w, "a", 100, 1);
        world_pull_everything(&w, "b", 37, 2);
        uint64_t read = all_read(&w.d);
        assert_true(read > 0);
        assert_int_equal(all_packed(&w.d), ways[i] == KVF_WAY_PACKED ? read : 0);
        assert_int_equal(packed_by_peers(&w.d), all_packed(&w.d));
        world_quiet(&w);
        world_close(&w);
    }
}

static void a_push_goes_packed_where_that_is_wanted(void **state) {
    (void)state;
    static const kvf_way ways[] = {KVF_WAY_PACKED, KVF_WAY_DIRECT, KVF_WAY_AUTO};
    for (size_t i = 0; i < COUNT_OF(ways); i++) {
        world w;
        world_request given, wanted;
        uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
        const kvf_agent_options options = options_of(ways[i]);
        world_open_model(&w, hybrid(4), ONE("P"), ONE("D"), &options);
        world_request_make(&w, &w.p, "a", 100, 3, 2, &given);
        world_request_make(&w, &w.d, "a", 100, 7, 3, &wanted);
        world_fill(&w, &w.p, &given, 1);
        world_push(&w.p, &given, pushes);
        world_expect(&w.d, &wanted, &w.p, expects);
        for (uint32_t layers = 1; layers <= 2; layers++)
            assert_ok(kvf_agent_push_ready(w.p.agents[0], pushes[0], CHUNK(0, 40, layers)));
        world_run_for(&w, 10 * MS);
        world_ready(&w.p, pushes);
        world_all_done(&w, &w.d, expects);
        const world_outcome *done = world_done(&w, w.p.agents[0], pushes[0]);
        assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
        assert_true(world_wrong_cells(&w, &w.d, &wanted, 2) > 0);
        uint64_t written = world_stats(w.p.agents[0]).bytes_written;
        assert_true(written > 0);
        assert_int_equal(all_packed(&w.p), ways[i] == KVF_WAY_PACKED ? written : 0);
        assert_int_equal(packed_by_peers(&w.p), all_packed(&w.p));
        assert_int_equal(done->bytes_packed, ways[i] == KVF_WAY_PACKED ? written : 0);
        assert_int_equal(w.d.agents[0]->all_sessions->takes_flows, ways[i] == KVF_WAY_PACKED);
        world_quiet(&w);
        world_close(&w);
    }
}

/* D keeps its keys channel by channel, so that runs are elements. Packing them pays even within a process, but runs
 * are cut where a cap is reached, and slots are not. */
static void cells_in_pieces_go_packed_unless_there_is_a_cap(void **state) {
    (void)state;
    for (uint32_t capped = 0; capped < 2; capped++) {
        world w;
        world_request held, wanted;
        uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
        kvf_agent_options options = options_of(KVF_WAY_AUTO);
        options.assumed_costs = true; /* not this machine's */
        world_open_model(&w, attention(LAYERS, HEADS, CHANNELS), ONE("P"), ONE("D"), &options);
        world_close_agents(&w.d);
        kvf_engine_free(w.d.engine);
        w.d.engine = channel_wise(w.model, 1, 16, CHANNELS, "D");
        world_open_agents(&w.d, &options);
        world_request_make(&w, &w.p, "a", 500, 0, 1, &held);
        world_request_make(&w, &w.d, "a", 500, 0, 1, &wanted);
        wanted.request.bytes_per_second = capped ? 1u << 30 : 0;
        world_fill(&w, &w.p, &held, 1);
        world_hold(&w.p, &held, holds);
        world_pull(&w.d, &wanted, &w.p, pulls);
        world_all_done(&w, &w.d, pulls);
        assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
        assert_int_equal(all_packed(&w.d), capped ? 0 : all_read(&w.d));
        world_quiet(&w);
        world_close(&w);
    }
}

/* A request may have any priority; a flow has one from 0 to 255. */
static void a_flow_has_the_priority_of_its_request_as_far_as_there_are_any(void **state) {
    (void)state;
    static const struct {
        int32_t request;
        uint32_t flow;
    } cases[] = {{INT32_MIN, 0}, {-129, 0},  {-128, 0},  {-127, 1},
                 {0, 128},       {127, 255}, {128, 255}, {INT32_MAX, 255}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        world w;
        world_request held, wanted;
        uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
        const kvf_agent_options options = options_of(KVF_WAY_PACKED);
        world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
        world_request_make(&w, &w.p, "a", 200, 0, 1, &held);
        world_request_make(&w, &w.d, "a", 200, 0, 1, &wanted);
        wanted.request.priority = cases[i].request;
        wanted.request.bytes_per_second = 8192;
        world_hold(&w.p, &held, holds);
        world_pull(&w.d, &wanted, &w.p, pulls);
        world_run_for(&w, SECOND);
        for (int side = 0; side < 2; side++) {
            const kvf_stage_flow *flow = (side ? &w.p : &w.d)->agents[0]->stage->first;
            assert_non_null(flow);
            assert_int_equal(flow->priority, cases[i].flow);
        }
        world_close(&w);
    }
}

/* The consumer of a direct push adds its stage to the session for a pull. */
static void a_pull_that_goes_packed_leaves_a_push_alone_that_goes_directly(void **state) {
    (void)state;
    world w;
    world_request given, wanted, held, pulled;
    uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS], holds[WORLD_MAX_RANKS],
        pulls[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_AUTO);
    world_open_model(&w, attention(2, 2, 8), ONE("P"), ONE("D"), &options);
    world_request_make(&w, &w.p, "slow", 100, 0, 1, &given);
    world_request_make(&w, &w.d, "slow", 100, 0, 1, &wanted);
    world_request_make(&w, &w.p, "packed", 100, 20, 1, &held);
    world_request_make(&w, &w.d, "packed", 100, 20, 1, &pulled);
    given.request.way = wanted.request.way = KVF_WAY_DIRECT;
    given.request.bytes_per_second = 10000;
    pulled.request.way = KVF_WAY_PACKED;
    world_fill(&w, &w.p, &given, 1);
    world_fill(&w, &w.p, &held, 2);
    world_push(&w.p, &given, pushes);
    world_expect(&w.d, &wanted, &w.p, expects);
    world_ready(&w.p, pushes);
    world_run_for(&w, 100 * MS);
    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &pulled, &w.p, pulls);
    world_all_done(&w, &w.d, pulls);
    assert_true(all_packed(&w.d) > 0);
    assert_int_equal(world_stats(w.p.agents[0]).done[KVF_REQUEST_PUSH], 0); /* the push is still under way */
    world_all_done(&w, &w.d, expects);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
    assert_int_equal(world_wrong_cells(&w, &w.d, &pulled, 2), 0);
    world_quiet(&w);
    world_close(&w);
}

/* P pushes blocks that are all ready, from this one on, and D expects them in this way. */
static void push_one(world *w, const char *id, uint32_t first, kvf_way way, uint64_t *pushes,
                     uint64_t *expects) {
    world_request given, wanted;
    world_request_make(w, &w->p, id, 50, first, 1, &given);
    world_request_make(w, &w->d, id, 50, first, 1, &wanted);
    wanted.request.way = way;
    world_push(&w->p, &given, pushes);
    world_ready(&w->p, pushes);
    world_expect(&w->d, &wanted, &w->p, expects);
}

/* The consumer of a direct push adds its stage to the session for a packed one. P learns earlier that the push is
 * expected. */
static void a_push_that_must_go_packed_waits_for_the_stage_of_its_consumer(void **state) {
    (void)state;
    world w;
    uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_AUTO);
    world_open_model(&w, attention(2, 2, 8), ONE("P"), ONE("D"), &options);
    push_one(&w, "direct", 0, KVF_WAY_DIRECT, pushes, expects);
    world_all_done(&w, &w.d, expects);
    letters_begin();
    letters_rule(LETTERS_KEEP, w.d.agents[0], KVF_MESSAGE_CALL, KVF_CALL_JOIN);
    push_one(&w, "packed", 20, KVF_WAY_PACKED, pushes, expects);
    world_until(&w, letters_kept() > 0);
    world_run_for(&w, MS);
    assert_int_equal(world_count(&w, w.d.agents[0], KVF_EVENT_DONE), 1);
    letters_no_rules();
    letters_deliver();
    world_all_done(&w, &w.d, expects);
    assert_int_equal(2 * all_packed(&w.p), world_stats(w.p.agents[0]).bytes_written);
    letters_end();
    world_quiet(&w);
    world_close(&w);
}

/* ---- refusals ------------------------------------------------------------------------------- */

/* If one side has no stage, a request that need not go packed goes directly, and one that must is refused by name. */
static void without_a_stage_on_both_sides_all_goes_directly(void **state) {
    (void)state;
    static const kvf_way ways[][2] = {{KVF_WAY_DIRECT, KVF_WAY_AUTO},
                                      {KVF_WAY_AUTO, KVF_WAY_DIRECT},
                                      {KVF_WAY_DIRECT, KVF_WAY_PACKED},
                                      {KVF_WAY_PACKED, KVF_WAY_DIRECT}};
    for (size_t i = 0; i < COUNT_OF(ways); i++) {
        world w = {0};
        world_request held, wanted;
        uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
        const kvf_agent_options one = options_of(ways[i][0]), other = options_of(ways[i][1]);
        world_open_model(&w, attention(2, 2, 8), ONE("P"), ONE("D"), &one);
        world_close_agents(&w.d);
        world_open_agents(&w.d, &other);
        world_request_make(&w, &w.p, "a", 50, 0, 1, &held);
        world_request_make(&w, &w.d, "a", 50, 0, 1, &wanted);
        if (ways[i][1] == KVF_WAY_DIRECT && ways[i][0] == KVF_WAY_PACKED)
            wanted.request.way = KVF_WAY_PACKED; /* a request can want a way that its agent lacks */
        world_fill(&w, &w.p, &held, 1);
        world_hold(&w.p, &held, holds);
        world_pull(&w.d, &wanted, &w.p, pulls);
        if (ways[i][0] != KVF_WAY_PACKED && ways[i][1] != KVF_WAY_PACKED) {
            world_all_done(&w, &w.d, pulls);
            assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
        } else {
            const world_outcome *failed = world_failed(&w, w.d.agents[0], pulls[0], KVF_E_UNSUPPORTED);
            assert_non_null(strstr(failed->detail, ways[i][0] == KVF_WAY_DIRECT
                                                       ? "way is packed, but P rank 0 accepts no flows"
                                                       : "way is packed, but this agent has no stage"));
            assert_ok(kvf_agent_cancel(w.p.agents[0], holds[0]));
        }
        world_quiet(&w);
        world_close(&w);
    }
}

/* Whose keys are cut, so that the producer would pack. */
static void what_a_consumer_without_a_stage_expects_is_pushed_directly(void **state) {
    (void)state;
    world w;
    world_request given, wanted;
    uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
    const kvf_agent_options with = options_of(KVF_WAY_AUTO), without = options_of(KVF_WAY_DIRECT);
    world_open_model(&w, attention(LAYERS, HEADS, CHANNELS), ONE("P"), ONE("D"), &with);
    world_close_agents(&w.d);
    kvf_engine_free(w.d.engine);
    w.d.engine = channel_wise(w.model, 1, 8, CHANNELS, "D");
    world_open_agents(&w.d, &without);
    world_request_make(&w, &w.p, "a", 50, 0, 1, &given);
    world_request_make(&w, &w.d, "a", 50, 0, 1, &wanted);
    world_fill(&w, &w.p, &given, 1);
    world_push(&w.p, &given, pushes);
    world_expect(&w.d, &wanted, &w.p, expects);
    world_ready(&w.p, pushes);
    world_all_done(&w, &w.d, expects);
    world_all_done(&w, &w.p, pushes);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
    assert_int_equal(all_packed(&w.p), 0);
    world_quiet(&w);
    world_close(&w);
}

/* Registering fails, and says why; an agent that needs no arena can register the same memory. */
static void an_arena_that_cannot_be_had_is_refused_by_name(void **state) {
    (void)state;
    kvf_model *model = attention(2, 2, 8);
    kvf_engine *engine = engine_of(model, ONE("P"));
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(engine, 0));
    for (int fits = 0; fits < 2; fits++) {
        kvf_agent_options options = options_of(KVF_WAY_PACKED);
        kvf_agent *agent = NULL;
        kvf_memory memory[8];
        assert_true(shard->region_count <= COUNT_OF(memory));
        if (!fits) { /* slots enough for a stage, and more bytes than a process has addresses */
            options.slot_bytes = 1u << 20;
            options.arena_bytes = UINT64_C(1) << 50;
        }
        assert_ok(kvf_agent_open(engine, 0, &options, &agent));
        for (uint32_t i = 0; i < shard->region_count; i++) {
            memory[i] = (kvf_memory){.struct_size = sizeof *memory, .bytes = shard->region_bytes[i]};
            assert_ok(kvf_agent_allocate(agent, KVF_MEMORY_HOST, 0, memory[i].bytes, &memory[i].address));
        }
        kvf_status status = kvf_agent_register(agent, memory, shard->region_count);
        assert_int_equal(status == KVF_OK, fits);
        if (!fits)
            assert_int_equal(strncmp(kvf_error_detail(), "the stage: ", strlen("the stage: ")), 0);
        kvf_agent_close(agent);
    }
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* ---- how long blocks are in doubt ------------------------------------------------------------ */

typedef struct stopped_scene {
    world w;
    world_request given, wanted;
    uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
    kvf_agent *writer;
} stopped_scene;

/* Stops a writer in the middle of a push, `turns` turns after its first chunk has arrived. */
static void stop_a_writer(stopped_scene *s, kvf_way way, int turns) {
    const kvf_agent_options options = options_of(way);
    memset(s, 0, sizeof *s);
    world_open_model(&s->w, attention(4, 8, 8), ONE("P"), ONE("D"), &options);
    world_request_make(&s->w, &s->w.p, "a", 512, 0, 1, &s->given);
    world_request_make(&s->w, &s->w.d, "a", 512, 8, 1, &s->wanted);
    world_fill(&s->w, &s->w.p, &s->given, 1);
    world_push(&s->w.p, &s->given, s->pushes);
    world_expect(&s->w.d, &s->wanted, &s->w.p, s->expects);
    assert_ok(kvf_agent_push_ready(s->w.p.agents[0], s->pushes[0], CHUNK(0, 16, 4)));
    world_run_for(&s->w, 10 * MS);
    assert_ok(kvf_agent_push_ready(s->w.p.agents[0], s->pushes[0], NULL));
    for (int i = 0; i < 2 * turns; i++)
        assert_ok(kvf_agent_progress(i % 2 ? s->w.d.agents[0] : s->w.p.agents[0], NULL));
    s->writer = s->w.p.agents[0];
    s->w.p.agents[0] = NULL;
}

static void wake_the_writer(stopped_scene *s) {
    s->w.p.agents[0] = s->writer;
    (void)world_next(&s->w, s->writer, s->pushes[0]);
}

static void blocks_that_are_written_packed_are_free_at_once(void **state) {
    (void)state;
    stopped_scene s;
    stop_a_writer(&s, KVF_WAY_PACKED, 2); /* its flow is open, and has slots */
    letters_begin();
    letters_rule(LETTERS_LOSE, s.w.d.agents[0], KVF_MESSAGE_CALL, KVF_CALL_WITHDRAW);
    assert_ok(kvf_agent_cancel(s.w.d.agents[0], s.expects[0]));
    assert_true(world_failed(&s.w, s.w.d.agents[0], s.expects[0], KVF_E_CANCELLED)->blocks_free);
    assert_int_equal(world_block(s.w.d.agents[0], 0, 8), KVF_BLOCK_FREE);
    world_fill(&s.w, &s.w.d, &s.wanted, 7); /* as another request would */
    wake_the_writer(&s);
    world_run_for(&s.w, 100 * MS);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 7), 0);
    letters_end();
    world_pull_everything(&s.w, "next", 100, 3); /* the slots can be used again */
    world_quiet(&s.w);
    world_close(&s.w);
}

/* Until it goes on, or its lease ends: the agent took a whole processor meanwhile. */
static void an_agent_sleeps_while_a_peer_takes_no_messages(void **state) {
    (void)state;
    static const unsigned char note[KVF_NOTICE_MAX];
    stopped_scene s;
    stop_a_writer(&s, KVF_WAY_PACKED, 2); /* its flow is open */
    kvf_agent *agent = s.w.d.agents[0];
    char name[KVF_ENDPOINT_NAME_BYTES];
    kvf_endpoint_name(name, "P", 0, s.writer->incarnation);
    kvf_peer *peer = kvf_stage_peer_named(agent->stage, name);
    assert_non_null(peer);
    for (size_t bytes = sizeof note; bytes > 0; bytes /= 2)
        while (kvf_transport_notify(peer, note, bytes) == KVF_OK) {
        }
    assert_ok(kvf_agent_cancel(agent, s.expects[0])); /* the END of its flow is due */
    bool busy = true;
    for (int i = 0; i < 50 && busy; i++)
        assert_ok(kvf_agent_progress(agent, &busy));
    assert_false(busy);
    assert_true(world_failed(&s.w, agent, s.expects[0], KVF_E_CANCELLED)->blocks_free);
    wake_the_writer(&s);
    world_pull_everything(&s.w, "next", 100, 3);
    world_quiet(&s.w);
    world_close(&s.w);
}

/* The control: packed blocks are free at once. */
static void blocks_that_are_written_directly_are_in_doubt(void **state) {
    (void)state;
    stopped_scene s;
    stop_a_writer(&s, KVF_WAY_DIRECT, 0);
    assert_ok(kvf_agent_cancel(s.w.d.agents[0], s.expects[0]));
    assert_false(world_failed(&s.w, s.w.d.agents[0], s.expects[0], KVF_E_CANCELLED)->blocks_free);
    assert_int_equal(world_block(s.w.d.agents[0], 0, 8), KVF_BLOCK_IN_DOUBT);
    wake_the_writer(&s);
    world_quiet(&s.w);
    world_close(&s.w);
}

/* The flow was still permitted when the writer opened it. */
static void a_flow_that_crosses_the_end_of_its_permission_is_nobodys_fault(void **state) {
    (void)state;
    stopped_scene s;
    stop_a_writer(&s, KVF_WAY_PACKED, 0);
    assert_ok(kvf_agent_progress(s.writer, NULL)); /* it opens the flow */
    assert_ok(kvf_agent_cancel(s.w.d.agents[0], s.expects[0]));
    (void)world_failed(&s.w, s.w.d.agents[0], s.expects[0], KVF_E_CANCELLED);
    wake_the_writer(&s);
    world_run_for(&s.w, 100 * MS);
    assert_true(world_stats(s.w.d.agents[0]).flows_refused > 0);
    assert_int_equal(world_count(&s.w, s.w.d.agents[0], KVF_EVENT_PEER_REFUSED), 0);
    world_quiet(&s.w);
    world_close(&s.w);
}

/* The consumer's WITHDRAW comes in time, or never; then the writer learns of it when its flow is refused or ended, or,
 * directly, when it says that it has written everything. */
static void a_push_whose_consumer_gives_up_ends_alike_by_any_way(void **state) {
    (void)state;
    const struct {
        kvf_way way;
        int turns;
        bool opens; /* its flow is opened, and not yet refused */
    } cases[] = {{KVF_WAY_PACKED, 0, true}, {KVF_WAY_PACKED, 2, false}, {KVF_WAY_DIRECT, 0, false}};
    for (size_t i = 0; i < 2 * COUNT_OF(cases); i++) {
        stopped_scene s;
        stop_a_writer(&s, cases[i / 2].way, cases[i / 2].turns);
        kvf_agent *d = s.w.d.agents[0];
        if (cases[i / 2].opens)
            assert_ok(kvf_agent_progress(s.writer, NULL));
        letters_begin();
        if (i % 2)
            letters_rule(LETTERS_LOSE, d, KVF_MESSAGE_CALL, KVF_CALL_WITHDRAW);
        assert_ok(kvf_agent_cancel(d, s.expects[0]));
        (void)world_failed(&s.w, d, s.expects[0], KVF_E_CANCELLED);
        s.w.p.agents[0] = s.writer;
        const world_outcome *failed = world_failed(&s.w, s.writer, s.pushes[0], KVF_E_CANCELLED);
        assert_string_equal(failed->detail, "D rank 0 gave the request up");
        assert_true(failed->blocks_free);
        assert_int_equal(world_count(&s.w, d, KVF_EVENT_PEER_REFUSED), 0);
        letters_end();
        world_quiet(&s.w);
        world_close(&s.w);
    }
}

/* Over a fabric that copies for its peers, memory that is withheld cannot be reached; the arena must be. */
static void the_arena_of_a_stage_is_not_withheld(void **state) {
    (void)state;
    world w;
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    assert_non_null(w.p.agents[0]->stage);
    assert_false(kvf_transport_withholds_emulated(w.p.agents[0]->transport));
    world_close(&w);
}

/* P's stage gets a message that ends after its magic number, and is told that it is from this rank. */
static void send_nonsense(world *w, const char *engine, const kvf_agent *from) {
    static const char beginning[] = "kvfs";
    char name[KVF_ENDPOINT_NAME_BYTES];
    kvf_endpoint_name(name, engine, 0, from->incarnation);
    kvf_agent_notified(w->p.agents[0], NULL, name, beginning, sizeof beginning);
    world_run_for(w, 10 * MS);
}

static void an_engine_whose_stage_sends_nonsense_is_told_of(void **state) {
    (void)state;
    world w;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    world_add(&w, ONE("E"), &options);
    world_engine *engines[] = {&w.d, &w.e};
    const char *const names[] = {"D", "E"};
    for (uint32_t i = 0; i < 2; i++) {
        pull_one(&w, engines[i], names[i], holds, pulls);
        world_all_done(&w, engines[i], pulls);
        world_all_done(&w, &w.p, holds);
    }
    for (uint32_t i = 0; i < 2; i++) {
        send_nonsense(&w, names[i], engines[i]->agents[0]);
        assert_int_equal(world_stats(w.p.agents[0]).flows_refused, i + 1);
        assert_int_equal(world_count(&w, w.p.agents[0], KVF_EVENT_PEER_REFUSED), i + 1);
        assert_string_equal(w.outcomes[w.outcome_count - 1].engine, names[i]);
    }
    world_quiet(&w);
    world_close(&w);
}

/* The processor time in which P hears a bad message of a flow, while so many clients have sessions. */
static uint64_t time_of_nonsense(uint32_t clients) {
    enum { TIMES = 200 };
    world w;
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    kvf_agent *p = w.p.agents[0];
    for (uint32_t i = 0; i < clients; i++)
        crowd_greets(p, i);
    assert_int_equal(world_stats(p).peers_now, clients);
    const kvf_stage_options *given = &p->stage->options;
    const uint64_t begun = crowd_time();
    for (uint32_t i = 0; i < TIMES; i++)
        given->on_event(given->context, "nobody#0@0000000000000001", KVF_E_PARSE, "not a message");
    const uint64_t spent = crowd_time() - begun;
    world_close(&w);
    return spent / TIMES;
}

static void a_bad_message_takes_no_longer_to_hear_where_there_are_many_sessions(void **state) {
    (void)state;
    crowd_compare(time_of_nonsense, 100, 4000, 3, 5000); /* all sessions were visited each time */
}

/* Data may be under way when a permission or a session ends, and we may lack memory. */
static void an_engine_is_told_of_refused_flows_for_which_only_the_peer_can_be_to_blame(void **state) {
    (void)state;
    static const struct {
        kvf_status status;
        const char *text;
        bool told;
    } cases[] = {{KVF_E_PERMISSION, "not permitted", false}, {KVF_E_NOT_FOUND, "not found", false},
                 {KVF_E_TIMEOUT, "too late", false},         {KVF_E_NOMEM, "no memory", false},
                 {KVF_E_PARSE, "not a message", true},       {KVF_E_RANGE, "too many bytes", true}};
    char name[KVF_ENDPOINT_NAME_BYTES];
    world w;
    uint32_t told = 0;
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    world_pull_everything(&w, "a", 50, 1);
    kvf_agent *p = w.p.agents[0];
    const kvf_stage_options *given = &p->stage->options;
    kvf_endpoint_name(name, "D", 0, w.d.agents[0]->incarnation);
    for (uint32_t i = 0; i < COUNT_OF(cases); i++) {
        given->on_event(given->context, name, cases[i].status, cases[i].text);
        given->on_event(given->context, "nobody", cases[i].status, "from nobody");
        told += cases[i].told;
        world_run_for(&w, 10 * MS);
        assert_int_equal(world_stats(p).flows_refused, 2 * (i + 1));
        assert_int_equal(world_count(&w, p, KVF_EVENT_PEER_REFUSED), told);
    }
    world_quiet(&w);
    world_close(&w);
}

/* ---- permissions ----------------------------------------------------------------------------- */

static kvf_status asks(kvf_agent *agent, const kvf_agent *from, const char *engine,
                       const kvf_flow_request *by) {
    char name[KVF_ENDPOINT_NAME_BYTES];
    kvf_endpoint_name(name, engine, from->rank, from->incarnation);
    assert_ok(kvf_agent_lock(agent));
    kvf_work_take(agent);
    const kvf_status status = kvf_permit_flow(agent, name, by);
    kvf_work_give(agent);
    kvf_agent_unlock(agent);
    return status;
}

/* Tries a flow as it is permitted, and then with one thing changed. */
static void try_all(kvf_agent *agent, const kvf_agent *from, const char *engine, kvf_direction direction,
                    uint64_t permission, const world_request *blocks) {
    kvf_group_steps steps = blocks->groups[0];
    uint32_t ids[512];
    memcpy(ids, steps.table.ids, steps.table.count * sizeof *ids);
    steps.table.ids = ids;
    kvf_flow_request by = {sizeof by, direction, permission, 0, &steps, 1};
    assert_ok(asks(agent, from, engine, &by));
    steps.begin = 20; /* fewer steps */
    steps.end = 40;
    assert_ok(asks(agent, from, engine, &by));
    ids[2]++;
    assert_fails(asks(agent, from, engine, &by), KVF_E_PERMISSION,
                 "number 2 of the sequence, does not belong to the request");
    ids[2]--;
    ids[0]++; /* not needed for these steps */
    assert_ok(asks(agent, from, engine, &by));
    steps.begin = 0;
    assert_fails(asks(agent, from, engine, &by), KVF_E_PERMISSION,
                 "number 0 of the sequence, does not belong to the request");
    ids[0] = 1u << 30;
    assert_fails(asks(agent, from, engine, &by), KVF_E_RANGE, "block 1073741824, but the cache has 64");
    ids[0] = blocks->groups[0].table.ids[0];
    steps.end = 64;
    assert_fails(asks(agent, from, engine, &by), KVF_E_PERMISSION, "steps [0, 64) are not in [0, 50)");
    steps.end = UINT64_MAX;
    assert_true(asks(agent, from, engine, &by) != KVF_OK);
    steps = (kvf_group_steps){blocks->groups[0].table, 0, 50};
    by.permission++;
    assert_true(asks(agent, from, engine, &by) == KVF_E_PERMISSION);
    by.permission = 0;
    assert_true(asks(agent, from, engine, &by) == KVF_E_PERMISSION);
    by.permission = permission;
    assert_true(asks(agent, from, "E", &by) == KVF_E_PERMISSION);     /* another engine's lease */
    assert_true(asks(agent, agent, engine, &by) == KVF_E_PERMISSION); /* or that of an earlier process */
    by.direction = direction == KVF_READ ? KVF_WRITE : KVF_READ;
    assert_true(asks(agent, from, engine, &by) == KVF_E_PERMISSION);
    by.direction = direction;
    by.group_count = 0;
    assert_fails(asks(agent, from, engine, &by), KVF_E_INVALID, "group_count is 0; the model has 1");
    by.group_count = 1;
    steps.table.count--; /* the table is too short */
    assert_true(asks(agent, from, engine, &by) == KVF_E_RANGE);
    steps.table.count++;
    assert_ok(asks(agent, from, engine, &by));
}

static void a_flow_may_read_what_its_lease_is_on(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, attention(2, 2, 8), ONE("P"), ONE("D"), &options);
    world_request_make(&w, &w.p, "a", 50, 3, 2, &held);
    world_request_make(&w, &w.d, "a", 50, 8, 1, &wanted);
    wanted.request.groups = NULL;
    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &wanted, &w.p, pulls);
    world_until(&w, world_block(w.p.agents[0], 0, 3) == KVF_BLOCK_LEASED);
    uint64_t lease = w.p.agents[0]->leases->generation;
    try_all(w.p.agents[0], w.d.agents[0], "D", KVF_READ, lease, &held);
    assert_ok(kvf_agent_cancel(w.d.agents[0], pulls[0]));
    (void)world_failed(&w, w.d.agents[0], pulls[0], KVF_E_CANCELLED);
    world_until(&w, world_block(w.p.agents[0], 0, 3) != KVF_BLOCK_LEASED);
    const kvf_flow_request by = {sizeof by, KVF_READ, lease, 0, held.groups, 1};
    assert_true(asks(w.p.agents[0], w.d.agents[0], "D", &by) == KVF_E_PERMISSION);
    (void)kvf_agent_cancel(w.p.agents[0], holds[0]);
    world_quiet(&w);
    world_close(&w);
}

static void a_flow_may_write_what_is_expected_of_it(void **state) {
    (void)state;
    world w;
    world_request wanted;
    uint64_t expects[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, attention(2, 2, 8), ONE("P"), ONE("D"), &options);
    world_request_make(&w, &w.d, "a", 50, 8, 1, &wanted);
    world_expect(&w.d, &wanted, &w.p, expects);
    world_run_for(&w, 50 * MS);
    uint64_t generation = expects[0] | KVF_EXPECTATION;
    try_all(w.d.agents[0], w.p.agents[0], "P", KVF_WRITE, generation, &wanted);
    assert_ok(kvf_agent_cancel(w.d.agents[0], expects[0]));
    const kvf_flow_request by = {sizeof by, KVF_WRITE, generation, 0, wanted.groups, 1};
    (void)world_failed(&w, w.d.agents[0], expects[0], KVF_E_CANCELLED);
    assert_fails(asks(w.d.agents[0], w.p.agents[0], "P", &by), KVF_E_CANCELLED, "has ended");
    world_quiet(&w);
    world_close(&w);
}

/* The first group's table begins with the second block of the sequence. */
static void a_flow_is_checked_in_every_group_and_until_its_lease_ends(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, hybrid(2),
                     ENGINE(.name = "P", .all = {.block_count = 64}, .state = {.block_count = 64}),
                     ENGINE(.name = "D", .all = {.block_count = 64}, .state = {.block_count = 64}), &options);
    world_request_make(&w, &w.p, "a", 50, 3, 2, &held);
    world_request_make(&w, &w.d, "a", 50, 8, 1, &wanted);
    held.groups[0].begin = wanted.groups[0].begin = 16;
    held.groups[0].table.first_block++;
    held.groups[0].table.ids++;
    held.groups[0].table.count--;
    wanted.request.groups = NULL;
    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &wanted, &w.p, pulls);
    kvf_agent *p = w.p.agents[0], *d = w.d.agents[0];
    world_until(&w, p->leases);
    kvf_group_steps steps[2] = {held.groups[0], held.groups[1]};
    kvf_flow_request by = {sizeof by, KVF_READ, p->leases->generation, 0, steps, 2};
    assert_ok(asks(p, d, "D", &by));
    steps[0].table.ids = (const uint32_t[]){4, 7, 9};
    assert_fails(asks(p, d, "D", &by), KVF_E_PERMISSION, "group full: block 4, number 1 of the sequence");
    steps[0].begin = steps[0].end = 64; /* nothing of it */
    assert_ok(asks(p, d, "D", &by));
    steps[1].table.ids = (const uint32_t[]){4, 4, 4, 4};
    assert_fails(asks(p, d, "D", &by), KVF_E_PERMISSION, "group ssm: block 4");
    steps[1] = held.groups[1];
    p->leases->until = world_now() + 1;
    assert_ok(asks(p, d, "D", &by));
    p->leases->until = world_now();
    assert_fails(asks(p, d, "D", &by), KVF_E_PERMISSION, "it has no lease number");
    assert_ok(kvf_agent_cancel(d, pulls[0]));
    (void)kvf_agent_cancel(p, holds[0]);
    world_close(&w);
}

static void every_rank_that_was_asked_may_write(void **state) {
    (void)state;
    world w;
    world_request wanted;
    uint64_t expects[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, attention(2, 2, 8), ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64}),
                     ONE("D"), &options);
    world_request_make(&w, &w.d, "a", 50, 8, 1, &wanted);
    world_expect(&w.d, &wanted, &w.p, expects);
    world_run_for(&w, 50 * MS);
    const kvf_flow_request by = {sizeof by, KVF_WRITE, expects[0] | KVF_EXPECTATION, 0, wanted.groups, 1};
    for (uint32_t r = 0; r < 2; r++)
        assert_ok(asks(w.d.agents[0], w.p.agents[r], "P", &by));
    assert_ok(kvf_agent_cancel(w.d.agents[0], expects[0]));
    (void)world_failed(&w, w.d.agents[0], expects[0], KVF_E_CANCELLED);
    world_quiet(&w);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_without_layers_has_no_stage),
        cmocka_unit_test(stages_know_each_other_only_where_something_goes_packed),
        cmocka_unit_test(an_expectation_brings_its_stage_unless_memory_of_this_host_can_be_mapped),
        cmocka_unit_test(a_pull_goes_packed_where_that_is_wanted),
        cmocka_unit_test(a_push_goes_packed_where_that_is_wanted),
        cmocka_unit_test(cells_in_pieces_go_packed_unless_there_is_a_cap),
        cmocka_unit_test(a_flow_has_the_priority_of_its_request_as_far_as_there_are_any),
        cmocka_unit_test(a_pull_that_goes_packed_leaves_a_push_alone_that_goes_directly),
        cmocka_unit_test(a_push_that_must_go_packed_waits_for_the_stage_of_its_consumer),
        cmocka_unit_test(without_a_stage_on_both_sides_all_goes_directly),
        cmocka_unit_test(what_a_consumer_without_a_stage_expects_is_pushed_directly),
        cmocka_unit_test(an_arena_that_cannot_be_had_is_refused_by_name),
        cmocka_unit_test(blocks_that_are_written_packed_are_free_at_once),
        cmocka_unit_test(an_agent_sleeps_while_a_peer_takes_no_messages),
        cmocka_unit_test(blocks_that_are_written_directly_are_in_doubt),
        cmocka_unit_test(a_flow_that_crosses_the_end_of_its_permission_is_nobodys_fault),
        cmocka_unit_test(a_push_whose_consumer_gives_up_ends_alike_by_any_way),
        cmocka_unit_test(the_arena_of_a_stage_is_not_withheld),
        cmocka_unit_test(an_engine_whose_stage_sends_nonsense_is_told_of),
        cmocka_unit_test(a_bad_message_takes_no_longer_to_hear_where_there_are_many_sessions),
        cmocka_unit_test(an_engine_is_told_of_refused_flows_for_which_only_the_peer_can_be_to_blame),
        cmocka_unit_test(a_flow_may_read_what_its_lease_is_on),
        cmocka_unit_test(a_flow_may_write_what_is_expected_of_it),
        cmocka_unit_test(a_flow_is_checked_in_every_group_and_until_its_lease_ends),
        cmocka_unit_test(every_rank_that_was_asked_may_write),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
