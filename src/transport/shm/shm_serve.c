/*
 * The owner's side. A process that connects is a stranger until it has shown the key of the card, and is not
 * trusted afterwards either: it can make us copy only between our registered memory and the buffer it gave.
 */
#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "transport/shm/shm.h"

#define UNMAPPED_AT_ONCE (8ull << 20)
#define FREED_AT_ONCE 64u
#define PIECES_AT_ONCE 256u
#define DOOR_PAUSE_NS 1000000u
#define CLOSING_NS KVF_SECOND

/* Best effort: a client that does not read it finds the connection closed. */
static void say_refused(int fd, kvf_shm_refusal why, uint64_t number) {
    kvf_shm_refused_message message = {{SHM_REFUSED, why}, number};
    (void)kvf_shm_send(fd, &message, sizeof message, -1);
}

/* ---- coming and going ------------------------------------------------------------------------ */

static void unmap_buffer(kvf_shm_client *client) {
    kvf_shm_buffer *buffer = &client->buffer;
    if (!buffer->address)
        return;
    (void)munmap(buffer->address, buffer->bytes);
    kvf_shm_tenants_drop_buffer(&client->endpoint->tenants, client->tenant, buffer->bytes);
    *buffer = (kvf_shm_buffer){0};
}

static void free_client(kvf_shm_client *client) {
    kvf_shm_endpoint *endpoint = client->endpoint;
    if (client->known)
        KVF_LIST_REMOVE(endpoint->clients, client);
    else
        KVF_LIST_REMOVE(endpoint->strangers, client);
    endpoint->leaving -= client->gone;
    unmap_buffer(client);
    kvf_shm_tenants_stop_waiting(&client->seat);
    if (client->tenant)
        kvf_shm_tenants_leave(&endpoint->tenants, client->tenant, client->known);
    (void)shm_gate_shut(client->gate);
    kvf_shm_gate_unmap(client->gate);
    kvf_fd_close(&client->gate_fd);
    kvf_watch_remove(endpoint->epoll_fd, client->fd);
    kvf_neighbour_hang_up(&client->fd);
    kvf_free(client);
}

/* A stranger stops counting now, a client when its descriptor is closed. */
static void leave(kvf_shm_client *client) {
    if (client->gone)
        return;
    client->gone = true;
    client->endpoint->leaving++;
    kvf_shm_tenants_stop_waiting(&client->seat);
    if (client->known)
        return;
    kvf_shm_tenants_leave(&client->endpoint->tenants, client->tenant, false);
    client->tenant = NULL;
}

/* A client closes its end only outside of copies, and the kernel closes it after all threads of the client, unless a
 * forked child keeps it. */
static bool has_hung_up(kvf_shm_client *client) {
    struct pollfd end = {client->fd, POLLIN, 0};
    if (!client->hung_up)
        client->hung_up = (poll(&end, 1, 0) > 0 && (end.revents & (POLLHUP | POLLERR))) ||
                          kvf_neighbour_has_ended(client->tenant->process);
    return client->hung_up;
}

static void describe(const kvf_shm_client *client, char *out, size_t size) {
    char name[64];
    (void)snprintf(name, sizeof name, "%.63s", client->name);
    kvf_hide_controls(name);
    if (client->tenant->process)
        (void)snprintf(out, size, "%s (process %ld)", name, (long)client->tenant->process);
    else
        (void)snprintf(out, size, "%s (a process of another PID namespace)", name);
}

kvf_status kvf_shm_client_shut_out(kvf_shm_client *client) {
    char who[128];
    if (!shm_gate_shut(client->gate) || has_hung_up(client))
        return KVF_OK;
    uint64_t now = kvf_now(&kvf_monotonic);
    if (!client->inside_since_ns)
        client->inside_since_ns = now;
    describe(client, who, sizeof who);
    return kvf_fail(KVF_E_AGAIN,
                    "%s has been in the middle of a write for %.1f s since it was told to stop; while its "
                    "process lives, it may still write the memory",
                    who, (double)(now - client->inside_since_ns) / KVF_SECOND);
}

/* Keeps a client that is in the middle of a write until it is not, for kvf_shm_fence() may ask for it. Only its end is
 * watched for then. */
static void retire(kvf_shm_client *client) {
    if (!client->retired)
        kvf_shm_watch_change(client->endpoint, client->fd, &client->watch, false, false);
    client->retired = true;
}

