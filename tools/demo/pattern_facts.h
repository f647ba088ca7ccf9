/*
 * What `kvferry serve` tells `kvferry fetch` besides its shape: the numbers that determine all requests and contents,
 * and the port of the plain stream. They are facts of the engine (see kvf_agent_options). Both sides must share them,
 * because with other numbers the same bytes mean something else.
 */
#ifndef KVFERRY_DEMO_PATTERN_FACTS_H
#define KVFERRY_DEMO_PATTERN_FACTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct pattern_facts {
    uint64_t tokens, requests, seed;
    uint32_t stream_port;
} pattern_facts;

/** Writes the facts, a line each. */
void pattern_facts_write(const pattern_facts *facts, char *out, size_t bytes);

/** Finds these facts among all facts of an engine; false: the engine holds no pattern. */
bool pattern_facts_read(const char *all, pattern_facts *out);

#endif
