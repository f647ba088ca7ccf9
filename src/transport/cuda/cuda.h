/*
 * The fabric for memory of CUDA devices, between processes of one host, in these files:
 *
 *   cuda.c         the endpoint: its memory, its card, its progress()
 *   cuda_owner.c   the owner's side: the readers that are connected to us
 *   cuda_link.c    the reader's side: connecting, and messages from the owner
 *   cuda_map.c     memory of another process, mapped here
 *   cuda_fetch.c   memory in segments: its handles, asked for and sent
 *   cuda_copy.c    runs of batches, copied by kernels
 *   nest_pages.c   nests of runs as pages of the kernels
 *   cuda_write.c   writing: the writer asks the owner, and the owner reads
 *   cuda_wire.c    messages
 *
 * A reader maps the owner's memory and copies from the owner's pages into its own, by its own kernels on its own
 * stream: one job for thousands of runs, whatever order the two sides keep their pages in. Only the owner writes its
 * memory, for it could not shut out a kernel of a process that is stopped. So a writer tells the owner what to write,
 * and the owner connects back to the writer as a reader, and reads it.
 *
 * An owner that takes memory back tells its readers. They hang up once their kernels are over and nothing is mapped.
 */
#ifndef KVF_TRANSPORT_CUDA_H
#define KVF_TRANSPORT_CUDA_H

#include "base/clock.h"
#include "base/wake.h"
#include "base/watch.h"
#include "cuda/allocation.h"
#include "cuda/copier.h"
#include "cuda/looks.h"
#include "cuda/segments.h"
#include "transport/cuda/cuda_wire.h"
#include "transport/fences.h"
#include "transport/slices.h"

#define CUDA_COPIES 2u                 /* of one link, under way at once: while one runs, the next is ready */
#define CUDA_JOBS 16u                  /* of one device, of all links */
#define CUDA_BOXES 2048u               /* of one copy */
#define CUDA_IDS (2u * KVF_SLICE_RUNS) /* of one copy: of a slice of nests, on both sides */
#define CUDA_COPY_BYTES (64u << 20)

/** What an epoll event points to. */
typedef struct kvf_cuda_watch {
    enum {
        CUDA_WATCH_LISTEN,
        CUDA_WATCH_WAKE,
        CUDA_WATCH_LOOKS,
        CUDA_WATCH_TIMER,
        CUDA_WATCH_CLIENT,
        CUDA_WATCH_LINK
    } kind;
    void *owner;
} kvf_cuda_watch;

/** Memory from kvf_transport_allocate(). */
typedef struct kvf_cuda_allocation {
    CUdeviceptr address;
    uint64_t bytes; /* as many as were asked for, or more */
    uint32_t device;
    bool exportable;
    struct kvf_cuda_allocation *following;
} kvf_cuda_allocation;

typedef struct kvf_cuda_link kvf_cuda_link;

/** A reader that is connected to us. */
typedef struct kvf_cuda_client {
    struct kvf_cuda_endpoint *endpoint;
    kvf_cuda_watch watch;
    int fd;
    pid_t process;
    bool known;   /* has shown the key */
    bool refused; /* we wait until it hangs up */
    bool gone;    /* has hung up, but our kernels still read for it */
    uint64_t accepted_ns, refused_ns;
    uint64_t oldest; /* kvf_transport_oldest() when it came: it knows no region that was gone by then */
    unsigned char from[CUDA_ID_BYTES];
    char name[CUDA_NAME_BYTES];
    /* The memory that it writes from, as far as it has told us, and our connection to it. */
    kvf_cuda_card told_card;
    uint64_t told_generation;
    kvf_cuda_region *told;
    uint32_t told_count;
    kvf_cuda_link *back;    /* NULL: there is none, or it is lost */
    kvf_status back_failed; /* why there is none */
    char back_why[CUDA_REASON_BYTES];
    uint64_t back_tried_ns; /* when we last tried to connect back */
    uint32_t asked;         /* its writes that we have not answered yet */
    /* The next segment that it may fetch, and where that lies. */
    uint32_t fetch_region, fetch_segment;
    uint64_t fetch_offset;
    struct kvf_cuda_client *previous, *following;
} kvf_cuda_client;

