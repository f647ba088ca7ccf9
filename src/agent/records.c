#include "agent/records.h"

void kvf_records_free(kvf_records *records) {
    kvf_free(records->all);
    *records = (kvf_records){0};
}

/* The bytes that the names and data of some records take. */
static size_t bytes_of(const kvf_record *records, uint32_t count) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        bytes += strlen(records[i].name) + 1 + records[i].size;
    return bytes;
}

/* Copies the name and data of a record; returns where the next record's go. */
static char *put(kvf_record *out, const kvf_record *record, char *at) {
    size_t name_bytes = strlen(record->name) + 1;
    *out = *record;
    out->name = memcpy(at, record->name, name_bytes);
    at += name_bytes;
    out->data = at;
    if (record->size > 0)
        memcpy(at, record->data, record->size);
    return at + record->size;
}

size_t kvf_records_bytes(const kvf_records *records) {
    return records->count * sizeof *records->all + bytes_of(records->all, records->count);
}

/* Puts one set behind the other. Sizes were checked on arrival: 128 KiB from each rank. */
static kvf_status join(const kvf_records *first, const kvf_records *second, kvf_records *out) {
    const kvf_records *const sets[] = {first, second};
    uint32_t count = first->count + second->count;
    size_t bytes = bytes_of(first->all, first->count) + bytes_of(second->all, second->count);
    *out = (kvf_records){0};
    if (count == 0)
        return KVF_OK;
    out->all = kvf_alloc(1, count * sizeof *out->all + bytes);
    if (!out->all)
        return kvf_nomem("records");
    char *at = (char *)(out->all + count);
    for (uint32_t s = 0; s < 2; s++)
        for (uint32_t i = 0; i < sets[s]->count; i++)
            at = put(&out->all[out->count++], &sets[s]->all[i], at);
    return KVF_OK;
}

kvf_status kvf_records_take(kvf_records *records, kvf_records *from) {
    kvf_records joined;
    if (records->count == 0) {
        joined = *from;
        *from = (kvf_records){0};
    } else {
        kvf_status status = join(records, from, &joined);
        if (status)
            return status;
        kvf_records_free(from);
    }
    kvf_free(records->all);
    *records = joined;
    return KVF_OK;
}

kvf_status kvf_records_add(kvf_records *records, const kvf_record *more, uint32_t count, uint32_t rank) {
    if (count == 0)
        return KVF_OK;
    kvf_status status = kvf_wire_check_records(more, count, KVF_E_RANGE);
    kvf_records added = {(kvf_record *)more, count}; /* only read */
    kvf_records joined = {0};
    if (!status)
        status = join(records, &added, &joined);
    for (uint32_t i = records->count; i < joined.count; i++)
        joined.all[i].rank = rank;
    if (!status)
        status = kvf_wire_check_records(joined.all, joined.count, KVF_E_RANGE);
    if (status) {
        kvf_records_free(&joined);
        return status;
    }
    kvf_free(records->all);
    *records = joined;
    return KVF_OK;
}
