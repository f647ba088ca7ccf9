/* A process that is killed: its peer notices at once, and need not wait for the lease. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent_world.h"
#include "interfaces.h"

#define TOKENS 50

/* Where agents listen, and how their bytes go. */
typedef struct setting {
    const char *transport, *listen;
    kvf_way way;
} setting;

static kvf_agent_options options_of(const setting *of) {
    return (kvf_agent_options){.struct_size = sizeof(kvf_agent_options),
                               .transport = of->transport,
                               .listen = of->listen,
                               .insecure = true,
                               .way = of->way};
}

/* The producer: writes one of the layers, reports it, and waits to be killed. */
static void produce(const setting *of, int out) {
    const kvf_agent_options options = options_of(of);
    world w = {.model = attention(4, 8, 8)};
    world_request held;
    uint64_t ticket;
    w.p.engine = engine_of(w.model, ENGINE(.name = "P", .all = {.block_count = 64}));
    world_open_agents(&w.p, &options);
    world_request_make(&w, &w.p, "a", TOKENS, 0, 1, &held);
    assert_ok(kvf_agent_push(w.p.agents[0], &held.request, &ticket));
    assert_ok(kvf_agent_push_ready(w.p.agents[0], ticket, CHUNK(0, TOKENS, 1)));
    char endpoint[64] = "";
    (void)snprintf(endpoint, sizeof endpoint, "%s", w.p.contact.endpoint);
    assert_int_equal(write(out, endpoint, sizeof endpoint), sizeof endpoint);
    for (bool told = false;;) {
        kvf_agent_stats stats = {.struct_size = sizeof stats};
        (void)kvf_agent_wait(w.p.agents[0], MS);
        assert_ok(kvf_agent_get_stats(w.p.agents[0], &stats));
        if (!told && stats.bytes_written > 0)
            told = write(out, "!", 1) == 1;
    }
}

typedef struct scene {
    world w;
    world_request wanted;
    pid_t producer, successor; /* the latter waits to be told where to listen */
    char endpoint[64];         /* of the producer */
    int pipe[2], order[2];
    uint64_t ticket;
} scene;

/* Forks while this process has no threads: ThreadSanitizer cannot follow a child of one that has some. */
static pid_t start_producer(const scene *s, const setting *of, bool at_once) {
    char listen[sizeof s->endpoint];
    setting there = *of;
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child > 0)
        return child;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that fails leaves no process behind */
    if (!at_once) {
        if (read(s->order[0], listen, sizeof listen) != sizeof listen)
            _exit(1);
        there.listen = listen;
    }
    produce(&there, s->pipe[1]);
    _exit(0);
}

/* Waits until a producer listens. */
static void hear_endpoint(scene *s) {
    assert_int_equal(read(s->pipe[0], s->endpoint, sizeof s->endpoint), sizeof s->endpoint);
}

/* Starts a producer, which begins to write into our blocks. */
static void set_up(scene *s, const setting *of) {
    memset(s, 0, sizeof *s);
    assert_int_equal(pipe(s->pipe), 0);
    assert_int_equal(pipe(s->order), 0);
    s->producer = start_producer(s, of, true);
    s->successor = start_producer(s, of, false);
    hear_endpoint(s);
    const kvf_agent_options options = options_of(of);
    s->w.model = attention(4, 8, 8);
    s->w.outcomes = calloc(WORLD_MAX_OUTCOMES, sizeof *s->w.outcomes);
    assert_non_null(s->w.outcomes);
    s->w.d.engine = engine_of(s->w.model, ENGINE(.name = "D", .all = {.block_count = 64, .order = "BLHNP"}));
    world_open_agents(&s->w.d, &options);
    world_request_make(&s->w, &s->w.d, "a", TOKENS, 8, 1, &s->wanted);
    s->wanted.request.contact = (kvf_contact){.engine = "P", .endpoint = s->endpoint};
    assert_ok(kvf_agent_expect(s->w.d.agents[0], &s->wanted.request, &s->ticket));
    struct pollfd told = {s->pipe[0], POLLIN, 0};
    world_until(&s->w, poll(&told, 1, 0) == 1);
    assert_int_equal(read(s->pipe[0], &(char){0}, 1), 1);
}

