/* What users see of peers: the list, and log lines about peers that came, their ways, and peers that came back. */
#include <stdio.h>
#include <stdlib.h>

#include "agent/agent.h"
#include "agent/hear.h"
#include "agent/peers.h"
#include "agent/session.h"
#include "agent_net.h"
#include "agent_scene.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define TWO(engine_name) ENGINE(.name = (engine_name), .tp_size = 2, .all = {.block_count = 64})
#define MOST 8u

typedef struct book {
    char text[32768];
    size_t length;
    uint64_t first_ns, last_ns;
} book;

static void write_down(void *context, const kvf_log_line *line) {
    book *to = context;
    to->first_ns = to->first_ns ? to->first_ns : line->time_ns;
    to->last_ns = line->time_ns;
    to->length += (size_t)snprintf(to->text + to->length, sizeof to->text - to->length, "%d %s\n",
                                   (int)line->level, line->text);
    assert_true(to->length < sizeof to->text);
}

#define WRITTEN_DOWN(book, ...)                                                                              \
    (&(const kvf_agent_options){                                                                             \
        .struct_size = sizeof(kvf_agent_options), .log = write_down, .log_context = (book), __VA_ARGS__})

static void has(const char *text, const char *words) {
    if (!strstr(text, words))
        fail_msg("no \"%s\" in:\n%s", words, text);
}

static void has_once(const char *text, const char *words) {
    has(text, words);
    assert_null(strstr(strstr(text, words) + 1, words));
}

static void *brought[2][WORLD_MAX_REGIONS]; /* by engine: memory that the transport did not allocate */

static void open_it(scene *s, const kvf_engine_spec *p, const kvf_engine_spec *d,
                    const kvf_agent_options *options) {
    scene_open(s, attention(2, 4, 8), p, d, options);
}

static uint32_t peers_of(kvf_agent *agent, kvf_agent_peer *peers) {
    uint32_t count = 0;
    peers[0].struct_size = sizeof *peers;
    assert_ok(kvf_agent_peers(agent, peers, MOST, &count));
    return count;
}

/* ---- the list -------------------------------------------------------------------------------- */

static void an_agent_that_met_nobody_has_no_peers(void **state) {
    (void)state;
    scene s;
    kvf_agent_peer peers[MOST];
    open_it(&s, ONE("P"), ONE("D"), NULL);
    assert_int_equal(peers_of(s.d, peers), 0);
    scene_close(&s);
}

static void a_round_trip_is_known_from_the_welcome_on(void **state) {
    (void)state;
    scene s;
    kvf_agent_peer peers[MOST];
    open_it(&s, ONE("P"), ONE("D"), NULL);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, peers_of(s.d, peers) == 1);
    assert_int_equal(peers[0].state, KVF_PEER_GREETING);
    assert_int_equal(peers[0].round_trip_ns, 0);
    world_until(&s.w, peers_of(s.d, peers) == 1 && peers[0].state == KVF_PEER_OPEN);
    assert_true(peers[0].round_trip_ns >= 2 * NET_LATENCY_NS);
    assert_int_equal(peers[0].round_trip_ns, 2 * s.d->all_sessions->clock_error); /* which is half of it */
    world_hold(&s.w.p, &s.held, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

static void a_reader_and_its_producer_see_each_other(void **state) {
    (void)state;
    scene s;
    kvf_agent_peer peers[MOST];
    const kvf_agent_options *options =
        &(const kvf_agent_options){.struct_size = sizeof *options, .transport = "shm"};
    open_it(&s, TWO("P"), ONE("D"), options);
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    assert_int_equal(peers_of(s.d, peers), 2);
    uint64_t read = 0;
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(peers[r].struct_size, sizeof *peers);
        assert_int_equal(peers[r].role, KVF_PEER_PRODUCER);
        assert_int_equal(peers[r].state, KVF_PEER_OPEN);
        assert_int_equal(peers[r].rank, r);
        assert_int_equal(peers[r].rank_count, 2);
        assert_string_equal(peers[r].engine, "P");
        assert_string_equal(peers[r].fabric, "shm");
        assert_string_equal(peers[r].way, "mapped memory");
        assert_string_equal(peers[r].passed_over, "");
        assert_string_equal(peers[r].failure, "");
        assert_true(peers[r].since_ns > UINT64_C(1600000000) * SECOND);
        assert_true(peers[r].round_trip_ns > 0);
        assert_int_equal(peers[r].bytes_written, 0);
        read += peers[r].bytes_read;
    }
    assert_int_equal(read, 50 * 2 * 2 * 4 * 8 * 2); /* tokens, layers, K and V, heads, elements, bytes */
    assert_int_equal(read, world_stats(s.d).bytes_read);
    assert_int_equal(peers_of(s.p, peers), 1);
    assert_int_equal(peers[0].role, KVF_PEER_CONSUMER);
    assert_string_equal(peers[0].engine, "D");
    assert_string_equal(peers[0].fabric, ""); /* D does the reading */
    scene_close(&s);
}

