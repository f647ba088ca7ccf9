/* Giving commands to engines that run, over ZeroMQ, and moving a request from one engine to another by them. */
#include <pthread.h>
#include <stdio.h>

#include "agent/ask.h"
#include "agent_world.h"

#define OPTIONS(...)                                                                                         \
    (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), .own_thread = true, __VA_ARGS__})
#define ASK(...) (&(const kvf_ask_options){.struct_size = sizeof(kvf_ask_options), __VA_ARGS__})
#define COMMAND(...) (&(const kvf_command){.struct_size = sizeof(kvf_command), __VA_ARGS__})
#define PATIENCE_NS (WORLD_PATIENCE_S * SECOND)
#define TOKENS 40u

/* One rank of an engine that heeds commands, in a thread of its own, until it is told to "end". */
typedef struct heeding {
    pthread_t thread;
    world *w;
    world_engine *engine;
    kvf_agent *agent;
    uint32_t rank;
    world_request request; /* that it holds, or takes over */
    uint32_t commands;     /* that it was told of */
    uint64_t pull;         /* the ticket of the request that it takes over, */
    uint64_t pulled_for;   /* and the command's number */
    bool drains;
    uint64_t drained_for;
} heeding;

static void take_over(heeding *h, const kvf_command *command) {
    kvf_agent_request pull = h->request.request;
    pull.id = command->request;
    pull.groups = h->request.groups;
    pull.group_count = h->request.group_count;
    pull.contact = command->peer;
    pull.deadline_ns = command->deadline_ns;
    assert_int_equal(command->record_count, 1);
    assert_string_equal(command->records[0].name, "tokens");
    assert_int_equal(command->records[0].end, TOKENS);
    assert_int_equal(command->records[0].rank, 0);
    h->pulled_for = command->number;
    kvf_status status = kvf_agent_pull(h->agent, &pull, &h->pull);
    if (status)
        assert_ok(kvf_agent_reply(h->agent, command->number, status, kvf_error_detail(), NULL, 0));
}

static void hand_over(const heeding *h, const kvf_command *command) {
    const kvf_record where = {.name = "tokens", .end = TOKENS};
    if (command->request.size != 1 || *(const char *)command->request.data != 'a') {
        assert_ok(
            kvf_agent_reply(h->agent, command->number, KVF_E_NOT_FOUND, "no such request is kept", NULL, 0));
        return;
    }
    kvf_agent_request hold = h->request.request;
    hold.groups = h->request.groups;
    uint64_t ticket;
    assert_ok(kvf_agent_hold(h->agent, &hold, &ticket));
    assert_ok(kvf_agent_reply(h->agent, command->number, KVF_OK, "held", &where, 1));
}

static void say_with_whom(const heeding *h, const kvf_command *command) {
    const kvf_contact *peer = &command->peer;
    char whom[128];
    assert_true(command->deadline_ns > 0 && command->deadline_ns <= PATIENCE_NS);
    (void)snprintf(whom, sizeof whom, "%s, %s", peer->engine ? peer->engine : "NULL",
                   peer->public_key ? peer->public_key : "NULL");
    assert_ok(kvf_agent_reply(h->agent, command->number, KVF_OK, whom, NULL, 0));
}

static bool heed_command(heeding *h, const kvf_command *command) {
    h->commands++;
    if (strcmp(command->verb, "end") == 0) {
        assert_ok(kvf_agent_reply(h->agent, command->number, KVF_OK, "", NULL, 0));
        return false;
    }
    if (strcmp(command->verb, KVF_COMMAND_DRAIN) == 0) {
        assert_ok(kvf_agent_drain(h->agent, command->deadline_ns));
        h->drained_for = command->number;
    } else if (strcmp(command->verb, KVF_COMMAND_HAND_OVER) == 0)
        hand_over(h, command);
    else if (strcmp(command->verb, KVF_COMMAND_TAKE_OVER) == 0)
        take_over(h, command);
    else if (strcmp(command->verb, "rank 1 refuses") == 0)
        assert_ok(kvf_agent_reply(h->agent, command->number, h->rank == 1 ? KVF_E_INVALID : KVF_OK,
                                  h->rank == 1 ? "rank 1 will not" : NULL, NULL, 0));
    else if (strcmp(command->verb, "with whom?") == 0)
        say_with_whom(h, command);
    return true; /* other verbs are not replied to */
}

