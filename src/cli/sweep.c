#include "sweep.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "json.h"
#include "page.h"

static const char *name_ways(const report_totals *pair) {
    return pair->direct && pair->packed ? "both" : pair->packed ? "packed" : "direct";
}

/* Bytes of an average run, rounded; 0 if all is converted, because conversions have no runs. */
static uint64_t bytes_a_run(const report_totals *pair) {
    return pair->runs ? (uint64_t)llround((double)pair->bytes / (double)pair->runs) : 0;
}

/* ---- CSV ------------------------------------------------------------------------------------- */

/* In quotes, because shapes have commas; a quote in it, as a group's name may have, is doubled (RFC 4180). */
static void print_quoted(const char *shape) {
    (void)putchar('"');
    for (; *shape; shape++) {
        if (*shape == '"')
            (void)putchar('"');
        (void)putchar(*shape);
    }
    printf("\",");
}

static void print_pair(const sweep *of, uint32_t p, uint32_t d) {
    const report_totals *pair = sweep_pair(of, p, d);
    print_quoted(of->prefill.list.shapes[p]);
    print_quoted(of->decode.list.shapes[d]);
    if (pair->plans == 0)
        printf(",,,,,,refused\n");
    else
        printf("%u,%u,%llu,%llu,%llu,%.4g,%s\n", kvf_engine_rank_count(of->prefill.engines[p]),
               kvf_engine_rank_count(of->decode.engines[d]), (unsigned long long)pair->bytes,
               (unsigned long long)pair->runs, (unsigned long long)bytes_a_run(pair), pair->slowest_ns,
               name_ways(pair));
}

void sweep_print_csv(const sweep *of) {
    printf("prefill,decode,prefill_ranks,decode_ranks,bytes,runs,bytes_per_run,slowest_rank_ns,way\n");
    for (uint32_t p = 0; p < of->prefill.list.count; p++)
        for (uint32_t d = 0; d < of->decode.list.count; d++)
            print_pair(of, p, d);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static struct json_object *json_pair(const sweep *of, uint32_t p, uint32_t d) {
    const report_totals *pair = sweep_pair(of, p, d);
    struct json_object *out = json_object_new_object();
    json_text(out, "prefill", of->prefill.list.shapes[p]);
    json_text(out, "decode", of->decode.list.shapes[d]);
    json_text(out, "way", pair->plans ? name_ways(pair) : "refused");
    if (pair->plans == 0)
        return out;
    json_count(out, "prefill_ranks", kvf_engine_rank_count(of->prefill.engines[p]));
    json_count(out, "decode_ranks", kvf_engine_rank_count(of->decode.engines[d]));
    json_count(out, "bytes", pair->bytes);
    json_count(out, "runs", pair->runs);
    json_count(out, "bytes_per_run", bytes_a_run(pair));
    json_real(out, "slowest_rank_ns", pair->slowest_ns);
    return out;
}

struct json_object *sweep_json(const sweep *of) {
    struct json_object *out = json_object_new_object(), *cost = json_object_new_object(),
                       *pairs = json_object_new_array();
    json_text(out, "model", kvf_model_name(of->model));
    json_count(out, "tokens", of->asked->tokens);
    json_text(cost, "transport", of->cost_kind.text);
    json_object_object_add(cost, "calibrated", json_object_new_boolean(of->asked->calibrate));
    json_object_object_add(out, "cost", cost);
    for (uint32_t p = 0; p < of->prefill.list.count; p++)
        for (uint32_t d = 0; d < of->decode.list.count; d++)
            json_object_array_add(pairs, json_pair(of, p, d));
    json_object_object_add(out, "pairs", pairs);
    return out;
}

/* ---- the map --------------------------------------------------------------------------------- */

/* Logarithms of the least and the greatest time. */
typedef struct scale {
    double least, most;
} scale;

static scale find_scale(const sweep *of) {
    scale out = {INFINITY, -INFINITY};
    for (uint32_t p = 0; p < of->prefill.list.count; p++)
        for (uint32_t d = 0; d < of->decode.list.count; d++) {
            const report_totals *pair = sweep_pair(of, p, d);
            if (pair->plans == 0 || pair->slowest_ns <= 0)
                continue;
            out.least = fmin(out.least, log(pair->slowest_ns));
            out.most = fmax(out.most, log(pair->slowest_ns));
        }
    return out;
}

static void add_cell(page *to, const sweep *of, const scale *within, uint32_t p, uint32_t d) {
    const report_totals *pair = sweep_pair(of, p, d);
    if (pair->plans == 0) {
        page_markup(to, "<td class=\"refused\">refused</td>");
        return;
    }
    const double span = within->most - within->least;
    const double slow = span > 0 && pair->slowest_ns > 0 ? (log(pair->slowest_ns) - within->least) / span : 0;
    const double light = 92 - 60 * slow;
    page_markup(to, "<td class=\"pair\" style=\"background:hsl(%.0f 70%% %.0f%%);color:%s\">",
                190 + 40 * slow, light, light < 58 ? "#fff" : "#1c2330");
    page_markup(to, "%s<small>", text_time(pair->slowest_ns).text);
    if (pair->runs)
        page_markup(to, "%s a run, ", text_bytes(bytes_a_run(pair)).text);
    page_markup(to, "%s</small></td>", name_ways(pair));
}

/* Adds a shape, in which the line may break after each key. */
static void add_shape(page *to, const char *shape) {
    page_markup(to, "<th>");
    for (const char *key = shape; *key;) {
        const int length = (int)strcspn(key, ",") + (key[strcspn(key, ",")] == ',');
        page_text(to, "%.*s", length, key);
        page_markup(to, "<wbr/>");
        key += length;
    }
    page_markup(to, "</th>");
}

static void add_map(page *to, const sweep *of) {
    const scale within = find_scale(of);
    page_markup(to, "<div class=\"wide\"><table class=\"heat\">\n<tr><th>prefill \\ decode</th>");
    for (uint32_t d = 0; d < of->decode.list.count; d++)
        add_shape(to, of->decode.list.shapes[d]);
    page_markup(to, "</tr>\n");
    for (uint32_t p = 0; p < of->prefill.list.count; p++) {
        page_markup(to, "<tr>");
        add_shape(to, of->prefill.list.shapes[p]);
        for (uint32_t d = 0; d < of->decode.list.count; d++)
            add_cell(to, of, &within, p, d);
        page_markup(to, "</tr>\n");
    }
    page_markup(to, "</table></div>\n");
}

int sweep_write_page(const sweep *of, const char *file) {
    page to;
    char title[256];
    (void)snprintf(title, sizeof title, "kvferry sweep: %s", kvf_model_name(of->model));
    int result = page_open(file, title, &to);
    if (result)
        return result;
    page_markup(&to, "<p>");
    page_text(
        &to,
        "What the slowest decode rank takes for a request of %llu tokens whose blocks are scattered, by the "
        "chosen way of each source, with costs as %s for %s; and how long a run is on average. The darker, "
        "the slower.",
        (unsigned long long)of->asked->tokens, report_costs_are(of->asked, of->cost_kind.text),
        of->cost_kind.text);
    page_markup(&to, "</p>\n");
    add_map(&to, of);
    return page_close(&to);
}
