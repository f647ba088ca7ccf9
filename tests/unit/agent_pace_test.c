/* Caps and priorities of pulls and pushes, in virtual time. */
#include <stdio.h>

#include "agent/session.h"
#include "agent_net.h"
#include "agent_world.h"
#include "transport/front.h"

#define MIB (1024u * 1024u)
#define SAMPLE (50 * MS)
#define MOST_SAMPLES 256u

/* ---- a fabric that can be stopped ------------------------------------------------------------ */

/* While it stands, batches are accepted and kept back. */
static bool stands;
/* This submission, counted from 1, is refused once; 0: none is. */
static uint32_t refused;
static bool has_refused; /* one was */
static const kvf_fabric *below;
static kvf_fabric stopping;

static struct {
    void *link;
    kvf_batch *batch;
} kept[64];
static uint32_t kept_count;

static kvf_status stopping_progress(void *endpoint, bool *busy) {
    for (uint32_t i = 0; !stands && i < kept_count; i++)
        assert_ok(below->submit(kept[i].link, kept[i].batch));
    kept_count = stands ? kept_count : 0;
    return below->progress(endpoint, busy);
}

static struct { uint64_t when, bytes; } submitted[16384];
static uint32_t submitted_count;

static kvf_status stopping_submit(void *link, kvf_batch *batch) {
    if (refused > 0 && submitted_count + 1 == refused) {
        refused = 0;
        has_refused = true;
        return kvf_fail(KVF_E_UNSUPPORTED, "this memory is not taken");
    }
    assert_true(submitted_count < COUNT_OF(submitted));
    submitted[submitted_count].when = net_now();
    submitted[submitted_count].bytes = 0;
    for (size_t i = 0; i < batch->count; i++)
        submitted[submitted_count].bytes += batch->runs[i].bytes;
    submitted_count++;
    if (!stands)
        return below->submit(link, batch);
    assert_true(kept_count < COUNT_OF(kept));
    kept[kept_count].link = link;
    kept[kept_count++].batch = batch;
    return KVF_OK;
}

static const char *stopping_refusal(const void *link) {
    (void)link;
    return has_refused ? "this memory is not taken" : NULL;
}

static const kvf_fabric *stopping_fabric(void) {
    below = kvf_fabric_named("inproc");
    assert_non_null(below);
    stopping = *below;
    stopping.progress = stopping_progress;
    stopping.submit = stopping_submit;
    stopping.refusal = stopping_refusal;
    return &stopping;
}

static uint64_t submitted_bytes(uint32_t from) {
    uint64_t bytes = 0;
    for (uint32_t i = from; i < submitted_count; i++)
        bytes += submitted[i].bytes;
    return bytes;
}

/* ---- scenes ---------------------------------------------------------------------------------- */

typedef struct scene {
    world w;
    kvf_agent *p, *d;
    uint64_t bytes; /* of a request, on all ranks together */
    world_request given[2], wanted[2];
    uint64_t ours[2][WORLD_MAX_RANKS], theirs[2][WORLD_MAX_RANKS];
} scene;

static void set_up(scene *s, uint32_t layers, uint32_t elements, uint64_t tokens, const kvf_engine_spec *p,
                   const kvf_engine_spec *d) {
    static const char *const names[] = {"a", "b"};
    const kvf_agent_options options = {.struct_size = sizeof options, .transport = "inproc"};
    memset(s, 0, sizeof *s);
    submitted_count = 0;
    has_refused = false;
    world_fabric(stopping_fabric());
    world_open_model(&s->w, attention(layers, 4, elements), p, d, &options);
    s->p = s->w.p.agents[0];
    s->d = s->w.d.agents[0];
    s->bytes = tokens * layers * 2 * 4 * elements * 2;
    for (uint32_t i = 0; i < 2; i++) {
        world_request_make(&s->w, &s->w.p, names[i], tokens, i, 2, &s->given[i]);
        world_request_make(&s->w, &s->w.d, names[i], tokens, 1 - i, 2, &s->wanted[i]);
        world_fill(&s->w, &s->w.p, &s->given[i], 3 + i);
    }
}

