#include "seeds.h"

#include "transport/card.h"
#ifdef KVF_HAVE_UCX
#include "transport/ucx/ucx.h"
#endif
#ifdef KVF_HAVE_LIBFABRIC
#include "transport/libfabric/libfabric.h"
#endif

static void write_card(const char *name, const kvf_card *card) {
    kvf_buffer bytes = {0};
    FUZZ_MUST(kvf_card_write(card, &bytes) == KVF_OK);
    seed_write("card", name, bytes.data, bytes.length);
    kvf_buffer_free(&bytes);
}

static void seed_ucx_cards(void) {
#ifdef KVF_HAVE_UCX
    kvf_ucx_card_region regions[2] = {{0x10000, 4096, "key one", 7}, {0x20000, 8192, "key two!", 8}};
    kvf_ucx_card card = {.major = 1,
                         .minor = 13,
                         .worker = "an address",
                         .worker_bytes = 10,
                         .regions = regions,
                         .region_count = 2};
    kvf_buffer bytes = {0};
    FUZZ_MUST(kvf_ucx_card_write(&card, &bytes) == KVF_OK);
    seed_write("card", "ucx", bytes.data, bytes.length);
    kvf_buffer_free(&bytes);
#endif
}

static void seed_libfabric_cards(void) {
#ifdef KVF_HAVE_LIBFABRIC
    kvf_libfabric_target regions[3] = {{0x10000, 4096, 0x6b6579, false}, {0, 0, 0, false}, {0, 64, 0, true}};
    kvf_libfabric_card card = {.provider = "efa",
                               .protocol = 10,
                               .protocol_version = 4,
                               .format = 12,
                               .address = "an address",
                               .address_bytes = 10,
                               .regions = regions,
                               .region_count = 3};
    kvf_buffer bytes = {0};
    FUZZ_MUST(kvf_libfabric_card_write(&card, &bytes) == KVF_OK);
    seed_write("card", "libfabric", bytes.data, bytes.length);
    kvf_buffer_free(&bytes);
#endif
}

void seed_cards(void) {
    static uint64_t sizes[] = {4096, 1 << 20, 0};
    static bool withheld[] = {false, false, true};
    kvf_card card = {.name = "decode-0", .region_bytes = sizes, .region_count = 3, .part_count = 2};
    kvf_card_part parts[] = {{"shm", "sixteen letters here", 20}, {"ucx", "", 0}};
    card.parts = parts;
    write_card("two_parts", &card);
    card.region_withheld = withheld;
    write_card("withheld", &card);
    write_card("empty", &(kvf_card){0});
    seed_ucx_cards();
    seed_libfabric_cards();
}
