/*
 * A plan in words: which rank is read for what, and the predicted cost.
 *
 * Large engines are repetitive: each of 64 ranks gives another head of the same layers. Neighbouring sources that give
 * equally much are *alike* and share a line, with the range of what they give together.
 */
#include "plan/plan.h"

typedef struct said {
    const kvf_plan *plan;
    const kvf_plan_words *how;
    kvf_text *text;
    const kvf_plan_cut **cuts; /* of all sources, source by source */
    uint32_t *first;           /* [source + 1]: where its cuts begin */
    kvf_prediction *costs;     /* [source] */
    uint32_t lines;
} said;

static const kvf_group_desc *group_of(const said *s, const kvf_plan_cut *cut) {
    return kvf_model_group(s->plan->local->model, cut->group);
}

static uint32_t cuts_of(const said *s, uint32_t source) {
    return s->first[source + 1] - s->first[source];
}

static const kvf_plan_cut *cut_of(const said *s, uint32_t source, uint32_t i) {
    return s->cuts[s->first[source] + i];
}

static uint32_t size_of(kvf_range range) {
    return range.end - range.begin;
}

static bool same_range(kvf_range a, kvf_range b) {
    return a.begin == b.begin && a.end == b.end;
}

/* Whether cuts of one source differ only in their part. */
static bool same_cells(const kvf_plan_cut *a, const kvf_plan_cut *b) {
    return a->group == b->group && same_range(a->layers, b->layers) && same_range(a->units, b->units) &&
           a->tokens.index == b->tokens.index;
}

static bool cuts_alike(const kvf_plan_cut *a, const kvf_plan_cut *b) {
    return a->group == b->group && a->part == b->part && size_of(a->layers) == size_of(b->layers) &&
           size_of(a->units) == size_of(b->units) && a->tokens.count == b->tokens.count &&
           a->tokens.width == b->tokens.width;
}

static bool sources_alike(const said *s, uint32_t a, uint32_t b) {
    if (s->costs[a].bytes != s->costs[b].bytes || s->costs[a].runs != s->costs[b].runs ||
        cuts_of(s, a) != cuts_of(s, b))
        return false;
    for (uint32_t i = 0; i < cuts_of(s, a); i++)
        if (!cuts_alike(cut_of(s, a, i), cut_of(s, b, i)))
            return false;
    return true;
}

/* ---- one line -------------------------------------------------------------------------------- */

/* Describes the i-th cuts of the sources [begin, end): the smallest ranges that contain them, and how much each source
 * gives. */
static void say_cut(said *s, uint32_t begin, uint32_t end, uint32_t i) {
    const kvf_plan_cut *cut = cut_of(s, begin, i);
    const kvf_group_desc *group = group_of(s, cut);
    const kvf_part_desc *part = &group->parts[cut->part];
    kvf_range layers = cut->layers, units = cut->units;
    bool same_tokens = true;
    for (uint32_t other = begin + 1; other < end; other++) {
        const kvf_plan_cut *like = cut_of(s, other, i);
        layers.begin = like->layers.begin < layers.begin ? like->layers.begin : layers.begin;
        layers.end = like->layers.end > layers.end ? like->layers.end : layers.end;
        units.begin = like->units.begin < units.begin ? like->units.begin : units.begin;
        units.end = like->units.end > units.end ? like->units.end : units.end;
        same_tokens = same_tokens && like->tokens.index == cut->tokens.index;
    }
    kvf_text_add(s->text, "%s", group->name);
    for (uint32_t j = i; j < cuts_of(s, begin); j++)
        if (same_cells(cut, cut_of(s, begin, j)))
            kvf_text_add(s->text, " %s", group->parts[cut_of(s, begin, j)->part].name);
    kvf_text_add(s->text, size_of(layers) == 1 ? ", layer " : ", layers ");
    kvf_say_layers(s->text, group, layers);
    if (!same_range(layers, cut->layers))
        kvf_text_add(s->text, " (%u each)", size_of(cut->layers));
    if (part->units > 1) {
        kvf_text_add(s->text, ", ");
        kvf_say_units(s->text, group, part, size_of(units));
        kvf_text_add(s->text, " ");
        kvf_say_range(s->text, units);
        if (!same_range(units, cut->units))
            kvf_text_add(s->text, " (%u each)", size_of(cut->units));
    }
    if (cut->tokens.count <= 1)
        return;
    if (same_tokens)
        kvf_text_add(s->text, ", tokens %u mod %u", cut->tokens.index, cut->tokens.count);
    else
        kvf_text_add(s->text, ", tokens of one share mod %u each", cut->tokens.count);
    const uint32_t together = cut->tokens.width * group->tokens_per_step;
    if (together > 1)
        kvf_text_add(s->text, " by %u", together);
}

/* Whether the i-th cut of the source is covered by the line of an earlier cut, of another part. */
static bool is_said(const said *s, uint32_t source, uint32_t i) {
    for (uint32_t j = 0; j < i; j++)
        if (same_cells(cut_of(s, source, i), cut_of(s, source, j)))
            return true;
    return false;
}

