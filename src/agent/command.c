#include "agent/command.h"

#include <stdio.h>

#include "agent/budget.h"
#include "agent/claim.h"

#define MOST_OPEN 64u               /* commands that the engine has not replied to */
#define MOST_OPEN_OF_KEY 32u        /* of them, of one key; without keys, of all askers */
#define MOST_KEPT 1024u             /* with those that are kept for repetitions */
#define MOST_KEPT_BYTES (16u << 20) /* of their replies */
#define KEEP_NS (600 * KVF_SECOND)  /* a reply, for repetitions that come late */
#define DETAIL_BYTES 1024u
/* Beyond the deadline that the engine was told, for its reply that the time was too short. */
#define GRACE (5 * KVF_SECOND)

struct kvf_commanded {
    uint8_t id[KVF_WIRE_COMMAND_BYTES];
    bool keyed;
    uint8_t key[KVF_KEY_BYTES]; /* of the asker */
    uint64_t number;
    kvf_route route;       /* by which it came last */
    uint64_t until;        /* when it must be replied to; afterwards, when it may be forgotten */
    kvf_wire_buffer reply; /* a whole message; size 0: the engine has not replied */
    kvf_commanded *prev, *next;
};

static bool is_open(const kvf_commanded *command) {
    return command->reply.size == 0;
}

static bool is_of(const kvf_commanded *command, const uint8_t *key) {
    return command->keyed ? key && memcmp(command->key, key, KVF_KEY_BYTES) == 0 : !key;
}

static kvf_commanded *find(const kvf_agent *agent, const uint8_t *key, const uint8_t *id) {
    kvf_commanded *command;
    DL_FOREACH(agent->commands, command) {
        if (is_of(command, key) && memcmp(command->id, id, sizeof command->id) == 0)
            return command;
    }
    return NULL;
}

static void forget(kvf_agent *agent, kvf_commanded *command) {
    /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    DL_DELETE(agent->commands, command);
    agent->command_count--;
    agent->command_bytes -= command->reply.size;
    kvf_wire_buffer_free(&command->reply);
    kvf_free(command);
}

void kvf_commands_free(kvf_agent *agent) {
    while (agent->commands)
        forget(agent, agent->commands);
}

/* ---- replies --------------------------------------------------------------------------------- */

static void say(kvf_agent *agent, kvf_route route, const uint8_t *id, kvf_status status, const char *detail) {
    kvf_message message = {.kind = KVF_MESSAGE_REPLY, .reply = {.status = status, .detail = detail}};
    memcpy(message.reply.id, id, sizeof message.reply.id);
    kvf_message_send(agent, route, &message);
}

static void say_again(kvf_agent *agent, const kvf_commanded *command) {
    if (is_open(command))
        say(agent, command->route, command->id, KVF_E_AGAIN, "has the command");
    else
        (void)kvf_link_send(agent->link, command->route, command->reply.data, command->reply.size);
    agent->stats.messages_sent += !is_open(command);
}

/* Forgets the oldest replies beyond what is kept. */
static void make_room(kvf_agent *agent) {
    kvf_commanded *command, *next;
    DL_FOREACH_SAFE(agent->commands, command, next) {
        if (agent->command_count < MOST_KEPT && agent->command_bytes <= MOST_KEPT_BYTES)
            return;
        if (!is_open(command))
            forget(agent, command);
    }
}

static kvf_status reply(kvf_agent *agent, kvf_commanded *command, kvf_reply *with) {
    memcpy(with->id, command->id, sizeof with->id);
    const kvf_message message = {.kind = KVF_MESSAGE_REPLY, .reply = *with};
    kvf_status status = kvf_wire_encode(&message, &command->reply);
    if (status)
        return status;
    agent->command_bytes += command->reply.size;
    command->until = kvf_agent_now(agent) + KEEP_NS;
    agent->commands_due = kvf_min_u64(agent->commands_due, command->until);
    say_again(agent, command);
    return KVF_OK;
}

static kvf_commanded *find_open(const kvf_agent *agent, uint64_t number) {
    kvf_commanded *command;
    DL_FOREACH(agent->commands, command) {
        if (command->number == number && is_open(command))
            return command;
    }
    return NULL;
}

kvf_status kvf_agent_reply(kvf_agent *agent, uint64_t number, kvf_status status, const char *detail,
                           const kvf_record *records, uint32_t record_count) {
    if (kvf_refused_for_now(status))
        return kvf_fail(KVF_E_INVALID, "status is %d; allowed: KVF_OK, or a reason that is final",
                        (int)status);
    char words[DETAIL_BYTES];
    (void)snprintf(words, sizeof words, "%s", detail ? detail : "");
    kvf_reply with = {.status = status, .detail = words, .records = records, .record_count = record_count};
    kvf_status result = kvf_agent_lock(agent);
    if (result)
        return result;
    kvf_commanded *command = find_open(agent, number);
    result = command ? reply(agent, command, &with)
                     : kvf_fail(KVF_E_NOT_FOUND, "no command has number %llu, or it has been replied to",
                                (unsigned long long)number);
    make_room(agent);
    kvf_agent_unlock(agent);
    return result;
}

