#include "report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry/transport.h>

#include "engines.h"
#include "folding.h"
#include "json.h"
#include "option_values.h"
#include "text.h"

/* Lists the kinds of this build, and those sorts of them that have costs of their own. */
static void list_fabrics(report_fabric *fabrics) {
    uint32_t count = 0;
    const char *kind, *sort;
    for (uint32_t i = 0; (kind = kvf_transport_kind_name(i)) && count < REPORT_FABRICS; i++) {
        fabrics[count++].kind = kind;
        for (uint32_t s = 0; (sort = sort_word(NULL, s)) && count < REPORT_FABRICS; s++)
            if (strncmp(sort, kind, strlen(kind)) == 0 && sort[strlen(kind)] == '/')
                fabrics[count++].kind = sort;
    }
}

void report_start(report *to, const options *asked, const kvf_engine *prefill, const kvf_engine *decode) {
    *to = (report){.asked = asked, .prefill = prefill, .decode = decode};
    if (asked->calibrate)
        (void)kvf_cost_calibrate();
    if (asked->fabrics)
        list_fabrics(to->fabrics);
    to->cost_kind = kvf_cost_assumed(asked->transport, &to->cost);
    table_start(&to->list, ">decode|>prefill|group|parts|layers|units|tokens");
    table_start(&to->sources, ">decode|>prefill|>bytes|>runs|>a run|>direct|>packed|way");
    to->ranks = asked->json ? json_object_new_array() : NULL;
}

void report_free(report *to) {
    json_object_put(to->ranks);
    table_free(&to->list);
    table_free(&to->sources);
    for (uint32_t rank = 0; to->planned && rank < kvf_engine_rank_count(to->decode); rank++) {
        kvf_plan_free(to->planned[rank].plan);
        free(to->planned[rank].sources);
    }
    free(to->planned);
    *to = (report){0};
}

/* The sums of one rank's request over all its sources, read one after another. */
typedef struct report_whole {
    uint64_t bytes, runs;
    double ns;
    double long_ns; /* the time if runs were so long that only their bytes count */
} report_whole;

static bool same_cells(const kvf_plan_cut *a, const kvf_plan_cut *b) {
    return a->source == b->source && a->group == b->group && a->layers.begin == b->layers.begin &&
           a->layers.end == b->layers.end && a->units.begin == b->units.begin &&
           a->units.end == b->units.end && a->tokens.index == b->tokens.index;
}

/* Whether the row of an earlier cut, which takes the same cells of another part, also shows this one. */
static bool is_shown(const kvf_plan *plan, uint32_t i) {
    for (uint32_t j = 0; j < i; j++)
        if (same_cells(kvf_plan_get_cut(plan, i), kvf_plan_get_cut(plan, j)))
            return true;
    return false;
}

/* "k v": all parts whose cells are cut alike. */
static void name_parts(const kvf_plan *plan, uint32_t i, char *out, size_t bytes) {
    const kvf_plan_cut *cut = kvf_plan_get_cut(plan, i);
    const kvf_group_desc *group = kvf_model_group(kvf_shard_model(kvf_plan_local(plan)), cut->group);
    size_t length = 0;
    for (uint32_t j = i; j < kvf_plan_cut_count(plan) && length < bytes; j++) {
        const kvf_plan_cut *other = kvf_plan_get_cut(plan, j);
        if (same_cells(cut, other))
            length += (size_t)snprintf(out + length, bytes - length, "%s%s", j == i ? "" : " ",
                                       group->parts[other->part].name);
    }
}

static text name_units(const kvf_group_desc *group, const kvf_plan_cut *cut) {
    const kvf_part_desc *part = &group->parts[cut->part];
    if (part->units == 1)
        return text_format("all");
    return text_format("%s%s %s", unit_word(group, part), cut->units.end - cut->units.begin > 1 ? "s" : "",
                       text_range(cut->units).text);
}

/* How many neighbouring tokens a source keeps together. */
static uint32_t tokens_together(const kvf_group_desc *group, const kvf_plan_cut *cut) {
    return cut->tokens.width * group->tokens_per_step;
}

