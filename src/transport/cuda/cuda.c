#include "transport/cuda/cuda.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/fork.h"

#define EVENTS 64
#define PATIENCE "cuda.patience_ms"
#define PATIENCE_MS 30000u
#define ALLOCATION "cuda.allocation"
#define BLOCKS "cuda.blocks"
#define BLOCKS_MOST 1024u /* more than any device has multiprocessors */

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static kvf_cuda_endpoint *endpoints; /* of this process; guarded by the gate */

/* A child has none of its parent's endpoints, and no thread that could be between the two calls below. */
static void renew_gate(void) {
    (void)pthread_mutex_init(&gate, NULL);
    endpoints = NULL;
}

static void watch_forks(void) {
    kvf_fork_renew(renew_gate);
}

void kvf_cuda_gate_enter(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, watch_forks);
    (void)pthread_mutex_lock(&gate);
}

void kvf_cuda_gate_leave(void) {
    (void)pthread_mutex_unlock(&gate);
}

/* ---- endpoints of this process ------------------------------------------------------------------ */

static void list(kvf_cuda_endpoint *endpoint) {
    kvf_cuda_gate_enter();
    KVF_LIST_ADD(endpoints, endpoint);
    kvf_cuda_gate_leave();
}

static void unlist(kvf_cuda_endpoint *endpoint) {
    kvf_cuda_gate_enter();
    if (endpoint->previous || endpoints == endpoint)
        KVF_LIST_REMOVE(endpoints, endpoint);
    kvf_cuda_gate_leave();
}

static kvf_status check_regions(const kvf_cuda_endpoint *endpoint, const kvf_cuda_region *regions,
                                uint32_t count, uint64_t generation) {
    for (uint32_t i = 0; i < count; i++)
        if (regions[i].bytes > 0 && (i >= endpoint->region_count ||
                                     memcmp(&regions[i], &endpoint->regions[i], sizeof regions[i]) != 0))
            return kvf_fail(KVF_E_NOT_REGISTERED,
                            "region %u has changed since generation %llu of the card: a new card is needed",
                            i, (unsigned long long)generation);
    return KVF_OK;
}

kvf_status kvf_cuda_check_ours(const kvf_cuda_card *card, const kvf_cuda_region *regions,
                               uint64_t generation) {
    kvf_cuda_gate_enter();
    const kvf_cuda_endpoint *found = endpoints;
    while (found && memcmp(found->card.name, card->name, CUDA_ID_BYTES) != 0)
        found = found->following;
    kvf_status status =
        found ? check_regions(found, regions, card->region_count, generation) : KVF_E_NOT_FOUND;
    kvf_cuda_gate_leave();
    return status;
}

/* ---- opening and closing ------------------------------------------------------------------------ */

static kvf_status take_settings(kvf_cuda_endpoint *endpoint, const kvf_transport_options *options) {
    const char *allocation = kvf_setting_of(options, ALLOCATION);
    uint32_t ms = PATIENCE_MS;
    endpoint->exportable = allocation && strcmp(allocation, "exportable") == 0;
    if (allocation && !endpoint->exportable && strcmp(allocation, "plain") != 0)
        return kvf_fail(KVF_E_INVALID, "transport setting %s is \"%s\"; allowed: plain, exportable",
                        ALLOCATION, kvf_excerpt_of(allocation, 40).text);
    kvf_status status = kvf_setting_number(options, PATIENCE, &ms);
    endpoint->patience_ns = ms * KVF_MILLISECOND;
    return status ? status : kvf_setting_up_to(options, BLOCKS, BLOCKS_MOST, &endpoint->most_blocks);
}

/* An id that all endpoints of this process share. A child of fork() is another process. */
static kvf_status process_id(unsigned char out[CUDA_ID_BYTES]) {
    static unsigned char id[CUDA_ID_BYTES];
    static pid_t of;
    kvf_status status = KVF_OK;
    kvf_cuda_gate_enter();
    if (of != getpid()) {
        status = kvf_random(id, sizeof id);
        of = status ? 0 : getpid();
    }
    memcpy(out, id, sizeof id);
    kvf_cuda_gate_leave();
    return status;
}

