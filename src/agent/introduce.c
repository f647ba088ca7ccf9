/*
 * Introductions of an engine's ranks, which an agent or a directory hands out.
 */
#include "agent/agent.h"

const char *kvf_agent_endpoint(const kvf_agent *agent) {
    if (!agent)
        return "";
    return agent->options.advertise ? agent->options.advertise : kvf_link_endpoint(agent->link);
}

kvf_status kvf_agent_write_introduction(const kvf_agent *agent, const kvf_shard *shard, const kvf_model *told,
                                        const uint8_t *digest, const char *facts, kvf_wire_buffer *out) {
    kvf_wire_buffer bytes = {0};
    kvf_status status = kvf_wire_encode_shard(shard, told, &bytes);
    if (status)
        return status;
    const kvf_agent_options *o = &agent->options;
    kvf_introduction intro = {.engine = agent->name,
                              .incarnation = agent->incarnation,
                              .rank = agent->rank,
                              .rank_count = agent->rank_count,
                              .endpoint = kvf_agent_endpoint(agent),
                              .public_key = o->public_key ? o->public_key : "",
                              .shard = {bytes.data, bytes.size},
                              .facts = facts};
    memcpy(intro.digest, digest, sizeof intro.digest);
    status = kvf_wire_encode_introduction(&intro, out);
    kvf_wire_buffer_free(&bytes);
    return status;
}

kvf_status kvf_agent_introduction(kvf_agent *agent, const void **bytes, size_t *size) {
    if (!agent || !bytes || !size)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !agent ? "agent" : !bytes ? "bytes" : "size");
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    if (!agent->card)
        status = kvf_fail(KVF_E_INVALID, "the agent has no memory registered; see kvf_agent_register()");
    else {
        *bytes = agent->with_facts.data;
        *size = agent->with_facts.size;
    }
    kvf_agent_unlock(agent);
    return status;
}

/* A directory takes its engine's name, size, digest and facts from the first introduction. */
static kvf_status adopt(kvf_agent *agent, const kvf_introduction *intro) {
    if (agent->name)
        return KVF_OK;
    uint8_t digest[KVF_WIRE_DIGEST_BYTES];
    kvf_wire_digest(intro->facts, digest);
    if (intro->facts[0] && memcmp(digest, intro->digest, sizeof digest) != 0)
        return kvf_fail(KVF_E_MISMATCH, "the digest of rank %u of %s does not match its facts", intro->rank,
                        intro->engine);
    char *name = kvf_strdup(intro->engine), *facts = kvf_strdup(intro->facts);
    kvf_wire_buffer *introductions = kvf_alloc0(intro->rank_count, sizeof *introductions);
    if (!name || !facts || !introductions) {
        kvf_free(name);
        kvf_free(facts);
        kvf_free(introductions);
        return kvf_nomem("a directory");
    }
    agent->name = name;
    agent->facts = facts;
    agent->introductions = introductions;
    agent->rank_count = intro->rank_count;
    memcpy(agent->digest, intro->digest, sizeof agent->digest);
    return KVF_OK;
}

static kvf_status introduce(kvf_agent *agent, kvf_introduction *intro) {
    kvf_status status = adopt(agent, intro);
    if (status)
        return status;
    if (strcmp(intro->engine, agent->name) != 0 || intro->rank_count != agent->rank_count)
        return kvf_fail(KVF_E_MISMATCH, "the introduction is of engine %s with %u ranks, not %s with %u",
                        intro->engine, intro->rank_count, agent->name, agent->rank_count);
    if (memcmp(intro->digest, agent->digest, sizeof agent->digest) != 0)
        return kvf_fail(KVF_E_MISMATCH, "rank %u of %s caches other cells than its siblings", intro->rank,
                        intro->engine);
    if (agent->engine && intro->rank == agent->rank)
        return intro->incarnation == agent->incarnation
                   ? KVF_OK
                   : kvf_fail(KVF_E_EXISTS, "another process says it is rank %u of %s", intro->rank,
                              intro->engine);
    kvf_wire_buffer passed_on = {0};
    intro->facts = "";
    status = kvf_wire_encode_introduction(intro, &passed_on);
    if (status)
        return status;
    kvf_wire_buffer *place = &agent->introductions[intro->rank];
    agent->introduction_count += place->size == 0;
    kvf_wire_buffer_free(place);
    *place = passed_on;
    return KVF_OK;
}

kvf_status kvf_agent_introduce(kvf_agent *agent, const void *data, size_t size) {
    if (!agent || !data)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !agent ? "agent" : "bytes");
    kvf_introduction intro;
    void *storage = NULL;
    kvf_status status = kvf_wire_decode_introduction((kvf_bytes){data, size}, &intro, &storage);
    if (status)
        return status;
    status = kvf_agent_lock(agent);
    if (!status) {
        status = introduce(agent, &intro);
        kvf_agent_unlock(agent);
    }
    kvf_free(storage);
    return status;
}
