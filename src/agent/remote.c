/*
 * Remote engines: from a contact to the shards of all ranks, our plan, and the ranks that we need.
 */
#include <stdio.h>

#include "agent/explain.h"
#include "agent/remote.h"
#include "agent/terms.h"
#include "plan/plan.h"

#define FIRST_PAUSE (50 * KVF_MILLISECOND)
#define LONGEST_PAUSE KVF_SECOND

static const char *text_or_empty(const char *text) {
    return text ? text : "";
}

/* Requests a tick: the agent may know thousands of others, which are not looked at. */
static void due(kvf_remote *remote, uint64_t when) {
    kvf_alarm_by(&remote->agent->remote_times, &remote->time, when);
}

static void due_now(kvf_remote *remote) {
    due(remote, kvf_agent_now(remote->agent));
}

/* Its contact's answers are for nobody. */
static void end_meeting(kvf_remote *remote) {
    if (remote->hh_route.tbl)
        HASH_DELETE(hh_route, remote->agent->meetings, remote);
    memset(&remote->hh_route, 0, sizeof remote->hh_route);
}

static void leave(kvf_session *session, kvf_remote_rank *rank) {
    DL_DELETE(session->ranks, rank);
    rank->session = NULL;
}

void kvf_remote_free(kvf_remote *remote) {
    kvf_agent *agent = remote->agent;
    kvf_remote_stale(remote);
    for (uint32_t i = 0; remote->ranks && i < remote->rank_count; i++)
        if (remote->ranks[i].session)
            leave(remote->ranks[i].session, &remote->ranks[i]);
    if (remote->prev)
        DL_DELETE(agent->all_remotes, remote);
    kvf_alarms_leave(&agent->remote_times, &remote->time);
    if (remote->route)
        kvf_link_disconnect(agent->link, remote->route);
    kvf_geometry_leave(remote);
    kvf_match_free(remote->match);
    kvf_wire_buffer_free(&remote->introduction);
    kvf_gather_free(&remote->gathering);
    kvf_siblings_drop(&remote->siblings);
    kvf_siblings_free(remote->ranks, remote->rank_count);
    kvf_free(remote->targets);
    kvf_free(remote->name);
    kvf_free(remote->endpoint);
    kvf_free(remote->public_key);
    kvf_free(remote);
}

void kvf_remotes_leave(kvf_session *session, bool lost) {
    while (session->ranks) {
        kvf_remote *remote = session->ranks->remote;
        leave(session, session->ranks);
        if (lost)
            kvf_remote_stale(remote);
        else
            due_now(remote); /* it may be forgotten with its last session */
    }
}

/* Requests to come do not find it. */
static void hide(kvf_remote *remote) {
    if (remote->hh.tbl)
        HASH_DEL(remote->agent->remotes, remote);
    memset(&remote->hh, 0, sizeof remote->hh);
}

void kvf_remote_stale(kvf_remote *remote) {
    remote->stale = true;
    hide(remote);
    end_meeting(remote);
    if (!remote->plan)
        kvf_geometry_leave(remote); /* if it was the maker, another engine takes over */
    due_now(remote);
}

static void hello(kvf_remote *remote, uint64_t now) {
    remote->hello_pause =
        remote->hello_pause ? kvf_min_u64(2 * remote->hello_pause, LONGEST_PAUSE) : FIRST_PAUSE;
    remote->hello_next = now + remote->hello_pause;
    due(remote, remote->hello_next);
    kvf_hello_send(remote->agent, remote->route, remote->agent->digest, true, remote->gathering.count, false);
}

static kvf_status check_contact(const kvf_agent *agent, const kvf_contact *contact) {
    if (!contact->engine || contact->engine[0] == '\0' || strlen(contact->engine) > KVF_WIRE_MAX_NAME)
        return kvf_fail(KVF_E_INVALID, "contact.engine is %s; allowed: 1 to %u characters",
                        contact->engine ? "too long or empty" : "NULL", KVF_WIRE_MAX_NAME);
    if (!contact->endpoint)
        return kvf_fail(KVF_E_INVALID, "contact.endpoint of %s is NULL", contact->engine);
    if (strcmp(contact->engine, agent->name) == 0)
        return kvf_fail(KVF_E_INVALID, "contact.engine is %s, which is this engine itself", contact->engine);
    return KVF_OK;
}

