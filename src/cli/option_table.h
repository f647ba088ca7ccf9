/*
 * The one table of options: a row says for which commands an option is, how its value is read and where it goes, its
 * default, and when it would have no effect. The parser, the help, the completions of shells, and through the help the
 * check of the manual pages, read only this table.
 */
#ifndef KVFERRY_CLI_OPTION_TABLE_H
#define KVFERRY_CLI_OPTION_TABLE_H

#include "options.h"
#include "words.h"

typedef struct option_row option_row;

/** Reads a value; if it is wrong, prints what is allowed and returns EXIT_USAGE. */
typedef int (*option_take)(const option_row *row, const char *written, options *out);

/** Why the option has no effect beside the other given options; NULL: it has one. */
typedef const char *(*option_idle)(const options *asked);

struct option_row {
    const char *name;
    const char *argument; /* as the help names it, in brackets where it may be left out; NULL: takes none */
    const char *help;     /* NULL: for tests, not shown */
    const char *standard; /* the value where the option is not given; NULL: none */
    uint32_t commands;    /* bits */
    option_take take;
    size_t field, field_bytes; /* of options: where it goes */
    uint64_t most;             /* of a number */
    word_of words;             /* the values that there are, or those to begin with; NULL: any */
    bool file;                 /* the value is, or may be, the name of a file */
    bool keys;                 /* the words are keys of KEY=VALUE,... */
    option_idle idle;          /* NULL: always has an effect */
};

/** The i-th row; NULL past the last. */
const option_row *option_row_get(uint32_t i);

/** The row of a command's option; NULL: it has none of this name. `number` (may be NULL) is which. */
const option_row *option_row_find(uint32_t command_bit, const char *name, uint32_t *number);

/** Whether an option may be given without its value. */
bool option_value_may_be_left_out(const option_row *row);

/** The names of the options that a command shows. */
words option_names(const uint32_t *command_bit);

/** The most operands of a command. */
uint32_t option_most_operands(uint32_t command_bit);

#endif
