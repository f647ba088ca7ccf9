/*
 * The libfabric fabric: one-sided reads and writes by network cards that have no other good way: EFA of AWS, and
 * Slingshot (cxi). TCP, which libfabric emulates with, serves tests and machines without such cards.
 *
 * An endpoint is one domain of libfabric, that is one network interface, with a port where peers reach it. Each link
 * has a port of its own for the operations that this side begins (libfabric_port.c says why). Ports are reliable
 * datagram endpoints: there is no connection whose end would be reported. A peer that is gone ends the operations on
 * their way to it, sooner or later, or nothing is taken for it any more (kvf_libfabric_is_patient()); for peers on the
 * same machine the beacon tells at once.
 *
 * Which side must make progress. Network cards with RDMA need no help: those of Slingshot, and newer ones of EFA. Where
 * libfabric emulates, operations move only while the owner of the memory calls kvf_transport_progress().
 *
 * What a peer can reach. The owner's side checks the key and the bounds of every operation, also when it emulates, and
 * keys are drawn at random where the provider lets us choose: a peer without the card reaches nothing, and a peer with
 * it only registered memory. A peer cannot be shut out while the memory stays registered, so there is no fence; and
 * what was sent by emulation arrives even if its sender was given up. So where libfabric emulates, agents with a stage
 * give keys to their arena only (kvf_transport_withhold_emulated()): late writes then hit only slots.
 *
 * "auto" looks for cards of EFA or Slingshot first, and loads libfabric only if the kernel knows one: libfabric's first
 * look at a machine takes a tenth of a second. Then it takes only providers of such cards: not TCP if none can be used.
 * libfabric is never unloaded, for its providers may have threads.
 */
#include <stdio.h>
#include <sys/epoll.h>

#include "base/clock.h"
#include "base/descriptors.h"
#include "transport/libfabric/libfabric.h"

#define PROVIDER "libfabric.provider"
#define DOMAIN "libfabric.domain"
#define LIBRARY "libfabric.library"
#define POLL "libfabric.poll_us"
#define LATE "libfabric.late_ms"
#define IN_FLIGHT_DEFAULT 64u
#define DESCRIPTORS_OF_LIBFABRIC 32u
#define POLL_US_DEFAULT 100u
#define POLL_US_MAX 1000000u
#define IDLE_POLLS 10u        /* as often waits an endpoint with nothing under way */
#define TRY_AGAIN_NS 1000000u /* if libfabric took no operation, or there was no memory for notifications */
#define ROUNDS_A_PROGRESS 32u
#define IDLE_ROUNDS_MAX 64u
#define LOOK_AROUND_EVERY 64u

/* ---- opening --------------------------------------------------------------------------------- */

static kvf_status check_settings(kvf_libfabric_endpoint *endpoint, const kvf_transport_options *options) {
    const char *provider = kvf_setting_of(options, PROVIDER);
    endpoint->sockets.late_ms = KVF_SOCKETS_LATE_MS;
    kvf_status status = kvf_setting_number(options, POLL, &endpoint->poll_us);
    if (!status)
        status = kvf_setting_up_to(options, LATE, KVF_SOCKETS_LATE_MS_MAX, &endpoint->sockets.late_ms);
    if (status)
        return status;
    if (endpoint->poll_us > POLL_US_MAX)
        return kvf_fail(KVF_E_INVALID, "%s is %u; allowed: up to %u", POLL, endpoint->poll_us, POLL_US_MAX);
    if (provider && (!*provider || strlen(provider) > KVF_LIBFABRIC_PROVIDER_MAX || strpbrk(provider, ";^,")))
        return kvf_fail(KVF_E_INVALID, "%s is \"%s\"; allowed: one provider of up to %u characters, as efa",
                        PROVIDER, kvf_excerpt_of(provider, 80).text, KVF_LIBFABRIC_PROVIDER_MAX);
    if (!provider && kvf_transport_is_automatic(endpoint->transport) &&
        !kvf_libfabric_has_cards(KVF_LIBFABRIC_DEVICES))
        return kvf_fail(
            KVF_E_UNSUPPORTED,
            "this machine has no network card of EFA or Slingshot; to use libfabric all the same, "
            "ask for the kind \"libfabric\" or set %s",
            PROVIDER);
    return KVF_OK;
}

static kvf_status open_domain(kvf_libfabric_endpoint *endpoint) {
    const char *what = "fabric";
    int failed = endpoint->library->fi_fabric(endpoint->info->fabric_attr, &endpoint->fabric, NULL);
    if (!failed) {
        what = "domain";
        failed = fi_domain(endpoint->fabric, endpoint->info, &endpoint->domain, NULL);
    }
    return failed ? kvf_libfabric_refuse(endpoint->library, failed, what) : KVF_OK;
}

