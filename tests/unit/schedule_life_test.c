/*
 * The schedule and the aggregator together, with workers that are late, repeat reports and are silent for a step: in
 * thousands of requests no block may be given back while a worker can touch it, and each must be given back once.
 */
#include <kvferry/schedule.h>

#include "schedule_shapes.h"

enum { IDS_IN_USE = 5, WORKERS = 3, LIVES = 20000, STEPS = 30000 };

/* The state of a request as the engine sees it. */
typedef enum phase { NOWHERE, QUEUED, LOADING, RUNNING } phase;

/* What a worker was told to do for a request and has not reported as done. */
typedef struct jobs {
    bool load, serve;
} jobs;

typedef struct world {
    kvf_schedule *s;
    kvf_aggregator *a;
    uint64_t random;
    phase phases[IDS_IN_USE];
    uint64_t generations[IDS_IN_USE];
    jobs todo[WORKERS][LIVES];         /* indexed by generation */
    jobs kept[LIVES];                  /* whose blocks the engine may not use again yet */
    char ids[LIVES];                   /* the id of each generation */
    bool loaded[LIVES], failed[LIVES]; /* failed: a worker has reported a failure */
    bool serves[LIVES], pushed[LIVES]; /* pushed: the workers were told to */
    size_t loads, failures, freed;
} world;

static uint64_t draw(world *w, uint64_t below) {
    w->random ^= w->random << 13;
    w->random ^= w->random >> 7;
    w->random ^= w->random << 17;
    return w->random % below;
}

static kvf_request_key key_of(const world *w, uint64_t generation) {
    return (kvf_request_key){{&w->ids[generation], 1}, generation};
}

static bool anybody_at(const world *w, uint64_t generation, bool load) {
    for (int i = 0; i < WORKERS; i++)
        if (load ? w->todo[i][generation].load : w->todo[i][generation].serve)
            return true;
    return false;
}

/* ---- the engine
 * --------------------------------------------------------------------------------------------
 */

static void arrive(world *w, int n) {
    kvf_transfer_params source = there();
    kvf_schedule_request r = request();
    char id = (char)n; /* zero is one of the ids */
    r.id = (kvf_request_id){&id, 1};
    if (draw(w, 3))
        r.source = &source;
    r.serves = draw(w, 2);
    r.push = draw(w, 2);
    source.push = draw(w, 4) == 0;
    assert_ok(kvf_schedule_add(w->s, &r, 0, &w->generations[n]));
    assert_true(w->generations[n] < LIVES);
    w->ids[w->generations[n]] = id;
    w->serves[w->generations[n]] = r.serves;
    w->phases[n] = QUEUED;
}

static void allocate_blocks(world *w, int n) {
    kvf_request_key key = key_of(w, w->generations[n]);
    uint64_t tokens, computed = draw(w, 3) * 5;
    bool waits;
    assert_ok(kvf_schedule_match(w->s, &key, computed, 0, &tokens));
    assert_ok(kvf_schedule_allocated(w->s, &key, &TABLE, 1, computed, tokens, 0, &waits));
    assert_int_equal(waits, tokens > 0);
    w->phases[n] = waits ? LOADING : RUNNING;
}

/* The schedule has told the engine whether the blocks of a request are free. */
static void blocks_are(world *w, uint64_t generation, bool free) {
    jobs at = {anybody_at(w, generation, true), anybody_at(w, generation, false)};
    if (free) {
        /* Workers may still use blocks that the request had before it was preempted. */
        assert_false(at.load && !w->kept[generation].load);
        assert_false(at.serve && !w->kept[generation].serve);
        return;
    }
    w->kept[generation].load |= at.load;
    w->kept[generation].serve |= at.serve;
}

