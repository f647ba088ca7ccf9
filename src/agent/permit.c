/*
 * Which blocks a flow that a peer opens may access: those of a hold that it has a lease on, or those that it was asked
 * to write, and only while the lease or the expectation lasts. O(blocks).
 */
#include <stdio.h>

#include "agent/brought.h"
#include "agent/expect.h"
#include "agent/hold.h"
#include "agent/permit.h"
#include "agent/stage.h"
#include "agent/steps.h"
#include "model/model.h"
#include "request/request.h"

static bool is_of(const kvf_session *session, const char *peer) {
    char name[KVF_ENDPOINT_NAME_BYTES];
    kvf_endpoint_name(name, session->engine, session->rank, session->incarnation);
    return strcmp(name, peer) == 0;
}

static kvf_status check_group(const kvf_shard *shard, uint32_t g, const kvf_group_steps *asked,
                              const kvf_group_steps *ours) {
    const kvf_group_desc *group = kvf_model_group(shard->model, g);
    const uint64_t first = kvf_first_moved(group, asked->begin, asked->end);
    if (asked->begin >= asked->end)
        return KVF_OK;
    if (first < ours->begin || asked->end > ours->end)
        return kvf_fail(KVF_E_PERMISSION, "group %s: steps [%llu, %llu) are not in [%llu, %llu)", group->name,
                        (unsigned long long)first, (unsigned long long)asked->end,
                        (unsigned long long)ours->begin, (unsigned long long)ours->end);
    const kvf_range wanted = kvf_wanted_entries(shard, g, asked);
    for (uint32_t i = wanted.begin; i < wanted.end; i++) {
        const uint64_t place = (uint64_t)asked->table.first_block + i;
        const uint64_t entry = place - ours->table.first_block; /* before the first: beyond the last */
        if (entry >= ours->table.count || ours->table.ids[entry] != asked->table.ids[i])
            return kvf_fail(KVF_E_PERMISSION,
                            "group %s: block %u, number %llu of the sequence, does not belong to the request",
                            group->name, asked->table.ids[i], (unsigned long long)place);
    }
    return KVF_OK;
}

static kvf_status check_blocks(const kvf_agent *agent, const kvf_flow_request *request,
                               const kvf_group_steps *ours) {
    kvf_status status = kvf_check_groups(agent->shard, request->groups, request->group_count, false);
    for (uint32_t g = 0; g < request->group_count && !status; g++)
        status = check_group(agent->shard, g, &request->groups[g], &ours[g]);
    return status;
}

static kvf_status check_read(const kvf_agent *agent, const char *peer, const kvf_flow_request *request) {
    kvf_reader *reader = NULL;
    HASH_FIND(hh, agent->leases, &request->permission, sizeof request->permission, reader);
    if (!reader || !is_of(reader->session, peer) || kvf_agent_now(agent) >= reader->until)
        return kvf_fail(KVF_E_PERMISSION, "it has no lease number %llu",
                        (unsigned long long)request->permission);
    return check_blocks(agent, request, reader->hold->base.groups);
}

static kvf_status check_write(const kvf_agent *agent, const char *peer, const kvf_flow_request *request) {
    kvf_asker *expect = kvf_expect_moving(agent, request->permission);
    for (uint32_t i = 0; expect && i < expect->source_count; i++) {
        const kvf_source *source = &expect->sources[i];
        if (source->session && source->until && !source->settled && is_of(source->session, peer)) {
            kvf_brought_begin(expect);
            return check_blocks(agent, request, expect->base.groups);
        }
    }
    if (!expect && kvf_expect_was(agent, request->permission))
        return kvf_fail(KVF_E_CANCELLED, "expectation number %llu has ended",
                        (unsigned long long)(request->permission & ~KVF_EXPECTATION));
    return kvf_fail(KVF_E_PERMISSION, "it has no expectation number %llu",
                    (unsigned long long)request->permission);
}

kvf_status kvf_permit_flow(kvf_agent *agent, const char *peer, const kvf_flow_request *request) {
    return request->direction == KVF_READ ? check_read(agent, peer, request)
                                          : check_write(agent, peer, request);
}
