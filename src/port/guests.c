#include "port/guests.h"

#include <stdio.h>

#include "base/clock.h"

/* The most guests that one call checks. */
#define LOOKED_AT 64u

struct kvf_guest_host {
    char address[KVF_GUEST_ADDRESS_BYTES];
    uint32_t count;
    kvf_guest *present;
    UT_hash_handle hh; /* guests->hosts, by address */
};

/* ---- coming and going ------------------------------------------------------------------------ */

static kvf_guest_host *host_of(kvf_guests *guests, const char *address) {
    kvf_guest_host *host = NULL;
    char cut[KVF_GUEST_ADDRESS_BYTES];
    (void)snprintf(cut, sizeof cut, "%s", address);
    HASH_FIND_STR(guests->hosts, cut, host);
    if (host || !(host = kvf_alloc0(1, sizeof *host)))
        return host;
    memcpy(host->address, cut, sizeof cut);
    HASH_ADD_STR(guests->hosts, address, host);
    if (host->hh.tbl)
        return host;
    kvf_free(host);
    return NULL;
}

static void drop_if_empty(kvf_guests *guests, kvf_guest_host *host) {
    if (host->count > 0)
        return;
    HASH_DEL(guests->hosts, host);
    kvf_free(host);
}

static void list(kvf_guests *guests, kvf_guest *guest) {
    DL_APPEND(guests->present, guest);
    DL_APPEND2(guest->host->present, guest, host_prev, host_next);
}

static void unlist(kvf_guests *guests, kvf_guest *guest) {
    DL_DELETE(guests->present, guest);
    DL_DELETE2(guest->host->present, guest, host_prev, host_next);
}

static void stop_moving(kvf_guests *guests, kvf_guest *guest) {
    if (guest->moves)
        DL_DELETE2(guests->moving, guest, moving_prev, moving_next);
    guest->moves = false;
}

/* The guest no longer counts, but is listed until its owner says that it is gone. */
static void stop_counting(kvf_guests *guests, kvf_guest *guest) {
    if (!guest->host)
        return;
    unlist(guests, guest);
    stop_moving(guests, guest);
    guests->part_bytes -= guest->part_counted;
    guest->part_counted = 0;
    guests->count--;
    guests->known -= guest->known;
    guest->known = false;
    guest->host->count--;
    drop_if_empty(guests, guest->host);
    guest->host = NULL;
}

static void forget_route(kvf_guests *guests, kvf_guest *guest) {
    if (guest->by_route.tbl)
        HASH_DELETE(by_route, guests->by_route, guest);
    memset(&guest->by_route, 0, sizeof guest->by_route);
}

static kvf_guest *find(const kvf_guests *guests, uint64_t id) {
    kvf_guest *guest = NULL;
    HASH_FIND(by_id, guests->by_id, &id, sizeof id, guest);
    return guest;
}

void kvf_guests_leave(kvf_guests *guests, uint64_t id) {
    kvf_guest *guest = find(guests, id);
    if (!guest)
        return;
    if (guest->route && guests->on_left)
        guests->on_left(guests->context, guest->route);
    if (guest->route)
        guests->left[guests->next_left++ % KVF_GUESTS_LEFT] = guest->route;
    stop_counting(guests, guest);
    forget_route(guests, guest);
    HASH_DELETE(by_id, guests->by_id, guest);
    kvf_free(guest);
}

void kvf_guests_free(kvf_guests *guests) {
    while (guests->by_id)
        kvf_guests_leave(guests, guests->by_id->id);
}

/* ---- room ------------------------------------------------------------------------------------ */

static bool is_known(kvf_guests *guests, kvf_guest *guest) {
    const bool known = guest->route && guests->is_known && guests->is_known(guests->context, guest->route);
    guests->known += known - guest->known;
    guest->known = known;
    return known;
}

static void dismiss(kvf_guests *guests, kvf_guest *guest) {
    stop_counting(guests, guest);
    forget_route(guests, guest);
    guest->leaving = true;
    guests->closed++;
    guests->hang_up(guests->owner, guest);
}

/* Guests that stay are checked again after all others. */
static void put_last(kvf_guests *guests, kvf_guest *guest, uint64_t now) {
    unlist(guests, guest);
    list(guests, guest);
    guest->heard_ns = now;
}

typedef enum crowd { CROWD_NONE, CROWD_ADDRESS, CROWD_ALL, CROWD_STRANGERS } crowd;

/* Which limit `newest` has exceeded. */
static crowd crowd_with(const kvf_guests *guests, const kvf_guest *newest) {
    if (guests->most_of_address && newest->host->count > guests->most_of_address)
        return CROWD_ADDRESS;
    if (guests->most && guests->count > guests->most)
        return CROWD_ALL;
    const uint32_t strangers = guests->count - guests->known;
    return guests->most_strangers && strangers > guests->most_strangers ? CROWD_STRANGERS : CROWD_NONE;
}

/* The guest to close: the stranger that has been silent for longest, of all or from the address of `newest`; `newest`
 * itself if no other was found; NULL: so many turned out to be known that there is room. */
