#include "connector/postprocess.h"

#include "connector/id_set.h"
#include "connector/postprocess_device.h"

/* One call. Its scratch holds, in this order, the addresses of the blocks of two pages, the permutation's working
 * memory, and the table of block ids. */
typedef struct job {
    kvf_received received;
    kvf_gather gather;
    kvf_permute_way way;
    uint64_t permute_at, table_at, scratch_bytes;
    uint64_t table_slots;
    unsigned char *scratch;
} job;

/* ---- scratch --------------------------------------------------------------------------------- */

/* Makes the last section end at a multiple of 8, so that the next one is aligned. */
static bool add_section(uint64_t bytes, uint64_t *end) {
    if (!kvf_add(*end, bytes, end) || !kvf_add(*end, 7, end))
        return false;
    *end &= ~(uint64_t)7;
    return true;
}

static kvf_status start_job(job *j, const kvf_received_shape *shape, uint64_t block_id_count) {
    *j = (job){.scratch = NULL};
    if (!shape)
        return kvf_fail(KVF_E_INVALID, "shape is NULL");
    kvf_status status =
        kvf_take_options(&j->received.shape, sizeof j->received.shape, shape, "kvf_received_shape");
    if (!status)
        status = kvf_gather_of(&j->received.shape, &j->gather);
    if (status)
        return status;
    j->way = kvf_permute_best_way(&j->gather);
    uint64_t end = 0, permute_bytes, table_bytes;
    bool fits = kvf_permute_memory_bytes(&j->gather, j->way, &permute_bytes) &&
                kvf_id_set_slots(block_id_count, &j->table_slots) &&
                kvf_mul(j->table_slots, sizeof(uint32_t), &table_bytes) &&
                add_section(2 * sizeof(void *) * (uint64_t)j->gather.block_count, &end);
    j->permute_at = end;
    fits = fits && add_section(permute_bytes, &end);
    j->table_at = end;
    if (!fits || !add_section(table_bytes, &end) || end > SIZE_MAX)
        return kvf_fail(KVF_E_OVERFLOW, "the scratch for pages of %llu bytes and %llu blocks does not fit",
                        (unsigned long long)j->gather.block_bytes, (unsigned long long)block_id_count);
    j->scratch_bytes = end;
    return KVF_OK;
}

kvf_status kvf_received_scratch_bytes(const kvf_received_shape *shape, size_t block_id_count, uint64_t *out) {
    job j;
    if (!out)
        return kvf_fail(KVF_E_INVALID, "out is NULL");
    kvf_status status = start_job(&j, shape, block_id_count);
    if (!status)
        *out = j.scratch_bytes;
    return status;
}

static kvf_status check_scratch(const job *j, const kvf_scratch *scratch) {
    if (!scratch->memory || (uintptr_t)scratch->memory % sizeof(uint64_t) != 0)
        return kvf_fail(KVF_E_INVALID, "scratch.memory is %s",
                        scratch->memory ? "not aligned to 8 bytes" : "NULL");
    if (scratch->bytes < j->scratch_bytes)
        return kvf_fail(KVF_E_INVALID, "scratch.bytes is %llu; allowed: %llu and more",
                        (unsigned long long)scratch->bytes, (unsigned long long)j->scratch_bytes);
    return KVF_OK;
}

/* ---- no block may be listed twice ------------------------------------------------------------ */

static kvf_status check_listed_once(const job *j) {
    uint32_t *table = (uint32_t *)(void *)(j->scratch + j->table_at);
    kvf_id_set_clear(table, j->table_slots);
    for (size_t r = 0; r < j->received.request_count; r++)
        for (size_t i = 0; i < j->received.requests[r].block_id_count; i++)
            if (!kvf_id_set_add(table, j->table_slots, j->received.requests[r].block_ids[i]))
                return kvf_fail(KVF_E_OVERLAP, "request %zu: entry %zu is block %u, which is listed before",
                                r, i, j->received.requests[r].block_ids[i]);
    return KVF_OK;
}

/* ---- checking requests and regions ----------------------------------------------------------- */

