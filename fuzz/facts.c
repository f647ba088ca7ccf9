/*
 * Texts of facts, as a peer may send them: before a line of two dashes ours, after it theirs. Whatever they
 * are, the words for their difference are short and fit for a terminal, and a model is made only of a text that
 * is exactly the model's.
 */
#include "fuzz.h"

#include "wire/wire.h"

static char *text_of(const uint8_t *data, size_t size) {
    char *text = malloc(size + 1);
    FUZZ_MUST(text);
    if (size)
        memcpy(text, data, size);
    text[size] = '\0';
    return text;
}

static void compare(const char *ours, const char *theirs) {
    kvf_status status = kvf_wire_compare_facts(ours, theirs, theirs);
    FUZZ_MUST((status == KVF_OK) == (strcmp(ours, theirs) == 0));
    if (status == KVF_OK)
        return;
    FUZZ_MUST(status == KVF_E_MISMATCH);
    fuzz_check_refusal(status);
    for (const char *c = kvf_error_detail(); *c; c++)
        FUZZ_MUST((unsigned char)*c >= ' ' && *c != 0x7f);
    FUZZ_MUST(strlen(kvf_error_detail()) < 2047); /* nothing was cut off */
}

static void make_model(const char *facts) {
    kvf_model *model = NULL, *again = NULL;
    kvf_status status = kvf_wire_model_of_facts(facts, "model", &model);
    if (status) {
        fuzz_check_refusal(status);
        for (const char *c = kvf_error_detail(); *c; c++)
            FUZZ_MUST((unsigned char)*c >= ' ' && *c != 0x7f);
        return;
    }
    char *own = NULL;
    FUZZ_MUST(kvf_wire_facts(model, NULL, &own) == KVF_OK);
    FUZZ_MUST(strncmp(own, facts, strlen(own)) == 0);
    FUZZ_MUST(kvf_wire_model_of_facts(own, "again", &again) == KVF_OK);
    FUZZ_MUST(kvf_model_compare(model, again) == KVF_OK);
    kvf_free(own);
    kvf_model_free(again);
    kvf_model_free(model);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char line[] = "\n--\n";
    const uint8_t *cut = memmem(data, size, line, strlen(line));
    size_t ours_size = cut ? (size_t)(cut - data) : size / 2;
    size_t theirs_at = cut ? ours_size + strlen(line) : ours_size;
    char *ours = text_of(data, ours_size), *theirs = text_of(data + theirs_at, size - theirs_at);
    compare(ours, theirs);
    compare(theirs, ours);
    make_model(theirs);
    uint8_t digest[KVF_WIRE_DIGEST_BYTES];
    kvf_wire_digest(theirs, digest);
    free(ours);
    free(theirs);
    return 0;
}
