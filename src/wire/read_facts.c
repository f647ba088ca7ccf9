/*
 * Reads the facts of a peer: from text to a model. The lines have a fixed order and form, so they are read in one pass;
 * kvf_model_create() checks the values.
 */
#include "wire/show.h"

/* The most layers over all groups: a bound on what a short text can make us allocate. */
#define MAX_LAYERS (1u << 20)

typedef struct reader {
    char *text; /* a copy, cut into lines by zeros */
    char *next; /* the line to be read */
    uint32_t line;
    kvf_group_desc *groups;
    kvf_part_desc *parts; /* of all groups */
    uint32_t *layers;     /* of all groups */
    uint32_t *convert;    /* by group */
    uint32_t group_count, part_count, layer_count;
    uint32_t group_room, part_room, layer_room, convert_room;
} reader;

static kvf_status wrong(const reader *r, const char *what) {
    return kvf_fail(KVF_E_PARSE, "facts: line %u: %s", r->line, what);
}

/* Whether the next line is `name: value` or, with an empty value, `name:`. */
static bool is_next(const reader *r, const char *name) {
    size_t bytes = strlen(name);
    return strncmp(r->next, name, bytes) == 0 && r->next[bytes] == ':';
}

static kvf_status not_wanted(const reader *r, const char *name) {
    kvf_shown line;
    return kvf_fail(KVF_E_PARSE, "facts: line %u is \"%s\"; expected %s", r->line,
                    kvf_wire_show(&line, r->next, strlen(r->next), 0), name);
}

/* Takes the line `name: value`. */
static kvf_status take(reader *r, const char *name, char **value) {
    r->line++;
    if (!is_next(r, name))
        return not_wanted(r, name);
    char *at = r->next + strlen(name) + 1;
    if (*at == ' ')
        at++;
    *value = at;
    r->next = at + strlen(at) + 1;
    return KVF_OK;
}

/* Reads a decimal number at *at, and moves *at behind it. */
static bool read_digits(char **at, uint32_t *out) {
    uint64_t number = 0;
    char *end = *at;
    for (; *end >= '0' && *end <= '9' && number <= UINT32_MAX; end++)
        number = number * 10 + (uint64_t)(*end - '0');
    bool good = end > *at && number <= UINT32_MAX;
    *at = end;
    *out = (uint32_t)number;
    return good;
}

static kvf_status take_number(reader *r, const char *name, uint32_t *out) {
    char *value;
    kvf_status status = take(r, name, &value);
    if (status)
        return status;
    return read_digits(&value, out) && *value == '\0' ? KVF_OK : wrong(r, "not a number of 32 bits");
}

static kvf_status grow(void *array, uint32_t count, uint32_t *room, size_t element_bytes) {
    void **memory = array;
    if (count < *room)
        return KVF_OK;
    uint32_t wanted = *room ? 2 * *room : 16;
    void *grown = kvf_resize(*memory, wanted, element_bytes);
    if (!grown)
        return kvf_nomem("facts");
    *memory = grown;
    *room = wanted;
    return KVF_OK;
}

static kvf_status add_layers(reader *r, uint32_t first, uint32_t last) {
    kvf_status status = KVF_OK;
    for (uint64_t layer = first; layer <= last && !status; layer++) {
        if (r->layer_count == MAX_LAYERS)
            return wrong(r, "too many layers");
        status = grow(&r->layers, r->layer_count, &r->layer_room, sizeof *r->layers);
        if (!status)
            r->layers[r->layer_count++] = (uint32_t)layer;
    }
    return status;
}

/* "0-2,5": the layers of the newest group. */
static kvf_status take_layers(reader *r, kvf_group_desc *group) {
    char *at;
    uint32_t before = r->layer_count, first, last;
    kvf_status status = take(r, "layers", &at);
    while (!status) {
        if (!read_digits(&at, &first))
            return wrong(r, "not layers such as 0-2,5");
        last = first;
        if (*at == '-' && (at++, !read_digits(&at, &last)))
            return wrong(r, "not layers such as 0-2,5");
        if (last < first)
            return wrong(r, "a range of layers ends before it begins");
        status = add_layers(r, first, last);
        if (status || *at == '\0')
            break;
        if (*at++ != ',')
            return wrong(r, "not layers such as 0-2,5");
    }
    group->layer_count = r->layer_count - before;
    return status;
}

static kvf_status take_dtype(reader *r, kvf_dtype *out) {
    char *value;
    kvf_status status = take(r, "dtype", &value);
    if (status || kvf_dtype_by_name(value, out) == KVF_OK)
        return status;
    kvf_shown shown;
    return kvf_fail(KVF_E_UNSUPPORTED, "facts: line %u: dtype is \"%s\", which is unknown", r->line,
                    kvf_wire_show(&shown, value, strlen(value), 0));
}

