/*
 * The front: endpoints and peers, and which fabric serves which peer. Operations are in batches.c, memory is in
 * regions.c.
 */
#include "transport/transport.h"

#include <stdio.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/fork.h"
#include "transport/card.h"
#include "transport/front.h"

const char *kvf_transport_name(const kvf_transport *transport) {
    return transport->name;
}

bool kvf_transport_is_closing(const kvf_transport *transport) {
    return transport->closing;
}

bool kvf_transport_is_automatic(const kvf_transport *transport) {
    return transport->automatic;
}

kvf_status kvf_front_check_process(const kvf_transport *transport, const char *what) {
    if (transport->forks == kvf_fork_count())
        return KVF_OK;
    return kvf_fail(KVF_E_INVALID, "%s: the transport belongs to process %ld, which forked this one", what,
                    (long)transport->process);
}

/* ---- opening --------------------------------------------------------------------------------- */

static kvf_status take_name(kvf_transport *transport) {
    char made[32];
    const char *name = transport->options.name;
    if (!name) {
        (void)snprintf(made, sizeof made, "pid-%ld", (long)getpid());
        name = made;
    }
    if (strlen(name) > KVF_CARD_NAME_MAX)
        return kvf_fail(KVF_E_INVALID, "transport name has %zu bytes; allowed: 0 to %d", strlen(name),
                        KVF_CARD_NAME_MAX);
    transport->name = kvf_strdup(name);
    transport->options.name = transport->name;
    return transport->name ? KVF_OK : kvf_nomem("a transport");
}

static kvf_status watch(kvf_transport *transport, int fd) {
    return fd < 0 || transport->event_fd < 0 ? KVF_OK : kvf_watch_add(transport->event_fd, fd, NULL);
}

static kvf_status open_descriptors(kvf_transport *transport) {
    kvf_status status = kvf_watch_open(&transport->event_fd);
    if (!status)
        status = kvf_wake_open(&transport->wake);
    return status ? status : watch(transport, transport->wake.fd);
}

kvf_status kvf_transport_set_region_user(kvf_transport *transport, const kvf_region_user *user) {
    if (user && transport->user.settle)
        return kvf_fail(KVF_E_EXISTS, "another stage of this transport has workers or a device already");
    if (transport->user.settle && transport->user.fd >= 0 &&
        transport->forks == kvf_fork_count()) /* a child shares the epoll */
        (void)epoll_ctl(transport->event_fd, EPOLL_CTL_DEL, transport->user.fd, NULL);
    kvf_status status = user ? watch(transport, user->fd) : KVF_OK;
    transport->user = user && !status ? *user : (kvf_region_user){0};
    return status;
}

/* With "auto", a fabric that does not work here is left out. */
static kvf_status open_fabric(kvf_transport *transport, const kvf_fabric *fabric) {
    kvf_front_fabric opened = {.fabric = fabric, .runs = true};
    kvf_status status = kvf_fabric_check(fabric);
    if (status)
        return status;
    kvf_front_fabric *grown = kvf_resize(transport->fabrics, transport->fabric_count + 1, sizeof *grown);
    if (!grown)
        return kvf_nomem("a transport");
    transport->fabrics = grown;
    status = fabric->open(transport, &transport->options, &opened.endpoint);
    if (status == KVF_E_UNSUPPORTED && transport->automatic)
        return kvf_front_note_absent(transport, fabric);
    if (status)
        return kvf_fail_in(status, "%s: ", fabric->kind.name);
    transport->fabrics[transport->fabric_count++] = opened;
    return fabric->unwatched ? KVF_OK : watch(transport, fabric->event_fd(opened.endpoint));
}

static kvf_status open_fabrics(kvf_transport *transport, const kvf_fabric *in_front, const char *kind) {
    kvf_status status = kvf_front_check_settings(&transport->options, in_front);
    if (!status && !in_front && !transport->automatic)
        status = kvf_front_check_kind(kind);
    if (!status && in_front)
        status = open_fabric(transport, in_front);
    const kvf_fabric *fabric;
    for (uint32_t i = 0; !in_front && !status && (fabric = kvf_fabric_at(i)); i++)
        if (transport->automatic || strcmp(kind, fabric->kind.name) == 0)
            status = open_fabric(transport, fabric);
    if (!status && transport->fabric_count == 0)
        return kvf_fail_in(KVF_E_UNSUPPORTED, "no transport works here; the last one: ");
    return status;
}

