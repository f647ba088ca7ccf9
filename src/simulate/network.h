/*
 * Messages between the agents of a simulation: a carrier (link/link.h) that delivers each after the latency of the
 * network. A connection breaks when the process at either end ends; its client tries again, as ZeroMQ's does. If the host
 * at either end is cut off, messages wait until it is reached again, and the connection breaks after a minute, as by
 * TCP's keepalive.
 */
#ifndef KVF_SIMULATE_NETWORK_H
#define KVF_SIMULATE_NETWORK_H

#include "link/link.h"
#include "simulate/world.h"

/** The link that is opened is that of `world->opening`; its options' clock is the world's. */
extern const kvf_link_table kvf_modelled_network;

#define KVF_NETWORK_KEEPS_NS (60 * KVF_SECOND) /* a connection to a host that is cut off */

/** A host is reached again: what waited is delivered. */
void kvf_network_resume(kvf_host *host);
/** A host was cut off for so long that its connections break. */
void kvf_network_break(kvf_host *host);

#endif
