/* The requests of a scheduler's step, one by one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <kvferry/connector/step_requests.h>

static void a_step_lists_fresh_requests_before_cached_ones(void **state) {
    (void)state;
    const uint32_t ids[] = {4, 5};
    const kvf_block_table tables[] = {{ids, 2, 0}, {0}};
    const kvf_step_request fresh[] = {{{"n", 1}, tables, 2, true}};
    const kvf_step_request cached[] = {{{"c", 1}, NULL, 0, false}, {{"d", 1}, tables, 2, false}};
    const kvf_request_id resumed[] = {{"zz", 2}, {"d", 1}, {"n", 1}};
    kvf_step step = {fresh, 1, cached, 2, resumed, 3};
    kvf_step_request items[3];

    assert_int_equal(kvf_step_requests(&step, items), KVF_OK);

    assert_memory_equal(items[0].id.data, "n", 1);
    assert_false(items[0].resumed);
    assert_ptr_equal(items[0].groups, tables);
    assert_memory_equal(items[1].id.data, "c", 1);
    assert_null(items[1].groups);
    assert_false(items[1].resumed);
    assert_memory_equal(items[2].id.data, "d", 1);
    assert_true(items[2].resumed);
}

static void an_empty_step_has_no_requests(void **state) {
    (void)state;
    kvf_step step = {0};
    assert_int_equal(kvf_step_requests(&step, NULL), KVF_OK);
    step.cached_count = 1;
    kvf_step_request item;
    assert_int_equal(kvf_step_requests(&step, &item), KVF_E_INVALID);
    assert_int_equal(kvf_step_requests(NULL, &item), KVF_E_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_lists_fresh_requests_before_cached_ones),
        cmocka_unit_test(an_empty_step_has_no_requests),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
