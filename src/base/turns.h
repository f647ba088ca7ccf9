/*
 * Turns: shares work out among several parties, each of which may want more than there is time for.
 *
 * Work is counted in bytes, as if all of it were copying. In each turn a party may have `turn_work` of it. A piece of
 * work is done as a whole: a party that gets more than a turn by it pays for the rest with its next turns, in which it
 * is passed over. The queue of parties persists between calls, so that no party is always the first. So a party that
 * wants little waits for little.
 *
 * If no other party waits, a party that owes more than a turn could pay everything at once, and a request that comes a
 * moment later would wait for the next large piece. Therefore an owner that works in rounds, between which it does
 * other things, lets only one of the parties that owe pay one turn in each round: a piece of n turns leaves n rounds to
 * others.
 */
#ifndef KVF_BASE_TURNS_H
#define KVF_BASE_TURNS_H

#include "base/base.h"

typedef struct kvf_turn_party kvf_turn_party;

/** A piece of work that waits for a turn. Zeroed: it does not wait. */
typedef struct kvf_turn_seat {
    kvf_turn_party *party; /**< the party whose turn it waits for; NULL: it does not wait */
    struct kvf_turn_seat *previous, *following;
} kvf_turn_seat;

/** A party that wants work done. At first all but turn_work is zero. Must not be freed while it, or one of its seats,
 * waits. */
struct kvf_turn_party {
    uint32_t turn_work;          /**< work that it may have done in a turn, at least 1 */
    int64_t credit;              /**< work that it may have done now; negative: work that it owes */
    bool waiting;                /**< whether it waits for a turn */
    kvf_turn_seat *first, *last; /**< seats that wait for its turn */
    kvf_turn_party *previous, *following;
};

/** The parties that wait for a turn. Zeroed: none. */
typedef struct kvf_turns {
    kvf_turn_party *first, *last;
    uint64_t round;   /**< 0: there are no rounds, and parties that owe pay as soon as no other waits */
    uint64_t paid_in; /**< the last round in which a party paid */
} kvf_turns;

/** Begins another round, in which one of the parties that owe may pay a turn. */
void kvf_turns_begin_round(kvf_turns *turns);

/** Puts a seat at the end of a party's queue, unless it waits already. */
void kvf_turns_wait(kvf_turns *turns, kvf_turn_party *party, kvf_turn_seat *seat);

/** Takes a seat out of its queue, if it is in one. */
void kvf_turns_stop_waiting(kvf_turn_seat *seat);

/** Takes the seat whose turn it is out of its queue; `whose` receives its party. NULL: no party waits, except those
 * that owe in this round. */
kvf_turn_seat *kvf_turns_next(kvf_turns *turns, kvf_turn_party **whose);

/** Records that a party has had work done. */
void kvf_turns_spend(kvf_turn_party *party, uint64_t work);

/** Takes a party out of the queue, where none of its seats waits. */
void kvf_turns_leave(kvf_turns *turns, kvf_turn_party *party);

#endif
