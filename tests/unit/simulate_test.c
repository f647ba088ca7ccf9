/* Simulated deployments, by their public interface: ends, times, bytes and checks. */
#include <kvferry/simulate.h>

#include "shapes.h"

#define US 1000ull
#define MS 1000000ull
#define SECOND 1000000000ull
#define LINK 10e9 /* bytes a second */
#define LATENCY (10 * US)
#define TOKEN_BYTES 131072u /* of Llama 3.1 8B: 32 layers of K and V, 8 heads of 128 elements of 2 bytes */
#define MOST_REQUESTS 4000u

typedef struct scene {
    kvf_model *model;
    kvf_engine *p, *d;
    kvf_simulated_request requests[MOST_REQUESTS];
    kvf_simulation_options options;
    kvf_simulation found;
} scene;

static kvf_engine *engine_with(const kvf_model *model, uint32_t tp, const kvf_group_spec *group) {
    kvf_engine *engine = NULL;
    const kvf_engine_spec spec = {.struct_size = sizeof spec, .tp_size = tp, .all = *group};
    assert_ok(kvf_engine_build(model, &spec, &engine));
    return engine;
}

static void open_scene(scene *s, const char *model, uint32_t p_tp, uint32_t d_tp) {
    const kvf_group_spec p = {.tokens_per_block = 16, .block_count = 512, .order = "L|BPHN"};
    const kvf_group_spec d = {.tokens_per_block = 32, .block_count = 256, .order = "L|BPHN"};
    memset(s, 0, sizeof *s);
    assert_ok(kvf_model_load(model, NULL, &s->model));
    s->p = engine_with(s->model, p_tp, &p);
    s->d = engine_with(s->model, d_tp, &d);
    s->options = (kvf_simulation_options){.struct_size = sizeof s->options,
                                          .prefill = {.engine_count = 1, .shape = s->p},
                                          .decode = {.engine_count = 1, .shape = s->d},
                                          .requests = s->requests,
                                          .link_bytes_per_second = LINK,
                                          .latency_ns = LATENCY,
                                          .seed = 1};
    s->found.struct_size = sizeof s->found;
}

static void close_scene(scene *s) {
    kvf_engine_free(s->p);
    kvf_engine_free(s->d);
    kvf_model_free(s->model);
}

static void add(scene *s, uint64_t at_ns, uint32_t prompt, uint32_t output) {
    s->requests[s->options.request_count++] = (kvf_simulated_request){at_ns, prompt, output};
}

/* Runs it, and requires that every request has one end, and that no promise was broken. */
static void simulate(scene *s) {
    assert_ok(kvf_simulate(&s->options, &s->found));
    assert_int_equal(s->found.done + s->found.failed + s->found.lost, s->options.request_count);
    assert_int_equal(s->found.foreign_runs, 0);
    assert_int_equal(s->found.left, 0);
}

static void one_request_takes_what_its_bytes_take_on_the_link(void **state) {
    scene s;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 1);
    add(&s, 0, 1000, 100);
    s.options.prefill.tokens_per_second = 10000;
    s.options.decode.tokens_per_second = 50;
    simulate(&s);
    const double wire = 1000 * (double)TOKEN_BYTES / LINK * 1e9;
    assert_int_equal(s.found.done, 1);
    assert_int_equal(s.found.bytes, 1000u * TOKEN_BYTES);
    assert_int_equal(s.found.runs, 32 * 2 * 8 * 63); /* heads of blocks of 16 tokens */
    assert_true((double)s.found.alone.worst_ns > wire - 1 && (double)s.found.alone.worst_ns < wire + 1);
    /* Beside the bytes: meeting the engine and asking for its blocks, some trips of a message. */
    assert_true(s.found.hand_over.worst_ns > s.found.alone.worst_ns + 4 * LATENCY);
    assert_true(s.found.hand_over.worst_ns < s.found.alone.worst_ns + 16 * LATENCY);
    assert_int_equal(s.found.prefill_wait.worst_ns, 0);
    assert_int_equal(s.found.until_decode.worst_ns, 100 * MS + s.found.hand_over.worst_ns);
    assert_true(s.found.simulated_ns >= s.found.until_decode.worst_ns + 2 * SECOND);
    assert_int_equal(s.found.plans, 1);
    assert_int_equal(s.found.agents, 2);
    close_scene(&s);
}

