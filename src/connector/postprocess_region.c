#include "connector/postprocess.h"

#include "connector/postprocess_device.h"

/* An axis of a region: the number of its entries, and the bytes from one to the next. */
typedef struct spaced {
    const char *count_name, *stride_name;
    uint64_t count, stride;
} spaced;

/* Turns `bytes` from the bytes of one entry of the axis into those of all its entries together. */
static kvf_status span(const spaced *axis, uint64_t *bytes, const char *name, size_t index) {
    if (axis->count == 1)
        return KVF_OK;
    if (axis->stride < *bytes)
        return kvf_fail(KVF_E_OVERLAP, "%s %zu: %s is %llu, but there are %llu bytes in each of %llu %s",
                        name, index, axis->stride_name, (unsigned long long)axis->stride,
                        (unsigned long long)*bytes, (unsigned long long)axis->count, axis->count_name);
    if (!kvf_mul_add(axis->stride, axis->count - 1, *bytes, bytes))
        return kvf_fail(KVF_E_OVERFLOW, "%s %zu: %llu %s %llu bytes apart do not fit in 64 bits", name, index,
                        (unsigned long long)axis->count, axis->count_name, (unsigned long long)axis->stride);
    return KVF_OK;
}

static kvf_status check_kind(const kvf_block_region *region, const char *name, size_t index) {
    if (region->kind == KVF_MEMORY_HOST || region->kind == KVF_MEMORY_CUDA)
        return KVF_OK;
    return kvf_fail(KVF_E_INVALID, "%s %zu: kind is %d, which is not a kvf_memory_kind", name, index,
                    (int)region->kind);
}

kvf_status kvf_check_region(const kvf_block_region *region, const char *name, size_t index) {
    kvf_status kind = check_kind(region, name, index);
    if (kind)
        return kind;
    if (!region->base || !region->part_bytes || !region->block_count)
        return kvf_fail(KVF_E_INVALID, "%s %zu: %s", name, index,
                        !region->base         ? "base is NULL"
                        : !region->part_bytes ? "part_bytes is 0; allowed: 1 and more"
                                              : "block_count is 0; allowed: 1 to 4294967295");
    if (region->block_count > UINT32_MAX)
        return kvf_fail(KVF_E_INVALID, "%s %zu: block_count is %llu; allowed: 1 to 4294967295", name, index,
                        (unsigned long long)region->block_count);
    const spaced blocks = {"blocks", "block_stride_bytes", region->block_count, region->block_stride_bytes};
    const spaced parts = {"parts", "part_stride_bytes", kvf_part_count(region), region->part_stride_bytes};
    /* The axis with the smaller stride runs inside the other one. */
    bool parts_inside = parts.count == 1 || (blocks.count > 1 && parts.stride <= blocks.stride);
    uint64_t bytes = region->part_bytes;
    kvf_status status = span(parts_inside ? &parts : &blocks, &bytes, name, index);
    if (!status)
        status = span(parts_inside ? &blocks : &parts, &bytes, name, index);
    if (status)
        return status;
    if (bytes > region->bytes)
        return kvf_fail(KVF_E_RANGE, "%s %zu: its blocks take %llu bytes, but it has %llu", name, index,
                        (unsigned long long)bytes, (unsigned long long)region->bytes);
    if ((uintptr_t)region->base > UINTPTR_MAX - region->bytes)
        return kvf_fail(KVF_E_OVERFLOW, "%s %zu: base and %llu bytes go beyond the last address", name, index,
                        (unsigned long long)region->bytes);
    status = region->kind == KVF_MEMORY_CUDA ? kvf_check_device_memory(region) : KVF_OK;
    return status ? kvf_fail_in(status, "%s %zu, in memory of CUDA device %u: ", name, index, region->device)
                  : KVF_OK;
}

kvf_status kvf_check_block_ids(const kvf_block_region *region, const uint32_t *ids, size_t count,
                               const char *name) {
    for (size_t i = 0; i < count; i++)
        if (ids[i] >= region->block_count)
            return kvf_fail(KVF_E_RANGE, "%s: entry %zu is block %u; allowed: 0 to %llu", name, i, ids[i],
                            (unsigned long long)(region->block_count - 1));
    return KVF_OK;
}
