/* A model from the facts of a peer: all that was written is read again, and nothing else is believed. */
#include <stdio.h>

#include "shapes.h"
#include "wire/wire.h"

static char *facts_of(const kvf_model *model, const char *extra) {
    char *facts = NULL;
    assert_ok(kvf_wire_facts(model, extra, &facts));
    return facts;
}

static void every_model_of_the_library_is_read_back(void **state) {
    (void)state;
    uint32_t models = 0;
    for (const char *name; (name = kvf_builtin_model_name(models)) != NULL; models++) {
        kvf_model *model = NULL, *again = NULL;
        assert_ok(kvf_model_load(name, NULL, &model));
        char *facts = facts_of(model, "weights: v1\nrope: 500000");
        assert_ok(kvf_wire_model_of_facts(facts, "again", &again));
        assert_ok(kvf_model_compare(again, model));
        assert_string_equal(kvf_model_name(again), "again");
        kvf_free(facts);
        kvf_model_free(again);
        kvf_model_free(model);
    }
    assert_true(models > 10);
}

static void refused(const char *facts, const char *words) {
    kvf_model *model = NULL;
    kvf_status status = kvf_wire_model_of_facts(facts, NULL, &model);
    if (status == KVF_OK || !strstr(kvf_error_detail(), words))
        fail_msg("%s, without \"%s\": %s", kvf_status_name(status), words, kvf_error_detail());
    assert_null(model);
}

/* Replaces the first `from` of a text. */
static void with(const char *facts, const char *from, const char *to, const char *words) {
    char changed[8192];
    const char *at = strstr(facts, from);
    assert_non_null(at);
    (void)snprintf(changed, sizeof changed, "%.*s%s%s", (int)(at - facts), facts, to, at + strlen(from));
    refused(changed, words);
}

static void a_text_that_no_model_has_is_refused(void **state) {
    (void)state;
    kvf_model *model = hybrid(4);
    char *facts = facts_of(model, NULL);
    refused("", "line 1 is not layer_count");
    refused("layer_count: 4", "line 1 is not layer_count");
    with(facts, "layer_count: 4", "layer_count: 4x", "line 1: the value is \"4x\"");
    with(facts, "layer_count: 4", "layer_count: 0", "line 1: the value is \"0\"");
    with(facts, "layer_count: 4", "layer_count: 4294967300", "line 1: the value is \"4294967300\"");
    with(facts, "groups: full, ssm", "groups: ssm, full", "line 3 is not ssm.kind");
    with(facts, "kind: tokens", "kind: token", "not of a model");
    with(facts, "layers: 0,2", "layers: 0,2,", "not of a model");
    with(facts, "layers: 0,2", "layers: 2,0", "ascend");
    with(facts, "layers: 0,2", "layers: 0-4", "the value is \"0-4\"");
    with(facts, "layers: 0,2", "layers: 0-3,0-3", "the value is \"0-3,0-3\"");
    with(facts, "layers: 0,2", "layers: 3-2", "the value is \"3-2\"");
    with(facts, "layers: 0,2", "layers: ,", "the value is \",\"");
    with(facts, "layers: 0,2", "layers: ", "layer_count is 0");
    with(facts, "parts: k, v", "parts: k, k", "is not full.k.dtype");
    with(facts, "dtype: bf16", "dtype: bfloat16", "not of a model");
    with(facts, "dtype: bf16", "dtype: b", "the value is \"b\"");
    with(facts, "units: 4", "units: -4", "the value is \"-4\"");
    with(facts, "units: 4", "units: \033[2J", "has the control character 0x1b");
    with(facts, "groups: full, ssm", "groups: full, s\tm", "has the control character 0x09");
    with(facts, "tp_rule: split", "tp_rule: splat", "not of a model");
    kvf_free(facts);
    kvf_model_free(model);
}

static void a_text_that_ends_anywhere_is_refused(void **state) {
    (void)state;
    kvf_model *model = hybrid(4);
    char *facts = facts_of(model, NULL);
    size_t length = strlen(facts);
    for (size_t i = 0; i < length; i++) {
        char *cut = strndup(facts, i);
        kvf_model *found = NULL;
        assert_int_not_equal(kvf_wire_model_of_facts(cut, NULL, &found), KVF_OK);
        free(cut);
    }
    kvf_free(facts);
    kvf_model_free(model);
}

static kvf_status read_back(void *subject) {
    kvf_model *model = NULL;
    kvf_status status = kvf_wire_model_of_facts(subject, NULL, &model);
    kvf_model_free(model);
    return status;
}

static void every_refused_allocation_is_reported(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    kvf_model *model = hybrid(4);
    char *facts = facts_of(model, NULL);
    survive_every_refusal(&memory, read_back, facts);
    kvf_free(facts);
    kvf_model_free(model);
    assert_int_equal(memory.live, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_model_of_the_library_is_read_back),
        cmocka_unit_test(a_text_that_no_model_has_is_refused),
        cmocka_unit_test(a_text_that_ends_anywhere_is_refused),
        cmocka_unit_test_teardown(every_refused_allocation_is_reported, stop_counting_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
