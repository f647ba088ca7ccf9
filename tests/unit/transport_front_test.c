/* What is the same for all kinds of transport: opening, registering, the card, and what connecting refuses. */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "transport/card.h"
#include "transport/front.h"
#include "transport/transport.h"
#include "transport_pair.h"

static const pair_kind automatic = {"auto", {true, false}, "inproc", {0}};
static const pair_kind same_host = {"shm", {true, false}, "shm", {0}};

static kvf_transport *open_kind(const char *kind) {
    kvf_transport *transport = NULL;
    assert_int_equal(kvf_transport_open(kind, NULL, &transport), KVF_OK);
    return transport;
}

/* ---- opening and memory ---------------------------------------------------------------------- */

static void every_kind_of_the_build_opens_and_others_are_not_found(void **state) {
    (void)state;
    uint32_t count = 0;
    for (const char *kind; (kind = kvf_transport_kind_name(count)) != NULL; count++)
        if (strcmp(kind, "ucx") != 0 && strcmp(kind, "cuda") != 0) /* these need more of the machine */
            kvf_transport_close(open_kind(kind));
    assert_true(count >= 3);
    assert_string_equal(kvf_transport_kind_name(0), "inproc");
    assert_string_equal(kvf_transport_kind_name(1), "cuda");
    assert_string_equal(kvf_transport_kind_name(2), "shm");
    kvf_transport *none = NULL;
    assert_int_equal(kvf_transport_open("carrier pigeon", NULL, &none), KVF_E_NOT_FOUND);
    assert_non_null(strstr(kvf_error_detail(), "carrier pigeon"));
    assert_null(none);
}

static void options_of_another_size_or_a_name_too_long_are_refused(void **state) {
    (void)state;
    kvf_transport *none = NULL;
    kvf_transport_options options = {0};
    assert_int_equal(kvf_transport_open("shm", &options, &none), KVF_E_INVALID);
    char name[300];
    memset(name, 'n', sizeof name);
    name[299] = '\0';
    options.struct_size = sizeof options;
    options.name = name;
    assert_int_equal(kvf_transport_open("shm", &options, &none), KVF_E_INVALID);
    name[255] = '\0';
    assert_int_equal(kvf_transport_open("shm", &options, &none), KVF_OK);
    kvf_transport_close(none);
}

static void nothing_happens_without_a_transport(void **state) {
    (void)state;
    bool busy;
    kvf_transport_close(NULL);
    kvf_peer_close(NULL);
    assert_int_equal(kvf_transport_open("shm", NULL, NULL), KVF_E_INVALID);
    assert_int_equal(kvf_transport_progress(NULL, &busy), KVF_E_INVALID);
    assert_int_equal(kvf_transport_register(NULL, NULL, 0), KVF_E_INVALID);
    assert_int_equal(kvf_transport_cancel(NULL, 1), KVF_E_INVALID);
    assert_int_equal(kvf_transport_event_fd(NULL), -1);
    assert_null(kvf_peer_region_bytes(NULL, NULL));
}

static void allocated_memory_is_aligned_zeroed_and_as_large_as_asked(void **state) {
    (void)state;
    static const char *const kinds[] = {"auto", "inproc", "shm"};
    for (size_t kind = 0; kind < 3; kind++) {
        kvf_transport *transport = open_kind(kinds[kind]);
        void *memory[2];
        for (int i = 0; i < 2; i++) {
            assert_int_equal(kvf_transport_allocate(transport, KVF_MEMORY_HOST, 0, 10000, &memory[i]),
                             KVF_OK);
            assert_int_equal((uintptr_t)memory[i] % (uintptr_t)sysconf(_SC_PAGESIZE), 0);
            for (size_t at = 0; at < 10000; at++)
                assert_int_equal(((unsigned char *)memory[i])[at], 0);
        }
        memset(memory[0], 1, 10000);
        assert_int_equal(*(unsigned char *)memory[1], 0);
        assert_int_equal(kvf_transport_allocate(transport, KVF_MEMORY_HOST, 0, 0, &memory[0]), KVF_E_INVALID);
        assert_int_equal(kvf_transport_allocate(transport, KVF_MEMORY_HOST, 0, UINT64_MAX, &memory[0]),
                         KVF_E_NOMEM);
        assert_int_equal(kvf_transport_allocate(transport, KVF_MEMORY_HOST, 0, UINT64_MAX / 4, &memory[0]),
                         KVF_E_NOMEM);
        kvf_transport_close(transport);
    }
}

