/*
 * Runs layer by layer: the same bytes as without an order, in an order in which the first layers are whole early, and
 * the count of whole layers, against one that knows for each byte of memory to which layer it belongs.
 */
#include "request/order.h"
#include "shapes.h"

#define MOST_REGIONS 16u
#define MOST_RUNS 65536u

/* ---- which layer a byte belongs to ------------------------------------------------------------- */

typedef struct byte_owners {
    uint8_t *layer[MOST_REGIONS]; /* by byte of a region: the model layer plus one; 0: none */
    uint32_t count;
} byte_owners;

static void own_cell(const byte_owners *owners, const kvf_shard *shard, uint32_t g, uint32_t l, uint32_t p,
                     uint32_t block, uint32_t row, uint32_t unit) {
    kvf_cell_location cell = {.struct_size = sizeof cell};
    assert_ok(kvf_shard_locate(shard, g, l, p, block, row, unit, &cell));
    const uint32_t layer = kvf_model_group(kvf_shard_model(shard), g)->layers[l];
    assert_int_equal(cell.pieces, 1);
    memset(owners->layer[cell.region] + cell.offset, (int)layer + 1, cell.bytes);
}

static void find_owners(const kvf_shard *shard, byte_owners *out) {
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    const kvf_model *model = kvf_shard_model(shard);
    out->count = desc->region_count;
    assert_true(out->count <= MOST_REGIONS);
    for (uint32_t i = 0; i < out->count; i++)
        out->layer[i] = calloc(1, desc->region_bytes[i]);
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        const kvf_group_shard_desc *held = &desc->groups[g];
        for (uint32_t l = 0; l < group->layer_count; l++)
            for (uint32_t p = 0; p < group->part_count; p++)
                for (uint32_t block = 0; block < held->block_count; block++)
                    for (uint32_t row = 0; row < held->tokens_per_block * group->parts[p].rows_per_step;
                         row++)
                        for (uint32_t u = held->parts[p].units.begin; u < held->parts[p].units.end; u++)
                            own_cell(out, shard, g, l, p, block, row, u);
    }
}

static void free_owners(const byte_owners *owners) {
    for (uint32_t i = 0; i < owners->count; i++)
        free(owners->layer[i]);
}

/* ---- orders ------------------------------------------------------------------------------------ */

typedef struct layer_runs {
    kvf_run *runs;
    size_t count;
} layer_runs;

static layer_runs all_of(const kvf_layer_order *order, size_t capacity) {
    layer_runs out = {.runs = malloc(MOST_RUNS * sizeof *out.runs)};
    kvf_run_cursor cursor;
    assert_ok(kvf_run_cursor_start(&cursor, &order->request, 0));
    for (size_t got; (got = kvf_run_cursor_next(&cursor, out.runs + out.count, capacity)) > 0;) {
        out.count += got;
        assert_true(out.count + capacity <= MOST_RUNS);
    }
    return out;
}

/* Bytes of each layer in all runs of the plain cursor. */
static void count_plain(const kvf_request *request, const byte_owners *owners, uint64_t *left) {
    kvf_run run;
    kvf_run_cursor cursor;
    assert_ok(kvf_run_cursor_start(&cursor, request, 0));
    while (kvf_run_cursor_next(&cursor, &run, 1))
        for (uint64_t i = 0; i < run.bytes; i++)
            left[owners->layer[run.local_region][run.local_offset + i] - 1]++;
}

/* How many of the first layers have nothing left. */
static uint32_t whole_by(const uint64_t *left, uint32_t layers) {
    uint32_t count = 0;
    while (count < layers && left[count] == 0)
        count++;
    return count;
}

/* Takes the runs of the order byte by byte. `exact`: no two layers share a page. Returns how many different counts of
 * layers there were. */
static uint32_t check_order(const asked_request *a, bool exact, size_t capacity) {
    byte_owners owners = {0};
    kvf_layer_order *order = NULL;
    uint64_t left[256] = {0}, bytes = 0;
    uint32_t steps = 0, last = UINT32_MAX;
    assert_ok(kvf_layer_order_make(a->request, 0, &order));
    find_owners(kvf_plan_local(a->plan), &owners);
    count_plain(a->request, &owners, left);
    const layer_runs all = all_of(order, capacity);
    for (size_t i = 0; i <= all.count; i++) {
        const uint32_t counted = kvf_layer_order_whole(order, bytes);
        const uint32_t whole = whole_by(left, order->layer_count);
        assert_true(counted <= whole);
        if (exact)
            assert_int_equal(counted, whole);
        steps += counted != last;
        last = counted;
        for (uint64_t k = 0; i < all.count && k < all.runs[i].bytes; k++) {
            uint8_t *owner = &owners.layer[all.runs[i].local_region][all.runs[i].local_offset + k];
            assert_int_not_equal(*owner, 0); /* nothing twice */
            left[*owner - 1]--;
            *owner = 0;
        }
        bytes += i < all.count ? all.runs[i].bytes : 0;
    }
    assert_int_equal(bytes, kvf_request_bytes(a->request, 0));
    assert_int_equal(last, order->layer_count);
    free(all.runs);
    free_owners(&owners);
    kvf_layer_order_free(order);
    return steps;
}

static uint32_t check(const asked_request *a, bool exact) {
    const uint32_t steps = check_order(a, exact, 64);
    assert_int_equal(check_order(a, exact, 1), steps);
    return steps;
}

#define BLOCKS(axes)                                                                                         \
    { .tokens_per_block = 4, .block_count = 8, .order = (axes) }

/* ---- tests ------------------------------------------------------------------------------------- */

