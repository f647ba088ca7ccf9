/*
 * The owner's side. Whoever connects is a stranger until it has shown the key of the card, and is not
 * believed afterwards either: it can make us copy only between our registered memory and the buffer it gave.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "transport/shm/shm.h"
#include "transport/shm/shm_process.h"

#define ACCEPT_AT_ONCE 32
#define MESSAGES_AT_ONCE 64
#define SLOT_BYTES_MAX (16ull << 20)

/* Best effort: who does not read it finds the connection closed. */
static void say_refused(const kvf_shm_endpoint *endpoint, int fd, kvf_shm_refusal why) {
    kvf_shm_refused_message message = {{SHM_REFUSED, why}, kvf_transport_oldest(endpoint->transport)};
    (void)kvf_shm_send(fd, &message, sizeof message, -1);
}

/* ---- coming and going ------------------------------------------------------------------------ */

static void unmap_buffer(kvf_shm_buffer *buffer) {
    if (buffer->address)
        (void)munmap(buffer->address, buffer->slot_bytes * buffer->slots);
    *buffer = (kvf_shm_buffer){0};
}

static void free_client(kvf_shm_client *client) {
    kvf_shm_endpoint *endpoint = client->endpoint;
    KVF_LIST_REMOVE(endpoint->clients, client);
    endpoint->unknown_clients -= !client->known;
    unmap_buffer(&client->buffer);
    (void)shm_gate_shut(client->gate);
    kvf_shm_gate_unmap(client->gate);
    if (client->gate_fd >= 0)
        (void)close(client->gate_fd);
    /* A forked child may hold the same file open, and then closing it does not end the watching. */
    (void)epoll_ctl(endpoint->epoll_fd, EPOLL_CTL_DEL, client->fd, NULL);
    (void)close(client->fd);
    kvf_free(client);
}

/* It closes its end outside of any copy, and the kernel closes it after all of its threads. */
bool kvf_shm_client_writes(kvf_shm_client *client) {
    struct pollfd end = {client->fd, POLLIN, 0};
    if (!shm_gate_shut(client->gate))
        return false;
    return !client->hung_up && !(poll(&end, 1, 0) > 0 && (end.revents & (POLLHUP | POLLERR)));
}

/* One that is in the middle of a write is kept until it is not: it may be asked for by kvf_shm_fence(). */
void kvf_shm_sweep_clients(kvf_shm_endpoint *endpoint) {
    for (kvf_shm_client *client = endpoint->clients, *next; client; client = next) {
        next = client->following;
        if (!client->gone)
            continue;
        if (!kvf_shm_client_writes(client)) {
            free_client(client);
        } else if (!client->retired) {
            client->retired = true;
            (void)epoll_ctl(endpoint->epoll_fd, EPOLL_CTL_DEL, client->fd, NULL);
        }
    }
}

void kvf_shm_close_clients(kvf_shm_endpoint *endpoint) {
    while (endpoint->clients)
        free_client(endpoint->clients);
}

/* Strangers that say nothing must not keep others out: the one that came first goes first. */
static void drop_oldest_unknown(kvf_shm_endpoint *endpoint) {
    kvf_shm_client *oldest = NULL;
    for (kvf_shm_client *client = endpoint->clients; client; client = client->following)
        if (!client->known && !client->gone)
            oldest = client; /* clients are listed newest first */
    if (oldest)
        oldest->gone = true;
}

static kvf_status add_client(kvf_shm_endpoint *endpoint, int fd) {
    pid_t pid;
    kvf_status status = kvf_shm_peer_process(fd, &pid);
    if (status)
        return status;
    kvf_shm_client *client = kvf_alloc0(1, sizeof *client);
    if (!client)
        return kvf_nomem("a client");
    client->endpoint = endpoint;
    client->fd = fd;
    client->gate_fd = -1;
    client->watch = (kvf_shm_watch){SHM_WATCH_CLIENT, client};
    status = kvf_shm_watch_add(endpoint, fd, &client->watch);
    if (status) {
        kvf_free(client);
        return status;
    }
    KVF_LIST_ADD(endpoint->clients, client);
    if (++endpoint->unknown_clients > SHM_CLIENTS_UNKNOWN_MAX)
        drop_oldest_unknown(endpoint);
    return KVF_OK;
}

/* Without a descriptor for it, the connection at the head of the queue would stay there, and we would be
 * called for it forever. */
