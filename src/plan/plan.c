#include "plan/plan.h"

static kvf_status check_arguments(const kvf_shard *local, const kvf_engine *remote, kvf_plan **out) {
    if (!local || !remote || !out)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !local ? "local" : !remote ? "remote" : "out");
    return KVF_OK;
}

static kvf_status check_options(const kvf_plan *plan) {
    const kvf_plan_options *options = &plan->options;
    uint32_t layers = kvf_model_layer_count(plan->local->model);
    if (options->replicas != KVF_REPLICA_SPREAD && options->replicas != KVF_REPLICA_FIRST)
        return kvf_fail(KVF_E_INVALID, "replicas is %d; allowed: 0 (spread) or 1 (first)",
                        (int)options->replicas);
    if (options->layers.begin > options->layers.end || options->layers.end > layers)
        return kvf_fail(KVF_E_RANGE, "layers are [%u, %u); allowed: a range within [0, %u)",
                        options->layers.begin, options->layers.end, layers);
    return KVF_OK;
}

static kvf_status take_groups(kvf_plan *plan) {
    const kvf_plan_options *options = &plan->options;
    uint32_t groups = kvf_model_group_count(plan->local->model);
    plan->asked = kvf_alloc0(groups, sizeof *plan->asked);
    if (!plan->asked)
        return kvf_nomem("a plan");
    if (options->group_count > 0 && !options->groups)
        return kvf_fail(KVF_E_INVALID, "groups is NULL, and group_count %u", options->group_count);
    for (uint32_t g = 0; g < groups && !options->groups; g++)
        plan->asked[g] = true;
    for (uint32_t i = 0; i < options->group_count && options->groups; i++) {
        if (options->groups[i] >= groups)
            return kvf_fail(KVF_E_RANGE, "groups[%u] is %u; the model has %u", i, options->groups[i], groups);
        plan->asked[options->groups[i]] = true;
    }
    plan->options.groups = NULL; /* the caller's */
    if (options->convert & ~KVF_CONVERTED_DTYPES)
        return kvf_fail(KVF_E_INVALID,
                        "convert is 0x%x; allowed: the bits of f32, f16, bf16, f8_e4m3 and f8_e5m2, 0x%x",
                        options->convert, KVF_CONVERTED_DTYPES);
    return KVF_OK;
}

/* If the remote engine has another model with all groups that are asked for, adapts its shards to our model.
 */
static kvf_status meet(kvf_plan *plan, const kvf_engine *remote) {
    const kvf_model *ours = plan->local->model;
    plan->given = plan->remote = remote;
    if (ours == remote->model || kvf_model_compare(ours, remote->model) == KVF_OK)
        return KVF_OK;
    kvf_match *match = NULL;
    uint32_t *own = kvf_convert_sets(ours, plan->options.convert);
    uint32_t *theirs = kvf_convert_sets(remote->model, plan->options.convert);
    kvf_status status =
        own && theirs ? kvf_match_build(ours, own, remote->model, theirs, &match) : kvf_nomem("a plan");
    kvf_free(own);
    kvf_free(theirs);
    for (uint32_t g = 0; !status && g < kvf_model_group_count(ours); g++) {
        kvf_range wanted = kvf_plan_wanted_layers(plan, g);
        if (wanted.begin == wanted.end)
            continue;
        status = kvf_match_check(match, g, wanted);
    }
    if (status)
        status = kvf_fail_in(status, "local and %s: ", kvf_engine_name(remote));
    else
        status = kvf_engine_adapt(remote, match, &plan->adapted);
    kvf_match_free(match);
    plan->remote = plan->adapted;
    return status;
}

kvf_range kvf_plan_wanted_layers(const kvf_plan *plan, uint32_t group) {
    kvf_range held = plan->local->group_layers[group], asked = plan->options.layers;
    if (!plan->asked[group])
        return (kvf_range){held.begin, held.begin};
    if (asked.begin == asked.end)
        return held;
    asked = kvf_held_layers(kvf_model_group(plan->local->model, group), asked);
    uint32_t begin = held.begin > asked.begin ? held.begin : asked.begin;
    uint32_t end = held.end < asked.end ? held.end : asked.end;
    return (kvf_range){begin, end > begin ? end : begin};
}

/* The first cut whose elements have different types on the two sides; NULL: none. */
static const kvf_plan_cut *first_converted(const kvf_plan *plan) {
    for (uint32_t i = 0; i < plan->cut_count; i++) {
        const kvf_plan_cut *cut = &plan->cuts[i];
        if (kvf_model_group(plan->local->model, cut->group)->parts[cut->part].dtype !=
            kvf_model_group(plan->remote->model, cut->group)->parts[cut->part].dtype)
            return cut;
    }
    return NULL;
}

