/*
 * The front's own structures, shared by its files: transport.c (endpoints and peers), regions.c (memory),
 * batches.c (operations, and their callbacks) and fabrics.c (the list of fabrics). Fabrics do not include this.
 *
 * Nothing a fabric reports reaches the user while the fabric runs: ended batches, notifications and lost
 * peers are queued, and their callbacks are called once all fabrics have returned. So a callback may close
 * any peer: no fabric is using it then.
 */
#ifndef KVF_TRANSPORT_FRONT_H
#define KVF_TRANSPORT_FRONT_H

#include <stdatomic.h>
#include <sys/types.h>

#include "base/wake.h"
#include "base/watch.h"
#include "transport/transport.h"

/** A batch as the front sees it: `fabric_view` is all a fabric knows. */
typedef struct kvf_front_batch {
    kvf_batch fabric_view; /* first, so that the two can be cast */
    bool ended;
    struct kvf_front_batch *same_bucket;
} kvf_front_batch;

/** Batches in a list, linked by previous and following. */
typedef struct kvf_batch_list {
    kvf_batch *first, *last;
} kvf_batch_list;

/** A user that will submit more to a peer. Closing the peer takes the user off the list and calls closed(). */
typedef struct kvf_front_user {
    void (*closed)(void *context);
    void *context;
    struct kvf_front_user *previous, *following;
} kvf_front_user;

struct kvf_peer {
    kvf_transport *transport;
    const kvf_fabric *fabric;
    uint32_t fabric_number; /* of the transport's fabrics */
    void *link;
    char *name;
    void *card; /* with which it was connected */
    size_t card_bytes;
    uint64_t *region_bytes;    /* as far as the fabric moves them */
    bool *region_withheld;     /* as the card says, or a device's and not moved by the fabric */
    bool *region_device_arena; /* as the card says */
    uint32_t region_count;
    bool packed_only;       /* the fabric moves arenas, and not all other memory of the two sides */
    uint32_t arena_kinds;   /* bits by memory kind: where it may have arenas that the fabric moves */
    uint64_t generation;    /* of its memory, as the card says */
    bool only_written;      /* its caches will not be read */
    char *passed_over;      /* fabrics that could not serve it, and why; NULL: none */
    uint64_t moved[2];      /* bytes, by direction */
    kvf_batch_list batches; /* those the fabric has */
    kvf_front_user *users;
    bool lost;
    bool lives; /* although it is lost, see kvf_peer_refused() */
    char lost_reason[KVF_REASON_BYTES];
    bool lost_untold;             /* on_peer_lost is due */
    char waits[KVF_REASON_BYTES]; /* why there is no connection yet; "": there is one, or nothing was tried */
    bool closing;
    bool parting; /* to be closed once its link is quiet */
    struct kvf_peer *previous, *following;
};

/** A fabric of one endpoint. */
typedef struct kvf_front_fabric {
    const kvf_fabric *fabric;
    void *endpoint;
    kvf_memory *served;   /* by region; 0 bytes where it does not serve it */
    bool *holds;          /* by region: registered with it, served or about to be released */
    bool runs;            /* it serves all memory that is served, but for arenas */
    uint32_t arena_kinds; /* bits by memory kind: where the arenas are that it serves */
    bool disabled;        /* neither; it may still own memory */
    bool was_offered;     /* a card has had it: peers may be connected by it, though it is disabled now */
    bool owns_memory;     /* which other fabrics may have registered: closed after them */
} kvf_front_fabric;

/** A fabric of this build that is not part of an endpoint, though it was asked for. */
typedef struct kvf_front_absent {
    const kvf_fabric *fabric;
    char *why; /* NULL: there was no memory for it */
} kvf_front_absent;