typedef struct kvf_cuda_endpoint {
    kvf_transport *transport;
    int epoll_fd, listen_fd;
    int spare_fd;    /* see kvf_neighbour_accept() */
    bool deaf;       /* connections are accepted again when the timer has expired */
    kvf_timer timer; /* of clients that have not shown the key, and of being deaf */
    kvf_wake wake;
    kvf_looks looks;
    kvf_cuda_watch listen_watch, wake_watch, looks_watch, timer_watch;
    kvf_cuda_card card;
    kvf_cuda_region *regions; /* by number, as on the card; all zero: none */
    uint32_t *devices;        /* of the regions */
    uint32_t region_count;
    uint64_t version;                          /* of the regions: counts their changes */
    kvf_copier *copiers[KVF_CUDA_DEVICES_MAX]; /* of devices that we have memory of */
    bool exportable;                           /* allocations are segments, not shared by IPC handles */
    kvf_cuda_allocation *allocations;
    kvf_cuda_client *clients;
    uint32_t client_count;
    kvf_fences fences;
    kvf_cuda_link *links, *first_to_go;
    kvf_cuda_link *abandoned; /* closed, but their kernels did not end within the patience */
    uint64_t patience_ns;     /* how long a copy may take */
    uint32_t most_blocks;     /* of threads of a copy; 0: the default */
    bool changed;             /* a copy began or ended in this progress() */
    kvf_cuda_packet packet;
    struct kvf_cuda_endpoint *previous, *following; /* of this process */
} kvf_cuda_endpoint;

/** The peer's regions, mapped for one device of ours. */
typedef struct kvf_cuda_map {
    uint32_t device;
    uint64_t *addresses; /* by region; 0: there is none */
    CUdeviceptr *opened; /* handles */
    uint32_t opened_count;
    struct kvf_cuda_map *following;
} kvf_cuda_map;

/** The peer's regions that are mapped for all our devices once the owner is ready: by handles, and then those in
 * segments, which are fetched one after the other. */
typedef struct kvf_cuda_fetching {
    kvf_cuda_region *regions; /* of the peer */
    kvf_mapping **mappings;   /* by region; NULL: there is none, or an earlier region has it */
    uint32_t count;
    uint32_t region, segment; /* comes next */
    uint32_t asked;           /* segments that have not come yet */
    bool begun;
    bool handles;               /* are not mapped yet */
    bool in_segments;           /* some are */
    bool due;                   /* the next segments could not be asked for yet */
    char why[KVF_REASON_BYTES]; /* the regions cannot be read; "": they can, or it is not known yet */
} kvf_cuda_fetching;

/** A job of a device for a batch; or a part of a batch that we ask the peer to read. */
typedef struct kvf_cuda_copy {
    kvf_batch *batch;  /* NULL: the place is free */
    kvf_copy_job *job; /* NULL: we ask the owner */
    uint64_t started_ns;
    bool sent; /* to the owner */
    uint64_t number;
    kvf_slice slice;
} kvf_cuda_copy;

