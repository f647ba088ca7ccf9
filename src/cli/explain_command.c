/*
 * kvferry explain: describes running engines, and what one would read from the other.
 *
 * The command visits agents as an engine begins to when it meets them (visit.h). An introduction tells all that
 * planning needs, so that the command plans by itself, and finds the same plans as the engines.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engines.h"
#include "json.h"
#include "regions.h"
#include "report.h"
#include "table.h"
#include "text.h"
#include "visiting.h"

/* One side of a pair: an engine that was visited, or one that was laid out by a shape. */
typedef struct side {
    kvf_visited *visited;
    kvf_engine *made;
    const kvf_engine *engine;
} side;

/* ---- the two sides --------------------------------------------------------------------------- */

static int visit(const options *asked, const char *where, side *out) {
    meeting_place place;
    int result = place_read(where, &place);
    if (!result)
        result = place_visit(asked, "explain", &place, asked->timeout_s, 0, &out->visited);
    place_free(&place);
    if (!result)
        out->engine = kvf_visited_engine(out->visited);
    return result;
}

static int make(const options *asked, const char *key, const char *wanted, const kvf_engine *visited,
                side *out) {
    kvf_model *model = NULL;
    engine_shape shape = {0};
    int result = visited_model(asked, key, visited, &model);
    if (!result)
        result = shape_parse(key, wanted, model, &shape);
    if (!result) {
        shape_fill_blocks(&shape, model);
        result = shape_build(&shape, model, &out->made);
    }
    out->engine = out->made;
    shape_free(&shape);
    kvf_model_free(model);
    return result;
}

/* ---- who they are ---------------------------------------------------------------------------- */

/* "full 0-1, ssm 0-15": the units that a rank holds of each group's first part that is split. */
static void name_units(const kvf_shard *shard, char *out, size_t bytes) {
    size_t length = 0;
    out[0] = '\0';
    const kvf_model *model = kvf_shard_model(shard);
    for (uint32_t g = 0; g < kvf_model_group_count(model) && length < bytes; g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        kvf_range layers = kvf_shard_group_layers(shard, g);
        if (layers.begin == layers.end)
            continue;
        const kvf_group_shard_desc *held = &kvf_shard_get(shard)->groups[g];
        length += (size_t)snprintf(out + length, bytes - length, "%s%s %s", length ? ", " : "", group->name,
                                   text_range(held->parts[0].units).text);
        if (held->tokens.count > 1 && length < bytes)
            length += (size_t)snprintf(out + length, bytes - length, " (tokens %u mod %u)",
                                       held->tokens.index, held->tokens.count);
    }
}

static uint64_t region_bytes(const kvf_shard *shard) {
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < desc->region_count; i++)
        bytes += desc->region_bytes[i];
    return bytes;
}

static char *describe(const kvf_engine *engine) {
    size_t length;
    if (kvf_engine_describe(engine, NULL, 0, &length))
        return NULL;
    char *words = malloc(length + 1);
    if (words && kvf_engine_describe(engine, words, length + 1, NULL)) {
        free(words);
        words = NULL;
    }
    return words;
}

static int print_side(const side *one) {
    char *words = describe(one->engine);
    if (!words)
        return failure("not enough memory");
    printf("%s", words);
    free(words);
    if (!one->visited)
        return EXIT_DONE;
    table list;
    table_start(&list, ">rank|endpoint|encrypted|layers|units|>bytes");
    for (uint32_t rank = 0; rank < kvf_engine_rank_count(one->engine); rank++) {
        const kvf_shard *shard = kvf_engine_shard(one->engine, rank);
        char units[256];
        name_units(shard, units, sizeof units);
        table_cell(&list, text_format("%u", rank).text);
        table_cell(&list, kvf_visited_endpoint(one->visited, rank));
        table_cell(&list, kvf_visited_public_key(one->visited, rank)[0] ? "yes" : "no");
        table_cell(&list, text_range(kvf_shard_get(shard)->layers).text);
        table_cell(&list, units);
        table_cell(&list, text_bytes(region_bytes(shard)).text);
    }
    return table_print(&list, 2) ? EXIT_DONE : failure("not enough memory");
}

