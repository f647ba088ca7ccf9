/* Whole requests over real plans: two remote ranks and a local one, with different block sizes and orders. */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include <kvferry/transport.h>

#include "base/base.h"
#include "transport/transfer.h"

#define TOKENS 2048u
#define HEADS 4u
#define LAYERS 2u
#define SOURCES 2u
#define LOCAL_BLOCK 8u
#define REMOTE_BLOCK 48u

/* Counts allocations. */
static uint64_t allocations;

static void *count_allocate(void *context, size_t bytes) {
    (void)context;
    allocations++;
    return malloc(bytes);
}

static void *count_resize(void *context, void *memory, size_t bytes) {
    (void)context;
    allocations++;
    return realloc(memory, bytes);
}

static void count_release(void *context, void *memory) {
    (void)context;
    free(memory);
}

/* One rank, with its shard's regions registered. */
typedef struct test_rank {
    const kvf_shard *shard;
    kvf_transport *transport;
    kvf_memory *regions;
} test_rank;

typedef struct test_world {
    kvf_model *model;
    kvf_engine *local, *remote;
    kvf_plan *plan;
    kvf_request *request;
    test_rank here, there[SOURCES];
    kvf_peer *peers[SOURCES];
} test_world;

static unsigned char cell_byte(uint32_t seed, uint32_t layer, uint32_t part, uint64_t token, uint32_t head,
                               uint64_t byte) {
    uint64_t mixed = ((((uint64_t)seed * 31 + layer) * 31 + part) * 8191 + token) * 31 + head;
    return (unsigned char)((mixed * 0x9e3779b97f4a7c15u + byte * 77) >> 32);
}

/* The blocks of a sequence are in reverse order, so that no two of them are adjacent. */
static uint64_t block_of(uint64_t token, uint32_t tokens_per_block) {
    return (TOKENS + tokens_per_block - 1) / tokens_per_block - 1 - token / tokens_per_block;
}

/* Writes every cell that a rank holds, or checks it. */
static void each_cell(const test_rank *rank, uint32_t block, uint32_t seed, bool check) {
    kvf_range heads = kvf_shard_get(rank->shard)->groups[0].parts[0].units;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t part = 0; part < 2; part++)
            for (uint64_t token = 0; token < TOKENS; token++)
                for (uint32_t head = heads.begin; head < heads.end; head++) {
                    kvf_cell_location at = {.struct_size = sizeof at};
                    assert_int_equal(kvf_shard_locate(rank->shard, 0, layer, part, block_of(token, block),
                                                      (uint32_t)(token % block), head, &at),
                                     KVF_OK);
                    unsigned char *cell = (unsigned char *)rank->regions[at.region].address + at.offset;
                    for (uint64_t byte = 0; byte < at.bytes; byte++)
                        if (!check)
                            cell[byte] = cell_byte(seed, layer, part, token, head, byte);
                        else if (cell[byte] != cell_byte(seed, layer, part, token, head, byte))
                            fail_msg("layer %u part %u token %llu head %u byte %llu", layer, part,
                                     (unsigned long long)token, head, (unsigned long long)byte);
                }
}

static void rank_open(test_rank *rank, const kvf_shard *shard, const char *kind) {
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    rank->shard = shard;
    rank->regions = calloc(desc->region_count, sizeof *rank->regions);
    assert_non_null(rank->regions);
    assert_int_equal(kvf_transport_open(kind, NULL, &rank->transport), KVF_OK);
    for (uint32_t i = 0; i < desc->region_count; i++) {
        rank->regions[i] =
            (kvf_memory){.struct_size = sizeof(kvf_memory), .address = NULL, .bytes = desc->region_bytes[i]};
        assert_int_equal(kvf_transport_allocate(rank->transport, KVF_MEMORY_HOST, 0, desc->region_bytes[i],
                                                &rank->regions[i].address),
                         KVF_OK);
    }
    assert_int_equal(kvf_transport_register(rank->transport, rank->regions, desc->region_count), KVF_OK);
}

static void rank_close(test_rank *rank) {
    kvf_transport_close(rank->transport);
    free(rank->regions);
    rank->transport = NULL;
    rank->regions = NULL;
}

