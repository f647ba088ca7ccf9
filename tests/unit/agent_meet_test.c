/* How engines meet: which peers answer, which do not, and which are refused and why. */
#include <stdio.h>
#include <stdlib.h>

#include "agent/agent.h"
#include "agent/remote.h"
#include "agent_letters.h"
#include "agent_net.h"
#include "agent_world.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define TWO(engine_name) ENGINE(.name = (engine_name), .tp_size = 2, .all = {.block_count = 64})
#define OPTIONS(...) (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), __VA_ARGS__})

static kvf_model *small_model(void) {
    return attention(2, 4, 8);
}

/* Starts a pull of 32 tokens into rank 0 of D. */
static uint64_t start_pull(world *w, const kvf_contact *contact, uint64_t deadline_ns) {
    world_request wanted;
    uint64_t ticket;
    world_request_make(w, &w->d, "a", 32, 0, 1, &wanted);
    wanted.request.contact = *contact;
    wanted.request.deadline_ns = deadline_ns;
    assert_ok(kvf_agent_pull(w->d.agents[0], &wanted.request, &ticket));
    return ticket;
}

static void pull_goes_well(world *w, const char *id, const kvf_contact *contact) {
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    world_request_make(w, &w->p, id, 40, 10, 1, &held);
    world_request_make(w, &w->d, id, 40, 20, 1, &wanted);
    world_fill(w, &w->p, &held, 3);
    world_hold(&w->p, &held, theirs);
    wanted.request.contact = *contact;
    for (uint32_t r = 0; r < w->d.rank_count; r++)
        assert_ok(kvf_agent_pull(w->d.agents[r], &wanted.request, &ours[r]));
    world_all_done(w, &w->d, ours);
    world_all_done(w, &w->p, theirs);
    assert_int_equal(world_wrong_cells(w, &w->d, &wanted, 3), 0);
}

/* ---- must match ------------------------------------------------------------------------------ */

static void an_engine_that_caches_other_cells_is_refused_with_every_difference(void **state) {
    bool asks_directory = *state != NULL;
    world w;
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), OPTIONS(.facts = "weights: v1"));
    world_close_agents(&w.p);
    kvf_engine_free(w.p.engine);
    kvf_model *other = attention(3, 6, 16);
    w.p.engine = engine_of(other, ONE("P"));
    world_open_agents(&w.p, OPTIONS(.facts = "weights: v2"));
    kvf_contact contact = w.p.contact;
    kvf_agent *answers = w.p.agents[0];
    if (asks_directory) {
        world_open_directory(&w.e);
        world_introduce(&w.p, w.e.agents[0]);
        answers = w.e.agents[0];
        contact.endpoint = kvf_agent_endpoint(answers);
    }

    const world_outcome *failed =
        world_failed(&w, w.d.agents[0], start_pull(&w, &contact, 0), KVF_E_MISMATCH);
    static const char *const words[] = {
        "P", "layers 2 are missing locally", "units", "4", "6", "weights", "v1", "v2"};
    for (size_t i = 0; i < COUNT_OF(words); i++)
        if (!strstr(failed->detail, words[i]))
            fail_msg("no \"%s\" in: %s", words[i], failed->detail);
    assert_int_equal(failed->invalid_count[0], 2);
    assert_int_equal(world_stats(answers).peers_now, 0);
    kvf_model_free(other);
    world_quiet(&w);
    world_close(&w);
}

static void engines_of_other_shape_do_not_differ(void **state) {
    (void)state;
    world w;
    world_open_model(
        &w, small_model(), TWO("P"),
        ENGINE(.name = "D", .all = {.tokens_per_block = 32, .block_count = 64, .order = "BLHNP"}),
        OPTIONS(.facts = "rope: 500000"));
    pull_goes_well(&w, "a", &w.p.contact);
    world_close(&w);
}

