/*
 * Names of a known set as users type them. Capitals and '_' for '-' are accepted; for a wrong name the nearest one is
 * suggested.
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

/** The set of the names in an array that ends with NULL. */
words words_of_array(const char *const *names);

/** Whether two names differ only in capitals and '_' for '-'. */
bool words_same(const char *a, const char *b);

/** Finds a written name, and returns it as the set spells it; NULL: none. `number` (may be NULL) receives its index. */
const char *words_find(words among, const char *written, uint32_t *number);

/** Writes all names as "auto, direct and packed". */
void words_list(words among, char *out, size_t bytes);

/** Suggests the nearest name, " (do you mean packed?)"; "" if none is near. */
text words_hint(words among, const char *written);

#endif