static void end_process(pid_t *process) {
    if (*process > 0) {
        (void)kill(*process, SIGKILL);
        (void)waitpid(*process, NULL, 0);
    }
    *process = 0;
}

static void tear_down(scene *s) {
    end_process(&s->producer);
    end_process(&s->successor);
    for (int i = 0; i < 2; i++) {
        (void)close(s->pipe[i]);
        (void)close(s->order[i]);
    }
    world_quiet(&s->w);
    world_close(&s->w);
}

/* The request fails, and its blocks are free long before the lease of 30 s is over. */
static void require_free(scene *s) {
    uint64_t killed = world_now();
    const world_outcome *failed = world_failed(&s->w, s->w.d.agents[0], s->ticket, KVF_E_PEER_LOST);
    if (!failed->blocks_free) { /* it was in a write, and the kernel had not yet ended it */
        const world_outcome *free = world_next(&s->w, s->w.d.agents[0], s->ticket);
        assert_int_equal(free->kind, KVF_EVENT_BLOCKS_FREE);
        assert_true(world_now() - killed < 10 * SECOND);
    }
}

static void kill_the_writer(const setting *of) {
    scene s;
    set_up(&s, of);
    assert_int_equal(kill(s.producer, SIGKILL), 0);
    require_free(&s);
    tear_down(&s);
}

static void blocks_of_a_writer_that_was_killed_are_free_at_once(void **state) {
    (void)state;
    kill_the_writer(&(setting){.transport = "shm"});
    kill_the_writer(&(setting){.transport = "shm", .way = KVF_WAY_DIRECT});
    kill_the_writer(&(setting){.transport = "messages"});
}

/* Engines on one machine often know each other by its address in a network. */
static void also_if_it_was_reached_by_an_address_of_an_interface(void **state) {
    (void)state;
    char host[NI_MAXHOST], listen[NI_MAXHOST + 16];
    if (!find_interface(AF_INET, host, sizeof host))
        skip();
    (void)snprintf(listen, sizeof listen, "tcp://%s:*", host);
    kill_the_writer(&(setting){.transport = "shm", .listen = listen});
    kill_the_writer(&(setting){.transport = "shm", .listen = listen, .way = KVF_WAY_DIRECT});
    kill_the_writer(&(setting){.transport = "messages", .listen = listen});
}

static void also_if_another_process_has_its_port_by_then(void **state) {
    (void)state;
    scene s;
    const setting of = {.transport = "shm", .way = KVF_WAY_DIRECT};
    set_up(&s, &of);
    end_process(&s.producer);
    char port[sizeof s.endpoint];
    memcpy(port, s.endpoint, sizeof port);
    assert_int_equal(write(s.order[1], port, sizeof port), sizeof port);
    hear_endpoint(&s);
    assert_string_equal(s.endpoint, port);
    require_free(&s);
    tear_down(&s);
}

static void blocks_of_a_writer_that_was_stopped_are_in_doubt(void **state) {
    (void)state;
    scene s;
    set_up(&s, &(setting){.transport = "shm"});
    assert_int_equal(kill(s.producer, SIGSTOP), 0);
    assert_ok(kvf_agent_cancel(s.w.d.agents[0], s.ticket));
    assert_false(world_failed(&s.w, s.w.d.agents[0], s.ticket, KVF_E_CANCELLED)->blocks_free);
    assert_int_equal(world_block(s.w.d.agents[0], 0, 8), KVF_BLOCK_IN_DOUBT);
    assert_int_equal(kill(s.producer, SIGKILL), 0);
    uint64_t killed = world_now();
    assert_int_equal(world_next(&s.w, s.w.d.agents[0], s.ticket)->kind, KVF_EVENT_BLOCKS_FREE);
    assert_true(world_now() - killed < 10 * SECOND);
    tear_down(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_of_a_writer_that_was_killed_are_free_at_once),
        cmocka_unit_test(also_if_it_was_reached_by_an_address_of_an_interface),
        cmocka_unit_test(also_if_another_process_has_its_port_by_then),
        cmocka_unit_test(blocks_of_a_writer_that_was_stopped_are_in_doubt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
