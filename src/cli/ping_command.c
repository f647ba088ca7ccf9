/*
 * kvferry ping: whether an engine answers, which one, and the round-trip time. It visits once, and times greetings.
 */
#include <stdio.h>
#include <stdlib.h>

#include "json.h"
#include "text.h"
#include "visiting.h"

/* Statistics of the round trips. */
typedef struct distance {
    uint32_t count;
    double least, median, most; /* ns */
} distance;

static int compare_ns(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static distance distance_of(const kvf_visited *visited) {
    distance out = {0};
    const uint64_t *trips = kvf_visited_round_trips(visited, &out.count);
    uint64_t *sorted = out.count ? malloc(out.count * sizeof *sorted) : NULL;
    if (!sorted)
        return (distance){0};
    for (uint32_t i = 0; i < out.count; i++)
        sorted[i] = trips[i];
    qsort(sorted, out.count, sizeof *sorted, compare_ns);
    out.least = (double)sorted[0];
    out.most = (double)sorted[out.count - 1];
    uint32_t below = (out.count - 1) / 2, above = out.count / 2; /* equal if the count is odd */
    out.median = ((double)sorted[below] + (double)sorted[above]) / 2;
    free(sorted);
    return out;
}

static int print_line(const meeting_place *place, const kvf_visited *visited, distance far) {
    const kvf_engine *engine = kvf_visited_engine(visited);
    uint32_t ranks = kvf_engine_rank_count(engine);
    printf("%s: %s, %u rank%s, protocol %u, %s", place->endpoint, kvf_engine_name(engine), ranks,
           ranks == 1 ? "" : "s", kvf_visited_protocol(visited), place->key ? "encrypted" : "not encrypted");
    if (far.count)
        printf(", round trip %s (median of %u; %s to %s)\n", text_time(far.median).text, far.count,
               text_time(far.least).text, text_time(far.most).text);
    else
        printf(", round trip not measured: answers were lost\n");
    return EXIT_DONE;
}

static int write_json(const meeting_place *place, const kvf_visited *visited, distance far,
                      const char *file) {
    const kvf_engine *engine = kvf_visited_engine(visited);
    struct json_object *out = json_object_new_object();
    json_text(out, "endpoint", place->endpoint);
    json_text(out, "engine", kvf_engine_name(engine));
    json_count(out, "ranks", kvf_engine_rank_count(engine));
    json_count(out, "protocol", kvf_visited_protocol(visited));
    json_object_object_add(out, "encrypted", json_object_new_boolean(place->key != NULL));
    json_count(out, "round_trips", far.count);
    json_real(out, "round_trip_ns", far.median);
    json_real(out, "least_ns", far.least);
    json_real(out, "most_ns", far.most);
    return json_write(out, file);
}

int run_ping(int argc, char **argv) {
    options asked;
    meeting_place place = {0};
    kvf_visited *visited = NULL;
    int result = options_parse(argc, argv, COMMAND_PING, &asked);
    if (!result && asked.operand_count == 0)
        result = usage_error("ping needs the endpoint of an agent, such as tcp://127.0.0.1:41217");
    if (!result)
        result = place_read(asked.operands[0], &place);
    if (!result)
        result = place_visit(&asked, "ping", &place, asked.timeout_s, asked.count, &visited);
    if (!result && options_want_text(&asked))
        result = print_line(&place, visited, distance_of(visited));
    if (!result && asked.json)
        result = write_json(&place, visited, distance_of(visited), asked.json);
    kvf_visited_free(visited);
    place_free(&place);
    return result;
}