/** Our connection to an owner that we read from: for a peer, or for a client of ours that writes to us. */
struct kvf_cuda_link {
    kvf_cuda_endpoint *endpoint;
    kvf_peer *peer;          /* NULL once it was reported lost */
    kvf_cuda_client *client; /* NULL: for a peer, or left by its client */
    bool left;
    uint64_t generation; /* of the owner's memory */
    kvf_cuda_watch watch;
    int fd;
    int process_fd; /* a pidfd, or -1 */
    bool same_process;
    bool only_written; /* by the owner itself: nothing is mapped here before something is read */
    bool ready;        /* for copies */
    bool lost;
    bool refused;               /* lost because the owner refused us; it lives */
    bool closed;                /* lost because the owner's endpoint closes */
    bool stale;                 /* lost because the memory is of another generation by now */
    char why[KVF_REASON_BYTES]; /* it was lost */
    kvf_cuda_map *maps;         /* none while the peer is only written */
    kvf_cuda_region *unmapped;  /* the peer's, until something of it is read; NULL: they are mapped */
    uint32_t unmapped_count;
    kvf_cuda_fetching *fetching; /* NULL: no region must be fetched */
    kvf_slices slices;
    kvf_cuda_copy copies[CUDA_COPIES];
    uint64_t last_number;
    uint64_t told_version; /* of our regions: the one the owner knows */
    uint64_t telling_version;
    uint32_t told_next;                  /* the next region to tell the owner of */
    kvf_batch *asked_first, *asked_last; /* of a client, in order */
    struct kvf_cuda_link *previous, *following;
};

/** Between these two calls no endpoint of this process hangs up, starts to copy or changes its regions: so none reads
 * an endpoint of this process that has closed without the reader's knowledge. */
void kvf_cuda_gate_enter(void);
void kvf_cuda_gate_leave(void);

/**
 * Whether an endpoint of this process has these regions, each as the card says.
 *
 * @param generation  of the card
 * @return KVF_OK, KVF_E_NOT_FOUND (no endpoint of this process has the card's name), KVF_E_NOT_REGISTERED
 */
kvf_status kvf_cuda_check_ours(const kvf_cuda_card *card, const kvf_cuda_region *regions,
                               uint64_t generation);

/* cuda_owner.c */

void kvf_cuda_owner_accept(kvf_cuda_endpoint *endpoint);
/** Hangs up on clients that have not shown the key in time. None of them may have an event in this progress(). */
void kvf_cuda_owner_expire(kvf_cuda_endpoint *endpoint);
/** A client has sent something, or has hung up. True: there may be more. */
bool kvf_cuda_owner_read(kvf_cuda_client *client);
/** Refuses clients that know memory older than kvf_transport_oldest(). KVF_E_AGAIN: one of them may still read it, or
 * our kernels still write it for one of them. */
kvf_status kvf_cuda_owner_take_back(kvf_cuda_endpoint *endpoint);
kvf_status kvf_cuda_owner_fence(void *self, const void *part, size_t bytes);
kvf_status kvf_cuda_owner_admit(void *self, const void *part, size_t bytes);
/**
 * Hangs up on all clients.
 *
 * @param wait  until no other process has mapped memory of ours, for as long as a copy may take
 * @return false: another process may have mapped some
 */
bool kvf_cuda_owner_close(kvf_cuda_endpoint *endpoint, bool wait);
/**
 * Sends a client what it waits for. If that fails the client is refused, because it would wait for ever: it does not read,
 * or the kernel has no memory for the message, or there are too many descriptors on their way.
 *
 * @param fd  goes with the message, and stays the caller's; -1: none
 * @return KVF_OK, KVF_E_AGAIN, KVF_E_PEER_LOST, KVF_E_IO
 */
kvf_status kvf_cuda_owner_tell(kvf_cuda_client *client, const void *message, size_t bytes, int fd);
/** Frees a client that is gone and for which nothing is under way. */
void kvf_cuda_owner_drop(kvf_cuda_client *client);

/* cuda_link.c */

kvf_status kvf_cuda_link_connect(void *self, const void *data, size_t bytes, kvf_peer *peer, void **out);
kvf_status kvf_cuda_link_notify(void *self, const void *data, size_t bytes);
const char *kvf_cuda_link_way(const void *self);
/** Maps what was not mapped because the peer was only written. After a failure it may be tried again. */
kvf_status kvf_cuda_link_map(kvf_cuda_link *link);
const char *kvf_cuda_link_refusal(const void *self);
void kvf_cuda_link_disconnect(void *self);
/** Whether none of our kernels is under way for it. */
bool kvf_cuda_link_quiet(const void *self);
/** Connects back to a client, by the card that it has sent. @return as kvf_cuda_link_connect() */
kvf_status kvf_cuda_link_back(kvf_cuda_client *client);
/** Leaves a link back that its client no longer needs. It ends with this progress(), for it may have events until
 * then. */
