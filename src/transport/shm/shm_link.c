/*
 * The consumer's side: a connection to the owner of memory.
 *
 * A batch is reported as moved only if the owner is found alive after its last copy: a mapping outlives its
 * owner, and its content then means nothing.
 */
#include "transport/shm/shm.h"

#include <poll.h>
#include <stdio.h>
#include <sys/mman.h>

#include "kernel/kernel.h"

#define ARENAS_MAX 4096u
#define PATIENCE_NS 10000000u    /* how long an answer may take while there is something else to do */
#define CONNECT_NS 10000000000u  /* how long we try to connect to an owner with a full queue, ... */
#define CONNECT_PAUSE_NS 200000u /* ... and how often */

/* ---- an owner that is gone --------------------------------------------------------------------- */

/* Checks the socket and the process, for a forked child may keep the socket open. An owner that refuses us says nothing
 * more (POLLRDHUP) before its memory holds anything else. */
const char *kvf_shm_link_gone(const kvf_shm_link *link) {
    struct pollfd looked_at[2] = {{link->fd, POLLRDHUP, 0}, {link->process_fd, POLLIN, 0}};
    if (poll(looked_at, link->process_fd >= 0 ? 2 : 1, 0) <= 0)
        return NULL;
    return looked_at[1].revents ? "the peer's process has ended" : "the peer has closed the connection";
}

void kvf_shm_link_lose(kvf_shm_link *link, const char *why) {
    if (link->lost)
        return;
    link->lost = true;
    (void)snprintf(link->why, sizeof link->why, "%s", why);
}

static void take_refusal(kvf_shm_link *link, const kvf_shm_packet *packet) {
    uint32_t refusal = packet->as.header.count;
    unsigned long long number = packet->as.refused.number;
    char text[160] = "";
    if (packet->bytes != sizeof packet->as.refused)
        refusal = 0;
    link->refused = link->refused || refusal != SHM_REFUSED_KEY; /* another has its place */
    if (refusal == SHM_REFUSED_GENERATION)
        (void)snprintf(text, sizeof text,
                       "the card is for generation %llu of the peer's memory, which is now at %llu: a new "
                       "card is needed",
                       (unsigned long long)kvf_peer_generation(link->peer), number);
    else if (refusal == SHM_REFUSED_LIMIT)
        (void)snprintf(text, sizeof text,
                       "the peer refused the connection: this process has %llu connections to it, the most "
                       "it allows one process",
                       number);
    else if (refusal == SHM_REFUSED_FULL)
        (void)snprintf(text, sizeof text,
                       "the peer refused the connection: it has the most connections that it allows (%llu)",
                       number);
    if (*text) {
        kvf_shm_link_lose(link, text);
        return;
    }
    static const char *const words[] = {
        [SHM_REFUSED_VERSION] = "the peer refused the connection: it speaks another version of the protocol",
        [SHM_REFUSED_KEY] = "the peer refused the connection: the key of the card is not the peer's",
        [SHM_REFUSED_FENCED] = "the peer refused the connection: it has shut this endpoint out",
        [SHM_REFUSED_PROTOCOL] = "the peer refused the connection: a message of this endpoint made no sense",
        [SHM_REFUSED_USER] = "the peer refused the connection: it runs as another user",
        [SHM_REFUSED_SHORT] = "the peer refused the connection: it has no memory or descriptor left for it",
    };
    bool known = refusal < sizeof words / sizeof *words && words[refusal];
    kvf_shm_link_lose(link, known ? words[refusal] : "the peer refused the connection");
}

/* The owner's last message may say why it is gone. */
static void read_last_message(kvf_shm_link *link) {
    kvf_shm_packet *packet = &link->endpoint->packet;
    kvf_status status = KVF_OK;
    while (!link->refused && (!status || status == KVF_E_IO)) { /* no descriptor for one that came with it */
        status = kvf_shm_receive(link->fd, packet);
        if (!status && packet->as.header.kind == SHM_REFUSED)
            take_refusal(link, packet);
        if (!status)
            kvf_fd_close(&packet->fd);
    }
}

bool kvf_shm_link_lose_if_gone(kvf_shm_link *link) {
    const char *gone = kvf_shm_link_gone(link);
    if (gone && !link->lost)
        read_last_message(link);
    if (gone)
        kvf_shm_link_lose(link, gone);
    return gone != NULL;
}

