/*
 * The UCX fabric's own structures, shared by its files:
 *
 *   ucx.c         endpoints and their progress; read its header first
 *   ucx_memory.c  allocating and registering
 *   ucx_link.c    connecting, notifications, closing
 *   ucx_post.c    moving runs
 *   ucx_card.c    the form of its part of the card
 *   ucx_library.c loading UCX, and the transports that it finds
 *   ucx_words.c   UCX's errors and log lines in our words
 *
 * The front does not include this.
 */
#ifndef KVF_TRANSPORT_UCX_H
#define KVF_TRANSPORT_UCX_H

#include <ucp/api/ucp.h>
#include <ucs/debug/log_def.h>

#include "base/wake.h"
#include "base/watch.h"
#include "transport/beacon.h"
#include "transport/device_context.h"
#include "transport/poster.h"
#include "transport/sockets.h"
#include "transport/transport.h"

typedef struct kvf_ucx_endpoint kvf_ucx_endpoint;

#define KVF_UCX_NOTIFY_ID 0x4b /**< of the active message that carries a notification */

/* ---- ucx_library.c --------------------------------------------------------------------------- */

/** The oldest version of UCX that can be used: it has all functions that are called here. */
#define KVF_UCX_MAJOR 1
#define KVF_UCX_MINOR_MIN 13

/** Versions from this one on understand each other's addresses and keys, as far as transport_ucx_versions_test has seen
 * (1.22 and 1.23). Older ones understand only their own: 1.22 refuses keys of 1.18 over TCP, and 1.16 crashes on keys
 * of 1.14 in shared memory. */
#define KVF_UCX_MINOR_ALIKE 22

/** All functions of UCX that are called: those that are needed, and those that some versions may lack. */
#define KVF_UCX_FUNCTIONS(NEEDED, USEFUL)                                                                    \
    NEEDED(ucp_config_read)                                                                                  \
    NEEDED(ucp_config_modify)                                                                                \
    NEEDED(ucp_config_release)                                                                               \
    NEEDED(ucp_init_version)                                                                                 \
    NEEDED(ucp_context_query)                                                                                \
    NEEDED(ucp_cleanup)                                                                                      \
    NEEDED(ucp_worker_create)                                                                                \
    NEEDED(ucp_worker_destroy)                                                                               \
    NEEDED(ucp_worker_set_am_recv_handler)                                                                   \
    NEEDED(ucp_worker_get_efd)                                                                               \
    NEEDED(ucp_worker_arm)                                                                                   \
    NEEDED(ucp_worker_progress)                                                                              \
    NEEDED(ucp_worker_get_address)                                                                           \
    NEEDED(ucp_worker_release_address)                                                                       \
    NEEDED(ucp_mem_map)                                                                                      \
    NEEDED(ucp_mem_unmap)                                                                                    \
    NEEDED(ucp_mem_query)                                                                                    \
    NEEDED(ucp_rkey_pack)                                                                                    \
    NEEDED(ucp_rkey_buffer_release)                                                                          \
    NEEDED(ucp_rkey_destroy)                                                                                 \
    NEEDED(ucp_ep_create)                                                                                    \
    NEEDED(ucp_ep_rkey_unpack)                                                                               \
    NEEDED(ucp_ep_flush_nbx)                                                                                 \
    NEEDED(ucp_ep_close_nbx)                                                                                 \
    NEEDED(ucp_get_nbx)                                                                                      \
    NEEDED(ucp_put_nbx)                                                                                      \
    NEEDED(ucp_am_send_nbx)                                                                                  \
    NEEDED(ucp_request_check_status)                                                                         \
    NEEDED(ucp_request_free)                                                                                 \
    NEEDED(ucs_status_string)                                                                                \
    USEFUL(ucp_config_print)                                                                                 \
    USEFUL(ucp_context_print_info)                                                                           \
    USEFUL(ucs_log_push_handler)

/** A UCX that was loaded: its functions under their own names. Lives as long as the process. */
typedef struct kvf_ucx_library {
    char *path; /**< of its libucp, without links */
    char version[32];
    uint32_t major, minor;
#define KVF_UCX_MEMBER(function) __typeof__ (&(function))(function);
    KVF_UCX_FUNCTIONS(KVF_UCX_MEMBER, KVF_UCX_MEMBER)
#undef KVF_UCX_MEMBER
    struct kvf_ucx_library *following;
} kvf_ucx_library;