bool kvf_shm_sweep_clients(kvf_shm_endpoint *endpoint) {
    uint64_t unmapped = 0;
    uint32_t freed = 0;
    for (kvf_shm_client *client = endpoint->strangers, *next; client && endpoint->leaving; client = next) {
        next = client->following;
        if (client->gone)
            free_client(client);
    }
    for (kvf_shm_client *client = endpoint->clients, *next; client && endpoint->leaving; client = next) {
        next = client->following;
        if (!client->gone)
            continue;
        if (shm_gate_shut(client->gate) && !client->hung_up) {
            retire(client);
            continue;
        }
        if (unmapped >= UNMAPPED_AT_ONCE || freed >= FREED_AT_ONCE)
            return true;
        unmapped += client->buffer.bytes;
        freed++;
        free_client(client);
    }
    return false;
}

/* The owner may use its memory for something else when we have closed. So nobody may begin a write any more, and those
 * that are in the middle of one end it, but for processes that are stopped there for longer than a second. */
static void wait_for_writers(kvf_shm_endpoint *endpoint) {
    const uint64_t end = kvf_now(&kvf_monotonic) + CLOSING_NS;
    for (kvf_shm_client *client = endpoint->clients; client; client = client->following)
        (void)shm_gate_shut(client->gate);
    for (kvf_shm_client *client = endpoint->clients; client; client = client->following)
        while (kvf_shm_client_shut_out(client) == KVF_E_AGAIN && kvf_now(&kvf_monotonic) < end)
            kvf_pause(KVF_MILLISECOND);
}

void kvf_shm_close_clients(kvf_shm_endpoint *endpoint) {
    wait_for_writers(endpoint);
    while (endpoint->strangers)
        free_client(endpoint->strangers);
    while (endpoint->clients)
        free_client(endpoint->clients);
}

/* Silent strangers must not keep others out: refuses the oldest stranger of the process with the most strangers. Without
 * a word it would take this process for one that has ended. */
static void drop_stranger(kvf_shm_endpoint *endpoint) {
    const kvf_shm_tenant *largest = NULL;
    kvf_shm_client *oldest = NULL;
    for (kvf_shm_client *client = endpoint->strangers; client; client = client->following)
        if (!client->gone && (!largest || client->tenant->strangers > largest->strangers))
            largest = client->tenant;
    for (kvf_shm_client *client = endpoint->strangers; client; client = client->following)
        if (!client->gone && client->tenant == largest)
            oldest = client; /* the list is newest first */
    if (!oldest)
        return;
    endpoint->tenants.refused++;
    say_refused(oldest->fd, SHM_REFUSED_FULL, endpoint->tenants.strangers_max);
    leave(oldest);
}

static kvf_status add_client(kvf_shm_endpoint *endpoint, int fd) {
    pid_t pid;
    kvf_status status = kvf_neighbour_process(fd, &pid);
    if (status)
        return status;
    kvf_shm_client *client = kvf_alloc0(1, sizeof *client);
    if (!client)
        return kvf_nomem("a client");
    client->endpoint = endpoint;
    client->fd = fd;
    client->gate_fd = -1;
    client->watch = (kvf_shm_watch){SHM_WATCH_CLIENT, client};
    client->seat.client = client;
    client->tenant = kvf_shm_tenants_enter(&endpoint->tenants, pid);
    status = client->tenant ? kvf_watch_add(endpoint->epoll_fd, fd, &client->watch) : kvf_nomem("a client");
    if (status) {
        if (client->tenant)
            kvf_shm_tenants_leave(&endpoint->tenants, client->tenant, false);
        kvf_free(client);
        return status;
    }
    KVF_LIST_ADD(endpoint->strangers, client);
    if (endpoint->tenants.strangers > endpoint->tenants.strangers_max)
        drop_stranger(endpoint);
    /* It has usually sent its HELLO by now, and so stops being a stranger before the next is accepted. */
    if (!client->gone)
        kvf_shm_client_wants(client, 0);
    return KVF_OK;
}

static void shut_door(kvf_shm_endpoint *endpoint, uint64_t now) {
    endpoint->door_until_ns = now + DOOR_PAUSE_NS;
    kvf_shm_watch_change(endpoint, endpoint->listen_fd, &endpoint->listen_watch, false, false);
    kvf_timer_by(&endpoint->timer, endpoint->door_until_ns);
}