static void another_engine_at_the_address_is_an_error(void **state) {
    (void)state;
    world w;
    world_open_model(&w, small_model(), ONE("P"), ONE("D"), NULL);
    kvf_contact contact = w.p.contact;
    contact.engine = "Q";
    const kvf_contact nobody = {.engine = "R", .endpoint = "tcp://127.0.0.1:1"};
    uint64_t other;
    assert_ok(kvf_agent_connect(w.d.agents[0], &nobody, SECOND, &other));
    const world_outcome *failed =
        world_failed(&w, w.d.agents[0], start_pull(&w, &contact, 0), KVF_E_MISMATCH);
    assert_non_null(strstr(failed->detail, "engine P answers"));
    pull_goes_well(&w, "b", &w.p.contact);
    (void)world_failed(&w, w.d.agents[0], other, KVF_E_TIMEOUT); /* it goes on with its own meeting */
    world_quiet(&w);
    world_close(&w);
}

/* Has a directory tell of an engine Q, whose ranks nobody will find. */
static kvf_contact tell_of(world *w, kvf_shard *const *shards, uint32_t ranks) {
    const kvf_agent *d = w->d.agents[0];
    world_open_directory(&w->e);
    for (uint32_t r = 0; r < ranks; r++) {
        kvf_wire_buffer shard, bytes;
        assert_ok(kvf_wire_encode_shard(shards[r], NULL, &shard));
        kvf_introduction rank = {.engine = "Q",
                                 .incarnation = r,
                                 .rank = r,
                                 .rank_count = ranks,
                                 .endpoint = "tcp://127.0.0.1:1",
                                 .public_key = "",
                                 .shard = {shard.data, shard.size},
                                 .facts = d->facts};
        memcpy(rank.digest, d->digest, sizeof rank.digest);
        assert_ok(kvf_wire_encode_introduction(&rank, &bytes));
        assert_ok(kvf_agent_introduce(w->e.agents[0], bytes.data, bytes.size));
        kvf_wire_buffer_free(&bytes);
        kvf_wire_buffer_free(&shard);
    }
    return (kvf_contact){.engine = "Q", .endpoint = kvf_agent_endpoint(w->e.agents[0])};
}

/* Each cell lies between those of other layers, in large blocks: a shard has some 65000 pieces to sort. */
static void shards_that_take_long_to_check_are_read_one_by_one(void **state) {
    (void)state;
    enum { RANKS = 16, TOKENS = 1 << 14 };
    world w;
    kvf_shard *shards[RANKS];
    world_open_model(&w, attention(2, RANKS, 2), ONE("P"), ONE("D"), NULL);
    kvf_agent *d = w.d.agents[0];
    kvf_engine *heavy =
        engine_of(w.model, ENGINE(.name = "Q", .tp_size = RANKS,
                                  .all = {.tokens_per_block = TOKENS, .block_count = 1, .order = "BNLPH"}));
    for (uint32_t r = 0; r < RANKS; r++)
        shards[r] = (kvf_shard *)kvf_engine_shard(heavy, r);
    const kvf_contact contact = tell_of(&w, shards, RANKS);
    const uint64_t pull = start_pull(&w, &contact, 10 * SECOND);
    const kvf_remote *remote = d->all_remotes;
    uint32_t read = 0, most = 0;
    while (!remote->geometry || !remote->geometry->engine) {
        world_work(&w);
        const uint32_t now = remote->geometry && remote->geometry->engine ? RANKS : remote->siblings.read;
        most = now - read > most ? now - read : most;
        read = now;
    }
    assert_int_equal(most, 1);
    assert_int_equal(kvf_agent_cancel(d, pull), KVF_OK);
    kvf_engine_free(heavy);
    world_close(&w);
}

/* An introduction says in a few bytes that there are 2^18 regions of the same size. */
static void an_engine_whose_shards_take_too_much_memory_is_refused(void **state) {
    (void)state;
    enum { RANKS = 40, REGIONS = 1 << 18 };
    world w;
    kvf_shard *shards[RANKS];
    uint64_t *regions = calloc(REGIONS, sizeof *regions);
    assert_non_null(regions);
    world_open_model(&w, attention(2, RANKS, 2), ONE("P"), ONE("D"), NULL);
    kvf_engine *small = engine_of(w.model, ENGINE(.name = "Q", .tp_size = RANKS, .all = {.block_count = 1}));
    for (uint32_t r = 0; r < RANKS; r++) {
        kvf_shard_desc desc = *kvf_shard_get(kvf_engine_shard(small, r));
        memcpy(regions, desc.region_bytes, desc.region_count * sizeof *regions);
        desc.region_count = REGIONS;
        desc.region_bytes = regions;
        assert_ok(kvf_shard_create(w.model, &desc, &shards[r]));
    }
    const kvf_contact contact = tell_of(&w, shards, RANKS);
    const world_outcome *failed = world_failed(&w, w.d.agents[0], start_pull(&w, &contact, 0), KVF_E_RANGE);
    assert_non_null(strstr(failed->detail, "the shards of the first"));
    for (uint32_t r = 0; r < RANKS; r++)
        kvf_shard_free(shards[r]);
    kvf_engine_free(small);
    free(regions);
    world_close(&w);
}

