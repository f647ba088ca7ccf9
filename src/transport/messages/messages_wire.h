/*
 * The messages between the two ends of a connection; docs/protocol.md describes them for other implementations. Each
 * message is one frame of ZeroMQ: a byte with its kind, then the fields below, all numbers in little endian. All of
 * this comes from outside: readers check it before they use it.
 */
#ifndef KVF_TRANSPORT_MESSAGES_WIRE_H
#define KVF_TRANSPORT_MESSAGES_WIRE_H

#include "base/bytes.h"
#include "transport/transport.h"

#define MESSAGES_VERSION 2u
#define MESSAGES_SECRET_BYTES 16u
#define MESSAGES_ID_BYTES 16u

/** The most bytes of data and the most runs in one request. A longer batch is several requests. */
#define MESSAGES_CHUNK_BYTES (1u << 20)
#define MESSAGES_CHUNK_RUNS 8192u
/** The longest list: each run has another region, size and place. */
#define MESSAGES_RUN_BYTES_MAX 20u
#define MESSAGES_LIST_BYTES ((size_t)MESSAGES_CHUNK_RUNS * MESSAGES_RUN_BYTES_MAX)

/** Requests that a consumer may have unanswered, and notifications that it may have untaken. */
#define MESSAGES_WINDOW_MAX 32u
#define MESSAGES_NOTICES_MAX 64u

#define MESSAGES_REQUEST_BYTES 16u /* before the list of a READ or WRITE */
#define MESSAGES_ANSWER_BYTES 8u   /* before the data of a DATA */
#define MESSAGES_TEXT_BYTES 200u   /* of a FAILED */

/** The longest message: a WRITE. */
#define MESSAGES_BYTES_MAX (MESSAGES_REQUEST_BYTES + MESSAGES_LIST_BYTES + MESSAGES_CHUNK_BYTES)

typedef enum kvf_messages_kind {
    /* From the consumer, which connects. */
    MESSAGES_HELLO = 1,
    MESSAGES_READ = 2,
    MESSAGES_WRITE = 3,
    MESSAGES_NOTICE = 4,
    MESSAGES_BYE = 5,
    /* From the owner of the memory. */
    MESSAGES_REFUSED = 16,
    MESSAGES_DATA = 17,
    MESSAGES_DONE = 18,
    MESSAGES_FAILED = 19,
    MESSAGES_TAKEN = 20,
    MESSAGES_ALIVE = 21,
} kvf_messages_kind;

/** Why an owner ends a connection. */
typedef enum kvf_messages_refusal {
    MESSAGES_REFUSED_STRANGER = 1,   /**< another secret than the owner's */
    MESSAGES_REFUSED_VERSION = 2,    /**< `number`: the owner's version */
    MESSAGES_REFUSED_GENERATION = 3, /**< `number`: the oldest generation that the owner accepts */
    MESSAGES_REFUSED_FENCED = 4,
    MESSAGES_REFUSED_CLOSED = 5,
    MESSAGES_REFUSED_PROTOCOL = 6, /**< the consumer violates the protocol */
    MESSAGES_REFUSED_FULL = 7,     /**< no room for another client */
} kvf_messages_refusal;

typedef struct kvf_messages_hello {
    unsigned char secret[MESSAGES_SECRET_BYTES]; /**< of the card */
    unsigned char id[MESSAGES_ID_BYTES];         /**< of the endpoint that connects */
    uint64_t generation;                         /**< of the memory that the card describes */
    uint32_t region_count;                       /**< that the card names */
    char name[KVF_SENDER_MAX + 1];
} kvf_messages_hello;

#define MESSAGES_HELLO_BYTES_MAX                                                                             \
    (1u + 4 + 2 + MESSAGES_SECRET_BYTES + MESSAGES_ID_BYTES + 8 + 4 + 1 + KVF_SENDER_MAX)

/** Writes a HELLO to `out`, which has MESSAGES_HELLO_BYTES_MAX bytes; returns its length. */
size_t kvf_messages_hello_write(const kvf_messages_hello *hello, unsigned char *out);

/**
 * Reads a HELLO.
 *
 * @param version  receives the sender's version; fields of another version are not read
 * @return false: it is not a HELLO
 */
bool kvf_messages_hello_read(const void *data, size_t bytes, kvf_messages_hello *out, uint32_t *version);

/** A READ or a WRITE. */
typedef struct kvf_messages_request {
    uint32_t number; /**< repeated in the answer */
    uint32_t bytes;  /**< of all runs */
    const unsigned char *list;
    size_t list_bytes;
    const unsigned char *data; /**< WRITE: the bytes to write, run after run */
} kvf_messages_request;

/** Writes the part of a request before the list. */
void kvf_messages_request_write(kvf_messages_kind kind, uint32_t number, uint32_t list_bytes, uint32_t bytes,
                                unsigned char out[MESSAGES_REQUEST_BYTES]);

/** Reads a READ or a WRITE; `out` points into it. False: it is neither, or its lengths contradict each other. */
bool kvf_messages_request_read(const void *data, size_t bytes, kvf_messages_request *out);

/** Writes the kind and a number: the beginning of DATA, DONE, FAILED and TAKEN. */
void kvf_messages_answer_write(kvf_messages_kind kind, uint32_t number,
                               unsigned char out[MESSAGES_ANSWER_BYTES]);

/* ---- lists of runs --------------------------------------------------------------------------------------
 *
 * A list says where the runs lie in the owner's memory, in the order of the data. Runs of one size at equal
 * distances are one entry:
 *
 *   which fields follow (1 byte) | region? | bytes? | begins | count? | distance?
 *
 * Numbers are varints (7 bits a byte, the lowest first, the last byte without the high bit). `begins` is counted
 * from the end of the run before it, and `distance` from one beginning to the next; both may be negative, and are
 * written as 2n, or as -2n - 1. Region, bytes and end are 0 before the first entry.
 */

/** Runs of the owner's memory, at equal distances. */
typedef struct kvf_messages_series {
    uint64_t offset;
    uint64_t bytes; /**< of each run */
    uint64_t count;
    uint64_t distance; /**< from one run to the next; wraps around if the runs descend */
    uint32_t region;
} kvf_messages_series;

/**
 * Writes the remote side of runs; those without bytes are left out.
 *
 * @param out  room for `count` times MESSAGES_RUN_BYTES_MAX
 * @return how many bytes were written
 */
size_t kvf_messages_list_write(const kvf_run *runs, size_t count, unsigned char *out);

/** A place in a list, and in the data that belongs to it. Begins as {.from = {list, bytes, false}}. */
typedef struct kvf_messages_walk {
    kvf_byte_reader from; /**< `cut_off`: the list is malformed */
    uint64_t bytes, end;
    uint32_t region;
    kvf_messages_series series; /**< of which `left` runs are still to come */
    uint64_t left;
    uint64_t at; /**< in the data */
} kvf_messages_walk;

/**
 * Whether all runs of a list lie in registered memory and have `bytes` bytes in all; afterwards the list may be walked
 * without checks.
 *
 * @param region_count  of the regions that the list may name
 * @return KVF_OK, or KVF_E_PARSE, KVF_E_NOT_REGISTERED, KVF_E_RANGE with the run that is wrong
 */
kvf_status kvf_messages_list_check(const void *list, size_t list_bytes, uint64_t bytes,
                                   const kvf_memory *regions, uint32_t region_count);

/** Takes up to `most` runs of a list that was checked: remote is the owner's memory, local the data, as region 0. */
size_t kvf_messages_walk_runs(kvf_messages_walk *walk, kvf_run *out, size_t most);

#endif
