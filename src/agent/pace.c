/*
 * Priorities and caps of transfers.
 *
 * While no moving ticket has a priority or a cap, transfers go by themselves, and this does nothing. Otherwise all are
 * checked once a round. A ticket with a cap saves up bytes over time, and its transfers are held and get the bytes that
 * were saved. A ticket of a lower priority than another that could move is held too, and gets a turn only after a long
 * wait. The others go by themselves.
 */
#include "agent/pace.h"
#include "agent/pull.h"
#include "agent/push.h"

#define LONGEST_WAIT (100 * KVF_MILLISECOND)
#define TURN_BYTES (1u << 20)
/* How much a cap allows at once, as time: at least LEAST_SAVED, unless the largest piece is less; at most MOST_SAVED,
 * which therefore limits how far a cap is exceeded. */
#define LEAST_SAVED (10 * KVF_MILLISECOND)
#define MOST_SAVED (20 * KVF_MILLISECOND)
#define LARGEST_PIECE (16u << 20)

/* ---- caps ------------------------------------------------------------------------------------ */

/* The bytes that a cap allows in a time. */
static uint64_t bytes_in(const kvf_pace *pace, uint64_t ns) {
    uint64_t product;
    if (!kvf_mul(pace->cap, ns, &product))
        return UINT64_MAX / KVF_SECOND; /* more than any memory moves until then */
    return product / KVF_SECOND;
}

static uint64_t least_piece(const kvf_pace *pace) {
    return kvf_max_u64(kvf_min_u64(bytes_in(pace, LEAST_SAVED), LARGEST_PIECE), 1);
}

/* Adds the bytes that were saved since the last count. */
static void save(kvf_pace *pace, uint64_t now) {
    uint64_t most = kvf_max_u64(bytes_in(pace, MOST_SAVED), 1), bytes = bytes_in(pace, now - pace->counted);
    if (bytes >= most - kvf_min_u64(pace->saved, most)) {
        pace->saved = most;
        pace->counted = now;
        return;
    }
    pace->saved += bytes;
    pace->counted += bytes * KVF_SECOND / pace->cap; /* the rest of the time gave no whole byte yet */
}

/* When enough bytes for a piece will be saved. */
static uint64_t saved_at(const kvf_pace *pace) {
    uint64_t wanted = least_piece(pace), missing = wanted > pace->saved ? wanted - pace->saved : 0;
    return pace->counted + missing * KVF_SECOND / pace->cap + 1;
}

static bool is_capped(const kvf_pace *pace) {
    return pace->cap && pace->saved < least_piece(pace);
}

/* ---- a round --------------------------------------------------------------------------------- */

/* State that all transfers of a round share. */
typedef struct pace_round {
    kvf_agent *agent;
    uint64_t now;
    int32_t top; /* the highest priority of those that could move */
    bool any;    /* one has a priority or a cap */
} pace_round;

typedef void (*carry_visitor)(pace_round *round, kvf_ticket *ticket, const kvf_carry *carry);

static void visit_all(pace_round *round, carry_visitor visit) {
    kvf_pull *pull;
    DL_FOREACH2(round->agent->moving_pulls, pull, moving_next) {
        visit(round, &pull->base, &pull->carry);
    }
    kvf_flow *flow;
    DL_FOREACH2(round->agent->moving_flows, flow, moving_next) {
        visit(round, &flow->push->base, &flow->carry);
    }
}

static void compare(pace_round *round, kvf_ticket *ticket, const kvf_carry *carry) {
    kvf_pace *pace = &ticket->pace;
    (void)carry;
    if (pace->cap)
        save(pace, round->now);
    if (!is_capped(pace) && pace->priority > round->top)
        round->top = pace->priority;
    round->any |= pace->cap || pace->priority;
    pace->transfers = 0;
}

static void give_budget(pace_round *round, kvf_ticket *ticket, const kvf_carry *carry) {
    kvf_pace *pace = &ticket->pace;
    (void)carry;
    pace->transfers++;
    pace->budget = !pace->cap ? UINT64_MAX : is_capped(pace) ? 0 : pace->saved;
    if (pace->priority >= round->top)
        return;
    bool has_waited = round->now - pace->moved >= LONGEST_WAIT;
    pace->budget = has_waited ? kvf_min_u64(pace->budget, TURN_BYTES) : 0;
}

static void wake_at(kvf_agent *agent, uint64_t when) {
    agent->pace_due = kvf_min_u64(agent->pace_due, when);
}

static void let_go(pace_round *round, kvf_ticket *ticket, const kvf_carry *carry) {
    kvf_pace *pace = &ticket->pace;
    bool held = pace->budget != UINT64_MAX;
    kvf_carry_hold(carry, held);
    uint64_t moved = held ? kvf_carry_advance(carry, pace->budget / pace->transfers) : 0;
    if (pace->budget > 0)
        pace->moved = round->now;
    pace->transfers--;
    if (held)
        pace->budget -= moved;
    pace->saved -= kvf_min_u64(pace->saved, moved);
    /* A ticket that has used up its cap lets others go first; a transfer that could not be submitted has ended. */
    if ((moved > 0 && (is_capped(pace) || carry->move)) || kvf_carry_status(carry) != KVF_IN_PROGRESS)
        round->agent->again = true;
    if (pace->priority < round->top)
        wake_at(round->agent, kvf_max_u64(pace->moved + LONGEST_WAIT, is_capped(pace) ? saved_at(pace) : 0));
    else if (is_capped(pace))
        wake_at(round->agent, saved_at(pace));
}

void kvf_pace_round(kvf_agent *agent, uint64_t now) {
    agent->pace_due = UINT64_MAX;
    if (!agent->paces)
        return;
    pace_round round = {.agent = agent, .now = now, .top = INT32_MIN};
    visit_all(&round, compare);
    visit_all(&round, give_budget);
    visit_all(&round, let_go);
    agent->paces = round.any;
}

bool kvf_pace_start(kvf_ticket *ticket) {
    kvf_agent *agent = ticket->agent;
    kvf_pace *pace = &ticket->pace;
    if (!pace->cap && !pace->priority && !agent->paces)
        return false;
    agent->paces = true;
    pace->moved = kvf_agent_now(agent);
    agent->again = true;
    return true;
}
