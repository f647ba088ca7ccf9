/* Holds, pushes and chunks that wait for an event before their memory is read. */
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "agent/session.h"
#include "agent/ticket.h"
#include "agent_world.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define LAYERS 4u
#define TOKENS 100u
#define LEASE (2 * SECOND)
#define OLD 9u /* the content of memory before it is written */
#define NEW 2u

typedef struct scene {
    world w;
    kvf_agent *p, *d;
    world_request given, wanted;
    uint64_t ours[WORLD_MAX_RANKS], theirs[WORLD_MAX_RANKS];
    int fd;
    kvf_ready_event event;
} scene;

static void set_up(scene *s) {
    const kvf_agent_options options = {.struct_size = sizeof options, .lease_ns = LEASE};
    memset(s, 0, sizeof *s);
    world_open_model(&s->w, attention(LAYERS, 4, 8), ONE("P"), ONE("D"), &options);
    s->p = s->w.p.agents[0];
    s->d = s->w.d.agents[0];
    world_request_make(&s->w, &s->w.p, "r", TOKENS, 3, 2, &s->given);
    world_request_make(&s->w, &s->w.d, "r", TOKENS, 7, 3, &s->wanted);
    world_fill(&s->w, &s->w.p, &s->given, OLD);
    s->fd = eventfd(0, EFD_CLOEXEC);
    assert_true(s->fd >= 0);
    s->event = (kvf_ready_event){.struct_size = sizeof s->event, .kind = KVF_READY_FD, .fd = s->fd};
    s->given.request.after = &s->event;
}

/* Writes the blocks, as the engine's device would, and signals the event. */
static void happen(scene *s) {
    const uint64_t one = 1;
    world_fill(&s->w, &s->w.p, &s->given, NEW);
    assert_int_equal(write(s->fd, &one, sizeof one), sizeof one);
}

static void tear_down(scene *s) {
    (void)close(s->fd);
    world_quiet(&s->w);
    world_close(&s->w);
}

static void finish(scene *s) {
    world_all_done(&s->w, &s->w.d, s->ours);
    world_all_done(&s->w, &s->w.p, s->theirs);
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &s->wanted, NEW), 0);
    tear_down(s);
}

static void assert_nothing_read(scene *s) {
    assert_int_equal(world_stats(s->p).leases_now, 0);
    assert_int_equal(world_stats(s->p).bytes_written, 0);
    assert_int_equal(world_stats(s->d).bytes_read, 0);
    assert_int_equal(world_count(&s->w, s->p, KVF_EVENT_DONE), 0);
    assert_int_equal(world_count(&s->w, s->d, KVF_EVENT_DONE), 0);
}

/* ---- holds ----------------------------------------------------------------------------------- */

static void a_hold_is_not_read_before_its_event(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_hold(&s.w.p, &s.given, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, SECOND);
    assert_nothing_read(&s);
    assert_int_equal(world_block(s.p, 0, 3), KVF_BLOCK_HELD);
    assert_fails(kvf_agent_hold(s.p, &s.given.request, &s.theirs[1]), KVF_E_EXISTS, "held already");
    happen(&s);
    finish(&s);
}

/* The control: without `after` the old bytes are read. */
static void without_an_event_the_hold_is_read_at_once(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    s.event.kind = KVF_READY_NOW;
    world_hold(&s.w.p, &s.given, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_all_done(&s.w, &s.w.d, s.ours);
    happen(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, OLD), 0);
    assert_true(world_wrong_cells(&s.w, &s.w.d, &s.wanted, NEW) > 0);
    tear_down(&s);
}

static void an_event_that_has_happened_already_is_enough(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    happen(&s);
    for (bool busy = true; busy;)
        assert_ok(kvf_agent_progress(s.p, &busy));
    world_hold(&s.w.p, &s.given, s.theirs);
    assert_int_equal(kvf_agent_timeout(s.p), 0); /* a round finds it out */
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    finish(&s);
}

static void the_lease_of_a_hold_begins_with_its_event(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_hold(&s.w.p, &s.given, s.theirs);
    world_run_for(&s.w, LEASE - 100 * MS);
    happen(&s);
    world_run_for(&s.w, LEASE - 100 * MS); /* a fifth of a second short of two leases after the call */
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    finish(&s);
}

