#include "agent_peer.h"

#include "agent/agent.h"
#include "agent_net.h"
#include "agent_steps.h"

#define ANSWERS_GREETINGS 1u
#define ANSWERS_CALLS 2u
#define LIES 4u
#define FIRST_LEASE 1000u

fuzz_peer fuzz_peers[PEERS] = {{.name = "X"}, {.name = "Y"}, {.name = "Z"}};

static const char *const endpoints[PEERS] = {"tcp://127.0.0.1:20011", "tcp://127.0.0.1:20012",
                                             "tcp://127.0.0.1:20013"};

const char *fuzz_peer_endpoint(uint32_t which) {
    return endpoints[which];
}

/* ---- sending --------------------------------------------------------------------------------- */

static void send_bytes(fuzz_peer *p, kvf_route route) {
    p->said_to = route;
    if (p->link && route)
        (void)kvf_link_send(p->link, route, p->said.data, p->said.size);
}

/* Sends only well-formed messages: other targets send malformed ones. */
static void say(fuzz_peer *p, kvf_route route, kvf_message *message) {
    kvf_wire_buffer bytes = {0};
    memcpy(message->digest, fuzz_agents[0].agent->digest, sizeof message->digest);
    if (message->kind == KVF_MESSAGE_CALL || message->kind == KVF_MESSAGE_ANSWER)
        memset(message->digest, 0, sizeof message->digest);
    if (kvf_wire_encode(message, &bytes))
        return;
    kvf_wire_buffer_free(&p->said);
    p->said = bytes;
    send_bytes(p, route);
}

/* Blocks of a producer, or of an expectation: `count` blocks from `first` on, and a state. */
typedef struct tables {
    uint32_t ids[16], state[1];
    kvf_wire_group groups[GROUPS];
} tables;

static void make_tables(tables *t, uint32_t first, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        t->ids[i] = first + i == 2 * BLOCKS ? KVF_NO_BLOCK : first + i;
    t->state[0] = first;
    t->groups[0] = (kvf_wire_group){{t->ids, count, 0}, 0, (uint64_t)count * BLOCK_TOKENS};
    t->groups[1] = (kvf_wire_group){{t->state, count > 0, 0}, 0, count > 0};
}

/* ---- as a producer --------------------------------------------------------------------------- */

static void write_introduction(fuzz_peer *p) {
    const kvf_agent *model = fuzz_agents[1].agent;
    const kvf_wire_buffer *own = &model->introductions[0];
    kvf_introduction read;
    void *storage = NULL;
    FUZZ_MUST(!kvf_wire_decode_introduction((kvf_bytes){own->data, own->size}, &read, &storage));
    read.engine = p->name;
    read.incarnation = kvf_wire_incarnation(p->secret);
    read.endpoint = endpoints[p - fuzz_peers];
    FUZZ_MUST(!kvf_wire_encode_introduction(&read, &p->introduction));
    kvf_free(storage);
}

static void welcome(fuzz_peer *p, kvf_route route, const kvf_hello *asked, uint32_t session, uint32_t card) {
    const kvf_agent *owner = fuzz_agents[(card + 1) % AGENTS].agent; /* the peer claims its memory */
    const kvf_bytes all[] = {{p->introduction.data, p->introduction.size}};
    kvf_message message = {.kind = KVF_MESSAGE_WELCOME,
                           .welcome = {.engine = p->name,
                                       .incarnation = kvf_wire_incarnation(p->secret),
                                       .rank_count = 1,
                                       .lease_ns = 2 * FUZZ_SECOND,
                                       .clock_ns = net_now(),
                                       .facts = ""}};
    if (asked->wants_card) {
        memcpy(message.welcome.session, p->serves, sizeof p->serves);
        message.welcome.session[0] ^= (uint8_t)session;
        message.welcome.card = (kvf_bytes){owner->card, owner->card_bytes - card / 128};
    } else {
        message.welcome.introductions = all;
        message.welcome.introduction_count = 1;
    }
    say(p, route, &message);
}

