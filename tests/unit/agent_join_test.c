/* Which peer may join, when it may join again, and what happens to writes meanwhile. */
#include "agent/push.h"
#include "agent/push_shape.h"
#include "agent/stage.h"
#include "agent_letters.h"
#include "agent_rights.h"
#include "faulty_fabric.h"
#include "plan/plan.h"

static void join_is_for_the_peer_of_the_session(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_wire_buffer introduction = {0};
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 3, &introduction);
    rights_not_of_others(&s, join);
    assert_null(rights_session(&s)->shape);
    kvf_wire_buffer before_a_restart = {0};
    speaker former = s.rightful;
    former.incarnation++;
    assert_int_equal(
        rights_say(&s, &s.rightful, speaker_join(&former, s.w.d.agents[0], 3, &before_a_restart)),
        KVF_E_MISMATCH);
    kvf_wire_buffer_free(&before_a_restart);
    assert_null(rights_session(&s)->shape);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    assert_non_null(rights_session(&s)->shape);
    assert_false(rights_session(&s)->takes_flows); /* it said nothing of a stage */
    const uint64_t work = s.p->work;
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK); /* a repeated call */
    /* P waits longer for the next turn of a peer whose shard it had to sort: 2 parts in each of 3 layers. */
    assert_int_equal(work - s.p->work, 6 * 1024);

    join.card.size--; /* another card needs a higher generation */
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_E_EXISTS);
    assert_non_null(strstr(s.rightful.detail, "generation is 3"));
    join.generation = 2;
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_E_EXISTS);
    assert_true(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED) >= 2);
    join.generation = 4;
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    assert_int_equal(rights_session(&s)->card_bytes, join.card.size);
    /* Of its budget: the shard has one group, with 2 parts in each of 3 layers. */
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(s.w.d.engine, 0));
    assert_int_equal(rights_session(&s)->joined_bytes,
                     join.card.size + 1024 + shard->region_count * sizeof(uint64_t) +
                         sizeof(kvf_group_shard_desc) + 2 * sizeof *shard->groups[0].parts +
                         6 * sizeof *shard->groups[0].placements);
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
}

/* Sends a JOIN that introduces X as `engine`, rank `rank`, with a digest whose first byte has changed by `flip`. */
static kvf_status joins_as(rights *s, const char *engine, uint32_t rank, uint8_t flip) {
    kvf_wire_buffer own = {0}, changed = {0};
    kvf_introduction read;
    void *storage = NULL;
    kvf_call_body join = speaker_join(&s->rightful, s->w.d.agents[0], 1, &own);
    assert_ok(kvf_wire_decode_introduction(join.introduction, &read, &storage));
    read.engine = engine;
    read.rank = rank;
    read.rank_count = 2;
    read.digest[0] ^= flip;
    assert_ok(kvf_wire_encode_introduction(&read, &changed));
    join.introduction = (kvf_bytes){changed.data, changed.size};
    const kvf_status status = rights_say(s, &s->rightful, join);
    assert_int_equal(rights_session(s)->shape != NULL, status == KVF_OK);
    kvf_free(storage);
    kvf_wire_buffer_free(&own);
    kvf_wire_buffer_free(&changed);
    return status;
}

static void a_join_introduces_the_rank_that_greeted(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    assert_int_equal(joins_as(&s, "W", 0, 0), KVF_E_MISMATCH);
    assert_non_null(strstr(s.rightful.detail, "not of the rank that greeted"));
    assert_int_equal(joins_as(&s, "X", 1, 0), KVF_E_MISMATCH);
    assert_non_null(strstr(s.rightful.detail, "not of the rank that greeted"));
    assert_int_equal(joins_as(&s, "X", 0, 1), KVF_E_MISMATCH);
    assert_non_null(strstr(s.rightful.detail, "caches other cells"));
    kvf_wire_buffer introduction = {0};
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 0, &introduction);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_E_RANGE); /* the generation */
    join.generation = 1;
    join.card.size = 0;
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_E_PARSE);
    assert_non_null(strstr(s.rightful.detail, "card is empty"));
    assert_null(rights_session(&s)->shape);
    kvf_wire_buffer_free(&introduction);
    assert_int_equal(joins_as(&s, "X", 0, 0), KVF_OK);
    rights_close(&s);
}

