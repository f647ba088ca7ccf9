/*
 * From the facts of an engine back to a model: what wire/facts.c writes, read line by line in the same order.
 * The text came from a peer. Whatever was read is written again and compared, so nothing is misunderstood.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "model/model.h"
#include "wire/wire.h"

#define LONGEST_NAME 512 /* "GROUP.PART.FIELD" */

typedef struct reader {
    char *text, *at; /* a copy, cut into lines and words */
    uint32_t line;
    kvf_group_desc groups[KVF_MODEL_MAX_GROUPS];
    uint32_t group_count;
    uint32_t *layers[KVF_MODEL_MAX_GROUPS];
    kvf_part_desc *parts[KVF_MODEL_MAX_GROUPS];
} reader;

/* Takes the next line, which must be "name: value". */
__attribute__((format(printf, 3, 4))) static kvf_status take(reader *r, char **value, const char *format,
                                                             ...) {
    char name[LONGEST_NAME];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(name, sizeof name, format, arguments);
    va_end(arguments);
    size_t length = strlen(name);
    char *end = strchr(r->at, '\n');
    r->line++;
    if (!end || strncmp(r->at, name, length) != 0 || strncmp(r->at + length, ": ", 2) != 0)
        return kvf_fail(KVF_E_PARSE, "facts: line %u is not %.200s", r->line, name);
    *value = r->at + length + 2;
    *end = '\0';
    r->at = end + 1;
    for (const char *c = *value; *c; c++) /* what is refused later is shown */
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            return kvf_fail(KVF_E_PARSE, "facts: line %u has the control character 0x%02x", r->line,
                            (unsigned)(unsigned char)*c);
    return KVF_OK;
}

static kvf_status bad_value(const reader *r, const char *value) {
    return kvf_fail(KVF_E_PARSE, "facts: line %u: the value is \"%.40s\"", r->line, value);
}

/* A number at the beginning of a text; NULL when there is none. */
static const char *read_number(const char *text, uint32_t *out) {
    uint64_t number = 0;
    const char *c = text;
    for (; *c >= '0' && *c <= '9' && number <= UINT32_MAX; c++)
        number = 10 * number + (uint64_t)(*c - '0');
    *out = (uint32_t)number;
    return c == text || number > UINT32_MAX ? NULL : c;
}

static kvf_status take_number(reader *r, const char *group, const char *part, const char *field,
                              uint32_t *out) {
    char *value;
    kvf_status status = take(r, &value, "%s%s%s.%s", group, part ? "." : "", part ? part : "", field);
    if (status)
        return status;
    const char *end = read_number(value, out);
    return end && !*end ? KVF_OK : bad_value(r, value);
}

/* "a, b" into its words; how many there are, or one more than fit. */
static uint32_t cut_words(char *value, const char **words, uint32_t most) {
    uint32_t count = 0;
    for (char *word = value, *next; word; word = next) {
        next = strstr(word, ", ");
        if (next) {
            *next = '\0';
            next += 2;
        }
        if (count == most)
            return most + 1;
        words[count++] = word;
    }
    return count;
}

/* ---- a group --------------------------------------------------------------------------------- */

/* "0-2,5" as 0 1 2 5. */
static kvf_status read_layers(reader *r, uint32_t group, const char *value, uint32_t layer_count) {
    uint32_t *list = r->layers[group] = kvf_alloc(layer_count, sizeof *list), n = 0;
    if (!list)
        return kvf_nomem("a model");
    for (const char *at = value; *at;) {
        uint32_t first, last;
        at = read_number(at, &first);
        last = first;
        if (at && *at == '-')
            at = read_number(at + 1, &last);
        if (!at || last < first || last >= layer_count || last - first >= layer_count - n)
            return bad_value(r, value);
        while (first <= last)
            list[n++] = first++;
        at += *at == ',';
    }
    r->groups[group].layers = list;
    r->groups[group].layer_count = n;
    return KVF_OK;
}

static kvf_status read_part(reader *r, const char *group, kvf_part_desc *part) {
    char *dtype, *rule;
    kvf_status status = take(r, &dtype, "%s.%s.dtype", group, part->name);
    if (!status && kvf_dtype_by_name(dtype, &part->dtype))
        status = bad_value(r, dtype);
    if (!status)
        status = take_number(r, group, part->name, "units", &part->units);
    if (!status)
        status = take_number(r, group, part->name, "cell_elements", &part->cell_elements);
    if (!status)
        status = take_number(r, group, part->name, "rows_per_step", &part->rows_per_step);
    if (!status)
        status = take(r, &rule, "%s.%s.tp_rule", group, part->name);
    if (status)
        return status;
    part->tp_rule = strcmp(rule, kvf_tp_rule_name(KVF_TP_SPLIT)) == 0 ? KVF_TP_SPLIT : KVF_TP_REPLICATE;
    return KVF_OK;
}

