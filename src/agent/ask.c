/*
 * Giving commands to an engine: a visit, and then a COMMAND to each rank, repeated until its REPLY is final.
 */
#include "agent/ask.h"

#include <sodium.h>
#include <stdio.h>

#include "agent/records.h"
#include "agent/visit.h"

#define FIRST_PAUSE (50 * KVF_MILLISECOND)
#define LONGEST_PAUSE KVF_SECOND
/* Until the first sign of a rank; and for the next one, while nobody is there. */
#define PATIENCE (5 * KVF_SECOND)
#define LONGEST_COMMAND (60 * KVF_SECOND)
#define GRACE (10 * KVF_SECOND) /* beyond the command's deadline, for the reply that says so */

/* One rank that is asked. */
typedef struct asked_rank {
    kvf_route route;
    uint64_t next, pause;
    bool taken;             /* it has said that its engine has the command */
    uint64_t unheard_since; /* when nobody was there, after it had taken the command; 0: it was heard later */
    bool over;
    kvf_status status;
    char *detail; /* the reply's, or the last reason why there is none; NULL: none */
    kvf_records records;
} asked_rank;

struct kvf_asked {
    char *engine;
    asked_rank *ranks;
    uint32_t rank_count;
};

typedef struct asking {
    kvf_link *link;
    kvf_asked *asked;
    kvf_message command;
    kvf_wire_buffer bytes;
    uint32_t open; /* ranks that have not replied finally */
} asking;

static void set_detail(asked_rank *rank, const char *detail) {
    kvf_free(rank->detail);
    rank->detail = kvf_strdup(detail);
}

static void end(asking *a, asked_rank *rank, kvf_status status, const char *detail) {
    rank->over = true;
    rank->status = status;
    set_detail(rank, detail);
    a->open--;
}

static asked_rank *rank_by(const asking *a, kvf_route route) {
    for (uint32_t i = 0; i < a->asked->rank_count; i++) {
        if (a->asked->ranks[i].route == route)
            return &a->asked->ranks[i];
    }
    return NULL;
}

/* ---- what comes ------------------------------------------------------------------------------ */

static void take_reply(asking *a, asked_rank *rank, const kvf_reply *reply) {
    rank->unheard_since = 0;
    if (kvf_refused_for_now(reply->status)) {
        rank->taken = rank->taken || reply->status == KVF_E_AGAIN;
        set_detail(rank, reply->detail);
        return;
    }
    if (reply->record_count && kvf_records_add(&rank->records, reply->records, reply->record_count, 0))
        return; /* without memory, as if it was lost: it is sent again */
    for (uint32_t i = 0; i < rank->records.count; i++)
        rank->records.all[i].rank = (uint32_t)(rank - a->asked->ranks);
    end(a, rank, reply->status, reply->detail);
}

static void on_message(void *context, const kvf_letter *letter) {
    asking *a = context;
    asked_rank *rank = rank_by(a, letter->route);
    kvf_message message;
    if (!rank || rank->over || kvf_wire_open((kvf_bytes){letter->data, letter->bytes}, &message))
        return;
    if (message.kind == KVF_MESSAGE_REPLY && !kvf_wire_read(&message) &&
        memcmp(message.reply.id, a->command.command.id, sizeof message.reply.id) == 0)
        take_reply(a, rank, &message.reply);
    kvf_message_free(&message);
}

static void on_broken(void *context, kvf_route route, kvf_status status, const char *detail) {
    asking *a = context;
    asked_rank *rank = rank_by(a, route);
    if (!rank || rank->over)
        return;
    if (status == KVF_E_PERMISSION || status == KVF_E_PARSE)
        end(a, rank, status, detail);
    else if (!rank->taken)
        set_detail(rank, detail);
    else if (status == KVF_E_IO && !rank->unheard_since)
        rank->unheard_since = kvf_now(&kvf_monotonic);
}

/* ---- asking ---------------------------------------------------------------------------------- */

static void send_due(asking *a, uint64_t now, uint64_t *next) {
    for (uint32_t i = 0; i < a->asked->rank_count; i++) {
        asked_rank *rank = &a->asked->ranks[i];
        if (rank->over)
            continue;
        if (now >= rank->next) {
            (void)kvf_link_send(a->link, rank->route, a->bytes.data, a->bytes.size);
            rank->pause = rank->pause ? kvf_min_u64(2 * rank->pause, LONGEST_PAUSE) : FIRST_PAUSE;
            rank->next = now + rank->pause;
        }
        *next = kvf_min_u64(*next, rank->next);
    }
}