void kvf_shm_open_door(kvf_shm_endpoint *endpoint) {
    if (!endpoint->door_until_ns)
        return;
    if (kvf_now(&kvf_monotonic) < endpoint->door_until_ns) {
        kvf_timer_by(&endpoint->timer, endpoint->door_until_ns);
        return;
    }
    endpoint->door_until_ns = 0;
    kvf_shm_watch_change(endpoint, endpoint->listen_fd, &endpoint->listen_watch, true, false);
}

/* Returns whether more connections may be waiting. */
static bool accept_one(kvf_shm_endpoint *endpoint, uint64_t *work) {
    uint64_t now = kvf_now(&kvf_monotonic);
    *work = SHM_LOOK_WORK;
    if (!kvf_shm_tenants_opens_door(&endpoint->tenants, now)) {
        shut_door(endpoint, now);
        return false;
    }
    const kvf_shm_refused_message no_descriptor = {{SHM_REFUSED, SHM_REFUSED_SHORT},
                                                   endpoint->tenants.clients};
    int fd;
    kvf_status status = kvf_neighbour_accept(endpoint->listen_fd, &endpoint->spare_fd, &no_descriptor,
                                             sizeof no_descriptor, &fd);
    *work = SHM_CONNECTION_WORK;
    endpoint->tenants.refused += status == KVF_E_LIMIT;
    if (status == KVF_E_IO) /* the socket stays readable: we would be woken at once, again and again */
        shut_door(endpoint, now);
    if (status)
        return status == KVF_E_LIMIT;
    status = add_client(endpoint, fd);
    if (!status)
        return true;
    /* Without a word the client would take this process for one that has ended, and its last writes for over. */
    say_refused(fd, status == KVF_E_PERMISSION ? SHM_REFUSED_USER : SHM_REFUSED_SHORT,
                endpoint->tenants.clients);
    (void)close(fd);
    return true;
}

/* ---- the first messages to a client ---------------------------------------------------------- */

kvf_shm_region kvf_shm_describe_region(const kvf_shm_endpoint *endpoint, const kvf_memory *region) {
    kvf_shm_region told = {(uint64_t)(uintptr_t)region->address, region->bytes, 0, SHM_NO_ARENA, 0};
    for (uint32_t i = 0; i < endpoint->arena_count; i++) {
        const kvf_shm_arena *arena = &endpoint->arenas[i];
        uint64_t begin = (uint64_t)(uintptr_t)arena->address;
        if (told.address >= begin && told.address - begin <= arena->bytes &&
            told.bytes <= arena->bytes - (told.address - begin)) {
            told.arena = i;
            told.arena_offset = told.address - begin;
        }
    }
    return told;
}

static kvf_status tell_regions(kvf_shm_client *client, const kvf_memory *regions, uint32_t count) {
    kvf_shm_regions_message *message = &client->endpoint->packet.as.regions;
    uint32_t here = count - client->regions_told;
    if (here > SHM_REGIONS_MAX)
        here = SHM_REGIONS_MAX;
    message->header = (kvf_shm_header){SHM_REGIONS, here};
    message->first = client->regions_told;
    message->unused = 0;
    for (uint32_t i = 0; i < here; i++)
        message->regions[i] = kvf_shm_describe_region(client->endpoint, &regions[client->regions_told + i]);
    kvf_status status = kvf_shm_send(
        client->fd, message, offsetof(kvf_shm_regions_message, regions) + here * sizeof(kvf_shm_region), -1);
    if (!status)
        client->regions_told += here;
    return status;
}

static kvf_status tell_arena(kvf_shm_client *client) {
    const kvf_shm_arena *arena = &client->endpoint->arenas[client->arenas_told];
    kvf_shm_arena_message message = {{SHM_ARENA, client->arenas_told}, arena->bytes};
    kvf_status status = kvf_shm_send(client->fd, &message, sizeof message, arena->fd);
    if (!status)
        client->arenas_told++;
    return status;
}

static kvf_status tell_gate(kvf_shm_client *client) {
    kvf_shm_header message = {SHM_GATE, 0};
    kvf_status status = client->gate ? KVF_OK : kvf_shm_gate_make(&client->gate, &client->gate_fd);
    if (!status)
        status = kvf_shm_send(client->fd, &message, sizeof message, client->gate_fd);
    if (status)
        return status;
    client->gate_told = true;
    kvf_fd_close(&client->gate_fd);
    return KVF_OK;
}

static kvf_status tell_ready(kvf_shm_client *client) {
    kvf_shm_header ready = {SHM_READY, 0};
    kvf_status status = kvf_shm_send(client->fd, &ready, sizeof ready, -1);
    client->ready_told = !status;
    return status;
}

