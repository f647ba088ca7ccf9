/*
 * The UCX fabric: one-sided reads and writes by the transport that UCX selects: shared memory, TCP, RDMA, also
 * from and to CUDA memory.
 *
 * An endpoint is one UCX context and one worker; a link is one UCX endpoint with peer error handling, so that
 * a peer that dies ends its operations instead of leaving them hanging. UCX's shared memory transports offer
 * that only when asked (the *_ERROR_HANDLING settings below). They never notice an endpoint that closes while its
 * process lives on, and notice a death only after up to 20 seconds: for peers on the same machine the beacon does.
 *
 * Which side must make progress. UCX moves bytes without the peer's help only where the transport can: RDMA, and
 * shared memory that was allocated here by kvf_transport_allocate(), which the peer maps (from UCX 1.16 on to write to
 * it, not to read from it). UCX emulates everything else by messages, and then operations move only while the peer
 * calls kvf_transport_progress(): always for TCP; for shared memory if the caller brought the region (UCX 1.13 uses CMA
 * only for its rendezvous protocol, never for one-sided access). Operations on a peer that makes no progress wait, and
 * so does cancelling them, for UCX cannot take back what is in flight; kvf_peer_close() does not wait, but over shared
 * memory whose queue is full (ucx_link.c).
 *
 * What a peer can reach. Runs that this side submits are checked as in every fabric. But if UCX emulates, the
 * target's UCX serves any address that a message names, registered or not: UCX trusts every peer that has a
 * worker's address. So "auto" leaves out a UCX that finds no RDMA ("ucx.emulated"), agents that name "ucx" there give
 * keys only to their arena, and users must give a card only to peers that they trust with the whole process.
 *
 * UCX is loaded when the first endpoint opens (ucx_library.c); endpoints of one process may use different ones.
 * UCX itself reads the environment (UCX_TLS, UCX_NET_DEVICES, ...); nothing is ever written there.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/descriptors.h"
#include "transport/ucx/ucx.h"

#define IN_FLIGHT_DEFAULT 64u
/* A worker opens about 15, more on a host with more networks. UCX aborts if it cannot open some of them. */
#define DESCRIPTORS_OF_UCX 64u
#define TLS "ucx.tls"
#define LIBRARY "ucx.library"
#define DEVICES "ucx.devices"
#define EMULATED "ucx.emulated"
#define LATE "ucx.late_ms"
#define ROUNDS_A_PROGRESS 32u
/* How often progress() finds nothing before it goes to sleep: between busy peers the next message comes
 * within microseconds, and arming costs several system calls. */
#define IDLE_ROUNDS_MAX 64u
#define LOOK_AROUND_EVERY 64u

/* ---- notifications that come in -------------------------------------------------------------- */

/* More than all notifications that one call of ucp_worker_progress() brings: its transports take only a small
 * multiple of their 8 KiB segments out of their queues and sockets at once. */
#define NOTICES_A_PROGRESS (512u << 10)

/* The header is the sender's name. */
static ucs_status_t on_notify(void *argument, const void *header, size_t header_bytes, void *data,
                              size_t bytes, const ucp_am_recv_param_t *param) {
    kvf_ucx_endpoint *endpoint = argument;
    char sender[KVF_SENDER_MAX + 1] = "";
    /* kvferry always sends them whole; other messages are not from kvferry, and are dropped. */
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) || bytes == 0 || bytes > KVF_NOTICE_MAX ||
        header_bytes > KVF_SENDER_MAX)
        return UCS_OK;
    if (header_bytes > 0)
        memcpy(sender, header, header_bytes);
    if (kvf_deliver(endpoint->transport, sender, data, bytes))
        endpoint->notice_lost = true;
    return UCS_OK;
}

/* ---- opening --------------------------------------------------------------------------------- */

