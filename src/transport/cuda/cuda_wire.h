/*
 * The messages of two endpoints with CUDA memory over a Unix socket: one packet a message, each beginning with a
 * header. The side that connects reads, the side it connects to owns the memory.
 *
 *     reader                              owner
 *     HELLO key                    ->     checks it
 *                                  <-     READY; or REFUSED why, at any time
 *     maps what has handles
 *     FETCH region, segments       ->     of a region in segments, in order, each once
 *                                  <-     SEGMENT bytes, with a descriptor or a handle; as many as were asked for
 *     (its kernels read the owner's memory, without a message)
 *     MEMORY regions, in parts     ->     the memory of later WRITEs; sent again when it has changed
 *     WRITE number, runs           ->     its kernels read the other's memory, over a connection back to it
 *                                  <-     WRITTEN number, status
 *     NOTICE bytes                 ->
 *     hangs up                            its kernels are over, and the memory is not mapped there any more
 *
 * Both sides run on the same machine, so numbers have its byte order. Neither side trusts the other: the receiver
 * checks lengths. A process that has died looks like one that has hung up.
 */
#ifndef KVF_TRANSPORT_CUDA_WIRE_H
#define KVF_TRANSPORT_CUDA_WIRE_H

#include <sys/types.h>

#include "cuda/driver.h"
#include "transport/neighbour.h"
#include "transport/transport.h"

#define CUDA_WIRE_VERSION 5u
#define CUDA_ID_BYTES 16
#define CUDA_NAME_BYTES 256
#define CUDA_NOTICE_MAX 4096u
#define CUDA_MEMORY_PART 128u      /* regions of one message */
#define CUDA_MEMORY_REGIONS 16384u /* of one writer, in all */
#define CUDA_WRITE_RUNS 1024u      /* of one message */
#define CUDA_WRITES 2u             /* of one connection, unanswered */
#define CUDA_FETCH_SEGMENTS 16u    /* of one message */
#define CUDA_REASON_BYTES 256u

typedef enum kvf_cuda_kind {
    CUDA_HELLO = 1,
    CUDA_READY = 2,
    CUDA_NOTICE = 3,
    CUDA_REFUSED = 4,
    CUDA_MEMORY = 5,
    CUDA_WRITE = 6,
    CUDA_WRITTEN = 7,
    CUDA_FETCH = 8,
    CUDA_SEGMENT = 9
} kvf_cuda_kind;

/** Why an owner refuses a reader. */
typedef enum kvf_cuda_refusal {
    CUDA_REFUSED_VERSION = 1,
    CUDA_REFUSED_KEY = 2,
    CUDA_REFUSED_FENCED = 3,
    CUDA_REFUSED_PROTOCOL = 4, /**< an invalid message */
    CUDA_REFUSED_USER = 5,
    CUDA_REFUSED_GENERATION = 6, /**< the card describes memory that is gone */
    CUDA_REFUSED_FULL = 7,       /**< the owner has as many connections as it accepts */
    CUDA_REFUSED_CLOSED = 8,     /**< the owner closes, and waits until nothing of it is mapped any more */
    CUDA_REFUSED_SHORT = 9,      /**< the owner has no memory or descriptor for it */
} kvf_cuda_refusal;

typedef struct kvf_cuda_header {
    uint32_t kind;
    uint32_t count; /**< bytes of a notice, regions, runs, segments, kvf_cuda_refusal, kvf_status; else 0 */
} kvf_cuda_header;

typedef struct kvf_cuda_hello {
    kvf_cuda_header header;
    uint32_t version, unused;
    uint64_t generation;               /**< of the owner's memory, as the card says */
    unsigned char key[CUDA_ID_BYTES];  /**< of the card */
    unsigned char from[CUDA_ID_BYTES]; /**< the name in the sender's own card */
    char name[CUDA_NAME_BYTES];        /**< the sender's own, with its NUL */
} kvf_cuda_hello;

typedef struct kvf_cuda_refused {
    kvf_cuda_header header;
    uint64_t number; /**< the oldest generation that a card may describe; or the limit that is reached */
} kvf_cuda_refused;

typedef struct kvf_cuda_notice {
    kvf_cuda_header header;
    unsigned char data[CUDA_NOTICE_MAX]; /**< only header.count are sent */
} kvf_cuda_notice;

/** This fabric's part of a card: this struct, and then `region_count` regions. */
typedef struct kvf_cuda_card {
    kvf_neighbour_place place;            /**< where the name is */
    unsigned char process[CUDA_ID_BYTES]; /**< the same for all endpoints of a process */
    unsigned char name[CUDA_ID_BYTES];    /**< of the socket: every process on the machine can see it */
    unsigned char key[CUDA_ID_BYTES];     /**< other processes see it only on the card */
    uint32_t region_count, unused;
} kvf_cuda_card;

