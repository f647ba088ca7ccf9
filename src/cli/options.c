#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shape.h"

enum {
    PREDICTING = COMMAND_PLAN | COMMAND_SWEEP,
    ALL_SHAPES = PREDICTING | COMMAND_DEMO | COMMAND_BENCH,
    MOVING = COMMAND_DEMO | COMMAND_BENCH,
    LOOKING = COMMAND_TRANSPORTS | COMMAND_DOCTOR,
    PLANNING = ALL_SHAPES | COMMAND_EXPLAIN,
    HOLDING = PLANNING | COMMAND_SERVE, /* what has a prefill engine */
    WANTING = PLANNING | COMMAND_FETCH, /* what has a decode engine */
    EITHER = HOLDING | WANTING,
    VISITING = COMMAND_EXPLAIN | COMMAND_PING | COMMAND_FETCH,
};

enum option_id {
    OPTION_MODEL = 1,
    OPTION_DTYPE,
    OPTION_STATE_DTYPE,
    OPTION_SCALES,
    OPTION_PREFILL,
    OPTION_DECODE,
    OPTION_TOKENS,
    OPTION_REQUESTS,
    OPTION_TRANSPORT,
    OPTION_COSTS_OF,
    OPTION_FABRICS,
    OPTION_CALIBRATE,
    OPTION_MOVE,
    OPTION_UCX_TLS,
    OPTION_UCX_LIBRARY,
    OPTION_UCX_DEVICES,
    OPTION_BROUGHT_MEMORY,
    OPTION_NO_DIRECT_READ,
    OPTION_MEMORY_LIMIT,
    OPTION_IN_FLIGHT,
    OPTION_ROUNDS,
    OPTION_TIMEOUT,
    OPTION_SEED,
    OPTION_REPLICAS,
    OPTION_CUDA_MEMORY,
    OPTION_JSON,
    OPTION_JSON_FILE,
    OPTION_HTML,
    OPTION_CORRUPT,
    OPTION_DIE,
    OPTION_HANG,
    OPTION_KEY_FILE,
    OPTION_LISTEN,
    OPTION_ALLOW,
    OPTION_INSECURE,
    OPTION_COUNT,
};

typedef struct option_row {
    const char *name;
    const char *argument; /* NULL: takes none */
    const char *help;     /* NULL: not shown */
    enum option_id id;
    uint32_t commands;
} option_row;

