/*
 * Which keys may speak for which engines, and which process speaks for a rank.
 *
 * Holds are counted and pushes written by the name of a rank, so two processes must not use one name. The first that
 * greets has the name. Another process gets it when the first does not answer a PROBE for the length of peer_timeout_ns,
 * or was forgotten, as some time after its connection has ended if nothing of it is left here.
 */
#ifndef KVF_AGENT_CLAIM_H
#define KVF_AGENT_CLAIM_H

#include "agent/session.h"

/** Takes the keys and grants of the options. KVF_E_INVALID, KVF_E_RANGE, KVF_E_NOMEM. */
kvf_status kvf_grants_take(kvf_agent *agent);
/** All keys that the options let connect; free with kvf_free(). `count` is how many. */
kvf_status kvf_grants_keys(const kvf_agent_options *options, const char ***keys, uint32_t *count);
void kvf_grants_free(kvf_agent *agent);

/**
 * Whether a process that greets may use the name it gives: it knows the secret of its incarnation, and its key was
 * granted the name.
 *
 * @param key  of the sender, NULL without encryption
 * @return KVF_OK, KVF_E_PERMISSION
 */
kvf_status kvf_claim_check(kvf_agent *agent, const uint8_t *key, const kvf_hello *hello);

/** Whether a sender may give commands: KVF_OK, KVF_E_PERMISSION. `key` is NULL without encryption. */
kvf_status kvf_claim_command(const kvf_agent *agent, const uint8_t *key);

/**
 * Whether the name is free for a process that is new here. Asks the process that has it whether it still lives.
 *
 * @return KVF_OK; KVF_E_AGAIN (not known yet); KVF_E_PERMISSION (another process has it, and lives)
 */
kvf_status kvf_claim_look(kvf_agent *agent, const kvf_hello *hello);

/** Gives a session its name; the session that had the name is retired. KVF_E_NOMEM. */
kvf_status kvf_claim_take(kvf_session *session);
void kvf_claim_drop(kvf_session *session);
/** Whether another process has the name of this session's by now. */
bool kvf_claim_has_passed(const kvf_session *session);

/** Tells the engine, by an event and in the log, that a process that spoke for a rank was refused; repeats for the same
 * rank and reason are held back for a while. */
void kvf_claim_tell(kvf_agent *agent, const char *engine, uint32_t rank, const char *detail);

#endif
