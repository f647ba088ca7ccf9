/* An agent explains the engines that it meets, once per meeting and on demand: which rank reads what from which. */
#include <stdio.h>

#include "agent/agent.h"
#include "agent_world.h"

#define OPTIONS(...) (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), __VA_ARGS__})

typedef struct book {
    char text[16384];
    size_t length;
    uint32_t lines[KVF_LOG_WARNING + 1]; /* by level */
    uint64_t last_time;
} book;

static void write_down(void *context, const kvf_log_line *line) {
    book *to = context;
    assert_int_equal(line->struct_size, sizeof *line);
    assert_null(strchr(line->text, '\n'));
    assert_true(line->time_ns >= to->last_time);
    to->last_time = line->time_ns;
    to->lines[line->level]++;
    to->length += (size_t)snprintf(to->text + to->length, sizeof to->text - to->length, "%d %s\n",
                                   (int)line->level, line->text);
    assert_true(to->length < sizeof to->text);
}

static uint32_t count(const char *text, const char *words) {
    uint32_t n = 0;
    for (const char *at = text; (at = strstr(at, words)) != NULL; at++)
        n++;
    return n;
}

static void has(const char *text, const char *words) {
    if (!strstr(text, words))
        fail_msg("no \"%s\" in:\n%s", words, text);
}

static void connect_to(world *w, kvf_agent *agent, const kvf_contact *contact) {
    uint64_t ticket;
    assert_ok(kvf_agent_connect(agent, contact, 0, &ticket));
    (void)world_done(w, agent, ticket);
}

static const char *explain(kvf_agent *agent, const char *engine, kvf_log_level level) {
    static char text[16384];
    size_t length;
    assert_ok(kvf_agent_explain(agent, engine, level, text, sizeof text, &length));
    assert_int_equal(length, strlen(text));
    return text;
}

/*
 * Four producer ranks of two heads each, tokens before heads; two consumer ranks of four heads, heads before tokens, in
 * larger blocks. A head of a token has 16 elements, 32 bytes, and is a run of its own, because its neighbours on the
 * other side are other tokens.
 */
static void open_pair(world *w, const kvf_agent_options *options) {
    kvf_agent_options own = options ? *options : (kvf_agent_options){.struct_size = sizeof own};
    own.assumed_costs = true; /* not this machine's costs */
    world_open_model(w, attention(3, 8, 16),
                     ENGINE(.name = "P", .tp_size = 4,
                            .all = {.tokens_per_block = 16, .block_count = 64, .order = "L|BPNH"}),
                     ENGINE(.name = "D", .tp_size = 2,
                            .all = {.tokens_per_block = 24, .block_count = 32, .order = "L|BPHN"}),
                     &own);
}

/* ---- the summary ----------------------------------------------------------------------------- */

static void a_meeting_says_who_reads_what_from_whom(void **state) {
    (void)state;
    static book log;
    memset(&log, 0, sizeof log);
    world w;
    open_pair(&w, OPTIONS(.transport = "shm", .log = write_down, .log_context = &log));
    connect_to(&w, w.d.agents[1], &w.p.contact);

    has(log.text, "20 D rank 1 of 2 reads from P, met at tcp://127.0.0.1:");
    has(log.text, "20   P: 4 ranks, tp 4\n");
    has(log.text, "20     full: layers 0-2; k v 8 heads x 16 bf16 (2 a rank); 64 blocks of 16 tokens; order "
                  "L|BPNH\n");
    has(log.text, "20   D: 2 ranks, tp 2\n");
    has(log.text, "20     full: layers 0-2; k v 8 heads x 16 bf16 (4 a rank); 32 blocks of 24 tokens; order "
                  "L|BPHN\n");
    /* A rank's share is 3 layers x 2 parts x 2 heads x 1024 tokens = 12288 runs of 32 bytes: 384 KiB. */
    has(log.text,
        "20   from ranks 2-3, each 384.0 KiB in 12 288 runs: full k v, layers 0-2, heads 4-7 (2 each)\n");
    /* Both: 24576 runs at 60 ns, 786432 bytes at 0.125 ns, 2 sources at 5 us: 1474560 + 98304 + 10000 ns. */
    has(log.text,
        "20   a request of 1024 tokens, blocks scattered: 768.0 KiB in 24 576 runs from 2 ranks, 32 B a "
        "run on average; 1.58 ms with the costs assumed for shm: 60 ns a run, 8 GB/s, 5.00 us a rank\n");
    assert_null(strstr(log.text, "rank 0 is told"));
    assert_int_equal(log.lines[KVF_LOG_DEBUG], 0);
    assert_int_equal(log.lines[KVF_LOG_WARNING], 0);
    world_close(&w);
}

