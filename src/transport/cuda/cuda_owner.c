#include "transport/cuda/cuda.h"

#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define CLIENTS_MAX 1024u          /* for all processes of this user */
#define HELLO_NS (15 * KVF_SECOND) /* within which a client must show the key */
#define DEAF_NS KVF_MILLISECOND /* before another try, if a connection can be neither accepted nor refused */
#define ACCEPTED 16             /* in one turn */
#define PACKETS 64              /* of one client, in one turn */
#define PAUSE_NS 100000         /* between two looks while readers are waited for */

_Static_assert(CUDA_ID_BYTES == KVF_FENCE_NAME_BYTES, "peers are fenced by their ids");

/* ---- clients ------------------------------------------------------------------------------------ */

void kvf_cuda_owner_drop(kvf_cuda_client *client) {
    kvf_cuda_endpoint *endpoint = client->endpoint;
    KVF_ASSERT(!client->back);
    KVF_LIST_REMOVE(endpoint->clients, client);
    endpoint->client_count--;
    kvf_watch_remove(endpoint->epoll_fd, client->fd);
    kvf_neighbour_hang_up(&client->fd);
    kvf_free(client->told);
    kvf_free(client);
}

/* Reads for the client that are under way go on; no more are begun. */
static void stop_reading(const kvf_cuda_client *client, const char *why) {
    if (client->back)
        kvf_cuda_link_lose(client->back, why);
}

/* Keeps the client until nothing is under way for it: then the link back to it drops it. */
static void hung_up(kvf_cuda_client *client) {
    if (!client->back) {
        kvf_cuda_owner_drop(client);
        return;
    }
    client->gone = true;
    (void)epoll_ctl(client->endpoint->epoll_fd, EPOLL_CTL_DEL, client->fd, NULL);
    stop_reading(client, "the writer has closed the connection");
}

static void say_refused(int fd, kvf_cuda_refusal why, uint64_t number) {
    const kvf_cuda_refused refused = {{CUDA_REFUSED, why}, number};
    (void)kvf_cuda_wire_send(fd, &refused, sizeof refused);
}

/* The client's kernels may be reading: it is gone only when it hangs up, or ends. */
static void refuse(kvf_cuda_client *client, kvf_cuda_refusal why, uint64_t number) {
    if (client->refused)
        return;
    client->refused = true;
    client->refused_ns = kvf_now(&kvf_monotonic);
    say_refused(client->fd, why, number);
    stop_reading(client, "the writer was refused");
}

kvf_status kvf_cuda_owner_tell(kvf_cuda_client *client, const void *message, size_t bytes, int fd) {
    const kvf_status status = kvf_cuda_wire_send_with(client->fd, message, bytes, fd);
    if (status)
        refuse(client, CUDA_REFUSED_SHORT, 0);
    return status;
}

static bool take_in(kvf_cuda_endpoint *endpoint, int fd, pid_t process) {
    kvf_cuda_client *client = kvf_alloc0(1, sizeof *client);
    if (!client)
        return false;
    client->endpoint = endpoint;
    client->fd = fd;
    client->process = process;
    client->accepted_ns = kvf_now(&kvf_monotonic);
    client->watch = (kvf_cuda_watch){CUDA_WATCH_CLIENT, client};
    if (kvf_watch_add(endpoint->epoll_fd, fd, &client->watch)) {
        kvf_free(client);
        return false;
    }
    KVF_LIST_ADD(endpoint->clients, client);
    endpoint->client_count++;
    kvf_timer_by(&endpoint->timer, client->accepted_ns + HELLO_NS);
    return true;
}

/* A process of another user gets no place among the clients. Everybody who is hung up on is told so: without a word, a
 * client takes this process for one that has ended, and what it was asked to read or write for over. */
