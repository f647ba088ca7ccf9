/*
 * Calls and their answers: which fields each kind has.
 */
#include "model/model.h"
#include "wire/forms.h"

#define COUNT(fields) (sizeof(fields) / sizeof(fields)[0])

/* Sets of kinds. */
#define JOIN (1u << KVF_CALL_JOIN)
#define ACQUIRE (1u << KVF_CALL_ACQUIRE)
#define RELEASE (1u << KVF_CALL_RELEASE)
#define BEAT (1u << KVF_CALL_BEAT)
#define EXPECT (1u << KVF_CALL_EXPECT)
#define WRITTEN (1u << KVF_CALL_WRITTEN)
#define WITHDRAW (1u << KVF_CALL_WITHDRAW)
#define CHECKSUM (1u << KVF_CALL_CHECKSUM)

#define MAX_NUMBERS (KVF_WIRE_MAX_BYTES / 8)

const char *kvf_call_kind_name(kvf_call_kind kind) {
    switch (kind) {
    case KVF_CALL_JOIN:
        return "JOIN";
    case KVF_CALL_ACQUIRE:
        return "ACQUIRE";
    case KVF_CALL_RELEASE:
        return "RELEASE";
    case KVF_CALL_BEAT:
        return "BEAT";
    case KVF_CALL_EXPECT:
        return "EXPECT";
    case KVF_CALL_WRITTEN:
        return "WRITTEN";
    case KVF_CALL_WITHDRAW:
        return "WITHDRAW";
    case KVF_CALL_CHECKSUM:
        return "CHECKSUM";
    case KVF_CALL_PROBE:
        return "PROBE";
    }
    return "unknown";
}

bool kvf_call_kind_is_known(uint64_t kind) {
    return kind >= KVF_CALL_JOIN && kind <= KVF_CALL_LAST;
}

static const kvf_wire_field call_fields[] = {
    KVF_FIELD(FIXED, kvf_call_body, session, .most = KVF_WIRE_SESSION_BYTES),
    KVF_FIELD(U64, kvf_call_body, number),
    KVF_FIELD(U32, kvf_call_body, kind, .least = KVF_CALL_JOIN, .most = KVF_CALL_LAST),
    KVF_FIELD(BYTES, kvf_call_body, request, .least = 1, .most = KVF_WIRE_MAX_REQUEST,
              .kinds = ACQUIRE | RELEASE | EXPECT | WRITTEN | WITHDRAW),
    KVF_FIELD(U64, kvf_call_body, generation,
              .kinds = JOIN | RELEASE | EXPECT | WRITTEN | WITHDRAW | CHECKSUM),
    KVF_FIELD(U64, kvf_call_body, time_ns, .kinds = ACQUIRE | EXPECT),
    KVF_FIELD(U64, kvf_call_body, earlier, .kinds = RELEASE | WITHDRAW),
    KVF_FIELD(U32, kvf_call_body, rank_count, .least = 1, .most = KVF_WIRE_MAX_RANKS,
              .kinds = ACQUIRE | RELEASE | EXPECT),
    KVF_FIELD(STATUS, kvf_call_body, status, .kinds = RELEASE | WRITTEN),
    KVF_FIELD(SENTENCE, kvf_call_body, detail, .most = KVF_WIRE_MAX_DETAIL, .kinds = WRITTEN),
    KVF_FIELD(U64, kvf_call_body, bytes, .kinds = WRITTEN),
    KVF_FIELD_COUNTED(RECORDS, kvf_call_body, records, record_count, .kinds = WRITTEN),
    KVF_FIELD_COUNTED(GROUPS, kvf_call_body, groups, group_count, .kinds = EXPECT),
    KVF_FIELD(U32, kvf_call_body, first_id, .most = KVF_WIRE_MAX_TABLE_IDS, .kinds = ACQUIRE | EXPECT),
    KVF_FIELD(BOOL, kvf_call_body, more, .kinds = EXPECT),
    KVF_FIELD(BYTES, kvf_call_body, introduction, .least = 1, .most = KVF_WIRE_MAX_BYTES, .kinds = JOIN),
    KVF_FIELD(U32, kvf_call_body, stage, .most = KVF_JOIN_ADDS_STAGE, .kinds = JOIN),
    KVF_FIELD(U32, kvf_call_body, packed, .most = 1, .kinds = EXPECT),
    KVF_FIELD(BYTES, kvf_call_body, card, .most = KVF_WIRE_MAX_BYTES, .kinds = JOIN),
    KVF_FIELD_COUNTED(NUMBERS, kvf_call_body, leases, lease_count, .width = 1, .most = MAX_NUMBERS,
                      .kinds = BEAT),
    KVF_FIELD_COUNTED(NUMBERS, kvf_call_body, expectations, expectation_count, .width = 2,
                      .most = MAX_NUMBERS / 2, .kinds = BEAT),
    KVF_FIELD(U64, kvf_call_body, clock_ns, .kinds = BEAT),
    KVF_FIELD(U32, kvf_call_body, group, .most = KVF_MODEL_MAX_GROUPS - 1, .kinds = CHECKSUM),
    KVF_FIELD(U32, kvf_call_body, part, .most = KVF_MODEL_MAX_PARTS - 1, .kinds = CHECKSUM),
    KVF_FIELD(RANGE, kvf_call_body, layers, .kinds = CHECKSUM),
    KVF_FIELD(RANGE, kvf_call_body, units, .kinds = CHECKSUM),
    KVF_FIELD(U64, kvf_call_body, begin, .kinds = CHECKSUM),
    KVF_FIELD(U64, kvf_call_body, end, .kinds = CHECKSUM),
};