static void memory_is_registered_once_and_only_if_all_of_it_can_be(void **state) {
    (void)state;
    static unsigned char memory[100];
    kvf_transport *transport = open_kind("shm");
    kvf_memory good = {.struct_size = sizeof(kvf_memory), .address = memory, .bytes = 100};
    struct {
        kvf_memory second;
        kvf_status status;
    } cases[] = {
        {{.struct_size = sizeof(kvf_memory), .address = NULL, .bytes = 100}, KVF_E_INVALID},
        {{.struct_size = sizeof(kvf_memory), .address = memory, .bytes = 0}, KVF_E_INVALID},
        {{.struct_size = sizeof(kvf_memory), .address = memory, .bytes = UINT64_MAX}, KVF_E_OVERFLOW},
        {{.struct_size = sizeof(kvf_memory), .address = memory, .bytes = 100, .kind = KVF_MEMORY_CUDA},
         KVF_E_UNSUPPORTED},
        {{.struct_size = sizeof(kvf_memory), .address = memory, .bytes = 100, .kind = (kvf_memory_kind)7},
         KVF_E_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_memory regions[2] = {good, cases[i].second};
        assert_int_equal(kvf_transport_register(transport, regions, 2), cases[i].status);
    }
    assert_int_equal(kvf_transport_register(transport, NULL, 1), KVF_E_INVALID);
    assert_int_equal(kvf_transport_register(transport, &good, 0), KVF_E_INVALID);
    assert_int_equal(kvf_transport_register(transport, &good, 1), KVF_OK);
    assert_int_equal(kvf_transport_register(transport, &good, 1), KVF_E_EXISTS);
    kvf_transport_close(transport);
}

static void memory_is_sized_and_has_a_kind_and_a_device(void **state) {
    (void)state;
    static unsigned char memory[200];
    kvf_transport *transport = open_kind("inproc");
    void *allocated = NULL;
    const kvf_memory good = {.struct_size = sizeof good, .address = memory, .bytes = 100};
    kvf_memory unsized = good, placed = good;
    unsized.struct_size = 0;
    placed.device = 1;
    assert_int_equal(kvf_transport_register(transport, &unsized, 1), KVF_E_INVALID);
    assert_non_null(strstr(kvf_error_detail(), "region 0: struct_size is 0"));
    assert_int_equal(kvf_transport_register(transport, &placed, 1), KVF_E_INVALID);
    assert_non_null(strstr(kvf_error_detail(), "device is 1"));
    assert_int_equal(kvf_transport_allocate(transport, KVF_MEMORY_CUDA, 0, 100, &allocated),
                     KVF_E_UNSUPPORTED);
    assert_non_null(strstr(kvf_error_detail(), "CUDA"));
    assert_int_equal(kvf_transport_allocate(transport, KVF_MEMORY_HOST, 1, 100, &allocated), KVF_E_INVALID);
    assert_int_equal(kvf_transport_allocate(transport, (kvf_memory_kind)7, 0, 100, &allocated),
                     KVF_E_INVALID);
    /* Structs of a caller built for a newer library, with one more field that is not used. */
    struct {
        kvf_memory known;
        uint64_t more;
    } newer[2] = {{good, 0}, {good, 0}};
    newer[0].known.struct_size = newer[1].known.struct_size = sizeof newer[0];
    newer[1].known.address = memory + 100;
    newer[1].more = 1;
    assert_int_equal(kvf_transport_register(transport, &newer[0].known, 2), KVF_E_INVALID);
    newer[1].more = 0;
    assert_int_equal(kvf_transport_register(transport, &newer[0].known, 2), KVF_OK);
    kvf_transport_close(transport);
    /* And of one built for an older library, without the last field. */
    struct {
        size_t struct_size;
        void *address;
        uint64_t bytes;
        kvf_memory_kind kind;
        uint32_t device;
    } older[2] = {{sizeof older[0], memory, 100, KVF_MEMORY_HOST, 0},
                  {sizeof older[0], memory + 100, 50, KVF_MEMORY_HOST, 0}};
    const void *card;
    size_t card_bytes;
    kvf_peer *peer;
    uint32_t count;
    transport = open_kind("inproc");
    assert_int_equal(kvf_transport_register(transport, (const kvf_memory *)(const void *)older, 2), KVF_OK);
    assert_int_equal(kvf_transport_export(transport, &card, &card_bytes), KVF_OK);
    assert_int_equal(kvf_transport_connect(transport, card, card_bytes, &peer), KVF_OK);
    assert_int_equal(kvf_peer_region_bytes(peer, &count)[1], 50);
    kvf_transport_close(transport);
}

static void memory_is_registered_after_the_card_was_exported_and_makes_another_card(void **state) {
    (void)state;
    static unsigned char memory[100];
    kvf_transport *transport = open_kind("auto");
    kvf_memory region = {.struct_size = sizeof(kvf_memory), .address = memory, .bytes = 100};
    const void *card;
    size_t without, with;
    assert_int_equal(kvf_transport_export(transport, &card, &without), KVF_OK);
    assert_int_equal(kvf_transport_register(transport, &region, 1), KVF_OK);
    assert_int_equal(kvf_transport_export(transport, &card, &with), KVF_OK);
    assert_true(with > without);
    kvf_transport_close(transport);
}

/* ---- tables and settings --------------------------------------------------------------------- */

static void every_fabric_says_what_it_can_do_and_costs_and_comes_best_first(void **state) {
    (void)state;
    kvf_transport_kind kind = {.struct_size = sizeof kind}, before = {.reach = KVF_REACH_PROCESS};
    uint32_t count = 0;
    for (; kvf_transport_describe(count, &kind) == KVF_OK; count++, before = kind) {
        assert_string_equal(kind.name, kvf_transport_kind_name(count));
        assert_true(kind.reach >= before.reach);
        const bool of_devices = strcmp(kind.name, "cuda") == 0;
        assert_int_equal((kind.memory_kinds & 1u << KVF_MEMORY_HOST) == 0, of_devices);
        assert_int_equal(kind.directions, 1u << KVF_READ | 1u << KVF_WRITE);
        assert_true(kind.cost.ns_per_run > 0 && kind.cost.ns_per_byte > 0 && kind.cost.ns_per_source > 0);
        for (uint32_t i = 0; kind.settings[i]; i++)
            assert_int_equal(strncmp(kind.settings[i], kind.name, strlen(kind.name)), 0);
        assert_int_equal(kvf_fabric_check(kvf_fabric_at(count)), KVF_OK);
    }
    assert_true(count >= 2);
    assert_null(kvf_transport_kind_name(count));
    assert_int_equal(kvf_transport_describe(0, NULL), KVF_E_INVALID);
    assert_int_equal(kvf_transport_describe(0, &(kvf_transport_kind){0}), KVF_E_INVALID);
}

static bool leave_what_nobody_enters(void *link, kvf_direction direction) {
    (void)link, (void)direction;
    return true;
}

static void a_fabric_whose_table_is_incomplete_is_not_opened(void **state) {
    (void)state;
    const kvf_fabric whole = *kvf_fabric_at(0);
    kvf_fabric cases[17];
    size_t count = 0;
#define WITHOUT(what) (cases[count] = whole, cases[count++].what = 0)
    WITHOUT(open);
    WITHOUT(register_region);
    WITHOUT(unregister_region);
    WITHOUT(submit);
    WITHOUT(cancel);
    WITHOUT(progress);
    WITHOUT(fence);
    WITHOUT(kind.fences);
    WITHOUT(kind.name);
    WITHOUT(kind.memory_kinds);
    WITHOUT(kind.directions);
    WITHOUT(kind.one_sided);
    WITHOUT(kind.cost.ns_per_run);
#undef WITHOUT
    cases[count] = whole;
    cases[count++].kind.allocates = 1;
    cases[count] = whole; /* it neither shuts peers out nor says how late their writes may be */
    cases[count].fence = cases[count].admit = NULL;
    cases[count++].kind.fences = false;
    cases[count] = whole;
    cases[count++].leave = leave_what_nobody_enters;
    cases[count] = whole;
    cases[count++].kind.settings = (const char *const[]){"shm.direct", NULL};
    for (size_t i = 0; i < count; i++) {
        kvf_transport *none = NULL;
        assert_int_equal(kvf_transport_open_over(&cases[i], "auto", NULL, &none), KVF_E_INVALID);
        assert_non_null(strstr(kvf_error_detail(), "fabric"));
        assert_null(none);
    }
    kvf_transport *one = NULL;
    assert_int_equal(kvf_transport_open_over(&whole, "auto", NULL, &one), KVF_OK);
    kvf_transport_close(one);
}

static kvf_status open_with(const char *kind, const char *key, const char *value) {
    kvf_setting setting = {key, value};
    kvf_transport_options options = {.struct_size = sizeof options, .settings = &setting, .setting_count = 1};
    kvf_transport *transport = NULL;
    kvf_status status = kvf_transport_open(kind, &options, &transport);
    kvf_transport_close(transport);
    return status;
}

static void settings_are_known_by_key_and_their_values_checked(void **state) {
    (void)state;
    assert_int_equal(open_with("shm", "shm.direct", "off"), KVF_OK);
    assert_int_equal(open_with("shm", "shm.direct", "on"), KVF_OK);
    assert_int_equal(open_with("inproc", "shm.direct", "off"), KVF_OK);
    assert_int_equal(open_with("inproc", "ucx.tls", "tcp"), KVF_OK); /* also in a build without UCX */
    assert_int_equal(open_with("shm", "shm.direct", "maybe"), KVF_E_INVALID);
    assert_non_null(strstr(kvf_error_detail(), "shm.direct is \"maybe\"; allowed: auto, on, off"));
    assert_int_equal(open_with("shm", "shm.speed", "high"), KVF_E_NOT_FOUND);
    assert_non_null(strstr(kvf_error_detail(), "\"shm.speed\"; allowed: "));
    assert_non_null(strstr(kvf_error_detail(), "shm.direct"));
    assert_int_equal(open_with("shm", NULL, "high"), KVF_E_INVALID);
    assert_int_equal(open_with("shm", "shm.direct", NULL), KVF_E_INVALID);
    kvf_transport_options none = {.struct_size = sizeof none, .setting_count = 1};
    kvf_transport *transport = NULL;
    assert_int_equal(kvf_transport_open("shm", &none, &transport), KVF_E_INVALID);
}

/* ---- the card -------------------------------------------------------------------------------- */

static void a_card_cut_off_anywhere_is_refused(void **state) {
    (void)state;
    test_side here;
    side_open(&here, &automatic, 1);
    const void *card;
    size_t bytes;
    kvf_peer *peer = NULL;
    assert_int_equal(kvf_transport_export(here.transport, &card, &bytes), KVF_OK);
    for (size_t length = 0; length < bytes; length++) {
        void *cut = malloc(length + 1); /* so that a sanitizer finds reads past its end */
        assert_non_null(cut);
        memcpy(cut, card, length);
        assert_int_equal(kvf_transport_connect(here.transport, cut, length, &peer), KVF_E_PARSE);
        free(cut);
    }
    assert_int_equal(kvf_transport_connect(here.transport, NULL, 5, &peer), KVF_E_INVALID);
    assert_null(peer);
    side_close(&here);
}

static void a_card_with_any_byte_changed_is_refused(void **state) {
    (void)state;
    test_side here;
    side_open(&here, &automatic, 1);
    const void *card;
    size_t bytes;
    kvf_peer *peer = NULL;
    assert_int_equal(kvf_transport_export(here.transport, &card, &bytes), KVF_OK);
    unsigned char *changed = malloc(bytes);
    assert_non_null(changed);
    for (size_t at = 0; at < bytes; at++)
        for (int bit = 0; bit < 8; bit++) {
            memcpy(changed, card, bytes);
            changed[at] ^= (unsigned char)(1 << bit);
            kvf_status status = kvf_transport_connect(here.transport, changed, bytes, &peer);
            assert_true(status == KVF_E_PARSE || (status == KVF_E_UNSUPPORTED && (at == 4 || at == 5)));
        }
    free(changed);
    side_close(&here);
}

/* A forger of cards can compute the checksum too. */
static void fix_checksum(unsigned char *card, size_t bytes) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes - 8; i++)
        hash = (hash ^ card[i]) * 0x100000001b3u;
    for (size_t i = 0; i < 8; i++)
        card[bytes - 8 + i] = (unsigned char)(hash >> (8 * i));
}

