/*
 * Small models, engines and requests for the tests of shard, plan and request, and the comparisons that those tests
 * share.
 *
 * Sizes are chosen to be computed by hand: a cell of `elements` bf16 elements has twice as many bytes, so the
 * usual 4 elements make 8 bytes.
 */
#ifndef KVF_TEST_SHAPES_H
#define KVF_TEST_SHAPES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <kvferry/request.h>

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

/* ---- refusals -------------------------------------------------------------------------------- */

/** The call must give `status`, and its detail text must have all of these words. */
#define assert_fails(call, status, ...)                                                                      \
    check_refusal((call), (status), (const char *[]){__VA_ARGS__, NULL}, __FILE__, __LINE__)

/** The call must succeed; otherwise the test shows its detail text. */
#define assert_ok(call) check_success((call), __FILE__, __LINE__)

static inline void check_refusal(kvf_status got, kvf_status wanted, const char *const *words,
                                 const char *file, int line) {
    if (got != wanted) {
        print_error("wanted %s, got %s: %s\n", kvf_status_name(wanted), kvf_status_name(got),
                    got ? kvf_error_detail() : "");
        _fail(file, line);
    }
    for (; *words; words++) {
        if (!strstr(kvf_error_detail(), *words)) {
            print_error("\"%s\" is not in the detail \"%s\"\n", *words, kvf_error_detail());
            _fail(file, line);
        }
    }
}

static inline void check_success(kvf_status got, const char *file, int line) {
    if (got == KVF_OK)
        return;
    print_error("%s: %s\n", kvf_status_name(got), kvf_error_detail());
    _fail(file, line);
}

/* ---- models ---------------------------------------------------------------------------------- */

#define PART(...) ((kvf_part_desc){.dtype = KVF_DTYPE_BF16, __VA_ARGS__})

static inline kvf_model *model_of(uint32_t layers, const kvf_group_desc *groups, uint32_t count) {
    kvf_model_desc desc = {
        .struct_size = sizeof desc, .layer_count = layers, .groups = groups, .group_count = count};
    kvf_model *model = NULL;
    assert_ok(kvf_model_create(&desc, &model));
    return model;
}

/** One group over all layers. */
static inline kvf_model *one_group(uint32_t layers, kvf_group_desc group) {
    uint32_t all[256];
    assert_true(layers <= COUNT_OF(all));
    for (uint32_t i = 0; i < layers; i++)
        all[i] = i;
    group.layers = all;
    group.layer_count = layers;
    return model_of(layers, &group, 1);
}

/** Group "full": K and V of `heads` heads, cells of `elements` elements. */
static inline kvf_model *attention(uint32_t layers, uint32_t heads, uint32_t elements) {
    kvf_part_desc parts[] = {PART(.name = "k", .units = heads, .cell_elements = elements),
                             PART(.name = "v", .units = heads, .cell_elements = elements)};
    return one_group(layers, (kvf_group_desc){.name = "full", .parts = parts, .part_count = 2});
}

/** One part of one unit with cells of 8 bytes, on every rank. `group` gives name, window and chunk. */
static inline kvf_model *latent_of(uint32_t layers, kvf_group_desc group) {
    kvf_part_desc part = PART(.name = "latent", .units = 1, .cell_elements = 4, .tp_rule = KVF_TP_REPLICATE);
    group.parts = &part;
    group.part_count = 1;
    return one_group(layers, group);
}

static inline kvf_model *latent(uint32_t layers) {
    return latent_of(layers, (kvf_group_desc){.name = "mla"});
}

/** Group "csa" of one layer: a latent for every `tokens` tokens. */
static inline kvf_model *entries_of(uint32_t tokens) {
    return latent_of(1, (kvf_group_desc){.name = "csa", .tokens_per_step = tokens});
}

/**
 * Three layers as in DeepSeek V4: "swa", a latent of every layer with a window of 24 tokens; "csa", a latent and an
 * indexer of layers 0 and 2 with an entry for 4 tokens; "hca", a latent of layer 1 with an entry for 32.
 */
