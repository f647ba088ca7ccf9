/*
 * A shard in terms of another model. Its memory does not change, only the numbers of groups, parts and layers by which
 * its cells are named.
 */
#include "shard/shard.h"

/* What one rank holds of a group that is the same in both models, except perhaps for types. */
static kvf_status adapt_group(const kvf_shard *shard, const kvf_match *match, uint32_t g,
                              kvf_group_shard_desc *out, kvf_range *layers) {
    const kvf_match_group *m = &match->groups[g];
    const kvf_group_shard_desc *held = &shard->desc.groups[m->theirs];
    const uint32_t parts = kvf_model_group(match->ours, g)->part_count;
    const uint32_t their_parts = kvf_model_group(match->theirs, m->theirs)->part_count;
    kvf_range theirs = shard->group_layers[m->theirs];
    uint32_t begin = theirs.begin > m->first_theirs ? theirs.begin : m->first_theirs;
    uint32_t end = m->first_theirs + (m->layers.end - m->layers.begin);
    end = theirs.end < end ? theirs.end : end;
    uint32_t count = end > begin ? end - begin : 0;
    kvf_part_share *shares = kvf_alloc(parts, sizeof *shares);
    kvf_placement *placements = kvf_alloc((size_t)count * parts, sizeof *placements);
    *out = *held;
    out->parts = shares;
    out->placements = placements;
    if (!shares || !placements)
        return kvf_nomem("a shard");
    *layers = (kvf_range){0, 0};
    if (count) {
        layers->begin = m->layers.begin + (begin - m->first_theirs);
        layers->end = layers->begin + count;
    }
    for (uint32_t p = 0; p < parts; p++) {
        shares[p] = held->parts[m->parts[p]];
        for (uint32_t i = 0; i < count; i++)
            placements[(size_t)i * parts + p] =
                held->placements[(size_t)(begin - theirs.begin + i) * their_parts + m->parts[p]];
    }
    return KVF_OK;
}

static kvf_status leave_out(const kvf_group_desc *group, kvf_group_shard_desc *out, kvf_range *layers) {
    kvf_part_share *none = kvf_alloc0(group->part_count, sizeof *none);
    kvf_placement *placements = kvf_alloc0(1, sizeof *placements);
    *out = (kvf_group_shard_desc){.tokens_per_block = group->tokens_per_step,
                                  .block_count = 1,
                                  .parts = none,
                                  .placements = placements};
    *layers = (kvf_range){0, 0};
    return none && placements ? KVF_OK : kvf_nomem("a shard");
}

kvf_status kvf_shard_adapt(const kvf_shard *shard, const kvf_match *match, kvf_shard **out) {
    uint32_t groups = match->our_count, all = kvf_model_layer_count(match->ours);
    kvf_group_shard_desc *descs = kvf_alloc0(groups, sizeof *descs);
    kvf_range *layers = kvf_alloc0(groups, sizeof *layers);
    kvf_status status = descs && layers ? KVF_OK : kvf_nomem("a shard");
    for (uint32_t g = 0; g < groups && !status; g++)
        status =
            match->groups[g].agreement == KVF_AGREE_SAME || match->groups[g].agreement == KVF_AGREE_CONVERT
                ? adapt_group(shard, match, g, &descs[g], &layers[g])
                : leave_out(kvf_model_group(match->ours, g), &descs[g], &layers[g]);
    kvf_shard_desc desc = shard->desc;
    desc.groups = descs;
    desc.layers.begin = desc.layers.begin < all ? desc.layers.begin : all;
    desc.layers.end = desc.layers.end < all ? desc.layers.end : all;
    if (!status)
        status = kvf_shard_make(match->retyped, &desc, layers, NULL, out);
    for (uint32_t g = 0; descs && g < groups; g++) {
        kvf_free((void *)descs[g].parts);
        kvf_free((void *)descs[g].placements);
    }
    kvf_free(descs);
    kvf_free(layers);
    return status;
}

kvf_status kvf_engine_adapt(const kvf_engine *engine, const kvf_match *match, kvf_engine **out) {
    kvf_shard **shards = kvf_alloc0(engine->shard_count, sizeof *shards);
    kvf_status status = shards ? KVF_OK : kvf_nomem("an engine");
    for (uint32_t i = 0; i < engine->shard_count && !status; i++)
        status = kvf_shard_adapt(engine->shards[i], match, &shards[i]);
    if (!status)
        status = kvf_engine_from_shards(match->retyped, engine->name, shards, engine->shard_count, out);
    for (uint32_t i = 0; status && shards && i < engine->shard_count; i++)
        kvf_shard_free(shards[i]);
    kvf_free(shards);
    return status;
}
