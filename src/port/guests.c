#include "port/guests.h"

#include <stdio.h>

/* Guests that one call looks at, at most. */
#define LOOKED_AT 64u
#define SECOND UINT64_C(1000000000)

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

/* It counts no more, but has its place until its owner says that it is gone. */
static void stop_counting(kvf_guests *guests, kvf_guest *guest) {
    if (!guest->host)
        return;
    unlist(guests, guest);
    guests->count--;
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

static bool is_known(const kvf_guests *guests, const kvf_guest *guest) {
    return guest->route && guests->is_known && guests->is_known(guests->context, guest->route);
}

static void dismiss(kvf_guests *guests, kvf_guest *guest) {
    stop_counting(guests, guest);
    forget_route(guests, guest);
    guest->leaving = true;
    guests->closed++;
    guests->hang_up(guests->owner, guest);
}

/* Those that stay are looked at again when all others were. */
static void put_last(kvf_guests *guests, kvf_guest *guest, uint64_t now) {
    unlist(guests, guest);
    list(guests, guest);
    guest->heard_ns = now;
}

/* The stranger that has been silent for longest, in all or from the address of `newest`; that itself where nobody else
 * was found. */
static kvf_guest *who_goes(kvf_guests *guests, kvf_guest *newest, bool of_address, uint64_t now) {
    for (uint32_t i = 0; i < LOOKED_AT; i++) {
        kvf_guest *first = of_address ? newest->host->present : guests->present;
        if (first == newest || !is_known(guests, first))
            return first;
        put_last(guests, first, now);
    }
    return newest;
}

static void make_room(kvf_guests *guests, kvf_guest *newest, uint64_t now) {
    bool of_address = guests->most_of_address && newest->host->count > guests->most_of_address;
    char detail[KVF_GUEST_ADDRESS_BYTES + 128];
    if (!of_address && (!guests->most || guests->count <= guests->most))
        return;
    if (of_address)
        (void)snprintf(
            detail, sizeof detail, "over budget: %s has %u connections here, the most from one address",
            newest->host->address[0] ? newest->host->address : "this machine", guests->most_of_address);
    else
        (void)snprintf(detail, sizeof detail, "over budget: there are %u connections, the most it takes",
                       guests->most);
    guests->refused++;
    dismiss(guests, who_goes(guests, newest, of_address, now));
    if (guests->on_crowded)
        guests->on_crowded(guests->context, detail);
}

kvf_status kvf_guests_arrive(kvf_guests *guests, uint64_t id, uint64_t mark, const char *address,
                             uint64_t now) {
    kvf_guests_leave(guests, id); /* its end was not told */
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

bool kvf_guests_hear(kvf_guests *guests, uint64_t route, uint64_t now) {
    kvf_guest *guest = NULL;
    HASH_FIND(by_route, guests->by_route, &route, sizeof route, guest);
    if (guest)
        put_last(guests, guest, now);
    return guest != NULL;
}

bool kvf_guests_has(const kvf_guests *guests, uint64_t route) {
    kvf_guest *guest = NULL;
    HASH_FIND(by_route, guests->by_route, &route, sizeof route, guest);
    return guest != NULL;
}

void kvf_guests_name(kvf_guests *guests, uint64_t id, uint64_t route, uint64_t now) {
    kvf_guest *guest = find(guests, id);
    if (!guest || guest->leaving || guest->route)
        return; /* one that had this place before, or has it now, and we have not heard so yet */
    guest->route = route;
    HASH_ADD(by_route, guests->by_route, route, sizeof guest->route, guest);
    put_last(guests, guest, now);
}

/* At whole seconds, so that not each message moves it. */
uint64_t kvf_guests_due(const kvf_guests *guests) {
    if (!guests->present)
        return UINT64_MAX;
    uint64_t due = guests->present->heard_ns + KVF_GUEST_SILENT_NS;
    return due + (SECOND - due % SECOND) % SECOND;
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
