/*
 * The fabric for peers on this host, in these files:
 *
 *   shm.c         the endpoint: its socket, its memory, its card, its turn of work
 *   shm_serve.c   the owner's side: who is connected to us, and what they ask
 *   shm_link.c    the consumer's side: connecting, what the owner tells, and moving batches
 *   shm_direct.c  reading and writing another process's memory by process_vm_readv and process_vm_writev
 *   shm_gate.c    shutting a writer out
 *   shm_slots.c   moving through a shared buffer, with the owner's help, where that is forbidden or slower
 *   shm_choice.c  which of the two it is
 *   shm_wire.c    messages and shared memory
 */
#ifndef KVF_TRANSPORT_SHM_H
#define KVF_TRANSPORT_SHM_H

#include <sys/types.h>
#include <sys/uio.h>

#include "transport/shm/shm_choice.h"
#include "transport/shm/shm_gate.h"
#include "transport/shm/shm_wire.h"
#include "transport/slices.h"

#define SHM_VECTORS 1024u           /* IOV_MAX, the most that one process_vm_readv takes */
#define SHM_SLOT_BYTES (1u << 20)   /* of the shared buffer */
#define SHM_SLOTS 4u                /* the owner fills some while we empty others */
#define SHM_CLIENTS_UNKNOWN_MAX 64u /* connections that have not yet shown the key */

/** What an epoll event points to. */
typedef struct shm_watch {
    enum { SHM_WATCH_LISTEN, SHM_WATCH_WAKE, SHM_WATCH_TIMER, SHM_WATCH_CLIENT, SHM_WATCH_LINK } kind;
    void *owner;
} shm_watch;

/** Memory from kvf_transport_allocate(). */
typedef struct shm_arena {
    unsigned char *address;
    uint64_t bytes;
    int fd;
} shm_arena;

typedef struct shm_client shm_client;
typedef struct shm_link shm_link;

typedef struct shm_endpoint {
    kvf_transport *transport;
    bool no_direct_read;
    bool only_direct; /* never through slots unless the kernel forbids it */
    uint32_t slots;   /* for each link */
    int epoll_fd, listen_fd, wake_fd;
    int timer_fd; /* expires when owners have had time to answer */
    bool timing;
    int spare_fd; /* given up for a moment when there are no more descriptors */
    bool awake;
    shm_watch listen_watch, wake_watch, timer_watch;
    shm_card card;
    shm_arena *arenas;
    uint32_t arena_count;
    shm_client *clients;
    uint32_t unknown_clients;
    shm_guests guests;
    shm_link *links;
    shm_packet packet; /* being looked at */
    struct iovec local[SHM_VECTORS], remote[SHM_VECTORS];
} shm_endpoint;

/** Shared memory through which an owner helps. */
typedef struct shm_buffer {
    unsigned char *address;
    uint64_t slot_bytes;
    uint32_t slots;
} shm_buffer;

/** Somebody who is connected to us. */
struct shm_client {
    shm_endpoint *endpoint;
    shm_watch watch;
    int fd;
    bool known; /* has shown the key */
    bool gone;
    bool hung_up;          /* only what it had sent before is left */
    bool blocked;          /* it does not read: waiting until it does */
    uint32_t arenas_told;  /* of what it is told at first */
    uint32_t region_count; /* of the card it has */
    uint32_t regions_told;
    bool ready_told;
    bool gate_told;
    bool retired; /* gone, but perhaps still writing: waited for */
    unsigned char from[SHM_ID_BYTES];
    char name[SHM_NAME_BYTES];
    shm_gate *gate;
    int gate_fd; /* until it is sent */
    bool answer_due;
    shm_moved_message answer;
    shm_buffer buffer;
    shm_client *previous, *following;
};

/** What one slot carries. */
typedef struct shm_slot {
    bool busy;
    kvf_batch *batch; /* NULL: cancelled, the answer is of no interest */
    kvf_slice slice;
} shm_slot;

/** Our connection to an owner. */
struct shm_link {
    shm_endpoint *endpoint;
    kvf_peer *peer; /* NULL once it was reported lost */
    shm_watch watch;
    int fd;
    pid_t pid;      /* 0 when it has none in our namespace */
    int process_fd; /* a pidfd, or -1 */
    bool ready;
    bool lost;
    char why[KVF_REASON_BYTES]; /* it was lost */
    bool no_direct;             /* the kernel forbids it: use slots */
    bool blocked;               /* the socket is full: something waits until it is not */
    bool watching_writes;
    kvf_slices slices;

