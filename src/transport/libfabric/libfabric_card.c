/*
 * The libfabric fabric's part of the card:
 *
 *   magic 4 | beacon 40 | provider: length 1, bytes | protocol 4 | its version 4 | address: format 4, length 2, bytes |
 *   regions 4 | for each region: base 8, bytes 8, key 8, sort 1
 *
 * The sort is 0 (a number without memory: all are 0), 1 (memory) or 2 (withheld memory: it has bytes, and the others
 * are 0).
 *
 * All numbers are little endian. The sum of the outer card detects damage.
 */
#include "base/bytes.h"
#include "transport/libfabric/libfabric.h"

#define MAGIC 0x31464c4bu /* "KLF1" */
#define REGION_BYTES 25u

enum { NONE, SHARED, WITHHELD };

/* ---- writing --------------------------------------------------------------------------------- */

static void put(kvf_buffer *out, uint64_t number, size_t bytes, kvf_status *status) {
    unsigned char little[8];
    kvf_put_number(little, number, bytes);
    if (!*status)
        *status = kvf_buffer_add(out, little, bytes);
}

static void put_bytes(kvf_buffer *out, const void *data, size_t bytes, size_t length_bytes,
                      kvf_status *status) {
    if (length_bytes > 0)
        put(out, bytes, length_bytes, status);
    if (!*status)
        *status = kvf_buffer_add(out, data, bytes);
}

static uint64_t sort_of(const kvf_libfabric_target *region) {
    return region->bytes == 0 ? NONE : region->withheld ? WITHHELD : SHARED;
}

kvf_status kvf_libfabric_card_write(const kvf_libfabric_card *card, kvf_buffer *out) {
    const size_t begin = out->length;
    kvf_status status = KVF_OK;
    put(out, MAGIC, 4, &status);
    put_bytes(out, card->beacon, sizeof card->beacon, 0, &status);
    put_bytes(out, card->provider, strlen(card->provider), 1, &status);
    put(out, card->protocol, 4, &status);
    put(out, card->protocol_version, 4, &status);
    put(out, card->format, 4, &status);
    put_bytes(out, card->address, card->address_bytes, 2, &status);
    put(out, card->region_count, 4, &status);
    for (uint32_t i = 0; i < card->region_count; i++) {
        put(out, card->regions[i].base, 8, &status);
        put(out, card->regions[i].bytes, 8, &status);
        put(out, card->regions[i].key, 8, &status);
        put(out, sort_of(&card->regions[i]), 1, &status);
    }
    if (status)
        out->length = begin;
    return status;
}

/* ---- reading --------------------------------------------------------------------------------- */

static kvf_status wrong_length(const char *what, uint64_t bytes, uint32_t most) {
    return kvf_fail(KVF_E_PARSE, "libfabric card: %s has %llu bytes; allowed: 1 to %u", what,
                    (unsigned long long)bytes, most);
}

static kvf_status cut_off(void) {
    return kvf_fail(KVF_E_PARSE, "libfabric card: it is cut off");
}

static kvf_status take_provider(kvf_byte_reader *in, kvf_libfabric_card *out) {
    const uint64_t bytes = kvf_take_number(in, 1);
    if (!in->cut_off && (bytes == 0 || bytes > KVF_LIBFABRIC_PROVIDER_MAX))
        return wrong_length("the provider's name", bytes, KVF_LIBFABRIC_PROVIDER_MAX);
    const void *name = kvf_take_bytes(in, bytes);
    if (!name)
        return cut_off();
    memcpy(out->provider, name, bytes); /* the rest is zeros */
    return KVF_OK;
}

static kvf_status take_address(kvf_byte_reader *in, kvf_libfabric_card *out) {
    out->protocol = (uint32_t)kvf_take_number(in, 4);
    out->protocol_version = (uint32_t)kvf_take_number(in, 4);
    out->format = (uint32_t)kvf_take_number(in, 4);
    out->address_bytes = (uint32_t)kvf_take_number(in, 2);
    if (!in->cut_off && (out->address_bytes == 0 || out->address_bytes > KVF_LIBFABRIC_ADDRESS_MAX))
        return wrong_length("the address", out->address_bytes, KVF_LIBFABRIC_ADDRESS_MAX);
    out->address = kvf_take_bytes(in, out->address_bytes);
    return out->address ? KVF_OK : cut_off();
}

static kvf_status take_region(kvf_byte_reader *in, uint32_t i, kvf_libfabric_target *out) {
    uint64_t end;
    *out = (kvf_libfabric_target){0};
    out->base = kvf_take_number(in, 8);
    out->bytes = kvf_take_number(in, 8);
    out->key = kvf_take_number(in, 8);
    const uint64_t sort = kvf_take_number(in, 1);
    out->withheld = sort == WITHHELD;
    if (sort > WITHHELD || sort_of(out) != sort || (sort != SHARED && (out->base != 0 || out->key != 0)))
        return kvf_fail(
            KVF_E_PARSE,
            "libfabric card: region %u has sort %llu, %llu bytes at %#llx and key %#llx; allowed: sorts "
            "0 to 2, bytes but with sort 0, and neither address nor key but with sort 1",
            i, (unsigned long long)sort, (unsigned long long)out->bytes, (unsigned long long)out->base,
            (unsigned long long)out->key);
    if (!kvf_add(out->base, out->bytes, &end))
        return kvf_fail(KVF_E_PARSE, "libfabric card: region %u has %llu bytes at %#llx; allowed: up to 2^64",
                        i, (unsigned long long)out->bytes, (unsigned long long)out->base);
    return KVF_OK;
}

static kvf_status take_regions(kvf_byte_reader *in, kvf_libfabric_card *out) {
    const uint64_t count = kvf_take_number(in, 4);
    if (in->cut_off || in->left != count * REGION_BYTES)
        return kvf_fail(KVF_E_PARSE, "libfabric card: %zu bytes are there for %llu regions; needed: %llu",
                        in->left, (unsigned long long)count, (unsigned long long)count * REGION_BYTES);
    out->regions = kvf_alloc(count, sizeof *out->regions);
    if (!out->regions)
        return kvf_nomem("a peer's regions");
    out->region_count = (uint32_t)count;
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < count && !status; i++)
        status = take_region(in, i, &out->regions[i]);
    return status;
}

kvf_status kvf_libfabric_card_read(const void *data, size_t bytes, kvf_libfabric_card *out) {
    kvf_byte_reader in = {data, bytes, false};
    kvf_libfabric_card card = {0};
    *out = (kvf_libfabric_card){0};
    const uint64_t magic = kvf_take_number(&in, 4);
    const void *beacon = kvf_take_bytes(&in, sizeof card.beacon);
    if (!beacon)
        return cut_off();
    if (magic != MAGIC)
        return kvf_fail(KVF_E_PARSE, "libfabric card: it begins with %#llx, not %#x",
                        (unsigned long long)magic, MAGIC);
    memcpy(card.beacon, beacon, sizeof card.beacon);
    kvf_status status = take_provider(&in, &card);
    if (!status)
        status = take_address(&in, &card);
    if (!status)
        status = take_regions(&in, &card);
    if (status)
        kvf_free(card.regions);
    else
        *out = card;
    return status;
}
