/*
 * Connections that others made to us, *guests*: limits, and which are closed first.
 *
 * A guest is known while a peer is met over it, and a stranger otherwise. If there are too many guests, in all, from
 * one address, or of strangers, the stranger that has been silent for longest is closed, which may be the one that has
 * just come. A stranger that is silent for KVF_GUEST_SILENT_NS is closed in any case. A known guest is never closed for
 * room or silence.
 *
 * A guest that sends a message without an end is cut off, known or not. ZeroMQ hands out whole messages, and limits the
 * length of a frame, but not the number of frames of a message: it keeps them, 64 bytes for a frame of 2, and nobody
 * sees them. So the owner weighs guests: what a connection has brought since a message was last read from it is part of
 * a message that is not whole, once the owner has read what there was. That has a limit for each guest, and for
 * strangers together another.
 *
 * This is only the policy: the owner of the connections reports what happens to them, and closes those that it is told
 * to close.
 */
#ifndef KVF_PORT_GUESTS_H
#define KVF_PORT_GUESTS_H

#include "base/tables.h"

#define KVF_GUEST_SILENT_NS UINT64_C(15000000000)
#define KVF_GUEST_PARTING_NS UINT64_C(100000000)
#define KVF_GUEST_ADDRESS_BYTES 64u
#define KVF_GUESTS_LEFT 256u
/* Of a message that is not whole: what strangers together may have brought, and each of them in any case, for it may be
 * shaking hands; and what ZeroMQ may have received and not looked at, beside the longest message. */
#define KVF_GUESTS_PART_BYTES (1u << 20)
#define KVF_GUEST_GREETING_BYTES 2048u
#define KVF_GUEST_BATCH_BYTES (16u << 10)

typedef struct kvf_guest_host kvf_guest_host;

typedef struct kvf_guest {
    uint64_t id;       /* the owner's name for it */
    uint64_t mark;     /* the owner's */
    uint64_t route;    /* 0: nothing was heard over it yet */
    uint64_t heard_ns; /* when something was heard, or it came, or was last checked */
    kvf_guest_host *host;
    bool known;   /* as of the last check */
    bool parting; /* see kvf_guests_part() */
    bool met;     /* parting: it was known until then */
    bool muted;   /* nothing more is taken in over it */
    bool leaving; /* its owner was told to close it */
    /* see kvf_guests_weigh() */
    bool moves;            /* it is to be weighed */
    bool was_read;         /* a message was, since it was last weighed */
    bool is_suspect;       /* it had brought too much, */
    uint64_t turn;         /* in this turn */
    uint64_t brought;      /* bytes, when it was last weighed */
    uint64_t whole;        /* of these, those that belong to messages that were read */
    uint64_t part_counted; /* of the rest, what is in guests->part_bytes */
    UT_hash_handle by_id, by_route;
    struct kvf_guest *prev, *next;           /* in guests->present: silent for longest first */
    struct kvf_guest *host_prev, *host_next; /* likewise, among those of its address */
    struct kvf_guest *moving_prev, *moving_next;
} kvf_guest;

/** The owner sets all fields except those marked as kept here; zero means no limit. */
typedef struct kvf_guests {
    uint32_t most, most_of_address, most_strangers; /* 0: as many as come */
    uint64_t longest, longest_strange; /* bytes of a message, of a known guest and of a stranger */
    /** Whether a peer is met over a route; NULL: never. */
    bool (*is_known)(void *context, uint64_t route);
    /** Closes the connection of a guest, for kvf_guests_leave() some time later. It may be gone already. */
    void (*hang_up)(void *owner, kvf_guest *guest);
    /** Receives nothing more over a guest's connection; false: that is not possible, and the guest is hung up on. */
    bool (*mute)(void *owner, const kvf_guest *guest);
    /** Receives only the beginnings of what comes over a guest's connection. May be NULL. */
    void (*narrow)(void *owner, const kvf_guest *guest);
    /** A connection of an address is about to be cut off. May be NULL. */
    void (*on_cut_off)(void *owner, const char *address);
    /** A connection over which something was heard has ended. May be NULL. */
    void (*on_left)(void *context, uint64_t route);
    /** A connection was closed for lack of room, or cut off; `detail` names it. May be NULL. */
    void (*on_crowded)(void *context, const char *detail);
    void *context, *owner;

    /* kept here */
    kvf_guest *by_id, *by_route, *present;
    kvf_guest_host *hosts;
    uint32_t count, known; /* present ones, and those known at their last check */
    /* A ring of the routes that left last: their messages may be read after their number is reused. */
    uint64_t left[KVF_GUESTS_LEFT];
    uint32_t next_left;
    kvf_guest *moving;   /* those to be weighed, in this order */
    uint64_t part_bytes; /* of messages that are not whole, of strangers together */
    uint64_t turn;       /* in each, whoever has a whole message gets one read */
    uint32_t taken;      /* messages, in this turn */
    uint64_t closed;     /* how many were closed */
    uint64_t refused;    /* closed for want of room, or cut off */
} kvf_guests;