bool kvf_shm_link_owner_lives(kvf_shm_link *link) {
    const bool gone = kvf_shm_link_gone(link) != NULL;
    if (gone)
        read_last_message(link);
    return link->refused || !gone;
}

/* ---- connecting ------------------------------------------------------------------------------ */

/* Opens the process at the other end, and checks that it is the one that wrote the card: if that one has died
 * meanwhile, its number may belong to another. */
static kvf_status take_hold(kvf_shm_link *link) {
    kvf_status status = kvf_neighbour_know_process(link->fd, &link->pid, &link->process_fd);
    if (status)
        return status;
    uint64_t started = link->pid > 0 ? kvf_neighbour_started(link->pid) : 0;
    if (kvf_shm_link_lose_if_gone(link))
        return kvf_fail(KVF_E_PEER_LOST, "%s", link->why);
    if (started && link->card.started && started != link->card.started)
        return kvf_fail(KVF_E_PEER_LOST, "the process that exported the card is gone");
    return KVF_OK;
}

static kvf_status greet(kvf_shm_link *link) {
    kvf_shm_hello hello = {.header = {SHM_HELLO, 0},
                           .version = SHM_VERSION,
                           .region_count = link->region_count,
                           .generation = kvf_peer_generation(link->peer)};
    memcpy(hello.key, link->card.key, SHM_ID_BYTES);
    memcpy(hello.from, link->endpoint->card.name, SHM_ID_BYTES);
    (void)snprintf(hello.name, sizeof hello.name, "%s", kvf_transport_name(link->endpoint->transport));
    kvf_status status = kvf_watch_add(link->endpoint->epoll_fd, link->fd, &link->watch);
    if (!status && link->process_fd >= 0)
        status = kvf_watch_add(link->endpoint->epoll_fd, link->process_fd, &link->watch);
    if (!status)
        status = kvf_shm_send(link->fd, &hello, sizeof hello, -1);
    if (status == KVF_E_PEER_LOST && kvf_shm_link_lose_if_gone(link))
        status = kvf_fail(KVF_E_PEER_LOST, "%s", link->why);
    return status;
}

/* KVF_E_AGAIN: the owner's queue of connections is full. */
static kvf_status enter(kvf_shm_link *link) {
    kvf_status status = kvf_neighbour_connect(SHM_SOCKET_PREFIX, link->card.name, &link->fd);
    if (!status)
        status = take_hold(link);
    if (!status)
        status = greet(link);
    if (!status && !link->no_direct && link->pid <= 0)
        link->no_direct = "a shared buffer, because the peer is in another PID namespace";
    return status;
}

/* An owner that is busy, or that others flood with connections, accepts new ones in a moment. */
static void enter_again(kvf_shm_link *link) {
    uint64_t now = kvf_now(&kvf_monotonic);
    if (now >= link->connect_at_ns) {
        kvf_status status = enter(link);
        if (!status) {
            link->connect_until_ns = 0;
            return;
        }
        const bool listens = status != KVF_E_PEER_LOST;
        if (status == KVF_E_AGAIN && now >= link->connect_until_ns)
            status = kvf_fail(KVF_E_PEER_LOST,
                              "the peer has not accepted a connection for %llu s: its queue is full",
                              (unsigned long long)(CONNECT_NS / KVF_SECOND));
        if (status != KVF_E_AGAIN) {
            link->refused = listens; /* a socket that is not connected looks like one that was hung up on */
            kvf_shm_link_lose(link, kvf_error_detail());
            return;
        }
        link->connect_at_ns = now + CONNECT_PAUSE_NS;
    }
    kvf_timer_by(&link->endpoint->timer, link->connect_at_ns);
}

static kvf_status make_tables(kvf_shm_link *link) {
    (void)kvf_peer_region_bytes(link->peer, &link->region_count);
    link->bases = kvf_alloc0(link->region_count, sizeof *link->bases);
    link->addresses = kvf_alloc0(link->region_count, sizeof *link->addresses);
    return link->bases && link->addresses ? KVF_OK : kvf_nomem("a peer");
}

