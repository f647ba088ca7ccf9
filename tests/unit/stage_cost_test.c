/*
 * The costs of the two ways, slots, and what a stage refuses.
 */
#include <math.h>
#include <time.h>

#include "channel_wise.h"
#include "stage_world.h"

#include "stage/cost.h"

#define SLOT 4096u

/* ---- costs ----------------------------------------------------------------------------------- */

static void a_prediction_is_source_runs_and_bytes(void **state) {
    (void)state;
    const kvf_prices cost = {.per_source = 1000, .per_run = 10, .per_byte = 0.5};
    assert_float_equal(kvf_cost_predict(&cost, 100, 4000), 1000 + 1000 + 2000, 1e-9);
}

/* Prices move towards what transfers really take, whatever was assumed at first. */
static void costs_are_learned_from_short_runs_and_long_ones(void **state) {
    (void)state;
    const double real_run = 8000, real_byte = 1.4;
    kvf_prices cost = {.per_source = 20000, .per_run = 600, .per_byte = 0.1};
    for (int i = 0; i < 60; i++) {
        kvf_cost_learn(&cost, 65536, 65536 * 256, 65536 * real_run + 65536 * 256 * real_byte);
        kvf_cost_learn(&cost, 64, 64 << 20, 64 * real_run + (64 << 20) * real_byte);
    }
    assert_true(cost.per_run > 0.9 * real_run && cost.per_run < 1.1 * real_run);
    assert_true(cost.per_byte > 0.9 * real_byte && cost.per_byte < 1.1 * real_byte);
}

static void one_transfer_that_was_disturbed_moves_little(void **state) {
    (void)state;
    kvf_prices cost = {.per_run = 100, .per_byte = 1};
    const double before = kvf_cost_predict(&cost, 1000, 100000);
    kvf_cost_learn(&cost, 1000, 100000, before * 1e6); /* as if the process had been stopped */
    assert_true(kvf_cost_predict(&cost, 1000, 100000) <= before * 2.1);
    kvf_cost_learn(&cost, 0, 0, 5);
    kvf_cost_learn(&cost, 1000, 100000, 0);
    assert_true(kvf_cost_predict(&cost, 1000, 100000) > 0);
}

/* On this fabric short runs cost much more than long ones, and small transfers more than their bytes: no set of prices
 * fits all transfers, but each kind is predicted well after a few of its transfers, whatever comes between. */
static void transfers_are_predicted_from_those_like_them(void **state) {
    (void)state;
    static const struct {
        uint64_t runs, bytes;
        double ns;
    } kinds[] = {{4096, 4096 * 128, 9e7}, {64, 64 << 10, 3e5}, {16, 16 << 20, 2e7}, {1 << 14, 4 << 20, 3e8}};
    kvf_peer_cost cost;
    kvf_assumed_cost assumed;
    kvf_cost_assume(&assumed, "ucx", 1 << 20, 0);
    kvf_peer_cost_begin(&cost, &assumed);
    for (int i = 0; i < 10; i++)
        for (size_t k = 0; k < COUNT_OF(kinds); k++)
            kvf_way_cost_learn(&cost.direct, kinds[k].runs, kinds[k].bytes, kinds[k].ns);
    for (size_t k = 0; k < COUNT_OF(kinds); k++) {
        const double expected = kvf_way_cost_predict(&cost.direct, kinds[k].runs, kinds[k].bytes);
        assert_true(expected > 0.9 * kinds[k].ns && expected < 1.1 * kinds[k].ns);
    }
    assert_int_equal(cost.direct.transfers, 40);
    assert_int_equal(cost.packed[KVF_MEMORY_HOST].transfers, 0);
    /* A disturbed transfer changes the prediction of its own kind by a bounded amount, and that of others not at
     * all. */
    kvf_way_cost_learn(&cost.direct, kinds[0].runs, kinds[0].bytes, 1e15);
    const double after = kvf_way_cost_predict(&cost.direct, kinds[0].runs, kinds[0].bytes);
    assert_true(after > kinds[0].ns && after < 2.2 * kinds[0].ns);
    const double other = kvf_way_cost_predict(&cost.direct, kinds[2].runs, kinds[2].bytes);
    assert_true(other > 0.9 * kinds[2].ns && other < 1.1 * kinds[2].ns);
}

