#include "transport/card.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/bytes.h"

#define CARD_VERSION 3
#define REGION_BYTES 9

enum { SORT_HOST = 0, SORT_WITHHELD = 1, SORT_DEVICE = 2, SORT_DEVICE_ARENA = 3 };

#define CHECKSUM_BYTES 8

static const unsigned char magic[4] = {'K', 'V', 'F', 'C'};

kvf_status kvf_buffer_room(kvf_buffer *bytes, size_t length) {
    uint64_t want;
    if (!kvf_add(bytes->length, length, &want))
        return kvf_fail(KVF_E_OVERFLOW, "%zu bytes after %zu", length, bytes->length);
    if (want > bytes->capacity) {
        uint64_t capacity = kvf_max_u64(want, kvf_max_u64(256, (uint64_t)bytes->capacity * 2));
        unsigned char *grown = kvf_resize(bytes->data, capacity, 1);
        if (!grown)
            return kvf_nomem("bytes of a transport");
        bytes->data = grown;
        bytes->capacity = capacity;
    }
    return KVF_OK;
}

kvf_status kvf_buffer_add(kvf_buffer *bytes, const void *data, size_t length) {
    kvf_status status = kvf_buffer_room(bytes, length);
    if (status)
        return status;
    if (length > 0)
        memcpy(bytes->data + bytes->length, data, length);
    bytes->length += length;
    return KVF_OK;
}