static void *heed(void *context) {
    heeding *h = context;
    for (bool goes_on = true; goes_on;) {
        kvf_event event = {.struct_size = sizeof event};
        if (kvf_agent_wait(h->agent, 100 * MS) == KVF_E_TIMEOUT || kvf_agent_next_event(h->agent, &event))
            continue;
        if (event.kind == KVF_EVENT_COMMAND)
            goes_on = heed_command(h, event.command);
        else if (event.kind == KVF_EVENT_DRAINED)
            assert_ok(kvf_agent_reply(h->agent, h->drained_for, event.status, event.detail, NULL, 0));
        else if (event.ticket && event.ticket == h->pull && event.request_kind == KVF_REQUEST_PULL)
            assert_ok(kvf_agent_reply(h->agent, h->pulled_for, event.status, event.detail, NULL, 0));
    }
    return NULL;
}

/* Two engines, of two ranks and of one, whose ranks heed commands. */
typedef struct scene {
    world w;
    heeding p[2], d;
} scene;

static void begin(scene *s, heeding *h, world_engine *engine, uint32_t rank) {
    *h = (heeding){.w = &s->w, .engine = engine, .agent = engine->agents[rank], .rank = rank};
    world_request_make(&s->w, engine, "a", TOKENS, 2, 1, &h->request);
    assert_int_equal(pthread_create(&h->thread, NULL, heed, h), 0);
}

static void open_scene(scene *s, const kvf_agent_options *options) {
    world_open_model(&s->w, attention(2, 4, 8),
                     ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 8, .order = "L|BPNH"}),
                     ENGINE(.name = "D", .all = {.tokens_per_block = 24, .block_count = 8}), options);
    for (uint32_t r = 0; r < 2; r++)
        begin(s, &s->p[r], &s->w.p, r);
    begin(s, &s->d, &s->w.d, 0);
}

static kvf_asked *ask_with(const kvf_ask_options *how, const kvf_contact *contact,
                           const kvf_command *command) {
    kvf_asked *asked = NULL;
    assert_ok(kvf_ask(contact, command, how, &asked));
    return asked;
}

static kvf_asked *ask(const kvf_contact *contact, const kvf_command *command) {
    return ask_with(ASK(.timeout_ns = PATIENCE_NS), contact, command);
}

static kvf_status ask_status(const kvf_contact *contact, const kvf_command *command) {
    kvf_asked *asked = ask(contact, command);
    kvf_status status = kvf_asked_status(asked, NULL);
    kvf_asked_free(asked);
    return status;
}

static kvf_asked_rank reply_of(const kvf_asked *asked, uint32_t rank) {
    kvf_asked_rank reply = {.struct_size = sizeof reply};
    assert_ok(kvf_asked_reply(asked, rank, &reply));
    return reply;
}

static void close_scene(scene *s, const kvf_ask_options *how) {
    heeding *const all[] = {&s->p[0], &s->p[1], &s->d};
    const kvf_contact *const contacts[] = {&s->w.p.contact, &s->w.d.contact};
    for (int i = 0; i < 2; i++) {
        kvf_asked *asked = ask_with(how, contacts[i], COMMAND(.verb = "end", .deadline_ns = PATIENCE_NS));
        assert_ok(kvf_asked_status(asked, NULL));
        kvf_asked_free(asked);
    }
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_join(all[i]->thread, NULL), 0);
    world_close(&s->w);
}

#define LOCAL OPTIONS(.local_commands = true)
#define PATIENT ASK(.timeout_ns = PATIENCE_NS)

