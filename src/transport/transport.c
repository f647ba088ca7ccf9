/*
 * The front: endpoints and peers, and which fabric serves which peer. Operations are in batches.c.
 */
#include "transport/transport.h"

#include <errno.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "transport/card.h"
#include "transport/front.h"

/* Best first. */
static const kvf_fabric *const all_fabrics[] = {
    &kvf_fabric_inproc,
    &kvf_fabric_shm,
#ifdef KVF_HAVE_UCX
    &kvf_fabric_ucx,
#endif
    NULL,
};

const kvf_fabric *(*kvf_fabric_in_front)(const char *kind);

typedef struct kvf_plain_memory {
    void *address;
    size_t bytes;
    struct kvf_plain_memory *following;
} kvf_plain_memory;

const char *kvf_transport_kind_name(uint32_t i) {
    uint32_t at = 0;
    while (at < i && all_fabrics[at])
        at++;
    return all_fabrics[at] ? all_fabrics[at]->kind : NULL;
}

const kvf_memory *kvf_transport_regions(const kvf_transport *transport, uint32_t *count) {
    *count = transport->region_count;
    return transport->regions;
}

unsigned char *const *kvf_transport_bases(const kvf_transport *transport) {
    return transport->bases;
}

const char *kvf_transport_name(const kvf_transport *transport) {
    return transport->name;
}

/* ---- opening --------------------------------------------------------------------------------- */

static kvf_status check_kind(const char *kind, bool *automatic) {
    *automatic = !kind || strcmp(kind, "auto") == 0;
    if (*automatic)
        return KVF_OK;
    for (size_t i = 0; all_fabrics[i]; i++)
        if (strcmp(kind, all_fabrics[i]->kind) == 0)
            return KVF_OK;
    if (strcmp(kind, "ucx") == 0)
        return kvf_fail(KVF_E_UNSUPPORTED, "transport kind ucx: this build of the library is without UCX");
    return kvf_fail(KVF_E_NOT_FOUND, "transport kind is \"%s\"; allowed auto, inproc, shm, ucx", kind);
}

static kvf_status take_name(kvf_transport *transport) {
    char made[32];
    const char *name = transport->options.name;
    if (!name) {
        (void)snprintf(made, sizeof made, "pid-%ld", (long)getpid());
        name = made;
    }
    if (strlen(name) > KVF_CARD_NAME_MAX)
        return kvf_fail(KVF_E_INVALID, "transport name has %zu bytes; allowed 0 to %d", strlen(name),
                        KVF_CARD_NAME_MAX);
    transport->name = kvf_strdup(name);
    transport->options.name = transport->name;
    return transport->name ? KVF_OK : kvf_nomem("a transport");
}

static kvf_status watch(kvf_transport *transport, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    if (fd >= 0 && epoll_ctl(transport->event_fd, EPOLL_CTL_ADD, fd, &event) != 0)
        return kvf_fail(KVF_E_IO, "epoll_ctl: %s", strerror(errno));
    return KVF_OK;
}

static kvf_status open_descriptors(kvf_transport *transport) {
    transport->event_fd = epoll_create1(EPOLL_CLOEXEC);
    if (transport->event_fd < 0)
        return kvf_fail(KVF_E_IO, "epoll_create1: %s", strerror(errno));
    transport->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (transport->wake_fd < 0)
        return kvf_fail(KVF_E_IO, "eventfd: %s", strerror(errno));
    return watch(transport, transport->wake_fd);
}

/* With "auto", one that does not work here is left out. */
static kvf_status open_fabric(kvf_transport *transport, const kvf_fabric *fabric) {
    kvf_front_fabric opened = {fabric, NULL, false};
    kvf_status status = fabric->open(transport, &transport->options, &opened.endpoint);
    if (status == KVF_E_UNSUPPORTED && transport->automatic)
        return KVF_OK;
    if (status)
        return kvf_fail_in(status, "%s: ", fabric->kind);
    transport->fabrics[transport->fabric_count++] = opened;
    return watch(transport, fabric->event_fd(opened.endpoint));
}

