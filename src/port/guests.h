/*
 * Connections that others made to us, *guests*: how many there may be, and which go first.
 *
 * A guest is known while somebody is met over it, and a stranger otherwise. Where there are as many guests as may be,
 * in all, from one address, or of strangers, the stranger that has been silent for longest goes: it may be the one that has just
 * come. A stranger that says nothing for KVF_GUEST_SILENT_NS goes in any case. Who is known is never hung up.
 *
 * This is the policy alone: whoever has the connections tells what happens to them, and closes those it is told to.
 */
#ifndef KVF_PORT_GUESTS_H
#define KVF_PORT_GUESTS_H

#include "base/tables.h"

#define KVF_GUEST_SILENT_NS UINT64_C(15000000000)
#define KVF_GUEST_PARTING_NS UINT64_C(100000000)
#define KVF_GUEST_ADDRESS_BYTES 64u
#define KVF_GUESTS_LEFT 256u

typedef struct kvf_guest_host kvf_guest_host;

typedef struct kvf_guest {
    uint64_t id;       /* what its owner knows it by */
    uint64_t mark;     /* the owner's */
    uint64_t route;    /* 0: nothing was heard over it yet */
    uint64_t heard_ns; /* when something was, or it came, or was last looked at */
    kvf_guest_host *host;
    bool known;   /* when it was last looked at */
    bool parting; /* see kvf_guests_part() */
    bool met;     /* parting: it was known until then */
    bool muted;   /* nothing more is taken in over it */
    bool leaving; /* its owner was told to close it */
    UT_hash_handle by_id, by_route;
    struct kvf_guest *prev, *next;           /* guests->present: who has been silent for longest is first */
    struct kvf_guest *host_prev, *host_next; /* the same among those of its address */
} kvf_guest;

/** All of it is set by the owner but what is marked as kept here; zeroed is without limits. */
typedef struct kvf_guests {
    uint32_t most, most_of_address, most_strangers; /* 0: as many as come */
    /** Whether somebody is met over a route; NULL: nobody ever is. */
    bool (*is_known)(void *context, uint64_t route);
    /** Closes the connection of a guest, for kvf_guests_leave() some time later. It may be gone already. */
    void (*hang_up)(void *owner, kvf_guest *guest);
    /** Takes nothing more in over the connection of a guest; false: that cannot be, and it is hung up. */
    bool (*mute)(void *owner, const kvf_guest *guest);
    /** A connection has ended over which something was heard. NULL: nobody wants to know. */
    void (*on_left)(void *context, uint64_t route);
    /** There was no room: tells who did not get it. NULL: nobody wants to know. */
    void (*on_crowded)(void *context, const char *detail);
    void *context, *owner;

    /* kept here */
    kvf_guest *by_id, *by_route, *present;
    kvf_guest_host *hosts;
    uint32_t count, known; /* present, and of these not strangers when they were last looked at */
    /* Routes of those that left last, a ring: what they said may be read after somebody else has their place. */
    uint64_t left[KVF_GUESTS_LEFT];
    uint32_t next_left;
    uint64_t closed;  /* so many were told to go */
    uint64_t refused; /* of these, for want of room */
} kvf_guests;

/** A connection was made. KVF_OK, also where it is to go at once; KVF_E_NOMEM: it is not listed, to be tried again. */
kvf_status kvf_guests_arrive(kvf_guests *guests, uint64_t id, uint64_t mark, const char *address,
                             uint64_t now);
/** A connection has ended. One that is not listed is ignored. */
void kvf_guests_leave(kvf_guests *guests, uint64_t id);

/** Something came over the connection that has a route; whether it is listed. */
bool kvf_guests_hear(kvf_guests *guests, uint64_t route, uint64_t now);
/** What a route is: something has come over this connection. One that has left is not taken for who has its place. */
void kvf_guests_name(kvf_guests *guests, uint64_t id, uint64_t route, uint64_t now);

/** What came over the connection that has a route is nothing for us: it goes at once. */
void kvf_guests_dismiss(kvf_guests *guests, uint64_t route);
/** What came over the connection that has a route was large, and nothing for us: nothing more is taken in over it, and it
 * goes as one that is silent does. Hung up at once it would come back at once, with as much. */
void kvf_guests_mute(kvf_guests *guests, uint64_t route);
/** Whether that was said of it: what is still read is of before. */
bool kvf_guests_is_muted(const kvf_guests *guests, uint64_t route);
/** Who has come over the connection that has a route was refused: it is the first to go, and goes when it has had some
 * time to read why (KVF_GUEST_PARTING_NS, and up to a second more); and at once where it was refused before. */
void kvf_guests_part(kvf_guests *guests, uint64_t route, uint64_t now);
/** Whether it was. */
bool kvf_guests_is_parting(const kvf_guests *guests, uint64_t route);
/** Whether it was, and was known until then: much of what it was asked for, or asked, may be on its way. */
bool kvf_guests_was_met(const kvf_guests *guests, uint64_t route);

/** Whether a route is of one that is listed. */
bool kvf_guests_has(const kvf_guests *guests, uint64_t route);

/** Lets strangers go that have been silent for too long, a bounded number. */
void kvf_guests_tick(kvf_guests *guests, uint64_t now);
/** When that is to be called; UINT64_MAX: not before something happens. */
uint64_t kvf_guests_due(const kvf_guests *guests);

void kvf_guests_free(kvf_guests *guests);

#endif
