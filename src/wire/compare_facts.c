/*
 * How two texts of facts differ, in words. The other side's text may be anything, so whatever of it is shown
 * is cut short and has its control characters written out.
 */
#include <stdio.h>

#include "wire/wire.h"

#define SHOWN_FIELDS 12
#define SHOWN_BYTES 40 /* of a name or a value */
#define MAX_LINES 20000

typedef struct span {
    const char *at;
    size_t bytes;
} span;

/* One line: `name: value`. A line without a colon is a name with an empty value. */
typedef struct fact {
    span name, value;
} fact;

/* Takes the next line off a text. */
static bool next_fact(span *text, fact *out) {
    while (text->bytes && *text->at == '\n') {
        text->at++; /* empty lines say nothing */
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

/* Looks from `*from` on, where the last one was found, and then from the start: facts have a fixed order. */
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

/* Room for one name or value in words: dots on both sides, and a zero. */
typedef struct words {
    char text[SHOWN_BYTES + 8];
} words;

/* Shows `shown` from byte `skip` on. Bytes beyond ASCII stay: names may be in any language. */
static const char *show(words *out, span shown, size_t skip) {
    size_t length = 0;
    if (skip)
        length += (size_t)snprintf(out->text, sizeof out->text, "...");
    for (size_t i = skip; i < shown.bytes; i++) {
        unsigned char c = (unsigned char)shown.at[i];
        bool control = c < ' ' || c == 0x7f;
        if (length + (control ? 4 : 1) > SHOWN_BYTES) {
            (void)snprintf(out->text + length, sizeof out->text - length, "...");
            return out->text;
        }
        if (control)
            length += (size_t)snprintf(out->text + length, sizeof out->text - length, "\\x%02x", c);
        else
            out->text[length++] = (char)c;
    }
    out->text[length] = '\0';
    return out->text;
}

/* Where values begin to differ, less a few bytes, when that is too far in to be shown from the start. */
static size_t first_shown(span a, span b) {
    size_t i = 0;
    while (i < a.bytes && i < b.bytes && a.at[i] == b.at[i])
        i++;
    return i > SHOWN_BYTES / 2 ? i - SHOWN_BYTES / 4 : 0;
}

typedef struct differences {
    kvf_text text;
    size_t count;
} differences;

/* Whether one more is to be shown; counts it in any case. */
static bool shows_more(differences *found) {
    if (found->count++ >= SHOWN_FIELDS)
        return false;
    if (found->count > 1)
        kvf_text_add(&found->text, "; ");
    return true;
}

static void add_different(differences *found, const fact *ours, const fact *theirs) {
    if (!shows_more(found))
        return;
    words name, here, there;
    size_t skip = first_shown(ours->value, theirs->value);
    kvf_text_add(&found->text, "%s is \"%s\" here and \"%s\" there", show(&name, ours->name, 0),
                 show(&here, ours->value, skip), show(&there, theirs->value, skip));
}

static void add_missing(differences *found, const fact *there_is, const char *where, const char *not_where) {
    if (!shows_more(found))
        return;
    words name, value;
    kvf_text_add(&found->text, "%s is \"%s\" %s and missing %s", show(&name, there_is->name, 0),
                 show(&value, there_is->value, 0), where, not_where);
}

/* ---- comparing ------------------------------------------------------------------------------- */

static void find_differences(span ours, span theirs, differences *found) {
    fact own, other;
    const char *from = theirs.at;
    for (span rest = ours; next_fact(&rest, &own);) {
        if (!find_fact(theirs, &from, own.name, &other))
            add_missing(found, &own, "here", "there");
        else if (!same(own.value, other.value))
            add_different(found, &own, &other);
    }
    from = ours.at;
    for (span rest = theirs; next_fact(&rest, &other);)
        if (!find_fact(ours, &from, other.name, &own))
            add_missing(found, &other, "there", "here");
}

kvf_status kvf_wire_compare_facts(const char *ours, const char *theirs, const char *their_name) {
    if (!ours)
        ours = "";
    if (!theirs)
        theirs = "";
    if (strcmp(ours, theirs) == 0)
        return KVF_OK;
    words name;
    (void)show(&name, (span){their_name, their_name ? strlen(their_name) : 0}, 0);
    span own = {ours, strlen(ours)}, other = {theirs, strlen(theirs)};
    size_t lines = count_lines(other);
    if (lines > MAX_LINES)
        return kvf_fail(KVF_E_MISMATCH, "engine \"%s\" sent more than %d lines of facts", name.text,
                        MAX_LINES);
    if (lines == 0)
        return kvf_fail(KVF_E_MISMATCH, "engine \"%s\" caches other cells and did not say which", name.text);
    differences found = {0};
    find_differences(own, other, &found);
    if (found.count > SHOWN_FIELDS)
        kvf_text_add(&found.text, "; and %zu more", found.count - SHOWN_FIELDS);
    kvf_status status;
    if (found.text.failed)
        status = kvf_nomem("the differences of facts");
    else if (found.count == 0)
        status = kvf_fail(KVF_E_MISMATCH, "engine \"%s\" has the same facts in another order, or some twice",
                          name.text);
    else
        status = kvf_fail(KVF_E_MISMATCH, "engine \"%s\" caches other cells: %s", name.text, found.text.data);
    kvf_text_free(&found.text);
    return status;
}