/*
 * Sets kvferry's preferences for parts of UCX, unless the user has set the same variable, or `unless`. Versions of UCX
 * know a part's setting by one name or the other; a version that knows neither keeps its own behaviour.
 *
 * UCX would give up a host that is silent within 20 seconds; here it waits a minute, for network links come back, and
 * leases limit the wait.
 *
 * Emulated operations go in segments, each with system calls on both sides and, when writing, an answer. UCX's segments
 * of 8 KiB take up to half more processor time than these. A receiver takes up to UCX_TCP_RX_SEG_SIZE at once, 64 KiB
 * unless a user says otherwise; longer segments than these are often cut there and moved.
 *
 * Instead of a device's memory as it is told, UCX would register the allocation that it finds there. Of memory in
 * segments it finds the first only, and the reads and writes of the others end the connection (up to 1.22). If it has not
 * seen the driver map the memory (before 1.18), it finds none.
 */
static void prefer(const kvf_ucx_library *ucx, ucp_config_t *config) {
    static const struct {
        const char *part, *setting, *value, *unless;
    } preferred[] = {{"TCP_", "KEEPIDLE", "30s", NULL},
                     {"TCP_", "KEEPINTVL", "10s", NULL},
                     {"TCP_", "TX_SEG_SIZE", "48k", "UCX_TCP_RX_SEG_SIZE"},
                     {"CUDA_COPY_", "REG_WHOLE_ALLOC", "off", NULL},
                     {"", "MEMTYPE_REG_WHOLE_ALLOC_TYPES", "", NULL}};
    for (size_t i = 0; i < sizeof preferred / sizeof *preferred; i++) {
        const char *setting = preferred[i].setting, *unless = preferred[i].unless;
        char variable[64];
        (void)snprintf(variable, sizeof variable, "UCX_%s%s", preferred[i].part, setting);
        if (getenv(variable) || (unless && getenv(unless)))
            continue;
        (void)ucx->ucp_config_modify(config, variable + strlen("UCX_"), preferred[i].value);
        (void)ucx->ucp_config_modify(config, setting, preferred[i].value);
    }
}

/* Whether UCX's configuration has this line, of its files (ucx.conf), too. True if this UCX does not tell. */
static bool has_line(const kvf_ucx_library *ucx, const ucp_config_t *config, const char *wanted) {
    char *text = NULL, *rest, *line;
    size_t length = 0;
    FILE *memory = ucx->ucp_config_print ? open_memstream(&text, &length) : NULL;
    bool found = false;
    if (!memory)
        return true;
    ucx->ucp_config_print(config, memory, NULL, UCS_CONFIG_PRINT_CONFIG);
    const bool written = fclose(memory) == 0;
    rest = text;
    while (written && !found && (line = strsep(&rest, "\n")) != NULL)
        found = strcmp(line, wanted) == 0;
    free(text);
    return found || !written;
}

/*
 * Leaves cuda_ipc out, unless the user has chosen UCX's transports. It opens the memory of a peer's device by IPC handles
 * and keeps it open in a cache of the process, beyond the connection and the endpoint. So no owner could wait until its
 * memory may be freed, as those of the fabric "cuda" do, which serves devices of one host.
 *
 * A UCX of 1.13 to 1.16 warns that it has no cuda_ipc if it has none. It has no other reason for such a warning if the
 * user has not chosen its devices either.
 */
static void leave_out_handles(const kvf_ucx_library *ucx, const kvf_transport_options *options,
                              ucp_config_t *config) {
    if (kvf_setting_of(options, TLS) || getenv("UCX_TLS") || !has_line(ucx, config, "UCX_TLS=all"))
        return;
    (void)ucx->ucp_config_modify(config, "TLS", "^cuda_ipc");
    if (!kvf_setting_of(options, DEVICES) && !getenv("UCX_NET_DEVICES") && !getenv("UCX_WARN_INVALID_CONFIG"))
        (void)ucx->ucp_config_modify(config, "WARN_INVALID_CONFIG", "n");
}

