/*
 * Visits: asking an engine who it is, with one greeting and without a session.
 *
 *   HELLO with no digest       ->
 *                              <-    WELCOME with its facts and the introductions of all ranks
 *
 * The model is made from the facts, the shards from the introductions.
 */
#include <poll.h>
#include <sodium.h>
#include <stdio.h>

#include "agent/siblings.h"
#include "agent/visit.h"

#define MILLISECOND 1000000ull
#define FIRST_PAUSE (50 * MILLISECOND)
#define LONGEST_PAUSE (1000 * MILLISECOND)
#define PATIENCE (5000 * MILLISECOND)

struct kvf_visited {
    kvf_engine *engine;
    kvf_model *model;
    char *facts;
    kvf_remote_rank *ranks;
    uint32_t rank_count;
};

/* A visit under way. */
typedef struct visit {
    kvf_link *link;
    kvf_route route;
    const kvf_contact *contact;
    uint64_t incarnation;
    uint8_t digest[KVF_WIRE_DIGEST_BYTES]; /* zeros, and of the facts, once they are known */
    uint64_t next, pause;
    bool over;
    kvf_status status;             /* when it is over */
    char detail[KVF_DETAIL_BYTES]; /* why it failed, or has not succeeded so far */
    kvf_visited *found;
} visit;

static void end(visit *v, kvf_status status) {
    v->over = true;
    v->status = status;
    (void)snprintf(v->detail, sizeof v->detail, "%s", status ? kvf_error_detail() : "");
}

static void greet(visit *v, uint64_t now) {
    v->pause = v->pause ? kvf_min_u64(2 * v->pause, LONGEST_PAUSE) : FIRST_PAUSE;
    v->next = now + v->pause;
    kvf_message message = {.kind = KVF_MESSAGE_HELLO,
                           .hello = {.engine = "visitor",
                                     .incarnation = v->incarnation,
                                     .rank_count = 1,
                                     .wants_ranks = true,
                                     .clock_ns = now}};
    memcpy(message.digest, v->digest, sizeof message.digest);
    kvf_wire_buffer bytes;
    if (kvf_wire_encode(&message, &bytes))
        return; /* as if it was lost */
    (void)kvf_link_send(v->link, v->route, bytes.data, bytes.size);
    kvf_wire_buffer_free(&bytes);
}

/* ---- answers --------------------------------------------------------------------------------- */

static kvf_status take_facts(visit *v, const kvf_message *message) {
    kvf_visited *found = v->found;
    const char *told = message->welcome.facts;
    kvf_wire_digest(told, v->digest);
    if (memcmp(v->digest, message->digest, sizeof v->digest) != 0)
        return kvf_fail(KVF_E_PARSE, "its digest is not of its facts");
    kvf_facts facts;
    kvf_status status = kvf_wire_read_facts(told, &facts);
    if (status)
        return status;
    found->model = facts.model;
    found->facts = kvf_strdup(told);
    return found->facts ? KVF_OK : kvf_nomem("a visit");
}

static void on_refused(visit *v, const kvf_message *message) {
    const kvf_refused *refused = &message->refused;
    kvf_status status = refused->status ? refused->status : KVF_E_AGAIN;
    (void)kvf_fail(status, "%s", refused->detail);
    if (!kvf_refused_for_now(status))
        end(v, status);
    else
        (void)snprintf(v->detail, sizeof v->detail, "it %s", refused->detail);
}

static kvf_status read_shard(const void *model, kvf_bytes bytes, kvf_shard **out) {
    return kvf_wire_decode_shard(model, bytes, out);
}

static kvf_status take_engine(visit *v, const kvf_message *message) {
    kvf_visited *found = v->found;
    const kvf_welcome *welcome = &message->welcome;
    if (v->contact->engine && strcmp(welcome->engine, v->contact->engine) != 0)
        return kvf_fail(KVF_E_MISMATCH, "engine %s answers there, not %s", welcome->engine,
                        v->contact->engine);
    kvf_status status = take_facts(v, message);
    if (status)
        return status;
    found->rank_count = welcome->introduction_count;
    return kvf_siblings_take(welcome, v->digest, found->model, read_shard, found->model, &found->ranks,
                             &found->engine);
}

static void on_message(void *context, kvf_route route, const void *data, size_t bytes) {
    visit *v = context;
    kvf_message message = {0};
    (void)route;
    if (v->over || kvf_wire_open((kvf_bytes){data, bytes}, &message))
        return;
    bool welcome = message.kind == KVF_MESSAGE_WELCOME;
    if (!welcome && message.kind != KVF_MESSAGE_REFUSED)
        return;
    if (message.version != KVF_WIRE_VERSION)
        end(v, kvf_fail(KVF_E_UNSUPPORTED, "it speaks version %u of the protocol, and we version %u",
                        message.version, KVF_WIRE_VERSION));
    else if (kvf_wire_read(&message))
        end(v, KVF_E_PARSE);
    else if (!welcome)
        on_refused(v, &message);
    else if (message.welcome.introduction_count > 0)
        end(v, take_engine(v, &message));
    kvf_message_free(&message);
}

