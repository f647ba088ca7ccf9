#include "connector/copy_queue.h"
#include "connector/postprocess_device.h"

/*
 * Blocks pass through a slot of pinned memory, so the host's side may be memory of any kind, and a device that hangs
 * does not keep the caller. The device gathers or scatters all blocks of the slot at once.
 *
 *     device   | block 7 | .. | block 2 |
 *     slot     | 7 | 2 | ..                     parts, or pieces of a part that is longer than the slot
 *     host     | block 0 | block 1 | ..
 */

typedef struct transit {
    kvf_copy_queue *queue;
    const kvf_block_region *device, *host;
    const uint32_t *host_ids;
    bool to_device;
    uint32_t *words; /* the device's blocks */
    uint64_t table;  /* the same on the device */
    unsigned char *slot;
} transit;

/* The same bytes of some parts, `count` of them, which fit into the slot. */
typedef struct stretch {
    uint64_t part, offset, bytes;
    size_t first, count;
} stretch;

static void copy_on_host(const transit *t, const stretch *s) {
    for (size_t i = 0; i < s->count; i++) {
        const uint64_t at = kvf_part_offset(t->host, t->host_ids[s->first + i], s->part) + s->offset;
        unsigned char *host = (unsigned char *)t->host->base + at, *slot = t->slot + i * s->bytes;
        memcpy(t->to_device ? slot : host, t->to_device ? host : slot, s->bytes);
    }
}

static kvf_status copy_by_device(const transit *t, const stretch *s) {
    const uint64_t memory = (uintptr_t)t->device->base + kvf_part_offset(t->device, 0, s->part) + s->offset;
    const kvf_box blocks = {.memory = (unsigned char *)(uintptr_t)memory,
                            .block_stride = t->device->block_stride_bytes,
                            .blocks = t->words + s->first,
                            .kernel_blocks = 1,
                            .block_rows = 1,
                            .pieces = 1,
                            .piece_bytes = s->bytes};
    const kvf_device_side pages = {.pages = &blocks, .table = t->table, .table_on_host = t->words},
                          packed = {.packed = (uintptr_t)t->slot};
    kvf_copy_job *job;
    kvf_status status = kvf_copy_queue_begin(t->queue, &job);
    if (status)
        return status;
    status = kvf_copy_job_add(job, t->to_device ? &packed : &pages, t->to_device ? &pages : &packed, s->count,
                              1, s->bytes);
    if (status)
        kvf_copy_job_drop(job);
    else
        status = kvf_copy_queue_start(t->queue, job);
    return status ? status : kvf_copy_queue_wait(t->queue);
}

static kvf_status copy_stretch(const transit *t, const stretch *s) {
    if (t->to_device)
        copy_on_host(t, s);
    kvf_status status = copy_by_device(t, s);
    if (!status && !t->to_device)
        copy_on_host(t, s);
    return status;
}

/* Copies one part of all blocks, a slot at a time. */
static kvf_status copy_part(const transit *t, uint64_t part, size_t count) {
    const uint64_t part_bytes = t->device->part_bytes;
    kvf_status status = KVF_OK;
    for (uint64_t offset = 0; offset < part_bytes && !status;) {
        stretch s = {.part = part, .offset = offset};
        s.bytes = kvf_min_u64(part_bytes - offset, KVF_COPY_QUEUE_SLOT_BYTES);
        for (s.first = 0; s.first < count && !status; s.first += s.count) {
            s.count = (size_t)kvf_min_u64(count - s.first, KVF_COPY_QUEUE_SLOT_BYTES / s.bytes);
            status = copy_stretch(t, &s);
        }
        offset += s.bytes;
    }
    return status;
}

kvf_status kvf_copy_layer_on_device(const kvf_block_region *from, const kvf_block_region *to,
                                    const uint32_t *from_ids, const uint32_t *to_ids, size_t count,
                                    kvf_device_limits limits) {
    const bool to_device = to->kind == KVF_MEMORY_CUDA;
    transit t = {.device = to_device ? to : from,
                 .host = to_device ? from : to,
                 .host_ids = to_device ? from_ids : to_ids,
                 .to_device = to_device};
    kvf_status status = kvf_copy_queue_take(t.device->device, limits.patience_ns, &t.queue);
    if (status)
        return status;
    status = kvf_copy_queue_slot(t.queue, &t.slot);
    if (!status)
        status = kvf_copy_queue_words(t.queue, count, &t.words);
    if (!status) {
        memcpy(t.words, to_device ? to_ids : from_ids, count * sizeof *t.words);
        status = kvf_copy_queue_upload(t.queue, &t.table);
    }
    for (uint64_t part = 0; part < kvf_part_count(t.device) && !status; part++)
        status = copy_part(&t, part, count);
    return kvf_copy_queue_give(t.queue, status);
}
