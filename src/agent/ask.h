/*
 * Commands over another link than ZeroMQ, for tests.
 */
#ifndef KVF_AGENT_ASK_H
#define KVF_AGENT_ASK_H

#include <kvferry/ask.h>

#include "link/link.h"

/** kvf_ask() over another link. */
kvf_status kvf_ask_over(const kvf_link_table *link, const kvf_contact *contact, const kvf_command *command,
                        const kvf_ask_options *given, kvf_asked **out);

#endif
