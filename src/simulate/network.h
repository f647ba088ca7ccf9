/*
 * Messages between the agents of a simulation: a carrier (link/link.h) that delivers each after the latency of the
 * network. A connection breaks when the process at either end ends; its client tries again, as ZeroMQ's does.
 */
#ifndef KVF_SIMULATE_NETWORK_H
#define KVF_SIMULATE_NETWORK_H

#include "link/link.h"
#include "simulate/world.h"

/** The link that is opened is that of `world->opening`; its options' clock is the world's. */
extern const kvf_link_table kvf_modelled_network;

#endif
