/*
 * vectors DIR [--only FILE] [--verbose]
 *
 * Runs every case of every DIR/<set>.json and compares the library's answer with the recorded one. A suspect's recorded
 * answer is wrong: the library must refuse or answer something else. Exits with 1 if a case fails and with 2 if a file
 * cannot be read.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "on_device.h"
#include "vectors.h"

static const struct {
    const char *name;
    const vector_op *ops;
} sets[] = {
    {"topology", topology_ops},
    {"tp_mapping", tp_mapping_ops},
    {"desc_ids", desc_ids_ops},
    {"reads", reads_ops},
    {"gemma", gemma_ops},
    {"mamba", mamba_ops},
    {"postprocess", postprocess_ops},
#ifndef KVF_WITHOUT_ENGINE
    {"aggregator", aggregator_ops},
    {"handshake", handshake_ops},
#endif
};

enum { MAX_KINDS = 64, MAX_REASONS = 64 };

/** Cases of one op. */
typedef struct tally {
    const char *op;
    unsigned passed, failed, skipped;
    unsigned suspects_refused, suspects_answered; /* also counted in `passed` */
} tally;

typedef struct reason {
    const char *op, *text;
    unsigned count;
} reason;

/** Cases of one file. */
typedef struct report {
    const char *file;
    bool verbose;
    tally ops[MAX_KINDS];
    unsigned op_count;
    reason reasons[MAX_REASONS];
    unsigned reason_count;
} report;

static tally *tally_of(report *r, const char *op) {
    for (unsigned i = 0; i < r->op_count; i++)
        if (strcmp(r->ops[i].op, op) == 0)
            return &r->ops[i];
    if (r->op_count == MAX_KINDS)
        return &r->ops[MAX_KINDS - 1];
    r->ops[r->op_count].op = op;
    return &r->ops[r->op_count++];
}

static void skip(report *r, const char *op, const char *why) {
    tally_of(r, op)->skipped++;
    for (unsigned i = 0; i < r->reason_count; i++)
        if (strcmp(r->reasons[i].op, op) == 0 && strcmp(r->reasons[i].text, why) == 0) {
            r->reasons[i].count++;
            return;
        }
    if (r->reason_count < MAX_REASONS)
        r->reasons[r->reason_count++] = (reason){op, why, 1};
}

static void fail(report *r, const vector_case *c, const char *what) {
    tally_of(r, c->op)->failed++;
    printf("%s: %s %s: %s\n", r->file, c->id, c->op, what);
}

/* "assertion" is recorded for a refusal without a name. */
static bool same_kind(const char *recorded, const char *got) {
    return strcmp(recorded, got) == 0 || strcmp(recorded, "assertion") == 0;
}

static void judge_suspect(report *r, const vector_case *c, const vector_op *op, const answer *a) {
    char text[16];
    tally *t = tally_of(r, c->op);
    if (a->refusal) {
        t->suspects_refused++;
    } else if (c->out && !op->defect_elsewhere && !first_difference(c->out, a->out, text, sizeof text)) {
        fail(r, c, "the answer is the recorded one, which is known to be wrong");
        return;
    } else {
        t->suspects_answered++;
    }
    t->passed++;
    if (r->verbose)
        printf("%s: %s %s: suspect, %s\n", r->file, c->id, c->op, a->refusal ? a->detail : "answered");
}

static void judge(report *r, const vector_case *c, const vector_op *op, const answer *a) {
    char text[1024], line[1200];
    if (c->malformed[0]) {
        snprintf(line, sizeof line, "the case is malformed: %s", c->malformed);
        fail(r, c, line);
    } else if (a->not_covered) {
        skip(r, c->op, a->not_covered);
    } else if (c->suspect) {
        judge_suspect(r, c, op, a);
    } else if (a->refusal && c->error_kind && same_kind(c->error_kind, a->refusal)) {
        tally_of(r, c->op)->passed++;
        if (r->verbose)
            printf("%s: %s %s: refused as recorded: %s\n", r->file, c->id, c->op, a->detail);
    } else if (a->refusal) {
        snprintf(line, sizeof line, "refused as %s (%s); recorded: %s", a->refusal, a->detail,
                 c->error_kind ? c->error_kind : "an answer");
        fail(r, c, line);
    } else if (c->error_kind) {
        snprintf(line, sizeof line, "answered; recorded: the error %s", c->error_kind);
        fail(r, c, line);
    } else if (first_difference(c->out, a->out, text, sizeof text)) {
        fail(r, c, text);
    } else {
        tally_of(r, c->op)->passed++;
    }
}

static const vector_op *find_op(const vector_op *ops, const char *name) {
    for (; ops && ops->name; ops++)
        if (strcmp(ops->name, name) == 0)
            return ops;
    return NULL;
}

static const char *text_or_null(json_object *object, const char *key) {
    json_object *value;
    return json_object_object_get_ex(object, key, &value) && json_object_is_type(value, json_type_string)
               ? json_object_get_string(value)
               : NULL;
}

