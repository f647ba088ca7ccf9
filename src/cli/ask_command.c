/*
 * kvferry ask: gives commands to running engines, and prints what they reply. A request moves by two: one engine is
 * asked to hand it over, the other to take it over. Where the other takes no commands, the user is told what it needs
 * to know.
 */
#include <stdio.h>
#include <string.h>

#include <kvferry/ask.h>

#include "json.h"
#include "table.h"
#include "text.h"
#include "visiting.h"

#define SECOND UINT64_C(1000000000)

typedef struct asking {
    options asked;
    key_pair keys;
    meeting_place place, to;
    struct json_object *steps; /* of what was asked, one for each engine; NULL: no JSON is wanted */
} asking;

static kvf_asked_rank reply_of(const kvf_asked *asked, uint32_t rank) {
    kvf_asked_rank reply = {.struct_size = sizeof reply};
    (void)kvf_asked_reply(asked, rank, &reply);
    return reply;
}

static bool is_text(const kvf_record *record) {
    const unsigned char *bytes = record->data;
    bool is = record->size > 0;
    for (size_t i = 0; i < record->size && is; i++)
        is = bytes[i] >= ' ' && bytes[i] <= '~';
    return is;
}

static struct json_object *json_records(const kvf_asked_rank *reply) {
    struct json_object *out = json_object_new_array();
    for (uint32_t i = 0; i < reply->record_count; i++) {
        struct json_object *record = json_object_new_object();
        json_text(record, "name", reply->records[i].name);
        json_count(record, "begin", reply->records[i].begin);
        json_count(record, "end", reply->records[i].end);
        json_count(record, "bytes", reply->records[i].size);
        if (is_text(&reply->records[i]))
            json_object_object_add(
                record, "text",
                json_object_new_string_len(reply->records[i].data, (int)reply->records[i].size));
        json_object_array_add(out, record);
    }
    return out;
}

static void note_step(asking *self, const char *verb, const kvf_asked *asked) {
    struct json_object *step = json_object_new_object(), *ranks = json_object_new_array();
    json_text(step, "verb", verb);
    json_text(step, "engine", kvf_asked_engine(asked));
    for (uint32_t i = 0; i < kvf_asked_rank_count(asked); i++) {
        const kvf_asked_rank reply = reply_of(asked, i);
        struct json_object *rank = json_object_new_object();
        json_text(rank, "status", kvf_status_name(reply.status));
        json_text(rank, "detail", reply.detail);
        json_object_object_add(rank, "records", json_records(&reply));
        json_object_array_add(ranks, rank);
    }
    json_object_object_add(step, "ranks", ranks);
    json_object_array_add(self->steps, step);
}

/* Gives a command to the engine at a place; prints why a rank did not do it. */
static int give(asking *self, const meeting_place *place, kvf_command what, kvf_asked **out) {
    const kvf_contact contact = {.endpoint = place->endpoint, .public_key = place->key};
    const bool keyed = self->keys.public_key[0] != '\0';
    const kvf_ask_options how = {.struct_size = sizeof how,
                                 .public_key = keyed ? self->keys.public_key : NULL,
                                 .secret_key = keyed ? self->keys.secret_key : NULL,
                                 .timeout_ns = self->asked.timeout_s * SECOND};
    what.struct_size = sizeof what;
    what.deadline_ns = self->asked.deadline_s * SECOND;
    kvf_status status = kvf_ask(&contact, &what, &how, out);
    if (status == KVF_E_INVALID || status == KVF_E_RANGE)
        return library_error(status, "ask");
    if (status)
        return library_failure(status, "ask");
    if (self->steps)
        note_step(self, what.verb, *out);
    uint32_t rank = 0;
    status = kvf_asked_status(*out, &rank);
    if (!status)
        return EXIT_DONE;
    const kvf_asked_rank reply = reply_of(*out, rank);
    return failure("ask: %s, rank %u: %s: %s", kvf_asked_engine(*out), rank, kvf_status_name(status),
                   reply.detail);
}

/* ---- verbs ----------------------------------------------------------------------------------- */

/* Gives a command that is about no request; `done` says what the engine has done then. */
static int tell(asking *self, const char *verb, const char *done) {
    kvf_asked *asked = NULL;
    int result = give(self, &self->place, (kvf_command){.verb = verb}, &asked);
    if (!result && options_want_text(&self->asked)) {
        const uint32_t ranks = kvf_asked_rank_count(asked);
        printf("%s %s: %u rank%s\n", kvf_asked_engine(asked), done, ranks, ranks == 1 ? "" : "s");
    }
    kvf_asked_free(asked);
    return result;
}

