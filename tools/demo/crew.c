#include "crew.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "rank.h"
#include "text.h"

enum {
    TICK_MS = 100,
    GRACE_MS = 500,      /* to find out which rank died after others complained */
    QUIT_MS = 20 * 1000, /* until ranks that were told to quit are killed */
};

/* ---- starting -------------------------------------------------------------------------------- */

/* Ranks and their stand-bys. */
static uint32_t process_count(const crew *of) {
    return of->count + of->job->spares;
}

static bool stands_by(const demo_job *job, uint32_t member) {
    return member >= job->prefill_ranks + job->decode_ranks;
}

static demo_side side_of(const demo_job *job, uint32_t member) {
    return member < job->prefill_ranks || stands_by(job, member) ? SIDE_PREFILL : SIDE_DECODE;
}

static uint32_t index_of(const demo_job *job, uint32_t member) {
    if (stands_by(job, member))
        return job->victim;
    return member < job->prefill_ranks ? member : member - job->prefill_ranks;
}

static text name_of(const crew *of, uint32_t member) {
    return text_format("%s rank %u", side_of(of->job, member) == SIDE_PREFILL ? "prefill" : "decode",
                       index_of(of->job, member));
}

static int run_seat(rank_seat *seat) {
    int result = seat->side == SIDE_PREFILL ? run_prefill_rank(seat) : run_decode_rank(seat);
    channel_close(&seat->coordinator);
    return result;
}

static void *run_thread(void *seat) {
    (void)run_seat(seat);
    return NULL;
}

static bool is_one_process(const demo_job *job) {
    return strcmp(job->asked->transport, "inproc") == 0;
}

/* Runs all ranks as threads. The ranks report their failures. */
static int run_threads(rank_seat *seats, uint32_t count) {
    pthread_t *threads = calloc(count, sizeof *threads);
    uint32_t started = 0;
    if (!threads)
        return EXIT_FAILED;
    while (started < count && pthread_create(&threads[started], NULL, run_thread, &seats[started]) == 0)
        started++;
    for (uint32_t i = started; i < count; i++)
        channel_close(&seats[i].coordinator);
    for (uint32_t i = 0; i < started; i++)
        (void)pthread_join(threads[i], NULL);
    free(threads);
    return started == count ? EXIT_DONE : EXIT_FAILED;
}

/* In a new process: keeps only its own ends of the sockets, and dies with the coordinator. */
static void become_rank(crew *of, rank_seat *seats, uint32_t first, uint32_t count, pid_t coordinator) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != coordinator)
        _exit(EXIT_FAILED);
    for (uint32_t i = 0; i < process_count(of); i++) {
        channel_close(&of->members[i].to);
        if (i < first || i >= first + count)
            channel_close(&seats[i].coordinator);
    }
    free(of->members);
    of->members = NULL;
    message begin;
    if (stands_by(of->job, first) && !channel_receive(&seats[first].coordinator, &begin))
        _exit(EXIT_DONE); /* it was not needed */
    int result = count == 1 ? run_seat(&seats[first]) : run_threads(seats + first, count);
    free(seats);
    exit(result);
}

static bool open_channels(crew *of, rank_seat *seats) {
    for (uint32_t i = 0; i < process_count(of); i++) {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
            return false;
        of->members[i].to.fd = ends[0];
        seats[i] = (rank_seat){of->job, side_of(of->job, i), index_of(of->job, i), {.fd = ends[1]}};
    }
    return true;
}

int crew_start(crew *out, const demo_job *job) {
    *out = (crew){.job = job, .count = job->prefill_ranks + job->decode_ranks, .shown = progress_begin()};
    const uint32_t count = process_count(out);
    out->members = calloc(count, sizeof *out->members);
    rank_seat *seats = calloc(count, sizeof *seats);
    if (!out->members || !seats) {
        free(out->members);
        free(seats);
        return failure("not enough memory");
    }
    int result = EXIT_DONE;
    for (uint32_t i = 0; i < count && !result; i++)
        out->members[i].to.fd = seats[i].coordinator.fd = -1;
    if (!result && !open_channels(out, seats))
        result = failure("socketpair for %s: %s", name_of(out, count - 1).text, strerror(errno));
    uint32_t together = is_one_process(job) ? count : 1;
    pid_t coordinator = getpid();
    (void)fflush(NULL);
    for (uint32_t first = 0; first < count && !result; first += together) {
        pid_t pid = fork();
        if (pid == 0)
            become_rank(out, seats, first, together, coordinator);
        if (pid < 0)
            result = failure("fork of %s: %s", name_of(out, first).text, strerror(errno));
        for (uint32_t i = first; i < first + together && pid > 0; i++)
            out->members[i].pid = pid;
    }
    for (uint32_t i = 0; i < count; i++)
        channel_close(&seats[i].coordinator);
    free(seats);
    if (result)
        crew_kill(out);
    return result;
}

