/*
 * The two engines of a job: their shapes, their ranks, and a verified plan for every decode rank.
 */
#ifndef KVFERRY_CLI_ENGINES_H
#define KVFERRY_CLI_ENGINES_H

#include <json-c/json.h>
#include <kvferry/plan.h>

#include "options.h"
#include "shape.h"

typedef struct engines {
    kvf_model *model;
    engine_shape prefill_shape, decode_shape;
    kvf_engine *prefill, *decode; /* NULL until engines_build() */
    uint32_t convert;             /* the types that are converted between them: a set, see KVF_DTYPE_BIT() */
} engines;

/** Loads the model and reads the shapes that the user gave. Free with engines_free() in either case. */
int engines_read(const options *asked, engines *out);

/** Lays out the engines that have a shape, with the block counts that are in the shape at this time. */
int engines_build(engines *all);

void engines_free(engines *all);

/** Prints the model and the shapes, a line each. */
void engines_print(const engines *all);

/** Prints the content of the first ranks' memory regions; either engine may be NULL. False if memory ran out. */
bool engines_print_regions(const kvf_engine *prefill, const kvf_engine *decode);

/** Adds the same as JSON, for all ranks: "model", and "prefill" and "decode" if those engines exist. */
void engines_add_json(const engines *all, struct json_object *out);

/** Bytes of all memory regions of an engine; 0 of none. */
uint64_t engine_bytes(const kvf_engine *engine);

/** Builds the plan of one decode rank, with the chosen replicas. If the user asked for different types, the plan
 * converts. */
int engines_plan(const kvf_engine *decode, uint32_t rank, const kvf_engine *prefill, const options *asked,
                 kvf_plan **out);

/** Proves a plan; prints what is wrong with it. A plan that converts has no rules, and so nothing to prove. */
int engines_verify(const kvf_plan *plan, uint32_t rank);

#endif
