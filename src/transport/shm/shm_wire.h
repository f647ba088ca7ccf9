/*
 * The messages of two endpoints on one host over a Unix socket: one packet a message, each beginning with a
 * header. The side that connects is the consumer, the side it connects to the owner of the memory.
 *
 *     consumer                                   owner
 *     HELLO key                           ->     checks it
 *                                         <-     ARENA fd, ... REGIONS, ... GATE fd, READY; or REFUSED why
 *     (maps, or reads with process_vm_readv, without a message; writes while the gate is open)
 *     NOTICE bytes                        ->
 *     BUFFER fd                           ->     maps some of it            where direct reading is forbidden,
 *                                         <-     BUFFER how much             or both read at the same time
 *     MOVE slot, list of pieces           ->     copies memory <-> slot
 *                                         <-     MOVED slot, status
 *
 * Both sides run on the same machine, so numbers have its byte order. Neither side trusts the other: the receiver
 * checks lengths, indices and sizes.
 */
#ifndef KVF_TRANSPORT_SHM_WIRE_H
#define KVF_TRANSPORT_SHM_WIRE_H

#include "transport/neighbour.h"

#define SHM_VERSION 4u
#define SHM_ID_BYTES 16
#define SHM_REGIONS_MAX 512u  /**< in one REGIONS */
#define SHM_PIECES_MAX 1024u  /**< in one MOVE */
#define SHM_SLOTS_MAX 8u      /**< of a BUFFER */
#define SHM_PACKET_MAX 32768u /**< no message is longer */
#define SHM_NAME_BYTES 256
#define SHM_NO_ARENA UINT32_MAX
#define SHM_SOCKET_PREFIX "kvferry-"

typedef enum kvf_shm_kind {
    SHM_HELLO = 1,
    SHM_ARENA = 2,
    SHM_REGIONS = 3,
    SHM_READY = 4,
    SHM_BUFFER = 5,
    SHM_MOVE = 6,
    SHM_MOVED = 7,
    SHM_NOTICE = 8,
    SHM_GATE = 9,     /**< with the descriptor of a kvf_shm_gate; nothing follows the header */
    SHM_REFUSED = 10, /**< the last message before the owner hangs up; count: a kvf_shm_refusal */
} kvf_shm_kind;

/** Why an owner refuses a consumer. */
typedef enum kvf_shm_refusal {
    SHM_REFUSED_VERSION = 1,
    SHM_REFUSED_KEY = 2,
    SHM_REFUSED_FENCED = 3,
    SHM_REFUSED_PROTOCOL = 4, /**< an invalid message */
    SHM_REFUSED_USER = 5,
    SHM_REFUSED_GENERATION = 6, /**< the card describes memory that is gone */
    SHM_REFUSED_LIMIT = 7,      /**< the process has as many connections as it may have */
    SHM_REFUSED_FULL = 8,       /**< the owner has as many connections as it accepts */
    SHM_REFUSED_SHORT = 9,      /**< the owner has no memory or descriptor for it */
} kvf_shm_refusal;

typedef struct kvf_shm_header {
    uint32_t kind;
    uint32_t count; /**< of regions, pieces or bytes of a notice that follow; or as the kind says; else 0 */
} kvf_shm_header;

/** This fabric's part of the card. */
typedef struct kvf_shm_card {
    kvf_neighbour_place place;        /**< where the name is */
    unsigned char name[SHM_ID_BYTES]; /**< of the socket: every process on the machine can see it */
    unsigned char key[SHM_ID_BYTES];  /**< other processes see it only on the card */
    uint64_t started;                 /**< when the process began, in the kernel's ticks; 0: not known */
    uint64_t brought;                 /**< regions that its caller brought, which no other process can map */
} kvf_shm_card;

typedef struct kvf_shm_hello {
    kvf_shm_header header;
    uint32_t version;
    uint32_t region_count; /**< of the card */
    unsigned char key[SHM_ID_BYTES];
    unsigned char from[SHM_ID_BYTES]; /**< the name in the sender's own card */
    uint64_t generation;              /**< of the owner's memory, as the card says */
    char name[SHM_NAME_BYTES];        /**< the sender's own, with its NUL */
} kvf_shm_hello;

