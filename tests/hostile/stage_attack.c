/*
 * Attacks a pair of stages as a peer that has the card and has joined: stage_attack ATTACK CARD SECONDS [SECRET]
 *
 *   opens      openings of 8 MiB of which only the first part comes
 *   giants     openings that come whole, with selections and tables as long as one may be
 *   holds      flows that are opened well; their slots are kept for ever
 *   abandons   flows that are opened well, by an endpoint that then disappears, again and again
 *   invents    slots, credits, ends and acceptances of unknown flows, and of a known one
 *   garbage    notifications that begin as a stage's do, then random bytes
 *   silent     flows that are opened well, by an endpoint that then takes no messages
 *
 * Ends with a line of JSON: how much it has done. None of it may harm the pair.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "stage/message.h"
#include "stage/stream.h"
#include "stage_pair.h"

#define CARD_BYTES 4096u
#define NAMES_MAX 32u

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if (call) {                                                                                          \
            (void)fprintf(stderr, "stage_attack: %s\n", kvf_error_detail());                                 \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

typedef struct attack {
    stage_pair pair;
    kvf_selection *selection; /* of a request that the attacker is allowed to make */
    content_table table;
    uint64_t bytes; /* of the selection's stream */
    kvf_transport *transport;
    content_rank rank;
    kvf_peer *victim;
    const char *card, *secret;
    kvf_slot_note lent; /* the last one that the victim lent */
    uint64_t lent_to;   /* the flow that it was lent for */
    uint64_t flow, end_ns, done, random;
} attack;

static uint64_t draw(attack *a, uint64_t below) {
    a->random = a->random * 6364136223846793005u + 1442695040888963407u;
    return (a->random >> 33) % below;
}

static bool goes_on(const attack *a) {
    return stage_pair_now() < a->end_ns;
}

static void on_notify(void *context, kvf_transport *transport, const char *sender, const void *data,
                      size_t bytes) {
    attack *a = context;
    kvf_stage_message message = {0};
    (void)transport;
    (void)sender;
    if (kvf_stage_is_message(data, bytes) && !kvf_stage_read_message(data, bytes, &message) &&
        message.word == KVF_STAGE_LEND) {
        a->lent = message.slots[0];
        a->lent_to = message.flow;
    }
}

static void on_peer_lost(void *context, kvf_transport *transport, kvf_peer *peer, const char *detail) {
    attack *a = context;
    (void)transport;
    (void)detail;
    if (a->victim == peer)
        a->victim = NULL;
    kvf_peer_close(peer);
}

static void pause_for(unsigned ms) {
    const struct timespec some = {0, (long)ms * 1000000};
    (void)nanosleep(&some, NULL);
}

/* Sends a notification, and retries until the peer takes it or time is over; false: it was not sent. */
static bool say(attack *a, const void *data, size_t bytes) {
    kvf_status status = KVF_E_AGAIN;
    while (a->victim && goes_on(a) &&
           (status = kvf_transport_notify(a->victim, data, bytes)) == KVF_E_AGAIN) {
        bool busy = false;
        TRY(kvf_transport_progress(a->transport, &busy));
        if (!busy)
            pause_for(1);
    }
    a->done += status == KVF_OK;
    return status == KVF_OK;
}

static void progress(attack *a, int rounds) {
    for (int i = 0; i < rounds && goes_on(a); i++) {
        TRY(kvf_transport_progress(a->transport, NULL));
        pause_for(1);
    }
}

/* Opens an endpoint with a new name, and lets the victim join it. */
static void arrive(attack *a) {
    char name[NAMES_MAX];
    unsigned char card[CARD_BYTES];
    (void)snprintf(name, sizeof name, "attacker-%d-%u", (int)getpid(), (unsigned)draw(a, 1u << 30));
    const size_t bytes = stage_pair_read_card(a->card, card, sizeof card);
    TRY(stage_pair_transport(name, a->secret, a, &a->transport, on_notify, on_peer_lost));
    TRY(stage_pair_register(a->transport, kvf_engine_shard(a->pair.reader, 0), &a->rank));
    TRY(kvf_transport_connect(a->transport, card, bytes, &a->victim));
    while (goes_on(a) && a->victim && stage_pair_introduce(a->transport, a->victim) == KVF_E_AGAIN)
        progress(a, 1);
    progress(a, 50);
}

