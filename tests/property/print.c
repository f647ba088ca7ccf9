/*
 * Prints a case as C: the declarations of a unit test, before it calls the library.
 */
#include "forms.h"

static const char *const dtypes[] = {"INVALID", "F64", "F32", "F16",     "BF16", "F8_E4M3",
                                     "F8_E5M2", "I8",  "U8",  "F4_E2M1", "I4"};

static void print_ids(FILE *to, const char *side, const char *name, uint32_t group, const uint32_t *ids,
                      uint32_t count) {
    fprintf(to, "static const uint32_t %s_%s_%u[] = {", side, name, group);
    for (uint32_t i = 0; i < count; i++)
        fprintf(to, ids[i] == NO_ID ? "%sKVF_NO_BLOCK" : "%s%u", i ? ", " : "", ids[i]);
    fprintf(to, count ? "};\n" : "0}; /* none */\n");
}

static void print_model(FILE *to, const char *side, const model_form *m) {
    for (uint32_t g = 0; g < m->desc.group_count; g++) {
        const kvf_group_desc *group = &m->groups[g];
        print_ids(to, side, "layers", g, group->layers, group->layer_count);
        fprintf(to, "static const kvf_part_desc %s_parts_%u[] = {\n", side, g);
        for (uint32_t p = 0; p < group->part_count; p++) {
            const kvf_part_desc *part = &group->parts[p];
            fprintf(to,
                    "    {.name = \"%s\", .dtype = KVF_DTYPE_%s, .units = %u, .granule_units = %u, "
                    ".cell_elements = %u, .rows_per_step = %u, .tensor = %u, .tp_rule = %s},\n",
                    part->name, dtypes[part->dtype], part->units, part->granule_units, part->cell_elements,
                    part->rows_per_step, part->tensor,
                    part->tp_rule == KVF_TP_REPLICATE ? "KVF_TP_REPLICATE" : "KVF_TP_SPLIT");
        }
        fprintf(to, "};\n");
    }
    fprintf(to, "static const kvf_group_desc %s_model_groups[] = {\n", side);
    for (uint32_t g = 0; g < m->desc.group_count; g++) {
        const kvf_group_desc *group = &m->groups[g];
        fprintf(to,
                "    {.name = \"%s\", .kind = %s, .window_tokens = %u, .chunk_tokens = %u, .tokens_per_step "
                "= %u, .layers = "
                "%s_layers_%u, "
                ".layer_count = %u, .parts = %s_parts_%u, .part_count = %u},\n",
                group->name, group->kind == KVF_GROUP_STATE ? "KVF_GROUP_STATE" : "KVF_GROUP_TOKENS",
                group->window_tokens, group->chunk_tokens, group->tokens_per_step, side, g,
                group->layer_count, side, g, group->part_count);
    }
    fprintf(to,
            "};\nstatic const kvf_model_desc %s_model = {.struct_size = sizeof %s_model, .layer_count = %u, "
            ".groups = %s_model_groups, .group_count = %u};\n",
            side, side, m->desc.layer_count, side, m->desc.group_count);
}

static void print_group_spec(FILE *to, const kvf_group_spec *spec) {
    fprintf(to,
            "{.tokens_per_block = %u, .kernel_blocks_per_block = %u, .block_count = %llu, .order = %s%s%s, "
            ".page_bytes = %llu, .page_align = %llu}",
            spec->tokens_per_block, spec->kernel_blocks_per_block, (unsigned long long)spec->block_count,
            spec->order ? "\"" : "", spec->order ? spec->order : "NULL", spec->order ? "\"" : "",
            (unsigned long long)spec->page_bytes, (unsigned long long)spec->page_align);
}

static void print_engine(FILE *to, const recipe *r, const world *w, uint32_t side) {
    const char *name = side == LOCAL ? "local" : "remote";
    engine_form form;
    fill_engine_form(r, w, side, &form);
    const kvf_engine_spec *spec = &form.spec;
    if (spec->pp_layers) {
        fprintf(to, "static const uint32_t %s_stages[] = {", name);
        for (uint32_t i = 0; i < spec->pp_size; i++)
            fprintf(to, "%s%u", i ? ", " : "", spec->pp_layers[i]);
        fprintf(to, "};\n");
    }
    if (spec->groups) {
        fprintf(to, "static const kvf_group_spec %s_groups[] = {\n", name);
        for (uint32_t g = 0; g < w->models[side].group_count; g++) {
            fprintf(to, "    ");
            print_group_spec(to, &spec->groups[g]);
            fprintf(to, ",\n");
        }
        fprintf(to, "};\n");
    }
    fprintf(to,
            "static const kvf_engine_spec %s_spec = {.struct_size = sizeof %s_spec, .tp_size = %u, .pp_size "
            "= %u, ",
            name, name, spec->tp_size, spec->pp_size);
    if (spec->pp_layers)
        fprintf(to, ".pp_layers = %s_stages, ", name);
    fprintf(to, ".dcp_size = %u, .dcp_width = %u, .share_pages = %s,\n    ", spec->dcp_size, spec->dcp_width,
            spec->share_pages ? "true" : "false");
    if (spec->groups) {
        fprintf(to, ".groups = %s_groups};\n", name);
        return;
    }
    fprintf(to, ".all = ");
    print_group_spec(to, &spec->all);
    fprintf(to, ",\n    .state = ");
    print_group_spec(to, &spec->state);
    fprintf(to, "};\n");
}