    uint32_t region_count, regions_known;
    unsigned char **bases; /* of regions that are mapped here; NULL for memory the owner's caller brought */
    uint64_t *addresses;   /* in the owner's memory */
    bool some_unmapped;
    shm_arena *arenas; /* as mapped here; no descriptors */
    uint32_t arena_count;

    shm_gate *gate; /* NULL: writing needs no leave */

    shm_buffer buffer; /* made when it is first needed */
    int buffer_fd;     /* until it is sent */
    shm_slot slots[SHM_SLOTS_MAX];
    shm_choice choice;      /* where the kernel allows both ways */
    uint64_t last_ns;       /* of the last answer, while more were to come; or 0 */
    uint64_t answers;       /* so far */
    uint64_t answers_timed; /* when the timer was started */
    shm_link *previous, *following;
};

/** Sees in a while whether owners have answered. */
void shm_start_timer(shm_endpoint *endpoint);

/** Makes the event descriptor readable, or not, by itself. */
void shm_wake(shm_endpoint *endpoint, bool on);

/** Watches a descriptor, or changes for what. */
kvf_status shm_watch_add(shm_endpoint *endpoint, int fd, shm_watch *watch);
void shm_watch_change(const shm_endpoint *endpoint, int fd, shm_watch *watch, bool read, bool write);

/* shm_serve.c */

/** Accepts who is waiting. */
void shm_accept(shm_endpoint *endpoint);

/** Handles what a client sent, and sends it what is due; `events` are epoll's. Takes what it copies from
 * `budget`. */
void shm_serve(shm_client *client, uint32_t events, uint64_t *budget);

/** Frees the clients that are gone. */
void shm_sweep_clients(shm_endpoint *endpoint);

void shm_close_clients(shm_endpoint *endpoint);

/** Tells it why, as far as it reads, and hangs up in the next turn. */
void shm_client_refuse(shm_client *client, shm_refusal why);

/** Shuts its gate; whether it may be in the middle of a write. */
bool shm_client_writes(shm_client *client);

kvf_status shm_fence(void *self, const void *part, size_t bytes);
kvf_status shm_admit(void *self, const void *part, size_t bytes);

/* shm_link.c */

kvf_status shm_connect(void *self, const void *data, size_t bytes, kvf_peer *peer, void **out);
void shm_disconnect(void *at);
kvf_status shm_submit(void *at, kvf_batch *batch);
void shm_cancel(void *at, kvf_batch *batch);
kvf_status shm_notify(void *at, const void *data, size_t bytes);

/** Reads what the owner has told: at most what fits into all slots. */
void shm_link_read(shm_link *link);

/** Moves up to `budget` bytes; true when there is more to do at once. */
bool shm_link_move(shm_link *link, uint64_t budget);

/** Ends the connection of a link that is lost or being freed: it only waits for shm_disconnect() then. */
void shm_link_hang_up(shm_link *link);

/** Notes that the link is lost, and how; the first reason stays. */
void shm_link_lose(shm_link *link, const char *why);

/** Why the owner is not there, by its socket and its process; NULL when it is. */
const char *shm_link_gone(const shm_link *link);

/* shm_direct.c */

/**
 * Moves a slice between our memory and another process's.
 *
 * @return KVF_OK; KVF_E_UNSUPPORTED (the kernel forbids it); KVF_E_PEER_LOST; KVF_E_IO (the memory is not
 *         there; the detail names the run)
 */
kvf_status shm_direct(const shm_link *link, kvf_direction direction, const kvf_slice *slice);

/* shm_slots.c */

/** Whether a slice can be started now. Makes the buffer. KVF_E_AGAIN: not before an answer or a read. */
kvf_status shm_slots_free(shm_link *link);

/** Starts the next slice of the current batch, as much of it as fits. */
kvf_status shm_slots_start(shm_link *link, const kvf_slice *next, kvf_slice *started);

/** Handles an answer; returns false when it makes no sense. */
bool shm_slots_moved(shm_link *link, const shm_moved_message *answer);

/** Whether answers are waited for. */
bool shm_slots_waiting(const shm_link *link);

/** The owner does not answer: reads what it was asked for without it. */
void shm_slots_rescue(shm_link *link);

/** Ends cancelled batches that need not wait for their answers. */
void shm_slots_forget(shm_link *link);

void shm_slots_close(shm_link *link);

#endif
