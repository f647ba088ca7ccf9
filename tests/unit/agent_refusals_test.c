/* Arguments that the calls of an agent refuse at once, and the details. */
#include "agent_scene.h"
#include "wire/wire.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define TWO(engine_name) ENGINE(.name = (engine_name), .tp_size = 2, .all = {.block_count = 64})

static void set_up(scene *s) {
    scene_open(s, attention(2, 4, 8), ONE("P"), ONE("D"), NULL);
}

/* ---- arguments ------------------------------------------------------------------------------- */

static void nothing_is_done_without_an_agent_or_a_place_for_the_result(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    const void *bytes;
    size_t size;
    char text[64];
    uint64_t ticket;
    void *memory;
    kvf_event event = {0};
    kvf_agent_peer peer = {0};
    uint32_t count;
    assert_fails(kvf_agent_introduction(NULL, &bytes, &size), KVF_E_INVALID, "agent is NULL");
    assert_fails(kvf_agent_introduction(s.p, NULL, &size), KVF_E_INVALID, "bytes is NULL");
    assert_fails(kvf_agent_introduction(s.p, &bytes, NULL), KVF_E_INVALID, "size is NULL");
    assert_fails(kvf_agent_introduce(NULL, "", 0), KVF_E_INVALID, "agent is NULL");
    assert_fails(kvf_agent_introduce(s.p, NULL, 0), KVF_E_INVALID, "bytes is NULL");
    assert_fails(kvf_agent_connect(NULL, &s.w.p.contact, 0, &ticket), KVF_E_INVALID, "agent is NULL");
    assert_fails(kvf_agent_connect(s.d, NULL, 0, &ticket), KVF_E_INVALID, "contact is NULL");
    assert_fails(kvf_agent_match(NULL, "P", 0, NULL), KVF_E_INVALID, "agent is NULL");
    assert_fails(kvf_agent_match(s.d, NULL, 0, NULL), KVF_E_INVALID, "engine is NULL");
    assert_fails(kvf_agent_explain(NULL, NULL, KVF_LOG_INFO, text, sizeof text, &size), KVF_E_INVALID,
                 "agent is NULL");
    assert_fails(kvf_agent_explain(s.d, NULL, KVF_LOG_INFO, NULL, 1, &size), KVF_E_INVALID, "text is NULL");
    assert_fails(kvf_agent_hold(s.p, NULL, &ticket), KVF_E_INVALID, "request is NULL");
    assert_fails(kvf_agent_pull(s.d, NULL, &ticket), KVF_E_INVALID, "request is NULL");
    assert_fails(kvf_agent_pull(NULL, &s.wanted.request, &ticket), KVF_E_INVALID, "agent is NULL");
    assert_fails(kvf_agent_pull_into(NULL, 1, s.wanted.groups, 1), KVF_E_INVALID, "agent is NULL");
    assert_fails(kvf_agent_pull_into(s.d, 1, NULL, 1), KVF_E_INVALID, "groups is NULL");
    assert_fails(kvf_agent_grant_key(s.p, NULL), KVF_E_INVALID, "grant is NULL");
    assert_fails(kvf_agent_register_region(s.p, 0, NULL), KVF_E_INVALID, "memory is NULL");
    assert_fails(kvf_agent_allocate(NULL, KVF_MEMORY_HOST, 0, 64, &memory), KVF_E_INVALID, "agent is NULL");
    assert_fails(kvf_agent_next_event(NULL, &event), KVF_E_INVALID, "agent is NULL");
    assert_fails(kvf_agent_next_event(s.p, &event), KVF_E_INVALID, "kvf_event");
    event.struct_size = sizeof event;
    assert_fails(kvf_agent_next_event(s.p, &event), KVF_E_EMPTY, "there is no event");
    assert_fails(kvf_agent_peers(s.p, &peer, 1, NULL), KVF_E_INVALID, "count is NULL");
    assert_fails(kvf_agent_peers(s.p, NULL, 1, &count), KVF_E_INVALID, "kvf_agent_peer is NULL");
    assert_fails(kvf_agent_peers(s.p, &peer, 1, &count), KVF_E_INVALID, "kvf_agent_peer.struct_size is 0");
    assert_fails(kvf_agent_cancel(NULL, 1), KVF_E_INVALID, "agent is NULL");
    assert_int_equal(kvf_agent_event_fd(NULL), -1);
    kvf_agent_close(NULL);
    scene_close(&s);
}