static kvf_status check_request(const job *j, const kvf_received_request *request) {
    uint64_t tokens;
    if (request->block_id_count && !request->block_ids)
        return kvf_fail(KVF_E_INVALID, "block_ids is NULL, but there are %zu", request->block_id_count);
    if (request->block_id_count % j->gather.block_count != 0)
        return kvf_fail(KVF_E_INVALID, "%zu blocks, but each received page takes %u", request->block_id_count,
                        j->gather.block_count);
    if (!kvf_mul(request->block_id_count, j->received.shape.wanted.tokens, &tokens))
        return kvf_fail(KVF_E_OVERFLOW, "the tokens of %zu blocks do not fit in 64 bits",
                        request->block_id_count);
    if (request->covered_tokens > tokens)
        return kvf_fail(KVF_E_RANGE, "covered_tokens is %llu; allowed: 0 to %llu",
                        (unsigned long long)request->covered_tokens, (unsigned long long)tokens);
    return KVF_OK;
}

static kvf_status check_region(const job *j, size_t index) {
    const kvf_block_region *region = &j->received.regions[index];
    kvf_status status = kvf_check_region(region, "region", index);
    if (status)
        return status;
    if (region->part_bytes != j->gather.block_bytes)
        return kvf_fail(KVF_E_INVALID, "region %zu: part_bytes is %llu, but a page of this shape has %llu",
                        index, (unsigned long long)region->part_bytes,
                        (unsigned long long)j->gather.block_bytes);
    for (size_t other = 0; other < index; other++)
        if (j->received.regions[other].base == region->base) /* it would be permuted twice */
            return kvf_fail(KVF_E_OVERLAP, "regions %zu and %zu have the same base", other, index);
    for (size_t r = 0; r < j->received.request_count; r++) {
        status = kvf_check_block_ids(region, j->received.requests[r].block_ids,
                                     j->received.requests[r].block_id_count, "block_ids");
        if (status)
            return kvf_fail_in(status, "region %zu, request %zu: ", index, r);
    }
    return KVF_OK;
}

static kvf_status check_job(const job *j) {
    for (size_t r = 0; r < j->received.request_count; r++) {
        kvf_status status = check_request(j, &j->received.requests[r]);
        if (status)
            return kvf_fail_in(status, "request %zu: ", r);
    }
    for (size_t i = 0; i < j->received.region_count; i++) {
        kvf_status status = check_region(j, i);
        if (status)
            return status;
    }
    return KVF_OK;
}

/* ---- permuting and zeroing ------------------------------------------------------------------- */

/* A received page in one part of one region in host memory. */
typedef struct place {
    size_t region, request;
    uint64_t part, page;
} place;

static bool is_on_host(const kvf_block_region *region) {
    return region->kind == KVF_MEMORY_HOST;
}

/* Moves on to the next place that has a page, which may be `at` itself; false if there is none. */
static bool settle(const job *j, place *at) {
    while (at->region < j->received.region_count) {
        if (!is_on_host(&j->received.regions[at->region])) {
            at->region++;
        } else if (at->request == j->received.request_count) {
            at->request = 0;
            if (++at->part == kvf_part_count(&j->received.regions[at->region])) {
                at->part = 0;
                at->region++;
            }
        } else if (at->page == kvf_covered_pages(&j->received, &j->received.requests[at->request])) {
            at->page = 0;
            at->request++;
        } else {
            return true;
        }
    }
    return false;
}

static unsigned char *part_of(const kvf_block_region *region, uint32_t block, uint64_t part) {
    return (unsigned char *)region->base + kvf_part_offset(region, block, part);
}

static void locate(const job *j, const place *at, unsigned char **blocks) {
    const uint32_t *ids = j->received.requests[at->request].block_ids + at->page * j->gather.block_count;
    for (uint32_t b = 0; b < j->gather.block_count; b++)
        blocks[b] = part_of(&j->received.regions[at->region], ids[b], at->part);
}

static void permute_pages(const job *j) {
    kvf_permutation permutation;
    kvf_permute_prepare(&j->gather, j->way, kvf_permute_best_kernels(&j->gather, j->way),
                        j->scratch + j->permute_at, &permutation);
    unsigned char **now = (unsigned char **)(void *)j->scratch, **next = now + j->gather.block_count;
    place at = {0};
    bool more = settle(j, &at);
    if (more)
        locate(j, &at, now);
    while (more) {
        at.page++;
        more = settle(j, &at);
        if (more)
            locate(j, &at, next);
        kvf_permute_page(&permutation, now, more ? next : NULL);
        unsigned char **done = now;
        now = next;
        next = done;
    }
}

