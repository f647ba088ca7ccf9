/*
 * The facts of an engine as text, and their digest.
 */
#include <sodium.h>

#include "model/match.h"
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

static void add_part(kvf_text *text, const kvf_part_desc *part) {
    kvf_text_add(text, "part: %s\ndtype: %s\nunits: %u\ncell_elements: %u\nrows_per_step: %u\n", part->name,
                 kvf_dtype_name(part->dtype), part->units, part->cell_elements, part->rows_per_step);
}

/* Adds the types that may be converted; nothing if there are none. */
static void add_converted(kvf_text *text, uint32_t convert) {
    const char *before = "convert: ";
    for (uint32_t dtype = 0; dtype < 32; dtype++) {
        if (!(convert & KVF_CONVERTED_DTYPES & KVF_DTYPE_BIT(dtype)))
            continue;
        kvf_text_add(text, "%s%s", before, kvf_dtype_name((kvf_dtype)dtype));
        before = ", ";
    }
    if (convert & KVF_CONVERTED_DTYPES)
        kvf_text_add(text, "\n");
}

static void add_group(kvf_text *text, const kvf_group_desc *group, uint32_t convert) {
    kvf_text_add(text, "group: %s\nkind: %s\nwindow_tokens: %u\nchunk_tokens: %u\n", group->name,
                 kvf_group_kind_name(group->kind), group->window_tokens, group->chunk_tokens);
    if (group->tokens_per_step > 1)
        kvf_text_add(text, "tokens_per_step: %u\n", group->tokens_per_step);
    kvf_text_add(text, "layers: ");
    add_layers(text, group);
    add_converted(text, convert);
    for (uint32_t p = 0; p < group->part_count; p++)
        add_part(text, &group->parts[p]);
}

kvf_status kvf_wire_facts(const kvf_model *model, const uint32_t *convert, const char *own, char **out) {
    kvf_text text = {0};
    kvf_text_add(&text, "layer_count: %u\n", kvf_model_layer_count(model));
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++)
        add_group(&text, kvf_model_group(model, g), convert ? convert[g] : 0);
    size_t own_bytes = own ? strlen(own) : 0;
    if (own_bytes)
        kvf_text_add(&text, "own:\n%s%s", own, own[own_bytes - 1] == '\n' ? "" : "\n");
    kvf_status status = KVF_OK;
    if (text.failed)
        status = kvf_nomem("the facts of a model");
    else if (text.length > KVF_WIRE_MAX_FACTS)
        status = kvf_fail(KVF_E_RANGE, "the facts have %zu bytes; allowed: up to %u", text.length,
                          KVF_WIRE_MAX_FACTS);
    if (status) {
        kvf_text_free(&text);
        return status;
    }
    *out = text.data;
    return KVF_OK;
}

void kvf_wire_digest(const char *facts, uint8_t digest[KVF_WIRE_DIGEST_BYTES]) {
    int ready = sodium_init(); /* lets libsodium choose the fastest code; the digest is correct without it */
    (void)ready;
    (void)crypto_hash_sha256(digest, (const unsigned char *)facts, strlen(facts));
}

void kvf_wire_sum_shard(uint8_t sum[KVF_WIRE_DIGEST_BYTES], uint32_t rank, kvf_bytes shard) {
    crypto_hash_sha256_state state;
    (void)crypto_hash_sha256_init(&state);
    (void)crypto_hash_sha256_update(&state, sum, KVF_WIRE_DIGEST_BYTES);
    (void)crypto_hash_sha256_update(&state, (const unsigned char *)&rank, sizeof rank);
    (void)crypto_hash_sha256_update(&state, shard.data, shard.size);
    (void)crypto_hash_sha256_final(&state, sum);
}