void kvf_cuda_link_leave(kvf_cuda_link *back);
/** Notes that the link is lost, and why; the first reason stays. */
void kvf_cuda_link_lose(kvf_cuda_link *link, const char *why);
/** Reads the owner's messages, and returns whether it is gone; then the link is lost. */
bool kvf_cuda_link_lose_if_gone(kvf_cuda_link *link);
/** Ends a lost link once none of its copies is under way: tells the front, or the client's writes; then lets the peer's
 * memory go, and frees a link that nobody has any more. True: that is put off, and is to be tried again soon. */
bool kvf_cuda_link_report(kvf_cuda_link *link);
/** Ends all that nobody has any more, for an endpoint that is being closed. */
void kvf_cuda_links_close(kvf_cuda_endpoint *endpoint);
/** Whether kernels of abandoned links may still access our memory. Looks at them, and ends links whose kernels have
 * ended. */
bool kvf_cuda_links_hang(kvf_cuda_endpoint *endpoint);
/** Leaves the abandoned links as they are until the process ends, for an endpoint that is being closed. */
void kvf_cuda_links_keep(kvf_cuda_endpoint *endpoint);

/* cuda_map.c */

/** Whether two regions of a peer lie in one allocation, or in the same segments, as their card says. One that is said
 * to have another size counts as another allocation, so that its size is checked, too. */
bool kvf_cuda_map_shares(const kvf_cuda_region *a, const kvf_cuda_region *b);

/**
 * Checks regions of a peer, and makes the map of them for one device. Regions of another process, and those in segments
 * of another device, have the address 0 until they are mapped: the owner must know of us before.
 *
 * @return KVF_OK; KVF_E_UNSUPPORTED (the device or the driver cannot reach them: another fabric may);
 *         KVF_E_PARSE (the card is wrong), KVF_E_NOMEM, KVF_E_IO
 */
kvf_status kvf_cuda_map_open(uint32_t device, const kvf_cuda_region *regions, uint32_t count,
                             bool same_process, kvf_cuda_map **out);

/**
 * Checks regions of a peer that are only written, by the peer's own kernels: they are not mapped here.
 *
 * @return as kvf_cuda_map_open()
 */
kvf_status kvf_cuda_map_check(uint32_t device, const kvf_cuda_region *regions, uint32_t count);

/** Whether a region is to be mapped by its handle, and is not yet. */
bool kvf_cuda_map_awaits(const kvf_cuda_map *map, const kvf_cuda_region *region, uint32_t i);

/**
 * Maps all regions that have handles.
 *
 * @return KVF_OK; after an error some are mapped: KVF_E_UNSUPPORTED (freed, or this process may not map it),
 *         KVF_E_PARSE (card and driver disagree), KVF_E_NOMEM, KVF_E_IO
 */
kvf_status kvf_cuda_map_handles(kvf_cuda_map *map, const kvf_cuda_region *regions, uint32_t count);

/** Unmaps all regions that have handles; nothing may read them any more. They can be mapped again. */
void kvf_cuda_map_close_handles(kvf_cuda_map *map, const kvf_cuda_region *regions, uint32_t count);

/** Unmaps them; nothing may read them any more. */
void kvf_cuda_map_close(kvf_cuda_map *map);

/* cuda_fetch.c: the reader's side */

/**
 * Notes which regions have no address in the maps of a link yet.
 *
 * @return KVF_OK; KVF_E_PARSE, KVF_E_LIMIT (the card says what cannot be), KVF_E_NOMEM
 */