static kvf_status configure(const kvf_ucx_library *ucx, const kvf_transport_options *options,
                            ucp_config_t **out) {
    ucs_status_t status = ucx->ucp_config_read(NULL, NULL, out);
    if (status != UCS_OK)
        return kvf_ucx_fail(ucx, status, "configuration");
    /* Only these methods give zeroed memory that peers can map. */
    const char *settings[][2] = {{"MM_ERROR_HANDLING", "y"},
                                 {"ALLOC_PRIO", "md:sysv,md:posix,huge,mmap"},
                                 {"TLS", kvf_setting_of(options, TLS)},
                                 {"NET_DEVICES", kvf_setting_of(options, DEVICES)}};
    for (size_t i = 0; i < sizeof settings / sizeof *settings && status == UCS_OK; i++)
        if (settings[i][1])
            status = ucx->ucp_config_modify(*out, settings[i][0], settings[i][1]);
    prefer(ucx, *out);
    leave_out_handles(ucx, options, *out);
    if (status == UCS_OK)
        return KVF_OK;
    ucx->ucp_config_release(*out);
    return kvf_ucx_fail(ucx, status, "configuration");
}

static kvf_status open_context(kvf_ucx_endpoint *endpoint, const kvf_transport_options *options) {
    ucp_config_t *config;
    kvf_status failed = configure(endpoint->ucx, options, &config);
    if (failed)
        return failed;
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
        .features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
        .name = kvf_transport_name(endpoint->transport),
    };
    ucs_status_t status = endpoint->ucx->ucp_init_version(KVF_UCX_MAJOR, KVF_UCX_MINOR_MIN, &params, config,
                                                          &endpoint->context);
    endpoint->ucx->ucp_config_release(config);
    if (status != UCS_OK)
        return kvf_ucx_fail(endpoint->ucx, status, "context");
    ucp_context_attr_t attributes = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    status = endpoint->ucx->ucp_context_query(endpoint->context, &attributes);
    endpoint->memory_types = attributes.memory_types;
    return status == UCS_OK ? KVF_OK : kvf_ucx_fail(endpoint->ucx, status, "context");
}

static kvf_status open_worker(kvf_ucx_endpoint *endpoint) {
    ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS,
        .thread_mode = UCS_THREAD_MODE_SERIALIZED,
        .flags = UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK,
    };
    ucs_status_t status = endpoint->ucx->ucp_worker_create(endpoint->context, &params, &endpoint->worker);
    if (status != UCS_OK) {
        /* The machine does not let UCX start, as where /dev/shm is too small: "auto" goes on without it. */
        (void)kvf_ucx_fail(endpoint->ucx, status, "worker");
        return kvf_fail_in(KVF_E_UNSUPPORTED, "UCX cannot start here: ");
    }
    ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = KVF_UCX_NOTIFY_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_notify,
        .arg = endpoint,
    };
    status = endpoint->ucx->ucp_worker_set_am_recv_handler(endpoint->worker, &handler);
    return status == UCS_OK ? KVF_OK : kvf_ucx_fail(endpoint->ucx, status, "notification handler");
}

static kvf_status open_events(kvf_ucx_endpoint *endpoint) {
    int ucx_fd;
    ucs_status_t status = endpoint->ucx->ucp_worker_get_efd(endpoint->worker, &ucx_fd);
    if (status != UCS_OK)
        return kvf_ucx_fail(endpoint->ucx, status, "event descriptor");
    kvf_status opened = kvf_watch_open(&endpoint->event_fd);
    if (!opened)
        opened = kvf_wake_open(&endpoint->wake);
    if (!opened)
        opened = kvf_watch_add(endpoint->event_fd, ucx_fd, NULL);
    if (!opened)
        opened = kvf_watch_add(endpoint->event_fd, endpoint->wake.fd, NULL);
    if (opened)
        return opened;
    kvf_beacon_open(&endpoint->beacon, endpoint->event_fd);
    kvf_wake_set(&endpoint->wake, true); /* UCX is not armed yet */
    return KVF_OK;
}

