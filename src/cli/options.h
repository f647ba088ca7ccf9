/*
 * The options of all commands: one table says which command takes which.
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

/** The most operands that a command takes, and keys that it may be given to allow. */
enum { OPTIONS_MAX_OPERANDS = 2, OPTIONS_MAX_KEYS = 64 };

/** What was asked for. Texts belong to argv. What speaks with running engines has no shapes and no model but those
 * asked for. */
typedef struct options {
    const char *model;
    kvf_config_options config;
    const char *prefill; /* engine shapes, see shape.h */
    const char *decode;
    uint64_t tokens;   /* of a prompt; 0: chosen */
    uint64_t requests; /* 0: chosen */
    const char *transport;
    bool fabrics;   /* what each would take */
    bool calibrate; /* measure what can be */
    const char *ucx_tls;
    const char *ucx_library;
    const char *ucx_devices;
    kvf_way way;
    bool brought_memory;
    bool no_direct_read;
    uint64_t memory_limit; /* bytes */
    uint32_t in_flight;    /* requests at once */
    uint32_t rounds;
    uint32_t timeout_s;
    uint64_t seed;
    bool first_replica;
    kvf_memory_kind prefill_memory, decode_memory; /* for predictions */
    bool json;
    const char *json_file;
    const char *html;    /* the file of a page; NULL: none */
    const char *corrupt; /* a coordinate, see corrupt.h */
    fault_kind fault;
    const char *fault_rank; /* such as "decode:1" */
    const char *key_file;
    const char *listen;
    const char *allowed_keys[OPTIONS_MAX_KEYS]; /* public keys that may connect */
    uint32_t allowed_key_count;                 /* 0: everyone */
    bool insecure;
    uint32_t count;        /* of greetings */
    char *const *operands; /* what is no option */
    uint32_t operand_count;
} options;

/**
 * Reads a command's options. Returns EXIT_DONE, or says what is wrong and returns EXIT_USAGE.
 *
 * @param command_bit  which command: options that it does not take are errors
 */
int options_parse(int argc, char **argv, uint32_t command_bit, options *out);

enum { UCX_SETTINGS_MAX = 3 };

/** What was asked for of UCX, as settings of a transport, whose number is returned. */
uint32_t options_ucx_settings(const options *asked, kvf_setting out[UCX_SETTINGS_MAX]);

/**
 * Opens an endpoint with every kind of transport that "auto" takes here; says what is wrong when it cannot.
 *
 * @param emulated  also with a UCX that only emulates one-sided operations
 */
int options_open_transport(const options *asked, bool emulated, kvf_transport **out);

/** Loads the model that was asked for; says what is wrong when it cannot. */
int options_load_model(const options *asked, kvf_model **out);

/** Says on stderr what is to be known of how a model was read. */
void options_say_notes(const char *name, const kvf_model *model);

/** Reads a whole number with an optional suffix k, m, g or t (KiB and so on). */
bool parse_bytes(const char *text, uint64_t *out);

/** Reads a whole number without a sign. */
bool parse_number(const char *text, uint64_t *out);

#endif