static void lose(world *w, int n, bool aborts) {
    kvf_request_key key = key_of(w, w->generations[n]);
    bool is_free;
    if (aborts)
        assert_ok(kvf_schedule_abort(w->s, &key, &is_free));
    else
        assert_ok(kvf_schedule_preempted(w->s, &key, &is_free));
    blocks_are(w, w->generations[n], is_free);
    w->phases[n] = aborts ? NOWHERE : QUEUED;
}

static void finish_request(world *w, int n) {
    uint64_t generation = w->generations[n];
    kvf_request_key key = key_of(w, generation);
    kvf_schedule_end end = {.struct_size = sizeof end};
    assert_ok(kvf_schedule_finished(w->s, &key, &TABLE, 1, 10, 0, &end));
    w->phases[n] = NOWHERE;
    blocks_are(w, generation, !end.keep);
    /* A consumer may not have taken yet what the request serves. */
    bool over = w->pushed[generation] && !anybody_at(w, generation, false);
    w->kept[generation].serve |= w->serves[generation] && !over;
}

static void push_early(world *w, int n) {
    kvf_request_key key = key_of(w, w->generations[n]);
    kvf_status status = kvf_schedule_push(w->s, &key, &TABLE, 1, 10);
    /* refused: the request is not to be pushed, or is pushed already */
    assert_true(status == KVF_OK || status == KVF_E_INVALID);
}

static void live(world *w) {
    int n = (int)draw(w, IDS_IN_USE);
    switch (w->phases[n]) {
    case NOWHERE:
        arrive(w, n);
        break;
    case QUEUED:
        if (draw(w, 5) == 0)
            lose(w, n, true);
        else
            allocate_blocks(w, n);
        break;
    case LOADING:
        if (draw(w, 4) == 0)
            lose(w, n, draw(w, 2));
        break;
    case RUNNING:
        if (draw(w, 3) == 0)
            lose(w, n, draw(w, 2));
        else if (draw(w, 3) == 0)
            push_early(w, n);
        else
            finish_request(w, n);
        break;
    }
}

/* ---- the workers
 * -------------------------------------------------------------------------------------------
 */

static void give_instructions(world *w) {
    const kvf_instruction *list;
    size_t count;
    assert_ok(kvf_schedule_take(w->s, &list, &count));
    for (size_t i = 0; i < count; i++)
        for (int worker = 0; worker < WORKERS; worker++) {
            jobs *todo = &w->todo[worker][list[i].request.generation];
            if (list[i].kind == KVF_INSTRUCT_PULL || list[i].kind == KVF_INSTRUCT_EXPECT) {
                assert_false(todo->load);
                todo->load = true;
            } else if (list[i].kind == KVF_INSTRUCT_HOLD || list[i].kind == KVF_INSTRUCT_PUSH) {
                assert_false(todo->serve);
                todo->serve = true;
                w->pushed[list[i].request.generation] |= list[i].kind == KVF_INSTRUCT_PUSH;
            }
        }
}

typedef struct report {
    kvf_worker_output output;
    kvf_request_key sent[64], received[64], failed[64];
} report;

/* Reports some of the worker's jobs as done, and now and then an old load again. */
static const kvf_worker_output *report_of(world *w, int worker, report *r, uint64_t newest, bool all) {
    memset(r, 0, sizeof *r);
    r->output = (kvf_worker_output){
        .struct_size = sizeof r->output, .sent = r->sent, .received = r->received, .failed = r->failed};
    uint64_t oldest = newest > 60 ? newest - 60 : 1;
    for (uint64_t g = oldest; g <= newest; g++) {
        jobs *todo = &w->todo[worker][g];
        bool again = !all && draw(w, 200) == 0;
        if ((todo->load && (all || draw(w, 3) == 0)) || (again && w->loaded[g])) {
            if (todo->load && draw(w, 8) == 0) {
                r->failed[r->output.failed_count++] = key_of(w, g);
                w->failed[g] = true;
            }
            r->received[r->output.received_count++] = key_of(w, g);
            todo->load = false;
        }
        if (todo->serve && (all || draw(w, 3) == 0)) {
            r->sent[r->output.sent_count++] = key_of(w, g);
            todo->serve = false;
        }
    }
    return &r->output;
}