static kvf_status open_fabrics(kvf_transport *transport, const char *kind) {
    const kvf_fabric *in_front = kvf_fabric_in_front ? kvf_fabric_in_front(kind) : NULL;
    kvf_status status = in_front ? open_fabric(transport, in_front) : KVF_OK;
    for (size_t i = 0; all_fabrics[i] && !in_front && !status; i++)
        if (transport->automatic || strcmp(kind, all_fabrics[i]->kind) == 0)
            status = open_fabric(transport, all_fabrics[i]);
    if (!status && transport->fabric_count == 0)
        return kvf_fail_in(KVF_E_UNSUPPORTED, "no transport works here; the last one: ");
    return status;
}

kvf_status kvf_transport_open(const char *kind, const kvf_transport_options *options, kvf_transport **out) {
    if (!out)
        return kvf_fail(KVF_E_INVALID, "transport: out is NULL");
    kvf_transport *transport = kvf_alloc0(1, sizeof *transport);
    if (!transport)
        return kvf_nomem("a transport");
    transport->event_fd = transport->wake_fd = -1;
    kvf_status status = check_kind(kind, &transport->automatic);
    if (!status)
        status =
            kvf_take_options(&transport->options, sizeof transport->options, options, "transport options");
    if (!status)
        status = take_name(transport);
    if (!status)
        status = open_descriptors(transport);
    if (!status)
        status = open_fabrics(transport, kind);
    transport->options.ucx_tls = NULL; /* the caller's text: read while opening */
    if (status) {
        kvf_transport_close(transport);
        return status;
    }
    *out = transport;
    return KVF_OK;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* For fabrics without memory of their own: nobody else can map it, but it is page aligned and zeroed too. */
static kvf_status allocate_plain(kvf_transport *transport, uint64_t bytes, void **out) {
    kvf_plain_memory *memory = kvf_alloc(1, sizeof *memory);
    if (!memory)
        return kvf_nomem("transport memory");
    memory->bytes = bytes;
    memory->address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory->address == MAP_FAILED) {
        kvf_free(memory);
        return kvf_fail(KVF_E_NOMEM, "no memory for %llu bytes: %s", (unsigned long long)bytes,
                        strerror(errno));
    }
    (void)madvise(memory->address, bytes, MADV_HUGEPAGE);
    memory->following = transport->plain_memory;
    transport->plain_memory = memory;
    *out = memory->address;
    return KVF_OK;
}

kvf_status kvf_transport_allocate(kvf_transport *transport, uint64_t bytes, void **out) {
    if (!transport || !out)
        return kvf_fail(KVF_E_INVALID, "allocate: %s is NULL", !transport ? "transport" : "out");
    if (bytes == 0)
        return kvf_fail(KVF_E_INVALID, "allocate: 0 bytes");
    for (uint32_t i = 0; i < transport->fabric_count; i++) {
        const kvf_front_fabric *front = &transport->fabrics[i];
        if (front->fabric->allocate)
            return front->fabric->allocate(front->endpoint, bytes, out);
    }
    return allocate_plain(transport, bytes, out);
}

static kvf_status check_regions(const kvf_memory *regions, uint32_t count) {
    if (!regions || count == 0)
        return kvf_fail(KVF_E_INVALID, "register: %s", count == 0 ? "no regions" : "regions is NULL");
    for (uint32_t i = 0; i < count; i++) {
        uint64_t end;
        if (!regions[i].address || regions[i].bytes == 0)
            return kvf_fail(KVF_E_INVALID, "register: region %u: %s", i,
                            regions[i].bytes == 0 ? "0 bytes" : "address is NULL");
        if (!kvf_add((uint64_t)(uintptr_t)regions[i].address, regions[i].bytes, &end))
            return kvf_fail(KVF_E_OVERFLOW, "register: region %u: %llu bytes do not fit after address %p", i,
                            (unsigned long long)regions[i].bytes, regions[i].address);
        if (regions[i].kind != KVF_MEMORY_HOST && regions[i].kind != KVF_MEMORY_CUDA)
            return kvf_fail(KVF_E_INVALID, "register: region %u: memory kind is %d; allowed 0 to 1", i,
                            (int)regions[i].kind);
    }
    return KVF_OK;
}

