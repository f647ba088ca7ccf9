#include "unlike.h"

#include <stdarg.h>
#include <string.h>

/* ---- models ---------------------------------------------------------------------------------- */

/* Puts the values into their `number`-th permutation. */
static void order_by(uint32_t number, uint32_t *values, uint32_t count) {
    for (uint32_t i = 0; i + 1 < count; i++) {
        uint32_t pick = i + number % (count - i), value = values[pick];
        number /= count - i;
        memmove(values + i + 1, values + i, (pick - i) * sizeof *values);
        values[i] = value;
    }
}

static bool is_converted(uint32_t dtype) {
    return dtype >= 2 && dtype <= 6; /* f32, f16, bf16, f8_e4m3, f8_e5m2 */
}

/* The next type of whole bytes; after a type that can be converted, the next of those. */
static void next_type(part_recipe *part) {
    part->dtype = is_converted(part->dtype) ? (part->dtype - 1) % 5 + 2 : part->dtype % 8 + 1;
}

/* Changes the types of all parts if all can be converted, otherwise of the first. */
static void make_types_unlike(group_recipe *group) {
    bool all = true;
    for (uint32_t p = 0; p < group->part_count; p++)
        all = all && is_converted(group->parts[p].dtype);
    for (uint32_t p = 0; p < (all ? group->part_count : 1); p++)
        next_type(&group->parts[p]);
}

static void make_unlike(group_recipe *group, uint32_t field) {
    part_recipe *part = &group->parts[0];
    if (field == UNLIKE_DTYPE)
        make_types_unlike(group);
    else if (field == UNLIKE_CELL)
        part->cell_elements *= 2;
    else if (field == UNLIKE_ROWS)
        part->rows++;
    else if (field == UNLIKE_UNITS)
        part->units += part->granule;
    else if (field == UNLIKE_WINDOW && !group->is_state && !group->chunk && group->step_tokens <= 1)
        group->window++;
    else if (field == UNLIKE_STEP && !group->is_state && !group->chunk && !group->window)
        group->step_tokens = step_tokens_of(group) + 1;
    else if (field == UNLIKE_PART && group->part_count > 1)
        group->part_count--;
}

static void list_layers(const recipe *r, const unlike_recipe *unlike, uint32_t g, model_world *m) {
    for (uint32_t layer = 0; layer < m->layer_count && !(unlike->lacks_groups >> g & 1); layer++)
        if (r->groups[g].layer_mask & ~unlike->lacks_layers[g] & 1u << layer)
            m->layers[g][m->layer_counts[g]++] = layer;
    if (m->layer_counts[g])
        m->group_order[m->group_count++] = g;
}

static bool make_model(const recipe *r, const unlike_recipe *unlike, model_world *m) {
    m->layer_count = r->layer_count - unlike->fewer_layers;
    memcpy(m->groups, r->groups, sizeof m->groups);
    if (unlike->differs)
        make_unlike(&m->groups[unlike->differs - 1], unlike->field);
    for (uint32_t g = 0; g < r->group_count; g++) {
        list_layers(r, unlike, g, m);
        for (uint32_t p = 0; p < MAX_PARTS; p++)
            m->part_order[g][p] = p;
        order_by(unlike->part_order, m->part_order[g], m->groups[g].part_count);
    }
    order_by(unlike->group_order, m->group_order, m->group_count);
    return m->group_count > 0;
}

bool make_models(const recipe *r, world *w) {
    bool good = true;
    for (uint32_t side = 0; side < SIDES; side++)
        good &= make_model(r, &r->engines[side].unlike, &w->models[side]);
    return good;
}

uint32_t remote_layer(const world *w, uint32_t group, uint32_t local_layer) {
    const model_world *remote = &w->models[REMOTE];
    for (uint32_t i = 0; i < remote->layer_counts[group]; i++)
        if (remote->layers[group][i] == w->models[LOCAL].layers[group][local_layer])
            return i;
    return NO_ID;
}

/* ---- asking ---------------------------------------------------------------------------------- */

asked ask_all(const recipe *r, const world *w) {
    asked ask = {.converts = r->ids_seed % 2};
    for (uint32_t g = 0; g < r->group_count; g++)
        ask.groups[g] = has_group(w, LOCAL, g);
    if (r->ask_begin < r->ask_end && r->ask_end <= w->models[LOCAL].layer_count) {
        ask.layers_begin = r->ask_begin;
        ask.layers_end = r->ask_end;
    }
    return ask;
}