static void tear_down(scene *s) {
    world_quiet(&s->w);
    world_close(&s->w);
    world_fabric(NULL);
}

static void assert_arrived(scene *s, uint32_t i) {
    world_all_done(&s->w, &s->w.d, s->ours[i]);
    world_all_done(&s->w, &s->w.p, s->theirs[i]);
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &s->wanted[i], 3 + i), 0);
}

/* Bytes of a rank of the consumer that are not zero, which are nearly all bytes that have arrived. */
static uint64_t arrived_at(const scene *s, uint32_t rank) {
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(s->w.d.engine, rank));
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < shard->region_count; i++)
        for (uint64_t b = 0; b < shard->region_bytes[i]; b++)
            bytes += ((const uint8_t *)s->w.d.memory[rank][i])[b] != 0;
    return bytes;
}

static uint64_t arrived(const scene *s) {
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < s->w.d.rank_count; r++)
        bytes += arrived_at(s, r);
    return bytes;
}

/* Runs until `agent` has its DONE. Returns how long that took, and the least and the most that arrived within any
 * second, as shares of all bytes. */
static uint64_t sample(scene *s, const kvf_agent *agent, double *least, double *most) {
    uint64_t counts[MOST_SAMPLES], n = 0, begin = 0;
    const uint64_t second = SECOND / SAMPLE;
    for (counts[n++] = 0; world_count(&s->w, agent, KVF_EVENT_DONE) == 0; counts[n++] = arrived(s)) {
        assert_true(n < MOST_SAMPLES);
        world_run_for(&s->w, SAMPLE);
        begin += counts[n - 1] == 0;
    }
    *least = 1;
    *most = 0;
    for (uint64_t i = second; i < n; i++) {
        double share = (double)(counts[i] - counts[i - second]) / (double)counts[n - 1];
        *most = share > *most ? share : *most;
        if (i > second + begin && i + 1 < n)
            *least = share < *least ? share : *least;
    }
    return (n - 1) * SAMPLE;
}

/* ---- caps ------------------------------------------------------------------------------------ */

/* The request must take three seconds, within 5% of the cap in any second, and all bytes must be right. */
static void assert_kept(scene *s, const kvf_agent *agent) {
    double least, most;
    uint64_t ns = sample(s, agent, &least, &most);
    print_message("%.3f to %.3f of the cap in any second\n", least * 3, most * 3);
    assert_true(most * 3 <= 1.05);
    assert_true(least * 3 >= 0.95);
    assert_true(ns >= 2850 * MS && ns <= 3150 * MS);
    assert_arrived(s, 0);
    tear_down(s);
}

#define BIG(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 128})

static void a_pull_keeps_to_its_cap(void **state) {
    (void)state;
    scene s;
    set_up(&s, 4, 32, 600, BIG("P"), BIG("D"));
    s.wanted[0].request.bytes_per_second = s.bytes / 3;
    world_hold(&s.w.p, &s.given[0], s.theirs[0]);
    world_pull(&s.w.d, &s.wanted[0], &s.w.p, s.ours[0]);
    assert_kept(&s, s.d);
}

/* The control: without a cap it takes next to no time. */
static void without_a_cap_a_pull_is_done_at_once(void **state) {
    (void)state;
    scene s;
    double least, most;
    set_up(&s, 4, 32, 600, BIG("P"), BIG("D"));
    world_hold(&s.w.p, &s.given[0], s.theirs[0]);
    world_pull(&s.w.d, &s.wanted[0], &s.w.p, s.ours[0]);
    assert_true(sample(&s, s.d, &least, &most) <= 2 * SAMPLE);
    assert_arrived(&s, 0);
    tear_down(&s);
}

