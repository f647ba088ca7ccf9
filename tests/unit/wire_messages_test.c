/*
 * Messages: every written message is read back, messages that must not be sent are refused, and the envelope can be
 * read whatever its version.
 */
#include "wire_samples.h"

#define ROUNDS 200

/* ---- there and back -------------------------------------------------------------------------- */

static void check_every_kind(void) {
    static wire_sample sample;
    for (uint32_t n = 0; n < SAMPLE_KINDS; n++) {
        for (uint64_t seed = 1; seed <= ROUNDS; seed++) {
            kvf_message_kind kind;
            kvf_call_kind call;
            sample_kind(n, &kind, &call);
            sample_message(&sample, kind, call, seed);
            kvf_wire_buffer encoded = sample_encoded(&sample.message);
            kvf_message read;
            assert_ok(kvf_wire_open((kvf_bytes){encoded.data, encoded.size}, &read));
            assert_int_equal(read.version, KVF_WIRE_VERSION);
            assert_ok(kvf_wire_read(&read));
            assert_same_message(&sample.message, &read);
            kvf_message_free(&read);
            kvf_wire_buffer_free(&encoded);
        }
    }
}

static void every_kind_of_message_reads_as_it_was_written(void **state) {
    (void)state;
    check_every_kind();
}

static void *allocate_dirty(void *context, size_t bytes) {
    (void)context;
    void *memory = malloc(bytes);
    return memory ? memset(memory, 0xa5, bytes) : NULL;
}

static void *resize_dirty(void *context, void *memory, size_t bytes) {
    return memory ? realloc(memory, bytes) : allocate_dirty(context, bytes);
}

static void release(void *context, void *memory) {
    (void)context;
    free(memory);
}

static void what_memory_held_before_is_not_read(void **state) {
    (void)state;
    const kvf_allocator dirty = {allocate_dirty, resize_dirty, release, NULL};
    assert_ok(kvf_set_allocator(&dirty));
    check_every_kind();
}

static void an_introduction_reads_as_it_was_written(void **state) {
    (void)state;
    static wire_sample sample;
    for (uint64_t seed = 1; seed <= ROUNDS; seed++) {
        sample_introduction(&sample, seed);
        kvf_wire_buffer encoded = {0};
        assert_ok(kvf_wire_encode_introduction(&sample.introduction, &encoded));
        kvf_introduction read;
        void *storage;
        assert_ok(kvf_wire_decode_introduction((kvf_bytes){encoded.data, encoded.size}, &read, &storage));
        assert_same_introduction(&sample.introduction, &read);
        kvf_free(storage);
        kvf_wire_buffer_free(&encoded);
    }
}

/* Its texts take no more memory than its bytes, however long they are. */
static void what_is_read_of_an_introduction_is_freed_at_once(void **state) {
    (void)state;
    static char facts[5001], name[KVF_WIRE_MAX_NAME + 1];
    memset(facts, 'f', sizeof facts - 1);
    memset(name, 'n', sizeof name - 1);
    const kvf_introduction introduction = {
        .engine = name, .rank_count = 1, .endpoint = name, .shard = {"s", 1}, .facts = facts};
    kvf_introduction read;
    void *storage;
    kvf_wire_buffer encoded = {0};
    memory_count memory;
    count_memory(&memory);
    assert_ok(kvf_wire_encode_introduction(&introduction, &encoded));
    const size_t live = memory.live;
    assert_ok(kvf_wire_decode_introduction((kvf_bytes){encoded.data, encoded.size}, &read, &storage));
    assert_same_introduction(&introduction, &read);
    kvf_free(storage);
    assert_int_equal(memory.live, live);
    kvf_wire_buffer_free(&encoded);
}

static void another_session_can_be_written_into_a_message(void **state) {
    (void)state;
    static wire_sample one, other;
    const kvf_message_kind kinds[] = {KVF_MESSAGE_CALL, KVF_MESSAGE_ANSWER};
    for (int k = 0; k < 2; k++)
        for (kvf_call_kind call = KVF_CALL_JOIN; call <= KVF_CALL_CHECKSUM; call++)
            for (uint64_t seed = 1; seed <= 20; seed++) {
                sample_message(&one, kinds[k], call, seed);
                sample_message(&other, kinds[k], call, seed);
                uint8_t *session = k ? other.message.answer.session : other.message.call.session;
                for (uint32_t i = 0; i < KVF_WIRE_SESSION_BYTES; i++)
                    session[i] = (uint8_t)(session[i] + 1 + i);
                kvf_wire_buffer bound = sample_encoded(&one.message), wanted = sample_encoded(&other.message);
                kvf_wire_set_session(&bound, session);
                assert_int_equal(bound.size, wanted.size);
                assert_memory_equal(bound.data, wanted.data, wanted.size);
                kvf_wire_buffer_free(&bound);
                kvf_wire_buffer_free(&wanted);
            }
}

