/*
 * Traces of services that run: when requests came, and how long their prompts and outputs were.
 *
 *   Mooncake   a line is {"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, ...}
 *   Azure      a line is TIMESTAMP,ContextTokens,GeneratedTokens, under this line of titles
 */
#ifndef KVFERRY_CLI_TRACE_FILE_H
#define KVFERRY_CLI_TRACE_FILE_H

#include <kvferry/simulate.h>

/** Requests by rising times, of which the first is 0. */
typedef struct request_list {
    kvf_simulated_request *all; /* owned */
    uint64_t count, room;
} request_list;

/** Adds a request. False: no memory. */
bool requests_add(request_list *to, kvf_simulated_request request);

void requests_free(request_list *list);

/** Reads a trace; prints what is wrong with it. Requests without a prompt are left out. */
int trace_read(const char *path, request_list *out);

#endif