static void free_endpoint(kvf_ucx_endpoint *endpoint) {
    const kvf_cuda *entered = kvf_ucx_enter(endpoint);
    kvf_beacon_close(&endpoint->beacon);
    kvf_ucx_end_worker(endpoint);
    for (uint32_t i = 0; i < endpoint->region_count; i++)
        if (endpoint->regions[i].mapped)
            (void)endpoint->ucx->ucp_mem_unmap(endpoint->context, endpoint->regions[i].handle);
    for (kvf_ucx_allocation *at = endpoint->allocations, *following; at; at = following) {
        following = at->following;
        (void)endpoint->ucx->ucp_mem_unmap(endpoint->context, at->memory.handle);
        kvf_free(at);
    }
    if (endpoint->context)
        endpoint->ucx->ucp_cleanup(endpoint->context);
    kvf_ucx_leave(entered);
    kvf_fd_close(&endpoint->event_fd);
    kvf_wake_close(&endpoint->wake);
    kvf_poster_close(&endpoint->poster);
    kvf_free(endpoint->regions);
    kvf_free(endpoint);
}

/* ---- emulation ------------------------------------------------------------------------------- */

static kvf_status take_emulated(kvf_ucx_endpoint *endpoint, const char *value) {
    endpoint->takes_emulated = value && strcmp(value, "on") == 0;
    if (value && !endpoint->takes_emulated && strcmp(value, "off") != 0)
        return kvf_fail(KVF_E_INVALID, "%s is \"%s\"; allowed: on, off", EMULATED,
                        kvf_excerpt_of(value, 80).text);
    return KVF_OK;
}

/*
 * "auto" leaves out a UCX that emulates: UCX serves any address to a peer with the card, cannot keep out writes that
 * are on their way, and the fabric "messages" is faster. CUDA memory has no other way to other hosts, unless it goes
 * through the arenas of an agent's stage. Then the arena on the device is left out, too: messages reach the one on the
 * host.
 */
static kvf_status refuse_emulated(const kvf_ucx_endpoint *endpoint) {
    char ways[512];
    if (!endpoint->emulates || endpoint->takes_emulated || !kvf_transport_is_automatic(endpoint->transport))
        return KVF_OK;
    kvf_ucx_resources(endpoint->ucx, endpoint->context, ways, sizeof ways);
    return kvf_fail(KVF_E_UNSUPPORTED,
                    "UCX %s (%s) would emulate one-sided operations: no RDMA among %s. Messages are faster "
                    "and safer; to use UCX all the same, ask for the kind \"ucx\" or set %s to \"on\"",
                    endpoint->ucx->version, endpoint->ucx->path, ways[0] ? ways : "the transports it finds",
                    EMULATED);
}

static kvf_status examine_ways(kvf_ucx_endpoint *endpoint, const kvf_transport_options *options) {
    kvf_status status = take_emulated(endpoint, kvf_setting_of(options, EMULATED));
    endpoint->emulates = !kvf_ucx_has_rdma(endpoint->ucx, endpoint->context);
    bool has_cuda = endpoint->memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA);
    return status || has_cuda ? status : refuse_emulated(endpoint);
}

kvf_status kvf_ucx_check_memory(const kvf_ucx_endpoint *endpoint, kvf_memory_kind kind) {
    const bool packs = kvf_transport_packs_emulated(endpoint->transport);
    return kind == KVF_MEMORY_HOST || packs ? refuse_emulated(endpoint) : KVF_OK;
}

/* ---- opening and closing one ----------------------------------------------------------------- */

/* Turns its KVF_E_IO into KVF_E_UNSUPPORTED, so that "auto" goes on without UCX. */
static kvf_status check_room(void) {
    kvf_status status = kvf_descriptors_check("UCX", DESCRIPTORS_OF_UCX);
    return status ? kvf_fail_in(KVF_E_UNSUPPORTED, "too few descriptors: ") : KVF_OK;
}