/* Runs are cheap on one host and expensive between machines: there, runs of 256 B go packed. */
static void the_kind_of_transport_decides_the_way(void **state) {
    (void)state;
    const kvf_engine_spec d = {.struct_size = sizeof d,
                               .tp_size = 1,
                               .all = {.tokens_per_block = 16, .block_count = 64, .order = "L|BPNH"}};
    const kvf_engine_spec p = {.struct_size = sizeof p,
                               .tp_size = 1,
                               .all = {.tokens_per_block = 16, .block_count = 64, .order = "L|BPHN"}};
    const pair engines = pair_of(attention(2, 8, 128), &d, &p);
    kvf_plan *plan = plan_of(&engines, 0);
    kvf_way_prediction found = {.struct_size = sizeof found};
    assert_ok(kvf_way_predict(plan, 0, 1000, "inproc", &found));
    assert_int_equal(found.way, KVF_WAY_DIRECT);
    /* One run per head and token, except that the last run of K and the first of V are adjacent in both orders, in all
     * 62 whole blocks. */
    assert_int_equal(found.runs, 2 * 2 * 8 * 1000 - 2 * 62);
    assert_int_equal(found.bytes, 2 * 2 * 8 * 1000 * 256);
    assert_int_equal(found.pieces, 2 * 2 * 63); /* NHD: all K of a block is contiguous */
    if (strcmp(kvf_cost_assumed("ucx", &(kvf_cost_model){0}), "ucx") == 0) {
        assert_ok(kvf_way_predict(plan, 0, 1000, "ucx", &found));
        assert_int_equal(found.way, KVF_WAY_PACKED);
        assert_true(found.packed_ns < found.direct_ns);
    }
    assert_fails(kvf_way_predict(plan, 1, 1000, "inproc", &found), KVF_E_RANGE, "source");
    assert_fails(kvf_way_predict(NULL, 0, 1000, "inproc", &found), KVF_E_INVALID, "plan is NULL");
    kvf_plan_free(plan);
    free_pair(&engines);
}

/* 1000 tokens are 250 entries of 4, in 16 blocks here, and 31 of 32, in 16 blocks too; and 24 tokens of a window. */
static void entries_are_counted_by_the_tokens_they_stand_for(void **state) {
    (void)state;
    const kvf_engine_spec spec = {.struct_size = sizeof spec,
                                  .all = {.tokens_per_block = 64, .block_count = 64, .order = "L|BPNH"}};
    const kvf_engine_spec other = {.struct_size = sizeof other,
                                   .all = {.tokens_per_block = 128, .block_count = 64, .order = "L|BPNH"}};
    const pair engines = pair_of(compressed(), &spec, &other);
    kvf_plan *plan = plan_of(&engines, 0);
    kvf_way_prediction found = {.struct_size = sizeof found};
    kvf_prediction direct = {.struct_size = sizeof direct};
    assert_ok(kvf_way_predict(plan, 0, 1000, "inproc", &found));
    assert_ok(kvf_plan_predict(plan, 0, 1000, NULL, &direct));
    const uint64_t bytes = 24 * 3 * 8 + 250 * 2 * (8 + 4) + 31 * 8;
    assert_int_equal(found.bytes, bytes);
    assert_int_equal(direct.bytes, bytes);
    assert_int_equal(found.pieces, 3 + 2 * 2 * 16 + 16);
    kvf_plan_free(plan);
    free_pair(&engines);
}

/* If the two sides cut their keys differently, each run is one element, and the packed way transposes them; if both
 * keep their cells in the same way, lists of runs leave nothing to pack. */
static void keys_that_are_cut_unlike_go_packed_by_lists_of_runs_too(void **state) {
    (void)state;
    kvf_model *model = attention(LAYERS, HEADS, CHANNELS);
    kvf_engine *whole = channel_wise(model, 1, 8, 1, "whole");
    kvf_engine *cut = channel_wise(model, 1, 8, CHANNELS, "cut");
    kvf_engine *holders[] = {whole, cut};
    for (int unlike = 0; unlike < 2; unlike++) {
        kvf_plan *plan = NULL;
        kvf_way_prediction found = {.struct_size = sizeof found};
        assert_ok(kvf_plan_build(kvf_engine_shard(whole, 0), holders[unlike], NULL, &plan));
        assert_ok(kvf_way_predict(plan, 0, 300, "messages", &found));
        assert_int_equal(found.way, unlike ? KVF_WAY_PACKED : KVF_WAY_DIRECT);
        assert_true(!unlike || found.packed_ns < found.direct_ns);
        kvf_plan_free(plan);
    }
    kvf_engine_free(whole);
    kvf_engine_free(cut);
    kvf_model_free(model);
}