static kvf_peer *rank_connect(test_rank *from, test_rank *to) {
    const void *card;
    size_t bytes;
    kvf_peer *peer = NULL;
    assert_int_equal(kvf_transport_export(to->transport, &card, &bytes), KVF_OK);
    assert_int_equal(kvf_transport_connect(from->transport, card, bytes, &peer), KVF_OK);
    return peer;
}

static void make_engines(test_world *world) {
    const uint32_t layers[LAYERS] = {0, 1};
    const kvf_part_desc parts[2] = {
        {.name = "k", .dtype = KVF_DTYPE_F16, .units = HEADS, .cell_elements = 64},
        {.name = "v", .dtype = KVF_DTYPE_F16, .units = HEADS, .cell_elements = 64}};
    const kvf_group_desc group = {
        .name = "full", .layers = layers, .layer_count = LAYERS, .parts = parts, .part_count = 2};
    const kvf_model_desc model = {
        .struct_size = sizeof model, .layer_count = LAYERS, .groups = &group, .group_count = 1};
    assert_int_equal(kvf_model_create(&model, &world->model), KVF_OK);
    kvf_engine_spec spec = {.struct_size = sizeof spec,
                            .tp_size = 1,
                            .all = {.tokens_per_block = LOCAL_BLOCK,
                                    .block_count = (TOKENS + LOCAL_BLOCK - 1) / LOCAL_BLOCK,
                                    .order = "L|BPHN"}};
    assert_int_equal(kvf_engine_build(world->model, &spec, &world->local), KVF_OK);
    spec.tp_size = SOURCES;
    spec.all = (kvf_group_spec){.tokens_per_block = REMOTE_BLOCK,
                                .block_count = (TOKENS + REMOTE_BLOCK - 1) / REMOTE_BLOCK,
                                .order = "LP|BNH"};
    assert_int_equal(kvf_engine_build(world->model, &spec, &world->remote), KVF_OK);
    assert_int_equal(kvf_plan_build(kvf_engine_shard(world->local, 0), world->remote, NULL, &world->plan),
                     KVF_OK);
    assert_int_equal(kvf_plan_source_count(world->plan), SOURCES);
    assert_int_equal(kvf_request_create(world->plan, &world->request), KVF_OK);
}

static void set_request(test_world *world, uint64_t tokens) {
    static uint32_t local[TOKENS / LOCAL_BLOCK + 1], remote[TOKENS / REMOTE_BLOCK + 1];
    uint32_t local_count = (TOKENS + LOCAL_BLOCK - 1) / LOCAL_BLOCK;
    uint32_t remote_count = (TOKENS + REMOTE_BLOCK - 1) / REMOTE_BLOCK;
    for (uint32_t i = 0; i < local_count; i++)
        local[i] = local_count - 1 - i;
    for (uint32_t i = 0; i < remote_count; i++)
        remote[i] = remote_count - 1 - i;
    kvf_group_request group = {{local, local_count, 0}, {remote, remote_count, 0}, 0, tokens};
    assert_int_equal(kvf_request_set(world->request, &group, 1), KVF_OK);
}

static test_world *world_open(const char *kind) {
    test_world *world = calloc(1, sizeof *world);
    assert_non_null(world);
    make_engines(world);
    rank_open(&world->here, kvf_engine_shard(world->local, 0), kind);
    for (uint32_t i = 0; i < SOURCES; i++) {
        rank_open(&world->there[i], kvf_engine_shard(world->remote, kvf_plan_source_rank(world->plan, i)),
                  kind);
        world->peers[i] = rank_connect(&world->here, &world->there[i]);
        each_cell(&world->there[i], REMOTE_BLOCK, 1, false);
    }
    set_request(world, TOKENS);
    return world;
}

static void world_close(test_world *world) {
    rank_close(&world->here);
    for (uint32_t i = 0; i < SOURCES; i++)
        rank_close(&world->there[i]);
    kvf_request_free(world->request);
    kvf_plan_free(world->plan);
    kvf_engine_free(world->local);
    kvf_engine_free(world->remote);
    kvf_model_free(world->model);
    free(world);
}