static void every_rank_is_asked_and_replies(void **state) {
    (void)state;
    scene s;
    open_scene(&s, LOCAL);
    kvf_asked *asked = ask(&s.w.p.contact, COMMAND(.verb = "rank 1 refuses", .deadline_ns = PATIENCE_NS));
    uint32_t rank = 9;
    assert_string_equal(kvf_asked_engine(asked), "P");
    assert_int_equal(kvf_asked_rank_count(asked), 2);
    assert_int_equal(kvf_asked_status(asked, &rank), KVF_E_INVALID);
    assert_int_equal(rank, 1);
    assert_int_equal(reply_of(asked, 0).status, KVF_OK);
    assert_string_equal(reply_of(asked, 0).detail, "");
    assert_string_equal(reply_of(asked, 1).detail, "rank 1 will not");
    kvf_asked_rank none = {.struct_size = sizeof none};
    assert_fails(kvf_asked_reply(asked, 2, &none), KVF_E_RANGE, "rank is 2; engine P has 2 ranks");
    assert_fails(kvf_asked_reply(NULL, 0, &none), KVF_E_INVALID, "asked is NULL");
    assert_fails(kvf_asked_status(NULL, NULL), KVF_E_INVALID, "asked is NULL");
    kvf_asked_free(asked);
    close_scene(&s, PATIENT);
    assert_int_equal(s.p[0].commands, 2); /* each once, and "end" */
    assert_int_equal(s.p[1].commands, 2);
    assert_int_equal(s.d.commands, 1);
}

static void ranks_may_be_waited_for_for_ever(void **state) {
    (void)state;
    scene s;
    open_scene(&s, LOCAL);
    close_scene(&s, ASK(.timeout_ns = UINT64_MAX));
}

/* Takes and gives each agent's lock, as a thread sanitizer does not see that messages order what threads do. */
static void order_threads(const scene *s) {
    (void)world_stats(s->w.p.agents[0]);
    (void)world_stats(s->w.p.agents[1]);
    (void)world_stats(s->w.d.agents[0]);
}

static void a_request_moves_by_two_commands(void **state) {
    (void)state;
    scene s;
    open_scene(&s, LOCAL);
    world_fill(&s.w, &s.w.p, &s.p[0].request, 5);
    assert_true(world_wrong_cells(&s.w, &s.w.d, &s.d.request, 5) > 0); /* nothing is there yet */
    order_threads(&s);
    kvf_asked *asked = ask(&s.w.p.contact, COMMAND(.verb = KVF_COMMAND_HAND_OVER, .request = {"a", 1},
                                                   .peer = s.w.d.contact, .deadline_ns = PATIENCE_NS));
    assert_ok(kvf_asked_status(asked, NULL));
    for (uint32_t r = 0; r < 2; r++) {
        const kvf_asked_rank reply = reply_of(asked, r);
        assert_int_equal(reply.record_count, 1);
        assert_string_equal(reply.records[0].name, "tokens");
        assert_int_equal(reply.records[0].end, TOKENS);
        assert_int_equal(reply.records[0].rank, r);
    }
    assert_int_equal(
        ask_status(&s.w.d.contact, COMMAND(.verb = KVF_COMMAND_TAKE_OVER, .request = {"a", 1},
                                           .peer = s.w.p.contact, .records = reply_of(asked, 0).records,
                                           .record_count = 1, .deadline_ns = PATIENCE_NS)),
        KVF_OK);
    kvf_asked_free(asked);
    order_threads(&s);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.d.request, 5), 0);
    const world_cell at = {.group = 0, .layer = 1, .part = 0, .step = 3};
    world_flip(&s.w.d, &s.d.request, at);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.d.request, 5), 1);
    close_scene(&s, PATIENT);
}

