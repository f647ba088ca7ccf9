#include "transport/cuda/cuda.h"

#include <poll.h>
#include <stdio.h>

#include "cuda/over.h"
#include "cuda/word.h"

/* ---- an owner that is gone ----------------------------------------------------------------------- */

void kvf_cuda_link_lose(kvf_cuda_link *link, const char *why) {
    if (link->lost)
        return;
    link->lost = true;
    (void)snprintf(link->why, sizeof link->why, "%s", why);
    /* We hang up later, and read nothing until then. */
    kvf_watch_remove(link->endpoint->epoll_fd, link->fd);
    kvf_watch_remove(link->endpoint->epoll_fd, link->process_fd);
    kvf_wake_set(&link->endpoint->wake, true);
}

static void take_refusal(kvf_cuda_link *link, const kvf_cuda_packet *packet) {
    static const char *const words[] = {
        [CUDA_REFUSED_VERSION] = "the peer refused the connection: it speaks another version of the protocol",
        [CUDA_REFUSED_KEY] = "the peer refused the connection: the key of the card is not the peer's",
        [CUDA_REFUSED_FENCED] = "the peer refused the connection: it has shut this endpoint out",
        [CUDA_REFUSED_PROTOCOL] = "the peer refused the connection: a message of this endpoint made no sense",
        [CUDA_REFUSED_USER] = "the peer refused the connection: it runs as another user",
        [CUDA_REFUSED_FULL] = "the peer refused the connection: it has the most connections that it allows",
        [CUDA_REFUSED_CLOSED] = "the peer has closed the connection",
        [CUDA_REFUSED_SHORT] = "the peer refused the connection: it has no memory or descriptor left for it",
    };
    const uint32_t refusal = packet->bytes == sizeof packet->as.refused ? packet->as.header.count : 0;
    char text[160];
    if (!link->lost) {
        link->closed = refusal == CUDA_REFUSED_CLOSED;
        link->refused = !link->closed;
    }
    if (refusal == CUDA_REFUSED_GENERATION) {
        (void)snprintf(text, sizeof text,
                       "the card is for generation %llu of the peer's memory, which is now at %llu: a new "
                       "card is needed",
                       (unsigned long long)link->generation, (unsigned long long)packet->as.refused.number);
        link->stale = true;
        kvf_cuda_link_lose(link, text);
        return;
    }
    const bool known = refusal < sizeof words / sizeof *words && words[refusal];
    kvf_cuda_link_lose(link, known ? words[refusal] : "the peer refused the connection");
}

/* False: the message is invalid. */
static bool take_message(kvf_cuda_link *link, kvf_cuda_packet *packet, int fd) {
    switch (packet->as.header.kind) {
    case CUDA_REFUSED:
        take_refusal(link, packet);
        return true;
    case CUDA_READY:
        kvf_cuda_fetch_begin(link);
        return true;
    case CUDA_SEGMENT:
        return kvf_cuda_fetch_take(link, packet, fd);
    case CUDA_WRITTEN:
        return kvf_cuda_write_answered(link, packet);
    default:
        return false;
    }
}

/* Any message may bring a descriptor; and handling one may read the next. */
static void read_messages(kvf_cuda_link *link) {
    kvf_cuda_packet *packet = &link->endpoint->packet;
    while (!link->lost) {
        int fd = -1;
        kvf_status status = kvf_cuda_wire_receive_with(link->fd, packet, &fd);
        if (status == KVF_E_AGAIN)
            return;
        if (status && (status != KVF_E_IO || !kvf_cuda_fetch_miss(link, packet)))
            kvf_cuda_link_lose(link, kvf_error_detail());
        else if (!status && !take_message(link, packet, fd))
            kvf_cuda_link_lose(link, "a message of the peer makes no sense");
        kvf_fd_close(&fd);
    }
}

/* Checks the socket and the process, for a forked child may keep the socket open. The owner's last message may say
 * why it is gone. */
bool kvf_cuda_link_lose_if_gone(kvf_cuda_link *link) {
    struct pollfd looked_at[2] = {{link->fd, POLLIN, 0}, {link->process_fd, POLLIN, 0}};
    if (link->lost || poll(looked_at, link->process_fd >= 0 ? 2 : 1, 0) <= 0)
        return link->lost;
    if (looked_at[0].revents)
        read_messages(link);
    if (looked_at[1].revents)
        kvf_cuda_link_lose(link, "the peer's process has ended");
    return link->lost;
}

/* ---- connecting -------------------------------------------------------------------------------- */

static void close_maps(kvf_cuda_link *link) {
    for (kvf_cuda_map *map = link->maps, *following; map; map = following) {
        following = map->following;
        kvf_cuda_map_close(map);
    }
    link->maps = NULL;
}

