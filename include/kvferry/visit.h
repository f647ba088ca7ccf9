/*
 * Looking at a running engine from outside: its name, its model and its shape.
 *
 * A visitor is not an engine. It learns what an engine learns first when it meets another: the facts of the model, and
 * the introductions of all ranks (names, endpoints, public keys, shards). It opens no session, gets no card, and can
 * touch no memory. With two visits, or one visit and a shape, a program can make the plans that the engines would make:
 *
 *   kvf_visit(&producer, NULL, &p);
 *   kvf_visit(&consumer, NULL, &d);
 *   kvf_plan_build(kvf_engine_shard(kvf_visited_engine(d), 0), kvf_visited_engine(p), NULL, &plan);
 */
#ifndef KVFERRY_VISIT_H
#define KVFERRY_VISIT_H

#include <kvferry/agent.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What a visit learned about an engine. Immutable; any thread may read it. */
typedef struct kvf_visited kvf_visited;

typedef struct kvf_visit_options {
    size_t struct_size;     /**< sizeof(kvf_visit_options) */
    const char *public_key; /**< the visitor's own Z85 keys, see kvf_agent_make_keys(); NULL: no encryption */
    const char *secret_key;
    /** Gives up after this time, and returns within another second; 0: 5 s. UINT64_MAX: never. */
    uint64_t timeout_ns;
    /** Further greetings once the engine is known, one after the other, to measure round trips: 0 to 1000. See
     * kvf_visited_round_trips(). */
    uint32_t greetings;
} kvf_visit_options;

/**
 * Visits an engine at its contact, and waits until the introductions of all ranks are known. An agent that waits for
 * its siblings' introductions, or a directory that has none yet, is asked again until the time is over.
 *
 * @param contact  `engine` may be NULL: any engine that answers there
 * @param options  NULL for the defaults
 * @param out      receives the result, owned by the caller, see kvf_visited_free()
 * @return KVF_OK; KVF_E_TIMEOUT (the detail has the last reason), KVF_E_PERMISSION (our key is not allowed, or
 *         only one side encrypts), KVF_E_MISMATCH (another engine answers, or its ranks contradict each
 *         other), KVF_E_UNSUPPORTED (another version of the protocol), KVF_E_PARSE (a malformed answer),
 *         KVF_E_INVALID and KVF_E_RANGE (the contact or a key), KVF_E_IO, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_visit(const kvf_contact *contact, const kvf_visit_options *options, kvf_visited **out);

/** Frees the result and its engine; NULL is accepted. */
KVF_API void kvf_visited_free(kvf_visited *visited);

/**
 * The engine, owned by `visited`. Its model has the fields that engines must agree on, but not those that each may
 * choose: every part has granules of one unit and a tensor of its own (see kvf_part_desc), whatever the engine itself
 * has.
 */
KVF_API const kvf_engine *kvf_visited_engine(const kvf_visited *visited);

/** The facts that another engine must share to meet this one, as `name: value` lines; owned by `visited`. */
KVF_API const char *kvf_visited_facts(const kvf_visited *visited);

/** The version of the protocol that the engine's agents speak. */
KVF_API uint32_t kvf_visited_protocol(const kvf_visited *visited);

/**
 * The round trips of the greetings, in nanoseconds, in order. Answers do not name their greeting, so each is matched by
 * their number: if a greeting is not answered for 5 s, it and those after it are left out.
 *
 * @param count  receives how many there are: at most `greetings` of the options
 * @return an array owned by `visited`
 */
KVF_API const uint64_t *kvf_visited_round_trips(const kvf_visited *visited, uint32_t *count);

/** Where a rank listens; owned by `visited`; NULL when there is no such rank. */
KVF_API const char *kvf_visited_endpoint(const kvf_visited *visited, uint32_t rank);

/** The public key of a rank; "" without encryption, NULL when there is no such rank; owned by `visited`. */
KVF_API const char *kvf_visited_public_key(const kvf_visited *visited, uint32_t rank);

#ifdef __cplusplus
}
#endif

#endif
