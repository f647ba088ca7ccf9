/*
 * Another process of this machine: the address of its socket, and whether it is still the same process, for the
 * kernel gives the numbers of dead processes to new ones.
 */
#ifndef KVF_TRANSPORT_SHM_PROCESS_H
#define KVF_TRANSPORT_SHM_PROCESS_H

#include "transport/neighbour.h"
#include "transport/shm/shm_wire.h"

/** Writes the address of the socket with that name; returns its length. */
socklen_t kvf_shm_socket_address(const unsigned char name[SHM_ID_BYTES], struct sockaddr_un *out);

/** When a process began, in ticks since the machine started; 0 if unknown. */
uint64_t kvf_shm_process_started(pid_t pid);

/** A descriptor that becomes readable when the process ends; -1 if the kernel gives none. */
int kvf_shm_process_open(pid_t pid);

#endif
