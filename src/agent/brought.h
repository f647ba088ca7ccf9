/*
 * What packed writers have brought to an expectation, by layer. The stage counts the bytes of their flows once they are in
 * our blocks; a layer has arrived when as many have come as all writers together give.
 */
#ifndef KVF_AGENT_BROUGHT_H
#define KVF_AGENT_BROUGHT_H

#include "agent/arrival.h"

/** A writer begins a packed flow to an expectation: from the first one on bytes are counted, if its layers are. If they
 * cannot be counted, nothing has arrived before the end. */
void kvf_brought_begin(kvf_asker *expect);

/** How many of the first layers are there. */
uint32_t kvf_brought_layers(const kvf_ticket *expect);

void kvf_brought_end(kvf_asker *expect); /**< counts no more, before the expectation is freed */

#endif