static const option_row rows[] = {
    {"listen", "ENDPOINT", "where to be met, such as tcp://10.0.0.1:5555 (tcp://127.0.0.1:*)", OPTION_LISTEN,
     COMMAND_SERVE},
    {"listen", "ENDPOINT", "where the engine is met, for packed messages, such as tcp://10.0.0.2:* (nowhere)",
     OPTION_LISTEN, COMMAND_FETCH},
    {"model", "NAME|FILE", "a model that \"kvferry models\" lists, or a config.json (llama-3.1-8b)",
     OPTION_MODEL, HOLDING},
    {"model", "NAME|FILE", "what the engine there must cache (whatever it does)", OPTION_MODEL,
     COMMAND_FETCH},
    {"dtype", "NAME", "element type of the attention cache, such as bf16 or fp8", OPTION_DTYPE,
     EITHER | COMMAND_MODELS},
    {"state-dtype", "NAME", "element type of recurrent state", OPTION_STATE_DTYPE, EITHER | COMMAND_MODELS},
    {"scales", "NAME[/head]", "keep quantisation scales of this type: one a token, or one a token and head",
     OPTION_SCALES, EITHER | COMMAND_MODELS},
    {"prefill", "SHAPE", "the engine that has the cache (tp=4,block=16,order=nhd)", OPTION_PREFILL,
     HOLDING & ~COMMAND_SWEEP},
    {"prefill", "SHAPES", "engines that have the cache, with / between values (tp=1/2/4/8,order=nhd/hnd)",
     OPTION_PREFILL, COMMAND_SWEEP},
    {"decode", "SHAPE", "the engine that needs it (tp=2,block=24,order=hnd)", OPTION_DECODE,
     WANTING & ~COMMAND_SWEEP},
    {"decode", "SHAPES", "engines that need it (tp=1/2/4/8,block=16/64,order=nhd/hnd)", OPTION_DECODE,
     COMMAND_SWEEP},
    {"tokens", "N", "tokens of the longest prompt", OPTION_TOKENS, HOLDING},
    {"requests", "N", "how many requests; as many as memory allows, up to 64", OPTION_REQUESTS,
     MOVING | COMMAND_SERVE},
    {"transport", "KIND", "auto, or one kind of transport (auto)", OPTION_TRANSPORT, EITHER & ~PREDICTING},
    {"transport", "KIND", "whose costs are taken; also shm/brought or ucx/emulated (auto)", OPTION_COSTS_OF,
     PREDICTING},
    {"fabrics", NULL, "say also what each kind of transport would take", OPTION_FABRICS, COMMAND_PLAN},
    {"calibrate", NULL, "measure on this machine what copies cost, instead of assuming it", OPTION_CALIBRATE,
     PREDICTING},
    {"move", "WAY", "auto, direct or packed (auto)", OPTION_MOVE, MOVING | COMMAND_SERVE | COMMAND_FETCH},
    {"ucx-tls", "LIST", "the transports UCX may use, as in UCX_TLS", OPTION_UCX_TLS,
     MOVING | COMMAND_SERVE | COMMAND_FETCH | LOOKING},
    {"ucx-library", "FILES", "the UCX to load: the first of these libucp that works (libucp.so.0)",
     OPTION_UCX_LIBRARY, MOVING | COMMAND_SERVE | COMMAND_FETCH | LOOKING},
    {"ucx-devices", "LIST", "the interfaces UCX may use, as in UCX_NET_DEVICES", OPTION_UCX_DEVICES,
     MOVING | COMMAND_SERVE | COMMAND_FETCH | LOOKING},
    {"brought-memory", NULL, "keep caches in plain private memory, not in memory the transport allocates",
     OPTION_BROUGHT_MEMORY, MOVING | COMMAND_SERVE | COMMAND_FETCH},
    {"no-direct-read", NULL, "do as if the kernel forbade reading another process's memory",
     OPTION_NO_DIRECT_READ, MOVING},
    {"memory-limit", "BYTES", "caches of both engines together (4g)", OPTION_MEMORY_LIMIT, MOVING},
    {"memory-limit", "BYTES", "caches of this engine (512m)", OPTION_MEMORY_LIMIT, COMMAND_SERVE},
    {"memory-limit", "BYTES", "caches of this engine (4g)", OPTION_MEMORY_LIMIT, COMMAND_FETCH},
    {"in-flight", "N", "requests that a decode rank has in flight at once (4)", OPTION_IN_FLIGHT,
     MOVING | COMMAND_FETCH},
    {"rounds", "N", "how often all requests are moved and verified", OPTION_ROUNDS, MOVING | COMMAND_FETCH},
    {"count", "N", "how many round trips to measure (5)", OPTION_COUNT, COMMAND_PING},
    {"timeout", "SECONDS", "how long a rank may be silent (60)", OPTION_TIMEOUT, MOVING},
    {"timeout", "SECONDS", "how long to wait for an answer (5)", OPTION_TIMEOUT,
     COMMAND_EXPLAIN | COMMAND_PING},
    {"timeout", "SECONDS", "how long meeting the engine, and each request, may take (60)", OPTION_TIMEOUT,
     COMMAND_FETCH},
    {"key-file", "FILE", "own keys, as \"kvferry keys\" prints them", OPTION_KEY_FILE,
     VISITING | COMMAND_SERVE},
    {"allow", "KEY", "a public key that may connect, several times if need be (everyone)", OPTION_ALLOW,
     COMMAND_SERVE},
    {"insecure", NULL, "listen beyond loopback without keys", OPTION_INSECURE, COMMAND_SERVE | COMMAND_FETCH},
    {"seed", "N", "chooses prompt lengths, prefix hits and block tables (1)", OPTION_SEED,
     MOVING | COMMAND_SERVE},
    {"replicas", "spread|first", "which of several ranks with the same cells is read (spread)",
     OPTION_REPLICAS, PREDICTING | COMMAND_EXPLAIN},
    {"cuda-memory", "prefill|decode|both", "the engines whose caches are in memory of CUDA devices (none)",
     OPTION_CUDA_MEMORY, PREDICTING | COMMAND_EXPLAIN},
    {"json", NULL, "print JSON instead of text", OPTION_JSON,
     COMMAND_PLAN | COMMAND_DEMO | COMMAND_MODELS | COMMAND_SERVE | VISITING | LOOKING},
    {"json", "FILE", "write the figures to FILE as well; - is the output", OPTION_JSON_FILE, COMMAND_BENCH},
    {"html", "FILE", "draw it as a page that stands by itself into FILE as well; - is the output",
     OPTION_HTML, PREDICTING},
    {"corrupt", "COORDINATE", NULL, OPTION_CORRUPT, COMMAND_DEMO | COMMAND_SERVE},
    {"die", "RANK", NULL, OPTION_DIE, COMMAND_DEMO},
    {"hang", "RANK", NULL, OPTION_HANG, COMMAND_DEMO},
};