static void a_cap_holds_for_all_sources_of_a_pull_together(void **state) {
    (void)state;
    scene s;
    set_up(&s, 4, 32, 600, ENGINE(.name = "P", .tp_size = 4, .all = {.block_count = 128}), BIG("D"));
    s.wanted[0].request.bytes_per_second = s.bytes / 3;
    world_hold(&s.w.p, &s.given[0], s.theirs[0]);
    world_pull(&s.w.d, &s.wanted[0], &s.w.p, s.ours[0]);
    assert_kept(&s, s.d);
}

static void a_cap_holds_for_all_ranks_that_a_push_writes_to(void **state) {
    (void)state;
    scene s;
    set_up(&s, 4, 32, 600, BIG("P"), ENGINE(.name = "D", .tp_size = 4, .all = {.block_count = 128}));
    s.given[0].request.bytes_per_second = s.bytes / 3;
    world_push(&s.w.p, &s.given[0], s.theirs[0]);
    world_expect(&s.w.d, &s.wanted[0], &s.w.p, s.ours[0]);
    for (uint64_t end = 200; end < 600; end += 200)
        assert_ok(kvf_agent_push_ready(s.p, s.theirs[0][0], CHUNK(end - 200, end, UINT32_MAX)));
    world_ready(&s.w.p, s.theirs[0]);
    assert_kept(&s, s.p);
}

static void ranks_that_a_push_writes_to_share_its_cap(void **state) {
    (void)state;
    scene s;
    set_up(&s, 4, 32, 600, BIG("P"), ENGINE(.name = "D", .tp_size = 4, .all = {.block_count = 128}));
    s.given[0].request.bytes_per_second = s.bytes / 2;
    world_push(&s.w.p, &s.given[0], s.theirs[0]);
    world_expect(&s.w.d, &s.wanted[0], &s.w.p, s.ours[0]);
    world_ready(&s.w.p, s.theirs[0]);
    world_run_for(&s.w, SECOND);
    for (uint32_t r = 0; r < 4; r++) {
        assert_true(arrived_at(&s, r) > s.bytes / 4 * 45 / 100);
        assert_true(arrived_at(&s, r) < s.bytes / 4 * 55 / 100);
    }
    assert_arrived(&s, 0);
    tear_down(&s);
}

/* As if the memory turned out unlike what the peer's card says; another transport could take the whole of it. */
static void a_push_that_is_refused_after_its_first_bytes_is_not_begun_anew(void **state) {
    (void)state;
    scene s;
    set_up(&s, 4, 32, 600, BIG("P"), BIG("D"));
    s.p->transport->split = true;
    s.given[0].request.bytes_per_second = s.bytes / 3;
    refused = 2;
    world_push(&s.w.p, &s.given[0], s.theirs[0]);
    world_ready(&s.w.p, s.theirs[0]);
    world_expect(&s.w.d, &s.wanted[0], &s.w.p, s.ours[0]);
    const world_outcome *failed = world_failed(&s.w, s.p, s.theirs[0][0], KVF_E_UNSUPPORTED);
    assert_int_equal(submitted_count, 1);
    assert_true(submitted[0].bytes > 0);
    char words[64];
    (void)snprintf(words, sizeof words, "failed with KVF_E_UNSUPPORTED after %llu bytes: ",
                   (unsigned long long)submitted[0].bytes);
    if (!strstr(failed->detail, words) || !strstr(failed->detail, "this memory is not taken"))
        fail_msg("%s", failed->detail);
    (void)world_failed(&s.w, s.d, s.ours[0][0], KVF_E_UNSUPPORTED);
    tear_down(&s);
}

/* Pulls for half of the time that it takes; what comes next is refused. Another transport could read everything. */
static void pull_and_refuse(scene *s, bool by_layer) {
    set_up(s, 4, 32, 600, BIG("P"), BIG("D"));
    s->d->transport->split = true;
    s->wanted[0].request.bytes_per_second = s->bytes / 2;
    s->wanted[0].request.by_layer = by_layer;
    world_hold(&s->w.p, &s->given[0], s->theirs[0]);
    world_pull(&s->w.d, &s->wanted[0], &s->w.p, s->ours[0]);
    world_run_for(&s->w, SECOND);
    refused = submitted_count + 1;
}

