/*
 * Pairs of shapes and what each takes: the result of `kvferry sweep`, as CSV, as JSON and as a map.
 */
#ifndef KVFERRY_CLI_SWEEP_H
#define KVFERRY_CLI_SWEEP_H

#include "alternatives.h"
#include "report.h"
#include "text.h"

/** One side: its shapes, and the engines that they make. */
typedef struct sweep_side {
    const char *name; /* "prefill" or "decode" */
    alternatives list;
    kvf_engine **engines; /* owned; of each shape, NULL if it is refused for this model */
} sweep_side;

typedef struct sweep {
    const options *asked;
    kvf_model *model; /* owned */
    sweep_side prefill, decode;
    report_totals
        *pairs;     /* owned; [prefill shape][decode shape]; `plans` is 0 if one of the two was refused */
    text cost_kind; /* of the transport whose costs are assumed */
} sweep;

/** The totals of one pair. */
const report_totals *sweep_pair(const sweep *of, uint32_t prefill, uint32_t decode);

/** Prints a line for each pair, and the titles before them. */
void sweep_print_csv(const sweep *of);

/** The same pairs as JSON; owned by the caller. */
struct json_object *sweep_json(const sweep *of);

/** Writes a page with a map: prefill shapes are its rows, decode shapes its columns. Says what went wrong. */
int sweep_write_page(const sweep *of, const char *file);

#endif
