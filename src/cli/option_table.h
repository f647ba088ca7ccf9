/*
 * The only table of options. A row has an option's commands, default and field, how its value is read, and when the
 * option would have no effect. The parser, the help and the shells' completions read this table; the check of the
 * manual pages reads the help.
 */
#ifndef KVFERRY_CLI_OPTION_TABLE_H
#define KVFERRY_CLI_OPTION_TABLE_H

#include "options.h"
#include "words.h"

typedef struct option_row option_row;

/** Reads a value; if it is wrong, prints what is allowed and returns EXIT_USAGE. */
typedef int (*option_take)(const option_row *row, const char *written, options *out);

/** Says why the option has no effect together with the other given options; NULL: it has an effect. */
typedef const char *(*option_idle)(const options *asked);

struct option_row {
    const char *name;
    const char *argument; /* as the help names it, in brackets if it may be left out; NULL: takes none */
    const char *help;     /* NULL: for tests, not shown */
    const char *standard; /* the value if the option is not given; NULL: none */
    uint32_t commands;    /* bits */
    option_take take;
    size_t field, field_bytes; /* where the value goes: offset in struct options, and size */
    uint64_t most;             /* the largest allowed number */
    word_of words;             /* the allowed values, or what a value may begin with; NULL: any */
    bool file;                 /* the value is, or may be, the name of a file */
    bool keys;                 /* the words are keys of KEY=VALUE,... */
    bool many;                 /* may be given several times */
    option_idle idle;          /* NULL: always has an effect */
};

/** The i-th row; NULL past the last. */
const option_row *option_row_get(uint32_t i);

/** The row of a command's option; NULL: the command has none such. `number` (may be NULL) receives its index. */
const option_row *option_row_find(uint32_t command_bit, const char *name, uint32_t *number);

/** Whether an option may be given without its value. */
bool option_value_may_be_left_out(const option_row *row);

/** The names of the options that a command shows. */
words option_names(const uint32_t *command_bit);

/** The largest number of operands of a command. */
uint32_t option_most_operands(uint32_t command_bit);

#endif
