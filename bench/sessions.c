/*
 * The cost of sessions: meeting 1,000 peers, keeping 10,000 leases alive, and small requests between two
 * processes; each compared with ZeroMQ alone, in the same run, with messages of the same sizes in the same
 * pattern. And how long calls wait for the agent's own thread, and pulls for the engine's own loops.
 */
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include <zmq.h>

#include "agent/session.h"
#include "second_process.h"

#define PEERS 1000u
#define MEETINGS 5u /* rounds */
#define LEASES 10000u
#define BEATS 15u
#define SETTLED_NS 10000000u
#define SINGLE 2000u /* requests one after the other */
#define MANY 10000u  /* requests, of which up to BENCH_BLOCKS are under way */
#define MANY_ROUNDS 5u
#define CALLERS ((size_t)4)
#define CALLS 2000u /* of each caller in a round */
#define CALL_ROUNDS 5u
#define LOOP_ROUNDS 7u
#define LOOP_PULLS 15u /* a round */

/* ---- meeting --------------------------------------------------------------------------------- */

/* A peer sends, one after the other: HELLO for the ranks, HELLO for the card, JOIN. */
#define STEPS 3u

typedef struct crowd {
    void *zmq;
    void *sockets[PEERS];
    uint32_t steps[PEERS]; /* answers received */
    kvf_wire_buffer shard;
    const kvf_agent *like; /* the agent that the peers imitate */
    bool plain;            /* sends meaningless messages to an echo */
    uint32_t plain_bytes;
    uint64_t sent, received, messages;
} crowd;

/* Each peer is a separate engine of one rank, because no two processes may speak for one rank. */
static void say(crowd *c, uint32_t peer, const uint8_t *session) {
    const kvf_agent *like = c->like;
    uint32_t step = c->steps[peer];
    uint8_t secret[KVF_WIRE_SECRET_BYTES] = {1};
    char name[16];
    (void)snprintf(name, sizeof name, "D%u", peer);
    memcpy(secret + 1, &peer, sizeof peer);
    const uint64_t incarnation = kvf_wire_incarnation(secret);
    kvf_message message = {.kind = KVF_MESSAGE_HELLO,
                           .hello = {.engine = name,
                                     .incarnation = incarnation,
                                     .rank_count = 1,
                                     .wants_ranks = step == 0,
                                     .wants_card = step == 1,
                                     .clock_ns = kvf_now(&kvf_monotonic)}};
    memcpy(message.digest, like->digest, sizeof message.digest);
    if (message.hello.wants_card)
        memcpy(message.hello.secret, secret, sizeof message.hello.secret);
    kvf_wire_buffer own = {0}, bytes = {0};
    if (step == 2 && !c->plain) {
        kvf_introduction intro = {.engine = name,
                                  .incarnation = incarnation,
                                  .rank_count = 1,
                                  .endpoint = "tcp://127.0.0.1:5555",
                                  .public_key = "",
                                  .shard = {c->shard.data, c->shard.size}};
        memcpy(intro.digest, like->digest, sizeof intro.digest);
        bench_must(kvf_wire_encode_introduction(&intro, &own));
        message = (kvf_message){.kind = KVF_MESSAGE_CALL,
                                .call = {.number = 1,
                                         .kind = KVF_CALL_JOIN,
                                         .generation = 1,
                                         .introduction = {own.data, own.size},
                                         .card = {like->card, like->card_bytes}}};
        if (session)
            memcpy(message.call.session, session, sizeof message.call.session);
    }
    if (c->plain) {
        bytes.data = kvf_alloc0(c->plain_bytes, 1);
        bytes.size = c->plain_bytes;
    } else {
        bench_must(kvf_wire_encode(&message, &bytes));
    }
    bench_require(zmq_send(c->sockets[peer], bytes.data, bytes.size, 0) >= 0, "zmq_send");
    c->sent += bytes.size;
    c->messages++;
    kvf_wire_buffer_free(&own);
    kvf_wire_buffer_free(&bytes);
}