static void a_second_request_meets_nobody_any_more(void **state) {
    scene s;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 1);
    add(&s, 0, 1000, 0);
    add(&s, SECOND, 1000, 0);
    simulate(&s);
    /* ASK and its answer, and the way of the first bytes. */
    const uint64_t second = (uint64_t)(2 * s.found.hand_over.mean_ns + 0.5) - s.found.hand_over.worst_ns;
    assert_true(second > s.found.alone.worst_ns + 2 * LATENCY &&
                second < s.found.alone.worst_ns + 6 * LATENCY);
    close_scene(&s);
}

static void runs_cost_time_of_the_link(void **state) {
    scene s;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 1);
    add(&s, 0, 1000, 0);
    s.options.run_ns = 100;
    simulate(&s);
    const double wire = 1000 * (double)TOKEN_BYTES / LINK * 1e9 + 100.0 * 32 * 2 * 8 * 63;
    assert_true((double)s.found.alone.worst_ns > wire - 1 && (double)s.found.alone.worst_ns < wire + 1);
    assert_true((double)s.found.hand_over.worst_ns > wire &&
                (double)s.found.hand_over.worst_ns < 1.01 * wire);
    close_scene(&s);
}

/* One prefill rank sends to four decode engines at once: each flow has a quarter of its link. */
static void flows_share_a_link(void **state) {
    scene s;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 1);
    s.options.decode.engine_count = 4;
    for (uint32_t i = 0; i < 4; i++)
        add(&s, 0, 1000,
            1000000); /* long outputs: the next goes to another engine, as far as chance has it */
    simulate(&s);
    const double wire = 1000 * (double)TOKEN_BYTES / LINK * 1e9;
    assert_true((double)s.found.hand_over.worst_ns > 3.9 * wire);
    assert_true((double)s.found.hand_over.worst_ns < 4.1 * wire);
    assert_true(s.found.link_use > 0.97);
    close_scene(&s);
}

/* Two decode ranks read from one prefill rank: its link is the narrow one. */
static void a_rank_that_gives_to_two_is_the_narrow_one(void **state) {
    scene s;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 2);
    add(&s, 0, 1000, 0);
    simulate(&s);
    const double wire = 1000 * (double)TOKEN_BYTES / LINK * 1e9;
    assert_true((double)s.found.alone.worst_ns > wire - 1);
    assert_true((double)s.found.hand_over.worst_ns > wire &&
                (double)s.found.hand_over.worst_ns < 1.02 * wire);
    close_scene(&s);
}

static void prompts_wait_for_their_engine_and_for_blocks(void **state) {
    scene s;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 1);
    s.options.prefill.tokens_per_second = 10000;
    s.options.decode.tokens_per_second = 100;
    add(&s, 0, 5000, 1000); /* half a second, then ten in the decode engine, of whose 256 blocks it has 157 */
    add(&s, 0, 5000, 1000);
    simulate(&s);
    assert_int_equal(s.found.done, 2);
    /* Until the first is computed, and has left the prefill engine, which has blocks for one. */
    assert_true(s.found.prefill_wait.worst_ns > SECOND / 2 + 65 * MS);
    assert_true(s.found.prefill_wait.worst_ns < SECOND / 2 + 68 * MS);
    /* The second is computed half a second after the first, which goes on for ten. */
    assert_true(s.found.blocks_wait.worst_ns > 9 * SECOND && s.found.blocks_wait.worst_ns < 10 * SECOND);
    close_scene(&s);
}

/* Blocks that wait for a reader are kept alive by it for many leases. */
static void leases_last_while_blocks_are_waited_for(void **state) {
    scene s;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 1);
    s.options.decode.tokens_per_second = 10;
    s.options.lease_ns = SECOND;
    add(&s, 0, 5000, 1000);
    add(&s, 0, 5000, 1);
    simulate(&s);
    assert_int_equal(s.found.done, 2);
    assert_true(s.found.blocks_wait.worst_ns > 99 * SECOND);
    close_scene(&s);
}

/* Four chunks, each of which moves while the next is computed: the last is all that is left when the prompt is. */
static void what_is_computed_is_written_at_once(void **state) {
    scene s;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 2);
    s.options.prefill.tokens_per_second = 10000;
    s.options.push_tokens = 256;
    add(&s, 0, 1024, 0);
    simulate(&s);
    const double wire = 1024 * (double)TOKEN_BYTES / LINK * 1e9, computing = 102.4 * (double)MS;
    assert_int_equal(s.found.done, 1);
    assert_int_equal(s.found.bytes, 1024u * TOKEN_BYTES);
    assert_int_equal(s.found.runs, 32 * 2 * 8 * 64);
    assert_true((double)s.found.alone.worst_ns > wire - 1 && (double)s.found.alone.worst_ns < wire + 1);
    assert_true((double)s.found.hand_over.worst_ns > wire / 4);
    assert_true((double)s.found.hand_over.worst_ns < wire / 4 + 16 * LATENCY);
    assert_true((double)s.found.until_decode.worst_ns >= computing + wire / 4);
    assert_true((double)s.found.until_decode.worst_ns < computing + wire / 4 + 16 * LATENCY);
    close_scene(&s);
}

