/*
 * Block tables as bytes. Ids are little endian, four bytes each, in one of two forms, whichever is shorter:
 *
 *   ids    every id
 *   runs   pairs of a first id and a count: ids that ascend by one, or repetitions of KVF_NO_BLOCK
 */
#include "model/model.h"
#include "wire/fields.h"

static kvf_status check_group(const void *body, kvf_status bad) {
    const kvf_wire_group *group = body;
    return kvf_wire_field_check_range("begin to end", group->begin, group->end, bad);
}

static const kvf_wire_field fields[] = {
    {.key = "first_block",
     .type = KVF_FIELD_U32,
     .offset = offsetof(kvf_wire_group, table) + offsetof(kvf_block_table, first_block)},
    {.key = "begin", .type = KVF_FIELD_U64, .offset = offsetof(kvf_wire_group, begin)},
    {.key = "end", .type = KVF_FIELD_U64, .offset = offsetof(kvf_wire_group, end)},
};

static const kvf_body_form form = {fields, sizeof fields / sizeof *fields, check_group};

/* How many ids from `ids` on are one run. KVF_NO_BLOCK never follows the id below it in a run. */
static uint32_t run_length(const uint32_t *ids, uint32_t count) {
    uint32_t n = 1;
    uint32_t step = ids[0] == KVF_NO_BLOCK ? 0 : 1;
    while (n < count && ids[n] == ids[0] + n * step && (step == 0 || ids[n] != KVF_NO_BLOCK))
        n++;
    return n;
}

static void write_runs(kvf_packing *packing, const uint32_t *ids, uint32_t count) {
    for (uint32_t i = 0, n; i < count; i += n) {
        n = run_length(ids + i, count - i);
        uint8_t pair[8];
        kvf_put_little32(pair, ids[i]);
        kvf_put_little32(pair + 4, n);
        msgpack_pack_bin_body(&packing->packer, pair, sizeof pair);
    }
}

static void write_ids(kvf_packing *packing, const uint32_t *ids, uint32_t count) {
    uint8_t chunk[512];
    for (uint32_t i = 0, filled = 0; i < count; i++) {
        kvf_put_little32(chunk + filled, ids[i]);
        filled += 4;
        if (filled == sizeof chunk || i + 1 == count) {
            msgpack_pack_bin_body(&packing->packer, chunk, filled);
            filled = 0;
        }
    }
}

static kvf_status write_group(kvf_packing *packing, const kvf_wire_group *group) {
    const kvf_block_table *table = &group->table;
    if (table->count && !table->ids)
        return kvf_fail(KVF_E_INVALID, "ids is NULL, with a count of %u", table->count);
    uint32_t runs = 0;
    for (uint32_t i = 0; i < table->count; runs++)
        i += run_length(table->ids + i, table->count - i);
    msgpack_pack_map(&packing->packer, (size_t)kvf_wire_fields_count(&form, 0, group) + 1);
    kvf_wire_fields_write(packing, &form, 0, group);
    bool folded = 2 * runs < table->count;
    kvf_pack_key(packing, folded ? "runs" : "ids");
    msgpack_pack_bin(&packing->packer, folded ? 8 * (size_t)runs : 4 * (size_t)table->count);
    if (folded)
        write_runs(packing, table->ids, table->count);
    else
        write_ids(packing, table->ids, table->count);
    return packing->status;
}

kvf_status kvf_wire_groups_write(kvf_packing *packing, const char *key, const kvf_wire_group *groups,
                                 uint32_t count) {
    kvf_status status =
        kvf_wire_field_check_size(key, "elements", count, 0, KVF_MODEL_MAX_GROUPS, KVF_E_RANGE);
    uint64_t blocks = 0;
    msgpack_pack_array(&packing->packer, count);
    for (uint32_t i = 0; i < count && !status; i++) {
        blocks += groups[i].table.count;
        status =
            kvf_wire_field_check_size("the block tables", "ids", blocks, 0, KVF_WIRE_MAX_BLOCKS, KVF_E_RANGE);
        if (!status)
            status = write_group(packing, &groups[i]);
        if (status)
            return kvf_fail_in(status, "%s[%u]: ", key, i);
    }
    return status;
}

/* ---- parts ----------------------------------------------------------------------------------- */

