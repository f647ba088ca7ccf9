/*
 * HELLO, WELCOME and REFUSED.
 */
#include <sodium.h>

#include "wire/forms.h"

kvf_status kvf_check_rank(uint32_t rank, uint32_t rank_count, kvf_status bad) {
    if (rank < rank_count)
        return KVF_OK;
    return kvf_fail(bad, "rank is %u; it must be below rank_count, which is %u", rank, rank_count);
}

uint64_t kvf_wire_incarnation(const uint8_t secret[KVF_WIRE_SECRET_BYTES]) {
    uint8_t sum[crypto_hash_sha256_BYTES];
    (void)crypto_hash_sha256(sum, secret, KVF_WIRE_SECRET_BYTES);
    return kvf_get_little64(sum);
}

#define COUNT(fields) (sizeof(fields) / sizeof(fields)[0])

static const kvf_wire_field hello_fields[] = {
    KVF_FIELD(NAME, kvf_hello, engine, .least = 1, .most = KVF_WIRE_MAX_NAME),
    KVF_FIELD(U64, kvf_hello, incarnation),
    KVF_FIELD(U32, kvf_hello, rank),
    KVF_FIELD(U32, kvf_hello, rank_count, .most = KVF_WIRE_MAX_RANKS),
    KVF_FIELD(BOOL, kvf_hello, wants_ranks),
    KVF_FIELD(U32, kvf_hello, first_rank),
    KVF_FIELD(BOOL, kvf_hello, wants_card),
    KVF_FIELD(FIXED, kvf_hello, secret, .most = KVF_WIRE_SECRET_BYTES),
    KVF_FIELD(U64, kvf_hello, clock_ns),
};

static kvf_status check_hello(const void *body, kvf_status bad) {
    const kvf_hello *hello = body;
    return kvf_check_rank(hello->rank, hello->rank_count, bad);
}

const kvf_body_form kvf_hello_form = {hello_fields, COUNT(hello_fields), check_hello};

static const kvf_wire_field welcome_fields[] = {
    KVF_FIELD(FIXED, kvf_welcome, session, .most = KVF_WIRE_SESSION_BYTES),
    KVF_FIELD(NAME, kvf_welcome, engine, .least = 1, .most = KVF_WIRE_MAX_NAME),
    KVF_FIELD(U64, kvf_welcome, incarnation),
    KVF_FIELD(U32, kvf_welcome, rank),
    KVF_FIELD(U32, kvf_welcome, rank_count, .most = KVF_WIRE_MAX_RANKS),
    KVF_FIELD(U64, kvf_welcome, clock_ns),
    KVF_FIELD(U64, kvf_welcome, lease_ns),
    KVF_FIELD(BYTES, kvf_welcome, card, .most = KVF_WIRE_MAX_BYTES),
    KVF_FIELD(U32, kvf_welcome, first_rank),
    KVF_FIELD_COUNTED(LIST, kvf_welcome, introductions, introduction_count, .most = KVF_WIRE_MAX_RANKS),
    KVF_FIELD(TEXT, kvf_welcome, facts, .most = KVF_WIRE_MAX_FACTS),
};

/* A directory has no rank. */
static kvf_status check_welcome(const void *body, kvf_status bad) {
    const kvf_welcome *welcome = body;
    return welcome->rank == UINT32_MAX ? KVF_OK : kvf_check_rank(welcome->rank, welcome->rank_count, bad);
}

const kvf_body_form kvf_welcome_form = {welcome_fields, COUNT(welcome_fields), check_welcome};

static const kvf_wire_field refused_fields[] = {
    KVF_FIELD(STATUS, kvf_refused, status),
    KVF_FIELD(SENTENCE, kvf_refused, detail, .most = KVF_WIRE_MAX_DETAIL),
};

const kvf_body_form kvf_refused_form = {refused_fields, COUNT(refused_fields), NULL};
