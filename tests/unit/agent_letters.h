/*
 * For tests: loses messages between agents, keeps them back until they are delivered, or scrambles them by a seed. For
 * one thread.
 */
#ifndef KVF_TEST_AGENT_LETTERS_H
#define KVF_TEST_AGENT_LETTERS_H

#include <kvferry/agent.h>

#include "link/link.h"

typedef enum letters_fate {
    LETTERS_PASS = 0,
    LETTERS_LOSE,
    LETTERS_KEEP,  /**< kept back until letters_deliver() */
    LETTERS_TWICE, /**< sent twice */
} letters_fate;

/** Links whose messages can be watched, over the links `from`; NULL: ZeroMQ's. The same table must be used while agents
 * are open. */
const kvf_link_table *letters_link(const kvf_link_table *from);

/** Begins to watch messages: all of them pass. */
void letters_begin(void);
/** Messages pass again; those kept back are lost. */
void letters_end(void);

/** A rule for messages of a kind from now on. `call`: the kind of a CALL or ANSWER; 0: any. `from`: the sender; NULL:
 * any. */
void letters_rule(letters_fate fate, const kvf_agent *from, kvf_message_kind kind, kvf_call_kind call);
/** Forgets all rules; messages that were kept back stay so. */
void letters_no_rules(void);

/** How many messages are kept back now, and how many a rule has met so far. */
uint32_t letters_kept(void);
uint32_t letters_met(void);

/** Sends the messages that were kept back, in their order; rules do not apply to them. */
void letters_deliver(void);
/** The same, and keeps them to deliver them again. */
void letters_deliver_copies(void);

/** From now on these percentages of messages are lost, sent twice, or overtaken by some others. */
void letters_scramble(uint64_t seed, uint32_t lost, uint32_t twice, uint32_t late);

#endif