static void what_is_not_kept_is_not_handed_over(void **state) {
    (void)state;
    scene s;
    open_scene(&s, LOCAL);
    kvf_asked *asked = ask(&s.w.p.contact, COMMAND(.verb = KVF_COMMAND_HAND_OVER, .request = {"b", 1},
                                                   .deadline_ns = PATIENCE_NS));
    assert_int_equal(kvf_asked_status(asked, NULL), KVF_E_NOT_FOUND);
    assert_string_equal(reply_of(asked, 0).detail, "no such request is kept");
    kvf_asked_free(asked);
    close_scene(&s, PATIENT);
}

static void a_drained_engine_says_so_and_takes_nothing_new(void **state) {
    (void)state;
    scene s;
    open_scene(&s, LOCAL);
    assert_int_equal(
        ask_status(&s.w.p.contact, COMMAND(.verb = KVF_COMMAND_DRAIN, .deadline_ns = PATIENCE_NS)), KVF_OK);
    for (uint32_t r = 0; r < 2; r++) {
        uint64_t ticket;
        assert_fails(kvf_agent_hold(s.w.p.agents[r], &s.p[r].request.request, &ticket), KVF_E_CANCELLED,
                     "drain");
    }
    close_scene(&s, PATIENT);
}

/* Longer than for a first sign of the ranks, as their agents reply 5 s after the deadline. How long a sign takes depends
 * on the machine, so the test tries longer and longer times. */
static void an_engine_that_does_not_reply_is_waited_for_until_the_deadline(void **state) {
    (void)state;
    scene s;
    open_scene(&s, LOCAL);
    const kvf_command *unknown = COMMAND(.verb = "what is this?", .deadline_ns = 50 * MS);
    bool waited = false;
    for (uint64_t time = SECOND; time <= 4 * SECOND && !waited; time *= 2) {
        kvf_asked *asked = NULL;
        if (kvf_ask(&s.w.p.contact, unknown, ASK(.timeout_ns = time), &asked))
            continue;
        assert_int_equal(kvf_asked_status(asked, NULL), KVF_E_TIMEOUT);
        waited = strcmp(reply_of(asked, 0).detail, "the engine has not replied in time") == 0 &&
                 strcmp(reply_of(asked, 1).detail, "the engine has not replied in time") == 0;
        kvf_asked_free(asked);
    }
    close_scene(&s, PATIENT);
    assert_true(waited);
}

static void a_command_names_another_engine_only_with_its_endpoint(void **state) {
    (void)state;
    static const char key[] = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7";
    const struct {
        kvf_contact peer;
        const char *whom;
    } cases[] = {{{.engine = "D", .endpoint = "tcp://127.0.0.1:1"}, "D, NULL"},
                 {{.endpoint = "tcp://127.0.0.1:1", .public_key = key},
                  "NULL, rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"},
                 {{.endpoint = "tcp://127.0.0.1:1"}, "NULL, NULL"},
                 {{.engine = "D", .public_key = key}, "NULL, NULL"}};
    scene s;
    open_scene(&s, LOCAL);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        kvf_asked *asked = ask(
            &s.w.d.contact, COMMAND(.verb = "with whom?", .peer = cases[i].peer, .deadline_ns = PATIENCE_NS));
        assert_string_equal(reply_of(asked, 0).detail, cases[i].whom);
        kvf_asked_free(asked);
    }
    close_scene(&s, PATIENT);
}

static void (*hears)(void *context, const kvf_letter *letter);

static void hear_twice(void *context, const kvf_letter *letter) {
    kvf_letter astray = *letter;
    astray.route = UINT64_MAX; /* of nobody who was asked */
    hears(context, &astray);
    hears(context, letter);
    hears(context, letter);
}

static kvf_status open_to_hear_twice(const kvf_link_options *options, kvf_link **out) {
    kvf_link_options twice = *options;
    hears = options->on_message;
    twice.on_message = hear_twice;
    return kvf_link_zmq.open(&twice, out);
}