/* Otherwise sessions with shards of their own, that expect one push, would have a plan each that nobody has allowed. */
static void the_plans_to_write_a_peer_are_of_its_budget(void **state) {
    (void)state;
    rights s;
    kvf_wire_buffer introduction = {0};
    rights_open(&s);
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    kvf_session *session = rights_session(&s);
    const uint64_t joined = session->kept_bytes;
    for (uint32_t i = 0; i < 2; i++) { /* at first there is no room */
        const char *id = i ? "b" : "a";
        s.p->options.max_bytes_per_key = i ? UINT64_MAX : session->kept_bytes + 1200;
        const uint64_t push = rights_push(&s, id, 1 + i);
        world_ready(&s.w.p, &push);
        world_until(&s.w, session->flows->over);
        assert_int_equal(session->flows->status, i ? KVF_OK : KVF_E_LIMIT);
        assert_int_equal(session->shape->plans != NULL, i);
        assert_int_equal(session->plan_bytes, i ? kvf_plan_memory_bytes(session->shape->plans->plan) : 0);
        assert_int_equal(session->plan_bytes, session->shape->plan_bytes);
        kvf_call_body withdraw = {
            .kind = KVF_CALL_WITHDRAW, .request = {id, 1}, .generation = (1 + i) | KVF_EXPECTATION};
        assert_int_equal(rights_say(&s, &s.rightful, withdraw), KVF_OK);
        world_until(&s.w, !session->flows);
        assert_int_equal(session->kept_bytes - joined, session->plan_bytes);
    }
    join.generation++;
    join.card.size--; /* another card, and the same shape */
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    assert_non_null(session->shape->plans);
    assert_int_equal(session->kept_bytes - joined, session->plan_bytes - 1);
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
}

/* All of them are looked at, however often the peer says the same. */
static void a_peer_that_expects_much_waits_longer_after_each_join(void **state) {
    (void)state;
    enum { EXPECTED = 200 };
    rights s;
    world_request wanted;
    kvf_wire_buffer introduction = {0};
    rights_open(&s);
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    const uint64_t work = s.p->work;
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    for (uint64_t i = 1; i <= EXPECTED; i++)
        assert_int_equal(rights_say(&s, &s.rightful, rights_expect("a", i, &wanted)), KVF_OK);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    assert_int_equal(rights_session(&s)->flow_count, EXPECTED);
    assert_in_range(s.p->work - work, EXPECTED * 512, EXPECTED * 512 + 16); /* its number has more bytes */
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
}

/* Each of two stages has some of the layers of both groups. */
static void a_shard_uses_the_budget_by_its_groups_and_layers(void **state) {
    (void)state;
    static const uint32_t parts[] = {2, 4};
    world w;
    world_request wanted;
    uint64_t tickets[WORLD_MAX_RANKS];
    uint32_t joined = 0;
    world_open_model(
        &w, hybrid(2), ENGINE(.name = "P", .all = {.block_count = 64}, .state = {.block_count = 64}),
        ENGINE(.name = "D", .pp_size = 2, .all = {.block_count = 64}, .state = {.block_count = 64}), NULL);
    world_request_make(&w, &w.d, "a", 40, 0, 1, &wanted);
    world_expect(&w.d, &wanted, &w.p, tickets);
    world_run_for(&w, 50 * MS);
    const kvf_session *session;
    DL_FOREACH(w.p.agents[0]->all_sessions, session) {
        const kvf_shard *shard = kvf_engine_shard(w.d.engine, session->rank);
        const kvf_shard_desc *desc = kvf_shard_get(shard);
        uint64_t bytes = session->card_bytes + 1024 + desc->region_count * sizeof(uint64_t);
        for (uint32_t g = 0; g < 2; g++) {
            assert_int_equal(kvf_model_group(w.model, g)->part_count, parts[g]);
            bytes += sizeof(kvf_group_shard_desc) + parts[g] * sizeof *desc->groups[g].parts +
                     parts[g] * sizeof *desc->groups[g].placements; /* one layer of each group */
        }
        assert_int_equal(session->joined_bytes, bytes);
        joined++;
    }
    assert_int_equal(joined, 2);
    world_close(&w);
}

