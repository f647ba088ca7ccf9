#include "connector/id_set.h"
#include "connector/postprocess_device.h"
#include "kernel/kernel.h"

/* ---- finding the other side ------------------------------------------------------------------ */

/* Tries `guess` first, because layers mostly have the same order on both sides. */
static const kvf_block_region *layer_named(const kvf_block_region *regions, size_t count, const char *name,
                                           size_t guess) {
    for (size_t i = 0; i < count; i++) {
        const kvf_block_region *region = &regions[(guess + i) % count];
        if (region->layer && strcmp(region->layer, name) == 0)
            return region;
    }
    return NULL;
}

static bool share_memory(const kvf_block_region *a, const kvf_block_region *b) {
    uintptr_t first = (uintptr_t)a->base, second = (uintptr_t)b->base;
    return a->kind == b->kind && first < second + b->bytes && second < first + a->bytes;
}

typedef struct pairs {
    const uint32_t *from, *to;
    size_t count;
} pairs;

static kvf_status check_pair(const kvf_block_region *from, const kvf_block_region *to, const pairs *list) {
    if (kvf_part_count(from) != kvf_part_count(to) || from->part_bytes != to->part_bytes)
        return kvf_fail(KVF_E_MISMATCH,
                        "the source has %llu parts of %llu bytes, the destination %llu of %llu",
                        (unsigned long long)kvf_part_count(from), (unsigned long long)from->part_bytes,
                        (unsigned long long)kvf_part_count(to), (unsigned long long)to->part_bytes);
    kvf_status status = kvf_check_block_ids(from, list->from, list->count, "source_ids");
    return status ? status : kvf_check_block_ids(to, list->to, list->count, "destination_ids");
}

/* "h2d" reads from host memory, "d2h" writes to it; the other side may be of any kind. */
static kvf_status check_direction(const kvf_block_region *source, size_t source_count,
                                  const kvf_block_region *destination, size_t destination_count,
                                  kvf_copy_direction direction) {
    bool reads_host = direction == KVF_COPY_H2D;
    const kvf_block_region *host = reads_host ? source : destination;
    size_t count = reads_host ? source_count : destination_count;
    for (size_t i = 0; i < count; i++)
        if (host[i].kind != KVF_MEMORY_HOST)
            return kvf_fail(KVF_E_INVALID, "direction is \"%s\", but %s %zu is not host memory (kind %d)",
                            reads_host ? "h2d" : "d2h", reads_host ? "source" : "destination", i,
                            (int)host[i].kind);
    return KVF_OK;
}

static kvf_status check_layers(const kvf_block_region *source, size_t source_count,
                               const kvf_block_region *destination, size_t destination_count,
                               const pairs *list) {
    kvf_status status = KVF_OK;
    for (size_t i = 0; i < source_count && !status; i++)
        status = kvf_check_region(&source[i], "source", i);
    for (size_t i = 0; i < destination_count && !status; i++)
        status = kvf_check_region(&destination[i], "destination", i);
    for (size_t i = 0; i < source_count && !status; i++) {
        const char *name = source[i].layer;
        if (!name)
            return kvf_fail(KVF_E_INVALID, "source %zu: layer is NULL; a copied layer has a name", i);
        const kvf_block_region *to = layer_named(destination, destination_count, name, i);
        if (!to)
            return kvf_fail(KVF_E_NOT_FOUND, "the destination has no layer %s", name);
        status = check_pair(&source[i], to, list);
        if (status)
            return kvf_fail_in(status, "layer %s: ", name);
        for (size_t j = 0; j < destination_count; j++)
            if (share_memory(&source[i], &destination[j]))
                return kvf_fail(KVF_E_OVERLAP, "source %zu and destination %zu share memory", i, j);
    }
    return status;
}

/* ---- copying --------------------------------------------------------------------------------- */

enum { BATCH = 128 };

/* Runs of one layer that wait to be copied together. */
typedef struct batch {
    kvf_copy_bases bases;
    uint64_t total_bytes; /* of the layer: decides whether it goes through the caches */
    size_t count;
    kvf_run runs[BATCH];
} batch;

static void copy_batch(batch *b) {
    kvf_kernel_copy_runs(KVF_COPY_TO_LOCAL, b->bases, b->runs, b->count, b->total_bytes);
    b->count = 0;
}

static void add_run(batch *b, uint64_t to, uint64_t from, uint64_t bytes) {
    kvf_run *last = b->count ? &b->runs[b->count - 1] : NULL;
    if (last && last->local_offset + last->bytes == to && last->remote_offset + last->bytes == from) {
        last->bytes += bytes;
        return;
    }
    if (b->count == BATCH)
        copy_batch(b);
    b->runs[b->count++] = (kvf_run){.local_offset = to, .remote_offset = from, .bytes = bytes};
}