/* Each of two ranks says that it is where the other one is. */
static void another_rank_at_the_address_is_an_error(void **state) {
    (void)state;
    world w;
    world_open_model(&w, small_model(), TWO("P"), ONE("D"), NULL);
    world_open_directory(&w.e);
    world_introduce(&w.p, w.e.agents[0]);
    for (uint32_t r = 0; r < 2; r++) {
        kvf_introduction wrong;
        void *storage = NULL;
        kvf_wire_buffer bytes;
        const kvf_wire_buffer *right = &w.p.agents[r]->introductions[r];
        assert_ok(kvf_wire_decode_introduction((kvf_bytes){right->data, right->size}, &wrong, &storage));
        wrong.endpoint = kvf_agent_endpoint(w.p.agents[1 - r]);
        assert_ok(kvf_wire_encode_introduction(&wrong, &bytes));
        assert_ok(kvf_agent_introduce(w.e.agents[0], bytes.data, bytes.size));
        kvf_free(storage);
        kvf_wire_buffer_free(&bytes);
    }
    const kvf_contact contact = {.engine = "P", .endpoint = kvf_agent_endpoint(w.e.agents[0])};
    const world_outcome *failed =
        world_failed(&w, w.d.agents[0], start_pull(&w, &contact, 0), KVF_E_MISMATCH);
    assert_non_null(strstr(failed->detail, "of engine P answers where rank"));
    assert_true(world_count(&w, w.d.agents[0], KVF_EVENT_PEER_LOST) > 0); /* though it had not been met */
    world_quiet(&w);
    world_close(&w);
}

static void an_engine_does_not_meet_itself(void **state) {
    (void)state;
    world w;
    world_open_model(&w, small_model(), ONE("P"), ONE("D"), NULL);
    assert_fails(kvf_agent_connect(w.d.agents[0], &w.d.contact, 0, NULL), KVF_E_INVALID, "D");
    assert_fails(kvf_agent_connect(w.d.agents[0],
                                   &(kvf_contact){.engine = "", .endpoint = "tcp://127.0.0.1:1"}, 0, NULL),
                 KVF_E_INVALID, "engine");
    assert_fails(kvf_agent_connect(w.d.agents[0], &(kvf_contact){.engine = "P"}, 0, NULL), KVF_E_INVALID,
                 "endpoint");
    assert_int_not_equal(
        kvf_agent_connect(w.d.agents[0], &(kvf_contact){.engine = "P", .endpoint = "nonsense"}, 0, NULL),
        KVF_OK);
    world_quiet(&w);
    world_close(&w);
}

static void a_name_may_be_as_long_as_messages_allow(void **state) {
    (void)state;
    world w;
    uint64_t ticket;
    char name[KVF_WIRE_MAX_NAME + 2] = {0};
    const kvf_contact contact = {.engine = name, .endpoint = "tcp://127.0.0.1:1"};
    world_open_model(&w, small_model(), ONE("P"), ONE("D"), NULL);
    memset(name, 'N', KVF_WIRE_MAX_NAME + 1);
    assert_fails(kvf_agent_connect(w.d.agents[0], &contact, MS, &ticket), KVF_E_INVALID, "too long");
    name[KVF_WIRE_MAX_NAME] = '\0';
    assert_ok(kvf_agent_connect(w.d.agents[0], &contact, MS, &ticket));
    (void)world_failed(&w, w.d.agents[0], ticket, KVF_E_TIMEOUT);
    world_quiet(&w);
    world_close(&w);
}