static void a_writer_and_its_consumer_count_the_same_bytes(void **state) {
    (void)state;
    scene s;
    kvf_agent_peer peers[MOST];
    open_it(&s, ONE("P"), ONE("D"), NULL);
    world_push(&s.w.p, &s.held, s.theirs);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_ready(&s.w.p, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    assert_int_equal(peers_of(s.p, peers), 1);
    assert_int_equal(peers[0].bytes_written, 50 * 2 * 2 * 4 * 8 * 2);
    assert_string_equal(peers[0].fabric, "inproc");
    assert_int_equal(peers_of(s.d, peers), 1);
    assert_int_equal(peers[0].bytes_received, 50 * 2 * 2 * 4 * 8 * 2);
    assert_int_equal(peers[0].bytes_read, 0);
    scene_close(&s);
}

static void a_list_may_be_too_short_and_its_elements_of_another_version(void **state) {
    (void)state;
    scene s;
    uint32_t count = 0;
    open_it(&s, TWO("P"), ONE("D"), NULL);
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    assert_ok(kvf_agent_peers(s.d, NULL, 0, &count));
    assert_int_equal(count, 2);
    struct older {
        size_t struct_size;
        kvf_peer_role role;
        kvf_peer_state state;
        uint32_t rank, rank_count;
    } older[2] = {{.struct_size = sizeof *older}, {.rank_count = 77}};
    assert_ok(kvf_agent_peers(s.d, (kvf_agent_peer *)(void *)older, 1, &count));
    assert_int_equal(count, 2);
    assert_int_equal(older[0].rank_count, 2);
    assert_int_equal(older[1].rank_count, 77);
    assert_ok(kvf_agent_peers(s.d, (kvf_agent_peer *)(void *)older, 2, &count));
    assert_int_equal(older[1].rank, 1);
    struct newer {
        kvf_agent_peer known;
        uint64_t more;
    } newer[2] = {{.known.struct_size = sizeof *newer, .more = 77}, {.more = 77}};
    assert_ok(kvf_agent_peers(s.d, (kvf_agent_peer *)(void *)newer, 2, &count));
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(newer[i].known.rank, i);
        assert_int_equal(newer[i].more, 0); /* the library has no such field */
    }
    older[0].struct_size = 0;
    assert_fails(kvf_agent_peers(s.d, (kvf_agent_peer *)(void *)older, 2, &count), KVF_E_INVALID,
                 "struct_size");
    assert_fails(kvf_agent_peers(s.d, (kvf_agent_peer *)(void *)older, 1, &count), KVF_E_INVALID,
                 "struct_size");
    size_t oldest = sizeof oldest; /* nothing but its size */
    assert_ok(kvf_agent_peers(s.d, (kvf_agent_peer *)(void *)&oldest, 1, &count));
    assert_int_equal(oldest, sizeof oldest);
    assert_fails(kvf_agent_peers(s.d, NULL, 1, &count), KVF_E_INVALID, "kvf_agent_peer is NULL");
    assert_fails(kvf_agent_peers(s.d, NULL, 0, NULL), KVF_E_INVALID, "count");
    assert_fails(kvf_agent_peers(NULL, NULL, 0, &count), KVF_E_INVALID, "agent");
    scene_close(&s);
}