/* Takes the fields that every case has; false if one is missing. */
static bool take_case(json_object *object, vector_case *c) {
    json_object *error = NULL;
    const char *version = text_or_null(object, "version");
    *c = (vector_case){.id = text_or_null(object, "id"),
                       .op = text_or_null(object, "op"),
                       .is_seed = version && strcmp(version, "seed") == 0,
                       .suspect = text_or_null(object, "suspect")};
    (void)json_object_object_get_ex(object, "in", &c->in);
    (void)json_object_object_get_ex(object, "out", &c->out);
    if (json_object_object_get_ex(object, "error", &error))
        c->error_kind = text_or_null(error, "kind");
    return c->id && c->op && json_object_is_type(c->in, json_type_object) && (c->out || c->error_kind);
}

static bool run_cases(report *r, json_object *cases, const vector_op *ops) {
    size_t count = json_object_array_length(cases);
    for (size_t i = 0; i < count; i++) {
        vector_case c;
        if (!take_case(json_object_array_get_idx(cases, i), &c)) {
            fprintf(stderr, "%s: case %zu has no id, op, in, or neither out nor error\n", r->file, i);
            return false;
        }
        const vector_op *op = find_op(ops, c.op);
        if (!op) {
            skip(r, c.op, "no code answers this question yet");
            continue;
        }
        answer a = op->run(&c);
        judge(r, &c, op, &a);
        json_object_put(a.out);
        case_release(&c);
    }
    return true;
}

static void print_report(const report *r, tally *total) {
    printf("\n%-34s %7s %7s %7s   suspects\n", r->file, "passed", "failed", "skipped");
    for (unsigned i = 0; i < r->op_count; i++) {
        const tally *t = &r->ops[i];
        printf("  %-32s %7u %7u %7u", t->op, t->passed, t->failed, t->skipped);
        if (t->suspects_refused || t->suspects_answered)
            printf("   %u refused, %u answered otherwise", t->suspects_refused, t->suspects_answered);
        putchar('\n');
        total->passed += t->passed;
        total->failed += t->failed;
        total->skipped += t->skipped;
        total->suspects_refused += t->suspects_refused;
        total->suspects_answered += t->suspects_answered;
    }
    for (unsigned i = 0; i < r->reason_count; i++)
        printf("  not covered: %s, %u: %s\n", r->reasons[i].op, r->reasons[i].count, r->reasons[i].text);
}

/* A set's name may be followed by a word, as in "reads-2". */
static const vector_op *find_set(const char *name) {
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        size_t length = strlen(sets[i].name);
        if (strncmp(name, sets[i].name, length) == 0 && strchr(".-_", name[length]))
            return sets[i].ops; /* strchr() also finds the terminating zero */
    }
    return NULL;
}

/* Runs one file, whatever its name: the set named inside decides which ops it has. */
static bool run_file(const char *directory, const char *name, bool verbose, tally *total) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    json_object *root = json_object_from_file(path), *cases = NULL;
    if (!root)
        fprintf(stderr, "%s\n", json_util_get_last_err());
    const char *set = text_or_null(root, "set");
    bool good = set && json_object_object_get_ex(root, "cases", &cases) &&
                json_object_is_type(cases, json_type_array);
    if (!good)
        fprintf(stderr, "%s: not a file of vectors: it needs a text `set` and a list `cases`\n", path);
    const vector_op *ops = good ? find_set(set) : NULL;
    report r = {.file = name, .verbose = verbose};
    good = good && run_cases(&r, cases, ops);
    if (good)
        print_report(&r, total);
    json_object_put(root);
    return good;
}

static int is_vector_file(const struct dirent *entry) {
    size_t length = strlen(entry->d_name);
    return length > 5 && strcmp(entry->d_name + length - 5, ".json") == 0;
}

static int run_directory(const char *directory, const char *only, bool verbose) {
    struct dirent **files;
    int count = scandir(directory, &files, is_vector_file, alphasort);
    if (count < 0) {
        perror(directory);
        return 2;
    }
    tally total = {0};
    int ran = 0;
    bool good = true;
    for (int i = 0; i < count; i++) {
        size_t stem = strlen(files[i]->d_name) - 5;
        bool wanted = !only || strcmp(only, files[i]->d_name) == 0 ||
                      (strlen(only) == stem && strncmp(only, files[i]->d_name, stem) == 0);
        if (wanted) {
            good = run_file(directory, files[i]->d_name, verbose, &total) && good;
            ran++;
        }
        free(files[i]);
    }
    free(files);
    if (!ran) {
        fprintf(stderr, "%s: no such vectors\n", only ? only : directory);
        return 2;
    }
    printf("\nsuspects: %u refused, %u answered otherwise (counted as passed)\n", total.suspects_refused,
           total.suspects_answered);
    if (regions_on_device())
        printf("%u regions were on a device\n", regions_on_device());
    printf("%u passed, %u failed, %u skipped\n", total.passed, total.failed, total.skipped);
    return !good ? 2 : total.failed != 0;
}

int main(int count, char **arguments) {
    const char *directory = NULL, *only = NULL;
    bool verbose = false, usage = false;
    for (int i = 1; i < count; i++) {
        if (strcmp(arguments[i], "--verbose") == 0)
            verbose = true;
        else if (strcmp(arguments[i], "--only") == 0 && i + 1 < count)
            only = arguments[++i];
        else if (arguments[i][0] != '-' && !directory)
            directory = arguments[i];
        else
            usage = true;
    }
    if (usage || !directory) {
        fprintf(stderr, "usage: %s DIR [--only FILE] [--verbose]\n", arguments[0]);
        return 2;
    }
    return run_directory(directory, only, verbose);
}
