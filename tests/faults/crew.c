#include "crew.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <kvferry/agent.h>

struct crew_letter {
    order o;
    crew_letter *next;
};

uint64_t crew_now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void say_wrong(const crew *c, uint32_t engine, uint32_t rank, const char *what, int number) {
    char words[200];
    (void)snprintf(words, sizeof words, "%s rank %u: %s %d", content_engine_name(engine), rank, what, number);
    c->on_wrong(c->context, words);
}

/* ---- starting -------------------------------------------------------------------------------- */

/* A worker needs none of the driver's descriptors except its own end. */
static void close_others(const crew *c, int keep) {
    for (uint32_t e = 0; e < CONTENT_ENGINES; e++)
        for (uint32_t r = 0; r < CREW_RANKS; r++)
            if (c->engines[e].members[r].fd > 0 && c->engines[e].members[r].fd != keep)
                (void)close(c->engines[e].members[r].fd);
}

static bool start_member(crew *c, uint32_t engine, uint32_t rank) {
    crew_engine *e = &c->engines[engine];
    crew_member *m = &e->members[rank];
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
        return false;
    worker_place place = {
        .engine = engine, .rank = rank, .life = e->life, .fd = pair[1], .window = m->window};
    if (e->same_port)
        (void)snprintf(place.listen, sizeof place.listen, "%s", m->opened.open.endpoint);
    if (e->same_keys) {
        memcpy(place.public_key, m->opened.open.public_key, sizeof place.public_key);
        memcpy(place.secret_key, m->opened.open.secret_key, sizeof place.secret_key);
    }
    memset(m->window, 0, sizeof *m->window);
    (void)fflush(NULL);
    pid_t driver = getpid(), pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != driver)
            _exit(3);
        (void)close(pair[0]);
        close_others(c, pair[1]);
        (void)alarm(0);
        worker_run(&c->setting, &place);
    }
    (void)close(pair[1]);
    if (pid < 0) {
        (void)close(pair[0]);
        return false;
    }
    m->pid = pid;
    m->fd = pair[0];
    c->starts++;
    return true;
}

static bool start_engine(crew *c, uint32_t engine) {
    crew_engine *e = &c->engines[engine];
    e->start_at = 0;
    e->life++;
    for (uint32_t r = 0; r < e->rank_count; r++)
        if (!start_member(c, engine, r))
            return false;
    return true;
}

bool crew_open(crew *c) {
    size_t bytes = CONTENT_ENGINES * CREW_RANKS * sizeof *c->windows;
    c->windows = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (c->windows == MAP_FAILED)
        return false;
    kvf_model *model = content_model(c->setting.model);
    for (uint32_t i = 0; i < CONTENT_ENGINES; i++) {
        kvf_engine *engine = model ? content_engine(model, i) : NULL;
        c->engines[i].rank_count = engine ? kvf_engine_rank_count(engine) : 0;
        kvf_engine_free(engine);
        for (uint32_t r = 0; r < CREW_RANKS; r++)
            c->engines[i].members[r].window = &c->windows[i * CREW_RANKS + r];
        if (c->engines[i].rank_count == 0 || !start_engine(c, i))
            return false;
    }
    kvf_model_free(model);
    return true;
}

static void free_queue(crew_member *m) {
    while (m->queue) {
        crew_letter *l = m->queue;
        m->queue = l->next;
        free(l);
    }
}

/* Forgets a member that is gone, except where it listened and its keys. */
static void forget_member(crew_member *m) {
    crew_member kept = {.window = m->window, .opened = m->opened};
    if (m->fd > 0)
        (void)close(m->fd);
    free_queue(m);
    *m = kept;
}

void crew_close(crew *c) {
    for (uint32_t e = 0; e < CONTENT_ENGINES; e++)
        for (uint32_t r = 0; r < CREW_RANKS; r++) {
            crew_member *m = &c->engines[e].members[r];
            if (m->pid) {
                (void)kill(m->pid, SIGKILL);
                (void)waitpid(m->pid, NULL, 0);
            }
            forget_member(m);
        }
    if (c->windows && c->windows != MAP_FAILED)
        (void)munmap(c->windows, CONTENT_ENGINES * CREW_RANKS * sizeof *c->windows);
    c->windows = NULL;
}

/* ---- talking --------------------------------------------------------------------------------- */