/*
 * Fabrics cannot be unregistered, so the ones that can fail come first: only UCX registers with the kernel or
 * a device, and it is the last of the fabrics. The others merely look whether they can serve the memory.
 */
static kvf_status register_with_fabrics(kvf_transport *transport, const kvf_memory *regions, uint32_t count) {
    bool refused[KVF_FABRICS_MAX] = {false};
    uint32_t serving = 0;
    kvf_status refusal = KVF_OK;
    for (uint32_t i = transport->fabric_count; i-- > 0;) {
        const kvf_front_fabric *front = &transport->fabrics[i];
        kvf_status status = front->fabric->register_memory(front->endpoint, regions, count);
        if (status && (status != KVF_E_UNSUPPORTED || !transport->automatic))
            return kvf_fail_in(status, "register: %s: ", front->fabric->kind);
        refused[i] = status != KVF_OK;
        refusal = status ? status : refusal;
        serving += !status;
    }
    if (serving == 0)
        return kvf_fail_in(refusal, "register: no transport here serves this memory: ");
    for (uint32_t i = 0; i < transport->fabric_count; i++)
        transport->fabrics[i].disabled = refused[i];
    return KVF_OK;
}

static void forget_regions(kvf_transport *transport) {
    kvf_free(transport->regions);
    kvf_free(transport->bases);
    transport->regions = NULL;
    transport->bases = NULL;
    transport->region_count = 0;
}

static kvf_status keep_regions(kvf_transport *transport, const kvf_memory *regions, uint32_t count) {
    transport->regions = kvf_copy(regions, count, sizeof *regions);
    transport->bases = kvf_alloc(count, sizeof *transport->bases);
    if (!transport->regions || !transport->bases)
        return kvf_nomem("the regions");
    for (uint32_t i = 0; i < count; i++)
        transport->bases[i] = regions[i].address;
    transport->region_count = count;
    return KVF_OK;
}

kvf_status kvf_transport_register(kvf_transport *transport, const kvf_memory *regions, uint32_t count) {
    if (!transport)
        return kvf_fail(KVF_E_INVALID, "register: transport is NULL");
    if (transport->regions || transport->card.data || transport->peers)
        return kvf_fail(KVF_E_EXISTS, "register: %s",
                        transport->regions ? "memory is registered already"
                                           : "too late, after the card was exported or a peer connected");
    kvf_status status = check_regions(regions, count);
    if (status)
        return status;
    status = keep_regions(transport, regions, count);
    if (!status)
        status = register_with_fabrics(transport, transport->regions, count);
    if (status)
        forget_regions(transport);
    return status;
}

/* ---- the card -------------------------------------------------------------------------------- */

/* `parts` holds the fabrics' bytes one after the other. */
static kvf_status write_card(kvf_transport *transport, kvf_card *card, kvf_buffer *parts, kvf_buffer *out) {
    size_t ends[KVF_FABRICS_MAX] = {0};
    for (uint32_t i = 0; i < transport->fabric_count; i++) {
        const kvf_front_fabric *front = &transport->fabrics[i];
        if (front->disabled)
            continue;
        kvf_status status = front->fabric->card(front->endpoint, parts);
        if (status)
            return kvf_fail_in(status, "export: %s: ", front->fabric->kind);
        kvf_card_part *part = &card->parts[card->part_count];
        (void)snprintf(part->kind, sizeof part->kind, "%s", front->fabric->kind);
        ends[card->part_count++] = parts->length;
    }
    for (uint32_t i = 0; i < card->part_count; i++) {
        size_t begin = i > 0 ? ends[i - 1] : 0;
        card->parts[i].data = parts->data + begin;
        card->parts[i].bytes = ends[i] - begin;
    }
    return kvf_card_write(card, out);
}