void kvf_shm_link_hang_up(kvf_shm_link *link) {
    kvf_shm_slots_close(link);
    kvf_watch_remove(link->endpoint->epoll_fd, link->fd);
    kvf_neighbour_hang_up(&link->fd);
    kvf_watch_close(link->endpoint->epoll_fd, &link->process_fd);
    link->slices = (kvf_slices){0};
    link->ready = false;
    link->lost = true;
    link->peer = NULL;
}

static void free_link(kvf_shm_link *link) {
    kvf_shm_link_hang_up(link);
    for (uint32_t i = 0; i < link->arena_count; i++)
        (void)munmap(link->arenas[i].address, link->arenas[i].bytes);
    kvf_shm_gate_unmap(link->gate);
    kvf_free(link->arenas);
    kvf_free(link->bases);
    kvf_free(link->addresses);
    kvf_free(link);
}

kvf_status kvf_shm_connect(void *self, const void *data, size_t bytes, kvf_peer *peer, void **out) {
    kvf_shm_card card;
    if (bytes != sizeof card)
        return kvf_fail(KVF_E_PARSE, "its part of the card has %zu bytes; allowed: %zu", bytes, sizeof card);
    memcpy(&card, data, sizeof card);
    kvf_shm_endpoint *endpoint = self;
    kvf_status status = kvf_neighbour_check(&endpoint->card.place, &card.place);
    if (status)
        return status;
    kvf_shm_link *link = kvf_alloc0(1, sizeof *link);
    if (!link)
        return kvf_nomem("a peer");
    link->endpoint = endpoint;
    link->peer = peer;
    link->card = card;
    link->watch = (kvf_shm_watch){SHM_WATCH_LINK, link};
    link->fd = link->process_fd = link->buffer_fd = -1;
    link->no_direct = link->endpoint->no_direct_read ? "a shared buffer, because shm.direct is off" : NULL;
    status = make_tables(link);
    if (!status)
        status = enter(link);
    if (status == KVF_E_AGAIN) {
        link->connect_at_ns = kvf_now(&kvf_monotonic) + CONNECT_PAUSE_NS;
        link->connect_until_ns = link->connect_at_ns + CONNECT_NS;
        kvf_timer_by(&link->endpoint->timer, link->connect_at_ns);
        status = KVF_OK;
    }
    if (status) {
        free_link(link);
        return status;
    }
    KVF_LIST_ADD(link->endpoint->links, link);
    *out = link;
    return KVF_OK;
}

void kvf_shm_disconnect(void *self) {
    kvf_shm_link *link = self;
    KVF_LIST_REMOVE(link->endpoint->links, link);
    free_link(link);
}

/* ---- messages from the owner ----------------------------------------------------------------- */

/* We could not map what the owner has sent. The link is lost for the reason that was found, which may be that we have no
 * memory ourselves. */
static bool cannot_map(kvf_shm_link *link) {
    kvf_shm_link_lose(link, kvf_error_detail());
    return false;
}

static bool take_arena(kvf_shm_link *link, const kvf_shm_packet *packet) {
    const kvf_shm_arena_message *message = &packet->as.arena;
    if (link->ready || packet->bytes != sizeof *message || message->header.count != link->arena_count ||
        link->arena_count >= ARENAS_MAX)
        return false;
    kvf_shm_arena *grown = kvf_resize(link->arenas, link->arena_count + 1, sizeof *grown);
    if (!grown) {
        (void)kvf_nomem("a peer's memory");
        return cannot_map(link);
    }
    link->arenas = grown;
    kvf_shm_arena *arena = &grown[link->arena_count];
    *arena = (kvf_shm_arena){.bytes = message->bytes, .fd = -1};
    if (kvf_shm_map_foreign(packet->fd, arena->bytes, &arena->address))
        return cannot_map(link);
    link->arena_count++;
    return true;
}

static bool take_gate(kvf_shm_link *link, const kvf_shm_packet *packet) {
    if (link->ready || link->gate)
        return false;
    return kvf_shm_gate_map(packet->fd, &link->gate) == KVF_OK || cannot_map(link);
}

static bool take_region(kvf_shm_link *link, const kvf_shm_region *told, uint64_t bytes) {
    uint32_t region = link->regions_known++;
    uint64_t end;
    if (bytes == 0) /* a number that was free when the card was made */
        return true;
    if (told->bytes != bytes || !kvf_add(told->address, bytes, &end))
        return false;
    link->addresses[region] = told->address;
    if (told->arena == SHM_NO_ARENA) {
        link->some_unmapped = true;
        return true;
    }
    if (told->arena >= link->arena_count)
        return false;
    const kvf_shm_arena *arena = &link->arenas[told->arena];
    if (!kvf_lies_inside(told->arena_offset, bytes, arena->bytes))
        return false;
    link->bases[region] = arena->address + told->arena_offset;
    return true;
}

