#include "transport/shm/shm.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#define EVENTS 64
#define DIRECT "shm.direct"
#define BACKLOG 16 /* short, so that few strangers are ahead of a consumer; if it is full, consumers retry */
#define LOOKS_OF_A_TURN 4u

_Static_assert(SHM_ID_BYTES == KVF_FENCE_NAME_BYTES, "peers are fenced by their ids");

/* ---- descriptors ----------------------------------------------------------------------------- */

void kvf_shm_watch_change(const kvf_shm_endpoint *endpoint, int fd, kvf_shm_watch *watch, bool read,
                          bool write) {
    struct epoll_event event = {.events = (read ? EPOLLIN : 0u) | (write ? EPOLLOUT : 0u), .data.ptr = watch};
    (void)epoll_ctl(endpoint->epoll_fd, EPOLL_CTL_MOD, fd, &event);
}

/* ---- opening --------------------------------------------------------------------------------- */

static kvf_status make_card(kvf_shm_card *card) {
    card->place = kvf_neighbour_here();
    card->started = kvf_neighbour_started(getpid());
    kvf_status status = kvf_random(card->name, SHM_ID_BYTES);
    return status ? status : kvf_random(card->key, SHM_ID_BYTES);
}

static kvf_status open_descriptors(kvf_shm_endpoint *endpoint) {
    endpoint->spare_fd = kvf_neighbour_spare();
    kvf_status status = kvf_watch_open(&endpoint->epoll_fd);
    if (!status)
        status = kvf_timer_open(&endpoint->timer);
    if (!status)
        status = kvf_wake_open(&endpoint->wake);
    if (!status)
        status = kvf_neighbour_listen(SHM_SOCKET_PREFIX, endpoint->card.name, BACKLOG, &endpoint->listen_fd);
    endpoint->listen_watch = (kvf_shm_watch){SHM_WATCH_LISTEN, endpoint};
    endpoint->wake_watch = (kvf_shm_watch){SHM_WATCH_WAKE, endpoint};
    endpoint->timer_watch = (kvf_shm_watch){SHM_WATCH_TIMER, endpoint};
    if (!status)
        status = kvf_watch_add(endpoint->epoll_fd, endpoint->listen_fd, &endpoint->listen_watch);
    if (!status)
        status = kvf_watch_add(endpoint->epoll_fd, endpoint->wake.fd, &endpoint->wake_watch);
    if (!status)
        status = kvf_watch_add(endpoint->epoll_fd, endpoint->timer.fd, &endpoint->timer_watch);
    return status;
}

static uint64_t descriptors_allowed(void) {
    struct rlimit limit;
    return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 1024;
}

static void shm_close(void *self) {
    kvf_shm_endpoint *endpoint = self;
    kvf_shm_close_clients(endpoint);
    kvf_fences_free(&endpoint->fences);
    for (uint32_t i = 0; i < endpoint->arena_count; i++) {
        (void)munmap(endpoint->arenas[i].address, endpoint->arenas[i].bytes);
        kvf_fd_close(&endpoint->arenas[i].fd);
    }
    kvf_free(endpoint->arenas);
    kvf_neighbour_stop_listening(&endpoint->listen_fd);
    kvf_wake_close(&endpoint->wake);
    kvf_timer_close(&endpoint->timer);
    kvf_fd_close(&endpoint->spare_fd);
    kvf_fd_close(&endpoint->epoll_fd);
    kvf_free(endpoint);
}

static kvf_status take_settings(kvf_shm_endpoint *endpoint, const kvf_transport_options *options) {
    const char *direct = kvf_setting_of(options, DIRECT);
    endpoint->no_direct_read = direct && strcmp(direct, "off") == 0;
    endpoint->only_direct = direct && strcmp(direct, "on") == 0;
    if (direct && !endpoint->no_direct_read && !endpoint->only_direct && strcmp(direct, "auto") != 0)
        return kvf_fail(KVF_E_INVALID, "transport setting %s is \"%s\"; allowed: auto, on, off", DIRECT,
                        direct);
    return KVF_OK;
}

static kvf_status shm_open_endpoint(kvf_transport *transport, const kvf_transport_options *options,
                                    void **out) {
    kvf_shm_endpoint *endpoint = kvf_alloc0(1, sizeof *endpoint);
    if (!endpoint)
        return kvf_nomem("an endpoint");
    endpoint->transport = transport;
    endpoint->slots = SHM_SLOTS;
    if (options->max_in_flight > 0 && options->max_in_flight < SHM_SLOTS)
        endpoint->slots = options->max_in_flight;
    endpoint->epoll_fd = endpoint->listen_fd = endpoint->wake.fd = endpoint->timer.fd = -1;
    endpoint->spare_fd = -1;
    kvf_shm_tenants_open(&endpoint->tenants, descriptors_allowed());
    kvf_status status = take_settings(endpoint, options);
    if (!status)
        status = make_card(&endpoint->card);
    if (!status)
        status = open_descriptors(endpoint);
    if (status)
        shm_close(endpoint);
    else
        *out = endpoint;
    return status;
}