static kvf_guest *who_goes(kvf_guests *guests, kvf_guest *newest, crowd why, uint64_t now) {
    for (uint32_t i = 0; i < LOOKED_AT; i++) {
        kvf_guest *first = why == CROWD_ADDRESS ? newest->host->present : guests->present;
        if (first == newest || !is_known(guests, first))
            return first;
        put_last(guests, first, now);
        if (crowd_with(guests, newest) == CROWD_NONE)
            return NULL;
    }
    return newest;
}

static const char *name_of(const char *address) {
    return address[0] ? address : "this machine";
}

static void tell(const kvf_guests *guests, crowd why, const char *address) {
    char detail[KVF_GUEST_ADDRESS_BYTES + 128];
    if (why == CROWD_ADDRESS)
        (void)snprintf(detail, sizeof detail,
                       "over budget: %s has %u connections here, the most allowed from one address",
                       name_of(address), guests->most_of_address);
    else
        (void)snprintf(detail, sizeof detail, "over budget: there are %u connections%s, the most allowed",
                       why == CROWD_ALL ? guests->most : guests->most_strangers,
                       why == CROWD_ALL ? "" : " of strangers");
    if (guests->on_crowded)
        guests->on_crowded(guests->context, detail);
}

static void make_room(kvf_guests *guests, kvf_guest *newest, uint64_t now) {
    const crowd why = crowd_with(guests, newest);
    kvf_guest *goes = why == CROWD_NONE ? NULL : who_goes(guests, newest, why, now);
    if (!goes)
        return;
    char address[KVF_GUEST_ADDRESS_BYTES];
    memcpy(address, newest->host->address, sizeof address);
    guests->refused++;
    dismiss(guests, goes);
    tell(guests, why, address);
}

kvf_status kvf_guests_arrive(kvf_guests *guests, uint64_t id, uint64_t mark, const char *address,
                             uint64_t now) {
    kvf_guests_leave(guests, id); /* its end was not reported */
    kvf_guest *guest = kvf_alloc0(1, sizeof *guest);
    kvf_guest_host *host = guest ? host_of(guests, address) : NULL;
    if (host) {
        *guest = (kvf_guest){.id = id, .mark = mark, .heard_ns = now, .host = host};
        HASH_ADD(by_id, guests->by_id, id, sizeof guest->id, guest);
    }
    if (!host || !guest->by_id.tbl) {
        if (host)
            drop_if_empty(guests, host);
        kvf_free(guest);
        return kvf_nomem("a connection");
    }
    list(guests, guest);
    guests->count++;
    host->count++;
    make_room(guests, guest, now);
    return KVF_OK;
}

/* ---- time ------------------------------------------------------------------------------------ */

static kvf_guest *find_route(const kvf_guests *guests, uint64_t route) {
    kvf_guest *guest = NULL;
    HASH_FIND(by_route, guests->by_route, &route, sizeof route, guest);
    return guest;
}

bool kvf_guests_hear(kvf_guests *guests, uint64_t route, uint64_t now) {
    kvf_guest *guest = find_route(guests, route);
    if (guest)
        put_last(guests, guest, now);
    return kvf_guests_read(guests, route);
}

bool kvf_guests_read(kvf_guests *guests, uint64_t route) {
    kvf_guest *guest = find_route(guests, route);
    if (guest)
        guest->was_read = true;
    return guest != NULL;
}

bool kvf_guests_has(const kvf_guests *guests, uint64_t route) {
    return find_route(guests, route) != NULL;
}

void kvf_guests_dismiss(kvf_guests *guests, uint64_t route) {
    kvf_guest *guest = find_route(guests, route);
    if (guest)
        dismiss(guests, guest);
}

static void mute(kvf_guests *guests, kvf_guest *guest) {
    guest->muted = guests->mute && guests->mute(guests->owner, guest);
    if (guest->muted)
        stop_moving(guests, guest);
    else
        dismiss(guests, guest);
}

void kvf_guests_mute(kvf_guests *guests, uint64_t route) {
    kvf_guest *guest = find_route(guests, route);
    if (guest && !guest->muted)
        mute(guests, guest);
}

bool kvf_guests_is_muted(const kvf_guests *guests, uint64_t route) {
    const kvf_guest *guest = find_route(guests, route);
    return guest && guest->muted;
}

void kvf_guests_part(kvf_guests *guests, uint64_t route, uint64_t now) {
    kvf_guest *guest = find_route(guests, route);
    if (!guest)
        return;
    if (guest->parting) {
        dismiss(guests, guest);
        return;
    }
    guest->parting = true;
    if (guests->narrow)
        guests->narrow(guests->owner, guest);
    guest->met = is_known(guests, guest);
    unlist(guests, guest);
    DL_PREPEND(guests->present, guest);
    DL_PREPEND2(guest->host->present, guest, host_prev, host_next);
    guest->heard_ns = now + KVF_GUEST_PARTING_NS - kvf_min_u64(now, KVF_GUEST_SILENT_NS);
}

bool kvf_guests_is_parting(const kvf_guests *guests, uint64_t route) {
    const kvf_guest *guest = find_route(guests, route);
    return guest && guest->parting;
}

