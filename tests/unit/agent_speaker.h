/*
 * One who speaks the protocol by hand, over the virtual network: for tests of what an agent makes of messages
 * that no agent would send.
 */
#ifndef KVF_TEST_AGENT_SPEAKER_H
#define KVF_TEST_AGENT_SPEAKER_H

#include "agent_world.h"
#include "link/link.h"

typedef struct speaker {
    kvf_link *link;
    kvf_route route;
    char public_key[41], secret_key[41];
    const char *engine; /* that it says it is of, as rank 0 of 1 */
    uint8_t secret[KVF_WIRE_SECRET_BYTES];
    uint64_t incarnation;
    uint8_t session[KVF_WIRE_SESSION_BYTES]; /* of the last WELCOME */
    uint8_t digest[KVF_WIRE_DIGEST_BYTES];   /* of the engine it speaks to */
    uint64_t number;                         /* of its last call */
    /* what came last */
    uint32_t letters; /* so many came */
    kvf_message_kind kind;
    kvf_call_kind call;
    kvf_status status;
    char detail[256];
    uint64_t generation, sums;
    bool takes_flows; /* said in an answer to a JOIN */
    uint8_t card[1024];
    size_t card_bytes;
} speaker;

/** Connects to an agent, under a key of its own where `keyed`. Its secret follows from `seed`. */
void speaker_open(speaker *s, const kvf_agent *to, const char *engine, bool keyed, uint8_t seed);
/** The same under the keys that it has; "" are none. */
void speaker_reopen(speaker *s, const kvf_agent *to);
void speaker_close(speaker *s);

void speaker_send(speaker *s, const kvf_message *message);
/** Sends a HELLO for a card, and waits for what comes. */
void speaker_greet(world *w, speaker *s);
/** Sends a call in a session, and waits for an answer, at most 200 ms. Whether one came. */
bool speaker_call(world *w, speaker *s, const uint8_t *session, kvf_call_body call);
/** A JOIN with the memory of rank 0 of an engine. */
kvf_call_body speaker_join(const speaker *s, const kvf_agent *as, uint64_t generation,
                           kvf_wire_buffer *introduction);
void speaker_work(world *w, speaker *s);
/** Lets all work for a while. */
void speaker_run_for(world *w, speaker *s, uint64_t ns);

#endif
