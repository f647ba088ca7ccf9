/*
 * kvferry sweep: the time that each pair of shapes takes.
 */
#include <stdlib.h>
#include <string.h>

#include "engines.h"
#include "json.h"
#include "progress.h"
#include "sweep.h"

/* Makes the engine of one shape. A shape that is impossible for the model is left out, with a warning on stderr. */
static int make_engine(const char *side, const char *wanted, const kvf_model *model, kvf_engine **out) {
    engine_shape shape;
    int result = shape_parse(side, wanted, model, &shape);
    if (!result) {
        shape_fill_blocks(&shape, model);
        result = shape_build(&shape, model, out);
    }
    if (result == EXIT_USAGE && shape.is_read) {
        notice("warning: --%s %s is left out", side, wanted);
        result = EXIT_DONE;
    }
    shape_free(&shape);
    return result;
}

static uint32_t count_made(const sweep_side *side) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < side->list.count; i++)
        count += side->engines[i] != NULL;
    return count;
}

static int make_side(const char *name, const char *wanted, const kvf_model *model, sweep_side *out) {
    out->name = name;
    int result = alternatives_expand(name, wanted, &out->list);
    if (result)
        return result;
    out->engines = calloc(out->list.count, sizeof *out->engines);
    if (!out->engines)
        return failure("not enough memory");
    for (uint32_t i = 0; i < out->list.count && !result; i++)
        result = make_engine(name, out->list.shapes[i], model, &out->engines[i]);
    if (!result && count_made(out) == 0)
        result = usage_error("--%s: none of the shapes is possible for this model", name);
    return result;
}

static void free_side(sweep_side *side) {
    for (uint32_t i = 0; side->engines && i < side->list.count; i++)
        kvf_engine_free(side->engines[i]);
    free(side->engines);
    alternatives_free(&side->list);
}

static int compare_pair(sweep *of, const kvf_engine *prefill, const kvf_engine *decode, report_totals *out) {
    report plans;
    report_start(&plans, of->asked, prefill, decode);
    int result = report_make(&plans);
    *out = plans.sum;
    of->cost_kind = text_format("%s", plans.cost_kind);
    report_free(&plans);
    return result;
}

static int compare_all(sweep *of) {
    of->pairs = calloc((size_t)of->prefill.list.count * of->decode.list.count, sizeof *of->pairs);
    if (!of->pairs)
        return failure("not enough memory");
    int result = EXIT_DONE;
    const uint32_t pairs = count_made(&of->prefill) * count_made(&of->decode);
    uint32_t done = 0;
    progress shown = progress_begin();
    for (uint32_t p = 0; p < of->prefill.list.count && !result; p++)
        for (uint32_t d = 0; d < of->decode.list.count && !result; d++) {
            if (!of->prefill.engines[p] || !of->decode.engines[d])
                continue;
            progress_show(&shown, (double)done / pairs, "comparing, pair %u of %u", done + 1, pairs);
            result = compare_pair(of, of->prefill.engines[p], of->decode.engines[d],
                                  &of->pairs[(size_t)p * of->decode.list.count + d]);
            done++;
        }
    progress_clear();
    return result;
}

const report_totals *sweep_pair(const sweep *of, uint32_t prefill, uint32_t decode) {
    return &of->pairs[(size_t)prefill * of->decode.list.count + decode];
}

int run_sweep(int argc, char **argv) {
    options asked;
    sweep all = {.asked = &asked};
    int result = options_parse(argc, argv, COMMAND_SWEEP, &asked);
    if (result)
        return result;
    if (asked.tokens == 0)
        asked.tokens = REPORT_TOKENS;
    result = options_load_model(&asked, &all.model);
    if (!result)
        result = make_side("prefill", asked.prefill, all.model, &all.prefill);
    if (!result)
        result = make_side("decode", asked.decode, all.model, &all.decode);
    if (!result)
        result = compare_all(&all);
    if (!result && asked.html)
        result = sweep_write_page(&all, asked.html);
    if (!result && options_want_text(&asked))
        sweep_print_csv(&all);
    if (!result && asked.json)
        result = json_write(sweep_json(&all), asked.json);
    free(all.pairs);
    free_side(&all.decode);
    free_side(&all.prefill);
    kvf_model_free(all.model);
    return result;
}