kvf_status kvf_transport_open(const char *kind, const kvf_transport_options *options, kvf_transport **out) {
    return kvf_transport_open_over(NULL, kind, options, out);
}

kvf_status kvf_transport_open_over(const kvf_fabric *in_front, const char *kind,
                                   const kvf_transport_options *options, kvf_transport **out) {
    if (!out)
        return kvf_fail(KVF_E_INVALID, "transport: out is NULL");
    kvf_transport *transport = kvf_alloc0(1, sizeof *transport);
    if (!transport)
        return kvf_nomem("a transport");
    transport->event_fd = transport->wake.fd = -1;
    transport->process = getpid();
    transport->forks = kvf_fork_count();
    kind = kind ? kind : "auto";
    transport->automatic = strcmp(kind, "auto") == 0;
    kvf_status status =
        kvf_take_options(&transport->options, sizeof transport->options, options, "kvf_transport_options");
    if (!status)
        status = take_name(transport);
    if (!status && !(in_front && in_front->unwatched))
        status = open_descriptors(transport);
    if (!status)
        status = open_fabrics(transport, in_front, kind);
    transport->options.settings = NULL; /* the caller's: read while opening */
    transport->options.setting_count = 0;
    if (status) {
        kvf_transport_close(transport);
        return status;
    }
    *out = transport;
    return KVF_OK;
}

/* ---- the card -------------------------------------------------------------------------------- */

/* `parts` holds the fabrics' bytes one after the other. */
static kvf_status write_card(kvf_transport *transport, kvf_card *card, kvf_buffer *parts, kvf_buffer *out) {
    for (uint32_t i = 0; i < transport->fabric_count; i++) {
        kvf_front_fabric *front = &transport->fabrics[i];
        if (front->disabled)
            continue;
        kvf_card_part *part = &card->parts[card->part_count++];
        size_t begin = parts->length;
        kvf_status status = front->fabric->card(front->endpoint, parts);
        if (status)
            return kvf_fail_in(status, "export: %s: ", front->fabric->kind.name);
        (void)snprintf(part->kind, sizeof part->kind, "%s", front->fabric->kind.name);
        part->bytes = parts->length - begin;
        front->was_offered = true;
        if (part->bytes == 0) /* no peer can connect by this fabric */
            card->part_count--;
    }
    for (uint32_t i = 0, begin = 0; i < card->part_count; begin += (uint32_t)card->parts[i++].bytes)
        card->parts[i].data = parts->data + begin;
    return kvf_card_write(card, out);
}

static kvf_status make_card(kvf_transport *transport) {
    kvf_card card = {0};
    kvf_buffer parts = {0}, out = {0};
    card.region_count = transport->region_count;
    card.generation = transport->generation;
    card.region_bytes = kvf_alloc(card.region_count, sizeof *card.region_bytes);
    card.region_withheld = kvf_alloc(card.region_count, sizeof *card.region_withheld);
    card.region_on_device = kvf_alloc(card.region_count, sizeof *card.region_on_device);
    card.region_device_arena = kvf_alloc(card.region_count, sizeof *card.region_device_arena);
    card.parts = kvf_alloc0(transport->fabric_count, sizeof *card.parts);
    if (!card.region_bytes || !card.region_withheld || !card.region_on_device || !card.region_device_arena ||
        !card.parts) {
        kvf_card_free(&card);
        return kvf_nomem("a card");
    }
    for (uint32_t i = 0; i < card.region_count; i++) {
        card.region_bytes[i] = transport->served[i].bytes;
        card.region_withheld[i] = transport->regions[i].withheld;
        const bool on_device = transport->served[i].kind != KVF_MEMORY_HOST;
        card.region_on_device[i] = on_device && !transport->arenas[i];
        card.region_device_arena[i] = on_device && transport->arenas[i];
    }
    (void)snprintf(card.name, sizeof card.name, "%s", transport->name);
    kvf_status status = write_card(transport, &card, &parts, &out);
    if (status)
        kvf_buffer_free(&out);
    else
        transport->card = out;
    kvf_buffer_free(&parts);
    kvf_card_free(&card);
    return status;
}