/* Ends the bench unless a peer got a WELCOME, or to its JOIN an answer with status 0. */
static void require_good(const kvf_message *message, uint32_t peer, bool joins) {
    bool refused = message->kind == KVF_MESSAGE_REFUSED, answered = message->kind == KVF_MESSAGE_ANSWER;
    if (joins ? answered && !message->answer.status : message->kind == KVF_MESSAGE_WELCOME)
        return;
    kvf_status status = refused ? message->refused.status : answered ? message->answer.status : KVF_OK;
    const char *detail = refused ? message->refused.detail : answered ? message->answer.detail : "";
    char words[512];
    (void)snprintf(words, sizeof words, "peer %u was refused: %s, %s, %s", peer,
                   kvf_message_kind_name(message->kind), kvf_status_name(status), detail);
    bench_require(false, words);
}

/* Takes one answer to a peer, if there is one, and sends the peer's next message. */
static bool hear(crowd *c, uint32_t peer) {
    static unsigned char data[1 << 20];
    int bytes = zmq_recv(c->sockets[peer], data, sizeof data, ZMQ_DONTWAIT);
    if (bytes < 0)
        return false;
    c->received += (uint64_t)bytes;
    kvf_message message = {0};
    if (!c->plain) {
        bench_must(kvf_wire_open((kvf_bytes){data, (size_t)bytes}, &message));
        bench_must(kvf_wire_read(&message));
        require_good(&message, peer, c->steps[peer] == 2);
    }
    if (++c->steps[peer] < STEPS)
        say(c, peer, message.welcome.session);
    kvf_message_free(&message);
    return true;
}

/* Connects all peers and lets them meet. Returns seconds. */
static double meet(crowd *c, const char *endpoint) {
    const int none = 0;
    c->zmq = zmq_ctx_new();
    (void)zmq_ctx_set(c->zmq, ZMQ_MAX_SOCKETS, 2 * PEERS);
    uint64_t begun = bench_now_ns();
    for (uint32_t i = 0; i < PEERS; i++) {
        c->sockets[i] = zmq_socket(c->zmq, ZMQ_DEALER);
        bench_require(c->sockets[i] && zmq_setsockopt(c->sockets[i], ZMQ_LINGER, &none, sizeof none) == 0 &&
                          zmq_connect(c->sockets[i], endpoint) == 0,
                      "a peer cannot connect");
        say(c, i, NULL);
    }
    uint32_t done = 0;
    while (done < PEERS)
        for (uint32_t i = 0; i < PEERS; i++)
            if (c->steps[i] < STEPS && hear(c, i))
                done += c->steps[i] == STEPS;
    return (double)(bench_now_ns() - begun) / 1e9;
}

static void disperse(crowd *c) {
    for (uint32_t i = 0; i < PEERS; i++)
        (void)zmq_close(c->sockets[i]);
    (void)zmq_ctx_term(c->zmq);
}

static void bench_meetings(bench_report *report) {
    double seconds[MEETINGS], plain[MEETINGS], live = 0, resident = 0, sent = 0, received = 0;
    kvf_engine *engine = bench_engine("D", 32, 8, 128, 4);
    kvf_agent *like = bench_agent(engine);
    for (uint32_t round = 0; round < MEETINGS; round++) {
        static crowd c, e;
        c = (crowd){.like = like};
        bench_must(kvf_wire_encode_shard(kvf_engine_shard(engine, 0), NULL, &c.shard));
        bench_board *producer = bench_second_start(32);
        bench_second_order(producer, BENCH_COUNT_MEMORY, 0, 0);
        double live_before = (double)producer->live_bytes, resident_before = (double)producer->resident_bytes;
        seconds[round] = meet(&c, producer->endpoint);
        bench_second_order(producer, BENCH_COUNT_MEMORY, 0, 0);
        live = ((double)producer->live_bytes - live_before) / PEERS;
        resident = ((double)producer->resident_bytes - resident_before) / PEERS;
        disperse(&c);
        bench_second_end(producer);
        kvf_wire_buffer_free(&c.shard);
        sent = (double)c.sent / PEERS;
        received = (double)c.received / PEERS;

        e = (crowd){.like = like, .plain = true, .plain_bytes = (uint32_t)(c.sent / c.messages)};
        bench_board *echo = bench_second_start(0);
        echo->echo_bytes = (uint32_t)(c.received / c.messages);
        plain[round] = meet(&e, echo->endpoint);
        disperse(&e);
        bench_second_end(echo);
    }
    bench_spread ours = bench_spread_of(seconds, MEETINGS), zmq = bench_spread_of(plain, MEETINGS);
    bench_table(report, "1,000 peers meet one agent: ranks, card and JOIN",
                (const char *[]){"ms", "low", "high", "ZeroMQ alone", "B to it", "B from it", "B kept a peer",
                                 "resident B", NULL});
    bench_number(report, 0, ours.median * 1e3);
    bench_number(report, 0, ours.low * 1e3);
    bench_number(report, 0, ours.high * 1e3);
    bench_number(report, 0, zmq.median * 1e3);
    bench_number(report, 0, sent);
    bench_number(report, 0, received);
    bench_number(report, 0, live);
    bench_number(report, 0, resident);
    bench_note(
        report,
        "Bytes are those of the messages, a peer; kept: allocated by the library, 32 layers; resident: "
        "with ZeroMQ's own.");
    kvf_agent_close(like);
    kvf_engine_free(engine);
}

