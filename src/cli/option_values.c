#include "option_values.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "numbers.h"
#include "shape.h"

/* ---- storing values -------------------------------------------------------------------------- */

static void *field_of(const option_row *row, options *out) {
    return (char *)out + row->field;
}

/* Stores a number, a flag or an enumeration, in the width of its field. */
static void store(const option_row *row, options *out, uint64_t value) {
    if (row->field_bytes == sizeof(bool))
        *(bool *)field_of(row, out) = value != 0;
    else if (row->field_bytes == sizeof(uint32_t))
        *(uint32_t *)field_of(row, out) = (uint32_t)value;
    else
        *(uint64_t *)field_of(row, out) = value;
}

int take_text(const option_row *row, const char *written, options *out) {
    *(const char **)field_of(row, out) = written;
    return EXIT_DONE;
}

int take_flag(const option_row *row, const char *written, options *out) {
    (void)written;
    store(row, out, true);
    return EXIT_DONE;
}

int take_number(const option_row *row, const char *written, options *out) {
    uint64_t value;
    if (!parse_number(written, &value) || value == 0 || value > row->most)
        return usage_error("--%s is \"%s\"; allowed: a whole number from 1 to %llu, with k, m, g or t for "
                           "1024 of it and so on",
                           row->name, written, (unsigned long long)row->most);
    store(row, out, value);
    return EXIT_DONE;
}

int take_seed(const option_row *row, const char *written, options *out) {
    uint64_t value;
    if (!parse_number(written, &value))
        return usage_error("--%s is \"%s\"; allowed: a whole number from 0 to %llu", row->name, written,
                           (unsigned long long)UINT64_MAX);
    store(row, out, value);
    return EXIT_DONE;
}

/* ---- names ----------------------------------------------------------------------------------- */

/* Finds the value that the user wrote, as the table spells it; prints what is allowed if there is none such. */
static const char *find_word(const option_row *row, const char *written, uint32_t *number) {
    const words among = {row->words, NULL};
    const char *name = words_find(among, written, number);
    char list[512];
    if (name)
        return name;
    words_list(among, list, sizeof list);
    (void)usage_error("--%s is \"%s\"; allowed: %s%s", row->name, written, list,
                      words_hint(among, written).text);
    return NULL;
}

int take_word(const option_row *row, const char *written, options *out) {
    uint32_t number = 0;
    if (!find_word(row, written, &number))
        return EXIT_USAGE;
    store(row, out, number);
    return EXIT_DONE;
}

int take_name(const option_row *row, const char *written, options *out) {
    const char *name = find_word(row, written, NULL);
    return name ? take_text(row, name, out) : EXIT_USAGE;
}

static int read_dtype(const option_row *row, const char *written, kvf_dtype *out) {
    char list[256];
    const words among = {dtype_word, NULL};
    const char *name = words_find(among, written, NULL);
    if (kvf_dtype_by_name(name ? name : written, out) == KVF_OK)
        return EXIT_DONE;
    words_list(among, list, sizeof list);
    return usage_error("--%s is \"%s\"; allowed: %s, and the names configurations have for them%s", row->name,
                       written, list, words_hint(among, written).text);
}

int take_dtype(const option_row *row, const char *written, options *out) {
    return read_dtype(row, written, field_of(row, out));
}

int take_scales(const option_row *row, const char *written, options *out) {
    char dtype[32];
    const char *slash = strchr(written, '/');
    size_t length = slash ? (size_t)(slash - written) : strlen(written);
    if (length >= sizeof dtype || (slash && !words_same(slash, "/head")))
        return usage_error("--%s is \"%s\"; allowed: an element type, and /head after it", row->name,
                           written);
    memcpy(dtype, written, length);
    dtype[length] = '\0';
    out->config.scale_per_head = slash != NULL;
    return read_dtype(row, dtype, &out->config.scale_dtype);
}

int take_cuda_memory(const option_row *row, const char *written, options *out) {
    const char *name = find_word(row, written, NULL);
    if (!name)
        return EXIT_USAGE;
    out->prefill_memory = strcmp(name, "decode") != 0 ? KVF_MEMORY_CUDA : KVF_MEMORY_HOST;
    out->decode_memory = strcmp(name, "prefill") != 0 ? KVF_MEMORY_CUDA : KVF_MEMORY_HOST;
    return EXIT_DONE;
}

/* ---- the rest -------------------------------------------------------------------------------- */

int take_die(const option_row *row, const char *written, options *out) {
    out->fault = FAULT_DIE;
    return take_text(row, written, out);
}

int take_hang(const option_row *row, const char *written, options *out) {
    out->fault = FAULT_HANG;
    return take_text(row, written, out);
}

/* The library would call a key that is none by its place among those of --allow and --command-key together. */
int take_key(const option_row *row, const char *written, options *out) {
    static const char z85[] =
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";
    option_keys *keys = field_of(row, out);
    if (strlen(written) != KEY_CHARACTERS || strspn(written, z85) != KEY_CHARACTERS)
        return usage_error(
            "--%s is \"%s\"; allowed: the public_key of \"kvferry keys\", %d characters of Z85", row->name,
            written, KEY_CHARACTERS);
    if (keys->count == OPTIONS_MAX_KEYS)
        return usage_error("--%s is given more than %d times", row->name, OPTIONS_MAX_KEYS);
    keys->all[keys->count++] = written;
    return EXIT_DONE;
}

/* ---- allowed values -------------------------------------------------------------------------- */

const char *way_word(const void *set, uint32_t i) {
    (void)set;
    static const char *const names[] = {"auto", "direct", "packed"}; /* in the order of kvf_way */
    return i < sizeof names / sizeof *names ? names[i] : NULL;
}

const char *replicas_word(const void *set, uint32_t i) {
    (void)set;
    static const char *const names[] = {"spread", "first"};
    return i < sizeof names / sizeof *names ? names[i] : NULL;
}

const char *cuda_memory_word(const void *set, uint32_t i) {
    (void)set;
    static const char *const names[] = {"prefill", "decode", "both"};
    return i < sizeof names / sizeof *names ? names[i] : NULL;
}

const char *dtype_word(const void *set, uint32_t i) {
    (void)set;
    const kvf_dtype dtype = (kvf_dtype)(i + 1); /* 0 is none */
    return kvf_dtype_bits(dtype) ? kvf_dtype_name(dtype) : NULL;
}

const char *transport_word(const void *set, uint32_t i) {
    (void)set;
    return i == 0 ? "auto" : kvf_transport_kind_name(i - 1);
}

const char *sort_word(const void *set, uint32_t i) {
    (void)set;
    static const char *const all[] = {"shm/brought", "libfabric/emulated", "ucx/emulated"};
    for (size_t at = 0; at < sizeof all / sizeof *all; at++) {
        kvf_cost_model cost;
        if (strcmp(kvf_cost_assumed(all[at], &cost), all[at]) == 0 && i-- == 0)
            return all[at];
    }
    return NULL;
}

const char *costs_word(const void *set, uint32_t i) {
    uint32_t kinds = 0;
    while (transport_word(set, kinds))
        kinds++;
    return i < kinds ? transport_word(set, i) : sort_word(set, i - kinds);
}

const char *model_word(const void *set, uint32_t i) {
    (void)set;
    return kvf_builtin_model_name(i);
}

const char *shape_word(const void *set, uint32_t i) {
    (void)set;
    return shape_key(i);
}