static bool take_regions(kvf_shm_link *link, const kvf_shm_packet *packet) {
    const kvf_shm_regions_message *message = &packet->as.regions;
    uint32_t count;
    const uint64_t *bytes = kvf_peer_region_bytes(link->peer, &count);
    if (link->ready || packet->bytes < offsetof(kvf_shm_regions_message, regions) ||
        !kvf_shm_fits(packet, offsetof(kvf_shm_regions_message, regions), sizeof(kvf_shm_region),
                      SHM_REGIONS_MAX) ||
        message->first != link->regions_known || message->header.count > count - link->regions_known)
        return false;
    for (uint32_t i = 0; i < message->header.count; i++)
        if (!take_region(link, &message->regions[i], bytes[link->regions_known]))
            return false;
    return true;
}

/* False: the link is lost for a reason that it has, or the owner violates the protocol or contradicts its card. */
static bool take_message(kvf_shm_link *link, const kvf_shm_packet *packet) {
    switch (packet->as.header.kind) {
    case SHM_ARENA:
        return take_arena(link, packet);
    case SHM_REGIONS:
        return take_regions(link, packet);
    case SHM_GATE:
        return take_gate(link, packet);
    case SHM_READY:
        if (link->ready || link->regions_known != link->region_count)
            return false;
        link->ready = true;
        return true;
    case SHM_REFUSED:
        take_refusal(link, packet);
        return true;
    case SHM_BUFFER:
        return packet->bytes == sizeof(kvf_shm_buffer_message) &&
               kvf_shm_slots_taken(link, &packet->as.buffer);
    case SHM_MOVED:
        return packet->bytes == sizeof(kvf_shm_moved_message) && kvf_shm_slots_moved(link, &packet->as.moved);
    default:
        return false;
    }
}

static void set_blocked(kvf_shm_link *link, bool blocked) {
    if (link->watching_writes != blocked)
        kvf_shm_watch_change(link->endpoint, link->fd, &link->watch, true, blocked);
    link->watching_writes = blocked;
}

void kvf_shm_link_read(kvf_shm_link *link) {
    kvf_shm_packet *packet = &link->endpoint->packet;
    link->blocked = false;
    set_blocked(link, false);
    kvf_status status = KVF_OK;
    /* After an answer the owner gets its next request before we handle another answer. */
    bool answered = false;
    for (uint32_t i = 0; !link->lost && !answered && i < 2 * SHM_SLOTS_MAX; i++) {
        status = kvf_shm_receive(link->fd, packet);
        if (status)
            break;
        answered = packet->as.header.kind == SHM_MOVED;
        if (!take_message(link, packet))
            kvf_shm_link_lose(link, "the peer does not keep to the protocol, or contradicts its card");
        kvf_fd_close(&packet->fd);
    }
    if (status && status != KVF_E_AGAIN)
        kvf_shm_link_lose(link, kvf_error_detail());
    else if (status)
        kvf_shm_link_lose_if_gone(link);
}

/* ---- moving ---------------------------------------------------------------------------------- */

kvf_status kvf_shm_submit(void *self, kvf_batch *batch) {
    kvf_shm_link *link = self;
    kvf_slices_add(&link->slices, batch);
    if (link->ready)
        kvf_wake_set(&link->endpoint->wake, true);
    return KVF_OK;
}

void kvf_shm_cancel(void *self, kvf_batch *batch) {
    (void)batch;
    kvf_shm_link *link = self;
    kvf_slices_cancel(&link->slices);
    kvf_wake_set(&link->endpoint->wake, true);
}

kvf_status kvf_shm_notify(void *self, const void *data, size_t bytes) {
    kvf_shm_link *link = self;
    kvf_shm_header header = {SHM_NOTICE, (uint32_t)bytes};
    if (link->lost)
        return kvf_fail(KVF_E_PEER_LOST, "%s", link->why);
    if (link->connect_until_ns)
        return kvf_fail(KVF_E_AGAIN, "the peer has not accepted the connection yet: its queue is full");
    kvf_status status = kvf_shm_send_two(link->fd, &header, sizeof header, data, bytes);
    if (status == KVF_E_AGAIN) {
        link->blocked = true;
        set_blocked(link, true);
    }
    return status;
}

