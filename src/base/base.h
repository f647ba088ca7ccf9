/*
 * For every room: failing with a detail text, asserting invariants, checked arithmetic, memory, and a growing text.
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

/** Puts a prefix ("group 2: ") before the current detail text and returns `status`. */
kvf_status kvf_fail_in(kvf_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** The most bytes of a detail text: room for a dozen differing fields of two engines, with both values. */
#define KVF_DETAIL_BYTES 2048

/** Restores a detail text that was copied before a call that may have changed it. */
void kvf_error_restore(const char *text);

/**
 * Asserts an invariant of the library, which holds whatever callers and peers do. Not for arguments or bytes from
 * outside: those fail with kvf_fail().
 *
 * Builds with KVF_ASSERTIONS (debug, sanitizers, fault harness) print the condition and its place when it is false, and
 * abort. Other builds do not evaluate it.
 */
#ifdef KVF_ASSERTIONS
#define KVF_ASSERT(condition)                                                                                \
    ((condition) ? (void)0 : kvf_assertion_failed(#condition, __FILE__, __LINE__, __func__))
#else
#define KVF_ASSERT(condition) ((void)(true || (condition)))
#endif

_Noreturn void kvf_assertion_failed(const char *condition, const char *file, int line, const char *function);

/** Whether `bytes` bytes from `offset` on lie inside `all` bytes; nothing lies inside 0 bytes. */
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

/** a + b, or UINT64_MAX if that is more than there can be: as a time it never comes. */
static inline uint64_t kvf_add_or_most(uint64_t a, uint64_t b) {
    uint64_t sum;
    return kvf_add(a, b, &sum) ? sum : UINT64_MAX;
}

/** a*b + c. */
static inline bool kvf_mul_add(uint64_t a, uint64_t b, uint64_t c, uint64_t *out) {
    uint64_t product;
    return kvf_mul(a, b, &product) && kvf_add(product, c, out);
}

static inline uint64_t kvf_min_u64(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}
/** Whether who has `has` of something may take `wants` more of the `free` rest: it must leave as much free as it then has.
 * So parties that take as much as they can, however many they are, leave room for one that needs less. */
static inline bool kvf_is_fair(uint64_t has, uint64_t wants, uint64_t free) {
    return wants <= free && has + wants <= free - wants;
}
static inline uint64_t kvf_max_u64(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

uint64_t kvf_gcd(uint64_t a, uint64_t b);

/* Memory from the process's allocator. NULL when there is none, or when the size overflows; the caller then returns
 * KVF_E_NOMEM. Zero elements give a valid pointer. */
void *kvf_alloc(size_t count, size_t element_bytes);  /**< uninitialised */
void *kvf_alloc0(size_t count, size_t element_bytes); /**< zeroed */
void *kvf_resize(void *memory, size_t count, size_t element_bytes);
void *kvf_copy(const void *memory, size_t count, size_t element_bytes);
char *kvf_strdup(const char *text);
void kvf_free(void *memory);

/** Returns KVF_E_NOMEM, and says in the detail what the memory was for. */
kvf_status kvf_nomem(const char *what);

/** Fills memory from the kernel's source of random numbers. @return KVF_OK or KVF_E_IO */
kvf_status kvf_random(void *out, size_t bytes);

#define KVF_PROCESS_SECRET_BYTES 16u

/** Random bytes, the same each time, for hashes that no other process can compute. Any thread may call it. */
const uint8_t *kvf_process_secret(void);

/** The status for an errno of bind() or listen(): the address is taken, forbidden, or not of this machine. */
kvf_status kvf_status_of_listening(int error);

/* A static analyser sees one file at a time, so it is told here what these functions return. */
#ifdef __clang_analyzer__
static inline kvf_status kvf_returned(kvf_status status, kvf_status recorded) {
    (void)recorded;
    return status;
}
#define kvf_fail(status, ...) kvf_returned(status, (kvf_fail)(status, __VA_ARGS__))
#define kvf_fail_in(status, ...) kvf_returned(status, (kvf_fail_in)(status, __VA_ARGS__))
#define kvf_nomem(what) kvf_returned(KVF_E_NOMEM, (kvf_nomem)(what))
#endif

/** Whether a character begins a line, or moves the cursor, where it is printed. */
static inline bool kvf_is_control(char c) {
    return (unsigned char)c < ' ' || c == 0x7f;
}

/** Puts '?' in place of the control characters of a text, which a peer chose, and which is logged and printed. */
void kvf_hide_controls(char *text);

/** A value for a sentence. */
typedef struct kvf_excerpt {
    char text[208];
} kvf_excerpt;

/** A text of up to `most` bytes, at most 200; of a longer one as many as are whole characters, and "...". */
kvf_excerpt kvf_excerpt_of(const char *text, size_t most);

/** A text that grows. A zeroed one is empty; after a failed append `failed` stays set and further appends do
 * nothing. */
typedef struct kvf_text {
    char *data;
    size_t length;
    size_t capacity;
    bool failed;
} kvf_text;

void kvf_text_add(kvf_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
void kvf_text_free(kvf_text *text);

/**
 * Copies a text to a caller's buffer, cut to fit and ended by a zero byte, returns its whole length in `length`, and
 * frees it. `out` may be NULL where out_bytes is 0, and `length` may be NULL.
 *
 * @return KVF_OK, also for a text that was cut; KVF_E_NOMEM after a failed append: nothing is copied
 */
kvf_status kvf_text_give(kvf_text *text, char *out, size_t out_bytes, size_t *length);

/**
 * Copies an option struct of the caller into ours, whichever of the two is newer: fields the caller does not
 * know become zero. NULL gives all zeros.
 *
 * @return KVF_OK, or KVF_E_INVALID when struct_size is 0 or the caller sets fields this library does not know
 */
kvf_status kvf_take_options(void *out, size_t out_bytes, const void *options, const char *name);

/** KVF_E_INVALID unless `out`, a struct of the caller that is to be filled in, is not NULL and has its struct_size
 * set. */
kvf_status kvf_check_out(const void *out, const char *name);

/**
 * Fills a struct of the caller that passed kvf_check_out(), whichever of the two is newer: fields this library
 * does not know become zero. Its struct_size stays.
 */
void kvf_fill_out(void *out, const void *found, size_t found_bytes);

/** The same for an element of an array of the caller's, all of which are as large as the first one says. */
void kvf_fill_element(void *array, size_t i, const void *found, size_t found_bytes);

/** KVF_E_INVALID unless all `count` reserved fields of the struct `name` are 0. */
kvf_status kvf_check_reserved(const uint64_t *reserved, size_t count, const char *name);

#endif
