/*
 * Letters that came over connections made to us, and wait until it is their sender's turn (base/turns.h).
 *
 * All who hold one key are one party; without keys, who is met over a connection is one, and all strangers together are
 * another, which has a quarter of a turn. So whoever makes much work waits for it, and those who make little do not.
 *
 * Letters take room, of which no party has more than it leaves for all others. What is beyond is dropped, as if it was
 * lost on its way: who wants an answer asks again. So are letters of a party of which much work waits already, where each
 * is taken for as much as its last one was: what is still to be done when it has gone is soon done.
 *
 * This is the policy alone: it knows no socket.
 */
#ifndef KVF_LINK_MAIL_H
#define KVF_LINK_MAIL_H

#include "link/link.h"

#include "base/tables.h"
#include "base/turns.h"

#include <zmq.h>

#define KVF_MAIL_BYTES (32u << 20) /* of all that waits */
#define KVF_MAIL_PARTIES 4096u     /* that are told apart; further ones count as strangers */
/* Work: what a party may have done in a turn, in a round of progress for all, and for a letter whatever is in it. */
#define KVF_MAIL_TURN_WORK (64u << 10)
#define KVF_MAIL_ROUND_WORK (4u << 20)
#define KVF_MAIL_LETTER_WORK (16u << 10)
#define KVF_MAIL_WAITING_WORK (64u << 20) /* of one party; but one letter may always wait */

typedef struct kvf_mail_party {
    kvf_turn_party turn; /* first */
    uint8_t name[KVF_KEY_BYTES];
    uint64_t bytes;     /* that wait */
    uint64_t work;      /* that waits, as far as can be known */
    uint64_t last_work; /* what the last letter was */
    UT_hash_handle hh;
} kvf_mail_party;

/** A letter that waits. */
typedef struct kvf_mail_letter {
    kvf_turn_seat seat; /* first */
    kvf_route route;
    uint64_t work; /* that it was taken for */
    bool keyed;
    uint8_t key[KVF_KEY_BYTES];
    zmq_msg_t message;
} kvf_mail_letter;

/** Zeroed but for the strangers' turn_work: nothing waits. */
typedef struct kvf_mail {
    kvf_turns turns;
    kvf_mail_party *parties;
    kvf_mail_party strangers;
    uint64_t bytes;   /* that wait */
    uint64_t dropped; /* letters, so far */
} kvf_mail;

void kvf_mail_open(kvf_mail *mail);

/**
 * Takes a letter in; the message is moved, and empty after it.
 *
 * @param key    of the sender; NULL: it has none
 * @param known  whether somebody is met over the route
 * @return NULL; a sentence: there was no room for it, and it was dropped
 */
const char *kvf_mail_add(kvf_mail *mail, kvf_route route, const uint8_t *key, bool known, zmq_msg_t *message);

/** Whether any waits. */
bool kvf_mail_waits(const kvf_mail *mail);

/** Takes the letter out whose turn it is, and its party, for kvf_mail_read(); NULL: none waits. */
kvf_mail_letter *kvf_mail_next(kvf_mail *mail, kvf_turn_party **party);

/** It was read, which was so much work beside that for any letter; frees it. Returns all that it was. */
uint64_t kvf_mail_read(kvf_mail *mail, kvf_turn_party *party, kvf_mail_letter *letter, uint64_t work);

void kvf_mail_close(kvf_mail *mail);

#endif
