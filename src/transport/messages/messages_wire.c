#include "transport/messages/messages_wire.h"

static const unsigned char magic[4] = {'K', 'V', 'F', 'M'};

/* ---- greetings, requests, answers ------------------------------------------------------------ */

size_t kvf_messages_hello_write(const kvf_messages_hello *hello, unsigned char *out) {
    unsigned char *at = out;
    size_t name = strnlen(hello->name, KVF_SENDER_MAX);
    *at++ = MESSAGES_HELLO;
    memcpy(at, magic, sizeof magic);
    kvf_put_number(at + 4, MESSAGES_VERSION, 2);
    memcpy(at + 6, hello->secret, MESSAGES_SECRET_BYTES);
    memcpy(at + 22, hello->id, MESSAGES_ID_BYTES);
    kvf_put_number(at + 38, hello->generation, 8);
    kvf_put_number(at + 46, hello->region_count, 4);
    at[50] = (unsigned char)name;
    memcpy(at + 51, hello->name, name);
    return (size_t)(at - out) + 51 + name;
}

bool kvf_messages_hello_read(const void *data, size_t bytes, kvf_messages_hello *out, uint32_t *version) {
    kvf_byte_reader from = {data, bytes, false};
    *out = (kvf_messages_hello){0};
    if (kvf_take_number(&from, 1) != MESSAGES_HELLO)
        return false;
    const void *mark = kvf_take_bytes(&from, sizeof magic);
    *version = (uint32_t)kvf_take_number(&from, 2);
    if (from.cut_off || memcmp(mark, magic, sizeof magic) != 0)
        return false;
    if (*version != MESSAGES_VERSION)
        return true;
    const void *secret = kvf_take_bytes(&from, MESSAGES_SECRET_BYTES);
    const void *id = kvf_take_bytes(&from, MESSAGES_ID_BYTES);
    out->generation = kvf_take_number(&from, 8);
    out->region_count = (uint32_t)kvf_take_number(&from, 4);
    size_t name_bytes = (size_t)kvf_take_number(&from, 1);
    const char *name = kvf_take_bytes(&from, name_bytes);
    if (from.cut_off || from.left > 0)
        return false;
    memcpy(out->secret, secret, MESSAGES_SECRET_BYTES);
    memcpy(out->id, id, MESSAGES_ID_BYTES);
    memcpy(out->name, name, name_bytes);
    return true;
}

void kvf_messages_request_write(kvf_messages_kind kind, uint32_t number, uint32_t list_bytes, uint32_t bytes,
                                unsigned char out[MESSAGES_REQUEST_BYTES]) {
    kvf_put_number(out, kind, 4);
    kvf_put_number(out + 4, number, 4);
    kvf_put_number(out + 8, list_bytes, 4);
    kvf_put_number(out + 12, bytes, 4);
}

bool kvf_messages_request_read(const void *data, size_t bytes, kvf_messages_request *out) {
    kvf_byte_reader from = {data, bytes, false};
    uint32_t kind = (uint32_t)kvf_take_number(&from, 4);
    out->number = (uint32_t)kvf_take_number(&from, 4);
    out->list_bytes = (size_t)kvf_take_number(&from, 4);
    out->bytes = (uint32_t)kvf_take_number(&from, 4);
    out->list = kvf_take_bytes(&from, out->list_bytes);
    out->data = from.at;
    /* The first byte alone tells messages apart, so the others are checked: a WRITE is only what has its data. */
    return !from.cut_off && (kind == MESSAGES_READ || kind == MESSAGES_WRITE) &&
           out->bytes <= MESSAGES_CHUNK_BYTES && out->list_bytes <= MESSAGES_LIST_BYTES &&
           from.left == (kind == MESSAGES_WRITE ? out->bytes : 0);
}

void kvf_messages_answer_write(kvf_messages_kind kind, uint32_t number,
                               unsigned char out[MESSAGES_ANSWER_BYTES]) {
    kvf_put_number(out, kind, 4);
    kvf_put_number(out + 4, number, 4);
}

/* ---- lists: writing -------------------------------------------------------------------------- */

enum { HAS_REGION = 1, HAS_BYTES = 2, HAS_SERIES = 4 };

/* Two runs are shorter as two entries. */
#define SERIES_LEAST 3u

static unsigned char *put_varint(unsigned char *at, uint64_t number) {
    for (; number >= 0x80; number >>= 7)
        *at++ = (unsigned char)(number | 0x80);
    *at++ = (unsigned char)number;
    return at;
}

static uint64_t fold_sign(uint64_t difference) {
    return difference << 1 ^ (uint64_t) - (difference >> 63);
}

static uint64_t unfold_sign(uint64_t folded) {
    return folded >> 1 ^ (uint64_t) - (folded & 1);
}

/* The first runs that form a series; or, if they touch, one long run. */
static size_t find_series(const kvf_run *runs, size_t count, kvf_messages_series *out) {
    *out = (kvf_messages_series){runs->remote_offset, runs->bytes, 1, 0, runs->remote_region};
    size_t length = 1;
    if (count > 1)
        out->distance = runs[1].remote_offset - runs[0].remote_offset;
    while (length < count && runs[length].bytes == runs->bytes &&
           runs[length].remote_region == runs->remote_region &&
           runs[length].remote_offset - runs[length - 1].remote_offset == out->distance)
        length++;
    if (out->distance == out->bytes) {
        out->bytes *= length;
        return length;
    }
    out->count = length >= SERIES_LEAST ? length : 1;
    return (size_t)out->count;
}

