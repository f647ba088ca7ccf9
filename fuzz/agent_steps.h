/*
 * The language of the agent target: an input is a row of steps of eight bytes, read as below. Shorter rests are left
 * out, and every number is taken modulo what there is, so every input means something.
 */
#ifndef KVF_FUZZ_AGENT_STEPS_H
#define KVF_FUZZ_AGENT_STEPS_H

#include <stdint.h>

#define STEP_BYTES 8u
#define STEPS_MAX 192u /* of one input; the rest is left out */

typedef enum fuzz_step {
    STEP_WAIT = 0, /* a: 2^a microseconds pass */
    /* The engine of agent `who`. a: request id, b: first block, c: blocks, d: of which engine, e: flags, f: seconds. */
    STEP_HOLD,
    STEP_PULL,
    STEP_PUSH,
    STEP_EXPECT,
    STEP_INTO,    /* a: which of its pulls; b, c: blocks */
    STEP_READY,   /* a: which of its pushes, b: begin, c: end, d: layers; e even: everything */
    STEP_CANCEL,  /* a: which of its tickets; b 255: drains the agent, f: seconds */
    STEP_CONNECT, /* d: which engine */
    STEP_REGION,  /* a even: takes a region back; odd: registers all that are not */
    STEP_RESTART, /* closes the agent and opens it anew */
    /* Peer `who`, which no agent is. b: the agent it speaks to. */
    STEP_GREET, /* a: odd for the ranks, even for a card; c: whose name it gives, d: a secret that is not its own */
    STEP_CALL, /* a: kind, c: session and number, d: request id and status, e: lease or expectation, f: size, time */
    STEP_REPEAT,  /* says again what it said last; a: to another place; c, d: a byte is changed by */
    STEP_ANSWER,  /* the latest call it got; a: status, c: session and number, e: generation, f: blocks */
    STEP_WRITTEN, /* as a producer. a: odd for a PROBE; d: request id and status, e: expectation */
    STEP_WELCOME, /* unasked; a: odd for a REFUSED with status c; d, e: session and card that are not its own */
    STEP_MANNERS, /* a: bit 0: it answers greetings by itself, bit 1: calls, bit 2: both with what is not true */
    STEP_HANG_UP, /* it closes its link; a odd: and does not open it again before the next one */
    STEPS
} fuzz_step;

#endif
