/*
 * The fabric for peers on this host, in these files:
 *
 *   shm.c         the endpoint: its socket, its memory, its card, its progress()
 *   shm_serve.c   the owner's side: clients, and their requests
 *   shm_tenants.c limits of each process at an owner: connections, memory and time
 *   shm_link.c    the consumer's side: connecting, messages from the owner, and moving batches
 *   shm_direct.c  reading and writing another process's memory by process_vm_readv and process_vm_writev
 *   shm_gate.c    shutting a writer out
 *   shm_slots.c   moving through a shared buffer, with the owner's help, where direct access is forbidden or slow
 *   shm_choice.c  which side copies what, where both can
 *   shm_wire.c    messages and shared memory
 */
#ifndef KVF_TRANSPORT_SHM_H
#define KVF_TRANSPORT_SHM_H

#include <sys/types.h>
#include <sys/uio.h>

#include "base/clock.h"
#include "base/wake.h"
#include "base/watch.h"
#include "transport/fences.h"
#include "transport/shm/shm_choice.h"
#include "transport/shm/shm_gate.h"
#include "transport/shm/shm_tenants.h"
#include "transport/shm/shm_wire.h"
#include "transport/slices.h"

#define SHM_VECTORS 1024u /* IOV_MAX, the most that one process_vm_readv takes */
#define SHM_SLOTS 4u      /* the owner fills some while we empty others */

/** What an epoll event points to. */
typedef struct kvf_shm_watch {
    enum { SHM_WATCH_LISTEN, SHM_WATCH_WAKE, SHM_WATCH_TIMER, SHM_WATCH_CLIENT, SHM_WATCH_LINK } kind;
    void *owner;
} kvf_shm_watch;

/** Memory from kvf_transport_allocate(). */
typedef struct kvf_shm_arena {
    unsigned char *address;
    uint64_t bytes;
    int fd;
} kvf_shm_arena;

typedef struct kvf_shm_link kvf_shm_link;

typedef struct kvf_shm_endpoint {
    kvf_transport *transport;
    bool no_direct_read;
    bool only_direct; /* never through slots unless the kernel forbids it */
    uint32_t slots;   /* for each link */
    int epoll_fd, listen_fd;
    kvf_wake wake;
    kvf_timer timer; /* expires when owners have had time to answer */
    int spare_fd;    /* closed for a moment when there are no more descriptors */
    kvf_shm_watch listen_watch, wake_watch, timer_watch;
    kvf_shm_card card;
    kvf_shm_arena *arenas;
    uint32_t arena_count;
    kvf_shm_client *clients;   /* connections that have shown the key */
    kvf_shm_client *strangers; /* connections that have not; both newest first */
    uint32_t leaving;          /* of both: gone, but not freed yet */
    kvf_shm_tenants tenants;
    kvf_shm_seat listen_seat;
    uint64_t door_until_ns; /* no connection is accepted before; 0: all are */
    kvf_fences fences;
    kvf_shm_link *links;
    kvf_shm_packet packet; /* being handled */
    struct iovec local[SHM_VECTORS], remote[SHM_VECTORS];
} kvf_shm_endpoint;

/** Shared memory through which an owner helps. */
typedef struct kvf_shm_buffer {
    unsigned char *address;
    uint64_t bytes; /* mapped */
    uint64_t slot_bytes;
    uint32_t slots;
} kvf_shm_buffer;

/** A consumer that is connected to us. */
struct kvf_shm_client {
    kvf_shm_endpoint *endpoint;
    kvf_shm_watch watch;
    kvf_shm_tenant *tenant; /* NULL: a stranger that is gone */
    kvf_shm_seat seat;
    int fd;
    bool known; /* has shown the key */
    bool gone;
    bool hung_up;          /* only messages that it sent before are left */
    bool blocked;          /* it does not read: we wait until it does */
    uint32_t arenas_told;  /* part of the first messages to it */
    uint64_t oldest;       /* kvf_transport_oldest() when it came: it knows no region that was gone by then */
    uint32_t region_count; /* in the card it has */
    uint32_t regions_told;
    bool ready_told;
    bool gate_told;
    bool retired;             /* gone, but perhaps still writing: we wait for its end */
    uint64_t inside_since_ns; /* when it was first found writing after it was told to stop; 0: never */
    unsigned char from[SHM_ID_BYTES];
    char name[SHM_NAME_BYTES];
    kvf_shm_gate *gate;
    int gate_fd; /* until it is sent */
    bool answer_due;
    kvf_shm_moved_message answer;
    bool buffer_due; /* it must be told how much of its buffer we take */
    kvf_shm_buffer buffer;
    kvf_shm_client *previous, *following;
};

