/*
 * The messages of stages, byte by byte as docs/protocol.md has them: the other end may be written anew from that page.
 */
#include "shapes.h"

#include "stage/message.h"

/* ---- bytes worked out by hand ------------------------------------------------------------------- */

#define HEAD(word) 'k', 'v', 'f', 's', 1, (word), 0xf0, 0xde, 0xbc, 0x9a, 0x78, 0x56, 0x34, 0x12
#define FLOW UINT64_C(0x123456789abcdef0)

/* The library writes these bytes, and reads from them what it wrote. */
static kvf_stage_message assert_is(const kvf_stage_message *message, const unsigned char *bytes,
                                   size_t count) {
    unsigned char written[KVF_STAGE_MESSAGE_MAX];
    kvf_stage_message read = {0};
    assert_int_equal(kvf_stage_write_message(message, written), count);
    assert_memory_equal(written, bytes, count);
    assert_true(kvf_stage_is_message(bytes, count));
    assert_ok(kvf_stage_read_message(bytes, count, &read));
    assert_int_equal(read.word, message->word);
    assert_int_equal(read.flow, FLOW);
    return read;
}

static void a_part_of_an_opening_is_these_bytes(void **state) {
    (void)state;
    static const unsigned char bytes[] = {HEAD(1), 0x00, 0x20, 0, 0, 0xd2, 0x0f, 0, 0, 'p', 'a', 'r', 't'};
    const kvf_stage_message message = {.word = KVF_STAGE_OPEN,
                                       .flow = FLOW,
                                       .opening_bytes = 8192,
                                       .at = 4050,
                                       .part = (const unsigned char *)"part",
                                       .part_bytes = 4};
    const kvf_stage_message read = assert_is(&message, bytes, sizeof bytes);
    assert_int_equal(read.opening_bytes, 8192);
    assert_int_equal(read.at, 4050);
    assert_int_equal(read.part_bytes, 4);
    assert_memory_equal(read.part, "part", 4);
}

static void an_acceptance_is_these_bytes(void **state) {
    (void)state;
    static const unsigned char bytes[] = {HEAD(2), 3, 0,    0, 0,          /* region */
                                          0,       0, 0x10, 0, 0, 1, 0, 0, /* bytes of a slot, slots */
                                          8,       7, 6,    5, 4, 3, 2, 1, /* bytes of the stream */
                                          9,       0, 0,    0};            /* flows */
    const kvf_stage_message message = {.word = KVF_STAGE_ACCEPT,
                                       .flow = FLOW,
                                       .region = 3,
                                       .slot_bytes = 1 << 20,
                                       .slot_count = 256,
                                       .stream_bytes = UINT64_C(0x0102030405060708),
                                       .flows = 9};
    const kvf_stage_message read = assert_is(&message, bytes, sizeof bytes);
    assert_int_equal(read.region, 3);
    assert_int_equal(read.slot_bytes, 1 << 20);
    assert_int_equal(read.slot_count, 256);
    assert_int_equal(read.stream_bytes, UINT64_C(0x0102030405060708));
    assert_int_equal(read.flows, 9);
}