static void each_line_of_a_text_is_a_line_of_the_log(void **state) {
    (void)state;
    static book log;
    world w;
    open_pair(&w, OPTIONS(.log = write_down, .log_context = &log));
    world_run_for(&w, MS);
    memset(&log, 0, sizeof log); /* without what was said of transports */
    kvf_agent_log(w.d.agents[0], KVF_LOG_INFO, "a\n\nbc\n");
    world_run_for(&w, MS);
    assert_string_equal(log.text, "20 a\n20 bc\n");
    world_close(&w);
}

static void ranks_that_are_not_read_are_told(void **state) {
    (void)state;
    static book log;
    memset(&log, 0, sizeof log);
    world w;
    world_open_model(&w, latent(2), ENGINE(.name = "P", .tp_size = 4, .all = {.block_count = 8}),
                     ENGINE(.name = "D", .all = {.block_count = 8}),
                     OPTIONS(.log = write_down, .log_context = &log));
    connect_to(&w, w.d.agents[0], &w.p.contact);
    /* 2 layers of 1024 tokens of 8 bytes. */
    has(log.text, "from rank 0: 16.0 KiB in 128 runs: mla latent, layers 0-1\n");
    has(log.text, "mla: layers 0-1; latent 4 bf16; 8 blocks of 16 tokens; order L|BN\n");
    has(log.text, "20   3 more ranks are not read, but are told when they may free their blocks\n");
    world_close(&w);
}

static void a_single_rank_that_is_not_read_is_named(void **state) {
    (void)state;
    world w;
    world_open_model(&w, latent(2), ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 8}),
                     ENGINE(.name = "D", .all = {.block_count = 8}), NULL);
    connect_to(&w, w.d.agents[0], &w.p.contact);
    has(explain(w.d.agents[0], "P", KVF_LOG_INFO),
        "  rank 1 is not read, but is told when it may free its blocks\n");
    world_close(&w);
}

static void details_say_by_how_many_ranks_each_rank_is_told(void **state) {
    (void)state;
    world w;
    world_open_model(&w, latent(2), ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 8}),
                     ENGINE(.name = "D", .tp_size = 4, .all = {.block_count = 8}), NULL);
    connect_to(&w, w.d.agents[0], &w.p.contact);
    has(explain(w.d.agents[0], "P", KVF_LOG_DEBUG),
        "  rank 0 is told by 2 ranks of this engine when it may free its blocks\n");
    world_close(&w);
}

static void parts_that_are_cut_unlike_have_lines_of_their_own(void **state) {
    (void)state;
    static book log;
    memset(&log, 0, sizeof log);
    world w;
    world_open_model(&w, hybrid(4), ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 8}),
                     ENGINE(.name = "D", .all = {.block_count = 8}),
                     OPTIONS(.log = write_down, .log_context = &log));
    connect_to(&w, w.d.agents[0], &w.p.contact);
    has(log.text,
        "full: layers 0-2 by 2; k v 4 heads x 4 bf16 (2 a rank); 8 blocks of 16 tokens; order L|BPHN\n");
    has(log.text,
        "ssm: layers 1-3 by 2; conv.x 4 channels x 3 rows x 1 bf16 (2 a rank), conv.B conv.C 2 channels "
        "x 3 rows x 1 bf16 (1 a rank), ssm 2 heads x 16 bf16 (1 a rank); 8 blocks of a state; order ");
    has(log.text, "20   from ranks 0-1, each ");
    has(log.text, "20     full k v, layers 0-2 by 2, heads 0-3 (2 each)\n");
    has(log.text, "20     ssm conv.x, layers 1-3 by 2, channels 0-3 (2 each)\n");
    has(log.text, "20     ssm conv.B conv.C ssm, layers 1-3 by 2, channels 0-1 (1 each)\n");
    world_close(&w);
}