/* ---- heartbeats ------------------------------------------------------------------------------ */

static uint64_t sent_bytes, sent_count;

static kvf_status count_sent(kvf_link *link, kvf_route route, const void *data, size_t bytes) {
    sent_bytes = bytes;
    sent_count++;
    return kvf_link_zmq.send(link, route, data, bytes);
}

/* Nanoseconds of the progress call that takes in a message. */
static double take_one(kvf_agent *agent) {
    for (uint64_t before = agent->stats.messages_received;;) {
        bool busy;
        uint64_t begun = bench_now_ns();
        bench_must(kvf_agent_progress(agent, &busy));
        if (agent->stats.messages_received > before)
            return (double)(bench_now_ns() - begun);
    }
}

/* Waits until all calls are answered and no messages come for a while, so that none disturbs the measurement. */
static void settle(kvf_agent *p, kvf_agent *d) {
    uint64_t got = 0, since = bench_now_ns();
    while (d->all_sessions->calls || p->all_sessions->calls || bench_now_ns() < since + SETTLED_NS) {
        bench_must(kvf_agent_progress(p, NULL));
        bench_must(kvf_agent_progress(d, NULL));
        uint64_t now = p->stats.messages_received + d->stats.messages_received;
        since = now == got ? since : bench_now_ns();
        got = now;
    }
}

/* One heartbeat, at once: the consumer sends it, the producer answers, the consumer takes the answer. */
static void beat(kvf_agent *p, kvf_agent *d, double *say_ns, double *answer_ns, double *take_ns,
                 uint64_t *bytes, uint64_t *answer_bytes) {
    kvf_session *session = d->all_sessions;
    bool busy;
    session->next_beat = 0;
    kvf_sessions_due(d);
    uint64_t before = sent_count, begun = bench_now_ns();
    bench_must(kvf_agent_progress(d, &busy));
    *say_ns = (double)(bench_now_ns() - begun);
    bench_require(sent_count == before + 1, "no heartbeat was sent");
    *bytes = sent_bytes;
    *answer_ns = take_one(p);
    *answer_bytes = sent_bytes;
    *take_ns = take_one(d);
}

static double plain_trip(uint64_t bytes, uint64_t answer_bytes) {
    bench_board *echo = bench_second_start(0);
    echo->echo_bytes = (uint32_t)answer_bytes;
    void *zmq = zmq_ctx_new(), *dealer = zmq_socket(zmq, ZMQ_DEALER);
    bench_require(dealer && zmq_connect(dealer, echo->endpoint) == 0, "no ZeroMQ socket");
    unsigned char *data = bench_alloc(1u << 20, 1);
    double trips[BEATS + 5];
    memset(data, 0, 1u << 20);
    for (uint32_t i = 0; i < BEATS + 5; i++) {
        uint64_t begun = bench_now_ns();
        (void)zmq_send(dealer, data, bytes, 0);
        (void)zmq_recv(dealer, data, 1u << 20, 0);
        trips[i] = (double)(bench_now_ns() - begun);
    }
    (void)zmq_close(dealer);
    (void)zmq_ctx_term(zmq);
    bench_second_end(echo);
    free(data);
    return bench_spread_of(trips + 5, BEATS).median;
}

