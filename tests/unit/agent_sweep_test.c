/* Sweeps: a round looks at some items of a long list, a pass at all of them; another pass begins when an item is
 * due. */
#include "agent/agent.h"
#include "shapes.h"

#define COUNT 1000u

typedef struct item {
    uint32_t pass, looks;
    uint64_t wants; /* when it wants to be looked at again */
    bool goes;      /* it leaves the list when looked at */
    struct item *prev, *next;
} item;

static item items[COUNT], *list;
static kvf_sweep sweep;

static bool look_at_first(kvf_agent *agent, uint32_t pass, uint64_t now) {
    item *first = list;
    (void)agent;
    if (!first || first->pass == pass)
        return false;
    first->pass = pass;
    first->looks++;
    DL_DELETE(list, first);
    if (!first->goes)
        DL_APPEND(list, first);
    if (!first->goes && first->wants > now)
        kvf_sweep_found(&sweep, first->wants);
    return true;
}

static void make_list(void) {
    list = NULL;
    sweep = (kvf_sweep){.due = UINT64_MAX};
    for (uint32_t i = 0; i < COUNT; i++) {
        items[i] = (item){.wants = UINT64_MAX};
        DL_APPEND(list, &items[i]);
    }
}

static uint32_t count_looks(void) {
    uint32_t looks = 0;
    for (uint32_t i = 0; i < COUNT; i++)
        looks += items[i].looks;
    return looks;
}

static void go_round(uint64_t now) {
    kvf_sweep_round(&sweep, NULL, now, look_at_first);
}

static void nothing_is_looked_at_before_its_time(void **state) {
    (void)state;
    make_list();
    kvf_sweep_due(&sweep, 50);
    kvf_sweep_due(&sweep, 80);
    go_round(49);
    assert_int_equal(count_looks(), 0);
    assert_int_equal(kvf_sweep_next(&sweep), 50);
}

static void a_round_looks_at_some_and_a_pass_at_each_once(void **state) {
    (void)state;
    make_list();
    items[3].wants = 700;
    items[900].wants = 600;
    kvf_sweep_due(&sweep, 50);
    go_round(50);
    assert_int_equal(count_looks(), KVF_SWEPT_AT_ONCE);
    for (uint32_t i = 1; i < 4; i++) {
        assert_int_equal(kvf_sweep_next(&sweep), 0); /* the next round is due at once */
        go_round(50);
    }
    for (uint32_t i = 0; i < COUNT; i++)
        assert_int_equal(items[i].looks, 1);
    assert_int_equal(kvf_sweep_next(&sweep), 600);
    assert_ptr_equal(list, &items[0]); /* in the original order */
}

static void items_that_are_wanted_during_a_pass_are_looked_at_in_the_next(void **state) {
    (void)state;
    make_list();
    kvf_sweep_due(&sweep, 50);
    go_round(50);
    kvf_sweep_due(&sweep, 51); /* wanted by an item that was already looked at */
    for (uint32_t i = 0; i < 7; i++)
        go_round(51);
    assert_int_equal(count_looks(), 2 * COUNT);
    assert_int_equal(kvf_sweep_next(&sweep), UINT64_MAX);
}

static void those_that_go_and_those_that_come_during_a_pass_do_not_keep_it_going(void **state) {
    (void)state;
    make_list();
    static item late;
    late = (item){.wants = UINT64_MAX};
    for (uint32_t i = 0; i < COUNT; i += 2)
        items[i].goes = true;
    kvf_sweep_due(&sweep, 50);
    go_round(50);
    DL_APPEND(list, &late);
    for (uint32_t i = 0; i < 4; i++)
        go_round(50);
    assert_int_equal(count_looks(), COUNT);
    assert_int_equal(late.looks, 0); /* a new item asks for its own pass */
    assert_false(sweep.under_way);
    go_round(51);
    assert_int_equal(count_looks(), COUNT);
    for (uint32_t i = 0; i < COUNT; i++)
        items[i].goes = true;
    kvf_sweep_due(&sweep, 52);
    for (uint32_t i = 0; i < 3; i++)
        go_round(52);
    assert_int_equal(late.looks, 1);
    assert_ptr_equal(list, &late);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_looked_at_before_its_time),
        cmocka_unit_test(a_round_looks_at_some_and_a_pass_at_each_once),
        cmocka_unit_test(items_that_are_wanted_during_a_pass_are_looked_at_in_the_next),
        cmocka_unit_test(those_that_go_and_those_that_come_during_a_pass_do_not_keep_it_going),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
