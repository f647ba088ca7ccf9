/*
 * The cells that each decode rank reads from each prefill rank, with every plan proved: as a table or as JSON.
 */
#ifndef KVFERRY_CLI_REPORT_H
#define KVFERRY_CLI_REPORT_H

#include <json-c/json.h>
#include <kvferry/stage.h>

#include "options.h"
#include "table.h"

/* Tokens of the predicted request if the user gives none. */
enum { REPORT_TOKENS = 1024 };

/** Sums over all decode ranks. */
typedef struct report_totals {
    uint64_t bytes, runs;
    double slowest_ns;       /* of the slowest rank, by the chosen way of each source */
    double long_ns;          /* the time of the same rank in long runs */
    uint32_t direct, packed; /* sources, by the way that would be chosen */
    uint32_t plans, fewest_rules, most_rules;
    size_t least_memory, most_memory;
} report_totals;

/** Kinds of transport that predictions are made for, besides the one that the user chose. */
enum { REPORT_FABRICS = 12 };

/** Times over one kind of transport: of the slowest decode rank, from all its sources one after another. */
typedef struct report_fabric {
    const char *kind; /* NULL: this entry and those after it are not used */
    double direct_ns, packed_ns, chosen_ns;
    uint32_t direct, packed; /* sources of all ranks, by the way that would be chosen */
} report_fabric;

/** One decode rank's plan, and the prediction for each of its sources. */
typedef struct report_rank {
    kvf_plan *plan;
    kvf_way_prediction *sources;
} report_rank;

typedef struct report {
    const options *asked;
    const kvf_engine *prefill, *decode;
    const char *cost_kind; /* of the transport whose costs are assumed */
    kvf_cost_model cost;
    report_rank *planned;      /* owned; of each decode rank, from report_make() on */
    table list;                /* the cells that each rank reads from each source */
    table sources;             /* the costs, by source */
    struct json_object *ranks; /* NULL: not wanted */
    report_totals sum;
    report_fabric fabrics[REPORT_FABRICS];
} report;

/** Begins a report. The caller keeps the engines, which must outlive it. Free it with report_free(). */
void report_start(report *to, const options *asked, const kvf_engine *prefill, const kvf_engine *decode);

/** Makes and proves the plan of every decode rank; prints what is wrong with the first that fails. */
int report_make(report *to);

/** The time of a source by the way that would be chosen. */
double report_chosen(const kvf_way_prediction *cost);

/** Where the costs of a kind of transport come from: "assumed", "calibrated", or a measurement of another day. */
const char *report_costs_are(const options *asked, const char *kind);

/** Writes one line about the prediction and the costs that it assumes. */
void report_say_costs(const report *of, char *out, size_t bytes);

/** A table of the times of the kinds of transport; without rows if it was not asked for. Free it. */
void report_list_fabrics(const report *to, table *out);

/** Prints the report: the assumed costs, the table, and the totals. */
int report_print(report *to);

/**
 * Warns on stderr if runs are short for the transport: if more than half of the predicted time is due to the number of
 * runs (or to packing them), not to their bytes.
 */
void report_warn(const report *to);

/** Adds the report: "tokens", "cost", "ranks", "total", and "fabrics" if they were asked for. */
void report_add_json(report *to, struct json_object *out);

void report_free(report *to);

#endif
