/*
 * The UCX fabric's part of the card: reading bytes that anybody may have written.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "transport/transport.h"

#include "transport/ucx/ucx.h"

static void reseal(unsigned char *card, size_t bytes) {
    uint64_t sum = kvf_ucx_card_sum(card, bytes);
    for (int i = 0; i < 8; i++)
        card[4 + i] = (unsigned char)(sum >> (8 * i));
}

/* The fabric's own part of a card, with made-up contents that UCX never sees. */
static void make_part(kvf_buffer *out) {
    kvf_ucx_card_region regions[2] = {{0x10000, 4096, "key one", 7}, {0x20000, 8192, "key two!", 8}};
    kvf_ucx_card card = {.major = 1,
                         .minor = 13,
                         .worker = "an address",
                         .worker_bytes = 10,
                         .regions = regions,
                         .region_count = 2};
    card.beacon[3] = 9;
    assert_int_equal(kvf_ucx_card_write(&card, out), KVF_OK);
}

static void a_card_says_what_was_written(void **state) {
    (void)state;
    kvf_buffer part = {0};
    kvf_ucx_card card;
    make_part(&part);
    assert_int_equal(kvf_ucx_card_read(part.data, part.length, &card), KVF_OK);
    assert_int_equal(card.beacon[3], 9);
    assert_int_equal(card.major, 1);
    assert_int_equal(card.minor, 13);
    assert_int_equal(card.worker_bytes, 10);
    assert_memory_equal(card.worker, "an address", 10);
    assert_int_equal(card.region_count, 2);
    assert_int_equal(card.regions[1].address, 0x20000);
    assert_int_equal(card.regions[1].bytes, 8192);
    assert_int_equal(card.regions[1].key_bytes, 8);
    assert_memory_equal(card.regions[1].key, "key two!", 8);
    kvf_free(card.regions);
    kvf_buffer_free(&part);
}

static void a_card_cut_off_anywhere_is_refused(void **state) {
    (void)state;
    kvf_buffer part = {0};
    make_part(&part);
    for (size_t bytes = 0; bytes < part.length; bytes++) {
        kvf_ucx_card card;
        unsigned char *cut =
            malloc(bytes ? bytes : 1); /* so that a sanitizer sees a byte read past its end */
        assert_non_null(cut);
        memcpy(cut, part.data, bytes);
        assert_int_equal(kvf_ucx_card_read(cut, bytes, &card), KVF_E_PARSE);
        if (bytes >= 12) { /* with a correct checksum too */
            reseal(cut, bytes);
            assert_int_equal(kvf_ucx_card_read(cut, bytes, &card), KVF_E_PARSE);
        }
        free(cut);
    }
    kvf_buffer_free(&part);
}

static void a_card_damaged_anywhere_is_refused(void **state) {
    (void)state;
    kvf_buffer part = {0};
    make_part(&part);
    for (size_t at = 0; at < part.length; at++) {
        for (int bit = 0; bit < 8; bit++) {
            kvf_ucx_card card;
            part.data[at] ^= (unsigned char)(1 << bit);
            assert_int_equal(kvf_ucx_card_read(part.data, part.length, &card), KVF_E_PARSE);
            part.data[at] ^= (unsigned char)(1 << bit);
        }
    }
    kvf_buffer_free(&part);
}

static void a_forged_card_is_read_within_its_bytes(void **state) {
    (void)state;
    kvf_buffer part = {0};
    make_part(&part);
    for (size_t at = 12; at < part.length; at++) {
        for (int value = 0; value < 256; value++) {
            kvf_ucx_card card;
            unsigned char *forged = malloc(part.length);
            assert_non_null(forged);
            memcpy(forged, part.data, part.length);
            forged[at] = (unsigned char)value;
            reseal(forged, part.length);
            kvf_status status = kvf_ucx_card_read(forged, part.length, &card);
            assert_true(status == KVF_OK || status == KVF_E_PARSE);
            for (uint32_t r = 0; !status && r < card.region_count; r++) {
                assert_true((const unsigned char *)card.regions[r].key + card.regions[r].key_bytes <=
                            forged + part.length);
                assert_true(card.regions[r].bytes <= UINT64_MAX - card.regions[r].address);
            }
            kvf_free(card.regions);
            free(forged);
        }
    }
    kvf_buffer_free(&part);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_card_says_what_was_written),
        cmocka_unit_test(a_card_cut_off_anywhere_is_refused),
        cmocka_unit_test(a_card_damaged_anywhere_is_refused),
        cmocka_unit_test(a_forged_card_is_read_within_its_bytes),
    };
    return cmocka_run_group_tests_name("transport_ucx_card", tests, NULL, NULL);
}
