/*
 * What the programs that attack the same-host transport share. Each is started as
 *
 *   shm_<attack> CARD SECONDS
 *
 * CARD is "name:" with the name of the owner's socket, which every process of the machine finds in
 * /proc/net/unix, or "card:" with what only those are given who may read and write the memory. An attack
 * goes on for so many seconds, and ends with a line of JSON: how much it has done in its own unit, and,
 * where it found something that must not be, `harm`. Writing into caches is no attack of a card's holder:
 * the card allows it.
 */
#ifndef SHM_ATTACK_H
#define SHM_ATTACK_H

#include <kvferry/transport.h>

#include "transport/shm/shm_gate.h"
#include "transport/shm/shm_wire.h"

typedef struct attack {
    kvf_shm_card card; /**< without one: the name alone, and zeros */
    bool has_card;
    uint64_t generation;
    uint64_t region_bytes[8];
    uint32_t region_count;
    uint64_t end_ns, done;
    uint64_t random;
} attack;

/** Reads the arguments; ends the program when they make no sense. */
void attack_begin(attack *a, int argc, char **argv);

bool attack_goes_on(const attack *a);

/** Prints the last line; `harm` may be NULL. Returns what main() does. */
int attack_end(const attack *a, const char *harm);

void attack_sleep_ms(unsigned ms);

/** The next of some numbers, below a limit. */
uint64_t attack_draw(attack *a, uint64_t below);

/** Connects to the owner's socket; -1: not now. */
int attack_connect(const attack *a);

/** Sends one message with some descriptors, the same one so many times; never waits. Whether it went. */
bool attack_send(int socket, const void *message, size_t bytes, int passed, unsigned times);

/** A HELLO that is good where there is a card. */
kvf_shm_hello attack_hello(attack *a);

/** A client that has shown the card, and was told all there is; -1: not within a second. `gate` may be
 * NULL. */
int attack_client(attack *a, kvf_shm_gate **gate);

/** Gives the owner a buffer in memory that is ours. Whether it went. */
bool attack_give_buffer(int socket, int memory, uint64_t slot_bytes, uint32_t slots);

/** The same, and waits for how much of it the owner takes. */
bool attack_lay_buffer(int socket, int memory, uint64_t *slot_bytes, uint32_t *slots);

/** Fills a MOVE that reads `count` pieces of so many bytes, from anywhere in the largest region; its
 * length. */
size_t attack_move(attack *a, kvf_shm_move_message *move, uint32_t slot, uint32_t count, uint64_t bytes);

/** Waits up to `ms` for a message, and takes it; whether there was one. The descriptor with it is closed. */
bool attack_receive(int socket, kvf_shm_packet *packet, int ms);

#endif
