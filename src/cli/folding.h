/*
 * Folds text into lines that fit the reader's terminal, as far as the words allow.
 */
#ifndef KVFERRY_CLI_FOLDING_H
#define KVFERRY_CLI_FOLDING_H

#include <stddef.h>

/** Characters of a line: from COLUMNS, or from the terminal, or 80. */
size_t fold_width(void);

/** Length of the beginning of a text that fits on a line of `width` characters: whole words, at least one. */
size_t fold_at(const char *text, size_t width);

/** The rest of a text after `length` characters of it went on a line. */
const char *fold_rest(const char *text, size_t length);

/** Prints a text and ends its line. It begins at column `from`; further lines begin with `indent` blanks. */
void print_folded(size_t from, size_t indent, const char *text);

/** Prints a label in the first nine columns, and the words behind it, folded there. */
void print_labelled(const char *label, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** The same of a paragraph that begins its line. */
void print_paragraph(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