static text name_tokens(const kvf_group_desc *group, const kvf_plan_cut *cut) {
    const uint32_t together = tokens_together(group, cut);
    if (cut->tokens.count <= 1)
        return text_format("all");
    if (together <= 1)
        return text_format("%u mod %u", cut->tokens.index, cut->tokens.count);
    return text_format("%u mod %u by %u", cut->tokens.index, cut->tokens.count, together);
}

static const char *name_way(kvf_way way) {
    return way == KVF_WAY_PACKED ? "packed" : "direct";
}

static void add_cost_row(report *to, const kvf_plan *plan, uint32_t rank, uint32_t source,
                         const kvf_way_prediction *cost) {
    table *list = &to->sources;
    table_cell(list, source == 0 ? text_format("%u", rank).text : "");
    table_cell(list, text_format("%u", kvf_plan_source_rank(plan, source)).text);
    table_cell(list, text_bytes(cost->bytes).text);
    table_cell(list, text_count(cost->runs).text);
    table_cell(list, cost->runs ? text_bytes(cost->bytes / cost->runs).text : "");
    table_cell(list, cost->direct_ns > 0 ? text_time(cost->direct_ns).text : "");
    table_cell(list, cost->packed_ns > 0 ? text_time(cost->packed_ns).text : "");
    table_cell(list, name_way(cost->way));
}

static void add_cut_rows(report *to, const kvf_plan *plan, uint32_t rank, uint32_t source) {
    bool first = true;
    for (uint32_t i = 0; i < kvf_plan_cut_count(plan); i++) {
        const kvf_plan_cut *cut = kvf_plan_get_cut(plan, i);
        if (cut->source != source || is_shown(plan, i))
            continue;
        const kvf_group_desc *group = kvf_model_group(kvf_engine_model(to->prefill), cut->group);
        char parts[128];
        name_parts(plan, i, parts, sizeof parts);
        table_cell(&to->list, first && source == 0 ? text_format("%u", rank).text : "");
        table_cell(&to->list, first ? text_format("%u", kvf_plan_source_rank(plan, source)).text : "");
        table_cell(&to->list, group->name);
        table_cell(&to->list, parts);
        table_cell(&to->list, text_layers(group, cut->layers).text);
        table_cell(&to->list, name_units(group, cut).text);
        table_cell(&to->list, name_tokens(group, cut).text);
        first = false;
    }
}

double report_chosen(const kvf_way_prediction *cost) {
    return cost->way == KVF_WAY_PACKED ? cost->packed_ns : cost->direct_ns;
}

static struct json_object *json_source(const report *to, const kvf_plan *plan, uint32_t source,
                                       const kvf_way_prediction *cost) {
    struct json_object *out = json_object_new_object(), *cuts = json_object_new_array();
    json_count(out, "prefill_rank", kvf_plan_source_rank(plan, source));
    json_count(out, "bytes", cost->bytes);
    json_count(out, "runs", cost->runs);
    json_count(out, "pieces", cost->pieces);
    json_real(out, "direct_ns", cost->direct_ns);
    json_real(out, "packed_ns", cost->packed_ns);
    json_text(out, "way", name_way(cost->way));
    json_real(out, "predicted_ns", report_chosen(cost));
    for (uint32_t i = 0; i < kvf_plan_cut_count(plan); i++) {
        const kvf_plan_cut *cut = kvf_plan_get_cut(plan, i);
        if (cut->source != source)
            continue;
        const kvf_group_desc *group = kvf_model_group(kvf_engine_model(to->prefill), cut->group);
        struct json_object *one = json_object_new_object(), *layers = json_object_new_array();
        json_text(one, "group", group->name);
        json_text(one, "part", group->parts[cut->part].name);
        for (uint32_t layer = cut->layers.begin; layer < cut->layers.end; layer++)
            json_object_array_add(layers, json_object_new_int64(group->layers[layer]));
        json_object_object_add(one, "layers", layers);
        json_range(one, "units", cut->units);
        if (cut->tokens.count > 1) {
            struct json_object *share = json_object_new_object();
            json_count(share, "index", cut->tokens.index);
            json_count(share, "count", cut->tokens.count);
            json_count(share, "width", tokens_together(group, cut));
            json_object_object_add(one, "tokens", share);
        }
        json_object_array_add(cuts, one);
    }
    json_object_object_add(out, "cuts", cuts);
    return out;
}