static void bench_beats_of(bench_report *report, bool expectations) {
    kvf_engine *of_p = bench_engine("P", 1, 1, 8, LEASES), *of_d = bench_engine("D", 1, 1, 8, LEASES);
    kvf_link_table counting = kvf_link_zmq;
    counting.send = count_sent;
    kvf_agent *p = bench_agent_in(&counting, of_p, &(kvf_agent_options){0});
    kvf_agent *d = bench_agent_in(&counting, of_d, &(kvf_agent_options){0});
    bool busy;
    for (uint32_t i = 0; i < LEASES; i++) {
        bench_ask ask;
        const kvf_agent_request *request = bench_ask_of(&ask, i, i, kvf_agent_endpoint(p));
        if (!expectations)
            bench_must(kvf_agent_hold(p, request, NULL));
        if (!expectations)
            ask.request.groups = NULL;
        bench_must(expectations ? kvf_agent_expect(d, request, NULL) : kvf_agent_pull(d, request, NULL));
    }
    while (expectations ? !p->all_sessions || p->all_sessions->flow_count < LEASES
                        : p->stats.leases_now < LEASES) {
        bench_must(kvf_agent_progress(p, &busy));
        bench_must(kvf_agent_progress(d, &busy));
    }
    settle(p, d);
    double say_ns[BEATS], answer_ns[BEATS], take_ns[BEATS];
    uint64_t bytes = 0, answer_bytes = 0;
    for (uint32_t i = 0; i < BEATS; i++, settle(p, d))
        beat(p, d, &say_ns[i], &answer_ns[i], &take_ns[i], &bytes, &answer_bytes);
    bench_text(report, expectations ? "expectations" : "leases");
    bench_number(report, 2, bench_spread_of(say_ns, BEATS).median / 1e6);
    bench_number(report, 2, bench_spread_of(answer_ns, BEATS).median / 1e6);
    bench_number(report, 2, bench_spread_of(take_ns, BEATS).median / 1e6);
    bench_number(report, 0, (double)bytes);
    bench_number(report, 0, (double)answer_bytes);
    bench_number(report, 2, plain_trip(bytes, answer_bytes) / 1e6);
    kvf_agent_close(d);
    kvf_agent_close(p);
    kvf_engine_free(of_d);
    kvf_engine_free(of_p);
}

static void bench_beats(bench_report *report) {
    bench_table(report, "A heartbeat tick with 10,000 of them alive, ms",
                (const char *[]){"alive", "consumer's tick", "producer's answer", "consumer takes it", "B",
                                 "B back", "ZeroMQ trip", NULL});
    bench_beats_of(report, false);
    bench_beats_of(report, true);
}

/* ---- requests -------------------------------------------------------------------------------- */

typedef struct consumer {
    kvf_agent *agent;
    const char *endpoint;
    bool push;
    uint32_t next; /* number of the next request */
    uint32_t started, ended;
    uint32_t blocks[BENCH_BLOCKS], block_count;          /* free ones */
    uint64_t tickets[BENCH_BLOCKS], begun[BENCH_BLOCKS]; /* by block */
} consumer;

static void start_one(consumer *c) {
    bench_ask ask;
    uint32_t block = c->blocks[--c->block_count];
    const kvf_agent_request *request = bench_ask_of(&ask, c->next + c->started++, block, c->endpoint);
    c->begun[block] = bench_now_ns();
    bench_must((c->push ? kvf_agent_expect : kvf_agent_pull)(c->agent, request, &c->tickets[block]));
}