static void a_pull_whose_layers_are_used_is_not_begun_anew(void **state) {
    (void)state;
    scene s;
    uint32_t layers;
    pull_and_refuse(&s, true);
    assert_ok(kvf_agent_arrived(s.d, s.ours[0][0], &layers));
    assert_int_equal(layers, 2);
    const world_outcome *failed = world_failed(&s.w, s.d, s.ours[0][0], KVF_E_UNSUPPORTED);
    if (!strstr(failed->detail, "this memory is not taken"))
        fail_msg("%s", failed->detail);
    assert_null(s.d->all_sessions->past);
    (void)kvf_agent_cancel(s.p, s.theirs[0][0]);
    tear_down(&s);
}

/* The control: nobody uses what has arrived. There is no other transport in this test, so it fails all the same. */
static void a_pull_whose_layers_are_not_used_is_begun_anew(void **state) {
    (void)state;
    scene s;
    pull_and_refuse(&s, false);
    world_until(&s.w, s.d->all_sessions->past);
    (void)kvf_agent_cancel(s.d, s.ours[0][0]);
    (void)kvf_agent_cancel(s.p, s.theirs[0][0]);
    tear_down(&s);
}

/* The cap's bytes for 10 ms are less than a run, so runs are cut. */
static void runs_are_cut_where_a_cap_is_smaller(void **state) {
    (void)state;
    scene s;
    set_up(&s, 1, 32, 256, BIG("P"), BIG("D"));
    for (uint32_t b = 0; b < 16; b++) /* both sides have successive blocks, and so few runs */
        s.given[0].ids[0][b] = s.wanted[0].ids[0][b] = b;
    world_fill(&s.w, &s.w.p, &s.given[0], 3);
    s.wanted[0].request.bytes_per_second = s.bytes / 3;
    world_hold(&s.w.p, &s.given[0], s.theirs[0]);
    world_pull(&s.w.d, &s.wanted[0], &s.w.p, s.ours[0]);
    double least, most;
    (void)sample(&s, s.d, &least, &most);
    assert_true(most * 3 <= 1.05 && least * 3 >= 0.95);
    assert_true(submitted_count > 250);
    assert_true(world_stats(s.d).runs <= 16);
    assert_arrived(&s, 0);
    tear_down(&s);
}

static void a_capped_pull_outlives_its_lease_and_can_be_cancelled(void **state) {
    (void)state;
    scene s;
    set_up(&s, 4, 32, 600, BIG("P"), BIG("D"));
    s.wanted[0].request.bytes_per_second = 100;
    s.wanted[0].request.deadline_ns = 400 * SECOND;
    world_hold(&s.w.p, &s.given[0], s.theirs[0]);
    world_pull(&s.w.d, &s.wanted[0], &s.w.p, s.ours[0]);
    world_run_for(&s.w, 70 * SECOND);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_FAILED), 0);
    uint64_t bytes = submitted_bytes(0);
    assert_true(bytes > 6600 && bytes <= 7140);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0][0]));
    assert_true(world_failed(&s.w, s.d, s.ours[0][0], KVF_E_CANCELLED)->blocks_free);
    world_run_for(&s.w, SECOND);
    assert_int_equal(submitted_bytes(0), bytes);
    (void)world_failed(&s.w, s.p, s.theirs[0][0], KVF_E_CANCELLED);
    tear_down(&s);
}

