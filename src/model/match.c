#include "model/match.h"

/* ---- words ----------------------------------------------------------------------------------- */

/* The differences in one group, in words. */
typedef struct differences {
    kvf_text text;
    uint32_t count;
} differences;

static void next(differences *d) {
    kvf_text_add(&d->text, d->count++ ? "; " : "");
}

static void differ(differences *d, const char *group, const char *part, const char *field, const char *ours,
                   const char *theirs) {
    next(d);
    kvf_text_add(&d->text, "%s%s%s.%s is \"%s\" locally and \"%s\" remotely", group, part[0] ? "." : "", part,
                 field, ours, theirs);
}

static void differ_number(differences *d, const char *group, const char *part, const char *field,
                          uint32_t ours, uint32_t theirs) {
    if (ours == theirs)
        return;
    next(d);
    kvf_text_add(&d->text, "%s%s%s.%s is \"%u\" locally and \"%u\" remotely", group, part[0] ? "." : "", part,
                 field, ours, theirs);
}

static void missing(differences *d, const char *group, const char *what, bool here) {
    next(d);
    kvf_text_add(&d->text, "%s.%s is missing %s", group, what, here ? "locally" : "remotely");
}

/* ---- parts and layers ------------------------------------------------------------------------ */

static uint32_t find_part(const kvf_group_desc *group, const char *name) {
    for (uint32_t p = 0; p < group->part_count; p++)
        if (strcmp(group->parts[p].name, name) == 0)
            return p;
    return UINT32_MAX;
}

static uint32_t find_group(const kvf_model *model, const char *name) {
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++)
        if (strcmp(kvf_model_group(model, g)->name, name) == 0)
            return g;
    return KVF_NO_GROUP;
}

static bool is_in(uint32_t set, kvf_dtype dtype) {
    return set >> dtype & 1;
}

static bool converts(kvf_dtype a, kvf_dtype b) {
    return is_in(KVF_CONVERTED_DTYPES, a) && is_in(KVF_CONVERTED_DTYPES, b);
}

/* Compares two parts; differing types that can be converted go into `conversions`, all other differences into `d`. */
static void compare_part(const kvf_group_desc *group, const kvf_part_desc *ours, const kvf_part_desc *theirs,
                         differences *d, differences *conversions) {
    if (ours->dtype != theirs->dtype)
        differ(converts(ours->dtype, theirs->dtype) ? conversions : d, group->name, ours->name, "dtype",
               kvf_dtype_name(ours->dtype), kvf_dtype_name(theirs->dtype));
    differ_number(d, group->name, ours->name, "units", ours->units, theirs->units);
    differ_number(d, group->name, ours->name, "cell_elements", ours->cell_elements, theirs->cell_elements);
    differ_number(d, group->name, ours->name, "rows_per_step", ours->rows_per_step, theirs->rows_per_step);
}

static kvf_status compare_parts(kvf_match_group *m, const kvf_group_desc *ours, const kvf_group_desc *theirs,
                                uint32_t convert, differences *d, differences *conversions, bool *allowed) {
    *allowed = true;
    m->parts = kvf_alloc(ours->part_count, sizeof *m->parts);
    if (!m->parts)
        return kvf_nomem("a comparison of models");
    for (uint32_t p = 0; p < ours->part_count; p++) {
        m->parts[p] = find_part(theirs, ours->parts[p].name);
        if (m->parts[p] == UINT32_MAX)
            missing(d, ours->name, ours->parts[p].name, false);
        else
            compare_part(ours, &ours->parts[p], &theirs->parts[m->parts[p]], d, conversions);
        if (m->parts[p] == UINT32_MAX || ours->parts[p].dtype == theirs->parts[m->parts[p]].dtype)
            continue;
        *allowed = *allowed && is_in(convert, ours->parts[p].dtype) &&
                   is_in(convert, theirs->parts[m->parts[p]].dtype);
    }
    for (uint32_t p = 0; p < theirs->part_count; p++)
        if (find_part(ours, theirs->parts[p].name) == UINT32_MAX)
            missing(d, ours->name, theirs->parts[p].name, true);
    return KVF_OK;
}

