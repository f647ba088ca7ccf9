#include "plan_picture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry/plan.h>

#include "text.h"

/* Lengths in the picture, in the units of its coordinates. */
enum { LABEL = 80, BOX = 200, GAP = 280, SPACE = 12, WIDTH = LABEL + BOX + GAP + BOX + LABEL };

/* The subject of one picture: the parts of a group that are cut alike. Its first part stands for all. */
typedef struct subject {
    uint32_t group, part;
    const kvf_group_desc *desc;
    uint32_t shares; /* of the tokens; the larger number of the two sides */
    double height;   /* of a box */
} subject;

/* ---- choosing pictures ----------------------------------------------------------------------- */

static const kvf_group_shard_desc *held_by(const kvf_engine *engine, uint32_t rank, uint32_t group) {
    return &kvf_shard_get(kvf_engine_shard(engine, rank))->groups[group];
}

static bool held_alike(const kvf_engine *engine, uint32_t group, uint32_t a, uint32_t b) {
    for (uint32_t rank = 0; rank < kvf_engine_rank_count(engine); rank++) {
        const kvf_part_share *parts = held_by(engine, rank, group)->parts;
        if (parts[a].units.begin != parts[b].units.begin || parts[a].units.end != parts[b].units.end ||
            parts[a].replica != parts[b].replica || parts[a].replica_count != parts[b].replica_count)
            return false;
    }
    return true;
}

static bool cut_alike(const report *plans, uint32_t group, uint32_t a, uint32_t b) {
    const kvf_group_desc *desc = kvf_model_group(kvf_engine_model(plans->decode), group);
    return desc->parts[a].units == desc->parts[b].units && held_alike(plans->prefill, group, a, b) &&
           held_alike(plans->decode, group, a, b);
}

static uint32_t most_shares(const kvf_engine *engine, uint32_t group) {
    uint32_t most = 1;
    for (uint32_t rank = 0; rank < kvf_engine_rank_count(engine); rank++) {
        uint32_t count = held_by(engine, rank, group)->tokens.count;
        most = count > most ? count : most;
    }
    return most;
}

static subject make_subject(const report *plans, uint32_t group, uint32_t part) {
    const uint32_t prefill = kvf_engine_rank_count(plans->prefill),
                   decode = kvf_engine_rank_count(plans->decode);
    const uint32_t shares[] = {most_shares(plans->prefill, group), most_shares(plans->decode, group)};
    return (subject){
        .group = group,
        .part = part,
        .desc = kvf_model_group(kvf_engine_model(plans->decode), group),
        .shares = shares[0] > shares[1] ? shares[0] : shares[1],
        .height = fmin(110, fmax(22, 480.0 / (prefill > decode ? prefill : decode))),
    };
}

/* ---- boxes ----------------------------------------------------------------------------------- */

/* The top of a rank's box. The side with fewer ranks is centred beside the other. */
static double top_of(const report *plans, const subject *of, bool decode, uint32_t rank) {
    const double ours = kvf_engine_rank_count(decode ? plans->decode : plans->prefill);
    const double others = kvf_engine_rank_count(decode ? plans->prefill : plans->decode);
    return 24 + (rank + fmax(0, others - ours) / 2) * (of->height + SPACE);
}

static double left_of(bool decode) {
    return decode ? LABEL + BOX + GAP : LABEL;
}

/* Draws cells of a rank: layers from top to bottom, units from left to right, in each unit its share of the tokens. */
static void draw_cells(page *to, const subject *of, double left, double top, kvf_range layers,
                       kvf_range units, kvf_token_share tokens, uint32_t colour_of) {
    const double unit = (double)BOX / of->desc->parts[of->part].units;
    const double layer = of->height / of->desc->layer_count;
    const uint32_t shares = tokens.count > 1 ? tokens.count : 1;
    const uint32_t step = shares == 1 ? units.end - units.begin : 1;
    for (uint32_t u = units.begin; u < units.end; u += step)
        page_markup(
            to, "<rect class=\"cells\" x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"/>\n",
            left + unit * (u + (shares > 1 ? (double)tokens.index / shares : 0)), top + layer * layers.begin,
            unit * step / shares, layer * (layers.end - layers.begin), page_rank_colour(colour_of).text);
}

/* Draws the borders between units, unless there are too many to be told apart. */
static void draw_units(page *to, const subject *of, double left, double top) {
    const uint32_t columns = of->desc->parts[of->part].units * of->shares;
    for (uint32_t column = 1; column < columns && columns <= 64; column++)
        page_markup(to, "<path class=\"line\" d=\"M%.2f %.2fv%.2f\"/>\n",
                    left + (double)BOX * column / columns, top, of->height);
}

