/*
 * Describes how the facts of two engines differ. The other side's text may be anything, so what is shown of it is cut
 * short and its control characters are escaped.
 */
#include "wire/show.h"

#define SHOWN_FIELDS 12
#define MAX_LINES 20000

typedef struct span {
    const char *at;
    size_t bytes;
} span;

/* One line: `name: value`. A line without a colon is a name with an empty value. */
typedef struct fact {
    span name, value;
} fact;

/* Takes the next line from a text. */
static bool next_fact(span *text, fact *out) {
    while (text->bytes && *text->at == '\n') {
        text->at++; /* empty lines are skipped */
        text->bytes--;
    }
    if (text->bytes == 0)
        return false;
    const char *line = text->at, *newline = memchr(line, '\n', text->bytes);
    size_t bytes = newline ? (size_t)(newline - line) : text->bytes;
    text->at += bytes;
    text->bytes -= bytes;
    const char *colon = memchr(line, ':', bytes);
    out->name = (span){line, colon ? (size_t)(colon - line) : bytes};
    out->value = (span){line + bytes, 0};
    if (colon) {
        const char *value = colon + 1;
        while (value < line + bytes && *value == ' ')
            value++;
        out->value = (span){value, (size_t)(line + bytes - value)};
    }
    return true;
}

static bool same(span a, span b) {
    return a.bytes == b.bytes && memcmp(a.at, b.at, a.bytes) == 0;
}

/* Searches from `*from` on, where the last fact was found, and then from the start, because facts have a fixed
 * order. */
static bool find_fact(span text, const char **from, span name, fact *out) {
    size_t passed = (size_t)(*from - text.at);
    span later = {*from, text.bytes - passed}, earlier = {text.at, passed};
    while (next_fact(&later, out)) {
        if (same(out->name, name)) {
            *from = later.at;
            return true;
        }
    }
    while (next_fact(&earlier, out)) {
        if (same(out->name, name)) {
            *from = earlier.at;
            return true;
        }
    }
    return false;
}

static size_t count_lines(span text) {
    size_t lines = 0;
    fact unused;
    while (lines <= MAX_LINES && next_fact(&text, &unused))
        lines++;
    return lines;
}

/* ---- words ----------------------------------------------------------------------------------- */

static const char *show(kvf_shown *out, span shown, size_t skip) {
    return kvf_wire_show(out, shown.at, shown.bytes, skip);
}

/* The first byte to show: 0, or a few bytes before the first difference if that is too far from the start. */
static size_t first_shown(span a, span b) {
    size_t i = 0;
    while (i < a.bytes && i < b.bytes && a.at[i] == b.at[i])
        i++;
    return i > KVF_SHOWN_BYTES / 2 ? i - KVF_SHOWN_BYTES / 4 : 0;
}

/* The differences in words. Those of groups go into the match, if there is one, all others into `text`. */
typedef struct differences {
    kvf_match *match;
    kvf_text text;
    size_t count;
    kvf_status status; /* of kvf_match_differ() */
} differences;

/* The group whose name, followed by a dot, begins a fact's name; KVF_NO_GROUP if none. */
static uint32_t group_of(const differences *found, span name) {
    for (uint32_t g = 0; found->match && g < found->match->count; g++) {
        const char *group = found->match->groups[g].name;
        size_t bytes = strlen(group);
        if (name.bytes > bytes && name.at[bytes] == '.' && memcmp(name.at, group, bytes) == 0)
            return g;
    }
    return KVF_NO_GROUP;
}

/* Keeps a sentence, and frees its text. */
static void keep(differences *found, span name, kvf_text *sentence) {
    uint32_t group = group_of(found, name);
    if (sentence->failed)
        found->text.failed = true;
    else if (group != KVF_NO_GROUP && !found->status)
        found->status = kvf_match_differ(found->match, group, sentence->data);
    else if (group == KVF_NO_GROUP && found->count++ < SHOWN_FIELDS)
        kvf_text_add(&found->text, "%s%s", found->count > 1 ? "; " : "", sentence->data);
    kvf_text_free(sentence);
}