static const size_t row_count = sizeof rows / sizeof *rows;

bool parse_number(const char *text, uint64_t *out) {
    if (!isdigit((unsigned char)text[0]))
        return false;
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || *end)
        return false;
    *out = value;
    return true;
}

bool parse_bytes(const char *text, uint64_t *out) {
    if (!isdigit((unsigned char)text[0]))
        return false;
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno)
        return false;
    static const char suffixes[] = "kmgt";
    const char *suffix = *end ? strchr(suffixes, tolower((unsigned char)*end)) : NULL;
    if (*end && (!suffix || end[1]))
        return false;
    unsigned shift = suffix ? 10 * (unsigned)(suffix - suffixes + 1) : 0;
    if (value > UINT64_MAX >> shift)
        return false;
    *out = (uint64_t)value << shift;
    return true;
}

static int take_number(const char *name, const char *text, uint64_t most, uint64_t *out) {
    uint64_t value;
    if (!parse_number(text, &value) || value == 0 || value > most)
        return usage_error("--%s is \"%s\"; allowed is a whole number from 1 to %llu", name, text,
                           (unsigned long long)most);
    *out = value;
    return EXIT_DONE;
}

static int take_number32(const char *name, const char *text, uint32_t most, uint32_t *out) {
    uint64_t value = 0;
    int result = take_number(name, text, most, &value);
    if (!result)
        *out = (uint32_t)value;
    return result;
}

static int take_dtype(const char *name, const char *text, kvf_dtype *out) {
    if (kvf_dtype_by_name(text, out))
        return usage_error(
            "--%s is \"%s\"; allowed are names such as f32, bf16, f16, fp8, fp8_e5m2, int8 and "
            "f4_e2m1",
            name, text);
    return EXIT_DONE;
}

static int take_scales(const char *text, kvf_config_options *config) {
    char dtype[32];
    const char *slash = strchr(text, '/');
    size_t length = slash ? (size_t)(slash - text) : strlen(text);
    if (length >= sizeof dtype || (slash && strcmp(slash, "/head") != 0))
        return usage_error("--scales is \"%s\"; allowed is an element type, and /head after it", text);
    memcpy(dtype, text, length);
    dtype[length] = '\0';
    config->scale_per_head = slash != NULL;
    return take_dtype("scales", dtype, &config->scale_dtype);
}

static int take_transport(const char *text, const char **out) {
    char known[256] = "auto";
    const char *kind = "auto";
    for (uint32_t i = 0; kind; kind = kvf_transport_kind_name(i++)) {
        if (strcmp(text, kind) == 0) {
            *out = kind;
            return EXIT_DONE;
        }
        size_t used = strlen(known);
        if (i > 0)
            (void)snprintf(known + used, sizeof known - used, ", %s", kind);
    }
    return usage_error("--transport is \"%s\"; allowed are %s", text, known);
}

static int take_costs_of(const char *text, const char **out) {
    kvf_cost_model cost;
    if (strcmp(kvf_cost_assumed(text, &cost), text) != 0)
        return take_transport(text, out);
    *out = text;
    return EXIT_DONE;
}

static int take_way(const char *text, kvf_way *out) {
    static const char *const names[] = {"auto", "direct", "packed"};
    for (uint32_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = (kvf_way)i;
            return EXIT_DONE;
        }
    }
    return usage_error("--move is \"%s\"; allowed are auto, direct, packed", text);
}

static int take_replicas(const char *text, bool *first) {
    *first = strcmp(text, "first") == 0;
    if (*first || strcmp(text, "spread") == 0)
        return EXIT_DONE;
    return usage_error("--replicas is \"%s\"; allowed are spread and first", text);
}

static int take_cuda_memory(const char *text, options *out) {
    const bool both = strcmp(text, "both") == 0, prefill = both || strcmp(text, "prefill") == 0,
               decode = both || strcmp(text, "decode") == 0;
    if (!prefill && !decode)
        return usage_error("--cuda-memory is \"%s\"; allowed are prefill, decode and both", text);
    out->prefill_memory = prefill ? KVF_MEMORY_CUDA : KVF_MEMORY_HOST;
    out->decode_memory = decode ? KVF_MEMORY_CUDA : KVF_MEMORY_HOST;
    return EXIT_DONE;
}

static int take_memory_limit(const char *text, uint64_t *out) {
    if (parse_bytes(text, out) && *out)
        return EXIT_DONE;
    return usage_error(
        "--memory-limit is \"%s\"; allowed is a number of bytes, or of k, m, g or t, such as 4g", text);
}

