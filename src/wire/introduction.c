/*
 * The introduction of one rank of an engine: a msgpack map of its own, which others pass on as bytes.
 */
#include "wire/check.h"
#include "wire/forms.h"

static const kvf_wire_field fields[] = {
    KVF_FIELD(NAME, kvf_introduction, engine, .least = 1, .most = KVF_WIRE_MAX_NAME),
    KVF_FIELD(U64, kvf_introduction, incarnation),
    KVF_FIELD(U32, kvf_introduction, rank),
    KVF_FIELD(U32, kvf_introduction, rank_count, .most = KVF_WIRE_MAX_RANKS),
    KVF_FIELD(NAME, kvf_introduction, endpoint, .most = KVF_WIRE_MAX_NAME),
    KVF_FIELD(KEY, kvf_introduction, public_key),
    KVF_FIELD(FIXED, kvf_introduction, digest, .most = KVF_WIRE_DIGEST_BYTES),
    KVF_FIELD(BYTES, kvf_introduction, shard, .least = 1, .most = KVF_WIRE_MAX_BYTES),
    KVF_FIELD(TEXT, kvf_introduction, facts, .most = KVF_WIRE_MAX_FACTS),
};

static kvf_status check_introduction(const void *body, kvf_status bad) {
    const kvf_introduction *introduction = body;
    return kvf_check_rank(introduction->rank, introduction->rank_count, bad);
}

static const kvf_body_form form = {fields, sizeof fields / sizeof fields[0], check_introduction};

kvf_status kvf_wire_encode_introduction(const kvf_introduction *introduction, kvf_wire_buffer *out) {
    kvf_packing packing;
    kvf_packing_start(&packing);
    kvf_wire_fields_write_map(&packing, &form, 0, introduction);
    kvf_status status = kvf_packing_end(&packing, out);
    return status ? kvf_fail_in(status, "introduction: ") : KVF_OK;
}

kvf_status kvf_wire_decode_introduction(kvf_bytes bytes, kvf_introduction *out, void **storage) {
    *out = (kvf_introduction){0};
    *storage = NULL;
    msgpack_zone zone;
    msgpack_object map;
    kvf_status status = kvf_wire_unpack(bytes, &zone, &map);
    if (!status) {
        /* One piece, for one kvf_free(): all texts, each with a zero byte after it, which needs no more room than its
         * head in `bytes`. */
        status = kvf_wire_keep_room(storage, bytes.size);
        if (!status)
            status = kvf_wire_fields_read(&map, &form, 0, out, storage);
        msgpack_zone_destroy(&zone);
    }
    if (!status)
        return KVF_OK;
    kvf_wire_discard(storage);
    *out = (kvf_introduction){0};
    return kvf_fail_in(status, "introduction: ");
}