/* Makes one map for each device that we have memory on. */
static kvf_status map_regions(kvf_cuda_link *link, const kvf_cuda_region *regions, uint32_t count) {
    kvf_status status = KVF_OK;
    for (uint32_t device = 0; device < KVF_CUDA_DEVICES_MAX && !status; device++) {
        kvf_cuda_map *map = NULL;
        if (!link->endpoint->copiers[device])
            continue;
        status = kvf_cuda_map_open(device, regions, count, link->same_process, &map);
        if (!status) {
            map->following = link->maps;
            link->maps = map;
        }
    }
    return status ? status : kvf_cuda_fetch_open(link, regions, count);
}

/* Checks what map_regions() would, and keeps the regions for it. */
static kvf_status keep_regions(kvf_cuda_link *link, const kvf_cuda_region *regions, uint32_t count) {
    kvf_status status = KVF_OK;
    for (uint32_t device = 0; device < KVF_CUDA_DEVICES_MAX && !status; device++)
        if (link->endpoint->copiers[device])
            status = kvf_cuda_map_check(device, regions, count);
    if (status)
        return status;
    link->unmapped = kvf_copy(regions, count, sizeof *regions);
    link->unmapped_count = count;
    return link->unmapped ? KVF_OK : kvf_nomem("a peer's memory");
}

/* A stage has one connection to a peer, and may read arenas over one that was made for writing. */
kvf_status kvf_cuda_link_map(kvf_cuda_link *link) {
    if (!link->unmapped)
        return KVF_OK;
    kvf_status status = map_regions(link, link->unmapped, link->unmapped_count);
    if (status) {
        kvf_cuda_fetch_close(link);
        close_maps(link);
        return status;
    }
    kvf_free(link->unmapped);
    link->unmapped = NULL;
    link->ready = false;
    kvf_cuda_fetch_begin(link);
    return KVF_OK;
}

static kvf_status greet(const kvf_cuda_link *link, const kvf_cuda_card *card) {
    kvf_cuda_hello hello = {
        .header = {CUDA_HELLO, 0}, .version = CUDA_WIRE_VERSION, .generation = link->generation};
    memcpy(hello.key, card->key, CUDA_ID_BYTES);
    memcpy(hello.from, link->endpoint->card.name, CUDA_ID_BYTES);
    (void)snprintf(hello.name, sizeof hello.name, "%s", kvf_transport_name(link->endpoint->transport));
    return kvf_cuda_wire_send(link->fd, &hello, sizeof hello);
}

/* Within our own process we use the addresses on the card, but only if the endpoint has the same ones: anyone with a
 * card of ours could forge one like it. */
static kvf_status know_process(kvf_cuda_link *link, const kvf_cuda_card *card,
                               const kvf_cuda_region *regions) {
    pid_t process = 0;
    kvf_status status = kvf_neighbour_know_process(link->fd, &process, &link->process_fd);
    if (status)
        return status;
    if (memcmp(card->process, link->endpoint->card.process, CUDA_ID_BYTES) != 0)
        return KVF_OK;
    status = kvf_cuda_check_ours(card, regions, link->generation);
    link->same_process = !status;
    return status == KVF_E_NOT_FOUND ? KVF_OK : status;
}

static void free_link(kvf_cuda_link *link) {
    close_maps(link);
    kvf_free(link->unmapped);
    link->unmapped = NULL;
    kvf_cuda_fetch_close(link);
    kvf_watch_remove(link->endpoint->epoll_fd, link->fd);
    kvf_neighbour_hang_up(&link->fd);
    kvf_watch_close(link->endpoint->epoll_fd, &link->process_fd);
}

static kvf_status reach(kvf_cuda_link *link, const kvf_cuda_card *card, const kvf_cuda_region *regions) {
    kvf_status status = kvf_cuda_wire_connect(card->name, &link->fd);
    if (status == KVF_E_AGAIN)
        return kvf_fail(KVF_E_IO, "%s", kvf_error_detail());
    if (status)
        return status;
    status = know_process(link, card, regions);
    if (!status)
        status = link->only_written ? keep_regions(link, regions, card->region_count)
                                    : map_regions(link, regions, card->region_count);
    if (!status)
        status = greet(link, card);
    if (!status)
        status = kvf_watch_add(link->endpoint->epoll_fd, link->fd, &link->watch);
    if (!status && link->process_fd >= 0)
        status = kvf_watch_add(link->endpoint->epoll_fd, link->process_fd, &link->watch);
    return status;
}

static bool has_memory(const kvf_cuda_endpoint *endpoint) {
    for (uint32_t i = 0; i < endpoint->region_count; i++)
        if (endpoint->regions[i].bytes > 0)
            return true;
    return false;
}