/* Tickets of no request, and of another kind of request. */
static void tickets_are_of_requests_of_their_kind(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_hold(&s.w.p, &s.held, s.theirs);
    const uint64_t numbers[] = {s.theirs[0], s.theirs[0] + 1};
    for (int i = 0; i < 2; i++) {
        assert_fails(kvf_agent_push_ready(s.p, numbers[i], NULL), KVF_E_NOT_FOUND, "no push has ticket");
        assert_fails(kvf_agent_pull_into(s.p, numbers[i], s.held.groups, 1), KVF_E_NOT_FOUND,
                     "no pull has ticket");
    }
    assert_fails(kvf_agent_cancel(s.p, numbers[1]), KVF_E_NOT_FOUND, "no request has ticket 2");
    assert_ok(kvf_agent_cancel(s.p, numbers[0]));
    assert_fails(kvf_agent_cancel(s.p, numbers[0]), KVF_E_NOT_FOUND, "no request has ticket 1");
    (void)world_failed(&s.w, s.p, numbers[0], KVF_E_CANCELLED);
    scene_close(&s);
}

static void a_request_is_checked_before_anything_is_claimed(void **state) {
    (void)state;
    static char id[1025];
    scene s;
    uint64_t ticket = 0;
    set_up(&s);
    kvf_agent_request request = s.held.request;
    request.id = (kvf_request_id){id, 0};
    assert_fails(kvf_agent_hold(s.p, &request, &ticket), KVF_E_RANGE, "id has 0 bytes; allowed: 1 to 1024");
    request.id.size = 1025;
    assert_fails(kvf_agent_hold(s.p, &request, &ticket), KVF_E_RANGE, "id has 1025 bytes");
    request.id = (kvf_request_id){NULL, 4};
    assert_fails(kvf_agent_hold(s.p, &request, &ticket), KVF_E_RANGE, "id has 4 bytes");
    request = s.held.request;
    request.way = (kvf_way)3;
    assert_fails(kvf_agent_hold(s.p, &request, &ticket), KVF_E_INVALID, "way is 3");
    request = s.held.request;
    request.contact.reserved[1] = 1;
    assert_fails(kvf_agent_hold(s.p, &request, &ticket), KVF_E_INVALID, "kvf_contact");
    request = s.held.request;
    request.groups = NULL;
    assert_fails(kvf_agent_hold(s.p, &request, &ticket), KVF_E_INVALID, "groups is NULL");
    assert_fails(kvf_agent_push(s.p, &request, &ticket), KVF_E_INVALID, "groups is NULL");
    request.contact = s.w.p.contact;
    assert_fails(kvf_agent_expect(s.d, &request, &ticket), KVF_E_INVALID, "groups is NULL");
    request = s.held.request;
    request.group_count = 2;
    assert_fails(kvf_agent_hold(s.p, &request, &ticket), KVF_E_INVALID, "group_count is 2", "has 1 groups");
    assert_int_equal(ticket, 0);
    assert_int_equal(world_stats(s.p).blocks_held_now, 0);
    request = s.held.request;
    request.id = (kvf_request_id){id, 1024};
    assert_ok(kvf_agent_hold(s.p, &request, &ticket));
    assert_int_equal(ticket, 1); /* refused calls have used no number */
    assert_ok(kvf_agent_cancel(s.p, ticket));
    (void)world_failed(&s.w, s.p, ticket, KVF_E_CANCELLED);
    scene_close(&s);
}