static void a_large_engine_takes_few_lines(void **state) {
    (void)state;
    static book log;
    memset(&log, 0, sizeof log);
    world w;
    /* 7 layers in stages of 3 and 4; 13 heads on 4 ranks, which begin at 0, 3, 6 and 9. */
    world_open_model(&w, attention(7, 13, 4),
                     ENGINE(.name = "P", .tp_size = 4, .pp_size = 2, .all = {.block_count = 8}),
                     ENGINE(.name = "D", .all = {.block_count = 8}),
                     OPTIONS(.log = write_down, .log_context = &log, .log_level = KVF_LOG_DEBUG));
    connect_to(&w, w.d.agents[0], &w.p.contact);
    uint32_t lines = log.lines[KVF_LOG_INFO] - count(log.text, "20 transport "); /* each rank has its own */
    assert_true(lines >= 8);
    assert_true(lines <= 20);
    has(log.text, "20     full: layers 0-6 (3 to 4 a rank); k v 13 heads x 4 bf16 (3 to 4 a rank); ");
    has(log.text, "20   from ranks 0-2, each ");
    has(log.text, "full k v, layers 0-2, heads 0-8 (3 each)\n");
    has(log.text, "full k v, layers 3-6, heads 9-12\n");
    /* The debug level lists every rank. */
    for (uint32_t r = 0; r < 8; r++) {
        char line[32];
        (void)snprintf(line, sizeof line, "10   from rank %u: ", r);
        assert_int_equal(count(log.text, line), 1);
        (void)snprintf(line, sizeof line, "10   rank %u at tcp://", r);
        assert_int_equal(count(log.text, line), 1);
    }
    world_close(&w);
}

static void ranks_that_would_take_too_many_lines_are_counted(void **state) {
    (void)state;
    static book log;
    memset(&log, 0, sizeof log);
    world w;
    world_open_model(&w, hybrid(4), ENGINE(.name = "P", .tp_size = 4, .all = {.block_count = 8}),
                     ENGINE(.name = "D", .all = {.block_count = 8}),
                     OPTIONS(.log = write_down, .log_context = &log));
    connect_to(&w, w.d.agents[0], &w.p.contact);
    /* 7 lines of both engines, 3, 3, 4 and 3 of the ranks, and one of all together would be 21. */
    has(log.text, "20   from rank 2: ");
    has(log.text, "20   and from 1 more rank\n20   a request of 1024 tokens");
    assert_null(strstr(log.text, "from rank 3"));
    world_close(&w);
}

/* Entries of 4 tokens are shared by 8, and those of 32 one by one. */
static void shares_are_told_in_tokens(void **state) {
    (void)state;
    world w;
    world_open_model(&w, compressed(),
                     ENGINE(.name = "P", .tp_size = 2, .dcp_size = 2, .dcp_width = 32,
                            .all = {.tokens_per_block = 32, .block_count = 64}),
                     ENGINE(.name = "D", .all = {.tokens_per_block = 64, .block_count = 64}), NULL);
    connect_to(&w, w.d.agents[0], &w.p.contact);
    const char *text = explain(w.d.agents[0], "P", KVF_LOG_DEBUG);
    has(text, "csa latent indexer, layers 0-2 by 2, tokens 1 mod 2 by 32");
    has(text, "hca latent, layer 1, tokens 1 mod 2 by 32");
    world_close(&w);
}

/* ---- when it is logged ---------------------------------------------------------------------- */

static void pull_some(world *w, const char *id, uint32_t first) {
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    world_request_make(w, &w->p, id, 40, first, 1, &held);
    world_request_make(w, &w->d, id, 40, first, 1, &wanted);
    world_hold(&w->p, &held, theirs);
    world_pull(&w->d, &wanted, &w->p, ours);
    world_all_done(w, &w->d, ours);
    world_all_done(w, &w->p, theirs);
}