static void slots_are_these_bytes(void **state) {
    (void)state;
    static const unsigned char full[] = {HEAD(3), 1, 5, 0, 0, 0, 7, 0, 0,    0, /* slot, generation */
                                         0,       0, 1, 0, 0, 0, 0, 0, 0x40, 0,
                                         1,       0, 0, 0, 0, 0}; /* from 65536 to 65600 */
    static const unsigned char empty[] = {
        HEAD(4), 2, 5, 0, 0, 0, 7, 0, 0, 0,                   /* the first slot */
        0,       0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, /* without bytes */
        6,       0, 0, 0, 8, 0, 0, 0,                         /* the second */
        0,       0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    const kvf_stage_message lend = {
        .word = KVF_STAGE_LEND, .flow = FLOW, .slot_count_named = 1, .slots = {{5, 7, {65536, 65600}}}};
    const kvf_stage_message back = {.word = KVF_STAGE_RETURN,
                                    .flow = FLOW,
                                    .slot_count_named = 2,
                                    .slots = {{5, 7, {0, 0}}, {6, 8, {0, 0}}}};
    kvf_stage_message read = assert_is(&lend, full, sizeof full);
    assert_int_equal(read.slot_count_named, 1);
    assert_memory_equal(read.slots, lend.slots, sizeof read.slots);
    read = assert_is(&back, empty, sizeof empty);
    assert_int_equal(read.slot_count_named, 2);
    assert_memory_equal(read.slots, back.slots, sizeof read.slots);
}

static void an_end_is_these_bytes(void **state) {
    (void)state;
    static const unsigned char bytes[] = {HEAD(5), 1, 17, 0, 'o', 'v', 'e', 'r'};
    const kvf_stage_message message = {.word = KVF_STAGE_END,
                                       .flow = FLOW,
                                       .by_lender = true,
                                       .status = KVF_E_CANCELLED,
                                       .sentence = "over"};
    const kvf_stage_message read = assert_is(&message, bytes, sizeof bytes);
    assert_true(read.by_lender);
    assert_int_equal(read.status, KVF_E_CANCELLED);
    assert_string_equal(read.sentence, "over");
}

static void an_opening_is_these_bytes(void **state) {
    (void)state;
    static const unsigned char bytes[] = {
        1,  200, 16, 0, 0,  0, 0x10, 0,                 /* writes; priority; slots at once; bytes in a slot */
        8,  7,   6,  5, 4,  3, 2,    1,                 /* bytes of the stream */
        1,  2,   3,  4, 5,  6, 7,    8,                 /* the model's sum */
        9,  0,   0,  0, 0,  0, 0,    0x80,              /* permission */
        1,  0,   0,  0, 2,  0, 0,    0,                 /* items, groups */
        1,  0,   0,  0, 2,  0, 0,    0,                 /* the item: group, part */
        3,  0,   0,  0, 4,  0, 0,    0,                 /* layers */
        5,  0,   0,  0, 6,  0, 0,    0,                 /* units */
        7,  0,   0,  0, 8,  0, 0,    0,    9,  0, 0, 0, /* the holder's share */
        10, 0,   0,  0, 11, 0, 0,    0,    12, 0, 0, 0, /* the reader's */
        4,  0,   0,  0,                                 /* bf16 */
        14, 0,   0,  0, 0,  0, 0,    0,    15, 0, 0, 0, 0, 0, 0, 0, /* the first group's steps */
        13, 0,   0,  0, 2,  0, 0,    0,    9,  0, 0, 0, 0, 1, 0, 0, /* its table: 9 and 256, from 13 on */
        0,  0,   0,  0, 0,  0, 0,    0,    0,  0, 0, 0, 0, 0, 0, 0, /* the second has none */
        0,  0,   0,  0, 0,  0, 0,    0};
    static const uint32_t ids[] = {9, 256};
    const kvf_stream_item item = {.group = 1,
                                  .part = 2,
                                  .layers = {3, 4},
                                  .units = {5, 6},
                                  .tokens = {{7, 8, 9}, {10, 11, 12}},
                                  .dtype = KVF_DTYPE_BF16};
    const kvf_group_steps steps[] = {{.table = {ids, 2, 13}, .begin = 14, .end = 15}, {.end = 0}};
    const kvf_opening opening = {.direction = KVF_WRITE,
                                 .priority = 200,
                                 .window = 16,
                                 .slot_bytes = 1 << 20,
                                 .stream_bytes = UINT64_C(0x0102030405060708),
                                 .model = UINT64_C(0x0807060504030201),
                                 .permission = UINT64_C(0x8000000000000009),
                                 .items = &item,
                                 .item_count = 1,
                                 .groups = steps,
                                 .group_count = 2};
    unsigned char *data;
    size_t count;
    assert_ok(kvf_stage_write_opening(&opening, &data, &count));
    assert_int_equal(count, sizeof bytes);
    assert_memory_equal(data, bytes, sizeof bytes);
    kvf_free(data);
}

static uint64_t fnv_1a(const unsigned char *bytes, size_t count) {
    uint64_t sum = UINT64_C(14695981039346656037);
    for (size_t i = 0; i < count; i++)
        sum = (sum ^ bytes[i]) * UINT64_C(1099511628211);
    return sum;
}

/* The types of elements are not in it: what flows is converted. */
static void the_sum_of_a_model_is_over_these_bytes(void **state) {
    (void)state;
    static const unsigned char bytes[] = {
        'f', 'u', 'l', 'l', 0, 0, 0, 0, 0, 0, 0, 0, 0,           /* its name; tokens */
        128, 0,   0,   0,   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  /* window; chunk */
        2,   0,   0,   0,   0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,  /* layers; parts */
        1,   0,   0,   0,   0, 0, 0, 0,                          /* tokens of a step */
        0,   0,   0,   0,   2, 0, 0, 0,                          /* the layers */
        'k', 0,   8,   0,   0, 0, 0, 0, 0, 0,                    /* the part's name; units */
        64,  0,   0,   0,   0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0}; /* elements of a cell; rows of a step */
    static const uint32_t layers[] = {0, 2};
    for (kvf_dtype type = KVF_DTYPE_F16; type <= KVF_DTYPE_BF16; type++) {
        const kvf_part_desc part = {
            .name = "k", .dtype = type, .units = 8, .cell_elements = 64, .rows_per_step = 3};
        const kvf_group_desc group = {.name = "full",
                                      .layers = layers,
                                      .layer_count = 2,
                                      .window_tokens = 128,
                                      .parts = &part,
                                      .part_count = 1};
        const kvf_model_desc desc = {
            .struct_size = sizeof desc, .layer_count = 3, .groups = &group, .group_count = 1};
        kvf_model *model;
        assert_ok(kvf_model_create(&desc, &model));
        assert_int_equal(kvf_stage_model_sum(model), fnv_1a(bytes, sizeof bytes));
        kvf_model_free(model);
    }
}

static void models_of_other_entries_have_other_sums(void **state) {
    (void)state;
    kvf_model *fours = entries_of(4), *twos = entries_of(2);
    assert_true(kvf_stage_model_sum(fours) != kvf_stage_model_sum(twos));
    kvf_model_free(fours);
    kvf_model_free(twos);
}

/* ---- there and back --------------------------------------------------------------------------- */

static void every_message_is_read_as_it_was_written(void **state) {
    (void)state;
    kvf_stage_message full = {.word = KVF_STAGE_LEND, .flow = 0x123456789abcdef0, .slot_count_named = 16};
    for (uint32_t i = 0; i < 16; i++)
        full.slots[i] = (kvf_slot_note){i * 7, i + 1, {i, (uint64_t)i << 40}};
    const kvf_stage_message messages[] = {
        {.word = KVF_STAGE_ACCEPT,
         .flow = 1,
         .region = 2,
         .slot_bytes = 3,
         .slot_count = 4,
         .stream_bytes = 5,
         .flows = 6},
        full,
        {.word = KVF_STAGE_END, .flow = 9, .by_lender = true, .status = KVF_E_LIMIT, .sentence = "a \x01 b"}};
    for (size_t i = 0; i < COUNT_OF(messages); i++) {
        unsigned char data[KVF_STAGE_MESSAGE_MAX];
        kvf_stage_message got = {0};
        size_t bytes = kvf_stage_write_message(&messages[i], data);
        assert_ok(kvf_stage_read_message(data, bytes, &got));
        assert_int_equal(got.flow, messages[i].flow);
        assert_int_equal(got.stream_bytes, messages[i].stream_bytes);
        assert_int_equal(got.flows, messages[i].flows);
        assert_int_equal(got.slot_count_named, messages[i].slot_count_named);
        assert_memory_equal(got.slots, messages[i].slots, sizeof got.slots);
        assert_int_equal(got.by_lender, messages[i].by_lender);
        assert_int_equal(got.status, messages[i].status);
        assert_string_equal(got.sentence, i == 2 ? "a ? b" : "");
        for (size_t cut = 4; cut < bytes && messages[i].word != KVF_STAGE_END; cut++)
            assert_int_not_equal(kvf_stage_read_message(data, cut, &got), KVF_OK);
    }
}

static void an_opening_reads_as_it_was_written(void **state) {
    (void)state;
    static const uint32_t ids[] = {9, 8, 7};
    const kvf_stream_item item = {.group = 1,
                                  .part = 2,
                                  .layers = {3, 4},
                                  .units = {5, 6},
                                  .tokens = {{7, 8, 9}, {10, 11, 12}},
                                  .dtype = KVF_DTYPE_BF16};
    const kvf_group_steps steps = {.table = {ids, 3, 13}, .begin = 14, .end = 15};
    const kvf_opening written = {.direction = KVF_WRITE,
                                 .priority = 1,
                                 .window = 2,
                                 .slot_bytes = 3,
                                 .stream_bytes = 4,
                                 .model = 5,
                                 .permission = 6,
                                 .items = &item,
                                 .item_count = 1,
                                 .groups = &steps,
                                 .group_count = 1};
    kvf_opening read;
    unsigned char *data;
    size_t bytes;
    assert_ok(kvf_stage_write_opening(&written, &data, &bytes));
    assert_ok(kvf_stage_read_opening(data, bytes, &read));
    assert_int_equal(read.direction, KVF_WRITE);
    assert_int_equal(read.priority, 1);
    assert_int_equal(read.window, 2);
    assert_int_equal(read.slot_bytes, 3);
    assert_int_equal(read.stream_bytes, 4);
    assert_int_equal(read.model, 5);
    assert_int_equal(read.permission, 6);
    assert_int_equal(read.item_count, 1);
    assert_memory_equal(read.items, &item, sizeof item);
    assert_int_equal(read.group_count, 1);
    assert_int_equal(read.groups->begin, 14);
    assert_int_equal(read.groups->end, 15);
    assert_int_equal(read.groups->table.first_block, 13);
    assert_int_equal(read.groups->table.count, 3);
    assert_memory_equal(read.groups->table.ids, ids, sizeof ids);
    kvf_stage_free_opening(&read);

    /* More items or groups than the bytes behind the fixed fields have room for; the fixed fields end with both
     * counts. */
    for (size_t at = 32; at <= 36; at += 4) {
        unsigned char kept[4];
        memcpy(kept, data + at, sizeof kept);
        memcpy(data + at, (const unsigned char[]){200, 0, 0, 0}, 4);
        assert_fails(kvf_stage_read_opening(data, bytes, &read), KVF_E_PARSE, "cannot have");
        memcpy(data + at, kept, sizeof kept);
    }
    kvf_free(data);
}

/* As of messages between agents, and of every text in C. */
static void a_sentence_ends_with_a_zero_byte(void **state) {
    (void)state;
    kvf_stage_message read = {0};
    const unsigned char end[17 + 5] = {HEAD(5), 1, 17, 0, 'a', '\n', 'b', '\0', 'c'};
    assert_ok(kvf_stage_read_message(end, sizeof end, &read));
    assert_string_equal(read.sentence, "a?b");
}

/* ---- what is refused ---------------------------------------------------------------------------- */

static void what_is_wrong_with_a_message_is_named(void **state) {
    (void)state;
    kvf_stage_message read = {0};
    unsigned char sentence[17 + KVF_STAGE_SENTENCE_MAX] = {HEAD(5), 1, 17, 0};
    memset(sentence + 17, 'x', KVF_STAGE_SENTENCE_MAX);
    assert_ok(kvf_stage_read_message(sentence, sizeof sentence - 1, &read));
    assert_fails(kvf_stage_read_message(sentence, sizeof sentence, &read), KVF_E_PARSE, "a sentence of 1024",
                 "0 to 1023");
    static const struct {
        unsigned char size[4], at[4];
        size_t part_bytes;
        const char *words;
    } parts[] = {{{1, 0, 0x80}, {0}, 1, "an opening has 8388609 bytes"},
                 {{4}, {2}, 3, "3 bytes at 2 of 4"},
                 {{4}, {5}, 1, "1 bytes at 5 of 4"},
                 {{4}, {2}, 0, "0 bytes at 2 of 4"}};
    for (size_t i = 0; i < COUNT_OF(parts); i++) {
        unsigned char bytes[22 + 3] = {HEAD(1)};
        memcpy(bytes + 14, parts[i].size, 4);
        memcpy(bytes + 18, parts[i].at, 4);
        assert_fails(kvf_stage_read_message(bytes, 22 + parts[i].part_bytes, &read), KVF_E_PARSE,
                     parts[i].words);
    }
}

static void what_is_wrong_with_an_opening_is_named(void **state) {
    (void)state;
    static const uint32_t ids[] = {9, 8};
    const kvf_group_steps steps = {.table = {ids, 2, 0}, .end = 2};
    kvf_group_steps long_steps = {.table = {ids, KVF_STAGE_OPENING_MAX / 4, 0}, .end = 2};
    kvf_opening opening = {.window = 1, .groups = &steps, .group_count = 1}, read;
    unsigned char *data;
    size_t bytes;
    assert_ok(kvf_stage_write_opening(&opening, &data, &bytes));
    /* by place: the flags, how many slots at once, how many entries the table has */
    static const struct {
        size_t at;
        unsigned char is;
        const char *words;
    } changes[] = {{0, 4, "flags 4"},
                   {2, 0, "window 0"},
                   {60, 3, "ends in the table of group 0"},
                   {60, 1, "bytes behind its last group"}};
    for (size_t i = 0; i < COUNT_OF(changes); i++) {
        const unsigned char was = data[changes[i].at];
        data[changes[i].at] = changes[i].is;
        assert_fails(kvf_stage_read_opening(data, bytes, &read), KVF_E_PARSE, changes[i].words);
        data[changes[i].at] = was;
    }
    for (size_t cut = 0; cut < bytes; cut++)
        assert_int_equal(kvf_stage_read_opening(data, cut, &read), KVF_E_PARSE);
    kvf_free(data);
    opening.groups = &long_steps;
    assert_fails(kvf_stage_write_opening(&opening, &data, &bytes), KVF_E_LIMIT, "up to 8388608");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_part_of_an_opening_is_these_bytes),
        cmocka_unit_test(an_acceptance_is_these_bytes),
        cmocka_unit_test(slots_are_these_bytes),
        cmocka_unit_test(an_end_is_these_bytes),
        cmocka_unit_test(an_opening_is_these_bytes),
        cmocka_unit_test(the_sum_of_a_model_is_over_these_bytes),
        cmocka_unit_test(models_of_other_entries_have_other_sums),
        cmocka_unit_test(every_message_is_read_as_it_was_written),
        cmocka_unit_test(an_opening_reads_as_it_was_written),
        cmocka_unit_test(a_sentence_ends_with_a_zero_byte),
        cmocka_unit_test(what_is_wrong_with_a_message_is_named),
        cmocka_unit_test(what_is_wrong_with_an_opening_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
