/*
 * Status codes, error text, the version, and the memory allocator: what every other header needs.
 *
 * Every kvferry function that can fail returns a kvf_status. Success is 0. After a failure the calling thread can read
 * one sentence with the field, the value and the allowed range from kvf_error_detail(). The list of statuses of a
 * function may leave out KVF_E_INVALID for a NULL; functions without a status must not get one unless they accept it.
 *
 * Pointers: memory that an argument points to is read during the call, and copied where it is needed longer, unless the
 * function says that it must live longer or is retained. `context` pointers are handed back and never read. A pointer
 * that a function returns belongs to the object that it was asked of and is valid as long as that object, unless the
 * function says that the caller owns it, or how long it is valid. `out` arguments are written only when a function
 * returns KVF_OK, unless it says otherwise.
 *
 * Structs: a struct that may grow begins with its size, `struct_size`, which the caller sets; one that stands in arrays
 * or in other structs has `reserved` fields instead, which must be 0 (`unused` ones where the library fills it in). New
 * fields are added at the end, or take the place of those, and 0 in them means the earlier behaviour, so programs keep
 * working with a newer library. Every other struct stays as it is.
 */
#ifndef KVFERRY_STATUS_H
#define KVFERRY_STATUS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Marks the functions of the stable ABI; everything else in the shared library is hidden. */
#if defined(__GNUC__)
#define KVF_API __attribute__((visibility("default")))
#else
#define KVF_API
#endif

typedef enum kvf_status {
    KVF_OK = 0,
    KVF_E_INVALID = 1,   /**< an argument has no meaning: NULL, zero, negative, contradictory */
    KVF_E_RANGE = 2,     /**< a number is outside the allowed range: block id, token, layer, rank, byte */
    KVF_E_OVERFLOW = 3,  /**< an address or size does not fit in 64 bits, or in what holds it */
    KVF_E_OVERLAP = 4,   /**< two cells would share a byte */
    KVF_E_MISMATCH = 5,  /**< two sides describe different models */
    KVF_E_UNCOVERED = 6, /**< wanted cells that no rank holds */
    KVF_E_NOT_FOUND = 7, /**< no such name, rank, engine, file */
    KVF_E_EXISTS = 8,    /**< the name is taken */
    KVF_E_NOT_EXPRESSIBLE = 9, /**< this named quantity has no value for this shape; a plan may still exist */
    KVF_E_UNSUPPORTED = 10,    /**< this build, machine or transport cannot do it */
    KVF_E_PARSE = 11,          /**< text or bytes from outside are malformed */
    KVF_E_NOMEM = 12,          /**< the allocator returned NULL */
    KVF_E_IO = 13,             /**< a system call failed; the detail has its name and error */
    KVF_E_PERMISSION = 14,     /**< the kernel or the peer forbids it */
    KVF_E_NOT_REGISTERED = 15, /**< memory that no registration covers */
    KVF_E_PEER_LOST = 16,      /**< the peer died, closed, or was replaced */
    KVF_E_CANCELLED = 17,      /**< cancelled by its owner */
    KVF_E_AGAIN = 18,          /**< not possible now; make progress, then call again: nothing was changed */
    KVF_E_TIMEOUT = 19,        /**< a deadline the caller gave has passed */
    KVF_E_EMPTY = 20,          /**< there is nothing to take */
    KVF_E_LIMIT = 21,          /**< the most that an option allows is reached; the detail names the limit */
    KVF_IN_PROGRESS = 22,      /**< not a failure: the operation has not ended yet */
} kvf_status;

/** The length of arrays by kvf_status, with room for statuses to come. */
#define KVF_STATUSES 64

/** The name of a status, such as "KVF_E_RANGE"; "unknown status" for any other number. Any thread. */
KVF_API const char *kvf_status_name(kvf_status status);

/**
 * One sentence about the last failure on this thread: which field, which value, what was allowed.
 *
 * @return text owned by the library, valid until the next failing call on the same thread; "" if no call has failed
 */
KVF_API const char *kvf_error_detail(void);

/** The version of these headers; until 1.0 a new minor version may break the binary interface. */
#define KVF_VERSION_MAJOR 0
#define KVF_VERSION_MINOR 1
#define KVF_VERSION_PATCH 0

/** The version as one number that grows with it, for `#if`: 0.1.0 is 100, and 1.2.3 is 10203. */
#define KVF_VERSION_NUMBER (KVF_VERSION_MAJOR * 10000 + KVF_VERSION_MINOR * 100 + KVF_VERSION_PATCH)

/** The version of the loaded library, such as "0.1.0", which may be newer than the headers. Any thread. */
KVF_API const char *kvf_version(void);

/**
 * Where kvferry takes memory from. All three functions are needed; they may be called from any thread.
 * `resize` follows realloc(), `release` accepts NULL.
 */
typedef struct kvf_allocator {
    void *(*allocate)(void *context, size_t bytes);
    void *(*resize)(void *context, void *memory, size_t bytes);
    void (*release)(void *context, void *memory);
    void *context;
} kvf_allocator;

/**
 * Replaces the allocator (malloc by default) for the whole process; NULL restores the default.
 *
 * Call it before any other function: objects made with one allocator must be freed with the same one.
 *
 * @return KVF_OK, or KVF_E_INVALID when one of the three functions is missing
 */
KVF_API kvf_status kvf_set_allocator(const kvf_allocator *allocator);

#ifdef __cplusplus
}
#endif

#endif