static void add_different(differences *found, const fact *ours, const fact *theirs) {
    kvf_text sentence = {0};
    kvf_shown name, here, there;
    size_t skip = first_shown(ours->value, theirs->value);
    kvf_text_add(&sentence, "%s is \"%s\" locally and \"%s\" remotely", show(&name, ours->name, 0),
                 show(&here, ours->value, skip), show(&there, theirs->value, skip));
    keep(found, ours->name, &sentence);
}

static void add_missing(differences *found, const fact *there_is, const char *where, const char *not_where) {
    kvf_text sentence = {0};
    kvf_shown name, value;
    kvf_text_add(&sentence, "%s is \"%s\" %s and missing %s", show(&name, there_is->name, 0),
                 show(&value, there_is->value, 0), where, not_where);
    keep(found, there_is->name, &sentence);
}

/* ---- comparing ------------------------------------------------------------------------------- */

static void find_differences(span ours, span theirs, differences *found) {
    fact own, other;
    const char *from = theirs.at;
    for (span rest = ours; next_fact(&rest, &own);) {
        if (!find_fact(theirs, &from, own.name, &other))
            add_missing(found, &own, "locally", "remotely");
        else if (!same(own.value, other.value))
            add_different(found, &own, &other);
    }
    from = ours.at;
    for (span rest = theirs; next_fact(&rest, &other);)
        if (!find_fact(ours, &from, other.name, &own))
            add_missing(found, &other, "remotely", "locally");
}

/* Fills `found` with the differences; fails only if their facts cannot be searched. */
static kvf_status compare(const char *ours, const char *theirs, const char *their_name, differences *found) {
    span own = {ours, strlen(ours)}, other = {theirs, strlen(theirs)};
    if (count_lines(other) > MAX_LINES)
        return kvf_fail(KVF_E_MISMATCH, "engine \"%s\" sent more than %d lines of facts", their_name,
                        MAX_LINES);
    find_differences(own, other, found);
    if (found->count > SHOWN_FIELDS)
        kvf_text_add(&found->text, "; and %zu more", found->count - SHOWN_FIELDS);
    if (found->text.failed)
        return kvf_nomem("the differences of facts");
    return found->status;
}

kvf_status kvf_wire_compare_own(const char *ours, const char *theirs, const char *their_name) {
    kvf_shown name;
    differences found = {0};
    (void)show(&name, (span){their_name, their_name ? strlen(their_name) : 0}, 0);
    kvf_status status = compare(ours ? ours : "", theirs ? theirs : "", name.text, &found);
    if (!status && found.count)
        status = kvf_fail(KVF_E_MISMATCH, "engine \"%s\" has other facts: %s", name.text, found.text.data);
    kvf_text_free(&found.text);
    return status;
}

/* Fails with all differences, of groups and of the engine. */
static kvf_status refuse(const kvf_match *match, const char *their_name, differences *found) {
    kvf_text text = {0};
    const char *between = "";
    for (uint32_t g = 0; g < match->count; g++) {
        if (!match->groups[g].detail[0])
            continue;
        kvf_text_add(&text, "%s%s", between, match->groups[g].detail);
        between = "; ";
    }
    if (found->count)
        kvf_text_add(&text, "%s%s", between, found->text.data);
    kvf_status status = text.failed ? kvf_nomem("the differences of facts")
                                    : kvf_fail(KVF_E_MISMATCH, "engine \"%s\" caches other cells: %s",
                                               their_name, text.data ? text.data : "");
    kvf_text_free(&text);
    return status;
}

kvf_status kvf_wire_match(const kvf_facts *ours, const char *theirs, const char *their_name,
                          kvf_match **out) {
    kvf_shown name;
    kvf_facts other;
    kvf_match *match = NULL;
    differences found = {0};
    (void)show(&name, (span){their_name, their_name ? strlen(their_name) : 0}, 0);
    kvf_status status = kvf_wire_read_facts(theirs, &other);
    if (!status)
        status = kvf_match_build(ours->model, ours->convert, other.model, other.convert, &match);
    found.match = match;
    if (!status)
        status = compare(ours->own, other.own, name.text, &found);
    if (!status && (found.count || !kvf_match_any(match)))
        status = refuse(match, name.text, &found);
    kvf_text_free(&found.text);
    kvf_facts_free(&other);
    if (status) {
        kvf_match_free(match);
        return status;
    }
    *out = match;
    return KVF_OK;
}