static void a_hold_ends_when_its_event_does_not_come_within_the_lease(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    s.wanted.request.deadline_ns = LEASE + SECOND;
    uint64_t begun = world_now();
    world_hold(&s.w.p, &s.given, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    const world_outcome *failed = world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    assert_non_null(strstr(failed->detail, "event"));
    assert_true(failed->blocks_free);
    assert_true(world_now() - begun >= LEASE && world_now() - begun < LEASE + 100 * MS);
    happen(&s); /* too late: it has no effect */
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    assert_int_equal(world_stats(s.d).bytes_read, 0);
    tear_down(&s);
}

static void a_hold_that_waits_can_be_cancelled(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    s.wanted.request.patience_ns = 500 * MS;
    world_hold(&s.w.p, &s.given, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 100 * MS);
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    assert_true(world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED)->blocks_free);
    assert_int_equal(world_block(s.p, 0, 3), KVF_BLOCK_FREE);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    tear_down(&s);
}

static void a_consumer_that_wants_nothing_ends_a_hold_that_waits(void **state) {
    (void)state;
    for (int first = 0; first < 2; first++) {
        scene s;
        set_up(&s);
        world_request_empty(&s.wanted);
        if (first)
            world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_run_for(&s.w, 100 * MS);
        world_hold(&s.w.p, &s.given, s.theirs);
        if (!first)
            world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_all_done(&s.w, &s.w.d, s.ours);
        world_all_done(&s.w, &s.w.p, s.theirs);
        tear_down(&s);
    }
}

/* ---- pushes ---------------------------------------------------------------------------------- */

