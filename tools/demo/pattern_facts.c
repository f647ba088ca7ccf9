#include "pattern_facts.h"

#include <inttypes.h>
#include <stdio.h>
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

bool pattern_facts_read(const char *all, pattern_facts *out) {
    char again[160];
    const char *pattern = value_of(all, "pattern: "), *stream = value_of(all, "stream: ");
    /* NOLINTNEXTLINE(cert-err34-c): what was read is written again and compared */
    if (!pattern || !stream ||
        sscanf(pattern, "tokens %" SCNu64 ", requests %" SCNu64 ", seed %" SCNu64, &out->tokens,
               &out->requests, &out->seed) != 3 ||
        sscanf(stream, "%u", &out->stream_port) != 1)
        return false;
    pattern_facts_write(out, again, sizeof again);
    const char *line = strchr(again, '\n');
    return out->tokens > 0 && out->requests > 0 && out->stream_port > 0 && out->stream_port <= UINT16_MAX &&
           strncmp(pattern, again + strlen("pattern: "), (size_t)(line - again) - strlen("pattern: ")) == 0;
}