static kvf_status make_card(kvf_cuda_card *card) {
    card->place = kvf_neighbour_here();
    kvf_status status = kvf_random(card->name, CUDA_ID_BYTES);
    if (!status)
        status = kvf_random(card->key, CUDA_ID_BYTES);
    return status ? status : process_id(card->process);
}

static kvf_status open_descriptors(kvf_cuda_endpoint *endpoint) {
    endpoint->listen_watch = (kvf_cuda_watch){CUDA_WATCH_LISTEN, endpoint};
    endpoint->wake_watch = (kvf_cuda_watch){CUDA_WATCH_WAKE, endpoint};
    endpoint->looks_watch = (kvf_cuda_watch){CUDA_WATCH_LOOKS, endpoint};
    endpoint->timer_watch = (kvf_cuda_watch){CUDA_WATCH_TIMER, endpoint};
    kvf_status status = kvf_watch_open(&endpoint->epoll_fd);
    if (!status)
        status = kvf_wake_open(&endpoint->wake);
    if (!status)
        status = kvf_watch_add(endpoint->epoll_fd, endpoint->wake.fd, &endpoint->wake_watch);
    if (!status)
        status = kvf_looks_open(&endpoint->looks);
    if (!status)
        status = kvf_watch_add(endpoint->epoll_fd, endpoint->looks.fd, &endpoint->looks_watch);
    if (!status)
        status = kvf_timer_open(&endpoint->timer);
    if (!status)
        status = kvf_watch_add(endpoint->epoll_fd, endpoint->timer.fd, &endpoint->timer_watch);
    return status;
}

static void free_allocation(kvf_cuda_allocation *made) {
    if (made->exportable)
        kvf_segment_free(made->device, made->address, made->bytes);
    else
        kvf_cuda_free(made->device, made->address);
    kvf_free(made);
}

/* For the driver, freeing memory that another process has opened by a handle is undefined behaviour; a segment stays
 * for those that have mapped it. */
static bool has_handles(const kvf_cuda_endpoint *endpoint) {
    for (const kvf_cuda_allocation *made = endpoint->allocations; made; made = made->following)
        if (!made->exportable)
            return true;
    return false;
}

/* Memory that may be accessed stays until the process ends. Kernels of other endpoints of this process may read ours,
 * on other devices, too: drivers need not wait for them when they free memory. */
static void free_memory(kvf_cuda_endpoint *endpoint, bool quiet, bool hangs) {
    if (endpoint->allocations && !hangs)
        kvf_cuda_wait_for_devices();
    for (kvf_cuda_allocation *made = endpoint->allocations, *following; made; made = following) {
        following = made->following;
        if (hangs || (!quiet && !made->exportable))
            kvf_free(made);
        else
            free_allocation(made);
    }
}

static void cuda_close(void *self) {
    kvf_cuda_endpoint *endpoint = self;
    unlist(endpoint);
    const bool quiet = kvf_cuda_owner_close(endpoint, has_handles(endpoint));
    kvf_cuda_links_close(endpoint);
    const bool hangs = kvf_cuda_links_hang(endpoint);
    kvf_cuda_links_keep(endpoint);
    for (uint32_t i = 0; i < KVF_CUDA_DEVICES_MAX; i++)
        (void)kvf_copier_close(endpoint->copiers[i]); /* a copier with a copy that does not end stays open */
    free_memory(endpoint, quiet, hangs);
    kvf_fences_free(&endpoint->fences);
    kvf_wake_close(&endpoint->wake);
    kvf_looks_close(&endpoint->looks);
    kvf_timer_close(&endpoint->timer);
    kvf_fd_close(&endpoint->epoll_fd);
    kvf_free(endpoint->regions);
    kvf_free(endpoint->devices);
    kvf_free(endpoint);
}

/* Every endpoint that is opened as "auto" calls this, so it does not start the driver before there is CUDA memory. */
static kvf_status cuda_open(kvf_transport *transport, const kvf_transport_options *options, void **out) {
    const kvf_cuda *cuda;
    kvf_cuda_endpoint *endpoint = kvf_alloc0(1, sizeof *endpoint);
    if (!endpoint)
        return kvf_nomem("an endpoint");
    endpoint->transport = transport;
    endpoint->epoll_fd = endpoint->listen_fd = endpoint->spare_fd = -1;
    endpoint->looks.fd = endpoint->wake.fd = -1;
    endpoint->timer = (kvf_timer){-1, UINT64_MAX};
    kvf_status status = kvf_transport_is_automatic(transport) ? KVF_OK : kvf_cuda_find(&cuda);
    if (!status)
        status = take_settings(endpoint, options);
    if (!status)
        status = make_card(&endpoint->card);
    if (!status)
        status = open_descriptors(endpoint);
    if (status) {
        cuda_close(endpoint);
        return status;
    }
    list(endpoint);
    *out = endpoint;
    return KVF_OK;
}

