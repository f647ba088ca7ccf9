/*
 * The libfabric fabric's own structures, shared by its files:
 *
 *   libfabric.c          endpoints and their progress; read its header first
 *   libfabric_library.c  loading libfabric, choosing one of its providers, its errors in our words
 *   libfabric_port.c     ports: where operations begin and complete
 *   libfabric_memory.c   registering
 *   libfabric_link.c     connecting, closing
 *   libfabric_notice.c   notifications
 *   libfabric_move.c     moving runs
 *   libfabric_card.c     the form of its part of the card
 *
 * The front does not include this.
 */
#ifndef KVF_TRANSPORT_LIBFABRIC_H
#define KVF_TRANSPORT_LIBFABRIC_H

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/wake.h"
#include "base/watch.h"
#include "transport/beacon.h"
#include "transport/device_context.h"
#include "transport/poster.h"
#include "transport/sockets.h"
#include "transport/transport.h"

/* ---- libfabric_library.c --------------------------------------------------------------------- */

/** The oldest version of libfabric that can be used, and that of the interface that kvferry asks for: later versions
 * keep to it. */
#define KVF_LIBFABRIC_MAJOR 1
#define KVF_LIBFABRIC_MINOR_MIN 17

/** The functions that are looked up; all others are called through libfabric's objects. */
#define KVF_LIBFABRIC_FUNCTIONS(NEEDED)                                                                      \
    NEEDED(fi_version)                                                                                       \
    NEEDED(fi_getinfo)                                                                                       \
    NEEDED(fi_freeinfo)                                                                                      \
    NEEDED(fi_dupinfo)                                                                                       \
    NEEDED(fi_fabric)                                                                                        \
    NEEDED(fi_strerror)

/** A libfabric that was loaded: its functions under their own names. Lives as long as the process. */
typedef struct kvf_libfabric_library {
    char *path; /**< without links */
    char version[32];
#define KVF_LIBFABRIC_MEMBER(function) __typeof__ (&(function))(function);
    KVF_LIBFABRIC_FUNCTIONS(KVF_LIBFABRIC_MEMBER)
#undef KVF_LIBFABRIC_MEMBER
    struct kvf_libfabric_library *following;
} kvf_libfabric_library;

/** The folder in which the kernel lists devices by class. */
#define KVF_LIBFABRIC_DEVICES "/sys/class"

/** Whether there are network cards of EFA or Slingshot. `devices`: KVF_LIBFABRIC_DEVICES, or a folder like it. */
bool kvf_libfabric_has_cards(const char *devices);

/**
 * Loads the first usable libfabric of a list; returns the same library if it is loaded already. Any thread may call
 * it.
 *
 * @param candidates  files, separated by ':'; the system's loader finds those without a slash. NULL: the system's
 *                    libfabric
 * @return KVF_OK, KVF_E_UNSUPPORTED (none can be used, each with the reason; or this is a child of a process that has
 *         loaded one), KVF_E_INVALID (an empty name), KVF_E_NOMEM
 */
kvf_status kvf_libfabric_load(const char *candidates, const kvf_libfabric_library **out);

/**
 * Chooses a provider that can do what kvferry needs: reliable datagrams with messages and one-sided operations.
 *
 * @param provider    its name; NULL: the first that is there of efa, cxi, tcp, net
 * @param only_cards  with NULL: only efa and cxi
 * @param domain      the network interface, as the provider calls it; NULL: its first
 * @param out         receives one description, to be freed with fi_freeinfo()
 * @return KVF_OK, KVF_E_UNSUPPORTED (none, or no memory to describe one; the detail says which were asked for)
 */
kvf_status kvf_libfabric_choose(const kvf_libfabric_library *library, const char *provider, bool only_cards,
                                const char *domain, struct fi_info **out);

/** Whether a provider emulates one-sided operations by messages. The network cards of cxi, and newer ones of efa, read
 * and write the memory of other hosts by themselves; of efa its endpoint says so. All others count as emulating. */
bool kvf_libfabric_emulates(const struct fi_info *info, struct fid_ep *ep);