/* A link that is slower than the engine: nearly all is left to move when the prompt is computed. */
static void writing_does_not_make_a_link_faster(void **state) {
    scene s;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 1);
    s.options.push_tokens = 256;
    add(&s, 0, 1024, 0);
    simulate(&s);
    const double wire = 1024 * (double)TOKEN_BYTES / LINK * 1e9;
    assert_true((double)s.found.hand_over.worst_ns > wire);
    assert_true((double)s.found.hand_over.worst_ns < wire + 16 * LATENCY);
    close_scene(&s);
}

/* What is written needs blocks before it is computed. */
static void pushed_prompts_wait_for_blocks_first(void **state) {
    scene s;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 1);
    s.options.prefill.tokens_per_second = 10000;
    s.options.decode.tokens_per_second = 100;
    s.options.push_tokens = 1000;
    add(&s, 0, 5000, 1000); /* half a second, then ten in the decode engine, of whose 256 blocks it has 157 */
    add(&s, 0, 5000, 1000);
    simulate(&s);
    assert_int_equal(s.found.done, 2);
    assert_true(s.found.blocks_wait.worst_ns > 10 * SECOND && s.found.blocks_wait.worst_ns < 11 * SECOND);
    assert_int_equal(s.found.prefill_wait.worst_ns, 0);
    close_scene(&s);
}

static void draw_requests(scene *s, uint32_t count, uint64_t pause) {
    uint64_t random = 7, at = 0;
    for (uint32_t i = 0; i < count; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        at += (random >> 33) % (2 * pause);
        add(s, at, 1 + (uint32_t)(random >> 40) % 2000, (uint32_t)(random >> 50) % 50);
    }
}

/* Six engines of either role, to which something happens. */
static void open_fleets(scene *s, double link, uint32_t seed, uint32_t push_tokens) {
    open_scene(s, "llama-3.1-8b", 2, 1);
    s->options.prefill.engine_count = 6;
    s->options.decode.engine_count = 6;
    s->options.prefill.tokens_per_second = 20000;
    s->options.decode.tokens_per_second = 50;
    s->options.link_bytes_per_second = link; /* slow, so that something is under way */
    s->options.seed = seed;
    s->options.push_tokens = push_tokens;
}

static void kill_engines(uint32_t push_tokens) {
    uint64_t failed = 0, lost = 0;
    for (uint32_t seed = 1; seed <= 8; seed++) {
        scene s;
        open_fleets(&s, 1e9, seed, push_tokens);
        s.options.lease_ns = 2 * SECOND;
        s.options.killed = 10;
        s.options.restart_ns = SECOND;
        draw_requests(&s, 500, 10 * MS);
        simulate(&s);
        assert_int_equal(s.found.killed, 10);
        assert_true(s.found.done > 250);
        assert_true(s.found.simulated_ns < 60 * SECOND); /* nobody waited for a deadline */
        assert_true(s.found.failed == 0 || s.found.failure[0]);
        failed += s.found.failed;
        lost += s.found.lost;
        close_scene(&s);
    }
    assert_true(failed > 0 && lost > 0); /* otherwise nothing was tried */
}

static void engines_that_are_killed_leave_nothing_behind(void **state) {
    (void)state;
    kill_engines(0);
}

static void engines_that_are_killed_while_they_push_leave_nothing_behind(void **state) {
    (void)state;
    kill_engines(500);
}

/* Engines that are cut off for `cut_off_ns`, with leases of 12 s; what failed is added to `failed`. */
static void cut_engines_off(uint64_t cut_off_ns, uint32_t push_tokens, uint64_t *failed) {
    for (uint32_t seed = 1; seed <= 4; seed++) {
        scene s;
        open_fleets(&s, 2e8, seed, push_tokens);
        s.options.lease_ns = 12 * SECOND;
        s.options.cut_off = 5;
        s.options.cut_off_ns = cut_off_ns;
        draw_requests(&s, 500, 20 * MS + cut_off_ns / 100);
        simulate(&s);
        const uint64_t over = s.requests[499].at_ns + cut_off_ns;
        assert_int_equal(s.found.cut_off, 5);
        assert_int_equal(s.found.lost, 0);
        assert_true(s.found.done > 400);
        assert_true(s.found.simulated_ns < over + 60 * SECOND); /* nobody waited for a deadline */
        *failed += s.found.failed;
        close_scene(&s);
    }
}