/* Agents log what was found; that must not start the driver. */
static void cuda_found(void *self, kvf_transport_finding *out) {
    const kvf_cuda *cuda;
    (void)self;
    if (kvf_cuda_load(&cuda)) {
        out->works = false;
        (void)snprintf(out->why_not, sizeof out->why_not, "%s", kvf_error_detail());
        return;
    }
    (void)snprintf(out->library, sizeof out->library, "libcuda.so.1");
    (void)snprintf(out->version, sizeof out->version, "%u.%u", cuda->version / 1000,
                   cuda->version % 1000 / 10);
    for (uint32_t i = 0; i < cuda->device_count; i++) {
        const size_t used = strlen(out->ways);
        (void)snprintf(out->ways + used, sizeof out->ways - used, "%scuda:%u/sm_%u%u", used ? " " : "", i,
                       cuda->devices[i].major, cuda->devices[i].minor);
    }
}

/* ---- memory and card ---------------------------------------------------------------------------- */

/* Zeroes all of it, because readers may map all of it. */
static kvf_status allocate_segment(kvf_cuda_allocation *made) {
    kvf_status status = kvf_segment_allocate(made->device, made->bytes, &made->address, &made->bytes);
    if (status)
        return status;
    status = kvf_cuda_zero(made->device, made->address, made->bytes);
    if (status)
        kvf_segment_free(made->device, made->address, made->bytes);
    return status;
}

static kvf_status cuda_allocate(void *self, kvf_memory_kind kind, uint32_t device, uint64_t bytes,
                                void **out) {
    kvf_cuda_endpoint *endpoint = self;
    (void)kind;
    kvf_cuda_allocation *made = kvf_alloc0(1, sizeof *made);
    if (!made)
        return kvf_nomem("memory of a device");
    *made = (kvf_cuda_allocation){.device = device, .bytes = bytes, .exportable = endpoint->exportable};
    kvf_status status =
        made->exportable ? allocate_segment(made) : kvf_cuda_allocate(device, bytes, &made->address);
    if (status) {
        kvf_free(made);
        return status;
    }
    made->following = endpoint->allocations;
    endpoint->allocations = made;
    *out = (void *)(uintptr_t)made->address;
    return KVF_OK;
}

static kvf_status make_room(kvf_cuda_endpoint *endpoint, uint32_t region) {
    kvf_cuda_region *regions = kvf_resize(endpoint->regions, (size_t)region + 1, sizeof *regions);
    if (regions)
        endpoint->regions = regions;
    uint32_t *devices = kvf_resize(endpoint->devices, (size_t)region + 1, sizeof *devices);
    if (devices)
        endpoint->devices = devices;
    if (!regions || !devices)
        return kvf_nomem("a region");
    for (; endpoint->region_count <= region; endpoint->region_count++) {
        regions[endpoint->region_count] = (kvf_cuda_region){0};
        devices[endpoint->region_count] = 0;
    }
    return KVF_OK;
}

static kvf_status get_handle(uint32_t device, CUdeviceptr base, CUipcMemHandle *out) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    const CUresult result = cuda->cuIpcGetMemHandle(out, base);
    kvf_cuda_leave(cuda);
    if (!result)
        return KVF_OK;
    (void)kvf_cuda_status(device, result, "getting a handle");
    return kvf_fail_in(KVF_E_UNSUPPORTED,
                       "the driver cannot share this memory with other processes, as that of a memory pool "
                       "(cuMemAllocAsync()) or of another process (cuIpcOpenMemHandle()); register it as "
                       "withheld: ");
}

