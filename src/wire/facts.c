/*
 * The facts two engines must agree on, and their digest. They are what kvf_model_compare() compares, as text.
 */
#include <sodium.h>

#include "model/model.h"
#include "wire/wire.h"

_Static_assert(crypto_hash_sha256_BYTES == KVF_WIRE_DIGEST_BYTES, "the digest is a SHA-256");

/* 0 1 2 5 6 9 as "0-2,5-6,9". */
static void add_layers(kvf_text *text, const kvf_group_desc *group) {
    for (uint32_t i = 0, next; i < group->layer_count; i = next) {
        next = i + 1;
        while (next < group->layer_count && group->layers[next] == group->layers[next - 1] + 1)
            next++;
        kvf_text_add(text, i ? ",%u" : "%u", group->layers[i]);
        if (next > i + 1)
            kvf_text_add(text, "-%u", group->layers[next - 1]);
    }
    kvf_text_add(text, "\n");
}

static void add_part(kvf_text *text, const char *group, const kvf_part_desc *part) {
    const char *name = part->name;
    kvf_text_add(text, "%s.%s.dtype: %s\n", group, name, kvf_dtype_name(part->dtype));
    kvf_text_add(text, "%s.%s.units: %u\n", group, name, part->units);
    kvf_text_add(text, "%s.%s.cell_elements: %u\n", group, name, part->cell_elements);
    kvf_text_add(text, "%s.%s.rows_per_step: %u\n", group, name, part->rows_per_step);
    kvf_text_add(text, "%s.%s.tp_rule: %s\n", group, name, kvf_tp_rule_name(part->tp_rule));
}

static void add_group(kvf_text *text, const kvf_group_desc *group) {
    const char *name = group->name;
    kvf_text_add(text, "%s.kind: %s\n", name, kvf_group_kind_name(group->kind));
    kvf_text_add(text, "%s.window_tokens: %u\n", name, group->window_tokens);
    kvf_text_add(text, "%s.chunk_tokens: %u\n", name, group->chunk_tokens);
    kvf_text_add(text, "%s.layers: ", name);
    add_layers(text, group);
    kvf_text_add(text, "%s.parts: ", name);
    for (uint32_t p = 0; p < group->part_count; p++)
        kvf_text_add(text, p ? ", %s" : "%s", group->parts[p].name);
    kvf_text_add(text, "\n");
    for (uint32_t p = 0; p < group->part_count; p++)
        add_part(text, name, &group->parts[p]);
}

kvf_status kvf_wire_facts(const kvf_model *model, const char *extra, char **out) {
    if (!model || !out)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !model ? "model" : "out");
    kvf_text text = {0};
    uint32_t groups = kvf_model_group_count(model);
    kvf_text_add(&text, "layer_count: %u\ngroups: ", kvf_model_layer_count(model));
    for (uint32_t g = 0; g < groups; g++)
        kvf_text_add(&text, g ? ", %s" : "%s", kvf_model_group(model, g)->name);
    kvf_text_add(&text, "\n");
    for (uint32_t g = 0; g < groups; g++)
        add_group(&text, kvf_model_group(model, g));
    size_t extra_bytes = extra ? strlen(extra) : 0;
    if (extra_bytes)
        kvf_text_add(&text, "%s%s", extra, extra[extra_bytes - 1] == '\n' ? "" : "\n");
    kvf_status status = KVF_OK;
    if (text.failed)
        status = kvf_nomem("the facts of a model");
    else if (text.length > KVF_WIRE_MAX_FACTS)
        status = kvf_fail(KVF_E_RANGE, "the facts have %zu bytes; allowed is up to %u", text.length,
                          KVF_WIRE_MAX_FACTS);
    if (status) {
        kvf_text_free(&text);
        return status;
    }
    *out = text.data;
    return KVF_OK;
}

void kvf_wire_digest(const char *facts, uint8_t digest[KVF_WIRE_DIGEST_BYTES]) {
    int ready = sodium_init(); /* lets it choose the fastest code; without, the sum is as right */
    (void)ready;
    (void)crypto_hash_sha256(digest, (const unsigned char *)facts, strlen(facts));
}
