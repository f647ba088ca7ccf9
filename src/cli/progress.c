#include "progress.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "clock.h"

static bool line_is_shown; /* of this process: it has one terminal */

progress progress_begin(void) {
    return (progress){.shown = isatty(STDERR_FILENO) == 1, .begin_ns = now_ns()};
}

void progress_show(progress *of, double share, const char *doing, ...) {
    if (!of->shown)
        return;
    if (share > of->furthest)
        of->furthest = share;
    va_list values;
    va_start(values, doing);
    progress_clear();
    line_is_shown = true;
    (void)vfprintf(stderr, doing, values);
    va_end(values);
    (void)fprintf(stderr, ", %.0f%% of all", 100 * of->furthest);
    if (of->furthest > 0) {
        const double ns = (double)(now_ns() - of->begin_ns) * (1 - of->furthest) / of->furthest;
        (void)fprintf(stderr, ", about %.0f s left", ns / 1e9);
    }
}

void progress_clear(void) {
    if (line_is_shown)
        (void)fputs("\r\033[K", stderr);
    line_is_shown = false;
}
