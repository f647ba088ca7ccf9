/*
 * TCP connections over network links that may be down for a while.
 */
#ifndef KVF_BASE_TCP_H
#define KVF_BASE_TCP_H

#include "base/base.h"

/**
 * Makes TCP send waiting data within about a second after a network link is back; by default TCP waits about as long
 * again as the link was down. Needs Linux 6.15 or later; earlier kernels ignore it. TCP then also gives up after about
 * a quarter of a minute, unless kvf_tcp_try_for() or ZMQ_TCP_MAXRT sets for how long it tries.
 */
void kvf_tcp_try_often(int fd);

/** Sets for how long TCP waits for an acknowledgement of sent data before it gives the connection up. */
void kvf_tcp_try_for(int fd, uint32_t milliseconds);

/** How many bytes that came over a TCP connection its reader has received so far, or a few less; false: it is none, or
 * the kernel does not tell. */
bool kvf_tcp_count_received(int fd, uint64_t *bytes);

#endif