static uint32_t lines_of(const said *s, uint32_t source) {
    uint32_t shown = 0;
    for (uint32_t i = 0; i < cuts_of(s, source); i++)
        shown += !is_said(s, source, i);
    return shown > 1 ? 1 + shown : 1;
}

static void say_cost(kvf_text *text, const kvf_prediction *cost) {
    kvf_say_bytes(text, cost->bytes);
    if (cost->runs == 0 && cost->bytes > 0) {
        kvf_text_add(text, ", converted");
        return;
    }
    kvf_text_add(text, " in ");
    kvf_say_count(text, cost->runs);
    kvf_text_add(text, cost->runs == 1 ? " run" : " runs");
}

static void say_sources(said *s, uint32_t begin, uint32_t end) {
    bool one_line = lines_of(s, begin) == 1;
    kvf_text_add(s->text, "%sfrom ", s->how->indent);
    kvf_say_numbers(s->text, "rank ", "ranks ", &s->plan->source_ranks[begin], end - begin);
    kvf_text_add(s->text, end - begin > 1 ? ", each " : ": ");
    say_cost(s->text, &s->costs[begin]);
    kvf_text_add(s->text, ":%s", one_line ? " " : "\n");
    for (uint32_t i = 0; i < cuts_of(s, begin); i++) {
        if (is_said(s, begin, i))
            continue;
        if (!one_line)
            kvf_text_add(s->text, "%s  ", s->how->indent);
        say_cut(s, begin, end, i);
        kvf_text_add(s->text, "\n");
    }
}

/* ---- all of it ------------------------------------------------------------------------------- */

static void say_rest(said *s, uint32_t left) {
    kvf_text_add(s->text, "%sand from %u more rank%s\n", s->how->indent, left, left == 1 ? "" : "s");
}

static void say_all_sources(said *s) {
    uint32_t sources = s->plan->source_count, most = s->how->most_lines;
    for (uint32_t begin = 0, end; begin < sources; begin = end) {
        end = begin + 1;
        while (most && end < sources && sources_alike(s, begin, end))
            end++;
        s->lines += lines_of(s, begin);
        if (most && begin > 0 && s->lines >= most) {
            say_rest(s, sources - begin);
            return;
        }
        say_sources(s, begin, end);
    }
}

static void say_total(said *s) {
    const kvf_cost_model *cost = &s->how->cost;
    kvf_prediction all = {.struct_size = sizeof all};
    for (uint32_t source = 0; source < s->plan->source_count; source++) {
        all.bytes += s->costs[source].bytes;
        all.runs += s->costs[source].runs;
        all.ns += s->costs[source].ns;
    }
    kvf_text_add(s->text, "%sa request of %llu tokens, blocks scattered: ", s->how->indent,
                 (unsigned long long)s->how->tokens);
    say_cost(s->text, &all);
    kvf_text_add(s->text, " from %u rank%s", s->plan->source_count, s->plan->source_count == 1 ? "" : "s");
    if (all.runs) {
        kvf_text_add(s->text, ", ");
        kvf_say_bytes(s->text, all.bytes / all.runs);
        kvf_text_add(s->text, " a run on average");
    }
    kvf_text_add(s->text, "; ");
    kvf_say_time(s->text, all.ns);
    kvf_text_add(s->text, " with the costs assumed for %s: %.3g ns a run, %.3g GB/s, ", s->how->kind,
                 cost->ns_per_run, 1 / cost->ns_per_byte);
    kvf_say_time(s->text, cost->ns_per_source);
    kvf_text_add(s->text, " a rank\n");
}

/* Sorts the cuts by source, by counting. */
static void sort_cuts(said *s) {
    const kvf_plan *plan = s->plan;
    for (uint32_t i = 0; i < plan->cut_count; i++)
        s->first[plan->cuts[i].source + 1]++;
    for (uint32_t source = 0; source < plan->source_count; source++)
        s->first[source + 1] += s->first[source];
    for (uint32_t i = plan->cut_count; i-- > 0;) /* afterwards first[source] is where its cuts begin */
        s->cuts[--s->first[plan->cuts[i].source + 1]] = &plan->cuts[i];
    for (uint32_t source = 0; source < plan->source_count; source++)
        s->first[source] = s->first[source + 1];
    s->first[plan->source_count] = plan->cut_count;
}

kvf_status kvf_say_plan(kvf_text *text, const kvf_plan *plan, const kvf_plan_words *how) {
    said s = {.plan = plan, .how = how, .text = text};
    s.cuts = kvf_alloc(plan->cut_count, sizeof *s.cuts);
    s.first = kvf_alloc0((size_t)plan->source_count + 1, sizeof *s.first);
    s.costs = kvf_alloc0(plan->source_count, sizeof *s.costs);
    kvf_status status = s.cuts && s.first && s.costs ? KVF_OK : kvf_nomem("a plan in words");
    for (uint32_t source = 0; source < plan->source_count && !status; source++) {
        s.costs[source].struct_size = sizeof *s.costs;
        status = kvf_plan_predict(plan, source, how->tokens, &how->cost, &s.costs[source]);
    }
    if (!status) {
        sort_cuts(&s);
        say_all_sources(&s);
        say_total(&s);
    }
    kvf_free(s.costs);
    kvf_free(s.first);
    kvf_free(s.cuts);
    return status;
}