/**
 * Loads the first usable UCX of a list; returns the same library if it is loaded already. Any thread may call it.
 *
 * @param candidates  files, separated by ':'; the system's loader finds those without a slash. NULL: the system's
 *                    UCX
 * @return KVF_OK, KVF_E_UNSUPPORTED (none can be used, each with the reason; or this is a child of a process that has
 *         loaded one), KVF_E_INVALID (an empty name), KVF_E_NOMEM
 */
kvf_status kvf_ucx_load(const char *candidates, const kvf_ucx_library **out);

/** The resources that a context can use, as "tcp/eth0 cma/memory", whole words only; "" if this UCX does not tell. */
void kvf_ucx_resources(const kvf_ucx_library *ucx, ucp_context_h context, char *out, size_t bytes);

/** Whether a context has a transport whose network cards read and write the memory of other hosts by themselves; UCX
 * emulates this for all other transports. False if this UCX does not tell. */
bool kvf_ucx_has_rdma(const kvf_ucx_library *ucx, ucp_context_h context);

/* ---- ucx_words.c ----------------------------------------------------------------------------- */

/**
 * Fails with "<what>: <UCX's words>", and with the first error UCX logged since kvf_ucx_enter(), which says
 * more than its status.
 */
kvf_status kvf_ucx_fail(const kvf_ucx_library *ucx, ucs_status_t status, const char *what);

/**
 * To be called around calls of UCX: messages that UCX would print to the terminal from this thread are kept for
 * kvf_ucx_fail() instead, unless the user asked for UCX's log by setting UCX_LOG_LEVEL; and once the endpoint has
 * memory of a device, a context of that device is current, see device_context.h. Calls may be nested.
 *
 * @return what kvf_ucx_leave() takes
 */
const kvf_cuda *kvf_ucx_enter(const kvf_ucx_endpoint *endpoint);
void kvf_ucx_leave(const kvf_cuda *entered);

/** Catches the log of a UCX that was just loaded. */
void kvf_ucx_catch_log(const kvf_ucx_library *ucx);

/* ---- ucx_card.c ------------------------------------------------------------------------------ */

/** A remote region, as on the card. Without address and key it is withheld. */
typedef struct kvf_ucx_card_region {
    uint64_t address;
    uint64_t bytes;
    const void *key; /**< into the card */
    uint32_t key_bytes;
} kvf_ucx_card_region;

typedef struct kvf_ucx_card {
    unsigned char beacon[KVF_BEACON_BYTES];
    uint32_t major, minor; /**< of the UCX whose address and keys these are */
    const void *worker;    /**< into the card */
    uint32_t worker_bytes;
    kvf_ucx_card_region *regions; /**< owned by the caller that read the card */
    uint32_t region_count;
} kvf_ucx_card;

/** Appends a card to `out`; after an error `out` is as long as before. */
kvf_status kvf_ucx_card_write(const kvf_ucx_card *card, kvf_buffer *out);

/**
 * Reads a card, trusting nothing in it. `out->regions` is then freed with kvf_free(); on failure nothing is
 * held.
 *
 * @return KVF_OK, KVF_E_PARSE (not such a card, cut off, damaged), KVF_E_NOMEM
 */
kvf_status kvf_ucx_card_read(const void *data, size_t bytes, kvf_ucx_card *out);

/** The sum that a card of these bytes must have; the bytes of the sum itself do not count. */
uint64_t kvf_ucx_card_sum(const void *data, size_t bytes);

/**
 * A copy of a blob of the card for UCX to read: UCX does not know where the blob ends, so as many zeros follow as UCX
 * could read past the end.
 */
void *kvf_ucx_card_blob(const void *data, size_t bytes);

/* ---- shared structures ----------------------------------------------------------------------- */

typedef struct kvf_ucx_link kvf_ucx_link;

/** Registered memory. */
typedef struct kvf_ucx_memory {
    unsigned char *address;
    uint64_t bytes;
    ucp_mem_h handle;
    ucs_memory_type_t type;
    bool mapped;   /**< we must unmap `handle`: it is not that of an allocation */
    bool withheld; /**< from peers: no address and no key on the card */
} kvf_ucx_memory;

typedef struct kvf_ucx_allocation {
    kvf_ucx_memory memory;
    struct kvf_ucx_allocation *following;
} kvf_ucx_allocation;

