/*
 * Numbers as they are typed.
 */
#ifndef KVFERRY_CLI_NUMBERS_H
#define KVFERRY_CLI_NUMBERS_H

#include <stdbool.h>
#include <stdint.h>

/** Reads a whole number without a sign, with an optional suffix k, m, g or t: 1024 of it, and so on. */
bool parse_number(const char *text, uint64_t *out);

#endif