static void leave(attack *a) {
    kvf_transport_close(a->transport);
    a->transport = NULL;
    a->victim = NULL;
}

static bool say_word(attack *a, const kvf_stage_message *message) {
    unsigned char data[KVF_STAGE_MESSAGE_MAX];
    return say(a, data, kvf_stage_write_message(message, data));
}

/* Sends an opening in all its parts. */
static void open_with(attack *a, const unsigned char *data, size_t bytes) {
    kvf_stage_message message = {.word = KVF_STAGE_OPEN, .flow = ++a->flow, .opening_bytes = (uint32_t)bytes};
    bool said = true;
    for (size_t at = 0; at < bytes && said; at += message.part_bytes) {
        message.at = (uint32_t)at;
        message.part = data + at;
        message.part_bytes = bytes - at < kvf_stage_part_max() ? bytes - at : kvf_stage_part_max();
        said = say_word(a, &message);
    }
}

static kvf_opening opening_of(const attack *a, kvf_direction direction, kvf_group_steps *steps) {
    *steps = (kvf_group_steps){{a->table.ids, a->table.count, 0}, 0, STAGE_PAIR_TOKENS};
    return (kvf_opening){.direction = direction,
                         .priority = 255,
                         .window = KVF_STAGE_SLOTS_MAX,
                         .slot_bytes = 1u << 15,
                         .stream_bytes = a->bytes,
                         .model = kvf_stage_model_sum(a->pair.model),
                         .items = a->selection->items,
                         .item_count = a->selection->item_count,
                         .groups = steps,
                         .group_count = 1};
}

static void open_well(attack *a, kvf_direction direction) {
    kvf_group_steps steps;
    const kvf_opening opening = opening_of(a, direction, &steps);
    unsigned char *data;
    size_t bytes;
    TRY(kvf_stage_write_opening(&opening, &data, &bytes));
    open_with(a, data, bytes);
    kvf_free(data);
}

/* ---- attacks ---------------------------------------------------------------------------------- */

static void opens(attack *a) {
    const unsigned char part[2000] = {0};
    const kvf_stage_message message = {.word = KVF_STAGE_OPEN,
                                       .flow = ++a->flow,
                                       .opening_bytes = KVF_STAGE_OPENING_MAX,
                                       .part = part,
                                       .part_bytes = sizeof part};
    (void)say_word(a, &message);
    if (a->flow % 64 == 0) { /* end them, to make room for more */
        kvf_stage_message end = {.word = KVF_STAGE_END, .status = KVF_E_CANCELLED};
        for (end.flow = a->flow - 63; end.flow <= a->flow; end.flow++)
            (void)say_word(a, &end);
    }
}

/* As many items as fit, all equal or all different, or as many blocks as fit. */
static void giants(attack *a) {
    static kvf_stream_item items[KVF_STAGE_OPENING_MAX / 64];
    static uint32_t ids[KVF_STAGE_OPENING_MAX / 4 - 1024];
    kvf_group_steps steps;
    kvf_opening opening = opening_of(a, KVF_READ, &steps);
    const uint64_t which = draw(a, 3);
    if (which < 2) {
        opening.items = items;
        opening.item_count = sizeof items / sizeof *items;
        for (uint32_t i = 0; i < opening.item_count; i++) {
            items[i] = a->selection->items[0];
            if (which == 1)
                items[i].layers = (kvf_range){i % 1000, i % 1000 + 1};
        }
    } else {
        steps.table = (kvf_block_table){ids, sizeof ids / sizeof *ids, 0};
        steps.end = UINT64_MAX / 2;
    }
    unsigned char *data;
    size_t bytes;
    TRY(kvf_stage_write_opening(&opening, &data, &bytes));
    open_with(a, data, bytes);
    kvf_free(data);
    const kvf_stage_message end = {.word = KVF_STAGE_END, .flow = a->flow, .status = KVF_E_CANCELLED};
    (void)say_word(a, &end);
}

static void holds(attack *a) {
    open_well(a, KVF_READ);
    progress(a, 20);
}

static void abandons(attack *a) {
    for (int i = 0; i < 6; i++)
        open_well(a, KVF_READ);
    progress(a, 30);
    leave(a);
    arrive(a);
}