static kvf_status make_plan(const kvf_shard *local, const kvf_engine *remote, const kvf_plan_options *options,
                            bool with_rules, kvf_plan **out) {
    kvf_status status = check_arguments(local, remote, out);
    if (status)
        return status;
    kvf_plan *plan = kvf_alloc0(1, sizeof *plan);
    if (!plan)
        return kvf_nomem("a plan");
    plan->local = local;
    status = kvf_take_options(&plan->options, sizeof plan->options, options, "kvf_plan_options");
    if (!status)
        status = check_options(plan);
    if (!status)
        status = take_groups(plan);
    if (!status)
        status = meet(plan, remote);
    if (!status)
        status = kvf_plan_cover(plan);
    plan->converts = !status && first_converted(plan);
    if (!status && with_rules)
        status = kvf_plan_fuse(plan);
    if (status) {
        kvf_plan_free(plan);
        return status;
    }
    *out = plan;
    return KVF_OK;
}

kvf_status kvf_plan_build(const kvf_shard *local, const kvf_engine *remote, const kvf_plan_options *options,
                          kvf_plan **out) {
    return make_plan(local, remote, options, true, out);
}

kvf_status kvf_plan_build_cover(const kvf_shard *local, const kvf_engine *remote,
                                const kvf_plan_options *options, kvf_plan **out) {
    return make_plan(local, remote, options, false, out);
}

void kvf_plan_free(kvf_plan *plan) {
    if (!plan)
        return;
    kvf_free(plan->source_ranks);
    kvf_free(plan->source_rules);
    kvf_free(plan->cuts);
    kvf_free(plan->rules);
    kvf_free(plan->rule_walks);
    kvf_free(plan->lanes);
    kvf_free(plan->walks);
    kvf_free(plan->asked);
    kvf_engine_free(plan->adapted);
    kvf_free(plan);
}

const kvf_shard *kvf_plan_local(const kvf_plan *plan) {
    return plan->local;
}

const kvf_engine *kvf_plan_remote(const kvf_plan *plan) {
    return plan->given;
}

bool kvf_plan_converts(const kvf_plan *plan) {
    return plan->converts;
}

kvf_dtype kvf_plan_stream_type(const kvf_plan *plan, uint32_t group, uint32_t part) {
    const kvf_dtype local = kvf_model_group(plan->local->model, group)->parts[part].dtype;
    const kvf_dtype remote = kvf_model_group(plan->remote->model, group)->parts[part].dtype;
    return kvf_dtype_bits(remote) < kvf_dtype_bits(local) ? remote : local;
}

uint64_t kvf_plan_step_bytes(const kvf_plan *plan, const kvf_plan_cut *cut) {
    kvf_part_desc part = kvf_model_group(plan->local->model, cut->group)->parts[cut->part];
    part.dtype = kvf_plan_stream_type(plan, cut->group, cut->part);
    return kvf_part_cell_bytes(&part) * part.rows_per_step * (cut->units.end - cut->units.begin) *
           (cut->layers.end - cut->layers.begin);
}

uint32_t kvf_plan_walk_of(const kvf_plan *plan, const kvf_plan_cut *cut) {
    uint32_t walk = 0;
    while (plan->walks[walk].group != cut->group || plan->walks[walk].remote.share.index != cut->tokens.index)
        walk++;
    return walk;
}

kvf_status kvf_plan_check_runs(const kvf_plan *plan) {
    const kvf_plan_cut *cut = first_converted(plan);
    if (!cut)
        return KVF_OK;
    const kvf_group_desc *group = kvf_model_group(plan->local->model, cut->group);
    return kvf_fail(KVF_E_UNSUPPORTED,
                    "%s.%s is %s locally and %s remotely: converted elements go packed, so they have no runs",
                    group->name, group->parts[cut->part].name, kvf_dtype_name(group->parts[cut->part].dtype),
                    kvf_dtype_name(kvf_model_group(plan->remote->model, cut->group)->parts[cut->part].dtype));
}

size_t kvf_plan_memory_bytes(const kvf_plan *plan) {
    return sizeof *plan + plan->source_count * (sizeof *plan->source_ranks + sizeof *plan->source_rules) +
           plan->cut_count * sizeof *plan->cuts +
           plan->rule_count * (sizeof *plan->rules + sizeof *plan->rule_walks) +
           plan->lane_count * sizeof *plan->lanes + plan->walk_count * sizeof *plan->walks +
           (plan->adapted ? (size_t)kvf_engine_memory_bytes(plan->adapted) : 0);
}

uint32_t kvf_plan_source_count(const kvf_plan *plan) {
    return plan->source_count;
}

uint32_t kvf_plan_source_rank(const kvf_plan *plan, uint32_t source) {
    return source < plan->source_count ? plan->source_ranks[source] : UINT32_MAX;
}

uint32_t kvf_plan_cut_count(const kvf_plan *plan) {
    return plan->cut_count;
}

const kvf_plan_cut *kvf_plan_get_cut(const kvf_plan *plan, uint32_t i) {
    return i < plan->cut_count ? &plan->cuts[i] : NULL;
}

uint32_t kvf_plan_rule_count(const kvf_plan *plan) {
    return plan->rule_count;
}

const kvf_copy_rule *kvf_plan_get_rule(const kvf_plan *plan, uint32_t i) {
    return i < plan->rule_count ? &plan->rules[i] : NULL;
}

kvf_range kvf_plan_source_rules(const kvf_plan *plan, uint32_t source) {
    return source < plan->source_count ? plan->source_rules[source] : (kvf_range){0, 0};
}
