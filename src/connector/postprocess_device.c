#include "connector/postprocess_device.h"

#include "connector/copy_queue.h"

/*
 * Permuting goes by way of a room on the device, which holds the pages of many layers at once:
 *
 *     region   | block 7 | .. | block 2 |       first job: the blocks as they are, one after another
 *     room     | page 0         | page 1 ..     second job: cells, into the order that is wanted
 *     region   | block 7 | .. | block 2 |
 *
 * In the room received pages lie side by side, whether they are shorter or longer than a block, so one box on either
 * side describes all pages of a request. Boxes find their blocks by tables; that of the room's pages counts 0, 1, 2 ..
 *
 * Zeroing is a copy from a single cell of zeros, whose strides are all 0.
 */

#define COUNTED 65536u /* received pages in the table of the room, unless one page has more */
#define ALIGNED 16u    /* as the widest vectors of the kernels */

/* One device's share of a call. */
typedef struct device_work {
    const kvf_received *received;
    uint32_t device;
    kvf_copy_queue *queue;
    uint64_t page_bytes, item_pages; /* of a page; pages in one item of a job, at the most */
    /* The words: the ids of all requests, one after another, then 0, 1, 2 .., then zeros. */
    uint32_t *words;
    uint64_t id_count, counted, zeros_at, word_count;
    uint64_t table; /* the words on the device */
    uint64_t room, room_bytes, used;
    kvf_copy_job *out, *back; /* begun and not started; NULL: none */
    uint32_t items;           /* of the two */
} device_work;

static bool is_here(const device_work *w, const kvf_block_region *region) {
    return region->kind == KVF_MEMORY_CUDA && region->device == w->device;
}

/* Rounds up to a multiple of a power of two; the caller knows that it fits. */
static uint64_t rounded(uint64_t bytes, uint64_t to) {
    return (bytes + to - 1) & ~(to - 1);
}

kvf_status kvf_check_device_memory(const kvf_block_region *region) {
    kvf_cuda_place place;
    return kvf_cuda_place_of(region->device, (CUdeviceptr)(uintptr_t)region->base, region->bytes, &place);
}

/* ---- sizes and tables ---------------------------------------------------------------------------- */

static uint64_t received_pages(const device_work *w) {
    return kvf_page_tokens(w->received) / w->received->shape.received.tokens; /* of a page */
}

/* The bytes that the room needs for all pages of this device, or `most` if that is less; a multiple of ALIGNED. */
static uint64_t room_for(const device_work *w, uint64_t most) {
    const kvf_received *r = w->received;
    const uint64_t item = rounded(w->page_bytes, ALIGNED);
    uint64_t bytes = 0;
    for (size_t i = 0; i < r->region_count; i++)
        for (size_t q = 0; is_here(w, &r->regions[i]) && q < r->request_count; q++) {
            const uint64_t pages = kvf_covered_pages(r, &r->requests[q]);
            uint64_t all;
            if (!kvf_mul(pages, kvf_part_count(&r->regions[i]), &all) || !kvf_mul(all, item, &all) ||
                !kvf_add(bytes, all, &bytes) || bytes > most)
                return kvf_max_u64(rounded(most, ALIGNED), item);
        }
    return bytes;
}

static kvf_status measure(device_work *w, uint64_t room_bytes) {
    const kvf_received *r = w->received;
    uint64_t most = 0;
    w->page_bytes = r->block_bytes * r->page_blocks; /* kvf_gather_of() has checked it */
    if (w->page_bytes >= KVF_DEVICE_PAGE_BYTES)
        return kvf_fail(KVF_E_LIMIT, "a page has %llu bytes; on devices allowed: below %llu",
                        (unsigned long long)w->page_bytes, (unsigned long long)KVF_DEVICE_PAGE_BYTES);
    for (size_t q = 0; q < r->request_count; q++) {
        w->id_count += r->requests[q].block_id_count; /* the caller has added them up */
        most = kvf_max_u64(most, kvf_covered_pages(r, &r->requests[q]));
    }
    w->item_pages = kvf_min_u64(most, kvf_max_u64(1, COUNTED / received_pages(w)));
    w->counted = r->permutes ? w->item_pages * received_pages(w) : 0;
    w->room_bytes = r->permutes ? room_for(w, room_bytes) : 0;
    if (!kvf_add(w->id_count, w->counted, &w->zeros_at) || !kvf_add(w->zeros_at, 3, &w->zeros_at) ||
        !kvf_add(w->zeros_at & ~(uint64_t)3, rounded(r->shape.cell_bytes, 4) / 4, &w->word_count))
        return kvf_fail(KVF_E_OVERFLOW, "the block table for a device does not fit in 64 bits");
    w->zeros_at &= ~(uint64_t)3;
    return KVF_OK;
}