static void a_contact_names_another_engine_and_its_endpoint(void **state) {
    (void)state;
    char name[257];
    memset(name, 'x', sizeof name - 1);
    name[256] = '\0';
    scene s;
    uint64_t ticket;
    set_up(&s);
    kvf_contact contact = {.endpoint = s.w.p.contact.endpoint};
    assert_fails(kvf_agent_connect(s.d, &contact, 0, &ticket), KVF_E_INVALID, "contact.engine is NULL");
    contact.engine = "";
    assert_fails(kvf_agent_connect(s.d, &contact, 0, &ticket), KVF_E_INVALID, "too long or empty");
    contact.engine = name;
    assert_fails(kvf_agent_connect(s.d, &contact, 0, &ticket), KVF_E_INVALID, "1 to 255 characters");
    contact.reserved[0] = 1;
    assert_fails(kvf_agent_connect(s.d, &contact, 0, &ticket), KVF_E_INVALID, "kvf_contact.reserved[0]");
    contact.reserved[0] = 0;
    contact.engine = name + 1;
    assert_ok(kvf_agent_connect(s.d, &contact, SECOND, &ticket));
    (void)world_failed(&s.w, s.d, ticket, KVF_E_MISMATCH);
    contact.engine = "D";
    assert_fails(kvf_agent_connect(s.d, &contact, 0, &ticket), KVF_E_INVALID, "this engine itself");
    contact.engine = "P";
    contact.endpoint = NULL;
    assert_fails(kvf_agent_connect(s.d, &contact, 0, &ticket), KVF_E_INVALID,
                 "contact.endpoint of P is NULL");
    scene_close(&s);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static void a_block_that_is_used_says_for_what(void **state) {
    (void)state;
    scene s;
    uint64_t ticket;
    set_up(&s);
    kvf_agent_request other = s.wanted.request;
    other.id = (kvf_request_id){"b", 1};
    s.wanted.ids[0][2] = s.wanted.ids[0][1];
    assert_fails(kvf_agent_pull(s.d, &s.wanted.request, &ticket), KVF_E_OVERLAP,
                 "block 9 is given twice, the second time as entry 2");
    assert_int_equal(world_stats(s.d).blocks_filling_now, 0);
    s.wanted.ids[0][2] = 10;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    assert_fails(kvf_agent_pull(s.d, &other, &ticket), KVF_E_EXISTS,
                 "block 8 is being filled by the request of ticket 1");
    assert_fails(kvf_agent_hold(s.d, &other, &ticket), KVF_E_EXISTS,
                 "block 8 is being filled by the request of ticket 1");
    world_hold(&s.w.p, &s.held, s.theirs);
    other = s.held.request;
    other.id = (kvf_request_id){"b", 1};
    assert_ok(kvf_agent_hold(s.p, &other, &ticket));
    other.id = (kvf_request_id){"c", 1};
    other.contact = s.w.d.contact;
    assert_fails(kvf_agent_pull(s.p, &other, &ticket), KVF_E_EXISTS,
                 "block 0 is held by 2 requests that read it");
    assert_ok(kvf_agent_cancel(s.p, ticket));
    (void)world_failed(&s.w, s.p, ticket, KVF_E_CANCELLED);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

static void memory_is_registered_once_and_whole(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    kvf_agent *agent = NULL;
    kvf_memory regions[2];
    for (uint32_t i = 0; i < 2; i++)
        regions[i] = (kvf_memory){.struct_size = sizeof(kvf_memory),
                                  .address = s.w.p.memory[0][i],
                                  .bytes = kvf_shard_get(kvf_engine_shard(s.w.p.engine, 0))->region_bytes[i]};
    void *other = malloc(regions[0].bytes);
    assert_non_null(other);
    assert_fails(kvf_agent_register(s.p, regions, 2), KVF_E_EXISTS, "has its memory registered already");
    assert_ok(kvf_agent_open(s.w.p.engine, 0, NULL, &agent));
    assert_fails(kvf_agent_register(agent, regions, 1), KVF_E_INVALID, "count is 1 regions", "has 2");
    assert_fails(kvf_agent_register(agent, NULL, 2), KVF_E_INVALID, "regions is NULL");
    regions[1].bytes--;
    assert_fails(kvf_agent_register(agent, regions, 2), KVF_E_RANGE, "region 1 has", "rank 0 needs");
    regions[1].bytes++;
    const void *bytes;
    size_t size;
    uint64_t ticket;
    assert_fails(kvf_agent_introduction(agent, &bytes, &size), KVF_E_INVALID, "no memory registered");
    assert_fails(kvf_agent_connect(agent, &s.w.d.contact, 0, &ticket), KVF_E_INVALID, "no memory registered");
    assert_ok(kvf_agent_register_region(agent, 0, &regions[0]));
    regions[0].address = other;
    assert_fails(kvf_agent_register(agent, regions, 2), KVF_E_EXISTS, "region 0", "as other memory");
    regions[0].address = s.w.p.memory[0][0];
    regions[0].bytes++;
    assert_fails(kvf_agent_register(agent, regions, 2), KVF_E_EXISTS, "region 0", "as other memory");
    regions[0].bytes--;
    assert_ok(kvf_agent_register(agent, regions, 2));
    assert_ok(kvf_agent_introduction(agent, &bytes, &size));
    kvf_agent_close(agent);
    free(other);
    scene_close(&s);
}

/* ---- introductions --------------------------------------------------------------------------- */

static kvf_status introduce(kvf_agent *to, const kvf_introduction *introduction) {
    kvf_wire_buffer bytes = {0};
    assert_ok(kvf_wire_encode_introduction(introduction, &bytes));
    kvf_status status = kvf_agent_introduce(to, bytes.data, bytes.size);
    kvf_wire_buffer_free(&bytes);
    return status;
}

static void an_introduction_is_of_a_sibling(void **state) {
    (void)state;
    scene s;
    kvf_agent *directory = NULL;
    scene_open(&s, attention(2, 4, 8), TWO("P"), ONE("D"), NULL);
    const void *bytes;
    size_t size;
    kvf_introduction intro;
    void *storage;
    assert_ok(kvf_agent_introduction(s.w.p.agents[1], &bytes, &size));
    assert_ok(kvf_wire_decode_introduction((kvf_bytes){bytes, size}, &intro, &storage));
    assert_ok(kvf_agent_open(NULL, 0, NULL, &directory));
    kvf_introduction other = intro;
    other.digest[31] ^= 1;
    assert_fails(introduce(directory, &other), KVF_E_MISMATCH,
                 "the digest of rank 1 of P does not match its facts");
    other.facts = "x"; /* as short as facts can be */
    assert_fails(introduce(directory, &other), KVF_E_MISMATCH, "does not match its facts");
    other.facts = intro.facts;
    assert_ok(introduce(directory, &intro));
    assert_ok(introduce(directory, &intro)); /* the same one again */
    kvf_agent *takers[] = {directory, s.p};
    for (int i = 0; i < 2; i++) {
        assert_fails(introduce(takers[i], &other), KVF_E_MISMATCH, "rank 1 of P caches other cells");
        other = intro;
        other.engine = "Q";
        assert_fails(introduce(takers[i], &other), KVF_E_MISMATCH,
                     "is of engine Q with 2 ranks, not P with 2");
        other.engine = "P";
        other.rank_count = 3;
        assert_fails(introduce(takers[i], &other), KVF_E_MISMATCH,
                     "is of engine P with 3 ranks, not P with 2");
        other = intro;
        other.digest[0] ^= 1;
    }
    other = intro;
    other.incarnation++;
    assert_ok(introduce(s.p, &other)); /* a sibling that was restarted */
    assert_ok(introduce(s.p, &intro));
    assert_fails(introduce(s.w.p.agents[1], &other), KVF_E_EXISTS, "another process says it is rank 1 of P");
    assert_ok(introduce(s.w.p.agents[1], &intro)); /* its own introduction */
    kvf_free(storage);
    kvf_agent_close(directory);
    scene_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_done_without_an_agent_or_a_place_for_the_result),
        cmocka_unit_test(tickets_are_of_requests_of_their_kind),
        cmocka_unit_test(a_request_is_checked_before_anything_is_claimed),
        cmocka_unit_test(a_contact_names_another_engine_and_its_endpoint),
        cmocka_unit_test(a_block_that_is_used_says_for_what),
        cmocka_unit_test(memory_is_registered_once_and_whole),
        cmocka_unit_test(an_introduction_is_of_a_sibling),
    };
    return cmocka_run_group_tests_name("agent_refusals", tests, world_is_simulated, world_is_real);
}