/* The greetings that came to a contact, and what the last one asked and told. */
typedef struct listener {
    uint32_t greetings;
    bool asked_for_card, told_secret;
} listener;

static void listen(void *context, const kvf_letter *letter) {
    listener *l = context;
    const uint8_t none[KVF_WIRE_SECRET_BYTES] = {0};
    kvf_message message;
    assert_ok(kvf_wire_open((kvf_bytes){letter->data, letter->bytes}, &message));
    assert_ok(kvf_wire_read(&message));
    assert_int_equal(message.kind, KVF_MESSAGE_HELLO);
    l->greetings++;
    l->asked_for_card = message.hello.wants_card;
    l->told_secret = memcmp(message.hello.secret, none, sizeof none) != 0;
    kvf_message_free(&message);
}

static void ignore_break(void *context, kvf_route route, kvf_status status, const char *detail) {
    (void)context, (void)route, (void)status, (void)detail;
}

/* By its secret an engine proves who it is to those whose memory it reads or writes. A contact only knows ranks. */
static void a_contact_is_not_told_the_secret(void **state) {
    (void)state;
    world w;
    listener l = {0};
    kvf_link *link;
    uint64_t ticket;
    const kvf_link_options options = {.table = net_surroundings.link,
                                      .listen = "tcp://127.0.0.1:4567",
                                      .on_message = listen,
                                      .on_broken = ignore_break,
                                      .context = &l};
    world_open_model(&w, small_model(), ONE("P"), ONE("D"), NULL);
    assert_ok(kvf_link_open(&options, &link));
    const kvf_contact contact = {.engine = "Q", .endpoint = kvf_link_endpoint(link)};
    assert_ok(kvf_agent_connect(w.d.agents[0], &contact, SECOND, &ticket));
    for (const uint64_t end = world_now() + 100 * MS; world_now() < end;)
        world_work_beside(&w, link, MS);
    assert_true(l.greetings > 0);
    assert_false(l.asked_for_card || l.told_secret);
    kvf_link_close(link);
    (void)world_failed(&w, w.d.agents[0], ticket, KVF_E_TIMEOUT);
    world_quiet(&w);
    world_close(&w);
}

/* Answers greetings as an agent of the next version of the protocol. */
typedef struct successor {
    kvf_link *link;
    uint32_t greetings;
} successor;

static void answer_in_next_version(void *context, const kvf_letter *letter) {
    successor *s = context;
    kvf_wire_buffer bytes;
    const kvf_message refused = {
        .kind = KVF_MESSAGE_REFUSED,
        .refused = {.status = KVF_E_UNSUPPORTED, .detail = "speaks another version"}};
    s->greetings++;
    assert_ok(kvf_wire_encode(&refused, &bytes));
    assert_int_equal(bytes.data[5], KVF_WIRE_VERSION);
    bytes.data[5]++;
    assert_ok(kvf_link_send(s->link, letter->route, bytes.data, bytes.size));
    kvf_wire_buffer_free(&bytes);
}

static void an_engine_of_another_version_is_refused_at_once(void **state) {
    (void)state;
    world w;
    successor s = {0};
    uint64_t ticket;
    char words[64];
    const kvf_link_options options = {.table = net_surroundings.link,
                                      .listen = "tcp://127.0.0.1:4567",
                                      .on_message = answer_in_next_version,
                                      .on_broken = ignore_break,
                                      .context = &s};
    world_open_model(&w, small_model(), ONE("P"), ONE("D"), NULL);
    assert_ok(kvf_link_open(&options, &s.link));
    const kvf_contact contact = {.engine = "Q", .endpoint = kvf_link_endpoint(s.link)};
    assert_ok(kvf_agent_connect(w.d.agents[0], &contact, 10 * SECOND, &ticket));
    for (const uint64_t end = world_now() + SECOND; world_now() < end;)
        world_work_beside(&w, s.link, MS);
    const world_outcome *failed = world_failed(&w, w.d.agents[0], ticket, KVF_E_UNSUPPORTED);
    (void)snprintf(words, sizeof words, "Q speaks version %u of the protocol", KVF_WIRE_VERSION + 1);
    assert_non_null(strstr(failed->detail, words));
    assert_int_equal(s.greetings, 1);
    kvf_link_close(s.link);
    world_quiet(&w);
    world_close(&w);
}

