/*
 * Two hosts, for benchmarks over a network: this process is on one of them, the processes that it starts cross over to
 * the other. By default both are this machine, and the network is its loopback. With KVF_BENCH_SPACE, a file of a
 * network namespace, and KVF_BENCH_HOST, an address there, that namespace is the other host: scripts/bench-hosts makes
 * two with a link of a given rate. KVF_BENCH_DEVICE names UCX's device.
 *
 *     bench_hosts_find();
 *     bench_hosts_connect(&here, &there);
 *     if (fork() == 0)
 *         bench_hosts_cross();
 *
 * A failure in any of these functions ends the program.
 */
#ifndef BENCH_HOSTS_H
#define BENCH_HOSTS_H

#include <stdbool.h>
#include <stddef.h>

/** Reads the environment, and keeps UCX to the device between the hosts. Before UCX is opened. */
void bench_hosts_find(void);

/** Whether there are two; else both are this machine. */
bool bench_hosts_are_two(void);

/** Moves this process to the other host: sockets that it opens afterwards are there. */
void bench_hosts_cross(void);

/** A plain TCP connection: its end on this host, and its end on the other, which a process started later inherits. */
void bench_hosts_connect(int *here, int *there);

/** Sends or receives so many bytes. Receiving returns false if the connection has ended. */
void bench_hosts_send(int fd, const void *data, size_t bytes);
bool bench_hosts_receive(int fd, void *data, size_t bytes);

#endif