static void a_message_can_be_read_again(void **state) {
    (void)state;
    static wire_sample sample;
    sample_message(&sample, KVF_MESSAGE_CALL, KVF_CALL_EXPECT, 7);
    kvf_wire_buffer encoded = sample_encoded(&sample.message);
    kvf_message read;
    assert_ok(kvf_wire_open((kvf_bytes){encoded.data, encoded.size}, &read));
    assert_ok(kvf_wire_read(&read));
    assert_ok(kvf_wire_read(&read));
    assert_same_message(&sample.message, &read);
    kvf_message_free(&read);
    kvf_message_free(&read);
    kvf_wire_buffer_free(&encoded);
}

static void fields_a_kind_does_not_have_are_not_sent(void **state) {
    (void)state;
    kvf_call_body call = {.kind = KVF_CALL_WITHDRAW, .request = {"r", 1}, .generation = 3};
    kvf_message bare = {.kind = KVF_MESSAGE_CALL, .call = call}, full = bare;
    full.call.detail = "not of a WITHDRAW";
    full.call.bytes = 5;
    full.call.lease_count = 1; /* a count without leases, at which nothing looks */
    kvf_wire_buffer a = sample_encoded(&bare), b = sample_encoded(&full);
    assert_int_equal(a.size, b.size);
    assert_memory_equal(a.data, b.data, a.size);
    assert_true(a.size < 100);
    kvf_wire_buffer_free(&a);
    kvf_wire_buffer_free(&b);
}

static void no_text_is_read_as_the_empty_text(void **state) {
    (void)state;
    kvf_message sent = {.kind = KVF_MESSAGE_REFUSED, .refused = {.status = KVF_E_PERMISSION}}, read;
    kvf_wire_buffer encoded = sample_encoded(&sent);
    assert_ok(kvf_wire_open((kvf_bytes){encoded.data, encoded.size}, &read));
    assert_ok(kvf_wire_read(&read));
    assert_string_equal(read.refused.detail, "");
    kvf_message_free(&read);
    kvf_wire_buffer_free(&encoded);
}

/* They are logged and printed: an end of a line would begin a line of the peer's own. */
static void sentences_of_peers_are_read_without_control_characters(void **state) {
    (void)state;
    static const char said[] = "full\r\n{\"level\":\"INFO\"} \x1b[2J\x7f M\xc3\xbcnchen\t~";
    static const char shown[] = "full??{\"level\":\"INFO\"} ?[2J? M\xc3\xbcnchen?~";
    const kvf_message messages[] = {
        {.kind = KVF_MESSAGE_REFUSED, .refused = {.detail = said}},
        {.kind = KVF_MESSAGE_CALL, .call = {.kind = KVF_CALL_WRITTEN, .request = {"r", 1}, .detail = said}},
        {.kind = KVF_MESSAGE_ANSWER, .answer = {.kind = KVF_CALL_JOIN, .detail = said}},
        {.kind = KVF_MESSAGE_REPLY, .reply = {.detail = said}}};
    for (size_t i = 0; i < sizeof messages / sizeof *messages; i++) {
        kvf_message read;
        kvf_wire_buffer encoded = sample_encoded(&messages[i]);
        assert_ok(kvf_wire_open((kvf_bytes){encoded.data, encoded.size}, &read));
        assert_ok(kvf_wire_read(&read));
        assert_string_equal(read.kind == KVF_MESSAGE_REFUSED  ? read.refused.detail
                            : read.kind == KVF_MESSAGE_CALL   ? read.call.detail
                            : read.kind == KVF_MESSAGE_ANSWER ? read.answer.detail
                                                              : read.reply.detail,
                            shown);
        kvf_message_free(&read);
        kvf_wire_buffer_free(&encoded);
    }
}

/* Written by hand from the protocol's document: reading back would not show a fault that writer and reader share. */
static void a_beat_is_these_bytes(void **state) {
    (void)state;
    static const char written[] = "\x95\xa3kvf\x02\x04\xc4\x00\xc4\x73\x86"
                                  "\xa7session\xc4\x10"
                                  "0123456789abcdef"
                                  "\xa6number\x09"
                                  "\xa4kind\x04"
                                  "\xa6leases\xc4\x08"
                                  "\x07\0\0\0\0\0\0\0"
                                  "\xac"
                                  "expectations\xc4\x20"
                                  "\x01\0\0\0\0\0\0\x80"
                                  "\x02\x01\0\0\0\0\0\0"
                                  "\x03\0\0\0\0\0\0\x80"
                                  "\x04\0\0\0\0\0\0\0"
                                  "\xa8"
                                  "clock_ns\x2a";
    const uint64_t lease = 7, expectations[] = {UINT64_C(1) << 63 | 1, 0x102, UINT64_C(1) << 63 | 3, 4};
    kvf_message sent = {.kind = KVF_MESSAGE_CALL,
                        .call = {.session = "0123456789abcde",
                                 .number = 9,
                                 .kind = KVF_CALL_BEAT,
                                 .leases = &lease,
                                 .lease_count = 1,
                                 .expectations = expectations,
                                 .expectation_count = 2,
                                 .clock_ns = 42}};
    sent.call.session[KVF_WIRE_SESSION_BYTES - 1] = 'f';
    kvf_wire_buffer encoded = sample_encoded(&sent);
    assert_int_equal(encoded.size, sizeof written - 1);
    assert_memory_equal(encoded.data, written, encoded.size);
    kvf_wire_buffer_free(&encoded);
    kvf_message read;
    assert_ok(kvf_wire_open((kvf_bytes){written, sizeof written - 1}, &read));
    assert_ok(kvf_wire_read(&read));
    assert_same_message(&sent, &read);
    kvf_message_free(&read);
}

