#include "agent_speaker.h"

#include <stdio.h>

#include "agent/agent.h"
#include "agent_net.h"

static void on_letter(void *context, const kvf_letter *letter) {
    speaker *s = context;
    kvf_message message = {0};
    assert_ok(kvf_wire_open((kvf_bytes){letter->data, letter->bytes}, &message));
    assert_ok(kvf_wire_read(&message));
    s->letters++;
    s->kind = message.kind;
    s->status = KVF_OK;
    s->detail[0] = '\0';
    if (message.kind == KVF_MESSAGE_WELCOME) {
        memcpy(s->session, message.welcome.session, sizeof s->session);
        s->first_rank = message.welcome.first_rank;
        s->introductions = message.welcome.introduction_count;
        s->facts_bytes = strlen(message.welcome.facts);
        assert_true(message.welcome.card.size <= sizeof s->card);
        s->card_bytes = message.welcome.card.size;
        if (s->card_bytes > 0)
            memcpy(s->card, message.welcome.card.data, s->card_bytes);
    } else if (message.kind == KVF_MESSAGE_REFUSED) {
        s->status = message.refused.status;
        (void)snprintf(s->detail, sizeof s->detail, "%s", message.refused.detail);
    } else if (message.kind == KVF_MESSAGE_ANSWER) {
        s->call = message.answer.kind;
        s->status = message.answer.status;
        s->generation = message.answer.generation;
        s->time_ns = message.answer.time_ns;
        s->sums = message.answer.sum_count;
        s->takes_flows = message.answer.stage;
        (void)snprintf(s->detail, sizeof s->detail, "%s", message.answer.detail);
    } else if (message.kind == KVF_MESSAGE_CALL) {
        s->call = message.call.kind;
        s->status = message.call.status;
        s->records = message.call.record_count;
    } else if (message.kind == KVF_MESSAGE_REPLY) {
        s->status = message.reply.status;
        s->replied = message.reply.id[0];
        s->records = message.reply.record_count;
        (void)snprintf(s->detail, sizeof s->detail, "%s", message.reply.detail);
    }
    kvf_message_free(&message);
}

static void on_broken(void *context, kvf_route route, kvf_status status, const char *detail) {
    (void)context, (void)route, (void)status, (void)detail;
}

void speaker_open(speaker *s, const kvf_agent *to, const char *engine, bool keyed, uint8_t seed) {
    *s = (speaker){.engine = engine};
    if (keyed)
        assert_ok(kvf_agent_make_keys(s->public_key, s->secret_key));
    memset(s->secret, seed, sizeof s->secret);
    s->incarnation = kvf_wire_incarnation(s->secret);
    memcpy(s->digest, to->digest, sizeof s->digest);
    speaker_reopen(s, to);
}

void speaker_reopen(speaker *s, const kvf_agent *to) {
    bool keyed = s->public_key[0] != '\0';
    const kvf_link_options options = {.table = net_surroundings.link,
                                      .listen = "",
                                      .public_key = keyed ? s->public_key : NULL,
                                      .secret_key = keyed ? s->secret_key : NULL,
                                      .on_message = on_letter,
                                      .on_broken = on_broken,
                                      .context = s};
    assert_ok(kvf_link_open(&options, &s->link));
    assert_ok(kvf_link_connect(s->link, kvf_agent_endpoint(to), NULL, &s->route));
}

void speaker_close(speaker *s) {
    kvf_link_close(s->link);
}

kvf_message speaker_hello(const char *engine, const uint8_t secret[KVF_WIRE_SECRET_BYTES],
                          const uint8_t to[KVF_WIRE_DIGEST_BYTES]) {
    kvf_message hello = {.kind = KVF_MESSAGE_HELLO,
                         .hello = {.engine = engine,
                                   .incarnation = kvf_wire_incarnation(secret),
                                   .rank_count = 1,
                                   .wants_card = true}};
    memcpy(hello.hello.secret, secret, sizeof hello.hello.secret);
    memcpy(hello.digest, to, sizeof hello.digest);
    return hello;
}

void speaker_send(speaker *s, const kvf_message *message) {
    kvf_wire_buffer bytes;
    assert_ok(kvf_wire_encode(message, &bytes));
    assert_ok(kvf_link_send(s->link, s->route, bytes.data, bytes.size));
    kvf_wire_buffer_free(&bytes);
}

void speaker_work(world *w, speaker *s) {
    world_work_beside(w, s->link, MS / 4); /* fabrics take time that is not virtual */
}

void speaker_run_for(world *w, speaker *s, uint64_t ns) {
    for (uint64_t end = world_now() + ns; world_now() < end;)
        world_work_beside(w, s->link, end - world_now());
}

/* What the agent itself calls meanwhile is no answer. */
static bool wait_for_letter(world *w, speaker *s, uint32_t before) {
    for (uint64_t end = world_now() + 200 * MS; s->letters == before || s->kind == KVF_MESSAGE_CALL;) {
        if (world_now() >= end)
            return false;
        speaker_work(w, s);
    }
    return true;
}

void speaker_greet(world *w, speaker *s) {
    kvf_message hello = speaker_hello(s->engine, s->secret, s->digest);
    hello.hello.incarnation = s->incarnation;
    hello.hello.clock_ns = world_now();
    uint32_t before = s->letters;
    speaker_send(s, &hello);
    assert_true(wait_for_letter(w, s, before));
}

bool speaker_call(world *w, speaker *s, const uint8_t *session, kvf_call_body call) {
    memcpy(call.session, session, sizeof call.session);
    call.number = call.number ? call.number : ++s->number;
    s->number = call.number;
    uint32_t before = s->letters;
    speaker_send(s, &(kvf_message){.kind = KVF_MESSAGE_CALL, .call = call});
    return wait_for_letter(w, s, before) && s->kind == KVF_MESSAGE_ANSWER;
}

bool speaker_command(world *w, speaker *s, uint8_t id, const char *verb, uint64_t time_ns) {
    const kvf_message message = {.kind = KVF_MESSAGE_COMMAND,
                                 .command = {.id = {id}, .verb = verb, .time_ns = time_ns}};
    uint32_t before = s->letters;
    speaker_send(s, &message);
    return wait_for_letter(w, s, before) && s->kind == KVF_MESSAGE_REPLY && s->replied == id;
}

kvf_call_body speaker_join(const speaker *s, const kvf_agent *as, uint64_t generation,
                           kvf_wire_buffer *introduction) {
    kvf_introduction read;
    void *storage = NULL;
    const kvf_wire_buffer *own = &as->introductions[as->rank];
    assert_ok(kvf_wire_decode_introduction((kvf_bytes){own->data, own->size}, &read, &storage));
    read.engine = s->engine;
    read.incarnation = s->incarnation;
    assert_ok(kvf_wire_encode_introduction(&read, introduction));
    kvf_free(storage);
    return (kvf_call_body){.kind = KVF_CALL_JOIN,
                           .generation = generation,
                           .introduction = {introduction->data, introduction->size},
                           .card = {as->card, as->card_bytes}};
}