/* Answers the latest call; bits of `odd` change the session, or the number. */
static void answer(fuzz_peer *p, fuzz_acquaintance *a, kvf_status status, uint32_t odd, uint32_t generation,
                   uint32_t first) {
    tables t;
    uint64_t gone[] = {FIRST_LEASE, KVF_EXPECTATION | generation};
    kvf_message message = {.kind = KVF_MESSAGE_ANSWER,
                           .answer = {.number = a->called + (odd >> 1 & 3),
                                      .kind = a->call,
                                      .status = status,
                                      .detail = status ? "the peer says no" : "",
                                      .clock_ns = net_now()}};
    memcpy(message.answer.session, p->serves, sizeof p->serves);
    message.answer.session[0] ^= odd & 1;
    if (a->call == KVF_CALL_ACQUIRE && !status) {
        make_tables(&t, first % BLOCKS, 1 + first / BLOCKS % 8);
        message.answer.generation = FIRST_LEASE + generation;
        message.answer.time_ns = 2 * FUZZ_SECOND;
        message.answer.groups = t.groups;
        message.answer.group_count = GROUPS;
    }
    if (a->call == KVF_CALL_BEAT && !status) {
        message.answer.time_ns = 2 * FUZZ_SECOND;
        message.answer.gone = gone;
        message.answer.gone_count = generation ? 2 : 0;
    }
    if (a->call == KVF_CALL_CHECKSUM && !status) {
        message.answer.sums = gone;
        message.answer.sum_count = 2;
    }
    say(p, a->from, &message);
}

/* ---- hearing --------------------------------------------------------------------------------- */

static void hear_call(fuzz_peer *p, fuzz_acquaintance *a, const kvf_call_body *call, kvf_route route) {
    a->called = call->number;
    a->call = call->kind;
    a->from = route;
    if (call->kind == KVF_CALL_EXPECT)
        a->expectations[a->expectation_count++ % LATEST] = call->generation;
    if (p->manners & ANSWERS_CALLS)
        answer(p, a, KVF_OK, 0, 0, p->manners & LIES ? 5 : 0);
}

static void hear(fuzz_peer *p, const kvf_letter *letter, const kvf_message *message) {
    fuzz_acquaintance *a =
        &p->agents[letter->route == p->agents[1].route || letter->route == p->agents[1].from];
    if (message->kind == KVF_MESSAGE_WELCOME && message->welcome.card.size) {
        memcpy(a->session, message->welcome.session, sizeof a->session);
    } else if (message->kind == KVF_MESSAGE_HELLO) {
        fuzz_acquaintance *by = &p->agents[strcmp(message->hello.engine, fuzz_agents[1].name) == 0];
        by->from = letter->route;
        if (p->manners & ANSWERS_GREETINGS)
            welcome(p, letter->route, &message->hello, 0, p->manners & LIES ? 1 : 0);
    } else if (message->kind == KVF_MESSAGE_CALL) {
        hear_call(p, a, &message->call, letter->route);
    } else if (message->kind == KVF_MESSAGE_ANSWER && message->answer.kind == KVF_CALL_ACQUIRE &&
               !message->answer.status) {
        a->leases[a->lease_count++ % LATEST] = message->answer.generation;
    }
}

static void on_letter(void *context, const kvf_letter *letter) {
    kvf_message message = {0};
    /* an agent wrote it, so it is valid */
    FUZZ_MUST(!kvf_wire_open((kvf_bytes){letter->data, letter->bytes}, &message));
    FUZZ_MUST(!kvf_wire_read(&message));
    hear(context, letter, &message);
    kvf_message_free(&message);
}

static void on_broken(void *context, kvf_route route, kvf_status status, const char *detail) {
    (void)context, (void)route, (void)status, (void)detail;
}

/* ---- life ------------------------------------------------------------------------------------ */

static void open_link(uint32_t which) {
    static char public_keys[PEERS][41], secret_keys[PEERS][41];
    fuzz_peer *p = &fuzz_peers[which];
    bool keyed = which + 1 < PEERS;
    if (keyed && !public_keys[which][0])
        FUZZ_MUST(!kvf_agent_make_keys(public_keys[which], secret_keys[which]));
    const kvf_link_options options = {.table = net_surroundings.link,
                                      .listen = endpoints[which],
                                      .public_key = keyed ? public_keys[which] : NULL,
                                      .secret_key = keyed ? secret_keys[which] : NULL,
                                      .on_message = on_letter,
                                      .on_broken = on_broken,
                                      .context = p};
    FUZZ_MUST(!kvf_link_open(&options, &p->link));
    for (uint32_t i = 0; i < AGENTS; i++) {
        FUZZ_MUST(!kvf_link_connect(p->link, fuzz_agents[i].endpoint, NULL, &p->agents[i].route));
        p->agents[i].from = 0;
    }
    p->said_to = 0;
}

