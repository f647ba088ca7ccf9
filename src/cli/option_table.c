#include "option_table.h"

#include <stddef.h>
#include <string.h>

#include "option_values.h"

enum {
    MOVING = COMMAND_DEMO | COMMAND_BENCH,
    PREDICTING = COMMAND_PLAN | COMMAND_SWEEP,
    SHAPED = COMMAND_PLAN | MOVING | COMMAND_SIMULATE, /* both engines are laid out by their shapes */
    LOOKING = COMMAND_TRANSPORTS | COMMAND_DOCTOR,
    HERE = SHAPED | COMMAND_SERVE | COMMAND_SWEEP, /* the model is known without asking an engine */
    THERE = COMMAND_EXPLAIN | COMMAND_FETCH,       /* the running engine has the model, if not given */
    EITHER = HERE | THERE,
    VISITING = COMMAND_EXPLAIN | COMMAND_PING | COMMAND_FETCH | COMMAND_ASK,
    LIVE = MOVING | COMMAND_SERVE | COMMAND_FETCH, /* agents are opened */
    ALL = EITHER | LOOKING | VISITING | COMMAND_MODELS | COMMAND_KEYS,
};

/* ---- options that have no effect ------------------------------------------------------------- */

static bool may_be(const options *asked, const char *kind) {
    return strcmp(asked->transport, "auto") == 0 || strcmp(asked->transport, kind) == 0;
}

static const char *is_no_ucx(const options *asked) {
    return may_be(asked, "ucx") ? NULL : "the transport that --transport names does not load UCX";
}

static const char *is_no_libfabric(const options *asked) {
    return may_be(asked, "libfabric") ? NULL : "the transport that --transport names does not load libfabric";
}

static const char *is_not_read(const options *asked) {
    if (!asked->brought_memory)
        return "only memory of --brought-memory is read that way; other memory is mapped";
    return may_be(asked, "shm") ? NULL : "the transport that --transport names does not read other processes";
}

static const char *has_own_types(const options *asked) {
    return asked->groups ? "the file of --groups says the type of each part" : NULL;
}

static const char *has_no_model(const options *asked) {
    if (!asked->model && !asked->groups)
        return "the engine's own model is taken unless --model or --groups is given";
    return has_own_types(asked);
}

static bool is_on_loopback(const char *endpoint) {
    static const char *const begins[] = {"tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc://"};
    bool is = false;
    for (size_t i = 0; i < sizeof begins / sizeof *begins; i++)
        is = is || strncmp(endpoint, begins[i], strlen(begins[i])) == 0;
    return is;
}

static const char *needs_no_leave(const options *asked) {
    if (asked->key_file)
        return "with --key-file everything is encrypted";
    return is_on_loopback(asked->listen) ? "--listen is on loopback, where no keys are needed" : NULL;
}

static const char *has_operators(const options *asked) {
    return asked->key_file ? "with --key-file commands come from the holders of a --command-key" : NULL;
}

static const char *is_open(const options *asked) {
    return asked->key_file ? NULL : "without --key-file nothing is encrypted, and everyone may connect";
}

static const char *has_no_keys(const options *asked) {
    return asked->key_file ? NULL : "without --key-file nobody has a key; --local-commands needs none";
}

static const char *is_alone(const options *asked) {
    if (asked->command == COMMAND_EXPLAIN && asked->operand_count < 2 && !asked->prefill && !asked->decode)
        return "one engine is explained and nothing is planned: give a second endpoint, or --prefill or "
               "--decode";
    return NULL;
}

static const char *is_not_laid_out(const options *asked) {
    if (asked->command == COMMAND_EXPLAIN && !asked->prefill && !asked->decode)
        return "the option is for the engine of --prefill or --decode, and neither is given";
    return NULL;
}

static const char *has_one_group(const options *asked) {
    return asked->families ? "families are listed, not models" : has_own_types(asked);
}

static const char *lists_families(const options *asked) {
    return asked->families ? "families are listed, not models" : NULL;
}

static const char *moves_nothing(const options *asked) {
    const bool hands_over = asked->operand_count < 2 || strcmp(asked->operands[1], "hand-over") == 0;
    return hands_over ? NULL : "only hand-over is about another engine";
}

static const char *has_trace(const options *asked) {
    return asked->trace ? "prompts are those of the trace" : NULL;
}

