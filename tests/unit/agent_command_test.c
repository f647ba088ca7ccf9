/* Commands: who may give them, that each is handed to the engine once, and that every asker gets its reply. */
#include <stdio.h>

#include "agent/command.h"
#include "agent_rights.h"

#define NO_LIMIT UINT64_MAX

/* P, which takes commands from `rightful`; `other` has a key that is on the list, too, and `stranger` has none. */
static void open_commanded(rights *s) {
    rights_open(s);
    speaker *all[] = {&s->rightful, &s->other, &s->stranger};
    const kvf_key_grant grants[] = {
        {.struct_size = sizeof *grants, .public_key = s->rightful.public_key, .commands = true},
        {.struct_size = sizeof *grants, .public_key = s->other.public_key}};
    world_close_agents(&s->w.p);
    world_open_agents(&s->w.p, OPTIONS(.public_key = s->p_public, .secret_key = s->p_secret, .grants = grants,
                                       .grant_count = 2));
    s->p = s->w.p.agents[0];
    for (int i = 0; i < 3; i++) {
        speaker_close(all[i]);
        speaker_reopen(all[i], s->p);
    }
}

/* P without keys, which takes commands from programs of this machine. */
static void open_local(rights *s) {
    rights_open(s);
    world_close_agents(&s->w.p);
    world_open_agents(&s->w.p, OPTIONS(.local_commands = true));
    s->p = s->w.p.agents[0];
    speaker_close(&s->stranger);
    speaker_reopen(&s->stranger, s->p);
}

/* Repeats a command until there is a reply, as an asker does: a connection that was silent for long has been closed. */
static kvf_status command(rights *s, speaker *by, uint8_t id) {
    for (int i = 0; i < 20; i++) {
        if (speaker_command(&s->w, by, id, "drain", NO_LIMIT))
            return by->status;
    }
    fail_msg("no reply");
    return KVF_E_TIMEOUT;
}

static uint32_t told(const rights *s) {
    return world_count(&s->w, s->p, KVF_EVENT_COMMAND);
}

/* ---- who may ----------------------------------------------------------------------------------- */

static void commands_are_taken_from_keys_that_have_the_right(void **state) {
    (void)state;
    rights s;
    open_commanded(&s);
    const uint64_t foreign = world_stats(s.p).messages_foreign;
    assert_int_equal(command(&s, &s.other, 1), KVF_E_PERMISSION);
    assert_non_null(strstr(s.other.detail, "does not allow this key to give commands"));
    assert_int_equal(command(&s, &s.stranger, 1), KVF_E_PERMISSION);
    assert_int_equal(world_stats(s.p).messages_foreign, foreign + 2);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 1); /* the same reason is told once */
    assert_int_equal(told(&s), 0);
    assert_int_equal(command(&s, &s.rightful, 1), KVF_E_AGAIN);
    assert_int_equal(told(&s), 1);
    rights_close(&s);
}

static void without_keys_commands_are_taken_only_if_the_options_say_so(void **state) {
    (void)state;
    rights s;
    open_local(&s);
    assert_int_equal(command(&s, &s.stranger, 1), KVF_E_AGAIN);
    assert_int_equal(told(&s), 1);
    world_close_agents(&s.w.p);
    world_forget(&s.w);
    world_open_agents(&s.w.p, OPTIONS(.lease_ns = RIGHTS_LEASE));
    s.p = s.w.p.agents[0];
    speaker_close(&s.stranger);
    speaker_reopen(&s.stranger, s.p);
    assert_int_equal(command(&s, &s.stranger, 2), KVF_E_PERMISSION);
    assert_non_null(strstr(s.stranger.detail, "local_commands is not set"));
    assert_int_equal(told(&s), 0);
    rights_close(&s);
}

static void an_operators_key_speaks_for_no_engine(void **state) {
    (void)state;
    rights s;
    open_commanded(&s);
    memcpy(s.rightful.digest, s.p->digest, sizeof s.rightful.digest);
    speaker_greet(&s.w, &s.rightful);
    assert_int_equal(s.rightful.kind, KVF_MESSAGE_REFUSED);
    assert_int_equal(s.rightful.status, KVF_E_PERMISSION);
    memcpy(s.other.digest, s.p->digest, sizeof s.other.digest);
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.kind, KVF_MESSAGE_WELCOME);
    rights_close(&s);
}

/* Opening an agent must fail. */
static void refused(rights *s, const kvf_agent_options *options, const char *why) {
    kvf_agent *agent = NULL;
    assert_fails(kvf_agent_open(s->w.p.engine, 0, options, &agent), KVF_E_INVALID, why);
}

