#include "options.h"

#include <stdio.h>
#include <string.h>

#include "files.h"
#include "folding.h"
#include "groups_file.h"
#include "option_table.h"
#include "shape.h"
#include "text.h"

/* ---- reading --------------------------------------------------------------------------------- */

/* The arguments that are not read yet. */
typedef struct reader {
    char **next; /* ends with NULL, as argv does */
    const char *command;
    bool only_operands; /* "--" was read */
} reader;

/* Whether the word after an option is its optional file: neither an option nor an endpoint. ("--json=FILE" takes any
 * file.) */
static bool is_file(const char *word) {
    return word && (word[0] != '-' || !word[1]) && !strstr(word, "://");
}

/* The value of an option: the text after its '=', or the next word. Prints what is wrong and returns NULL if a value is
 * missing, or is given to an option that takes none. */
static const char *read_value(reader *from, const option_row *row, const char *behind) {
    if (!row->argument && behind)
        (void)usage_error("--%s takes no value; see \"kvferry help %s\"", row->name, from->command);
    if (!row->argument)
        return behind ? NULL : "";
    if (behind)
        return behind;
    if (option_value_may_be_left_out(row))
        return is_file(*from->next) ? *from->next++ : "-";
    if (!*from->next)
        (void)usage_error("--%s needs a value; see \"kvferry help %s\"", row->name, from->command);
    return *from->next ? *from->next++ : NULL;
}

/* The commands that take an option. */
static const char *commands_word(const void *name, uint32_t i) {
    const command *at;
    for (uint32_t n = 0; (at = command_get(n)) != NULL; n++)
        if (option_row_find(at->bit, name, NULL) && i-- == 0)
            return at->name;
    return NULL;
}

static int refuse_option(const reader *from, const char *name, const options *out) {
    char commands[160];
    words_list((words){commands_word, name}, commands, sizeof commands);
    if (commands[0])
        return usage_error("--%s is not an option of %s, but of %s", name, from->command, commands);
    return usage_error("--%s is not an option of %s%s; see \"kvferry help %s\"", name, from->command,
                       words_hint(option_names(&out->command), name).text, from->command);
}

static int read_option(reader *from, const char *word, options *out) {
    char name[64];
    const char *behind = strchr(word, '=');
    uint32_t number = 0;
    (void)snprintf(name, sizeof name, "%.*s", (int)(behind ? behind - word : (long)strlen(word)), word);
    const option_row *row = option_row_find(out->command, name, &number);
    if (!row)
        return refuse_option(from, name, out);
    if (out->given[number] && !row->many)
        return usage_error("--%s is given twice; give it once", row->name);
    const char *value = read_value(from, row, behind ? behind + 1 : NULL);
    if (!value)
        return EXIT_USAGE;
    out->given[number] = true;
    return row->take(row, value, out);
}

static int read_word(reader *from, options *out) {
    const char *word = *from->next++;
    if (!from->only_operands && strcmp(word, "--") == 0) {
        from->only_operands = true;
        return EXIT_DONE;
    }
    if (!from->only_operands && strncmp(word, "--", 2) == 0)
        return read_option(from, word + 2, out);
    if (!from->only_operands && word[0] == '-' && word[1])
        return usage_error("%s is not an option of %s: options begin with --; see \"kvferry help %s\"", word,
                           from->command, from->command);
    if (out->operand_count == option_most_operands(out->command))
        return usage_error("\"%s\" is not expected; see \"kvferry help %s\"", word, from->command);
    out->operands[out->operand_count++] = word;
    return EXIT_DONE;
}

static int take_standards(options *out) {
    int result = EXIT_DONE;
    const option_row *row;
    for (uint32_t i = 0; (row = option_row_get(i)) != NULL && !result; i++)
        if (row->commands & out->command && row->standard)
            result = row->take(row, row->standard, out);
    return result;
}

static int refuse_idle(const options *asked) {
    const option_row *row;
    for (uint32_t i = 0; (row = option_row_get(i)) != NULL; i++) {
        const char *why = asked->given[i] && row->idle ? row->idle(asked) : NULL;
        if (why)
            return usage_error("--%s has no effect: %s", row->name, why);
    }
    return EXIT_DONE;
}