static kvf_status ucx_open(kvf_transport *transport, const kvf_transport_options *options, void **out) {
    const kvf_ucx_library *ucx;
    kvf_status status = check_room();
    if (!status)
        status = kvf_ucx_load(kvf_setting_of(options, LIBRARY), &ucx);
    if (status)
        return status;
    kvf_ucx_endpoint *endpoint = kvf_alloc0(1, sizeof *endpoint);
    if (!endpoint)
        return kvf_nomem("a UCX endpoint");
    endpoint->transport = transport;
    endpoint->ucx = ucx;
    kvf_poster_open(&endpoint->poster, &kvf_ucx_post_actions,
                    options->max_in_flight ? options->max_in_flight : IN_FLIGHT_DEFAULT, &endpoint->wake);
    endpoint->event_fd = endpoint->wake.fd = endpoint->beacon.listener = -1;
    endpoint->sockets.late_ms = KVF_SOCKETS_LATE_MS;
    const kvf_cuda *entered = kvf_ucx_enter(endpoint);
    status = kvf_setting_up_to(options, LATE, KVF_SOCKETS_LATE_MS_MAX, &endpoint->sockets.late_ms);
    if (!status)
        status = open_context(endpoint, options);
    if (!status)
        status = examine_ways(endpoint, options);
    if (!status)
        status = open_worker(endpoint);
    if (!status)
        status = open_events(endpoint);
    kvf_ucx_leave(entered);
    if (status)
        free_endpoint(endpoint);
    else
        *out = endpoint;
    return status;
}

static void ucx_close(void *self) {
    free_endpoint(self);
}

/* ---- progress -------------------------------------------------------------------------------- */

/* Handles the events that do not come through UCX: new watchers of our beacon, and the beacons we watch.
 * Returns whether UCX's descriptor, or ours, is readable. */
static bool look_around(kvf_ucx_endpoint *endpoint) {
    struct epoll_event events[16];
    int count = epoll_wait(endpoint->event_fd, events, sizeof events / sizeof *events, 0), fd = -1;
    bool fired = false;
    for (int i = 0; i < count; i++) {
        if (!events[i].data.ptr) {
            fired = true;
        } else if (events[i].data.ptr != &endpoint->beacon) {
            (void)kvf_post_is_gone(events[i].data.ptr);
        }
    }
    kvf_beacon_tend(&endpoint->beacon);
    if (endpoint->emulates && endpoint->ucx->ucp_worker_get_efd(endpoint->worker, &fd) == UCS_OK)
        kvf_sockets_try_often(&endpoint->sockets, fd);
    return fired;
}

/*
 * Goes to sleep if there is nothing to do: afterwards any event makes the event descriptor readable. UCX stays
 * armed until its descriptor fires, so a caller that calls progress() in a loop pays for arming only once.
 */
static kvf_status rest(kvf_ucx_endpoint *endpoint, bool moved, bool fired, bool *busy) {
    endpoint->idle_rounds = moved ? 0 : endpoint->idle_rounds + 1;
    *busy = endpoint->idle_rounds <= IDLE_ROUNDS_MAX || endpoint->poster.ready || endpoint->poster.any_lost;
    kvf_status status = KVF_OK;
    if (!*busy && (endpoint->wake.on || fired)) {
        ucs_status_t armed = endpoint->ucx->ucp_worker_arm(endpoint->worker);
        *busy = armed != UCS_OK;
        if (armed != UCS_OK && armed != UCS_ERR_BUSY)
            status = kvf_ucx_fail(endpoint->ucx, armed, "event descriptor");
    }
    kvf_wake_set(&endpoint->wake, *busy);
    return status;
}