/* Layers as "3-5,9". */
typedef struct layer_list {
    kvf_text text;
    uint32_t count;
    uint32_t first, last; /* of the range that is being added to */
} layer_list;

static void end_range(layer_list *list) {
    if (list->count && list->last > list->first)
        kvf_text_add(&list->text, "-%u", list->last);
}

static void add_layer(layer_list *list, uint32_t layer) {
    if (!list->count || layer != list->last + 1) {
        end_range(list);
        kvf_text_add(&list->text, list->count ? ",%u" : "%u", layer);
        list->first = layer;
    }
    list->last = layer;
    list->count++;
}

static void tell_layers(layer_list *list, const char *group, bool here, differences *told) {
    end_range(list);
    if (list->count) {
        next(told);
        kvf_text_add(&told->text, "%s.layers %s are missing %s", group,
                     list->text.data ? list->text.data : "", here ? "locally" : "remotely");
    }
    told->text.failed = told->text.failed || list->text.failed;
    kvf_text_free(&list->text);
}

/* Finds the layers that both groups have. They must lie side by side in both groups, so that ranges stay ranges. */
static void compare_layers(kvf_match_group *m, const kvf_group_desc *ours, const kvf_group_desc *theirs,
                           differences *d, differences *told) {
    layer_list not_there = {0}, not_here = {0};
    bool apart = false;
    for (uint32_t i = 0, j = 0; i < ours->layer_count || j < theirs->layer_count;) {
        bool own =
            i < ours->layer_count && (j == theirs->layer_count || ours->layers[i] <= theirs->layers[j]);
        bool other =
            j < theirs->layer_count && (i == ours->layer_count || theirs->layers[j] <= ours->layers[i]);
        if (own && other && m->layers_both++ == 0) {
            m->layers = (kvf_range){i, i + 1};
            m->first_theirs = j;
        } else if (own && other) {
            apart = apart || m->layers.end != i || m->first_theirs + (i - m->layers.begin) != j;
            m->layers.end = i + 1;
        } else if (own) {
            add_layer(&not_there, ours->layers[i]);
        } else {
            add_layer(&not_here, theirs->layers[j]);
        }
        i += own;
        j += other;
    }
    m->layers_ours = not_there.count;
    m->layers_theirs = not_here.count;
    tell_layers(&not_there, ours->name, false, told);
    tell_layers(&not_here, ours->name, true, told);
    if (m->layers_both == 0 || apart) {
        next(d);
        kvf_text_add(&d->text, "%s: %s", ours->name,
                     apart ? "the layers in common are not contiguous" : "no layers are in common");
    }
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* Appends the text of `from` to `to`. */
static void append(differences *to, differences *from) {
    if (from->count) {
        next(to);
        kvf_text_add(&to->text, "%s", from->text.data ? from->text.data : "");
    }
    to->text.failed = to->text.failed || from->text.failed;
    kvf_text_free(&from->text);
}

static kvf_status keep_detail(kvf_match_group *m, differences *d) {
    m->detail = d->text.failed ? NULL : kvf_strdup(d->text.data ? d->text.data : "");
    kvf_text_free(&d->text);
    return m->detail ? KVF_OK : kvf_nomem("a comparison of models");
}

static kvf_status compare_groups(const kvf_match *match, kvf_match_group *m, uint32_t convert) {
    const kvf_group_desc *ours = kvf_model_group(match->ours, m->ours);
    const kvf_group_desc *theirs = kvf_model_group(match->theirs, m->theirs);
    differences d = {0}, conversions = {0}, layers = {0};
    if (ours->kind != theirs->kind)
        differ(&d, ours->name, "", "kind", kvf_group_kind_name(ours->kind),
               kvf_group_kind_name(theirs->kind));
    differ_number(&d, ours->name, "", "window_tokens", ours->window_tokens, theirs->window_tokens);
    differ_number(&d, ours->name, "", "chunk_tokens", ours->chunk_tokens, theirs->chunk_tokens);
    differ_number(&d, ours->name, "", "tokens_per_step", ours->tokens_per_step, theirs->tokens_per_step);
    bool allowed = true;
    kvf_status status = compare_parts(m, ours, theirs, convert, &d, &conversions, &allowed);
    compare_layers(m, ours, theirs, &d, &layers);
    m->only_types = !d.count && conversions.count && !allowed;
    m->agreement = d.count || m->only_types ? KVF_AGREE_DIFFER
                   : conversions.count      ? KVF_AGREE_CONVERT
                                            : KVF_AGREE_SAME;
    append(&d, &conversions);
    append(&d, &layers);
    kvf_status noted = keep_detail(m, &d);
    return status ? status : noted;
}

static kvf_status only_one(kvf_match_group *m, const kvf_group_desc *group, bool here) {
    differences d = {0};
    next(&d);
    kvf_text_add(&d.text, "group %s is missing %s", group->name, here ? "locally" : "remotely");
    m->agreement = KVF_AGREE_MISSING;
    *(here ? &m->layers_theirs : &m->layers_ours) = group->layer_count;
    return keep_detail(m, &d);
}

/* The types that both sides allow to be converted into each other. */
static uint32_t both_convert(const uint32_t *ours, uint32_t g, const uint32_t *theirs, uint32_t h) {
    return ours && theirs ? ours[g] & theirs[h] & KVF_CONVERTED_DTYPES : 0;
}

static kvf_status fill(kvf_match *match, const uint32_t *our_convert, const uint32_t *their_convert) {
    kvf_status status = KVF_OK;
    for (uint32_t g = 0; g < match->our_count && !status; g++) {
        const kvf_group_desc *group = kvf_model_group(match->ours, g);
        kvf_match_group *m = &match->groups[match->count++];
        *m = (kvf_match_group){
            .name = group->name, .ours = g, .theirs = find_group(match->theirs, group->name)};
        status = m->theirs == KVF_NO_GROUP
                     ? only_one(m, group, false)
                     : compare_groups(match, m, both_convert(our_convert, g, their_convert, m->theirs));
    }
    for (uint32_t g = 0; g < kvf_model_group_count(match->theirs) && !status; g++) {
        const kvf_group_desc *group = kvf_model_group(match->theirs, g);
        if (find_group(match->ours, group->name) != KVF_NO_GROUP)
            continue;
        kvf_match_group *m = &match->groups[match->count++];
        *m = (kvf_match_group){.name = group->name, .ours = KVF_NO_GROUP, .theirs = g};
        status = only_one(m, group, true);
    }
    return status;
}

/* Makes our model with their types in groups that are converted. */
static kvf_status retype(kvf_match *match) {
    bool any = false;
    uint32_t at = 0;
    for (uint32_t g = 0; g < match->our_count; g++)
        any = any || match->groups[g].agreement == KVF_AGREE_CONVERT;
    if (!any) {
        match->retyped = kvf_model_retain(match->ours);
        return KVF_OK;
    }
    kvf_dtype *types = kvf_alloc(kvf_model_part_count(match->ours), sizeof *types);
    if (!types)
        return kvf_nomem("a comparison of models");
    for (uint32_t g = 0; g < match->our_count; g++) {
        const kvf_match_group *m = &match->groups[g];
        const kvf_group_desc *group = kvf_model_group(match->ours, g);
        for (uint32_t p = 0; p < group->part_count; p++)
            types[at++] = m->agreement == KVF_AGREE_CONVERT
                              ? kvf_model_group(match->theirs, m->theirs)->parts[m->parts[p]].dtype
                              : group->parts[p].dtype;
    }
    kvf_status status = kvf_model_retype(match->ours, types, &match->retyped);
    kvf_free(types);
    return status;
}

uint32_t *kvf_convert_sets(const kvf_model *model, uint32_t set) {
    const uint32_t count = kvf_model_group_count(model);
    uint32_t *sets = kvf_alloc(count, sizeof *sets);
    for (uint32_t g = 0; sets && g < count; g++)
        sets[g] = set;
    return sets;
}

kvf_status kvf_match_build(const kvf_model *ours, const uint32_t *our_convert, const kvf_model *theirs,
                           const uint32_t *their_convert, kvf_match **out) {
    kvf_match *match = kvf_alloc0(1, sizeof *match);
    if (!match)
        return kvf_nomem("a comparison of models");
    match->ours = kvf_model_retain(ours);
    match->theirs = kvf_model_retain(theirs);
    match->our_count = kvf_model_group_count(ours);
    match->groups =
        kvf_alloc0((size_t)match->our_count + kvf_model_group_count(theirs), sizeof *match->groups);
    kvf_status status =
        match->groups ? fill(match, our_convert, their_convert) : kvf_nomem("a comparison of models");
    if (!status)
        status = retype(match);
    if (status) {
        kvf_match_free(match);
        return status;
    }
    *out = match;
    return KVF_OK;
}

kvf_status kvf_match_reverse(const kvf_match *match, kvf_match **out) {
    uint32_t *ours = kvf_convert_sets(match->theirs, KVF_CONVERTED_DTYPES);
    uint32_t *theirs = kvf_convert_sets(match->ours, KVF_CONVERTED_DTYPES);
    kvf_status status = ours && theirs ? kvf_match_build(match->theirs, ours, match->ours, theirs, out)
                                       : kvf_nomem("a comparison of models");
    kvf_free(ours);
    kvf_free(theirs);
    for (uint32_t g = 0; !status && g < (*out)->our_count; g++) {
        kvf_match_group *m = &(*out)->groups[g];
        if (m->theirs != KVF_NO_GROUP)
            m->agreement = match->groups[m->theirs].agreement;
        if (m->theirs != KVF_NO_GROUP)
            m->only_types = match->groups[m->theirs].only_types;
    }
    if (!status) { /* from the agreements as they are now */
        kvf_model_free((*out)->retyped);
        (*out)->retyped = NULL;
        status = retype(*out);
        if (status) {
            kvf_match_free(*out);
            *out = NULL;
        }
    }
    return status;
}

void kvf_match_free(kvf_match *match) {
    if (!match)
        return;
    for (uint32_t g = 0; match->groups && g < match->count; g++) {
        kvf_free(match->groups[g].parts);
        kvf_free(match->groups[g].detail);
    }
    kvf_free(match->groups);
    kvf_model_free(match->ours);
    kvf_model_free(match->theirs);
    kvf_model_free(match->retyped);
    kvf_free(match);
}

kvf_status kvf_match_differ(kvf_match *match, uint32_t group, const char *reason) {
    kvf_match_group *m = &match->groups[group];
    differences d = {0};
    if (m->detail[0]) {
        next(&d);
        kvf_text_add(&d.text, "%s", m->detail);
    }
    next(&d);
    kvf_text_add(&d.text, "%s", reason);
    if (d.text.failed) {
        kvf_text_free(&d.text);
        return kvf_nomem("a comparison of models");
    }
    kvf_free(m->detail);
    m->detail = NULL;
    if (m->agreement != KVF_AGREE_MISSING)
        m->agreement = KVF_AGREE_DIFFER;
    m->only_types = false;
    return keep_detail(m, &d);
}

kvf_status kvf_match_check(const kvf_match *match, uint32_t group, kvf_range layers) {
    const kvf_match_group *m = &match->groups[group];
    if (m->only_types)
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "%s; types are converted only where both sides allow the conversion", m->detail);
    const bool same = m->agreement == KVF_AGREE_SAME || m->agreement == KVF_AGREE_CONVERT;
    if (!same || layers.begin < m->layers.begin || layers.end > m->layers.end)
        return kvf_fail(KVF_E_MISMATCH, "%s", m->detail);
    return KVF_OK;
}

bool kvf_match_any(const kvf_match *match) {
    for (uint32_t g = 0; g < match->our_count; g++)
        if (match->groups[g].agreement == KVF_AGREE_SAME || match->groups[g].agreement == KVF_AGREE_CONVERT)
            return true;
    return false;
}