static struct json_object *json_rank(const side *one, uint32_t rank) {
    const kvf_shard *shard = kvf_engine_shard(one->engine, rank);
    const kvf_model *model = kvf_shard_model(shard);
    struct json_object *out = json_object_new_object(), *groups = json_object_new_array();
    json_count(out, "rank", rank);
    if (one->visited) {
        json_text(out, "endpoint", kvf_visited_endpoint(one->visited, rank));
        json_text(out, "public_key", kvf_visited_public_key(one->visited, rank));
    }
    json_range(out, "layers", kvf_shard_get(shard)->layers);
    json_count(out, "bytes", region_bytes(shard));
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        const kvf_group_shard_desc *held = &kvf_shard_get(shard)->groups[g];
        struct json_object *item = json_object_new_object(), *units = json_object_new_object();
        json_text(item, "group", group->name);
        json_count(item, "tokens_per_block", held->tokens_per_block);
        json_count(item, "kernel_blocks_per_block", held->kernel_blocks_per_block);
        json_count(item, "blocks", held->block_count);
        for (uint32_t p = 0; p < group->part_count; p++)
            json_range(units, group->parts[p].name, held->parts[p].units);
        json_object_object_add(item, "units", units);
        json_object_array_add(groups, item);
    }
    json_object_object_add(out, "groups", groups);
    json_object_object_add(out, "regions", regions_json(shard));
    return out;
}

static void add_side(struct json_object *out, const char *key, const side *one) {
    struct json_object *engine = json_object_new_object(), *ranks = json_object_new_array();
    json_text(engine, "engine", kvf_engine_name(one->engine));
    char *words = describe(one->engine);
    json_text(engine, "description", words ? words : "");
    free(words);
    if (one->visited)
        json_text(engine, "facts", kvf_visited_facts(one->visited));
    for (uint32_t rank = 0; rank < kvf_engine_rank_count(one->engine); rank++)
        json_object_array_add(ranks, json_rank(one, rank));
    json_object_object_add(engine, "members", ranks);
    json_object_object_add(out, key, engine);
}

/* ---- the command ----------------------------------------------------------------------------- */

static int explain_one(const options *asked, const side *only) {
    int result = options_want_text(asked) ? print_side(only) : EXIT_DONE;
    if (result || !asked->json)
        return result;
    struct json_object *out = json_object_new_object();
    add_side(out, "engine", only);
    return json_write(out, asked->json);
}

static int explain_pair(const options *asked, const side *prefill, const side *decode) {
    report plans;
    report_start(&plans, asked, prefill->engine, decode->engine);
    int result = report_make(&plans);
    if (!result && options_want_text(asked)) {
        result = print_side(prefill);
        if (!result)
            result = print_side(decode);
        if (!result)
            result = report_print(&plans);
    }
    if (!result && asked->json) {
        struct json_object *out = json_object_new_object();
        add_side(out, "prefill", prefill);
        add_side(out, "decode", decode);
        report_add_json(&plans, out);
        result = json_write(out, asked->json);
    }
    if (!result)
        report_warn(&plans);
    report_free(&plans);
    return result;
}

static int check_operands(const options *asked) {
    if (asked->operand_count == 0)
        return usage_error("explain needs the endpoint of an agent, such as tcp://127.0.0.1:41217");
    if ((asked->prefill && asked->decode) || (asked->operand_count == 2 && (asked->prefill || asked->decode)))
        return usage_error(
            "a pair has two sides; give two endpoints, or one and either --prefill or --decode");
    return EXIT_DONE;
}

int run_explain(int argc, char **argv) {
    options asked;
    side prefill = {0}, decode = {0};
    int result = options_parse(argc, argv, COMMAND_EXPLAIN, &asked);
    if (!result)
        result = check_operands(&asked);
    if (result)
        return result;
    if (asked.tokens == 0)
        asked.tokens = REPORT_TOKENS;
    side *first = asked.prefill ? &decode : &prefill;
    result = visit(&asked, asked.operands[0], first);
    if (!result && asked.operand_count == 2)
        result = visit(&asked, asked.operands[1], &decode);
    if (!result && asked.prefill)
        result = make(&asked, "prefill", asked.prefill, decode.engine, &prefill);
    if (!result && asked.decode)
        result = make(&asked, "decode", asked.decode, prefill.engine, &decode);
    if (!result)
        result = prefill.engine && decode.engine ? explain_pair(&asked, &prefill, &decode)
                                                 : explain_one(&asked, first);
    kvf_visited_free(decode.visited);
    kvf_visited_free(prefill.visited);
    kvf_engine_free(decode.made);
    kvf_engine_free(prefill.made);
    return result;
}
