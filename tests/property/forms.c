#include "forms.h"

#include <string.h>

void fill_model_form(const world *w, uint32_t side, model_form *out) {
    static const char *const group_names[MAX_GROUPS] = {"g0", "g1", "g2", "g3"};
    static const char *const part_names[MAX_PARTS] = {"p0", "p1", "p2", "p3"};
    const model_world *model = &w->models[side];
    *out = (model_form){.desc = {.struct_size = sizeof out->desc,
                                 .name = "random",
                                 .layer_count = model->layer_count,
                                 .groups = out->groups,
                                 .group_count = model->group_count}};
    for (uint32_t i = 0; i < model->group_count; i++) {
        uint32_t g = model->group_order[i];
        const group_recipe *group = &model->groups[g];
        out->groups[i] = (kvf_group_desc){.name = group_names[g],
                                          .kind = group->is_state ? KVF_GROUP_STATE : KVF_GROUP_TOKENS,
                                          .window_tokens = group->window,
                                          .chunk_tokens = group->chunk,
                                          .tokens_per_step = group->step_tokens,
                                          .layers = model->layers[g],
                                          .layer_count = model->layer_counts[g],
                                          .parts = out->parts[i],
                                          .part_count = group->part_count};
        uint32_t tensor = 0;
        for (uint32_t k = 0; k < group->part_count; k++) {
            uint32_t p = model->part_order[g][k];
            const part_recipe *part = &group->parts[p];
            tensor += k > 0 && part->new_tensor;
            out->parts[i][k] = (kvf_part_desc){.name = part_names[p],
                                               .dtype = (kvf_dtype)part->dtype,
                                               .units = part->units,
                                               .granule_units = part->granule,
                                               .cell_elements = part->cell_elements,
                                               .rows_per_step = part->rows,
                                               .tensor = tensor,
                                               .tp_rule = part->replicate ? KVF_TP_REPLICATE : KVF_TP_SPLIT};
        }
    }
}

static kvf_group_spec group_spec(const recipe *r, const world *w, uint32_t side, uint32_t group,
                                 engine_form *out) {
    const layout_recipe *layout = &r->engines[side].layouts[layout_of(r, side, group)];
    memcpy(out->orders[group], w->engines[side].orders[group], ORDER_TEXT);
    const uint32_t each = r->engines[side].per_group ? step_tokens_of(&w->models[side].groups[group]) : 1;
    return (kvf_group_spec){.tokens_per_block = layout->tokens * each,
                            .kernel_blocks_per_block = layout->kernel_blocks,
                            .block_count = w->engines[side].block_count[group],
                            .order = layout->order ? out->orders[group] : NULL,
                            .page_bytes = w->engines[side].page_bytes[group],
                            .page_align = layout->page_align};
}

void fill_engine_form(const recipe *r, const world *w, uint32_t side, engine_form *out) {
    const engine_recipe *engine = &r->engines[side];
    memset(out, 0, sizeof *out);
    out->spec = (kvf_engine_spec){.struct_size = sizeof out->spec,
                                  .name = side == LOCAL ? "local" : "remote",
                                  .tp_size = engine->tp,
                                  .pp_size = engine->pp,
                                  .pp_layers = engine->uneven ? engine->stages : NULL,
                                  .dcp_size = engine->dcp,
                                  .dcp_width = engine->width,
                                  .share_pages = engine->share_pages};
    const model_world *model = &w->models[side];
    for (uint32_t i = 0; i < model->group_count; i++) {
        uint32_t g = model->group_order[i];
        out->groups[i] = group_spec(r, w, side, g, out);
        if (r->groups[g].is_state)
            out->spec.state = out->groups[i];
        else
            out->spec.all = out->groups[i];
    }
    if (engine->per_group) {
        memset(&out->spec.all, 0, sizeof out->spec.all);
        memset(&out->spec.state, 0, sizeof out->spec.state);
        out->spec.groups = out->groups;
    }
}

void fill_shard_form(const world *w, uint32_t side, uint32_t rank, shard_form *out) {
    const engine_world *e = &w->engines[side];
    const rank_world *own = &e->ranks[rank];
    *out = (shard_form){.desc = {.struct_size = sizeof out->desc,
                                 .rank = rank,
                                 .layers = {own->layers_begin, own->layers_end},
                                 .region_bytes = out->region_bytes,
                                 .region_count = own->region_count,
                                 .groups = out->groups}};
    for (uint32_t region = 0; region < own->region_count; region++)
        out->region_bytes[region] = own->region_bytes[region];
    const model_world *model = &w->models[side];
    for (uint32_t i = 0; i < model->group_count; i++) {
        uint32_t g = model->group_order[i];
        const uint32_t *parts = model->part_order[g], part_count = model->groups[g].part_count;
        const rank_group *held = &own->groups[g];
        const uint32_t each = step_tokens_of(&w->models[side].groups[g]);
        out->groups[i] =
            (kvf_group_shard_desc){.tokens_per_block = e->tokens[g] * each,
                                   .kernel_blocks_per_block = e->kernel_blocks[g],
                                   .block_count = held->block_count,
                                   .tokens = {held->share_index, held->share_count, held->share_width * each},
                                   .parts = out->shares[i],
                                   .placements = out->placements[i]};
        uint32_t n = 0;
        for (uint32_t k = 0; k < part_count; k++) {
            const rank_part *part = &held->parts[parts[k]];
            out->shares[i][k] =
                (kvf_part_share){{part->units_begin, part->units_end}, part->replica, part->replica_count};
        }
        for (uint32_t layer = 0; layer < layers_of(held); layer++) {
            for (uint32_t k = 0; k < part_count; k++) {
                const rank_part *part = &held->parts[parts[k]];
                const strides *s = &part->placements[layer];
                out->placements[i][n++] =
                    (kvf_placement){s->region, s->offset, s->block, s->row, s->unit, s->piece, part->pieces};
            }
        }
    }
}

void fill_request_form(const world *w, const asked *ask, kvf_group_request out[MAX_GROUPS]) {
    for (uint32_t i = 0; i < w->models[LOCAL].group_count; i++) {
        uint32_t g = w->models[LOCAL].group_order[i];
        const group_tables *tables = &w->tables[g];
        const table_world *local = &tables->side[LOCAL], *remote = &tables->side[REMOTE];
        out[i] = (kvf_group_request){.local = {local->ids, local->count, local->first_block},
                                     .remote = {remote->ids, remote->count, remote->first_block},
                                     .begin = ask->groups[g] ? tables->begin : tables->end,
                                     .end = tables->end};
    }
}