/* Memory of this host that cannot be mapped, and UCX that emulates RMA, are kinds with prices of their own. */
static void memory_of_another_sort_has_prices_of_its_own(void **state) {
    (void)state;
    kvf_cost_model mapped, brought;
    kvf_assumed_cost ways;
    assert_string_equal(kvf_cost_assumed("shm", &mapped), "shm");
    assert_string_equal(kvf_cost_assumed("shm/brought", &brought), "shm/brought");
    assert_true(brought.ns_per_run > mapped.ns_per_run);
    assert_true(kvf_cost_has_lists("shm") && !kvf_cost_has_lists("shm/brought"));
    assert_string_equal(kvf_cost_assumed("shm/nothing", &brought), "shm");
    kvf_cost_assume(&ways, "shm/brought", 1 << 20, 0);
    assert_true(ways.packed[KVF_MEMORY_HOST].ns_per_run < ways.direct.ns_per_run);
    if (kvf_transport_kind_name(2)) {
        kvf_cost_model emulated, cards;
        assert_string_equal(kvf_cost_assumed("ucx/emulated", &emulated), "ucx/emulated");
        (void)kvf_cost_assumed("ucx", &cards);
        assert_true(emulated.ns_per_run > cards.ns_per_run && emulated.ns_per_byte > cards.ns_per_byte);
    }
}

static bool copy_nothing(const kvf_yardstick *yardstick, const kvf_run *runs, size_t count) {
    (void)yardstick;
    (void)runs;
    return count == 0;
}

/* If there is no time or no permission to measure, the assumed prices stay. */
static void costs_that_cannot_be_measured_stay_as_they_were(void **state) {
    (void)state;
    kvf_yardstick yardstick;
    kvf_copy_price price = {1, 2};
    kvf_cost_model cost = {.ns_per_run = 3, .ns_per_byte = 4, .ns_per_source = 5};
    assert_ok(kvf_yardstick_open(&yardstick, 0));
    assert_false(kvf_yardstick_boxes(&yardstick, &price));
    kvf_cost_price(&cost, &yardstick.mapped);
    kvf_yardstick_close(&yardstick);
    assert_ok(kvf_yardstick_open(&yardstick, 10000000000u));
    assert_false(kvf_yardstick_runs(&yardstick, copy_nothing, &price));
    assert_true(yardstick.mapped.ns_per_piece > 0 && yardstick.mapped.ns_per_byte > 0);
    assert_true(price.ns_per_piece == 1 && price.ns_per_byte == 2);
    assert_true(cost.ns_per_run == 3 && cost.ns_per_byte == 4);
    kvf_cost_price(&cost, &yardstick.mapped);
    assert_true(cost.ns_per_run == yardstick.mapped.ns_per_piece && cost.ns_per_source == 5);
    assert_true(kvf_yardstick_boxes(&yardstick, &price));
    assert_true(price.ns_per_piece > 0 && price.ns_per_byte > 0);
    kvf_yardstick_close(&yardstick);
}

/* Device memory, which this kind of transport does not move directly, goes packed. */
static void memory_of_a_device_goes_packed(void **state) {
    (void)state;
    const kvf_engine_spec d = {.struct_size = sizeof d,
                               .tp_size = 1,
                               .all = {.tokens_per_block = 16, .block_count = 64, .order = "L|BPNH"}};
    const kvf_engine_spec p = {.struct_size = sizeof p,
                               .tp_size = 1,
                               .all = {.tokens_per_block = 16, .block_count = 64, .order = "L|BPHN"}};
    const pair engines = pair_of(attention(2, 8, 128), &d, &p);
    kvf_plan *plan = plan_of(&engines, 0);
    kvf_way_prediction host = {.struct_size = sizeof host}, in_host = host, one = host, both = host;
    const kvf_memory_kind cuda = KVF_MEMORY_CUDA;
    assert_ok(kvf_way_predict(plan, 0, 1000, "inproc", &host));
    assert_ok(kvf_way_predict_in(plan, 0, 1000, "inproc", KVF_MEMORY_HOST, KVF_MEMORY_HOST, &in_host));
    assert_memory_equal(&host, &in_host, sizeof host);
    assert_ok(kvf_way_predict_in(plan, 0, 1000, "inproc", KVF_MEMORY_HOST, cuda, &one));
    assert_ok(kvf_way_predict_in(plan, 0, 1000, "inproc", cuda, cuda, &both));
    assert_int_equal(one.way, KVF_WAY_PACKED);
    assert_true(one.direct_ns == 0 && both.direct_ns == 0);
    assert_int_equal(one.bytes, host.bytes);
    /* With a device a byte costs 1/51 ns and its share of 12.8 us a slot instead of 0.15 ns, a piece costs 0.3 ns
     * instead of 6, and a source costs 6.4 us more. */
    const double less =
        (double)host.bytes * (0.15 - 1 / 51.0 - 12800.0 / (1 << 20)) + 5.7 * (double)host.pieces - 6400;
    assert_true(fabs(host.packed_ns - one.packed_ns - less) < 1);
    assert_true(fabs(one.packed_ns - both.packed_ns - less) < 1);
    assert_fails(kvf_way_predict_in(plan, 0, 1000, "inproc", (kvf_memory_kind)2, cuda, &one), KVF_E_INVALID,
                 "local memory kind is 2; allowed: 0 to 1");
    assert_fails(kvf_way_predict_in(plan, 0, 1000, "inproc", cuda, (kvf_memory_kind)-1, &one), KVF_E_INVALID,
                 "remote memory kind is -1");
    kvf_plan_free(plan);
    free_pair(&engines);
}

