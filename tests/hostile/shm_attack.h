/*
 * Shared by the programs that attack the same-host transport. Each is started as
 *
 *   shm_<attack> CARD SECONDS
 *
 * CARD is "name:" with the name of the owner's socket, which every process of the machine finds in /proc/net/unix, or
 * "card:" with the card, which is given only to peers that may read and write the memory. An attack runs for SECONDS
 * and ends with a line of JSON: how much it has done, in its own unit, and `harm` if it achieved what it must not.
 * Writing into caches is no attack by the holder of a card: the card allows it.
 */
#ifndef SHM_ATTACK_H
#define SHM_ATTACK_H

#include <kvferry/transport.h>

#include "transport/shm/shm_gate.h"
#include "transport/shm/shm_wire.h"

typedef struct attack {
    kvf_shm_card card; /**< without a card: the name alone, and zeros */
    bool has_card;
    uint64_t generation;
    uint64_t region_bytes[8];
    uint32_t region_count;
    uint64_t end_ns, done;
    uint64_t random;
} attack;

/** Reads the arguments; ends the program if they are wrong. */
void attack_begin(attack *a, int argc, char **argv);

bool attack_goes_on(const attack *a);

/** Prints the last line; `harm` may be NULL. Returns the exit status for main(). */
int attack_end(const attack *a, const char *harm);

void attack_sleep_ms(unsigned ms);

/** The next pseudo-random number below a limit. */
uint64_t attack_draw(attack *a, uint64_t below);

/** Connects to the owner's socket; -1: it takes no connection now. */
int attack_connect(const attack *a);

/** Sends one message with the descriptor `passed` in it `times` times; never waits. Whether it was sent. */
bool attack_send(int socket, const void *message, size_t bytes, int passed, unsigned times);

/** A HELLO, which is valid if the attacker has the card. */
kvf_shm_hello attack_hello(attack *a);

/** Connects a client that shows the card and gets the owner's answers; -1: not within a second. `gate` may be NULL.
 * */
int attack_client(attack *a, kvf_shm_gate **gate);

/** Gives the owner a buffer in our own memory. Whether it was sent. */
bool attack_give_buffer(int socket, int memory, uint64_t slot_bytes, uint32_t slots);

/** The same, then waits for the owner to say how much of it it takes. */
bool attack_lay_buffer(int socket, int memory, uint64_t *slot_bytes, uint32_t *slots);

/** Fills a MOVE that reads `count` pieces of `bytes` each, from anywhere in the largest region; returns its length. */
size_t attack_move(attack *a, kvf_shm_move_message *move, uint32_t slot, uint32_t count, uint64_t bytes);

/** Waits up to `ms` for a message and takes it; whether one came. Closes a descriptor that came with it. */
bool attack_receive(int socket, kvf_shm_packet *packet, int ms);

#endif