/* ---- no producer ----------------------------------------------------------------------------- */

static void nobody_there_is_told_at_the_deadline_with_the_reason(void **state) {
    (void)state;
    world w;
    world_open_model(&w, small_model(), ONE("P"), ONE("D"), NULL);
    const kvf_contact nobody = {.engine = "P", .endpoint = "tcp://127.0.0.1:1"};
    kvf_agent *d = w.d.agents[0];
    uint64_t connect, begun = world_now();
    uint64_t pull = start_pull(&w, &nobody, 300 * MS);
    assert_ok(kvf_agent_connect(d, &nobody, 400 * MS, &connect));

    const world_outcome *failed = world_failed(&w, d, pull, KVF_E_TIMEOUT);
    assert_true(world_now() - begun >= 300 * MS);
    assert_non_null(strstr(failed->detail, "deadline"));
    assert_non_null(strstr(failed->detail, "127.0.0.1:1"));
    failed = world_failed(&w, d, connect, KVF_E_TIMEOUT);
    assert_true(world_now() - begun >= 400 * MS);
    assert_non_null(strstr(failed->detail, "127.0.0.1:1"));
    assert_int_equal(failed->request_kind, KVF_REQUEST_CONNECT);
    world_quiet(&w);
    world_close(&w);
}

/* So the next request finds it met if it has come up meanwhile. */
static void an_engine_that_was_not_met_is_greeted_until_it_is_idle(void **state) {
    (void)state;
    world w;
    uint64_t ticket;
    world_open_model(&w, small_model(), ONE("P"), ONE("D"), OPTIONS(.idle_ns = 10 * SECOND));
    letters_begin();
    letters_rule(LETTERS_LOSE, w.d.agents[0], KVF_MESSAGE_HELLO, 0);
    assert_ok(kvf_agent_connect(w.d.agents[0], &w.p.contact, 100 * MS, &ticket));
    (void)world_failed(&w, w.d.agents[0], ticket, KVF_E_TIMEOUT);
    world_run_for(&w, 5 * SECOND);
    const uint32_t met = letters_met();
    world_run_for(&w, 4 * SECOND);
    assert_int_equal(letters_met(), met + 4); /* once a second */
    world_run_for(&w, 3 * SECOND);
    const uint32_t all = letters_met();
    world_run_for(&w, 5 * SECOND);
    assert_int_equal(letters_met(), all);
    letters_end();
    world_quiet(&w);
    world_close(&w);
}

static void a_producer_that_comes_up_late_is_met(void **state) {
    (void)state;
    world w;
    world_open_model(&w, small_model(), ONE("P"), ONE("D"), NULL);
    char endpoint[64];
    (void)snprintf(endpoint, sizeof endpoint, "%s", w.p.contact.endpoint);
    world_close_agents(&w.p);
    const kvf_contact contact = {.engine = "P", .endpoint = endpoint};
    uint64_t pull = start_pull(&w, &contact, WORLD_PATIENCE_S * SECOND), hold;
    world_run_for(&w, 500 * MS);
    world_open_agents(&w.p, OPTIONS(.listen = endpoint));

    world_request held;
    world_request_make(&w, &w.p, "a", 32, 0, 1, &held);
    world_hold(&w.p, &held, &hold);
    (void)world_done(&w, w.d.agents[0], pull);
    (void)world_done(&w, w.p.agents[0], hold);
    world_quiet(&w);
    world_close(&w);
}

static void a_contact_that_misses_siblings_says_so(void **state) {
    (void)state;
    world w;
    world_open_model(&w, small_model(), TWO("P"), ONE("D"), NULL);
    kvf_contact contact = w.p.contact;
    contact.endpoint = kvf_agent_endpoint(w.p.agents[1]);
    const world_outcome *failed =
        world_failed(&w, w.d.agents[0], start_pull(&w, &contact, 300 * MS), KVF_E_TIMEOUT);
    assert_non_null(strstr(failed->detail, "1 of its engine's 2 ranks"));
    world_introduce(&w.p, w.p.agents[1]);
    pull_goes_well(&w, "b", &contact);
    world_close(&w);
}

