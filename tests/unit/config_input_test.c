/*
 * Wrong configurations, unreadable files and memory that runs out: each gives one clear error.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "config_reading.h"
#include "model/config.h"

/* ---- reading --------------------------------------------------------------------------------- */

static void assert_accepted(const char *json) {
    kvf_model *model = NULL;
    if (kvf_model_from_config(json, strlen(json), NULL, &model) != KVF_OK)
        fail_msg("%s", kvf_error_detail());
    kvf_model_free(model);
}

#define LLAMA                                                                                                \
    "\"model_type\": \"llama\", \"num_hidden_layers\": 2, \"hidden_size\": 512, "                            \
    "\"num_attention_heads\": 8"
#define BF16 ", \"torch_dtype\": \"bfloat16\""
#define LLAMA_WITH(fields) "{" LLAMA BF16 fields "}"

#define HEADS "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 64" BF16
#define WINDOWED(type, layers, fields)                                                                       \
    "{\"model_type\": \"" type "\", \"num_hidden_layers\": " layers ", " HEADS fields "}"

static void infinity_where_we_do_not_look_is_accepted(void **state) {
    (void)state;
    assert_accepted(LLAMA_WITH(", \"time_step_limit\": [0.0, Infinity], \"x\": [NaN, -Infinity]"));
}

/* ---- bad input ------------------------------------------------------------------------------- */

