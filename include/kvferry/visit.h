/*
 * Looking at a running engine from outside: who it is, and in what shape.
 *
 * A visitor is no engine. It learns what every engine that meets this one learns first: the facts of the model,
 * and the introductions of all ranks (names, endpoints, public keys, shards). It opens no session, gets no card,
 * and can touch no memory. With two visits, or one and a shape, plans can be made as the engines would make them:
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

/** What was learnt of an engine. Immutable; any thread may read it. */
typedef struct kvf_visited kvf_visited;

typedef struct kvf_visit_options {
    size_t struct_size;     /**< sizeof(kvf_visit_options) */
    const char *public_key; /**< the visitor's own Z85 keys, see kvf_agent_make_keys(); NULL: no encryption */
    const char *secret_key;
    uint64_t timeout_ns; /**< gives up after so long; 0: 5 s */
    /** Further greetings once the engine is known, one after the other, to measure how far it is: 0 to 1000. See
     * kvf_visited_round_trips(). */
    uint32_t greetings;
} kvf_visit_options;

/**
 * Visits an engine at its contact, and waits until it is known. An agent that waits for its siblings'
 * introductions, or a directory that knows none yet, is asked again until the time is over.
 *
 * @param contact  `engine` may be NULL: whoever answers there
 * @param options  NULL for the defaults
 * @param out      receives what was learnt, owned by the caller, see kvf_visited_free()
 * @return KVF_OK; KVF_E_TIMEOUT (the detail has the last reason), KVF_E_PERMISSION (our key is not allowed, or
 *         only one side encrypts), KVF_E_MISMATCH (another engine answers, or its ranks contradict each
 *         other), KVF_E_UNSUPPORTED (another version of the protocol), KVF_E_PARSE (what came makes no sense),
 *         KVF_E_INVALID and KVF_E_RANGE (the contact or a key), KVF_E_IO, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_visit(const kvf_contact *contact, const kvf_visit_options *options, kvf_visited **out);

/** Frees it, and its engine; NULL is accepted. */
KVF_API void kvf_visited_free(kvf_visited *visited);

/**
 * The engine, owned by `visited`. Its model has all that engines must agree on, and not what each may choose:
 * its parts have granules of one unit and tensors of their own (see kvf_part_desc), whatever they have there.
 */
KVF_API const kvf_engine *kvf_visited_engine(const kvf_visited *visited);

/** The text of facts that engines must share to meet this one, `name: value` lines; owned by `visited`. */
KVF_API const char *kvf_visited_facts(const kvf_visited *visited);

/** The version of the protocol that the engine's agents speak. */
KVF_API uint32_t kvf_visited_protocol(const kvf_visited *visited);

/**
 * How long greetings took to be answered, in nanoseconds, in the order of asking. Only those whose answer is surely
 * theirs: messages that were lost, and their repetitions, leave gaps.
 *
 * @param count  receives how many there are: at most the `greetings` that were asked for
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