/* The rank at the address answers. */
static void a_sibling_that_does_not_answer_is_the_reason_at_the_deadline(void **state) {
    (void)state;
    for (uint32_t silent = 0; silent < 2; silent++) {
        world w;
        world_open_model(&w, small_model(), TWO("P"), ONE("D"), NULL);
        world_introduce(&w.p, w.p.agents[1]);
        kvf_contact contact = w.p.contact;
        contact.endpoint = kvf_agent_endpoint(w.p.agents[1 - silent]);
        letters_begin();
        letters_rule(LETTERS_LOSE, w.p.agents[silent], KVF_MESSAGE_WELCOME, 0);
        const world_outcome *failed =
            world_failed(&w, w.d.agents[0], start_pull(&w, &contact, 300 * MS), KVF_E_TIMEOUT);
        char said[64];
        (void)snprintf(said, sizeof said, "the deadline has passed: P rank %u: it did not answer", silent);
        assert_string_equal(failed->detail, said);
        letters_end();
        world_quiet(&w);
        world_close(&w);
    }
}

/* An engine of that many ranks is met in several rounds. */
static void a_rank_that_is_lost_while_its_engine_is_met_ends_the_meeting(void **state) {
    (void)state;
    world w;
    world_open_model(&w, attention(72, 1, 8), ENGINE(.name = "P", .pp_size = 72, .all = {.block_count = 64}),
                     ENGINE(.name = "D", .all = {.block_count = 64, .order = "BLHNP"}), NULL);
    kvf_agent *d = w.d.agents[0];
    world_introduce(&w.p, w.p.agents[0]);
    const uint64_t pull = start_pull(&w, &w.p.contact, 0);
    world_until(&w, world_stats(d).peers_now > 0);
    assert_int_not_equal(world_stats(d).peers_now, 72);
    world_lose(d, world_session(d, false));
    const world_outcome *failed = world_failed(&w, d, pull, KVF_E_PEER_LOST);
    assert_non_null(strstr(failed->detail, "P rank 0"));
    pull_goes_well(&w, "b", &w.p.contact);
    world_quiet(&w);
    world_close(&w);
}

static void a_lost_greeting_is_repeated(void **state) {
    (void)state;
    world w;
    world_open_model(&w, small_model(), ONE("P"), ONE("D"), NULL);
    letters_begin();
    letters_rule(LETTERS_LOSE, NULL, KVF_MESSAGE_HELLO, 0);
    uint64_t pull = start_pull(&w, &w.p.contact, WORLD_PATIENCE_S * SECOND);
    world_until(&w, letters_met() >= 2);
    letters_no_rules();
    letters_rule(LETTERS_LOSE, NULL, KVF_MESSAGE_WELCOME, 0);
    world_until(&w, letters_met() >= 4);
    letters_end();
    assert_ok(kvf_agent_cancel(w.d.agents[0], pull));
    (void)world_failed(&w, w.d.agents[0], pull, KVF_E_CANCELLED);
    pull_goes_well(&w, "b", &w.p.contact);
    world_quiet(&w);
    world_close(&w);
}

/* ---- directories, and ahead of time ---------------------------------------------------------- */