struct kvf_transport {
    kvf_transport_options options;
    char *name;
    pid_t process;  /* that opened it; no other may use it */
    uint32_t forks; /* kvf_fork_count() of that process */
    bool automatic;
    bool closing;              /* kvf_transport_close() was called */
    bool withholds_emulated;   /* see kvf_transport_withhold_emulated() */
    bool packs_emulated;       /* see kvf_transport_packs_emulated() */
    kvf_front_fabric *fabrics; /* best first */
    uint32_t fabric_count;
    kvf_front_absent *absent;
    uint32_t absent_count;
    kvf_memory *regions;   /* all */
    kvf_memory *served;    /* the same, but 0 bytes where a region is withheld or leaves */
    bool *arenas;          /* which of them are arenas of stages */
    bool split;            /* see kvf_transport_is_split() */
    unsigned char **bases; /* their addresses, for the copying loops */
    kvf_region_user user;  /* `settle` is NULL: there is none */
    uint32_t region_count;
    uint64_t generation; /* of the memory: counts its changes */
    uint64_t oldest;     /* older cards describe memory that is gone */
    kvf_buffer card;
    int event_fd;     /* an epoll of the fabrics' descriptors, of `wake`, and of what an agent adds to it */
    kvf_wake wake;    /* readable while callbacks are due */
    uint32_t calling; /* callbacks under way, or progress() */
    _Atomic bool hurried; /* another thread waits for the end of progress() */
    kvf_peer *peers;

    /* batches.c */
    kvf_operation last_operation;
    kvf_front_batch **buckets; /* by operation number */
    size_t bucket_count;       /* a power of two, or 0 */
    size_t open_batches;
    uint64_t waits;         /* how often a fabric has said that a peer waits */
    kvf_front_batch *spare; /* batches to use again, linked by same_bucket */
    kvf_batch_list ended;
    kvf_buffer notices, delivering; /* each: two lengths, the sender's name with its NUL, the bytes */
    uint32_t lost_untold;
    uint32_t parting; /* peers */

    /* memory from kvf_transport_allocate() where no fabric has its own */
    struct kvf_plain_memory *plain_memory;
    bool leaves_memory; /* it stays, see kvf_transport_leave_memory() */
};

/** The fabric of this build with that name, or NULL. */
const kvf_fabric *kvf_fabric_named(const char *kind);

/** Whether a kind can be opened: KVF_OK, KVF_E_NOT_FOUND or KVF_E_UNSUPPORTED. */
kvf_status kvf_front_check_kind(const char *kind);

/** Whether all keys are known, also those of `in_front` (may be NULL). */
kvf_status kvf_front_check_settings(const kvf_transport_options *options, const kvf_fabric *in_front);

/** Whether a transport (not NULL) is this process's own: KVF_E_INVALID in a child of fork(). */
kvf_status kvf_front_check_process(const kvf_transport *transport, const char *what);

/** Whether a peer can be used: KVF_E_PEER_LOST, with `what` and why, when it cannot. */
kvf_status kvf_front_check_peer(const kvf_peer *peer, const char *what);

/** Calls the callbacks that are due. Called with no fabric running. */
void kvf_front_dispatch(kvf_transport *transport);

/** Calls `done` of every batch of a peer whose batches have all ended. */
void kvf_front_dispatch_peer(kvf_transport *transport, const kvf_peer *peer);

/** Ends all batches a peer's fabric has. */
void kvf_front_end_batches(kvf_peer *peer, kvf_status status, const char *reason);

/** Makes `wake` readable exactly while callbacks are due. */
void kvf_front_update_wake(kvf_transport *transport);

/** Frees what regions.c owns; the fabrics are closed already. */
void kvf_front_free_memory(kvf_transport *transport);

/** Notes why a fabric is not part of an endpoint, from the detail. */
kvf_status kvf_front_note_absent(kvf_transport *transport, const kvf_fabric *fabric);

/** Frees these notes. */
void kvf_front_free_absent(kvf_transport *transport);

/** Frees the tables of batches.c. */
void kvf_front_free_batches(kvf_transport *transport);

#endif