static void add_totals(report_totals *sum, const kvf_plan *plan, const report_whole *whole) {
    uint32_t rules = kvf_plan_rule_count(plan);
    size_t memory = kvf_plan_memory_bytes(plan);
    if (sum->plans == 0 || rules < sum->fewest_rules)
        sum->fewest_rules = rules;
    if (sum->plans == 0 || memory < sum->least_memory)
        sum->least_memory = memory;
    if (rules > sum->most_rules)
        sum->most_rules = rules;
    if (memory > sum->most_memory)
        sum->most_memory = memory;
    if (whole->ns > sum->slowest_ns) {
        sum->slowest_ns = whole->ns;
        sum->long_ns = whole->long_ns;
    }
    sum->bytes += whole->bytes;
    sum->runs += whole->runs;
    sum->plans++;
}

/* Adds the prediction for one rank over one kind of transport. */
static kvf_status add_fabric(const report *to, const kvf_plan *plan, report_fabric *fabric) {
    double direct = 0, packed = 0, chosen = 0;
    for (uint32_t source = 0; source < kvf_plan_source_count(plan); source++) {
        kvf_way_prediction cost = {.struct_size = sizeof cost};
        kvf_status status = kvf_way_predict_in(plan, source, to->asked->tokens, fabric->kind,
                                               to->asked->decode_memory, to->asked->prefill_memory, &cost);
        if (status)
            return status;
        direct += cost.direct_ns;
        packed += cost.packed_ns;
        chosen += report_chosen(&cost);
        fabric->direct += cost.way == KVF_WAY_DIRECT;
        fabric->packed += cost.way == KVF_WAY_PACKED;
    }
    fabric->direct_ns = fmax(fabric->direct_ns, direct);
    fabric->packed_ns = fmax(fabric->packed_ns, packed);
    fabric->chosen_ns = fmax(fabric->chosen_ns, chosen);
    return KVF_OK;
}

static int report_fabrics(report *to, const kvf_plan *plan, uint32_t rank) {
    for (report_fabric *at = to->fabrics; at < to->fabrics + REPORT_FABRICS && at->kind; at++) {
        kvf_status status = add_fabric(to, plan, at);
        if (status)
            return library_failure(status, "decode rank %u", rank);
    }
    return EXIT_DONE;
}

static int predict(const report *to, report_rank *planned, uint32_t rank) {
    const uint32_t count = kvf_plan_source_count(planned->plan);
    planned->sources = calloc(count + 1, sizeof *planned->sources);
    if (!planned->sources)
        return failure("not enough memory");
    for (uint32_t source = 0; source < count; source++) {
        planned->sources[source].struct_size = sizeof *planned->sources;
        kvf_status status = kvf_way_predict_in(planned->plan, source, to->asked->tokens, to->cost_kind,
                                               to->asked->decode_memory, to->asked->prefill_memory,
                                               &planned->sources[source]);
        if (status)
            return library_failure(status, "decode rank %u", rank);
    }
    return EXIT_DONE;
}

static void report_plan(report *to, const report_rank *planned, uint32_t rank) {
    const kvf_plan *plan = planned->plan;
    report_whole whole = {0};
    struct json_object *sources = to->ranks ? json_object_new_array() : NULL;
    for (uint32_t source = 0; source < kvf_plan_source_count(plan); source++) {
        const kvf_way_prediction *cost = &planned->sources[source];
        whole.bytes += cost->bytes;
        whole.runs += cost->runs;
        whole.ns += report_chosen(cost);
        whole.long_ns += to->cost.ns_per_source + (double)cost->bytes * to->cost.ns_per_byte;
        to->sum.direct += cost->way == KVF_WAY_DIRECT;
        to->sum.packed += cost->way == KVF_WAY_PACKED;
        add_cut_rows(to, plan, rank, source);
        add_cost_row(to, plan, rank, source, cost);
        if (sources)
            json_object_array_add(sources, json_source(to, plan, source, cost));
    }
    add_totals(&to->sum, plan, &whole);
    if (!sources)
        return;
    struct json_object *one = json_object_new_object();
    json_count(one, "decode_rank", rank);
    json_count(one, "rules", kvf_plan_rule_count(plan));
    json_count(one, "memory_bytes", kvf_plan_memory_bytes(plan));
    json_count(one, "bytes", whole.bytes);
    json_count(one, "runs", whole.runs);
    json_real(one, "predicted_ns", whole.ns);
    json_object_object_add(one, "verified", json_object_new_boolean(true));
    json_object_object_add(one, "sources", sources);
    json_object_array_add(to->ranks, one);
}