static void an_answer_to_a_beat_is_these_bytes(void **state) {
    (void)state;
    static const char written[] = "\x95\xa3kvf\x02\x05\xc4\x00\xc4\x63\x88"
                                  "\xa7session\xc4\x10"
                                  "0123456789abcdef"
                                  "\xa6number\x09"
                                  "\xa4kind\x04"
                                  "\xa6status\x00"
                                  "\xa6"
                                  "detail\xa0"
                                  "\xa7time_ns\x05"
                                  "\xa4gone\xc4\x10"
                                  "\x07\0\0\0\0\0\0\0"
                                  "\x02\x01\0\0\0\0\0\0"
                                  "\xa8"
                                  "clock_ns\x2a";
    const uint64_t gone[] = {7, 0x102};
    kvf_message sent = {.kind = KVF_MESSAGE_ANSWER,
                        .answer = {.session = "0123456789abcde",
                                   .number = 9,
                                   .kind = KVF_CALL_BEAT,
                                   .time_ns = 5,
                                   .gone = gone,
                                   .gone_count = 2,
                                   .clock_ns = 42}};
    sent.answer.session[KVF_WIRE_SESSION_BYTES - 1] = 'f';
    kvf_wire_buffer encoded = sample_encoded(&sent);
    assert_int_equal(encoded.size, sizeof written - 1);
    assert_memory_equal(encoded.data, written, encoded.size);
    kvf_wire_buffer_free(&encoded);
}

/* Each checksum has eight bytes, in every message. */
static void checksums_are_these_bytes(void **state) {
    (void)state;
    static const char written[] = "\xa4sums\xc4\x10\x07\0\0\0\0\0\0\0\x02\x01\0\0\0\0\0\0";
    const uint64_t sums[] = {7, 0x102};
    kvf_message sent = {.kind = KVF_MESSAGE_ANSWER,
                        .answer = {.kind = KVF_CALL_CHECKSUM, .sums = sums, .sum_count = 2}};
    kvf_wire_buffer encoded = sample_encoded(&sent);
    assert_memory_equal(encoded.data + encoded.size - (sizeof written - 1), written, sizeof written - 1);
    kvf_wire_buffer_free(&encoded);
}

static void a_buffer_that_was_freed_is_empty(void **state) {
    (void)state;
    kvf_message sent = {.kind = KVF_MESSAGE_REFUSED, .refused = {.status = KVF_E_PERMISSION}};
    kvf_wire_buffer encoded = sample_encoded(&sent);
    kvf_wire_buffer_free(&encoded);
    assert_null(encoded.data);
    assert_int_equal(encoded.size, 0);
    kvf_wire_buffer_free(&encoded);
    kvf_wire_buffer_free(NULL);
}

/* ---- block tables ---------------------------------------------------------------------------- */

static kvf_message expect_of(const kvf_wire_group *groups, uint32_t count) {
    return (kvf_message){.kind = KVF_MESSAGE_CALL,
                         .call = {.kind = KVF_CALL_EXPECT,
                                  .request = {"r", 1},
                                  .rank_count = 1,
                                  .groups = groups,
                                  .group_count = count}};
}

static size_t encoded_table(const uint32_t *ids, uint32_t count) {
    kvf_wire_group group = {.table = {ids, count, 0}, .begin = 0, .end = 1};
    kvf_message sent = expect_of(&group, 1), read;
    kvf_wire_buffer encoded = sample_encoded(&sent);
    assert_ok(kvf_wire_open((kvf_bytes){encoded.data, encoded.size}, &read));
    assert_ok(kvf_wire_read(&read));
    assert_same_message(&sent, &read);
    kvf_message_free(&read);
    size_t size = encoded.size;
    kvf_wire_buffer_free(&encoded);
    return size;
}

static void neighbouring_blocks_are_written_as_runs(void **state) {
    (void)state;
    static uint32_t ids[100000];
    for (uint32_t i = 0; i < COUNT_OF(ids); i++)
        ids[i] = i < 5000 ? KVF_NO_BLOCK : 7 + i;
    assert_true(encoded_table(ids, COUNT_OF(ids)) < 300);
}

static void scattered_blocks_take_four_bytes_each(void **state) {
    (void)state;
    static uint32_t ids[100000];
    for (uint32_t i = 0; i < COUNT_OF(ids); i++)
        ids[i] = i * 2654435761u;
    assert_true(encoded_table(ids, COUNT_OF(ids)) < 4 * COUNT_OF(ids) + 300);
}