static kvf_status take_part(reader *r) {
    kvf_status status = grow(&r->parts, r->part_count, &r->part_room, sizeof *r->parts);
    if (status)
        return status;
    kvf_part_desc part = {0};
    char *name = NULL;
    status = take(r, "part", &name);
    if (!status)
        status = take_dtype(r, &part.dtype);
    if (!status)
        status = take_number(r, "units", &part.units);
    if (!status)
        status = take_number(r, "cell_elements", &part.cell_elements);
    if (!status)
        status = take_number(r, "rows_per_step", &part.rows_per_step);
    part.name = name;
    r->parts[r->part_count++] = part;
    return status;
}

/* Types that are not known here are ignored: this side cannot convert them. */
static kvf_status take_converted(reader *r, uint32_t *out) {
    char *at;
    kvf_status status = take(r, "convert", &at);
    while (!status && at) {
        const char *name = strsep(&at, ",");
        if (at && *at == ' ')
            at++;
        kvf_dtype dtype;
        if (kvf_dtype_by_name(name, &dtype) == KVF_OK)
            *out |= 1u << dtype;
    }
    return status;
}

static kvf_status take_group(reader *r) {
    kvf_status status = grow(&r->groups, r->group_count, &r->group_room, sizeof *r->groups);
    if (!status)
        status = grow(&r->convert, r->group_count, &r->convert_room, sizeof *r->convert);
    if (status)
        return status;
    uint32_t *convert = &r->convert[r->group_count];
    *convert = 0;
    kvf_group_desc *group = &r->groups[r->group_count++];
    *group = (kvf_group_desc){0};
    char *name = NULL, *kind = NULL;
    status = take(r, "group", &name);
    if (!status)
        status = take(r, "kind", &kind);
    if (!status && strcmp(kind, "tokens") != 0 && strcmp(kind, "state") != 0)
        status = wrong(r, "kind is neither tokens nor state");
    if (status)
        return status;
    group->name = name;
    group->kind = strcmp(kind, "state") == 0 ? KVF_GROUP_STATE : KVF_GROUP_TOKENS;
    status = take_number(r, "window_tokens", &group->window_tokens);
    if (!status)
        status = take_number(r, "chunk_tokens", &group->chunk_tokens);
    if (!status && is_next(r, "tokens_per_step"))
        status = take_number(r, "tokens_per_step", &group->tokens_per_step);
    if (!status)
        status = take_layers(r, group);
    if (!status && is_next(r, "convert"))
        status = take_converted(r, convert);
    uint32_t before = r->part_count;
    while (!status && is_next(r, "part"))
        status = take_part(r);
    group->part_count = r->part_count - before;
    return status;
}

/* Parts and layers of all groups are in one array each, in order. */
static kvf_status make_model(reader *r, uint32_t layer_count, kvf_model **out) {
    uint32_t part = 0, layer = 0;
    for (uint32_t g = 0; g < r->group_count; g++) {
        kvf_group_desc *group = &r->groups[g];
        group->parts = group->part_count ? &r->parts[part] : NULL;
        group->layers = &r->layers[layer]; /* at least one, see take_layers() */
        part += group->part_count;
        layer += group->layer_count;
    }
    const kvf_model_desc desc = {.struct_size = sizeof desc,
                                 .layer_count = layer_count,
                                 .groups = r->groups,
                                 .group_count = r->group_count};
    kvf_status status = kvf_model_create(&desc, out);
    return status ? kvf_fail_in(status, "facts: ") : KVF_OK;
}

static kvf_status read_lines(reader *r, const char *text, kvf_facts *out) {
    uint32_t layer_count;
    kvf_status status = take_number(r, "layer_count", &layer_count);
    while (!status && is_next(r, "group"))
        status = take_group(r);
    char *rest = "";
    if (!status && *r->next)
        status = take(r, "own", &rest);
    if (!status && *rest)
        status = wrong(r, "there is text after own:");
    if (status)
        return status;
    size_t at = (size_t)(r->next - r->text), bytes = strlen(text);
    out->own = text + (at < bytes ? at : bytes);
    out->convert = r->convert;
    r->convert = NULL;
    return make_model(r, layer_count, &out->model);
}

kvf_status kvf_wire_read_facts(const char *text, kvf_facts *out) {
    *out = (kvf_facts){0};
    size_t bytes = strlen(text);
    /* Two zero bytes at the end make an empty line after the last one. */
    reader r = {.text = kvf_alloc0(bytes + 2, 1)};
    if (!r.text)
        return kvf_nomem("facts");
    memcpy(r.text, text, bytes);
    for (size_t i = 0; i < bytes; i++)
        if (r.text[i] == '\n')
            r.text[i] = '\0';
    r.next = r.text;
    kvf_status status = read_lines(&r, text, out);
    kvf_free(r.groups);
    kvf_free(r.parts);
    kvf_free(r.layers);
    kvf_free(r.convert);
    kvf_free(r.text);
    return status;
}

void kvf_facts_free(kvf_facts *facts) {
    kvf_model_free(facts->model);
    kvf_free(facts->convert);
    *facts = (kvf_facts){0};
}