/** The header's count is a kvf_shm_refusal. */
typedef struct kvf_shm_refused_message {
    kvf_shm_header header;
    uint64_t number; /**< the oldest generation that a card may describe; or the limit that is reached */
} kvf_shm_refused_message;

/** With the descriptor of the memory. */
typedef struct kvf_shm_arena_message {
    kvf_shm_header header; /* count: its index */
    uint64_t bytes;
} kvf_shm_arena_message;

typedef struct kvf_shm_region {
    uint64_t address; /**< in the owner's memory */
    uint64_t bytes;
    uint64_t arena_offset;
    uint32_t arena; /**< or SHM_NO_ARENA: memory that the owner's caller brought */
    uint32_t unused;
} kvf_shm_region;

typedef struct kvf_shm_regions_message {
    kvf_shm_header header; /* count: regions here */
    uint32_t first;
    uint32_t unused;
    kvf_shm_region regions[SHM_REGIONS_MAX]; /* only `count` are sent */
} kvf_shm_regions_message;

/** With the descriptor of the memory: `slots` times `slot_bytes`. The owner's answer, without a descriptor,
 * says how much the owner takes: no more and no larger slots, one after the other from the beginning. */
typedef struct kvf_shm_buffer_message {
    kvf_shm_header header;
    uint64_t slot_bytes;
    uint32_t slots;
    uint32_t unused;
} kvf_shm_buffer_message;

typedef struct kvf_shm_piece {
    uint64_t offset;
    uint64_t bytes;
    uint32_t region;
    uint32_t unused;
} kvf_shm_piece;

/** The pieces lie one after the other in the slot. */
typedef struct kvf_shm_move_message {
    kvf_shm_header header; /* count: pieces */
    uint32_t slot;
    uint32_t direction;                   /* of kvf_direction */
    kvf_shm_piece pieces[SHM_PIECES_MAX]; /* only `count` are sent */
} kvf_shm_move_message;

typedef struct kvf_shm_moved_message {
    kvf_shm_header header;
    uint32_t slot;
    uint32_t status;
} kvf_shm_moved_message;

_Static_assert(sizeof(kvf_shm_regions_message) <= SHM_PACKET_MAX, "fits");
_Static_assert(sizeof(kvf_shm_move_message) <= SHM_PACKET_MAX, "fits");

/** Writes the address of the socket with that name; returns its length. */
socklen_t kvf_shm_socket_address(const unsigned char name[SHM_ID_BYTES], struct sockaddr_un *out);

/** Sends one message, see kvf_neighbour_send(). */
kvf_status kvf_shm_send(int socket, const void *message, size_t bytes, int fd);

/** Sends a header and what follows it as one message. */
kvf_status kvf_shm_send_two(int socket, const void *head, size_t head_bytes, const void *tail,
                            size_t tail_bytes);

/** A message that came in. */
typedef struct kvf_shm_packet {
    union {
        kvf_shm_header header;
        kvf_shm_hello hello;
        kvf_shm_refused_message refused;
        kvf_shm_arena_message arena;
        kvf_shm_regions_message regions;
        kvf_shm_buffer_message buffer;
        kvf_shm_move_message move;
        kvf_shm_moved_message moved;
        unsigned char raw[SHM_PACKET_MAX];
    } as;
    size_t bytes;
    int fd; /**< that came with it, or -1; the receiver closes it */
} kvf_shm_packet;

/** Receives one message, at least as long as a header, see kvf_neighbour_receive(). */
kvf_status kvf_shm_receive(int socket, kvf_shm_packet *packet);

/** Whether a packet's length is `fixed` bytes and `header.count` elements, 1 to `most`. */
bool kvf_shm_fits(const kvf_shm_packet *packet, size_t fixed, size_t element_bytes, uint32_t most);

/**
 * Maps memory whose descriptor another process sent: it must really have that many bytes and be sealed
 * against shrinking, so that accessing it cannot fault. The caller still owns the descriptor.
 *
 * @return KVF_OK, KVF_E_PARSE (not such memory), KVF_E_NOMEM
 */
kvf_status kvf_shm_map_foreign(int fd, uint64_t bytes, unsigned char **out);

/** Makes memory to share: sealed, mapped, zeroed. `bytes` becomes a multiple of the page size. */
kvf_status kvf_shm_make_memory(uint64_t *bytes, int *fd, unsigned char **out);

#endif