/* Takes the requests that have ended; `latencies` may be NULL. */
static void take_ended(consumer *c, double *latencies) {
    kvf_event event = {.struct_size = sizeof event};
    (void)kvf_agent_wait(c->agent, 10 * KVF_SECOND);
    while (kvf_agent_next_event(c->agent, &event) == KVF_OK) {
        bench_require(event.kind == KVF_EVENT_DONE, "a request of the consumer failed");
        for (uint32_t b = 0; b < BENCH_BLOCKS; b++) {
            if (c->tickets[b] != event.ticket)
                continue;
            if (latencies)
                latencies[c->ended] = (double)(bench_now_ns() - c->begun[b]);
            c->tickets[b] = 0;
            c->blocks[c->block_count++] = b;
            break;
        }
        c->ended++;
    }
}

/* Runs `count` requests with up to `window` under way. Returns seconds. */
static double run(consumer *c, bench_board *board, uint32_t count, uint32_t window, double *latencies) {
    bench_second_order(board, c->push ? BENCH_PUSH : BENCH_HOLD, c->next, count);
    c->started = c->ended = 0;
    uint64_t begun = bench_now_ns();
    while (c->ended < count) {
        while (c->started < count && c->started - c->ended < window)
            start_one(c);
        take_ended(c, latencies);
    }
    c->next += count;
    return (double)(bench_now_ns() - begun) / 1e9;
}

/* `beside`: how many other requests are held meanwhile. */
static void bench_requests_of(bench_report *report, uint32_t layers, bool push, uint32_t beside) {
    static double latencies[SINGLE];
    kvf_engine *engine = bench_engine("D", layers, 8, 128, BENCH_BLOCKS);
    bench_board *board = bench_second_start(layers);
    static consumer c;
    c = (consumer){.agent = bench_agent(engine), .endpoint = board->endpoint, .push = push};
    while (c.block_count < BENCH_BLOCKS) {
        c.blocks[c.block_count] = c.block_count;
        c.block_count++;
    }
    (void)run(&c, board, 200, BENCH_BLOCKS, NULL); /* they meet */
    if (beside)
        bench_second_order(board, BENCH_HOLD, 1u << 20, beside);
    (void)run(&c, board, SINGLE, 1, latencies);
    double seconds[MANY_ROUNDS];
    for (uint32_t round = 0; round < MANY_ROUNDS; round++)
        seconds[round] = run(&c, board, MANY, BENCH_BLOCKS, NULL);
    double median = bench_spread_of(latencies, SINGLE).median;
    bench_text(report, push ? "push" : beside ? "pull, 10,000 held beside" : "pull");
    bench_text(report, bench_bytes(65536ull * layers));
    bench_number(report, 0, MANY / bench_spread_of(seconds, MANY_ROUNDS).median);
    bench_number(report, 1, median / 1e3);
    bench_number(report, 1, latencies[SINGLE * 99 / 100] / 1e3);
    kvf_agent_close(c.agent);
    bench_second_end(board);
    kvf_engine_free(engine);
}

/* The same pattern with bare messages of 128 bytes, there and back. */
static void bench_plain_requests(bench_report *report) {
    static double latencies[SINGLE];
    unsigned char data[128] = {0};
    bench_board *echo = bench_second_start(0);
    echo->echo_bytes = sizeof data;
    void *zmq = zmq_ctx_new(), *dealer = zmq_socket(zmq, ZMQ_DEALER);
    bench_require(dealer && zmq_connect(dealer, echo->endpoint) == 0, "no ZeroMQ socket");
    for (uint32_t i = 0; i < SINGLE; i++) {
        uint64_t begun = bench_now_ns();
        (void)zmq_send(dealer, data, sizeof data, 0);
        (void)zmq_recv(dealer, data, sizeof data, 0);
        latencies[i] = (double)(bench_now_ns() - begun);
    }
    uint64_t begun = bench_now_ns();
    for (uint32_t sent = 0, got = 0; got < MANY;) {
        for (; sent < MANY && sent - got < BENCH_BLOCKS; sent++)
            (void)zmq_send(dealer, data, sizeof data, 0);
        (void)zmq_recv(dealer, data, sizeof data, 0);
        got++;
    }
    double seconds = (double)(bench_now_ns() - begun) / 1e9;
    double median = bench_spread_of(latencies, SINGLE).median;
    bench_text(report, "ZeroMQ trip");
    bench_text(report, "128 B");
    bench_number(report, 0, MANY / seconds);
    bench_number(report, 1, median / 1e3);
    bench_number(report, 1, latencies[SINGLE * 99 / 100] / 1e3);
    (void)zmq_close(dealer);
    (void)zmq_ctx_term(zmq);
    bench_second_end(echo);
}