static void what_is_cut_off_for_a_moment_goes_on(void **state) {
    uint64_t failed = 0;
    (void)state;
    cut_engines_off(SECOND, 0, &failed);
    cut_engines_off(SECOND, 500, &failed);
    assert_int_equal(failed, 0);
}

static void what_is_cut_off_for_long_is_told(void **state) {
    uint64_t read = 0, written = 0;
    (void)state;
    cut_engines_off(20 * SECOND, 0, &read);
    cut_engines_off(20 * SECOND, 500, &written);
    assert_true(read > 0 && written > 0); /* otherwise nothing was tried */
}

static void what_is_cut_off_until_connections_break_is_met_again(void **state) {
    uint64_t read = 0, written = 0;
    (void)state;
    cut_engines_off(70 * SECOND, 0, &read);
    cut_engines_off(70 * SECOND, 500, &written);
    assert_true(read > 0 && written > 0);
}

static void when_all_engines_of_a_role_are_dead_requests_are_lost(void **state) {
    (void)state;
    for (uint32_t push_tokens = 0; push_tokens <= 500; push_tokens += 500) {
        scene s;
        open_scene(&s, "llama-3.1-8b", 1, 1);
        s.options.killed = 40;
        s.options.restart_ns = 3 * SECOND;
        s.options.push_tokens = push_tokens;
        draw_requests(&s, 300, 20 * MS);
        simulate(&s);
        assert_true(s.found.lost > 0 && s.found.done > 0);
        close_scene(&s);
    }
}

static void equal_seeds_have_equal_courses(void **state) {
    uint64_t ends[3][4];
    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        scene s;
        open_scene(&s, "llama-3.1-8b", 2, 1);
        s.options.prefill.engine_count = s.options.decode.engine_count = 4;
        s.options.prefill.tokens_per_second = 20000;
        s.options.killed = 3;
        s.options.seed = i == 2 ? 6 : 5;
        draw_requests(&s, 300, 10 * MS);
        simulate(&s);
        ends[i][0] = s.found.done;
        ends[i][1] = s.found.simulated_ns;
        ends[i][2] = s.found.messages;
        ends[i][3] = (uint64_t)s.found.hand_over.mean_ns;
        close_scene(&s);
    }
    assert_memory_equal(ends[0], ends[1], sizeof ends[0]);
    assert_memory_not_equal(ends[0], ends[2], sizeof ends[0]);
}

/* States, windows, latents; pipeline stages; pages that all groups share. */
static void all_kinds_of_caches_are_simulated(void **state) {
    static const char *const models[] = {"gpt-oss-120b", "deepseek-v3", "jamba-1.5-mini", "qwen3-32b"};
    (void)state;
    for (uint32_t i = 0; i < 2 * COUNT_OF(models); i++) {
        scene s;
        open_scene(&s, models[i / 2], 2, 4);
        s.options.push_tokens = i % 2 * 300;
        s.options.prefill.engine_count = s.options.decode.engine_count = 3;
        s.options.prefill.tokens_per_second = 50000;
        s.options.killed = 1;
        draw_requests(&s, 60, 20 * MS);
        simulate(&s);
        assert_true(s.found.done > 30 && s.found.bytes > 0);
        close_scene(&s);
    }
}

static void plans_are_shared_by_all_engines_of_a_shape(void **state) {
    scene s;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 1);
    s.options.prefill.engine_count = 50;
    draw_requests(&s, 400, MS);
    simulate(&s);
    assert_int_equal(s.found.plans, 1);
    assert_true(s.found.sessions_most > 40);
    close_scene(&s);
}

/* ---- bad input ------------------------------------------------------------------------------- */

static bool stop_at_once(void *context, uint64_t now_ns, uint64_t ended) {
    (void)now_ns, (void)ended;
    ++*(uint32_t *)context;
    return false;
}

static void a_caller_may_end_it(void **state) {
    scene s;
    uint32_t calls = 0;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 1);
    draw_requests(&s, MOST_REQUESTS, MS);
    s.options.progress = stop_at_once;
    s.options.context = &calls;
    assert_fails(kvf_simulate(&s.options, &s.found), KVF_E_CANCELLED, "by its caller");
    assert_int_equal(calls, 1);
    close_scene(&s);
}

static void wrong_options_are_refused_by_name(void **state) {
    scene s;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 1);
    const kvf_simulation_options right = s.options;