/* Both sides copy at the same time, so the slower one counts: a core as long as there is one. Two devices once copied for
 * nothing, and the notices cost nothing either. */
static void two_devices_that_copy_at_the_same_time_cost_as_much_as_one_of_them(void **state) {
    (void)state;
    const double slot = 1 << 20, notices = 2 * 5000 / slot, calls = 12800 / slot;
    for (uint32_t devices = 0; devices < 3; devices++) {
        kvf_assumed_cost ways;
        kvf_cost_assume(&ways, "shm/brought", 1 << 20, devices);
        const kvf_cost_model *packed = &ways.packed[KVF_MEMORY_HOST];
        const double copy = devices < 2 ? 0.15 : 1 / 51.0 + calls, piece = devices < 2 ? 6 : 0.3;
        assert_true(fabs(packed->ns_per_byte - copy - notices) < 1e-9);
        assert_true(fabs(packed->ns_per_run - piece) < 1e-9);
        assert_true(fabs(packed->ns_per_source - ways.direct.ns_per_source - 4 * 5000 - devices * 6400) <
                    1e-6);
    }
}

static uint64_t processor_ns(void) {
    struct timespec used;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return (uint64_t)used.tv_sec * UINT64_C(1000000000) + (uint64_t)used.tv_nsec;
}

/* A process measures once: before this test the costs are those assumed. Where other programs leave it no time, the
 * later measurements are not begun. */
static void costs_are_measured_once_in_less_than_50_ms(void **state) {
    (void)state;
    kvf_cost_model assumed, measured;
    (void)kvf_cost_assumed("shm", &assumed);
    const uint64_t begin = processor_ns(), took_ns = kvf_cost_calibrate(), used_ns = processor_ns() - begin;
    assert_true(took_ns > 0 && used_ns < 50000000);
    (void)kvf_cost_assumed("shm", &measured);
    assert_true(measured.ns_per_run > 0 && measured.ns_per_byte > 0);
    if (took_ns < 30000000)
        assert_true(measured.ns_per_byte != assumed.ns_per_byte && measured.ns_per_run != assumed.ns_per_run);
    assert_int_equal(kvf_cost_calibrate(), took_ns);
    assert_true(processor_ns() - begin < used_ns + 1000000);
}

/* ---- slots ----------------------------------------------------------------------------------- */

static void half_of_an_arena_is_lent_and_half_of_the_rest_to_one_peer(void **state) {
    (void)state;
    static unsigned char memory[16 * 16];
    kvf_arena arena;
    kvf_slot_share shares[3] = {{0}};
    kvf_slot *lent[16], *own[16];
    uint32_t count = 0, taken = 0;
    assert_ok(kvf_arena_open(&arena, 0, memory, 16, 16));
    for (uint32_t peer = 0; peer < 3; peer++)
        for (kvf_slot *slot; (slot = kvf_arena_lend(&arena, &shares[peer])); count++)
            lent[count] = slot;
    assert_int_equal(shares[0].lent, 4);
    assert_int_equal(shares[1].lent, 2);
    assert_int_equal(shares[2].lent, 1);
    /* Returned slots go to the peer that has fewer. */
    kvf_arena_give(&arena, lent[2]);
    kvf_arena_give(&arena, lent[3]);
    assert_null(kvf_arena_lend(&arena, &shares[0]));
    lent[2] = kvf_arena_lend(&arena, &shares[2]);
    assert_non_null(lent[2]);
    lent[3] = lent[--count];
    for (uint32_t peer = 0; peer < 3; peer++) {
        assert_int_equal(shares[peer].lent, 2);
        assert_null(kvf_arena_lend(&arena, &shares[peer]));
    }
    /* Slots that are not lent serve the stage's own operations, and a peer leaves half of them to others. */
    for (uint32_t peer = 0; peer < 3; peer++)
        while ((own[taken] = kvf_arena_take(&arena, &shares[peer])))
            taken++;
    assert_int_equal(shares[0].own, 5);
    assert_int_equal(shares[1].own, 3);
    assert_int_equal(shares[2].own, 1);
    kvf_slot_share more = {0};
    own[taken++] = kvf_arena_take(&arena, &more);
    assert_int_equal(taken, 10);
    assert_null(kvf_arena_take(&arena, &(kvf_slot_share){0}));
    /* A slot in doubt is not lent again, and counts in its peer's share. */
    kvf_arena_doubt(&arena, lent[0]);
    assert_int_equal(shares[0].doubt, 1);
    assert_null(kvf_arena_lend(&arena, &shares[0]));
    const uint32_t generation = lent[0]->generation, number = lent[0]->number;
    kvf_arena_give(&arena, lent[0]);
    assert_int_equal(shares[0].doubt + arena.doubt, 0);
    kvf_slot *again = kvf_arena_lend(&arena, &shares[0]);
    assert_int_equal(again->number, number);
    assert_int_equal(again->generation, generation + 1);
    assert_ptr_equal(again->memory, memory + number * 16);
    kvf_arena_give(&arena, again);
    for (uint32_t i = 1; i < count; i++)
        kvf_arena_give(&arena, lent[i]);
    for (uint32_t i = 0; i < taken; i++)
        kvf_arena_give(&arena, own[i]);
    assert_int_equal(arena.free_count, 16);
    kvf_arena_close(&arena);
}

