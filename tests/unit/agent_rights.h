/*
 * Three peers that talk to one agent, for tests of which peer may say what: the rightful peer, another one with a key
 * that is also allowed, and a stranger without a key. The latter two know everything that the rightful peer knows
 * except its keys: its introduction, its session's id, its leases.
 */
#ifndef KVF_TEST_AGENT_RIGHTS_H
#define KVF_TEST_AGENT_RIGHTS_H

#include "agent/agent.h"
#include "agent_speaker.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define OPTIONS(...) (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), __VA_ARGS__})
#define RIGHTS_LEASE (10 * SECOND)

/** P lends and writes; `rightful` has a session with it, as engine X. */
typedef struct rights {
    world w;
    kvf_agent *p;
    speaker rightful, other, stranger;
    char p_public[41], p_secret[41], d_public[41], d_secret[41];
} rights;

/** Opens P, D and the three peers; the rightful one has greeted. */
void rights_open(rights *s);
/** The same, and P holds the request "a", on which the rightful peer has a lease. Returns the hold's ticket. */
uint64_t rights_open_leased(rights *s);
void rights_close(rights *s);

/** Opens P anew with these grants, and the rightful peer and the other, neither of which has greeted it. */
void rights_grant(rights *s, const kvf_key_grant *grants, uint32_t count);

/** The open session of the rightful peer at P; NULL: there is none. */
kvf_session *rights_session(const rights *s);

/** Makes a call in the rightful peer's session, from any of the peers. */
kvf_status rights_say(rights *s, speaker *by, kvf_call_body call);
/** Makes the call from the two others: they must be told that there is no such session, and be counted. */
void rights_not_of_others(rights *s, kvf_call_body call);

kvf_call_body rights_acquire(const char *id);
kvf_call_body rights_expect(const char *id, uint64_t generation, const world_request *wanted);
/** Lets P hold a request of 40 tokens, in blocks from 10 on. */
uint64_t rights_hold(rights *s, const char *id);
/** Lets P push a request of 40 tokens, of which nothing is ready yet; the rightful peer expects it. */
uint64_t rights_push(rights *s, const char *id, uint64_t generation);

#endif
