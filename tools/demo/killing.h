/*
 * A producer that is killed in the middle of a request, as a coordinator sees it: what every other rank is told, when its
 * blocks are free, and how another process takes the place of the killed one.
 */
#ifndef KVFERRY_DEMO_KILLING_H
#define KVFERRY_DEMO_KILLING_H

#include <json-c/json.h>

#include "crew.h"

/** Chooses the rank to kill: the first from which decode rank 0 reads; prints what is in the way. */
int killing_prepare(demo_job *job);

/**
 * Starts the first request, kills the victim when some of it has moved, hears what the others were told, and starts the
 * victim anew.
 *
 * @param out  its `told` is freed by killing_free(), in either case
 * @return EXIT_DONE, or EXIT_FAILED after saying what failed
 */
int kill_producer(crew *all, kvf_agent *directory, killing *out);

void killing_free(killing *freed);

/** As a table with the sentences that ranks were told. */
int killing_print(const demo_job *job, const killing *of);

struct json_object *killing_json(const demo_job *job, const killing *of);

#endif