static int drain(asking *self) {
    return tell(self, KVF_COMMAND_DRAIN, "has drained");
}

static int resume(asking *self) {
    return tell(self, KVF_COMMAND_RESUME, "serves again");
}

/* ---- list ------------------------------------------------------------------------------------ */

static const kvf_record *find_record(const kvf_asked_rank *reply, const char *name) {
    for (uint32_t i = 0; i < reply->record_count; i++)
        if (strcmp(reply->records[i].name, name) == 0)
            return &reply->records[i];
    return NULL;
}

/* The object that a rank has replied to "list"; NULL: it has not. The caller frees it. */
static struct json_object *read_list(const kvf_asked_rank *reply) {
    const kvf_record *record = find_record(reply, "kept");
    struct json_tokener *reader = json_tokener_new();
    struct json_object *found = NULL, *kept = NULL;
    if (record && reader && record->size > 0 && record->size <= KVF_MAX_RECORDS_BYTES)
        found = json_tokener_parse_ex(reader, record->data, (int)record->size);
    json_tokener_free(reader);
    if (json_object_object_get_ex(found, "kept", &kept) && json_object_is_type(kept, json_type_array))
        return found;
    json_object_put(found);
    return NULL;
}

/* The engine chose the name: what is no plain character may not reach a terminal. */
static void add_name(table *out, const char *name) {
    char shown[64];
    (void)snprintf(shown, sizeof shown, "%s", name);
    if (strlen(name) >= sizeof shown)
        memcpy(shown + sizeof shown - 4, "...", 4);
    for (char *c = shown; *c; c++)
        if (*c < ' ' || *c > '~')
            *c = '?';
    table_cell(out, shown);
}

/* A time in seconds; where there is none, the words for that. */
static void add_seconds(table *out, struct json_object *one, const char *key, const char *none) {
    struct json_object *value;
    const bool is = json_object_object_get_ex(one, key, &value);
    table_cell(out, is ? text_time(1e9 * json_object_get_double(value)).text : none);
}

static uint64_t count_of(struct json_object *one, const char *key) {
    return json_object_get_uint64(json_object_object_get(one, key));
}

static void add_row(table *out, struct json_object *one) {
    const char *name = json_object_get_string(json_object_object_get(one, "request"));
    add_name(out, name ? name : "");
    table_cell(out, text_count(count_of(one, "tokens")).text);
    add_seconds(out, one, "age_s", "-");
    add_seconds(out, one, "left_s", "no limit");
    table_cell(out, text_format("%llu of %llu", (unsigned long long)count_of(one, "served"),
                                (unsigned long long)count_of(one, "consumers"))
                        .text);
    table_cell(out, json_object_get_boolean(json_object_object_get(one, "moves")) ? "yes" : "no");
}

static int print_list(const kvf_asked *asked, uint32_t rank) {
    const kvf_asked_rank reply = reply_of(asked, rank);
    struct json_object *list = read_list(&reply);
    if (!list)
        return failure("ask: %s, rank %u: its reply has no list", kvf_asked_engine(asked), rank);
    struct json_object *kept = json_object_object_get(list, "kept");
    const size_t shown = json_object_array_length(kept);
    const uint64_t count = count_of(list, "count");
    printf("%s, rank %u, keeps %llu request%s\n", kvf_asked_engine(asked), rank, (unsigned long long)count,
           count == 1 ? "" : "s");
    table rows;
    table_start(&rows, "request|>tokens|>age|>left|>served|moves");
    for (size_t i = 0; i < shown; i++)
        add_row(&rows, json_object_array_get_idx(kept, i));
    const bool printed = shown == 0 || table_print(&rows, 2);
    if (shown == 0)
        table_free(&rows);
    if (count > shown)
        printf("  and %llu more: give the beginning of a name to list fewer\n",
               (unsigned long long)(count - shown));
    json_object_put(list);
    return printed ? EXIT_DONE : failure("ask: memory ran out");
}

static int list(asking *self) {
    const char *names = self->asked.operand_count > 2 ? self->asked.operands[2] : "";
    kvf_asked *asked = NULL;
    int result = give(self, &self->place,
                      (kvf_command){.verb = KVF_COMMAND_LIST, .request = {names, strlen(names)}}, &asked);
    if (!result && options_want_text(&self->asked))
        for (uint32_t i = 0; i < kvf_asked_rank_count(asked) && !result; i++)
            result = print_list(asked, i);
    kvf_asked_free(asked);
    return result;
}

/* ---- hand-over ------------------------------------------------------------------------------- */

