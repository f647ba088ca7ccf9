/*
 * Limits of each process at an owner. All connections of one process are one tenant: however many it opens, it has one
 * share of the owner's time, and one share of the memory for shared buffers. Connections that have not shown the key
 * yet are strangers. The door accepts and serves them; for all of them together it has half a tenant's share.
 *
 * Time is divided into turns (base/turns.h). A tenant has SHM_TURN_WORK for each of its turns, the door half of that. A
 * message is handled as a whole.
 *
 * Without a limit, strangers that keep connecting would use all idle time of the processor. So beyond about a thousand
 * connections at once the door works for an eighth of the time, and is shut in between.
 *
 * These functions know no sockets: a process is a number, and a connection is a seat.
 */
#ifndef KVF_TRANSPORT_SHM_TENANTS_H
#define KVF_TRANSPORT_SHM_TENANTS_H

#include <sys/types.h>

#include "base/turns.h"
#include "transport/shm/shm_wire.h"

#define SHM_TENANT_CLIENTS_MAX 64u    /* connections of one process that have shown the key */
#define SHM_CLIENTS_MAX 1024u         /* of all; or half of the process's descriptors, if that is less */
#define SHM_STRANGERS_MAX 64u         /* of all; or an eighth of the descriptors */
#define SHM_BUFFERS_BYTES (64u << 20) /* buffers of all clients, ... */
#define SHM_TENANT_BUFFERS_BYTES (16u << 20) /* ... and of one process; ... */
#define SHM_BUFFER_BYTES_LEAST (64u << 10)   /* ... but every client gets this much */

/* The costs of other work than copying, as the bytes that are copied in the same time: 8 bytes take a nanosecond. */
#define SHM_TURN_WORK (256u << 10)
#define SHM_DOOR_WORK (64u << 20)       /* for strangers at once, and then ... */
#define SHM_DOOR_WORK_PER_MS (1u << 20) /* ... this much a millisecond */
#define SHM_RUN_WORK 512u               /* to find a piece of memory, as the costs of the fabric say */
#define SHM_MESSAGE_WORK (16u << 10)    /* to receive or send a message */
#define SHM_LOOK_WORK (4u << 10)        /* to find that there is none */
#define SHM_CONNECTION_WORK (64u << 10) /* to accept a connection, and to close it */

typedef struct kvf_shm_client kvf_shm_client;
typedef struct kvf_shm_tenant kvf_shm_tenant;

/** A connection's place in the queue of its tenant. */
typedef struct kvf_shm_seat {
    kvf_turn_seat turn;     /**< first */
    kvf_shm_client *client; /**< NULL: the socket at which connections wait */
} kvf_shm_seat;

struct kvf_shm_tenant {
    kvf_turn_party turn; /**< first */
    pid_t process;       /**< 0: all processes of other PID namespaces, which cannot be told apart */
    uint32_t clients;    /**< connections that have shown the key */
    uint32_t strangers;  /**< connections that have not */
    uint64_t buffer_bytes;
    kvf_shm_tenant *next; /**< of all */
};

typedef struct kvf_shm_tenants {
    uint32_t clients_max, strangers_max;
    uint64_t process_clients_max; /**< of all endpoints of this process */
    uint32_t clients, strangers;  /**< of all tenants */
    uint64_t buffer_bytes;
    uint64_t cut_buffers; /**< so far: buffers of which only a part was taken */
    uint64_t refused;     /**< so far: clients refused because of a limit, or that had to give way */
    kvf_shm_tenant *all;
    kvf_turns turns;
    kvf_shm_tenant door;
    uint64_t door_work;    /**< work for strangers beyond their share of time ... */
    uint64_t door_work_ns; /**< ... at this time */
} kvf_shm_tenants;

/** Begins without tenants; clients get at most half of the descriptors that this process may have. */
void kvf_shm_tenants_open(kvf_shm_tenants *tenants, uint64_t descriptors);

/** The tenant of a process, with one more stranger; NULL: no memory. */
kvf_shm_tenant *kvf_shm_tenants_enter(kvf_shm_tenants *tenants, pid_t process);

/**
 * A stranger has shown the key. If the owner has as many clients as it may, a tenant with few connections gets a place
 * from the tenant with the most.
 *
 * @param limit   receives the limit that is reached
 * @param loser   receives the tenant that must give up a client; NULL: none
 * @return 0: it is a client from now on; SHM_REFUSED_LIMIT, SHM_REFUSED_FULL
 */
kvf_shm_refusal kvf_shm_tenants_admit(kvf_shm_tenants *tenants, kvf_shm_tenant *tenant, uint64_t *limit,
                                      kvf_shm_tenant **loser);

/** A connection of the tenant has gone; the last one takes the tenant with it. Its seat must not be in a queue. */
void kvf_shm_tenants_leave(kvf_shm_tenants *tenants, kvf_shm_tenant *tenant, bool known);

/** Cuts an offered buffer to the room that there is, and counts it: all of it, or one slot of at most
 * SHM_BUFFER_BYTES_LEAST. The caller has checked the sizes. */
void kvf_shm_tenants_take_buffer(kvf_shm_tenants *tenants, kvf_shm_tenant *tenant, uint64_t *slot_bytes,
                                 uint32_t *slots);

/** Stops counting a buffer. */
void kvf_shm_tenants_drop_buffer(kvf_shm_tenants *tenants, kvf_shm_tenant *tenant, uint64_t bytes);

/** Puts a seat into the queue of a tenant, unless it waits already. */
void kvf_shm_tenants_wait(kvf_shm_tenants *tenants, kvf_shm_tenant *tenant, kvf_shm_seat *seat);

/** Takes a seat out of its queue, if it is in one. */
void kvf_shm_tenants_stop_waiting(kvf_shm_seat *seat);

/** Takes out the seat whose turn it is, and says whose it is; NULL: no seat waits. */
kvf_shm_seat *kvf_shm_tenants_next(kvf_shm_tenants *tenants, kvf_shm_tenant **whose);

/** Counts work that was done for a tenant, at least 1. */
void kvf_shm_tenants_spend(kvf_shm_tenants *tenants, kvf_shm_tenant *tenant, uint64_t work);

/** Whether strangers may be accepted now; if not, the caller asks again in a millisecond. */
bool kvf_shm_tenants_opens_door(kvf_shm_tenants *tenants, uint64_t now_ns);

#endif
