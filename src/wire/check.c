/*
 * The check before unpacking. msgpack's own unpacker allocates as much as an array's header claims, so this code first
 * checks that the bytes can hold as much.
 */
#include "wire/check.h"

/* What the first byte of an object tells: how many bytes of length follow, how many plain bytes after them, and whether
 * the length counts bytes or objects. */
typedef struct head {
    uint32_t length_bytes; /* 0, 1, 2 or 4: a big-endian length after the first byte */
    uint32_t plain_bytes;  /* after the length, before what the length counts */
    uint32_t length;       /* where length_bytes is 0 */
    uint32_t objects;      /* the length counts: 0 bytes, 1 objects, 2 pairs of objects */
} head;

static bool read_head(uint8_t byte, head *out) {
    /* 0xc0 to 0xdf, in order. 0xc1 is never used. */
    static const head heads[32] = {
        {0, 0, 0, 0},  {0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}, /* nil, none, false, true */
        {1, 0, 0, 0},  {2, 0, 0, 0}, {4, 0, 0, 0},               /* bin */
        {1, 1, 0, 0},  {2, 1, 0, 0}, {4, 1, 0, 0},               /* ext: a type first */
        {0, 4, 0, 0},  {0, 8, 0, 0},                             /* float */
        {0, 1, 0, 0},  {0, 2, 0, 0}, {0, 4, 0, 0}, {0, 8, 0, 0}, /* unsigned */
        {0, 1, 0, 0},  {0, 2, 0, 0}, {0, 4, 0, 0}, {0, 8, 0, 0}, /* signed */
        {0, 2, 0, 0},  {0, 3, 0, 0}, {0, 5, 0, 0}, {0, 9, 0, 0}, /* fixext: a type first */
        {0, 17, 0, 0},                                           /* fixext 16 */
        {1, 0, 0, 0},  {2, 0, 0, 0}, {4, 0, 0, 0},               /* str */
        {2, 0, 0, 1},  {4, 0, 0, 1}, {2, 0, 0, 2}, {4, 0, 0, 2}, /* array, map */
    };
    *out = (head){0};
    if (byte >= 0xc0 && byte <= 0xdf)
        *out = heads[byte - 0xc0];
    else if (byte >= 0xa0 && byte <= 0xbf)
        out->length = byte & 0x1f; /* str */
    else if (byte >= 0x90 && byte <= 0x9f)
        *out = (head){0, 0, byte & 0x0f, 1}; /* array */
    else if (byte >= 0x80 && byte <= 0x8f)
        *out = (head){0, 0, byte & 0x0f, 2}; /* map */
    return byte != 0xc1;
}

static uint32_t big_endian(const uint8_t *at, uint32_t bytes) {
    uint32_t number = 0;
    for (uint32_t i = 0; i < bytes; i++)
        number = number << 8 | at[i];
    return number;
}

kvf_status kvf_wire_check(kvf_bytes bytes) {
    const uint8_t *data = bytes.data;
    size_t at = 0;
    /* Objects still to come at each depth; the sum of all is `pending`. */
    uint64_t open[KVF_WIRE_MAX_DEPTH + 1] = {1};
    uint32_t depth = 0;
    uint64_t pending = 1, seen = 0;
    while (pending) {
        while (open[depth] == 0)
            depth--; /* cannot go below 0, because an object is pending */
        open[depth]--;
        pending--;
        size_t start = at;
        head h;
        if (at == bytes.size)
            return kvf_fail(KVF_E_PARSE, "the %zu bytes end in the middle", bytes.size);
        if (!read_head(data[at++], &h))
            return kvf_fail(KVF_E_PARSE, "byte %zu is 0xc1, which begins nothing in msgpack", start);
        if (++seen > KVF_WIRE_MAX_OBJECTS)
            return kvf_fail(KVF_E_PARSE, "more than %u objects", KVF_WIRE_MAX_OBJECTS);
        if (h.length_bytes + (size_t)h.plain_bytes > bytes.size - at)
            return kvf_fail(KVF_E_PARSE, "the %zu bytes end inside the object at byte %zu", bytes.size,
                            start);
        uint64_t length = h.length_bytes ? big_endian(data + at, h.length_bytes) : h.length;
        at += h.length_bytes + (size_t)h.plain_bytes;
        size_t left = bytes.size - at;
        if (h.objects == 0) {
            if (length > left)
                return kvf_fail(KVF_E_PARSE, "the object at byte %zu claims %llu bytes, and %zu follow",
                                start, (unsigned long long)length, left);
            at += length;
            continue;
        }
        /* Each object is at least one byte. */
        length *= h.objects;
        if (pending + length > left)
            return kvf_fail(KVF_E_PARSE,
                            "the object at byte %zu claims %llu objects in it, and %zu bytes follow", start,
                            (unsigned long long)length, left);
        if (depth == KVF_WIRE_MAX_DEPTH)
            return kvf_fail(KVF_E_PARSE, "the object at byte %zu is nested deeper than %u", start,
                            KVF_WIRE_MAX_DEPTH);
        open[++depth] = length;
        pending += length;
    }
    if (at != bytes.size)
        return kvf_fail(KVF_E_PARSE, "%zu bytes after the end", bytes.size - at);
    return KVF_OK;
}

kvf_status kvf_wire_unpack(kvf_bytes bytes, msgpack_zone *zone, msgpack_object *out) {
    kvf_status status = kvf_wire_check(bytes);
    if (status)
        return status;
    if (!msgpack_zone_init(zone, 1024))
        return kvf_nomem("a message");
    size_t used = 0;
    msgpack_unpack_return result = msgpack_unpack(bytes.data, bytes.size, &used, zone, out);
    if (result == MSGPACK_UNPACK_SUCCESS)
        return KVF_OK;
    msgpack_zone_destroy(zone);
    if (result == MSGPACK_UNPACK_NOMEM_ERROR)
        return kvf_nomem("a message");
    return kvf_fail(KVF_E_PARSE, "not msgpack, at byte %zu", used);
}
