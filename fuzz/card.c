/*
 * Cards of transports. Checksums would reject nearly every changed card, so the target also reads each input with a
 * corrected sum: the fields must be checked on their own.
 */
#include "fuzz.h"

#include "transport/card.h"
#ifdef KVF_HAVE_UCX
#include "transport/ucx/ucx.h"
#endif
#ifdef KVF_HAVE_LIBFABRIC
#include "transport/libfabric/libfabric.h"
#endif

#define SUM_BYTES 8

/* Corrects the sum: FNV-1a, at the end of the card. */
static void seal(uint8_t *card, size_t size) {
    uint64_t sum = 0xcbf29ce484222325u;
    for (size_t i = 0; i < size - SUM_BYTES; i++)
        sum = (sum ^ card[i]) * 0x100000001b3u;
    for (size_t i = 0; i < SUM_BYTES; i++)
        card[size - SUM_BYTES + i] = (uint8_t)(sum >> (8 * i));
}

static void check_card(const kvf_card *card) {
    kvf_buffer first = {0};
    kvf_card again;
    FUZZ_MUST(kvf_card_write(card, &first) == KVF_OK);
    FUZZ_MUST(kvf_card_read(first.data, first.length, &again) == KVF_OK);
    FUZZ_MUST(again.region_count == card->region_count && again.part_count == card->part_count);
    kvf_card_free(&again);
    kvf_buffer_free(&first);
}

static void read_card(const uint8_t *data, size_t size) {
    kvf_card card;
    kvf_status status = kvf_card_read(data, size, &card);
    if (status) {
        fuzz_check_refusal(status);
        return;
    }
    check_card(&card);
    kvf_card_free(&card);
}

static void read_ucx_card(uint8_t *data, size_t size) {
#ifdef KVF_HAVE_UCX
    if (size >= 4 + SUM_BYTES) {
        uint64_t sum = kvf_ucx_card_sum(data, size);
        for (size_t i = 0; i < SUM_BYTES; i++)
            data[4 + i] = (uint8_t)(sum >> (8 * i));
    }
    kvf_ucx_card card;
    kvf_status status = kvf_ucx_card_read(data, size, &card);
    if (status)
        fuzz_check_refusal(status);
    else
        kvf_free(card.regions);
#else
    (void)data;
    (void)size;
#endif
}

static void read_libfabric_card(const uint8_t *data, size_t size) {
#ifdef KVF_HAVE_LIBFABRIC
    kvf_libfabric_card card;
    kvf_status status = kvf_libfabric_card_read(data, size, &card);
    if (status)
        fuzz_check_refusal(status);
    else
        kvf_free(card.regions);
#else
    (void)data;
    (void)size;
#endif
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    read_card(data, size);
    read_libfabric_card(data, size);
    uint8_t *copy = malloc(size ? size : 1);
    FUZZ_MUST(copy);
    if (size)
        memcpy(copy, data, size);
    if (size >= SUM_BYTES)
        seal(copy, size);
    read_card(copy, size);
    if (size)
        memcpy(copy, data, size);
    read_ucx_card(copy, size);
    free(copy);
    return 0;
}