kvf_status kvf_transport_export(kvf_transport *transport, const void **card, size_t *bytes) {
    if (!transport || !card || !bytes)
        return kvf_fail(KVF_E_INVALID, "export: %s is NULL",
                        !transport ? "transport"
                        : !card    ? "card"
                                   : "bytes");
    kvf_status status = kvf_front_check_process(transport, "export");
    if (!status && !transport->card.data)
        status = make_card(transport);
    if (status)
        return status;
    *card = transport->card.data;
    *bytes = transport->card.length;
    return KVF_OK;
}

/* ---- peers ----------------------------------------------------------------------------------- */

static kvf_status nothing_in_common(const kvf_transport *transport, const kvf_card *card, kvf_status status,
                                    const char *why) {
    kvf_text ours = {0}, theirs = {0};
    for (uint32_t i = 0; i < transport->fabric_count; i++)
        if (!transport->fabrics[i].disabled)
            kvf_text_add(&ours, "%s%s", ours.data ? " " : "", transport->fabrics[i].fabric->kind.name);
    for (uint32_t i = 0; i < card->part_count; i++)
        kvf_text_add(&theirs, "%s%s", theirs.data ? " " : "", card->parts[i].kind);
    (void)kvf_fail(status, "connect: no way from %s (%s) to %s (%s)%s%s", transport->name,
                   ours.data ? ours.data : "none", card->name, theirs.data ? theirs.data : "none",
                   *why ? ": " : "", why);
    kvf_text_free(&ours);
    kvf_text_free(&theirs);
    return status;
}

/* Adds why a fabric cannot serve a peer. */
static void note_refusal(char *why, size_t size, const char *kind, const char *detail) {
    size_t used = strlen(why);
    (void)snprintf(why + used, size - used, "%s%s: %s", used ? "; " : "", kind, detail);
}

static bool is_any(const bool *of, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (of[i])
            return true;
    return false;
}

static bool takes(const kvf_fabric *fabric, kvf_memory_kind kind) {
    return fabric->kind.memory_kinds & 1u << kind;
}

/* Whether a fabric moves runs between our memory and all that a card shows, but for arenas. */
static bool moves_runs(const kvf_front_fabric *front, const kvf_card *card) {
    return front->runs &&
           (takes(front->fabric, KVF_MEMORY_CUDA) || !is_any(card->region_on_device, card->region_count));
}

/* In which kinds of memory a peer may have arenas that a fabric moves, as bits. A card does not tell the arena of the host
 * from other memory of the host that it shows; but if that belongs to a stage, the stage has such an arena. */
static uint32_t arenas_of(const kvf_card *card, const kvf_fabric *fabric) {
    uint32_t kinds = 0;
    for (uint32_t i = 0; i < card->region_count; i++) {
        if (card->region_device_arena[i])
            kinds |= 1u << KVF_MEMORY_CUDA;
        else if (card->region_bytes[i] > 0 && !card->region_on_device[i])
            kinds |= 1u << KVF_MEMORY_HOST;
    }
    return kinds & fabric->kind.memory_kinds;
}

/* Shows a fabric the regions of a card that it moves. */
static void show_regions(kvf_peer *peer, const kvf_card *card, const kvf_fabric *fabric, bool packed_only) {
    peer->packed_only = packed_only;
    peer->arena_kinds = arenas_of(card, fabric);
    for (uint32_t i = 0; i < card->region_count; i++) {
        const kvf_memory_kind kind =
            card->region_on_device[i] || card->region_device_arena[i] ? KVF_MEMORY_CUDA : KVF_MEMORY_HOST;
        const bool hidden = (packed_only && card->region_on_device[i]) || !takes(fabric, kind);
        peer->region_bytes[i] = hidden ? 0 : card->region_bytes[i];
        peer->region_withheld[i] = card->region_withheld[i] || (hidden && packed_only);
        peer->region_device_arena[i] = card->region_device_arena[i];
    }
}

/* What was tried for a peer. */
typedef struct attempts {
    const kvf_connect_hints *hints;
    kvf_status refusal;
    char why[256], noteworthy[256];
} attempts;

/* Whether a fabric may serve a peer, by runs, or otherwise packed. After it was refused by runs, it is tried packed
 * only where it is shown fewer regions then. */
static bool may_serve(const kvf_front_fabric *front, const kvf_card *card, bool packed_only) {
    const bool runs = moves_runs(front, card);
    const bool packs = front->arena_kinds && arenas_of(card, front->fabric);
    return packed_only ? packs && (!runs || is_any(card->region_on_device, card->region_count)) : runs;
}