static void stop_serving(kvf_libfabric_endpoint *endpoint) {
    kvf_libfabric_port_close(endpoint, &endpoint->port);
    kvf_libfabric_messages_close(&endpoint->inbox);
}

kvf_status kvf_libfabric_serve(kvf_libfabric_endpoint *endpoint) {
    stop_serving(endpoint);
    kvf_status status = kvf_libfabric_port_open(endpoint, &endpoint->port);
    if (!status)
        status = kvf_libfabric_messages_open(endpoint, endpoint, KVF_LIBFABRIC_MESSAGES_IN, &endpoint->inbox);
    if (!status && kvf_libfabric_listen(endpoint))
        status = KVF_E_UNSUPPORTED;
    if (status)
        stop_serving(endpoint);
    return status;
}

/* Some providers have no descriptor to wait for. */
static kvf_status begin_to_serve(kvf_libfabric_endpoint *endpoint) {
    kvf_status status = kvf_libfabric_serve(endpoint);
    if (status && endpoint->poll_us == 0) {
        endpoint->poll_us = POLL_US_DEFAULT;
        status = kvf_libfabric_serve(endpoint);
    }
    if (status)
        return status;
    endpoint->emulates = kvf_libfabric_emulates(endpoint->info, endpoint->port.ep);
    unsigned char address[KVF_LIBFABRIC_ADDRESS_MAX];
    endpoint->address_bytes = sizeof address;
    int failed = fi_getname(&endpoint->port.ep->fid, address, &endpoint->address_bytes);
    return failed ? kvf_libfabric_refuse(endpoint->library, failed, "address") : KVF_OK;
}

static kvf_status open_events(kvf_libfabric_endpoint *endpoint) {
    kvf_status status = kvf_watch_open(&endpoint->event_fd);
    if (!status)
        status = kvf_wake_open(&endpoint->wake);
    if (!status)
        status = kvf_timer_open(&endpoint->timer);
    if (!status)
        status = kvf_watch_add(endpoint->event_fd, endpoint->wake.fd, NULL);
    if (!status)
        status = kvf_watch_add(endpoint->event_fd, endpoint->timer.fd, NULL);
    if (!status)
        kvf_beacon_open(&endpoint->beacon, endpoint->event_fd);
    kvf_wake_set(&endpoint->wake, true);
    return status;
}

static void free_endpoint(kvf_libfabric_endpoint *endpoint) {
    kvf_beacon_close(&endpoint->beacon);
    for (uint32_t i = 0; i < endpoint->region_count; i++)
        (void)kvf_libfabric_unmap(&endpoint->regions[i]);
    stop_serving(endpoint); /* some providers bind the regions to the port, and close it only without them */
    if (endpoint->domain)
        (void)fi_close(&endpoint->domain->fid);
    if (endpoint->fabric)
        (void)fi_close(&endpoint->fabric->fid);
    if (endpoint->info)
        endpoint->library->fi_freeinfo(endpoint->info);
    kvf_poster_close(&endpoint->poster);
    kvf_timer_close(&endpoint->timer);
    kvf_wake_close(&endpoint->wake);
    kvf_fd_close(&endpoint->event_fd);
    kvf_free(endpoint->regions);
    kvf_free(endpoint);
}

static kvf_status open_all(kvf_libfabric_endpoint *endpoint, const kvf_transport_options *options) {
    const uint32_t wanted = options->max_in_flight ? options->max_in_flight : IN_FLIGHT_DEFAULT;
    kvf_status status = check_settings(endpoint, options);
    if (!status && kvf_descriptors_check("libfabric", DESCRIPTORS_OF_LIBFABRIC))
        status = kvf_fail_in(KVF_E_UNSUPPORTED, "too few descriptors: ");
    if (!status)
        status = kvf_libfabric_load(kvf_setting_of(options, LIBRARY), &endpoint->library);
    if (!status) /* unasked nothing goes over TCP, where messages can be encrypted and shut a peer out */
        status = kvf_libfabric_choose(endpoint->library, kvf_setting_of(options, PROVIDER),
                                      kvf_transport_is_automatic(endpoint->transport),
                                      kvf_setting_of(options, DOMAIN), &endpoint->info);
    if (status)
        return status;
    kvf_poster_open(&endpoint->poster, &kvf_libfabric_post_actions,
                    (uint32_t)kvf_min_u64(wanted, kvf_max_u64(endpoint->info->tx_attr->size, 1)),
                    &endpoint->wake);
    status = open_domain(endpoint);
    if (!status)
        status = open_events(endpoint);
    return status ? status : begin_to_serve(endpoint);
}

