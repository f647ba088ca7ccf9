/* Records in messages: how large they may be beside everything else, and what is refused. */
#include "wire/fields.h"
#include "wire_samples.h"

static void pack_text(msgpack_packer *packer, const char *text) {
    msgpack_pack_str_with_body(packer, text, strlen(text));
}

static kvf_status read_records(const kvf_message *message, const uint8_t *find, const uint8_t *change,
                               size_t size) {
    kvf_wire_buffer bytes = sample_encoded(message);
    uint8_t *at = NULL;
    for (size_t i = 0; i + size <= bytes.size && !at; i++)
        if (memcmp(bytes.data + i, find, size) == 0)
            at = bytes.data + i;
    assert_non_null(at);
    memcpy(at, change, size);
    kvf_message read;
    kvf_status status = kvf_wire_open((kvf_bytes){bytes.data, bytes.size}, &read);
    assert_ok(status);
    status = kvf_wire_read(&read);
    kvf_message_free(&read);
    kvf_wire_buffer_free(&bytes);
    return status;
}

/* Writes a WRITTEN with a record, changes one place in its bytes, and reads it. */
#define READ_WITH(record_, find_, change_)                                                                   \
    read_records(&(kvf_message){.kind = KVF_MESSAGE_CALL,                                                    \
                                .call = {.kind = KVF_CALL_WRITTEN,                                           \
                                         .request = {"r", 1},                                                \
                                         .records = &(record_),                                              \
                                         .record_count = 1}},                                                \
                 (const uint8_t *)(find_), (const uint8_t *)(change_), sizeof(find_) - 1)

static void a_record_that_a_sender_may_not_say_is_not_read(void **state) {
    (void)state;
    const kvf_record record = {.name = "token", .begin = 5, .end = 6, .data = "abc", .size = 3};
    assert_ok(READ_WITH(record, "\xa5token", "\xa5toke_"));
    assert_fails(READ_WITH(record, "\xa5token", "\xa5tok\x01n"), KVF_E_PARSE, "records[0]",
                 "control character");
    assert_fails(READ_WITH(record,
                           "\xa3"
                           "end\x06",
                           "\xa3"
                           "end\x04"),
                 KVF_E_PARSE, "records[0]", "[5, 4)");
    assert_fails(READ_WITH(record,
                           "\xa3"
                           "end\x06",
                           "\xa3"
                           "End\x06"),
                 KVF_E_PARSE, "records[0]", "end is missing");
    assert_fails(READ_WITH(record, "\xa4name", "\xa4nam\x80"), KVF_E_PARSE, "name is missing");
    assert_fails(READ_WITH(record,
                           "\xc4\x03"
                           "abc",
                           "\xa4"
                           "1abc"),
                 KVF_E_PARSE, "data is a text");
    assert_ok(READ_WITH(record, "\xa7records", "\xa7recorDs")); /* an unknown field, and so no records */
    assert_fails(READ_WITH(record, "\xa7records\x91", "\xa7records\x01"), KVF_E_PARSE, "");
}

/* Block tables with as many ids as a message may have, no two of them adjacent. */
static kvf_answer largest_answer(const kvf_record *records, uint32_t count) {
    static uint32_t ids[KVF_WIRE_MAX_BLOCKS];
    static kvf_wire_group groups[256];
    for (uint32_t i = 0; i < KVF_WIRE_MAX_BLOCKS; i++)
        ids[i] = 1000000000u + 2 * i;
    for (uint32_t g = 0; g < 256; g++)
        groups[g] = (kvf_wire_group){{NULL, 0, UINT32_MAX}, UINT64_MAX - 1, UINT64_MAX};
    groups[0].table = (kvf_block_table){ids, KVF_WIRE_MAX_BLOCKS, UINT32_MAX};
    return (kvf_answer){.kind = KVF_CALL_ACQUIRE,
                        .number = UINT64_MAX,
                        .generation = UINT64_MAX,
                        .time_ns = UINT64_MAX,
                        .groups = groups,
                        .group_count = 256,
                        .more = true,
                        .records = records,
                        .record_count = count};
}

static void the_most_records_fit_beside_the_most_blocks(void **state) {
    (void)state;
    static uint8_t data[KVF_MAX_RECORDS_BYTES];
    char name[KVF_MAX_RECORD_NAME + 1] = "";
    kvf_record records[KVF_MAX_RECORDS];
    memset(name, 'n', KVF_MAX_RECORD_NAME);
    for (uint32_t i = 0; i < KVF_MAX_RECORDS; i++)
        records[i] = (kvf_record){.name = name,
                                  .begin = UINT64_MAX - 1,
                                  .end = UINT64_MAX,
                                  .data = data,
                                  .size = sizeof data / KVF_MAX_RECORDS};
    kvf_message message = {.kind = KVF_MESSAGE_ANSWER, .answer = largest_answer(records, KVF_MAX_RECORDS)};
    kvf_wire_buffer bytes = sample_encoded(&message);
    assert_true(bytes.size <= KVF_WIRE_MAX_BYTES);
    kvf_message read;
    assert_ok(kvf_wire_open((kvf_bytes){bytes.data, bytes.size}, &read));
    assert_ok(kvf_wire_read(&read));
    assert_same_message(&read, &(kvf_message){.kind = KVF_MESSAGE_ANSWER, .answer = message.answer});
    kvf_message_free(&read);
    kvf_wire_buffer_free(&bytes);
}

