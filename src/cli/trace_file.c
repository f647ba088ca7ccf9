#include "trace_file.h"

#include <errno.h>
#include <json-c/json.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli.h"

enum { SECONDS_IN_NS = 1000000000, MS_IN_NS = 1000000 };

bool requests_add(request_list *to, kvf_simulated_request request) {
    if (to->count == to->room) {
        const uint64_t room = 2 * to->room + 1024;
        kvf_simulated_request *grown = realloc(to->all, room * sizeof *grown);
        if (!grown)
            return false;
        to->all = grown;
        to->room = room;
    }
    to->all[to->count++] = request;
    return true;
}

void requests_free(request_list *list) {
    free(list->all);
    *list = (request_list){0};
}

/* A member of an object that is a whole number from 0 to `most`. */
static bool take_count(const struct json_object *line, const char *key, int64_t most, uint64_t *out) {
    struct json_object *value = NULL;
    if (!json_object_object_get_ex(line, key, &value) || !json_object_is_type(value, json_type_int))
        return false;
    const int64_t number = json_object_get_int64(value);
    *out = (uint64_t)number;
    return number >= 0 && number <= most;
}

static bool read_mooncake(const char *line, uint64_t *at_ns, uint64_t *prompt, uint64_t *output) {
    struct json_object *object = json_tokener_parse(line);
    const bool is_read = json_object_is_type(object, json_type_object) &&
                         take_count(object, "timestamp", INT64_MAX / MS_IN_NS, at_ns) &&
                         take_count(object, "input_length", UINT32_MAX, prompt) &&
                         take_count(object, "output_length", UINT32_MAX, output);
    *at_ns *= MS_IN_NS;
    json_object_put(object);
    return is_read;
}

/* Seconds with up to nine decimals, such as "04.0319600". */
static bool read_decimals(const char *text, uint64_t *ns, const char **end) {
    uint64_t scale = SECONDS_IN_NS;
    *ns = 0;
    for (; *text >= '0' && *text <= '9' && scale >= 10; text++, scale /= 10)
        *ns += (uint64_t)(*text - '0') * (scale / 10);
    *end = text;
    return *text < '0' || *text > '9';
}

/* A comma, and a number of tokens. */
static bool read_field(const char **text, uint64_t *out) {
    char *end = NULL;
    if ((*text)[0] != ',' || (*text)[1] < '0' || (*text)[1] > '9')
        return false;
    *out = strtoull(*text + 1, &end, 10);
    *text = end;
    return *out <= UINT32_MAX; /* also of a number that is too long: it is the largest then */
}

/* "2023-11-16 18:17:03.9799600,4808,10": local to nowhere, as only differences count. Traces
 * of 2024 have a zone: "2024-05-10 00:00:00.009930+00:00,2162,5". */
static bool read_azure(const char *line, uint64_t *at_ns, uint64_t *prompt, uint64_t *output) {
    struct tm day = {0};
    uint64_t part = 0;
    const char *rest = strptime(line, "%Y-%m-%d %H:%M:%S", &day);
    if (rest && *rest == '.' && !read_decimals(rest + 1, &part, &rest))
        return false;
    if (rest && (*rest == '+' || *rest == '-'))
        rest = strptime(rest, "%z", &day);
    const long east = day.tm_gmtoff; /* which timegm() overwrites */
    const time_t second = rest ? timegm(&day) - east : -1;
    if (second < 0)
        return false;
    *at_ns = (uint64_t)second * SECONDS_IN_NS + part;
    return read_field(&rest, prompt) && read_field(&rest, output) && rest[strspn(rest, " \r\n")] == '\0';
}

static int compare_times(const void *a, const void *b) {
    const uint64_t x = ((const kvf_simulated_request *)a)->at_ns,
                   y = ((const kvf_simulated_request *)b)->at_ns;
    return (x > y) - (x < y);
}

static int read_line(const char *path, uint64_t number, const char *line, request_list *out) {
    uint64_t at = 0, prompt = 0, output = 0;
    if (line[strspn(line, " \t\r\n")] == '\0' || (number == 1 && strncmp(line, "TIMESTAMP,", 10) == 0))
        return EXIT_DONE;
    if (!(line[0] == '{' ? read_mooncake : read_azure)(line, &at, &prompt, &output))
        return usage_error(
            "--trace: %s, line %llu is no request; allowed: an object with timestamp, input_length "
            "and output_length, or TIMESTAMP,ContextTokens,GeneratedTokens",
            path, (unsigned long long)number);
    if (prompt > 0 && !requests_add(out, (kvf_simulated_request){at, (uint32_t)prompt, (uint32_t)output}))
        return failure("not enough memory");
    return EXIT_DONE;
}

int trace_read(const char *path, request_list *out) {
    char *line = NULL;
    size_t room = 0;
    uint64_t number = 0;
    int result = EXIT_DONE;
    FILE *file = fopen(path, "r");
    if (!file)
        return failure("--trace: %s: %s", path, strerror(errno));
    while (!result && getline(&line, &room, file) >= 0)
        result = read_line(path, ++number, line, out);
    if (!result && ferror(file))
        result = failure("--trace: %s: %s", path, strerror(errno));
    free(line);
    (void)fclose(file);
    if (!result && out->count == 0)
        result = usage_error("--trace: %s has no requests", path);
    if (result)
        return result;
    qsort(out->all, out->count, sizeof *out->all, compare_times);
    for (uint64_t i = out->count; i-- > 0;)
        out->all[i].at_ns -= out->all[0].at_ns;
    return EXIT_DONE;
}