static inline kvf_model *compressed(void) {
    static const uint32_t all[] = {0, 1, 2}, even[] = {0, 2}, odd[] = {1};
    kvf_part_desc parts[] = {
        PART(.name = "latent", .units = 1, .cell_elements = 4, .tp_rule = KVF_TP_REPLICATE),
        PART(.name = "indexer", .units = 1, .cell_elements = 2, .tp_rule = KVF_TP_REPLICATE)};
    kvf_group_desc groups[] = {{.name = "swa",
                                .window_tokens = 24,
                                .layers = all,
                                .layer_count = 3,
                                .parts = parts,
                                .part_count = 1},
                               {.name = "csa",
                                .tokens_per_step = 4,
                                .layers = even,
                                .layer_count = 2,
                                .parts = parts,
                                .part_count = 2},
                               {.name = "hca",
                                .tokens_per_step = 32,
                                .layers = odd,
                                .layer_count = 1,
                                .parts = parts,
                                .part_count = 1}};
    return model_of(3, groups, 3);
}

/**
 * A state for each layer: conv.x of 4 channels, conv.B and conv.C of 2, three steps of 2 bytes each, in one
 * tensor; and after them ssm, 2 heads of 32 bytes.
 */
static inline void fill_state_parts(kvf_part_desc parts[4]) {
    parts[0] = PART(.name = "conv.x", .units = 4, .cell_elements = 1, .rows_per_step = 3);
    parts[1] = PART(.name = "conv.B", .units = 2, .cell_elements = 1, .rows_per_step = 3);
    parts[2] = PART(.name = "conv.C", .units = 2, .cell_elements = 1, .rows_per_step = 3);
    parts[3] = PART(.name = "ssm", .units = 2, .cell_elements = 16, .tensor = 1);
}

/** Group "ssm" over all layers. */
static inline kvf_model *state_model(uint32_t layers) {
    kvf_part_desc parts[4];
    fill_state_parts(parts);
    return one_group(
        layers, (kvf_group_desc){.name = "ssm", .kind = KVF_GROUP_STATE, .parts = parts, .part_count = 4});
}

/** Layers 0 and 2: "full", K and V of `heads` heads, 8 bytes a cell. Layers 1 and 3: "ssm". */
static inline kvf_model *hybrid(uint32_t heads) {
    static const uint32_t even[] = {0, 2}, odd[] = {1, 3};
    kvf_part_desc kv[] = {PART(.name = "k", .units = heads, .cell_elements = 4),
                          PART(.name = "v", .units = heads, .cell_elements = 4)};
    kvf_part_desc state[4];
    fill_state_parts(state);
    kvf_group_desc groups[] = {
        {.name = "full", .layers = even, .layer_count = 2, .parts = kv, .part_count = 2},
        {.name = "ssm",
         .kind = KVF_GROUP_STATE,
         .layers = odd,
         .layer_count = 2,
         .parts = state,
         .part_count = 4}};
    return model_of(4, groups, 2);
}

/* ---- engines, plans, requests ---------------------------------------------------------------- */

#define ENGINE(...) (&(const kvf_engine_spec){.struct_size = sizeof(kvf_engine_spec), __VA_ARGS__})

/** How many steps a logical block of a group holds. */
static inline uint32_t steps_per_block(const kvf_shard *shard, uint32_t group) {
    return kvf_shard_get(shard)->groups[group].tokens_per_block /
           kvf_model_group(kvf_shard_model(shard), group)->tokens_per_step;
}

/** Which steps of a group a rank keeps. */
static inline kvf_token_share step_share(const kvf_shard *shard, uint32_t group) {
    kvf_token_share share = kvf_shard_get(shard)->groups[group].tokens;
    if (share.count > 1)
        share.width /= kvf_model_group(kvf_shard_model(shard), group)->tokens_per_step;
    return share;
}

static inline kvf_engine *engine_of(const kvf_model *model, const kvf_engine_spec *spec) {
    kvf_engine *engine = NULL;
    assert_ok(kvf_engine_build(model, spec, &engine));
    return engine;
}

/** A model with an engine on either side. */
typedef struct pair {
    kvf_model *model;
    kvf_engine *local, *remote;
} pair;

/** The pair owns `model`. */
static inline pair pair_of(kvf_model *model, const kvf_engine_spec *local, const kvf_engine_spec *remote) {
    return (pair){model, engine_of(model, local), engine_of(model, remote)};
}

static inline void free_pair(const pair *p) {
    kvf_engine_free(p->local);
    kvf_engine_free(p->remote);
    kvf_model_free(p->model);
}

static inline kvf_plan *plan_with(const pair *p, uint32_t local_rank, const kvf_plan_options *options) {
    kvf_plan *plan = NULL;
    assert_ok(kvf_plan_build(kvf_engine_shard(p->local, local_rank), p->remote, options, &plan));
    return plan;
}

static inline kvf_plan *plan_of(const pair *p, uint32_t local_rank) {
    return plan_with(p, local_rank, NULL);
}

