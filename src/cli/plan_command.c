/*
 * kvferry plan: which cells each decode rank reads from each prefill rank, as a table, as JSON or as a page.
 */
#include <stdio.h>
#include <string.h>

#include "engines.h"
#include "json.h"
#include "plan_page.h"
#include "report.h"

static int write_json(const engines *all, report *plans) {
    struct json_object *out = json_object_new_object();
    engines_add_json(all, out);
    report_add_json(plans, out);
    return json_write(out, plans->asked->json);
}

static int report_engines(const engines *all, const options *asked) {
    report plans;
    report_start(&plans, asked, all->prefill, all->decode);
    int result = report_make(&plans);
    if (!result && asked->html)
        result = plan_page_write(&plans, asked->html);
    if (!result && options_want_text(asked)) {
        engines_print(all);
        result = engines_print_regions(all->prefill, all->decode) ? report_print(&plans)
                                                                  : failure("not enough memory");
    }
    if (!result && asked->json)
        result = write_json(all, &plans);
    if (!result)
        report_warn(&plans);
    report_free(&plans);
    return result;
}

int run_plan(int argc, char **argv) {
    options asked;
    engines all = {0};
    int result = options_parse(argc, argv, COMMAND_PLAN, &asked);
    if (result)
        return result;
    if (asked.tokens == 0)
        asked.tokens = REPORT_TOKENS;
    result = engines_read(&asked, &all);
    if (!result) {
        shape_fill_blocks(&all.prefill_shape, all.model);
        shape_fill_blocks(&all.decode_shape, all.model);
        result = engines_build(&all);
    }
    if (!result)
        result = report_engines(&all, &asked);
    engines_free(&all);
    return result;
}
