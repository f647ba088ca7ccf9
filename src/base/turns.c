#include "base/turns.h"

#include "base/list.h"

/* What it did not use of its last turn is gone, what it had beyond is not. */
static void begin_turn(kvf_turn_party *party) {
    party->credit = (party->credit < 0 ? party->credit : 0) + party->turn_work;
}

/* Whether it owes more than a turn, and has paid one in this round. */
static bool has_paid(const kvf_turns *turns, const kvf_turn_party *party) {
    return party->credit + party->turn_work <= 0 && turns->round && party->paid_in == turns->round;
}

/* Another turn, with which it may still owe. */
static void take_turn(const kvf_turns *turns, kvf_turn_party *party) {
    if (has_paid(turns, party))
        return;
    begin_turn(party);
    if (party->credit <= 0)
        party->paid_in = turns->round;
}

void kvf_turns_begin_round(kvf_turns *turns) {
    turns->round++;
}

void kvf_turns_wait(kvf_turns *turns, kvf_turn_party *party, kvf_turn_seat *seat) {
    if (seat->party)
        return;
    seat->party = party;
    KVF_QUEUE_ADD(party->first, party->last, seat);
    if (party->waiting)
        return;
    party->waiting = true;
    take_turn(turns, party);
    KVF_QUEUE_ADD(turns->first, turns->last, party);
}

void kvf_turns_stop_waiting(kvf_turn_seat *seat) {
    if (!seat->party)
        return;
    KVF_QUEUE_REMOVE(seat->party->first, seat->party->last, seat);
    seat->party = NULL;
}

kvf_turn_seat *kvf_turns_next(kvf_turns *turns, kvf_turn_party **whose) {
    const kvf_turn_party *paid = NULL; /* the first of those that have paid: where it comes again, all have */
    for (kvf_turn_party *party; (party = turns->first) && party != paid;) {
        kvf_turn_seat *seat = party->first;
        if (seat && party->credit > 0) {
            kvf_turns_stop_waiting(seat);
            *whose = party;
            return seat;
        }
        KVF_QUEUE_REMOVE(turns->first, turns->last, party);
        party->waiting = seat != NULL;
        if (!seat)
            continue;
        if (!has_paid(turns, party))
            paid = NULL;
        else if (!paid)
            paid = party;
        take_turn(turns, party);
        KVF_QUEUE_ADD(turns->first, turns->last, party);
    }
    return NULL;
}

void kvf_turns_spend(kvf_turn_party *party, uint64_t work) {
    party->credit -= (int64_t)work;
}

void kvf_turns_leave(kvf_turns *turns, kvf_turn_party *party) {
    KVF_ASSERT(!party->first);
    if (!party->waiting)
        return;
    KVF_QUEUE_REMOVE(turns->first, turns->last, party);
    party->waiting = false;
}
