/*
 * Three who speak to one agent, for tests of who may say what: the rightful peer, another one with a key that is allowed
 * too, and a stranger without one. The latter two know everything the rightful one knows but its keys: its
 * introduction, its session's id, its leases.
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

/** Opens P, D and the three; the rightful one has greeted. */
void rights_open(rights *s);
void rights_close(rights *s);

/** The open session of the rightful one at P; NULL: there is none. */
kvf_session *rights_session(const rights *s);

/** A call in the rightful session, by anybody. */
kvf_status rights_say(rights *s, speaker *by, kvf_call_body call);
/** The two others are told that there is no such session, and are counted. */
void rights_not_of_others(rights *s, kvf_call_body call);

kvf_call_body rights_acquire(const char *id);
kvf_call_body rights_expect(const char *id, uint64_t generation, const world_request *wanted);
/** P holds a request of 40 tokens, in blocks from 10 on. */
uint64_t rights_hold(rights *s, const char *id);
/** P pushes a request of 40 tokens, of which nothing is ready yet, and the rightful one expects it. */
uint64_t rights_push(rights *s, const char *id, uint64_t generation);

#endif
