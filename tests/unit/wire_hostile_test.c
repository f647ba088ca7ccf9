/*
 * Bytes that no honest peer sends: each field missing, doubled or of another type, messages cut off or with a bit
 * flipped anywhere, and counts of more than what follows.
 */
#include <msgpack.h>

#include "wire_samples.h"

#include "wire/check.h"

/* ---- taking messages apart ------------------------------------------------------------------- */

typedef kvf_status (*reader)(kvf_bytes bytes);

static kvf_status read_message(kvf_bytes bytes) {
    kvf_message message;
    kvf_status status = kvf_wire_open(bytes, &message);
    if (status) {
        assert_int_equal(message.version, 0);
        return status;
    }
    status = kvf_wire_read(&message);
    if (!status) {
        kvf_wire_buffer again = {0}; /* every message that can be read can be sent */
        assert_ok(kvf_wire_encode(&message, &again));
        kvf_wire_buffer_free(&again);
    }
    kvf_message_free(&message);
    return status;
}

static kvf_status read_introduction(kvf_bytes bytes) {
    kvf_introduction introduction;
    void *storage = NULL;
    kvf_status status = kvf_wire_decode_introduction(bytes, &introduction, &storage);
    assert_true(status == KVF_OK || (storage == NULL && introduction.engine == NULL));
    kvf_free(storage);
    return status;
}

/* Reads a message like `like` with `body` in place of its own body. */
static kvf_status read_with_body(const kvf_message *like, const msgpack_sbuffer *body) {
    msgpack_sbuffer buffer;
    msgpack_sbuffer_init(&buffer);
    msgpack_packer packer;
    msgpack_packer_init(&packer, &buffer, msgpack_sbuffer_write);
    msgpack_pack_array(&packer, 5);
    msgpack_pack_str_with_body(&packer, "kvf", 3);
    msgpack_pack_uint32(&packer, KVF_WIRE_VERSION);
    msgpack_pack_uint32(&packer, like->kind);
    msgpack_pack_bin_with_body(&packer, like->digest, like->kind <= KVF_MESSAGE_REFUSED ? 32 : 0);
    msgpack_pack_bin_with_body(&packer, body->data, body->size);
    kvf_bytes exact = sample_exact(buffer.data, buffer.size);
    kvf_status status = read_message(exact);
    free((void *)exact.data);
    msgpack_sbuffer_destroy(&buffer);
    return status;
}

typedef enum change { LEFT_OUT, NIL, FLOAT, NEGATIVE, TWICE, WITH_UNKNOWN } change;

/* Packs a map again, with one of its pairs changed. */
static void pack_changed(msgpack_sbuffer *out, const msgpack_object_map *map, uint32_t field, change how) {
    msgpack_packer packer;
    msgpack_packer_init(&packer, out, msgpack_sbuffer_write);
    msgpack_pack_map(&packer, map->size + (how == TWICE || how == WITH_UNKNOWN ? 1 : 0) - (how == LEFT_OUT));
    for (uint32_t i = 0; i < map->size; i++) {
        if (i == field && how == LEFT_OUT)
            continue;
        msgpack_pack_object(&packer, map->ptr[i].key);
        if (i == field && how == NIL)
            msgpack_pack_nil(&packer);
        else if (i == field && how == FLOAT)
            msgpack_pack_double(&packer, 1.5);
        else if (i == field && how == NEGATIVE)
            msgpack_pack_int(&packer, -1);
        else
            msgpack_pack_object(&packer, map->ptr[i].val);
        if (i == field && how == TWICE) {
            msgpack_pack_object(&packer, map->ptr[i].key);
            msgpack_pack_object(&packer, map->ptr[i].val);
        }
    }
    if (how == WITH_UNKNOWN) { /* a key that is no text, with a nested value */
        msgpack_pack_int(&packer, 77);
        msgpack_pack_array(&packer, 2);
        msgpack_pack_nil(&packer);
        msgpack_pack_map(&packer, 1);
        msgpack_pack_str_with_body(&packer, "engine", 6);
        msgpack_pack_true(&packer);
    }
}

static void check_changed(const kvf_message *message, const msgpack_object_map *map, uint32_t field,
                          change how) {
    msgpack_sbuffer body;
    msgpack_sbuffer_init(&body);
    pack_changed(&body, map, field, how);
    kvf_status status = read_with_body(message, &body);
    msgpack_sbuffer_destroy(&body);
    const msgpack_object_str *key = &map->ptr[field].key.via.str;
    const bool may_miss = key->size == 7 && memcmp(key->ptr, "records", 7) == 0;
    if (how == WITH_UNKNOWN || (how == LEFT_OUT && may_miss)) {
        assert_ok(status);
        return;
    }
    char name[64];
    (void)snprintf(name, sizeof name, ": %.*s %s", (int)key->size, key->ptr,
                   how == LEFT_OUT ? "is missing"
                   : how == TWICE  ? "is given twice"
                                   : "is ");
    assert_fails(status, KVF_E_PARSE, name);
}