/* ---- memory and card ------------------------------------------------------------------------- */

static kvf_status shm_allocate(void *self, kvf_memory_kind kind, uint32_t device, uint64_t bytes,
                               void **out) {
    kvf_shm_endpoint *endpoint = self;
    (void)kind, (void)device; /* host memory only */
    kvf_shm_arena *grown = kvf_resize(endpoint->arenas, endpoint->arena_count + 1, sizeof *grown);
    if (!grown)
        return kvf_nomem("shared memory");
    endpoint->arenas = grown;
    kvf_shm_arena arena = {.bytes = bytes};
    kvf_status status = kvf_shm_make_memory(&arena.bytes, &arena.fd, &arena.address);
    if (status)
        return status;
    endpoint->arenas[endpoint->arena_count++] = arena;
    *out = arena.address;
    return KVF_OK;
}

/* Uses the front's table, and needs none of its own. */
static kvf_status shm_register(void *self, uint32_t region, const kvf_memory *memory) {
    (void)self, (void)region, (void)memory;
    return KVF_OK;
}

/* Strangers with an older card are refused in their HELLO. A client is judged by when it came and not by what it says. */
static kvf_status shm_unregister(void *self, uint32_t region) {
    kvf_shm_endpoint *endpoint = self;
    (void)region;
    kvf_status result = KVF_OK;
    for (kvf_shm_client *client = endpoint->clients; client; client = client->following) {
        if (client->oldest == kvf_transport_oldest(endpoint->transport))
            continue;
        kvf_shm_client_refuse(client, SHM_REFUSED_GENERATION);
        kvf_status status = kvf_shm_client_shut_out(client);
        result = status ? status : result;
    }
    kvf_wake_set(&endpoint->wake, true); /* to hang up */
    return result;
}

static kvf_status shm_write_card(void *self, kvf_buffer *out) {
    const kvf_shm_endpoint *endpoint = self;
    kvf_shm_card card = endpoint->card;
    uint32_t count;
    const kvf_memory *regions = kvf_transport_regions(endpoint->transport, endpoint, &count);
    for (uint32_t i = 0; i < count; i++)
        card.brought +=
            regions[i].bytes > 0 && kvf_shm_describe_region(endpoint, &regions[i]).arena == SHM_NO_ARENA;
    return kvf_buffer_add(out, &card, sizeof card);
}

static void shm_count(const void *self, kvf_transport_info *info) {
    const kvf_shm_endpoint *endpoint = self;
    const kvf_shm_tenants *tenants = &endpoint->tenants;
    info->clients += tenants->clients;
    info->clients_max += tenants->clients_max;
    for (const kvf_shm_tenant *tenant = tenants->all; tenant; tenant = tenant->next)
        info->processes++;
    for (const kvf_shm_client *client = endpoint->clients; client; client = client->following)
        info->stuck += client->retired;
    info->buffer_bytes += tenants->buffer_bytes;
    info->cut_buffers += tenants->cut_buffers;
    info->refused += tenants->refused;
}

static int shm_event_fd(void *self) {
    return ((kvf_shm_endpoint *)self)->epoll_fd;
}

/* ---- progress -------------------------------------------------------------------------------- */

static void handle(const struct epoll_event *event) {
    const kvf_shm_watch *watch = event->data.ptr;
    switch (watch->kind) {
    case SHM_WATCH_LISTEN:
        kvf_shm_knock(watch->owner);
        break;
    case SHM_WATCH_CLIENT:
        kvf_shm_client_wants(watch->owner, event->events);
        break;
    case SHM_WATCH_LINK:
        kvf_shm_link_read(watch->owner);
        break;
    case SHM_WATCH_TIMER:
        kvf_timer_set(&((kvf_shm_endpoint *)watch->owner)->timer,
                      UINT64_MAX); /* late answers: kvf_shm_link_move() */
        kvf_shm_open_door(watch->owner);
        break;
    case SHM_WATCH_WAKE:
        break;
    }
}

static void report_lost(kvf_shm_endpoint *endpoint) {
    for (kvf_shm_link *link = endpoint->links; link; link = link->following) {
        kvf_peer *peer = link->peer;
        if (!link->lost || !peer)
            continue;
        const bool lives = kvf_shm_link_owner_lives(link);
        kvf_shm_link_hang_up(link);
        (lives ? kvf_peer_refused : kvf_peer_lost)(peer, link->why);
    }
}

static kvf_status look(const kvf_shm_endpoint *endpoint, int *count) {
    struct epoll_event events[EVENTS];
    *count = epoll_wait(endpoint->epoll_fd, events, EVENTS, 0);
    if (*count < 0 && errno != EINTR)
        return kvf_fail(KVF_E_IO, "epoll_wait: %s", strerror(errno));
    for (int i = 0; i < *count; i++)
        handle(&events[i]);
    return KVF_OK;
}

