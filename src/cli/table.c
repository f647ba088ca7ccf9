#include "table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "folding.h"

void table_cell(table *out, const char *cell) {
    if (out->count == out->capacity) {
        size_t capacity = out->capacity ? 2 * out->capacity : 64;
        char **cells = realloc(out->cells, capacity * sizeof *cells);
        if (!cells) {
            out->failed = true;
            return;
        }
        out->cells = cells;
        out->capacity = capacity;
    }
    char *copy = strdup(cell);
    if (!copy) {
        out->failed = true;
        return;
    }
    size_t column = out->count % out->columns, length = strlen(cell);
    out->cells[out->count++] = copy;
    if (length > out->width[column])
        out->width[column] = length;
}

void table_start(table *out, const char *titles) {
    *out = (table){.columns = 1};
    for (const char *c = titles; *c; c++)
        out->columns += *c == '|';
    for (size_t column = 0; column < out->columns; column++) {
        char title[64];
        size_t length = strcspn(titles, "|");
        out->right[column] = titles[0] == '>';
        (void)snprintf(title, sizeof title, "%.*s", (int)length - out->right[column],
                       titles + out->right[column]);
        table_cell(out, title);
        titles += length + (titles[length] == '|');
    }
}

/* ---- printing -------------------------------------------------------------------------------- */

/* The widths with which a table fits into a line. */
typedef struct fit {
    size_t width[TABLE_MAX_COLUMNS];
    size_t gap; /* blanks between columns */
} fit;

/* The least width of a column: of text, its longest word; numbers are never folded. */
static size_t least_width(const table *of, size_t column) {
    size_t least = 0;
    for (size_t i = column; i < of->count; i += of->columns)
        for (const char *rest = of->cells[i]; *rest; rest = fold_rest(rest, strcspn(rest, " ")))
            if (strcspn(rest, " ") > least)
                least = strcspn(rest, " ");
    return of->right[column] ? of->width[column] : least;
}

static size_t line_length(const table *of, const fit *how) {
    size_t length = how->gap * (of->columns - 1);
    for (size_t column = 0; column < of->columns; column++)
        length += how->width[column];
    return length;
}

/* If a table is too wide, first narrows the gaps, then the widest columns of text, down to their longest words. */
static fit fit_table(const table *of, size_t width) {
    fit how = {.gap = 2};
    size_t least[TABLE_MAX_COLUMNS] = {0};
    for (size_t column = 0; column < of->columns; column++) {
        how.width[column] = of->width[column];
        least[column] = least_width(of, column);
    }
    if (line_length(of, &how) > width)
        how.gap = 1;
    while (line_length(of, &how) > width) {
        size_t widest = of->columns;
        for (size_t column = 0; column < of->columns; column++)
            if (how.width[column] > least[column] &&
                (widest == of->columns || how.width[column] > how.width[widest]))
                widest = column;
        if (widest == of->columns)
            break;
        how.width[widest]--;
    }
    return how;
}

/* Prints one line of a row, and leaves in `rest` the text that did not fit. False: no text is left. */
static bool print_line(const table *of, const fit *how, const char *rest[TABLE_MAX_COLUMNS], int indent) {
    int blanks = indent; /* held back, so that no line ends with them */
    bool more = false;
    for (size_t column = 0; column < of->columns; column++) {
        size_t length = fold_at(rest[column], how->width[column]);
        int padding = (int)(how->width[column] - length);
        if (of->right[column])
            blanks += padding;
        if (length) {
            printf("%*s%.*s", blanks, "", (int)length, rest[column]);
            blanks = 0;
        }
        blanks += (int)how->gap + (of->right[column] ? 0 : padding);
        rest[column] = fold_rest(rest[column], length);
        more = more || *rest[column];
    }
    printf("\n");
    return more;
}

bool table_print(table *out, int indent) {
    const size_t width = fold_width();
    bool whole = !out->failed;
    fit how = {.gap = 0};
    if (whole)
        how = fit_table(out, width > (size_t)indent ? width - (size_t)indent : 0);
    for (size_t i = 0; i < out->count && whole; i += out->columns) {
        const char *rest[TABLE_MAX_COLUMNS];
        for (size_t column = 0; column < out->columns; column++)
            rest[column] = i + column < out->count ? out->cells[i + column] : "";
        while (print_line(out, &how, rest, indent))
            continue;
    }
    table_free(out);
    return whole;
}

void table_free(table *out) {
    for (size_t i = 0; i < out->count; i++)
        free(out->cells[i]);
    free(out->cells);
    *out = (table){0};
}
