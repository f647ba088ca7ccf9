/* Cancelling at every moment of a request, from either side, and the details of failures. */
#include <stdio.h>

#include <json.h>

#include "agent/ticket.h"
#include "agent_letters.h"
#include "agent_world.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define TWO(engine_name) ENGINE(.name = (engine_name), .tp_size = 2, .all = {.block_count = 64})
#define MOMENTS 40u

typedef enum who { CONSUMER, PRODUCER, BOTH } who;

typedef struct scene {
    world w;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
} scene;

static void set_up(scene *s, const kvf_agent_options *options) {
    world_open_model(&s->w, attention(4, 8, 8), TWO("P"), ONE("D"), options);
    world_request_make(&s->w, &s->w.p, "a", 50, 0, 1, &s->held);
    world_request_make(&s->w, &s->w.d, "a", 50, 8, 1, &s->wanted);
    world_fill(&s->w, &s->w.p, &s->held, 1);
}

static void start(scene *s, bool push) {
    if (push) {
        world_push(&s->w.p, &s->held, s->theirs);
        world_ready(&s->w.p, s->theirs);
        world_expect(&s->w.d, &s->wanted, &s->w.p, s->ours);
    } else {
        world_hold(&s->w.p, &s->held, s->theirs);
        world_pull(&s->w.d, &s->wanted, &s->w.p, s->ours);
    }
}

static void cancel_all(world_engine *e, const uint64_t *tickets) {
    for (uint32_t r = 0; r < e->rank_count; r++) {
        kvf_status status = kvf_agent_cancel(e->agents[r], tickets[r]);
        assert_true(status == KVF_OK || status == KVF_E_NOT_FOUND);
    }
}

/* The request is DONE with every byte, or cancelled; nothing is left. `heard_of`: the producer knows of the cancel. */
static void finish(scene *s, bool heard_of) {
    const world_outcome *end = world_next(&s->w, s->w.d.agents[0], s->ours[0]);
    if (end->kind == KVF_EVENT_DONE)
        assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &s->wanted, 1), 0);
    else if (end->status != KVF_E_CANCELLED)
        fail_msg("%s: %s", kvf_status_name(end->status), end->detail);
    if (!heard_of)
        cancel_all(&s->w.p, s->theirs);
    for (uint32_t r = 0; r < s->w.p.rank_count; r++)
        (void)world_next(&s->w, s->w.p.agents[r], s->theirs[r]);
    world_quiet(&s->w);
    world_forget(&s->w);
}

/* `known`: the engines have met before. A consumer that cancels before the producer has heard of its request frees
 * nothing there. */
static void cancel_at_every_moment(bool push, who cancels, bool known) {
    scene s;
    set_up(&s, NULL);
    if (known) {
        start(&s, push);
        finish(&s, true);
    }
    for (uint32_t moment = 0; moment < MOMENTS; moment += known ? 1 : 4) {
        start(&s, push);
        const uint64_t late =
            world_now() + WORLD_PATIENCE_S / 2 * SECOND; /* the deadline is no moment to cancel */
        for (uint32_t i = 0; i < moment && world_now() < late; i++)
            world_work(&s.w);
        if (cancels != CONSUMER)
            cancel_all(&s.w.p, s.theirs);
        if (cancels == PRODUCER)
            world_run_for(&s.w, 5 * MS);
        cancel_all(&s.w.d, s.ours);
        finish(&s, known && !push);
        if (!known) {
            world_close(&s.w);
            set_up(&s, NULL);
        }
    }
    world_close(&s.w);
}

static void a_pull_is_cancelled_at_any_moment(void **state) {
    (void)state;
    cancel_at_every_moment(false, CONSUMER, true);
    cancel_at_every_moment(false, CONSUMER, false);
}

static void a_hold_is_cancelled_at_any_moment(void **state) {
    (void)state;
    cancel_at_every_moment(false, PRODUCER, true);
    cancel_at_every_moment(false, BOTH, true);
}

static void an_expectation_is_cancelled_at_any_moment(void **state) {
    (void)state;
    cancel_at_every_moment(true, CONSUMER, true);
    cancel_at_every_moment(true, CONSUMER, false);
}

static void a_push_is_cancelled_at_any_moment(void **state) {
    (void)state;
    cancel_at_every_moment(true, PRODUCER, true);
    cancel_at_every_moment(true, BOTH, true);
}

