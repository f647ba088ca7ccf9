/*
 * The bodies of all messages, as tables.
 */
#ifndef KVF_WIRE_FORMS_H
#define KVF_WIRE_FORMS_H

#include "wire/fields.h"

/* Rows of the tables of fields, where `struct_type` is the body: FIELD(U64, struct_type, member) or, with further
 * attributes, FIELD(NAME, struct_type, member, .least = 1). The key is the member's name. */
#define KVF_FIELD(kind, struct_type, member, ...)                                                            \
    { .key = #member, .type = KVF_FIELD_##kind, .offset = offsetof(struct_type, member), __VA_ARGS__ }

/** The same for a pointer with a count of `count_member`. */
#define KVF_FIELD_COUNTED(kind, struct_type, member, count_member, ...)                                      \
    KVF_FIELD(kind, struct_type, member, .count_offset = offsetof(struct_type, count_member), __VA_ARGS__)

extern const kvf_body_form kvf_hello_form;
extern const kvf_body_form kvf_welcome_form;
extern const kvf_body_form kvf_refused_form;
extern const kvf_body_form kvf_call_form;   /* kinds are kvf_call_kind */
extern const kvf_body_form kvf_answer_form; /* kinds are kvf_call_kind */
extern const kvf_body_form kvf_command_form;
extern const kvf_body_form kvf_reply_form;

/** Whether a number is a kvf_call_kind. */
bool kvf_call_kind_is_known(uint64_t kind);

/** Checks that a rank is below its engine's count. */
kvf_status kvf_check_rank(uint32_t rank, uint32_t rank_count, kvf_status bad);

#endif
