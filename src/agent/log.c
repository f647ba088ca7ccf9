/*
 * The log: lines with a level and a time, for the code that opened the agent, and the words in them.
 */
#include <json.h>
#include <stdio.h>
#include <time.h>

#include "agent/agent.h"

bool kvf_agent_logs(const kvf_agent *agent, kvf_log_level level) {
    return agent->options.log && level >= agent->options.log_level;
}

uint64_t kvf_wall_clock(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * KVF_SECOND + (uint64_t)now.tv_nsec;
}

void kvf_agent_log(kvf_agent *agent, kvf_log_level level, const char *text) {
    if (!kvf_agent_logs(agent, level))
        return;
    char *copy = kvf_strdup(text), *rest = copy;
    if (!copy)
        return;
    uint64_t time_ns = kvf_wall_clock();
    for (char *one; (one = strsep(&rest, "\n")) != NULL;)
        if (one[0])
            kvf_log_line_add(agent, level, time_ns, one);
    kvf_free(copy);
}

/* ---- words ----------------------------------------------------------------------------------- */

struct json_object *kvf_visible_id(const void *id, size_t bytes) {
    kvf_text text = {0};
    const unsigned char *at = id;
    for (size_t i = 0; i < bytes; i++)
        kvf_text_add(&text, at[i] >= 0x20 && at[i] < 0x7f && at[i] != '\\' ? "%c" : "\\x%02x", at[i]);
    struct json_object *value = text.failed ? NULL : json_object_new_string(text.data ? text.data : "");
    kvf_text_free(&text);
    return value;
}

/* How many bytes the character of UTF-8 has that begins here; 0: none does. */
static size_t character_at(const unsigned char *at) {
    static const struct {
        unsigned char mask, mark; /* of the first byte */
        uint32_t least;           /* what fewer bytes cannot say */
    } forms[] = {{0x80, 0x00, 0}, {0xe0, 0xc0, 0x80}, {0xf0, 0xe0, 0x800}, {0xf8, 0xf0, 0x10000}};
    size_t more = 0;
    while (more < 4 && (at[0] & forms[more].mask) != forms[more].mark)
        more++;
    if (more == 4)
        return 0;
    uint32_t value = at[0] & (unsigned char)~forms[more].mask;
    for (size_t i = 1; i <= more; i++) {
        if ((at[i] & 0xc0) != 0x80)
            return 0;
        value = value << 6 | (at[i] & 0x3f);
    }
    const bool is_half = value >= 0xd800 && value <= 0xdfff; /* of a character of UTF-16 */
    return value >= forms[more].least && value <= 0x10ffff && !is_half ? more + 1 : 0;
}

char *kvf_copy_as_utf8(const char *text) {
    char *copy = kvf_strdup(text);
    for (char *at = copy; at && *at;) {
        const size_t bytes = character_at((const unsigned char *)at);
        if (bytes == 0)
            *at = '?';
        at += bytes ? bytes : 1;
    }
    return copy;
}

struct json_object *kvf_visible_text(const char *text) {
    char *copy = kvf_copy_as_utf8(text);
    if (!copy)
        return NULL;
    struct json_object *value = json_object_new_string(copy);
    kvf_free(copy);
    return value;
}

const char *kvf_request_kind_name(kvf_request_kind kind) {
    static const char *const names[] = {"none", "hold", "pull", "push", "expect", "connect"};
    KVF_ASSERT(kind >= 0 && (size_t)kind < sizeof names / sizeof *names);
    return names[kind];
}

/* ---- lines for files ------------------------------------------------------------------------- */

#define TIME_BYTES 40

/* RFC 3339, UTC, microseconds. */
static void write_time(uint64_t time_ns, char out[TIME_BYTES]) {
    time_t seconds = (time_t)(time_ns / KVF_SECOND);
    struct tm parts;
    char date[32] = "";
    if (gmtime_r(&seconds, &parts))
        (void)strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", &parts);
    (void)snprintf(out, TIME_BYTES, "%s.%06lluZ", date, (unsigned long long)(time_ns % KVF_SECOND / 1000));
}

static const char *level_name(kvf_log_level level) {
    return level >= KVF_LOG_WARNING ? "WARNING" : level >= KVF_LOG_INFO ? "INFO" : "DEBUG";
}

/* The failure that a line is; NULL: it is a sentence. A peer may have chosen the name with which a sentence begins, and
 * the words with which it ends: they must not become members of the line. */
static struct json_object *read_failure(const kvf_log_line *line) {
    struct json_tokener *reader = line->level >= KVF_LOG_WARNING ? json_tokener_new() : NULL;
    if (!reader)
        return NULL;
    struct json_object *read = json_tokener_parse_ex(reader, line->text, -1);
    const bool whole = json_tokener_get_parse_end(reader) == strlen(line->text);
    json_tokener_free(reader);
    if (whole && json_object_is_type(read, json_type_object))
        return read;
    json_object_put(read);
    return NULL;
}

/* The members of a failure, or the text as one member. */
static bool add_members(struct json_object *line, const kvf_log_line *from) {
    struct json_object *failure = read_failure(from);
    if (!failure) {
        struct json_object *value = kvf_visible_text(from->text);
        return value && json_object_object_add(line, "text", value) == 0;
    }
    bool all = true;
    json_object_object_foreach(failure, name, value) {
        all = all && json_object_object_add(line, name, json_object_get(value)) == 0;
    }
    json_object_put(failure);
    return all;
}

static void write_json(kvf_text *out, const char *when, const kvf_log_line *from) {
    struct json_object *line = json_object_new_object(), *time = json_object_new_string(when),
                       *name = json_object_new_string(level_name(from->level));
    bool all = line && time && name && json_object_object_add(line, "time", time) == 0 &&
               json_object_object_add(line, "level", name) == 0 && add_members(line, from);
    const char *words =
        all ? json_object_to_json_string_ext(line, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE)
            : NULL;
    if (words)
        kvf_text_add(out, "%s", words);
    out->failed |= !words;
    json_object_put(line);
}

kvf_status kvf_log_write(const kvf_log_line *line, kvf_log_form form, char *out, size_t out_bytes,
                         size_t *length) {
    if (!line || !line->text || (!out && out_bytes))
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !line ? "line" : !line->text ? "line->text" : "out");
    if (form != KVF_LOG_TEXT && form != KVF_LOG_JSON)
        return kvf_fail(KVF_E_INVALID, "form is %d; allowed: 0 (text) and 1 (JSON)", (int)form);
    char when[TIME_BYTES];
    kvf_text words = {0};
    write_time(line->time_ns, when);
    if (form == KVF_LOG_JSON)
        write_json(&words, when, line);
    else
        kvf_text_add(&words, "%s %s %s", when, level_name(line->level), line->text);
    return kvf_text_give(&words, out, out_bytes, length);
}