/* Tries one fabric. False: it cannot serve the peer, and others may. */
static bool try_fabric(kvf_transport *transport, uint32_t number, const kvf_card *card, bool packed_only,
                       kvf_peer *peer, attempts *tried, kvf_status *status) {
    const kvf_front_fabric *front = &transport->fabrics[number];
    const kvf_fabric *fabric = front->fabric;
    const kvf_card_part *part = kvf_card_part_of(card, fabric->kind.name);
    const bool past = tried->hints->past && strcmp(fabric->kind.name, tried->hints->past) == 0;
    if (!part || past || !may_serve(front, card, packed_only))
        return false;
    show_regions(peer, card, fabric, packed_only);
    *status = fabric->connect(front->endpoint, part->data, part->bytes, peer, &peer->link);
    if (!*status) {
        peer->fabric = fabric;
        peer->fabric_number = number;
        peer->passed_over = kvf_strdup(tried->noteworthy);
        return true;
    }
    if (*status != KVF_E_UNSUPPORTED && *status != KVF_E_PERMISSION) {
        *status = kvf_fail_in(*status, "connect: %s: ", fabric->kind.name);
        return true;
    }
    tried->refusal = *status == KVF_E_PERMISSION ? *status : tried->refusal;
    note_refusal(tried->why, sizeof tried->why, fabric->kind.name, kvf_error_detail());
    if (fabric->kind.reach != KVF_REACH_PROCESS) /* engines are separate processes */
        note_refusal(tried->noteworthy, sizeof tried->noteworthy, fabric->kind.name, kvf_error_detail());
    return false;
}

/*
 * Tries the fabrics both sides have, best first: those that move runs between the memory of the two, and then those
 * that move only arenas. A fabric that lacks permission is skipped like one that does not work, as long as another
 * works.
 */
static kvf_status choose(kvf_transport *transport, const kvf_card *card, const kvf_connect_hints *hints,
                         kvf_peer *peer) {
    attempts tried = {.hints = hints, .refusal = KVF_E_UNSUPPORTED};
    kvf_status status = KVF_OK;
    if (hints->past) {
        const char *why = hints->past_why ? hints->past_why : "";
        note_refusal(tried.why, sizeof tried.why, hints->past, why);
        note_refusal(tried.noteworthy, sizeof tried.noteworthy, hints->past, why);
    }
    for (int packed_only = 0; packed_only < 2; packed_only++)
        for (uint32_t i = 0; i < transport->fabric_count; i++)
            if (try_fabric(transport, i, card, packed_only, peer, &tried, &status))
                return status;
    return nothing_in_common(transport, card, tried.refusal, tried.why);
}

static void free_peer(kvf_peer *peer) {
    if (!peer)
        return;
    kvf_free(peer->region_bytes);
    kvf_free(peer->region_withheld);
    kvf_free(peer->region_device_arena);
    kvf_free(peer->card);
    kvf_free(peer->name);
    kvf_free(peer->passed_over);
    kvf_free(peer);
}

kvf_status kvf_transport_connect(kvf_transport *transport, const void *card, size_t bytes, kvf_peer **out) {
    return kvf_transport_connect_knowing(transport, card, bytes, &(kvf_connect_hints){0}, out);
}

kvf_status kvf_transport_connect_knowing(kvf_transport *transport, const void *card, size_t bytes,
                                         const kvf_connect_hints *hints, kvf_peer **out) {
    if (!transport || !card || !out)
        return kvf_fail(KVF_E_INVALID, "connect: %s is NULL",
                        !transport ? "transport"
                        : !card    ? "card"
                                   : "out");
    kvf_card read = {0};
    kvf_status status = kvf_front_check_process(transport, "connect");
    if (status)
        return status;
    status = kvf_card_read(card, bytes, &read);
    if (status)
        return kvf_fail_in(status, "connect: ");
    kvf_peer *peer = kvf_alloc0(1, sizeof *peer);
    if (peer) {
        peer->transport = transport;
        peer->name = kvf_strdup(read.name);
        peer->card = kvf_copy(card, bytes, 1);
        peer->card_bytes = bytes;
        peer->region_count = read.region_count;
        peer->region_bytes = kvf_alloc0(read.region_count, sizeof *peer->region_bytes);
        peer->region_withheld = kvf_alloc0(read.region_count, sizeof *peer->region_withheld);
        peer->region_device_arena = kvf_alloc0(read.region_count, sizeof *peer->region_device_arena);
        peer->generation = read.generation;
        peer->only_written = hints->only_written;
    }
    const bool made = peer && peer->name && peer->card && peer->region_bytes && peer->region_withheld &&
                      peer->region_device_arena;
    status = made ? choose(transport, &read, hints, peer) : kvf_nomem("a peer");
    kvf_card_free(&read);
    if (status) {
        free_peer(peer);
        return status;
    }
    KVF_LIST_ADD(transport->peers, peer);
    *out = peer;
    return KVF_OK;
}

