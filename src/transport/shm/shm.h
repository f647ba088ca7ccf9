/*
 * The fabric for peers on this host, in these files:
 *
 *   shm.c         the endpoint: its socket, its memory, its card, its turn of work
 *   shm_serve.c   the owner's side: who is connected to us, and what they ask
 *   shm_tenants.c what each process may take of an owner: connections, memory and time
 *   shm_link.c    the consumer's side: connecting, what the owner tells, and moving batches
 *   shm_direct.c  reading and writing another process's memory by process_vm_readv and process_vm_writev
 *   shm_gate.c    shutting a writer out
 *   shm_slots.c   moving through a shared buffer, with the owner's help, where that is forbidden or slow
 *   shm_choice.c  who copies what, where both can
 *   shm_wire.c    messages and shared memory
 */
#ifndef KVF_TRANSPORT_SHM_H
#define KVF_TRANSPORT_SHM_H

#include <sys/types.h>
#include <sys/uio.h>

#include "base/wake.h"
#include "transport/fences.h"
#include "transport/shm/shm_choice.h"
#include "transport/shm/shm_gate.h"
#include "transport/shm/shm_tenants.h"
#include "transport/shm/shm_wire.h"
#include "transport/slices.h"

#define SHM_VECTORS 1024u /* IOV_MAX, the most that one process_vm_readv takes */
#define SHM_SLOTS 4u      /* the owner fills some while we empty others */

#define SECOND_NS 1000000000u

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
    int timer_fd;      /* expires when owners have had time to answer */
    uint64_t timer_ns; /* when it does; 0: it is not set */
    int spare_fd;      /* given up for a moment when there are no more descriptors */
    kvf_shm_watch listen_watch, wake_watch, timer_watch;
    kvf_shm_card card;
    kvf_shm_arena *arenas;
    uint32_t arena_count;
    kvf_shm_client *clients;   /* that have shown the key */
    kvf_shm_client *strangers; /* that have not; both newest first */
    uint32_t leaving;          /* of both: gone, and not freed yet */
    kvf_shm_tenants tenants;
    kvf_shm_seat listen_seat;
    uint64_t door_until_ns; /* nobody is accepted before; 0: whoever comes is */
    kvf_fences fences;
    kvf_shm_link *links;
    kvf_shm_packet packet; /* being looked at */
    struct iovec local[SHM_VECTORS], remote[SHM_VECTORS];
} kvf_shm_endpoint;

/** Shared memory through which an owner helps. */
typedef struct kvf_shm_buffer {
    unsigned char *address;
    uint64_t bytes; /* that are mapped */
    uint64_t slot_bytes;
    uint32_t slots;
} kvf_shm_buffer;

/** Somebody who is connected to us. */
struct kvf_shm_client {
    kvf_shm_endpoint *endpoint;
    kvf_shm_watch watch;
    kvf_shm_tenant *tenant; /* NULL: a stranger that is gone */
    kvf_shm_seat seat;
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
    bool retired;             /* gone, but perhaps still writing: waited for */
    uint64_t inside_since_ns; /* when it was first found writing after it was to stop; 0: it was not */
    unsigned char from[SHM_ID_BYTES];
    char name[SHM_NAME_BYTES];
    kvf_shm_gate *gate;
    int gate_fd; /* until it is sent */
    bool answer_due;
    kvf_shm_moved_message answer;
    bool buffer_due; /* it is to be told how much of its buffer is taken */
    kvf_shm_buffer buffer;
    kvf_shm_client *previous, *following;
};

/** What one slot carries. */
typedef struct kvf_shm_slot {
    bool busy;
    kvf_batch *batch; /* NULL: cancelled, the answer is of no interest */
    kvf_slice slice;
} kvf_shm_slot;

/** Our connection to an owner. */
struct kvf_shm_link {
    kvf_shm_endpoint *endpoint;
    kvf_peer *peer; /* NULL once it was reported lost */
    kvf_shm_watch watch;
    int fd;
    kvf_shm_card card;
    uint64_t connect_until_ns; /* its queue of connections is full: tried again until then; 0: connected */
    uint64_t connect_at_ns;
    pid_t pid;      /* 0 when it has none in our namespace */
    int process_fd; /* a pidfd, or -1 */
    bool ready;
    bool lost;
    bool refused;               /* its owner said so, and lives */
    char why[KVF_REASON_BYTES]; /* it was lost */
    const char *no_direct; /* why its process is not read and written directly, but slots are used; or NULL */
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
    bool buffer_taken;     /* the owner has said how much of it: nothing is asked for before */
    kvf_shm_slot slots[SHM_SLOTS_MAX];
    kvf_shm_choice choice; /* where the kernel allows both ways */
    bool look;             /* answers may have come while we read: they are taken before we go on */
    kvf_shm_link *previous, *following;
};

/** Makes the event descriptor readable at that time at the latest. */
void kvf_shm_wake_at(kvf_shm_endpoint *endpoint, uint64_t ns);

/** Nanoseconds of a clock that only goes forward. */
uint64_t kvf_shm_now_ns(void);