/** Fails with "libfabric <what>: <its words>". `error` is one of its errors, positive or negative. */
kvf_status kvf_libfabric_fail(const kvf_libfabric_library *library, ssize_t error, const char *what);

/** The same with KVF_E_UNSUPPORTED, whatever the error is: for what an endpoint, a region or a link needs, so that
 * "auto" goes on without libfabric if a card cannot be used, or has no more room. */
kvf_status kvf_libfabric_refuse(const kvf_libfabric_library *library, ssize_t error, const char *what);

/** Whether an error of an operation means that the peer cannot be reached any more. */
bool kvf_libfabric_means_lost(int error);

/* ---- libfabric_card.c ------------------------------------------------------------------------ */

#define KVF_LIBFABRIC_PROVIDER_MAX 31u
#define KVF_LIBFABRIC_ADDRESS_MAX 256u

/** A remote region, as on the card. */
typedef struct kvf_libfabric_target {
    uint64_t base;  /**< what its first byte is called in operations */
    uint64_t bytes; /**< 0: no memory has this number */
    uint64_t key;
    bool withheld; /**< no operation may name it; base and key are 0 */
} kvf_libfabric_target;

typedef struct kvf_libfabric_card {
    unsigned char beacon[KVF_BEACON_BYTES];
    char provider[KVF_LIBFABRIC_PROVIDER_MAX + 1];
    uint32_t protocol, protocol_version; /**< of the provider; only equal ones understand each other */
    uint32_t format;                     /**< of the address */
    const void *address;                 /**< into the card */
    uint32_t address_bytes;
    kvf_libfabric_target *regions; /**< owned by the caller that read the card */
    uint32_t region_count;
} kvf_libfabric_card;

/** Appends a card to `out`; after an error `out` is as long as before. */
kvf_status kvf_libfabric_card_write(const kvf_libfabric_card *card, kvf_buffer *out);

/**
 * Reads a card, trusting nothing in it. `out->regions` is then freed with kvf_free(); on failure nothing is held.
 *
 * @return KVF_OK, KVF_E_PARSE (not such a card, cut off, damaged), KVF_E_NOMEM
 */
kvf_status kvf_libfabric_card_read(const void *data, size_t bytes, kvf_libfabric_card *out);

/* ---- shared structures ----------------------------------------------------------------------- */

typedef struct kvf_libfabric_link kvf_libfabric_link;
typedef struct kvf_libfabric_endpoint kvf_libfabric_endpoint;

/** Every operation begins with it: libfabric gives it back when the operation completes. Must stay until then, or until
 * its port is closed. */
typedef struct kvf_libfabric_operation {
    struct fi_context2 context; /* first, so that the two can be cast */
    /** @param bytes  of a message that came in
     *  @param error  0, or why it failed, as a number of libfabric */
    void (*done)(struct kvf_libfabric_operation *operation, size_t bytes, int error);
} kvf_libfabric_operation;

/** An endpoint of libfabric with a completion queue of its own, so that closing both ends everything at once, and with
 * a table of addresses of its own. */
typedef struct kvf_libfabric_port {
    struct fid_ep *ep;
    struct fid_cq *cq;
    struct fid_av *addresses;
    int fd; /**< readable when there are completions; -1: the provider has none, and must be asked */
} kvf_libfabric_port;

/** Registered memory. */
typedef struct kvf_libfabric_memory {
    struct fid_mr *mr; /**< NULL: none */
    unsigned char *address;
    uint64_t bytes;
    bool withheld; /**< from peers */
    bool leaves;   /**< it was unregistered, and libfabric keeps it for now */
} kvf_libfabric_memory;

#define KVF_LIBFABRIC_HEADER_MAX                                                                             \
    (1u + KVF_SENDER_MAX) /**< of a message: the length of the sender's name, the name */