static void forged_cards_connect_to_nothing_that_was_not_meant(void **state) {
    (void)state;
    test_side here, there;
    side_open(&here, &same_host, 1);
    side_open(&there, &same_host, 2);
    const void *card;
    size_t bytes;
    assert_int_equal(kvf_transport_export(there.transport, &card, &bytes), KVF_OK);
    unsigned char *forged = malloc(bytes);
    assert_non_null(forged);
    for (size_t at = 0; at < bytes - 8; at++)
        for (int value = 0; value < 256; value += 51) {
            memcpy(forged, card, bytes);
            forged[at] = (unsigned char)(forged[at] + value + 1);
            fix_checksum(forged, bytes);
            kvf_peer *peer = NULL;
            if (kvf_transport_connect(here.transport, forged, bytes, &peer) == KVF_OK) {
                drive_idle(&here, &there);
                kvf_peer_close(peer);
            }
        }
    drive_idle(&here, &there);
    free(forged);
    side_close(&here);
    side_close(&there);
}

static void random_bytes_are_not_a_card(void **state) {
    (void)state;
    uint64_t seed = 99;
    static const unsigned char version[6] = {'K', 'V', 'F', 'C', 2, 0};
    unsigned char bytes[400];
    for (int round = 0; round < 2000; round++) {
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (unsigned char)draw(&seed, 256);
        if (round % 2)
            memcpy(bytes, version, sizeof version);
        size_t length = draw(&seed, sizeof bytes);
        if (length > 16)
            fix_checksum(bytes, length);
        kvf_card card;
        if (kvf_card_read(bytes, length, &card) == KVF_OK)
            kvf_card_free(&card);
    }
}

