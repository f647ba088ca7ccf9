/*
 * What every benchmark shares: time, medians, and a report that is printed as tables and, with --json FILE,
 * written as JSON.
 *
 *     bench_report *report = bench_report_start("transport", argc, argv);
 *     bench_table(report, "Same host", (const char *[]){"block", "GB/s", NULL});
 *     bench_text(report, "512 B");
 *     bench_number(report, 2, 7.1);
 *     return bench_report_end(report);
 */
#ifndef BENCH_REPORT_H
#define BENCH_REPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kvferry/status.h>

typedef struct bench_report bench_report;

/** Reads the arguments (--json FILE) and prints a description of the machine. Ends the program if they are wrong.
 */
bench_report *bench_report_start(const char *name, int argc, char **argv);

/** Begins a table; `columns` ends with NULL. */
void bench_table(bench_report *report, const char *title, const char *const *columns);

/** The next cell of the table; a row ends with its last column. */
void bench_text(bench_report *report, const char *text);
void bench_number(bench_report *report, int decimals, double number);

/** A sentence below the last table. */
void bench_note(bench_report *report, const char *sentence);

/** Marks the report as failed: something it requires does not hold. */
void bench_fail(bench_report *report, const char *sentence);

/** Writes the tables so far to the file of --json: they stay there if the program is killed later. */
void bench_report_save(bench_report *report);

/** Prints and writes the rest; returns main()'s result: 0, or 1 if something failed. */
int bench_report_end(bench_report *report);

/** Nanoseconds of a clock that only goes forward. */
uint64_t bench_now_ns(void);

/** Median and range of measurements, which it sorts. */
typedef struct bench_spread {
    double median, low, high;
} bench_spread;
bench_spread bench_spread_of(double *values, size_t count);

/** "512 B", "2 KiB", "256 MiB", in a buffer that the next call but three uses again. */
const char *bench_bytes(uint64_t bytes);

/** Allocates memory, or ends the program. */
void *bench_alloc(size_t count, size_t element_bytes);

/** 0 to `count` - 1 in a random order that is the same in each run of a program, for free(). */
uint32_t *bench_shuffled(size_t count);

/** Ends the program with a sentence unless `held`. */
void bench_require(bool held, const char *sentence);

/** Ends the program with the sentence of a call of the library that failed. */
void bench_must(kvf_status status);

#endif
