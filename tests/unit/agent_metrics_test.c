/* An agent's counters as text for Prometheus: the numbers are those of the statistics, and the format is right. */
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "agent/agent.h"
#include "agent/histogram.h"
#include "agent_world.h"

#define TEXT_BYTES 32768

static void open_pair(world *w, const char *producer) {
    world_open_model(w, attention(2, 4, 8), ENGINE(.name = producer, .all = {.block_count = 64}),
                     ENGINE(.name = "D", .tp_size = 2, .all = {.block_count = 64}), NULL);
}

static const char *metrics_of(kvf_agent *agent) {
    static char text[TEXT_BYTES];
    size_t length;
    assert_ok(kvf_agent_metrics(agent, text, sizeof text, &length));
    assert_int_equal(length, strlen(text));
    return text;
}

/* The number after a name with its labels. */
static double value_of(const char *text, const char *name) {
    for (const char *at = text; (at = strstr(at, name)) != NULL; at++)
        if ((at == text || at[-1] == '\n') && at[strlen(name)] == ' ')
            return strtod(at + strlen(name), NULL);
    fail_msg("no \"%s\" in:\n%s", name, text);
    return 0;
}

static void the_numbers_are_those_of_the_statistics(void **state) {
    (void)state;
    world w;
    open_pair(&w, "P");
    world_pull_everything(&w, "a request", 100, 1);
    kvf_agent *d = w.d.agents[1];
    const kvf_agent_stats stats = world_stats(d);
    const char *text = metrics_of(d);
    assert_true(stats.bytes_read > 0);
    assert_true(value_of(text, "kvferry_read_bytes_total{engine=\"D\",rank=\"1\"}") ==
                (double)stats.bytes_read);
    assert_true(value_of(text, "kvferry_runs_total{engine=\"D\",rank=\"1\"}") == (double)stats.runs);
    assert_true(value_of(text, "kvferry_peers{engine=\"D\",rank=\"1\"}") == (double)stats.peers_now);
    assert_true(value_of(text, "kvferry_requests_done_total{engine=\"D\",rank=\"1\",kind=\"pull\"}") == 1);
    assert_true(value_of(text, "kvferry_requests_done_total{engine=\"D\",rank=\"1\",kind=\"push\"}") == 0);
    assert_true(value_of(text, "kvferry_request_seconds_count{engine=\"D\",rank=\"1\"}") == 1);
    assert_true(value_of(text, "kvferry_requests_done_total{engine=\"D\",rank=\"1\",kind=\"connect\"}") ==
                (double)stats.done[KVF_REQUEST_CONNECT]);
    assert_true(value_of(text, "kvferry_queue_seconds_count{engine=\"D\",rank=\"1\"}") ==
                (double)stats.queue.count);
    assert_true(value_of(text, "kvferry_transfer_seconds_count{engine=\"D\",rank=\"1\"}") ==
                (double)stats.transfer.count);
    assert_true(value_of(text, "kvferry_plans{engine=\"D\",rank=\"1\"}") == (double)stats.plans_now);
    assert_true(value_of(text, "kvferry_plans_built_total{engine=\"D\",rank=\"1\"}") ==
                (double)stats.plans_built);
    assert_true(stats.plans_now > 0 && stats.plans_built > 0);
    assert_null(strstr(text, "kvferry_failures_total{"));
    world_close(&w);
}

static void the_first_bucket_has_what_took_no_time_at_all(void **state) {
    (void)state;
    world w;
    open_pair(&w, "P");
    kvf_agent *d = w.d.agents[0];
    kvf_histogram_add(&d->stats.post, 0);
    kvf_histogram_add(&d->stats.post, 1023);
    kvf_histogram_add(&d->stats.post, 1024);
    assert_true(value_of(metrics_of(d),
                         "kvferry_post_seconds_bucket{engine=\"D\",rank=\"0\",le=\"1.024e-06\"}") == 2);
    world_close(&w);
}

/* Numbers have a point also in a program whose locale writes a comma. */
static void the_locale_does_not_matter(void **state) {
    (void)state;
    static const char *const with_comma[] = {"de_DE.UTF-8", "fr_FR.UTF-8", "ru_RU.UTF-8", "pt_BR.UTF-8"};
    locale_t comma = (locale_t)0;
    for (size_t i = 0; !comma && i < sizeof with_comma / sizeof *with_comma; i++)
        comma = newlocale(LC_NUMERIC_MASK, with_comma[i], (locale_t)0);
    if (!comma)
        skip();
    world w;
    open_pair(&w, "P");
    kvf_histogram_add(&w.d.agents[0]->stats.post, 1500);
    const locale_t before = uselocale(comma);
    static char text[TEXT_BYTES];
    (void)snprintf(text, sizeof text, "%s", metrics_of(w.d.agents[0]));
    (void)uselocale(before);
    freelocale(comma);
    assert_non_null(
        strstr(text, "kvferry_post_seconds_bucket{engine=\"D\",rank=\"0\",le=\"1.024e-06\"} 0\n"));
    assert_non_null(strstr(text, "kvferry_post_seconds_sum{engine=\"D\",rank=\"0\"} 1.5e-06\n"));
    world_close(&w);
}