int report_make(report *to) {
    const uint32_t count = kvf_engine_rank_count(to->decode);
    to->planned = calloc(count + 1, sizeof *to->planned);
    if (!to->planned)
        return failure("not enough memory");
    int result = EXIT_DONE;
    for (uint32_t rank = 0; rank < count && !result; rank++) {
        report_rank *planned = &to->planned[rank];
        result = engines_plan(to->decode, rank, to->prefill, to->asked, &planned->plan);
        if (!result)
            result = engines_verify(planned->plan, rank);
        if (!result)
            result = predict(to, planned, rank);
        if (!result)
            result = report_fabrics(to, planned->plan, rank);
        if (!result)
            report_plan(to, planned, rank);
    }
    return result;
}

static const char *name_ways(const report_fabric *fabric) {
    return fabric->direct && fabric->packed ? "direct and packed" : fabric->packed ? "packed" : "direct";
}

void report_list_fabrics(const report *to, table *out) {
    table_start(out, "transport|>direct|>packed|>chosen|way|>a run|>GB/s|>a source");
    for (const report_fabric *at = to->fabrics; at < to->fabrics + REPORT_FABRICS && at->kind; at++) {
        kvf_cost_model cost;
        table_cell(out, kvf_cost_assumed(at->kind, &cost));
        table_cell(out, at->direct_ns > 0 ? text_time(at->direct_ns).text : "");
        table_cell(out, at->packed_ns > 0 ? text_time(at->packed_ns).text : "");
        table_cell(out, text_time(at->chosen_ns).text);
        table_cell(out, name_ways(at));
        table_cell(out, text_time(cost.ns_per_run).text);
        table_cell(out, text_format("%.1f", 1 / cost.ns_per_byte).text);
        table_cell(out, text_time(cost.ns_per_source).text);
    }
}

static bool print_fabrics(const report *to) {
    table list;
    if (!to->fabrics[0].kind)
        return true;
    report_list_fabrics(to, &list);
    printf("\nThe slowest rank, by transport:\n\n");
    return table_print(&list, 0);
}

static const char *memory_word(kvf_memory_kind kind) {
    return kind == KVF_MEMORY_CUDA ? "cuda" : "host";
}

static void print_places(const options *asked) {
    if (asked->prefill_memory != KVF_MEMORY_HOST || asked->decode_memory != KVF_MEMORY_HOST)
        print_paragraph(
            "Memory: prefill %s, decode %s. Measured on one NVIDIA H100 (November 2026): how fast a "
            "device packs, within its memory and over PCIe, and \"cuda\" between two processes on it. "
            "Assumed: everything else, such as two devices, and network cards that reach a device\n",
            memory_word(asked->prefill_memory), memory_word(asked->decode_memory));
}

const char *report_costs_are(const options *asked, const char *kind) {
    if (strcmp(kind, "cuda") == 0)
        return "measured on one H100";
    return asked->calibrate ? "calibrated" : "assumed";
}

void report_say_costs(const report *of, char *out, size_t bytes) {
    (void)snprintf(
        out, bytes,
        "A request of %llu tokens, blocks scattered; time as %s for %s: %.3g ns a run, %.3g GB/s, %s a "
        "source",
        (unsigned long long)of->asked->tokens, report_costs_are(of->asked, of->cost_kind), of->cost_kind,
        of->cost.ns_per_run, 1 / of->cost.ns_per_byte, text_time(of->cost.ns_per_source).text);
}