static void refuse_one(kvf_shm_endpoint *endpoint) {
    if (endpoint->spare_fd < 0)
        return;
    (void)close(endpoint->spare_fd);
    int fd = accept4(endpoint->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0)
        (void)close(fd);
    endpoint->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void kvf_shm_accept(kvf_shm_endpoint *endpoint) {
    for (int i = 0; i < ACCEPT_AT_ONCE; i++) {
        int fd = accept4(endpoint->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE)
                refuse_one(endpoint);
            return;
        }
        kvf_status status = add_client(endpoint, fd);
        if (status == KVF_E_PERMISSION)
            say_refused(endpoint, fd, SHM_REFUSED_USER);
        if (status)
            (void)close(fd);
    }
}

/* ---- what a client is told at first ---------------------------------------------------------- */

/* A region inside memory that we allocated can be mapped; any other has only its address. */
static kvf_shm_region describe_region(const kvf_shm_endpoint *endpoint, const kvf_memory *region) {
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
        message->regions[i] = describe_region(client->endpoint, &regions[client->regions_told + i]);
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
    (void)close(client->gate_fd);
    client->gate_fd = -1;
    return KVF_OK;
}

/* Sends what is due, in order, until the client does not read. */
static kvf_status tell(kvf_shm_client *client) {
    uint32_t count;
    const kvf_memory *regions = kvf_transport_regions(client->endpoint->transport, &count);
    kvf_status status = KVF_OK;
    while (!status && !client->ready_told) {
        if (client->arenas_told < client->endpoint->arena_count) {
            status = tell_arena(client);
        } else if (client->regions_told < client->region_count) {
            status = tell_regions(client, regions, client->region_count);
        } else if (!client->gate_told) {
            status = tell_gate(client);
        } else {
            kvf_shm_header ready = {SHM_READY, 0};
            status = kvf_shm_send(client->fd, &ready, sizeof ready, -1);
            client->ready_told = !status;
        }
    }
    if (!status && client->answer_due) {
        status = kvf_shm_send(client->fd, &client->answer, sizeof client->answer, -1);
        client->answer_due = status != KVF_OK;
    }
    return status;
}

/* ---- what a client asks ---------------------------------------------------------------------- */

/* In a time that does not depend on how much of the key is right. */
static bool same_key(const unsigned char *a, const unsigned char *b) {
    unsigned char different = 0;
    for (size_t i = 0; i < SHM_ID_BYTES; i++)
        different |= a[i] ^ b[i];
    return different == 0;
}

void kvf_shm_client_refuse(kvf_shm_client *client, kvf_shm_refusal why) {
    say_refused(client->endpoint, client->fd, why);
    client->gone = true;
}

static bool refuse(kvf_shm_client *client, kvf_shm_refusal why) {
    kvf_shm_client_refuse(client, why);
    return false;
}

static bool take_hello(kvf_shm_client *client, const kvf_shm_packet *packet) {
    const kvf_shm_hello *hello = &packet->as.hello;
    if (packet->as.header.kind != SHM_HELLO || packet->bytes < offsetof(kvf_shm_hello, region_count))
        return false;
    if (hello->version != SHM_VERSION || packet->bytes != sizeof *hello)
        return refuse(client, SHM_REFUSED_VERSION);
    if (!same_key(hello->key, client->endpoint->card.key))
        return refuse(client, SHM_REFUSED_KEY);
    if (kvf_guests_fenced(&client->endpoint->guests, hello->from))
        return refuse(client, SHM_REFUSED_FENCED);
    if (hello->generation < kvf_transport_oldest(client->endpoint->transport))
        return refuse(client, SHM_REFUSED_GENERATION);
    (void)kvf_transport_regions(client->endpoint->transport, &client->region_count);
    if (hello->region_count > client->region_count)
        return refuse(client, SHM_REFUSED_PROTOCOL);
    client->region_count = hello->region_count;
    client->known = true;
    memcpy(client->from, hello->from, SHM_ID_BYTES);
    memcpy(client->name, hello->name, SHM_NAME_BYTES - 1); /* the last byte stays 0 */
    kvf_guests_see(&client->endpoint->guests, hello->from);
    client->endpoint->unknown_clients--;
    return true;
}

static bool take_buffer(kvf_shm_client *client, const kvf_shm_packet *packet) {
    const kvf_shm_buffer_message *message = &packet->as.buffer;
    uint64_t bytes;
    if (packet->bytes != sizeof *message || client->buffer.address || message->slots == 0 ||
        message->slots > SHM_SLOTS_MAX || message->slot_bytes == 0 || message->slot_bytes > SLOT_BYTES_MAX ||
        !kvf_mul(message->slot_bytes, message->slots, &bytes))
        return false;
    unsigned char *address;
    if (kvf_shm_map_foreign(packet->fd, bytes, &address))
        return false;
    client->buffer = (kvf_shm_buffer){address, message->slot_bytes, message->slots};
    return true;
}