static void a_rank_that_replies_twice_does_not_reply_for_another(void **state) {
    (void)state;
    scene s;
    kvf_link_table twice = kvf_link_zmq;
    kvf_asked *asked = NULL;
    twice.open = open_to_hear_twice;
    open_scene(&s, LOCAL);
    assert_ok(
        kvf_ask_over(&twice, &s.w.p.contact,
                     COMMAND(.verb = KVF_COMMAND_HAND_OVER, .request = {"b", 1}, .deadline_ns = PATIENCE_NS),
                     PATIENT, &asked));
    for (uint32_t r = 0; r < 2; r++)
        assert_int_equal(reply_of(asked, r).status, KVF_E_NOT_FOUND);
    kvf_asked_free(asked);
    close_scene(&s, PATIENT);
}

static uint32_t sent; /* over the link that was opened last: that of the command, after that of the visit */

static kvf_status open_to_count(const kvf_link_options *options, kvf_link **out) {
    sent = 0;
    return kvf_link_zmq.open(options, out);
}

static kvf_status send_and_count(kvf_link *link, kvf_route route, const void *data, size_t bytes) {
    sent++;
    return kvf_link_zmq.send(link, route, data, bytes);
}

/* How long a visit takes depends on the machine, so the test waits longer and longer for a rank that is not there. The
 * other rank replies after 5 s: until then the command is repeated after 50, 150, 350 and 750 ms, and so on. */
static void a_rank_from_which_nothing_is_heard_is_named(void **state) {
    (void)state;
    world w;
    world_open_model(&w, attention(2, 4, 8), ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 8}),
                     ENGINE(.name = "D", .all = {.block_count = 8}), LOCAL);
    kvf_agent_close(w.p.agents[1]);
    w.p.agents[1] = NULL;
    kvf_link_table counted = kvf_link_zmq;
    counted.open = open_to_count;
    counted.send = send_and_count;
    const kvf_command *nothing = COMMAND(.verb = "nothing", .deadline_ns = MS);
    kvf_asked *asked = NULL;
    for (uint64_t time = 200 * MS; time <= PATIENCE_NS && !asked; time *= 2)
        (void)kvf_ask_over(&counted, &w.p.contact, nothing, ASK(.timeout_ns = time), &asked);
    assert_non_null(asked);
    assert_in_range(sent, 8, 50); /* 9 to the one, 3 to the other */
    assert_int_equal(reply_of(asked, 1).status, KVF_E_TIMEOUT);
    assert_non_null(strstr(reply_of(asked, 1).detail, "no reply within "));
    kvf_asked_free(asked);
    world_close(&w);
}

static uint32_t opened; /* links: that of the visit, and that of the command */

static kvf_status open_one_more(const kvf_link_options *options, kvf_link **out) {
    opened++;
    return kvf_link_zmq.open(options, out);
}

static kvf_status lose_commands(kvf_link *link, kvf_route route, const void *data, size_t bytes) {
    return opened > 1 ? KVF_OK : kvf_link_zmq.send(link, route, data, bytes);
}

static uint32_t rounds;

static void count_round(kvf_link *link, bool *more) {
    rounds++;
    kvf_link_zmq.progress(link, more);
}

static kvf_asked *ask_while_commands_are_lost(void) {
    world w;
    world_open_model(&w, attention(2, 4, 8), ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 8}),
                     ENGINE(.name = "D", .all = {.block_count = 8}), LOCAL);
    kvf_link_table losing = kvf_link_zmq;
    losing.open = open_one_more;
    losing.send = lose_commands;
    losing.progress = count_round;
    kvf_asked *asked = NULL;
    for (uint64_t time = 200 * MS; time <= PATIENCE_NS && !asked; time *= 2) {
        opened = rounds = 0;
        (void)kvf_ask_over(&losing, &w.p.contact, COMMAND(.verb = "nothing"), ASK(.timeout_ns = time),
                           &asked);
    }
    world_close(&w);
    assert_non_null(asked);
    return asked;
}

static void all_ranks_from_which_nothing_is_heard_are_named(void **state) {
    (void)state;
    kvf_asked *asked = ask_while_commands_are_lost();
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(reply_of(asked, r).status, KVF_E_TIMEOUT);
        assert_non_null(strstr(reply_of(asked, r).detail, "no reply within "));
        assert_non_null(strstr(reply_of(asked, r).detail, "its process is stopped or busy"));
    }
    kvf_asked_free(asked);
}

