/*
 * How many blocks of threads, and so multiprocessors, the copies of "cuda" take, as the stand-in for the driver sees
 * it: how the number follows what waits, and the setting that limits it. Both sides are endpoints of this process.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

#include <kvferry/transport.h>

#include "cuda/device_image.h"
#include "devices.h"
#include "shapes.h"

#define MULTIPROCESSORS "40" /* of each stand-in here */
#define HOUR_NS 3600000000000ull
#define BYTES (32u << 20) /* of a copy: work for more than 40 blocks; behind it, another may have 32 more */

static kvf_status open_with(const char *kind, const char *blocks, kvf_transport **out) {
    const kvf_setting setting = {"cuda.blocks", blocks};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &setting, .setting_count = blocks ? 1 : 0};
    return kvf_transport_open(kind, &options, out);
}

/* ---- the setting --------------------------------------------------------------------------------- */

static void a_number_of_blocks_that_is_not_allowed_is_named_with_those_that_are(void **state) {
    static const char *const wrong[] = {
        "0", "1025", "-1", "", " 8", "8 ", "8.0", "0x8", "99999999999999999999"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char text[128];
        kvf_transport *transport = NULL;
        (void)snprintf(text, sizeof text, "transport setting cuda.blocks is \"%s\"; allowed: 1 to 1024",
                       wrong[i]);
        assert_fails(open_with(*state, wrong[i], &transport), KVF_E_INVALID, text);
    }
}

static void the_first_and_the_last_number_of_the_range_are_allowed(void **state) {
    static const char *const right[] = {"1", "1024"};
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        kvf_transport *transport = NULL;
        assert_ok(open_with(*state, right[i], &transport));
        kvf_transport_close(transport);
    }
}

/* ---- copies that wait behind each other ---------------------------------------------------------- */

/* A reader, and an owner whose memory it copies. */
typedef struct test_scene {
    kvf_transport *reader, *owner;
    kvf_peer *peer;
    uint32_t ended;
} test_scene;

static kvf_transport *open_end(const char *kind, const char *blocks) {
    void *seen;
    kvf_transport *transport = NULL;
    kvf_memory memory = device_memory(devices_number(1), BYTES, &seen);
    memory.withheld = false;
    assert_ok(open_with(kind, blocks, &transport));
    assert_ok(kvf_transport_register(transport, &memory, 1));
    return transport;
}

static void open_scene(test_scene *scene, const char *kind, const char *blocks) {
    const void *card;
    size_t bytes;
    *scene = (test_scene){.reader = open_end(kind, blocks), .owner = open_end(kind, NULL)};
    assert_ok(kvf_transport_export(scene->owner, &card, &bytes));
    assert_ok(kvf_transport_connect(scene->reader, card, bytes, &scene->peer));
}

static void close_scene(test_scene *scene) {
    kvf_transport_close(scene->reader);
    kvf_transport_close(scene->owner);
    devices_free();
}

static void step(const test_scene *scene) {
    struct pollfd fds[] = {{kvf_transport_event_fd(scene->reader), POLLIN, 0},
                           {kvf_transport_event_fd(scene->owner), POLLIN, 0}};
    assert_true(poll(fds, 2, 60000) > 0);
    assert_ok(kvf_transport_progress(scene->reader, NULL));
    assert_ok(kvf_transport_progress(scene->owner, NULL));
}

static void note_end(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    test_scene *scene = context;
    (void)operation, (void)detail;
    assert_ok(status);
    scene->ended++;
}

/* Begins a copy, and gives the blocks of threads with which it is started. */
static uint32_t grid_of_copy(test_scene *scene) {
    const kvf_run run = {.bytes = BYTES};
    const uint32_t before = devices_launches();
    assert_ok(kvf_transport_submit(scene->peer, KVF_READ, &run, 1, note_end, scene, NULL));
    while (devices_launches() == before)
        step(scene);
    return devices_grid();
}

/* Two copies of which the first does not end before the second has started; and a third one when both are over. */
static void assert_grids(const char *kind, const char *blocks, uint32_t first, uint32_t behind) {
    test_scene scene;
    open_scene(&scene, kind, blocks);
    devices_delay(HOUR_NS);
    assert_int_equal(grid_of_copy(&scene), first);
    assert_int_equal(grid_of_copy(&scene), behind);
    devices_hasten();
    devices_delay(0);
    while (scene.ended < 2)
        step(&scene);
    assert_int_equal(grid_of_copy(&scene), first);
    while (scene.ended < 3)
        step(&scene);
    close_scene(&scene);
}

static void a_copy_behind_another_gets_more_blocks_and_the_next_alone_few(void **state) {
    DEVICES_ARE_STAND_INS();
    assert_grids(*state, NULL, 16, 32);
}

static void no_copy_gets_more_blocks_than_the_setting_says(void **state) {
    DEVICES_ARE_STAND_INS();
    assert_grids(*state, "24", 16, 24);
    assert_grids(*state, "3", 3, 3);
    assert_grids(*state, "1", 1, 1);
}

static void no_copy_gets_more_blocks_than_the_device_has_multiprocessors(void **state) {
    DEVICES_ARE_STAND_INS();
    assert_grids(*state, "1024", 16, 40);
}

int main(void) {
    static char cuda[] = "cuda", automatic[] = "auto";
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
#define BOTH(name)                                                                                           \
    {#name " (cuda)", name, NULL, NULL, cuda}, {                                                             \
#name " (auto)", name, NULL, NULL, automatic                                                         \
    }
    const struct CMUnitTest tests[] = {
        BOTH(a_number_of_blocks_that_is_not_allowed_is_named_with_those_that_are),
        BOTH(the_first_and_the_last_number_of_the_range_are_allowed),
        BOTH(a_copy_behind_another_gets_more_blocks_and_the_next_alone_few),
        {"no_copy_gets_more_blocks_than_the_setting_says (cuda)",
         no_copy_gets_more_blocks_than_the_setting_says, NULL, NULL, cuda},
        {"no_copy_gets_more_blocks_than_the_device_has_multiprocessors (cuda)",
         no_copy_gets_more_blocks_than_the_device_has_multiprocessors, NULL, NULL, cuda},
    };
    (void)setenv("FAKE_CUDA_MULTIPROCESSORS", MULTIPROCESSORS, 1);
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