void kvf_buffer_free(kvf_buffer *bytes) {
    kvf_free(bytes->data);
    *bytes = (kvf_buffer){0};
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Appends the low `width` bytes of a number. The first failure stays. */
static void put(kvf_status *status, kvf_buffer *out, uint64_t number, size_t width) {
    unsigned char raw[8];
    kvf_put_number(raw, number, width);
    if (!*status)
        *status = kvf_buffer_add(out, raw, width);
}

static void put_bytes(kvf_status *status, kvf_buffer *out, const void *data, size_t bytes) {
    if (!*status)
        *status = kvf_buffer_add(out, data, bytes);
}

static uint64_t sort_of(const kvf_card *card, uint32_t region) {
    return card->region_withheld && card->region_withheld[region]           ? SORT_WITHHELD
           : card->region_on_device && card->region_on_device[region]       ? SORT_DEVICE
           : card->region_device_arena && card->region_device_arena[region] ? SORT_DEVICE_ARENA
                                                                            : SORT_HOST;
}

kvf_status kvf_card_write(const kvf_card *card, kvf_buffer *out) {
    kvf_status status = KVF_OK;
    size_t start = out->length;
    size_t name = strlen(card->name);
    put_bytes(&status, out, magic, sizeof magic);
    put(&status, out, CARD_VERSION, 2);
    put(&status, out, name, 1);
    put_bytes(&status, out, card->name, name);
    put(&status, out, card->generation, 8);
    put(&status, out, card->region_count, 4);
    for (uint32_t i = 0; i < card->region_count; i++) {
        put(&status, out, card->region_bytes[i], 8);
        put(&status, out, sort_of(card, i), 1);
    }
    put(&status, out, card->part_count, 1);
    for (uint32_t i = 0; i < card->part_count; i++) {
        const kvf_card_part *part = &card->parts[i];
        if (part->bytes > UINT32_MAX)
            return kvf_fail(KVF_E_OVERFLOW, "card: the part of %s has %zu bytes; allowed: 0 to %u",
                            part->kind, part->bytes, UINT32_MAX);
        size_t kind = strlen(part->kind);
        put(&status, out, kind, 1);
        put_bytes(&status, out, part->kind, kind);
        put(&status, out, part->bytes, 4);
        put_bytes(&status, out, part->data, part->bytes);
    }
    if (!status)
        put(&status, out, kvf_byte_sum(KVF_BYTE_SUM_START, out->data + start, out->length - start),
            CHECKSUM_BYTES);
    return status;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* A short text: its length in one byte, then its characters, none of them NUL. */
static bool take_text(kvf_byte_reader *from, char *out, size_t most) {
    size_t length = kvf_take_number(from, 1);
    const unsigned char *raw = length <= most ? kvf_take_bytes(from, length) : NULL;
    if (!raw || memchr(raw, '\0', length))
        return false;
    memcpy(out, raw, length);
    out[length] = '\0';
    return true;
}

static kvf_status cut_off(void) {
    return kvf_fail(KVF_E_PARSE, "card: it is cut off, or a length in it is damaged");
}

/* Accepts a number of regions only if there are bytes for all of them. */
static kvf_status read_regions(kvf_byte_reader *from, kvf_card *card) {
    uint32_t count = (uint32_t)kvf_take_number(from, 4);
    if (count > from->left / REGION_BYTES)
        return cut_off();
    card->region_bytes = kvf_alloc(count, sizeof *card->region_bytes);
    card->region_withheld = kvf_alloc(count, sizeof *card->region_withheld);
    card->region_on_device = kvf_alloc(count, sizeof *card->region_on_device);
    card->region_device_arena = kvf_alloc(count, sizeof *card->region_device_arena);
    if (!card->region_bytes || !card->region_withheld || !card->region_on_device ||
        !card->region_device_arena)
        return kvf_nomem("a card");
    card->region_count = count;
    for (uint32_t i = 0; i < count; i++) {
        card->region_bytes[i] = kvf_take_number(from, 8);
        const uint64_t sort = kvf_take_number(from, 1);
        const bool empty = card->region_bytes[i] == 0;
        if (empty ? sort > SORT_WITHHELD : sort == SORT_WITHHELD || sort > SORT_DEVICE_ARENA)
            return kvf_fail(KVF_E_PARSE, "card: region %u has %llu bytes, and its sort is %llu; allowed: %s",
                            i, (unsigned long long)card->region_bytes[i], (unsigned long long)sort,
                            empty ? "0 and 1" : "0, 2 and 3");
        card->region_withheld[i] = sort == SORT_WITHHELD;
        card->region_on_device[i] = sort == SORT_DEVICE;
        card->region_device_arena[i] = sort == SORT_DEVICE_ARENA;
    }
    return KVF_OK;
}

static kvf_status read_parts(kvf_byte_reader *from, kvf_card *card) {
    uint32_t count = (uint32_t)kvf_take_number(from, 1);
    card->parts = kvf_alloc0(count, sizeof *card->parts);
    if (!card->parts)
        return kvf_nomem("a card");
    for (uint32_t i = 0; i < count; i++) {
        kvf_card_part *part = &card->parts[i];
        if (!take_text(from, part->kind, KVF_CARD_KIND_MAX))
            return cut_off();
        part->bytes = kvf_take_number(from, 4);
        part->data = kvf_take_bytes(from, part->bytes);
        if (from->cut_off)
            return cut_off();
        if (kvf_card_part_of(card, part->kind))
            return kvf_fail(KVF_E_PARSE, "card: it has two parts of kind \"%s\"; allowed: one", part->kind);
        card->part_count++;
    }
    return KVF_OK;
}

static kvf_status read_body(kvf_byte_reader *from, kvf_card *out) {
    if (!take_text(from, out->name, KVF_CARD_NAME_MAX))
        return cut_off();
    out->generation = kvf_take_number(from, 8);
    kvf_status status = read_regions(from, out);
    if (!status)
        status = read_parts(from, out);
    if (!status && (from->cut_off || from->left > 0))
        status = kvf_fail(KVF_E_PARSE, "card: %zu bytes after its end", from->left);
    return status;
}

kvf_status kvf_card_read(const void *data, size_t bytes, kvf_card *out) {
    *out = (kvf_card){0};
    if (!data)
        return kvf_fail(KVF_E_PARSE, "card: NULL");
    kvf_byte_reader from = {data, bytes, false};
    const unsigned char *start = kvf_take_bytes(&from, sizeof magic);
    if (!start || memcmp(start, magic, sizeof magic) != 0)
        return kvf_fail(KVF_E_PARSE, "card: these %zu bytes are not a card", bytes);
    uint32_t version = (uint32_t)kvf_take_number(&from, 2);
    if (from.cut_off || from.left < CHECKSUM_BYTES)
        return cut_off();
    if (version != CARD_VERSION)
        return kvf_fail(KVF_E_UNSUPPORTED, "card: version %u; this library knows version %d", version,
                        CARD_VERSION);
    kvf_byte_reader tail = {start + bytes - CHECKSUM_BYTES, CHECKSUM_BYTES, false};
    if (kvf_take_number(&tail, CHECKSUM_BYTES) !=
        kvf_byte_sum(KVF_BYTE_SUM_START, start, bytes - CHECKSUM_BYTES))
        return kvf_fail(KVF_E_PARSE, "card: its checksum is wrong: the card is damaged or cut off");
    from.left -= CHECKSUM_BYTES;
    kvf_status status = read_body(&from, out);
    if (status)
        kvf_card_free(out);
    return status;
}

void kvf_card_free(kvf_card *card) {
    kvf_free(card->region_bytes);
    kvf_free(card->region_withheld);
    kvf_free(card->region_on_device);
    kvf_free(card->region_device_arena);
    kvf_free(card->parts);
    *card = (kvf_card){0};
}

const kvf_card_part *kvf_card_part_of(const kvf_card *card, const char *kind) {
    for (uint32_t i = 0; i < card->part_count; i++)
        if (strcmp(card->parts[i].kind, kind) == 0)
            return &card->parts[i];
    return NULL;
}

static bool has_part(const kvf_card *card, const kvf_card_part *part) {
    const kvf_card_part *own = kvf_card_part_of(card, part->kind);
    return own && own->bytes == part->bytes && memcmp(own->data, part->data, part->bytes) == 0;
}

bool kvf_card_is_of_same(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    kvf_card cards[2];
    bool same = false;
    if (kvf_card_read(a, a_bytes, &cards[0]))
        return false;
    if (!kvf_card_read(b, b_bytes, &cards[1]))
        for (uint32_t i = 0; i < cards[0].part_count && !same; i++)
            same = has_part(&cards[1], &cards[0].parts[i]);
    kvf_card_free(&cards[0]);
    kvf_card_free(&cards[1]); /* zeroed if it could not be read */
    return same;
}

/* The kernel makes a new boot id at every start; containers of one machine see the same. */
void kvf_host_identity(unsigned char out[KVF_HOST_ID_BYTES]) {
    memset(out, 0, KVF_HOST_ID_BYTES);
    char text[64];
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t got = read(fd, text, sizeof text);
    (void)close(fd);
    uint32_t digit = 0;
    for (ssize_t i = 0; i < got && digit < 2 * KVF_HOST_ID_BYTES; i++) {
        char c = text[i];
        int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (value < 0)
            continue;
        out[digit / 2] = (unsigned char)(out[digit / 2] | (digit % 2 ? value : value << 4));
        digit++;
    }
}

bool kvf_host_place(unsigned char out[KVF_PLACE_BYTES]) {
    static const unsigned char unknown[KVF_HOST_ID_BYTES];
    struct stat space;
    kvf_host_identity(out);
    bool known = memcmp(out, unknown, sizeof unknown) != 0 && stat("/proc/self/ns/net", &space) == 0;
    kvf_put_number(out + KVF_HOST_ID_BYTES, known ? space.st_ino : 0, 8);
    return known;
}
