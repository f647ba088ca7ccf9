/*
 * What is waited for before memory is read: descriptors of the engine's.
 *
 * Each is duplicated and put into what the agent sleeps on, and all are polled once a round. A descriptor of the
 * agent's own makes it no matter what the engine does with its own meanwhile, or how often it gives the same one.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "agent/after.h"

static kvf_status check(const kvf_ready_event *event) {
    switch (event->kind) {
    case KVF_READY_NOW:
        return KVF_OK;
    case KVF_READY_FD:
        return event->fd >= 0 ? KVF_OK : kvf_fail(KVF_E_INVALID, "after: fd is %d", event->fd);
    case KVF_READY_CUDA_EVENT:
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "after: kind is 2 (an event of a CUDA stream), which this build cannot wait "
                        "for; it can for 1 (a file descriptor)");
    }
    return kvf_fail(KVF_E_INVALID, "after: kind is %d; allowed are 0 (now) and 1 (a file descriptor)",
                    (int)event->kind);
}

static kvf_status make_room(kvf_agent *agent) {
    if (agent->after_count < agent->after_room)
        return KVF_OK;
    uint32_t room = agent->after_room ? 2 * agent->after_room : 8;
    struct pollfd *polls = kvf_resize(agent->after_polls, room, sizeof *polls);
    if (!polls)
        return kvf_nomem("an event to wait for");
    agent->after_polls = polls;
    agent->after_room = room;
    return KVF_OK;
}

static kvf_status watch(const kvf_agent *agent, int fd, int *own) {
    struct epoll_event event = {.events = EPOLLIN};
    *own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (*own < 0)
        return kvf_fail(errno == EBADF ? KVF_E_INVALID : KVF_E_IO, "after: fd %d: %s", fd, strerror(errno));
    if (epoll_ctl(agent->poll_fd, EPOLL_CTL_ADD, *own, &event) == 0)
        return KVF_OK;
    int error = errno;
    (void)close(*own);
    return kvf_fail(error == EPERM || error == ELOOP || error == EINVAL ? KVF_E_INVALID : KVF_E_IO,
                    "after: fd %d cannot be waited for: %s", fd, strerror(error));
}

kvf_status kvf_after_take(kvf_ticket *ticket, const kvf_ready_event *given, kvf_after **out) {
    kvf_agent *agent = ticket->agent;
    kvf_ready_event event = {0};
    *out = NULL;
    kvf_status status = given ? kvf_take_options(&event, sizeof event, given, "kvf_ready_event") : KVF_OK;
    if (!status)
        status = check(&event);
    if (status || event.kind == KVF_READY_NOW)
        return status;
    kvf_after *after = kvf_alloc0(1, sizeof *after);
    status = after ? make_room(agent) : kvf_nomem("an event to wait for");
    if (!status)
        status = watch(agent, event.fd, &after->fd);
    if (status) {
        kvf_free(after);
        return status;
    }
    after->ticket = ticket;
    DL_APPEND(agent->afters, after);
    agent->after_count++;
    agent->again = true; /* it may have happened */
    *out = after;
    return KVF_OK;
}

/* The descriptor is taken out by name: it stays open where the engine has it too. */
void kvf_after_drop(kvf_after *after) {
    if (!after)
        return;
    kvf_agent *agent = after->ticket->agent;
    (void)epoll_ctl(agent->poll_fd, EPOLL_CTL_DEL, after->fd, NULL);
    (void)close(after->fd);
    DL_DELETE(agent->afters, after);
    agent->after_count--;
    kvf_free(after);
}

static kvf_after *first_seen(const kvf_agent *agent) {
    kvf_after *after;
    DL_FOREACH(agent->afters, after) {
        if (after->seen)
            return after;
    }
    return NULL;
}

/* What hangs up without having been readable will never be. */
static void tell(kvf_after *after) {
    kvf_ticket *ticket = after->ticket;
    bool happened = after->seen & POLLIN;
    after->seen = 0;
    if (happened)
        ticket->ops->ready(ticket, after);
    else
        kvf_ticket_fail(ticket, KVF_E_IO,
                        "the event to wait for will never come: the other end of its descriptor was closed",
                        NULL);
}

void kvf_afters_look(kvf_agent *agent) {
    uint32_t count = 0;
    kvf_after *after;
    if (agent->after_count == 0)
        return;
    DL_FOREACH(agent->afters, after) {
        agent->after_polls[count++] = (struct pollfd){after->fd, POLLIN, 0};
    }
    if (poll(agent->after_polls, count, 0) <= 0)
        return;
    count = 0;
    DL_FOREACH(agent->afters, after) {
        after->seen = agent->after_polls[count++].revents;
    }
    while ((after = first_seen(agent))) /* a ticket may drop others of its own */
        tell(after);
}
