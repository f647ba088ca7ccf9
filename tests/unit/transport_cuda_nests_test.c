/*
 * Whole requests over "cuda", which moves nests (request/request.h) instead of runs: between caches of many shapes, at
 * once and in steps, pulled and pushed. All memory is compared with what the oracle of cells.h fills. Both sides are
 * endpoints of this process, over the stand-in for the driver or a real one.
 */
#include <poll.h>
#include <stdio.h>

#include "cells.h"
#include "cuda/device_image.h"
#include "devices.h"
#include "request/request.h"
#include "transport/cuda/cuda.h"
#include "transport/transfer.h"

#define TOKENS 150u
#define SOURCES_MAX 4u
#define REGIONS_MAX 8u

/* ---- ranks with caches on a device -------------------------------------------------------------- */

typedef struct test_end {
    kvf_transport *transport;
    uint32_t device, region_count;
    kvf_memory regions[REGIONS_MAX]; /* at the device's addresses */
    cell_rank cells;                 /* the same where the test sees them */
} test_end;

static void *next_region(void *context, uint64_t bytes) {
    test_end *end = context;
    void *seen;
    assert_true(end->region_count < REGIONS_MAX);
    kvf_memory *memory = &end->regions[end->region_count++];
    *memory = device_memory(end->device, bytes, &seen);
    memory->withheld = false;
    return seen;
}

static void to_device(const test_end *end) {
    for (uint32_t i = 0; i < end->region_count; i++)
        devices_put(end->cells.regions[i].address);
}

static void from_device(const test_end *end) {
    for (uint32_t i = 0; i < end->region_count; i++)
        devices_get(end->cells.regions[i].address);
}

static void end_open(test_end *end, uint32_t device, const kvf_shard *shard, const cell_sequence *sequence) {
    *end = (test_end){.device = device};
    rank_open(&end->cells, shard, sequence, next_region, end);
    to_device(end);
    assert_ok(kvf_transport_open("cuda", NULL, &end->transport));
    assert_ok(kvf_transport_register(end->transport, end->regions, end->region_count));
}

static kvf_peer *end_connect(const test_end *from, const test_end *to) {
    const void *card;
    size_t bytes;
    kvf_peer *peer = NULL;
    assert_ok(kvf_transport_export(to->transport, &card, &bytes));
    assert_ok(kvf_transport_connect(from->transport, card, bytes, &peer));
    return peer;
}

/* A reader, and the ranks that it reads from. */
typedef struct test_scene {
    pair engines;
    cell_sequence ours, theirs;
    kvf_plan *plan;
    kvf_request *request;
    uint32_t sources;
    test_end here, there[SOURCES_MAX];
    kvf_peer *peers[SOURCES_MAX]; /* of the reader */
    cell_rank wanted;             /* the reader's memory when all has arrived */
} test_scene;

static void scene_open(test_scene *scene, kvf_model *model, const kvf_engine_spec *local,
                       const kvf_engine_spec *remote) {
    *scene = (test_scene){.engines = pair_of(model, local, remote)};
    const kvf_shard *shard = kvf_engine_shard(scene->engines.local, 0);
    sequence_open(&scene->ours, shard, TOKENS, 1);
    sequence_open(&scene->theirs, kvf_engine_shard(scene->engines.remote, 0), TOKENS, 2);
    scene->plan = plan_of(&scene->engines, 0);
    scene->request = request_of(scene->plan);
    set_sequences(scene->request, &scene->ours, &scene->theirs);
    end_open(&scene->here, 1, shard, &scene->ours);
    rank_copy(&scene->wanted, &scene->here.cells);
    rank_fill(&scene->wanted, all_layers(shard), 1);
    scene->sources = kvf_plan_source_count(scene->plan);
    assert_true(scene->sources <= SOURCES_MAX);
    for (uint32_t i = 0; i < scene->sources; i++) {
        test_end *end = &scene->there[i];
        shard = kvf_engine_shard(scene->engines.remote, kvf_plan_source_rank(scene->plan, i));
        end_open(end, 0, shard, &scene->theirs);
        rank_fill(&end->cells, all_layers(shard), 1);
        to_device(end);
        scene->peers[i] = end_connect(&scene->here, end);
    }
}

static void scene_close(test_scene *scene) {
    kvf_transport_close(scene->here.transport);
    for (uint32_t i = 0; i < scene->sources; i++)
        kvf_transport_close(scene->there[i].transport);
    rank_close(&scene->here.cells);
    rank_close(&scene->wanted);
    for (uint32_t i = 0; i < scene->sources; i++)
        rank_close(&scene->there[i].cells);
    kvf_request_free(scene->request);
    kvf_plan_free(scene->plan);
    sequence_close(&scene->ours);
    sequence_close(&scene->theirs);
    free_pair(&scene->engines);
    devices_free();
}

