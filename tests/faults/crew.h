/*
 * The engines of the fault harness as sets of processes, which are started, stopped, killed and restarted.
 */
#ifndef KVF_FAULTS_CREW_H
#define KVF_FAULTS_CREW_H

#include <sys/types.h>

#include "chance.h"
#include "worker.h"

#define CREW_RANKS 2u

typedef struct crew_letter crew_letter;

typedef struct crew_member {
    pid_t pid; /* 0: none */
    int fd;
    bool open;    /* it has opened its agent */
    bool stopped; /* by SIGSTOP, until `stop_until` */
    bool leaving; /* it was told to quit, or killed */
    bool killed;
    uint64_t stop_until, stopped_ns; /* stopped_ns: in all, in this life */
    crew_letter *queue;
    worker_window *window;
    report opened;
    report looked; /* the last REPORT_LOOK */
    bool has_looked;
    uint64_t first_resident_bytes;
} crew_member;

typedef struct crew_engine {
    crew_member members[CREW_RANKS];
    uint32_t rank_count;
    uint64_t life;     /* how often it was started */
    bool up;           /* every rank has its agent and knows its siblings */
    uint64_t start_at; /* 0: it will not be started */
    bool same_port, same_keys;
    char endpoint[ORDERS_ENDPOINT], public_key[41]; /* of rank 0, also while it is down */
} crew_engine;

typedef struct crew {
    worker_setting setting;
    crew_engine engines[CONTENT_ENGINES];
    worker_window *windows;
    bool quitting; /* for good */
    bool gentle;   /* stops no process in the middle of a write */
    /* A worker's report on a request: REPORT_EVENT, REPORT_CHECKED, REPORT_WRONG. */
    void (*on_report)(void *context, uint32_t engine, uint32_t rank, const report *r);
    /* An engine is gone with everything it had, or is up again. */
    void (*on_engine)(void *context, uint32_t engine, bool up);
    /* Something happened that must not happen. */
    void (*on_wrong)(void *context, const char *words);
    void *context;
    uint64_t kills, stops, stops_avoided, starts, quits;
} crew;

uint64_t crew_now(void);

/** Starts every engine of a round; returns at once, crew_work() does the rest. */
bool crew_open(crew *c);
/** Kills every remaining process with SIGKILL, and waits for it. */
void crew_close(crew *c);

/** Sends an order as soon as the worker can take it; does nothing if the worker is gone. */
void crew_send(crew *c, uint32_t engine, uint32_t rank, const order *o);
void crew_send_all(crew *c, uint32_t engine, const order *o);

/** Waits for reports, up to `wait_ms`, and does what is due. */
void crew_work(crew *c, int wait_ms);

/** kill -9 for one rank; its siblings are killed or told to quit, and all of them start again. */
void crew_kill(crew *c, uint32_t engine, uint32_t rank, chance *dice);
/** SIGSTOP for `ms`; false if the rank cannot be stopped now. */
bool crew_stop(crew *c, uint32_t engine, uint32_t rank, uint32_t ms);
/** Tells every worker to quit; crew_gone() when all have. */
void crew_quit(crew *c);
bool crew_gone(const crew *c);
bool crew_up(const crew *c);

#endif