/* The n-th of the rules that move whole blocks, or of those that move steps; NULL past the last. */
static inline const kvf_copy_rule *nth_rule(const kvf_plan *plan, bool whole_blocks, uint32_t n) {
    for (uint32_t i = 0; i < kvf_plan_rule_count(plan); i++) {
        const kvf_copy_rule *rule = kvf_plan_get_rule(plan, i);
        if (rule->whole_blocks == whole_blocks && n-- == 0)
            return rule;
    }
    return NULL;
}

static inline const kvf_copy_rule *step_rule(const kvf_plan *plan, uint32_t n) {
    return nth_rule(plan, false, n);
}

static inline uint32_t step_rule_count(const kvf_plan *plan) {
    uint32_t count = 0;
    while (step_rule(plan, count))
        count++;
    return count;
}

static inline kvf_request *request_of(const kvf_plan *plan) {
    kvf_request *request = NULL;
    assert_ok(kvf_request_create(plan, &request));
    return request;
}

/** A block table that begins with the sequence. */
#define TABLE(...)                                                                                           \
    ((kvf_block_table){(const uint32_t[]){__VA_ARGS__}, COUNT_OF(((const uint32_t[]){__VA_ARGS__})), 0})

/** A block table whose first entry is block `first` of the sequence. */
#define TABLE_FROM(first, ...)                                                                               \
    ((kvf_block_table){(const uint32_t[]){__VA_ARGS__}, COUNT_OF(((const uint32_t[]){__VA_ARGS__})), first})

static inline kvf_range range(uint32_t begin, uint32_t end) {
    return (kvf_range){begin, end};
}

/** A placement of cells in one piece. */
#define PLACED(where, first, block, row, unit)                                                               \
    ((kvf_placement){.region = (where),                                                                      \
                     .offset = (first),                                                                      \
                     .block_stride = (block),                                                                \
                     .row_stride = (row),                                                                    \
                     .unit_stride = (unit)})

/** A request of one local rank, and the plan and engines that it is made from. */
typedef struct asked_request {
    pair p;
    kvf_plan *plan;
    kvf_request *request;
} asked_request;

/** Makes a request, which owns `model`. */
static inline asked_request asked_with(kvf_model *model, const kvf_engine_spec *local,
                                       const kvf_engine_spec *remote, uint32_t local_rank,
                                       const kvf_plan_options *options) {
    asked_request a = {.p = pair_of(model, local, remote)};
    a.plan = plan_with(&a.p, local_rank, options);
    a.request = request_of(a.plan);
    return a;
}

static inline asked_request asked_between(kvf_model *model, const kvf_engine_spec *local,
                                          const kvf_engine_spec *remote, uint32_t local_rank) {
    return asked_with(model, local, remote, local_rank, NULL);
}

static inline void free_asked(const asked_request *a) {
    kvf_request_free(a->request);
    kvf_plan_free(a->plan);
    free_pair(&a->p);
}

/** Sets the request of a model with one group. */
static inline kvf_status set_one(const asked_request *a, kvf_block_table local, kvf_block_table remote,
                                 uint64_t begin, uint64_t end) {
    kvf_group_request group = {local, remote, begin, end};
    return kvf_request_set(a->request, &group, 1);
}

/* ---- comparing ------------------------------------------------------------------------------- */

#define assert_range(got, wanted_begin, wanted_end)                                                          \
    do {                                                                                                     \
        const kvf_range got_range = (got);                                                                   \
        assert_int_equal(got_range.begin, wanted_begin);                                                     \
        assert_int_equal(got_range.end, wanted_end);                                                         \
    } while (0)

static inline void assert_placement(const kvf_shard *shard, uint32_t group, uint32_t layer, uint32_t part,
                                    kvf_placement wanted) {
    const kvf_placement *got = kvf_shard_placement(shard, group, layer, part);
    assert_non_null(got);
    assert_int_equal(got->region, wanted.region);
    assert_int_equal(got->offset, wanted.offset);
    assert_int_equal(got->block_stride, wanted.block_stride);
    assert_int_equal(got->row_stride, wanted.row_stride);
    assert_int_equal(got->unit_stride, wanted.unit_stride);
    assert_int_equal(got->piece_stride, wanted.piece_stride);
    assert_int_equal(got->pieces, wanted.pieces ? wanted.pieces : 1);
}