size_t kvf_messages_list_write(const kvf_run *runs, size_t count, unsigned char *out) {
    unsigned char *at = out;
    uint64_t bytes = 0, end = 0;
    uint32_t region = 0;
    kvf_messages_series series;
    for (size_t i = 0; i < count;) {
        if (runs[i].bytes == 0) {
            i++;
            continue;
        }
        i += find_series(&runs[i], count - i, &series);
        *at++ =
            (unsigned char)((series.region != region ? HAS_REGION : 0) |
                            (series.bytes != bytes ? HAS_BYTES : 0) | (series.count > 1 ? HAS_SERIES : 0));
        if (series.region != region)
            at = put_varint(at, series.region);
        if (series.bytes != bytes)
            at = put_varint(at, series.bytes);
        at = put_varint(at, fold_sign(series.offset - end));
        if (series.count > 1) {
            at = put_varint(at, series.count);
            at = put_varint(at, fold_sign(series.distance));
        }
        region = series.region;
        bytes = series.bytes;
        end = series.offset + (series.count - 1) * series.distance + series.bytes;
    }
    return (size_t)(at - out);
}

/* ---- lists: reading -------------------------------------------------------------------------- */

static uint64_t take_varint(kvf_byte_reader *from) {
    uint64_t number = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        if (from->left == 0)
            break;
        unsigned char byte = *from->at++;
        from->left--;
        if (shift == 63 && byte > 1)
            break;
        number |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80)
            return number;
    }
    from->cut_off = true;
    from->left = 0;
    return 0;
}

/* Takes the next series; false at the end, or if the list is malformed. */
static bool walk_series(kvf_messages_walk *walk, kvf_messages_series *out) {
    kvf_byte_reader *from = &walk->from;
    if (from->left == 0)
        return false;
    unsigned flags = *from->at++;
    from->left--;
    uint64_t region = flags & HAS_REGION ? take_varint(from) : walk->region;
    out->bytes = flags & HAS_BYTES ? take_varint(from) : walk->bytes;
    out->offset = walk->end + unfold_sign(take_varint(from));
    out->count = flags & HAS_SERIES ? take_varint(from) : 1;
    out->distance = flags & HAS_SERIES ? unfold_sign(take_varint(from)) : 0;
    if (flags > (HAS_REGION | HAS_BYTES | HAS_SERIES) || region > UINT32_MAX || out->bytes == 0 ||
        out->count == 0) {
        from->cut_off = true;
        from->left = 0;
    }
    out->region = walk->region = (uint32_t)region;
    walk->bytes = out->bytes;
    walk->end = out->offset + (out->count - 1) * out->distance + out->bytes;
    return !from->cut_off;
}

/* All runs of a series fit if the first and the last fit. */
static bool fits(const kvf_messages_series *series, uint64_t region_bytes) {
    bool down = series->distance >> 63;
    uint64_t span;
    if (series->bytes > region_bytes || series->offset > region_bytes - series->bytes ||
        !kvf_mul(series->count - 1, down ? -series->distance : series->distance, &span))
        return false;
    return span <= (down ? series->offset : region_bytes - series->bytes - series->offset);
}

static kvf_status check_series(const kvf_messages_series *series, uint64_t run, const kvf_memory *regions,
                               uint32_t region_count) {
    if (series->region >= region_count || regions[series->region].bytes == 0)
        return kvf_fail(KVF_E_NOT_REGISTERED, "run %llu: region %u is not registered",
                        (unsigned long long)run, series->region);
    if (fits(series, regions[series->region].bytes))
        return KVF_OK;
    return kvf_fail(
        KVF_E_RANGE,
        "run %llu: %llu of %llu bytes from offset %llu of region %u, %lld apart; allowed: inside 0 to %llu",
        (unsigned long long)run, (unsigned long long)series->count, (unsigned long long)series->bytes,
        (unsigned long long)series->offset, series->region, (long long)series->distance,
        (unsigned long long)regions[series->region].bytes);
}

kvf_status kvf_messages_list_check(const void *list, size_t list_bytes, uint64_t bytes,
                                   const kvf_memory *regions, uint32_t region_count) {
    kvf_messages_walk walk = {.from = {list, list_bytes, false}};
    kvf_messages_series series;
    uint64_t runs = 0, left = bytes;
    while (walk_series(&walk, &series)) {
        if (series.count > MESSAGES_CHUNK_RUNS - runs)
            return kvf_fail(KVF_E_PARSE, "the list has more than %u runs", MESSAGES_CHUNK_RUNS);
        if (series.bytes > left / series.count)
            return kvf_fail(KVF_E_PARSE, "the runs have more than the %llu bytes of the request",
                            (unsigned long long)bytes);
        kvf_status status = check_series(&series, runs, regions, region_count);
        if (status)
            return status;
        runs += series.count;
        left -= series.count * series.bytes;
    }
    if (walk.from.cut_off || left > 0)
        return kvf_fail(KVF_E_PARSE,
                        walk.from.cut_off ? "the list is malformed at its run %llu"
                                          : "the %llu runs have fewer bytes than the request",
                        (unsigned long long)runs);
    return KVF_OK;
}

size_t kvf_messages_walk_runs(kvf_messages_walk *walk, kvf_run *out, size_t most) {
    size_t count = 0;
    while (count < most) {
        kvf_messages_series *series = &walk->series;
        if (walk->left == 0) {
            if (!walk_series(walk, series))
                break;
            walk->left = series->count;
        }
        size_t here = (size_t)kvf_min_u64(walk->left, most - count);
        for (size_t i = 0; i < here; i++) {
            out[count++] = (kvf_run){walk->at, series->offset, series->bytes, 0, series->region};
            walk->at += series->bytes;
            series->offset += series->distance;
        }
        walk->left -= here;
    }
    return count;
}