static void step(const test_world *world) {
    struct pollfd fds[1 + SOURCES] = {{kvf_transport_event_fd(world->here.transport), POLLIN, 0}};
    for (uint32_t i = 0; i < SOURCES; i++)
        fds[i + 1] = (struct pollfd){kvf_transport_event_fd(world->there[i].transport), POLLIN, 0};
    assert_true(poll(fds, 1 + SOURCES, 60000) > 0);
    if (fds[0].revents)
        assert_int_equal(kvf_transport_progress(world->here.transport, NULL), KVF_OK);
    for (uint32_t i = 0; i < SOURCES; i++)
        if (fds[i + 1].revents)
            assert_int_equal(kvf_transport_progress(world->there[i].transport, NULL), KVF_OK);
}

static kvf_status finish(const test_world *world, const kvf_transfer *transfer) {
    kvf_status status;
    while ((status = kvf_transfer_status(transfer)) == KVF_IN_PROGRESS)
        step(world);
    return status;
}

static kvf_transfer *start(const test_world *world, kvf_direction direction) {
    kvf_transfer *transfer = NULL;
    assert_int_equal(kvf_transfer_start(world->request, direction, world->peers, &transfer), KVF_OK);
    return transfer;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void a_read_brings_every_cell_from_its_ranks(void **state) {
    test_world *world = world_open(*state);
    kvf_transfer *transfer = start(world, KVF_READ);
    assert_int_equal(kvf_transfer_status(transfer), KVF_IN_PROGRESS);
    assert_int_equal(finish(world, transfer), KVF_OK);
    each_cell(&world->here, LOCAL_BLOCK, 1, true);
    uint64_t bytes, runs, wanted = 0;
    for (uint32_t i = 0; i < SOURCES; i++)
        wanted += kvf_request_run_count(world->request, i);
    kvf_transfer_counts(transfer, &bytes, &runs);
    assert_int_equal(bytes, (uint64_t)TOKENS * LAYERS * 2 * HEADS * 128);
    assert_int_equal(runs, wanted);
    assert_true(runs > 20000); /* many batches */
    kvf_transfer_free(transfer);
    world_close(world);
}

static void a_write_takes_every_cell_to_its_ranks(void **state) {
    test_world *world = world_open(*state);
    each_cell(&world->here, LOCAL_BLOCK, 9, false);
    kvf_transfer *transfer = start(world, KVF_WRITE);
    assert_int_equal(finish(world, transfer), KVF_OK);
    for (uint32_t i = 0; i < SOURCES; i++)
        each_cell(&world->there[i], REMOTE_BLOCK, 9, true);
    kvf_transfer_free(transfer);
    world_close(world);
}

static void a_transfer_of_nothing_is_complete_at_once(void **state) {
    test_world *world = world_open(*state);
    set_request(world, 0);
    kvf_transfer *transfer = start(world, KVF_READ);
    assert_int_equal(kvf_transfer_status(transfer), KVF_OK);
    kvf_transfer_cancel(transfer);
    assert_int_equal(kvf_transfer_status(transfer), KVF_OK);
    kvf_transfer_free(transfer);
    world_close(world);
}

static void several_transfers_move_at_once(void **state) {
    test_world *world = world_open(*state);
    kvf_transfer *transfers[4];
    for (int i = 0; i < 4; i++)
        transfers[i] = start(world, KVF_READ);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(finish(world, transfers[i]), KVF_OK);
        kvf_transfer_free(transfers[i]);
    }
    each_cell(&world->here, LOCAL_BLOCK, 1, true);
    world_close(world);
}

static void a_cancelled_transfer_ends_as_cancelled(void **state) {
    for (int steps = 0; steps < 4; steps++) {
        test_world *world = world_open(*state);
        kvf_transfer *transfer = start(world, KVF_READ);
        for (int i = 0; i < steps; i++)
            step(world);
        assert_string_equal(kvf_transfer_detail(transfer), "");
        kvf_transfer_cancel(transfer);
        assert_int_equal(finish(world, transfer), KVF_E_CANCELLED);
        assert_string_equal(kvf_transfer_detail(transfer), "the transfer was cancelled by its owner");
        kvf_transfer_cancel(transfer);
        kvf_transfer_free(transfer);
        world_close(world);
    }
}