/* Ends the wait for ranks whose time is over. */
static void give_up(asking *a, uint64_t patience, bool late) {
    char words[512];
    for (uint32_t i = 0; i < a->asked->rank_count; i++) {
        asked_rank *rank = &a->asked->ranks[i];
        if (rank->over || (rank->taken && !late))
            continue;
        if (rank->taken)
            (void)snprintf(words, sizeof words, "it has the command, and has not replied in time");
        else
            (void)snprintf(words, sizeof words, "no reply within %.1f s: %.300s", (double)patience / 1e9,
                           rank->detail
                               ? rank->detail
                               : "its process is stopped or busy, or it is an agent of an older version, "
                                 "which takes no commands");
        end(a, rank, KVF_E_TIMEOUT, words);
    }
}

/* Ends the wait for ranks that have ended. That nobody is there for a moment may be the network. */
static void give_lost_up(asking *a, uint64_t now, uint64_t *next) {
    for (uint32_t i = 0; i < a->asked->rank_count; i++) {
        asked_rank *rank = &a->asked->ranks[i];
        if (rank->over || !rank->unheard_since)
            continue;
        const uint64_t lost = rank->unheard_since + PATIENCE;
        if (now >= lost)
            end(a, rank, KVF_E_PEER_LOST, "it ended before it had replied");
        *next = kvf_min_u64(*next, lost);
    }
}

static void run(asking *a, uint64_t patience, uint64_t deadline) {
    const uint64_t first = kvf_add_or_most(kvf_now(&kvf_monotonic), patience);
    const uint64_t last = kvf_add_or_most(kvf_add_or_most(first, deadline), GRACE);
    bool more = false;
    while (a->open > 0) {
        kvf_link_progress(a->link, &more);
        uint64_t now = kvf_now(&kvf_monotonic), next = now < first ? first : last;
        if (now >= first)
            give_up(a, patience, now >= last);
        give_lost_up(a, now, &next);
        send_due(a, now, &next);
        if (a->open > 0 && !more && !kvf_link_pending(a->link))
            kvf_link_sleep(a->link, now, next);
    }
}

static kvf_status write_command(asking *a, const kvf_command *given) {
    kvf_command command;
    kvf_status status = kvf_take_options(&command, sizeof command, given, "kvf_command");
    if (status)
        return status;
    const kvf_contact *peer = &command.peer;
    a->command =
        (kvf_message){.kind = KVF_MESSAGE_COMMAND,
                      .command = {.verb = command.verb ? command.verb : "",
                                  .request = {command.request.data, command.request.size},
                                  .engine = peer->engine ? peer->engine : "",
                                  .endpoint = peer->endpoint ? peer->endpoint : "",
                                  .public_key = peer->public_key ? peer->public_key : "",
                                  .time_ns = command.deadline_ns ? command.deadline_ns : LONGEST_COMMAND,
                                  .records = command.records,
                                  .record_count = command.record_count}};
    randombytes_buf(a->command.command.id, sizeof a->command.command.id);
    status = kvf_wire_encode(&a->command, &a->bytes);
    if (!status && a->bytes.size > KVF_WIRE_STRANGER_BYTES)
        status = kvf_fail(KVF_E_RANGE, "the command has %zu bytes with its records; allowed: up to %u",
                          a->bytes.size, KVF_WIRE_STRANGER_BYTES);
    return status;
}

static kvf_status connect_all(asking *a, const kvf_visited *visited, const kvf_link_table *table,
                              const kvf_ask_options *options) {
    const kvf_link_options link = {.table = table,
                                   .listen = "",
                                   .public_key = options->public_key,
                                   .secret_key = options->secret_key,
                                   .on_message = on_message,
                                   .on_broken = on_broken,
                                   .context = a};
    kvf_asked *asked = a->asked;
    asked->rank_count = kvf_engine_rank_count(kvf_visited_engine(visited));
    asked->engine = kvf_strdup(kvf_engine_name(kvf_visited_engine(visited)));
    asked->ranks = kvf_alloc0(asked->rank_count, sizeof *asked->ranks);
    kvf_status status = asked->engine && asked->ranks ? KVF_OK : kvf_nomem("a command");
    if (!status)
        status = kvf_link_open(&link, &a->link);
    for (uint32_t i = 0; i < asked->rank_count && !status; i++) {
        status = kvf_link_connect(a->link, kvf_visited_endpoint(visited, i),
                                  kvf_visited_public_key(visited, i), &asked->ranks[i].route);
        if (status)
            status = kvf_fail_in(status, "rank %u: ", i);
    }
    a->open = asked->rank_count;
    return status;
}

