/*
 * Peers that die at the worst moment, and stages that cannot be opened: each gives one clear error, and ranks that have
 * nothing to do with it go on.
 */
#include "stage_world.h"

#include "faulty_fabric.h"

#define SLOT 4096u

/* Two ranks on each side; each rank of D reads from one rank of P. */
static const kvf_engine_spec d_spec = {.struct_size = sizeof d_spec,
                                       .tp_size = 2,
                                       .all = {.tokens_per_block = 8, .block_count = 100, .order = "L|BPNH"}},
                             p_spec = {
                                 .struct_size = sizeof p_spec,
                                 .tp_size = 2,
                                 .all = {.tokens_per_block = 16, .block_count = 100, .order = "L|BPHN"}};

/* ---- between gather and notice --------------------------------------------------------------- */

/* From now on the fabric takes no notification, or takes all. */
static void take_notices(bool taken) {
    const faulty_options options = {.per_mille = {[FAULTY_NOT_NOTIFIED] = taken ? 0 : 1000}, .turns = 1};
    faulty_install(&options);
}

typedef struct scene {
    stage_world *w;
    kvf_plan *plans[2];
    kvf_request *requests[2]; /* of each rank of D */
    cell_rank before[2];
} scene;

static scene scene_open(void) {
    const stage_pair shape = {attention(3, 4, 32),
                              &d_spec,
                              &p_spec,
                              600,
                              {.arena_bytes = 32 * SLOT, .slot_bytes = SLOT, .window = 4}};
    take_notices(true);
    scene s = {.w = stage_world_open("inproc", &shape)};
    for (uint32_t i = 0; i < 2; i++) {
        s.plans[i] = plan_of(&s.w->engines, i);
        s.requests[i] = request_of(s.plans[i]);
        set_sequences(s.requests[i], &s.w->d_sequence, &s.w->p_sequence);
        rank_copy(&s.before[i], &s.w->d[i].cells);
    }
    return s;
}

static void scene_close(scene *s) {
    for (uint32_t i = 0; i < 2; i++) {
        rank_close(&s->before[i]);
        kvf_request_free(s->requests[i]);
        kvf_plan_free(s->plans[i]);
    }
    stage_world_close(s->w);
    faulty_remove();
}

static kvf_move *begin(const scene *s, uint32_t rank, kvf_direction direction) {
    const kvf_move_options options = {.struct_size = sizeof options, .way = KVF_WAY_PACKED};
    stage_end *d = &s->w->d[rank], *p = &s->w->p[rank];
    kvf_move *move = NULL;
    kvf_peer *peers[WORLD_RANKS];
    stage_world_sources(s->w, d, s->plans[rank], peers);
    if (direction == KVF_READ)
        assert_ok(kvf_stage_pull(d->stage, s->requests[rank], peers, &options, &move));
    else
        assert_ok(kvf_stage_push(p->stage, s->requests[rank], 0, p->peers[rank], &options, &move));
    return move;
}

static uint32_t credits_in(const kvf_stage *stage, kvf_credit_state state) {
    uint32_t count = 0;
    for (const kvf_stage_flow *flow = stage->first; flow; flow = flow->following)
        for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++)
            count += flow->credits[i].state == state;
    return count;
}

static bool has_moved_some(void *move) {
    kvf_move_info info = {.struct_size = sizeof info};
    assert_ok(kvf_move_get_info(move, &info));
    return info.bytes > 3 * SLOT;
}

static bool is_writing(void *stage) {
    return credits_in(stage, KVF_CREDIT_MOVING) > 0;
}

static bool has_lost(void *context) {
    return !((const stage_end *)context)->peers[0];
}

/* The rest of the two engines is unharmed: the ranks that are not concerned still move everything, and no slot is
 * kept. */