static void a_meeting_is_told_once_and_again_after_a_restart(void **state) {
    (void)state;
    static book log;
    memset(&log, 0, sizeof log);
    world w;
    open_pair(&w, OPTIONS(.transport = "inproc", .log = write_down, .log_context = &log));
    pull_some(&w, "a", 0);
    pull_some(&w, "b", 4);
    assert_int_equal(count(log.text, "D rank 0 of 2 reads from P"), 1);
    assert_int_equal(count(log.text, "D rank 1 of 2 reads from P"), 1);
    /* The way is logged for the first rank of an engine; the others move the same way. */
    assert_int_equal(count(log.text, "20 D rank 0 reads from P rank "), 1);
    assert_int_equal(count(log.text, " over inproc, by memory of this process\n"), 2);

    world_close_agents(&w.p);
    world_open_agents(&w.p, OPTIONS(.transport = "inproc"));
    pull_some(&w, "c", 8);
    assert_int_equal(count(log.text, "D rank 0 of 2 reads from P"), 2);
    assert_int_equal(count(log.text, "20 D rank 0 reads from P rank "), 2);
    world_close(&w);
}

static void only_wanted_levels_are_told(void **state) {
    (void)state;
    static book log;
    memset(&log, 0, sizeof log);
    world w;
    open_pair(&w, OPTIONS(.log = write_down, .log_context = &log, .log_level = KVF_LOG_WARNING));
    uint64_t ticket;
    const kvf_contact nobody = {.engine = "Q", .endpoint = "tcp://127.0.0.1:1"};
    assert_ok(kvf_agent_connect(w.d.agents[0], &nobody, 0, &ticket));
    pull_some(&w, "a", 0);
    assert_int_equal(log.length, 0);
    assert_ok(kvf_agent_cancel(w.d.agents[0], ticket));
    (void)world_failed(&w, w.d.agents[0], ticket, KVF_E_CANCELLED);
    assert_int_equal(log.lines[KVF_LOG_WARNING], 1);
    assert_int_equal(log.lines[KVF_LOG_INFO], 0);
    has(log.text, "30 {\"failure\":\"request\"");
    world_close(&w);
}

/* ---- on demand ------------------------------------------------------------------------------- */

static void an_agent_explains_itself_and_whom_it_knows(void **state) {
    (void)state;
    world w;
    open_pair(&w, OPTIONS(.transport = "inproc"));
    kvf_agent *d = w.d.agents[0], *p = w.p.agents[0];
    assert_fails(kvf_agent_explain(d, "P", KVF_LOG_INFO, NULL, 0, NULL), KVF_E_NOT_FOUND, "P");
    has(explain(d, NULL, KVF_LOG_INFO), "D rank 0 of 2 at tcp://127.0.0.1:");
    assert_null(strstr(explain(d, NULL, KVF_LOG_INFO), "reads from"));

    connect_to(&w, d, &w.p.contact);
    has(explain(d, "P", KVF_LOG_INFO), "D rank 0 of 2 reads from P, met at ");
    has(explain(d, "P", KVF_LOG_INFO),
        "from ranks 0-1, each 384.0 KiB in 12 288 runs: full k v, layers 0-2, heads "
        "0-3 (2 each)\n");
    has(explain(d, "P", KVF_LOG_INFO), "no rank is connected yet");
    has(explain(p, "D", KVF_LOG_INFO), "D: 1 of 2 ranks have sessions here; 0 may be written to; 0 leases\n");
    assert_fails(kvf_agent_explain(p, "E", KVF_LOG_INFO, NULL, 0, NULL), KVF_E_NOT_FOUND, "E");

    pull_some(&w, "a", 0);
    has(explain(d, "P", KVF_LOG_INFO), "  over inproc\n");
    has(explain(d, "P", KVF_LOG_INFO), "with the costs assumed for inproc: ");
    has(explain(w.p.agents[2], NULL, KVF_LOG_INFO), "D: 1 of 2 ranks have sessions here; ");
    has(explain(w.p.agents[2], NULL, KVF_LOG_DEBUG), "  rank 1, incarnation ");
    assert_null(strstr(explain(d, NULL, KVF_LOG_INFO), "from rank 1: "));
    has(explain(d, NULL, KVF_LOG_DEBUG),
        "from rank 1: 384.0 KiB in 12 288 runs: full k v, layers 0-2, heads 2-3\n");
    /* It explains the requested one of two engines that it knows. */
    world_add(&w, ENGINE(.name = "E", .all = {.block_count = 32}), OPTIONS(.transport = "inproc"));
    connect_to(&w, d, &w.e.contact);
    has(explain(d, NULL, KVF_LOG_INFO), "D rank 0 of 2 reads from E, met at ");
    assert_null(strstr(explain(d, "P", KVF_LOG_INFO), "reads from E"));
    assert_null(strstr(explain(d, "E", KVF_LOG_INFO), "reads from P"));
    assert_null(strstr(explain(w.e.agents[0], "D", KVF_LOG_INFO), "P"));
    world_quiet(&w);
    world_close(&w);
}