static kvf_status make_remote(kvf_agent *agent, const kvf_contact *contact, kvf_remote **out) {
    kvf_remote *remote = kvf_alloc0(1, sizeof *remote);
    if (!remote || kvf_alarms_join(&agent->remote_times, &remote->time)) {
        kvf_free(remote);
        return kvf_nomem("a remote engine");
    }
    remote->agent = agent;
    DL_APPEND(agent->all_remotes, remote);
    remote->name = kvf_strdup(contact->engine);
    remote->endpoint = kvf_strdup(contact->endpoint);
    remote->public_key = kvf_strdup(text_or_empty(contact->public_key));
    kvf_status status = KVF_OK;
    if (!remote->name || !remote->endpoint || !remote->public_key)
        status = kvf_nomem("a remote engine");
    if (!status)
        status = kvf_link_connect(agent->link, remote->endpoint, remote->public_key, &remote->route);
    if (!status) {
        HASH_ADD_KEYPTR(hh, agent->remotes, remote->name, strlen(remote->name), remote);
        HASH_ADD(hh_route, agent->meetings, route, sizeof remote->route, remote);
        if (!remote->hh.tbl || !remote->hh_route.tbl)
            status = kvf_nomem("a remote engine");
    }
    if (status) {
        kvf_remote_free(remote);
        return status;
    }
    hello(remote, kvf_agent_now(agent));
    *out = remote;
    return KVF_OK;
}

kvf_status kvf_remote_take(kvf_agent *agent, const kvf_contact *contact, kvf_remote **out) {
    kvf_status status = check_contact(agent, contact);
    if (status)
        return status;
    kvf_remote *remote = NULL;
    HASH_FIND_STR(agent->remotes, contact->engine, remote);
    /* Another address or key is another process, or another of the engine's agents: requests under way continue with
     * the old one, which goes on with meeting it. */
    if (remote && (strcmp(remote->endpoint, contact->endpoint) != 0 ||
                   strcmp(remote->public_key, text_or_empty(contact->public_key)) != 0)) {
        if (remote->ready)
            kvf_remote_stale(remote);
        else
            hide(remote);
        remote = NULL;
    }
    if (!remote)
        status = make_remote(agent, contact, &remote);
    if (status)
        return status;
    remote->users++;
    remote->last_used = kvf_agent_now(agent);
    *out = remote;
    return KVF_OK;
}

void kvf_remote_drop(kvf_remote *remote) {
    if (!remote)
        return;
    remote->users--;
    remote->last_used = kvf_agent_now(remote->agent);
    if (remote->stale)
        due_now(remote);
    else
        due(remote, remote->last_used + remote->agent->options.idle_ns);
}

/* ---- meeting --------------------------------------------------------------------------------- */

/* Limits of one round: introductions that are taken, sessions that are begun. A few milliseconds each. */
#define TAKEN_AT_ONCE 512u
#define CALLED_AT_ONCE 64u

/* All introductions have come. */
static kvf_status begin_taking(kvf_remote *remote, const uint8_t *digest, const kvf_welcome *all) {
    if (strcmp(all->engine, remote->name) != 0)
        return kvf_fail(KVF_E_MISMATCH, "engine %s answers at %s, not %s", all->engine, remote->endpoint,
                        remote->name);
    kvf_status status = kvf_terms_meet(remote, digest, all->facts);
    remote->rank_count = all->introduction_count;
    return status ? status : kvf_siblings_begin(&remote->siblings, remote->rank_count, digest);
}

static kvf_status take_some(kvf_remote *remote) {
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < TAKEN_AT_ONCE && remote->siblings.taken < remote->rank_count && !status; i++)
        status = kvf_siblings_add(&remote->siblings, remote->gathering.introductions[remote->siblings.taken],
                                  remote->name, remote->digest);
    return status || remote->siblings.taken < remote->rank_count ? status : kvf_geometry_use(remote);
}

/* The geometry is ready: the engine's introductions are no longer needed. */
static void take_geometry(kvf_remote *remote) {
    remote->plan = remote->geometry->plan;
    remote->ranks = kvf_siblings_end(&remote->siblings);
    kvf_gather_free(&remote->gathering);
}

static kvf_status choose_targets(kvf_remote *remote) {
    const kvf_agent *agent = remote->agent;
    const uint32_t *readers = remote->geometry->readers;
    uint32_t ours = agent->rank_count, theirs = remote->rank_count, source = 0;
    remote->targets = kvf_alloc0(theirs, sizeof *remote->targets);
    if (!remote->targets)
        return kvf_nomem("a remote engine");
    for (uint32_t p = 0; p < theirs; p++) {
        bool reads = kvf_plan_source_rank(remote->plan, source) == p;
        if (reads)
            remote->targets[remote->target_count++] = (kvf_target){p, source++, readers[p]};
        else if (readers[p] == 0 && ours > 0 && p % ours == agent->rank)
            remote->targets[remote->target_count++] = (kvf_target){p, UINT32_MAX, 1};
    }
    return KVF_OK;
}