static kvf_status read_parts(reader *r, uint32_t index, char *value) {
    kvf_group_desc *group = &r->groups[index];
    const char *names[KVF_MODEL_MAX_PARTS];
    uint32_t count = cut_words(value, names, KVF_MODEL_MAX_PARTS);
    if (count > KVF_MODEL_MAX_PARTS)
        return kvf_fail(KVF_E_PARSE, "facts: line %u: more than %u parts", r->line, KVF_MODEL_MAX_PARTS);
    kvf_part_desc *parts = r->parts[index] = kvf_alloc0(count, sizeof *parts);
    if (!parts)
        return kvf_nomem("a model");
    group->parts = parts;
    group->part_count = count;
    kvf_status status = KVF_OK;
    for (uint32_t p = 0; p < count && !status; p++) {
        parts[p].name = names[p];
        parts[p].tensor = p;
        status = read_part(r, group->name, &parts[p]);
    }
    return status;
}

static kvf_status read_group(reader *r, uint32_t index, uint32_t layer_count) {
    kvf_group_desc *group = &r->groups[index];
    char *value;
    kvf_status status = take(r, &value, "%s.kind", group->name);
    if (!status && strcmp(value, kvf_group_kind_name(KVF_GROUP_STATE)) == 0)
        group->kind = KVF_GROUP_STATE;
    if (!status)
        status = take_number(r, group->name, NULL, "window_tokens", &group->window_tokens);
    if (!status)
        status = take_number(r, group->name, NULL, "chunk_tokens", &group->chunk_tokens);
    if (!status)
        status = take(r, &value, "%s.layers", group->name);
    if (!status)
        status = read_layers(r, index, value, layer_count);
    if (!status)
        status = take(r, &value, "%s.parts", group->name);
    return status ? status : read_parts(r, index, value);
}

/* ---- all of it ------------------------------------------------------------------------------- */

static kvf_status read_model(reader *r, const char *name, kvf_model **out) {
    char *value;
    uint32_t layer_count = 0;
    const char *names[KVF_MODEL_MAX_GROUPS] = {NULL};
    kvf_status status = take(r, &value, "layer_count");
    const char *end = status ? NULL : read_number(value, &layer_count);
    if (!status && (!end || *end || layer_count == 0 || layer_count > KVF_MODEL_MAX_LAYERS))
        status = bad_value(r, value);
    if (!status)
        status = take(r, &value, "groups");
    if (!status) {
        r->group_count = cut_words(value, names, KVF_MODEL_MAX_GROUPS);
        if (r->group_count > KVF_MODEL_MAX_GROUPS)
            status = kvf_fail(KVF_E_PARSE, "facts: more than %u groups", KVF_MODEL_MAX_GROUPS);
    }
    for (uint32_t g = 0; !status && g < r->group_count; g++) {
        r->groups[g].name = names[g];
        status = read_group(r, g, layer_count);
    }
    if (status)
        return status;
    const kvf_model_desc desc = {.struct_size = sizeof desc,
                                 .name = name,
                                 .layer_count = layer_count,
                                 .groups = r->groups,
                                 .group_count = r->group_count};
    return kvf_model_create(&desc, out);
}

/* The facts of the model, and what of the text was not read, must be the text. */
static kvf_status check(const kvf_model *model, const char *facts, size_t read) {
    char *again;
    kvf_status status = kvf_wire_facts(model, facts + read, &again);
    if (status)
        return status;
    if (strcmp(again, facts) != 0)
        status = kvf_fail(KVF_E_PARSE, "the facts are not of a model that this version can describe");
    kvf_free(again);
    return status;
}

kvf_status kvf_wire_model_of_facts(const char *facts, const char *name, kvf_model **out) {
    if (!facts || !out)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !facts ? "facts" : "out");
    reader *r = kvf_alloc0(1, sizeof *r);
    kvf_model *model = NULL;
    kvf_status status = r && (r->text = kvf_strdup(facts)) ? KVF_OK : kvf_nomem("a model");
    if (!status) {
        r->at = r->text;
        status = read_model(r, name, &model);
    }
    if (!status)
        status = check(model, facts, (size_t)(r->at - r->text));
    for (uint32_t g = 0; r && g < KVF_MODEL_MAX_GROUPS; g++) {
        kvf_free(r->layers[g]);
        kvf_free(r->parts[g]);
    }
    if (r)
        kvf_free(r->text);
    kvf_free(r);
    if (status) {
        kvf_model_free(model);
        return status;
    }
    *out = model;
    return KVF_OK;
}
