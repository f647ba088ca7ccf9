/*
 * The fabric of a simulation: batches take as long as their bytes and runs need on the links of both ranks, and move
 * nothing.
 *
 * A rank has one link, which is full duplex. The flows that share one direction of it have equal shares, and a flow is
 * as fast as the smaller of its two shares; what it leaves of the other is not given to others. So the sum of flows is
 * never more than a link carries, and may be less where shares are unequal.
 *
 * If a host is cut off, its flows stand still. They go on if it is reached again soon; after some seconds the peer is
 * lost, as with a network card that has repeated a packet often enough.
 */
#ifndef KVF_SIMULATE_FABRIC_H
#define KVF_SIMULATE_FABRIC_H

#include "simulate/world.h"
#include "transport/transport.h"

/** The endpoint that is opened is that of the host of the agent that opens it, `world->opening` of the agent's clock. */
extern const kvf_fabric kvf_modelled_fabric;

#define KVF_FABRIC_REPEATS_NS (5 * KVF_SECOND) /* until a peer is lost that is not reached */

/** A host was cut off, or is reached again. */
void kvf_fabric_turn(kvf_host *host);

/** For how long one direction of a host's link has been in use, the busier one, since its agent was opened. */
uint64_t kvf_host_busy_ns(const kvf_host *host);

#endif
