/*
 * Two real processes for tests of fabrics between machines: a target that owns memory, and an actor that reads and
 * writes it.
 *
 * Both are forked before either has loaded the fabric's library; the test process itself never loads it and only waits
 * for them. A process that finds a fault prints it and exits with 1. Nothing here measures time; the alarm only makes the
 * test fail if an operation hangs.
 */
#ifndef PROCESS_PAIR_H
#define PROCESS_PAIR_H

#include <sys/types.h>

#include "transport_pair.h"

#define REGIONS ((uint32_t)SIDE_REGIONS)
#define REGION_BYTES 300007u /* odd, so that runs have every alignment */
#define ALARM_SECONDS 60

_Noreturn void wrong(const char *file, int line, const char *what);

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition))                                                                                    \
            wrong(__FILE__, __LINE__, #condition);                                                           \
    } while (0)

/* One of the two processes, with its transport and its socket to the other. */
typedef struct process {
    const char *library;  /* the UCX to load; NULL: the system's */
    const pair_kind *way; /* gives the kind, a setting and the memory: if allocated, local peers can map it */
    int line;             /* a socket to the other process */
    kvf_transport *transport;
    unsigned char *memory[REGIONS];
    kvf_peer *peer;
    kvf_status ended; /* the status of the last operation */
    char detail[512];
    unsigned ends;
    unsigned lost;
    unsigned notes;
    bool notes_in_order;
    pid_t other;
} process;

/** Runs both processes; the actor must exit with 0, and the target too unless `target_dies`. */
void run_both(const pair_kind *way, void (*target)(process *), void (*actor)(process *), bool target_dies);

/* Words of one byte over the socket. */
void say(const process *side, char word);
void hear(const process *side, char expected);
/** Whether a word came, or the other process is gone. */
bool heard(const process *side);

/* Memory and runs. */
/** Fills all memory with the bytes of side_byte() for this seed. */
void fill(process *side, uint32_t seed);
/** Makes up to `count` runs that overlap on neither side; returns how many. */
size_t make_runs(kvf_run *runs, size_t count, uint64_t bytes_max, uint64_t seed);
/** Whether every byte of this side's memory is what the runs put there, or what was there before. `from` is
 * the seed of the other side, `before` of this one; `reading`: this memory is the local side of the runs. */
bool is_exact(process *side, const kvf_run *runs, size_t count, bool reading, uint32_t from, uint32_t before);

/* Transports. */
void open_side(process *side, uint32_t max_in_flight, uint32_t seed);
void close_side(process *side);
void send_card(const process *side);
size_t receive_card(const process *side, void *card, size_t capacity);
void connect_side(process *side);
/** Progresses as an event loop does: sleeps on the descriptor, which must wake whenever there is work. */
void progress(process *side);
/** The same until the peer is lost, woken by the transport only. */
void progress_until_lost(process *side);
void serve_until_told(process *side);
/** The target of most tests: opens, serves until it is told to end, and closes. */
void serving_target(process *side);
/** Serves until it is told to sleep. To the transport it is asleep until it hears 'w'; it finds its memory as it was. */
void sleeping_target(process *side);
/** The actor of a fabric over TCP: reads until a connection of it sends again each second, or until the alarm. Where the
 * kernel cannot do that, it reads nothing. */
void trying_actor(process *side);
/** Calls `act`, which must print nothing. */
void silent(process *side, void (*act)(process *));
void submit(process *side, kvf_direction direction, const kvf_run *runs, size_t count,
            kvf_operation *operation);
void await_end(process *side, unsigned ends);
/** Sends a notification that the other side checks, waiting for room. */
void notify(process *side, uint32_t number, size_t bytes);
void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail);

#endif
