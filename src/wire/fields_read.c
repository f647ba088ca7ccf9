/*
 * Reading a struct by its table.
 */
#include "wire/fields.h"

static const char *type_name(const msgpack_object *object) {
    switch (object->type) {
    case MSGPACK_OBJECT_NIL:
        return "nil";
    case MSGPACK_OBJECT_BOOLEAN:
        return "a boolean";
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return "a number";
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return "a negative number";
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return "a float";
    case MSGPACK_OBJECT_STR:
        return "a text";
    case MSGPACK_OBJECT_ARRAY:
        return "an array";
    case MSGPACK_OBJECT_MAP:
        return "a map";
    case MSGPACK_OBJECT_BIN:
        return "a bin";
    case MSGPACK_OBJECT_EXT:
        return "an ext";
    }
    return "of an unknown type";
}

static kvf_status expect(const msgpack_object *object, const char *key, msgpack_object_type type,
                         const char *wanted) {
    if (object->type == type)
        return KVF_OK;
    return kvf_fail(KVF_E_PARSE, "%s is %s; it must be %s", key, type_name(object), wanted);
}

static bool is_named(const msgpack_object_kv *pair, const char *key, size_t bytes) {
    const msgpack_object *name = &pair->key;
    return name->type == MSGPACK_OBJECT_STR && name->via.str.size == bytes &&
           memcmp(name->via.str.ptr, key, bytes) == 0;
}

bool kvf_wire_field_has(const msgpack_object *map, const char *key) {
    size_t bytes = strlen(key);
    for (uint32_t i = 0; map->type == MSGPACK_OBJECT_MAP && i < map->via.map.size; i++)
        if (is_named(&map->via.map.ptr[i], key, bytes))
            return true;
    return false;
}

kvf_status kvf_wire_field_find(const msgpack_object *map, const char *key, const msgpack_object **out) {
    kvf_status status = expect(map, "the body", MSGPACK_OBJECT_MAP, "a map");
    if (status)
        return status;
    size_t bytes = strlen(key);
    *out = NULL;
    for (uint32_t i = 0; i < map->via.map.size; i++) {
        if (!is_named(&map->via.map.ptr[i], key, bytes))
            continue;
        if (*out)
            return kvf_fail(KVF_E_PARSE, "%s is given twice", key);
        *out = &map->via.map.ptr[i].val;
    }
    return *out ? KVF_OK : kvf_fail(KVF_E_PARSE, "%s is missing", key);
}

kvf_status kvf_wire_field_number(const msgpack_object *object, const char *key, uint64_t least, uint64_t most,
                                 uint64_t *out) {
    kvf_status status = expect(object, key, MSGPACK_OBJECT_POSITIVE_INTEGER, "a number");
    if (status)
        return status;
    *out = object->via.u64;
    return kvf_wire_field_check_number(key, *out, least, most, KVF_E_PARSE);
}

kvf_status kvf_wire_field_array(const msgpack_object *object, const char *key, uint64_t least, uint64_t most,
                                const msgpack_object **elements, uint32_t *count) {
    kvf_status status = expect(object, key, MSGPACK_OBJECT_ARRAY, "an array");
    if (status)
        return status;
    *elements = object->via.array.ptr;
    *count = object->via.array.size;
    return kvf_wire_field_check_size(key, "elements", *count, least, most, KVF_E_PARSE);
}

static kvf_status read_u32(const msgpack_object *object, const kvf_wire_field *field, uint32_t *out) {
    uint64_t number;
    kvf_status status =
        kvf_wire_field_number(object, field->key, field->least, kvf_wire_field_most(field), &number);
    if (!status)
        *out = (uint32_t)number;
    return status;
}

static kvf_status read_status(const msgpack_object *object, const kvf_wire_field *field, uint32_t *out) {
    uint64_t number;
    kvf_status status = kvf_wire_field_number(object, field->key, 0, UINT64_MAX, &number);
    if (!status)
        status = kvf_wire_field_check_status(field->key, number, KVF_E_PARSE);
    if (!status)
        *out = (uint32_t)number;
    return status;
}

static kvf_status read_text(const msgpack_object *object, const kvf_wire_field *field, const char **out,
                            void **storage) {
    kvf_status status = expect(object, field->key, MSGPACK_OBJECT_STR, "a text");
    if (status)
        return status;
    const msgpack_object_str *text = &object->via.str;
    if ((status = kvf_wire_field_check_text(field, text->ptr, text->size, KVF_E_PARSE)))
        return status;
    char *copy = kvf_wire_keep(storage, (size_t)text->size + 1, 1);
    if (!copy)
        return kvf_nomem("a message");
    if (text->size)
        memcpy(copy, text->ptr, text->size);
    copy[text->size] = '\0';
    if (field->type == KVF_FIELD_SENTENCE)
        kvf_hide_controls(copy);
    *out = copy;
    return KVF_OK;
}

static kvf_status read_bytes(const msgpack_object *object, const char *key, uint64_t least, uint64_t most,
                             kvf_bytes *out) {
    kvf_status status = expect(object, key, MSGPACK_OBJECT_BIN, "a bin");
    if (!status)
        status = kvf_wire_field_check_size(key, "bytes", object->via.bin.size, least, most, KVF_E_PARSE);
    if (!status)
        *out = (kvf_bytes){object->via.bin.ptr, object->via.bin.size};
    return status;
}