static void text_that_is_not_json_is_refused_with_its_offset(void **state) {
    (void)state;
    static const struct {
        const char *json;
        const char *words;
    } cases[] = {
        {"{\"model_type\": \"llama\"", "ends in the middle, at byte 22"},
        {"{\"a\": }", "is not JSON at byte 6"},
        {"{\"a\": 1,}", "is not JSON at byte 8"},
        {"{'a': 1}", "is not JSON at byte 1: single quotation mark"},
        {"{\"a\": \"\t\"}", "is not JSON at byte 7: control character"},
        {"{\"a\": 01}", "is not JSON at byte 8"},
        {"{\"a\": TRUE}", "is not JSON at byte 6"},
        {"{\"a\": 1} {}", "has text after its end, at byte 9"},
        {"/* */ {}", "is not JSON at byte"},
        {"[1, 2]", "is a JSON array; it must be an object"},
        {"null\n", "is a JSON null; it must be an object"},
        {"null", "is a JSON null; it must be an object"},
        {"nul", "ends in the middle, at byte 3"},
        {"17 ", "is a JSON int; it must be an object"},
        {"17", "is a JSON int; it must be an object"},
        {"{\"a\": \"\xff\"}", "is not JSON at byte"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_refused(cases[i].json, KVF_E_PARSE, cases[i].words);
    static const char zero[] = "{}\0{}";
    kvf_model *model = NULL;
    assert_failure(kvf_model_from_config(zero, sizeof zero - 1, NULL, &model), KVF_E_PARSE, "at byte 2");
}

static void text_that_is_too_long_or_too_deep_is_refused(void **state) {
    (void)state;
    kvf_model *model = NULL;
    assert_failure(kvf_model_from_config("", 0, NULL, &model), KVF_E_RANGE,
                   "configuration has 0 bytes; allowed: 1 to 16777216");
    assert_failure(kvf_model_from_config("{}", SIZE_MAX, NULL, &model), KVF_E_RANGE,
                   "allowed: 1 to 16777216");
    char deep[4096] = "{\"a\": ";
    memset(deep + 6, '[', 2000);
    assert_refused(deep, KVF_E_PARSE, "nests deeper than 32");
}

static void many_fields_are_read_and_the_one_that_is_given_twice_is_found(void **state) {
    (void)state;
    size_t room = 1 << 21;
    char *wide = malloc(room);
    assert_non_null(wide);
    size_t length = (size_t)snprintf(wide, room, "%s", "{" LLAMA BF16);
    for (uint32_t i = 0; i < 70000; i++)
        length += (size_t)snprintf(wide + length, room - length, ", \"f%u\": 0", i);
    (void)snprintf(wide + length, room - length, "}");
    assert_accepted(wide);
    (void)snprintf(wide + length, room - length, ", \"f777\": 0}");
    assert_refused(wide, KVF_E_INVALID, "f777 is given twice");
    free(wide);
}

static void a_field_that_is_given_twice_is_refused(void **state) {
    (void)state;
    assert_refused(LLAMA_WITH(", \"hidden_size\": 64"), KVF_E_INVALID,
                   "hidden_size is given twice in one object, at byte");
    assert_refused("{\"a\": [{\"b\": 1, \"c\": {\"b\": 2}, \"b\" : 3}]}", KVF_E_INVALID, "b is given twice");
    assert_refused(LLAMA_WITH(", \"num_hidden_l\\u0061yers\": 64"), KVF_E_INVALID,
                   "num_hidden_l\\u0061yers is given twice in one object, at byte 25 and at byte 1");
    assert_refused(LLAMA_WITH(", \"x\\u00e9\": 1, \"x\xc3\xa9\": 2"), KVF_E_INVALID,
                   "x\xc3\xa9 is given twice");
    assert_refused(LLAMA_WITH(", \"x\\/y\": 1, \"x\\u002fy\": 2"), KVF_E_INVALID, "x\\u002fy is given twice");
    assert_accepted(
        LLAMA_WITH(", \"v\\n\": 1, \"v\\t\": 2, \"vn\": 3, \"\\ud83d\\ude00\": 4, \"\\ud83d\\ude01\": 5"));
    /* a name that occurs again in another object or as a value is no duplicate */
    assert_accepted(LLAMA_WITH(", \"v\": {\"hidden_size\": 1}, \"w\": {\"hidden_size\": 2}, \"x\": \"v\", "
                               "\"y\\\"\": \"a\\\\\""));
}

static void numbers_must_be_whole_and_in_their_range(void **state) {
    (void)state;
    static const struct {
        const char *value;
        kvf_status status;
        const char *words;
    } cases[] = {
        {"0", KVF_E_RANGE, "num_key_value_heads is 0; allowed: 1 to 8"},
        {"-1", KVF_E_RANGE, "num_key_value_heads is -1; allowed: 1 to 8"},
        {"9", KVF_E_RANGE, "num_key_value_heads is 9; allowed: 1 to 8"},
        {"3", KVF_E_INVALID, "num_key_value_heads is 3, which does not divide num_attention_heads, 8"},
        {"2.5", KVF_E_INVALID, "num_key_value_heads is 2.5; it must be a whole number from 1 to 8"},
        {"2.0", KVF_E_INVALID, "num_key_value_heads is 2.0; it must be a whole number from 1 to 8"},
        {"\"2\"", KVF_E_INVALID, "num_key_value_heads is \"2\"; it must be a whole number"},
        {"\"as many as there are heads for the queries\"", KVF_E_INVALID,
         "num_key_value_heads is \"as many as there are heads for the quer...; it must be a whole number"},
        {"true", KVF_E_INVALID, "num_key_value_heads is true; it must be a whole number"},
        {"[2]", KVF_E_INVALID, "num_key_value_heads is [2]; it must be a whole number"},
        {"4294967297", KVF_E_RANGE, "num_key_value_heads is 4294967297; allowed: 1 to 8"},
        {"18446744073709551614", KVF_E_RANGE, "num_key_value_heads is 18446744073709551614; allowed: 1 to 8"},
        {"18446744073709551617", KVF_E_RANGE,
         "num_key_value_heads is 18446744073709551615 or more; allowed: 1 to 8"},
        {"-99999999999999999999", KVF_E_RANGE,
         "num_key_value_heads is -9223372036854775808 or less; allowed: 1 to 8"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char json[512];
        (void)snprintf(json, sizeof json, LLAMA_WITH(", \"num_key_value_heads\": %s"), cases[i].value);
        assert_refused(json, cases[i].status, cases[i].words);
    }
}

static void fields_that_are_missing_are_named(void **state) {
    (void)state;
    assert_refused("{}", KVF_E_INVALID, "model_type is missing");
    assert_refused("{\"model_type\": \"llama\"" BF16 "}", KVF_E_INVALID, "num_hidden_layers is missing");
    assert_refused("{\"model_type\": \"llama\", \"num_hidden_layers\": 2" BF16 "}", KVF_E_INVALID,
                   "num_attention_heads is missing");
    assert_refused("{\"model_type\": \"llama\", \"num_hidden_layers\": 2, \"num_attention_heads\": 2" BF16
                   "}",
                   KVF_E_INVALID, "head_dim is missing, and so is hidden_size");
    assert_refused("{" LLAMA "}", KVF_E_INVALID, "dtype (or torch_dtype) is missing");
    assert_refused("{\"model_type\": \"mixtral\", \"num_hidden_layers\": 2, \"num_attention_heads\": 2" BF16
                   "}",
                   KVF_E_INVALID, "num_key_value_heads is missing");
    assert_refused("{\"text_config\": {\"model_type\": \"llama\"" BF16 "}}", KVF_E_INVALID,
                   "text_config.num_hidden_layers is missing, and llama has no default for it");
}

static void null_is_no_size_where_the_family_does_not_say_so(void **state) {
    (void)state;
    static const char gemma[] = "{\"model_type\": \"gemma2\", \"num_hidden_layers\": 2, "
                                "\"num_attention_heads\": 2%s" BF16 "}";
    char json[512];
    (void)snprintf(json, sizeof json, gemma, ", \"num_key_value_heads\": null");
    assert_refused(json, KVF_E_INVALID, "num_key_value_heads is null, and gemma2 has no default for it");
    (void)snprintf(json, sizeof json, gemma, ", \"num_key_value_heads\": 1, \"head_dim\": null");
    assert_refused(json, KVF_E_INVALID, "head_dim is null, and gemma2 has no default for it");
    (void)snprintf(json, sizeof json, gemma, ", \"num_key_value_heads\": 1");
    assert_accepted(json);
}

static void fields_that_contradict_each_other_are_refused(void **state) {
    (void)state;
    assert_refused("{\"model_type\": \"llama\", \"num_hidden_layers\": 2, \"num_attention_heads\": 3, "
                   "\"hidden_size\": 64" BF16 "}",
                   KVF_E_INVALID,
                   "head_dim is missing, and num_attention_heads, 3, does not divide hidden_size, 64");
    assert_refused(LLAMA_WITH(", \"layer_types\": [\"full_attention\"]"), KVF_E_INVALID,
                   "layer_types describes 1 layers, but num_hidden_layers is 2");
    assert_refused(LLAMA_WITH(", \"layer_types\": [\"full_attention\", \"sliding_attention\"]"),
                   KVF_E_INVALID, "layer 1 has a window, but sliding_window is missing or not used");
    assert_refused(LLAMA_WITH(", \"layer_types\": [\"full_attention\", \"chunked_attention\"]"),
                   KVF_E_INVALID, "layer 1 has chunks, but attention_chunk_size is missing or not used");
    assert_refused(LLAMA_WITH(", \"layer_types\": [\"full_attention\", \"mamba\"]"), KVF_E_INVALID,
                   "layer 1 has a recurrent state, but this family has none");
    assert_refused(LLAMA_WITH(", \"layer_types\": [\"full_attention\", \"magic\"]"), KVF_E_INVALID,
                   "layer_types[1] is \"magic\"; allowed: full_attention");
    assert_refused(LLAMA_WITH(", \"layer_types\": [\"full_attention\", 1]"), KVF_E_INVALID,
                   "layer_types[1] is 1; allowed: ");
    assert_refused(LLAMA_WITH(", \"layer_types\": \"full_attention\""), KVF_E_INVALID,
                   "layer_types is \"full_attention\"; it must be a list");
    assert_refused(LLAMA_WITH(", \"head_dim\": 64, \"attention_head_dim\": 32"), KVF_E_INVALID,
                   "head_dim is 64, but attention_head_dim is 32");
    assert_refused(LLAMA_WITH(", \"dtype\": \"float16\""), KVF_E_INVALID,
                   "dtype is \"float16\", but torch_dtype is \"bfloat16\"");
}

static void values_of_the_wrong_type_or_unknown_are_refused(void **state) {
    (void)state;
    assert_refused("{\"model_type\": \"alexnet\"}", KVF_E_UNSUPPORTED,
                   "model_type is \"alexnet\", an unknown family; describe its groups by hand");
    assert_refused("{\"model_type\": \"llama mamba\"}", KVF_E_UNSUPPORTED, "an unknown family");
    assert_refused("{\"model_type\": \"\"}", KVF_E_UNSUPPORTED, "an unknown family");
    assert_refused("{\"model_type\": 3}", KVF_E_INVALID, "model_type is 3; it must be a string");
    assert_refused("{\"text_config\": [], \"model_type\": \"llama\"}", KVF_E_INVALID,
                   "text_config is []; it must be an object");
    assert_refused("{" LLAMA ", \"dtype\": \"float17\"}", KVF_E_INVALID,
                   "dtype: \"float17\" is no element type; allowed: ");
    assert_refused("{" LLAMA ", \"torch_dtype\": \"auto\"}", KVF_E_INVALID, "torch_dtype: \"auto\" is no");
    assert_refused("{\"text_config\": {" LLAMA ", \"torch_dtype\": \"auto\"}}", KVF_E_INVALID,
                   "text_config.torch_dtype: \"auto\" is no");
    assert_refused("{\"text_config\": {" LLAMA "}, \"torch_dtype\": \"auto\"}", KVF_E_INVALID,
                   "torch_dtype: \"auto\" is no");
    assert_refused("{" LLAMA ", \"dtype\": 16}", KVF_E_INVALID, "dtype is 16; it must be a string");
    assert_refused(WINDOWED("qwen2", "2", ", \"use_sliding_window\": 1"), KVF_E_INVALID,
                   "use_sliding_window is 1; it must be true or false");
    assert_refused(WINDOWED("mistral", "2", ", \"sliding_window\": 0"), KVF_E_RANGE,
                   "sliding_window is 0; allowed: 1 to 2147483648");
    assert_refused(WINDOWED("llama4_text", "2", ", \"no_rope_layers\": [0, 2]"), KVF_E_RANGE,
                   "no_rope_layers[1] is 2; allowed: 0 to 1");
    assert_refused(WINDOWED("gemma3_text", "2", ", \"sliding_window_pattern\": 0"), KVF_E_RANGE,
                   "sliding_window_pattern is 0; allowed: 1 to 65536");
    assert_refused("{\"model_type\": \"llama\", \"num_hidden_layers\": 65537}", KVF_E_RANGE,
                   "num_hidden_layers is 65537; allowed: 1 to 65536");
}

/* ---- memory that runs out -------------------------------------------------------------------- */

typedef struct budget {
    int left; /* allocations that still succeed */
    int live;
} budget;

static void *budget_allocate(void *context, size_t bytes) {
    budget *b = context;
    if (b->left-- <= 0)
        return NULL;
    b->live++;
    return malloc(bytes);
}

static void *budget_resize(void *context, void *memory, size_t bytes) {
    budget *b = context;
    if (b->left-- <= 0)
        return NULL;
    b->live += !memory;
    return realloc(memory, bytes);
}

static void budget_release(void *context, void *memory) {
    budget *b = context;
    b->live -= memory != NULL;
    free(memory);
}

static void running_out_of_memory_anywhere_leaks_nothing(void **state) {
    (void)state;
    kvf_status status = KVF_E_NOMEM;
    int allowed = 0;
    while (status == KVF_E_NOMEM && allowed < 100) {
        budget b = {.left = allowed++};
        const kvf_allocator allocator = {budget_allocate, budget_resize, budget_release, &b};
        kvf_model *model = NULL;
        assert_int_equal(kvf_set_allocator(&allocator), KVF_OK);
        status = kvf_model_load("nemotron-3-nano-30b", NULL, &model);
        kvf_model_free(model);
        assert_int_equal(kvf_set_allocator(NULL), KVF_OK);
        assert_int_equal(b.live, 0);
    }
    assert_int_equal(status, KVF_OK);
    assert_true(allowed > 3);
}

/* ---- files ----------------------------------------------------------------------------------- */

static char folder[64];

static int make_folder(void **state) {
    (void)state;
    (void)snprintf(folder, sizeof folder, "/tmp/kvf_config_test.XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
    (void)state;
    return rmdir(folder);
}

static const char *path_of(const char *name) {
    static char path[128];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static void a_file_is_read_before_a_shipped_name_is_looked_for(void **state) {
    (void)state;
    const char *path = path_of("config.json");
    write_file(path, LLAMA_WITH(""));
    kvf_model *model = NULL;
    assert_int_equal(kvf_model_load(path, NULL, &model), KVF_OK);
    assert_int_equal(kvf_model_layer_count(model), 2);
    kvf_model_free(model);
    assert_int_equal(unlink(path), 0);
}

static void a_file_that_is_wrong_is_named(void **state) {
    (void)state;
    const char *path = path_of("config.json");
    kvf_model *model = NULL;
    write_file(path, "{");
    assert_failure(kvf_model_load(path, NULL, &model), KVF_E_PARSE, "config.json: configuration ends");
    write_file(path, "");
    assert_failure(kvf_model_load(path, NULL, &model), KVF_E_RANGE, "config.json has 0 bytes; allowed: 1 to");
    assert_int_equal(truncate(path, (16 << 20) + 1), 0);
    assert_failure(kvf_model_load(path, NULL, &model), KVF_E_RANGE,
                   "has 16777217 bytes; allowed: 1 to 16777216");
    assert_int_equal(unlink(path), 0);
    assert_null(model);
}

static void a_path_that_is_not_a_file_is_refused(void **state) {
    (void)state;
    kvf_model *model = NULL;
    assert_failure(kvf_model_load(folder, NULL, &model), KVF_E_IO, "is a directory; it must be a file");
    assert_failure(kvf_model_load("llama-9", NULL, &model), KVF_E_NOT_FOUND,
                   "llama-9 is neither a file nor a model that comes with the library");
    assert_failure(kvf_model_load("", NULL, &model), KVF_E_NOT_FOUND, "is neither a file");
    assert_failure(kvf_model_load("/dev/null", NULL, &model), KVF_E_IO, "/dev/null is not a regular file");
    assert_int_equal(kvf_model_load(NULL, NULL, &model), KVF_E_INVALID);
    assert_int_equal(kvf_model_load("llama-3.1-8b", NULL, NULL), KVF_E_INVALID);

    const char *pipe = path_of("pipe");
    assert_int_equal(mkfifo(pipe, 0600), 0);
    assert_failure(kvf_model_load(pipe, NULL, &model), KVF_E_IO, "is not a regular file");
    assert_int_equal(unlink(pipe), 0);
    assert_null(model);
}

static void a_file_that_may_not_be_read_is_refused(void **state) {
    (void)state;
    const char *path = path_of("config.json");
    write_file(path, "{}");
    assert_int_equal(chmod(path, 0), 0);
    /* root may read every file, so the test reads as another user */
    uid_t self = geteuid();
    if (self == 0)
        assert_int_equal(seteuid(65534), 0);
    kvf_model *model = NULL;
    kvf_status status = kvf_model_load(path, NULL, &model);
    if (self == 0)
        assert_int_equal(seteuid(0), 0);
    assert_failure(status, KVF_E_IO, "open: Permission denied");
    assert_int_equal(unlink(path), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(infinity_where_we_do_not_look_is_accepted),
        cmocka_unit_test(text_that_is_not_json_is_refused_with_its_offset),
        cmocka_unit_test(text_that_is_too_long_or_too_deep_is_refused),
        cmocka_unit_test(many_fields_are_read_and_the_one_that_is_given_twice_is_found),
        cmocka_unit_test(a_field_that_is_given_twice_is_refused),
        cmocka_unit_test(numbers_must_be_whole_and_in_their_range),
        cmocka_unit_test(fields_that_are_missing_are_named),
        cmocka_unit_test(null_is_no_size_where_the_family_does_not_say_so),
        cmocka_unit_test(fields_that_contradict_each_other_are_refused),
        cmocka_unit_test(values_of_the_wrong_type_or_unknown_are_refused),
        cmocka_unit_test(running_out_of_memory_anywhere_leaks_nothing),
        cmocka_unit_test(a_file_is_read_before_a_shipped_name_is_looked_for),
        cmocka_unit_test(a_file_that_is_wrong_is_named),
        cmocka_unit_test(a_path_that_is_not_a_file_is_refused),
        cmocka_unit_test(a_file_that_may_not_be_read_is_refused),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