const char *kvf_peer_kind(const kvf_peer *peer) {
    return peer ? peer->fabric->kind.name : "";
}

kvf_status kvf_peer_get_info(const kvf_peer *peer, kvf_peer_info *out) {
    if (!peer)
        return kvf_fail(KVF_E_INVALID, "peer: peer is NULL");
    kvf_status status = kvf_front_check_process(peer->transport, "peer");
    if (!status)
        status = kvf_check_out(out, "kvf_peer_info");
    if (status)
        return status;
    const kvf_fabric *fabric = peer->fabric;
    kvf_peer_info info = {.bytes_read = peer->moved[KVF_READ], .bytes_written = peer->moved[KVF_WRITE]};
    (void)snprintf(info.kind, sizeof info.kind, "%s", fabric->kind.name);
    (void)snprintf(info.way, sizeof info.way, "%s",
                   fabric->way && !peer->lost ? fabric->way(peer->link) : "");
    (void)snprintf(info.passed_over, sizeof info.passed_over, "%s",
                   peer->passed_over ? peer->passed_over : "");
    kvf_fill_out(out, &info, sizeof info);
    return KVF_OK;
}

kvf_status kvf_transport_get_info(const kvf_transport *transport, kvf_transport_info *out) {
    if (!transport)
        return kvf_fail(KVF_E_INVALID, "transport: transport is NULL");
    kvf_status status = kvf_front_check_process(transport, "transport");
    if (!status)
        status = kvf_check_out(out, "kvf_transport_info");
    if (status)
        return status;
    kvf_transport_info info = {0};
    for (uint32_t i = 0; i < transport->fabric_count; i++)
        if (transport->fabrics[i].fabric->count)
            transport->fabrics[i].fabric->count(transport->fabrics[i].endpoint, &info);
    kvf_fill_out(out, &info, sizeof info);
    return KVF_OK;
}

const char *kvf_peer_name(const kvf_peer *peer) {
    return peer->name;
}

const void *kvf_peer_card(const kvf_peer *peer, size_t *bytes) {
    *bytes = peer->card_bytes;
    return peer->card;
}

kvf_transport *kvf_peer_transport(const kvf_peer *peer) {
    return peer->transport;
}

void kvf_transport_withhold_emulated(kvf_transport *transport, bool withhold) {
    transport->withholds_emulated = withhold;
    transport->packs_emulated = transport->packs_emulated || withhold;
}

bool kvf_transport_withholds_emulated(const kvf_transport *transport) {
    return transport->withholds_emulated;
}

bool kvf_transport_packs_emulated(const kvf_transport *transport) {
    return transport->packs_emulated;
}

bool kvf_peer_withholds(const kvf_peer *peer) {
    return peer->packed_only || is_any(peer->region_withheld, peer->region_count) ||
           (peer->fabric->withholds && peer->fabric->withholds(peer->link));
}

const char *kvf_peer_refusal(const kvf_peer *peer) {
    return peer->fabric->refusal ? peer->fabric->refusal(peer->link) : NULL;
}

bool kvf_peer_is_behind(const kvf_peer *peer) {
    return !peer->lost && peer->fabric->is_behind && peer->fabric->is_behind(peer->link);
}

const char *kvf_peer_waiting(const kvf_peer *peer) {
    return peer->waits[0] && !peer->lost ? peer->waits : NULL;
}

uint64_t kvf_transport_waits(const kvf_transport *transport) {
    return transport->waits;
}

kvf_arena_kinds kvf_peer_arenas(const kvf_peer *peer) {
    return (kvf_arena_kinds){.ours = peer->transport->fabrics[peer->fabric_number].arena_kinds,
                             .theirs = peer->arena_kinds};
}