static const kvf_engine_spec one = {
    .struct_size = sizeof one, .tp_size = 1, .all = {.tokens_per_block = 8, .block_count = 20}};

/* ---- on one host ------------------------------------------------------------------------------ */

/* Both sides keep heads of 32 B in different orders, so that a run has 32 B. Moves by the way that the stage chooses,
 * in both directions. */
static void check_choice(bool brought, bool packed) {
    static const kvf_engine_spec d = {.struct_size = sizeof d,
                                      .tp_size = 1,
                                      .all = {.tokens_per_block = 8, .block_count = 100, .order = "L|BPNH"}},
                                 p = {.struct_size = sizeof p,
                                      .tp_size = 1,
                                      .all = {.tokens_per_block = 8, .block_count = 100, .order = "L|BPHN"}};
    const stage_pair shape = {.model = attention(2, 4, 16),
                              .d = &d,
                              .p = &p,
                              .tokens = 600,
                              .options = {.arena_bytes = 16 * SLOT, .slot_bytes = SLOT, .window = 4}};
    stage_world *w = brought ? stage_world_open_brought("shm", &shape) : stage_world_open("shm", &shape);
    stage_world_pull_all(w, KVF_WAY_AUTO, 5);
    kvf_stage_info pulled = stage_info_of(w->d[0].stage);
    assert_int_equal(pulled.moves[KVF_WAY_PACKED], packed);
    assert_int_equal(pulled.moves[KVF_WAY_DIRECT], !packed);
    stage_world_refill(w, 6);
    stage_world_push_all(w, KVF_WAY_AUTO, 6);
    kvf_stage_info pushed = stage_info_of(w->p[0].stage);
    assert_int_equal(pushed.moves[KVF_WAY_PACKED], packed);
    assert_int_equal(pushed.moves[KVF_WAY_DIRECT], !packed);
    stage_world_work_idle(w);
    stage_world_close(w);
}

static void short_runs_of_memory_that_nobody_can_map_are_packed_on_one_host(void **state) {
    (void)state;
    check_choice(true, true);
}

static void memory_that_is_mapped_is_copied_from_directly(void **state) {
    (void)state;
    check_choice(false, false);
}

/* The peer's arena is mapped here, so bytes need no slot of the mover in between. */
static void a_mapped_arena_needs_no_slots_of_the_mover(void **state) {
    (void)state;
    const kvf_direction directions[] = {KVF_READ, KVF_WRITE};
    for (size_t i = 0; i < COUNT_OF(directions); i++) {
        const stage_pair shape = {.model = attention(2, 2, 16),
                                  .d = &one,
                                  .p = &one,
                                  .tokens = 100,
                                  .options = {.arena_bytes = 16 * SLOT, .slot_bytes = SLOT}};
        stage_world *w = stage_world_open("shm", &shape);
        kvf_plan *plan = plan_of(&w->engines, 0);
        kvf_request *request = request_of(plan);
        set_sequences(request, &w->d_sequence, &w->p_sequence);
        const kvf_move_options options = {.struct_size = sizeof options, .way = KVF_WAY_PACKED};
        kvf_move *move = NULL;
        cell_rank before;
        rank_copy(&before, &w->d[0].cells);
        const stage_end *mover = directions[i] == KVF_READ ? &w->d[0] : &w->p[0];
        if (directions[i] == KVF_READ)
            assert_ok(kvf_stage_pull(mover->stage, request, w->d[0].peers, &options, &move));
        else
            assert_ok(kvf_stage_push(mover->stage, request, 0, w->p[0].peers[0], &options, &move));
        while (kvf_move_status(move) == KVF_IN_PROGRESS) {
            (void)stage_world_work(w);
            assert_int_equal(stage_info_of(mover->stage).slots_free, 16);
        }
        assert_ok(kvf_move_status(move));
        assert_int_equal(stage_world_wrong_bytes(&w->d[0], &before, 5), 0);
        kvf_peer_info info = {.struct_size = sizeof info};
        assert_ok(kvf_peer_get_info(mover->peers[0], &info));
        assert_int_equal(directions[i] == KVF_READ ? info.bytes_read : info.bytes_written,
                         kvf_request_bytes(request, 0));
        rank_close(&before);
        kvf_move_free(move);
        kvf_request_free(request);
        kvf_plan_free(plan);
        stage_world_close(w);
    }
}