static void a_pull_that_ends_while_bytes_are_under_way_keeps_its_blocks_until_they_are_here(void **state) {
    (void)state;
    scene s;
    set_up(&s, 2, 32, 100, BIG("P"), BIG("D"));
    stands = true;
    s.wanted[0].request.deadline_ns = 2 * SECOND;
    world_hold(&s.w.p, &s.given[0], s.theirs[0]);
    world_pull(&s.w.d, &s.wanted[0], &s.w.p, s.ours[0]);
    const uint64_t ticket = s.ours[0][0];
    const uint32_t block = s.wanted[0].ids[0][0];
    const world_outcome *end = world_failed(&s.w, s.d, ticket, KVF_E_TIMEOUT);
    assert_string_equal(end->detail, "the deadline has passed: the bytes had not arrived");
    assert_false(end->blocks_free);
    assert_int_equal(world_block(s.d, 0, block), KVF_BLOCK_IN_DOUBT);
    assert_fails(kvf_agent_pull_into(s.d, ticket, s.wanted[0].groups, s.wanted[0].group_count),
                 KVF_E_NOT_FOUND, "no pull has ticket");
    stands = false;
    assert_int_equal(world_next(&s.w, s.d, ticket)->kind, KVF_EVENT_BLOCKS_FREE);
    assert_int_equal(world_block(s.d, 0, block), KVF_BLOCK_FREE);
    (void)world_failed(&s.w, s.p, s.theirs[0][0], KVF_E_TIMEOUT);
    tear_down(&s);
}

static void work_until_idle(const scene *s) {
    for (bool busy = true; busy;)
        assert_ok(kvf_agent_progress(s->d, &busy));
}

/* The cap allows a byte in 2441.4 ns, so that this is the first nanosecond in which the last byte is saved. */
static void the_timeout_says_when_the_next_bytes_may_move(void **state) {
    (void)state;
    scene s;
    set_up(&s, 4, 32, 600, BIG("P"), BIG("D"));
    s.wanted[0].request.bytes_per_second = s.bytes / 3 + 1;
    world_hold(&s.w.p, &s.given[0], s.theirs[0]);
    world_pull(&s.w.d, &s.wanted[0], &s.w.p, s.ours[0]);
    world_run_for(&s.w, 100 * MS);
    work_until_idle(&s);
    uint64_t left = kvf_agent_timeout(s.d);
    assert_true(left > 0 && left <= 10 * MS + 1000);
    const uint32_t before = submitted_count;
    net_advance(s.d->pace_due - 1 - net_now());
    work_until_idle(&s);
    assert_int_equal(submitted_count, before);
    assert_int_equal(kvf_agent_timeout(s.d), 1);
    net_advance(1);
    assert_int_equal(kvf_agent_timeout(s.d), 0);
    work_until_idle(&s);
    assert_true(submitted_count > before);
    world_all_done(&s.w, &s.w.d, s.ours[0]);
    world_all_done(&s.w, &s.w.p, s.theirs[0]);
    tear_down(&s);
}

/* ---- priorities ------------------------------------------------------------------------------ */

/* Makes two requests of 8 MiB each. */
static void set_up_two(scene *s, int32_t first, int32_t second) {
    set_up(s, 16, 64, 512, ENGINE(.name = "P", .all = {.block_count = 64}),
           ENGINE(.name = "D", .all = {.block_count = 64}));
    assert_int_equal(s->bytes, 8 * MIB);
    s->wanted[0].request.priority = s->given[0].request.priority = first;
    s->wanted[1].request.priority = s->given[1].request.priority = second;
}

/* Starts the first request, which cannot end while the fabric stands, then the second. Returns the number of batches of
 * the first. */
static uint32_t begin_two(scene *s, bool pushes) {
    uint32_t firsts = 0;
    stands = true;
    for (uint32_t i = 0; i < 2; i++) {
        if (pushes) {
            world_push(&s->w.p, &s->given[i], s->theirs[i]);
            world_expect(&s->w.d, &s->wanted[i], &s->w.p, s->ours[i]);
            world_ready(&s->w.p, s->theirs[i]);
        } else {
            world_hold(&s->w.p, &s->given[i], s->theirs[i]);
            world_pull(&s->w.d, &s->wanted[i], &s->w.p, s->ours[i]);
        }
        world_run_for(&s->w, 50 * MS);
        firsts = i == 0 ? submitted_count : firsts;
    }
    return firsts;
}