/* Opens a link that belongs to no peer or client yet. */
static kvf_status open_link(kvf_cuda_endpoint *endpoint, const kvf_cuda_card *card,
                            const kvf_cuda_region *regions, uint64_t generation, bool only_written,
                            kvf_cuda_link **out) {
    kvf_status status = kvf_neighbour_check(&endpoint->card.place, &card->place);
    kvf_cuda_link *link = status ? NULL : kvf_alloc0(1, sizeof *link);
    if (!link)
        return status ? status : kvf_nomem("a connection");
    *link = (kvf_cuda_link){.endpoint = endpoint,
                            .generation = generation,
                            .only_written = only_written,
                            .fd = -1,
                            .process_fd = -1};
    link->watch = (kvf_cuda_watch){CUDA_WATCH_LINK, link};
    status = reach(link, card, regions);
    if (status) {
        free_link(link);
        kvf_free(link);
        return status;
    }
    KVF_LIST_ADD(endpoint->links, link);
    *out = link;
    return KVF_OK;
}

kvf_status kvf_cuda_link_connect(void *self, const void *data, size_t bytes, kvf_peer *peer, void **out) {
    kvf_cuda_endpoint *endpoint = self;
    kvf_cuda_card card;
    if (bytes == 0 || !has_memory(endpoint))
        return kvf_fail(KVF_E_UNSUPPORTED, "%s has registered no CUDA memory",
                        bytes == 0 ? "the peer" : "this endpoint");
    if (bytes < sizeof card || (bytes - sizeof card) % sizeof(kvf_cuda_region) != 0)
        return kvf_fail(KVF_E_PARSE, "its part of the card has %zu bytes", bytes);
    memcpy(&card, data, sizeof card);
    if ((bytes - sizeof card) / sizeof(kvf_cuda_region) != card.region_count)
        return kvf_fail(KVF_E_PARSE, "its part of the card has %zu bytes for %u regions", bytes,
                        card.region_count);
    kvf_cuda_link *link = NULL;
    kvf_cuda_region *regions = kvf_copy((const char *)data + sizeof card, card.region_count, sizeof *regions);
    kvf_status status =
        regions ? kvf_peer_check_regions(peer, card.region_count, &regions->bytes, sizeof *regions)
                : kvf_nomem("a peer");
    if (!status)
        status = open_link(endpoint, &card, regions, kvf_peer_generation(peer), kvf_peer_only_written(peer),
                           &link);
    kvf_free(regions);
    if (status)
        return status;
    link->peer = peer;
    *out = link;
    return KVF_OK;
}

kvf_status kvf_cuda_link_back(kvf_cuda_client *client) {
    kvf_status status = open_link(client->endpoint, &client->told_card, client->told, client->told_generation,
                                  false, &client->back);
    if (!status)
        client->back->client = client;
    return status;
}

/* ---- a link ------------------------------------------------------------------------------------- */

const char *kvf_cuda_link_way(const void *self) {
    const kvf_cuda_link *link = self;
    return link->only_written ? "kernels of the peer, which read the memory of this process"
           : link->fetching && link->fetching->in_segments ? "kernels, memory mapped segment by segment"
           : link->same_process                            ? "kernels, memory of this process"
                                                           : "kernels, memory mapped by CUDA IPC";
}

const char *kvf_cuda_link_refusal(const void *self) {
    const kvf_cuda_link *link = self;
    return link->fetching && *link->fetching->why ? link->fetching->why : NULL;
}

kvf_status kvf_cuda_link_notify(void *self, const void *data, size_t bytes) {
    const kvf_cuda_link *link = self;
    kvf_cuda_notice notice = {.header = {CUDA_NOTICE, (uint32_t)bytes}};
    KVF_ASSERT(bytes <= sizeof notice.data);
    memcpy(notice.data, data, bytes);
    return kvf_cuda_wire_send(link->fd, &notice, offsetof(kvf_cuda_notice, data) + bytes);
}

static void unlist(kvf_cuda_link *link) {
    kvf_cuda_endpoint *endpoint = link->endpoint;
    if (endpoint->first_to_go == link)
        endpoint->first_to_go = link->following;
    KVF_LIST_REMOVE(endpoint->links, link);
}

/* Whether the owner of a lost link lives: it refused us, or this side ended the link, as after a message that made no
 * sense. What it wrote before may then still be under way, and it may connect again and write more. */
static bool owner_lives(const kvf_cuda_link *link) {
    struct pollfd looked_at[2] = {{link->fd, 0, 0}, {link->process_fd, POLLIN, 0}};
    if (link->refused || link->closed)
        return link->refused;
    (void)poll(looked_at, link->process_fd >= 0 ? 2 : 1, 0);
    return !(looked_at[0].revents & (POLLHUP | POLLERR)) && !looked_at[1].revents;
}