bool kvf_card_withholds(const void *data, size_t bytes) {
    kvf_card card;
    if (kvf_card_read(data, bytes, &card))
        return false;
    const bool some =
        is_any(card.region_withheld, card.region_count) || is_any(card.region_on_device, card.region_count);
    kvf_card_free(&card);
    return some;
}

kvf_reach kvf_peer_reach(const kvf_peer *peer) {
    return peer->fabric->kind.reach;
}

bool kvf_transport_is_near(const kvf_transport *transport) {
    for (uint32_t i = 0; i < transport->fabric_count; i++)
        if (!transport->fabrics[i].disabled && transport->fabrics[i].fabric->kind.reach == KVF_REACH_HOST)
            return true;
    return false;
}

static bool is_apart(const kvf_peer *peer) {
    return peer->fabric->is_apart && peer->fabric->is_apart(peer->link);
}

const char *kvf_peer_costs(const kvf_peer *peer, kvf_cost_model *out) {
    const kvf_fabric *fabric = peer->fabric;
    const bool apart = is_apart(peer);
    const char *name = apart ? fabric->apart.name : fabric->kind.name;
    if (strcmp(kvf_cost_assumed(name, out), name) != 0)
        *out = apart ? fabric->apart.cost : fabric->kind.cost; /* it is not a fabric of this build */
    return name;
}

bool kvf_peer_is_brought(const kvf_peer *peer) {
    return is_apart(peer) && peer->fabric->kind.reach == KVF_REACH_HOST;
}

bool kvf_peer_place(const kvf_peer *peer, unsigned char out[KVF_PLACE_BYTES]) {
    static const unsigned char unknown[KVF_PLACE_BYTES];
    if (!peer->fabric->place)
        return peer->fabric->kind.reach != KVF_REACH_NETWORK && kvf_host_place(out);
    memcpy(out, peer->fabric->place(peer->link), KVF_PLACE_BYTES);
    return memcmp(out, unknown, sizeof unknown) != 0;
}

uint64_t kvf_peer_generation(const kvf_peer *peer) {
    return peer->generation;
}

bool kvf_peer_only_written(const kvf_peer *peer) {
    return peer->only_written;
}

const uint64_t *kvf_peer_region_bytes(const kvf_peer *peer, uint32_t *count) {
    if (count)
        *count = peer ? peer->region_count : 0;
    return peer ? peer->region_bytes : NULL;
}

/* The peer's arena on a device may be served by another fabric only. Then the one on the host will do. */
static void do_without_arena(kvf_peer *peer, uint32_t region) {
    if (!peer->region_device_arena[region] || !(peer->arena_kinds & 1u << KVF_MEMORY_HOST))
        return;
    peer->region_bytes[region] = 0;
    peer->arena_kinds = 1u << KVF_MEMORY_HOST;
}

kvf_status kvf_peer_check_regions(kvf_peer *peer, uint32_t count, const uint64_t *bytes, size_t stride) {
    if (count != peer->region_count)
        return kvf_fail(KVF_E_PARSE, "its part of the card has %u regions, the card %u", count,
                        peer->region_count);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t here;
        memcpy(&here, (const char *)bytes + i * stride, sizeof here);
        if (peer->packed_only && peer->region_bytes[i] == 0)
            continue; /* it is not shown to this fabric */
        if (here == 0)
            do_without_arena(peer, i);
        if (here == 0 && peer->region_bytes[i] > 0)
            return kvf_fail(KVF_E_UNSUPPORTED, "the peer does not serve its region %u this way", i);
        if (here != peer->region_bytes[i])
            return kvf_fail(KVF_E_PARSE,
                            "region %u has %llu bytes in its part of the card and %llu in the card", i,
                            (unsigned long long)here, (unsigned long long)peer->region_bytes[i]);
    }
    return KVF_OK;
}

/* None of them submits more. */
static void leave_users(kvf_peer *peer) {
    for (kvf_front_user *user; (user = peer->users);) {
        KVF_LIST_REMOVE(peer->users, user);
        user->closed(user->context);
    }
}

static bool is_quiet(const kvf_peer *peer) {
    return peer->lost || !peer->fabric->quiet || peer->fabric->quiet(peer->link);
}

