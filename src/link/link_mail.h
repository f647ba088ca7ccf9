/*
 * Letters from connections that others made to us. They wait until it is their sender's turn (base/turns.h).
 *
 * All holders of one key are one party. Without keys, each connection to a known peer is one party, and all strangers
 * together are another, which has a quarter of a turn. Within it the strangers' connections take turns: a peer that
 * comes for the first time, or comes back over a new connection, is read after one letter of each other stranger. So
 * senders that cause much work wait long, and the others do not.
 *
 * Letters use a bounded memory. No party may have more of it than it leaves free for all others, and no stranger more
 * than it leaves free for the other strangers. Further letters are dropped, as if they were lost on the way; their
 * senders repeat them. A party's letters are also dropped if much work of it waits already, where each letter is
 * assumed to cause as much work as the party's last one. So the work that a sender leaves behind is soon done.
 *
 * This is only the policy: it uses no socket.
 */
#ifndef KVF_LINK_MAIL_H
#define KVF_LINK_MAIL_H

#include "link/link.h"

#include "base/tables.h"
#include "base/turns.h"

#include <zmq.h>

#define KVF_MAIL_BYTES (32u << 20) /* of all waiting letters */
#define KVF_MAIL_PARTIES                                                                                     \
    4096u /* known parties, half of them strangers; all further ones together count as one stranger */
/* Work: of a party in its turn, of all parties in a round of progress, and the least of a letter. */
#define KVF_MAIL_TURN_WORK (64u << 10)
#define KVF_MAIL_ROUND_WORK (4u << 20)
#define KVF_MAIL_LETTER_WORK (16u << 10)
/* The most work of one party that may wait; one letter always may. All 4096 ranks of a large engine may greet at once
 * under one key: each such letter causes less than twice the least work of a letter. */
#define KVF_MAIL_WAITING_WORK (128u << 20)

/* Names a party: the 32 bytes of a key; or a route, and whether its peer is known. */
typedef struct kvf_mail_name {
    uint8_t bytes[KVF_KEY_BYTES];
} kvf_mail_name;

typedef struct kvf_mail_party {
    kvf_turn_party turn; /* first */
    kvf_mail_name name;
    bool is_stranger;
    uint64_t bytes;     /* of waiting letters */
    uint64_t work;      /* assumed, of waiting letters */
    uint64_t last_work; /* of the letter that was read last */
    UT_hash_handle hh;
} kvf_mail_party;

/** A letter that waits. */
typedef struct kvf_mail_letter {
    kvf_turn_seat seat; /* first */
    kvf_mail_party *from;
    kvf_route route;
    uint64_t work; /* that was assumed for it */
    bool keyed;
    uint8_t key[KVF_KEY_BYTES];
    zmq_msg_t message;
} kvf_mail_letter;

typedef struct kvf_mail {
    kvf_turns turns;
    kvf_mail_party *parties;      /* by name */
    uint32_t stranger_count;      /* among `parties` */
    kvf_mail_party strangers;     /* all strangers as one party, which waits while one of them does */
    kvf_turn_seat strangers_seat; /* its seat in `turns` */
    kvf_turns strangers_turns;    /* in its turn, strangers take turns here */
    kvf_mail_party crowd;         /* one stranger: all senders beyond KVF_MAIL_PARTIES */
    uint64_t bytes;               /* of all waiting letters */
    uint64_t dropped;             /* letters dropped so far */
} kvf_mail;

void kvf_mail_open(kvf_mail *mail);

/**
 * Adds a letter. Its message is moved out of `message`, which is empty afterwards.
 *
 * @param key    of the sender; NULL: it has none
 * @param known  whether the route belongs to a known peer
 * @return NULL; otherwise a sentence: there was no room, and the letter was dropped
 */
const char *kvf_mail_add(kvf_mail *mail, kvf_route route, const uint8_t *key, bool known, zmq_msg_t *message);

/** Whether any letter waits. */
bool kvf_mail_waits(const kvf_mail *mail);

/** Begins another round of progress, in which one of the parties that owe work may pay a turn. */
void kvf_mail_begin_round(kvf_mail *mail);

/** Takes out the letter whose turn it is, for kvf_mail_read(); NULL: none waits, except of parties that owe in this
 * round. */
kvf_mail_letter *kvf_mail_next(kvf_mail *mail);

/** Counts a letter that was read, with the work that it caused besides the least of a letter, and frees it. Returns the
 * sum of both. */
uint64_t kvf_mail_read(kvf_mail *mail, kvf_mail_letter *letter, uint64_t work);

void kvf_mail_close(kvf_mail *mail);

#endif