/* Looks for new messages in between, so that no client waits for all the work that others had asked for before. */
static kvf_status serve_clients(kvf_shm_endpoint *endpoint, bool *more) {
    const uint64_t part = KVF_SLICE_BYTES / LOOKS_OF_A_TURN;
    int count = 0;
    uint64_t work = part;
    kvf_shm_open_door(endpoint);
    for (uint32_t i = 0; i < LOOKS_OF_A_TURN && work >= part; i++) {
        kvf_status status = look(endpoint, &count);
        if (status)
            return status;
        work = kvf_shm_take_turns(endpoint, part);
    }
    bool unswept = kvf_shm_sweep_clients(endpoint);
    *more = unswept || endpoint->tenants.turns.first || count == EVENTS;
    return KVF_OK;
}

static kvf_status shm_progress(void *self, bool *busy) {
    kvf_shm_endpoint *endpoint = self;
    bool more = false;
    kvf_status status = serve_clients(endpoint, &more);
    if (status)
        return status;

    uint32_t moving = 0;
    for (const kvf_shm_link *link = endpoint->links; link; link = link->following)
        moving += link->ready && !link->lost && link->slices.current;
    for (kvf_shm_link *link = endpoint->links; link; link = link->following)
        if (link->peer && !link->lost && kvf_shm_link_move(link, KVF_SLICE_BYTES / (moving ? moving : 1)))
            more = true;
    report_lost(endpoint);
    kvf_wake_set(&endpoint->wake, more);
    *busy = more;
    return KVF_OK;
}

/* ---- costs ----------------------------------------------------------------------------------- */

/* Copies as kvf_shm_direct() does, but within our own process. */
static bool copy_by_system_call(const kvf_yardstick *yardstick, const kvf_run *runs, size_t count) {
    struct iovec local[SHM_VECTORS], remote[SHM_VECTORS];
    for (size_t first = 0; first < count; first += SHM_VECTORS) {
        size_t bytes = 0, at = 0;
        for (; at < SHM_VECTORS && first + at < count; at++) {
            const kvf_run *run = &runs[first + at];
            local[at] = (struct iovec){yardstick->to + run->local_offset, run->bytes};
            remote[at] = (struct iovec){yardstick->from + run->remote_offset, run->bytes};
            bytes += run->bytes;
        }
        if (process_vm_readv(getpid(), local, at, remote, at, 0) != (ssize_t)bytes)
            return false;
    }
    return true;
}

static void shm_measure(const kvf_yardstick *yardstick, kvf_cost_model *cost, kvf_cost_model *apart) {
    kvf_copy_price alone;
    kvf_yardstick part = *yardstick; /* each run's pages are found anew, so fewer bytes suffice */
    part.bytes /= 4;
    kvf_cost_price(cost, &yardstick->mapped);
    if (kvf_yardstick_runs(&part, copy_by_system_call, &alone))
        kvf_cost_price(apart, &alone);
}

static const char *const settings[] = {DIRECT, NULL};

extern const kvf_fabric kvf_fabric_shm;

const kvf_fabric kvf_fabric_shm = {
    .kind =
        {
            .name = "shm",
            .reach = KVF_REACH_HOST,
            .memory_kinds = 1u << KVF_MEMORY_HOST,
            .allocates = 1u << KVF_MEMORY_HOST,
            .directions = 1u << KVF_READ | 1u << KVF_WRITE,
            .one_sided = true,
            .served = true,
            .lists = true,
            .fences = true,
            .in_flight = SHM_SLOTS,
            /* A copied run costs a call and the misses of two scattered places. */
            .cost = {.ns_per_run = 60, .ns_per_byte = 0.125, .ns_per_source = 5e3},
            .settings = settings,
        },
    .open = shm_open_endpoint,
    .allocate = shm_allocate,
    .register_region = shm_register,
    .unregister_region = shm_unregister,
    .card = shm_write_card,
    .connect = kvf_shm_connect,
    .submit = kvf_shm_submit,
    .cancel = kvf_shm_cancel,
    .notify = kvf_shm_notify,
    /* A system call finds the pages of each run anew. */
    .apart = {"shm/brought", {.ns_per_run = 250, .ns_per_byte = 0.15, .ns_per_source = 5e3}},
    .is_apart = kvf_shm_is_brought,
    .measure = shm_measure,
    .enter = kvf_shm_enter,
    .leave = kvf_shm_leave,
    .way = kvf_shm_link_way,
    .disconnect = kvf_shm_disconnect,
    .fence = kvf_shm_fence,
    .admit = kvf_shm_admit,
    .progress = shm_progress,
    .count = shm_count,
    .event_fd = shm_event_fd,
    .close = shm_close,
};