static kvf_status libfabric_open(kvf_transport *transport, const kvf_transport_options *options, void **out) {
    kvf_libfabric_endpoint *endpoint = kvf_alloc0(1, sizeof *endpoint);
    if (!endpoint)
        return kvf_nomem("an endpoint of libfabric");
    endpoint->transport = transport;
    endpoint->event_fd = endpoint->wake.fd = endpoint->port.fd = endpoint->beacon.listener = -1;
    endpoint->timer = (kvf_timer){-1, UINT64_MAX};
    kvf_status status = open_all(endpoint, options);
    if (status)
        free_endpoint(endpoint);
    else
        *out = endpoint;
    return status;
}

static void libfabric_close(void *self) {
    kvf_libfabric_endpoint *endpoint = self;
    const kvf_cuda *entered = kvf_device_context_enter(&endpoint->device_context);
    free_endpoint(endpoint);
    kvf_device_context_leave(entered);
}

/* ---- progress -------------------------------------------------------------------------------- */

/* Over TCP, any port's descriptor shows the sockets of all. Ports that are polled have none. */
static void try_often(kvf_libfabric_endpoint *endpoint) {
    if (endpoint->emulates && endpoint->port.ep)
        kvf_sockets_try_often(&endpoint->sockets, endpoint->port.fd);
    else if (endpoint->emulates && endpoint->links)
        kvf_sockets_try_often(&endpoint->sockets, endpoint->links->port.fd);
}

/* Handles the events that do not come through libfabric: new watchers of our beacon, and the beacons we watch. Returns
 * whether a port has become readable, which is told once: it must be read again before the endpoint rests. */
static bool look_around(kvf_libfabric_endpoint *endpoint) {
    struct epoll_event events[16];
    int count = epoll_wait(endpoint->event_fd, events, sizeof events / sizeof *events, 0);
    bool fired = false;
    for (int i = 0; i < count; i++) {
        if (events[i].data.ptr == endpoint) {
            fired = true;
        } else if (events[i].data.ptr && events[i].data.ptr != &endpoint->beacon) {
            (void)kvf_post_is_gone(events[i].data.ptr);
        }
    }
    kvf_beacon_tend(&endpoint->beacon);
    try_often(endpoint);
    return fired;
}

/* Notifications stay with libfabric until there is memory for them. */
static kvf_status take_notices(kvf_libfabric_endpoint *endpoint, size_t *moved) {
    if (!endpoint->port.ep)
        return KVF_OK;
    if (kvf_deliver_room(endpoint->transport, KVF_LIBFABRIC_COMPLETIONS * KVF_NOTICE_ROOM_MAX)) {
        endpoint->refused = true;
        return KVF_OK;
    }
    kvf_status status = kvf_libfabric_port_poll(endpoint, &endpoint->port, moved);
    return status ? status : kvf_libfabric_listen(endpoint);
}

static void take_completions(kvf_libfabric_endpoint *endpoint, size_t *moved) {
    for (kvf_libfabric_link *link = endpoint->links; link; link = link->following) {
        if (!kvf_libfabric_is_pending(link)) {
            link->silent_ns = 0;
            continue;
        }
        kvf_libfabric_send_waiting(link);
        if (kvf_libfabric_port_poll(endpoint, &link->port, moved))
            kvf_post_lose(&link->queue, kvf_error_detail());
        endpoint->patient = kvf_libfabric_is_patient(link) || endpoint->patient;
    }
}

/* When to look again, if nothing shows that there is something to do. */
static void set_timer(kvf_libfabric_endpoint *endpoint, bool pending) {
    uint64_t wait_ns = UINT64_MAX;
    if (endpoint->poll_us > 0)
        wait_ns = (uint64_t)endpoint->poll_us * 1000 * (pending ? 1 : IDLE_POLLS);
    if (endpoint->patient)
        wait_ns = kvf_min_u64(wait_ns, KVF_LIBFABRIC_PATIENCE_NS);
    if (endpoint->refused)
        wait_ns = kvf_min_u64(wait_ns, TRY_AGAIN_NS);
    if (wait_ns != UINT64_MAX)
        kvf_timer_set(&endpoint->timer, kvf_now(&kvf_monotonic) + wait_ns);
    else if (endpoint->timer.at_ns != UINT64_MAX)
        kvf_timer_set(&endpoint->timer, UINT64_MAX);
}