static void a_failure_is_kept_with_its_peer(void **state) {
    (void)state;
    scene s;
    kvf_agent_peer peers[MOST];
    open_it(&s, ONE("P"), ONE("D"), NULL);
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.groups[0].end = 64; /* more tokens than the producer has */
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_RANGE);
    assert_int_equal(peers_of(s.d, peers), 1);
    has(peers[0].failure, "steps [0, 64) are wanted, but the producer holds [0, 50)");
    assert_true(peers[0].failed_ns >= peers[0].since_ns);
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    scene_close(&s);
}

static void a_failure_is_that_of_one_rank(void **state) {
    (void)state;
    scene s;
    kvf_agent_peer peers[MOST];
    open_it(&s, TWO("P"), ONE("D"), NULL);
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    kvf_peers_failed(s.d, "Q", 0, "of another engine");
    kvf_peers_failed(s.d, "P", 1, "of rank 1");
    assert_int_equal(peers_of(s.d, peers), 2);
    for (uint32_t i = 0; i < 2; i++)
        assert_string_equal(peers[i].failure, peers[i].rank == 1 ? "of rank 1" : "");
    kvf_peers_failed(s.d, "P", KVF_NO_RANK, "of all");
    assert_int_equal(peers_of(s.d, peers), 2);
    for (uint32_t i = 0; i < 2; i++)
        assert_string_equal(peers[i].failure, "of all");
    scene_close(&s);
}

static void lose(kvf_agent *agent, const char *engine, uint32_t rank, bool incoming) {
    kvf_session session = {.agent = agent, .rank = rank, .rank_count = 100, .incoming = incoming};
    char name[8];
    (void)snprintf(name, sizeof name, "%s", engine);
    session.engine = name;
    kvf_peer_left(&session, "lost");
}

static void of_peers_that_are_lost_the_latest_64_are_remembered(void **state) {
    (void)state;
    static kvf_agent_peer peers[100];
    scene s;
    uint32_t count = 0;
    peers[0].struct_size = sizeof *peers;
    open_it(&s, ONE("P"), ONE("D"), NULL);
    for (uint32_t i = 0; i < 64; i++)
        lose(s.d, "X", i, true);
    lose(s.d, "X", 20, true); /* once more */
    assert_ok(kvf_agent_peers(s.d, peers, COUNT_OF(peers), &count));
    assert_int_equal(count, 64);
    assert_int_equal(peers[0].rank, 0);
    assert_int_equal(peers[63].rank, 20);
    lose(s.d, "X", 64, true);
    assert_ok(kvf_agent_peers(s.d, peers, COUNT_OF(peers), &count));
    assert_int_equal(count, 64);
    assert_int_equal(peers[0].rank, 1);
    assert_int_equal(peers[63].rank, 64);
    scene_close(&s);
}

static void peers_that_are_lost_differ_by_engine_rank_and_role(void **state) {
    (void)state;
    scene s;
    kvf_agent_peer peers[MOST];
    open_it(&s, ONE("P"), ONE("D"), NULL);
    for (int again = 0; again < 2; again++) {
        lose(s.d, "X", 0, true);
        lose(s.d, "X", 0, false);
        lose(s.d, "X", 1, true);
        lose(s.d, "Y", 0, true);
        assert_int_equal(peers_of(s.d, peers), 4);
    }
    scene_close(&s);
}

/* It is for information only. */
static void a_peer_that_is_lost_is_not_remembered_where_memory_is_missing(void **state) {
    (void)state;
    memory_count memory;
    scene s;
    kvf_agent_peer peers[MOST];
    count_memory(&memory);
    open_it(&s, ONE("P"), ONE("D"), NULL);
    for (size_t n = 1; n <= 3; n++) {
        const size_t live = memory.live;
        memory.calls = 0;
        memory.fail_at = n;
        lose(s.d, "X", 0, true);
        memory.fail_at = 0;
        assert_int_equal(memory.live, live);
        assert_int_equal(peers_of(s.d, peers), 0);
    }
    scene_close(&s);
}