/* A bucket counts all durations up to its limit, so counts never fall, and the last bucket has all. */
static void buckets_of_a_histogram_add_up(void **state) {
    (void)state;
    static const char bucket[] = "kvferry_request_seconds_bucket{engine=\"D\",rank=\"0\",le=\"";
    world w;
    open_pair(&w, "P");
    world_pull_everything(&w, "one", 100, 1);
    world_pull_everything(&w, "two", 60, 2);
    const char *text = metrics_of(w.d.agents[0]);
    double last = 0, last_limit = 0;
    uint32_t buckets = 0;
    for (const char *at = text; (at = strstr(at, bucket)) != NULL; buckets++) {
        char *end;
        double limit = strtod(at += strlen(bucket), &end); /* +Inf is a number, too */
        assert_memory_equal(end, "\"} ", 3);
        double count = strtod(end + 3, NULL);
        assert_true(limit > last_limit && count >= last);
        const bool is_last = memcmp(at, "+Inf", 4) == 0;
        assert_true(is_last || fabs(limit - (buckets == 0 ? 1.024e-6 : 4 * last_limit)) < 1e-6 * limit);
        last_limit = limit;
        last = count;
    }
    assert_true(buckets > 10);
    assert_true(last == 2 && value_of(text, "kvferry_request_seconds_count{engine=\"D\",rank=\"0\"}") == 2);
    world_close(&w);
}

/* A line is a comment, or a name, labels and a number; a comment before announces each name with its type. */
static void every_line_is_of_the_form(void **state) {
    (void)state;
    world w;
    open_pair(&w, "P\"\\");
    world_pull_everything(&w, "a request", 100, 1);
    static char text[TEXT_BYTES];
    (void)snprintf(text, sizeof text, "%s", metrics_of(w.p.agents[0]));
    assert_true(text[strlen(text) - 1] == '\n');
    char announced[64] = "";
    uint32_t lines = 0;
    char *rest;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest), lines++) {
        if (strncmp(line, "# TYPE ", 7) == 0) {
            assert_int_equal(sscanf(line, "# TYPE %63[a-z_] ", announced), 1);
        } else if (line[0] != '#') {
            assert_memory_equal(line, announced, strlen(announced));
            assert_non_null(strstr(line, "{engine=\"P\\\"\\\\\",rank=\"0\""));
            char *end;
            const char *number = strrchr(line, ' ');
            assert_non_null(number);
            (void)strtod(number + 1, &end);
            assert_true(end > number + 1 && *end == '\0');
        }
    }
    assert_true(lines > 100);
    world_close(&w);
}

/* Prometheus refuses a whole page for one byte that is not UTF-8, and an engine's name may have any. */
static void a_name_that_is_not_utf8_spoils_no_page(void **state) {
    (void)state;
    world w;
    open_pair(&w, "caf\xe9 \xc3\xa9");
    assert_non_null(strstr(metrics_of(w.p.agents[0]), "kvferry_peers{engine=\"caf? \xc3\xa9\",rank=\"0\"} "));
    world_close(&w);
}

static void failures_are_told_by_status(void **state) {
    (void)state;
    world w;
    open_pair(&w, "P");
    world_request held;
    uint64_t tickets[WORLD_MAX_RANKS];
    world_request_make(&w, &w.p, "never taken", 40, 10, 1, &held);
    world_hold(&w.p, &held, tickets);
    assert_true(
        value_of(metrics_of(w.p.agents[0]), "kvferry_requests{engine=\"P\",rank=\"0\",kind=\"hold\"}") == 1);
    assert_ok(kvf_agent_cancel(w.p.agents[0], tickets[0]));
    world_quiet(&w);
    const char *text = metrics_of(w.p.agents[0]);
    assert_true(
        value_of(text, "kvferry_failures_total{engine=\"P\",rank=\"0\",status=\"KVF_E_CANCELLED\"}") == 1);
    assert_true(value_of(text, "kvferry_requests_failed_total{engine=\"P\",rank=\"0\",kind=\"hold\"}") == 1);
    world_close(&w);
}

static void a_text_is_cut_to_fit(void **state) {
    (void)state;
    world w;
    open_pair(&w, "P");
    char whole[TEXT_BYTES], few[64];
    size_t length, again;
    assert_ok(kvf_agent_metrics(w.p.agents[0], NULL, 0, &length));
    assert_ok(kvf_agent_metrics(w.p.agents[0], whole, sizeof whole, &again));
    assert_int_equal(length, again);
    assert_ok(kvf_agent_metrics(w.p.agents[0], few, sizeof few, NULL));
    assert_int_equal(strlen(few), sizeof few - 1);
    assert_memory_equal(few, whole, sizeof few - 1);
    assert_fails(kvf_agent_metrics(NULL, few, sizeof few, NULL), KVF_E_INVALID, "agent");
    assert_fails(kvf_agent_metrics(w.p.agents[0], NULL, 1, NULL), KVF_E_INVALID, "text");
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_numbers_are_those_of_the_statistics),
        cmocka_unit_test(the_first_bucket_has_what_took_no_time_at_all),
        cmocka_unit_test(the_locale_does_not_matter),
        cmocka_unit_test(buckets_of_a_histogram_add_up),
        cmocka_unit_test(every_line_is_of_the_form),
        cmocka_unit_test(a_name_that_is_not_utf8_spoils_no_page),
        cmocka_unit_test(failures_are_told_by_status),
        cmocka_unit_test(a_text_is_cut_to_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
