/*
 * Visits: asking an engine to introduce itself, with one greeting and without a session.
 *
 *   HELLO with no digest       ->
 *                              <-    WELCOME with its facts and the introductions of all ranks
 *
 * The model is made from the facts, the shards from the introductions.
 */
#include <sodium.h>
#include <stdio.h>

#include "agent/siblings.h"
#include "agent/visit.h"
#include "wire/gather.h"

#define FIRST_PAUSE (50 * KVF_MILLISECOND)
#define LONGEST_PAUSE KVF_SECOND
#define PATIENCE (5 * KVF_SECOND)
#define MOST_GREETINGS 1000u

struct kvf_visited {
    kvf_engine *engine;
    kvf_model *model;
    char *facts;
    kvf_remote_rank *ranks;
    uint32_t rank_count;
    uint32_t protocol;
    uint64_t *round_trips;
    uint32_t round_trip_count;
};

/* A visit under way. */
typedef struct visit {
    kvf_link *link;
    kvf_route route;
    const kvf_contact *contact;
    uint64_t incarnation;
    uint8_t digest[KVF_WIRE_DIGEST_BYTES]; /* zeros; of the facts once they are known */
    uint64_t next, pause;
    bool over;
    kvf_status status;             /* when it is over */
    char detail[KVF_DETAIL_BYTES]; /* why it failed, or has not succeeded so far */
    kvf_visited *found;
    kvf_gathering gathering;

    uint32_t greetings;  /* answers still needed, to measure */
    bool measuring;      /* the engine is known */
    uint32_t unanswered; /* greetings that may still be answered: answers do not name their greeting */
    uint64_t greeted;    /* when the last of them went out */
} visit;

static void end(visit *v, kvf_status status) {
    v->over = true;
    v->status = status;
    (void)snprintf(v->detail, sizeof v->detail, "%s", status ? kvf_error_detail() : "");
}

static void greet(visit *v, uint64_t now) {
    v->pause = v->pause ? kvf_min_u64(2 * v->pause, LONGEST_PAUSE) : FIRST_PAUSE;
    v->next = now + (v->measuring ? PATIENCE : v->pause);
    v->greeted = now;
    v->unanswered++;
    /* To measure, the shortest answer is enough: one rank, and no facts. */
    uint32_t first_rank = v->measuring ? v->found->rank_count - 1 : v->gathering.count;
    kvf_message message = {.kind = KVF_MESSAGE_HELLO,
                           .hello = {.engine = "visitor",
                                     .incarnation = v->incarnation,
                                     .rank_count = 1,
                                     .wants_ranks = true,
                                     .first_rank = first_rank,
                                     .clock_ns = now}};
    memcpy(message.digest, v->digest, sizeof message.digest);
    kvf_wire_buffer bytes;
    if (kvf_wire_encode(&message, &bytes))
        return; /* as if it was lost */
    (void)kvf_link_send(v->link, v->route, bytes.data, bytes.size);
    kvf_wire_buffer_free(&bytes);
}

/* ---- answers --------------------------------------------------------------------------------- */

static kvf_status take_facts(visit *v, const kvf_message *message, const char *told) {
    kvf_visited *found = v->found;
    kvf_wire_digest(told, v->digest);
    if (memcmp(v->digest, message->digest, sizeof v->digest) != 0)
        return kvf_fail(KVF_E_PARSE, "the engine's digest does not match its facts");
    kvf_facts facts;
    kvf_status status = kvf_wire_read_facts(told, &facts);
    if (status)
        return status;
    found->model = facts.model;
    kvf_free(facts.convert);
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
        (void)snprintf(v->detail, sizeof v->detail, "the engine %s", refused->detail);
}

static kvf_status read_shard(const void *model, kvf_bytes bytes, uint64_t *pieces, kvf_shard **out) {
    return kvf_wire_decode_shard(model, NULL, bytes, pieces, out);
}

static kvf_status take_engine(visit *v, const kvf_message *message, const kvf_welcome *welcome) {
    kvf_visited *found = v->found;
    if (v->contact->engine && strcmp(welcome->engine, v->contact->engine) != 0)
        return kvf_fail(KVF_E_MISMATCH, "engine %s answers there, not %s", welcome->engine,
                        v->contact->engine);
    kvf_status status = take_facts(v, message, welcome->facts);
    if (status)
        return status;
    found->rank_count = welcome->introduction_count;
    return kvf_siblings_take(welcome, v->digest, found->model, read_shard, found->model, &found->ranks,
                             &found->engine);
}

/* Sends the next greeting when the one before was answered. */
static void measure_next(visit *v) {
    if (v->greetings == 0) {
        end(v, KVF_OK);
        return;
    }
    greet(v, kvf_now(&kvf_monotonic));
}

static void take_whole(visit *v, const kvf_message *message, const kvf_welcome *all) {
    kvf_status status = take_engine(v, message, all);
    v->found->protocol = message->version;
    v->measuring = !status;
    if (status)
        end(v, status);
    else
        measure_next(v);
}