static kvf_status check_call(const void *body, kvf_status bad) {
    const kvf_call_body *call = body;
    if (call->earlier && call->earlier >= call->number)
        return kvf_fail(bad, "earlier is %llu; it must be below number, which is %llu",
                        (unsigned long long)call->earlier, (unsigned long long)call->number);
    if (call->kind != KVF_CALL_CHECKSUM)
        return KVF_OK;
    return kvf_wire_field_check_range("begin to end", call->begin, call->end, bad);
}

const kvf_body_form kvf_call_form = {call_fields, COUNT(call_fields), check_call};

static const kvf_wire_field answer_fields[] = {
    KVF_FIELD(FIXED, kvf_answer, session, .most = KVF_WIRE_SESSION_BYTES),
    KVF_FIELD(U64, kvf_answer, number),
    KVF_FIELD(U32, kvf_answer, kind, .least = KVF_CALL_JOIN, .most = KVF_CALL_LAST),
    KVF_FIELD(STATUS, kvf_answer, status),
    KVF_FIELD(SENTENCE, kvf_answer, detail, .most = KVF_WIRE_MAX_DETAIL),
    KVF_FIELD(U64, kvf_answer, generation, .kinds = ACQUIRE),
    KVF_FIELD(U64, kvf_answer, time_ns, .kinds = ACQUIRE | BEAT),
    KVF_FIELD(U32, kvf_answer, stage, .most = 1, .kinds = JOIN),
    KVF_FIELD_COUNTED(GROUPS, kvf_answer, groups, group_count, .kinds = ACQUIRE),
    KVF_FIELD(U32, kvf_answer, first_id, .most = KVF_WIRE_MAX_TABLE_IDS, .kinds = ACQUIRE),
    KVF_FIELD(BOOL, kvf_answer, more, .kinds = ACQUIRE),
    KVF_FIELD_COUNTED(RECORDS, kvf_answer, records, record_count, .kinds = ACQUIRE),
    KVF_FIELD_COUNTED(NUMBERS, kvf_answer, gone, gone_count, .width = 1, .most = MAX_NUMBERS, .kinds = BEAT),
    KVF_FIELD_COUNTED(NUMBERS, kvf_answer, sums, sum_count, .width = 1, .most = MAX_NUMBERS,
                      .kinds = CHECKSUM),
    KVF_FIELD(U64, kvf_answer, clock_ns, .kinds = BEAT),
};

const kvf_body_form kvf_answer_form = {answer_fields, COUNT(answer_fields), NULL};