static void too_many_or_too_large_ones_are_not_sent(void **state) {
    (void)state;
    static uint8_t data[KVF_MAX_RECORDS_BYTES];
    kvf_record records[KVF_MAX_RECORDS + 1];
    for (uint32_t i = 0; i < COUNT_OF(records); i++)
        records[i] = (kvf_record){.name = "n", .data = data};
    kvf_message message = {.kind = KVF_MESSAGE_ANSWER,
                           .answer = {.kind = KVF_CALL_ACQUIRE, .records = records, .record_count = 65}};
    kvf_wire_buffer bytes;
    assert_fails(kvf_wire_encode(&message, &bytes), KVF_E_RANGE, "records has 65", "0 to 64");
    message.answer.record_count = 64;
    records[3].size = sizeof data;
    records[63].size = 1;
    assert_fails(kvf_wire_encode(&message, &bytes), KVF_E_RANGE, "records[63]", "131072");
    records[63].size = 0;
    bytes = sample_encoded(&message);
    kvf_wire_buffer_free(&bytes);
}

static void names_have_a_letter_at_least_and_64_at_most(void **state) {
    (void)state;
    char name[100] = "";
    kvf_record record = {.name = name};
    kvf_message message = {.kind = KVF_MESSAGE_ANSWER,
                           .answer = {.kind = KVF_CALL_ACQUIRE, .records = &record, .record_count = 1}};
    kvf_wire_buffer bytes;
    assert_fails(kvf_wire_encode(&message, &bytes), KVF_E_RANGE, "records[0]: name has 0 bytes", "1 to 64");
    memset(name, 'n', KVF_MAX_RECORD_NAME);
    bytes = sample_encoded(&message);
    kvf_wire_buffer_free(&bytes);
    memset(name, 'n', sizeof name); /* no text: nothing looks for its end beyond the limit */
    assert_fails(kvf_wire_encode(&message, &bytes), KVF_E_RANGE, "records[0]: name has 65 bytes");
}

/* Reads a message that the library's own sender would refuse, with one record too many or one byte too many, as a peer
 * without checks may write it. */
static kvf_status read_made(uint32_t count, size_t bytes_each) {
    msgpack_sbuffer body;
    msgpack_packer packer;
    msgpack_sbuffer_init(&body);
    msgpack_packer_init(&packer, &body, msgpack_sbuffer_write);
    static const char data[KVF_MAX_RECORDS_BYTES];
    msgpack_pack_array(&packer, count);
    for (uint32_t i = 0; i < count; i++) {
        msgpack_pack_map(&packer, 4);
        pack_text(&packer, "name");
        pack_text(&packer, "n");
        pack_text(&packer, "begin");
        msgpack_pack_uint64(&packer, 0);
        pack_text(&packer, "end");
        msgpack_pack_uint64(&packer, 0);
        pack_text(&packer, "data");
        msgpack_pack_bin_with_body(&packer, data, bytes_each);
    }
    msgpack_unpacked object;
    msgpack_unpacked_init(&object);
    assert_int_equal(msgpack_unpack_next(&object, body.data, body.size, NULL), MSGPACK_UNPACK_SUCCESS);
    const kvf_record *records = NULL;
    uint32_t read = 0;
    void *storage = NULL;
    kvf_status status = kvf_wire_records_read(&object.data, "records", &records, &read, &storage);
    assert_int_equal(read, status ? 0 : count);
    kvf_wire_discard(&storage);
    msgpack_unpacked_destroy(&object);
    msgpack_sbuffer_destroy(&body);
    return status;
}

static void too_many_or_too_large_ones_are_not_read(void **state) {
    (void)state;
    assert_ok(read_made(64, KVF_MAX_RECORDS_BYTES / 64));
    assert_fails(read_made(65, 0), KVF_E_PARSE, "records has 65", "0 to 64");
    assert_fails(read_made(64, KVF_MAX_RECORDS_BYTES / 64 + 1), KVF_E_PARSE, "records[63]", "131072");
    assert_ok(read_made(0, 0));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_record_that_a_sender_may_not_say_is_not_read),
        cmocka_unit_test(the_most_records_fit_beside_the_most_blocks),
        cmocka_unit_test(too_many_or_too_large_ones_are_not_sent),
        cmocka_unit_test(too_many_or_too_large_ones_are_not_read),
        cmocka_unit_test(names_have_a_letter_at_least_and_64_at_most),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