static void assert_others_go_on(const scene *s) {
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        kvf_move *move = begin(s, 1, (kvf_direction)direction);
        assert_ok(stage_world_finish(s->w, move));
        kvf_move_free(move);
        assert_int_equal(stage_world_wrong_bytes(&s->w->d[1], &s->before[1], 5), 0);
    }
    stage_world_settle(s->w);
    for (uint32_t i = 0; i < 2; i++) {
        if (s->w->d[i].stage)
            assert_stage_idle(s->w->d[i].stage);
        if (s->w->p[i].stage)
            assert_stage_idle(s->w->p[i].stage);
    }
}

/* The holder has gathered into slots, and dies before it notifies the reader. */
static void a_holder_dies_between_gather_and_notice(void **state) {
    (void)state;
    scene s = scene_open();
    kvf_move *move = begin(&s, 0, KVF_READ);
    stage_world_work_until(s.w, has_moved_some, move);
    take_notices(false);
    for (int i = 0; i < 50; i++)
        (void)stage_world_work(s.w);
    /* The reader cannot return the slots that it has read either, so they are still lent. */
    assert_true(
        credits_in(s.w->p[0].stage, KVF_CREDIT_TO_LEND) + credits_in(s.w->p[0].stage, KVF_CREDIT_LENT) > 0);
    assert_int_equal(kvf_move_status(move), KVF_IN_PROGRESS);
    stage_end_close(&s.w->p[0]);
    take_notices(true);
    stage_world_work_until(s.w, has_lost, &s.w->d[0]);
    assert_fails(stage_world_finish(s.w, move), KVF_E_PEER_LOST, "p0");
    kvf_move_free(move);
    assert_others_go_on(&s);
    scene_close(&s);
}

/* The writer has written into slots, and dies before it notifies the reader: their content is dropped. */
static void a_writer_dies_between_write_and_notice(void **state) {
    (void)state;
    scene s = scene_open();
    kvf_move *move = begin(&s, 0, KVF_WRITE);
    stage_world_work_until(s.w, has_moved_some, move);
    stage_world_work_until(s.w, is_writing, s.w->p[0].stage);
    take_notices(false);
    for (int i = 0; i < 50; i++)
        (void)stage_world_work(s.w);
    assert_true(credits_in(s.w->p[0].stage, KVF_CREDIT_TO_RETURN) > 0);
    const uint64_t wrong = stage_world_wrong_bytes(&s.w->d[0], &s.before[0], 5);
    assert_true(wrong > 0); /* the move is not complete */
    kvf_stage_leave(s.w->d[0].stage, s.w->d[0].peers[0]);
    assert_true(stage_info_of(s.w->d[0].stage).slots_doubt > 0);
    kvf_move_free(move);
    stage_end_close(&s.w->p[0]);
    take_notices(true);
    kvf_stage_quiet(s.w->d[0].stage, "p0");
    assert_others_go_on(&s);
    assert_int_equal(stage_world_wrong_bytes(&s.w->d[0], &s.before[0], 5), wrong);
    scene_close(&s);
}

/* ---- an arena that cannot be registered ------------------------------------------------------ */

static uint32_t regions_allowed;

static kvf_status (*register_well)(void *endpoint, uint32_t region, const kvf_memory *memory);

static kvf_status register_some(void *endpoint, uint32_t region, const kvf_memory *memory) {
    return region < regions_allowed ? register_well(endpoint, region, memory)
                                    : kvf_fail(KVF_E_IO, "no more memory can be pinned");
}

/* The stage is refused with the fabric's reason; the transport goes on, and a stage opens once the arena can be
 * registered. */