kvf_status kvf_cuda_fetch_open(kvf_cuda_link *link, const kvf_cuda_region *regions, uint32_t count);
/** The owner is ready, and waits for us from now on when it takes memory back: maps what has handles, and asks for the
 * first segments. The link is ready when the last one is mapped, or something cannot be. */
void kvf_cuda_fetch_begin(kvf_cuda_link *link);
/** Tries again to map what has handles, if that has failed: the reason may have passed. */
void kvf_cuda_fetch_again(kvf_cuda_link *link);
/** Asks again for segments that could not be asked for. */
void kvf_cuda_fetch_retry(kvf_cuda_link *link);
/** Maps a segment that came with this descriptor (-1: none), which stays the caller's. False: the message is invalid. */
bool kvf_cuda_fetch_take(kvf_cuda_link *link, kvf_cuda_packet *packet, int fd);
/** A segment has come without its descriptor, for this process has none free; the detail says so. False: the message is
 * invalid. */
bool kvf_cuda_fetch_miss(kvf_cuda_link *link, const kvf_cuda_packet *packet);
/** Unmaps all segments; nothing may read them any more. */
void kvf_cuda_fetch_close(kvf_cuda_link *link);

/* cuda_fetch.c: the owner's side */

/** Sends the segments that a client asks for. False: the message is invalid. */
bool kvf_cuda_fetch_asked(kvf_cuda_client *client, const kvf_cuda_packet *packet);

/* cuda_copy.c */

kvf_status kvf_cuda_copy_submit(void *self, kvf_batch *batch);
void kvf_cuda_copy_cancel(void *self, kvf_batch *batch);
/** Ends copies that are over and starts others; looks at those under way again after a pause. */
void kvf_cuda_copy_move(kvf_cuda_link *link);
/** The number of copies that our kernels are making. */
uint32_t kvf_cuda_copy_count(const kvf_cuda_link *link);
/** Whether the link must be looked at again after a pause. */
bool kvf_cuda_copy_waits(const kvf_cuda_link *link);
/** Ends copies that are over, and nothing else. */
void kvf_cuda_copy_poll(kvf_cuda_link *link);
/** Ends one copy; after a failure the detail says why. */
void kvf_cuda_copy_end(kvf_cuda_link *link, kvf_cuda_copy *copy, kvf_status status);

/* cuda_write.c: the writer's side */

/** Takes the next slice of a batch that writes. */
void kvf_cuda_write_start(kvf_cuda_link *link, kvf_cuda_copy *copy);
/** Sends the owner our regions and requests that it does not have yet, as far as it reads. */
void kvf_cuda_write_send(kvf_cuda_link *link);
/** Handles the owner's answer. False: it is invalid. */
bool kvf_cuda_write_answered(kvf_cuda_link *link, kvf_cuda_packet *packet);

/* cuda_write.c: the owner's side */

/** Handles a client's message about the memory it writes from, or about the runs it writes. False: it is invalid. */
bool kvf_cuda_write_told(kvf_cuda_client *client, const kvf_cuda_packet *packet);
bool kvf_cuda_write_asked(kvf_cuda_client *client, const kvf_cuda_packet *packet);
/** Gives up writes to these bytes that clients have asked for. False: kernels of ours still make some. */
bool kvf_cuda_write_stop(void *self, uint32_t region, uint64_t offset, uint64_t bytes);
/** A batch that a client asked for has ended, with KVF_OK unless it has failed. */
void kvf_cuda_write_ended(kvf_cuda_link *back, kvf_batch *batch);
/** The link back to a client is lost, and nothing of it is under way: fails all that the client asked for. */
void kvf_cuda_write_lost(kvf_cuda_link *back);
/** The owner closes, and nothing is under way: frees what the client asked for, without an answer. */
void kvf_cuda_write_forget(kvf_cuda_link *back);

#endif
