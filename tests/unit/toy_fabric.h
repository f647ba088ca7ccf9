/*
 * A fabric of one thread in one process, as small as a fabric can be: it proves what CONTRIBUTING.md says of
 * adding one. Endpoints find each other in a list, runs are copied a slice a turn, notifications wait in a list.
 */
#ifndef TOY_FABRIC_H
#define TOY_FABRIC_H

/** From now on kvf_transport_open("toy") opens endpoints of the toy fabric. */
void toy_install(void);

#endif