/** The content of one slot. */
typedef struct kvf_shm_slot {
    bool busy;
    kvf_batch *batch; /* NULL: cancelled, the answer will be ignored */
    kvf_slice slice;
} kvf_shm_slot;

/** Our connection to an owner. */
struct kvf_shm_link {
    kvf_shm_endpoint *endpoint;
    kvf_peer *peer; /* NULL once it was reported lost */
    kvf_shm_watch watch;
    int fd;
    kvf_shm_card card;
    uint64_t connect_until_ns; /* the owner's queue is full: we retry until then; 0: connected */
    uint64_t connect_at_ns;
    pid_t pid;      /* 0 when it has none in our namespace */
    int process_fd; /* a pidfd, or -1 */
    bool ready;
    bool lost;
    bool refused;               /* the owner refused or ended the connection, or has a full queue; it lives */
    char why[KVF_REASON_BYTES]; /* why it was lost */
    const char *no_direct; /* why slots are used and its process is not read and written directly; or NULL */
    bool blocked;          /* the socket is full: something waits until it is not */
    bool watching_writes;
    kvf_slices slices;

    uint32_t region_count, regions_known;
    unsigned char **bases; /* of regions that are mapped here; NULL for memory the owner's caller brought */
    uint64_t *addresses;   /* in the owner's memory */
    bool some_unmapped;
    kvf_shm_arena *arenas; /* as mapped here; no descriptors */
    uint32_t arena_count;

    kvf_shm_gate *gate; /* NULL: writing needs no leave */

    kvf_shm_buffer buffer; /* made when it is first needed */
    int buffer_fd;         /* until it is sent */
    bool buffer_taken;     /* the owner has said how much it takes: no MOVE is sent before */
    kvf_shm_slot slots[SHM_SLOTS_MAX];
    kvf_shm_choice choice; /* where the kernel allows both ways */
    bool look;             /* answers may have come while we read: take them before going on */
    kvf_shm_link *previous, *following;
};

/** Changes the events that a descriptor is watched for. */
void kvf_shm_watch_change(const kvf_shm_endpoint *endpoint, int fd, kvf_shm_watch *watch, bool read,
                          bool write);

/* shm_serve.c */

/** Describes a region to clients: by its place in memory that we allocated, which can be mapped, or by its address. */
kvf_shm_region kvf_shm_describe_region(const kvf_shm_endpoint *endpoint, const kvf_memory *region);

/** A connection waits to be accepted. */
void kvf_shm_knock(kvf_shm_endpoint *endpoint);

/** Accepts connections again, if it is time; otherwise the timer says when. */
void kvf_shm_open_door(kvf_shm_endpoint *endpoint);

/** A client has sent something, reads again, or has hung up; `events` are epoll's. */
void kvf_shm_client_wants(kvf_shm_client *client, uint32_t events);

/** Accepts connections, handles messages from clients, and sends them those that are due, turn by turn, until work of
 * `budget` is done or nothing is left. Returns the work. */
uint64_t kvf_shm_take_turns(kvf_shm_endpoint *endpoint, uint64_t budget);

/** Frees a bounded number of clients that are gone; returns whether more can be freed at once. */
bool kvf_shm_sweep_clients(kvf_shm_endpoint *endpoint);

void kvf_shm_close_clients(kvf_shm_endpoint *endpoint);

/** Tells a client why, if it reads, and hangs up in the next turn. Does nothing if the client is gone already. */
void kvf_shm_client_refuse(kvf_shm_client *client, kvf_shm_refusal why);

/** Shuts a client's gate. KVF_E_AGAIN: it may be in the middle of a write; the detail says who, and for how long. */
kvf_status kvf_shm_client_shut_out(kvf_shm_client *client);