static void nothing_of_a_push_is_written_before_its_event(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_push(&s.w.p, &s.given, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_run_for(&s.w, 3 * LEASE);
    assert_nothing_read(&s);
    happen(&s);
    finish(&s);
}

static void on_sums(kvf_call *call, kvf_status status, const kvf_answer *answer) {
    (void)answer;
    *(kvf_status *)call->context = status;
}

/* A peer may ask for checksums without waiting for WRITTEN. */
static void nor_are_checksums_of_it_given(void **state) {
    (void)state;
    scene s;
    kvf_status status = KVF_OK;
    set_up(&s);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_push(&s.w.p, &s.given, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_run_for(&s.w, 100 * MS);
    kvf_session *session = s.d->all_sessions;
    while (session->incoming || !session->sources)
        session = session->next;
    kvf_call_body body = {
        .generation = s.ours[0] | KVF_EXPECTATION, .layers = {0, 1}, .units = {0, 4}, .end = 16};
    assert_ok(kvf_call_start(session, KVF_CALL_CHECKSUM, &body, world_now() + SECOND, false, on_sums, &status,
                             NULL));
    world_run_for(&s.w, 100 * MS);
    assert_int_equal(status, KVF_E_NOT_FOUND);
    happen(&s);
    finish(&s);
}

static void chunks_that_are_named_later_wait_behind_the_event_of_one(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    s.given.request.after = NULL;
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_push(&s.w.p, &s.given, s.theirs);
    kvf_push_chunk chunk = *CHUNK(0, 48, 2);
    chunk.after = &s.event;
    assert_ok(kvf_agent_push_ready(s.p, s.theirs[0], &chunk));
    chunk.layers = 1;
    assert_fails(kvf_agent_push_ready(s.p, s.theirs[0], &chunk), KVF_E_RANGE, "2 are ready");
    assert_ok(kvf_agent_push_ready(s.p, s.theirs[0], CHUNK(0, 48, LAYERS)));
    assert_ok(kvf_agent_push_ready(s.p, s.theirs[0], CHUNK(48, UINT64_MAX, LAYERS)));
    world_run_for(&s.w, SECOND);
    assert_nothing_read(&s);
    happen(&s);
    finish(&s);
}

static void chunks_are_written_as_their_events_happen(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    int second = eventfd(0, EFD_CLOEXEC);
    const uint64_t one = 1;
    const kvf_ready_event later = {.struct_size = sizeof later, .kind = KVF_READY_FD, .fd = second};
    s.given.request.after = NULL;
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_push(&s.w.p, &s.given, s.theirs);
    kvf_push_chunk chunk = *CHUNK(0, 50, LAYERS);
    chunk.after = &later;
    assert_ok(kvf_agent_push_ready(s.p, s.theirs[0], &chunk));
    chunk = *CHUNK(50, TOKENS, LAYERS);
    chunk.after = &s.event;
    assert_ok(kvf_agent_push_ready(s.p, s.theirs[0], &chunk));
    happen(&s); /* the event of the second chunk, which waits behind the first */
    world_run_for(&s.w, 100 * MS);
    assert_nothing_read(&s);
    assert_int_equal(write(second, &one, sizeof one), sizeof one);
    (void)close(second);
    finish(&s);
}

static void a_push_that_waits_ends_at_its_deadline_and_says_why(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    s.given.request.deadline_ns = 700 * MS;
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_push(&s.w.p, &s.given, s.theirs);
    world_ready(&s.w.p, s.theirs);
    const world_outcome *failed = world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    assert_non_null(strstr(failed->detail, "0 of 100 tokens"));
    assert_non_null(strstr(failed->detail, "wait for an event"));
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    tear_down(&s);
}

static void a_push_that_waits_can_be_cancelled(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_push(&s.w.p, &s.given, s.theirs);
    world_run_for(&s.w, 100 * MS);
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    assert_true(world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED)->blocks_free);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED);
    happen(&s);
    world_run_for(&s.w, 100 * MS);
    assert_int_equal(world_stats(s.p).bytes_written, 0);
    tear_down(&s);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static bool is_readable(int fd) {
    struct pollfd polled = {fd, POLLIN, 0};
    return poll(&polled, 1, 0) == 1;
}

static int open_descriptors(void) {
    int count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static void the_agents_descriptor_is_readable_when_the_event_happens(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_hold(&s.w.p, &s.given, s.theirs);
    world_run_for(&s.w, 100 * MS);
    assert_false(is_readable(kvf_agent_event_fd(s.p)));
    happen(&s);
    assert_true(is_readable(kvf_agent_event_fd(s.p)));
    assert_ok(kvf_agent_progress(s.p, NULL));
    world_run_for(&s.w, 100 * MS);
    assert_false(is_readable(kvf_agent_event_fd(s.p))); /* although the event's descriptor stays readable */
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    finish(&s);
}

static void the_callers_descriptor_may_be_closed_and_none_is_kept(void **state) {
    (void)state;
    scene s;
    int ends[2];
    set_up(&s);
    const int before = open_descriptors();
    assert_int_equal(pipe(ends), 0);
    s.event.fd = ends[0];
    world_hold(&s.w.p, &s.given, s.theirs);
    (void)close(ends[0]);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 100 * MS);
    assert_nothing_read(&s);
    assert_int_equal(open_descriptors(), before + 2);
    world_fill(&s.w, &s.w.p, &s.given, NEW);
    assert_int_equal(write(ends[1], "", 1), 1);
    (void)close(ends[1]); /* the written byte can still be read */
    world_until(&s.w, world_count(&s.w, s.d, KVF_EVENT_DONE) == 1);
    assert_int_equal(open_descriptors(), before);
    finish(&s);
}

/* 0 is one of them, the caller's and the agent's. */
static void descriptors_of_any_number_are_waited_for(void **state) {
    (void)state;
    const int nothing = openat(AT_FDCWD, "/dev/null", O_RDONLY | O_CLOEXEC);
    for (int callers = 0; callers < 2; callers++) {
        scene s;
        assert_int_equal(dup2(nothing, STDIN_FILENO), STDIN_FILENO);
        set_up(&s);
        (void)close(STDIN_FILENO); /* the next descriptor is 0 */
        if (callers)
            s.event.fd = fcntl(s.fd, F_DUPFD_CLOEXEC, 0);
        world_hold(&s.w.p, &s.given, s.theirs);
        assert_true(fcntl(STDIN_FILENO, F_GETFD) >= 0);
        world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_run_for(&s.w, 100 * MS);
        assert_nothing_read(&s);
        happen(&s);
        finish(&s);
        assert_int_equal(fcntl(STDIN_FILENO, F_GETFD) >= 0, callers); /* the agent has closed its own */
    }
    assert_int_equal(dup2(nothing, STDIN_FILENO), STDIN_FILENO);
    (void)close(nothing);
}

static void one_event_may_be_waited_for_by_many(void **state) {
    (void)state;
    scene s;
    uint64_t others[12];
    set_up(&s);
    const int before = open_descriptors();
    for (uint32_t i = 0; i < COUNT_OF(others); i++) {
        s.given.request.id = (kvf_request_id){&i, sizeof i};
        assert_ok(kvf_agent_hold(s.p, &s.given.request, &others[i]));
    }
    s.given.request.id = (kvf_request_id){"r", 1};
    world_hold(&s.w.p, &s.given, s.theirs);
    assert_true(s.p->after_room < 4 * COUNT_OF(others));
    for (uint32_t i = 0; i < COUNT_OF(others); i += 2)
        assert_ok(kvf_agent_cancel(s.p, others[i]));
    happen(&s);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_count(&s.w, s.d, KVF_EVENT_DONE) == 1);
    assert_int_equal(open_descriptors(), before);
    for (uint32_t i = 0; i < COUNT_OF(others); i++)
        (void)world_failed(&s.w, s.p, others[i], i % 2 ? KVF_E_TIMEOUT : KVF_E_CANCELLED);
    finish(&s);
}