/* Every piece in our regions, and all of them in the slot. */
static kvf_status check_pieces(const kvf_shm_client *client, const kvf_shm_move_message *move,
                               uint64_t *bytes) {
    uint32_t regions;
    const kvf_memory *memory = kvf_transport_regions(client->endpoint->transport, &regions);
    *bytes = 0;
    for (uint32_t i = 0; i < move->header.count; i++) {
        const kvf_shm_piece *piece = &move->pieces[i];
        if (piece->region >= regions)
            return KVF_E_NOT_REGISTERED;
        if (piece->offset > memory[piece->region].bytes ||
            piece->bytes > memory[piece->region].bytes - piece->offset ||
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
    for (uint32_t i = 0; i < move->header.count; i++) {
        const kvf_shm_piece *piece = &move->pieces[i];
        unsigned char *ours = bases[piece->region] + piece->offset;
        if (move->direction == KVF_READ)
            memcpy(slot, ours, piece->bytes);
        else
            memcpy(ours, slot, piece->bytes);
        slot += piece->bytes;
    }
}

static bool take_move(kvf_shm_client *client, const kvf_shm_packet *packet, uint64_t *budget) {
    const kvf_shm_move_message *move = &packet->as.move;
    if (packet->bytes < offsetof(kvf_shm_move_message, pieces) ||
        !kvf_shm_fits(packet, offsetof(kvf_shm_move_message, pieces), sizeof(kvf_shm_piece),
                      SHM_PIECES_MAX) ||
        !client->buffer.address || move->slot >= client->buffer.slots ||
        (move->direction != KVF_READ && move->direction != KVF_WRITE))
        return false;
    if (client->hung_up)
        return true; /* nobody waits for it, and what it wanted written it has taken back */
    uint64_t bytes;
    kvf_status status = check_pieces(client, move, &bytes);
    if (!status)
        copy_pieces(client, move);
    bool hurried = kvf_transport_hurried(client->endpoint->transport);
    *budget = hurried ? 0 : *budget - kvf_min_u64(*budget, bytes);
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

/* False: it does not keep to the protocol. */
static bool take_message(kvf_shm_client *client, const kvf_shm_packet *packet, uint64_t *budget) {
    if (!client->known)
        return take_hello(client, packet);
    switch (packet->as.header.kind) {
    case SHM_BUFFER:
        return take_buffer(client, packet);
    case SHM_MOVE:
        return take_move(client, packet, budget);
    case SHM_NOTICE:
        return take_notice(client, packet);
    default:
        return false;
    }
}

/* Whether there was one. */
static bool read_one(kvf_shm_client *client, uint64_t *budget) {
    kvf_shm_packet *packet = &client->endpoint->packet;
    /* What there is no memory for stays in the socket. */
    if (kvf_deliver_room(client->endpoint->transport, KVF_NOTICE_ROOM_MAX))
        return false;
    kvf_status status = kvf_shm_receive(client->fd, packet);
    if (status) {
        client->gone = status != KVF_E_AGAIN;
        return false;
    }
    client->gone = !take_message(client, packet, budget);
    if (client->gone && client->known)
        (void)refuse(client, SHM_REFUSED_PROTOCOL);
    if (packet->fd >= 0)
        (void)close(packet->fd);
    return !client->gone;
}

void kvf_shm_serve(kvf_shm_client *client, uint32_t events, uint64_t *budget) {
    if (client->gone)
        return;
    client->hung_up = client->hung_up || (events & (EPOLLHUP | EPOLLERR));
    kvf_status status = KVF_OK;
    for (int i = 0; *budget > 0 && i < MESSAGES_AT_ONCE; i++) {
        /* Nothing is read while an answer cannot be sent, so there is never more than one. */
        if (client->known && !client->hung_up && (status = tell(client)) != KVF_OK)
            break;
        if (!read_one(client, budget))
            break;
    }
    if (!client->gone && client->known && !client->hung_up && !status)
        status = tell(client);
    if (status && status != KVF_E_AGAIN)
        client->gone = status != KVF_E_PEER_LOST; /* lost: what it sent before is read next time */
    bool blocked = status == KVF_E_AGAIN;
    if (blocked != client->blocked && !client->gone)
        kvf_shm_watch_change(client->endpoint, client->fd, &client->watch, !blocked, blocked);
    client->blocked = blocked;
}