static void a_second_join_waits_until_what_is_written_by_the_first_is_over(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_wire_buffer introduction = {0};
    world_request wanted;
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    world_request_make(&s.w, &s.w.d, "b", 40, 0, 1, &wanted);
    assert_int_equal(rights_say(&s, &s.rightful, rights_expect("b", 2, &wanted)), KVF_OK);
    join.generation = 2;
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK); /* nothing is written yet */
    (void)rights_push(&s, "a", 1);
    join.generation = 3;
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_E_AGAIN);
    kvf_call_body withdraw = {
        .kind = KVF_CALL_WITHDRAW, .request = {"a", 1}, .generation = 1 | KVF_EXPECTATION};
    assert_int_equal(rights_say(&s, &s.rightful, withdraw), KVF_OK);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
}

/* A copy of the JOIN before may come after the next one, over a connection that was broken. */
static void a_join_that_comes_late_is_refused_without_a_word_to_the_engine(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_wire_buffer introduction = {0};
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    kvf_call_body late = join;
    late.number = s.rightful.number;
    join.generation = 2;
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    const uint64_t number = s.rightful.number;
    assert_int_equal(rights_say(&s, &s.rightful, late), KVF_E_EXISTS);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 0);
    s.rightful.number = number;
    late.number = 0; /* a call of now */
    assert_int_equal(rights_say(&s, &s.rightful, late), KVF_E_EXISTS);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 1);
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
}

static void flows_from_before_are_over_when_a_client_joins_anew(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_wire_buffer introduction = {0};
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    for (uint64_t i = 1; i <= 2; i++) {
        const char *id = i == 1 ? "a" : "b";
        const uint64_t push = rights_push(&s, id, i);
        world_ready(&s.w.p, &push);
        world_until(&s.w, rights_session(&s)->flows->over); /* a new connection works like the first one */
        assert_int_equal(rights_session(&s)->flows->status, KVF_OK);
        assert_non_null(rights_session(&s)->peer);
        assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
        assert_null(rights_session(&s)->peer);
        kvf_call_body withdraw = {
            .kind = KVF_CALL_WITHDRAW, .request = {id, 1}, .generation = i | KVF_EXPECTATION};
        assert_int_equal(rights_say(&s, &s.rightful, withdraw), KVF_OK);
        world_until(&s.w, !rights_session(&s)->flows);
    }
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
}

/* While a slow push goes to a client that has joined without a stage, the client joins with one, in the way of
 * `stage`; `told`: as it was told to; or a `late` JOIN comes that it had sent before the other. */
static kvf_status joins_while_written_to(kvf_join_stage stage, bool told, bool late) {
    rights s;
    world_request wanted, pushed;
    uint64_t push;
    rights_open(&s);
    kvf_wire_buffer introduction = {0};
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction);
    const uint64_t before = ++s.rightful.number;
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    world_request_make(&s.w, &s.w.p, "a", 40, 0, 1, &pushed);
    pushed.request.bytes_per_second = 1000;
    pushed.request.way = KVF_WAY_DIRECT;
    assert_int_equal(rights_say(&s, &s.rightful, rights_expect("a", 1, &wanted)), KVF_OK);
    world_push(&s.w.p, &pushed, &push);
    world_ready(&s.w.p, &push);
    speaker_run_for(&s.w, &s.rightful, 100 * MS);
    assert_false(rights_session(&s)->flows->over);
    rights_session(&s)->joins_again = told;
    join.stage = stage;
    const uint64_t number = s.rightful.number;
    join.number = late ? before : 0;
    assert_int_equal(rights_say(&s, &s.rightful, join), late ? KVF_E_EXISTS : KVF_OK);
    s.rightful.number = number + 1;
    speaker_run_for(&s.w, &s.rightful, 100 * MS);
    kvf_call_body withdraw = {
        .kind = KVF_CALL_WITHDRAW, .request = {"a", 1}, .generation = 1 | KVF_EXPECTATION};
    const bool over = rights_session(&s)->flows->over;
    const kvf_status status = rights_session(&s)->flows->status;
    assert_int_equal(over, status != KVF_OK); /* moving 40 tokens takes seconds */
    assert_int_equal(rights_say(&s, &s.rightful, withdraw), status);
    assert_int_equal(rights_session(&s)->joins_again, status != KVF_OK); /* it greets and joins once more */
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
    return status;
}