/** The place of a region: an offset in an allocation, and the allocation's handle; or an offset in segments (see
 * cuda/segments.h), which are fetched. All zero: there is none. */
typedef struct kvf_cuda_region {
    CUipcMemHandle handle; /**< zero if there are segments */
    CUuuid device;
    uint64_t base;             /**< of the allocation, or of the first segment, in the owner's process */
    uint64_t allocation_bytes; /**< a handle opens all of it; or of all segments */
    uint64_t offset;
    uint64_t bytes;
    uint32_t segments, unused;
} kvf_cuda_region;

/** Asks for segments of a region, from the `first` on. */
typedef struct kvf_cuda_fetch {
    kvf_cuda_header header;
    uint32_t region, first;
} kvf_cuda_fetch;

/** One segment. Unless it has failed, a descriptor comes with it, or it has a fabric handle. After a failure no more
 * segments come. */
typedef struct kvf_cuda_segment {
    kvf_cuda_header header;
    uint32_t region, number;
    uint64_t bytes;
    uint32_t has_fabric, unused;
    CUmemFabricHandle fabric;
    char reason[CUDA_REASON_BYTES]; /**< of a failure, with its NUL */
} kvf_cuda_segment;

/** Regions of the sender, from the `first` on. */
typedef struct kvf_cuda_memory {
    kvf_cuda_header header;
    uint32_t first, unused;
    uint64_t generation;                       /**< of its memory */
    kvf_cuda_card card;                        /**< the sender's own, with the number of all regions */
    kvf_cuda_region regions[CUDA_MEMORY_PART]; /**< only header.count are sent */
} kvf_cuda_memory;

/** Runs, or nests, that the owner must copy to its own memory; local is the sender's side, remote the owner's. */
typedef struct kvf_cuda_write {
    kvf_cuda_header header;
    uint64_t number;     /**< repeated in the answer */
    kvf_run_shape shape; /**< of the nests; all zero: they are runs */
    kvf_run runs[CUDA_WRITE_RUNS];
} kvf_cuda_write;

/** KVF_E_AGAIN: nothing is wrong, but the writer must send MEMORY anew. */
typedef struct kvf_cuda_written {
    kvf_cuda_header header;
    uint64_t number;
    char reason[CUDA_REASON_BYTES]; /**< of a failure, with its NUL */
} kvf_cuda_written;

/** A message that came in. */
typedef struct kvf_cuda_packet {
    union {
        kvf_cuda_header header;
        kvf_cuda_hello hello;
        kvf_cuda_refused refused;
        kvf_cuda_notice notice;
        kvf_cuda_memory memory;
        kvf_cuda_write write;
        kvf_cuda_written written;
        kvf_cuda_fetch fetch;
        kvf_cuda_segment segment;
    } as;
    size_t bytes;
} kvf_cuda_packet;

/** Makes the socket that a card names, and listens on it. */
kvf_status kvf_cuda_wire_listen(const unsigned char name[CUDA_ID_BYTES], int *out);

/**
 * Connects to the socket that a card names.
 *
 * @return KVF_OK, KVF_E_PEER_LOST (no process listens), KVF_E_PERMISSION, KVF_E_AGAIN (its queue is full), KVF_E_IO
 */
kvf_status kvf_cuda_wire_connect(const unsigned char name[CUDA_ID_BYTES], int *out);

/** Sends one message. Never blocks. @return KVF_OK, KVF_E_AGAIN (it does not read), KVF_E_PEER_LOST, KVF_E_IO */
kvf_status kvf_cuda_wire_send(int socket, const void *message, size_t bytes);

/** As kvf_cuda_wire_send(), with a descriptor, which stays the caller's. */
kvf_status kvf_cuda_wire_send_with(int socket, const void *message, size_t bytes, int fd);

/** Receives a message. Never blocks. @return KVF_OK, KVF_E_AGAIN (none is there), KVF_E_PEER_LOST, KVF_E_PARSE (no
 * header) */
kvf_status kvf_cuda_wire_receive(int socket, kvf_cuda_packet *out);

/** As kvf_cuda_wire_receive(). `*fd` receives the descriptor that came with it, or -1; the caller closes it. KVF_E_IO:
 * the message has come, but there was no free descriptor for the one that it brought. */
kvf_status kvf_cuda_wire_receive_with(int socket, kvf_cuda_packet *out, int *fd);

#endif
