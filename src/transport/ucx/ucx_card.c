/*
 * The UCX fabric's part of the card:
 *
 *   magic 4 | sum 8 | beacon 40 | UCX version: major 4, minor 4 | worker address: length 4, bytes | regions 4 |
 *   for each region: address 8, bytes 8, key: length 4, bytes; a withheld region has bytes, but address 0 and no key
 *
 * All numbers are little endian. The sum detects damage, not malice: the worker address and the keys are in
 * UCX's own format, and UCX reads them without knowing their length. A copy followed by enough zeros keeps UCX inside
 * our memory, but we cannot control what UCX does with a forged address: cards must come from trusted peers.
 */
#include "base/bytes.h"
#include "transport/ucx/ucx.h"

#define MAGIC 0x3258554bu /* "KUX2" */
#define SUM_AT 4
#define HEADER_BYTES (SUM_AT + 8)
#define REGION_HEADER_BYTES 20u
#define BLOB_MAX (16u << 10)
/* A key has up to 64 parts of up to 255 bytes, each behind its length. An address is a list too, and ends
 * at the latest once UCX has read as many transports as it has numbers for. */
#define BLOB_TAIL (32u << 10)

/* ---- writing --------------------------------------------------------------------------------- */

static kvf_status put_number(kvf_buffer *out, uint64_t number, size_t bytes) {
    unsigned char little[8];
    kvf_put_number(little, number, bytes);
    return kvf_buffer_add(out, little, bytes);
}

static kvf_status put_blob(kvf_buffer *out, const void *data, uint32_t bytes) {
    kvf_status status = put_number(out, bytes, 4);
    return status ? status : kvf_buffer_add(out, data, bytes);
}

static kvf_status put_region(kvf_buffer *out, const kvf_ucx_card_region *region) {
    kvf_status status = put_number(out, region->address, 8);
    if (!status)
        status = put_number(out, region->bytes, 8);
    if (!status)
        status = put_blob(out, region->key, region->key_bytes);
    return status;
}

uint64_t kvf_ucx_card_sum(const void *data, size_t bytes) {
    const unsigned char *at = data;
    uint64_t sum = kvf_byte_sum(KVF_BYTE_SUM_START, at, bytes < SUM_AT ? bytes : SUM_AT);
    return bytes > HEADER_BYTES ? kvf_byte_sum(sum, at + HEADER_BYTES, bytes - HEADER_BYTES) : sum;
}