static kvf_status tell_buffer(kvf_shm_client *client) {
    kvf_shm_buffer_message message = {{SHM_BUFFER, 0}, client->buffer.slot_bytes, client->buffer.slots, 0};
    kvf_status status = kvf_shm_send(client->fd, &message, sizeof message, -1);
    client->buffer_due = status != KVF_OK;
    return status;
}

static kvf_status tell_answer(kvf_shm_client *client) {
    kvf_status status = kvf_shm_send(client->fd, &client->answer, sizeof client->answer, -1);
    client->answer_due = status != KVF_OK;
    return status;
}

static bool is_anything_due(const kvf_shm_client *client) {
    return client->known && !client->hung_up &&
           (!client->ready_told || client->buffer_due || client->answer_due);
}

/* Sends the next message that is due. */
static kvf_status tell(kvf_shm_client *client) {
    uint32_t count;
    const kvf_memory *regions = kvf_transport_regions(client->endpoint->transport, client->endpoint, &count);
    if (client->ready_told)
        return client->buffer_due ? tell_buffer(client) : tell_answer(client);
    if (client->arenas_told < client->endpoint->arena_count)
        return tell_arena(client);
    if (client->regions_told < client->region_count)
        return tell_regions(client, regions, client->region_count);
    return client->gate_told ? tell_ready(client) : tell_gate(client);
}

/* ---- messages from a client ------------------------------------------------------------------ */

/* The time does not depend on how much of the key is right. */
static bool same_key(const unsigned char *a, const unsigned char *b) {
    unsigned char different = 0;
    for (size_t i = 0; i < SHM_ID_BYTES; i++)
        different |= a[i] ^ b[i];
    return different == 0;
}

/* The end of our messages is seen at once, and also by a client that has no room for the message: what it reads from now
 * on may be other bytes. */
void kvf_shm_client_refuse(kvf_shm_client *client, kvf_shm_refusal why) {
    if (!client->gone) {
        say_refused(client->fd, why, kvf_transport_oldest(client->endpoint->transport));
        (void)shutdown(client->fd, SHUT_WR);
    }
    leave(client);
}

static bool refuse(kvf_shm_client *client, kvf_shm_refusal why) {
    kvf_shm_client_refuse(client, why);
    return false;
}

static bool find_place(const kvf_shm_client *client) {
    uint64_t limit;
    kvf_shm_tenant *loser;
    kvf_shm_refusal over = kvf_shm_tenants_admit(&client->endpoint->tenants, client->tenant, &limit, &loser);
    client->endpoint->tenants.refused += over || loser;
    if (over) {
        say_refused(client->fd, over, limit);
        return false;
    }
    kvf_shm_client *newest = loser ? client->endpoint->clients : NULL;
    while (newest && (newest->gone || newest->tenant != loser))
        newest = newest->following;
    if (newest) {
        say_refused(newest->fd, SHM_REFUSED_FULL, limit);
        leave(newest);
    }
    return true;
}

static bool take_hello(kvf_shm_client *client, const kvf_shm_packet *packet) {
    const kvf_shm_hello *hello = &packet->as.hello;
    if (packet->as.header.kind != SHM_HELLO || packet->bytes < offsetof(kvf_shm_hello, region_count))
        return false;
    if (hello->version != SHM_VERSION || packet->bytes != sizeof *hello)
        return refuse(client, SHM_REFUSED_VERSION);
    if (!same_key(hello->key, client->endpoint->card.key))
        return refuse(client, SHM_REFUSED_KEY);
    if (kvf_fences_has(&client->endpoint->fences, hello->from))
        return refuse(client, SHM_REFUSED_FENCED);
    client->oldest = kvf_transport_oldest(client->endpoint->transport);
    if (hello->generation < client->oldest)
        return refuse(client, SHM_REFUSED_GENERATION);
    (void)kvf_transport_regions(client->endpoint->transport, client->endpoint, &client->region_count);
    if (hello->region_count > client->region_count)
        return refuse(client, SHM_REFUSED_PROTOCOL);
    if (!find_place(client))
        return false;
    client->region_count = hello->region_count;
    client->known = true;
    KVF_LIST_REMOVE(client->endpoint->strangers, client);
    KVF_LIST_ADD(client->endpoint->clients, client);
    memcpy(client->from, hello->from, SHM_ID_BYTES);
    memcpy(client->name, hello->name, SHM_NAME_BYTES - 1); /* the last byte stays 0 */
    kvf_fences_see(&client->endpoint->fences, hello->from);
    return true;
}