static void finish_two(scene *s) {
    stands = false;
    assert_arrived(s, 0);
    assert_arrived(s, 1);
    tear_down(s);
}

static void a_lower_priority_waits_and_moves_a_little_now_and_then(bool pushes) {
    scene s;
    set_up_two(&s, 5, 0);
    uint32_t firsts = begin_two(&s, pushes);
    assert_int_equal(submitted_bytes(0), 8 * MIB); /* only the first, and all of it */
    assert_int_equal(submitted_count, firsts);
    world_run_for(&s.w, 230 * MS);
    assert_int_equal(submitted_count, firsts + 2);
    assert_int_equal(submitted_bytes(firsts), 2 * MIB);
    assert_true(submitted[firsts + 1].when - submitted[firsts].when >= 100 * MS);
    assert_true(submitted[firsts + 1].when - submitted[firsts].when < 101 * MS);
    finish_two(&s);
}

static void a_pull_of_a_lower_priority_waits(void **state) {
    (void)state;
    a_lower_priority_waits_and_moves_a_little_now_and_then(false);
}

static void a_push_of_a_lower_priority_waits(void **state) {
    (void)state;
    a_lower_priority_waits_and_moves_a_little_now_and_then(true);
}

/* The control. */
static void equal_and_higher_priorities_do_not_wait(void **state) {
    (void)state;
    static const int32_t priorities[][2] = {{0, 0}, {5, 5}, {0, 7}, {-3, 0}, {-3, -3}};
    for (size_t i = 0; i < COUNT_OF(priorities); i++) {
        scene s;
        set_up_two(&s, priorities[i][0], priorities[i][1]);
        uint32_t firsts = begin_two(&s, i % 2);
        assert_true(submitted_count > firsts);
        assert_int_equal(submitted_bytes(firsts), 8 * MIB);
        finish_two(&s);
    }
}

/* Its cap allows a byte every 20 ms, of which no more than one is saved. */
static void a_lower_priority_whose_cap_allows_a_byte_at_once_waits_as_long(void **state) {
    (void)state;
    scene s;
    set_up_two(&s, 5, 0);
    s.wanted[1].request.bytes_per_second = 50;
    uint32_t firsts = begin_two(&s, false);
    assert_int_equal(submitted_count, firsts);
    world_run_for(&s.w, 230 * MS);
    assert_int_equal(submitted_count, firsts + 2);
    assert_int_equal(submitted_bytes(firsts), 2);
    stands = false;
    assert_arrived(&s, 0);
    assert_ok(kvf_agent_cancel(s.d, s.ours[1][0]));
    (void)world_failed(&s.w, s.d, s.ours[1][0], KVF_E_CANCELLED);
    (void)world_failed(&s.w, s.p, s.theirs[1][0], KVF_E_CANCELLED);
    tear_down(&s);
}

static void the_lower_one_goes_on_when_the_higher_has_ended(void **state) {
    (void)state;
    scene s;
    set_up_two(&s, 1, -1);
    uint32_t firsts = begin_two(&s, false);
    assert_int_equal(submitted_count, firsts);
    stands = false;
    uint64_t begun = world_now();
    assert_arrived(&s, 0);
    assert_arrived(&s, 1);
    assert_true(world_now() - begun < 10 * MS);
    tear_down(&s);
}

static void a_higher_priority_that_has_used_up_its_cap_lets_others_go(void **state) {
    (void)state;
    scene s;
    set_up_two(&s, 9, 0);
    s.wanted[0].request.bytes_per_second = 4 * MIB;
    for (uint32_t i = 0; i < 2; i++) {
        world_hold(&s.w.p, &s.given[i], s.theirs[i]);
        world_pull(&s.w.d, &s.wanted[i], &s.w.p, s.ours[i]);
    }
    uint64_t begun = world_now();
    assert_arrived(&s, 1);
    assert_true(world_now() - begun < 50 * MS);
    assert_arrived(&s, 0);
    assert_true(world_now() - begun > 1900 * MS);
    assert_true(world_now() - begun < 2100 * MS);
    tear_down(&s);
}