static kvf_status read_fixed(const msgpack_object *object, const kvf_wire_field *field, void *out) {
    kvf_bytes bytes;
    kvf_status status = read_bytes(object, field->key, field->most, field->most, &bytes);
    if (!status)
        memcpy(out, bytes.data, bytes.size);
    return status;
}

static kvf_status read_range(const msgpack_object *object, const kvf_wire_field *field, kvf_range *out) {
    const msgpack_object *ends;
    uint32_t count;
    uint64_t begin, end;
    kvf_status status = kvf_wire_field_array(object, field->key, 2, 2, &ends, &count);
    if (!status)
        status = kvf_wire_field_number(&ends[0], field->key, 0, UINT32_MAX, &begin);
    if (!status)
        status = kvf_wire_field_number(&ends[1], field->key, 0, UINT32_MAX, &end);
    if (!status)
        status = kvf_wire_field_check_range(field->key, begin, end, KVF_E_PARSE);
    if (!status)
        *out = (kvf_range){(uint32_t)begin, (uint32_t)end};
    return status;
}

static kvf_status read_numbers(const msgpack_object *object, const kvf_wire_field *field,
                               const uint64_t **out, uint32_t *count, void **storage) {
    kvf_bytes bytes;
    kvf_status status = read_bytes(object, field->key, 0, KVF_WIRE_MAX_BYTES, &bytes);
    if (status)
        return status;
    size_t entry = 8 * (size_t)field->width;
    if (bytes.size % entry)
        return kvf_fail(KVF_E_PARSE, "%s has %zu bytes, which are not entries of %zu", field->key, bytes.size,
                        entry);
    status =
        kvf_wire_field_check_size(field->key, "entries", bytes.size / entry, 0, field->most, KVF_E_PARSE);
    if (status || bytes.size == 0)
        return status;
    uint64_t *numbers = kvf_wire_keep(storage, bytes.size / 8, 8);
    if (!numbers)
        return kvf_nomem("a message");
    for (size_t i = 0; i < bytes.size / 8; i++)
        numbers[i] = kvf_get_little64((const uint8_t *)bytes.data + 8 * i);
    *out = numbers;
    *count = (uint32_t)(bytes.size / entry);
    return KVF_OK;
}

static kvf_status read_list(const msgpack_object *object, const kvf_wire_field *field, const kvf_bytes **out,
                            uint32_t *count, void **storage) {
    const msgpack_object *elements;
    uint32_t size;
    kvf_status status = kvf_wire_field_array(object, field->key, field->least, field->most, &elements, &size);
    if (status)
        return status;
    kvf_bytes *list = kvf_wire_keep(storage, size, sizeof *list);
    if (!list)
        return kvf_nomem("a message");
    for (uint32_t i = 0; i < size && !status; i++)
        status = read_bytes(&elements[i], field->key, 1, KVF_WIRE_MAX_BYTES, &list[i]);
    *out = list;
    *count = size;
    return status;
}

static kvf_status read_value(const msgpack_object *object, const kvf_wire_field *field, void *body,
                             void **storage) {
    void *value = (uint8_t *)body + field->offset;
    uint32_t *count = (uint32_t *)(void *)((uint8_t *)body + field->count_offset);
    kvf_status status;
    switch (field->type) {
    case KVF_FIELD_U32:
        return read_u32(object, field, value);
    case KVF_FIELD_U64:
        return kvf_wire_field_number(object, field->key, field->least, kvf_wire_field_most(field), value);
    case KVF_FIELD_BOOL:
        if (!(status = expect(object, field->key, MSGPACK_OBJECT_BOOLEAN, "a boolean")))
            *(bool *)value = object->via.boolean;
        return status;
    case KVF_FIELD_STATUS:
        return read_status(object, field, value);
    case KVF_FIELD_NAME:
    case KVF_FIELD_KEY:
    case KVF_FIELD_TEXT:
    case KVF_FIELD_SENTENCE:
        return read_text(object, field, value, storage);
    case KVF_FIELD_FIXED:
        return read_fixed(object, field, value);
    case KVF_FIELD_BYTES:
        return read_bytes(object, field->key, field->least, field->most, value);
    case KVF_FIELD_RANGE:
        return read_range(object, field, value);
    case KVF_FIELD_NUMBERS:
        return read_numbers(object, field, value, count, storage);
    case KVF_FIELD_LIST:
        return read_list(object, field, value, count, storage);
    case KVF_FIELD_GROUPS:
        return kvf_wire_groups_read(object, field->key, value, count, storage);
    case KVF_FIELD_RECORDS:
        return kvf_wire_records_read(object, field->key, value, count, storage);
    }
    return KVF_OK;
}

kvf_status kvf_wire_fields_read(const msgpack_object *map, const kvf_body_form *form, uint32_t kind,
                                void *body, void **storage) {
    for (size_t i = 0; i < form->field_count; i++) {
        const kvf_wire_field *field = &form->fields[i];
        bool may_miss = field->type == KVF_FIELD_RECORDS;
        if (!kvf_wire_field_is_in(field, kind) || (may_miss && !kvf_wire_field_has(map, field->key)))
            continue;
        const msgpack_object *object;
        kvf_status status = kvf_wire_field_find(map, field->key, &object);
        if (!status)
            status = read_value(object, field, body, storage);
        if (status)
            return status;
    }
    return form->check ? form->check(body, KVF_E_PARSE) : KVF_OK;
}