layer_span wanted_layers(const world *w, const asked *ask, uint32_t local_rank, uint32_t group) {
    const rank_group *held = &w->engines[LOCAL].ranks[local_rank].groups[group];
    layer_span span = {held->layers_begin, held->layers_begin};
    bool any = false;
    for (uint32_t i = held->layers_begin; i < held->layers_end && ask->groups[group]; i++) {
        uint32_t layer = w->models[LOCAL].layers[group][i];
        if (ask->layers_begin < ask->layers_end && (layer < ask->layers_begin || layer >= ask->layers_end))
            continue;
        span.begin = any ? span.begin : i;
        span.end = i + 1;
        any = true;
    }
    return span;
}

void ask_less(const world *w, const refusal *why, asked *ask) {
    if (why->common.begin == why->common.end || ask->layers_begin < ask->layers_end) {
        ask->groups[why->group] = false;
        return;
    }
    const uint32_t *layers = w->models[LOCAL].layers[why->group];
    ask->layers_begin = layers[why->common.begin];
    ask->layers_end = layers[why->common.end - 1] + 1;
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void refuse(refusal *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void refuse(refusal *out, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(out->named, sizeof out->named, format, arguments);
    va_end(arguments);
    out->status = KVF_E_MISMATCH;
}

/* Compares types last: if everything else is the same, they may be converted. */
static void compare_part(const world *w, const asked *ask, uint32_t g, uint32_t p, refusal *out) {
    const part_recipe *a = &w->models[LOCAL].groups[g].parts[p], *b = &w->models[REMOTE].groups[g].parts[p];
    const char *field = a->units != b->units                   ? "units"
                        : a->cell_elements != b->cell_elements ? "cell_elements"
                        : a->rows != b->rows                   ? "rows_per_step"
                        : a->dtype != b->dtype                 ? "dtype"
                                                               : NULL;
    const bool converted = is_converted(a->dtype) && is_converted(b->dtype);
    if (!field || out->status || (strcmp(field, "dtype") == 0 && converted && ask->converts))
        return;
    refuse(out, "g%u.p%u.%s is ", g, p, field);
    if (strcmp(field, "dtype") == 0 && converted)
        out->status = KVF_E_UNSUPPORTED;
}

static void compare_cells(const world *w, const asked *ask, uint32_t g, refusal *out) {
    const group_recipe *a = &w->models[LOCAL].groups[g], *b = &w->models[REMOTE].groups[g];
    if (a->window != b->window)
        refuse(out, "g%u.window_tokens is ", g);
    if (step_tokens_of(a) != step_tokens_of(b))
        refuse(out, "g%u.tokens_per_step is ", g);
    for (uint32_t p = 0; p < a->part_count || p < b->part_count; p++) {
        if (p < a->part_count && p < b->part_count)
            compare_part(w, ask, g, p, out);
        else
            refuse(out, "g%u.p%u is missing %s", g, p, p < a->part_count ? "remotely" : "locally");
    }
}

/* Layers that both models have must be contiguous in either's group. */
static void compare_layers(const world *w, uint32_t g, layer_span wanted, refusal *out) {
    layer_span common = {0, 0};
    uint32_t first = NO_ID;
    bool apart = false;
    for (uint32_t i = 0; i < w->models[LOCAL].layer_counts[g]; i++) {
        uint32_t there = remote_layer(w, g, i);
        if (there == NO_ID)
            continue;
        if (first == NO_ID)
            common.begin = common.end = i, first = there;
        apart |= common.end != i || there - first != i - common.begin;
        common.end = i + 1;
    }
    bool none = first == NO_ID;
    if (none || apart) {
        refuse(out, "g%u: %s", g,
               none ? "no layers are in common" : "the layers in common are not contiguous");
    } else if (!out->status && (wanted.begin < common.begin || wanted.end > common.end)) {
        out->common = common;
        refuse(out, "g%u.layers ", g);
    }
}

bool must_refuse(const world *w, const asked *ask, uint32_t local_rank, refusal *out) {
    const model_world *local = &w->models[LOCAL];
    for (uint32_t i = 0; i < local->group_count; i++) {
        uint32_t g = local->group_order[i];
        layer_span wanted = wanted_layers(w, ask, local_rank, g);
        *out = (refusal){.group = g};
        if (wanted.begin == wanted.end)
            continue;
        if (has_group(w, REMOTE, g)) {
            compare_cells(w, ask, g, out);
            compare_layers(w, g, wanted, out);
        } else {
            refuse(out, "group g%u is missing remotely", g);
        }
        if (out->status)
            return true;
    }
    return false;
}
