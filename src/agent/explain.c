/*
 * Which ranks read what from which ranks, in words: logged when an engine is met, and on demand.
 */
#include "agent/explain.h"
#include "plan/plan.h"
#include "shard/shard.h"

#define ASSUMED_TOKENS 1024
/* The lines of a summary at KVF_LOG_INFO; if shapes take more, a few are left for the sources. */
#define SUMMARY_LINES 20
#define FEWEST_SOURCE_LINES 6

/* ---- ways ------------------------------------------------------------------------------------ */

/* The transport by which an engine is reached so far: its kind, NULL where nothing is connected yet. */
static const char *kind_to(const kvf_agent *agent, const char *engine, bool incoming) {
    const kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        if (session->peer && session->incoming == incoming && strcmp(session->engine, engine) == 0)
            return kvf_peer_kind(session->peer);
    }
    return NULL;
}

/* The kind that predictions assume before anything is connected. */
static const char *kind_expected(const kvf_remote *remote) {
    const char *known = kind_to(remote->agent, remote->name, false);
    return known ? known : remote->agent->options.transport;
}

/* ---- an engine we read from ------------------------------------------------------------------ */

static uint32_t count_lines(const kvf_text *text) {
    uint32_t lines = 0;
    for (size_t i = 0; i < text->length; i++)
        lines += text->data[i] == '\n';
    return lines;
}

/* Names the ranks that we only tell when they may free. */
static void say_told(kvf_text *text, const kvf_remote *remote) {
    uint32_t told = 0, first = 0;
    for (uint32_t i = 0; i < remote->target_count; i++) {
        if (remote->targets[i].source != UINT32_MAX)
            continue;
        first = told++ ? first : remote->targets[i].rank;
    }
    if (told == 1)
        kvf_text_add(text, "  rank %u is not read, but is told when it may free its blocks\n", first);
    else if (told)
        kvf_text_add(text, "  %u more ranks are not read, but are told when they may free their blocks\n",
                     told);
}

static kvf_status say_plan(kvf_text *text, const kvf_remote *remote, uint32_t most_lines) {
    kvf_plan_words how = {.tokens = ASSUMED_TOKENS, .most_lines = most_lines, .indent = "  "};
    how.kind = kvf_cost_assumed(kind_expected(remote), &how.cost);
    return kvf_say_plan(text, remote->plan, &how);
}

static kvf_status say_summary(kvf_text *text, const kvf_remote *remote) {
    const kvf_agent *agent = remote->agent;
    kvf_text words = {0};
    kvf_text_add(&words, "%s rank %u of %u reads from %s, met at %s:\n", agent->name, agent->rank,
                 agent->rank_count, remote->name, remote->endpoint);
    kvf_say_engine(&words, remote->geometry->engine, "  ");
    kvf_say_engine(&words, agent->engine, "  ");
    uint32_t spent = words.failed ? 0 : count_lines(&words) + 2;
    uint32_t left = spent + FEWEST_SOURCE_LINES < SUMMARY_LINES ? SUMMARY_LINES - spent : FEWEST_SOURCE_LINES;
    kvf_status status = say_plan(&words, remote, left);
    say_told(&words, remote);
    if (words.failed)
        status = kvf_nomem("a summary");
    if (!status)
        kvf_text_add(text, "%s", words.data);
    kvf_text_free(&words);
    return status;
}

static kvf_status say_details(kvf_text *text, const kvf_remote *remote) {
    kvf_text_add(text, "%s, rank by rank:\n", remote->name);
    for (uint32_t r = 0; r < remote->rank_count; r++) {
        const kvf_remote_rank *rank = &remote->ranks[r];
        const kvf_session *session = rank->session;
        kvf_text_add(text, "  rank %u at %s, incarnation %016llx%s%s%s\n", r, rank->endpoint,
                     (unsigned long long)rank->incarnation, rank->public_key[0] ? ", encrypted" : "",
                     session && session->peer ? ", over " : "",
                     session && session->peer ? kvf_peer_kind(session->peer) : "");
    }
    for (uint32_t i = 0; i < remote->target_count; i++)
        kvf_text_add(text, "  rank %u is told by %u ranks of this engine when it may free its blocks\n",
                     remote->targets[i].rank, remote->targets[i].expected_ranks);
    kvf_text_add(text, "  the plan has %u cuts and %u rules, %llu bytes\n", kvf_plan_cut_count(remote->plan),
                 kvf_plan_rule_count(remote->plan), (unsigned long long)kvf_plan_memory_bytes(remote->plan));
    return say_plan(text, remote, 0);
}

void kvf_explain_meeting(const kvf_remote *remote) {
    kvf_agent *agent = remote->agent;
    static const struct {
        kvf_log_level level;
        kvf_status (*say)(kvf_text *text, const kvf_remote *remote);
    } parts[] = {{KVF_LOG_INFO, say_summary}, {KVF_LOG_DEBUG, say_details}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (!kvf_agent_logs(agent, parts[i].level))
            continue;
        kvf_text text = {0};
        if (!parts[i].say(&text, remote) && !text.failed)
            kvf_agent_log(agent, parts[i].level, text.data);
        kvf_text_free(&text);
    }
}

