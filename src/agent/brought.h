/*
 * What packed writers have brought to an expectation, by layer. The stage counts the bytes of their flows once they are in
 * our blocks; a layer has arrived when each writer has brought as many as it gives of that layer.
 *
 * A writer is believed only about its own cells, which it could also fill with wrong bytes: one that sends a range in
 * several flows brings its own part of a layer early, and no other writer's. In one flow no range comes twice.
 */
#ifndef KVF_AGENT_BROUGHT_H
#define KVF_AGENT_BROUGHT_H

#include "agent/arrival.h"

/** A writer begins a packed flow to an expectation: from the first one on bytes are counted, if its layers are. If they
 * cannot be counted, nothing has arrived before the end. */
void kvf_brought_begin(kvf_asker *expect);

/** How many of the first layers of an expectation are there. */
uint32_t kvf_brought_layers(const kvf_ticket *ticket);

void kvf_brought_end(kvf_asker *expect); /**< counts no more, before the expectation is freed */

#endif
