/*
 * kvferry: explains, demonstrates and measures moving KV caches between engines of different shape.
 */
#include <ctype.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "folding.h"
#include "progress.h"
#include "words.h"

/* The function of a command that needs agents: NULL in a build without them. */
#ifdef KVF_WITHOUT_AGENT
#define WITH_AGENT(run) NULL
#else
#define WITH_AGENT(run) run
#endif

static const command commands[] = {
    {"plan", "", "show who reads what from whom, and what it costs", COMMAND_PLAN, run_plan},
    {"sweep", "", "compare pairs of shapes: the time that each takes, as CSV and as a heat map",
     COMMAND_SWEEP, run_sweep},
    {"simulate", "", "run a deployment of many engines on a clock of its own: how long requests take",
     COMMAND_SIMULATE, WITH_AGENT(run_simulate)},
    {"demo", "", "move and verify a cache between two engines of real processes", COMMAND_DEMO,
     WITH_AGENT(run_demo)},
    {"serve", "", "hold a cache that another machine can fetch", COMMAND_SERVE, WITH_AGENT(run_serve)},
    {"fetch", " ENDPOINT[,KEY]",
     "fetch the cache that another machine serves, verify it and measure the network", COMMAND_FETCH,
     WITH_AGENT(run_fetch)},
    {"ping", " ENDPOINT[,KEY]", "show whether an engine answers, which one it is, and the round-trip time",
     COMMAND_PING, WITH_AGENT(run_ping)},
    {"ask", " ENDPOINT[,KEY] drain|resume|list|hand-over [NAME]",
     "ask a running engine to drain, to resume, to list or to hand over requests", COMMAND_ASK,
     WITH_AGENT(run_ask)},
    {"keys", "", "make a pair of keys for --key-file", COMMAND_KEYS, WITH_AGENT(run_keys)},
    {"bench", "", "measure planning, run generation and transfer", COMMAND_BENCH, WITH_AGENT(run_bench)},
    {"models", "", "list the models that come with the library", COMMAND_MODELS, run_models},
    {"transports", "", "list the kinds of transport: which work on this machine, and with which library",
     COMMAND_TRANSPORTS, run_transports},
    {"doctor", "", "examine this machine: transports, permissions, limits, clocks, and what to do",
     COMMAND_DOCTOR, run_doctor},
    {"explain", " ENDPOINT[,KEY] [ENDPOINT[,KEY]]",
     "describe running engines, and show who reads what from whom", COMMAND_EXPLAIN, WITH_AGENT(run_explain)},
    {"completion", " bash|zsh|fish",
     "print a script with which a shell completes commands, options and their values", COMMAND_COMPLETION,
     run_completion},
};

static const size_t command_count = sizeof commands / sizeof *commands;

/* One line, whatever a file says that is quoted in it: '?' stands for characters that would begin another line, or move
 * the cursor of a terminal. */
__attribute__((format(printf, 1, 0))) static void say(const char *format, va_list arguments) {
    char *sentence = NULL;
    if (vasprintf(&sentence, format, arguments) < 0)
        sentence = NULL;
    for (char *at = sentence; at && *at; at++)
        if (iscntrl((unsigned char)*at))
            *at = '?';
    (void)fflush(stdout);
    progress_clear();
    (void)fprintf(stderr, "kvferry: %s\n", sentence ? sentence : "not enough memory");
    free(sentence);
}

void notice(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
}

int usage_error(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
    return EXIT_USAGE;
}

int failure(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
    return EXIT_FAILED;
}

__attribute__((format(printf, 2, 0))) static void say_detail(kvf_status status, const char *context,
                                                             va_list arguments) {
    char before[512];
    (void)vsnprintf(before, sizeof before, context, arguments);
    const char *detail = kvf_error_detail();
    (void)failure("%s: %s", before, detail[0] ? detail : kvf_status_name(status));
}