kvf_status kvf_shm_fence(void *self, const void *part, size_t bytes);
kvf_status kvf_shm_admit(void *self, const void *part, size_t bytes);

/* shm_link.c */

kvf_status kvf_shm_connect(void *self, const void *data, size_t bytes, kvf_peer *peer, void **out);
void kvf_shm_disconnect(void *self);
kvf_status kvf_shm_submit(void *self, kvf_batch *batch);
void kvf_shm_cancel(void *self, kvf_batch *batch);
kvf_status kvf_shm_notify(void *self, const void *data, size_t bytes);
bool kvf_shm_is_brought(const void *self); /**< some of the peer's memory: it cannot be mapped */
unsigned char *kvf_shm_enter(void *self, uint32_t region, kvf_direction direction);
bool kvf_shm_leave(void *self, kvf_direction direction);
const char *kvf_shm_link_way(const void *self);

/** Memory is reached through a shared buffer: the kernel has refused process_vm_readv and its like. */
#define SHM_FORBIDDEN "a shared buffer, because the kernel forbids process_vm_readv"

/** Reads the owner's messages: at most one answer, or twice SHM_SLOTS_MAX messages. */
void kvf_shm_link_read(kvf_shm_link *link);

/** Moves up to `budget` bytes; true when there is more to do at once. */
bool kvf_shm_link_move(kvf_shm_link *link, uint64_t budget);

/** Ends the connection of a link that is lost or being freed; the link then only waits for kvf_shm_disconnect(). */
void kvf_shm_link_hang_up(kvf_shm_link *link);

/** Notes that the link is lost, and why; the first reason stays. */
void kvf_shm_link_lose(kvf_shm_link *link, const char *why);

/** Why the owner is gone, judged by its socket and its process, or has refused us; NULL: neither. */
const char *kvf_shm_link_gone(const kvf_shm_link *link);

/** Whether the owner of a lost link lives: it refused us, or this side ended the link, as for want of a descriptor. What it
 * writes may then still be under way, and it may connect again and write more. */
bool kvf_shm_link_owner_lives(kvf_shm_link *link);

/** Whether the owner is gone; then the link is lost, with the owner's last message as the reason, if it sent one. */
bool kvf_shm_link_lose_if_gone(kvf_shm_link *link);

/* shm_direct.c */

/**
 * Moves a slice between our memory and another process's.
 *
 * @return KVF_OK; KVF_E_UNSUPPORTED (the kernel forbids it); KVF_E_PEER_LOST; KVF_E_IO (the memory is not
 *         there; the detail names the run)
 */
kvf_status kvf_shm_direct(const kvf_shm_link *link, kvf_direction direction, const kvf_slice *slice);

/* shm_slots.c */

/** Whether a slice can be started now; makes the buffer first. KVF_E_AGAIN: not before the owner answers or reads. */
kvf_status kvf_shm_slots_free(kvf_shm_link *link);

/** Cuts a slice to at most that many bytes and runs: whole runs, or a part of the first. */
void kvf_shm_cut(kvf_slice *slice, uint64_t bytes, size_t runs);

/** Starts as much of the next slice of the current batch as fits. */
kvf_status kvf_shm_slots_start(kvf_shm_link *link, const kvf_slice *next, kvf_slice *started);

/** Handles the owner's message of how much of the buffer it takes; returns false if that is invalid. */
bool kvf_shm_slots_taken(kvf_shm_link *link, const kvf_shm_buffer_message *answer);

/** Handles an answer; returns false if it is invalid. */
bool kvf_shm_slots_moved(kvf_shm_link *link, const kvf_shm_moved_message *answer);

/** The requests that the owner has not answered. */
kvf_shm_load kvf_shm_slots_load(const kvf_shm_link *link);

/** The time to read everything we wait for without the owner; 0: we wait for nothing. */
uint64_t kvf_shm_slots_alone_ns(const kvf_shm_link *link);

/** The owner does not answer: reads what it was asked for directly. */
void kvf_shm_slots_rescue(kvf_shm_link *link);

/** Ends cancelled batches that need not wait for their answers. */
void kvf_shm_slots_forget(kvf_shm_link *link);

void kvf_shm_slots_close(kvf_shm_link *link);

#endif
