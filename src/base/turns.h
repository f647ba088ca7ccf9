/*
 * Turns: whose it is where several parties want work done, and each may want more than there is time for.
 *
 * Work is counted in bytes, as if all of it were copying. A party may have so much of it in each of its turns. A piece of
 * work is done as a whole: what that takes beyond, the party pays in its next turns. The queue of parties goes on from
 * one call to the next, so nobody is always the first. So who wants little waits for little: a party that has had too
 * much is passed over until it has paid.
 *
 * Who owes more than a turn could pay it at once where nobody else waits, and what others ask for a moment later would
 * wait for the next large piece. So where an owner has rounds, between which it does other things, of all that owe one
 * pays a turn in each round: they leave as many rounds to others as they have had turns in one piece.
 */
#ifndef KVF_BASE_TURNS_H
#define KVF_BASE_TURNS_H

#include "base/base.h"

typedef struct kvf_turn_party kvf_turn_party;

/** A piece of work that waits. Zeroed: it does not. */
typedef struct kvf_turn_seat {
    kvf_turn_party *party; /**< whose turn it waits for; NULL: it does not wait */
    struct kvf_turn_seat *previous, *following;
} kvf_turn_seat;

/** Who wants work done. Zeroed but for turn_work, at first; must not go while one of its seats waits, or it does. */
struct kvf_turn_party {
    uint32_t turn_work; /**< that it may have done in a turn, at least 1 */
    int64_t credit;     /**< work that it may have done now; negative: that it has had beyond its turns */
    bool waiting;       /**< for a turn */
    kvf_turn_seat *first, *last; /**< what waits for it */
    kvf_turn_party *previous, *following;
};

/** Parties that wait for a turn. Zeroed: none does. */
typedef struct kvf_turns {
    kvf_turn_party *first, *last;
    uint64_t round;   /**< 0: there are none, and who owes pays as soon as nobody else waits */
    uint64_t paid_in; /**< the last round in which one paid */
} kvf_turns;

/** Another round: one of those that owe may pay a turn. */
void kvf_turns_begin_round(kvf_turns *turns);

/** Puts a seat last into the queue of a party, unless it waits already. */
void kvf_turns_wait(kvf_turns *turns, kvf_turn_party *party, kvf_turn_seat *seat);

/** Takes a seat out of its queue, if it is in one. */
void kvf_turns_stop_waiting(kvf_turn_seat *seat);

/** Takes out the seat whose turn it is, of that party; NULL: nobody waits, but for those that owe in this round. */
kvf_turn_seat *kvf_turns_next(kvf_turns *turns, kvf_turn_party **whose);

/** A party has had so much work done. */
void kvf_turns_spend(kvf_turn_party *party, uint64_t work);

/** Takes a party out of the queue, where none of its seats waits. */
void kvf_turns_leave(kvf_turns *turns, kvf_turn_party *party);

#endif