#define REFUSED(status, ...) assert_fails(kvf_simulate(&s.options, &s.found), status, __VA_ARGS__)
    REFUSED(KVF_E_RANGE, "request_count 0");
    add(&s, 5, 10, 1);
    add(&s, 4, 10, 1);
    REFUSED(KVF_E_INVALID, "request 1 arrives before");
    s.requests[1] = (kvf_simulated_request){5, 0, 1};
    REFUSED(KVF_E_RANGE, "request 1 has no prompt");
    s.requests[1].prompt_tokens = 512 * 16 + 1;
    REFUSED(KVF_E_RANGE,
            "request 1 has 8193 tokens, 513 blocks of group full in a prefill engine; it has 512");
    s.requests[1].prompt_tokens = 10;
    s.options.prefill.engine_count = 0;
    REFUSED(KVF_E_RANGE, "prefill.engine_count is 0");
    s.options.prefill = right.prefill;
    s.options.decode.shape = NULL;
    REFUSED(KVF_E_INVALID, "decode.shape is NULL");
    s.options.decode = right.decode;
    s.options.decode.tokens_per_second = -1;
    REFUSED(KVF_E_RANGE, "decode.tokens_per_second is -1");
    s.options.decode = right.decode;
    s.options.decode.reserved[1] = 1;
    REFUSED(KVF_E_INVALID, "decode", "reserved");
    s.options.decode = right.decode;
    s.options.link_bytes_per_second = -3;
    REFUSED(KVF_E_RANGE, "link_bytes_per_second is -3");
    s.options.link_bytes_per_second = LINK;
    s.options.lease_ns = 5;
    REFUSED(KVF_E_RANGE, "lease_ns is 5");
    s.options.lease_ns = 0;
    s.options.struct_size = 0;
    REFUSED(KVF_E_INVALID, "kvf_simulation_options");
    s.options.struct_size = sizeof s.options;
    s.found.struct_size = 0;
    REFUSED(KVF_E_INVALID, "kvf_simulation");
    assert_fails(kvf_simulate(NULL, &s.found), KVF_E_INVALID, "options is NULL");
    close_scene(&s);
}

static void unlike_models_and_shared_tokens_are_refused(void **state) {
    scene s, other;
    kvf_engine *dcp = NULL;
    (void)state;
    open_scene(&s, "llama-3.1-8b", 1, 1);
    open_scene(&other, "qwen3-32b", 1, 1);
    add(&s, 0, 10, 1);
    s.options.decode.shape = other.d;
    assert_fails(kvf_simulate(&s.options, &s.found), KVF_E_MISMATCH, "");
    const kvf_engine_spec spec = {.struct_size = sizeof spec,
                                  .tp_size = 16,
                                  .dcp_size = 2,
                                  .all = {.tokens_per_block = 16, .block_count = 64}};
    assert_ok(kvf_engine_build(s.model, &spec, &dcp));
    s.options.decode.shape = dcp;
    assert_fails(kvf_simulate(&s.options, &s.found), KVF_E_UNSUPPORTED, "decode.shape", "dcp_size 1");
    kvf_engine_free(dcp);
    close_scene(&other);
    close_scene(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_request_takes_what_its_bytes_take_on_the_link),
        cmocka_unit_test(a_second_request_meets_nobody_any_more),
        cmocka_unit_test(runs_cost_time_of_the_link),
        cmocka_unit_test(flows_share_a_link),
        cmocka_unit_test(a_rank_that_gives_to_two_is_the_narrow_one),
        cmocka_unit_test(prompts_wait_for_their_engine_and_for_blocks),
        cmocka_unit_test(leases_last_while_blocks_are_waited_for),
        cmocka_unit_test(what_is_computed_is_written_at_once),
        cmocka_unit_test(writing_does_not_make_a_link_faster),
        cmocka_unit_test(pushed_prompts_wait_for_blocks_first),
        cmocka_unit_test(engines_that_are_killed_leave_nothing_behind),
        cmocka_unit_test(engines_that_are_killed_while_they_push_leave_nothing_behind),
        cmocka_unit_test(what_is_cut_off_for_a_moment_goes_on),
        cmocka_unit_test(what_is_cut_off_for_long_is_told),
        cmocka_unit_test(what_is_cut_off_until_connections_break_is_met_again),
        cmocka_unit_test(when_all_engines_of_a_role_are_dead_requests_are_lost),
        cmocka_unit_test(equal_seeds_have_equal_courses),
        cmocka_unit_test(all_kinds_of_caches_are_simulated),
        cmocka_unit_test(plans_are_shared_by_all_engines_of_a_shape),
        cmocka_unit_test(a_caller_may_end_it),
        cmocka_unit_test(wrong_options_are_refused_by_name),
        cmocka_unit_test(unlike_models_and_shared_tokens_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