/* Zeroes the cells of a block from a token on. */
static void zero_from(const kvf_received_shape *shape, unsigned char *block, uint64_t token) {
    uint64_t tokens = shape->wanted.tokens, cell = shape->cell_bytes;
    /* In HND the tokens to zero are one run in each head, otherwise one run in all. */
    bool apart = shape->wanted.order == KVF_PAGE_HND;
    uint64_t runs = apart ? shape->heads : 1, row = apart ? cell : shape->heads * cell;
    for (uint64_t run = 0; run < runs; run++)
        memset(block + (run * tokens + token) * row, 0, (tokens - token) * row);
}

static void zero_uncovered(const job *j, const kvf_block_region *region, uint64_t part,
                           const kvf_received_request *request) {
    uint64_t tokens = j->received.shape.wanted.tokens;
    uint64_t whole = request->covered_tokens / tokens, rest = request->covered_tokens % tokens;
    for (uint64_t b = whole; b < request->block_id_count; b++)
        zero_from(&j->received.shape, part_of(region, request->block_ids[b], part), b == whole ? rest : 0);
}

static void do_on_host(const job *j) {
    if (j->way != KVF_PERMUTE_NOTHING)
        permute_pages(j);
    for (size_t i = 0; i < j->received.region_count; i++)
        for (uint64_t part = 0;
             is_on_host(&j->received.regions[i]) && part < kvf_part_count(&j->received.regions[i]); part++)
            for (size_t r = 0; r < j->received.request_count; r++)
                zero_uncovered(j, &j->received.regions[i], part, &j->received.requests[r]);
}

/* Devices come first, because only they can fail: then host memory is unchanged. */
static kvf_status do_job(job *j) {
    j->received.permutes = j->way != KVF_PERMUTE_NOTHING;
    j->received.page_blocks = j->gather.block_count;
    j->received.block_bytes = j->gather.block_bytes;
    kvf_status status = kvf_finish_on_devices(&j->received, KVF_DEVICE_LIMITS);
    if (!status)
        do_on_host(j);
    return status;
}

kvf_status kvf_finish_received(const kvf_received_shape *shape, const kvf_block_region *regions,
                               size_t region_count, const kvf_received_request *requests,
                               size_t request_count, const kvf_scratch *scratch) {
    job j;
    uint64_t ids = 0;
    if ((region_count && !regions) || (request_count && !requests))
        return kvf_fail(KVF_E_INVALID, "%s is NULL, but its count is not 0",
                        region_count && !regions ? "regions" : "requests");
    for (size_t r = 0; r < request_count; r++)
        if (!kvf_add(ids, requests[r].block_id_count, &ids))
            return kvf_fail(KVF_E_OVERFLOW, "request %zu: the block ids of all requests are too many", r);
    kvf_status status = start_job(&j, shape, ids);
    if (status)
        return status;
    j.received.regions = regions;
    j.received.region_count = region_count;
    j.received.requests = requests;
    j.received.request_count = request_count;
    status = check_job(&j);
    if (!status && scratch)
        status = check_scratch(&j, scratch);
    if (status || ids == 0 || region_count == 0)
        return status;
    j.scratch = scratch ? scratch->memory : kvf_alloc(j.scratch_bytes, 1);
    if (!j.scratch)
        return kvf_nomem("scratch for received blocks");
    status = check_listed_once(&j);
    if (!status)
        status = do_job(&j);
    if (!scratch)
        kvf_free(j.scratch);
    return status;
}

kvf_status kvf_permute_received(const kvf_received_shape *shape, const kvf_block_region *regions,
                                size_t region_count, const uint32_t *block_ids, size_t block_id_count,
                                const kvf_scratch *scratch) {
    kvf_received_request all = {block_ids, block_id_count, 0};
    if (!shape)
        return kvf_fail(KVF_E_INVALID, "shape is NULL");
    kvf_received_shape own;
    kvf_status status = kvf_take_options(&own, sizeof own, shape, "kvf_received_shape");
    if (status)
        return status;
    if (!kvf_mul(block_id_count, own.wanted.tokens, &all.covered_tokens))
        return kvf_fail(KVF_E_OVERFLOW, "the tokens of %zu blocks do not fit in 64 bits", block_id_count);
    return kvf_finish_received(shape, regions, region_count, &all, 1, scratch);
}
