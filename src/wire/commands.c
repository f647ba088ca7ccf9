/*
 * COMMAND and REPLY.
 */
#include "wire/forms.h"

#define COUNT(fields) (sizeof(fields) / sizeof(fields)[0])

static const kvf_wire_field command_fields[] = {
    KVF_FIELD(FIXED, kvf_command_body, id, .most = KVF_WIRE_COMMAND_BYTES),
    KVF_FIELD(NAME, kvf_command_body, verb, .least = 1, .most = KVF_WIRE_MAX_VERB),
    KVF_FIELD(BYTES, kvf_command_body, request, .most = KVF_WIRE_MAX_REQUEST),
    KVF_FIELD(NAME, kvf_command_body, engine, .most = KVF_WIRE_MAX_NAME),
    KVF_FIELD(NAME, kvf_command_body, endpoint, .most = KVF_WIRE_MAX_NAME),
    KVF_FIELD(KEY, kvf_command_body, public_key),
    KVF_FIELD(U64, kvf_command_body, time_ns),
    KVF_FIELD_COUNTED(RECORDS, kvf_command_body, records, record_count),
};

const kvf_body_form kvf_command_form = {command_fields, COUNT(command_fields), NULL};

static const kvf_wire_field reply_fields[] = {
    KVF_FIELD(FIXED, kvf_reply, id, .most = KVF_WIRE_COMMAND_BYTES),
    KVF_FIELD(STATUS, kvf_reply, status),
    KVF_FIELD(SENTENCE, kvf_reply, detail, .most = KVF_WIRE_MAX_DETAIL),
    KVF_FIELD_COUNTED(RECORDS, kvf_reply, records, record_count),
};

const kvf_body_form kvf_reply_form = {reply_fields, COUNT(reply_fields), NULL};