static void a_client_that_had_lost_us_and_brings_its_stage_begins_anew(void **state) {
    (void)state;
    assert_int_equal(joins_while_written_to(KVF_JOIN_STAGED, false, false), KVF_E_PEER_LOST);
}

static void a_client_that_only_adds_its_stage_is_written_to_as_before(void **state) {
    (void)state;
    assert_int_equal(joins_while_written_to(KVF_JOIN_ADDS_STAGE, false, false), KVF_OK);
}

static void a_client_that_was_told_to_join_again_is_written_to_as_before(void **state) {
    (void)state;
    assert_int_equal(joins_while_written_to(KVF_JOIN_STAGED, true, false), KVF_OK);
}

static void a_client_whose_join_comes_late_is_written_to_as_before(void **state) {
    (void)state;
    assert_int_equal(joins_while_written_to(KVF_JOIN_STAGED, false, true), KVF_OK);
}

/* Writes begin late, and ignore cancels. */
static void a_withdrawal_is_not_confirmed_if_the_connection_is_lost_meanwhile(void **state) {
    (void)state;
    rights s;
    faulty_install(&(faulty_options){
        .seed = 1, .per_mille = {[FAULTY_LATE_START] = 1000, [FAULTY_DEAF] = 1000}, .turns = 1000000});
    rights_open(&s);
    kvf_wire_buffer introduction = {0};
    const kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    const uint64_t push = rights_push(&s, "a", 1);
    world_ready(&s.w.p, &push);
    world_until(&s.w, faulty_count(FAULTY_LATE_START) > 0);
    const kvf_call_body withdraw = {
        .kind = KVF_CALL_WITHDRAW, .number = 9, .request = {"a", 1}, .generation = 1 | KVF_EXPECTATION};
    kvf_flow_withdraw(rights_session(&s),
                      &withdraw); /* virtual time stands still: a message would be too late */
    assert_false(rights_session(&s)->flows->over);
    assert_ok(kvf_agent_cancel(s.p, push)); /* the first reason to stop counts */
    assert_string_equal(rights_session(&s)->flows->detail, "withdrawn by the consumer");
    const uint32_t letters = s.rightful.letters;
    world_close_agents(&s.w.d);
    speaker_run_for(&s.w, &s.rightful, 10 * MS);
    assert_true(s.rightful.letters > letters);
    assert_int_equal(s.rightful.call, KVF_CALL_WITHDRAW);
    assert_int_equal(s.rightful.status, KVF_E_PEER_LOST);
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
    faulty_remove();
}

/* Opens X's own transport: a stage accepts no peer whose card has another name. */
static kvf_transport *open_memory(const speaker *x, kvf_call_body *join) {
    static unsigned char memory[64];
    char name[KVF_ENDPOINT_NAME_BYTES];
    kvf_endpoint_name(name, x->engine, 0, x->incarnation);
    const kvf_transport_options options = {.struct_size = sizeof options, .name = name};
    const kvf_memory region = {.struct_size = sizeof region, .address = memory, .bytes = sizeof memory};
    kvf_transport *transport = NULL;
    const void *card;
    assert_ok(kvf_transport_open("inproc", &options, &transport));
    assert_ok(kvf_transport_register(transport, &region, 1));
    assert_ok(kvf_transport_export(transport, &card, &join->card.size));
    join->card.data = card;
    return transport;
}

/* Lets X join with its stage while one allocation of the agent fails, and then again. Returns whether the agent put it
 * off, and in `calls` the number of allocations. */