static int take_fault(fault_kind kind, const char *rank, options *out) {
    out->fault = kind;
    out->fault_rank = rank;
    return EXIT_DONE;
}

static int take_key(const char *text, options *out) {
    if (out->allowed_key_count == OPTIONS_MAX_KEYS)
        return usage_error("--allow is given more than %d times", OPTIONS_MAX_KEYS);
    out->allowed_keys[out->allowed_key_count++] = text;
    return EXIT_DONE;
}

static int take(enum option_id id, const char *text, options *out) {
    switch (id) {
    case OPTION_MODEL:
        out->model = text;
        return EXIT_DONE;
    case OPTION_DTYPE:
        return take_dtype("dtype", text, &out->config.cache_dtype);
    case OPTION_STATE_DTYPE:
        return take_dtype("state-dtype", text, &out->config.state_dtype);
    case OPTION_SCALES:
        return take_scales(text, &out->config);
    case OPTION_PREFILL:
        out->prefill = text;
        return EXIT_DONE;
    case OPTION_DECODE:
        out->decode = text;
        return EXIT_DONE;
    case OPTION_TOKENS:
        return take_number("tokens", text, 1u << 30, &out->tokens);
    case OPTION_REQUESTS:
        return take_number("requests", text, 1u << 20, &out->requests);
    case OPTION_TRANSPORT:
        return take_transport(text, &out->transport);
    case OPTION_COSTS_OF:
        return take_costs_of(text, &out->transport);
    case OPTION_FABRICS:
        out->fabrics = true;
        return EXIT_DONE;
    case OPTION_CALIBRATE:
        out->calibrate = true;
        return EXIT_DONE;
    case OPTION_MOVE:
        return take_way(text, &out->way);
    case OPTION_UCX_TLS:
        out->ucx_tls = text;
        return EXIT_DONE;
    case OPTION_UCX_LIBRARY:
        out->ucx_library = text;
        return EXIT_DONE;
    case OPTION_UCX_DEVICES:
        out->ucx_devices = text;
        return EXIT_DONE;
    case OPTION_BROUGHT_MEMORY:
        out->brought_memory = true;
        return EXIT_DONE;
    case OPTION_NO_DIRECT_READ:
        out->no_direct_read = true;
        return EXIT_DONE;
    case OPTION_MEMORY_LIMIT:
        return take_memory_limit(text, &out->memory_limit);
    case OPTION_IN_FLIGHT:
        return take_number32("in-flight", text, 1024, &out->in_flight);
    case OPTION_ROUNDS:
        return take_number32("rounds", text, 1000, &out->rounds);
    case OPTION_TIMEOUT:
        return take_number32("timeout", text, 86400, &out->timeout_s);
    case OPTION_SEED:
        if (parse_number(text, &out->seed))
            return EXIT_DONE;
        return usage_error("--seed is \"%s\"; allowed is a whole number", text);
    case OPTION_REPLICAS:
        return take_replicas(text, &out->first_replica);
    case OPTION_CUDA_MEMORY:
        return take_cuda_memory(text, out);
    case OPTION_JSON:
        out->json = true;
        return EXIT_DONE;
    case OPTION_JSON_FILE:
        out->json_file = text;
        return EXIT_DONE;
    case OPTION_HTML:
        out->html = text;
        return EXIT_DONE;
    case OPTION_CORRUPT:
        out->corrupt = text;
        return EXIT_DONE;
    case OPTION_DIE:
        return take_fault(FAULT_DIE, text, out);
    case OPTION_HANG:
        return take_fault(FAULT_HANG, text, out);
    case OPTION_KEY_FILE:
        out->key_file = text;
        return EXIT_DONE;
    case OPTION_LISTEN:
        out->listen = text;
        return EXIT_DONE;
    case OPTION_ALLOW:
        return take_key(text, out);
    case OPTION_INSECURE:
        out->insecure = true;
        return EXIT_DONE;
    case OPTION_COUNT:
        return take_number32("count", text, 1000, &out->count);
    }
    return EXIT_DONE;
}

/* The command's options as getopt_long() wants them, in `list`, which has room for all and an end. */
static void collect(uint32_t command_bit, struct option *list) {
    size_t n = 0;
    for (size_t i = 0; i < row_count; i++)
        if (rows[i].commands & command_bit)
            list[n++] = (struct option){rows[i].name, rows[i].argument ? required_argument : no_argument,
                                        NULL, (int)rows[i].id};
    list[n] = (struct option){0};
}