static void hear(world *w, const kvf_schedule_news *news) {
    for (size_t i = 0; i < news->loaded_count; i++) {
        const kvf_loaded *l = &news->loaded[i];
        uint64_t g = l->request.generation;
        int n = *(const unsigned char *)l->request.id.data;
        assert_int_equal(w->generations[n], g);
        assert_int_equal(w->phases[n], LOADING);
        assert_false(anybody_at(w, g, true) || w->loaded[g]);
        assert_int_equal(l->outcome, w->failed[g] ? KVF_LOADED_IN_PART : KVF_LOADED);
        w->loaded[g] = true;
        w->phases[n] = RUNNING;
        w->loads++;
        w->failures += w->failed[g];
    }
    for (size_t i = 0; i < news->freed_count; i++) {
        uint64_t g = news->freed[i].request.generation;
        bool *kept = news->freed[i].of_load ? &w->kept[g].load : &w->kept[g].serve;
        assert_true(*kept); /* freed once, and only if it was kept */
        assert_false(anybody_at(w, g, news->freed[i].of_load));
        *kept = false;
        w->freed++;
    }
}

static void work(world *w, uint64_t newest, bool all) {
    static report reports[WORKERS];
    const kvf_worker_output *outputs[WORKERS];
    uint32_t selected = (uint32_t)draw(w, WORKERS);
    bool silent = !all && draw(w, 6) == 0; /* the selected worker, and perhaps others */
    for (int worker = 0; worker < WORKERS; worker++) {
        bool missing = silent && ((uint32_t)worker == selected || draw(w, 2));
        outputs[worker] = missing ? NULL : report_of(w, worker, &reports[worker], newest, all);
    }
    kvf_aggregate sum = {.struct_size = sizeof sum};
    kvf_schedule_news news = {.struct_size = sizeof news};
    assert_ok(kvf_aggregator_step(w->a, outputs, WORKERS, selected, &sum));
    assert_ok(kvf_schedule_update(w->s, &sum, &news));
    hear(w, &news);
}

static uint64_t newest_of(const world *w) {
    uint64_t newest = 0;
    for (int n = 0; n < IDS_IN_USE; n++)
        newest = w->generations[n] > newest ? w->generations[n] : newest;
    return newest;
}

static void every_block_comes_back_once_and_never_while_it_is_touched(void **state) {
    (void)state;
    static world w;
    fixture f = simple();
    kvf_aggregator_options options = {.struct_size = sizeof options, .worker_count = WORKERS};
    w = (world){.s = f.s, .random = 0x9e3779b97f4a7c15};
    assert_ok(kvf_aggregator_create(&options, &w.a));

    for (int step = 0; step < STEPS && newest_of(&w) + IDS_IN_USE < LIVES; step++) {
        for (uint64_t n = draw(&w, 4); n > 0; n--)
            live(&w);
        give_instructions(&w);
        work(&w, newest_of(&w), false);
        if (step % 10 == 0) /* so that no job grows older than report_of() looks back */
            work(&w, newest_of(&w), true);
    }
    for (int n = 0; n < IDS_IN_USE; n++)
        if (w.phases[n] != NOWHERE)
            lose(&w, n, true);
    give_instructions(&w);
    work(&w, newest_of(&w), true);

    for (uint64_t g = 0; g <= newest_of(&w); g++)
        assert_false(w.kept[g].load || w.kept[g].serve);
    assert_int_equal(counts(&f).requests, 0);
    assert_int_equal(counts(&f).stopping, 0);
    assert_true(w.loads > 1000 && w.failures > 100 && w.freed > 1000);
    kvf_aggregator_free(w.a);
    done(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_block_comes_back_once_and_never_while_it_is_touched),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
