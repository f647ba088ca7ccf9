/*
 * Shapes with alternatives, as `kvferry sweep` takes them: "tp=1/2,order=nhd/hnd" is four shapes.
 */
#ifndef KVFERRY_CLI_ALTERNATIVES_H
#define KVFERRY_CLI_ALTERNATIVES_H

#include <stdint.h>

/** The largest number of shapes of one side. */
enum { ALTERNATIVES_MAX = 256 };

typedef struct alternatives {
    char **shapes; /* owned; the last key changes first */
    uint32_t count;
} alternatives;

/**
 * Writes out all shapes of a text. Returns EXIT_DONE, or prints what is wrong: too many shapes, or an empty
 * alternative. shape_parse() checks the shapes themselves. Free the list in either case.
 *
 * @param side  for messages: "prefill" or "decode"
 */
int alternatives_expand(const char *side, const char *text, alternatives *out);

void alternatives_free(alternatives *list);

#endif