static void begin_box(page *to, const report *plans, const subject *of, bool decode, uint32_t rank) {
    const double left = left_of(decode), top = top_of(plans, of, decode, rank);
    page_markup(to, "<g class=\"rank\" data-side=\"%s\" data-rank=\"%u\">\n", decode ? "decode" : "prefill",
                rank);
    page_markup(to, "<rect class=\"box\" x=\"%.2f\" y=\"%.2f\" width=\"%d\" height=\"%.2f\"/>\n", left, top,
                BOX, of->height);
    page_markup(to, "<text x=\"%.2f\" y=\"%.2f\" text-anchor=\"%s\">rank %u</text>\n",
                decode ? left + BOX + 8 : left - 8, top + of->height / 2 + 4, decode ? "start" : "end", rank);
}

static void end_box(page *to, const subject *of, double left, double top) {
    draw_units(to, of, left, top);
    page_markup(to, "</g>\n");
}

static void draw_holder(page *to, const report *plans, const subject *of, uint32_t rank) {
    const kvf_group_shard_desc *held = held_by(plans->prefill, rank, of->group);
    const kvf_range layers = kvf_shard_group_layers(kvf_engine_shard(plans->prefill, rank), of->group);
    const double top = top_of(plans, of, false, rank);
    begin_box(to, plans, of, false, rank);
    draw_cells(to, of, left_of(false), top, layers, held->parts[of->part].units, held->tokens, rank);
    end_box(to, of, left_of(false), top);
}

static bool is_of(const kvf_plan_cut *cut, const subject *of) {
    return cut->group == of->group && cut->part == of->part;
}

/* Draws the cells of a decode rank, in the colours of the ranks that it reads them from. */
static void draw_reader(page *to, const report *plans, const subject *of, uint32_t rank) {
    const kvf_plan *plan = plans->planned[rank].plan;
    const double top = top_of(plans, of, true, rank);
    begin_box(to, plans, of, true, rank);
    for (uint32_t i = 0; i < kvf_plan_cut_count(plan); i++) {
        const kvf_plan_cut *cut = kvf_plan_get_cut(plan, i);
        if (is_of(cut, of))
            draw_cells(to, of, left_of(true), top, cut->layers, cut->units, cut->tokens,
                       kvf_plan_source_rank(plan, cut->source));
    }
    end_box(to, of, left_of(true), top);
}

/* ---- flows ----------------------------------------------------------------------------------- */

static bool reads(const kvf_plan *plan, const subject *of, uint32_t source) {
    for (uint32_t i = 0; i < kvf_plan_cut_count(plan); i++) {
        const kvf_plan_cut *cut = kvf_plan_get_cut(plan, i);
        if (cut->source == source && is_of(cut, of))
            return true;
    }
    return false;
}

static const char *name_way(const kvf_way_prediction *source) {
    return source->way == KVF_WAY_PACKED ? "packed" : "direct";
}

static void say_source(page *to, const report *plans, uint32_t rank, uint32_t source) {
    const kvf_way_prediction *takes = &plans->planned[rank].sources[source];
    page_markup(to, "<title>");
    page_text(to, "decode rank %u reads %s in %s runs from prefill rank %u: %s, %s", rank,
              text_bytes(takes->bytes).text, text_count(takes->runs).text,
              kvf_plan_source_rank(plans->planned[rank].plan, source), name_way(takes),
              text_time(report_chosen(takes)).text);
    page_markup(to, "</title>");
}

/* The height at which the i-th of `count` flows meets the edge of a box; the flows are evenly spaced. */
static double edge(const report *plans, const subject *of, bool decode, uint32_t rank, uint32_t i,
                   uint32_t count) {
    return top_of(plans, of, decode, rank) + of->height * (i + 1) / (count + 1);
}

static void draw_flow(page *to, const report *plans, uint32_t rank, uint32_t source, double from,
                      double until) {
    const double left = LABEL + BOX, right = left + GAP, bend = GAP * 0.45;
    const kvf_way_prediction *takes = &plans->planned[rank].sources[source];
    const uint32_t holder = kvf_plan_source_rank(plans->planned[rank].plan, source);
    page_markup(to,
                "<path class=\"flow %s\" data-decode=\"%u\" data-prefill=\"%u\" stroke=\"%s\" "
                "stroke-width=\"%.1f\" d=\"M%.1f %.1fC%.1f %.1f %.1f %.1f %.1f "
                "%.1f\">",
                name_way(takes), rank, holder, page_rank_colour(holder).text,
                plans->sum.bytes ? 2 + 8 * (double)takes->bytes / (double)plans->sum.bytes : 2.0, left, from,
                left + bend, from, right - bend, until, right, until);
    say_source(to, plans, rank, source);
    page_markup(to, "</path>\n");
}

/* By prefill rank, the number of decode ranks that read a subject from it; NULL if memory ran out. Free it. */
static uint32_t *count_readers(const report *plans, const subject *of) {
    uint32_t *readers = calloc(kvf_engine_rank_count(plans->prefill), sizeof *readers);
    for (uint32_t rank = 0; readers && rank < kvf_engine_rank_count(plans->decode); rank++) {
        const kvf_plan *plan = plans->planned[rank].plan;
        for (uint32_t source = 0; source < kvf_plan_source_count(plan); source++)
            readers[kvf_plan_source_rank(plan, source)] += reads(plan, of, source);
    }
    return readers;
}