static void a_card_is_read_as_it_was_written(void **state) {
    (void)state;
    uint64_t sizes[3] = {1, 1ull << 40, UINT64_MAX};
    kvf_card written = {.name = "rank 3", .region_bytes = sizes, .region_count = 3, .part_count = 2};
    kvf_card read;
    kvf_buffer bytes = {0};
    kvf_card_part parts[2] = {{"inproc", "abc", 3}, {"fifteen letters", "", 0}};
    written.parts = parts;
    written.generation = UINT64_MAX - 1;
    assert_int_equal(kvf_card_write(&written, &bytes), KVF_OK);
    assert_int_equal(kvf_card_read(bytes.data, bytes.length, &read), KVF_OK);
    assert_string_equal(read.name, "rank 3");
    assert_true(read.generation == UINT64_MAX - 1);
    assert_int_equal(read.region_count, 3);
    assert_memory_equal(read.region_bytes, sizes, sizeof sizes);
    assert_int_equal(read.part_count, 2);
    assert_string_equal(read.parts[1].kind, "fifteen letters");
    assert_int_equal(read.parts[0].bytes, 3);
    assert_memory_equal(read.parts[0].data, "abc", 3);
    kvf_card_free(&read);
    kvf_buffer_free(&bytes);
}

/* A connection was made by the first, and a fence asked about both. */
static void a_card_with_two_parts_of_one_kind_is_refused(void **state) {
    (void)state;
    kvf_card_part parts[3] = {{"shm", "abc", 3}, {"ucx", "", 0}, {"shm", "abd", 3}};
    const kvf_card written = {.name = "rank 3", .parts = parts, .part_count = 3};
    kvf_card read;
    kvf_buffer bytes = {0};
    assert_int_equal(kvf_card_write(&written, &bytes), KVF_OK);
    assert_int_equal(kvf_card_read(bytes.data, bytes.length, &read), KVF_E_PARSE);
    assert_string_equal(kvf_error_detail(), "card: it has two parts of kind \"shm\"; allowed: one");
    kvf_buffer_free(&bytes);
}