kvf_status kvf_ucx_card_write(const kvf_ucx_card *card, kvf_buffer *out) {
    size_t begin = out->length;
    kvf_status status = put_number(out, MAGIC, 4);
    if (!status)
        status = put_number(out, 0, 8);
    if (!status)
        status = kvf_buffer_add(out, card->beacon, sizeof card->beacon);
    if (!status)
        status = put_number(out, card->major, 4);
    if (!status)
        status = put_number(out, card->minor, 4);
    if (!status)
        status = put_blob(out, card->worker, card->worker_bytes);
    if (!status)
        status = put_number(out, card->region_count, 4);
    for (uint32_t i = 0; i < card->region_count && !status; i++)
        status = put_region(out, &card->regions[i]);
    if (status) {
        out->length = begin;
        return status;
    }
    uint64_t sum = kvf_ucx_card_sum(out->data + begin, out->length - begin);
    kvf_put_number(out->data + begin + SUM_AT, sum, 8);
    return KVF_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool take_number(kvf_byte_reader *in, size_t bytes, uint64_t *out) {
    *out = kvf_take_number(in, bytes);
    return !in->cut_off;
}

static kvf_status cut_off(const char *what) {
    return kvf_fail(KVF_E_PARSE, "UCX card: it ends inside %s", what);
}

static kvf_status take_blob(kvf_byte_reader *in, const char *what, const void **out, uint32_t *out_bytes) {
    uint64_t bytes;
    if (!take_number(in, 4, &bytes))
        return cut_off(what);
    if (bytes == 0 || bytes > BLOB_MAX)
        return kvf_fail(KVF_E_PARSE, "UCX card: %s has %llu bytes; allowed: 1 to %u", what,
                        (unsigned long long)bytes, BLOB_MAX);
    *out = kvf_take_bytes(in, bytes);
    *out_bytes = (uint32_t)bytes;
    return *out ? KVF_OK : cut_off(what);
}

static kvf_status take_region(kvf_byte_reader *in, uint32_t i, kvf_ucx_card_region *out) {
    uint64_t end;
    uint64_t no_key;
    *out = (kvf_ucx_card_region){0};
    if (!take_number(in, 8, &out->address) || !take_number(in, 8, &out->bytes))
        return cut_off("a region");
    if (out->address == 0) { /* a number without memory, or memory that is withheld */
        if (take_number(in, 4, &no_key) && no_key == 0)
            return KVF_OK;
        return kvf_fail(KVF_E_PARSE, "UCX card: region %u has no %s, and a key", i,
                        out->bytes == 0 ? "bytes" : "address");
    }
    if (out->bytes == 0 || !kvf_add(out->address, out->bytes, &end))
        return kvf_fail(KVF_E_PARSE, "UCX card: region %u has %llu bytes at %#llx; allowed: 1 to 2^64 in all",
                        i, (unsigned long long)out->bytes, (unsigned long long)out->address);
    return take_blob(in, "a memory key", &out->key, &out->key_bytes);
}

static kvf_status take_regions(kvf_byte_reader *in, kvf_ucx_card *card) {
    uint64_t count;
    if (!take_number(in, 4, &count))
        return cut_off("the number of regions");
    if (count > in->left / REGION_HEADER_BYTES)
        return kvf_fail(KVF_E_PARSE, "UCX card: %llu regions do not fit in the %zu bytes that follow",
                        (unsigned long long)count, in->left);
    card->regions = kvf_alloc(count, sizeof *card->regions);
    if (!card->regions)
        return kvf_nomem("a peer's regions");
    card->region_count = (uint32_t)count;
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < count && !status; i++)
        status = take_region(in, i, &card->regions[i]);
    if (!status && in->left)
        status = kvf_fail(KVF_E_PARSE, "UCX card: %zu bytes after its end", in->left);
    return status;
}

kvf_status kvf_ucx_card_read(const void *data, size_t bytes, kvf_ucx_card *out) {
    *out = (kvf_ucx_card){0};
    kvf_byte_reader in = {data, bytes, false};
    uint64_t magic, sum;
    if (!take_number(&in, 4, &magic) || !take_number(&in, 8, &sum))
        return cut_off("its header");
    if (magic != MAGIC)
        return kvf_fail(KVF_E_PARSE, "UCX card: it begins with %#llx, not %#x", (unsigned long long)magic,
                        MAGIC);
    uint64_t expected = kvf_ucx_card_sum(data, bytes);
    if (sum != expected)
        return kvf_fail(KVF_E_PARSE, "UCX card: its sum is %#llx, but that of its %zu bytes is %#llx",
                        (unsigned long long)sum, bytes, (unsigned long long)expected);
    const void *beacon = kvf_take_bytes(&in, sizeof out->beacon);
    if (!beacon)
        return cut_off("its beacon");
    uint64_t major, minor;
    if (!take_number(&in, 4, &major) || !take_number(&in, 4, &minor))
        return cut_off("its version");
    kvf_ucx_card card = {.major = (uint32_t)major, .minor = (uint32_t)minor};
    memcpy(card.beacon, beacon, sizeof card.beacon);
    kvf_status status = take_blob(&in, "the worker address", &card.worker, &card.worker_bytes);
    if (!status)
        status = take_regions(&in, &card);
    if (status)
        kvf_free(card.regions);
    else
        *out = card;
    return status;
}

void *kvf_ucx_card_blob(const void *data, size_t bytes) {
    unsigned char *blob = kvf_alloc0(bytes + BLOB_TAIL, 1);
    if (blob)
        memcpy(blob, data, bytes);
    return blob;
}
