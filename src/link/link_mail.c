#include "link/link_mail.h"

/* The memory that a letter takes besides its bytes. */
#define LETTER_BYTES 1024u

/* ---- parties --------------------------------------------------------------------------------- */

static void forget(kvf_mail *mail, kvf_mail_party *party) {
    kvf_turns_leave(party->is_stranger ? &mail->strangers_turns : &mail->turns, &party->turn);
    mail->stranger_count -= party->is_stranger;
    HASH_DEL(mail->parties, party);
    kvf_free(party);
}

/* Forgets parties without a waiting letter, and the work that they owe. */
static void forget_idle(kvf_mail *mail) {
    kvf_mail_party *party, *next;
    HASH_ITER(hh, mail->parties, party, next) {
        if (!party->turn.first)
            forget(mail, party);
    }
}

/* A stranger is forgotten with its last waiting letter, because the number of its route may be reused by another peer;
 * and so is one whose first letter was dropped. */
static void forget_idle_stranger(kvf_mail *mail, kvf_mail_party *party) {
    if (!party->turn.first && party != &mail->crowd)
        forget(mail, party);
}

static bool is_full(kvf_mail *mail, bool is_stranger) {
    if (is_stranger)
        return mail->stranger_count >= KVF_MAIL_PARTIES / 2;
    if (HASH_COUNT(mail->parties) >= KVF_MAIL_PARTIES)
        forget_idle(mail);
    return HASH_COUNT(mail->parties) >= KVF_MAIL_PARTIES;
}

static kvf_mail_party *make_party(kvf_mail *mail, const kvf_mail_name *name, bool is_stranger) {
    kvf_mail_party *party = is_full(mail, is_stranger) ? NULL : kvf_alloc0(1, sizeof *party);
    if (!party)
        return &mail->crowd;
    party->turn.turn_work = is_stranger ? KVF_MAIL_LETTER_WORK : KVF_MAIL_TURN_WORK;
    party->name = *name;
    party->is_stranger = is_stranger;
    HASH_ADD(hh, mail->parties, name, sizeof party->name, party);
    if (!party->hh.tbl) {
        kvf_free(party);
        return &mail->crowd;
    }
    mail->stranger_count += is_stranger;
    return party;
}

static kvf_mail_party *party_of(kvf_mail *mail, kvf_route route, const uint8_t *key, bool known) {
    kvf_mail_name name = {{0}};
    kvf_mail_party *party = NULL;
    if (key) {
        memcpy(name.bytes, key, sizeof name.bytes);
    } else {
        memcpy(name.bytes, &route, sizeof route);
        name.bytes[sizeof route] = known;
    }
    HASH_FIND(hh, mail->parties, &name, sizeof name, party);
    return party ? party : make_party(mail, &name, !key && !known);
}

/* ---- letters --------------------------------------------------------------------------------- */

static uint64_t bytes_of(kvf_mail_letter *letter) {
    return zmq_msg_size(&letter->message) + LETTER_BYTES;
}

static uint64_t less(uint64_t of, uint64_t taken) {
    return of - kvf_min_u64(of, taken);
}

/* All strangers together may have as much as one party; the unused part of that is free for each of them. */
static bool has_room(const kvf_mail *mail, const kvf_mail_party *party, uint64_t bytes, uint64_t work) {
    uint64_t free = KVF_MAIL_BYTES - mail->bytes;
    if (!party->is_stranger)
        return kvf_is_fair(party->bytes, bytes, free) &&
               (!party->turn.first || party->work + work <= KVF_MAIL_WAITING_WORK);
    const kvf_mail_party *all = &mail->strangers;
    return kvf_is_fair(party->bytes, bytes, less((free + all->bytes) / 2, all->bytes)) &&
           (!party->turn.first || kvf_is_fair(party->work, work, less(KVF_MAIL_WAITING_WORK, all->work)));
}

/* Says which party gets no more room. */
static const char *describe(const kvf_mail_party *party, const uint8_t *key) {
    if (party->is_stranger)
        return "over budget: strangers send more than is read from them";
    return key ? "over budget: the holders of a key send more than is read from them"
               : "over budget: a peer sends more than is read from it";
}