static void a_moving_transfer_can_be_freed(void **state) {
    test_world *world = world_open(*state);
    kvf_transfer *transfer = start(world, KVF_READ);
    step(world);
    kvf_transfer_free(transfer);
    kvf_transfer *next = start(world, KVF_READ);
    assert_int_equal(finish(world, next), KVF_OK);
    each_cell(&world->here, LOCAL_BLOCK, 1, true);
    kvf_transfer_free(next);
    kvf_transfer_free(start(world, KVF_READ)); /* closing the transport ends this transfer */
    world_close(world);
}

static void a_transfer_outlives_its_transport(void **state) {
    test_world *world = world_open(*state);
    kvf_transfer *transfer = start(world, KVF_READ);
    kvf_transport_close(world->here.transport);
    world->here.transport = NULL;
    assert_int_equal(kvf_transfer_status(transfer), KVF_E_CANCELLED);
    kvf_transfer_cancel(transfer);
    kvf_transfer_free(transfer);
    world_close(world);
}

/* A held transfer may have no operation under way that would end with the connection; in an old version it went on with
 * a freed connection. */
static void a_held_transfer_ends_with_a_connection_it_still_needs(void **state) {
    test_world *world = world_open(*state);
    kvf_transfer *transfer = NULL;
    assert_int_equal(kvf_transfer_read_source(world->request, 1, world->peers[1],
                                              (kvf_transfer_start_options){.held = true}, &transfer),
                     KVF_OK);
    assert_int_equal(kvf_transfer_advance(transfer, 4096), 4096);
    uint64_t bytes = 0;
    while (bytes < 4096) {
        step(world);
        kvf_transfer_counts(transfer, &bytes, NULL);
    }
    assert_int_equal(kvf_transfer_status(transfer), KVF_IN_PROGRESS);
    kvf_peer_close(world->peers[1]);
    assert_int_equal(kvf_transfer_status(transfer), KVF_E_CANCELLED);
    assert_string_equal(kvf_transfer_detail(transfer), "the connection was closed");
    assert_int_equal(kvf_transfer_advance(transfer, 4096), 0);
    kvf_transfer_hold(transfer, false);
    kvf_transfer_counts(transfer, &bytes, NULL);
    assert_int_equal(bytes, 4096);
    kvf_transfer_free(transfer);
    world_close(world);
}

static void a_complete_transfer_needs_no_connection_any_more(void **state) {
    test_world *world = world_open(*state);
    kvf_transfer *transfer = start(world, KVF_READ);
    assert_int_equal(finish(world, transfer), KVF_OK);
    for (uint32_t i = 0; i < SOURCES; i++)
        kvf_peer_close(world->peers[i]);
    assert_int_equal(kvf_transfer_status(transfer), KVF_OK);
    kvf_transfer_free(transfer);
    world_close(world);
}

static void the_loss_of_one_source_fails_the_transfer_once_all_is_quiet(void **state) {
    test_world *world = world_open(*state);
    kvf_transfer *transfer = start(world, KVF_READ);
    kvf_transport_close(world->there[1].transport);
    world->there[1].transport = NULL;
    kvf_status status;
    while ((status = kvf_transfer_status(transfer)) == KVF_IN_PROGRESS) {
        assert_int_equal(kvf_transport_progress(world->here.transport, NULL), KVF_OK);
        assert_int_equal(kvf_transport_progress(world->there[0].transport, NULL), KVF_OK);
    }
    assert_int_equal(status, KVF_E_PEER_LOST);
    /* The transfer keeps its own sentence, whatever else has failed meanwhile. */
    assert_int_equal(kvf_transport_cancel(world->here.transport, 999999), KVF_E_NOT_FOUND);
    assert_non_null(strstr(kvf_transfer_detail(transfer), "reading from "));
    assert_non_null(strstr(kvf_transfer_detail(transfer), "closed"));
    assert_int_equal(kvf_transfer_status(transfer), KVF_E_PEER_LOST);
    assert_string_equal(kvf_error_detail(), kvf_transfer_detail(transfer));
    kvf_transfer *again = NULL;
    assert_int_equal(kvf_transfer_start(world->request, KVF_READ, world->peers, &again), KVF_E_PEER_LOST);
    assert_null(again);
    kvf_transfer_free(transfer);
    world_close(world);
}

