/*
 * Messages between the coordinator of a demo and its ranks, over a socket of each: whole, in order, blocking.
 * Both ends are the same program, so payloads are plain structs.
 */
#ifndef KVFERRY_DEMO_CHANNEL_H
#define KVFERRY_DEMO_CHANNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum message_type {
    /* From a rank. */
    MESSAGE_READY = 1, /* its caches are filled; prefill: its introduction */
    MESSAGE_PROGRESS,  /* a progress_figures */
    MESSAGE_CONNECTED, /* decode */
    MESSAGE_MOVED,     /* decode, and prefill where that writes: a move_figures */
    MESSAGE_VERIFIED,  /* decode: a verdict */
    MESSAGE_PARTED,    /* prefill: its agent is closed and its memory freed; decode: it has let go of both */
    MESSAGE_PREPARED,  /* decode: its part of the memory to copy from is filled */
    MESSAGE_COPIED,    /* decode: a copy_figures */
    MESSAGE_HALFWAY,   /* some of the broken request has moved: a halfway_figures */
    MESSAGE_TOLD,      /* what the rank was told of the broken request: a told_figures */
    MESSAGE_FAILED,    /* why it ends, a text */
    /* To a rank. */
    MESSAGE_CONNECT, /* decode: where the prefill engine is met, a text */
    MESSAGE_MOVE,
    MESSAGE_STAND, /* prefill: hold everything, again and again */
    MESSAGE_VERIFY,
    MESSAGE_PART,
    MESSAGE_PREPARE,
    MESSAGE_COPY,    /* decode: by which method, a text */
    MESSAGE_BREAK,   /* move the first request, in the middle of which a producer is killed */
    MESSAGE_TELL,    /* decode: what it is told of that request */
    MESSAGE_GIVE_UP, /* prefill: that request has failed elsewhere */
    MESSAGE_BEGIN,   /* to a process that stands by: be the rank */
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

/** How far a request was when its producer was killed. */
typedef struct halfway_figures {
    uint64_t bytes;  /* that had moved */
    uint32_t layers; /* push: model layers that were ready; 0: pulled */
} halfway_figures;

/** What a rank was told of the request whose producer was killed. Times are of CLOCK_MONOTONIC. */
typedef struct told_figures {
    uint32_t status;                    /* kvf_status; KVF_OK: the rank's part was done */
    uint64_t told_ns, free_ns;          /* when it was told of the end, and that its blocks are free */
    uint64_t bytes;                     /* that had moved */
    uint64_t invalid_blocks, of_blocks; /* to compute anew, of those of the request; prefill: 0 */
    char detail[400];
} told_figures;

/** What a decode rank found in its caches. */
typedef struct verdict {
    bool wrong;
    uint64_t bytes;           /* of cells that were checked */
    uint64_t untouched_bytes; /* of all other memory, checked too */
    uint64_t order[6];        /* of the first wrong coordinate, for comparing verdicts */
    char text[400];           /* that coordinate in words */
} verdict;

/** A received message; `data` is the channel's, until the next one. */
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

/** Waits for a message. False when the other end is gone, or memory is. */
bool channel_receive(channel *from, message *out);

/** Closes the socket and frees the buffer. */
void channel_close(channel *closed);

#endif