void fuzz_peer_open(uint32_t which) {
    fuzz_peer *p = &fuzz_peers[which];
    *p = (fuzz_peer){.name = p->name, .manners = ANSWERS_GREETINGS | ANSWERS_CALLS};
    memset(p->secret, (int)which + 1, sizeof p->secret);
    memset(p->serves, (int)which + 0x51, sizeof p->serves);
    write_introduction(p);
    open_link(which);
}

void fuzz_peer_hang_up(uint32_t which) {
    kvf_link_close(fuzz_peers[which].link);
    fuzz_peers[which].link = NULL;
}

void fuzz_peer_close(uint32_t which) {
    fuzz_peer_hang_up(which);
    kvf_wire_buffer_free(&fuzz_peers[which].introduction);
    kvf_wire_buffer_free(&fuzz_peers[which].said);
}

/* ---- steps: agent_steps.h describes the bytes --------------------------------------------------- */

static void greet(fuzz_peer *p, kvf_route route, const uint8_t *s) {
    const char *names[] = {p->name, "X", "Y", "Z", "A", "B"};
    kvf_message message = {.kind = KVF_MESSAGE_HELLO,
                           .hello = {.engine = names[s[4] % 6],
                                     .rank = s[4] / 6 % 2,
                                     .rank_count = 2,
                                     .wants_ranks = s[2] & 1,
                                     .wants_card = !(s[2] & 1),
                                     .first_rank = s[2] >> 1,
                                     .clock_ns = net_now()}};
    memcpy(message.hello.secret, p->secret, sizeof p->secret);
    message.hello.secret[1] ^= s[5] & 3; /* another process of the same peer */
    message.hello.incarnation = kvf_wire_incarnation(message.hello.secret) ^ s[5] >> 7;
    if (message.hello.wants_ranks)
        memset(message.hello.secret, 0, sizeof message.hello.secret);
    say(p, route, &message);
}

static uint64_t pick(const uint64_t *latest, uint32_t count, uint32_t n) {
    return count ? latest[(count - 1 - n % (count < LATEST ? count : LATEST)) % LATEST] : n;
}

static void fill_times(kvf_call_body *call, uint32_t f) {
    call->rank_count = 1 + f % 3;
    call->time_ns = (uint64_t)(f / 3) * (FUZZ_SECOND / 10);
    if (call->kind == KVF_CALL_EXPECT)
        call->time_ns = f == 255 ? UINT64_MAX : call->time_ns + net_now();
    call->units = (kvf_range){0, 1 + f % 4};
    call->layers = (kvf_range){f % 3, 1 + f % 4};
    call->group = f % 3;
    call->part = f / 3 % 3;
    call->end = f;
}

static void call(fuzz_peer *p, fuzz_acquaintance *a, const uint8_t *s) {
    static const char ids[] = "abcd";
    const uint64_t leases[] = {pick(a->leases, a->lease_count, s[6]), s[6], KVF_EXPECTATION | (s[6] & 7)};
    const uint64_t until[] = {KVF_EXPECTATION | (s[6] & 7), net_now() + s[7] * (FUZZ_SECOND / 10)};
    const kvf_agent *memory = fuzz_agents[s[5] / 4 % AGENTS].agent;
    kvf_call_kind kind = (kvf_call_kind)(1 + s[2] % KVF_CALL_LAST);
    bool ends = kind == KVF_CALL_RELEASE || kind == KVF_CALL_WITHDRAW;
    uint64_t number = s[4] & 0x80 ? a->number + 4095 + (s[4] & 3) : a->number + 1 - (s[4] & 3);
    tables t;
    make_tables(&t, s[6] % (2 * BLOCKS), s[7] / 3 % 8);
    kvf_call_body body = {.number = number,
                          .kind = kind,
                          .request = {&ids[s[5] % 4], 1},
                          .generation = leases[0],
                          .status = (kvf_status)(s[5] / 4 % 22),
                          .clock_ns = net_now()};
    if (kind == KVF_CALL_JOIN) {
        body.generation = s[6];
        body.introduction = (kvf_bytes){p->introduction.data, p->introduction.size};
        body.card = (kvf_bytes){memory->card, memory->card_bytes - s[7] / 128};
    } else if (kind == KVF_CALL_EXPECT || kind == KVF_CALL_WRITTEN || kind == KVF_CALL_WITHDRAW) {
        body.generation = leases[2];
    }
    if (kind == KVF_CALL_EXPECT) {
        body.groups = t.groups;
        body.group_count = s[7] % 7 ? GROUPS : 0;
    } else if (kind == KVF_CALL_BEAT) {
        body.leases = leases;
        body.lease_count = 3;
        body.expectations = until;
        body.expectation_count = 1;
    }
    if (ends && number > 0)
        body.earlier = number - 1 - (number > s[6] ? s[6] % number : 0);
    fill_times(&body, s[7]);
    const fuzz_peer *speaks_as = s[4] & 8 ? &fuzz_peers[s[4] / 16 % PEERS] : p; /* the session of any peer */
    memcpy(body.session, speaks_as->agents[a - p->agents].session, sizeof body.session);
    a->number = !(s[4] & 0x84) && number > a->number ? number : a->number;
    say(p, a->route, &(kvf_message){.kind = KVF_MESSAGE_CALL, .call = body});
}

