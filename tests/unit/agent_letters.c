#include "agent_letters.h"

#include "agent/agent.h"
#include "shapes.h"

typedef struct letter {
    kvf_link *link;
    kvf_route route;
    void *data;
    size_t bytes;
} letter;

typedef struct rule {
    letters_fate fate;
    const kvf_agent *from;
    kvf_message_kind kind;
    kvf_call_kind call;
} rule;

static letter kept[4096];
static uint32_t kept_count, met, rule_count;
static rule rules[16];
static const kvf_link_table *carrier; /* the table of the real links */
static bool watching;
static uint64_t random_state;
static uint32_t lost_percent, twice_percent, late_percent;

static uint32_t dice(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 11) % 100;
}

static void keep(letter one) {
    assert_true(kept_count < COUNT_OF(kept));
    void *copy = malloc(one.bytes ? one.bytes : 1);
    assert_non_null(copy);
    memcpy(copy, one.data, one.bytes);
    one.data = copy;
    kept[kept_count++] = one;
}

static void send_kept(uint32_t i, bool copy) {
    letter one = kept[i];
    (void)carrier->send(one.link, one.route, one.data, one.bytes);
    if (copy)
        return;
    kept_count--;
    memmove(&kept[i], &kept[i + 1], (kept_count - i) * sizeof *kept);
    free(one.data);
}

static letters_fate fate_by_rule(const letter *one) {
    kvf_message message = {0};
    letters_fate fate = LETTERS_PASS;
    if (kvf_wire_open((kvf_bytes){one->data, one->bytes}, &message) || kvf_wire_read(&message))
        return fate;
    kvf_call_kind call = message.kind == KVF_MESSAGE_CALL     ? message.call.kind
                         : message.kind == KVF_MESSAGE_ANSWER ? message.answer.kind
                                                              : (kvf_call_kind)0;
    for (uint32_t i = 0; i < rule_count; i++)
        if ((!rules[i].from || rules[i].from->link == one->link) && rules[i].kind == message.kind &&
            (!rules[i].call || rules[i].call == call))
            fate = rules[i].fate, met++;
    kvf_message_free(&message);
    return fate;
}

static letters_fate fate_by_dice(void) {
    uint32_t n = dice();
    if (n < lost_percent)
        return LETTERS_LOSE;
    if (n < lost_percent + twice_percent)
        return LETTERS_TWICE;
    return n < lost_percent + twice_percent + late_percent ? LETTERS_KEEP : LETTERS_PASS;
}

static kvf_status on_send(kvf_link *link, kvf_route route, const void *data, size_t bytes) {
    if (!watching)
        return carrier->send(link, route, data, bytes);
    letter one = {link, route, (void *)data, bytes};
    letters_fate fate = random_state ? fate_by_dice() : fate_by_rule(&one);
    if (fate == LETTERS_KEEP)
        keep(one);
    if (fate == LETTERS_PASS || fate == LETTERS_TWICE)
        (void)carrier->send(link, route, data, bytes);
    if (fate == LETTERS_TWICE)
        (void)carrier->send(link, route, data, bytes);
    while (random_state && kept_count > 0 && dice() < 40)
        send_kept(dice() % kept_count, false);
    return KVF_OK;
}

/* Agents with their own threads may be using the table, so it is written only if it changes, when no agent is open. */
const kvf_link_table *letters_link(const kvf_link_table *from) {
    static kvf_link_table watched;
    from = from ? from : &kvf_link_zmq;
    if (carrier == from && watched.send) /* threads of open agents may use it */
        return &watched;
    carrier = from;
    watched = *carrier;
    watched.send = on_send;
    return &watched;
}

void letters_begin(void) {
    letters_end();
    watching = true;
}

void letters_end(void) {
    watching = false;
    while (kept_count > 0)
        free(kept[--kept_count].data);
    random_state = 0;
    letters_no_rules();
    met = 0;
}

void letters_rule(letters_fate fate, const kvf_agent *from, kvf_message_kind kind, kvf_call_kind call) {
    assert_true(rule_count < COUNT_OF(rules));
    rules[rule_count++] = (rule){fate, from, kind, call};
}

void letters_no_rules(void) {
    rule_count = 0;
}

uint32_t letters_kept(void) {
    return kept_count;
}

uint32_t letters_met(void) {
    return met;
}

void letters_deliver(void) {
    while (kept_count > 0)
        send_kept(0, false);
}

void letters_deliver_copies(void) {
    for (uint32_t i = 0; i < kept_count; i++)
        send_kept(i, true);
}

void letters_scramble(uint64_t seed, uint32_t lost, uint32_t twice, uint32_t late) {
    random_state = seed * 0x9E3779B97F4A7C15u | 1;
    lost_percent = lost;
    twice_percent = twice;
    late_percent = late;
}
