/*
 * Device memory for a worker of the fault harness. The stand-in for the CUDA driver (tests/fakes/fake_cuda.c) has
 * devices that are late and refuse calls by a seed. If the loader finds a real driver instead, the host cannot reach
 * the memory and has a copy (content_mirror), and the devices have no other faults than the processes that use them.
 */
#ifndef KVF_FAULTS_WORKER_DEVICES_H
#define KVF_FAULTS_WORKER_DEVICES_H

#include "chance.h"
#include "content.h"

/**
 * Whether this build has code for devices, and the loader finds the stand-in or a driver. Does not start it, because
 * the processes that use it are forked later.
 */
bool worker_devices_there(void);

/** Whether it is a real driver; after worker_devices_there(). */
bool worker_devices_are_real(void);

/**
 * Allocates device memory, zeroed, which stays until the process ends. All of it must be of one device.
 *
 * @param device  a number that no other process need have; there may be fewer devices
 * @param seen    receives the address at which this process reads and writes it, or its copy
 * @return KVF_OK; anything else: the detail says why
 */
kvf_status worker_devices_memory(uint32_t device, uint64_t bytes, kvf_memory *out, unsigned char **seen);

/** Moves bytes between the memory and its copies; ends the process if the driver refuses. NULL: there are no copies. */
const content_mirror *worker_devices_mirror(void);

/** Now and then makes the next call of some function fail, and changes the delay of devices; not of real ones. */
void worker_devices_trouble(chance *dice);
/** Ends these faults. */
void worker_devices_calm(void);

#endif