/** A connection was made. KVF_OK, even if it is closed at once; KVF_E_NOMEM: it is not listed, try again. */
kvf_status kvf_guests_arrive(kvf_guests *guests, uint64_t id, uint64_t mark, const char *address,
                             uint64_t now);
/** A connection has ended. One that is not listed is ignored. */
void kvf_guests_leave(kvf_guests *guests, uint64_t id);

/** Something came over the connection that has a route; whether it is listed. */
bool kvf_guests_hear(kvf_guests *guests, uint64_t route, uint64_t now);
/** The same for a guest that gains no time by it: a message was read, whatever it was. */
bool kvf_guests_read(kvf_guests *guests, uint64_t route);
/** Gives a guest its route, because something has come over its connection. A route of a connection that has left is
 * not taken for its successor. */
void kvf_guests_name(kvf_guests *guests, uint64_t id, uint64_t route, uint64_t now);

/** The connection of a route sent something that is not our protocol: it is closed at once. */
void kvf_guests_dismiss(kvf_guests *guests, uint64_t route);
/** The peer of a route sent something large that was nothing for us: nothing more is received over its connection,
 * which is closed as a silent one is. A peer that is hung up on at once comes back at once, with as much. */
void kvf_guests_mute(kvf_guests *guests, uint64_t route);
/** Whether a route was muted: what is still read from it was received before. */
bool kvf_guests_is_muted(const kvf_guests *guests, uint64_t route);
/** The peer of a route was refused: its connection is the first to be closed, after some time in which the peer can
 * read why (KVF_GUEST_PARTING_NS, and up to a second more), or at once if it was refused before. */
void kvf_guests_part(kvf_guests *guests, uint64_t route, uint64_t now);
/** Whether the peer of a route was refused, see kvf_guests_part(). */
bool kvf_guests_is_parting(const kvf_guests *guests, uint64_t route);
/** Whether it was refused after having been known, so that messages of both sides may still be on their way. */
bool kvf_guests_was_met(const kvf_guests *guests, uint64_t route);

/** Whether the guest of a route is listed. */
bool kvf_guests_has(const kvf_guests *guests, uint64_t route);

/** A guest's connection brings something: it is weighed until it brings nothing more. */
void kvf_guests_stir(kvf_guests *guests, uint64_t id);
/** The guest that is to be weighed next, which is then the last; NULL: none moves. */
kvf_guest *kvf_guests_next_moving(kvf_guests *guests);
/**
 * Weighs a guest: its connection has brought so many bytes so far, which ZeroMQ has received. A guest that has brought
 * too much since a message of it was read is cut off, if it stays so for two turns.
 *
 * @return whether it still moves; false: it brings nothing now, or was cut off
 */
bool kvf_guests_weigh(kvf_guests *guests, kvf_guest *guest, uint64_t brought);
/** So many messages were taken in, in ZeroMQ's order, which is one of each connection in turn; `all`: and there are no
 * more. */
void kvf_guests_took(kvf_guests *guests, uint32_t count, bool all);

/** Closes strangers that have been silent for too long, a bounded number. */
void kvf_guests_tick(kvf_guests *guests, uint64_t now);
/** When kvf_guests_tick() must be called; UINT64_MAX: not before something happens. */
uint64_t kvf_guests_due(const kvf_guests *guests);

void kvf_guests_free(kvf_guests *guests);

#endif