const char *kvf_shm_link_way(const void *self) {
    const kvf_shm_link *link = self;
    if (!link->ready)
        return "";
    if (!link->some_unmapped)
        return "mapped memory";
    if (link->no_direct)
        return link->no_direct;
    return link->endpoint->only_direct ? "process_vm_readv"
                                       : "process_vm_readv, and meanwhile a shared buffer";
}

/* Cuts a slice to the runs that are reached like its first one; true if that is by a mapping. */
static bool same_way(const kvf_shm_link *link, kvf_slice *slice) {
    size_t count;
    bool mapped = link->bases[kvf_slice_runs(slice, &count)->remote_region] != NULL;
    if (!link->some_unmapped || slice->count == 0)
        return mapped;
    size_t most = !mapped && slice->count > SHM_VECTORS ? SHM_VECTORS : slice->count;
    slice->count = 0;
    slice->bytes = 0;
    while (slice->count < most && (link->bases[slice->runs[slice->count].remote_region] != NULL) == mapped)
        slice->bytes += slice->runs[slice->count++].bytes;
    return mapped;
}

static void copy_mapped(const kvf_shm_link *link, kvf_direction direction, const kvf_slice *slice) {
    unsigned char *const *local = kvf_transport_bases(link->endpoint->transport);
    bool read = direction == KVF_READ;
    kvf_copy_bases bases = {read ? local : link->bases, read ? link->bases : local};
    size_t count;
    const kvf_run *runs = kvf_slice_runs(slice, &count);
    kvf_kernel_copy_runs(read ? KVF_COPY_TO_LOCAL : KVF_COPY_TO_REMOTE, bases, runs, count, slice->bytes);
}

/* Moves without the owner's help. Writing must pass the gate, for the owner may have shut us out meanwhile. */
static kvf_status move_alone(kvf_shm_link *link, kvf_direction direction, const kvf_slice *slice,
                             bool mapped) {
    kvf_status status = KVF_OK;
    kvf_shm_gate *gate = direction == KVF_WRITE ? link->gate : NULL;
    if (!shm_gate_enter(gate))
        return kvf_fail(KVF_E_PEER_LOST, "the peer has shut this endpoint out");
    if (mapped)
        copy_mapped(link, direction, slice);
    else
        status = kvf_shm_direct(link, direction, slice);
    shm_gate_leave(gate);
    return status;
}

bool kvf_shm_is_brought(const void *self) {
    const kvf_shm_link *link = self;
    return link->card.brought > 0;
}

unsigned char *kvf_shm_enter(void *self, uint32_t region, kvf_direction direction) {
    kvf_shm_link *link = self;
    if (!link->ready || link->lost || !link->bases[region])
        return NULL;
    return direction == KVF_READ || shm_gate_enter(link->gate) ? link->bases[region] : NULL;
}

bool kvf_shm_leave(void *self, kvf_direction direction) {
    kvf_shm_link *link = self;
    if (direction == KVF_WRITE)
        shm_gate_leave(link->gate);
    return !kvf_shm_link_lose_if_gone(link);
}

/* The next step for memory that is not mapped, from the choice. If the owner fell silent, we could not take back a
 * write that it makes for us, so writing asks for its help only if there is no other way. */
static kvf_shm_step next_step(const kvf_shm_link *link, kvf_direction direction, const kvf_slice *slice) {
    if (link->no_direct)
        return (kvf_shm_step){SHM_WAY_SERVED, SHM_SLOT_BYTES, 0};
    if (link->endpoint->only_direct || direction == KVF_WRITE)
        return (kvf_shm_step){SHM_WAY_DIRECT, SHM_SLOT_BYTES, 0};
    kvf_shm_load load = kvf_shm_slots_load(link);
    return kvf_shm_choice_make(&link->choice, slice, &load, kvf_now(&kvf_monotonic));
}