/* ---- what a stage refuses -------------------------------------------------------------------- */

static stage_world *two_ranks(void) {
    const stage_pair shape = {
        attention(2, 2, 16), &one, &one, 100, {.arena_bytes = 16 * SLOT, .slot_bytes = SLOT}};
    return stage_world_open("inproc", &shape);
}

static void options_out_of_range_are_refused(void **state) {
    (void)state;
    stage_world *w = two_ranks();
    kvf_stage *stage = NULL;
    const kvf_shard *shard = w->d[0].cells.shard;
    const struct {
        kvf_stage_options options;
        const char *words;
    } wrong[] = {{{.slot_bytes = 5000}, "slot_bytes is 5000"},
                 {{.slot_bytes = 2048}, "slot_bytes is 2048"},
                 {{.slot_bytes = 2 << 20}, "slot_bytes is 2097152"},
                 {{.arena_bytes = 3 * SLOT, .slot_bytes = SLOT}, "arena_bytes is 12288"},
                 {{.window = 17}, "window is 17; allowed: 0 to 16"},
                 {{.workers = 17}, "workers is 17; allowed: 0 to 16"}};
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        kvf_stage_options options = wrong[i].options;
        options.struct_size = sizeof options;
        assert_fails(kvf_stage_open(w->d[0].transport, shard, &options, &stage), KVF_E_INVALID,
                     wrong[i].words);
    }
    assert_fails(kvf_stage_open(NULL, shard, NULL, &stage), KVF_E_INVALID, "transport is NULL");
    kvf_transport *empty;
    assert_ok(kvf_transport_open("inproc", NULL, &empty));
    assert_fails(kvf_stage_open(empty, shard, NULL, &stage), KVF_E_NOT_REGISTERED, "region 0 has 0 bytes");
    kvf_transport_close(empty);
    stage_world_close(w);
}

static void what_is_missing_is_named(void **state) {
    (void)state;
    stage_world *w = two_ranks();
    kvf_stage *stage = w->d[0].stage;
    kvf_plan *plan = plan_of(&w->engines, 0);
    kvf_request *request = request_of(plan);
    kvf_peer *none = NULL, *peer = w->d[0].peers[0];
    kvf_move *move = NULL;
    kvf_move_info info = {.struct_size = sizeof info};
    kvf_stage_info counts = {.struct_size = sizeof counts};
    assert_fails(kvf_stage_open(w->d[0].transport, NULL, NULL, &stage), KVF_E_INVALID, "shard is NULL");
    assert_fails(kvf_stage_join(NULL, peer), KVF_E_INVALID, "stage is NULL");
    assert_fails(kvf_stage_join(stage, NULL), KVF_E_INVALID, "peer is NULL");
    assert_fails(kvf_stage_pull(NULL, request, &peer, NULL, &move), KVF_E_INVALID, "stage is NULL");
    assert_fails(kvf_stage_pull(stage, NULL, &peer, NULL, &move), KVF_E_INVALID, "request is NULL");
    assert_fails(kvf_stage_pull(stage, request, NULL, NULL, &move), KVF_E_INVALID, "peers is NULL");
    assert_fails(kvf_stage_pull(stage, request, &none, NULL, &move), KVF_E_INVALID,
                 "the peer of source 0 is NULL");
    assert_fails(kvf_stage_pull(stage, request, &peer, NULL, NULL), KVF_E_INVALID, "out is NULL");
    assert_fails(kvf_stage_push(NULL, request, 0, peer, NULL, &move), KVF_E_INVALID, "stage is NULL");
    assert_fails(kvf_stage_push(stage, NULL, 0, peer, NULL, &move), KVF_E_INVALID, "request is NULL");
    assert_fails(kvf_stage_push(stage, request, 0, NULL, NULL, &move), KVF_E_INVALID, "peer is NULL");
    assert_fails(kvf_stage_push(stage, request, 0, peer, NULL, NULL), KVF_E_INVALID, "out is NULL");
    assert_fails(kvf_stage_push(stage, request, 1, peer, NULL, &move), KVF_E_RANGE,
                 "source is 1; the plan has 1");
    assert_fails(kvf_move_status(NULL), KVF_E_INVALID, "move is NULL");
    assert_fails(kvf_move_get_info(NULL, &info), KVF_E_INVALID, "move is NULL");
    assert_fails(kvf_stage_progress(NULL, NULL), KVF_E_INVALID, "stage is NULL");
    assert_fails(kvf_stage_get_info(NULL, &counts), KVF_E_INVALID, "stage is NULL");
    assert_null(move);
    assert_stage_idle(stage);
    kvf_move_cancel(NULL);
    kvf_move_free(NULL);
    kvf_stage_close(NULL);
    kvf_request_free(request);
    kvf_plan_free(plan);
    stage_world_close(w);
}