static void bench_requests(bench_report *report) {
    bench_table(report, "Requests of one block between two processes",
                (const char *[]){"way", "block", "a second", "p50 us", "p99 us", NULL});
    bench_plain_requests(report);
    for (uint32_t layers = 1; layers <= 32; layers += 31)
        for (int push = 0; push < 2; push++)
            bench_requests_of(report, layers, push, 0);
    bench_requests_of(report, 1, false, LEASES);
    bench_note(report, "A second: up to 128 under way, of 10,000 that the producer has ready, median of "
                       "rounds. p50 and p99: one after "
                       "the other, from the request to its event.");
}

/* ---- callers --------------------------------------------------------------------------------- */

/* The calls of four threads, cheap in themselves. A look needs the lock, a cancel the transport too. */
typedef enum calling { LOOKS, CANCELS, CALLINGS } calling;

typedef struct caller {
    kvf_agent *agent;
    calling what;
    pthread_t thread;
    double *nanoseconds; /* [CALLS] */
} caller;

/* Calls CALLS times, with a pause between calls. */
static void *call_often(void *context) {
    const caller *self = context;
    for (uint32_t i = 0; i < CALLS; i++) {
        kvf_block_state state;
        uint64_t begun = bench_now_ns();
        if (self->what == LOOKS)
            (void)kvf_agent_block(self->agent, 0, 0, &state, NULL);
        else
            (void)kvf_agent_cancel(self->agent, UINT64_MAX);
        self->nanoseconds[i] = (double)(bench_now_ns() - begun);
        (void)nanosleep(&(struct timespec){0, 20000}, NULL);
    }
    return NULL;
}

static atomic_bool callers_are_done;

static void *call_all(void *context) {
    caller *callers = context;
    for (uint32_t i = 0; i < CALLERS; i++)
        bench_require(pthread_create(&callers[i].thread, NULL, call_often, &callers[i]) == 0, "no thread");
    for (uint32_t i = 0; i < CALLERS; i++)
        (void)pthread_join(callers[i].thread, NULL);
    atomic_store(&callers_are_done, true);
    return NULL;
}

/* An agent with a thread of its own, and the work of that thread while others call the agent. */
typedef struct callee {
    const char *name;
    bool reads, verifies;
    consumer consumer;
    bench_board *board;
    double p50[CALL_ROUNDS], p99[CALL_ROUNDS], longest[CALL_ROUNDS], pulls[CALL_ROUNDS];
} callee;

static void start_callee(callee *c, const kvf_engine *engine) {
    const kvf_agent_options more = {.own_thread = true, .verify = c->verifies};
    c->board = bench_second_start(32);
    c->consumer = (consumer){.agent = bench_agent_in(NULL, engine, &more), .endpoint = c->board->endpoint};
    while (c->consumer.block_count < BENCH_BLOCKS) {
        c->consumer.blocks[c->consumer.block_count] = c->consumer.block_count;
        c->consumer.block_count++;
    }
    (void)run(&c->consumer, c->board, 200, BENCH_BLOCKS, NULL); /* they meet */
}

static void call_it(callee *c, calling what, uint32_t round) {
    static double all[CALLERS * CALLS];
    caller callers[CALLERS];
    pthread_t thread;
    for (uint32_t i = 0; i < CALLERS; i++)
        callers[i] =
            (caller){.agent = c->consumer.agent, .what = what, .nanoseconds = all + (size_t)i * CALLS};
    atomic_store(&callers_are_done, false);
    bench_require(pthread_create(&thread, NULL, call_all, callers) == 0, "no thread");
    uint32_t pulled = 0;
    uint64_t begun = bench_now_ns();
    for (; c->reads && !atomic_load(&callers_are_done); pulled += BENCH_BLOCKS)
        (void)run(&c->consumer, c->board, BENCH_BLOCKS, BENCH_BLOCKS, NULL);
    double seconds = (double)(bench_now_ns() - begun) / 1e9;
    (void)pthread_join(thread, NULL);
    c->p50[round] = bench_spread_of(all, CALLERS * CALLS).median;
    c->p99[round] = all[CALLERS * CALLS / 100 * 99];
    c->longest[round] = all[CALLERS * CALLS - 1];
    c->pulls[round] = pulled / seconds;
}

