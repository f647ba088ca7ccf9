/*
 * Progress on a terminal: one line on stderr that is written over again and again. Nothing is shown where stderr is no
 * terminal.
 */
#ifndef KVFERRY_CLI_PROGRESS_H
#define KVFERRY_CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct progress {
    bool shown;
    uint64_t begin_ns;
    double furthest; /* the largest share that was shown */
} progress;

/** Begins to measure the time. */
progress progress_begin(void);

/**
 * Shows what is being done, the share of the whole that is done, and about how much time is left if the rest is as
 * fast. The share that is shown never shrinks.
 *
 * @param share  from 0 to 1
 */
void progress_show(progress *of, double share, const char *doing, ...) __attribute__((format(printf, 3, 4)));

/** Clears the line, if one is shown. Every message on stderr does so first. */
void progress_clear(void);

#endif
