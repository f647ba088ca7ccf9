/*
 * The language of the agent target: an input is a sequence of steps of eight bytes: the step, `who`, and a to f. A
 * shorter rest is ignored, and every number is taken modulo the possible ones, so every input means something.
 */
#ifndef KVF_FUZZ_AGENT_STEPS_H
#define KVF_FUZZ_AGENT_STEPS_H

#include <stdint.h>

#define STEP_BYTES 8u
#define STEPS_MAX 192u /* of one input; the rest is ignored */

typedef enum fuzz_step {
    STEP_WAIT = 0, /* a: 2^a microseconds pass */
    /* The engine of agent `who` calls it. a: request id, b: first block, c: blocks, d: peer engine, e: flags, f:
     * seconds. */
    STEP_HOLD,
    STEP_PULL,
    STEP_PUSH,
    STEP_EXPECT,
    STEP_INTO,  /* a: which of its pulls; b, c: blocks */
    STEP_READY, /* a: which of its pushes, b: begin, c: end, d: layers; e even: everything */
    STEP_CANCEL, /* a: which of its tickets; b 255: drains the agent, f: seconds; b 254: replies to command c, status f */
    STEP_CONNECT, /* d: which engine */
    STEP_REGION,  /* a even: takes region b back; odd: registers it */
    STEP_RESTART, /* closes the agent and opens it again */
    /* Simulated peer `who` acts. b: the agent it sends to. */
    STEP_GREET, /* a: odd for the ranks, even for a card; c: the name that it gives; d: changes its secret */
    STEP_CALL, /* a: kind, c: session and number, d: request id and status, e: lease or expectation, f: size, time */
    STEP_REPEAT,  /* sends its last message again; a: to another place; c, d: changes a byte */
    STEP_ANSWER,  /* answers the latest call; a: status, c: session and number, e: generation, f: blocks */
    STEP_WRITTEN, /* as a producer. a: odd for a PROBE; d: request id and status, e: expectation */
    STEP_WELCOME, /* unasked; a: odd for a REFUSED with status c; d, e: change session and card */
    STEP_MANNERS, /* a: bit 0: it answers greetings by itself, bit 1: calls, bit 2: both with false answers */
    STEP_HANG_UP, /* closes its link; a odd: and opens it only with its next step */
    STEP_COMMAND, /* a: id, odd for a REPLY; c: verb, d: request id, e: records, f: time, or status */
    STEPS
} fuzz_step;

#endif