static void let_in(kvf_cuda_endpoint *endpoint, int fd) {
    pid_t process = 0;
    const kvf_status status = kvf_neighbour_process(fd, &process);
    const bool full = endpoint->client_count >= CLIENTS_MAX;
    if (!status && !full && take_in(endpoint, fd, process))
        return;
    say_refused(fd,
                status == KVF_E_PERMISSION ? CUDA_REFUSED_USER
                : full                     ? CUDA_REFUSED_FULL
                                           : CUDA_REFUSED_SHORT,
                endpoint->client_count);
    (void)close(fd);
}

/* The socket stays readable: we would be woken at once, again and again. */
static void become_deaf(kvf_cuda_endpoint *endpoint) {
    kvf_watch_remove(endpoint->epoll_fd, endpoint->listen_fd);
    endpoint->deaf = true;
    kvf_timer_by(&endpoint->timer, kvf_now(&kvf_monotonic) + DEAF_NS);
}

/* Without memory for it, it is tried again. Returns whether it stays deaf. */
static bool listen_again(kvf_cuda_endpoint *endpoint) {
    endpoint->deaf = endpoint->deaf && kvf_watch_add(endpoint->epoll_fd, endpoint->listen_fd,
                                                     &endpoint->listen_watch) != KVF_OK;
    return endpoint->deaf;
}

void kvf_cuda_owner_accept(kvf_cuda_endpoint *endpoint) {
    const kvf_cuda_refused no_descriptor = {{CUDA_REFUSED, CUDA_REFUSED_SHORT}, endpoint->client_count};
    for (int i = 0; i < ACCEPTED; i++) {
        int fd;
        const kvf_status status = kvf_neighbour_accept(endpoint->listen_fd, &endpoint->spare_fd,
                                                       &no_descriptor, sizeof no_descriptor, &fd);
        if (status == KVF_E_IO)
            become_deaf(endpoint);
        if (status == KVF_E_AGAIN || status == KVF_E_IO)
            return;
        if (!status)
            let_in(endpoint, fd);
    }
}

void kvf_cuda_owner_expire(kvf_cuda_endpoint *endpoint) {
    uint64_t next = UINT64_MAX;
    if (endpoint->timer.at_ns == UINT64_MAX || kvf_now(&kvf_monotonic) < endpoint->timer.at_ns)
        return;
    const uint64_t now = kvf_now(&kvf_monotonic);
    for (kvf_cuda_client *client = endpoint->clients, *following; client; client = following) {
        following = client->following;
        if (client->known)
            continue;
        if (now - client->accepted_ns >= HELLO_NS) {
            if (!client->refused) /* this side may have had no memory to read its HELLO */
                say_refused(client->fd, CUDA_REFUSED_SHORT, endpoint->client_count);
            kvf_cuda_owner_drop(client);
        } else {
            next = kvf_min_u64(next, client->accepted_ns + HELLO_NS);
        }
    }
    if (listen_again(endpoint))
        next = kvf_min_u64(next, now + DEAF_NS);
    kvf_timer_set(&endpoint->timer, next);
}

/* ---- messages from clients ---------------------------------------------------------------------- */

static void take_hello(kvf_cuda_client *client, const kvf_cuda_packet *packet) {
    kvf_cuda_endpoint *endpoint = client->endpoint;
    const kvf_cuda_hello *hello = &packet->as.hello;
    const uint64_t oldest = kvf_transport_oldest(endpoint->transport);
    const kvf_cuda_header ready = {CUDA_READY, 0};
    if (packet->bytes != sizeof *hello || client->known)
        refuse(client, CUDA_REFUSED_PROTOCOL, 0);
    else if (hello->version != CUDA_WIRE_VERSION)
        refuse(client, CUDA_REFUSED_VERSION, CUDA_WIRE_VERSION);
    else if (memcmp(hello->key, endpoint->card.key, CUDA_ID_BYTES) != 0)
        refuse(client, CUDA_REFUSED_KEY, 0);
    else if (kvf_fences_has(&endpoint->fences, hello->from))
        refuse(client, CUDA_REFUSED_FENCED, 0);
    else if (hello->generation < oldest)
        refuse(client, CUDA_REFUSED_GENERATION, oldest);
    if (client->refused)
        return;
    client->known = true;
    client->oldest = oldest;
    memcpy(client->from, hello->from, CUDA_ID_BYTES);
    memcpy(client->name, hello->name, sizeof client->name);
    client->name[sizeof client->name - 1] = '\0';
    kvf_fences_see(&endpoint->fences, client->from);
    (void)kvf_cuda_owner_tell(client, &ready, sizeof ready, -1);
}