/** A notification on its way, in or out. */
typedef struct kvf_libfabric_message {
    kvf_libfabric_operation operation; /* first, so that the two can be cast */
    void *owner;                       /**< the endpoint, or the link */
    uint32_t bytes;                    /**< of `data` that go out */
    struct kvf_libfabric_message *following;
    unsigned char data[KVF_LIBFABRIC_HEADER_MAX + KVF_NOTICE_MAX];
} kvf_libfabric_message;

/** Messages in one piece of memory, which is registered where the provider needs that. */
typedef struct kvf_libfabric_messages {
    kvf_libfabric_message *all; /**< NULL: none yet */
    kvf_libfabric_memory memory;
    kvf_libfabric_message *spare;                   /**< through `following` */
    kvf_libfabric_message *waiting, **waiting_last; /**< to go out, through `following` */
    uint32_t under_way;                             /**< with libfabric */
} kvf_libfabric_messages;

/** An operation that moves a piece of a run. */
typedef struct kvf_libfabric_move {
    kvf_libfabric_operation operation; /* first, so that the two can be cast */
    kvf_post_job *job;
    struct kvf_libfabric_move *following;
} kvf_libfabric_move;

struct kvf_libfabric_endpoint {
    kvf_transport *transport;
    const kvf_libfabric_library *library;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    size_t address_bytes;    /**< of an address of a port */
    bool emulates;           /**< see kvf_libfabric_emulates() */
    kvf_libfabric_port port; /**< where peers reach us: it serves their operations and takes their messages */
    kvf_libfabric_messages inbox;
    kvf_libfabric_memory *regions; /**< by number */
    uint32_t region_count;
    kvf_beacon beacon;
    int event_fd;        /**< an epoll of the ports, `wake`, `timer`, the beacon and the links' watches */
    kvf_wake wake;       /**< readable while progress() has something to do that no port shows */
    kvf_timer timer;     /**< for looking at ports that have no descriptor */
    kvf_sockets sockets; /**< of a provider that uses TCP */
    uint32_t poll_us;    /**< how often; 0: ports have descriptors */
    uint32_t idle_rounds;
    uint32_t rounds;
    kvf_libfabric_link *links;
    kvf_poster poster;
    bool refused; /**< something could not be done now: try again soon */
    bool patient; /**< nothing gets through to some peer: see kvf_libfabric_is_patient() */
    /** Entered by each function of the fabric's table that calls libfabric. */
    kvf_device_context device_context;
};

struct kvf_libfabric_link {
    kvf_post_queue queue; /* first, so that the two can be cast */
    kvf_libfabric_endpoint *endpoint;
    kvf_libfabric_port port; /**< `ep` is NULL once closed */
    fi_addr_t address;       /**< of the peer, in the port's table */
    kvf_libfabric_target *targets;
    kvf_libfabric_move *moves, *spare_moves; /**< all, and through `following` those not under way */
    kvf_libfabric_messages outbox;
    uint64_t silent_ns; /**< since when nothing gets through, though something should; 0: something does */
    uint64_t looked_ns; /**< when that was last looked at */
    bool waits;         /**< the front was told that nothing gets through */
    kvf_libfabric_link *previous, *following;
};

/* ---- libfabric.c ----------------------------------------------------------------------------- */

/** Opens the port where peers reach the endpoint. One that was open is closed: connections of peers end, also in the
 * middle of a write, and it has another address from then on. */
kvf_status kvf_libfabric_serve(kvf_libfabric_endpoint *endpoint);

/* ---- libfabric_port.c ------------------------------------------------------------------------ */

/** Opens a port at an address that libfabric chooses. Ports that take messages are `port` of the endpoint. */
kvf_status kvf_libfabric_port_open(kvf_libfabric_endpoint *endpoint, kvf_libfabric_port *port);

/** Closes it; one that is not open is accepted. Afterwards libfabric accesses no memory for its operations, and calls
 * none of them done. */
void kvf_libfabric_port_close(kvf_libfabric_endpoint *endpoint, kvf_libfabric_port *port);

/** Takes completions, at most KVF_LIBFABRIC_COMPLETIONS of them, and calls done() of their operations. Adds to
 * `*moved` how many. */