static void command(fuzz_peer *p, fuzz_acquaintance *a, const uint8_t *s) {
    static const char *const verbs[] = {KVF_COMMAND_DRAIN, KVF_COMMAND_HAND_OVER, KVF_COMMAND_TAKE_OVER};
    const kvf_record records[] = {{.name = "where", .data = s, .size = s[6] & 7}};
    kvf_message message = {.kind = KVF_MESSAGE_COMMAND};
    if (s[2] & 1) {
        message.kind = KVF_MESSAGE_REPLY;
        message.reply = (kvf_reply){
            .id = {s[2]}, .status = (kvf_status)s[7], .records = records, .record_count = s[6] >> 3 & 1};
    } else {
        message.command = (kvf_command_body){.id = {s[2]},
                                             .verb = verbs[s[4] % 3],
                                             .request = {"abcd", s[5] % 5},
                                             .engine = p->name,
                                             .endpoint = s[4] & 4 ? endpoints[p - fuzz_peers] : "",
                                             .time_ns = s[7] * FUZZ_SECOND,
                                             .records = records,
                                             .record_count = s[6] >> 3 & 1};
    }
    say(p, a->route, &message);
}

static void repeat(fuzz_peer *p, const uint8_t *s) {
    if (p->said.size == 0)
        return;
    uint32_t at = (s[4] | (uint32_t)s[3] << 8) % p->said.size;
    p->said.data[at] ^= s[5];
    send_bytes(p, s[2] & 1 ? p->agents[s[2] / 2 % AGENTS].route : p->said_to);
}

static void written(fuzz_peer *p, fuzz_acquaintance *a, const uint8_t *s) {
    static const char ids[] = "abcd";
    kvf_message message = {.kind = KVF_MESSAGE_CALL,
                           .call = {.number = ++a->number,
                                    .kind = s[2] & 1 ? KVF_CALL_PROBE : KVF_CALL_WRITTEN,
                                    .request = {&ids[s[5] % 4], 1},
                                    .generation = pick(a->expectations, a->expectation_count, s[6]),
                                    .status = (kvf_status)(s[5] / 4 % 22),
                                    .detail = "",
                                    .bytes = s[7]}};
    memcpy(message.call.session, p->serves, sizeof p->serves);
    say(p, a->from, &message);
}

static void welcome_unasked(fuzz_peer *p, const fuzz_acquaintance *a, const uint8_t *s) {
    kvf_route route = s[7] & 1 ? a->route : a->from;
    kvf_message no = {.kind = KVF_MESSAGE_REFUSED,
                      .refused = {.status = (kvf_status)(1 + s[4] % 21), .detail = "no"}};
    if (s[2] & 1)
        say(p, route, &no);
    else
        welcome(p, route, &(const kvf_hello){.wants_card = s[2] & 2}, s[5], s[6]);
}

void fuzz_peer_step(uint32_t which, const uint8_t *s) {
    fuzz_peer *p = &fuzz_peers[which];
    fuzz_acquaintance *a = &p->agents[s[3] % AGENTS];
    if (!p->link)
        open_link(which);
    switch ((fuzz_step)(s[0] % STEPS)) {
    case STEP_GREET:
        greet(p, a->route, s);
        break;
    case STEP_CALL:
        call(p, a, s);
        break;
    case STEP_REPEAT:
        repeat(p, s);
        break;
    case STEP_ANSWER:
        if (a->called)
            answer(p, a, (kvf_status)(s[2] % 22), s[4], s[6], s[7]);
        break;
    case STEP_WRITTEN:
        written(p, a, s);
        break;
    case STEP_WELCOME:
        welcome_unasked(p, a, s);
        break;
    case STEP_MANNERS:
        p->manners = s[2];
        break;
    case STEP_COMMAND:
        command(p, a, s);
        break;
    default:
        fuzz_peer_hang_up(which);
        if (!(s[2] & 1))
            open_link(which);
        break;
    }
}
