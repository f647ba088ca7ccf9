#include "agent_steps.h"
#include "seeds.h"

typedef uint8_t step[STEP_BYTES];

#define WRITE(name, ...)                                                                                     \
    do {                                                                                                     \
        static const step steps[] = {__VA_ARGS__};                                                           \
        seed_write("agent", name, steps, sizeof steps);                                                      \
    } while (0)

#define WAIT_MS(log2)                                                                                        \
    { STEP_WAIT, 0, 10 + (log2) }

/* Kinds of calls, by STEP_CALL's numbers. */
enum { JOIN, ACQUIRE, RELEASE, BEAT, EXPECT, WRITTEN, WITHDRAW, CHECKSUM, PROBE };

void seed_agent(void) {
    WRITE("pull", {STEP_HOLD, 1, 0, 2, 3}, {STEP_PULL, 0, 0, 4, 3}, WAIT_MS(6), {STEP_WAIT, 0, 22});
    WRITE("pull_into", {STEP_PULL, 0, 0, 4, 3, 0, 0x10}, WAIT_MS(4), {STEP_HOLD, 1, 0, 2, 3}, WAIT_MS(4),
          {STEP_INTO, 0, 0, 5, 3}, WAIT_MS(6));
    WRITE("push", {STEP_EXPECT, 0, 1, 4, 3}, {STEP_PUSH, 1, 1, 0, 3}, WAIT_MS(4),
          {STEP_READY, 1, 0, 0, 16, 2, 1}, WAIT_MS(2), {STEP_READY, 1}, WAIT_MS(6));
    WRITE("cancelled", {STEP_EXPECT, 0, 1, 4, 3}, {STEP_PUSH, 1, 1, 0, 3}, WAIT_MS(4), {STEP_CANCEL, 0},
          {STEP_HOLD, 1, 2, 6, 2}, {STEP_PULL, 0, 2, 8, 2}, {STEP_CANCEL, 1, 1}, WAIT_MS(8));
    WRITE("lent_to_a_peer", {STEP_HOLD, 0, 0, 2, 3}, {STEP_GREET, 0, 0, 0}, WAIT_MS(1),
          {STEP_CALL, 0, ACQUIRE, 0, 0, 0, 0, 90}, WAIT_MS(1), {STEP_CALL, 0, BEAT, 0}, WAIT_MS(1),
          {STEP_CALL, 0, CHECKSUM, 0, 0, 0, 0, 16}, WAIT_MS(1), {STEP_CALL, 0, RELEASE, 0}, {STEP_REPEAT, 0},
          WAIT_MS(8));
    WRITE("left_by_a_jump_of_numbers", {STEP_HOLD, 0, 0, 2, 3}, {STEP_GREET, 0, 0, 0}, WAIT_MS(1),
          {STEP_CALL, 0, ACQUIRE, 0, 0, 0, 0, 90}, WAIT_MS(1), {STEP_CALL, 0, BEAT, 0, 7},
          {STEP_WAIT, 0, 18});
    WRITE("written_to_a_peer", {STEP_GREET, 1, 0, 0}, WAIT_MS(1), {STEP_CALL, 1, JOIN, 0, 0, 4, 1},
          WAIT_MS(1), {STEP_CALL, 1, EXPECT, 0, 0, 1, 5, 40}, {STEP_PUSH, 0, 1, 0, 3}, {STEP_READY, 0},
          WAIT_MS(8), {STEP_CALL, 1, WITHDRAW, 0, 0, 1, 5}, WAIT_MS(4));
    WRITE("early", {STEP_GREET, 2, 0, 0}, WAIT_MS(1), {STEP_CALL, 2, RELEASE, 0, 0, 3},
          {STEP_CALL, 2, ACQUIRE, 0, 0, 1, 0, 60}, WAIT_MS(4), {STEP_HOLD, 0, 3, 1, 1},
          {STEP_HOLD, 0, 1, 1, 1}, WAIT_MS(8));
    WRITE("read_from_a_peer", {STEP_PULL, 0, 0, 4, 1, 1}, WAIT_MS(8), {STEP_CONNECT, 0, 0, 0, 0, 2},
          WAIT_MS(8));
    WRITE("written_by_a_peer", {STEP_EXPECT, 0, 2, 4, 3, 2}, WAIT_MS(6), {STEP_WRITTEN, 1, 0, 0, 0, 2},
          WAIT_MS(6), {STEP_EXPECT, 0, 3, 4, 3, 2}, WAIT_MS(6), {STEP_WRITTEN, 1, 1},
          {STEP_WRITTEN, 1, 0, 0, 0, 3 + 4 * 5}, WAIT_MS(8));
    WRITE("a_peer_that_is_silent", {STEP_MANNERS, 0, 1}, {STEP_PULL, 0, 0, 4, 1, 1}, WAIT_MS(6),
          {STEP_ANSWER, 0, 0, 0, 2}, {STEP_ANSWER, 0, 7}, {STEP_HANG_UP, 0, 1}, WAIT_MS(12));
    WRITE("strangers", {STEP_GREET, 0, 0, 0}, {STEP_GREET, 1, 0, 0, 1}, {STEP_GREET, 2, 0, 0, 5}, WAIT_MS(10),
          {STEP_GREET, 2, 0, 0, 0, 1}, {STEP_GREET, 2, 1, 0}, {STEP_CALL, 1, BEAT, 0, 8},
          {STEP_CALL, 0, BEAT, 0, 0x83}, {STEP_WELCOME, 1, 2, 0, 0, 0, 0, 1},
          {STEP_WELCOME, 1, 1, 0, 4, 0, 0, 1}, WAIT_MS(8));
    WRITE("drained", {STEP_EXPECT, 0, 1, 4, 3}, {STEP_HOLD, 1, 0, 2, 3}, WAIT_MS(4),
          {STEP_CANCEL, 1, 0, 255, 0, 0, 0, 5}, {STEP_PULL, 0, 0, 8, 3}, WAIT_MS(6), {STEP_WAIT, 0, 22},
          {STEP_HOLD, 1, 2, 2, 3});
    WRITE("commands", {STEP_COMMAND, 0, 2, 0, 0, 0, 0, 5}, {STEP_COMMAND, 0, 2, 0, 0, 0, 0, 5}, WAIT_MS(1),
          {STEP_CANCEL, 0, 0, 254, 1, 1, 0, 0}, WAIT_MS(1), {STEP_COMMAND, 0, 2},
          {STEP_COMMAND, 1, 4, 0, 5, 3, 15, 1}, {STEP_COMMAND, 2, 6, 1}, {STEP_COMMAND, 2, 3, 0},
          {STEP_REPEAT, 1}, {STEP_WAIT, 0, 22}, {STEP_CANCEL, 0, 0, 254, 2}, {STEP_RESTART, 0}, WAIT_MS(4));
    WRITE("restarts", {STEP_HOLD, 1, 0, 2, 3}, {STEP_PULL, 0, 0, 4, 3}, {STEP_WAIT, 0, 7}, {STEP_RESTART, 1},
          {STEP_HOLD, 1, 0, 2, 3}, WAIT_MS(10), {STEP_REGION, 0, 0, 0}, WAIT_MS(2), {STEP_REGION, 0, 1, 0},
          {STEP_HANG_UP, 2}, WAIT_MS(10));
}