static bool take_buffer(kvf_shm_client *client, const kvf_shm_packet *packet) {
    const kvf_shm_buffer_message *message = &packet->as.buffer;
    kvf_shm_buffer taken = {.slot_bytes = message->slot_bytes, .slots = message->slots};
    if (packet->bytes != sizeof *message || client->buffer.address || taken.slots == 0 ||
        taken.slots > SHM_SLOTS_MAX || taken.slot_bytes == 0 || taken.slot_bytes > SHM_SLOT_BYTES)
        return false;
    kvf_shm_tenants *tenants = &client->endpoint->tenants;
    kvf_shm_tenants_take_buffer(tenants, client->tenant, &taken.slot_bytes, &taken.slots);
    taken.bytes = taken.slot_bytes * taken.slots;
    kvf_status status = kvf_shm_map_foreign(packet->fd, taken.bytes, &taken.address);
    if (status) {
        kvf_shm_tenants_drop_buffer(tenants, client->tenant, taken.bytes);
        if (status == KVF_E_NOMEM)
            kvf_shm_client_refuse(client, SHM_REFUSED_SHORT);
        return false;
    }
    client->buffer = taken;
    client->buffer_due = true;
    return true;
}

/* Every piece must lie in our regions, and all of them must fit into the slot. */
static kvf_status check_pieces(const kvf_shm_client *client, const kvf_shm_move_message *move,
                               uint64_t *bytes) {
    uint32_t regions;
    const kvf_memory *memory = kvf_transport_regions(client->endpoint->transport, client->endpoint, &regions);
    *bytes = 0;
    for (uint32_t i = 0; i < move->header.count; i++) {
        const kvf_shm_piece *piece = &move->pieces[i];
        if (piece->region >= regions)
            return KVF_E_NOT_REGISTERED;
        if (!kvf_lies_inside(piece->offset, piece->bytes, memory[piece->region].bytes) ||
            piece->bytes > client->buffer.slot_bytes - *bytes)
            return KVF_E_RANGE;
        *bytes += piece->bytes;
    }
    return KVF_OK;
}

/* check_pieces() has made all of this safe. */
static void copy_pieces(const kvf_shm_client *client, const kvf_shm_move_message *move) {
    unsigned char *const *bases = kvf_transport_bases(client->endpoint->transport);
    unsigned char *slot = client->buffer.address + move->slot * client->buffer.slot_bytes;
    kvf_run runs[PIECES_AT_ONCE];
    for (uint32_t at = 0; at < move->header.count;) {
        kvf_slice slice = {.runs = runs};
        for (; at < move->header.count && slice.count < PIECES_AT_ONCE; at++) {
            const kvf_shm_piece *piece = &move->pieces[at];
            runs[slice.count++] = (kvf_run){piece->offset, 0, piece->bytes, piece->region, 0};
            slice.bytes += piece->bytes;
        }
        if (move->direction == KVF_READ)
            kvf_slice_pack(&slice, bases, slot);
        else
            kvf_slice_unpack(&slice, bases, slot);
        slot += slice.bytes;
    }
}

static bool take_move(kvf_shm_client *client, const kvf_shm_packet *packet, uint64_t *work) {
    const kvf_shm_move_message *move = &packet->as.move;
    if (packet->bytes < offsetof(kvf_shm_move_message, pieces) ||
        !kvf_shm_fits(packet, offsetof(kvf_shm_move_message, pieces), sizeof(kvf_shm_piece),
                      SHM_PIECES_MAX) ||
        !client->buffer.address || move->slot >= client->buffer.slots ||
        (move->direction != KVF_READ && move->direction != KVF_WRITE))
        return false;
    if (client->hung_up)
        return true; /* it no longer waits for the answer, and has taken its writes back */
    uint64_t bytes;
    kvf_status status = check_pieces(client, move, &bytes);
    if (!status)
        copy_pieces(client, move);
    *work += (uint64_t)move->header.count * SHM_RUN_WORK + (status ? 0 : bytes);
    client->answer = (kvf_shm_moved_message){{SHM_MOVED, 0}, move->slot, (uint32_t)status};
    client->answer_due = true;
    return true;
}

static bool take_notice(const kvf_shm_client *client, const kvf_shm_packet *packet) {
    size_t bytes = packet->bytes - sizeof(kvf_shm_header);
    if (bytes < 1 || bytes > KVF_NOTICE_MAX || packet->as.header.count != bytes)
        return false;
    return kvf_deliver(client->endpoint->transport, client->name, packet->as.raw + sizeof(kvf_shm_header),
                       bytes) == KVF_OK;
}

