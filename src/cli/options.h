/*
 * The options of all commands, as the user gave them. option_table.h has the options that each command takes.
 */
#ifndef KVFERRY_CLI_OPTIONS_H
#define KVFERRY_CLI_OPTIONS_H

#include <kvferry/model.h>
#include <kvferry/stage.h>

#include "cli.h"

/** A way to break a demo, to prove that it notices. */
typedef enum fault_kind {
    FAULT_NONE = 0,
    FAULT_DIE,
    FAULT_HANG,
} fault_kind;

/** The largest numbers of a command's operands, of allowed keys, and of rows of the table of options. */
enum { OPTIONS_MAX_OPERANDS = 3, OPTIONS_MAX_KEYS = 64, OPTIONS_MAX_ROWS = 128 };

/** Of a key as it is written. */
enum { KEY_CHARACTERS = 40 };

/** Public keys. */
typedef struct option_keys {
    const char *all[OPTIONS_MAX_KEYS];
    uint32_t count;
} option_keys;

/** The options that the user gave. Texts belong to argv. Commands that speak with running engines have no default
 * shapes or model. */
typedef struct options {
    uint32_t command; /* its bit */
    const char *model;
    const char *groups; /* a file of groups made by hand; NULL: none */
    kvf_config_options config;
    const char *prefill; /* engine shapes, see shape.h */
    const char *decode;
    uint64_t tokens;   /* of a prompt; 0: chosen */
    uint64_t requests; /* 0: chosen */
    const char *transport;
    bool fabrics;   /* predict the times of every kind of transport */
    bool calibrate; /* measure the costs that can be measured here */
    const char *ucx_tls;
    const char *ucx_library;
    const char *ucx_devices;
    const char *libfabric_provider;
    const char *libfabric_domain;
    const char *libfabric_library;
    kvf_way way;
    bool brought_memory;
    bool no_direct_read;
    bool push;             /* prefill writes the cache, instead of decode reading it */
    bool kill;             /* a prefill rank dies in the middle */
    bool families;         /* list families, not models */
    uint64_t memory_limit; /* bytes */
    uint32_t in_flight;    /* requests at once */
    uint32_t rounds;
    uint32_t timeout_s;
    uint64_t seed;
    /* of a simulation */
    const char *trace; /* a file of requests; NULL: they are drawn */
    uint32_t rate;     /* requests a second; 0: that of the trace, or 1 */
    uint32_t prefill_engines, decode_engines;
    uint32_t prefill_speed, decode_speed; /* tokens a second */
    uint32_t push_tokens;                 /* 0: decode engines read */
    uint32_t link_gbit, latency_us, run_ns, lease_s;
    uint32_t killed, cut_off; /* engines */
    bool first_replica;
    kvf_memory_kind prefill_memory, decode_memory; /* for predictions */
    const char *json;                              /* a file, "-": instead of text; NULL: no JSON */
    const char *html;                              /* the file of a page; NULL: none */
    const char *corrupt;                           /* a coordinate, see corrupt.h */
    fault_kind fault;
    const char *fault_rank; /* such as "decode:1" */
    const char *key_file;
    const char *listen;
    option_keys allowed;   /* may connect; none: every key may */
    option_keys operators; /* may give commands, see kvf_ask() */
    bool local_commands;   /* programs of this machine may */
    bool insecure;
    uint32_t count;      /* of greetings */
    const char *to;      /* the place of an engine that takes a request over; NULL: none */
    uint32_t deadline_s; /* how long an engine may take to do as asked */
    const char *operands[OPTIONS_MAX_OPERANDS]; /* the arguments that are no options */
    uint32_t operand_count;
    bool given[OPTIONS_MAX_ROWS]; /* by row of the table */
} options;

/**
 * Reads a command's options. Returns EXIT_DONE, or prints what is wrong and returns EXIT_USAGE; EXIT_FAILED if the
 * file for JSON cannot be written.
 *
 * Options that the command does not take, and those that have no effect beside the others, are errors.
 *
 * @param command_bit  which command
 */
int options_parse(int argc, char **argv, uint32_t command_bit, options *out);

/** Whether text is printed: always, unless JSON goes to the standard output instead. */
bool options_want_text(const options *asked);

enum { OPTIONS_MAX_SETTINGS = 6 };

/** Writes the options about UCX and libfabric as settings of a transport, and returns their number. */
uint32_t options_settings(const options *asked, kvf_setting out[OPTIONS_MAX_SETTINGS]);

/**
 * Opens an endpoint with every kind of transport that "auto" takes here.
 *
 * @param emulated  also with a UCX that only emulates one-sided operations
 */
kvf_status options_open_transport(const options *asked, bool emulated, kvf_transport **out);

/** Loads the model that the user named; prints what is wrong if it cannot. */
int options_load_model(const options *asked, kvf_model **out);

/** Prints the notes about reading a model on stderr. */
void options_say_notes(const char *name, const kvf_model *model);

#endif