static void a_peer_with_less_memory_than_the_plan_says_is_refused(void **state) {
    test_world *world = world_open(*state);
    kvf_peer *right = world->peers[1];
    static unsigned char small[100];
    kvf_memory region = {.struct_size = sizeof(kvf_memory), .address = small, .bytes = sizeof small};
    test_rank liar = {0};
    assert_int_equal(kvf_transport_open(*state, NULL, &liar.transport), KVF_OK);
    assert_int_equal(kvf_transport_register(liar.transport, &region, 1), KVF_OK);
    world->peers[1] = rank_connect(&world->here, &liar);
    kvf_transfer *transfer = start(world, KVF_READ); /* the transfer from the first source is under way */
    assert_int_equal(
        finish(world, transfer) == KVF_E_RANGE || kvf_transfer_status(transfer) == KVF_E_NOT_REGISTERED, 1);
    kvf_transfer_free(transfer);
    kvf_peer *both[SOURCES] = {world->peers[1], world->peers[1]};
    assert_int_not_equal(kvf_transfer_start(world->request, KVF_READ, both, &transfer), KVF_OK);
    kvf_peer_close(world->peers[1]);
    kvf_transport_close(liar.transport);
    world->peers[1] = right;
    transfer = start(world, KVF_READ);
    assert_int_equal(finish(world, transfer), KVF_OK);
    kvf_transfer_free(transfer);
    world_close(world);
}

static void missing_peers_and_peers_of_two_transports_are_refused(void **state) {
    test_world *world = world_open(*state);
    kvf_transfer *transfer = NULL;
    kvf_peer *peers[SOURCES] = {world->peers[0], NULL};
    assert_int_equal(kvf_transfer_start(world->request, KVF_READ, peers, &transfer), KVF_E_INVALID);
    peers[1] = rank_connect(&world->there[0], &world->there[1]);
    assert_int_equal(kvf_transfer_start(world->request, KVF_READ, peers, &transfer), KVF_E_INVALID);
    assert_int_equal(kvf_transfer_start(world->request, KVF_READ, NULL, &transfer), KVF_E_INVALID);
    assert_int_equal(kvf_transfer_start(NULL, KVF_READ, world->peers, &transfer), KVF_E_INVALID);
    assert_int_equal(kvf_transfer_start(world->request, (kvf_direction)5, world->peers, &transfer),
                     KVF_E_INVALID);
    assert_int_equal(kvf_transfer_status(NULL), KVF_E_INVALID);
    kvf_transfer_cancel(NULL);
    kvf_transfer_free(NULL);
    assert_null(transfer);
    world_close(world);
}

static void nothing_is_allocated_once_a_transfer_has_started(void **state) {
    test_world *world = world_open(*state);
    kvf_transfer *transfer = start(world, KVF_READ);
    assert_int_equal(finish(world, transfer), KVF_OK);
    kvf_transfer_free(transfer);
    transfer = start(world, KVF_READ);
    uint64_t before = allocations;
    assert_int_equal(finish(world, transfer), KVF_OK);
    assert_int_equal(allocations, before);
    kvf_transfer_free(transfer);
    world_close(world);
}

int main(void) {
    kvf_allocator counting = {count_allocate, count_resize, count_release, NULL};
    if (kvf_set_allocator(&counting) != KVF_OK)
        return 1;
#define BOTH(test)                                                                                           \
    {#test " (inproc)", test, NULL, NULL, (void *)"inproc"}, {                                               \
#test " (shm)", test, NULL, NULL, (void *)"shm"                                                      \
    }
    const struct CMUnitTest tests[] = {
        BOTH(a_read_brings_every_cell_from_its_ranks),
        BOTH(a_write_takes_every_cell_to_its_ranks),
        BOTH(a_transfer_of_nothing_is_complete_at_once),
        BOTH(several_transfers_move_at_once),
        BOTH(a_cancelled_transfer_ends_as_cancelled),
        BOTH(a_moving_transfer_can_be_freed),
        BOTH(a_transfer_outlives_its_transport),
        BOTH(a_held_transfer_ends_with_a_connection_it_still_needs),
        BOTH(a_complete_transfer_needs_no_connection_any_more),
        BOTH(the_loss_of_one_source_fails_the_transfer_once_all_is_quiet),
        BOTH(a_peer_with_less_memory_than_the_plan_says_is_refused),
        BOTH(missing_peers_and_peers_of_two_transports_are_refused),
        BOTH(nothing_is_allocated_once_a_transfer_has_started),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