static void every_field_must_be_there_once_and_of_its_type(void **state) {
    (void)state;
    static wire_sample sample;
    for (uint32_t n = 0; n < SAMPLE_KINDS; n++) {
        kvf_message_kind kind;
        kvf_call_kind call;
        sample_kind(n, &kind, &call);
        sample_message(&sample, kind, call, 11);
        kvf_wire_buffer encoded = sample_encoded(&sample.message);
        kvf_message opened;
        assert_ok(kvf_wire_open((kvf_bytes){encoded.data, encoded.size}, &opened));
        msgpack_zone zone;
        msgpack_object body;
        assert_ok(kvf_wire_unpack(opened.body, &zone, &body));
        for (uint32_t field = 0; field < body.via.map.size; field++)
            for (change how = LEFT_OUT; how <= WITH_UNKNOWN; how++)
                check_changed(&opened, &body.via.map, field, how);
        msgpack_zone_destroy(&zone);
        kvf_wire_buffer_free(&encoded);
    }
}

/* ---- damage ---------------------------------------------------------------------------------- */

/* Reads the bytes cut off at every length, and with every single bit flipped. */
static void damage(const kvf_wire_buffer *encoded, reader read) {
    for (size_t size = 0; size < encoded->size; size++) {
        kvf_bytes cut = sample_exact(encoded->data, size);
        assert_int_equal(read(cut), KVF_E_PARSE);
        free((void *)cut.data);
    }
    kvf_bytes whole = sample_exact(encoded->data, encoded->size);
    uint8_t *bytes = (uint8_t *)whole.data;
    size_t refused = 0;
    for (size_t bit = 0; bit < 8 * encoded->size; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        kvf_status status = read(whole);
        assert_true(status == KVF_OK || status == KVF_E_PARSE || status == KVF_E_UNSUPPORTED);
        refused += status != KVF_OK;
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    assert_true(refused > 0);
    free(bytes);
}

static void damaged_messages_are_refused_or_are_other_messages(void **state) {
    (void)state;
    static wire_sample sample;
    for (uint32_t n = 0; n < SAMPLE_KINDS; n++) {
        kvf_message_kind kind;
        kvf_call_kind call;
        sample_kind(n, &kind, &call);
        kvf_wire_buffer encoded = {0};
        /* A short message, since damage() reads it thousands of times. */
        for (uint64_t seed = 20; encoded.size == 0 || encoded.size > 1200; seed++) {
            kvf_wire_buffer_free(&encoded);
            sample_message(&sample, kind, call, seed);
            encoded = sample_encoded(&sample.message);
        }
        damage(&encoded, read_message);
        kvf_wire_buffer_free(&encoded);
    }
}

static void damaged_introductions_are_refused_or_are_other_introductions(void **state) {
    (void)state;
    static wire_sample sample;
    for (uint64_t seed = 1; seed < 6; seed++) {
        sample_introduction(&sample, seed);
        kvf_wire_buffer encoded = {0};
        assert_ok(kvf_wire_encode_introduction(&sample.introduction, &encoded));
        damage(&encoded, read_introduction);
        kvf_wire_buffer_free(&encoded);
    }
}

static kvf_model *shard_model;

static kvf_status read_shard(kvf_bytes bytes) {
    kvf_shard *shard = NULL;
    kvf_status status = kvf_wire_decode_shard(shard_model, NULL, bytes, NULL, &shard);
    kvf_shard_free(shard);
    /* An error from making the shard counts as refused too. */
    return status == KVF_OK || status == KVF_E_PARSE ? status : KVF_E_UNSUPPORTED;
}

static void damaged_shards_are_refused_or_are_other_shards(void **state) {
    (void)state;
    shard_model = hybrid(2);
    kvf_engine *engine = engine_of(shard_model, ENGINE(.tp_size = 2, .all = {.block_count = 3}));
    kvf_wire_buffer encoded = {0};
    assert_ok(kvf_wire_encode_shard(kvf_engine_shard(engine, 1), NULL, &encoded));
    damage(&encoded, read_shard);
    kvf_wire_buffer_free(&encoded);
    kvf_engine_free(engine);
    kvf_model_free(shard_model);
}

/* ---- bytes that are no message --------------------------------------------------------------- */

#define BYTES(...) ((kvf_bytes){(const uint8_t[]){__VA_ARGS__}, sizeof((const uint8_t[]){__VA_ARGS__})})

static void counts_that_nothing_stands_behind_are_refused_before_unpacking(void **state) {
    (void)state;
    assert_fails(kvf_wire_check(BYTES(0xdd, 0xff, 0xff, 0xff, 0xff)), KVF_E_PARSE,
                 "claims 4294967295 objects", "0 bytes follow");
    assert_fails(kvf_wire_check(BYTES(0xdf, 0xff, 0xff, 0xff, 0xff)), KVF_E_PARSE,
                 "claims 8589934590 objects");
    assert_fails(kvf_wire_check(BYTES(0xdc, 0x00, 0x03, 0x01, 0x02)), KVF_E_PARSE, "claims 3 objects");
    assert_fails(kvf_wire_check(BYTES(0xc6, 0xff, 0xff, 0xff, 0xff)), KVF_E_PARSE, "claims 4294967295 bytes");
    assert_fails(kvf_wire_check(BYTES(0xdb, 0x00, 0x00, 0x00, 0x02, 'x')), KVF_E_PARSE, "claims 2 bytes");
    /* The bytes that follow are enough for either array, but not for both. */
    assert_fails(kvf_wire_check(BYTES(0x92, 0x93, 1, 2, 3)), KVF_E_PARSE, "claims 3 objects");
    assert_ok(kvf_wire_check(BYTES(0x92, 0x92, 1, 2, 3)));
}

static void every_type_of_object_is_stepped_over(void **state) {
    (void)state;
    kvf_bytes all =
        BYTES(0xdc, 0, 29, 0xc0, 0xc2, 0xc3, 0xca, 1, 2, 3, 4, 0xcb, 1, 2, 3, 4, 5, 6, 7, 8, 0xcc, 1, 0xcd, 1,
              2, 0xce, 1, 2, 3, 4, 0xcf, 1, 2, 3, 4, 5, 6, 7, 8, 0xd0, 1, 0xd1, 1, 2, 0xd2, 1, 2, 3, 4, 0xd3,
              1, 2, 3, 4, 5, 6, 7, 8, 0xd4, 1, 2, 0xd5, 1, 2, 3, 0xd6, 1, 2, 3, 4, 5, 0xd7, 1, 2, 3, 4, 5, 6,
              7, 8, 9, 0xd8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 0xc7, 1, 5, 6, 0xc8,
              0, 1, 5, 6, 0xc9, 0, 0, 0, 1, 5, 6, 0xd9, 1, 'x', 0xda, 0, 1, 'x', 0xdb, 0, 0, 0, 1, 'x', 0xc4,
              0, 0xe0, 0x7f, 0xa1, 'x', 0x80);
    msgpack_zone zone;
    msgpack_object array;
    assert_ok(kvf_wire_unpack(all, &zone, &array));
    assert_int_equal(array.via.array.size, 29);
    msgpack_zone_destroy(&zone);
}

/* Checks the object, with a number behind it, in so many arrays that the object is `depth` deep. */
static kvf_status check_at_depth(kvf_bytes object, uint32_t depth) {
    static uint8_t bytes[128];
    assert_true(depth > 0 && depth + object.size < sizeof bytes);
    memset(bytes, 0x91, depth - 1);
    bytes[depth - 1] = 0x92;
    memcpy(bytes + depth, object.data, object.size);
    bytes[depth + object.size] = 42;
    kvf_bytes exact = sample_exact(bytes, depth + object.size + 1);
    kvf_status status = kvf_wire_check(exact);
    free((void *)exact.data);
    return status;
}

#define NO 0xc1 /* begins no object: valid only inside of an object */
#define NO_5 NO, NO, NO, NO, NO
#define NO_15 NO_5, NO_5, NO_5
#define INNER 0xcc, NO /* an object of two bytes */
#define INNER_5 INNER, INNER, INNER, INNER, INNER
#define INNER_15 INNER_5, INNER_5, INNER_5

static void every_type_of_object_ends_where_it_should_at_the_greatest_depth(void **state) {
    (void)state;
    const kvf_bytes scalars[] = {BYTES(0x00),
                                 BYTES(0x7f),
                                 BYTES(0xe0),
                                 BYTES(0xff),
                                 BYTES(0xc0),
                                 BYTES(0xc2),
                                 BYTES(0xc3),
                                 BYTES(0xa0),
                                 BYTES(0xa1, NO),
                                 BYTES(0xbf, NO, NO_15, NO_15),
                                 BYTES(0xc4, 1, NO),
                                 BYTES(0xc5, 0, 1, NO),
                                 BYTES(0xc6, 0, 0, 0, 1, NO),
                                 BYTES(0xc7, 1, 5, NO),
                                 BYTES(0xc8, 0, 1, 5, NO),
                                 BYTES(0xc9, 0, 0, 0, 1, 5, NO),
                                 BYTES(0xca, NO, NO, NO, NO),
                                 BYTES(0xcb, NO, NO, NO, NO_5),
                                 BYTES(0xcc, NO),
                                 BYTES(0xcd, NO, NO),
                                 BYTES(0xce, NO, NO, NO, NO),
                                 BYTES(0xcf, NO, NO, NO, NO_5),
                                 BYTES(0xd0, NO),
                                 BYTES(0xd1, NO, NO),
                                 BYTES(0xd2, NO, NO, NO, NO),
                                 BYTES(0xd3, NO, NO, NO, NO_5),
                                 BYTES(0xd4, NO, NO),
                                 BYTES(0xd5, NO, NO, NO),
                                 BYTES(0xd6, NO_5),
                                 BYTES(0xd7, NO, NO, NO, NO, NO_5),
                                 BYTES(0xd8, NO, NO, NO_15),
                                 BYTES(0xd9, 1, NO),
                                 BYTES(0xda, 0, 1, NO),
                                 BYTES(0xdb, 0, 0, 0, 1, NO)};
    for (size_t i = 0; i < COUNT_OF(scalars); i++)
        assert_ok(check_at_depth(scalars[i], KVF_WIRE_MAX_DEPTH));
    const kvf_bytes containers[] = {BYTES(0x90),
                                    BYTES(0x91, INNER),
                                    BYTES(0x9f, INNER_15),
                                    BYTES(0x80),
                                    BYTES(0x81, INNER, INNER),
                                    BYTES(0x8f, INNER_15, INNER_15),
                                    BYTES(0xdc, 0, 1, INNER),
                                    BYTES(0xdd, 0, 0, 0, 1, INNER),
                                    BYTES(0xde, 0, 1, INNER, INNER),
                                    BYTES(0xdf, 0, 0, 0, 1, INNER, INNER)};
    for (size_t i = 0; i < COUNT_OF(containers); i++) {
        assert_ok(check_at_depth(containers[i], KVF_WIRE_MAX_DEPTH - 1));
        assert_fails(check_at_depth(containers[i], KVF_WIRE_MAX_DEPTH), KVF_E_PARSE,
                     "the object at byte 8 is nested deeper than 8");
    }
}

/* Checks a head with so many bytes 0xc0 behind it. */
static kvf_status check_filled(kvf_bytes head, size_t filling) {
    uint8_t *bytes = malloc(head.size + filling);
    assert_non_null(bytes);
    memcpy(bytes, head.data, head.size);
    memset(bytes + head.size, 0xc0, filling);
    kvf_status status = kvf_wire_check((kvf_bytes){bytes, head.size + filling});
    free(bytes);
    return status;
}

static void lengths_are_big_endian(void **state) {
    (void)state;
    static const struct {
        uint8_t head[5];
        size_t head_bytes, filling;
    } cases[] = {{{0xc4, 0xfe}, 2, 0xfe},
                 {{0xc5, 0x01, 0x02}, 3, 0x102},
                 {{0xc6, 0x00, 0x01, 0x02, 0x03}, 5, 0x10203},
                 {{0xdb, 0x01, 0x00, 0x00, 0x02}, 5, 0x1000002},
                 {{0xdc, 0x01, 0x02}, 3, 0x102},
                 {{0xdd, 0x00, 0x01, 0x02, 0x03}, 5, 0x10203},
                 {{0xde, 0x01, 0x02}, 3, 2 * 0x102}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        kvf_bytes head = {cases[i].head, cases[i].head_bytes};
        assert_ok(check_filled(head, cases[i].filling));
        assert_int_equal(check_filled(head, cases[i].filling - 1), KVF_E_PARSE);
        assert_fails(check_filled(head, cases[i].filling + 1), KVF_E_PARSE, "1 bytes after the end");
    }
}

static void bytes_that_are_not_msgpack_are_refused(void **state) {
    (void)state;
    assert_fails(kvf_wire_check((kvf_bytes){NULL, 0}), KVF_E_PARSE, "end in the middle");
    assert_fails(kvf_wire_check(BYTES(0xc1)), KVF_E_PARSE, "0xc1");
    assert_fails(kvf_wire_check(BYTES(0x01, 0x02)), KVF_E_PARSE, "1 bytes after the end");
    assert_fails(kvf_wire_check(BYTES(0xcf, 1, 2)), KVF_E_PARSE, "end inside the object at byte 0");
    assert_fails(kvf_wire_check(BYTES(0x92, 1, 0xcf, 1, 2, 3, 4, 5)), KVF_E_PARSE,
                 "end inside the object at byte 2");
    uint8_t deep[] = {0x91, 0x91, 0x91, 0x91, 0x91, 0x91, 0x91, 0x91, 0x91, 0x01};
    assert_fails(kvf_wire_check((kvf_bytes){deep, sizeof deep}), KVF_E_PARSE, "nested deeper than 8");
    assert_ok(kvf_wire_check((kvf_bytes){deep + 1, sizeof deep - 1}));
}

static void more_objects_than_any_message_has_are_refused(void **state) {
    (void)state;
    size_t size = KVF_WIRE_MAX_OBJECTS + 5;
    uint8_t *bytes = calloc(size, 1);
    assert_non_null(bytes);
    memcpy(bytes, (const uint8_t[]){0xdd, 0, 0x10, 0, 0}, 5);
    assert_fails(kvf_wire_check((kvf_bytes){bytes, size}), KVF_E_PARSE, "more than 1048576 objects");
    free(bytes);
    /* The array itself counts as an object. */
    assert_ok(check_filled(BYTES(0xdd, 0, 0x0f, 0xff, 0xff), KVF_WIRE_MAX_OBJECTS - 1));
}

static void an_envelope_that_is_none_is_refused_in_words(void **state) {
    (void)state;
    kvf_message message;
    assert_fails(kvf_wire_open(BYTES(0x01), &message), KVF_E_PARSE, "message: the envelope is a number");
    assert_fails(kvf_wire_open(BYTES(0x91, 0x01), &message), KVF_E_PARSE, "the envelope has 1 elements");
    assert_fails(kvf_wire_open(BYTES(0x95, 0xa3, 'k', 'v', 'g', 1, 4, 0xc4, 0, 0xc4, 0), &message),
                 KVF_E_PARSE, "does not begin with \"kvf\"");
    assert_fails(kvf_wire_open(BYTES(0x95, 0xa4, 'k', 'v', 'f', '2', 2, 4, 0xc4, 0, 0xc4, 0), &message),
                 KVF_E_PARSE, "does not begin with \"kvf\"");
    assert_fails(kvf_wire_open(BYTES(0x95, 0xa2, 'k', 'v', 2, 4, 0xc4, 0, 0xc4, 0), &message), KVF_E_PARSE,
                 "does not begin with \"kvf\"");
    assert_fails(kvf_wire_open(BYTES(0x95, 0xc4, 3, 'k', 'v', 'f', 2, 4, 0xc4, 0, 0xc4, 0), &message),
                 KVF_E_PARSE, "does not begin with \"kvf\""); /* msgpack bytes are no text */
    assert_fails(kvf_wire_open(BYTES(0x95, 0xa3, 'k', 'v', 'f', 0, 4, 0xc4, 0, 0xc4, 0), &message),
                 KVF_E_PARSE, "version is 0");
    assert_fails(
        kvf_wire_open(BYTES(0x95, 0xa3, 'k', 'v', 'f', KVF_WIRE_VERSION, 8, 0xc4, 0, 0xc4, 0), &message),
        KVF_E_PARSE, "kind is 8");
    assert_fails(
        kvf_wire_open(BYTES(0x95, 0xa3, 'k', 'v', 'f', KVF_WIRE_VERSION, 1, 0xc4, 0, 0xc4, 0), &message),
        KVF_E_PARSE, "digest has 0 bytes; allowed: 32");
    assert_fails(
        kvf_wire_open(BYTES(0x95, 0xa3, 'k', 'v', 'f', KVF_WIRE_VERSION, 4, 0xc4, 1, 9, 0xc4, 0), &message),
        KVF_E_PARSE, "digest has 1 bytes; allowed: 0");
    assert_fails(
        kvf_wire_open(BYTES(0x95, 0xa3, 'k', 'v', 'f', KVF_WIRE_VERSION, 4, 0xc4, 0, 0xa0), &message),
        KVF_E_PARSE, "body is not a msgpack bin");
}

static void a_message_of_another_version_is_opened_but_not_read(void **state) {
    (void)state;
    kvf_message message;
    kvf_bytes bytes = BYTES(0x95, 0xa3, 'k', 'v', 'f', 9, 0xcc, 200, 0xc4, 0, 0xc4, 2, 0xc1, 0xc1);
    assert_ok(kvf_wire_open(BYTES(0x95, 0xa3, 'k', 'v', 'f', 1, 4, 0xc4, 0, 0xc4, 0), &message));
    assert_int_equal(message.version, 1);
    kvf_message_free(&message);
    assert_ok(kvf_wire_open(bytes, &message));
    assert_int_equal(message.version, 9);
    assert_int_equal(message.kind, 200);
    assert_int_equal(message.body.size, 2);
    assert_fails(kvf_wire_read(&message), KVF_E_UNSUPPORTED, "version is 9", "speaks version 2");
    kvf_message_free(&message);
    assert_ok(kvf_wire_open(BYTES(0x95, 0xa3, 'k', 'v', 'f', 1, 4, 0xc4, 0, 0xc4, 0), &message));
    assert_fails(kvf_wire_read(&message), KVF_E_UNSUPPORTED, "version is 1", "speaks version 2");
    kvf_message_free(&message);
}

/* Other versions may have other kinds, but a digest of this size or none. */
static void the_envelope_of_another_version_is_checked(void **state) {
    (void)state;
    uint8_t bytes[] = {0x95, 0xa3, 'k', 'v', 'f', 9, 4, 0xc4, 32, [9 + 31] = 77, 0xc4, 0};
    kvf_message message;
    assert_ok(kvf_wire_open((kvf_bytes){bytes, sizeof bytes}, &message));
    assert_int_equal(message.digest[31], 77);
    bytes[6] = 0;
    assert_ok(kvf_wire_open((kvf_bytes){bytes, sizeof bytes}, &message));
    assert_int_equal(message.kind, 0);
    assert_fails(kvf_wire_open(BYTES(0x95, 0xa3, 'k', 'v', 'f', 9, 4, 0xc4, 1, 1, 0xc4, 0), &message),
                 KVF_E_PARSE, "digest has 1 bytes; allowed: 32");
    assert_fails(
        kvf_wire_open(BYTES(0x95, 0xa3, 'k', 'v', 'f', 0xcf, 0, 0, 0, 1, 0, 0, 0, 2, 4, 0xc4, 0, 0xc4, 0),
                      &message),
        KVF_E_PARSE, "version is 4294967298");
    assert_fails(
        kvf_wire_open(BYTES(0x95, 0xa3, 'k', 'v', 'f', 9, 0xce, 0x80, 0, 0, 0, 0xc4, 0, 0xc4, 0), &message),
        KVF_E_PARSE, "kind is 2147483648");
}

static void a_message_above_the_size_limit_is_refused(void **state) {
    (void)state;
    kvf_message message;
    uint8_t one = 0xc0;
    assert_fails(kvf_wire_open((kvf_bytes){&one, KVF_WIRE_MAX_BYTES + 1}, &message), KVF_E_PARSE,
                 "message: it has 1048577 bytes");
    assert_int_equal(message.version, 0);
}

/* ---- values ---------------------------------------------------------------------------------- */

static void text(msgpack_packer *to, const char *value) {
    msgpack_pack_str_with_body(to, value, strlen(value));
}

/* Reads an EXPECT with one group, whose ids are in the field `form`. */
static kvf_status read_ids(const char *form, kvf_bytes ids) {
    msgpack_sbuffer body;
    msgpack_sbuffer_init(&body);
    msgpack_packer to;
    msgpack_packer_init(&to, &body, msgpack_sbuffer_write);
    msgpack_pack_map(&to, 11);
    text(&to, "session");
    msgpack_pack_bin_with_body(&to, "0123456789abcdef", 16);
    text(&to, "number");
    msgpack_pack_int(&to, 1);
    text(&to, "kind");
    msgpack_pack_int(&to, KVF_CALL_EXPECT);
    text(&to, "request");
    msgpack_pack_bin_with_body(&to, "r", 1);
    text(&to, "generation");
    msgpack_pack_int(&to, 1);
    text(&to, "time_ns");
    msgpack_pack_int(&to, 1);
    text(&to, "rank_count");
    msgpack_pack_int(&to, 1);
    text(&to, "first_id");
    msgpack_pack_int(&to, 0);
    text(&to, "more");
    msgpack_pack_false(&to);
    text(&to, "packed");
    msgpack_pack_int(&to, 0);
    text(&to, "groups");
    msgpack_pack_array(&to, 1);
    msgpack_pack_map(&to, 4);
    text(&to, "first_block");
    msgpack_pack_int(&to, 0);
    text(&to, "begin");
    msgpack_pack_int(&to, 0);
    text(&to, "end");
    msgpack_pack_int(&to, 5);
    text(&to, form);
    msgpack_pack_bin_with_body(&to, ids.data, ids.size);
    kvf_message like = {.kind = KVF_MESSAGE_CALL};
    kvf_status status = read_with_body(&like, &body);
    msgpack_sbuffer_destroy(&body);
    return status;
}

static void runs_of_blocks_are_bounded(void **state) {
    (void)state;
    assert_ok(read_ids("runs", BYTES(5, 0, 0, 0, 9, 0, 0, 0)));
    assert_ok(read_ids("ids", BYTES(5, 0, 0, 0, 9, 0, 0, 0)));
    assert_ok(read_ids("runs", BYTES(0xff, 0xff, 0xff, 0xff, 9, 0, 0, 0)));
    assert_ok(read_ids("runs", BYTES(0xfd, 0xff, 0xff, 0xff, 2, 0, 0, 0))); /* up to the last possible id */
    assert_ok(read_ids("runs", BYTES(0, 0, 0, 0, 0, 0, 3, 0)));
    assert_fails(read_ids("runs", BYTES(0, 0, 0, 0, 1, 0, 3, 0)), KVF_E_PARSE, "more than 196608 ids");
    assert_ok(read_ids("runs", (kvf_bytes){NULL, 0}));
    assert_ok(read_ids("ids", (kvf_bytes){NULL, 0}));
    assert_fails(read_ids("runs", BYTES(0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff)), KVF_E_PARSE,
                 "call EXPECT: groups[0]: the block tables have more than 196608 ids");
    assert_fails(read_ids("runs", BYTES(0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff)), KVF_E_PARSE,
                 "more than 196608 ids");
    assert_fails(read_ids("runs", BYTES(0xfe, 0xff, 0xff, 0xff, 2, 0, 0, 0)), KVF_E_PARSE,
                 "runs has 2 ids from 4294967294 on");
    assert_fails(read_ids("runs", BYTES(0, 0, 0, 0, 0, 0, 0, 0)), KVF_E_PARSE, "runs has 0 ids");
    assert_fails(read_ids("runs", BYTES(0, 0, 0, 0)), KVF_E_PARSE, "runs has 4 bytes", "entries of 8");
    assert_fails(read_ids("ids", BYTES(0, 0, 0, 0, 0)), KVF_E_PARSE, "ids has 5 bytes", "entries of 4");
    assert_fails(read_ids("neither", BYTES(0)), KVF_E_PARSE, "groups[0]: ids is missing");
}

/* Reads a message that has `raw`, which is msgpack, in place of one field's value. */
static kvf_status read_replaced(kvf_message_kind kind, kvf_call_kind call, const char *key, kvf_bytes raw) {
    static wire_sample sample;
    sample_message(&sample, kind, call, 11);
    kvf_wire_buffer encoded = sample_encoded(&sample.message);
    kvf_message opened;
    assert_ok(kvf_wire_open((kvf_bytes){encoded.data, encoded.size}, &opened));
    msgpack_zone zone;
    msgpack_object map;
    assert_ok(kvf_wire_unpack(opened.body, &zone, &map));
    msgpack_sbuffer body;
    msgpack_sbuffer_init(&body);
    msgpack_packer to;
    msgpack_packer_init(&to, &body, msgpack_sbuffer_write);
    msgpack_pack_map(&to, map.via.map.size);
    bool found = false;
    for (uint32_t i = 0; i < map.via.map.size; i++) {
        const msgpack_object_kv *field = &map.via.map.ptr[i];
        const msgpack_object_str *name = &field->key.via.str;
        bool wanted = name->size == strlen(key) && memcmp(name->ptr, key, name->size) == 0;
        msgpack_pack_object(&to, field->key);
        if (wanted)
            (void)msgpack_sbuffer_write(&body, raw.data, raw.size);
        else
            msgpack_pack_object(&to, field->val);
        found = found || wanted;
    }
    assert_true(found);
    kvf_status status = read_with_body(&opened, &body);
    msgpack_sbuffer_destroy(&body);
    msgpack_zone_destroy(&zone);
    kvf_wire_buffer_free(&encoded);
    return status;
}

static kvf_status call_with(kvf_call_kind call, const char *key, kvf_bytes raw) {
    return read_replaced(KVF_MESSAGE_CALL, call, key, raw);
}

#define REFUSED(call, ...) assert_fails(call, KVF_E_PARSE, __VA_ARGS__)

static void each_field_has_its_range(void **state) {
    (void)state;
    REFUSED(call_with(KVF_CALL_CHECKSUM, "group", BYTES(0xcd, 1, 0)), "group is 256", "0 to 255");
    REFUSED(call_with(KVF_CALL_CHECKSUM, "part", BYTES(64)), "part is 64", "0 to 63");
    REFUSED(call_with(KVF_CALL_CHECKSUM, "layers", BYTES(0x93, 0, 0, 0)), "layers has 3 elements");
    REFUSED(call_with(KVF_CALL_CHECKSUM, "layers", BYTES(0x91, 0)), "layers has 1 elements");
    REFUSED(call_with(KVF_CALL_CHECKSUM, "layers", BYTES(0x92, 3, 2)), "layers is [3, 2)");
    assert_ok(call_with(KVF_CALL_CHECKSUM, "layers", BYTES(0x92, 0, 0xce, 0xff, 0xff, 0xff, 0xff)));
    REFUSED(call_with(KVF_CALL_CHECKSUM, "layers", BYTES(0x92, 0, 0xcf, 0, 0, 0, 1, 0, 0, 0, 0)),
            "layers is 4294967296");
    REFUSED(call_with(KVF_CALL_CHECKSUM, "layers", BYTES(0x92, 0xcf, 0, 0, 0, 1, 0, 0, 0, 0, 7)),
            "layers is 4294967296");
    REFUSED(call_with(KVF_CALL_EXPECT, "packed", BYTES(2)), "packed is 2");
    REFUSED(call_with(KVF_CALL_JOIN, "stage", BYTES(3)), "stage is 3");
    REFUSED(read_replaced(KVF_MESSAGE_ANSWER, KVF_CALL_JOIN, "stage", BYTES(2)), "stage is 2");
    REFUSED(call_with(KVF_CALL_ACQUIRE, "first_id", BYTES(0xce, 0, 0x40, 0, 1)), "first_id is 4194305");
    REFUSED(read_replaced(KVF_MESSAGE_ANSWER, KVF_CALL_ACQUIRE, "first_id", BYTES(0xce, 0, 0x40, 0, 1)),
            "first_id is 4194305");
    REFUSED(call_with(KVF_CALL_ACQUIRE, "rank_count", BYTES(0)), "rank_count is 0");
    REFUSED(call_with(KVF_CALL_ACQUIRE, "rank_count", BYTES(0xce, 0, 1, 0, 1)), "rank_count is 65537");
    REFUSED(call_with(KVF_CALL_ACQUIRE, "rank_count", BYTES(0xcf, 0, 0, 0, 1, 0, 0, 0, 1)),
            "rank_count is 4294967297");
    REFUSED(call_with(KVF_CALL_RELEASE, "earlier", BYTES(0xcf, 255, 255, 255, 255, 255, 255, 255, 255)),
            "below number");
}

static void each_field_has_its_length(void **state) {
    (void)state;
    assert_ok(call_with(KVF_CALL_BEAT, "leases", BYTES(0xc4, 8, 0, 0, 0, 0, 0, 0, 0, 0)));
    REFUSED(call_with(KVF_CALL_BEAT, "leases", BYTES(0xc4, 7, 0, 0, 0, 0, 0, 0, 0)), "leases has 7 bytes",
            "entries of 8");
    REFUSED(call_with(KVF_CALL_BEAT, "expectations", BYTES(0xc4, 8, 0, 0, 0, 0, 0, 0, 0, 0)),
            "expectations has 8 bytes", "entries of 16");
    REFUSED(call_with(KVF_CALL_JOIN, "introduction", BYTES(0xc4, 0)), "introduction has 0 bytes");
    assert_ok(call_with(KVF_CALL_JOIN, "introduction", BYTES(0xc4, 1, 0)));
    assert_ok(call_with(KVF_CALL_JOIN, "card", BYTES(0xc4, 0)));
    REFUSED(call_with(KVF_CALL_ACQUIRE, "request", BYTES(0xc4, 0)), "request has 0 bytes");
    REFUSED(call_with(KVF_CALL_ACQUIRE, "session", BYTES(0xc4, 2, 1, 1)), "session has 2 bytes", "16 to 16");
    REFUSED(
        read_replaced(KVF_MESSAGE_WELCOME, KVF_CALL_JOIN, "introductions", BYTES(0x92, 0xc4, 1, 1, 0xc4, 0)),
        "introductions has 0 bytes");
    REFUSED(read_replaced(KVF_MESSAGE_WELCOME, KVF_CALL_JOIN, "engine", BYTES(0xa0)), "engine has 0 bytes");
    REFUSED(read_replaced(KVF_MESSAGE_HELLO, KVF_CALL_JOIN, "engine", BYTES(0xa1, 0x7f)),
            "control character 0x7f");
    REFUSED(read_replaced(KVF_MESSAGE_HELLO, KVF_CALL_JOIN, "engine", BYTES(0xa1, 0)),
            "control character 0x00");
    uint8_t groups[3 + 257] = {0xdc, 1, 1}; /* the elements are numbers, none is a map */
    REFUSED(call_with(KVF_CALL_EXPECT, "groups", (kvf_bytes){groups, sizeof groups}),
            "groups has 257 elements", "0 to 256");
    groups[2] = 0;
    REFUSED(call_with(KVF_CALL_EXPECT, "groups", (kvf_bytes){groups, sizeof groups - 1}), "groups[0]",
            "the body is a number; it must be a map");
}

/* The library writes the key, and the test replaces its last character by a zero, which a C string cannot contain. */
static void a_public_key_has_no_zero_in_it(void **state) {
    (void)state;
    const char key[] = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7";
    const kvf_introduction introduction = {
        .engine = "p", .rank_count = 1, .shard = {"s", 1}, .public_key = key};
    kvf_wire_buffer encoded = {0};
    assert_ok(kvf_wire_encode_introduction(&introduction, &encoded));
    const kvf_bytes bytes = {encoded.data, encoded.size};
    assert_ok(read_introduction(bytes));
    char *written = memmem(encoded.data, encoded.size, key, sizeof key - 1);
    assert_non_null(written);
    written[39] = '\0';
    REFUSED(read_introduction(bytes), "introduction: public_key has 0x00 at character 39");
    kvf_wire_buffer_free(&encoded);
}

static kvf_status read_refused(uint64_t status, const char *detail, size_t detail_bytes) {
    msgpack_sbuffer body;
    msgpack_sbuffer_init(&body);
    msgpack_packer to;
    msgpack_packer_init(&to, &body, msgpack_sbuffer_write);
    msgpack_pack_map(&to, 3);
    text(&to, "status");
    msgpack_pack_uint64(&to, status);
    text(&to, "detail");
    msgpack_pack_str_with_body(&to, detail, detail_bytes);
    text(&to, "facts");
    text(&to, "");
    kvf_message like = {.kind = KVF_MESSAGE_REFUSED};
    kvf_status result = read_with_body(&like, &body);
    msgpack_sbuffer_destroy(&body);
    return result;
}

static void values_out_of_their_range_are_refused(void **state) {
    (void)state;
    assert_ok(read_refused(KVF_E_TIMEOUT, "late", 4));
    assert_fails(read_refused(KVF_IN_PROGRESS, "", 0), KVF_E_PARSE, "REFUSED: status is 22");
    assert_fails(read_refused(UINT64_MAX, "", 0), KVF_E_PARSE, "status is 18446744073709551615");
    assert_fails(read_refused(1ull << 32, "", 0), KVF_E_PARSE, "status is 4294967296");
    assert_fails(read_refused(0, "a\0b", 3), KVF_E_PARSE, "detail has a zero byte at byte 1");
    char *longest = calloc(KVF_WIRE_MAX_DETAIL + 1, 1);
    assert_non_null(longest);
    memset(longest, 'x', KVF_WIRE_MAX_DETAIL + 1);
    assert_ok(read_refused(0, longest, KVF_WIRE_MAX_DETAIL));
    assert_fails(read_refused(0, longest, KVF_WIRE_MAX_DETAIL + 1), KVF_E_PARSE, "detail has 4097 bytes");
    free(longest);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_field_must_be_there_once_and_of_its_type),
        cmocka_unit_test(damaged_messages_are_refused_or_are_other_messages),
        cmocka_unit_test(damaged_introductions_are_refused_or_are_other_introductions),
        cmocka_unit_test(damaged_shards_are_refused_or_are_other_shards),
        cmocka_unit_test(counts_that_nothing_stands_behind_are_refused_before_unpacking),
        cmocka_unit_test(every_type_of_object_is_stepped_over),
        cmocka_unit_test(every_type_of_object_ends_where_it_should_at_the_greatest_depth),
        cmocka_unit_test(lengths_are_big_endian),
        cmocka_unit_test(bytes_that_are_not_msgpack_are_refused),
        cmocka_unit_test(more_objects_than_any_message_has_are_refused),
        cmocka_unit_test(an_envelope_that_is_none_is_refused_in_words),
        cmocka_unit_test(a_message_of_another_version_is_opened_but_not_read),
        cmocka_unit_test(the_envelope_of_another_version_is_checked),
        cmocka_unit_test(a_message_above_the_size_limit_is_refused),
        cmocka_unit_test(runs_of_blocks_are_bounded),
        cmocka_unit_test(each_field_has_its_range),
        cmocka_unit_test(each_field_has_its_length),
        cmocka_unit_test(a_public_key_has_no_zero_in_it),
        cmocka_unit_test(values_out_of_their_range_are_refused),
    };
    return cmocka_run_group_tests_name("wire_hostile", tests, NULL, NULL);
}