static kvf_status ask(asking *a, const kvf_link_table *table, const kvf_contact *contact,
                      const kvf_command *command, const kvf_ask_options *options) {
    const uint64_t patience = options->timeout_ns ? options->timeout_ns : PATIENCE;
    const kvf_visit_options visit = {.struct_size = sizeof visit,
                                     .public_key = options->public_key,
                                     .secret_key = options->secret_key,
                                     .timeout_ns = patience};
    kvf_visited *visited = NULL;
    kvf_status status = write_command(a, command);
    if (!status)
        status = kvf_visit_over(table, contact, &visit, &visited);
    if (!status)
        status = connect_all(a, visited, table, options);
    kvf_visited_free(visited);
    if (!status)
        run(a, patience, a->command.command.time_ns);
    return status;
}

kvf_status kvf_ask(const kvf_contact *contact, const kvf_command *command, const kvf_ask_options *options,
                   kvf_asked **out) {
    return kvf_ask_over(NULL, contact, command, options, out);
}

kvf_status kvf_ask_over(const kvf_link_table *link, const kvf_contact *contact, const kvf_command *command,
                        const kvf_ask_options *given, kvf_asked **out) {
    if (!command || !out)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !command ? "command" : "out");
    kvf_ask_options options;
    kvf_status status = kvf_take_options(&options, sizeof options, given, "kvf_ask_options");
    if (status)
        return status;
    if (sodium_init() < 0)
        return kvf_fail(KVF_E_UNSUPPORTED, "libsodium cannot be initialised");
    asking a = {.asked = kvf_alloc0(1, sizeof *a.asked)};
    status = a.asked ? ask(&a, link, contact, command, &options) : kvf_nomem("a command");
    kvf_link_close(a.link);
    kvf_wire_buffer_free(&a.bytes);
    if (status)
        kvf_asked_free(a.asked);
    else
        *out = a.asked;
    return status;
}

/* ---- what was replied ------------------------------------------------------------------------ */

void kvf_asked_free(kvf_asked *asked) {
    if (!asked)
        return;
    for (uint32_t i = 0; asked->ranks && i < asked->rank_count; i++) {
        kvf_free(asked->ranks[i].detail);
        kvf_records_free(&asked->ranks[i].records);
    }
    kvf_free(asked->ranks);
    kvf_free(asked->engine);
    kvf_free(asked);
}

const char *kvf_asked_engine(const kvf_asked *asked) {
    return asked->engine;
}

uint32_t kvf_asked_rank_count(const kvf_asked *asked) {
    return asked->rank_count;
}

kvf_status kvf_asked_status(const kvf_asked *asked, uint32_t *rank) {
    if (!asked)
        return kvf_fail(KVF_E_INVALID, "asked is NULL");
    for (uint32_t i = 0; i < asked->rank_count; i++) {
        if (!asked->ranks[i].status)
            continue;
        if (rank)
            *rank = i;
        return asked->ranks[i].status;
    }
    return KVF_OK;
}

kvf_status kvf_asked_reply(const kvf_asked *asked, uint32_t rank, kvf_asked_rank *out) {
    kvf_status status =
        asked ? kvf_check_out(out, "kvf_asked_rank") : kvf_fail(KVF_E_INVALID, "asked is NULL");
    if (status)
        return status;
    if (rank >= asked->rank_count)
        return kvf_fail(KVF_E_RANGE, "rank is %u; engine %s has %u ranks", rank, asked->engine,
                        asked->rank_count);
    const asked_rank *of = &asked->ranks[rank];
    const kvf_asked_rank told = {.status = of->status,
                                 .detail = of->detail ? of->detail : "",
                                 .records = of->records.all,
                                 .record_count = of->records.count};
    kvf_fill_out(out, &told, sizeof told);
    return KVF_OK;
}