static void a_pipe_that_nobody_can_write_to_any_more_fails_the_request(void **state) {
    (void)state;
    for (int pushes = 0; pushes < 2; pushes++) {
        scene s;
        int ends[2];
        set_up(&s);
        assert_int_equal(pipe(ends), 0);
        s.event.fd = ends[0];
        (pushes ? world_push : world_hold)(&s.w.p, &s.given, s.theirs);
        world_run_for(&s.w, 100 * MS);
        (void)close(ends[1]);
        const world_outcome *failed = world_failed(&s.w, s.p, s.theirs[0], KVF_E_IO);
        assert_non_null(strstr(failed->detail, "will never happen"));
        assert_true(failed->blocks_free);
        (void)close(ends[0]);
        tear_down(&s);
    }
}

static void events_that_cannot_be_waited_for_are_refused_by_name(void **state) {
    (void)state;
    scene s;
    uint64_t ticket, open;
    set_up(&s);
    kvf_agent_request plain = s.given.request;
    plain.after = NULL;
    plain.id = (kvf_request_id){"open", 4};
    assert_ok(kvf_agent_push(s.p, &plain, &open));
    int file = openat(AT_FDCWD, "/proc/self/exe", O_RDONLY | O_CLOEXEC);
    const struct {
        kvf_ready_event event;
        kvf_status status;
        const char *text;
    } cases[] = {
        {{sizeof(kvf_ready_event), KVF_READY_CUDA_EVENT, 0, NULL, 0}, KVF_E_INVALID, "the event is NULL"},
        {{sizeof(kvf_ready_event), (kvf_ready_kind)7, 0, NULL, 0}, KVF_E_INVALID, "kind is 7"},
        {{sizeof(kvf_ready_event), KVF_READY_FD, -1, NULL, 0}, KVF_E_INVALID, "fd is -1"},
        {{sizeof(kvf_ready_event), KVF_READY_FD, 1000000, NULL, 0}, KVF_E_INVALID, "fd 1000000"},
        {{sizeof(kvf_ready_event), KVF_READY_FD, file, NULL, 0}, KVF_E_INVALID, "cannot be waited for"},
        {{0, KVF_READY_FD, s.fd, NULL, 0}, KVF_E_INVALID, "struct_size"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        s.event = cases[i].event;
        assert_fails(kvf_agent_hold(s.p, &s.given.request, &ticket), cases[i].status, cases[i].text);
        assert_fails(kvf_agent_push(s.p, &s.given.request, &ticket), cases[i].status, cases[i].text);
        kvf_push_chunk chunk = *CHUNK(0, 10, LAYERS);
        chunk.after = &s.event;
        assert_fails(kvf_agent_push_ready(s.p, open, &chunk), cases[i].status, cases[i].text);
    }
    (void)close(file);
    assert_int_equal(world_stats(s.p).requests_now[KVF_REQUEST_HOLD], 0);
    assert_int_equal(world_stats(s.p).requests_now[KVF_REQUEST_PUSH], 1);
    assert_ok(kvf_agent_cancel(s.p, open));
    (void)world_failed(&s.w, s.p, open, KVF_E_CANCELLED);
    assert_int_equal(world_stats(s.p).blocks_held_now, 0);
    tear_down(&s);
}

static void an_agent_may_be_closed_while_it_waits(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    const int before = open_descriptors();
    world_hold(&s.w.p, &s.given, s.theirs);
    s.given.request.id = (kvf_request_id){"other", 5};
    world_push(&s.w.p, &s.given, s.theirs);
    assert_true(open_descriptors() > before);
    world_close(&s.w);
    assert_true(open_descriptors() < before);
    (void)close(s.fd);
}

/* ---- blocks that the consumer's device still uses --------------------------------------------- */

typedef enum way_in { PULL, PULL_INTO, EXPECT } way_in;

/* Begins to fill D's blocks, which another request's last step still reads, behind the event. */
static void begin_to_fill(scene *s, way_in how, kvf_ready_kind kind) {
    kvf_agent_request *wanted = &s->wanted.request;
    set_up(s);
    s->event.kind = kind;
    s->given.request.after = NULL;
    world_fill(&s->w, &s->w.p, &s->given, NEW);
    world_fill(&s->w, &s->w.d, &s->wanted, OLD);
    wanted->after = how == PULL_INTO ? NULL : &s->event;
    wanted->deadline_ns = SECOND + SECOND / 2;
    if (how == EXPECT) {
        world_expect(&s->w.d, &s->wanted, &s->w.p, s->ours);
        world_push(&s->w.p, &s->given, s->theirs);
        world_ready(&s->w.p, s->theirs);
        return;
    }
    world_hold(&s->w.p, &s->given, s->theirs);
    if (how == PULL_INTO)
        wanted->groups = NULL;
    world_pull(&s->w.d, &s->wanted, &s->w.p, s->ours);
    wanted->groups = s->wanted.groups;
    if (how == PULL_INTO)
        assert_ok(
            kvf_agent_pull_into_after(s->d, s->ours[0], wanted->groups, wanted->group_count, &s->event));
}

static void blocks_are_not_written_before_their_event(void **state) {
    (void)state;
    for (way_in how = PULL; how <= EXPECT; how++) {
        scene s;
        begin_to_fill(&s, how, KVF_READY_FD);
        world_run_for(&s.w, SECOND);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, OLD), 0);
        happen(&s);
        finish(&s);
    }
}

