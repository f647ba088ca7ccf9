#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"

static void *default_allocate(void *context, size_t bytes) {
    (void)context;
    return malloc(bytes);
}

static void *default_resize(void *context, void *memory, size_t bytes) {
    (void)context;
    return realloc(memory, bytes);
}

static void default_release(void *context, void *memory) {
    (void)context;
    free(memory);
}

static const kvf_allocator default_allocator = {default_allocate, default_resize, default_release, NULL};
static kvf_allocator current = {default_allocate, default_resize, default_release, NULL};

kvf_status kvf_set_allocator(const kvf_allocator *allocator) {
    if (allocator && (!allocator->allocate || !allocator->resize || !allocator->release))
        return kvf_fail(KVF_E_INVALID, "allocator: allocate, resize and release must all be given");
    current = allocator ? *allocator : default_allocator;
    return KVF_OK;
}

/* malloc(0) may return NULL, which here means failure. */
static bool total_bytes(size_t count, size_t element_bytes, size_t *out) {
    if (__builtin_mul_overflow(count, element_bytes, out))
        return false;
    if (*out == 0)
        *out = 1;
    return true;
}

void *kvf_alloc(size_t count, size_t element_bytes) {
    size_t bytes;
    return total_bytes(count, element_bytes, &bytes) ? current.allocate(current.context, bytes) : NULL;
}

/* calloc() knows which memory the kernel gives zeroed. Tables with an entry for each block, of which there may be
 * millions, then take memory and time only as they are used. */
void *kvf_alloc0(size_t count, size_t element_bytes) {
    size_t bytes;
    if (current.allocate == default_allocate)
        return total_bytes(count, element_bytes, &bytes) ? calloc(1, bytes) : NULL;
    void *memory = kvf_alloc(count, element_bytes);
    if (memory)
        memset(memory, 0, count * element_bytes);
    return memory;
}

void *kvf_resize(void *memory, size_t count, size_t element_bytes) {
    size_t bytes;
    return total_bytes(count, element_bytes, &bytes) ? current.resize(current.context, memory, bytes) : NULL;
}

void *kvf_copy(const void *memory, size_t count, size_t element_bytes) {
    void *copy = kvf_alloc(count, element_bytes);
    if (copy && count * element_bytes > 0)
        memcpy(copy, memory, count * element_bytes);
    return copy;
}

char *kvf_strdup(const char *text) {
    return kvf_copy(text, strlen(text) + 1, 1);
}

void kvf_free(void *memory) {
    current.release(current.context, memory);
}

void kvf_text_add(kvf_text *text, const char *format, ...) {
    if (text->failed)
        return;
    va_list arguments;
    va_start(arguments, format);
    va_list again;
    va_copy(again, arguments);
    int needed = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    size_t want = text->length + (size_t)(needed < 0 ? 0 : needed) + 1;
    if (needed >= 0 && want > text->capacity) {
        size_t capacity = text->capacity * 2 > want ? text->capacity * 2 : want + 64;
        char *data = kvf_resize(text->data, capacity, 1);
        if (data) {
            text->data = data;
            text->capacity = capacity;
        }
    }
    if (needed < 0 || want > text->capacity)
        text->failed = true;
    else
        text->length +=
            (size_t)vsnprintf(text->data + text->length, text->capacity - text->length, format, again);
    va_end(again);
    KVF_ASSERT(text->failed || text->length < text->capacity);
}

void kvf_text_free(kvf_text *text) {
    kvf_free(text->data);
    *text = (kvf_text){0};
}

kvf_status kvf_text_give(kvf_text *text, char *out, size_t out_bytes, size_t *length) {
    bool failed = text->failed;
    if (!failed) {
        const char *data = text->data ? text->data : "";
        size_t cut = out_bytes > text->length ? text->length : out_bytes ? out_bytes - 1 : 0;
        if (out_bytes) {
            memcpy(out, data, cut);
            out[cut] = '\0';
        }
        if (length)
            *length = text->length;
    }
    kvf_text_free(text);
    return failed ? kvf_nomem("a text") : KVF_OK;
}
