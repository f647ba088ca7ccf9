/*
 * Events that tickets wait for before memory is read: descriptors of the engine, and events of its devices' streams.
 *
 * Each descriptor is duplicated and added to the epoll that the agent sleeps on, and all are polled once a round. With
 * a duplicate, the engine may close its own, or give the same one several times. The driver does not report that a
 * device's event has happened: a timer makes the agent look.
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
        return KVF_OK;
    }
    return kvf_fail(
        KVF_E_INVALID,
        "after: kind is %d; allowed: 0 (now), 1 (a file descriptor) and 2 (an event of a CUDA stream)",
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

/* Opens the timer with the agent's first event of a device. */
static kvf_status open_looks(kvf_agent *agent) {
    if (agent->looks.fd >= 0)
        return KVF_OK;
    kvf_status status = kvf_looks_open(&agent->looks);
    if (!status)
        status = kvf_watch_add(agent->poll_fd, agent->looks.fd, NULL);
    if (status)
        kvf_looks_close(&agent->looks);
    return status;
}

static kvf_status take_moment(kvf_agent *agent, const kvf_ready_event *event, kvf_after *after) {
    after->fd = -1;
    kvf_status status = open_looks(agent);
    if (status)
        return status;
    status = kvf_cuda_moment_take(event->device, event->device_event, &after->moment);
    return status ? kvf_fail_in(status, "after: ") : KVF_OK;
}

kvf_status kvf_after_take(kvf_ticket *ticket, const kvf_ready_event *given, kvf_after **out) {
    kvf_agent *agent = ticket->agent;
    kvf_ready_event event;
    *out = NULL;
    kvf_status status = kvf_take_options(&event, sizeof event, given, "kvf_ready_event");
    if (!status)
        status = check(&event);
    if (status || event.kind == KVF_READY_NOW)
        return status;
    kvf_after *after = kvf_alloc0(1, sizeof *after);
    status = after ? make_room(agent) : kvf_nomem("an event to wait for");
    if (!status)
        status = event.kind == KVF_READY_FD ? watch(agent, event.fd, &after->fd)
                                            : take_moment(agent, &event, after);
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

/* The descriptor is removed explicitly, because it stays open if the engine has it too. */
void kvf_after_drop(kvf_after *after) {
    if (!after)
        return;
    kvf_agent *agent = after->ticket->agent;
    kvf_watch_close(agent->poll_fd, &after->fd);
    kvf_cuda_moment_drop(after->moment);
    DL_DELETE(agent->afters, after);
    agent->after_count--;
    if (agent->after_count == 0 && agent->looks.fd >= 0)
        kvf_looks_set(&agent->looks, false, false);
    kvf_free(after);
}

void kvf_asker_stop_waiting(kvf_asker *asker) {
    kvf_after_drop(asker->after);
    asker->after = NULL;
}

static kvf_after *first_seen(const kvf_agent *agent) {
    kvf_after *after;
    DL_FOREACH(agent->afters, after) {
        if (after->seen)
            return after;
    }
    return NULL;
}

/* A descriptor that hangs up without having been readable never will be. */
static void tell(kvf_after *after) {
    kvf_ticket *ticket = after->ticket;
    const kvf_status status =
        after->moment ? kvf_cuda_moment_status(after->moment)
        : after->seen & POLLIN
            ? KVF_OK
            : kvf_fail(KVF_E_IO,
                       "the event will never happen: the other end of its file descriptor was closed");
    after->seen = 0;
    if (status == KVF_OK)
        ticket->ops->ready(ticket, after);
    else if (status != KVF_IN_PROGRESS)
        kvf_ticket_fail(ticket, status, kvf_error_detail(), NULL);
}

/* The revents that poll() would give, if there were a descriptor. */
static short look_at(const kvf_after *after) {
    const kvf_status status = kvf_cuda_moment_status(after->moment);
    return status == KVF_IN_PROGRESS ? 0 : status ? POLLERR : POLLIN;
}

void kvf_afters_look(kvf_agent *agent) {
    uint32_t count = 0, waiting = 0;
    bool changed = false;
    kvf_after *after;
    if (agent->after_count == 0)
        return;
    /* Only descriptors: poll() takes no more entries than the process may have of these, whatever is in them. */
    DL_FOREACH(agent->afters, after) {
        if (!after->moment)
            agent->after_polls[count++] = (struct pollfd){after->fd, POLLIN, 0};
    }
    if (poll(agent->after_polls, count, 0) < 0)
        return;
    count = 0;
    DL_FOREACH(agent->afters, after) {
        after->seen = after->moment ? look_at(after) : agent->after_polls[count++].revents;
        changed = changed || (after->moment && after->seen);
        waiting += after->moment && !after->seen;
    }
    if (agent->looks.fd >= 0)
        kvf_looks_set(&agent->looks, waiting > 0, changed);
    while ((after = first_seen(agent))) /* a ticket may drop others of its own */
        tell(after);
}