static kvf_status describe(const kvf_memory *memory, kvf_cuda_region *out) {
    const kvf_cuda *cuda;
    kvf_cuda_place place;
    const CUdeviceptr address = (CUdeviceptr)(uintptr_t)memory->address;
    kvf_status status = kvf_cuda_find(&cuda);
    if (!status)
        status = kvf_cuda_place_of(memory->device, address, memory->bytes, &place);
    if (status)
        return status;
    *out = (kvf_cuda_region){.device = cuda->devices[memory->device].uuid,
                             .base = place.base,
                             .allocation_bytes = place.bytes,
                             .offset = place.offset,
                             .bytes = memory->bytes,
                             .segments = place.segments};
    return place.segments > 0 ? kvf_segments_check(memory->device, &place)
                              : get_handle(memory->device, place.base, &out->handle);
}

static kvf_status listen_for_readers(kvf_cuda_endpoint *endpoint) {
    if (endpoint->listen_fd >= 0)
        return KVF_OK;
    endpoint->spare_fd = kvf_neighbour_spare();
    kvf_status status = kvf_cuda_wire_listen(endpoint->card.name, &endpoint->listen_fd);
    if (!status)
        status = kvf_watch_add(endpoint->epoll_fd, endpoint->listen_fd, &endpoint->listen_watch);
    if (status) {
        kvf_fd_close(&endpoint->listen_fd);
        kvf_fd_close(&endpoint->spare_fd);
    }
    return status;
}

static kvf_status cuda_register(void *self, uint32_t region, const kvf_memory *memory) {
    kvf_cuda_endpoint *endpoint = self;
    const kvf_copier_options options = {.most_blocks = endpoint->most_blocks,
                                        .jobs = CUDA_JOBS,
                                        .boxes = CUDA_BOXES,
                                        .ids = CUDA_IDS,
                                        .plain = true};
    kvf_cuda_region described;
    kvf_status status = describe(memory, &described);
    if (!status && !endpoint->copiers[memory->device])
        status = kvf_copier_open(memory->device, &options, &endpoint->copiers[memory->device]);
    if (!status)
        status = listen_for_readers(endpoint);
    if (status)
        return status;
    kvf_cuda_gate_enter();
    if (region >= endpoint->region_count)
        status = make_room(endpoint, region);
    if (!status) {
        endpoint->regions[region] = described;
        endpoint->devices[region] = memory->device;
        endpoint->version++;
    }
    kvf_cuda_gate_leave();
    return status;
}

static kvf_status cuda_unregister(void *self, uint32_t region) {
    kvf_cuda_endpoint *endpoint = self;
    kvf_cuda_gate_enter();
    endpoint->regions[region] = (kvf_cuda_region){0};
    endpoint->version++;
    kvf_cuda_gate_leave();
    const bool hang = kvf_cuda_links_hang(endpoint);
    kvf_status status = kvf_cuda_owner_take_back(endpoint);
    if (hang && !status)
        status = kvf_fail(KVF_E_AGAIN,
                          "the device has not finished a copy of a connection that was closed: it may "
                          "still read or write this memory");
    return status;
}

/* Writes nothing if there is no memory: then no peer needs to connect. */
static kvf_status cuda_card(void *self, kvf_buffer *out) {
    const kvf_cuda_endpoint *endpoint = self;
    kvf_cuda_card card = endpoint->card;
    bool any = false;
    (void)kvf_transport_regions(endpoint->transport, endpoint, &card.region_count);
    for (uint32_t i = 0; i < endpoint->region_count; i++)
        any = any || endpoint->regions[i].bytes > 0;
    if (!any)
        return KVF_OK;
    kvf_status status = kvf_buffer_add(out, &card, sizeof card);
    for (uint32_t i = 0; i < card.region_count && !status; i++) {
        const kvf_cuda_region none = {0};
        status = kvf_buffer_add(out, i < endpoint->region_count ? &endpoint->regions[i] : &none, sizeof none);
    }
    return status;
}

static int cuda_event_fd(void *self) {
    return ((kvf_cuda_endpoint *)self)->epoll_fd;
}

/* ---- progress ----------------------------------------------------------------------------------- */