static void a_directory_introduces_an_engine_without_memory_of_its_own(void **state) {
    (void)state;
    world w;
    world_open_model(&w, small_model(), TWO("P"), ONE("D"), NULL);
    world_open_directory(&w.e);
    const kvf_contact contact = {.engine = "P", .endpoint = kvf_agent_endpoint(w.e.agents[0])};
    uint64_t pull = start_pull(&w, &contact, 300 * MS);
    assert_non_null(strstr(world_failed(&w, w.d.agents[0], pull, KVF_E_TIMEOUT)->detail, "knows no engine"));

    world_introduce(&w.p, w.e.agents[0]);
    pull_goes_well(&w, "b", &contact);
    const void *bytes;
    size_t size;
    uint64_t ticket;
    void *memory;
    assert_fails(kvf_agent_introduction(w.e.agents[0], &bytes, &size), KVF_E_INVALID, "");
    assert_fails(kvf_agent_allocate(w.e.agents[0], KVF_MEMORY_HOST, 0, 64, &memory), KVF_E_INVALID,
                 "directory");
    assert_fails(kvf_agent_connect(w.e.agents[0], &w.d.contact, 0, &ticket), KVF_E_INVALID, "");
    assert_ok(kvf_agent_introduction(w.d.agents[0], &bytes, &size));
    assert_fails(kvf_agent_introduce(w.e.agents[0], bytes, size), KVF_E_MISMATCH, "D", "P");
    assert_fails(kvf_agent_introduce(w.e.agents[0], bytes, size - 1), KVF_E_PARSE, "");
    assert_fails(kvf_agent_introduce(w.e.agents[0], NULL, size), KVF_E_INVALID, "bytes is NULL");
    assert_fails(kvf_agent_introduce(NULL, bytes, size), KVF_E_INVALID, "agent is NULL");
    world_quiet(&w);
    world_close(&w);
}

/* What it had begun to keep of the first engine is gone. */
static void a_directory_that_had_no_memory_for_one_engine_takes_another(void **state) {
    (void)state;
    memory_count memory;
    world w;
    count_memory(&memory);
    world_open_model(&w, small_model(), ONE("P"), ONE("D"), NULL);
    world_add(&w, ONE("E"), OPTIONS(.facts = "weights: v2"));
    kvf_status status = KVF_E_NOMEM;
    for (size_t refused = 1; status; refused++) {
        const size_t live = memory.live;
        kvf_agent *directory;
        const kvf_wire_buffer *p = &w.p.agents[0]->with_facts;
        assert_ok(kvf_agent_open_in(&net_surroundings, NULL, 0, OPTIONS(.listen = "tcp://127.0.0.1:7000"),
                                    &directory));
        memory.calls = 0;
        memory.fail_at = refused;
        status = kvf_agent_introduce(directory, p->data, p->size);
        memory.fail_at = 0;
        assert_true(status == KVF_OK || status == KVF_E_NOMEM);
        const kvf_agent *known = directory->name ? w.p.agents[0] : w.e.agents[0];
        assert_ok(kvf_agent_introduce(directory, known->with_facts.data, known->with_facts.size));
        assert_string_equal(directory->name, known->name);
        assert_string_equal(directory->facts, known->facts);
        assert_int_equal(directory->introduction_count, 1);
        kvf_agent_close(directory);
        assert_int_equal(memory.live, live);
    }
    world_close(&w);
    assert_int_equal(memory.live, 0);
}

static void an_engine_met_ahead_of_time_is_not_greeted_again(void **state) {
    (void)state;
    world w;
    uint64_t ticket;
    world_open_model(&w, small_model(), TWO("P"), ONE("D"), NULL);
    const uint64_t begun = world_now();
    letters_begin();
    letters_rule(LETTERS_KEEP, w.p.agents[1], KVF_MESSAGE_WELCOME, 0);
    assert_ok(kvf_agent_connect(w.d.agents[0], &w.p.contact, 0, &ticket));
    world_until(&w, letters_met() >= 1);
    world_run_for(&w, 20 * MS);
    assert_int_equal(world_count(&w, w.d.agents[0], KVF_EVENT_PEER_READY), 0); /* one rank is missing */
    letters_no_rules();
    letters_deliver();
    const world_outcome *ready = world_done(&w, w.d.agents[0], ticket);
    assert_int_equal(ready->kind, KVF_EVENT_PEER_READY);
    assert_string_equal(ready->engine, "P");

    letters_begin();
    letters_rule(LETTERS_PASS, NULL, KVF_MESSAGE_HELLO, 0);
    pull_goes_well(&w, "a", &w.p.contact);
    assert_int_equal(letters_met(), 0);
    letters_end();
    int64_t offset;
    uint64_t error;
    assert_ok(kvf_agent_clock_offset(w.d.agents[0], "P", 1, &offset, &error));
    assert_true((uint64_t)llabs(offset) <= error); /* both read the same clock */
    /* No message of rank 0 was late: the offset is off by at most one way's latency, and half a nanosecond of
     * rounding; and by a drift since. */
    assert_ok(kvf_agent_clock_offset(w.d.agents[0], "P", 0, &offset, &error));
    assert_in_range(error, NET_LATENCY_NS + 1, NET_LATENCY_NS + 1 + (world_now() - begun) / 2048);
    assert_fails(kvf_agent_clock_offset(w.d.agents[0], "P", 2, &offset, &error), KVF_E_NOT_FOUND, "2");
    world_quiet(&w);
    world_close(&w);
}

