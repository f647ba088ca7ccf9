/*
 * Raw sockets that speak the same-host transport's protocol by hand, for tests of sides that violate it.
 */
#ifndef KVF_TEST_TRANSPORT_RAW_H
#define KVF_TEST_TRANSPORT_RAW_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "transport/shm/shm_wire.h"
#include "transport_pair.h"

#define RAW_PASSED_MAX 253u /**< the most descriptors that fit in one message */

/** A side whose region 1 is memory that its caller brought, which is served through a buffer. */
extern const pair_kind raw_brought;

/** The part of an endpoint's card that names its socket. */
kvf_shm_card raw_card(const test_side *side);

int raw_connect(const kvf_shm_card *card);
/** Sends a message, and the descriptor `passed` with it unless that is -1. */
void raw_send(int fd, const void *message, size_t bytes, int passed);
/** The same, with one descriptor `times` times. */
void raw_send_many(int socket, const void *message, size_t bytes, int passed, uint32_t times);

#define RAW_QUEUE_MAX 1000u
/** Connects without being accepted until the owner's queue is full: the last of the sockets is not connected. Returns how
 * many there are; the caller closes them. */
uint32_t raw_fill_queue(const test_side *owner, int fds[RAW_QUEUE_MAX]);

/** Makes a raw client that has shown the key and read the owner's first messages. */
int raw_client(test_side *owner);
/** The same, with a valid buffer of two slots of 64 KiB. */
int raw_client_with_buffer(test_side *owner, unsigned char **buffer);
/** Offers memory as a buffer and closes it; returns how much of it the owner takes. */
kvf_shm_buffer_message raw_offer_buffer(test_side *owner, int fd, int memory, uint64_t slot_bytes,
                                        uint32_t slots);

/** Whether the owner has ended the connection. */
bool raw_hung_up(test_side *owner, int fd);
/** Asserts that an honest client is still served. */
void raw_check_served(test_side *owner);

/** Makes a memory file with these seals. */
int raw_memory(uint64_t bytes, unsigned seals);
int raw_count_descriptors(void); /**< how many descriptors this process has open */

#endif