/* A card that gives a region a size and also says "withheld" contradicts itself. */
static void a_card_says_which_regions_are_withheld(void **state) {
    (void)state;
    uint64_t sizes[3] = {0, 0, 9};
    bool withheld[3] = {true, false, false};
    kvf_card written = {
        .name = "rank 3", .region_bytes = sizes, .region_withheld = withheld, .region_count = 3};
    kvf_card read;
    kvf_buffer bytes = {0};
    assert_int_equal(kvf_card_write(&written, &bytes), KVF_OK);
    assert_int_equal(kvf_card_read(bytes.data, bytes.length, &read), KVF_OK);
    assert_memory_equal(read.region_withheld, withheld, sizeof withheld);
    assert_true(kvf_card_withholds(bytes.data, bytes.length));
    assert_false(kvf_card_withholds("no card", 7));
    kvf_card_free(&read);
    kvf_buffer_free(&bytes);
    withheld[0] = false;
    withheld[2] = true;
    assert_int_equal(kvf_card_write(&written, &bytes), KVF_OK);
    assert_int_equal(kvf_card_read(bytes.data, bytes.length, &read), KVF_E_PARSE);
    assert_string_equal(kvf_error_detail(),
                        "card: region 2 has 9 bytes, and its sort is 1; allowed: 0, 2 and 3");
    kvf_buffer_free(&bytes);
}

static void a_card_says_which_regions_are_in_memory_of_devices(void **state) {
    (void)state;
    uint64_t sizes[3] = {7, 0, 9};
    bool on_device[3] = {true, false, false}, arenas[3] = {false, false, true};
    kvf_card written = {.name = "rank 3",
                        .region_bytes = sizes,
                        .region_on_device = on_device,
                        .region_device_arena = arenas,
                        .region_count = 3};
    kvf_card read;
    kvf_buffer bytes = {0};
    assert_int_equal(kvf_card_write(&written, &bytes), KVF_OK);
    assert_int_equal(kvf_card_read(bytes.data, bytes.length, &read), KVF_OK);
    assert_memory_equal(read.region_on_device, on_device, sizeof on_device);
    assert_memory_equal(read.region_device_arena, arenas, sizeof arenas);
    assert_memory_equal(read.region_bytes, sizes, sizeof sizes);
    assert_true(kvf_card_withholds(bytes.data, bytes.length)); /* it may go packed */
    kvf_card_free(&read);
    kvf_buffer_free(&bytes);
    on_device[1] = true;
    assert_int_equal(kvf_card_write(&written, &bytes), KVF_OK);
    assert_int_equal(kvf_card_read(bytes.data, bytes.length, &read), KVF_E_PARSE);
    assert_string_equal(kvf_error_detail(),
                        "card: region 1 has 0 bytes, and its sort is 2; allowed: 0 and 1");
    kvf_buffer_free(&bytes);
}

/* Both kinds of region have 0 bytes for peers. An unregistered region used to be taken for a withheld one, and then all
 * moves from it went packed. */
static void a_region_that_was_unregistered_is_not_withheld(void **state) {
    (void)state;
    kvf_transport *here = open_kind("shm"), *there = open_kind("shm");
    static unsigned char memory[3][64];
    kvf_memory regions[3];
    for (uint32_t i = 0; i < 3; i++)
        regions[i] = (kvf_memory){
            .struct_size = sizeof *regions, .address = memory[i], .bytes = 64, .withheld = i == 2};
    const void *card;
    size_t bytes;
    kvf_peer *peer;
    const kvf_run to_gone = {0, 0, 8, 0, 0}, to_withheld = {0, 0, 8, 0, 2};
    assert_int_equal(kvf_transport_register(here, regions, 1), KVF_OK);
    assert_int_equal(kvf_transport_register(there, regions, 2), KVF_OK);
    assert_int_equal(kvf_transport_unregister_region(there, 0), KVF_OK);
    for (uint32_t with = 0; with < 2; with++) {
        if (with)
            assert_int_equal(kvf_transport_register_region(there, 2, &regions[2]), KVF_OK);
        assert_int_equal(kvf_transport_export(there, &card, &bytes), KVF_OK);
        assert_int_equal(kvf_card_withholds(card, bytes), with);
        assert_int_equal(kvf_transport_connect(here, card, bytes, &peer), KVF_OK);
        assert_int_equal(kvf_peer_withholds(peer), with);
        assert_int_equal(
            kvf_transport_submit(peer, KVF_READ, &to_gone, 1, note_outcome, &(test_outcome){0}, NULL),
            KVF_E_NOT_REGISTERED);
        assert_non_null(strstr(kvf_error_detail(), "remote region 0 was unregistered"));
    }
    assert_int_equal(
        kvf_transport_submit(peer, KVF_READ, &to_withheld, 1, note_outcome, &(test_outcome){0}, NULL),
        KVF_E_NOT_REGISTERED);
    assert_non_null(strstr(kvf_error_detail(), "remote region 2 is withheld"));
    kvf_transport_close(here);
    kvf_transport_close(there);
}