/* If both forms have the same length, "ids" is written. The key "runs" has a byte more than "ids". */
static void the_shorter_form_is_written(void **state) {
    (void)state;
    const uint32_t pairs[] = {1, 2, 5, 6}, odd[] = {1, 2, 3, 5, 6}, three[] = {1, 2, 3, 5, 6, 7};
    const uint32_t six_pairs[] = {1, 2, 5, 6, 9, 10, 13, 14, 17, 18, 21, 22};
    size_t none = encoded_table(pairs, 0);
    assert_int_equal(encoded_table(pairs, 4), none + 16);
    assert_int_equal(encoded_table(pairs, 3), none + 12);
    assert_int_equal(encoded_table(odd, 3), none + 1 + 8);
    assert_int_equal(encoded_table(six_pairs, 12), none + 48);
    assert_int_equal(encoded_table(odd, 5), none + 1 + 16);
    assert_int_equal(encoded_table(three, 6), none + 1 + 16);
}

/* Writer and reader both count the ids over all groups. */
static void tables_have_a_most_of_ids_in_all(void **state) {
    (void)state;
    enum { FIRST = 100000 };
    static uint32_t ids[KVF_WIRE_MAX_BLOCKS];
    for (uint32_t i = 0; i < COUNT_OF(ids); i++)
        ids[i] = 7 + i;
    kvf_wire_group groups[2] = {{.table = {ids, FIRST, 0}, .end = 1},
                                {.table = {ids + 1, KVF_WIRE_MAX_BLOCKS - FIRST, 0}, .end = 1}};
    kvf_message most = expect_of(groups, 2), read;
    kvf_wire_buffer encoded = sample_encoded(&most);
    kvf_bytes bytes = {encoded.data, encoded.size};
    assert_ok(kvf_wire_open(bytes, &read));
    assert_ok(kvf_wire_read(&read));
    assert_same_message(&most, &read);
    kvf_message_free(&read);
    const uint32_t run[] = {8, KVF_WIRE_MAX_BLOCKS - FIRST};
    uint8_t *count = memmem(encoded.data, encoded.size, run, sizeof run);
    assert_non_null(count);
    count[4]++; /* the lowest byte of the count */
    assert_ok(kvf_wire_open(bytes, &read));
    assert_fails(kvf_wire_read(&read), KVF_E_PARSE, "groups[1]: the block tables have more than 196608 ids");
    kvf_message_free(&read);
    kvf_wire_buffer_free(&encoded);
    groups[1].table = (kvf_block_table){ids, KVF_WIRE_MAX_BLOCKS - FIRST + 1, 0};
    assert_fails(kvf_wire_encode(&most, &encoded), KVF_E_RANGE, "groups[1]: the block tables has 196609 ids",
                 "0 to 196608");
}

static void check_part(const kvf_wire_group *part, const uint32_t *ids, uint32_t count, uint32_t first) {
    assert_int_equal(part->table.count, count);
    assert_ptr_equal(part->table.ids, ids);
    assert_int_equal(part->table.first_block, first);
    assert_int_equal(part->begin, 2);
    assert_int_equal(part->end, 9);
}

static void tables_are_cut_where_a_message_is_full(void **state) {
    (void)state;
    enum { FIRST = 100000, SECOND = 150000, LEFT = FIRST + SECOND - KVF_WIRE_MAX_BLOCKS };
    static uint32_t ids[SECOND];
    const kvf_wire_group groups[2] = {{.table = {ids, FIRST, 3}, .begin = 2, .end = 9},
                                      {.table = {ids, SECOND, 5}, .begin = 2, .end = 9}};
    const uint32_t fits = KVF_WIRE_MAX_BLOCKS - FIRST;
    kvf_wire_group part[2];
    assert_true(kvf_wire_part(groups, 2, 0, part));
    check_part(&part[0], ids, FIRST, 3);
    check_part(&part[1], ids, fits, 5);
    assert_false(kvf_wire_part(groups, 2, KVF_WIRE_MAX_BLOCKS, part));
    check_part(&part[0], NULL, 0, 3 + FIRST);
    check_part(&part[1], ids + fits, LEFT, 5 + fits);
    assert_false(kvf_wire_part(groups, 2, LEFT, part)); /* exactly as many are left as fit */
    check_part(&part[0], ids + LEFT, FIRST - LEFT, 3 + LEFT);
    check_part(&part[1], ids, SECOND, 5);
    assert_true(kvf_wire_part(groups, 2, LEFT - 1, part));
    check_part(&part[1], ids, SECOND - 1, 5);
    assert_false(kvf_wire_part(groups, 2, FIRST + SECOND - 1, part));
    check_part(&part[1], ids + SECOND - 1, 1, 5 + SECOND - 1);
    assert_false(kvf_wire_part(groups, 2, FIRST + SECOND, part));
    check_part(&part[1], NULL, 0, 5 + SECOND);
}

/* How much memory a beat takes that names so many leases and expectations. */
static uint64_t beat_kept(uint32_t leases, uint32_t expectations) {
    static uint64_t numbers[1000];
    kvf_message beat = {.kind = KVF_MESSAGE_CALL,
                        .call = {.kind = KVF_CALL_BEAT,
                                 .leases = numbers,
                                 .lease_count = leases,
                                 .expectations = numbers,
                                 .expectation_count = expectations}},
                read;
    kvf_wire_buffer encoded = sample_encoded(&beat);
    assert_ok(kvf_wire_open((kvf_bytes){encoded.data, encoded.size}, &read));
    assert_ok(kvf_wire_read(&read));
    const uint64_t kept = kvf_message_kept(&read);
    kvf_message_free(&read);
    kvf_wire_buffer_free(&encoded);
    return kept;
}

