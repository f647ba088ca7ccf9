/*
 * kvferry serve: a prefill engine whose ranks hold a pattern for any consumer, until the user stops it. An operator may
 * drain and resume it, if the user allows commands.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "crew.h"
#include "folding.h"
#include "json.h"
#include "numbers.h"
#include "pattern_facts.h"
#include "stream.h"
#include "text.h"
#include "visiting.h"

/* The directory listens at the given port; the plain stream and then the ranks listen at the ports after it. */
enum { STREAM_OFFSET = 1, RANKS_OFFSET = 2 };

typedef struct service {
    options asked;
    demo_job job;
    key_pair keys;
    char ranks_listen[300];
    char facts[160];
    kvf_key_grant operators[OPTIONS_MAX_KEYS];
    uint16_t port; /* 0: any */
    stream_server stream;
    crew all;
    kvf_agent *directory;
    int stop_fd; /* readable after a signal to stop */
} service;

/* ---- where to listen ------------------------------------------------------------------------- */

/* Peers receive the host as it is written, so that it must be one that they can connect to. */
static int check_listen(service *self) {
    const char *listen = self->asked.listen, *colon = strrchr(listen, ':');
    static const char *const everywhere[] = {"tcp://*", "tcp://0.0.0.0", "tcp://[::]"};
    uint64_t port = 0;
    bool any = colon && (strcmp(colon, ":*") == 0 || strcmp(colon, ":0") == 0);
    if (strncmp(listen, "tcp://", 6) != 0 || !colon ||
        (!any && (!parse_number(colon + 1, &port) || port > UINT16_MAX)))
        return usage_error("--listen is \"%s\"; allowed: tcp://ADDRESS:PORT, with * for any port", listen);
    for (size_t i = 0; i < sizeof everywhere / sizeof *everywhere; i++)
        if (strlen(everywhere[i]) == (size_t)(colon - listen) &&
            strncmp(listen, everywhere[i], (size_t)(colon - listen)) == 0)
            return usage_error("--listen is \"%s\", which is all interfaces; give the address that the other "
                               "machine reaches, because peers are told it",
                               listen);
    if (port + RANKS_OFFSET - 1 + self->job.prefill_ranks > UINT16_MAX)
        return usage_error(
            "--listen has port %llu, and the %u ports after it are needed too; give a lower port",
            (unsigned long long)port, RANKS_OFFSET - 1 + self->job.prefill_ranks);
    self->port = (uint16_t)port;
    (void)snprintf(self->ranks_listen, sizeof self->ranks_listen, "%.*s:*", (int)(colon - listen), listen);
    self->job.first_port = port ? (uint16_t)(port + RANKS_OFFSET) : 0;
    return EXIT_DONE;
}

static void describe_agents(service *self) {
    const options *asked = &self->asked;
    bool keyed = self->keys.public_key[0] != '\0';
    for (uint32_t i = 0; i < asked->operators.count; i++)
        self->operators[i] = (kvf_key_grant){
            .struct_size = sizeof(kvf_key_grant), .public_key = asked->operators.all[i], .commands = true};
    self->job.agents = (kvf_agent_options){.struct_size = sizeof self->job.agents,
                                           .listen = self->ranks_listen,
                                           .insecure = asked->insecure,
                                           .public_key = keyed ? self->keys.public_key : NULL,
                                           .secret_key = keyed ? self->keys.secret_key : NULL,
                                           .allowed_keys = asked->allowed.all,
                                           .allowed_key_count = asked->allowed.count,
                                           .grants = self->operators,
                                           .grant_count = asked->operators.count,
                                           .local_commands = asked->local_commands};
}

static int open_directory(service *self) {
    kvf_agent_options how = self->job.agents;
    how.listen = self->asked.listen;
    how.facts = NULL; /* those of the ranks */
    how.own_thread = true;
    kvf_status status = kvf_agent_open(NULL, 0, &how, &self->directory);
    if (status == KVF_E_INVALID || status == KVF_E_PERMISSION || status == KVF_E_RANGE)
        return library_error(status, "serve");
    return status ? library_failure(status, "serve") : EXIT_DONE;
}

/* A list of keys keeps everybody else out, so that operators alone would leave nobody to fetch. */
static int check_operators(const service *self) {
    if (self->asked.operators.count > 0 && self->asked.allowed.count == 0)
        return usage_error(
            "--command-key needs --allow: with a list of keys only those on it may connect, and a "
            "--command-key may not fetch");
    return EXIT_DONE;
}

/* Errors in the address or the keys are reported before anything is started. */
static int try_directory(service *self) {
    int result = open_directory(self);
    kvf_agent_close(self->directory);
    self->directory = NULL;
    return result;
}

/* ---- starting -------------------------------------------------------------------------------- */