/* A peer by its card was refused as one that breaks the protocol: the owner had forgotten the last number. */
static void a_region_that_cannot_be_registered_changes_no_number(void **state) {
    (void)state;
    kvf_transport *here = open_kind("shm"), *there = open_kind("shm");
    static unsigned char memory[3][64];
    kvf_memory regions[3];
    for (uint32_t i = 0; i < 3; i++)
        regions[i] = (kvf_memory){.struct_size = sizeof *regions, .address = memory[i], .bytes = 64};
    const void *card;
    size_t bytes;
    kvf_peer *peer;
    test_outcome outcome = {0};
    const kvf_run read = {0, 0, 64, 0, 0};
    memset(memory[0], 1, 64);
    assert_int_equal(kvf_transport_register(here, &regions[1], 1), KVF_OK);
    assert_int_equal(kvf_transport_register(there, regions, 2), KVF_OK);
    assert_int_equal(kvf_transport_unregister_region(there, 1), KVF_OK);
    assert_int_equal(kvf_transport_export(there, &card, &bytes), KVF_OK);
    regions[2].kind = KVF_MEMORY_CUDA;
    for (uint32_t number = 1; number < 3; number++)
        assert_int_equal(kvf_transport_register_region(there, number, &regions[2]), KVF_E_UNSUPPORTED);
    assert_int_equal(kvf_transport_connect(here, card, bytes, &peer), KVF_OK);
    assert_int_equal(kvf_transport_submit(peer, KVF_READ, &read, 1, note_outcome, &outcome, NULL), KVF_OK);
    while (outcome.calls == 0) {
        assert_int_equal(kvf_transport_progress(here, NULL), KVF_OK);
        assert_int_equal(kvf_transport_progress(there, NULL), KVF_OK);
    }
    assert_string_equal(outcome.detail, "");
    assert_memory_equal(memory[1], memory[0], 64);
    regions[2].kind = KVF_MEMORY_HOST;
    assert_int_equal(kvf_transport_unregister_region(there, 0), KVF_OK);
    regions[1].kind = KVF_MEMORY_CUDA;
    assert_int_equal(kvf_transport_register(there, regions, 2), KVF_E_UNSUPPORTED);
    assert_int_equal(kvf_transport_register_region(there, 2, &regions[2]), KVF_OK);
    kvf_transport_close(here);
    kvf_transport_close(there);
}

static void another_version_of_the_card_is_named(void **state) {
    (void)state;
    kvf_transport *transport = open_kind("auto");
    const void *card;
    size_t bytes;
    kvf_peer *peer;
    assert_int_equal(kvf_transport_export(transport, &card, &bytes), KVF_OK);
    unsigned char *newer = malloc(bytes);
    assert_non_null(newer);
    memcpy(newer, card, bytes);
    newer[4] = 9;
    assert_int_equal(kvf_transport_connect(transport, newer, bytes, &peer), KVF_E_UNSUPPORTED);
    assert_non_null(strstr(kvf_error_detail(), "version 9"));
    free(newer);
    kvf_transport_close(transport);
}

static void sides_without_a_common_kind_name_what_each_has(void **state) {
    (void)state;
    kvf_transport *here = open_kind("inproc"), *there = open_kind("shm");
    const void *card;
    size_t bytes;
    kvf_peer *peer;
    assert_int_equal(kvf_transport_export(there, &card, &bytes), KVF_OK);
    assert_int_equal(kvf_transport_connect(here, card, bytes, &peer), KVF_E_UNSUPPORTED);
    assert_non_null(strstr(kvf_error_detail(), "inproc"));
    assert_non_null(strstr(kvf_error_detail(), "shm"));
    kvf_transport_close(here);
    kvf_transport_close(there);
}

/* ---- submitting ------------------------------------------------------------------------------ */

static void submitting_without_a_peer_runs_or_callback_is_refused(void **state) {
    (void)state;
    test_side here;
    test_outcome outcome = {0};
    side_open(&here, &automatic, 1);
    kvf_peer *peer = side_connect(&here, &here);
    kvf_run run = {0, 0, 1, 0, 1};
    assert_int_equal(kvf_transport_submit(NULL, KVF_READ, &run, 1, note_outcome, &outcome, NULL),
                     KVF_E_INVALID);
    assert_int_equal(kvf_transport_submit(peer, KVF_READ, NULL, 1, note_outcome, &outcome, NULL),
                     KVF_E_INVALID);
    assert_int_equal(kvf_transport_submit(peer, KVF_READ, &run, 1, NULL, &outcome, NULL), KVF_E_INVALID);
    assert_int_equal(kvf_transport_submit(peer, (kvf_direction)2, &run, 1, note_outcome, &outcome, NULL),
                     KVF_E_INVALID);
    side_close(&here);
    assert_int_equal(outcome.calls, 0);
}

static void endpoints_without_memory_exchange_notifications_only(void **state) {
    (void)state;
    test_side there;
    side_open(&there, &automatic, 2);
    test_side here = {.transport = open_kind("auto")};
    kvf_peer *peer = side_connect(&here, &there);
    kvf_run run = {0, 0, 1, 0, 0};
    uint32_t value = 5;
    assert_int_equal(kvf_transport_submit(peer, KVF_READ, &run, 1, note_outcome, NULL, NULL),
                     KVF_E_NOT_REGISTERED);
    assert_int_equal(kvf_transport_notify(peer, &value, sizeof value), KVF_OK);
    drive(&here, &there, &there.notices, 1);
    side_close(&here);
    side_close(&there);
}