static void on_broken(void *context, kvf_route route, kvf_status status, const char *detail) {
    visit *v = context;
    (void)route;
    if (v->over)
        return;
    (void)snprintf(v->detail, sizeof v->detail, "%s", detail);
    if (status == KVF_E_PERMISSION || status == KVF_E_PARSE)
        end(v, kvf_fail(status, "%s", detail));
}

/* ---- the visit ------------------------------------------------------------------------------- */

/* Sleeps until something arrives, the link has something to do, or `end`. */
static void sleep_until(const visit *v, uint64_t now, uint64_t end) {
    int fds[KVF_LINK_FDS];
    struct pollfd polled[KVF_LINK_FDS];
    uint32_t count = kvf_link_fds(v->link, fds);
    for (uint32_t i = 0; i < count; i++)
        polled[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
    end = kvf_min_u64(end, kvf_link_due(v->link));
    uint64_t left = end > now ? (end - now + MILLISECOND - 1) / MILLISECOND : 0;
    (void)poll(polled, count, (int)kvf_min_u64(left, 1000));
}

static void run(visit *v, uint64_t timeout_ns) {
    uint64_t deadline = kvf_now(&kvf_monotonic) + timeout_ns;
    bool more = false;
    while (!v->over) {
        kvf_link_progress(v->link, &more);
        uint64_t now = kvf_now(&kvf_monotonic);
        if (v->over)
            break;
        if (now >= deadline) {
            char reason[sizeof v->detail];
            (void)snprintf(reason, sizeof reason, "%s", v->detail[0] ? v->detail : "nobody answers");
            end(v, kvf_fail(KVF_E_TIMEOUT, "no answer within %.1f s: %s", (double)timeout_ns / 1e9, reason));
            break;
        }
        if (now >= v->next)
            greet(v, now);
        if (!more && !kvf_link_pending(v->link))
            sleep_until(v, now, kvf_min_u64(v->next, deadline));
    }
}

static kvf_status connect_to(visit *v, const kvf_link_table *table, const kvf_visit_options *options) {
    const kvf_link_options link = {.table = table,
                                   .listen = "",
                                   .public_key = options->public_key,
                                   .secret_key = options->secret_key,
                                   .on_message = on_message,
                                   .on_broken = on_broken,
                                   .context = v};
    kvf_status status = kvf_link_open(&link, &v->link);
    if (!status)
        status = kvf_link_connect(v->link, v->contact->endpoint, v->contact->public_key, &v->route);
    return status;
}

kvf_status kvf_visit(const kvf_contact *contact, const kvf_visit_options *given, kvf_visited **out) {
    return kvf_visit_over(NULL, contact, given, out);
}

kvf_status kvf_visit_over(const kvf_link_table *link, const kvf_contact *contact,
                          const kvf_visit_options *given, kvf_visited **out) {
    if (!contact || !contact->endpoint || !out)
        return kvf_fail(KVF_E_INVALID, "%s is NULL",
                        !contact             ? "contact"
                        : !contact->endpoint ? "contact.endpoint"
                                             : "out");
    kvf_visit_options options;
    kvf_status status = kvf_take_options(&options, sizeof options, given, "kvf_visit_options");
    if (status)
        return status;
    status = kvf_check_reserved(contact->reserved, 2, "kvf_contact");
    if (status)
        return status;
    if (sodium_init() < 0)
        return kvf_fail(KVF_E_UNSUPPORTED, "libsodium cannot be initialised");
    visit *v = kvf_alloc0(1, sizeof *v);
    kvf_visited *found = kvf_alloc0(1, sizeof *found);
    status = v && found ? KVF_OK : kvf_nomem("a visit");
    if (!status) {
        v->contact = contact;
        v->found = found;
        randombytes_buf(&v->incarnation, sizeof v->incarnation);
        status = connect_to(v, link, &options);
    }
    if (!status) {
        run(v, options.timeout_ns ? options.timeout_ns : PATIENCE);
        status = v->status ? kvf_fail(v->status, "%s: %s", contact->endpoint, v->detail) : KVF_OK;
    }
    if (v)
        kvf_link_close(v->link);
    kvf_free(v);
    if (status)
        kvf_visited_free(found);
    else
        *out = found;
    return status;
}

/* ---- what was found -------------------------------------------------------------------------- */

void kvf_visited_free(kvf_visited *visited) {
    if (!visited)
        return;
    kvf_siblings_free(visited->ranks, visited->rank_count);
    kvf_engine_free(visited->engine);
    kvf_model_free(visited->model);
    kvf_free(visited->facts);
    kvf_free(visited);
}

const kvf_engine *kvf_visited_engine(const kvf_visited *visited) {
    return visited->engine;
}

const char *kvf_visited_facts(const kvf_visited *visited) {
    return visited->facts;
}

const char *kvf_visited_endpoint(const kvf_visited *visited, uint32_t rank) {
    return rank < visited->rank_count ? visited->ranks[rank].endpoint : NULL;
}

const char *kvf_visited_public_key(const kvf_visited *visited, uint32_t rank) {
    return rank < visited->rank_count ? visited->ranks[rank].public_key : NULL;
}