static kvf_status make_card(kvf_transport *transport) {
    kvf_card card = {0};
    kvf_buffer parts = {0}, out = {0};
    card.region_count = transport->region_count;
    card.region_bytes = kvf_alloc(card.region_count, sizeof *card.region_bytes);
    if (!card.region_bytes)
        return kvf_nomem("a card");
    for (uint32_t i = 0; i < card.region_count; i++)
        card.region_bytes[i] = transport->regions[i].bytes;
    (void)snprintf(card.name, sizeof card.name, "%s", transport->name);
    kvf_host_identity(card.host);
    kvf_status status = write_card(transport, &card, &parts, &out);
    if (status)
        kvf_buffer_free(&out);
    else
        transport->card = out;
    kvf_buffer_free(&parts);
    kvf_card_free(&card);
    return status;
}

kvf_status kvf_transport_export(kvf_transport *transport, const void **card, size_t *bytes) {
    if (!transport || !card || !bytes)
        return kvf_fail(KVF_E_INVALID, "export: %s is NULL",
                        !transport ? "transport"
                        : !card    ? "card"
                                   : "bytes");
    if (!transport->card.data) {
        kvf_status status = make_card(transport);
        if (status)
            return status;
    }
    *card = transport->card.data;
    *bytes = transport->card.length;
    return KVF_OK;
}

/* ---- peers ----------------------------------------------------------------------------------- */

static kvf_status nothing_in_common(const kvf_transport *transport, const kvf_card *card, kvf_status status,
                                    const char *why) {
    kvf_text ours = {0}, theirs = {0};
    for (uint32_t i = 0; i < transport->fabric_count; i++)
        if (!transport->fabrics[i].disabled)
            kvf_text_add(&ours, "%s%s", i ? " " : "", transport->fabrics[i].fabric->kind);
    for (uint32_t i = 0; i < card->part_count; i++)
        kvf_text_add(&theirs, "%s%s", i ? " " : "", card->parts[i].kind);
    (void)kvf_fail(status, "connect: no way from %s (%s) to %s (%s)%s%s", transport->name,
                   ours.data ? ours.data : "none", card->name, theirs.data ? theirs.data : "none",
                   *why ? ": " : "", why);
    kvf_text_free(&ours);
    kvf_text_free(&theirs);
    return status;
}

/*
 * Tries the fabrics both sides have, best first. A way that is closed to us by permissions is like one that
 * is not there, as long as another is open.
 */
static kvf_status choose(kvf_transport *transport, const kvf_card *card, kvf_peer *peer) {
    kvf_status refusal = KVF_E_UNSUPPORTED;
    char why[256] = "";
    for (uint32_t i = 0; i < transport->fabric_count; i++) {
        const kvf_front_fabric *front = &transport->fabrics[i];
        for (uint32_t p = 0; p < card->part_count && !front->disabled; p++) {
            if (strcmp(card->parts[p].kind, front->fabric->kind) != 0)
                continue;
            kvf_status status = front->fabric->connect(front->endpoint, card->parts[p].data,
                                                       card->parts[p].bytes, peer, &peer->link);
            if (!status)
                peer->fabric = front->fabric;
            if (!status || (status != KVF_E_UNSUPPORTED && status != KVF_E_PERMISSION))
                return status ? kvf_fail_in(status, "connect: %s: ", front->fabric->kind) : KVF_OK;
            refusal = status == KVF_E_PERMISSION ? status : refusal;
            size_t used = strlen(why);
            (void)snprintf(why + used, sizeof why - used, "%s%s: %s", used ? "; " : "", front->fabric->kind,
                           kvf_error_detail());
            break;
        }
    }
    return nothing_in_common(transport, card, refusal, why);
}

static void free_peer(kvf_peer *peer) {
    if (!peer)
        return;
    kvf_free(peer->region_bytes);
    kvf_free(peer->name);
    kvf_free(peer);
}

