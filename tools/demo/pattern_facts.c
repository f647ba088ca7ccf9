#include "pattern_facts.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void pattern_facts_write(const pattern_facts *facts, char *out, size_t bytes) {
    (void)snprintf(out, bytes,
                   "pattern: tokens %" PRIu64 ", requests %" PRIu64 ", seed %" PRIu64 "\nstream: %u\n",
                   facts->tokens, facts->requests, facts->seed, facts->stream_port);
}

/* The text after the name of a fact. */
static const char *value_of(const char *all, const char *name) {
    size_t length = strlen(name);
    for (const char *line = all; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, name, length) == 0)
            return line + length;
    }
    return NULL;
}

/* Reads a number that follows some words, and moves `text` past both. */
static bool take_number(const char **text, const char *words, uint64_t *out) {
    size_t length = strlen(words);
    if (strncmp(*text, words, length) != 0 || (*text)[length] < '0' || (*text)[length] > '9')
        return false;
    char *end;
    *out = strtoull(*text + length, &end, 10);
    *text = end;
    return true;
}

bool pattern_facts_read(const char *all, pattern_facts *out) {
    const char *pattern = value_of(all, "pattern: "), *stream = value_of(all, "stream: ");
    uint64_t port = 0;
    bool whole = pattern && stream && take_number(&pattern, "tokens ", &out->tokens) &&
                 take_number(&pattern, ", requests ", &out->requests) &&
                 take_number(&pattern, ", seed ", &out->seed) && *pattern == '\n' &&
                 take_number(&stream, "", &port) && *stream == '\n';
    if (!whole || out->tokens == 0 || out->requests == 0 || port == 0 || port > UINT16_MAX)
        return false;
    out->stream_port = (uint32_t)port;
    return true;
}