/* ---- the table ------------------------------------------------------------------------------- */

#define GOES_TO(member) .field = offsetof(options, member), .field_bytes = sizeof(((options *)0)->member)
#define TEXT(member) .take = take_text, GOES_TO(member)
#define FLAG(member) .take = take_flag, GOES_TO(member)
#define NUMBER(member, largest) .take = take_number, GOES_TO(member), .most = (largest)
#define WORD(member, all) .take = take_word, GOES_TO(member), .words = (all)
#define NAME(member, all) .take = take_name, GOES_TO(member), .words = (all)
#define DTYPE(member) .take = take_dtype, GOES_TO(member), .words = dtype_word

#define TYPES_OF_MODEL "element type of the attention cache, such as bf16 or fp8"
#define TYPES_OF_STATE "element type of recurrent state"
#define TYPES_OF_SCALES "keep quantisation scales of this type: one per token, or one per token and head"

/* clang-format off: one paragraph for each row: name, value, help, standard; commands; how it is read, and the rest */
static const option_row rows[] = {
    {"listen", "ENDPOINT", "the address to listen on, such as tcp://10.0.0.1:5555", "tcp://127.0.0.1:*",
     COMMAND_SERVE, TEXT(listen)},
    {"listen", "ENDPOINT", "the address to listen on, for packed messages, such as tcp://10.0.0.2:* (none)",
     "", COMMAND_FETCH, TEXT(listen)},
    {"model", "NAME|FILE", "a model that \"kvferry models\" lists, or a config.json", "llama-3.1-8b", HERE,
     TEXT(model), .words = model_word, .file = true},
    {"model", "NAME|FILE", "the model that the engine there must cache (any)", NULL, THERE, TEXT(model),
     .words = model_word, .file = true, .idle = is_not_laid_out},
    {"model", "NAME|FILE", "only this model, or the one of a config.json", NULL, COMMAND_MODELS, TEXT(model),
     .words = model_word, .file = true, .idle = lists_families},
    {"groups", "FILE", "instead of --model: groups made by hand, as JSON (docs/groups.schema.json)", NULL,
     EITHER, TEXT(groups), .file = true, .idle = is_not_laid_out},
    {"groups", "FILE", "only the model of this file, of groups made by hand", NULL, COMMAND_MODELS,
     TEXT(groups), .file = true, .idle = lists_families},
    {"families", NULL, "list the families whose config.json is read (model_type), not models", NULL,
     COMMAND_MODELS, FLAG(families)},
    {"dtype", "NAME", TYPES_OF_MODEL, NULL, HERE, DTYPE(config.cache_dtype), .idle = has_own_types},
    {"dtype", "NAME", TYPES_OF_MODEL, NULL, THERE, DTYPE(config.cache_dtype), .idle = has_no_model},
    {"dtype", "NAME", TYPES_OF_MODEL, NULL, COMMAND_MODELS, DTYPE(config.cache_dtype), .idle = has_one_group},
    {"state-dtype", "NAME", TYPES_OF_STATE, NULL, HERE, DTYPE(config.state_dtype), .idle = has_own_types},
    {"state-dtype", "NAME", TYPES_OF_STATE, NULL, THERE, DTYPE(config.state_dtype), .idle = has_no_model},
    {"state-dtype", "NAME", TYPES_OF_STATE, NULL, COMMAND_MODELS, DTYPE(config.state_dtype),
     .idle = has_one_group},
    {"scales", "NAME[/head]", TYPES_OF_SCALES, NULL, HERE, .take = take_scales, .words = dtype_word,
     .idle = has_own_types},
    {"scales", "NAME[/head]", TYPES_OF_SCALES, NULL, THERE, .take = take_scales, .words = dtype_word,
     .idle = has_no_model},
    {"scales", "NAME[/head]", TYPES_OF_SCALES, NULL, COMMAND_MODELS, .take = take_scales, .words = dtype_word,
     .idle = has_one_group},
    {"prefill", "SHAPE", "the engine that has the cache", "tp=4,block=16,order=nhd",
     HERE & ~(COMMAND_SWEEP | COMMAND_SIMULATE), TEXT(prefill), .words = shape_word, .keys = true},
    {"prefill", "SHAPE", "each engine that computes prompts", "tp=4,order=hnd", COMMAND_SIMULATE,
     TEXT(prefill), .words = shape_word, .keys = true},
    {"prefill", "SHAPES", "engines that have the cache, with / between values", "tp=1/2/4/8,order=nhd/hnd",
     COMMAND_SWEEP, TEXT(prefill), .words = shape_word, .keys = true},
    {"prefill", "SHAPE", "a prefill engine of this shape, for the engine that runs", NULL, COMMAND_EXPLAIN,
     TEXT(prefill), .words = shape_word, .keys = true},
    {"decode", "SHAPE", "the engine that needs the cache", "tp=2,block=24,order=hnd",
     (SHAPED | COMMAND_FETCH) & ~COMMAND_SIMULATE, TEXT(decode), .words = shape_word, .keys = true},
    {"decode", "SHAPE", "each engine that generates", "tp=2,order=hnd", COMMAND_SIMULATE, TEXT(decode),
     .words = shape_word, .keys = true},
    {"decode", "SHAPES", "engines that need the cache", "tp=1/2/4/8,block=16/64,order=nhd/hnd", COMMAND_SWEEP,
     TEXT(decode), .words = shape_word, .keys = true},
    {"decode", "SHAPE", "a decode engine of this shape, for the engine that runs", NULL, COMMAND_EXPLAIN,
     TEXT(decode), .words = shape_word, .keys = true},
    {"tokens", "N", "tokens of the longest prompt", NULL, (HERE & ~COMMAND_SIMULATE) | COMMAND_EXPLAIN,
     NUMBER(tokens, 1u << 30), .idle = is_alone},
    {"tokens", "N", "tokens of the longest prompt, without a trace; others have half as many and more",
     "4096", COMMAND_SIMULATE, NUMBER(tokens, 1u << 30), .idle = has_trace},
    {"prefill-engines", "N", "how many prefill engines", "4", COMMAND_SIMULATE,
     NUMBER(prefill_engines, 1u << 16)},
    {"decode-engines", "N", "how many decode engines", "8", COMMAND_SIMULATE,
     NUMBER(decode_engines, 1u << 16)},
    {"trace", "FILE",
     "requests of a service, as Mooncake (.jsonl) or Azure (.csv) publish them (random ones)", NULL,
     COMMAND_SIMULATE, TEXT(trace), .file = true},
    {"rate", "N", "requests a second; a trace is played faster or slower (as the trace says, or 1)", NULL,
     COMMAND_SIMULATE, NUMBER(rate, 1u << 30)},
    {"requests", "N", "how many requests; a trace is cut or repeated (all of the trace, or 1000)", NULL,
     COMMAND_SIMULATE, NUMBER(requests, UINT32_MAX - 1)},
    {"prefill-speed", "N", "tokens of prompts that a prefill engine computes in a second", "10000",
     COMMAND_SIMULATE, NUMBER(prefill_speed, 1u << 30)},
    {"decode-speed", "N", "tokens of each sequence that a decode engine makes in a second", "50",
     COMMAND_SIMULATE, NUMBER(decode_speed, 1u << 30)},
    {"push-chunk", "N",
     "prefill engines write every N tokens of a prompt when these are computed (decode engines read it when "
     "all are)",
     NULL, COMMAND_SIMULATE, NUMBER(push_tokens, 1u << 30)},
    {"link", "GBIT", "Gbit/s of each rank's link, in each direction", "400", COMMAND_SIMULATE,
     NUMBER(link_gbit, 1u << 20)},
    {"latency", "US", "microseconds that a message takes", "10", COMMAND_SIMULATE,
     NUMBER(latency_us, 1u << 20)},
    {"run-cost", "NS", "nanoseconds that a link needs for each run, beside its bytes (none)", NULL,
     COMMAND_SIMULATE, NUMBER(run_ns, 1u << 20)},
    {"lease", "SECONDS", "for how long blocks are held without a sign of life", "30", COMMAND_SIMULATE,
     NUMBER(lease_s, 86400)},
    {"killed", "N", "engines that are killed at random, and are back after 30 s (none)", NULL,
     COMMAND_SIMULATE, NUMBER(killed, 1u << 30)},
    {"cut-off", "N", "engines that nothing reaches for 45 s, at random, while they go on (none)", NULL,
     COMMAND_SIMULATE, NUMBER(cut_off, 1u << 30)},
    {"requests", "N", "how many requests (as many as memory allows, up to 64)", NULL, MOVING | COMMAND_SERVE,
     NUMBER(requests, 1u << 20)},
    {"transport", "KIND", "auto, or one kind of transport", "auto", LIVE, NAME(transport, transport_word)},
    {"transport", "KIND",
     "the transport whose costs are assumed; also shm/brought, ucx/emulated, libfabric/emulated", "auto",
     PREDICTING | COMMAND_EXPLAIN, NAME(transport, costs_word), .idle = is_alone},
    {"fabrics", NULL, "also show what each kind of transport would take", NULL, COMMAND_PLAN, FLAG(fabrics)},
    {"calibrate", NULL, "measure on this machine what copies cost, instead of assuming it", NULL, PREDICTING,
     FLAG(calibrate)},
    {"move", "WAY", "auto, direct or packed", "auto", LIVE, WORD(way, way_word)},
    {"ucx-tls", "LIST", "the transports UCX may use, as in UCX_TLS", NULL, LIVE | LOOKING, TEXT(ucx_tls),
     .idle = is_no_ucx},
    {"ucx-library", "FILES", "the UCX to load: the first of these libucp that works (libucp.so.0)", NULL,
     LIVE | LOOKING, TEXT(ucx_library), .file = true, .idle = is_no_ucx},
    {"ucx-devices", "LIST", "the interfaces UCX may use, as in UCX_NET_DEVICES", NULL, LIVE | LOOKING,
     TEXT(ucx_devices), .idle = is_no_ucx},
    {"libfabric-provider", "NAME", "the provider of libfabric, such as efa, cxi or tcp (the best there is)",
     NULL, LIVE | LOOKING, TEXT(libfabric_provider), .idle = is_no_libfabric},
    {"libfabric-domain", "NAME", "the interface libfabric uses, such as eth0 (the provider's first)", NULL,
     LIVE | LOOKING, TEXT(libfabric_domain), .idle = is_no_libfabric},
    {"libfabric-library", "FILES", "the libfabric to load: the first of these that works (libfabric.so.1)",
     NULL, LIVE | LOOKING, TEXT(libfabric_library), .file = true, .idle = is_no_libfabric},
    {"push", NULL, "prefill ranks write into the decode engine's blocks; otherwise decode ranks read", NULL,
     COMMAND_DEMO, FLAG(push)},
    {"kill", NULL, "first kill a prefill rank in the middle of a request, and show what happens", NULL,
     COMMAND_DEMO, FLAG(kill)},
    {"brought-memory", NULL, "keep caches in plain private memory, not in memory the transport allocates",
     NULL, LIVE, FLAG(brought_memory)},
    {"no-direct-read", NULL, "act as if the kernel forbade reading another process's memory", NULL, MOVING,
     FLAG(no_direct_read), .idle = is_not_read},
    {"memory-limit", "BYTES", "caches of both engines together", "4g", MOVING,
     NUMBER(memory_limit, UINT64_MAX)},
    {"memory-limit", "BYTES", "caches of this engine", "512m", COMMAND_SERVE,
     NUMBER(memory_limit, UINT64_MAX)},
    {"memory-limit", "BYTES", "caches of this engine", "4g", COMMAND_FETCH, NUMBER(memory_limit, UINT64_MAX)},
    {"in-flight", "N", "requests that a decode rank has in flight at once", "4", MOVING | COMMAND_FETCH,
     NUMBER(in_flight, 1024)},
    {"rounds", "N", "how many times all requests are moved and verified", NULL, MOVING | COMMAND_FETCH,
     NUMBER(rounds, 1000)},
    {"count", "N", "how many round trips to measure", "5", COMMAND_PING, NUMBER(count, 1000)},
    {"timeout", "SECONDS", "how long a rank may be silent", "60", MOVING, NUMBER(timeout_s, 86400)},
    {"timeout", "SECONDS", "how long to wait for an answer", "5",
     COMMAND_EXPLAIN | COMMAND_PING | COMMAND_ASK, NUMBER(timeout_s, 86400)},
    {"deadline", "SECONDS", "how long an engine may take to do as it was asked", "60", COMMAND_ASK,
     NUMBER(deadline_s, 86400)},
    {"to", "ENDPOINT[,KEY]",
     "the engine that takes the request over (none: what one needs for it is printed)", NULL, COMMAND_ASK,
     TEXT(to), .idle = moves_nothing},
    {"timeout", "SECONDS", "how long each request may take; for the first answer, 10 at most", "60",
     COMMAND_FETCH, NUMBER(timeout_s, 86400)},
    {"key-file", "FILE", "own keys, as \"kvferry keys\" prints them", NULL, VISITING | COMMAND_SERVE,
     TEXT(key_file), .file = true},
    {"allow", "KEY", "a public key that may connect; may be given several times (everyone)", NULL,
     COMMAND_SERVE, .take = take_key, GOES_TO(allowed), .many = true, .idle = is_open},
    {"local-commands", NULL, "take commands (kvferry ask) from programs of this machine", NULL, COMMAND_SERVE,
     FLAG(local_commands), .idle = has_operators},
    {"command-key", "KEY", "a public key that may give commands; may be given several times (none)", NULL,
     COMMAND_SERVE, .take = take_key, GOES_TO(operators), .many = true, .idle = has_no_keys},
    {"insecure", NULL, "listen beyond loopback without keys", NULL, COMMAND_SERVE | COMMAND_FETCH,
     FLAG(insecure), .idle = needs_no_leave},
    {"seed", "N", "chooses what is drawn", "1", COMMAND_SIMULATE, .take = take_seed, GOES_TO(seed)},
    {"seed", "N", "chooses prompt lengths, prefix hits and block tables", "1", MOVING | COMMAND_SERVE,
     .take = take_seed, GOES_TO(seed)},
    {"replicas", "spread|first", "which of several ranks with the same cells is read", "spread",
     PREDICTING | COMMAND_EXPLAIN, WORD(first_replica, replicas_word), .idle = is_alone},
    {"cuda-memory", "prefill|decode|both", "the engines whose caches are in memory of CUDA devices (none)",
     NULL, PREDICTING | COMMAND_EXPLAIN, .take = take_cuda_memory, .words = cuda_memory_word,
     .idle = is_alone},
    {"json", "[FILE]", "write JSON to FILE, beside the text; without FILE, or with -, instead of it", NULL,
     ALL & ~COMMAND_KEYS, TEXT(json), .file = true},
    {"json", "[FILE]", "write the keys to FILE; without FILE, or with -, to the standard output", NULL,
     COMMAND_KEYS, TEXT(json), .file = true},
    {"html", "FILE", "also draw it as a self-contained HTML page in FILE; - is the standard output", NULL,
     PREDICTING, TEXT(html), .file = true},
    {"corrupt", "COORDINATE", NULL, NULL, COMMAND_DEMO | COMMAND_SERVE, TEXT(corrupt)},
    {"die", "RANK", NULL, NULL, COMMAND_DEMO, .take = take_die, GOES_TO(fault_rank)},
    {"hang", "RANK", NULL, NULL, COMMAND_DEMO, .take = take_hang, GOES_TO(fault_rank)},
};
/* clang-format on */

