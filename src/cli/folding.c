#include "folding.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { USUAL_WIDTH = 80, LEAST_WIDTH = 40, MOST_WIDTH = 100000 };

static size_t width_of_terminal(void) {
    const char *told = getenv("COLUMNS");
    struct winsize size = {0};
    const long columns = told ? strtol(told, NULL, 10) : 0;
    if (columns > 0)
        return (size_t)columns;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
        return size.ws_col;
    return USUAL_WIDTH;
}

size_t fold_width(void) {
    size_t width = width_of_terminal();
    return width < LEAST_WIDTH ? LEAST_WIDTH : width > MOST_WIDTH ? MOST_WIDTH : width;
}

size_t fold_at(const char *text, size_t width) {
    size_t length = strlen(text), fits = 0;
    if (length <= width)
        return length;
    for (size_t at = strcspn(text, " "); at < length && (fits == 0 || at <= width);
         at += 1 + strcspn(text + at + 1, " "))
        fits = at;
    return fits ? fits : length; /* a single word is not cut */
}

const char *fold_rest(const char *text, size_t length) {
    text += length;
    return text + strspn(text, " ");
}

void print_folded(size_t from, size_t indent, const char *text) {
    const size_t width = fold_width();
    for (size_t at = from;; at = indent) {
        size_t length = fold_at(text, at < width ? width - at : 0);
        printf("%.*s\n", (int)length, text);
        text = fold_rest(text, length);
        if (!*text)
            return;
        printf("%*s", (int)indent, "");
    }
}

void print_labelled(const char *label, const char *format, ...) {
    enum { LABEL = 9 };
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    printf("%-*s", LABEL, label);
    print_folded(LABEL, LABEL, text);
}

void print_paragraph(const char *format, ...) {
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    print_folded(0, 0, text);
}
