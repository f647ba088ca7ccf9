/*
 * A worker of the fault harness: the process of one rank, with its agent, its memory, and a check of every
 * byte and event.
 */
#ifndef KVF_FAULTS_WORKER_H
#define KVF_FAULTS_WORKER_H

#include "faulty_fabric.h"
#include "mail.h"
#include "orders.h"

/** What a worker shows the driver without being asked. */
typedef struct worker_window {
    _Atomic uint32_t working; /**< inside its agent */
    _Atomic uint32_t pushes;  /**< it may be writing to others */
} worker_window;

/** What all workers of a round have in common. */
typedef struct worker_setting {
    uint64_t seed;
    uint32_t model;
    char transport[16];
    bool verify, encrypted, faulty_fabric, own_thread;
    bool on_devices; /**< memory is the stand-in's devices', which refuse and are late */
    bool shown;      /**< it is read directly; else it is withheld, and moves packed */
    kvf_failure_policy policy;
    kvf_way way;
    mail_options mail;
    faulty_options fabric;
    uint64_t lease_ns, heartbeat_ns, peer_timeout_ns, idle_ns;
} worker_setting;

typedef struct worker_place {
    uint32_t engine, rank;
    uint64_t life; /**< which process of this rank it is */
    int fd;
    char listen[ORDERS_ENDPOINT];        /**< "": anywhere */
    char public_key[41], secret_key[41]; /**< "": makes its own */
    worker_window *window;
} worker_place;

/** Is the process; ends it with 0 when told to quit, with something else when it cannot go on. */
_Noreturn void worker_run(const worker_setting *setting, const worker_place *place);

#endif