#define KVF_LIBFABRIC_COMPLETIONS ((size_t)32)
kvf_status kvf_libfabric_port_poll(const kvf_libfabric_endpoint *endpoint, const kvf_libfabric_port *port,
                                   size_t *moved);

/** Whether the port's descriptor will show all that comes from now on. */
bool kvf_libfabric_port_rests(const kvf_libfabric_endpoint *endpoint, const kvf_libfabric_port *port);

/* ---- libfabric_memory.c ---------------------------------------------------------------------- */

/** Registers memory for one's own operations, and for those of peers if it is `shared`. */
kvf_status kvf_libfabric_map(kvf_libfabric_endpoint *endpoint, const kvf_memory *memory, bool shared,
                             kvf_libfabric_memory *out);

/** @return 0; -FI_EBUSY: libfabric still uses it, and it stays registered: try again */
int kvf_libfabric_unmap(kvf_libfabric_memory *memory);

/** The descriptor of registered memory, which operations that use it name. */
void *kvf_libfabric_desc(const kvf_libfabric_memory *memory);

/* of the fabric's table, see kvf_fabric */
kvf_status kvf_libfabric_register(void *self, uint32_t region, const kvf_memory *memory);
kvf_status kvf_libfabric_unregister(void *self, uint32_t region);
kvf_status kvf_libfabric_write_card(void *self, kvf_buffer *out);

/* ---- libfabric_notice.c ---------------------------------------------------------------------- */

/** The most messages that come in without the endpoint making progress, and that a link has on their way. */
#define KVF_LIBFABRIC_MESSAGES_IN 64u
#define KVF_LIBFABRIC_MESSAGES_OUT 32u

kvf_status kvf_libfabric_messages_open(kvf_libfabric_endpoint *endpoint, void *owner, uint32_t count,
                                       kvf_libfabric_messages *out);
/** The ports that have its messages are closed already. */
void kvf_libfabric_messages_close(kvf_libfabric_messages *messages);

/** Gives libfabric the spare messages of the inbox, for what comes in. */
kvf_status kvf_libfabric_listen(kvf_libfabric_endpoint *endpoint);

kvf_status kvf_libfabric_notify(void *self, const void *data, size_t bytes);

/** Sends what waits, as much as libfabric takes. */
void kvf_libfabric_send_waiting(kvf_libfabric_link *link);

/** Whether notifications have not arrived at the peer yet. */
bool kvf_libfabric_is_notifying(const kvf_libfabric_link *link);

/* ---- libfabric_link.c ------------------------------------------------------------------------ */

kvf_status kvf_libfabric_connect(void *self, const void *data, size_t bytes, kvf_peer *peer, void **out);
void kvf_libfabric_disconnect(void *self);
bool kvf_libfabric_is_emulated(const void *self);

/** Whether something of the link is with libfabric, or should be. */
bool kvf_libfabric_is_pending(const kvf_libfabric_link *link);

/** Loses the peer (kvf_post_lose()) for an error of libfabric, where `what` failed. */
void kvf_libfabric_fail_link(kvf_libfabric_link *link, int error, const char *what);

/** Notes that something has just reached the peer. */
void kvf_libfabric_mark_answered(kvf_libfabric_link *link);

/** Tells the front about a pending link by which nothing gets through for a second, and loses one that has worked
 * before, after 20. Returns whether it is too early. */
bool kvf_libfabric_is_patient(kvf_libfabric_link *link);
#define KVF_LIBFABRIC_PATIENCE_NS KVF_SECOND
#define KVF_LIBFABRIC_GIVE_UP_NS (20 * KVF_SECOND)

/** Closes the connection to a peer that is lost: see kvf_post_actions. */
bool kvf_libfabric_close_lost(kvf_post_queue *queue);

/* ---- libfabric_move.c ------------------------------------------------------------------------ */

kvf_status kvf_libfabric_moves_open(kvf_libfabric_link *link);

extern const kvf_post_actions kvf_libfabric_post_actions;

/** See kvf_post_round(). */
bool kvf_libfabric_post(kvf_libfabric_endpoint *endpoint);

#endif