static void a_connection_attempt_is_cancelled(void **state) {
    (void)state;
    scene s;
    uint64_t ticket;
    set_up(&s, NULL);
    letters_begin();
    letters_rule(LETTERS_LOSE, NULL, KVF_MESSAGE_WELCOME, 0);
    assert_ok(kvf_agent_connect(s.w.d.agents[0], &s.w.p.contact, 0, &ticket));
    world_until(&s.w, letters_met() >= 1);
    assert_ok(kvf_agent_cancel(s.w.d.agents[0], ticket));
    (void)world_failed(&s.w, s.w.d.agents[0], ticket, KVF_E_CANCELLED);
    letters_end();
    world_quiet(&s.w);
    world_close(&s.w);
}

static void readers_of_a_cancelled_hold_may_finish(void **state) {
    (void)state;
    scene s;
    set_up(&s, NULL);
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_block(s.w.p.agents[0], 0, 0) == KVF_BLOCK_LEASED &&
                          world_block(s.w.p.agents[1], 0, 0) == KVF_BLOCK_LEASED);
    cancel_all(&s.w.p, s.theirs);
    world_run_for(&s.w, 20 * MS);
    assert_int_equal(world_block(s.w.p.agents[0], 0, 0), KVF_BLOCK_LEASED);
    assert_int_equal(world_count(&s.w, s.w.p.agents[0], KVF_EVENT_FAILED), 0);
    assert_ok(kvf_agent_pull_into(s.w.d.agents[0], s.ours[0], s.wanted.groups, s.wanted.group_count));
    world_all_done(&s.w, &s.w.d, s.ours);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    for (uint32_t r = 0; r < 2; r++)
        assert_true(world_failed(&s.w, s.w.p.agents[r], s.theirs[r], KVF_E_CANCELLED)->blocks_free);
    world_quiet(&s.w);
    world_close(&s.w);
}

static void a_reader_that_gives_up_before_it_sees_its_lease_frees_a_cancelled_hold(void **state) {
    (void)state;
    scene s;
    set_up(&s, NULL);
    world_hold(&s.w.p, &s.held, s.theirs);
    letters_begin();
    letters_rule(LETTERS_LOSE, NULL, KVF_MESSAGE_ANSWER, KVF_CALL_ACQUIRE);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, letters_met() >= 2);
    letters_end();
    uint64_t begun = world_now();
    cancel_all(&s.w.p, s.theirs);
    cancel_all(&s.w.d, s.ours);
    (void)world_failed(&s.w, s.w.d.agents[0], s.ours[0], KVF_E_CANCELLED);
    for (uint32_t r = 0; r < 2; r++)
        (void)world_failed(&s.w, s.w.p.agents[r], s.theirs[r], KVF_E_CANCELLED);
    assert_true(world_now() - begun < 20 * SECOND); /* not only when the lease of 30 s runs out */
    world_quiet(&s.w);
    world_close(&s.w);
}

/* ---- details --------------------------------------------------------------------------------- */

typedef struct lines {
    char text[8][1024];
    uint32_t count;
} lines;

static void on_line(void *context, const kvf_log_line *line) {
    lines *all = context;
    if (all->count < COUNT_OF(all->text))
        (void)snprintf(all->text[all->count], sizeof all->text[0], "%s", line->text);
    all->count++;
}

static const char *text_of(struct json_object *line, const char *name) {
    struct json_object *value = NULL;
    if (!json_object_object_get_ex(line, name, &value))
        fail_msg("no %s in the line", name);
    return json_object_get_string(value);
}

static void set_up_with_lines(scene *s, lines *all) {
    memset(all, 0, sizeof *all);
    set_up(s, &(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options),
                                         .log = on_line,
                                         .log_context = all,
                                         .log_level = KVF_LOG_WARNING});
}

