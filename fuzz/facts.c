/*
 * Texts of facts, as a peer may send them: ours before a line of two dashes, theirs after it. They are read as an
 * engine's own lines of facts, and as whole facts.
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

/* A detail about a difference must be fit for a terminal. */
static void check_words(kvf_status status) {
    fuzz_check_refusal(status);
    for (const char *c = kvf_error_detail(); *c; c++)
        FUZZ_MUST((unsigned char)*c >= ' ' && *c != 0x7f);
}

static void compare_lines(const char *ours, const char *theirs) {
    kvf_status status = kvf_wire_compare_own(ours, theirs, theirs);
    if (status == KVF_OK)
        return;
    FUZZ_MUST(status == KVF_E_MISMATCH && strcmp(ours, theirs) != 0);
    check_words(status);
    FUZZ_MUST(strlen(kvf_error_detail()) < 2047); /* it is not cut off */
}

/* Matches the facts of both sides; the match must agree with its reverse. */
static void meet(const kvf_facts *ours, const char *theirs) {
    kvf_match *match = NULL, *back = NULL;
    kvf_status status = kvf_wire_match(ours, theirs, theirs, &match);
    if (status) {
        check_words(status);
        return;
    }
    FUZZ_MUST(kvf_match_reverse(match, &back) == KVF_OK && back->count == match->count);
    for (uint32_t g = 0; g < match->our_count; g++) {
        const kvf_match_group *m = &match->groups[g];
        kvf_range all = {0, kvf_model_group(match->ours, g)->layer_count};
        if (kvf_match_check(match, g, all) == KVF_OK)
            FUZZ_MUST((m->agreement == KVF_AGREE_SAME || m->agreement == KVF_AGREE_CONVERT) &&
                      m->layers_ours == 0);
        if (m->theirs != KVF_NO_GROUP)
            FUZZ_MUST(back->groups[m->theirs].agreement == m->agreement &&
                      back->groups[m->theirs].layers_both == m->layers_both);
    }
    kvf_match_free(back);
    kvf_match_free(match);
}

static void read_and_meet(const char *ours, const char *theirs) {
    kvf_facts facts;
    kvf_status status = kvf_wire_read_facts(ours, &facts);
    if (status)
        fuzz_check_refusal(status);
    else {
        char *again = NULL;
        status = kvf_wire_facts(facts.model, facts.convert, facts.own, &again);
        FUZZ_MUST(status == KVF_OK || status == KVF_E_RANGE); /* the text has become too long */
        if (!status)
            meet(&facts, again);
        kvf_free(again);
        meet(&facts, theirs);
    }
    kvf_facts_free(&facts);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char line[] = "\n--\n";
    const uint8_t *cut = memmem(data, size, line, strlen(line));
    size_t ours_size = cut ? (size_t)(cut - data) : size / 2;
    size_t theirs_at = cut ? ours_size + strlen(line) : ours_size;
    char *ours = text_of(data, ours_size), *theirs = text_of(data + theirs_at, size - theirs_at);
    compare_lines(ours, theirs);
    compare_lines(theirs, ours);
    read_and_meet(ours, theirs);
    read_and_meet(theirs, ours);
    uint8_t digest[KVF_WIRE_DIGEST_BYTES];
    kvf_wire_digest(theirs, digest);
    free(ours);
    free(theirs);
    return 0;
}
