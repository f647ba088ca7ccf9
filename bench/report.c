#include "report.h"

#include <json-c/json.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define COLUMNS_MAX 16
#define CELL_BYTES 40
#define PATH_BYTES 4096

struct bench_report {
    const char *json_path;
    json_object *all, *tables, *rows, *row;
    const char *columns[COLUMNS_MAX];
    size_t column_count, column;
    bool failed;
};

static void print_machine(bench_report *report) {
    char model[128] = "unknown processor";
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon) {
            line[strcspn(line, "\n")] = '\0';
            (void)snprintf(model, sizeof model, "%s", colon + 2);
            break;
        }
    }
    if (file)
        (void)fclose(file);
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    printf("machine: %s, %ld processors\n", model, processors);
    json_object_object_add(report->all, "processor", json_object_new_string(model));
    json_object_object_add(report->all, "processors", json_object_new_int64(processors));
}

bench_report *bench_report_start(const char *name, int argc, char **argv) {
    bench_report *report = bench_alloc(1, sizeof *report);
    memset(report, 0, sizeof *report);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
            report->json_path = argv[++i];
        } else {
            fprintf(stderr, "usage: %s [--json FILE]\n", argv[0]);
            exit(2);
        }
    }
    report->all = json_object_new_object();
    report->tables = json_object_new_array();
    json_object_object_add(report->all, "benchmark", json_object_new_string(name));
    print_machine(report);
    json_object_object_add(report->all, "tables", report->tables);
    return report;
}

/* ---- tables ---------------------------------------------------------------------------------- */

static int width_of(const bench_report *report, size_t column) {
    size_t length = strlen(report->columns[column]);
    return (int)(length < 9 ? 9 : length);
}

void bench_table(bench_report *report, const char *title, const char *const *columns) {
    json_object *table = json_object_new_object();
    report->rows = json_object_new_array();
    json_object_object_add(table, "title", json_object_new_string(title));
    json_object_object_add(table, "rows", report->rows);
    json_object_array_add(report->tables, table);
    printf("\n%s\n", title);
    report->column = 0;
    report->column_count = 0;
    while (columns[report->column_count] && report->column_count < COLUMNS_MAX) {
        report->columns[report->column_count] = columns[report->column_count];
        printf("%s%*s", report->column_count ? "  " : "", width_of(report, report->column_count),
               columns[report->column_count]);
        report->column_count++;
    }
    printf("\n");
}

static void add_cell(bench_report *report, const char *shown, json_object *value) {
    if (report->column == 0) {
        report->row = json_object_new_object();
        json_object_array_add(report->rows, report->row);
    }
    json_object_object_add(report->row, report->columns[report->column], value);
    printf("%s%*s", report->column ? "  " : "", width_of(report, report->column), shown);
    report->column = (report->column + 1) % report->column_count;
    if (report->column == 0)
        printf("\n");
    (void)fflush(stdout);
}

void bench_text(bench_report *report, const char *text) {
    add_cell(report, text, json_object_new_string(text));
}

void bench_number(bench_report *report, int decimals, double number) {
    char shown[CELL_BYTES];
    (void)snprintf(shown, sizeof shown, "%.*f", decimals, number);
    add_cell(report, shown, json_object_new_double(number));
}

static void add_sentence(bench_report *report, const char *key, const char *sentence) {
    json_object *list;
    if (!json_object_object_get_ex(report->all, key, &list)) {
        list = json_object_new_array();
        json_object_object_add(report->all, key, list);
    }
    json_object_array_add(list, json_object_new_string(sentence));
}

void bench_note(bench_report *report, const char *sentence) {
    printf("%s\n", sentence);
    add_sentence(report, "notes", sentence);
}

void bench_fail(bench_report *report, const char *sentence) {
    printf("FAILED: %s\n", sentence);
    add_sentence(report, "failures", sentence);
    report->failed = true;
}

/* A program that is killed while it writes leaves the file as it was. */
void bench_report_save(bench_report *report) {
    char unfinished[PATH_BYTES];
    if (!report->json_path)
        return;
    const int length = snprintf(unfinished, sizeof unfinished, "%s.unfinished", report->json_path);
    if (length < 0 || (size_t)length >= sizeof unfinished ||
        json_object_to_file_ext(unfinished, report->all, JSON_C_TO_STRING_PRETTY) != 0 ||
        rename(unfinished, report->json_path) != 0) {
        fprintf(stderr, "%s: cannot be written\n", report->json_path);
        report->failed = true;
    }
}

int bench_report_end(bench_report *report) {
    bench_report_save(report);
    const bool failed = report->failed;
    json_object_put(report->all);
    free(report);
    return failed ? 1 : 0;
}

/* ---- numbers --------------------------------------------------------------------------------- */

uint64_t bench_now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

bench_spread bench_spread_of(double *values, size_t count) {
    qsort(values, count, sizeof *values, ascending);
    double middle = count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
    return (bench_spread){middle, values[0], values[count - 1]};
}

const char *bench_bytes(uint64_t bytes) {
    static char texts[4][CELL_BYTES];
    static unsigned next;
    static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
    unsigned unit = 0;
    while (unit < 3 && bytes >= 1024 && bytes % 1024 == 0) {
        bytes /= 1024;
        unit++;
    }
    char *text = texts[next++ % 4];
    (void)snprintf(text, CELL_BYTES, "%llu %s", (unsigned long long)bytes, units[unit]);
    return text;
}

void *bench_alloc(size_t count, size_t element_bytes) {
    void *memory = calloc(count, element_bytes);
    bench_require(memory != NULL, "out of memory");
    return memory;
}

static uint64_t draw(uint64_t below) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

uint32_t *bench_shuffled(size_t count) {
    uint32_t *order = bench_alloc(count, sizeof *order);
    for (size_t i = 0; i < count; i++)
        order[i] = (uint32_t)i;
    for (size_t i = count; i > 1; i--) {
        const size_t j = draw(i);
        const uint32_t kept = order[i - 1];
        order[i - 1] = order[j];
        order[j] = kept;
    }
    return order;
}

void bench_require(bool held, const char *sentence) {
    if (held)
        return;
    fprintf(stderr, "%s\n", sentence);
    exit(1);
}

void bench_must(kvf_status status) {
    if (status)
        (void)fprintf(stderr, "%s: %s\n", kvf_status_name(status), kvf_error_detail());
    bench_require(status == KVF_OK, "a call of the library failed");
}