static void step(const test_scene *scene) {
    struct pollfd fds[1 + SOURCES_MAX] = {{kvf_transport_event_fd(scene->here.transport), POLLIN, 0}};
    for (uint32_t i = 0; i < scene->sources; i++)
        fds[i + 1] = (struct pollfd){kvf_transport_event_fd(scene->there[i].transport), POLLIN, 0};
    assert_true(poll(fds, 1 + scene->sources, 60000) > 0);
    assert_ok(kvf_transport_progress(scene->here.transport, NULL));
    for (uint32_t i = 0; i < scene->sources; i++)
        assert_ok(kvf_transport_progress(scene->there[i].transport, NULL));
}

/* Moves a transfer, which it frees, to its end. */
static kvf_status finish(const test_scene *scene, kvf_transfer *transfer) {
    kvf_status status;
    while ((status = kvf_transfer_status(transfer)) == KVF_IN_PROGRESS)
        step(scene);
    kvf_transfer_free(transfer);
    return status;
}

static uint64_t bytes_of(const kvf_transfer *transfer) {
    uint64_t bytes;
    kvf_transfer_counts(transfer, &bytes, NULL);
    return bytes;
}

static void assert_all_arrived(const test_scene *scene) {
    from_device(&scene->here);
    assert_same_memory(&scene->here.cells, &scene->wanted);
}

/* ---- caches of many shapes ---------------------------------------------------------------------- */

static kvf_model *heads(void) {
    return attention(3, 4, 24);
}

static kvf_model *mla(void) {
    return latent(3);
}

static kvf_model *with_states(void) {
    return hybrid(4);
}

#define RANKS(ranks, tokens, axes)                                                                           \
    {                                                                                                        \
        .struct_size = sizeof(kvf_engine_spec), .tp_size = (ranks),                                          \
        .all = {.tokens_per_block = (tokens), .block_count = 40, .order = (axes)}, .state = {                \
            .block_count = 40,                                                                               \
            .order = "L|BTNPH"                                                                               \
        }                                                                                                    \
    }

static const struct {
    kvf_model *(*model)(void);
    kvf_engine_spec local, remote;
} caches[] = {
    {heads, RANKS(1, 16, "L|BPNH"), RANKS(1, 16, "L|BPNH")}, /* whole pages */
    {heads, RANKS(1, 16, "L|BPNH"), RANKS(2, 16, "L|BPNH")}, /* heads of a token */
    {heads, RANKS(2, 8, "L|BPNH"), RANKS(1, 16, "L|BPHN")},  /* and of a page */
    {heads, RANKS(1, 24, "L|BPHN"), RANKS(4, 16, "L|BPNH")}, /* pieces of 16 and 8 tokens */
    {heads, RANKS(2, 16, "L|BPHN"), RANKS(4, 24, "L|BPHN")},
    {heads, RANKS(1, 16, "BLPHN"), RANKS(2, 8, "L|BPNH")},  /* pages of all layers, and of one */
    {heads, RANKS(2, 8, "BNLPH"), RANKS(1, 16, "BLHNP")},   /* pages of all layers */
    {heads, RANKS(1, 16, "LBPHN"), RANKS(2, 24, "LP|BNH")}, /* one region, and one for each part */
    {mla, RANKS(1, 8, "L|BPHN"), RANKS(2, 16, "BLPHN")},
    {mla, RANKS(2, 24, "LBPHN"), RANKS(1, 16, "L|BPHN")},
    {with_states, RANKS(1, 8, "L|BPNH"), RANKS(2, 16, "L|BPHN")},
};

/* Opens a scene of caches[i]. */
static void caches_open(test_scene *scene, size_t i) {
    scene_open(scene, caches[i].model(), &caches[i].local, &caches[i].remote);
}

static void caches_of_all_shapes_are_pulled(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT_OF(caches); i++) {
        test_scene scene;
        uint64_t bytes = 0, runs = 0, moved_bytes, moved_runs;
        kvf_transfer *transfer = NULL;
        caches_open(&scene, i);
        for (uint32_t s = 0; s < scene.sources; s++) {
            assert_true(kvf_peer_takes_nests(scene.peers[s]));
            bytes += kvf_request_bytes(scene.request, s);
        }
        assert_ok(kvf_transfer_start(scene.request, KVF_READ, scene.peers, &transfer));
        while (kvf_transfer_status(transfer) == KVF_IN_PROGRESS)
            step(&scene);
        kvf_transfer_counts(transfer, &moved_bytes, &moved_runs);
        for (uint32_t s = 0; s < scene.sources; s++)
            runs += kvf_request_run_count(scene.request, s);
        assert_int_equal(moved_bytes, bytes);
        assert_true(moved_runs >= runs); /* runs of two nests are not joined */
        assert_ok(finish(&scene, transfer));
        assert_all_arrived(&scene);
        scene_close(&scene);
    }
}

