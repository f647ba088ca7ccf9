/* Three peers that talk to one agent: see agent_rights.h. */
#include "agent_rights.h"

#include "agent/push.h"

void rights_open(rights *s) {
    memset(s, 0, sizeof *s);
    assert_ok(kvf_agent_make_keys(s->p_public, s->p_secret));
    assert_ok(kvf_agent_make_keys(s->d_public, s->d_secret));
    world_open_model(&s->w, attention(3, 4, 8), ONE("P"), ONE("D"), NULL);
    world_close_agents(&s->w.p);
    world_close_agents(&s->w.d);
    world_open_agents(
        &s->w.p, OPTIONS(.public_key = s->p_public, .secret_key = s->p_secret, .lease_ns = RIGHTS_LEASE));
    world_open_agents(
        &s->w.d, OPTIONS(.public_key = s->d_public, .secret_key = s->d_secret, .lease_ns = RIGHTS_LEASE));
    s->p = s->w.p.agents[0];
    speaker_open(&s->rightful, s->p, "X", true, 1);
    speaker_open(&s->other, s->p, "Y", true, 2);
    speaker_open(&s->stranger, s->p, "Z", false, 3);
    speaker_greet(&s->w, &s->rightful);
    assert_int_equal(s->rightful.kind, KVF_MESSAGE_WELCOME);
}

void rights_close(rights *s) {
    speaker_close(&s->rightful);
    speaker_close(&s->other);
    speaker_close(&s->stranger);
    world_close(&s->w);
}

void rights_grant(rights *s, const kvf_key_grant *grants, uint32_t count) {
    world_close_agents(&s->w.p);
    world_open_agents(&s->w.p, OPTIONS(.public_key = s->p_public, .secret_key = s->p_secret, .grants = grants,
                                       .grant_count = count));
    s->p = s->w.p.agents[0];
    speaker_close(&s->rightful);
    speaker_close(&s->other);
    speaker_reopen(&s->rightful, s->p);
    speaker_reopen(&s->other, s->p);
}

kvf_session *rights_session(const rights *s) {
    kvf_session *session;
    DL_FOREACH(s->p->all_sessions, session) {
        if (session->incoming && session->engine[0] == 'X' && session->state == KVF_SESSION_OPEN)
            return session;
    }
    return NULL;
}

kvf_status rights_say(rights *s, speaker *by, kvf_call_body call) {
    by->number = s->rightful.number;
    assert_true(speaker_call(&s->w, by, s->rightful.session, call));
    s->rightful.number = by->number;
    return by->status;
}

void rights_not_of_others(rights *s, kvf_call_body call) {
    uint64_t foreign = world_stats(s->p).messages_foreign;
    assert_int_equal(rights_say(s, &s->other, call), KVF_E_PEER_LOST);
    assert_int_equal(rights_say(s, &s->stranger, call), KVF_E_PEER_LOST);
    assert_int_equal(world_stats(s->p).messages_foreign, foreign + 2);
}

kvf_call_body rights_acquire(const char *id) {
    return (kvf_call_body){
        .kind = KVF_CALL_ACQUIRE, .request = {id, strlen(id)}, .time_ns = SECOND, .rank_count = 1};
}

uint64_t rights_hold(rights *s, const char *id) {
    world_request held;
    uint64_t ticket;
    world_request_make(&s->w, &s->w.p, id, 40, 10, 1, &held);
    world_hold(&s->w.p, &held, &ticket);
    return ticket;
}

uint64_t rights_open_leased(rights *s) {
    rights_open(s);
    const uint64_t ticket = rights_hold(s, "a");
    assert_int_equal(rights_say(s, &s->rightful, rights_acquire("a")), KVF_OK);
    return ticket;
}

kvf_call_body rights_expect(const char *id, uint64_t generation, const world_request *wanted) {
    return (kvf_call_body){.kind = KVF_CALL_EXPECT,
                           .request = {id, strlen(id)},
                           .generation = generation | KVF_EXPECTATION,
                           .time_ns = world_now() + SECOND,
                           .rank_count = 1,
                           .groups = wanted->groups,
                           .group_count = wanted->group_count};
}

uint64_t rights_push(rights *s, const char *id, uint64_t generation) {
    world_request wanted, pushed;
    uint64_t ticket;
    world_request_make(&s->w, &s->w.d, id, 40, 0, 1, &wanted);
    world_request_make(&s->w, &s->w.p, id, 40, 0, 1, &pushed);
    assert_int_equal(rights_say(s, &s->rightful, rights_expect(id, generation, &wanted)), KVF_OK);
    world_push(&s->w.p, &pushed, &ticket);
    return ticket;
}