static bool joins_short_of(size_t fail_at, size_t *calls) {
    static rights s;
    static memory_count memory;
    count_memory(&memory);
    rights_open(&s);
    kvf_wire_buffer introduction = {0};
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction);
    kvf_transport *transport = open_memory(&s.rightful, &join);
    join.stage = KVF_JOIN_STAGED;
    join.number = s.rightful.number + 1; /* the same call both times */
    memcpy(join.session, s.rightful.session, sizeof join.session);
    speaker_send(&s.rightful, &(kvf_message){.kind = KVF_MESSAGE_CALL, .call = join});
    memory.calls = 0;
    memory.fail_at = fail_at;
    world_run_for(&s.w, MS);
    memory.fail_at = 0;
    *calls = memory.calls;
    const uint32_t before = s.rightful.letters;
    speaker_run_for(&s.w, &s.rightful, 10 * MS);
    const bool put_off = s.rightful.letters > before && s.rightful.status == KVF_E_AGAIN;
    if (put_off)
        assert_non_null(strstr(s.rightful.detail, "no memory for"));
    assert_true(speaker_call(&s.w, &s.rightful, s.rightful.session, join));
    if (s.rightful.status || !s.rightful.takes_flows)
        fail_msg("it does not join where allocation %zu was refused: %s", fail_at, s.rightful.detail);
    assert_true(rights_session(&s)->takes_flows);
    assert_non_null(kvf_session_mate(rights_session(&s)));
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
    kvf_transport_close(transport);
    assert_int_equal(memory.live, 0);
    return put_off;
}

static void a_client_that_joins_with_its_stage_is_put_off_for_want_of_memory(void **state) {
    (void)state;
    size_t calls, some;
    uint32_t put_off = 0;
    assert_false(joins_short_of(0, &calls));
    for (size_t n = 1; n <= calls; n++)
        put_off += joins_short_of(n, &some);
    assert_true(put_off > 5);
}

static void a_join_that_is_lost_is_sent_again(void **state) {
    (void)state;
    world w;
    world_request wanted, pushed;
    uint64_t push, expect;
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), NULL);
    world_request_make(&w, &w.d, "a", 40, 0, 1, &wanted);
    world_request_make(&w, &w.p, "a", 40, 10, 1, &pushed);
    letters_begin();
    letters_rule(LETTERS_LOSE, w.d.agents[0], KVF_MESSAGE_CALL, KVF_CALL_JOIN);
    world_expect(&w.d, &wanted, &w.p, &expect);
    world_until(&w, letters_met() == 1);
    letters_end();
    world_push(&w.p, &pushed, &push);
    world_ready(&w.p, &push);
    (void)world_done(&w, w.d.agents[0], expect);
    (void)world_done(&w, w.p.agents[0], push);
    world_quiet(&w);
    world_close(&w);
}

static void a_join_without_an_answer_is_given_up_after_a_lease(void **state) {
    (void)state;
    world w;
    world_request wanted;
    uint64_t expect;
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), OPTIONS(.lease_ns = RIGHTS_LEASE));
    kvf_agent *d = w.d.agents[0];
    world_request_make(&w, &w.d, "a", 40, 0, 1, &wanted);
    letters_begin();
    letters_rule(LETTERS_LOSE, d, KVF_MESSAGE_CALL, KVF_CALL_JOIN);
    world_expect(&w.d, &wanted, &w.p, &expect);
    world_until(&w, letters_met() == 1);
    world_run_for(&w, RIGHTS_LEASE - 10 * MS);
    assert_int_equal(world_count(&w, d, KVF_EVENT_FAILED), 0);
    world_run_for(&w, 20 * MS);
    assert_int_equal(world_count(&w, d, KVF_EVENT_FAILED), 1);
    assert_non_null(strstr(world_failed(&w, d, expect, KVF_E_TIMEOUT)->detail, "JOIN"));
    letters_end();
    world_close(&w);
}