static void peers_join_once_and_by_one_name(void **state) {
    (void)state;
    stage_world *w = two_ranks();
    kvf_peer *again;
    const void *card;
    size_t bytes;
    assert_ok(kvf_transport_export(w->p[0].transport, &card, &bytes));
    assert_ok(kvf_transport_connect(w->d[0].transport, card, bytes, &again));
    assert_fails(kvf_stage_join(w->d[0].stage, again), KVF_E_EXISTS, "a peer named p0 has joined");
    assert_fails(kvf_stage_join(w->d[0].stage, w->p[0].peers[0]), KVF_E_INVALID, "another transport");
    kvf_stage_leave(w->d[0].stage, w->d[0].peers[0]);
    assert_ok(kvf_stage_join(w->d[0].stage, again));
    assert_non_null(kvf_stage_find_peer(w->d[0].stage, again));
    assert_null(kvf_stage_find_peer(w->d[0].stage, w->d[0].peers[0]));
    stage_world_close(w);
}

static void a_peer_that_has_not_joined_is_read_directly(void **state) {
    (void)state;
    stage_world *w = two_ranks();
    kvf_plan *plan = plan_of(&w->engines, 0);
    kvf_request *request = request_of(plan);
    kvf_move *move;
    set_sequences(request, &w->d_sequence, &w->p_sequence);
    kvf_stage_leave(w->d[0].stage, w->d[0].peers[0]);
    kvf_move_options options = {.struct_size = sizeof options, .way = KVF_WAY_PACKED};
    assert_fails(kvf_stage_pull(w->d[0].stage, request, w->d[0].peers, &options, &move), KVF_E_NOT_FOUND,
                 "source 0: its peer has not joined");
    options.priority = 256;
    assert_fails(kvf_stage_pull(w->d[0].stage, request, w->d[0].peers, &options, &move), KVF_E_INVALID,
                 "priority 256");
    assert_fails(kvf_stage_push(w->d[0].stage, request, 1, w->d[0].peers[0], NULL, &move), KVF_E_RANGE,
                 "source is 1");
    cell_rank before;
    rank_copy(&before, &w->d[0].cells);
    assert_ok(kvf_stage_pull(w->d[0].stage, request, w->d[0].peers, NULL, &move));
    assert_ok(stage_world_finish(w, move));
    assert_int_equal(stage_world_wrong_bytes(&w->d[0], &before, 5), 0);
    kvf_move_info info = {.struct_size = sizeof info};
    assert_ok(kvf_move_get_info(move, &info));
    assert_int_equal(info.packed, 0);
    assert_int_equal(info.sources, 1);
    kvf_move_free(move);
    rank_close(&before);
    kvf_request_free(request);
    kvf_plan_free(plan);
    stage_world_close(w);
}

/* How many packed transfers the prices of a peer were learned from. */
static uint64_t packed_seen(const kvf_stage *stage, const kvf_peer *peer, kvf_direction direction) {
    return kvf_stage_find_peer(stage, peer)->known->by_direction[direction].packed[KVF_MEMORY_HOST].transfers;
}

/* The costs that were measured with one rank of a host hold for the host's other rank too, until both have left. */
static void peers_of_one_machine_share_what_was_seen(void **state) {
    (void)state;
    static const kvf_engine_spec halves = {
        .struct_size = sizeof halves, .tp_size = 2, .all = {.tokens_per_block = 8, .block_count = 20}};
    const stage_pair shape = {
        attention(2, 2, 16), &one, &halves, 100, {.arena_bytes = 16 * SLOT, .slot_bytes = SLOT}};
    stage_world *w = stage_world_open("inproc", &shape);
    kvf_stage *stage = w->d[0].stage;
    kvf_stage_peer *first = kvf_stage_find_peer(stage, w->d[0].peers[0]);
    const kvf_stage_peer *second = kvf_stage_find_peer(stage, w->d[0].peers[1]);
    assert_ptr_equal(first->known, second->known);
    assert_int_equal(first->known->users, 2);
    assert_true(sizeof *first->known <= 2400); /* kept once for all peers of a host */
    kvf_way_cost_learn(&first->known->by_direction[KVF_READ].packed[KVF_MEMORY_HOST], 64, 65536, 1e6);
    assert_int_equal(packed_seen(stage, w->d[0].peers[1], KVF_READ), 1);
    assert_int_equal(packed_seen(stage, w->d[0].peers[1], KVF_WRITE), 0);
    kvf_stage_leave(stage, w->d[0].peers[0]);
    assert_ok(kvf_stage_join(stage, w->d[0].peers[0]));
    assert_int_equal(packed_seen(stage, w->d[0].peers[0], KVF_READ), 1);
    for (int i = 0; i < 2; i++)
        kvf_stage_leave(stage, w->d[0].peers[i]);
    for (int i = 0; i < 2; i++)
        assert_ok(kvf_stage_join(stage, w->d[0].peers[i]));
    assert_int_equal(packed_seen(stage, w->d[0].peers[0], KVF_READ), 0);
    stage_world_close(w);
}