static void an_arena_that_cannot_be_registered(void **state) {
    (void)state;
    const faulty_options no_faults = {.turns = 1};
    faulty_install(&no_faults);
    kvf_fabric fabric = *faulty_fabric("inproc");
    register_well = fabric.register_region;
    fabric.register_region = register_some;
    pair engines = pair_of(attention(1, 2, 32), &d_spec, &p_spec);
    const kvf_shard *shard = kvf_engine_shard(engines.local, 0);
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    const kvf_transport_options options = {.struct_size = sizeof options, .name = "one"};
    const kvf_stage_options small = {
        .struct_size = sizeof small, .arena_bytes = 16 * SLOT, .slot_bytes = SLOT};
    kvf_transport *transport = NULL;
    kvf_stage *stage = NULL;
    kvf_memory regions[8];
    assert_true(desc->region_count <= 8);
    assert_ok(kvf_transport_open_over(&fabric, "inproc", &options, &transport));
    for (uint32_t i = 0; i < desc->region_count; i++) {
        regions[i] = (kvf_memory){.struct_size = sizeof *regions, .bytes = desc->region_bytes[i]};
        assert_ok(
            kvf_transport_allocate(transport, KVF_MEMORY_HOST, 0, regions[i].bytes, &regions[i].address));
    }
    regions_allowed = desc->region_count;
    assert_fails(kvf_stage_open(transport, shard, &small, &stage), KVF_E_NOT_REGISTERED,
                 "region 0 has 0 bytes");
    assert_ok(kvf_transport_register(transport, regions, desc->region_count));
    assert_fails(kvf_stage_open(transport, shard, &small, &stage), KVF_E_IO, "no more memory can be pinned");
    assert_null(stage);
    const kvf_stage_options huge = {.struct_size = sizeof huge, .arena_bytes = UINT64_C(1) << 50};
    assert_true(kvf_stage_open(transport, shard, &huge, &stage) != KVF_OK);
    assert_null(stage);
    regions_allowed = UINT32_MAX;
    assert_ok(kvf_stage_open(transport, shard, &small, &stage));
    assert_stage_idle(stage);
    kvf_stage_close(stage);
    kvf_transport_close(transport);
    free_pair(&engines);
    faulty_remove();
}

/* What was started before may write for a while: a move that nobody has could not say when that is over. */
static void a_source_that_cannot_be_started_fails_the_move_of_those_before_it(void **state) {
    (void)state;
    static const kvf_engine_spec one = {
        .struct_size = sizeof one,
        .tp_size = 1,
        .all = {.tokens_per_block = 8, .block_count = 100, .order = "L|BPNH"}};
    const stage_pair shape = {
        attention(3, 4, 32), &one, &p_spec, 600, {.arena_bytes = 32 * SLOT, .slot_bytes = SLOT, .window = 4}};
    const kvf_move_options options = {.struct_size = sizeof options, .way = KVF_WAY_PACKED};
    take_notices(true);
    stage_world *w = stage_world_open("inproc", &shape);
    kvf_plan *plan = plan_of(&w->engines, 0);
    kvf_request *request = request_of(plan);
    kvf_move *move = NULL;
    kvf_peer *peers[WORLD_RANKS];
    set_sequences(request, &w->d_sequence, &w->p_sequence);
    stage_world_sources(w, &w->d[0], plan, peers);
    for (uint32_t left = 2; left-- > 0;) {
        kvf_stage_leave(w->d[0].stage, peers[left]);
        const kvf_status status = kvf_stage_pull(w->d[0].stage, request, peers, &options, &move);
        assert_int_equal(status, left == 1 ? KVF_OK : KVF_E_NOT_FOUND);
        if (left == 0)
            continue; /* nothing was started */
        assert_fails(stage_world_finish(w, move), KVF_E_NOT_FOUND, "source 1: its peer has not joined");
        kvf_move_free(move);
    }
    kvf_request_free(request);
    kvf_plan_free(plan);
    stage_world_close(w);
    faulty_remove();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_holder_dies_between_gather_and_notice),
        cmocka_unit_test(a_writer_dies_between_write_and_notice),
        cmocka_unit_test(an_arena_that_cannot_be_registered),
        cmocka_unit_test(a_source_that_cannot_be_started_fails_the_move_of_those_before_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