/* Nothing that was submitted ends meanwhile, which would let the other go, too. */
static void a_lower_priority_goes_whenever_the_higher_has_used_up_its_cap(void **state) {
    (void)state;
    scene s;
    set_up_two(&s, 9, 0);
    for (uint32_t i = 0; i < 2; i++)
        s.wanted[i].request.bytes_per_second = 4 * MIB;
    for (uint32_t i = 0; i < 2; i++) {
        world_hold(&s.w.p, &s.given[i], s.theirs[i]);
        world_pull(&s.w.d, &s.wanted[i], &s.w.p, s.ours[i]);
    }
    world_run_for(&s.w, 105 * MS);
    const uint32_t before = submitted_count;
    stands = true;
    world_run_for(&s.w, 20 * MS); /* both have bytes every 10 ms */
    assert_int_equal(submitted_count, before + 4);
    for (uint32_t i = before; i < submitted_count; i += 2)
        assert_int_equal(submitted[i].when, submitted[i + 1].when);
    finish_two(&s);
}

/* Eight bytes, one per second. */
static void the_smallest_cap_there_is_moves_bytes_too(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t hold, pull;
    world_open_model(&w, attention(1, 1, 2), ENGINE(.name = "P", .all = {.block_count = 4}),
                     ENGINE(.name = "D", .all = {.block_count = 4}), NULL);
    world_request_make(&w, &w.p, "a", 1, 0, 1, &held);
    world_request_make(&w, &w.d, "a", 1, 1, 1, &wanted);
    world_fill(&w, &w.p, &held, 1);
    wanted.request.bytes_per_second = 1;
    wanted.request.way = KVF_WAY_DIRECT;
    world_hold(&w.p, &held, &hold);
    world_pull(&w.d, &wanted, &w.p, &pull);
    uint64_t begun = world_now();
    (void)world_done(&w, w.d.agents[0], pull);
    assert_in_range(world_now() - begun, 7 * SECOND, 9 * SECOND);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
    world_quiet(&w);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pull_keeps_to_its_cap),
        cmocka_unit_test(without_a_cap_a_pull_is_done_at_once),
        cmocka_unit_test(a_cap_holds_for_all_sources_of_a_pull_together),
        cmocka_unit_test(a_cap_holds_for_all_ranks_that_a_push_writes_to),
        cmocka_unit_test(ranks_that_a_push_writes_to_share_its_cap),
        cmocka_unit_test(a_push_that_is_refused_after_its_first_bytes_is_not_begun_anew),
        cmocka_unit_test(a_pull_whose_layers_are_used_is_not_begun_anew),
        cmocka_unit_test(a_pull_whose_layers_are_not_used_is_begun_anew),
        cmocka_unit_test(runs_are_cut_where_a_cap_is_smaller),
        cmocka_unit_test(a_capped_pull_outlives_its_lease_and_can_be_cancelled),
        cmocka_unit_test(the_smallest_cap_there_is_moves_bytes_too),
        cmocka_unit_test(a_pull_that_ends_while_bytes_are_under_way_keeps_its_blocks_until_they_are_here),
        cmocka_unit_test(the_timeout_says_when_the_next_bytes_may_move),
        cmocka_unit_test(a_pull_of_a_lower_priority_waits),
        cmocka_unit_test(a_push_of_a_lower_priority_waits),
        cmocka_unit_test(equal_and_higher_priorities_do_not_wait),
        cmocka_unit_test(a_lower_priority_whose_cap_allows_a_byte_at_once_waits_as_long),
        cmocka_unit_test(the_lower_one_goes_on_when_the_higher_has_ended),
        cmocka_unit_test(a_higher_priority_that_has_used_up_its_cap_lets_others_go),
        cmocka_unit_test(a_lower_priority_goes_whenever_the_higher_has_used_up_its_cap),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