/* Begins sessions with some targets. Failures show when the sessions are needed. */
static void call_some(kvf_remote *remote) {
    for (uint32_t i = 0; i < CALLED_AT_ONCE && remote->targets_called < remote->target_count; i++) {
        kvf_session *session;
        (void)kvf_session_to(remote, remote->targets[remote->targets_called++].rank, &session);
    }
}

static void become_ready(kvf_remote *remote) {
    kvf_agent *agent = remote->agent;
    end_meeting(remote);
    kvf_link_disconnect(agent->link, remote->route);
    remote->route = 0;
    remote->ready = true;
    kvf_explain_meeting(remote);
    if (!remote->hh.tbl) /* a request has named another contact meanwhile */
        kvf_remote_stale(remote);
    agent->hooks->met(remote);
}

/* Does the next step from introductions to being ready. */
static void go_on(kvf_remote *remote) {
    kvf_status status = KVF_OK;
    if (!remote->geometry)
        status = take_some(remote);
    else if (!remote->geometry->ready)
        status = kvf_geometry_make(remote);
    else if (!remote->plan)
        take_geometry(remote);
    else if (!remote->targets)
        status = choose_targets(remote);
    else
        call_some(remote);
    if (status)
        kvf_remote_fail(remote, status, kvf_error_detail());
    else if (remote->targets && remote->targets_called == remote->target_count)
        become_ready(remote);
    else
        due_now(remote);
}

void kvf_remote_welcome(kvf_remote *remote, const uint8_t *digest, const kvf_welcome *welcome) {
    kvf_agent *agent = remote->agent;
    uint32_t known = remote->gathering.count;
    bool complete = false;
    if (remote->gathered)
        return; /* once more */
    kvf_status status = kvf_gather(&remote->gathering, digest, welcome, &complete);
    if (!status && !complete) {
        if (remote->gathering.count > known) { /* the next part, at once */
            remote->hello_pause = 0;
            hello(remote, kvf_agent_now(agent));
        }
        return;
    }
    const kvf_welcome all = kvf_gathered(&remote->gathering, welcome);
    if (!status)
        status = begin_taking(remote, digest, &all);
    if (status) {
        kvf_remote_fail(remote, status, kvf_error_detail());
        return;
    }
    remote->gathered = true;
    due_now(remote);
}

void kvf_remote_fail(kvf_remote *remote, kvf_status status, const char *detail) {
    kvf_agent *agent = remote->agent;
    char words[KVF_DETAIL_BYTES];
    (void)snprintf(words, sizeof words, "%s: %s", remote->name, detail);
    kvf_remote_stale(remote);
    agent->hooks->unmet(remote, status, words);
}

static bool is_in_use(const kvf_remote *remote) {
    bool in_use = remote->users > 0;
    for (uint32_t i = 0; remote->ready && !remote->stale && i < remote->rank_count && !in_use; i++)
        in_use = remote->ranks[i].session != NULL;
    return in_use;
}

/* May free it. */
static void tick_remote(kvf_remote *remote, uint64_t now) {
    const uint64_t idle_at = remote->last_used + remote->agent->options.idle_ns;
    if ((remote->stale || now >= idle_at) && !is_in_use(remote))
        kvf_remote_free(remote);
    else if (remote->ready && now < idle_at)
        due(remote, idle_at);
    else if (remote->ready || remote->stale)
        return; /* its last user, or session, requests a tick */
    else if (remote->gathered)
        go_on(remote);
    else if (now >= remote->hello_next)
        hello(remote, now);
    else
        due(remote, remote->hello_next);
}

static kvf_remote *remote_at(kvf_alarm *time) {
    return (kvf_remote *)((char *)time - offsetof(kvf_remote, time));
}

void kvf_remotes_tick(kvf_agent *agent, uint64_t now) {
    kvf_alarms *times = &agent->remote_times;
    const uint64_t turns = times->turns; /* what a tick requests at once is for the next round */
    for (kvf_alarm *first; (first = kvf_alarms_first(times)) && first->at <= now && first->turn <= turns;) {
        kvf_alarm_set(times, first, UINT64_MAX);
        tick_remote(remote_at(first), now);
    }
}