/* Each source names its own memory as the local side, so it moves nests whose sides are swapped. */
static void caches_of_all_shapes_are_pushed(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT_OF(caches); i++) {
        test_scene scene;
        caches_open(&scene, i);
        for (uint32_t s = 0; s < scene.sources; s++) {
            kvf_transfer *transfer = NULL;
            kvf_peer *reader = end_connect(&scene.there[s], &scene.here);
            assert_ok(kvf_transfer_push(scene.request, s, reader, &transfer));
            assert_ok(finish(&scene, transfer));
        }
        assert_all_arrived(&scene);
        scene_close(&scene);
    }
}

/* ---- in steps ----------------------------------------------------------------------------------- */

#define STEP_BYTES 1000u
#define PAGE_BYTES (16u * 2 * 4 * 48) /* of a layer: no nest of heads() is longer */

/* Lets a held transfer move `most` bytes in steps of STEP_BYTES; the last nest of a step is whole. */
static void advance(const test_scene *scene, kvf_transfer *transfer, uint64_t most) {
    uint64_t bytes = bytes_of(transfer);
    for (const uint64_t end = bytes + most; bytes < end;) {
        const uint64_t now = kvf_transfer_advance(transfer, STEP_BYTES);
        if (now == 0)
            return;
        assert_true(now < STEP_BYTES + PAGE_BYTES);
        bytes += now;
        while (bytes_of(transfer) < bytes)
            step(scene);
        assert_int_equal(bytes_of(transfer), bytes);
    }
}

static void a_held_transfer_moves_nest_by_nest(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT_OF(caches); i++) {
        test_scene scene;
        kvf_transfer *transfer = NULL;
        caches_open(&scene, i);
        assert_ok(kvf_transfer_start_held(scene.request, KVF_READ, scene.peers,
                                          (kvf_transfer_start_options){.held = true}, &transfer));
        advance(&scene, transfer, UINT64_MAX / 2);
        assert_ok(kvf_transfer_status(transfer));
        assert_ok(finish(&scene, transfer));
        assert_all_arrived(&scene);
        scene_close(&scene);
    }
}

/* Opens a scene, and moves a part of a held transfer. */
static kvf_transfer *half_moved(test_scene *scene) {
    kvf_transfer *transfer = NULL;
    caches_open(scene, 3);
    assert_ok(kvf_transfer_start_held(scene->request, KVF_READ, scene->peers,
                                      (kvf_transfer_start_options){.held = true}, &transfer));
    advance(scene, transfer, 20 * STEP_BYTES);
    return transfer;
}

static void a_transfer_that_is_held_and_released_goes_on_where_it_was(void **state) {
    (void)state;
    test_scene scene;
    kvf_transfer *transfer = half_moved(&scene);
    assert_int_equal(kvf_transfer_status(transfer), KVF_IN_PROGRESS);
    kvf_transfer_hold(transfer, false);
    assert_ok(finish(&scene, transfer));
    assert_all_arrived(&scene);
    scene_close(&scene);
}

static void a_transfer_that_is_cancelled_in_the_middle_can_be_made_again(void **state) {
    (void)state;
    test_scene scene;
    kvf_transfer *transfer = half_moved(&scene);
    assert_true(kvf_transfer_advance(transfer, 20 * STEP_BYTES) > 0); /* this is under way */
    kvf_transfer_cancel(transfer);
    assert_int_equal(finish(&scene, transfer), KVF_E_CANCELLED);
    assert_ok(kvf_transfer_start(scene.request, KVF_READ, scene.peers, &transfer));
    assert_ok(finish(&scene, transfer));
    assert_all_arrived(&scene);
    scene_close(&scene);
}

/* ---- single nests ------------------------------------------------------------------------------- */

/* Two endpoints with one region each. */
typedef struct test_regions {
    test_scene scene; /* only its ends and its peer are used */
    unsigned char *ours, *theirs;
} test_regions;

static unsigned char *region_open(test_end *end, uint32_t device, uint64_t bytes) {
    *end = (test_end){.device = device};
    unsigned char *seen = next_region(end, bytes);
    assert_ok(kvf_transport_open("cuda", NULL, &end->transport));
    assert_ok(kvf_transport_register(end->transport, end->regions, 1));
    return seen;
}

