/*
 * The libfabric fabric's part of the card: reading bytes that anybody may have written.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "transport/libfabric/libfabric.h"

static const kvf_libfabric_target regions[4] = {
    {0x10000, 4096, 7, false}, {0, 8192, UINT64_MAX, false}, {0, 99, 0, true}, {0, 0, 0, false}};

/* A part with made-up contents that libfabric never sees. */
static void make_part(kvf_buffer *out) {
    kvf_libfabric_card card = {.provider = "efa",
                               .protocol = 3,
                               .protocol_version = 5,
                               .format = 9,
                               .address = "an address",
                               .address_bytes = 10,
                               .regions = (kvf_libfabric_target *)(uintptr_t)regions,
                               .region_count = 4};
    card.beacon[3] = 9;
    assert_int_equal(kvf_libfabric_card_write(&card, out), KVF_OK);
}

static void a_card_says_what_was_written(void **state) {
    (void)state;
    kvf_buffer part = {0};
    kvf_libfabric_card card;
    make_part(&part);
    assert_int_equal(kvf_libfabric_card_read(part.data, part.length, &card), KVF_OK);
    assert_int_equal(card.beacon[3], 9);
    assert_string_equal(card.provider, "efa");
    assert_int_equal(card.protocol, 3);
    assert_int_equal(card.protocol_version, 5);
    assert_int_equal(card.format, 9);
    assert_int_equal(card.address_bytes, 10);
    assert_memory_equal(card.address, "an address", 10);
    assert_int_equal(card.region_count, 4);
    for (uint32_t i = 0; i < card.region_count; i++) {
        assert_int_equal(card.regions[i].base, regions[i].base);
        assert_int_equal(card.regions[i].bytes, regions[i].bytes);
        assert_int_equal(card.regions[i].key, regions[i].key);
        assert_int_equal(card.regions[i].withheld, regions[i].withheld);
    }
    kvf_free(card.regions);
    kvf_buffer_free(&part);
}

static void a_card_cut_off_anywhere_is_refused(void **state) {
    (void)state;
    kvf_buffer part = {0};
    make_part(&part);
    for (size_t bytes = 0; bytes < part.length; bytes++) {
        kvf_libfabric_card card;
        unsigned char *cut =
            malloc(bytes ? bytes : 1); /* so that a sanitizer sees a byte read past its end */
        assert_non_null(cut);
        memcpy(cut, part.data, bytes);
        assert_int_equal(kvf_libfabric_card_read(cut, bytes, &card), KVF_E_PARSE);
        free(cut);
    }
    kvf_buffer_free(&part);
}

static void a_card_with_bytes_after_its_end_is_refused(void **state) {
    (void)state;
    kvf_buffer part = {0};
    kvf_libfabric_card card;
    make_part(&part);
    assert_int_equal(kvf_buffer_add(&part, "", 1), KVF_OK);
    assert_int_equal(kvf_libfabric_card_read(part.data, part.length, &card), KVF_E_PARSE);
    assert_non_null(strstr(kvf_error_detail(), "for 4 regions"));
    kvf_buffer_free(&part);
}

/* Whether the card says nothing that is outside of its bytes, or of what fits in a number. */
static void check_inside(const kvf_libfabric_card *card, const unsigned char *end) {
    assert_true((const unsigned char *)card->address + card->address_bytes <= end);
    assert_true(card->address_bytes <= KVF_LIBFABRIC_ADDRESS_MAX);
    assert_true(strlen(card->provider) <= KVF_LIBFABRIC_PROVIDER_MAX);
    for (uint32_t r = 0; r < card->region_count; r++) {
        assert_true(card->regions[r].bytes <= UINT64_MAX - card->regions[r].base);
        assert_true(!card->regions[r].withheld || card->regions[r].bytes > 0);
    }
}

static void a_forged_card_is_read_within_its_bytes(void **state) {
    (void)state;
    kvf_buffer part = {0};
    make_part(&part);
    for (size_t at = 0; at < part.length; at++) {
        for (int value = 0; value < 256; value++) {
            kvf_libfabric_card card;
            unsigned char *forged = malloc(part.length);
            assert_non_null(forged);
            memcpy(forged, part.data, part.length);
            forged[at] = (unsigned char)value;
            kvf_status status = kvf_libfabric_card_read(forged, part.length, &card);
            assert_true(status == KVF_OK || status == KVF_E_PARSE);
            if (!status)
                check_inside(&card, forged + part.length);
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
        cmocka_unit_test(a_card_with_bytes_after_its_end_is_refused),
        cmocka_unit_test(a_forged_card_is_read_within_its_bytes),
    };
    return cmocka_run_group_tests_name("transport_libfabric_card", tests, NULL, NULL);
}