/* ---- an allocator that fails ----------------------------------------------------------------- */

static uint32_t allocations_left;

static void *allocate_some(void *context, size_t bytes) {
    (void)context;
    return allocations_left && allocations_left-- ? malloc(bytes) : NULL;
}

static void *resize_some(void *context, void *memory, size_t bytes) {
    (void)context;
    return allocations_left && allocations_left-- ? realloc(memory, bytes) : NULL;
}

static void release(void *context, void *memory) {
    (void)context;
    free(memory);
}

/* Opens, registers, exports, connects and submits, until an allocation fails. */
static kvf_status go_as_far_as_possible(const char *kind, kvf_transport **out) {
    static unsigned char memory[100];
    static test_outcome outcome;
    kvf_memory region = {.struct_size = sizeof(kvf_memory), .address = memory, .bytes = 100};
    kvf_run run = {0, 50, 50, 0, 0};
    const void *card;
    size_t bytes;
    kvf_peer *peer;
    void *allocated;
    kvf_status status = kvf_transport_open(kind, NULL, out);
    if (!status)
        status = kvf_transport_allocate(*out, KVF_MEMORY_HOST, 0, 5000, &allocated);
    if (!status)
        status = kvf_transport_register(*out, &region, 1);
    if (!status)
        status = kvf_transport_export(*out, &card, &bytes);
    if (!status)
        status = kvf_transport_connect(*out, card, bytes, &peer);
    if (!status)
        status = kvf_transport_submit(peer, KVF_READ, &run, 1, note_outcome, &outcome, NULL);
    return status;
}

static void every_allocation_may_fail_and_nothing_leaks(void **state) {
    (void)state;
    static const char *const kinds[] = {
        "inproc",
        "shm",
#ifdef KVF_HAVE_MESSAGES
        "messages",
#endif
    };
    kvf_allocator allocator = {allocate_some, resize_some, release, NULL};
    assert_int_equal(kvf_set_allocator(&allocator), KVF_OK);
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        kvf_status status = KVF_E_NOMEM;
        for (uint32_t granted = 0; status != KVF_OK; granted++) {
            kvf_transport *transport = NULL;
            assert_true(granted < 100);
            allocations_left = granted;
            status = go_as_far_as_possible(kinds[kind], &transport);
            assert_true(status == KVF_OK || status == KVF_E_NOMEM);
            kvf_transport_close(transport);
        }
    }
    assert_int_equal(kvf_set_allocator(NULL), KVF_OK);
}

static size_t longest_resized;

static void *resize_any(void *context, void *memory, size_t bytes) {
    (void)context;
    longest_resized = bytes > longest_resized ? bytes : longest_resized;
    return realloc(memory, bytes);
}

/* Each took 24 bytes, for as long as the owner lived, and was looked through by all that connect. */
static void endpoints_of_this_process_that_were_shut_out_and_have_closed_are_forgotten(void **state) {
    (void)state;
    allocations_left = UINT32_MAX;
    kvf_allocator allocator = {allocate_some, resize_any, release, NULL};
    assert_int_equal(kvf_set_allocator(&allocator), KVF_OK);
    kvf_transport *owner = open_kind("inproc");
    for (uint32_t i = 0; i < 500; i++) {
        kvf_transport *other = open_kind("inproc");
        unsigned char copy[512];
        const void *card;
        size_t bytes;
        assert_int_equal(kvf_transport_export(other, &card, &bytes), KVF_OK);
        assert_true(bytes <= sizeof copy);
        memcpy(copy, card, bytes);
        for (uint32_t closed = 0; closed < 2; closed++) {
            assert_int_equal(kvf_transport_fence(owner, copy, bytes), KVF_OK);
            if (!closed)
                kvf_transport_close(other);
        }
    }
    kvf_transport_close(owner);
    assert_int_equal(kvf_set_allocator(NULL), KVF_OK);
    assert_in_range(longest_resized, 1, 4096);
}

static bool count_settling(void *context) {
    ++*(int *)context;
    return true;
}

/* Its owner is told that there is none, and may be gone when regions come or go. */
static void a_user_of_regions_whose_descriptor_cannot_be_watched_is_not_kept(void **state) {
    (void)state;
    int settled[2] = {0, 0};
    unsigned char bytes[64];
    const kvf_memory memory = {.struct_size = sizeof memory, .address = bytes, .bytes = sizeof bytes};
    const kvf_region_user broken = {.fd = INT_MAX, .settle = count_settling, .context = &settled[0]};
    const kvf_region_user user = {.fd = -1, .settle = count_settling, .context = &settled[1]};
    kvf_transport *transport = open_kind("inproc");
    assert_int_equal(kvf_transport_set_region_user(transport, &broken), KVF_E_IO);
    assert_int_equal(kvf_transport_set_region_user(transport, &user), KVF_OK);
    assert_int_equal(kvf_transport_register(transport, &memory, 1), KVF_OK);
    assert_int_equal(settled[0], 0);
    assert_int_equal(settled[1], 1);
    kvf_transport_close(transport);
}