/* Any agent of an engine introduces it: requests that name different ones at the same time all go well. */
static void an_engine_may_be_named_by_several_of_its_agents_while_it_is_met(void **state) {
    (void)state;
    world w;
    world_request held[2], wanted[2];
    uint64_t theirs[2][WORLD_MAX_RANKS], ours[2];
    world_open_model(&w, small_model(), TWO("P"), ONE("D"), NULL);
    world_introduce(&w.p, w.p.agents[1]); /* beside rank 0, which introduces it anyway */
    for (uint32_t i = 0; i < 2; i++) {
        const char *id = i ? "b" : "a";
        world_request_make(&w, &w.p, id, 40, 10 + 20 * i, 1, &held[i]);
        world_request_make(&w, &w.d, id, 40, 20 + 20 * i, 1, &wanted[i]);
        world_fill(&w, &w.p, &held[i], 3);
        world_hold(&w.p, &held[i], theirs[i]);
        wanted[i].request.contact = w.p.contact;
        wanted[i].request.contact.endpoint = kvf_agent_endpoint(w.p.agents[i]);
        wanted[i].request.deadline_ns = 20 * SECOND;
    }
    for (uint32_t i = 0; i < 2; i++)
        assert_ok(kvf_agent_pull(w.d.agents[0], &wanted[i].request, &ours[i]));
    for (uint32_t i = 0; i < 2; i++) {
        world_all_done(&w, &w.d, &ours[i]);
        world_all_done(&w, &w.p, theirs[i]);
        assert_int_equal(world_wrong_cells(&w, &w.d, &wanted[i], 3), 0);
    }
    world_quiet(&w);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_engine_that_caches_other_cells_is_refused_with_every_difference),
        {"... also by a directory", an_engine_that_caches_other_cells_is_refused_with_every_difference, NULL,
         NULL, "directory"},
        cmocka_unit_test(engines_of_other_shape_do_not_differ),
        cmocka_unit_test(shards_that_take_long_to_check_are_read_one_by_one),
        cmocka_unit_test(an_engine_whose_shards_take_too_much_memory_is_refused),
        cmocka_unit_test(another_engine_at_the_address_is_an_error),
        cmocka_unit_test(another_rank_at_the_address_is_an_error),
        cmocka_unit_test(an_engine_does_not_meet_itself),
        cmocka_unit_test(a_name_may_be_as_long_as_messages_allow),
        cmocka_unit_test(a_contact_is_not_told_the_secret),
        cmocka_unit_test(an_engine_of_another_version_is_refused_at_once),
        cmocka_unit_test(nobody_there_is_told_at_the_deadline_with_the_reason),
        cmocka_unit_test(an_engine_that_was_not_met_is_greeted_until_it_is_idle),
        cmocka_unit_test(a_producer_that_comes_up_late_is_met),
        cmocka_unit_test(a_contact_that_misses_siblings_says_so),
        cmocka_unit_test(a_sibling_that_does_not_answer_is_the_reason_at_the_deadline),
        cmocka_unit_test(a_rank_that_is_lost_while_its_engine_is_met_ends_the_meeting),
        cmocka_unit_test(a_lost_greeting_is_repeated),
        cmocka_unit_test(a_directory_introduces_an_engine_without_memory_of_its_own),
        cmocka_unit_test_teardown(a_directory_that_had_no_memory_for_one_engine_takes_another,
                                  stop_counting_memory),
        cmocka_unit_test(an_engine_met_ahead_of_time_is_not_greeted_again),
        cmocka_unit_test(an_engine_may_be_named_by_several_of_its_agents_while_it_is_met),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