static void count(kvf_mail_party *party, uint64_t bytes, uint64_t work) {
    party->bytes += bytes;
    party->work += work;
}

static void count_less(kvf_mail_party *party, uint64_t bytes, uint64_t work) {
    party->bytes -= bytes;
    party->work -= work;
}

const char *kvf_mail_add(kvf_mail *mail, kvf_route route, const uint8_t *key, bool known,
                         zmq_msg_t *message) {
    kvf_mail_party *party = party_of(mail, route, key, known);
    kvf_mail_party *all = party->is_stranger ? &mail->strangers : party;
    uint64_t bytes = zmq_msg_size(message) + LETTER_BYTES;
    uint64_t work = kvf_max_u64(all->last_work, KVF_MAIL_LETTER_WORK);
    kvf_mail_letter *letter = has_room(mail, party, bytes, work) ? kvf_alloc0(1, sizeof *letter) : NULL;
    if (!letter) {
        const char *why = describe(party, key);
        mail->dropped++;
        if (party->is_stranger)
            forget_idle_stranger(mail, party);
        return why;
    }
    letter->from = party;
    letter->route = route;
    letter->work = work;
    letter->keyed = key != NULL;
    if (key)
        memcpy(letter->key, key, sizeof letter->key);
    (void)zmq_msg_init(&letter->message);
    (void)zmq_msg_move(&letter->message, message);
    kvf_turns_wait(party->is_stranger ? &mail->strangers_turns : &mail->turns, &party->turn, &letter->seat);
    if (party->is_stranger) {
        kvf_turns_wait(&mail->turns, &mail->strangers.turn, &mail->strangers_seat);
        count(&mail->strangers, bytes, work);
    }
    count(party, bytes, work);
    mail->bytes += bytes;
    return NULL;
}

bool kvf_mail_waits(const kvf_mail *mail) {
    return mail->bytes > 0;
}

void kvf_mail_begin_round(kvf_mail *mail) {
    kvf_turns_begin_round(&mail->turns);
}

kvf_mail_letter *kvf_mail_next(kvf_mail *mail) {
    kvf_turn_party *party;
    kvf_turn_seat *seat = kvf_turns_next(&mail->turns, &party);
    if (seat == &mail->strangers_seat)
        seat = kvf_turns_next(&mail->strangers_turns, &party);
    return (kvf_mail_letter *)seat;
}

static void end_stranger_letter(kvf_mail *mail, kvf_mail_party *party) {
    if (mail->strangers.bytes > 0)
        kvf_turns_wait(&mail->turns, &mail->strangers.turn, &mail->strangers_seat);
    forget_idle_stranger(mail, party);
}

uint64_t kvf_mail_read(kvf_mail *mail, kvf_mail_letter *letter, uint64_t work) {
    kvf_mail_party *party = letter->from, *all = party->is_stranger ? &mail->strangers : party;
    uint64_t bytes = bytes_of(letter);
    work += KVF_MAIL_LETTER_WORK;
    count_less(party, bytes, letter->work);
    mail->bytes -= bytes;
    all->last_work = work;
    kvf_turns_spend(&party->turn, work);
    if (party->is_stranger) {
        count_less(all, bytes, letter->work);
        kvf_turns_spend(&all->turn, work);
        end_stranger_letter(mail, party);
    }
    (void)zmq_msg_close(&letter->message);
    kvf_free(letter);
    return work;
}

/* ---- opening and closing --------------------------------------------------------------------- */

void kvf_mail_open(kvf_mail *mail) {
    *mail = (kvf_mail){.strangers.turn.turn_work = KVF_MAIL_TURN_WORK / 4,
                       .crowd = {.turn.turn_work = KVF_MAIL_LETTER_WORK, .is_stranger = true}};
}

void kvf_mail_close(kvf_mail *mail) {
    while (kvf_mail_waits(mail)) {
        kvf_mail_letter *letter = kvf_mail_next(mail);
        if (letter)
            (void)kvf_mail_read(mail, letter, 0);
        else
            kvf_mail_begin_round(mail);
    }
    forget_idle(mail);
}