static void forget_batches(kvf_cuda_link *link) {
    link->peer = NULL;
    link->slices = (kvf_slices){0};
    memset(link->copies, 0, sizeof link->copies);
}

/* Lets the peer's memory go, and then hangs up; frees a link that nobody has any more. The driver may wait for all work
 * of a device meanwhile, so not while a stream there may wait for requests of this process. False: it is put off. */
static bool let_go(kvf_cuda_link *link) {
    if (link->fd >= 0 && kvf_cuda_words_awaited())
        return false;
    free_link(link);
    if (link->left) {
        unlist(link);
        kvf_free(link);
    }
    return true;
}

bool kvf_cuda_link_report(kvf_cuda_link *link) {
    kvf_peer *peer = link->peer;
    if (!link->lost || kvf_cuda_copy_count(link) > 0)
        return false;
    if (peer) {
        const bool lives = owner_lives(link);
        forget_batches(link);
        /* The rest comes with the next look, if the peer does not disconnect at once. */
        kvf_wake_set(&link->endpoint->wake, true);
        (lives ? kvf_peer_refused : kvf_peer_lost)(peer, link->why);
        return false;
    }
    if (link->client) {
        kvf_cuda_write_lost(link);
        link->client = NULL;
        link->left = true;
    }
    return !let_go(link);
}

static bool has_settled(void *context) {
    kvf_cuda_link *link = context;
    kvf_cuda_copy_poll(link);
    return kvf_cuda_copy_count(link) == 0;
}

/* Waits until our kernels end, but not for ever if the device hangs: then the memory that they access stays mapped. */
static bool settle(kvf_cuda_link *link) {
    kvf_cuda_link_lose(link, "the connection is closed");
    return kvf_cuda_await(has_settled, link, link->endpoint->patience_ns);
}

/* Keeps a link whose kernels do not end: the owner must not learn that we have released its memory, for we have not.
 * Its batches are over for those who submitted them; only its jobs are still looked at. */
static void abandon(kvf_cuda_link *link) {
    unlist(link);
    KVF_LIST_ADD(link->endpoint->abandoned, link);
}

/* Whether the jobs of an abandoned link have ended by now. */
static bool has_ended(kvf_cuda_link *link) {
    for (uint32_t i = 0; i < CUDA_COPIES; i++)
        if (link->copies[i].job && kvf_copy_job_poll(link->copies[i].job) != KVF_IN_PROGRESS)
            link->copies[i].job = NULL;
    return kvf_cuda_copy_count(link) == 0;
}

bool kvf_cuda_links_hang(kvf_cuda_endpoint *endpoint) {
    bool hang = false;
    for (kvf_cuda_link *link = endpoint->abandoned, *following; link; link = following) {
        following = link->following;
        if (!has_ended(link)) {
            hang = true;
        } else if (!kvf_cuda_words_awaited()) { /* as in let_go() */
            KVF_LIST_REMOVE(endpoint->abandoned, link);
            kvf_cuda_write_forget(link);
            free_link(link);
            kvf_free(link);
        }
    }
    return hang;
}

void kvf_cuda_link_leave(kvf_cuda_link *back) {
    KVF_ASSERT(!back->asked_first);
    back->client = NULL;
    back->left = true;
    kvf_cuda_link_lose(back, "the client has other memory now");
}

bool kvf_cuda_link_quiet(const void *self) {
    return kvf_cuda_copy_count(self) == 0;
}

/* False: the device hangs, and the link is abandoned. */
static bool stop(kvf_cuda_link *link) {
    if (link->fd < 0 || settle(link))
        return true;
    abandon(link);
    return false;
}

void kvf_cuda_link_disconnect(void *self) {
    kvf_cuda_link *link = self;
    if (!stop(link))
        return;
    kvf_cuda_write_forget(link);
    forget_batches(link);
    link->client = NULL;
    link->left = true;
    if (!let_go(link))
        kvf_wake_set(&link->endpoint->wake, true);
}

void kvf_cuda_links_close(kvf_cuda_endpoint *endpoint) {
    for (kvf_cuda_link *link; (link = endpoint->links);) {
        if (!stop(link))
            continue;
        unlist(link);
        free_link(link);
        kvf_free(link);
    }
}

void kvf_cuda_links_keep(kvf_cuda_endpoint *endpoint) {
    static kvf_cuda_link *kept; /* so that what checks for leaks finds them */
    kvf_cuda_gate_enter();
    for (kvf_cuda_link *link; (link = endpoint->abandoned);) {
        KVF_LIST_REMOVE(endpoint->abandoned, link);
        KVF_LIST_ADD(kept, link);
    }
    kvf_cuda_gate_leave();
}