static kvf_status put_tables(device_work *w) {
    const kvf_received *r = w->received;
    kvf_status status = kvf_copy_queue_words(w->queue, w->word_count, &w->words);
    if (status)
        return status;
    uint64_t at = 0;
    for (size_t q = 0; q < r->request_count; q++) {
        for (size_t i = 0; i < r->requests[q].block_id_count; i++)
            w->words[at++] = r->requests[q].block_ids[i];
    }
    for (uint64_t i = 0; i < w->counted; i++)
        w->words[at++] = (uint32_t)i;
    return kvf_copy_queue_upload(w->queue, &w->table);
}

/* ---- boxes --------------------------------------------------------------------------------------- */

/* Pages of a form, without table: the first at `memory`, one every `stride` bytes. */
static kvf_box pages_of(const kvf_received *r, const kvf_page_form *form, uint64_t memory, uint64_t stride) {
    const uint64_t cell = r->shape.cell_bytes, heads = r->shape.heads;
    const bool by_head = form->order == KVF_PAGE_HND;
    return (kvf_box){.memory = (unsigned char *)(uintptr_t)memory,
                     .block_stride = stride,
                     .row_stride = by_head ? cell : heads * cell,
                     .unit_stride = by_head ? form->tokens * cell : cell,
                     .kernel_blocks = 1,
                     .block_rows = form->tokens,
                     .pieces = 1,
                     .piece_bytes = cell};
}

/* The boxes' side, whose table is in the words from `first` on. */
static kvf_device_side side_of(const device_work *w, kvf_box *box, uint64_t first) {
    box->blocks = w->words + first;
    return (kvf_device_side){.pages = box, .table = w->table, .table_on_host = w->words};
}

static uint64_t part_at(const kvf_block_region *region, uint64_t part) {
    return (uintptr_t)region->base + kvf_part_offset(region, 0, part);
}

/* ---- permuting ----------------------------------------------------------------------------------- */

/* Starts the two jobs: the second one finds in the room what the first one has put there. */
static kvf_status start_both(device_work *w) {
    kvf_copy_job *out = w->out, *back = w->back;
    w->out = w->back = NULL;
    w->items = 0;
    w->used = 0;
    kvf_status status = out ? kvf_copy_queue_start(w->queue, out) : KVF_OK;
    if (back && status)
        kvf_copy_job_drop(back);
    else if (back)
        status = kvf_copy_queue_start(w->queue, back);
    return status;
}

static kvf_status begin_both(device_work *w) {
    kvf_status status = w->out ? KVF_OK : kvf_copy_queue_begin(w->queue, &w->out);
    if (!status && !w->back)
        status = kvf_copy_queue_begin(w->queue, &w->back);
    return status;
}

/* Adds `pages` pages, whose blocks are in the words from `first` on, to the two jobs. */
static kvf_status add_pages(device_work *w, const kvf_block_region *region, uint64_t part, uint64_t first,
                            uint64_t pages) {
    const kvf_received *r = w->received;
    const uint64_t memory = part_at(region, part), room = w->room + w->used;
    kvf_box whole = {.memory = (unsigned char *)(uintptr_t)memory,
                     .block_stride = region->block_stride_bytes,
                     .kernel_blocks = 1,
                     .block_rows = 1,
                     .pieces = 1,
                     .piece_bytes = r->block_bytes};
    kvf_box received = pages_of(r, &r->shape.received, room, w->page_bytes / received_pages(w));
    kvf_box wanted = pages_of(r, &r->shape.wanted, memory, region->block_stride_bytes);
    const kvf_device_side blocks = side_of(w, &whole, first), packed = {.packed = room},
                          from = side_of(w, &received, w->id_count), to = side_of(w, &wanted, first);
    kvf_status status = kvf_copy_job_add(w->out, &blocks, &packed, pages * r->page_blocks, 1, r->block_bytes);
    if (!status)
        status = kvf_copy_job_add(w->back, &from, &to, pages * kvf_page_tokens(r), r->shape.heads,
                                  r->shape.cell_bytes);
    w->items++;
    w->used += rounded(pages * w->page_bytes, ALIGNED);
    return status;
}

static kvf_status permute_request(device_work *w, const kvf_block_region *region, uint64_t part,
                                  const kvf_received_request *request, uint64_t first) {
    const kvf_received *r = w->received;
    kvf_status status = KVF_OK;
    const uint64_t pages = kvf_covered_pages(r, request);
    for (uint64_t at = 0; at < pages && !status;) {
        const uint64_t fit = (w->room_bytes - w->used) / w->page_bytes,
                       now = kvf_min_u64(kvf_min_u64(fit, pages - at), w->item_pages);
        /* An item becomes at most two boxes, because its bytes are below 2^30. */
        if (now == 0 || w->items == KVF_COPY_QUEUE_BOXES / 2) {
            status = start_both(w);
            continue;
        }
        status = begin_both(w);
        if (!status)
            status = add_pages(w, region, part, first + at * r->page_blocks, now);
        at += now;
    }
    return status;
}