void kvf_peer_part(kvf_peer *peer) {
    if (is_quiet(peer)) {
        kvf_peer_close(peer);
        return;
    }
    peer->parting = true;
    peer->transport->parting++;
    leave_users(peer);
    for (kvf_batch *batch = peer->batches.first, *following; batch; batch = following) {
        following = batch->following;
        (void)kvf_transport_cancel(peer->transport, batch->operation);
    }
}

/* From the start each time: the callbacks of a peer's batches may close others. Mostly none parts, and there may be
 * thousands. */
static void close_parted(kvf_transport *transport) {
    for (kvf_peer *peer = transport->parting ? transport->peers : NULL; peer;) {
        const bool closes = peer->parting && is_quiet(peer);
        if (closes)
            kvf_peer_close(peer);
        peer = closes ? transport->peers : peer->following;
    }
}

void kvf_peer_close(kvf_peer *peer) {
    if (!peer || peer->closing || peer->transport->forks != kvf_fork_count())
        return;
    kvf_transport *transport = peer->transport;
    peer->closing = true;
    peer->fabric->disconnect(peer->link);
    kvf_front_end_batches(peer, KVF_E_CANCELLED, "the connection was closed");
    kvf_front_dispatch_peer(transport, peer);
    leave_users(peer);
    if (peer->lost_untold)
        transport->lost_untold--;
    if (peer->parting)
        transport->parting--;
    KVF_LIST_REMOVE(transport->peers, peer);
    free_peer(peer);
    kvf_front_update_wake(transport);
}

/* ---- progress -------------------------------------------------------------------------------- */

void kvf_transport_hurry(kvf_transport *transport) {
    atomic_store_explicit(&transport->hurried, true, memory_order_relaxed);
}

bool kvf_transport_hurried(const kvf_transport *transport) {
    return atomic_load_explicit(&transport->hurried, memory_order_relaxed);
}

kvf_status kvf_transport_progress(kvf_transport *transport, bool *busy) {
    bool more = false;
    if (busy)
        *busy = false;
    if (!transport || transport->calling > 0)
        return kvf_fail(KVF_E_INVALID, "progress: %s",
                        transport ? "called from one of its own callbacks" : "transport is NULL");
    kvf_status status = kvf_front_check_process(transport, "progress");
    if (status)
        return status;
    transport->calling++;
    for (uint32_t i = 0; i < transport->fabric_count; i++) {
        const kvf_front_fabric *front = &transport->fabrics[i];
        bool fabric_busy = false;
        kvf_status failed = front->fabric->progress(front->endpoint, &fabric_busy);
        more = more || fabric_busy;
        if (failed && !status)
            status = kvf_fail_in(failed, "progress: %s: ", front->fabric->kind.name);
    }
    close_parted(transport);
    kvf_front_dispatch(transport);
    kvf_front_update_wake(transport);
    transport->calling--;
    atomic_store_explicit(&transport->hurried, false, memory_order_relaxed);
    if (busy)
        *busy = more || transport->wake.on;
    return status;
}

int kvf_transport_event_fd(kvf_transport *transport) {
    return transport ? transport->event_fd : -1;
}

/* ---- closing --------------------------------------------------------------------------------- */

/* A fabric whose memory others have registered, and from which peers may still copy, is closed after all others. */
static void close_fabrics(kvf_transport *transport) {
    for (int owners = 0; owners < 2; owners++)
        for (uint32_t i = 0; i < transport->fabric_count; i++) {
            const kvf_front_fabric *front = &transport->fabrics[i];
            if (front->owns_memory == owners) {
                front->fabric->close(front->endpoint);
                kvf_free(front->served);
                kvf_free(front->holds);
            }
        }
    kvf_free(transport->fabrics);
}

void kvf_transport_close(kvf_transport *transport) {
    if (!transport || transport->forks != kvf_fork_count())
        return; /* in a child of fork(), connections and shared memory belong to the parent */
    transport->closing = true;
    while (transport->peers)
        kvf_peer_close(transport->peers);
    close_fabrics(transport);
    kvf_wake_close(&transport->wake);
    kvf_fd_close(&transport->event_fd);
    kvf_front_free_batches(transport);
    kvf_buffer_free(&transport->card);
    kvf_front_free_memory(transport);
    kvf_front_free_absent(transport);
    kvf_free(transport->name);
    kvf_free(transport);
}
