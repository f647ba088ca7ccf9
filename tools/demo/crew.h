/*
 * The processes of a demo: the coordinator starts them, sends them messages, waits for them, and ends them.
 *
 * Every rank is a process of its own; over the in-process transport all ranks are threads of one process.
 */
#ifndef KVFERRY_DEMO_CREW_H
#define KVFERRY_DEMO_CREW_H

#include <sys/types.h>

#include "demo.h"
#include "progress.h"

typedef struct crew_member {
    channel to;
    pid_t pid;  /* 0: reaped */
    int status; /* of waitpid(), once reaped */
    uint64_t heard_ns;
    progress_figures progress;
    bool awaited;
} crew_member;

typedef struct crew {
    const demo_job *job;
    crew_member *members; /* prefill ranks, then decode ranks, then stand-bys */
    uint32_t count;       /* of ranks */
    progress shown;
    uint32_t step; /* the current one of job->steps; 0: none yet */
} crew;

/** Starts all ranks; prints what is wrong if it cannot. */
int crew_start(crew *out, const demo_job *job);

/** Which ranks: all, or those of one side. */
typedef enum crew_part {
    CREW_PREFILL = 1,
    CREW_DECODE = 2,
    CREW_ALL = 3,
    CREW_VICTIM = 4,  /* the prefill rank that is to be killed */
    CREW_WITNESS = 8, /* decode rank 0, which reads from it */
} crew_part;

/** Sends one message to several ranks. crew_await() notices a rank that is gone. */
void crew_send(crew *to, crew_part whom, message_type type, const void *data, size_t bytes);

/** Takes a message. `index` counts within the rank's side. False if the message is not as expected. */
typedef bool (*crew_handler)(void *context, demo_side side, uint32_t index, const message *from);

/**
 * Waits until each of several ranks has sent one message of a type. Meanwhile shows progress: the step and the number
 * of steps, the share of the whole, which never shrinks, and about how much time is left if the other steps take as
 * long.
 *
 * @param doing   what they do, for messages: "moving"
 * @param handle  may be NULL
 * @return EXIT_DONE, or EXIT_FAILED after printing which rank failed, died or fell silent
 */
int crew_await(crew *of, crew_part whom, message_type type, const char *doing, crew_handler handle,
               void *context);

/** Lets the decode ranks meet the prefill engine at an endpoint; prints what is wrong if they cannot. */
int crew_connect(crew *of, const char *endpoint);

/**
 * Waits until a descriptor becomes readable, while the ranks work.
 *
 * @return EXIT_DONE, or EXIT_FAILED after printing which rank failed or died
 */
int crew_stand(crew *of, int stop_fd, const char *doing);

/** Kills a rank and reaps it; the crew no longer waits for it or speaks to it. */
void crew_strike(crew *of, uint32_t member);

/** Lets the process that stands by take the place of a rank that was killed. */
void crew_replace(crew *of, uint32_t member);

/** Tells all ranks to quit, kills those that do not, and reaps them. Returns EXIT_FAILED if one ended badly. */
int crew_end(crew *of);

/** Kills and reaps all processes that still run. */
void crew_kill(crew *of);

#endif