static void who_waits_for_replies_sleeps_meanwhile(void **state) {
    (void)state;
    kvf_asked_free(ask_while_commands_are_lost());
    assert_in_range(rounds, 1, 500);
}

static void (*breaks)(void *context, kvf_route route, kvf_status status, const char *detail);

static bool heard_again; /* also after the link has broken */
static kvf_route broken[2];

/* Breaks each link once. */
static void hear_and_break(void *context, const kvf_letter *letter) {
    const bool again = letter->route == broken[0] || letter->route == broken[1];
    if (!again || heard_again)
        hears(context, letter);
    if (again)
        return;
    broken[broken[0] != 0] = letter->route;
    breaks(context, letter->route, KVF_E_IO, "nobody is there");
}

static kvf_status open_to_hear_and_break(const kvf_link_options *options, kvf_link **out) {
    kvf_link_options breaking = *options;
    hears = options->on_message;
    breaks = options->on_broken;
    if (++opened > 1)
        breaking.on_message = hear_and_break;
    return kvf_link_zmq.open(&breaking, out);
}

/* The first that is heard of each is that it has the command. */
static kvf_asked *ask_while_links_break(const scene *s, bool again, const kvf_command *command) {
    kvf_link_table breaking = kvf_link_zmq;
    kvf_asked *asked = NULL;
    breaking.open = open_to_hear_and_break;
    opened = 0;
    heard_again = again;
    broken[0] = broken[1] = 0;
    assert_ok(kvf_ask_over(&breaking, &s->w.p.contact, command, PATIENT, &asked));
    return asked;
}

static void ranks_that_are_away_for_a_moment_are_waited_for(void **state) {
    (void)state;
    scene s;
    open_scene(&s, LOCAL);
    kvf_asked *asked =
        ask_while_links_break(&s, true, COMMAND(.verb = "rank 1 refuses", .deadline_ns = PATIENCE_NS));
    assert_int_equal(reply_of(asked, 0).status, KVF_OK);
    assert_int_equal(reply_of(asked, 1).status, KVF_E_INVALID);
    kvf_asked_free(asked);
    close_scene(&s, PATIENT);
}

static void ranks_that_end_with_the_command_are_not_waited_for(void **state) {
    (void)state;
    scene s;
    open_scene(&s, LOCAL);
    kvf_asked *asked =
        ask_while_links_break(&s, false, COMMAND(.verb = "what is this?", .deadline_ns = 50 * MS));
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(reply_of(asked, r).status, KVF_E_PEER_LOST);
        assert_string_equal(reply_of(asked, r).detail, "it ended before it had replied");
    }
    kvf_asked_free(asked);
    close_scene(&s, PATIENT);
}

