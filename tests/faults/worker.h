/*
 * A worker of the fault harness: the process of one rank, with its agent and memory. It checks every byte and event.
 */
#ifndef KVF_FAULTS_WORKER_H
#define KVF_FAULTS_WORKER_H

#include "faulty_fabric.h"
#include "mail.h"
#include "orders.h"

#define WORKER_LINES 24u
#define WORKER_LINE_BYTES 240u

/** Memory that a worker shares with the driver. */
typedef struct worker_window {
    _Atomic uint32_t working;    /**< inside its agent */
    _Atomic uint32_t pushes;     /**< pushes that may be writing to peers */
    _Atomic uint64_t slowest_ns; /**< its longest round since it was told to be calm */
    _Atomic uint32_t lines;      /**< how many lines its agent has logged; the last ones are kept */
    char line[WORKER_LINES][WORKER_LINE_BYTES];
} worker_window;

/** Settings of all workers of a round. */
typedef struct worker_setting {
    uint64_t seed;
    uint32_t model;
    char transport[16];
    bool verify, encrypted, faulty_fabric, own_thread;
    bool on_devices; /**< memory is of devices; those of the stand-in refuse calls and are late */
    bool shown;      /**< device memory is read directly; otherwise it is withheld, and moves packed */
    kvf_failure_policy policy;
    kvf_way way;
    mail_options mail;
    faulty_options fabric;
    uint64_t lease_ns, heartbeat_ns, peer_timeout_ns, idle_ns;
} worker_setting;

typedef struct worker_place {
    uint32_t engine, rank;
    uint64_t life; /**< number of this process among the rank's successive ones */
    int fd;
    char listen[ORDERS_ENDPOINT];        /**< "": anywhere */
    char public_key[41], secret_key[41]; /**< "": the worker makes its own */
    worker_window *window;
} worker_place;

/** Runs a worker in this process; exits with 0 when told to quit, with another status if it cannot continue. */
_Noreturn void worker_run(const worker_setting *setting, const worker_place *place);

#endif