bool kvf_wire_part(const kvf_wire_group *groups, uint32_t count, uint32_t first_id, kvf_wire_group *part) {
    uint32_t room = KVF_WIRE_MAX_BLOCKS,
             passed = first_id; /* ids still to skip, because an earlier message had them */
    bool more = false;
    for (uint32_t g = 0; g < count; g++) {
        const kvf_block_table *table = &groups[g].table;
        uint32_t from = passed < table->count ? passed : table->count;
        uint32_t n = table->count - from < room ? table->count - from : room;
        passed -= from;
        room -= n;
        more = more || from + n < table->count;
        part[g] = groups[g];
        part[g].table = (kvf_block_table){n > 0 ? table->ids + from : NULL, n, table->first_block + from};
    }
    return more;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The ids of a group that is being read, still encoded. */
typedef struct coded_table {
    const uint8_t *data;
    size_t bytes;
    bool folded;
} coded_table;

/* Finds the form of the ids, and their number. */
static kvf_status find_ids(const msgpack_object *map, coded_table *out, uint64_t *count) {
    const msgpack_object *ids;
    *out = (coded_table){0};
    *count = 0;
    out->folded = kvf_wire_field_has(map, "runs");
    const char *key = out->folded ? "runs" : "ids";
    kvf_status status = kvf_wire_field_find(map, key, &ids);
    if (status)
        return status;
    if (ids->type != MSGPACK_OBJECT_BIN)
        return kvf_fail(KVF_E_PARSE, "%s is not a msgpack bin", key);
    out->data = (const uint8_t *)ids->via.bin.ptr;
    out->bytes = ids->via.bin.size;
    size_t entry = out->folded ? 8 : 4;
    if (out->bytes % entry)
        return kvf_fail(KVF_E_PARSE, "%s has %zu bytes, which are not entries of %zu", key, out->bytes,
                        entry);
    if (!out->folded) {
        *count = out->bytes / 4;
        return KVF_OK;
    }
    for (size_t at = 0; at < out->bytes; at += 8) {
        uint64_t first = kvf_get_little32(out->data + at), n = kvf_get_little32(out->data + at + 4);
        if (n == 0 || (first != KVF_NO_BLOCK && first + n > KVF_NO_BLOCK))
            return kvf_fail(KVF_E_PARSE, "runs has %llu ids from %llu on; block ids are below %u",
                            (unsigned long long)n, (unsigned long long)first, KVF_NO_BLOCK);
        *count += n; /* cannot overflow: fewer than 2^32 runs of fewer than 2^32 ids */
    }
    return KVF_OK;
}

static void read_ids(const coded_table *from, uint32_t *ids) {
    if (!from->folded) {
        for (size_t at = 0; at < from->bytes; at += 4)
            *ids++ = kvf_get_little32(from->data + at);
        return;
    }
    for (size_t at = 0; at < from->bytes; at += 8) {
        uint32_t first = kvf_get_little32(from->data + at);
        uint32_t n = kvf_get_little32(from->data + at + 4);
        for (uint32_t i = 0; i < n; i++)
            *ids++ = first == KVF_NO_BLOCK ? first : first + i;
    }
}

/* `room` is how many ids this group and later ones may have. */
static kvf_status read_group(const msgpack_object *map, kvf_wire_group *out, uint64_t *room, void **storage) {
    kvf_status status = kvf_wire_fields_read(map, &form, 0, out, storage);
    coded_table coded;
    uint64_t count;
    if (status || (status = find_ids(map, &coded, &count)))
        return status;
    if (count > *room)
        return kvf_fail(KVF_E_PARSE, "the block tables have more than %u ids", KVF_WIRE_MAX_BLOCKS);
    *room -= count;
    if (count == 0)
        return KVF_OK;
    uint32_t *ids = kvf_wire_keep(storage, count, sizeof *ids);
    if (!ids)
        return kvf_nomem("a message");
    read_ids(&coded, ids);
    out->table.ids = ids;
    out->table.count = (uint32_t)count;
    return KVF_OK;
}

kvf_status kvf_wire_groups_read(const msgpack_object *object, const char *key, const kvf_wire_group **groups,
                                uint32_t *count, void **storage) {
    const msgpack_object *elements;
    uint32_t size;
    kvf_status status = kvf_wire_field_array(object, key, 0, KVF_MODEL_MAX_GROUPS, &elements, &size);
    if (status || size == 0)
        return status;
    kvf_wire_group *made = kvf_wire_keep(storage, size, sizeof *made);
    if (!made)
        return kvf_nomem("a message");
    memset(made, 0, size * sizeof *made);
    uint64_t room = KVF_WIRE_MAX_BLOCKS;
    for (uint32_t i = 0; i < size; i++)
        if ((status = read_group(&elements[i], &made[i], &room, storage)))
            return kvf_fail_in(status, "%s[%u]: ", key, i);
    *groups = made;
    *count = size;
    return KVF_OK;
}
