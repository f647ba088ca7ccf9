/*
 * A table of text. Columns are as wide as their widest cell; if the table would be wider than a line, they are folded.
 */
#ifndef KVFERRY_CLI_TABLE_H
#define KVFERRY_CLI_TABLE_H

#include <stdbool.h>
#include <stddef.h>

enum { TABLE_MAX_COLUMNS = 12 };

typedef struct table {
    size_t columns;
    bool right[TABLE_MAX_COLUMNS]; /* aligned to the right, as numbers are */
    size_t width[TABLE_MAX_COLUMNS];
    char **cells; /* owned; row by row, the titles first */
    size_t count, capacity;
    bool failed; /* no memory: nothing is printed */
} table;

/**
 * Begins a table.
 *
 * @param titles  of the columns, '|' between them; a title that begins with '>' aligns its column to the right
 */
void table_start(table *out, const char *titles);

/** Adds the next cell; cells fill the rows from the left. */
void table_cell(table *out, const char *cell);

/** Prints the table, `indent` spaces before each row, and frees it. False when memory ran out. */
bool table_print(table *out, int indent);

/** Frees a table that is not printed. */
void table_free(table *out);

#endif
