/*
 * Bytes being written, and memory for what was read.
 */
#include "wire/fields.h"

/* ---- writing --------------------------------------------------------------------------------- */

static int append(void *data, const char *bytes, size_t size) {
    kvf_packing *packing = data;
    if (packing->status)
        return -1;
    kvf_wire_buffer *to = &packing->bytes;
    KVF_ASSERT(to->size <= packing->capacity && to->size <= KVF_WIRE_MAX_BYTES);
    if (size > KVF_WIRE_MAX_BYTES - to->size) {
        packing->status =
            kvf_fail(KVF_E_RANGE, "more than %u bytes, which no message may have", KVF_WIRE_MAX_BYTES);
        return -1;
    }
    if (to->size + size > packing->capacity) {
        size_t capacity = kvf_max_u64(256, kvf_max_u64(to->size + size, packing->capacity * 2));
        uint8_t *grown = kvf_resize(to->data, capacity, 1);
        if (!grown) {
            packing->status = kvf_nomem("a message");
            return -1;
        }
        to->data = grown;
        packing->capacity = capacity;
    }
    if (size)
        memcpy(to->data + to->size, bytes, size);
    to->size += size;
    return 0;
}

void kvf_packing_start(kvf_packing *packing) {
    *packing = (kvf_packing){0};
    msgpack_packer_init(&packing->packer, packing, append);
}

kvf_status kvf_packing_end(kvf_packing *packing, kvf_wire_buffer *out) {
    if (packing->status)
        kvf_wire_buffer_free(&packing->bytes);
    else
        *out = packing->bytes;
    return packing->status;
}

void kvf_pack_key(kvf_packing *packing, const char *key) {
    msgpack_pack_str_with_body(&packing->packer, key, strlen(key));
}

void kvf_wire_buffer_free(kvf_wire_buffer *buffer) {
    if (!buffer)
        return;
    kvf_free(buffer->data);
    *buffer = (kvf_wire_buffer){0};
}

/* ---- reading --------------------------------------------------------------------------------- */

#define ALIGNMENT (sizeof(max_align_t))

/* The newest block is the first. */
typedef struct block {
    struct block *next;
    size_t size, used;
    max_align_t data[];
} block;

static block *add_block(void **storage, size_t bytes) {
    uint64_t size;
    block *made = kvf_add(bytes, sizeof(block), &size) ? kvf_alloc(size, 1) : NULL;
    if (!made)
        return NULL;
    made->next = *storage;
    made->size = bytes;
    made->used = 0;
    *storage = made;
    return made;
}

void *kvf_wire_keep(void **storage, size_t count, size_t element_bytes) {
    uint64_t bytes;
    if (!kvf_mul(count, element_bytes, &bytes))
        return NULL;
    block *last = *storage;
    if (last && element_bytes > 1)
        last->used = kvf_min_u64(last->size, (last->used + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    if (!last || bytes > last->size - last->used)
        last = add_block(storage, kvf_max_u64(bytes, 256));
    if (!last)
        return NULL;
    void *kept = (uint8_t *)last->data + last->used;
    last->used += bytes;
    KVF_ASSERT(last->used <= last->size);
    return kept;
}

kvf_status kvf_wire_keep_room(void **storage, size_t bytes) {
    return add_block(storage, bytes) ? KVF_OK : kvf_nomem("a message");
}

uint64_t kvf_wire_kept(const void *storage) {
    uint64_t bytes = 0;
    for (const block *at = storage; at; at = at->next)
        bytes += at->size;
    return bytes;
}

void kvf_wire_discard(void **storage) {
    for (block *at = *storage; at;) {
        block *next = at->next;
        kvf_free(at);
        at = next;
    }
    *storage = NULL;
}