static void a_producer_explains_how_it_writes_to_whom_it_pushes(void **state) {
    (void)state;
    world w;
    world_request given, wanted;
    uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
    world_open_model(&w, latent(2), ENGINE(.name = "P", .all = {.block_count = 8}),
                     ENGINE(.name = "D", .all = {.block_count = 8}), OPTIONS(.transport = "inproc"));
    kvf_agent *p = w.p.agents[0];
    pull_some(&w, "a", 0);
    has(explain(p, "D", KVF_LOG_INFO), "D: 1 of 1 ranks have sessions here; 0 may be written to; 0 leases\n");
    assert_null(strstr(explain(p, "D", KVF_LOG_INFO), "written to over"));
    world_request_make(&w, &w.p, "b", 40, 4, 1, &given);
    world_request_make(&w, &w.d, "b", 40, 4, 1, &wanted);
    world_push(&w.p, &given, pushes);
    world_expect(&w.d, &wanted, &w.p, expects);
    world_ready(&w.p, pushes);
    world_all_done(&w, &w.d, expects);
    has(explain(p, "D", KVF_LOG_INFO),
        "D: 1 of 1 ranks have sessions here; 1 may be written to; 0 leases\n  written to over inproc\n");
    world_quiet(&w);
    world_close(&w);
}

static void a_producer_counts_the_sessions_and_leases_of_each_engine(void **state) {
    (void)state;
    world w;
    world_request held[2], wanted[2];
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    world_open_model(&w, latent(2), ENGINE(.name = "P", .all = {.block_count = 8}),
                     ENGINE(.name = "D", .all = {.block_count = 8}), NULL);
    kvf_agent *p = w.p.agents[0];
    for (uint32_t i = 0; i < 2; i++) {
        const char *id = i ? "b" : "a";
        world_request_make(&w, &w.p, id, 40, 4 * i, 1, &held[i]);
        world_request_make(&w, &w.d, id, 40, 4 * i, 1, &wanted[i]);
        wanted[i].request.groups = NULL; /* reserved, and not read */
        wanted[i].request.group_count = 0;
        world_hold(&w.p, &held[i], theirs);
        world_pull(&w.d, &wanted[i], &w.p, ours);
    }
    world_until(&w, world_stats(p).leases_now == 2);
    world_add(&w, ENGINE(.name = "E", .all = {.block_count = 8}), NULL);
    connect_to(&w, w.e.agents[0], &w.p.contact);
    has(explain(p, "D", KVF_LOG_DEBUG),
        "D: 1 of 1 ranks have sessions here; 0 may be written to; 2 leases\n");
    assert_int_equal(count(explain(p, "D", KVF_LOG_DEBUG), ", incarnation "), 1);
    has(explain(p, "D", KVF_LOG_DEBUG), ": 2 leases, 0 expectations\n");
    has(explain(p, "E", KVF_LOG_DEBUG),
        "E: 1 of 1 ranks have sessions here; 0 may be written to; 0 leases\n");
    assert_int_equal(count(explain(p, "E", KVF_LOG_DEBUG), ", incarnation "), 1);
    world_close(&w);
}

