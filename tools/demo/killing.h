/*
 * Killing a producer in the middle of a request, as the coordinator sees it: what the agents of all other ranks report,
 * when their blocks are free, and how another process takes the victim's place.
 */
#ifndef KVFERRY_DEMO_KILLING_H
#define KVFERRY_DEMO_KILLING_H

#include <json-c/json.h>

#include "crew.h"

/** Chooses the rank to kill: the first from which decode rank 0 reads; prints what is in the way. */
int killing_prepare(demo_job *job);

/**
 * Starts the broken request, kills the victim when some bytes have moved, collects the other ranks' reports, and starts
 * the victim's rank again.
 *
 * @param out  its `told` is freed by killing_free(), in either case
 * @return EXIT_DONE, or EXIT_FAILED after printing what is wrong
 */
int kill_producer(crew *all, kvf_agent *directory, killing *out);

void killing_free(killing *freed);

/** Prints the ranks' reports as a table, and the agents' sentences below it. */
int killing_print(const demo_job *job, const killing *of);

struct json_object *killing_json(const demo_job *job, const killing *of);

#endif