static void a_peer_whose_connection_broke_is_listed_as_broken(void **state) {
    (void)state;
    scene s;
    kvf_agent_peer peers[MOST];
    uint64_t ticket;
    open_it(&s, ONE("P"), ONE("D"), NULL);
    assert_ok(kvf_agent_connect(s.d, &s.w.p.contact, 0, &ticket));
    (void)world_done(&s.w, s.d, ticket);
    kvf_on_broken(s.d, s.d->all_sessions->route, KVF_E_PEER_LOST, "the connection broke");
    assert_int_equal(peers_of(s.d, peers), 1);
    assert_int_equal(peers[0].state, KVF_PEER_BROKEN);
    world_until(&s.w, peers_of(s.d, peers) == 1 && peers[0].state == KVF_PEER_OPEN);
    scene_close(&s);
}

/* ---- the log --------------------------------------------------------------------------------- */

static void a_peer_that_is_lost_is_remembered_until_it_is_back(void **state) {
    (void)state;
    static book log;
    scene s;
    kvf_agent_peer peers[MOST];
    memset(&log, 0, sizeof log);
    const kvf_agent_options *options = WRITTEN_DOWN(&log, .peer_timeout_ns = 50 * MS);
    open_it(&s, ONE("P"), ONE("D"), options);
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    world_close_agents(&s.w.p);
    world_until(&s.w, world_count(&s.w, s.d, KVF_EVENT_PEER_LOST) == 1);
    assert_int_equal(peers_of(s.d, peers), 1);
    assert_int_equal(peers[0].state, KVF_PEER_LOST);
    assert_string_equal(peers[0].engine, "P");
    has(peers[0].failure, "P rank 0: ");
    assert_null(strstr(log.text, " is back"));

    world_open_agents(&s.w.p, options);
    world_fill(&s.w, &s.w.p, &s.held, 1);
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.contact = s.w.p.contact;
    scene_pull(&s);
    assert_int_equal(peers_of(s.d, peers), 1);
    assert_int_equal(peers[0].state, KVF_PEER_OPEN);
    has(peers[0].failure, "P rank 0: "); /* from its former process */
    has(log.text, "20 P rank 0 is back, ");
    has(log.text, " s after P rank 0: ");
    world_close(&s.w);
}

static void meetings_and_ways_have_lines_with_level_and_time(void **state) {
    (void)state;
    static book log;
    scene s;
    memset(&log, 0, sizeof log);
    open_it(&s, TWO("P"), ONE("D"), WRITTEN_DOWN(&log, .transport = "shm", .log_level = KVF_LOG_DEBUG));
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    world_pull_everything(&s.w, "another", 40, 2);
    has(log.text, "20 D rank 0 of 1 reads from P, met at ");
    has(log.text, "10 P rank 1 of 2 has answered D rank 0\n");
    has(log.text, "20 D rank 0 of 1 has greeted P rank 1\n");
    has_once(log.text, "20 D rank 0 reads from P rank 0 over shm, by mapped memory\n");
    has_once(log.text, "10 D rank 0 reads from P rank 1 over shm, by mapped memory\n"); /* like its sibling */
    assert_null(strstr(log.text, "transport shm")); /* it has no library to name */
    assert_true(log.first_ns > UINT64_C(1600000000) * SECOND && log.last_ns >= log.first_ns);
    scene_close(&s);
}

/* As the replicas of what a pull reads from another rank. */
static void a_peer_from_which_nothing_was_read_has_no_line(void **state) {
    (void)state;
    static book log;
    scene s;
    uint64_t ticket;
    memset(&log, 0, sizeof log);
    open_it(&s, ONE("P"), ONE("D"), WRITTEN_DOWN(&log, .transport = "shm"));
    assert_ok(kvf_agent_connect(s.d, &s.w.p.contact, 0, &ticket));
    (void)world_done(&s.w, s.d, ticket);
    assert_null(s.d->all_sessions->peer);
    kvf_peer_served(s.d->all_sessions);
    kvf_peer_served(NULL);
    world_run_for(&s.w, MS);
    assert_null(strstr(log.text, " over "));
    scene_close(&s);
}

static void connect_to_p(scene *s, uint32_t rank) {
    uint64_t ticket;
    assert_ok(kvf_agent_connect(s->w.d.agents[rank], &s->w.p.contact, 0, &ticket));
    (void)world_done(&s->w, s->w.d.agents[rank], ticket);
}