static void send_queued(crew_member *m) {
    while (m->queue) {
        crew_letter *l = m->queue;
        if (send(m->fd, &l->o, sizeof l->o, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 &&
            (errno == EAGAIN || errno == ENOBUFS))
            return; /* later */
        m->queue = l->next;
        free(l);
    }
}

void crew_send(crew *c, uint32_t engine, uint32_t rank, const order *o) {
    crew_member *m = &c->engines[engine].members[rank];
    crew_letter *l = m->pid && !m->leaving ? malloc(sizeof *l) : NULL;
    if (!l)
        return;
    *l = (crew_letter){.o = *o};
    crew_letter **end = &m->queue;
    while (*end)
        end = &(*end)->next;
    *end = l;
    send_queued(m);
}

void crew_send_all(crew *c, uint32_t engine, const order *o) {
    for (uint32_t r = 0; r < c->engines[engine].rank_count; r++)
        crew_send(c, engine, r, o);
}

/* The siblings of an engine whose ranks all have their agents are introduced to each other. */
static void introduce(crew *c, uint32_t engine) {
    crew_engine *e = &c->engines[engine];
    for (uint32_t r = 0; r < e->rank_count; r++)
        if (!e->members[r].open || e->members[r].leaving)
            return;
    for (uint32_t of = 0; of < e->rank_count; of++) {
        order o = {.kind = ORDER_INTRODUCE};
        o.introduction.size = e->members[of].opened.open.size;
        memcpy(o.introduction.bytes, e->members[of].opened.open.bytes, o.introduction.size);
        for (uint32_t to = 0; to < e->rank_count; to++)
            if (to != of)
                crew_send(c, engine, to, &o);
    }
    memcpy(e->endpoint, e->members[0].opened.open.endpoint, sizeof e->endpoint);
    memcpy(e->public_key, e->members[0].opened.open.public_key, sizeof e->public_key);
    e->up = true;
    c->on_engine(c->context, engine, true);
}

static void take_reports(crew *c, uint32_t engine, uint32_t rank) {
    static report r;
    crew_member *m = &c->engines[engine].members[rank];
    while (m->fd > 0 && recv(m->fd, &r, sizeof r, MSG_DONTWAIT) == (ssize_t)sizeof r) {
        if (m->leaving && r.kind != REPORT_WRONG && r.kind != REPORT_STORY)
            continue; /* its requests have ended already */
        if (r.kind == REPORT_OPEN) {
            m->opened = r;
            m->open = true;
            introduce(c, engine);
        } else if (r.kind == REPORT_LOOK) {
            m->looked = r;
            if (!m->first_resident_bytes)
                m->first_resident_bytes = r.look.resident_bytes;
            m->has_looked = true;
        } else {
            c->on_report(c->context, engine, rank, &r);
        }
    }
}

/* ---- faults ---------------------------------------------------------------------------------- */

/* An engine that lost a rank is down: its requests are over. */
static void take_down(crew *c, uint32_t engine) {
    if (c->engines[engine].up)
        c->on_engine(c->context, engine, false);
    c->engines[engine].up = false;
}

static void let_go_on(crew_member *m) {
    if (!m->stopped)
        return;
    m->stopped = false;
    (void)kill(m->pid, SIGCONT);
}

static void kill_member(crew *c, crew_member *m) {
    if (!m->pid || m->killed)
        return;
    m->killed = m->leaving = true;
    c->kills++;
    (void)kill(m->pid, SIGKILL);
}

static void quit_member(crew *c, uint32_t engine, uint32_t rank) {
    crew_member *m = &c->engines[engine].members[rank];
    const order quit = {.kind = ORDER_QUIT};
    if (!m->pid || m->leaving)
        return;
    let_go_on(m);
    crew_send(c, engine, rank, &quit);
    m->leaving = true;
    c->quits++;
}

void crew_kill(crew *c, uint32_t engine, uint32_t rank, chance *dice) {
    crew_engine *e = &c->engines[engine];
    if (!e->up)
        return;
    take_down(c, engine);
    kill_member(c, &e->members[rank]);
    bool politely = chance_per_mille(dice, 500);
    for (uint32_t r = 0; r < e->rank_count; r++) {
        if (r != rank && politely)
            quit_member(c, engine, r);
        else
            kill_member(c, &e->members[r]);
    }
    e->same_port = chance_per_mille(dice, 600);
    e->same_keys = chance_per_mille(dice, 700);
    e->start_at = crew_now() + chance_between(dice, 0, 400) * 1000000ull;
}

/* A process that is stopped while it copies into another's memory continues when it wakes, and the owner of that memory
 * waits for it, however long that takes. With `gentle`, a writer is stopped only between two calls of its agent. */
bool crew_stop(crew *c, uint32_t engine, uint32_t rank, uint32_t ms) {
    crew_member *m = &c->engines[engine].members[rank];
    int status = 0;
    if (!c->engines[engine].up || m->stopped || m->leaving || kill(m->pid, SIGSTOP) ||
        waitpid(m->pid, &status, WUNTRACED) != m->pid)
        return false;
    if (!WIFSTOPPED(status)) {
        m->pid = 0;
        say_wrong(c, engine, rank, "died by itself with wait status", status);
        return false;
    }
    if (c->gentle && atomic_load(&m->window->working) && atomic_load(&m->window->pushes)) {
        (void)kill(m->pid, SIGCONT);
        c->stops_avoided++;
        return false;
    }
    uint64_t now = crew_now();
    m->stopped = true;
    m->stop_until = now + ms * 1000000ull;
    m->stopped_ns += ms * 1000000ull;
    c->stops++;
    return true;
}

void crew_quit(crew *c) {
    c->quitting = true;
    for (uint32_t e = 0; e < CONTENT_ENGINES; e++) {
        take_down(c, e);
        c->engines[e].start_at = 0;
        for (uint32_t r = 0; r < c->engines[e].rank_count; r++)
            quit_member(c, e, r);
    }
}

bool crew_gone(const crew *c) {
    for (uint32_t e = 0; e < CONTENT_ENGINES; e++)
        for (uint32_t r = 0; r < CREW_RANKS; r++)
            if (c->engines[e].members[r].pid)
                return false;
    return true;
}

bool crew_up(const crew *c) {
    for (uint32_t e = 0; e < CONTENT_ENGINES; e++)
        if (!c->engines[e].up)
            return false;
    return true;
}

/* ---- the loop -------------------------------------------------------------------------------- */

static void look_after(crew *c, uint32_t engine, uint32_t rank) {
    crew_member *m = &c->engines[engine].members[rank];
    int status;
    if (!m->pid)
        return;
    if (m->stopped && crew_now() >= m->stop_until)
        let_go_on(m);
    send_queued(m);
    if (waitpid(m->pid, &status, WNOHANG) != m->pid)
        return;
    take_reports(c, engine, rank);
    bool expected = m->killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                              : m->leaving && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!expected)
        say_wrong(c, engine, rank, "ended by itself, with wait status", status);
    forget_member(m);
    if (!expected && !c->engines[engine].start_at && !c->quitting) {
        take_down(c, engine);
        for (uint32_t r = 0; r < c->engines[engine].rank_count; r++)
            kill_member(c, &c->engines[engine].members[r]);
        c->engines[engine].start_at = crew_now();
    }
}

static void start_again(crew *c, uint32_t engine) {
    crew_engine *e = &c->engines[engine];
    if (!e->start_at || crew_now() < e->start_at)
        return;
    for (uint32_t r = 0; r < e->rank_count; r++)
        if (e->members[r].pid)
            return;
    if (!start_engine(c, engine))
        say_wrong(c, engine, 0, "cannot be started; errno", errno);
}

void crew_work(crew *c, int wait_ms) {
    struct pollfd fds[CONTENT_ENGINES * CREW_RANKS];
    nfds_t count = 0;
    for (uint32_t e = 0; e < CONTENT_ENGINES; e++)
        for (uint32_t r = 0; r < CREW_RANKS; r++)
            if (c->engines[e].members[r].fd > 0)
                fds[count++] = (struct pollfd){.fd = c->engines[e].members[r].fd, .events = POLLIN};
    (void)poll(fds, count, wait_ms);
    for (uint32_t e = 0; e < CONTENT_ENGINES; e++) {
        for (uint32_t r = 0; r < c->engines[e].rank_count; r++) {
            take_reports(c, e, r);
            look_after(c, e, r);
        }
        start_again(c, e);
    }
}