int library_error(kvf_status status, const char *context, ...) {
    va_list arguments;
    va_start(arguments, context);
    say_detail(status, context, arguments);
    va_end(arguments);
    return status == KVF_E_NOMEM || status == KVF_E_IO ? EXIT_FAILED : EXIT_USAGE;
}

int library_failure(kvf_status status, const char *context, ...) {
    va_list arguments;
    va_start(arguments, context);
    say_detail(status, context, arguments);
    va_end(arguments);
    return EXIT_FAILED;
}

const command *command_get(uint32_t i) {
    return i < command_count ? &commands[i] : NULL;
}

static const command *find(const char *name) {
    for (size_t i = 0; i < command_count; i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

static const char *command_word(const void *set, uint32_t i) {
    (void)set;
    return i < command_count ? commands[i].name : i == command_count ? "help" : NULL;
}

static int unknown(const char *name) {
    const words names = {command_word, NULL};
    char list[160];
    words_list(names, list, sizeof list);
    return usage_error("there is no command \"%s\"; the commands are %s%s", name, list,
                       words_hint(names, name).text);
}

static void print_summary(const char *name, const char *summary) {
    enum { LEFT = 13 };
    printf("  %-*s", LEFT - 2, name);
    print_folded(LEFT, LEFT, summary);
}

static int print_help(void) {
    printf("Usage: kvferry COMMAND [OPTION...]\n\n"
           "Moves KV caches between LLM inference engines of different shape.\n\n"
           "Commands:\n");
    for (size_t i = 0; i < command_count; i++)
        print_summary(commands[i].name, commands[i].summary);
    print_summary("help", "show how to use a command: kvferry help COMMAND");
    printf("\n  --help       this text\n"
           "  --version    the version of the library\n");
    return EXIT_DONE;
}

static int print_help_about(const char *name) {
    if (strcmp(name, "help") == 0)
        return print_help();
    const command *about = find(name);
    if (!about)
        return unknown(name);
    printf("Usage: kvferry %s%s [OPTION...]\n\n%c%s.\n\n", about->name, about->operands,
           about->summary[0] - 'a' + 'A', about->summary + 1);
    print_command_help(about->bit);
    return EXIT_DONE;
}

/* Whether "--help" is among the options. */
static bool asks_for_help(int argc, char **argv) {
    bool asks = false;
    for (int i = 2; i < argc && strcmp(argv[i], "--") != 0; i++)
        asks = asks || strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0;
    return asks;
}

/* Words that are no command, such as "--version", take no options; "help" takes one name. */
static int most_words(const char *name) {
    const bool is_help = strcmp(name, "help") == 0;
    return is_help ? 3 : name[0] == '-' ? 2 : INT_MAX;
}

static int run(int argc, char **argv) {
    if (argc < 2)
        return usage_error("a command is needed; \"kvferry help\" lists them");
    const char *name = argv[1];
    if (argc > most_words(name))
        return usage_error("\"%s\" is not expected after %s", argv[most_words(name)], name);
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
        return print_help();
    if (strcmp(name, "help") == 0)
        return argc > 2 && !asks_for_help(argc, argv) ? print_help_about(argv[2]) : print_help();
    if (strcmp(name, "--version") == 0) {
        printf("kvferry %s\n", kvf_version());
        return EXIT_DONE;
    }
    const command *chosen = find(name);
    if (!chosen)
        return unknown(name);
    if (asks_for_help(argc, argv))
        return print_help_about(name);
    if (!chosen->run)
        return failure("%s needs agents, and this build has none: it was made with KVF_WITH_AGENT=OFF", name);
    return chosen->run(argc - 1, argv + 1);
}

/* Takes the numbers of standard files that are closed: no socket of the command may get what is printed. */
static void keep_standard_files(void) {
    int fd;
    do
        fd = open("/dev/null", O_RDONLY); /* writing there fails, as to a closed file */
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0)
        (void)close(fd);
}

int main(int argc, char **argv) {
    keep_standard_files();
    int result = run(argc, argv);
    if (fflush(stdout) != 0 || ferror(stdout))
        return failure("writing to standard output failed");
    return result;
}