/* Answers do not name their greeting: this one is to the last greeting only if no other is on its way. */
static void take_measured(visit *v) {
    if (v->unanswered > 0)
        return;
    v->found->round_trips[v->found->round_trip_count++] = kvf_now(&kvf_monotonic) - v->greeted;
    v->greetings--;
    measure_next(v);
}

static void take_part(visit *v, const kvf_message *message) {
    bool complete = false;
    kvf_status status = kvf_gather(&v->gathering, message->digest, &message->welcome, &complete);
    const kvf_welcome all = kvf_gathered(&v->gathering, &message->welcome);
    if (status)
        end(v, status);
    else if (complete)
        take_whole(v, message, &all);
    else
        v->next = v->pause = 0; /* the next part, at once */
}

static void take_welcome(visit *v, const kvf_message *message) {
    if (!v->measuring)
        take_part(v, message);
    else
        take_measured(v);
}

static void on_message(void *context, const kvf_letter *letter) {
    visit *v = context;
    kvf_message message;
    if (v->over || kvf_wire_open((kvf_bytes){letter->data, letter->bytes}, &message))
        return;
    bool welcome = message.kind == KVF_MESSAGE_WELCOME;
    if (!welcome && message.kind != KVF_MESSAGE_REFUSED)
        return;
    v->unanswered -= v->unanswered > 0;
    if (message.version != KVF_WIRE_VERSION)
        end(v, kvf_fail(KVF_E_UNSUPPORTED,
                        "the engine speaks version %u of the protocol; this library speaks version %u",
                        message.version, KVF_WIRE_VERSION));
    else if (kvf_wire_read(&message))
        end(v, KVF_E_PARSE);
    else if (!welcome)
        on_refused(v, &message);
    else if (message.welcome.introduction_count > 0)
        take_welcome(v, &message);
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

static void run(visit *v, uint64_t timeout_ns) {
    const uint64_t deadline = kvf_add_or_most(kvf_now(&kvf_monotonic), timeout_ns);
    bool more = false;
    while (!v->over) {
        kvf_link_progress(v->link, &more);
        uint64_t now = kvf_now(&kvf_monotonic);
        if (v->over)
            break;
        if (v->measuring && now >= kvf_min_u64(deadline, v->next)) {
            /* With what was measured: if a greeting is not answered, later answers cannot be matched. */
            end(v, KVF_OK);
            break;
        }
        if (now >= deadline) {
            char reason[sizeof v->detail];
            (void)snprintf(reason, sizeof reason, "%s", v->detail[0] ? v->detail : "nobody answers");
            end(v, kvf_fail(KVF_E_TIMEOUT, "no answer within %.1f s: %s", (double)timeout_ns / 1e9, reason));
            break;
        }
        if (now >= v->next)
            greet(v, now);
        if (!more && !kvf_link_pending(v->link))
            kvf_link_sleep(v->link, now, kvf_min_u64(v->next, deadline));
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
    if (options.greetings > MOST_GREETINGS)
        return kvf_fail(KVF_E_RANGE, "greetings is %u; allowed: 0 to %u", options.greetings, MOST_GREETINGS);
    if (sodium_init() < 0)
        return kvf_fail(KVF_E_UNSUPPORTED, "libsodium cannot be initialised");
    visit *v = kvf_alloc0(1, sizeof *v);
    kvf_visited *found = kvf_alloc0(1, sizeof *found);
    status = v && found ? KVF_OK : kvf_nomem("a visit");
    if (!status) {
        found->round_trips = kvf_alloc(options.greetings, sizeof *found->round_trips);
        status = found->round_trips ? KVF_OK : kvf_nomem("a visit");
    }
    if (!status) {
        v->greetings = options.greetings;
        v->contact = contact;
        v->found = found;
        randombytes_buf(&v->incarnation, sizeof v->incarnation);
        status = connect_to(v, link, &options);
    }
    if (!status) {
        run(v, options.timeout_ns ? options.timeout_ns : PATIENCE);
        status = v->status ? kvf_fail(v->status, "%s: %s", contact->endpoint, v->detail) : KVF_OK;
    }
    if (v) {
        kvf_link_close(v->link);
        kvf_gather_free(&v->gathering);
    }
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
    kvf_free(visited->round_trips);
    kvf_free(visited);
}

const kvf_engine *kvf_visited_engine(const kvf_visited *visited) {
    return visited->engine;
}

const char *kvf_visited_facts(const kvf_visited *visited) {
    return visited->facts;
}

uint32_t kvf_visited_protocol(const kvf_visited *visited) {
    return visited->protocol;
}

const uint64_t *kvf_visited_round_trips(const kvf_visited *visited, uint32_t *count) {
    *count = visited->round_trip_count;
    return visited->round_trips;
}

const char *kvf_visited_endpoint(const kvf_visited *visited, uint32_t rank) {
    return rank < visited->rank_count ? visited->ranks[rank].endpoint : NULL;
}

const char *kvf_visited_public_key(const kvf_visited *visited, uint32_t rank) {
    return rank < visited->rank_count ? visited->ranks[rank].public_key : NULL;
}