static int prepare(service *self) {
    demo_job *job = &self->job;
    *job = (demo_job){.asked = &self->asked,
                      .standing = true,
                      .steps = 1,
                      .silence_s = self->asked.timeout_s,
                      .fault_rank = UINT32_MAX};
    int result = engines_read(&self->asked, &job->all);
    if (!result)
        result = workload_make(&self->asked, &job->all, &job->work);
    if (result)
        return result;
    job->prefill_ranks = kvf_engine_rank_count(job->all.prefill);
    result = keys_read(self->asked.key_file, &self->keys);
    if (!result && self->asked.corrupt)
        result = corruption_parse(self->asked.corrupt, &job->all, &job->work, &job->corrupt);
    if (!result)
        result = check_listen(self);
    if (!result)
        result = check_operators(self);
    if (!result) {
        describe_agents(self);
        result = try_directory(self);
    }
    if (!result)
        result = stream_listen(&self->stream, self->asked.listen,
                               self->port ? (uint16_t)(self->port + STREAM_OFFSET) : 0);
    if (result)
        return result;
    const pattern_facts facts = {.tokens = job->work.longest_tokens,
                                 .requests = job->work.request_count,
                                 .seed = self->asked.seed,
                                 .stream_port = self->stream.port};
    pattern_facts_write(&facts, self->facts, sizeof self->facts);
    job->agents.facts = self->facts;
    return EXIT_DONE;
}

/* Call it before the ranks start, so that they inherit the mask: the coordinator takes the signals, and ends them. */
static int catch_signals(service *self) {
    sigset_t ends;
    (void)sigemptyset(&ends);
    (void)sigaddset(&ends, SIGINT);
    (void)sigaddset(&ends, SIGTERM);
    (void)sigaddset(&ends, SIGHUP);
    (void)sigprocmask(SIG_BLOCK, &ends, NULL);
    self->stop_fd = signalfd(-1, &ends, SFD_CLOEXEC);
    return self->stop_fd < 0 ? failure("signalfd: %s", strerror(errno)) : EXIT_DONE;
}

static bool take_ready(void *context, demo_side side, uint32_t index, const message *from) {
    (void)side, (void)index;
    return kvf_agent_introduce(context, from->data, from->bytes) == KVF_OK;
}

static int start(service *self) {
    int result = catch_signals(self);
    if (!result)
        result = crew_start(&self->all, &self->job);
    if (!result)
        result = open_directory(self);
    if (!result)
        result = crew_await(&self->all, CREW_PREFILL, MESSAGE_READY, "filling caches", take_ready,
                            self->directory);
    if (!result)
        result = stream_serve(&self->stream);
    crew_send(&self->all, CREW_PREFILL, MESSAGE_STAND, NULL, 0);
    return result;
}

/* ---- serving --------------------------------------------------------------------------------- */

static int say(const service *self) {
    const workload *work = &self->job.work;
    const char *endpoint = kvf_agent_endpoint(self->directory);
    if (options_want_text(&self->asked)) {
        engines_print(&self->job.all);
        print_labelled("work", "%u request%s of up to %llu tokens (%llu in all), %s of caches",
                       work->request_count, work->request_count == 1 ? "" : "s",
                       (unsigned long long)work->longest_tokens, (unsigned long long)work->tokens,
                       text_bytes(work->cache_bytes).text);
        printf("met at   %s%s%s\n", endpoint, self->keys.public_key[0] ? "," : "", self->keys.public_key);
    }
    if (!self->asked.json)
        return fflush(stdout) ? EXIT_FAILED : EXIT_DONE; /* main() says why */
    struct json_object *out = json_object_new_object();
    json_text(out, "endpoint", endpoint);
    json_text(out, "public_key", self->keys.public_key);
    engines_add_json(&self->job.all, out);
    json_count(out, "requests", work->request_count);
    json_count(out, "tokens", work->tokens);
    json_count(out, "longest_tokens", work->longest_tokens);
    json_count(out, "cache_bytes", work->cache_bytes);
    json_count(out, "seed", self->asked.seed);
    json_count(out, "stream_port", self->stream.port);
    int result = json_write(out, self->asked.json);
    return result || fflush(stdout) == 0 ? result : EXIT_FAILED;
}

int run_serve(int argc, char **argv) {
    service self = {.stream = {.listener = -1}, .stop_fd = -1};
    int result = options_parse(argc, argv, COMMAND_SERVE, &self.asked);
    if (!result)
        result = prepare(&self);
    if (!result)
        result = start(&self);
    if (!result)
        result = say(&self);
    if (!result)
        result = crew_stand(&self.all, self.stop_fd, "serving");
    if (result)
        crew_kill(&self.all);
    else
        result = crew_end(&self.all);
    stream_close(&self.stream);
    kvf_agent_close(self.directory);
    if (self.stop_fd >= 0)
        (void)close(self.stop_fd);
    memset(&self.keys, 0, sizeof self.keys);
    workload_free(&self.job.work);
    engines_free(&self.job.all);
    return result;
}