/* What the system says of an empty name, as a script gives it whose variable is empty, names neither file nor option. */
static int refuse_empty(const options *asked) {
    const struct {
        const char *option, *file;
    } files[] = {{"json", asked->json}, {"html", asked->html}, {"groups", asked->groups}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (files[i].file && !files[i].file[0])
            return usage_error("--%s is \"\"; allowed: the name of a file", files[i].option);
    return EXIT_DONE;
}

/* Whether an option was given: "tokens". */
static bool is_given(const options *asked, const char *name) {
    uint32_t number;
    return option_row_find(asked->command, name, &number) && asked->given[number];
}

int options_parse(int argc, char **argv, uint32_t command_bit, options *out) {
    *out = (options){.command = command_bit,
                     .config = {.struct_size = sizeof out->config},
                     .transport = "auto",
                     .timeout_s = 60};
    reader from = {.next = argv + 1, .command = argv[0]};
    int result = take_standards(out);
    while (!result && from.next < argv + argc && *from.next)
        result = read_word(&from, out);
    if (!result && out->groups && is_given(out, "model"))
        result = usage_error("--model and --groups both say what is cached; give one of them");
    if (!result && out->json && out->html && strcmp(out->json, "-") == 0 && strcmp(out->html, "-") == 0)
        result = usage_error(
            "--json and --html - would both write to the standard output; give --html a file name");
    if (!result)
        result = refuse_idle(out);
    if (!result)
        result = refuse_empty(out);
    if (!result && out->html)
        result = file_check(out->html);
    if (!result && out->json)
        result = file_check(out->json);
    if (!result && out->json && out->html && file_is_same(out->json, out->html))
        result = usage_error("--json and --html would both write to %s; give them two files", out->html);
    return result;
}

bool options_want_text(const options *asked) {
    return !(asked->json && strcmp(asked->json, "-") == 0) && !(asked->html && strcmp(asked->html, "-") == 0);
}

/* ---- using options --------------------------------------------------------------------------- */

uint32_t options_settings(const options *asked, kvf_setting out[OPTIONS_MAX_SETTINGS]) {
    const kvf_setting all[] = {
        {"ucx.tls", asked->ucx_tls},
        {"ucx.library", asked->ucx_library},
        {"ucx.devices", asked->ucx_devices},
        {"libfabric.provider", asked->libfabric_provider},
        {"libfabric.domain", asked->libfabric_domain},
        {"libfabric.library", asked->libfabric_library},
    };
    _Static_assert(sizeof all / sizeof *all == OPTIONS_MAX_SETTINGS, "there is room for every setting");
    uint32_t count = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].value)
            out[count++] = all[i];
    return count;
}

kvf_status options_open_transport(const options *asked, bool emulated, kvf_transport **out) {
    kvf_setting settings[OPTIONS_MAX_SETTINGS + 1];
    kvf_transport_options how = {.struct_size = sizeof how, .name = "kvferry", .settings = settings};
    how.setting_count = options_settings(asked, settings);
    if (emulated)
        settings[how.setting_count++] = (kvf_setting){"ucx.emulated", "on"};
    return kvf_transport_open("auto", &how, out);
}

static const char *any_model(const void *set, uint32_t i) {
    (void)set;
    return kvf_builtin_model_name(i);
}

static int load_model(const options *asked, kvf_config_options *config, kvf_model **out) {
    const words names = {any_model, NULL};
    char list[640];
    kvf_status status = kvf_model_load(asked->model, config, out);
    const char *spelled = status == KVF_E_NOT_FOUND ? words_find(names, asked->model, NULL) : NULL;
    if (spelled) {
        config->name = spelled;
        status = kvf_model_load(spelled, config, out);
    }
    switch (status) {
    case KVF_OK:
        return EXIT_DONE;
    case KVF_E_NOT_FOUND:
        words_list(names, list, sizeof list);
        return usage_error("--model is \"%s\": there is no such file, and no such model; the models are %s%s",
                           asked->model, list, words_hint(names, asked->model).text);
    case KVF_E_UNSUPPORTED:
        return usage_error(
            "--model: %s; \"kvferry models --families\" lists the families, and --groups takes a "
            "model of groups made by hand (docs/groups.schema.json)",
            kvf_error_detail());
    default:
        return library_error(status, "--model");
    }
}

/* Compressors keep sums that are as a state is, in token groups named "csa.state" and the like. */
static bool has_type_of_state(const kvf_model *model) {
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const char *dot = strrchr(kvf_model_group(model, g)->name, '.');
        if (dot && strcmp(dot, ".state") == 0)
            return true;
    }
    return shape_keeps_state(model);
}

int options_load_model(const options *asked, kvf_model **out) {
    kvf_config_options config = asked->config;
    if (asked->groups)
        return groups_file_load(asked->groups, out);
    config.name = text_file_name(asked->model);
    int result = load_model(asked, &config, out);
    if (result)
        return result;
    options_say_notes(config.name, *out);
    if (asked->config.state_dtype != KVF_DTYPE_INVALID && !has_type_of_state(*out))
        return usage_error("--state-dtype has no effect: %s keeps no state", config.name);
    return EXIT_DONE;
}

void options_say_notes(const char *name, const kvf_model *model) {
    const char *note;
    for (uint32_t i = 0; (note = kvf_model_note(model, i)) != NULL; i++)
        notice("warning: %s: %s", name, note);
}

/* ---- help ------------------------------------------------------------------------------------ */

void print_command_help(uint32_t command_bit) {
    enum { LEFT = 26 };
    printf("Options:\n");
    const option_row *row;
    for (uint32_t i = 0; (row = option_row_get(i)) != NULL; i++) {
        if (!(row->commands & command_bit) || !row->help)
            continue;
        char left[48], right[256];
        bool has_standard = row->standard && row->standard[0];
        (void)snprintf(left, sizeof left, "  --%s%s%s", row->name, row->argument ? " " : "",
                       row->argument ? row->argument : "");
        (void)snprintf(right, sizeof right, "%s%s%s%s", row->help, has_standard ? " (" : "",
                       has_standard ? row->standard : "", has_standard ? ")" : "");
        printf("%-*s", LEFT, left);
        if (strlen(left) >= LEFT)
            printf("\n%*s", LEFT, "");
        print_folded(LEFT, LEFT, right);
    }
    if (option_row_find(command_bit, "prefill", NULL) || option_row_find(command_bit, "decode", NULL))
        print_shape_help();
}