int report_print(report *to) {
    const report_totals *sum = &to->sum;
    char costs[256];
    report_say_costs(to, costs, sizeof costs);
    print_paragraph("\n%s\n", costs);
    print_places(to->asked);
    bool printed = table_print(&to->list, 0);
    printf("\n");
    if (!table_print(&to->sources, 0) || !printed || !print_fabrics(to))
        return failure("not enough memory");
    print_paragraph("\nIn all %s in %s runs; the slowest rank takes %s by the chosen ways.",
                    text_bytes(sum->bytes).text, text_count(sum->runs).text, text_time(sum->slowest_ns).text);
    if (sum->most_rules == 0 && sum->bytes > 0) {
        print_paragraph("%u plan%s: elements are converted on the way, and so go packed.", sum->plans,
                        sum->plans == 1 ? "" : "s");
        return EXIT_DONE;
    }
    print_paragraph(
        "%u plan%s, each verified: every cell that is wanted is written once, from the same cell.",
        sum->plans, sum->plans == 1 ? "" : "s");
    if (sum->fewest_rules == sum->most_rules && sum->least_memory == sum->most_memory)
        print_paragraph("A plan has %u copy rules and takes %s, whatever the number of blocks.",
                        sum->most_rules, text_bytes(sum->most_memory).text);
    else
        print_paragraph("A plan has %u to %u copy rules and takes %s to %s, whatever the number of blocks.",
                        sum->fewest_rules, sum->most_rules, text_bytes(sum->least_memory).text,
                        text_bytes(sum->most_memory).text);
    return EXIT_DONE;
}

static bool runs_are_short(const report *to) {
    return to->sum.runs > 0 && to->sum.slowest_ns > 2 * to->sum.long_ns;
}

void report_warn(const report *to) {
    const report_totals *sum = &to->sum;
    if (!runs_are_short(to))
        return;
    notice("warning: runs are short for %s, %s on average: %s for the slowest rank, where long runs would "
           "take %s; to make them longer, use the same order on both sides (order=hnd if tp differs) or "
           "longer blocks",
           to->cost_kind, text_bytes(sum->bytes / sum->runs).text, text_time(sum->slowest_ns).text,
           text_time(sum->long_ns).text);
}

static struct json_object *json_fabrics(const report *to) {
    struct json_object *out = json_object_new_array();
    for (const report_fabric *at = to->fabrics; at < to->fabrics + REPORT_FABRICS && at->kind; at++) {
        struct json_object *one = json_object_new_object();
        json_text(one, "transport", at->kind);
        json_real(one, "direct_ns", at->direct_ns);
        json_real(one, "packed_ns", at->packed_ns);
        json_real(one, "predicted_ns", at->chosen_ns);
        json_count(one, "direct_sources", at->direct);
        json_count(one, "packed_sources", at->packed);
        json_object_array_add(out, one);
    }
    return out;
}

void report_add_json(report *to, struct json_object *out) {
    struct json_object *total = json_object_new_object(), *cost = json_object_new_object();
    json_count(out, "tokens", to->asked->tokens);
    json_text(cost, "transport", to->cost_kind);
    json_real(cost, "ns_per_run", to->cost.ns_per_run);
    json_real(cost, "ns_per_byte", to->cost.ns_per_byte);
    json_real(cost, "ns_per_source", to->cost.ns_per_source);
    json_text(cost, "prefill_memory", memory_word(to->asked->prefill_memory));
    json_text(cost, "decode_memory", memory_word(to->asked->decode_memory));
    json_object_object_add(out, "cost", cost);
    json_object_object_add(cost, "calibrated", json_object_new_boolean(to->asked->calibrate));
    json_object_object_add(out, "ranks", to->ranks);
    to->ranks = NULL;
    if (to->fabrics[0].kind)
        json_object_object_add(out, "fabrics", json_fabrics(to));
    json_count(total, "bytes", to->sum.bytes);
    json_count(total, "runs", to->sum.runs);
    json_real(total, "slowest_rank_ns", to->sum.slowest_ns);
    json_real(total, "slowest_rank_long_runs_ns", to->sum.long_ns);
    json_object_object_add(total, "runs_are_short", json_object_new_boolean(runs_are_short(to)));
    json_object_object_add(out, "total", total);
}