/* ---- zeroing ------------------------------------------------------------------------------------- */

/* Zeroes the tokens of a request's blocks after the covered ones. The blocks are in the words from `first` on. */
static kvf_status zero_request(device_work *w, const kvf_block_region *region, uint64_t part,
                               const kvf_received_request *request, uint64_t first) {
    const kvf_received *r = w->received;
    const uint64_t tokens = r->shape.wanted.tokens, covered = request->covered_tokens;
    const uint64_t rows = request->block_id_count * tokens - covered;
    if (rows == 0)
        return KVF_OK;
    kvf_box wanted = pages_of(r, &r->shape.wanted, part_at(region, part), region->block_stride_bytes);
    wanted.first_row = covered % tokens;
    kvf_box zero = wanted;
    zero.memory = (unsigned char *)(uintptr_t)(w->table + w->zeros_at * sizeof *w->words);
    zero.block_stride = zero.row_stride = zero.unit_stride = 0;
    const kvf_device_side to = side_of(w, &wanted, first + covered / tokens),
                          from = side_of(w, &zero, first + covered / tokens);
    kvf_status status = w->out ? KVF_OK : kvf_copy_queue_begin(w->queue, &w->out);
    if (!status)
        status = kvf_copy_job_add(w->out, &from, &to, rows, r->shape.heads, r->shape.cell_bytes);
    if (status == KVF_E_LIMIT && w->items > 0) { /* the job is full: the next one has room */
        status = start_both(w);
        if (!status)
            status = kvf_copy_queue_begin(w->queue, &w->out);
        if (!status)
            status = kvf_copy_job_add(w->out, &from, &to, rows, r->shape.heads, r->shape.cell_bytes);
    }
    w->items++;
    return status;
}

/* ---- a call -------------------------------------------------------------------------------------- */

/* Does one thing to a request's blocks, which are in the words from `first` on, in one part of a region. */
typedef kvf_status deed(device_work *w, const kvf_block_region *region, uint64_t part,
                        const kvf_received_request *request, uint64_t first);

static kvf_status each_request(device_work *w, const kvf_block_region *region, uint64_t part, deed *thing) {
    const kvf_received *r = w->received;
    kvf_status status = KVF_OK;
    uint64_t first = 0;
    for (size_t q = 0; q < r->request_count && !status; q++) {
        status = thing(w, region, part, &r->requests[q], first);
        first += r->requests[q].block_id_count;
    }
    return status;
}

/* Does it in every part of every region here, and starts what is left. */
static kvf_status each_part(device_work *w, deed *thing) {
    const kvf_received *r = w->received;
    kvf_status status = KVF_OK;
    for (size_t i = 0; i < r->region_count; i++)
        for (uint64_t part = 0;
             is_here(w, &r->regions[i]) && part < kvf_part_count(&r->regions[i]) && !status; part++)
            status = each_request(w, &r->regions[i], part, thing);
    return status ? status : start_both(w);
}

static kvf_status finish_on(const kvf_received *received, uint32_t device, kvf_device_limits limits) {
    device_work w = {.received = received, .device = device};
    kvf_status status = measure(&w, limits.room_bytes);
    if (!status)
        status = kvf_copy_queue_take(device, limits.patience_ns, &w.queue);
    if (status)
        return status;
    if (w.room_bytes)
        status = kvf_copy_queue_room(w.queue, w.room_bytes, &w.room);
    if (!status)
        status = put_tables(&w);
    const bool begun = !status;
    if (!status && w.room_bytes)
        status = each_part(&w, permute_request);
    if (!status)
        status = each_part(&w, zero_request);
    if (w.out)
        kvf_copy_job_drop(w.out);
    if (w.back)
        kvf_copy_job_drop(w.back);
    status = kvf_copy_queue_give(w.queue, status);
    /* Callers are promised that nothing has changed if there is no memory. */
    return begun && status == KVF_E_NOMEM ? kvf_fail_in(KVF_E_IO, "some blocks may have changed: ") : status;
}

static bool is_first_of_device(const kvf_received *r, size_t index) {
    for (size_t i = 0; i < index; i++)
        if (r->regions[i].kind == KVF_MEMORY_CUDA && r->regions[i].device == r->regions[index].device)
            return false;
    return r->regions[index].kind == KVF_MEMORY_CUDA;
}

kvf_status kvf_finish_on_devices(const kvf_received *received, kvf_device_limits limits) {
    kvf_status status = KVF_OK;
    for (size_t i = 0; i < received->region_count && !status; i++)
        if (is_first_of_device(received, i))
            status = finish_on(received, received->regions[i].device, limits);
    return status;
}