static void draw_flows(page *to, const report *plans, const subject *of) {
    uint32_t *readers = count_readers(plans, of);
    uint32_t *before = calloc(kvf_engine_rank_count(plans->prefill), sizeof *before);
    to->failed = to->failed || !readers || !before;
    for (uint32_t rank = 0; !to->failed && rank < kvf_engine_rank_count(plans->decode); rank++) {
        const kvf_plan *plan = plans->planned[rank].plan;
        uint32_t sources = 0, i = 0;
        for (uint32_t source = 0; source < kvf_plan_source_count(plan); source++)
            sources += reads(plan, of, source);
        for (uint32_t source = 0; source < kvf_plan_source_count(plan); source++) {
            const uint32_t holder = kvf_plan_source_rank(plan, source);
            if (reads(plan, of, source))
                draw_flow(to, plans, rank, source,
                          edge(plans, of, false, holder, before[holder]++, readers[holder]),
                          edge(plans, of, true, rank, i++, sources));
        }
    }
    free(before);
    free(readers);
}

/* ---- pictures -------------------------------------------------------------------------------- */

static void say_subject(page *to, const report *plans, const subject *of) {
    const kvf_part_desc *part = &of->desc->parts[of->part];
    page_markup(to, "<h3>");
    page_text(to, "%s:", of->desc->name);
    for (uint32_t p = of->part; p < of->desc->part_count; p++)
        if (cut_alike(plans, of->group, of->part, p))
            page_text(to, " %s", of->desc->parts[p].name);
    page_text(to, ", layers %s, %u %s%s", text_layers(of->desc, (kvf_range){0, of->desc->layer_count}).text,
              part->units, unit_word(of->desc, part), part->units == 1 ? "" : "s");
    if (of->shares > 1)
        page_text(to, ", each with its %u shares of the tokens", of->shares);
    page_markup(to, "</h3>\n");
}

static void draw(page *to, const report *plans, const subject *of) {
    const uint32_t prefill = kvf_engine_rank_count(plans->prefill),
                   decode = kvf_engine_rank_count(plans->decode);
    say_subject(to, plans, of);
    page_markup(to, "<svg class=\"cover\" viewBox=\"0 0 %d %.0f\" width=\"%d\" role=\"img\">\n", WIDTH,
                24 + (prefill > decode ? prefill : decode) * (of->height + SPACE), WIDTH);
    page_markup(to, "<text x=\"%d\" y=\"14\">prefill</text><text x=\"%d\" y=\"14\">decode</text>\n", LABEL,
                LABEL + BOX + GAP);
    for (uint32_t rank = 0; rank < prefill; rank++)
        draw_holder(to, plans, of, rank);
    for (uint32_t rank = 0; rank < decode; rank++)
        draw_reader(to, plans, of, rank);
    draw_flows(to, plans, of);
    page_markup(to, "</svg>\n");
}

void plan_picture(page *to, const report *plans) {
    const kvf_model *model = kvf_engine_model(plans->decode);
    for (uint32_t group = 0; group < kvf_model_group_count(model); group++)
        for (uint32_t part = 0; part < kvf_model_group(model, group)->part_count; part++) {
            bool drawn = false;
            for (uint32_t other = 0; other < part; other++)
                drawn = drawn || cut_alike(plans, group, other, part);
            const subject of = make_subject(plans, group, part);
            if (!drawn)
                draw(to, plans, &of);
        }
}

static double draw_time(page *to, const report *plans, uint32_t rank, double top, double height) {
    const report_rank *planned = &plans->planned[rank];
    const double length = plans->sum.slowest_ns > 0 ? (WIDTH - 2 * LABEL) / plans->sum.slowest_ns : 0;
    double before = 0;
    for (uint32_t source = 0; source < kvf_plan_source_count(planned->plan); source++) {
        const double ns = report_chosen(&planned->sources[source]);
        page_markup(
            to, "<rect class=\"time %s\" x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\">",
            name_way(&planned->sources[source]), LABEL + length * before, top, length * ns, height,
            page_rank_colour(kvf_plan_source_rank(planned->plan, source)).text);
        say_source(to, plans, rank, source);
        page_markup(to, "</rect>\n");
        before += ns;
    }
    return before;
}

void plan_picture_times(page *to, const report *plans) {
    enum { ROW = 22, BAR = 16 };
    const uint32_t count = kvf_engine_rank_count(plans->decode);
    page_markup(to, "<svg class=\"times\" viewBox=\"0 0 %d %u\" width=\"%d\" role=\"img\">\n", WIDTH,
                count * ROW, WIDTH);
    for (uint32_t rank = 0; rank < count; rank++) {
        const double top = (double)rank * ROW;
        page_markup(to, "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\">rank %u</text>\n", LABEL - 8, top + 12,
                    rank);
        const double ns = draw_time(to, plans, rank, top, BAR);
        page_markup(to, "<text x=\"%d\" y=\"%.0f\">%s</text>\n", WIDTH - LABEL + 8, top + 12,
                    text_time(ns).text);
    }
    page_markup(to, "</svg>\n");
}