static inline void print_runs(const char *whose, const kvf_run *runs, size_t count) {
    print_error("%s:\n", whose);
    for (size_t i = 0; i < count; i++)
        print_error("  local %u+%llu, remote %u+%llu, %llu bytes\n", runs[i].local_region,
                    (unsigned long long)runs[i].local_offset, runs[i].remote_region,
                    (unsigned long long)runs[i].remote_offset, (unsigned long long)runs[i].bytes);
}

static inline bool same_runs(const kvf_run *a, const kvf_run *b, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (a[i].local_offset != b[i].local_offset || a[i].remote_offset != b[i].remote_offset ||
            a[i].bytes != b[i].bytes || a[i].local_region != b[i].local_region ||
            a[i].remote_region != b[i].remote_region)
            return false;
    return true;
}

static inline void check_runs(const kvf_request *request, uint32_t source, const kvf_run *wanted,
                              size_t count, const char *file, int line) {
    kvf_run got[128];
    kvf_run_cursor cursor;
    kvf_run_cursor_start(&cursor, request, source);
    size_t n = kvf_run_cursor_next(&cursor, got, COUNT_OF(got));
    bool more = kvf_run_cursor_next(&cursor, &(kvf_run){0}, 1) != 0;
    if (n != count || more || !same_runs(got, wanted, count)) {
        print_runs("wanted", wanted, count);
        print_runs("got", got, n);
        _fail(file, line);
    }
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++)
        bytes += wanted[i].bytes;
    if (kvf_request_run_count(request, source) != count || kvf_request_bytes(request, source) != bytes) {
        print_error("run_count is %llu, bytes is %llu\n",
                    (unsigned long long)kvf_request_run_count(request, source),
                    (unsigned long long)kvf_request_bytes(request, source));
        _fail(file, line);
    }
}

/** All runs of one source, in order: {local offset, remote offset, bytes, local region, remote region}. */
#define assert_runs(request, source, ...)                                                                    \
    check_runs((request), (source), (const kvf_run[]){__VA_ARGS__},                                          \
               COUNT_OF(((const kvf_run[]){__VA_ARGS__})), __FILE__, __LINE__)

#define assert_no_runs(request, source) check_runs((request), (source), NULL, 0, __FILE__, __LINE__)

/* ---- memory ---------------------------------------------------------------------------------- */

/** Counts what the library allocates, and can refuse one allocation. */
typedef struct memory_count {
    size_t calls;   /* calls of allocate and resize */
    size_t live;    /* allocations not yet released */
    size_t fail_at; /* which call, counted from 1, is refused; 0: none */
    size_t largest; /* the most bytes that were asked for at once */
} memory_count;

static inline bool refuses(memory_count *m, size_t bytes) {
    m->largest = bytes > m->largest ? bytes : m->largest;
    return ++m->calls == m->fail_at;
}

static inline void *counted_allocate(void *context, size_t bytes) {
    memory_count *m = context;
    if (refuses(m, bytes))
        return NULL;
    m->live++;
    return malloc(bytes);
}

static inline void *counted_resize(void *context, void *memory, size_t bytes) {
    memory_count *m = context;
    if (refuses(m, bytes))
        return NULL;
    m->live += memory == NULL;
    return realloc(memory, bytes);
}

static inline void counted_release(void *context, void *memory) {
    ((memory_count *)context)->live -= memory != NULL;
    free(memory);
}

static inline void count_memory(memory_count *m) {
    *m = (memory_count){0};
    kvf_allocator allocator = {counted_allocate, counted_resize, counted_release, m};
    assert_ok(kvf_set_allocator(&allocator));
}

static inline int stop_counting_memory(void **state) {
    (void)state;
    return (int)kvf_set_allocator(NULL);
}

/**
 * Runs `make(subject)` once for each of its allocations, with that allocation refused. It must report KVF_E_NOMEM, or
 * succeed without that memory, and leave nothing allocated. `make` frees what it made.
 */
static inline void survive_every_refusal(memory_count *m, kvf_status (*make)(void *subject), void *subject) {
    size_t live = m->live;
    m->calls = m->fail_at = 0;
    assert_ok(make(subject));
    size_t calls = m->calls, refused = 0;
    assert_int_equal(m->live, live);
    assert_true(calls > 0);
    for (size_t n = 1; n <= calls; n++) {
        m->calls = 0;
        m->fail_at = n;
        kvf_status status = make(subject);
        m->fail_at = 0;
        if (status)
            check_refusal(status, KVF_E_NOMEM, (const char *[]){"no memory for", NULL}, __FILE__, __LINE__);
        refused += status != KVF_OK;
        assert_int_equal(m->live, live);
    }
    assert_true(refused > 0);
}

#endif
