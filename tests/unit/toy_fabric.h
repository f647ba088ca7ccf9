/*
 * A fabric of one thread in one process, as small as a fabric can be: it proves what CONTRIBUTING.md says about adding
 * a fabric. Endpoints find each other in a list, runs are copied one slice per turn, notifications wait in a ring.
 */
#ifndef TOY_FABRIC_H
#define TOY_FABRIC_H

#include "transport/transport.h"

/** For kvf_transport_open_over(). */
extern const kvf_fabric toy_fabric;

#endif