struct kvf_ucx_endpoint {
    kvf_transport *transport;
    const kvf_ucx_library *ucx;
    ucp_context_h context;
    ucp_worker_h worker;
    uint64_t memory_types;   /**< a bit for each type that this UCX knows */
    bool emulates;           /**< one-sided operations on other hosts: see kvf_ucx_has_rdma() */
    bool takes_emulated;     /**< "ucx.emulated" is on */
    kvf_ucx_memory *regions; /**< 0 bytes: none */
    uint32_t region_count;
    kvf_ucx_allocation *allocations;
    kvf_beacon beacon;
    int event_fd;        /**< an epoll of UCX's descriptor, `wake`, the beacon and the links' watches */
    kvf_wake wake;       /**< readable while progress() has something to do that UCX does not show */
    kvf_sockets sockets; /**< of a UCX that uses TCP */
    uint32_t idle_rounds;
    uint32_t rounds;
    kvf_ucx_link *links;
    kvf_ucx_link *stuck; /**< closed, but UCX has not called back, and may not until the worker ends */
    kvf_poster poster;
    bool notice_lost; /**< there was no memory for a notification */
    kvf_device_context device_context;
};

/** A notification on its way. */
typedef struct kvf_ucx_message {
    kvf_ucx_link *link;
    struct kvf_ucx_message *following;
    unsigned char data[KVF_NOTICE_MAX];
} kvf_ucx_message;

/** Remote memory. */
typedef struct kvf_ucx_target {
    uint64_t address;
    ucp_rkey_h key;
} kvf_ucx_target;

struct kvf_ucx_link {
    kvf_post_queue queue; /* first, so that the two can be cast */
    kvf_ucx_endpoint *endpoint;
    const kvf_ucx_library *ucx; /**< of the endpoint */
    ucp_ep_h ep;                /**< NULL once it was told to close */
    ucs_status_ptr_t closing;   /**< UCX's request to close it; no pointer: none, or it is done */
    int64_t close_until_ns;     /**< how long an answer is waited for in any case */
    kvf_ucx_target *targets;
    uint32_t target_count;
    ucp_request_param_t param; /**< of the next operation; made once, because there are many of them */
    uint32_t messages;         /**< notifications UCX has not yet taken */
    bool notified;             /**< something may have to leave before the link is closed */
    kvf_ucx_message *spare;    /**< messages to use again */
    uint32_t lingering;        /**< flushes of disconnect() that are not complete */
    kvf_ucx_link *previous, *following;
};

/* ---- ucx.c ----------------------------------------------------------------------------------- */

/** KVF_E_UNSUPPORTED: this endpoint would emulate, and another fabric moves memory of that kind. */
kvf_status kvf_ucx_check_memory(const kvf_ucx_endpoint *endpoint, kvf_memory_kind kind);

/* ---- ucx_memory.c and ucx_link.c: of the fabric's table, see kvf_fabric ---------------------- */

kvf_status kvf_ucx_allocate(void *self, kvf_memory_kind kind, uint32_t device, uint64_t bytes, void **out);
kvf_status kvf_ucx_register(void *self, uint32_t region, const kvf_memory *memory);
kvf_status kvf_ucx_unregister(void *self, uint32_t region);
kvf_status kvf_ucx_write_card(void *self, kvf_buffer *out);
kvf_status kvf_ucx_connect(void *self, const void *data, size_t bytes, kvf_peer *peer, void **out);
void kvf_ucx_disconnect(void *self);
kvf_status kvf_ucx_notify(void *self, const void *data, size_t bytes);
bool kvf_ucx_is_emulated(const void *self); /**< by our own UCX; the peer's may differ */
bool kvf_ucx_is_quiet(const void *self);

/** Closes the connection to a peer that is lost: see kvf_post_actions. */
bool kvf_ucx_close_lost(kvf_post_queue *queue);

/** Ends UCX's worker, and frees the links for which it had not called back. All links are disconnected already. */
void kvf_ucx_end_worker(kvf_ucx_endpoint *endpoint);

/* ---- ucx_post.c ------------------------------------------------------------------------------ */

extern const kvf_post_actions kvf_ucx_post_actions;

/** See kvf_post_round(). */
bool kvf_ucx_post(kvf_ucx_endpoint *endpoint);

/** Prepares a link for its operations. */
void kvf_ucx_prepare(kvf_ucx_link *link);

#endif