/* False: the client violates the protocol, or was refused for another reason. */
static bool take_message(kvf_shm_client *client, const kvf_shm_packet *packet, uint64_t *work) {
    if (!client->known)
        return take_hello(client, packet);
    switch (packet->as.header.kind) {
    case SHM_BUFFER:
        return take_buffer(client, packet);
    case SHM_MOVE:
        return take_move(client, packet, work);
    case SHM_NOTICE:
        return take_notice(client, packet);
    default:
        return false;
    }
}

/* Reads and handles a message; false: there was none. */
static bool read_one(kvf_shm_client *client, uint64_t *work) {
    kvf_shm_packet *packet = &client->endpoint->packet;
    *work += SHM_LOOK_WORK;
    /* Without memory for a notification the message stays in the socket. */
    if (kvf_deliver_room(client->endpoint->transport, KVF_NOTICE_ROOM_MAX))
        return false;
    kvf_status status = kvf_shm_receive(client->fd, packet);
    if (status == KVF_E_IO) /* no descriptor for one that came with it */
        kvf_shm_client_refuse(client, SHM_REFUSED_SHORT);
    if (status) {
        if (status != KVF_E_AGAIN)
            leave(client);
        return false;
    }
    *work += SHM_MESSAGE_WORK;
    if (!take_message(client, packet, work)) {
        if (client->known)
            kvf_shm_client_refuse(client, SHM_REFUSED_PROTOCOL);
        leave(client);
    }
    kvf_fd_close(&packet->fd);
    return !client->gone;
}

/* Sends the next message that is due. False: the client does not read, or is gone. */
static bool send_due(kvf_shm_client *client, uint64_t *work) {
    kvf_status status = tell(client);
    *work += SHM_MESSAGE_WORK;
    if (status == KVF_E_PEER_LOST)
        client->hung_up = true; /* what it sent before is still read */
    else if (status && status != KVF_E_AGAIN)
        kvf_shm_client_refuse(client, SHM_REFUSED_SHORT);
    bool blocked = status == KVF_E_AGAIN;
    if (blocked != client->blocked && !client->gone)
        kvf_shm_watch_change(client->endpoint, client->fd, &client->watch, !blocked, blocked);
    client->blocked = blocked;
    return !client->gone && !blocked;
}

/* One step: sends a message that is due, or handles one that has come, with its answer. It reads nothing while an
 * answer cannot be sent, so there is never more than one. Returns whether there may be more to do. */
static bool serve(kvf_shm_client *client, uint64_t *work) {
    if (is_anything_due(client))
        return send_due(client, work);
    if (!read_one(client, work))
        return false;
    return client->ready_told && is_anything_due(client) ? send_due(client, work) : true;
}

/* ---- turns ----------------------------------------------------------------------------------- */

/* Strangers wait in the door's queue. */
static void wait_for_turn(kvf_shm_client *client) {
    kvf_shm_tenants *tenants = &client->endpoint->tenants;
    kvf_shm_tenants_wait(tenants, client->known ? client->tenant : &tenants->door, &client->seat);
}

void kvf_shm_knock(kvf_shm_endpoint *endpoint) {
    kvf_shm_tenants_wait(&endpoint->tenants, &endpoint->tenants.door, &endpoint->listen_seat);
}

void kvf_shm_client_wants(kvf_shm_client *client, uint32_t events) {
    client->hung_up = client->hung_up || (events & (EPOLLHUP | EPOLLERR));
    if (!client->gone)
        wait_for_turn(client);
}

uint64_t kvf_shm_take_turns(kvf_shm_endpoint *endpoint, uint64_t budget) {
    uint64_t done = 0;
    kvf_shm_tenant *tenant;
    for (kvf_shm_seat *seat; done < budget && (seat = kvf_shm_tenants_next(&endpoint->tenants, &tenant));) {
        uint64_t work = 0;
        kvf_shm_client *client = seat->client;
        bool more = client ? serve(client, &work) : accept_one(endpoint, &work);
        kvf_shm_tenants_spend(&endpoint->tenants, tenant, work);
        done += work;
        if (more && client)
            wait_for_turn(client);
        else if (more)
            kvf_shm_knock(endpoint);
        if (kvf_transport_hurried(endpoint->transport))
            break;
    }
    return done;
}