/* What the engine that takes the request over gets: the records of the first rank that has any. */
static kvf_asked_rank passed_on(const kvf_asked *asked) {
    for (uint32_t i = 0; i < kvf_asked_rank_count(asked); i++) {
        const kvf_asked_rank reply = reply_of(asked, i);
        if (reply.record_count > 0)
            return reply;
    }
    return (kvf_asked_rank){0};
}

static void print_records(const kvf_asked_rank *reply) {
    for (uint32_t i = 0; i < reply->record_count; i++) {
        const kvf_record *record = &reply->records[i];
        if (is_text(record))
            printf("%s %.*s\n", record->name, (int)record->size, (const char *)record->data);
        else
            printf("%s: %zu bytes\n", record->name, record->size);
    }
}

/* Whether the engine of --to answers: without it the first engine would hold the request for nobody. */
static int greet(const asking *self) {
    kvf_visited *visited = NULL;
    const int result = place_visit(&self->asked, "ask", &self->to, self->asked.timeout_s, 0, &visited);
    kvf_visited_free(visited);
    return result;
}

static int hand_over(asking *self) {
    const char *request = self->asked.operands[2];
    kvf_asked *from = NULL, *to = NULL;
    kvf_command what = {.verb = KVF_COMMAND_HAND_OVER,
                        .request = {request, strlen(request)},
                        .peer = {.endpoint = self->to.endpoint, .public_key = self->to.key}};
    int result = self->asked.to ? greet(self) : EXIT_DONE;
    if (!result)
        result = give(self, &self->place, what, &from);
    if (!result && !self->asked.to && options_want_text(&self->asked)) {
        const kvf_asked_rank with = passed_on(from);
        printf("%s holds %s\n", kvf_asked_engine(from), request);
        print_records(&with);
    }
    if (!result && self->asked.to) {
        const kvf_asked_rank with = passed_on(from);
        what.verb = KVF_COMMAND_TAKE_OVER;
        what.peer = (kvf_contact){.engine = kvf_asked_engine(from),
                                  .endpoint = self->place.endpoint,
                                  .public_key = self->place.key};
        what.records = with.records;
        what.record_count = with.record_count;
        result = give(self, &self->to, what, &to);
    }
    if (!result && self->asked.to && options_want_text(&self->asked))
        printf("%s handed %s over to %s\n", kvf_asked_engine(from), request, kvf_asked_engine(to));
    kvf_asked_free(from);
    kvf_asked_free(to);
    return result;
}

/* ---- the table of verbs ---------------------------------------------------------------------- */

typedef struct ask_verb {
    const char *name;
    size_t least, most; /* operands after the verb */
    int (*run)(asking *self);
} ask_verb;

static const ask_verb verbs[] = {
    {"drain", 0, 0, drain}, {"resume", 0, 0, resume}, {"list", 0, 1, list}, {"hand-over", 1, 1, hand_over}};

static const ask_verb *find_verb(const char *name) {
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++)
        if (strcmp(verbs[i].name, name) == 0)
            return &verbs[i];
    return NULL;
}

static int check(const options *asked, const ask_verb **out) {
    if (asked->operand_count < 2)
        return usage_error(
            "ask needs the endpoint of an engine and what to ask it for: drain, resume, list, or "
            "hand-over REQUEST");
    const ask_verb *verb = *out = find_verb(asked->operands[1]);
    if (!verb)
        return usage_error("an engine cannot be asked to \"%s\"; allowed: drain, resume, list, hand-over",
                           asked->operands[1]);
    if (asked->operand_count > 2 + verb->most)
        return usage_error("\"%s\" is not expected after %s", asked->operands[2 + verb->most], verb->name);
    if (verb->least > 0 && (asked->operand_count < 3 || !asked->operands[2][0]))
        return usage_error("hand-over needs the name of a request");
    return EXIT_DONE;
}

int run_ask(int argc, char **argv) {
    asking self = {.steps = NULL};
    const ask_verb *verb = NULL;
    int result = options_parse(argc, argv, COMMAND_ASK, &self.asked);
    if (!result)
        result = check(&self.asked, &verb);
    if (!result)
        result = keys_read(self.asked.key_file, &self.keys);
    if (!result)
        result = place_read(self.asked.operands[0], &self.place);
    if (!result && self.asked.to)
        result = place_read(self.asked.to, &self.to);
    if (!result && self.asked.json)
        self.steps = json_object_new_array();
    if (!result && verb)
        result = verb->run(&self);
    if (self.steps) { /* of what was asked, also if it was not done */
        struct json_object *out = json_object_new_object();
        json_object_object_add(out, "asked", self.steps);
        int written = json_write(out, self.asked.json);
        result = result ? result : written;
    }
    memset(&self.keys, 0, sizeof self.keys);
    place_free(&self.place);
    place_free(&self.to);
    return result;
}