/* Whether all events from now on make the event descriptor readable. */
static bool rests(const kvf_libfabric_endpoint *endpoint, bool *pending) {
    bool resting = !endpoint->port.ep || kvf_libfabric_port_rests(endpoint, &endpoint->port);
    for (const kvf_libfabric_link *link = endpoint->links; link && resting; link = link->following)
        if (kvf_libfabric_is_pending(link)) {
            *pending = true;
            resting = kvf_libfabric_port_rests(endpoint, &link->port);
        }
    return resting;
}

static bool is_busy(kvf_libfabric_endpoint *endpoint, bool moved, bool fired) {
    bool pending = false;
    endpoint->idle_rounds = moved ? 0 : endpoint->idle_rounds + 1;
    bool busy = endpoint->idle_rounds <= IDLE_ROUNDS_MAX || fired || endpoint->poster.ready ||
                endpoint->poster.any_lost || !rests(endpoint, &pending);
    if (!busy)
        set_timer(endpoint, pending);
    kvf_wake_set(&endpoint->wake, busy);
    return busy;
}

static kvf_status libfabric_progress(void *self, bool *busy) {
    kvf_libfabric_endpoint *endpoint = self;
    kvf_status status = KVF_OK;
    bool more = false, any = false, fired = false;
    const kvf_cuda *entered = kvf_device_context_enter(&endpoint->device_context);
    endpoint->refused = endpoint->patient = false;
    for (uint32_t i = 0; i < ROUNDS_A_PROGRESS && !more && !status; i++) {
        size_t moved = 0;
        more = kvf_libfabric_post(endpoint);
        status = take_notices(endpoint, &moved);
        take_completions(endpoint, &moved);
        if (moved == 0)
            break;
        any = true;
    }
    any = any || more || endpoint->poster.ready;
    if (endpoint->idle_rounds >= IDLE_ROUNDS_MAX || ++endpoint->rounds % LOOK_AROUND_EVERY == 0)
        fired = look_around(endpoint);
    kvf_post_end_ready(&endpoint->poster);
    kvf_post_tell_lost(&endpoint->poster);
    *busy = is_busy(endpoint, any, fired);
    kvf_device_context_leave(entered);
    return status;
}

static void libfabric_found(void *self, kvf_transport_finding *out) {
    const kvf_libfabric_endpoint *endpoint = self;
    (void)snprintf(out->library, sizeof out->library, "%s", endpoint->library->path);
    (void)snprintf(out->version, sizeof out->version, "%s", endpoint->library->version);
    (void)snprintf(out->ways, sizeof out->ways, "%s/%s", endpoint->info->fabric_attr->prov_name,
                   endpoint->info->domain_attr->name);
}

static int libfabric_event_fd(void *self) {
    const kvf_libfabric_endpoint *endpoint = self;
    return endpoint->event_fd;
}

static uint64_t libfabric_late_ns(const void *self) {
    return ((const kvf_libfabric_endpoint *)self)->sockets.late_ms * KVF_MILLISECOND;
}

static const char *const settings[] = {PROVIDER, DOMAIN, LIBRARY, POLL, LATE, NULL};

extern const kvf_fabric kvf_fabric_libfabric;

const kvf_fabric kvf_fabric_libfabric = {
    .kind =
        {
            .name = "libfabric",
            .reach = KVF_REACH_NETWORK,
            .memory_kinds = 1u << KVF_MEMORY_HOST | 1u << KVF_MEMORY_CUDA,
            .directions = 1u << KVF_READ | 1u << KVF_WRITE,
            .one_sided = true,
            .served = true,
            .in_flight = IN_FLIGHT_DEFAULT,
            /* Not measured on such cards: as UCX's RDMA, and less for a byte, so that it comes first. */
            .cost = {.ns_per_run = 600, .ns_per_byte = 0.09, .ns_per_source = 20e3},
            .settings = settings,
        },
    .open = libfabric_open,
    .register_region = kvf_libfabric_register,
    .unregister_region = kvf_libfabric_unregister,
    .card = kvf_libfabric_write_card,
    .connect = kvf_libfabric_connect,
    .submit = kvf_post_submit,
    .cancel = kvf_post_cancel,
    .notify = kvf_libfabric_notify,
    .withholds = kvf_post_withholds,
    /* Emulated, here over TCP: each operation is a message there and back, and a processor copies at both ends. */
    .apart = {"libfabric/emulated", {.ns_per_run = 4e3, .ns_per_byte = 0.6, .ns_per_source = 100e3}},
    .is_apart = kvf_libfabric_is_emulated,
    .place = kvf_post_place,
    .disconnect = kvf_libfabric_disconnect,
    .late_ns = libfabric_late_ns,
    .progress = libfabric_progress,
    .event_fd = libfabric_event_fd,
    .found = libfabric_found,
    .close = libfabric_close,
};
