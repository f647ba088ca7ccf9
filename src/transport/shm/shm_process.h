/*
 * Knowing another process of this machine: where its socket is, and that it is still the one it was,
 * although the kernel gives the numbers of dead processes to new ones.
 */
#ifndef KVF_TRANSPORT_SHM_PROCESS_H
#define KVF_TRANSPORT_SHM_PROCESS_H

#include "transport/neighbour.h"
#include "transport/shm/shm_wire.h"

/** The address of the socket with that name, and its length. */
socklen_t kvf_shm_socket_address(const unsigned char name[SHM_ID_BYTES], struct sockaddr_un *out);

/** When a process began, in ticks since the machine did; 0 when unknown. */
uint64_t kvf_shm_process_started(pid_t pid);

/** A descriptor that polls readable when the process has ended; -1 when the kernel has none. */
int kvf_shm_process_open(pid_t pid);

#endif
