#include "agent/push_shape.h"

#include "agent/budget.h"
#include "plan/plan.h"
#include "shard/shard.h"

/* Sorting a piece takes as long as copying so many bytes. */
#define PIECE_WORK 1024u
/* And making a byte of a plan. */
#define PLAN_WORK 32u

static void forget_newest(kvf_push_shape *shape) {
    kvf_push_plan *plan = shape->plans;
    shape->plans = plan->next;
    shape->plan_bytes -= kvf_plan_memory_bytes(plan->plan);
    kvf_plan_free(plan->plan);
    kvf_free(plan);
}

static void free_shape(kvf_push_shape *shape) {
    while (shape->plans)
        forget_newest(shape);
    kvf_shard_free(shape->shard);
    kvf_free(shape);
}

static kvf_status make(kvf_agent *agent, kvf_bytes told, const uint8_t *sum, kvf_push_shape **out) {
    kvf_push_shape *shape = kvf_alloc0(1, sizeof *shape);
    if (!shape)
        return kvf_nomem("a consumer's shard");
    uint64_t pieces;
    kvf_status status = kvf_wire_decode_shard(kvf_engine_model(agent->engine), agent->own_facts.convert, told,
                                              &pieces, &shape->shard);
    agent->work += pieces * PIECE_WORK;
    shape->agent = agent;
    memcpy(shape->sum, sum, sizeof shape->sum);
    if (!status) {
        HASH_ADD(hh, agent->push_shapes, sum, sizeof shape->sum, shape);
        status = shape->hh.tbl ? KVF_OK : kvf_nomem("a consumer's shard");
    }
    if (status) {
        free_shape(shape);
        return status;
    }
    *out = shape;
    return KVF_OK;
}

kvf_status kvf_push_shape_use(kvf_agent *agent, const kvf_introduction *intro, kvf_push_shape **out) {
    uint8_t sum[KVF_WIRE_DIGEST_BYTES];
    kvf_push_shape *shape = NULL;
    kvf_status status = KVF_OK;
    memcpy(sum, intro->digest, sizeof sum);
    kvf_wire_sum_shard(sum, intro->rank, intro->shard);
    HASH_FIND(hh, agent->push_shapes, sum, sizeof sum, shape);
    if (!shape)
        status = make(agent, intro->shard, sum, &shape);
    if (status)
        return status;
    shape->users++;
    *out = shape;
    return KVF_OK;
}

void kvf_push_shape_leave(kvf_push_shape *shape) {
    if (!shape || --shape->users > 0)
        return;
    HASH_DEL(shape->agent->push_shapes, shape);
    free_shape(shape);
}

static kvf_status plan_for(kvf_push_shape *shape, kvf_range layers, const kvf_push_plan **out) {
    kvf_agent *agent = shape->agent;
    for (kvf_push_plan *plan = shape->plans; plan; plan = plan->next) {
        if (plan->layers.begin == layers.begin && plan->layers.end == layers.end) {
            *out = plan;
            return KVF_OK;
        }
    }
    kvf_push_plan *plan = kvf_alloc0(1, sizeof *plan);
    if (!plan)
        return kvf_nomem("a plan");
    plan->layers = layers;
    plan->source = UINT32_MAX;
    /* The types of its shard are ones that we may convert: this was checked when the shard was read. */
    kvf_plan_options options = {
        .struct_size = sizeof options, .layers = layers, .convert = KVF_CONVERTED_DTYPES};
    kvf_status status = kvf_plan_build(shape->shard, agent->engine, &options, &plan->plan);
    if (status) {
        kvf_free(plan);
        return status;
    }
    agent->stats.plans_built++;
    for (uint32_t s = 0; s < kvf_plan_source_count(plan->plan); s++)
        if (kvf_plan_source_rank(plan->plan, s) == agent->rank)
            plan->source = s;
    plan->next = shape->plans;
    shape->plans = plan;
    shape->plan_bytes += kvf_plan_memory_bytes(plan->plan);
    agent->work += PLAN_WORK * kvf_plan_memory_bytes(plan->plan);
    *out = plan;
    return KVF_OK;
}

kvf_status kvf_push_plan_for(kvf_session *session, kvf_range layers, const kvf_push_plan **out) {
    kvf_push_shape *shape = session->shape;
    const uint64_t before = shape->plan_bytes;
    kvf_status status = plan_for(shape, layers, out);
    if (status)
        return status;
    const uint64_t more = shape->plan_bytes - session->plan_bytes;
    status = more > 0 ? kvf_budget_take(session, more) : KVF_OK;
    if (!status)
        session->plan_bytes += more;
    else if (shape->plan_bytes > before)
        forget_newest(shape);
    return status;
}
