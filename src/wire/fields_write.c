/*
 * Writing a struct by its table.
 */
#include "wire/fields.h"

static const void *at(const void *body, size_t offset) {
    return (const uint8_t *)body + offset;
}

static uint32_t count_of(const kvf_wire_field *field, const void *body) {
    return *(const uint32_t *)at(body, field->count_offset);
}

static kvf_status write_number(kvf_packing *packing, const kvf_wire_field *field, uint64_t value) {
    kvf_status status =
        kvf_wire_field_check_number(field->key, value, field->least, kvf_wire_field_most(field), KVF_E_RANGE);
    msgpack_pack_uint64(&packing->packer, value);
    return status;
}

static kvf_status write_status(kvf_packing *packing, const kvf_wire_field *field, uint32_t value) {
    msgpack_pack_uint32(&packing->packer, value);
    return kvf_wire_field_check_status(field->key, value, KVF_E_RANGE);
}

/* NULL is written as the empty text. */
static kvf_status write_text(kvf_packing *packing, const kvf_wire_field *field, const char *text) {
    if (!text)
        text = "";
    size_t bytes = strnlen(text, (field->type == KVF_FIELD_KEY ? KVF_WIRE_MAX_NAME : field->most) + 1);
    msgpack_pack_str_with_body(&packing->packer, text, bytes);
    return kvf_wire_field_check_text(field, text, bytes, KVF_E_RANGE);
}

static kvf_status write_bytes(kvf_packing *packing, const char *key, kvf_bytes bytes, uint64_t least,
                              uint64_t most) {
    kvf_status status = kvf_wire_field_check_size(key, "bytes", bytes.size, least, most, KVF_E_RANGE);
    if (!status && bytes.size && !bytes.data)
        status = kvf_fail(KVF_E_INVALID, "%s is NULL, with %zu bytes", key, bytes.size);
    if (!status)
        msgpack_pack_bin_with_body(&packing->packer, bytes.data, bytes.size);
    return status;
}

static kvf_status write_range(kvf_packing *packing, const kvf_wire_field *field, const kvf_range *range) {
    msgpack_pack_array(&packing->packer, 2);
    msgpack_pack_uint32(&packing->packer, range->begin);
    msgpack_pack_uint32(&packing->packer, range->end);
    return kvf_wire_field_check_range(field->key, range->begin, range->end, KVF_E_RANGE);
}

/* Little endian, eight bytes each, so that a table of numbers is one msgpack object, however long it is. */
static kvf_status write_numbers(kvf_packing *packing, const kvf_wire_field *field, const uint64_t *numbers,
                                uint32_t count) {
    kvf_status status = kvf_wire_field_check_size(field->key, "entries", count, 0, field->most, KVF_E_RANGE);
    if (status)
        return status;
    uint64_t bytes = 8 * (uint64_t)count * field->width;
    msgpack_pack_bin(&packing->packer, bytes);
    uint8_t chunk[512];
    for (uint64_t i = 0, filled = 0; i < (uint64_t)count * field->width; i++) {
        KVF_ASSERT(filled + 8 <= sizeof chunk);
        kvf_put_little64(chunk + filled, numbers[i]);
        filled += 8;
        if (filled == sizeof chunk || i + 1 == (uint64_t)count * field->width) {
            msgpack_pack_bin_body(&packing->packer, chunk, filled);
            filled = 0;
        }
    }
    return KVF_OK;
}

static kvf_status write_list(kvf_packing *packing, const kvf_wire_field *field, const kvf_bytes *elements,
                             uint32_t count) {
    kvf_status status =
        kvf_wire_field_check_size(field->key, "elements", count, field->least, field->most, KVF_E_RANGE);
    msgpack_pack_array(&packing->packer, count);
    for (uint32_t i = 0; i < count && !status; i++)
        status = write_bytes(packing, field->key, elements[i], 1, KVF_WIRE_MAX_BYTES);
    return status;
}

static kvf_status write_pointed(kvf_packing *packing, const kvf_wire_field *field, const void *body) {
    const void *elements; /* of one of four types */
    memcpy(&elements, at(body, field->offset), sizeof elements);
    uint32_t count = count_of(field, body);
    if (count && !elements)
        return kvf_fail(KVF_E_INVALID, "%s is NULL, with a count of %u", field->key, count);
    if (field->type == KVF_FIELD_NUMBERS)
        return write_numbers(packing, field, elements, count);
    if (field->type == KVF_FIELD_LIST)
        return write_list(packing, field, elements, count);
    if (field->type == KVF_FIELD_RECORDS)
        return kvf_wire_records_write(packing, field->key, elements, count);
    return kvf_wire_groups_write(packing, field->key, elements, count);
}

static kvf_status write_value(kvf_packing *packing, const kvf_wire_field *field, const void *body) {
    const void *value = at(body, field->offset);
    switch (field->type) {
    case KVF_FIELD_U32:
        return write_number(packing, field, *(const uint32_t *)value);
    case KVF_FIELD_U64:
        return write_number(packing, field, *(const uint64_t *)value);
    case KVF_FIELD_BOOL:
        if (*(const bool *)value)
            msgpack_pack_true(&packing->packer);
        else
            msgpack_pack_false(&packing->packer);
        return KVF_OK;
    case KVF_FIELD_STATUS:
        return write_status(packing, field, *(const uint32_t *)value);
    case KVF_FIELD_NAME:
    case KVF_FIELD_KEY:
    case KVF_FIELD_TEXT:
    case KVF_FIELD_SENTENCE:
        return write_text(packing, field, *(const char *const *)value);
    case KVF_FIELD_FIXED:
        msgpack_pack_bin_with_body(&packing->packer, value, field->most);
        return KVF_OK;
    case KVF_FIELD_BYTES:
        return write_bytes(packing, field->key, *(const kvf_bytes *)value, field->least, field->most);
    case KVF_FIELD_RANGE:
        return write_range(packing, field, value);
    case KVF_FIELD_NUMBERS:
    case KVF_FIELD_LIST:
    case KVF_FIELD_GROUPS:
    case KVF_FIELD_RECORDS:
        return write_pointed(packing, field, body);
    }
    return KVF_OK;
}

static bool is_said(const kvf_wire_field *field, uint32_t kind, const void *body) {
    bool nothing = field->type == KVF_FIELD_RECORDS && count_of(field, body) == 0;
    return kvf_wire_field_is_in(field, kind) && !nothing;
}

void kvf_wire_fields_write(kvf_packing *packing, const kvf_body_form *form, uint32_t kind, const void *body) {
    if (!packing->status && form->check)
        packing->status = form->check(body, KVF_E_RANGE);
    for (size_t i = 0; i < form->field_count && !packing->status; i++) {
        const kvf_wire_field *field = &form->fields[i];
        if (!is_said(field, kind, body))
            continue;
        kvf_pack_key(packing, field->key);
        kvf_status status = write_value(packing, field, body);
        if (status)
            packing->status = status;
    }
}

uint32_t kvf_wire_fields_count(const kvf_body_form *form, uint32_t kind, const void *body) {
    uint32_t count = 0;
    for (size_t i = 0; i < form->field_count; i++)
        count += is_said(&form->fields[i], kind, body);
    return count;
}

void kvf_wire_fields_write_map(kvf_packing *packing, const kvf_body_form *form, uint32_t kind,
                               const void *body) {
    msgpack_pack_map(&packing->packer, kvf_wire_fields_count(form, kind, body));
    kvf_wire_fields_write(packing, form, kind, body);
}
