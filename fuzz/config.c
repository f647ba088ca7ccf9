/*
 * Configurations of models: a config.json is either refused or gives a model for which an engine can be laid out.
 */
#include "fuzz.h"

#include "wire/wire.h"

static void lay_out(const kvf_model *model) {
    /* A layout takes memory for each layer, so the largest models that a text can describe are skipped. */
    if (kvf_model_layer_count(model) > 256)
        return;
    kvf_engine_spec spec = {.struct_size = sizeof spec, .tp_size = 2, .all = {.block_count = 3}};
    kvf_engine *engine = NULL;
    kvf_status status = kvf_engine_build(model, &spec, &engine);
    if (status)
        fuzz_check_refusal(status);
    kvf_engine_free(engine);
}

static void read_config(const char *json, size_t bytes, const kvf_config_options *options) {
    kvf_model *model = NULL;
    kvf_status status = kvf_model_from_config(json, bytes, options, &model);
    if (status) {
        fuzz_check_refusal(status);
        FUZZ_MUST(!model);
        return;
    }
    FUZZ_MUST(kvf_model_compare(model, model) == KVF_OK);
    const char *note;
    for (uint32_t i = 0; (note = kvf_model_note(model, i)) != NULL; i++)
        FUZZ_MUST(note[0] && note[strcspn(note, "\n\t\x1b")] == '\0');
    char *facts = NULL;
    FUZZ_MUST(kvf_wire_facts(model, NULL, NULL, &facts) == KVF_OK);
    kvf_free(facts);
    lay_out(model);
    kvf_model_free(model);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const kvf_config_options quantised = {.struct_size = sizeof quantised,
                                          .cache_dtype = KVF_DTYPE_F8_E4M3,
                                          .state_dtype = KVF_DTYPE_F32,
                                          .scale_dtype = KVF_DTYPE_F32,
                                          .scale_per_head = true};
    read_config((const char *)data, size, NULL);
    read_config((const char *)data, size, &quantised);
    return 0;
}