static bool handle(const struct epoll_event *event) {
    const kvf_cuda_watch *watch = event->data.ptr;
    switch (watch->kind) {
    case CUDA_WATCH_LISTEN:
        kvf_cuda_owner_accept(watch->owner);
        return false;
    case CUDA_WATCH_CLIENT:
        return kvf_cuda_owner_read(watch->owner);
    case CUDA_WATCH_LINK:
        (void)kvf_cuda_link_lose_if_gone(watch->owner);
        return false;
    case CUDA_WATCH_LOOKS: /* progress() does its work in any case, and sets it anew */
    case CUDA_WATCH_TIMER:
    case CUDA_WATCH_WAKE:
        return false;
    }
    return false;
}

/* Each link in turn goes first, for a device may have fewer jobs than links. */
static uint32_t move_links(kvf_cuda_endpoint *endpoint) {
    kvf_cuda_link *first = endpoint->first_to_go ? endpoint->first_to_go : endpoint->links, *link = first;
    uint32_t under_way = 0;
    endpoint->first_to_go = first ? first->following : NULL;
    while (link) {
        kvf_cuda_copy_move(link);
        under_way += kvf_cuda_copy_waits(link);
        link = link->following ? link->following : endpoint->links;
        if (link == first)
            break;
    }
    return under_way;
}

static kvf_status cuda_progress(void *self, bool *busy) {
    kvf_cuda_endpoint *endpoint = self;
    struct epoll_event events[EVENTS];
    const int count = epoll_wait(endpoint->epoll_fd, events, EVENTS, 0);
    if (count < 0 && errno != EINTR)
        return kvf_fail(KVF_E_IO, "epoll_wait: %s", strerror(errno));
    bool more = count == EVENTS;
    for (int i = 0; i < count; i++)
        more = handle(&events[i]) || more;
    if (count < EVENTS) /* a client whose HELLO is due had its event before */
        kvf_cuda_owner_expire(endpoint);
    endpoint->changed = false;
    uint32_t waiting = move_links(endpoint);
    kvf_wake_set(&endpoint->wake, more);
    for (kvf_cuda_link *link = endpoint->links, *following; link; link = following) {
        following = link->following;
        waiting += kvf_cuda_link_report(link);
    }
    kvf_looks_set(&endpoint->looks, waiting > 0, endpoint->changed);
    *busy = more;
    return KVF_OK;
}

static const char *const settings[] = {PATIENCE, ALLOCATION, BLOCKS, NULL};

extern const kvf_fabric kvf_fabric_cuda;

const kvf_fabric kvf_fabric_cuda = {
    .kind =
        {
            .name = "cuda",
            .reach = KVF_REACH_HOST,
            .memory_kinds = 1u << KVF_MEMORY_CUDA,
            .allocates = 1u << KVF_MEMORY_CUDA,
            .directions = 1u << KVF_READ | 1u << KVF_WRITE,
            .one_sided = true,
            .served = true, /* for writes, the owner must read */
            .lists = true,
            .fences = true,
            .in_flight = CUDA_COPIES,
            /* Reading between two processes on one device, by pages: 0.26 of the driver's copy (1414 GB/s) from 1 KiB
             * on, 0.19 and 0.08 in runs of 256 and 64 B, and 25 us for a single run. Measured on one NVIDIA H100 (80
             * GB HBM3, driver 580.159, 27 November 2026; docs/performance.md). Not measured: two devices. Writing is
             * a little faster, but a single run takes 61 us; and lists of runs take a hundred times as long. */
            .cost = {.ns_per_run = 0.3, .ns_per_byte = 1 / 368.0, .ns_per_source = 25e3},
            .settings = settings,
        },
    .open = cuda_open,
    .allocate = cuda_allocate,
    .register_region = cuda_register,
    .unregister_region = cuda_unregister,
    .card = cuda_card,
    .connect = kvf_cuda_link_connect,
    .nests = true,
    .submit = kvf_cuda_copy_submit,
    .cancel = kvf_cuda_copy_cancel,
    .notify = kvf_cuda_link_notify,
    .way = kvf_cuda_link_way,
    .refusal = kvf_cuda_link_refusal,
    .disconnect = kvf_cuda_link_disconnect,
    .quiet = kvf_cuda_link_quiet,
    .fence = kvf_cuda_owner_fence,
    .admit = kvf_cuda_owner_admit,
    .stop_writing = kvf_cuda_write_stop,
    .found = cuda_found,
    .progress = cuda_progress,
    .event_fd = cuda_event_fd,
    .close = cuda_close,
};
