#include "alternatives.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* The number of values of the first setting in a text: 2 for "tp=1/2,block=16". */
static uint32_t count_values(const char *setting) {
    uint32_t count = 1;
    for (const char *c = setting; *c && *c != ','; c++)
        count += *c == '/';
    return count;
}

/* The number of all shapes; some number above ALTERNATIVES_MAX if there are too many. */
static uint32_t count_shapes(const char *text) {
    uint64_t count = 1;
    for (const char *at = text; at && count <= ALTERNATIVES_MAX;
         at = strchr(at, ','), at = at ? at + 1 : NULL)
        count *= count_values(at);
    return count > ALTERNATIVES_MAX ? ALTERNATIVES_MAX + 1 : (uint32_t)count;
}

static bool has_empty_value(const char *text) {
    for (const char *slash = strchr(text, '/'); slash; slash = strchr(slash + 1, '/'))
        if (slash == text || slash[-1] == '=' || slash[-1] == ',' || !slash[1] || slash[1] == ',' ||
            slash[1] == '/')
            return true;
    return false;
}

/*
 * Writes the i-th shape. The values of the keys are the digits of i; `left` is the number of shapes that the remaining
 * keys make. The shape is never longer than the text.
 */
static void write_shape(const char *text, uint32_t i, uint32_t left, char *out) {
    for (const char *at = text; *at;) {
        const uint32_t values = count_values(at);
        left /= values;
        uint32_t skip = i / left % values;
        const char *equals = strchr(at, '='), *end = at + strcspn(at, ",");
        const char *value = equals && equals < end ? equals + 1 : at;
        for (; at < value; at++)
            *out++ = *at;
        for (; skip; value++)
            skip -= *value == '/';
        for (; value < end && *value != '/'; value++)
            *out++ = *value;
        if (*end)
            *out++ = *end++;
        at = end;
    }
    *out = '\0';
}

int alternatives_expand(const char *side, const char *text, alternatives *out) {
    *out = (alternatives){0};
    if (has_empty_value(text))
        return usage_error("--%s is \"%s\"; an alternative is empty; allowed: lists such as tp=1/2/4", side,
                           text);
    const uint32_t count = count_shapes(text);
    if (count > ALTERNATIVES_MAX)
        return usage_error("--%s is \"%s\", which is more than %d shapes; give fewer", side, text,
                           ALTERNATIVES_MAX);
    out->shapes = calloc(count, sizeof *out->shapes);
    if (!out->shapes)
        return failure("not enough memory");
    for (; out->count < count; out->count++) {
        char *shape = malloc(strlen(text) + 1);
        if (!shape)
            return failure("not enough memory");
        write_shape(text, out->count, count, shape);
        out->shapes[out->count] = shape;
    }
    return EXIT_DONE;
}

void alternatives_free(alternatives *list) {
    for (uint32_t i = 0; i < list->count; i++)
        free(list->shapes[i]);
    free(list->shapes);
    *list = (alternatives){0};
}
