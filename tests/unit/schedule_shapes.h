/*
 * A schedule to test, and short names for its calls. Its engine is "here", with a model of one token group and 4 tokens
 * a block unless a test says otherwise; the request is "r" with 10 tokens, whose cache the engine "there" has under the
 * name "x".
 */
#ifndef KVF_TEST_SCHEDULE_SHAPES_H
#define KVF_TEST_SCHEDULE_SHAPES_H

#include <kvferry/schedule.h>

#include "shapes.h"

#define S UINT64_C(1000000000)

typedef struct fixture {
    kvf_model *model;
    kvf_schedule *s;
} fixture;

static const uint32_t FOUR_EACH[] = {4, 4};

static inline fixture schedule_with(kvf_model *model, kvf_schedule_options options) {
    fixture f = {.model = model};
    options.struct_size = sizeof options;
    options.model = model;
    options.tokens_per_block = FOUR_EACH;
    options.engine = "here";
    options.endpoint = "tcp://here:1";
    options.incarnation = 0xab;
    assert_ok(kvf_schedule_create(&options, &f.s));
    return f;
}

static inline fixture schedule_of(kvf_model *model) {
    return schedule_with(model, (kvf_schedule_options){0});
}

static inline fixture simple(void) {
    return schedule_of(latent(2));
}

static inline void done(const fixture *f) {
    kvf_schedule_free(f->s);
    kvf_model_free(f->model);
}

static const kvf_request_key R = {{"r", 1}, 0};

static inline kvf_transfer_params there(void) {
    return (kvf_transfer_params){.struct_size = sizeof(kvf_transfer_params),
                                 .engine = "there",
                                 .endpoint = "tcp://there:2",
                                 .public_key = "its key",
                                 .id = {"x", 1},
                                 .tokens = 10};
}

static inline kvf_schedule_request request(void) {
    return (kvf_schedule_request){
        .struct_size = sizeof(kvf_schedule_request), .id = {"r", 1}, .prompt_tokens = 10};
}

static inline uint64_t add_loading(const fixture *f, kvf_transfer_params source) {
    kvf_schedule_request r = request();
    uint64_t generation;
    r.source = &source;
    assert_ok(kvf_schedule_add(f->s, &r, 0, &generation));
    return generation;
}

static inline uint64_t add_serving(const fixture *f, bool push) {
    kvf_schedule_request r = request();
    uint64_t generation;
    r.serves = true;
    r.push = push;
    assert_ok(kvf_schedule_add(f->s, &r, 0, &generation));
    return generation;
}

static inline uint64_t match(const fixture *f, uint64_t computed, uint64_t now) {
    uint64_t tokens = 12345;
    assert_ok(kvf_schedule_match(f->s, &R, computed, now, &tokens));
    return tokens;
}

static const uint32_t IDS[] = {7, 3, 5};
static const kvf_block_table TABLE = {IDS, 3, 0};

static inline bool allocate(const fixture *f, uint64_t computed, uint64_t load) {
    bool waits = false;
    assert_ok(kvf_schedule_allocated(f->s, &R, &TABLE, 1, computed, load, 0, &waits));
    return waits;
}

static inline kvf_schedule_end finish(const fixture *f, uint64_t tokens) {
    kvf_schedule_end end = {.struct_size = sizeof end};
    assert_ok(kvf_schedule_finished(f->s, &R, &TABLE, 1, tokens, 100 * S, &end));
    return end;
}

static inline bool aborted(const fixture *f) {
    bool is_free = false;
    assert_ok(kvf_schedule_abort(f->s, &R, &is_free));
    return is_free;
}

static inline bool preempted(const fixture *f) {
    bool is_free = false;
    assert_ok(kvf_schedule_preempted(f->s, &R, &is_free));
    return is_free;
}

/* Takes the instructions, which must be of these kinds, and returns them. */
#define TAKE(f, ...)                                                                                         \
    take(f, (const int[]){__VA_ARGS__}, COUNT_OF(((const int[]){__VA_ARGS__})), __FILE__, __LINE__)
#define TAKE_NOTHING(f) take(f, NULL, 0, __FILE__, __LINE__)

static const kvf_instruction *take(const fixture *f, const int *kinds, size_t count, const char *file,
                                   int line) {
    const kvf_instruction *list;
    size_t got;
    assert_ok(kvf_schedule_take(f->s, &list, &got));
    bool same = got == count;
    for (size_t i = 0; i < count && same; i++)
        same = (int)list[i].kind == kinds[i] && (list[i].cancels != 0) == (kinds[i] == KVF_INSTRUCT_CANCEL);
    if (!same) {
        for (size_t i = 0; i < got; i++)
            print_error("instruction %zu is %d, of %d\n", i, (int)list[i].kind, (int)list[i].cancels);
        _fail(file, line);
    }
    return list;
}

static inline kvf_schedule_news update(const fixture *f, kvf_aggregate aggregate) {
    aggregate.struct_size = sizeof aggregate;
    kvf_schedule_news news = {.struct_size = sizeof news};
    assert_ok(kvf_schedule_update(f->s, &aggregate, &news));
    return news;
}

static inline kvf_schedule_news received(const fixture *f, uint64_t generation) {
    kvf_request_key key = {{"r", 1}, generation};
    return update(f, (kvf_aggregate){.received = &key, .received_count = 1});
}

static inline kvf_schedule_news sent(const fixture *f, uint64_t generation) {
    kvf_request_key key = {{"r", 1}, generation};
    return update(f, (kvf_aggregate){.sent = &key, .sent_count = 1});
}

/* Reports a load as failed: the named blocks, or all if none are named. */
static inline kvf_schedule_news failed(const fixture *f, uint64_t generation, const kvf_group_block *blocks,
                                       size_t count) {
    kvf_request_key key = {{"r", 1}, generation};
    return update(f, (kvf_aggregate){.received = &key,
                                     .received_count = 1,
                                     .failed = &key,
                                     .failed_count = count ? 0 : 1,
                                     .invalid = blocks,
                                     .invalid_count = count});
}

static inline kvf_schedule_counts counts(const fixture *f) {
    kvf_schedule_counts c = {.struct_size = sizeof c};
    kvf_schedule_count(f->s, &c);
    return c;
}

static inline void assert_group(const kvf_instruction *i, uint32_t group, uint64_t begin, uint64_t end,
                                const uint32_t *ids, uint32_t count) {
    assert_true(group < i->group_count);
    const kvf_group_steps *g = &i->groups[group];
    assert_int_equal(g->begin, begin);
    assert_int_equal(g->end, end);
    assert_int_equal(g->table.count, count);
    assert_memory_equal(g->table.ids, ids, count * sizeof *ids);
}

static inline void assert_bytes(const void *data, size_t size, const char *text) {
    assert_int_equal(size, strlen(text));
    assert_memory_equal(data, text, size);
}

static inline uint64_t begin_load(const fixture *f, uint64_t computed) {
    uint64_t generation = add_loading(f, there());
    assert_true(allocate(f, computed, 10 - computed));
    TAKE(f, KVF_INSTRUCT_PULL);
    return generation;
}

#endif