/* ---- ending ---------------------------------------------------------------------------------- */

/* Notes the end of processes that have ended; returns how many still run. */
static uint32_t reap(crew *of) {
    uint32_t running = 0;
    for (uint32_t i = 0; i < process_count(of); i++) {
        pid_t pid = of->members[i].pid;
        int status;
        if (pid == 0)
            continue;
        if (waitpid(pid, &status, WNOHANG) == 0) {
            running++;
            continue;
        }
        for (uint32_t j = i; j < of->count; j++) /* ranks that are threads share a process */
            if (of->members[j].pid == pid) {
                of->members[j].pid = 0;
                of->members[j].status = status;
            }
    }
    return running;
}

static void sleep_ms(uint32_t ms) {
    struct timespec time = {ms / 1000, (long)(ms % 1000) * 1000000};
    (void)nanosleep(&time, NULL);
}

static bool reap_within(crew *of, uint32_t ms) {
    for (uint32_t waited = 0; reap(of) > 0; waited += 5) {
        if (waited >= ms)
            return false;
        sleep_ms(5);
    }
    return true;
}

static bool ended_badly(const crew_member *member) {
    return member->pid == 0 && member->status != 0;
}

static text end_of(const crew_member *member) {
    if (WIFSIGNALED(member->status))
        return text_format("was ended by signal %d", WTERMSIG(member->status));
    return text_format("exited with status %d", WEXITSTATUS(member->status));
}

void crew_kill(crew *of) {
    if (!of->members)
        return;
    (void)reap(of);
    for (uint32_t i = 0; i < process_count(of); i++)
        if (of->members[i].pid)
            (void)kill(of->members[i].pid, SIGKILL);
    (void)reap_within(of, QUIT_MS);
    for (uint32_t i = 0; i < process_count(of); i++)
        channel_close(&of->members[i].to);
    free(of->members);
    of->members = NULL;
}

void crew_strike(crew *of, uint32_t member) {
    crew_member *struck = &of->members[member];
    (void)kill(struck->pid, SIGKILL);
    while (waitpid(struck->pid, NULL, 0) < 0 && errno == EINTR)
        ;
    channel_close(&struck->to);
    struck->pid = 0;
}

void crew_replace(crew *of, uint32_t member) {
    crew_member *spare = &of->members[of->count];
    of->members[member] = *spare;
    *spare = (crew_member){.to = {.fd = -1}};
    (void)channel_send(&of->members[member].to, MESSAGE_BEGIN, NULL, 0);
}

int crew_end(crew *of) {
    crew_send(of, CREW_ALL, MESSAGE_QUIT, NULL, 0);
    bool ended = reap_within(of, QUIT_MS);
    int result = EXIT_DONE;
    for (uint32_t i = 0; i < of->count && !result; i++) {
        if (!ended && of->members[i].pid)
            result = failure("%s does not end", name_of(of, i).text);
        else if (ended_badly(&of->members[i]))
            result = failure("%s %s", name_of(of, i).text, end_of(&of->members[i]).text);
    }
    crew_kill(of);
    return result;
}

/* ---- messages and progress ------------------------------------------------------------------- */

static bool belongs(const crew *of, uint32_t member, crew_part whom) {
    if (of->members[member].to.fd < 0)
        return false; /* it was killed */
    if (whom == CREW_VICTIM || whom == CREW_WITNESS)
        return member == (whom == CREW_VICTIM ? of->job->victim : of->job->prefill_ranks);
    return (side_of(of->job, member) == SIDE_PREFILL ? CREW_PREFILL : CREW_DECODE) & whom;
}

void crew_send(crew *to, crew_part whom, message_type type, const void *data, size_t bytes) {
    for (uint32_t i = 0; i < to->count; i++)
        if (belongs(to, i, whom))
            (void)channel_send(&to->members[i].to, type, data, bytes);
}

/* The part of a step that its ranks have done, from 0 to 1. */
static double share_of_step(const crew *of, crew_part whom) {
    double done = 0;
    uint32_t ranks = 0;
    for (uint32_t i = 0; i < of->count; i++) {
        if (!belongs(of, i, whom))
            continue;
        const progress_figures *at = &of->members[i].progress;
        double share = at->total ? (double)at->done / (double)at->total : 0;
        ranks++;
        done += !of->members[i].awaited || share > 1 ? 1 : share;
    }
    return ranks ? done / ranks : 1;
}

static void show_progress(crew *of, crew_part whom, const char *doing) {
    const uint32_t steps = of->job->steps > of->step ? of->job->steps : of->step;
    progress_show(&of->shown, (of->step - 1 + share_of_step(of, whom)) / steps, "%s, step %u of %u", doing,
                  of->step, steps);
}