bool kvf_guests_was_met(const kvf_guests *guests, uint64_t route) {
    const kvf_guest *guest = find_route(guests, route);
    return guest && guest->met;
}

static bool has_left(const kvf_guests *guests, uint64_t route) {
    for (uint32_t i = 0; i < KVF_GUESTS_LEFT; i++)
        if (guests->left[i] == route)
            return true;
    return false;
}

void kvf_guests_name(kvf_guests *guests, uint64_t id, uint64_t route, uint64_t now) {
    kvf_guest *guest = find(guests, id);
    if (!guest || guest->leaving || guest->route || has_left(guests, route))
        return; /* the message is from a connection that had this number before, or has it now without our knowledge */
    guest->route = route;
    HASH_ADD(by_route, guests->by_route, route, sizeof guest->route, guest);
    if (!guest->by_route.tbl)
        guest->route = 0; /* no memory: its next message names it */
    guest->was_read = true;
    put_last(guests, guest, now);
}

/* In whole seconds, so that not every message changes it. */
uint64_t kvf_guests_due(const kvf_guests *guests) {
    if (!guests->present)
        return UINT64_MAX;
    uint64_t due = guests->present->heard_ns + KVF_GUEST_SILENT_NS;
    return due + (KVF_SECOND - due % KVF_SECOND) % KVF_SECOND;
}

void kvf_guests_tick(kvf_guests *guests, uint64_t now) {
    for (uint32_t i = 0; i < LOOKED_AT && kvf_guests_due(guests) <= now; i++) {
        kvf_guest *first = guests->present;
        if (is_known(guests, first))
            put_last(guests, first, now);
        else
            dismiss(guests, first);
    }
}

/* ---- messages that are not whole ------------------------------------------------------------- */

void kvf_guests_stir(kvf_guests *guests, uint64_t id) {
    kvf_guest *guest = find(guests, id);
    if (!guest || guest->leaving || guest->muted || guest->moves)
        return;
    guest->moves = true;
    DL_APPEND2(guests->moving, guest, moving_prev, moving_next);
}

kvf_guest *kvf_guests_next_moving(kvf_guests *guests) {
    kvf_guest *guest = guests->moving;
    if (guest) {
        DL_DELETE2(guests->moving, guest, moving_prev, moving_next);
        DL_APPEND2(guests->moving, guest, moving_prev, moving_next);
    }
    return guest;
}

/* ZeroMQ notices that a connection has a message after it has handed out up to a hundred others, and hands out messages
 * of connections that are not listed yet, or not any more. */
void kvf_guests_took(kvf_guests *guests, uint32_t count, bool all) {
    guests->taken += count;
    if (!all && guests->taken < 2 * guests->count + KVF_GUESTS_LEFT)
        return;
    guests->turn++;
    guests->taken = 0;
}

static bool brings_too_much(const kvf_guests *guests, const kvf_guest *guest) {
    const uint64_t part = guest->brought - guest->whole;
    if (guest->known)
        return part > guests->longest + KVF_GUEST_BATCH_BYTES;
    return part > guests->longest_strange + KVF_GUEST_BATCH_BYTES ||
           (part > KVF_GUEST_GREETING_BYTES && guests->part_bytes > KVF_GUESTS_PART_BYTES);
}

/* A stranger that is hung up on comes back at once, with as much; so where there is room for what it has brought, it is
 * muted. */
static void cut_off(kvf_guests *guests, kvf_guest *guest) {
    char detail[KVF_GUEST_ADDRESS_BYTES + 128];
    (void)snprintf(detail, sizeof detail,
                   "over budget: a connection of %s brought %llu bytes of a message without an end",
                   name_of(guest->host->address), (unsigned long long)(guest->brought - guest->whole));
    guests->refused++;
    if (guests->on_cut_off)
        guests->on_cut_off(guests->owner, guest->host->address);
    if (guest->known || guests->part_bytes > KVF_GUESTS_PART_BYTES)
        dismiss(guests, guest);
    else
        mute(guests, guest);
    if (guests->on_crowded)
        guests->on_crowded(guests->context, detail);
}

bool kvf_guests_weigh(kvf_guests *guests, kvf_guest *guest, uint64_t brought) {
    const bool brings = brought > guest->brought;
    guest->brought = kvf_max_u64(guest->brought, brought);
    if (guest->was_read)
        guest->whole = guest->brought;
    guest->was_read = false;
    guests->part_bytes -= guest->part_counted;
    guest->part_counted = is_known(guests, guest) ? 0 : guest->brought - guest->whole;
    guests->part_bytes += guest->part_counted;
    const bool was_suspect = guest->is_suspect;
    guest->is_suspect = brings_too_much(guests, guest);
    if (!guest->is_suspect && !brings)
        stop_moving(guests, guest);
    else if (guest->is_suspect && !was_suspect)
        guest->turn = guests->turn;
    else if (guest->is_suspect && guests->turn - guest->turn >= 2)
        cut_off(guests, guest);
    return guest->moves;
}
