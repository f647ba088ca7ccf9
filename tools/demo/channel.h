/*
 * Messages between the coordinator of a demo and its ranks, over one socket for each rank: whole, in order, blocking.
 * Both ends are the same program, so that payloads are plain structs.
 */
#ifndef KVFERRY_DEMO_CHANNEL_H
#define KVFERRY_DEMO_CHANNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum message_type {
    /* From a rank. */
    MESSAGE_READY = 1, /* its caches are filled; prefill sends its introduction */
    MESSAGE_PROGRESS,  /* a progress_figures */
    MESSAGE_CONNECTED, /* decode */
    MESSAGE_MOVED,     /* decode, and prefill if it pushes: a move_figures */
    MESSAGE_VERIFIED,  /* decode: a verdict */
    MESSAGE_PARTED,    /* prefill: its agent is closed and its memory freed; decode: it has no peers left */
    MESSAGE_PREPARED,  /* decode: its part of the memory to copy from is filled */
    MESSAGE_COPIED,    /* decode: a copy_figures */
    MESSAGE_HALFWAY,   /* some of the broken request has moved: a halfway_figures */
    MESSAGE_TOLD,      /* what its agent reported about the broken request: a told_figures */
    MESSAGE_FAILED,    /* why it ends, a text */
    /* To a rank. */
    MESSAGE_CONNECT, /* decode: the endpoint to meet the prefill engine at, a text */
    MESSAGE_MOVE,
    MESSAGE_STAND, /* prefill: hold all requests, again and again */
    MESSAGE_VERIFY,
    MESSAGE_PART,
    MESSAGE_PREPARE,
    MESSAGE_COPY,    /* decode: by which method, a text */
    MESSAGE_BREAK,   /* start the broken request */
    MESSAGE_TELL,    /* decode: send MESSAGE_TOLD once the blocks of that request are free */
    MESSAGE_GIVE_UP, /* prefill: that request has failed elsewhere */
    MESSAGE_BEGIN,   /* to a process that stands by: become the rank */
    MESSAGE_QUIT,
} message_type;

typedef struct progress_figures {
    uint64_t done, total;
} progress_figures;

typedef struct move_figures {
    uint64_t begin_ns, end_ns; /* CLOCK_MONOTONIC, which all processes share */
    uint64_t bytes, bytes_packed, runs;
    char kind[24]; /* of the transports that served */
    char way[128]; /* of one of them; "": not known */
} move_figures;

typedef struct copy_figures {
    uint64_t ns; /* spent copying */
    uint64_t bytes;
} copy_figures;

/** Progress of the broken request just before its producer is killed. */
typedef struct halfway_figures {
    uint64_t bytes;  /* that had moved */
    uint32_t layers; /* push: model layers that were ready; 0: pulled */
} halfway_figures;

/** What a rank's agent reported about the broken request. Times are of CLOCK_MONOTONIC. */
typedef struct told_figures {
    uint32_t status;                    /* kvf_status; KVF_OK: the rank's part was done */
    uint64_t told_ns, free_ns;          /* when the agent reported the end, and that the blocks are free */
    uint64_t bytes;                     /* that had moved */
    uint64_t invalid_blocks, of_blocks; /* blocks to recompute, and all blocks of the request; prefill: 0 */
    char detail[400];
} told_figures;

/** What a decode rank found in its caches. */
typedef struct verdict {
    bool wrong;
    uint64_t bytes;           /* of the cells that were checked */
    uint64_t untouched_bytes; /* of all other memory that was checked */
    uint64_t order[6];        /* of the first wrong coordinate, for comparing verdicts */
    char text[400];           /* that coordinate in words */
} verdict;

/** A received message. The channel owns `data`, which is valid until the next message. */
typedef struct message {
    message_type type;
    size_t bytes;
    const void *data;
} message;

typedef struct channel {
    int fd;
    unsigned char *buffer; /* owned */
    size_t capacity;
} channel;

/** False when the other end is gone. */
bool channel_send(const channel *to, message_type type, const void *data, size_t bytes);

/** Waits for a message. False if the other end is gone or memory ran out. */
bool channel_receive(channel *from, message *out);

/** Closes the socket and frees the buffer. */
void channel_close(channel *closed);

#endif