static kvf_status say_remote(kvf_text *text, const kvf_remote *remote, kvf_log_level level) {
    if (!remote->ready) {
        kvf_text_add(text, "%s at %s has not been met yet%s%s\n", remote->name, remote->endpoint,
                     remote->detail[0] ? ": " : "", remote->detail);
        return KVF_OK;
    }
    kvf_status status = say_summary(text, remote);
    const char *kind = kind_to(remote->agent, remote->name, false);
    if (kind)
        kvf_text_add(text, "  over %s\n", kind);
    else
        kvf_text_add(text, "  no rank is connected yet\n");
    return status || level > KVF_LOG_DEBUG ? status : say_details(text, remote);
}

/* ---- engines that read from us, or that we write to ------------------------------------------ */

static bool is_listed(const kvf_agent *agent, const kvf_session *session) {
    const kvf_session *before;
    DL_FOREACH(agent->all_sessions, before) {
        if (before == session)
            return false;
        if (before->incoming && strcmp(before->engine, session->engine) == 0)
            return true;
    }
    return false;
}

/* Describes all sessions of an engine, given the first of them. */
static void say_client(kvf_text *text, const kvf_session *first, kvf_log_level level) {
    const kvf_agent *agent = first->agent;
    uint32_t sessions = 0, joined = 0, leases = 0;
    const kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        if (!session->incoming || strcmp(session->engine, first->engine) != 0)
            continue;
        sessions++;
        joined += session->shape != NULL;
        leases += session->reader_count;
    }
    kvf_text_add(text, "%s: %u of %u ranks have sessions here; %u may be written to; %u leases\n",
                 first->engine, sessions, first->rank_count, joined, leases);
    const char *kind = kind_to(agent, first->engine, true);
    if (kind)
        kvf_text_add(text, "  written to over %s\n", kind);
    if (level > KVF_LOG_DEBUG)
        return;
    DL_FOREACH(agent->all_sessions, session) {
        if (!session->incoming || strcmp(session->engine, first->engine) != 0)
            continue;
        kvf_text_add(text, "  rank %u, incarnation %016llx: %u leases, %u expectations%s\n", session->rank,
                     (unsigned long long)session->incarnation, session->reader_count, session->flow_count,
                     session->shape ? ", may be written to" : "");
    }
}

/* ---- on demand ------------------------------------------------------------------------------- */

static void say_self(kvf_text *text, const kvf_agent *agent) {
    if (!agent->engine) {
        kvf_text_add(text, "a directory at %s of %s: %u of %u ranks have introduced themselves\n",
                     kvf_agent_endpoint(agent), agent->name ? agent->name : "no engine yet",
                     agent->introduction_count, agent->rank_count);
        return;
    }
    kvf_text_add(text, "%s rank %u of %u at %s%s\n", agent->name, agent->rank, agent->rank_count,
                 kvf_agent_endpoint(agent), agent->card ? "" : ", without registered memory yet");
    kvf_say_engine(text, agent->engine, "  ");
}

static kvf_status explain(const kvf_agent *agent, const char *engine, kvf_log_level level, kvf_text *text) {
    kvf_status status = KVF_OK;
    uint32_t known = 0;
    if (!engine)
        say_self(text, agent);
    const kvf_remote *remote;
    DL_FOREACH(agent->all_remotes, remote) {
        if (status || remote->stale || (engine && strcmp(engine, remote->name) != 0))
            continue;
        known++;
        status = say_remote(text, remote, level);
    }
    const kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        if (!session->incoming || is_listed(agent, session) ||
            (engine && strcmp(engine, session->engine) != 0))
            continue;
        known++;
        say_client(text, session, level);
    }
    if (!status && engine && known == 0)
        return kvf_fail(KVF_E_NOT_FOUND, "no engine %s is known here", engine);
    return status;
}

kvf_status kvf_agent_explain(kvf_agent *agent, const char *engine, kvf_log_level level, char *text,
                             size_t text_bytes, size_t *length) {
    if (!agent || (!text && text_bytes))
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !agent ? "agent" : "text");
    if (level != KVF_LOG_INFO && level != KVF_LOG_DEBUG)
        return kvf_fail(KVF_E_INVALID, "level is %d; allowed: KVF_LOG_INFO, %d, and KVF_LOG_DEBUG, %d",
                        (int)level, KVF_LOG_INFO, KVF_LOG_DEBUG);
    kvf_text words = {0};
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    status = explain(agent, engine, level, &words);
    kvf_agent_unlock(agent);
    if (status) {
        kvf_text_free(&words);
        return status;
    }
    return kvf_text_give(&words, text, text_bytes, length);
}