_Static_assert(sizeof rows / sizeof *rows <= OPTIONS_MAX_ROWS, "options.given has room for every row");

const option_row *option_row_get(uint32_t i) {
    return i < sizeof rows / sizeof *rows ? &rows[i] : NULL;
}

const option_row *option_row_find(uint32_t command_bit, const char *name, uint32_t *number) {
    for (uint32_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (!(rows[i].commands & command_bit) || strcmp(rows[i].name, name) != 0)
            continue;
        if (number)
            *number = i;
        return &rows[i];
    }
    return NULL;
}

bool option_value_may_be_left_out(const option_row *row) {
    return row->argument && row->argument[0] == '[';
}

static const char *shown_name(const void *set, uint32_t i) {
    const uint32_t *command_bit = set;
    for (size_t at = 0; at < sizeof rows / sizeof *rows; at++)
        if (rows[at].commands & *command_bit && rows[at].help && i-- == 0)
            return rows[at].name;
    return NULL;
}

words option_names(const uint32_t *command_bit) {
    return (words){shown_name, command_bit};
}

uint32_t option_most_operands(uint32_t command_bit) {
    switch (command_bit) {
    case COMMAND_ASK:
        return 3;
    case COMMAND_EXPLAIN:
        return 2;
    case COMMAND_PING:
    case COMMAND_FETCH:
    case COMMAND_COMPLETION:
        return 1;
    default:
        return 0;
    }
}