static void invents(attack *a) {
    kvf_stage_message message = {.word = (kvf_stage_word)(KVF_STAGE_ACCEPT + draw(a, 4)),
                                 .flow = draw(a, 3) ? a->lent_to : draw(a, 1u << 30),
                                 .region = (uint32_t)draw(a, 4),
                                 .slot_bytes = (uint32_t)draw(a, 1u << 30),
                                 .slot_count = (uint32_t)draw(a, 1u << 30),
                                 .stream_bytes = draw(a, 1u << 30),
                                 .flows = (uint32_t)draw(a, 4),
                                 .slot_count_named = (uint32_t)(1 + draw(a, KVF_STAGE_SLOTS_MAX)),
                                 .by_lender = draw(a, 2),
                                 .status = draw(a, 2) ? KVF_OK : KVF_E_CANCELLED,
                                 .sentence = "so it is"};
    for (uint32_t i = 0; i < message.slot_count_named; i++) {
        message.slots[i] = a->lent;
        message.slots[i].slot += (uint32_t)draw(a, 3);
        message.slots[i].bytes.begin = draw(a, 2) * draw(a, 1u << 30);
    }
    if (draw(a, 8) == 0)
        open_well(a, KVF_READ); /* never a push: the attacker has the right to write */
    (void)say_word(a, &message);
}

static void garbage(attack *a) {
    unsigned char data[KVF_STAGE_MESSAGE_MAX];
    const size_t bytes = 5 + draw(a, sizeof data - 5);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (unsigned char)draw(a, 256);
    const unsigned char begin[5] = {'k', 'v', 'f', 's', KVF_STAGE_VERSION};
    memcpy(data, begin, sizeof begin);
    if (bytes > 5 && draw(a, 2))
        data[5] = (unsigned char)(1 + draw(a, 5));
    (void)say(a, data, bytes);
}

/* Makes no progress, so that it takes no message. */
static void silent(attack *a) {
    for (int i = 0; i < 40; i++)
        open_well(a, KVF_READ);
    while (goes_on(a))
        pause_for(20);
}

static const struct {
    const char *name;
    void (*attack)(attack *a);
} attacks[] = {{"opens", opens},     {"giants", giants},   {"holds", holds},  {"abandons", abandons},
               {"invents", invents}, {"garbage", garbage}, {"silent", silent}};

/* Prepares the opening that a reader of the owner's first request would send. */
static void prepare(attack *a) {
    kvf_plan *plan = NULL;
    kvf_request *request = NULL;
    content_table own;
    TRY(kvf_plan_build(kvf_engine_shard(a->pair.reader, 0), a->pair.owner, NULL, &plan));
    TRY(kvf_selection_of_plan(plan, 0, &a->selection));
    TRY(kvf_request_create(plan, &request));
    stage_pair_table(kvf_engine_shard(a->pair.owner, 0), 0, &a->table);
    stage_pair_table(kvf_engine_shard(a->pair.reader, 0), 0, &own);
    const kvf_group_request group = {
        {own.ids, own.count, 0}, {a->table.ids, a->table.count, 0}, 0, STAGE_PAIR_TOKENS};
    TRY(kvf_request_set(request, &group, 1));
    a->bytes = kvf_request_bytes(request, 0);
    kvf_request_free(request);
    kvf_plan_free(plan);
}

int main(int argc, char **argv) {
    static attack a;
    if (argc < 4)
        return 2;
    a.card = argv[2];
    a.secret = argc > 4 ? argv[4] : NULL;
    a.random = (uint64_t)getpid();
    a.end_ns = stage_pair_now() + (uint64_t)(strtod(argv[3], NULL) * 1e9);
    stage_pair_open(&a.pair);
    prepare(&a);
    arrive(&a);
    for (size_t i = 0; i < sizeof attacks / sizeof *attacks; i++)
        while (strcmp(attacks[i].name, argv[1]) == 0 && goes_on(&a)) {
            if (!a.victim) { /* the victim has hung up */
                leave(&a);
                arrive(&a);
            }
            attacks[i].attack(&a);
        }
    leave(&a);
    kvf_selection_free(a.selection);
    stage_pair_close(&a.pair);
    (void)printf("{\"done\": %llu}\n", (unsigned long long)a.done);
    return 0;
}