/* Whole blocks and the rest of the last block are two rules, and in each layers come one after the other. */
static void a_last_block_in_part_comes_with_its_layer(void **state) {
    (void)state;
    const asked_request a = asked_between(attention(4, 2, 4), ENGINE(.all = BLOCKS("L|BPNH")),
                                          ENGINE(.all = BLOCKS("L|BPHN")), 0);
    assert_ok(set_one(&a, TABLE(1, 5, 2), TABLE(7, 0, 3), 0, 10));
    assert_int_equal(check(&a, true), 5); /* 0 to 4 layers */
    free_asked(&a);
}

/* The control of the test before: in the order of the rules, the second one comes first to layer 0 after the first one
 * has been at all layers. By layers, a quarter of the bytes is enough. */
static void in_the_order_of_the_rules_the_first_layer_is_whole_late(void **state) {
    (void)state;
    const asked_request a = asked_between(attention(4, 2, 4), ENGINE(.all = BLOCKS("L|BPNH")),
                                          ENGINE(.all = BLOCKS("L|BPHN")), 0);
    byte_owners owners = {0};
    uint64_t left[4] = {0}, bytes = 0;
    kvf_run run;
    kvf_run_cursor cursor;
    assert_ok(set_one(&a, TABLE(1, 5, 2), TABLE(7, 0, 3), 0, 10));
    find_owners(kvf_plan_local(a.plan), &owners);
    count_plain(a.request, &owners, left);
    assert_ok(kvf_run_cursor_start(&cursor, a.request, 0));
    while (whole_by(left, 4) == 0 && kvf_run_cursor_next(&cursor, &run, 1)) {
        left[owners.layer[run.local_region][run.local_offset] - 1] -= run.bytes;
        bytes += run.bytes;
    }
    assert_true(bytes > kvf_request_bytes(a.request, 0) / 4);
    free_owners(&owners);
    free_asked(&a);
}

/* Layers 0 and 2 have attention, 1 and 3 states: rules of two groups in turn. */
static void groups_take_turns_by_layer(void **state) {
    (void)state;
    const kvf_engine_spec *spec = ENGINE(.all = BLOCKS("L|BPNH"));
    const asked_request a = asked_between(hybrid(2), spec, spec, 0);
    const kvf_group_request groups[] = {{TABLE(1, 5, 2), TABLE(7, 0, 3), 0, 10}, {TABLE(4), TABLE(6), 0, 1}};
    assert_ok(kvf_request_set(a.request, groups, 2));
    assert_int_equal(check(&a, true), 5);
    free_asked(&a);
}

/* A layer of which nothing moves is whole as soon as those before it are. */
static void a_layer_without_bytes_does_not_hold_up_others(void **state) {
    (void)state;
    const kvf_engine_spec *spec = ENGINE(.all = BLOCKS("L|BPNH"));
    const asked_request a = asked_between(hybrid(2), spec, spec, 0);
    const kvf_group_request groups[] = {{TABLE(1, 5, 2), TABLE(7, 0, 3), 0, 10}, {TABLE(4), TABLE(6), 1, 1}};
    assert_ok(kvf_request_set(a.request, groups, 2));
    assert_int_equal(check(&a, true), 3); /* 0, 2 and 4 layers */
    free_asked(&a);
}

/* A request that wants nothing has all layers at once. */
static void a_request_without_bytes_has_all_layers(void **state) {
    (void)state;
    const kvf_engine_spec *spec = ENGINE(.all = BLOCKS("L|BPNH"));
    const asked_request a = asked_between(attention(3, 2, 4), spec, spec, 0);
    kvf_layer_order *order = NULL;
    assert_ok(set_one(&a, TABLE(1), TABLE(2), 4, 4));
    assert_ok(kvf_layer_order_make(a.request, 0, &order));
    assert_int_equal(kvf_layer_order_whole(order, 0), 3);
    kvf_layer_order_free(order);
    free_asked(&a);
}

/* Both sides keep all layers of a block behind one another: what lies together comes together. */
static void layers_that_share_pages_come_together(void **state) {
    (void)state;
    const kvf_engine_spec *spec = ENGINE(.all = BLOCKS("BLPNH"));
    const asked_request a = asked_between(attention(4, 2, 4), spec, spec, 0);
    assert_ok(set_one(&a, TABLE(1, 5), TABLE(7, 0), 0, 8));
    assert_int_equal(check(&a, false), 2); /* none, and all */
    free_asked(&a);
}

/* In other orders too, and with blocks of other sizes, nothing is counted early, or moved twice. */
static void nothing_is_counted_early_in_any_order(void **state) {
    (void)state;
    static const char *const axes[] = {"L|BPNH", "L|BHNP", "BLPNH", "LPBHN", "PLBNH", "HBLPN"};
    for (size_t i = 0; i < COUNT_OF(axes); i++)
        for (size_t k = 0; k < COUNT_OF(axes); k++) {
            const asked_request a = asked_between(
                attention(3, 2, 4), ENGINE(.all = BLOCKS(axes[i])),
                ENGINE(.all = {.tokens_per_block = k % 2 ? 4 : 6, .block_count = 8, .order = axes[k]}), 0);
            assert_ok(set_one(&a, TABLE(1, 5, 2), TABLE(7, 0, 3), 1, 11));
            assert_true(check(&a, false) >= 2);
            free_asked(&a);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_last_block_in_part_comes_with_its_layer),
        cmocka_unit_test(in_the_order_of_the_rules_the_first_layer_is_whole_late),
        cmocka_unit_test(groups_take_turns_by_layer),
        cmocka_unit_test(a_layer_without_bytes_does_not_hold_up_others),
        cmocka_unit_test(a_request_without_bytes_has_all_layers),
        cmocka_unit_test(layers_that_share_pages_come_together),
        cmocka_unit_test(nothing_is_counted_early_in_any_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