static void report_calls(bench_report *report, callee *c, calling what, double idle_p99) {
    double p99 = bench_spread_of(c->p99, CALL_ROUNDS).median;
    bench_text(report, c->name);
    bench_text(report, what == LOOKS ? "look at a block" : "cancel");
    bench_number(report, 2, bench_spread_of(c->p50, CALL_ROUNDS).median / 1e3);
    bench_number(report, 1, p99 / 1e3);
    bench_number(report, 1, bench_spread_of(c->longest, CALL_ROUNDS).median / 1e3);
    bench_number(report, 1, p99 / idle_p99);
    bench_number(report, 0, bench_spread_of(c->pulls, CALL_ROUNDS).median);
}

static void bench_callers(bench_report *report) {
    static callee callees[] = {{.name = "idle"},
                               {.name = "reading 2 MiB blocks", .reads = true},
                               {.name = "and verifying", .reads = true, .verifies = true}};
    const size_t count = sizeof callees / sizeof *callees;
    kvf_engine *engine = bench_engine("D", 32, 8, 128, BENCH_BLOCKS);
    bench_table(report, "Four threads that call an agent with a thread of its own, at once",
                (const char *[]){"its thread", "call", "p50 us", "p99 us", "longest us", "p99 to idle",
                                 "pulls a second", NULL});
    for (size_t i = 0; i < count; i++)
        start_callee(&callees[i], engine);
    for (calling what = LOOKS; what < CALLINGS; what++) {
        for (uint32_t round = 0; round < CALL_ROUNDS; round++)
            for (size_t i = 0; i < count; i++)
                call_it(&callees[i], what, round);
        double idle_p99 = bench_spread_of(callees[0].p99, CALL_ROUNDS).median;
        for (size_t i = 0; i < count; i++)
            report_calls(report, &callees[i], what, idle_p99);
    }
    bench_note(report,
               "Medians of rounds that take turns. The threads share the processors with those that move.");
    for (size_t i = 0; i < count; i++) {
        kvf_agent_close(callees[i].consumer.agent);
        bench_second_end(callees[i].board);
    }
    kvf_engine_free(engine);
}

/* ---- loops of an engine's own ---------------------------------------------------------------- */

/* How both sides of a pull are driven. */
typedef struct loop {
    const char *name;
    int poll_ms; /* 0: by the agents' own threads */
    kvf_agent *p, *d;
    pthread_t thread; /* polls the producer */
    uint64_t last;    /* the ticket whose event ends the thread */
    uint32_t next;
    double ns[LOOP_ROUNDS];
} loop;

/* One turn of an engine's loop around an agent. Returns whether there was an event. */
static bool turn_loop(kvf_agent *agent, int poll_ms, kvf_event *event) {
    struct pollfd fd = {kvf_agent_event_fd(agent), POLLIN, 0};
    (void)poll(&fd, 1, poll_ms);
    bench_must(kvf_agent_progress(agent, NULL));
    return kvf_agent_next_event(agent, event) == KVF_OK;
}

static void *loop_of_producer(void *context) {
    const loop *l = context;
    kvf_event event = {.struct_size = sizeof event};
    for (bool over = false; !over;)
        for (bool more = turn_loop(l->p, l->poll_ms, &event); more && !over;
             more = kvf_agent_next_event(l->p, &event) == KVF_OK)
            over = event.ticket == l->last;
    return NULL;
}