static void memory_allocated_by_reading_is_counted(void **state) {
    (void)state;
    static uint32_t ids[10000];
    for (uint32_t i = 0; i < COUNT_OF(ids); i++)
        ids[i] = i;
    kvf_wire_group group = {.table = {ids, COUNT_OF(ids), 0}, .end = 1};
    kvf_message run = expect_of(&group, 1), read;
    kvf_wire_buffer encoded = sample_encoded(&run);
    assert_true(encoded.size < 300);
    assert_ok(kvf_wire_open((kvf_bytes){encoded.data, encoded.size}, &read));
    assert_int_equal(kvf_message_kept(&read), 0);
    assert_ok(kvf_wire_read(&read));
    assert_in_range(kvf_message_kept(&read), sizeof ids, sizeof ids + 1024);
    kvf_message_free(&read);
    assert_int_equal(kvf_message_kept(&read), 0);
    kvf_wire_buffer_free(&encoded);
    assert_int_equal(beat_kept(0, 0), 0);
    assert_int_equal(beat_kept(1000, 0), 8000);
}

/* Two arrays of 128 bytes fill what is allocated at least. */
static void short_arrays_share_memory(void **state) {
    (void)state;
    const uint64_t least = beat_kept(1, 0);
    assert_int_equal(beat_kept(16, 8), least);
    assert_int_equal(beat_kept(15, 8), least);
    assert_int_equal(beat_kept(17, 8), 2 * least);
}

static void the_last_block_id_and_no_block_are_not_one_run(void **state) {
    (void)state;
    const uint32_t ids[] = {KVF_NO_BLOCK - 2, KVF_NO_BLOCK - 1, KVF_NO_BLOCK, KVF_NO_BLOCK, 0, 1, 2, 3, 4, 5};
    (void)encoded_table(ids, COUNT_OF(ids));
    (void)encoded_table(ids, 0);
    (void)encoded_table(ids, 1);
}

/* ---- what is not sent ------------------------------------------------------------------------ */

static kvf_status try_call(kvf_call_body call) {
    kvf_message message = {.kind = KVF_MESSAGE_CALL, .call = call};
    kvf_wire_buffer out = {0};
    kvf_status status = kvf_wire_encode(&message, &out);
    assert_true(status == KVF_OK || out.data == NULL);
    kvf_wire_buffer_free(&out);
    return status;
}

static void a_request_id_of_any_bytes_up_to_the_limit_is_sent_and_no_longer_one(void **state) {
    (void)state;
    static char id[KVF_WIRE_MAX_REQUEST + 1];
    kvf_call_body call = {.kind = KVF_CALL_WITHDRAW, .request = {id, KVF_WIRE_MAX_REQUEST}};
    assert_ok(try_call(call));
    call.request.size++;
    assert_fails(try_call(call), KVF_E_RANGE, "call WITHDRAW", "request", "1025", "1 to 1024");
    call.request.size = 0;
    assert_fails(try_call(call), KVF_E_RANGE, "request has 0 bytes");
    call.request = (kvf_bytes){NULL, 1};
    assert_fails(try_call(call), KVF_E_INVALID, "request is NULL");
}

static void numbers_out_of_their_range_are_not_sent(void **state) {
    (void)state;
    kvf_call_body acquire = {.kind = KVF_CALL_ACQUIRE, .request = {"r", 1}};
    assert_fails(try_call(acquire), KVF_E_RANGE, "call ACQUIRE", "rank_count is 0", "1 to 65536");
    acquire.rank_count = 65537;
    assert_fails(try_call(acquire), KVF_E_RANGE, "rank_count is 65537");
    kvf_call_body checksum = {.kind = KVF_CALL_CHECKSUM, .group = 256};
    assert_fails(try_call(checksum), KVF_E_RANGE, "group is 256", "0 to 255");
    assert_ok(try_call((kvf_call_body){.kind = KVF_CALL_CHECKSUM, .group = 255, .part = 63}));
    assert_fails(try_call((kvf_call_body){.kind = KVF_CALL_CHECKSUM, .part = 64}), KVF_E_RANGE, "part is 64",
                 "0 to 63");
    checksum = (kvf_call_body){.kind = KVF_CALL_CHECKSUM, .layers = {3, 2}};
    assert_fails(try_call(checksum), KVF_E_RANGE, "layers is [3, 2)");
    checksum = (kvf_call_body){.kind = KVF_CALL_CHECKSUM, .begin = 3, .end = 2};
    assert_fails(try_call(checksum), KVF_E_RANGE, "begin to end is [3, 2)");
    kvf_call_body join = {.kind = KVF_CALL_JOIN, .introduction = {"i", 1}, .stage = (kvf_join_stage)3};
    assert_fails(try_call(join), KVF_E_RANGE, "stage is 3", "0 to 2");
    kvf_call_body release = {
        .kind = KVF_CALL_RELEASE, .request = {"r", 1}, .rank_count = 1, .status = (kvf_status)99};
    assert_fails(try_call(release), KVF_E_RANGE, "status is 99");
    release.status = KVF_OK;
    release.number = release.earlier = 4;
    assert_fails(try_call(release), KVF_E_RANGE, "earlier is 4", "below number", "4");
    kvf_call_body expect = {
        .kind = KVF_CALL_EXPECT, .request = {"r", 1}, .rank_count = 65536, .first_id = 1u << 22, .packed = 1};
    assert_ok(try_call(expect));
    expect.packed = 2;
    assert_fails(try_call(expect), KVF_E_RANGE, "packed is 2", "0 to 1");
    expect.packed = 0;
    expect.first_id++;
    assert_fails(try_call(expect), KVF_E_RANGE, "first_id is 4194305", "0 to 4194304");
    assert_fails(try_call((kvf_call_body){0}), KVF_E_RANGE, "kind is 0");
    assert_fails(try_call((kvf_call_body){.kind = (kvf_call_kind)10}), KVF_E_RANGE, "kind is 10");
}