/** Watches a descriptor, or changes for what. */
kvf_status kvf_shm_watch_add(kvf_shm_endpoint *endpoint, int fd, kvf_shm_watch *watch);
void kvf_shm_watch_change(const kvf_shm_endpoint *endpoint, int fd, kvf_shm_watch *watch, bool read,
                          bool write);

/* shm_serve.c */

/** What a client is told of a region: where it is in memory that we allocated, which can be mapped, or only its address. */
kvf_shm_region kvf_shm_describe_region(const kvf_shm_endpoint *endpoint, const kvf_memory *region);

/** Somebody waits to be accepted. */
void kvf_shm_knock(kvf_shm_endpoint *endpoint);

/** Accepts again, if it is time. */
void kvf_shm_open_door(kvf_shm_endpoint *endpoint);

/** A client has sent something, reads again, or has hung up; `events` are epoll's. */
void kvf_shm_client_wants(kvf_shm_client *client, uint32_t events);

/** Accepts, handles what clients sent, and sends them what is due, turn by turn, until work of `budget` is done or
 * nothing is left. Returns the work. */
uint64_t kvf_shm_take_turns(kvf_shm_endpoint *endpoint, uint64_t budget);

/** Frees clients that are gone, a bounded number; whether there are more that can be freed at once. */
bool kvf_shm_sweep_clients(kvf_shm_endpoint *endpoint);

void kvf_shm_close_clients(kvf_shm_endpoint *endpoint);

/** Tells it why, as far as it reads, and hangs up in the next turn. Nothing happens when it is gone already. */
void kvf_shm_client_refuse(kvf_shm_client *client, kvf_shm_refusal why);

/** Shuts its gate. KVF_E_AGAIN: it may be in the middle of a write; the detail says who, and for how long. */
kvf_status kvf_shm_client_shut_out(kvf_shm_client *client);

kvf_status kvf_shm_fence(void *self, const void *part, size_t bytes);
kvf_status kvf_shm_admit(void *self, const void *part, size_t bytes);

/* shm_link.c */

kvf_status kvf_shm_connect(void *self, const void *data, size_t bytes, kvf_peer *peer, void **out);
void kvf_shm_disconnect(void *self);
kvf_status kvf_shm_submit(void *self, kvf_batch *batch);
void kvf_shm_cancel(void *self, kvf_batch *batch);
kvf_status kvf_shm_notify(void *self, const void *data, size_t bytes);
bool kvf_shm_is_brought(const void *self); /**< some of its memory: none can map that */
unsigned char *kvf_shm_enter(void *self, uint32_t region, kvf_direction direction);
bool kvf_shm_leave(void *self, kvf_direction direction);
const char *kvf_shm_link_way(const void *self);

/** Memory is reached through a shared buffer: the kernel has refused process_vm_readv and its like. */
#define SHM_FORBIDDEN "a shared buffer, for the kernel forbids process_vm_readv"

/** Reads what the owner has told: at most what fits into all slots. */
void kvf_shm_link_read(kvf_shm_link *link);

/** Moves up to `budget` bytes; true when there is more to do at once. */
bool kvf_shm_link_move(kvf_shm_link *link, uint64_t budget);

/** Ends the connection of a link that is lost or being freed: it only waits for kvf_shm_disconnect() then. */
void kvf_shm_link_hang_up(kvf_shm_link *link);

/** Notes that the link is lost, and how; the first reason stays. */
void kvf_shm_link_lose(kvf_shm_link *link, const char *why);

/** Why the owner is not there, by its socket and its process; NULL when it is. */
const char *kvf_shm_link_gone(const kvf_shm_link *link);

/** Whether the owner is there no more; then the link is lost, with the last thing it said as the reason. */
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

/** Whether a slice can be started now. Makes the buffer. KVF_E_AGAIN: not before an answer or a read. */
kvf_status kvf_shm_slots_free(kvf_shm_link *link);

/** Leaves in a slice what is at most so many bytes and runs: whole runs, or a part of the first. */
void kvf_shm_cut(kvf_slice *slice, uint64_t bytes, size_t runs);

/** Starts the next slice of the current batch, as much of it as fits. */
kvf_status kvf_shm_slots_start(kvf_shm_link *link, const kvf_slice *next, kvf_slice *started);

/** The owner has said how much of the buffer it takes; returns false when that makes no sense. */
bool kvf_shm_slots_taken(kvf_shm_link *link, const kvf_shm_buffer_message *answer);

/** Handles an answer; returns false when it makes no sense. */
bool kvf_shm_slots_moved(kvf_shm_link *link, const kvf_shm_moved_message *answer);

/** What the owner was asked for and has not answered. */
kvf_shm_load kvf_shm_slots_load(const kvf_shm_link *link);

/** What it would take to read without the owner what is waited for; 0: nothing is. */
uint64_t kvf_shm_slots_alone_ns(const kvf_shm_link *link);

/** The owner does not answer: reads what it was asked for without it. */
void kvf_shm_slots_rescue(kvf_shm_link *link);

/** Ends cancelled batches that need not wait for their answers. */
void kvf_shm_slots_forget(kvf_shm_link *link);

void kvf_shm_slots_close(kvf_shm_link *link);

#endif