static void a_failure_is_a_line_of_json_and_is_counted(void **state) {
    (void)state;
    scene s;
    static lines all;
    set_up_with_lines(&s, &all);
    s.wanted.request.id = (kvf_request_id){"a\"\\\n\0z", 6};
    const uint64_t begun = world_now();
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 50 * MS);
    assert_int_equal(all.count, 0);
    char age_ms[32];
    (void)snprintf(age_ms, sizeof age_ms, "%llu", (unsigned long long)((world_now() - begun) / MS));
    cancel_all(&s.w.d, s.ours);
    assert_int_equal(all.count, 1);

    struct json_object *line = json_tokener_parse(all.text[0]);
    assert_non_null(line);
    assert_null(strchr(all.text[0], '\n'));
    assert_string_equal(text_of(line, "failure"), "request");
    assert_string_equal(text_of(line, "engine"), "D");
    assert_string_equal(text_of(line, "rank"), "0");
    assert_string_equal(text_of(line, "kind"), "pull");
    assert_string_equal(text_of(line, "ticket"), "1");
    assert_string_equal(text_of(line, "request"), "a\"\\x5c\\x0a\\x00z");
    assert_string_equal(text_of(line, "peer"), "P");
    assert_string_equal(text_of(line, "status"), "KVF_E_CANCELLED");
    assert_string_equal(text_of(line, "detail"), "cancelled by its engine");
    assert_string_equal(text_of(line, "bytes"), "0");
    assert_string_equal(text_of(line, "age_ms"), age_ms);
    assert_false(json_object_object_get_ex(line, "peer_rank", NULL)); /* all ranks of P */
    (void)json_object_put(line);
    kvf_agent_stats stats = world_stats(s.w.d.agents[0]);
    assert_int_equal(stats.failed[KVF_REQUEST_PULL], 1);
    assert_int_equal(stats.done[KVF_REQUEST_PULL], 0);
    assert_int_equal(stats.failures_by_status[KVF_E_CANCELLED], 1);
    assert_int_equal(stats.total.count, 0);
    world_quiet(&s.w);
    world_close(&s.w);
}

/* The consumer was once told "cancelled by its engine", as if it had cancelled the request itself. */
static void a_consumer_is_told_which_rank_cancelled_a_push(void **state) {
    (void)state;
    scene s;
    set_up(&s, NULL);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_push(&s.w.p, &s.held, s.theirs);
    world_run_for(&s.w, 50 * MS);
    assert_ok(kvf_agent_cancel(s.w.p.agents[1], s.theirs[1]));
    const world_outcome *failed = world_failed(&s.w, s.w.d.agents[0], s.ours[0], KVF_E_CANCELLED);
    assert_string_equal(failed->detail, "P rank 1: cancelled by its engine");
    failed = world_failed(&s.w, s.w.p.agents[1], s.theirs[1], KVF_E_CANCELLED);
    assert_string_equal(failed->detail, "cancelled by its engine");
    (void)world_failed(&s.w, s.w.p.agents[0], s.theirs[0], KVF_E_CANCELLED);
    world_quiet(&s.w);
    world_close(&s.w);
}

static void a_failure_of_a_peer_is_a_line_that_names_its_rank(void **state) {
    (void)state;
    scene s;
    static lines all;
    set_up_with_lines(&s, &all);
    kvf_agent *d = s.w.d.agents[0];
    assert_ok(kvf_agent_lock(d));
    kvf_log_failure(d, "peer", NULL, "P", 1, KVF_E_PEER_LOST, "tcp://h:1: it has gone");
    kvf_log_failure(d, "other", NULL, NULL, 1, KVF_E_IO, "no engine has to do with it");
    kvf_agent_unlock(d);
    assert_int_equal(all.count, 2);
    assert_non_null(strstr(all.text[0], "\"tcp://h:1: it has gone\"")); /* people search for addresses */
    struct json_object *line = json_tokener_parse(all.text[0]);
    assert_string_equal(text_of(line, "failure"), "peer");
    assert_string_equal(text_of(line, "peer"), "P");
    assert_string_equal(text_of(line, "peer_rank"), "1");
    assert_false(json_object_object_get_ex(line, "ticket", NULL));
    (void)json_object_put(line);
    line = json_tokener_parse(all.text[1]);
    assert_string_equal(text_of(line, "detail"), "no engine has to do with it");
    assert_false(json_object_object_get_ex(line, "peer", NULL));
    assert_false(json_object_object_get_ex(line, "peer_rank", NULL));
    (void)json_object_put(line);
    world_quiet(&s.w);
    world_close(&s.w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pull_is_cancelled_at_any_moment),
        cmocka_unit_test(a_hold_is_cancelled_at_any_moment),
        cmocka_unit_test(an_expectation_is_cancelled_at_any_moment),
        cmocka_unit_test(a_push_is_cancelled_at_any_moment),
        cmocka_unit_test(a_connection_attempt_is_cancelled),
        cmocka_unit_test(readers_of_a_cancelled_hold_may_finish),
        cmocka_unit_test(a_reader_that_gives_up_before_it_sees_its_lease_frees_a_cancelled_hold),
        cmocka_unit_test(a_consumer_is_told_which_rank_cancelled_a_push),
        cmocka_unit_test(a_failure_is_a_line_of_json_and_is_counted),
        cmocka_unit_test(a_failure_of_a_peer_is_a_line_that_names_its_rank),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
