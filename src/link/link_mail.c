#include "link/link_mail.h"

/* A letter takes this beside its bytes. */
#define LETTER_BYTES 1024u

/* ---- parties --------------------------------------------------------------------------------- */

/* Those that want nothing now are forgotten, and what they owe. */
static void forget_idle(kvf_mail *mail) {
    kvf_mail_party *party, *next;
    HASH_ITER(hh, mail->parties, party, next) {
        if (party->turn.first)
            continue;
        kvf_turns_leave(&mail->turns, &party->turn);
        HASH_DEL(mail->parties, party);
        kvf_free(party);
    }
}

static kvf_mail_party *make_party(kvf_mail *mail, const uint8_t name[KVF_KEY_BYTES]) {
    if (HASH_COUNT(mail->parties) >= KVF_MAIL_PARTIES)
        forget_idle(mail);
    if (HASH_COUNT(mail->parties) >= KVF_MAIL_PARTIES)
        return &mail->strangers;
    kvf_mail_party *party = kvf_alloc0(1, sizeof *party);
    if (!party)
        return &mail->strangers;
    party->turn.turn_work = KVF_MAIL_TURN_WORK;
    memcpy(party->name, name, sizeof party->name);
    HASH_ADD(hh, mail->parties, name, sizeof party->name, party);
    if (party->hh.tbl)
        return party;
    kvf_free(party);
    return &mail->strangers;
}

static kvf_mail_party *party_of(kvf_mail *mail, kvf_route route, const uint8_t *key, bool known) {
    uint8_t name[KVF_KEY_BYTES] = {0};
    kvf_mail_party *party = NULL;
    if (!key && !known)
        return &mail->strangers;
    if (key)
        memcpy(name, key, sizeof name);
    else
        memcpy(name, &route, sizeof route);
    HASH_FIND(hh, mail->parties, name, sizeof name, party);
    return party ? party : make_party(mail, name);
}

/* ---- letters --------------------------------------------------------------------------------- */

static uint64_t bytes_of(kvf_mail_letter *letter) {
    return zmq_msg_size(&letter->message) + LETTER_BYTES;
}

static bool has_room(const kvf_mail *mail, const kvf_mail_party *party, uint64_t bytes) {
    uint64_t free = KVF_MAIL_BYTES - mail->bytes;
    if (party->turn.first && party->work + party->last_work > KVF_MAIL_WAITING_WORK)
        return false;
    return bytes <= free && party->bytes + bytes <= free - bytes;
}

/* Who gets no more room. */
static const char *describe(const kvf_mail *mail, const kvf_mail_party *party, const uint8_t *key) {
    if (party == &mail->strangers)
        return "over budget: strangers send more than is read of them";
    return key ? "over budget: the holders of a key send more than is read of them"
               : "over budget: a peer sends more than is read of it";
}

const char *kvf_mail_add(kvf_mail *mail, kvf_route route, const uint8_t *key, bool known,
                         zmq_msg_t *message) {
    kvf_mail_party *party = party_of(mail, route, key, known);
    uint64_t bytes = zmq_msg_size(message) + LETTER_BYTES;
    kvf_mail_letter *letter = has_room(mail, party, bytes) ? kvf_alloc0(1, sizeof *letter) : NULL;
    if (!letter) {
        mail->dropped++;
        return describe(mail, party, key);
    }
    letter->route = route;
    letter->work = party->last_work;
    letter->keyed = key != NULL;
    if (key)
        memcpy(letter->key, key, sizeof letter->key);
    (void)zmq_msg_init(&letter->message);
    (void)zmq_msg_move(&letter->message, message);
    kvf_turns_wait(&mail->turns, &party->turn, &letter->seat);
    party->bytes += bytes;
    party->work += letter->work;
    mail->bytes += bytes;
    return NULL;
}

bool kvf_mail_waits(const kvf_mail *mail) {
    return mail->bytes > 0;
}

kvf_mail_letter *kvf_mail_next(kvf_mail *mail, kvf_turn_party **party) {
    return (kvf_mail_letter *)kvf_turns_next(&mail->turns, party);
}

uint64_t kvf_mail_read(kvf_mail *mail, kvf_turn_party *party, kvf_mail_letter *letter, uint64_t work) {
    kvf_mail_party *whose = (kvf_mail_party *)party;
    uint64_t bytes = bytes_of(letter);
    work += KVF_MAIL_LETTER_WORK;
    whose->bytes -= bytes;
    whose->work -= letter->work;
    whose->last_work = work;
    mail->bytes -= bytes;
    kvf_turns_spend(party, work);
    (void)zmq_msg_close(&letter->message);
    kvf_free(letter);
    return work;
}

/* ---- opening and closing --------------------------------------------------------------------- */

void kvf_mail_open(kvf_mail *mail) {
    *mail = (kvf_mail){.strangers.turn.turn_work = KVF_MAIL_TURN_WORK / 4};
}

void kvf_mail_close(kvf_mail *mail) {
    kvf_turn_party *party;
    for (kvf_mail_letter *letter; (letter = kvf_mail_next(mail, &party));)
        (void)kvf_mail_read(mail, party, letter, 0);
    forget_idle(mail);
}