static void costs_are_assumed_by_kind(void **state) {
    (void)state;
    kvf_cost_model cost, other;
    const char *kind;
    for (uint32_t i = 0; (kind = kvf_transport_kind_name(i)) != NULL; i++)
        assert_string_equal(kvf_cost_assumed(kind, &cost), kind);
    assert_string_equal(kvf_cost_assumed("shm", &cost), "shm");
    assert_string_equal(kvf_cost_assumed("auto", &other), "shm");
    assert_memory_equal(&other, &cost, sizeof cost);
    assert_string_equal(kvf_cost_assumed(NULL, &other), "shm");
}

/* Checks a fabric's part of a card. The card has a cache of 64 bytes and, on a device, an arena of 32 bytes.
 * `arenas`: the memory, by bits, where the card has arenas. Returns where it has them by this fabric. */
static kvf_status check_parts(const uint64_t *part, uint32_t *arenas) {
    uint64_t bytes[2] = {64, 32};
    bool on_device[2] = {false, true};
    kvf_peer peer = {
        .region_count = 2, .region_bytes = bytes, .region_device_arena = on_device, .arena_kinds = *arenas};
    kvf_status status = kvf_peer_check_regions(&peer, 2, part, sizeof *part);
    if (!status)
        assert_int_equal(bytes[1], part[1]);
    *arenas = peer.arena_kinds;
    return status;
}

static void an_arena_that_a_fabric_does_not_serve_is_done_without_if_there_is_another(void **state) {
    (void)state;
    const uint32_t host = 1u << KVF_MEMORY_HOST, both = host | 1u << KVF_MEMORY_CUDA;
    const uint64_t all[2] = {64, 32}, without[2] = {64, 0}, cut[2] = {64, 31}, only_arena[2] = {0, 32};
    uint32_t arenas = both;
    assert_int_equal(check_parts(all, &arenas), KVF_OK);
    assert_int_equal(arenas, both);
    assert_int_equal(check_parts(without, &arenas), KVF_OK);
    assert_int_equal(arenas, host);
    arenas = 1u << KVF_MEMORY_CUDA;
    assert_int_equal(check_parts(without, &arenas), KVF_E_UNSUPPORTED);
    assert_non_null(strstr(kvf_error_detail(), "the peer does not serve its region 1 this way"));
    arenas = both;
    assert_int_equal(check_parts(only_arena, &arenas), KVF_E_UNSUPPORTED);
    assert_non_null(strstr(kvf_error_detail(), "region 0"));
    assert_int_equal(check_parts(cut, &arenas), KVF_E_PARSE);
    assert_non_null(strstr(kvf_error_detail(), "region 1 has 31 bytes in its part of the card and 32"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(costs_are_assumed_by_kind),
        cmocka_unit_test(every_kind_of_the_build_opens_and_others_are_not_found),
        cmocka_unit_test(options_of_another_size_or_a_name_too_long_are_refused),
        cmocka_unit_test(nothing_happens_without_a_transport),
        cmocka_unit_test(allocated_memory_is_aligned_zeroed_and_as_large_as_asked),
        cmocka_unit_test(memory_is_registered_once_and_only_if_all_of_it_can_be),
        cmocka_unit_test(memory_is_sized_and_has_a_kind_and_a_device),
        cmocka_unit_test(memory_is_registered_after_the_card_was_exported_and_makes_another_card),
        cmocka_unit_test(every_fabric_says_what_it_can_do_and_costs_and_comes_best_first),
        cmocka_unit_test(a_fabric_whose_table_is_incomplete_is_not_opened),
        cmocka_unit_test(settings_are_known_by_key_and_their_values_checked),
        cmocka_unit_test(a_card_cut_off_anywhere_is_refused),
        cmocka_unit_test(a_card_with_any_byte_changed_is_refused),
        cmocka_unit_test(forged_cards_connect_to_nothing_that_was_not_meant),
        cmocka_unit_test(random_bytes_are_not_a_card),
        cmocka_unit_test(a_card_is_read_as_it_was_written),
        cmocka_unit_test(a_card_with_two_parts_of_one_kind_is_refused),
        cmocka_unit_test(a_card_says_which_regions_are_withheld),
        cmocka_unit_test(a_card_says_which_regions_are_in_memory_of_devices),
        cmocka_unit_test(a_region_that_was_unregistered_is_not_withheld),
        cmocka_unit_test(a_region_that_cannot_be_registered_changes_no_number),
        cmocka_unit_test(another_version_of_the_card_is_named),
        cmocka_unit_test(sides_without_a_common_kind_name_what_each_has),
        cmocka_unit_test(submitting_without_a_peer_runs_or_callback_is_refused),
        cmocka_unit_test(endpoints_without_memory_exchange_notifications_only),
        cmocka_unit_test(a_user_of_regions_whose_descriptor_cannot_be_watched_is_not_kept),
        cmocka_unit_test(an_arena_that_a_fabric_does_not_serve_is_done_without_if_there_is_another),
        cmocka_unit_test(every_allocation_may_fail_and_nothing_leaks),
        cmocka_unit_test(endpoints_of_this_process_that_were_shut_out_and_have_closed_are_forgotten),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
