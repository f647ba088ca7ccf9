/*
 * Device memory for a worker of the fault harness, from the stand-in for the CUDA driver (tests/fakes/fake_cuda.c),
 * whose devices are late and which refuses calls by a seed.
 */
#ifndef KVF_FAULTS_WORKER_DEVICES_H
#define KVF_FAULTS_WORKER_DEVICES_H

#include <kvferry/transport.h>

#include "chance.h"

/** Whether this build has code for devices and the loader finds the stand-in; does not start it. */
bool worker_devices_there(void);

/**
 * Allocates device memory, which stays until the process ends.
 *
 * @param seen  receives the address at which this process reads and writes it
 * @return KVF_OK; anything else: the detail says why
 */
kvf_status worker_devices_memory(uint32_t device, uint64_t bytes, kvf_memory *out, unsigned char **seen);

/** Now and then makes the next call of some function fail, and changes the delay of devices. */
void worker_devices_trouble(chance *dice);
/** Ends these faults. */
void worker_devices_calm(void);

#endif
