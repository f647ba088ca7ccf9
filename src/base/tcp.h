/*
 * Connections by TCP over links that are down for a while.
 */
#ifndef KVF_BASE_TCP_H
#define KVF_BASE_TCP_H

#include "base/base.h"

/**
 * What a TCP connection waits with while its link is down goes out within about a second once that is back, and not
 * after about as long again as it was down. Kernels from Linux 6.15 on can do that; before, nothing changes. It also
 * lets TCP give up after a quarter of a minute, unless it was told for how long it is to try: kvf_tcp_try_for(), or
 * ZMQ_TCP_MAXRT.
 */
void kvf_tcp_try_often(int fd);

/** For how long TCP waits until what was sent is acknowledged, and then gives the connection up. */
void kvf_tcp_try_for(int fd, uint32_t milliseconds);

/** How many bytes that came over a TCP connection its reader has received so far, or a few less; false: it is none, or
 * the kernel does not tell. */
bool kvf_tcp_count_received(int fd, uint64_t *bytes);

#endif