static void the_first_rank_that_greets_is_news_and_its_siblings_are_details(void **state) {
    (void)state;
    static book log;
    scene s;
    memset(&log, 0, sizeof log);
    open_it(&s, ONE("P"), TWO("D"), WRITTEN_DOWN(&log, .log_level = KVF_LOG_DEBUG));
    connect_to_p(&s, 0);
    connect_to_p(&s, 1);
    has_once(log.text, "20 D rank 0 of 2 has greeted P rank 0\n");
    has_once(log.text, "10 D rank 1 of 2 has greeted P rank 0\n");
    scene_close(&s);
}

static void the_first_rank_that_is_not_reached_is_news_and_its_siblings_are_details(void **state) {
    (void)state;
    static book log;
    scene s;
    uint32_t ranks[2] = {0}, count = 0;
    char line[64];
    memset(&log, 0, sizeof log);
    open_it(&s, TWO("P"), ONE("D"), WRITTEN_DOWN(&log, .log_level = KVF_LOG_DEBUG));
    connect_to_p(&s, 0);
    const kvf_session *session;
    DL_FOREACH(s.d->all_sessions, session) {
        assert_true(count < 2);
        ranks[count++] = session->rank;
        kvf_on_broken(s.d, session->route, KVF_E_TIMEOUT, "no answer");
    }
    DL_FOREACH(s.d->all_sessions, session) {
        kvf_on_broken(s.d, session->route, KVF_E_TIMEOUT, "no answer");
    }
    world_run_for(&s.w, MS);
    (void)snprintf(line, sizeof line, "20 P rank %u: no answer; trying again\n", ranks[0]);
    has_once(log.text, line);
    (void)snprintf(line, sizeof line, "10 P rank %u: no answer; trying again\n", ranks[1]);
    has_once(log.text, line);
    kvf_on_broken(s.d, s.d->all_sessions->route, KVF_E_TIMEOUT, "no room");
    world_run_for(&s.w, MS);
    has_once(log.text, ": no room; trying again\n"); /* another reason */
    scene_close(&s);
}

static bool is_of_this_build(const char *kind) {
    const char *name;
    for (uint32_t i = 0; (name = kvf_transport_kind_name(i)) != NULL; i++)
        if (strcmp(name, kind) == 0)
            return true;
    return false;
}

/* What users need if bytes move slower than expected: which library was loaded, or why none was. */
static void libraries_that_were_looked_for_in_vain_have_a_line(void **state) {
    (void)state;
    static book log;
    scene s;
    memset(&log, 0, sizeof log);
    if (!is_of_this_build("ucx"))
        skip();
    const kvf_setting nowhere = {"ucx.library", "/no/such/libucp.so.0"};
    open_it(&s, ONE("P"), ONE("D"),
            WRITTEN_DOWN(&log, .transport = "auto", .settings = &nowhere, .setting_count = 1));
    has(log.text, "20 transport ucx does not work here: ");
    has(log.text, "/no/such/libucp.so.0: ");
    assert_null(strstr(log.text, "transport ucx: "));
    scene_close(&s);
}

/* Opens both engines' agents again, with memory that the transport did not allocate. */
static void bring_memory(scene *s, const kvf_agent_options *options) {
    world_engine *engines[] = {&s->w.p, &s->w.d};
    for (int e = 0; e < 2; e++) {
        world_engine *engine = engines[e];
        const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(engine->engine, 0));
        kvf_memory regions[WORLD_MAX_REGIONS];
        world_close_agents(engine);
        assert_ok(kvf_agent_open(engine->engine, 0, options, &engine->agents[0]));
        for (uint32_t i = 0; i < shard->region_count; i++) {
            brought[e][i] = engine->memory[0][i] = calloc(1, shard->region_bytes[i]);
            regions[i] = (kvf_memory){
                .struct_size = sizeof(kvf_memory), .address = brought[e][i], .bytes = shard->region_bytes[i]};
        }
        assert_ok(kvf_agent_register(engine->agents[0], regions, shard->region_count));
        engine->contact.endpoint = kvf_agent_endpoint(engine->agents[0]);
    }
    world_fill(&s->w, &s->w.p, &s->held, 1);
    s->d = s->w.d.agents[0];
}

static void close_with_brought_memory(scene *s) {
    scene_close(s);
    for (int e = 0; e < 2; e++)
        for (uint32_t i = 0; i < WORLD_MAX_REGIONS; i++) {
            free(brought[e][i]);
            brought[e][i] = NULL;
        }
}