static void a_count_without_its_array_is_not_sent(void **state) {
    (void)state;
    assert_fails(try_call((kvf_call_body){.kind = KVF_CALL_BEAT, .lease_count = 2}), KVF_E_INVALID,
                 "leases is NULL", "2");
    kvf_wire_group group = {.table = {NULL, 4, 0}};
    kvf_call_body expect = {.kind = KVF_CALL_EXPECT, .request = {"r", 1}, .rank_count = 1, .group_count = 1};
    assert_fails(try_call(expect), KVF_E_INVALID, "groups is NULL");
    expect.groups = &group;
    assert_fails(try_call(expect), KVF_E_INVALID, "groups[0]", "ids is NULL");
    group = (kvf_wire_group){.begin = 2, .end = 1};
    assert_fails(try_call(expect), KVF_E_RANGE, "groups[0]", "begin to end is [2, 1)");
}

static kvf_status try_message(kvf_message message) {
    kvf_wire_buffer out = {0};
    kvf_status status = kvf_wire_encode(&message, &out);
    kvf_wire_buffer_free(&out);
    return status;
}

static void a_name_that_is_none_is_not_sent(void **state) {
    (void)state;
    char longest[KVF_WIRE_MAX_NAME + 2], longer[KVF_WIRE_MAX_NAME + 50];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    kvf_hello hello = {.engine = longest + 1, .rank_count = 1};
    assert_ok(try_message((kvf_message){.kind = KVF_MESSAGE_HELLO, .hello = hello}));
    hello.engine = longest;
    assert_fails(try_message((kvf_message){.kind = KVF_MESSAGE_HELLO, .hello = hello}), KVF_E_RANGE,
                 "HELLO: engine has 256 bytes", "1 to 255");
    memset(longer, 'x', sizeof longer); /* no text at all: nothing looks for its end beyond the limit */
    hello.engine = longer;
    assert_fails(try_message((kvf_message){.kind = KVF_MESSAGE_HELLO, .hello = hello}), KVF_E_RANGE,
                 "HELLO: engine has 256 bytes");
    hello.engine = NULL;
    assert_fails(try_message((kvf_message){.kind = KVF_MESSAGE_HELLO, .hello = hello}), KVF_E_RANGE,
                 "engine has 0 bytes");
    hello.engine = "a\x1b[2J";
    assert_fails(try_message((kvf_message){.kind = KVF_MESSAGE_HELLO, .hello = hello}), KVF_E_RANGE,
                 "engine has the control character 0x1b at byte 1");
    hello.engine = "a\x7f";
    assert_fails(try_message((kvf_message){.kind = KVF_MESSAGE_HELLO, .hello = hello}), KVF_E_RANGE,
                 "engine has the control character 0x7f at byte 1");
    hello.engine = "M\xc3\xbcnchen ~";
    assert_ok(try_message((kvf_message){.kind = KVF_MESSAGE_HELLO, .hello = hello}));
    hello = (kvf_hello){.engine = "d", .rank = 2, .rank_count = 2};
    assert_fails(try_message((kvf_message){.kind = KVF_MESSAGE_HELLO, .hello = hello}), KVF_E_RANGE,
                 "rank is 2", "rank_count");
    assert_fails(try_message((kvf_message){0}), KVF_E_RANGE, "message: kind is 0");
    assert_fails(try_message((kvf_message){.kind = (kvf_message_kind)8}), KVF_E_RANGE, "message: kind is 8",
                 "1 to 7");
}

static void a_verb_may_have_one_letter(void **state) {
    (void)state;
    kvf_message message = {.kind = KVF_MESSAGE_COMMAND, .command = {.verb = "x"}};
    assert_ok(try_message(message));
    message.command.verb = "";
    assert_fails(try_message(message), KVF_E_RANGE, "verb has 0 bytes");
}

static void an_introduction_has_an_engine_and_a_shard(void **state) {
    (void)state;
    const kvf_introduction whole = {
        .engine = "p", .rank_count = 1, .shard = {"s", 1}, .public_key = "", .facts = ""};
    kvf_introduction introduction = whole;
    kvf_wire_buffer out = {0};
    assert_ok(kvf_wire_encode_introduction(&introduction, &out));
    kvf_wire_buffer_free(&out);
    introduction.shard.size = 0;
    assert_fails(kvf_wire_encode_introduction(&introduction, &out), KVF_E_RANGE, "shard has 0 bytes");
    introduction = whole;
    introduction.engine = "";
    assert_fails(kvf_wire_encode_introduction(&introduction, &out), KVF_E_RANGE, "engine has 0 bytes");
}