static void rights_to_command_are_given_alone(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_key_grant grant = {
        .struct_size = sizeof grant, .public_key = s.d_public, .engine = "D", .commands = true};
    const kvf_agent_options keyed = {.struct_size = sizeof keyed,
                                     .public_key = s.p_public,
                                     .secret_key = s.p_secret,
                                     .grants = &grant,
                                     .grant_count = 1};
    refused(&s, &keyed, "a grant of commands names no engine");
    grant = (kvf_key_grant){
        .struct_size = sizeof grant, .public_key = s.d_public, .rank_end = 1, .commands = true};
    refused(&s, &keyed, "a grant of commands names no engine");
    refused(&s, OPTIONS(.local_commands = true, .insecure = true), "together with insecure");
    refused(&s, OPTIONS(.local_commands = true, .public_key = s.p_public, .secret_key = s.p_secret),
            "together with keys");
    rights_close(&s);
}

static void a_directory_takes_no_commands(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    world_close_agents(&s.w.p);
    kvf_engine *engine = s.w.p.engine;
    s.w.p.engine = NULL;
    world_open_directory(&s.w.p);
    s.w.p.engine = engine;
    s.p = s.w.p.agents[0];
    speaker_close(&s.stranger);
    speaker_reopen(&s.stranger, s.p);
    assert_int_equal(command(&s, &s.stranger, 1), KVF_E_UNSUPPORTED);
    rights_close(&s);
}

static void keep_line(void *context, const kvf_log_line *line) {
    if (strncmp(line->text, "command ", strlen("command ")) == 0)
        (void)snprintf(context, 128, "%s", line->text);
}

static void each_command_is_logged_with_its_asker(void **state) {
    (void)state;
    for (int keyed = 0; keyed < 2; keyed++) {
        rights s;
        char logged[128] = "";
        rights_open(&s);
        const kvf_key_grant grant = {
            .struct_size = sizeof grant, .public_key = s.rightful.public_key, .commands = true};
        speaker *by = keyed ? &s.rightful : &s.stranger;
        world_close_agents(&s.w.p);
        world_open_agents(&s.w.p, OPTIONS(.public_key = keyed ? s.p_public : NULL,
                                          .secret_key = keyed ? s.p_secret : NULL, .grants = &grant,
                                          .grant_count = keyed, .local_commands = !keyed, .log = keep_line,
                                          .log_context = logged, .log_level = KVF_LOG_INFO));
        s.p = s.w.p.agents[0];
        speaker_close(by);
        speaker_reopen(by, s.p);
        assert_int_equal(command(&s, by, 1), KVF_E_AGAIN);
        world_run_for(&s.w, MS);
        const char *begin = "command 1: drain, by ";
        assert_int_equal(strncmp(logged, begin, strlen(begin)), 0);
        assert_string_equal(logged + strlen(begin), keyed ? by->public_key : "a program of this machine");
        rights_close(&s);
    }
}

/* ---- once -------------------------------------------------------------------------------------- */

static void a_command_is_told_once_and_replied_to_each_time(void **state) {
    (void)state;
    rights s;
    open_local(&s);
    for (int i = 0; i < 3; i++)
        assert_int_equal(command(&s, &s.stranger, 7), KVF_E_AGAIN);
    assert_int_equal(told(&s), 1);
    const kvf_record records[] = {{.name = "where", .data = "here", .size = 4}};
    uint32_t letters = s.stranger.letters;
    const uint64_t sent = world_stats(s.p).messages_sent;
    assert_ok(kvf_agent_reply(s.p, s.p->last_command, KVF_E_NOT_FOUND, "holds no such request", records, 1));
    while (s.stranger.letters == letters)
        speaker_work(&s.w, &s.stranger); /* the reply comes unasked */
    assert_int_equal(s.stranger.kind, KVF_MESSAGE_REPLY);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(s.stranger.status, KVF_E_NOT_FOUND);
        assert_string_equal(s.stranger.detail, "holds no such request");
        assert_int_equal(s.stranger.records, 1);
        s.stranger.status = KVF_OK;
        assert_int_equal(command(&s, &s.stranger, 7), KVF_E_NOT_FOUND);
    }
    assert_int_equal(world_stats(s.p).messages_sent, sent + 4);
    assert_int_equal(told(&s), 1);
    assert_int_equal(command(&s, &s.stranger, 8), KVF_E_AGAIN);
    assert_int_equal(told(&s), 2);
    rights_close(&s);
}