static void copy_layer(const kvf_block_region *from, const kvf_block_region *to, const pairs *list) {
    unsigned char *to_base = to->base, *from_base = from->base;
    batch b = {.bases = {&to_base, &from_base}, .count = 0};
    uint64_t parts = kvf_part_count(from);
    /* The number only decides about caches, so one that does not fit counts as the largest. */
    if (!kvf_mul(parts * from->part_bytes, list->count, &b.total_bytes))
        b.total_bytes = UINT64_MAX;
    for (uint64_t part = 0; part < parts; part++)
        for (size_t i = 0; i < list->count; i++)
            add_run(&b, kvf_part_offset(to, list->to[i], part), kvf_part_offset(from, list->from[i], part),
                    from->part_bytes);
    copy_batch(&b);
}

/* ---- copying to and from devices ------------------------------------------------------------- */

static bool any_on_device(const kvf_block_region *regions, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (regions[i].kind == KVF_MEMORY_CUDA)
            return true;
    return false;
}

/* Leaves out pairs whose destination a later pair overwrites, because a device copies all pairs at once. `memory` is
 * freed by the caller, also after a failure. */
static kvf_status leave_out_overwritten(pairs *list, uint32_t **memory) {
    uint64_t slots, words;
    *memory = kvf_id_set_slots(list->count, &slots) && kvf_mul(list->count, 2, &words) &&
                      kvf_add(words, slots, &words) && words <= SIZE_MAX / sizeof **memory
                  ? kvf_alloc(words, sizeof **memory)
                  : NULL;
    if (!*memory)
        return kvf_nomem("pairs of blocks");
    uint32_t *from = *memory + list->count, *to = from + list->count, *set = to;
    kvf_id_set_clear(set, slots);
    size_t kept = 0;
    for (size_t i = list->count; i-- > 0;)
        if (kvf_id_set_add(set, slots, list->to[i])) {
            kept++;
            *(from - kept) = list->from[i];
            *(to - kept) = list->to[i];
        }
    *list = (pairs){from - kept, to - kept, kept};
    return KVF_OK;
}

static kvf_status copy_all(const kvf_block_region *source, size_t source_count,
                           const kvf_block_region *destination, size_t destination_count, const pairs *list) {
    kvf_status status = KVF_OK;
    for (size_t i = 0; i < source_count && !status; i++) {
        const kvf_block_region *to = layer_named(destination, destination_count, source[i].layer, i);
        if (source[i].kind == KVF_MEMORY_HOST && to->kind == KVF_MEMORY_HOST)
            copy_layer(&source[i], to, list);
        else
            status = kvf_copy_layer_on_device(&source[i], to, list->from, list->to, list->count,
                                              KVF_DEVICE_LIMITS);
        if (status)
            return kvf_fail_in(status, "layer %s: ", source[i].layer);
    }
    return status;
}

kvf_status kvf_copy_blocks(const kvf_block_region *source, size_t source_count,
                           const kvf_block_region *destination, size_t destination_count,
                           const uint32_t *source_ids, size_t source_id_count,
                           const uint32_t *destination_ids, size_t destination_id_count,
                           kvf_copy_direction direction, size_t *copied) {
    if (copied)
        *copied = 0;
    if (direction != KVF_COPY_H2D && direction != KVF_COPY_D2H)
        return kvf_fail(KVF_E_INVALID, "direction is %d; allowed: 0 (\"h2d\") and 1 (\"d2h\")",
                        (int)direction);
    if (!source_count || !destination_count || !source_id_count || source_id_count != destination_id_count)
        return KVF_OK;
    if (!source || !destination || !source_ids || !destination_ids)
        return kvf_fail(KVF_E_INVALID, "%s is NULL, but its count is not 0",
                        !source        ? "source"
                        : !destination ? "destination"
                        : !source_ids  ? "source_ids"
                                       : "destination_ids");
    pairs list = {source_ids, destination_ids, source_id_count};
    kvf_status status = check_direction(source, source_count, destination, destination_count, direction);
    if (!status)
        status = check_layers(source, source_count, destination, destination_count, &list);
    uint32_t *memory = NULL;
    if (!status && any_on_device(destination, destination_count))
        status = leave_out_overwritten(&list, &memory);
    if (!status)
        status = copy_all(source, source_count, destination, destination_count, &list);
    kvf_free(memory);
    if (!status && copied)
        *copied = source_id_count;
    return status;
}
