#include "base/turns.h"

#include "base/list.h"

/* Work that the party did not use in its last turn is forfeited; work beyond the turn stays owed. */
static void begin_turn(kvf_turn_party *party) {
    party->credit = (party->credit < 0 ? party->credit : 0) + party->turn_work;
}

/* Whether the party owes more than a turn. */
static bool owes(const kvf_turn_party *party) {
    return party->credit + party->turn_work <= 0;
}

/* Whether one of the parties that owe has paid in this round already; the others then must wait for the next. */
static bool was_paid(const kvf_turns *turns) {
    return turns->round && turns->paid_in == turns->round;
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
    if (!owes(party))
        begin_turn(party);
    KVF_QUEUE_ADD(turns->first, turns->last, party);
}

void kvf_turns_stop_waiting(kvf_turn_seat *seat) {
    if (!seat->party)
        return;
    KVF_QUEUE_REMOVE(seat->party->first, seat->party->last, seat);
    seat->party = NULL;
}

kvf_turn_seat *kvf_turns_next(kvf_turns *turns, kvf_turn_party **whose) {
    const kvf_turn_party *passed =
        NULL; /* the first that was passed over: when it comes again, all were passed over */
    for (kvf_turn_party *party; (party = turns->first) && party != passed;) {
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
        KVF_QUEUE_ADD(turns->first, turns->last, party);
        if (owes(party) && was_paid(turns)) {
            passed = passed ? passed : party;
            continue;
        }
        if (owes(party))
            turns->paid_in = turns->round;
        begin_turn(party);
        passed = NULL;
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