static void the_same_id_from_another_key_is_another_command(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    const kvf_key_grant grants[] = {
        {.struct_size = sizeof *grants, .public_key = s.rightful.public_key, .commands = true},
        {.struct_size = sizeof *grants, .public_key = s.other.public_key, .commands = true}};
    rights_grant(&s, grants, 2);
    assert_int_equal(command(&s, &s.rightful, 1), KVF_E_AGAIN);
    assert_ok(kvf_agent_reply(s.p, s.p->last_command, KVF_OK, "done", NULL, 0));
    assert_int_equal(command(&s, &s.rightful, 1), KVF_OK);
    assert_int_equal(command(&s, &s.other, 1), KVF_E_AGAIN);
    assert_int_equal(told(&s), 2);
    rights_close(&s);
}

static void what_may_not_be_replied_is_refused(void **state) {
    (void)state;
    rights s;
    open_local(&s);
    assert_int_equal(command(&s, &s.stranger, 1), KVF_E_AGAIN);
    const uint64_t number = s.p->last_command;
    assert_fails(kvf_agent_reply(s.p, number, KVF_E_AGAIN, NULL, NULL, 0), KVF_E_INVALID, "status");
    assert_fails(kvf_agent_reply(s.p, number, KVF_E_LIMIT, NULL, NULL, 0), KVF_E_INVALID, "status");
    assert_fails(kvf_agent_reply(s.p, number, (kvf_status)63, NULL, NULL, 0), KVF_E_RANGE, "status");
    assert_fails(kvf_agent_reply(s.p, number, KVF_OK, NULL, NULL, 1), KVF_E_INVALID, "records");
    assert_fails(kvf_agent_reply(s.p, number + 1, KVF_OK, NULL, NULL, 0), KVF_E_NOT_FOUND, "no command");
    assert_int_equal(command(&s, &s.stranger, 1), KVF_E_AGAIN); /* nothing of that was a reply */
    assert_ok(kvf_agent_reply(s.p, number, KVF_OK, NULL, NULL, 0));
    assert_fails(kvf_agent_reply(s.p, number, KVF_OK, NULL, NULL, 0), KVF_E_NOT_FOUND, "replied to");
    rights_close(&s);
}

/* ---- time and room ------------------------------------------------------------------------------ */

static void a_command_that_is_not_replied_to_ends_by_time(void **state) {
    (void)state;
    rights s;
    open_local(&s);
    assert_true(speaker_command(&s.w, &s.stranger, 1, "drain", SECOND));
    assert_int_equal(s.stranger.status, KVF_E_AGAIN);
    speaker_run_for(&s.w, &s.stranger, 5900 * MS);
    assert_int_equal(s.stranger.status, KVF_E_AGAIN); /* the engine may still say that it was late */
    speaker_run_for(&s.w, &s.stranger, 200 * MS);
    assert_int_equal(s.stranger.status, KVF_E_TIMEOUT); /* it came without being asked for again */
    assert_fails(kvf_agent_reply(s.p, s.p->last_command, KVF_OK, NULL, NULL, 0), KVF_E_NOT_FOUND,
                 "no command has number 1");
    assert_int_equal(command(&s, &s.stranger, 1), KVF_E_TIMEOUT);
    assert_int_equal(s.p->command_count, 1);
    world_run_for(&s.w, 606 * SECOND);
    assert_int_equal(s.p->command_count, 0);
    assert_int_equal(s.p->command_bytes, 0);
    assert_int_equal(command(&s, &s.stranger, 1), KVF_E_AGAIN); /* forgotten: a command like any other */
    rights_close(&s);
}

static void of_several_commands_each_ends_by_its_own_time(void **state) {
    (void)state;
    static const uint32_t seconds[] = {3, 1, 2};
    rights s;
    open_local(&s);
    const uint64_t begun = world_now();
    for (uint32_t i = 0; i < COUNT_OF(seconds); i++) {
        assert_true(speaker_command(&s.w, &s.stranger, (uint8_t)i, "drain", seconds[i] * SECOND));
        assert_int_equal(s.stranger.status, KVF_E_AGAIN);
    }
    for (uint64_t passed = 1; passed <= 3; passed++) {
        speaker_run_for(&s.w, &s.stranger, begun + (5 + passed) * SECOND + 500 * MS - world_now());
        for (uint32_t i = 0; i < COUNT_OF(seconds); i++)
            assert_int_equal(command(&s, &s.stranger, (uint8_t)i),
                             seconds[i] <= passed ? KVF_E_TIMEOUT : KVF_E_AGAIN);
    }
    rights_close(&s);
}