int options_parse(int argc, char **argv, uint32_t command_bit, options *out) {
    struct option list[sizeof rows / sizeof *rows + 1];
    collect(command_bit, list);
    *out = (options){
        .model = "llama-3.1-8b",
        .config = {.struct_size = sizeof out->config},
        .prefill = "tp=4,block=16,order=nhd",
        .decode = "tp=2,block=24,order=hnd",
        .transport = "auto",
        .memory_limit = (uint64_t)4 << 30,
        .in_flight = 4,
        .timeout_s = 60,
        .seed = 1,
        .listen = "tcp://127.0.0.1:*",
        .count = 5,
    };
    if (command_bit & VISITING)
        out->model = NULL;
    if (command_bit & (COMMAND_EXPLAIN | COMMAND_PING)) {
        out->prefill = out->decode = NULL;
        out->timeout_s = 5;
    }
    if (command_bit == COMMAND_FETCH) {
        out->prefill = NULL;
        out->listen = ""; /* who reads connects */
    }
    if (command_bit == COMMAND_SWEEP) {
        out->prefill = "tp=1/2/4/8,order=nhd/hnd";
        out->decode = "tp=1/2/4/8,block=16/64,order=nhd/hnd";
    }
    if (command_bit == COMMAND_SERVE) {
        out->decode = NULL;
        out->memory_limit = (uint64_t)512 << 20;
    }
    opterr = 0;
    optind = 1;
    for (int id; (id = getopt_long(argc, argv, ":", list, NULL)) != -1;) {
        if (id == ':')
            return usage_error("%s needs a value; see \"kvferry help %s\"", argv[optind - 1], argv[0]);
        if (id == '?')
            return usage_error("%s is no option of %s, or not as it is written; see \"kvferry help %s\"",
                               argv[optind - 1], argv[0], argv[0]);
        int result = take((enum option_id)id, optarg, out);
        if (result)
            return result;
    }
    out->operands = argv + optind;
    out->operand_count = (uint32_t)(argc - optind);
    uint32_t most = command_bit == COMMAND_EXPLAIN ? OPTIONS_MAX_OPERANDS : command_bit & VISITING ? 1 : 0;
    if (out->operand_count > most)
        return usage_error("\"%s\" is not expected; see \"kvferry help %s\"", out->operands[most], argv[0]);
    return EXIT_DONE;
}

uint32_t options_ucx_settings(const options *asked, kvf_setting out[UCX_SETTINGS_MAX]) {
    uint32_t count = 0;
    if (asked->ucx_tls)
        out[count++] = (kvf_setting){"ucx.tls", asked->ucx_tls};
    if (asked->ucx_library)
        out[count++] = (kvf_setting){"ucx.library", asked->ucx_library};
    if (asked->ucx_devices)
        out[count++] = (kvf_setting){"ucx.devices", asked->ucx_devices};
    return count;
}

int options_open_transport(const options *asked, bool emulated, kvf_transport **out) {
    kvf_setting settings[UCX_SETTINGS_MAX + 1];
    kvf_transport_options how = {.struct_size = sizeof how, .name = "kvferry", .settings = settings};
    how.setting_count = options_ucx_settings(asked, settings);
    if (emulated)
        settings[how.setting_count++] = (kvf_setting){"ucx.emulated", "on"};
    kvf_status status = kvf_transport_open("auto", &how, out);
    return status ? library_error(status, "transports") : EXIT_DONE;
}

int options_load_model(const options *asked, kvf_model **out) {
    kvf_config_options config = asked->config;
    const char *slash = strrchr(asked->model, '/');
    config.name = slash && slash[1] ? slash + 1 : asked->model;
    kvf_status status = kvf_model_load(asked->model, &config, out);
    if (status == KVF_E_NOT_FOUND)
        return usage_error("--model is \"%s\", which is neither a file nor one of the models that \"kvferry "
                           "models\" lists",
                           asked->model);
    if (status)
        return library_error(status, "--model");
    options_say_notes(config.name, *out);
    return EXIT_DONE;
}

void options_say_notes(const char *name, const kvf_model *model) {
    const char *note;
    for (uint32_t i = 0; (note = kvf_model_note(model, i)) != NULL; i++)
        notice("warning: %s: %s", name, note);
}

void print_command_help(uint32_t command_bit) {
    printf("Options:\n");
    for (size_t i = 0; i < row_count; i++) {
        if (!(rows[i].commands & command_bit) || !rows[i].help)
            continue;
        char left[40];
        (void)snprintf(left, sizeof left, "--%s%s%s", rows[i].name, rows[i].argument ? " " : "",
                       rows[i].argument ? rows[i].argument : "");
        printf("  %-24s %s\n", left, rows[i].help);
    }
    if (command_bit & EITHER)
        print_shape_help();
}
