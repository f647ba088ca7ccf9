/*
 * What every room uses: failing with words, stating invariants, checked arithmetic, memory, and a growing text.
 */
#ifndef KVF_BASE_H
#define KVF_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <kvferry/status.h>

/** Records the detail text of this thread and returns `status`: return kvf_fail(KVF_E_RANGE, "...", ...). */
kvf_status kvf_fail(kvf_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Puts words before the detail that is there ("group 2: ") and returns `status`. */
kvf_status kvf_fail_in(kvf_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** A detail text is cut to this: room for a dozen differing fields of two engines, with both values. */
#define KVF_DETAIL_BYTES 2048

/** Empties the detail text of this thread. */
void kvf_error_clear(void);

/** Puts back a detail text that was copied before somebody else was called. */
void kvf_error_restore(const char *text);

/**
 * States what holds inside the library whatever callers and peers do. Never about an argument or bytes from outside:
 * those are answered with kvf_fail().
 *
 * Builds with KVF_ASSERTIONS (debug, sanitizers, fault harness) print the condition and its place when it does not
 * hold, and abort. Others do not evaluate it.
 */
#ifdef KVF_ASSERTIONS
#define KVF_ASSERT(condition)                                                                                \
    ((condition) ? (void)0 : kvf_assertion_failed(#condition, __FILE__, __LINE__, __func__))
#else
#define KVF_ASSERT(condition) ((void)(true || (condition)))
#endif

_Noreturn void kvf_assertion_failed(const char *condition, const char *file, int line, const char *function);

/** Whether so many bytes from an offset on lie inside of something; nothing lies inside of what is empty. */
static inline bool kvf_lies_inside(uint64_t offset, uint64_t bytes, uint64_t all) {
    return all > 0 && offset <= all && bytes <= all - offset;
}

/* Arithmetic on numbers from outside. Each returns false on overflow, leaving `out` undefined. */
static inline bool kvf_add(uint64_t a, uint64_t b, uint64_t *out) {
    return !__builtin_add_overflow(a, b, out);
}
static inline bool kvf_mul(uint64_t a, uint64_t b, uint64_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}

/** a*b + c. */
static inline bool kvf_mul_add(uint64_t a, uint64_t b, uint64_t c, uint64_t *out) {
    uint64_t product;
    return kvf_mul(a, b, &product) && kvf_add(product, c, out);
}

static inline uint64_t kvf_min_u64(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}
static inline uint64_t kvf_max_u64(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

uint64_t kvf_gcd(uint64_t a, uint64_t b);

/* Memory from the process's allocator. NULL (and KVF_E_NOMEM from the caller) when there is none; a count
 * whose bytes overflow is treated as none. Zero elements give a valid pointer. */
void *kvf_alloc(size_t count, size_t element_bytes);  /**< uninitialised */
void *kvf_alloc0(size_t count, size_t element_bytes); /**< zeroed */
void *kvf_resize(void *memory, size_t count, size_t element_bytes);
void *kvf_copy(const void *memory, size_t count, size_t element_bytes);
char *kvf_strdup(const char *text);
void kvf_free(void *memory);

/** KVF_E_NOMEM with the words for it. */
kvf_status kvf_nomem(const char *what);

/** What it means that an address cannot be listened on, by its errno: it is taken, forbidden, or none of here. */
kvf_status kvf_status_of_listening(int error);

/* A static analyser sees one file at a time: it must be told what a failure returns. */
#ifdef __clang_analyzer__
static inline kvf_status kvf_returned(kvf_status status, kvf_status recorded) {
    (void)recorded;
    return status;
}
#define kvf_fail(status, ...) kvf_returned(status, (kvf_fail)(status, __VA_ARGS__))
#define kvf_fail_in(status, ...) kvf_returned(status, (kvf_fail_in)(status, __VA_ARGS__))
#define kvf_nomem(what) kvf_returned(KVF_E_NOMEM, (kvf_nomem)(what))
#endif

/** A text that grows. Zeroed means empty; after a failed append `failed` stays set and appends do nothing. */
typedef struct kvf_text {
    char *data;
    size_t length;
    size_t capacity;
    bool failed;
} kvf_text;

void kvf_text_add(kvf_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
void kvf_text_free(kvf_text *text);

/**
 * Gives a text to a caller's buffer, cut to fit and ended by a zero byte, and its whole length as snprintf()
 * does; frees it. `out` may be NULL where out_bytes is 0, and `length` may be NULL.
 *
 * @return KVF_OK, also for a text that was cut; KVF_E_NOMEM for one with a failed append: nothing is given
 */
kvf_status kvf_text_give(kvf_text *text, char *out, size_t out_bytes, size_t *length);

/**
 * Copies an option struct of the caller into ours, whichever of the two is newer: fields the caller does not
 * know become zero. NULL gives all zeros.
 *
 * @return KVF_OK, or KVF_E_INVALID when struct_size is 0 or the caller sets fields this library does not know
 */
kvf_status kvf_take_options(void *out, size_t out_bytes, const void *options, const char *name);

/** KVF_E_INVALID unless `out`, a struct of the caller that is to be filled in, is there and says its size. */
kvf_status kvf_check_out(const void *out, const char *name);

/**
 * Fills a struct of the caller that passed kvf_check_out(), whichever of the two is newer: fields this library
 * does not know become zero. Its struct_size stays.
 */
void kvf_fill_out(void *out, const void *found, size_t found_bytes);

/** KVF_E_INVALID unless all `count` numbers that are reserved in a struct are 0. `name` is the struct's. */
kvf_status kvf_check_reserved(const uint64_t *reserved, size_t count, const char *name);

#endif