/* The setting keeps the transport from reading directly. */
static void a_way_that_is_no_more_than_a_fallback_says_why(void **state) {
    (void)state;
    static book log;
    scene s;
    memset(&log, 0, sizeof log);
    const kvf_setting off[] = {{"shm.direct", "on"}, {"shm.direct", "off"}}; /* the last one counts */
    const kvf_agent_options *options =
        WRITTEN_DOWN(&log, .transport = "shm", .settings = off, .setting_count = 2);
    open_it(&s, ONE("P"), ONE("D"), options);
    bring_memory(&s, options);
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    has(log.text,
        "20 D rank 0 reads from P rank 0 over shm, by a shared buffer, because shm.direct is off\n");
    kvf_agent_peer peers[MOST];
    assert_int_equal(peers_of(s.d, peers), 1);
    assert_string_equal(peers[0].way, "a shared buffer, because shm.direct is off");
    close_with_brought_memory(&s);
}

/* Runs of 16 bytes on one host go packed, unless the way is direct, or the pull has a cap, to which runs keep more
 * exactly. */
static void memory_that_nobody_can_map_goes_packed_on_one_host(void **state) {
    (void)state;
    static const struct {
        kvf_way way;
        uint64_t cap;
        bool packed;
    } cases[] = {{KVF_WAY_AUTO, 0, true},
                 {KVF_WAY_DIRECT, 0, false},
                 {KVF_WAY_AUTO, 10000000, false},
                 {KVF_WAY_PACKED, 10000000, true}};
    const kvf_engine_spec *by_token = ENGINE(.name = "P", .all = {.block_count = 64, .order = "L|BPNH"});
    const kvf_engine_spec *by_head = ENGINE(.name = "D", .all = {.block_count = 64, .order = "L|BPHN"});
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        scene s;
        const kvf_agent_options *options = &(const kvf_agent_options){
            .struct_size = sizeof *options, .transport = "shm", .way = cases[i].way};
        scene_open(&s, attention(4, 8, 8), by_token, by_head, options);
        bring_memory(&s, options);
        s.wanted.request.bytes_per_second = cases[i].cap;
        world_hold(&s.w.p, &s.held, s.theirs);
        scene_pull(&s);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
        kvf_agent_stats stats = world_stats(s.d);
        assert_true(stats.bytes_read > 0);
        assert_int_equal(stats.bytes_packed, cases[i].packed ? stats.bytes_read : 0);
        close_with_brought_memory(&s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_agent_that_met_nobody_has_no_peers),
        cmocka_unit_test(a_round_trip_is_known_from_the_welcome_on),
        cmocka_unit_test(a_reader_and_its_producer_see_each_other),
        cmocka_unit_test(a_writer_and_its_consumer_count_the_same_bytes),
        cmocka_unit_test(a_list_may_be_too_short_and_its_elements_of_another_version),
        cmocka_unit_test(a_failure_is_kept_with_its_peer),
        cmocka_unit_test(a_failure_is_that_of_one_rank),
        cmocka_unit_test(of_peers_that_are_lost_the_latest_64_are_remembered),
        cmocka_unit_test(peers_that_are_lost_differ_by_engine_rank_and_role),
        cmocka_unit_test_teardown(a_peer_that_is_lost_is_not_remembered_where_memory_is_missing,
                                  stop_counting_memory),
        cmocka_unit_test(a_peer_whose_connection_broke_is_listed_as_broken),
        cmocka_unit_test(a_peer_from_which_nothing_was_read_has_no_line),
        cmocka_unit_test(a_peer_that_is_lost_is_remembered_until_it_is_back),
        cmocka_unit_test(meetings_and_ways_have_lines_with_level_and_time),
        cmocka_unit_test(the_first_rank_that_greets_is_news_and_its_siblings_are_details),
        cmocka_unit_test(the_first_rank_that_is_not_reached_is_news_and_its_siblings_are_details),
        cmocka_unit_test(libraries_that_were_looked_for_in_vain_have_a_line),
        cmocka_unit_test(a_way_that_is_no_more_than_a_fallback_says_why),
        cmocka_unit_test(memory_that_nobody_can_map_goes_packed_on_one_host),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
