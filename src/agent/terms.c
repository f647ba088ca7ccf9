/*
 * Messages with an engine of another model. The server has sent its facts, and messages both ways use its terms: its
 * numbers of groups, parts and layers. Inside the agent the numbers are ours.
 *
 * If both have the same facts (remote->match is NULL), nothing is translated.
 */
#include <stdio.h>

#include "agent/terms.h"
#include "plan/plan.h"
#include "shard/shard.h"
#include "stage/message.h"

/* ---- meeting --------------------------------------------------------------------------------- */

/* Our shard in the server's terms, to join with. */
static kvf_status introduce(kvf_remote *remote) {
    const kvf_agent *agent = remote->agent;
    kvf_match *back = NULL;
    kvf_shard *shard = NULL;
    kvf_status status = kvf_match_reverse(remote->match, &back);
    if (!status)
        status = kvf_shard_adapt(agent->shard, back, &shard);
    if (!status)
        status = kvf_agent_write_introduction(agent, shard, remote->match->theirs, remote->digest, "",
                                              &remote->introduction);
    kvf_shard_free(shard);
    kvf_match_free(back);
    return status;
}

/* Packed flows name cells by numbers, and converted cells go packed. */
static kvf_status look_whether_alike(kvf_remote *remote) {
    kvf_match *match = remote->match;
    kvf_status status = KVF_OK;
    remote->alike = kvf_stage_model_sum(match->ours) == kvf_stage_model_sum(match->theirs);
    for (uint32_t g = 0; g < match->our_count && !remote->alike && !status; g++)
        if (match->groups[g].agreement == KVF_AGREE_CONVERT)
            status =
                kvf_match_differ(match, g,
                                 "types are converted only between models whose groups, layers and parts "
                                 "have the same numbers: give both models the same numbers, or one type");
    return status;
}

kvf_status kvf_terms_meet(kvf_remote *remote, const uint8_t *digest, const char *facts) {
    const kvf_agent *agent = remote->agent;
    memcpy(remote->digest, digest, sizeof remote->digest);
    remote->alike = memcmp(digest, agent->digest, sizeof agent->digest) == 0;
    if (remote->alike)
        return KVF_OK;
    uint8_t sum[KVF_WIRE_DIGEST_BYTES];
    kvf_wire_digest(facts, sum);
    if (facts[0] == '\0')
        return kvf_fail(KVF_E_MISMATCH, "engine \"%s\" caches other cells, but did not say which",
                        remote->name);
    if (memcmp(sum, digest, sizeof sum) != 0)
        return kvf_fail(KVF_E_MISMATCH, "the digest of engine \"%s\" does not match its facts", remote->name);
    kvf_status status = kvf_wire_match(&agent->own_facts, facts, remote->name, &remote->match);
    if (!status)
        status = look_whether_alike(remote);
    return status ? status : introduce(remote);
}

const kvf_model *kvf_terms_model(const kvf_remote *remote) {
    return remote->match ? remote->match->retyped : kvf_engine_model(remote->agent->engine);
}

kvf_status kvf_terms_shard(const kvf_remote *remote, kvf_bytes bytes, uint64_t *pieces, kvf_shard **out) {
    if (!remote->match)
        return kvf_wire_decode_shard(kvf_engine_model(remote->agent->engine), NULL, bytes, pieces, out);
    kvf_shard *theirs = NULL;
    kvf_status status = kvf_wire_decode_shard(remote->match->theirs, NULL, bytes, pieces, &theirs);
    if (!status)
        status = kvf_shard_adapt(theirs, remote->match, out);
    kvf_shard_free(theirs);
    return status;
}

/* All layers of one of our groups. */
static kvf_range all_layers(const kvf_match *match, uint32_t group) {
    return (kvf_range){0, kvf_model_group(match->ours, group)->layer_count};
}

typedef kvf_status (*plan_builder)(const kvf_shard *local, const kvf_engine *remote,
                                   const kvf_plan_options *options, kvf_plan **out);

static kvf_status build_plan(const kvf_remote *remote, const kvf_engine *engine, const kvf_shard *shard,
                             plan_builder build, kvf_plan **out) {
    const kvf_match *match = remote->match;
    if (!match)
        return build(shard, engine, NULL, out);
    uint32_t *groups = kvf_alloc(match->our_count, sizeof *groups), count = 0;
    if (!groups)
        return kvf_nomem("a plan");
    for (uint32_t g = 0; g < match->our_count; g++)
        if (kvf_match_check(match, g, all_layers(match, g)) == KVF_OK)
            groups[count++] = g;
    kvf_plan_options options = {.struct_size = sizeof options,
                                .groups = groups,
                                .group_count = count,
                                .convert = KVF_CONVERTED_DTYPES};
    kvf_status status = build(shard, engine, &options, out);
    kvf_free(groups);
    return status;
}

kvf_status kvf_terms_plan(const kvf_remote *remote, const kvf_engine *engine, const kvf_shard *shard,
                          kvf_plan **out) {
    return build_plan(remote, engine, shard, kvf_plan_build, out);
}