static kvf_status ucx_progress(void *self, bool *busy) {
    kvf_ucx_endpoint *endpoint = self;
    bool more = false;
    bool moved = false;
    bool fired = false;
    const kvf_cuda *entered = kvf_ucx_enter(endpoint);
    for (uint32_t i = 0; i < ROUNDS_A_PROGRESS && !more; i++) {
        more = kvf_ucx_post(endpoint);
        if (kvf_deliver_room(endpoint->transport, NOTICES_A_PROGRESS)) {
            more = true; /* notifications stay with UCX until there is memory for them */
            break;
        }
        if (endpoint->ucx->ucp_worker_progress(endpoint->worker) == 0)
            break;
        moved = true;
    }
    moved = moved || more || endpoint->poster.ready;
    if (endpoint->idle_rounds >= IDLE_ROUNDS_MAX || ++endpoint->rounds % LOOK_AROUND_EVERY == 0)
        fired = look_around(endpoint);
    kvf_post_end_ready(&endpoint->poster);
    kvf_post_tell_lost(&endpoint->poster);
    kvf_status status = KVF_OK;
    if (endpoint->notice_lost) /* while a connection was being closed, which cannot wait for memory */
        status = kvf_fail(KVF_E_IO, "a notification was lost: no memory for it");
    endpoint->notice_lost = false;
    kvf_status rested = rest(endpoint, moved, fired, busy);
    kvf_ucx_leave(entered);
    return status ? status : rested;
}

static void ucx_found(void *self, kvf_transport_finding *out) {
    const kvf_ucx_endpoint *endpoint = self;
    (void)snprintf(out->library, sizeof out->library, "%s", endpoint->ucx->path);
    (void)snprintf(out->version, sizeof out->version, "%s", endpoint->ucx->version);
    const kvf_cuda *entered = kvf_ucx_enter(endpoint);
    kvf_ucx_resources(endpoint->ucx, endpoint->context, out->ways, sizeof out->ways);
    kvf_ucx_leave(entered);
}

static int ucx_event_fd(void *self) {
    const kvf_ucx_endpoint *endpoint = self;
    return endpoint->event_fd;
}

/* RDMA's own repetitions end within half a minute. */
static uint64_t ucx_late_ns(const void *self) {
    return ((const kvf_ucx_endpoint *)self)->sockets.late_ms * KVF_MILLISECOND;
}

static const char *const settings[] = {TLS, LIBRARY, DEVICES, EMULATED, LATE, NULL};

extern const kvf_fabric kvf_fabric_ucx;

const kvf_fabric kvf_fabric_ucx = {
    .kind =
        {
            .name = "ucx",
            .reach = KVF_REACH_NETWORK,
            .memory_kinds = 1u << KVF_MEMORY_HOST | 1u << KVF_MEMORY_CUDA,
            .allocates = 1u << KVF_MEMORY_HOST,
            .directions = 1u << KVF_READ | 1u << KVF_WRITE,
            .one_sided = true,
            .served = true,
            .in_flight = IN_FLIGHT_DEFAULT,
            /* A one-sided operation takes most of a microsecond to post and complete. */
            .cost = {.ns_per_run = 600, .ns_per_byte = 0.1, .ns_per_source = 20e3},
            .settings = settings,
        },
    .open = ucx_open,
    .allocate = kvf_ucx_allocate,
    .register_region = kvf_ucx_register,
    .unregister_region = kvf_ucx_unregister,
    .card = kvf_ucx_write_card,
    .connect = kvf_ucx_connect,
    .submit = kvf_post_submit,
    .cancel = kvf_post_cancel,
    .notify = kvf_ucx_notify,
    .withholds = kvf_post_withholds,
    /* Over TCP: each operation is a message there and back, and a processor copies at both ends. */
    .apart = {"ucx/emulated", {.ns_per_run = 4e3, .ns_per_byte = 0.6, .ns_per_source = 100e3}},
    .is_apart = kvf_ucx_is_emulated,
    .place = kvf_post_place,
    .disconnect = kvf_ucx_disconnect,
    .late_ns = ucx_late_ns,
    .quiet = kvf_ucx_is_quiet,
    .progress = ucx_progress,
    .event_fd = ucx_event_fd,
    .found = ucx_found,
    .close = ucx_close,
};