static void the_engine_has_no_more_time_than_peers_may_ask_for(void **state) {
    (void)state;
    rights s;
    open_local(&s);
    s.p->options.longest_ns = 20 * SECOND;
    assert_int_equal(command(&s, &s.stranger, 1), KVF_E_AGAIN); /* without a limit */
    assert_true(speaker_command(&s.w, &s.stranger, 2, "drain", 100 * SECOND));
    assert_int_equal(s.stranger.status, KVF_E_AGAIN);
    world_run_for(&s.w, 26 * SECOND);
    assert_int_equal(command(&s, &s.stranger, 1), KVF_E_TIMEOUT);
    assert_int_equal(command(&s, &s.stranger, 2), KVF_E_TIMEOUT);
    rights_close(&s);
}

static void there_is_room_for_so_many_commands_of_one_asker(void **state) {
    (void)state;
    rights s;
    open_local(&s);
    for (uint8_t i = 0; i < 32; i++)
        assert_int_equal(command(&s, &s.stranger, i), KVF_E_AGAIN);
    assert_int_equal(command(&s, &s.stranger, 32), KVF_E_LIMIT);
    assert_non_null(strstr(s.stranger.detail, "has 32 commands of this asker"));
    assert_int_equal(command(&s, &s.stranger, 31), KVF_E_AGAIN); /* a repetition takes no room */
    assert_int_equal(told(&s), 32);
    assert_ok(kvf_agent_reply(s.p, 1, KVF_OK, NULL, NULL, 0));
    assert_int_equal(command(&s, &s.stranger, 32), KVF_E_AGAIN);
    rights_close(&s);
}

static void there_is_room_for_so_many_commands_of_all_askers(void **state) {
    (void)state;
    rights s;
    speaker third;
    rights_open(&s);
    speaker_open(&third, s.w.d.agents[0], "V", true, 4);
    speaker_close(&third);
    const kvf_key_grant grants[] = {
        {.struct_size = sizeof *grants, .public_key = s.rightful.public_key, .commands = true},
        {.struct_size = sizeof *grants, .public_key = s.other.public_key, .commands = true},
        {.struct_size = sizeof *grants, .public_key = third.public_key, .commands = true}};
    rights_grant(&s, grants, 3);
    speaker_reopen(&third, s.p);
    for (uint8_t i = 0; i < 32; i++) {
        assert_int_equal(command(&s, &s.rightful, i), KVF_E_AGAIN);
        assert_int_equal(command(&s, &s.other, i), KVF_E_AGAIN);
    }
    assert_int_equal(command(&s, &third, 1), KVF_E_LIMIT);
    assert_non_null(strstr(third.detail, "has 64 commands that its engine has not replied to"));
    assert_ok(kvf_agent_reply(s.p, 1, KVF_OK, NULL, NULL, 0));
    assert_int_equal(command(&s, &third, 1), KVF_E_AGAIN);
    speaker_close(&third);
    rights_close(&s);
}

static void of_many_replies_the_latest_are_kept(void **state) {
    (void)state;
    rights s;
    open_local(&s);
    static const uint8_t data[KVF_MAX_RECORDS_BYTES];
    const kvf_record large = {.name = "large", .data = data, .size = sizeof data};
    for (uint32_t i = 0; i < 200; i++) {
        assert_int_equal(command(&s, &s.stranger, (uint8_t)i), KVF_E_AGAIN);
        assert_ok(kvf_agent_reply(s.p, s.p->last_command, KVF_OK, NULL, &large, 1));
        assert_true(s.p->command_bytes <= 16u << 20);
    }
    assert_true(s.p->command_count > 100 && s.p->command_count < 130); /* 16 MiB of 128 KiB */
    assert_int_equal(command(&s, &s.stranger, 199), KVF_OK);
    assert_int_equal(command(&s, &s.stranger, 0), KVF_E_AGAIN);
    rights_close(&s);
}

/* 1023 and one that is new. */
static void of_many_small_replies_the_latest_are_kept(void **state) {
    (void)state;
    rights s;
    open_local(&s);
    const uint32_t others = 1021;
    for (uint8_t i = 0; i < 3; i++) {
        assert_int_equal(command(&s, &s.stranger, i), KVF_E_AGAIN);
        assert_int_equal(s.p->command_count, i < 2 ? i + 1 : 1024);
        assert_ok(kvf_agent_reply(s.p, s.p->last_command, KVF_OK, NULL, NULL, 0));
        s.p->command_count += i == 1 ? others : 0; /* as if there were more */
    }
    assert_int_equal(s.p->command_count, 1023);
    assert_int_equal(command(&s, &s.stranger, 1), KVF_OK);
    assert_int_equal(command(&s, &s.stranger, 0), KVF_E_AGAIN);
    s.p->command_count -= others;
    rights_close(&s);
}