/* The control: without an event they are. */
static void without_an_event_blocks_are_written_at_once(void **state) {
    (void)state;
    for (way_in how = PULL; how <= EXPECT; how++) {
        scene s;
        begin_to_fill(&s, how, KVF_READY_NOW);
        world_all_done(&s.w, &s.w.d, s.ours);
        assert_true(world_wrong_cells(&s.w, &s.w.d, &s.wanted, OLD) > 0);
        happen(&s);
        world_all_done(&s.w, &s.w.p, s.theirs);
        tear_down(&s);
    }
}

static void a_request_whose_blocks_are_used_for_too_long_fails_and_says_why(void **state) {
    (void)state;
    for (way_in how = PULL; how <= EXPECT; how++) {
        scene s;
        begin_to_fill(&s, how, KVF_READY_FD);
        const world_outcome *failed = world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
        assert_non_null(strstr(failed->detail, "the event that the request waits for (`after`)"));
        assert_true(failed->blocks_free);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, OLD), 0);
        happen(&s); /* too late: it has no effect */
        assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
        (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
        tear_down(&s);
    }
}

static void a_request_whose_blocks_are_still_used_can_be_cancelled(void **state) {
    (void)state;
    for (way_in how = PULL; how <= EXPECT; how++) {
        scene s;
        begin_to_fill(&s, how, KVF_READY_FD);
        world_run_for(&s.w, 100 * MS);
        assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
        assert_true(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
        assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
        (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
        tear_down(&s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_hold_is_not_read_before_its_event),
        cmocka_unit_test(without_an_event_the_hold_is_read_at_once),
        cmocka_unit_test(an_event_that_has_happened_already_is_enough),
        cmocka_unit_test(the_lease_of_a_hold_begins_with_its_event),
        cmocka_unit_test(a_hold_ends_when_its_event_does_not_come_within_the_lease),
        cmocka_unit_test(a_hold_that_waits_can_be_cancelled),
        cmocka_unit_test(a_consumer_that_wants_nothing_ends_a_hold_that_waits),
        cmocka_unit_test(nothing_of_a_push_is_written_before_its_event),
        cmocka_unit_test(nor_are_checksums_of_it_given),
        cmocka_unit_test(chunks_that_are_named_later_wait_behind_the_event_of_one),
        cmocka_unit_test(chunks_are_written_as_their_events_happen),
        cmocka_unit_test(a_push_that_waits_ends_at_its_deadline_and_says_why),
        cmocka_unit_test(a_push_that_waits_can_be_cancelled),
        cmocka_unit_test(the_agents_descriptor_is_readable_when_the_event_happens),
        cmocka_unit_test(the_callers_descriptor_may_be_closed_and_none_is_kept),
        cmocka_unit_test(descriptors_of_any_number_are_waited_for),
        cmocka_unit_test(one_event_may_be_waited_for_by_many),
        cmocka_unit_test(a_pipe_that_nobody_can_write_to_any_more_fails_the_request),
        cmocka_unit_test(events_that_cannot_be_waited_for_are_refused_by_name),
        cmocka_unit_test(an_agent_may_be_closed_while_it_waits),
        cmocka_unit_test(blocks_are_not_written_before_their_event),
        cmocka_unit_test(without_an_event_blocks_are_written_at_once),
        cmocka_unit_test(a_request_whose_blocks_are_used_for_too_long_fails_and_says_why),
        cmocka_unit_test(a_request_whose_blocks_are_still_used_can_be_cancelled),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