/* The second push goes packed. Its flow waits at P until D has said that its stage takes flows. */
static void what_waits_for_a_stage_is_written_when_the_client_adds_it(void **state) {
    (void)state;
    world w;
    world_request wanted, pushed;
    uint64_t push, expect;
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), OPTIONS(.slot_bytes = 4096));
    for (uint32_t i = 0; i < 2; i++) {
        world_request_make(&w, &w.d, i ? "b" : "a", 40, 0, 1, &wanted);
        world_request_make(&w, &w.p, i ? "b" : "a", 40, 10, 1, &pushed);
        wanted.request.way = pushed.request.way = i ? KVF_WAY_PACKED : KVF_WAY_DIRECT;
        world_fill(&w, &w.p, &pushed, 5 + i);
        world_push(&w.p, &pushed, &push);
        world_ready(&w.p, &push);
        world_expect(&w.d, &wanted, &w.p, &expect);
        (void)world_done(&w, w.d.agents[0], expect);
        (void)world_done(&w, w.p.agents[0], push);
        assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 5 + i), 0);
        assert_int_equal(w.d.agents[0]->all_sessions->join_staged, i == 1);
    }
    world_quiet(&w);
    world_close(&w);
}

/* D has met P when it expects a packed push: its card is sent in a round. */
static void a_join_without_memory_is_tried_again_after_a_pause(void **state) {
    (void)state;
    world w;
    memory_count memory;
    world_request wanted;
    uint64_t ticket;
    count_memory(&memory);
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"),
                     OPTIONS(.way = KVF_WAY_PACKED, .slot_bytes = 4096));
    kvf_agent *d = w.d.agents[0];
    assert_ok(kvf_agent_connect(d, &w.p.contact, 0, &ticket));
    assert_int_equal(world_next(&w, d, ticket)->kind, KVF_EVENT_PEER_READY);
    world_run_for(&w, MS);
    world_request_make(&w, &w.d, "a", 40, 0, 1, &wanted);
    world_expect(&w.d, &wanted, &w.p, &ticket);
    const kvf_session *session = d->all_sessions;
    assert_true(session->join_wanted);
    memory.calls = 0;
    memory.fail_at = 1;
    assert_ok(kvf_agent_progress(d, NULL));
    assert_true(session->join_wanted && !session->joining);
    memory.fail_at = 0;
    world_run_for(&w, 99 * MS);
    assert_true(session->join_wanted);
    world_run_for(&w, 2 * MS);
    assert_true(session->joined);
    assert_true(session->takes_flows);
    assert_ok(kvf_agent_cancel(d, ticket));
    (void)world_failed(&w, d, ticket, KVF_E_CANCELLED);
    world_quiet(&w);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(join_is_for_the_peer_of_the_session),
        cmocka_unit_test(a_join_introduces_the_rank_that_greeted),
        cmocka_unit_test(the_plans_to_write_a_peer_are_of_its_budget),
        cmocka_unit_test(a_peer_that_expects_much_waits_longer_after_each_join),
        cmocka_unit_test(a_shard_uses_the_budget_by_its_groups_and_layers),
        cmocka_unit_test(a_second_join_waits_until_what_is_written_by_the_first_is_over),
        cmocka_unit_test(a_join_that_comes_late_is_refused_without_a_word_to_the_engine),
        cmocka_unit_test(flows_from_before_are_over_when_a_client_joins_anew),
        cmocka_unit_test(a_client_that_had_lost_us_and_brings_its_stage_begins_anew),
        cmocka_unit_test(a_client_that_only_adds_its_stage_is_written_to_as_before),
        cmocka_unit_test(a_client_that_was_told_to_join_again_is_written_to_as_before),
        cmocka_unit_test(a_client_whose_join_comes_late_is_written_to_as_before),
        cmocka_unit_test(a_withdrawal_is_not_confirmed_if_the_connection_is_lost_meanwhile),
        cmocka_unit_test(a_join_that_is_lost_is_sent_again),
        cmocka_unit_test(a_join_without_an_answer_is_given_up_after_a_lease),
        cmocka_unit_test(what_waits_for_a_stage_is_written_when_the_client_adds_it),
        cmocka_unit_test_teardown(a_client_that_joins_with_its_stage_is_put_off_for_want_of_memory,
                                  stop_counting_memory),
        cmocka_unit_test_teardown(a_join_without_memory_is_tried_again_after_a_pause, stop_counting_memory),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
