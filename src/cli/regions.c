#include "regions.h"

#include <stdio.h>

#include "json.h"
#include "text.h"

/* Neighbouring regions that differ only in their layers: first to end - 1. */
typedef struct alike {
    uint32_t first, end;
} alike;

static bool view_of(const kvf_shard *shard, uint32_t region, uint32_t i, kvf_region_view *out) {
    *out = (kvf_region_view){.struct_size = sizeof *out};
    return kvf_shard_region_view(shard, region, i, out) == KVF_OK;
}

static bool same_axes(const kvf_region_view *a, const kvf_region_view *b) {
    bool same = a->axis_count == b->axis_count;
    for (uint32_t i = 0; i < a->axis_count && same; i++)
        same = a->axes[i].letter == b->axes[i].letter && a->axes[i].length == b->axes[i].length &&
               a->axes[i].stride == b->axes[i].stride;
    return same;
}

/* Whether a view equals a view of the region before it, but for the layers, which must be the next ones. */
static bool follows(const kvf_region_view *before, const kvf_region_view *view) {
    return view->region_bytes == before->region_bytes && view->group == before->group &&
           view->parts.begin == before->parts.begin && view->parts.end == before->parts.end &&
           view->layers.begin == before->layers.end && view->layer_count == before->layer_count &&
           view->dtype == before->dtype && view->offset == before->offset && view->regular &&
           before->regular && same_axes(before, view);
}

static bool region_follows(const kvf_shard *shard, uint32_t region) {
    kvf_region_view before, view;
    bool is = true, was = true;
    for (uint32_t i = 0; is && was; i++) {
        was = view_of(shard, region - 1, i, &before);
        is = view_of(shard, region, i, &view);
        if (is != was || (is && !follows(&before, &view)))
            return false;
    }
    return true;
}

static alike next_alike(const kvf_shard *shard, uint32_t first) {
    alike out = {first, first + 1};
    while (out.end < kvf_shard_get(shard)->region_count && region_follows(shard, out.end))
        out.end++;
    return out;
}

/* The layers that a view has in all regions together. */
static kvf_range layers_of(const kvf_region_view *view, alike regions) {
    uint32_t more = regions.end - regions.first - 1;
    return (kvf_range){view->layers.begin, view->layers.end + more * view->layer_count};
}

static void name_parts(const kvf_group_desc *group, kvf_range parts, char *out, size_t bytes) {
    size_t length = 0;
    for (uint32_t p = parts.begin; p < parts.end && length < bytes; p++)
        length +=
            (size_t)snprintf(out + length, bytes - length, "%s%s", length ? " " : "", group->parts[p].name);
}

/* The order of a view's axes, such as "BPHND", or "irregular". */
static text order_of(const kvf_region_view *view) {
    char letters[KVF_REGION_AXES_MAX + 1] = "";
    for (uint32_t i = 0; i < view->axis_count; i++)
        letters[i] = view->axes[i].letter;
    return text_format("%s", view->regular ? letters : "irregular");
}

static text lengths_of(const kvf_region_view *view) {
    text out = {""};
    for (uint32_t i = 0; i < view->axis_count; i++)
        out = text_format("%s%s%llu", out.text, i ? "x" : "", (unsigned long long)view->axes[i].length);
    return out;
}

void regions_start(table *list) {
    table_start(list, "side|>regions|>bytes|group|layers|parts|order|lengths|type");
}

void regions_add(table *list, const char *side, const kvf_shard *shard) {
    const kvf_model *model = kvf_shard_model(shard);
    for (alike here = {0, 0}; here.end < kvf_shard_get(shard)->region_count;) {
        here = next_alike(shard, here.end);
        kvf_region_view view;
        for (uint32_t i = 0; view_of(shard, here.first, i, &view); i++) {
            const kvf_group_desc *group = kvf_model_group(model, view.group);
            char parts[128] = "";
            name_parts(group, view.parts, parts, sizeof parts);
            table_cell(list, here.first == 0 && i == 0 ? side : "");
            table_cell(list, i == 0 ? text_range((kvf_range){here.first, here.end}).text : "");
            table_cell(list, i == 0 ? text_bytes(view.region_bytes).text : "");
            table_cell(list, group->name);
            table_cell(list, text_layers(group, layers_of(&view, here)).text);
            table_cell(list, parts);
            table_cell(list, order_of(&view).text);
            table_cell(list, lengths_of(&view).text);
            table_cell(list, kvf_dtype_name(view.dtype));
        }
    }
}

static struct json_object *json_view(const kvf_group_desc *group, const kvf_region_view *view,
                                     kvf_range layers) {
    struct json_object *out = json_object_new_object(), *list = json_object_new_array(),
                       *parts = json_object_new_array(), *axes = json_object_new_array();
    json_text(out, "group", group->name);
    for (uint32_t layer = layers.begin; layer < layers.end; layer++)
        json_object_array_add(list, json_object_new_int64(group->layers[layer]));
    json_object_object_add(out, "layers", list);
    for (uint32_t p = view->parts.begin; p < view->parts.end; p++)
        json_object_array_add(parts, json_object_new_string(group->parts[p].name));
    json_object_object_add(out, "parts", parts);
    json_text(out, "dtype", kvf_dtype_name(view->dtype));
    json_count(out, "offset", view->offset);
    json_text(out, "order", order_of(view).text);
    for (uint32_t i = 0; i < view->axis_count; i++) {
        struct json_object *axis = json_object_new_object();
        json_text(axis, "axis", (char[]){view->axes[i].letter, '\0'});
        json_count(axis, "length", view->axes[i].length);
        json_count(axis, "stride", view->axes[i].stride);
        json_object_array_add(axes, axis);
    }
    json_object_object_add(out, "axes", axes);
    return out;
}

struct json_object *regions_json(const kvf_shard *shard) {
    struct json_object *out = json_object_new_array();
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    for (alike here = {0, 0}; here.end < desc->region_count;) {
        here = next_alike(shard, here.end);
        struct json_object *one = json_object_new_object(), *views = json_object_new_array();
        kvf_region_view view;
        json_range(one, "regions", (kvf_range){here.first, here.end});
        json_count(one, "bytes", desc->region_bytes[here.first]);
        for (uint32_t i = 0; view_of(shard, here.first, i, &view); i++)
            json_object_array_add(views, json_view(kvf_model_group(kvf_shard_model(shard), view.group), &view,
                                                   layers_of(&view, here)));
        json_object_object_add(one, "views", views);
        json_object_array_add(out, one);
    }
    return out;
}
