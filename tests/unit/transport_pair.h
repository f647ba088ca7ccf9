/*
 * What the transport tests share: two endpoints with registered memory, one connected to the other, which are driven by
 * their event descriptors.
 */
#ifndef TRANSPORT_PAIR_H
#define TRANSPORT_PAIR_H

#include <kvferry/transport.h>

#include "base/base.h"

#define SIDE_REGIONS 3
#define SIDE_NOTICES 4096

/** A Z85 key that was made for these tests. */
#define TEST_SECRET_KEY "<wTUPu+?2}1:*WEQsoW$W@]DO2efSbh{.{%@2Vws"

/** How a pair is made. */
typedef struct pair_kind {
    const char *kind;     /**< the kind for kvf_transport_open() */
    bool allocated[2];    /**< regions 0 and 1 (2 is like 0): allocated by the transport, or brought */
    const char *expected; /**< what kvf_peer_kind() must return */
    kvf_setting setting;  /**< a setting for both sides, or none */
} pair_kind;

/** Every fabric, including the tests' toy fabric, with each kind of memory and setting that chooses another code path.
 * After transport_variant_count(), so many of them as it returns come first: those whose kinds this build has. */
extern pair_kind transport_variants[];

/** Lists the setting of a kind, if it has one, and the UCX to load, if `library` or the environment's KVF_UCX_LIBRARY
 * names one; returns how many settings there are. */
uint32_t pair_settings(const kvf_setting *own, const char *library, kvf_setting out[2]);

/** Prepares the table and the environment; call it once, before everything else. Returns how many variants this build
 * has. */
uint32_t transport_variant_count(void);

/** A variant as it stands in a test's name: "shm, memory brought, shm.direct=off". */
void transport_variant_name(const pair_kind *kind, char *out, size_t size);

/** One endpoint. The sizes of its regions are no multiples of any usual size. */
typedef struct test_side {
    kvf_transport *transport;
    char name[16]; /**< "side" and its seed */
    kvf_memory regions[SIDE_REGIONS];
    unsigned char *seen[SIDE_REGIONS]; /**< where the test reads and writes the regions */
    bool brought[SIDE_REGIONS];
    uint32_t notices; /**< notifications received */
    uint32_t notice_values[SIDE_NOTICES];
    uint32_t lost; /**< calls of on_peer_lost */
    kvf_peer *lost_peer;
    char lost_detail[256];
    char sender[256];                          /**< the sender of the last notification */
    void (*on_notice)(struct test_side *side); /**< called after a notification was counted */
    void *user;
} test_side;

/** Counts the calls of `done`, and keeps the arguments of the last. */
typedef struct test_outcome {
    uint32_t calls;
    kvf_status status;
    char detail[512];
    kvf_operation operation;
} test_outcome;

/** Whether the fabric that serves such a pair moves bytes in this direction. */
bool pair_can(const pair_kind *kind, kvf_direction direction);

/** Memory that a caller brings to such a pair; the test reads and writes it at `seen`. On a device it lies somewhere in
 * a larger allocation. */
kvf_memory pair_memory(const pair_kind *kind, uint32_t device, uint64_t bytes, unsigned char **seen);
void pair_memory_free(const kvf_memory *memory);

/** Opens an endpoint and registers its memory, which is filled according to `seed`. */
void side_open(test_side *side, const pair_kind *kind, uint32_t seed);
void side_close(test_side *side);

/** Connects `from` to `to` by its card. */
kvf_peer *side_connect(test_side *from, const test_side *to);

/** The byte that side_open() put at an offset of a region. */
unsigned char side_byte(uint32_t seed, uint32_t region, uint64_t offset);

/** Fills memory with the bytes that side_open() puts at the start of a region. */
void side_fill(unsigned char *memory, uint32_t seed, uint32_t region, uint64_t bytes);

unsigned char *side_memory(const test_side *side, uint32_t region);

/** The `done` callback that fills an outcome. */
void note_outcome(void *context, kvf_operation operation, kvf_status status, const char *detail);

/**
 * Lets the sides work, each when its event descriptor says so, until `*counter` is at least `wanted`. Fails the test if
 * nothing happens for a minute. NULL sides are left out.
 */
void drive(test_side *a, test_side *b, const uint32_t *counter, uint32_t wanted);

/** Lets both work until neither has anything to do. */
void drive_idle(test_side *a, test_side *b);

/** Submits runs, drives both sides, and returns how the batch ended. */
kvf_status move_runs(test_side *a, test_side *b, kvf_peer *peer, kvf_direction direction, const kvf_run *runs,
                     size_t count);

/** A small random number generator. */
uint64_t draw(uint64_t *state, uint64_t below);

/**
 * Makes random runs between the regions of two sides, no two of which overlap at the destination. Returns how many, at
 * most `most`.
 */
size_t draw_runs(uint64_t *state, const test_side *local, const test_side *remote, kvf_direction direction,
                 uint64_t longest, kvf_run *runs, size_t most);

#endif