static void a_public_key_is_z85_or_empty(void **state) {
    (void)state;
    kvf_introduction introduction = {
        .engine = "p", .rank_count = 1, .shard = {"s", 1}, .public_key = "short", .facts = ""};
    const char *const all[] = {"0123456789abcdefghijklmnopqrstuvwxyzABCD",
                               "EFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{",
                               "}@%$#}@%$#}@%$#}@%$#}@%$#}@%$#}@%$#}@%$#", ""};
    kvf_wire_buffer out = {0};
    assert_fails(kvf_wire_encode_introduction(&introduction, &out), KVF_E_RANGE,
                 "introduction: public_key has 5 characters", "0 or 40");
    for (size_t i = 0; i < COUNT_OF(all); i++) {
        introduction.public_key = all[i];
        assert_ok(kvf_wire_encode_introduction(&introduction, &out));
        kvf_introduction read;
        void *storage;
        assert_ok(kvf_wire_decode_introduction((kvf_bytes){out.data, out.size}, &read, &storage));
        assert_string_equal(read.public_key, all[i]);
        kvf_free(storage);
        kvf_wire_buffer_free(&out);
    }
    introduction.public_key = "0123456789012345678901234567890123456,89";
    assert_fails(kvf_wire_encode_introduction(&introduction, &out), KVF_E_RANGE, "public_key has 0x2c",
                 "character 37");
    introduction.public_key = ",123456789012345678901234567890123456789";
    assert_fails(kvf_wire_encode_introduction(&introduction, &out), KVF_E_RANGE, "public_key has 0x2c",
                 "character 0");
}

static void a_message_above_the_size_limit_is_not_sent(void **state) {
    (void)state;
    static uint8_t most[KVF_WIRE_MAX_BYTES];
    kvf_welcome welcome = {.engine = "p", .rank = UINT32_MAX, .card = {most, sizeof most}};
    assert_fails(try_message((kvf_message){.kind = KVF_MESSAGE_WELCOME, .welcome = welcome}), KVF_E_RANGE,
                 "WELCOME", "more than 1048576 bytes");
    welcome.card.size -= 1000;
    kvf_message message = {.kind = KVF_MESSAGE_WELCOME, .welcome = welcome}, read;
    kvf_wire_buffer encoded = sample_encoded(&message);
    message.welcome.card.size += KVF_WIRE_MAX_BYTES - encoded.size;
    kvf_wire_buffer_free(&encoded);
    encoded = sample_encoded(&message);
    assert_int_equal(encoded.size, KVF_WIRE_MAX_BYTES);
    assert_ok(kvf_wire_open((kvf_bytes){encoded.data, encoded.size}, &read));
    assert_ok(kvf_wire_read(&read));
    assert_same_message(&message, &read);
    kvf_message_free(&read);
    kvf_wire_buffer_free(&encoded);
    message.welcome.card.size++;
    assert_fails(kvf_wire_encode(&message, &encoded), KVF_E_RANGE, "more than 1048576 bytes");
}

/* Only the size of a message bounds the number of requests in a heartbeat. */
static void a_beat_may_fill_a_message(void **state) {
    (void)state;
    static uint64_t numbers[130000];
    for (size_t i = 0; i < COUNT_OF(numbers); i++)
        numbers[i] = i;
    kvf_message beats[2] = {{.kind = KVF_MESSAGE_CALL, .call.kind = KVF_CALL_BEAT},
                            {.kind = KVF_MESSAGE_CALL, .call.kind = KVF_CALL_BEAT}};
    beats[0].call.leases = numbers;
    beats[0].call.lease_count = COUNT_OF(numbers);
    beats[1].call.expectations = numbers;
    beats[1].call.expectation_count = COUNT_OF(numbers) / 2;
    for (int i = 0; i < 2; i++) {
        kvf_message read;
        kvf_wire_buffer encoded = sample_encoded(&beats[i]);
        assert_ok(kvf_wire_open((kvf_bytes){encoded.data, encoded.size}, &read));
        assert_ok(kvf_wire_read(&read));
        assert_same_message(&beats[i], &read);
        kvf_message_free(&read);
        kvf_wire_buffer_free(&encoded);
    }
}

static void an_introduction_of_no_bytes_is_not_passed_on(void **state) {
    (void)state;
    kvf_bytes introductions[] = {{"i", 1}, {"j", 0}};
    kvf_welcome welcome = {
        .engine = "p", .rank_count = 2, .introductions = introductions, .introduction_count = 2};
    assert_fails(try_message((kvf_message){.kind = KVF_MESSAGE_WELCOME, .welcome = welcome}), KVF_E_RANGE,
                 "introductions has 0 bytes");
    introductions[1].size = 1;
    assert_ok(try_message((kvf_message){.kind = KVF_MESSAGE_WELCOME, .welcome = welcome}));
}

