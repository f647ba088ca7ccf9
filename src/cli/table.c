#include "table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

bool table_print(table *out, int indent) {
    int blanks = indent; /* held back, so that no line ends with them */
    for (size_t i = 0; i < out->count && !out->failed; i++) {
        size_t column = i % out->columns;
        int padding = (int)(out->width[column] - strlen(out->cells[i]));
        if (out->right[column])
            blanks += padding;
        if (out->cells[i][0]) {
            printf("%*s%s", blanks, "", out->cells[i]);
            blanks = 0;
        }
        blanks += out->right[column] ? 2 : padding + 2;
        if (column + 1 == out->columns) {
            printf("\n");
            blanks = indent;
        }
    }
    bool whole = !out->failed;
    table_free(out);
    return whole;
}

void table_free(table *out) {
    for (size_t i = 0; i < out->count; i++)
        free(out->cells[i]);
    free(out->cells);
    *out = (table){0};
}
