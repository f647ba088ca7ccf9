/*
 * A faulty transport in front of a real one, for tests.
 *
 * While it is installed, every transport that opens over it is served by one fabric, "faulty". It opens its own inner
 * transport of the wanted kind and passes operations on: late, half, or not at all, by a seeded schedule. It always
 * keeps the promises of a fabric: a batch ends once, bytes have moved if it ends well, and nothing touches its memory
 * after it has ended.
 *
 *   outer transport -> faulty fabric -> inner transport -> inproc, shm, ucx
 *
 * Both ends of a connection need it. With one thread a seed gives the same faults again; several threads share the
 * schedule in whatever order they run.
 */
#ifndef KVF_TEST_FAULTY_FABRIC_H
#define KVF_TEST_FAULTY_FABRIC_H

#include "transport/transport.h"

/** What can happen to an operation, and other faults. */
typedef enum faulty_fault {
    FAULTY_REFUSED,       /**< submitting fails with KVF_E_IO */
    FAULTY_NOTHING_MOVED, /**< ends with KVF_E_IO before any byte moved */
    FAULTY_HALF_MOVED,    /**< ends with KVF_E_IO, half of its runs done */
    FAULTY_ALL_MOVED,     /**< ends with KVF_E_IO although all is done */
    FAULTY_LATE_START,    /**< waits before it moves */
    /** is reported a while after it is complete: a cancel then comes too late, or in time to be reported */
    FAULTY_LATE_END,
    FAULTY_DEAF,          /**< ignores a cancel: ends as it would have without */
    FAULTY_PEER_LOST,     /**< its peer is reported lost before it ends */
    FAULTY_NOT_CONNECTED, /**< connecting fails with KVF_E_IO */
    FAULTY_NOT_NOTIFIED,  /**< a notification fails with KVF_E_AGAIN */
    FAULTY_STILL_INSIDE,  /**< an endpoint that is fenced is said to be in the middle of a write */
    FAULTY_BEHIND,        /**< a connection is said to be behind, see kvf_peer_is_behind() */
    FAULTY_FAULTS,
} faulty_fault;

/** Memory of devices, as far as a fabric over a transport of the host's memory needs it. */
typedef struct faulty_devices {
    void *(*look)(uint64_t address); /**< where the host sees what is at an address of a device */
    kvf_memory (*allocate)(uint32_t device, uint64_t bytes); /**< NULL: the fabric gives none */
} faulty_devices;

typedef struct faulty_options {
    uint64_t seed;
    uint32_t per_mille[FAULTY_FAULTS]; /**< how often, of 1000 */
    uint32_t turns;                    /**< a late job waits for up to this many calls of progress(); 0: 1 */
    const faulty_devices *devices;     /**< it also moves memory of devices; NULL: it does not */
    uint64_t late_ns; /**< it cannot shut peers out, whose writes may be so late; 0: it can */
} faulty_options;

/** Sets the schedule. Must not run while another thread opens a transport. */
void faulty_install(const faulty_options *options);

/**
 * The fabric to pass to kvf_transport_open_over() for the next transport of this thread; NULL while it is not
 * installed.
 *
 * @param kind  the kind of the inner transport; NULL: "auto"
 */
const kvf_fabric *faulty_fabric(const char *kind);

/** Removes it; open transports keep their inner transports, but have no more faults. */
void faulty_remove(void);

/** How often a fault has happened since faulty_install(). */
uint64_t faulty_count(faulty_fault fault);

#endif