static void replies_that_just_fit_are_all_kept(void **state) {
    (void)state;
    rights s;
    open_local(&s);
    static const uint8_t data[KVF_MAX_RECORDS_BYTES];
    kvf_record large = {.name = "large", .data = data, .size = sizeof data - 1000};
    for (uint8_t i = 0; i < 128; i++) {
        assert_int_equal(command(&s, &s.stranger, i), KVF_E_AGAIN);
        assert_ok(kvf_agent_reply(s.p, s.p->last_command, KVF_OK, NULL, &large, 1));
    }
    const size_t beside_data = s.p->command_bytes / 128 - large.size;
    large.size = (16u << 20) - s.p->command_bytes - beside_data; /* what is left of 16 MiB */
    assert_int_equal(command(&s, &s.stranger, 128), KVF_E_AGAIN);
    assert_ok(kvf_agent_reply(s.p, s.p->last_command, KVF_OK, NULL, &large, 1));
    assert_int_equal(s.p->command_bytes, 16u << 20);
    assert_int_equal(s.p->command_count, 129);
    assert_int_equal(command(&s, &s.stranger, 0), KVF_OK);
    assert_int_equal(command(&s, &s.stranger, 129), KVF_E_AGAIN);
    assert_ok(kvf_agent_reply(s.p, s.p->last_command, KVF_OK, NULL, NULL, 0));
    assert_int_equal(command(&s, &s.stranger, 1), KVF_OK);
    assert_int_equal(command(&s, &s.stranger, 0), KVF_E_AGAIN);
    rights_close(&s);
}

/* ---- messages ------------------------------------------------------------------------------------ */

static void a_reply_is_nothing_to_an_agent(void **state) {
    (void)state;
    rights s;
    open_local(&s);
    const uint64_t foreign = world_stats(s.p).messages_foreign;
    speaker_send(&s.stranger, &(const kvf_message){.kind = KVF_MESSAGE_REPLY, .reply = {.detail = ""}});
    speaker_run_for(&s.w, &s.stranger, 50 * MS);
    assert_int_equal(world_stats(s.p).messages_foreign, foreign + 1);
    assert_int_equal(s.p->command_count, 0);
    rights_close(&s);
}

static void a_drained_agent_still_takes_commands(void **state) {
    (void)state;
    rights s;
    open_local(&s);
    assert_ok(kvf_agent_drain(s.p, 0));
    world_until(&s.w, world_count(&s.w, s.p, KVF_EVENT_DRAINED) == 1);
    assert_int_equal(command(&s, &s.stranger, 1), KVF_E_AGAIN);
    assert_ok(kvf_agent_reply(s.p, s.p->last_command, KVF_OK, "drained", NULL, 0));
    assert_int_equal(command(&s, &s.stranger, 1), KVF_OK);
    rights_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(commands_are_taken_from_keys_that_have_the_right),
        cmocka_unit_test(without_keys_commands_are_taken_only_if_the_options_say_so),
        cmocka_unit_test(an_operators_key_speaks_for_no_engine),
        cmocka_unit_test(rights_to_command_are_given_alone),
        cmocka_unit_test(a_directory_takes_no_commands),
        cmocka_unit_test(each_command_is_logged_with_its_asker),
        cmocka_unit_test(a_command_is_told_once_and_replied_to_each_time),
        cmocka_unit_test(the_same_id_from_another_key_is_another_command),
        cmocka_unit_test(what_may_not_be_replied_is_refused),
        cmocka_unit_test(a_command_that_is_not_replied_to_ends_by_time),
        cmocka_unit_test(of_several_commands_each_ends_by_its_own_time),
        cmocka_unit_test(the_engine_has_no_more_time_than_peers_may_ask_for),
        cmocka_unit_test(there_is_room_for_so_many_commands_of_one_asker),
        cmocka_unit_test(there_is_room_for_so_many_commands_of_all_askers),
        cmocka_unit_test(of_many_replies_the_latest_are_kept),
        cmocka_unit_test(of_many_small_replies_the_latest_are_kept),
        cmocka_unit_test(replies_that_just_fit_are_all_kept),
        cmocka_unit_test(a_reply_is_nothing_to_an_agent),
        cmocka_unit_test(a_drained_agent_still_takes_commands),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