kvf_status kvf_terms_cover(const kvf_remote *remote, const kvf_engine *engine, const kvf_shard *shard,
                           kvf_plan **out) {
    return build_plan(remote, engine, shard, kvf_plan_build_cover, out);
}

/* ---- requests -------------------------------------------------------------------------------- */

kvf_status kvf_terms_check(const kvf_remote *remote, const kvf_group_steps *groups) {
    const kvf_match *match = remote->match;
    for (uint32_t g = 0; match && groups && g < match->our_count; g++) {
        kvf_status status = KVF_OK;
        if (groups[g].begin < groups[g].end)
            status = kvf_match_check(match, g, all_layers(match, g));
        if (status)
            return kvf_fail_in(status, "%s cannot fill the requested cells: ", remote->name);
    }
    return KVF_OK;
}

uint32_t kvf_terms_group_count(const kvf_remote *remote) {
    return kvf_model_group_count(remote->match ? remote->match->theirs
                                               : kvf_engine_model(remote->agent->engine));
}

/* Moves each group of `from` to its index on the other side; groups that do not exist there stay empty. */
static kvf_group_steps *reorder(const kvf_match *match, const kvf_group_steps *from, bool to_theirs) {
    uint32_t count = kvf_model_group_count(to_theirs ? match->theirs : match->ours);
    kvf_group_steps *to = kvf_alloc0(count, sizeof *to);
    for (uint32_t g = 0; to && g < match->our_count; g++) {
        uint32_t theirs = match->groups[g].theirs;
        if (theirs != KVF_NO_GROUP)
            to[to_theirs ? theirs : g] = from[to_theirs ? g : theirs];
    }
    return to;
}

kvf_status kvf_terms_say(const kvf_remote *remote, const kvf_group_steps *ours, kvf_group_steps **own,
                         const kvf_group_steps **out) {
    *own = NULL;
    *out = ours;
    if (!remote->match || !ours)
        return KVF_OK;
    *out = *own = reorder(remote->match, ours, true);
    return *own ? KVF_OK : kvf_nomem("a request");
}

kvf_status kvf_terms_hear(const kvf_remote *remote, const kvf_group_steps *theirs, kvf_group_steps **own,
                          const kvf_group_steps **out) {
    *own = NULL;
    *out = theirs;
    if (!remote->match)
        return KVF_OK;
    *out = *own = reorder(remote->match, theirs, false);
    return *own ? KVF_OK : kvf_nomem("a request");
}

void kvf_terms_cells(const kvf_remote *remote, kvf_call_body *call) {
    if (!remote->match)
        return;
    const kvf_match_group *m = &remote->match->groups[call->group];
    uint32_t layers = call->layers.end - call->layers.begin;
    call->group = m->theirs;
    call->part = m->parts[call->part];
    call->layers.begin = m->first_theirs + (call->layers.begin - m->layers.begin);
    call->layers.end = call->layers.begin + layers;
}

/* ---- telling --------------------------------------------------------------------------------- */

/* Both have the same facts: every group is the same. */
static void tell_same(const kvf_group_desc *group, uint32_t i, kvf_group_match *out) {
    out->ours = out->theirs = i;
    out->layers_both = group->layer_count;
    (void)snprintf(out->name, sizeof out->name, "%s", group->name);
}

static void tell_match(const kvf_match_group *group, kvf_group_match *out) {
    out->ours = group->ours;
    out->theirs = group->theirs;
    out->agreement = group->agreement;
    out->layers_both = group->layers_both;
    out->layers_ours = group->layers_ours;
    out->layers_theirs = group->layers_theirs;
    (void)snprintf(out->name, sizeof out->name, "%s", group->name);
    (void)snprintf(out->detail, sizeof out->detail, "%s", group->detail);
}

static kvf_status find_match(kvf_agent *agent, const char *engine, uint32_t i, kvf_group_match *out) {
    const kvf_model *ours = agent->engine ? kvf_engine_model(agent->engine) : NULL;
    kvf_remote *remote = NULL;
    HASH_FIND_STR(agent->remotes, engine, remote);
    if (!ours || !remote || !remote->ready)
        return kvf_fail(KVF_E_NOT_FOUND, "engine \"%s\" has not been met", engine);
    uint32_t count = remote->match ? remote->match->count : kvf_model_group_count(ours);
    if (i >= count)
        return kvf_fail(KVF_E_NOT_FOUND, "i is %u; engine \"%s\" and this one have %u groups", i, engine,
                        count);
    if (remote->match)
        tell_match(&remote->match->groups[i], out);
    else
        tell_same(kvf_model_group(ours, i), i, out);
    return KVF_OK;
}

kvf_status kvf_agent_match(kvf_agent *agent, const char *engine, uint32_t i, kvf_group_match *match) {
    if (!agent || !engine)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", agent ? "engine" : "agent");
    kvf_group_match found = {.struct_size = sizeof found};
    kvf_status status = kvf_check_out(match, "kvf_group_match");
    if (!status)
        status = kvf_agent_lock(agent);
    if (status)
        return status;
    status = find_match(agent, engine, i, &found);
    kvf_agent_unlock(agent);
    if (!status)
        kvf_fill_out(match, &found, sizeof found);
    return status;
}
