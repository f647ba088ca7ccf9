/*
 * Names out of a known set, as somebody types them: found in capitals and with '_' for '-', listed, and the nearest
 * one told where none fits.
 */
#ifndef KVFERRY_CLI_WORDS_H
#define KVFERRY_CLI_WORDS_H

#include <stdbool.h>

#include "text.h"

/** The i-th name of a set; NULL past the last. */
typedef const char *(*word_of)(const void *set, uint32_t i);

/** A set of names. */
typedef struct words {
    word_of get;
    const void *set; /* what `get` is given */
} words;

/** Of an array that ends with NULL. */
words words_of_array(const char *const *names);

/** Whether the two are one name but for capitals and '_' for '-'. */
bool words_same(const char *a, const char *b);

/** The name that was written, as the set spells it; NULL when it has none. `number` (may be NULL) is which. */
const char *words_find(words among, const char *written, uint32_t *number);

/** "auto, direct and packed". */
void words_list(words among, char *out, size_t bytes);

/** " (do you mean packed?)", or "" where nothing is near. */
text words_hint(words among, const char *written);

#endif