kvf_status kvf_transport_connect(kvf_transport *transport, const void *card, size_t bytes, kvf_peer **out) {
    if (!transport || !card || !out)
        return kvf_fail(KVF_E_INVALID, "connect: %s is NULL",
                        !transport ? "transport"
                        : !card    ? "card"
                                   : "out");
    kvf_card read = {0};
    kvf_status status = kvf_card_read(card, bytes, &read);
    if (status)
        return kvf_fail_in(status, "connect: ");
    kvf_peer *peer = kvf_alloc0(1, sizeof *peer);
    if (peer) {
        peer->transport = transport;
        peer->name = kvf_strdup(read.name);
        peer->region_count = read.region_count;
        peer->region_bytes = read.region_bytes;
        read.region_bytes = NULL;
    }
    status = peer && peer->name ? choose(transport, &read, peer) : kvf_nomem("a peer");
    kvf_card_free(&read);
    if (status) {
        free_peer(peer);
        return status;
    }
    peer->following = transport->peers;
    if (transport->peers)
        transport->peers->previous = peer;
    transport->peers = peer;
    *out = peer;
    return KVF_OK;
}

const char *kvf_peer_kind(const kvf_peer *peer) {
    return peer ? peer->fabric->kind : "";
}

const uint64_t *kvf_peer_region_bytes(const kvf_peer *peer, uint32_t *count) {
    if (count)
        *count = peer ? peer->region_count : 0;
    return peer ? peer->region_bytes : NULL;
}

void kvf_peer_close(kvf_peer *peer) {
    if (!peer || peer->closing)
        return;
    kvf_transport *transport = peer->transport;
    peer->closing = true;
    peer->fabric->disconnect(peer->link);
    kvf_front_end_batches(peer, KVF_E_CANCELLED, "the connection was closed");
    kvf_front_dispatch_peer(transport, peer);
    if (peer->lost_untold)
        transport->lost_untold--;
    if (peer->previous)
        peer->previous->following = peer->following;
    else
        transport->peers = peer->following;
    if (peer->following)
        peer->following->previous = peer->previous;
    free_peer(peer);
    kvf_front_update_wake(transport);
}

/* ---- progress -------------------------------------------------------------------------------- */

kvf_status kvf_transport_progress(kvf_transport *transport, bool *busy) {
    bool more = false;
    if (busy)
        *busy = false;
    if (!transport || transport->calling > 0)
        return kvf_fail(KVF_E_INVALID, "progress: %s",
                        transport ? "called from one of its own callbacks" : "transport is NULL");
    transport->calling++;
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < transport->fabric_count; i++) {
        const kvf_front_fabric *front = &transport->fabrics[i];
        bool fabric_busy = false;
        kvf_status failed = front->fabric->progress(front->endpoint, &fabric_busy);
        more = more || fabric_busy;
        if (failed && !status)
            status = kvf_fail_in(failed, "progress: %s: ", front->fabric->kind);
    }
    kvf_front_dispatch(transport);
    kvf_front_update_wake(transport);
    transport->calling--;
    if (busy)
        *busy = more || transport->awake;
    return status;
}

int kvf_transport_event_fd(kvf_transport *transport) {
    return transport ? transport->event_fd : -1;
}

/* ---- closing --------------------------------------------------------------------------------- */

/*
 * Fabrics without memory of their own go first: peers may still be copying through them. Then from last to
 * first, for an early one allocates what the later ones have registered.
 */
static void close_fabrics(kvf_transport *transport) {
    for (int with_memory = 0; with_memory < 2; with_memory++)
        for (uint32_t i = transport->fabric_count; i-- > 0;) {
            const kvf_front_fabric *front = &transport->fabrics[i];
            if ((front->fabric->allocate != NULL) == with_memory)
                front->fabric->close(front->endpoint);
        }
    for (kvf_plain_memory *memory = transport->plain_memory, *next; memory; memory = next) {
        next = memory->following;
        (void)munmap(memory->address, memory->bytes);
        kvf_free(memory);
    }
}

void kvf_transport_close(kvf_transport *transport) {
    if (!transport)
        return;
    while (transport->peers)
        kvf_peer_close(transport->peers);
    close_fabrics(transport);
    if (transport->wake_fd >= 0)
        (void)close(transport->wake_fd);
    if (transport->event_fd >= 0)
        (void)close(transport->event_fd);
    kvf_front_free_batches(transport);
    kvf_buffer_free(&transport->card);
    forget_regions(transport);
    kvf_free(transport->name);
    kvf_free(transport);
}
