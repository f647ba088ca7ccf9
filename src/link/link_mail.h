/*
 * Letters that came over connections made to us, and wait until it is their sender's turn (base/turns.h).
 *
 * All who hold one key are one party; without keys, who is met over a connection is one, and all strangers together are
 * another, which has a quarter of a turn. Within it the connections of strangers take turns: one of them may be
 * somebody who comes for the first time, or comes back over a new connection, and is read after a letter of each of the
 * others. So whoever makes much work waits for it, and those who make little do not.
 *
 * Letters take room, of which no party has more than it leaves for all others, and no stranger more than it leaves for
 * the other strangers. What is beyond is dropped, as if it was lost on its way: who wants an answer asks again. So are
 * letters of a party of which much work waits already, where each is taken for as much as its last one was: what is
 * still to be done when it has gone is soon done.
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
#define KVF_MAIL_PARTIES                                                                                     \
    4096u /* that are told apart, half of them strangers; further ones are one stranger */
/* Work: what a party may have done in a turn, in a round of progress for all, and for a letter whatever is in it. */
#define KVF_MAIL_TURN_WORK (64u << 10)
#define KVF_MAIL_ROUND_WORK (4u << 20)
#define KVF_MAIL_LETTER_WORK (16u << 10)
/* What may wait of one party; but one letter always may. All 4096 ranks of a large engine may greet at once under one
 * key: each such letter is less than two of the least. */
#define KVF_MAIL_WAITING_WORK (128u << 20)

/* Of a key, or of a connection: 32 bytes of a key; or a route, and whether somebody is met over it. */
typedef struct kvf_mail_name {
    uint8_t bytes[KVF_KEY_BYTES];
} kvf_mail_name;

typedef struct kvf_mail_party {
    kvf_turn_party turn; /* first */
    kvf_mail_name name;
    bool is_stranger;
    uint64_t bytes;     /* that wait */
    uint64_t work;      /* that waits, as far as can be known */
    uint64_t last_work; /* what the last letter was */
    UT_hash_handle hh;
} kvf_mail_party;

/** A letter that waits. */
typedef struct kvf_mail_letter {
    kvf_turn_seat seat; /* first */
    kvf_mail_party *from;
    kvf_route route;
    uint64_t work; /* that it was taken for */
    bool keyed;
    uint8_t key[KVF_KEY_BYTES];
    zmq_msg_t message;
} kvf_mail_letter;

typedef struct kvf_mail {
    kvf_turns turns;
    kvf_mail_party *parties;      /* by name */
    uint32_t stranger_count;      /* of these */
    kvf_mail_party strangers;     /* together: waits for a turn while one of them does */
    kvf_turn_seat strangers_seat; /* by this */
    kvf_turns strangers_turns;    /* and then it is the turn of one of them, */
    kvf_mail_party crowd;         /* of whom those are one that are too many to be told apart */
    uint64_t bytes;               /* that wait */
    uint64_t dropped;             /* letters, so far */
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

/** Another round of progress begins: who owes work pays a turn of it in each. */
void kvf_mail_begin_round(kvf_mail *mail);

/** Takes the letter out whose turn it is, for kvf_mail_read(); NULL: none waits, but of those that owe. */
kvf_mail_letter *kvf_mail_next(kvf_mail *mail);

/** It was read, which was so much work beside that for any letter; frees it. Returns all that it was. */
uint64_t kvf_mail_read(kvf_mail *mail, kvf_mail_letter *letter, uint64_t work);

void kvf_mail_close(kvf_mail *mail);

#endif
