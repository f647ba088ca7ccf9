/*
 * Giving commands to a running engine from outside, as an operator's program does: to drain it, to resume it, or to
 * have it hand a request to another engine.
 *
 * The program is not an engine. It visits the engine (see visit.h), asks every rank, and waits for their replies:
 *
 *   const kvf_command drain = {.struct_size = sizeof drain, .verb = KVF_COMMAND_DRAIN};
 *   kvf_ask(&contact, &drain, &options, &asked);
 *   if (kvf_asked_status(asked, &rank)) ...            // rank did not do it; kvf_asked_reply() says why
 *
 * A request moves by two commands, of which neither engine has to trust the other's word: the first engine is asked to
 * hand it over, the second to take it over, with what the first one replied.
 *
 * Agents take commands only from keys that have the right to give them (kvf_key_grant.commands), or, without keys, if
 * their engine says so (kvf_agent_options.local_commands). Each engine decides what it does: see KVF_EVENT_COMMAND.
 */
#ifndef KVFERRY_ASK_H
#define KVFERRY_ASK_H

#include <kvferry/visit.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The replies of an engine's ranks to a command. Immutable; any thread may read it. */
typedef struct kvf_asked kvf_asked;

typedef struct kvf_ask_options {
    size_t struct_size;     /**< sizeof(kvf_ask_options) */
    const char *public_key; /**< the program's own Z85 keys, see kvf_agent_make_keys(); NULL: no encryption */
    const char *secret_key;
    /** How long to wait for the engine's introductions, and after that for a first sign that a rank has got the command;
     * 0: 5 s each, UINT64_MAX: for ever. Once it has, the command's own deadline counts, unless nobody is there any more
     * for 5 s. */
    uint64_t timeout_ns;
} kvf_ask_options;

/** What one rank replied. Texts and records are owned by the kvf_asked. */
typedef struct kvf_asked_rank {
    size_t struct_size; /**< sizeof(kvf_asked_rank) */
    /** KVF_OK: done as asked. KVF_E_TIMEOUT: no reply, or the engine did not do it in time. KVF_E_PERMISSION: this key may
     * give no commands there. KVF_E_PEER_LOST: the rank ended before it had replied. Others are the engine's own. */
    kvf_status status;
    const char *detail; /**< a sentence; "" when there is nothing to say */
    const kvf_record *records;
    uint32_t record_count;
} kvf_asked_rank;

/**
 * Gives a command to every rank of an engine, and waits until all have replied finally or the time is over. Each rank
 * carries it out once, however often it must be sent. To stop waiting does not stop the engine.
 *
 * @param contact  where the engine is met; `engine` may be NULL: any engine that answers there
 * @param command  `deadline_ns` is how long the engine may take; 0: 60 s. At most 64 KiB with its records
 * @param options  NULL for the defaults
 * @param out      receives the replies, owned by the caller, see kvf_asked_free()
 * @return KVF_OK: the ranks were asked, and `out` has what each replied, also if that is that it did not do it. Otherwise
 *         as kvf_visit(); KVF_E_RANGE and KVF_E_INVALID (the command)
 */
KVF_API kvf_status kvf_ask(const kvf_contact *contact, const kvf_command *command,
                           const kvf_ask_options *options, kvf_asked **out);

/** Frees the replies; NULL is accepted. */
KVF_API void kvf_asked_free(kvf_asked *asked);

/** The name of the engine that was asked; owned by `asked`. */
KVF_API const char *kvf_asked_engine(const kvf_asked *asked);

KVF_API uint32_t kvf_asked_rank_count(const kvf_asked *asked);

/** KVF_OK if all ranks have done as asked; otherwise the status of the first that has not, whose number goes to `rank`
 * (which may be NULL). */
KVF_API kvf_status kvf_asked_status(const kvf_asked *asked, uint32_t *rank);

/**
 * What a rank replied.
 *
 * @param out  struct_size is set by the caller; the rest is filled in
 * @return KVF_OK, KVF_E_RANGE (no such rank), KVF_E_INVALID
 */
KVF_API kvf_status kvf_asked_reply(const kvf_asked *asked, uint32_t rank, kvf_asked_rank *out);

#ifdef __cplusplus
}
#endif

#endif
