/*
 * Two real processes for the UCX tests: a target that owns memory and an actor that reads and writes it.
 *
 * Both are forked before either has opened UCX; the test process itself never opens it and only waits for
 * them. A process that finds something wrong says what and exits with 1. Nothing here measures time; the
 * alarm is only there so that an operation that hangs fails the test.
 */
#ifndef UCX_PAIR_H
#define UCX_PAIR_H

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

/* One end of the two processes' conversation, besides the transport. */
typedef struct process {
    const char *library;  /* the UCX to load; NULL: the system's */
    const pair_kind *way; /* with ucx.tls, and whose memory: allocated, peers on this machine can map it */
    int line;             /* a socket to the other process */
    kvf_transport *transport;
    unsigned char *memory[REGIONS];
    kvf_peer *peer;
    kvf_status ended; /* of the last operation */
    char detail[512];
    unsigned ends;
    unsigned lost;
    unsigned notes;
    bool notes_in_order;
    pid_t other;
} process;

/** Runs both; the actor must exit with 0, and the target too unless it is to be killed. */
void run_both(const pair_kind *way, void (*target)(process *), void (*actor)(process *), bool target_dies);

/* Words over the line. */
void say(const process *side, char word);
void hear(const process *side, char expected);
/** Whether something came, or the other process is gone. */
bool heard(const process *side);

/* Memory and runs. */
/** The bytes of side_byte() with this seed, everywhere. */
void fill(process *side, uint32_t seed);
/** Up to `count` runs that overlap on neither side. */
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
/** The same, woken by nothing but the transport. */
void progress_until_lost(process *side);
void serve_until_told(process *side);
void submit(process *side, kvf_direction direction, const kvf_run *runs, size_t count,
            kvf_operation *operation);
void await_end(process *side, unsigned ends);
/** Sends a notification that the other side checks, waiting for room. */
void notify(process *side, uint32_t number, size_t bytes);
void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail);

#endif