/* Reports why ranks complained or are gone. If a rank died, that is the reason, even if another complained first. */
static int blame(crew *of, uint32_t member, const char *doing, const char *complaint) {
    for (uint32_t waited = 0; waited < GRACE_MS; waited += 20) {
        (void)reap(of);
        for (uint32_t i = 0; i < of->count; i++)
            if (ended_badly(&of->members[i])) {
                bool one = is_one_process(of->job);
                return failure("%s %s while %s", one ? "the process of all ranks" : name_of(of, i).text,
                               end_of(&of->members[i]).text, doing);
            }
        sleep_ms(20);
    }
    return failure("%s: %s (while %s)", name_of(of, member).text, complaint, doing);
}

/* Takes one message of a member. */
static int take(crew *of, uint32_t member, message_type type, const char *doing, crew_handler handle,
                void *context) {
    crew_member *from = &of->members[member];
    message got;
    if (!channel_receive(&from->to, &got))
        return blame(of, member, doing, "it ended without a message");
    from->heard_ns = now_ns();
    if (got.type == MESSAGE_PROGRESS) {
        from->progress = *(const progress_figures *)got.data;
        return EXIT_DONE;
    }
    if (got.type == MESSAGE_FAILED)
        return blame(of, member, doing, got.data);
    bool expected = got.type == type && from->awaited;
    from->awaited = false;
    if (expected && (!handle || handle(context, side_of(of->job, member), index_of(of->job, member), &got)))
        return EXIT_DONE;
    return blame(of, member, doing, "it sent an unexpected message");
}

/* Names the rank that has been silent longest, if for too long: ranks that wait for it fall silent too, but later. */
static int check_silence(crew *of, const char *doing) {
    uint64_t now = now_ns(), most = (uint64_t)of->job->silence_s * 1000000000u;
    uint32_t silent = UINT32_MAX;
    for (uint32_t i = 0; i < of->count; i++)
        if (of->members[i].awaited &&
            (silent == UINT32_MAX || of->members[i].heard_ns < of->members[silent].heard_ns))
            silent = i;
    if (silent == UINT32_MAX || now - of->members[silent].heard_ns <= most)
        return EXIT_DONE;
    return failure("%s has sent nothing for %u s while %s", name_of(of, silent).text, of->job->silence_s,
                   doing);
}

int crew_await(crew *of, crew_part whom, message_type type, const char *doing, crew_handler handle,
               void *context) {
    struct pollfd *sources = calloc(of->count, sizeof *sources);
    if (!sources)
        return failure("not enough memory");
    int result = EXIT_DONE;
    of->step++;
    for (uint32_t i = 0; i < of->count && !result; i++) {
        of->members[i].awaited = belongs(of, i, whom);
        of->members[i].heard_ns = now_ns();
        of->members[i].progress = (progress_figures){0};
        sources[i] = (struct pollfd){.fd = of->members[i].to.fd, .events = POLLIN};
    }
    for (bool waiting = true; waiting && !result;) {
        show_progress(of, whom, doing);
        if (poll(sources, of->count, TICK_MS) < 0 && errno != EINTR)
            result = failure("poll: %s", strerror(errno));
        for (uint32_t i = 0; i < of->count && !result; i++)
            if (sources[i].revents)
                result = take(of, i, type, doing, handle, context);
        waiting = false;
        for (uint32_t i = 0; i < of->count; i++)
            waiting = waiting || of->members[i].awaited;
        if (!result)
            result = check_silence(of, doing);
    }
    progress_clear();
    free(sources);
    return result;
}

int crew_connect(crew *of, const char *endpoint) {
    crew_send(of, CREW_DECODE, MESSAGE_CONNECT, endpoint, strlen(endpoint) + 1);
    return crew_await(of, CREW_DECODE, MESSAGE_CONNECTED, "connecting", NULL, NULL);
}

int crew_stand(crew *of, int stop_fd, const char *doing) {
    struct pollfd *sources = calloc((size_t)of->count + 1, sizeof *sources);
    if (!sources)
        return failure("not enough memory");
    for (uint32_t i = 0; i < of->count; i++)
        sources[i] = (struct pollfd){.fd = of->members[i].to.fd, .events = POLLIN};
    sources[of->count] = (struct pollfd){.fd = stop_fd, .events = POLLIN};
    int result = EXIT_DONE;
    while (!result && !sources[of->count].revents) {
        if (poll(sources, of->count + 1, -1) < 0 && errno != EINTR)
            result = failure("poll: %s", strerror(errno));
        for (uint32_t i = 0; i < of->count && !result; i++)
            if (sources[i].revents)
                result = take(of, i, MESSAGE_FAILED, doing, NULL, NULL);
    }
    free(sources);
    return result;
}