static kvf_status move_direct(kvf_shm_link *link, kvf_direction direction, kvf_slice *slice) {
    uint64_t begin = kvf_now(&kvf_monotonic);
    kvf_shm_cut(slice, SHM_SLOT_BYTES, SHM_VECTORS);
    kvf_status status = move_alone(link, direction, slice, false);
    uint64_t now = kvf_now(&kvf_monotonic);
    if (!status && direction == KVF_READ)
        kvf_shm_choice_read(&link->choice, slice, now - begin, now);
    link->look = kvf_shm_slots_load(link).waiting > 0;
    return status;
}

static kvf_status ask_owner(kvf_shm_link *link, kvf_slice *slice) {
    kvf_status status = kvf_shm_slots_free(link);
    return status ? status : kvf_shm_slots_start(link, slice, slice);
}

/* Moves what it can of a slice, and cuts the slice to that. KVF_E_AGAIN: nothing can be moved now. */
static kvf_status move_slice(kvf_shm_link *link, kvf_direction direction, kvf_slice *slice) {
    if (same_way(link, slice))
        return move_alone(link, direction, slice, true);
    kvf_shm_step step = next_step(link, direction, slice);
    if (step.bytes == 0) {
        kvf_timer_by(&link->endpoint->timer, step.until_ns);
        return KVF_E_AGAIN;
    }
    kvf_shm_cut(slice, step.bytes, SHM_VECTORS);
    kvf_status status = step.way == SHM_WAY_SERVED ? ask_owner(link, slice) : KVF_E_AGAIN;
    /* The owner has no time, or this process no memory or descriptor for a buffer: nothing was begun. */
    if (status && status != KVF_E_PEER_LOST && !link->no_direct)
        status = move_direct(link, direction, slice);
    if (status != KVF_E_UNSUPPORTED)
        return status;
    link->no_direct = SHM_FORBIDDEN;
    return ask_owner(link, slice);
}

/* At the end the owner has as long as we would take. Before that, only batches of which the owner has the last part
 * wait for it, and not for ever. */
static void watch_owner(kvf_shm_link *link) {
    bool waiting = !link->slices.current;
    if (waiting)
        kvf_shm_choice_idle(&link->choice);
    uint64_t alone_ns = link->no_direct || link->lost ? 0 : kvf_shm_slots_alone_ns(link);
    uint64_t deadline = link->choice.since_ns + (waiting ? alone_ns : PATIENCE_NS + 4 * alone_ns);
    if (alone_ns && deadline <= kvf_now(&kvf_monotonic))
        kvf_shm_slots_rescue(link);
    else if (alone_ns && waiting)
        kvf_timer_by(&link->endpoint->timer, deadline);
}

/* Ends the complete batches from `first` on, if their owner is still alive. */
static void end_complete(kvf_shm_link *link, kvf_batch *first) {
    if (first == link->slices.current || link->lost)
        return;
    if (kvf_shm_link_lose_if_gone(link))
        return;
    for (kvf_batch *batch = first, *next; batch != link->slices.current; batch = next) {
        next = batch->following;
        if (batch->in_flight == 0)
            kvf_batch_end(batch);
    }
}

bool kvf_shm_link_move(kvf_shm_link *link, uint64_t budget) {
    if (link->connect_until_ns)
        enter_again(link);
    kvf_shm_slots_forget(link);
    kvf_slices_reap(&link->slices);
    kvf_batch *first = link->slices.current;
    kvf_status status = KVF_OK;
    link->look = false;
    uint64_t moved = 0;
    kvf_slice slice;
    while (link->ready && !link->look &&
           kvf_slices_next(&link->slices, link->endpoint->transport, moved, budget, &slice)) {
        kvf_batch *batch = link->slices.current;
        status = move_slice(link, batch->direction, &slice);
        if (status == KVF_E_AGAIN || status == KVF_E_PEER_LOST)
            break;
        moved += slice.bytes + slice.count;
        if (status) {
            kvf_batch_fail(batch, status, kvf_error_detail());
            (void)kvf_slices_drop_current(&link->slices);
        } else {
            (void)kvf_slices_advance(&link->slices, &slice);
        }
    }
    if (status == KVF_E_PEER_LOST && !kvf_shm_link_lose_if_gone(link))
        kvf_shm_link_lose(link, kvf_error_detail());
    end_complete(link, first);
    watch_owner(link);
    set_blocked(link, link->blocked);
    return link->ready && !link->lost && link->slices.current && status != KVF_E_AGAIN;
}