static void take_notice(kvf_cuda_client *client, const kvf_cuda_packet *packet) {
    const uint32_t count = packet->as.header.count;
    if (!client->known || count < 1 || count > CUDA_NOTICE_MAX ||
        packet->bytes != offsetof(kvf_cuda_notice, data) + count)
        refuse(client, CUDA_REFUSED_PROTOCOL, 0);
    else /* room was made for it */
        (void)kvf_deliver(client->endpoint->transport, client->name, packet->as.notice.data, count);
}

/* Handles messages about segments and writing; false: it is another kind of message, or invalid. */
static bool take_request(kvf_cuda_client *client, const kvf_cuda_packet *packet) {
    switch (packet->as.header.kind) {
    case CUDA_FETCH:
        return kvf_cuda_fetch_asked(client, packet);
    case CUDA_MEMORY:
        return kvf_cuda_write_told(client, packet);
    case CUDA_WRITE:
        return kvf_cuda_write_asked(client, packet);
    default:
        return false;
    }
}

bool kvf_cuda_owner_read(kvf_cuda_client *client) {
    kvf_cuda_endpoint *endpoint = client->endpoint;
    kvf_cuda_packet *packet = &endpoint->packet;
    for (int i = 0; i < PACKETS; i++) {
        if (kvf_deliver_room(endpoint->transport, KVF_NOTICE_ROOM_MAX))
            return true; /* a waiting notice keeps waiting */
        kvf_status status = kvf_cuda_wire_receive(client->fd, packet);
        if (status == KVF_E_AGAIN)
            return false;
        if (status == KVF_E_PEER_LOST) {
            hung_up(client);
            return false;
        }
        if (client->refused)
            continue; /* until it hangs up */
        if (status == KVF_OK && packet->as.header.kind == CUDA_HELLO)
            take_hello(client, packet);
        else if (status == KVF_OK && packet->as.header.kind == CUDA_NOTICE)
            take_notice(client, packet);
        else if (status != KVF_OK || !client->known || !take_request(client, packet))
            refuse(client, CUDA_REFUSED_PROTOCOL, 0);
        if (packet->as.header.kind == CUDA_FETCH)
            return true; /* exporting takes time: others have their turn */
    }
    return true;
}

/* ---- taking memory back ------------------------------------------------------------------------- */

static double seconds_refused(const kvf_cuda_client *client) {
    return (double)(kvf_now(&kvf_monotonic) - client->refused_ns) / KVF_SECOND;
}

/* Fails if kernels of ours still copy what the client asked to write. They go on when its process has ended. */
static kvf_status check_writes(const kvf_cuda_client *client, const char *was) {
    if (!client->back || kvf_cuda_copy_count(client->back) == 0)
        return KVF_OK;
    return kvf_fail(
        KVF_E_AGAIN,
        "kernels of this process still copy what %s, process %ld, asked to write, %.1f s after it "
        "was %s",
        client->name, (long)client->process, seconds_refused(client), was);
}

/* A client is judged by when it came and not by what it says. One whose process has ended reads no more, though a forked
 * child may keep its socket. */
kvf_status kvf_cuda_owner_take_back(kvf_cuda_endpoint *endpoint) {
    const uint64_t oldest = kvf_transport_oldest(endpoint->transport);
    kvf_status status = KVF_OK;
    for (kvf_cuda_client *client = endpoint->clients; client; client = client->following) {
        if (!client->known || client->oldest == oldest)
            continue;
        refuse(client, CUDA_REFUSED_GENERATION, oldest);
        if (check_writes(client, "told to let go of the memory"))
            status = KVF_E_AGAIN;
        else if (!kvf_neighbour_has_ended(client->process))
            status =
                kvf_fail(KVF_E_AGAIN,
                         "%s, process %ld, may be reading: it was told to let go of the memory %.1f s ago",
                         client->name, (long)client->process, seconds_refused(client));
    }
    return status;
}

