/*
 * Visits over another link than ZeroMQ, for tests.
 */
#ifndef KVF_AGENT_VISIT_H
#define KVF_AGENT_VISIT_H

#include <kvferry/visit.h>

#include "link/link.h"

/** kvf_visit() over another link. */
kvf_status kvf_visit_over(const kvf_link_table *link, const kvf_contact *contact,
                          const kvf_visit_options *given, kvf_visited **out);

#endif
