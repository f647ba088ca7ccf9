/*
 * Expectations: being written to by a producer.
 */
#ifndef KVF_AGENT_EXPECT_H
#define KVF_AGENT_EXPECT_H

#include "agent/ticket.h"

/** The generation of an expectation, in messages. */
static inline uint64_t kvf_expect_generation(const kvf_asker *expect) {
    return expect->base.number | KVF_EXPECTATION;
}

/** The expectation with this generation, if producers may write it now; NULL: there is none. */
kvf_asker *kvf_expect_moving(const kvf_agent *agent, uint64_t generation);

/** Whether there was an expectation with this generation that has ended. */
bool kvf_expect_was(const kvf_agent *agent, uint64_t generation);

void kvf_expect_written(kvf_session *session, const kvf_call_body *call);

/** Whether a writer has stopped that says so, or no longer knows the expectation. If it has forgotten what it was
 * asked, maybe with its connection, earlier writes may still be on their way: then it is shut out. False: one is still
 * under way; its time limit decides. */
bool kvf_expect_has_stopped(const kvf_source *source);

#endif