static void a_key_without_the_right_is_refused_by_each_rank(void **state) {
    (void)state;
    char engine[2][41], operators[2][41], other[2][41];
    assert_ok(kvf_agent_make_keys(engine[0], engine[1]));
    assert_ok(kvf_agent_make_keys(operators[0], operators[1]));
    assert_ok(kvf_agent_make_keys(other[0], other[1]));
    const kvf_key_grant grants[] = {
        {.struct_size = sizeof *grants, .public_key = operators[0], .commands = true},
        {.struct_size = sizeof *grants, .public_key = engine[0]},
        {.struct_size = sizeof *grants, .public_key = other[0]}};
    scene s;
    open_scene(&s,
               OPTIONS(.public_key = engine[0], .secret_key = engine[1], .grants = grants, .grant_count = 3));
    const kvf_ask_options *by_other =
        ASK(.public_key = other[0], .secret_key = other[1], .timeout_ns = PATIENCE_NS);
    const kvf_ask_options *by_operator =
        ASK(.public_key = operators[0], .secret_key = operators[1], .timeout_ns = PATIENCE_NS);
    kvf_asked *asked = ask_with(by_other, &s.w.p.contact, COMMAND(.verb = "end", .deadline_ns = PATIENCE_NS));
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(reply_of(asked, r).status, KVF_E_PERMISSION);
        assert_non_null(strstr(reply_of(asked, r).detail, "does not allow this key to give commands"));
    }
    kvf_asked_free(asked);
    /* A rank that does not even let it connect. */
    assert_ok(kvf_agent_withdraw_key(s.w.p.agents[1], other[0]));
    asked = ask_with(by_other, &s.w.p.contact, COMMAND(.verb = "end", .deadline_ns = PATIENCE_NS));
    assert_int_equal(reply_of(asked, 1).status, KVF_E_PERMISSION);
    assert_non_null(strstr(reply_of(asked, 1).detail, "key"));
    assert_null(strstr(reply_of(asked, 1).detail, "give commands"));
    kvf_asked_free(asked);
    close_scene(&s, by_operator);
    assert_int_equal(s.p[0].commands, 1); /* the operator's "end" alone */
}

static void what_is_no_command_is_refused_before_anyone_is_asked(void **state) {
    (void)state;
    const kvf_contact nobody = {.endpoint = "tcp://127.0.0.1:1"};
    static const uint8_t data[100000];
    const kvf_record large = {.name = "large", .data = data, .size = sizeof data};
    kvf_asked *asked = NULL;
    assert_fails(kvf_ask(&nobody, NULL, NULL, &asked), KVF_E_INVALID, "command is NULL");
    assert_fails(kvf_ask(&nobody, COMMAND(.verb = "drain"), NULL, NULL), KVF_E_INVALID, "out is NULL");
    assert_fails(kvf_ask(&nobody, COMMAND(.verb = ""), NULL, &asked), KVF_E_RANGE, "verb");
    assert_fails(kvf_ask(&nobody, COMMAND(.verb = "a\nb"), NULL, &asked), KVF_E_RANGE, "verb");
    assert_fails(kvf_ask(&nobody, COMMAND(.verb = "drain", .request = {data, 1025}), NULL, &asked),
                 KVF_E_RANGE, "request");
    assert_fails(
        kvf_ask(&nobody, COMMAND(.verb = "drain", .records = &large, .record_count = 1), NULL, &asked),
        KVF_E_RANGE, "allowed: up to 65536");
    assert_fails(kvf_ask(&nobody, COMMAND(.verb = "drain"), ASK(.timeout_ns = 50 * MS), &asked),
                 KVF_E_TIMEOUT, "127.0.0.1:1");
    assert_null(asked);
    kvf_asked_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        /* first: nothing else may have prepared the process for it */
        cmocka_unit_test(what_is_no_command_is_refused_before_anyone_is_asked),
        cmocka_unit_test(every_rank_is_asked_and_replies),
        cmocka_unit_test(ranks_may_be_waited_for_for_ever),
        cmocka_unit_test(a_request_moves_by_two_commands),
        cmocka_unit_test(what_is_not_kept_is_not_handed_over),
        cmocka_unit_test(a_drained_engine_says_so_and_takes_nothing_new),
        cmocka_unit_test(an_engine_that_does_not_reply_is_waited_for_until_the_deadline),
        cmocka_unit_test(a_command_names_another_engine_only_with_its_endpoint),
        cmocka_unit_test(a_rank_that_replies_twice_does_not_reply_for_another),
        cmocka_unit_test(a_rank_from_which_nothing_is_heard_is_named),
        cmocka_unit_test(all_ranks_from_which_nothing_is_heard_are_named),
        cmocka_unit_test(who_waits_for_replies_sleeps_meanwhile),
        cmocka_unit_test(ranks_that_are_away_for_a_moment_are_waited_for),
        cmocka_unit_test(ranks_that_end_with_the_command_are_not_waited_for),
        cmocka_unit_test(a_key_without_the_right_is_refused_by_each_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
