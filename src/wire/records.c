/*
 * Records as bytes: maps of a name, a range of tokens and data.
 */
#include "wire/fields.h"

/* A record as a message has it. */
typedef struct told_record {
    const char *name;
    uint64_t begin, end;
    kvf_bytes data;
} told_record;

static const kvf_wire_field fields[] = {
    {.key = "name",
     .type = KVF_FIELD_NAME,
     .offset = offsetof(told_record, name),
     .least = 1,
     .most = KVF_MAX_RECORD_NAME},
    {.key = "begin", .type = KVF_FIELD_U64, .offset = offsetof(told_record, begin)},
    {.key = "end", .type = KVF_FIELD_U64, .offset = offsetof(told_record, end)},
    {.key = "data",
     .type = KVF_FIELD_BYTES,
     .offset = offsetof(told_record, data),
     .most = KVF_MAX_RECORDS_BYTES},
};

static const kvf_body_form form = {fields, sizeof fields / sizeof *fields, NULL};

static kvf_status check_record(const kvf_record *record, kvf_status bad) {
    if (!record->name)
        return kvf_fail(KVF_E_INVALID, "name is NULL");
    if (record->size && !record->data)
        return kvf_fail(KVF_E_INVALID, "data is NULL, with %zu bytes", record->size);
    size_t name_bytes = strnlen(record->name, KVF_MAX_RECORD_NAME + 1);
    kvf_status status = kvf_wire_field_check_text(&fields[0], record->name, name_bytes, bad);
    return status ? status : kvf_wire_field_check_range("begin to end", record->begin, record->end, bad);
}

kvf_status kvf_wire_check_records(const kvf_record *records, uint32_t count, kvf_status bad) {
    if (count && !records)
        return kvf_fail(KVF_E_INVALID, "records is NULL, with a count of %u", count);
    kvf_status status = kvf_wire_field_check_size("records", "elements", count, 0, KVF_MAX_RECORDS, bad);
    uint64_t room = KVF_MAX_RECORDS_BYTES;
    for (uint32_t i = 0; i < count && !status; i++) {
        if (records[i].size > room)
            return kvf_fail(bad, "records[%u]: size is %zu; all records together may have %u bytes", i,
                            records[i].size, KVF_MAX_RECORDS_BYTES);
        room -= records[i].size;
        status = check_record(&records[i], bad);
        if (status)
            return kvf_fail_in(status, "records[%u]: ", i);
    }
    return status;
}

kvf_status kvf_wire_records_write(kvf_packing *packing, const char *key, const kvf_record *records,
                                  uint32_t count) {
    (void)key; /* is in the sentences of the check */
    kvf_status status = kvf_wire_check_records(records, count, KVF_E_RANGE);
    if (status)
        return status;
    msgpack_pack_array(&packing->packer, count);
    for (uint32_t i = 0; i < count; i++) {
        const told_record told = {
            records[i].name, records[i].begin, records[i].end, {records[i].data, records[i].size}};
        kvf_wire_fields_write_map(packing, &form, 0, &told);
    }
    return packing->status;
}

kvf_status kvf_wire_records_read(const msgpack_object *object, const char *key, const kvf_record **records,
                                 uint32_t *count, void **storage) {
    const msgpack_object *elements;
    uint32_t size;
    kvf_status status = kvf_wire_field_array(object, key, 0, KVF_MAX_RECORDS, &elements, &size);
    if (status || size == 0)
        return status;
    kvf_record *made = kvf_wire_keep(storage, size, sizeof *made);
    if (!made)
        return kvf_nomem("a message");
    for (uint32_t i = 0; i < size; i++) {
        told_record told = {0};
        status = kvf_wire_fields_read(&elements[i], &form, 0, &told, storage);
        if (status)
            return kvf_fail_in(status, "%s[%u]: ", key, i);
        made[i] = (kvf_record){told.name, told.begin, told.end, told.data.data, told.data.size, 0};
    }
    status = kvf_wire_check_records(made, size, KVF_E_PARSE);
    if (status)
        return status;
    *records = made;
    *count = size;
    return KVF_OK;
}
