/*
 * Records: small things that a producer knows of a request beside its cache, and that its consumers need not compute
 * again: the token it has sampled with its log-probabilities, hidden states, the experts that tokens were routed to.
 *
 * A record has a name, which says what its bytes are, and the tokens that it is about. The library carries it and does
 * not look inside: names and forms are agreed upon by the engines.
 */
#ifndef KVFERRY_RECORD_H
#define KVFERRY_RECORD_H

#include <kvferry/status.h>

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVF_MAX_RECORDS 64u                /**< the most that one rank gives with a request */
#define KVF_MAX_RECORDS_BYTES (128u << 10) /**< of all of them together, names not counted */
#define KVF_MAX_RECORD_NAME 64u            /**< bytes of a name */

/** One record. This struct stays as it is. */
typedef struct kvf_record {
    const char *name;    /**< 1 to 64 bytes without control characters */
    uint64_t begin, end; /**< the tokens it is about, half open; they need not be among those that move */
    const void *data;    /**< any bytes; may be NULL if size is 0 */
    size_t size;
    uint32_t rank; /**< of the producer that gave it; ignored in records that are given */
} kvf_record;

#ifdef __cplusplus
}
#endif

#endif