static kvf_status name_in(const void *part, size_t bytes, unsigned char name[CUDA_ID_BYTES]) {
    kvf_cuda_card card;
    if (bytes < sizeof card)
        return kvf_fail(KVF_E_PARSE, "its part of the card has %zu bytes; allowed: %zu and more", bytes,
                        sizeof card);
    memcpy(&card, part, sizeof card);
    memcpy(name, card.name, CUDA_ID_BYTES);
    return KVF_OK;
}

/* A reader never writes to our memory. For a writer, our own kernels write it, and they end soon. */
kvf_status kvf_cuda_owner_fence(void *self, const void *part, size_t bytes) {
    kvf_cuda_endpoint *endpoint = self;
    unsigned char name[CUDA_ID_BYTES];
    if (bytes == 0)
        return KVF_E_NOT_FOUND; /* it has no CUDA memory, so it cannot be here */
    kvf_status status = name_in(part, bytes, name);
    if (!status)
        status = kvf_fences_add(&endpoint->fences, name);
    if (status)
        return status;
    for (kvf_cuda_client *client = endpoint->clients; client; client = client->following) {
        if (!client->known || memcmp(client->from, name, CUDA_ID_BYTES) != 0)
            continue;
        refuse(client, CUDA_REFUSED_FENCED, 0);
        if (check_writes(client, "shut out"))
            status = KVF_E_AGAIN;
    }
    if (status)
        return status;
    return kvf_fences_seen(&endpoint->fences, name) ? KVF_OK : KVF_E_NOT_FOUND;
}

kvf_status kvf_cuda_owner_admit(void *self, const void *part, size_t bytes) {
    unsigned char name[CUDA_ID_BYTES];
    if (bytes == 0)
        return KVF_OK;
    kvf_status status = name_in(part, bytes, name);
    if (!status)
        kvf_fences_remove(&((kvf_cuda_endpoint *)self)->fences, name);
    return status;
}

/* Whether a client may have mapped memory of ours: another process that knows the key, until it hangs up or ends. */
static bool maps(const kvf_cuda_client *client) {
    return client->known && client->process != getpid() && !kvf_neighbour_has_ended(client->process);
}

static bool is_mapped(kvf_cuda_endpoint *endpoint) {
    bool any = false;
    for (kvf_cuda_client *client = endpoint->clients, *following; client; client = following) {
        following = client->following;
        if (!maps(client))
            continue;
        refuse(client, CUDA_REFUSED_CLOSED, 0);
        any = true;
        (void)kvf_cuda_owner_read(client); /* may free it */
    }
    return any;
}

static bool wait_for_readers(kvf_cuda_endpoint *endpoint) {
    const uint64_t begun = kvf_now(&kvf_monotonic);
    while (is_mapped(endpoint)) {
        if (kvf_now(&kvf_monotonic) - begun > endpoint->patience_ns)
            return false;
        kvf_pause(PAUSE_NS);
    }
    return true;
}

bool kvf_cuda_owner_close(kvf_cuda_endpoint *endpoint, bool wait) {
    kvf_neighbour_stop_listening(&endpoint->listen_fd);
    for (kvf_cuda_client *client = endpoint->clients; client; client = client->following) {
        kvf_cuda_link *back = client->back;
        client->back = NULL;
        if (back)
            kvf_cuda_link_disconnect(back);
    }
    const bool quiet = !wait || wait_for_readers(endpoint);
    kvf_cuda_gate_enter();
    while (endpoint->clients)
        kvf_cuda_owner_drop(endpoint->clients);
    kvf_fd_close(&endpoint->spare_fd);
    kvf_cuda_gate_leave();
    return quiet;
}