static void print_shard_group(FILE *to, const shard_form *form, const char *name, uint32_t g, uint32_t parts,
                              uint32_t placements) {
    fprintf(to, "static const kvf_part_share %s_shares_%u[] = {", name, g);
    for (uint32_t p = 0; p < parts; p++)
        fprintf(to, "%s{{%u, %u}, %u, %u}", p ? ", " : "", form->shares[g][p].units.begin,
                form->shares[g][p].units.end, form->shares[g][p].replica, form->shares[g][p].replica_count);
    fprintf(to, "};\nstatic const kvf_placement %s_placements_%u[] = {%s", name, g, placements ? "" : "{0}");
    for (uint32_t i = 0; i < placements; i++) {
        const kvf_placement *s = &form->placements[g][i];
        fprintf(to, "%s{%u, %llu, %llu, %llu, %llu, %llu, %u}", i ? ", " : "", s->region,
                (unsigned long long)s->offset, (unsigned long long)s->block_stride,
                (unsigned long long)s->row_stride, (unsigned long long)s->unit_stride,
                (unsigned long long)s->piece_stride, s->pieces);
    }
    fprintf(to, "};\n");
}

static void print_shard(FILE *to, const world *w, uint32_t side, uint32_t rank) {
    static shard_form form;
    const model_world *model = &w->models[side];
    fill_shard_form(w, side, rank, &form);
    char name[32];
    (void)snprintf(name, sizeof name, "%s%u", side == LOCAL ? "local" : "remote", rank);
    for (uint32_t i = 0; i < model->group_count; i++) {
        uint32_t g = model->group_order[i], parts = model->groups[g].part_count;
        print_shard_group(to, &form, name, i, parts,
                          layers_of(&w->engines[side].ranks[rank].groups[g]) * parts);
    }
    fprintf(to, "static const uint64_t %s_regions[] = {", name);
    for (uint32_t i = 0; i < form.desc.region_count; i++)
        fprintf(to, "%s%llu", i ? ", " : "", (unsigned long long)form.region_bytes[i]);
    fprintf(to, "};\nstatic const kvf_group_shard_desc %s_groups[] = {\n", name);
    for (uint32_t g = 0; g < model->group_count; g++) {
        const kvf_group_shard_desc *group = &form.groups[g];
        fprintf(to, "    {%u, %u, %llu, {%u, %u, %u}, %s_shares_%u, %s_placements_%u},\n",
                group->tokens_per_block, group->kernel_blocks_per_block,
                (unsigned long long)group->block_count, group->tokens.index, group->tokens.count,
                group->tokens.width, name, g, name, g);
    }
    fprintf(to,
            "};\nstatic const kvf_shard_desc %s_desc = {.struct_size = sizeof %s_desc, .rank = %u, .layers = "
            "{%u, %u}, .region_bytes = %s_regions, .region_count = %u, .groups = %s_groups};\n",
            name, name, rank, form.desc.layers.begin, form.desc.layers.end, name, form.desc.region_count,
            name);
}

void recipe_print(FILE *to, const recipe *r, uint32_t local_rank) {
    static world w;
    static model_form model;
    arena_reset();
    if (!world_make(r, &w))
        return;
    for (uint32_t side = 0; side < SIDES; side++) {
        fill_model_form(&w, side, &model);
        print_model(to, side == LOCAL ? "local" : "remote", &model);
        if (!r->engines[side].by_hand)
            print_engine(to, r, &w, side);
        for (uint32_t i = 0; i < w.engines[side].rank_count && r->engines[side].by_hand; i++)
            print_shard(to, &w, side, i);
        if (w.engines[side].illegal)
            fprintf(to, "/* The %s engine must be refused: %s. */\n", side == LOCAL ? "local" : "remote",
                    w.engines[side].illegal);
    }
    if (w.engines[LOCAL].illegal || w.engines[REMOTE].illegal)
        return;
    kvf_group_request request[MAX_GROUPS];
    asked all = ask_all(r, &w);
    fill_request_form(&w, &all, request);
    const uint32_t groups = w.models[LOCAL].group_count;
    for (uint32_t g = 0; g < groups; g++) {
        print_ids(to, "local", "ids", g, request[g].local.ids, request[g].local.count);
        print_ids(to, "remote", "ids", g, request[g].remote.ids, request[g].remote.count);
    }
    fprintf(to, "static const kvf_group_request request[] = {\n");
    for (uint32_t g = 0; g < groups; g++)
        fprintf(to,
                "    {.local = {local_ids_%u, %u, %u}, .remote = {remote_ids_%u, %u, %u}, .begin = %llu, "
                ".end = %llu},\n",
                g, request[g].local.count, request[g].local.first_block, g, request[g].remote.count,
                request[g].remote.first_block, (unsigned long long)request[g].begin,
                (unsigned long long)request[g].end);
    fprintf(to,
            "};\nstatic const kvf_plan_options options = {.struct_size = sizeof options, .replicas = %s, "
            ".layers = {%u, %u}};\n/* local rank %u */\n",
            r->first_replica ? "KVF_REPLICA_FIRST" : "KVF_REPLICA_SPREAD", all.layers_begin, all.layers_end,
            local_rank);
    if (r->fault)
        fprintf(to, "/* a second request: fault %u in group %u, %s side, at %u */\n", r->fault,
                r->fault_group, r->fault_side == LOCAL ? "local" : "remote", r->fault_at);
}
