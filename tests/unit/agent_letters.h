/*
 * What happens to the messages between agents on their way, for tests: they are lost, kept back until they
 * are delivered, or scrambled by a seed. One thread.
 */
#ifndef KVF_TEST_AGENT_LETTERS_H
#define KVF_TEST_AGENT_LETTERS_H

#include <kvferry/agent.h>

#include "link/link.h"

typedef enum letters_fate {
    LETTERS_PASS = 0,
    LETTERS_LOSE,
    LETTERS_KEEP,  /**< until letters_deliver() */
    LETTERS_TWICE, /**< sent two times */
} letters_fate;

/** Links by which messages are sent that can be looked at; NULL: of ZeroMQ. */
const kvf_link_table *letters_link(const kvf_link_table *from);

/** Begins to look at messages: all of them pass. */
void letters_begin(void);
/** Messages pass again; those kept back are lost. */
void letters_end(void);

/** From now on, messages of a kind. `call`: of a CALL or ANSWER; 0 is any. `from`: NULL is anybody. */
void letters_rule(letters_fate fate, const kvf_agent *from, kvf_message_kind kind, kvf_call_kind call);
/** Forgets all rules; what is kept is still kept. */
void letters_no_rules(void);

/** How many are kept back now, and how many met a rule so far. */
uint32_t letters_kept(void);
uint32_t letters_met(void);

/** Sends those that were kept back, in the order they were sent in; rules do not apply to them. */
void letters_deliver(void);
/** The same, and keeps them to be delivered again. */
void letters_deliver_copies(void);

/** From now on so many of 100 messages are lost, sent twice, or late by some messages. */
void letters_scramble(uint64_t seed, uint32_t lost, uint32_t twice, uint32_t late);

#endif