static void regions_open(test_regions *regions, uint64_t ours, uint64_t theirs) {
    *regions = (test_regions){.scene = {.sources = 1}};
    regions->ours = region_open(&regions->scene.here, 1, ours);
    regions->theirs = region_open(&regions->scene.there[0], 0, theirs);
    regions->scene.peers[0] = end_connect(&regions->scene.here, &regions->scene.there[0]);
}

static void regions_close(const test_regions *regions) {
    kvf_transport_close(regions->scene.here.transport);
    kvf_transport_close(regions->scene.there[0].transport);
    devices_free();
}

static void note(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation, (void)detail;
    *(kvf_status *)context = status;
}

static kvf_status submit(const test_regions *regions, kvf_run nest, const kvf_run_shape *shape) {
    kvf_status status = KVF_IN_PROGRESS, submitted;
    submitted =
        kvf_transport_submit_nests(regions->scene.peers[0], KVF_READ, &nest, 1, shape, note, &status, NULL);
    if (submitted)
        return submitted;
    while (status == KVF_IN_PROGRESS)
        step(&regions->scene);
    return status;
}

static void a_nest_that_leaves_a_region_is_refused_and_one_that_fits_is_read(void **state) {
    (void)state;
    enum { OURS = 1000, THEIRS = 3000 };
    /* 2 times 3 runs of 10 bytes: 300 + 2 * 20 + 10 bytes here, 1000 + 2 * 50 + 10 there. */
    const kvf_run_shape shape = {10, 2, 300, 1000, 3, 20, 50};
    kvf_run_shape wrong = shape;
    kvf_run nest = {.bytes = 60, .local_offset = OURS - 350, .remote_offset = THEIRS - 1110};
    unsigned char expected[OURS] = {0};
    test_regions regions;
    regions_open(&regions, OURS, THEIRS);
    for (uint32_t i = 0; i < THEIRS; i++)
        regions.theirs[i] = (unsigned char)(i * 2654435761u >> 13 | 1);
    devices_put(regions.theirs);
    for (uint32_t i = 0; i < 6; i++)
        memcpy(expected + nest.local_offset + i / 3 * 300 + i % 3 * 20,
               regions.theirs + nest.remote_offset + i / 3 * 1000 + i % 3 * 50, 10);

    nest.local_offset++;
    assert_fails(submit(&regions, nest, &shape), KVF_E_RANGE, "60 bytes at offset 651 of local region 0");
    nest.local_offset--;
    nest.remote_offset++;
    assert_fails(submit(&regions, nest, &shape), KVF_E_RANGE, "60 bytes at offset 1891 of remote region 0");
    nest.remote_offset--;
    wrong.inner_count = 0;
    assert_fails(submit(&regions, nest, &wrong), KVF_E_INVALID, "a nest whose numbers are 0 or too large");
    assert_ok(submit(&regions, nest, &shape));

    devices_get(regions.ours);
    assert_memory_equal(regions.ours, expected, OURS);
    regions_close(&regions);
}

/* A copy has no more than CUDA_COPY_BYTES; but a nest is never cut. */
static void a_nest_longer_than_a_copy_is_one_copy(void **state) {
    (void)state;
    enum { RUN = 4096, OUTER = 33, INNER = 512 };
    const uint64_t bytes = (uint64_t)RUN * OUTER * INNER;
    /* Here by the outer loop, there by the inner one. */
    const kvf_run_shape shape = {RUN, OUTER, INNER * RUN, RUN, INNER, RUN, OUTER * RUN};
    test_regions regions;
    assert_true(bytes > CUDA_COPY_BYTES);
    regions_open(&regions, bytes, bytes);
    for (uint64_t i = 0; i < bytes; i += sizeof i)
        memcpy(regions.theirs + i, &i, sizeof i);
    devices_put(regions.theirs);
    assert_ok(submit(&regions, (kvf_run){.bytes = bytes}, &shape));
    devices_get(regions.ours);
    for (uint64_t outer = 0; outer < OUTER; outer++)
        for (uint64_t inner = 0; inner < INNER; inner++)
            assert_memory_equal(regions.ours + (outer * INNER + inner) * RUN,
                                regions.theirs + (inner * OUTER + outer) * RUN, RUN);
    regions_close(&regions);
}

int main(void) {
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(caches_of_all_shapes_are_pulled),
        cmocka_unit_test(caches_of_all_shapes_are_pushed),
        cmocka_unit_test(a_held_transfer_moves_nest_by_nest),
        cmocka_unit_test(a_transfer_that_is_held_and_released_goes_on_where_it_was),
        cmocka_unit_test(a_transfer_that_is_cancelled_in_the_middle_can_be_made_again),
        cmocka_unit_test(a_nest_that_leaves_a_region_is_refused_and_one_that_fits_is_read),
        cmocka_unit_test(a_nest_longer_than_a_copy_is_one_copy),
    };
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
