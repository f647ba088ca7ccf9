#include "plan_page.h"

#include <stdio.h>
#include <stdlib.h>

#include "plan_picture.h"
#include "regions.h"

static void add_engine(page *to, const kvf_engine *engine) {
    size_t length = 0;
    char *words = kvf_engine_describe(engine, NULL, 0, &length) ? NULL : malloc(length + 1);
    if (!words || kvf_engine_describe(engine, words, length + 1, NULL))
        to->failed = true;
    else
        page_text(to, "%s", words);
    free(words);
}

static void add_summary(page *to, const report *plans) {
    char costs[256];
    report_say_costs(plans, costs, sizeof costs);
    const report_totals *sum = &plans->sum;
    page_markup(to, "<pre>");
    add_engine(to, plans->prefill);
    add_engine(to, plans->decode);
    page_markup(to, "</pre>\n<p>");
    page_text(to, "%s.", costs);
    page_markup(to, "</p>\n<p>");
    page_text(to, "In all %s in %s runs", text_bytes(sum->bytes).text, text_count(sum->runs).text);
    if (sum->runs)
        page_text(to, ", %s a run", text_bytes(sum->bytes / sum->runs).text);
    page_text(to, "; the slowest rank takes %s by the chosen ways.", text_time(sum->slowest_ns).text);
    page_markup(to, "</p>\n");
}

static void add_regions(page *to, const report *plans) {
    table list;
    regions_start(&list);
    regions_add(&list, "prefill", kvf_engine_shard(plans->prefill, 0));
    regions_add(&list, "decode", kvf_engine_shard(plans->decode, 0));
    to->failed = to->failed || list.failed;
    page_markup(to, "<h2>Memory of the first rank of each side, as registered</h2>\n");
    page_table(to, &list);
    table_free(&list);
}

static void add_fabrics(page *to, const report *plans) {
    if (!plans->fabrics[0].kind)
        return;
    table list;
    report_list_fabrics(plans, &list);
    to->failed = to->failed || list.failed;
    page_markup(to, "<h2>The slowest rank, by transport</h2>\n");
    page_table(to, &list);
    table_free(&list);
}

int plan_page_write(const report *plans, const char *file) {
    page to;
    char title[256];
    (void)snprintf(title, sizeof title, "kvferry plan: %s", kvf_model_name(kvf_engine_model(plans->decode)));
    int result = page_open(file, title, &to);
    if (result)
        return result;
    to.failed = plans->list.failed || plans->sources.failed;
    add_summary(&to, plans);
    page_markup(
        &to,
        "<h2>Who reads what from whom</h2>\n<p>A box is a rank: from top to bottom its layers, from left "
        "to right what it holds of each layer. Cells of a decode rank have the colour of the rank that "
        "they are read from. A line is a source, thicker with more bytes, and dashed where it goes "
        "packed; it shows more when the pointer is on it.</p>\n");
    plan_picture(&to, plans);
    page_markup(&to, "<h2>Predicted time of each decode rank</h2>\n<p>The sources of a rank one after "
                     "another; outlined where they go packed.</p>\n");
    plan_picture_times(&to, plans);
    page_markup(&to, "<h2>Each source</h2>\n");
    page_table(&to, &plans->list);
    page_table(&to, &plans->sources);
    add_fabrics(&to, plans);
    add_regions(&to, plans);
    return page_close(&to);
}