/* Measured costs decide the way of the next moves: a way that turns out slow is not chosen again. */
static void a_way_that_turns_out_slow_is_left(void **state) {
    (void)state;
    stage_world *w = two_ranks();
    kvf_plan *plan = plan_of(&w->engines, 0);
    kvf_request *request = request_of(plan);
    set_sequences(request, &w->d_sequence, &w->p_sequence);
    uint32_t packed[2] = {0};
    kvf_stage_find_peer(w->d[0].stage, w->d[0].peers[0])->has_lists = false; /* like a network */
    for (uint32_t i = 0; i < 40; i++) {
        kvf_move *move;
        kvf_move_info info = {.struct_size = sizeof info};
        assert_ok(kvf_stage_pull(w->d[0].stage, request, w->d[0].peers, NULL, &move));
        assert_ok(kvf_move_get_info(move, &info));
        w->now_ns += info.packed ? 1000 : UINT64_C(10000000); /* as if this way had taken so long */
        assert_ok(stage_world_finish(w, move));
        packed[i >= 20] += info.packed;
        kvf_move_free(move);
    }
    assert_int_equal(packed[1], 20);
    kvf_stage_info info = stage_info_of(w->d[0].stage);
    assert_int_equal(info.moves[KVF_WAY_AUTO], 40);
    assert_int_equal(info.moves[KVF_WAY_PACKED], packed[0] + packed[1]);
    assert_int_equal(info.bytes[KVF_WAY_PACKED], info.moves[KVF_WAY_PACKED] * kvf_request_bytes(request, 0));
    const kvf_peer_cost *learned =
        &kvf_stage_find_peer(w->d[0].stage, w->d[0].peers[0])->known->by_direction[KVF_READ];
    assert_int_equal(learned->packed[KVF_MEMORY_HOST].transfers, info.moves[KVF_WAY_PACKED]);
    assert_int_equal(learned->direct.transfers, info.moves[KVF_WAY_DIRECT]);
    kvf_request_free(request);
    kvf_plan_free(plan);
    stage_world_close(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prediction_is_source_runs_and_bytes),
        cmocka_unit_test(costs_are_learned_from_short_runs_and_long_ones),
        cmocka_unit_test(one_transfer_that_was_disturbed_moves_little),
        cmocka_unit_test(transfers_are_predicted_from_those_like_them),
        cmocka_unit_test(the_kind_of_transport_decides_the_way),
        cmocka_unit_test(entries_are_counted_by_the_tokens_they_stand_for),
        cmocka_unit_test(keys_that_are_cut_unlike_go_packed_by_lists_of_runs_too),
        cmocka_unit_test(memory_of_another_sort_has_prices_of_its_own),
        cmocka_unit_test(costs_that_cannot_be_measured_stay_as_they_were),
        cmocka_unit_test(peers_of_one_machine_share_what_was_seen),
        cmocka_unit_test(memory_of_a_device_goes_packed),
        cmocka_unit_test(two_devices_that_copy_at_the_same_time_cost_as_much_as_one_of_them),
        cmocka_unit_test(costs_are_measured_once_in_less_than_50_ms),
        cmocka_unit_test(half_of_an_arena_is_lent_and_half_of_the_rest_to_one_peer),
        cmocka_unit_test(short_runs_of_memory_that_nobody_can_map_are_packed_on_one_host),
        cmocka_unit_test(memory_that_is_mapped_is_copied_from_directly),
        cmocka_unit_test(a_mapped_arena_needs_no_slots_of_the_mover),
        cmocka_unit_test(options_out_of_range_are_refused),
        cmocka_unit_test(what_is_missing_is_named),
        cmocka_unit_test(peers_join_once_and_by_one_name),
        cmocka_unit_test(a_peer_that_has_not_joined_is_read_directly),
        cmocka_unit_test(a_way_that_turns_out_slow_is_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
