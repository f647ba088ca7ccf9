/* How a backend lays its cache out, and the order in which layers become regions. */
#include <stdlib.h>

#include "connector/connector.h"

kvf_status kvf_detect_layout(const uint64_t *probe_shape, size_t probe_dimensions, bool is_mla, bool is_mamba,
                             size_t registered_dimensions, kvf_layout_flags *out) {
    if (!probe_shape || !probe_dimensions || !out)
        return kvf_plain_fail(KVF_E_INVALID, "probe_shape, its dimensions and out must be given");
    if (is_mamba && registered_dimensions)
        return kvf_refuse(KVF_REFUSAL_MAMBA_WITH_TENSOR_SHAPE, KVF_E_NOT_EXPRESSIBLE,
                          "a tensor of %zu dimensions over all layers is registered, but layers with state "
                          "have shapes of their own",
                          registered_dimensions);
    kvf_layout_flags flags;
    /* A cache with K and V has 5 dimensions. The probe has 1 block, and its axis of K and V has size 2, so a first
     * axis of 1 is that of the blocks. Pages that attention shares with state are always blocks first. */
    flags.is_kv_layout_blocks_first = is_mamba || (probe_dimensions == 5 && probe_shape[0] == 1);
    flags.cross_layers_blocks = registered_dimensions == probe_dimensions + 1;
    flags.split_k_and_v = !is_mla && !flags.is_kv_layout_blocks_first && !flags.cross_layers_blocks;
    *out = flags;
    return KVF_OK;
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

static size_t run_length(const char *text, bool digits) {
    size_t length = 0;
    while (text[length] && is_digit(text[length]) == digits)
        length++;
    return length;
}

static int compare_lengths(size_t a, size_t b) {
    return a < b ? -1 : a > b;
}

static int compare_runs(const char *a, size_t a_length, const char *b, size_t b_length) {
    int order = memcmp(a, b, a_length < b_length ? a_length : b_length);
    return order ? order : compare_lengths(a_length, b_length);
}

/* Compares numbers of any length: without leading zeros, the longer one is larger. A missing number comes first. */
static int compare_numbers(const char *a, size_t a_length, const char *b, size_t b_length) {
    if (!a_length || !b_length)
        return compare_lengths(a_length, b_length);
    for (; a_length && *a == '0'; a_length--)
        a++;
    for (; b_length && *b == '0'; b_length--)
        b++;
    int order = compare_lengths(a_length, b_length);
    return order ? order : memcmp(a, b, a_length);
}

/* A name is text, number, text, number ...; a name that begins with a number begins with an empty text. */
static int compare_names(const char *a, const char *b) {
    bool digits = false;
    while (*a || *b) {
        size_t a_length = run_length(a, digits), b_length = run_length(b, digits);
        int order =
            digits ? compare_numbers(a, a_length, b, b_length) : compare_runs(a, a_length, b, b_length);
        if (order)
            return order;
        a += a_length;
        b += b_length;
        digits = !digits;
    }
    return 0;
}

/* A name and its index before sorting, so that equal names keep their order. */
typedef struct placed_name {
    const char *name;
    size_t place;
} placed_name;

static int compare_placed(const void *a, const void *b) {
    const placed_name *left = a, *right = b;
    int order = compare_names(left->name, right->name);
    return order ? order : compare_lengths(left->place, right->place);
}

kvf_status kvf_region_order(const char **names, size_t count) {
    if (!names)
        return kvf_plain_fail(KVF_E_INVALID, "names is NULL");
    for (size_t i = 0; i < count; i++)
        if (!names[i])
            return kvf_plain_fail(KVF_E_INVALID, "names[%zu] is NULL", i);
    placed_name *placed = kvf_alloc(count, sizeof *placed);
    if (!placed)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu names", count);
    for (size_t i = 0; i < count; i++)
        placed[i] = (placed_name){names[i], i};
    if (count)
        qsort(placed, count, sizeof *placed, compare_placed);
    for (size_t i = 0; i < count; i++)
        names[i] = placed[i].name;
    kvf_free(placed);
    return KVF_OK;
}