static void start_loop(loop *l, const kvf_engine *of_p, const kvf_engine *of_d) {
    const kvf_agent_options more = {.transport = "shm", .own_thread = l->poll_ms == 0};
    bench_ask ask;
    l->p = bench_agent_in(NULL, of_p, &more);
    l->d = bench_agent_in(NULL, of_d, &more);
    for (uint32_t i = 0; i <= LOOP_ROUNDS * LOOP_PULLS + 1; i++)
        bench_must(kvf_agent_hold(l->p, bench_ask_of(&ask, i, i % BENCH_BLOCKS, ""), &l->last));
    if (l->poll_ms)
        bench_require(pthread_create(&l->thread, NULL, loop_of_producer, l) == 0, "no thread");
}

static double pull_in_loop(loop *l) {
    bench_ask ask;
    uint64_t ticket, begun = bench_now_ns();
    kvf_event event = {.struct_size = sizeof event};
    bench_must(kvf_agent_pull(l->d, bench_ask_of(&ask, l->next, 0, kvf_agent_endpoint(l->p)), &ticket));
    l->next++;
    while (event.ticket != ticket) {
        if (l->poll_ms) {
            (void)turn_loop(l->d, l->poll_ms, &event);
        } else {
            bench_must(kvf_agent_wait(l->d, 10 * KVF_SECOND));
            (void)kvf_agent_next_event(l->d, &event);
        }
    }
    bench_require(event.kind == KVF_EVENT_DONE, "a pull failed");
    return (double)(bench_now_ns() - begun);
}

static void end_loop(loop *l) {
    bench_must(kvf_agent_cancel(l->p, l->last));
    if (l->poll_ms)
        (void)pthread_join(l->thread, NULL);
    kvf_agent_close(l->d);
    kvf_agent_close(l->p);
}

static void bench_loops(bench_report *report) {
    static loop loops[] = {{.name = "threads of their own"},
                           {.name = "poll, 10 ms at most", .poll_ms = 10},
                           {.name = "poll, 1 s at most", .poll_ms = 1000},
                           {.name = "poll, 3 s at most", .poll_ms = 3000}};
    const size_t count = sizeof loops / sizeof *loops;
    kvf_engine *of_p = bench_engine("P", 32, 8, 128, BENCH_BLOCKS);
    kvf_engine *of_d = bench_engine("D", 32, 8, 128, BENCH_BLOCKS);
    bench_table(report, "A pull of 2 MiB on one host, by how both agents are made to work",
                (const char *[]){"way", "p50 us", "low", "high", "to own threads", NULL});
    for (size_t i = 0; i < count; i++) {
        start_loop(&loops[i], of_p, of_d);
        (void)pull_in_loop(&loops[i]); /* they meet */
    }
    for (uint32_t round = 0; round < LOOP_ROUNDS; round++)
        for (size_t i = 0; i < count; i++) {
            double ns[LOOP_PULLS];
            for (uint32_t k = 0; k < LOOP_PULLS; k++)
                ns[k] = pull_in_loop(&loops[i]);
            loops[i].ns[round] = bench_spread_of(ns, LOOP_PULLS).median;
        }
    double own = bench_spread_of(loops[0].ns, LOOP_ROUNDS).median;
    for (size_t i = 0; i < count; i++) {
        bench_spread spread = bench_spread_of(loops[i].ns, LOOP_ROUNDS);
        bench_text(report, loops[i].name);
        bench_number(report, 1, spread.median / 1e3);
        bench_number(report, 1, spread.low / 1e3);
        bench_number(report, 1, spread.high / 1e3);
        bench_number(report, 2, spread.median / own);
        if (spread.median >= 2 * own)
            bench_fail(report, "a pull by a loop of the engine's own takes twice what it takes by threads");
        end_loop(&loops[i]);
    }
    kvf_engine_free(of_d);
    kvf_engine_free(of_p);
}

int main(int argc, char **argv) {
    struct rlimit limit;
    bench_require(getrlimit(RLIMIT_NOFILE, &limit) == 0, "no limit of files");
    limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
    bench_report *report = bench_report_start("sessions", argc, argv);
    bench_requests(report);
    bench_callers(report);
    bench_loops(report);
    bench_beats(report);
    bench_meetings(report);
    return bench_report_end(report);
}
