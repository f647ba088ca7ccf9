/*
 * Numbers as users type them.
 */
#ifndef KVFERRY_CLI_NUMBERS_H
#define KVFERRY_CLI_NUMBERS_H

#include <stdbool.h>
#include <stdint.h>

/** Reads a whole number without a sign, with an optional suffix k, m, g or t: times 1024, 1024^2 and so on. */
bool parse_number(const char *text, uint64_t *out);

#endif