/* ---- memory ---------------------------------------------------------------------------------- */

static kvf_status there_and_back(void *subject) {
    wire_sample *sample = subject;
    kvf_wire_buffer encoded = {0};
    kvf_message read = {0};
    kvf_status status = kvf_wire_encode(&sample->message, &encoded);
    if (!status)
        status = kvf_wire_open((kvf_bytes){encoded.data, encoded.size}, &read);
    if (!status)
        status = kvf_wire_read(&read);
    kvf_message_free(&read);
    kvf_wire_buffer_free(&encoded);
    return status;
}

static void nothing_leaks_where_memory_ends(void **state) {
    (void)state;
    static wire_sample sample;
    memory_count memory;
    count_memory(&memory);
    const kvf_call_kind kinds[] = {KVF_CALL_EXPECT, KVF_CALL_BEAT, KVF_CALL_WRITTEN};
    for (size_t i = 0; i < COUNT_OF(kinds); i++) {
        sample_message(&sample, KVF_MESSAGE_CALL, kinds[i], 3);
        survive_every_refusal(&memory, there_and_back, &sample);
    }
    sample_message(&sample, KVF_MESSAGE_WELCOME, KVF_CALL_JOIN, 3);
    survive_every_refusal(&memory, there_and_back, &sample);
}

static void a_call_of_which_nothing_can_be_read_has_no_kind(void **state) {
    (void)state;
    kvf_message message = {
        .kind = KVF_MESSAGE_CALL, .version = KVF_WIRE_VERSION, .body = {(const uint8_t *)"\xc1", 1}};
    assert_fails(kvf_wire_read(&message), KVF_E_PARSE, "call unknown: ");
    message.body = (kvf_bytes){(const uint8_t *)"\x80", 1};
    assert_fails(kvf_wire_read(&message), KVF_E_PARSE, "call unknown: kind is missing");
}

static void names_of_kinds_are_known(void **state) {
    (void)state;
    assert_string_equal(kvf_message_kind_name(KVF_MESSAGE_REFUSED), "REFUSED");
    assert_string_equal(kvf_call_kind_name(KVF_CALL_ACQUIRE), "ACQUIRE");
    assert_string_equal(kvf_call_kind_name(KVF_CALL_PROBE), "PROBE");
    assert_string_equal(kvf_message_kind_name((kvf_message_kind)77), "unknown");
    assert_string_equal(kvf_call_kind_name((kvf_call_kind)0), "unknown");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_of_message_reads_as_it_was_written),
        cmocka_unit_test_teardown(what_memory_held_before_is_not_read, stop_counting_memory),
        cmocka_unit_test(an_introduction_reads_as_it_was_written),
        cmocka_unit_test_teardown(what_is_read_of_an_introduction_is_freed_at_once, stop_counting_memory),
        cmocka_unit_test(another_session_can_be_written_into_a_message),
        cmocka_unit_test(a_message_can_be_read_again),
        cmocka_unit_test(fields_a_kind_does_not_have_are_not_sent),
        cmocka_unit_test(no_text_is_read_as_the_empty_text),
        cmocka_unit_test(sentences_of_peers_are_read_without_control_characters),
        cmocka_unit_test(a_beat_is_these_bytes),
        cmocka_unit_test(an_answer_to_a_beat_is_these_bytes),
        cmocka_unit_test(checksums_are_these_bytes),
        cmocka_unit_test(a_buffer_that_was_freed_is_empty),
        cmocka_unit_test(neighbouring_blocks_are_written_as_runs),
        cmocka_unit_test(scattered_blocks_take_four_bytes_each),
        cmocka_unit_test(the_shorter_form_is_written),
        cmocka_unit_test(tables_have_a_most_of_ids_in_all),
        cmocka_unit_test(tables_are_cut_where_a_message_is_full),
        cmocka_unit_test(memory_allocated_by_reading_is_counted),
        cmocka_unit_test(short_arrays_share_memory),
        cmocka_unit_test(the_last_block_id_and_no_block_are_not_one_run),
        cmocka_unit_test(a_request_id_of_any_bytes_up_to_the_limit_is_sent_and_no_longer_one),
        cmocka_unit_test(numbers_out_of_their_range_are_not_sent),
        cmocka_unit_test(a_count_without_its_array_is_not_sent),
        cmocka_unit_test(a_name_that_is_none_is_not_sent),
        cmocka_unit_test(a_verb_may_have_one_letter),
        cmocka_unit_test(an_introduction_has_an_engine_and_a_shard),
        cmocka_unit_test(a_public_key_is_z85_or_empty),
        cmocka_unit_test(a_message_above_the_size_limit_is_not_sent),
        cmocka_unit_test(a_beat_may_fill_a_message),
        cmocka_unit_test(an_introduction_of_no_bytes_is_not_passed_on),
        cmocka_unit_test_teardown(nothing_leaks_where_memory_ends, stop_counting_memory),
        cmocka_unit_test(a_call_of_which_nothing_can_be_read_has_no_kind),
        cmocka_unit_test(names_of_kinds_are_known),
    };
    return cmocka_run_group_tests_name("wire_messages", tests, NULL, NULL);
}
