/*
 * A peer that speaks the protocol by hand, over the virtual network, for tests of messages that no agent would send.
 */
#ifndef KVF_TEST_AGENT_SPEAKER_H
#define KVF_TEST_AGENT_SPEAKER_H

#include "agent_world.h"
#include "link/link.h"

typedef struct speaker {
    kvf_link *link;
    kvf_route route;
    char public_key[41], secret_key[41];
    const char *engine; /* the engine that it claims to be, as rank 0 of 1 */
    uint8_t secret[KVF_WIRE_SECRET_BYTES];
    uint64_t incarnation;
    uint8_t session[KVF_WIRE_SESSION_BYTES]; /* of the last WELCOME */
    uint8_t digest[KVF_WIRE_DIGEST_BYTES];   /* of the engine that it talks to */
    uint64_t number;                         /* of its last call */
    /* the last message */
    uint32_t letters; /* number of messages received */
    kvf_message_kind kind;
    kvf_call_kind call;
    kvf_status status;
    char detail[256];
    uint64_t generation, time_ns, sums;
    uint8_t replied; /* the first byte of the id of the command in a REPLY */
    uint32_t records;
    bool takes_flows; /* as in the answer to a JOIN */
    uint32_t first_rank, introductions;
    size_t facts_bytes;
    uint8_t card[1024];
    size_t card_bytes;
} speaker;

/** Connects to an agent, with its own key if `keyed`. Its secret follows from `seed`. */
void speaker_open(speaker *s, const kvf_agent *to, const char *engine, bool keyed, uint8_t seed);
/** Connects again, with the keys that it has; "": none. */
void speaker_reopen(speaker *s, const kvf_agent *to);
void speaker_close(speaker *s);

/** A HELLO for a session and a card, from a process of an engine of one rank. `to`: the digest of its engine. */
kvf_message speaker_hello(const char *engine, const uint8_t secret[KVF_WIRE_SECRET_BYTES],
                          const uint8_t to[KVF_WIRE_DIGEST_BYTES]);
void speaker_send(speaker *s, const kvf_message *message);
/** Sends a HELLO for a card, and waits for an answer. */
void speaker_greet(world *w, speaker *s);
/** Sends a call in a session, and waits for an answer, at most 200 ms. Whether one came. */
bool speaker_call(world *w, speaker *s, const uint8_t *session, kvf_call_body call);
/** Sends a command whose id begins with `id`, and waits for a reply, at most 200 ms. Whether one came. */
bool speaker_command(world *w, speaker *s, uint8_t id, const char *verb, uint64_t time_ns);
/** A JOIN with the memory of rank 0 of an engine. */
kvf_call_body speaker_join(const speaker *s, const kvf_agent *as, uint64_t generation,
                           kvf_wire_buffer *introduction);
void speaker_work(world *w, speaker *s);
/** Lets all agents work for a while. */
void speaker_run_for(world *w, speaker *s, uint64_t ns);

#endif
