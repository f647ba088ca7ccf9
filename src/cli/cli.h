/*
 * The command's frame: subcommands, exit codes, and error messages.
 */
#ifndef KVFERRY_CLI_H
#define KVFERRY_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kvferry/status.h>

enum {
    EXIT_DONE = 0,
    EXIT_FAILED = 1, /* the work was begun and did not succeed, or a file cannot be read or written */
    EXIT_USAGE = 2,  /* an argument is wrong, or what the file has that it names */
};

/** Prints one sentence on stderr. */
void notice(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** Prints one sentence on stderr and returns EXIT_USAGE. */
int usage_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** Prints one sentence on stderr and returns EXIT_FAILED. */
int failure(const char *format, ...) __attribute__((format(printf, 1, 2)));

/**
 * Prints "context: " and the library's detail of its last failure on stderr. Returns EXIT_FAILED if the machine is
 * at fault (memory, input and output), otherwise EXIT_USAGE: a given number, name or shape is wrong.
 */
int library_error(kvf_status status, const char *context, ...) __attribute__((format(printf, 2, 3)));

/** The same, always EXIT_FAILED. */
int library_failure(kvf_status status, const char *context, ...) __attribute__((format(printf, 2, 3)));

/** A subcommand. */
typedef struct command {
    const char *name;
    const char *operands; /* as its usage names them; "" for none */
    const char *summary;
    uint32_t bit;                      /* marks the options that it takes, see options.c */
    int (*run)(int argc, char **argv); /* NULL: this build lacks what the command needs */
} command;

/** The i-th subcommand; NULL past the last. */
const command *command_get(uint32_t i);

enum {
    COMMAND_PLAN = 1,
    COMMAND_DEMO = 2,
    COMMAND_BENCH = 4,
    COMMAND_MODELS = 8,
    COMMAND_EXPLAIN = 16,
    COMMAND_TRANSPORTS = 32,
    COMMAND_DOCTOR = 64,
    COMMAND_SERVE = 128,
    COMMAND_FETCH = 256,
    COMMAND_PING = 512,
    COMMAND_KEYS = 1024,
    COMMAND_COMPLETION = 2048,
    COMMAND_SWEEP = 4096,
    COMMAND_ASK = 8192,
    COMMAND_SIMULATE = 16384,
};

int run_plan(int argc, char **argv);
int run_sweep(int argc, char **argv);
int run_simulate(int argc, char **argv);
int run_demo(int argc, char **argv);
int run_bench(int argc, char **argv);
int run_models(int argc, char **argv);
int run_explain(int argc, char **argv);
int run_transports(int argc, char **argv);
int run_doctor(int argc, char **argv);
int run_serve(int argc, char **argv);
int run_fetch(int argc, char **argv);
int run_ping(int argc, char **argv);
int run_ask(int argc, char **argv);
int run_keys(int argc, char **argv);
int run_completion(int argc, char **argv);

/** Prints what `kvferry help COMMAND` says. */
void print_command_help(uint32_t command_bit);

#endif
