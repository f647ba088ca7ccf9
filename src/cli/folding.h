/*
 * Lines that are no longer than who reads them has room for, as far as their words allow.
 */
#ifndef KVFERRY_CLI_FOLDING_H
#define KVFERRY_CLI_FOLDING_H

#include <stddef.h>

/** Characters of a line: as many as COLUMNS says, or the terminal has, or 80. */
size_t fold_width(void);

/** How much of a text goes on a line of so many characters: up to a blank, and at least a word. */
size_t fold_at(const char *text, size_t width);

/** What is left of a text after so much of it went on a line. */
const char *fold_rest(const char *text, size_t length);

/** Prints a text and ends its line. It begins at column `from`; further lines begin with `indent` blanks. */
void print_folded(size_t from, size_t indent, const char *text);

/** The same of a paragraph that begins its line. */
void print_paragraph(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