static void a_text_that_does_not_fit_is_cut(void **state) {
    (void)state;
    world w;
    open_pair(&w, NULL);
    char whole[4096], cut[8] = "xxxxxxx";
    size_t length, again;
    kvf_agent *d = w.d.agents[0];
    assert_ok(kvf_agent_explain(d, NULL, KVF_LOG_INFO, NULL, 0, &length));
    assert_ok(kvf_agent_explain(d, NULL, KVF_LOG_INFO, whole, length + 1, &again));
    assert_int_equal(again, length);
    assert_int_equal(strlen(whole), length);
    assert_ok(kvf_agent_explain(d, NULL, KVF_LOG_INFO, cut, 5, &again));
    assert_int_equal(again, length);
    assert_string_equal(cut, "D ra");
    assert_fails(kvf_agent_explain(d, NULL, KVF_LOG_INFO, NULL, 1, NULL), KVF_E_INVALID, "text");
    assert_fails(kvf_agent_explain(NULL, NULL, KVF_LOG_INFO, NULL, 0, NULL), KVF_E_INVALID, "agent");
    assert_fails(kvf_agent_explain(d, NULL, KVF_LOG_WARNING, NULL, 0, NULL), KVF_E_INVALID, "level is 30");
    world_close(&w);
}

static void a_directory_explains_whom_it_introduces(void **state) {
    (void)state;
    world w;
    open_pair(&w, NULL);
    w.e.rank_count = 1;
    assert_ok(kvf_agent_open(NULL, 0, NULL, &w.e.agents[0]));
    has(explain(w.e.agents[0], NULL, KVF_LOG_INFO), "of no engine yet: ");
    world_introduce(&w.p, w.e.agents[0]);
    has(explain(w.e.agents[0], NULL, KVF_LOG_INFO), "of P: 4 of 4 ranks have introduced themselves\n");
    world_close(&w);
}

static kvf_status explain_all(void *subject) {
    kvf_agent *agent = subject;
    size_t length = 0;
    return kvf_agent_explain(agent, NULL, KVF_LOG_DEBUG, NULL, 0, &length);
}

static void an_agent_that_cannot_explain_says_that_memory_is_missing(void **state) {
    (void)state;
    world w;
    memory_count memory;
    count_memory(&memory);
    open_pair(&w, NULL);
    connect_to(&w, w.d.agents[0], &w.p.contact);
    survive_every_refusal(&memory, explain_all, w.d.agents[0]); /* the reader */
    survive_every_refusal(&memory, explain_all, w.p.agents[0]); /* the rank that is read */
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_meeting_says_who_reads_what_from_whom),
        cmocka_unit_test(shares_are_told_in_tokens),
        cmocka_unit_test(each_line_of_a_text_is_a_line_of_the_log),
        cmocka_unit_test(ranks_that_are_not_read_are_told),
        cmocka_unit_test(a_single_rank_that_is_not_read_is_named),
        cmocka_unit_test(details_say_by_how_many_ranks_each_rank_is_told),
        cmocka_unit_test(parts_that_are_cut_unlike_have_lines_of_their_own),
        cmocka_unit_test(a_large_engine_takes_few_lines),
        cmocka_unit_test(ranks_that_would_take_too_many_lines_are_counted),
        cmocka_unit_test(a_meeting_is_told_once_and_again_after_a_restart),
        cmocka_unit_test(only_wanted_levels_are_told),
        cmocka_unit_test(an_agent_explains_itself_and_whom_it_knows),
        cmocka_unit_test(a_producer_explains_how_it_writes_to_whom_it_pushes),
        cmocka_unit_test(a_producer_counts_the_sessions_and_leases_of_each_engine),
        cmocka_unit_test(a_text_that_does_not_fit_is_cut),
        cmocka_unit_test(a_directory_explains_whom_it_introduces),
        cmocka_unit_test_teardown(an_agent_that_cannot_explain_says_that_memory_is_missing,
                                  stop_counting_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