void kvf_commands_tick(kvf_agent *agent, uint64_t now) {
    if (agent->commands && now >= agent->commands_due) {
        agent->commands_due = UINT64_MAX;
        kvf_commanded *command, *next;
        DL_FOREACH_SAFE(agent->commands, command, next) {
            kvf_reply late = {.status = KVF_E_TIMEOUT, .detail = "the engine has not replied in time"};
            bool over = now >= command->until;
            if (over && is_open(command) && reply(agent, command, &late) == KVF_OK)
                continue; /* now it is kept, and its time counted anew */
            if (over)
                forget(agent, command);
            else
                agent->commands_due = kvf_min_u64(agent->commands_due, command->until);
        }
        make_room(agent);
    }
    if (agent->commands)
        kvf_agent_due(agent, agent->commands_due);
}

/* ---- taking commands ------------------------------------------------------------------------- */

static kvf_status check_room(const kvf_agent *agent, const uint8_t *key) {
    uint32_t open = 0, of_key = 0;
    const kvf_commanded *command;
    DL_FOREACH(agent->commands, command) {
        open += is_open(command);
        of_key += is_open(command) && is_of(command, key);
    }
    if (of_key >= MOST_OPEN_OF_KEY)
        return kvf_fail(KVF_E_LIMIT, "has %u commands of this asker that its engine has not replied to",
                        of_key);
    if (open >= MOST_OPEN)
        return kvf_fail(KVF_E_LIMIT, "has %u commands that its engine has not replied to", open);
    return KVF_OK;
}

static kvf_status tell_engine(kvf_agent *agent, const kvf_commanded *command, const kvf_command_body *body,
                              uint64_t now) {
    char asker[KVF_KEY_CHARACTERS + 1] = "", line[320];
    if (command->keyed)
        kvf_link_write_key(command->key, asker);
    const bool names_peer = body->endpoint[0] != '\0';
    const kvf_command told = {
        .struct_size = sizeof told,
        .verb = body->verb,
        .request = {body->request.data, body->request.size},
        .peer = {.engine = names_peer && body->engine[0] ? body->engine : NULL,
                 .endpoint = names_peer ? body->endpoint : NULL,
                 .public_key = names_peer && body->public_key[0] ? body->public_key : NULL},
        .deadline_ns = command->until - now,
        .records = body->records,
        .record_count = body->record_count,
        .number = command->number,
        .asker = asker};
    kvf_status status = kvf_event_command(agent, &told);
    (void)snprintf(line, sizeof line, "command %llu: %s, by %s", (unsigned long long)command->number,
                   body->verb, asker[0] ? asker : "a program of this machine");
    if (!status)
        kvf_agent_log(agent, KVF_LOG_INFO, line);
    return status;
}

static kvf_status take_new(kvf_agent *agent, const kvf_letter *letter, const kvf_command_body *body,
                           kvf_commanded **out) {
    kvf_status status = check_room(agent, letter->key);
    if (status)
        return status;
    make_room(agent);
    kvf_commanded *command = kvf_alloc0(1, sizeof *command);
    if (!command)
        return kvf_nomem("a command");
    const uint64_t now = kvf_agent_now(agent), latest = kvf_budget_latest(agent, now);
    memcpy(command->id, body->id, sizeof command->id);
    command->keyed = letter->key != NULL;
    if (letter->key)
        memcpy(command->key, letter->key, sizeof command->key);
    command->number = agent->last_command + 1;
    if (!kvf_add(now, body->time_ns, &command->until) || command->until > latest)
        command->until = latest;
    status = tell_engine(agent, command, body, now);
    command->until += GRACE;
    if (status) {
        kvf_free(command);
        return status;
    }
    agent->last_command++;
    agent->commands_due = agent->commands ? kvf_min_u64(agent->commands_due, command->until) : command->until;
    DL_APPEND(agent->commands, command);
    agent->command_count++;
    kvf_agent_due(agent, agent->commands_due);
    *out = command;
    return KVF_OK;
}

static kvf_status may_command(kvf_agent *agent, const kvf_letter *letter) {
    if (!agent->engine)
        return kvf_fail(KVF_E_UNSUPPORTED, "is a directory, which has no engine; ask the ranks");
    kvf_status status = kvf_claim_command(agent, letter->key);
    if (status) {
        agent->stats.messages_foreign++;
        kvf_claim_tell(agent, "", KVF_NO_RANK, "a command came from one that may give none");
    }
    return status;
}

void kvf_command_take(kvf_agent *agent, const kvf_letter *letter, const kvf_command_body *body) {
    kvf_status status = may_command(agent, letter);
    kvf_commanded *command = status ? NULL : find(agent, letter->key, body->id);
    if (!status && !command)
        status = take_new(agent, letter, body, &command);
    if (status == KVF_E_NOMEM)
        return; /* as if it was lost */
    if (status) {
        say(agent, letter->route, body->id, status, kvf_error_detail());
        return;
    }
    command->route = letter->route;
    say_again(agent, command);
}
